"""Runs of users' modules: frozen weights never travel, and a LoRA fine-tune runs clustered, under secure sums, with per-sample privacy."""

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import in_process
from scenes import population
from small_runs import configured, finished
from torch import Tensor, nn

from cflpriv.engine.models import MODELS, Model, build_module, register_model
from cflpriv.errors import CflprivWarning, InputError
from cflpriv.experiments.run.run import finish
from cflpriv.types import Array, ClientData, Population

WORDS, LENGTH, CLASSES = 24, 6, 3
SMALL: dict[str, Any] = {
    "training": {"rounds": 2, "lr": 0.5, "weights": "equal", "batch_size": 10},
    "algorithm": {"name": "pacfl", "p": 2, "k": 2},
    "run": {"insecure_test_entropy": True, "record": "full"},
}
PROTECTED: dict[str, Any] = {
    "training": {"rounds": 2, "lr": 0.5, "weights": "equal"},
    "algorithm": {"name": "ifca", "k": 2},
    "privacy": {"unit": "sample", "epsilon": 50.0, "delta": 1e-4, "samples": 20},
    "protection": {"sum": "secagg", "min_cohort": 3},
    "run": {"record": "full"},
}


class Body(nn.Module):
    """A frozen body and a head."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 32).requires_grad_(False), nn.Linear(32, model.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))  # type: ignore[no-any-return]


Register = Callable[[str, Callable[[Model], nn.Module]], None]


@pytest.fixture
def own_model() -> Iterator[Register]:
    """Registers models for one test."""
    names: list[str] = []

    def register(name: str, factory: Callable[[Model], nn.Module]) -> None:
        register_model(name, factory)
        names.append(name)

    yield register
    for name in names:
        del MODELS[name]


def word_windows(groups: int = 2, clients_per_group: int = 4, samples: int = 20) -> Population:
    """Windows of word numbers: the class is that of the words that occur, in another order in each group."""
    clients = []
    for client in range(groups * clients_per_group):
        rng = np.random.default_rng(client)
        y = rng.integers(CLASSES, size=2 * samples)
        topics = (y + client % groups) % CLASSES
        x = (1 + topics[:, None] * 7 + rng.integers(7, size=(2 * samples, LENGTH))).astype(np.float32)
        clients.append(ClientData(client, x[:samples], y[:samples], x[samples:], y[samples:]))
    labels = tuple(client % groups for client in range(len(clients)))
    return Population("synthetic/texts", tuple(clients), labels, CLASSES, (0.0,), (1.0,), ())


def arrays(run: Any) -> list[Array]:
    """All that travelled in a run."""
    return [np.asarray(array) for message in run.federation.transcript.messages for array in (message.payload or {}).values()]


def check_nothing_frozen_travelled(run: Any, model: Model) -> None:
    frozen = {name: np.asarray(buffer) for name, buffer in build_module(model).named_buffers() if buffer.is_floating_point()}
    assert frozen
    sent = [array.tobytes() for array in arrays(run)]
    trained = [array for array in arrays(run) if array.size >= model.dimension]
    assert trained, "the transcript has models and updates"
    for name, values in frozen.items():
        if values.size > 8 and values.std() > 0:
            assert not any(values.tobytes() in data for data in sent), name
    largest = max(message.bytes_each for message in run.federation.transcript.messages)
    assert largest < 3 * 8 * (model.dimension + 2) + 4096


@pytest.mark.parametrize(("base", "protected"), [(SMALL, False), (PROTECTED, True)])
def test_a_frozen_body_never_travels(base: dict[str, Any], protected: bool, own_model: Register) -> None:
    own_model("test_body", Body)
    scene = population(groups=2, clients_per_group=4, classes=3)
    run = finished(configured(base, model={"name": "test_body"}), scene)
    model = run.config.model_for(scene)
    assert model.dimension == 33 * 3
    assert len(model.constants) == 32
    check_nothing_frozen_travelled(run, model)


def test_a_doubt_about_a_module_is_a_warning_of_the_run_and_in_its_summary(own_model: Register) -> None:
    class Centred(Body):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    own_model("test_centred", Centred)
    config = configured(SMALL, model={"name": "test_centred"})
    with pytest.warns(CflprivWarning, match="model 'test_centred': the scores of a sample depend on the other samples"):
        run = finished(config, population(groups=2, clients_per_group=4, classes=3))
    (warning,) = finish(run)["warnings"]
    assert "depend on the other samples" in warning


def test_an_odd_module_of_a_plugin_is_one_line_and_a_pass_in_place_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "odd_plugin.py"
    plugin.write_text(
        "import math, torch\nfrom torch import nn\nimport cflpriv\n\n\nclass Plain(nn.Module):\n    def __init__(self, model):\n"
        "        super().__init__()\n        self.out = nn.Linear(math.prod(model.shape), model.classes)\n\n"
        "    def forward(self, x):\n        return self.out(x.sub(0.3).div(0.5).flatten(1))\n\n\n"
        "class InPlace(Plain):\n    def forward(self, x):\n        return self.out(x.sub_(0.3).div_(0.5).flatten(1))\n\n\n"
        "class Squeezed(Plain):\n    def forward(self, x):\n        return super().forward(x).squeeze()\n\n\n"
        "for name, kind in {'test_plain': Plain, 'test_in_place': InPlace, 'test_squeezed': Squeezed}.items():\n"
        "    cflpriv.register_model(name, kind, name)\n",
        encoding="utf-8",
    )
    config = (
        '[data]\nsource = "digits"\nclients = 6\nrotations = [0, 90]\n[model]\nname = "NAME"\n'
        '[training]\nrounds = 2\nlr = 0.1\nweights = "equal"\n[algorithm]\nname = "pacfl"\n'
    )
    accuracies = []
    try:
        for name in ("test_plain", "test_in_place", "test_squeezed"):
            path = tmp_path / f"{name}.toml"
            path.write_text(config.replace("NAME", name), encoding="utf-8")
            code = in_process(monkeypatch, "run", str(path), "--plugin", str(plugin), "--out", str(tmp_path / name))
            output = capsys.readouterr()
            if name == "test_squeezed":
                assert code == 2, output
                assert "model 'test_squeezed': gives (10,) for one sample, expected (1, 10)" in " ".join(output.err.split())
                assert "Traceback" not in output.err
                continue
            assert code == 0, output
            accuracies.append(json.loads((tmp_path / name / "summary.json").read_text(encoding="utf-8"))["accuracy_mean"])
    finally:
        for name in ("test_plain", "test_in_place", "test_squeezed"):
            MODELS.pop(name, None)
    assert accuracies[0] == accuracies[1] > 0.5


# --- transformers and peft


def package(name: str, extra: str) -> Any:
    """A package of an extra. The test is skipped with the reason: it is not installed, or it fails to be imported, and why."""
    whole = name.partition(".")[0]
    if importlib.util.find_spec(whole) is None:
        pytest.skip(f"{whole} is not installed: the extra `{extra}` brings it")
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{whole} is installed, and its import fails: {error}")


def bert(model: Model) -> Any:
    transformers = package("transformers", "text")
    settings = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=LENGTH, num_labels=model.classes,
    )  # fmt: skip
    return transformers.AutoModelForSequenceClassification.from_config(settings)


def lora(model: Model) -> Any:
    peft = package("peft", "text")
    settings = peft.LoraConfig(task_type=peft.TaskType.SEQ_CLS, r=2, lora_alpha=8, target_modules=["query", "value"])
    return peft.get_peft_model(bert(model), settings)


def test_a_transformers_classifier_runs_unmodified(own_model: Register) -> None:
    package("transformers", "text")
    own_model("test_bert", bert)
    scene = word_windows()
    run = finished(configured({**SMALL, "algorithm": {"name": "fedavg"}}, model={"name": "test_bert", "normalise": False}), scene)
    module = build_module(run.config.model_for(scene))
    assert run.config.model_for(scene).dimension == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("base", "protected"), [(SMALL, False), (PROTECTED, True)])
def test_a_lora_fine_tune_runs_clustered_and_its_frozen_weights_never_travel(
    base: dict[str, Any], protected: bool, own_model: Register
) -> None:
    package("peft", "text")
    own_model("test_lora", lora)
    scene = word_windows()
    run = finished(configured(base, model={"name": "test_lora", "normalise": False}), scene)
    model = run.config.model_for(scene)
    assert {name.rsplit(".", 3)[1] if "lora" in name else "classifier" for name, _, _ in model.layout} == {"lora_A", "lora_B", "classifier"}
    assert model.dimension < 300
    check_nothing_frozen_travelled(run, model)
    if protected:
        assert run.run_ledger is not None
        assert run.run_ledger.ledger.charges


def test_a_classifier_with_other_classes_is_one_line(own_model: Register) -> None:
    package("transformers", "text")
    model = Model("own", (LENGTH,), CLASSES + 1, factory=lambda: bert(Model("linear", (LENGTH,), CLASSES)))
    with pytest.raises(InputError, match=rf"gives \(2, {CLASSES}\) for two samples"):
        build_module(model)


def test_a_torchvision_body_may_be_frozen() -> None:
    """Its normalising layers use their stored statistics then."""
    models = package("torchvision.models", "vision")

    def factory() -> nn.Module:
        made = models.resnet18(weights=None).requires_grad_(False)
        made.fc = nn.Linear(made.fc.in_features, CLASSES)
        return made  # type: ignore[no-any-return]

    model = Model("own", (3, 32, 32), CLASSES, factory=factory)
    assert [name for name, _, _ in model.layout] == ["fc.weight", "fc.bias"]
