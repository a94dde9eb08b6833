"""The evidence of another system is examined before it is attacked: correct audits pass, spoilt ones are named with the reason.

`benchmarks/doubtful_evidence.py` makes the audits, and measures the rates over all of them.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import in_process
from foreign_scenes import SETTINGS, audited, scene
from report_pages import Page, page_of

from benchmarks.doubtful_evidence import BASES, CORRECT, MISUSES, Audit, each, made, minus, of, plus, reasons
from cflpriv.attacks import audit_updates, save_updates
from cflpriv.attacks.foreign.foreign_evidence import doubts_of
from cflpriv.attacks.foreign.foreign_system import system_of
from cflpriv.engine.models import MODELS
from cflpriv.errors import InputError

QUICK = (
    "plain", "linear", "batch normalisation", "tinier rate", "rate below rounding", "one label", "few auxiliary", "private",
    "private, much noise", "momentum", "scaffold, uneven labels", "one sample", "concept shift", "bootstrap", "categories", "coarse",
    "scaffold, trained", "outside, all labels", "outside, categories", "clipped", "adam",
)  # fmt: skip
NAMED = {
    "update as state": "give whole states, no updates", "after is before": "the states before and after are equal",
    "same after": "the same state was returned 6 times", "proportional": "times that of the other",
    "before of another model": "nothing in common with the state before", "before of the next round": "is the mean of the states after",
    "exchanged": "if before and after are exchanged", "exchanged, one client": "are its states before and after exchanged?",
    "data of the next client": "give each client's x and y with its own states", "pixels to 255": "in one scale",
    "standardised": "in one scale", "auxiliary labels shuffled": "labels y do not belong to samples x",
    "outside is x": "outside is the same as x", "outside half members": "of outside are among the clients' samples x",
    "several under one name": "give each client a number of its own", "samples twice": "give each sample once",
    "weighted states": "times the state before", "auxiliary of clients": "give samples that no client trained on",
    "outside of noise": "members are known without the model", "outside of zeros": "of the 30 samples outside repeat others",
    "outside labels shuffled": "outside: labels y do not belong to samples x",
    "outside noisy members": "outside: 180 of 180 samples are nearly",
    "auxiliary of rounded members": "auxiliary: 180 of 180 samples are nearly the same as a client's",
    "samples of noise": "auxiliary samples explain the clients' updates better", "samples dealt anew": "auxiliary samples explain",
    "before of zeros": "all weights of its state before are zero", "after of two clients": "record the state after local training, before",
    "another's update added": "samples of several clients explain its update better", "updates times 1000": "states without a factor",
    "rate in thousandths": "times as long as the declared rate and steps make them", "rate in thousands": "check lr, epochs and batch_size",
    "fewer samples declared": "client 0: samples = 29: its x and y have 30",
    "more labels declared": "labels = 3: its 30 samples, which are all in x and y, have 2",
}  # fmt: skip


@pytest.fixture(scope="module")
def base() -> Audit:
    return made(**BASES["mlp"], seed=1)


@pytest.mark.parametrize("name", QUICK)
def test_correct_audits_are_not_doubtful(name: str) -> None:
    assert not reasons(made(**CORRECT[name], seed=1))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if place % 2 else ()) for place, name in enumerate(NAMED)])
def test_a_misuse_is_named_with_what_to_do(base: Audit, name: str) -> None:
    assert NAMED[name] in "; ".join(reasons(MISUSES[name](base)).values())


AGAIN: dict[str, Callable[[Audit], Audit]] = {
    "a sixth": lambda a: each(a, lambda i, u: replace(u, after=plus(u.before, minus(u.after, u.before), 1 / 6))),
    "ten times": lambda a: each(a, lambda i, u: replace(u, after=plus(u.before, minus(u.after, u.before), 10.0))),
    "another head": lambda a: each(a, lambda i, u: replace(u, after={**u.after, "3.weight": of(a, i + 1).after["3.weight"]})),
    "another scale": lambda a: Audit(
        a.model, each(a, lambda i, u: replace(u, x=16 * u.x, outside=None)).updates, (16 * a.auxiliary[0], a.auxiliary[1]), a.settings
    ),
    "another optimiser": lambda a: replace(a, settings=replace(a.settings, optimizer="adam")),
    "another rate": lambda a: replace(a, settings=replace(a.settings, lr=0.01)),
    "more epochs": lambda a: replace(a, settings=replace(a.settings, epochs=20)),
    "a weighted state": lambda a: each(a, lambda i, u: replace(u, after={k: 1.5 * v for k, v in u.after.items()})),
}
"""Faults that only the training, done again, shows."""


@pytest.mark.parametrize("name", AGAIN)
def test_updates_that_the_declared_training_does_not_give_are_named(base: Audit, name: str) -> None:
    found = reasons(AGAIN[name](base))
    assert "check x, y, their scale and order" in found["training done again"]


OF_SOME = {
    "updates times 10, some clients": ("training done again", "unlike those of most clients"),
    "first layer of another, some clients": ("training done again", "of several clients or rounds"),
    "half never trained, some clients": ("samples without a share", "give each client the samples that it trained on, and no others"),
}


@pytest.mark.parametrize("name", OF_SOME)
def test_a_misuse_by_some_clients_is_named(name: str) -> None:
    check, words = OF_SOME[name]
    whole = made(**BASES["linear, all labels"] if check == "samples without a share" else {**BASES["mlp"], "kind": "cnn"}, seed=4)
    assert not reasons(whole)
    assert words in reasons(MISUSES[name](whole))[check]


def test_labels_that_are_numbered_otherwise_or_missing_are_named(base: Audit) -> None:
    x, y = base.auxiliary
    exchanged = torch.where(y == 0, 1, torch.where(y == 1, 0, y))
    assert "are like clients' samples with label" in reasons(replace(base, auxiliary=(x, exchanged)))["labels of auxiliary samples"]
    few = made(**{**BASES["mlp"], "auxiliary": 900, "count": 10}, seed=1)
    x, y = few.auxiliary
    kept = y == 9
    assert "no sample has the labels" in reasons(replace(few, auxiliary=(x[kept], y[kept])))["labels of clients"]


def test_rounds_in_the_wrong_order_are_named() -> None:
    audit = made(rounds=3, seed=1)
    assert not reasons(audit)
    assert "give the updates of a client in the order of rounds" in reasons(replace(audit, updates=audit.updates[::-1]))["order of rounds"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "after of two clients", "another's update added", "exchanged, one client", "before of the next round",
        "data of two clients exchanged", "before of the client before",
    ],
)  # fmt: skip
def test_more_evidence_does_not_hide_a_misuse(name: str) -> None:
    """What is wrong in the first updates of some clients stays doubtful beside correct updates of others, and of later rounds."""
    whole = made(clients=12, rounds=3, outside=True, seed=1)
    assert not reasons(whole)
    first, later = whole.updates[:12], whole.updates[12:]
    spoilt = MISUSES[name](replace(whole, updates=first[:8]))
    assert reasons(spoilt)
    for more in (first[8:], tuple(update for update in later if update.client is not None and update.client < 8), first[8:] + later):
        assert reasons(replace(spoilt, updates=spoilt.updates + more))


def test_many_states_are_compared() -> None:
    """A state returned that belongs to another client's state is named however many states there are."""
    whole = made(clients=12, rounds=3, own_start=True, seed=1)
    assert not reasons(whole)
    changed = replace(whole.updates[0], before=whole.updates[1].before)
    assert "state before of another training" in reasons(replace(whole, updates=(changed, *whole.updates[1:])))


@pytest.mark.slow
def test_all_correct_audits_and_misuses() -> None:
    """No correct audit is doubtful, and of misuses at most one in twenty is not named."""
    assert {name: why for name, options in CORRECT.items() if (why := reasons(made(**options, seed=2)))} == {}
    audits = {name: made(**options, seed=2) for name, options in BASES.items()}
    missed = [(name, where) for where, audit in audits.items() for name, spoil in MISUSES.items() if not reasons(spoil(audit))]
    assert len(missed) <= 0.05 * len(MISUSES) * len(BASES), missed


def test_a_doubtful_audit_makes_no_attack_and_has_no_figure(base: Audit) -> None:
    spoilt = MISUSES["outside is x"](base)
    cells = audit_updates(spoilt.model, spoilt.updates, spoilt.auxiliary, spoilt.settings)
    assert [cell.attack for cell in cells] == ["label_inference", "membership", "gradient_inversion", "batch_statistics"]
    assert {(cell.status, cell.value) for cell in cells} == {("evidence_doubtful", None)}
    assert cells[0].line() == "label_inference / histogram_l1 (server, of another system): evidence_doubtful"
    assert repr(cells).count("client 0: outside is the same as x") == 1
    page = Page(cells.report().path.read_text(encoding="utf-8"))
    assert page.words.count("client 0: outside is the same as x") == 1


def test_later_samples_of_a_client_are_those_of_its_first_update(tmp_path: Path) -> None:
    _, updates, _ = scene()
    both = [replace(updates[0], client=0), replace(updates[1], client=0)]
    with pytest.raises(InputError, match="client 0: x of a later update is not that of the first; give each client a number of its own"):
        audited(both)
    with pytest.raises(InputError, match="client 0: x of a later update"):
        save_updates(tmp_path / "updates", both, 10, (1, 8, 8), settings=SETTINGS)


def test_without_a_model_states_are_examined() -> None:
    _, updates, _ = scene()
    bare = [replace(one, after={name: value - one.before[name] for name, value in one.after.items()}) for one in updates]
    system = system_of(None, bare, None, SETTINGS, classes=10, shape=(1, 8, 8))
    assert "unrelated states" in doubts_of(system)
    assert not doubts_of(system_of(None, list(updates), None, SETTINGS, classes=10, shape=(1, 8, 8)))


def test_console_file_and_report_say_why(
    base: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = MISUSES["update as state"](base)
    folder = save_updates(
        tmp_path / "updates", spoilt.updates, 10, (1, 8, 8), auxiliary=spoilt.auxiliary, settings=spoilt.settings, module=spoilt.model,
        model="examined",
    )  # fmt: skip
    MODELS["examined"] = (lambda _: spoilt.model, "")
    try:
        assert in_process(monkeypatch, "audit", "--foreign", str(folder)) == 1
    finally:
        MODELS.pop("examined", None)
    shown = capsys.readouterr().out
    assert "The evidence is doubtful, so no attack was made and nothing is concluded: client" in shown
    assert shown.count("no updates (after = before + update)") == 1
    assert "Singling out: not known, because the evidence is doubtful." in shown
    assert "Linkability: not attacked." in shown
    assert "was not seen to learn anything" not in shown
    written = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    assert "no updates (after = before + update)" in written["evidence_doubtful"]["unrelated states"]
    assert {cell["status"] for cell in written["cells"]} == {"evidence_doubtful"}
    page = page_of(folder)
    assert "evidence doubtful" in page.words
    assert "These checks failed" in page.words
    assert "no updates (after = before + update)" in page.words
