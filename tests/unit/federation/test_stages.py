"""Greetings over a transport with deadlines: how long they may take, and when nobody needs to be waited for."""

from collections.abc import Mapping, Sequence

import pytest
from loopback import Loopback
from scenes import population

from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation.server import FederationServer
from cflpriv.federation.stages import StagedTransport
from cflpriv.federation.transport import OverBytes


class Refusing(StagedTransport):
    """One place that answers every request by `code` after so many seconds of a clock that only it moves; without a code, never."""

    def __init__(self, code: str, seconds: float) -> None:
        self.now, self.code, self.seconds = 0.0, code, seconds
        super().__init__(clock=lambda: self.now, poll_seconds=0.0, hello_seconds=30.0)
        self.given: list[float] = []

    def places(self) -> Sequence[int]:
        return [0]

    def carry(self, requests: Mapping[int, bytes], stage: str, seconds: float) -> Mapping[int, bytes]:
        self.given.append(seconds)
        self.now += self.seconds if self.code else seconds
        return {place: m.encode(m.Refused(self.code)) for place in requests} if self.code else {}


def test_a_place_that_answers_gets_no_longer_time_to_be_greeted_and_a_slow_one_at_most_the_whole_wait() -> None:
    """Doubled at each of the 60 greetings, a client that is killed later would hold up the run for ever."""
    quick = Refusing("bad-settings", 2.0)
    quick.welcome(FederationServer(OverBytes(quick)), 1, 120.0)
    assert quick.given == [30.0] * 60
    slow = Refusing("", 0.0)
    for _ in range(3):
        slow.welcome(FederationServer(OverBytes(slow)), 1, 120.0)
    assert slow.given == [30.0, 60.0, 120.0, 120.0, 120.0]


class Unset(StagedTransport):
    """The parties of a loopback, of which some have no settings."""

    def __init__(self, parties: Loopback, unset: int) -> None:
        super().__init__(poll_seconds=0.0)
        self.parties, self.unset = parties, 1000 + unset

    def places(self) -> Sequence[int]:
        return self.parties.places()

    def carry(self, requests: Mapping[int, bytes], stage: str, seconds: float) -> Mapping[int, bytes]:
        given = {place: data for place, data in requests.items() if place != self.unset}
        refused = {place: m.encode(m.Refused("no-settings")) for place in requests if place == self.unset}
        return {**self.parties.exchange(given, stage), **refused}


@pytest.mark.parametrize("unset", [1, -2, -4], ids=["a client", "the first holder", "another holder"])
def test_beside_holders_a_party_without_settings_ends_the_wait_at_once(unset: int) -> None:
    protection = Protection(gram=("shares",))
    parties = Loopback(population(clients_per_group=1), protection)
    staged = Unset(parties, unset)
    fed = FederationServer(OverBytes(staged), protection=protection, roster=parties.roster)
    with pytest.raises(InputError, match="1 of 5 places have no settings file: name one for each client"):
        staged.welcome_all(fed, 2, 3600.0)
    assert [stage for stage, *_ in staged.stages] == ["enrol"]
