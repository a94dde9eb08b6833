"""Means through secure aggregation: the same as in the clear to the quantiser's step, under dropouts, weights, minimum cohort sizes and
unlike models.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import Echo, Make, eye, federation, parity, population, training

from cflpriv.aggregation.secagg import bound
from cflpriv.aggregation.secure_sums import least_weight
from cflpriv.algorithms import fedavg
from cflpriv.contract.protection import Protection
from cflpriv.data import DataSpec, build_population
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, start
from cflpriv.experiments.run.run import advance, finish
from cflpriv.federation.messages import SumStep
from cflpriv.federation.server import FederationServer
from cflpriv.protocols.entropy import system_entropy
from cflpriv.protocols.errors import TooFewClients
from cflpriv.protocols.secagg.effective import reaches
from cflpriv.protocols.secagg.messages import Invite, Terms, decode_server, fewest_survivors
from cflpriv.types import Array

Mode = Literal["active", "passive"]


def secure(sum: str = "secagg", **more: Any) -> Protection:
    return Protection(sum=sum, secagg_clip=200.0, **more)


@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize("bits", [16, 32])
def test_group_means_are_the_means_to_the_quantisers_step(mode: Mode, bits: Literal[16, 32]) -> None:
    fed = federation(population(clients_per_group=5), secure(secagg_mode=mode, secagg_bits=bits))
    held = fed.compute(Make())
    labels = {client: 0 if client < 6 else 1 for client in fed.clients}
    means = fed.mean(held["vector", "one"], groups=labels, k=3)
    assert means[2] is None
    for label in (0, 1):
        mean, members = means[label], [c for c in fed.clients if labels[c] == label]
        assert mean is not None
        assert mean.count == len(members)
        step = 200.0 / (2 ** (bits - 1) / len(members) / 1.01)
        for part in ("vector", "one"):
            expected = np.mean([eye(fed).peek(c, held[part]) for c in members], axis=0)
            np.testing.assert_allclose(mean.parts[part].value(), expected, atol=2 * step)


def test_weights_are_sample_counts_within_public_limits() -> None:
    scene = population()
    first = scene.clients[0]
    scene = replace(scene, clients=(replace(first, x_train=first.x_train[:5], y_train=first.y_train[:5]), *scene.clients[1:]))
    fed = federation(scene, secure(max_weight=50.0))
    (mean,) = fed.mean(fed.compute(Make())["one"], weights="examples")
    assert mean is not None
    (terms,) = invites(fed)
    assert 5 < terms.least_weight < 12
    assert reaches(fewest_survivors(terms), 3, 50.0, terms.least_weight)
    assert not reaches(fewest_survivors(terms), 3, 50.0, terms.least_weight * 0.999)
    counted = [max(data.samples, terms.least_weight) for data in scene.clients]
    assert mean.parts["one"].value() == pytest.approx(np.average(range(8), weights=counted), abs=1e-4)
    assert mean.weight == pytest.approx(sum(counted), abs=1e-3)
    small = federation(scene, secure(max_weight=10.0))
    with pytest.raises(InputError, match="max_weight = 10"):
        small.mean(small.compute(Make())["one"], weights="examples")
    without = federation(scene, secure())
    with pytest.raises(InputError, match="sample count"):
        without.mean(without.compute(Make())["one"], weights="examples")


@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize("n", [3, 4, 8, 33, 60])
def test_what_few_samples_count_as_is_known_before_the_run(n: int, mode: Mode) -> None:
    protection = secure(max_weight=70.0, secagg_mode=mode)
    fed = federation(population(groups=1, clients_per_group=n), protection)
    fed.mean(fed.compute(Make())["one"], weights="examples")
    assert invites(fed)[0].least_weight == pytest.approx(least_weight(protection, n), rel=1e-12)


@pytest.mark.parametrize(
    ("clients", "protection", "equal"),
    [
        (4, {}, True), (8, {}, False), (8, {"min_cohort": 6}, True), (8, {"min_cohort": 5, "secagg_mode": "passive"}, True),
        (20, {"sum": "secagg-oblivious"}, True), (40, {"secagg_mode": "passive"}, False),
    ],
)  # fmt: skip
def test_a_run_warns_where_sample_counts_are_no_weights(clients: int, protection: dict[str, Any], equal: bool) -> None:
    changes = {"sum": "secagg", "max_weight": 100.0, **protection}
    algorithm = {"name": "ifca", "k": 2} if "sum" in protection else {"name": "fedavg"}
    tree = {"data": {"clients": clients}, "training": {"weights": "examples"}, "algorithm": algorithm, "protection": changes}
    doubts = parse_config(tree).doubts
    assert [doubt for doubt in doubts if "all weigh equally" in doubt] == (list(doubts) if equal else [])
    assert bool(doubts) == equal
    plain = parse_config({**tree, "training": {"weights": "equal"}})
    assert not plain.doubts


def test_with_no_more_clients_than_the_minimum_all_weigh_equally() -> None:
    scene = population(groups=1, clients_per_group=3)
    first = scene.clients[0]
    scene = replace(scene, clients=(replace(first, x_train=first.x_train[:5], y_train=first.y_train[:5]), *scene.clients[1:]))
    fed = federation(scene, secure(max_weight=50.0))
    (mean,) = fed.mean(fed.compute(Make())["one"], weights="examples")
    assert mean is not None
    assert mean.weight == pytest.approx(150.0)
    assert mean.parts["one"].value() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("sum", ["secagg", "secagg-oblivious"])
def test_no_server_chooses_a_weight(sum: str) -> None:
    fed = federation(population(), secure(sum, max_weight=50.0))
    held = fed.compute(Make())
    with pytest.raises(InputError, match=r"weights by client .* use 'equal', or 'examples' with protection\.max_weight"):
        fed.mean(held["one"], weights=dict.fromkeys(fed.clients, 1.0))
    assert "weight" not in SumStep.__struct_fields__


@pytest.mark.parametrize("first", ["equal", "examples"])
def test_means_of_one_round_have_one_kind_of_weights(first: Literal["equal", "examples"]) -> None:
    fed = federation(population(), secure(max_weight=50.0))
    held = fed.compute(Make())
    fed.mean(held["one"], weights=first)
    (again,) = fed.mean(held["vector"], weights=first)
    assert again is not None
    with pytest.raises(InputError, match="in a sum of this round with other weights"):
        fed.mean(held["vector"], weights="examples" if first == "equal" else "equal")


@pytest.mark.slow
@given(st.integers(0, 10**6), st.floats(0.05, 0.6), st.sampled_from(["active", "passive"]))
@settings(max_examples=25, deadline=None)
def test_under_dropouts_the_mean_is_that_of_the_survivors_or_nothing(seed: int, rate: float, mode: Mode) -> None:
    """The same clients vanish in the clear, so the two means agree wherever the secure one exists."""
    scene = population(clients_per_group=6)
    means = []
    for protection in (Protection(min_cohort=3), secure(secagg_mode=mode)):
        fed = federation(scene, protection, seed=seed, dropout=rate)
        held = fed.compute(Make())
        try:
            means.append(fed.mean(held["vector"], groups={c: 0 if c < 7 else 1 for c in fed.clients}, k=2))
        except TooFewClients:
            means.append((None, None))
    for clear, masked in zip(*means, strict=True):
        if masked is not None:
            assert clear is not None
            assert clear.count == masked.count
            np.testing.assert_allclose(masked.parts["vector"].value(), clear.parts["vector"].value(), atol=1e-5)


def test_the_server_reads_no_update() -> None:
    fed = federation(population(), secure())
    held = fed.compute(Make())
    fed.mean(held["vector"])
    plain = {eye(fed).peek(c, held["vector"]).tobytes() for c in fed.clients}
    kinds = [m.kind for m in fed.transcript.messages]
    assert "secagg Masked" in kinds
    for message in fed.transcript.messages:
        assert "update" not in (message.payload or {})
        for array in (message.payload or {}).values():
            assert not any(vector in array.tobytes() for vector in plain)
    masked = next(m for m in fed.transcript.messages if m.kind == "secagg Masked")
    assert masked.total_bytes <= masked.bytes_each * len(masked.clients)
    assert fed.transcript.upload_bytes == sum(m.total_bytes for m in fed.transcript.messages if m.source == "clients")


def test_floors_and_overlaps() -> None:
    assert secure().smallest_sum == 3
    fed = federation(population(), secure())
    held = fed.compute(Make())
    with pytest.raises(TooFewClients):
        fed.mean(held["one"], groups={c: c // 2 for c in fed.clients}, k=4)
    with pytest.raises(InputError, match="overlapping groups under sum = 'secagg'"):
        fed.mean(held["one"], groups=dict.fromkeys(fed.clients, (0, 1)), k=2)


def test_mask_keys_are_advertised_a_sum_ahead_and_used_once() -> None:
    fed = federation(population(), secure())
    adverts = []
    for number in range(3):
        fed.begin_round(number)
        before = len(fed.transcript.messages)
        fed.mean(fed.compute(Make())["one"])
        adverts.append(sum(len(m.clients) for m in fed.transcript.messages[before:] if m.kind == "secagg Advert"))
    assert adverts == [8, 0, 0]


def invites(fed: FederationServer) -> list[Terms]:
    """The terms that the server sent, read from the recorded bytes."""
    found = []
    for message in fed.transcript.messages:
        if message.kind == "secagg Invite" and message.payload is not None:
            decoded = decode_server(message.payload["bytes"][0].tobytes())
            assert isinstance(decoded, Invite)
            found.append(decoded.terms)
    return found


def test_a_planted_model_is_refused() -> None:
    """A per-cluster sum lists exactly one model; a server that hands one client its own gets no sum, also when that went through a Held."""
    fed = federation(population(), secure())
    models = [np.zeros(12), np.full(12, 50.0)]
    planted = fed.compute(Echo(("m",)), {"m": models}, which={client: int(client == 0) for client in fed.clients})
    later = fed.compute(Echo(("m",)), {"m": planted["m"]})
    for held in (planted, later):
        with pytest.raises(InputError, match="sent 2 different models"):
            fed.mean(held["m"])
    assert not [m for m in fed.transcript.messages if m.operation == "mean"]
    (mean,) = fed.mean(planted["m"], models=2)  # an algorithm that says so in public
    assert mean is not None
    fed.begin_round(1)
    by_cluster = fed.compute(Echo(("m",)), {"m": [model + 1 for model in models]}, which=parity(fed.clients))
    assert all(mean is not None for mean in fed.mean(by_cluster["m"], groups=parity(fed.clients), k=2))


def test_what_the_server_proposes_is_what_was_agreed() -> None:
    one, two = federation(population(), secure()), federation(population(), secure())
    for fed in (one, two):
        held = fed.compute(Echo(("m",)), {"m": np.zeros(3)})
        fed.mean(held["m"])
        (terms,) = invites(fed)
        assert terms.min_cohort == 3
        assert len(terms.models) == 1
        known = fed.known(held.key)
        (received,) = {name for _, ((_, name),) in known["models"]}
        assert {eye(fed).client(c).values.origin(known["number"]).received.hex() for c in fed.clients} == {received}
        step = SumStep(fed.session, (1, 1), known["number"], ("m",), 1, "sum", None, b"", None)
        assert terms.models[0] == bound(step, bytes.fromhex(received)) != bytes(32)
        assert terms.cohort == tuple(range(8))
        assert terms.mode == "active"
    other = federation(population(), secure(), entropy=lambda party: system_entropy)
    other.mean(other.compute(Make())["one"])
    assert invites(other)[0].session != invites(one)[0].session


def test_a_limit_far_above_all_sample_counts_makes_weights_equal() -> None:
    """The least weight has 64 levels, so that rounding changes no client's share much."""
    fed = federation(population(), secure(max_weight=1e6, secagg_bits=16))
    (mean,) = fed.mean(fed.compute(Make())["one"], weights="examples")
    (terms,) = invites(fed)
    assert terms.least_weight / terms.weight_limit * terms.levels >= 64
    assert mean is not None
    assert mean.weight == pytest.approx(8 * terms.least_weight, rel=0.02)
    assert float(mean.parts["one"].value()) == pytest.approx(3.5, abs=0.05)


def test_a_failed_sum_is_on_record_and_clients_read_what_they_get() -> None:
    fed = federation(population(), secure(), dropouts=[(0, client, "Reveal") for client in range(6)])
    fed.begin_round(0)
    with pytest.raises(TooFewClients):
        fed.mean(fed.compute(Make())["one"])
    kinds = {m.kind: m for m in fed.transcript.messages}
    assert {"secagg Masked", "secagg Unmask"} <= set(kinds)
    assert kinds["secagg Unmask"].readers == ("server", "clients")
    assert kinds["secagg Masked"].readers == ("server",)


def test_oblivious_dropouts_leave_the_count() -> None:
    fed = federation(population(clients_per_group=6), secure("secagg-oblivious"), dropouts=[(0, 3, "Masked")])
    fed.begin_round(0)
    made = fed.compute(Make())
    even, odd = fed.mean(made["one"], groups=made["choice"], k=2)
    assert even is not None
    assert odd is not None
    assert (even.count, odd.count) == (6, 5)
    assert float(odd.parts["one"].value()) == pytest.approx(np.mean([1, 5, 7, 9, 11]), abs=1e-4)


def test_public_groups_are_no_case_for_oblivious_sums() -> None:
    fed = federation(population(), secure("secagg-oblivious"))
    with pytest.raises(InputError, match="public already"):
        fed.mean(fed.compute(Make())["one"], groups=parity(fed.clients), k=2)
    (mean,) = fed.mean(fed.compute(Make())["one"])
    assert mean is not None


def test_oblivious_sums_keep_choices_private() -> None:
    fed = federation(population(clients_per_group=5), secure("secagg-oblivious"))
    made = fed.compute(Make())
    even, odd, none = fed.mean(made["vector"], groups=made["choice"], k=3)
    assert none is None
    for label, mean in ((0, even), (1, odd)):
        assert mean is not None
        members = [c for c in fed.clients if c % 2 == label]
        assert mean.count == len(members)
        expected = np.mean([eye(fed).peek(c, made["vector"]) for c in members], axis=0)
        np.testing.assert_allclose(mean.parts["vector"].value(), expected, atol=1e-4)
    assert not [m for m in fed.transcript.messages if m.operation == "gather"]
    for message in fed.transcript.messages:
        assert "labels" not in message.context
        assert "group" not in message.context
        assert message.clients == fed.clients


def test_training_under_secure_aggregation_follows_training_in_the_clear() -> None:
    scene = build_population(DataSpec(clients=8, rotations=(0, 90), test_samples_per_client=30))
    served: list[Array] = []
    for protection in (Protection(min_cohort=3), Protection(sum="secagg")):
        fed = federation(scene.clients, protection=protection, seed=1)
        algorithm = fedavg(training(scene), weights="equal")
        state = algorithm.init(fed)
        for number in range(3):
            fed.begin_round(number)
            state, _ = algorithm.round(fed, state)
        served.append(eye(fed).peek(0, state.model))
    np.testing.assert_allclose(served[0], served[1], atol=1e-6)


@pytest.mark.parametrize(("kind", "algorithm"), [("secagg", "pacfl"), ("secagg-oblivious", "fedavg")])
def test_a_run_with_dropouts(kind: str, algorithm: str) -> None:
    config = parse_config({
        "data": {"clients": 12, "rotations": [0, 90], "test_samples_per_client": 30}, "model": {"hidden": 8},
        "training": {"rounds": 4, "weights": "equal", "dropout": 0.2, "lr": 0.1}, "protection": {"sum": kind},
        "algorithm": {"name": algorithm},
    })  # fmt: skip
    simulation = start(config)
    rows = [advance(simulation) for _ in range(4)]
    assert finish(simulation)["protection"] == f"sum={kind}"
    assert any(row["skipped"] is None for row in rows)


def test_bad_settings_are_refused() -> None:
    for options, words in [
        ({"sum": "secagg", "min_cohort": 1}, "a sum over one client"),
        ({"secagg_clip": 0.0}, "secagg_clip"),
        ({"max_weight": -1.0}, "max_weight"),
        ({"min_cohort": float("nan")}, "min_cohort = nan: expected an integer ≥ 0"),
        ({"landmarks": 2.5}, "landmarks = 2.5: expected an integer ≥ 0"),
        ({"sketch_dim": True}, "sketch_dim = True: expected an integer ≥ 8"),
    ]:
        with pytest.raises(InputError, match=words):
            Protection(**options)  # type: ignore[arg-type]
    trees: list[tuple[dict[str, Any], str]] = [
        ({"protection": {"sum": "secagg"}}, "max_weight, a public maximum"),
        ({"protection": {"sum": "secagg", "secagg_bits": 8}, "training": {"weights": "equal"}}, "secagg_bits = 8"),
        ({"training": {"dropout": 1.0}}, r"training\.dropout = 1.0"),
    ]
    for tree, words in trees:
        with pytest.raises(InputError, match=words):
            parse_config(tree)


def test_clipping_is_counted_not_silent() -> None:
    fed = federation(population(), Protection(sum="secagg", secagg_clip=10.0))
    held = fed.compute(Make())
    (mean,) = fed.mean(held["vector"])
    assert mean is not None
    assert mean.clipped == sum(c**2 > 10 for c in fed.clients)


def test_configured_dropouts_vanish_where_they_are_told_to() -> None:
    stages = ["Advert", "Shares", "Masked", "Consistent", "Reveal"]
    for stage in stages:
        fed = federation(population(), secure(), dropouts=[(4, 2, stage)])
        fed.begin_round(4)
        (mean,) = fed.mean(fed.compute(Make())["one"])
        assert mean is not None
        assert mean.count == (7 if stage in stages[:3] else 8)
        fed.begin_round(5)
        (mean,) = fed.mean(fed.compute(Make())["one"])
        assert mean is not None
        assert mean.count == 8
    with pytest.raises(InputError, match=r"training\.dropouts"):
        federation(population(), secure(), dropouts=[(0, 0, "Nap")])
