"""The log: what was committed is there, a torn end is dropped, damage before a whole record is refused by name."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.protocols.coordinator import DamagedLog, FolderLog
from cflpriv.protocols.coordinator import log as log_module

CHANGES = st.dictionaries(st.text(max_size=8), st.none() | st.binary(max_size=40), max_size=4)


def contents(folder: Path) -> dict[str, bytes]:
    log = FolderLog(folder)
    try:
        return dict(log)
    finally:
        log.close()


@settings(max_examples=25)
@given(st.lists(st.tuples(CHANGES, st.sampled_from(["", "commit", "open"])), max_size=20), st.sampled_from([0, 1 << 24]))
def test_a_log_is_a_dictionary_that_forgets_what_was_not_committed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[dict[str, bytes | None], str]], slack: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module, "_SLACK_BYTES", slack)
        log, kept, now = FolderLog(folder), dict[str, bytes](), dict[str, bytes]()
        for changes, then in steps:
            log.add(changes)
            for name, value in changes.items():
                now.pop(name, None)
                if value is not None:
                    now[name] = value
            assert dict(log) == now
            assert len(log) == len(now)
            if then == "commit":
                log.commit()
                kept = dict(now)
            elif then == "open":
                log.close()
                log, now = FolderLog(folder), dict(kept)
                assert dict(log) == kept
        log.close()


def _four_records(folder: Path) -> tuple[bytes, list[int]]:
    """A log of four records; its bytes, and where each record begins."""
    log = FolderLog(folder)
    starts = []
    for number in range(4):
        starts.append(os.path.getsize(log.path))
        log.add({f"a{number}": bytes([number]) * 30, f"b{number}": bytes([number]) * 9})
        log.commit()
    log.close()
    return log.path.read_bytes(), starts


def test_a_torn_last_record_is_dropped_as_a_whole(tmp_path: Path) -> None:
    data, starts = _four_records(tmp_path)
    whole = contents(tmp_path)
    before = {name: value for name, value in whole.items() if not name.endswith("3")}
    for end in range(starts[3], len(data), 2):
        for tail in (b"", bytes(len(data) - end)):
            (tmp_path / "log").write_bytes(data[:end] + tail)
            assert contents(tmp_path) == (whole if data[:end] + tail == data else before)
    assert (tmp_path / "log").read_bytes() == data[: starts[3]], "and it is cut off"


def test_a_damaged_earlier_record_is_refused_by_name(tmp_path: Path) -> None:
    data, starts = _four_records(tmp_path)
    for at in range(starts[1], starts[2]):
        changed = bytearray(data)
        changed[at] ^= 1
        (tmp_path / "log").write_bytes(changed)
        with pytest.raises(DamagedLog) as caught:
            FolderLog(tmp_path)
        words = f"{tmp_path / 'log'}: record 1 at byte {starts[1]} is damaged, and a later one is whole; restore the folder"
        assert str(caught.value) == words
        assert (tmp_path / "log").read_bytes() == changed, "nothing is written to a damaged log"
    for at in range(starts[0]):
        changed = bytearray(data)
        changed[at] ^= 1
        (tmp_path / "log").write_bytes(changed)
        with pytest.raises(DamagedLog, match="log: "):
            FolderLog(tmp_path)


def test_a_value_that_looks_like_a_record_is_only_a_value(tmp_path: Path) -> None:
    """A stranger's upload with the bytes of another log's records does not turn a torn end into damage."""
    other, _ = _four_records(tmp_path / "other")
    log = FolderLog(tmp_path / "log")
    log["first"] = other
    start = os.path.getsize(log.path)
    log["second"] = other
    log.close()
    data = log.path.read_bytes()
    log.path.write_bytes(data[:start] + bytes(100) + data[start + 100 : -1])
    assert contents(tmp_path / "log") == {"first": other}


@settings(max_examples=40)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_a_log_or_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes, headed: bool) -> None:
    folder = tmp_path_factory.mktemp("log")
    data, _ = _four_records(folder)
    (folder / "log").write_bytes((data[:32] if headed else b"") + noise)
    if headed:
        assert contents(folder) == {}
    else:
        with pytest.raises(DamagedLog):
            contents(folder)


def test_a_folder_has_one_process(tmp_path: Path) -> None:
    log = FolderLog(tmp_path)
    with pytest.raises(OSError, match="another process uses this folder"):
        FolderLog(tmp_path)
    log["a"] = b"1"
    log.close()
    assert contents(tmp_path) == {"a": b"1"}
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0
    assert tmp_path.stat().st_mode & 0o002 == 0


def full(file: int) -> None:
    raise OSError(28, "No space left on device")


def test_after_a_failed_write_a_log_neither_takes_nor_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was added is perhaps not on the disk: nothing may follow from it."""
    log = FolderLog(tmp_path)
    log["a"] = b"1"
    with monkeypatch.context() as patch:
        patch.setattr(log_module, "_flush", full)
        with pytest.raises(OSError, match="No space"):
            log["b"] = b"2"
    calls: list[Callable[[], object]] = [
        lambda: log["a"], lambda: log.get("b"), lambda: "a" in log, lambda: list(log), lambda: log.add({"c": b"3"}), log.commit,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(OSError, match="is closed, or a write failed; start again"):
            call()
    log.close()
    assert contents(tmp_path)["a"] == b"1"


def test_closing_waits_for_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, writing, go_on = FolderLog(tmp_path), threading.Event(), threading.Event()

    def slow(file: int) -> None:
        writing.set()
        assert go_on.wait(10)
        os.fstat(file)

    monkeypatch.setattr(log_module, "_flush", slow)
    log.add({"a": b"1"})
    writer, closer = threading.Thread(target=log.commit), threading.Thread(target=log.close)
    writer.start()
    assert writing.wait(10)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go_on.set()
    writer.join(10)
    closer.join(10)
    assert log.committed == 1
    assert contents(tmp_path) == {"a": b"1"}


def test_replaced_values_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_SLACK_BYTES", 10_000)
    log, random = FolderLog(tmp_path), Random(0)
    log["kept"] = b"k" * 100
    for _ in range(300):
        log["changed"] = random.randbytes(500)
    last = log["changed"]
    assert os.path.getsize(log.path) < 25_000
    log.close()
    assert contents(tmp_path) == {"kept": b"k" * 100, "changed": last}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    _four_records(tmp_path / "real")
    (tmp_path / "log").symlink_to(tmp_path / "real" / "log")
    with pytest.raises(OSError, match="link"):
        FolderLog(tmp_path)
