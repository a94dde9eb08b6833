"""The private recipe in one place: Opacus trains the same linear model on the same features, with the same steps and the same budget.

Central training has all samples and adds one noise, so it is what a federation with shared noise can reach at best. Compare with
`cflpriv run examples/private_recipe_fmnist.toml`. Both take `STEPS` steps of all samples, a clip norm of 1 and the recipe's learning rate,
and use the same average of the models of all steps. Opacus clips by its ghost norms and adds noise by its own optimiser.

`python -m benchmarks private_recipe --data fashion_mnist` prints the accuracy on the test images.
"""

import argparse
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from cflpriv.algorithms.fedavg import LATE
from cflpriv.data import build_population
from cflpriv.data.spec import DataSpec
from cflpriv.engine.models import Model
from cflpriv.protocols.accounting import calibrate
from cflpriv.protocols.events import SampledGaussianEvent

__all__ = ["main"]

STEPS, RATE, CLIP, DELTA = 100, 8.0, 1.0, 1e-5


def main(argv: Sequence[str] | None = None) -> int:
    """Train and print; 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks private_recipe", description=__doc__)
    parser.add_argument("--data", default="fashion_mnist", help="a data set of images")
    parser.add_argument("--features", default="whitened_scattering", help="as data.features")
    parser.add_argument("--epsilon", type=float, default=3.0)
    options = parser.parse_args(argv)
    population = build_population(DataSpec(options.data, clients=1, features=options.features))
    (client,) = population.clients
    model = Model("linear", population.shape, population.classes, mean=population.mean, std=population.std)
    x, seen = (model.inputs(images).reshape(len(images), -1) for images in (client.x_train, client.x_test))
    y, labels = torch.from_numpy(client.y_train), torch.from_numpy(client.y_test)
    averaged = trained(x, y, population.classes, options.epsilon)
    accuracy = 100 * float((averaged(seen).argmax(1) == labels).float().mean())
    print(f"Opacus, {options.data}, {options.features}, epsilon {options.epsilon:g}, {len(x)} samples: {accuracy:.2f} %", flush=True)
    return 0


def trained(x: torch.Tensor, y: torch.Tensor, classes: int, epsilon: float) -> nn.Linear:
    """The averaged linear model of samples x (n, d), y (n,) after `STEPS` private steps of Opacus, with noise of the system."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    noise = calibrate(lambda z: [SampledGaussianEvent(z, 1.0, STEPS, CLIP, "add_remove")], epsilon, DELTA)
    linear, averaged = nn.Linear(x.shape[1], classes), nn.Linear(x.shape[1], classes)
    for parameter in (*linear.parameters(), *averaged.parameters()):
        nn.init.zeros_(parameter)
    module = GradSampleModuleFastGradientClipping(linear, max_grad_norm=CLIP, use_ghost_clipping=True)
    optimiser = DPOptimizerFastGradientClipping(
        torch.optim.SGD(linear.parameters(), lr=RATE), noise_multiplier=noise, max_grad_norm=CLIP, expected_batch_size=len(x)
    )
    loss = DPLossFastGradientClipping(module, optimiser, nn.CrossEntropyLoss(reduction="mean"), loss_reduction="mean")
    for step in range(1, STEPS + 1):
        with warnings.catch_warnings():  # of hooks on a module whose input needs no gradient
            warnings.simplefilter("ignore")
            loss(module(x), y).backward()
        optimiser.step()
        optimiser.zero_grad()
        weight = (LATE + 1) / (step + LATE)
        with torch.no_grad():
            for mean, parameter in zip(averaged.parameters(), linear.parameters(), strict=True):
                mean.lerp_(parameter, weight)
    return averaged


if __name__ == "__main__":
    main()
