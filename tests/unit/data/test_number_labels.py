"""Labels that are numbers: their range, what is refused and what is doubtful, in tables and arrays."""

from pathlib import Path

import numpy as np
import pytest

from cflpriv.data import DataSpec, build_population
from cflpriv.data.number_labels import from_unit, to_unit
from cflpriv.errors import InputError
from cflpriv.types import Array

RANGE = (-5.0, 45.0)


def table(folder: Path, labels: Array) -> Path:
    rng = np.random.default_rng(0)
    path = folder / "prices.csv"
    rows = [f"{rng.normal():.4f},{rng.normal():.4f},site{i % 4},{label}" for i, label in enumerate(labels)]
    path.write_text("\n".join(["a,b,site,price", *rows]) + "\n", encoding="utf-8")
    return path


def spec(path: Path, **keys: object) -> DataSpec:
    plain = {"label_column": "price", "label_type": "number", "label_range": RANGE, "client_column": "site", "partition": "given"}
    return DataSpec(source="csv", paths=(str(path),), **{**plain, **keys})  # type: ignore[arg-type]


LABELS = np.random.default_rng(1).uniform(0, 40, 80).round(3)


def test_a_table_of_numbers_keeps_every_label(tmp_path: Path) -> None:
    population = build_population(spec(table(tmp_path, LABELS)))
    assert (population.classes, population.label_range, population.class_names) == (1, RANGE, ())
    seen = np.concatenate([np.concatenate([client.y_train, client.y_test]) for client in population.clients])
    assert np.sort(from_unit(seen, RANGE)) == pytest.approx(np.sort(LABELS))
    assert population.warnings == ()


def test_units_and_back_are_inverse() -> None:
    assert from_unit(to_unit(LABELS, RANGE), RANGE) == pytest.approx(LABELS)
    assert to_unit(np.array([-5.0, 20, 45, 99]), RANGE).tolist() == [-1.0, 0.0, 1.0, 1.0]


def test_labels_beyond_the_range_are_clipped_and_named(tmp_path: Path) -> None:
    population = build_population(spec(table(tmp_path, np.append(LABELS, [80.0, -60.0, 70.0, 44.0]))))
    assert any("3 of 84 labels are outside data.label_range" in line for line in population.warnings)
    assert max(client.y_train.max() for client in population.clients) <= 1


def test_a_range_that_is_far_too_wide_and_two_values_are_named(tmp_path: Path) -> None:
    wide = build_population(spec(table(tmp_path, LABELS), label_range=(-1e6, 1e6)))
    assert any("a narrower range" in line for line in wide.warnings)
    two = build_population(spec(table(tmp_path, np.tile([0.0, 30.0], 40))))
    assert any("two values alone" in line for line in two.warnings)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"label_range": ()}, "label_range"),
        ({"label_range": (3.0, 3.0)}, "label_range"),
        ({"label_type": "class"}, "label_range"),
        ({"class_names": ("a", "b")}, "class_names"),
        ({"partition": "dirichlet", "client_column": ""}, "partition"),
        ({"partition": "iid", "client_column": "", "label_swaps": ((0, 1),)}, "label_swaps"),
    ],
)
def test_keys_that_do_not_go_with_numbers_are_refused_by_name(tmp_path: Path, keys: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_population(spec(table(tmp_path, LABELS), **keys))


def test_cells_that_are_no_numbers_are_named_by_row(tmp_path: Path) -> None:
    path = table(tmp_path, LABELS)
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[7] = lines[7].rpartition(",")[0] + ",cheap"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"row 8, column 'price': 'cheap' is not a finite number"):
        build_population(spec(path))
    with pytest.raises(InputError, match="nothing to learn"):
        build_population(spec(table(tmp_path, np.full(80, 3.0))))


def test_a_quantity_as_class_names_the_regression(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.label_type = 'number'"):
        build_population(spec(table(tmp_path, LABELS), label_type="class", label_range=()))


def test_arrays_of_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    path = tmp_path / "own.npz"
    np.savez(path, x_train=rng.random((60, 5)), y_train=rng.random(60), x_test=rng.random((20, 5)), y_test=rng.random(20))
    with pytest.raises(InputError, match="y_train"):
        build_population(DataSpec(source="npz", paths=(str(path),), clients=4))
    population = build_population(DataSpec(source="npz", paths=(str(path),), clients=4, label_type="number", label_range=(0.0, 1.0)))
    assert {client.y_train.dtype for client in population.clients} == {np.dtype(np.float64)}
    assert population.clients[0].y_test.shape == (20,)
