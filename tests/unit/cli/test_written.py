"""`cflpriv list` reads source files in place of registries that torch is imported for; both say the same."""

import pytest

from cflpriv.cli import describing, written
from cflpriv.plugins import are_extended


def test_source_files_say_what_is_registered() -> None:
    """All names with their lines, in their order."""
    if are_extended():
        pytest.skip("an installed package, or a plugin of another test, adds to the registries")
    registered, described = describing.registered(), written.described()
    assert described == registered
    assert {title: list(lines) for title, lines in described.items()} == {title: list(lines) for title, lines in registered.items()}


def test_names_are_followed_to_where_they_are_assigned() -> None:
    assert written._arguments(written._value("algorithms", "FEDAVG"), "name")["name"] == "fedavg"
    with pytest.raises(KeyError, match="NOWHERE"):
        written._value("algorithms", "NOWHERE")
