"""Encrypted comparison: a server compares vectors that it cannot read, and clients share no secret.

Clients encrypt under the public key of a *key holder*; the server multiplies ciphertexts; the key holder decrypts inner products, and the
server learns of them what the release says.

    parameters  rings, packing, errors, release noise: public numbers      seal        exact polynomials in and out of SEAL
    public_key  a key of which nobody chooses one half
    messages    all messages, signed                                       client      quantise, pack, encrypt
    server      keeps ciphertexts, asks for each pair once                 products    multiply, mask: the trap is described there
    holder      keys, capped decryption, noise                             completion  from blocks to a Gram matrix; landmarks
    workers     processes for the server                                   reference   the naive way, for tests and benchmarks

**Guarantee.** The server, alone or with clients, all of whom follow the protocol, learns no vector of another client and no inner product
beyond the release: what it sees are encryptions under a key that it lacks (RLWE, 128 bits; public-key mode). The key holder, if it follows
the protocol and does not collude with the server, learns the inner products it decrypts and not the vectors: every output is rerandomised.
That last part is an argument, not a proof (`products`). Half of the key is a hash of the terms (`public_key`); that the other half was made
honestly is trusted.

**Reveals.** To the key holder: the Gram matrix. To the server: under "labels" labels only, under "distances" noised distances, under "gram"
the noised and rounded Gram. Server and key holder together: everything. A client and the key holder together: inner products with p ×
`Setup.group` vectors of the client's choice, for example single coordinates of other clients' vectors: what a client encrypts spills into
neighbouring pairs. With group 1 there are p vectors. Clients that encrypt arbitrary values: under "labels" each label, one of k, reveals
about log2 k bits of the secret key or of other clients' vectors; under the other releases a few such clients read the key (`holder`). A
server that lies gets p² numbers of its own choice decrypted for each pair it may ask for (`holder`). In symmetric mode clients share the
secret key, so one colluding client gives the server everything: there a shared Haar rotation costs some thousand times less and reveals no
more than the Gram.

Threshold CKKS, with the key split between two holders, is not built: 3.9 ms a pair and holder (from SEAL's operations), a thousand times
what `shared_gram` takes. Hostile clients could read the key, as could a lying server with one holder, unless each holder computed all
products.

**Source.** Cheon, Kim, Kim & Song 2017 (CKKS); Huang et al. 2022 (coefficient packing); Li & Micciancio 2021 (noise before release).
Deviations: plaintexts are exact integers in coefficients at scale 1, so no encoder and no rescaling; products are not relinearised; masks
are uniform modulo q rather than statistically hiding.

Unaudited research code.
"""

from ..errors import LocalError, MalformedMessage, RemoteError
from ..keys import Identity, Roster
from .client import encrypt
from .completion import gram_error, gram_matrix
from .holder import KeyHolder
from .messages import Setup
from .parameters import PARAMETERS, SYMMETRIC_PARAMETERS, Packing, Parameters, error_std, plan, release_grid, release_std
from .seal import arithmetic
from .server import CkksServer, landmarks_of
from .workers import CkksWorkers

__all__ = [
    "PARAMETERS",
    "SYMMETRIC_PARAMETERS",
    "CkksServer",
    "CkksWorkers",
    "Identity",
    "KeyHolder",
    "LocalError",
    "MalformedMessage",
    "Packing",
    "Parameters",
    "RemoteError",
    "Roster",
    "Setup",
    "arithmetic",
    "encrypt",
    "error_std",
    "gram_error",
    "gram_matrix",
    "landmarks_of",
    "plan",
    "release_grid",
    "release_std",
]
