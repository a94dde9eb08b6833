"""Under sums in one message a client is asked once for its computation and for the sum over the result; the results are those of two."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from loopback import ENTROPY, HOLDER, Loopback, remote
from scenes import population, training

from cflpriv.contract.handles import Shared
from cflpriv.contract.protection import Protection
from cflpriv.engine import TaskInput
from cflpriv.errors import TrainingDiverged
from cflpriv.federation import messages as m
from cflpriv.federation.client import FederationClient
from cflpriv.federation.registry import BudgetsSpent
from cflpriv.federation.server import FederationServer
from cflpriv.federation.store import MemoryStore
from cflpriv.plugins import TASKS
from cflpriv.protocols import codec
from cflpriv.protocols.errors import ProtocolError, TooFewClients
from cflpriv.protocols.one_message import messages as steps
from cflpriv.types import Array, Parts

SCENE = population(groups=1, clients_per_group=8)
TASK = training(SCENE)
CLIP = 8.0
PROTECTION = Protection(sum="one_message", secagg_clip=CLIP)
STEP = 2 * CLIP / ((2**31 - 1) // 8)
CLIENT_STAGES = ("compute", "sum", "gather")


def after_a_round(number: int = 1, **options: Any) -> tuple[Loopback, FederationServer]:
    """A federation that knows the form of results from a first round, at the beginning of round `number`."""
    transport, fed = remote(SCENE, PROTECTION, **options)
    fed.begin_round(0)
    fed.mean(updates_of(fed))
    fed.begin_round(number)
    transport.stages.clear()
    return transport, fed


def updates_of(fed: FederationServer, on: list[int] | None = None) -> Any:
    return fed.compute(TASK, {"model": TASK.model.init(fed.round)}, on=on)["update"]


def asked(transport: Loopback) -> list[str]:
    """The exchanges with clients."""
    return [stage for stage in transport.stages if stage in CLIENT_STAGES]


def value(mean: Any) -> Array:
    assert mean is not None
    return np.asarray(mean.parts["update"].value())


@pytest.mark.parametrize("groups", [None, dict(enumerate([0, 0, 0, 0, 1, 1, 1, 1])), dict(enumerate([0] * 6 + [1] * 2))])
def test_one_exchange_a_round_gives_the_means_and_the_records_of_two(groups: dict[int, int] | None) -> None:
    messages = []
    means = []
    for together in (True, False):
        transport, fed = after_a_round(together=together)
        before = len(fed.transcript.messages)
        k = None if groups is None else 2
        means.append(fed.mean(updates_of(fed), groups=groups, k=k))
        few = groups is not None and list(groups.values()).count(1) < 3  # the two in no sum still compute
        assert asked(transport) == (["compute"] * (1 + few) if together else ["compute", "sum"])
        messages.append([(note.kind, note.clients, note.context) for note in fed.transcript.messages[before:]])
        assert not fed.refusals
    assert messages[0] == messages[1]
    for one, other in zip(*means, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.contributors == other.contributors
            np.testing.assert_allclose(value(one), value(other), rtol=0, atol=STEP)


def test_equal_requests_are_one_object() -> None:
    """A transport encodes it once: each has the model in it."""
    transport, fed = after_a_round()
    sizes = set[int]()
    exchange = transport.exchange

    def seen(requests: Any, stage: str) -> Any:
        sizes.add(len({id(data) for data in requests.values()}) if stage == "compute" else 1)
        return exchange(requests, stage)

    transport.exchange = seen  # type: ignore[method-assign]
    fed.mean(updates_of(fed))
    assert sizes == {1}


def test_what_is_not_summed_is_computed_when_it_is_needed() -> None:
    transport, fed = after_a_round()
    first = updates_of(fed)
    assert asked(transport) == []
    updates_of(fed)
    assert asked(transport) == ["compute"]
    fed.begin_round(2)
    assert asked(transport) == ["compute", "compute"]
    (mean,) = fed.mean(first)
    assert asked(transport) == ["compute", "compute", "sum"]
    assert mean is not None
    assert mean.count == 8


def test_a_client_that_does_not_answer_is_asked_no_more_and_the_mean_is_that_of_the_others() -> None:
    transport, fed = after_a_round()
    transport.kill_at = {"compute": {1, 6}}
    held = updates_of(fed)
    (mean,) = fed.mean(held)
    assert mean is not None
    assert mean.contributors == (0, 2, 3, 4, 5, 7)
    transport.dead.clear()  # back, without the value
    (again,) = fed.mean(held)
    assert again is not None
    assert again.contributors == mean.contributors
    assert not fed.refusals


def test_helpers_that_fail_leave_the_round_to_be_repeated() -> None:
    transport, fed = after_a_round()
    held = updates_of(fed)
    transport.dead |= {HOLDER - 1, HOLDER - 2}
    with pytest.raises(Exception, match="helpers"):
        fed.mean(held)
    transport.dead.clear()
    fed.begin_round(2)
    (mean,) = fed.mean(updates_of(fed))
    assert mean is not None
    assert mean.count == 8


def test_a_refusal_of_the_sum_is_none_of_the_computation() -> None:
    transport, fed = after_a_round()

    def refuses(client: int, stage: str, data: bytes) -> bytes:
        answer = m.decode_answer(data)
        if client != 3 or not isinstance(answer, m.ComputedAndSummed):
            return data
        return m.encode(msgspec.structs.replace(answer, stepped=m.Refused("forbidden")))

    transport.tamper = refuses
    held = updates_of(fed)
    (mean,) = fed.mean(held)
    assert mean is not None
    assert 3 not in mean.contributors
    assert fed.refusals == [(3, "sum", "forbidden")]
    assert 3 in fed._owners(held, None)


@pytest.mark.parametrize(
    "answer", [m.Computed(True, ()), m.Stepped(b""), m.Acknowledged(), m.ComputedAndSummed(m.Computed(False, ()), m.Stepped(b""))]
)
def test_answers_of_another_kind(answer: m.Answer) -> None:
    transport, fed = after_a_round()
    transport.tamper = lambda client, stage, data: m.encode(answer) if client == 3 and stage == "compute" else data
    (mean,) = fed.mean(updates_of(fed))
    assert mean is not None
    assert mean.contributors == (0, 1, 2, 4, 5, 6, 7)
    assert {client for client, _, _ in fed.refusals} == {3}
    assert {code for _, _, code in fed.refusals} == {"malformed"}


def test_where_all_refuse_to_compute_the_error_says_so() -> None:
    transport, fed = after_a_round()
    transport.tamper = lambda client, stage, data: m.encode(m.Refused("over-budget")) if stage == "compute" else data
    with pytest.raises(BudgetsSpent):
        fed.mean(updates_of(fed))


@dataclass(frozen=True)
class Longer:
    """A task whose result has another length in each round."""

    keeps: ClassVar[tuple[str, ...]] = ()
    length: int = 5

    @property
    def parts(self) -> Parts:
        return {"update": "summed"}

    def run(self, given: TaskInput) -> dict[str, Array]:
        return {"update": np.full(self.length, given.data.id / 8, np.float32)}


def test_results_of_another_form_than_before_are_asked_for_in_two_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS.ready(), "Longer", Longer)
    transport, fed = remote(SCENE, PROTECTION)
    for number, length in enumerate((5, 6, 6)):
        fed.begin_round(number)
        transport.stages.clear()
        (mean,) = fed.mean(fed.compute(Longer(length=length), {"model": np.zeros(3, np.float32)}))
        np.testing.assert_allclose(value(mean), np.full(length, 3.5 / 8), rtol=0, atol=STEP)
        assert asked(transport) == [["compute", "sum"], ["compute", "sum"], ["compute"]][number]


def test_a_client_answers_as_to_one_request_after_the_other() -> None:
    """What it keeps and what it sends, but for what it draws."""
    transport, fed = after_a_round()
    messages: list[bytes] = []
    exchange = transport.exchange
    copies = [MemoryStore(), MemoryStore()]

    def seen(requests: Any, stage: str) -> Any:
        if stage == "compute":
            messages.append(requests[1003])
            for copy in copies:
                for name in transport.stores[3].names():
                    copy.put(name, transport.stores[3].get(name) or b"")
        return exchange(requests, stage)

    transport.exchange = seen  # type: ignore[method-assign]
    fed.mean(updates_of(fed))
    both = m.decode_ask(messages[0])
    assert isinstance(both, m.ComputeAndSum)
    client = partial(FederationClient, transport.settings(3), partial(transport.data.__getitem__, 3))
    at_once = m.decode_answer(client(copies[0], ENTROPY).receive(messages[0]))
    computed = m.decode_answer(client(copies[1], ENTROPY).receive(m.encode(both.compute)))
    stepped = m.decode_answer(client(copies[1], ENTROPY).receive(m.encode(both.step)))
    assert isinstance(at_once, m.ComputedAndSummed)
    assert isinstance(at_once.stepped, m.Stepped)
    assert isinstance(stepped, m.Stepped)
    assert at_once.computed == computed
    uploads = [codec.decode(answer.message, steps.MaskedUpload, 1 << 20) for answer in (at_once.stepped, stepped)]
    assert [(one.client, one.context, one.names, len(one.vector)) for one in uploads] == [
        (uploads[0].client, uploads[0].context, uploads[0].names, len(uploads[0].vector))
    ] * 2
    assert sorted(copies[0].names()) == sorted(copies[1].names())
    again = m.decode_answer(client(copies[0], ENTROPY).receive(messages[0]))  # a copy of the request gets no second upload
    assert isinstance(again, m.ComputedAndSummed)
    assert isinstance(again.stepped, m.Refused)


def test_a_sum_of_another_session_is_refused_with_its_computation() -> None:
    transport, fed = after_a_round()
    messages: list[bytes] = []
    exchange = transport.exchange

    def seen(requests: Any, stage: str) -> Any:
        messages.extend(requests.values())
        return exchange(requests, stage)

    transport.exchange = seen  # type: ignore[method-assign]
    fed.mean(updates_of(fed))
    both = next(ask for data in messages if isinstance(ask := m.decode_ask(data), m.ComputeAndSum))
    other = msgspec.structs.replace(both, step=msgspec.structs.replace(both.step, session=bytes(16)))
    client = FederationClient(transport.settings(3), partial(transport.data.__getitem__, 3), transport.stores[3], ENTROPY)
    assert m.decode_answer(client.receive(m.encode(other))) == m.Refused("wrong-session")


def test_too_few_clients_are_no_reason_to_lose_the_others() -> None:
    transport, fed = after_a_round()
    transport.kill_at = {"compute": set(range(6))}
    held = updates_of(fed)
    with pytest.raises(TooFewClients):
        fed.mean(held)
    assert fed.clients == (6, 7)


def test_who_reads_the_clients_of_a_value_reads_those_that_have_it() -> None:
    """Also of handles that were made before anybody was asked."""
    transport, fed = after_a_round()
    transport.kill_at = {"compute": {2}}
    held = fed.compute(TASK, {"model": TASK.model.init(1)})
    part = held["update"]
    some = part.of((1, 2, 3, 4))
    assert asked(transport) == []
    assert part.clients == (0, 1, 3, 4, 5, 6, 7)
    assert (held.clients, some.clients) == (part.clients, (1, 3, 4))
    assert asked(transport) == ["compute"]
    (mean,) = fed.mean(some)
    assert mean is not None
    assert mean.contributors == (1, 3, 4)


def test_after_the_mean_only_who_has_a_value_is_asked_for_more() -> None:
    transport, fed = after_a_round()
    transport.tamper = lambda client, stage, data: m.encode(m.Refused("internal")) if client == 2 and stage == "compute" else data
    held = updates_of(fed)
    fed.mean(held)
    assert 2 in fed.clients
    transport.tamper = lambda client, stage, data: data
    before = len(fed.refusals)
    again = fed.compute(TASK, {"model": Shared(TASK.model.init(2))}, on=held.clients)
    fed.begin_round(2)
    assert again.clients == held.clients == (0, 1, 3, 4, 5, 6, 7)
    assert len(fed.refusals) == before
    restored = fed.known(held.key)
    assert "absent" not in restored
    json.dumps(restored)


@pytest.mark.parametrize("away", ["lose", "remove"])
def test_a_client_that_went_away_before_the_sum_is_not_asked(away: str) -> None:
    transport, fed = after_a_round()
    held = updates_of(fed)
    getattr(fed, away)([5])
    seen = set[int]()
    exchange = transport.exchange

    def noted(requests: Any, stage: str) -> Any:
        seen.update(requests if stage == "compute" else ())
        return exchange(requests, stage)

    transport.exchange = noted  # type: ignore[method-assign]
    (mean,) = fed.mean(held)
    assert mean is not None
    assert mean.contributors == (0, 1, 2, 3, 4, 6, 7)
    assert 1005 not in seen
    assert held.clients == mean.contributors


def test_a_group_that_is_too_small_has_only_members_with_a_result() -> None:
    protection = Protection(sum="one_message", secagg_clip=CLIP, small_clusters="local")
    transport, fed = remote(SCENE, protection)
    groups = dict(enumerate([0] * 6 + [1] * 2))
    fed.begin_round(0)
    fed.mean(updates_of(fed), groups=groups, k=2)
    fed.begin_round(1)
    transport.tamper = lambda client, stage, data: m.encode(m.Refused("internal")) if client == 7 and stage == "compute" else data
    _, small = fed.mean(updates_of(fed), groups=groups, k=2)
    assert small is not None
    assert small.count == 1
    assert [addend.held.clients for addend in small.parts["update"].own] == [(6,)]


@dataclass(frozen=True)
class Shaped:
    """A task whose result changes its shape and dtype, but not its size."""

    keeps: ClassVar[tuple[str, ...]] = ()
    shape: tuple[int, ...] = (6,)
    dtype: str = "<f4"

    @property
    def parts(self) -> Parts:
        return {"update": "summed"}

    def run(self, given: TaskInput) -> dict[str, Array]:
        return {"update": np.full(self.shape, given.data.id / 8, self.dtype)}


def test_a_mean_has_the_form_that_clients_declare_not_that_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS.ready(), "Shaped", Shaped)
    transport, fed = remote(SCENE, PROTECTION)
    for number, task in enumerate((Shaped(), Shaped((2, 3)), Shaped((3, 2), "<f8"), Shaped((3, 2), "<f8"))):
        fed.begin_round(number)
        transport.stages.clear()
        (mean,) = fed.mean(fed.compute(task, {"model": np.zeros(3, np.float32)}))
        assert value(mean).shape == task.shape
        assert value(mean).dtype == task.dtype
        np.testing.assert_allclose(value(mean), np.full(task.shape, 3.5 / 8), rtol=0, atol=STEP)
        assert asked(transport) == (["compute"] if number else ["compute", "sum"])


@pytest.mark.parametrize("code", ["over-budget", "internal"])
def test_a_computation_that_nobody_needs_any_more_ends_no_run(code: str) -> None:
    transport, fed = after_a_round()
    held = updates_of(fed)
    transport.tamper = lambda client, stage, data: m.encode(m.Refused(code)) if stage == "compute" else data
    fed.begin_round(2)
    transport.tamper = lambda client, stage, data: data
    with pytest.raises(TooFewClients):
        fed.mean(held)
    (mean,) = fed.mean(updates_of(fed))
    assert mean is not None


def test_after_a_sum_without_helpers_nothing_waits() -> None:
    transport, fed = after_a_round()
    updates = updates_of(fed)
    transport.dead |= {HOLDER - 1, HOLDER - 2}
    transport.tamper = lambda client, stage, data: m.encode(m.Refused("over-budget")) if stage == "compute" else data
    with pytest.raises(ProtocolError, match="helpers"):
        fed.mean(updates)
    assert asked(transport) == ["compute"]
    transport.dead.clear()
    transport.tamper = lambda client, stage, data: data
    assert updates_of(fed).clients == tuple(range(8))  # as scores are, in the same round


def test_where_all_refuse_to_compute_no_setting_of_sums_is_to_blame() -> None:
    transport, fed = after_a_round()
    groups = dict(enumerate([0, 0, 0, 0, 1, 1, 1, 1]))
    models = [TASK.model.init(1), TASK.model.init(2)]
    transport.tamper = lambda client, stage, data: m.encode(m.Refused("forbidden")) if stage == "compute" else data
    held = fed.compute(TASK, {"model": models}, which=groups)
    with pytest.raises(TrainingDiverged):
        fed.mean(held["update"], models=2)
