"""What plugins register is taken back, so that no test sees what another one registered."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cflpriv import plugins
from cflpriv.algorithms.interface import ALGORITHMS, FUNCTIONS, STATES, TASKS
from cflpriv.attacks import ATTACKS
from cflpriv.contract.protection import PROTECTIONS
from cflpriv.data.named import LOADERS
from cflpriv.data.population import DATASETS
from cflpriv.engine.models import MODELS
from cflpriv.plugins import CALLBACKS, METRICS

REGISTRIES: list[dict[str, Any]] = [
    ALGORITHMS, TASKS, FUNCTIONS, STATES, MODELS, LOADERS, DATASETS, ATTACKS, PROTECTIONS, CALLBACKS, METRICS,
    plugins._loaded, plugins._texts,
]  # fmt: skip
for registry in REGISTRIES:
    if isinstance(registry, plugins.Registry):
        registry.ready()
BEFORE = [dict(registry) for registry in REGISTRIES]


@contextmanager
def new_process() -> Iterator[None]:
    """Inside, no more is registered than in a new process; afterwards, too."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for registry, entries in zip(REGISTRIES, BEFORE, strict=True):
        if registry != entries:
            registry.clear()
            registry.update(entries)
    for name in [name for name in sys.modules if name.startswith("cflpriv_plugin_")]:
        del sys.modules[name]
