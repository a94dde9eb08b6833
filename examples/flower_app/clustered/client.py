"""A SuperNode's side: its data, and nothing else of its own."""

from pathlib import Path
from typing import Any

from flwr.app import Context

from cflpriv.flower.client import client_app
from cflpriv.types import ClientData


def data(context: Context, tables: dict[str, Any]) -> ClientData:
    """This client's share of the digits. A real client reads its own files here."""
    from cflpriv.experiments import load_config
    from cflpriv.flower.client import settings_of

    number = settings_of(context)[0].identity.client
    from cflpriv import build_population

    population = build_population(load_config(Path(tables["experiment"])).data)
    return next(client for client in population.clients if client.id == number)


app = client_app(data)
