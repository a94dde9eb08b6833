"""Groups from any part that clients send in rows."""

import numpy as np
import pytest
from attack_scenes import case, config

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.compared.likeness import alike
from cflpriv.attacks.figures.leakage import chance_of_deals
from cflpriv.types import Array


def grouped(seed: int, clients: int, apart: float) -> dict[int, Array]:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((3, 20))
    return {client: 100 + apart * centres[client % 3] + rng.standard_normal(20) for client in range(clients)}


def test_rows_of_groups_are_told_apart_whatever_they_have_in_common() -> None:
    labels = alike([grouped(0, 18, 5.0)], range(18), 3)
    assert len({(client % 3, label) for client, label in labels.items()}) == 3


def test_rows_under_several_transforms_are_not_mixed() -> None:
    """Each table has a rotation of its own, which keeps cosines within the table only; some clients are missing in each."""
    tables = []
    for seed in range(4):
        turned, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((20, 20)))
        tables.append({client: row @ turned for client, row in grouped(7, 18, 5.0).items() if client % 6 != seed})
    labels = alike(tables, range(18), 3)
    assert len({(client % 3, label) for client, label in labels.items()}) == 3


def test_rows_without_groups_show_none() -> None:
    """The test is exact: of 120 tables without groups at most 2.5 % are shown."""
    groups = np.arange(12) % 3
    shown = 0
    for seed in range(120):
        labels = alike([grouped(seed, 12, 0.0)], range(12), 3)
        shown += chance_of_deals(np.array([labels[client] for client in range(12)]), groups, seed, times=399) < 0.025
    assert shown <= 120 * 0.025 + 3 * np.sqrt(120 * 0.025 * 0.975)


@pytest.mark.parametrize("protection", [{}, {"sum": "haar"}], ids=["clear", "haar"])
def test_updates_name_groups_of_which_no_message_speaks(protection: dict[str, str]) -> None:
    """All clients have all labels, and are sent one model."""
    data = {"source": "digits", "partition": "iid", "rotations": [0, 90, 180, 270], "clients": 12, "samples_per_client": 60}
    made = config(
        {"name": "fedavg"}, protection, data=data | {"groups": []}, training={"rounds": 1, "weights": "equal"}, model={"name": "linear"}
    )
    seen = case(made)
    figures = {cell.metric: cell for cell in ATTACKS["likeness"].cells(seen)[0]}
    part = "blind" if protection else "update"
    assert figures[f"{part}_group_accuracy"].status == "leaks", figures[f"{part}_group_accuracy"].line()
    assert ATTACKS["cluster_identity"].cells(seen)[0][0].status == "not_applicable"


def test_control_variates_name_the_groups_of_scaffold() -> None:
    made = config({"name": "scaffold"}, training={"rounds": 3, "batch_size": 0})
    figures = {cell.metric: cell for cell in ATTACKS["likeness"].cells(case(made))[0]}
    assert figures["control_group_accuracy"].status == "leaks", figures["control_group_accuracy"].line()


def test_of_secure_sums_there_are_no_rows() -> None:
    (cell,), _ = ATTACKS["likeness"].cells(case(config({"name": "fedavg"}, {"sum": "secagg"})))
    assert cell.status == "not_applicable", cell.line()
