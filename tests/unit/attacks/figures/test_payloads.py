"""Every part of every message of every algorithm under every protection is described, and an attack reads it or the audit names it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cflpriv.algorithms import ALGORITHMS
from cflpriv.attacks import ATTACKS
from cflpriv.attacks.adversary import AdversaryView, view_of
from cflpriv.attacks.figures.payloads import ENTRIES, data_parts, depends_on_data, entry_of, parts_of, unread
from cflpriv.contract.transcript import Message
from cflpriv.errors import InputError
from cflpriv.experiments import advance, parse_config, start

PROTECTIONS: tuple[dict[str, Any], ...] = (
    {}, {"sum": "haar", "gram": ["haar"]}, {"sum": "secagg", "gram": ["haar"]}, {"sum": "secagg", "gram": ["ckks"]},
    {"sum": "secagg-oblivious", "gram": ["ckks"]}, {"gram": ["shares"]}, {"gram": ["sketch", "haar"]},
    {"sum": "one_message", "gram": ["haar"]},
)  # fmt: skip
FEW = PROTECTIONS[:2]
NOBODY_READS = {
    "fold arguments: fold", "product arguments: product", "product arguments: times", "gram result: found", "gram result: stage",
    "gram result: directions", "gram result: exceeding", "gram result: set_aside", "gram result: soft", "gram result: risen",
    "compute parameters: control", "compute parameters: prototypes", "compute parameters: short_centre", "compute parameters: moves",
}  # fmt: skip
"""What the audit names as not attempted."""


def messages_of(algorithm: str, protection: dict[str, Any]) -> list[Message] | None:
    """Two rounds of eight clients; None where the algorithm does not run so."""
    given = {"k": 2} if algorithm in ("ifca", "hypcluster", "fesem", "fedsoft") else {}
    tree = {
        "data": {"clients": 8, "samples_per_client": 12}, "algorithm": {"name": algorithm, **given}, "model": {"name": "linear"},
        "training": {"rounds": 2, "lr": 0.1, "weights": "equal"}, "protection": protection, "run": {"record": "full"},
    }  # fmt: skip
    try:
        run = start(parse_config(tree))
        for _ in range(2):
            advance(run)
    except InputError:
        return None
    run.simulated.close()
    return list(run.federation.transcript.messages)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ALGORITHMS.names())
@pytest.mark.parametrize("protections", [FEW, pytest.param(PROTECTIONS, marks=pytest.mark.slow)], ids=["few", "all"])
def test_every_part_is_described_and_read_or_named(algorithm: str, protections: tuple[dict[str, Any], ...]) -> None:
    for protection in protections:
        messages = messages_of(algorithm, protection) or []
        for message in messages:
            for part in parts_of(message):
                assert entry_of(message, part) is not None, f"{message.operation} {message.kind}: {part}"
        if messages:
            assert set(unread(view_of(messages, "server", {}), ATTACKS.names())) <= NOBODY_READS


def test_readers_are_attacks() -> None:
    for entry in ENTRIES:
        assert set(entry.readers) <= set(ATTACKS), entry


def message(**changes: Any) -> Message:
    plain = Message(0, 0, "mean", "update", "clients", "server", (0, 1, 2), ("server",), 8, 3, 24, "")
    return replace(plain, **{"payload": {"update": np.zeros((3, 4))}, **changes})


def seen_by_server(*messages: Message, coalition: tuple[int, ...] = ()) -> AdversaryView:
    return AdversaryView("server", messages, {}, coalition)


def test_what_nobody_described_counts_as_unread_data() -> None:
    strange = seen_by_server(message(kind="gossip", payload={"rumour": np.zeros((3, 1))}))
    assert depends_on_data(strange)
    assert unread(strange, ATTACKS.names()) == ("mean gossip: rumour",)


def test_what_depends_on_no_data() -> None:
    keys = message(operation="group", kind="Advert", payload={"bytes": np.zeros((3, 4), np.uint8)})
    first = message(operation="compute", kind="parameters", source="server", target="clients", payload={"model": np.zeros(4)})
    assert not depends_on_data(seen_by_server(keys, first, message(payload=None)))
    assert not depends_on_data(seen_by_server(message(), coalition=(0, 1, 2)))
    assert depends_on_data(seen_by_server(message(), coalition=(0, 1)))
    assert depends_on_data(seen_by_server(message(), replace(first, index=1, round=1)))


def test_what_is_opened_depends_on_data() -> None:
    masked = message(kind="secagg Masked", payload={"bytes": np.zeros((3, 4), np.uint8)})
    assert set(data_parts(seen_by_server(masked))) == {("mean", "secagg Masked", "bytes")}
    rows = message(operation="gram", kind="signature", readers=("key-holder",), payload=None)
    assert depends_on_data(AdversaryView("key-holder", (rows,), {"key-holder": {}}))
