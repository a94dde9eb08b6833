"""Commands that describe what exists: `contract`, `explain`, `list`."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .shared import ERR, OUT, DataDir, Plugins, Trust, load_plugins, naming, print_line

__all__ = ["contract", "explain", "list_", "registered"]


def contract(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: section.key=value. May be repeated.")] = None,
    roster: Annotated[
        Path | None, typer.Option("--roster", help="The pinned keys, which a deployment's contract names.", metavar="FILE")
    ] = None,
    digest: Annotated[bool, typer.Option("--digest", help="Print the digest alone, which a client's settings pin.")] = False,
    infer: Annotated[
        Path | None,
        typer.Option(
            "--infer",
            metavar="FILE",
            help="For an own algorithm that declares no schedule: simulate, and write what it asks to this file, for [run] schedule.",
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=0, help="With --infer: simulate so many rounds; default all.")] = None,
    data_dir: DataDir = None,
    plugin: Plugins = None,
    trust: Trust = False,
) -> None:
    """Print what a server of this experiment may ask of a client, and what the server learns.

    A client's operator reads this text, and pins the digest in the client's settings file: contract = "DIGEST".
    """
    from ..experiments import load_config
    from ..experiments.run.agreed import contract_of_config
    from ..federation.contract_record import contract_bytes, contract_digest
    from ..federation.contract_words import contract_text
    from ..federation.settings import read_roster

    experiment = load_config(config, set_ or [], plugin or [], trust=trust)  # of a configuration that may be a stranger's
    if infer is not None:
        from ..experiments.config.schedule_file import write_schedule
        from ..experiments.run.inferred_schedule import inferred_schedule

        with naming(config):
            schedule = inferred_schedule(experiment, rounds, data_dir)
        write_schedule(infer, schedule, experiment.algorithm["name"])
        print_line(f"{infer}: {len(list(schedule.requests()))} requests; read it, and name it in the configuration: [run] schedule")
        return
    if rounds is not None:
        raise InputError("--rounds: is the number of rounds to simulate; give --infer FILE with it")
    with naming(config):
        agreed = contract_of_config(experiment, data_dir, None if roster is None else read_roster(roster))
    if digest:
        print_line(contract_digest(contract_bytes(agreed)).hex())
        return
    OUT.print(contract_text(agreed), markup=False, end="")


def explain(key: Annotated[str, typer.Argument(help="section.key, a key, or a section.", metavar="KEY")], plugin: Plugins = None) -> None:
    """Print what a configuration key means, its type, range and default."""
    from ..experiments.config.config_reference import explained
    from ..experiments.sweep.sweep import sweep_keys

    load_plugins(plugin)
    own = sweep_keys(key)
    try:
        found = explained(key)
    except InputError:
        if not own:
            raise
        found = ""
    OUT.print("\n\n".join(filter(None, (found, own))), markup=False)


def list_(plugin: Plugins = None) -> None:
    """List algorithms, protections, attacks, data sets, partitions, models, reproductions."""
    from ..attacks import ATTACKS
    from ..contract.protection import PROTECTIONS, ROBUST, listed
    from ..data import DATASETS, PARTITIONS
    from ..data.named import LOADERS
    from ..plugins import are_extended
    from .written import described

    load_plugins(plugin)
    for problem in (line for registry in (ATTACKS, LOADERS, PROTECTIONS) for line in registry.load_all()):
        ERR.print(f"cflpriv: {problem}", markup=False)
    others = registered() if are_extended() else described()
    for title, entries in (
        ("algorithms", others["algorithms"]),
        ("protection.gram", listed("gram")),
        ("protection.sum", listed("sum")),
        ("protection.robust", ROBUST),
        ("attacks", {name: attack.summary for name, attack in ATTACKS.items()}),
        ("active attacks", others["active attacks"]),
        ("data.source", DATASETS),
        ("data.partition", PARTITIONS),
        ("models", others["models"]),
        ("reproductions", others["reproductions"]),
    ):
        OUT.print(f"[bold]{title}[/bold]")
        for name, line in entries.items():
            OUT.print(f"  {name:<18} {line}", markup=False)


def registered() -> dict[str, dict[str, str]]:
    """By title, the lines of things by name in the registries that torch is imported for (`written.described`)."""
    from ..algorithms import ALGORITHMS
    from ..attacks.active import ACTIVE_ATTACKS
    from ..engine.models import MODELS
    from ..experiments.reproductions import REPRODUCTIONS

    for problem in (line for registry in (ALGORITHMS, MODELS) for line in registry.load_all()):
        ERR.print(f"cflpriv: {problem}", markup=False)
    return {
        "algorithms": {name: spec.summary for name, spec in ALGORITHMS.items()},
        "active attacks": {name: attack.summary for name, attack in ACTIVE_ATTACKS.items()},
        "models": {name: line for name, (_, line) in MODELS.items()},
        "reproductions": {name: f"{entry.title} ({entry.source})" for name, entry in REPRODUCTIONS.items()},
    }
