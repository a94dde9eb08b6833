"""The audit of a run folder: what it writes, how it goes on after a stop, what it refuses; and how cells of several seeds become one."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attack_scenes import config
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cflpriv.attacks import ATTACKS, BUDGETS, Attack, Cell, audit
from cflpriv.attacks.adversary import AdversaryView
from cflpriv.attacks.audit import _Kept, audit_run
from cflpriv.attacks.evidence import fresh_runs
from cflpriv.attacks.figures import leakage
from cflpriv.attacks.figures.family import judged_together
from cflpriv.attacks.figures.leakage import dealt_at_random, grouping_accuracy, nothing
from cflpriv.attacks.figures.pooling import pooled
from cflpriv.attacks.figures.verdicts import audit_text, risk_words, risks_of, verdicts_of
from cflpriv.cli import app
from cflpriv.contract.transcript import Message
from cflpriv.errors import InputError, TrainingDiverged
from cflpriv.experiments import run_experiment
from cflpriv.experiments.digests import record_digests
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.report.run_names import with_colluders

KEYS = {"attack", "adversary", "protection", "metric", "value", "low", "high", "baseline", "reference", "status", "k_known", "seeds"}
FEW = ("signature_inversion", "cluster_identity")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_experiment(config(protection={"gram": ["haar"], "sum": "secagg"}), folder)
    took_a_second(folder)
    return folder


def took_a_second(folder: Path) -> None:
    """An audit has fewer seeds where the recorded run was slow, as it is on a busy machine."""
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"seconds": 1.0}), encoding="utf-8")
    record_digests(folder)


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


@pytest.fixture
def three_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUDGETS, "standard", replace(BUDGETS["standard"], seeds=3))


@pytest.mark.slow
@pytest.mark.usefixtures("three_seeds")
def test_a_standard_audit_has_seeds_intervals_and_references(run: Path) -> None:
    lines: list[str] = []
    cells = audit_run(run, attacks=FEW, report=lines.append)
    assert {cell.adversary for cell in cells} == {"server", "server+1", "client", "released"}
    assert [line for line in lines if line.startswith("not run: ") and "active-server" in line]
    for cell in cells:
        if cell.adversary.startswith("server") and cell.status not in ("nothing_to_see", "not_applicable", "not_attempted"):
            assert len(cell.seeds) == BUDGETS["standard"].seeds
            assert None not in (cell.value, cell.low, cell.high, cell.baseline, cell.reference)
    written = json.loads((run / "audit.json").read_text(encoding="utf-8"))["cells"]
    assert all(set(cell) >= KEYS for cell in written)
    assert len([cell for cell in written if cell["attack"] != "coverage"]) == len(cells)
    statuses = {(cell["adversary"], cell["attack"], cell["metric"]): cell["status"] for cell in written}
    assert statuses["server", "signature_inversion", "mean_image_cosine"] == "leaks", "inner products show label sets"
    assert statuses["server+1", "signature_inversion", "mean_image_cosine"] == "leaks"
    assert statuses["server", "cluster_identity", "group_accuracy"] == "leaks"
    page = write_report(run).read_text(encoding="utf-8")
    assert "What leaks, and to whom?" in page
    assert 'class="matrix"' in page


@pytest.mark.slow
@pytest.mark.usefixtures("three_seeds")
def test_an_attack_that_reruns_the_configuration_is_called_for_the_recorded_run_only(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def cells(case: Any) -> Any:
        seen.append(case.seed)
        return [nothing(case, "dp_audit", "run_epsilon", "a test")], None

    monkeypatch.setitem(ATTACKS, "dp_audit", replace(ATTACKS["dp_audit"], cells=cells))
    assert ATTACKS["dp_audit"].reruns
    lines: list[str] = []
    audit_run(run, adversary="server", attacks=["dp_audit"], report=lines.append)
    assert "1 seed," in lines[0], "no fresh run is made for it"
    assert [line for line in lines if line.startswith("not run: ") and "active-server" in line]
    both = audit_run(run, adversary="server", attacks=["dp_audit", FEW[1]])
    assert seen == [config().run.seed]
    assert {len(cell.seeds) for cell in both if cell.attack == FEW[1]} == {3}


@pytest.mark.slow
def test_an_audit_that_was_stopped_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str, attack: Attack, stop: bool) -> Attack:
        def cells(case: Any) -> Any:
            calls.append(name)
            if stop:
                raise KeyboardInterrupt
            return attack.cells(case)

        return replace(attack, cells=cells)

    whole = dict(ATTACKS)
    for name in FEW:
        monkeypatch.setitem(ATTACKS, name, counted(name, whole[name], stop=name == FEW[1]))
    with pytest.raises(KeyboardInterrupt):
        audit_run(run, adversary="server", attacks=FEW, budget="quick")
    assert calls == list(FEW)
    audit = json.loads((run / "audit.json").read_text(encoding="utf-8"))
    kept = audit["cells"]
    assert audit["about"]["by_adversary"] == {"server": [FEW[0]]}
    assert FEW[1] in audit["about"]["not_run"]["attacks"]  # which was asked for
    assert {cell["attack"] for cell in kept} == {FEW[0], "coverage"}  # what was finished is there, and what nobody has read yet
    calls.clear()
    monkeypatch.setitem(ATTACKS, FEW[1], counted(FEW[1], whole[FEW[1]], stop=False))
    cells = audit_run(run, adversary="server", attacks=FEW, budget="quick")
    assert calls == [FEW[1]]
    assert {cell.attack for cell in cells} == set(FEW)
    calls.clear()
    again = audit_run(run, adversary="server", attacks=FEW, budget="quick")
    assert calls == []
    assert again == cells
    (run / "audit" / "units.json").write_text("{", encoding="utf-8")
    assert audit_run(run, adversary="server", attacks=FEW, budget="quick") == cells  # a damaged store costs time only
    assert calls == list(FEW)


def test_an_attack_of_a_plugin_that_was_edited_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others stay, and so do those of a plugin that is not loaded this time."""
    run, plugin = tmp_path / "run", tmp_path / "own.py"
    (run / "audit").mkdir(parents=True)
    module = ModuleType("cflpriv_plugin_own")
    module.__file__ = str(plugin)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    attack = Attack("mine", lambda case: ([], None))
    attack.cells.__module__ = module.__name__
    monkeypatch.setitem(ATTACKS, "own", attack)
    figure = Cell("own", "server", "none", "m", *(None,) * 5, "nothing_to_see", 0, (0,))
    other = replace(figure, attack=FEW[0])

    def finished() -> set[str]:
        return set(_Kept(run, "key", {}, {}, (), lambda viewer: {}).cells)

    plugin.write_text("first = True\n", encoding="utf-8")
    kept = _Kept(run, "key", {}, {}, (), lambda viewer: {})
    kept.add("server|own|0", [figure])
    kept.add(f"server|{FEW[0]}|0", [other])
    assert finished() == {"server|own|0", f"server|{FEW[0]}|0"}
    with monkeypatch.context() as without:
        without.delitem(ATTACKS, "own")
        assert finished() == {"server|own|0", f"server|{FEW[0]}|0"}
    plugin.write_text("second = True\n", encoding="utf-8")
    assert finished() == {f"server|{FEW[0]}|0"}


@pytest.mark.slow
@pytest.mark.usefixtures("three_seeds")
def test_another_budget_starts_anew_and_other_attacks_add_up(run: Path) -> None:
    audit_run(run, adversary="server", attacks=FEW[:1], budget="quick")
    audit_run(run, adversary="server", attacks=FEW[1:], budget="quick")
    assert {cell["attack"] for cell in json.loads((run / "audit.json").read_text(encoding="utf-8"))["cells"]} == set(FEW)
    (cell,) = audit_run(run, adversary="server", attacks=FEW[1:])
    assert len(cell.seeds) == 3
    assert {cell["attack"] for cell in json.loads((run / "audit.json").read_text(encoding="utf-8"))["cells"]} == {FEW[1], "coverage"}


def test_bad_folders_are_refused_with_a_word(run: Path, tmp_path: Path) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(InputError, match=match):
            audit_run(run, budget=options.pop("budget", "quick"), **options)

    with pytest.raises(InputError, match="not a run folder"):
        audit_run(tmp_path)
    refused("--budget: 'lavish'", budget="lavish")
    refused("--attacks: 'none_such'", attacks=["none_such"])
    refused("names none", attacks=[])
    refused("--adversary janitor", adversary="janitor")
    refused("this run had no key holder", adversary="key-holder")

    summary = (run / "summary.json").read_text(encoding="utf-8")
    (run / "summary.json").unlink()
    refused("not complete")
    (run / "summary.json").write_text("{}", encoding="utf-8")
    refused("not a run's summary")
    (run / "summary.json").write_text(json.dumps({"messages": json.loads(summary)["messages"]}), encoding="utf-8")
    refused("has no 'algorithm'")
    (run / "summary.json").write_text(summary.replace('"pacfl"', '"ifca"'), encoding="utf-8")
    refused("one of them was changed")
    (run / "summary.json").write_text(summary, encoding="utf-8")

    settings = (run / "config.toml").read_text(encoding="utf-8")
    (run / "config.toml").write_text(settings.replace('"secagg"', '"none"'), encoding="utf-8")
    refused("one of them was changed")
    (run / "config.toml").write_text("[project]\nname = 'else'\n", encoding="utf-8")
    refused("project")
    (run / "config.toml").write_text(settings, encoding="utf-8")

    messages = run / "transcript" / "messages.jsonl"
    lines = messages.read_text(encoding="utf-8")
    messages.write_text("".join(lines.splitlines(keepends=True)[:-1]), encoding="utf-8")
    refused("was cut")
    messages.write_text(lines.replace("signature", "signatory"), encoding="utf-8")
    refused("not a message of this transcript")
    messages.write_text(lines, encoding="utf-8")
    payloads = sorted((run / "transcript").glob("payloads_*"))[0]
    content = bytearray(payloads.read_bytes())
    content[-5] ^= 1
    payloads.write_bytes(content)
    refused("does not match its digest")
    payloads.unlink()
    refused("payload")
    messages.unlink()
    refused("no transcript here")


@pytest.mark.slow
def test_the_command_line(run: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["audit", str(run), "--adversary", "server", "--attacks", "cluster_identity", "--budget", "quick"])
    assert result.exit_code == 0, result.output
    assert "cluster_identity / group_accuracy" in result.output
    listed = runner.invoke(app, ["list"]).output
    assert all(name in listed for name in ATTACKS)


@pytest.mark.slow
def test_a_long_run_is_cut_to_what_the_budget_allows(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    summary["seconds"] = 2 * BUDGETS["quick"].seconds
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    record_digests(run)
    (cell,) = audit_run(run, adversary="server", attacks=["cluster_identity"], budget="quick")
    assert "first 1 round(s) only" in cell.note
    assert cell.rounds == 1
    summary["seconds"] = BUDGETS["standard"].seconds / 4.5
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    record_digests(run)
    (cell,) = audit_run(run, adversary="server", attacks=["cluster_identity"])
    assert len(cell.seeds) == 3  # two fresh seeds of two runs each


def one(value: float, baseline: float, reference: float, seed: int, **more: Any) -> Cell:
    """A figure of which no single run says anything."""
    return Cell(
        "a", "server", "none", "m", value, None, None, baseline, reference, "not_validated", 0, (seed,), reference_baseline=baseline, **more
    )


def test_pooling_is_a_paired_t_test_over_seeds() -> None:
    sure = pooled([one(0.9 + 0.01 * seed, 0.2, 0.95, seed, margin=0.1) for seed in range(5)])[0]
    assert sure.status == "leaks"
    assert sure.seeds == (0, 1, 2, 3, 4)
    assert sure.value == pytest.approx(0.92)
    assert sure.low == pytest.approx(0.92 - 2.776445 * np.std([0.9, 0.91, 0.92, 0.93, 0.94], ddof=1) / 5**0.5, abs=1e-6)
    assert pooled([one(0.25, 0.2, 0.95, seed, margin=0.1) for seed in range(5)])[0].status == "at_baseline"
    assert pooled([one(0.9, 0.2, 0.21, seed, margin=0.1) for seed in range(5)])[0].status == "not_validated"
    wild = [one(0.9 if seed else 0.0, 0.2, 0.95, seed, margin=0.1) for seed in range(5)]
    assert pooled(wild)[0].status == "inconclusive"  # a few seeds that disagree prove nothing
    assert pooled(wild[:3])[0].status == "not_validated", "three equal gains of the unprotected runs come one time in 27"
    errors = [one(0.1, 0.9, 0.1, seed, margin=0.1, lower_is_better=True) for seed in range(5)]
    assert pooled(errors)[0].status == "leaks"
    rare = [one(0.05 if seed == 2 else 0.0, 0.0, 0.1, seed, exact=True) for seed in range(5)]
    assert pooled(rare)[0].status == "leaks"
    assert pooled([one(0.9, 0.2, 0.9, 0)])[0].seeds == (0,)


@pytest.mark.parametrize(
    ("seeds", "low", "status"),
    [(5, 0, "inconclusive"), (6, 0, "leaks"), (5, 1, "inconclusive"), (6, 1, "inconclusive"), (10, 1, "leaks")],
)
def test_tosses_that_agree_are_a_leak_from_six_on(seeds: int, low: int, status: str) -> None:
    """Of a fair coin all of 5 show heads one time in 32, all of 6 one in 64, 9 of 10 or more one in 93."""
    tossed = [one(0.3 if seed < low else 1.0, 0.5, 1.0, seed, margin=0.05, coin=True) for seed in range(seeds)]
    assert pooled(tossed)[0].status == status
    if (seeds, low) == (5, 0):
        assert pooled([replace(cell, coin=False) for cell in tossed])[0].status == "leaks"


def test_an_exact_figure_leaks_whichever_seed_it_first_comes_out_in() -> None:
    seeds = [one(0.0, 0.0, 0.0, 0), *(one(0.05, 0.0, 0.1, seed, exact=True) for seed in (1, 2))]
    assert pooled(seeds)[0].status == "leaks"


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20), st.permutations(range(4)))
def test_grouping_accuracy_knows_no_names(groups: list[int], names: list[int]) -> None:
    truth = np.array(groups)
    assert grouping_accuracy(np.array(names)[truth], truth).all()
    alone = grouping_accuracy(np.zeros(len(truth)), truth).mean()
    assert alone == pytest.approx(np.bincount(truth).max() / len(truth))
    assert (dealt_at_random(truth, truth, 0, times=5) <= 1.0).all()


@pytest.mark.slow
def test_every_figure_is_in_the_matrix(run: Path) -> None:
    from cflpriv.experiments.report.audit_report import attack_matrix, label_histograms

    cells = [cell.as_json() for cell in audit_run(run, attacks=FEW, budget="quick")]
    matrix = attack_matrix([("haar", "pacfl (run)", cells), ("none", "x", [])])
    assert [line["attack"] for line in matrix["lines"]] == list(FEW)
    (first, empty) = matrix["lines"][0]["places"]
    statuses = {place["adversary"]: place["status"] for place in first}
    assert set(statuses) == {"server", "server+1", "client", "released"}
    assert (statuses["server"], statuses["server+1"]) == ("leaks", "leaks")
    assert empty == []
    uri = label_histograms(np.eye(2, 10), np.full((2, 10), 0.1), ["client 0", "client 1"])
    assert uri.startswith("data:image/svg+xml;base64,")
    assert uri == label_histograms(np.eye(2, 10), np.full((2, 10), 0.1), ["client 0", "client 1"])


def test_the_matrix_says_its_statuses_in_words_and_errors_as_errors() -> None:
    from cflpriv.experiments.report.audit_report import attack_matrix
    from cflpriv.experiments.report.audit_words import metric_words

    assert metric_words({"metric": "histogram_l1", "lower_is_better": True}) == "L1 of label histogram ↓"
    assert metric_words({"metric": "mean_image_psnr_db"}) == "mean image PSNR in dB"
    assert metric_words({"metric": "model_lira_auc", "lower_is_better": False}) == "model LiRA AUC"
    empty: dict[str, Any] = {"attack": "a", "metric": "m", "value": None, "status": "nothing_to_see", "note": "no sums"}
    alike = [empty | {"adversary": "server+1"}, empty | {"adversary": "server"}]
    apart = [empty | {"adversary": "server"}, empty | {"adversary": "server+1", "note": "another reason"}]
    seen = [empty | {"adversary": "server"}, empty | {"adversary": "server+1", "value": 1.0, "status": "leaks"}]
    (line,) = attack_matrix([("none", "x", cells) for cells in (alike, apart, seen)])["lines"]
    names = [[place["adversary"] for place in places] for places in line["places"]]
    assert names == [["server, server+1"], ["server", "server+1"], ["server", "server+1"]]


def test_the_matrix_shows_the_least_comforting_figure_and_counts_the_others() -> None:
    from cflpriv.experiments.report.audit_report import attack_matrix
    from cflpriv.experiments.report.audit_words import ORDER

    assert ORDER == (
        "leaks",
        "evidence_doubtful",
        "inconclusive",
        "not_validated",
        "not_attempted",
        "at_baseline",
        "not_applicable",
        "nothing_to_see",
    )
    for place, status in enumerate(ORDER):
        cells = [{"attack": "a", "metric": one, "adversary": "server", "status": one, "value": 1.0} for one in reversed(ORDER[place:])]
        (item,) = attack_matrix([("x", "", cells)])["lines"][0]["places"][0]
        assert (item["status"], item["figure"]["metric"]) == (status, status)
        assert item["others"] == ", ".join(f"1 {one.replace('_', ' ')}" for one in ORDER[place + 1 :])


def test_pretended_clients_upload_what_real_ones_do(run: Path) -> None:
    """The attacker's simulator is the public pipeline: on a client's own data it gives that client's signature."""
    made = config()
    from attack_scenes import case, population_of

    people, seen = population_of(made), case(made)
    rows = seen.prior.simulate([(client.x_train, client.y_train) for client in people.clients[:3]])
    assert rows is not None
    for client, row in zip(people.clients, rows, strict=False):
        assert row == pytest.approx(seen.rows[client.id], abs=1e-12)
    assert fresh_runs.simulator(config({"name": "fedavg"}), people)([(people.clients[0].x_train, people.clients[0].y_train)]) is None


def test_a_run_in_which_nobody_says_anything_has_nothing_to_see(tmp_path: Path) -> None:
    run_experiment(config({"name": "local"}, training={"rounds": 1}), tmp_path / "run")
    names = ("signature_inversion", "label_inference", "gram_geometry", "cluster_identity", "disaggregation", "influence")
    assert {cell.status for cell in audit_run(tmp_path / "run", attacks=names, budget="quick")} == {"nothing_to_see"}


@pytest.mark.slow
def test_payloads_of_chosen_rounds_and_clients_are_enough(tmp_path: Path) -> None:
    chosen = {"record": "attackable", "record_rounds": [1], "record_clients": list(range(12))}
    run_experiment(config(run=chosen), tmp_path / "run")
    cells = audit_run(tmp_path / "run", adversary="server", attacks=["label_inference"], budget="quick")
    statuses = {cell.metric: cell.status for cell in cells}
    assert statuses.pop("aggregate_histogram_l1") == "not_attempted"  # no two models of a cluster were kept
    assert statuses == {"histogram_l1": "leaks", "label_set_accuracy": "leaks"}
    with np.load(tmp_path / "run" / "audit" / "label_inference_server.npz") as arrays:
        assert arrays["clients"].tolist() == list(range(12))


def test_recovered_arrays_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while they are written leaves those of the earlier audit, which its figures name."""
    (tmp_path / "audit").mkdir()
    figure = Cell("own", "server", "none", "m", *(None,) * 5, "nothing_to_see", 0, (0,))
    monkeypatch.setattr(audit, "case_of", lambda *given: None)
    scene: Any = SimpleNamespace(config=config(), messages=[], rounds=None, population=SimpleNamespace(label_range=(), shape=(1, 8, 8)))

    def attacked(clients: int) -> None:
        monkeypatch.setitem(ATTACKS, "own", Attack("mine", lambda case: ([figure], {"clients": np.arange(clients)})))
        audit._attacked("own", "server", scene, BUDGETS["quick"], tmp_path)

    def killed(*paths: Any) -> None:
        raise KeyboardInterrupt

    attacked(3)
    monkeypatch.setattr("cflpriv.files.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        attacked(9)
    assert np.load(tmp_path / "audit" / "own_server.npz")["clients"].tolist() == [0, 1, 2]


def test_what_was_not_looked_at_is_not_called_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads that were not kept, rounds that were not attacked, and clients of the attacker's own whose training diverges."""
    scores = np.zeros(20)
    seen: Any = SimpleNamespace(view=AdversaryView("server", (), {}), has_updates=False, protection="none", seed=0)
    safe = leakage.cell(seen, "own", "label_set_accuracy", scores, scores, scores + 1, margin=0.1, share=True)
    empty = nothing(seen, "own", "m", "no signature is in this view")
    monkeypatch.setattr(audit, "case_of", lambda *given: seen)
    monkeypatch.setattr(audit, "what_was_kept", lambda messages: "kept in part" if messages else "")

    whole = seen.view

    def statuses(messages: Sequence[str] = (), rounds: int | None = None) -> list[str]:
        scene: Any = SimpleNamespace(
            config=config(),
            messages=messages,
            rounds=rounds,
            population=SimpleNamespace(label_range=(), shape=(1, 8, 8)),
            whole_view=lambda name: whole,
        )
        return [one.status for one in pooled(audit._attacked("own", "server", scene, BUDGETS["quick"], None))]

    monkeypatch.setitem(ATTACKS, "own", Attack("mine", lambda case: ([safe, empty], None)))
    assert statuses() == ["at_baseline", "nothing_to_see"]
    assert statuses(messages=["one"]) == ["inconclusive", "not_attempted"]
    assert statuses(rounds=2) == ["inconclusive", "nothing_to_see"]
    later = Message(9, 5, "gossip", "rumour", "clients", "server", (0, 1), ("server",), 8, 2, 16, "", payload={"rumour": np.zeros((2, 1))})
    whole = replace(seen.view, messages=(later,))
    assert statuses(rounds=2) == ["inconclusive", "not_attempted"]

    def diverged(case: Any) -> Any:
        raise TrainingDiverged("client 3, round 0")

    monkeypatch.setitem(ATTACKS, "own", Attack("mine", diverged))
    assert statuses() == ["not_attempted"]


# --- verdicts: what is settled, risks, and guarantees that stood


def figure_of(attack: str, status: Any, value: float | None = 0.5, metric: str = "m", **changes: Any) -> Cell:
    plain = Cell(attack, "server", "none", metric, value, None, None, 0.5, None, status, 0, (0,))
    return replace(plain, **changes)


def test_not_seen_to_learn_anything_needs_every_figure_at_its_baseline() -> None:
    settled = [figure_of("membership", "at_baseline"), figure_of("likeness", "not_applicable", None)]
    (calm,) = verdicts_of(settled)
    assert "was not seen to learn anything" in calm.sentence
    for status in ("inconclusive", "not_validated", "not_attempted"):
        (open_,) = verdicts_of([*settled, figure_of("label_inference", status)])
        assert "not seen to learn" not in open_.sentence
        assert "may learn more than this audit could show" in open_.sentence


def test_leaks_are_grouped_by_what_they_are_to_the_law() -> None:
    cells = [
        figure_of("label_inference", "leaks", 0.9), figure_of("membership", "leaks", 0.8, metric="model_lira_auc"),
        figure_of("cluster_identity", "at_baseline"),
    ]  # fmt: skip
    risks = risks_of(cells)
    assert {risk: [leak["attack"] for leak in leaks] for risk, leaks in risks.items()} == {
        "singling out": ["membership"], "linkability": [], "inference": ["label_inference"],
    }  # fmt: skip
    assert all(entry.risk in (*risks, "") for entry in map(ATTACKS.__getitem__, ATTACKS))


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([], "not attacked"),
        ([("likeness", "at_baseline")], "none shown"),
        ([("likeness", "inconclusive")], "none shown, 1 figure is open"),
        ([("likeness", "inconclusive"), ("cluster_identity", "not_validated")], "none shown, 2 figures are open"),
        ([("likeness", "leaks"), ("cluster_identity", "not_validated")], "leaks by likeness (the server)"),
        ([("likeness", "evidence_doubtful")], "not known, because the evidence is doubtful"),
    ],
)
def test_a_risk_says_what_is_open_and_whether_it_was_attacked(cells: list[tuple[str, Any]], words: str) -> None:
    made = [figure_of("membership", "leaks"), *(figure_of(attack, status) for attack, status in cells)]
    assert risk_words(made)["linkability"] == words


def test_a_value_that_need_not_be_sent_does_not_head_a_verdict() -> None:
    static = figure_of("disaggregation", "leaks", 1.0, metric="static_value_exact", baseline=0.0, exact=True)
    real = figure_of("membership", "leaks", 0.7, metric="model_lira_auc", baseline=0.5)
    (verdict,) = verdicts_of([static, real])
    assert verdict.attack == "membership"
    (alone,) = verdicts_of([static])
    assert "would send unchanged" in alone.sentence


@pytest.mark.parametrize(
    ("adversary", "who"), [("server", "the server with 15 colluding clients learns"), ("server+1", "15 more colluding")]
)
def test_colluders_of_an_attack_are_named_in_its_verdict(adversary: str, who: str) -> None:
    sybil = figure_of("sybil_span", "leaks", 0.1, baseline=1.0, lower_is_better=True, k_known=15, adversary=adversary)
    (verdict,) = verdicts_of([sybil])
    assert who in verdict.sentence
    learned = replace(sybil, attack="gram_geometry")
    assert "which knows 15 clients' data" in verdicts_of([learned])[0].sentence
    (second,) = verdicts_of([figure_of("membership", "leaks", 1.0, metric="model_lira_auc", adversary=adversary), sybil])
    assert "comparison with colluders' vectors (with 15 colluding clients)" in second.sentence
    assert second.attack == "membership", "what an adversary learns without them comes first"
    assert (verdict.colluders, second.colluders) == (15, 0)
    tree = json.loads(audit_text([sybil], judged_together([sybil])[1]))
    assert [tree[part][0]["colluders"] for part in ("cells", "verdicts")] == [15, 15]
    assert tree["risks"]["singling out"][0]["colluders"] == 15
    who = {"server": "the server with 15", "server+1": "the server with 1 colluding client and 15 more"}[adversary]
    assert tree["risk_words"]["singling out"] == f"leaks by sybil span ({who} colluding clients)"
    assert tree["learns"].keys() == {"sybil_span"}
    assert with_colluders(tree["cells"][0]) == f"server+{15 + (adversary == 'server+1')}"


def test_of_equal_leaks_clients_data_come_before_who_is_alike() -> None:
    alike = figure_of("cluster_identity", "leaks", 1.0, metric="group_accuracy")
    image = figure_of("signature_inversion", "leaks", 0.9999, metric="mean_image_cosine")
    labels = figure_of("label_inference", "leaks", 1.0)
    member = figure_of("membership", "leaks", 0.7, metric="model_lira_auc")
    for cells in permutations([alike, image, labels, member]):
        (verdict,) = verdicts_of(cells)
        assert verdict.attack == "signature_inversion"
        assert verdict.sentence.endswith("leaks also by label inference, cluster identity, membership")


def test_a_guarantee_that_stood_is_stated_with_its_bound() -> None:
    training = figure_of("dp_audit", "at_baseline", 1.4, metric="training_epsilon", baseline=1.6, power=0.99)
    run = figure_of("dp_audit", "at_baseline", 2.9, metric="run_epsilon", baseline=4.0, power=0.95)
    (verdict,) = verdicts_of([training, run])
    assert "the epsilon of the run is 2.90 at least (97.5 % confidence), and 4.00 is claimed" in verdict.sentence
    assert "shown that in 95%" in verdict.sentence
    (broken,) = verdicts_of([replace(run, status="leaks", value=6.0)])
    assert "stood its test" not in broken.sentence
    assert "stood its test" in verdict.sentence
    (weak,) = verdicts_of([replace(run, status="inconclusive", power=0.0)])
    assert "stood its test" not in weak.sentence
    assert "leaves it open" in weak.sentence
