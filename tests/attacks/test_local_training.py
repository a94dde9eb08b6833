"""What clients of a run train, as attacks imitate it, against what they did train: the recorded updates themselves."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attack_scenes import case, config

from cflpriv.attacks import ATTACKS, property_inference
from cflpriv.attacks.label_inference import guess, less_known, public_model, score_l1, steps_in
from cflpriv.attacks.local_training import LocalTraining, local_training
from cflpriv.engine import Streams, TaskInput
from cflpriv.models import Model
from cflpriv.training import Train
from cflpriv.types import ClientData

TRAINED: list[dict[str, Any]] = [
    {"name": "fedavg"}, {"name": "pacfl", "k": 2}, {"name": "ifca", "k": 2}, {"name": "fesem", "k": 2}, {"name": "fednova"},
    {"name": "per_fedavg", "alpha": 0.05, "beta": 0.02}, {"name": "fedprox", "mu": 1.0},
    {"name": "ditto", "lam": 1.0}, {"name": "stocfl", "tau": 0.2, "lam": 1.0}, {"name": "scaffold"},
    {"name": "one_shot", "k": 2, "local_epochs": 3}, {"name": "pfedlia", "warm_up": 1},
    {"name": "pfedlia", "mode": "peer", "warm_up": 1, "scores": "sign"}, {"name": "cfl", "variant": "authors"},
]  # fmt: skip


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
            local = local_training(made, model, step.round, "anchor" in step.beside)
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


def test_what_is_not_modelled_is_said() -> None:
    for algorithm, words in (({"name": "scaffold"}, "corrections"), ({"name": "fednova"}, "numbers of steps"), ({"name": "fedavg"}, "")):
        seen = case(config(algorithm, {"sum": "secagg"}, training={"rounds": 2}, data={"clients": 8, "samples_per_client": 20}))
        for cell in ATTACKS["label_inference"].cells(seen)[0]:
            assert ("not modelled" in cell.note) == bool(words), cell.note
            assert words in cell.note


@pytest.mark.parametrize("algorithm", [{"name": "per_fedavg", "beta": 0.02}, {"name": "scaffold"}, {"name": "pfedlia", "warm_up": 9}])
def test_pretended_clients_take_the_steps_of_the_run(algorithm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Property inference's own clients, given the real clients' samples, send what these sent at first."""
    settings = {"rounds": 4, "epochs": 2, "batch_size": 0, "participation": 0.5}
    made = config(algorithm, training=settings, data={"clients": 8, "samples_per_client": 20}, model={"dtype": "float64"})
    seen = case(made)
    samples = [seen.truth.data[client] for client in range(8)]
    monkeypatch.setattr(property_inference, "pretended", lambda *told: (samples, np.zeros(8)))
    several = steps_in(seen.view, public_model(seen.prior).dimension)
    late = [steps[0] for steps in several.values() if steps[0].round > 0]
    assert late
    for step in (next(iter(several.values()))[0], late[0]):
        mine = property_inference.pretended_updates(property_inference.Statement("bold", 0.0, 0.5), seen.prior, 8, step)
        assert mine.features[step.members[0]] == pytest.approx(step.update, abs=1e-9)
