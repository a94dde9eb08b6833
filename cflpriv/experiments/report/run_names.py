"""Names that a report gives to data, runs, protections, groups and adversaries, in place of settings and numbers."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from ...algorithms.interface import ALGORITHMS
from ...streams import readable

if TYPE_CHECKING:
    from .run_files import RunFiles

__all__ = [
    "Kind",
    "adversary_place",
    "adversary_words",
    "data_words",
    "epsilon_words",
    "kind_of",
    "method_words",
    "protection_words",
    "title",
    "with_colluders",
]

Kind = Literal["clusters", "no groups", "alone"]
DATA = {
    "digits": "Handwritten digits", "emnist": "Handwritten characters", "mnist": "MNIST digits", "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100",
}  # fmt: skip
"""Data sets whose names in a configuration are no words."""
PROTECTIONS = {
    "permutation": "secret order", "signed_permutation": "secret order and signs", "hadamard": "secret Hadamard transform",
    "haar": "secret rotation", "ckks": "encrypted comparison", "shares": "comparison in shares", "sketch": "public sketch",
    "secagg": "secure sums", "secagg-oblivious": "secure sums, groups hidden", "one_message": "secure sums by helpers",
    "one_message-oblivious": "secure sums by helpers, groups hidden",
    "trimmed_mean": "trimmed mean", "geometric_median": "geometric median", "centred_clipping": "centred clipping",
}  # fmt: skip
ADVERSARIES = {
    "client": "one client", "released": "whoever gets the models", "outsider": "an outsider", "key-holder": "the key holder",
    "active-server": "a server that lies",
}  # fmt: skip
ADVERSARY_ORDER = ("outsider", "released", "client", "key-holder", "server", "active-server")
"""From who sees least; a server with helpers comes after all of these."""
FEW_FILES = 2


def title(runs: "Sequence[RunFiles]") -> str:
    """What a report is on: data, clients and, where every run has a guarantee of the same ε, that ε."""
    datas, counts = ({data_words(run) for run in runs}, sorted({int(run.summary["clients"]) for run in runs}))
    clients = f"{counts[0]} client{'s' if counts[-1] > 1 else ''}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} clients"
    spent = {epsilon_words(run.summary) for run in runs}
    guarantee = f", {next(iter(spent))}" if len(spent) == 1 and "" not in spent else ""
    return f"{' and '.join(sorted(datas)) if len(datas) <= FEW_FILES else f'{len(datas)} data sets'}, {clients}{guarantee}"


def data_words(run: "RunFiles") -> str:
    """The data of a run: the files of a table, or the name of a data set."""
    section = run.config.get("data", {})
    paths = [readable(PurePath(str(path)).name) for path in section.get("paths") or ()]
    if paths:
        return ", ".join(paths) if len(paths) <= FEW_FILES else f"{paths[0]} and {len(paths) - 1} more files"
    source = str(run.summary["dataset"]).partition("/")[0]
    return DATA.get(source, source[:1].upper() + source[1:].replace("_", " "))


def kind_of(summary: Mapping[str, Any]) -> Kind:
    """Whether a run sought groups, trained without groups, or left every client alone: nothing was sent."""
    if not summary["upload_bytes"]:
        return "alone"
    sought = "no groups are formed" not in summary["knowledge"] if "knowledge" in summary else (summary["clusters"] or 1) > 1
    return "clusters" if sought else "no groups"


def method_words(summary: Mapping[str, Any]) -> str:
    """What a run trained, with its ε."""
    kind, spec = kind_of(summary), ALGORITHMS.get(str(summary["algorithm"]))
    words = {
        "clusters": "One model, no groups found" if summary["clusters"] == 1 else "Clusters",
        "alone": "Each client alone",
        "no groups": "One model for all" if spec is not None and spec.cohorts == "one" and spec.serves_released else "No groups",
    }
    return ", ".join(filter(None, (words[kind], epsilon_words(summary))))


def epsilon_words(summary: Mapping[str, Any]) -> str:
    """The ε that a run spent; "" without a guarantee."""
    return "" if summary.get("epsilon") is None else f"ε = {summary['epsilon']:.3g}"


def protection_words(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The protections of a run in words; a setting that has none keeps its name."""
    section = config.get("protection", {})
    settings = [setting for key in ("gram", "sum", "robust") for setting in _settings(section.get(key))]
    words = [PROTECTIONS.get(setting, setting) for setting in dict.fromkeys(settings)]
    if summary.get("epsilon") is not None:
        words.append("privacy noise")
    return " + ".join(words) or ("nothing is sent" if kind_of(summary) == "alone" else "none")


def _settings(value: Any) -> list[str]:
    several = value if isinstance(value, list) else [value]
    return [str(setting) for setting in several if setting not in (None, "none")]


def adversary_place(adversary: str) -> tuple[int, int]:
    """What sorts adversaries wherever several are named: who sees least comes first, a server with helpers last."""
    name, _, helpers = adversary.partition("+")
    place = ADVERSARY_ORDER.index(name) if name in ADVERSARY_ORDER else len(ADVERSARY_ORDER)
    return (place if not helpers else len(ADVERSARY_ORDER) + 1, int(helpers) if helpers.isdigit() else 0)


def adversary_words(adversary: str) -> str:
    """An adversary for people: "the server", "the server + 2 clients"."""
    name, _, helpers = adversary.partition("+")
    if helpers:
        return f"the {name.replace('-', ' ')} + {helpers} client{'' if helpers == '1' else 's'}"
    return ADVERSARIES.get(adversary, f"the {name.replace('-', ' ')}")


def with_colluders(cell: Mapping[str, Any]) -> str:
    """The adversary of a figure in audit.json, with the clients that the figure takes to collude: "server+5"."""
    name, _, own = str(cell["adversary"]).partition("+")
    count = int(cell.get("colluders") or 0) + (int(own) if own.isdigit() else 0)
    return f"{name}+{count}" if cell.get("colluders") else str(cell["adversary"])
