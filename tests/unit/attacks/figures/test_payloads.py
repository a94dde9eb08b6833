"""Every part of every message of every algorithm under every protection is described, and an attack reads it or the audit names it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cflpriv.algorithms import ALGORITHMS
from cflpriv.attacks import ATTACKS
from cflpriv.attacks.adversary import AdversaryView, view_of
from cflpriv.attacks.figures.coverage import less_sure, passed_over
from cflpriv.attacks.figures.leakage import Cell
from cflpriv.attacks.figures.payloads import ENTRIES, data_parts, depends_on_data, entry_of, parts_of, readers_in, unread
from cflpriv.contract.transcript import Message
from cflpriv.errors import InputError
from cflpriv.experiments import advance, parse_config, start

PROTECTIONS: tuple[dict[str, Any], ...] = (
    {}, {"sum": "haar", "gram": ["haar"]}, {"sum": "secagg", "gram": ["haar"]}, {"sum": "secagg", "gram": ["ckks"]},
    {"sum": "secagg-oblivious", "gram": ["ckks"]}, {"gram": ["shares"]}, {"gram": ["sketch", "haar"]},
    {"sum": "one_message", "gram": ["haar"]},
    {"sum": "secagg", "min_cohort": 2, "robust": "trimmed_mean", "buckets": 3},
)  # fmt: skip
FEW = PROTECTIONS[:2]
NOBODY_READS = {
    "fold arguments: fold", "product arguments: product", "product arguments: times", "gram result: found", "gram result: stage",
    "gram result: directions", "gram result: exceeding", "gram result: set_aside", "gram result: soft", "gram result: risen",
    "compute parameters: centre", "compute parameters: moves", "mean bucket mean: control", "mean bucket mean: steps",
    "compute parameters: placed", "gram result: placed", "gram result: nearest",
}  # fmt: skip
"""What the audit names as not attempted."""


def messages_of(algorithm: str, protection: dict[str, Any]) -> list[Message] | None:
    """Two rounds of eight clients, or three of more whose data change; None where the algorithm does not run so."""
    given: dict[str, Any] = {"k": 2} if algorithm in ("ifca", "hypcluster", "fesem", "fedsoft") else {}
    data: dict[str, Any] = {"clients": 8, "samples_per_client": 12}
    changing = algorithm in ("crossfit", "pacfl")
    if changing:
        given = {"recheck_every": 1}
        turn, join = {"round": 2, "clients": [0, 2], "group": 1}, {"round": 1, "clients": [1, 5], "joins": True}
        data = {"clients": 24, "samples_per_client": 20, "rotations": [0, 90], "drift": [turn, join]}
    tree = {
        "data": data, "algorithm": {"name": algorithm, **given}, "model": {"name": "linear"},
        "training": {"rounds": 2 + changing, "lr": 0.1, "weights": "equal"}, "protection": protection, "run": {"record": "full"},
    }  # fmt: skip
    try:
        run = start(parse_config(tree))
        for _ in range(2 + changing):
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adversary", ["client", "released"])
def test_of_a_single_round_the_trained_model_is_missing_in_the_record(adversary: str) -> None:
    """Clients are sent the initial model alone; whoever gets the trained one is not to be told that there is nothing to see."""
    tree: dict[str, Any] = {
        "data": {"clients": 4, "samples_per_client": 10}, "algorithm": {"name": "fedavg"}, "model": {"name": "linear"},
        "training": {"rounds": 1, "weights": "equal"}, "protection": {"sum": "secagg"}, "run": {"record": "full"},
    }  # fmt: skip
    run = start(parse_config(tree))
    before = list(run.federation.transcript.messages)
    advance(run)
    view = view_of(run.federation.transcript.messages, adversary, {})
    assert unread(view, ATTACKS.names()) == ("compute parameters: the models after the last round",)
    untrained = [message for message in run.federation.transcript.messages if message.operation == "compute"]
    assert not depends_on_data(view_of([*before, *untrained], adversary, {}))
    run.simulated.close()


@pytest.mark.filterwarnings("ignore")
def test_buckets_of_a_robust_rule_are_described() -> None:
    """The randomness that deals buckets is of no data, and their means are read."""
    messages = messages_of("fedavg", PROTECTIONS[-1])
    assert messages
    view = view_of(messages, "server", {})
    assert {part for _, _, part in data_parts(view)} >= {"update", "bytes"}
    assert not unread(view, ATTACKS.names())


def test_what_readers_do_not_ask_is_named() -> None:
    """Counts of correct answers have the number of test samples, and their only reader compares clients."""
    scores = message(operation="gather", kind="correct+count+confusion", payload={"count": np.ones(3)})
    (named,) = unread(seen_by_server(scores), ATTACKS.names())
    assert "numbers of test samples" in named


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


def cell(attack: str, **changes: Any) -> Cell:
    return replace(Cell(attack, "server", "none", "m", *(None,) * 5, "not_applicable"), **changes)


def test_a_part_that_none_of_its_attacks_read_is_named() -> None:
    readers = {"mean update: prototype": ("likeness",), "compute parameters: model": ("membership", "disaggregation")}
    nothing_read = [cell("likeness"), cell("membership"), cell("disaggregation")]
    (named,) = passed_over(nothing_read, readers)
    assert named.status == "not_attempted"
    assert all(part in named.note for part in readers)
    figure = cell("likeness", value=0.5, baseline=0.5, status="at_baseline")
    (rest,) = passed_over([figure, *nothing_read[1:]], readers)
    assert "prototype" not in rest.note
    assert not passed_over([figure, cell("membership", status="not_attempted")], readers)


def test_a_proof_about_cohorts_reads_no_model() -> None:
    proof = cell("disaggregation", value=0.0, baseline=0.0, status="at_baseline", exact=True)
    readers = {"compute parameters: model": ("membership", "disaggregation")}
    assert passed_over([proof, cell("membership")], readers)
    assert not passed_over([replace(proof, value=0.5, status="leaks")], readers)


def test_numbers_of_samples_are_read_as_a_whole() -> None:
    """Where all clients have equally many there is nothing to find in them."""
    weights = message(payload={"weight": np.ones(3), "update": np.zeros((3, 4))})
    assert set(readers_in(seen_by_server(weights))) == {"mean update: update"}


def test_what_the_first_rounds_do_not_show_may_be_in_later_ones() -> None:
    """The models that clients are sent last are not among those of the first round."""
    later = message(operation="compute", kind="parameters", source="server", target="clients", round=5, payload={"model": np.zeros(4)})
    whole = AdversaryView("released", (later,), {})
    assert depends_on_data(whole)
    assert not depends_on_data(whole.until(1))
    unseen = [cell("label_inference", status="nothing_to_see"), cell("influence", status="nothing_to_see")]
    proof = cell("disaggregation", value=0.0, baseline=0.0, status="at_baseline", exact=True)
    statuses = [made.status for made in less_sure([*unseen, proof], whole, kept=True)]
    assert statuses == ["not_attempted", "not_applicable", "inconclusive"]
    assert {made.status for made in less_sure(unseen, whole, kept=False)} == {"not_attempted"}
    assert {made.status for made in less_sure(unseen, AdversaryView("released", (), {}), kept=True)} == {"nothing_to_see"}
