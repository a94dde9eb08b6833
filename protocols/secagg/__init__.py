"""Secure aggregation: a server learns the sum of its clients' vectors and nothing about any single one.

Every client adds two kinds of masks to its vector. *Pairwise* masks: each pair agrees on a key; one adds its
keystream, the other subtracts it, so in the sum they cancel. A *self* mask: a keystream of its own, which
protects it where the pairwise masks have to be removed. So that a client may drop out at any moment, both
secrets (the self-mask seed, and the seed of the mask key) are split among its neighbours, t of whom can
rebuild them. At the end the survivors reveal, for each client, *either* shares of the self-mask seed (it is
in the sum) *or* shares of its mask-key seed (it is not), never both: with both, its input would lie open.

    terms      the public terms of a sum                           messages what is sent
    states     which message may come when, as tables              shares   dealing and checking shares
    complaints what happens if a keeper cannot use its shares      unmasking  the masks to remove
    client     one client's machine                                server   the server's machine
    graph      who masks with whom, and the threshold              shamir   splitting a secret
    vectors    fixed point, a client's vector, masks, the sum      bindings    what keys, boxes and signatures are bound to
    policy     what a client insists on                            oblivious   per-cluster sums that hide who is in which cluster
    effective  the least weight that keeps sums of many clients    summed   a client's record: one sum for each value
    simulation all parties in one process, over real bytes

**Guarantee.** The server (with up to t − 1 colluding clients if it follows the protocol, with fewer than n/3
if it lies) learns the sum over the surviving members, of whom there are at least `min_cohort`, and from the masked
vectors nothing else. So it is in effect, too: weights lie within public limits for which (Σ w)² / Σ w² is at least
`min_cohort`, and no server chooses one. Of values that go by one name a client lets one sum be opened: the same
survivors, weight and quantiser, or none. Honest clients whose pairwise graph is connected are hidden in each other. Everything
binds to the terms, and among them to the hash of the list of models: clients that were handed different
models (so that one would be isolated, Pasquini et al. 2022) end with a sum that does not unmask.

**Reveals.** Who takes part, who drops out when, the sum itself, how many clients clipped. Sums of values without a
common name over overlapping groups can be subtracted from each other. Colluders know their own inputs and subtract them: a
minimum cohort size of f with c colluders among the survivors protects like f − c. Sybils count; only the roster keeps them
out. Where the list has k models, a server that plants a private one as one of the k is not stopped. A
malicious client can put any vector into a sum, and can make a sum fail, in most cases with its name (see `server`);
of one sum it cannot read others, but in an oblivious pair of sums its count is taken as it is: it can open the block
of a cluster below the minimum cohort size. The passive mode does nothing against a server that lies: it could draw the neighbours,
swap the keys, or report different survivors to different clients.

**Source.** Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning",
figure 4 (all rounds, active variant); Bell et al. 2020, "Secure single-server aggregation with
(poly)logarithmic overhead" (the sparse graph). Deviations: the mask key's *seed* is what is split and mask
keys are made for one sum only, advertised with the previous upload; all derivations bind to the terms and the
models; boxes of shares name both mask keys (key confirmation before anything is masked); U2 is signed
together with U3; AES-256-CTR as generator; masks modulo 2^16 or 2^32; in active mode, boxes and masked
vectors themselves are not signed (the transport authenticates their senders); digests of all shares, a commitment to the self
seed, and shares opened where a keeper complains about them, so that one dishonest client is found out.

Unaudited research code.
"""

from ..errors import LocalError, MalformedMessage, ProtocolError, RemoteError, SumFailed, TooFewClients
from ..keys import Identity, Roster
from .client import Client
from .effective import effective_number, largest_ratio
from .oblivious import ObliviousOutcome, block_terms, count_terms, counts_of, membership, open_blocks, simulate_oblivious
from .policy import MaskKey, Policy
from .server import Server
from .simulation import STAGES, Outcome, simulate
from .states import CLIENT, CLIENT_COMPLAINTS, SERVER, SERVER_COMPLAINTS, ClientStage, ServerStage, diagram
from .summed import SumRecord
from .terms import Slot, Terms, fewest_contributors, fewest_survivors, lifted, make_terms, retaken, weight_error
from .vectors import Contribution, Sum, relative_error

__all__ = [
    "CLIENT",
    "CLIENT_COMPLAINTS",
    "SERVER",
    "SERVER_COMPLAINTS",
    "STAGES",
    "Client",
    "ClientStage",
    "Contribution",
    "Identity",
    "LocalError",
    "MalformedMessage",
    "MaskKey",
    "ObliviousOutcome",
    "Outcome",
    "Policy",
    "ProtocolError",
    "RemoteError",
    "Roster",
    "Server",
    "ServerStage",
    "Slot",
    "Sum",
    "SumFailed",
    "SumRecord",
    "Terms",
    "TooFewClients",
    "block_terms",
    "count_terms",
    "counts_of",
    "diagram",
    "effective_number",
    "fewest_contributors",
    "largest_ratio",
    "lifted",
    "make_terms",
    "membership",
    "open_blocks",
    "relative_error",
    "retaken",
    "simulate",
    "simulate_oblivious",
    "fewest_survivors",
    "weight_error",
]
