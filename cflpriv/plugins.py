"""Registries: named components of the package, of a user's file or of an installed package.

A file calls `cflpriv.register_algorithm` and the like. `--plugin FILE`, `[run] plugins` of a configuration or `load_plugin` loads the file;
`experiments.trust` decides about files that a run folder names. An installed package names its things as entry points of the groups
`cflpriv.algorithms`, `cflpriv.models`, `cflpriv.protections`, `cflpriv.attacks`, `cflpriv.datasets`, `cflpriv.callbacks` and
`cflpriv.metrics`. They are loaded when a name is asked for that is not there, or when everything is listed.

Source: https://packaging.python.org/en/latest/specifications/entry-points/
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import InputError
from .protocols.bounded_files import read_bytes

__all__ = [
    "ALGORITHMS", "ATTACKS", "CALLBACKS", "FUNCTIONS", "METRICS", "TASKS", "Registry", "are_extended", "is_loaded", "load_plugin",
    "loaded_plugins", "plugin_digests", "register_attack", "run_plugins",
]  # fmt: skip

T = TypeVar("T")
_loaded: dict[str, str] = {}
"""The plugin files of this process: name of the module -> path."""
_texts: dict[str, bytes] = {}
"""Name of the module -> the text that ran."""


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
        self.ready().check(name, thing)
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
CALLBACKS: Registry[Callable[[], Any]] = Registry("callback", home=".experiments.trackers")
"""Name in `[run] callbacks` -> what makes a `Callback` for a run."""
METRICS: Registry[Callable[[Any, Any], float]] = Registry("metric")
"""Name in `[run] metrics` -> a function of predictions and labels."""


def are_extended() -> bool:
    """Whether this process ran a plugin file, or an installed package has entry points for these registries."""
    return bool(_loaded) or any(group.startswith("cflpriv.") for group in entry_points().groups)


def register_attack(name: str, attack: Any) -> None:
    """Add an `attacks.Attack` to those of audits, under a name. Raises `InputError` if the name is that of another."""
    ATTACKS.add(name, attack)


def load_plugin(path: str | Path, digest: str | None = None) -> Path:
    """Run a Python file that registers things, once in this process; its absolute path.

    Its module is called cflpriv_plugin_NAME, which checkpoints and messages name its classes by. The text of the file runs, never compiled
    code from a `__pycache__` beside it. `digest`: the digest that new text must have, as `plugin_digests` computes it.

    Raises `InputError` naming the file if it is missing, fails, has another digest, or has the name of another that is loaded.
    """
    path = Path(path).resolve()
    if is_loaded(path):
        return path
    if other := _loaded.get(_module_name(path)):
        raise InputError(f"plugin {path}: {other} has the same name; rename one")
    if not path.is_file():
        raise InputError(f"plugin {path}: no such file")
    try:
        text = read_bytes(path)
    except OSError as error:
        raise InputError(f"plugin {path}: cannot be read ({error.strerror})") from None
    if digest not in (None, _digest(text)):
        raise InputError(f"plugin {path}: is not as the run left it; --plugin {path} runs it as it is now")
    _run(path, text)
    return path


def run_plugins(texts: Mapping[str, bytes]) -> None:
    """Run the plugins that `loaded_plugins` gave in another process, each with its text there, whatever is in its file by now.

    Raises `InputError` naming a file that fails.
    """
    for path, text in texts.items():
        if not is_loaded(path):
            _run(Path(path), text)


def _run(path: Path, text: bytes) -> None:
    """Run the `text` as the plugin file `path`."""
    name = _module_name(path)
    spec = spec_from_file_location(name, path)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise InputError(f"plugin {path}: is no Python file (its name does not end in .py)")
    sys.modules[name] = module = module_from_spec(spec)
    try:
        exec(spec.loader.source_to_code(text, str(path)), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"plugin {path}: {'' if isinstance(error, InputError) else f'{type(error).__name__}: '}{error}") from None
    _loaded[name], _texts[name] = str(path), text


def _module_name(path: Path) -> str:
    return f"cflpriv_plugin_{path.stem}"


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=16).hexdigest()


def is_loaded(path: str | Path) -> bool:
    """Whether this process ran the plugin file `path`."""
    path = Path(path).resolve()
    return _loaded.get(_module_name(path)) == str(path)


def loaded_plugins() -> dict[str, bytes]:
    """By path, the text of each plugin file of this process, as it ran, for another process that works for it (`run_plugins`)."""
    return {path: _texts[name] for name, path in _loaded.items()}


def plugin_digests() -> dict[str, str]:
    """By path, the BLAKE2b-128 digest of the text of each plugin file of this process, as it ran: 32 hexadecimal digits."""
    return {path: _digest(text) for path, text in loaded_plugins().items()}
