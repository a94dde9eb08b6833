"""Run on Flower, across processes and machines.

Flower starts SuperLink, SuperNodes and a process for every message, and moves bytes; `cflpriv.federation` has the operations over
messages.

    transport    bytes over Flower's Grid, with deadlines
    client       a client app: settings from a local file, state in files or in Flower's context
    server       a whole experiment from its config, into the same run folder as a local one
    strategy     for an existing Flower app: clustered, securely summed averaging
    mod          the clients' side of it
    accountant   Flower's accountant protocol, exactly accounted

A SuperLink can read what it relays, except what clients seal for each other: secure aggregation and relayed values. Use TLS against
outsiders, and a pinned roster (`secagg_mode = "active"`) against the SuperLink itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accountant import PldAccountant
    from .client import client_app, read_roster, read_settings, write_identities
    from .mod import cflpriv_mod
    from .server import serve
    from .strategy import ClusteredAveraging
    from .transport import GridTransport

_HOME = {
    "ClusteredAveraging": "strategy", "GridTransport": "transport", "PldAccountant": "accountant", "cflpriv_mod": "mod",
    "client_app": "client", "read_roster": "client", "read_settings": "client", "serve": "server", "write_identities": "client",
}  # fmt: skip

__all__ = [
    "ClusteredAveraging", "GridTransport", "PldAccountant", "cflpriv_mod", "client_app", "read_roster", "read_settings", "serve",
    "write_identities",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        try:
            return getattr(import_module(f".{_HOME[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "flwr":
                raise ModuleNotFoundError("cflpriv.flower needs Flower: pip install 'cflpriv[flower]'", name="flwr") from None
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
