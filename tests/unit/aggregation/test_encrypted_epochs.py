"""Steps of encrypted similarity over messages that are broken off, asked for twice or refused: they can be taken again, once, on record."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from loopback import ENTROPY, HOLDER, Loopback
from scenes import population
from small_runs import algorithm_on

pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")

from cflpriv.aggregation.key_holder import KeyHolderParty
from cflpriv.algorithms.pacfl import ClusterByAngles
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Message, Transcript
from cflpriv.federation import messages as m
from cflpriv.federation.server import ClientsLost, FederationServer, KeyHolderLost
from cflpriv.federation.settings import Settings
from cflpriv.federation.transport import OverBytes
from cflpriv.types import Population

LABELS = Protection(gram=("ckks",))
PLACE = 1000 + HOLDER


class Broken(Loopback):
    """A transport that breaks at the next messages of some stages, before or after these were delivered; it keeps what the holder heard."""

    def __init__(self, scene: Population, protection: Protection = LABELS) -> None:
        super().__init__(scene, protection)
        self.breaks: list[tuple[str, str]] = []
        self.asked: list[m.PartyRequest] = []
        self.answers: list[bytes] = []

    def exchange(self, requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        how = next((how for name, how in self.breaks if name == stage), "")
        self.breaks = [one for one in self.breaks if one != (stage, how)]
        if how == "before":
            raise OSError("connection reset")
        answers = super().exchange(requests, stage)
        if PLACE in answers and stage != "enrol":
            self.asked.append(m.decode_ask(requests[PLACE]))
            self.answers.append(answers[PLACE])
        if how == "after":
            raise OSError("connection reset")
        return {} if how == "lost" else answers


def broken(scene: Population, absent: set[int], protection: Protection = LABELS) -> tuple[Broken, FederationServer]:
    """A federation that some clients will join later."""
    transport = Broken(scene, protection)
    transport.dead = set(absent)
    fed = FederationServer(
        OverBytes(transport), protection=protection, roster=transport.roster, entropy=ENTROPY, seed=1, transcript=Transcript("full")
    )  # fmt: skip
    fed.enrol()
    transport.dead = set()
    return transport, fed


def said(fed: FederationServer, kind: str) -> list[Message]:
    return [one for one in fed.transcript.messages if one.operation == "gram" and one.kind == kind]


# --- steps that are taken again


@pytest.mark.parametrize(
    ("stage", "how"),
    [("gram", "before"), ("gram", "after"), ("ckks decrypt", "before"), ("ckks decrypt", "after"), ("ckks finish", "before"),
     ("ckks finish", "after"), ("ckks finish", "lost")],
)  # fmt: skip
@pytest.mark.parametrize("release", ["labels", pytest.param("gram", marks=pytest.mark.slow)])
def test_newcomers_are_admitted_after_a_step_that_broke_off_anywhere(stage: str, how: str, release: Any) -> None:
    scene = population(clients_per_group=4)
    transport, fed = broken(scene, {3, 7}, Protection(gram=("ckks",), ckks_release=release))
    made = algorithm_on(scene, "pacfl", cut="silhouette")
    state = made.init(fed)
    fed.begin_round(0)
    transport.breaks = [(stage, how)]
    with pytest.raises((OSError, KeyHolderLost)):
        made.admit(fed, state, [3, 7])
    fed.begin_round(1)
    uploads = len(said(fed, "signature"))
    state, _ = made.admit(fed, state, [3, 7])
    truth = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    assert len({(state.clustering[client], truth[client]) for client in range(8)}) == state.clustering.k == 2
    assert len(said(fed, "signature")) - uploads == (stage != "ckks finish"), "what the holder has, nobody sends again"
    assert not fed.refusals


def test_others_than_those_of_a_step_that_the_holder_ended_are_refused_and_these_still_come() -> None:
    scene = population(clients_per_group=4)
    transport, fed = broken(scene, {3, 7})
    made = algorithm_on(scene, "pacfl", cut="silhouette")
    state = made.init(fed)
    fed.begin_round(0)
    transport.breaks = [("ckks finish", "lost")]
    with pytest.raises(KeyHolderLost):
        made.admit(fed, state, [3])
    fed.begin_round(1)
    step = fed.epochs.of(state.groupings.held).session.steps
    ask = m.Finish(fed.session, fed.epochs.of(state.groupings.held).number, step, (7,), b"")
    with pytest.raises(KeyHolderLost, match="replay"):
        fed._registry.ask_holder(ask, "another")
    state, _ = made.admit(fed, state, [3])
    state, _ = made.admit(fed, state, [7])
    assert state.clustering.clients == (0, 1, 2, 4, 5, 6, 3, 7)
    assert set(state.clustering.labels) == {0, 1}


def asked_of(transport: Broken, ask: m.PartyRequest) -> m.Answer:
    """What the holder answers, in a process of its own."""
    assert transport.holder is not None
    settings = Settings(transport.holder, transport.protection, transport.roster, role="key-holder")
    return m.decode_answer(KeyHolderParty(settings, transport.stores[HOLDER], ENTROPY).receive(m.encode(ask)))


def test_the_key_holder_says_its_last_answer_again_to_the_same_bytes_and_to_no_others() -> None:
    scene = population(clients_per_group=3)
    transport, fed = broken(scene, {5})
    made = algorithm_on(scene, "pacfl", cut="silhouette")
    state = made.init(fed)
    first, answer = transport.asked[-1], transport.answers[-1]
    assert isinstance(first, m.Finish)
    store = transport.stores[HOLDER]
    before = {name: store.get(name) for name in store.names()}
    assert m.encode(asked_of(transport, first)) == answer
    assert {name: store.get(name) for name in store.names()} == before
    for other in ({"clients": first.clients[:-1]}, {"then": first.then + b" "}, {"clients": ()}):
        assert asked_of(transport, msgspec.structs.replace(first, **other)) == m.Refused("replay")
    assert asked_of(transport, msgspec.structs.replace(first, step=1)) == m.Refused("not-held"), "nothing was decrypted for it"
    fed.begin_round(0)
    made.admit(fed, state, [5])
    assert asked_of(transport, first) == m.Refused("replay"), "it is not the last one any more"


@pytest.mark.parametrize("how", ["before", "after", "lost"])
def test_a_step_without_newcomers_is_taken_again_too(how: str) -> None:
    scene = population(clients_per_group=3)
    transport, fed = broken(scene, {5})
    made = algorithm_on(scene, "pacfl", cut="silhouette")
    state = made.init(fed)
    transport.breaks = [("ckks finish", how)]
    with pytest.raises((OSError, KeyHolderLost)):
        fed.gram(state.groupings.held, ClusterByAngles(k=2), against=state.groupings.held, on=())
    fed.begin_round(0)
    again = fed.gram(state.groupings.held, ClusterByAngles(k=2), against=state.groupings.held, on=())
    assert list(again.result["labels"]) == list(state.clustering.labels)
    state, _ = made.admit(fed, state, [5])
    assert state.clustering.clients[-1] == 5


def test_keys_of_an_epoch_that_is_opened_again_take_nothing_from_before() -> None:
    scene = population(clients_per_group=3)
    transport, fed = broken(scene, set())
    algorithm_on(scene, "pacfl", cut="silhouette").init(fed)
    keys, decrypt = transport.asked[:2]
    assert isinstance(keys, m.Keys)
    assert isinstance(decrypt, m.Decrypt)
    announced = asked_of(transport, m.Drop(fed.session, ())), asked_of(transport, keys)
    assert isinstance(announced[1], m.Stepped)
    assert m.encode(announced[1]) != transport.answers[0]
    assert asked_of(transport, decrypt) == m.Refused("bad-signature")
    assert asked_of(transport, msgspec.structs.replace(decrypt, enrolments=())) == m.Refused("bad-signature")


# --- what is on record


def test_what_the_key_holder_was_asked_is_on_record_also_where_it_gave_no_answer() -> None:
    scene = population(clients_per_group=3)
    transport, fed = broken(scene, set())
    transport.breaks = [("ckks decrypt", "lost")]
    with pytest.raises(KeyHolderLost):
        algorithm_on(scene, "pacfl", cut="silhouette").init(fed)
    (asked,) = [ask for ask in transport.asked if isinstance(ask, m.Decrypt)]
    assert sum(len(one.clients) for one in said(fed, "ckks request")) == len(asked.requests)
    with pytest.raises(KeyHolderLost):  # it is known to be gone: nothing is sent, so nothing is written
        algorithm_on(scene, "pacfl", cut="silhouette").init(fed)
    assert len(said(fed, "ckks keys")) == 1


def test_keys_and_functions_are_on_record_as_they_were_asked_for_and_nothing_is_free() -> None:
    scene = population(clients_per_group=3)
    transport, fed = broken(scene, set())
    algorithm_on(scene, "pacfl", cut="silhouette").init(fed)
    for kind, which in (("ckks keys", m.Keys), ("ckks finish", m.Finish)):
        (message,) = said(fed, kind)
        assert message.payload is not None
        (asked,) = [ask for ask in transport.asked if isinstance(ask, which)]
        assert message.payload["bytes"].tobytes() == m.encode(asked)
        assert message.total_bytes == len(m.encode(asked))
    (result,) = said(fed, "result")
    assert (result.copies, result.total_bytes) == (1, result.bytes_each)
    assert result.total_bytes > 0


@pytest.mark.parametrize("sent", ["another's", "no upload", "another message"])
def test_what_a_refused_client_sent_is_on_record_and_what_it_was_sent(sent: str) -> None:
    scene = population(clients_per_group=3)
    transport, fed = broken(scene, set())
    transport.kill_at = {"gram": {4}}
    kept: dict[int, bytes] = {}
    value = m.Given((m.NamedArray("signature", np.eye(3)),), 0)

    def tamper(party: int, stage: str, data: bytes) -> bytes:
        kept[party] = data
        if stage != "gram" or party != 2:
            return data
        return {"another's": kept[1], "no upload": m.encode(value), "another message": m.encode(m.Acknowledged())}[sent]

    transport.tamper = tamper
    with pytest.raises(ClientsLost, match=r"\[2, 4\]"):
        algorithm_on(scene, "pacfl", cut="silhouette").init(fed)
    (uploads,), (key,) = said(fed, "signature"), said(fed, "ckks key")
    assert uploads.clients == (0, 1, 2, 3, 5)
    assert key.clients == (0, 1, 2, 3, 4, 5), "all who were asked: who did not answer may have read it"
    assert uploads.payload is not None
    length = int(uploads.payload["bytes.length"][2])
    came = uploads.payload["bytes"][2][:length].tobytes()
    if sent == "another's":
        first = uploads.payload["bytes"][1][: int(uploads.payload["bytes.length"][1])].tobytes()
        assert came == first
    else:
        assert came == m.encode(value if sent == "no upload" else m.Acknowledged())
    assert (2, "gram", "wrong-sender" if sent == "another's" else "malformed") in fed.refusals


@pytest.mark.parametrize(
    ("stage", "answer"), [("ckks keys", m.Acknowledged()), ("ckks decrypt", m.Stepped(b"")), ("ckks finish", m.Acknowledged())]
)
def test_an_answer_of_the_key_holder_that_is_refused_is_on_record(stage: str, answer: m.Answer) -> None:
    scene = population(clients_per_group=3)
    transport, fed = broken(scene, set())
    transport.tamper = lambda party, now, data: m.encode(answer) if now == stage else data
    with pytest.raises(KeyHolderLost):
        algorithm_on(scene, "pacfl", cut="silhouette").init(fed)
    (message,) = said(fed, "refused answer")
    assert (message.source, message.context["stage"]) == ("key-holder", stage)
    assert message.payload is not None
    assert message.payload["bytes"].tobytes() == m.encode(answer)
