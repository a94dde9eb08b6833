"""Folders of images. Where torchvision cannot be imported, a stand-in has the part of its documented API that is used."""

import os
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cflpriv.data.population import DataSpec, build_population
from cflpriv.errors import InputError

DRAWS = np.random.default_rng(0)


class StandIn:
    """`torchvision.datasets.ImageFolder`: sorted classes, sorted files, images in RGB."""

    def __init__(self, root: str) -> None:
        self.classes = sorted(path.name for path in Path(root).iterdir() if path.is_dir())
        if not self.classes:
            raise FileNotFoundError(f"Couldn't find any class folder in {root}.")
        self.samples = [
            (str(path), label) for label, name in enumerate(self.classes) for path in sorted((Path(root) / name).iterdir())
        ]  # fmt: skip
        self.targets = [label for _, label in self.samples]

    def __getitem__(self, number: int) -> tuple[Any, int]:
        path, label = self.samples[number]
        with open(path, "rb") as file:
            return Image.open(file).convert("RGB"), label


@pytest.fixture(autouse=True)
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import torchvision.datasets  # noqa: F401
    except (ImportError, RuntimeError):
        package, fake = ModuleType("torchvision"), ModuleType("torchvision.datasets")
        fake.ImageFolder = StandIn  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchvision", package)
        monkeypatch.setitem(sys.modules, "torchvision.datasets", fake)


def picture(path: Path, height: int = 3, width: int = 5) -> np.ndarray[Any, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = DRAWS.integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def folders(root: Path, classes: tuple[str, ...] = ("cat", "dog"), each: int = 4) -> dict[str, np.ndarray[Any, Any]]:
    return {
        f"{part}/{name}/{number}.png": picture(root / part / name / f"{number}.png")
        for part in ("train", "test") for name in classes for number in range(each)
    }  # fmt: skip


def spec(root: Path, **keys: Any) -> DataSpec:
    return DataSpec(source="torchvision", paths=(str(root / "train"), str(root / "test")), **{"clients": 2, **keys})


def test_each_image_arrives_with_its_class(tmp_path: Path) -> None:
    pictures = folders(tmp_path)
    people = build_population(spec(tmp_path, clients=1))
    assert people.class_names == ("cat", "dog")
    assert people.shape == (3, 3, 5)
    (client,) = people.clients
    expected = {
        (np.moveaxis(pixels, -1, 0) / np.float32(255)).astype(np.float32).tobytes(): ("cat", "dog").index(name.split("/")[1])
        for name, pixels in pictures.items() if name.startswith("train")
    }  # fmt: skip
    assert {x.tobytes(): int(y) for x, y in zip(client.x_train, client.y_train, strict=True)} == expected
    assert any("count as public" in note for note in people.notes)


def test_every_partition_of_images_applies(tmp_path: Path) -> None:
    folders(tmp_path, each=8)
    people = build_population(spec(tmp_path, partition="pathological", groups=((0,), (1,)), samples_per_client=4))
    assert [set(client.y_train.tolist()) for client in people.clients] in ([{0}, {1}], [{1}, {0}])


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path)
    with pytest.raises(InputError, match=r"paths = .*takes 2"):
        build_population(DataSpec(source="torchvision", paths=(str(tmp_path / "train"),)))
    picture(tmp_path / "train" / "dog" / "9.png", 3, 6)
    with pytest.raises(InputError, match=r"dog/9\.png: 6×3 pixels, others 5×3 pixels; make all of one size"):
        build_population(spec(tmp_path))
    (tmp_path / "train" / "dog" / "9.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"dog/9\.png: not a readable image file"):
        build_population(spec(tmp_path))
    (tmp_path / "train" / "dog" / "9.png").unlink()
    picture(tmp_path / "test" / "cow" / "0.png")
    with pytest.raises(InputError, match=r"test: has other classes than .*train: cow in one of them only"):
        build_population(spec(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: Couldn't find any class folder"):
        build_population(DataSpec(source="torchvision", paths=(str(tmp_path / "empty"), str(tmp_path / "test")), clients=2))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(InputError, match=r"train: needs torchvision; pip install 'cflpriv\[vision\]'"):
        build_population(spec(tmp_path))


def test_pixels_are_counted_before_they_are_read(tmp_path: Path) -> None:
    """Images of one colour, whose files are small, and a pipe in place of one."""
    for sizes, words in (([9_500], "has more pixels than an image that is read"), ([4, 9_000], "9000×9000 pixels, others 4×4 pixels")):
        root = tmp_path / str(len(sizes))
        for number, size in enumerate(sizes):
            for part in ("train", "test"):
                picture(root / part / "cat" / f"{number}.png", 4, 4)
                Image.new("1", (size, size)).save(root / part / "cat" / f"{number}.png")
        tracemalloc.start(1)
        with pytest.raises(InputError, match=rf"\d\.png: {words}[^\n]*$"):
            build_population(spec(root, clients=1))
        assert tracemalloc.get_traced_memory()[1] < 2**24
        tracemalloc.stop()
    (root / "train" / "cat" / "1.png").unlink()
    os.mkfifo(root / "train" / "cat" / "1.png")
    with pytest.raises(InputError, match=r"1\.png: is a pipe or a device, not a file$"):
        build_population(spec(root, clients=1))
