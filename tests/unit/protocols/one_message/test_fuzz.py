"""Random runs are exact or refused, and any bytes are refused without harm."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.protocols.codec import CHECKSUM_BYTES, HEADER
from cflpriv.protocols.errors import MalformedMessage, RemoteError
from cflpriv.protocols.one_message import HelpedTerms, Helper, server
from cflpriv.protocols.one_message import messages as m
from cflpriv.protocols.one_message.terms import held

from .fuzz import play, spoil
from .scene import Scene

SEEDS = st.integers(0, 2**63 - 1)


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_random_runs_are_exact_or_refused(seed: int) -> None:
    play(seed)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(SEEDS)
def test_ten_thousand_random_runs_are_exact_or_refused(seed: int) -> None:
    play(seed)


def test_random_runs_end_in_every_way() -> None:
    """The runs above would show nothing if all failed early."""
    ends = Counter(play(seed) for seed in range(60))
    assert ends["sum"] >= 20
    assert ends["too-few-helpers"] >= 5
    assert ends["too-few-clients"] >= 1


def test_the_runs_find_planted_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers that forget which set they signed, and a server that asks one helper for each mask, are found within a few runs."""
    with monkeypatch.context() as patched:
        patched.setattr(Helper, "_signed", lambda self, terms: None)
        patched.setattr(Helper, "_summed", lambda self, kept, digest: {})
        with pytest.raises(AssertionError, match="two sets"):
            _play_many(50)
    monkeypatch.setattr(server, "plan", _asking_one)
    with pytest.raises(AssertionError, match="wrong sum"):
        _play_many(200)


def _asking_one(terms: HelpedTerms, helpers: Sequence[int], seeds: Iterable[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((seed,), (min(helper for helper in helpers if seed in held(terms, helper)),)) for seed in seeds]


def _play_many(count: int) -> None:
    for seed in range(count):
        play(seed)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_decoders_refuse_any_bytes(data: bytes) -> None:
    for decode in _decoders(_samples()[1]):
        with pytest.raises(MalformedMessage):
            decode(data)


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_well_sealed_bytes_of_other_contents_are_a_message_or_refused(seed: int) -> None:
    """Changed messages with a good checksum reach the checks of fields: what a decoder accepts is its own encoding, and helpers refuse."""
    random, (scene, terms, samples) = Random(seed), _samples()
    body = bytearray(spoil(random.choice(samples)[len(HEADER) : -CHECKSUM_BYTES], random))
    data = HEADER + bytes(body)
    data += sha256(data).digest()[:CHECKSUM_BYTES]
    for decode in _decoders(terms):
        with suppress(MalformedMessage):
            assert m.encode(decode(data)) == data
    helper = Helper(scene.holders[0], scene.roster, scene.policy, dict(scene.stores[0]))
    with suppress(RemoteError):
        assert helper.receive(data)


def _decoders(terms: HelpedTerms) -> tuple[Callable[[bytes], Any], ...]:
    return (
        m.decode_announcement, m.decode_invite, m.decode_to_helper, lambda data: m.decode_upload(data, terms),
        lambda data: m.decode_from_helper(data, terms),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _samples() -> tuple[Scene, HelpedTerms, list[bytes]]:
    """A finished sum, and one message of each kind."""
    scene = Scene(3)
    announced = scene.announced()
    server = scene.server(scene.terms(announced), announced)
    samples = [announced[0], server.invite]
    for client in range(3):
        samples.append(scene.upload(client, server))
        server.receive(client, samples[-1])
    there = scene.all()
    messages = server.deliver()
    while messages:
        answers = {helper: there[helper].receive(data) for helper, data in messages.items()}
        samples += [messages[0], answers[0]]
        if server.stage == "collecting":
            server.delivered(answers)
            messages = server.close()
        else:
            messages = server.advance(answers)
    return scene, server.terms, samples


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_a_helper_that_gets_bad_bytes_has_changed_nothing(seed: int) -> None:
    random, scene = Random(seed), Scene(3)
    announced = scene.announced()
    server = scene.server(scene.terms(announced), announced)
    for client in range(3):
        server.receive(client, scene.upload(client, server))
    message = server.deliver()[0]
    before = dict(scene.stores[0])
    with pytest.raises(RemoteError):
        scene.helper(0).receive(spoil(message, random))
    assert scene.stores[0] == before
