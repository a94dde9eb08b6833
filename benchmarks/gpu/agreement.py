"""Whether the device computes what the CPU computes: small runs of every algorithm and of every form of private training."""

from contextlib import nullcontext
from functools import partial

from cflpriv.algorithms import ALGORITHMS

from .rows import Figures, Floor, Row, Setting
from .training import fresh

__all__ = ["rows"]

MOST = 1e-4
FORMS = ("sample", "sample, shared noise", "client")


def of_run(setting: Setting, kind: str, name: str) -> Figures:
    """How far numbers in the messages of a run are from those of the CPU; clusters and accuracies are the same."""
    import run_scenes

    made = run_scenes.of_algorithm(name) if kind == "algorithm" else run_scenes.of_form(name)
    with fresh(setting.device):
        return {"float64": run_scenes.same_run(made, setting.device, nullcontext, MOST)[1]}


def rows(setting: Setting) -> list[Row]:
    """Algorithms, then forms."""
    exact = Floor("float64", MOST, at_least=False)
    rows = [Row("agreement", f"algorithm {name}", partial(of_run, kind="algorithm", name=name), exact) for name in ALGORITHMS]
    return [*rows, *(Row("agreement", f"private form {form!r}", partial(of_run, kind="form", name=form), exact) for form in FORMS)]
