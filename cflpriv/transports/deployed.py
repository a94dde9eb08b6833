"""The client side of every deployment: one message in, one message out, by the party that a settings file describes.

Importing this loads no torch: some systems start a process for every message, and only those that compute need it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError
from ..federation.client import FederationClient
from ..federation.settings import KEY_HOLDER, Settings
from ..federation.store import Store
from ..types import ClientData

__all__ = ["no_data", "receive"]


def receive(
    settings: Settings, store: Store, data: Callable[[], ClientData], ask: bytes, own: Mapping[str, Callable[..., Any]] | None = None,
    samples: Callable[[], int] | None = None,
) -> bytes:  # fmt: skip
    """The answer to a message: that of the client, or of a holder of keys or shares, which has no data.

    `data` is called when a task needs the client's data. `own` has an application's functions for `Foreign` tasks, by name, and
    `samples` gives its number of examples.
    """
    if settings.role == KEY_HOLDER:
        from ..aggregation.holder_party import party_for  # loaded on first use

        return party_for(settings.protection)(settings, store).receive(ask)
    return FederationClient(settings, data, store, own=own, samples=samples).receive(ask)


def no_data() -> ClientData:
    """For a client that has no data here."""
    raise InputError("this client's data belong to its application")
