"""What a client answers does not depend on its data beyond the released values, and no request takes more than its limits allow."""

import dataclasses
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from checkout import ROOT
from loopback import Loopback
from scenes import population, training

from cflpriv.aggregation import secagg as sums
from cflpriv.algorithms.cfl.stationary import Same
from cflpriv.algorithms.ditto import TrainBoth
from cflpriv.algorithms.fedproto import TrainToPrototypes
from cflpriv.algorithms.fedrc import RobustStep
from cflpriv.algorithms.pfedlia.influence import HasValidation, Influence, OnPart
from cflpriv.algorithms.shared.choosing import PickAndTrain
from cflpriv.contract.protection import Protection
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation import work
from cflpriv.federation.client import FederationClient
from cflpriv.federation.limits import Limits
from cflpriv.federation.protections import ClientParts
from cflpriv.federation.server import FederationServer
from cflpriv.federation.settings import Settings
from cflpriv.federation.store import MemoryStore
from cflpriv.federation.transport import OverBytes
from cflpriv.privacy.settings import Privacy
from cflpriv.protocols import secagg
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.protocols.secagg import messages as steps
from cflpriv.tasks.block_choices import ChooseListed
from cflpriv.tasks.cluster_shares import CellShare, CentreShare, MomentShare, TrainInBlock
from cflpriv.tasks.evaluation import Evaluate, Losses
from cflpriv.tasks.fold_gradients import FoldGradients
from cflpriv.tasks.low_rank import LowRankSketch
from cflpriv.tasks.signatures import PrincipalVectors
from cflpriv.tasks.training import Gradient, Start
from cflpriv.types import ClientData

SCENE = population(groups=1, clients_per_group=3)
DATA = SCENE.clients[0]
LINEAR = Model("linear", SCENE.shape, SCENE.classes)
MLP = Model("mlp", SCENE.shape, SCENE.classes, hidden=1)
SESSION = bytes(range(16))
IDENTITIES = tuple(Identity.create(client, public_entropy(f"answers {client}")) for client in range(3))
ROSTER = Roster(tuple(identity.public() for identity in IDENTITIES))
SECURE = Protection(sum="secagg")
NO_PRIVACY = Privacy()
PROTECTED: Mapping[str, tuple[Protection, Privacy]] = {
    "secagg": (SECURE, Privacy()),
    "oblivious": (Protection(sum="secagg-oblivious"), Privacy()),
    "one message": (Protection(sum="one_message"), Privacy()),
    "haar": (Protection(gram=("haar",), sum="haar"), Privacy()),
    "per client": (SECURE, Privacy(unit="client", epsilon=8.0, delta=1e-2)),
    "compared": (Protection(gram=("haar",), sum="secagg"), Privacy()),
}


def client_of(data: ClientData, protection: Protection = SECURE, privacy: Privacy = NO_PRIVACY, **options: Any) -> FederationClient:
    """A client in a session, with the same secrets whatever its data are."""
    own = Settings(IDENTITIES[0], protection, ROSTER, privacy, **options)
    made = FederationClient(own, lambda: data, MemoryStore(), public_entropy("answers"))
    assert isinstance(ask(made, m.Enrol(m.VERSION, SESSION, bytes(16))), m.Enrolled)
    return made


def ask(client: FederationClient, request: m.PartyRequest) -> m.Answer:
    return m.decode_answer(client.receive(m.encode(request)))


def compute(task: Any, held: int = 1, round: int = 0, live: Sequence[int] = (1, 2, 3), which: Any = None, **params: Any) -> m.Compute:
    sent = tuple((name, sent_value(value)) for name, value in params.items())
    return m.Compute(SESSION, round, 1, held, tuple(live), m.Carried(task), sent, which)


def sent_value(value: Any) -> Any:
    if isinstance(value, m.HeldValue):
        return value
    return m.Many(tuple(m.to_addends(one, {}) for one in value)) if isinstance(value, list) else m.to_addends(np.asarray(value), {})


def shown(answer: m.Answer) -> Any:
    """All of an answer but released values: its type, its code, names, sizes and shapes."""
    match answer:
        case m.Given():
            return "Given", tuple((one.name, one.value.dtype.str, one.value.shape) for one in answer.values), answer.samples
        case m.Stepped():
            return "Stepped", len(answer.message)
        case m.SealedBoxes():
            return "SealedBoxes", tuple(map(len, answer.boxes))
        case _:
            return m.encode(answer)


# --- the bisection: parameters that overflow only if some sample has a·x > t


def oracle(threshold: float) -> m.Compute:
    """A training in which the gradient of a hidden unit, if that is on for the sample farthest out, overflows float32 in one step."""
    model = np.zeros(MLP.dimension, np.float32)
    against = np.where(np.arange(SCENE.classes) == DATA.y_train[DATA.x_train[:, 0].argmax()], -1e9, 1e9)
    first, bias, second, _ = (offset for _, _, offset in MLP.layout)
    model[first], model[bias], model[second : second + SCENE.classes] = 1.0, -threshold, against
    return compute(replace(training(SCENE), model=MLP, lr=1e30, batch_size=0), model=model)


@pytest.mark.parametrize("name", PROTECTED)
def test_an_oracle_of_overflow_gets_one_answer_for_all_thresholds(name: str) -> None:
    protection, privacy = PROTECTED[name]
    client, values = client_of(DATA, protection, privacy), DATA.x_train[:, 0]
    thresholds = (values.min() - 1.0, *np.quantile(values, (0.25, 0.5, 0.9)), values.max() + 1.0)
    answers = {m.encode(ask(client, oracle(float(threshold)))) for threshold in thresholds}
    assert len(answers) == 1
    (answer,) = map(m.decode_answer, answers)
    assert isinstance(answer, m.Computed)
    assert answer.result
    if privacy.unit != "none":
        assert client._spending.spent() == 0.0, "nothing was released"


def test_without_the_stand_in_the_oracle_tells_which_thresholds_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientParts, "alike", False)
    client, largest = client_of(DATA), float(DATA.x_train[:, 0].max())
    below, above = (ask(client, oracle(largest + by)) for by in (-1e-3, 1e-3))
    assert below == m.Refused("bad-input")
    assert isinstance(above, m.Computed)


def test_a_client_whose_training_diverged_holds_zeros_and_keeps_its_own_model(caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(DATA)
    good, bad = (compute(replace(training(SCENE, dtype="float32"), lr=lr), model=LINEAR.init(0)) for lr in (0.1, 1e38))
    ask(client, good)
    kept = np.array(client.values.remembered("trained")[0])  # type: ignore[index]
    assert m.encode(ask(client, bad)) == m.encode(ask(client, good))
    ask(client, bad)
    assert not np.any(client.values.value(m.HeldValue(1, "update")))
    assert client.values.origin(1).failed
    np.testing.assert_array_equal(client.values.remembered("trained")[0], kept)  # type: ignore[index]
    assert "counts with weight zero" in caplog.text, "the operator's log tells"
    ask(client, compute(Same(), held=2, update=m.HeldValue(1, "update")))
    assert client.values.origin(2).failed, "what is computed of it counts for nothing, too"


@pytest.mark.parametrize("change", ["one sample", "labels beyond the model's", "one label", "huge"])
@pytest.mark.parametrize(
    "task",
    [
        FoldGradients(LINEAR), PrincipalVectors(3), PrincipalVectors(2, True, 3), Influence(LINEAR, 0.2, (0, 1)), Evaluate(LINEAR),
        OnPart(training(SCENE, dtype="float32"), 0.2), HasValidation(0.5), replace(training(SCENE, dtype="float32"), maml_lr=0.1),
    ],
    ids=lambda task: type(task).__name__,
)  # fmt: skip
def test_no_property_of_the_data_changes_whether_there_is_a_result(task: Any, change: str) -> None:
    few = slice(0, 1 if change == "one sample" else None)
    data = replace(DATA, x_train=DATA.x_train[few], y_train=DATA.y_train[few])
    if change == "labels beyond the model's":
        data = replace(data, y_train=data.y_train + 7)
    elif change == "one label":
        data = replace(data, y_train=0 * data.y_train)
    elif change == "huge":
        data = replace(data, x_train=data.x_train * np.float32(1e30))
    params: dict[str, Any] = {"model": LINEAR.init(0), "own": LINEAR.init(1), "without": [LINEAR.init(2)] * 2}
    with np.errstate(all="ignore"):
        answers = [m.encode(ask(client_of(each), compute(task, held=1, **params))) for each in (DATA, data)]
    assert answers[0] == answers[1]
    assert isinstance(m.decode_answer(answers[0]), m.Computed)


# --- crafted requests


TEMPLATES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (training(SCENE, dtype="float32"), {"model": LINEAR.init(0)}), (Gradient(LINEAR), {"model": LINEAR.init(0)}),
    (replace(training(SCENE, dtype="float32"), prox=0.1, clip_norm=1.0), {"model": LINEAR.init(0), "anchor": LINEAR.init(1)}),
    (replace(training(SCENE), model=MLP), {"model": MLP.init(0)}), (Start(LINEAR, 0), {}),
    (replace(training(SCENE, dtype="float32"), lr=1e35), {"model": LINEAR.init(0)}), (HasValidation(0.5), {}),
    (OnPart(training(SCENE, dtype="float32"), 0.2), {"model": LINEAR.init(0)}), (Evaluate(LINEAR, "train"), {"model": LINEAR.init(0)}),
    (PickAndTrain(Losses(LINEAR), training(SCENE, dtype="float32"), "update"), {"model": [LINEAR.init(0), LINEAR.init(1)]}),
    (Losses(LINEAR), {"model": [LINEAR.init(0), LINEAR.init(1)]}), (PrincipalVectors(2), {}), (PrincipalVectors(2, True, 3), {}),
    (FoldGradients(LINEAR), {"model": LINEAR.init(0)}), (LowRankSketch(training(SCENE, dtype="float32")), {"model": LINEAR.init(0)}),
    (CentreShare(LINEAR), {"start": LINEAR.init(0)}),
    (MomentShare(LINEAR, directions=2), {"start": LINEAR.init(0), "centre": np.zeros(2)}),
    (
        CellShare(LINEAR, directions=2),
        {"start": LINEAR.init(0), "centre": np.zeros(2), "basis": np.eye(2), "cells": np.zeros((3, 2))},
    ),
    (TrainInBlock(training(SCENE, dtype="float32"), 2, 1.0), {"model": [LINEAR.init(0), LINEAR.init(1)]}),
    (RobustStep(training(SCENE, dtype="float32"), 2), {"model": np.zeros(2 * (LINEAR.dimension + 3), np.float32)}),
    (TrainBoth(training(SCENE, dtype="float32"), training(SCENE, dtype="float32"), 0), {"model": LINEAR.init(0)}),
    (TrainToPrototypes(training(SCENE, dtype="float32"), 0, ()), {}),
    (Influence(LINEAR, 0.2, (0, 1)), {"model": LINEAR.init(0), "own": LINEAR.init(1)}),
    (ChooseListed(), {"labels": np.arange(3), "clients": np.arange(3)}), (Same(), {"update": LINEAR.init(0)}),
)  # fmt: skip
NUMBERS = (0, 1, 2, 3, 7, 200, 10**5, 10**8, 10**12, -1, 0.0, 1e-9, 0.5, 1e3, 1e30, 1e38, float("inf"), float("nan"))
SCALES = (0.0, 1.0, 1e3, 1e8, 1e9, 1e12, 1e30, float("nan"), float("inf"))


class Limited(Loopback):
    """Clients that allow little work."""

    def settings(self, client: int) -> Settings:
        small = Limits(numbers=1 << 12, epochs=5, width=64, steps=64)
        return Settings(self.identities[client], self.protection, self.roster, self.privacy, limits=small)


def reached(data: ClientData, protection: Protection, privacy: Privacy) -> Callable[[m.PartyRequest], m.Answer]:
    """What asks a client with these data, in a session in which clients share their secret."""
    transport = Limited(replace(SCENE, clients=(data, *SCENE.clients[1:])), protection)
    transport.privacy = privacy
    fed = FederationServer(OverBytes(transport), protection=protection, roster=transport.roster, session=SESSION)
    fed.enrol()
    return lambda request: m.decode_answer(transport.exchange({1000: m.encode(request)}, "asked")[1000])


def crafted(draw: random.Random, held_parts: Mapping[int, Sequence[str]]) -> m.PartyRequest:
    """A request of a server that lies, mostly close to an honest one. `held_parts`: what the client declared, by number."""
    kind, held = draw.choice(("compute",) * 5 + ("give",) * 4 + ("add", "fold", "step")), draw.randint(1, 3)
    part = draw.choice(
        held_parts.get(held) or ("update", "choice", "signature", "contribution", "folds", "count", "trained", "own", "blocks", "gradient")
    )
    if kind == "give":
        operation = draw.choice(("gram", "gather", "sum"))
        transform = draw.choice(("", "gram/0", "gram/1", f"sum/{draw.randint(0, 9)}/1/0", "sum/fixed"))
        noise = draw.choice((None, None, m.Bounded("add_remove", draw.choice((1.0, 1e9)), draw.choice((1.0, 0.0)))))
        return m.Give(SESSION, operation, held, (part,), transform, draw.random() < 0.2, noise)  # type: ignore[arg-type]
    if kind == "add":
        return m.AddUp(SESSION, draw.randint(1, 3), (m.OwnPart(held, part, draw.choice((1.0, -1.0, 1e300, float("nan")))),))
    if kind == "fold":
        return m.Fold(SESSION, "apply/1/1/0", m.Addends(LINEAR.init(0), (), ()), ())
    if kind == "step":
        terms = secagg.make_terms(
            session=SESSION, slot=(draw.randint(1, 1 << 20), 0), cohort=range(3), models=[bytes(32)],
            dimension=draw.choice((1, 27, 1 << 20)), clip=8.0, roster=ROSTER, weight_limit=draw.choice((0.0, 1e5)),
            entropy=public_entropy("terms"),
        )  # fmt: skip
        message = steps.encode(steps.Invite(terms))
        return m.SumStep(SESSION, terms.slot, held, (part,), 1, draw.choice(("sum", "counts", "blocks")), None, message)
    task, params = draw.choice(TEMPLATES)
    if draw.random() < 0.6:
        task = mutated(task, draw)
    params = {name: mutated_value(value, draw) for name, value in params.items()}
    if params and draw.random() < 0.2:
        params[draw.choice(list(params))] = m.HeldValue(draw.randint(1, 3), part)
    several = any(isinstance(value, list) for value in params.values())
    which = draw.choice((None, m.Picks((0,), False), m.Picks((3, 5), True), m.HeldValue(draw.randint(1, 3), "choice"))) if several else None
    return compute(task, held, draw.randint(0, 5), which=which, **params)


def mutated(task: Any, draw: random.Random) -> Any:
    """A task with one number changed, maybe deep inside."""
    own = [attribute for attribute in dataclasses.fields(task) if attribute.init]
    if not own:
        return task
    attribute = draw.choice(own)
    value = getattr(task, attribute.name)
    changed: Any = value
    if dataclasses.is_dataclass(value):
        changed = mutated(value, draw)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        changed = draw.choice(NUMBERS)
    elif attribute.name == "shape":
        changed = draw.choice(((9,), (10**6,), (10**9,), (2, 4), (8, 10**8)))
    try:
        return replace(task, **{attribute.name: changed})
    except (InputError, TypeError, ValueError, OverflowError):
        return task


def mutated_value(value: Any, draw: random.Random) -> Any:
    if isinstance(value, list):
        made = [mutated_value(one, draw) for one in value]
        return made * draw.choice((1, 1, 1, 3, 0))
    if draw.random() < 0.5:
        return value
    array = np.asarray(value)
    if array.dtype.kind == "f":
        with np.errstate(all="ignore"):
            array = np.asarray(array * draw.choice(SCALES), array.dtype)
    return draw.choice(
        (
            array,
            array.astype("<f8"),
            array[..., None],
            np.append(array, array[..., :1]) if array.ndim else array,
            array[:0] if array.ndim else array,
        )
    )


def neighbours(seed: int) -> tuple[ClientData, ClientData]:
    """Two data sets that differ in one sample (another label, and numbers far outside of the rest), or in all but one."""
    if seed % 4 == 3:
        return DATA, replace(DATA, x_train=DATA.x_train[:1], y_train=DATA.y_train[:1])
    x, y = DATA.x_train.copy(), DATA.y_train.copy()
    x[0], y[0] = 1e6 * np.sign(x[0]), (y[0] + 1) % SCENE.classes
    return DATA, replace(DATA, x_train=x, y_train=y)


def compared(name: str, count: int, seed: int) -> dict[str, int]:
    """How often both clients answered in each way; fails where answers differ in more than released values."""
    draw, (protection, privacy) = random.Random(seed), PROTECTED[name]
    clients = [reached(data, protection, privacy) for data in neighbours(seed)]
    kinds: dict[str, int] = {}
    held: dict[int, tuple[str, ...]] = {}
    for number in range(count):
        request = crafted(draw, held)
        with np.errstate(all="ignore"):
            answers = [client(request) for client in clients]
        assert shown(answers[0]) == shown(answers[1]), (seed, number, request)
        if isinstance(request, m.Compute | m.AddUp) and isinstance(answers[0], m.Computed):
            held[request.held] = tuple(part.name for part in answers[0].parts)
        kind = answers[0].code if isinstance(answers[0], m.Refused) else type(answers[0]).__name__
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


@pytest.mark.parametrize("name", PROTECTED)
def test_crafted_requests_are_answered_alike_for_neighbouring_data(name: str) -> None:
    kinds = compared(name, 60, seed=1)
    assert kinds["Computed"] > 10, kinds
    assert "internal" not in kinds
    assert "internal" not in compared(name, 15, seed=3)


def test_a_client_that_answers_by_its_data_is_found_by_crafted_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientParts, "alike", False)
    found = 0
    for seed in range(8):
        try:
            compared("secagg", 100, seed)
        except AssertionError:
            found += 1
    assert found >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", PROTECTED)
def test_many_crafted_requests_are_answered_alike_for_neighbouring_data(name: str) -> None:
    kinds: dict[str, int] = {}
    for seed in range(20):
        for kind, count in compared(name, 100, seed).items():
            kinds[kind] = kinds.get(kind, 0) + count
    assert sum(kinds.values()) == 2000, "of five protections: 10⁴"
    assert "internal" not in kinds, kinds


# --- sizes


LARGE = Model("mlp", (8,), 3, hidden=10**8)
LINEAR_TRAINING = training(SCENE, dtype="float32")
OVER: tuple[Any, ...] = (
    replace(LINEAR_TRAINING, model=LARGE), replace(LINEAR_TRAINING, model=replace(LARGE, hidden=10**15)),
    replace(LINEAR_TRAINING, model=replace(LINEAR, classes=1 << 40)),
    replace(LINEAR_TRAINING, model=replace(LINEAR, shape=(1 << 20, 1 << 20))),
    replace(LINEAR_TRAINING, epochs=1001), replace(LINEAR_TRAINING, sampling_rate=1e-9), PrincipalVectors(1 << 17),
    PrincipalVectors(1 << 15, True, 1 << 15), FoldGradients(LINEAR, sketch=1 << 30), TrainInBlock(LINEAR_TRAINING, 10**9, 1.0),
    TrainInBlock(replace(LINEAR_TRAINING, model=replace(LINEAR, shape=(1 << 20,))), 1 << 10, 1.0),
    CentreShare(LINEAR, sketch=1 << 15, directions=1 << 15),
)  # fmt: skip


@pytest.mark.parametrize("task", OVER, ids=lambda task: type(task).__name__)
def test_work_over_the_limits_is_refused_before_a_model_is_built(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request of 229 bytes for a hidden layer of 10⁸ among them."""
    monkeypatch.setattr("cflpriv.engine.models._construct", lambda model: pytest.fail("a module was built"))
    tracemalloc.start()
    try:
        for protection in (SECURE, Protection()):
            answer = ask(client_of(DATA, protection), compute(task, model=np.zeros(27, np.float32)))
            assert answer == m.Refused("too-large")
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_without_limits_a_client_begins_to_build_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    monkeypatch.setattr(work, "check_task", lambda *request: True)
    monkeypatch.setattr("cflpriv.engine.models._construct", lambda model: built.append(model.hidden))
    ask(client_of(DATA), compute(OVER[0], model=np.zeros(27, np.float32)))
    assert set(built) == {10**8}


def test_a_frozen_layer_of_a_model_of_any_size_is_decoded_without_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cflpriv.engine.models._construct", lambda model: pytest.fail("a module was built"))
    frozen = replace(training(SCENE, dtype="float32"), model=replace(LARGE, hidden=10**7 + 1), frozen=("1",))
    data = m.encode(compute(frozen, model=np.zeros(1)))
    assert len(data) < 700
    assert m.decode_answer(client_of(DATA, limits=Limits(numbers=1 << 20)).receive(data)) == m.Refused("too-large")


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (np.full(LINEAR.dimension, np.nan, np.float32), "bad-input"), (np.full(LINEAR.dimension, -np.inf, np.float32), "bad-input"),
        (np.full(LINEAR.dimension, 1.1e9, np.float32), "bad-input"), ([LINEAR.init(0)] * 5000, "too-large"),
    ],
)  # fmt: skip
def test_parameters_are_bounded_before_the_data_are_read(model: Any, code: str) -> None:
    def unread() -> ClientData:
        pytest.fail("the data were read")

    client = FederationClient(Settings(IDENTITIES[0], SECURE, ROSTER), unread, MemoryStore(), public_entropy("answers"))
    ask(client, m.Enrol(m.VERSION, SESSION, bytes(16)))
    assert ask(client, compute(Losses(LINEAR) if isinstance(model, list) else training(SCENE), model=model)) == m.Refused(code)


def test_sums_of_parameters_of_different_shapes_are_not_spread_out() -> None:
    """A column and a row of 10⁵ numbers would make 10¹⁰."""
    client = client_of(DATA)
    ask(client, compute(Same(), update=np.zeros((1, 1 << 15))))
    spread = m.Addends(np.zeros((1 << 15, 1)), (), (m.OwnPart(1, "update", 1.0),))
    assert ask(client, m.Compute(SESSION, 0, 1, 2, (1,), m.Carried(Same()), (("update", spread),), None)) == m.Refused("bad-input")


def test_terms_of_a_sum_over_longer_vectors_are_refused_at_once() -> None:
    client = client_of(DATA)
    ask(client, compute(training(SCENE, dtype="float32"), model=LINEAR.init(0)))
    name = sums.bound(m.SumStep(SESSION, (0, 0), 1, ("update",), 0, "sum", None, b""), client.values.origin(1).received)
    for number, (dimension, code) in enumerate(((1 << 27, "bad-terms"), (LINEAR.dimension, None)), 1):
        terms = secagg.make_terms(
            session=SESSION, slot=(number, 0), cohort=range(3), models=[name], dimension=dimension, clip=8.0, roster=ROSTER
        )
        step = m.SumStep(SESSION, (number, 0), 1, ("update",), 1, "sum", None, steps.encode(steps.Invite(terms)))
        answer = ask(client, step)
        assert code == (answer.code if isinstance(answer, m.Refused) else None)


LIMITED = """
import logging, random, resource, sys, time
logging.disable(logging.CRITICAL)
sys.path[:0] = {paths}
import numpy as np
import test_answers as t
from cflpriv.federation.limits import Limits
from cflpriv.tasks.training import Train

limits = Limits(numbers=1 << 12, epochs=5, width=64, steps=64, listed=4)
scene = t.population(groups=1, clients_per_group=3, samples=400)
client = t.client_of(scene.clients[0], limits=limits)
large = t.Model("mlp", scene.shape, scene.classes, hidden=300)
each = Train(large, epochs=5, batch_size=1)

def seconds(request):
    began = time.process_time()
    answer = t.ask(client, request)
    return time.process_time() - began, answer

honest = [seconds(t.compute(t.TrainBoth(each, each, 0), model=large.init(0))) for _ in range(3)]
assert all(isinstance(answer, t.m.Computed) for _, answer in honest)
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
draw, held, longest = random.Random(5), {{}}, 0.0
with np.errstate(all="ignore"):
    for number in range({count}):
        request = t.crafted(draw, held)
        took, answer = seconds(request)
        longest = max(longest, took)
print(max(took for took, _ in honest), longest, memory, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_no_crafted_request_takes_twice_the_time_or_memory_of_the_longest_honest_one() -> None:
    """An honest request: as large as the client's limits allow. The process's CPU time, and its largest memory."""
    paths = [str(ROOT / "tests" / "unit" / "federation"), str(ROOT / "tests" / "helpers"), str(ROOT)]
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED.format(paths=paths, count=2000)], capture_output=True, encoding="utf-8", check=True
    )
    honest, longest, before, after = map(float, ended.stdout.split())
    assert longest < 2 * honest
    assert after < 2 * before
