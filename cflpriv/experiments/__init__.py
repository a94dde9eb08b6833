"""Experiments: from a TOML file to a run folder to a report.

`config` reads an experiment, `loop` has its rounds over any federation, `run` makes a simulation, `folder` writes a run folder,
`checkpoint` and `resume` resume a run that ended early, `measure` has the experimenter's measurements (they use ground truth; nothing of
them reaches the transcript), `sweep` reads a grid of experiments, `sweep_runs` runs it, `private_choice` chooses among
them at a stated ε, `front` compares their results, `report` makes one page of the folders. Names are imported when first used, so that
`cflpriv verify` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.config import Config, load_config, parse_config
    from .run.folder import run_experiment
    from .run.run import Experiment, advance, finish, start
    from .sweep.sweep import Sweep, load_sweep, parse_sweep
    from .sweep.sweep_runs import run_sweep

_HOME = {
    "Config": "config.config", "Experiment": "run.run", "Sweep": "sweep.sweep", "advance": "run.run", "finish": "run.run",
    "load_config": "config.config", "load_sweep": "sweep.sweep", "parse_config": "config.config", "parse_sweep": "sweep.sweep",
    "run_experiment": "run.folder", "run_sweep": "sweep.sweep_runs", "start": "run.run",
}  # fmt: skip

__all__ = [
    "Config", "Experiment", "Sweep", "advance", "finish", "load_config", "load_sweep", "parse_config", "parse_sweep", "run_experiment",
    "run_sweep", "start",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
