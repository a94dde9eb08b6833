"""Figures of docs/attack_figures.csv: properties of clients under protections, and images in an imprinted first layer.

    python examples/properties_and_imprint.py                      # all of it: a few minutes of one core
    python examples/properties_and_imprint.py --only imprint       # or: steps, sums, properties
    python examples/properties_and_imprint.py --only properties --seeds 5 --protections none,private

Properties: PACFL on scikit-learn's digits, 20 clients of which half see turned images; the AUC of `wide` from signatures, first updates and
cluster models, by seed. A run with two groups is one toss of a coin whatever the AUC: read along the seeds. Imprint: the share of images
that come out at 30 dB or more, from one update in the clear and from one real secure sum that is bound to the crafted model.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from cflpriv.attacks.audit import audit_run
from cflpriv.attacks.figures.leakage import prior_of
from cflpriv.attacks.inversion.imprint import guess, imprinted, share_of_images, summed, updates_of
from cflpriv.data import DataSpec, build_population
from cflpriv.engine.models import Model
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.streams import printable_streams
from cflpriv.tasks.training import Train
from cflpriv.types import ClientData

PROTECTIONS = {
    "none": {},
    "permutation": {"protection": {"gram": ["permutation"], "sum": "permutation"}},
    "haar": {"protection": {"gram": ["haar"], "sum": "haar"}},
    "secagg": {"protection": {"gram": ["haar"], "sum": "secagg"}},
    "private": {"privacy": {"unit": "sample", "epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0, "samples": 70}},
}
SOURCES = ("signature", "update", "model")
STEPS = {"one full-batch step": (1, 0), "2 epochs of batches of 10": (2, 10), "5 full-batch steps": (5, 0)}


def properties(names, seeds):
    """Prints a line a protection: the AUC of `wide` from each view, by seed; a dash where there is nothing to see."""
    for name in names:
        figures = {source: [] for source in SOURCES}
        for seed in range(seeds):
            config = parse_config({
                "data": {"clients": 20, "rotations": [0, 90], "seed": seed}, "model": {"hidden": 8},
                "training": {"rounds": 2, "epochs": 1, "weights": "equal", "lr": 0.1}, "algorithm": {"name": "pacfl", "cut": "silhouette"},
                "run": {"record": "full", "seed": seed}, **PROTECTIONS[name],
            })  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                run_experiment(config, Path(folder) / "run")
                audit = audit_run(Path(folder) / "run", adversary="server", attacks=["property_inference"], budget="quick")
            cells = {cell.metric: cell.value for cell in audit}
            for source in SOURCES:
                value = cells.get(f"{source}_wide_auc")
                figures[source].append("–" if value is None else f"{value:.2f}")
        print(f"{name:12}", *(f"{source} {', '.join(values)};" for source, values in figures.items()), flush=True)


class Images:
    """The training images of the digits, dealt to clients of any size by a seed; the attacker's auxiliary samples are test images."""

    def __init__(self):
        self.population = build_population(DataSpec(source="digits", clients=10))
        self.prior = prior_of(self.population, 0)
        self.x, self.y = (np.concatenate([getattr(client, part) for client in self.population.clients]) for part in ("x_train", "y_train"))

    def recovered(self, bins, size, seed, epochs=1, batch=0, clients=1):
        """The share of images that one update shows; with several clients, that the secure sum over them shows."""
        order = np.random.default_rng(seed).permutation(len(self.y))[: clients * size].reshape(clients, size)
        people = [ClientData(i, self.x[places], self.y[places], self.x[:0], self.y[:0]) for i, places in enumerate(order)]
        model = Model("mlp", self.population.shape, self.population.classes, bins, self.population.mean, self.population.std)
        start = imprinted(model, self.prior.x)
        updates = updates_of(people, Train(model, epochs, batch, 0.1), start, seed)
        total = updates[0] if clients == 1 else summed(updates, start, clip=1.0, min_cohort=3)
        return share_of_images(self.x[order.ravel()], guess(total, self.prior, model))


def line(label, values):
    print(f"{label:36}", *(f"{np.mean(row):6.2f}" for row in values), flush=True)


def imprint(images, draws):
    print("one full-batch step; bins 16, 64, 256, 1024; below: (1 − 1/K)^(n − 1)")
    for size in (1, 8, 32, 64, 128):
        line(f"{size} image(s)", [[images.recovered(bins, size, seed) for seed in range(draws)] for bins in (16, 64, 256, 1024)])
        line("", [(1 - 1 / bins) ** (size - 1) for bins in (16, 64, 256, 1024)])


def steps(images, draws):
    print("local training at rate .1; bins 64, 256, 1024")
    for size, name in (*((20, name) for name in STEPS), (70, "2 epochs of batches of 10")):
        line(f"{size} images, {name}", [[images.recovered(bins, size, s, *STEPS[name]) for s in range(draws)] for bins in (64, 256, 1024)])


def sums(images, draws):
    print("one bound secure sum; bins 64 (first line only), 256, 1024")
    for clients, size, widths in ((5, 8, (64, 256, 1024)), (20, 16, (256, 1024))):
        line(f"{clients} clients of {size}", [[images.recovered(bins, size, 0, clients=clients)] for bins in widths])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("imprint", "steps", "sums", "properties"))
    parser.add_argument("--seeds", type=int, default=3, help="runs for each protection")
    parser.add_argument("--draws", type=int, default=8, help="draws of images for each number of bins")
    parser.add_argument("--protections", default=",".join(PROTECTIONS))
    options = parser.parse_args()
    images = Images()
    for name, part in (("imprint", imprint), ("steps", steps), ("sums", sums)):
        if options.only in (None, name):
            part(images, options.draws)
    if options.only in (None, "properties"):
        properties([name for name in PROTECTIONS if name in options.protections.split(",")], options.seeds)


if __name__ == "__main__":
    printable_streams()
    main()
