"""Encrypted similarity in a federation: the same clusters, who reads what, what is refused by name."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkout import ROOT
from scenes import Echo, eye, federation, population, training

from cflpriv.aggregation import holder_party as holder
from cflpriv.aggregation.ckks_settings import CkksSettings
from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.interface import Algorithm
from cflpriv.algorithms.pacfl import ClusterByAngles
from cflpriv.algorithms.stocfl.merging import MergeClusters
from cflpriv.attacks.adversary import view_of
from cflpriv.clustering.cuts import cut_tree, linkage_tree
from cflpriv.clustering.similarity import Gram, angles
from cflpriv.contract.handles import Released
from cflpriv.contract.operations import GramView, Then
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Message
from cflpriv.data import build_population
from cflpriv.errors import InputError
from cflpriv.experiments import run_experiment, start
from cflpriv.experiments.config.config import load_config, parse_config
from cflpriv.federation.server import FederationServer
from cflpriv.protocols.ckks import KeyHolder, arithmetic
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.protocols.orthonormal import TRANSFORMS
from cflpriv.protocols.sketch import public_seed, sketch
from cflpriv.transports.simulation import HOLDER
from cflpriv.types import Array

pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")

RELEASES = ("labels", "distances", "gram")


def clustered(protection: Protection, name: str = "pacfl", rounds: int = 0, **options: Any) -> tuple[FederationServer, Algorithm, Any]:
    scene = population(groups=2, clients_per_group=3)
    fed = federation(scene, protection)
    options = options or ({"cut": "silhouette"} if name == "pacfl" else {})
    algorithm = ALGORITHMS[name].make(training(scene), **options)
    state = algorithm.init(fed)
    for number in range(rounds):
        fed.begin_round(number)
        state, _ = algorithm.round(fed, state)
    return fed, algorithm, state


def labels(algorithm: Algorithm, state: Any) -> tuple[int, ...]:
    return tuple(algorithm.describe(state)["clustering"].labels)


def gram_messages(fed: FederationServer, adversary: str) -> list[Message]:
    return [message for message in view_of(fed.transcript.messages, adversary, {}).messages if message.operation == "gram"]


def numbers_in(messages: list[Message]) -> dict[str, Array]:
    """Everything readable that is no opaque byte, by kind and part."""
    return {
        f"{m.kind}/{name}": array
        for m in messages
        for name, array in (m.payload or {}).items()
        if array.dtype != np.uint8 and not name.endswith(".length")
    }


def machine(fed: FederationServer) -> KeyHolder:
    """The key holder's machine of the first epoch, as it keeps it for itself."""
    host: Any = eye(fed).host
    party: Any = host.parties[HOLDER]
    kept: KeyHolder = party._kept("epoch/0", fed.session, 0).machine
    return kept


# --- who reads what


@pytest.fixture(scope="module", params=RELEASES)
def released(request: pytest.FixtureRequest) -> tuple[str, FederationServer, Algorithm, Any]:
    return request.param, *clustered(Protection(gram=("ckks",), ckks_release=request.param))


def test_the_server_reads_what_the_release_says_and_nothing_else(released: tuple[str, FederationServer, Algorithm, Any]) -> None:
    release, fed, _, state = released
    found = numbers_in(gram_messages(fed, "server"))
    result = {"result/labels", "result/k", "result/clear"}
    if release == "labels":
        assert set(found) == result
        assert all(array.dtype.kind in "bi" for array in found.values())
        assert state.evidence is None
    elif release == "distances":
        assert set(found) == result | {"evidence/distance", "evidence/clients"}
        assert set(state.evidence) == {"distance", "clients"}
    else:
        assert set(found) == {"gram/pair", "gram/block"}
    assert any(message.kind == "ckks request" and message.payload for message in gram_messages(fed, "server"))  # it is read, not dropped


def test_what_the_server_reads_is_noised_as_stated(released: tuple[str, FederationServer, Algorithm, Any]) -> None:
    release, fed, _, _ = released
    holder = machine(fed)
    if release == "labels":
        assert holder.std == 0
        return
    assert 0 < holder.std < 1e-4
    clear, _, _ = clustered(Protection())
    rows = next(message for message in clear.transcript.messages if message.operation == "gram").payload
    assert rows is not None
    vectors = rows["rows"].astype(np.float64)
    errors = np.concatenate([(block - vectors[i] @ vectors[j].T).ravel() for (i, j), block in holder.blocks.items()]) / holder.std
    # 189 numbers, 171 of them independent normals: rms 1 ± 5/√342 in all but 1 of 10^6 runs
    assert abs(np.sqrt(np.mean(errors**2)) - 1) < 5 / np.sqrt(342)
    if release == "gram":
        found = numbers_in(gram_messages(fed, "server"))
        shown = {tuple(pair): block for pair, block in zip(found["gram/pair"].tolist(), found["gram/block"], strict=True)}
        assert all((shown[pair] == block).all() for pair, block in holder.blocks.items())
        assert len(shown) == 21


def test_the_key_holder_sees_no_upload(released: tuple[str, FederationServer, Algorithm, Any]) -> None:
    _, fed, _, _ = released
    kinds = {message.kind for message in gram_messages(fed, "key-holder")}
    assert "ckks request" in kinds
    assert "signature" not in kinds
    uploads = [message for message in fed.transcript.messages if message.kind == "signature"]
    assert uploads
    assert all(message.readers == ("server",) for message in uploads)


def test_the_secret_key_stays_with_the_key_holder() -> None:
    fed, _, _ = clustered(Protection(gram=("ckks",)))
    ((name, secret),) = eye(fed).secrets("key-holder").items()
    assert name == "ckks_secret_key_0"
    key = bytes.fromhex(secret)
    assert key == machine(fed).secret_key()
    piece = key[len(key) // 2 :][:64]
    for message in fed.transcript.messages:
        assert not any(piece in np.ascontiguousarray(one).tobytes() for one in (message.payload or {}).values())
    found = {place for place, store in eye(fed).stores.items() for name in store.names() if piece in store.dumped(name)}
    assert found == {HOLDER}


# --- the same clusters


SYSTEMS: dict[str, tuple[dict[str, Any], int]] = {
    "pacfl": ({"cut": "silhouette"}, 0),
    "pacfl, cut by test": ({"cut": "test"}, 0),
    "cfl": ({"eps1": 1.0001, "eps2": 1.0002, "settle": 0}, 2),
    "cfl, test": ({"patience": 1}, 2),
    "ifca, test": ({}, 1),
    "stocfl": ({"tau": 0.5}, 1),
    "stocfl, cut by test": ({"cut": "test"}, 1),
    "one_shot": ({"k": 2}, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("release", RELEASES)
def test_systems_find_the_clusters_they_find_in_the_clear(system: str, release: Any) -> None:
    (options, rounds), name = SYSTEMS[system], system.partition(",")[0]
    bound = {"pacfl": 1.0, "cfl": 2.0, "ifca": 2.0}.get(name, 64.0)
    _, algorithm, state = clustered(Protection(), name, rounds, **options)
    protection = Protection(gram=("ckks",), ckks_release=release, ckks_bound=bound)
    _, encrypted, protected = clustered(protection, name, rounds, **options)
    assert labels(encrypted, protected) == labels(algorithm, state)
    assert len(set(labels(algorithm, state))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("landmarks", [0, 3])
def test_newcomers_cost_their_own_rows_only(landmarks: int) -> None:
    scene = population(groups=2, clients_per_group=4)
    fed = federation(scene, Protection(gram=("ckks",), landmarks=landmarks), present=[0, 1, 2, 4, 5, 6])
    algorithm = ALGORITHMS["pacfl"].make(training(scene))
    state = algorithm.init(fed)
    before = set(machine(fed).blocks)
    eye(fed).join([3, 7])
    state, _ = algorithm.admit(fed, state, [3, 7])  # type: ignore[misc]
    added = set(machine(fed).blocks) - before
    assert (len(before), len(added)) == ((21, 15) if not landmarks else (15, 6))
    clustering = algorithm.describe(state)["clustering"]
    truth = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    assert len({(clustering[client], truth[client]) for client in range(8)}) == clustering.k == 2


def test_the_key_holder_forgets_when_the_epoch_closes() -> None:
    fed, _, state = clustered(Protection(gram=("ckks",)))
    store = eye(fed).stores[HOLDER]
    assert [name for name in store.names() if name.startswith("epoch/")] == ["epoch/0"]
    fed.close(state.groupings.held)
    assert set(store.names()) == {"session"}
    assert eye(fed).secrets("key-holder") == {}
    with pytest.raises(InputError, match="closed"):
        fed.gram(state.groupings.held, then=ClusterByAngles(), against=state.groupings.held)


def test_long_vectors_are_sketched_first() -> None:
    _, algorithm, state = clustered(Protection(gram=("sketch", "ckks"), sketch_dim=512, ckks_bound=64.0), "stocfl", 1, tau=0.5)
    _, clear, plain = clustered(Protection(gram=("sketch",), sketch_dim=512), "stocfl", 1, tau=0.5)
    assert labels(algorithm, state) == labels(clear, plain)


def test_the_example_finds_the_clusters_of_the_clear_one() -> None:
    found = []
    for name in ("pacfl_ckks_digits", "pacfl_digits"):
        config = load_config(ROOT / "examples" / f"{name}.toml")
        simulation = start(config)
        found.append(labels(simulation.algorithm, simulation.state))
        truth = build_population(config.data, None).groups
    assert found[0] == found[1]
    assert len(set(zip(found[0], truth, strict=True))) == len(set(truth))


def test_the_cost_is_said_before_it_starts_and_progress_after(tmp_path: Path) -> None:
    said: list[str] = []
    steps: list[tuple[str, int, int]] = []
    tree = tomllib.loads((ROOT / "examples" / "pacfl_ckks_digits.toml").read_text(encoding="utf-8"))
    tree["data"]["clients"], tree["training"]["rounds"] = 8, 0
    run_experiment(parse_config(tree), tmp_path / "run", report=said.append, step=lambda *step: steps.append(step))
    assert "8 clients" in said[0]
    assert " s on 1 process(es)" in said[0]
    assert "outputs of 6 pair(s)" in said[0]
    assert steps[-1] == ("encrypted similarity", len(steps), len(steps))


def compared(
    monkeypatch: pytest.MonkeyPatch, protection: Protection, rows: Array, then: Then
) -> tuple[Gram, Released, FederationServer]:  # fmt: skip
    """What the key holder sees of these rows (8, p, d) of eight clients, and what it releases of it."""
    views: list[GramView] = []
    known = holder.then_of

    def looking(data: bytes) -> Then:
        def look(view: GramView) -> Any:
            views.append(view)
            return known(data)(view)

        return look

    monkeypatch.setattr(holder, "then_of", looking)
    scene = population(groups=2, clients_per_group=4)
    fed = federation(scene, protection, entropy=lambda party: public_entropy(f"0 {party}"))
    held = fed.compute(Echo(("signature",)), {"signature": list(rows)}, which={client: client for client in fed.clients})
    released = fed.gram(held["signature"], then)
    (view,) = views
    assert view.gram.clients == tuple(range(8))
    return view.gram, released, fed


def test_equal_clients_are_not_split_by_the_encryption_s_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(30, 3)))[0].T
    gram, released, _ = compared(monkeypatch, Protection(gram=("ckks",)), np.stack([rows] * 8), ClusterByAngles("sum_of_angles"))
    distance = angles(gram, "sum_of_angles")
    found = cut_tree(linkage_tree(distance), distance)
    assert 0 < distance.values.max() < distance.noise  # errors show, and are taken for what they are
    assert (found.k, found.clear) == (1, False) == (released.result["k"], released.result["clear"])


def test_unit_vectors_fit_the_bound_after_a_sketch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).normal(size=(8, 3, 500))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    gram, _, _ = compared(monkeypatch, Protection(gram=("sketch", "ckks"), sketch_dim=64), rows, ClusterByAngles())
    assert np.diag(gram.matrix()).max() > 1 + 1e-3  # some did become longer
    clear = sketch(public_seed("gram", 0), 500, 64).apply(rows).reshape(24, 64)
    errors = gram.matrix() - clear @ clear.T
    assert np.sqrt(np.mean(errors**2)) < gram.error < 1e-5  # measured: two thirds of it
    assert np.abs(errors).max() < 6 * gram.error


def test_pairs_share_outputs_by_default_where_that_pays() -> None:
    roster = Roster((Identity.create(0, public_entropy("encrypted tests")).public(),))

    def shared(p: int, dimension: int, **options: Any) -> tuple[int, int]:
        setup = CkksSettings.of(Protection(gram=("ckks",), **options)).setup(bytes(16), 0, roster, p, dimension)
        return setup.group, setup.packing.chunks

    assert shared(3, 784, ckks_ring=8192) == (4, 4)
    assert shared(3, 784, ckks_ring=8192, ckks_group=1) == (1, 1)
    assert shared(3, 64) == (6, 1)
    assert shared(3, 64, ckks_group=1) == (1, 1)
    assert shared(3, 40_000, ckks_ring=8192) == (1, 49)  # four would take more than 64 polynomials


# --- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gram": ("ckks", "haar")}, "gram"),
        ({"gram": ("ckks", "sketch")}, "the sketch comes first"),
        ({"gram": ("ckks",), "ckks_bound": 0.0}, "ckks_bound"),
        ({"gram": ("ckks",), "ckks_bound": 1e-200}, "ckks_bound"),
        ({"gram": ("ckks",), "ckks_group": -1}, "ckks_group"),
        ({"gram": ("haar",), "landmarks": 3}, "landmarks"),
        ({"gram": ("ckks",), "ckks_ring": 1024}, "ckks_ring = 1024: expected an integer, 0 or 4096 or 8192"),
        ({"gram": ("ckks",), "ckks_ring": 4096, "ckks_release": "gram"}, "one prime"),
        ({"gram": ("ckks",), "ckks_ring": 4096, "ckks_release": "distances"}, "one prime"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        clustered(Protection(**change))


def test_without_tenseal_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    arithmetic.cache_clear()
    monkeypatch.setitem(sys.modules, "tenseal.sealapi", None)
    with pytest.raises(InputError, match=r"^protection\.gram: 'ckks': .*TenSEAL, which is not installed: pip install tenseal") as caught:
        clustered(Protection(gram=("ckks",)))
    assert "\n" not in str(caught.value)
    clustered(Protection())


def test_vectors_beyond_the_public_bound_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="ckks_bound"):
        clustered(Protection(gram=("ckks",), ckks_bound=0.01))


def test_too_long_vectors_are_sent_to_the_sketch() -> None:
    scene = population(groups=2, clients_per_group=2)
    fed = federation(scene, Protection(gram=("ckks",), ckks_ring=4096))
    held = fed.compute(Echo(("signature",)), {"signature": np.zeros((3, 100_000))})
    with pytest.raises(InputError, match='"sketch", "ckks"'):
        fed.gram(held["signature"], ClusterByAngles())
    assert all(message.kind == "parameters" for message in fed.transcript.messages)  # nothing was asked for


def test_the_sum_may_be_protected_too() -> None:
    assert "haar" in TRANSFORMS
    protection = Protection(gram=("ckks",), sum="haar")
    _, algorithm, state = clustered(protection, rounds=1, weights="equal")
    _, clear, plain = clustered(Protection(), rounds=1, weights="equal")
    assert labels(algorithm, state) == labels(clear, plain)


@pytest.mark.parametrize("norm", [10.0, 1.0, 0.02])
def test_under_labels_the_error_counted_is_that_of_vectors_as_long_as_these(norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide bound costs short vectors nothing; released noise is the same for all."""
    rows = np.random.default_rng(0).normal(size=(8, 1, 200)) * 0.3 + np.random.default_rng(1).normal(size=(2, 1, 200))[np.arange(8) % 2]
    rows *= norm / np.linalg.norm(rows, axis=2, keepdims=True)
    gram, released, _ = compared(monkeypatch, Protection(gram=("ckks",), ckks_bound=10.0), rows, MergeClusters(0.5))
    found = float(np.sqrt(((gram.matrix() - rows[:, 0] @ rows[:, 0].T) ** 2).mean()))
    assert gram.error / 5 < found < 2 * gram.error  # measured: a third to the whole of it
    assert released.result["labels"].tolist() == [0, 1] * 4


@pytest.mark.parametrize("bound", [16.0, 64.0])
def test_landmarks_do_not_make_short_vectors_look_drowned(bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).normal(size=(8, 1, 100)) * 0.3 + np.random.default_rng(1).normal(size=(2, 1, 100))[np.arange(8) % 2]
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    _, released, fed = compared(monkeypatch, Protection(gram=("ckks",), ckks_bound=bound, landmarks=2), rows, MergeClusters(0.5))
    landmarks = [client for client in range(8) if sum(client in pair for pair in machine(fed).blocks) == 8]
    assert sorted(client % 2 for client in landmarks) == [0, 1]  # or they would not span both groups
    assert released.result["labels"].tolist() == [0, 1] * 4
