"""From run folders to one page: report.html, self-contained, and results.csv.

`read_run` checks a folder's files once and names what is wrong with them; the functions below it turn runs into what the template prints.
All words and the order of sections are in report.html beside this file; pictures are drawn in `pictures`.
"""

import csv
import inspect
import io
import json
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from scipy.cluster import hierarchy

from ..algorithms import ALGORITHMS
from ..clustering.similarity import MEASURES
from ..contract.protection import ROBUST, listed
from ..errors import InputError
from ..types import Array
from . import pictures
from .audit_report import ACTIVE_STATUS, STATUS, attack_matrix, label_histograms, metric_words
from .checkpoint import write_atomically
from .front import section, write_tables
from .privacy_report import privacy_section
from .sweep import Sweep, sweep_of
from .verify import verify

__all__ = ["Run", "read_run", "write_report"]

DETAILED = 8
"""So many runs get pictures of their clustering and of what was recovered; the rest are named, so that a sweep's page stays small."""
SHOWN_CLIENTS = 8
SHOWN_CLUSTERS = 30
RECOMPUTED = "recomputed by the experimenter's eye from the data: the server did not see this"

_INT, _MAYBE = (int,), (int, float, type(None))
NEEDED: dict[str, tuple[type, ...]] = {
    "algorithm": (str,), "protection": (str,), "dataset": (str,), "clients": _INT, "true_groups": _INT, "clusters": _MAYBE, "ari": _MAYBE,
    "rounds": _INT, "rounds_planned": _INT, "rounds_skipped": _INT, "upload_bytes": _INT, "download_bytes": _INT, "seconds": (int, float),
    "accuracy_mean": _MAYBE, "accuracy_std": _MAYBE, "accuracy_worst": _MAYBE, "local_accuracy_mean": _MAYBE, "local_accuracy_std": _MAYBE,
    "epsilon": _MAYBE, "delta": _MAYBE, "notes": (list,),
}  # fmt: skip
"""What the page reads of a summary.json, and its types."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder, read. What a run need not have is None. `label` tells it from the others of a report."""

    folder: Path
    summary: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    measured: Mapping[str, Any] | None
    evidence: pictures.Evidence | None
    audit: Sequence[Mapping[str, Any]] | None
    config: Mapping[str, Any]
    texts: Mapping[str, str]
    label: str = ""
    problems: tuple[str, ...] = ()
    active: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def write_report(folder: Path) -> Path:
    """Write report.html and results.csv into `folder`, a run folder or a folder of run folders; the page's path.

    Raises `InputError` naming the file, for a folder that is neither and for a file that is damaged.
    """
    import jinja2

    folder = Path(folder)
    sweep = sweep_of(folder)
    runs, unfinished = _read_runs(folder)
    everything = runs
    if sweep is not None:  # one seed stands for the others below the sweep's own tables
        first_seed = {cell.name for cell in sweep.cells if cell.seed == sweep.cells[0].seed}
        runs = [run for run in runs if run.name in first_seed] or runs
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = lambda value: "–" if value is None else f"{100 * value:.1f}"
    environment.filters |= {"figure": _figure, "metric": metric_words, "megabytes": lambda size: f"{size / 1e6:.2f}"}
    detailed = runs[:DETAILED]
    page = environment.from_string(template).render(
        title=folder.resolve().name,
        sweep=None if sweep is None else Markup(_sweep_section(environment, folder, sweep)),
        runs=runs,
        unfinished=unfinished,
        unverified=[
            (run.label, [problem.removeprefix(f"{run.folder}/") for problem in run.problems]) for run in everything if run.problems
        ],
        unpoliced=[run.label for run in everything if run.summary.get("release_policy") == "off"],
        undetailed=runs[DETAILED:],
        leakage=_leakage(runs),
        actives=[run for run in runs if run.active],
        active_words=ACTIVE_STATUS,
        recovered=[shown for run in detailed for shown in _recovered(run)],
        histograms=[shown for run in detailed for shown in _histograms(run)],
        rocs=[shown for run in detailed for shown in _rocs(run)],
        clusterings=[shown for run in detailed if (shown := _clustering(run)) is not None],
        accuracy=_accuracy(runs),
        privacy=privacy_section([(run.label, run.folder, run.summary, run.rounds) for run in detailed]),
        reveals=_reveals(runs),
        notes=_notes(runs),
        lost=_lost(runs),
        status=STATUS,
        recomputed=RECOMPUTED,
    )
    try:
        write_atomically(folder / "results.csv", _csv(everything))
        write_atomically(folder / "report.html", page)
    except OSError as error:
        raise InputError(f"{folder}: the report cannot be written ({error.strerror})") from None
    return folder / "report.html"


def _sweep_section(environment: Any, folder: Path, sweep: Sweep) -> str:
    """The sweep's section of the page; its tables are written beside it."""
    write_tables(folder, sweep)
    template = Path(__file__).with_name("sweep.html").read_text(encoding="utf-8")
    text: str = environment.from_string(template).render(section(folder, sweep))
    return text


def _lost(runs: Sequence[Run]) -> dict[str, float]:
    """By label, for runs under a protection that stand beside the same run without one: its accuracy less that one's.

    A run that ended early is compared with none of another length.
    """

    def rest(run: Run) -> Any:
        return {name: section for name, section in run.config.items() if name not in ("protection", "run")} | {
            "seed": run.config.get("run", {}).get("seed"), "rounds run": run.summary["rounds"],
        }  # fmt: skip

    plain = [run for run in runs if run.summary["protection"] == "none" and run.summary["accuracy_mean"] is not None]
    lost = {}
    for run in runs:
        twin = next((one for one in plain if rest(one) == rest(run)), None)
        if twin is not None and twin is not run and run.summary["accuracy_mean"] is not None:
            lost[run.label] = run.summary["accuracy_mean"] - twin.summary["accuracy_mean"]
    return lost


# --- reading ------------------------------------------------------------------------------------------------------------------------


def _read_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """The runs of a folder, labelled, and the names of run folders that hold no summary (still running, or ended by force)."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    alone = (folder / "summary.json").is_file()
    inside = [folder] if alone else sorted(path for path in folder.iterdir() if (path / "summary.json").is_file())
    if not inside:
        raise InputError(f"{folder}: is no run folder and holds none (no summary.json in it or in the folders right below)")
    runs = [read_run(path) for path in inside]
    names = [f"{run.summary['algorithm']} · {run.summary['protection']}" for run in runs]
    labels = [name if names.count(name) == 1 else f"{name} ({run.name})" for name, run in zip(names, runs, strict=True)]
    unfinished = sorted(path.name for path in folder.iterdir() if (path / "config.toml").is_file() and path not in inside)
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)], unfinished


def read_run(folder: Path) -> Run:
    """Read and check a run folder. Raises `InputError` naming the file that is missing or damaged."""
    summary = _parsed(folder / "summary.json")
    _require(isinstance(summary, dict), folder / "summary.json", "is not an object")
    for key, kinds in NEEDED.items():
        _require(key in summary, folder / "summary.json", f"has no {key!r}")
        _require(isinstance(summary[key], kinds), folder / "summary.json", f"{key} = {summary[key]!r} is of a wrong type")
    audit = _parsed(folder / "audit.json") if (folder / "audit.json").exists() else None
    for cell in audit if isinstance(audit, list) else []:
        _check_cell(cell, folder / "audit.json")
    _require(audit is None or isinstance(audit, list), folder / "audit.json", "is not a list of cells")
    active = _active(folder / "active_audit.json")
    measured = _parsed(folder / "measured.json") if (folder / "measured.json").exists() else None
    config = _parsed(folder / "config.toml", tomllib.loads)
    evidence, path = None, folder / "measured.json"
    try:
        if measured is not None and measured["labels"]:
            _require(set(measured["labels"]) <= set(measured["truth"]), path, "has labels for clients without a true group")
            evidence = _evidence(folder / "evidence.npz", measured, config) if (folder / "evidence.npz").exists() else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error})") from None
    texts = {name: _text(folder / name) for name in ("config.toml", "environment.json")}
    rows, problems = _rounds(folder / "rounds.jsonl"), verify(folder, payloads=False).problems
    return Run(folder, summary, rows, measured, evidence, audit, config, texts, problems=problems, active=active)


def _active(path: Path) -> list[Mapping[str, Any]]:
    """What an active audit of the same configuration left, if there was one."""
    if not path.exists():
        return []
    rows = _parsed(path)
    _require(isinstance(rows, list), path, "is not a list of attacks")
    for row in rows:
        _require(isinstance(row, dict), path, "holds something that is no attack")
        for key in ("attack", "status", "claimed", "code", "stage", "metric", "value", "baseline", "guarantee", "note"):
            _require(key in row, path, f"an attack has no {key!r}")
        for key in ("value", "baseline"):
            _require(isinstance(row[key], float | int | None), path, f"{key} = {row[key]!r} is no number")
        _require(row["status"] in ACTIVE_STATUS, path, f"status = {row['status']!r} is not known; known are {', '.join(ACTIVE_STATUS)}")
    return sorted(rows, key=lambda row: (list(ACTIVE_STATUS).index(row["status"]), not row["claimed"]))


def _rounds(path: Path) -> list[Mapping[str, Any]]:
    rows = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            raise InputError(f"{path}: line {number} is damaged") from None
        _require(isinstance(row, dict) and isinstance(row.get("round"), int), path, f"line {number} is no round")
        rows.append(row)
    return rows


def _check_cell(cell: Any, path: Path) -> None:
    _require(isinstance(cell, dict), path, "holds something that is no cell")
    for key in ("attack", "adversary", "protection", "metric", "value", "low", "high", "baseline", "reference", "status"):
        _require(key in cell, path, f"a cell has no {key!r}")
    for key in ("value", "low", "high", "baseline", "reference"):
        _require(isinstance(cell[key], float | int | None), path, f"{key} = {cell[key]!r} is no number")
    _require(cell["status"] in STATUS, path, f"status = {cell['status']!r} is not known; known are {', '.join(STATUS)}")
    arrays = cell.get("arrays")
    _require(arrays is None or (isinstance(arrays, str) and Path(arrays).name == arrays), path, f"arrays = {arrays!r} is no file name")


def _evidence(path: Path, measured: Mapping[str, Any], config: Mapping[str, Any]) -> pictures.Evidence | None:
    arrays, scalars = _arrays(path), measured["evidence"]
    clients = np.array(scalars["clients"], dtype=np.int64)
    n, distance, tree = len(clients), arrays.get("distance"), arrays.get("tree")
    if n < 2 or (distance is None and tree is None):
        return None
    _require(distance is None or distance.shape == (n, n), path, f"'distance' is not {n} × {n}")
    _require(tree is None or (tree.shape == (n - 1, 4) and hierarchy.is_valid_linkage(tree)), path, f"'tree' is no tree of {n} clients")
    _require(all(np.isfinite(array).all() for array in (distance, tree) if array is not None), path, "holds values that are not finite")
    return pictures.Evidence(
        clients,
        labels=np.array([measured["labels"][str(client)] for client in clients]),
        groups=np.array([measured["truth"][str(client)] for client in clients]),
        distance=distance,
        tree=tree,
        height=scalars.get("height"),
        gap_ratio=scalars.get("gap_ratio"),
        degrees=_angular(config.get("algorithm", {})),
        mark=RECOMPUTED.replace(": ", ":\n") if measured.get("evidence_source") == "recomputed" else "",
    )


def _angular(algorithm: Mapping[str, Any]) -> bool:
    """Whether the algorithm's distances are angles, by its measure (or that measure's default)."""
    spec = ALGORITHMS.find(str(algorithm.get("name")))
    known = inspect.signature(spec.make).parameters if spec else {}
    measure = algorithm.get("measure", known["measure"].default if "measure" in known else None)
    return measure in MEASURES and measure != "chordal"


def _arrays(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: np.asarray(file[name], dtype=np.float64) for name in file.files}
    except (OSError, ValueError, TypeError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path}: cannot be read as arrays ({error})") from None


def _parsed(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    text = _text(path)
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(f"{path}: is damaged ({error})") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error.strerror if isinstance(error, OSError) else error})") from None


def _require(holds: bool, path: Path, complaint: str) -> None:
    if not holds:
        raise InputError(f"{path}: {complaint}")


# --- what the template prints ---------------------------------------------------------------------------------------------------------


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _csv(runs: Sequence[Run]) -> str:
    """A row per run: its name and every scalar of its summary."""
    plain = (str, int, float, type(None))
    scalars = [{"run": run.name, **{key: value for key, value in run.summary.items() if isinstance(value, plain)}} for run in runs]
    columns = list(dict.fromkeys(key for row in scalars for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(scalars)
    return text.getvalue()


def _leakage(runs: Sequence[Run]) -> dict[str, Any]:
    """Columns (run, protection), rows (attack, metric, adversary, clients known) -> cells, and the numbered notes below the table."""
    columns: dict[tuple[int, str], dict[str, str]] = {}
    rows: dict[tuple[str, str, str, int], dict[tuple[int, str], list[dict[str, Any]]]] = {}
    notes: dict[str, int] = {}
    for i, run in enumerate(runs):
        for cell in run.audit or ():
            column = (i, str(cell["protection"]))
            columns[column] = {"protection": column[1], "run": f"{run.summary['algorithm']} ({run.name})"}
            row = (str(cell["attack"]), str(cell["metric"]), str(cell["adversary"]), cell.get("k_known") or 0)
            note = str(cell.get("note") or "")
            number = notes.setdefault(note, len(notes) + 1) if note else None
            rows.setdefault(row, {}).setdefault(column, []).append({**cell, "number": number, "seeds": len(cell.get("seeds") or ())})
    lower = {row: any(cell.get("lower_is_better") for several in cells.values() for cell in several) for row, cells in rows.items()}
    lines = [{"row": row, "lower": lower[row], "cells": [cells.get(column, []) for column in columns]} for row, cells in rows.items()]
    audited = [(str(run.audit[0]["protection"]), f"{run.summary['algorithm']} ({run.name})", run.audit) for run in runs if run.audit]
    missing = [run for run in runs if run.audit is None]
    table = {"columns": list(columns.values()), "lines": lines, "notes": list(notes), "missing": missing}
    return table | {"matrix": attack_matrix(audited)}


def _recovered(run: Run) -> list[dict[str, Any]]:
    """For each file of arrays that an audit left: its pictures, and the figures of the cells that name it."""
    shown = []
    for file in dict.fromkeys(cell["arrays"] for cell in run.audit or () if cell.get("arrays")):
        path, cells = run.folder / "audit" / file, [cell for cell in run.audit or () if cell.get("arrays") == file]
        arrays = _arrays(path)
        if _labels_only(arrays) or _is_roc(arrays):
            continue  # see _histograms, _rocs
        for key in ("clients", "truth", "recovered", "baseline"):
            _require(key in arrays, path, f"has no {key!r}")
        clients, truth = arrays["clients"].astype(np.int64), arrays["truth"]
        fits = truth.ndim == 4 and truth.shape[:1] == clients.shape
        fits = fits and arrays["recovered"].shape == truth.shape and arrays["baseline"].shape == truth.shape[1:]
        _require(fits, path, "shapes do not fit: 'truth' and 'recovered' (m, C, H, W), 'baseline' (C, H, W), 'clients' (m,)")
        if len(clients) == 0:
            continue
        groups = np.array([(run.measured or {}).get("truth", {}).get(str(client), 0) for client in clients])
        order = np.argsort(groups, kind="stable")  # a few clients of every group
        few = order[np.unique(np.linspace(0, len(clients) - 1, SHOWN_CLIENTS).round().astype(np.int64))]
        titles = [f"client {clients[i]}\ngroup {groups[i]}" for i in few]
        histograms: tuple[Array, ...] = ()
        if "label_truth" in arrays and "label_guess" in arrays:
            real, guess = arrays["label_truth"], arrays["label_guess"]
            fits = real.ndim == 2 and real.shape == guess.shape and len(real) == len(clients)
            _require(fits, path, "'label_truth' and 'label_guess' are not both (m, classes)")
            histograms = real[few], guess[few]
        strip = pictures.recovered_images(truth[few], arrays["recovered"][few], arrays["baseline"], titles, *histograms)
        shown.append({"run": run, "cells": cells, "strip": strip, "labels": bool(histograms), "shown": len(few), "clients": len(clients)})
    return shown


def _labels_only(arrays: Mapping[str, Array]) -> bool:
    """Whether an audit's arrays are inferred labels without images."""
    return "label_truth" in arrays and not {"truth", "recovered", "baseline"} & set(arrays)


def _is_roc(arrays: Mapping[str, Array]) -> bool:
    """Whether an audit's arrays are ROC curves of membership inference."""
    return bool(arrays) and all(name.startswith("roc_") for name in arrays)


def _rocs(run: Run) -> list[dict[str, Any]]:
    """For each file of ROC curves that an audit left: a picture for each kind of model attacked, and the cells that name it."""
    shown = []
    for file in dict.fromkeys(cell["arrays"] for cell in run.audit or () if cell.get("arrays")):
        path, cells = run.folder / "audit" / file, [cell for cell in run.audit or () if cell.get("arrays") == file]
        arrays = _arrays(path)
        for what in ("model", "own_model", "update") if _is_roc(arrays) else ():
            curves = {name[5 + len(what) :].replace("_", " "): curve for name, curve in arrays.items() if name.startswith(f"roc_{what}_")}
            if not curves:
                continue
            others = curves.pop("others", np.array(0.0))
            fits = others.shape == () and int(others) >= 1 and all(curve.ndim == 2 and len(curve) == 2 for curve in curves.values())
            _require(fits, path, f"'roc_{what}_…' are not all (2, t), with the number of non-members beside them")
            mine = [cell for cell in cells if str(cell["metric"]).startswith(f"{what}_")]
            names = {"lira": "LiRA", "rmia": "RMIA", "loss": "loss threshold", "gradients": "gradients' regression"}
            names |= {f"{name} unprotected": f"{words}, unprotected run" for name, words in names.items()}
            picture = pictures.roc_curves({names.get(name, name): curve for name, curve in curves.items()}, int(others))
            shown.append({"run": run, "cells": mine, "picture": picture, "what": what.replace("_", " ")})
    return shown


def _histograms(run: Run) -> list[dict[str, Any]]:
    """For each file of inferred labels that an audit left: true and inferred shares of a few clients, and the cells that name it."""
    shown = []
    for file in dict.fromkeys(cell["arrays"] for cell in run.audit or () if cell.get("arrays")):
        path, cells = run.folder / "audit" / file, [cell for cell in run.audit or () if cell.get("arrays") == file]
        arrays = _arrays(path)
        if not _labels_only(arrays):
            continue
        _require("clients" in arrays and "label_guess" in arrays, path, "has no 'clients' or no 'label_guess'")
        clients, real, guess = arrays["clients"].astype(np.int64), arrays["label_truth"], arrays["label_guess"]
        fits = real.ndim == 2 and real.shape == guess.shape and len(real) == len(clients)
        _require(fits, path, "'label_truth' and 'label_guess' are not both (m, classes)")
        groups = np.array([(run.measured or {}).get("truth", {}).get(str(client), 0) for client in clients])
        few = np.argsort(groups, kind="stable")[np.unique(np.linspace(0, len(clients) - 1, SHOWN_CLIENTS).round().astype(np.int64))]
        titles = [f"client {clients[i]}\ngroup {groups[i]}" for i in few]
        strip = label_histograms(real[few], guess[few], titles)
        shown.append({"run": run, "cells": cells, "strip": strip, "shown": len(few), "clients": len(clients)})
    return shown


def _clustering(run: Run) -> dict[str, Any] | None:
    """Pictures of the clustering, and the table of clusters against true groups; None for a run that found no clusters."""
    measured, evidence = run.measured, run.evidence
    if measured is None or not measured.get("labels"):
        return None
    scalars = measured.get("evidence") or {}
    labels = np.array([measured["labels"][client] for client in measured["labels"]])
    groups = np.array([measured["truth"][client] for client in measured["labels"]])
    curves = [{int(k): float(value) for k, value in (scalars.get(name) or {}).items()} for name in ("silhouettes", "gap_ratios")]
    k = len(np.unique(evidence.labels if evidence else labels))
    return {
        "run": run,
        "rule": measured.get("rule"),
        "is_clear": measured.get("clear"),
        "note": scalars.get("note"),
        "gap_ratio": scalars.get("gap_ratio"),
        "recomputed": measured.get("evidence_source") == "recomputed",
        "heatmap": pictures.heatmap(evidence) if evidence and evidence.distance is not None else None,
        "dendrogram": pictures.dendrogram(evidence) if evidence and evidence.tree is not None else None,
        "curves": pictures.by_clusters(curves[0], curves[1], k) if any(curves) else None,
        "n": len(labels),
        "k": k,
        "true": len(np.unique(groups)),
        "table": _contingency(labels, groups),
    }


def _contingency(labels: Array, groups: Array) -> dict[str, Any]:
    """Clients per cluster and true group, the largest SHOWN_CLUSTERS of either; `share` of the cluster's size colours a cell."""
    found, columns = _largest(labels), _largest(groups)
    rows = []
    for label in found:
        inside, size = groups[labels == label], int((labels == label).sum())
        counts = [int((inside == group).sum()) for group in columns]
        rows.append({"label": int(label), "cells": [{"count": count, "share": count / size} for count in counts], "size": size})
    left_out = len(np.unique(labels)) - len(found), len(np.unique(groups)) - len(columns)
    return {"groups": columns.tolist(), "rows": rows, "left_out": left_out}


def _largest(values: Array) -> Array:
    names, sizes = np.unique(values, return_counts=True)
    return np.asarray(names[np.sort(np.argsort(-sizes, kind="stable")[:SHOWN_CLUSTERS])])


def _accuracy(runs: Sequence[Run]) -> dict[str, str | None]:
    series = [_series(run) for run in runs]
    per_round = [one for one in series if len(one.rounds)]
    per_client = [one for one in series if len(one.client_served)]
    return {
        "rounds": pictures.rounds_picture(per_round) if per_round else None,
        "clients": pictures.clients_picture(per_client) if per_client else None,
    }


def _series(run: Run) -> pictures.Series:
    rows = [row for row in run.rounds if row.get("accuracy_mean") is not None or row.get("local_accuracy_mean") is not None]
    path = run.folder / "rounds.jsonl"
    last: Mapping[str, Any] = next((row["per_client"] for row in reversed(rows) if row.get("per_client")), {})
    truth = (run.measured or {}).get("truth", {})
    try:
        series = pictures.Series(
            run.label,
            np.array([row["round"] for row in rows]),
            served=_floats([row.get("accuracy_mean") for row in rows]),
            local=_floats([row.get("local_accuracy_mean") for row in rows]),
            client_served=_floats(last.get("accuracy", [])),
            client_local=_floats(last.get("local_accuracy", [])),
            client_groups=np.array([truth.get(str(client), 0) for client in last.get("clients", [])], dtype=np.int64),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ({error})") from None
    fits = len(series.client_served) == len(series.client_local) == len(series.client_groups)
    _require(fits, path, "'per_client' has lists of different lengths")
    return series


def _floats(values: Sequence[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _reveals(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Each key and setting of [protection] that occurs, its line in `cflpriv list`, and in which runs. The template has longer words."""
    known = {"gram": listed("gram"), "sum": listed("sum"), "robust": ROBUST}
    rows: dict[tuple[str, str], list[str]] = {}
    for key in known:
        for run in runs:
            value = run.config.get("protection", {}).get(key) or "none"
            for setting in value if isinstance(value, list) else [str(value)]:
                rows.setdefault((key, setting), []).append(run.label)
    return [
        {"key": key, "setting": setting, "line": known[key].get(setting, ""), "runs": _names(labels, runs)}
        for (key, setting), labels in rows.items()
    ]


def _notes(runs: Sequence[Run]) -> dict[str, str]:
    """Each note on the data, and the runs it is about."""
    notes: dict[str, list[str]] = {}
    for run in runs:
        for note in run.summary["notes"]:
            notes.setdefault(str(note), []).append(run.label)
    return {note: _names(labels, runs) for note, labels in notes.items()}


def _names(labels: Sequence[str], runs: Sequence[Run]) -> str:
    return ", ".join(labels) if len(labels) < len(runs) or len(runs) == 1 else "all runs"
