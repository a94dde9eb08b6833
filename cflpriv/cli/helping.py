"""The command that runs a party which stays: `helper`."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .shared import print_line

__all__ = ["helper"]


def helper(
    settings: Annotated[Path, typer.Argument(metavar="SETTINGS.toml")],
    listen: Annotated[str, typer.Option("--listen", help="The address to listen at.", metavar="HOST:PORT")] = "127.0.0.1:9200",
) -> None:
    """Run a helper of sums, or a holder of keys or shares, that stays and answers the server at an address.

    SETTINGS.toml is its settings file, with role = "key-holder" and a folder as state. A helper that is started again over the same folder
    goes on.
    """
    from ..aggregation.holder_party import party_for
    from ..federation.resident import Listener, read_address
    from ..federation.settings import KEY_HOLDER, read_settings
    from ..federation.store import DiskStore

    own, folder, _ = read_settings(settings)
    if own.role != KEY_HOLDER:
        raise InputError(f"{settings}: role = {own.role!r}: a party that stays has role = 'key-holder'")
    if folder is None:
        raise InputError(f"{settings}: state is missing: give a folder, which keeps what this party has answered")
    party = party_for(own.protection)(own, DiskStore(folder))
    try:
        listener = Listener(read_address(listen), party.receive)
    except OSError as error:
        raise InputError(f"--listen {listen}: cannot be listened at ({error})") from None
    with listener:
        print_line(f"listening at {read_address(listen)[0]}:{listener.server_address[1]}; end with Ctrl-C")
        listener.serve_forever()
