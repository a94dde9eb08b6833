"""What may leave a client: the rule by which the client's own protection decides.

What is compared (signatures, representations) and what is summed (updates, models, prototypes) is hidden by `gram` and by `sum`. A hidden
value itself leaves by the operation that hides it; numbers that are computed from it leave as their kind says. The session contract
(`client_contract`) stands before this rule and is narrower: which parts of which tasks leave at all.

    kind of a part                      | what is compared is hidden    | what is summed is hidden
    ------------------------------------|-------------------------------|-------------------------------------------------------------
    compared, and all that was computed | `gram` only                   | in the clear if it was computed at no model, else not at all
    from such                           |                               |
    choice, request                     | not by `gram`                 | `gather`, whole numbers *; if oblivious, requests only
    score                               | not by `gram`                 | `gather` *
    measure                             | not by `gram`                 | `gather`, single numbers; under secure sums not at all
    summed: updates, models, …          | as `sum` says; by `gram`      | `sum`, `relay` **, and `gram` where that hides what is compared

** under secure sums only with the client's own `relay_updates`; without it `relay` sends what `gather` may release, and nothing else
* if they are fewer than the smallest model has that they were computed at.

Where the client's own settings have `privacy.local = ["gram"]` and nothing hides what is compared, `gram` releases all kinds: each row
carries the client's own noise, which protects a whole client whatever it was computed from.

The installed task classes declare the kinds of their parts (`parts`). The rule depends on the kind of a part and on what it was computed
from, not on its name or on copies that a server asks for. **What the rule does not protect**: a choice, a score or a loss is a number about
the data at models that the server chooses, and many of them reveal much; only `[privacy]` protects against a server that asks for many.
Whether a task has a result, and its shape, are the same for all data (`stand_in`).
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args

from ..contract.protection import Protection
from ..protocols.errors import RemoteError
from ..types import PartKind
from .values import Origin, ValueForm

__all__ = ["Operation", "check", "compares", "kinds_of", "may_leave"]

Operation = Literal["gram", "gather", "sum", "relay"]


def kinds_of(task: Any) -> dict[str, PartKind]:
    """The kind of each part of a task, as the installed class declares it; "summed" if it declares none."""
    declared = getattr(task, "parts", {})
    kinds = declared if isinstance(declared, Mapping) else {}
    return {part: kinds[part] if kinds.get(part) in get_args(PartKind) else "summed" for part in declared}


def compares(task: Any) -> bool:
    """Whether a task, or a task inside it, computes values that clients compare, whatever kind the outer task declares."""
    inner = [getattr(task, attribute.name) for attribute in fields(task)]
    return "compared" in kinds_of(task).values() or any(
        compares(inner_task) for inner_task in inner if is_dataclass(inner_task) and not isinstance(inner_task, type)
    )


def may_leave(protection: Protection, operation: Operation, part: str, form: ValueForm, origin: Origin, noisy: bool = False) -> bool:
    """Whether a part of a held value may leave by an operation: as it is, or by `gram` and `sum` under this protection.

    The rule does not look at the value, only at its `form`.
    `noisy`: the client adds noise of its own to each row that `gram` releases (`privacy.local`).
    """
    kind, compared, hidden = origin.kind(part), origin.is_compared(part), protection.comparison.hides
    if compared and hidden:
        return operation == "gram"
    if operation == "gram" and noisy and not hidden:
        return True
    if operation == "sum":
        return True
    if operation == "relay":
        if not protection.secure or protection.relay_updates:
            return True
        operation = "gather"  # the server chooses the recipients, and one may be its accomplice
    if operation == "gram" and hidden:
        return kind in ("compared", "summed")
    if not protection.sums.hides and protection.min_cohort <= 1:
        return True
    if compared:
        return not origin.size
    numbers, dtype = form
    if operation == "gram":
        return False
    if kind in ("choice", "request", "score") and 0 < origin.size <= numbers:
        return False
    if kind in ("choice", "request"):
        return dtype in "biu" and (not protection.sums.oblivious or kind == "request")
    if kind == "score":
        return origin.size > 0
    return kind == "measure" and numbers == 1 and not protection.secure


def check(protection: Protection, operation: Operation, forms: Mapping[str, ValueForm], origin: Origin, noisy: bool = False) -> None:
    """Raises `RemoteError` "forbidden" unless all of these parts may leave by this operation."""
    for part, form in forms.items():
        if not may_leave(protection, operation, part, form, origin, noisy):
            error = RemoteError("forbidden")
            error.add_note(
                f"its release policy keeps {part!r} from {operation!r} under protection {protection.name} (what may leave: docs/flower.md; "
                '[run] release_policy = "off" lifts it in simulations)'
            )
            raise error
