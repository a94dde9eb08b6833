"""Random sequences of requests by a server that lies: clients answer what a model of them allows, and without any one rule they do not."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from request_sequences import Breach, isolating, play

from cflpriv.federation import client_contract, registry, release_policy, work
from cflpriv.federation.client_contract import ClientContract, Counts
from cflpriv.federation.protections import ClientParts
from cflpriv.protocols.errors import RemoteError
from cflpriv.protocols.secagg import SumRecord
from cflpriv.protocols.secagg import client as secagg_client
from cflpriv.protocols.secagg.policy import check_proposal

MOST = 10_000
LONG = int(os.environ.get("CFLPRIV_SEQUENCES", "100000"))
CHUNKS = 20
Off = Callable[[pytest.MonkeyPatch], None]


def accepting(*codes: str) -> Off:
    """Clients accept terms that they would refuse by these codes."""

    def lenient(*arguments: Any) -> None:
        try:
            check_proposal(*arguments)
        except RemoteError as error:
            if error.code not in codes:
                raise

    return lambda patch: patch.setattr(secagg_client, "check_proposal", lenient)


def several(*offs: Off) -> Off:
    def off(patch: pytest.MonkeyPatch) -> None:
        for each in offs:
            each(patch)

    return off


def constant(owner: Any, name: str, value: Any = None) -> Off:
    """A check that always gives `value`."""
    return lambda patch: patch.setattr(owner, name, lambda *arguments, **named: value)


summed_often = several(*(constant(SumRecord, name) for name in ("check_proposed", "check_survivors", "enter")))
RULES: dict[str, tuple[Off, str]] = {
    "1 tasks": (constant(client_contract, "same_task", True), "not declared|answered twice"),
    "2 rounds": (constant(Counts, "allows", True), "has passed, or is beyond"),
    "2 counts": (constant(client_contract, "is_full", False), "answered twice"),
    "3 one sum": (summed_often, "two sums|combination"),
    "4 weights": (accepting("too-unequal", "bad-terms"), "effective number|two sums"),
    "5 names": (lambda patch: patch.setattr(work, "chosen_name", lambda digest, offered: digest), "combination"),
    "6 operations": (
        several(constant(ClientContract, "check_leaving"), constant(release_policy, "check")), "leaves by gather|leaves by a sum",
    ),
    "6 scores": (constant(ClientContract, "_check_shown"), "without allow_scores"),
    "7 sessions of a contract": (constant(Counts, "may_be_of", True), "second session"),
    "7 the record of sums": (lambda patch: patch.setattr(registry, "SUMMED", "nothing"), "two sums|combination"),
    "8 answers": (lambda patch: patch.setattr(ClientParts, "alike", False), "neighbouring data"),
    "9 limits": (constant(work, "check_task", True), "beyond the client's limits"),
}  # fmt: skip
"""By rule of docs/guarantees.md: clients without it, and the breach that follows. Rule 10 (code of folders) is in `tests/test_trust.py`."""


def found(most: int) -> tuple[int, str]:
    """The first sequence with a breach and what it is; ("most", "") without one."""
    for seed in range(most):
        try:
            play(seed)
        except Breach as breach:
            return seed, str(breach)
    return most, ""


def test_the_model_sees_what_a_combination_of_sums_shows() -> None:
    columns = [(client, 0) for client in range(5)]
    whole, rest = dict.fromkeys(columns, 1.0), dict.fromkeys(columns[1:], 1.0)
    assert isolating([whole]) == ()
    assert isolating([whole, rest]) == (0,)
    assert isolating([whole, {**whole, (2, 0): 2.0}]) == (2,)
    assert isolating([whole, dict.fromkeys(columns[:3], 1.0)]) == (3, 4)
    assert isolating([whole, {(client, 1): 1.0 for client in range(1, 5)}]) == ()


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed >= 100 else ()) for seed in range(0, 300, 50)])
def test_clients_answer_no_sequence_that_shows_fewer_than_a_cohort(seed: int) -> None:
    for each in range(seed, seed + 50):
        play(each)


LONG_SOUGHT = ("4 weights", "5 names")


@pytest.mark.parametrize("rule", [pytest.param(rule, marks=pytest.mark.slow if rule in LONG_SOUGHT else ()) for rule in RULES])
def test_without_the_rule_a_sequence_shows_the_hole(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    off, expected = RULES[rule]
    off(monkeypatch)
    seed, breach = found(MOST)
    print(f"\nwithout rule {rule}: sequence {seed}: {breach}")
    assert any(part in breach for part in expected.split("|")), breach


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_long_run_of_sequences_finds_a_hole(chunk: int) -> None:
    for seed in range(10**6 + chunk, 10**6 + LONG, CHUNKS):
        play(seed)
