"""Inner products of clients' vectors by several holders, of which no minority can read anything: no key holder has to be trusted alone.

Each client shares its vectors among the holders (Shamir, degree t). A product of two shares is a share, of degree 2t, of the product. So
each holder multiplies its shares. 2t + 1 holders add up their products under masks that cancel, and one holder, the lead, opens the sum:
the exact Gram matrix of integers. The server passes sealed and masked messages on.

    prime_field    exact arithmetic modulo 2^61 − 1           terms          public terms, keys and messages, signed
    depositing     quantise, share, seal                      share_holder   a holder's machine: keep shares, multiply, mask, open
    contributing   a holder's signed contribution, and its check

**Guarantee.** Against the server, any t of the n ≥ 2t + 1 holders and any clients, all of whom may deviate from the protocol and pool what
they have: of a client's vectors they learn inner products with vectors that clients deposited, if the lead is among them, else whether they
are within the bound, and nothing else. Shares at t points are uniform, whatever the vectors are; what the others contribute is uniform but
for its sum. Nothing is decrypted, so there is no key that results could reveal, and no noise. What stays computational: sealed boxes and
masks (X25519, AES-256).

**Reveals.** To the lead: the Gram matrix, as to the key holder of `ckks`. To t + 1 holders together: everything. To a client that
colludes with the lead: p (n − 2t) inner products an epoch with vectors of its choice, modulo 2^61 − 1, each worth two coordinates (three
small ones) of a vector that is compared with it; over many epochs the vector. (Shares that it deposits at will need not be of degree t;
then each set of contributors opens another combination, and these span n − 2t dimensions. With n = 2t + 1 there is one set.) To the server:
who takes part, and whose deposits cannot be used; with a client that chooses its vector, a bit of others' an epoch.
Rightness is not protected: a holder that computes something else changes the matrix, undetected where it stays symmetric and within the
bound, and may say of a client that its deposit cannot be used.

**Source.** Shamir 1979; Ben-Or, Goldwasser & Wigderson 1988, section 3; masks between pairs as in Bonawitz et al. 2017, section 4.
Deviations: products are not reduced to degree t, for they are opened at once.

Unaudited research code.
"""

from .contributing import check_contribution, delivery_digest
from .depositing import deposit
from .share_holder import ShareHolder
from .terms import LEAD, GramTerms, checked_keys, deliveries, gathered

__all__ = ["LEAD", "GramTerms", "ShareHolder", "check_contribution", "checked_keys", "deliveries", "delivery_digest", "deposit", "gathered"]
