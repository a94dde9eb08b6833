"""The reference of configuration keys, the file that `cflpriv init` writes, and the editor schema follow from the declarations."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from command_line import in_process

from cflpriv.algorithms import ALGORITHMS
from cflpriv.data import build_population
from cflpriv.data.columns import Column
from cflpriv.errors import InputError
from cflpriv.experiments.config.config import load_config, parse_config
from cflpriv.experiments.config.config_reference import entries, explained, keys_of, page
from cflpriv.experiments.config.config_starter import begin_file, schema, starter
from cflpriv.experiments.run.run import prepare


def test_every_key_is_described() -> None:
    missing = [one.path for one in entries() if not one.key.meaning.endswith(".")]
    assert not missing, "declare what each key means: Annotated[type, Key('...')]"


def test_the_page_is_what_the_code_gives() -> None:
    again = "python -m cflpriv.experiments.config.config_reference > docs/configuration.md"
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == page(), again


def test_a_key_without_a_default_is_required() -> None:
    defaults = {entry.name: entry.default_text for entry in keys_of("data.columns", Column)}
    assert {name for name, default in defaults.items() if default == "required"} == {
        field.name for field in fields(Column) if field.default is MISSING and field.default_factory is MISSING
    }
    assert "<class" not in page()


def test_a_key_is_explained_by_its_name_or_with_its_section() -> None:
    text = explained("training.lr")
    assert text.startswith("training.lr\n")
    assert "> 0" in text
    assert explained("lr") == text
    assert {line for line in explained("beta").splitlines() if line.startswith("  algorithms")} == {
        "  algorithms: pacfl", "  algorithms: per_fedavg",
    }  # fmt: skip
    assert "training.epochs" in explained("training")
    with pytest.raises(InputError, match=r"did you mean .*'training\.lr_decay'"):
        explained("training.lr_decya")


@pytest.mark.slow
def test_commands_write_a_file_once_and_name_what_they_do_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    assert in_process(monkeypatch, "init", str(file), "--algorithm", "ifca") == 0
    assert load_config(file).algorithm["name"] == "ifca"
    assert in_process(monkeypatch, "init", str(file)) == 2
    assert "exists" in capsys.readouterr().err
    assert in_process(monkeypatch, "init", "--algorithm", "pacffl") == 2
    assert "did you mean 'pacfl'" in capsys.readouterr().err
    assert in_process(monkeypatch, "explain", "learning") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert in_process(monkeypatch, "explain", "lr") == 0
    assert "Learning rate" in capsys.readouterr().out
    assert in_process(monkeypatch, "init", "--schema") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(schema()))


def test_a_new_file_leaves_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml.part").write_text("theirs", encoding="utf-8")
    begin_file(tmp_path / "mine.toml", "ifca")
    assert (tmp_path / "mine.toml.part").read_text(encoding="utf-8") == "theirs"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_new_configuration_is_of_its_algorithm_and_can_start(name: str) -> None:
    config = parse_config(tomllib.loads(starter(name)))
    assert config.algorithm == {"name": name}
    population = build_population(config.data)
    assert config.algorithm_for(population).name == ("ifca" if name == "hypcluster" else name)


def test_each_default_that_is_commented_out_can_be_switched_on() -> None:
    lines = starter("cfl").splitlines()
    hidden = [i for i, line in enumerate(lines) if re.match(r"#\w+ = ", line)]
    assert len(hidden) > 90
    for i in hidden:
        tree = tomllib.loads("\n".join([*lines[:i], lines[i][1:], *lines[i + 1 :]]))
        parse_config(tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_new_configuration_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(starter(name), encoding="utf-8")
    assert in_process(monkeypatch, "run", str(file), "--out", str(tmp_path / "run")) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["rounds"] == 20


# --- the editor schema ----------------------------------------------------------------------------------------------------------------


def problems(value: Any, rule: Mapping[str, Any], at: str = "") -> list[str]:
    """What a JSON value breaks of a schema, for the words that ours uses."""
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
    kind = rule.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{at}: is no {kind}"]
    found = [f"{at}: not allowed"] if value not in rule.get("enum", [value]) or rule.get("const", value) != value else []
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, above, high, below = (rule.get(word) for word in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))
        outside = (low is not None and value < low, above is not None and value <= above)
        found += [f"{at}: out of range"] if any((*outside, high is not None and value > high, below is not None and value >= below)) else []
    if rule.get("anyOf") and all(problems(value, part, at) for part in rule["anyOf"]):
        found += [f"{at}: none of the ranges"]
    if isinstance(value, list):
        fixed = rule.get("prefixItems", [])
        for i, one in enumerate(value):
            found += problems(one, fixed[i] if i < len(fixed) else rule.get("items") or {}, f"{at}[{i}]")
    if isinstance(value, dict):
        known = rule.get("properties", {})
        missing = [name for name in rule.get("required", ()) if name not in value]
        found += [f"{at}.{name}: is missing" for name in missing]
        for name, one in value.items():
            if name in known:
                found += problems(one, known[name], f"{at}.{name}")
            elif rule.get("additionalProperties") is False:
                found.append(f"{at}.{name}: is not a key")
        for part in rule.get("allOf", ()):
            found += problems(value, part["then"], at) if not problems(value, part["if"], at) else []
    return found


def test_examples_follow_the_schema() -> None:
    rule = schema()
    for path in (*(ROOT / "examples").glob("*.toml"), *(ROOT / "examples" / "sweeps").glob("*.toml")):
        assert not problems(tomllib.loads(path.read_text(encoding="utf-8")), rule), path.name


@pytest.mark.parametrize(
    "tree",
    [
        {"training": {"lr": "fast"}}, {"training": {"lr": 0}}, {"training": {"learning_rate": 0.1}}, {"traning": {}},
        {"algorithm": {"name": "fedavg", "p": 3}}, {"algorithm": {"p": 0}}, {"data": {"label_swaps": [[0, "one"]]}},
        {"data": {"label_swaps": [[0, -1]]}}, {"data": {"groups": [[-1]]}}, {"run": {"evaluate_clients": 1}},
    ],
)  # fmt: skip
def test_the_schema_refuses_what_the_package_refuses(tree: dict[str, Any]) -> None:
    assert problems(tree, schema())
    with pytest.raises(InputError):
        prepare(parse_config(tree))
