"""Encrypted similarity in a federation: the same clusters, who reads what, what is refused by name."""

import sys
import tomllib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from scenes import eye, federation, population, training

from cflpriv.aggregation.ckks_settings import EncryptedGram, EncryptedSession, Settings
from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.interface import Algorithm
from cflpriv.algorithms.merging import MergeClusters
from cflpriv.attacks.adversary import view_of
from cflpriv.clustering.cuts import cut_tree, linkage_tree
from cflpriv.clustering.similarity import angles
from cflpriv.contract.operations import GramView
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Message
from cflpriv.data import build_population
from cflpriv.errors import InputError
from cflpriv.experiments import run_experiment, start
from cflpriv.experiments.config import load_config, parse_config
from cflpriv.federation.server import RemoteFederation
from cflpriv.protocols.ckks import arithmetic
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.orthonormal import TRANSFORMS
from cflpriv.protocols.sketch import public_seed, sketch
from cflpriv.types import Array

pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")

ROOT = Path(__file__).parents[2]
RELEASES = ("labels", "distances", "gram")


def clustered(protection: Protection, name: str = "pacfl", rounds: int = 0, **options: Any) -> tuple[RemoteFederation, Algorithm, Any]:
    scene = population(groups=2, clients_per_group=3)
    fed = federation(scene, protection)
    algorithm = ALGORITHMS[name].make(training(scene), **options)
    state = algorithm.init(fed)
    for number in range(rounds):
        fed.begin_round(number)
        state, _ = algorithm.round(fed, state)
    return fed, algorithm, state


def labels(algorithm: Algorithm, state: Any) -> tuple[int, ...]:
    return tuple(algorithm.describe(state)["clustering"].labels)


def seen(fed: RemoteFederation, adversary: str) -> list[Message]:
    return [message for message in view_of(fed.transcript.messages, adversary, {}).messages if message.verb == "gram"]


def numbers_in(messages: list[Message]) -> dict[str, Array]:
    """Everything readable that is no opaque byte, by kind and part."""
    return {
        f"{m.kind}/{name}": array
        for m in messages
        for name, array in (m.payload or {}).items()
        if array.dtype != np.uint8 and not name.endswith(".length")
    }


def distances(fed: RemoteFederation, algorithm: Algorithm) -> Array:
    """The true evidence, from a run in the clear."""
    _, _, state = clustered(Protection())
    return np.asarray(state.evidence["distance"])


# --- who reads what


@pytest.fixture(scope="module", params=RELEASES)
def released(request: pytest.FixtureRequest) -> tuple[str, RemoteFederation, Algorithm, Any]:
    return request.param, *clustered(Protection(gram=("ckks",), ckks_release=request.param))


def test_the_server_reads_what_the_release_says_and_nothing_else(released: tuple[str, RemoteFederation, Algorithm, Any]) -> None:
    release, fed, _, state = released
    found = numbers_in(seen(fed, "server"))
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
    assert any(message.kind == "ckks request" and message.payload for message in seen(fed, "server"))  # it is read, not dropped


def test_what_the_server_reads_is_noised_as_stated(released: tuple[str, RemoteFederation, Algorithm, Any]) -> None:
    release, fed, _, _ = released
    channel = fed.epochs.channel
    assert isinstance(channel, EncryptedGram)
    holder = channel.holders[0]
    if release == "labels":
        assert holder.std == 0
        return
    assert 0 < holder.std < 1e-4
    clear, _, _ = clustered(Protection())
    rows = next(message for message in clear.transcript.messages if message.verb == "gram").payload
    assert rows is not None
    vectors = rows["rows"].astype(np.float64)
    errors = np.concatenate([(block - vectors[i] @ vectors[j].T).ravel() for (i, j), block in holder.blocks.items()]) / holder.std
    # 189 numbers, 171 of them independent normals: rms 1 ± 5/√342 in all but 1 of 10^6 runs
    assert abs(np.sqrt(np.mean(errors**2)) - 1) < 5 / np.sqrt(342)
    if release == "gram":
        found = numbers_in(seen(fed, "server"))
        shown = {tuple(pair): block for pair, block in zip(found["gram/pair"].tolist(), found["gram/block"], strict=True)}
        assert all((shown[pair] == block).all() for pair, block in holder.blocks.items())
        assert len(shown) == 21


def test_the_key_holder_sees_no_upload(released: tuple[str, RemoteFederation, Algorithm, Any]) -> None:
    _, fed, _, _ = released
    kinds = {message.kind for message in seen(fed, "key-holder")}
    assert "ckks request" in kinds
    assert "signature" not in kinds
    uploads = [message for message in fed.transcript.messages if message.kind == "signature"]
    assert uploads
    assert all(message.readers == ("server",) for message in uploads)


def test_the_secret_key_goes_to_clients_only_where_they_share_it() -> None:
    modes: tuple[Literal["public-key", "symmetric"], ...] = ("public-key", "symmetric")
    for mode in modes:
        fed, _, _ = clustered(Protection(gram=("ckks",), ckks_mode=mode))
        secret = [message for message in fed.transcript.messages if message.kind == "ckks secret key"]
        assert len(secret) == (mode == "symmetric")
        assert all("server" not in message.readers for message in secret)
        assert list(eye(fed).secrets("key-holder")) == ["ckks_secret_key_0"]


# --- the same clusters


SYSTEMS: dict[str, tuple[dict[str, Any], int]] = {
    "pacfl": ({}, 0),
    "cfl": ({"eps1": 1.0001, "eps2": 1.0002, "settle": 0}, 2),
    "stocfl": ({"tau": 0.5}, 1),
    "one_shot": ({"k": 2}, 0),
}


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name in ALGORITHMS])
@pytest.mark.parametrize("release", RELEASES)
def test_systems_find_the_clusters_they_find_in_the_clear(name: str, release: Any) -> None:
    options, rounds = SYSTEMS[name]
    bound = {"pacfl": 1.0, "cfl": 2.0}.get(name, 64.0)
    _, algorithm, state = clustered(Protection(), name, rounds, **options)
    protection = Protection(gram=("ckks",), ckks_release=release, ckks_bound=bound)
    _, encrypted, protected = clustered(protection, name, rounds, **options)
    assert labels(encrypted, protected) == labels(algorithm, state)
    assert len(set(labels(algorithm, state))) > 1


@pytest.mark.parametrize("landmarks", [0, 3])
def test_newcomers_cost_their_own_rows_only(landmarks: int) -> None:
    scene = population(groups=2, clients_per_group=4)
    fed = federation(scene, Protection(gram=("ckks",), landmarks=landmarks), present=[0, 1, 2, 4, 5, 6])
    algorithm = ALGORITHMS["pacfl"].make(training(scene))
    state = algorithm.init(fed)
    channel = fed.epochs.channel
    assert isinstance(channel, EncryptedGram)
    before = set(channel.holders[0].blocks)
    eye(fed).join([3, 7])
    state, _ = algorithm.admit(fed, state, [3, 7])  # type: ignore[misc]
    added = set(channel.holders[0].blocks) - before
    assert (len(before), len(added)) == ((21, 15) if not landmarks else (15, 6))
    clustering = algorithm.describe(state)["clustering"]
    truth = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    assert len({(clustering[client], truth[client]) for client in range(8)}) == clustering.k == 2


def test_the_key_holder_forgets_when_the_epoch_closes() -> None:
    import gc
    import weakref

    fed, _, state = clustered(Protection(gram=("ckks",)))
    channel = fed.epochs.channel
    assert isinstance(channel, EncryptedGram)
    holder = weakref.ref(channel.holders[0])
    assert holder() is not None
    fed.close(state.signatures)
    gc.collect()
    assert holder() is None
    with pytest.raises(InputError, match="closed"):
        fed.gram(state.signatures, then=lambda view: ({}, {}), against=state.signatures)


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
    tree = tomllib.loads((ROOT / "examples" / "pacfl_ckks_digits.toml").read_text())
    tree["data"]["clients"], tree["training"]["rounds"] = 8, 0
    run_experiment(parse_config(tree), tmp_path / "run", say=said.append, step=lambda *step: steps.append(step))
    assert "8 clients" in said[0]
    assert " s on 1 process(es)" in said[0]
    assert "outputs of 6 pair(s)" in said[0]
    assert steps[-1] == ("encrypted similarity", len(steps), len(steps))


def session(protection: Protection, clients: int) -> EncryptedSession:
    """A clustering epoch of its own."""
    sketch_dim = protection.sketch_dim if "sketch" in protection.gram else None
    channel = EncryptedGram(tuple(range(clients)), Settings.of(protection, sketch_dim), public_entropy("encrypted tests"))
    opened = channel.open(0)
    assert isinstance(opened, EncryptedSession)
    return opened


def test_equal_clients_are_not_split_by_the_encryption_s_errors() -> None:
    protection = Protection(gram=("ckks",))
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(30, 3)))[0].T
    epoch = session(protection, 8)
    gram = epoch.extend(range(8), [epoch.upload(client, rows) for client in range(8)], 3, lambda *args, **options: None)
    distance = angles(gram, "sum_of_angles")
    found = cut_tree(linkage_tree(distance), distance)
    assert 0 < distance.values.max() < distance.noise  # errors show, and are taken for what they are
    assert (found.k, found.clear) == (1, False)


def test_unit_vectors_fit_the_bound_after_a_sketch_too() -> None:
    rows = np.random.default_rng(0).normal(size=(8, 3, 500))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    epoch = session(Protection(gram=("sketch", "ckks"), sketch_dim=64), 8)
    uploads = [epoch.upload(client, one) for client, one in enumerate(rows)]
    gram = epoch.extend(range(8), uploads, 3, lambda *args, **options: None)
    assert np.diag(gram.matrix()).max() > 1 + 1e-3  # some did become longer
    clear = sketch(public_seed("gram", 0), 500, 64).apply(rows).reshape(24, 64)
    assert np.abs(gram.matrix() - clear @ clear.T).max() < 2e-5


def test_pairs_share_outputs_by_default_where_that_pays() -> None:
    def shared(p: int, dimension: int, **options: Any) -> tuple[int, int]:
        epoch = session(Protection(gram=("ckks",), **options), 1)
        epoch.upload(0, np.zeros((p, dimension)))
        assert epoch._setup is not None
        return epoch._setup.group, epoch._setup.packing.chunks

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
        ({"gram": ("ckks",), "ckks_ring": 1024}, "ckks_ring: 1024"),
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
    assert isinstance(fed.epochs.channel, EncryptedGram)
    session = fed.epochs.channel.open(0)
    with pytest.raises(InputError, match='"sketch", "ckks"'):
        session.upload(0, np.zeros((3, 100_000)))


def test_the_sum_may_be_protected_too() -> None:
    assert "haar" in TRANSFORMS
    protection = Protection(gram=("ckks",), sum="haar")
    _, algorithm, state = clustered(protection, rounds=1, weights="equal")
    _, clear, plain = clustered(Protection(), rounds=1, weights="equal")
    assert labels(algorithm, state) == labels(clear, plain)


@pytest.mark.parametrize("norm", [10.0, 1.0, 0.02])
def test_under_labels_the_error_counted_is_that_of_vectors_as_long_as_these(norm: float) -> None:
    """A wide bound costs short vectors nothing; released noise is the same for all."""
    rows = np.random.default_rng(0).normal(size=(8, 1, 200)) * 0.3 + np.random.default_rng(1).normal(size=(2, 1, 200))[np.arange(8) % 2]
    rows *= norm / np.linalg.norm(rows, axis=2, keepdims=True)
    epoch = session(Protection(gram=("ckks",), ckks_bound=10.0), 8)
    gram = epoch.extend(range(8), [epoch.upload(client, one) for client, one in enumerate(rows)], 1, lambda *args, **options: None)
    found = float(np.sqrt(((gram.matrix() - rows[:, 0] @ rows[:, 0].T) ** 2).mean()))
    assert gram.error / 5 < found < 2 * gram.error  # measured: a third to the whole of it
    result, _ = MergeClusters(0.5)(GramView(gram, tuple(range(8)), {}))
    assert result["labels"].tolist() == [0, 1] * 4


@pytest.mark.parametrize("bound", [16.0, 64.0])
def test_landmarks_do_not_make_short_vectors_look_drowned(bound: float) -> None:
    rows = np.random.default_rng(0).normal(size=(8, 1, 100)) * 0.3 + np.random.default_rng(1).normal(size=(2, 1, 100))[np.arange(8) % 2]
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    epoch = session(Protection(gram=("ckks",), ckks_bound=bound, landmarks=2), 8)
    gram = epoch.extend(range(8), [epoch.upload(client, one) for client, one in enumerate(rows)], 1, lambda *args, **options: None)
    result, _ = MergeClusters(0.5)(GramView(gram, tuple(range(8)), {}))
    assert result["labels"].tolist() == [0, 1] * 4
