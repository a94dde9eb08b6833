"""Encrypted similarity over messages: a key holder apart, the same clusters, who sees what, who is lost, what is refused by word."""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import ENTROPY, HOLDER, Loopback, remote
from scenes import federation, population, training
from small_runs import algorithm_on

pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")

from checkout import ROOT

from cflpriv.aggregation.ckks_settings import CkksSettings
from cflpriv.aggregation.key_holder import KeyHolderParty
from cflpriv.algorithms import ALGORITHMS
from cflpriv.contract.operations import GramView
from cflpriv.contract.protection import Protection
from cflpriv.data import DataSpec, build_population
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation.epochs import Epoch
from cflpriv.federation.server import ClientsLost, EpochEnded, FederationServer, KeyHolderLost
from cflpriv.federation.settings import Settings
from cflpriv.federation.store import DiskStore, MemoryStore
from cflpriv.federation.task_encoding import known_functions, then_from_bytes, then_to_bytes
from cflpriv.federation.transport import OverBytes
from cflpriv.protocols import ckks
from cflpriv.protocols.codec import CHECKSUM_BYTES
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.tasks.training import Train

STAGES = ("ckks keys", "ckks decrypt", "ckks finish")
LABELS = Protection(gram=("ckks",))


def watched(transport: Loopback) -> list[tuple[int, m.Answer]]:
    """Everything that reaches the server, as it comes."""
    contributors: list[tuple[int, m.Answer]] = []

    def listen(party: int, stage: str, data: bytes) -> bytes:
        contributors.append((party, m.decode_answer(data)))
        return data

    transport.tamper = listen
    return contributors


@pytest.mark.slow
@pytest.mark.parametrize("release", ["labels", "distances", pytest.param("gram", marks=pytest.mark.slow)])
def test_the_same_clusters_of_digits_and_the_same_record_as_in_one_process(release: Any) -> None:
    scene = build_population(DataSpec(source="digits", clients=6, rotations=(0, 90)))
    made = ALGORITHMS["pacfl"].make(Train(Model("linear", scene.shape, scene.classes), lr=0.1), weights="equal")
    protection = Protection(gram=("ckks",), ckks_release=release)
    clear, local = federation(scene, seed=1), federation(scene, protection, seed=1)
    transport, fed = remote(scene, protection)
    contributors = watched(transport)
    states = [made.init(each) for each in (clear, local, fed)]
    assert states[0].clustering == states[1].clustering == states[2].clustering
    assert states[2].clustering.k == 2
    assert not fed.refusals
    kinds = [[(one.operation, one.kind, one.source, one.target, one.readers) for one in each.transcript.messages] for each in (local, fed)]
    asked = [("gram", kind, "server", "key-holder", ("server", "key-holder")) for kind in ("ckks keys", "ckks finish")]
    assert kinds[0] == kinds[1]
    assert [one for one in kinds[1] if one in asked] == asked, "what the key holder is asked is on record"
    assert all(one.total_bytes > 0 for one in fed.transcript.messages)
    (said,) = (answer for _, answer in contributors if isinstance(answer, m.HolderRelease))
    assert all(one.value.dtype.kind in "biu" for one in said.result)
    if release == "labels":
        assert states[2].evidence is None
        assert not said.evidence
    else:
        assert type(states[1].evidence["clients"]) is type(states[2].evidence["clients"])
        np.testing.assert_allclose(states[1].evidence["distance"], states[2].evidence["distance"], atol=1.0)  # degrees; noise near zero
    assert bool(said.blocks) == (release == "gram")
    if release != "gram":  # labels, and under "distances" those, are all the numbers that come; uploads are ciphertexts
        given = [one for party, answer in contributors if isinstance(answer, m.Given) for one in answer.values]
        assert {(one.name, one.value.dtype.str) for one in given} == {("bytes", "|u1")}


@pytest.mark.slow
def test_a_released_gram_is_the_true_one_within_the_stated_noise() -> None:
    scene = population(clients_per_group=2)
    protection = Protection(gram=("ckks",), ckks_release="gram")
    made, seen = algorithm_on(scene, "pacfl"), []

    def look(view: GramView) -> tuple[dict[str, Any], dict[str, Any]]:
        seen.append((view.gram.matrix(), view.gram.error))
        return {}, {}

    for fed in (federation(scene, seed=1), federation(scene, protection, seed=1), remote(scene, protection)[1]):
        held = made.init(fed).groupings.held["signature"]
        fed.gram(held, look, against=held, on=())
    (true, _), (local, std), (got, error) = seen
    assert std == error > 0
    upper = np.triu_indices(len(true))
    errors = (got - true)[upper] / error
    # 78 independent normals: rms 1 ± 5/√156 in all but 1 of 10^5 runs or more
    assert abs(np.sqrt(np.mean(errors**2)) - 1) < 5 / np.sqrt(2 * len(errors))
    assert np.abs(got - local).max() < 8 * np.sqrt(2) * error


SYSTEMS: dict[str, tuple[dict[str, Any], int, float]] = {
    "pacfl": ({}, 0, 1.0),
    "cfl": ({"eps1": 1.0001, "eps2": 1.0002, "settle": 0}, 2, 2.0),
    "stocfl": ({"tau": 0.5}, 2, 64.0),
    "one_shot": ({"k": 2}, 1, 64.0),
    "fesem": ({"k": 2}, 1, 64.0),
    "r_dpcfl": ({"k": 2, "rounds": 4}, 3, 64.0),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in ("cfl", "fesem") else name for name in SYSTEMS])
def test_every_system_that_compares_finds_the_clusters_of_one_process(name: str) -> None:
    options, rounds, bound = SYSTEMS[name]
    scene = population(clients_per_group=3)
    found = []
    for fed in (federation(scene, seed=1), remote(scene, Protection(gram=("ckks",), ckks_bound=bound))[1]):
        made = ALGORITHMS[name].make(training(scene), **options)
        state = made.init(fed)
        for number in range(rounds):
            fed.begin_round(number)
            state, _ = made.round(fed, state)
        found.append(tuple(made.describe(state)["clustering"].labels))
        assert not getattr(fed, "refusals", ())
    assert len(set(found)) == 1


def test_what_runs_at_the_key_holder_travels_and_comes_back_the_same() -> None:
    from cflpriv.algorithms.pacfl import ClusterByAngles, PlaceNewcomers

    assert {"pacfl.ClusterByAngles", "pacfl.PlaceNewcomers", "merging.PlaceInClusters", "merging.MergeClusters"} <= set(known_functions())
    for then in (ClusterByAngles("chordal", k=3), PlaceNewcomers(ClusterByAngles(beta=2.5))):
        assert then_from_bytes(then_to_bytes(then)) == then
    with pytest.raises(InputError, match="does not travel"):
        then_to_bytes(lambda view: ({}, {}))


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_get_a_word_from_the_key_holder_and_change_nothing(data: bytes) -> None:
    holder, store = Identity.create(0, ENTROPY), MemoryStore()
    party = KeyHolderParty(Settings(holder, LABELS, Roster((bytes(32),), holder.public()), role="key-holder"), store, ENTROPY)
    assert m.decode_answer(party.receive(data)) == m.Refused("malformed")
    assert not store


# --- newcomers, and who is lost


@pytest.mark.slow
@pytest.mark.parametrize("landmarks", [0, 3])
@pytest.mark.parametrize("release", ["labels", pytest.param("gram", marks=pytest.mark.slow)])
def test_newcomers_cost_their_own_rows_only(landmarks: int, release: Any) -> None:
    scene = population(clients_per_group=4)
    protection = Protection(gram=("ckks",), landmarks=landmarks, ckks_release=release, ckks_group=1)
    transport = Loopback(scene, protection)
    transport.dead = {3, 7}
    fed = FederationServer(OverBytes(transport), protection=protection, roster=transport.roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    made = algorithm_on(scene, "pacfl")
    state = made.init(fed)

    def requests() -> int:
        return sum(len(one.clients) for one in fed.transcript.messages if one.kind == "ckks request")

    before = requests()
    transport.dead = set()
    assert fed.begin_round(0) == (3, 7)
    state, _ = made.admit(fed, state, [3, 7])
    assert (before, requests() - before) == ((21, 15) if not landmarks else (15, 6))
    truth = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    clustering = state.clustering
    assert len({(clustering[client], truth[client]) for client in range(8)}) == clustering.k == 2
    fed.close(state.groupings.held)
    assert not [name for name in transport.stores[HOLDER].names() if name.startswith("epoch/")], "keys are dropped with the epoch"


@pytest.mark.parametrize("stage", ["gram", "ckks"])
def test_a_client_that_is_lost_is_named_and_the_step_is_taken_again(stage: str) -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, LABELS)
    made = algorithm_on(scene, "pacfl", k=2)
    transport.kill_at = {"gram" if stage == "gram" else "ckks decrypt": {4}}
    if stage == "gram":
        with pytest.raises(ClientsLost, match=r"\[4\]"):
            made.init(fed)
    state = made.init(fed)  # who leaves after its ciphertexts came is compared
    assert (4 in state.clustering.clients) == (stage == "ckks")
    transport.dead.clear()
    if stage == "gram":
        assert fed.begin_round(0) == (4,)
        transport.kill_at = {"gram": {4}}
        with pytest.raises(ClientsLost, match=r"\[4\]"):
            made.admit(fed, state, [4])
        transport.dead.clear()
        assert fed.begin_round(1) == (4,)
        state, _ = made.admit(fed, state, [4])
    assert state.clustering.clients[-1] == (4 if stage == "gram" else 5)
    assert len(set(state.clustering.labels)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_without_the_key_holder_the_step_ends_and_goes_on_when_it_is_back(stage: str) -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, LABELS)
    made = algorithm_on(scene, "pacfl")
    transport.kill_at = {stage: {HOLDER}}
    with pytest.raises(KeyHolderLost, match=f"the key holder did not answer \\({stage}\\)"):
        made.init(fed)
    assert fed.holder_missing
    with pytest.raises(KeyHolderLost):  # at once: nobody is waited for
        made.init(fed)
    transport.dead.clear()
    fed.begin_round(0)
    assert fed._registry.holder
    assert made.init(fed).clustering == made.init(federation(scene, seed=1)).clustering


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["ckks decrypt", "ckks finish"])
def test_newcomers_whose_step_was_broken_off_are_admitted_later(stage: str) -> None:
    """What was decrypted for the broken step is thrown away, and nothing of it was released."""
    scene = population(clients_per_group=4)
    transport = Loopback(scene, LABELS)
    transport.dead = {3, 7}
    fed = FederationServer(OverBytes(transport), protection=LABELS, roster=transport.roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    made = algorithm_on(scene, "pacfl")
    state = made.init(fed)
    transport.dead = set()
    fed.begin_round(0)
    transport.kill_at = {stage: {HOLDER}}
    with pytest.raises(KeyHolderLost):
        made.admit(fed, state, [3, 7])
    transport.dead.clear()
    fed.begin_round(1)
    state, _ = made.admit(fed, state, [3, 7])
    truth = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    assert len({(state.clustering[client], truth[client]) for client in range(8)}) == 2


@pytest.mark.slow
def test_a_restarted_server_has_no_ciphertexts_and_says_so() -> None:
    scene = population(clients_per_group=3)
    transport = Loopback(scene, LABELS)
    transport.dead = {5}
    fed = FederationServer(OverBytes(transport), protection=LABELS, roster=transport.roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    made, watching = (algorithm_on(scene, "crossfit", k=2, recheck_every=every) for every in (0, 1))
    state = watching.init(fed)
    again = FederationServer(OverBytes(transport), protection=LABELS, roster=transport.roster, entropy=ENTROPY, seed=1, session=fed.session)
    again.restore(fed.saved())
    epoch, key = fed.epochs.of(state.groupings.held), state.groupings.held.key
    again.know(key, fed.known(key))
    session: Any = again.epochs.make(epoch.number)
    session.restore(epoch.session.saved())
    again.epochs.enter(state.groupings.held, Epoch(epoch.number, session, list(epoch.clients), epoch.shape, {}))
    transport.dead = set()
    assert again.begin_round(0) == (0, 1, 2, 3, 4, 5)
    with pytest.raises(EpochEnded, match="restarted"):
        made.admit(again, state, [5])
    waiting, notes = watching.admit(again, state, [5])
    assert notes["placements"] == {"unplaced": [5]}
    waiting, record = watching.round(again, waiting)
    assert "placements" not in record.notes, "no check is due in the first round"
    again.begin_round(1)
    waiting, _ = watching.round(again, waiting)
    assert waiting.groupings.unplaced == ()
    truth = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    assert len({(waiting.clustering[client], truth[client]) for client in range(6)}) == 2
    assert made.init(again).clustering.clients == (0, 1, 2, 3, 4, 5)


# --- what is refused


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("where", ["ciphertext", "signature", "another's"])
def test_a_changed_ciphertext_is_refused_by_word_and_its_client_left_out(where: str) -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, LABELS)
    kept: dict[int, bytes] = {}

    def tamper(party: int, stage: str, data: bytes) -> bytes:
        if stage != "gram":
            return data
        answer = m.decode_answer(data)
        assert isinstance(answer, m.Given)
        kept[party] = upload = answer.values[0].value.tobytes()
        if party != 2:
            return data
        at = len(upload) // 3 if where == "ciphertext" else len(upload) - 40
        changed = kept[1] if where == "another's" else rechecked(flipped(upload, at))
        return m.encode(m.Given((m.NamedArray("bytes", np.frombuffer(changed, dtype=np.uint8)),), 0))

    transport.tamper = tamper
    made = algorithm_on(scene, "pacfl", k=2)
    with pytest.raises(ClientsLost, match=r"\[2\]"):
        made.init(fed)
    word = {"ciphertext": "bad-signature", "signature": "bad-signature", "another's": "wrong-sender"}[where]
    assert fed.refusals == [(2, "gram", word)]
    assert made.init(fed).clustering.clients == (0, 1, 3, 4, 5)


def rechecked(data: bytes) -> bytes:
    """With the checksum of the encoding put right again."""
    body = data[:-CHECKSUM_BYTES]
    return body + sha256(body).digest()[:CHECKSUM_BYTES]


class Between(Loopback):
    """A transport that may change what is asked of the key holder."""

    change: Any = staticmethod(lambda ask: ask)

    def exchange(self, requests: Any, stage: str) -> Any:
        place = 1000 + HOLDER
        changed = {place: m.encode(self.change(m.decode_ask(requests[place])))} if place in requests else {}
        return super().exchange({**requests, **changed}, stage)


def swapped(ask: m.PartyRequest) -> m.PartyRequest:
    """Two ciphertexts changed places: each signature is of another."""
    if not isinstance(ask, m.Decrypt):
        return ask
    return msgspec.structs.replace(ask, requests=(rechecked(flipped(ask.requests[0], len(ask.requests[0]) // 2)), *ask.requests[1:]))


def twice(ask: m.PartyRequest) -> m.PartyRequest:
    return msgspec.structs.replace(ask, requests=ask.requests + ask.requests[:1]) if isinstance(ask, m.Decrypt) else ask


def unnamed(ask: m.PartyRequest) -> m.PartyRequest:
    return msgspec.structs.replace(ask, enrolments=ask.enrolments[1:]) if isinstance(ask, m.Decrypt) else ask


def fewer(ask: m.PartyRequest) -> m.PartyRequest:
    return msgspec.structs.replace(ask, clients=ask.clients[1:]) if isinstance(ask, m.Finish) else ask


def other(ask: m.PartyRequest) -> m.PartyRequest:
    return msgspec.structs.replace(ask, then=b'{"":"os.system"}') if isinstance(ask, m.Finish) else ask


def late(ask: m.PartyRequest) -> m.PartyRequest:
    return msgspec.structs.replace(ask, step=ask.step + 1) if isinstance(ask, m.Decrypt | m.Finish) else ask


@pytest.mark.parametrize(
    ("change", "word"),
    [(swapped, "bad-signature"), (twice, "answered-before"), (unnamed, "not-enrolled"), (fewer, "not-enrolled"), (other, "unknown-task"),
     (late, "replay")],
)  # fmt: skip
def test_the_key_holder_refuses_by_word(change: Any, word: str) -> None:
    scene = population(clients_per_group=3)
    transport = Between(scene, LABELS)
    fed = FederationServer(OverBytes(transport), protection=LABELS, roster=transport.roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    transport.change = change
    with pytest.raises(KeyHolderLost, match=word):
        algorithm_on(scene, "pacfl").init(fed)
    assert fed.refusals[-1][2] == word
    assert not fed.holder_missing, "it is there, and refuses"
    transport.change = lambda ask: ask
    assert algorithm_on(scene, "pacfl").init(fed).clustering.k == 2


@pytest.mark.slow
def test_parties_refuse_another_release_than_their_own_settings_say() -> None:
    """A server that asks for the Gram where labels are agreed gets neither keys nor ciphertexts."""
    scene = population(clients_per_group=3)
    greedy = Protection(gram=("ckks",), ckks_release="gram")
    transport = Loopback(scene, LABELS)
    fed = FederationServer(OverBytes(transport), protection=greedy, roster=transport.roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    with pytest.raises(KeyHolderLost, match="forbidden"):
        algorithm_on(scene, "pacfl").init(fed)
    # with a key holder that goes along, the clients do not; nor do they take a key that is not the pinned holder's
    helpful = Identity.create(0, ENTROPY)
    for roster, protection, word in ((transport.roster, greedy, "forbidden"), (transport.roster, LABELS, "bad-signature")):
        fed = FederationServer(OverBytes(transport), protection=LABELS, roster=transport.roster, entropy=ENTROPY, seed=1)
        fed.enrol()
        held = algorithm_on(scene, "pacfl").init(fed).groupings.held
        ((part, _, shape),) = fed._known[held.key].layout.parts
        setup = CkksSettings.of(protection).setup(fed.session, 9, roster, *shape)
        key = ckks.KeyHolder(setup, helpful, bytes(32), roster).announcement
        give = m.Give(fed.session, "gram", fed._known[held.key].number, (part,), "", False, None, m.EpochKey(9, setup.digest, key))
        assert fed._ask({0: give}, "gram") == {}
        assert fed.refusals[-1][2] == word
        plain = m.Give(fed.session, "gram", fed._known[held.key].number, (part,), "", False)
        assert fed._ask({0: plain}, "gram") == {}
        assert fed.refusals[-1][2] == "forbidden"


def test_who_is_the_key_holder_is_pinned() -> None:
    scene = population(clients_per_group=3)
    transport = Loopback(scene, LABELS)
    roster = transport.roster
    transport.holder = Identity.create(0, ENTROPY)  # somebody else says it holds the keys
    transport.roster = Roster(roster.keys, transport.holder.public())
    fed = FederationServer(OverBytes(transport), protection=LABELS, roster=roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    assert fed.holder_missing
    assert fed.refusals == [(HOLDER, "enrol", "not-on-roster")]
    with pytest.raises(InputError, match="key of the key holder"):
        FederationServer(OverBytes(transport), protection=LABELS, roster=Roster(roster.keys))


# --- processes


RUN = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
from cflpriv.contract.protection import Protection
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.aggregation.key_holder import KeyHolderParty
from cflpriv.federation.settings import Settings
from cflpriv.federation.store import DiskStore
identity = Identity(0, bytes.fromhex({signing!r}), bytes.fromhex({encryption!r}))
settings = Settings(identity, Protection(gram=("ckks",)), Roster(tuple(map(bytes.fromhex, {keys!r})), identity.public()), role="key-holder")
sys.stdout.buffer.write(KeyHolderParty(settings, DiskStore({folder!r})).receive(sys.stdin.buffer.read()))
"""


class Processes(Loopback):
    """The key holder is a fresh process for each message, which has nothing but its folder."""

    folder = ""

    def exchange(self, requests: Any, stage: str) -> Any:
        answers = dict(super().exchange({place: data for place, data in requests.items() if place != 1000 + HOLDER}, stage))
        if 1000 + HOLDER in requests:
            assert self.holder is not None
            said = RUN.format(
                tests=str(ROOT / "tests" / "helpers"), root=str(ROOT), signing=self.holder.signing_seed.hex(), folder=self.folder,
                encryption=self.holder.encryption_seed.hex(), keys=[key.hex() for key in self.roster.keys],
            )  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-c", said], input=requests[1000 + HOLDER], stdout=subprocess.PIPE, check=True, timeout=60
            )
            answers[1000 + HOLDER] = done.stdout
        return answers


@pytest.mark.slow
def test_each_message_may_find_a_fresh_process(tmp_path: Path) -> None:
    scene = population(clients_per_group=3)
    transport = Processes(scene, LABELS, lambda party: DiskStore(tmp_path / str(party)))
    transport.folder = str(tmp_path / "holder")
    fed = FederationServer(OverBytes(transport), protection=LABELS, roster=transport.roster, seed=1)
    fed.enrol()
    state = algorithm_on(scene, "pacfl").init(fed)
    assert state.clustering == algorithm_on(scene, "pacfl").init(federation(scene, seed=1)).clustering
    assert not fed.refusals
    assert (tmp_path / "holder").stat().st_mode & 0o077 == 0
