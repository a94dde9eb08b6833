"""Privacy-preserving clustered federated learning, and a measured answer to what it leaks.

Clients with similar data train together. The server finds the clusters from protected evidence only and sums updates without seeing any
single one. Names are imported when first used, so that `import cflpriv.protocols` does not load torch.
"""

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithms import ALGORITHMS
    from .algorithms.interface import AlgorithmSpec, register_algorithm
    from .contract.operations import Federation, Sampling
    from .contract.protection import Protection, ProtectionSpec, register_protection
    from .data import DataSpec, build_population, register_dataset
    from .engine.models import Model, register_model
    from .errors import InputError
    from .estimator import ClusteredFL
    from .experiments import Config, load_config, run_experiment
    from .experiments.config.callbacks import Callback, register_callback
    from .experiments.metrics import register_metric
    from .experiments.report.tables import read_sweep
    from .plugins import load_plugin, register_attack
    from .tasks.training import Train
    from .transports.simulation import simulate
    from .types import ClientData, Clustering, Population

for _name in ("protocols", "attacks"):
    if find_spec(f"{__name__}.{_name}") is None:
        raise ImportError(
            f"cflpriv/{_name} is no link to ../{_name}: this checkout has no symbolic links; "
            "install it with `pip install .`, or clone it with `git clone -c core.symlinks=true`",
            name=__name__,
        )

_HOME = {
    "ALGORITHMS": "algorithms",
    "AlgorithmSpec": "algorithms.interface",
    "Callback": "experiments.config.callbacks",
    "ClientData": "types",
    "ClusteredFL": "estimator",
    "Clustering": "types",
    "Config": "experiments",
    "DataSpec": "data",
    "Federation": "contract.operations",
    "InputError": "errors",
    "Model": "engine.models",
    "Population": "types",
    "Protection": "contract.protection",
    "ProtectionSpec": "contract.protection",
    "Sampling": "contract.operations",
    "Train": "tasks.training",
    "build_population": "data",
    "load_config": "experiments",
    "load_plugin": "plugins",
    "read_sweep": "experiments.report.tables",
    "register_algorithm": "algorithms.interface",
    "register_attack": "plugins",
    "register_callback": "experiments.config.callbacks",
    "register_dataset": "data",
    "register_metric": "experiments.metrics",
    "register_model": "engine.models",
    "register_protection": "contract.protection",
    "run_experiment": "experiments",
    "simulate": "transports.simulation",
}

_OLD: dict[str, str] = {
    "LocalFederation": "was replaced by `cflpriv.simulate(clients, ...)`, which gives a server and its clients in this process",
}
"""Names that earlier versions had, and what to write now. They raise ImportError, whose message `from cflpriv import NAME` shows."""

__all__ = [
    "ALGORITHMS", "AlgorithmSpec", "Callback", "ClientData", "ClusteredFL", "Clustering", "Config", "DataSpec", "Federation", "InputError",
    "Model", "Population", "Protection", "ProtectionSpec", "Sampling", "Train", "build_population", "load_config", "load_plugin",
    "read_sweep", "register_algorithm", "register_attack", "register_callback", "register_dataset", "register_metric", "register_model",
    "register_protection", "run_experiment", "simulate",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version(__name__)
    if name in _HOME:
        try:
            return getattr(import_module(f".{_HOME[name]}", __name__), name)
        except ModuleNotFoundError as error:
            from .extras import what_to_install  # not before: importing the protocols imports little

            if (line := what_to_install(error)) is None:
                raise
            raise ModuleNotFoundError(f"cflpriv.{name}: {line}", name=error.name) from error
    if name in _OLD:
        raise ImportError(f"cflpriv.{name}: {_OLD[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
