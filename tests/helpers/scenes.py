"""Small scenes that several tests play in: synthetic clients in groups, a linear model, a federation over them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from cflpriv.algorithms.interface import Algorithm
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Transcript
from cflpriv.engine import Streams, TaskInput
from cflpriv.engine.models import Model
from cflpriv.federation.server import FederationServer
from cflpriv.protocols.entropy import public_entropy
from cflpriv.randomness import stream
from cflpriv.tasks.training import Train
from cflpriv.transports.memory import Faults
from cflpriv.transports.simulation import Simulated, simulate
from cflpriv.types import Array, ClientData, Parts, Population

PROTECTIONS = {"none": Protection(), "haar": Protection(gram=("haar",), sum="haar")}


def population(
    groups: int = 2, clients_per_group: int = 4, seed: int = 0, *, samples: int = 20, test_samples: int = 20, classes: int = 3,
    shape: tuple[int, ...] = (8,), separation: float = 2.0,
) -> Population:  # fmt: skip
    """Clients whose samples are unit Gaussians around a centre for each (group, class), float32 of `shape`, classes drawn uniformly.

    Centres are N(0, separation²) in every coordinate, so groups differ in where their classes lie. Client i is in group i % groups.
    """
    centres = separation * stream(seed, "data.synthetic.centres").standard_normal((groups, classes, *shape))
    clients = []
    for client in range(groups * clients_per_group):
        draws = stream(seed, "data.synthetic.samples", client=client)
        y = draws.integers(classes, size=samples + test_samples)
        x = (centres[client % groups, y] + draws.standard_normal((len(y), *shape))).astype(np.float32)
        clients.append(ClientData(client, x[:samples], y[:samples], x[samples:], y[samples:]))
    channels, notes = shape[0] if len(shape) == 3 else 1, ("synthetic data: Gaussian clusters, not a real data set",)
    labels = tuple(client % groups for client in range(len(clients)))
    return Population("synthetic/gaussian_clusters", tuple(clients), labels, classes, (0.0,) * channels, (1.0,) * channels, notes)


def continuum(clients: int = 16, seed: int = 0, *, samples: int = 60, classes: int = 3, length: int = 8, spread: float = 1.5) -> Population:
    """Clients that vary continuously: the samples of each, unit Gaussians around a centre a class, are moved by its own Gaussian vector.

    The vectors lie in a plane, with standard deviation `spread` along two fixed directions. All clients are in true group 0.
    """
    rng = np.random.default_rng(seed)
    centres, plane = 2 * rng.standard_normal((classes, length)), rng.standard_normal((2, length))
    made = []
    for client in range(clients):
        moved = rng.standard_normal(2) * spread @ plane
        y = rng.integers(classes, size=samples + 20)
        x = (centres[y] + moved + rng.standard_normal((len(y), length))).astype(np.float32)
        made.append(ClientData(client, x[:samples], y[:samples], x[samples:], y[samples:]))
    return Population("synthetic/continuum", tuple(made), (0,) * clients, classes, (0.0,), (1.0,), ("synthetic data: a continuum",))


def model(scene: Population, dtype: Any = "float64") -> Model:
    return Model("linear", scene.shape, scene.classes, dtype=dtype)


def training(scene: Population, **options: Any) -> Train:
    return Train(model(scene, options.pop("dtype", "float64")), **({"epochs": 1, "batch_size": 5, "lr": 0.1} | options))


def mlp_training(scene: Population, dtype: Any = "float32", hidden: int = 16, **options: Any) -> Train:
    """Training of an MLP, for images."""
    network = Model("mlp", scene.shape, scene.classes, hidden=hidden, dtype=dtype)
    return Train(network, **({"epochs": 1, "batch_size": 10, "lr": 0.1} | options))


def task_input(data: ClientData, params: Mapping[str, Any], secret: bytes = b"", memory: Mapping[str, Array] | None = None) -> TaskInput:
    """What a client has for a task in round 0."""
    return TaskInput(data, params, memory or {}, Streams(0, 0, data.id), secret=secret)


_eyes: WeakKeyDictionary[FederationServer, Simulated] = WeakKeyDictionary()


def eye(fed: FederationServer) -> Simulated:
    """What only the experimenter has of a federation that `federation` made: clients' data, what they hold, who is online."""
    return _eyes[fed]


def sums_of(fed: FederationServer) -> Any:
    """The server half of the protection of sums."""
    return fed._sums


def served(algorithm: Algorithm, fed: FederationServer, state: Any, clients: Sequence[int] | None = None) -> Array:
    """Each client's model (m, d), as it would open it."""
    what = algorithm.serve(state)
    models, which = what.params["model"], what.which
    return np.stack([eye(fed).peek(c, models if which is None else models[which[c]]) for c in clients or fed.clients])  # type: ignore[index]


def federation(
    scene: Population | Sequence[ClientData], protection: Protection | None = None, *, entropy: Any = None, dropout: float = 0.0,
    dropouts: Sequence[tuple[int, int, str]] = (), **options: Any,
) -> FederationServer:  # fmt: skip
    """The server of a simulated federation, without a release policy unless `options` say so."""
    clients = scene.clients if isinstance(scene, Population) else scene
    options["faults"] = Faults(options.get("seed", 0), dropout, {(number, client): stage for number, client, stage in dropouts})
    options = {"transcript": Transcript("full"), "release_policy": "off", **options}
    of = entropy or (lambda party: public_entropy(f"tests {party}"))
    made = simulate(clients, protection=protection or Protection(), entropy=of, **options)
    _eyes[made.federation] = made
    return made.federation


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
