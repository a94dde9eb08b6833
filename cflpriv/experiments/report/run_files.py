"""Read and check run folders for a report. Every error names the file that is missing or damaged."""

import inspect
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.cluster import hierarchy

from ...algorithms import ALGORITHMS
from ...array_files import read_npz, reading
from ...clustering.similarity import MEASURES
from ...console import counted
from ...errors import InputError
from ...protocols.bounded_files import LARGEST_DOCUMENT_BYTES, LARGEST_TABLE_BYTES, parse_json, read_text
from ...streams import readable
from ...types import Array
from ..run.verify import verify
from .audit_words import ACTIVE_STATUS, STATUS
from .pictures import ClusteringEvidence
from .run_names import adversary_words, protection_words

__all__ = [
    "RECOMPUTED", "AboutAudit", "Audited", "RunFiles", "about_audit", "audit_cells", "group_names", "parsed", "read_arrays", "read_audit",
    "read_run", "read_runs", "require",
]  # fmt: skip

RECOMPUTED = "recomputed by the experimenter from the data: the server did not see this"
_INT, _MAYBE = (int,), (int, float, type(None))
NEEDED: dict[str, tuple[type, ...]] = {
    "algorithm": (str,), "protection": (str,), "dataset": (str,), "clients": _INT, "true_groups": _MAYBE, "clusters": _MAYBE, "ari": _MAYBE,
    "rounds": _INT, "rounds_planned": _INT, "rounds_skipped": _INT, "upload_bytes": _INT, "download_bytes": _INT, "seconds": (int, float),
    "accuracy_mean": _MAYBE, "accuracy_std": _MAYBE, "accuracy_worst": _MAYBE, "local_accuracy_mean": _MAYBE, "local_accuracy_std": _MAYBE,
    "epsilon": _MAYBE, "delta": _MAYBE, "notes": (list,),
}  # fmt: skip
"""What the page reads of a summary.json, and its types."""
IF_THERE = (
    "balanced_accuracy", "macro_f1", "majority_accuracy", "majority_balanced_accuracy", "protection_upload_bytes",
    "protection_download_bytes", "epsilon_budget", "error_mean", "error_worst", "r2", "constant_error", "local_r2",
    "root_mean_square_error", "mean_absolute_error",
)  # fmt: skip
"""Numbers, or null, that a summary of an earlier version may lack."""


@dataclass(frozen=True)
class AboutAudit:
    """What an audit states of itself: sentences, the attacks that it ran and left out (None: it does not say), what the run's
    configuration accepts against an attack (words, and changes of keys), and what attacks that leak show."""

    lines: tuple[str, ...] = ()
    attacks_run: tuple[str, ...] = ()
    attacks_left: tuple[str, ...] | None = None
    remedies: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    learns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Audited:
    """What an audit left in a folder. `cells` is None where there was none; `groups` are clients' true groups, where there are any.

    `heading` and `label` name it on the page, and `column` in tables. `about` is what it states of itself.
    """

    folder: Path
    heading: str
    label: str
    column: str
    cells: Sequence[Mapping[str, Any]] | None
    verdicts: Sequence[Mapping[str, str]] = ()
    groups: Mapping[str, int] = field(default_factory=dict)
    group_names: dict[int, str] = field(default_factory=dict)
    about: AboutAudit = AboutAudit()


@dataclass(frozen=True, eq=False)
class RunFiles:
    """One run folder, read. Optional parts are None. `label` is unique in a report.

    `problems` and `unchecked` are what `verify` found.
    """

    folder: Path
    summary: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    measured: Mapping[str, Any] | None
    evidence: ClusteringEvidence | None
    audited: Audited
    config: Mapping[str, Any]
    texts: Mapping[str, str]
    label: str = ""
    problems: tuple[str, ...] = ()
    unchecked: str = ""
    active: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        return readable(self.folder.resolve().name)

    @property
    def group_names(self) -> dict[int, str]:
        """The names of the true groups by number; empty where they are unknown."""
        return self.audited.group_names


def read_runs(folder: Path) -> tuple[list[RunFiles], list[str]]:
    """The runs of a folder, labelled, and the names of run folders that hold no summary (still running, or ended by force)."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    alone = (folder / "summary.json").is_file()
    inside = [folder] if alone else sorted(path for path in folder.iterdir() if (path / "summary.json").is_file())
    if not inside:
        raise InputError(f"{folder}: is no run folder and holds none (no summary.json in it or in the folders right below)")
    runs = [read_run(path) for path in inside]
    names = [_labelled(run.summary, run.config) for run in runs]
    labels = [name if names.count(name) == 1 else f"{name} ({run.name})" for name, run in zip(names, runs, strict=True)]
    unfinished = sorted(path.name for path in folder.iterdir() if (path / "config.toml").is_file() and path not in inside)
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)], unfinished


def _labelled(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The algorithm, the protection and the ε of a run."""
    guarantee = "" if summary["epsilon"] is None else f" · ε = {summary['epsilon']:.3g}"
    return f"{summary['algorithm']} · {protection_words(summary, config)}{guarantee}"


def read_run(folder: Path) -> RunFiles:
    """Read and check a run folder. Raises `InputError` naming the file that is missing or damaged."""
    summary = parsed(folder / "summary.json")
    require(isinstance(summary, dict), folder / "summary.json", "is not an object")
    for key, kinds in NEEDED.items():
        require(key in summary, folder / "summary.json", f"has no {key!r}")
        require(isinstance(summary[key], kinds), folder / "summary.json", f"{key} = {summary[key]!r} is of a wrong type")
    for key in IF_THERE:
        require(isinstance(summary.get(key), _MAYBE), folder / "summary.json", f"{key} = {summary.get(key)!r} is of a wrong type")
    cells, verdicts = read_audit(folder / "audit.json")
    active = _active(folder / "active_audit.json")
    measured = parsed(folder / "measured.json") if (folder / "measured.json").exists() else None
    config = parsed(folder / "config.toml", tomllib.loads)
    evidence, path, names = None, folder / "measured.json", dict[int, str]()
    try:
        names = group_names(measured, config)
        if measured is not None and measured["labels"]:
            known = not summary["true_groups"] or set(measured["labels"]) <= set(measured["truth"])
            require(known, path, "has labels for clients without a true group")
            evidence = _evidence(folder / "evidence.npz", measured, config, names) if (folder / "evidence.npz").exists() else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error})") from None
    texts = {name: _text(folder / name) for name in ("config.toml", "environment.json")}
    rows, checked = _rounds(folder / "rounds.jsonl"), verify(folder)
    protection, label = protection_words(summary, config), f"{summary['algorithm']} ({readable(folder.resolve().name)})"
    truth, about = (measured or {}).get("truth", {}), about_audit(folder / "audit.json")
    audited = Audited(folder, f"Protection: {protection}", label, protection, cells, verdicts, truth, names, about)
    return RunFiles(
        folder, summary, rows, measured, evidence, audited, config, texts, problems=checked.problems, unchecked=checked.unchecked,
        active=active,
    )  # fmt: skip


def group_names(measured: Mapping[str, Any] | None, config: Mapping[str, Any]) -> dict[int, str]:
    """The names of the true groups by number, by what was done to the images; "group 3" where nothing was."""
    numbers = sorted({int(group) for group in ((measured or {}).get("truth") or {}).values()})
    turns = config.get("data", {}).get("rotations") or []
    turned = len(turns) == len(numbers) and all(isinstance(turn, int) for turn in turns)

    def name(number: int) -> str:
        if turned and 0 <= number < len(turns):
            return f"turned by {turns[number]}°" if turns[number] % 360 else "upright"
        return f"group {number}"

    return {number: name(number) for number in numbers}


def read_audit(path: Path) -> tuple[list[Mapping[str, Any]] | None, list[Mapping[str, str]]]:
    """The cells of an audit.json, None if there is no such file, and its verdicts. Raises `InputError` naming the file."""
    if not path.exists():
        return None, []
    audit = parsed(path)
    cells = audit_cells(audit, path)
    for cell in cells:
        _check_cell(cell, path)
    verdicts = audit.get("verdicts", []) if isinstance(audit, dict) else []
    require(isinstance(verdicts, list), path, "verdicts are not a list")
    for verdict in verdicts:
        texts = isinstance(verdict, dict) and all(isinstance(verdict.get(key), str) for key in ("adversary", "sentence", "reduces"))
        require(texts, path, "a verdict has no adversary, sentence and reduces")
    return cells, verdicts


def about_audit(path: Path) -> AboutAudit:
    """What an audit.json states of itself: when and by what software, what was not run, the risks, the samples that stand out.

    Empty for one of an earlier version. Raises `InputError` naming a file that is damaged.
    """
    audit = parsed(path) if path.exists() else {}
    about = audit.get("about") if isinstance(audit, dict) else None
    if not about:
        return AboutAudit()
    try:
        made, missing = about["software"], about["not_run"]["adversaries"]
        learns = {str(attack): str(words) for attack, words in audit.get("learns", {}).items()}
        seeds = f"{len(about['seeds'])} seed{'s' if len(about['seeds']) > 1 else ''}"
        lines = [
            f"Audited on {about['date']} by {made['name']} {made['version']}, budget {about['budget']}, {seeds}. Adversaries: "
            f"{', '.join(_with_extent(about, name) for name in about['adversaries'])}; not tried: "
            f"{', '.join(map(adversary_words, missing)) or 'none'}."
        ]
        lines += [f"{risk.capitalize()}: {words}." for risk, words in audit.get("risk_words", {}).items()]
        for adversary in dict.fromkeys(entry["adversary"] for entry in audit.get("most_exposed", ())):
            first = [f"client {e['client']}, row {e['row']}" for e in audit["most_exposed"] if e["adversary"] == adversary][:FIRST_EXPOSED]
            who = adversary_words(adversary)
            lines.append(f"Training samples that stand out most to {who} (rows from 0; audit.json lists more): {'; '.join(first)}.")
        lines += _remedies_line(audit)
        remedies = {
            str(attack): (str(remedy["words"]), tuple(map(str, remedy["changes"])))
            for attack, remedy in audit.get("remedies_accepted", {}).items()
        }
        attacks = tuple(map(str, about["attacks"])), tuple(map(str, about["not_run"]["attacks"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error})") from None
    return AboutAudit(tuple(map(str, lines)), *attacks, remedies, learns)


def _remedies_line(audit: Mapping[str, Any]) -> list[str]:
    """Whether the remedies of leaks were measured, and how many helped; empty without a leak."""
    measured = audit.get("remedies_measured", [])
    if measured:
        lower = sum(not (entry["refused"] or entry["stayed"]) for entry in measured)
        return [f"Remedies, each measured by another run: {lower} of {counted(len(measured), 'figure')} that leak are lower with theirs."]
    leaks = any(verdict.get("reduces") for verdict in audit.get("verdicts", []))
    return ["What would reduce a leak was not measured: cflpriv audit --measure-remedies does."] if leaks else []


def _with_extent(about: Mapping[str, Any], adversary: str) -> str:
    """An adversary, with the number of attacks that it made where some are left; of an earlier version the name alone."""
    made, left = (len(part.get("by_adversary", {}).get(adversary, ())) for part in (about, about["not_run"]))
    return f"{adversary_words(adversary)} ({made} of {made + left} attacks)" if left else adversary_words(adversary)


FIRST_EXPOSED = 5


def audit_cells(audit: Any, path: Path) -> list[Mapping[str, Any]]:
    """The cells of a parsed audit.json; of 0.1 the file is their list. Raises `InputError` naming the file if it has none."""
    cells = audit.get("cells") if isinstance(audit, dict) else audit
    if not isinstance(cells, list):
        raise InputError(f"{path}: has no list of cells")
    return cells


def _active(path: Path) -> list[Mapping[str, Any]]:
    """What an active audit of the same configuration left, if there was one."""
    if not path.exists():
        return []
    rows = parsed(path)
    require(isinstance(rows, list), path, "is not a list of attacks")
    for row in rows:
        require(isinstance(row, dict), path, "holds something that is no attack")
        for key in ("attack", "status", "claimed", "code", "stage", "metric", "value", "baseline", "guarantee", "note"):
            require(key in row, path, f"an attack has no {key!r}")
        for key in ("value", "baseline"):
            require(isinstance(row[key], float | int | None), path, f"{key} = {row[key]!r} is no number")
        require(row["status"] in ACTIVE_STATUS, path, f"status = {row['status']!r} is not known; known are {', '.join(ACTIVE_STATUS)}")
    return sorted(rows, key=lambda row: (list(ACTIVE_STATUS).index(row["status"]), not row["claimed"]))


def _rounds(path: Path) -> list[Mapping[str, Any]]:
    rows = []
    for number, line in enumerate(_text(path, LARGEST_TABLE_BYTES).splitlines(), 1):
        try:
            row = parse_json(line)
        except ValueError:
            raise InputError(f"{path}: line {number} is damaged") from None
        require(isinstance(row, dict) and isinstance(row.get("round"), int), path, f"line {number} is no round")
        rows.append(row)
    return rows


def _check_cell(cell: Any, path: Path) -> None:
    require(isinstance(cell, dict), path, "holds something that is no cell")
    for key in ("attack", "adversary", "protection", "metric", "value", "low", "high", "baseline", "reference", "status"):
        require(key in cell, path, f"a cell has no {key!r}")
    for key in ("value", "low", "high", "baseline", "reference"):
        require(isinstance(cell[key], float | int | None), path, f"{key} = {cell[key]!r} is no number")
    require(cell["status"] in STATUS, path, f"status = {cell['status']!r} is not known; known are {', '.join(STATUS)}")
    arrays = cell.get("arrays")
    require(arrays is None or (isinstance(arrays, str) and Path(arrays).name == arrays), path, f"arrays = {arrays!r} is no file name")


def _evidence(path: Path, measured: Mapping[str, Any], config: Mapping[str, Any], names: Mapping[int, str]) -> ClusteringEvidence | None:
    arrays, scalars = read_arrays(path), measured["evidence"]
    clients = np.array(scalars["clients"], dtype=np.int64)
    n, distance, tree = len(clients), arrays.get("distance"), arrays.get("tree")
    if n < 2 or (distance is None and tree is None):
        return None
    require(distance is None or distance.shape == (n, n), path, f"'distance' is not {n} × {n}")
    require(tree is None or (tree.shape == (n - 1, 4) and hierarchy.is_valid_linkage(tree)), path, f"'tree' is no tree of {n} clients")
    require(all(np.isfinite(array).all() for array in (distance, tree) if array is not None), path, "holds values that are not finite")
    return ClusteringEvidence(
        clients,
        labels=np.array([measured["labels"][str(client)] for client in clients]),
        groups=np.array([measured["truth"][str(client)] for client in clients]) if measured["truth"] else None,
        distance=distance,
        tree=tree,
        height=scalars.get("height"),
        gap_ratio=scalars.get("gap_ratio"),
        degrees=_angular(config.get("algorithm", {})),
        names=names,
        mark=RECOMPUTED.replace(": ", ":\n") if measured.get("evidence_source") == "recomputed" else "",
    )


def _angular(algorithm: Mapping[str, Any]) -> bool:
    """Whether the algorithm's distances are angles, by its measure (or that measure's default)."""
    spec = ALGORITHMS.find(str(algorithm.get("name")))
    known = inspect.signature(spec.make).parameters if spec else {}
    measure = algorithm.get("measure", known["measure"].default if "measure" in known else None)
    return measure in MEASURES and measure != "chordal"


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an npz file, by name, float64. Raises `InputError` for a file that is not one."""
    arrays = read_npz(path)
    with reading(path, "npz"):
        return {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items()}


def parsed(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    text = _text(path)
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is damaged ({error})") from None


def _text(path: Path, limit: int = LARGEST_DOCUMENT_BYTES) -> str:
    try:
        return read_text(path, limit)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error.strerror if isinstance(error, OSError) else error})") from None


def require(holds: bool, path: Path, complaint: str) -> None:
    """Raises `InputError` naming the file unless the condition holds."""
    if not holds:
        raise InputError(f"{path}: {complaint}")
