"""The attacks alone: on an update, a signature, a Gram matrix, cohort sums and scores from any other federated system.

Each function takes plain numpy arrays. What stands in for "another system" here is a few lines of numpy on scikit-learn's digits; replace
`their_*` by what your own system sends. Beside every figure stands what the same attacker gets without a view. No run folder is needed:
`python examples/attack_other_systems.py` takes a few seconds.
"""

import numpy as np
from sklearn.datasets import load_digits

from cflpriv.attacks import (
    disaggregate,
    groups_from_scores,
    inputs_of_batch,
    invert_signature,
    labels_from_bias,
    labels_from_gram,
    recover_label_set,
    rows_from_products,
)
from cflpriv.attacks.figures.leakage import cosine, dealt_at_random, grouping_accuracy
from cflpriv.attacks.figures.significance import confidence_interval
from cflpriv.streams import printable_streams

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = PIXELS / 16.0
RNG = np.random.default_rng(0)
DRAWS = 20
"""The attack on a Gram matrix errs, so it is shown over this many draws of everybody's data."""


def their_client(labels: list[int], count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """A client's samples (n, 64) and labels (n,)."""
    chosen = RNG.permutation(np.flatnonzero(np.isin(LABELS, labels)))[:count]
    return PIXELS[chosen], LABELS[chosen]


def their_signature(samples: np.ndarray, p: int = 3) -> np.ndarray:
    """Leading principal vectors, (p, 64), as PACFL's clients send them."""
    return np.linalg.svd(samples, full_matrices=False)[2][:p]


def their_update(samples: np.ndarray, labels: np.ndarray, rate: float) -> np.ndarray:
    """How one gradient step from zero moves the bias (10,) of softmax regression."""
    return rate * (np.eye(10)[labels] - 0.1).mean(axis=0)


def their_batch(count: int, units: int = 128) -> tuple[np.ndarray, tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Samples (n, 64) of a batch, a network's first layer with ReLU behind it, and that layer's gradients."""
    chosen = RNG.permutation(len(LABELS))[:count]
    x, weight, bias = PIXELS[chosen], RNG.uniform(-1, 1, (units, 64)) / 8, RNG.uniform(-1, 1, units) / 8
    head = RNG.uniform(-1, 1, (10, units)) / 8
    raised = np.exp(np.maximum(x @ weight.T + bias, 0) @ head.T)
    behind = (raised / raised.sum(axis=1, keepdims=True) - np.eye(10)[LABELS[chosen]]) @ head / count
    behind *= x @ weight.T + bias > 0
    return x, (weight, bias), (behind.T @ x, behind.sum(axis=0))


KINDS = ([3, 8], [0, 5], [3, 8], [1, 4], [0, 5], [1, 4])
"""The labels of six clients."""
PAIRS = [frozenset((a, b)) for a in range(10) for b in range(a)]


def gram_attack(known: tuple[int, ...]) -> float:
    """The share of the clients not known whose label sets come out from inner products, the data of `known` ones given."""
    clients = [their_client(labels) for labels in KINDS]
    templates = {pair: their_signature(their_client(sorted(pair))[0]) for pair in PAIRS}
    signatures = np.stack([their_signature(data) for data, _ in clients])
    rotation = np.linalg.qr(RNG.normal(size=(64, 64)))[0]  # whatever hides coordinates leaves this
    rotated = (signatures @ rotation).reshape(-1, 64)
    products = (rotated @ rotated.T).reshape(6, 3, 6, 3)
    label_sets = labels_from_gram(products, {place: signatures[place] for place in known}, templates)
    return float(np.mean([label_sets[place] == frozenset(KINDS[place]) for place in range(6) if place not in known]))


def main() -> None:
    clients = [their_client(labels) for labels in KINDS]
    samples, labels = clients[0]
    truth = np.bincount(labels, minlength=10) / len(labels)
    common = np.bincount(LABELS, minlength=10) / len(LABELS)

    update = their_update(samples, labels, rate=0.5)
    shares = labels_from_bias(update, np.full((10, 10), 0.1), scale=0.5)  # an untrained model predicts 0.1 for everything
    print(f"update:     label shares {np.round(shares, 2).tolist()}")
    print(f"            really       {np.round(truth, 2).tolist()}")
    print(f"            L1 {np.abs(shares - truth).sum():.3f}; the shares of all data, without a view, {np.abs(common - truth).sum():.3f}")

    signature, mean = their_signature(samples), samples.mean(axis=0)
    similarity, blank = cosine(invert_signature(signature, (64,)), mean), cosine(PIXELS.mean(axis=0), mean)
    print(f"signature:  cosine to the mean image {similarity:.3f}; the mean image of all data, without a view, {blank:.3f}")
    templates = {pair: their_signature(their_client(sorted(pair))[0]) for pair in PAIRS}
    recovered = sorted(recover_label_set(signature, templates))
    print(f"            label set {recovered}, really {KINDS[0]}; a guess is right in 1 of {len(PAIRS)}")

    for known in ((1, 2, 5), ()):
        right = np.array([gram_attack(known) for _ in range(DRAWS)])
        low, high = confidence_interval(right)
        share = f"{right.mean():.2f} [{low:.2f}, {high:.2f}]"
        print(f"Gram:       {len(known)} of 6 clients known: label sets of {share} of the others, over {DRAWS} draws")
    print("            saying of all what one of the known is, 0.33; so this attack errs: never quote it without an interval and its k")

    colluders = np.concatenate([their_signature(their_client([label, other])[0]) for label in range(10) for other in range(label)])
    for count in (3, len(colluders)):
        made = rows_from_products(signature @ colluders[:count].T, colluders[:count])
        error = float(np.linalg.norm(made - signature) / np.linalg.norm(signature))
        print(f"Sybils:     {count:3} known vectors in 64 dimensions: relative error {error:.1e}; saying nothing, 1")

    cohorts = [[0, 1, 2], [0, 1], [2, 3, 4, 5], [3, 4], [3, 5]]
    values = np.array([len(their) + i for i, (_, their) in enumerate(clients)], dtype=float)
    found_values, determined = disaggregate(cohorts, np.array([[values[cohort].sum()] for cohort in cohorts]), range(6))
    sure = [i for i in range(6) if determined[i]]
    came, real = np.round(found_values[sure, 0]).astype(int).tolist(), values[sure].astype(int).tolist()
    single = sum(len(cohort) == 1 for cohort in cohorts)
    print(f"sums:       determined are clients {sure}: {came}, really {real}; by a sum over one client alone {single}")

    batch, layer, gradients = their_batch(8)
    images = inputs_of_batch(*gradients, [layer], len(batch), np.random.default_rng(0))
    apart = np.abs(batch[:, None] - images.inputs[None]).max(axis=2).min(axis=1)
    blank = np.abs(batch - PIXELS.mean(axis=0)).max(axis=1)
    print(f"gradient:   8 images of one batch: largest error {apart.max():.0e}; the mean image, without a view, {blank.max():.2f}")

    groups = np.array([0, 1, 0, 2, 1, 2])
    scores = (groups[:, None] == groups[None]) + 0.3 * RNG.normal(size=(6, 6))
    dealt = groups_from_scores(scores, 3)
    correct, chance = grouping_accuracy(dealt, groups).mean(), dealt_at_random(dealt, groups, seed=0)[0]
    print(f"influence:  groups {dealt.tolist()}, really {groups.tolist()}: {correct:.2f} right up to names; dealt at random {chance:.2f}")


if __name__ == "__main__":
    printable_streams()
    main()
