"""A Grid in this process: Flower's messages, contexts and client apps as they are, without SuperLink and SuperNodes."""

from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity


class FakeGrid:
    """Nodes with an app and a context each. `dead` nodes do not answer; an app that raises gives an error reply, as in Flower."""

    def __init__(self, apps: dict[int, ClientApp], node_configs: dict[int, dict[str, Any]] | None = None) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # what Flower's processes are told at their start
        self.apps = apps
        self.contexts = {node: Context(1, node, (node_configs or {}).get(node, {}), RecordDict(), {}) for node in apps}
        self.dead: set[int] = set()
        self.errors: list[str] = []
        self.answers: dict[str, Message] = {}
        self.types: list[str] = []

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.apps if node not in self.dead]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        pushed = []
        for message in messages:
            node, identity = message.metadata.dst_node_id, f"{len(self.types)}"
            message.metadata.__dict__["_message_id"] = identity
            self.types.append(message.metadata.message_type)
            pushed.append(identity)
            if node in self.dead:
                continue
            try:
                self.answers[identity] = self.apps[node](message, self.contexts[node])
            except Exception as error:
                self.errors.append(str(error))
                self.answers[identity] = Message(Error(0, str(error)), reply_to=message)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.answers.pop(identity) for identity in message_ids if identity in self.answers]
