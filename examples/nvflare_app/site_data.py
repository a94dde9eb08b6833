"""A site's data: the function that its settings name as `[app] data`."""

from pathlib import Path
from typing import Any

from cflpriv.types import ClientData


def digits(client: int, app: dict[str, Any]) -> ClientData:
    """This client's share of the digits. A real site reads its own files here."""
    from cflpriv import build_population
    from cflpriv.experiments import load_config

    population = build_population(load_config(Path(app["experiment"])).data)
    return next(data for data in population.clients if data.id == client)
