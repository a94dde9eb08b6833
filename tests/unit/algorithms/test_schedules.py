"""The schedule of every algorithm is all that an honest run asks of clients, and nothing more.

Each group of runs has one schedule. Under the contract with it no client refuses anything, so nothing is missing in it. What the runs of
the group together ask, as clients count it, is the whole schedule, so nothing in it is too much.
"""

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
from scenes import population
from small_runs import configured

from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.cfl.cfl import Same
from cflpriv.algorithms.pfedlia.influence import OnPart
from cflpriv.contract.handles import Held, placed
from cflpriv.contract.schedule import EACH_ROUND, Phase, Schedule, TaskRequest, same_task
from cflpriv.errors import CflprivWarning, InputError, TrainingDiverged
from cflpriv.experiments.run.agreed import contract_for
from cflpriv.experiments.run.inferred_schedule import inferred_schedule
from cflpriv.experiments.run.run import Experiment, admit, advance, begin, prepare
from cflpriv.federation import messages as m
from cflpriv.federation.client_contract import KEPT, Counts
from cflpriv.federation.contract_record import contract_digest, contract_from_bytes
from cflpriv.federation.observed_schedule import Observed, Watched, observed_schedule
from cflpriv.federation.transport import ExchangeStage, Transport
from cflpriv.privacy.settings import Noise
from cflpriv.protocols.errors import ProtocolError
from cflpriv.types import DataChange, Population

SCENE = population(groups=2, clients_per_group=5, samples=14, test_samples=2, shape=(4,), separation=4.0)
LARGER = population(groups=2, clients_per_group=5, samples=28, test_samples=2, shape=(4,), separation=4.0)
DRIFTING = replace(LARGER, changes=(DataChange(1, 0, 1, replace(LARGER.clients[1], id=0)),))
ALIKE = population(groups=1, clients_per_group=10, samples=14, test_samples=2, shape=(4,))
BASE: Mapping[str, Mapping[str, Any]] = {
    "model": {"name": "mlp", "hidden": 4, "dtype": "float64"},
    "training": {"rounds": 3, "epochs": 1, "batch_size": 7, "weights": "equal", "lr": 0.05, "lr_decay": 0.9},
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


def with_keys(settings: Mapping[str, Any] | None = None, scene: Population = SCENE, /, **sections: Mapping[str, Any]) -> Run:
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
    yield Group(algorithm, [with_keys(settings, **sections), with_keys(settings, protection=protection, **sections)])


def watched(algorithm: str, settings: Mapping[str, Any]) -> Iterator[Group]:
    """With all clients in each round, whose updates are compared, and with some, where all train once more to be compared."""
    yield Group(algorithm, [with_keys(settings, training={"participation": share}) for share in (0.6, 1.0)])


def noisy(algorithm: str, settings: Mapping[str, Any], **sections: Mapping[str, Any]) -> Iterator[Group]:
    """Without privacy, and with noise in secure sums, whose members used different models."""
    local = ["gram"] if algorithm == "pina" else []
    privacy = {"unit": "client", "epsilon": 100.0, "clip_norm": 1.0, "delta": 1e-3, "updates": "clipped", "local": local}
    hidden = with_keys(settings, **sections, privacy=privacy, protection={"sum": "secagg", "secagg_clip": 8.0})
    yield Group(algorithm, [with_keys(settings, **sections), hidden])


def apart(settings: Mapping[str, Any]) -> Iterator[Group]:
    """IFCA without a protection, and one round of a secure sum of shared layers over clients that used different models."""
    few = {"participation": 0.5, "rounds": 8}
    hidden = with_keys(settings, training={**few, "rounds": 1}, protection=SECAGG, run={"seed": 5})
    yield Group("ifca", [with_keys(settings, training=few, run={"seed": 5}), hidden])


def found(algorithm: str, settings: Mapping[str, Any], **sections: Mapping[str, Any]) -> Iterator[Group]:
    """With clients in groups, and with clients that are alike."""
    yield Group(algorithm, [with_keys(settings, scene, **sections) for scene in (SCENE, ALIKE)], bound=True)


def merged(algorithm: str, settings: Mapping[str, Any], **protection: Any) -> Iterator[Group]:
    """Where all clusters merge, and where no two do and are too small for a sum of their own; and without a protection."""
    half = {"participation": 0.5, "rounds": 4}
    hidden = [with_keys({"tau": tau, **settings}, training=half, protection={**SECAGG, **protection}) for tau in (-1.0, 1.0)]
    yield Group(algorithm, [*hidden, with_keys({"tau": 0.5, **settings}, training=half)])


def groups() -> list[Group]:
    """All runs."""
    half = {"participation": 0.5, "rounds": 4}
    early = {"moments": 1, "cell_steps": 1, "draws": 19}
    seven = {"rounds": 7}
    return [
        Group("fedavg", [with_keys()]),
        Group("fedprox", [with_keys({"mu": 0.1})]),
        Group("fednova", [with_keys()]),
        Group("scaffold", [with_keys({"global_lr": 0.5})]),
        Group("per_fedavg", [with_keys({"alpha": 0.1, "beta": 0.2}, training={"epochs": 2})]),
        Group("per_fedavg", [with_keys({"alpha": 0.0})]),
        Group("lg_fedavg", [with_keys({"global_layers": 1})]),
        Group("ditto", [with_keys({"lam": 0.5, "personal_epochs": 2})]),
        Group("oracle", [with_keys(data={"newcomers": 0})]),
        Group("shuffled", [with_keys(data={"newcomers": 0})]),
        Group("local", [with_keys()]),
        Group("fedproto", [with_keys({"lam": 0.5})]),
        *both("fedproto", {"lam": 0.0}, protection=OBLIVIOUS),
        Group("fedfomo", [with_keys({"models": 2})]),
        Group("fedgwc", [with_keys(training=half)]),
        Group("fedrc", [with_keys({"k": 2})]),
        Group("fedsoft", [with_keys({"k": 2, "interval": 2})]),
        Group("fesem", [with_keys()]),
        *both("fesem", {"start": "random"}, protection=OBLIVIOUS),
        Group("crossfit", [with_keys()]),
        *(Group(name, [with_keys({"recheck_every": 1}, DRIFTING)]) for name in ("crossfit", "pacfl")),
        *both("crossfit", {"variant": "plain", "k": 2}, protection=SECAGG),
        *both("one_shot", {"local_epochs": 1}, protection=SECAGG),
        Group("flexcfl", [with_keys({"pretrain_scale": 2})]),
        Group("ocfl", [with_keys(training={"rounds": 6})]),
        Group("pacfl", [with_keys()]),
        *both("pacfl", {"k": 2, "fine_tune_epochs": 1}, protection={**SECAGG, "small_clusters": "local"}),
        Group("pacfl", [with_keys({"variant": "authors", "beta": 10.0})]),
        *noisy("pina", {}),
        *noisy("rr_cluster", {"k": 3}),
        Group("r_dpcfl", [with_keys({"k": 2}, training={"rounds": 5}), with_keys(training={"rounds": 5})]),
        Group("r_dpcfl", [with_keys({"k": 2}, training={"rounds": 1})]),
        Group("private_clusters", [with_keys({"k": 1})]),
        *noisy("private_clusters", {"k": 2, "train_early": False, **early}, training=seven),
        *noisy("private_clusters", {"k": 2, "train_early": True, **early}, training=seven),
        *found("private_clusters", {**early, "alpha": 0.3, "moments": 2}, training={"rounds": 8}),
        *found("private_clusters", {**early, "alpha": 0.3, "train_early": True, "moments": 2}, training={"rounds": 8}),
        Group("cfl", [with_keys({"alpha": 0.05, "draws": 40, "settle": 0}, training={"rounds": 4})]),
        Group("cfl", [with_keys({"alpha": 0.05, "draws": 80, "patience": 1, "settle": 0}, ALIKE, training={"rounds": 5})]),
        *watched("cfl", {"alpha": 0.05, "draws": 40, "watch": True, "settle": 0, "patience": 1}),
        *watched("cfl", {"eps1": 5.0, "eps2": 5.1, "watch": True}),
        *watched("cfl", {"variant": "authors", "first_split": 0, "watch": True}),
        Group("stocfl", [with_keys(training=half), *(with_keys(protection={**SECAGG, "min_cohort": least}) for least in (3, 6))]),
        *merged("stocfl", {}),
        *merged("stocfl", {"lam": 0.0}),
        *merged("stocfl", {"variant": "authors", "movement_epochs": 1}, secagg_mode="passive", relay_updates=True),
        Group("pfedlia", [with_keys({"warm_up": 1, "local_epochs": 1})]),
        Group("pfedlia", [with_keys({"warm_up": 1, "local_epochs": 2, "mode": "peer"})]),
        *both("ifca", {"k": 2}, protection=OBLIVIOUS),
        Group("ifca", [with_keys(training=half)]),
        Group("ifca", [with_keys({"shared": ["all_but_last"]}, training=half), with_keys({"shared": ["all_but_last"]}, protection=SECAGG)]),
        Group("ifca", [with_keys({"k": 2, "restarts": 2, "decide_after": 2})]),
        *apart({"k": 2, "averaging": "gradient", "shared": ["all_but_last"], "variant": "authors"}),
        *apart({"k": 2, "stable_rounds": 1, "shared": ["all_but_last"]}),
        Group("hypcluster", [with_keys({"k": 2})]),
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

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CflprivWarning)  # of noise that would do for more clients
        experiment = prepare(configured(BASE, **sections), population=one.scene, watch=watch, **options)
    return experiment, seen[0]


def asked_in(algorithm: str, one: Run, schedule: Schedule | None = None, *, midway: bool = True) -> tuple[Schedule, Asked]:
    """Run it under its contract, or that of another `schedule`, and score clients as deployments do; what was asked.

    A newcomer joins in round 1 (if `midway`), the others at the end.

    Fails if a client refuses.
    """
    experiment, watched = made(algorithm, one)
    declared = experiment.algorithm.schedule
    assert declared is not None, f"{algorithm} declares no schedule"
    if schedule is not None:
        experiment.simulated.close()
        agreed = contract_for(experiment.config, replace(experiment.algorithm, schedule=schedule), noise_of(experiment))
        experiment, watched = made(algorithm, one, contract=agreed)
    schedule = schedule or declared
    asked = Asked(rounds=experiment.config.training.rounds)
    join_midway(experiment, experiment.newcomers[:1] if midway else ())
    begin(experiment)
    count(experiment, asked)
    for _ in range(asked.rounds):
        row = advance(experiment)
        assert row["skipped"] is None, row["skipped"]
        serve(experiment, experiment.federation.clients)
        count(experiment, asked)
    admit(experiment)
    serve(experiment, experiment.newcomers)
    count(experiment, asked)
    assert not experiment.federation.refusals
    for value in watched.observed:
        place = place_of(value, schedule)
        asked.left[place] |= {(part, by) for part, ways in value.left.items() for by in ways}
        asked.models = max(asked.models, value.models)
    experiment.simulated.close()
    return schedule, asked


def noise_of(experiment: Experiment) -> Noise | None:
    """The noise of the contract that clients have."""
    store = experiment.simulated.stores[experiment.federation.clients[0]]
    data = store.get(KEPT)
    assert data is not None
    kept = contract_from_bytes(data).noise
    return None if kept is None else Noise(**{name: getattr(kept, name) for name in kept.__struct_fields__})


def join_midway(experiment: Experiment, newcomers: Sequence[int]) -> None:
    """Let these join at the beginning of round 1, as in a deployment, and take part from then on."""

    simulated = experiment.backend.begin_round

    def begin_round(run: Experiment, number: int) -> Collection[int]:
        simulated(run, number)
        if number == 1 and newcomers and run.algorithm.admit is not None:
            run.simulated.join(newcomers)
            run.state, _ = run.algorithm.admit(run.federation, run.state, newcomers)
        return ()

    experiment.backend = replace(experiment.backend, begin_round=begin_round)
    if experiment.config.training.rounds > 1:
        experiment.newcomers = tuple(client for client in experiment.newcomers if client not in newcomers)


def place_of(value: Observed, schedule: Schedule) -> int:
    """The request of the schedule that a value answers."""
    for place, (phase, declared) in enumerate(schedule.requests()):
        if (phase == "start") == (value.round < 0) and same_task(value.task, declared, range(-1, value.round + 1)):
            return place
    raise AssertionError(f"{value.task} was asked in round {value.round} and is not declared")


def serve(experiment: Experiment, clients: Sequence[int]) -> None:
    """Clients are scored, as in a deployment, where the protection keeps no scores from the server."""
    served, federation = experiment.algorithm.serve(experiment.state), experiment.federation
    on = clients if served.which is None or isinstance(served.which, Held) else placed(served.which, clients)
    if federation.protection.sums.hides or experiment.config.privacy.unit != "none" or not on:
        return
    held = federation.compute(served.task, served.params, which=served.which, on=on)
    federation.gather(held[experiment.config.shown_scores])


def count(experiment: Experiment, asked: Asked) -> None:
    """Add what clients have counted so far."""
    for client in experiment.simulated.online:
        store = experiment.simulated.stores[client]
        data = store.get(KEPT)
        assert data is not None
        counts = store.load(f"{KEPT}/{contract_digest(data).hex()}", Counts.from_bytes)
        assert counts is not None
        for entries in (counts.in_round, counts.lasting):
            here: dict[int, int] = defaultdict(int)
            for place, _ in entries:
                here[place] += 1
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
    rounds, joining = ([asked.task for asked in requests] for requests in (schedule.round, schedule.joining))
    assert not [task for task in joining if task in rounds], "clients could not tell a request of joining from one of a round"
    assert list(unasked(schedule, [first, *(asked for _, asked in others)], group.bound)) == []


SAMPLE_LEVEL = {"unit": "sample", "epsilon": 50.0, "delta": 1e-3, "clip_norm": 1.0, "relation": "replace_one", "samples": 14}


ALONE = ("ifca", "hypcluster", "r_dpcfl", "oracle", "shuffled")
"""These take no newcomers under sample-level privacy: a choice alone has no private form; or not at all."""


@pytest.mark.parametrize(
    "name",
    [
        name if name == "fedavg" else pytest.param(name, marks=pytest.mark.slow)
        for name, spec in ALGORITHMS.ready().items()
        if spec.sample_releases is not None
    ],
)
def test_nobody_refuses_under_sample_level_privacy(name: str) -> None:
    """Tasks have a private form there; the contract has the noise, and the tasks as they are without it."""
    given: Mapping[str, Mapping[str, Any]]
    given = {"ifca": {"k": 2}, "hypcluster": {"k": 2}, "pfedlia": {"warm_up": 1}, "crossfit": {"variant": "plain"}}
    _, asked = asked_in(name, with_keys(given.get(name, {}), privacy=SAMPLE_LEVEL, data={"newcomers": 0 if name in ALONE else 2}))
    assert asked.times


@pytest.mark.slow
@pytest.mark.parametrize("group", [pytest.param(group, id=id_of(group)) for group in groups()])
def test_nobody_refuses_over_bytes_or_where_clients_drop_out(group: Group) -> None:
    for one in group.runs:
        over = {"run": {**BASE["run"], **one.sections.get("run", {}), "transport": "bytes"}}
        asked_in(group.algorithm, replace(one, sections={**one.sections, **over}))
        few = {"training": {**one.sections.get("training", {}), "dropout": 0.15}}
        experiment, _ = made(group.algorithm, replace(one, sections={**one.sections, **few}))
        begin(experiment)
        for _ in range(experiment.config.training.rounds):
            advance(experiment)
        admit(experiment)
        assert not [code for _, _, code in experiment.federation.refusals if code == "not-agreed"]
        experiment.simulated.close()


def test_a_part_that_leaves_by_an_undeclared_operation_is_refused() -> None:
    algorithm = configured(BASE, "fedavg").algorithm_for(SCENE)
    assert algorithm.schedule is not None
    (asked,) = algorithm.schedule.round
    wider = replace(algorithm.schedule, round=(replace(asked, leaves=(("update", ("sum", "relay")),)),))
    with pytest.raises(InputError, match="its schedule has 'update' of Train leave by sum, relay, and its operations are mean"):
        replace(algorithm, schedule=wider)


def test_the_exact_influence_declares_none_and_has_one_inferred() -> None:
    """How often its clients train follows from their number."""
    config = configured(BASE, algorithm={"name": "pfedlia", "influence": "exact", "exact_rounds": 2, "warm_up": 1}, data={"newcomers": 0})
    algorithm = config.algorithm_for(SCENE)
    assert algorithm.schedule is None
    inferred = inferred_schedule(config, population=SCENE)
    (trained,) = [asked for asked in inferred.round if isinstance(asked.task, OnPart) and not asked.task.remember]
    clients = len(SCENE.clients)
    assert trained.times == 1 + clients  # the first step is the same for all, the second is without each client, or of all
    run = prepare(config, population=SCENE, contract=contract_for(config, replace(algorithm, schedule=inferred), None))
    begin(run)
    for _ in range(config.training.rounds):
        assert advance(run)["skipped"] is None
    assert not run.federation.refusals


class Lossy:
    """A `transport` on which the answer of one client is lost where clients are compared for the first time in a round."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self.lost = transport, set[int]()

    def places(self) -> Sequence[int]:
        return self._transport.places()

    def exchange(self, asks: Mapping[int, m.PartyRequest], stage: ExchangeStage) -> Mapping[int, m.Answer]:
        answers = dict(self._transport.exchange(asks, stage))
        compared = [client for client, ask in asks.items() if isinstance(ask, m.Give) and ask.operation == "gram"]
        if len(compared) > 5 and stage.round not in self.lost:
            self.lost.add(stage.round)
            del answers[max(compared)]
        return answers


@pytest.mark.parametrize("name", ["ocfl", "cfl", "stocfl", "crossfit", "flexcfl", "fesem"])
def test_a_step_that_is_taken_again_without_a_client_is_no_new_one(name: str) -> None:
    """Values that other values were made of have other numbers then; and a client whose answer was lost is met in the next round."""
    settings = {"cfl": {"eps1": 5.0, "eps2": 5.1}}.get(name, {})
    seen: list[Lossy] = []

    def watch(transport: Transport) -> Transport:
        seen.append(Lossy(transport))
        return seen[0]

    experiment = prepare(configured(BASE, algorithm={"name": name, **settings}), population=SCENE, watch=watch)
    begin(experiment)
    for _ in range(experiment.config.training.rounds):
        assert advance(experiment)["skipped"] is None
    assert seen[0].lost
    assert not experiment.federation.refusals


def test_every_algorithm_has_a_schedule_and_is_run_here() -> None:
    assert {group.algorithm for group in groups()} == set(ALGORITHMS.ready())


# --- a schedule with one thing more or less fails


def by_name(algorithm: str, **settings: Any) -> Group:
    """The first group of an algorithm with these settings."""
    return next(group for group in groups() if group.algorithm == algorithm and settings.items() <= group.runs[0].settings.items())


def less(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """The schedule without each request, each count, each leaving part, each operation and each field that varies."""
    for phase, place, declared in places_of(schedule):
        name = f"{phase}: {type(declared.task).__name__}"
        yield f"{name} left out", without(schedule, phase, place)
        if declared.times > 1 and phase != "joining":  # of joining clients allow some more, see `RETAKEN`
            yield f"{name} once less", changed(schedule, phase, place, replace(declared, times=declared.times - 1))
        for part, operations in declared.leaves:
            for operation in operations:
                kept = tuple(other for other in operations if other != operation)
                leaves = tuple((other, kept if other == part else ways) for other, ways in declared.leaves)
                yield f"{name}: {part} not by {operation}", changed(schedule, phase, place, replace(declared, leaves=leaves))
        for path in declared.varies:
            yield f"{name}: {path} fixed", changed(schedule, phase, place, replace(declared, varies=tuple(set(declared.varies) - {path})))
    if schedule.models > 1:
        yield "one model less", replace(schedule, models=schedule.models - 1)


def more(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """The schedule with one more of each: a request, a count, an operation of a part, a model."""
    for phase, place, declared in places_of(schedule):
        name = f"{phase}: {type(declared.task).__name__}"
        if declared.times != EACH_ROUND:
            yield f"{name} once more", changed(schedule, phase, place, replace(declared, times=declared.times + 1))
        for part in declared.task.parts:
            for operation in sorted({"gram", "gather", "sum", "relay"} - set(declared.operations(part))):
                leaves: Any = tuple((other, (*ways, operation) if other == part else ways) for other, ways in declared.leaves)
                wider = leaves if declared.operations(part) else (*leaves, (part, (operation,)))
                yield f"{name}: {part} also by {operation}", changed(schedule, phase, place, replace(declared, leaves=wider))
    for phase in PHASES:
        yield f"{phase}: one more", with_phase(schedule, phase, (*getattr(schedule, phase), TaskRequest(Same())))
    yield "one more model", replace(schedule, models=schedule.models + 1)


PHASES = get_args(Phase)


def places_of(schedule: Schedule) -> Iterator[tuple[str, int, TaskRequest]]:
    for phase in PHASES:
        for place, declared in enumerate(getattr(schedule, phase)):
            yield phase, place, declared


def changed(schedule: Schedule, phase: str, place: int, declared: TaskRequest) -> Schedule:
    requests = list(getattr(schedule, phase))
    requests[place] = declared
    return with_phase(schedule, phase, tuple(requests))


def with_phase(schedule: Schedule, phase: str, requests: tuple[TaskRequest, ...]) -> Schedule:
    changes: dict[str, Any] = {phase: requests}
    return replace(schedule, **changes)


def without(schedule: Schedule, phase: str, place: int) -> Schedule:
    requests = getattr(schedule, phase)
    return with_phase(schedule, phase, (*requests[:place], *requests[place + 1 :]))


def moved_after(asked: Asked, last: int) -> Asked:
    """What was asked, where a request was added at this place."""
    times = {place + (place >= last): count for place, count in asked.times.items()}
    left = {place + (place >= last): ways for place, ways in asked.left.items()}
    return Asked(defaultdict(int, times), defaultdict(set, left), asked.models, asked.rounds)


MUTATED = [by_name("fesem"), by_name("fedproto"), by_name("pfedlia", mode="peer"), by_name("ifca", averaging="gradient"), by_name("local")]


@pytest.mark.parametrize("group", [pytest.param(group, id=id_of(group)) for group in MUTATED])
def test_one_thing_more_is_never_asked(group: Group) -> None:
    """Every declared thing is reached, so that what is added is not. Requests are compared by their places, which additions keep."""
    asked = [asked_in(group.algorithm, one) for one in group.runs]
    schedule, phases = asked[0][0], [phase for phase, _ in asked[0][0].requests()]
    tried = 0
    assert not list(unasked(schedule, [one for _, one in asked]))
    for name, wider in more(schedule):
        grown = next((phase for phase in PHASES if len(getattr(wider, phase)) > len(getattr(schedule, phase))), None)
        last = len(phases) if grown is None else sum(phases.count(phase) for phase in PHASES[: PHASES.index(grown) + 1])
        assert list(unasked(wider, [moved_after(one, last) for _, one in asked])), f"{name}: is not noticed"
        tried += 1
    assert tried > len(phases)


@pytest.mark.slow
@pytest.mark.parametrize("group", [pytest.param(group, id=id_of(group)) for group in groups()])
def test_one_thing_less_is_refused_to_an_honest_server(group: Group) -> None:
    experiment, _ = made(group.algorithm, group.runs[0])
    schedule = experiment.algorithm.schedule
    assert schedule is not None
    experiment.simulated.close()
    for name, narrower in less(schedule):
        if not (group.bound and name == "one model less"):
            assert any(is_refused(group.algorithm, one, narrower) for one in group.runs), f"{name}: nobody refused"


def test_one_thing_less_is_refused_of_some_algorithms() -> None:
    for group in MUTATED[:2]:
        test_one_thing_less_is_refused_to_an_honest_server(group)


def is_refused(algorithm: str, one: Run, schedule: Schedule) -> bool:
    """Whether clients refuse anything in a run under another schedule than the algorithm's, or an error ends it."""
    try:
        asked_in(algorithm, one, schedule)
    except (AssertionError, InputError, ProtocolError, TrainingDiverged):
        return True
    return False


# --- inferred


@pytest.mark.parametrize("name", ["stocfl", "fedproto", "cfl", "private_clusters", "pfedlia", "fedfomo"])
def test_an_inferred_schedule_is_enough_for_the_same_run(name: str) -> None:
    one = by_name(name).runs[0]
    experiment, watched = made(name, one, contract=None)
    begin(experiment)
    for _ in range(experiment.config.training.rounds):
        advance(experiment)
    admit(experiment)
    train = experiment.config.train_for(one.scene)
    assert train.lr_decay < 1
    inferred = observed_schedule(watched.observed, train)
    declared = experiment.algorithm.schedule
    assert declared is not None
    assert {type(asked.task) for _, asked in inferred.requests()} <= {type(asked.task) for _, asked in declared.requests()}
    assert not any("lr" in path or path == "train" for _, asked in inferred.requests() for path in asked.varies)
    assert asked_in(name, one, replace(inferred, serving=declared.serving), midway=False)[1].times


@pytest.mark.parametrize("protection", [{}, HAAR], ids=["none", "haar"])
def test_a_client_lost_between_a_check_and_its_comparison_changes_no_request(protection: Mapping[str, Any]) -> None:
    """The step is taken again without the client. The others are asked what they agreed to, and the changed client moves."""
    scene = population(groups=2, clients_per_group=10, samples=20, test_samples=2, shape=(4,), separation=4.0)
    turns = replace(scene, changes=(DataChange(1, 0, 1, replace(scene.clients[1], id=0)),))
    training = {**BASE["training"], "rounds": 2}
    experiment, _ = made(
        "crossfit", with_keys({"recheck_every": 1}, turns, protection=protection, data={"newcomers": 0}, training=training)
    )
    begin(experiment)
    advance(experiment)
    federation, simulated = experiment.federation, experiment.simulated
    assert simulated is not None
    compare = federation.gram

    def without_one(*given: Any, **options: Any) -> Any:
        simulated.transport.online.discard(7)
        return compare(*given, **options)

    federation.gram = without_one  # type: ignore[method-assign]
    row = advance(experiment)
    assert (row["placements"], row["lost"]) == ({"changed": [0], "moved": [[0, 0, 1]]}, [7])
    assert not federation.refusals
