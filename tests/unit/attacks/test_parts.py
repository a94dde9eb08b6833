"""Algorithms whose clients send several parts in one vector: what each adversary reads of them, under every protection of sums."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attack_scenes import QUICK, config, figures_of

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.adversary import load_view, parts_in, recorded_messages
from cflpriv.attacks.compared.anchor_counts import representations_in
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.evidence.sums import models_sent
from cflpriv.attacks.evidence.updates import public_model, steps_in, updates_in
from cflpriv.attacks.figures.leakage import Case
from cflpriv.attacks.key_recovery import transformed_rounds
from cflpriv.attacks.key_recovery.mixed import multiples_in
from cflpriv.contract.transcript import Message, Transcript
from cflpriv.data import build_population
from cflpriv.errors import InputError
from cflpriv.experiments import run_experiment

SEVERAL: dict[str, tuple[str, ...]] = {"fednova": ("direction", "steps"), "scaffold": ("update", "control")}
PROTECTIONS: dict[str, dict[str, Any]] = {
    "none": {}, "secagg": {"sum": "secagg"},
    **{kind: {"gram": [kind], "sum": kind} for kind in ("haar", "permutation", "hadamard")},
}  # fmt: skip
ADVERSARIES = ("server", "server+1", "client")
DATA = {"samples_per_client": 30, "clients": 10, "groups": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]}


@cache
def cases(algorithm: str, protection: str) -> dict[str, Case]:
    """Two rounds, seen by each adversary. Clients that fill all batches, so that the first round's updates are the same everywhere."""
    made = config({"name": algorithm}, PROTECTIONS[protection], data=DATA, training={"rounds": 2, "batch_size": 10})
    scene = fresh_scene(made, build_population(made.data), 2, QUICK)
    return {adversary: case_of(scene, adversary, QUICK) for adversary in ADVERSARIES}


def dimension_of(seen: Case) -> int:
    return public_model(seen.prior).dimension


def blind_of(seen: Case) -> list[Message]:
    return [one for one in seen.view.messages if one.kind == "blind update"]


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("protection", ["none", "secagg", pytest.param("haar", marks=SLOW), pytest.param("permutation", marks=SLOW)])
@pytest.mark.parametrize("algorithm", SEVERAL)
def test_an_audit_reads_what_its_adversary_can_and_ends(algorithm: str, protection: str) -> None:
    """Whoever can read single updates reads those that clients of FedAvg send from the same model; nobody calls them unreadable."""
    theirs = cases("fedavg", "none")["server"]
    truth = {client: steps[0] for client, steps in steps_in(theirs.view, dimension_of(theirs)).items()}
    for adversary, seen in cases(algorithm, protection).items():
        found = {name: ATTACKS[name].cells(seen)[0] for name in ATTACKS if not ATTACKS[name].reruns}
        others = sorted(set(truth) - set(seen.view.coalition))
        (histogram,) = [cell for cell in found["label_inference"] if cell.metric == "histogram_l1"]
        open_to_it = adversary.startswith("server") and (protection == "none" or (adversary == "server+1" and protection != "secagg"))
        if not open_to_it:
            assert histogram.status in ("nothing_to_see", "not_attempted", "at_baseline", "inconclusive"), histogram.line()
            assert histogram.power in (None, 0.0)  # of one sum: a planted leak would not have shown either
            continue
        steps = steps_in(seen.view, dimension_of(seen))
        for client in others:
            assert [one.members for one in steps[client]] == [(client,), (client,)]
            assert steps[client][0].start == pytest.approx(truth[client].start, abs=1e-6)
            assert steps[client][0].update == pytest.approx(truth[client].update, abs=2e-6)
        assert histogram.status == "leaks", histogram.line()
        assert histogram.value == pytest.approx(histogram.reference, rel=0.05)
        notes = [cell.note for cells in found.values() for cell in cells if cell.status == "nothing_to_see"]
        assert not [note for note in notes if "no single" in note or "updates of single clients" in note]


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
@pytest.mark.parametrize("algorithm", SEVERAL)
def test_the_record_says_where_parts_lie_and_a_colluder_cuts_them_out(algorithm: str, kind: str) -> None:
    """The parts of vectors under a transform, padded or not, are those that the unprotected twin sends by name."""
    seen = cases(algorithm, kind)["server+1"]
    clear = next(one for one in seen.reference.messages if one.operation == "mean")
    (message, *_) = blind_of(seen)
    assert message.payload is not None
    assert clear.payload is not None
    assert tuple(message.context["parts"]) == SEVERAL[algorithm]
    parts = parts_in(seen.view, message)
    assert set(parts) == set(SEVERAL[algorithm])
    for name in SEVERAL[algorithm]:
        sent = np.asarray(clear.payload[name], np.float64).reshape(len(clear.clients), -1)
        assert parts[name] == pytest.approx(sent, abs=1e-5)
    assert parts_in(cases(algorithm, kind)["server"].view, message).keys() == {"blind"}


@pytest.mark.parametrize("algorithm", SEVERAL)
def test_a_model_is_opened_in_the_vector_that_its_part_travelled_in(algorithm: str) -> None:
    seen = cases(algorithm, "permutation")["server+1"]
    last = [next(reversed(view.select("compute", "parameters"))) for view in (seen.view, seen.reference)]
    mine, theirs = (models_sent(view, one)["model"] for view, one in zip((seen.view, seen.reference), last, strict=True))
    assert mine == pytest.approx(theirs, abs=1e-5)
    assert models_sent(cases(algorithm, "permutation")["server"].view, last[0]) == {}


@pytest.mark.parametrize("algorithm", SEVERAL)
def test_parts_travel_in_the_precision_of_the_model(algorithm: str) -> None:
    """Else the model opened from them would be of another one, which training on all samples at once does not take."""
    made = config({"name": algorithm}, PROTECTIONS["haar"], data=DATA, training={"rounds": 2, "batch_size": 0})
    seen = case_of(fresh_scene(made, build_population(made.data), 2, QUICK), "server", QUICK)
    assert {message.payload["blind"].dtype for message in blind_of(seen) if message.payload is not None} == {np.dtype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["permutation", "signed_permutation"])
@pytest.mark.parametrize("algorithm", SEVERAL)
def test_other_parts_do_not_hide_labels_under_a_permutation(algorithm: str, kind: str) -> None:
    """What travels in the same vector is public but for the update, and taken out first: labels show as those of FedAvg's clients do."""
    made = config({"name": algorithm}, {"sum": kind}, data=DATA, training={"rounds": 1, "batch_size": 10})
    seen = case_of(fresh_scene(made, build_population(made.data), 1, QUICK), "server", QUICK)
    found = figures_of("key_recovery", seen)
    assert found["label_set_accuracy"].value == 1.0
    assert found["coordinates_exact"].status == "leaks"


@pytest.mark.parametrize("algorithm", ["fednova", "ifca", "fesem"])
def test_updates_by_another_name_are_not_reported_as_out_of_view(algorithm: str) -> None:
    """FedNova's "direction" and "steps", IFCA's and FeSEM's "step"."""
    made = config({"name": algorithm, **({} if algorithm == "fednova" else {"k": 2})}, data=DATA, training={"rounds": 1})
    seen = case_of(fresh_scene(made, build_population(made.data), 1, QUICK), "server", QUICK)
    (cell,) = ATTACKS["key_recovery"].cells(seen)[0]
    assert "in the clear here" in cell.note


@pytest.mark.parametrize("least", [1, 4])
def test_columns_that_are_multiples_of_others_are_found_wherever_they_are(least: int) -> None:
    """Planted: half of the columns are the other half times known factors. With all factors −1 either of two may be the copy."""
    rng = np.random.default_rng(least)
    factors = -1.0 / rng.integers(1, least + 1, 12)
    half = rng.normal(size=(12, 200)) * rng.uniform(0.01, 1.0, 200)
    order, signs = rng.permutation(400), rng.choice([-1.0, 1.0], 400)
    rows = (np.hstack([half, half * factors[:, None]]) * signs)[:, order].astype(np.float32)
    made, swapped = multiples_in(rows.astype(np.float64), factors)
    assert swapped == (least == 1)
    assert made.sum() == 200
    if swapped:
        assert sorted(order[made] % 200) == list(range(200))
    else:
        assert set(order[made]) == set(range(200, 400))
    assert not multiples_in(rng.normal(size=(12, 400)), factors)[0].any()


@pytest.mark.parametrize("names", [("sum/1/1/0", "sum/1/1/1"), ("sum/fixed", "sum/fixed")])
def test_key_recovery_takes_the_first_sum_that_is_over_enough(names: tuple[str, str]) -> None:
    """A cluster of two before one of eight is no reason to say that nobody's update is to be seen."""
    seen = cases("fedavg", "permutation")["server"]
    (message, *_) = blind_of(seen)
    assert message.payload is not None
    rows, halves = message.payload["blind"], []
    for one, name in zip((slice(2), slice(2, None)), names, strict=True):
        context = {**message.context, "transform": name}
        halves.append(replace(message, clients=message.clients[one], payload={"blind": rows[one]}, context=context))
    at = seen.view.messages.index(message)
    found = transformed_rounds(replace(seen.view, messages=(*seen.view.messages[:at], *halves)), dimension_of(seen))
    assert found is not None
    assert found.clients == message.clients[2:]
    assert len(found.rounds) == (2 if names[0] == names[1] else 1)


def test_rows_that_do_not_fit_are_left_out_and_not_read_as_transformed() -> None:
    seen = cases("scaffold", "haar")["server+1"]

    def cut(message: Message) -> Message:
        blind = {name: value[..., :-1] for name, value in (message.payload or {}).items() if name == "blind" or "/sum/" in name}
        return replace(message, payload={**(message.payload or {}), **blind}) if blind else message

    short = replace(seen.view, messages=tuple(map(cut, seen.view.messages)))
    assert updates_in(seen.view, dimension_of(seen))
    assert not updates_in(short, dimension_of(seen))
    assert models_sent(short, short.select("compute", "parameters")[-1]) == {}


@pytest.mark.slow
def test_what_was_sketched_before_a_transform_is_opened_as_sketched() -> None:
    """A colluder turns sketched gradients at the anchor back into those that travel where the sketch is all there is."""
    opened = []
    for stages, adversary in ((["sketch"], "server"), (["sketch", "hadamard"], "server+1")):
        made = config({"name": "stocfl"}, {"gram": stages, "sketch_dim": 96, "sum": "secagg"}, data=DATA, run={"release_policy": "off"})
        seen = case_of(fresh_scene(made, build_population(made.data), 1, QUICK), adversary, QUICK)
        opened.append(representations_in(seen.view, dimension_of(seen)))
    assert len(opened[0]) == 10
    for client, row in opened[0].items():
        assert opened[1][client] == pytest.approx(row, abs=1e-6)


@pytest.mark.parametrize("algorithm", SEVERAL)
def test_a_run_folder_says_where_parts_lie_as_well(algorithm: str, tmp_path: Path) -> None:
    """What a colluder opens of a folder is what the run's unprotected twin sends in the clear."""
    run_experiment(config({"name": algorithm}, PROTECTIONS["haar"], data=DATA, training={"rounds": 1, "batch_size": 10}), tmp_path / "run")
    view, here = load_view(tmp_path / "run", "server+1"), cases(algorithm, "none")["server"]
    truth = updates_in(here.view, dimension_of(here))
    found = updates_in(view, dimension_of(here))
    assert set(found) == {key for key in truth if key[0] == 0}
    for key, row in found.items():
        assert row == pytest.approx(truth[key], abs=2e-6)


def test_folders_that_do_not_say_where_parts_lie_are_refused(tmp_path: Path) -> None:
    for context in ({}, {"dimension": 3, "parts": {"update": (0, 3)}}):
        made = Transcript("full")
        rows = [{"blind": np.zeros(3)}]
        made.add(0, "mean", "blind update", "clients", "server", [0], rows, readers=("server",), context={"transform": "sum/1", **context})
        made.write(tmp_path / str(len(context)) / "transcript")
    assert len(recorded_messages(tmp_path / "2")) == 1
    with pytest.raises(InputError, match="an earlier version wrote it"):
        recorded_messages(tmp_path / "0")
