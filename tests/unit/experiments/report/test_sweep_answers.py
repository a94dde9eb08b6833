"""The first screen of a sweep: ties, groups, leaks and their absence in words, reasons, and commands for what to do next."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflpriv.experiments.report.answer import LONGEST_SHOWN, headed
from cflpriv.experiments.report.audit_words import is_validated
from cflpriv.experiments.report.front import Result, attack_points, headline, headline_rows
from cflpriv.experiments.report.front_pictures import epsilons_of
from cflpriv.experiments.report.sweep_answers import best_served, groups_found, sweep_answers, sweep_in_short, sweep_steps, useless_of
from cflpriv.experiments.report.sweep_report import warned
from cflpriv.experiments.sweep.sweep import Sweep, parse_sweep

SWEEP = parse_sweep(
    {
        "training": {"weights": "equal"},
        "run": {"record": "full"},
        "sweep": {"algorithms": ["crossfit", "fedavg"], "protections": ["none", "haar"], "seeds": [0, 1], "attacks": ["label_inference"]},
    }
)
SAFE_WORDS = ("safe", "secure", "no leak.", "nothing leaks", "nothing to learn")


def label_figure(status: str = "not_validated", **more: Any) -> dict[str, Any]:
    known = {"value": 0.06, "baseline": 0.05, "reference": 0.06, "margin": 0.1, "lower_is_better": True, "k_known": 0, "seeds": [0, 1]}
    return {"attack": "label_inference", "metric": "histogram_l1", "adversary": "server", "status": status, **known, **more}


def results(scores: dict[str, float], *figures: dict[str, Any], left: tuple[str, ...] = ("membership",), **more: Any) -> list[Result]:
    """Runs whose balanced accuracy is that of their setting, give or take a thousandth by seed."""
    found = []
    for one in SWEEP.cells:
        name = one.setting.algorithm
        summary = {
            "algorithm": name, "clusters": 2 if name == "crossfit" else 1, "upload_bytes": 9, "ari": None, "epsilon": None,
            "knowledge": "none: a test" if name == "crossfit" else "none: no groups are formed", "accuracy_mean": 0.9,
            "balanced_accuracy": scores[f"{name} {one.setting.protection}"] + 0.001 * one.seed, "warnings": [], **more,
        }  # fmt: skip
        found.append(Result(one, summary, figures, left))
    return found


EQUAL = {"crossfit none": 0.8, "crossfit haar": 0.8, "fedavg none": 0.7, "fedavg haar": 0.6}


def answered(found: list[Result]) -> tuple[str, str]:
    """The whole first screen, and its sentence."""
    first = headline(attack_points(found))
    four = sweep_answers(found, first)
    short = sweep_in_short(found, headline_rows(found, first), first)
    return " ".join(f"{one.verdict}. {one.text} {one.small}" for one in four), short


def test_settings_that_print_the_same_best_score_are_named_together() -> None:
    found = results(EQUAL)
    served = best_served(found)
    assert served is not None
    assert [setting.name for setting in served.best] == ["crossfit · none", "crossfit · haar"]
    assert (served.score, served.value, served.undecided) == ("balanced_accuracy", "80.0 %", ())
    words, short = answered(found)
    assert "Crossfit · none and crossfit · haar: balanced accuracy 80.0 %, each." in words
    assert "Highest balanced accuracy: crossfit · none and crossfit · haar, 80.0 %." in short


@given(st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_no_setting_that_is_not_worse_for_sure_is_passed_over(values: list[float]) -> None:
    found = results(dict(zip(EQUAL, values, strict=True)))
    served = best_served(found)
    assert served is not None
    named = {f"{setting.algorithm} {setting.protection}" for setting in (*served.best, *served.undecided)}
    assert {name for name, value in zip(EQUAL, values, strict=True) if value == max(values)} <= named
    one_seed = best_served([result for result in found if result.cell.seed == 0])
    assert one_seed is not None
    assert len(one_seed.best) + len(one_seed.undecided) == 4, "one seed shows no difference"


def test_settings_on_one_point_of_the_front_are_named_together() -> None:
    """Scores that differ by less than what is printed are one point, whoever is a hair's breadth ahead."""
    hair = {name: 0.8001 + 0.00005 * place for place, name in enumerate(EQUAL)}
    found = results(hair, label_figure("leaks", value=0.3))
    first = headline(attack_points(found))
    marks = headline_rows(found, first)
    assert [mark["on_front"] for mark in marks] == [True] * 4
    short = sweep_in_short(found, marks, first)
    assert "crossfit · none, crossfit · haar, fedavg · none and fedavg · haar (one point)" in short


@pytest.mark.parametrize(
    ("low", "more", "expected"),
    [
        (0.28, {}, True),
        (0.19, {}, False),  # the interval holds half of the unprotected gain
        (0.28, {"power_low": 0.0}, False),  # planted leaks were missed
        (0.28, {"reference": 0.3}, False),
        (None, {}, False),
    ],
)
def test_an_inconclusive_figure_is_validated_where_half_of_the_unprotected_gain_is_excluded(
    low: float | None, more: dict[str, Any], expected: bool
) -> None:
    figure = {"value": 0.3, "low": low, "high": 0.32, "baseline": 0.3, "reference": 0.1, "lower_is_better": True}
    assert is_validated([{"status": "inconclusive", **figure, **more}]) is expected
    mirrored = {
        **figure,
        "low": 0.68,
        "high": None if low is None else 1 - low,
        "baseline": 0.7,
        "reference": 0.9,
        "lower_is_better": False,
    }
    mirrored |= {key: 0.7 if key == "reference" else value for key, value in more.items()}
    assert is_validated([{"status": "inconclusive", **mirrored}]) is expected
    assert not is_validated([{"status": "not_validated", **figure}])


@pytest.mark.parametrize("status", ["leaks", "at_baseline", "inconclusive", "not_validated"])
def test_a_sweep_and_an_audit_agree_on_what_is_validated(status: str) -> None:
    found = results(EQUAL, label_figure(status))
    first = headline(attack_points(found))
    point = attack_points(found)[(*label_key(), 0)][0]
    assert point.validated == is_validated([label_figure(status)]) == (status in ("leaks", "at_baseline"))
    assert ("There is no front" in sweep_in_short(found, headline_rows(found, first), first)) == (not point.validated)
    card = sweep_answers(found, first)[2]
    assert (card.verdict == "Not known") == (not point.validated)
    if status == "inconclusive":
        assert "neither a leak nor its absence" in card.text
        assert "--only" not in steps_of(found)[0].command, "all settings are open"


def test_a_step_attacks_the_settings_that_it_names_alone() -> None:
    found = [
        replace(one, audit=[label_figure("leaks" if one.cell.setting.protection == "none" else "inconclusive")]) for one in results(EQUAL)
    ]
    step = steps_of(found)[0]
    numbers = [number for number, cell in enumerate(SWEEP.cells, 1) if cell.setting.protection == "haar"]
    assert (
        step.command
        == f"cflpriv audit runs/front{''.join(f' --only {number}' for number in numbers)} --attacks label_inference --budget thorough"
    )


def test_what_seeds_do_not_tell_apart_is_said() -> None:
    found = results({**EQUAL, "crossfit haar": 0.795})
    noisy = [
        replace(one, summary={**one.summary, "balanced_accuracy": one.summary["balanced_accuracy"] + 0.02 * one.cell.seed})
        if one.cell.setting.protection == "haar"
        else one
        for one in found
    ]
    answer = sweep_answers(noisy, None)[0]
    assert (answer.tone, answer.verdict) == ("open", "crossfit · haar")
    assert "2 seeds cannot tell settings 1" in answer.small


def test_settings_that_learned_nothing_are_not_called_best() -> None:
    found = results(EQUAL, by_class={"counts": [[90, 0], [10, 0]], "majority": 0})
    assert len(useless_of(found)) == 4
    assert (sweep_answers(found, None)[0].tone, sweep_answers(found, None)[0].verdict) == ("bad", "Learned nothing")
    half = [one if one.cell.setting.algorithm == "fedavg" else replace(one, summary={**one.summary, "by_class": None}) for one in found]
    assert "Learned nothing: settings 3 and 4." in sweep_answers(half, None)[0].small


def test_groups_are_counted_by_run() -> None:
    found = results(EQUAL)
    assert [groups_found([one]) for one in found[:1] + found[-1:]] == ["2", "none sought"]
    assert sweep_answers(found, None)[1].verdict == "Two, in every run"
    mixed = [*found[:3], replace(found[3], summary={**found[3].summary, "clusters": 3}), *found[4:]]
    assert sweep_answers(mixed, None)[1].verdict == "2 to 3, by run"
    assert groups_found(mixed[2:4]) == "2 or 3"
    true = [replace(one, summary={**one.summary, "ari": 0.2}) for one in found]
    assert (sweep_answers(true, None)[1].tone, "0.20" in sweep_answers(true, None)[1].small) == ("open", True)


@pytest.mark.parametrize(
    ("figure", "reason"),
    [
        ({}, "The clients' label shares are alike, so this attack can show nothing: a guess without a view errs by 0.05 only"),
        ({"attack": "membership", "metric": "auc", "lower_is_better": False, "baseline": 0.95}, "already reaches 0.95 (margin 0.1)"),
        ({"baseline": 0.9, "reference": 0.85}, "The attack does not clearly work unprotected: 0.85, without a view 0.90."),
        ({"baseline": 0.9, "reference": 0.85, "seeds": [0]}, "An audit with one seed is weak."),
    ],
)
def test_a_sweep_without_a_front_says_why_and_what_to_do(figure: dict[str, Any], reason: str) -> None:
    found = results(EQUAL, label_figure(**figure))
    words, short = answered(found)
    assert reason in words
    assert reason in short
    assert "There is no front" in short
    assert not [safe for safe in SAFE_WORDS if safe in (words + short).lower()]
    steps = steps_of(found)
    assert steps[0].command == "cflpriv audit runs/front"
    assert "other 1 attack" in steps[0].words


def steps_of(found: list[Result], sweep: Sweep = SWEEP, unmade: int = 0) -> list[Any]:
    return sweep_steps("runs/front", sweep, found, headline(attack_points(found)), unmade)


def test_steps_follow_from_what_is_missing() -> None:
    assert "--set run.record=full" not in steps_of(results(EQUAL))[0].command
    headers = parse_sweep({"sweep": {"algorithms": ["fedavg"]}})
    assert steps_of(results(EQUAL), headers)[0].command.endswith("--set run.record=full --out runs/front-recorded")
    assert steps_of(results(EQUAL), unmade=2)[0].command == "cflpriv sweep runs/front/sweep.toml --out runs/front"
    quick = replace(SWEEP, budget="quick")
    again = "cflpriv audit runs/front --attacks label_inference --budget"
    assert steps_of(results(EQUAL, label_figure(), left=()), quick)[0].command == f"{again} standard"
    assert steps_of(results(EQUAL, label_figure(), left=()))[0].command == f"{again} thorough"
    assert steps_of(results(EQUAL, label_figure(seeds=list(range(5))), left=()))[0].command == ""
    protected = [
        replace(one, audit=[label_figure("leaks" if one.cell.setting.protection == "none" else "not_validated")]) for one in results(EQUAL)
    ]
    assert steps_of(protected)[0].words.startswith("Attack the runs of settings 2 and 4 with more seeds")
    front = steps_of(results(EQUAL, label_figure("leaks")))
    assert [step.command for step in front] == [
        "cflpriv sweep runs/front/sweep.toml --set 'sweep.seeds=[0, 1, 2, 3, 4]' --out runs/front-5-seeds"
    ]
    assert all(len(steps_of(results(EQUAL, *figures), unmade=1)) <= 3 for figures in ((), (label_figure(),)))


def test_leaks_are_counted_by_setting_and_the_rest_is_not_called_safe() -> None:
    found = [
        replace(one, audit=[label_figure("leaks" if one.cell.setting.protection == "none" else "at_baseline")]) for one in results(EQUAL)
    ]
    words, short = answered(found)
    assert (
        "Leaks in 2 of 4. By label inference by the server (L1 of label histogram): settings 1 and 3. Not shown in settings 2 and 4."
        in words
    )
    assert "Best trade-offs with label inference" in short
    calm = results(EQUAL, label_figure("at_baseline"))
    assert sweep_answers(calm, headline(attack_points(calm)))[2].tone == "open"
    assert not [safe for safe in SAFE_WORDS if safe in " ".join(answered(calm)).lower()]


def test_a_guarantee_names_its_settings() -> None:
    found = [
        replace(one, summary={**one.summary, "epsilon": 4.0 if one.cell.setting.protection == "haar" else None}) for one in results(EQUAL)
    ]
    answer = sweep_answers(found, None)[3]
    assert (answer.verdict, answer.text) == ("ε = 4", "By settings 2 and 4, each run alone. No ε: settings 1 and 3.")
    assert sweep_answers(results(EQUAL), None)[3].verdict == "No ε"
    assert epsilons_of(found) == [4.0]


def test_warnings_that_differ_by_numbers_are_one() -> None:
    lines = [f"the model predicts class 'no' for all {100 + i} test samples: {'it learned nothing ' * 9}" for i in range(8)]
    found = [replace(one, summary={**one.summary, "warnings": [line]}) for one, line in zip(results(EQUAL), lines, strict=True)]
    (one,) = warned(found)
    assert one["settings"] == [1, 2, 3, 4]
    assert one["head"] == "the model predicts class 'no' for all 100 test samples"


@given(st.text(min_size=1), st.integers(0, 300))
def test_a_long_warning_is_cut_between_clauses_and_nothing_of_it_is_lost(words: str, more: int) -> None:
    text = words + ": " + "word " * more
    head, rest = headed(text)
    assert text.startswith(head)
    assert text.endswith(rest)
    assert len(text) - len(head) - len(rest) <= 2 or not set(text[len(head) : len(text) - len(rest)]) - set(" :;.")
    assert rest == "" or len(text) > LONGEST_SHOWN


def test_the_page_begins_with_a_figure_that_tells_settings_apart() -> None:
    calm = label_figure("at_baseline")
    found = [
        replace(
            result, audit=[calm, label_figure("leaks" if result.cell.setting.protection == "none" else "at_baseline", attack="membership")]
        )
        for result in results(EQUAL)
    ]
    first = headline(attack_points(found))
    assert first is not None
    assert first[0] == "membership"
    everywhere = [replace(result, audit=[label_figure("leaks"), *result.audit[1:]]) for result in found]
    assert headline(attack_points(everywhere)) == first
    single = [
        replace(result, audit=[calm, *([label_figure("leaks", attack="membership")] if result.cell.name == found[0].cell.name else [])])
        for result in results(EQUAL)
    ]
    assert headline(attack_points(single)) == first
    card = sweep_answers(single, (*label_key(), 0))[2]
    assert (card.tone, card.verdict) == ("bad", "Leaks in 1 of 4")
    assert card.text.startswith("By membership")
    doubtful = [
        replace(
            result,
            audit=[
                *result.audit,
                *([label_figure("leaks", attack="labels")] if result.cell.seed == 0 else [label_figure(attack="labels")]),
            ],
        )
        for result in single
    ]
    assert sweep_answers(doubtful, (*label_key(), 0))[2] == card, "a figure that is not validated names no leak"


def label_key() -> tuple[str, str, str]:
    figure = label_figure()
    return figure["attack"], figure["metric"], figure["adversary"]


@given(st.text("abc ", min_size=40, max_size=200), st.text("abc ", max_size=200), st.text("def", min_size=1, max_size=60))
def test_a_warning_is_never_shown_without_its_remedy(fact: str, reason: str, remedy: str) -> None:
    words = f"{fact}x: {reason}x; {remedy}"
    assert headed(words)[0].endswith(f"; {remedy}")
    assert headed(f"{fact}x; {remedy}")[0] == f"{fact}x; {remedy}"
