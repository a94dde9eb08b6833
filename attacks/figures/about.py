"""What an audit.json states of itself, so that it can be read without the run's folder."""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

from ...experiments.config.config import Config
from ...plugins import ATTACKS
from ...protocols.bounded_files import read_json
from ..adversary import ADVERSARIES

__all__ = ["about_audit", "extent", "left_out", "software"]


def software() -> dict[str, str]:
    """The version of the package, and the commit that it was installed from, where the installation names one."""
    made = {"name": "cflpriv", "version": metadata.version("cflpriv")}
    path = next((file.locate() for file in metadata.files("cflpriv") or () if file.name == "direct_url.json"), None)
    tree = {} if path is None else read_json(Path(str(path)))
    commit = tree.get("vcs_info", {}).get("commit_id")
    return made | ({"commit": commit} if isinstance(commit, str) else {})


def left_out(adversaries: Collection[str]) -> dict[str, str]:
    """The adversaries that are not among these, with what each has."""
    colluding = any(name.startswith("server+") for name in adversaries)
    return {name: words for name, words in ADVERSARIES.items() if name not in adversaries and not (name == "server+N" and colluding)}


def extent(done: Collection[tuple[str, str]], planned: Collection[tuple[str, str]]) -> dict[str, Any]:
    """What of an audit is finished, and what is not.

    `done` are (adversary, attack) of figures that were made; `planned` those of an audit that was asked for nothing less. An attack is in
    `attacks` once an adversary made it, and in `not_run` while none did. The lists `by_adversary` say who made it, and who did not.
    """
    viewers = dict.fromkeys(viewer for viewer, _ in done)
    left = [pair for pair in planned if pair not in done]
    made = {name for _, name in done}
    return {
        "adversaries": list(viewers),
        "attacks": _in_order(made),
        "by_adversary": {viewer: _in_order({name for by, name in done if by == viewer}) for viewer in viewers},
        "not_run": {
            "adversaries": left_out(viewers),
            "attacks": _in_order({name for _, name in left} - made),
            "by_adversary": {
                viewer: _in_order({name for by, name in left if by == viewer}) for viewer in dict.fromkeys(by for by, _ in left)
            },
            "active": "active attacks are run by --active on a configuration",
        },
    }


def _in_order(names: Collection[str]) -> list[str]:
    return [name for name in ATTACKS.names() if name in names]


def about_audit(
    config: Config, summary: Mapping[str, Any], budget: str, seeds: Sequence[int], files: Mapping[str, str]
) -> dict[str, Any]:  # fmt: skip
    """The software, the date, the run and its data by digest, the budget and the seeds. `extent` says what was run.

    `files` are the digests of the run's files by name.
    """
    whole = blake2b(digest_size=16)
    for name, digest in sorted(files.items()):
        whole.update(f"{name} {digest}".encode())
    return {
        "software": software(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": {
            "name": config.run.name, "dataset": config.data.source, "partition": config.data.partition, "clients": summary.get("clients"),
            "algorithm": config.spec.name, "protection": config.protection.name,
            "privacy_unit": config.privacy.unit, "epsilon": summary.get("epsilon"), "delta": summary.get("delta"),
            "epsilon_budget": summary.get("epsilon_budget"), "rounds": summary["rounds"], "data_digest": summary["data_digest"],
            "files_digest": whole.hexdigest(),
        },
        "budget": budget,
        "seeds": list(seeds),
    }  # fmt: skip
