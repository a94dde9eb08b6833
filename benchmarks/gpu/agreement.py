"""Whether the device computes what the CPU computes: networks with every option of training, algorithms, and forms of private training."""

import warnings
from contextlib import nullcontext
from functools import partial

from engine_scenes import EXTRAS, MODELS, TOLERANCES, differences

from cflpriv.algorithms import ALGORITHMS

from .rows import Figures, Floor, Row, Setting
from .training import fresh

__all__ = ["rows"]

MOST = 1e-4
FORMS = ("sample", "sample, shared noise", "client")


def of_network(setting: Setting, name: str) -> Figures:
    """How far updates are from the plain loop's, with every option. Raises `ValueError` naming an option with which that is too far."""
    worst = dict.fromkeys(TOLERANCES, 0.0)
    with fresh(setting.device):
        for extra in EXTRAS[:1] if setting.tiny else EXTRAS:
            for dtype, apart in differences(name, extra, setting.device).items():
                if not apart <= TOLERANCES[dtype]:
                    raise ValueError(f"{extra or 'plain'} in {dtype}: {apart:.3g} apart")
                worst[dtype] = max(worst[dtype], apart)
    return dict(worst)


def of_run(setting: Setting, kind: str, name: str) -> Figures:
    """How far numbers in the messages of a run are from those of the CPU; clusters and accuracies are the same."""
    import run_scenes

    made = run_scenes.of_algorithm(name) if kind == "algorithm" else run_scenes.of_form(name)
    with fresh(setting.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of algorithms that form no clusters in so small a run
        return {"float64": run_scenes.same_run(made, setting.device, nullcontext, MOST)[1]}


def rows(setting: Setting) -> list[Row]:
    """Networks, then algorithms and forms."""
    rounded, exact = (Floor(dtype, MOST, at_least=False) for dtype in ("float32", "float64"))
    found = [Row("agreement", f"network {name}", partial(of_network, name=name), rounded) for name in MODELS]
    found += [Row("agreement", f"algorithm {name}", partial(of_run, kind="algorithm", name=name), exact) for name in ALGORITHMS]
    return [*found, *(Row("agreement", f"private form {form!r}", partial(of_run, kind="form", name=form), exact) for form in FORMS)]
