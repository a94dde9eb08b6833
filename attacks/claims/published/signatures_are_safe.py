"""PACFL: a few principal vectors of a client's samples, sent in the clear."""

from collections.abc import Sequence
from pathlib import Path

from ..claim import Arm, Claim, Row
from ..scenes import attacked, configured, row_of

__all__ = ["CLAIM"]

IMAGE = "mean_image_cosine"


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    rows = []
    for p in (1, 3, 5):
        for n in (10, 60):
            config = configured(seed, {"name": "pacfl", "k": 5, "p": p}, data={"samples_per_client": n})
            found = attacked(config, "signature_inversion", data_dir)
            rows.append(row_of(f"label sets, p = {p}, n = {n}", seed, found.get("label_set_accuracy")))
            rows.append(row_of(f"mean image, p = {p}, n = {n}", seed, found.get(IMAGE)))
    return rows


CLAIM = Claim(
    2, "a few principal vectors do not give the data away",
    source="PACFL, Vahidian et al. 2023, contributions",
    baseline="the same attack without a view; for images the mean image of the auxiliary samples",
    assumed=(
        "20 clients of the digits in five groups of two labels, an MLP of 32 units; signatures are read by the server; the "
        "attacker knows model, training settings, numbers of samples and of labels a client, and 1,000 labelled samples of the "
        "same distribution; nothing is claimed about single samples, and n above 60 was not tried"
    ),
    arms={
        "label sets, p = 1, n = 10": Arm("label sets read right, share of clients", 0.1, "below"),
        "label sets, p = 1, n = 60": Arm("label sets read right, share of clients", 0.1, "below"),
        "label sets, p = 3, n = 10": Arm("label sets read right, share of clients", 0.1, "below"),
        "label sets, p = 3, n = 60": Arm("label sets read right, share of clients", 0.1, "below"),
        "label sets, p = 5, n = 10": Arm("label sets read right, share of clients", 0.1, "below"),
        "label sets, p = 5, n = 60": Arm("label sets read right, share of clients", 0.1, "below"),
        "mean image, p = 1, n = 10": Arm("cosine to the mean image", 0.01, "below"),
        "mean image, p = 1, n = 60": Arm("cosine to the mean image", 0.01, "below"),
        "mean image, p = 3, n = 10": Arm("cosine to the mean image", 0.01, "below"),
        "mean image, p = 3, n = 60": Arm("cosine to the mean image", 0.01, "below"),
        "mean image, p = 5, n = 10": Arm("cosine to the mean image", 0.01, "below"),
        "mean image, p = 5, n = 60": Arm("cosine to the mean image", 0.01, "below"),
    },
    measure=measure,
)  # fmt: skip
