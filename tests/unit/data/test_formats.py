"""The file readers: what is well-formed comes back exactly, everything else is an `InputError` of one line naming the file."""

import bz2
import gzip
import io
import math
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cflpriv.data.formats import LARGEST_BYTES, read_cifar_batch, read_idx, read_own_npz, read_svmlight
from cflpriv.errors import InputError
from cflpriv.types import Array

# The temporary folder may be shared by the examples: every example overwrites the file it reads.
SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


def idx_bytes(values: Array) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def refused(path: Path) -> pytest.RaisesExc[InputError]:
    """The message must be one line that names the file."""
    return pytest.RaisesExc(InputError, check=lambda error: str(path) in str(error) and "\n" not in str(error))


def read_or_refuse(path: Path, read: Callable[[], Array]) -> Array | None:
    """What `read` returns, or None if it refused as it should; anything else that it raises fails the test."""
    try:
        return read()
    except InputError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message
    return None


@pytest.mark.slow
@SHARED_FOLDER
@given(values=SHAPES.flatmap(lambda shape: arrays(np.uint8, shape)), packed=st.booleans())
def test_idx_round_trip(tmp_path: Path, values: Array, packed: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(idx_bytes(values)) if packed else idx_bytes(values))
    got = read_idx(path, values.ndim)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, values)


@pytest.mark.slow
@SHARED_FOLDER
@given(body=st.binary(max_size=60), start=st.sampled_from([b"", b"\0\0\x08\x01", b"\0\0\x08\x03", b"\x1f\x8b", b"\x1f\x8b\x08\0"]))
def test_idx_random_bytes(tmp_path: Path, body: bytes, start: bytes) -> None:
    """Random bytes are read only if they are well-formed, judged by writing the result back; otherwise only `InputError` comes out."""
    path = tmp_path / "file"
    path.write_bytes(start + body)
    for axes in (1, 3):
        values = read_or_refuse(path, partial(read_idx, path, axes))
        assert values is None or idx_bytes(values) == start + body


@pytest.mark.slow
@SHARED_FOLDER
@given(data=st.data(), packed=st.booleans(), values=arrays(np.uint8, (5, 3, 4)))
def test_idx_truncated_or_longer(tmp_path: Path, data: st.DataObject, packed: bool, values: Array) -> None:
    whole = gzip.compress(idx_bytes(values)) if packed else idx_bytes(values)
    path = tmp_path / "file"
    cut = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:cut])
    with refused(path):
        read_idx(path, 3)
    extra = data.draw(st.binary(min_size=1, max_size=9))
    path.write_bytes(gzip.compress(idx_bytes(values) + extra) if packed else whole + extra)
    with refused(path) as caught:
        read_idx(path, 3)
    assert "trailing" in str(caught.value)


@pytest.mark.slow
@SHARED_FOLDER
@given(data=st.data(), values=arrays(np.uint8, (4, 3, 3)))
def test_idx_flipped_bit_in_gzip(tmp_path: Path, data: st.DataObject, values: Array) -> None:
    """A flipped bit is refused, or harmless (the gzip header has bits without meaning, and deflate ends in padding)."""
    whole = bytearray(gzip.compress(idx_bytes(values), mtime=0))
    where = data.draw(st.integers(0, len(whole) - 1))
    whole[where] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "file"
    path.write_bytes(whole)
    got = read_or_refuse(path, lambda: read_idx(path, 3))
    if got is not None:
        np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\0\0\x0d\x03" + b"\0" * 40, "magic"),  # floats
        (b"\0\0\x08\x02" + b"\0" * 40, "magic"),  # two axes
        (b"\x01\0\x08\x03" + b"\0" * 40, "magic"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1), "more than"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 2**20, 2**10, 1), "truncated"),
        (b"\0\0\x08\x03\0\0", "truncated in the header"),
        (b"", "magic"),
    ],
)
def test_idx_headers(tmp_path: Path, body: bytes, words: str) -> None:
    for name, content in (("raw", body), ("packed.gz", gzip.compress(body))):
        path = tmp_path / name
        path.write_bytes(content)
        with refused(path) as caught:
            read_idx(path, 3)
        assert words in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for read in (lambda p: read_idx(p, 3), lambda p: read_own_npz(p, ("x",)), lambda p: read_svmlight(p, 4), read_cifar_batch):
        with refused(tmp_path / "absent"):
            read(tmp_path / "absent")
        with refused(tmp_path):
            read(tmp_path)


def npz_bytes(**values: Array) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=True, **values)
    return buffer.getvalue()


def test_npz_reads_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(npz_bytes(x=np.arange(6).reshape(2, 3), other=np.zeros(2)))
    got = read_own_npz(path, ("x",), ("absent",))
    assert list(got) == ["x"]
    np.testing.assert_array_equal(got["x"], np.arange(6).reshape(2, 3))
    with refused(path) as caught:
        read_own_npz(path, ("y",))
    assert "'y'" in str(caught.value)


def test_npz_never_unpickles(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(npz_bytes(x=np.array([{"a": 1}], dtype=object)))
    with refused(path) as caught:
        read_own_npz(path, ("x",))
    assert "'x'" in str(caught.value)


@pytest.mark.slow
@SHARED_FOLDER
@given(data=st.data())
def test_npz_damage(tmp_path: Path, data: st.DataObject) -> None:
    """Cut anywhere, it is refused; with bytes overwritten anywhere, it is refused or unharmed (zip checksums every member)."""
    original = np.arange(60, dtype=np.uint8).reshape(5, 3, 4)
    whole = bytearray(npz_bytes(x=original))
    path = tmp_path / "a.npz"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with refused(path):
        read_own_npz(path, ("x",))
    at = data.draw(st.integers(0, len(whole) - 4))
    whole[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    path.write_bytes(whole)
    got = read_or_refuse(path, lambda: read_own_npz(path, ("x",))["x"])
    if got is not None:
        np.testing.assert_array_equal(got, original)


def test_npz_with_a_lying_header(tmp_path: Path) -> None:
    """A member whose own header promises far more than it holds."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**60,)})
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue() + b"abc")
    with refused(path):
        read_own_npz(path, ("x",))
    path.write_bytes(b"PK\x05\x06" + b"\0" * 18)  # an empty archive
    with refused(path) as caught:
        read_own_npz(path, ("x",))
    assert "nothing" in str(caught.value)


@pytest.mark.slow
@SHARED_FOLDER
@given(values=arrays(np.float32, (4, 5), elements=st.floats(-1, 1, width=16)), packed=st.booleans(), data=st.data())
def test_libsvm_round_trip(tmp_path: Path, values: Array, packed: bool, data: st.DataObject) -> None:
    labels = data.draw(st.lists(st.integers(-3, 12), min_size=4, max_size=4))
    rows = [
        " ".join([str(label), *(f"{i + 1}:{float(v)!r}" for i, v in enumerate(row) if v != 0)])
        for label, row in zip(labels, values, strict=True)
    ]
    text = "\n".join(rows).encode()
    path = tmp_path / "a"
    path.write_bytes(bz2.compress(text) if packed else text)
    got, got_labels = read_svmlight(path, 5)
    np.testing.assert_array_equal(got, values)
    assert got_labels.tolist() == labels


@pytest.mark.parametrize(
    "line", ["1 0:1", "1 6:1", "1 a:1", "x 1:1", "1.5 1:1", "nan 1:1", "1 1", "1 1:2:3", "", "1 1:x", "inf 1:1", "1e300 1:1"]
)
def test_libsvm_bad_lines(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a"
    path.write_text(f"1 1:0.5\n{line}\n1 1:0.5\n", encoding="utf-8")
    with refused(path) as caught:
        read_svmlight(path, 5)
    assert {"": "1 of its 3 lines", "1 6:1": "feature 6, not in 1..5"}.get(line, "line 2") in str(caught.value)


@pytest.mark.slow
@SHARED_FOLDER
@given(body=st.one_of(st.binary(max_size=80), st.text("0123456789.:-+e \n\r#\0,qidnaf", max_size=80).map(str.encode)), packed=st.booleans())
def test_libsvm_random_bytes(tmp_path: Path, body: bytes, packed: bool) -> None:
    path = tmp_path / "a"
    path.write_bytes(bz2.compress(body) if packed else body)
    got = read_or_refuse(path, lambda: read_svmlight(path, 5)[0])
    if got is not None:
        assert got.shape == (len(body.split(b"\n")) - (body[-1:] in (b"", b"\n")), 5)
        assert got.dtype == np.float32


@pytest.mark.slow
def test_libsvm_takes_no_memory_for_what_a_file_only_claims(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("1 2000000000:1\n" * 3, encoding="utf-8")  # dense, 24 GB
    with refused(path) as caught:
        read_svmlight(path, 5)
    assert "feature 2000000000" in str(caught.value)
    path.write_text("1 99999999999999999999:1\n", encoding="utf-8")
    with refused(path):
        read_svmlight(path, 5)
    path.write_bytes(bz2.compress(b"1\n" * 3_000_000))  # 3 kB
    with refused(path) as caught:
        read_svmlight(path, 256)
    assert "3000000 lines of 256 values" in str(caught.value)
    path.write_bytes(b"")
    assert read_svmlight(path, 5)[0].shape == (0, 5)


def test_libsvm_damaged_bz2(tmp_path: Path) -> None:
    path = tmp_path / "a"
    whole = bz2.compress(b"1 1:0.5\n" * 50)
    for content in (whole[:-5], whole[:20] + b"\0\0\0" + whole[23:], b"BZh"):
        path.write_bytes(content)
        with refused(path):
            read_svmlight(path, 5)


def test_cifar_records(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    images, labels = draws.integers(0, 256, (3, 3, 32, 32), np.uint8), np.array([9, 0, 4], np.uint8)
    body = b"".join(bytes([label]) + image.tobytes() for label, image in zip(labels, images, strict=True))
    path = tmp_path / "batch.bin"
    path.write_bytes(body)
    got, got_labels = read_cifar_batch(path)
    np.testing.assert_array_equal(got, images)
    np.testing.assert_array_equal(got_labels, labels)
    for content in (b"", body[:-1], body + b"\0"):
        path.write_bytes(content)
        with refused(path):
            read_cifar_batch(path)


def test_the_size_limit_admits_every_real_file() -> None:
    assert math.prod((814_255, 28, 28)) < LARGEST_BYTES  # EMNIST by class, the largest of the family


def test_names_in_a_file_are_reported_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **{"a\nb": np.zeros(2), "ü": np.zeros(2)})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"it holds 'a\\nb', ü"):
        read_own_npz(path, ("x",))
