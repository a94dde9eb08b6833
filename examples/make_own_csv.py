"""Write a small made-up table, own.csv beside this file: twelve clinics in two regions, where the same measurements mean different things.

python examples/make_own_csv.py && cflpriv run examples/own_csv.toml
"""

import csv
from pathlib import Path

import numpy as np

FEATURES = ("age", "pulse", "pressure", "glucose", "weight", "height")
MEAN = np.array([55.0, 72.0, 125.0, 5.6, 78.0, 170.0])
DEVIATION = np.array([14.0, 9.0, 16.0, 1.1, 15.0, 10.0])


def rows(clinics: int = 12, patients: int = 80, seed: int = 0) -> list[list[str]]:
    """One row a patient: clinic, region, measurements, outcome. In the second region high values speak for the other outcome."""
    draws = np.random.default_rng(seed)
    direction = draws.standard_normal(len(FEATURES))
    rows = []
    for clinic in range(clinics):
        north = clinic % 2 == 0
        for _ in range(patients):
            z = draws.standard_normal(len(FEATURES))
            sick = (z @ direction + 0.5 * draws.standard_normal() > 0) == north
            values = [f"{value:.2f}" for value in MEAN + DEVIATION * z]
            rows.append([f"clinic {clinic + 1:02d}", "north" if north else "south", *values, "relapse" if sick else "none"])
    return rows


def write(path: Path) -> None:
    """Write the table with its header."""
    with path.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows([["clinic", "region", *FEATURES, "outcome"], *rows()])


if __name__ == "__main__":
    write(Path(__file__).with_name("own.csv"))
    print(f"written: {Path(__file__).with_name('own.csv')}")
