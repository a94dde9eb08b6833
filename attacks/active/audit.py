"""Run every active attack against freshly started clients of one configuration, and write the results to a folder.

A recording is never attacked: only the configuration of a run folder is read.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ...data import build_population
from ...engine.device import using
from ...errors import InputError, TrainingDiverged
from ...experiments.config.config import Config, load_config
from ...experiments.digests import OF_AUDITS, OF_RUN, record_digests
from ...experiments.report.audit_words import ACTIVE_STATUS
from ...experiments.run.folder import environment
from ...experiments.run.loop import device_of
from ...files import write_atomically
from ...protocols.errors import ProtocolError
from ...types import Population
from . import ACTIVE_ATTACKS
from .outcome import ActiveAttack, ActiveFigure, ActiveGuess, ActiveResult, judged
from .scene import AttackRun, Scene, scene_of

__all__ = ["FILE", "active_audit", "run_all", "run_attack", "table", "written"]

FILE = "active_audit.json"


def active_audit(
    config: Config, data_dir: str | Path | None = None, *, attacks: Sequence[str] | None = None, population: Population | None = None,
    report: Callable[[str], None] = lambda line: None, contracted: bool = True,
) -> list[ActiveResult]:  # fmt: skip
    """Run all active attacks against clients in this process. `population` replaces the data that the configuration names.

    Clients are new for each attack: new identities, empty stores, system entropy, the strict release policy, whatever `[run]` says of
    these. They are under the session contract of the configuration unless `contracted` is false. Raises `InputError` for an unknown attack.
    """
    return run_all(scene_of(config, population or build_population(config.data, data_dir), contracted), attacks, report)


def run_all(scene: Scene, attacks: Sequence[str] | None = None, report: Callable[[str], None] = lambda line: None) -> list[ActiveResult]:
    """The same against the clients that a scene starts, over whatever transport. Raises `InputError` for an unknown attack."""
    if attacks is not None and not attacks:
        raise InputError(f"--attacks: names none; known are {', '.join(ACTIVE_ATTACKS)}")
    for name in attacks or ():
        if ACTIVE_ATTACKS.find(name) is None:
            raise InputError(f"--attacks {name}: is not known; known are {', '.join(ACTIVE_ATTACKS.names())}")
    rows = []
    for name in attacks or list(ACTIVE_ATTACKS):
        with using(device_of(scene.config)):
            rows.append(run_attack(name, ACTIVE_ATTACKS[name], scene))
        report(f"{name}: {rows[-1].result()}")
    return rows


def run_attack(name: str, attack: ActiveAttack, scene: Scene) -> ActiveResult:
    """The result of one attack."""
    config, why = scene.config, attack.applies(scene.config)
    nothing = ActiveResult(
        name, config.protection.name, "not_applicable", attack.guarantee, attack.claimed(config), clients=len(scene.clients)
    )
    if why:
        return replace(nothing, note=why)
    run = None
    try:
        run = AttackRun(scene, attack.server(config.protection), accomplices=attack.accomplices, sybils=attack.sybils)
        reading: ActiveGuess | ActiveFigure = attack.deviate(run)
    except (InputError, ProtocolError, TrainingDiverged) as error:  # the last: every client refused to compute
        if run is None or not run.liar.refused or isinstance(error, InputError):
            return replace(nothing, status="failed", note=f"{type(error).__name__}: {error}")
        reading = ActiveGuess(None, "update")  # too many refusals for the server to continue
    return judged(name, attack, scene, reading, run, run.liar.refused)


def table(rows: Sequence[ActiveResult]) -> str:
    """The result as a table in plain text, one line an attack, what was learned first."""
    order = list(ACTIVE_STATUS)
    width = max((len(row.attack) for row in rows), default=0)
    lines = []
    for row in sorted(rows, key=lambda row: (order.index(row.status), not row.claimed)):
        why = f" ({row.note})" if row.note and row.status in ("not_applicable", "failed", "learned") else ""
        lines.append(f"{row.attack:<{width}}  {row.result()}{why}")
    return "\n".join(lines)


def written(rows: Sequence[ActiveResult], config: Config, folder: Path) -> Path:
    """Write the result into a folder: that of a run of this configuration, or one of its own; the path of its JSON.

    Raises `InputError` for a folder that holds something else, or cannot be written.
    """
    try:
        is_new = not folder.exists() or not any(folder.iterdir())
        if not is_new and not (folder / "config.toml").is_file():
            raise InputError(f"{folder}: holds something else than a run or an audit; choose another with --out")
        if not is_new and load_config(folder / "config.toml", trust=False) != config:
            raise InputError(f"{folder / 'config.toml'}: is another experiment; choose another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
        if is_new:
            write_atomically(folder / "config.toml", config.to_toml())
            write_atomically(folder / "environment.json", json.dumps(environment(config), indent=1) + "\n")
        path = folder / FILE
        write_atomically(path, json.dumps([row.as_json() for row in rows], indent=1, allow_nan=False) + "\n")
        write_atomically(folder / "active_audit.txt", table(rows) + "\n")
        record_digests(folder, (*OF_RUN, *OF_AUDITS) if is_new else OF_AUDITS)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from None
    return path
