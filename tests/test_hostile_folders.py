"""Folders from another person whose files were replaced: each command ends in one line, at once, and takes little memory."""

import os
import shutil
import signal
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from command_line import in_process
from foreign_scenes import SETTINGS, scene

from cflpriv.attacks import save_updates
from cflpriv.data.population import DataSpec, build_population
from cflpriv.errors import InputError
from cflpriv.files import append, write_atomically
from cflpriv.protocols.bounded_files import LARGEST_DOCUMENT_BYTES

CONFIG = """
[data]
clients = 6
samples_per_client = 20
[model]
hidden = 4
[training]
rounds = 1
[run]
record = "full"
"""
SECONDS = 60
"""More than any of the commands takes; without an end a pipe is waited for, and a device read, for ever."""
MEMORY = 2**27


@contextmanager
def bounded() -> Iterator[None]:
    def ended(number: int, frame: FrameType | None) -> None:
        raise AssertionError("takes too long")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(SECONDS)
    tracemalloc.start(1)
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def hostile_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and another system's updates without a model."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "c.toml").write_text(CONFIG, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert in_process(patch, "run", "c.toml", "--out", "run") == 0
    (folder / "run" / "summary.json").rename(folder / "summary.json")  # `run --resume` finishes it from its checkpoint
    model, updates, _ = scene()
    save_updates(folder / "updates", updates[:2], 10, (1, 8, 8), settings=SETTINGS, module=model)
    return folder


@pytest.fixture
def work_folder(hostile_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(hostile_files, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(LARGEST_DOCUMENT_BYTES + 1)


def declaring(path: Path) -> None:
    """An array of 8 TB, in an archive of some 200 bytes."""
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000, 1000000), }\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("distance", "x", "y"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode())


def bomb(path: Path, size: int = 292 * 2**20) -> None:
    """292 kB that unpack to 300 MB, and to 2.4 GB as float64."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size},), }}\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("distance.npy", "w") as member:
        member.write(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode())
        for _ in range(size // 2**20):
            member.write(bytes(2**20))


def long_header(path: Path) -> None:
    path.write_bytes((2**50).to_bytes(8, "little") + b"{}")


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


NOT_A_FILE: list[Callable[[Path], None]] = [os.mkfifo, zero, Path.mkdir]
DOCUMENT, ARRAYS, TENSORS = [*NOT_A_FILE, sparse], [*NOT_A_FILE, declaring], [*NOT_A_FILE, long_header]
CASES: list[tuple[str, str, list[Callable[[Path], None]]]] = [
    ("report run", "run/summary.json", DOCUMENT), ("report run", "run/evidence.npz", ARRAYS), ("report run", "run/config.toml", DOCUMENT),
    ("report run", "run/measured.json", DOCUMENT), ("report run", "run/audit.json", DOCUMENT),
    ("report run", "run/rounds.jsonl", NOT_A_FILE),
    ("audit run", "run/config.toml", DOCUMENT), ("audit run", "run/transcript/messages.jsonl", NOT_A_FILE),
    ("audit run", "run/transcript/payloads_0000000.safetensors", TENSORS), ("audit run", "run/digests.json", DOCUMENT),
    ("verify run", "run/config.toml", NOT_A_FILE),
    ("export run --out x.pt", "run/config.toml", DOCUMENT), ("export run --out x.pt", "run/checkpoints/final.json", DOCUMENT),
    ("export run --out x.pt", "run/checkpoints/final.safetensors", TENSORS),
    ("export run --out x.pt", "run/checkpoints/final.clients.safetensors", TENSORS),
    ("run c.toml --out run --resume", "run/config.toml", DOCUMENT),
    ("run c.toml --out run --resume", "run/checkpoints/final.safetensors", TENSORS),
    ("run c.toml --out run --resume", "run/rounds.jsonl", NOT_A_FILE), ("run c.toml --out run --resume", "run/resumes.jsonl", NOT_A_FILE),
    ("run c.toml", "c.toml", DOCUMENT), ("sweep c.toml", "c.toml", DOCUMENT),
    ("audit --foreign updates", "updates/foreign.toml", DOCUMENT),
    ("audit --foreign updates", "updates/round-0001/client-0.after.safetensors", TENSORS),
    ("audit --foreign updates", "updates/truth/client-0.npz", [declaring]),
]  # fmt: skip


PARAMETERS = [
    pytest.param(line, name, make, marks=[pytest.mark.slow] if make in (zero, Path.mkdir, sparse) else [])
    for line, name, several in CASES for make in several
]  # fmt: skip


@pytest.mark.parametrize(("line", "name", "make"), PARAMETERS)
def test_a_replaced_file_is_refused_in_one_line(
    line: str,
    name: str,
    make: Callable[[Path], None],
    work_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = work_folder / name
    if line.startswith(("report", "audit run")) and "summary" not in name:
        shutil.copy(work_folder / "summary.json", work_folder / "run" / "summary.json")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    with bounded():
        assert in_process(monkeypatch, *line.split()) in (1, 2)
    words = capsys.readouterr().err
    assert words.startswith("cflpriv: "), words
    assert words.count("\n") == 1, words
    assert name.split("/")[0].removesuffix(".toml") in words


@pytest.mark.parametrize("name", ["evidence.npz", "summary.json", "rounds.jsonl", "digests.json"])
@pytest.mark.parametrize("make", NOT_A_FILE)
def test_verify_ends(
    name: str, make: Callable[[Path], None], work_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (work_folder / "run" / name).unlink(missing_ok=True)
    make(work_folder / "run" / name)
    with bounded():
        assert in_process(monkeypatch, "verify", "run") == 1
    assert name in capsys.readouterr().out


@pytest.mark.slow
def test_a_bomb_in_a_run_folder_takes_no_memory(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(work_folder / "summary.json", work_folder / "run" / "summary.json")
    bomb(work_folder / "run" / "evidence.npz")
    assert (work_folder / "run" / "evidence.npz").stat().st_size < 310_000
    with bounded():
        assert in_process(monkeypatch, "report", "run") == 2
    words = capsys.readouterr().err
    assert "run/evidence.npz: not a readable npz file (array 'distance': with it the compressed arrays unpack to" in words
    assert words.count("\n") == 1


def test_nothing_is_written_through_pipes_and_links(tmp_path: Path) -> None:
    """A name that is about to be written may be taken by a pipe, or by a link that leads out of the folder."""
    os.mkfifo(tmp_path / "a.part")
    (tmp_path / "own").write_text("mine", encoding="utf-8")
    (tmp_path / "b.part").symlink_to(tmp_path / "own")
    os.mkfifo(tmp_path / "c")
    with bounded():
        for name in ("a", "b"):
            with pytest.raises(OSError, match=rf"/{name}'"):
                write_atomically(tmp_path / name, "x")
        with pytest.raises(OSError, match="/c'"):
            append(tmp_path / "c", "x")
    assert (tmp_path / "own").read_text(encoding="utf-8") == "mine"


def deep(path: Path) -> None:
    path.write_text("[" * 200_000 + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", ["rounds.jsonl", "transcript/messages.jsonl", "checkpoints/final.json", "config.toml"])
def test_a_nested_line_is_refused(
    name: str, work_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deep(work_folder / "run" / name)
    assert in_process(monkeypatch, "run", "c.toml", "--out", "run", "--resume") == 2
    words = capsys.readouterr().err
    assert f"run/{name}: " in words
    assert words.count("\n") == 1, words


@pytest.mark.slow
def test_a_table_whose_columns_repeat_a_value(tmp_path: Path) -> None:
    """2 MB of Parquet that would take 16 GB."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array(np.zeros(2**22, np.int8))
    table = pyarrow.table({f"x{number}": pyarrow.chunked_array([column] * 8) for number in range(16)})
    parquet.write_table(table, tmp_path / "a.parquet")
    with bounded(), pytest.raises(InputError, match=r"a\.parquet: its 536870912 cells take 17179869184 bytes, expected at most 8589934592"):
        build_population(DataSpec(source="parquet", paths=(str(tmp_path / "a.parquet"),), label_column="x0"))
