"""Small runs: configurations made from a base, digits of a few clients, an algorithm after some rounds, a run after its last round."""

import inspect
from collections.abc import Mapping
from typing import Any

from scenes import training

from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.interface import Algorithm
from cflpriv.clustering.scores import ari
from cflpriv.data import DataSpec, build_population
from cflpriv.experiments import Config, parse_config
from cflpriv.experiments.run.run import Experiment, advance, start
from cflpriv.federation.server import FederationServer
from cflpriv.tasks.training import Train
from cflpriv.types import Clustering, Population


def configured(base: Mapping[str, Mapping[str, Any]], algorithm: str | None = None, unit: str | None = None, /, **changes: Any) -> Config:
    """The configuration of `base` with the keys of each section in `changes` in place of its own.

    `algorithm` and `unit` (of privacy) are short for these keys of their sections, where another name is the only change or the first.
    """
    named = ({"algorithm": {"name": algorithm}} if algorithm else {}) | ({"privacy": {"unit": unit}} if unit else {})
    tree: dict[str, dict[str, Any]] = {}
    for layer in (base, named, changes):
        for section, keys in layer.items():
            tree[section] = {**tree.get(section, {}), **keys}
    return parse_config(tree)


def digits(clients: int = 8, **options: Any) -> Population:
    """Digits, half of them turned by 90 degrees unless `options` of the data say otherwise."""
    wanted: dict[str, Any] = {"rotations": (0, 90), "test_samples_per_client": 20} | options
    return build_population(DataSpec(clients=clients, **wanted))


def true_groups(scene: Population) -> dict[int, int]:
    """The true group of each client."""
    return {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}


def agreement(scene: Population, clustering: Clustering) -> float:
    """The adjusted Rand index of a clustering and the true groups of its clients."""
    groups = true_groups(scene)
    return ari([groups[client] for client in clustering.clients], clustering.labels)


def make_algorithm(name: str, train: Train, **options: Any) -> Algorithm:
    """An algorithm with those of the `options` that it has."""
    make = ALGORITHMS[name].make
    known = inspect.signature(make).parameters
    return make(train, **{key: value for key, value in options.items() if key in known})


def algorithm_on(
    scene: Population, name: str, **options: Any
) -> Any:  # Any: whether it has an optional part, such as `admit`, is the name's
    """An algorithm that trains a linear model of the scene's shape."""
    return ALGORITHMS[name].make(training(scene), **options)


def recorded_rounds(algorithm: Algorithm, fed: FederationServer, count: int, state: Any = None, first: int = 0) -> tuple[Any, list[Any]]:
    """The state after `count` rounds from number `first` on, and the record of each. Begins anew without a `state`."""
    state, records = algorithm.init(fed) if state is None else state, []
    for number in range(first, first + count):
        fed.begin_round(number)
        state, record = algorithm.round(fed, state)
        records.append(record)
    return state, records


def after_rounds(algorithm: Algorithm, fed: FederationServer, count: int, state: Any = None, first: int = 0) -> Any:
    """The state alone of `recorded_rounds`."""
    return recorded_rounds(algorithm, fed, count, state, first)[0]


def finished(config: Config, population: Population | None = None) -> Experiment:
    """A run after its last round; without a `population`, of the data that the configuration names."""
    run = start(config, population=population)
    for _ in range(config.training.rounds):
        advance(run)
    return run
