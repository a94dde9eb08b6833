"""An environment for processes in which, of what others wrote, only the distributions in benchmarks/gpu/machine.txt can be imported."""

import os
from collections.abc import Collection, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

from benchmarks.gpu.kit import listed, plain

BLOCKED = """
import sys
from importlib.machinery import PathFinder


class OnlyListed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name in {names}:
            path = [folder for folder in sys.path if "site-packages" not in folder and "dist-packages" not in folder]
        return super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyListed
"""
"""What is unpacked elsewhere than among the installed packages, such as a kit's, can be imported."""


def unlisted() -> set[str]:
    """The installed modules that belong to no listed distribution."""
    there = listed() | {"cflpriv", "pip"}
    return {name for name, owners in packages_distributions().items() if not there & set(map(plain, owners))}


def only_listed(folder: Path) -> Mapping[str, str]:
    """The environment, for subprocesses of subprocesses too; `folder` gets a module that Python imports first."""
    return without(unlisted(), folder)


def without(names: Collection[str], folder: Path) -> Mapping[str, str]:
    """The same without some modules alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(BLOCKED.format(names=sorted(names)), encoding="utf-8")
    found = {name: value for name, value in os.environ.items() if name not in ("CFLPRIV_DATA", "PYTHONPATH")}
    return {**found, "PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
