"""Secure aggregation in one message: clients upload once, and helpers unmask the sum of each group.

Guarantee: the server, if it lies, `helpers_colluding` of the helpers and any clients learn the sum of each group over one set of its
clients, at least the minimum cohort size, and nothing else about a value, see `protocols.one_message`. What sums bind to, which values go
into one sum only, and how clients weigh is as in `secagg`. A client that drops out costs nothing.
All but q = (helpers + helpers_colluding) // 2 + 1 helpers may fail. Under a robust rule terms list the clients of a bucket, and helpers
take no others in. Noise of `[privacy]` is the helpers': whoever colludes, a sum has it once at least for who is in it
(`protocols.one_message.noise`); a client's own share only makes its rounding free.
Reveals: as `secagg`; who is summed with whom also to helpers. Clients do not see the other clients of a sum. A client may be alone among
clients that collude. `helpers_colluding` + 1 helpers and the server read every update.
Source: `protocols.one_message`.
"""

import math

import msgspec

from ..federation import messages as m
from ..federation.protections import ServerParts
from ..protocols.errors import RemoteError
from ..protocols.one_message import Contribution, HelpedTerms, accept, upload
from ..protocols.one_message.messages import names
from ..protocols.secagg import SumRecord
from ..protocols.shared_noise import SHARE_STEPS
from .helped_sums import HelpedSums
from .secagg import RECORDS, SecaggClientSum, SecaggServerSum
from .secure_sums import ATTEMPTS

__all__ = ["HelpedClientSum", "HelpedServerSum"]


class HelpedClientSum(SecaggClientSum):
    """A client's part: one upload for an invitation. Its policy, its record and its contribution are those of `secagg`."""

    def reads(self, ask: m.SumStep) -> bool:
        return True

    def step(self, ask: m.SumStep) -> m.Stepped:
        """The client's upload.

        Raises `RemoteError` "forbidden", "old-slot", "wrong-bucket", and what `one_message.accept` and `upload` raise.
        """
        settings, roster = self._settings, self._settings.roster
        if ask.kind not in self.kinds or roster is None:
            raise RemoteError("forbidden")
        record = self._record(ask.kind)
        last = self._store.get("last-slot")
        after = None if last is None else (int.from_bytes(last[:8], "big"), int.from_bytes(last[8:], "big"))
        if after is not None and ask.slot <= after:
            raise RemoteError("old-slot")
        policy = msgspec.structs.replace(self._policy(ask), after=after)
        accepted = accept(ask.message, settings.identity, policy, settings.protection.helpers_colluding, roster)
        if accepted.terms.slot != ask.slot:
            raise RemoteError("wrong-slot")
        self._check_terms(ask, accepted.terms)
        self._store.put("last-slot", ask.slot[0].to_bytes(8, "big") + ask.slot[1].to_bytes(8, "big"))
        data, _ = upload(accepted, settings.identity, policy, record, self._inputs(ask, accepted.terms), self._entropy)
        self._store.keep(RECORDS[ask.kind], record, SumRecord.to_bytes)
        return m.Stepped(data)

    def _check_terms(self, ask: m.SumStep, terms: HelpedTerms) -> None:
        """Raises "wrong-bucket" for a sum beyond the client's bucket, and "forbidden" for blocks, or other noise than was asked for."""
        if self._settings.protection.robust != "none":
            if not terms.cohort:
                raise RemoteError("wrong-bucket")
            self._dealings.check((ask.slot[0], ask.slot[1] // ATTEMPTS), names(terms.cohort))
        noise = 0.0 if ask.noise is None else SHARE_STEPS * math.sqrt(ask.noise.survivors)
        if terms.noise != noise or bool(terms.clusters) != self._settings.protection.sums.oblivious:
            raise RemoteError("forbidden")

    def _inputs(self, ask: m.SumStep, terms: HelpedTerms) -> list[Contribution]:
        """What the client adds, after its own ledger was charged."""
        if ask.groups is not None:
            raise RemoteError("forbidden")
        vector, weight, blank = self._weighed(ask, terms)
        return [Contribution(vector, weight, is_levels=ask.noise is not None, is_blank=blank)]


class HelpedServerSum(SecaggServerSum):
    """The server's part, with helpers in place of more messages to clients."""

    def _runs(self, parts: ServerParts) -> HelpedSums:
        protection = parts.protection
        change = protection.smallest_sum if protection.cohort_change == "min_cohort" else 0
        return HelpedSums(
            protection.secure_sum, protection.smallest_sum, parts.session, parts.roster, parts.entropy, registry=parts.registry,
            colluding=protection.helpers_colluding, cohort_change=change, listed=protection.robust != "none", portions=parts.portions,
        )  # fmt: skip
