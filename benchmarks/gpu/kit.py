"""`make gpu-kit`: what a machine with a device lacks, in one folder of the checkout: wheels, and Fashion-MNIST.

`python -m benchmarks gpu-kit [--out gpu_kit] [--python 3.12]`. The wheels are those of the versions installed here that the package needs
(with its extras train, ckks and dp) beside the distributions in machine.txt. `environment` puts them before all else for the workers.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from .rows import ROOT

__all__ = ["FOLDER", "environment", "listed", "main", "needed"]

FOLDER = ROOT / "gpu_kit"
PYTHON = "3.12"
EXTRAS = ("train", "ckks", "dp")
LIMIT = 60 * 2**20
"""Bytes of the whole folder."""
DATA = "fashion_mnist"
PLATFORMS = (*(f"manylinux{name}_x86_64" for name in ("1", "2010", "2014")), *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)))
"""pip takes a wheel of exactly one of these, the first that there is: one that runs on old systems."""


def plain(name: str) -> str:
    """A distribution's name in its normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def listed() -> set[str]:
    """The distributions that are on the machine."""
    lines = Path(__file__).with_name("machine.txt").read_text(encoding="utf-8").splitlines()
    return {plain(line) for line in lines if line and not line.startswith("#")}


def needed(python: str = PYTHON) -> dict[str, str]:
    """Name -> version, as installed here, of all that the package needs beside what is on the machine."""
    from packaging.requirements import Requirement

    around = {"python_version": python, "python_full_version": f"{python}.0"}
    there, versions = listed(), dict[str, str]()
    todo: list[tuple[str, tuple[str, ...]]] = [("cflpriv", EXTRAS)]
    while todo:
        name, extras = todo.pop()
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            own, marker = plain(requirement.name), requirement.marker
            if marker is not None and not any(marker.evaluate({**around, "extra": extra}) for extra in extras or ("",)):
                continue
            if own == "cflpriv":
                todo.append((own, tuple(requirement.extras)))
            elif own not in there and own not in versions:
                versions[own] = metadata.version(own).partition("+")[0]
                todo.append((own, tuple(requirement.extras)))
    return dict(sorted(versions.items()))


def collect(folder: Path, python: str, data: Path) -> int:
    """Fill a folder; its bytes. Raises `ValueError` for wheels that cannot be had, or where it would be above the limit."""
    wanted = [f"{name}=={version}" for name, version in needed(python).items()]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
        "--implementation", "cp", "--python-version", python, *platforms, "--dest", str(folder / "wheels"), *wanted,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ValueError(f"pip download: {(errors or ['failed'])[-1]}")
    (folder / "python.txt").write_text(f"{python}\n", encoding="utf-8")
    if (data / DATA).is_dir():
        shutil.copytree(data / DATA, folder / "data" / DATA)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > LIMIT:
        raise ValueError(f"the kit has {size / 2**20:.1f} MiB, above {LIMIT / 2**20:.0f} MiB")
    return size


def main(words: Sequence[str]) -> int:
    """Make the kit anew. Exit code 2 where it cannot be made; an earlier one then stays."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu-kit")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--python", default=PYTHON)
    asked = parser.parse_args(words)
    data = Path(os.environ.get("CFLPRIV_DATA", ROOT / "data"))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.out.parent, prefix=".gpu_kit-") as place:
        made = Path(place) / "kit"
        try:
            size = collect(made, asked.python, data)
        except (ValueError, OSError, metadata.PackageNotFoundError) as error:
            print(f"{asked.out}: not made: {error}")
            return 2
        if asked.out.exists():
            shutil.rmtree(asked.out)
        made.rename(asked.out)
    count, with_data = len(list((asked.out / "wheels").iterdir())), (asked.out / "data").is_dir()
    print(f"{asked.out}: {size / 2**20:.1f} MiB, {count} wheels for Python {asked.python}, {DATA if with_data else f'without {DATA}'}")
    return 0


# --- its use ----------------------------------------------------------------------------------------------------------------------------


def environment(scratch: Path, kit: Path) -> Mapping[str, str]:
    """The environment of a worker. The kit's wheels are unpacked into `scratch`, where bytecode goes, too; its data serve where
    CFLPRIV_DATA is not set. A kit for another Python is not used."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(scratch / "bytecode")}
    packages = scratch / "packages"
    folders = [str(packages), str(ROOT / "tests" / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    declare(packages)
    if kit.is_dir():
        python, ours = (kit / "python.txt").read_text(encoding="utf-8").strip(), f"{sys.version_info.major}.{sys.version_info.minor}"
        if python == ours:
            unpack(sorted((kit / "wheels").glob("*.whl")), packages)
        else:
            print(f"{kit}: is for Python {python}, this is {ours}; its packages are not used", file=sys.stderr)
        if (kit / "data").is_dir():
            variables.setdefault("CFLPRIV_DATA", str(kit / "data"))
    return variables | {"PYTHONPATH": os.pathsep.join(folders)}


def declare(folder: Path) -> None:
    """Let a checkout that is not installed have a version, which run folders name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    inside = folder / f"{project['name']}-{project['version']}.dist-info"
    inside.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (inside / "METADATA").write_text(text, encoding="utf-8")


def unpack(wheels: Sequence[Path], folder: Path) -> None:
    """Install wheels into a folder: their files, those for site-packages from `NAME.data` too, and no scripts."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    for kind in ("purelib", "platlib"):
        for inside in folder.glob(f"*.data/{kind}"):
            shutil.copytree(inside, folder, dirs_exist_ok=True)
