"""Identities and rosters in files: what is written is read again, and nothing else is taken for it."""

import stat
from pathlib import Path

import pytest

from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.key_files import read_identity, read_roster, write_identities, write_identity
from cflpriv.protocols.keys import Identity, sign, verify

ENTROPY = public_entropy("key files")


def test_an_identity_comes_back_and_only_its_owner_reads_the_file(tmp_path: Path) -> None:
    made, path = Identity.create(7, ENTROPY), tmp_path / "client7.key"
    write_identity(path, made)
    found = read_identity(path)
    assert (found.client, found.signing_seed, found.encryption_seed) == (7, made.signing_seed, made.encryption_seed)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match=r"client7\.key: exists; keys are not overwritten"):
        write_identity(path, made)
    assert read_identity(path).public() == made.public()


@pytest.mark.parametrize("key_holder", [False, True])
def test_the_roster_has_the_keys_of_all_identities(tmp_path: Path, key_holder: bool) -> None:
    roster = read_roster(write_identities(tmp_path, 3, ENTROPY, key_holder=key_holder))
    assert len(roster.keys) == 3
    for client in range(3):
        verify(roster, client, sign(read_identity(tmp_path / f"client{client}.key"), "x"), "x")
    assert roster.holder == (read_identity(tmp_path / "key-holder.key").public() if key_holder else b"")


@pytest.mark.parametrize("text", ["", "0\nab\nab\n", f"-1\n{'00' * 32}\n{'00' * 32}\n", f"0\n{'00' * 32}\n{'zz' * 32}\n", "0\n1\n2\n3\n"])
def test_what_is_no_key_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.key").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"x\.key: is not a key file of three lines"):
        read_identity(tmp_path / "x.key")


@pytest.mark.parametrize("text", ["0 ab\n", f"1 {'00' * 32}\n", f"0 {'00' * 32}\n1 {'00' * 32}\n", "key-holder\n", "zero one\n"])
def test_what_is_no_roster_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "roster.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"roster\.txt: is not a roster of lines"):
        read_roster(tmp_path / "roster.txt")
    with pytest.raises(ValueError, match=r"nothing\.txt: is not a roster"):
        read_roster(tmp_path / "nothing.txt")
