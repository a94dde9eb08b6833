"""Comparison of shared vectors in a federation: the same clusters, who sees what, holders that are lost, what is refused by name."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from loopback import ENTROPY, HOLDER, Loopback, remote
from scenes import federation, population, training
from small_runs import algorithm_on

from cflpriv.aggregation import holder_party
from cflpriv.aggregation.share_holders import ShareHolderParty
from cflpriv.aggregation.shares import check_size
from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.pacfl import ClusterByAngles
from cflpriv.contract.operations import GramView
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Transcript
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.federation import messages as m
from cflpriv.federation.epochs import enter
from cflpriv.federation.server import ClientsLost, EpochEnded, FederationServer, KeyHolderLost
from cflpriv.federation.settings import Settings
from cflpriv.federation.store import DiskStore, MemoryStore
from cflpriv.federation.transport import OverBytes
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import RemoteError
from cflpriv.protocols.keys import Roster, seal
from cflpriv.protocols.shared_gram import GramTerms, depositing
from cflpriv.protocols.shared_gram.prime_field import uniform
from cflpriv.protocols.shared_gram.terms import GramContribution, decode, encode
from cflpriv.tasks.signatures import PrincipalVectors
from cflpriv.types import Population

SHARES = Protection(gram=("shares",))
FIVE = Protection(gram=("shares",), share_holders=5, share_colluding=1)
STAGES = ("shares keys", "shares deposits", "shares contributions", "shares open")


def labels(fed: FederationServer, made: Any) -> Any:
    return made.init(fed).clustering.labels


SYSTEMS: dict[str, tuple[dict[str, Any], int]] = {
    "pacfl": ({}, 0),
    "cfl": ({"eps1": 1.0001, "eps2": 1.0002, "settle": 0}, 2),
    "stocfl": ({"tau": 0.5}, 2),
    "one_shot": ({"k": 2}, 1),
    "flexcfl": ({"k": 2}, 1),
    "r_dpcfl": ({"k": 2}, 2),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_finds_the_clusters_of_one_process_in_the_clear(name: str) -> None:
    """With the default `share_bound`, under which updates and gradients that are not of unit norm fit."""
    options, rounds = SYSTEMS[name]
    scene, found = population(clients_per_group=3), []
    protection = Protection(gram=("shares",))
    for fed in (federation(scene, seed=1), federation(scene, protection, seed=1), remote(scene, protection)[1]):
        made = ALGORITHMS[name].make(training(scene), **options)
        state = made.init(fed)
        for number in range(rounds):
            fed.begin_round(number)
            state, _ = made.round(fed, state)
        found.append(tuple(made.describe(state)["clustering"].labels))
        assert not fed.refusals
    assert len(set(found)) == 1


@pytest.mark.slow
def test_one_holder_and_several_find_the_same_clusters() -> None:
    pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    scene = population(clients_per_group=3)
    protections = (Protection(gram=("ckks",)), SHARES, FIVE, Protection(gram=("shares",), share_holders=5, share_colluding=2))
    assert len({labels(remote(scene, one)[1], algorithm_on(scene, "pacfl")) for one in protections}) == 1


@pytest.mark.parametrize("gram", ["shares", pytest.param("ckks", marks=pytest.mark.slow)])
def test_a_client_lets_its_vectors_into_as_many_epochs_as_it_allows_and_sessions_do_not_refill_it(gram: str) -> None:
    if gram == "ckks":
        pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    scene, protection = population(clients_per_group=3), Protection(gram=(gram,), most_epochs=2)
    transport, fed = remote(scene, protection)

    def compared(fed: FederationServer) -> tuple[int, ...]:
        fed.begin_round(0)
        return np.shape(fed.gram(fed.compute(PrincipalVectors(3))["signature"], ClusterByAngles(k=2)).result["labels"])

    assert compared(fed) == compared(fed) == (6,)
    assert not fed.refusals
    again = FederationServer(
        OverBytes(transport), protection=protection, roster=transport.roster, entropy=public_entropy("another session"), seed=1
    )
    again.enrol()
    with pytest.raises(ClientsLost):
        compared(again)
    assert set(again.refusals) == {(one, "gram", "too-many-epochs") for one in range(6)}


def test_an_epoch_that_a_client_is_in_already_is_not_counted_again() -> None:
    store = MemoryStore()
    for session, number in ((b"a", 0), (b"a", 1), (b"a", 0), (b"b", 0), (b"b", 0)):
        enter(store, session, number, 3)
    with pytest.raises(RemoteError, match="too-many-epochs"):
        enter(store, b"b", 1, 3)
    enter(store, b"a", 1, 3)


def test_the_server_is_sent_labels_and_what_it_cannot_read() -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, SHARES)
    answers: list[tuple[int, m.Answer]] = []

    def listen(party: int, stage: str, data: bytes) -> bytes:
        answers.append((party, m.decode_answer(data)))
        return data

    transport.tamper = listen
    algorithm_on(scene, "pacfl").init(fed)
    (released,) = (one for _, one in answers if isinstance(one, m.HolderRelease))
    assert all(one.value.dtype.kind in "biu" for one in released.result)
    assert not released.evidence
    assert not released.blocks
    given = [one for _, answer in answers if isinstance(answer, m.Given) for one in answer.values]
    assert {(one.name, one.value.dtype.str) for one in given} == {("bytes", "|u1")}
    stepped = {(party, type(one).__name__) for party, one in answers if party <= HOLDER}
    assert (HOLDER, "Stepped") in stepped, "the lead announces its key"
    record = [(one.kind, one.source, one.target) for one in fed.transcript.messages if one.operation == "gram"]
    for stage in STAGES:
        assert (stage, "server", "key-holder") in record
    assert record.count(("contribution", "key-holder", "server")) == 2
    assert all(one.total_bytes > 0 for one in fed.transcript.messages)


def test_the_lead_sees_the_matrix_and_the_error_is_that_of_rounding() -> None:
    scene, seen = population(clients_per_group=2), []

    def look(view: GramView) -> tuple[dict[str, Any], dict[str, Any]]:
        seen.append((view.gram.matrix(), view.gram.error))
        return {}, {}

    made, clear = algorithm_on(scene, "pacfl"), federation(scene, seed=1)
    held = made.init(clear).groupings.held["signature"]
    clear.gram(held, look, against=held, on=())
    _, fed = remote(scene, SHARES)
    known = holder_party.then_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder_party, "then_of", lambda data: lambda view: (look(view), known(data)(view))[1])
        made.init(fed)
    (true, _), (got, error) = seen
    assert 0 < error < 1e-7
    assert np.abs(got - true).max() < 8 * error + 1e-6, "signatures are float32 in the clear"


@pytest.mark.slow
def test_newcomers_join_an_epoch_from_stores_on_disk(tmp_path: Path) -> None:
    scene = population(clients_per_group=3)
    found = []
    for protection, stores in ((Protection(), None), (SHARES, lambda party: DiskStore(tmp_path / str(party)))):
        transport = Loopback(scene, protection, stores)
        transport, fed = remote(scene, protection) if stores is None else served(transport)
        made = algorithm_on(scene, "pacfl")
        transport.dead = {5}
        fed.lose([5])
        state = made.init(fed)
        transport.dead = set()
        came = fed.begin_round(0)
        assert came == (5,)
        state, _ = made.admit(fed, state, came)
        found.append(state.clustering.labels)
        assert not fed.refusals
    assert found[0] == found[1]


def served(transport: Loopback) -> tuple[Loopback, FederationServer]:
    fed = FederationServer(
        OverBytes(transport), protection=transport.protection, roster=transport.roster, entropy=ENTROPY,
        transcript=Transcript("full"), seed=1,
    )  # fmt: skip
    fed.enrol()
    return transport, fed


# --- holders that are lost


@pytest.mark.parametrize("stage", STAGES[1:3])
def test_with_holders_to_spare_a_comparison_goes_on(stage: str) -> None:
    scene = population(clients_per_group=3)
    expected = labels(federation(scene, seed=1), algorithm_on(scene, "pacfl"))
    transport, fed = remote(scene, FIVE)
    transport.kill_at = {stage: {HOLDER - 1, HOLDER - 2}}
    assert labels(fed, algorithm_on(scene, "pacfl")) == expected


@pytest.mark.parametrize(("stage", "lost"), [*((stage, 1) for stage in STAGES[:3]), *((stage, 0) for stage in (*STAGES[:2], STAGES[3]))])
def test_without_enough_holders_it_ends_by_one_clear_line_and_can_be_taken_again(stage: str, lost: int) -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, SHARES)
    transport.kill_at = {stage: {HOLDER - lost}}
    with pytest.raises(KeyHolderLost) as ended:
        algorithm_on(scene, "pacfl").init(fed)
    assert "hold" in str(ended.value)
    assert stage in str(ended.value)
    assert "\n" not in str(ended.value)
    transport.dead.clear()
    fed.begin_round(0)
    assert labels(fed, algorithm_on(scene, "pacfl")) == labels(federation(scene, seed=1), algorithm_on(scene, "pacfl"))


def test_a_holder_that_computes_something_else_ends_the_step_by_word() -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, SHARES)

    def lie(party: int, stage: str, data: bytes) -> bytes:
        if stage != "shares contributions":
            return data
        answer = m.decode_answer(data)
        assert isinstance(answer, m.Stepped)
        return m.encode(m.Stepped(answer.message[:-1] + bytes([answer.message[-1] ^ 1])))

    transport.tamper = lie
    with pytest.raises(KeyHolderLost, match="malformed"):
        algorithm_on(scene, "pacfl").init(fed)


@pytest.mark.parametrize("code", ["malformed", "bad-signature", "other-contribution"])
def test_a_holder_whose_contribution_cannot_be_used_is_named_and_another_takes_its_place(code: str) -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, FIVE)
    liar, settings = HOLDER - 1, Settings(transport.others[HOLDER - 1], FIVE, transport.roster, role="key-holder")

    def lie(party: int, stage: str, data: bytes) -> bytes:
        if (party, stage) != (liar, "shares contributions"):
            return data
        answer = m.decode_answer(data)
        assert isinstance(answer, m.Stepped)
        machine = ShareHolderParty(settings, transport.stores[liar]).machine(fed.session, 0)
        signed = decode(answer.message, GramContribution, machine.terms)
        said = {
            "malformed": b"nonsense", "bad-signature": encode(msgspec.structs.replace(signed, signature=bytes(64))),
            "other-contribution": machine.contribute([0, 1], 1, (0, 1, 2)),
        }[code]  # fmt: skip
        return m.encode(m.Stepped(said))

    transport.tamper = lie
    assert labels(fed, algorithm_on(scene, "pacfl")) == labels(federation(scene, seed=1), algorithm_on(scene, "pacfl"))
    assert fed.refusals == [(liar, "shares contributions", code)]


def test_more_shares_than_a_message_carries_are_refused_before_anybody_shares() -> None:
    terms = GramTerms(bytes(16), 0, bytes(32), 1000, 3, 1, 3, 90_000, 1.0)
    check_size(terms, 800, 800)
    with pytest.raises(InputError, match=r"vectors \(3, 90000\) of 1000 clients are 2\.2 GB .* put \"sketch\" before"):
        check_size(terms, 1000, 1000)
    terms = GramTerms(bytes(16), 0, bytes(32), 3000, 3, 1, 6, 784, 1.0)
    check_size(terms, 1500, 1500)
    with pytest.raises(InputError, match=r"products of 2000 clients' vectors with those of 2000, 6 each, are 2\.3 GB to the first holder"):
        check_size(terms, 2000, 2000)


def check_left_out(fed: FederationServer, scene: Population, lost: int, stage: str) -> None:
    """The first comparison ends for one client, which the next is without."""
    made = algorithm_on(scene, "pacfl")
    with pytest.raises(ClientsLost, match=rf"\[{lost}\]"):
        made.init(fed)
    assert fed.refusals == [(lost, stage, "bad-deposit")]
    assert made.init(fed).clustering.clients == tuple(client for client in range(6) if client != lost)


@pytest.mark.parametrize("protection", [SHARES, FIVE])
def test_a_client_whose_deposit_nobody_can_open_is_left_out(protection: Protection, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = population(clients_per_group=3)
    _, fed = remote(scene, protection)
    parts, calls = protection.share_holders, iter(range(10**6))

    def sealed(key: bytes, plaintext: bytes, associated: bytes, entropy: Any) -> bytes:
        """The first client of the first comparison seals under no key that a holder has."""
        return seal(bytes(32) if next(calls) < parts else key, plaintext, associated, entropy)

    monkeypatch.setattr(depositing, "seal", sealed)
    check_left_out(fed, scene, 0, "shares deposits")


def test_a_client_whose_products_are_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = population(clients_per_group=3)
    _, fed = remote(scene, SHARES)
    honest, calls = depositing.shamir_shares, iter(range(10**6))

    def shared(values: Any, points: tuple[int, ...], colluding: int, key: bytes) -> dict[int, Any]:
        """The second client's shares are of no polynomial."""
        if next(calls) != 1:
            return honest(values, points, colluding, key)
        return {point: uniform(bytes([point]) * 32, values.shape) for point in points}

    monkeypatch.setattr(depositing, "shamir_shares", shared)
    check_left_out(fed, scene, 1, "shares open")


def begun_without(scene: Population, late: tuple[int, ...]) -> tuple[Loopback, FederationServer, Any, Any]:
    """A federation under shares whose clustering is found before some clients come."""
    transport, fed = remote(scene, SHARES)
    made = algorithm_on(scene, "pacfl")
    transport.dead = set(late)
    for client in late:
        fed.lose([client])
    state = made.init(fed)
    transport.dead.clear()
    assert fed.begin_round(0) == late
    return transport, fed, made, state


def test_a_newcomer_whose_comparison_was_cut_is_admitted_when_the_holders_are_back() -> None:
    """Its signature is computed again. Holders have multiplied its deposit, and replace it no more."""
    scene = population(clients_per_group=2)
    transport, fed, made, state = begun_without(scene, (3,))
    transport.kill_at = {"shares open": {HOLDER}}
    with pytest.raises(KeyHolderLost):
        made.admit(fed, state, (3,))
    transport.dead.clear()
    fed.begin_round(1)
    assert made.admit(fed, state, (3,))[0].clustering.clients == (0, 1, 2, 3)
    assert not fed.refusals


def test_a_newcomer_whose_products_are_wrong_does_not_keep_out_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = population(clients_per_group=3)
    honest = depositing.shamir_shares

    def shared(values: Any, points: tuple[int, ...], colluding: int, key: bytes) -> dict[int, Any]:
        """The last client's shares are of no polynomial."""
        if next(calls) != 2:
            return honest(values, points, colluding, key)
        return {point: uniform(bytes([point]) * 32, values.shape) for point in points}

    _, fed, made, state = begun_without(scene, (3, 4, 5))
    calls = iter(range(10**6))
    monkeypatch.setattr(depositing, "shamir_shares", shared)
    with pytest.raises(ClientsLost, match=r"\[5\]"):
        made.admit(fed, state, (3, 4, 5))
    assert made.admit(fed, state, (3, 4))[0].clustering.clients == (0, 1, 2, 3, 4)
    assert fed.refusals == [(5, "shares open", "bad-deposit")]


@pytest.mark.slow
def test_a_step_that_is_asked_for_again_gets_the_same_answer_and_no_other_step_is_run() -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, SHARES)
    asks: list[m.Open] = []
    exchange = transport.exchange

    def listen(requests: Any, stage: str) -> Any:
        asks.extend(one for one in map(m.decode_ask, requests.values()) if isinstance(one, m.Open))
        return exchange(requests, stage)

    transport.exchange = listen  # type: ignore[method-assign]
    algorithm_on(scene, "pacfl").init(fed)
    (ask,) = asks
    answers = [fed._registry.ask_holder(ask, "again") for _ in range(2)]
    others = fed._registry.ask_holder(msgspec.structs.replace(ask, contributors=(0, 1, 3), contributions=(b"", b"")), "with others")
    assert m.encode(answers[0]) == m.encode(answers[1]) == m.encode(others)
    for change in ({"then": b"{}"}, {"step": 5}):
        with pytest.raises(KeyHolderLost, match="replay"):
            fed._registry.ask_holder(msgspec.structs.replace(ask, **change), "other")
    ended = fed._registry.ask_holder(msgspec.structs.replace(ask, step=1, clients=(), contributors=(), contributions=()), "more")
    assert isinstance(ended, m.HolderRelease)
    with pytest.raises(KeyHolderLost, match="not-enrolled"):
        fed._registry.ask_holder(msgspec.structs.replace(ask, step=2), "the same clients")


def test_holders_forget_when_the_epoch_closes_and_an_epoch_ends_with_its_server() -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, SHARES)
    state = algorithm_on(scene, "pacfl").init(fed)
    assert all("epoch/0" in transport.stores[place].names() for place in transport.holders)
    (epoch,) = {one[1].number: one[1] for entries in fed.epochs.entered.values() for one in entries}.values()
    epoch.session = fed.epochs.make(0)
    held = state.groupings.held["signature"]
    with pytest.raises(EpochEnded):
        fed.gram(held, ClusterByAngles(), against=held, on=())
    fed.end()
    assert all("epoch/0" not in transport.stores[place].names() for place in transport.holders)


# --- who refuses what


@pytest.mark.parametrize(
    ("other", "code"),
    [(Protection(gram=("haar",)), "forbidden"), (Protection(gram=("shares",), share_bound=2.0), "forbidden"),
     (Protection(gram=("shares",), share_holders=5, share_colluding=2), "forbidden")],
)  # fmt: skip
def test_clients_and_holders_go_by_their_own_settings(other: Protection, code: str) -> None:
    scene = population(clients_per_group=2)
    transport, fed = remote(scene, SHARES)
    transport.protection = other
    with pytest.raises((KeyHolderLost, ClientsLost)):
        algorithm_on(scene, "pacfl").init(fed)
    assert code in {word for _, _, word in fed.refusals}


def test_a_client_checks_the_terms_that_it_is_shown() -> None:
    scene = population(clients_per_group=2)
    transport, fed = remote(scene, SHARES)
    exchange = transport.exchange

    def lie(requests: Any, stage: str) -> Any:
        changed = {}
        for place, data in requests.items():
            ask = m.decode_ask(data)
            if isinstance(ask, m.Give) and ask.epoch is not None:
                ask = msgspec.structs.replace(ask, epoch=m.EpochKey(ask.epoch.number, bytes(32), ask.epoch.announcement))
            changed[place] = m.encode(ask)
        return exchange(changed, stage)

    transport.exchange = lie  # type: ignore[method-assign]
    with pytest.raises(ClientsLost, match="did not answer"):
        algorithm_on(scene, "pacfl").init(fed)
    assert {code for _, stage, code in fed.refusals if stage == "gram"} == {"forbidden"}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"share_holders": 2}, r"share_holders = 2: expected an integer in \[3, 16\]"),
     ({"share_holders": 4, "share_colluding": 2}, "it takes 5 holders at least"),
     ({"share_holders": 99}, r"share_holders = 99: expected an integer in \[3, 16\]"),
     ({"share_colluding": 0}, "share_colluding = 0: expected an integer in "),
     ({"share_bound": 0.0}, "share_bound = 0.0: expected a number in "),
     ({"landmarks": 3}, "landmarks: 3 spares encrypted products"), ({"share_holders": 3.5}, "share_holders = 3.5: expected an integer")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_key_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Protection(gram=("shares",), **change)


def test_a_roster_of_other_holders_is_refused_by_name() -> None:
    scene = population(clients_per_group=2)
    transport = Loopback(scene, SHARES)
    transport.roster = Roster(transport.roster.keys, transport.roster.holder)
    with pytest.raises(InputError, match="share_holders: 3: the clients' pinned roster names 1 holders"):
        served(transport)


def test_long_vectors_are_refused_by_name_with_the_key_that_helps() -> None:
    scene = population(clients_per_group=3)
    fed = federation(scene, Protection(gram=("shares",), share_bound=0.5), seed=1)
    with pytest.raises(InputError, match=r"above protection\.share_bound = 0\.5, the public bound; raise it"):
        algorithm_on(scene, "pacfl").init(fed)


def test_a_run_under_shares_is_audited_without_a_key_holder(tmp_path: Path) -> None:
    config = parse_config({
        "data": {"clients": 4}, "model": {"name": "linear"}, "training": {"rounds": 1, "weights": "equal"},
        "algorithm": {"name": "pacfl"}, "protection": {"gram": ["shares"]}, "run": {"record": "full", "audit_parties": ["key-holder"]},
    })  # fmt: skip
    with pytest.raises(InputError, match="no holder has a key to write"):
        run_experiment(config, population=population(clients_per_group=2), out=tmp_path / "run")
