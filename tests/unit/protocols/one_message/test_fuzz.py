"""Random runs are exact or refused, and any bytes are refused without harm."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.protocols.errors import MalformedMessage, RemoteError
from cflpriv.protocols.one_message import HelpedServer, Helper
from cflpriv.protocols.one_message import messages as m

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
    """A helper that forgets which set it signed, and a server that takes the first mask, are found within a few runs."""
    with monkeypatch.context() as patched:
        patched.setattr(Helper, "_signed", lambda self, terms: None)
        patched.setattr(Helper, "_summed", lambda self, kept, digest: {})
        with pytest.raises(AssertionError, match="two sets"):
            _play_many(50)
    settle = HelpedServer._settle
    monkeypatch.setattr(
        HelpedServer, "_settle", lambda self, group, votes: settle(self, group, dict.fromkeys(votes, next(iter(votes.values()))))
    )
    with pytest.raises(AssertionError, match="wrong sum"):
        _play_many(200)


def _play_many(count: int) -> None:
    for seed in range(count):
        play(seed)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_decoders_refuse_any_bytes(data: bytes) -> None:
    scene = Scene(3)
    announced = _announced()
    terms = scene.terms(announced)
    for decode in (
        m.decode_announcement,
        m.decode_invite,
        m.decode_to_helper,
        lambda data: m.decode_upload(data, terms),
        lambda data: m.decode_from_helper(data, terms),
    ):
        with pytest.raises(MalformedMessage):
            decode(data)


def _announced() -> dict[int, bytes]:
    scene = Scene(3)
    return scene.announced()


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
