"""Label inference: clusters as a whole where only models show, and the public clipping of private runs."""

from dataclasses import replace
from functools import partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attack_scenes import QUICK, case, config, figures_of, over_seeds, unrelated
from scipy import stats
from torch.nn import functional

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.evidence.clipped import clipped_probabilities
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.evidence.sums import means_in, sums_in
from cflpriv.attacks.evidence.updates import asked_in, public_model, steps_in
from cflpriv.attacks.figures.significance import RATE, chance_of_reading, chance_of_renaming
from cflpriv.attacks.labels.label_inference import LabelGuess, chance_of_clusters, class_probabilities, set_chance, share_chance, shares_of
from cflpriv.data import DataSpec, build_population
from cflpriv.engine import Streams, TaskInput
from cflpriv.engine.device import CPU, using
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.types import Array, ClientData

label_figures = partial(figures_of, "label_inference")
AGGREGATE = "aggregate_histogram_l1"
OWNERS = [("none", "leaks"), pytest.param("secagg-oblivious", "not_attempted", marks=pytest.mark.slow)]


def test_a_renaming_is_as_probable_as_all_of_them_say() -> None:
    """By brute force over the 24 names of four labels: the two labels of a client may be exchanged, and so may the other two."""
    true = np.array([[0.5, 0.5, 0.0, 0.0]] * 6)
    centre, rng = np.full(4, 0.25), np.random.default_rng(0)
    assert chance_of_renaming(true, true, centre, rng) == pytest.approx(4 / 24)
    assert chance_of_renaming(true[:, [2, 3, 0, 1]], true, centre, rng) == 1.0
    assert chance_of_renaming(np.tile(centre, (6, 1)), true, centre, rng) == 1.0
    uneven = np.array([0.7, 0.1, 0.1, 0.1])
    assert chance_of_renaming(np.tile(uneven, (6, 1)), true, uneven, rng) == 1.0, "what the prior says is nobody's luck"


def test_a_reading_is_as_probable_as_all_that_no_leak_distinguishes() -> None:
    """By brute force: three names in six orders, and the two clients of the first group dealt again or not."""
    rng, groups, centre = np.random.default_rng(3), np.array([0, 0, 1]), np.full(3, 1 / 3)
    true = rng.dirichlet(np.ones(3), 3)
    guessed = (true + rng.dirichlet(np.ones(3), 3)) / 2
    own = float(np.abs(guessed - true).sum())
    errors = [
        float(np.abs(guessed - true[list(order)][:, list(names)]).sum())
        for order in ((0, 1, 2), (1, 0, 2)) for names in permutations(range(3))
    ]  # fmt: skip
    share = np.mean(np.array(errors) <= own + 1e-9)
    assert chance_of_reading(guessed, true, centre, groups, rng) == pytest.approx(share, abs=0.03)


def test_eight_clients_of_two_groups_are_no_eight_proofs() -> None:
    """Two labels of ten and two others: one name in 1260 is right for all clients, and a test over clients would say 10⁻⁹ and less."""
    true = np.repeat(np.eye(10)[[0, 2]] / 2 + np.eye(10)[[1, 3]] / 2, 4, axis=0)
    groups, rng = np.repeat([0, 1], 4), np.random.default_rng(0)
    p = chance_of_reading(true, true, np.full(10, 0.1), groups, rng)
    assert p == pytest.approx(1 / 1260, rel=0.9)
    uneven = true + 0.1 * np.array([1, -1] + [0] * 8) * np.array([1, 2, 3, 4, 0, 0, 0, 0])[:, None]
    assert chance_of_reading(uneven, uneven, np.full(10, 0.1), groups, rng) <= p, "clients of a group that differ are further evidence"


def test_groups_that_are_read_by_luck_are_seldom_a_leak() -> None:
    """Each group is guessed by chance, all of its clients alike. Of 200 such runs 5 % at most have p below 5 %, with three deviations."""
    rng, groups = np.random.default_rng(0), np.repeat(np.arange(4), 3)
    shown = 0
    for _ in range(200):
        true, guessed = (np.repeat(rng.permuted(np.tile([0.5, 0.5, 0.0, 0.0, 0.0], (4, 1)), axis=1), 3, axis=0) for _ in range(2))
        shown += chance_of_reading(guessed, true, np.full(5, 0.2), groups, rng) < 0.05
    assert shown <= 200 * 0.05 + 3 * np.sqrt(200 * 0.05 * 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]])
def test_labels_that_are_named_by_luck_are_seldom_a_leak(groups: list[list[int]]) -> None:
    """Twenty clients whose labels are known up to their names: a test over clients alone finds a leak in up to half of the cases."""
    classes, clients = 1 + max(map(max, groups)), list(range(20))
    counts = np.array([[float(label in groups[client % len(groups)]) for label in range(classes)] for client in clients])
    shares, rng, found = counts / counts.sum(axis=1, keepdims=True), np.random.default_rng(0), np.zeros((2, 60))
    seen: Any = SimpleNamespace(
        seed=0, prior=SimpleNamespace(classes=classes), truth=SimpleNamespace(
            label_sets=[frozenset(np.flatnonzero(row).tolist()) for row in counts], histogram=lambda client: shares[client]
        ),
    )  # fmt: skip
    even = np.full(classes, 1 / classes)
    beside = np.abs(even - shares).sum(axis=1)
    popular = np.array([float(one == seen.truth.label_sets[0]) for one in seen.truth.label_sets])
    for run in range(found.shape[1]):
        made = shares[:, rng.permutation(classes)]
        sets = [frozenset(np.flatnonzero(row).tolist()) for row in made]
        found[0, run] = share_chance(LabelGuess(dict(enumerate(made))), beside, even, seen, clients)
        found[1, run] = set_chance(sets, popular, seen, clients)
    allowed = stats.binom.isf(1e-3, found.shape[1], RATE)
    assert ((found < RATE).sum(axis=1) <= allowed).all(), "more often than stated, an error of 1 in 1000 for each of two figures"


@pytest.mark.slow
def test_ifca_under_secure_sums_shows_the_histograms_of_clusters() -> None:
    """k models go to everybody and choices are told: two models of one name are a cluster's mean update, over known members."""
    made = [config({"name": "ifca", "k": 4}, {"sum": "secagg"}, training={"rounds": 2}, seed=seed) for seed in range(3)]
    cells = over_seeds([ATTACKS["label_inference"].cells(case(one))[0] for one in made])
    whole = cells[AGGREGATE, 0]
    assert whole.status == "leaks", whole.line()
    assert "nothing about a member" in whole.note
    assert whole.value is not None
    assert whole.baseline is not None
    assert whole.value < 0.5 * whole.baseline
    assert cells["histogram_l1", 0].status == "leaks"  # members of a cluster get its guess


@pytest.mark.slow
def test_oblivious_sums_show_clusters_and_no_members() -> None:
    """Clusters are matched to their histograms by luck one time in 24 or more, so that one run decides nothing; three do."""
    made = [config({"name": "ifca", "k": 4}, {"sum": "secagg-oblivious"}, training={"rounds": 2}, seed=seed) for seed in range(3)]
    several = [case(one) for one in made]
    seen = several[0]
    found = over_seeds([ATTACKS["label_inference"].cells(one)[0] for one in several])
    assert found["histogram_l1", 0].status == "not_applicable"
    assert found[AGGREGATE, 0].status == "leaks", found[AGGREGATE, 0].line()
    models = means_in(seen.view, sum_dimension(seen))
    assert models
    assert all(one.members == () for one in models)
    # the mean updates are those of the real groups, which only the scorer knows, from the unprotected run
    real = {(one.round, one.label): one for one in sums_in(seen.reference)}
    for one in models:
        if one.round == 0:
            assert one.mean == pytest.approx(real[0, one.label].mean, abs=1e-6)


def sum_dimension(seen: Any) -> int:
    return public_model(seen.prior).dimension


@pytest.mark.slow
def test_a_member_sees_its_cluster_as_a_whole() -> None:
    """One client has its own cluster's models only: one figure, which a single seed is too few to judge; over seeds it leaks.

    Its own update taken off, the mean is that of the other members, who are alike: each gets their histogram.
    """
    made = [config(protection={"sum": "secagg"}, training={"rounds": 2}, seed=seed) for seed in range(3)]
    seen = [case(one, "client") for one in made]
    assert all({client for sum_ in sums_in(one.view) for client in sum_.members} == {0, 4, 8, 12, 16} for one in seen)
    whole = over_seeds([ATTACKS["label_inference"].cells(one)[0] for one in seen])[AGGREGATE, 1]
    assert whole.status == "leaks", whole.line()
    others = label_figures(seen[0])["histogram_l1"]
    assert others.status == "leaks", others.line()
    assert "of 4 clients separated" in others.note


@pytest.mark.slow
def test_a_model_that_stays_transformed_shows_nothing() -> None:
    found = label_figures(case(config(protection={"sum": "hadamard"})))
    assert found[AGGREGATE].status == "not_attempted"
    assert found["histogram_l1"].status == "not_attempted"  # coordinates of blind updates have no names
    assert "hadamard" in found["histogram_l1"].note


def test_gradients_that_are_averaged_are_read_with_their_own_sign() -> None:
    """IFCA's option I sends gradients: movements are against them, and their length is unknown."""
    found = label_figures(case(config({"name": "ifca", "k": 4, "averaging": "gradient"}, training={"rounds": 2})))
    assert found["label_set_accuracy"].value is not None
    assert found["label_set_accuracy"].value > 0.9
    assert found["histogram_l1"].status == "leaks"


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "protection"), [("fedavg", {}), pytest.param("pacfl", {"sum": "secagg"}, marks=pytest.mark.slow)])
def test_updates_by_adam_are_read_by_comparison(algorithm: str, protection: dict[str, Any]) -> None:
    """Rate × steps says nothing of Adam's updates: clients of the attacker's own, trained by the same steps, do."""
    seen = case(config({"name": algorithm}, protection, training={"optimizer": "adam", "lr": 0.01}))
    found = label_figures(seen)
    assert "Adam" in found["histogram_l1"].note
    assert found["label_set_accuracy"].value == 1.0
    assert found["histogram_l1"].value is not None
    assert found["histogram_l1"].value < 0.15


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "protection"), [("fedavg", {}), ("pacfl", {"sum": "secagg"})])
def test_updates_by_adam_of_unrelated_clients_say_nothing(algorithm: str, protection: dict[str, Any]) -> None:
    """Of sums a figure is at its baseline where its power is shown only; under Adam two rounds of them have too little."""
    stranger = label_figures(unrelated(config({"name": algorithm}, protection, training={"optimizer": "adam", "lr": 0.01})))
    allowed = {"at_baseline", "inconclusive"} if protection else {"at_baseline"}
    assert {cell.status for metric, cell in stranger.items() if metric != AGGREGATE} <= allowed


def test_pretended_clients_of_adam_train_as_the_run_does() -> None:
    seen = case(config({"name": "fedavg"}, training={"optimizer": "adam", "lr": 0.01, "batch_size": 0, "epochs": 3}))
    model = Model("mlp", (1, 8, 8), 10, hidden=8)
    assert seen.prior.config is not None
    model = replace(model, mean=seen.prior.mean, std=seen.prior.std)
    step = steps_in(seen.view, model.dimension)[0][0]
    train = asked_in(step).train
    x, y = seen.truth.data[0]
    given = TaskInput(ClientData(0, x, y, x[:0], y[:0]), {"model": step.start.astype(np.float32)}, {}, Streams(0, 0, 0))
    assert train.run(given)["update"] == pytest.approx(step.update, abs=1e-5)


@pytest.mark.parametrize(("sum_", "status"), OWNERS)
def test_fedproto_tells_label_sets_unless_sums_are_oblivious(sum_: str, status: str) -> None:
    (cell,) = ATTACKS["label_inference"].cells(case(config({"name": "fedproto"}, {"sum": sum_}, training={"rounds": 1})))[0]
    assert cell.status == status, cell.line()
    if status == "leaks":
        assert cell.value == 1.0
        assert cell.baseline is not None
        assert cell.baseline < 0.5


@pytest.mark.slow
def test_a_client_is_not_sent_who_owns_what() -> None:
    seen = case(config({"name": "fedproto"}, {"sum": "secagg-oblivious"}, training={"rounds": 1}), "client")
    assert ATTACKS["label_inference"].cells(seen)[0][0].status == "not_attempted"  # it is sent prototypes


def test_the_head_that_clients_share_shows_their_labels() -> None:
    """LG-FedAvg sends the last layers: their bias is read. Under a permutation nothing is, and no note says that another attack does."""
    found = label_figures(case(config({"name": "lg_fedavg"}, training={"rounds": 1})))
    assert found["label_set_accuracy"].value == 1.0
    seen = case(config({"name": "lg_fedavg"}, {"sum": "permutation"}, training={"rounds": 1}))
    notes = [ATTACKS[name].cells(seen)[0][0].note for name in ("label_inference", "key_recovery")]
    assert all("of a part of the model only" in note for note in notes), notes


def test_blocks_over_their_weights_are_a_clients_model() -> None:
    """FedSoft in the clear: u (w − c) and u of each centre c. Every step is the run's own training of that client, to rounding."""
    made = config({"name": "fedsoft"}, training={"rounds": 3, "batch_size": 0})
    seen = case(made)
    model = public_model(seen.prior)
    steps = steps_in(seen.view, model.dimension, seen)
    assert sorted(steps) == list(range(20))
    for client in (0, 7):
        x, y = seen.truth.data[client]
        for step in steps[client]:
            sent = {"model": step.start.astype(np.float32), "anchor": step.beside["anchor"].astype(np.float32)}
            task_input = TaskInput(ClientData(client, x, y, x[:0], y[:0]), sent, {}, Streams(0, step.round, client))
            assert asked_in(step).train.run(task_input)["update"] == pytest.approx(step.update, abs=1e-5)
        assert steps[client][1].start == pytest.approx(steps[client][0].start + steps[client][0].update)
    found = label_figures(seen)
    assert found["label_set_accuracy"].value == 1.0
    assert found["label_set_accuracy"].status == "leaks"


def test_sums_of_weights_by_label_are_histograms() -> None:
    """FedRC's clients send them behind their models: nothing has to be inferred."""
    found = label_figures(case(config({"name": "fedrc"}, training={"rounds": 1})))
    assert found["histogram_l1"].value == pytest.approx(0.0, abs=1e-5)
    assert found["histogram_l1"].status == "leaks"


def test_a_member_reads_labels_off_models_that_others_relay() -> None:
    """FedFomo's members get others' models: the first are one local training from the public initial model, as every member knows."""
    made = config({"name": "fedfomo"}, training={"rounds": 2, "batch_size": 0})
    seen = case(made, "client")
    model = public_model(seen.prior)
    steps = steps_in(seen.view, model.dimension, seen)
    assert 4 <= len(steps) <= 6  # five others at most, and its own
    for client, (step,) in steps.items():
        x, y = seen.truth.data[client]
        data = asked_in(step).part(ClientData(client, x, y, x[:0], y[:0]))
        assert 0 < len(data.y_train) < len(y)
        assert step.start == pytest.approx(model.init(0))
        task_input = TaskInput(data, {"model": model.init(0)}, {}, Streams(0, 0, client))
        assert asked_in(step).train.run(task_input)["update"] == pytest.approx(step.update, abs=1e-5)
    found = label_figures(seen)
    assert found["label_set_accuracy"].value == 1.0
    assert found["histogram_l1"].status == "leaks"
    assert label_figures(case(made))["histogram_l1"].status == "not_applicable"  # the server relays boxes that it cannot open


def test_relayed_and_compared_updates_are_read_once() -> None:
    """pFedLIA's members get others' updates, OCFL's clients let theirs be compared and averaged: each is the update of one training."""
    seen = case(config({"name": "pfedlia", "warm_up": 1}, training={"rounds": 2, "batch_size": 0}), "client")
    dimension = public_model(seen.prior).dimension
    steps = steps_in(seen.view, dimension, seen)
    assert set(range(1, 20)) <= set(steps)
    of_server = steps_in(case(config({"name": "pfedlia", "warm_up": 1}, training={"rounds": 2, "batch_size": 0})).view, dimension)
    assert steps[5][0].round == 1
    assert of_server[5][0].round == 0
    assert label_figures(seen)["label_set_accuracy"].value == 1.0
    compared = case(config({"name": "ocfl"}, {"gram": ["haar"], "sum": "secagg"}, training={"rounds": 2, "batch_size": 0}), "server+1")
    plain = case(config({"name": "ocfl"}, training={"rounds": 2, "batch_size": 0}))
    theirs, own = (steps_in(one.view, dimension, one) for one in (compared, plain))
    assert [step.round for step in own[5]] == [0, 1]  # of round 1 an update is compared as well, which is the one that is averaged
    (single,) = [step for step in theirs[5] if step.members == (5,)]
    assert single.round == 1
    assert single.update == pytest.approx(own[5][1].update, abs=1e-4)


@pytest.mark.parametrize("name", ["fedsoft", "fedrc"])
def test_clusters_of_several_models_at_once_are_not_called_nothing(name: str) -> None:
    """Who trains which of the models is not attacked where clients train all of them, and it says so."""
    assert ATTACKS["cluster_identity"].cells(case(config({"name": name}, {}, training={"rounds": 1})))[0][0].status == "not_attempted"
    secure = {"sum": "secagg", "secagg_mode": "passive", "secagg_clip": 8.0}
    if name == "fedrc":
        with pytest.raises(InputError, match="a client alone in a block would show"):
            case(config({"name": name}, secure, training={"rounds": 1}))
        return
    summed = case(config({"name": name, "smoother": 0.1}, secure, training={"rounds": 1}))
    assert ATTACKS["cluster_identity"].cells(summed)[0][0].status == "not_applicable"


def test_renumbered_clusters_are_not_mixed_up() -> None:
    """CFL's splits give clusters other numbers: every mean that is told is that of its members' own updates."""
    algorithm = {"name": "cfl", "eps1": 0.8, "eps2": 0.85}
    seen = case(config(algorithm, training={"rounds": 5, "epochs": 2}))
    dimension = sum_dimension(seen)
    single = steps_in(seen.view, dimension)
    told = [one for one in means_in(seen.view, dimension) if one.members]
    assert told
    for one in told:
        rows = [step.update for client in one.members for step in single[client] if step.round == one.round]
        assert one.mean == pytest.approx(np.mean(rows, axis=0), abs=1e-5)


@pytest.mark.slow
def test_centres_are_read_although_clients_are_sent_their_group_in_between() -> None:
    """FeSEM's server sends a message without a model between the centres and the first sum."""
    found = label_figures(case(config({"name": "fesem", "k": 4}, {"sum": "secagg"}, training={"rounds": 2}, run={"release_policy": "off"})))
    assert found[AGGREGATE].value is not None
    assert found["histogram_l1"].value is not None


# --- private runs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.5, 1e6])
def test_clipped_probabilities_are_those_of_clipped_gradients(clip_norm: float) -> None:
    """Oracle: one sample at a time, by autograd. With a bound that clips nothing they are the plain ones."""
    scene = build_population(DataSpec(clients=4, samples_per_client=20))
    data = scene.clients[0]
    model = Model("mlp", scene.shape, scene.classes, 8, scene.mean, scene.std, "float64")
    vector = model.init(0)
    made = clipped_probabilities(model, vector, data.x_train, data.y_train, clip_norm)
    with using(CPU):
        module, inputs = model.load(vector), model.inputs(data.x_train)
    for label in np.unique(data.y_train):
        rows = []
        for i in np.flatnonzero(data.y_train == label):
            loss = functional.cross_entropy(module(inputs[i : i + 1]), torch.tensor([int(label)]))
            whole = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(module.parameters()))])
            rows.append(whole[-10:].numpy() * min(1.0, clip_norm / float(whole.norm())))
        assert np.eye(10)[label] - made[label] == pytest.approx(-np.mean(rows, axis=0), abs=1e-9)
    if clip_norm > 1e3:
        plain = class_probabilities(model, vector, data.x_train, data.y_train)
        present = np.unique(data.y_train)
        assert made[present] == pytest.approx(plain[present], abs=1e-9)


def private_config(unit: str, epsilon: float, **more: Any) -> Any:
    privacy = {"unit": unit, "epsilon": epsilon, "delta": 1e-4, "clip_norm": 0.5}
    if unit == "sample":
        privacy |= {"samples": 70}
    algorithm = {"name": "fedavg"} | more.pop("algorithm", {})
    return config(algorithm, training={"rounds": 2, "batch_size": 10, "epochs": 2}, privacy=privacy, **more)


@pytest.mark.parametrize("unit", [pytest.param("sample", marks=pytest.mark.slow), "client"])
def test_the_attacker_clips_as_the_pipeline_does(unit: str) -> None:
    """With noise that is next to nothing, clipped updates show the histograms; to read them by rate × steps, as if unclipped, is worse.

    So reads who does not know how many labels clients have, by which the scale of an update would show."""
    made = private_config(unit, 1e6 if unit == "sample" else 1e5)
    seen = case(made)
    found = label_figures(seen)["histogram_l1"]
    assert found.status == "leaks", found.line()
    all_labels = dict.fromkeys(seen.prior.labels_per_client, seen.prior.classes)
    blind = replace(seen, prior=replace(seen.prior, config=replace(made, privacy=config().privacy), labels_per_client=all_labels))
    ignorant = label_figures(blind)["histogram_l1"]
    assert found.value is not None
    assert ignorant.value is not None
    assert found.value < ignorant.value - 0.1, (found.line(), ignorant.line())


def test_the_labels_that_a_client_lacks_tell_the_scale_of_its_update() -> None:
    """Five epochs on 20 samples: by rate × steps shares come out too even, by the known number of labels they do not."""
    seen = case(config({"name": "fedavg"}, training={"rounds": 1, "epochs": 10}, data={"samples_per_client": 20}, model={"hidden": 32}))
    model = public_model(seen.prior)
    steps = {client: step for client, (step,) in steps_in(seen.view, model.dimension, seen).items()}
    errors = {
        labels: np.mean(
            [np.abs(shares_of(step, seen.prior, model, labels) - seen.truth.histogram(client)).sum() for client, step in steps.items()]
        )
        for labels in (2, 10)
    }
    assert errors[2] < 0.5 * errors[10]
    assert errors[2] < 0.15


def test_a_trusted_server_sees_contributions_under_client_level_privacy() -> None:
    """unit = "client" with sums in the clear: the server adds the noise, so its own view has every clipped update."""
    made = private_config("client", 4.0)
    found = label_figures(case_of(fresh_scene(made, build_population(made.data), 2, QUICK), "server", QUICK))
    assert found["label_set_accuracy"].status == "leaks"


@pytest.mark.slow
@pytest.mark.parametrize(("gram", "adversary"), [(["sketch"], "server"), (["sketch", "haar"], "server+1")])
@pytest.mark.parametrize("rule", [{"tau": 0.5}, {"cut": "test"}])
def test_a_sketch_hides_no_labels_from_who_can_make_one(gram: list[str], adversary: str, rule: dict[str, Any]) -> None:
    """Templates of what clients would send go through the same public sketch; of halves the mean is read."""
    made = config({"name": "stocfl", **rule}, protection={"gram": gram, "sketch_dim": 256})
    cells = figures_of("anchor_counts", case(made, adversary))
    assert cells["label_set_accuracy"].value == 1.0
    assert cells["histogram_l1"].status == "leaks"
    assert (cells["histogram_l1"].value or 9) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("blank", [0.0, 2.0])
def test_histograms_of_unrelated_clusters_have_a_valid_p(alike: float, blank: float) -> None:
    """Null simulation: 1000 runs of 3 to 8 clusters with few labels each, and guesses of other clusters, as `alike` as that part of them is
    the same for all. Where the error without a view is 2, any guess is better, and the deals alone decide.

    p <= .05 and <= .01 may each come more often than these rates allow in less than 1 % of such tests.
    """
    rng, chances = np.random.default_rng(0), []

    def histograms(k: int) -> Array:
        drawn = rng.dirichlet(np.full(10, 0.3), size=k)
        return np.asarray(alike * rng.dirichlet(np.full(10, 0.3)) + (1 - alike) * drawn)

    for run in range(1000):
        k = int(rng.integers(3, 9))
        guesses, truth = histograms(k), histograms(k)
        table = np.abs(guesses[:, None] - truth[None]).sum(axis=2)
        chances.append(chance_of_clusters(table, np.full(k, blank) if blank else np.abs(truth - 0.1).sum(axis=1), run))
    for rate in (0.05, 0.01):
        count = int((np.array(chances) <= rate).sum())
        low, high = stats.binomtest(count, 1000).proportion_ci(0.95, method="exact")
        print(f"p <= {rate}: {count} of 1000 = {count / 1000:.4f} [{low:.4f}, {high:.4f}]")
        assert count <= stats.binom.isf(0.01, 1000, rate)
