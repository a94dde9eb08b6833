"""Sums in one message: a client sends one masked vector, and helpers unmask a whole set of clients at once.

There are h named helpers, t of which may work with the server. A client draws a seed for each set of t helpers, seals it to all others, and
adds all seeds' masks to its vector. The set of clients is named once; a helper signs one set a slot, and sends its sums of masks only when
q = (h + t) // 2 + 1 helpers signed the same set. So there is one sum for each slot, whoever drops out before, and h − q helpers may fail.

    terms      the public terms of a sum             messages   what is sent, and what it is bound to
    client     checks an invitation, and answers     server     the server's machine
    helper     a helper, over its store              simulation all parties in one process, over real bytes
    blocks     blocks that clients choose            noise      integer noise that helpers add

Inputs, weights, fixed point, masks, and a client's policy and record are those of `secagg`.

**Guarantee.** The server, if it lies, up to t helpers and any number of clients learn of the honest clients' values the sum over one set
for each slot, of `minimum` clients at least, c of which they may be themselves, and nothing else: one seed of each honest client is known
to honest helpers only. Of values that share a name only sums over one set are opened, because any two quorums have an honest helper in
common. Of `blocks` only those are opened that enough members say they fill. With `noise` a sum has the noise of each set of t helpers, of
which one stays whoever of these works together. Argued and tested, not proved. t + 1 helpers and the server read every value. Dropouts cost
nothing down to the minimum. Boxes stay closed for who records traffic and has a quantum computer later; signatures (Ed25519) do not
matter later. A key serves one round.

**Reveals.** Who takes part, the sum, how many clients clipped; to helpers who is summed with whom, and no values. Clients do not see with
whom they are summed. A server that lies about the result to others is not noticed. A helper that calls good uploads unusable keeps them
out. Sums of values without a common name over overlapping sets can be subtracted from each other. A helper that was set back to an older
copy of its store counts as one of the t.

**Source.** Ours. Masks by replicated secret sharing: Cramer, Damgård and Ishai 2005; servers that unmask sums of seeds: Corrigan-Gibbs and
Boneh 2017 (Prio), Kairouz et al. 2021 (section 4.4.3); quorums: Malkhi and Reiter 1998. Boxes: RFC 9180.

Unaudited research code.
"""

from ..errors import HelpersFailed, LocalError, MalformedMessage, ProtocolError, RemoteError, SumFailed, TooFewClients
from ..keys import Identity, Roster
from ..secagg.policy import Policy
from ..secagg.summed import SumRecord
from ..secagg.vectors import Contribution, Sum
from .client import AcceptedInvite, accept, name_digests, upload
from .helper import Helper, HelperPolicy
from .server import HelpedServer
from .simulation import HelpedOutcome, agreeable, simulate
from .terms import HelpedTerms, make_terms, most_failing, quorum, seed_sets

__all__ = [
    "AcceptedInvite",
    "Contribution",
    "Helper",
    "HelperPolicy",
    "HelpersFailed",
    "Identity",
    "LocalError",
    "MalformedMessage",
    "HelpedOutcome",
    "Policy",
    "ProtocolError",
    "RemoteError",
    "Roster",
    "HelpedServer",
    "Sum",
    "SumFailed",
    "SumRecord",
    "HelpedTerms",
    "TooFewClients",
    "accept",
    "agreeable",
    "make_terms",
    "most_failing",
    "name_digests",
    "quorum",
    "seed_sets",
    "simulate",
    "upload",
]
