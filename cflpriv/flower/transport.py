"""Bytes over Flower's Grid: push, poll, and stop at the deadline with the replies so far."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ..errors import InputError

if TYPE_CHECKING:
    from ..federation.server import FederationServer

__all__ = ["ANSWER", "ASK", "RECORD", "GridTransport"]

RECORD, ASK, ANSWER = "cflpriv", "ask", "answer"


class GridTransport:
    """A `federation.transport.ByteTransport` over a Grid.

    A stage lasts at most `deadline_seconds` ("compute" as long as `compute_seconds`, the greeting `hello_seconds`); messages that no one
    fetched by then are dropped by the SuperLink, because their time to live ends with the stage. `message_type` is Flower's. `journal` is
    notified when a stage begins and ends; `stages` keeps (stage, clients asked, clients answered, seconds), for the record.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        deadline_seconds: float = 60.0,
        compute_seconds: float = 600.0,
        hello_seconds: float = 30.0,
        poll_seconds: float = 0.05,
        message_type: str = "query.cflpriv",
        clock: Callable[[], float] = time.monotonic,
        journal: Callable[[dict[str, Any]], None] = lambda entry: None,
    ) -> None:
        self._grid, self._journal = grid, journal
        self._deadlines = {"compute": compute_seconds, "enrol": hello_seconds}
        self._deadline, self._poll, self._type, self._clock = deadline_seconds, poll_seconds, message_type, clock
        self.stages: list[tuple[str, int, int, float]] = []

    def places(self) -> Sequence[int]:
        return sorted(int(node) for node in self._grid.get_node_ids())

    def welcome(self, federation: "FederationServer", count: int, seconds: float) -> set[int]:
        """Enrol nodes until `count` clients are present (and the key holder, where one is needed), or for `seconds`; the clients enrolled.

        Slow nodes are asked again, with twice the time.
        """
        until = self._clock() + seconds
        while len(self.places()) < count and self._clock() < until:  # a run may start before its nodes are known
            time.sleep(min(0.5, self._poll * 4))
        came = set(federation.enrol())
        while (len(federation.clients) < count or federation.holder_missing) and self._clock() < until:
            time.sleep(min(0.5, self._poll * 4))
            self._deadlines["enrol"] *= 2
            came |= set(federation.enrol())
        return came

    def welcome_all(self, federation: "FederationServer", count: int, seconds: float) -> None:
        """The same, or `InputError` where fewer come in time, or no key holder."""
        self.welcome(federation, count, seconds)
        codes = sorted({code for _, _, code in federation.refusals}) or "none"
        why = f"; {federation.disagreement}" if federation.disagreement else ""
        if len(federation.clients) < count:
            raise InputError(f"{len(federation.clients)} of {count} clients answered within {seconds:g} s; refusals: {codes}{why}")
        if federation.holder_missing:
            who = "the key holder" if federation.protection.holders < 2 else "the holders of shares"
            raise InputError(f"{who} did not answer within {seconds:g} s; refusals: {codes}")

    def exchange(self, requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        if not requests:
            return {}
        seconds = self._deadlines.get(stage, self._deadline)
        began = self._clock()
        self._journal({"stage": stage, "asked": len(requests)})
        messages = [
            Message(RecordDict({RECORD: ConfigRecord({ASK: data})}), dst_node_id=node, message_type=self._type, ttl=seconds, group_id=stage)
            for node, data in requests.items()
        ]
        pushed = list(self._grid.push_messages(messages))
        waiting = {identity: node for identity, node in zip(pushed, requests, strict=True) if identity}
        answers: dict[int, bytes] = {}
        while waiting:
            for reply in self._grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is None or reply.has_error():
                    continue
                record = reply.content.get(RECORD)
                data = record.get(ANSWER) if isinstance(record, ConfigRecord) else None
                if isinstance(data, bytes):
                    answers[node] = data
            if self._clock() - began >= seconds:
                break
            if waiting:  # polling takes time from clients on the same machine, so it slows down with time
                time.sleep(self._poll * min(8.0, 1 + (self._clock() - began) / 2))
        self.stages.append((stage, len(requests), len(answers), self._clock() - began))
        self._journal({"stage": stage, "asked": len(requests), "answered": len(answers), "seconds": round(self._clock() - began, 3)})
        return answers
