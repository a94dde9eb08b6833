"""Claims: the rule gives each verdict on made-up rows, runs resume, and the page says what the runs found. No experiment is run here."""

import csv
import json
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkout import ROOT
from command_line import in_process

from cflpriv import __version__
from cflpriv.attacks.claims import CLAIMS, claim_named, judging
from cflpriv.attacks.claims.claim import Arm, Claim, Row, decide, findings_of
from cflpriv.attacks.claims.judging import judge_claim, listed_claims, verdict_in_words, write_page
from cflpriv.attacks.claims.published import gdp_accountant_is_a_bound
from cflpriv.errors import InputError
from cflpriv.experiments.run.folder import interruptible

NOISE = (-0.002, 0.001, 0.0, 0.002, -0.001)


def rows(arm: str, of: Arm, gain: float, seeds: int = 5, spread: float = 1.0) -> list[Row]:
    """Seeds of an arm whose gain is `gain` on average, for figures and for errors."""
    signed = -gain if of.lower_is_better else gain
    return [Row(arm, seed, 0.5 + signed + spread * NOISE[seed % 5], 0.5) for seed in range(seeds)]


def outcome(claim: Claim, wanted: Mapping[str, bool | None]) -> list[Row]:
    """Rows in which the claim's arms hold, fail or stay open."""
    made = []
    for name, arm in claim.arms.items():
        above = wanted[name] == (arm.holds == "above")
        gain = arm.margin if wanted[name] is None else arm.margin + (0.3 if above else -0.3)
        made += rows(name, arm, gain, max(claim.seeds, 5), 50.0 if wanted[name] is None else 1.0)
    return made


@pytest.mark.parametrize("name", CLAIMS)
def test_the_rule_gives_each_verdict_on_made_up_rows(name: str) -> None:
    claim = claim_named(name)

    def word(made: Sequence[Row]) -> str:
        return decide(claim.arms, made, claim.seeds).word

    assert word(outcome(claim, dict.fromkeys(claim.arms, True))) == "upheld"
    assert word(outcome(claim, dict.fromkeys(claim.arms, False))) == "refuted"
    assert word(outcome(claim, dict.fromkeys(claim.arms, None))) == "undecided"
    assert word([]) == "undecided"
    first, *others = claim.arms
    if others:
        mixed = outcome(claim, {first: True} | dict.fromkeys(others, False))
        assert word(mixed) == "qualified"
        assert word([row for row in mixed if row.arm != first]) == "undecided"  # an arm that was not measured
        assert word(outcome(claim, {first: None} | dict.fromkeys(others, True))) == "undecided"
    unmeasured = [replace(row, value=float("nan")) if row.arm == first else row for row in outcome(claim, dict.fromkeys(claim.arms, True))]
    assert word(unmeasured) == "undecided"  # what could not be measured decides nothing
    if claim.seeds > 1:
        assert word([row for row in outcome(claim, dict.fromkeys(claim.arms, True)) if row.seed == 0]) == "undecided"


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_says_what_it_is(name: str) -> None:
    claim = claim_named(name)
    assert all((claim.statement, claim.source, claim.baseline, claim.assumed, claim.arms))
    assert 1 <= claim.number <= 20
    assert claim.seeds == 1 or claim.seeds >= 3
    assert not any(one.endswith(".") for one in (claim.statement, claim.baseline, claim.assumed))


def test_numbers_of_claims_are_not_used_twice() -> None:
    assert len({claim_named(name).number for name in CLAIMS}) == len(CLAIMS) >= 15


def test_an_arm_holds_fails_or_is_open_by_its_whole_interval() -> None:
    above, below, error = Arm("x", 0.1, "above"), Arm("x", 0.1, "below"), Arm("x", 0.1, "above", lower_is_better=True)
    for arm, gain, holds in ((above, 0.3, True), (above, 0.0, False), (below, 0.3, False), (below, 0.0, True), (error, 0.3, True)):
        assert findings_of({"a": arm}, rows("a", arm, gain))[0].holds is holds
    wide = findings_of({"a": above}, rows("a", above, 0.1, spread=30.0))[0]
    assert wide.low < 0.1 < wide.high
    assert wide.holds is None
    at = Arm("x", 0.5, "above")  # a margin that floats hold exactly
    assert findings_of({"a": at}, [Row("a", seed, 1.0, 0.5) for seed in range(3)])[0].holds is None
    assert findings_of({"a": error}, [Row("a", 0, 0.2, 0.5)])[0].gain == pytest.approx(0.3)


CALLS: list[int] = []


def measured(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    CALLS.append(seed)
    return [Row("one", seed, 0.9 + 0.001 * seed, 0.5), Row("two", seed, 0.5 + 0.001 * seed, 0.5)]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Claim:
    claim = replace(
        claim_named(CLAIMS[0]), seeds=3, measure=measured, arms={"one": Arm("share", 0.1, "above"), "two": Arm("share", 0.1, "above")}
    )
    monkeypatch.setattr(judging, "claim_named", lambda name: claim if name == CLAIMS[0] else claim_named(name))
    CALLS.clear()
    return claim


def test_a_claim_resumes_and_refuses_rows_of_another_rule(tmp_path: Path, tiny: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge_claim(CLAIMS[0], tmp_path, scale=0.4).word == "undecided"  # fewer seeds than its rule asks for
    found = judge_claim(CLAIMS[0], tmp_path)
    assert found.word == "qualified"
    assert CALLS == [0, 1, 2]
    assert judge_claim(CLAIMS[0], tmp_path) == found
    assert CALLS == [0, 1, 2]
    result = json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))
    assert (result["word"], result["first_seed"], len(result["findings"])) == ("qualified", 0, 2)
    kept = (tmp_path / "rows.jsonl").read_bytes()
    (tmp_path / "rows.jsonl").write_bytes(kept + b'{"seed": 3, "ro')  # a kill while the next was written
    assert judge_claim(CLAIMS[0], tmp_path) == found
    (tmp_path / "rows.jsonl").write_bytes(kept.replace(b'"arm"', b'"amr"', 1))
    with pytest.raises(InputError, match=r"rows\.jsonl: line 1 is damaged"):
        judge_claim(CLAIMS[0], tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(kept)
    monkeypatch.setattr(judging, "_rule", lambda name: "another")
    with pytest.raises(InputError, match="was measured before the claim's file changed; choose another folder"):
        judge_claim(CLAIMS[0], tmp_path)


def test_the_page_has_every_verdict_its_repetition_and_its_figures(tmp_path: Path, tiny: Claim) -> None:
    with pytest.raises(InputError, match=r"has no verdict\.json"):
        write_page(tmp_path, tmp_path / "page.md")
    verdict = judge_claim(CLAIMS[0], tmp_path / "a", seed=0)
    judge_claim(CLAIMS[0], tmp_path / "b", seed=10)
    assert write_page(tmp_path, tmp_path / "page.md") == (1, 1)
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| **qualified** | qualified (seeds from 10) |" in page
    assert "| one | share | 0.901 | 0.500 | +0.401 [" in page
    assert len((tmp_path / "page.csv").read_text(encoding="utf-8").splitlines()) == 1 + 2 * 2
    result = json.loads((tmp_path / "b" / "verdict.json").read_text(encoding="utf-8"))
    (tmp_path / "b" / "verdict.json").write_text(json.dumps({**result, "scale": 2.0}), encoding="utf-8")
    with pytest.raises(InputError, match=r"verdict\.json: is of more seeds than the claim fixes .*; run the claim again"):
        write_page(tmp_path, tmp_path / "page.md")
    said = "\n".join(verdict_in_words(CLAIMS[0], verdict))
    assert "verdict: qualified" in said
    assert "the claim asks for a gain above 0.1: fails" in said


def test_a_verdict_names_the_commits_at_which_its_rows_were_measured(tmp_path: Path, tiny: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit() -> str:
        return str(json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))["commit"])

    monkeypatch.setattr(judging, "_commit", lambda: "first")
    judge_claim(CLAIMS[0], tmp_path, scale=0.4)
    monkeypatch.setattr(judging, "_commit", lambda: "second")
    judge_claim(CLAIMS[0], tmp_path, scale=0.4)
    assert commit() == "first", "nothing was measured at the second"
    judge_claim(CLAIMS[0], tmp_path)
    assert commit() == "first, second"


@pytest.fixture
def ctrl_c_works() -> Iterator[None]:
    """Whoever starts the tests in the background of a shell has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_works")
def test_ctrl_c_in_a_run_keeps_finished_seeds_and_nothing_of_the_one_that_was_cut(
    tmp_path: Path, tiny: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
        with interruptible() as interrupted:  # as a run has it
            if seed == 1:
                signal.raise_signal(signal.SIGINT)
            return measured(seed + 100 * interrupted(), data_dir)

    before = signal.getsignal(signal.SIGINT)
    claim = replace(tiny, measure=cut)
    monkeypatch.setattr(judging, "claim_named", lambda name: claim)
    with pytest.raises(KeyboardInterrupt):
        judge_claim(CLAIMS[0], tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    assert [json.loads(line)["seed"] for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()] == [0]
    monkeypatch.setattr(judging, "claim_named", lambda name: tiny)
    assert judge_claim(CLAIMS[0], tmp_path).word == "qualified"
    assert CALLS == [0, 1, 2]


def test_a_commit_is_of_this_checkout_and_tells_what_is_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "judging.py"
    here.touch()
    monkeypatch.setattr(judging, "__file__", str(here))
    assert judging._commit() == __version__, "no checkout"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "another's"], cwd=tmp_path, check=True)
    assert judging._commit() == __version__, "a checkout around an environment"
    subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
    assert judging._commit().endswith("+")
    subprocess.run([*git, "commit", "--quiet", "-m", "ours"], cwd=tmp_path, check=True)
    assert len(judging._commit()) >= 7
    assert not judging._commit().endswith("+")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "another"}, "was measured before the claim's file changed"), ({"claim": "gone"}, "a claim 'gone' that is not known"),
        ({"first_seed": 2}, "share seed 2"), (None, "is damaged"),
    ],
)  # fmt: skip
def test_the_page_refuses_what_it_cannot_vouch_for(tmp_path: Path, tiny: Claim, change: dict[str, object] | None, message: str) -> None:
    judge_claim(CLAIMS[0], tmp_path / "a")
    (tmp_path / "b").mkdir()
    result = json.loads((tmp_path / "a" / "verdict.json").read_text(encoding="utf-8"))
    (tmp_path / "b" / "verdict.json").write_text("{" if change is None else json.dumps(result | change), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        write_page(tmp_path, tmp_path / "page.md")
    assert not (tmp_path / "page.md").exists()


def test_the_published_page_follows_from_its_figures_and_from_the_rules_in_the_files() -> None:
    pages = ROOT / "docs"
    with (pages / "claims.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    page = (pages / "claims.md").read_text(encoding="utf-8")
    assert page.startswith(judging._page({}).partition("| | claim |")[0])
    for name, first in dict.fromkeys((line["claim"], line["first_seed"]) for line in lines):
        claim, own = claim_named(name), [line for line in lines if (line["claim"], line["first_seed"]) == (name, first)]
        assert {line["rule"] for line in own} == {judging._rule(name)}, f"{name}: its file has changed since"
        assert {line["arm"] for line in own} == set(claim.arms)
        outcomes: set[bool | None] = set()
        for line in own:
            arm, low, high = claim.arms[line["arm"]], float(line["low"]), float(line["high"])
            outcomes.add(None if low < arm.margin < high else (low >= arm.margin) == (arm.holds == "above"))
        expected = "qualified" if {True, False} <= outcomes else "undecided"
        expected = "upheld" if outcomes == {True} else "refuted" if outcomes == {False} else expected
        assert {line["verdict"] for line in own} == {expected}
        assert claim.statement in page
        assert claim.assumed in page


def test_an_epsilon_between_the_bounds_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = {1e-4: (1.9, 2.2), 1e-5: (2.1, 2.2)}
    monkeypatch.setattr(gdp_accountant_is_a_bound, "bounds", lambda noise, rate, steps, grid: grids[grid])
    rows = [gdp_accountant_is_a_bound.beside("a", 0, claimed, 1.0, 0.1, 1) for claimed in (1.8, 2.05, 2.15, 2.3)]
    assert [row.baseline for row in rows] == pytest.approx([1.9, 2.1, np.nan, 2.2], nan_ok=True)


def test_the_command(tmp_path: Path, tiny: Claim, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(monkeypatch, "claims") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in listed_claims())
    out = str(tmp_path / "out")
    assert in_process(monkeypatch, "claims", CLAIMS[0], "--out", out, "--page", str(tmp_path / "page.md")) == 0
    assert "verdict: qualified" in capsys.readouterr().out
    assert CALLS == [0, 1, 2]
    for wrong in (
        ["permutation_secrec"], [CLAIMS[0], "--scale", "0"], [CLAIMS[0], "--scale", "1.4"], [CLAIMS[0], "--scale", "inf"],
        [CLAIMS[0], "--scale", "nan"], [CLAIMS[0], "--seed", "-1"],
    ):  # fmt: skip
        assert in_process(monkeypatch, "claims", *wrong, "--out", out) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert CALLS == [0, 1, 2]
