"""Folders of images, one for each class, read by torchvision. Nothing is downloaded."""

from pathlib import Path

import numpy as np

from ..array_files import reading
from ..errors import InputError
from ..types import Array
from .datasets import POOLED, Dataset, dataset_of

__all__ = ["load_image_folders"]


def load_image_folders(train: Path, test: Path) -> Dataset:
    """Two folders in the form of `torchvision.datasets.ImageFolder`: CLASS/IMAGE, in red, green and blue, all of one size.

    Raises `InputError` naming the folder, or the first image of another size; or saying what to install.
    """
    x_train, y_train, names = _read(train)
    x_test, y_test, others = _read(test)
    if names != others:
        strange = sorted(set(names) ^ set(others))
        raise InputError(f"{test}: has other classes than {train}: {', '.join(strange)} in one of them only")
    if x_train.shape[1:] != x_test.shape[1:]:
        raise InputError(f"{test}: images of {_size(x_test[0])}, in {train} of {_size(x_train[0])}; make all of one size")
    return dataset_of(str(train), (x_train, y_train), (x_test, y_test), len(names), notes=(POOLED.format(train),), class_names=tuple(names))


def _read(folder: Path) -> tuple[Array, Array, list[str]]:
    """Images (n, 3, H, W) uint8, labels (n,) int64 and the names of the classes."""
    try:
        from torchvision.datasets import ImageFolder
    except ImportError:
        raise InputError(f"{folder}: needs torchvision; pip install 'cflpriv[vision]'") from None
    except RuntimeError as error:  # its operators are of another build than torch
        raise InputError(f"{folder}: torchvision does not fit the installed torch ({error}); install the two from one index") from None
    with reading(folder, "image folder"):
        try:
            found = ImageFolder(str(folder))
        except FileNotFoundError as error:  # no folder of a class, or one without an image
            raise InputError(f"{folder}: {error}") from None
        images: list[Array] = []
        for number, (path, _) in enumerate(found.samples):
            with reading(Path(path), "image"):
                image = np.asarray(found[number][0], dtype=np.uint8)
            if images and image.shape[:2] != images[0].shape[1:]:
                raise InputError(f"{path}: {_size(np.moveaxis(image, -1, 0))}, others {_size(images[0])}; make all of one size")
            images.append(np.moveaxis(image, -1, 0))
        return np.stack(images), np.array(found.targets, dtype=np.int64), list(found.classes)


def _size(image: Array) -> str:
    return f"{image.shape[2]}×{image.shape[1]} pixels"
