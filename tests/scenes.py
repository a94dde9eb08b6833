"""Small scenes that several tests play in: synthetic clients in groups, a linear model, a federation over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cflpriv.algorithm import Algorithm
from cflpriv.data import gaussian_clusters
from cflpriv.engine import TaskInput
from cflpriv.local import LocalFederation
from cflpriv.models import Model
from cflpriv.protection import Protection
from cflpriv.protocols.entropy import public_entropy
from cflpriv.record import Transcript
from cflpriv.training import Train
from cflpriv.types import Array, ClientData, Parts, Population

PROTECTIONS = {"none": Protection(), "haar": Protection(gram=("haar",), sum="haar")}


def population(groups: int = 2, clients_per_group: int = 4, seed: int = 0, **more: Any) -> Population:
    return gaussian_clusters(seed, groups=groups, clients_per_group=clients_per_group, **more)


def model(scene: Population, dtype: Any = "float64") -> Model:
    return Model("linear", scene.shape, scene.classes, dtype=dtype)


def training(scene: Population, **options: Any) -> Train:
    return Train(model(scene, options.pop("dtype", "float64")), **({"epochs": 1, "batch_size": 5, "lr": 0.1} | options))


def mlp_training(scene: Population, dtype: Any = "float32", **options: Any) -> Train:
    """Training of an MLP with 16 hidden units, for images."""
    network = Model("mlp", scene.shape, scene.classes, hidden=16, dtype=dtype)
    return Train(network, **({"epochs": 1, "batch_size": 10, "lr": 0.1} | options))


def served(algorithm: Algorithm, fed: LocalFederation, state: Any, clients: Sequence[int] | None = None) -> Array:
    """Each client's model (m, d), as it would open it."""
    what = algorithm.serve(state)
    models, which = what.params["model"], what.which
    return np.stack([fed.peek(c, models if which is None else models[which[c]]) for c in clients or fed.clients])  # type: ignore[index]


def federation(scene: Population | Sequence[ClientData], protection: Protection | None = None, **options: Any) -> LocalFederation:
    clients = scene.clients if isinstance(scene, Population) else scene
    options.setdefault("transcript", Transcript("full"))
    return LocalFederation(clients, protection=protection or Protection(), entropy=public_entropy("tests"), **options)


def orthonormal_rows(rng: np.random.Generator, n: int, p: int, d: int) -> Array:
    return np.stack([np.linalg.qr(rng.normal(size=(d, p)))[0].T for _ in range(n)])


@dataclass(frozen=True)
class Make:
    """A task that makes values of the client's id: "vector" (10,), "rows" (2, 4), "choice" (), "one" ()."""

    scale: float = 1.0

    parts: ClassVar[Parts] = {"vector": "summed", "rows": "compared", "choice": "choice", "one": "measure"}
    keeps: ClassVar[tuple[str, ...]] = ("vector",)

    def run(self, given: TaskInput) -> dict[str, Array]:
        client = given.data.id
        vector = self.scale * np.array([1.0, client, client**2, -client, *[(client + 1) / n for n in range(1, 7)]])
        basis = np.linalg.qr(np.random.default_rng(client).normal(size=(4, 2)))[0].T
        return {"vector": vector, "rows": basis, "choice": np.array(client % 2), "one": np.array(float(client))}


@dataclass(frozen=True)
class Echo:
    """A task that gives back what it was given, so that a test can see what a client sees."""

    names: tuple[str, ...]

    @property
    def parts(self) -> Parts:
        return {**dict.fromkeys(self.names, "summed"), "choice": "choice"}

    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> dict[str, Any]:
        return {name: np.asarray(given.params[name]) for name in self.names} | {
            "choice": np.asarray(-1 if given.choice is None else given.choice)
        }


def parity(clients: Sequence[int]) -> dict[int, int]:
    return {client: client % 2 for client in clients}
