"""The schedule of every algorithm is all that an honest run asks of clients, and nothing more.

Each group of runs has one schedule. Under the contract with it no client refuses anything, so nothing is missing in it. What the runs of
the group together ask, as clients count it, is the whole schedule, so nothing in it is too much.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from scenes import population
from small_runs import configured

from cflpriv.algorithms import ALGORITHMS
from cflpriv.contract.handles import Held, placed
from cflpriv.contract.schedule import EACH_ROUND, Schedule
from cflpriv.experiments.run.run import Experiment, admit, advance, begin, prepare
from cflpriv.federation.client_contract import KEPT, Counts
from cflpriv.federation.contract_record import contract_digest
from cflpriv.federation.observed_schedule import Watched
from cflpriv.federation.transport import Transport
from cflpriv.types import Population

SCENE = population(groups=2, clients_per_group=5, samples=14, test_samples=2, shape=(4,), separation=4.0)
ALIKE = population(groups=1, clients_per_group=10, samples=14, test_samples=2, shape=(4,))
BASE: Mapping[str, Mapping[str, Any]] = {
    "model": {"name": "mlp", "hidden": 4, "dtype": "float64"},
    "training": {"rounds": 3, "batch_size": 7, "weights": "equal", "lr": 0.05, "lr_decay": 0.9},
    "data": {"newcomers": 2},
    "run": {"evaluate_every": 100},
}
SECAGG = {"sum": "secagg", "gram": ["haar"], "secagg_clip": 8.0}
OBLIVIOUS = {"sum": "secagg-oblivious", "gram": ["haar"], "secagg_clip": 8.0}
HAAR = {"sum": "haar", "gram": ["haar"]}


@dataclass(frozen=True)
class Run:
    """A run: its algorithm's settings, the keys of other sections, and its clients."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scene: Population = SCENE


def run(settings: Mapping[str, Any] | None = None, scene: Population = SCENE, **sections: Mapping[str, Any]) -> Run:
    return Run(settings or {}, sections, scene)


@dataclass(frozen=True)
class Group:
    """Runs of one algorithm that have one schedule. `bound`: its number of models is a bound, which these runs need not reach."""

    algorithm: str
    runs: Sequence[Run]
    bound: bool = False
    slow: bool = False


def both(algorithm: str, settings: Mapping[str, Any], protection: Mapping[str, Any], **sections: Any) -> Iterator[Group]:
    """Without a protection and with one."""
    yield Group(algorithm, [run(settings, **sections), run(settings, protection=protection, **sections)])


def watched(algorithm: str, settings: Mapping[str, Any]) -> Iterator[Group]:
    """With all clients in each round, whose updates are compared, and with some, where all train once more to be compared."""
    yield Group(algorithm, [run(settings, training={"participation": share}) for share in (0.6, 1.0)])


def merged(algorithm: str, settings: Mapping[str, Any], **protection: Any) -> Iterator[Group]:
    """Where all clusters merge, and where no two do and are too small for a sum of their own; and without a protection."""
    half = {"participation": 0.5, "rounds": 4}
    hidden = [run({"tau": tau, **settings}, training=half, protection={**SECAGG, **protection}) for tau in (-1.0, 1.0)]
    yield Group(algorithm, [*hidden, run({"tau": 0.5, **settings}, training=half)])


def groups() -> list[Group]:
    """All runs."""
    half, apart = {"participation": 0.5, "rounds": 4}, {"training": {"participation": 0.5, "rounds": 8}, "run": {"seed": 5}}
    early = {"moments": 1, "cell_steps": 1, "centre_steps": 2, "draws": 19}
    seven = {"rounds": 7}
    client = {"privacy": {"unit": "client", "epsilon": 100.0, "clip_norm": 1.0, "delta": 1e-3}}
    return [
        Group("fedavg", [run()]),
        Group("fedprox", [run({"mu": 0.1})]),
        Group("fednova", [run()]),
        Group("scaffold", [run({"global_lr": 0.5})]),
        Group("per_fedavg", [run({"alpha": 0.1, "beta": 0.2}, training={"epochs": 2})]),
        Group("per_fedavg", [run({"alpha": 0.0})]),
        Group("lg_fedavg", [run({"global_layers": 1})]),
        Group("ditto", [run({"lam": 0.5, "personal_epochs": 2})]),
        Group("oracle", [run(data={"newcomers": 0})]),
        Group("shuffled", [run(data={"newcomers": 0})]),
        Group("local", [run()]),
        Group("fedproto", [run({"lam": 0.5})]),
        *both("fedproto", {"lam": 0.0}, protection=OBLIVIOUS),
        Group("fedfomo", [run({"models": 2})]),
        Group("fedgwc", [run(training=half)]),
        Group("fedrc", [run({"k": 2})]),
        Group("fedsoft", [run({"k": 2, "interval": 2})]),
        Group("fesem", [run()]),
        *both("fesem", {"start": "random"}, protection=OBLIVIOUS),
        Group("crossfit", [run()]),
        *both("crossfit", {"variant": "plain", "k": 2}, protection=SECAGG),
        *both("one_shot", {"local_epochs": 1}, protection=SECAGG),
        Group("flexcfl", [run({"pretrain_scale": 2})]),
        Group("ocfl", [run(training={"rounds": 6})]),
        Group("pacfl", [run()]),
        *both("pacfl", {"k": 2, "fine_tune_epochs": 1}, protection={**SECAGG, "small_clusters": "local"}),
        Group("pacfl", [run({"variant": "authors", "beta": 10.0})]),
        *both("pina", {}, protection=SECAGG),
        *both("rr_cluster", {"k": 3}, protection=SECAGG),
        Group("r_dpcfl", [run({"k": 2}, training={"rounds": 5}), run(training={"rounds": 5})]),
        Group("r_dpcfl", [run({"k": 2}, training={"rounds": 1})]),
        Group("private_clusters", [run({"k": 1})]),
        *both("private_clusters", {"k": 2, **early}, training=seven, protection=SECAGG),
        Group("private_clusters", [run({"k": 2, **early, "train_early": True}, training=seven, **more) for more in clustered]),
        Group("private_clusters", [run(early, scene, training=seven) for scene in (SCENE, ALIKE)], bound=True),
        Group("private_clusters", [run({**early, "train_early": True}, scene, training=seven) for scene in (SCENE, ALIKE)], bound=True),
        Group("cfl", [run({"alpha": 0.05, "draws": 40, "settle": 0}, training={"rounds": 4})]),
        Group("cfl", [run({"alpha": 0.05, "draws": 80, "patience": 1, "settle": 0}, ALIKE, training={"rounds": 5})]),
        *watched("cfl", {"alpha": 0.05, "draws": 40, "watch": True, "settle": 0, "patience": 1}),
        *watched("cfl", {"eps1": 5.0, "eps2": 5.1, "watch": True}),
        *watched("cfl", {"variant": "authors", "first_split": 0, "watch": True}),
        Group("stocfl", [run(training=half), run(protection=SECAGG), run({"sketch_dim": 0}, protection={**SECAGG, "min_cohort": 6})]),
        *merged("stocfl", {}),
        *merged("stocfl", {"lam": 0.0}),
        *merged("stocfl", {"variant": "authors", "movement_epochs": 1}, secagg_mode="passive", relay_updates=True),
        Group("pfedlia", [run({"warm_up": 1, "local_epochs": 1})]),
        Group("pfedlia", [run({"warm_up": 1, "local_epochs": 2, "mode": "peer"})]),
        *both("ifca", {"k": 2}, protection=OBLIVIOUS),
        Group("ifca", [run(training=half)]),
        Group("ifca", [run({"shared": ["all_but_last"]}, training=half), run({"shared": ["all_but_last"]}, protection=SECAGG)]),
        *both("ifca", {"k": 2, "restarts": 2, "decide_after": 2}, protection=OBLIVIOUS),
        *both("ifca", {"k": 2, "averaging": "gradient", "shared": ["all_but_last"], "variant": "authors"}, protection=SECAGG, **apart),
        *both("ifca", {"k": 2, "stable_rounds": 1, "shared": ["all_but_last"]}, protection=SECAGG, **apart),
        Group("hypcluster", [run({"k": 2})]),
    ]  # fmt: skip


@dataclass
class Asked:
    """What a run asked: how often each request of the contract was answered by one client, at most; by what its parts left; how many
    models members of a sum were sent; and how many rounds there were."""

    times: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    left: dict[int, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))
    models: int = 1
    rounds: int = 1


def made(algorithm: str, one: Run, **options: Any) -> tuple[Experiment, Watched]:
    """The experiment of a run, and its transport."""
    sections = {**one.sections, "algorithm": {"name": algorithm, **one.settings}}
    seen: list[Watched] = []

    def watch(transport: Transport) -> Transport:
        seen.append(Watched(transport))
        return seen[0]

    experiment = prepare(configured(BASE, **sections), population=one.scene, watch=watch, **options)
    return experiment, seen[0]


def asked_in(algorithm: str, one: Run, **options: Any) -> tuple[Schedule, Asked]:
    """Run it under its contract, with newcomers in round 1 and at the end, and serve as deployments do; what was asked.

    Fails if a client refuses.
    """
    experiment, watched = made(algorithm, one, **options)
    schedule = experiment.algorithm.schedule
    assert schedule is not None, f"{algorithm} declares no schedule"
    asked, places = Asked(rounds=experiment.config.training.rounds), dict[tuple[int, bytes], int]()
    join_midway(experiment, experiment.newcomers[:1])
    begin(experiment)
    count(experiment, asked, places)
    for _ in range(asked.rounds):
        row = advance(experiment)
        assert row["skipped"] is None, row["skipped"]
        serve(experiment, experiment.federation.clients)
        count(experiment, asked, places)
    admit(experiment)
    serve(experiment, experiment.newcomers)
    count(experiment, asked, places)
    assert not experiment.federation.refusals
    for value in watched.observed:
        place = places[value.client, value.digest[:16]]
        asked.left[place] |= {(part, by) for part, ways in value.left.items() for by in ways}
        asked.models = max(asked.models, value.models)
    experiment.simulated.close()
    return schedule, asked


def join_midway(experiment: Experiment, newcomers: Sequence[int]) -> None:
    """Let these join at the beginning of round 1, as in a deployment, and take part from then on."""

    def begin_round(run: Experiment, number: int) -> Collection[int]:
        run.federation.begin_round(number)
        if number == 1 and newcomers and run.algorithm.admit is not None:
            run.simulated.join(newcomers)
            run.state, _ = run.algorithm.admit(run.federation, run.state, newcomers)
        return ()

    experiment.backend = replace(experiment.backend, begin_round=begin_round)
    if experiment.config.training.rounds > 1:
        experiment.newcomers = tuple(client for client in experiment.newcomers if client not in newcomers)


def serve(experiment: Experiment, clients: Sequence[int]) -> None:
    """Clients are scored, as in a deployment, where the protection keeps no scores from the server."""
    served, federation = experiment.algorithm.serve(experiment.state), experiment.federation
    on = clients if served.which is None or isinstance(served.which, Held) else placed(served.which, clients)
    if federation.protection.sums.hides or experiment.config.privacy.unit == "client" or not on:
        return
    held = federation.compute(served.task, served.params, which=served.which, on=on)
    federation.gather(held["correct", "count"])


def count(experiment: Experiment, asked: Asked, places: dict[tuple[int, bytes], int]) -> None:
    """Add what clients have counted so far."""
    for client in experiment.simulated.online:
        store = experiment.simulated.stores[client]
        data = store.get(KEPT)
        assert data is not None
        counts = store.load(f"{KEPT}/{contract_digest(data).hex()}", Counts.from_bytes)
        assert counts is not None
        for entries in (counts.in_round, counts.lasting):
            here: dict[int, int] = defaultdict(int)
            for place, name in entries:
                here[place] += 1
                places[client, name] = place
            for place, times in here.items():
                asked.times[place] = max(asked.times[place], times)


def unasked(schedule: Schedule, runs: Iterable[Asked], bound: bool = False) -> Iterator[str]:
    """What of a schedule no run asked."""
    runs = list(runs)
    for place, (phase, declared) in enumerate(schedule.requests()):
        name = f"{phase} {place}: {type(declared.task).__name__}"
        short = [one for one in runs if one.times[place] < (one.rounds if declared.times == EACH_ROUND else declared.times)]
        if len(short) == len(runs):
            yield f"{name} {declared.times} times: asked {max(one.times[place] for one in runs)} times"
        left = set[tuple[str, str]]().union(*(one.left[place] for one in runs))
        for part, operations in declared.leaves:
            for operation in operations:
                if (part, operation) not in left:
                    yield f"{name}: {part!r} never left by {operation!r}"
    if not bound and schedule.models > max(one.models for one in runs):
        yield f"models = {schedule.models}: {max(one.models for one in runs)} were sent"


def id_of(group: Group) -> str:
    return f"{group.algorithm}-" + ",".join(f"{key}={value}" for key, value in group.runs[0].settings.items())


@pytest.mark.parametrize("group", [pytest.param(group, id=id_of(group)) for group in groups()])
def test_a_schedule_is_what_honest_runs_ask_and_nothing_more(group: Group) -> None:
    (schedule, first), *others = [asked_in(group.algorithm, one) for one in group.runs]
    assert all(other == schedule for other, _ in others)
    assert list(unasked(schedule, [first, *(asked for _, asked in others)], group.bound)) == []


def test_every_algorithm_has_a_schedule_and_is_run_here() -> None:
    assert {group.algorithm for group in groups()} == set(ALGORITHMS.ready())
