"""Bytes over Flower's Grid: push, poll, and stop at the deadline with the replies so far."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ..federation.stages import StagedTransport

__all__ = ["ANSWER", "ASK", "RECORD", "GridTransport"]

RECORD, ASK, ANSWER = "cflpriv", "ask", "answer"


class GridTransport(StagedTransport):
    """A `StagedTransport` over a Grid. `message_type` is Flower's.

    Messages that no one fetched by a stage's deadline are dropped by the SuperLink, because their time to live ends with the stage.
    """

    settings_hint = (
        "start each SuperNode with --node-config 'settings=\"FILE.toml\"'; in Flower's simulation set the environment variable "
        "CFLPRIV_SETTINGS to the folder that has client0.toml, client1.toml, …"
    )
    absent_hint = "the SuperLink knows no SuperNode; restarted without --database, it has forgotten them: restart the SuperNodes, too"

    def __init__(self, grid: Grid, *, message_type: str = "query.cflpriv", **staged: Any) -> None:
        super().__init__(**staged)
        self._grid, self._type = grid, message_type

    def places(self) -> Sequence[int]:
        return sorted(int(node) for node in self._grid.get_node_ids())

    def carry(self, requests: Mapping[int, bytes], stage: str, seconds: float) -> Mapping[int, bytes]:
        began = self._clock()
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
                    self.failures += node is not None
                    continue
                record = reply.content.get(RECORD)
                data = record.get(ANSWER) if isinstance(record, ConfigRecord) else None
                if isinstance(data, bytes):
                    answers[node] = data
            if self._clock() - began >= seconds:
                break
            if waiting:  # polling takes time from clients on the same machine, so it slows down with time
                time.sleep(self._poll * min(8.0, 1 + (self._clock() - began) / 2))
        return answers
