"""The callback `mlflow`: what a run measures, as a run of MLflow. Needs the extra `[mlflow]`.

MLflow's own variables say where to: `MLFLOW_TRACKING_URI` (without it MLflow's local store) and `MLFLOW_EXPERIMENT_NAME`.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.callbacks import Callback, register_callback
from .figures import keep_number, known_number, scalars, settings

if TYPE_CHECKING:
    from ..config.config import Config

__all__ = ["MLflow"]

MOST_SETTINGS, LONGEST = 100, 500
"""Settings in one request, as MLflow allows, and characters of a setting."""


class MLflow(Callback):
    """Logs each round's numbers under the step of its round, settings as parameters, and the numbers of the summary at the end."""

    def __init__(self) -> None:
        from mlflow.entities import Metric, Param  # here, so that the name is known without the extra
        from mlflow.tracking import MlflowClient

        self._client, self._metric, self._param = MlflowClient(), Metric, Param
        self._number = ""

    def on_start(self, folder: Path, config: "Config", rounds: int) -> None:
        self._number = known_number(folder, "mlflow", rounds)
        if self._number:
            self._client.update_run(self._number, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "cflpriv"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._number = self._client.create_run(experiment, run_name=folder.name).info.run_id
        keep_number(folder, "mlflow", self._number)
        pairs = [self._param(key, str(value)[:LONGEST]) for key, value in settings(config).items()]
        for at in range(0, len(pairs), MOST_SETTINGS):
            self._client.log_batch(self._number, params=pairs[at : at + MOST_SETTINGS])

    def on_round(self, row: Mapping[str, Any]) -> None:
        self._log("round", row, row["round"])

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._log("summary", summary, summary["rounds"])
        self._client.set_terminated(self._number, "KILLED" if summary["rounds"] < summary["rounds_planned"] else "FINISHED")

    def on_error(self, error: Exception) -> None:
        if self._number:
            self._client.set_terminated(self._number, "FAILED")

    def _log(self, group: str, row: Mapping[str, Any], step: int) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._number, [self._metric(f"{group}/{name}", value, now, step) for name, value in scalars(row).items()])


register_callback("mlflow", MLflow)
