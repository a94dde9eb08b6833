"""The table of attacks. `python -m cflpriv.attacks.attack_table` prints docs/attacks/table.md."""

from ..generated_pages import generated_page
from ..plugins import ATTACKS
from ..streams import print_file
from . import Attack
from .figures.payloads import ENTRIES, OPENED, PayloadPart

__all__ = ["READS", "page", "reads_of"]

READS = {
    ("mean", "bytes"): "secure sums",
    ("mean", "update"): "updates",
    ("mean", "blind"): "transformed updates",
    ("mean", "prototype"): "prototypes",
    ("mean", "control"): "control variates",
    ("mean", "weights"): "weights",
    ("compute", "model"): "models sent",
    ("compute", "anchor"): "models sent",
    ("compute", "labels"): "cluster labels",
    ("compute", "control"): "control variates",
    ("compute", "prototypes"): "prototypes",
    ("gram", "rows"): "compared vectors",
    ("gram", "labels"): "cluster labels",
    ("gram", "products"): "decrypted products",
    ("gather", "scores"): "influence scores",
    ("gather", "owns"): "labels that clients declare",
    ("gather", "choice"): "choices of a model",
    ("gather", "losses"): "losses that clients report",
    ("gather", "confusion"): "counts by class that clients report",
    ("gather", "changed"): "declared changes of data",
    ("gather", "correct"): "scores on test samples",
    ("relay", "wanted"): "requests for models",
    ("relay", "own"): "relayed models",
    ("fold|product", "blind"): "folds of transformed vectors",
}
"""Words for a payload part, by its operation and the first of its names."""

_COMMAND = "python -m cflpriv.attacks.attack_table > docs/attacks/table.md"
_HEAD = """For readers of an audit who ask what an attack reads, and what it does not show. The rows are in `attacks/__init__.py` and
`attacks/figures/payloads.py`. [Reading an audit](README.md) explains figures and statuses.

*Reads*: the parts of messages that the attack takes; updates that are compared (CFL) count as updates. *Risk*: singling out, linkability
or inference ([risks](README.md#risks)). *Numbers*: whether the attack also reads runs whose labels are numbers. *Active*: whether only a
server that deviates can make it. `cflpriv list attacks` prints how each attack works.

| attack | reads | learns | risk | numbers | active | limits |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """docs/attacks/table.md: a row for each attack of the suite, in the suite's order."""
    return generated_page("Table of attacks", _COMMAND, _HEAD + "".join(_row(name, attack) for name, attack in ATTACKS.items()))


def reads_of(name: str, attack: Attack) -> str:
    """What an attack takes, in words: the payload parts that name it as their reader, each once."""
    parts = [_words(entry) for entry in (*ENTRIES, OPENED) if name in entry.readers]
    if parts:
        return ", ".join(dict.fromkeys(parts))
    if attack.reruns:
        return "the configuration, run again"
    return "answers of clients to crafted models" if attack.active else "the names of all parts"


def _words(entry: PayloadPart) -> str:
    return READS.get((entry.operation, entry.part.partition("|")[0]), f"`{entry.operation} {entry.part}`".replace("|", "\\|"))


def _row(name: str, attack: Attack) -> str:
    flags = ("yes" if attack.numbers else "no", "yes" if attack.active else "no")
    cells = (f"`{name}`", reads_of(name, attack), attack.learns or attack.summary, attack.risk or "–", *flags, attack.limits)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    print_file(page())
