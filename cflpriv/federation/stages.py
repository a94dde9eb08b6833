"""A transport of bytes in stages with deadlines: what every deployment's transport shares.

A subclass knows its places, and carries one stage: `carry(requests, stage, seconds)` returns the answers that arrived within `seconds`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from .server import FederationServer

__all__ = ["Journal", "Notify", "StagedTransport"]

Notify = Callable[[str], None]
Journal = Callable[[dict[str, Any]], None]
"""Is given an entry when a stage begins, and another when it has ended."""


class StagedTransport:
    """A `federation.transport.ByteTransport` whose stages have deadlines.

    A stage lasts at most `deadline_seconds` ("compute" as long as `compute_seconds`, the greeting `hello_seconds`). `journal` is notified
    when a stage begins and ends; `stages` keeps (stage, clients asked, clients answered, seconds), for the record.
    """

    settings_hint = "name one for each client"
    """How a client of this system is given its settings file, for errors."""
    absent_hint = "no client is connected"
    """What to look at where no place is known at all, for errors."""

    def __init__(
        self,
        *,
        deadline_seconds: float = 60.0,
        compute_seconds: float = 600.0,
        hello_seconds: float = 30.0,
        poll_seconds: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal = lambda entry: None,
    ) -> None:
        self._journal, self._clock, self._poll = journal, clock, poll_seconds
        self._deadlines = {"compute": compute_seconds, "enrol": hello_seconds}
        self._deadline = deadline_seconds
        self.stages: list[tuple[str, int, int, float]] = []
        self.failures = 0
        """Answers that were errors of the system that carries messages, so far."""

    def places(self) -> Sequence[int]:
        """The places that may have clients now."""
        raise NotImplementedError

    def carry(self, requests: Mapping[int, bytes], stage: str, seconds: float) -> Mapping[int, bytes]:
        """Send each place its request, and return the answers that arrive within `seconds`."""
        raise NotImplementedError

    def welcome(self, federation: "FederationServer", count: int, seconds: float, notify: Notify = lambda line: None) -> set[int]:
        """Enrol places until `count` clients are present (and the key holder, where one is needed), or for `seconds`; the clients enrolled.

        Places that did not answer in time are asked again with twice the time, up to `seconds`. Raises `InputError` at once where so many
        places name no settings that fewer than `count` clients, and the holders that are needed, can come.
        """
        until = self._clock() + seconds
        while len(self.places()) < count and self._clock() < until:  # a run may start before its nodes are known
            time.sleep(min(0.5, self._poll * 4))
        came = self._enrolled(federation, count, notify)
        while (len(federation.clients) < count or federation.holder_missing) and self._clock() < until:
            time.sleep(min(0.5, self._poll * 4))
            greetings, allowed = [took for stage, _, _, took in self.stages if stage == "enrol"], self._deadlines["enrol"]
            if greetings and greetings[-1] >= allowed:
                self._deadlines["enrol"] = max(allowed, min(2 * allowed, seconds))
            came |= self._enrolled(federation, count, notify)
        return came

    def _enrolled(self, federation: "FederationServer", count: int, notify: Notify) -> set[int]:
        """The clients that come at one greeting."""
        before = len(federation.refusals)
        came = set(federation.enrol())
        unset = sum(code == "no-settings" for _, _, code in federation.refusals[before:])
        asked = len(self.places())
        if unset and asked - unset < count + federation.protection.fewest_holders:
            raise InputError(f"{unset} of {asked} places have no settings file: {self.settings_hint}")
        if came:
            notify(f"{len(federation.clients)} of {count} clients are here")
        return came

    def welcome_all(
        self, federation: "FederationServer", count: int, seconds: float, notify: Notify = lambda line: None, fewest: int | None = None
    ) -> None:
        """The same, or `InputError` where fewer than `fewest` (all `count`) are there in time, or no key holder."""
        self.welcome(federation, count, seconds, notify)
        codes = sorted({code for _, _, code in federation.refusals}) or "none"
        why = f"; {federation.disagreement}" if federation.disagreement else ""
        why += f"; {self.failures} answers were errors: see the clients' logs" if self.failures else ""
        if len(federation.clients) < (count if fewest is None else fewest):
            if not self.places():
                why += f"; {self.absent_hint}"
            raise InputError(f"{len(federation.clients)} of {count} clients answered within {seconds:g} s; refusals: {codes}{why}")
        if federation.holder_missing:
            several = "helpers of sums" if federation.protection.sums.helped else "the holders of shares"
            who = "the key holder" if federation.protection.holders < 2 else several
            raise InputError(f"{who} did not answer within {seconds:g} s; refusals: {codes}")

    def exchange(self, requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        if not requests:
            return {}
        began = self._clock()
        self._journal({"stage": stage, "asked": len(requests)})
        answers = self.carry(requests, stage, self._deadlines.get(stage, self._deadline))
        took = self._clock() - began
        self.stages.append((stage, len(requests), len(answers), took))
        self._journal({"stage": stage, "asked": len(requests), "answered": len(answers), "seconds": round(took, 3)})
        return answers
