"""Encrypted inner products against the naive way (9 × `CKKSVector.dot` a pair), interleaved A B A B in one process: p = 3, d = 784.

"online" is what a pair costs with its mask made ahead: multiply, add the mask, decrypt, read p² coefficients. "with the masks" makes the
mask too. Both leave serialisation out, on both sides (`CKKSVector.dot` is timed between objects as well, decryption included). Rows for
N = 8192 without "ungrouped" are what `ckks_group = 0` gives: four pairs an output. Seconds are the processor's: both sides compute in one
thread, and others on the machine do not count.
`python -m benchmarks.ckks` prints the rows and the seconds of all pairs of 100 clients, serialisation and signatures included, and what the
same costs each party where vectors are shared among holders (`protocols.shared_gram`), for 100 and 1000 clients.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cflpriv.protocols import ckks
from cflpriv.protocols.ckks import PARAMETERS, SYMMETRIC_PARAMETERS, CkksServer, CkksWorkers, Identity, KeyHolder, Parameters, Roster, Setup
from cflpriv.protocols.ckks.client import packed
from cflpriv.protocols.ckks.products import Products, grouped, mask, product, rerandomised
from cflpriv.protocols.ckks.reference import naive_block, naive_context
from cflpriv.protocols.entropy import system_entropy
from cflpriv.protocols.shared_gram import LEAD, GramTerms, ShareHolder, deliveries, deposit, gathered
from cflpriv.streams import printable_streams

from .pairs import pairs

__all__ = ["COMPARISONS", "all_pairs", "all_shared"]

P, D, REPEATS = 3, 784, 9


def orthonormal(n: int) -> Any:
    rng = np.random.default_rng(0)
    return [np.linalg.qr(rng.normal(size=(D, P)))[0].T for _ in range(n)]


class Ours:
    """One output's worth of pairs: a left client, and `group` right ones side by side."""

    def __init__(self, parameters: Parameters, group: int) -> None:
        self.ring = ckks.arithmetic(parameters)
        self.packing = ckks.plan(parameters, P, D, group=group)
        self.group = self.packing.group
        seal = self.ring.seal
        generator = seal.KeyGenerator(self.ring.context)
        public = seal.PublicKey()
        generator.create_public_key(public)
        secret = generator.secret_key()
        self.encryptor = seal.Encryptor(self.ring.context, public)
        self.masker = self.ring.masker(public)
        self.decryptor = seal.Decryptor(self.ring.context, secret)
        own = self.encryptor if parameters.mode == "public-key" else seal.Encryptor(self.ring.context, secret)
        sides = []
        self.rows = orthonormal(1 + self.group)
        for rows in self.rows:
            both = []
            for polynomials in packed(self.packing, rows):
                ciphers = []
                for polynomial in polynomials:
                    cipher = self.ring.zero(own, public=parameters.mode == "public-key")
                    self.ring.add_polynomial(cipher, self.ring.residues(polynomial))
                    ciphers.append(cipher)
                both.append(ciphers)
            sides.append(both)
        self.left = sides[0][0]
        monomials = [None, *(self.ring.monomial(slot * self.packing.span) for slot in range(1, self.group))]
        # one such sum serves all left clients: with many of them its share of a pair is nothing
        self.together = grouped(self.ring, self.packing, [both[1] for both in sides[1:]], monomials)
        self.positions = [at for slot in range(self.group) for at in self.packing.targets(slot)]

    def mask(self) -> Any:
        return mask(self.ring, self.masker, self.packing, [True] * self.group, system_entropy)

    def output(self, fresh: Any) -> Any:
        cipher = rerandomised(self.ring, product(self.ring, self.left, self.together), fresh)
        plain = self.ring.seal.Plaintext()
        self.decryptor.decrypt(cipher, plain)
        return np.array(self.ring.coefficients(plain, self.positions), dtype=np.float64) / self.packing.scale**2


def compared(parameters: Parameters, *, group: int = 1, masks: bool, floor: float, stretch: float) -> dict[str, Any]:
    """One row: what a pair costs us and them, several of ours to one of theirs, medians over interleaved repeats."""
    ours = Ours(parameters, group)
    import tenseal

    context = naive_context()
    left, right = ([tenseal.ckks_vector(context, list(row)) for row in rows] for rows in ours.rows[:2])
    outputs = 24
    own_seconds, theirs, error = [], [], 0.0
    truth = np.concatenate([(ours.rows[0] @ rows.T).ravel() for rows in ours.rows[1:]])
    ours.output(ours.mask())
    for _ in range(REPEATS):
        ready = [] if masks else [ours.mask() for _ in range(outputs)]
        begun = time.process_time()
        for number in range(outputs):
            output = ours.output(ours.mask() if masks else ready[number])
        own_seconds.append((time.process_time() - begun) / outputs / ours.group)
        error = max(error, float(np.abs(output - truth).max()))
        begun = time.process_time()
        naive_block(left, right)
        theirs.append(time.process_time() - begun)
    note = (
        f"ours {statistics.median(own_seconds) * 1e3:.3g} ms a pair, theirs {statistics.median(theirs) * 1e3:.3g} ms; N = "
        f"{parameters.ring} {list(parameters.bits)} {parameters.mode}, {ours.group} pair(s) an output, {ours.packing.chunks} chunk(s); "
        f"largest error {error:.1e}"
    )
    return pairs(own_seconds, theirs, floor, stretch, f"{P * P} x CKKSVector.dot", note)


def served(parameters: Parameters, *, n: int, ahead: bool, floor: float, stretch: float) -> dict[str, Any]:
    """One row: what an output costs the server, bytes to signed bytes, with what it keeps between jobs and (`ahead`) with its masks made
    while it waited for uploads, and with nothing kept, which is how version 0.1.0 did it. All pairs of n clients, one pair an output."""
    identities = [Identity.create(number) for number in range(n)]
    roster = Roster(tuple(identity.public() for identity in identities))
    holder_identity, server_identity = Identity.create(0), Identity.create(0)
    setup = Setup(bytes(16), 0, roster.digest, n, P, D, parameters.ring, parameters.bits, parameters.mode, "labels")
    holder = KeyHolder(setup, holder_identity, server_identity.public(), roster)
    server = CkksServer(setup, holder.announcement, holder_identity.public(), roster, server_identity)
    uploads = [
        ckks.encrypt(setup, holder.announcement, holder_identity.public(), identities[number], rows)
        for number, rows in enumerate(orthonormal(n))
    ]
    own_seconds, theirs, outputs = [], [], n * (n + 1) // 2
    for _ in range(REPEATS):
        server.withdraw(range(n))
        if ahead:
            with server.ahead(n):
                while server.products.masks < outputs:
                    time.sleep(0.01)
        for upload in uploads:
            server.receive(upload)
        jobs = server.jobs(range(n))
        begun = time.process_time()
        for _ in server.requests(jobs):
            pass
        own_seconds.append((time.process_time() - begun) / outputs)
        begun = time.process_time()
        for job in jobs:
            server.products = Products(setup, holder_identity.public(), server.public_key)
            for _ in server.requests([job]):
                pass
        theirs.append((time.process_time() - begun) / outputs)
    note = (
        f"ours {statistics.median(own_seconds) * 1e3:.3g} ms an output, theirs {statistics.median(theirs) * 1e3:.3g} ms; N = "
        f"{parameters.ring} {list(parameters.bits)} {parameters.mode}, n = {n}, p = {P}, d = {D}, {len(jobs)} jobs, {outputs} outputs"
    )
    return pairs(own_seconds, theirs, floor, stretch, "the same with nothing kept between jobs", note)


def all_pairs(n: int = 100, workers: int = 2, ring: int = 8192, group: int = 1) -> str:
    """All pairs of n clients, from vectors to the Gram matrix, over real bytes: seconds, and the largest error."""
    identities = [Identity.create(number) for number in range(n)]
    roster = Roster(tuple(identity.public() for identity in identities))
    holder_identity, server_identity = Identity.create(0), Identity.create(0)
    parameters = PARAMETERS[ring]
    setup = Setup(bytes(16), 0, roster.digest, n, P, D, ring, parameters.bits, parameters.mode, "labels", 1.0, group)
    rows = orthonormal(n)
    pool = CkksWorkers(workers) if workers > 1 else None
    begun = time.perf_counter()
    try:
        holder = KeyHolder(setup, holder_identity, server_identity.public(), roster)
        server = CkksServer(setup, holder.announcement, holder_identity.public(), roster, server_identity)
        for number, client in enumerate(rows):
            upload = ckks.encrypt(setup, holder.announcement, holder_identity.public(), identities[number], client)
            holder.enrol(server.receive(upload))
        uploaded = time.perf_counter() - begun
        count = size = 0
        for request in server.requests(server.jobs(range(n)), pool):
            holder.answer(request)
            count, size = count + 1, size + len(request)
        gram = ckks.gram_matrix(server.clients, holder.blocks)
    finally:
        if pool is not None:
            pool.close()
    seconds = time.perf_counter() - begun
    flat = np.concatenate(rows)
    error = float(np.abs(gram - flat @ flat.T).max())
    return (
        f"n = {n}, p = {P}, d = {D}, N = {ring}, {setup.group} pair(s) an output, {workers} process(es): {seconds:.1f} s for all pairs, of "
        f"which uploads {uploaded:.1f} s; {count} outputs, {size / 1e6:.0f} MB to the key holder, upload {len(upload) / 1e3:.0f} kB "
        f"a client; largest error {error:.1e}"
    )


def all_shared(n: int = 100, holders: int = 3, colluding: int = 1) -> str:
    """The Gram matrix of n clients whose vectors are shared among holders, over real bytes: seconds by party, and the largest error."""
    identities = [Identity.create(number) for number in range(n)]
    parties = [Identity.create(0) for _ in range(holders)]
    first, *others = [identity.public() for identity in parties]
    roster = Roster(tuple(identity.public() for identity in identities), first, tuple(others))
    terms = GramTerms(bytes(16), 0, roster.digest, n, holders, colluding, P, D)
    machines = [ShareHolder(terms, identity, roster) for identity in parties]
    keys = gathered(terms, tuple(machine.announcement for machine in machines), roster)
    for machine in machines:
        machine.accept(keys)
    rows, marks = orthonormal(n), [time.process_time()]
    uploads = [deposit(terms, keys, roster, identity, row) for identity, row in zip(identities, rows, strict=True)]
    marks.append(time.process_time())
    split = [deliveries(upload, terms, keys, roster)[1] for upload in uploads]
    marks.append(time.process_time())
    for parts in split:
        for machine, part in zip(machines, parts, strict=True):
            machine.deliver(part)
    marks.append(time.process_time())
    contributors = range(terms.contributors)
    parts = [machines[number].contribute(range(n), n, contributors) for number in contributors[1:]]
    marks.append(time.process_time())
    gram = machines[LEAD].opened(range(n), n, contributors, parts)
    marks.append(time.process_time())
    client, server, delivery, contribution, opening = np.diff(marks)
    flat = np.concatenate(rows)
    return (
        f"n = {n}, p = {P}, d = {D}, {holders} holders of which {colluding} may collude: a client {client / n * 1e3:.1f} ms and "
        f"{len(uploads[0]) / 1e3:.0f} kB, the server {server:.2f} s, a holder {delivery / holders:.2f} s for deliveries and "
        f"{contribution / len(parts):.2f} s for its part of {len(parts[0]) / 1e6:.1f} MB, the first {opening:.2f} s; "
        f"{n * len(uploads[0]) / holders / 1e6:.0f} MB to each holder; largest error {np.abs(gram - flat @ flat.T).max():.1e}"
    )


TWO, ONE = PARAMETERS[8192], PARAMETERS[4096]
COMPARISONS: dict[str, Callable[[], dict[str, Any]]] = {
    "ckks 8192 online": lambda: compared(TWO, group=4, masks=False, floor=300, stretch=546),
    "ckks 8192 online, ungrouped": lambda: compared(TWO, masks=False, floor=300, stretch=546),
    "ckks 8192 with the masks": lambda: compared(TWO, group=4, masks=True, floor=60, stretch=82),
    "ckks 8192 with the masks, ungrouped": lambda: compared(TWO, masks=True, floor=30, stretch=32),
    "ckks 4096 online": lambda: compared(ONE, masks=False, floor=300, stretch=915),
    "ckks 4096 with the masks": lambda: compared(ONE, masks=True, floor=30, stretch=109),
    "ckks 4096 with the masks, grouped": lambda: compared(ONE, group=4, masks=True, floor=60, stretch=226),
    "ckks 4096 server": lambda: served(ONE, n=16, ahead=False, floor=2, stretch=2.5),
    "ckks 4096 server, masks ahead": lambda: served(ONE, n=16, ahead=True, floor=2, stretch=5),
    "ckks 2048 symmetric with the masks": lambda: compared(SYMMETRIC_PARAMETERS[2048], masks=True, floor=30, stretch=148),
}
"""Name -> what measures it, for `make bench`."""


if __name__ == "__main__":
    printable_streams()
    for name, measure in COMPARISONS.items():
        row = measure()
        print(f"{name:<36} {row['ratio']:8.1f} ({row['low']:.1f} to {row['high']:.1f})  {row['note']}", flush=True)
    for ring, pairs in ((8192, 4), (4096, 1)):
        print(all_pairs(ring=ring, group=pairs), flush=True)
    for clients, levels, together in ((100, 3, 1), (100, 5, 2), (1000, 3, 1)):
        print(all_shared(clients, levels, together), flush=True)
