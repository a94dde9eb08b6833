"""Mean images of rotated signatures by way of label sets: five seeds, other clients, planted leaks, and what is not attempted."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from attack_scenes import config
from scipy import stats

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.compared.gram_geometry import ComparedProducts, compared
from cflpriv.attacks.compared.signature_inversion import cells as cells_of_signatures
from cflpriv.attacks.compared.signature_labels import COMPARISONS, IMAGE_MARGIN, chance_of_renamed, images_of_label_sets
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.figures.leakage import Case, Cell
from cflpriv.attacks.figures.pooling import pooled
from cflpriv.attacks.figures.significance import RATE, chance, chance_of_matching, power
from cflpriv.data import build_population
from cflpriv.randomness import stream

FOUR = ((0, 1), (2, 3), (4, 5), (6, 7))
COSINE = "mean_image_cosine"


def pairs(seed: int) -> tuple[tuple[int, ...], ...]:
    """Five groups of two labels, dealt by the seed."""
    return tuple(map(tuple, np.random.default_rng(seed).permutation(10).reshape(5, 2).tolist()))


@cache
def turned(seed: int, kind: str = "haar", groups: tuple[tuple[int, ...], ...] = FOUR) -> Case:
    """Twenty clients whose signatures are rotated, two labels each."""
    made = config(None, {"gram": [kind]}, seed, data={"groups": [list(group) for group in groups]}, training={"rounds": 0})
    return case_of(fresh_scene(made, build_population(made.data), 0), "server")


def signature_figures(case: Case) -> dict[str, Cell]:
    return {one.metric: one for one in cells_of_signatures(case)[0]}


def test_images_of_label_sets_are_the_means_of_their_samples() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 1, 3, 2)), rng.integers(5, size=60)
    sets = [frozenset({0}), frozenset({1, 4}), frozenset(range(5)), frozenset({9})]
    made = images_of_label_sets(x, y, sets)
    for image, one in zip(made[:3], sets[:3], strict=True):
        np.testing.assert_allclose(image, x[np.isin(y, list(one))].mean(axis=0))
    assert not made[3].any()


@pytest.mark.slow
def test_a_rotation_leaves_label_sets_and_these_make_images() -> None:
    """Label sets of rotated signatures are figures of `gram_geometry`, and of nothing else."""
    found = signature_figures(turned(0))
    assert set(found) == set(IMAGE_MARGIN)
    assert {one.status for one in found.values()} == {"leaks"}
    assert (found[COSINE].value or 0.0) > 0.99
    assert found[COSINE].reference == pytest.approx(found[COSINE].value)


@pytest.mark.slow
def test_images_dealt_to_other_clients_are_no_leak() -> None:
    made = turned(0)
    names = stream(0, "dealt").permutation(20)
    dealt = {client: made.truth.mean_images[int(names[client])] for client in range(20)}
    found = signature_figures(replace(made, truth=replace(made.truth, mean_images=dealt)))
    assert "leaks" not in {one.status for one in found.values()}, [one.line() for one in found.values()]


@pytest.mark.slow
def test_clients_with_all_labels_are_not_attempted() -> None:
    data = {"partition": "iid", "groups": [], "rotations": [0, 90]}
    made = config(None, {"gram": ["haar"]}, data=data, training={"rounds": 0})
    (one,) = cells_of_signatures(case_of(fresh_scene(made, build_population(made.data), 0), "server"))[0]
    assert one.status == "not_attempted"
    assert "every client has all labels" in one.note


@pytest.mark.slow
def test_a_sketch_is_read_by_its_inner_products() -> None:
    """Here signatures have 64 numbers, and the sketch 48: the figure is by way of label sets, whatever its status."""
    made = config(None, {"gram": ["sketch"], "sketch_dim": 48}, training={"rounds": 0})
    found = signature_figures(case_of(fresh_scene(made, build_population(made.data), 0), "server"))
    assert found[COSINE].note.startswith("label sets from inner products")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["haar", "hadamard"])
@pytest.mark.parametrize("groups", ["four", "pairs"])
def test_rotated_signatures_over_five_seeds(kind: str, groups: str) -> None:
    """The claim, on digits with no known client: in four groups of labels four of five seeds have images at .99, as `gram_geometry` has
    their label sets; of five pairs, fewer."""
    several = [cells_of_signatures(turned(seed, kind, FOUR if groups == "four" else pairs(seed)))[0] for seed in range(5)]
    found = {one.metric: one for one in pooled([one for cells in several for one in cells])}
    labels = [ATTACKS["gram_geometry"].cells(turned(seed, kind, FOUR if groups == "four" else pairs(seed)))[0][0] for seed in range(5)]
    print("label sets", [one.value for one in labels], *(one.line() for one in found.values()), sep="\n")
    images = [next(one for one in cells if one.metric == COSINE) for cells in several]
    print("cosine", [(round(one.value or 0.0, 4), round(one.baseline or 0.0, 4), one.status) for one in images])
    assert {one.status for one in found.values()} == {"leaks"}
    for one, sets in zip(images, labels, strict=True):
        assert one.status == "leaks" or (sets.value or 0.0) < 0.9, one.line()
        assert one.status in ("leaks", "not_validated"), "the inner products of clear signatures are the same"


@pytest.mark.slow
def test_rotated_signatures_of_others_show_nothing_of_these_clients() -> None:
    """Scored against clients of other groups, on the four seeds where the attack works; every figure is judged by itself."""
    for seed in (0, 2, 3, 4):
        seen = replace(turned(seed), view=turned(seed + 77, groups=pairs(seed)).view)
        found = signature_figures(seen)
        assert {one.status for one in found.values()} <= {"at_baseline", "inconclusive"}, [one.line() for one in found.values()]


@pytest.mark.slow
def test_renamed_label_sets_are_a_valid_null() -> None:
    """Label sets of a random naming: p ≤ .05 in at most 22 of 250 runs, which is exceeded in less than 1 % of such tests."""
    prior, truth = turned(0).prior, turned(0).truth
    images = np.stack([truth.mean_images[client] for client in range(20)])
    rng, rejected = np.random.default_rng(0), 0
    for run in range(250):
        name = rng.permutation(8).tolist()  # the labels that there are
        found = [frozenset(name[label] for label in truth.label_sets[client]) for client in range(20)]
        rejected += chance_of_renamed(found, images, prior, stream(run, "renamed")) <= 0.05
    low, high = stats.binomtest(rejected, 250).proportion_ci(0.95, method="exact")
    print(f"{rejected} of 250 [{low:.3f}, {high:.3f}]")
    assert rejected <= stats.binom.isf(0.01, 250, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("metric", IMAGE_MARGIN)
def test_the_power_that_is_stated_is_that_of_a_planted_leak(metric: str) -> None:
    """A toss for each client: its image by its true label set, or what any client gets. All three tests together show it about as often as
    `significance.power` says: in 100 runs not so seldom that it is less than 1 % probable."""
    case, compare, margin = turned(0), COMPARISONS[metric], IMAGE_MARGIN[metric]
    seen = compared(case)
    assert isinstance(seen, ComparedProducts)
    x, y = case.prior.x, case.prior.y
    truth = np.stack([case.truth.mean_images[client] for client in seen.judged])
    sets = [case.truth.label_sets[client] for client in seen.judged]
    own, blank = images_of_label_sets(x, y, sets), x.mean(axis=0, dtype=np.float64)
    by_set, beside = (np.array([compare(real, image) for real, image in zip(truth, of, strict=True)]) for of in (own, [blank] * 20))
    table = np.array([[compare(real, image) for real in truth] for image in [*own, blank]])
    rng, shown = np.random.default_rng(0), 0
    for run in range(100):
        toss = rng.random(20) < 0.5
        named = [one if hit else frozenset(range(8)) for one, hit in zip(sets, toss, strict=True)]
        dealt = table[np.where(toss, np.arange(20), 20)]
        chances = (
            chance(np.diag(dealt), beside, margin), chance_of_matching(-dealt, stream(run, "dealt")),
            chance_of_renamed(named, truth, case.prior, stream(run, "renamed")),
        )  # fmt: skip
        shown += max(chances) < RATE
    stated = power(beside, beside, by_set, beside, margin)
    print(f"{metric}: {shown} of 100 shown, power {stated:.3f}")
    assert stats.binom.cdf(shown, 100, stated) > 0.01
