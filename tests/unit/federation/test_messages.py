"""The version of the messages changes with the messages: else an old client and a new server fail within a run, and not when they greet.

Tasks and functions are not part of it: they are sent by the names of their fields, and a client that lacks one answers `unknown-task`.
"""

import json
from hashlib import sha256
from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from cflpriv.contract import transformed_parts
from cflpriv.federation import message_encoding
from cflpriv.federation import messages as m
from cflpriv.protocols.ckks import messages as ckks
from cflpriv.protocols.group import messages as group
from cflpriv.protocols.secagg import messages as secagg
from cflpriv.protocols.secagg import terms as secagg_terms
from cflpriv.protocols.shared_gram import terms as shares

MODULES = (m, message_encoding, transformed_parts, secagg, secagg_terms, group, ckks, shares)
DIGESTS = {
    8: "c7a5824325aa06b8ee672fc3404a8824", 9: "6c35cb7f7d28548c35ea4b8f59e52d6b", 10: "f4585f4e82d7c0ea83ccebd8e5e1a337",
    11: "50a77bb601ed01c717bc9e929fd50773",
    12: "45b7d96573c44b48bde8bb59d86d9411",
    13: "394e090f3ca77e74db982febd9419c8b", 14: "aa4b98b594b8c0c45bfacdca325d0fdd",
    15: "827573dc3ab6876660fb41b9fe66645a", 16: "ea9ac74ea8ebf44474961d27c2a92a9e",
}  # fmt: skip
"""The digest of all messages by version. A changed message gets a new version and a new line; a version's line never changes."""


def message_types(modules: tuple[ModuleType, ...] = MODULES) -> dict[str, Any]:
    """Each message: its tag, and of each field its name, its type with all limits, and whether it may be missing."""
    return {
        ".".join((*module.__name__.split(".")[-2:], name)): [
            kind.__struct_config__.tag,
            [[field.encode_name, as_json(inspect.type_info(field.type)), field.required] for field in msgspec.structs.fields(kind)],
        ]
        for module in modules
        for name, kind in sorted(vars(module).items())
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    }


def as_json(value: Any) -> Any:
    """A type of `msgspec.inspect` as JSON values; classes by their names, because each message stands by itself."""
    if isinstance(value, inspect.StructType | inspect.CustomType):
        return value.cls.__name__
    if isinstance(value, inspect.Type):
        return [type(value).__name__, {name: as_json(one) for name, one in msgspec.structs.asdict(value).items() if one is not None}]
    if isinstance(value, tuple | list):
        return [as_json(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def digest(found: dict[str, Any]) -> str:
    return sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:32]


def test_changed_messages_have_another_version() -> None:
    now = digest(message_types())
    assert DIGESTS.get(m.VERSION) == now, (
        f"the messages are not those of version {m.VERSION}: raise VERSION in cflpriv/federation/messages.py and add its digest {now!r}"
    )
    assert max(DIGESTS) == m.VERSION
    assert len(set(DIGESTS.values())) == len(DIGESTS)


@pytest.mark.parametrize("change", ["a field more", "another limit", "another order", "a default"])
def test_the_digest_sees_every_change(change: str) -> None:
    changed = json.loads(json.dumps(message_types()))
    (name,) = (name for name in changed if name.endswith("messages.Compute"))
    fields = changed[name][1]
    match change:
        case "a field more":
            fields.append(["more", ["IntType", {}], False])
        case "another limit":
            limits = next(field for field in fields if field[0] == "held")[1][1]
            limits["le"] += 1
        case "another order":
            fields[0], fields[1] = fields[1], fields[0]
        case "a default":
            fields[0][2] = not fields[0][2]
    assert digest(changed) != digest(message_types())


def test_the_description_is_of_the_messages_that_are_sent() -> None:
    names = {name.rpartition(".")[2] for name in message_types()}
    for union in (m.PartyRequest, m.Answer, secagg.ClientMessage, secagg.ServerMessage, group.MemberMessage, group.ServerMessage):
        assert {kind.__name__ for kind in union.__args__} <= names
    assert {"Terms", "GroupTerms", "GramTerms", "Setup", "Deposit", "Delivery", "GramContribution", "Announced", "HolderKey"} <= names
