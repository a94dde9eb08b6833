"""A private choice among runs: only the best is kept and shown, its price is that of the plans, and an interrupted choice goes on."""

import json
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scenes
import tomli_w

from cflpriv.cli import running
from cflpriv.errors import InputError, TrainingDiverged
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.run.private import planned_events
from cflpriv.experiments.run.run import prepare
from cflpriv.experiments.run.verify import verify
from cflpriv.experiments.run.workers import ended
from cflpriv.experiments.sweep import private_choice
from cflpriv.experiments.sweep.choose import Chosen, read_chosen, write_chosen
from cflpriv.experiments.sweep.private_choice import CANDIDATES, run_choice
from cflpriv.experiments.sweep.sweep import Sweep, SweepCell, load_sweep, parse_sweep
from cflpriv.experiments.sweep.sweep_runs import run_sweep
from cflpriv.protocols.accounting import covers, epsilon_of
from cflpriv.protocols.ledger import Ledger
from cflpriv.protocols.private_choice import epsilon_of_choice, runs_of

BASE: dict[str, Any] = {
    "data": {"clients": 6, "rotations": [0, 90], "test_samples_per_client": 20},
    "model": {"name": "linear"},
    "algorithm": {"name": "fedavg"},
    "training": {"rounds": 2, "lr": 0.1, "weights": "equal", "batch_size": 60},
    "privacy": {"unit": "client", "epsilon": 4.0, "delta": 1e-3, "clip_norm": 1.0},
    "run": {"record": "headers"},
}
CHOOSE = {"by": "accuracy_mean", "runs": 3}
KEYS = {"training.lr": [0.05, 0.1]}


def swept(base: dict[str, Any] = BASE, **sweep: Any) -> Sweep:
    return parse_sweep({**base, "sweep": {"choose": CHOOSE, "keys": KEYS, **sweep}}, "my.toml")


def one_by_one(todo: Sequence[SweepCell], work: Callable[[SweepCell], str], workers: int) -> Iterator[tuple[str, str]]:
    for cell in todo:
        yield cell.name, work(cell)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are made in this process, one after the other."""
    monkeypatch.setattr(private_choice, "ended", one_by_one)


def drawing(monkeypatch: pytest.MonkeyPatch, *places: int) -> None:
    """So many runs, of these cells."""
    left = list(places)
    monkeypatch.setattr(private_choice, "draw_runs", lambda law, entropy: len(places))
    monkeypatch.setattr(private_choice, "draw_index", lambda size, entropy: left.pop(0))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def price(sweep: Sweep) -> float:
    """The price of a choice among runs of BASE, by hand."""
    ledgers = []
    for cell in sweep.cells:
        assert cell.config is not None
        run = prepare(cell.config)
        ledgers.append(planned_events(cell.config, run.algorithm, cell.config.training.rounds))
    return epsilon_of_choice(ledgers, 1e-3, runs_of("geometric", 3.0))


# --- what is refused ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "sweep", "words"),
    [
        ({}, {"choose": {"by": "accuracy_mean", "run": 3}}, r"choose\.run = 3: is not a key here; did you mean 'runs'"),
        ({}, {"choose": {"by": "local_accuracy_mean", "runs": 3}}, r"choose\.by = 'local_accuracy_mean': is no score to choose by"),
        ({}, {"choose": {"by": "accuracy_mean"}}, r"choose\.runs = None: expected a finite number > 1"),
        ({}, {"choose": {"by": "accuracy_mean", "runs": 1}}, r"choose\.runs = 1: expected a finite number > 1"),
        ({}, {"choose": {"by": "accuracy_mean", "runs": True}}, r"choose\.runs = True"),
        ({}, {"choose": {**CHOOSE, "distribution": "geometrical"}}, r"choose\.distribution = 'geometrical': is not known; did you mean"),
        ({}, {"choose": {**CHOOSE, "distribution": "poisson", "runs": 501}}, r"choose\.runs = 501: not with distribution = 'poisson'"),
        ({}, {"choose": {"by": "perplexity_mean", "runs": 3}}, r"choose\.by = 'perplexity_mean': there is none for model\.name = 'linear'"),
        ({}, {"choose": 3}, r"choose = 3: expected dict"),
        ({}, {"seeds": [0, 1]}, r"seeds = \[0, 1\] with choose: give one"),
        ({}, {"audit": True}, r"audit = True with choose"),
        ({}, {"attacks": ["membership"]}, r"attacks = \['membership'\] with choose"),
        ({}, {"algorithms": ["fedavg", "ditto"]}, r"choose: ditto-.*algorithm 'ditto': what its clients use"),
        ({"protection": {"small_clusters": "local"}}, {}, r"protection\.small_clusters = 'local'"),
        ({"privacy": {}}, {}, r"choose: fedavg-.*privacy\.unit = 'none'"),
        ({}, {"keys": {"privacy.delta": [1e-3, 1e-4]}}, r"privacy\.delta = 0\.0001, but 0\.001 in fedavg-"),
        ({}, {"keys": {"data.clients": [6, 8]}}, r"data\.clients = 8, but 6 in fedavg-"),
        ({"run": {"insecure_test_entropy": True}}, {}, r"run\.insecure_test_entropy = true"),
        ({}, {"keys": {"training.lr": [0.1, "x"]}}, r"choose: every setting must be able to run: .*lr = 'x'"),
    ],
)
@pytest.mark.filterwarnings("ignore::cflpriv.errors.CflprivWarning")
def test_grids_without_a_private_choice_are_refused(base: dict[str, Any], sweep: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=rf"^my\.toml: \[sweep\] .*({words})") as caught:
        swept({**BASE, **base}, **sweep)
    assert "\n" not in str(caught.value)


def test_a_setting_that_cannot_run_on_the_data_is_named_before_anything_is_drawn(tmp_path: Path, here: None) -> None:
    sweep = swept({**BASE, "protection": {"sum": "secagg"}}, keys={"protection.min_cohort": [4, 7]})
    with pytest.raises(InputError, match=r"^fedavg-.*=7-s0: protection\.min_cohort = 7: there are only 6 clients"):
        run_choice(sweep, tmp_path / "out", entropy=lambda count: pytest.fail("something was drawn"))
    assert names_in(tmp_path / "out") == {"sweep.toml", ".lock"}


def test_a_grid_is_not_run_as_a_grid_nor_the_other_way_round(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose: all runs of the grid would show"):
        run_sweep(swept(), tmp_path)
    with pytest.raises(InputError, match=r"has no \[sweep\] choose"):
        run_choice(parse_sweep({**BASE, "sweep": {"seeds": [0]}}), tmp_path)


# --- making it ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("made_by", [one_by_one, pytest.param(ended, marks=pytest.mark.slow)])
def test_only_the_chosen_run_stays(
    made_by: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """The whole command, in this process and in others."""
    monkeypatch.setattr(private_choice, "ended", made_by)
    drawing(monkeypatch, 0, 1, 0)
    path, out = tmp_path / "grid.toml", tmp_path / "out"
    path.write_text(tomli_w.dumps({**BASE, "sweep": {"choose": CHOOSE, "keys": KEYS}}), encoding="utf-8")
    running.sweep(path, out=out)
    said = capsys.readouterr().out
    sweep, (chosen, _) = load_sweep(path), read_chosen(out / "choice.json") or pytest.fail("no choice")
    assert chosen.run is not None
    assert chosen.run in {cell.name for cell in sweep.cells}
    assert names_in(out) == {
        "sweep.toml", ".lock", "choice.json", chosen.run, "table.csv", "sweep.csv", "front.csv", "report.html", "results.csv",
    }  # fmt: skip
    summary = json.loads((out / chosen.run / "summary.json").read_text(encoding="utf-8"))
    assert (chosen.score, chosen.epsilon_of_run) == (summary["accuracy_mean"], summary["epsilon"])
    assert chosen.epsilon == pytest.approx(price(sweep))
    assert chosen.epsilon_of_run is not None
    assert chosen.epsilon_of_run < 4.0 < chosen.epsilon
    assert verify(out / chosen.run).problems == ()
    assert chosen.line in said
    assert f"the chosen run: {out / chosen.run}" in said
    assert len(said.splitlines()) == 4, "two lines before, the choice, the report: none for each run"
    everything = said + (out / "choice.json").read_text(encoding="utf-8") + (out / "sweep.csv").read_text(encoding="utf-8")
    assert CANDIDATES not in everything
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"{chosen.epsilon:.3f}" in page
    assert "A private choice" in page
    assert (out / "table.csv").read_text(encoding="utf-8").count("\n") == 2
    assert f",{chosen.epsilon}" in (out / "table.csv").read_text(encoding="utf-8")
    before = (out / "choice.json").read_text(encoding="utf-8")
    monkeypatch.setattr(private_choice, "draw_runs", lambda law, entropy: pytest.fail("drawn again"))
    running.sweep(path, out=out)  # what was chosen stays chosen, and costs nothing more
    assert (out / "choice.json").read_text(encoding="utf-8") == before


def test_an_interrupted_choice_goes_on_with_what_was_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None) -> None:
    drawing(monkeypatch, 1, 0, 1)
    sweep, out, made = swept(), tmp_path / "out", list[str]()

    def one_then_none(config: Any, folder: Path, *rest: Any, **more: Any) -> Any:
        made.append(folder.name)
        if len(made) == 2:
            folder.mkdir()
            (folder / "config.toml").write_text("cut short", encoding="utf-8")
            raise KeyboardInterrupt
        if len(made) == 3:
            raise OSError(28, "No space left on device")
        return run_experiment(config, folder, *rest, **more)

    monkeypatch.setattr(private_choice, "run_experiment", one_then_none)
    with pytest.raises(KeyboardInterrupt):
        run_choice(sweep, out)
    drawn = (out / CANDIDATES / "drawn.json").read_text(encoding="utf-8")
    assert stat.S_IMODE((out / CANDIDATES).stat().st_mode) == 0o700
    first = (out / CANDIDATES / "000000" / "summary.json").read_text(encoding="utf-8")
    with pytest.raises(OSError, match=r"the choice is not made yet \(OSError: .*No space.*the same command goes on"):
        run_choice(sweep, out)
    assert not (out / CANDIDATES / "000001").exists(), "what was cut short was removed and is made again"
    monkeypatch.setattr(private_choice, "draw_runs", lambda law, entropy: pytest.fail("drawn again"))
    with pytest.raises(InputError, match="holds another sweep"):
        run_choice(swept(choose={**CHOOSE, "runs": 4}), out)
    assert (out / CANDIDATES / "drawn.json").read_text(encoding="utf-8") == drawn
    assert (out / CANDIDATES / "000000" / "summary.json").read_text(encoding="utf-8") == first
    chosen = run_choice(sweep, out)
    assert made == ["000000", "000001", "000001", "000002", "000001"]
    assert names_in(out) == {"sweep.toml", ".lock", "choice.json", chosen.run}
    assert chosen == (read_chosen(out / "choice.json") or [None])[0]


def test_a_decision_is_published_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None) -> None:
    """Killed between the decision and its end, at either place."""
    drawing(monkeypatch, 0, 0)
    sweep, out = swept(keys={"training.lr": [0.1]}), tmp_path / "out"

    def full(path: Path, chosen: Chosen, **more: Any) -> None:
        if path.name == "choice.json":
            raise OSError("full")
        write_chosen(path, chosen, **more)

    with monkeypatch.context() as patch:
        patch.setattr(private_choice, "write_chosen", full)
        with pytest.raises(OSError, match="full"):
            run_choice(sweep, out)
    assert (out / "fedavg-as_given-lr=0.1-s0").is_dir()
    monkeypatch.setattr(private_choice, "run_experiment", lambda *given, **more: pytest.fail("run again"))
    chosen = run_choice(sweep, out)
    assert verify(out / str(chosen.run)).problems == ()
    (out / CANDIDATES).mkdir()  # not removed before it was killed
    assert run_choice(sweep, out) == chosen
    assert names_in(out) == {"sweep.toml", ".lock", "choice.json", chosen.run}


@pytest.mark.parametrize("named", [{"run": "../elsewhere"}, {"candidate": "../../mine"}])
def test_a_decision_moves_no_other_folder(named: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None) -> None:
    """The folder of a sweep may be a stranger's: what its files name is not moved about."""
    drawing(monkeypatch, 0)
    sweep, out = swept(keys={"training.lr": [0.1]}), tmp_path / "out"
    chosen = run_choice(sweep, out)
    (tmp_path / "mine").mkdir()
    (out / CANDIDATES).mkdir()
    (out / str(chosen.run)).rename(out / CANDIDATES / "000000")
    write_chosen(
        out / CANDIDATES / "decided.json", replace(chosen, run=named.get("run", chosen.run)), candidate=named.get("candidate", "000000")
    )
    (out / "choice.json").unlink()
    with pytest.raises(InputError, match=r"decided\.json: is damaged"):
        run_choice(sweep, out)
    assert names_in(tmp_path) == {"out", "mine"}


@pytest.mark.parametrize("error", [TrainingDiverged("client 3"), ValueError("of client 3")])
def test_failures_count_as_the_worst_and_say_nothing(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None
) -> None:  # fmt: skip
    drawing(monkeypatch, 0, 1, 0)
    sweep, lines, made = swept(), list[str](), list[str]()

    def second_works(config: Any, folder: Path, *rest: Any, **more: Any) -> Any:
        made.append(folder.name)
        if len(made) != 2:
            raise error
        return run_experiment(config, folder, *rest, **more)

    monkeypatch.setattr(private_choice, "run_experiment", second_works)
    assert run_choice(sweep, tmp_path / "one", report=lines.append).run == sweep.cells[1].name
    assert not any("client 3" in line for line in lines)
    drawing(monkeypatch, 0, 1)
    monkeypatch.setattr(private_choice, "run_experiment", lambda *given, **more: (_ for _ in ()).throw(error))
    chosen = run_choice(sweep, tmp_path / "none", report=lines.append)
    assert chosen.run is None
    assert "no run was chosen" in chosen.line
    assert chosen.epsilon == pytest.approx(price(sweep))
    assert names_in(tmp_path / "none") == {"sweep.toml", ".lock", "choice.json"}


def test_no_run_at_all_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing(monkeypatch)
    path = tmp_path / "grid.toml"
    path.write_text(tomli_w.dumps({**BASE, "sweep": {"choose": {**CHOOSE, "distribution": "poisson"}, "keys": KEYS}}), encoding="utf-8")
    running.sweep(path, out=tmp_path / "out")
    assert "no run was chosen" in capsys.readouterr().out
    assert names_in(tmp_path / "out") == {"sweep.toml", ".lock", "choice.json"}


def test_other_data_are_refused_on_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None) -> None:
    drawing(monkeypatch, 0)
    monkeypatch.setattr(private_choice, "run_experiment", lambda *given, **more: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_choice(swept(), tmp_path)
    path = tmp_path / CANDIDATES / "drawn.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"data_digest": "', '"data_digest": "0'), encoding="utf-8")
    with pytest.raises(InputError, match="begun with other data"):
        run_choice(swept(), tmp_path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"drawn\.json: is damaged"):
        run_choice(swept(), tmp_path)


@pytest.mark.parametrize(
    ("by", "scores", "best"),
    [("accuracy_mean", [0.2, 0.7, 0.7, None, 0.1], 1), ("perplexity_mean", [90.0, None, 40.0, 50.0, float("nan")], 2)],
)
def test_the_best_score_is_chosen_and_the_first_among_equals(by: str, scores: list[float | None], best: int, tmp_path: Path) -> None:
    sweep = swept(keys={"training.lr": [0.1, 0.2, 0.3, 0.4, 0.5]})
    assert sweep.choose is not None
    choose, drawn = replace(sweep.choose, by=by), [replace(cell, name=f"{CANDIDATES}/{i}") for i, cell in enumerate(sweep.cells)]
    for cell, score in zip(drawn, scores, strict=True):
        (tmp_path / cell.name).mkdir(parents=True)
        (tmp_path / cell.name / "summary.json").write_text(json.dumps({by: score, "epsilon": 3.0}), encoding="utf-8")
    budget = Chosen(None, None, by, None, None, 9.0, 1e-3, "client", "add_remove", "geometric", 3.0, 5)
    plans = {cell.name: planned_of(cell) for cell in sweep.cells}
    chosen, beside = private_choice._decided(sweep, choose, drawn, tmp_path, plans, budget)
    assert (chosen.run, chosen.score, beside) == (sweep.cells[best].name, scores[best], {"candidate": str(best)})
    ledger = Ledger(Ledger.read(LEDGER).budget, tmp_path / drawn[best].name / "ledger.json")
    ledger.charge({0: [*planned_of(drawn[best])]}, "planned")
    assert private_choice._decided(sweep, choose, drawn, tmp_path, plans, budget)[0] == chosen
    ledger.charge({0: [*planned_of(drawn[best])]}, "more than was planned")
    assert private_choice._decided(sweep, choose, drawn, tmp_path, plans, budget)[0] != chosen


LEDGER = json.dumps({"format": 1, "epsilon": 100.0, "delta": 1e-3, "relation": "add_remove", "unit": "client", "charges": []})


def planned_of(cell: SweepCell) -> Any:
    assert cell.config is not None
    return planned_events(cell.config, prepare(cell.config).algorithm, cell.config.training.rounds)


@pytest.mark.parametrize(
    ("algorithm", "privacy", "more"),
    [
        ("fedavg", {"unit": "client"}, {}),
        ("fedavg", {"unit": "sample"}, {}),
        ("pacfl", {"unit": "sample"}, {}),
        ("fedavg", {"unit": "sample", "noise": "shared"}, {"protection": {"sum": "secagg", "secagg_mode": "passive"}}),
        pytest.param("stocfl", {"unit": "sample"}, {}, marks=pytest.mark.slow),
        pytest.param("crossfit", {"unit": "sample"}, {}, marks=pytest.mark.slow),
        pytest.param("cfl", {"unit": "sample"}, {}, marks=pytest.mark.slow),
        pytest.param("pacfl", {"unit": "client", "local": ["gram"], "epsilon": 400.0}, {}, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_charged_what_it_planned(algorithm: str, privacy: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    tree = {
        "data": {"clients": 8}, "model": {"name": "linear"}, "training": {"rounds": 3, "batch_size": 5, "lr": 0.1, "weights": "equal"},
        "algorithm": {"name": algorithm}, **more,
        "privacy": {"epsilon": 2.0, "delta": 1e-4, "samples": 20 * (privacy["unit"] == "sample"), "sketch_dim": 0, **privacy},
    }  # fmt: skip
    config, population = parse_config(tree), scenes.population()
    plan = planned_events(config, prepare(config, population=population).algorithm, 3)
    assert epsilon_of(plan, 1e-4) == pytest.approx(config.privacy.epsilon, rel=2e-3)
    run_experiment(config, tmp_path / "run", population=population)
    ledger = Ledger.open(tmp_path / "run" / "ledger.json")
    assert all(covers(plan, ledger.events(client)) for client in ledger.clients)
    most = max(ledger.clients, key=ledger.spent)
    assert covers(ledger.events(most), plan), "all of it, by the client that spent most"
