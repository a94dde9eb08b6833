"""Similarity and averaging under the clients' shared transforms: the same clusters, and a server that lacks what it should lack."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from scenes import Echo, Make, eye, federation, population
from small_runs import configured, true_groups

from cflpriv.contract.handles import Held, Shared
from cflpriv.contract.operations import GramView
from cflpriv.contract.protection import Protection, listed
from cflpriv.data import build_population
from cflpriv.engine import TaskInput
from cflpriv.errors import InputError
from cflpriv.experiments.config.config import parse_config
from cflpriv.experiments.run.checkpoint import load_checkpoint, restore, save_checkpoint
from cflpriv.experiments.run.run import advance, start
from cflpriv.federation.server import ClientsLost, FederationServer
from cflpriv.federation.transforms import MOST_OPEN, TransformCache, Transforms, clustering_name
from cflpriv.protocols import codec
from cflpriv.protocols.errors import RemoteError
from cflpriv.protocols.group import NUMBERS, Ratchet
from cflpriv.protocols.orthonormal import HAAR_LIMIT, TRANSFORMS, Haar, transform
from cflpriv.protocols.sketch import public_seed, sketch
from cflpriv.types import Array, Parts, Population

KINDS = tuple(TRANSFORMS)
GRAM_STAGES: tuple[tuple[str, ...], ...] = ((), *((kind,) for kind in KINDS), ("sketch", "haar"), ("sketch", "hadamard"))
SUM_KINDS = ("none", *KINDS)
BASE: dict[str, dict[str, Any]] = {
    "data": {"clients": 8, "rotations": [0, 90], "test_samples_per_client": 30},
    "model": {"name": "mlp", "hidden": 8, "dtype": "float64"},
    "training": {"rounds": 3, "lr": 0.1, "epochs": 3, "weights": "equal"},
    "run": {"insecure_test_entropy": True, "record": "headers"},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "pacfl": {},
    "fedavg": {},
    "ifca": {"k": 2},
    "cfl": {"eps1": 0.9, "eps2": 1.0},
    "stocfl": {},
    "pfedlia": {"warm_up": 1, "local_epochs": 2},
}


def shared(kind: str, **options: Any) -> Protection:
    return Protection(gram=(kind,), sum=kind, **options)


def everything(view: GramView) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"n": view.gram.n}, {"gram": view.gram.matrix()}


def client_rows(fed: FederationServer, held: Held, *clients: int) -> Array:
    return np.concatenate([np.atleast_2d(eye(fed).peek(client, held)) for client in clients])


# --- all algorithms, the same clusters


@cache
def eight_clients() -> Population:
    return build_population(configured(BASE).data)


def outcome(algorithm: str, protection: dict[str, Any], rounds: int = 3) -> tuple[Any, list[float]]:
    """The clusters, and every client's accuracy after the last round; of pairs, too, under which strict clients compare no updates."""
    config = configured(BASE, algorithm, algorithm=ALGORITHMS[algorithm], protection=protection, run={"release_policy": "off"})
    simulation = start(config, population=eight_clients())
    rows = [advance(simulation) for _ in range(rounds)]
    clustering = simulation.algorithm.describe(simulation.state).get("clustering")
    labels = None if clustering is None else dict(zip(clustering.clients, clustering.labels, strict=True))
    return labels, rows[-1]["per_client"]["accuracy"]


@cache
def clear(algorithm: str) -> tuple[Any, list[float]]:
    return outcome(algorithm, {})


def agree(algorithm: str, gram: tuple[str, ...], total: str, mode: str = "per_round") -> None:
    labels, accuracy = outcome(algorithm, {"gram": list(gram), "sum": total, "transform": mode, "sketch_dim": 400})
    assert labels == clear(algorithm)[0]
    np.testing.assert_allclose(accuracy, clear(algorithm)[1], atol=0.05)  # a sample on the border may fall either way by rounding


@pytest.mark.slow
def test_the_scene_has_clusters_to_find() -> None:
    """Without a protection every clustering algorithm finds the two rotations here, so that agreeing with it means something."""
    truth = true_groups(eight_clients())
    for algorithm in ("pacfl", "ifca", "cfl", "stocfl"):
        labels = clear(algorithm)[0]
        assert len({(labels[client], truth[client]) for client in labels}) == 2 == len(set(labels.values())), algorithm


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_finds_the_same_clusters(algorithm: str, kind: str) -> None:
    """Each kind for both operations, in both modes over all; the whole product is slow."""
    long = algorithm in ("cfl", "stocfl") and kind == "haar"  # what they compare has more numbers than sketch_dim
    agree(algorithm, ("sketch", "haar") if long else (kind,), kind, "fixed" if kind in ("permutation", "hadamard") else "per_round")


@pytest.mark.slow
@pytest.mark.parametrize("total", SUM_KINDS)
@pytest.mark.parametrize("gram", GRAM_STAGES, ids="+".join)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_finds_the_same_clusters_under_every_pair(algorithm: str, gram: tuple[str, ...], total: str) -> None:
    agree(algorithm, gram, total)


@pytest.mark.slow
@pytest.mark.parametrize("total", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_transform_for_all_rounds_does_too(algorithm: str, total: str) -> None:
    agree(algorithm, (), total, "fixed")


# --- gram


@pytest.mark.parametrize("kind", KINDS)
def test_the_gram_grows_by_new_rows_only(kind: str) -> None:
    """Dropouts come later, newcomers join, the owners of the first rows may be offline: nothing is sent twice, no entry changes."""
    fed = federation(population(), shared(kind), present=range(6))
    held = fed.compute(Make())
    first = fed.gram(held["rows"], then=everything, on=[0, 1, 3, 4])  # 2 and 5 dropped out
    eye(fed).leave([0, 1])
    second = fed.gram(held["rows"], then=everything, against=held["rows"], on=[2, 5])
    eye(fed).join([6, 7])
    later = fed.compute(Make(), on=[6, 7])
    third = fed.gram(later["rows"], then=everything, against=held["rows"])
    order = [0, 1, 3, 4, 2, 5]
    exact = np.concatenate([client_rows(fed, held["rows"], *order), client_rows(fed, later["rows"], 6, 7)])
    assert first.evidence is not None
    assert second.evidence is not None
    assert third.evidence is not None
    np.testing.assert_allclose(third.evidence["gram"], exact @ exact.T, atol=1e-10)
    np.testing.assert_allclose(third.evidence["gram"][:12, :12], second.evidence["gram"], atol=1e-14)
    np.testing.assert_allclose(second.evidence["gram"][:8, :8], first.evidence["gram"], atol=1e-14)
    assert [m.clients for m in fed.transcript.messages if m.operation == "gram"] == [(0, 1, 3, 4), (2, 5), (6, 7)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_reads_transformed_rows_that_only_the_secret_opens(kind: str) -> None:
    fed = federation(population(), shared(kind))
    held = fed.compute(Make())
    fed.gram(held["vector"], then=everything)
    (message,) = (m for m in fed.transcript.messages if m.operation == "gram")
    assert message.payload is not None
    sent, plain = message.payload["rows"][:, 0], client_rows(fed, held["vector"], *fed.clients)
    assert not np.isclose(sent[:, :10], plain).all(axis=1).any()
    (secrets,) = {eye(fed).secrets(f"client:{client}")["epoch_secrets"] for client in fed.clients}
    number = message.context["epoch"]
    opened = transform(kind, ratchet_of(secrets).key(number) or b"", f"gram/{number}", 10).invert(sent)
    np.testing.assert_allclose(opened, plain, atol=1e-9)


def test_the_weak_kinds_show_what_their_docstrings_say() -> None:
    """Permutations leave the values, signs the sizes; Haar and Hadamard leave neither."""
    shown = {}
    for kind in KINDS:
        fed = federation(population(), shared(kind))
        held = fed.compute(Make())
        fed.gram(held["vector"], then=everything)
        (message,) = (m for m in fed.transcript.messages if m.operation == "gram")
        assert message.payload is not None
        sent, plain = message.payload["rows"][3, 0], eye(fed).peek(3, held["vector"])
        values = np.allclose(np.sort(sent), np.sort(plain)) if len(sent) == len(plain) else False
        sizes = np.allclose(np.sort(np.abs(sent)), np.sort(np.abs(plain))) if len(sent) == len(plain) else False
        shown[kind] = (values, sizes)
    assert shown == {
        "permutation": (True, True), "signed_permutation": (False, True), "hadamard": (False, False), "haar": (False, False),
    }  # fmt: skip


@pytest.mark.parametrize("gram", [("sketch",), ("sketch", "haar"), ("sketch", "hadamard")])
def test_the_gram_of_sketched_vectors_is_that_of_the_sketch(gram: tuple[str, ...]) -> None:
    fed = federation(population(), Protection(gram=gram, sketch_dim=8))
    held = fed.compute(Make())
    for epoch in range(2):
        released = fed.gram(held["vector"], then=everything)
        assert released.evidence is not None
        short = sketch(public_seed("gram", epoch), 10, 8).apply(client_rows(fed, held["vector"], *fed.clients))
        np.testing.assert_allclose(released.evidence["gram"], short @ short.T, atol=1e-8)
    released = fed.gram(held["rows"], then=everything)  # 4 numbers: short enough
    assert released.evidence is not None
    rows = client_rows(fed, held["rows"], *fed.clients)
    np.testing.assert_allclose(released.evidence["gram"], rows @ rows.T, atol=1e-10)


# --- sums


@pytest.mark.parametrize("mode", ["per_round", "fixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_blind_mean_is_the_mean(kind: str, mode: Any) -> None:
    fed = federation(population(), shared(kind, transform=mode))
    held = fed.compute(Make())
    total = Shared(np.full(10, 3.0))
    for number in range(3):
        fed.begin_round(number)
        means = fed.mean(held["vector", "rows"], groups={client: client % 2 for client in fed.clients}, k=2)
        for label, mean in enumerate(means):
            assert mean is not None
            assert mean.parts["vector"].clear is None
            for part in ("vector", "rows"):
                exact = np.mean([eye(fed).peek(client, held[part]) for client in fed.clients if client % 2 == label], axis=0)
                np.testing.assert_allclose(eye(fed).peek(label, mean.parts[part]), exact, atol=1e-9)
        (mean,) = fed.mean(held["vector"])
        assert mean is not None
        plain = np.mean([eye(fed).peek(client, held["vector"]) for client in fed.clients], axis=0)
        assert mean.parts["vector"].norm() == pytest.approx(np.linalg.norm(plain))  # also where the transform pads
        total = fed.fold(total + mean.parts["vector"], on=number)
    assert len(total.transformed) == 1
    np.testing.assert_allclose(eye(fed).peek(7, total), 3.0 + 3 * plain, atol=1e-8)
    names = [m.context["transform"] for m in fed.transcript.messages if m.operation == "mean"]
    assert len(set(names)) == (1 if mode == "fixed" else len(names))
    assert {m.context["kind"] for m in fed.transcript.messages if m.kind.startswith("blind")} == {kind}


def test_transforms_are_kept_within_their_budget_and_made_again_alike() -> None:
    made = Transforms({0: bytes(32)}, "permutation", TransformCache(keep_bytes=5000))
    first = made("sum/0", 1000).apply(np.arange(1000.0))
    kept = made("sum/0", 1000)
    assert made("sum/0", 1000) is kept
    for number in range(1, 4):
        made(f"sum/{number}", 1000)
    assert made("sum/0", 1000) is not kept
    np.testing.assert_array_equal(made("sum/0", 1000).apply(np.arange(1000.0)), first)
    assert isinstance(made("sum/0", 1000, "haar"), Haar)


def test_a_transform_is_found_by_those_who_have_its_secret() -> None:
    """Clients of one process share a cache: equal secrets give one object, other secrets another."""
    cache = TransformCache()
    both, one, other = ({0: bytes(32), 1: bytes([1] * 32)}, {1: bytes([1] * 32)}, {0: bytes([2] * 32)})
    made = [cache.shared(secrets, "permutation") for secrets in (both, dict(both), one, other)]
    assert made[0] is made[1]
    assert made[0]("sum/0@1", 50) is made[2]("sum/0@1", 50)
    with pytest.raises(InputError, match=r"came after a removal .* 'sum/0'"):
        made[2]("sum/0", 50)
    with pytest.raises(RemoteError, match="no-secret"):
        made[3]("sum/0@1", 50)  # a later epoch's secret may still come
    x = np.arange(50.0)
    assert not np.array_equal(made[0]("sum/0", 50).apply(x), made[3]("sum/0", 50).apply(x))


# --- the group


def group_messages(fed: FederationServer) -> list[tuple[int, str, str, tuple[int, ...]]]:
    return [(m.round, m.kind, m.source, m.clients) for m in fed.transcript.messages if m.operation == "group"]


def test_the_secret_is_agreed_over_recorded_messages() -> None:
    fed = federation(population(), Protection(gram=("permutation",)), present=range(6))
    held = fed.compute(Make())
    fed.gram(held["rows"], then=everything)
    six = tuple(range(6))
    assert group_messages(fed) == [
        (-1, "Invite", "server", six),
        (-1, "Advert", "clients", six),
        (-1, "Adverts", "server", (0,)),
        (-1, "Offer", "clients", (0,)),
        (-1, "Deliver", "server", six[1:]),
        (-1, "Confirm", "clients", six[1:]),
        (-1, "Confirmed", "server", six),
    ]
    assert fed.transcript.messages[0].operation == "group"  # before anything else
    assert eye(fed).secrets("client:6") == {}
    eye(fed).join([6])
    fed.gram(fed.compute(Make(), on=[6])["rows"], then=everything, against=held["rows"])
    handed = [row[1:] for row in group_messages(fed)[7:]]
    assert handed == [
        ("Invite", "server", (6,)),
        ("Advert", "clients", (6,)),
        ("Admit", "server", (0,)),
        ("Grant", "clients", (0,)),
        ("Handover", "server", (6,)),
    ]
    assert eye(fed).secrets("client:6") == eye(fed).secrets("client:0")
    secret = bytes.fromhex(eye(fed).secrets("client:0")["group_secret"])
    for message in fed.transcript.messages:
        assert all(secret[:8] not in array.tobytes() for array in (message.payload or {}).values())
        assert secret.hex() not in repr(message)


def test_coming_and_going_changes_nothing_for_members() -> None:
    fed = federation(population(), shared("hadamard"))
    before = [eye(fed).secrets(f"client:{client}") for client in range(8)]
    fed.compute(Make())
    eye(fed).leave([1, 2])
    eye(fed).join([1, 2])
    assert [eye(fed).secrets(f"client:{client}") for client in range(8)] == before
    fed.gram(fed.compute(Make())["rows"], then=everything)
    assert len(group_messages(fed)) == 7
    after = [eye(fed).secrets(f"client:{client}") for client in range(8)]
    assert [one["group_secret"] for one in after] == [one["group_secret"] for one in before]
    assert {one["epoch_secrets"] for one in after} == {codec.encode(ratchet_of(before[0]["epoch_secrets"]).moved(0)).hex()}


# --- what a stolen state opens


def ratchet_of(secrets: str) -> Ratchet:
    return codec.decode(bytes.fromhex(secrets), Ratchet, 1 << 14)


def opened_by(fed: FederationServer, client: int, number: int) -> bool:
    """Whether the secrets that this client has now open the recorded vectors of a clustering epoch."""
    (message,) = (m for m in fed.transcript.messages if m.operation == "gram" and m.kind == "vector" and m.context["epoch"] == number)
    assert message.payload is not None
    plain = client_rows(fed, HELD[number], *message.clients)
    for one in eye(fed).secrets(f"client:{client}").values():
        ways = [bytes.fromhex(one)]
        if len(one) > 64:
            ratchet = ratchet_of(one)
            ways = [key for _, key in ratchet.kept] + [ratchet.chain, ratchet.moved(number).key(number) or b"none"]
        for secret in ways:
            made = transform("haar", secret, f"gram/{number}", 10)
            if np.allclose(made.invert(message.payload["rows"][:, 0]), plain):
                return True
    return False


HELD: dict[int, Held] = {}


def test_a_state_that_is_stolen_after_an_epoch_opens_none_of_those_that_are_over() -> None:
    """Every client's: also those of who had no part in an epoch, and was asked for a later one."""
    fed = federation(population(), shared("haar"), present=range(7))
    for number in range(4):
        HELD[number] = fed.compute(Make())["vector"]
        fed.gram(HELD[number], then=everything, on=[0, 1, 2, 3, 4] if number < 3 else None)
        if number != 1:  # which goes on
            fed.close(HELD[number])
    assert {number: {opened_by(fed, client, number) for client in fed.clients} for number in range(4)} == {
        0: {False}, 1: {True}, 2: {False}, 3: {True},
    }  # fmt: skip
    eye(fed).join([7])  # who comes is given as much
    assert [opened_by(fed, 7, number) for number in range(4)] == [False, True, False, True]


def test_whoever_missed_epochs_enters_later_ones_and_those_that_are_open() -> None:
    """As a newcomer walks down a tree of epochs, none of which its sponsor need be in."""
    fed = federation(population(), shared("haar"), present=range(6))
    everybody = fed.compute(Make())["rows"]
    first = fed.gram(everybody, then=everything, on=[0, 1, 2, 3])
    left, right = fed.compute(Make())["rows"], fed.compute(Make())["rows"]
    fed.gram(left, then=everything, on=[0, 1])
    fed.gram(right, then=everything, on=[2, 3])
    latest = fed.compute(Make())["rows"]
    fed.gram(latest, then=everything, on=[0, 1, 2, 3])
    eye(fed).join([6, 7])
    late = fed.compute(Make())["rows"]
    assert first.evidence is not None
    for against, there in ((everybody, [0, 1, 2, 3]), (right, [2, 3]), (latest, [0, 1, 2, 3])):
        for newcomers in ([6, 7], [4]):  # 4 was there, and in no epoch
            grown = fed.gram(late, then=everything, against=against, on=newcomers)
            assert grown.evidence is not None
            there += newcomers
            exact = client_rows(fed, against, *there[: -3 if 4 in there else -2])
            exact = np.concatenate([exact, client_rows(fed, late, *[one for one in there if one in (6, 7, 4)])])
            np.testing.assert_allclose(grown.evidence["gram"], exact @ exact.T, atol=1e-9)
    assert [m.clients for m in fed.transcript.messages if m.operation == "gram" and m.kind == "rows"][4:] == [(6, 7), (4,)] * 3


def test_an_epoch_that_is_over_is_refused_and_one_that_is_not_is_served_again() -> None:
    """A server that goes on from an earlier checkpoint than its clients asks for numbers that these have passed."""
    fed = federation(population(), shared("haar"))
    held = fed.compute(Make())
    comparison = fed._comparisons
    for _ in range(3):
        fed.gram(fed.compute(Make())["rows"], then=everything)
    comparison.epochs.count = 1
    eye(fed).transport.on_error = "refuse"
    with pytest.raises(ClientsLost) as lost:
        fed.gram(held["rows"], then=everything)
    assert lost.value.clients == tuple(range(8))
    assert {word for _, _, word in fed.refusals} == {"used-transform"}
    eye(fed).join(range(8))
    with pytest.raises(ClientsLost):  # the latest number: its transform is there, and has served another value
        fed.gram(held["vector"], then=everything)
    eye(fed).join(range(8))
    comparison.epochs.count = 2
    assert fed.gram(held["rows"], then=everything).result == {"n": 8}  # the same one
    assert fed.gram(held["vector"], then=everything).result == {"n": 8}


def test_too_many_open_epochs_and_too_high_numbers_are_refused_by_name() -> None:
    fed = federation(population(), shared("hadamard"))
    opened = [fed.compute(Make())["rows"] for _ in range(MOST_OPEN + 2)]
    for one in opened[:-1]:
        fed.gram(one, then=everything, on=[0, 1])
    with pytest.raises(InputError, match=f"{MOST_OPEN + 1} clustering epochs are open"):
        fed.gram(opened[-1], then=everything, on=[0, 1])
    fed.close(opened[3])
    fed.gram(opened[-1], then=everything, on=[0, 1])
    fed.close(opened[4])
    fed._comparisons.epochs.count = NUMBERS
    with pytest.raises(InputError, match=f"epoch {NUMBERS} is beyond the last"):
        fed.gram(fed.compute(Make())["rows"], then=everything, on=[0, 1])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gram/0", (0, (), "gram/0")), ("gram/7@12", (7, (), "gram/7@12")), ("gram/7+3+5@1", (7, (3, 5), "gram/7@1")),
        ("gram/07", None), ("gram/7+5+3", None), ("gram/7+3+3", None), ("gram/7+7", None), ("gram/7+8", None), ("gram/7+03", None),
        ("gram/7@0", None), ("gram/7@", None), ("gram/7@1+3", None), ("gram/7+", None), ("gram/", None), ("sum/7", None), ("gram/7 ", None),
        ("gram/99+" + "+".join(map(str, range(MOST_OPEN + 1))), None),
    ],
)  # fmt: skip
def test_a_clustering_epoch_is_named_in_one_way(name: str, says: Any) -> None:
    found = clustering_name(name)
    assert (None if found is None else (found.number, found.open, found.purpose)) == says


@pytest.mark.parametrize("protection", [Protection(), shared("haar")])
def test_unknown_clients_neither_leave_nor_are_removed(protection: Protection) -> None:
    fed = federation(population(), protection)
    for go in (eye(fed).leave, fed.remove):
        with pytest.raises(InputError, match=r"\[99\]"):
            go([0, 99])
    assert fed.clients == tuple(range(8))


@pytest.mark.parametrize("protection", [Protection(), Protection(sum="secagg"), Protection(gram=("sketch",))])
def test_without_a_transform_nothing_is_agreed(protection: Protection) -> None:
    fed = federation(population(), protection)
    held = fed.compute(Make())
    fed.gram(held["rows"], then=everything)
    eye(fed).leave([7])
    eye(fed).join([7])
    fed.remove([7])
    fed.mean(held["vector"])
    assert group_messages(fed) == []


def test_after_a_removal_the_removed_client_has_no_key_to_what_comes() -> None:
    fed = federation(population(), shared("permutation", transform="fixed"), present=range(6))
    held = fed.compute(Make())
    fed.gram(held["rows"], then=everything)
    (mean,) = fed.mean(held["vector"])
    assert mean is not None
    blind = Shared(np.zeros(10)) + mean.parts["vector"]
    fed.remove([0])
    old, new = eye(fed).secrets("client:0"), eye(fed).secrets("client:1")
    assert set(old) == {"group_secret", "epoch_secrets"}
    assert set(new) == {"group_secret", "epoch_secrets", "group_secret@1", "epoch_secrets@1"}
    assert new["epoch_secrets"] == old["epoch_secrets"] != new["epoch_secrets@1"]
    assert new["group_secret"] == old["group_secret"] != new["group_secret@1"]
    with pytest.raises(InputError, match=r"\[0\] were removed"):
        eye(fed).join([0])
    again = fed.compute(Make())
    (fresh,) = fed.mean(again["vector"])
    assert fresh is not None
    assert [m.context["transform"] for m in fed.transcript.messages if m.operation == "mean"] == ["sum/fixed", "sum/fixed@1"]
    opened = transform("permutation", bytes.fromhex(new["group_secret@1"]), "sum/fixed@1", 10)
    np.testing.assert_allclose(
        opened.invert(fresh.parts["vector"].transformed[0].value), np.mean([eye(fed).peek(c, again["vector"]) for c in range(1, 6)], axis=0)
    )
    # who comes now has the running secret only
    eye(fed).join([6])
    assert set(eye(fed).secrets("client:6")) == {"group_secret@1", "epoch_secrets@1"}
    late = fed.compute(Make(), on=[6])
    with pytest.raises(InputError, match=r"came after a removal .* 'gram/0'"):
        fed.gram(late["rows"], then=everything, against=held["rows"])
    with pytest.raises(InputError, match=r"came after a removal .* 'sum/fixed'"):
        eye(fed).peek(6, blind)
    with pytest.raises(InputError, match=r"came after a removal .* 'sum/fixed'"):
        fed.compute(Echo(("m",)), {"m": blind}, on=[6])
    eye(fed).transport.on_error = "refuse"  # as it is over a network
    with pytest.raises(ClientsLost) as lost:
        fed.gram(late["rows"], then=everything, against=held["rows"])
    assert lost.value.clients == (6,)
    eye(fed).transport.on_error = "raise"
    eye(fed).leave([1])
    eye(fed).join([6])
    folded = fed.fold(blind + fresh.parts["vector"], on=6)  # it cannot: a member does
    assert [m.clients for m in fed.transcript.messages if m.operation == "fold"] == [(2,), (2,)]
    np.testing.assert_allclose(eye(fed).peek(6, folded), eye(fed).peek(2, blind) + eye(fed).peek(2, fresh.parts["vector"]), atol=1e-9)
    anew = fed.gram(fed.compute(Make())["rows"], then=everything)
    assert anew.result == {"n": 5}


def gone_on(fed: FederationServer, held: Held, folder: Path) -> tuple[FederationServer, Held]:
    """The federation and the handle as they are after a restart, with those who were there."""
    save_checkpoint(folder, "x", held, fed, simulated=eye(fed))
    checkpoint = load_checkpoint(folder, "x")
    later = federation(population(), fed.protection, present=sorted(eye(fed).online), **checkpoint.parties())
    held = restore(checkpoint, later)
    eye(later).join(sorted(eye(fed).online))
    return later, held


def test_a_federation_that_goes_on_from_a_checkpoint_has_the_same_secret(tmp_path: Path) -> None:
    """Nothing is agreed on again; newcomers are handed the secret, as before."""
    one = federation(population(), shared("haar"), present=range(6))
    held = one.compute(Make())
    eye(one).join([6])
    other, held = gone_on(one, held, tmp_path)
    assert other.clients == one.clients == tuple(range(7))
    assert eye(other).secrets("client:6") == eye(one).secrets("client:6") == eye(one).secrets("client:0")
    (mean,) = other.mean(held["vector"])
    assert mean is not None
    np.testing.assert_allclose(
        eye(other).peek(6, mean.parts["vector"]), client_rows(other, held["vector"], *range(6)).mean(axis=0), atol=1e-9
    )
    assert group_messages(other) == []
    eye(other).join([7])
    assert [row[1] for row in group_messages(other)] == ["Invite", "Advert", "Admit", "Grant", "Handover"]
    assert eye(other).secrets("client:7") == eye(one).secrets("client:0")


def test_after_a_restart_removed_clients_stay_out_and_open_epochs_keep_their_transform(tmp_path: Path) -> None:
    one = federation(population(), shared("haar"))
    held = one.compute(Make())
    one.gram(held["rows"], then=everything, on=[0, 1, 2, 3])
    one.remove([7])
    other, held = gone_on(one, held, tmp_path)
    assert other.clients == tuple(range(7))
    with pytest.raises(InputError, match=r"\[7\] were removed"):
        eye(other).join([7])
    assert other.begin_round(0) == ()
    assert other.clients == tuple(range(7))
    assert set(eye(other).secrets("client:7")) == {"group_secret", "epoch_secrets"}
    grown = other.gram(held["rows"], then=everything, against=held["rows"], on=[4, 5])
    assert grown.evidence is not None
    exact = client_rows(other, held["rows"], *range(6))
    np.testing.assert_allclose(grown.evidence["gram"], exact @ exact.T, atol=1e-9)
    other.mean(held["vector"])
    assert [m.context["transform"][-2:] for m in other.transcript.messages if m.operation == "mean"] == ["@1"]


# --- refusals by name


@dataclass(frozen=True)
class Long:
    """A task that makes a vector too long for a dense rotation."""

    parts: ClassVar[Parts] = {"long": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> dict[str, Array]:
        return {"long": np.random.default_rng(given.data.id).normal(size=HAAR_LIMIT + 1)}


def test_what_is_too_long_for_haar_is_refused_and_told_what_takes_it() -> None:
    fed = federation(population(), shared("haar"))
    held = fed.compute(Long())
    with pytest.raises(InputError, match=r"protection\.gram: 'haar' .* up to d = 8192; these have d = 8193: use \[\"sketch\", \"haar\"\]"):
        fed.gram(held, then=everything)
    with pytest.raises(InputError, match=r"protection\.sum: 'haar' .* d = 8193: use 'hadamard' or 'secagg'"):
        fed.mean(held)
    for protection in (shared("hadamard"), replace(shared("permutation"), gram=("sketch", "haar"), sketch_dim=64)):
        fed = federation(population(), protection)
        held = fed.compute(Long())
        fed.gram(held, then=everything)
        (mean,) = fed.mean(held)
        assert mean is not None
        exact = np.mean([eye(fed).peek(client, held) for client in fed.clients], axis=0)
        np.testing.assert_allclose(eye(fed).peek(0, mean.parts["long"]), exact, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gram": ("haar", "sketch")}, r"protection\.gram: \['haar', 'sketch'\]: the sketch comes first"),
        ({"gram": ("sketch", "sketch")}, "the sketch comes first, once"),
        ({"gram": ("haar", "permutation")}, "more than one transform"),
        ({"gram": ("sketch", "haar", "hadamard")}, "more than one transform"),
        ({"gram": ("sketch",), "sketch_dim": 7}, r"protection\.sketch_dim = 7: expected an integer ≥ 8"),
        ({"gram": ("shuffle",)}, r"protection\.gram: 'shuffle' is not known; known are none, "),
        ({"sum": "sketch"}, r"protection\.sum: 'sketch' is not known"),
    ],
)
def test_impossible_stages_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Protection(**options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_numbers_are_not_hidden_by_any_kind(kind: str) -> None:
    fed = federation(population(), shared(kind))
    with pytest.raises(InputError, match=rf"hides little under sum = '{kind}'"):
        fed.mean(fed.compute(Make())["one"])


@pytest.mark.parametrize("kind", KINDS)
def test_sample_counts_stay_private_under_every_kind(kind: str) -> None:
    with pytest.raises(InputError, match=rf"training\.weights = 'examples': under protection\.sum = '{kind}'"):
        parse_config({"protection": {"sum": kind}})


def test_every_kind_is_listed() -> None:
    assert set(KINDS) | {"sketch"} <= set(listed("gram"))
    assert set(KINDS) <= set(listed("sum"))
    for gram, total in product(GRAM_STAGES, SUM_KINDS):
        assert Protection(gram=gram, sum=total).transformed == (not {*gram, total}.isdisjoint(KINDS))
