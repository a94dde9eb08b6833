"""Commands that describe what exists: `explain`, `list`."""

from typing import Annotated

import typer

from .shared import ERR, OUT, Plugins, load_plugins

__all__ = ["explain", "list_"]


def explain(key: Annotated[str, typer.Argument(help="section.key, a key, or a section.", metavar="KEY")], plugin: Plugins = None) -> None:
    """Print what a configuration key means, its type, range and default."""
    from ..experiments.config.config_reference import explained

    load_plugins(plugin)
    OUT.print(explained(key), markup=False)


def list_(plugin: Plugins = None) -> None:
    """List algorithms, protections, attacks, data sets, partitions, models, reproductions."""
    from ..algorithms import ALGORITHMS
    from ..attacks import ATTACKS
    from ..attacks.active import ACTIVE_ATTACKS
    from ..contract.protection import PROTECTIONS, ROBUST, listed
    from ..data import DATASETS, PARTITIONS
    from ..data.named import LOADERS
    from ..engine.models import MODELS
    from ..experiments.reproductions import REPRODUCTIONS

    load_plugins(plugin)
    for problem in (line for registry in (ALGORITHMS, ATTACKS, LOADERS, MODELS, PROTECTIONS) for line in registry.load_all()):
        ERR.print(f"cflpriv: {problem}", markup=False)
    for title, entries in (
        ("algorithms", {name: spec.summary for name, spec in ALGORITHMS.items()}),
        ("protection.gram", listed("gram")),
        ("protection.sum", listed("sum")),
        ("protection.robust", ROBUST),
        ("attacks", {name: attack.summary for name, attack in ATTACKS.items()}),
        ("active attacks", {name: attack.summary for name, attack in ACTIVE_ATTACKS.items()}),
        ("data.source", DATASETS),
        ("data.partition", PARTITIONS),
        ("models", {name: line for name, (_, line) in MODELS.items()}),
        ("reproductions", {name: f"{entry.title} ({entry.source})" for name, entry in REPRODUCTIONS.items()}),
    ):
        OUT.print(f"[bold]{title}[/bold]")
        for name, line in entries.items():
            OUT.print(f"  {name:<18} {line}", markup=False)
