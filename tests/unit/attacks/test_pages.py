"""The pages on audits name what exists: links, commands, attacks, adversaries, statuses, files, and the constants that they quote."""

import ast
import csv
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from checkout import ROOT

from cflpriv.attacks import ADVERSARIES, ATTACKS, BUDGETS, attack_table, key_recovery
from cflpriv.attacks.dp import dp_audit
from cflpriv.attacks.figures import significance
from cflpriv.attacks.figures.family import AIMED
from cflpriv.attacks.figures.leakage import Cell
from cflpriv.attacks.figures.payloads import ENTRIES, OPENED
from cflpriv.attacks.figures.verdicts import RISKS
from cflpriv.attacks.foreign.foreign_audit import FOREIGN_ATTACKS
from cflpriv.attacks.inversion import gradient_inversion
from cflpriv.attacks.inversion.spear import MOST_SAMPLES
from cflpriv.attacks.membership.membership_shadows import MOST_ASKED
from cflpriv.experiments.report.audit_words import ORDER

DOCS = ROOT / "docs"
READING, TABLE = DOCS / "attacks" / "README.md", DOCS / "attacks" / "table.md"
FOREIGN = DOCS / "howto" / "audit_other_systems.md"
PAGES = (READING, TABLE, FOREIGN)
FIGURES = ("attack_figures.csv", "dp_figures.csv")
STUDIES = ("ckks_products", "false_folds")
"""What figures are of, besides the attacks of an audit: modules of `attacks/compared/`."""


def text(page: Path) -> str:
    return " ".join(page.read_text(encoding="utf-8").split())


def section(page: Path, heading: str) -> str:
    """The lines of a page under a heading, up to the next."""
    _, _, rest = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    assert rest, heading
    return rest.partition("\n## ")[0]


def first_cells(lines: str) -> list[str]:
    """The first cell of each row of a table below its head, without backticks."""
    rows = [line for line in lines.splitlines() if line.startswith("|")]
    return [re.sub(r"`", "", row.split("|")[1]).strip() for row in rows[2:]]


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links, as GitHub makes them."""
    lines = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S).splitlines()
    heads = [re.sub(r"[`*]", "", line.lstrip("#").strip()).lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}


def figures(name: str) -> list[dict[str, str]]:
    with (DOCS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def commands() -> list[str]:
    """Every command of the pages, in a fence, indented, or between backticks in a line, and of the figures."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    quoted = re.findall(r"`((?:[A-Z_]+=\S+ )?(?:python|pytest|cflpriv) [^`]+)`", pages)
    indented = [line.strip() for line in pages.splitlines() if re.match(r"    (?:[A-Z_]+=\S+ )?(?:python|pytest|cflpriv) ", line)]
    return sorted({*quoted, *indented, *(row["command"] for name in FIGURES for row in figures(name) if row["command"])})


def test_links_lead_somewhere() -> None:
    followed = 0
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if "://" in target or (page not in PAGES and "attacks" not in there.parts and there not in PAGES):
                continue
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}"
            assert anchor.isascii(), f"{page.name}: {target} has another name on the site"
            followed += 1
    assert followed > 20


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
    elif words[1:3] == ["-m", "benchmarks"]:
        assert (ROOT / "benchmarks" / "__main__.py").read_text(encoding="utf-8").count(words[3]), command
    elif words[1] == "-m":
        assert words[2] == attack_table.__name__, command
    elif words[0] == "python":
        script = (ROOT / words[1]).read_text(encoding="utf-8")
        assert all(f'"{word}"' in script for word in words if word.startswith("--")), command
    elif "--attacks" in words and words[words.index("--attacks") + 1] != "A,B]":
        assert set(words[words.index("--attacks") + 1].split(",")) <= set(ATTACKS), command


def test_the_table_of_attacks_is_up_to_date() -> None:
    page = attack_table.page()
    assert TABLE.read_text(encoding="utf-8") == page, "python -m cflpriv.attacks.attack_table > docs/attacks/table.md"
    assert first_cells(page) == ATTACKS.names()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert {row.count(" | ") for row in rows} == {6}
    for name, attack in ATTACKS.items():
        assert attack.limits.endswith("."), f"{name}: write its limits beside it, in attacks/__init__.py"
        assert attack.risk in RISKS or not attack.learns, name


def test_each_payload_part_of_the_table_has_words() -> None:
    read = [entry for entry in (*ENTRIES, OPENED) if entry.readers]
    assert {(entry.operation, entry.part.partition("|")[0]) for entry in read} == set(attack_table.READS)
    assert {name for entry in read for name in entry.readers} <= set(ATTACKS)
    assert attack_table.reads_of("influence", ATTACKS["influence"]) == "influence scores"


def test_adversaries_statuses_fields_and_keys_are_those_of_the_code() -> None:
    who = section(READING, "Who attacks")
    names = first_cells(who)
    assert {re.sub(r"\+\w.*", "+N", name) for name in names} == set(ADVERSARIES)
    default = re.search(r"default: (server, .*?), where", (DOCS / "reference" / "commands.md").read_text(encoding="utf-8"))
    assert default is not None
    rows = dict(zip(names, [line for line in who.splitlines() if line.startswith("| `")], strict=True))
    assert {name for name, row in rows.items() if not row.endswith("| no |")} == set(re.split(r", | and ", default[1]))
    assert first_cells(section(READING, "What a status means")) == list(ORDER)
    beside = {name for cell in first_cells(section(READING, "What stands beside a figure")) for name in cell.split(", ")}
    assert beside <= {field.name for field in fields(Cell)}
    assert re.findall(r"^- \*(.+?)\*", section(READING, "Risks"), flags=re.M) == list(RISKS)
    assert set(FOREIGN_ATTACKS) == set(first_cells(section(FOREIGN, "What is attempted")))


def test_constants_are_those_of_the_code() -> None:
    reading, foreign = text(READING), text(FOREIGN)
    assert f"at most {significance.RATE:.1%} of audits".replace("%", " %") in reading
    assert f"in at most {AIMED:.0%} of cases".replace("%", " %") in reading
    assert f"the power is at least {significance.ENOUGH:.1f}".replace("0.", ".") in reading
    assert f"noise of {dp_audit.FAULT} of the claimed size with power {dp_audit.ENOUGH}".replace("0.", ".") in reading
    privacy = text(DOCS / "differential_privacy.md")
    assert f"the noise been {dp_audit.FAULT} of what the claim needs".replace("0.", ".") in privacy
    assert f"from {dp_audit.REPETITIONS} repetitions" in privacy
    assert significance.FEWEST_SCORES == 3
    assert "fewer than three scores" in reading
    assert significance.FEWEST_COUNTS == 6
    assert "Yes-or-no figures need six clients" in foreign
    assert f"p < {significance.RATE}".replace("0.", ".") in foreign
    assert f"up to {BUDGETS['standard'].auxiliary:,} labelled samples" in reading
    for name, budget in BUDGETS.items():
        assert f"`{name}`: {f'{budget.seeds - 1} more' if budget.seeds > 1 else 'none'}" in reading
    inversion = ATTACKS["gradient_inversion"].limits
    assert f"At most {MOST_SAMPLES} samples ({gradient_inversion.MOST_IMAGES} for the optimisation) in one batch" in inversion
    assert f"and {gradient_inversion.MOST_STEPS} steps" in inversion
    assert f"More than {gradient_inversion.MOST_IMAGES} samples" in foreign
    assert f"below a confidence of {key_recovery.ABSTAIN_BELOW}" in ATTACKS["key_recovery"].limits
    assert f"At most {MOST_ASKED} pairs a model" in ATTACKS["membership"].limits


def test_measured_figures_are_numbers_of_attacks() -> None:
    rows = figures("attack_figures.csv")
    assert len(rows) > 100
    assert len({(row["attack"], row["setting"], row["figure"]) for row in rows}) == len(rows)
    for row in rows:
        assert row["attack"] in {*ATTACKS, *STUDIES}, row
        assert row["setting"], row
        assert row["figure"], row
        low, value, high = (float(row[key] or row["value"]) for key in ("low", "value", "high"))
        assert low <= value <= high, row
        assert not row["without_a_view"] or float(row["without_a_view"]) >= 0, row


def test_measured_figures_of_privacy_are_found_from_the_page_on_privacy() -> None:
    rows, page = figures("dp_figures.csv"), text(DOCS / "differential_privacy.md")
    assert len(rows) > 100
    assert len({(row["measurement"], row["setting"], row["epsilon"], row["figure"]) for row in rows}) == len(rows)
    assert [name for name in {row["measurement"] for row in rows} if f"`{name}`" not in page] == []
    for row in rows:
        assert row["setting"], row
        assert row["figure"], row
        assert not row["epsilon"] or float(row["epsilon"]) > 0, row
        low, value, high = (float(row[key] or row["value"]) for key in ("low", "value", "high"))
        assert low <= value <= high, row
        assert all((ROOT / path).exists() for path in re.findall(r"(?:examples|tests)/\S+", row["command"])), row


@pytest.mark.parametrize(("page", "most"), [(READING, 1800), (FOREIGN, 700)])
def test_pages_stay_short(page: Path, most: int) -> None:
    assert len(re.findall(r"\S+", re.sub(r"[|`#*-]", " ", page.read_text(encoding="utf-8")))) <= most


def test_the_python_example_compiles_and_names_what_is_public() -> None:
    code = re.findall(r"```python\n(.*?)```", FOREIGN.read_text(encoding="utf-8"), flags=re.S)
    assert len(code) == 1
    compile(code[0], FOREIGN.name, "exec")
