"""The ledger: asked before, durable before, never taken back; a model of it as a state machine finds the same bills."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cflpriv.protocols.accounting import epsilon_of
from cflpriv.protocols.events import GaussianEvent
from cflpriv.protocols.ledger import BudgetExceeded, Ledger, PrivacyBudget, Receipt

BUDGET = PrivacyBudget(1.0, 1e-5, "add_remove", "sample")


def event(z: float = 10.0, **changes: Any) -> GaussianEvent:
    return replace(GaussianEvent(z, 1.0, "add_remove", "sample"), **changes)


def test_a_refused_charge_charges_nobody_and_says_who_stood_where() -> None:
    ledger = Ledger(BUDGET)
    ledger.charge({0: [event(4.0)], 1: [event(20.0)]}, "signature")
    before = ledger.spent(0), ledger.spent(1)
    with pytest.raises(BudgetExceeded, match="client 0 has spent") as refused:
        ledger.charge({0: [event(4.0)], 1: [event(20.0)]}, "mean of update", 3)
    assert (refused.value.client, refused.value.spent, refused.value.limit) == (0, before[0], 1.0)
    assert refused.value.would == pytest.approx(epsilon_of([event(4.0)] * 2, 1e-5))
    assert (ledger.spent(0), ledger.spent(1)) == before
    ledger.charge({1: [event(20.0)]}, "mean of update", 3)
    assert ledger.spent(0) == before[0]
    assert ledger.spent(1) > before[1]


def test_a_budget_can_be_spent_to_the_last_bit() -> None:
    cost = epsilon_of([event(7.0)] * 3, 1e-5)
    ledger = Ledger(PrivacyBudget(cost, 1e-5, "add_remove", "sample"))
    for round in range(3):
        ledger.charge({5: [event(7.0)]}, "mean", round)
    for multiplier in (7.0, 1e4):
        with pytest.raises(BudgetExceeded):
            ledger.charge({5: [event(multiplier)]}, "mean", 3)


def test_a_receipt_is_paid_once_and_its_release_again_is_free() -> None:
    ledger = Ledger(BUDGET)
    receipt = Receipt((event(10.0),))
    ledger.settle({0: [receipt], 1: [receipt]}, "gram")
    ledger.settle({0: [receipt]}, "gather")
    assert len(ledger.charges) == 1
    ledger.settle({0: [receipt, Receipt((event(10.0),))], 2: [receipt]}, "mean")
    assert [len(ledger.events(client)) for client in (0, 1, 2)] == [2, 1, 1]
    tired = Receipt((event(0.5),))
    with pytest.raises(BudgetExceeded):
        ledger.settle({0: [tired]}, "mean")
    assert tired.paid == set(), "a refused receipt stays unpaid"


def test_the_charge_is_on_the_disk_before_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.json"
    ledger = Ledger(BUDGET, path)
    order: list[str] = []
    sync, rename = os.fsync, os.replace

    def flush(fd: int) -> None:
        order.append("flush")
        sync(fd)

    def renamed(a: Path, b: Path) -> None:
        order.append("rename")
        rename(a, b)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", renamed)
    ledger.charge({0: [event()]}, "gram", -1)
    assert order[:2] == ["flush", "rename"]
    assert json.loads(path.read_text(encoding="utf-8"))["charges"][0]["clients"] == [0]


def test_what_cannot_be_written_is_not_charged_and_not_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.json"
    ledger = Ledger(BUDGET, path)
    ledger.charge({0: [event()]}, "gram")
    kept = path.read_text(encoding="utf-8")

    def full(fd: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    receipt = Receipt((event(),))
    with pytest.raises(OSError, match="no space"):
        ledger.settle({0: [receipt]}, "mean")
    assert path.read_text(encoding="utf-8") == kept
    assert len(ledger.events(0)) == 1
    assert not receipt.paid


def test_an_interrupted_round_is_charged_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    ledger = Ledger(BUDGET, path)
    ledger.charge({0: [event()], 1: [event()]}, "mean", 4)
    del ledger  # the program dies here, with the charge made and the round not finished
    again = Ledger.open(path, BUDGET)
    assert len(again.events(0)) == 1
    again.charge({0: [event()], 1: [event()]}, "mean", 4)
    assert [one.round for one in again.charges] == [4, 4]
    assert Ledger.open(path).spent(1) == again.spent(1) == pytest.approx(epsilon_of([event()] * 2, 1e-5))


def test_an_existing_ledger_is_not_overwritten_or_taken_for_another(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    Ledger(BUDGET, path).charge({0: [event()]}, "gram")
    with pytest.raises(ValueError, match="open it"):
        Ledger(BUDGET, path)
    with pytest.raises(ValueError, match="is a ledger for delta"):
        Ledger.open(path, PrivacyBudget(1.0, 1e-5, "replace_one", "sample"))
    path.write_text(path.read_text(encoding="utf-8").replace("GaussianEvent", "GaussianEvents"), encoding="utf-8")
    with pytest.raises(ValueError, match="is no ledger"):
        Ledger.open(path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="is no ledger"):
        Ledger.open(path)


def test_two_ledgers_on_one_file_do_not_forget_each_others_charges(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    Ledger(BUDGET, path).charge({0: [event()]}, "signature")
    one, other = Ledger.open(path), Ledger.open(path)
    one.charge({0: [event()]}, "mean", 0)
    with pytest.raises(OSError, match="changed by somebody else"):
        other.charge({0: [event()]}, "mean", 0)
    assert [charge.purpose for charge in other.charges] == ["signature"], "a refused charge charges nobody"
    one.charge({0: [event()]}, "mean", 1)
    again = Ledger.open(path, replace(BUDGET, epsilon=2.0))
    again.charge({0: [event()]}, "mean", 2)
    assert len(Ledger.open(path).events(0)) == 4
    path.unlink()
    with pytest.raises(OSError, match="changed by somebody else"):
        again.charge({0: [event()]}, "mean", 3)


GOOD = '{"format": 1, "epsilon": 1, "delta": 1e-5, "relation": "add_remove", "unit": "sample", "charges": [%s]}'


@pytest.mark.parametrize(
    "text",
    [
        GOOD % '{"round": Infinity, "purpose": "x", "clients": [0], "events": []}',
        GOOD % '{"round": 0, "purpose": "x", "clients": [0], "events": ["x"]}',
        GOOD % "7",
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_damaged_ledger_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"ledger\.json: is no ledger"):
        Ledger.open(path)
    path.write_text(GOOD % "", encoding="utf-8")
    assert Ledger.open(path).clients == ()


@pytest.mark.parametrize("changes", [{"relation": "replace_one"}, {"unit": "client"}])
def test_a_charge_in_another_currency_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be charged"):
        Ledger(BUDGET).charge({0: [event(**changes)]}, "mean")


@pytest.mark.parametrize(
    ("key", "changes"),
    [("epsilon", {"epsilon": 0.0}), ("epsilon", {"epsilon": -1.0}), ("delta", {"delta": 0.0}), ("delta", {"delta": 1.0}),
     ("relation", {"relation": "swap"}), ("unit", {"unit": "household"})],
)  # fmt: skip
def test_impossible_budgets_are_refused(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=key):
        replace(BUDGET, **changes)


class Bookkeeping(RuleBasedStateMachine):
    """Any order of charges, receipts and refusals leaves each client below its budget, and charged for what was released and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(BUDGET)
        self.released: dict[int, list[GaussianEvent]] = {0: [], 1: [], 2: []}
        self.receipts = [Receipt((event(9.0),)), Receipt((event(30.0), event(11.0)))]
        self.shown: set[tuple[int, int]] = set()

    @rule(client=st.integers(0, 2), z=st.sampled_from([5.0, 9.0, 30.0]))
    def fresh(self, client: int, z: float) -> None:
        try:
            self.ledger.charge({client: [event(z)]}, "mean")
        except BudgetExceeded:
            assert epsilon_of([*self.released[client], event(z)], 1e-5) > 1.0
        else:
            self.released[client].append(event(z))

    @rule(client=st.integers(0, 2), which=st.integers(0, 1))
    def show(self, client: int, which: int) -> None:
        try:
            self.ledger.settle({client: [self.receipts[which]]}, "gram")
        except BudgetExceeded:
            assert (client, which) not in self.shown, "showing again is free"
        else:
            if (client, which) not in self.shown:
                self.shown.add((client, which))
                self.released[client] += self.receipts[which].events  # type: ignore[arg-type]

    @invariant()
    def books_balance(self) -> None:
        for client, events in self.released.items():
            assert sorted(one.noise_multiplier for one in self.ledger.events(client)) == sorted(one.noise_multiplier for one in events)  # type: ignore[union-attr]
            assert self.ledger.spent(client) <= 1.0 + 1e-6


Bookkeeping.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestBookkeeping = Bookkeeping.TestCase
