"""An update's way from the engine's result to the server's sum, and a signature's way to the Gram matrix, are short.

Traced with `sys.setprofile` (`traced_way.Way` says what counts). Run with `-s` to see the modules. Before, 23 modules held an update in
memory; the aim was 14, and 18 over bytes. These 15 are left:

    federation.host, work, values, client     the engine's result, how a task's results are held, and which parts a sum may have
    aggregation.secagg, types                 the client's vector and the group's mean; the check of finite numbers
    protocols.secagg.client, vectors, server  the two machines; fixed point, masks and the sum
    protocols.secagg.messages, codec          the masked vector as bytes of the protocol, which are what is signed and hashed
    transports.memory, federation.registry,   the masked vector from the client to the server's machine: transport, answers and refusals,
    aggregation.secure_sums                   several groups in parallel
    contract.handles                          the layout of parts in one vector, and the sum as algorithms get it

Over bytes `transports.memory` goes, and the encoding (`messages`, `message_encoding`, `transport`) and the client's `store` come.

The aim of 220 functions was not reached. Of 352 pieces of code (249 functions; the others are comprehensions, of which Python 3.12 makes
none) 169 are of the protocol: keys, shares, complaints, state tables, bindings. Its rules need these, and fewer would be longer ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from loopback import remote
from scenes import federation, population
from traced_way import Way

from cflpriv.contract.operations import GramView
from cflpriv.contract.protection import Protection
from cflpriv.engine import TaskInput
from cflpriv.federation.server import FederationServer
from cflpriv.plugins import TASKS
from cflpriv.types import Array, Parts

LENGTH, ROW = 20011, 1009


@dataclass(frozen=True)
class Drawn:
    """A task without parameters whose result has a length that nothing else has."""

    part: str

    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def parts(self) -> Parts:
        return {self.part: "summed" if self.part == "update" else "compared"}

    def run(self, given: TaskInput) -> dict[str, Array]:
        draws = np.random.default_rng(given.data.id)
        return {self.part: draws.uniform(-0.5, 0.5, LENGTH if self.part == "update" else ROW).astype(np.float32)}


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS.ready(), "Drawn", Drawn)
        yield


def traced(length: int, where: str, protection: Protection, call: Callable[[FederationServer], Any]) -> tuple[Way, Any]:
    """The way in the second round, when all modules are loaded and the clients have advertised keys for the sum; the result."""
    scene = population(clients_per_group=2)
    fed = federation(scene, protection, release_policy="strict") if where == "memory" else remote(scene, protection)[1]
    fed.begin_round(0)
    call(fed)
    fed.begin_round(1)
    way = Way(length)
    result = way.trace(lambda: call(fed))
    return way, result


@pytest.mark.parametrize(("where", "rooms", "functions"), [("memory", 15, 378), ("bytes", 18, 469)])
def test_the_way_of_an_update_to_a_secure_sum(where: str, rooms: int, functions: int) -> None:
    protection = Protection(sum="secagg", min_cohort=2)
    way, (mean,) = traced(LENGTH, where, protection, lambda fed: fed.mean(fed.compute(Drawn("update"))))
    assert mean is not None
    assert mean.parts["update"].value().shape == (LENGTH,)
    print(f"\nan update, over {where}: {way}")
    assert len(way.holds) <= rooms, str(way)
    assert len(way.functions) <= functions, str(way)
    assert {"federation.values", "aggregation.secagg", "protocols.secagg.client", "protocols.secagg.server"} <= way.holds


@pytest.mark.parametrize(("where", "rooms", "functions"), [("memory", 14, 206), ("bytes", 20, 285)])
def test_the_way_of_a_signature_under_haar(where: str, rooms: int, functions: int) -> None:
    def first(view: GramView) -> tuple[Any, Any]:
        return {"labels": np.zeros(view.gram.n, dtype=int)}, {}

    way, _ = traced(ROW, where, Protection(gram=("haar",)), lambda fed: fed.gram(fed.compute(Drawn("signature")), first))
    print(f"\na signature, over {where}: {way}")
    assert len(way.holds) <= rooms, str(way)
    assert len(way.functions) <= functions, str(way)
    assert {"federation.values", "aggregation.transformed", "aggregation.vector_epochs"} <= way.holds
