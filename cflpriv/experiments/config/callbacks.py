"""Callbacks: own code that receives what happens in a run while it goes on, such as a logger.

A callback is named in `[run] callbacks`, after a plugin or an installed package has registered it (`register_callback`), or is given to
`run_experiment` and `cflpriv.flower.serve` as an object. It reads and changes nothing: what it gets are copies.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...contract.transcript import Message
from ...errors import CallbackFailed, InputError, near
from ...extras import what_to_install
from ...plugins import CALLBACKS

if TYPE_CHECKING:
    from .config import Config

__all__ = ["Callback", "Callbacks", "known_callbacks", "register_callback"]


class Callback:
    """What own code receives of a run. Override what you need; each method does nothing by itself.

    A method that raises ends the run with one line, after everything that was completed is saved; `--resume` goes on with it. With
    `required = False` the error is reported once, and the run goes on without the callback.
    """

    required: bool = True

    def on_start(self, folder: Path, config: "Config", rounds: int) -> None:
        """The run folder, the experiment, and how many rounds are done: 0, or more in a run that is resumed."""

    def on_round(self, row: Mapping[str, Any]) -> None:
        """A round has ended and is saved: its row of rounds.jsonl."""

    def on_messages(self, messages: Sequence[Message]) -> None:
        """What crossed a trust boundary since the last call: parties, kinds and sizes, without payloads."""

    def on_line(self, line: str) -> None:
        """A line for people, such as a note or a warning."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run has ended, or was stopped by Ctrl-C: its summary.json. `rounds` is below `rounds_planned` if it was stopped."""

    def on_error(self, error: Exception) -> None:
        """The run ends with an error, perhaps of a callback, in place of `on_end`. What this raises is only reported."""


def register_callback(name: str, make: Callable[[], Callback]) -> None:
    """Add a callback under the name that `[run] callbacks` has. `make`, a subclass of `Callback` say, gives a new one for each run.

    Raises `InputError` if the name is that of another.
    """
    CALLBACKS.add(name, make)


def known_callbacks(names: Sequence[str]) -> list[tuple[str, Callable[[], Callback]]]:
    """Names of `[run] callbacks` with what makes each. Raises `InputError` naming one that is not known."""
    pairs = []
    for name in names:
        if (make := CALLBACKS.find(name)) is None:
            raise InputError(f"run.callbacks = {list(names)}: {name!r} is not known{near(name, CALLBACKS.names())}")
        pairs.append((name, make))
    return pairs


class Callbacks:
    """All callbacks of one run. Lines that are reported before the run starts are kept for its start."""

    def __init__(self, callbacks: Sequence[Callback] = (), report: Callable[[str], None] = lambda line: None) -> None:
        self._active = [(type(callback).__name__, callback) for callback in callbacks]
        self._print, self._early, self._started = report, list[str](), False

    def make(self, names: Sequence[str]) -> None:
        """Add one of each name. Raises `InputError` naming one that is not known or cannot be made."""
        for name, make in known_callbacks(names):
            try:
                self._active.append((name, make()))
            except Exception as error:
                line = what_to_install(error) if isinstance(error, ModuleNotFoundError) else None
                raise InputError(f"[run] callbacks: {name!r} {line or f'cannot be made ({_one_line(error)})'}") from None

    def report(self, line: str) -> None:
        """Print a line, and give it to the callbacks."""
        self._print(line)
        if self._started:
            self._tell("on_line", line)
        else:
            self._early.append(line)

    def start(self, folder: Path, config: "Config", rounds: int) -> None:
        self._tell("on_start", folder, config, rounds)
        self._started = True
        for line in self._early:
            self._tell("on_line", line)

    def round(self, row: Mapping[str, Any], messages: Sequence[Message]) -> None:
        self._tell("on_messages", tuple(messages))
        self._tell("on_round", row)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._tell("on_end", summary)

    def failed(self, error: Exception) -> None:
        """Tell each that the run ends with an error."""
        for name, callback in self._active:
            try:
                callback.on_error(error)
            except Exception as further:
                self._print(f"callback {name!r}, on_error: {_one_line(further)}")

    def _tell(self, method: str, *arguments: Any) -> None:
        """Call a method of each. Raises `CallbackFailed` naming the first that failed, with its error, after all were called."""
        first: tuple[str, Exception] | None = None
        for name, callback in tuple(self._active):
            try:
                getattr(callback, method)(*(deepcopy(value) if isinstance(value, dict) else value for value in arguments))
            except Exception as error:
                line = f"callback {name!r}, {method}: {_one_line(error)}"
                if callback.required:
                    first = first or (line, error)
                else:
                    self._active.remove((name, callback))
                    self._print(f"{line}; the run goes on without it")
        if first is not None:
            raise CallbackFailed(f"{first[0]}; everything completed is saved, and --resume goes on") from first[1]


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
