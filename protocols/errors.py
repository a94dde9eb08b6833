"""Errors of the protocols. None carries a secret value, so each may be logged or sent.

Two classes are kept apart, because they call for different reactions:

- `RemoteError`: what another party sent was refused. The refusing machine has not changed and still waits for
  a proper message.
- `LocalError`: this program drove its own machine wrongly (or its entropy source failed).
  The machine erases its secrets and is dead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = [
    "BudgetExceeded",
    "HelpersFailed",
    "LocalError",
    "MalformedMessage",
    "ProtocolError",
    "RemoteError",
    "SumFailed",
    "TooFewClients",
    "fatal",
]


class ProtocolError(Exception):
    """A protocol step was refused. `code` is stable and opaque enough to send to another party."""

    code = "protocol-error"

    def __reduce__(self) -> tuple[Callable[..., "ProtocolError"], tuple[object, ...]]:
        # between processes of one simulation an error travels as it is; these are made of other arguments than their text
        return _remade, (type(self), self.args, vars(self))


def _remade(kind: type[ProtocolError], args: tuple[object, ...], state: dict[str, object]) -> ProtocolError:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


class RemoteError(ProtocolError):
    """A received message was refused; the receiver's state is as if it had never arrived.

    `code` is one of a fixed list (such as "wrong-stage", "bad-signature"); `party` is the public
    number of the client that the offending part came from, None for the server or where it is not known.
    """

    def __init__(self, code: str, party: int | None = None) -> None:
        self.code = code
        self.party = party
        super().__init__(f"message refused: {code}" + ("" if party is None else f" (client {party})"))


class MalformedMessage(RemoteError):
    """Bytes that are not the canonical encoding of any message allowed here. The one error of every decoder."""

    def __init__(self) -> None:
        super().__init__("malformed")


class LocalError(ProtocolError):
    """This program misused its protocol machine, which is dead from now on. `code` says how; no value is repeated."""

    def __init__(self, code: str, hint: str = "") -> None:
        self.code = code
        super().__init__(f"protocol machine stopped: {code}" + (f" ({hint})" if hint else ""))


class TooFewClients(ProtocolError):
    """Fewer clients than the minimum cohort size take part: their sum would show an individual's contribution, so nothing is sent.

    With `threshold`, fewer are left than it takes to remove the masks of a secure sum, which may be more than the minimum cohort size.
    """

    code = "too-few-clients"

    def __init__(self, counts: tuple[int, ...], min_cohort: int, threshold: bool = False) -> None:
        self.counts = counts
        self.min_cohort = min_cohort
        sizes = ", ".join(str(count) for count in counts) or "none"
        super().__init__(
            f"too few clients are left to remove the masks: {sizes}; a cohort of this size needs {min_cohort}, "
            "its threshold, which is never below the minimum cohort size"
            if threshold
            else f"no group reaches the minimum cohort size of {min_cohort} clients (group sizes: {sizes}; min_cohort = {min_cohort}); "
            "their sums would show individuals"
        )


class SumFailed(ProtocolError):
    """A secure sum has ended without a result because of what clients sent.

    `code` is "false-shares", "false-secret" or "out-of-range". `offenders` are the clients that provably broke the protocol. `absent` are
    clients that were asked to prove that they had not and gave no answer; they may have dropped out. `repeatable` says that no share has
    been revealed, so that the sum may be taken again without both, with fresh keys. `among`: clients of which at least one broke the
    protocol, where nothing says which.
    """

    def __init__(
        self, code: str, offenders: tuple[int, ...] = (), absent: tuple[int, ...] = (), repeatable: bool = False,
        among: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.code = code
        self.offenders = offenders
        self.absent = absent
        self.repeatable = repeatable
        self.among = among
        named = "".join(
            f"; {noun}: {', '.join(map(str, clients))}" for noun, clients in (("offenders", offenders), ("no answer", absent)) if clients
        )
        after = "it may be taken again without them" if repeatable else "there is no second sum of these values"
        super().__init__(f"the sum failed: {code}{named}; {after}")


class HelpersFailed(ProtocolError):
    """A sum in one message has no result because of its helpers.

    `code` is "too-few-helpers": fewer answered than it takes; or "masks-differ": of the
    `helpers` at least one sent a false mask, and nothing shows which.
    """

    def __init__(self, code: str, helpers: tuple[int, ...] = ()) -> None:
        self.code = code
        self.helpers = helpers
        super().__init__(f"the sum failed: {code}" + (f" (helpers {', '.join(map(str, helpers))})" if helpers else ""))


class BudgetExceeded(ProtocolError):
    """A release was refused: with it a client would have spent more than its budget. Nothing was charged and nothing left.

    `client` is the one who would spend most, `would` its ε with the release, `spent` without.
    """

    code = "budget-exceeded"

    def __init__(self, purpose: str, client: int, spent: float, would: float, limit: float) -> None:
        self.purpose, self.client, self.spent, self.would, self.limit = purpose, client, spent, would, limit
        super().__init__(
            f"{purpose}: refused by the privacy ledger: client {client} has spent epsilon {spent:.4g} and would have {would:.4g}, "
            f"its budget is {limit:g}"
        )


@contextmanager
def fatal(die: Callable[[], None]) -> Iterator[None]:
    """A step of a machine. A refused message leaves the machine unchanged; any other error ends it.

    Raises `LocalError` "internal" in place of any other error: its message or traceback might contain a secret.
    """
    try:
        yield
    except (RemoteError, TooFewClients):
        raise
    except LocalError:
        die()
        raise
    except Exception:
        die()
        raise LocalError("internal") from None
