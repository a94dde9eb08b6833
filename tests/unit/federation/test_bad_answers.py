"""A client that answers with what no protocol allows: it is named, it is left out, and the run goes on without it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import remote
from scenes import eye, federation, population, training

from cflpriv.contract.protection import Protection
from cflpriv.errors import TooFewClients
from cflpriv.federation import messages as m
from cflpriv.federation.registry import declared
from cflpriv.federation.server import FederationServer
from cflpriv.protocols.errors import MalformedMessage
from cflpriv.tasks.evaluation import Losses

SCENE = population(groups=1, clients_per_group=6)
TASK = training(SCENE)
BAD = 4
HONEST = (m.Described("update", "<f8", (27,)), m.Described("count", "<f8", ()))
Reply = Callable[[m.Answer], m.Answer]

MALFORMED: Mapping[str, tuple[m.Described, ...]] = {
    "of 2¹⁰⁶ numbers": (m.Described("update", "<f8", (1 << 53, 1 << 53)),),
    "of no numbers, but an axis of 2⁵³": (m.Described("update", "<f8", (1 << 53, 0)),),
    "of seventy axes": (m.Described("update", "<f8", (1,) * 70),),
    "of an unknown dtype": (m.Described("update", "nonsense", (27,)),),
    "of objects": (m.Described("update", "|O", (27,)),),
    "of words": (m.Described("update", "<U8", (27,)),),
    "under a name that nobody asked for": (*HONEST, m.Described("secret", "<f8", (1,))),
    "of one name twice": (HONEST[0], HONEST[0]),
    "in another order": HONEST[::-1],
}
ODD: Mapping[str, tuple[m.Described, ...]] = {
    "of another length": (m.Described("update", "<f8", (28,)), HONEST[1]),
    "of another dtype": (m.Described("update", "<f4", (27,)), HONEST[1]),
    "of zero length": (m.Described("update", "<f8", (0,)), HONEST[1]),
    "of too few parts": HONEST[1:],
    "of none": (),
}


def spoiled(where: str, protection: Protection, reply: Reply, kind: type) -> FederationServer:
    """A federation in which one client gives other answers to the requests of a kind, over memory or bytes."""
    if where == "bytes":
        transport, fed = remote(SCENE, protection)
        honest = transport.exchange

        def exchange(requests: Any, stage: str) -> Any:
            answers = dict(honest(requests, stage))
            place = 1000 + BAD
            if place in answers and isinstance(m.decode_ask(requests[place]), kind):
                answers[place] = m.encode(reply(m.decode_answer(answers[place])))
            return answers

        transport.exchange = exchange  # type: ignore[method-assign]
    else:
        fed = federation(SCENE, protection, release_policy="strict")
        party = eye(fed).client(BAD)
        handled = party.handle

        def handle(ask: Any, shared: Any) -> Any:
            answer = yield from handled(ask, shared)
            return reply(answer) if isinstance(ask, kind) else answer

        party.handle = handle  # type: ignore[method-assign, assignment]
    fed.begin_round(0)
    return fed


@pytest.mark.parametrize("where", ["memory", "bytes"])
@pytest.mark.parametrize(
    "protection", [Protection(), Protection(sum="secagg"), Protection(gram=("haar",), sum="haar")], ids=lambda p: p.name
)
@pytest.mark.parametrize("layout", [*MALFORMED, *ODD])
def test_a_layout_that_is_none_costs_its_client_only(layout: str, protection: Protection, where: str) -> None:
    parts = {**MALFORMED, **ODD}[layout]
    fed = spoiled(where, protection, lambda answer: m.Computed(True, parts), m.Compute)
    held = fed.compute(TASK, {"model": TASK.model.init(0)})
    assert held.clients == tuple(client for client in range(6) if client != BAD or layout in ODD)
    (mean,) = fed.mean(held["update"])
    assert mean is not None
    assert mean.count == 5
    assert fed.refusals == [(BAD, "compute" if layout in MALFORMED else "mean", "malformed")]


def test_a_server_that_believes_any_layout_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cflpriv.federation.server.declared", lambda answer, parts: answer.layout)
    fed = spoiled("bytes", Protection(), lambda answer: m.Computed(True, MALFORMED["of an unknown dtype"]), m.Compute)
    held = fed.compute(TASK, {"model": TASK.model.init(0)}, on=[BAD])
    with pytest.raises(TypeError, match="nonsense"):
        fed.gram(held["update"], then=lambda view: ({}, {}))


OTHER: tuple[m.Answer, ...] = (
    m.Acknowledged(), m.Stepped(b""), m.Stepped(bytes(1000)), m.SealedBoxes(()), m.Unusable((0, 1)), m.HolderRelease((), (), ()),
    m.Given((), 0), m.Computed(True, ()), m.Computed(False, ()),
)  # fmt: skip


@pytest.mark.parametrize("where", ["memory", "bytes"])
@pytest.mark.parametrize("answer", OTHER, ids=lambda answer: type(answer).__name__)
@pytest.mark.parametrize("kind", [m.Compute, m.SumStep, m.Give])
def test_another_answer_than_asked_for_costs_its_client_only(kind: type, answer: m.Answer, where: str) -> None:
    protection = Protection() if kind is m.Give else Protection(sum="secagg")
    fed = spoiled(where, protection, lambda _: answer, kind)
    held = fed.compute(TASK, {"model": TASK.model.init(0)})
    (mean,) = fed.mean(held["update"])
    assert mean is not None
    assert BAD not in mean.contributors
    assert mean.count == 5
    assert {(client, code) for client, _, code in fed.refusals} <= {(BAD, "malformed"), (BAD, "wrong-stage")}
    assert fed.refusals or answer == m.Computed(False, ())


@pytest.mark.parametrize("where", ["memory", "bytes"])
@pytest.mark.parametrize("value", [np.array(1 << 62), np.array(-1), np.array(np.nan), np.array([0, 1]), np.array(0, "<u2"), np.array(True)])
def test_a_choice_that_is_none_costs_its_client_only(value: Any, where: str) -> None:
    fed = spoiled(where, Protection(), lambda _: m.Given((m.NamedArray("choice", value),), 0), m.Give)
    models = [TASK.model.init(0), TASK.model.init(1)]
    held = fed.compute(Losses(TASK.model), {"model": models})["choice"]
    from cflpriv.algorithms.shared.attempts import choices

    chosen = choices(fed, held, 2)
    assert chosen is not None
    assert set(chosen) == set(range(6)) - {BAD}


# --- any layout at all


DECLARED = st.builds(
    m.Described, st.sampled_from(("update", "count", "other", "")),
    st.one_of(st.sampled_from(("<f8", "<f4", "|O", "<i8", ">f8")), st.text(max_size=8)),
    st.lists(st.integers(0, 1 << 53), max_size=12).map(tuple),
)  # fmt: skip


@given(st.lists(DECLARED, max_size=5))
@settings(deadline=None)
def test_a_declared_layout_can_be_made_or_is_malformed(parts: list[m.Described]) -> None:
    try:
        layout = declared(m.Computed(True, tuple(parts)), ("update", "count"))
    except MalformedMessage:
        return
    assert layout is not None
    assert layout.nbytes <= 8 << 31
    for _, dtype, shape in layout.parts:
        assert np.broadcast_to(np.zeros((), dtype), shape).shape == shape


def test_a_bad_client_of_two_leaves_no_sum_and_no_error() -> None:
    """With no majority nobody knows who is right."""
    fed = spoiled("bytes", Protection(sum="secagg"), lambda answer: m.Computed(True, MALFORMED["of objects"]), m.Compute)
    held = fed.compute(TASK, {"model": TASK.model.init(0)}, on=[0, BAD])
    with pytest.raises(TooFewClients):
        fed.mean(held["update"])
    assert fed.refusals == [(BAD, "compute", "malformed")]
