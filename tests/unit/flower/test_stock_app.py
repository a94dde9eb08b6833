"""The diff of docs/flower.md makes an app of Flower's quickstart clustered and secure."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

import torch
from checkout import ROOT
from fake_grid import FakeGrid
from flwr.app import Context, RecordDict

from cflpriv.flower import write_identities
from cflpriv.protocols.entropy import public_entropy

HERE = Path(__file__).parent
DOC = ROOT / "docs" / "flower.md"
CLIENTS, ROUNDS = 8, 3
SETTINGS = '[protection]\ngram = ["haar"]\nsum = "secagg"\nmin_cohort = 3\n'


def diff() -> str:
    found: str = re.findall(r"^```diff\n(.*?)^```$", DOC.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    return found


def applied(folder: Path, text: str) -> Path:
    """The stock app with the diff applied, each hunk of which fits exactly one place."""
    files = {path.name: path.read_text(encoding="utf-8") for path in (HERE / "stock").glob("*.py")}
    for part in re.split(r"^--- ", text, flags=re.MULTILINE)[1:]:
        name, *hunks = re.split(r"^@@.*@@\n", part, flags=re.MULTILINE)
        for hunk in hunks:
            lines = hunk.splitlines()
            old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
            new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
            assert files[name.strip()].count(old) == 1, old
            files[name.strip()] = files[name.strip()].replace(old, new)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def run_app(app: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, FakeGrid]:
    """What the app saves, and the grid that it ran on."""
    monkeypatch.syspath_prepend(str(app.parent))
    server, client = (importlib.import_module(f"{app.name}.{side}").app for side in ("server_app", "client_app"))
    write_identities(folder / "keys", CLIENTS, public_entropy("stock"))
    configs: dict[int, dict[str, Any]] = {}
    for number in range(CLIENTS):
        path = folder / f"client{number}.toml"
        path.write_text(
            f'identity = "keys/client{number}.key"\nroster = "keys/roster.txt"\nstate = "state{number}"\n{SETTINGS}', encoding="utf-8"
        )
        configs[number + 1] = {"partition-id": number, "num-partitions": CLIENTS, "settings": str(path)}
    grid = FakeGrid(dict.fromkeys(configs, client), configs)
    given: dict[str, Any] = {"num-server-rounds": ROUNDS, "model": str(folder / "model.pt"), "roster": str(folder / "keys" / "roster.txt")}
    server(grid, Context(1, 0, {}, RecordDict(), given))
    for name in [name for name in sys.modules if name.partition(".")[0] == app.name]:
        del sys.modules[name]
    return torch.load(folder / "model.pt", weights_only=True), grid


def test_the_diff_is_short() -> None:
    changed = [line for line in diff().splitlines() if line[:1] in "+-" and not line.startswith("--- ")]
    assert 0 < len(changed) <= 16


@pytest.mark.slow
def test_the_stock_app_becomes_clustered_and_secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cluster's model is what plain averages of its members' trainings would be, and no update is seen."""
    seen = []

    class Watched(FakeGrid):
        def push_messages(self, messages: Any) -> list[str]:
            messages = list(messages)
            seen.append(messages[0].metadata.group_id)
            return super().push_messages(messages)

    monkeypatch.setitem(globals(), "FakeGrid", Watched)
    models, grid = run_app(applied(tmp_path / "private_app", diff()), tmp_path, monkeypatch)
    assert {"gram", "secagg Deliver", "secagg Unmask"} <= set(seen)
    assert "sum" not in seen
    assert not grid.errors
    assert len(models) == 2
    # the expected models: the app's own train function, averaged in each group
    monkeypatch.syspath_prepend(str(HERE))
    stock: Any = importlib.import_module("stock.client_app")
    net: Any = importlib.import_module("stock.server_app").Net
    found = []
    for group in (0, 1):
        torch.manual_seed(0)
        state = net().state_dict()
        for _ in range(ROUNDS):
            trained = []
            for number in range(group, CLIENTS, 2):
                model = net()
                model.load_state_dict(state)
                inputs, labels = stock.load_data(Context(1, 1, {"partition-id": number}, RecordDict(), {}))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(5):
                    optimizer.zero_grad()
                    loss: Any = torch.nn.functional.cross_entropy(model(inputs), labels)
                    loss.backward()
                    optimizer.step()
                trained.append(model.state_dict())
            state = {name: torch.stack([one[name] for one in trained]).mean(0) for name in state}
        found.append(state)
    for expected, model in zip(found, models, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(model[name].numpy(), value.numpy(), atol=1e-4)


def test_a_hunk_that_does_not_fit_would_be_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        applied(tmp_path / "private_app", diff().replace("ClientApp()", "ClientApp(1)"))
