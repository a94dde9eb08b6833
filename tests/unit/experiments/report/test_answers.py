"""The first screen: what each answer says for summaries, clusterings and audits, and that nothing untested reads as safe."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflpriv.experiments.report.answers import answers, clusters_placed, doubted, guarantee_of, in_short
from cflpriv.experiments.report.audit_report import attack_matrix
from cflpriv.experiments.report.audit_words import STATUS
from cflpriv.experiments.report.before import MOST_STEPS, before_relying
from cflpriv.experiments.report.leak_answers import audit_answer, leak_sentence
from cflpriv.experiments.report.results import by_class
from cflpriv.experiments.report.run_files import AboutAudit, Audited, RunFiles
from cflpriv.experiments.report.run_names import kind_of, method_words, title

CLIENTS = 20
ALL = AboutAudit((), ("one", "two"), ())
SAFE_WORDS = ("safe", "secure against", "no leak.", "nothing leaks")


def cell(status: str, adversary: str = "server", attack: str = "one") -> dict[str, Any]:
    seen = status in ("leaks", "at_baseline", "inconclusive", "not_validated")
    figures = {"value": 0.9 if seen else None, "baseline": 0.5 if seen else None}
    return {"attack": attack, "adversary": adversary, "metric": "accuracy", "status": status, "note": "", **figures}


def audited(*cells: dict[str, Any], about: AboutAudit = ALL) -> Audited:
    verdicts = [
        {"adversary": one["adversary"], "sentence": "", "reduces": "", "attack": one["attack"], "learns": "which labels clients have"}
        for one in cells
        if one["status"] == "leaks"
    ]
    return Audited(Path("run"), "", "", "", list(cells) or None, verdicts, about=about)


def a_run(
    name: str = "clusters", accuracy: float = 0.9, counts: list[list[int]] | None = None, audit: Audited | None = None, **summary: Any
) -> RunFiles:
    """A run of two groups of ten clients, each scored `accuracy`, give or take a hundredth."""
    kinds: dict[str, dict[str, Any]] = {
        "clusters": {"algorithm": "pacfl", "knowledge": "none: a cut", "clusters": 2, "upload_bytes": 2000},
        "one": {"algorithm": "fedavg", "knowledge": "none: no groups are formed", "clusters": 1, "upload_bytes": 2000},
        "alone": {"algorithm": "local", "knowledge": "none: no groups are formed", "clusters": None, "upload_bytes": 0},
    }
    scores = [accuracy + 0.01 * (client % 3 - 1) for client in range(CLIENTS)]
    base = {
        "protection": "none", "dataset": "digits/iid", "clients": CLIENTS, "true_groups": 2, "ari": 1.0, "rounds": 3, "rounds_planned": 3,
        "rounds_skipped": 0, "download_bytes": 0, "seconds": 1.0, "accuracy_mean": accuracy, "accuracy_std": 0.01,
        "accuracy_worst": accuracy - 0.01, "local_accuracy_mean": accuracy, "local_accuracy_std": 0.0, "epsilon": None, "delta": None,
        "notes": [], "balanced_accuracy": accuracy, "majority_accuracy": 0.62, "majority_balanced_accuracy": 0.5, "macro_f1": accuracy,
        "by_class": None if counts is None else {"counts": counts, "majority": 0},
    }  # fmt: skip
    labels = {str(client): client % 2 for client in range(CLIENTS)}
    measured = {"truth": dict(labels), "labels": labels if name == "clusters" else None, "class_names": ["normal", "failing"]}
    rows = [
        {
            "round": 2,
            "accuracy_mean": accuracy,
            "per_client": {"clients": list(range(CLIENTS)), "accuracy": scores, "local_accuracy": scores},
        }
    ]
    found = Audited(Path("run"), "", "", "", None) if audit is None else audit
    config = {"run": {"seed": 0}, "data": {"source": "digits"}, "protection": {}}
    return RunFiles(Path(f"runs/{name}"), {**base, **kinds[name], **summary}, rows, measured, None, found, config, {}, label=name)


# --- served ----------------------------------------------------------------------------------------------------------------------------


def test_clusters_that_serve_clearly_better_than_both_others_are_advised() -> None:
    runs = [a_run("alone", 0.7), a_run("one", 0.8), a_run("clusters", 0.9)]
    four = answers(runs)
    assert (four[0].mark, four[0].verdict) == ("✓", "Yes, by clusters")
    assert four[0].text.startswith("90.0 % of answers are right, 80.0 % with one model for all, 70.0 % alone.")
    assert "Balanced accuracy 90.0 %. Always the commonest class: 62.0 %, balanced 50.0 %." in four[0].small
    assert in_short(runs, four).startswith("Train these clients in two clusters.")


@pytest.mark.parametrize(("one", "verdict", "tone"), [(0.95, "No, one model is better", "bad"), (0.9, "Not clearly", "open")])
def test_clusters_that_do_not_serve_better_are_not_called_better(one: float, verdict: str, tone: str) -> None:
    runs = [a_run("clusters", 0.9), a_run("one", one), a_run("alone", 0.7)]
    answer = answers(runs)[0]
    assert (answer.verdict, answer.tone) == (verdict, tone)
    assert "Difference to one model for all" in answer.small
    assert not in_short(runs, answers(runs)).startswith("Train these clients")


@pytest.mark.parametrize(("counts", "is_open"), [([[90, 10], [10, 90]], False), ([[100, 0], [100, 0]], True)])
def test_recalls_are_unfolded_where_a_model_learned_nothing(counts: list[list[int]], is_open: bool) -> None:
    shown = by_class(a_run(counts=counts, warnings=["the last rounds still improved"]))
    assert shown is not None
    assert shown["open"] is is_open


def test_a_run_alone_is_compared_with_nothing() -> None:
    four = answers([a_run()])
    assert (four[0].verdict, four[0].tone) == ("Not compared", "open")
    assert "nothing shows yet" in in_short([a_run()], four)


def test_clusters_are_not_advised_before_they_were_compared_with_everything() -> None:
    runs = [a_run("clusters", 0.9), a_run("one", 0.8)]
    four = answers(runs)
    assert (four[0].tone, four[0].verdict) == ("open", "Better than one model for all")
    assert "Not compared with each client alone." in four[0].small
    assert not in_short(runs, four).startswith("Train these clients")
    assert any("advise" in step.command for step in before_relying(Path("runs"), runs, four))


def test_noise_of_the_others_alone_is_no_merit_of_clusters() -> None:
    noisy = a_run("one", 0.5, epsilon=1.0, delta=1e-5)
    assert answers([a_run("clusters", 0.9), noisy])[0].verdict != "Better than one model for all"
    fair = [a_run("clusters", 0.9, epsilon=1.0, delta=1e-5), noisy, a_run("alone", 0.5)]
    assert answers(fair)[0].verdict == "Yes, by clusters"


def test_errors_are_not_called_unscored() -> None:
    runs = [a_run(name, 0.9, accuracy_mean=None, error_mean=error, r2=0.5) for name, error in (("clusters", 1.0), ("one", 2.0))]
    answer = answers([replace(run, rounds=[]) for run in runs])[0]
    assert (answer.verdict, answer.tone) == ("Cannot tell", "open")
    assert "0 clients were scored" not in answer.small


def test_runs_alone_are_not_compared_with_each_other() -> None:
    runs = [a_run("alone", 0.9), a_run("alone", 0.7)]
    assert (answers(runs)[0].verdict, in_short(runs, answers(runs))[:25]) == ("Not compared", "Each client trains alone.")


def test_runs_of_another_seed_or_other_data_are_not_compared() -> None:
    for changed in ({"run": {"seed": 1}, "data": {"source": "digits"}}, {"run": {"seed": 0}, "data": {"source": "mnist"}}):
        other = replace(a_run("one", 0.5), config=changed)
        assert answers([a_run(), other])[0].verdict == "Not compared"


@given(st.integers(1, 500), st.integers(1, 500))
def test_a_model_that_predicts_one_class_for_everybody_learned_nothing(right: int, wrong: int) -> None:
    run = a_run(counts=[[right, 0], [wrong, 0]])
    runs = [run, a_run("one", 0.1), a_run("alone", 0.1)]
    answer = answers(runs)[0]
    assert (answer.mark, answer.verdict) == ("✗", "Learned nothing")
    assert answer.text.startswith("It predicts normal for everybody")
    assert "Balanced accuracy 50.0 %" in answer.text
    assert in_short(runs, answers(runs)).startswith("Nothing was learned")
    assert "Train longer" in before_relying(Path("runs"), runs, answers(runs))[0].words


# --- groups ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "verdict", "tone"),
    [
        ({"answer": "groups", "p": 0.002}, "Two, p = 0.002", "good"),
        ({"answer": "all alike", "p": None}, "None found", "none"),
        ({"rule": "silhouette", "clear": True}, "Two, clearly", "good"),
        ({"rule": "silhouette", "clear": False}, "Two, not clearly", "open"),
        ({}, "Two, untested", "open"),
    ],
)
def test_groups_are_called_clear_only_by_a_test_or_a_rule(measured: dict[str, Any], verdict: str, tone: str) -> None:
    run = a_run()
    answer = answers([replace(run, measured={**(run.measured or {}), **measured})])[1]
    assert (answer.verdict, answer.tone) == (verdict, tone)


@pytest.mark.parametrize(("released", "words"), [({"p": 0.09}, "p = 0.09"), ({"p_at_least": 0.034}, "p ≥ 0.034"), ({}, "no p-value")])
def test_the_p_value_of_a_test_that_ended_early_is_a_bound(released: dict[str, float], words: str) -> None:
    run = a_run()
    answer = answers([replace(run, measured={**(run.measured or {}), "answer": "no clear groups", **released})])[1]
    assert words in answer.small


def test_a_number_of_groups_that_was_given_was_not_found() -> None:
    answer = answers([a_run(knowledge="the number of groups, k = 2")])[1]
    assert (answer.verdict, answer.tone) == ("Two, as given", "none")


@given(st.lists(st.integers(0, 3), min_size=4, max_size=30), st.permutations(range(4)))
def test_clusters_that_are_the_groups_under_other_names_place_everybody(groups: list[int], names: list[int]) -> None:
    run = a_run()
    truth = {str(client): group for client, group in enumerate(groups)}
    labels = {client: names[group] for client, group in truth.items()}
    words = clusters_placed(replace(run, measured={"truth": truth, "labels": labels}))
    assert words == ("" if len(set(groups)) < 2 else f"All {len(groups)} are placed as they truly are.")


def test_clusters_that_are_not_the_true_groups_are_not_given_their_sizes() -> None:
    run = a_run()
    truth = {str(client): client % 2 for client in range(CLIENTS)}
    labels = {client: group if int(client) > 3 else 2 for client, group in truth.items()}
    text = answers([replace(run, measured={"truth": truth, "labels": labels})])[1].text
    assert text.startswith("Clusters of 8, 8, 4 clients. 16 of 20 are placed")


# --- leaks -----------------------------------------------------------------------------------------------------------------------------


SEEN = st.tuples(st.sampled_from(list(STATUS)), st.sampled_from(["server", "client", "released", "server+1"]))


@given(st.lists(SEEN, max_size=8) | st.lists(st.tuples(st.just("at_baseline"), SEEN.map(lambda one: one[1])), max_size=8), st.booleans())
def test_nothing_that_is_open_reads_as_safe(seen: list[tuple[str, str]], whole: bool) -> None:
    found = audited(*(cell(*one) for one in seen), about=ALL if whole else AboutAudit((), ("one",), ("two",)))
    answer = audit_answer(found)
    statuses = {status for status, _ in seen}
    everybody = {viewer for _, viewer in seen} >= {"server", "client", "released"}
    open_ = not everybody or not whole or bool(statuses & {"not_attempted", "not_validated", "inconclusive", "evidence_doubtful"})
    tested = "at_baseline" in statuses
    if "leaks" in statuses and "evidence_doubtful" not in statuses:
        assert answer.tone == "bad"
    elif open_ or not tested:
        assert answer.tone == "open"
        assert not any(word in f"{answer.verdict} {answer.text} {leak_sentence(answer, found)}".lower() for word in SAFE_WORDS)
    else:
        assert (answer.tone, answer.verdict) == ("good", "No leak seen")
        assert "stronger" in answer.text


def test_the_leak_to_whoever_sees_least_is_named_first() -> None:
    found = audited(cell("leaks", "server+1"), cell("not_attempted", "server"), cell("leaks", "client"))
    answer = audit_answer(found)
    assert answer.verdict == "Leaks to one client"
    assert "which labels clients have (accuracy 0.90, baseline 0.50)" in answer.text
    assert "Not settled for the server alone." in answer.text
    helped = audited(cell("leaks", "server+1"), cell("not_attempted", "server"))
    assert leak_sentence(audit_answer(helped), helped).endswith("short of that, the two attacks that ran cannot read what is sent.")


def test_the_strongest_figure_of_a_leak_is_shown() -> None:
    """An AUC of .66 beside one of 1.00 of the same attack would sound harmless."""
    weak, strong = (cell("leaks") | {"metric": name, "value": value} for name, value in (("model_auc", 0.66), ("update_auc", 1.0)))
    answer = audit_answer(audited(weak, strong))
    assert "1.00, baseline 0.50" in answer.text
    (line,) = attack_matrix([("a", "b", [weak, strong])])["lines"]
    assert line["places"][0][0]["figure"] == strong


def test_a_leak_that_takes_colluders_is_not_said_of_the_server_alone() -> None:
    answer = audit_answer(audited(cell("leaks") | {"colluders": 5}, cell("at_baseline", "client"), cell("at_baseline", "released")))
    assert answer.verdict == "Leaks to the server + 5 clients"
    assert answer.text.startswith("The server + 5 clients learns")


@pytest.mark.parametrize("status", ["inconclusive", "not_validated", "not_attempted"])
def test_what_is_open_without_helpers_stays_open_beside_a_leak_to_a_server_that_clients_help(status: str) -> None:
    found = audited(cell("leaks", "server+2"), cell(status, "server", "two"), cell("at_baseline", "client"))
    sentence = leak_sentence(audit_answer(found), found)
    assert "once 2 clients help the server" in sentence
    assert sentence.endswith("short of that, no leak is seen, and not all is known.")
    assert leak_sentence(audit_answer(found), replace(found, column="none")).startswith("Once 2 clients help")  # no protection to fail


def test_a_leak_that_an_audit_found_is_said_also_of_clients_that_sent_nothing() -> None:
    """To whoever gets the models."""
    assert answers([a_run("alone", audit=audited(cell("leaks", "released")))])[2].tone == "bad"
    assert answers([a_run("alone")])[2].verdict == "Nothing is sent"


def test_attacks_that_do_not_work_unprotected_tested_nothing() -> None:
    answer = audit_answer(audited(cell("not_validated"), cell("not_attempted", "client")))
    assert (answer.tone, answer.verdict) == ("open", "Not tested")
    assert "found none" not in answer.text


def test_an_audit_by_one_adversary_is_not_called_whole() -> None:
    answer = audit_answer(audited(cell("at_baseline", "client")))
    assert (answer.tone, answer.verdict) == ("open", "No leak seen yet")
    assert "Not tried: the server, whoever gets the models and a server that clients help." in answer.small


def test_an_audit_that_does_not_say_what_it_left_out_is_not_called_whole() -> None:
    assert audit_answer(audited(cell("at_baseline"), about=AboutAudit())).tone == "open"


# --- guarantees, names and steps -------------------------------------------------------------------------------------------------------


@given(st.floats(0.01, 30))
def test_a_guarantee_is_named_by_its_epsilon_with_what_it_bounds(epsilon: float) -> None:
    run = a_run(epsilon=epsilon, delta=1e-5, privacy_unit="sample", privacy_relation="add_remove", protection="none")
    answer = guarantee_of(run)
    assert answer.verdict.startswith(f"ε = {epsilon:.3g}")
    assert answer.tone == ("good" if epsilon <= 1 else "none" if epsilon <= 3 else "open")
    assert title([run]).endswith(f"20 clients, ε = {epsilon:.3g}")
    assert method_words(run.summary).endswith(f"ε = {epsilon:.3g}")


@pytest.mark.parametrize(("left", "words"), [(3.25, "ε = 3.25."), (None, "nothing is guaranteed.")])
def test_a_guarantee_by_shared_noise_says_what_colluding_clients_leave_of_it(left: float | None, words: str) -> None:
    private: dict[str, Any] = {"epsilon": 1.0, "delta": 1.4e-5, "privacy_unit": "client", "privacy_relation": "add_remove"}
    text = guarantee_of(a_run(**private, epsilon_if_colluding={"10%": left, "50%": None})).text
    assert text.endswith(f"if 10 % of a sum tell the server theirs, {words}")
    assert "δ = 1.4e-05" in text  # not less than it is
    assert "noise" not in guarantee_of(a_run(**private, epsilon_if_colluding=None)).text


def test_without_epsilon_nothing_is_guaranteed() -> None:
    four = answers([a_run()])
    assert four[3].verdict == "No ε"
    assert in_short([a_run()], four).endswith("No guarantee.")


def test_kinds_of_runs_follow_from_what_they_sent_and_sought() -> None:
    assert [kind_of(a_run(name).summary) for name in ("clusters", "one", "alone")] == ["clusters", "no groups", "alone"]


@given(st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_at_most_three_steps_each_with_a_command(leaking: bool, short: bool, changed: bool, several: bool) -> None:
    remedy = {"one": ("encrypted comparison", ('protection.gram=["ckks"]',))}
    about = AboutAudit((), ("one",), ("two",), remedy)
    run = a_run(audit=audited(cell("leaks" if leaking else "at_baseline"), about=about), rounds=2 if short else 3)
    run = replace(run, problems=("summary.json: differs",) if changed else ())
    runs = [run, *([a_run("one", 0.5)] if several else [])]
    steps = before_relying(Path("runs"), runs, answers(runs))
    assert 1 <= len(steps) <= MOST_STEPS
    assert all(step.command.startswith("cflpriv ") for step in steps)
    assert any("cflpriv verify runs/clusters" in step.command for step in steps) == changed
    if leaking and not short and not changed:
        assert """--set 'protection.gram=["ckks"]'""" in steps[0].command
    framed = [replace(one, config={**one.config, "data": {"source": "frame"}}) for one in runs]
    for step in before_relying(Path("runs"), framed, answers(framed)):  # no command has rows that were in memory
        assert step.command.startswith(("cflpriv verify ", "ClusteredFL.from_config(", "fl.audit(")), step


@given(st.booleans(), st.booleans())
def test_no_command_repeats_a_run_as_it_was(first: bool, second: bool) -> None:
    """A leak without a remedy gets no command."""
    remedies = {
        name: ("secure sums", ('protection.sum="secagg"',)) if has_remedy else ("no setting that the configuration accepts", ())
        for name, has_remedy in (("one", first), ("two", second))
    }
    leaks = audited(cell("leaks", "released"), cell("leaks", "server", "two"), about=AboutAudit((), ("one", "two"), (), remedies))
    runs = [a_run(audit=leaks)]
    commands = [step.command for step in before_relying(Path("runs"), runs, answers(runs))]
    assert all("--set" in command for command in commands if command.startswith("cflpriv run"))
    assert any("-protected" in command for command in commands) == (first or second)


@pytest.mark.parametrize("left", [1, 2])
def test_numbers_of_one_have_no_plural(left: int) -> None:
    about = AboutAudit((), ("one",), ("two", "three")[:left])
    run = a_run(audit=replace(audited(cell("at_baseline"), about=about), group_names={0: "upright", 1: "turned by 90°"}))
    run = replace(run, measured={"truth": {"0": 0, "1": 1}, "labels": {"0": 0, "1": 1}})
    (step,) = [step for step in before_relying(Path("runs"), [run], answers([run])) if "audit" in step.command]
    assert ("the other attack:" in step.words) == (left == 1)
    assert not re.search(r"\b1 (attacks|clients|seeds|figures)\b", " ".join(f"{one.text} {one.small}" for one in answers([run])))


@given(st.sampled_from(["leaks", "at_baseline"]), st.booleans(), st.booleans())
def test_doubt_of_changed_files_comforts_nobody(status: str, own: bool, others: bool) -> None:
    """Where the subject's files were changed no answer is good, and a leak stays a leak; of other runs only the comparison is doubtful."""
    subject = replace(a_run(audit=audited(cell(status))), problems=("summary.json: differs",) if own else ())
    runs = [subject, replace(a_run("one", 0.5), problems=("rounds.jsonl: differs",) if others else ())]
    plain, shown = answers(runs), doubted(answers(runs), runs)
    assert ["may be false" in answer.small for answer in shown] == [own or others, own, own, own]
    for before, after in zip(plain, shown, strict=True):
        assert (after.tone == "bad") == (before.tone == "bad")
        assert after == before or after.tone in ("bad", "open")
