"""What an audit.json states of itself, so that it can be read without the run's folder."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

from ...experiments.config.config import Config
from ...plugins import ATTACKS
from ...protocols.bounded_files import read_json
from ..adversary import ADVERSARIES

__all__ = ["about_audit", "software"]


def software() -> dict[str, str]:
    """The version of the package, and the commit that it was installed from, where the installation names one."""
    made = {"name": "cflpriv", "version": metadata.version("cflpriv")}
    path = next((file.locate() for file in metadata.files("cflpriv") or () if file.name == "direct_url.json"), None)
    tree = {} if path is None else read_json(Path(str(path)))
    commit = tree.get("vcs_info", {}).get("commit_id")
    return made | ({"commit": commit} if isinstance(commit, str) else {})


def about_audit(
    config: Config, summary: Mapping[str, Any], budget: str, seeds: Sequence[int], adversaries: Sequence[str], attacks: Sequence[str],
    files: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """The software, the date, the run and its data by digest, what was run with which budget and seeds, and what was not run.

    `files` are the digests of the run's files by name.
    """
    whole = blake2b(digest_size=16)
    for name, digest in sorted(files.items()):
        whole.update(f"{name} {digest}".encode())
    colluding = any(name.startswith("server+") for name in adversaries)
    left_out = {name: words for name, words in ADVERSARIES.items() if name not in adversaries and not (name == "server+N" and colluding)}
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
        "adversaries": list(adversaries),
        "attacks": list(attacks),
        "not_run": {
            "adversaries": left_out,
            "attacks": [name for name in ATTACKS.names() if name not in attacks],
            "active": "active attacks are run by --active on a configuration",
        },
    }  # fmt: skip
