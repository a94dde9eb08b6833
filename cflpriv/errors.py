"""Errors of the toolkit itself; those of the protocols are in `cflpriv.protocols.errors`.

`TooFewClients` and `BudgetExceeded` are also here, for algorithms, which import no protocol: sums raise them.
"""

import warnings
from collections.abc import Sequence
from difflib import get_close_matches

from .protocols.errors import BudgetExceeded, TooFewClients

__all__ = [
    "BudgetExceeded", "CallbackFailed", "CflprivWarning", "DataWarning", "InputError", "InputWarning", "TooFewClients", "TrainingDiverged",
    "WorkerLost", "near", "warn_in_lines", "warning_words",
    "out_of_memory", "unknown_key",
]  # fmt: skip

OLD_KEYS = {
    ("protection", "floor"): "is called min_cohort now",
    ("protection", "gather"): "was removed: values that are gathered are released as they are, so leave it out",
    ("protection", "ckks_mode"): "was removed: clients always encrypt under the key holder's public key, so leave it out",
    ("data", "name"): "is called source",
    ("algorithm", "auto"): "is called cut now, which by default is 'test'; 'silhouette' and 'gap' are what they were",
}
"""Keys that earlier versions had, or that other sections have, by section and name, and what to write."""


class InputError(ValueError):
    """What the user gave cannot be used. The message is one line naming the file, key and value; the command line exits with 2."""


class TrainingDiverged(ArithmeticError):
    """A client's training ended with numbers that are not finite. Names the client and the round; never averaged."""


class WorkerLost(RuntimeError):
    """A worker process of the engine ended by itself: killed, perhaps for want of memory. Its chunk is lost, nothing else."""


class CallbackFailed(RuntimeError):
    """A user's callback raised. Names the callback and its error; everything completed is saved."""


class CflprivWarning(UserWarning):
    """Something works, but not as a careful reader may expect."""


class InputWarning(CflprivWarning):
    """A doubt about a run's settings, data or model, which its summary has, too."""


class DataWarning(InputWarning):
    """A doubt about data with less evidence, which the summary has among its notes. `ClusteredFL.fit` gives it, once each."""


def warn_in_lines() -> None:
    """Let every warning be one line. For the entry of a program: it changes `warnings.formatwarning`.

    A line of this package has no place in the code, which means nothing to a user. A line of another package has it, since only its authors
    can act.
    """
    warnings.formatwarning = _in_a_line


def _in_a_line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    return f"cflpriv: warning: {warning_words(message, category, filename, lineno)}\n"


def warning_words(message: Warning | str, category: type[Warning], filename: str, lineno: int) -> str:
    """A warning in one line, with its place in the code if another package gives it."""
    where = "" if issubclass(category, CflprivWarning) else f" ({category.__name__}, {filename}:{lineno})"
    return f"{' '.join(str(message).split())}{where}"


def unknown_key(section: str, key: str, value: object, known: str) -> InputError:
    """The error about a key that a section does not have: what became of an old one, else `known`, the end of the sentence."""
    return InputError(f"[{section}] {key} = {value!r}: {OLD_KEYS.get((section, key)) or 'is not a key here' + known}")


_TOO_LARGE = ("allocate memory", "Storage size calculation overflowed", "Overflow when unpacking long")
"""What torch says of arrays that no memory holds."""


def out_of_memory(error: Exception) -> bool:
    """Whether an error of Python, NumPy or torch says that memory is gone, on the host or on a device."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or any(pattern in str(error) for pattern in _TOO_LARGE)


def near(name: str, known: Sequence[str]) -> str:
    """The end of an error about an unknown name: the nearest known one, or all."""
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}" if known else "; there are none"
