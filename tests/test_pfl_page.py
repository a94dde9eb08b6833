"""The page about pfl-research runs: its block in pfl's own simulation backend, with an algorithm of a few lines."""

import asyncio
import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pfl.postprocessor", reason="pfl-research (package pfl) is not installed")

from checkout import ROOT
from pfl.aggregate.simulate import SimulatedBackend
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data import FederatedDataset
from pfl.data.dataset import Dataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.internal.ops import numpy_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics

from cflpriv.protocols.ledger import BudgetExceeded

PAGE = ROOT / "docs" / "pfl_research.md"
USERS, SIZE = 5, 5000


class Sends:
    """An algorithm whose users send their number as an update of norm `length`, weighted by their samples."""

    def __init__(self, length: float) -> None:
        self.length = length

    def simulate_one_user(self, model: Any, user: Any, context: Any) -> tuple[Any, Any]:
        weight = float(len(user))
        value = np.full((SIZE // 5, 5), self.length * (1 + user.raw_data[0][0]) / SIZE**0.5)
        return MappedVectorStatistics({"w": weight * value, "b": np.zeros(3)}, weight), Metrics()


@pytest.fixture
def page() -> Any:
    (block,) = re.findall(r'^```python title="secure_sum.py"\n(.*?)^```$', PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "secure_sum.py", "exec"), names)
    return SimpleNamespace(**names)


def gathered(pair: Any, length: float, iteration: int = 0) -> Any:
    """The statistics after both halves, of a cohort of all users."""
    set_framework_module(numpy_ops)
    data = FederatedDataset(
        lambda number: Dataset([np.full(2 + number, 0.1 * number)], user_id=str(number)), MinimizeReuseUserSampler(list(range(USERS)))
    )
    backend = SimulatedBackend(data, data, [pair])
    context: Any = CentralContext(iteration, False, USERS, Population.TRAIN, SimpleNamespace(), SimpleNamespace(), SimpleNamespace(), 0)
    found, _ = asyncio.run(backend.async_gather_results(None, Sends(length), central_context=context))
    return found


def test_the_pair_gives_the_sum_of_equal_weights_with_the_noise_of_its_event(page: Any) -> None:
    """The deviation is estimated from 5000 numbers: within 6 of its standard errors but for one in 10^8 runs."""
    pair = page.SecureSum(USERS, 2.0, 0.05, epsilon=1e6, delta=1e-6)
    found = gathered(pair, 0.5)
    assert found.weight == USERS
    expected = 0.5 * sum(1 + 0.1 * number for number in range(USERS)) / SIZE**0.5
    error = np.ravel(found["w"]) - expected
    assert found["w"].shape == (SIZE // 5, 5)
    assert np.std(error) == pytest.approx(0.05 * 2.0, rel=6 / np.sqrt(2 * SIZE))
    assert abs(np.mean(error)) < 6 * 0.1 / np.sqrt(SIZE)


def test_long_updates_are_clipped(page: Any) -> None:
    found = gathered(page.SecureSum(USERS, 1.0, 1e-3, epsilon=1e12, delta=1e-6), 100.0)
    total = np.linalg.norm(np.ravel(found["w"]))
    assert total == pytest.approx(USERS, rel=0.02)


def test_the_budget_ends_the_training_before_a_round_is_released(page: Any) -> None:
    pair = page.SecureSum(USERS, 1.0, 2.0, epsilon=3.0, delta=1e-6)
    rounds = 0
    with suppress(BudgetExceeded):
        for rounds in range(100):
            gathered(pair, 0.5, rounds)
    assert 0 < rounds < 99
    assert len(pair.ledger.charges) == rounds
    assert pair.ledger.spent(page.USER) <= 3.0


def test_more_users_than_the_sum_was_made_for_are_refused(page: Any) -> None:
    pair = page.SecureSum(USERS - 1, 1.0, 1.0, epsilon=8.0, delta=1e-6)
    with pytest.raises(ValueError, match="5 users in a sum that was made for 4"):
        gathered(pair, 0.5)
