"""Members from the mean losses that clients report."""

from functools import partial

import numpy as np
import pytest
from attack_scenes import case, config, figures_of

from cflpriv.attacks.membership.loss_members import coins_of_losses

member_figures = partial(figures_of, "membership")


@pytest.mark.parametrize(("equations", "least"), [(12, 1.0), (6, 0.8)])
def test_coins_follow_from_sums(equations: int, least: float) -> None:
    """Ten coins: as many equations give all of them; six are right about more than chance, on average of 200 (error 1 in 1000)."""
    rng = np.random.default_rng(0)
    right = []
    for _ in range(200):
        halves, coins = rng.standard_normal((10, equations)), np.where(rng.random(10) < 0.5, 1.0, -1.0)
        right.append(np.mean(np.sign(coins_of_losses(halves, coins @ halves)) == coins))
    assert np.mean(right) >= least - 0.01


def test_losses_show_members_although_updates_are_summed() -> None:
    """FedGWC's clients report losses in the open, under secure sums, too."""
    data = {"clients": 8, "groups": [[0, 1, 2, 3]], "samples_per_client": 20}
    seen = case(config({"name": "fedgwc"}, {"sum": "secagg"}, data=data, training={"rounds": 6, "participation": 0.75}))
    found = member_figures(seen)["reported_losses_auc"]
    assert found.status == "leaks", found.line()
    assert (found.value or 0.0) > 0.7


def test_without_reports_there_is_no_figure() -> None:
    assert "reported_losses_auc" not in member_figures(case(config({"name": "fedavg"}, {"sum": "secagg"}, training={"rounds": 1})))
