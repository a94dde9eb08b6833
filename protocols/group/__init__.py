"""Group key agreement: clients that talk only to a server agree on a secret that the server does not have.

One client leads: it draws the secret and seals the secret for every other client, under a key that only the two clients can compute.
Everybody signs what it was given, everybody sees everybody's signatures, and only then is the secret in force. Newcomers get it from a
member; after a removal a new epoch starts with a fresh secret.

    messages   the public terms of an epoch, and all messages     states     which message may come when, as tables
    member     one client's machine                               server     the server's machine
    ratchet    keys with numbers, erased behind    simulation all parties in one process, over real bytes

    Invite   →  Advert                  a fresh X25519 key each, signed (Ed25519, pinned roster)
    Adverts  →  Offer                   one client leads: header with a commitment to the secret, signed; a sealed box for each
    Deliver  →  Confirm                 the box opens, the secret is the committed one: signature over the header
    Confirmed                           all signatures, to all: the secret is in force
    Invite, Admit, Handover             a newcomer's signed key goes to a member, which seals the secret for it

**Guarantee.** A server, also one that lies, learns nothing of the secret unless a client that has it reveals it: keys that boxes are sealed
under are agreed between two ephemeral keys, of which the recipient's is signed under the roster. It cannot put a client of its own into
the group (no key on the roster, no signature), nor hand an old message to another session, epoch or list of members (everything is bound to
the hash of the terms). **Among clients that were shown the same terms, and follow the protocol, at most one secret comes into force**: it
takes the signatures of a majority of the invited under one header, and a client signs one header per epoch. Members that were shown
*different* lists for one epoch could be kept apart in two groups, each of which sees a list without the others; a client's `smallest` above
half of the roster rules that out. Keys by which a secret came are forgotten when it is in force. Members also get a **ratchet**: numbered
keys. A stolen state opens the keys that it kept and later keys, but no erased key (`ratchet`). A newcomer is given the ratchet as far as
its sponsor went, and nothing before.

**Reveals.** Who takes part, who leads, who joins and leaves when. **One member that colludes with the server reveals everything to it**:
the secret is one for all, and no protocol changes that. A leader that follows the protocol but has a bad source of randomness weakens the
secret for all (it is leader-made, not contributory: a malicious leader could give a contributory secret away as well). A malicious leader
can spoil an epoch (boxes that do not open, found at once). A member that signs two headers can, together with a lying server, keep two
halves of the group under two secrets: it is in both, and could reveal both. A malicious sponsor can refuse, not hand out a wrong secret or
chain: the leader signed a commitment. The keys that it kept of numbers it has passed are not verified: with a wrong one a newcomer's values
fit nobody's. The server decides who is removed: members check that those named get nothing from them. A removed client keeps the secrets of
the epochs it was in. What is derived from the lasting secret (`derive`) is opened by a state stolen at any time in the epoch. The server
can stop any agreement by not relaying messages.

**Source.** Ours, of standard parts: X25519 (RFC 7748), HKDF (RFC 5869), AES-256-GCM, Ed25519 (RFC 8032); the leader's role is that of the
key-generating client which Sattler et al. 2019, Algorithm 5, presuppose.

Unaudited research code.
"""

from ..errors import LocalError, MalformedMessage, ProtocolError, RemoteError, TooFewClients
from ..keys import Identity, Roster
from .member import Member
from .messages import GroupTerms, decode_member, decode_server, make_terms, needed
from .ratchet import NUMBERS, Ratchet
from .server import GroupServer
from .simulation import STAGES, agree_all, hand_over
from .states import MEMBER, SERVER, GroupServerStage, MemberStage, diagram

__all__ = [
    "MEMBER",
    "NUMBERS",
    "SERVER",
    "STAGES",
    "GroupServer",
    "GroupServerStage",
    "GroupTerms",
    "Identity",
    "LocalError",
    "MalformedMessage",
    "Member",
    "MemberStage",
    "ProtocolError",
    "Ratchet",
    "RemoteError",
    "Roster",
    "TooFewClients",
    "agree_all",
    "decode_member",
    "decode_server",
    "diagram",
    "hand_over",
    "make_terms",
    "needed",
]
