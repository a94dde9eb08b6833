"""Secure aggregation against Flower's SecAgg+ functions, interleaved in one process: masking, sharing, unmasking, bytes.

Passive mode, complete graph. Where flwr is not installed the comparisons are skipped with a word and our own seconds are
measured all the same (`python -m benchmarks.secagg`). Both sides do their whole step: ours from message bytes to message
bytes, Flower's inside its client and server functions (its own message encoding is left out, to its advantage).
"""

import random
import resource
import statistics
import time
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from typing import Any

import numpy as np

from cflpriv.protocols.secagg import Client, Contribution, Identity, Policy, Server, Terms, make_terms, simulate
from cflpriv.streams import printable_streams

from .pairs import pairs

__all__ = ["COMPARISONS", "masking", "scale", "sharing", "unmasking", "upload"]

SESSION = bytes(16)
MODEL = sha256(b"benchmark").digest()
N, D, REPEATS = 100, 1_000_000, 5


def timed(run: Callable[[], object]) -> float:
    """Seconds that `run` takes."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


class Ours:
    """One passive sum of n clients on the complete graph, stopped where something is to be measured."""

    def __init__(self, n: int, d: int, bits: Any = 32) -> None:
        self.identities = [Identity.create(i) for i in range(n)]
        self.terms: Terms = make_terms(
            session=SESSION, slot=(1, 0), cohort=range(n), models=[MODEL], dimension=d, clip=1.0, bits=bits, sparse=False
        )
        self.values = np.random.default_rng(0).uniform(-1, 1, d).astype(np.float32)
        policy = Policy(SESSION, "passive", MODEL)
        self.clients = [Client(identity, policy) for identity in self.identities]
        self.server = Server(self.terms)

    def stage(self, lost: frozenset[int] = frozenset()) -> None:
        """Run one stage; clients in `lost` do not answer."""
        for number, data in self.server.advance().items():
            if number not in lost:
                self.server.receive(number, self.answer(number, data))

    def answer(self, number: int, data: bytes) -> bytes:
        client = self.clients[number]
        return client.receive(data, *([Contribution(self.values)] if client.wants_values else []))

    def copy(self, number: int) -> Client:
        return Client.from_bytes(self.clients[number].to_bytes(), self.identities[number])


class Flower:
    """The same position in Flower's SecAgg+: the state of one client whose n − 1 peers have advertised and shared."""

    def __init__(self, n: int, d: int) -> None:
        # The package's attribute of that name is the mod function, so the module is asked for by its path.
        mod: Any = import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
        from flwr.common import ndarrays_to_parameters
        from flwr.common.secure_aggregation.secaggplus_constants import Key

        self.mod, self.key = mod, Key
        settings = {
            Key.SAMPLE_NUMBER: n,
            Key.SHARE_NUMBER: n,
            Key.THRESHOLD: n // 2 + 1,
            Key.CLIPPING_RANGE: 1.0,
            Key.TARGET_RANGE: 1 << 16,
            Key.MOD_RANGE: 1 << 32,
            Key.MAX_WEIGHT: 1000.0,
        }
        self.states = []
        for number in range(n):
            state = mod.SecAggPlusState()
            state.nid = number
            mod._setup(state, settings)
            self.states.append(state)
        self.keys = {str(state.nid): (state.pk1, state.pk2) for state in self.states}
        self.parameters = ndarrays_to_parameters([np.random.default_rng(0).uniform(-1, 1, d).astype(np.float32)])

    def share(self, number: int) -> Any:
        return self.mod._share_keys(self.states[number], self.keys)

    def inbox(self, number: int) -> dict[str, Any]:
        """What every other client sends to `number`, with shares of the right length (making real ones takes minutes)."""
        crypto = import_module("flwr.common.secure_aggregation.secaggplus_utils")
        cipher = import_module("flwr.common.secure_aggregation.crypto.symmetric_encryption")
        state = self.states[number]
        self.share(number)
        sources = [state.nid for state in self.states if state.nid != number]
        plain = [crypto.share_keys_plaintext_concat(source, number, bytes(52), bytes(52)) for source in sources]
        boxes = [cipher.encrypt(state.ss2_dict[source], text) for source, text in zip(sources, plain, strict=True)]
        return {self.key.CIPHERTEXT_LIST: boxes, self.key.SOURCE_LIST: sources}

    def mask(self, number: int, inbox: dict[str, Any]) -> Any:
        return self.mod._collect_masked_vectors(self.states[number], inbox, 1000, self.parameters)


def flower() -> str:
    """The version of Flower, or "" where there is none."""
    try:
        import flwr
        from flwr.client.mod.secure_aggregation import secaggplus_mod  # noqa: F401
    except ImportError:
        return ""
    return f"flwr {flwr.__version__}"


def compared(ours: list[float], theirs: list[float], floor: float, stretch: float, note: str) -> dict[str, Any]:
    """One row of the table, against Flower."""
    note = f"ours {statistics.median(ours):.4g} s, theirs {statistics.median(theirs):.4g} s; {note}"
    return pairs(ours, theirs, floor, stretch, flower(), note)


def skipped(ours: list[float], floor: float, stretch: float, note: str) -> dict[str, Any]:
    """The row where there is nothing to compare with."""
    nothing = float("nan")
    why = f"flwr is not installed, so nothing is compared; ours {statistics.median(ours):.4g} s; {note}"
    return {"ratio": nothing, "low": nothing, "high": nothing, "floor": floor, "stretch": stretch, "against": "-", "note": why}


def masking(bits: Any = 32, n: int = N, d: int = D, repeats: int = REPEATS) -> dict[str, Any]:
    """One client's whole masking step: opening n − 1 boxes, quantising d values, n masks, encoding."""
    ours = Ours(n, d, bits)
    ours.stage()
    ours.stage()
    data = ours.server.advance()[0]
    own_seconds, theirs = [], []
    other = Flower(n, d) if flower() else None
    if other is not None:
        inbox = other.inbox(0)
    for _ in range(repeats):
        client = ours.copy(0)
        own_seconds.append(timed(lambda client=client: client.receive(data, Contribution(ours.values))))
        if other is not None:
            theirs.append(timed(lambda: other.mask(0, inbox)))
    note = f"n = {n}, d = {d}, {bits} bits"
    return compared(own_seconds, theirs, 4, 9, note) if theirs else skipped(own_seconds, 4, 9, note)


def sharing(n: int = N, repeats: int = REPEATS) -> dict[str, Any]:
    """One client's share stage: splitting two secrets n ways and sealing n − 1 boxes."""
    ours = Ours(n, 10)
    ours.stage()
    data = ours.server.advance()[0]
    other = Flower(n, 10) if flower() else None
    own_seconds, theirs = [], []
    for _ in range(repeats):
        client = ours.copy(0)
        own_seconds.append(timed(lambda client=client: client.receive(data)))
        if other is not None:
            theirs.append(timed(lambda: other.share(0)))
    note = f"n = {n}, complete graph"
    return compared(own_seconds, theirs, 100, 300, note) if theirs else skipped(own_seconds, 100, 300, note)


def unmasking(n: int = N, d: int = D, repeats: int = 2) -> dict[str, Any]:
    """The server's last step with 10 % dropouts before masking; Flower's from unit costs (its step takes minutes)."""
    lost = frozenset(range(0, n, 10))
    own_seconds, theirs = [], []
    for _ in range(repeats):
        ours = Ours(n, d)
        ours.stage()
        ours.stage()
        ours.stage(lost)
        ours.stage()
        own_seconds.append(timed(ours.server.advance))
        if flower():
            theirs.append(_flower_unmasking(n, d, len(lost)))
    note = f"n = {n}, d = {d}, 10 % dropouts; theirs from unit costs, its masks at d = 100 000 and scaled"
    return compared(own_seconds, theirs, 50, 150, note) if theirs else skipped(own_seconds, 50, 150, note)


def _flower_unmasking(n: int, d: int, lost: int, part: int = 100_000) -> float:
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
    from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_addition
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    other = Flower(2, 1)
    first, two = other.states
    self_shares = create_shares(bytes(32), n // 2 + 1, n)[: n - lost]
    key_shares = create_shares(first.sk1, n // 2 + 1, n)[: n - lost]
    combining_self = statistics.median(timed(lambda: combine_shares(self_shares)) for _ in range(3))
    combining_key = statistics.median(timed(lambda: combine_shares(key_shares)) for _ in range(3))

    def agree() -> bytes:
        mod = other.mod
        return bytes(mod.generate_shared_key(mod.bytes_to_private_key(first.sk1), mod.bytes_to_public_key(two.pk1)))

    agreeing = statistics.median(timed(agree) for _ in range(5))
    vector = [np.zeros(part, np.int64)]
    seed = agree()
    one_mask = statistics.median(
        timed(lambda: parameters_addition(vector, pseudo_rand_gen(seed, 1 << 32, [(part,)]))) for _ in range(5)
    ) * (d / part)
    masks = (n - lost) + lost * (n - 1)
    return (n - lost) * combining_self + lost * combining_key + lost * (n - 1) * agreeing + masks * one_mask


def upload(bits: Any = 32, d: int = D) -> dict[str, Any]:
    """Bytes of an encoded masked vector."""
    ours = Ours(3, d, bits)
    ours.stage()
    ours.stage()
    size = float(len(ours.answer(0, ours.server.advance()[0])))
    note = f"bytes, not seconds; d = {d}, {bits} bits"
    if not flower():
        return skipped([size], 64 / bits, 64 / bits, note)
    other = Flower(3, d)
    parts = other.mask(0, other.inbox(0))[other.key.MASKED_PARAMETERS]
    theirs = float(sum(len(part) for part in parts))
    return compared([size], [theirs], 2 if bits == 32 else 4, 64 / bits, note)


def scale(n: int = 1000, d: int = D) -> str:
    """n simulated clients on the sparse graph with 10 % dropouts at all stages: seconds and peak memory, checked against the plain sum."""
    identities = {i: Identity.create(i) for i in range(n)}
    terms = make_terms(session=SESSION, slot=(1, 0), cohort=range(n), models=[MODEL], dimension=d, clip=1.0)
    base = np.random.default_rng(0).uniform(-1, 1, d).astype(np.float32)
    stages = ("Advert", "Shares", "Masked", "Reveal")
    drops = {i: stages[i % 4] for i in random.Random(1).sample(range(n), n // 10)}
    begun = time.perf_counter()
    outcome = simulate(terms, identities, lambda i: Contribution(base * (i % 7 / 7)), drops=drops)
    seconds = time.perf_counter() - begun
    survivors = [i for i in range(n) if drops.get(i) in (None, "Reveal")]
    assert outcome.sum.survivors == tuple(survivors)
    factor = sum(i % 7 / 7 for i in survivors)
    worst = float(np.abs(outcome.sum.total() - base.astype(np.float64) * factor).max())
    assert worst <= len(survivors) * (1 / terms.levels + 1e-7)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"n = {n}, d = {d}, (k, t) = ({terms.degree}, {terms.threshold}), {len(drops)} dropouts: {seconds:.0f} s, "
        f"peak {memory:.2f} GiB, largest error of the sum {worst:.1e}"
    )


COMPARISONS: dict[str, Callable[[], dict[str, Any]]] = {
    "secagg masking, 32 bits": lambda: masking(32),
    "secagg masking, 16 bits": lambda: masking(16),
    "secagg share stage": sharing,
    "secagg server unmasking": unmasking,
    "secagg upload, 32 bits": lambda: upload(32),
    "secagg upload, 16 bits": lambda: upload(16),
}
"""Name -> what measures it, for `make bench`."""


if __name__ == "__main__":
    printable_streams()
    for name, measure in COMPARISONS.items():
        row = measure()
        print(f"{name:<28} {row['ratio']:8.2f} ({row['low']:.2f} to {row['high']:.2f})  {row['against']:<12} {row['note']}", flush=True)
    print(scale(), flush=True)
