"""Locks of run folders and of clients' stores: one process at a time, whatever happens to the one that had it."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cflpriv.errors import InputError
from cflpriv.experiments.run.resume import holds_nothing, locked
from cflpriv.federation.store import DiskStore

FORK = get_context("fork")
HOLD_STORE = "from cflpriv.federation.store import DiskStore; hold = lambda folder: DiskStore(folder).alone()"


def process(code: str, folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", f"import sys; from pathlib import Path; folder = Path(sys.argv[1]); {code}", str(folder)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")


def holder(how: str, folder: Path) -> subprocess.Popen[str]:
    """A process that has the lock, until it is killed."""
    other = process(f"{how}\nwith hold(folder): print('held', flush=True); sys.stdin.read()", folder)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    return other


def hold(folder: Path, link: Connection, user: int = 0) -> None:
    """What a forked process does: it has a run folder's lock until it is told to go."""
    if user:
        os.setuid(user)
    with locked(folder):
        link.send("held")
        link.recv()


def test_a_run_folder_is_held_by_one_process_and_free_when_that_is_killed(tmp_path: Path) -> None:
    ours, theirs = FORK.Pipe()
    other = FORK.Process(target=hold, args=(tmp_path, theirs))
    other.start()
    theirs.close()
    try:
        assert ours.recv() == "held"
        with pytest.raises(InputError) as caught, locked(tmp_path):
            pass
        assert str(caught.value) == f"{tmp_path}: another process is running this experiment, or auditing it"
    finally:
        other.kill()
        other.join()
    with locked(tmp_path), pytest.raises(InputError, match="another process"), locked(tmp_path):
        pass
    with locked(tmp_path):
        assert [path.stat().st_size for path in tmp_path.iterdir()] in ([], [0])


def test_the_lock_is_nothing_that_a_run_left(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / "config.toml.part").touch()
        assert holds_nothing(tmp_path)
        (tmp_path / "config.toml").touch()
        assert not holds_nothing(tmp_path)
    assert not holds_nothing(tmp_path / "absent")


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder that everybody can read and nobody but root can write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.skipif(os.name != "posix", reason="permissions of files are those of POSIX")
def test_a_folder_that_cannot_be_written_needs_no_lock(read_only: Path) -> None:
    ours, theirs = FORK.Pipe()
    other = FORK.Process(target=hold, args=(read_only, theirs, 0 if os.geteuid() else 65534))  # root can write everywhere
    other.start()
    theirs.close()
    assert ours.recv() == "held"
    ours.send("go")
    other.join()
    assert other.exitcode == 0
    assert list(read_only.iterdir()) == []


def test_a_folder_that_can_be_written_is_never_worked_on_without_its_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(OSError, match=r"\.lock"), locked(tmp_path):
        pass


def test_a_store_waits_for_another_process_and_counts_no_lock(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put("spent", b"0")
    add = f"{HOLD_STORE}\nstore = DiskStore(folder)\nfor _ in range(20):\n"
    add += " with hold(folder): store.put('spent', b'%d' % (1 + int(store.get('spent'))))"
    adding = [process(add, tmp_path) for _ in range(3)]
    for one in adding:
        with one:
            one.communicate()
        assert one.returncode == 0
    assert store.get("spent") == b"60"
    assert store.names() == ("spent",)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir() if path.is_file()} == {0o600}
    with holder(HOLD_STORE, tmp_path) as other:
        other.kill()
    with store.alone():
        assert store.get("spent") == b"60"
