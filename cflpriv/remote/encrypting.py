"""A client's part in encrypted similarity: its vectors under the key of the key holder that its roster names."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..channels import sketched
from ..protection import Protection
from ..protocols.errors import LocalError, RemoteError
from ..protocols.keys import Roster
from . import messages as m
from .settings import Settings

__all__ = ["encrypted", "setup_of", "sketch_dim"]


def sketch_dim(protection: Protection) -> int | None:
    """To how many numbers long vectors are sketched first, if they are."""
    return protection.sketch_dim if "sketch" in protection.gram else None


def setup_of(protection: Protection, session: bytes, epoch: int, roster: Roster, p: int, dimension: int) -> Any:
    """The public terms of an epoch over rows (p, dimension), from a party's own protection: `protocols.ckks.Setup`."""
    from ..encrypted import Settings as Encryption  # the protocol is loaded where it is used

    return Encryption.of(protection, sketch_dim(protection)).setup(session, epoch, roster, p, dimension)


def encrypted(settings: Settings, ask: m.Give, values: Mapping[str, Any]) -> m.Given:
    """The client's upload, under terms that it makes from its own settings.

    Guarantee: that of `protocols.ckks`. The announced key must be signed by the key holder on this client's own roster, over terms that
    the client worked out itself: a server cannot slip in a key of its own, other parameters, or another release. Reveals: see there.

    Raises `RemoteError` "forbidden" for other terms than its own, "bad-signature" and "malformed" for another's key; `LocalError`
    "out-of-range" for vectors that are longer than `ckks_bound`.
    """
    from ..protocols import ckks

    roster, epoch = settings.roster, ask.epoch
    if epoch is None or roster is None or not roster.holder or len(values) != 1:
        raise RemoteError("forbidden")
    (rows,) = (np.atleast_2d(np.asarray(value)) for value in values.values())
    if rows.ndim != 2:
        raise RemoteError("bad-input")
    setup = setup_of(settings.protection, ask.session, epoch.number, roster, *rows.shape)
    if setup.digest != epoch.setup or setup.mode != "public-key":
        raise RemoteError("forbidden")
    reduced = np.atleast_2d(sketched(epoch.number, sketch_dim(settings.protection))(rows))
    try:
        upload = ckks.encrypt(setup, epoch.announcement, roster.holder, settings.identity, reduced)
    except LocalError as error:
        longest = float(np.linalg.norm(reduced, axis=1).max(initial=0.0))
        if error.code == "out-of-range":
            error.add_note(f"a vector of norm {longest:.3g} is above protection.ckks_bound = {setup.bound:g}, the public bound; raise it")
        raise
    return m.Given((m.Named("bytes", np.frombuffer(upload, dtype=np.uint8)),), 0)
