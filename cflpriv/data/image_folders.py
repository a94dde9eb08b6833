"""Folders of images, one for each class, read by torchvision. Nothing is downloaded."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..array_files import LEAST_OF_OWN_DATA, reading, unpacked_limit
from ..errors import InputError
from ..protocols.bounded_files import open_regular
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
            listing = ImageFolder(str(folder))
        except FileNotFoundError as error:  # no folder of a class, or one without an image
            raise InputError(f"{folder}: {error}") from None
        paths = [Path(name) for name, _ in listing.samples]
        images = _images(folder, paths)
        return images, np.array(listing.targets, dtype=np.int64), list(listing.classes)


def _images(folder: Path, paths: Sequence[Path]) -> Array:
    """Images (n, 3, H, W) uint8. The sizes in the headers are compared first: memory is taken once, for all."""
    from PIL import Image

    images = np.empty((0, 3, 0, 0), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for number, path in enumerate(paths):
            try:
                with reading(path, "image"), open_regular(path) as file, Image.open(file) as image:
                    if number == 0:
                        _check_limit(
                            folder, (len(paths), 3, image.height, image.width), sum(image_file.stat().st_size for image_file in paths)
                        )
                        images = np.empty((len(paths), 3, image.height, image.width), np.uint8)
                    if (image.height, image.width) != images.shape[2:]:
                        raise InputError(f"{path}: {image.width}×{image.height} pixels, others {_size(images[0])}; make all of one size")
                    images[number] = np.moveaxis(np.asarray(image.convert("RGB")), -1, 0)
            except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
                raise InputError(f"{path}: has more pixels than an image that is read ({error})") from None
    return images


def _check_limit(folder: Path, shape: tuple[int, ...], packed: int) -> None:
    """Refuse images that declare far more bytes than their files have."""
    if math.prod(shape) > (limit := unpacked_limit(packed, LEAST_OF_OWN_DATA)):
        raise InputError(f"{folder}: its images unpack to {math.prod(shape)} bytes, expected at most {limit} from files of {packed} bytes")


def _size(image: Array) -> str:
    return f"{image.shape[2]}×{image.shape[1]} pixels"
