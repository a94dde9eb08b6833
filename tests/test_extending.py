"""From outside the package: one file with an algorithm, a network, a protection, an attack and a data set, through every command."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import in_process
from loopback import remote
from registries import new_process
from scenes import federation, population, training

from cflpriv.algorithms.interface import ALGORITHMS, AlgorithmSpec, register_algorithm
from cflpriv.attacks import ATTACKS
from cflpriv.contract.protection import Protection
from cflpriv.data.named import LOADERS
from cflpriv.data.population import DATASETS, register_dataset
from cflpriv.engine.models import MODELS, Model, register_model
from cflpriv.errors import InputError, TrainingDiverged
from cflpriv.experiments import load_config, run_experiment
from cflpriv.experiments.config.config import parse_config
from cflpriv.experiments.config.schedule_file import write_schedule
from cflpriv.experiments.run.inferred_schedule import inferred_schedule
from cflpriv.experiments.run.run import start
from cflpriv.federation.task_encoding import fits, task_from_bytes, task_to_bytes, then_from_bytes, then_to_bytes
from cflpriv.plugins import load_plugin, register_attack

PLUGIN = '''
"""FedAvg whose clients send a part of their updates, and what goes with it."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from torch import nn

import cflpriv
from cflpriv.aggregation.clear import ClearServerSum
from cflpriv.algorithms.interface import Algorithm, AlgorithmSpec, Served
from cflpriv.attacks import Attack
from cflpriv.attacks.figures.leakage import cell
from cflpriv.data import dataset_of
from cflpriv.tasks.evaluation import Evaluate
from cflpriv.contract.operations import Results
from cflpriv.contract.handles import Shared
from cflpriv.federation.messages import Given, NamedArray
from cflpriv.privacy.settings import updates_only
from cflpriv.contract.transcript import RoundRecord
from cflpriv.tasks.training import Train
from cflpriv.types import Parts


@dataclass(frozen=True)
class TrainPartly:
    """Local training; the update is sent times `share`."""

    train: Train
    share: float
    parts: ClassVar[Parts] = {"part": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ("trained",)

    def run(self, given):
        found = self.train.run(given)
        return {"part": np.asarray(found["update"]) * self.share, "trained": found["trained"]}


@dataclass(frozen=True)
class Sizes:
    """How long clients' values are, in whole numbers."""

    results: ClassVar[Results] = {"sizes": "all"}

    def __call__(self, view):
        return {"sizes": np.diag(view.gram.matrix()).astype(int)}, {}


@dataclass(frozen=True, eq=False)
class State:
    model: Shared
    summed: int = 0


def partly(train, *, share: float = 0.5, weights: str = "equal", seed: int = 0) -> Algorithm:
    """FedAvg by a share of each update."""

    def init(federation):
        return State(Shared(train.model.init(seed)))

    def round(federation, state):
        cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
        held = federation.compute(TrainPartly(train.at(federation.round), share), {"model": state.model}, on=cohort)
        (mean,) = federation.mean(held, weights=weights)
        model = federation.fold(state.model + mean.parts["part"], on=cohort[0])
        return State(model, state.summed + mean.count), RoundRecord(federation.round, cohort)

    def serve(state):
        return Served(Evaluate(train.model), {"model": state.model})

    return Algorithm("partly", ("mean",), init, round, serve)


cflpriv.register_algorithm(
    AlgorithmSpec("partly", partly, "a share of FedAvg", states=(State,), tasks=(TrainPartly,), functions=(Sizes,),)
)


class Narrow(nn.Module):
    """Four tanh units."""

    def __init__(self, model):
        super().__init__()
        self.first, self.last = nn.Linear(int(np.prod(model.shape)), 4), nn.Linear(4, model.classes)

    def forward(self, x):
        return self.last(self.first(x.flatten(1)).tanh())


cflpriv.register_model("narrow", Narrow, "four tanh units")


def blobs(directory):
    rng = np.random.default_rng(0)
    y = rng.integers(4, size=400)
    x = np.clip(rng.random((4, 6))[y] + rng.normal(size=(400, 6)) / 20, 0, 1).astype(np.float32)
    return dataset_of("blobs", (x[:300], y[:300]), (x[300:], y[300:]))


cflpriv.register_dataset("blobs", blobs, "four clouds in six dimensions")


class RoundedSum:
    """The client half: updates leave in thousandths."""

    def __init__(self, parts):
        self.parts = parts

    def give(self, ask, values):
        yield from ()
        return Given(tuple(NamedArray(part, np.round(np.asarray(value), 3)) for part, value in values.items()), self.parts.samples())


cflpriv.register_protection(cflpriv.ProtectionSpec("sum", "rounded", "updates in thousandths", ClearServerSum, RoundedSum, hides=False))


def seen(case):
    """Whether a client's update is in the view."""
    sent = {client for message in case.view.messages if message.operation == "mean" for client in message.clients}
    clients = sorted(case.truth.groups)
    mine = np.array([float(client in sent) for client in clients])
    return [cell(case, "seen", "share_seen", mine, np.zeros(len(clients)), mine, margin=0.1)], None


cflpriv.register_attack("seen", Attack("whose update can be seen", seen))
'''
CONFIG = """
[data]
source = "blobs"
clients = 8
[model]
name = "narrow"
[training]
rounds = 3
lr = 0.1
[algorithm]
name = "partly"
share = 0.75
[protection]
sum = "rounded"
[run]
record = "full"
insecure_test_entropy = true
"""


class Stop(BaseException):
    """Ends a run where nothing catches it."""


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with new_process():
        yield


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The file, and a config that needs it."""
    path = tmp_path / "own.py"
    path.write_text(PLUGIN, encoding="utf-8")
    (tmp_path / "config.toml").write_text(CONFIG, encoding="utf-8")
    return path


@pytest.mark.slow
def test_one_file_runs_resumes_and_is_audited(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "config.toml", tmp_path / "run"

    def stop(row: dict[str, Any]) -> None:
        raise Stop

    with new_process(), pytest.raises(Stop):
        run_experiment(load_config(config, plugins=[own]), out, tick=stop)
    with new_process():
        assert in_process(monkeypatch, "run", str(config), "--out", str(tmp_path / "other")) == 2
        assert "protection.sum: 'rounded' is not known" in capsys.readouterr().err
        with pytest.raises(InputError, match=r"\[algorithm\] name = 'partly': is not known"):
            load_config(config, ['protection.sum="none"'])
    with new_process():
        assert in_process(monkeypatch, "run", str(config), "--out", str(out), "--resume") == 2
        assert "own.py']: is code that did not run; allow it with --trust" in capsys.readouterr().err
        assert in_process(monkeypatch, "run", str(config), "--out", str(out), "--resume", "--trust") == 0
        assert "resumed after round 1 of 3" in capsys.readouterr().out
    assert in_process(monkeypatch, "run", str(config), "--out", str(tmp_path / "whole"), "--plugin", str(own)) == 0
    for name in ("final.safetensors", "final.clients.safetensors"):
        assert (out / "checkpoints" / name).read_bytes() == (tmp_path / "whole" / "checkpoints" / name).read_bytes()
    tree = json.loads((out / "checkpoints" / "final.json").read_text(encoding="utf-8"))["state"]
    assert (tree["type"], tree["fields"]["summed"]) == ("cflpriv_plugin_own.State", 24)
    assert load_config(out / "config.toml", trust=True).run.plugins == (str(own),)
    with new_process():
        assert in_process(monkeypatch, "audit", str(out), "--attacks", "seen", "--budget", "quick") == 2
        assert "own.py']: is code that did not run" in capsys.readouterr().out
        assert in_process(monkeypatch, "audit", str(out), "--attacks", "seen", "--budget", "quick", "--trust") == 0
        cells = json.loads((out / "audit.json").read_text(encoding="utf-8"))["cells"]
        (cell,) = (cell for cell in cells if (cell["attack"], cell["adversary"]) == ("seen", "server"))
        assert (cell["attack"], cell["value"], cell["status"]) == ("seen", 1.0, "leaks")
    with new_process():
        assert in_process(monkeypatch, "report", str(out)) == 0
        assert "seen" in (out / "report.html").read_text(encoding="utf-8")


def test_its_schedule_is_inferred_and_becomes_its_contract(own: Path, tmp_path: Path) -> None:
    """Without a schedule there is no contract. With the inferred one clients refuse what the algorithm does not ask."""
    changes = ["training.lr_decay=0.5"]
    config = load_config(tmp_path / "config.toml", changes, [own])
    with pytest.raises(InputError, match="rounds = 4: the configuration has 3"):
        inferred_schedule(config, 4)
    schedule = inferred_schedule(config, 2)
    (asked,) = schedule.round
    assert (asked.task.share, asked.task.train.lr_decay, asked.leaves, asked.times, asked.varies) == (
        0.75,
        0.5,
        (("part", ("sum",)),),
        1,
        (),
    )
    assert [type(score.task).__name__ for score in schedule.serving] == ["Evaluate"]
    write_schedule(tmp_path / "schedule.json", schedule, "partly")
    text = (tmp_path / "config.toml").read_text(encoding="utf-8").replace("[run]", '[run]\nschedule = "schedule.json"')
    (tmp_path / "agreed.toml").write_text(text, encoding="utf-8")
    agreed = load_config(tmp_path / "agreed.toml", changes, [own])
    assert run_experiment(agreed, tmp_path / "agreed")["rounds"] == run_experiment(config, tmp_path / "free")["rounds"] == 3
    for chosen, refusals in ((config, 0), (agreed, 8)):
        run = start(chosen)
        run.federation.begin_round(0)
        task = replace(asked.task, share=1.0)
        with suppress(TrainingDiverged):  # nobody has a result
            run.federation.compute(task, {"model": run.state.model})
        assert [code for _, _, code in run.federation.refusals] == ["not-agreed"] * refusals


@pytest.mark.slow
def test_it_is_listed_and_swept(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The runs of a sweep are made by processes of their own."""
    assert in_process(monkeypatch, "list", "--plugin", str(own)) == 0
    listed = capsys.readouterr().out
    lines = ("a share of FedAvg", "four tanh units", "whose update can be seen", "four clouds in six", "updates in thousandths")
    assert all(line in listed for line in lines)
    grid = tmp_path / "sweep.toml"
    shorter = CONFIG.replace("rounds = 3", "rounds = 1").replace("[run]", '[run]\nplugins = ["own.py"]')
    grid.write_text(shorter + '\n[sweep]\nalgorithms = ["partly"]\nseeds = [0]\nattacks = ["seen"]\nbudget = "quick"\n', encoding="utf-8")
    assert in_process(monkeypatch, "sweep", str(grid), "--out", str(tmp_path / "runs")) == 0
    cells = json.loads((tmp_path / "runs" / "partly-as_given-s0" / "audit.json").read_text(encoding="utf-8"))["cells"]
    assert [cell["attack"] for cell in cells if cell["adversary"] == "server"] == ["seen"]
    assert {cell["attack"] for cell in cells} <= {"seen", "coverage"}


@pytest.mark.parametrize("given", [{}, {"sum": "haar"}, {"sum": "secagg", "min_cohort": 2}, {"sum": "rounded"}], ids=str)
def test_its_task_and_function_travel(own: Path, given: dict[str, Any]) -> None:
    load_plugin(own)
    protection, scene = Protection(**given), population(clients_per_group=3)
    made, module = ALGORITHMS["partly"].make(training(scene)), sys.modules["cflpriv_plugin_own"]
    models: list[Any] = []
    for fed in (federation(scene, protection, seed=1), remote(scene, protection)[1]):
        state = made.init(fed)
        for number in range(2):
            fed.begin_round(number)
            state, _ = made.round(fed, state)
        shared = state.model
        models.append(fed.peek(0, shared) if hasattr(fed, "peek") else shared.value() if not shared.transformed else None)
        assert not getattr(fed, "refusals", ())
    if models[1] is not None:
        np.testing.assert_allclose(models[1], models[0], atol=1e-5)
    task = module.TrainPartly(training(scene), 0.25)
    assert task_from_bytes(task_to_bytes(task)) == task
    then = then_from_bytes(then_to_bytes(module.Sizes()))
    assert then == module.Sizes()
    assert fits(then, {"sizes": np.zeros(6, int)}, 6, 6)
    assert not fits(then, {"sizes": np.zeros(5, int)}, 6, 6)


@pytest.mark.slow
def test_processes_that_compute_for_a_run_know_its_plugins(own: Path, tmp_path: Path) -> None:
    config = load_config(tmp_path / "config.toml", ["run.workers=2"], [own])
    summary = run_experiment(config, tmp_path / "run")
    alone = run_experiment(config.with_("run", workers=1), tmp_path / "alone")
    assert summary["accuracy_mean"] == alone["accuracy_mean"]


# --- what is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import nothing_like_it\n", "ModuleNotFoundError: No module named 'nothing_like_it'"),
        (PLUGIN.replace('"partly", partly', '"fedavg", partly'), "algorithm 'fedavg': is registered twice, by cflpriv.algorithms.fedavg."),
        (PLUGIN.replace("TrainPartly", "Evaluate"), "task 'Evaluate': is registered twice, by cflpriv.tasks.evaluation.Evaluate and"),
        (PLUGIN.replace('"narrow"', '"mlp"'), "model 'mlp': is registered twice, by cflpriv.engine.models._mlp and"),
        (PLUGIN.replace('dataset("blobs"', 'dataset("digits"'), "data set 'digits': is registered twice"),
        (PLUGIN.replace('dataset("blobs"', 'dataset("npz"'), "data set 'npz': is the name of one of the package's own"),
        (PLUGIN.replace('attack("seen"', 'attack("membership"'), "attack 'membership': is registered twice"),
        (PLUGIN.replace('"rounded"', '"secagg"'), "protection 'sum.secagg': is registered twice, by cflpriv.aggregation."),
        (PLUGIN.replace("parts: ClassVar[Parts] =", "pieces: ClassVar[Parts] ="), "TrainPartly declares no `parts`"),
        (PLUGIN.replace("results: ClassVar[Results] =", "made: ClassVar[Results] ="), "Sizes declares no `results`"),
        (PLUGIN.replace("states=(State,)", "states=(dict,)"), "declared as a state, task or function and is no dataclass"),
    ],
)  # fmt: skip
def test_a_plugin_that_does_not_load_is_one_line_that_names_it(
    own: Path, text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own.unlink() if text is None else own.write_text(text, encoding="utf-8")
    assert in_process(monkeypatch, "run", str(tmp_path / "config.toml"), "--plugin", str(own), "--out", str(tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert words in said, said
    assert f"plugin {own}: " in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_two_plugins_of_one_name_are_told_apart_by_nobody(own: Path, tmp_path: Path) -> None:
    load_plugin(own)
    assert load_plugin(own) == own, "twice is once"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "own.py").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match=rf"{own} has the same name"):
        load_plugin(tmp_path / "other" / "own.py")


def test_a_run_whose_plugin_is_gone_says_so(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with new_process():
        run_experiment(load_config(tmp_path / "config.toml", ["training.rounds=1"], [own]), tmp_path / "run")
    own.unlink()
    assert in_process(monkeypatch, "audit", str(tmp_path / "run"), "--trust") == 2
    assert capsys.readouterr().err == f"cflpriv: {tmp_path / 'run'}: {own}: no such file here; --plugin FILE runs it from another place\n"


def test_the_same_again_is_no_clash() -> None:
    for spec in list(ALGORITHMS.values()):
        register_algorithm(spec)
    register_model("linear", *MODELS["linear"])
    register_attack("mine", AlgorithmSpec)  # whatever it is
    register_attack("mine", AlgorithmSpec)
    register_dataset("digits", LOADERS["digits"], DATASETS["digits"])


# --- installed packages


PACKAGE = """
from dataclasses import dataclass, replace
from typing import ClassVar
from torch import nn
from cflpriv.algorithms import ALGORITHMS
from cflpriv.attacks import Attack
from cflpriv.data import load_dataset

@dataclass(frozen=True)
class Packaged:
    parts: ClassVar = {}
    keeps: ClassVar = ()
    def run(self, given):
        return {}

def tiny(model):
    return nn.Sequential(nn.Flatten(), nn.Linear(2, model.classes))

def dots(directory):
    return load_dataset("digits")

SPEC = replace(ALGORITHMS["fedavg"], name="packaged", tasks=(Packaged,))
LOOK = Attack("looks", lambda case: ([], None))
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with entry points, some of them broken."""
    site = tmp_path / "site"
    (site / "ownpkg-1.0.dist-info").mkdir(parents=True)
    (site / "ownpkg-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ownpkg\nVersion: 1.0\n", encoding="utf-8")
    (site / "ownpkg-1.0.dist-info" / "entry_points.txt").write_text(
        "[cflpriv.algorithms]\npackaged = ownpkg:SPEC\nbroken = ownpkg:MISSING\nfunny = ownpkg:tiny\n"
        "[cflpriv.models]\ntiny = ownpkg:tiny\n[cflpriv.datasets]\ndots = ownpkg:dots\n[cflpriv.attacks]\nlook = ownpkg:LOOK\n",
        encoding="utf-8",
    )
    (site / "ownpkg.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "ownpkg", raising=False)
    return site


def test_entry_points_are_loaded_when_they_are_asked_for(installed: Path) -> None:
    assert task_from_bytes(b'{"": "Packaged"}').keeps == (), "a client that was never told of the algorithm finds its tasks"
    assert parse_config({"algorithm": {"name": "packaged"}}).spec.summary == ALGORITHMS["fedavg"].summary
    assert Model("tiny", (2,), 3).dimension == 9
    assert parse_config({"data": {"source": "dots"}}).data.source == "dots"
    assert LOADERS.find("dots") is not None
    assert ATTACKS.find("look") is not None
    assert ATTACKS["look"].summary == "looks"
    with pytest.raises(InputError, match=r"known|did you mean 'packaged'"):
        parse_config({"algorithm": {"name": "packed"}})


@pytest.mark.parametrize(
    ("name", "words"), [("broken", r"ownpkg:MISSING\).*AttributeError"), ("funny", "expected the AlgorithmSpec of 'funny'")]
)
def test_a_broken_entry_point_is_one_line_that_names_it(
    installed: Path, name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=rf"entry point '{name}' of cflpriv\.algorithms .*{words}") as caught:
        parse_config({"algorithm": {"name": name}})
    assert "\n" not in str(caught.value)
    assert in_process(monkeypatch, "list") == 0, "the rest is listed"
    said = capsys.readouterr()
    assert f"entry point '{name}' of cflpriv.algorithms" in said.err
    assert said.err.count("\n") == 2
    assert "packaged" in said.out
    assert "looks" in said.out
