"""Which methods find the groups with their defaults, over data sets, kinds of difference, samples and seeds.

    python -m benchmarks clustering [--out FILE.csv] [--data-dir DIR] [--data development] [--methods "crossfit;stocfl"] [--tables]

Every cell (scene, method) is one line of a CSV file, written when it is done. What is there is not run again, so an interrupted table goes
on where it stopped. Only the clustering is run, no longer training. No method gets the number of groups, or whether there are any.

`DEVELOPMENT` names the data sets that methods may be developed on; all others are for tests of what was fixed before.
"""

import argparse
import csv
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import cut_tree, linkage
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score
from threadpoolctl import threadpool_limits

from cflpriv import DataSpec, Model, Train, build_population, simulate
from cflpriv.algorithms import crossfit, fedgwc, fedrc, fedsoft, flexcfl, ocfl, pacfl
from cflpriv.algorithms.cfl.cfl import cfl
from cflpriv.algorithms.ifca.ifca import ifca
from cflpriv.algorithms.interface import Algorithm
from cflpriv.algorithms.pfedlia.pfedlia import pfedlia
from cflpriv.algorithms.stocfl.stocfl import stocfl
from cflpriv.clustering.scores import ari
from cflpriv.contract.operations import Sampling
from cflpriv.contract.transcript import Transcript
from cflpriv.engine import Streams, TaskInput
from cflpriv.errors import InputError
from cflpriv.experiments.run.measure import chosen, served_results
from cflpriv.federation.server import FederationServer
from cflpriv.files import append, write_atomically
from cflpriv.tasks.fold_gradients import FoldGradients
from cflpriv.types import Array, Population

DEVELOPMENT = ("mnist", "fashion_mnist")
TESTED = ("emnist_letters", "usps", "cifar10")
CLIENTS = 40
SAMPLES = (50, 150, 250)
SEEDS = (0, 1, 2)
MOST = 10
"""Rivals that score each number of groups try up to so many."""
FIELDS = ("data", "kind", "clients", "samples", "seed", "method", "groups", "found", "ari", "answer", "p", "knowledge", "seconds")


def label_sets(classes: int) -> tuple[tuple[int, ...], ...]:
    """Four sets of labels, as even as may be."""
    return tuple(tuple(int(label) for label in part) for part in np.array_split(np.arange(classes), 4))


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "rotations": lambda classes: {"rotations": (0, 90, 180, 270)},
    "label sets": lambda classes: {"partition": "pathological", "groups": label_sets(classes)},
    "swaps": lambda classes: {"label_swaps": ((0, 1), (2, 3), (4, 5), (6, 7))},
    "permutations": lambda classes: {"label_permutations": 4},
    "one group": lambda classes: {},
    "continuum": lambda classes: {"partition": "dirichlet", "alpha": 1.0},
}
"""What groups differ in; takes the number of classes and gives keys of a `DataSpec`."""
WITHOUT_GROUPS = ("one group", "continuum")
CLASSES = {"emnist_letters": 26}


@dataclass(frozen=True)
class Scene:
    """One population: a data set, what groups differ in, samples a client (at most, for a continuum), the seed.

    `population` raises `InputError` where the data set has too few samples.
    """

    data: str
    kind: str
    samples: int
    seed: int
    clients: int = CLIENTS

    def population(self, directory: str | None) -> Population:
        keys = KINDS[self.kind](CLASSES.get(self.data, 10))
        spec = DataSpec(
            source=self.data, clients=self.clients, samples_per_client=self.samples, test_samples_per_client=1, seed=self.seed, **keys
        )
        return build_population(spec, directory)


def scenes(data: Sequence[str], seeds: Sequence[int] = SEEDS) -> Iterator[Scene]:
    """All scenes of some data sets, by seed and by samples a client: a table that was ended early still has all kinds."""
    for name in data:
        for seed in seeds:
            for samples in SAMPLES:
                for kind in KINDS:
                    yield Scene(name, kind, samples, seed)


# --- methods: what each finds, as (labels in the order of clients, what it says, p or "")

Found = tuple[Sequence[int], str, float | str]


def mlp(people: Population, hidden: int = 200) -> Model:
    return Model("mlp", people.shape, people.classes, hidden, people.mean, people.std)


class Unrecorded(Transcript):
    """Keeps nothing, so that no update is written out for a digest that nobody reads."""

    def add(self, *args: Any, **keys: Any) -> None:
        """Record nothing."""


def after_rounds(federation: FederationServer, algorithm: Algorithm, rounds: int) -> Any:
    """The state after so many rounds, of which no message is kept."""
    state = algorithm.init(federation)
    for number in range(rounds):
        federation.begin_round(number)
        state, _ = algorithm.round(federation, state)
        federation.transcript.messages.clear()
    return state


def run(people: Population, algorithm: Algorithm, share: float, rounds: int, seed: int) -> Found:
    """A system's clustering after some rounds; who is in no cluster by then is alone."""
    simulated = simulate(people.clients, sampling=Sampling("global", share), seed=seed, transcript=Unrecorded())
    federation = simulated.federation
    state = after_rounds(federation, algorithm, rounds)
    described = algorithm.describe(state)
    if "clustering" not in described:  # each client knows its own
        return chosen(served_results(simulated, algorithm.serve(state), federation.clients)) or [0] * len(people.clients), "", ""
    if described["clustering"] is None:  # not found yet
        return [0] * len(people.clients), "no clusters yet", ""
    placed = dict(zip(described["clustering"].clients, described["clustering"].labels, strict=True))
    labels = [placed.get(client.id, -1 - number) for number, client in enumerate(people.clients)]
    answer = described.get("answer", "" if described.get("clear", True) else "no clear structure")
    return labels, str(answer), described.get("p", described.get("p_at_least", ""))


@lru_cache(maxsize=1)
def folds_of(people: Population, seed: int) -> Array:
    """The balanced folds (n, 2, d) that crossfit's clients would send. The first method of a scene pays for all."""
    model = mlp(people)
    task, start = FoldGradients(model, seed=seed), model.init(seed)
    return np.stack([task.run(TaskInput(client, {"model": start}, {}, Streams(seed, -1, client.id)))["folds"] for client in people.clients])


def ward_ratio(people: Population, seed: int) -> Found:
    """Ward's tree of the same vectors, cut at the largest ratio of neighbouring merge heights if that is 2 or more."""
    tree = linkage(folds_of(people, seed).mean(1), "ward")
    heights, n = tree[:, 2], len(tree) + 1
    ratios = {k: heights[n - k] / heights[n - k - 1] for k in range(2, min(MOST, n // 2) + 1)}
    k = max(ratios, key=lambda count: ratios[count])
    return cut_tree(tree, [k if ratios[k] >= 2 else 1]).ravel().tolist(), "", float(ratios[k])


def silhouette(people: Population, seed: int) -> Found:
    """Average linkage of the same vectors, with the number of groups of the best mean silhouette."""
    points = folds_of(people, seed).mean(1)
    tree = linkage(points, "average")
    cuts = {k: cut_tree(tree, [k]).ravel() for k in range(2, MOST + 1)}
    k = max(cuts, key=lambda count: silhouette_score(points, cuts[count]))
    return cuts[k].tolist(), "", ""


def gap_statistic(people: Population, seed: int) -> Found:
    """k-means on the principal coordinates of the same vectors, with the number of groups of the gap statistic (Tibshirani et al. 2001)."""
    points = folds_of(people, seed).mean(1)
    points = points - points.mean(0)
    left, values, _ = np.linalg.svd(points, full_matrices=False)
    points = left[:, : MOST + 1] * values[: MOST + 1]
    rng = np.random.default_rng(seed)

    def inertias(of: Array) -> Array:
        return np.log([KMeans(k, n_init=5, random_state=seed).fit(of).inertia_ for k in range(1, MOST + 1)])

    low, high = points.min(0), points.max(0)
    drawn = np.array([inertias(rng.uniform(low, high, points.shape)) for _ in range(20)])
    gaps, errors = drawn.mean(0) - inertias(points), drawn.std(0) * np.sqrt(1 + 1 / 20)
    k = next((k for k in range(1, MOST) if gaps[k - 1] >= gaps[k] - errors[k]), MOST)
    return KMeans(k, n_init=10, random_state=seed).fit(points).labels_.tolist(), "", ""


def trained(people: Population, lr: float = 0.1, hidden: int = 200) -> Train:
    return Train(mlp(people, hidden), epochs=1, batch_size=0, lr=lr)


def scored(people: Population, seed: int, warm_up: int, min_samples: int | None) -> Found:
    """pFedLIA after its warm-up: 4 rounds are what it takes of 20."""
    train = Train(mlp(people, 64), epochs=1, batch_size=10, lr=0.01)
    return run(people, pfedlia(train, warm_up=warm_up, min_samples=min_samples, seed=seed), 0.25, warm_up + 1, seed)


METHODS: dict[str, Callable[[Population, int], Found]] = {
    "crossfit": lambda people, seed: run(people, crossfit(trained(people), seed=seed), 1.0, 0, seed),
    "crossfit, plain": lambda people, seed: run(people, crossfit(trained(people), variant="plain", seed=seed), 1.0, 0, seed),
    "ward ratio": ward_ratio, "silhouette": silhouette, "gap statistic": gap_statistic,
    "pacfl": lambda people, seed: run(people, pacfl(trained(people), cut="silhouette", seed=seed), 1.0, 0, seed),
    "pacfl, cut by test": lambda people, seed: run(people, pacfl(trained(people), seed=seed), 1.0, 0, seed),
    "stocfl": lambda people, seed: run(people, stocfl(trained(people), tau=0.5, seed=seed), 0.25, 30, seed),
    "stocfl, cut by test": lambda people, seed: run(people, stocfl(trained(people), seed=seed), 0.25, 30, seed),
    "ifca": lambda people, seed: run(people, ifca(trained(people), k=2, seed=seed), 1.0, 15, seed),
    "ifca, k by test": lambda people, seed: run(people, ifca(trained(people), seed=seed), 1.0, 15, seed),
    "cfl": lambda people, seed: run(people, cfl(trained(people), eps1=0.2, eps2=0.75, seed=seed), 1.0, 30, seed),
    "cfl, split by test": lambda people, seed: run(people, cfl(trained(people), seed=seed), 1.0, 30, seed),
    "pfedlia": lambda people, seed: scored(people, seed, 20, max(2, len(people.clients) // 10)),
    "pfedlia, from the data": lambda people, seed: scored(people, seed, 4, None),
    "flexcfl": lambda people, seed: run(people, flexcfl(trained(people), seed=seed), 1.0, 0, seed),
    "ocfl": lambda people, seed: run(people, ocfl(trained(people), seed=seed), 1.0, 15, seed),
    "fedsoft": lambda people, seed: run(people, fedsoft(trained(people), seed=seed), 1.0, 15, seed),
    "fedrc": lambda people, seed: run(people, fedrc(trained(people), seed=seed), 1.0, 15, seed),
    "fedgwc": lambda people, seed: run(people, fedgwc(trained(people), seed=seed), 0.25, 60, seed),
}  # fmt: skip
"""By name; the first are quick. The names alone stand for the rules of the papers, with our numbers where these print none."""
SYSTEMS = (
    "stocfl", "stocfl, cut by test", "ifca", "cfl", "pfedlia", "ifca, k by test", "cfl, split by test", "pfedlia, from the data", "ocfl",
    "fedsoft", "fedrc", "fedgwc",
)  # fmt: skip
NUMBERS = {"ifca": "a number of groups, k = 2", "flexcfl": "a number of groups, k = 2", "fedsoft": "a number of groups, k = 2",
           "fedrc": "a number of groups, k = 3", "stocfl": "a threshold, tau = 0.5", "cfl": "thresholds, eps1 = 0.2 and eps2 = 0.75",
           "pfedlia": "a density, a tenth of the clients", "ocfl": "a density, 3 clients",
           "fedgwc": "a threshold, eps = 1e-05"}  # fmt: skip
"""What methods assume of the groups, by their defaults or the papers' numbers; all others assume nothing."""
LABELS = {
    "ward ratio": "Ward, ratio 2", "pacfl": "PACFL, paper", "pacfl, cut by test": "PACFL, cut by test", "stocfl": "StoCFL, paper",
    "stocfl, cut by test": "StoCFL, cut by test", "ifca": "IFCA, paper", "ifca, k by test": "IFCA, k by test", "cfl": "CFL, paper",
    "cfl, split by test": "CFL, split by test", "pfedlia": "pFedLIA, paper", "pfedlia, from the data": "pFedLIA, from the data",
    "flexcfl": "FlexCFL", "ocfl": "OCFL", "fedsoft": "FedSoft", "fedrc": "FedRC", "fedgwc": "FedGWC",
}  # fmt: skip
"""How the tables call methods, where not by their names."""


def cell(scene: Scene, method: str, people: Population) -> dict[str, Any]:
    """One line of the table."""
    began = time.process_time()
    with threadpool_limits(1):
        labels, answer, p = METHODS[method](people, scene.seed)
    truth = [0] * len(people.groups) if scene.kind in WITHOUT_GROUPS else people.groups
    return {
        "data": scene.data, "kind": scene.kind, "clients": scene.clients, "samples": scene.samples, "seed": scene.seed, "method": method,
        "groups": len(set(truth)), "found": len(set(labels)), "ari": round(ari(truth, labels), 4), "answer": answer, "p": p,
        "knowledge": NUMBERS.get(method, "none"), "seconds": round(time.process_time() - began, 2),
    }  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Two tables in Markdown of the scenes that all methods of `rows` ran in: exact answers by kind of difference, with populations without
    groups left whole and wrong answers of two clusters or more; and exact answers by samples. The best are first.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    common = set.intersection(*({_scene(row) for row in rows if row["method"] == method} for method in methods)) if methods else set()
    own = {method: [row for row in rows if row["method"] == method and _scene(row) in common] for method in methods}
    grouped = {method: [row for row in some if int(row["groups"]) > 1] for method, some in own.items()}
    order = sorted(methods, key=lambda method: -sum(map(exact, own[method])))
    differences = [kind for kind in KINDS if kind not in WITHOUT_GROUPS]
    lines = [f"{len(common)} scenes", "", _line(["", "assumes", *differences, *(f"{kind} kept" for kind in WITHOUT_GROUPS), "wrong"])]
    lines.append("|" + "---|" * (3 + len(KINDS)))
    for method in order:
        kinds = [_exact_of([row for row in own[method] if row["kind"] == kind]) for kind in (*differences, *WITHOUT_GROUPS)]
        with_groups = [row for row in own[method] if int(row["found"]) > 1]
        wrong = f"{len(with_groups) - sum(map(exact, with_groups))} of {len(with_groups)}"
        lines.append(_line([LABELS.get(method, method), NUMBERS.get(method, "nothing"), *kinds, wrong]))
    lines += ["", _line(["exact, by samples a client", *map(str, SAMPLES)]), "|" + "---|" * (1 + len(SAMPLES))]
    for method in order:
        counts = [_exact_of([row for row in grouped[method] if int(row["samples"]) == samples]) for samples in SAMPLES]
        lines.append(_line([LABELS.get(method, method), *counts]))
    return "\n".join(lines)


def _scene(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[key]) for key in ("data", "kind", "clients", "samples", "seed"))


def _exact_of(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(map(exact, rows))} of {len(rows)}" if rows else "–"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def exact(row: Mapping[str, Any]) -> bool:
    """Whether the groups, and nothing else, were found."""
    return int(row["found"]) == int(row["groups"]) and float(row["ari"]) == 1.0


def read(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """The whole lines of a table with these columns, none where there is no file. A last line that was cut off is removed.

    Raises `InputError` for a file with other columns: it is left as it is.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    lines = csv.DictReader(io.StringIO(whole))
    if text and list(lines.fieldnames or ()) != list(fields):
        raise InputError(f"{path}: is another table, whose columns are not {', '.join(fields)}; choose another file with --out")
    if whole != text:
        write_atomically(path, whole)
    return [row for row in lines if None not in row and None not in row.values()]


def add(path: Path, fields: Sequence[str], row: Mapping[str, Any]) -> None:
    """Add a line to a table, which is begun if there is none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    if not path.exists() or not path.stat().st_size:
        writer.writeheader()
    writer.writerow(row)
    append(path, text.getvalue())


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks clustering", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/clustering.csv"))
    parser.add_argument("--data-dir")
    parser.add_argument("--data", default="tested", help="development, tested, or names of data sets")
    parser.add_argument("--methods", default="", help="names with ; between them, by default all")
    parser.add_argument("--quick", action="store_true", help="without the systems that need rounds")
    parser.add_argument("--tables", action="store_true", help="run nothing; print the tables of the rows that are there")
    chosen = parser.parse_args(list(words))
    data = {"development": DEVELOPMENT, "tested": TESTED}.get(chosen.data) or tuple(chosen.data.split(","))
    methods = chosen.methods.split(";") if chosen.methods else [method for method in METHODS if not (chosen.quick and method in SYSTEMS)]
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        parser.error(f"--methods: {unknown[0]!r} is not known; known are {'; '.join(METHODS)}")
    try:
        rows = read(chosen.out, FIELDS)
    except InputError as error:
        parser.error(str(error))
    if chosen.tables:
        print(summary([row for row in rows if row["data"] in data and row["method"] in methods]))
        return 0
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    done = {tuple(str(row[key]) for key in FIELDS[:6]) for row in rows}
    wanted = list(scenes(data))
    for number, scene in enumerate(wanted, 1):
        key = (scene.data, scene.kind, str(scene.clients), str(scene.samples), str(scene.seed))
        missing = [method for method in methods if (*key, method) not in done]
        try:
            people = scene.population(chosen.data_dir) if missing else None
        except InputError as error:  # the data set is too small
            print(f"{number}/{len(wanted)} {', '.join(key)}: left out, {error}", flush=True)
            continue
        for method in missing:
            assert people is not None
            rows.append(cell(scene, method, people))
            add(chosen.out, FIELDS, rows[-1])
            shown = f"ARI {rows[-1]['ari']}, {rows[-1]['found']} of {rows[-1]['groups']}"
            print(f"{number}/{len(wanted)} {', '.join(key)}, {method}: {shown}", flush=True)
    print(summary([row for row in rows if row["data"] in data and row["method"] in methods]))
    return 0
