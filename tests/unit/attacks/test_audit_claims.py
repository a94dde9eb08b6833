"""What an audit may not claim: protection that it did not measure, or a leak that the prior alone explains."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attack_scenes import QUICK, case, config, figures_of

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.adversary import view_of
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.figures.leakage import Cell
from cflpriv.attacks.figures.pooling import pooled
from cflpriv.attacks.labels.label_inference import auxiliary_shares
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Transcript
from cflpriv.data import build_population
from cflpriv.errors import InputError


def test_a_key_holder_whose_key_was_not_written_is_refused() -> None:
    made = Transcript("full")
    said = [{"bytes": np.zeros(1, np.uint8)}]
    made.add(0, "gram", "ckks request", "server", "key-holder", [0], said, readers=("server", "key-holder"), context={"epoch": 0})
    with pytest.raises(InputError, match="key was not written"):
        view_of(made.messages, "key-holder", {}, Protection(gram=("ckks",)))


@pytest.mark.slow
def test_a_key_holder_knows_the_clusters_that_it_makes() -> None:
    pytest.importorskip("tenseal")
    made = config({"k": 4}, {"gram": ["ckks"]}, data={"clients": 12}, training={"rounds": 1})
    made = replace(made, run=replace(made.run, audit_parties=("server", "key-holder")))
    scene = fresh_scene(made, build_population(made.data), 1, QUICK)
    holder, server = (ATTACKS["cluster_identity"].cells(case_of(scene, one, QUICK))[0][0] for one in ("key-holder", "server"))
    assert holder.value == server.value
    assert holder.value is not None


def test_a_coalition_of_all_has_nothing_left_to_see() -> None:
    made = config(training={"rounds": 1}, run={"audit_parties": ["server", *(f"client:{i}" for i in range(20))]})
    (cell,) = ATTACKS["signature_inversion"].cells(case(made, "server+20"))[0]
    assert cell.status == "nothing_to_see"


@pytest.mark.slow
def test_means_of_a_single_model_are_attacked_under_secure_aggregation() -> None:
    cells, _ = ATTACKS["label_inference"].cells(case(config({"name": "fedavg"}, {"sum": "secagg"})))
    of_clients = [cell for cell in cells if not cell.metric.startswith("aggregate")]
    assert {cell.status for cell in of_clients} == {"inconclusive"}  # one sum in which a member is missing says too little of it
    assert {cell.power for cell in of_clients} == {0.0}
    (whole,) = [cell for cell in cells if cell.metric.startswith("aggregate")]
    assert whole.status == "not_validated"  # one cluster, and its histogram is that of everybody


def test_the_prior_alone_knows_the_labels_of_the_auxiliary_data() -> None:
    prior = case(config(training={"rounds": 0})).prior
    few = replace(prior, y=np.array([0, 0, 0, 1]))
    assert auxiliary_shares(few)[:3].tolist() == [0.75, 0.25, 0.0]


@pytest.mark.parametrize("unit", ["sample", "client"])
def test_private_runs_that_compare_nothing_are_audited(unit: str) -> None:
    noise = {"unit": unit, "epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0} | ({"samples": 12} if unit == "sample" else {})
    seen = case(config({"name": "fedavg"}, privacy=noise, data={"clients": 8, "samples_per_client": 12}, training={"rounds": 1}))
    for attack in ("gram_geometry", "sybil_span", "fold_release"):
        assert {cell.status for cell in ATTACKS[attack].cells(seen)[0]} == {"not_applicable"}, attack


@pytest.mark.parametrize("kind", ["permutation", "haar"])
def test_what_a_transform_hides_is_not_read_as_if_it_were_in_the_clear(kind: str) -> None:
    """Nor called safe: neither attack is made for it."""
    small = {"clients": 8, "samples_per_client": 2}
    anchors = case(config({"name": "stocfl"}, {"gram": [kind]}, data=small, training={"rounds": 1}))
    images = case(config({"name": "fedavg"}, {"sum": kind}, data=small, training={"rounds": 1}))
    for attack, seen in (("anchor_counts", anchors), ("gradient_inversion", images)):
        (only,) = ATTACKS[attack].cells(seen)[0]
        assert only.status == "not_attempted", only.line()
        assert "transformed" in only.note or f"under a secret {kind}" in only.note


@pytest.mark.parametrize("kind", ["haar", "permutation"])
def test_few_clients_are_not_nothing(kind: str) -> None:
    """What three clients compare and send is in the view, too few for these attacks."""
    seen = case(config({"k": 2}, {"gram": [kind], "sum": kind}, data={"clients": 3, "samples_per_client": 12, "groups": [[0, 1]]}))
    for attack in ("gram_geometry", "sybil_span", "key_recovery", "gram_updates"):
        first = ATTACKS[attack].cells(seen)[0][0]
        assert first.status == "not_attempted", first.line()


def test_inner_products_that_no_attack_reads_are_not_nothing() -> None:
    """OCFL compares two updates of a client at once."""
    protection = {"gram": ["haar"], "sum": "secagg", "secagg_mode": "passive", "min_cohort": 2}
    seen = case(config({"name": "ocfl"}, protection, data={"clients": 8, "samples_per_client": 4}))
    (only,) = ATTACKS["gram_updates"].cells(seen)[0]
    assert only.status == "not_attempted", only.line()
    assert "as 'rows'" in only.note


def test_what_an_algorithm_calls_otherwise_is_not_overlooked() -> None:
    """FedProto's prototypes, and an update under a name of somebody's own, in the clear: there is something to see."""
    small = {"clients": 8, "samples_per_client": 4}
    prototypes = case(config({"name": "fedproto"}, data=small, training={"rounds": 1}))
    seen = case(config({"name": "fedavg"}, data=small, training={"rounds": 1}))
    named = tuple(
        replace(one, payload={"delta": one.payload["update"]}) if one.operation == "mean" and one.payload else one
        for one in seen.view.messages
    )
    own = replace(seen, view=replace(seen.view, messages=named))
    for attack, of in (("gradient_inversion", prototypes), ("gradient_inversion", own), ("label_inference", own), ("update_norms", own)):
        first = ATTACKS[attack].cells(of)[0][0]
        assert first.status == "not_attempted", first.line()
    assert "as 'delta', which no attack reads" in ATTACKS["label_inference"].cells(own)[0][0].note


def test_a_seed_with_nothing_to_see_hides_no_other() -> None:
    empty = Cell("a", "server", "none", "m", *(None,) * 5, "nothing_to_see", 0, (0,))
    leaking = replace(empty, value=0.5, baseline=0.0, reference=0.5, status="leaks", seeds=(1,), exact=True)
    safe = replace(leaking, value=0.0, status="at_baseline", seeds=(2,))
    found = pooled([empty, leaking])[0]
    assert replace(found, note="") == leaking
    assert "something to see in 1 of 2 seeds" in found.note
    assert pooled([safe, leaking])[0] == leaking
    assert pooled([empty])[0] == empty
    several = [replace(leaking, value=v, exact=False, reference_baseline=0.0, seeds=(s,)) for s, v in ((1, 0.4), (2, 0.5), (3, 0.6))]
    whole, part = (pooled(cells)[0] for cells in (several, [empty, *several, replace(empty, note="why not")]))
    assert replace(part, note="") == whole
    assert "3 of 5 seeds" in part.note


def test_released_models_say_something_of_those_who_trained_them() -> None:
    """How far a released model moved from the public initial one is read, and not called nothing."""
    seen = case(config({"name": "fedavg"}, data={"clients": 8, "samples_per_client": 12}), "released")
    assert figures_of("label_inference", seen)["aggregate_histogram_l1"].value is not None
    assert figures_of("membership", seen)["update_gradients_auc"].value is not None
    assert figures_of("exact_zeros", seen)["excluded_inputs_auc"].value is not None
    assert all(cell.status != "nothing_to_see" for name in ("gradient_inversion", "exact_zeros") for cell in ATTACKS[name].cells(seen)[0])


@pytest.mark.parametrize("adversary", ["server", "released"])
def test_models_of_a_part_of_the_network_are_read(adversary: str) -> None:
    """LG-FedAvg's clients share their last layers, whose sums show labels."""
    made = config({"name": "lg_fedavg"}, {"sum": "secagg"}, data={"clients": 8, "samples_per_client": 12}, training={"rounds": 3})
    found = figures_of("label_inference", case(made, adversary))
    assert found["aggregate_histogram_l1"].value is not None
    assert (found["histogram_l1"].value is None) == (adversary == "released")


@pytest.mark.parametrize("algorithm", [{"name": "pacfl", "landmarks": 6}, {"name": "flexcfl", "k": 2, "pretrain_scale": 2}])
def test_clients_that_are_placed_without_being_compared_are_imitated_too(algorithm: dict[str, Any]) -> None:
    """More pretended clients than are compared: each has its rows, or the pipeline is not imitated."""
    prior = case(config(algorithm, data={"clients": 12, "samples_per_client": 12}, training={"rounds": 1})).prior
    shares = [(prior.x[i : i + 12], prior.y[i : i + 12]) for i in range(0, 240, 12)]
    rows = prior.simulate(shares)
    assert rows is None or len(rows) == len(shares)
    assert (rows is None) == (algorithm["name"] == "flexcfl")
