"""Every attack, on its unprotected reference over fresh seeds and on clients that have nothing to do with those it is scored against.

Statuses over five seeds are t-tests at 2.5 % (one-sided) of the differences less a margin; runs are seeded, so outcomes do not change.
"""

from typing import Any

import pytest
from attack_scenes import case, config, over_seeds, unrelated

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.figures.leakage import Cell

SEEDS = range(5)
SCENES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "signature_inversion": ({}, {}),
    "label_inference": ({}, {}),
    "anchor_counts": ({"name": "stocfl"}, {}),
    "gram_geometry": ({}, {"rounds": 0}),
    "sybil_span": ({}, {"rounds": 0}),
    "cluster_identity": ({"name": "ifca", "k": 4}, {"rounds": 4}),
    "disaggregation": ({}, {"rounds": 4, "participation": 0.3}),
    "influence": ({"name": "pfedlia", "warm_up": 1, "local_epochs": 2}, {}),
}
"""attack -> (algorithm, training) of its reference."""
LEAST = {
    ("signature_inversion", "mean_image_cosine"): 0.99,
    ("signature_inversion", "label_set_accuracy"): 0.9,
    ("label_inference", "label_set_accuracy"): 0.9,
    ("anchor_counts", "label_counts_exact"): 0.9,
    ("gram_geometry", "label_set_accuracy"): 0.75,
    ("cluster_identity", "group_accuracy"): 0.7,
    ("influence", "group_accuracy"): 0.9,
}
"""What the figures have to reach besides."""
LONG = ("cluster_identity", "anchor_counts", "influence")
"""Their views of unrelated clients take a while: thorough runs only."""


def config_of(name: str, seed: int) -> Any:
    algorithm, training = SCENES[name]
    return config(algorithm, training=training, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_beats_its_baseline_unprotected_over_seeds(name: str) -> None:
    cells = over_seeds([ATTACKS[name].cells(case(config_of(name, seed)))[0] for seed in SEEDS])
    judged = {key: cell for key, cell in cells.items() if key != ("label_set_accuracy", 0) or name != "gram_geometry"}
    assert judged
    for (metric, _), cell in judged.items():
        assert cell.status == "leaks", cell.line()
        assert cell.value is not None
        assert cell.baseline is not None
        assert cell.low is not None
        assert cell.high is not None
        assert cell.low <= cell.value <= cell.high
        assert cell.seeds == tuple(SEEDS)
        gain = (cell.baseline - cell.value) if cell.lower_is_better else (cell.value - cell.baseline)
        assert gain > cell.margin
        assert cell.value >= LEAST.get((name, metric), -1.0), cell.line()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in SCENES if name != "disaggregation"]
)
def test_falls_to_its_baseline_on_unrelated_clients(name: str) -> None:
    several: list[list[Cell]] = [ATTACKS[name].cells(unrelated(config_of(name, seed)))[0] for seed in SEEDS]
    cells = over_seeds(several)
    judged = {key: cell for key, cell in cells.items() if cell.value is not None}
    assert judged
    for (metric, known), cell in judged.items():
        expected = {"not_validated"} if name == "gram_geometry" and known == 0 else {"at_baseline", "inconclusive"}  # three seeds are few
        assert cell.status in expected, f"{metric}: {cell.line()}"


@pytest.mark.slow
def test_an_update_from_an_unrelated_sum_is_no_recovery() -> None:
    """A sum over one client that belongs to another run gives none of these clients' updates."""
    cells, _ = ATTACKS["disaggregation"].cells(unrelated(config_of("disaggregation", 0)))
    (single,) = [cell for cell in cells if cell.metric == "singleton_exact"]
    assert single.value == 0.0
    assert single.reference is not None
    assert single.reference > 0
    assert single.status == "at_baseline"


@pytest.mark.slow
def test_gram_geometry_states_its_k() -> None:
    cells, _ = ATTACKS["gram_geometry"].cells(case(config_of("gram_geometry", 0)))
    assert [cell.k_known for cell in cells] == [0, 3, 10]
    assert cells[0].status == "leaks"  # by the solver of `assignment` and several simulated clients for each label set


@pytest.mark.slow
def test_gram_geometry_without_known_clients_over_seeds() -> None:
    """Four of five seeds come out whole, one not at all: a wrong naming fits better there."""
    values = [ATTACKS["gram_geometry"].cells(case(config_of("gram_geometry", seed)))[0][0].value or 0.0 for seed in SEEDS]
    print(values)
    assert sum(values) / len(values) >= 0.7


def test_the_scenes_are_attacks_of_this_room() -> None:
    assert set(SCENES) <= set(ATTACKS)
