"""Identities and rosters in files: one secret file for each party, one list of public keys for all.

A key file has three lines: the client's number and its two seeds of 32 bytes in hex. Only its owner can read it. A roster file has a line
"number key" for each client, from 0 on, and "key-holder key" for each party that holds decryption keys or shares, the first one first.

Reveals: who reads a key file is that client. There is no password: keep the folder as secret as a private key.
"""

import os
from pathlib import Path

from .entropy import Entropy, system_entropy
from .keys import Identity, Roster

__all__ = ["HOLDER_NAME", "read_identity", "read_roster", "write_identities", "write_identity"]

HOLDER_NAME = "key-holder"
"""The key holder's name on a roster, and of its key file."""


def write_identity(path: str | Path, identity: Identity) -> None:
    """Write a party's secret keys to a new file. Raises `ValueError` if the file exists: keys are not overwritten."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{path}: exists; keys are not overwritten") from None
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f"{identity.client}\n{identity.signing_seed.hex()}\n{identity.encryption_seed.hex()}\n")


def read_identity(path: str | Path) -> Identity:
    """A party's secret keys. Raises `ValueError` for a file that `write_identity` cannot have written."""
    try:
        number, signing, encryption = Path(path).read_text(encoding="utf-8-sig").split()
        identity = Identity(int(number), bytes.fromhex(signing), bytes.fromhex(encryption))
        if identity.client < 0 or {len(identity.signing_seed), len(identity.encryption_seed)} != {32}:
            raise ValueError
        return identity
    except (OSError, ValueError):
        raise ValueError(f"{path}: is not a key file of three lines (client number, two seeds of 32 bytes in hex)") from None


def read_roster(path: str | Path) -> Roster:
    """The pinned public keys. Raises `ValueError` for a file that is no roster."""
    try:
        rows = [line.split() for line in Path(path).read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        holders = [bytes.fromhex(key) for name, key in rows if name == HOLDER_NAME]
        keys = {int(number): bytes.fromhex(key) for number, key in rows if number != HOLDER_NAME}
        if sorted(keys) != list(range(len(keys))) or len(keys) + len(holders) != len(rows):
            raise ValueError
        first, others = (holders[0], tuple(holders[1:])) if holders else (b"", ())
        return Roster(tuple(keys[number] for number in range(len(keys))), first, others)
    except (OSError, ValueError):
        raise ValueError(
            f"{path}: is not a roster of lines 'number key', from 0 on (and 'key-holder key'), each key 32 bytes in hex"
        ) from None


def write_identities(folder: str | Path, count: int, entropy: Entropy = system_entropy, *, key_holder: int = 0) -> Path:
    """Keys for clients 0..count−1, one secret file each, and the roster of their public keys; the roster's path.

    With `key_holder` also `key-holder.key` for the key holder of encrypted similarity, whose public key the roster names; for more than one
    holder `key-holder1.key` and so on, too.

    For a trial on one machine: in a deployment every operator makes its own key, and the roster is agreed out of band. Raises `ValueError`
    for a file that exists: keys are not overwritten.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = []
    parties = [(client, f"client{client}", str(client)) for client in range(count)]
    parties += [(0, f"{HOLDER_NAME}{number or ''}", HOLDER_NAME) for number in range(int(key_holder))]
    for client, name, entry in parties:
        identity = Identity.create(client, entropy)
        write_identity(folder / f"{name}.key", identity)
        lines.append(f"{entry} {identity.public().hex()}\n")
    roster = folder / "roster.txt"
    roster.write_text("".join(lines), encoding="utf-8")
    return roster
