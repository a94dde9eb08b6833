"""The callback `wandb`: what a run measures, as a run of Weights & Biases. Needs the extra `[wandb]`.

Weights & Biases' own variables say where to: `WANDB_MODE=offline` sends nothing; `WANDB_PROJECT` and `WANDB_DIR`, and more.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ..config.callbacks import Callback, register_callback
from .figures import keep_number, known_number, scalars, settings

if TYPE_CHECKING:
    from ..config.config import Config

__all__ = ["Wandb"]


class Wandb(Callback):
    """Logs each round's numbers by its round, settings as the run's configuration, and the numbers of the summary."""

    def __init__(self) -> None:
        import wandb  # here, so that the name is known without the extra

        self._start = wandb.init
        self._run: Any = None

    def on_start(self, folder: Path, config: "Config", rounds: int) -> None:
        number = known_number(folder, "wandb", rounds) or uuid4().hex[:8]
        keep_number(folder, "wandb", number)
        self._run = self._start(
            project=os.environ.get("WANDB_PROJECT") or "cflpriv", name=folder.name, id=number, resume="allow", config=settings(config),
            reinit="create_new",
        )  # fmt: skip
        # rounds since the last checkpoint come again in a resumed run, and steps of W&B never go back: each number has its round beside it
        self._run.define_metric("round/*", step_metric="round")

    def on_round(self, row: Mapping[str, Any]) -> None:
        self._run.log({"round": row["round"], **{f"round/{name}": value for name, value in scalars(row).items()}})

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in scalars(summary).items()})
        self._run.finish(exit_code=int(summary["rounds"] < summary["rounds_planned"]))

    def on_error(self, error: Exception) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)


register_callback("wandb", Wandb)
