"""A whole experiment on a Grid, from its config, into the same run folder as a local one: `experiments.deployment` over Flower."""

from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from ..experiments.config.config import Config
from ..experiments.run.deployment import deploy, standing_in
from ..types import Population
from .transport import GridTransport

__all__ = ["serve", "standing_in"]


def serve(
    grid: Grid,
    config: Config,
    out: str | Path,
    described: Population,
    *,
    clients: int,
    deadline_seconds: float = 60.0,
    compute_seconds: float = 600.0,
    hello_seconds: float = 30.0,
    message_type: str = "query.cflpriv",
    **options: Any,
) -> dict[str, Any]:
    """Run `config` with the `clients` that the Grid reaches; the summary, as in summary.json.

    The seconds are those of `federation.stages.StagedTransport`. `options` (truth, roster, wait_seconds, resume, report, residents) and
    all others are those of `experiments.deployment.deploy`. With `resume` it also continues as another run of a restarted SuperLink.
    """
    return deploy(
        lambda journal: GridTransport(
            grid, deadline_seconds=deadline_seconds, compute_seconds=compute_seconds, hello_seconds=hello_seconds,
            message_type=message_type, journal=journal,
        ),
        config, out, described, system="flower", clients=clients, **options,
    )  # fmt: skip
