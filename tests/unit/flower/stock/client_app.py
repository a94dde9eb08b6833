"""A small app in the shape of Flower's quickstart: the docs show what changes in it, and a test applies that."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .server_app import Net


def load_data(context):
    """Points around a centre for each class; odd partitions have their coordinates turned around."""
    partition = int(context.node_config["partition-id"])
    draws = np.random.default_rng(partition)
    labels = draws.integers(3, size=60)
    points = 3 * np.eye(3, 8)[labels] + draws.normal(size=(60, 8)) * 0.5
    return torch.tensor(points[:, ::-1].copy() if partition % 2 else points, dtype=torch.float32), torch.tensor(labels)


app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    inputs, labels = load_data(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=msg.content["config"]["lr"])
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": float(loss.detach()), "num-examples": len(labels)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)
