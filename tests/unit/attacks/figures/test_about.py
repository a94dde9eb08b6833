"""What an audit says that it ran: what was finished, whatever it was asked for."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.figures.about import extent

PAIRS = st.sets(st.tuples(st.sampled_from(["server", "client", "released"]), st.sampled_from(["membership", "likeness", "influence"])))


@settings(max_examples=25)
@given(PAIRS, PAIRS)
def test_the_record_says_which_adversary_made_which_attack(done: set[tuple[str, str]], planned: set[tuple[str, str]]) -> None:
    said = extent(sorted(done), sorted(planned))
    run, left = ({(by, name) for by, names in part["by_adversary"].items() for name in names} for part in (said, said["not_run"]))
    assert run == done
    assert left == planned - done
    assert set(said["attacks"]) == {name for _, name in done}
    assert set(said["not_run"]["attacks"]) == {name for _, name in planned} - set(said["attacks"])
    assert set(said["adversaries"]) == set(said["by_adversary"]) == {viewer for viewer, _ in done}
    assert not set(said["adversaries"]) & set(said["not_run"]["adversaries"])


def test_what_the_server_alone_ran_is_recorded_as_run() -> None:
    planned = [(viewer, name) for viewer in ("server", "client", "released") for name in ("membership", "likeness", "influence")]
    said = extent([("server", "membership"), ("server", "likeness")], planned)
    assert set(said["attacks"]) == {"membership", "likeness"}
    assert said["not_run"]["attacks"] == ["influence"]
    assert set(said["not_run"]["by_adversary"]["client"]) == {"membership", "likeness", "influence"}


def test_an_audit_that_was_stopped_before_its_first_figure_ran_nothing() -> None:
    planned = [("server", name) for name in ATTACKS.names()]
    said = extent([], planned)
    assert (said["attacks"], said["not_run"]["attacks"]) == ([], list(ATTACKS.names()))
