"""CFL without ε₂: whether a cluster that stands still splits, and into what, by a test on two random halves of each member's data.

What is compared are members' gradients at the cluster's model (`tasks.fold_gradients`), not their updates: halves of an update are none of
what several local epochs do to all samples, while gradients scaled to norm 1 are linear in the samples, so that the products of halves are
unbiased. The groups are those of `clustering.group_test`, whose null hypothesis is that clients vary continuously, with the noise that
the halves show. So a cluster whose members differ by noise alone does not split, however long their updates are.

**The level over a run.** A client's t-th test is made at the level α 2⁻ᵗ (m − 1) / (n − 1) for a cluster of m of n clients. Clusters that
are tested for the t-th time are disjoint, so these add up to α 2⁻ᵗ at most, and all tests of a run to α: that is about the chance that any
cluster without groups is ever split. A level that `draws` simulations cannot show is not tested any more, so tests end by themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import numpy as np

from ...clustering.group_test import LEAST_TESTED
from ...contract.handles import Held, Shared
from ...contract.operations import Federation
from ...engine import Result, TaskInput
from ...errors import InputError
from ...privacy.settings import Noise
from ...tasks.fold_gradients import FoldGradients, fold_weights
from ...types import Parts
from ..shared.attempts import try_compute
from ..shared.grouping import FindGroups, FoundGroups, JoinGroups, find_groups
from .parameter_tree import TreeNode

__all__ = ["DRAWS", "HasHalves", "NeedsNoHalves", "SplitTest", "SplitTestResult"]

DRAWS = 1999
"""Simulations for a test: enough for four tests of all clients at α = 0.01, and for two of a quarter of them."""


@dataclass(frozen=True)
class HasHalves:
    """Refuses clients whose data cannot be halved, which is a question of their number. Part: "ready" ()."""

    uses_number_only: ClassVar[bool] = True

    parts: ClassVar[Parts] = {"ready": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def private(self, noise: Noise) -> "NeedsNoHalves":
        """The private form of folds is one vector of all samples, which any client has."""
        return NeedsNoHalves()

    def run(self, task_input: TaskInput) -> Result:
        try:
            fold_weights(task_input.data.y_train, False, np.random.default_rng(0))
        except InputError as error:
            raise InputError(f"client {task_input.data.id}: {error}") from None
        return {"ready": np.array(1.0)}


@dataclass(frozen=True)
class NeedsNoHalves:
    """Refuses nobody. Part: "ready" ()."""

    uses_data: ClassVar[bool] = False

    parts: ClassVar[Parts] = {"ready": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> Result:
        return {"ready": np.array(1.0)}


@dataclass(frozen=True, eq=False)
class SplitTestResult:
    """What a test found, of clients that hold folds."""

    folds: Held
    found: FoundGroups
    level: float

    @property
    def side(self) -> Mapping[int, int]:
        """The group of each client that was compared."""
        return dict(zip(self.found.clustering.clients, self.found.clustering.labels, strict=True))

    @property
    def facts(self) -> dict[str, Any]:
        """Notes of the test for the run."""
        kept = ("answer", "p", "p_at_least", "directions")
        return {"level": self.level, **{name: self.found.notes[name] for name in kept if name in self.found.notes}}


@dataclass(frozen=True)
class SplitTest:
    """How clusters that stand still are tested. `find.alpha` is the level over a run, and `find.at_least` the smallest side."""

    folds: FoldGradients
    find: FindGroups

    @property
    def most_tests(self) -> int:
        """How many tests a client can be in, its walk down the tree included: each split above its cluster took a test."""
        return next(tests for tests in count() if self._shown(tests) == 0)

    def level(self, node: TreeNode, members: int, clients: int) -> float:
        """The level of the next test of a cluster of so many of all clients; 0 where there is none."""
        return self._shown(node.tests, (members - 1) / max(1, clients - 1)) if members >= LEAST_TESTED else 0.0

    def _shown(self, tests: int, share: float = 1.0) -> float:
        """The level after so many tests of a `share` of the clients; 0 where `draws` cannot show it."""
        level = self.find.alpha * 0.5 ** (tests + 1) * share
        return level if level * (self.find.draws + 1) >= 1 else 0.0

    def of(self, federation: Federation, on_divergence: str, model: Shared, members: Sequence[int], level: float) -> SplitTestResult | None:
        """Test the members at their cluster's model; None where too few of them have folds."""
        held = try_compute(federation, on_divergence, self.folds, {"model": model}, on=members)
        if held is None or len(held.clients) < LEAST_TESTED:
            return None
        folds = held["folds"]
        return SplitTestResult(folds, find_groups(federation, folds, replace(self.find, alpha=level)), level)

    def joined(self, federation: Federation, on_divergence: str, node: TreeNode, clients: Sequence[int]) -> dict[int, int]:
        """The side of a split that newcomers are nearest to, by their folds at the model that was split; none for those without folds."""
        assert node.updates is not None
        held = try_compute(federation, on_divergence, self.folds, {"model": node.model}, on=clients)
        if held is None:
            return {}
        released = federation.gram(held["folds"], then=JoinGroups(self.find), against=node.updates)
        return dict(zip(held.clients, (int(label) for label in released.result["labels"]), strict=True))
