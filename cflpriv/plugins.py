"""Registries: named components of the package, of a user's file or of an installed package.

A file calls `cflpriv.register_algorithm` and the like; it is loaded by `--plugin FILE`, by `[run] plugins` or by `load_plugin`. An
installed package names its things as entry points of the groups `cflpriv.algorithms`, `cflpriv.models`, `cflpriv.protections`,
`cflpriv.attacks`, `cflpriv.datasets` and `cflpriv.callbacks`. They are loaded when a name is asked for that is not there, or when
everything is listed.

Source: https://packaging.python.org/en/latest/specifications/entry-points/
"""

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import InputError

__all__ = ["ALGORITHMS", "ATTACKS", "CALLBACKS", "FUNCTIONS", "TASKS", "Registry", "load_plugin", "loaded_plugins", "register_attack"]

T = TypeVar("T")
_loaded: dict[str, str] = {}
"""The plugin files of this process: name of the module -> path."""


class Registry(dict[str, T], Generic[T]):
    """Things of one `kind` by name, in the order of their registration. Entry points of the group `cflpriv.KINDs` belong to it.

    `home` is the package that registers the project's own things when it is imported, which happens when one is asked for first. `code`
    gives the function or class that stands for a thing where two are compared and named; `accept(name, thing)` registers what an
    entry point gives, by default `add`.
    """

    def __init__(
        self, kind: str, code: Callable[[T], Any] = lambda thing: thing, accept: Callable[[str, Any], None] | None = None, home: str = ""
    ) -> None:  # fmt: skip
        super().__init__()
        self.kind, self.code, self.accept, self._home = kind, code, accept or self.add, home

    def ready(self) -> "Registry[T]":
        """This registry, with the project's own things in it."""
        if self._home:
            home, self._home = self._home, ""
            import_module(home, __package__)
        return self

    def add(self, name: str, thing: T) -> None:
        """Register a thing. Raises `InputError` naming both if the name is that of another."""
        self.check(name, thing)
        self[name] = thing

    def check(self, name: str, thing: T) -> None:
        """Raises `InputError` naming both if the name is that of another thing."""
        other = self.get(name, thing)
        if other != thing:
            raise InputError(f"{self.kind} {name!r}: is registered twice, by {_place(self.code(other))} and {_place(self.code(thing))}")

    def find(self, name: str) -> T | None:
        """The thing of this name, from an installed package if need be. Raises `InputError` naming an entry point that is broken."""
        if name not in self.ready():
            for point in self._points():
                if point.name == name:
                    self._load(point)
        return self.get(name)

    def names(self) -> list[str]:
        """All names, those of entry points that were not loaded yet last."""
        return list(dict.fromkeys([*self.ready(), *(point.name for point in self._points())]))

    def load_all(self) -> list[str]:
        """Load every entry point of this kind; a line for each that is broken."""
        self.ready()
        problems = []
        for point in self._points():
            try:
                self._load(point)
            except InputError as error:
                problems.append(str(error))
        return problems

    def _points(self) -> Iterable[EntryPoint]:
        return entry_points(group=f"cflpriv.{self.kind.replace(' ', '')}s")

    def _load(self, point: EntryPoint) -> None:
        try:
            self.accept(point.name, point.load())
        except Exception as error:
            raise InputError(
                f"entry point {point.name!r} of {point.group} ({point.value}): cannot be loaded ({type(error).__name__}: {error})"
            ) from None


def _place(code: Any) -> str:
    return f"{getattr(code, '__module__', '?')}.{getattr(code, '__qualname__', code)}"


TASKS: Registry[type] = Registry("task", home=".algorithms")
"""Name -> a task class, or a part of one, that may be sent to clients."""
FUNCTIONS: Registry[type] = Registry("function", home=".algorithms")
"""Name -> what may be sent to a key holder to be run on a Gram matrix."""
ALGORITHMS: Registry[Any] = Registry("algorithm", lambda spec: spec.make, home=".algorithms")
"""Name in a config -> `algorithms.interface.AlgorithmSpec`."""
ATTACKS: Registry[Any] = Registry("attack", lambda attack: attack.cells)
"""Name -> `attacks.Attack`; here, because a file may register one before the attacks are imported."""
CALLBACKS: Registry[Callable[[], Any]] = Registry("callback", home=".experiments.tensorboard")
"""Name in `[run] callbacks` -> what makes a `Callback` for a run."""


def register_attack(name: str, attack: Any) -> None:
    """Add an `attacks.Attack` to those of audits, under a name. Raises `InputError` if the name is that of another."""
    ATTACKS.add(name, attack)


def load_plugin(path: str | Path) -> Path:
    """Run a Python file that registers things, once in this process; its absolute path.

    Its module is called cflpriv_plugin_NAME, which checkpoints and messages name its classes by.

    Raises `InputError` naming the file if it is missing, fails, or has the name of another that is loaded.
    """
    path = Path(path).resolve()
    name = f"cflpriv_plugin_{path.stem}"
    if _loaded.get(name) == str(path):
        return path
    if name in _loaded:
        raise InputError(f"plugin {path}: {_loaded[name]} has the same name; rename one")
    if not path.is_file():
        raise InputError(f"plugin {path}: no such file")
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"plugin {path}: is no Python file (its name does not end in .py)")
    sys.modules[name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"plugin {path}: {'' if isinstance(error, InputError) else f'{type(error).__name__}: '}{error}") from None
    _loaded[name] = str(path)
    return path


def loaded_plugins() -> tuple[str, ...]:
    """The plugin files of this process, for another process that works for it."""
    return tuple(_loaded.values())
