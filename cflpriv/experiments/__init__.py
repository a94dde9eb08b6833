"""Experiments: from a TOML file to a run folder to a report.

`config` reads an experiment, `loop` has its rounds over any federation, `run` makes a simulation, `folder` writes a run folder,
`checkpoint` and `resume` resume a run that ended early, `measure` has the experimenter's measurements (they use ground truth; nothing of
them reaches the transcript), `sweep` reads a grid of experiments, `sweep_runs` runs it, `private_choice` chooses among
them at a stated ε, `front` compares their results, `report` makes one page of the folders.
"""

from .config.config import Config, load_config, parse_config
from .run.folder import run_experiment
from .run.run import Experiment, advance, finish, start
from .sweep.sweep import Sweep, load_sweep, parse_sweep
from .sweep.sweep_runs import run_sweep

__all__ = [
    "Config", "Experiment", "Sweep", "advance", "finish", "load_config", "load_sweep", "parse_config", "parse_sweep", "run_experiment",
    "run_sweep", "start",
]  # fmt: skip
