"""Gradient inversion under noise: the image behind one private training step, over the ε that the step cost.

    python examples/inversion_under_dp.py [PICTURE]

A client with one of scikit-learn's digits (8×8) takes one full-batch step of private training on DLG's network: its gradient is clipped to
norm 1 and gets Gaussian noise, as `[privacy] unit = "sample"` does it. The attacker knows the model, the label and the clip, looks for the
image whose gradient points where the update does (cosine distance, a little total variation), and is compared with the mean image.

Prints a line for each ε (infinity: clipped, without noise), and draws curve and images into PICTURE (inversion_under_dp.png).
"""

import math
import os
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from cflpriv.attacks import invert_updates
from cflpriv.attacks.figures.leakage import psnr_db, ssim
from cflpriv.attacks.figures.significance import confidence_interval
from cflpriv.attacks.inversion.image_search import LocalSteps
from cflpriv.engine import Engine, Streams, TaskInput
from cflpriv.engine.models import Model
from cflpriv.protocols.mechanisms import gaussian_multiplier
from cflpriv.streams import printable_streams
from cflpriv.tasks.training import Train
from cflpriv.types import ClientData

DELTA, IMAGES, ITERATIONS = 1e-5, 8, 200
EPSILONS = (math.inf, 1e7, 1e6, 1e5, 1e4, 1e3, 100.0, 10.0)


def update(model, start, x, y, epsilon):
    """What the client sends after one private step."""
    train = Train(model, 1, 0, 1.0, clip_norm=1.0, sampling_rate=1.0)
    if math.isfinite(epsilon):
        train = Train(
            model, 1, 0, 1.0, clip_norm=1.0, sampling_rate=1.0, noise_multiplier=gaussian_multiplier(epsilon, DELTA), public_samples=1
        )
    data = ClientData(0, x[None], np.array([y]), np.zeros((0, *x.shape)), np.zeros(0, np.int64))
    (result,) = Engine().run(train, [TaskInput(data, {"model": start}, {}, Streams(0, 0, 0), secret=os.urandom(32))])
    return np.asarray(result["update"])


def main(path: Path) -> None:
    digits = load_digits()
    x, y = digits.images[:, None] / 16.0, digits.target.astype(np.int64)
    truth, labels, mean = x[:IMAGES], y[:IMAGES], x[IMAGES:].mean(axis=0)
    model = Model("sigmoid_lenet", (1, 8, 8), 10, dtype="float64")
    starts = [model.init(seed) for seed in range(IMAGES)]
    rows = [(epsilon, i) for epsilon in EPSILONS for i in range(IMAGES)]
    sent = np.stack([update(model, starts[i], truth[i], labels[i], epsilon) for epsilon, i in rows])
    recovered, _ = invert_updates(
        model, np.stack([starts[i] for _, i in rows]), sent, np.array([[labels[i]] for _, i in rows]), LocalSteps(),
        np.random.default_rng(0), iterations=ITERATIONS, distance="cosine", total_variation=1e-4,
    )  # fmt: skip
    images = recovered[:, 0].reshape(len(EPSILONS), IMAGES, 1, 8, 8)
    blank = np.array([psnr_db(image, mean) for image in truth])
    similarity = np.mean([ssim(image, mean) for image in truth])
    print(f"mean image (baseline): PSNR {blank.mean():.1f} dB, SSIM {similarity:.2f}; {IMAGES} images")
    curve = []
    for epsilon, images_at in zip(EPSILONS, images, strict=True):
        scores = np.array([psnr_db(*pair) for pair in zip(truth, images_at, strict=True)])
        low, high = confidence_interval(scores)
        similar = np.mean([ssim(*pair) for pair in zip(truth, images_at, strict=True)])
        above = "above" if confidence_interval(scores - blank)[0] > 3 else "not above"
        print(f"epsilon {epsilon:g}: PSNR {scores.mean():.1f} dB [{low:.1f}, {high:.1f}], SSIM {similar:.2f}; {above} the baseline by 3 dB")
        curve.append((scores.mean(), scores.std(ddof=1)))
    draw(path, truth, images, curve, blank.mean())


def draw(path, truth, images, curve, blank):
    figure = plt.figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.1))
    axes = left.subplots()
    values, spreads = np.array(curve).T
    axes.errorbar(range(len(EPSILONS)), values, yerr=spreads, marker="o", capsize=3, label="gradient inversion")
    axes.axhline(blank, linestyle="--", color="gray", label="mean image")
    axes.set_xticks(range(len(EPSILONS)), ["∞" if math.isinf(e) else f"{e:g}" for e in EPSILONS], fontsize=8)
    axes.set_xlabel("ε of the step (δ = 1e-5)")
    axes.set_ylabel("PSNR, dB")
    axes.legend(frameon=False)
    panels = right.subplots(6, len(EPSILONS) + 1)
    for row, line in enumerate(panels):
        for panel, image in zip(line, [truth[row], *images[:, row]], strict=True):
            panel.imshow(image[0], cmap="gray", vmin=0, vmax=1)
            panel.set_axis_off()
    for panel, title in zip(panels[0], ["true", *("∞" if math.isinf(e) else f"{e:g}" for e in EPSILONS)], strict=True):
        panel.set_title(title, fontsize=8)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    printable_streams()
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("inversion_under_dp.png"))
