"""A bounded run of the fuzzer; `fuzz.py` is the long one."""

import pytest

from .fuzz import fuzz_decoders, fuzz_machines


def test_mutants_through_the_decoders() -> None:
    # Some mutants are messages: those that change a number or some key, with the checksum mended.
    assert 0 < fuzz_decoders(20_000) < 20_000


@pytest.mark.slow
def test_a_million_mutants_through_the_decoders() -> None:
    assert fuzz_decoders(1_000_000, seed=1) > 0


def test_mutants_at_running_machines_are_refused_without_a_trace() -> None:
    # What is not refused is a valid message with other contents, such as an Invite with other terms or a changed masked vector.
    assert fuzz_machines(2_000) < 400
