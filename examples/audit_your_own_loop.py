"""An audit of a torch loop that is not this toolkit's: FedAvg of a small ResNet with batch normalisation, on scikit-learn's digits.

`federated_averaging` stands for your own code: it knows nothing of cflpriv and keeps what its clients were sent and returned. `main` is the
audit: labels, membership, images, and what running statistics give away. `python examples/audit_your_own_loop.py` takes a few seconds.
"""

from copy import deepcopy
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from cflpriv.streams import printable_streams

PIXELS, LABELS = (torch.tensor(part) for part in load_digits(return_X_y=True))
PIXELS = (PIXELS / 16).float().reshape(-1, 1, 8, 8)


class ResNet(nn.Module):
    """A convolution, a residual block and a linear head, each convolution with batch normalisation."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.first, self.first_norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.second_norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.head = nn.Linear(width * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.stem_norm(self.stem(x)))
        inner = self.second_norm(self.second(functional.relu(self.first_norm(self.first(x)))))
        return self.head(functional.avg_pool2d(functional.relu(x + inner), 2).flatten(1))


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float, epochs: int, batch_size: int) -> None:
    """Local training by SGD, in place."""
    parameters = list(model.train().parameters())
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(batch_size):
            slopes = torch.autograd.grad(functional.cross_entropy(model(x[batch]), y[batch]), parameters)
            with torch.no_grad():
                for parameter, slope in zip(parameters, slopes, strict=True):
                    parameter -= lr * slope


def federated_averaging(
    model: nn.Module, clients: list[tuple[torch.Tensor, torch.Tensor]], rounds: int, **how: Any
) -> list[tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """(client, state sent, state returned) of every round."""
    seen = []
    for _ in range(rounds):
        sent = deepcopy(model.state_dict())
        returned = []
        for number, (x, y) in enumerate(clients):
            model.load_state_dict(sent)
            train(model, x, y, **how)
            returned.append(deepcopy(model.state_dict()))
            seen.append((number, sent, returned[-1]))
        model.load_state_dict(
            {name: torch.stack([state[name].float() for state in returned]).mean(0).to(sent[name].dtype) for name in sent}
        )
    return seen


def dealt(counts: list[int], labels: int = 3) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    """So many samples of a few labels for each client, and 300 samples of all labels that no client has."""
    order = torch.randperm(len(LABELS))
    auxiliary, free = order[:300], order[300:].tolist()
    clients = []
    for number, count in enumerate(counts):
        own = [(3 * number + i) % 10 for i in range(labels)]
        chosen = [place for place in free if int(LABELS[place]) in own][:count]
        free = [place for place in free if place not in set(chosen)]
        clients.append((PIXELS[chosen], LABELS[chosen]))
    return clients, (PIXELS[auxiliary], LABELS[auxiliary])


def main() -> None:
    torch.manual_seed(0)
    model = ResNet()
    how: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 16}
    clients, auxiliary = dealt([30] * 8)
    seen = federated_averaging(model, clients, rounds=2, **how)

    # --- the audit of your loop: from here on it is cflpriv ---
    from cflpriv.attacks import LoopSettings, Update, audit_updates

    updates = [Update(before, after, *clients[number], client=number) for number, before, after in seen]
    for cell in audit_updates(model, updates, auxiliary, LoopSettings(**how)):
        print(cell.line())

    # --- the same for clients with a single digit each, one step: images as well ---
    clients, auxiliary = dealt([1] * 3, labels=1)
    seen = federated_averaging(ResNet(), clients, rounds=1, lr=0.1, epochs=1, batch_size=16)
    updates = [Update(before, after, *clients[number]) for number, before, after in seen]
    for cell in audit_updates(model, updates, auxiliary, LoopSettings(lr=0.1), attacks=["gradient_inversion"], iterations=20):
        print(cell.line())


if __name__ == "__main__":
    printable_streams()
    main()
