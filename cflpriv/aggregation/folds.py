"""The server's side of `fold` and `product`: blind parts of one value, made one by a client."""

from collections.abc import Callable, Sequence
from math import prod

from ..contract.handles import Blind, Shared
from ..errors import InputError
from ..federation import messages as m
from ..federation.registry import ClientsLost, Roll
from ..protocols.errors import MalformedMessage
from ..types import check_array
from .means import transform_size

__all__ = ["folded"]


def folded(
    roll: Roll, session: bytes, kind: str, clients: Sequence[int], blind: Sequence[Blind], times: Sequence[Blind], on: int | None,
    place: str, named: Callable[[str], str], verb: str, record: Callable[..., None],
) -> Blind:  # fmt: skip
    """Blind parts made one, and multiplied by the number in `times` if there are any, under a fresh transform of this kind.

    Client `on` does it if it is there; another is asked if one gives none. `place` names the call. Raises `ClientsLost` if nobody does.
    """
    value = m.to_one(Shared(blind=tuple(blind)), {})
    number = (m.to_one(Shared(blind=tuple(times)), {}),) if times else ()
    size = prod(blind[0].shape)
    for turn, client in enumerate(sorted(clients, key=lambda one: one != on)):
        purpose = named(f"{place}/{turn}")
        answer = roll.ask({client: m.Fold(session, purpose, value, number)}, verb).get(client)
        if isinstance(answer, m.Given) and len(answer.values) == 1:
            try:
                hidden = check_array(verb, answer.values[0].value, ndim=1)
                if len(hidden) != transform_size(kind, size):  # it would be everybody's model
                    raise MalformedMessage
            except (MalformedMessage, InputError):
                roll.refusals.append((client, verb, "malformed"))
            else:
                arguments = {f"{name}/{one.transform}": one.value for name, terms in ((verb, blind), ("times", times)) for one in terms}
                record("arguments", "server", "clients", [client], arguments, readers=("server", "clients"))
                context = {"transform": purpose, "kind": kind}
                record("blind result", "clients", "server", [client], [{"blind": hidden}], readers=("server",), context=context)
                return Blind(purpose, hidden, 0, size, blind[0].shape, size)
    raise ClientsLost([] if on is None else [on])
