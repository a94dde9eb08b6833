"""The settings of a client, which only its operator can change, and its settings file, for every deployment.

A file names a client's keys, the protection and the privacy that it insists on, and its state folder. No server writes it. Importing this
loads no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from ..contract.protection import Protection
from ..errors import InputError, unknown_key
from ..keys import Key, check_ranges
from ..privacy.settings import Privacy
from ..protocols import key_files
from ..protocols.bounded_files import read_toml
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.keys import Identity, Roster
from .limits import Limits
from .messages import Refused

__all__ = [
    "KEY_HOLDER", "Limits", "NoSettings", "Settings", "read_identity", "read_roster", "read_settings", "refused_settings",
    "write_identities",
]  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The client's identity, the pinned peers, the protection in force, and the privacy that the client demands.

    `privacy` uses the unit, the relation, ε and δ (over all runs on these data), `clip_norm`, whether that moves (`clip_quantile`), and
    under unit = "sample" `samples`, `sketch_dim` and `loss_cap`. `role` "key-holder" has no data and decrypts what the protection
    releases. `models`: how many models the members of one secure sum may have been sent. More than 1 is for algorithms that sum over
    several groups at once (IFCA with shared layers, sums of blocks); among k models a server can plant one for a single
    client.

    `limits`: how much work a server may ask for, and what a session contract may ask for at most. `contract`: the digest (32 bytes) of the
    only contract that the client agrees to; empty: any within `limits`. With `needs_contract` the client enrols under a contract alone, as
    every client with a settings file does. `allow_scores`: the contract may show the server scores and choices of this client, which are
    numbers about its data at models that the server chooses.
    """

    identity: Identity = field(repr=False)
    protection: Protection = field(default_factory=Protection)
    roster: Roster | None = None
    privacy: Privacy = field(default_factory=Privacy)
    role: Literal["client", "key-holder"] = "client"
    models: Annotated[int, Key("Models that the members of one secure sum may have been sent.", "[1, inf)", "models")] = 1
    contract: bytes = b""
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    needs_contract: bool = False
    allow_scores: bool = False

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self))


# --- the file

Section = TypeVar("Section", Protection, Privacy, Limits)
Read = TypeVar("Read")
Role = Literal["client", "key-holder"]
KEY_HOLDER: Role = "key-holder"
KEYS = ("identity", "roster", "state", "role", "models", "contract", "limits", "allow_scores", "protection", "privacy", "app")
"""The keys of a settings file; the application's own keys are in the table [app]."""


class NoSettings(InputError):
    """No settings file is named, or there is none where it should be."""


def refused_settings(error: Exception) -> Refused:
    """The answer of a client whose settings cannot be used. Its text stays at the client."""
    return Refused("no-settings" if isinstance(error, NoSettings) else "bad-settings")


def read_identity(path: str | Path) -> Identity:
    """A client's secret key file. Raises `InputError`."""
    return _usable(lambda: key_files.read_identity(path))


def read_roster(path: str | Path) -> Roster:
    """The pinned public keys of a roster file. Raises `InputError`."""
    return _usable(lambda: key_files.read_roster(path))


def write_identities(folder: str | Path, count: int, entropy: Entropy = system_entropy, *, key_holder: int = 0) -> Path:
    """Keys for clients 0..count−1 and their roster, for a trial: see `protocols.key_files`. Raises `InputError` for files that exist."""
    return _usable(lambda: key_files.write_identities(folder, count, entropy, key_holder=key_holder))


def _usable(read: Callable[[], Read]) -> Read:
    try:
        return read()
    except ValueError as error:
        raise InputError(str(error)) from None


def read_settings(path: str | Path) -> tuple[Settings, Path | None, dict[str, Any]]:
    """A client's settings file: (settings, folder for its state or None, the application's own table).

    A TOML file with `identity` (key file), `roster` (optional), `state` (a folder; without it the state is lost when the SuperNode
    restarts), `[protection]`, which must be there, and `[privacy]`, with the keys of an experiment. Paths are relative to the file.
    `[privacy]` and secure sums need `state`, which keeps the record of what was spent and summed. `contract = "DIGEST"` (`cflpriv contract
    --digest`) pins the only session contract that the client agrees to; `[limits]` bounds the work of one request, and states what a
    contract may ask for at most. `allow_scores = true` lets a contract show its scores and choices. `role = "key-holder"` makes it the key
    holder of encrypted similarity, or a helper of sums: it has no data. `models` is how many models the members of one secure sum may have
    been sent, 1 by default. `[app]` is for the application. Any other key is refused, so that a misspelt one cannot mean less protection.

    Raises `InputError`.
    """
    path = Path(path)
    try:
        tree = read_toml(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    for key, value in tree.items():
        if key not in KEYS:
            remedy = "; what the application reads goes into [app]"
            raise InputError(f"{path}: {key} = {value!r}: is not a key here; known are {', '.join(KEYS)}{remedy}")
    for key, what in (("identity", "the key file"), ("roster", "the file of pinned keys"), ("state", "the folder for its state")):
        if not isinstance(tree.get(key, None if key == "identity" else ""), str):
            raise InputError(f"{path}: {key} = {tree.get(key)!r}: give the path of {what}")
    identity = read_identity(path.parent / tree["identity"])
    if "protection" not in tree:  # a misspelt one must not mean none
        raise InputError(f"{path}: [protection] is missing: give the one in force; an empty section is none")
    protection, privacy = _section(path, tree, "protection", Protection), _section(path, tree, "privacy", Privacy)
    roster = read_roster(path.parent / tree["roster"]) if "roster" in tree else None
    if protection.secure and protection.secagg_mode == "active" and roster is None:
        raise InputError(f"{path}: [protection] secagg_mode = 'active': give the roster of pinned keys, or use 'passive'")
    if privacy.unit != "none" and "state" not in tree:
        raise InputError(f"{path}: [privacy] unit = {privacy.unit!r}: give a folder as state, which keeps the record of what was spent")
    app = tree.get("app", {})
    if not isinstance(app, dict):
        raise InputError(f"{path}: app = {app!r}: is a table, [app]")
    role = _role(path, tree, identity, protection, roster)
    if protection.secure and (role == "client" or protection.sums.helped) and "state" not in tree:
        raise InputError(
            f"{path}: [protection] sum = {protection.sum!r}: give a folder as state, which keeps the record of what was summed"
        )
    limits, contract, allow_scores = _section(path, tree, "limits", Limits), _contract(path, tree), tree.get("allow_scores", False)
    if not isinstance(allow_scores, bool):
        raise InputError(f"{path}: allow_scores = {allow_scores!r}: expected true or false")
    try:
        settings = Settings(
            identity, protection, roster, privacy, role, tree.get("models", 1), contract, limits, role == "client", allow_scores
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    state = path.parent / tree["state"] if "state" in tree else None
    return settings, state, app


def _contract(path: Path, tree: dict[str, Any]) -> bytes:
    """The digest of the pinned contract, empty where none is pinned."""
    pinned = tree.get("contract", "")
    try:
        digest = bytes.fromhex(pinned)
    except (TypeError, ValueError):
        digest = b"?"
    if len(digest) not in (0, 32):
        raise InputError(f"{path}: contract = {pinned!r}: expected a digest of 64 hexadecimal digits (cflpriv contract CONFIG --digest)")
    return digest


def _role(path: Path, tree: dict[str, Any], identity: Identity, protection: Protection, roster: Roster | None) -> Role:
    """The role in these settings; checks that roster and protection fit it."""
    role: Role = tree.get("role", "client")
    if role not in ("client", KEY_HOLDER):
        raise InputError(f"{path}: role = {role!r}: is not known; known are client, key-holder")
    if protection.holders and (roster is None or len(roster.holders) != protection.holders):
        key = "helpers" if protection.sums.helped else "share_holders"
        needed = "the key holder" if protection.holders == 1 else f"{protection.holders} key-holders ({key})"
        why = f"sum = {protection.sum!r}" if protection.sums.helped else f"gram = {list(protection.gram)}"
        raise InputError(f"{path}: [protection] {why}: give a roster that names {needed}")
    if role == KEY_HOLDER and not protection.holders:
        raise InputError(
            f"{path}: role = 'key-holder' needs [protection] gram = ['ckks'] or ['shares'], which also set what is released, or "
            "sum = 'one_message'"
        )
    if role == KEY_HOLDER and roster is not None and identity.public() not in roster.holders:
        raise InputError(f"{path}: role = 'key-holder': its key is not that of a key holder on the roster")
    return role


def _section(path: Path, tree: dict[str, Any], name: str, kind: type[Section]) -> Section:
    """A table of the settings file as the dataclass that an experiment has for it, each value of the key's own type."""
    section = tree.get(name, {})
    if not isinstance(section, dict):
        raise InputError(f"{path}: {name} = {section!r}: is a table, [{name}]")
    hints = get_type_hints(kind)
    known = {attribute.name: hints[attribute.name] for attribute in fields(kind)}
    values = {}
    for key, value in section.items():
        if key not in known:
            raise InputError(f"{path}: {unknown_key(name, key, value, '; known are ' + ', '.join(sorted(known)))}")
        try:
            values[key] = msgspec.convert(value, known[key])
        except msgspec.ValidationError as error:
            raise InputError(f"{path}: [{name}] {key} = {value!r}: {_expected(known[key], error)}") from None
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _expected(kind: Any, error: Exception) -> str:
    """What a key of this type takes, in TOML terms."""
    if get_origin(kind) is Literal:
        return f"known are {', '.join(repr(choice) for choice in get_args(kind))}"
    return "expected a list of names, in brackets" if get_origin(kind) is tuple else f"{error}".replace("Expected", "expected", 1)
