"""The training samples that stand out in an audit's recovered arrays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...array_files import read_npz
from .leakage import Cell

__all__ = ["exposed_samples"]


def exposed_samples(folder: Path, recorded: Sequence[Cell]) -> list[dict[str, Any]]:
    """The training samples that membership attacks which leak single out on the recorded run: by client, the row of its training data."""
    leaks = [cell for cell in recorded if cell.attack == "membership" and cell.status == "leaks" and cell.arrays]
    listed = []
    for adversary, file in dict.fromkeys((cell.adversary, cell.arrays) for cell in leaks):
        path = folder / "audit" / str(file)
        arrays = read_npz(path) if path.is_file() else {}
        for source in ("update", "model"):
            if any(cell.adversary == adversary and cell.metric.startswith(source) for cell in leaks):
                listed += [
                    {"adversary": adversary, "evidence": source, "client": int(client), "row": int(row), "others_as_high": float(share)}
                    for client, row, share in arrays.get(f"exposed_{source}", ())
                ]
    return listed
