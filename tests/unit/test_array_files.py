"""Files of arrays that another person may have written: what a header declares is compared with the bytes before memory is taken."""

import bz2
import io
import os
import struct
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from cflpriv.array_files import LEAST_UNPACKED_BYTES, map_npy, read_npy, read_npz, read_safetensors
from cflpriv.data.formats import read_idx, read_own_npz
from cflpriv.errors import InputError
from cflpriv.protocols.bounded_files import LARGEST_DOCUMENT_BYTES, UnusableFile, open_regular, read_json, read_text

SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
ARRAY = np.arange(12, dtype="<f8").reshape(3, 4)


@contextmanager
def little_memory(limit: int = 2**23) -> Iterator[None]:
    """Fails if more is taken inside, whether or not it is written to."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def refusal(read: Callable[[], Any], path: Path) -> str:
    """The error of a reader, which must be one line that names the file."""
    with little_memory(), pytest.raises(InputError) as caught:
        read()
    words = str(caught.value)
    assert str(path) in words
    assert "\n" not in words
    return words


def npy(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    """An npy file with this text as its header, which declares `length`."""
    text = header.encode("utf-8") + b"\n"
    width = 2 if version == (1, 0) else 4
    return b"\x93NUMPY" + bytes(version) + (len(text) if length is None else length).to_bytes(width, "little") + text + data


def header_of(shape: str = "(3, 4)", descr: str = "'<f8'", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


def packed(path: Path, content: bytes, how: int = zipfile.ZIP_STORED, name: str = "x.npy") -> Path:
    with zipfile.ZipFile(path, "w", how) as archive:
        archive.writestr(name, content)
    return path


# --- headers ------------------------------------------------------------------------------------------------------------------------------

DATA = ARRAY.tobytes()
HEADERS: dict[str, tuple[bytes, str]] = {
    "huge shape": (npy(header_of("(1000000000000,)"), DATA), "declares <f8 of shape (1000000000000,), which is 8000000000000 bytes"),
    "product of 2^64": (npy(header_of("(4294967296, 4294967296)")), "is 147573952589676412928 bytes, but 0 bytes"),
    "too short": (npy(header_of(), DATA[:-1]), "is 96 bytes, but 95 bytes are there"),
    "too long": (npy(header_of(), DATA + b"\0"), "is 96 bytes, but 97 bytes are there"),
    "negative": (npy(header_of("(-3, -4)"), DATA), "a shape that is none"),
    "bool": (npy(header_of("(True, 12)"), DATA), "a shape that is none"),
    "float": (npy(header_of("(3.0, 4)"), DATA), "its header is damaged"),
    "no tuple": (npy(header_of("12"), DATA), "its header is damaged"),
    "huge number": (npy(header_of(f"({'9' * 4000},)"), DATA), "a shape that is none"),
    "larger number": (npy(header_of(f"({'9' * 5000},)"), DATA), "its header is damaged"),
    "many axes": (npy(header_of("(" + "1, " * 65 + ")"), b"\0" * 8), "a shape that is none"),
    "empty and huge": (npy(header_of("(0, 4611686018427387904, 4611686018427387904)")), "not a readable npz file (array 'x': "),
    "empty and long": (npy(header_of("(1099511627776, 0)")), "no numbers, along axes"),
    "objects": (npy(header_of(descr="'|O'"), DATA), "declares the type 'O'"),
    "structure": (npy(header_of(descr="[('a', '<f8')]"), DATA), "declares the type 'V'"),
    "array of arrays": (npy(header_of("(1,)", descr="('<f8', (12,))"), DATA), "declares the type 'V'"),
    "time": (npy(header_of(descr="'<M8[s]'"), DATA), "declares the type 'M'"),
    "text of no width": (npy(header_of("(1000000000000,)", descr="'<U0'")), "declares the type 'U'"),
    "text of great width": (npy(header_of("(1,)", descr="'<U500000000'")), "is 2000000000 bytes, but 0"),
    "unknown type": (npy(header_of(descr="'<f7'"), DATA), "its header is damaged"),
    "code": (npy("__import__('os').abort()", DATA), "its header is damaged"),
    "nested": (npy("(" * 999, DATA), "its header is damaged"),
    "signs": (npy("-" * 9000 + "1", DATA), "its header is damaged"),
    "not closed": (npy("{'descr': '<f8", DATA), "its header is damaged"),
    "missing key": (npy("{'descr': '<f8', 'shape': (3, 4)}", DATA), "its header is damaged"),
    "long expression": (npy(header_of() + " " * 60_000, DATA), "declares 60060 bytes of itself, more than 10000"),
    "header of 4 GB": (npy(header_of(), DATA, (2, 0), 2**32 - 1), "declares 4294967295 bytes of itself, more than 10000"),
    "header beyond the end": (npy(header_of(), b"", (1, 0), 9_999), "is 96 bytes, but"),
    "version 4": (npy(header_of(), DATA, (4, 0)), "is of npy version 4.0"),
    "another archive": (packed(io.BytesIO(), DATA).getvalue(), "does not begin as an npy file"),  # type: ignore[arg-type, attr-defined]
    "text": (b"x,y\n1,2\n", "does not begin as an npy file"),
    "nothing": (b"", "does not begin as an npy file"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_does_not_fit_is_refused_before_memory_is_taken(tmp_path: Path, name: str) -> None:
    content, words = HEADERS[name]
    for how in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = packed(tmp_path / "a.npz", content, how)
        assert words in refusal(lambda path=path: read_npz(path), path)  # type: ignore[misc]
    alone = tmp_path / "x.npy"
    alone.write_bytes(content)
    refusal(lambda: map_npy(alone), alone)
    with little_memory(), pytest.raises(ValueError, match=r"^[^\n]+$"):
        read_npy(io.BytesIO(content), len(content))


def test_a_file_of_201_bytes(tmp_path: Path) -> None:
    """The file that once ended in MemoryError."""
    path = packed(tmp_path / "a.npz", npy(header_of("(4611686018427387904,)", "'|u1'")))
    assert path.stat().st_size < 250
    for read in (read_npz, lambda path: read_own_npz(path, ("x",))):
        assert "but 0 bytes are there" in refusal(lambda read=read: read(path), path)  # type: ignore[misc]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_each_version_and_order_and_kind_is_read(tmp_path: Path, version: tuple[int, int]) -> None:
    arrays = {
        "plain": ARRAY, "fortran": np.asfortranarray(ARRAY), "scalar": np.array(3.5), "empty": np.zeros((0, 7), np.int16),
        "big": ARRAY.astype(">f4"), "truth": np.array([True, False]), "text": np.array(["a", "zwölf"]), "bytes": np.array([b"a", b"bcd"]),
        "complex": np.array([1j]), "half": np.ones(3, np.float16), "long": np.array([2**63], np.uint64),
    }  # fmt: skip
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns that older versions cannot read version 3
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, version)
            archive.writestr(f"{name}.npy", content.getvalue())
            (tmp_path / f"{name}.npy").write_bytes(content.getvalue())
    found = read_npz(tmp_path / "a.npz")
    for name, array in arrays.items():
        for same in (found[name], map_npy(tmp_path / f"{name}.npy")):
            np.testing.assert_array_equal(same, array)
            assert (same.dtype, same.shape) == (array.dtype, array.shape)
            assert same.flags.writeable


@pytest.mark.slow
@SHARED_FOLDER
@given(
    shape=st.lists(st.one_of(st.integers(-5, 5), st.integers(), st.booleans(), st.floats(), st.text(max_size=3), st.tuples()), max_size=5),
    descr=st.one_of(st.sampled_from(["<f8", ">i4", "|u1", "|O", "<U2", "|V9", "<c16", "|b1"]), st.text(max_size=4), st.integers()),
    order=st.sampled_from([True, False, None, 1]), version=st.sampled_from([(1, 0), (2, 0), (3, 0)]), size=st.integers(0, 200),
)  # fmt: skip
def test_headers_at_random(tmp_path: Path, shape: Any, descr: Any, order: Any, version: tuple[int, int], size: int) -> None:
    content = npy(f"{{'descr': {descr!r}, 'fortran_order': {order!r}, 'shape': {tuple(shape)!r}}}", b"\1" * size, version)
    read_as_numpy_or_refused(packed(tmp_path / "a.npz", content), content)


@pytest.mark.slow
@SHARED_FOLDER
@given(data=st.data(), version=st.sampled_from([(1, 0), (2, 0), (3, 0)]))
def test_mutated_files(tmp_path: Path, data: st.DataObject, version: tuple[int, int]) -> None:
    """Bytes that are changed, cut or added anywhere, under a checksum that fits, so that the archive does not find it."""
    content = bytearray(npy(header_of(), DATA, version))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        end = at + data.draw(st.integers(0, 4))
        content[at:end] = data.draw(st.one_of(st.binary(max_size=4), st.sampled_from([b"9", b"(", b"-", b"'", b"O", b"\n", b"0" * 20])))
    read_as_numpy_or_refused(packed(tmp_path / "a.npz", bytes(content)), bytes(content))


def refused_or_read(read: Callable[[], Any]) -> tuple[Any, str]:
    """What a reader returns, and its error; anything else that it raises fails the test."""
    try:
        return read(), ""
    except InputError as error:
        return None, str(error)


def read_as_numpy_or_refused(path: Path, content: bytes) -> None:
    found, words = refused_or_read(lambda: read_npz(path)["x"])
    if words:
        assert str(path) in words
        assert "\n" not in words
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_array_equal(found, np.load(io.BytesIO(content)))


# --- archives -----------------------------------------------------------------------------------------------------------------------------


def edited(path: Path, change: Callable[[bytearray], None]) -> Path:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return path


def field(signature: bytes, offset: int, value: bytes) -> Callable[[bytearray], None]:
    """Overwrites a field of each entry with this signature."""

    def change(content: bytearray) -> None:
        at = content.find(signature)
        while at >= 0:
            content[at + offset : at + offset + len(value)] = value
            at = content.find(signature, at + 1)

    return change


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


ENTRY, LOCAL, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"
PLAIN = npy(header_of(), DATA)


def twice(path: Path, *names: str) -> Path:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.simplefilter("ignore")
        for name in names:
            archive.writestr(name, PLAIN)
    return path


def overlapping(path: Path) -> Path:
    """A directory with a hundred entries for the one member."""
    packed(path, PLAIN)
    content = path.read_bytes()
    start = content.find(ENTRY)
    stop = content.find(END)
    entry, end = content[start:stop], bytearray(content[stop:])
    end[8:16] = struct.pack("<HHL", 100, 100, 100 * len(entry))
    entries = b"".join(entry.replace(b"x.npy", b"%05d" % i)[:-5] + b"%d.npy" % (i % 10) for i in range(100))
    path.write_bytes(content[:start] + entries + bytes(end))
    return path


ARCHIVES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "encrypted": (
        lambda path: edited(edited(packed(path, PLAIN), field(ENTRY, 8, b"\1\0")), field(LOCAL, 6, b"\1\0")), "array 'x': is encrypted",
    ),
    "method 99": (
        lambda path: edited(edited(packed(path, PLAIN), field(ENTRY, 10, b"\x63\0")), field(LOCAL, 8, b"\x63\0")), "by method 99",
    ),
    "bz2": (lambda path: packed(path, PLAIN, zipfile.ZIP_BZIP2), "is compressed by method 12; expected deflate, or none"),
    "lzma": (lambda path: packed(path, PLAIN, zipfile.ZIP_LZMA), "is compressed by method 14; expected deflate, or none"),
    "checksum": (lambda path: edited(packed(path, PLAIN), field(DATA[8:16], 0, b"\7")), "Bad CRC-32"),
    "checksum, packed": (
        lambda path: edited(packed(path, PLAIN, zipfile.ZIP_DEFLATED), field(ENTRY, 16, b"\7\7\7\7")), "Bad CRC-32",
    ),
    "size of a stored member": (lambda path: edited(packed(path, PLAIN), field(ENTRY, 24, b"\0\0\0\x70")), "bytes are there"),
    "size of a packed member": (
        lambda path: edited(packed(path, PLAIN, zipfile.ZIP_DEFLATED), field(ENTRY, 24, b"\0\0\0\x70")),
        "compressed arrays unpack to 1879048192 bytes, expected at most 67108864",
    ),
    "sizes beyond the file": (
        lambda path: edited(packed(path, PLAIN), field(ENTRY, 20, b"\0\0\0\x70\0\0\0\x70")), "its members are longer than the file",
    ),
    "directory of 4 GB": (lambda path: edited(packed(path, PLAIN), field(END, 12, b"\xfe\xff\xff\xff")), "not a readable npz file ("),
    "same name": (lambda path: twice(path, "x.npy", "x.npy"), "two members are called 'x.npy'"),
    "long name": (lambda path: twice(path, "x" * 300 + ".npy"), "a member's name has 304 characters"),
    "members over each other": (overlapping, "lies over another"),
    "cut": (lambda path: edited(packed(path, PLAIN), lambda content: content.__delitem__(slice(-30, None))), "File is not a zip file"),
    "npy": (lambda path: written(path, PLAIN), "File is not a zip file"),
    "empty": (lambda path: written(path, b""), "File is not a zip file"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    make, words = ARCHIVES[name]
    path = make(tmp_path / "a.npz")
    assert words in refusal(lambda: read_npz(path), path)


@pytest.mark.slow
def test_a_directory_of_many_entries_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(20_000):
            archive.writestr(f"{number}.npy", b"")
    assert "its directory has" in refusal(lambda: read_npz(path), path)


def test_names_with_separators_and_members_that_are_no_arrays(tmp_path: Path) -> None:
    """No member is ever written to the disk."""
    path = twice(tmp_path / "a.npz", "../../up.npy", "/root.npy", "a\\b.npy")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("inner.zip", packed(tmp_path / "inner.npz", PLAIN).read_bytes())
    assert set(read_npz(path)) == {"../../up", "/root", "a\\b"}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.npz", "inner.npz"]


def test_zip64_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("x.npy", "w", force_zip64=True) as member:
        member.write(PLAIN)
    np.testing.assert_array_equal(read_npz(tmp_path / "a.npz")["x"], ARRAY)


@pytest.mark.slow
def test_what_a_packed_array_may_unpack_to(tmp_path: Path) -> None:
    """A bomb is refused by what it declares; one that declares less than it holds ends there; stored arrays have no limit."""
    size = LEAST_UNPACKED_BYTES + 2**20
    content = npy(header_of(f"({size},)", "'|u1'"))
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x.npy", content + bytes(size))
    assert (tmp_path / "bomb.npz").stat().st_size < 400_000
    words = refusal(lambda: read_npz(tmp_path / "bomb.npz"), tmp_path / "bomb.npz")
    assert f"array 'x': with it the compressed arrays unpack to {size + len(content)} bytes, expected at most 67108864 from a file" in words
    assert words.endswith("save the arrays without compression: numpy.savez)")
    assert read_npz(tmp_path / "bomb.npz", optional=()) == {}
    assert read_own_npz(tmp_path / "bomb.npz", ("x",))["x"].nbytes == size
    liar = edited(tmp_path / "bomb.npz", field(ENTRY, 24, struct.pack("<L", len(content) + 100)))
    assert "Bad CRC-32" in refusal(lambda: read_npz(liar), liar)
    np.savez(tmp_path / "plain.npz", x=np.zeros(size, np.uint8))
    assert read_npz(tmp_path / "plain.npz")["x"].nbytes == size


@pytest.mark.slow
def test_packed_arrays_are_limited_together(tmp_path: Path) -> None:
    several = {f"x{number}": np.zeros(LEAST_UNPACKED_BYTES // 3, np.uint8) for number in range(4)}
    np.savez_compressed(tmp_path / "a.npz", allow_pickle=False, **several)
    with pytest.raises(InputError, match=r"array 'x2': with it .* unpack to 671092\d\d bytes, expected at most 67108864"):
        read_npz(tmp_path / "a.npz")
    assert set(read_npz(tmp_path / "a.npz", ("x0",), ("x1",))) == {"x0", "x1"}


def test_a_large_array_is_in_memory_once(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal(2**20)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", x=array)
        with little_memory(array.nbytes + 2**22):
            found = read_own_npz(tmp_path / "a.npz", ("x",))["x"]
        np.testing.assert_array_equal(found, array)


# --- other files --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a readable safetensors file"),
        ((2**40).to_bytes(8, "little") + b"{}", "not a readable safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "not a readable safetensors file"),
        (b'{"x":{"dtype":"F64","shape":[1000000000000],"data_offsets":[0,8]}}', "not a readable safetensors file"),
        (b'{"x":{"dtype":"F64","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}}', "not a readable safetensors file"),
        (b'{"x":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},"y":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}', "not a readable"),
        (b'{"x":{"dtype":"F64","shape":[-1],"data_offsets":[0,8]}}', "not a readable safetensors file"),
        (b'{"x":{"dtype":"O","shape":[1],"data_offsets":[0,8]}}', "not a readable safetensors file"),
        (b'{"x":{"dtype":"F64","shape":[0,9223372036854775808],"data_offsets":[0,0]}}', "not a readable safetensors file"),
        (b'{"x":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}}', "not a readable safetensors file"),
    ],
)
def test_safetensors_that_do_not_fit(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(8) if content.startswith(b'{"') else content)
    assert words in refusal(lambda: read_safetensors(path), path)


@pytest.mark.slow
@SHARED_FOLDER
@given(data=st.data())
def test_mutated_safetensors(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": ARRAY, "y": np.arange(3)}, path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content)))
    content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.one_of(st.binary(max_size=4), st.sampled_from([b"9" * 20, b"[", b"-"])))
    path.write_bytes(content)
    found, words = refused_or_read(lambda: read_safetensors(path))
    assert words or all(array.nbytes <= len(content) for array in found.values())
    assert "\n" not in words


def test_an_idx_file_takes_memory_for_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    start = b"\0\0\x08\x01" + struct.pack(">I", 2**26)
    path.write_bytes(zlib.compress(start + bytes(100), wbits=31))
    with pytest.raises(InputError, match="truncated, 100 of 67108864 bytes"):
        read_idx(path, 1)
    path.write_bytes(zlib.compress(b"\0\0\x08\x01" + struct.pack(">I", 100) + bytes(2**24), wbits=31))
    assert "trailing bytes after the 100" in refusal(lambda: read_idx(path, 1), path)
    path.write_bytes(bz2.compress(start))
    assert "magic number" in refusal(lambda: read_idx(path, 1), path)


# --- what is no file ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink("/dev/null", path)])
def test_pipes_and_devices_are_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "a"
    make(path)
    for read in (read_npz, map_npy, read_safetensors, lambda path: read_idx(path, 1)):
        assert "is a pipe or a device, not a file" in refusal(lambda read=read: read(path), path)  # type: ignore[misc]
    for words in (open_regular, read_text, read_json):
        with pytest.raises(UnusableFile, match=r"/a: is a pipe or a device, not a file$"):
            words(path)


def test_folders_and_links(tmp_path: Path) -> None:
    for read in (read_npz, map_npy, read_safetensors, lambda path: read_idx(path, 1)):
        assert "directory" in refusal(lambda read=read: read(tmp_path), tmp_path)  # type: ignore[misc]
    (tmp_path / "away").symlink_to(tmp_path / "gone")
    assert "no such file" in refusal(lambda: read_npz(tmp_path / "away"), tmp_path / "away")
    np.savez(tmp_path / "b.npz", x=ARRAY)
    (tmp_path / "link").symlink_to(tmp_path / "b.npz")
    np.testing.assert_array_equal(read_npz(tmp_path / "link")["x"], ARRAY)


def test_a_document_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """Of a sparse file nothing is on the disk."""
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(LARGEST_DOCUMENT_BYTES + 1)
    with little_memory(), pytest.raises(UnusableFile, match=r"a\.json: has 268435457 bytes, expected at most 268435456$"):
        read_json(path)
    path.write_bytes(b"[" * 200_000)
    with pytest.raises(ValueError, match="recursion"):
        read_json(path)
    path.write_bytes(b"a\r\nb\rc\n\xff")
    with pytest.raises(UnicodeDecodeError):
        read_text(path)
    assert read_text(path, errors="replace") == "a\nb\nc\n�"
