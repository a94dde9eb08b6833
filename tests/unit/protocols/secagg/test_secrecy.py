"""What the server sees says nothing about one client; and the attacks that would succeed on a broken copy.

Statistical tests look at the chi-square statistic of the bytes of a residual against uniform bytes and call it uniform
if the p-value exceeds 1e-6: that is each check's error rate on a correct program. Entropy is fixed, so a test that
passes keeps passing.
"""

import copy
import logging
import pickle
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from cflpriv.protocols.entropy import Entropy, public_entropy
from cflpriv.protocols.errors import LocalError, ProtocolError, RemoteError
from cflpriv.protocols.keys import Identity, private_key, public_key, unseal
from cflpriv.protocols.secagg import Client, Contribution, MaskKey, Server, SumRecord, Terms, TooFewClients, make_terms, simulate, vectors
from cflpriv.protocols.secagg import messages as m
from cflpriv.protocols.secagg.bindings import binding, box_key, pair_key, self_key, share_associated_data
from cflpriv.protocols.secagg.graph import neighbours
from cflpriv.protocols.secagg.shamir import combine
from cflpriv.protocols.secagg.vectors import add_masks

from .scene import MODEL, SESSION, Play, complaint, identities, levels, policy, roster, terms

D = 20_000


def p_value(residual: NDArray[Any]) -> float:
    """Of the hypothesis that all bytes of all numbers are uniform and independent."""
    return float(chisquare(np.bincount(np.frombuffer(residual.tobytes(), np.uint8), minlength=256)).pvalue)


class Spied:
    """A run whose experimenter knows every secret; `residual` gives what a coalition is left with."""

    def __init__(self, agreed: Terms, inputs: dict[int, NDArray[np.int32]], drops: dict[int, str] | None = None) -> None:
        self.agreed, self.inputs = agreed, inputs
        self.play = Play.of(agreed, "spied")
        self.play.values = lambda number: [Contribution(inputs[number], is_levels=True)]
        outbox = self.play.until("Deliver")
        self.mask_seeds = {i: c._state.mask_seed for i, c in self.play.clients.items()}
        self.self_seeds = {i: c._state.self_seed for i, c in self.play.clients.items()}
        self.play.close(outbox, drops or {})
        self.play.finish(drops)

    def masked(self, number: int) -> NDArray[Any]:
        """The vector that `number` sent."""
        message = m.decode_client(self.play.up["Masked", number], 1 << 22)
        assert isinstance(message, m.Masked)
        return np.frombuffer(message.vector, "<u2" if self.agreed.bits == 16 else "<u4").copy()

    def residual(self, victim: int, colluders: Sequence[int], *, unmasked: bool) -> NDArray[Any]:
        """The victim's vector minus what the coalition can compute: pair masks with colluders, and (unmasked) the self mask."""
        y = self.masked(victim)
        own = public_key(self.mask_seeds[victim])
        bound = binding(self.agreed)
        if unmasked:
            add_masks(y, [(self_key(self.self_seeds[victim], bound, victim), -1)])
        for other in colluders:
            if other in neighbours(self.agreed.graph_seed, self.agreed.cohort, self.agreed.degree, victim):
                key = pair_key(self.mask_seeds[other], public_key(self.mask_seeds[other]), own, bound, other, victim)
                add_masks(y, [(key, -1 if victim < other else 1)])
        return y


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("mode", ["active", "passive"])
def test_a_masked_vector_is_uniform_and_still_is_for_colluders_after_unmasking(bits: int, mode: str) -> None:
    n = 6
    agreed = terms(n, mode, bits=bits, dimension=D)
    # Two honest clients, 0 and 1; the others (t − 1 of them in active mode, n − 2 in passive mode's worst case) collude.
    inputs = {i: np.full(D, 3 + i, np.int32) for i in range(n)}
    spied = Spied(agreed, inputs)
    colluders = range(n - agreed.threshold + 1, n) if mode == "passive" else range(2, n)
    honest = [i for i in range(n) if i not in colluders]
    assert len(honest) >= 2
    for victim in honest:
        assert p_value(spied.residual(victim, (), unmasked=False)) > 1e-6
        assert p_value(spied.residual(victim, colluders, unmasked=False)) > 1e-6
        assert p_value(spied.residual(victim, colluders, unmasked=True)) > 1e-6
    # The test can fail: with everybody else colluding the residual is the input itself, ...
    alone = spied.residual(0, [i for i in range(n) if i], unmasked=True)
    assert vectors.unwrap(alone, agreed.bits)[:D].tolist() == inputs[0].tolist()
    assert p_value(alone) < 1e-6
    # ... and what the coalition does learn is the sum of the honest, no more.
    together = sum((spied.residual(i, colluders, unmasked=True) for i in honest), np.zeros_like(alone))
    assert vectors.unwrap(together, agreed.bits)[:D].tolist() == np.sum([inputs[i] for i in honest], axis=0).tolist()


def test_on_the_sparse_graph_a_path_between_two_honest_survivors_is_enough() -> None:
    n = 40
    agreed = terms(n, "passive", dimension=D)
    assert agreed.degree < n - 1
    spied = Spied(agreed, {i: np.full(D, i, np.int32) for i in range(n)}, {39: "Masked"})
    near = neighbours(agreed.graph_seed, agreed.cohort, agreed.degree, 0)
    others = [i for i in range(n) if i and i not in near]
    # A path of three, 0 - middle - far, where 0 and far are not neighbours; all others collude (far more than t − 1 of them).
    middle, far = next(
        (a, b)
        for a in sorted(near)
        for b in others
        if a < 39 and b < 39 and b in neighbours(agreed.graph_seed, agreed.cohort, agreed.degree, a)
    )
    colluders = [i for i in range(n) if i not in (0, middle, far)]
    for victim in (0, middle, far):
        assert p_value(spied.residual(victim, colluders, unmasked=True)) > 1e-6
    pairs = spied.residual(0, colluders, unmasked=True) + spied.residual(far, colluders, unmasked=True)
    assert p_value(pairs) > 1e-6
    # Without the middle, each end stands alone and is read off.
    alone = spied.residual(0, [*colluders, middle], unmasked=True)
    assert not vectors.unwrap(alone, 32)[:D].any()


def test_a_dropped_clients_vector_stays_uniform_although_its_mask_key_is_rebuilt() -> None:
    """A late upload of a client counted as lost: the server has its mask key now, but never its self mask."""
    agreed = terms(5, "active", dimension=D)
    play = Play.of(agreed)
    play.values = lambda number: [Contribution(np.full(D, number, np.int32), is_levels=True)]
    outbox = play.until("Deliver")
    seed = play.clients[4]._state.mask_seed
    late = m.decode_client(play.clients[4].receive(outbox.pop(4), *play.values(4)), 1 << 22)
    play.close(outbox, {})
    play.finish()
    assert play.server.result.survivors == (0, 1, 2, 3)
    assert isinstance(late, m.Masked)
    y = np.frombuffer(late.vector, "<u4").copy()
    adverts = {i: m.decode_client(play.up["Advert", i]) for i in range(5)}
    for other in range(4):
        advert = adverts[other]
        assert isinstance(advert, m.Advert)
        add_masks(y, [(pair_key(seed, public_key(seed), advert.mask_key, binding(agreed), 4, other), 1)])
    assert p_value(y) > 1e-6


def test_a_mask_key_used_twice_and_one_dropout_unmask_the_earlier_input() -> None:
    """Why every sum has mask keys of its own, on a copy broken on purpose: client 0's key of the first sum is put into the second.

    Only what the server sees is used: the first sum's masked vector and revealed self-mask shares, the second sum's revealed key shares.
    """
    first_terms, second_terms = terms(5, "passive"), terms(5, "passive", slot=(6, 0))
    first = Play.of(first_terms, "first")
    first.until("Adverts")
    reused = first.clients[0]._state.mask_seed, first.clients[0]._state.box_seed
    first = Play.of(first_terms, "first")
    first.finish()
    assert first.server.result.survivors == (0, 1, 2, 3, 4)

    second = Play.of(second_terms, "second")
    # The break: a MaskKey is forged for the second slot from the seeds of the first.
    second.clients[0] = Client(identities()[0], policy(second_terms), mask_key=MaskKey(*reused, (6, 0)), record=SumRecord())
    old = m.decode_client(first.up["Advert", 0])
    assert isinstance(old, m.Advert)
    second.server = Server(second_terms, adverts={0: m.encode(msgspec.structs.replace(old, slot=(6, 0)))})
    second.finish({0: "Masked"})
    assert second.server.result.survivors == (1, 2, 3, 4)

    def rebuilt(play: Play, kind: str) -> bytes:
        reveals = [m.decode_client(play.up["Reveal", i]) for i in (1, 2, 3)]
        shares = [next(s.share for s in getattr(reveal, kind) if s.peer == 0) for reveal in reveals]
        return combine([2, 3, 4], shares)

    mask_seed, self_seed = rebuilt(second, "key_shares"), rebuilt(first, "self_shares")
    masked = m.decode_client(first.up["Masked", 0], 1000)
    assert isinstance(masked, m.Masked)
    y = np.frombuffer(masked.vector, "<u4").copy()
    bound = binding(first_terms)
    add_masks(y, [(self_key(self_seed, bound, 0), -1)])
    for other in (1, 2, 3, 4):
        advert = m.decode_client(first.up["Advert", other])
        assert isinstance(advert, m.Advert)
        add_masks(y, [(pair_key(mask_seed, public_key(mask_seed), advert.mask_key, bound, 0, other), -1)])
    stolen = vectors.unwrap(y, 32)[:10]
    assert stolen.tolist() == levels(0, 10, first_terms.levels).tolist()

    # The unbroken machine: the key of one sum cannot come into another.
    fresh = Play.of(terms(5, "passive", following=(6, 0)))
    fresh.finish()
    key = fresh.clients[0].next_mask_key()
    assert key is not None
    Client(identities()[0], policy(second_terms), mask_key=key, record=SumRecord())
    with pytest.raises(LocalError, match="mask-key-used"):
        Client(identities()[0], policy(second_terms), mask_key=key, record=SumRecord())
    # And without the reuse, the rebuilt key of the second sum opens nothing of the first.
    honest = Play.of(second_terms, "honest")
    honest.finish({0: "Masked"})
    other_seed = rebuilt(honest, "key_shares")
    assert public_key(other_seed) != old.mask_key


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_whoever_steals_identities_later_opens_no_box_of_a_finished_sum(mode: str) -> None:
    """Boxes are sealed under keys of this sum, so what the server recorded stays shut even to one who has all long-term secrets."""
    agreed = terms(4, mode, dimension=D, following=(6, 0))
    play = Play.of(agreed)
    play.until("Adverts")
    seeds = [client._state.box_seed for client in play.clients.values()]
    play = Play.of(agreed)
    play.finish()
    adverts = [m.decode_client(play.up["Advert", i]) for i in range(4)]
    shared = m.decode_client(play.up["Shares", 0])
    assert isinstance(shared, m.Shares)
    context = m.context(agreed)

    def opens(seed: bytes) -> bool:
        for sealed in shared.boxes:
            mine, peer = adverts[0], adverts[sealed.peer]
            assert isinstance(mine, m.Advert)
            assert isinstance(peer, m.Advert)
            associated = share_associated_data(context, 0, sealed.peer, mine.mask_key, peer.mask_key)
            for other in (mine.encryption_key, peer.encryption_key):
                try:
                    unseal(box_key(private_key(seed), other, context, 0, sealed.peer), sealed.box, associated)
                except RemoteError:
                    continue
                return True
        return False

    assert all(opens(seed) for seed in seeds), "the keys of the sum itself open them, so the search finds what is there"
    assert not any(opens(seed) for one in identities()[:4] for seed in (one.encryption_seed, one.signing_seed))
    for client in play.clients.values():
        assert not {client._state.box_seed, client._state.mask_seed} - {b""}, "what opens them is gone once the vector is masked"
        assert client._state.box_keys == ()
    adverts += [m.decode_client(said) for said in play.server.following.values()]
    assert len({key for one in adverts if isinstance(one, m.Advert) for key in (one.encryption_key, one.mask_key)}) == 16, "keys of one sum"


def test_inconsistent_models_unmask_nothing() -> None:
    """A server that gives client 0 a private model, and a list with it, is refused; without the checks, masks do not cancel."""
    private = bytes(32)
    theirs, ours = terms(4, "passive", dimension=D), terms(4, "passive", dimension=D, models=[private])
    play = Play.of(theirs)
    with pytest.raises(RemoteError, match="unlisted-model"):
        play.clients[0].receive(m.encode(m.Invite(ours)))
    # Client 0 holds the private model, so it accepts the private list; the others accept theirs.
    play.clients[0] = Client(identities()[0], policy(ours), entropy=public_entropy("0"), record=SumRecord())
    outbox = play.until("Invite")
    outbox[0] = m.encode(m.Invite(ours))
    play.close(outbox, {})
    outbox = play.open()
    message = m.decode_server(outbox[0])
    assert isinstance(message, m.Adverts)
    reply = m.decode_client(play.clients[0].receive(m.encode(m.Adverts(ours, message.adverts))))
    assert isinstance(reply, m.Shares)
    with pytest.raises(RemoteError, match="wrong-context"):
        play.server.receive(0, m.encode(reply))
    # The server rewrites what it can, but the boxes are bound to the terms on both sides.
    play.server.receive(0, m.encode(msgspec.structs.replace(reply, context=m.context(theirs))))
    play.close({i: data for i, data in outbox.items() if i}, {})
    delivered = play.open()
    for number, data in delivered.items():
        told = m.decode_server(data)
        assert isinstance(told, m.Deliver)
        if number == 0:
            data = m.encode(msgspec.structs.replace(told, context=m.context(ours)))
        assert complaint(play.clients[number], data) == ((1, 2, 3) if number == 0 else (0,))
    # Without any refusal: the same two mask keys under two lists of models give two unrelated masks.
    a, b = bytes([1] * 32), bytes([2] * 32)
    residual = np.zeros(D, "<u4")
    add_masks(residual, [(pair_key(a, public_key(a), public_key(b), binding(ours), 0, 1), 1)])
    add_masks(residual, [(pair_key(b, public_key(b), public_key(a), binding(theirs), 1, 0), -1)])
    assert p_value(residual) > 1e-6
    cancelled = np.zeros(D, "<u4")
    add_masks(cancelled, [(pair_key(a, public_key(a), public_key(b), binding(theirs), 0, 1), 1)])
    add_masks(cancelled, [(pair_key(b, public_key(b), public_key(a), binding(theirs), 1, 0), -1)])
    assert not cancelled.any()


@pytest.mark.parametrize(
    "change", [{"session": b"another session!"}, {"slot": (5, 1)}, {"slot": (6, 0)}, {"models": [bytes(32)]}, {"clip": 2.0}]
)
def test_pair_and_self_masks_are_bound_to_the_sum(change: dict[str, object]) -> None:
    a, b = bytes([1] * 32), bytes([2] * 32)
    keys = set()
    for agreed in (terms(4, "passive"), terms(4, "passive", **change)):
        bound = binding(agreed)
        keys |= {self_key(a, bound, 0), self_key(a, bound, 1)}
        keys |= {pair_key(a, public_key(a), public_key(b), bound, 0, peer) for peer in (1, 2)}
    assert len(keys) == 8


class Marked:
    """Entropy that remembers every secret it gave (everything of 32 bytes or more; nonces are public)."""

    def __init__(self, source: Entropy) -> None:
        self.source = source
        self.secrets: list[bytes] = []

    def __call__(self, count: int) -> bytes:
        drawn = self.source(count)
        if count >= 32:
            self.secrets += [drawn[i : i + 32] for i in range(0, count - 31, 32)]
        return drawn


def test_no_secret_appears_in_errors_logs_representations_or_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    cast = {i: Identity(i, b"MARKED SIGNING SEED %d" % i + b"x" * 11, b"MARKED ENCRYPTION SEED %d" % i + b"x" * 8) for i in range(5)}
    entropy = Marked(public_entropy("marked"))
    agreed = make_terms(
        session=SESSION, slot=(1, 0), cohort=range(5), models=[MODEL], dimension=64, clip=1e9, levels=2**28, following=(2, 0)
    )
    values = np.full(64, 123454321.0)
    wire: list[bytes] = []
    texts: list[str] = []

    def outcome(run: Any) -> None:
        try:
            run()
        except ProtocolError as error:
            texts.append("".join(traceback.format_exception(error)) + repr(error) + str(error.__dict__))
        else:
            raise AssertionError("expected an error")

    result = simulate(
        agreed,
        cast,
        lambda i: Contribution(values),
        drops={4: "Masked"},
        record=lambda direction, client, kind, data: wire.append(data),
        entropy=entropy,
    )
    machines = {i: Client(cast[i], policy(agreed, dimension=None), entropy=entropy, record=SumRecord()) for i in range(5)}
    server = Server(agreed)
    while outbox := server.advance():
        for number, data in outbox.items():
            machine = machines[number]
            texts += [repr(machine), str(machine), repr(machine._state), repr(machine._state.held), repr(server._state)]
            texts += [str(machine._state.__rich_repr__()), str(server._state.__rich_repr__())]
            for bad in (b"", data[:-1], wire[-1], data + b"\x00"):
                outcome(lambda machine=machine, bad=bad: machine.receive(bad))
            give = [Contribution(values)] if machine.wants_values else []
            if number == 3 and give:
                texts.append(repr(give))
                give = [Contribution(np.append(values, 1.0))]
                outcome(lambda machine=machine, data=data, give=give: machine.receive(data, *give))
                outcome(lambda machine=machine, data=data: machine.receive(data))
                continue
            reply = machine.receive(data, *give)
            for bad in (reply[:-1], wire[-1][:-1], b"CFLP\x01" + bytes(40)):
                outcome(lambda number=number, bad=bad: server.receive(number, bad))
            server.receive(number, reply)
    texts += [repr(cast), repr(result), repr(server), repr(result.mask_keys), repr(server.result)]
    key = result.mask_keys[0]
    key.take()
    outcome(key.take)
    short = Server(agreed)
    short.advance()
    outcome(short.advance)
    text = "\n".join([*texts, *caplog.messages])
    blob = b"\n".join(wire) + text.encode()
    assert len(texts) > 100
    assert len(entropy.secrets) > 100
    assert all(len(one.signing_seed) == len(one.encryption_seed) == 32 for one in cast.values())
    planted = [*entropy.secrets, *(one.signing_seed for one in cast.values()), *(one.encryption_seed for one in cast.values())]
    for secret in planted:
        for shape in (secret, secret.hex().encode(), repr(secret).encode()[2:-1]):
            assert shape not in blob
    # The input appears neither as text nor as its bytes or level.
    level = round(123454321.0 / 1e9 * 2**28)
    for shape in (b"123454321", values[:1].tobytes(), str(level).encode(), level.to_bytes(4, "little") * 2):
        assert shape not in blob
    # The search finds what is there.
    assert result.adverts[0] in b"\n".join([*wire, *result.adverts.values()])
    assert any(public_key(secret) in blob for secret in entropy.secrets if len(secret) == 32)


def test_too_few_clients_names_counts_only() -> None:
    with pytest.raises(TooFewClients) as caught:
        simulate(
            terms(3, "active", min_cohort=3),
            dict(enumerate(identities()[:3])),
            lambda i: Contribution(np.zeros(10)),
            roster=roster(),
            drops={0: "Masked"},
        )
    assert (caught.value.counts, caught.value.min_cohort) == ((2,), 3)


def test_a_mask_key_is_neither_copied_nor_pickled() -> None:
    """Two copies of one key are two sums under it."""
    key = MaskKey(bytes(range(32)), bytes(32), (1, 0))
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="used once"):
            duplicate(key)
    assert key.take() == (bytes(range(32)), bytes(32))
