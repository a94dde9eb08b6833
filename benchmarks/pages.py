"""The pages of measured figures, from the tables beside them.

`python -m benchmarks.pages reproductions > docs/reproductions.md`, `python -m benchmarks.pages measurements > docs/measurements.md`.
Figures, verdicts and notes are in `docs/*.csv`, a device's report in `docs/gpu.json`. Here are only the words that say how to read them.
"""

import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from cflpriv.experiments.reproductions import REPRODUCTIONS
from cflpriv.generated_pages import generated_page
from cflpriv.streams import print_file

from .gpu.report import read, table
from .gpu.rows import ROOT

__all__ = ["PAGES", "VERDICTS", "records"]

DOCS = ROOT / "docs"
VERDICTS = ("yes", "in part", "no", "small scale", "not measured")
"""Whether a published result comes out, in the words of docs/reproduction_entries.csv."""

Records = Sequence[Mapping[str, str]]


def records(name: str) -> Records:
    """The rows of a table in docs/."""
    with (DOCS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _grouped(rows: Records, key: str) -> dict[str, Records]:
    """The rows of each value of a column, in the order in which the values come."""
    return {value: [row for row in rows if row[key] == value] for value in dict.fromkeys(row[key] for row in rows)}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _list(notes: Sequence[str]) -> Iterator[str]:
    yield from ("", *(f"- {note}" for note in notes)) if notes else ()


# --- reproductions ----------------------------------------------------------------------------------------------------------------------

_REPRODUCTIONS = """\
    cflpriv reproduce NAME [--scale S] [--seeds N] [--cells "A;B"] [--set section.key=value] [--out DIR] [--data-dir DIR]

For readers who compare with a published figure. An entry is one table or figure of a paper (`cflpriv list`). The command runs the cells
that are missing and writes `table.md`, `table.csv` and `picture.svg`; the same command resumes.

- A published figure is printed only for exactly its settings (`cflpriv/experiments/reproductions/published.py`). Another column of a
  paper's table is a `--set` away: pacfl-label-skew with `--set data.source=cifar10 --set data.skew_percent=30` is PACFL's Table 6 for
  CIFAR-10. What a paper changes with the data set is changed along.
- `--scale` (up to 1) multiplies rounds, clients or trials. `--cells` takes beginnings of cells' names.
- `--set protection...` runs an entry under a protection. Where sample counts would show, clients weigh equally. Refused cells become rows
  with the reason. At a small scale set `training.participation=1.0`, or clusters are too small for sums.
- Nothing is tuned on test data. The command's table lists the hyper-parameters of the paper and those that the paper leaves open. Open
  values were set before these runs, some after earlier trials with known outcomes. Published numbers of clusters are given.

## How to read the tables

Figures are in per cent unless a label names a unit. *Used*: the deployed model. *Local*: the last locally trained model (the initial
model before the first training; up to commit `6fede68` such clients are left out). *Standardised*: with `--set model.normalise=true`;
elsewhere pixels are in [0, 1]. One seed unless a figure has ±. Times are of one core of a shared two-core x86-64 machine. Beside a
scaled-down run published figures are for orientation only. *Small scale*: 5 to 20 rounds, mostly 10 or 20 clients, which neither supports
nor contradicts the paper.

The data: [reproductions.csv](reproductions.csv), every figure with its commit, and [reproduction_entries.csv](reproduction_entries.csv),
verdicts, commands and notes. Drawings and tables of settings have no entry. CIFAR-100 and SVHN were absent; CIFAR-10 has 20000 images.

## Scored alike, the published order is gone

PACFL's tables score clustered and local methods by each client's last locally trained model, and FedAvg and methods like it by the shared
model (inferred from the sizes of the figures). Most of the gap between 97.54 for PACFL and 77.3 for
FedAvg is the 16 to 18 points between these two metrics. The control for a claim of clustering is FedAvg in random groups of PACFL's sizes.
"""


def _reproductions() -> str:
    figures = _grouped(records("reproductions.csv"), "entry")
    entries = _grouped(records("reproduction_entries.csv"), "entry")
    texts = {name: {kind: [row["text"] for row in rows] for kind, rows in _grouped(entries[name], "kind").items()} for name in entries}
    counts = Counter(texts[name]["verdict"][0] for name in texts)
    lines = [_REPRODUCTIONS, "## Does the published result come out?", ""]
    lines += [f"Of {len(texts)} entries: {', '.join(f'{verdict} {counts[verdict]}' for verdict in VERDICTS)}."]
    verdicts = [
        (f"[{name}](#{name})" if "command" in text else name, text["verdict"][0], " ".join(text["reason"])) for name, text in texts.items()
    ]
    lines += _table(("entry", "verdict", "reason"), verdicts)
    for name, text in texts.items():
        if "command" in text:
            lines += _entry(name, text, figures.get(name, ()))
    lines += [_DRIFT, *_drift(records("drift.csv"))]
    return generated_page(
        "The papers' tables and figures, beside ours",
        "python -m benchmarks.pages reproductions > docs/reproductions.md",
        "\n".join(lines) + "\n",
    )


def _entry(name: str, text: Mapping[str, Sequence[str]], figures: Records) -> Iterator[str]:
    """The section of an entry: title and source, commands, figures, notes."""
    title = REPRODUCTIONS[name].title
    yield from ("", f"### {name}", "", f"{title[:1].upper()}{title[1:]}. Source: {REPRODUCTIONS[name].source}.", "")
    yield from (f"    {command}" for command in text["command"])
    if figures:
        columns = list(dict.fromkeys(row["column"] for row in figures))
        cells = {(row["row"], row["column"]): row["value"] for row in figures}
        labels = dict.fromkeys(row["row"] for row in figures)
        yield from _table(("", *columns), [(label, *(cells.get((label, column), "") for column in columns)) for label in labels])
        yield from ("", f"Setting: {figures[0]['setting']}. Commit: {figures[0]['commit']}.")
    yield from _list(text.get("note", ()))


_DRIFT = """
## Clients that change, beside FedDrift's code

    python -m benchmarks drift --first 1000
    python -m benchmarks drift --first 5000 --seeds 0 --quiet 0 --weak 200 --data "usps;mnist;fashion_mnist;emnist_letters;cifar10"

Scenes, seeds and bars: the first lines of `benchmarks/drift.py`; every run: [drift.csv](drift.csv). The rule was committed before the
judged runs (`6694ec03`; the rule for weak differences: before the second command, which made all `weak` rows). *Movers*: accuracy in
per cent, three rounds after their data changed. *Oracle*: the same run with the movers put into their group by hand. *False*: runs that
move a client to another cluster whose data did not change. *Seconds*: processor time of a run.

FedDrift's classes (`microsoft/FedDrift` at e4ac32f, unchanged: drift detection, isolation, merging, aggregation, local training) ran in
one process, with a time step for each round, its published δ for MNIST (.10), and each true group beginning with its own model, which
favours FedDrift. Its oracle is the accuracy of clients that were in the movers' group from the start (where it was noted). Its code has
no clients that join: those of `moved` have no data before. Its local training takes random batches, so accuracies of the two sides are
not comparable; those of movers and oracle are. The program that drove these classes is not kept, so no command makes the rows of FedDrift
again. No code of Fielding was found. In `quiet` the false moves of FedDrift include merged groups: its models have few rounds by then.

FedDAA's ensembles, clients, aggregator and detection of drift
(`LeegerPENG/FedDAA-Dynamic-Client-Clustering-for-Concept-Drift-Adaptation-in-Federated-Learning` at f79e616, unchanged) ran in one process
on `turned`: our clients and networks, two epochs of batches of 25 at a rate of .05, three models for six rounds, then a time slot of three
rounds with four, the true number, as its program has it. Clients mix these models. FLUX's dynamic server and clients
(`dariofenoglio98/FLUX` at 43aadbe, unchanged) ran there in one process without its network: LeNet-5, its rate and momentum, batches of 25,
40 epochs a round, which is about as many steps as its own settings have, groups found again in the round of the change, which the
configuration tells. FLUX opens models for new clusters from the nearest old one, and places clients that only join in the nearest cluster:
it has no answer "none". Oracle, for both: clients that were in the movers' group from the start. The programs that drove these classes
are not kept.
"""


_DRIFT_FINDINGS = (
    "In the scene `moved` every bar holds: movers at most 1.5 points below the oracle in any run, no client of the unseen group in an old "
    "cluster, and no quiet run moves a client. Five of the 100 quiet runs name a client as changed (at most 5 expected).",
    "In two of 18 runs of `moved` four of five movers open a cluster of their own beside their group: the joint test rejects a batch of "
    "known clients in up to 5 % of cases. Their accuracy is not lower after three rounds.",
    "In `turned` the change of some clients is not named, such as that of a Fashion-MNIST client that turns by 180 degrees. They stay "
    "where they were.",
    "FedDAA names every mover as changed, 54 of 60 clients of the unseen group, and nobody else. But in its mixtures of models the "
    "rotations hardly have models of their own at this size: accuracies are 26 to 29 points below ours.",
    "FLUX's descriptors, taken in its fourth round, do not show the rotations at 40 training samples a client: its six clusters have an "
    "ARI of −.01 with the groups before the change, and .02 after. Its published runs have thousands of samples a client.",
    "Weak differences, 200 runs of each data set from seed 5000 on: of the known clients 3.1 to 3.7 % are in no cluster; the one-sided "
    "95 % bounds end below 5 %. Twenty runs before, under the same rule, had 7 of 120 for USPS (5.8 %, 2.4 to 11.6). On CIFAR-10 fewer "
    "than half of the unseen clients are recognised, which misses the bar.",
)


def _drift(rows: Records) -> Iterator[str]:
    """Tables of the scenes: those with clients that turn, then the others."""
    both = _grouped([{**row, "run": f"{row['scene']}, {row['data']}, {row['method']}"} for row in rows], "run")

    def total(own: Records, name: str, of: int) -> str:
        known = [int(row[name]) for row in own if row[name]]
        return f"{sum(known)} of {of * len(known)}" if known else ""

    def mean(own: Records, name: str) -> str:
        known = [float(row[name]) for row in own if row[name]]
        return f"{sum(known) / len(known):.1f}" if known else ""

    def false(own: Records) -> str:
        known = [int(row["moved"]) > 0 for row in own if row["moved"]]
        return f"{sum(known)} of {len(known)}" if known else ""

    turning = [
        (name, mean(own, "accuracy"), mean(own, "oracle"), total(own, "recognised", 10), false(own), mean(own, "seconds"))
        for name, own in both.items()
        if own[0]["accuracy"]
    ]
    yield from _table(("scene, data, method", "movers", "oracle", "unseen recognised", "false", "seconds"), turning)
    others = [
        (name, total(own, "recognised", 10), total(own, "held_back", 6), false(own), mean(own, "seconds"))
        for name, own in both.items()
        if not own[0]["accuracy"]
    ]
    yield from _table(("scene, data, method", "unseen recognised", "others in no cluster", "false", "seconds"), others)
    yield from _list(_DRIFT_FINDINGS)


# --- measurements -----------------------------------------------------------------------------------------------------------------------

_MEASUREMENTS = """\
For readers who judge the speed or plan a machine. `make bench` measures on your machine and writes `benchmarks.json`; words after
`python -m benchmarks` choose rows, `python -m benchmarks --help` lists the other measurements. All rows are in
[measurements.csv](measurements.csv).

A *ratio* is that of one run: the two sides take turns in one process, one intra-op thread a process, on two cores that are otherwise idle
unless a row names a busy machine. It is the median of the pairs; above 1 ours is quicker. *Range*: the smallest and the largest pair.
*Asked*: the limit that was set before; some rows miss it.

Elsewhere: [the test for groups](clustering.md#crossfit).
"""

_DEVICE = """
## On a CUDA device

`make gpu OUT=folder BUDGET=480` measures rows within so many seconds and goes on where it stopped; `python -m benchmarks gpu --device cpu
--tiny` rehearses it. `make gpu-kit` collects what a machine without a network lacks.

The plain loop and audits of other systems' updates compute on the CPU.

An H200 was at hand twice for 15 minutes, with no other work on its 16 cores; the rows below are of the last call. What the calls before
showed was changed:

- grouped convolutions: most of a round of LeNet-5, and gradients of 100 groups 6e-4 off;
- norms of samples summed in an order that depends on memory, so that blocks of odd numbers of clients fell back to the plain loop;
- noise drawn by the host: 6 s of a round of 1000 clients;
- attacks on recurrent networks and on running statistics that mixed tensors of both sides;
- results copied to new memory of the host (1.5 of 2.2 s of 100 ResNet-9s; from pinned memory 0.05), and a device that waited while the host
  made batches and took results (.345 of a round).

All 39 tests marked `gpu` passed; of 1011 tests of attacks with the device in use all but one, which planted a fault of noise in a module
that a device does not use. ReLU and maxima may choose otherwise where ResNet-9 is rounded otherwise (its differences of 8e-4).

Guesses: `FEWEST_STEPS`, `WORTH`, `HOLD`, `KEPT`, `FEW_CALLS` (`graphs.py`), `DATA_SHARE`, `CHUNK_SHARE`, `SENT_AT_ONCE` (`memory.py`),
`LARGEST_ON_CUDA` (`fast.py`), `UNFOLDED_SHARE` (`convolutions.py`), `SAMPLES_THERE`, `CLIENTS_THERE`, `PARAMETERS_THERE` (`forward.py`),
`STAY` (`lbfgs.py`).
"""


def _measurements() -> str:
    lines = [_MEASUREMENTS.rstrip()]
    for section, rows in _grouped(records("measurements.csv"), "section").items():
        measured = [row for row in rows if row["comparison"]]
        columns = [name for name in ("ratio", "range", "asked", "result", "note") if any(row[name] for row in measured)]
        lines += ["", f"## {section}"]
        lines += _table(("measurement", *columns), [(row["comparison"], *(row[name] for name in columns)) for row in measured])
        lines += _list([row["note"] for row in rows if not row["comparison"]])
    report = read(DOCS)
    if not report.rows:
        raise ValueError(f"{DOCS / 'gpu.json'}: is missing; `python -m benchmarks --write` keeps a report of `make gpu` there")
    device = table({"machine": report.machine, "rows": list(report.rows.values())})
    return generated_page(
        "What was measured, and how",
        "python -m benchmarks.pages measurements > docs/measurements.md",
        "\n".join([*lines, _DEVICE, device]) + "\n",
    )


PAGES: dict[str, Callable[[], str]] = {"reproductions": _reproductions, "measurements": _measurements}
"""Name of a page in docs/ -> what makes it."""


if __name__ == "__main__":
    if sys.argv[1:] not in ([name] for name in PAGES):
        sys.exit(f"python -m benchmarks.pages: expected one of {', '.join(PAGES)}")
    print_file(PAGES[sys.argv[1]]())
