"""CFL, Algorithm 5: a permutation that clients share and the server lacks."""

from collections.abc import Sequence
from pathlib import Path

from ....randomness import stream
from ..claim import Arm, Claim, Row
from ..scenes import attacked, configured, row_of

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    pairs = stream(seed, "pairs of labels").permutation(10).reshape(-1, 2)
    data = {
        "source": "mnist", "samples_per_client": 300, "test_samples_per_client": 50, "groups": [sorted(map(int, pair)) for pair in pairs]
    }  # fmt: skip
    rows = []
    for arm, transform in (("the same permutation in every round", "fixed"), ("a fresh permutation every round", "per_round")):
        config = configured(
            seed, {"name": "cfl", "eps2": 0.75}, {"gram": ["permutation"], "sum": "permutation", "transform": transform}, data=data,
            model={"hidden": 64}, training={"rounds": 5, "lr": 0.01, "batch_size": 10},
        )  # fmt: skip
        rows.append(row_of(arm, seed, attacked(config, "key_recovery", data_dir).get("label_set_accuracy")))
    return rows


CLAIM = Claim(
    1, "clients that share a secret permutation hide their updates from the server",
    source="CFL, Sattler et al. 2019, Algorithm 5 and Sec. V-B",
    baseline="the same attack without a view (the most frequent answer)",
    assumed=(
        "20 clients of MNIST with 300 samples of two labels each, an MLP of 64 units, five rounds at 0.01; the server has no "
        "key and no colluding client; it knows the initial model, the training settings, numbers of samples and of labels, and "
        "1,000 labelled samples; LeNet-5 and other partitions were not tried here"
    ),
    arms={
        "the same permutation in every round": Arm("label sets read right, share of clients", 0.1, "below"),
        "a fresh permutation every round": Arm("label sets read right, share of clients", 0.1, "below"),
    },
    measure=measure,
    seeds=3,
    needs=("mnist",),
)  # fmt: skip
