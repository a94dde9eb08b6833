"""Audits of other systems: states as torch and Flower have them, batch normalisation, figures on a plain torch loop, refusals."""

import io
import runpy
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkout import ROOT
from foreign_scenes import SETTINGS, State, audited, dealt, network, scene, trained
from torch import nn

from cflpriv.attacks import LoopSettings, Update, audit_updates
from cflpriv.attacks.foreign.foreign_simulation import train_again
from cflpriv.attacks.foreign.foreign_states import ForeignModel, batch_statistics, head_bias, read_state, vector_of
from cflpriv.attacks.foreign.foreign_system import UpdateRecord
from cflpriv.attacks.labels.label_readings import class_probabilities
from cflpriv.errors import InputError

# --- states ---------------------------------------------------------------------------------------------------------------------------


def as_flower(state: State) -> Any:
    """What Flower's `ndarrays_to_parameters` makes."""
    tensors = []
    for one in state.values():
        data = io.BytesIO()
        np.save(data, one.numpy(), allow_pickle=False)
        tensors.append(data.getvalue())
    return SimpleNamespace(tensors=tensors, tensor_type="numpy.ndarray")


@pytest.mark.parametrize(
    "form",
    [
        lambda state: {name: one.numpy() for name, one in state.items()}, lambda state: [one.numpy() for one in state.values()],
        lambda state: list(state.values()), as_flower,
        lambda state: {name: one for name, one in state.items() if not name.endswith("num_batches_tracked")},
        lambda state: {name: SimpleNamespace(numpy=one.numpy) for name, one in state.items()},
    ],
)  # fmt: skip
def test_every_form_of_a_state_is_read_alike(form: Callable[[State], Any]) -> None:
    model = ForeignModel(network(), (1, 8, 8), 10)
    state = model.module.state_dict()
    read, plain = (read_state(one, model, "client 0") for one in (form(state), state))
    assert list(read.parameters) == ["0.weight", "1.weight", "1.bias", "4.weight", "4.bias"]
    assert list(read.statistics) == ["1.running_mean", "1.running_var"]
    for mine, other in ((read.parameters, plain.parameters), (read.statistics, plain.statistics)):
        assert all(np.array_equal(mine[name], other[name]) for name in other)


def test_parameters_alone_are_read_without_statistics() -> None:
    model = ForeignModel(network(), (1, 8, 8), 10)
    read = read_state([one.detach().numpy() for one in model.module.parameters()], model, "client 0")
    assert list(read.parameters) == list(model.shapes)
    assert not read.statistics


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: {k: v for k, v in s.items() if k != "4.bias"}, "client 0, after: has no '4.bias'"),
        (lambda s: s | {"5.bias": torch.zeros(3)}, "client 0, after: has '5.bias', which the model's"),
        (lambda s: s | {"4.bias": torch.zeros(9)}, r"client 0, after: '4.bias': has shape \(9,\), expected \(10,\)"),
        (lambda s: s | {"4.bias": torch.zeros(10, dtype=torch.int64)}, "client 0, after: '4.bias': expected dtype kind in 'f', got int64"),
        (lambda s: s | {"4.bias": torch.full((10,), torch.nan)}, r"client 0, after: '4.bias': value at index \(0,\) is nan"),
        (lambda s: s | {"1.running_var": torch.full((6,), torch.inf)}, r"client 0, after: '1.running_var': value at index \(0,\) is inf"),
        (lambda s: s | {"4.bias": "ten zeros"}, "client 0, after: '4.bias': "),
        (lambda s: list(s.values())[:-2], r"client 0, after: has 6 arrays, but the model's state_dict\(\) has 8 \(5 of them parameters\)"),
        (lambda s: SimpleNamespace(tensors=[b"no array"]), "client 0, after: cannot be read as Flower Parameters"),
        (lambda s: 3, "client 0, after: expected a state_dict, a list of arrays or Flower Parameters, got int"),
    ],
)  # fmt: skip
def test_a_bad_state_is_refused_by_client_and_array(change: Callable[[State], Any], said: str) -> None:
    model, (one, *_), auxiliary = scene()
    with pytest.raises(InputError, match=said):
        audit_updates(model, [replace(one, after=change(dict(one.after)))], auxiliary, SETTINGS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": None}, "client 0: x and y go together; x is missing"),
        ({"y": torch.full((30,), 12)}, "client 0: y has 12; labels are 0 to 9"),
        ({"x": torch.zeros(30, 1, 7, 7)}, r"client 0: x has samples of shape \(1, 7, 7\), expected \(1, 8, 8\)"),
        ({"y": torch.zeros(29, dtype=torch.int64)}, r"client 0: x has shape .* and y \(29,\)"), ({"samples": 0}, "client 0: samples = 0"),
        ({"outside": torch.zeros(3)}, "client 0, outside: "), ({"labels": 1.5}, "client 0: labels = 1.5: expected an integer"),
    ],
)  # fmt: skip
def test_bad_samples_are_refused_by_client(change: Mapping[str, Any], said: str) -> None:
    model, (one, *_), auxiliary = scene()
    with pytest.raises(InputError, match=said):
        audit_updates(model, [replace(one, **change)], auxiliary, SETTINGS)


def test_bad_settings_models_and_attacks_are_refused() -> None:
    model, updates, auxiliary = scene()
    for change, said in (({"lr": 0}, "lr = 0"), ({"epochs": 0}, "epochs = 0"), ({"batch_norm": "off"}, "batch_norm = 'off'")):
        with pytest.raises(InputError, match=said):
            replace(SETTINGS, **change)
    with pytest.raises(InputError, match="updates: there are none"):
        audit_updates(model, [], auxiliary)
    with pytest.raises(InputError, match="attack 'dp_audit': does not read updates of other systems; known are label_inference"):
        audit_updates(model, updates, auxiliary, attacks=["dp_audit"])
    with pytest.raises(
        InputError, match=r"head 'fc': is no layer with a weight \(10, …\) and a bias \(10,\); parameters end with .*4\.bias"
    ):
        audit_updates(model, updates, auxiliary, head="fc")
    with pytest.raises(InputError, match=r"model: fails on auxiliary samples of shape \(1, 8, 8\) \(RuntimeError"):
        audit_updates(nn.Linear(3, 2), updates, auxiliary)
    with pytest.raises(InputError, match=r"model: gives \(2, 1, 8, 2\) for 2 samples; expected scores"):
        audit_updates(nn.Linear(8, 2), updates, auxiliary)


def test_a_state_that_was_not_copied_is_noticed() -> None:
    model, (one, *_), auxiliary = scene()
    with pytest.raises(InputError, match=r"client 0: before and after are one memory; state_dict\(\) refers to the model's own tensors"):
        audit_updates(model, [replace(one, before=model.state_dict(), after=model.state_dict())], auxiliary, SETTINGS)


# --- batch normalisation ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False), nn.InstanceNorm2d(6, track_running_stats=True)])
def test_the_forms_of_a_model_are_its_modes(norm: nn.Module) -> None:
    """Oracle: torch's own module in training and in evaluation mode."""
    module = network()
    module[1] = norm
    for name, one in module.named_buffers():
        if "tracked" not in name:
            one.copy_(torch.rand(one.shape) + 0.5)
    x = torch.rand(7, 1, 8, 8)
    model = ForeignModel(deepcopy(module), (1, 8, 8), 10)
    state = read_state(module.state_dict(), model, "")
    with torch.no_grad():
        expected = {"evaluated": module.eval()(x), "trained": module.train()(x)}
    for form, name in ((model.evaluated, "evaluated"), (model.frozen(state.statistics), "evaluated"), (model.in_training, "trained")):
        with torch.no_grad():
            made = form.load(vector_of(form, state))(form.inputs(x.numpy()))
        torch.testing.assert_close(made.cpu(), expected[name], rtol=1e-4, atol=1e-5)


def test_samples_in_another_range_reach_the_module_as_they_are() -> None:
    model, updates, (x, y) = scene()
    shifted = [replace(one, x=None if one.x is None else 4 * one.x - 1) for one in updates]
    first = network()
    moved = deepcopy(first)
    with torch.no_grad():  # the same function of 4 x − 1
        next(moved.parameters()).div_(4)
    lifted = nn.Sequential(_Shift(), *moved)
    form = ForeignModel(lifted, (1, 8, 8), 10, -1.0, 3.0).in_training
    plain = ForeignModel(first, (1, 8, 8), 10).in_training
    made, other = (
        class_probabilities(one, vector_of(one, read_state(net.state_dict(), ForeignModel(net, (1, 8, 8), 10), "")), x.numpy(), y.numpy())
        for one, net in ((form, lifted), (plain, first))
    )
    np.testing.assert_allclose(made, other, atol=1e-4)
    cells = audit_updates(model, shifted, (4 * x - 1, y), SETTINGS, attacks=["membership"])
    assert all(cell.value is not None for cell in cells)


class _Shift(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize("steps", [1, 5])
def test_batch_statistics_are_what_the_steps_added(steps: int) -> None:
    module = network()
    model = ForeignModel(deepcopy(module), (1, 8, 8), 10)
    x = torch.rand(9, 1, 8, 8)
    before = read_state(module.state_dict(), model, "")
    with torch.no_grad():
        for _ in range(steps):
            module.train()(x)
        inner = module[0](x)
    after = read_state(module.state_dict(), model, "")
    found = batch_statistics(model, before, after, steps)
    np.testing.assert_allclose(found["1.running_mean"], inner.mean((0, 2, 3)).numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["1.running_var"], inner.transpose(0, 1).flatten(1).var(1).numpy(), rtol=1e-4)
    unknown = batch_statistics(model, before, after, None)
    np.testing.assert_array_equal(unknown["1.running_mean"], after.statistics["1.running_mean"])


@pytest.mark.slow
def test_a_counter_of_batches_is_no_parameter() -> None:
    _, updates, _ = scene()
    plain = audited(attacks=["label_inference"])
    counted = [replace(one, after={**one.after, "1.num_batches_tracked": torch.tensor(10**9)}) for one in updates]
    assert audited(counted, attacks=["label_inference"]) == plain


# --- the head -------------------------------------------------------------------------------------------------------------------------


def test_the_head_is_the_last_layer_of_its_size() -> None:
    shapes = {"a.weight": (10, 4), "a.bias": (10,), "n.weight": (10,), "n.bias": (10,), "fc.weight": (10, 10), "fc.bias": (10,)}
    assert head_bias(shapes, 10) == "fc.bias"
    assert head_bias(shapes, 10, "a") == "a.bias"
    assert head_bias({"weight": (3, 4), "bias": (3,)}, 3) == "bias"
    with pytest.raises(InputError, match="layers a, fc may each be the head; name one as head"):
        head_bias(shapes, 10, ordered=False)
    with pytest.raises(InputError, match=r"head 'n': is no layer"):
        head_bias(shapes, 10, "n")


def test_labels_are_learned_from_rows_of_a_head_without_a_bias() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = network()
        model[4] = nn.Linear(216, 10, bias=False)
        clients, auxiliary = dealt(30, 6)
        updates = [Update(model.state_dict(), trained(model, one, SETTINGS), *one) for one in clients]
    cells = {cell.metric: cell for cell in audit_updates(model, updates, auxiliary, SETTINGS, attacks=["label_inference", "membership"])}
    assert cells["label_set_accuracy"].value == 1.0
    assert "learned from simulated clients that train with sgd" in cells["label_set_accuracy"].note
    assert cells["own_model_loss_auc"].value is not None


# --- figures --------------------------------------------------------------------------------------------------------------------------


def test_labels_and_members_leak_from_a_plain_loop() -> None:
    cells = audited()
    for metric in ("histogram_l1", "label_set_accuracy", "update_gradients_auc"):
        assert cells[metric].status == "leaks", cells[metric].line()
        assert cells[metric].reference is None
        assert "no unprotected twin" in cells[metric].note
    assert cells["histogram_l1"].value is not None
    assert cells["histogram_l1"].value < 0.2
    assert cells["image_psnr_db"].status == "not_attempted"
    assert not {"at_baseline"} & {cell.status for cell in cells.values()}


def test_a_single_step_shows_members_and_batch_statistics() -> None:
    """Those who take one step on all samples add one gradient of each, and exactly their own statistics."""
    how = LoopSettings(lr=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        model = network()
        clients, auxiliary = dealt(20, 8, 5)
        updates = [Update(model.state_dict(), trained(model, one, how), *one) for one in clients]
    cells = {cell.metric: cell for cell in audit_updates(model, updates, auxiliary, how, attacks=["membership", "batch_statistics"])}
    for metric in ("update_gradients_auc", "activation_mean_error"):
        assert cells[metric].status == "leaks", cells[metric].line()
    assert cells["activation_mean_error"].value == pytest.approx(0, abs=1e-3)


def test_parameters_alone_are_audited_under_the_statistics_of_auxiliary_samples() -> None:
    model, updates, _ = scene()
    names = [name for name, _ in model.named_parameters()]
    bare = [replace(one, before=[one.before[name] for name in names], after=[one.after[name] for name in names]) for one in updates]
    cells = audited(bare)
    assert cells["histogram_l1"].status == "leaks", cells["histogram_l1"].line()
    assert "normalised by the statistics of these samples" in cells["histogram_l1"].note
    assert cells["update_gradients_auc"].value is not None
    assert cells["activation_mean_error"].status == "not_applicable"


@pytest.mark.parametrize("optimizer", ["AdamW", "of our own"])
def test_labels_of_any_optimiser_are_read(optimizer: str) -> None:
    """Updates of AdamW, of parts of which nothing moved: by simulated clients; of an optimiser that torch does not have by their order."""
    model, known, auxiliary = scene()
    how, updates = replace(SETTINGS, optimizer=optimizer, lr=0.01), []
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for one in known:
            own = deepcopy(model).train()
            for name, parameter in own.named_parameters():
                parameter.requires_grad_(name != "0.weight")
            optimiser = torch.optim.AdamW([parameter for parameter in own.parameters() if parameter.requires_grad], lr=0.01)
            for batch in torch.split(torch.randperm(len(one.y)).repeat(2), 12):
                optimiser.zero_grad()
                nn.functional.cross_entropy(own(one.x[batch]), one.y[batch]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            updates.append(replace(one, after=own.state_dict()))
    cells = {cell.metric: cell for cell in audit_updates(model, updates, auxiliary, how, attacks=["label_inference", "membership"])}
    assert cells["label_set_accuracy"].value == 1.0
    assert cells["label_set_accuracy"].status == "leaks"
    assert ("learned from simulated clients" in cells["label_set_accuracy"].note) == (optimizer == "AdamW")
    assert cells["update_gradients_auc"].value is not None


def test_what_does_not_move_stays_fixed_in_simulated_clients() -> None:
    """One step of SGD on the whole batch is a gradient: the same as torch's own, and zero for what the clients' updates do not move."""
    model, (one, *_), _ = scene()
    foreign = ForeignModel(model, (1, 8, 8), 10)
    state = read_state(one.before, foreign, "client 0")
    how = LoopSettings(lr=0.1, batch_norm="eval")
    moved = train_again(foreign, UpdateRecord(0, state, state, how, 30, 2), one.x.numpy(), one.y.numpy(), ["4.weight", "4.bias"])
    own = deepcopy(model).eval()
    slopes = torch.autograd.grad(nn.functional.cross_entropy(own(one.x), one.y), list(own.parameters()))
    assert set(moved) == {"4.weight", "4.bias"}
    assert moved["4.bias"] == pytest.approx(-0.1 * slopes[-1].numpy(), abs=1e-6)


def test_without_a_rate_labels_come_from_their_number() -> None:
    cell = audited(settings=LoopSettings(), attacks=["label_inference"])["label_set_accuracy"]
    assert cell.status == "leaks", cell.line()


def test_with_all_labels_the_scale_is_rate_times_steps() -> None:
    how = LoopSettings(lr=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        model = network()
        clients, auxiliary = dealt(80, 3, 10)
        updates = [Update(model.state_dict(), trained(model, one, how), *one) for one in clients]
    figures = {cell.metric: cell for cell in audit_updates(model, updates, auxiliary, how, attacks=["label_inference"])}
    assert figures["label_set_accuracy"].status == "not_applicable"
    assert figures["histogram_l1"].value is not None
    assert figures["histogram_l1"].value < 0.1


def test_truth_of_other_clients_is_doubtful() -> None:
    """Each client's samples are those of another: nothing of what is guessed would be true of them."""
    _, updates, _ = scene()
    others = [replace(one, x=updates[i - 4].x, y=updates[i - 4].y) for i, one in enumerate(updates)]
    cells = audited(others)
    assert {cell.status for cell in cells.values()} == {"evidence_doubtful"}
    assert all(cell.value is None for cell in cells.values())
    assert "give each client's x and y with its own states" in cells["histogram_l1"].note


@pytest.mark.slow
def test_members_are_found_after_much_training() -> None:
    how = LoopSettings(lr=0.2, epochs=40, batch_size=10)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        model = network()
        clients, auxiliary = dealt(20, 8, 5)
        noisy = [(x, torch.where(torch.arange(len(y)) % 3 == 0, (y + 1) % 10, y)) for x, y in clients]  # labels to be learnt by heart
        updates = [Update(model.state_dict(), trained(model, one, how), *one) for one in noisy]
    cells = {cell.metric: cell for cell in audit_updates(model, updates, auxiliary, how, attacks=["membership"])}
    assert cells["own_model_loss_auc"].status == "leaks", cells["own_model_loss_auc"].line()


@pytest.mark.slow
def test_given_non_members_take_the_place_of_auxiliary_ones() -> None:
    _, updates, (x, y) = scene()
    outside = [replace(one, outside=(x[:200], y[:200])) for one in updates]
    cells = audited(outside, attacks=["membership"])
    assert "non-members, those given," in cells["own_model_rmia_auc"].note


def test_two_clients_decide_nothing() -> None:
    _, updates, _ = scene()
    cells = audited(list(updates[:2]), attacks=["label_inference"])
    assert {cell.status for cell in cells.values()} == {"not_validated"}
    assert cells["histogram_l1"].line().endswith("not_validated (2 score(s) decide nothing, 3 are needed)")


def test_a_figure_that_a_perfect_recovery_would_not_make_a_leak_is_not_validated() -> None:
    """Clients have the label shares of the auxiliary samples, so that knowing them exactly gains nothing."""
    how, (clients, (x, y)) = LoopSettings(lr=0.2), dealt(300, 4, 10)
    even = [
        (x[places], y[places]) for x, y in (*clients, (x, y)) for places in [torch.cat([(y == k).nonzero()[:20, 0] for k in range(10)])]
    ]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        model = network()
        updates = [Update(model.state_dict(), trained(model, one, how), *one) for one in even[:-1]]
    figures = {cell.metric: cell for cell in audit_updates(model, updates, even[-1], how, attacks=["label_inference"])}
    assert figures["histogram_l1"].baseline == pytest.approx(0.0)
    assert figures["histogram_l1"].status == "not_validated"
    assert "even a perfect recovery" in figures["histogram_l1"].line()


def test_rows_of_a_table_are_called_samples() -> None:
    how, x = LoopSettings(lr=0.1), torch.rand(160, 6, generator=torch.Generator().manual_seed(3))
    y = torch.arange(160) % 2
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    parts = [(x[at : at + 30], y[at : at + 30]) for at in range(0, 120, 30)]
    updates = [Update(model.state_dict(), trained(model, one, how), *one) for one in parts]
    cells = audit_updates(model, updates, (x[120:], y[120:]), how, attacks=["gradient_inversion"])
    assert [cell.metric for cell in cells] == ["sample_psnr_db"]
    assert "image" not in cells[0].note


def test_later_rounds_are_read_with_the_first() -> None:
    model, updates, auxiliary = scene()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)
        first = [replace(one, client=i) for i, one in enumerate(updates)]
        model = deepcopy(model)
        model.load_state_dict({name: torch.stack([one.after[name].float() for one in first]).mean(0) for name in model.state_dict()})
        again = [replace(one, before=model.state_dict(), after=trained(model, (one.x, one.y), SETTINGS)) for one in first]
    cells = {cell.metric: cell for cell in audit_updates(model, [*first, *again], auxiliary, SETTINGS, attacks=["label_inference"])}
    assert cells["histogram_l1"].status == "leaks", cells["histogram_l1"].line()


# --- images ---------------------------------------------------------------------------------------------------------------------------


def smooth(normed: bool) -> nn.Sequential:
    norm = nn.BatchNorm2d(4) if normed else nn.Identity()
    return nn.Sequential(nn.Conv2d(1, 4, 5, 2, 2), norm, nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize(("normed", "mode", "settings"), [
    (False, "train", {}), (True, "train", {}), (True, "eval", {}), (False, "train", {"lr": None}), (False, "train", {"epochs": 2}),
])  # fmt: skip
def test_single_images_come_out_of_one_batch(normed: bool, mode: Any, settings: Mapping[str, Any]) -> None:
    how = replace(LoopSettings(lr=0.5, batch_norm=mode), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        model = smooth(normed)
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
        clients, auxiliary = dealt(1, 3, 1)
        updates = [Update(model.state_dict(), trained(model, one, how), *one) for one in clients]
    cells = {cell.metric: cell for cell in audit_updates(model, updates, auxiliary, how, attacks=["gradient_inversion"], iterations=60)}
    cell = cells["image_psnr_db"]
    assert cell.value is not None
    assert cell.status == "leaks", cell.line()
    assert cells["labels_exact"].value == 1.0


@pytest.mark.parametrize("samples", [1, 6, pytest.param(8, marks=pytest.mark.slow)])
def test_batches_of_up_to_eight_come_out_of_a_layer_with_relu(samples: int) -> None:
    """Float32 states of a plain loop. The optimisation alone reads no more than four."""
    how = LoopSettings(lr=0.5)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        clients, auxiliary = dealt(samples, 3, min(samples, 2))
        updates = [Update(model.state_dict(), trained(model, one, how), *one) for one in clients]
    cells = {cell.metric: cell for cell in audit_updates(model, updates, auxiliary, how, attacks=["gradient_inversion"], iterations=20)}
    cell = cells["image_psnr_db"]
    assert cell.status == "leaks", cell.line()
    assert (cell.value or 0.0) > 30, cell.line()
    assert ("SPEAR" if samples > 1 else "closed form") in cell.note


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"optimizer": "adam"}, "an optimiser other than SGD"), ({"lr": None, "epochs": 2}, "several local steps of unknown learning rate"),
        ({"epochs": 11}, "samples in one batch and 10 steps"), ({"batch_size": 1}, "samples in one batch"),
    ],
)  # fmt: skip
def test_images_that_are_not_attempted_say_why(change: Mapping[str, Any], why: str) -> None:
    model, (_, auxiliary) = network(), dealt(1, 1)
    clients, _ = dealt(2, 3)
    how = replace(LoopSettings(lr=0.1), **change)
    updates = [Update(model.state_dict(), trained(model, one, replace(how, lr=0.1)), *one) for one in clients]
    if how.optimizer == "adam":  # whose first step has one length in all parameters
        before = model.state_dict()
        moved = [{name: one.after[name] - before[name] for name in before} for one in updates]
        signs = [{name: before[name] + 0.1 * step / (step.abs() + 1e-9) for name, step in one.items()} for one in moved]
        updates = [replace(one, after=after) for one, after in zip(updates, signs, strict=True)]
    (cell,) = audit_updates(model, updates, auxiliary, how, attacks=["gradient_inversion"])
    assert cell.status == "not_attempted"
    assert why in cell.note
    dropping = nn.Sequential(nn.Dropout(0.1), *model)
    states = [
        replace(one, before=dropping.state_dict(), after=trained(dropping, pair, LoopSettings(lr=0.1)))
        for one, pair in zip(updates, clients, strict=True)
    ]
    (cell,) = audit_updates(dropping, states, auxiliary, LoopSettings(lr=0.1), attacks=["gradient_inversion"])
    assert "dropout" in cell.note


def test_updates_without_truth_are_not_scored() -> None:
    _, updates, _ = scene()
    cells = audited([replace(one, x=None, y=None) for one in updates])
    assert {cell.status for cell in cells.values()} == {"not_attempted"}
    assert all("no client's samples are given" in cell.note for cell in cells.values())


# --- the example ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_of_an_own_loop_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """An engineer's own ResNet with batch normalisation; its audit takes fewer than ten lines."""
    path = ROOT / "examples" / "audit_your_own_loop.py"
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    for metric in ("label_inference / histogram_l1", "membership / update_gradients_auc", "gradient_inversion / image_psnr_db"):
        assert any(line.startswith(metric) and ": leaks" in line for line in said), said
    body = path.read_text(encoding="utf-8").split("# --- the audit of your loop")[1].split("# ---")[0].splitlines()[1:]
    assert len([line for line in body if line.strip()]) < 10
