"""What clients of a run train, as attacks imitate it, against what they did train: the recorded updates themselves."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attack_scenes import case, config

from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.interface import Algorithm, AlgorithmSpec, Served
from cflpriv.algorithms.pfedlia.influence import OnPart
from cflpriv.algorithms.scaffold import TrainControlled
from cflpriv.algorithms.shared.around import AroundTraining
from cflpriv.algorithms.shared.choosing import PickAndTrain
from cflpriv.attacks import ATTACKS, load_view
from cflpriv.attacks.adversary import recorded_messages
from cflpriv.attacks.evidence.local_training import LocalTraining, trainings_in
from cflpriv.attacks.evidence.updates import ClientStep, asked_in, less_known, public_model, steps_in
from cflpriv.attacks.figures.leakage import Case
from cflpriv.attacks.labels.label_inference import guess, score_l1, shares_of
from cflpriv.attacks.properties import property_clients
from cflpriv.attacks.properties.property_clients import pretended_updates
from cflpriv.attacks.properties.property_statements import Statement
from cflpriv.contract.handles import Shared
from cflpriv.contract.operations import Federation
from cflpriv.contract.transcript import RoundRecord, Transcript, settings_of
from cflpriv.engine import Result, Streams, Task, TaskInput
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.experiments import run_experiment
from cflpriv.federation.task_encoding import task_of
from cflpriv.tasks.evaluation import Evaluate, Losses
from cflpriv.tasks.training import Gradient, Train
from cflpriv.types import Array, ClientData

pytestmark = pytest.mark.filterwarnings("ignore:algorithm .* will form no clusters")
"""The steps before clusters are formed are what is tested."""

TRAINED: list[dict[str, Any]] = [
    {"name": "fedavg"}, {"name": "pacfl", "k": 2}, {"name": "ifca", "k": 2}, {"name": "fesem", "k": 2}, {"name": "fednova"},
    {"name": "per_fedavg", "alpha": 0.05, "beta": 0.02}, {"name": "fedprox", "mu": 1.0},
    {"name": "ditto", "lam": 1.0}, {"name": "stocfl", "tau": 0.2, "lam": 1.0}, {"name": "scaffold"},
    {"name": "one_shot", "k": 2, "local_epochs": 3}, {"name": "pfedlia", "warm_up": 1},
    {"name": "pfedlia", "mode": "peer", "warm_up": 1, "scores": "sign"}, {"name": "cfl", "variant": "authors"},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:algorithm .* will form no clusters")
@pytest.mark.parametrize("algorithm", TRAINED, ids=lambda one: one.get("mode", one["name"]))
def test_updates_are_those_of_the_training_that_attacks_imitate(algorithm: dict[str, Any]) -> None:
    """In full batches nothing is drawn: a client's own samples, trained as attackers train theirs, give every update it sent."""
    decay = {} if algorithm["name"] == "cfl" else {"lr_decay": 0.8}
    settings = {"rounds": 4, "epochs": 4, "batch_size": 0, "lr": 0.1, "momentum": 0.5, "participation": 0.8} | decay
    data = {"clients": 8, "samples_per_client": 20, "groups": [[0, 1, 2], [5, 6, 7, 8]]}
    made = config(algorithm, training=settings, data=data, model={"dtype": "float64"})
    seen = case(made)
    model = public_model(seen.prior)
    sent = steps_in(seen.view, model.dimension)
    rounds = {step.round for steps in sent.values() for step in steps}
    assert len(rounds) >= 3
    for client, steps in sent.items():
        x, y = seen.truth.data[client]
        freed = less_known(steps, seen.prior, model)
        assert len(freed) == len(steps)
        for step in freed:
            local = asked_in(step)
            given = {"model": step.start} | {name: vector for name, vector in step.beside.items() if name == "anchor"}
            if "control" in step.beside:
                assert step.known is not None
                given["correction"] = -step.known / local.carried(len(y))
            own = local.part(ClientData(client, x, y, x[:0], y[:0]))
            assert len(own.y_train) == local.samples(len(y))
            update = local.train.run(TaskInput(own, given, {}, Streams(0, 0, client)))["update"]
            assert update == pytest.approx(step.update, abs=1e-9), (client, step.round)


@pytest.mark.parametrize(("momentum", "prox"), [(0.0, 0.0), (0.0, 2.0), (0.5, 0.0), (0.9, 2.0)])
def test_a_constant_gradient_carries_as_far_as_training_does(momentum: float, prox: float) -> None:
    """Oracle: torch's SGD on a loss whose gradient is 1, and the geometric sum where there is no momentum."""
    train = Train(Model("linear", (4,), 2), 3, 10, 0.1, momentum, prox=prox)
    moved = LocalTraining(train, 0.25).carried(25)  # 19 samples: 2 batches in each of 3 passes
    point = torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.SGD([point], 0.1, momentum)
    for _ in range(6):
        optimiser.zero_grad()
        point.grad = -1 + prox * point.detach()
        optimiser.step()
    assert moved == pytest.approx(point.item())
    if prox and not momentum:
        assert moved == pytest.approx((1 - (1 - 0.1 * prox) ** 6) / prox)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "worst"),
    [
        ({"name": "per_fedavg", "alpha": 0.01, "beta": 0.02}, 0.15), ({"name": "scaffold"}, 0.2), ({"name": "fedprox", "mu": 1.0}, 0.3),
        ({"name": "pfedlia", "mode": "peer", "warm_up": 1, "scores": "sign"}, 0.2), ({"name": "stocfl", "lam": 1.0}, 0.2),
    ],
)  # fmt: skip
def test_labels_are_read_from_every_round(algorithm: dict[str, Any], worst: float) -> None:
    """FedAvg's updates of such a run give the histogram to .15 (of 1.5 without a view); others' do not hide more by taking other steps."""
    made = config(algorithm, training={"rounds": 4, "lr": 0.1, "epochs": 2}, data={"samples_per_client": 40})
    seen = case(made)
    model = public_model(seen.prior)
    clients = sorted(steps_in(seen.view, model.dimension))
    for rounds in (1, 5):
        found = guess(seen.view, seen.prior, clients, model, rounds)
        assert score_l1(found, seen.truth, clients).mean() < worst


def test_a_turn_that_was_not_recorded_makes_a_step_unknown() -> None:
    """SCAFFOLD's correction needs the client's last turn: without it a later update is not read as if there were no correction."""
    made = config({"name": "scaffold"}, training={"rounds": 3}, data={"clients": 8, "samples_per_client": 20})
    seen = case(made)
    model = public_model(seen.prior)
    steps = steps_in(seen.view, model.dimension)[0]
    assert [step.round for step in less_known(steps[1:], seen.prior, model)] == []
    assert [step.round for step in less_known([steps[0], steps[2]], seen.prior, model)] == [0]
    late = replace(seen, view=replace(seen.view, messages=tuple(one for one in seen.view.messages if one.round > 0)))
    assert "not the turns before them" in ATTACKS["label_inference"].cells(late)[0][0].note


@pytest.mark.slow
def test_what_is_not_modelled_is_reported() -> None:
    for algorithm, words in (({"name": "scaffold"}, "corrections"), ({"name": "fednova"}, "numbers of steps"), ({"name": "fedavg"}, "")):
        seen = case(config(algorithm, {"sum": "secagg"}, training={"rounds": 2}, data={"clients": 8, "samples_per_client": 20}))
        for cell in ATTACKS["label_inference"].cells(seen)[0]:
            assert ("not modelled" in cell.note) == bool(words), cell.note
            assert words in cell.note


@pytest.mark.filterwarnings("ignore:algorithm .* will form no clusters")
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({"name": "per_fedavg", "beta": 0.02}, marks=pytest.mark.slow),
        {"name": "scaffold"},
        pytest.param({"name": "pfedlia", "warm_up": 9}, marks=pytest.mark.slow),
    ],
)
def test_pretended_clients_take_the_steps_of_the_run(algorithm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Property inference's own clients, given the real clients' samples, send what these sent at first."""
    settings = {"rounds": 4, "epochs": 2, "batch_size": 0, "participation": 0.5}
    made = config(algorithm, training=settings, data={"clients": 8, "samples_per_client": 20}, model={"dtype": "float64"})
    seen = case(made)
    samples = [seen.truth.data[client] for client in range(8)]
    monkeypatch.setattr(property_clients, "simulated_data", lambda *told: (samples, np.zeros(8)))
    several = steps_in(seen.view, public_model(seen.prior).dimension)
    late = [steps[0] for steps in several.values() if steps[0].round > 0]
    assert late
    for step in (next(iter(several.values()))[0], late[0]):
        mine = pretended_updates(Statement("bold", 0.0, 0.5), seen.prior, 8, step)
        assert mine.features[step.members[0]] == pytest.approx(step.update, abs=1e-9)


# --- algorithms that nobody here knows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainTwice(AroundTraining):
    """A task of a user's own file: what it does to updates is not known here."""

    def after(self, given: TaskInput, inner: TaskInput, result: Result) -> Result:
        return dict(result) | {"update": 2 * np.asarray(result["update"])}


def own_rate(make: Callable[[Train], Task], beside: dict[str, Array]) -> Callable[..., Algorithm]:
    """FedAvg of a user, by tasks of its own at its own rate, momentum and epochs, whatever [training] says."""

    def algorithm(train: Train, *, seed: int = 0) -> Algorithm:
        task = make(replace(train, lr=0.02, momentum=0.5, epochs=3))

        def rounded(federation: Federation, state: Shared) -> tuple[Shared, RoundRecord]:
            held = federation.compute(task, {"model": state, **{name: Shared(value) for name, value in beside.items()}})
            (mean,) = federation.mean(held["update"])
            assert mean is not None
            return state + mean.parts["update"], RoundRecord(federation.round, federation.clients)

        return Algorithm(
            "mine", ("mean",), lambda federation: Shared(train.model.init(seed)), rounded,
            lambda state: Served(Evaluate(train.model), {"model": state}), lambda federation, state, newcomers: (state, {}),
        )  # fmt: skip

    return algorithm


def seen_of_mine(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Train], Task] = lambda train: train, protection: str = "none", **beside: Array
) -> Case:
    monkeypatch.setitem(ALGORITHMS, "mine", AlgorithmSpec("mine", own_rate(make, beside), "a user's"))
    return case(config({"name": "mine"}, {"sum": protection}, data={"clients": 8, "samples_per_client": 20}, training={"lr": 0.3}))


def test_an_unknown_algorithm_is_attacked_at_the_rate_that_it_trained_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing knows its name: the recorded settings decide, and at [training]'s rate the same updates would be misread."""
    seen = seen_of_mine(monkeypatch)
    model = public_model(seen.prior)
    steps = steps_in(seen.view, model.dimension)
    for client, (step, *_) in steps.items():
        x, y = seen.truth.data[client]
        train = asked_in(step).train
        assert (train.lr, train.momentum, train.epochs) == (0.02, 0.5, 3)
        given = TaskInput(ClientData(client, x, y, x[:0], y[:0]), {"model": step.start.astype(np.float32)}, {}, Streams(0, 0, client))
        assert train.run(given)["update"] == pytest.approx(step.update, abs=1e-5)
    clients = sorted(steps)
    found = guess(seen.view, seen.prior, clients, model, 2)
    assert score_l1(found, seen.truth, clients).mean() < 0.2
    assert seen.prior.config is not None
    wrong = LocalTraining(seen.prior.config.train_on(model))
    rates = [np.mean([labels_of(step, seen, client, one) for client, (step, *_) in steps.items()]) for one in (None, wrong)]
    assert rates[0] < 0.2 < 0.5 < rates[1]
    cells = {cell.metric: cell for cell in ATTACKS["label_inference"].cells(seen)[0]}
    assert cells["histogram_l1"].status == "leaks"


def labels_of(step: ClientStep, seen: Case, client: int, local: LocalTraining | None) -> float:
    """The error of one update's label shares by rate × steps, as where a client may have all labels; of the training that was asked for or
    of another one."""
    model = public_model(seen.prior)
    shares = shares_of(step if local is None else replace(step, local=local), seen.prior, model, model.classes)
    return float(np.abs(shares - seen.truth.histogram(client)).sum())


@pytest.mark.slow
def test_what_an_unknown_task_does_beside_training_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `Train` is found, but nobody can say what else is in an update: means carry a caveat, and colluders take nothing off."""
    (local,) = trainings_in(seen_of_mine(monkeypatch, TrainTwice).view).all
    assert (local.train.lr, local.alone) == (0.02, False)
    assert "TrainTwice" in local.beyond
    secure = seen_of_mine(monkeypatch, TrainTwice, "secagg")
    notes = [cell.note for cell in ATTACKS["label_inference"].cells(secure)[0]]
    assert all("not modelled" in note and "TrainTwice" in note for note in notes)


def test_what_clients_are_sent_beside_the_model_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_of_mine(monkeypatch, correction=np.zeros(public_model(case(config({"name": "fedavg"})).prior).dimension, np.float32))
    (local,) = trainings_in(seen.view).all
    assert not local.alone
    assert "'correction'" in local.beyond


def test_a_task_is_recorded_with_all_its_settings() -> None:
    """Clients were sent the task: what is recorded is what they were sent, and makes the same task again."""
    model = Model("linear", (4,), 3, mean=(0.5,))
    for task in (
        Train(model, lr=0.03, momentum=0.5, frozen=("1.bias",)), OnPart(Train(model, prox=0.5), 0.2, seed=7), TrainControlled(Train(model)),
        PickAndTrain(Losses(model), Gradient(model), "gradient", ((0, 3),)),
    ):  # fmt: skip
        assert task_of(settings_of(task)) == task
    free = Model("linear", (4,), 3, factory=lambda: torch.nn.Linear(4, 3))
    assert settings_of(Train(free))["model"]["factory"] == {"": "function"}


def test_settings_do_not_count_as_traffic(tmp_path: Path) -> None:
    """They are context of messages: sizes are those of the arrays, and a run folder gives the settings back."""
    made = config({"name": "pfedlia", "warm_up": 1, "validation": 0.3}, data={"clients": 8, "samples_per_client": 20})
    run_experiment(made, tmp_path / "run")
    asked = [one for one in recorded_messages(tmp_path / "run") if one.kind == "parameters"]
    assert asked
    for message in asked:
        assert message.bytes_each == sum(part.nbytes for part in (message.payload or {}).values())
        assert message.context["settings"][""] == message.context["task"]
    (local, *_) = trainings_in(load_view(tmp_path / "run")).all
    assert (local.held_back, local.seed) == (0.3, made.run.seed)


def test_folders_that_do_not_say_how_clients_trained_are_refused(tmp_path: Path) -> None:
    for context in ({"task": "Train"}, {"task": "Train", "settings": {"": "Train"}}):
        made = Transcript("full")
        given = {"model": np.zeros(3)}
        made.add(0, "compute", "parameters", "server", "clients", [0], given, readers=("server", "clients"), context=context)
        made.write(tmp_path / str(len(context)) / "transcript")
    assert len(recorded_messages(tmp_path / "2")) == 1
    with pytest.raises(InputError, match="an earlier version wrote it"):
        recorded_messages(tmp_path / "1")
    (tmp_path / "1" / "environment.json").write_text('{"cflpriv": "0.0.9"}', encoding="utf-8")
    with pytest.raises(InputError, match=r"earlier version \(0\.0\.9\) wrote it"):
        recorded_messages(tmp_path / "1")
