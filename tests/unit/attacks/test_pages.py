"""The pages on attacks name what exists: links, headings, commands, attacks, and the constants that they quote."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from checkout import ROOT

from cflpriv.attacks import ATTACKS, BUDGETS, key_recovery
from cflpriv.attacks.compared import gram_updates
from cflpriv.attacks.dp import dp_audit
from cflpriv.attacks.figures import significance
from cflpriv.attacks.figures.family import AIMED
from cflpriv.attacks.foreign.foreign_audit import FOREIGN_ATTACKS
from cflpriv.attacks.inversion import gradient_inversion
from cflpriv.attacks.inversion.spear import MOST_SAMPLES
from cflpriv.attacks.membership import membership_audit
from cflpriv.attacks.membership.membership_gradients import MOST_PARAMETERS
from cflpriv.attacks.membership.membership_shadows import MOST_ASKED

PAGES = sorted((ROOT / "docs" / "attacks").glob("*.md"))
TEXT = {page.name: " ".join(page.read_text(encoding="utf-8").split()) for page in PAGES}


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links, as GitHub makes them."""
    lines = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S).splitlines()
    heads = [re.sub(r"[`*]", "", line.lstrip("#").strip()).lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}


def commands() -> list[str]:
    """Every command of the pages: in a fence, indented, or between backticks in a line."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"`((?:[A-Z_]+=\S+ )?(?:python|pytest|cflpriv) [^`]+)`", text)
    return found + [line.strip() for line in text.splitlines() if re.match(r"    (?:[A-Z_]+=\S+ )?(?:python|pytest|cflpriv) ", line)]


def test_links_lead_somewhere() -> None:
    pointing = [*PAGES, ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = 0
    for page in pointing:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if "://" in target or (page not in PAGES and "attacks" not in there.parts):
                continue
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}"
            found += 1
    assert found > 30


@pytest.mark.parametrize("command", commands())
def test_commands_name_what_exists(command: str) -> None:
    """Files, options and tests; the tests and examples themselves run elsewhere."""
    words = shlex.split(re.sub(r"^[A-Z_]+=\S+ ", "", command))
    if "pytest" in words[:3]:
        files = [word for word in words if word.endswith(".py")]
        tests = [
            node.name
            for file in files
            for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        assert tests
        if "-k" in words:
            assert any(words[words.index("-k") + 1] in name for name in tests), command
        if "-m" in words[words.index("pytest") :]:
            assert all("pytest.mark.slow" in (ROOT / file).read_text(encoding="utf-8") for file in files), command
    elif words[1] == "-m":
        assert (ROOT / "benchmarks" / "__main__.py").read_text(encoding="utf-8").count(words[3]), command
    elif words[0] == "python":
        text = (ROOT / words[1]).read_text(encoding="utf-8")
        assert all(f'"{word}"' in text for word in words if word.startswith("--")), command
    elif "--attacks" in words and words[words.index("--attacks") + 1] not in ("A,B]", "NAME"):
        assert set(words[words.index("--attacks") + 1].split(",")) <= set(ATTACKS), command


def test_every_attack_has_a_heading_and_every_heading_its_five_lines() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    sections = re.split(r"^#+ ", text, flags=re.M)
    named = {match[1]: section for section in sections if (match := re.match(r"[^\n]*\(`(\w+)`\)", section))}
    assert set(ATTACKS) <= set(named)
    for name in ATTACKS:
        for part in ("Needs", "Proves", "Figure", "Limits"):
            assert f"**{part}.**" in named[name], f"{name}: {part}"
    assert set(FOREIGN_ATTACKS) <= set(re.findall(r"^\| `(\w+)` \|", text, flags=re.M))


def test_constants_are_those_of_the_code() -> None:
    readme, others = TEXT["README.md"], " ".join(TEXT.values())
    assert f"at most {significance.RATE:.1%} of audits".replace("%", " %") in readme
    assert f"at most {AIMED:.0%} of cases".replace("%", " %") in readme
    assert f"power** is {significance.ENOUGH:.1f}".replace("0.", ".") in readme
    assert significance.FEWEST_SCORES == 3
    assert "fewer than three scores" in readme
    for name, budget in BUDGETS.items():
        assert f"`{name}`: {f'{budget.seeds - 1} more' if budget.seeds > 1 else 'none'}" in readme
    assert f"{BUDGETS['standard'].shadows} shadow federations (`thorough`: {BUDGETS['thorough'].shadows})" in others
    assert f"{gram_updates.OWN_PER_SET} clients of its own for each label set" in others
    assert f"Below {key_recovery.ABSTAIN_BELOW} the attacker abstains" in others
    assert f"At most {MOST_SAMPLES} samples ({gradient_inversion.MOST_IMAGES} for the optimisation) in one batch" in others
    assert f"and {gradient_inversion.MOST_STEPS} local steps" in others
    assert f"at most {MOST_ASKED} pairs a model" in others
    assert f"more than {MOST_PARAMETERS:,} parameters" in others
    assert f"Margins: AUC {membership_audit.MARGIN['auc']}, TPR {membership_audit.MARGIN['tpr']}".replace("0.", ".") in others
    assert f"| {str(dp_audit.ENOUGH).removeprefix('0')} or more | `at_baseline` |" in others
    assert f"estimated from {dp_audit.REPETITIONS} repetitions" in others


def test_the_python_example_compiles_and_names_what_is_public() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "attacks" / "other_systems.md").read_text(encoding="utf-8"), flags=re.S)
    assert len(code) == 1
    compile(code[0], "other_systems.md", "exec")
