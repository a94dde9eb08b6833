"""The server's side of the same app."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 3)

    def forward(self, inputs):
        return self.linear(inputs)


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
    result = strategy.start(grid, arrays, train_config=ConfigRecord({"lr": 0.1}), num_rounds=context.run_config["num-server-rounds"])
    torch.save(result.arrays.to_torch_state_dict(), context.run_config["model"])
