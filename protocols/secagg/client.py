"""How does a client add its vector to a sum without showing it?

A single-use machine: bytes in, bytes out. It does no I/O, has no clock and draws randomness only from the
entropy it is given. Its steps are the rows of `states.CLIENT`; a step is a function from the old frozen state
and a checked message to the new state and the reply.

Errors. `RemoteError` and `TooFewClients`: the received bytes were refused, and the state is exactly as
before. `LocalError`: the caller's own mistake (no or unusable values, values at the wrong time, an entropy
source that fails, use after death); the machine forgets its secrets and is dead.

Guarantee: in active mode, against a server together with fewer than n/3 of the cohort (and in passive mode
against an honest-but-curious one with fewer than t): what leaves this machine shows no more than the sum over
at least `floor` survivors (fewer honest ones, if some survivors collude). Reveals: that the client takes
part, when it drops out, its public keys; the sum. A state restored from an old copy can be made to answer
twice, so a stored state must be replaced, never kept.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from .. import codec, fixedpoint
from ..entropy import Entropy, system_entropy
from ..errors import LocalError, RemoteError, TooFewClients
from ..keys import Identity, Roster, private_key, public_key, seal, sign, unseal, verify
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
    share_associated_data,
)
from .graph import neighbours
from .inputs import Contribution, encode_inputs
from .masks import Mask, add_masks
from .messages import (
    Advert,
    Adverts,
    Consistent,
    Deliver,
    Invite,
    Masked,
    Reveal,
    Sealed,
    Share,
    Shares,
    Slot,
    Survivors,
    Terms,
    Unmask,
)
from .policy import MaskKey, Policy, check_proposal, check_roster, enough
from .shamir import SHARE_BYTES, split
from .states import CLIENT, ClientStage

__all__ = ["Client"]

_STATE_LIMIT_BYTES = 1 << 26


class _Held(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What `peer` entrusted to this client: a share of its self-mask seed, a share of its mask-key seed."""

    _shown = ("peer",)

    peer: int
    self_share: bytes
    key_share: bytes


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
    held: tuple[_Held, ...] = ()
    members: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    clipped: int = 0


class Client:
    """One client's part in one sum.

    Args:
        identity: its long-term secrets.
        policy: what it insists on.
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
        roster: Roster | None = None,
        mask_key: MaskKey | None = None,
        entropy: Entropy = system_entropy,
    ) -> None:
        check_roster(identity, policy, roster)
        self._identity, self._roster, self._entropy = identity, roster, entropy
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
        state = self._state
        if state.next_seeds is None or state.terms is None or state.terms.following is None:
            return None
        self._state = msgspec.structs.replace(state, next_seeds=None)
        return MaskKey(*state.next_seeds, state.terms.following)

    def receive(self, data: bytes, *contributions: Contribution) -> bytes:
        """Takes the server's next message and gives the reply to send.

        Args:
            data: what arrived, trusted in nothing.
            contributions: this client's input, exactly when `wants_values`: one, or in a sum with blocks any number for
                distinct clusters.

        Raises:
            RemoteError: the message was refused (MalformedMessage is one); nothing has changed.
            TooFewClients: answering would show individuals; nothing has changed.
            LocalError: see the module; the machine is dead.
        """
        if self.stage is ClientStage.DEAD:
            raise LocalError("dead", "an earlier local error stopped this machine")
        try:
            if contributions and not self.wants_values:
                raise LocalError("unexpected-values", "values belong to the Deliver message")
            state, reply = self._step(messages.decode_server(data), contributions)
        except (RemoteError, TooFewClients):
            raise
        except LocalError:
            self._die()
            raise
        except Exception:
            # Whatever it says might name a secret, so neither it nor its traceback travels on.
            self._die()
            raise LocalError("internal") from None
        self._state = state
        return messages.encode(reply)

    def to_bytes(self) -> bytes:
        """The whole state, secrets included (not the identity).

        Store it as secretly as the identity, *before* the reply is sent, and replace, never keep, older copies: a state
        that answers twice masks two vectors with the same streams, or reveals both shares of somebody.
        """
        return codec.encode(self._state)

    @staticmethod
    def from_bytes(data: bytes, identity: Identity, *, roster: Roster | None = None, entropy: Entropy = system_entropy) -> "Client":
        """The machine that `to_bytes` stored.

        Raises:
            MalformedMessage: if `data` is none.
            LocalError: if identity or roster do not belong to it.
        """
        state = codec.decode(data, _State, _STATE_LIMIT_BYTES)
        if state.client != identity.client or state.stage not in set(ClientStage):
            raise LocalError("wrong-identity")
        check_roster(identity, state.policy, roster)
        client = object.__new__(Client)
        client._identity, client._roster, client._entropy, client._state = identity, roster, entropy, state
        return client

    def _die(self) -> None:
        self._state = _State(ClientStage.DEAD, self._state.client, self._state.policy)

    def _draw(self, count: int) -> bytes:
        drawn = self._entropy(count)
        if len(drawn) != count:
            raise LocalError("entropy")
        return drawn

    def _step(self, message: messages.ServerMessage, contributions: Sequence[Contribution]) -> tuple[_State, msgspec.Struct]:
        state = self._state
        row = CLIENT[state.policy.mode].get(self.stage)
        if row is None or row[0] != type(message).__name__:
            raise RemoteError("wrong-stage")
        if isinstance(message, Invite | Adverts):
            if state.terms is None:
                check_proposal(message.terms, state.policy, state.client, state.slot, self._roster)
            elif messages.context(message.terms) != messages.context(state.terms):
                # As bytes: 0.0 and -0.0 are equal numbers, but not the same terms.
                raise RemoteError("wrong-context")
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
            case Survivors():
                changed, reply = self._agree(message)
            case Unmask():
                changed, reply = self._reveal(message)
        assert type(reply).__name__ == row[1], "the step does not follow the table"
        return msgspec.structs.replace(state, stage=row[2], **changed), reply

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
        holders = sorted([me, *(advert.client for advert in message.adverts)])
        enough(len(holders), max(terms.threshold, messages.survivor_floor(terms) if _complete(terms) else 0))
        agreed = messages.context(terms)
        place = {member: number for number, member in enumerate(terms.cohort, 1)}

        # b_u, the seed of the self mask; f and g, the polynomials of b_u and of the seed of the mask key.
        self_seed = self._draw(32)
        keepers = [place[holder] for holder in holders]
        self_shares = dict(zip(holders, split(self_seed, terms.threshold, keepers, self._draw), strict=True))
        key_shares = dict(zip(holders, split(self._state.mask_seed, terms.threshold, keepers, self._draw), strict=True))
        encryption = private_key(self._state.box_seed)
        boxes = []
        for peer in message.adverts:
            key = box_key(encryption, peer.encryption_key, agreed, me, peer.client)
            associated = share_associated_data(agreed, me, peer.client, own[1], peer.mask_key)
            plaintext = self_shares[peer.client] + key_shares[peer.client]
            boxes.append(Sealed(peer.client, seal(key, plaintext, associated, self._draw)))
        mine = _Held(me, self_shares[me], key_shares[me])
        changed = {"terms": terms, "self_seed": self_seed, "peers": message.adverts, "held": (mine,)}
        return changed, Shares(me, agreed, tuple(boxes))

    # Stage 3: mask. -------------------------------------------------------------------------------------------------------

    def _mask(self, message: Deliver, contributions: Sequence[Contribution]) -> tuple[dict[str, Any], Masked]:
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
        enough(len(members), messages.survivor_floor(terms))
        enough(len(near) + 1, terms.threshold)
        agreed = messages.context(terms)
        my_key = public_key(state.mask_seed)
        encryption = private_key(state.box_seed)
        held = list(state.held)
        for sealed in message.boxes:
            # The associated data names both mask keys: the box opens only if the two of us were shown the same ones.
            peer = peers[sealed.peer]
            inward = box_key(encryption, peer.encryption_key, agreed, peer.client, me)
            associated = share_associated_data(agreed, peer.client, me, peer.mask_key, my_key)
            try:
                opened = unseal(inward, sealed.box, associated)
            except RemoteError:
                raise RemoteError("bad-box", peer.client) from None
            held.append(_Held(peer.client, opened[:SHARE_BYTES], opened[SHARE_BYTES:]))

        # y_u = x_u + PRG(b_u) + Σ_{v in U2, u<v} PRG(s_uv) − Σ_{v in U2, u>v} PRG(s_uv)   mod 2^b
        bound, mask_secret = binding(terms), private_key(state.mask_seed)
        masks: list[Mask] = [(self_key(state.self_seed, bound, me), 1)]
        for other in sorted(near):
            key = pair_key(mask_secret, my_key, peers[other].mask_key, bound, me, other)
            masks.append((key, 1 if me < other else -1))
        x, clipped = encode_inputs(contributions, terms, self._draw)
        y = fixedpoint.wrap(x, terms.bits)
        add_masks(y, masks)
        seeds = (self._draw(32), self._draw(32)) if terms.following else None
        following = self._advert(terms.following, *seeds) if terms.following and seeds else None
        changed = {
            "held": tuple(sorted(held, key=lambda h: h.peer)),
            "members": members,
            "self_seed": b"",
            "mask_seed": b"",
            "box_seed": b"",  # of what passed the server, nobody can open the boxes of shares from here on
            "next_seeds": seeds,
            "clipped": clipped,
        }
        return changed, Masked(me, agreed, y.tobytes(), following)

    # Stage 4: agree on who survived. ------------------------------------------------------------------------------------------

    def _check_survivors(self, packed: bytes) -> tuple[int, ...]:
        state = self._state
        assert state.terms is not None
        survivors = messages.names(packed)
        if state.client not in survivors or not set(survivors) <= set(state.members):
            raise RemoteError("bad-survivors")
        enough(len(survivors), messages.survivor_floor(state.terms))
        return survivors

    def _agree(self, message: Survivors) -> tuple[dict[str, Any], Consistent]:
        state = self._state
        survivors = self._check_survivors(message.survivors)
        parts = (message.context, messages.ids(state.members), message.survivors)
        signature = sign(self._identity, CONSISTENT, *parts)
        return {"survivors": survivors}, Consistent(state.client, message.context, signature)

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
            enough(len(signers), state.terms.threshold)
        elif signers:
            raise RemoteError("unexpected-signature")
        alive = set(survivors)
        self_shares = tuple(Share(held.peer, held.self_share) for held in state.held if held.peer in alive)
        key_shares = tuple(Share(held.peer, held.key_share) for held in state.held if held.peer not in alive)
        return {"survivors": survivors, "held": ()}, Reveal(state.client, message.context, self_shares, key_shares)


def _complete(terms: Terms) -> bool:
    return terms.degree == len(terms.cohort) - 1
