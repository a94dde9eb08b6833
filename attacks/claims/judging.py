"""Run a claim's experiment, seed by seed, and judge it by its rule; and the page of all verdicts.

Every seed's rows are a line of `rows.jsonl` in the claim's folder, so an interrupted run resumes when it is called again. The line names
the claim's rule by its digest: rows that were measured before the rule was changed are refused.
"""

import ast
import csv
import io
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import blake2b
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from ... import __version__
from ...errors import InputError
from ...experiments.run.resume import locked
from ...files import append, write_atomically
from ...generated_pages import generated_page
from ...protocols.bounded_files import LARGEST_TABLE_BYTES, parse_json, read_bytes, read_json, read_text
from . import CLAIMS, claim_named
from .claim import Claim, ClaimVerdict, Row, decide

__all__ = ["verdict_in_words", "judge_claim", "listed_claims", "write_page"]


def listed_claims() -> dict[str, str]:
    """Name -> the statement of each claim and its source."""
    return {name: f"{claim_named(name).statement} ({claim_named(name).source})" for name in CLAIMS}


def judge_claim(
    name: str, folder: str | Path, data_dir: str | Path | None = None, *, scale: float = 1.0, seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> ClaimVerdict:  # fmt: skip
    """Measure what is missing of the claim `name` into `folder`, and write `verdict.json` there.

    The seeds are `seed`, `seed` + 1, ...: as many as the claim asks for times `scale`; with fewer it stays undecided. More are refused: the
    number is fixed in the claim before the run, since seeds that are added until an interval decides raise the rate of errors. Ctrl-C keeps
    the seeds that were finished. Raises `InputError` for an unknown name, a scale outside (0, 1], absent data, or a folder whose rows are
    damaged or were measured under another rule.
    """
    claim, out = claim_named(name), Path(folder)
    if not 0 < scale <= 1:
        raise InputError(f"--scale {scale:g}: is outside (0, 1]; the claim fixes its number of seeds, {claim.seeds}; --seed repeats it")
    if seed < 0:
        raise InputError(f"--seed {seed}: is below 0")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        rows, seconds, commits = _measured(claim, name, out, data_dir, _seeds(claim, seed, scale), report)
        verdict = decide(claim.arms, rows, claim.seeds)
        result = {
            "claim": name, "word": verdict.word, "findings": [asdict(finding) for finding in verdict.findings], "first_seed": seed,
            "scale": scale, "seconds": round(seconds, 1), "commit": ", ".join(commits), "rule": _rule(name),
        }  # fmt: skip
        write_atomically(out / "verdict.json", json.dumps(result, indent=1) + "\n")
    return verdict


def _seeds(claim: Claim, first: int, scale: float) -> range:
    return range(first, first + max(1, round(scale * claim.seeds)))


def _measured(
    claim: Claim, name: str, out: Path, data_dir: str | Path | None, seeds: range, report: Callable[[str], None]
) -> tuple[list[Row], float, list[str]]:
    """The rows of `seeds`, those that are kept and those that are missing; the seconds of processor time that they took; their commits."""
    path, rule = out / "rows.jsonl", _rule(name)
    kept = _kept(path, rule)
    rows: list[Row] = []
    seconds = 0.0
    for number in seeds:
        if number not in kept:
            began = time.process_time()
            with _stopped_at_once():
                measured = claim.measure(number, data_dir)
            kept[number] = {
                "seed": number, "rule": rule, "commit": _commit(), "rows": [asdict(row) for row in measured],
                "seconds": time.process_time() - began,
            }  # fmt: skip
            append(path, json.dumps(kept[number]) + "\n")
        line = kept[number]
        rows += [Row(**row) for row in line["rows"]]
        seconds += line["seconds"]
        shown = "; ".join(f"{row['arm']}: {row['value']:.3g} (baseline {row['baseline']:.3g})" for row in line["rows"])
        report(f"seed {number}: {shown}")
    return rows, seconds, list(dict.fromkeys(kept[number]["commit"] for number in seeds))


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """Ctrl-C ends what is inside at once. A run would end after its round, and its figures would pass for those of the whole run."""
    before = signal.getsignal(signal.SIGINT)

    def stop(signal_number: int, frame: FrameType | None) -> None:
        if before is not signal.SIG_IGN:
            raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, stop)
    except ValueError:  # not the main thread: Ctrl-C does not arrive here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _kept(path: Path, rule: str) -> dict[int, dict[str, Any]]:
    """Seed -> its line. A last line that a kill cut short is removed."""
    data = read_bytes(path, LARGEST_TABLE_BYTES) if path.is_file() else b""
    if data and not data.endswith(b"\n"):
        data = data[: data.rfind(b"\n") + 1]
        write_atomically(path, data)
    kept: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(data.splitlines()):
        try:
            line = parse_json(text)
            [float(row.value + row.baseline) for row in (Row(**row) for row in line["rows"])]
            kept[line["seed"]] = {**line, "seconds": float(line["seconds"]), "commit": str(line["commit"])}
            same = line["rule"] == rule
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path}: line {number + 1} is damaged; remove the file, and the seeds are measured again") from None
        if not same:
            raise InputError(f"{path}: was measured before the claim's file changed; choose another folder with --out")
    return kept


def _rule(name: str) -> str:
    """The digest of a claim's file without its imports, which change where a module moves and the rule stays."""
    source = import_module(f".published.{name}", __package__).__file__
    assert source is not None
    text = read_text(source)
    imports = (node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom))
    moved = {line for node in imports for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    rule = "\n".join(line for number, line in enumerate(text.splitlines(), 1) if number not in moved)
    return blake2b(rule.encode(), digest_size=8).hexdigest()


def _commit() -> str:
    """The commit of the checkout that this file is of, with a "+" where some program in it is not of that commit; elsewhere the version."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=here.parent, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=10
        )
        return str(done.stdout).strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an environment inside somebody else's checkout is not of it
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ":/*.py") else "")
    except (OSError, subprocess.SubprocessError):
        return str(__version__)


def verdict_in_words(name: str, verdict: ClaimVerdict) -> list[str]:
    """A verdict for people: one line an arm, and the word."""
    claim = claim_named(name)
    lines = [f"Claim: {claim.statement} ({claim.source})"]
    for finding in verdict.findings:
        arm = claim.arms[finding.arm]
        outcome = "open" if finding.holds is None else "holds" if finding.holds else "fails"
        bound = f"{arm.holds} {arm.margin:g}"
        lines.append(
            f"  {finding.arm}: {arm.figure} {finding.value:.3f}, baseline {finding.baseline:.3f}, gain {finding.gain:+.3f} "
            f"[{finding.low:+.3f}, {finding.high:+.3f}] over {finding.seeds} seed(s); the claim asks for a gain {bound}: {outcome}"
        )
    return [*lines, f"  Baseline: {claim.baseline}.", f"  Assumed: {claim.assumed}.", f"verdict: {verdict.word}"]


def write_page(folder: str | Path, page: str | Path) -> tuple[int, int]:
    """Write the table of all verdicts under `folder` (one folder a run of a claim) as Markdown, and their figures as .csv beside it.

    Returns how many claims have a verdict, and how many runs repeat one with other seeds. Raises `InputError` if there is none.
    """
    results = [_result(path) for path in sorted(Path(folder).glob("*/verdict.json"))]
    if not results:
        raise InputError(f"{folder}: has no verdict.json of a claim in any folder")
    by_name: dict[str, list[dict[str, Any]]] = {name: [] for name in CLAIMS}
    for result in sorted(results, key=lambda entry: entry["first_seed"]):
        by_name[result["claim"]].append(result)
    for name, verdicts in by_name.items():
        for earlier, other in pairwise(verdicts):
            if other["first_seed"] in _seeds(claim_named(name), earlier["first_seed"], earlier["scale"]):
                shared = f"share seed {other['first_seed']}, so that neither repeats the other"
                raise InputError(f"{folder}: two runs of {name} {shared}; remove the folder of one")
    write_atomically(Path(page), _page(by_name))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ["claim", "verdict", "arm", "value", "baseline", "gain", "low", "high", "seeds", "first_seed", "seconds", "commit", "rule"]
    )
    for name, verdicts in by_name.items():
        for verdict in verdicts:
            for finding in verdict["findings"]:
                numbers = [round(finding[key], 5) for key in ("value", "baseline", "gain", "low", "high")]
                tail = [finding["seeds"], verdict["first_seed"], verdict["seconds"], verdict["commit"], verdict["rule"]]
                writer.writerow([name, verdict["word"], finding["arm"], *numbers, *tail])
    write_atomically(Path(page).with_suffix(".csv"), buffer.getvalue())
    judged = [verdicts for verdicts in by_name.values() if verdicts]
    return len(judged), sum(len(verdicts) - 1 for verdicts in judged)


def _result(path: Path) -> dict[str, Any]:
    """What a run found, if it was under the rule that stands in the claim's file now."""
    try:
        result = read_json(path)
    except ValueError:
        result = None
    if not isinstance(result, dict) or not {"claim", "word", "findings", "first_seed", "scale", "seconds", "commit", "rule"} <= set(result):
        raise InputError(f"{path}: is damaged; remove its folder, and the claim is judged again")
    if result["claim"] not in CLAIMS:
        raise InputError(f"{path}: is of a claim {result['claim']!r} that is not known; remove its folder")
    if result["scale"] > 1:
        raise InputError(f"{path}: is of more seeds than the claim fixes (scale = {result['scale']}); run the claim again")
    if result["rule"] != _rule(result["claim"]):
        raise InputError(f"{path}: was measured before the claim's file changed; remove its folder")
    return result


_INTRODUCTION = """\
    cflpriv claims                       the claims
    cflpriv claims NAME [--scale S] [--seed N]      run the experiment of one; the same command resumes it
    cflpriv claims --page docs/claims.md            write this page from the runs

For readers who want to know whether a published statement holds, and under what it was tried. Each claim is a file in
`attacks/claims/published/` with its statement, its source and its *arms*: the settings in which it is tried, each with a figure and a
margin. A statement **holds** in an arm if the gain over the baseline lies with its whole 95 % interval over seeds on the side of the
margin that it asks for, and **fails** if it lies on the other side; otherwise the arm is open. *Upheld*: it holds in every arm. *Refuted*:
it fails in every arm. *Qualified*: it holds in some and fails in others. *Undecided*: otherwise. Arms and margins were written before the
runs, and a run refuses rows that were measured under another rule. A verdict is of the setting under "assumed", not of every system.
Statements are shortened; those "in our words" are not made by the source itself, only suggested by its design. The number of seeds is
fixed with the rule (`--scale` is at most 1).

The figures of all runs are in `claims.csv`.
"""


def _page(by_name: dict[str, list[dict[str, Any]]]) -> str:
    lines = [_INTRODUCTION, "| | claim | source | verdict | repeated |", "|---|---|---|---|---|"]
    for name, verdicts in by_name.items():
        if verdicts:
            claim = claim_named(name)
            again = ", ".join(f"{verdict['word']} (seeds from {verdict['first_seed']})" for verdict in verdicts[1:]) or "–"
            lines.append(f"| {claim.number} | [{claim.statement}](#{name}) | {claim.source} | **{verdicts[0]['word']}** | {again} |")
    for name, verdicts in by_name.items():
        if verdicts:
            lines += _section(name, verdicts)
    missing = [name for name, verdicts in by_name.items() if not verdicts]
    lines += ["", "## Not decided here", "", _ABSENT + (f" Not run: {', '.join(missing)}." if missing else "")]
    return generated_page("Published claims, put to the test", "cflpriv claims --page docs/claims.md", "\n".join(lines) + "\n")


_ABSENT = (
    "Of the statements on our list of twenty these have no experiment: property inference is stronger on clustered models (Kim et al., "
    "RAID 2023), and a gain of 2.9 points at ε = 2 and 8 (PINA, arXiv 2604.20596)."
)


_NULL = "a first attack's AUC was .475 where nothing shows, so it was corrected and run again"
REMARKS = {
    "signatures_are_safe": (
        "its sentence is that data cannot be reconstructed from 2 to 5 of some 500 vectors; what comes out here are label sets and mean "
        "images, no sample"
    ),
    "clustering_beats_averaging": "20.2 points are Fashion-MNIST's; the interval of the first arm, which holds by its margin, is below 20",
    "only_identities_are_revealed": "in our words, of its Algorithm 2; the paper states nothing on privacy",
    "anchor_gradients_are_safe": "no sample was reconstructed: whoever counts numbers of labels as the distribution finds nothing refuted",
    "clustering_raises_membership": _NULL,
    "sums_do_not_stop_membership": (
        f"its abstract is of the membership of an update in one round, not of a sample in a final model; {_NULL}"
    ),
    "sums_tell_one_nth": f"arXiv 2208.02304; its abstract has an upper bound on mutual information, for FedSGD; {_NULL}",
    "changing_cohorts_undo_sums": "arXiv 2106.06089; its attacker also finds out who took part; fixed cohorts are our control",
    "mixture_finds_groups": "its authors' program has ε from 3 to 15, and 8,000 samples a client if not set otherwise",
    "gdp_accountant_is_a_bound": (
        "a first run let the arm of 5,000 steps hold, beside a bound that is .25 below the other one; it was run again with closer bounds"
    ),
}  # fmt: skip
"""What was found out of a source, or corrected in a measurement, after its claim had been measured. Arms and margins did not change."""


def _section(name: str, verdicts: Sequence[dict[str, Any]]) -> list[str]:
    claim = claim_named(name)
    lines = [
        "", f"## {name}", "", f"*{claim.statement}* ({claim.source}). **{verdicts[0]['word'].capitalize()}.**", "",
        *([f"- Note: {REMARKS[name]}."] if name in REMARKS else []), f"- Baseline: {claim.baseline}.", f"- Assumed: {claim.assumed}.", "",
        "| arm | figure | value | baseline | gain [95 %] | the claim asks for | outcome | seeds | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for verdict in verdicts:
        for finding in verdict["findings"]:
            arm = claim.arms[finding["arm"]]
            outcome = "open" if finding["holds"] is None else "holds" if finding["holds"] else "fails"
            span = f"{finding['gain']:+.3f} [{finding['low']:+.3f}, {finding['high']:+.3f}]"
            seeds = f"{verdict['first_seed']} to {verdict['first_seed'] + finding['seeds'] - 1}"
            lines.append(
                f"| {finding['arm']} | {arm.figure} | {finding['value']:.3f} | {finding['baseline']:.3f} | {span} | "
                f"{arm.holds} {arm.margin:g} | {outcome} | {seeds} | {verdict['commit']} |"
            )
    return lines
