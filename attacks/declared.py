"""What an algorithm declares about itself for audits: constants of the module that its function is in."""

import sys
from typing import TypeVar

from ..algorithms import ALGORITHMS
from ..experiments.config import Config

__all__ = ["declared", "renumbers_clusters"]

T = TypeVar("T")


def declared(config: Config | None, name: str, default: T) -> T:
    """The constant `name` beside the run's algorithm; `default` where there is none."""
    if config is None:
        return default
    made: T = getattr(sys.modules[ALGORITHMS[config.algorithm["name"]][0].__module__], name, default)
    return made


def renumbers_clusters(config: Config | None) -> bool:
    """Whether clusters get new numbers on the way, so that a model's predecessor is the nearest one and not that of its name."""
    return declared(config, "RENUMBERS_CLUSTERS", False)
