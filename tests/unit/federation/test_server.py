"""The contract of the operations, shown with small fakes: what later protections and algorithms rely on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import PROTECTIONS, Echo, Make, eye, federation, parity, population

from cflpriv.contract.handles import Held, OwnAddend, Shared
from cflpriv.contract.operations import GramView, Sampling
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Transcript
from cflpriv.engine import TaskInput
from cflpriv.errors import InputError
from cflpriv.federation.values import to_bytes
from cflpriv.plugins import TASKS
from cflpriv.protocols.errors import TooFewClients
from cflpriv.types import Array, Parts


@pytest.fixture(scope="module", params=["memory", "bytes"], autouse=True)
def _transport(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds over both transports: clients are in this process under either, so a test can look at what they have."""
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in vars(request.module).items():
            if hasattr(kind, "run") and hasattr(kind, "parts"):
                patch.setitem(TASKS, name, kind)
        patch.setattr(request.module, "federation", partial(federation, transport=request.param))
        yield


def looked_at(view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    view.memory["seen"] = view.memory.get("seen", 0) + len(view.new)
    matrix = view.gram.matrix()
    return {"seen": view.memory["seen"], "n": view.gram.n}, {"gram": matrix}


# --- compute


@pytest.mark.parametrize("name", PROTECTIONS)
def test_compute_resolves_every_kind_of_parameter(name: str) -> None:
    fed = federation(population(), PROTECTIONS[name])
    made = fed.compute(Make())
    (mean,) = fed.mean(made["vector"])
    assert mean is not None
    listed = [np.zeros(2), np.ones(2)]
    echo = fed.compute(Echo(("array", "shared", "picked", "own")), {
        "array": np.arange(3.0), "shared": mean.parts["vector"], "picked": listed, "own": made["vector"],
    }, which=parity(fed.clients))  # fmt: skip
    expected = np.mean([eye(fed).peek(c, made["vector"]) for c in fed.clients], axis=0)
    for client in fed.clients:
        np.testing.assert_array_equal(eye(fed).peek(client, echo["array"]), np.arange(3.0))
        np.testing.assert_allclose(eye(fed).peek(client, echo["shared"]), expected, atol=1e-9)
        np.testing.assert_array_equal(eye(fed).peek(client, echo["picked"]), listed[client % 2])
        np.testing.assert_array_equal(eye(fed).peek(client, echo["own"]), eye(fed).peek(client, made["vector"]))
        assert eye(fed).peek(client, echo["choice"]) == client % 2


def test_without_which_a_client_gets_the_whole_list_and_several_labels_give_several() -> None:
    fed = federation(population())
    listed = [np.full(2, float(i)) for i in range(3)]
    whole = fed.compute(Echo(("list",)), {"list": listed})
    assert eye(fed).peek(0, whole["list"]).shape == (3, 2)
    several = fed.compute(Echo(("list",)), {"list": listed}, which=dict.fromkeys(fed.clients, (0, 2)))
    np.testing.assert_array_equal(eye(fed).peek(1, several["list"])[:, 0], [0.0, 2.0])


def test_a_held_choice_stays_with_the_client_and_all_models_are_sent() -> None:
    fed = federation(population())
    made = fed.compute(Make())
    echo = fed.compute(Echo(("model",)), {"model": [np.zeros(5), np.ones(5)]}, which=made["choice"])
    assert [float(eye(fed).peek(c, echo["model"])[0]) for c in fed.clients] == [float(c % 2) for c in fed.clients]
    (message,) = [m for m in fed.transcript.messages if m.operation == "compute"]
    assert message.context["which"] == []
    assert message.bytes_each == 2 * 5 * 8
    assert message.clients == fed.clients


def test_public_labels_show_in_who_is_sent_what() -> None:
    fed = federation(population())
    fed.compute(Echo(("model",)), {"model": [np.zeros(5), np.ones(5)]}, which=parity(fed.clients))
    sent = {tuple(m.context["which"]): m.clients for m in fed.transcript.messages}
    assert sent == {(0,): tuple(c for c in fed.clients if c % 2 == 0), (1,): tuple(c for c in fed.clients if c % 2)}


def test_nothing_leaves_in_compute_and_memory_stays() -> None:
    fed = federation(population())
    fed.compute(Make())
    assert fed.transcript.messages == []
    vector = eye(fed).recall(2, "vector")
    assert vector is not None
    np.testing.assert_array_equal(vector[:4], [1.0, 2.0, 4.0, -2.0])


def test_values_are_dropped_with_the_last_handle() -> None:
    """Clients drop them at their next task."""

    def kept(client: int) -> list[str]:
        return [name for name in eye(fed).stores[client].names() if name.startswith("held/")]

    fed = federation(population())
    held = fed.compute(Make())
    assert [kept(client) for client in fed.clients] == [["held/1"]] * 8
    part = held["vector"]
    del held
    later = fed.compute(Echo(()))
    assert [kept(client) for client in fed.clients] == [["held/1", "held/2"]] * 8
    assert eye(fed).peek(0, part).shape == (10,)
    del part
    assert list(fed.numbers()) == [later.key]
    fed.compute(Echo(()))
    assert [kept(client) for client in fed.clients] == [["held/2", "held/3"]] * 8


def test_a_missing_label_or_part_is_named() -> None:
    fed = federation(population())
    held = fed.compute(Make())
    with pytest.raises(KeyError, match="nothing"):
        held["nothing"]
    with pytest.raises(InputError, match="no label for client 3"):
        fed.compute(Echo(("m",)), {"m": [np.zeros(1)] * 2}, which={c: 0 for c in fed.clients if c != 3})
    with pytest.raises(InputError, match=r"label 2, expected 0\.\.1"):
        fed.mean(held["vector"], groups=dict.fromkeys(fed.clients, 2), k=2)
    with pytest.raises(InputError, match="99"):
        fed.compute(Make(), on=[99])
    with pytest.raises(ValueError, match="choose one"):
        eye(fed).peek(0, held)


# --- mean


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(0, 2**31), st.sampled_from(list(PROTECTIONS)))
@settings(max_examples=40, deadline=None)
def test_means_are_the_means(k: int, seed: int, name: str) -> None:
    fed = federation(population(), PROTECTIONS[name])
    rng = np.random.default_rng(seed)
    labels = {client: int(rng.integers(k)) for client in fed.clients}
    weights = {client: float(rng.random() + 0.1) for client in fed.clients}
    held = fed.compute(Make())
    means = fed.mean(held["vector", "one", "rows"], weights=weights, groups=labels, k=k)
    for label, mean in enumerate(means):
        members = [c for c in fed.clients if labels[c] == label]
        if not members:
            assert mean is None
            continue
        assert mean is not None
        assert mean.count == len(members)
        assert mean.weight == pytest.approx(sum(weights[c] for c in members))
        for part in ("vector", "one", "rows"):
            expected = np.average([eye(fed).peek(c, held[part]) for c in members], axis=0, weights=[weights[c] for c in members])
            opened = eye(fed).peek(members[0], mean.parts[part])
            assert opened.shape == np.shape(expected)
            np.testing.assert_allclose(opened, expected, atol=1e-8)


def test_example_weights_are_sample_counts_and_refused_where_they_would_show() -> None:
    scene = population()
    first = scene.clients[0]
    scene = replace(scene, clients=(replace(first, x_train=first.x_train[:5], y_train=first.y_train[:5]), *scene.clients[1:]))
    fed = federation(scene)
    (mean,) = fed.mean(fed.compute(Make())["one"], weights="examples")
    assert mean is not None
    sizes = [data.samples for data in scene.clients]
    assert mean.parts["one"].value() == pytest.approx(np.average([c.id for c in scene.clients], weights=sizes))
    (message,) = [m for m in fed.transcript.messages if m.operation == "mean"]
    assert message.payload is not None
    np.testing.assert_array_equal(message.payload["weight"], sizes)
    blind = federation(scene, PROTECTIONS["haar"])
    with pytest.raises(InputError, match="sample count"):
        blind.mean(blind.compute(Make())["one"], weights="examples")
    assert not [m for m in blind.transcript.messages if m.operation == "mean"]


@pytest.mark.parametrize("name", PROTECTIONS)
def test_the_floor(name: str) -> None:
    fed = federation(population(), replace(PROTECTIONS[name], min_cohort=3))
    held = fed.compute(Make())
    labels = {client: 0 if client < 6 else 1 for client in fed.clients}  # groups of 6 and 2
    small, means = labels, fed.mean(held["vector"], groups=labels, k=3)
    assert [mean is None for mean in means] == [False, True, True]
    sent = {client for m in fed.transcript.messages if m.operation == "mean" for client in m.clients}
    assert sent == {client for client in fed.clients if small[client] == 0}
    before = len(fed.transcript.messages)
    with pytest.raises(TooFewClients, match="minimum cohort size of 3"):
        fed.mean(held["vector"], groups={c: c for c in fed.clients}, k=8)
    assert len(fed.transcript.messages) == before


def test_updates_of_a_group_that_became_too_small_are_on_record() -> None:
    """The server got them, although there is no mean."""
    fed = federation(population(), Protection(min_cohort=3), dropouts=[(0, 0, "Masked"), (0, 1, "Masked")])
    fed.begin_round(0)
    held = fed.compute(Make())
    labels = {client: int(client > 3) for client in fed.clients}  # groups of 4, of which 2 are left, and 4
    means = fed.mean(held["vector"], groups=labels, k=2)
    assert [mean is None for mean in means] == [True, False]
    assert next(one.clients for one in fed.transcript.messages if one.kind == "update") == (2, 3, 4, 5, 6, 7)
    with pytest.raises(TooFewClients):
        fed.mean(held["vector"], on=(0, 1, 2, 3))
    assert fed.transcript.messages[-1].clients == (2, 3)


def test_small_clusters_train_alone() -> None:
    fed = federation(population(), Protection(min_cohort=3, small_clusters="local"))
    held = fed.compute(Make())
    labels = {client: 0 if client < 6 else 1 for client in fed.clients}
    _, alone = fed.mean(held["vector"], groups=labels, k=2)
    assert alone is not None
    model = Shared(np.zeros(10)) + alone.parts["vector"] + alone.parts["vector"] * 0.5
    folded = fed.fold(model)
    assert len(folded.own) == 1
    for client in (6, 7):
        np.testing.assert_allclose(eye(fed).peek(client, folded), 1.5 * eye(fed).peek(client, held["vector"]))
    np.testing.assert_array_equal(eye(fed).peek(0, folded), np.zeros(10))
    assert not any({6, 7} & set(m.clients) for m in fed.transcript.messages)
    with pytest.raises(InputError, match="no value at the server"):
        model.value()


def test_merge_asks_the_clustering() -> None:
    assert federation(population(), Protection(min_cohort=3, small_clusters="merge")).merge_below == 3
    assert federation(population(), Protection(min_cohort=3)).merge_below == 1


def test_held_groups_are_gathered_and_recorded_unless_oblivious() -> None:
    fed = federation(population())
    made = fed.compute(Make())
    means = fed.mean(made["one"], groups=made["choice"], k=2)
    assert means[1] is not None
    assert means[1].parts["one"].value() == pytest.approx(np.mean([c for c in fed.clients if c % 2]))
    assert [(m.operation, m.kind) for m in fed.transcript.messages] == [("gather", "choice"), ("mean", "update")]


def test_overlapping_groups_are_means_of_their_members_or_refused_by_name() -> None:
    fed = federation(population())
    made = fed.compute(Make())
    labels = {client: (0, 1) if client == 0 else (client % 2,) for client in fed.clients}
    even, odd = fed.mean(made["one"], groups=labels, k=2)
    assert even is not None
    assert odd is not None
    assert even.parts["one"].value() == pytest.approx(np.mean([0, 2, 4, 6]))
    assert odd.parts["one"].value() == pytest.approx(np.mean([0, 1, 3, 5, 7]))
    strict = federation(population(), Protection(sum="secagg"))
    with pytest.raises(InputError, match="overlapping groups under sum = 'secagg'"):
        strict.mean(strict.compute(Make())["one"], groups=labels, k=2)


def test_bad_weights_and_values_are_named() -> None:
    fed = federation(population())
    held = fed.compute(Make())
    with pytest.raises(InputError, match="client 0 has weight 0"):
        fed.mean(held["one"], weights=dict.fromkeys(fed.clients, 0.0))
    with pytest.raises(InputError, match="client 0: vector: value at index"):
        fed.mean(fed.compute(Make(scale=np.nan))["vector"])
    with pytest.raises(InputError, match="give k"):
        fed.mean(held["one"], groups=parity(fed.clients))


# --- the blind mean


def test_under_haar_the_server_reads_only_rotated_updates() -> None:
    fed = federation(population(), PROTECTIONS["haar"])
    held = fed.compute(Make())
    (mean,) = fed.mean(held["vector"])
    assert mean is not None
    assert mean.parts["vector"].clear is None
    plain = np.stack([eye(fed).peek(c, held["vector"]) for c in fed.clients])
    (message,) = (one for one in fed.transcript.messages if one.operation == "mean")
    assert message.payload is not None
    seen = message.payload["blind"]
    np.testing.assert_allclose(seen @ seen.T, plain @ plain.T, atol=1e-8)
    assert not np.isclose(np.sort(np.abs(seen[3])), np.sort(np.abs(plain[3])), atol=1e-3).all()
    assert mean.parts["vector"].norm() == pytest.approx(np.linalg.norm(plain.mean(axis=0)))
    with pytest.raises(InputError, match="no value at the server"):
        mean.parts["vector"].value()


@pytest.mark.parametrize(("transform", "expected"), [("per_round", 3), ("fixed", 1)])
def test_blind_parts_pile_up_one_per_transform_and_fold(transform: Literal["per_round", "fixed"], expected: int) -> None:
    fed = federation(population(), replace(PROTECTIONS["haar"], transform=transform))
    held = fed.compute(Make())
    total = Shared(np.full(10, 10.0))
    for number in range(3):
        fed.begin_round(number)
        (mean,) = fed.mean(held["vector"])
        assert mean is not None
        total = total + mean.parts["vector"]
    assert len(total.transformed) == expected
    plain = 10.0 + 3 * np.mean([eye(fed).peek(c, held["vector"]) for c in fed.clients], axis=0)
    np.testing.assert_allclose(eye(fed).peek(5, total), plain, atol=1e-8)
    folded = fed.fold(total, on=2)
    assert len(folded.transformed) == 1
    np.testing.assert_array_equal(folded.clear, np.full(10, 10.0))
    np.testing.assert_allclose(eye(fed).peek(5, folded), plain, atol=1e-8)
    np.testing.assert_allclose(eye(fed).peek(5, (folded - total) * 2.0), np.zeros(10), atol=1e-8)


def test_a_clear_part_is_never_transformed() -> None:
    """One known pair (θ⁰, Pθ⁰) would give a permutation away: nothing the server reads may be a rotation of the known clear part."""
    fed = federation(population(), PROTECTIONS["haar"])
    known = np.array([3.0, 1.0, 4.0, 1.5, 9.0, 2.5, 6.0, 5.0, 3.5, 8.0])
    total = Shared(known)
    for number in range(3):
        fed.begin_round(number)
        (mean,) = fed.mean(fed.compute(Make())["vector"])
        assert mean is not None
        total = fed.fold(total + mean.parts["vector"])
    for message in fed.transcript.messages:
        if "server" not in message.readers or message.payload is None:
            continue
        for name, array in message.payload.items():
            if "blind" in name:
                lengths = np.linalg.norm(np.atleast_2d(array), axis=1)
                assert not np.isclose(lengths, np.linalg.norm(known)).any(), message.kind


def test_products_are_made_by_the_server_of_clear_values_and_by_a_client_of_blind_ones() -> None:
    clear = federation(population())
    assert clear.product(Shared(np.array([1.0, -1.0])), Shared(np.array(3.0))).value().tolist() == [3.0, -3.0]
    assert clear.transcript.messages == []
    with pytest.raises(InputError, match="expected a single number"):
        clear.product(Shared(np.ones(2)), Shared(np.ones(2)))
    fed = federation(population(), PROTECTIONS["haar"])
    (mean,) = fed.mean(fed.compute(Make())["vector", "one"])
    assert mean is not None
    vector, one = mean.parts["vector"], mean.parts["one"]
    result = fed.product(vector, one, on=4)
    assert result.clear is None
    np.testing.assert_allclose(eye(fed).peek(0, result), eye(fed).peek(0, vector) * eye(fed).peek(0, one), atol=1e-9)
    assert [(m.operation, m.kind, m.clients) for m in fed.transcript.messages if m.operation not in ("group", "mean")] == [
        ("product", "arguments", (4,)),
        ("product", "blind result", (4,)),
    ]
    with pytest.raises(InputError, match="own parts"):
        fed.product(vector, Shared(own=(OwnAddend(fed.compute(Make())["vector"]),)))
    with pytest.raises(InputError, match="expected a single number"):
        fed.product(vector, vector)
    for shared, number in ((vector + Shared(np.ones(4)), one), (vector, one + Shared(np.array(1.0)))):
        with pytest.raises(InputError, match="sees part of"):
            fed.product(shared, number)


def test_norm_is_known_only_for_one_whole_part() -> None:
    fed = federation(population(), PROTECTIONS["haar"])
    (mean,) = fed.mean(fed.compute(Make())["vector", "rows"])
    assert mean is not None
    with pytest.raises(InputError, match="single whole part"):
        mean.parts["vector"].norm()
    with pytest.raises(InputError, match="single whole part"):
        (Shared(np.zeros(10)) + mean.parts["vector"]).norm()


# --- gram


@pytest.mark.parametrize("name", PROTECTIONS)
def test_the_gram_grows_within_an_epoch(name: str) -> None:
    fed = federation(population(), PROTECTIONS[name], present=range(6))
    first = fed.compute(Make())
    released = fed.gram(first["rows"], then=looked_at)
    assert released.result == {"seen": 6, "n": 6}
    assert released.evidence is not None
    rows = np.concatenate([eye(fed).peek(c, first["rows"]) for c in range(6)])
    np.testing.assert_allclose(released.evidence["gram"], rows @ rows.T, atol=1e-9)
    eye(fed).leave(range(4))  # the owners of `against` need not be online
    eye(fed).join([6, 7])
    newcomers = fed.compute(Make(), on=[6, 7])
    grown = fed.gram(newcomers["rows"], then=looked_at, against=first["rows"])
    assert grown.result == {"seen": 8, "n": 8}
    assert grown.evidence is not None
    rows = np.concatenate([rows, *(eye(fed).peek(c, newcomers["rows"]) for c in (6, 7))])
    np.testing.assert_allclose(grown.evidence["gram"], rows @ rows.T, atol=1e-9)
    epochs = [m.context["epoch"] for m in fed.transcript.messages if m.operation == "gram"]
    assert epochs == [0, 0]
    with pytest.raises(InputError, match=r"\[6, 7\] are already"):
        fed.gram(newcomers["rows"], then=looked_at, against=first["rows"])
    fed.close(newcomers)
    with pytest.raises(InputError, match="closed"):
        fed.gram(newcomers["rows"], then=looked_at, against=first["rows"])


def test_epochs_use_fresh_transforms() -> None:
    fed = federation(population(), PROTECTIONS["haar"])
    held = fed.compute(Make())
    fed.gram(held["rows"], then=looked_at)
    fed.gram(fed.compute(Make())["rows"], then=looked_at)
    one, two = (m.payload["rows"] for m in fed.transcript.messages if m.operation == "gram" and m.payload is not None)
    assert not np.allclose(one, two)


def test_real_numbers_may_not_pass_as_a_result() -> None:
    fed = federation(population())
    with pytest.raises(TypeError, match="'angle'"):
        fed.gram(fed.compute(Make())["rows"], then=lambda view: ({"angle": 0.5}, {}))
    with pytest.raises(TypeError, match="'packed'"):
        fed.gram(fed.compute(Make())["rows"], then=lambda view: ({"packed": np.array([2**40])}, {}))
    for name, value in {"word": "0.5", "large": 10**9, "many": np.zeros(9, dtype=int), "square": np.zeros((2, 2), dtype=int)}.items():
        with pytest.raises(TypeError, match=name):
            fed.gram(fed.compute(Make())["rows"], then=lambda view, name=name, value=value: ({name: value}, {}))  # type: ignore[misc]


# --- relay, gather


def test_relay_reaches_recipients_and_not_the_server() -> None:
    fed = federation(population())
    made = fed.compute(Make())
    everyone = fed.relay(made["vector"])
    assert set(eye(fed).peek(0, everyone)) == set(fed.clients) - {0}
    wanted = {0: (1, 2), 3: (1,)}
    some = fed.relay(made["vector"], to=wanted)
    received = eye(fed).peek(0, some)
    assert set(received) == {1, 2}
    np.testing.assert_array_equal(received[2], eye(fed).peek(2, made["vector"]))
    message = fed.transcript.messages[-1]
    assert message.readers == ("clients",)
    assert dict(zip(message.clients, message.peers, strict=True))[1] == (0, 3)
    assert message.copies == 3
    assert message.bytes_each == len(to_bytes({"vector": eye(fed).peek(1, made["vector"])})) + 12 + 16  # a nonce and a tag
    assert fed.transcript.messages[-2].kind == "request"
    held = fed.relay(made["vector"], to=made["choice"])
    assert set(eye(fed).peek(5, held)) == {1}
    for unknown in ({0: (77,)}, {77: (0,)}):
        with pytest.raises(InputError, match=r"\[77\]"):
            fed.relay(made["vector"], to=unknown)
    asked = [m for m in fed.transcript.messages if m.kind == "request"]
    assert asked[0].clients == (0, 3)  # who did not ask is not heard
    eye(fed).leave([1])
    assert set(eye(fed).peek(0, fed.relay(made["vector"], to={0: (1, 2)}))) == {2}  # who is absent is left out
    assert fed.transcript.messages[-1].clients == (2,)
    seen = fed.compute(Echo(()), {"peers": held})
    assert isinstance(seen, Held)


def test_gather_gives_single_values_and_is_recorded() -> None:
    fed = federation(population())
    values = fed.gather(fed.compute(Make())["one"], on=[1, 3])
    assert {client: float(value["one"]) for client, value in values.items()} == {1: 1.0, 3: 3.0}
    (message,) = fed.transcript.messages
    assert (message.operation, message.clients, message.readers) == ("gather", (1, 3), ("server",))


# --- cohorts, order, secrets


def test_global_cohorts() -> None:
    scene = population(clients_per_group=50)
    fed = federation(scene, sampling=Sampling("global", 0.1))
    counts = np.zeros(100)
    for number in range(300):
        fed.begin_round(number)
        cohort = fed.cohort()
        assert len(cohort) == 10
        counts[list(cohort)] += 1
    # each client is in Binomial(300, 0.1) cohorts; 100 two-sided checks at 1e-6 each
    assert counts.min() > 8
    assert counts.max() < 60
    assert federation(scene, sampling=Sampling("global", 0.001)).cohort() != ()


def test_per_cluster_cohorts_reach_the_floor() -> None:
    fed = federation(population(clients_per_group=10), Protection(min_cohort=3), sampling=Sampling("per_cluster", 0.1))
    cohort = fed.cohort({client: 0 if client < 15 else 1 for client in fed.clients})
    assert sum(client < 15 for client in cohort) == 3
    assert sum(client >= 15 for client in cohort) == 3
    with pytest.raises(InputError, match="per_cluster"):
        fed.cohort()


def test_the_order_of_clients_does_not_matter() -> None:
    scene = population()
    results = []
    for clients in (scene.clients, scene.clients[::-1]):
        fed = federation(clients, PROTECTIONS["haar"], sampling=Sampling("global", 0.5))
        fed.begin_round(0)
        (mean,) = fed.mean(fed.compute(Make(), on=fed.cohort())["vector"])
        assert mean is not None
        results.append((fed.cohort(), eye(fed).peek(0, mean.parts["vector"])))
    assert results[0][0] == results[1][0]
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_secrets_belong_to_clients() -> None:
    fed = federation(population(), PROTECTIONS["haar"])
    assert eye(fed).secrets("server") == {}
    assert len(bytes.fromhex(eye(fed).secrets("client:0")["group_secret"])) == 32
    assert eye(federation(population())).secrets("client:0") == {}
    for party in ("client:99", "client:x", "nobody"):
        with pytest.raises(InputError, match=party):
            eye(fed).secrets(party)


def test_no_secret_is_in_the_transcript() -> None:
    fed = federation(population(), PROTECTIONS["haar"])
    held = fed.compute(Make())
    fed.gram(held["rows"], then=looked_at)
    fed.mean(held["vector"])
    secret = bytes.fromhex(eye(fed).secrets("client:0")["group_secret"])
    for message in fed.transcript.messages:
        assert secret.hex() not in repr(message.context)
        for array in (message.payload or {}).values():
            assert secret[:8] not in array.tobytes()
    of_client = eye(fed).client(0)
    shown = [repr(one) for one in (fed, eye(fed), held, of_client, of_client._settings, of_client._group.transforms())]
    own = eye(fed).identities[0]
    for hidden in (secret, own.signing_seed, own.encryption_seed):
        assert not any(one in text for text in shown for one in (hidden.hex(), repr(hidden)))


def test_unknown_protections_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"protection\.gram: 'har' is not known"):
        Protection(gram=("har",))
    with pytest.raises(InputError, match=r"protection\.sum: 'walsh'"):
        Protection(sum="walsh")
    with pytest.raises(InputError, match=r"protection\.min_cohort = -1"):
        Protection(min_cohort=-1)
    with pytest.raises(InputError, match="a sum over one client"):
        Protection(sum="secagg", min_cohort=1)
    with pytest.raises(InputError, match="more than one"):
        Protection(gram=("haar", "haar"))
    with pytest.raises(InputError, match=r"protection\.secagg_mode = 'activ': expected 'active' or 'passive'"):
        Protection(secagg_mode="activ")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"protection\.secagg_bits = 32\.0: expected 16 or 32"):
        Protection(secagg_bits=32.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"protection\.ckks_release = 'label': expected 'gram'"):
        Protection(ckks_release="label")  # type: ignore[arg-type]
    assert Protection().name == "none"
    assert PROTECTIONS["haar"].name == "haar"
    assert Protection(gram=("haar",)).name == "gram=haar"


def test_a_transcript_at_level_headers_keeps_no_payload_but_all_counts() -> None:
    full, headers = (federation(population(), transcript=Transcript(level)) for level in ("full", "headers"))
    for fed in (full, headers):
        held = fed.compute(Make())
        fed.gram(held["rows"], then=looked_at)
        fed.mean(held["vector"])
    assert all(m.payload is None for m in headers.transcript.messages)
    assert [m.digest for m in headers.transcript.messages] == [m.digest for m in full.transcript.messages]
    assert headers.transcript.upload_bytes == full.transcript.upload_bytes == 8 * (2 * 4 + 10) * 8


# --- found in review: what must not happen again


def test_a_value_in_two_epochs_is_no_handle_on_either() -> None:
    fed = federation(population())
    held = fed.compute(Make())
    fed.gram(held["rows"], then=looked_at, on=[0, 1])
    other = fed.gram(held["vector"], then=looked_at, on=[0, 1])  # another part: another epoch
    assert other.result["n"] == 2
    grown = fed.gram(held["rows"], then=looked_at, against=held["rows"], on=[2])
    assert grown.result["n"] == 3
    fed.gram(held["rows"], then=looked_at, on=[3, 4])
    with pytest.raises(InputError, match="several clustering epochs"):
        fed.gram(held["rows"], then=looked_at, against=held["rows"], on=[5])


def test_then_may_run_again_with_nobody_new() -> None:
    fed = federation(population())
    held = fed.compute(Make())
    fed.gram(held["rows"], then=looked_at)
    assert fed.gram(held["rows"], then=looked_at, against=held["rows"], on=()).result == {"seen": 8, "n": 8}


def test_a_repeated_round_number_repeats_no_transform() -> None:
    fed = federation(population(), PROTECTIONS["haar"])
    held = fed.compute(Make())
    for _ in range(2):
        fed.begin_round(0)
        fed.mean(held["vector"])
    transforms = [m.context["transform"] for m in fed.transcript.messages if m.operation == "mean"]
    assert len(set(transforms)) == 2


def test_a_few_numbers_are_not_hidden_by_a_rotation() -> None:
    fed = federation(population(), PROTECTIONS["haar"])
    with pytest.raises(InputError, match="hides little"):
        fed.mean(fed.compute(Make())["one"])
    (mean,) = fed.mean(fed.compute(Make())["vector", "one"])
    assert mean is not None
    with pytest.raises(InputError, match="hides little"):
        fed.product(mean.parts["one"], mean.parts["one"])


def test_public_weights_may_not_undo_the_floor() -> None:
    fed = federation(population(), Protection(min_cohort=3))
    with pytest.raises(InputError, match="100% of the weight"):
        fed.mean(fed.compute(Make())["vector"], weights={c: 1.0 if c == 0 else 1e-9 for c in fed.clients})
    with pytest.raises(InputError, match="no weight for client 1"):
        fed.mean(fed.compute(Make())["vector"], weights={0: 1.0})


@dataclass(frozen=True)
class Scribble:
    """A task that writes into what it was given."""

    parts: ClassVar[Parts] = {"x": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> dict[str, Array]:
        x = given.array("x")
        x += 1.0
        return {"x": x}


def test_what_clients_are_given_cannot_be_written_into() -> None:
    fed = federation(population())
    given = np.zeros(3)
    with pytest.raises(ValueError, match="read-only"):
        fed.compute(Scribble(), {"x": given})
    assert given.tolist() == [0.0, 0.0, 0.0]
    echoed = fed.compute(Echo(("x",)), {"x": given})
    given += 5.0
    assert eye(fed).peek(0, echoed["x"]).tolist() == [0.0, 0.0, 0.0]


def test_a_held_of_another_federation_is_refused() -> None:
    one, two = federation(population()), federation(population())
    with pytest.raises(InputError, match="not held by clients of this federation"):
        two.mean(one.compute(Make())["vector"])


def test_labels_must_be_whole_numbers_and_private_ones_have_no_cohort() -> None:
    fed = federation(population(), sampling=Sampling("per_cluster", 0.5))
    made = fed.compute(Make())
    with pytest.raises(InputError, match=r"label 0\.5, expected a whole number"):
        fed.mean(made["vector"], groups=dict.fromkeys(fed.clients, 0.5), k=1)
    with pytest.raises(InputError, match="per_cluster"):
        fed.cohort(made["choice"])
    assert fed.labels(made["choice"]) == parity(fed.clients)
    private = federation(population(), Protection(sum="secagg-oblivious"))
    assert private.labels(private.compute(Make())["choice"]) is None


def test_only_members_of_small_clusters_train_alone() -> None:
    """Where few of a large cluster were sampled, it waits: otherwise those few would go their own way for good."""
    fed = federation(population(), Protection(min_cohort=3, small_clusters="local"))
    held = fed.compute(Make(), on=[0, 1, 2, 3, 6])
    labels = {client: 0 if client < 4 else 1 for client in fed.clients}
    means = fed.mean(held["vector"], groups=labels, k=2)
    assert means[0] is not None
    assert means[1] is None


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({}, ()),
        ({"secagg_mode": "passive", "max_weight": 9.0, "min_cohort": 3}, ("secagg_mode", "max_weight")),
        ({"sum": "secagg", "secagg_mode": "passive", "max_weight": 9.0, "transform": "fixed"}, ("transform",)),
        ({"sum": "haar", "transform": "fixed", "sketch_dim": 64}, ("sketch_dim",)),
        ({"gram": ("sketch", "haar"), "sketch_dim": 64, "ckks_release": "gram"}, ("ckks_release",)),
        ({"gram": ("ckks",), "ckks_release": "gram", "ckks_ring": 8192}, ()),
        ({"gram": ("haar",), "most_epochs": 5}, ("most_epochs",)),
        ({"gram": ("shares",), "most_epochs": 5}, ()),
    ],
)
def test_settings_that_do_nothing_are_known(settings: dict[str, Any], idle: tuple[str, ...]) -> None:
    """A run says so: who set them may think that he is protected."""
    assert Protection(**settings).idle == idle
