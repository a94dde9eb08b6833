"""The server's side of `fold`: blind parts of one value, made one by a client."""

from collections.abc import Callable, Sequence
from math import prod

from ..errors import InputError
from ..handles import Blind, Shared
from ..protocols.errors import MalformedMessage
from ..types import check_array
from . import messages as m
from .means import transform_size
from .roll import ClientsLost, Roll

__all__ = ["folded"]


def folded(
    roll: Roll, session: bytes, kind: str, clients: Sequence[int], blind: Sequence[Blind], on: int | None, place: str,
    record: Callable[..., None],
) -> Blind:  # fmt: skip
    """Blind parts made one under a fresh transform of this kind, at client `on` if it is there; another is asked if one gives none.

    `place` names the call. Raises `ClientsLost` if nobody does.
    """
    value = m.to_one(Shared(blind=tuple(blind)), {})
    size = prod(blind[0].shape)
    for turn, client in enumerate(sorted(clients, key=lambda one: one != on)):
        purpose = f"{place}/{turn}"
        answer = roll.ask({client: m.Fold(session, purpose, value)}, "fold").get(client)
        if isinstance(answer, m.Given) and len(answer.values) == 1:
            try:
                hidden = check_array("fold", m.from_tensor(answer.values[0].value), ndim=1)
                if len(hidden) != transform_size(kind, size):  # it would be everybody's model
                    raise MalformedMessage
            except (MalformedMessage, InputError):
                roll.refusals.append((client, "fold", "malformed"))
            else:
                arguments = {f"fold/{term.transform}": term.value for term in blind}
                record("arguments", "server", "clients", [client], arguments, readers=("server", "clients"))
                context = {"transform": purpose}
                record("blind result", "clients", "server", [client], [{"blind": hidden}], readers=("server",), context=context)
                return Blind(purpose, hidden, 0, size, blind[0].shape, size)
    raise ClientsLost([] if on is None else [on])
