"""The attacks without the rest: on an update, a signature, a Gram matrix, cohort sums and scores from any other federated system.

Each function takes plain numpy arrays. What stands in for "another system" here is a few lines of numpy on scikit-learn's digits; replace
`their_*` by what your own system sends. Run it with `python examples/attack_other_systems.py`; it takes a few seconds.
"""

import numpy as np
from sklearn.datasets import load_digits

from cflpriv.attacks import (
    disaggregate,
    groups_from_scores,
    invert_signature,
    labels_from_bias,
    labels_from_gram,
    recover_label_set,
    rows_from_products,
)

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = PIXELS / 16.0
RNG = np.random.default_rng(0)


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


def main() -> None:
    clients = [their_client(labels) for labels in ([3, 8], [0, 5], [3, 8], [1, 4], [0, 5], [1, 4])]
    real = [sorted(set(labels.tolist())) for _, labels in clients]
    samples, labels = clients[0]

    update = their_update(samples, labels, rate=0.5)
    shares = labels_from_bias(update, np.full((10, 10), 0.1), scale=0.5)  # an untrained model predicts 0.1 for everything
    print(f"update:     label shares {np.round(shares, 2).tolist()}")
    print(f"            really       {np.round(np.bincount(labels, minlength=10) / len(labels), 2).tolist()}")

    signature = their_signature(samples)
    image, mean = invert_signature(signature, (64,)), samples.mean(axis=0)
    likeness = float(image @ mean / np.linalg.norm(image) / np.linalg.norm(mean))
    pairs = [frozenset((a, b)) for a in range(10) for b in range(a)]
    templates = {pair: their_signature(their_client(sorted(pair))[0]) for pair in pairs}
    found = sorted(recover_label_set(signature, templates))
    print(f"signature:  cosine to the mean image {likeness:.3f}; label set {found}, really {real[0]}")

    signatures = np.stack([their_signature(one) for one, _ in clients])
    rotation = np.linalg.qr(RNG.normal(size=(64, 64)))[0]  # whatever hides coordinates leaves this
    rotated = (signatures @ rotation).reshape(-1, 64)
    products = (rotated @ rotated.T).reshape(6, 3, 6, 3)
    sets = labels_from_gram(products, {1: signatures[1], 2: signatures[2], 5: signatures[5]}, templates)
    print(f"Gram:       with clients 1, 2, 5 known, client 0 has {sorted(sets[0])}, really {real[0]};", end=" ")
    print(f"client 3 has {sorted(sets[3])}, really {real[3]}")

    colluders = np.concatenate([their_signature(their_client([label, other])[0]) for label in range(10) for other in range(label)])
    made = rows_from_products(signature @ colluders.T, colluders)
    print(f"Sybils:     {len(colluders)} known vectors, relative error of the signature {np.linalg.norm(made - signature):.1e}")

    cohorts = [[0, 1, 2], [0, 1], [2, 3, 4, 5], [3, 4], [3, 5]]
    sums = np.array([[sum(len(clients[i][1]) + i for i in cohort)] for cohort in cohorts], dtype=float)
    values, determined = disaggregate(cohorts, sums, range(6))
    known = [i for i in range(6) if determined[i]]
    print(f"sums:       clients {known} are determined: {np.round(values[known, 0]).astype(int).tolist()}")

    groups = np.array([0, 1, 0, 2, 1, 2])
    scores = (groups[:, None] == groups[None]) + 0.3 * RNG.normal(size=(6, 6))
    print(f"influence:  groups {groups_from_scores(scores, 3).tolist()}, really {groups.tolist()} (up to names)")


if __name__ == "__main__":
    main()
