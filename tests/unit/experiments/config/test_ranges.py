"""Ranges are stated where a key is declared and enforced there alone: by `parse_config`, and by what is made from Python."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np
import pytest

from cflpriv.algorithms import ALGORITHMS
from cflpriv.contract.operations import Sampling
from cflpriv.contract.protection import Protection
from cflpriv.data import PARTITIONS, DataSpec
from cflpriv.engine import Engine
from cflpriv.engine.models import MODELS, Model, register_model
from cflpriv.errors import InputError
from cflpriv.experiments.config.config import SECTIONS, Config, parse_config
from cflpriv.experiments.config.config_reference import Entry, keys_of
from cflpriv.keys import Key, check_ranges, ranged
from cflpriv.protocols.ckks import PARAMETERS
from cflpriv.tasks.training import Train
from cflpriv.transports.memory import Faults

TRAIN = Train(Model("linear", (4,), 2))
FREE = {"seed", "anchor_seed", "label_range", "rotations", "label_shifts", "feature_mean", "value_range"}
"""Keys whose numbers may be any."""


@dataclass(frozen=True)
class Declared:
    """A key of a section, or of one algorithm."""

    entry: Entry
    make: Callable[..., Any]
    algorithm: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.entry.path, self.algorithm)))

    def tree(self, value: Any) -> dict[str, Any]:
        """A configuration in which the key has a value."""
        return {self.entry.section: {**({"name": self.algorithm} if self.algorithm else {}), self.entry.name: value}}

    def error(self, value: Any) -> str:
        """The refusal of a value, or an empty string."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parse_config(self.tree(value), "x.toml")
        except InputError as error:
            return str(error)
        return ""


def leaves(hint: Any) -> set[Any]:
    """The plain types that a type is made of."""
    inner = get_args(hint) if get_origin(hint) in (Union, UnionType, tuple) else ()
    return set().union(*(leaves(part) for part in inner if part is not ...)) if inner else {hint}


def numbers() -> Iterator[Declared]:
    for section, kind in SECTIONS.items():
        yield from (Declared(entry, kind) for entry in keys_of(section, kind) if leaves(entry.hint) & {int, float})
    for name, spec in ALGORITHMS.items():
        entries = keys_of("algorithm", spec.make)
        yield from (Declared(entry, spec.make, name) for entry in entries if leaves(entry.hint) & {int, float})


NUMBERS = list(numbers())


def valued(hint: Any, number: Any) -> Any:
    """A TOML value of a type with this number in it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return valued(next(part for part in inner if part is not NoneType), number)
    if origin is tuple:
        return [valued(part, number) for part in inner if part is not ...]
    return "word" if hint is str else number


def ends(declared: Declared) -> tuple[list[float], list[float]]:
    """Numbers just outside the stated range, and those just inside it, by its own text."""
    whole = float not in leaves(declared.entry.hint)
    outside: list[float] = []
    inside: list[float] = []
    for low, low_in, high, high_in in declared.entry.key.intervals:
        for end, belongs, away in ((low, low_in, -math.inf), (high, high_in, math.inf)):
            if math.isfinite(end):
                step = math.copysign(1, away)
                out, within = (end + step, end - step) if whole else (math.nextafter(end, away), math.nextafter(end, -away))
                outside.append(out if belongs else end)
                inside.append(end if belongs else within)
    kind = int if whole else float
    return [kind(number) for number in outside], [kind(number) for number in inside]


def special(declared: Declared) -> tuple[float, ...]:
    """Numbers that are not finite, without the end of a range that says that it belongs to it."""
    return (math.nan, -math.inf, *(() if declared.entry.key.range.endswith("inf]") else (math.inf,)))


def test_the_keys_are_there() -> None:
    assert len(NUMBERS) > 150
    assert {"data", "model", "training", "algorithm", "protection", "privacy", "run"} == {declared.entry.section for declared in NUMBERS}


@pytest.mark.parametrize("declared", NUMBERS, ids=str)
def test_a_number_has_a_range_that_its_default_is_in(declared: Declared) -> None:
    key, default = declared.entry.key, declared.entry.default
    assert bool(key.range) != (declared.entry.name in FREE)
    assert isinstance(default, tuple | NoneType) or key.contains(default)


@pytest.mark.parametrize("declared", NUMBERS, ids=str)
def test_values_outside_the_range_are_refused_by_name(declared: Declared) -> None:
    outside, _ = ends(declared)
    assert outside or declared.entry.name in FREE
    for number in (*outside, *(special(declared) if float in leaves(declared.entry.hint) else ())):
        value = valued(declared.entry.hint, number)
        error = declared.error(value)
        assert error.startswith(f"x.toml: {declared.entry.path} = {value!r}: expected "), error
        assert error.endswith(declared.entry.key.range_text), error
        assert "\n" not in error


@pytest.mark.parametrize("declared", NUMBERS, ids=str)
def test_values_of_another_type_are_refused_by_name(declared: Declared) -> None:
    for number in (True, "many", *((math.nan, math.inf, 1.5) if float not in leaves(declared.entry.hint) else ())):
        value = valued(declared.entry.hint, number)
        assert f"{declared.entry.name} = {value!r}: " in declared.error(value)


@pytest.mark.parametrize("declared", NUMBERS, ids=str)
def test_ends_of_the_range_are_not_refused_by_it(declared: Declared) -> None:
    for number in ends(declared)[1]:
        value = valued(declared.entry.hint, number)
        assert not declared.error(value).startswith(f"x.toml: {declared.entry.path} = {value!r}: expected ")


@pytest.mark.parametrize("declared", NUMBERS, ids=str)
def test_what_is_made_from_python_refuses_the_same(declared: Declared) -> None:
    arguments = (TRAIN,) if declared.algorithm else ()
    for number in (*ends(declared)[0], *special(declared), True):
        value = valued(declared.entry.hint, number)
        with pytest.raises(InputError, match=rf"^{declared.entry.section}\.{declared.entry.name} = .*: expected"):
            declared.make(*arguments, **{declared.entry.name: tuple(value) if isinstance(value, list) else value})


WAYS: list[tuple[str, str, Any]] = [
    *(("data", "partition", name) for name in PARTITIONS), *(("privacy", "unit", unit) for unit in ("none", "sample", "client")),
    *(("protection", "sum", name) for name in ("none", "haar", "secagg")), *(("model", "name", name) for name in MODELS),
]  # fmt: skip


@pytest.mark.parametrize(("section", "key", "way"), WAYS)
def test_ranges_hold_whether_or_not_a_feature_is_on(section: str, key: str, way: str) -> None:
    for declared in NUMBERS:
        for number in ends(declared)[0] if declared.entry.section == section else ():
            value = valued(declared.entry.hint, number)
            with pytest.raises(InputError, match=rf"x.toml: {section}\.{declared.entry.name} = .*: expected"):
                parse_config({section: {key: way, declared.entry.name: value}}, "x.toml")


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"privacy": {"signature_share": 1.0}}, "privacy.signature_share = 1.0: expected a number in (0, 1)"),
        ({"privacy": {"delta": 2}}, "privacy.delta = 2.0: expected a number in [0, 1)"),
        ({"protection": {"ckks_ring": -1}}, "protection.ckks_ring = -1: expected an integer, 0 or 4096 or 8192"),
        ({"protection": {"buckets": 2}}, "protection.buckets = 2: expected an integer, 0 or ≥ 3"),
        ({"training": {"lr": math.inf}}, "training.lr = inf: expected a finite number > 0"),
        ({"training": {"rounds": -1}}, "training.rounds = -1: expected an integer ≥ 0"),
        ({"data": {"feature_std": [1.0, 0.0]}}, "data.feature_std = [1.0, 0.0]: expected finite numbers > 0"),
        ({"data": {"sources": [["mnist", 0]]}}, "data.sources = [['mnist', 0]]: expected integers ≥ 1"),
        ({"algorithm": {"beta": math.nan}}, "algorithm.beta = nan: expected a number in [0, inf]"),
        ({"run": {"workers": 513}}, "run.workers = 513: expected an integer in [1, 512]"),
        ({"algorithm": {"name": "stocfl", "tau": 1.5}}, "algorithm.tau = 1.5: expected a number in [-1, 1]"),
    ],
)  # fmt: skip
def test_the_line_names_key_value_and_range(tree: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_config(tree, "x.toml")
    assert str(caught.value) == f"x.toml: {line}"


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: replace(TRAIN, prox=-1.0), "training.prox = -1.0: expected a finite number ≥ 0"),
        (lambda: replace(TRAIN, sampling_rate=1.5), "training.sampling_rate = 1.5: expected a number in [0, 1]"),
        (lambda: replace(TRAIN, optimizer="rms"), "training.optimizer = 'rms': expected 'sgd' or 'adam'"),  # type: ignore[arg-type]
        (lambda: Model("linear", (4,), 0), "model.classes = 0: expected an integer ≥ 1"),
        (lambda: Sampling("globl"), "mode = 'globl': expected 'global', 'per_cluster' or 'fixed_cohorts'"),  # type: ignore[arg-type]
        (lambda: Sampling(participation=0.0), "participation = 0.0: expected a number in (0, 1]"),
        (lambda: Faults(dropout=1.0), "dropout = 1.0: expected a number in [0, 1)"),
        (lambda: Engine(workers=0), "workers = 0: expected an integer in [1, 512]"),
        (lambda: Config(algorithm={"name": "pacfl", "k": 0}), "algorithm.k = 0: expected an integer ≥ 1"),
        (lambda: Config().with_("training", lr=0.0), "training.lr = 0.0: expected a finite number > 0"),
    ],
)
def test_settings_from_python_name_what_they_refuse(make: Callable[[], Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == line


def test_an_algorithm_of_others_is_held_to_its_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin's function need not check anything itself."""

    def make(train: Train, *, rate: Annotated[float, Key("A rate.", "(0, 1]")] = 0.5) -> Any:
        raise AssertionError("is not called")

    monkeypatch.setitem(ALGORITHMS, "theirs", replace(ALGORITHMS["fedavg"], name="theirs", make=make))
    assert parse_config({"algorithm": {"name": "theirs", "rate": 1.0}}).algorithm["rate"] == 1.0
    with pytest.raises(InputError, match=r"^config: algorithm\.rate = 0\.0: expected a number in \(0, 1\]$"):
        parse_config({"algorithm": {"name": "theirs", "rate": 0.0}})


def test_a_key_contains_what_its_range_says() -> None:
    key = Key("x", "0 or [3, 5)")
    assert [number for number in range(-1, 7) if key.contains(number)] == [0, 3, 4]
    assert key.bounds == (0.0, True, 5.0, False)
    assert key.range_text == "0 or [3, 5)"
    assert Key("x", "[2^-20, inf)").bounds == (2.0**-20, True, math.inf, False)
    assert not any(map(Key("x").contains, (math.nan, math.inf, -math.inf)))
    assert Key("x", "(-1, inf)").range_text == "> -1"
    assert Key("x", "[0, inf]").range_text == "[0, inf]"
    assert Key("x", "[0, inf]").contains(math.inf)
    for text in ("0..1", "[0, 1", "0 or", "[a, 1]"):
        with pytest.raises(ValueError, match="interval"):
            Key("x", text)


def test_a_function_is_ranged_with_its_positional_arguments() -> None:
    @ranged()
    def share(part: Annotated[int, Key("A part.", "[0, inf)")], *, of: Annotated[int | None, Key("All.", "[1, inf)")] = None) -> Any:
        return part, of

    assert share(1) == (1, None)
    assert share(1, of=2) == (1, 2)
    for arguments, name in (((-1,), "part"), ((1.0,), "part"), (("1",), "part"), ((None,), "part")):
        with pytest.raises(InputError, match=f"^{name} = "):
            share(*arguments)
    with pytest.raises(InputError, match=r"^of = 0: expected an integer ≥ 1$"):
        share(1, of=0)
    with pytest.raises(TypeError):
        share()  # type: ignore[call-arg]


def test_what_no_type_says_is_not_checked() -> None:
    def anything(value: Any, table: dict[str, int], word: str) -> None: ...

    check_ranges(anything, {"value": math.nan, "table": {"a": -1}, "word": 3, "more": math.nan})


def test_the_rings_are_those_of_ckks() -> None:
    (key,) = (declared.entry.key for declared in NUMBERS if declared.entry.path == "protection.ckks_ring")
    assert [ring for ring in range(2**15) if key.contains(ring)] == [0, *PARAMETERS]


def test_softmax_is_another_name_of_the_linear_model() -> None:
    config = parse_config({"model": {"name": "softmax"}})
    assert config == parse_config({"model": {"name": "linear"}})
    assert 'name = "linear"' in config.to_toml()
    assert Model("softmax", (4,), 2) == Model("linear", (4,), 2)
    assert Config().with_("model", name="softmax").model.name == "linear"
    with pytest.raises(InputError, match="'softmax': is another name of 'linear'"):
        register_model("softmax", MODELS["mlp"][0])
    with pytest.raises(InputError, match="did you mean 'softmax'"):
        Model("sotfmax", (4,), 2).layout  # noqa: B018


# --- what others write: callables of any kind, nested keys, odd values ------------------------------------------------------------------

SHARE = Key("A share.", "(0, 1]")


def shared(train: Any, rate: Annotated[float, SHARE] = 0.5) -> None:
    """A function that a plugin may give as `make`."""


class SharedClass:
    def __init__(self, train: Any, rate: Annotated[float, SHARE] = 0.5) -> None: ...


class SharedObject:
    def __call__(self, train: Any, rate: Annotated[float, SHARE] = 0.5) -> None: ...


@pytest.mark.parametrize(
    "make", [shared, partial(shared, rate=0.2), SharedClass, SharedObject()], ids=["function", "partial", "class", "object"]
)
def test_every_kind_of_callable_has_its_ranges(make: Any) -> None:
    check_ranges(make, {"rate": 0.5})
    with pytest.raises(InputError, match=r"^algorithm\.rate = 7\.0: expected a number in \(0, 1\]$"):
        check_ranges(make, {"rate": 7.0}, "algorithm")


def test_a_key_inside_a_type_has_its_range() -> None:
    def nested(several: tuple[Annotated[float, SHARE], ...] = (), maybe: Annotated[float, SHARE] | None = None) -> None: ...

    check_ranges(nested, {"several": (0.5, 1.0), "maybe": None})
    for values in ({"several": (0.5, 7.0)}, {"several": range(3)}, {"maybe": 7.0}):
        with pytest.raises(InputError, match=r"expected (a number|numbers) in \(0, 1\]$"):
            check_ranges(nested, values)

    def unchecked(table: Annotated[dict[str, float], SHARE]) -> None: ...

    with pytest.raises(InputError, match=r"^unchecked: table: the range of a Key cannot be checked for "):
        check_ranges(unchecked, {"table": {}})


def test_sequences_of_numpy_and_infinite_numbers_without_a_key_are_taken() -> None:
    def plain(rate: float = math.inf, values: tuple[float, ...] = ()) -> None: ...

    check_ranges(plain, {"rate": math.inf, "values": np.zeros(3)})
    with pytest.raises(InputError, match=r"^rate = nan: expected"):
        check_ranges(plain, {"rate": math.nan})
    assert list(DataSpec(rotations=range(0, 180, 90)).rotations) == [0, 90]  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [(0.0,) * 5000, np.zeros(40), -(10**5000)], ids=["long", "array", "digits"])
def test_an_odd_value_is_one_line_of_bounded_length(value: Any) -> None:
    def strict(values: Annotated[tuple[int, ...], Key("Counts.", "[1, 9]")]) -> None: ...

    with pytest.raises(InputError) as error:
        check_ranges(strict, {"values": value})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("kind", [DataSpec, Protection, Train, *SECTIONS.values()])
def test_help_shows_a_short_signature_of_all_keys(kind: type) -> None:
    signature = inspect.signature(kind)
    assert list(signature.parameters) == [field.name for field in fields(kind) if field.init]
    assert {name: parameter.default for name, parameter in signature.parameters.items() if parameter.default is not parameter.empty} == {
        field.name: field.default for field in fields(kind) if field.init and field.default is not MISSING
    }
    assert len(str(signature)) < (1200 if kind in SECTIONS.values() else 1100)
    assert "Key(" not in str(signature)
