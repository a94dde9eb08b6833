"""A sum by Flower's SecAgg+ (`SecAggPlusWorkflow`, `secaggplus_mod`), all parties in this process, over the bytes of its messages.

Beside ours: the graph has the degree (made even) and the threshold of our passive one (`protocols.secagg.graph`), values 22 bits, sums 32.
SecAgg+ trusts the server to follow the protocol. What Flower's transport costs is not in it.
"""

import logging
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cflpriv.protocols.secagg.graph import COMPLETE_UP_TO, complete_threshold, sparse_parameters

__all__ = ["secagg_plus"]


class _Nodes:
    """A `Grid` whose nodes are in this process; each keeps its Flower context."""

    def __init__(self, n: int, values: Any) -> None:
        from flwr.common import Context, RecordDict

        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in range(1, n + 1)}
        self.values, self.uploaded = values, 0

    def send_and_receive(self, messages: Sequence[Any], *, timeout: float | None = None) -> list[Any]:
        from flwr.client.mod import secaggplus_mod
        from flwr.common import Message

        answers = []
        for message in messages:
            node = message.metadata.dst_node_id
            asked = Message(self._carried(message.content), dst_node_id=node, message_type=message.metadata.message_type)
            answer = secaggplus_mod(asked, self.contexts[node], self._fit)
            content = self._carried(answer.content, up=True)
            answers.append(SimpleNamespace(content=content, metadata=SimpleNamespace(src_node_id=node), has_error=lambda: False))
        return answers

    def _carried(self, content: Any, up: bool = False) -> Any:
        """A message's content after a way over its bytes."""
        from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

        packed = recorddict_to_proto(content)
        data = packed.SerializeToString()
        self.uploaded += len(data) if up else 0
        return recorddict_from_proto(type(packed).FromString(data))

    def _fit(self, message: Any, context: Any) -> Any:
        from flwr.common import Code, FitRes, Message, Status, ndarrays_to_parameters
        from flwr.compat.common import recorddict_compat as compat

        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([self.values]), 1, {})
        return Message(compat.fitres_to_recorddict(result, False), reply_to=message)


def secagg_plus(n: int, values: Any) -> tuple[float, float]:
    """(processor seconds, bytes that a client sends) of a sum of n clients' `values` (d,)."""
    from flwr.common import ConfigRecord, Context, RecordDict, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.compat.common import recorddict_compat as compat
    from flwr.server import LegacyContext, SimpleClientManager
    from flwr.server.strategy import FedAvg
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # what Flower's processes are told at their start
    logging.getLogger("flwr").setLevel(logging.ERROR)
    degree, threshold = sparse_parameters(n) if n > COMPLETE_UP_TO else (n - 1, complete_threshold(n, "passive"))
    clients = SimpleClientManager()
    for node in range(1, n + 1):
        clients.register(SimpleNamespace(cid=str(node), node_id=node))  # type: ignore[arg-type]
    state = LegacyContext(Context(1, 0, {}, RecordDict(), {}), strategy=FedAvg(min_fit_clients=n), client_manager=clients)
    start = ndarrays_to_parameters([np.zeros_like(values)])
    state.state.array_records["parameters"] = compat.parameters_to_arrayrecord(start, False)
    state.state.config_records["config"] = ConfigRecord({"current_round": 1})
    nodes = _Nodes(n, values)
    workflow = SecAggPlusWorkflow((degree + 1) | 1, threshold, max_weight=1.0, clipping_range=1.0)
    begun = time.process_time()
    workflow(nodes, state)  # type: ignore[arg-type]
    spent = time.process_time() - begun
    (mean,) = parameters_to_ndarrays(compat.arrayrecord_to_parameters(state.state.array_records["parameters"], True))
    if float(np.abs(mean - values).max()) > 1e-5:
        raise AssertionError("a benchmark of a wrong sum")
    return spent, nodes.uploaded / n
