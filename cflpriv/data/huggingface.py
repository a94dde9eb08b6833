"""Hugging Face `datasets` that are on disk, as tables. Nothing is downloaded: the library only opens a folder that `save_to_disk` wrote."""

from pathlib import Path
from typing import Any

from ..array_files import reading
from ..errors import InputError
from .formats import check_cells

__all__ = ["columns_of", "read_saved"]


def read_saved(path: Path) -> dict[str, list[Any]]:
    """The columns, by name, of a folder that `Dataset.save_to_disk` wrote; of a `DatasetDict`, name the folder of one split.

    Raises `InputError` naming the folder, or saying what to install.
    """
    try:
        from datasets import Dataset, load_from_disk
    except ImportError:
        raise InputError(f"{path}: needs datasets; pip install 'cflpriv[huggingface]', or give its Parquet files") from None
    with reading(path, "Hugging Face dataset"):
        dataset = load_from_disk(str(path))
        if not isinstance(dataset, Dataset):
            raise InputError(f"{path}: holds the splits {', '.join(map(str, dataset))}; name the folder of one, such as {path / 'train'}")
        size = sum(file.stat().st_size for file in path.rglob("*.arrow"))
        check_cells(path, dataset.num_rows * dataset.num_columns, size)
        return columns_of(dataset)


def columns_of(dataset: Any) -> dict[str, list[Any]]:
    """The columns of a `datasets.Dataset` by name."""
    return {name: _decoded(cells, dataset.features[name]) for name, cells in dataset.to_dict().items()}


def _decoded(cells: list[Any], feature: Any) -> list[Any]:
    """The cells of a column: names in place of the numbers of a `ClassLabel`, None for its -1, which stands for no label."""
    names = getattr(feature, "names", None)
    if not isinstance(names, list):
        return cells
    return [None if cell is None or cell < 0 else names[cell] for cell in cells]
