"""The client's machine of a secure sum.

A single-use machine: bytes in, bytes out. It does no I/O, has no clock and draws randomness only from the
entropy it is given. Its steps are the rows of `states.CLIENT`; a step is a function from the old frozen state
and a checked message to the new state and the reply.

Errors. `RemoteError` and `TooFewClients`: the received bytes were refused, and the state is exactly as
before. `LocalError`: the caller's own mistake (no or unusable values, values at the wrong time, an entropy
source that fails, use after death); the machine forgets its secrets and is dead.

Guarantee: in active mode, against a server together with fewer than n/3 of the cohort (and in passive mode
against an honest-but-curious one with fewer than t): what leaves this machine shows no more than the sum over
at least `min_cohort` survivors (fewer honest ones, if some survivors collude). One object answers a message once,
whichever threads call it, and is neither copied nor pickled. Reveals: that the client takes part, when it drops
out, its public keys; the sum; whose shares it complained about. A state restored from an old copy can be made to
answer twice, so a stored state must be replaced, never kept; so must the record.

One value in two attempts. A sum that failed before any share was revealed may be taken again (`SumFailed`). A
client reveals shares for one sum of a value only: its machines share a record of its sums (`summed`), which each of them
checks and writes before it reveals anything. Then no server that lies gets two sums that
differ by one client: who revealed shares in the first attempt is in no later one, and the first is opened only
by t such survivors, at least t − c > n/3 of them honest, who are all in the first sum and not in the second.
"""

from collections.abc import Iterable, Sequence
from threading import Lock
from types import NoneType
from typing import Any

import msgspec

from .. import codec
from ..copies import check_own
from ..entropy import Entropy, system_entropy
from ..errors import LocalError, RemoteError, fatal
from ..keys import Identity, Roster, private_key, public_key, sign, verify
from ..uncopied import uncopied
from . import messages
from .bindings import (
    ADVERT,
    CONSISTENT,
    advert_parts,
    binding,
    box_key,
    check_advert,
    pair_key,
    self_key,
)
from .complaints import check_opened, open_dealt
from .graph import neighbours
from .messages import (
    Advert,
    Adverts,
    Challenge,
    Complaint,
    Consistent,
    Deliver,
    Invite,
    Masked,
    Opening,
    Reveal,
    Settle,
    Share,
    Shares,
    Slot,
    Survivors,
    Terms,
    Unmask,
)
from .policy import MaskKey, Policy, check_proposal, check_roster, enough
from .shares import Pair, deal, open_box
from .states import CLIENT, CLIENT_COMPLAINTS, ClientStage
from .summed import SumRecord
from .vectors import Contribution, Mask, add_masks, counted_weight, encode_inputs, wrap

__all__ = ["Client"]

_STATE_LIMIT_BYTES = 1 << 34


class _State(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    _shown = ("stage", "client")
    stage: str
    client: int
    policy: Policy
    slot: Slot | None = None
    terms: Terms | None = None
    mask_seed: bytes = b""
    box_seed: bytes = b""
    self_seed: bytes = b""
    next_seeds: tuple[bytes, bytes] | None = None
    peers: tuple[Advert, ...] = ()
    box_keys: tuple[bytes, ...] = ()
    dealt: tuple[Pair, ...] = ()
    held: tuple[Pair, ...] = ()
    accused: tuple[int, ...] = ()
    withheld: bytes = b""
    mask_key: bytes = b""
    members: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    clipped: int = 0
    weights: tuple[float, ...] = ()


@uncopied("it answers each message once; see to_bytes")
class Client:
    """One client's part in one sum.

    Args:
        identity: its long-term secrets.
        policy: what it insists on.
        record: of all sums of this client, the same one for all its machines. Store it before a reply is sent; it stays at hand as
            the attribute `record`.
        roster: the pinned roster; required in active mode.
        mask_key: the key advertised for this slot with an earlier upload, if there is one.
        entropy: source of all randomness.

    Raises:
        LocalError: "no-roster" or "not-on-roster" in active mode; "mask-key-used".
    """

    def __init__(
        self,
        identity: Identity,
        policy: Policy,
        *,
        record: SumRecord,
        roster: Roster | None = None,
        mask_key: MaskKey | None = None,
        entropy: Entropy = system_entropy,
    ) -> None:
        check_own("policy", policy, Policy)
        check_own("identity", identity, Identity)
        check_own("record", record, SumRecord)
        check_own("roster", roster, Roster, NoneType)
        check_own("mask key", mask_key, MaskKey, NoneType)
        check_roster(identity, policy, roster)
        self._identity, self._roster, self._entropy, self._lock, self.record = identity, roster, entropy, Lock(), record
        stage = ClientStage.NEW if mask_key is None else ClientStage.ADVERTISED
        slot = None if mask_key is None else mask_key.slot
        mask_seed, box_seed = (b"", b"") if mask_key is None else mask_key.take()
        self._state = _State(stage, identity.client, policy, slot, mask_seed=mask_seed, box_seed=box_seed)

    def __repr__(self) -> str:
        return f"Client(client={self._state.client}, stage={self.stage.value!r})"

    @property
    def stage(self) -> ClientStage:
        """Where the machine is."""
        return ClientStage(self._state.stage)

    @property
    def wants_values(self) -> bool:
        """Whether the next message (a Deliver) must be received together with the contributions."""
        return self.stage is ClientStage.SHARED

    @property
    def policy(self) -> Policy:
        """What it insists on."""
        return self._state.policy

    @property
    def terms(self) -> Terms | None:
        """The accepted terms, None before that."""
        return self._state.terms

    @property
    def clipped(self) -> int:
        """How many of this client's values lay outside the clip range and were clipped (known once the vector is masked)."""
        return self._state.clipped

    def next_mask_key(self) -> MaskKey | None:
        """The key advertised for the following slot; once, after the upload. None if there is none (or it was taken)."""
        with self._lock:
            state = self._state
            if state.next_seeds is None or state.terms is None or state.terms.following is None:
                return None
            self._state = msgspec.structs.replace(state, next_seeds=None)
            return MaskKey(*state.next_seeds, state.terms.following)

    def receive(self, data: bytes, *contributions: Contribution) -> bytes:
        """Takes the server's next message and gives the reply to send. Of two threads with one message, one gets the reply.

        Args:
            data: the received bytes, untrusted.
            contributions: this client's input, exactly when `wants_values`: one, or in a sum with blocks any number for
                distinct clusters.

        Raises:
            RemoteError: the message was refused (MalformedMessage is one); nothing has changed.
            TooFewClients: answering would show individuals; nothing has changed.
            LocalError: see the module; the machine is dead.
        """
        for contribution in contributions:
            if type(contribution) is not Contribution:
                check_own("contribution", contribution, Contribution)
        with self._lock:
            return self._receive(data, contributions)

    def _receive(self, data: bytes, contributions: Sequence[Contribution]) -> bytes:
        if self.stage is ClientStage.DEAD:
            raise LocalError("dead", "an earlier local error stopped this machine")
        with fatal(self._die):
            if contributions and not self.wants_values:
                raise LocalError("unexpected-values", "values belong to the Deliver message")
            state, reply = self._step(messages.decode_server(data), contributions)
        self._state = state
        return messages.encode(reply)

    def to_bytes(self) -> bytes:
        """The whole state, secrets included (not the identity).

        Store it as secretly as the identity, *before* the reply is sent, and replace, never keep, older copies: a state
        that answers twice masks two vectors with the same streams, or reveals both shares of somebody.
        """
        return codec.encode(self._state)

    @staticmethod
    def from_bytes(
        data: bytes, identity: Identity, *, record: SumRecord, roster: Roster | None = None, entropy: Entropy = system_entropy
    ) -> "Client":
        """The machine that `to_bytes` stored, with the client's record of sums.

        Raises:
            MalformedMessage: if `data` is none.
            LocalError: if identity or roster do not belong to it.
        """
        state = codec.decode(data, _State, _STATE_LIMIT_BYTES)
        if state.client != identity.client or state.stage not in set(ClientStage):
            raise LocalError("wrong-identity")
        check_own("record", record, SumRecord)
        check_roster(identity, state.policy, roster)
        client = object.__new__(Client)
        client._identity, client._roster, client._entropy, client._lock, client._state = identity, roster, entropy, Lock(), state
        client.record = record
        return client

    def _die(self) -> None:
        self._state = _State(ClientStage.DEAD, self._state.client, self._state.policy)

    def _draw(self, count: int) -> bytes:
        drawn = self._entropy(count)
        if len(drawn) != count:
            raise LocalError("entropy")
        return drawn

    def _step(self, message: messages.ServerMessage, contributions: Sequence[Contribution]) -> tuple[_State, msgspec.Struct]:
        state, kind = self._state, type(message).__name__
        main = CLIENT[state.policy.mode].get(self.stage)
        rows = [row for row in (main, *(row for stage, *row in CLIENT_COMPLAINTS if stage is self.stage)) if row and row[0] == kind]
        if not rows:
            raise RemoteError("wrong-stage")
        if isinstance(message, Invite | Adverts):
            if state.terms is None:
                check_proposal(message.terms, state.policy, state.client, state.slot, self._roster)
            elif messages.context(message.terms) != messages.context(state.terms):
                # As bytes: 0.0 and -0.0 are equal numbers, but not the same terms.
                raise RemoteError("wrong-context")
            self.record.check_proposed(state.policy.value, message.terms)
        elif state.terms is None or message.context != messages.context(state.terms):
            raise RemoteError("wrong-context")
        changed: dict[str, Any]
        reply: msgspec.Struct
        match message:
            case Invite():
                changed, reply = self._advertise(message)
            case Adverts():
                changed, reply = self._share(message)
            case Deliver():
                changed, reply = self._mask(message, contributions)
            case Challenge():
                changed, reply = self._open(message)
            case Settle():
                changed, reply = self._settle(message)
            case Survivors():
                changed, reply = self._agree(message)
            case Unmask():
                changed, reply = self._reveal(message)
        following = [row[2] for row in rows if row[1] == type(reply).__name__]
        assert len(following) == 1, "the step does not follow the tables"
        return msgspec.structs.replace(state, stage=following[0], **changed), reply

    # Stage 1: advertise. -----------------------------------------------------------------------------------------------------

    def _advertise(self, message: Invite) -> tuple[dict[str, Any], Advert]:
        mask_seed, box_seed = self._draw(32), self._draw(32)
        return {"terms": message.terms, "mask_seed": mask_seed, "box_seed": box_seed}, self._advert(message.terms.slot, mask_seed, box_seed)

    def _advert(self, slot: Slot, mask_seed: bytes, box_seed: bytes) -> Advert:
        identity, policy = self._identity, self._state.policy
        encryption_key, mask_key = public_key(box_seed), public_key(mask_seed)
        parts = advert_parts(policy.session, slot, identity.client, encryption_key, mask_key)
        signature = sign(identity, ADVERT, *parts) if policy.mode == "active" else b""
        return Advert(identity.client, policy.session, slot, encryption_key, mask_key, signature)

    # Stage 2: share both secrets with the neighbours. ---------------------------------------------------------------------------

    def _share(self, message: Adverts) -> tuple[dict[str, Any], Shares]:
        terms, me = message.terms, self._state.client
        allowed = neighbours(terms.graph_seed, terms.cohort, terms.degree, me)
        own = public_key(self._state.box_seed), public_key(self._state.mask_seed)
        known = set(own)
        for advert in message.adverts:
            if advert.client not in allowed:
                raise RemoteError("unknown-client", advert.client)
            check_advert(advert, terms.session, terms.slot, terms.mode, self._roster)
            known |= {advert.encryption_key, advert.mask_key}
        if len(known) != 2 * (len(message.adverts) + 1):
            raise RemoteError("repeated-key")
        enough(terms, len(message.adverts) + 1, max(terms.threshold, messages.fewest_survivors(terms) if _complete(terms) else 0))
        agreed = messages.context(terms)
        encryption = private_key(self._state.box_seed)
        keys = {peer.client: box_key(encryption, peer.encryption_key, agreed, me, peer.client) for peer in message.adverts}
        self_seed = self._draw(32)  # b_u
        reply, dealt = deal(terms, agreed, me, message.adverts, keys, (self_seed, self._state.mask_seed), own[1], self._draw)
        changed = {
            "terms": terms,
            "self_seed": self_seed,
            "box_seed": b"",
            "mask_key": own[1],
            "peers": message.adverts,
            "box_keys": tuple(keys.values()),
            "dealt": tuple(pair for pair in dealt if pair.peer != me),
            "held": tuple(pair for pair in dealt if pair.peer == me),
        }
        return changed, reply

    # Stage 3: mask, or complain about shares. --------------------------------------------------------------------------------

    def _mask(self, message: Deliver, contributions: Sequence[Contribution]) -> tuple[dict[str, Any], Masked | Complaint]:
        state, me = self._state, self._state.client
        terms = state.terms
        assert terms is not None
        members = messages.names(message.members)
        if me not in members or not set(members) <= set(terms.cohort):
            raise RemoteError("bad-members")
        peers = {advert.client: advert for advert in state.peers}
        near = neighbours(terms.graph_seed, terms.cohort, terms.degree, me) & set(members)
        if near != {sealed.peer for sealed in message.boxes} or not near <= peers.keys():
            raise RemoteError("bad-members")
        enough(terms, len(members), messages.fewest_survivors(terms))
        enough(terms, len(near) + 1, terms.threshold)
        agreed = messages.context(terms)
        my_key = state.mask_key
        keys = dict(zip(peers, state.box_keys, strict=True))
        # A box opens only if its dealer and this client were shown the same mask keys.
        boxes = {box.peer: open_box(agreed, box, me, keys[box.peer], peers[box.peer].mask_key, my_key) for box in message.boxes}
        accused = tuple(sorted(peer for peer, pair in boxes.items() if pair is None))
        held = [*state.held, *(pair for pair in boxes.values() if pair)]

        # y_u = x_u + PRG(b_u) + Σ_{v in U2, u<v} PRG(s_uv) − Σ_{v in U2, u>v} PRG(s_uv)   mod 2^b
        bound, mask_secret = binding(terms), private_key(state.mask_seed)
        masks: list[Mask] = [(self_key(state.self_seed, bound, me), 1)]
        for other in sorted(near):
            key = pair_key(mask_secret, my_key, peers[other].mask_key, bound, me, other)
            masks.append((key, 1 if me < other else -1))
        x, clipped = encode_inputs(contributions, terms, self._draw, state.policy.most_error)
        y = wrap(x, terms.bits)
        add_masks(y, masks)
        seeds = (self._draw(32), self._draw(32)) if terms.following else None
        following = self._advert(terms.following, *seeds) if terms.following and seeds else None
        masked = Masked(me, agreed, y.tobytes(), following)
        changed = {
            "held": _by_peer(held),
            "members": members,
            "self_seed": b"",
            "mask_seed": b"",
            "box_keys": (),  # of what passed the server, nobody can open the boxes of shares from here on
            "next_seeds": seeds,
            "clipped": clipped,
            "weights": tuple(counted_weight(contribution, terms) for contribution in contributions),
            "accused": accused,
            "withheld": messages.encode(masked) if accused else b"",  # the vector leaves when all boxes have confirmed the keys
        }
        return changed, Complaint(me, agreed, messages.ids(accused)) if accused else masked

    def _open(self, message: Challenge) -> tuple[dict[str, Any], Opening]:
        """Open, once, the shares dealt to those who complained."""
        state = self._state
        assert state.terms is not None
        if not state.dealt:
            raise RemoteError("wrong-stage")
        accusers = messages.names(message.accusers)
        opening = open_dealt(state.terms, message.context, self._identity, state.mask_key, state.peers, state.dealt, accusers)
        return {"dealt": ()}, opening

    def _settle(self, message: Settle) -> tuple[dict[str, Any], Masked]:
        """Take the shares that their dealers opened, and send the masked vector."""
        state = self._state
        if tuple(opened.peer for opened in message.shares) != state.accused:
            raise RemoteError("wrong-shares")
        peers = {advert.client: advert for advert in state.peers}
        roster = self._roster if state.policy.mode == "active" else None
        for opened in message.shares:
            check_opened(message.context, peers[opened.peer], state.client, state.mask_key, opened, roster)
        held = [*state.held, *(Pair(opened.peer, opened.self_share, opened.key_share) for opened in message.shares)]
        masked = messages.decode_client(state.withheld, len(state.withheld))
        assert isinstance(masked, Masked)
        return {"held": _by_peer(held), "accused": (), "withheld": b""}, masked

    # Stage 4: agree on who survived. ------------------------------------------------------------------------------------------

    def _check_survivors(self, packed: bytes) -> tuple[int, ...]:
        state = self._state
        assert state.terms is not None
        survivors = messages.names(packed)
        if state.client not in survivors or not set(survivors) <= set(state.members):
            raise RemoteError("bad-survivors")
        enough(state.terms, len(survivors), messages.fewest_survivors(state.terms))
        return survivors

    def _agree(self, message: Survivors) -> tuple[dict[str, Any], Consistent]:
        state = self._state
        survivors = self._check_survivors(message.survivors)
        assert state.terms is not None
        self.record.check_survivors(state.policy.value, state.terms, survivors, state.weights)
        parts = (message.context, messages.ids(state.members), message.survivors)
        signature = sign(self._identity, CONSISTENT, *parts)
        return {"survivors": survivors, "dealt": ()}, Consistent(state.client, message.context, signature)

    # Stage 5: reveal one kind of share per peer. ----------------------------------------------------------------------------

    def _reveal(self, message: Unmask) -> tuple[dict[str, Any], Reveal]:
        state = self._state
        assert state.terms is not None
        survivors = self._check_survivors(message.survivors)
        signers = [signed.client for signed in message.signatures]
        if state.policy.mode == "active":
            assert self._roster is not None
            if survivors != state.survivors:
                raise RemoteError("bad-survivors")
            if not set(signers) <= set(survivors):
                raise RemoteError("unknown-client")
            parts = (message.context, messages.ids(state.members), message.survivors)
            for signed in message.signatures:
                verify(self._roster, signed.client, signed.signature, CONSISTENT, *parts)
            enough(state.terms, len(signers), state.terms.threshold)
        elif signers:
            raise RemoteError("unexpected-signature")
        self.record.enter(state.policy.value, state.terms, survivors, state.weights)
        alive = set(survivors)
        self_shares = tuple(Share(held.peer, held.self_share) for held in state.held if held.peer in alive)
        key_shares = tuple(Share(held.peer, held.key_share) for held in state.held if held.peer not in alive)
        return {"survivors": survivors, "held": (), "dealt": ()}, Reveal(state.client, message.context, self_shares, key_shares)


def _by_peer(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    return tuple(sorted(pairs, key=lambda pair: pair.peer))


def _complete(terms: Terms) -> bool:
    return terms.degree == len(terms.cohort) - 1
