"""How sums are read: by comparison with own clients or by a formula, whichever errs less, and by members that begin late."""

import numpy as np
import pytest
from attack_scenes import QUICK, case, config, figures_of

from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.evidence.updates import public_model, steps_in
from cflpriv.attacks.figures.leakage import Case, Cell
from cflpriv.attacks.labels.label_readings import bias_span, is_read_better, reader_of, trained_reader
from cflpriv.attacks.labels.label_sums import affordable_clients, distinct_sums, sums_read
from cflpriv.types import ClientData, Population


def normal_clients(classes: int, labels: int) -> Population:
    """Eight clients with so many labels each, of normal features around a centre for each class."""
    people = []
    centres = np.random.default_rng(3).normal(size=(classes, 12))
    for client in range(8):
        rng = np.random.default_rng([4, client])
        y = rng.choice(rng.choice(classes, labels, replace=False), 80)
        x = (centres[y] + rng.normal(size=(80, 12))).astype(np.float32)
        people.append(ClientData(client, x[:40], y[:40], x[40:], y[40:]))
    return Population("normal", tuple(people), (0,) * 8, classes, (0.0,), (1.0,), ())


def summed_scene(classes: int, labels: int, epochs: int) -> Case:
    training = {"rounds": 3, "participation": 0.5, "batch_size": 8, "epochs": epochs, "lr": 0.2}
    made = config({"name": "fedavg"}, {"sum": "secagg"}, training=training, model={"normalise": False})
    return case_of(fresh_scene(made, normal_clients(classes, labels), made.training.rounds, QUICK), "server", QUICK)


@pytest.mark.parametrize(("classes", "labels", "epochs", "better"), [(100, 8, 1, False), (4, 2, 8, True)])
def test_sums_are_read_by_what_errs_less(classes: int, labels: int, epochs: int, better: bool) -> None:
    """Own clients cannot tell what each of 100 labels does, but they drift over many steps as the run's clients do."""
    seen = summed_scene(classes, labels, epochs)
    model = public_model(seen.prior)
    sums = distinct_sums(steps_in(seen.view, model.dimension, seen), seen.prior)
    count = affordable_clients(sums, seen.prior, model)
    assert is_read_better(sums[0], seen.prior, model, count) == better
    errors: dict[str, list[float]] = {"chosen": [], "formula": [], "trained": []}
    for step, of in zip(sums, sums_read(sums, seen.prior, model), strict=True):
        truth = sum(portion * seen.truth.histogram(client) for client, portion in of.portions.items())
        trained = trained_reader(step, seen.prior, model, count)
        assert trained is not None
        readers = {"chosen": of.reader, "formula": reader_of(step, seen.prior, model, classes), "trained": trained}
        for name, reader in readers.items():
            reading = reader.read(step.update[reader.span or bias_span(model)] / of.scale)
            errors[name].append(float(np.abs(reading - truth).sum()))
    means = {name: float(np.mean(of_sums)) for name, of_sums in errors.items()}
    assert means["chosen"] == min(means.values())
    assert max(means.values()) > 1.5 * means["chosen"]


def test_a_member_that_begins_late_subtracts_the_public_initial_model() -> None:
    """What a client is first sent after one round shows how the others moved the model that everybody knows."""
    training = {"rounds": 2, "participation": 0.5, "batch_size": 0}
    data = {"clients": 6, "samples_per_client": 2, "groups": [[0, 1], [2, 3]]}

    def made(client: int) -> Case:
        run = {"audit_parties": ["server", f"client:{client}"]}
        return case(config({"name": "fedavg"}, {"sum": "secagg"}, training=training, data=data, run=run, model={"hidden": 64}), "client")

    sent = made(0).reference.select("compute", "parameters")
    early = {client for message in sent if message.round == 0 for client in message.clients}
    late = min({client for message in sent if message.round == 1 for client in message.clients} - early)
    seen = made(late)
    assert [message.round for message in seen.view.select("compute", "parameters")] == [0, 1]
    assert not seen.view.messages[0].clients
    histogram = figures_of("label_inference", seen)["aggregate_histogram_l1"]
    assert histogram.value is not None
    assert histogram.baseline is not None
    assert histogram.value < 0.3 < histogram.baseline
    images = figures_of("gradient_inversion", seen)["cohort_image_psnr_db"]
    assert images.value is not None
    assert images.baseline is not None
    assert images.value > images.baseline + 10


def test_a_member_of_the_first_round_is_sent_the_initial_model_itself() -> None:
    seen = case(config({"name": "fedavg"}, {"sum": "secagg"}), "client")
    assert all(message.clients for message in seen.view.messages if message.operation == "compute")


@pytest.mark.parametrize("adversary", ["client", "released"])
def test_models_under_a_secret_of_clients_are_read_where_it_was_written(adversary: str) -> None:
    """Whoever has a model that was released has it in the clear, although its sum was transformed."""

    def histogram(parties: list[str]) -> Cell:
        made = config({"name": "fedavg"}, {"sum": "permutation"}, data={"clients": 4}, run={"audit_parties": parties})
        return figures_of("label_inference", case(made, adversary))["aggregate_histogram_l1"]

    assert histogram(["client:0"]).value is not None
    closed = histogram([])
    assert closed.status == "not_attempted"
    assert "audit_parties" in closed.note
