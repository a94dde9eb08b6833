"""Audit a recorded run: every attack that has something to see, for every adversary that the run folder allows.

The recorded transcript is attacked first. Then the same configuration runs again with fresh seeds, of data and of everything else, as often
as the budget allows, so that figures come with an interval over seeds; those runs stay in memory. The reference of each is the same
pipeline on the same data and seed without protection. Truth is rebuilt from configuration and data; no attack sees it.

What is finished is kept in audit/units.json: an audit that was stopped goes on where it was when it is called again, unless run, budget or
attacks have changed meanwhile.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ..data import build_population
from ..errors import InputError
from ..experiments.config import Config, load_config
from ..experiments.run import admit as admit_newcomers
from ..experiments.run import advance, begin, estimate_record_bytes, population_digest, prepare, start
from ..files import write_atomically
from ..privacy import Privacy
from ..protection import Protection
from ..record import Message, Transcript, payload_rows
from ..types import Array, ClientData, Population
from . import ATTACKS
from .adversary import AdversaryView, read_secrets, recorded, view_of
from .leakage import BUDGETS, Budget, Case, Cell, Prior, pooled, prior_of, truth_of

__all__ = ["Scene", "audit_run", "case_of", "fresh_scene", "simulator"]

MOST_BYTES = 1 << 30
"""Payloads of a run that is made again for the audit; beyond this it has fewer rounds."""


@dataclass(eq=False)
class Scene:
    """A run as the auditor has it: all messages and secrets, of which views are taken, and its unprotected twin."""

    seed: int
    config: Config
    population: Population
    messages: Sequence[Message]
    secrets: Mapping[str, Mapping[str, str]]
    reference: AdversaryView
    prior: Prior
    rounds: int | None = None

    def view(self, adversary: str) -> AdversaryView:
        view = view_of(self.messages, adversary, self.secrets, self.config.protection)
        return view if self.rounds is None else view.until(self.rounds)


def audit_run(
    run_dir: str | Path,
    *,
    adversary: str | None = None,
    attacks: Sequence[str] | None = None,
    budget: str = "standard",
    data_dir: str | Path | None = None,
    population: Population | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Cell]:
    """Run the attacks and write audit.json and audit/ into the folder; the cells asked for.

    Without `adversary`: the server, the server with one client if that client's secrets were written, and the key holder if its key was.
    `population` replaces the data that the configuration names, for all seeds. Raises `InputError` for a folder that is no complete
    recorded run or was changed, an unknown attack, adversary or budget.
    """
    folder = Path(run_dir)
    if budget not in BUDGETS:
        raise InputError(f"--budget {budget}: is not known; known are {', '.join(BUDGETS)}")
    if attacks is not None and not attacks:
        raise InputError(f"--attacks: names none; known are {', '.join(ATTACKS)}")
    for name in attacks or ():
        if name not in ATTACKS:
            raise InputError(f"--attacks {name}: is not known; known are {', '.join(ATTACKS)}")
    config, summary, messages, secrets = _read(folder)
    adversaries = [adversary] if adversary else _adversaries(messages, secrets)
    for one in adversaries:
        view_of(messages, one, secrets, config.protection)  # an unknown one is refused before anything runs
    spec = config.data
    given = population
    population = population or build_population(spec, data_dir)
    if summary["data_digest"] != population_digest(population):
        raise InputError(f"{folder / 'summary.json'}: the run was made with other data than are found now; give the same --data-dir")
    names = list(attacks or ATTACKS)
    kept = _Kept(folder, _key(folder, budget))
    limits = BUDGETS[budget]
    cells: list[Cell] = []
    wanted = [(one, name) for one in adversaries for name in names]

    def source(seed_config: Config) -> Population:
        if given is not None:
            return given
        return population if seed_config.data == spec else build_population(seed_config.data, data_dir)

    for scene in _scenes(config, summary, messages, secrets, source, limits, lambda seed: kept.has_all(wanted, seed)):
        for one, name in wanted:
            if isinstance(scene, int):
                cells += kept.cells[_unit(one, name, scene)]
                continue
            unit = _unit(one, name, scene.seed)
            if unit not in kept.cells:
                say(f"{name}: adversary {one}, seed {scene.seed}")
                kept.add(unit, _attacked(name, one, scene, limits, folder if scene.seed == config.run.seed else None))
            cells += kept.cells[unit]
    return pooled(cells)


# --- the run folder -----------------------------------------------------------------------------------------------------------------


def _read(folder: Path) -> tuple[Config, dict[str, Any], list[Message], dict[str, dict[str, str]]]:
    """A complete run folder's contents, checked against each other."""
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder}: is not a run folder (no config.toml)")
    config = load_config(folder / "config.toml")
    if config.run.record == "headers":
        raise InputError(f'{folder}: payloads were not recorded; run it again with [run] record = "full" or "attackable"')
    path = folder / "summary.json"
    messages = recorded(folder)
    if not path.is_file():
        raise InputError(f"{folder}: the run is not complete (no summary.json); finish it with `cflpriv run … --resume`")
    summary = json.loads(path.read_text(encoding="utf-8"))
    for key in ("algorithm", "protection", "data_digest", "rounds", "seconds"):
        if key not in summary:
            raise InputError(f"{path}: has no {key!r}; it is not the summary of a run of this version")
    for key, value in (("algorithm", config.algorithm["name"]), ("protection", config.protection.name)):
        if summary[key] != value and not (key == "algorithm" and {summary[key], value} == {"ifca", "hypcluster"}):
            raise InputError(f"{path}: {key} is {summary[key]!r}, but config.toml says {value!r}; one of them was changed")
    return config, summary, messages, read_secrets(folder)


def _adversaries(messages: Sequence[Message], secrets: Mapping[str, object]) -> list[str]:
    client = any(party.startswith("client:") for party in secrets)
    holder = "key-holder" in secrets and any("key-holder" in (message.source, message.target) for message in messages)
    return ["server", *(["server+1"] if client else []), *(["key-holder"] if holder else [])]


def _of_run(folder: Path) -> list[Path]:
    named = [folder / name for name in ("config.toml", "summary.json", "transcript/messages.jsonl")]
    return [*named, *sorted((folder / "secrets").glob("*.json"))]


def _key(folder: Path, budget: str) -> str:
    """What a finished cell depends on: the run, the budget, and the attacks' own text."""
    digest = blake2b(budget.encode(), digest_size=16)
    for path in (*_of_run(folder), *sorted(Path(__file__).parent.rglob("*.py"))):
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


def _unit(adversary: str, attack: str, seed: int) -> str:
    return f"{adversary}|{attack}|{seed}"


class _Kept:
    """Finished cells by unit, on disk after each; those of another run, budget or version are forgotten."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.cells: dict[str, list[Cell]] = {}
        try:
            stored = json.loads((folder / "audit" / "units.json").read_text(encoding="utf-8"))
            if stored["key"] == key:
                self.cells = {unit: [_cell(one) for one in several] for unit, several in stored["units"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # none, or damaged: everything is done again

    def has_all(self, wanted: Sequence[tuple[str, str]], seed: int) -> bool:
        return all(_unit(adversary, attack, seed) in self.cells for adversary, attack in wanted)

    def add(self, unit: str, cells: Sequence[Cell]) -> None:
        self.cells[unit] = list(cells)
        units = {name: [one.as_json() for one in several] for name, several in self.cells.items()}
        order = {name: i for i, name in enumerate(ATTACKS)}
        done = sorted(self.cells, key=lambda name: (name.split("|")[0] != "server", name.split("|")[0], order.get(name.split("|")[1], 99)))
        table = pooled([one for name in done for one in self.cells[name]])
        try:
            (self.folder / "audit").mkdir(exist_ok=True)
            write_atomically(self.folder / "audit" / "units.json", json.dumps({"key": self.key, "units": units}) + "\n")
            write_atomically(self.folder / "audit.json", json.dumps([one.as_json() for one in table], indent=1) + "\n")
        except OSError as error:
            raise InputError(f"{self.folder / 'audit.json'}: cannot be written ({error.strerror})") from None


def _cell(fields: Mapping[str, Any]) -> Cell:
    return Cell(**{**fields, "seeds": tuple(fields["seeds"])})


# --- runs to attack -----------------------------------------------------------------------------------------------------------------


def _scenes(
    config: Config, summary: Mapping[str, Any], messages: Sequence[Message], secrets: Mapping[str, Mapping[str, str]],
    source: Callable[[Config], Population], budget: Budget, done: Callable[[int], bool],
) -> Iterator[Scene | int]:  # fmt: skip
    """The recorded run, then fresh ones; a seed alone where all is known of it already."""
    rounds, seconds = int(summary["rounds"]), max(float(summary["seconds"]), 1e-3)
    open_ = _is_open(config)
    size = estimate_record_bytes(config.with_("run", record="full", record_rounds=(), record_clients=()), source(config)) or 1
    kept = max(1, min(rounds, int(rounds * budget.seconds / seconds), rounds * MOST_BYTES // size)) if rounds else 0
    cut = None if kept == rounds else kept
    fresh = min(budget.seeds - 1, int(budget.seconds / (seconds * (1 if open_ else 2)))) if cut is None else 0
    for number in range(1 + fresh):
        seed = config.run.seed + 1000 * number
        if done(seed):
            yield seed
            continue
        mine = config.with_("run", seed=seed).with_("data", seed=config.data.seed + 1000 * number)
        people = source(mine)
        if number:
            yield fresh_scene(mine, people, kept, budget)
            continue
        whole = open_ and config.run.record == "full"
        reference = list(messages) if whole else _again(_opened(mine), people, kept)[0]
        seen = view_of(reference, "server", {}) if cut is None else view_of(reference, "server", {}).until(cut)
        yield Scene(seed, config, people, messages, secrets, seen, _prior(mine, people, budget), cut)


def fresh_scene(config: Config, population: Population, rounds: int, budget: Budget = BUDGETS["standard"]) -> Scene:
    """A run of `config` on `population` made for the attack, `rounds` long, kept in memory; and its unprotected twin."""
    reference, _ = _again(_opened(config), population, rounds)
    messages, secrets = (reference, _secrets_of(config, population)) if _is_open(config) else _again(config, population, rounds)
    seen = view_of(reference, "server", {})
    return Scene(config.run.seed, config, population, messages, secrets, seen, _prior(config, population, budget))


def _is_open(config: Config) -> bool:
    """Whether nothing protects this run."""
    return config.protection == Protection() and config.privacy.unit == "none"


def _opened(config: Config) -> Config:
    """The same without protection: no transform, no secure sum, no floor, no noise."""
    return replace(config, protection=Protection(), privacy=Privacy()).with_("run", audit_parties=("server",))


def protection_name(config: Config) -> str:
    """What protects a run, for tables: its protection and its differential privacy."""
    privacy = config.privacy
    return config.protection.name + ("" if privacy.unit == "none" else f", dp {privacy.unit} ε={privacy.epsilon:g}")


def _prior(config: Config, population: Population, budget: Budget) -> Prior:
    prior = prior_of(population, config.run.seed, budget.auxiliary, _rows_per_label(config), config)
    return replace(prior, simulate=simulator(config, population))


def _again(config: Config, population: Population, rounds: int) -> tuple[list[Message], dict[str, dict[str, str]]]:
    """All messages of a run of `config` in memory, and the secrets of the parties that are audited."""
    simulation = start(_recording(config), population=population)
    for _ in range(rounds):
        advance(simulation)
    if rounds >= config.training.rounds:
        admit_newcomers(simulation)
    simulation.federation.engine.close()
    parties = {party: simulation.federation.secrets(party) for party in config.run.audit_parties}
    return simulation.federation.transcript.messages, {party: held for party, held in parties.items() if held}


def _secrets_of(config: Config, population: Population) -> dict[str, dict[str, str]]:
    """The secrets of audited parties in a run without protection, where they open nothing."""
    simulation = prepare(_recording(config), population=population)
    return {party: held for party in config.run.audit_parties if (held := simulation.federation.secrets(party))}


def _recording(config: Config) -> Config:
    return config.with_("run", record="full", record_rounds=(), record_clients=(), evaluate_every=max(1, config.training.rounds))


class _Upload(Exception):
    """What was to be known of a pretended run is known."""


class _UntilCompared(Transcript):
    """A transcript that stops its run at the first vectors that clients have compared."""

    def add(self, *parts: Any, **more: Any) -> None:
        super().add(*parts, **more)
        if self.messages[-1].verb == "gram":
            raise _Upload


def simulator(config: Config, population: Population) -> Callable[[Sequence[tuple[Array, Array]]], Array | None]:
    """What clients with given data (x, y) would have compared at the beginning of the public pipeline: rows (m, p, d), in the clear.

    Only what is public of `population` is used: the shape of samples, the number of classes, how inputs are normalised.
    """

    def simulate(data: Sequence[tuple[Array, Array]]) -> Array | None:
        clients = tuple(ClientData(i, x, y, x[:0], y[:0]) for i, (x, y) in enumerate(data))
        people = replace(population, clients=clients, groups=(0,) * len(clients), notes=())
        alone = _opened(config).with_("data", newcomers=0)
        alone = alone.with_("training", participation=1.0, sampling="global", dropout=0.0, dropouts=(), weights="equal")
        alone = alone.with_("run", record="full", record_rounds=(), record_clients=())
        alone = replace(alone, algorithm={key: value for key, value in config.algorithm.items() if key not in ("k", "beta")})
        try:
            simulation = prepare(alone, population=people)
            simulation.federation.transcript = _UntilCompared("full")
            begin(simulation)
            advance(simulation)
        except _Upload:
            (message,) = [one for one in simulation.federation.transcript.messages if one.verb == "gram"]
            return None if message.payload is None else np.asarray(message.payload["rows"], np.float64)
        except InputError:
            return None
        return None

    return simulate


def _rows_per_label(config: Config) -> int:
    """The public number of signature rows for each label; 0 where a signature is of all samples together."""
    per_label = config.algorithm.get("per_label")
    stacked = config.algorithm.get("variant") == "authors" if per_label is None else per_label
    return int(config.algorithm.get("p", 3)) if stacked and config.algorithm["name"] == "pacfl" else 0


# --- attacking ----------------------------------------------------------------------------------------------------------------------


def case_of(scene: Scene, adversary: str, budget: Budget = BUDGETS["standard"]) -> Case:
    """One adversary on one run."""
    rows: dict[int, Array] = {}
    for message in scene.reference.select("gram"):
        if message.payload is not None and "rows" in message.payload:
            for client, row in zip(payload_rows(message), message.payload["rows"], strict=True):
                rows.setdefault(client, np.asarray(row, np.float64))
    truth, protection = truth_of(scene.population), protection_name(scene.config)
    return Case(scene.view(adversary), scene.reference, scene.prior, truth, protection, scene.seed, budget, rows)


def _attacked(name: str, adversary: str, scene: Scene, budget: Budget, folder: Path | None) -> list[Cell]:
    """One attack by one adversary on one run. Arrays are saved into `folder`, if there is one."""
    cells, arrays = ATTACKS[name].cells(case_of(scene, adversary, budget))
    if scene.rounds is not None:
        cells = [replace(one, note=f"{one.note}; of the first {scene.rounds} round(s) only") for one in cells]
    if arrays is None or folder is None:
        return list(cells)
    file = f"{name}_{adversary}.npz"
    (folder / "audit").mkdir(exist_ok=True)
    np.savez(folder / "audit" / file, allow_pickle=False, **arrays)
    return [replace(cell, arrays=file) for cell in cells]
