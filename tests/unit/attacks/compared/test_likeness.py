"""Groups from any part that clients send."""

import numpy as np
from attack_scenes import case, config

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.compared.likeness import alike
from cflpriv.types import Array


def grouped(seed: int, clients: int, apart: float) -> dict[int, Array]:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((3, 20))
    return {client: 100 + apart * centres[client % 3] + rng.standard_normal(20) for client in range(clients)}


def test_rows_of_groups_are_told_apart_whatever_they_have_in_common() -> None:
    labels = alike(grouped(0, 18, 5.0), 3)
    assert len({(client % 3, label) for client, label in labels.items()}) == 3


def test_control_variates_name_the_groups_of_scaffold() -> None:
    made = config({"name": "scaffold"}, training={"rounds": 3, "batch_size": 0})
    (cell,), _ = ATTACKS["likeness"].cells(case(made))
    assert cell.metric == "control_group_accuracy"
    assert cell.status == "leaks", cell.line()


def test_where_every_part_has_an_attack_there_is_nothing_left() -> None:
    (cell,), _ = ATTACKS["likeness"].cells(case(config({"name": "fedavg"})))
    assert cell.status == "not_applicable", cell.line()
