"""A key holder or a server that lies, in encrypted similarity over messages; what is kept, for how long; products at the edges of slots."""

from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from loopback import ENTROPY, HOLDER, Loopback, RawArray, remote
from scenes import federation, population
from small_runs import algorithm_on

pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")

from cflpriv.aggregation.ckks_settings import CkksSettings
from cflpriv.algorithms.one_shot import ClusterByMeans, PlaceByMeans
from cflpriv.contract.operations import GramView
from cflpriv.contract.protection import Protection
from cflpriv.federation import messages as m
from cflpriv.federation.epochs import Epoch
from cflpriv.federation.server import ClientsLost, FederationServer, KeyHolderLost
from cflpriv.federation.task_encoding import check_small, fits, known_functions, then_to_bytes
from cflpriv.federation.transport import OverBytes
from cflpriv.federation.values import Values
from cflpriv.protocols import ckks
from cflpriv.protocols.keys import Roster
from cflpriv.tasks.signatures import PrincipalVectors
from cflpriv.types import Population

LABELS = Protection(gram=("ckks",))


def epochs_of(transport: Loopback) -> list[str]:
    return sorted(name for name in transport.stores[HOLDER].names() if name.partition("/")[0] in ("epoch", "pending"))


def without(scene: Population, absent: set[int], protection: Protection = LABELS) -> tuple[Loopback, FederationServer]:
    """A federation that some clients will join later."""
    transport = Loopback(scene, protection)
    transport.dead = absent
    fed = FederationServer(OverBytes(transport), protection=protection, roster=transport.roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    transport.dead = set()
    return transport, fed


def named(**values: Any) -> tuple[m.NamedArray, ...]:
    return tuple(m.NamedArray(name, np.asarray(value)) for name, value in values.items())


LIES: dict[str, tuple[str, m.Answer]] = {
    "real numbers": ("labels", m.HolderRelease(named(labels=np.ones(4) / 3), (), ())),
    "large numbers": ("labels", m.HolderRelease(named(labels=np.full(4, 1 << 63, dtype=np.uint64)), (), ())),
    "more than there are clients": ("labels", m.HolderRelease(named(labels=np.zeros(5, dtype=int)), (), ())),
    "bytes that are no array": ("labels", m.HolderRelease((m.NamedArray("labels", cast(Any, RawArray("<i8", (4,), b"short"))),), (), ())),
    "no labels": ("labels", m.HolderRelease(named(k=2, recut_changes=0), (), ())),
    "labels of clusters that cannot be": ("labels", m.HolderRelease(named(labels=[4], k=2, recut_changes=0), (), ())),
    "labels of nobody": ("labels", m.HolderRelease(named(labels=[-1], k=2, recut_changes=0), (), ())),
    "distances": ("labels", m.HolderRelease(named(labels=[0], k=2, recut_changes=0), named(distance=np.eye(4), clients=np.arange(4)), ())),
    "of other clients": (
        "distances",
        m.HolderRelease(named(labels=[0], k=2, recut_changes=0), named(distance=np.eye(4), clients=np.arange(4) + 1), ()),
    ),
    "not finite": (
        "distances",
        m.HolderRelease(named(labels=[0], k=2, recut_changes=0), named(distance=np.full((4, 4), np.nan), clients=np.arange(4)), ()),
    ),
    "nothing": ("gram", m.HolderRelease((), (), ())),
    "a pair of strangers": ("gram", m.HolderRelease((), (), ((98, 99, np.eye(3)),))),
    "a pair from before": ("gram", m.HolderRelease((), (), ((0, 1, np.eye(3)),))),
    "a pair twice": ("gram", m.HolderRelease((), (), ((0, 3, np.eye(3)), (3, 0, np.eye(3))))),
    "a block of another size": ("gram", m.HolderRelease((), (), ((0, 3, np.eye(2)),))),
    "a block of words": ("gram", m.HolderRelease((), (), ((0, 3, np.full((3, 3), np.nan)),))),
    "another message": ("labels", m.Acknowledged()),
}


QUICK = [lie for lie, (release, _) in LIES.items() if release == "labels" or lie == "of other clients"]


@pytest.mark.parametrize("lie", [lie if lie in QUICK else pytest.param(lie, marks=pytest.mark.slow) for lie in LIES])
def test_a_key_holder_that_lies_ends_a_step_by_word_and_leaves_the_server_as_it_was(lie: str) -> None:
    release, said = LIES[lie]
    scene = population(clients_per_group=2)
    transport, fed = without(scene, {3}, replace(LABELS, ckks_release=release))  # type: ignore[arg-type]
    made = algorithm_on(scene, "pacfl")
    state = made.init(fed)
    epoch = fed.epochs.of(state.groupings.held)
    before = (list(epoch.clients), epoch.session.steps, epoch.session.machine.clients, sorted(epoch.session.blocks))
    fed.begin_round(0)
    transport.tamper = lambda party, stage, data: m.encode(said) if stage == "ckks finish" else data
    with pytest.raises(KeyHolderLost):
        made.admit(fed, state, [3])
    assert fed.refusals == [(HOLDER, "ckks finish", "malformed")]
    assert (list(epoch.clients), epoch.session.steps, epoch.session.machine.clients, sorted(epoch.session.blocks)) == before
    transport.tamper = lambda party, stage, data: data
    refused = [one.total_bytes for one in fed.transcript.messages if one.kind == "refused answer"]
    decoded = lie != "bytes that are no array"  # what is no message of the protocol is no more on record than any other bytes
    assert refused == [len(m.encode(said))] * decoded, "it came, and is on record"
    state, _ = made.admit(fed, state, [3])  # the holder had done its part, as if its answer had been lost: it says it again
    assert state.clustering.clients == (0, 1, 2, 3)


def test_what_every_function_gives_is_known_to_the_server() -> None:
    assert {"pacfl.ClusterByAngles", "merging.Enter", "splitting.Bipartition"} <= set(known_functions())
    for name, kind in known_functions().items():
        results: Any = getattr(kind, "results", {"": "undeclared"})
        assert set(results.values()) <= {"all", "new", "some", "one"}, name
    assert fits(PlaceByMeans(), {"labels": np.array([0, 2])}, 3, 2)
    assert not fits(PlaceByMeans(), {"labels": np.array([0, -1])}, 3, 2)
    assert not fits(PlaceByMeans(), {"labels": np.array([0])}, 3, 2)


def test_no_integer_is_small_because_it_overflows() -> None:
    for bad in (np.full(3, 1 << 63, dtype=np.uint64), np.array([np.iinfo(np.int64).min]), np.array([-40])):
        with pytest.raises(TypeError, match="at most"):
            check_small({"labels": bad}, 4)
    check_small({"labels": np.array([-1, 20, 0]), "clear": True, "none": np.zeros(0, dtype=int)}, 4)


@pytest.mark.parametrize("stage", ["ckks keys", "ckks decrypt"])
@pytest.mark.parametrize("said", [b"", b"\0" * 100, m.encode(m.Stepped(b"no announcement")), m.encode(m.Refused("x" * 200))])
def test_bytes_from_a_key_holder_end_a_step_by_word(stage: str, said: bytes) -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, LABELS)
    transport.tamper = lambda party, now, data: said if now == stage else data
    with pytest.raises(KeyHolderLost):
        algorithm_on(scene, "pacfl").init(fed)
    assert {(party, now) for party, now, _ in fed.refusals} == {(HOLDER, stage)}


class Between(Loopback):
    """A transport that may change what is asked of anybody."""

    change: Any = staticmethod(lambda ask: ask)

    def exchange(self, requests: Any, stage: str) -> Any:
        return super().exchange({place: m.encode(self.change(m.decode_ask(data))) for place, data in requests.items()}, stage)


def between(scene: Population, protection: Protection = LABELS) -> tuple[Between, FederationServer]:
    transport = Between(scene, protection)
    fed = FederationServer(OverBytes(transport), protection=protection, roster=transport.roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    return transport, fed


@pytest.mark.slow
def test_a_function_that_fails_on_the_gram_ends_the_epoch() -> None:
    """That it fails is told, and would be a bit of the Gram matrix each time, past the number of steps that there are."""
    scene = population(clients_per_group=3)
    transport, fed = between(scene)
    finish: list[m.Finish] = []

    def impossible(ask: m.PartyRequest) -> m.PartyRequest:
        if not isinstance(ask, m.Finish):
            return ask
        finish.append(msgspec.structs.replace(ask, then=then_to_bytes(ClusterByMeans(99, 1, 0))))
        return finish[-1]

    transport.change = impossible
    with pytest.raises(KeyHolderLost):
        algorithm_on(scene, "pacfl").init(fed)
    assert epochs_of(transport) == []
    transport.change = lambda ask: ask
    with pytest.raises(KeyHolderLost, match="not-held"):
        fed._registry.ask_holder(finish[0], "again")
    assert algorithm_on(scene, "pacfl").init(fed).clustering == algorithm_on(scene, "pacfl").init(federation(scene, seed=1)).clustering


@pytest.mark.slow
def test_no_keys_outlive_a_run_or_stay_for_an_epoch_that_is_over() -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, LABELS)
    made = algorithm_on(scene, "pacfl")
    transport.kill_at = {"ckks finish": {HOLDER}}
    with pytest.raises(KeyHolderLost):
        made.init(fed)  # an epoch is left half open
    transport.dead.clear()
    fed.begin_round(0)
    assert epochs_of(transport) == ["epoch/0", "pending/0"]
    state = made.init(fed)
    assert epochs_of(transport) == ["epoch/1"]
    again = FederationServer(OverBytes(transport), protection=LABELS, roster=transport.roster, entropy=ENTROPY, seed=1, session=fed.session)
    again.restore(fed.saved())
    number, key = fed.epochs.of(state.groupings.held).number, state.groupings.held.key
    again.know(key, fed.known(key))
    again.epochs.enter(state.groupings.held, Epoch(number, again.epochs.make(number), [0, 1, 2, 3, 4, 5], (3, 8), {}))
    again.enrol()
    kept = made.init(again)
    assert epochs_of(transport) == [f"epoch/{again.epochs.of(kept.groupings.held).number}"], (
        "of the process before nothing can be gone on with"
    )
    again.end()
    assert epochs_of(transport) == []


# --- a server that lies to clients


def test_a_client_encrypts_under_no_key_and_no_terms_but_its_own() -> None:
    """Its roster's holder, its own release, ring and bound, this session; not another epoch's announcement, nor without one."""
    scene = population(clients_per_group=3)
    transport, fed = between(scene)
    contributors: list[m.Give] = []

    def listen(ask: m.PartyRequest) -> m.PartyRequest:
        contributors.extend([ask] if isinstance(ask, m.Give) and ask.epoch is not None else [])
        return ask

    transport.change = listen
    algorithm_on(scene, "pacfl").init(fed)
    good = contributors[0]
    assert good.epoch is not None
    transport.change = lambda ask: ask

    def asked(give: m.Give) -> Any:
        return fed._ask({0: give}, "gram").get(0)

    assert isinstance(asked(good), m.Given)
    old = good.epoch
    assert transport.holder is not None
    other = Roster(transport.roster.keys[:-1], transport.holder.public())
    flipped = bytearray(old.announcement)
    flipped[-50] ^= 1
    for name, epoch in {
        "another epoch's number": msgspec.structs.replace(old, number=old.number + 1),
        "another digest": msgspec.structs.replace(old, setup=bytes(32)),
        "no announcement": msgspec.structs.replace(old, announcement=b""),
        "flipped": msgspec.structs.replace(old, announcement=bytes(flipped)),
        "no epoch": None,
    }.items():
        assert asked(msgspec.structs.replace(good, epoch=epoch)) is None, name
    for protection, roster, p, dimension in (
        (replace(LABELS, ckks_release="gram"), transport.roster, 3, 8), (replace(LABELS, ckks_bound=2.0), transport.roster, 3, 8),
        (replace(LABELS, ckks_ring=8192), transport.roster, 3, 8), (LABELS, other, 3, 8), (LABELS, transport.roster, 2, 8),
        (LABELS, transport.roster, 3, 9),
    ):  # fmt: skip
        setup = CkksSettings.of(protection).setup(fed.session, 7, roster, p, dimension)
        key = ckks.KeyHolder(setup, transport.holder, bytes(32), roster, entropy=ENTROPY).announcement  # the real holder, talked into it
        assert asked(msgspec.structs.replace(good, epoch=m.EpochKey(7, setup.digest, key))) is None
    assert {word for _, _, word in fed.refusals} == {"forbidden", "malformed"}
    again = msgspec.structs.replace(good, session=bytes(16))
    assert asked(again) is None
    assert fed.refusals[-1][2] == "wrong-session"


@pytest.mark.parametrize("rows", ["too long", "not finite", "too many", "of words"])
def test_a_layout_that_does_not_fit_is_refused_by_its_own_client_and_no_number_is(rows: str) -> None:
    """What a client answers follows from the shape of its vectors alone: longer ones are scaled, others that do not fit become zeros."""
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, LABELS)
    made = algorithm_on(scene, "pacfl", k=2)
    exchange = transport.exchange

    def spoiled(requests: Any, stage: str) -> Any:
        if stage == "gram":
            values = Values(transport.stores[4])
            number = max(int(name.partition("/")[2]) for name in transport.stores[4].names() if name.startswith("held/"))
            bad = {"too long": 3.0 * np.eye(3, 8), "not finite": np.full((3, 8), np.nan), "too many": np.eye(4, 8),
                   "of words": np.zeros((2, 3, 8))}[rows]  # fmt: skip
            values.hold(number, {"signature": bad}, values.origin(number))
        return exchange(requests, stage)

    transport.exchange = spoiled  # type: ignore[method-assign]
    if rows in ("too long", "not finite"):
        assert made.init(fed).clustering.clients == (0, 1, 2, 3, 4, 5)
        assert not fed.refusals
        return
    with pytest.raises(ClientsLost, match=r"\[4\]"):
        made.init(fed)
    assert fed.refusals[-1][:2] == (4, "gram")
    assert fed.refusals[-1][2] in ("forbidden", "bad-input")
    transport.exchange = exchange  # type: ignore[method-assign]
    assert made.init(fed).clustering.clients == (0, 1, 2, 3, 5)


def test_nothing_secret_is_in_a_repr_or_in_what_is_refused() -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, LABELS)
    algorithm_on(scene, "pacfl").init(fed)
    assert transport.holder is not None
    secrets = [transport.holder.signing_seed, transport.holder.encryption_seed]
    settings = transport.settings(0)
    secrets += [settings.identity.signing_seed, settings.identity.encryption_seed]
    said = repr((settings, transport.holder, fed._comparisons, fed._registry, fed.saved(), KeyHolderLost("x", "y")))
    for secret in secrets:
        assert secret.hex() not in said
        assert repr(secret)[2:-1] not in said


# --- the same products


EDGES = [
    # clients, vectors each, dimension, pairs an output: one pair, a batch of 64 and two more, one slot left, chunks just full and one over
    (2, 1, 8, 0), (11, 1, 8, 1), (5, 2, 16, 4), (4, 1, 1024, 4), (4, 1, 1025, 4), (3, 3, 113, 8), (1, 2, 8, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("clients", "p", "dimension", "together"),
    [pytest.param(*edge, marks=pytest.mark.slow) if edge[0] in (5, 11) else edge for edge in EDGES],
)
def test_products_are_those_of_the_vectors_at_the_edges_of_slots_batches_and_chunks(
    clients: int, p: int, dimension: int, together: int
) -> None:
    scene = population(groups=1, clients_per_group=clients, shape=(dimension,), samples=6, seed=clients)
    protection = Protection(gram=("ckks",), ckks_release="gram", ckks_group=together)
    seen = []

    def look(view: GramView) -> tuple[dict[str, Any], dict[str, Any]]:
        seen.append((view.gram.clients, view.gram.matrix(), view.gram.error))
        return {}, {}

    for fed in (federation(scene, seed=1), remote(scene, protection)[1]):
        fed.gram(fed.compute(PrincipalVectors(p))["signature"], then=look)
    (ids, true, _), (same, got, error) = seen
    assert ids == same
    assert got.shape == true.shape == (clients * p, clients * p)
    assert 0 < error < 1e-3
    assert np.abs(got - true).max() < 6.5 * error  # normal noise: 1 in 10^8 or fewer of at most 231 numbers is beyond
