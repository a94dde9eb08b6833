"""The state of a server: who is there, what clients hold, where the run stands, and all of it for a checkpoint."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ..contract.handles import Held, HeldKey, Labels
from ..contract.operations import Sampling
from ..contract.protection import Protection
from ..contract.transcript import Transcript, Unprotected
from ..errors import InputError
from ..privacy.client_level import ClippedMean, LocalGram
from ..privacy.receipts import PrivacyLedger
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import TooFewClients
from ..protocols.keys import Roster
from ..randomness import Stream, stream
from .cohort import draw_cohort
from .epochs import Epochs
from .group_secret import Agreement
from .known_values import Known
from .protections import ComparisonServer, ServerParts, SumServer
from .registry import ClientRegistry
from .relay import Witness
from .server_ledger import ServerLedger
from .transport import Transport

__all__ = ["ServerState"]

SKIPPED, SKIPPED_EPOCHS = 1 << 10, 1 << 8
"""By so many turns and numbers, and clustering epochs, of which a session has some thousands, a resumed run skips what the interrupted one
may have used. A checkpoint is due before that many are used."""


class ServerState:
    """A server without its operations, which are in `server`.

    `roster` pins the clients' signing keys. Secure sums in active mode need it; without it the first client that enrols as a number keeps
    that number. `seed` feeds public randomness: batches and cohorts equal those of a simulated federation of the same seed. Protections
    that clients apply must be in the clients' own settings, too; a client whose settings differ refuses.

    With `accounts` (per sample: tasks run in their private form, clients draw the noise) or `clipped` (per client: in means; `local` for
    single rows) what leaves clients is differentially private. The ledger is charged before any client is asked.

    Cohorts are drawn from the clients that are present, or from those of `drawn_from`, without those of them that are absent: then nobody
    takes an absent client's place, and who is asked in which round is known beforehand (`schedule`).

    Under `ckks` the roster names the key holder, a separate party at its own place, under `shares` several holders; without them `gram`
    raises `KeyHolderLost`.

    Raises `InputError` if the roster is missing where it is needed.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        protection: Protection | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        roster: Roster | None = None,
        transcript: Transcript | None = None,
        entropy: Entropy = system_entropy,
        session: bytes | None = None,
        expect: Iterable[int] | None = None,
        accounts: PrivacyLedger | None = None,
        clipped: ClippedMean | None = None,
        local: LocalGram | None = None,
        strict: bool = True,
        witness: Witness | None = None,
        drawn_from: Sequence[int] | None = None,
    ) -> None:
        self.protection = protection or Protection()
        self.sampling = sampling or Sampling()
        self.seed = seed
        self.transcript = transcript or Transcript()
        active = self.protection.secure and self.protection.secagg_mode == "active"
        if active and roster is None:
            raise InputError("protection.secagg_mode: 'active' needs the clients' pinned roster; give it, or use 'passive'")
        if self.protection.transformed and roster is None:
            raise InputError("protection: a transform that clients share needs their pinned roster, by which they agree on its secret")
        self.session = session or entropy(16)
        self._registry = ClientRegistry(transport, self.session, roster, expect, entropy)
        self._ask = self._registry.ask
        self._agreement = None
        if self.protection.transformed and roster is not None:
            self._agreement = Agreement(self._registry, self.session, roster)
        named = (lambda purpose: purpose) if self._agreement is None else self._agreement.named
        parts = ServerParts(self._registry, self.session, self.protection, roster, entropy, named, clipped, local)
        self._sums: SumServer = self.protection.sums.server(parts)
        self._comparisons: ComparisonServer = self.protection.comparison.server(parts)
        self.accounts = accounts
        self._adaptive = None if clipped is None else clipped.adaptive
        without_form = () if clipped is None else ("gather", "relay") if local is not None else ("gather", "relay", "gram")
        self._ledger = ServerLedger(accounts, without_form)
        self.protection_seconds = 0.0
        self._drawn_from = None if drawn_from is None else tuple(sorted(drawn_from))
        self._strict, self._witness, self._noisy_rows = strict, witness, local is not None
        self._round = self._turn = -1
        self._calls = self._numbers = 0
        self._resumed = 0
        self._at_checkpoint = (-1, 0)
        self._came: set[int] = set()
        self._known: weakref.WeakKeyDictionary[HeldKey, Known] = weakref.WeakKeyDictionary()

    # --- clients

    @property
    def clients(self) -> tuple[int, ...]:
        return tuple(sorted(self._here))

    @property
    def _here(self) -> frozenset[int]:
        return self._registry.present if self._agreement is None else self._registry.present & self._agreement.members

    @property
    def disagreement(self) -> str:
        """Why clients have no common transform yet, where they need one; else empty."""
        return "" if self._agreement is None else self._agreement.lacking

    @property
    def holder_missing(self) -> bool:
        """Whether encrypted comparisons must wait for the key holder."""
        there = self._registry.holders
        return self.protection.encrypted and not (0 in there and len(there) >= self.protection.fewest_holders)

    @property
    def removed(self) -> frozenset[int]:
        """The clients that were removed for good."""
        return frozenset(self._registry.removed)

    @property
    def refusals(self) -> list[tuple[int, str, str]]:
        """(client, stage, error code) of every refusal, for the operator; `messages.REFUSALS` explains the codes."""
        return self._registry.refusals

    def enrol(self) -> tuple[int, ...]:
        """Greet all places without a client that answers. Returns the clients that enrolled."""
        return self._entered(self._registry.enrol())

    def _entered(self, came: tuple[int, ...]) -> tuple[int, ...]:
        if self._agreement is not None:
            self._agreement.extend(self._record("group"))
        return came

    def _greet_lost(self) -> None:
        """Enrol clients again that missed the last operation, so that they do not miss the round."""
        if came := self._registry.greet_lost():
            self._came.update(self._entered(came))

    def lose(self, clients: Sequence[int]) -> None:
        """Clients went away: they enrol anew before they take part again. Raises `InputError` for unknown ones."""
        self._check_known(clients)
        for client in clients:
            self._registry.lose(client)

    def remove(self, clients: Sequence[int]) -> None:
        """Remove clients for good. Under a shared transform the others agree on a fresh secret, which the removed clients do not get.

        Later sums and clustering epochs use the fresh secret. Open clustering epochs and transformed sums keep theirs: clients that have
        it go on with them; later clients cannot use them until they are made anew (`gram` afresh, `fold`).

        Raises `TooFewClients` if not more than half of the roster is left to agree, `InputError` for unknown clients.
        """
        self._check_known(clients)
        self._registry.remove(clients)
        if self._agreement is not None:
            self._agreement.renew(self._record("group"))

    def _on(self, on: Sequence[int] | None) -> list[int]:
        return self._some(on, self._here if on is None else self._here.intersection(on))

    def _holders(self, held: Held, on: Sequence[int] | None) -> list[int]:
        if held.key not in self._known:
            raise InputError(f"{held.key.name} is not held by clients of this federation")
        return self._some(on, self._here.intersection(held.clients if on is None else set(on).intersection(held.clients)))

    def _some(self, on: Sequence[int] | None, clients: Iterable[int]) -> list[int]:
        self._check_known(on)
        if not clients:
            raise TooFewClients((), 1)
        return sorted(clients)

    def _check_known(self, on: Iterable[int] | None) -> None:
        """Absent clients are left out; a number that no client ever had is a mistake."""
        unknown = [client for client in on or () if not self._registry.knows(client)]
        if unknown:
            raise InputError(f"clients {unknown} are not known to this federation")

    # --- rounds

    @property
    def round(self) -> int:
        return self._round

    @property
    def turn(self) -> int:
        """Counts the rounds that were begun, repeated ones too: it never repeats."""
        return self._turn

    @property
    def clip_norm(self) -> float | None:
        """The clip norm of the next sum under client-level privacy, where it moves."""
        return None if self._adaptive is None else self._adaptive.norm

    @property
    def epochs(self) -> Epochs[Any]:
        """The open clustering epochs."""
        return self._comparisons.epochs

    @property
    def merge_below(self) -> int:
        return self.protection.smallest_group if self.protection.small_clusters == "merge" else 1

    def begin_round(self, number: int) -> tuple[int, ...]:
        """Begin a round: enrol new places and clients that did not answer lately.

        Returns the clients that enrolled, now or since the last round began.
        """
        self._round, self._calls = number, 0
        self._turn += 1
        self._registry.round, self._registry.call = number, 0
        came = self._came.union(self.enrol())
        self._came.clear()
        return tuple(sorted(came & self._here))

    def _next_call(self) -> int:
        """The number of the next call within the round."""
        self._calls += 1
        self._registry.call = self._calls
        return self._calls

    def _number(self) -> int:
        """A fresh number for values that clients hold."""
        self._numbers += 1
        return self._numbers

    def numbers(self) -> dict[HeldKey, int]:
        """The numbers of the values that clients hold."""
        return {key: known.number for key, known in self._known.items()}

    def listen(self, say: Callable[[str], None], tick: Callable[[int, int], None]) -> None:
        """`say` gets an estimate before an expensive step starts; `tick` gets (done, total) during it."""
        self._comparisons.listen(say, tick)

    def stream(self, purpose: str, client: int = -1) -> Stream:
        return stream(self.seed, purpose, self._round, client)

    def cohort(self, labels: Labels | Held | None = None) -> tuple[int, ...]:
        known, smallest = None if isinstance(labels, Held) else labels, self.protection.smallest_group
        if self._drawn_from is None:
            return draw_cohort(self.sampling, self.clients, known, smallest, self.seed, self._round)
        together = dict.fromkeys(self._drawn_from, 0)
        drawn = draw_cohort(self.sampling, self._drawn_from, together, smallest, self.seed, self._round)
        present = tuple(client for client in drawn if client in self._here)
        if not present:
            raise TooFewClients((0,), smallest)
        return present

    def _record(self, operation: str) -> Callable[..., None]:
        return partial(self.transcript.add, self._round, operation)

    # --- checkpoints

    @property
    def checkpoint_due(self) -> bool:
        """Whether half of what a resumed run skips has been used since the last checkpoint."""
        turn, epochs = self._at_checkpoint
        return 2 * (self._turn - turn) >= SKIPPED or 2 * (self.epochs.count - epochs) >= SKIPPED_EPOCHS

    def saved(self) -> dict[str, Any]:
        """The state for a checkpoint. It has no client's value, and no secret but the session's name."""
        self._at_checkpoint = self._turn, self.epochs.count
        counters = {"round": self._round, "turn": self._turn, "numbers": self._numbers, "epochs": self.epochs.count}
        agreement = None if self._agreement is None else self._agreement.saved()
        who = {"removed": sorted(self.removed), "agreement": agreement}
        moving = {} if self._adaptive is None else {"clip_norm": self._adaptive.norm}
        rest = {"calls": self._calls, "resumed": self._resumed, "bare": asdict(self.transcript.unprotected)}
        return {"session": self.session, **counters, **rest, **who, **moving}

    def restore(self, saved: Mapping[str, Any], resumed: int | None = None) -> None:
        """Continue from `saved` in a new process, after the `resumed`-th interruption of the run (by default the first since `saved`).

        Turns, numbers and epochs skip a range for each interruption since the checkpoint: each may have used more than the checkpoint
        knows, and no transform or mask key is used twice. With 0 interruptions nothing is skipped: for tests, with entropy that continues.
        """
        if saved["session"] != self.session:
            raise InputError("session: is not that of the checkpoint; give it when the federation is built")
        before = saved.get("resumed", 0)  # checkpoints of an early 0.2.0 lack it
        resumed = before + 1 if resumed is None else resumed
        since = max(1, resumed - before) if resumed else 0
        self._ledger.restored = since > 0
        self._round, self._turn, self._calls = saved["round"], saved["turn"] + since * SKIPPED, saved["calls"]
        self._numbers, self.epochs.count = saved["numbers"] + since * SKIPPED, saved["epochs"] + since * SKIPPED_EPOCHS
        self._resumed, self._at_checkpoint = max(resumed, before), (self._turn, self.epochs.count)
        self.transcript.unprotected = Unprotected(**saved["bare"])
        if self._adaptive is not None:
            self._adaptive.norm = saved["clip_norm"]
        self._registry.remove(saved["removed"])
        if self._agreement is not None and saved["agreement"] is not None:
            self._agreement.restore(saved["agreement"])

    def known(self, key: HeldKey) -> dict[str, Any]:
        """What the server knows of the values under a key, for a checkpoint."""
        return self._known[key].saved()

    def know(self, key: HeldKey, saved: Mapping[str, Any]) -> None:
        """The inverse of `known`."""
        self._known[key] = Known.restored(saved)
