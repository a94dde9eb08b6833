"""The transcript on disk: what is kept is what is read back, and tampering shows."""

import json
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from cflpriv.contract.transcript import Level, Message, Transcript, _link, payload_rows, read_transcript
from cflpriv.errors import InputError


def talk(transcript: Transcript) -> Transcript:
    for number in range(3):
        model = {"model": np.full(4, float(number))}
        transcript.add(number, "compute", "parameters", "server", "clients", (0, 1, 2), model, readers=("server", "clients"))
        rows = [{"update": np.arange(4.0) + client, "weight": np.array(2.0)} for client in range(3)]
        transcript.add(
            number, "mean", "update", "clients", "server", (0, 1, 2), rows, readers=("server",), context={"labels": [[0], [0], [1]]}
        )
    secret = [{"x": np.ones(2)}, {"x": np.zeros(2)}]
    transcript.add(2, "relay", "x", "clients", "clients", (0, 1), secret, readers=("clients",), peers=((1, 2), (0,)), overhead_bytes=28)
    return transcript


def same(a: Message, b: Message) -> bool:
    fields = [name for name in Message.__dataclass_fields__ if name != "payload"]
    if any(getattr(a, name) != getattr(b, name) for name in fields) or (a.payload is None) != (b.payload is None):
        return False
    return a.payload is None or all(np.array_equal(a.payload[name], (b.payload or {})[name]) for name in a.payload)


@pytest.mark.parametrize("level", ["headers", "attackable", "full"])
def test_round_trip(level: Level, tmp_path: Path) -> None:
    transcript = talk(Transcript(level, rounds=[1], clients=[0, 2]))
    transcript.write(tmp_path)
    back = read_transcript(tmp_path)
    assert len(back) == 7
    assert all(same(a, b) for a, b in zip(transcript.messages, back, strict=True))
    assert transcript.upload_bytes == 3 * 3 * 40 + 3 * 44  # a relayed value is sealed for each recipient
    assert transcript.download_bytes == 3 * 3 * 32 + 3 * 44
    assert back[-1].total_bytes == 3 * 44


def test_attackable_keeps_chosen_rounds_and_clients() -> None:
    transcript = talk(Transcript("attackable", rounds=[1], clients=[0, 2]))
    kept = [m for m in transcript.messages if m.payload is not None]
    assert [(m.round, m.operation) for m in kept] == [(1, "compute"), (1, "mean")]
    assert payload_rows(kept[1]) == (0, 2)
    assert kept[1].payload is not None
    np.testing.assert_array_equal(kept[1].payload["update"][1], np.arange(4.0) + 2)


def test_it_may_be_written_in_pieces(tmp_path: Path) -> None:
    transcript = Transcript("full")
    written = 0
    for _ in range(2):
        talk(transcript)
        transcript.write(tmp_path, written)
        written = len(transcript.messages)
    assert all(same(a, b) for a, b in zip(transcript.messages, read_transcript(tmp_path), strict=True))


def test_what_concerns_no_client_travels_once() -> None:
    transcript = Transcript("full")
    for source, target in (("key-holder", "server"), ("server", "key-holder"), ("server", "clients"), ("clients", "server")):
        transcript.add(0, "gram", "x", source, target, (), {"x": np.zeros(2)}, readers=("server",))
    assert [(one.copies, one.total_bytes) for one in transcript.messages] == [(1, 16), (1, 16), (0, 0), (0, 0)]
    assert transcript.upload_bytes == transcript.download_bytes == 0


def test_kept_payloads_are_copies() -> None:
    transcript, value = Transcript("full"), np.zeros(2)
    transcript.add(0, "gather", "x", "clients", "server", (0,), [{"x": value}], readers=("server",))
    value += 1
    assert transcript.messages[0].payload is not None
    np.testing.assert_array_equal(transcript.messages[0].payload["x"], [[0.0, 0.0]])


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no transcript"):
        read_transcript(tmp_path)
    talk(Transcript("full")).write(tmp_path)
    lines = (tmp_path / "messages.jsonl").read_text(encoding="utf-8").splitlines()

    def rewritten(changed: list[str]) -> None:
        (tmp_path / "messages.jsonl").write_text("\n".join(changed) + "\n", encoding="utf-8")

    rewritten([lines[0], lines[1][:-9]])
    with pytest.raises(InputError, match="line 2 is not a message"):
        read_transcript(tmp_path)
    rewritten(lines[1:])
    with pytest.raises(InputError, match=r"line 1 .* does not continue"):
        read_transcript(tmp_path)
    rewritten(lines[:-1])
    with pytest.raises(InputError, match="has 6 messages, the run had 7"):
        read_transcript(tmp_path, 7)
    rewritten([*lines[:2], lines[2].replace("parameters", "parametres"), *lines[3:]])
    with pytest.raises(InputError, match="line 3 is not a message"):
        read_transcript(tmp_path)
    (tmp_path / "messages.jsonl").write_bytes(b"\xff\xfe" + "\n".join(lines).encode())
    with pytest.raises(InputError, match="line 1 is not a message"):
        read_transcript(tmp_path)
    rewritten(lines)
    (payload,) = tmp_path.glob("*.safetensors")
    whole = payload.read_bytes()
    payload.write_bytes(whole[:-200] + bytes(byte ^ 1 for byte in whole[-200:]))
    with pytest.raises(InputError, match="does not match its digest"):
        read_transcript(tmp_path)
    payload.write_bytes(whole[:-5])
    with pytest.raises(InputError, match=payload.name):
        read_transcript(tmp_path)


@given(changed=st.sampled_from(["update", "weight", "clients", "model"]), at=st.integers(0, 7), bit=st.integers(0, 7))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_row_shows_where_only_some_were_kept(changed: str, at: int, bit: int, tmp_path: Path) -> None:
    """Level "attackable" with chosen clients: any bit of what was kept, of a row or of whose it is."""
    folder = Path(mkdtemp(dir=tmp_path))
    talk(Transcript("attackable", rounds=[1], clients=[0, 2])).write(folder)
    (path,) = folder.glob("*.safetensors")
    payloads = load_file(path)
    (name,) = [name for name in payloads if name.endswith(f"/{changed}")]
    content = payloads[name].copy()
    content.reshape(-1).view(np.uint8)[at] ^= 1 << bit
    save_file(payloads | {name: content}, path)
    with pytest.raises(InputError, match=r"messages.jsonl: line [34]: the payload does not match its digest"):
        read_transcript(folder)


def test_a_row_too_few_or_without_a_digest_is_refused(tmp_path: Path) -> None:
    talk(Transcript("attackable", rounds=[1], clients=[0, 2])).write(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    payloads = load_file(path)
    save_file(payloads | {"3/update": payloads["3/update"][:1]}, path)
    with pytest.raises(InputError, match="not one row a client"):
        read_transcript(tmp_path)
    save_file(payloads, path)
    chain, lines = "", []
    for line in (tmp_path / "messages.jsonl").read_text(encoding="utf-8").splitlines():  # as an earlier version wrote them
        header = {key: value for key, value in json.loads(json.loads(line)["header"]).items() if key != "kept_digest"}
        chain = _link(chain, json.dumps(header))
        lines.append(json.dumps({"chain": chain, "header": json.dumps(header)}))
    (tmp_path / "messages.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"line 4: .* earlier version"):
        read_transcript(tmp_path)


def test_padded_rows_of_chosen_clients_come_back(tmp_path: Path) -> None:
    transcript = Transcript("attackable", clients=[0, 2])
    said = [{"bytes": np.arange(length, dtype=np.uint8)} for length in (3, 9, 5)]
    transcript.add(0, "mean", "x", "clients", "server", (0, 1, 2), said, readers=("server",))
    transcript.write(tmp_path)
    (back,) = read_transcript(tmp_path)
    assert back.payload is not None
    assert back.payload["bytes.length"].tolist() == [3, 5]
    assert payload_rows(back) == (0, 2)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InputError, match="'some'"):
        Transcript("some")  # type: ignore[arg-type]
