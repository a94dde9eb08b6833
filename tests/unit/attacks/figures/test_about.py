"""What an audit says that it ran: what was finished, whatever it was asked for."""

from hypothesis import given
from hypothesis import strategies as st

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.figures.about import extent

PAIRS = st.sets(st.tuples(st.sampled_from(["server", "client", "released"]), st.sampled_from(["membership", "likeness", "influence"])))


@given(PAIRS, PAIRS)
def test_an_attack_was_run_once_every_adversary_of_a_whole_audit_made_it(done: set[tuple[str, str]], planned: set[tuple[str, str]]) -> None:
    said = extent(sorted(done), sorted(planned))
    run, left = set(said["attacks"]), set(said["not_run"]["attacks"])
    assert not run & left
    assert run | left == {name for _, name in done | planned}
    assert (not left) == (planned <= done)
    assert set(said["adversaries"]) == {viewer for viewer, _ in done}
    assert not set(said["adversaries"]) & set(said["not_run"]["adversaries"])


def test_an_audit_that_was_stopped_before_its_first_figure_ran_nothing() -> None:
    planned = [("server", name) for name in ATTACKS.names()]
    said = extent([], planned)
    assert (said["attacks"], said["not_run"]["attacks"]) == ([], list(ATTACKS.names()))
