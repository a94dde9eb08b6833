"""The helpers' noise: its distribution, who can take it off, and that all helpers draw the same.

Error rate: each statistical test is at 1e-7; with the six of one run, a run fails by chance with less than 1e-6.
"""

from bisect import bisect_right

import numpy as np
import pytest
from scipy.stats import chi2, norm

from cflpriv.protocols.one_message import HelpedServer, seed_sets
from cflpriv.protocols.one_message import messages as m
from cflpriv.protocols.one_message import noise as module
from cflpriv.protocols.one_message.noise import REACH, discrete_gaussian
from cflpriv.protocols.one_message.terms import context, held

from .scene import Scene, levels

ALPHA = 1e-7


def surprise(observed: np.ndarray, expected: np.ndarray) -> float:
    """The probability of counts that differ so much from what is expected; cells with few are joined at both ends."""
    enough = np.flatnonzero(np.cumsum(expected) >= 50)[0], len(expected) - np.flatnonzero(np.cumsum(expected[::-1]) >= 50)[0]
    cells = [slice(0, enough[0] + 1), *(slice(at, at + 1) for at in range(enough[0] + 1, enough[1] - 1)), slice(enough[1] - 1, None)]
    seen, due = (np.array([some[cell].sum() for cell in cells]) for some in (observed, expected))
    return float(chi2.sf(((seen - due) ** 2 / due).sum(), len(cells) - 1))


@pytest.mark.parametrize("deviation", [1, 8, 100])
def test_draws_are_discrete_gaussian(deviation: int) -> None:
    count = 200_000
    drawn = discrete_gaussian(bytes(31) + bytes([deviation]), count, deviation)
    values = np.arange(-REACH * deviation, REACH * deviation + 1)
    weights = np.exp(-(values**2) / (2 * deviation**2))
    observed = np.bincount(drawn + REACH * deviation, minlength=len(values))
    assert len(observed) == len(values)
    assert surprise(observed, count * weights / weights.sum()) > ALPHA
    assert surprise(np.roll(observed, max(1, deviation // 10)), count * weights / weights.sum()) < ALPHA  # its power


def test_the_table_is_the_distribution_function() -> None:
    """Of a wide one that of a normal at half integers is the same up to 1 / (24 deviation²); a table is symmetric and ends below one."""
    bounds, _ = module._table(1000)
    probabilities = np.array(bounds, dtype=object) / 2**128
    halves = (np.arange(-REACH * 1000, REACH * 1000) + 0.5) / 1000
    np.testing.assert_allclose(probabilities.astype(float), norm.cdf(halves), atol=1e-7)
    assert all(abs(bounds[at] + bounds[-1 - at] - 2**128) <= 1 for at in range(0, len(bounds), 997))
    assert bounds[-1] < 2**128


def test_draws_whose_first_words_do_not_decide_are_decided_by_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds, heads = module._table(4)
    word = int(heads[50])
    monkeypatch.setattr(module, "keystream", lambda key, count: word.to_bytes(8, "little") * (count // 8))
    drawn = discrete_gaussian(bytes(32), 400, 4)
    tail = int(bounds[50]) & (2**64 - 1)
    assert set(drawn + 4 * REACH) == {50, 51}
    share = 1 - tail / 2**64  # of tails that are no smaller
    assert abs((drawn == 51 - 4 * REACH).mean() - share) < 0.5 * (share * (1 - share) / 400) ** 0.5 * 12
    assert bisect_right(bounds, (word << 64) | tail) == 51


def noisy_sum(scene: Scene, noise: int, dimension: int) -> tuple[HelpedServer, np.ndarray]:
    """The server of a sum with noise, and the noise of its result."""
    announced = scene.announced()
    server = scene.server(scene.terms(announced, dimension=dimension, noise=noise), announced)
    for client in range(scene.clients):
        server.receive(client, scene.upload(client, server))
    scene.finish(server, scene.all())
    return server, server.result.block() - np.sum([levels(client, dimension) for client in range(scene.clients)], axis=0)


@pytest.mark.parametrize(("helpers", "colluding"), [(2, 1), (4, 1), (5, 2)])
def test_a_sum_has_the_noise_of_each_seed_and_a_coalition_lacks_one(helpers: int, colluding: int) -> None:
    """What t helpers know of the noise leaves all of one set's: its deviation, by a chi-square test of the variance."""
    scene, deviation, dimension = Scene(3, helpers, colluding), 50, 20_000
    server, noise = noisy_sum(scene, deviation, dimension)
    assert surprise_of_variance(noise, deviation**2 * len(seed_sets(helpers, colluding))) > ALPHA
    agreed = context(server.terms)
    known: dict[int, np.ndarray] = {}
    for helper in range(colluding):
        kept = scene.helper(helper)._uploads(agreed)[0]
        for place, number in enumerate(held(server.terms, helper)):
            seeds = [kept[client].seeds[32 * place : 32 * place + 32] for client in range(3)]
            known[number] = discrete_gaussian(m.noise_key(server._name, number, seeds), dimension, deviation)
    assert len(known) == len(seed_sets(helpers, colluding)) - 1
    left = noise - np.sum(list(known.values()), axis=0)
    assert surprise_of_variance(left, deviation**2) > ALPHA


def surprise_of_variance(values: np.ndarray, variance: float) -> float:
    statistic = float((values.astype(float) ** 2).sum() / variance)
    return 2 * min(float(chi2.sf(statistic, len(values))), float(chi2.cdf(statistic, len(values))))


def test_the_noise_of_one_set_of_clients_is_the_same_however_often_it_is_asked_for() -> None:
    scene = Scene(3)
    announced = scene.announced()
    server = scene.server(scene.terms(announced, noise=30), announced)
    for client in range(3):
        server.receive(client, scene.upload(client, server))
    there = scene.all()
    server.delivered({helper: there[helper].receive(data) for helper, data in server.deliver().items()})
    messages = server.advance({helper: there[helper].receive(data) for helper, data in server.close().items()})
    for helper, data in messages.items():
        assert there[helper].receive(data) == scene.helper(helper).receive(data)


def test_noise_leaves_room_in_the_range_of_a_sum() -> None:
    scene = Scene(5)
    announced = scene.announced()
    for bits, noise in ((16, 100), (32, 1024)):
        terms = scene.terms(announced, bits=bits, noise=noise)
        assert terms.maximum * terms.levels + 4 * REACH * noise < 2 ** (bits - 1)
        assert terms.maximum * (terms.levels + 1) + 4 * REACH * noise >= 2 ** (bits - 1)
        with pytest.raises(ValueError, match="leaves no room"):
            scene.terms(announced, bits=bits, noise=noise, levels=terms.levels + 1)
    with pytest.raises(ValueError, match="levels"):
        scene.terms(announced, bits=16, noise=1024)
    with pytest.raises(ValueError, match="unweighted"):
        scene.terms(announced, noise=8, weight_limit=4.0)
