"""What audits recovered, for a report: images, label histograms and ROC curves, from the arrays beside audit.json."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...types import Array
from . import pictures
from .audit_report import label_histograms
from .run_files import Audited, read_arrays, require

__all__ = ["histograms", "recovered_images", "roc_curves"]

SHOWN_CLIENTS = 4
"""So many fit beside each other on a phone."""
METHODS = {"lira": "LiRA", "rmia": "RMIA", "loss": "loss threshold", "gradients": "gradients' regression"}
"""Methods of membership inference, as the report names them."""


def recovered_images(audited: Audited) -> list[dict[str, Any]]:
    """For each audit file with images: their pictures, and the figures of the cells that name the file."""
    shown = []
    for path, cells, arrays in _files(audited):
        if _labels_only(arrays) or _is_roc(arrays):
            continue
        for key in ("clients", "truth", "recovered", "baseline"):
            require(key in arrays, path, f"has no {key!r}")
        clients, truth = arrays["clients"].astype(np.int64), arrays["truth"]
        fits = truth.ndim == 4 and truth.shape[:1] == clients.shape
        fits = fits and arrays["recovered"].shape == truth.shape and arrays["baseline"].shape == truth.shape[1:]
        require(fits, path, "shapes do not fit: 'truth' and 'recovered' (m, C, H, W), 'baseline' (C, H, W), 'clients' (m,)")
        if len(clients) == 0:
            continue
        few, titles = _few(audited, clients)
        shares: tuple[Array, ...] = ()
        if "label_truth" in arrays and "label_guess" in arrays:
            shares = tuple(share[few] for share in _label_shares(arrays, len(clients), path))
        strip = pictures.images_picture(truth[few], arrays["recovered"][few], arrays["baseline"], titles, *shares)
        shown.append(
            {"audited": audited, "cells": cells, "strip": strip, "labels": bool(shares), "shown": len(few), "clients": len(clients)}
        )
    return shown


def histograms(audited: Audited) -> list[dict[str, Any]]:
    """For each audit file with inferred labels only: true and inferred shares of a few clients, and the cells that name the file."""
    shown = []
    for path, cells, arrays in _files(audited):
        if not _labels_only(arrays):
            continue
        require("clients" in arrays and "label_guess" in arrays, path, "has no 'clients' or no 'label_guess'")
        clients = arrays["clients"].astype(np.int64)
        truth, guess = _label_shares(arrays, len(clients), path)
        few, titles = _few(audited, clients)
        strip = label_histograms(truth[few], guess[few], titles)
        shown.append({"audited": audited, "cells": cells, "strip": strip, "shown": len(few), "clients": len(clients)})
    return shown


def roc_curves(audited: Audited) -> list[dict[str, Any]]:
    """For each audit file with ROC curves: a picture per group of attacked models, and the cells that name the file."""
    shown = []
    names = METHODS | {f"{name} unprotected": f"{words}, unprotected run" for name, words in METHODS.items()}
    for path, cells, arrays in _files(audited):
        for subject in ("model", "own_model", "update") if _is_roc(arrays) else ():
            curves = {
                name[5 + len(subject) :].replace("_", " "): curve for name, curve in arrays.items() if name.startswith(f"roc_{subject}_")
            }
            if not curves:
                continue
            others = curves.pop("others", np.array(0.0))
            fits = others.shape == () and int(others) >= 1 and all(curve.ndim == 2 and len(curve) == 2 for curve in curves.values())
            require(fits, path, f"'roc_{subject}_…' are not all (2, t), with the number of non-members beside them")
            own = [cell for cell in cells if str(cell["metric"]).startswith(f"{subject}_")]
            picture = pictures.roc_picture({names.get(name, name): curve for name, curve in curves.items()}, int(others))
            shown.append({"audited": audited, "cells": own, "picture": picture, "what": subject.replace("_", " ")})
    return shown


def _files(audited: Audited) -> Iterator[tuple[Path, list[Mapping[str, Any]], dict[str, Array]]]:
    """Each file of arrays that an audit wrote: its path, the cells that name it, and its arrays."""
    cells = audited.cells or ()
    for file in dict.fromkeys(cell["arrays"] for cell in cells if cell.get("arrays")):
        path = audited.folder / "audit" / file
        yield path, [cell for cell in cells if cell.get("arrays") == file], read_arrays(path)


def _labels_only(arrays: Mapping[str, Array]) -> bool:
    return "label_truth" in arrays and not {"truth", "recovered", "baseline"} & set(arrays)


def _is_roc(arrays: Mapping[str, Array]) -> bool:
    """Whether the arrays are of membership: curves, and the samples that stand out most."""
    return bool(arrays) and all(name.startswith(("roc_", "exposed_")) for name in arrays)


def _label_shares(arrays: Mapping[str, Array], clients: int, path: Path) -> tuple[Array, Array]:
    """True and inferred label shares (m, classes)."""
    truth, guess = arrays["label_truth"], arrays["label_guess"]
    fits = truth.ndim == 2 and truth.shape == guess.shape and len(truth) == clients
    require(fits, path, "'label_truth' and 'label_guess' are not both (m, classes)")
    return truth, guess


def _few(audited: Audited, clients: Array) -> tuple[Array, list[str]]:
    """The places of a few clients, of every true group where groups are known, and their titles."""
    groups = np.array([audited.groups.get(str(client), 0) for client in clients])
    order = np.argsort(groups, kind="stable")
    few = order[np.unique(np.linspace(0, len(clients) - 1, SHOWN_CLIENTS).round().astype(np.int64))]
    return few, [
        f"client {clients[i]}" + (f"\n{audited.group_names.get(int(groups[i]), f'group {groups[i]}')}" if audited.groups else "")
        for i in few
    ]
