"""Shared vectors: exact integer oracles, what single holders and coalitions hold, what is refused."""

import copy
import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations
from operator import add, mul, sub
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from cflpriv.protocols.entropy import system_entropy
from cflpriv.protocols.errors import LocalError, MalformedMessage, RemoteError
from cflpriv.protocols.keys import Identity, Roster, agree, public_key, seal, sign
from cflpriv.protocols.shared_gram import LEAD, GramTerms, ShareHolder, check_contribution, checked_keys, deliveries, deposit, gathered
from cflpriv.protocols.shared_gram.depositing import box_binding, shamir_shares
from cflpriv.protocols.shared_gram.prime_field import (
    PRIME,
    at_zero,
    matrix_product,
    minus,
    of_integers,
    plus,
    signed,
    times,
    uniform,
)  # fmt: skip
from cflpriv.protocols.shared_gram.share_holder import _State
from cflpriv.protocols.shared_gram.terms import LABEL, Announced, Deposit, GramContribution, announcement, decode, encode, signed_deposit

ELEMENT = st.one_of(
    st.sampled_from([0, 1, PRIME - 1, PRIME // 2, PRIME // 2 + 1, 1 << 60, (1 << 31) - 1, 1 << 31]), st.integers(0, PRIME - 1)
)


# --- the field


@given(st.lists(st.tuples(ELEMENT, ELEMENT), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_arithmetic_is_that_of_integers(pairs: list[tuple[int, int]]) -> None:
    a, b = (np.array(side, dtype=np.uint64) for side in zip(*pairs, strict=True))
    for ours, theirs in ((plus, add), (minus, sub), (times, mul)):
        assert [int(one) for one in ours(a, b)] == [theirs(x, y) % PRIME for x, y in pairs]


@pytest.mark.parametrize("d", [1, 7, 2047, 2048, 2049, 4100])
def test_products_of_matrices_are_exact_also_of_the_largest_elements(d: int) -> None:
    left, right = uniform(bytes(32), (3, d)), uniform(b"\x01" * 32, (2, d))
    left[0], right[0] = PRIME - 1, PRIME - 1
    wanted = [[sum(int(x) * int(y) for x, y in zip(row, other, strict=True)) % PRIME for other in right] for row in left]
    assert matrix_product(left, right).tolist() == wanted


@given(st.lists(st.integers(-(PRIME // 2), PRIME // 2), min_size=1))
def test_integers_come_back(values: list[int]) -> None:
    assert signed(of_integers(np.array(values))).tolist() == values


@given(st.lists(ELEMENT, min_size=1, max_size=6), st.data())
@settings(max_examples=50, deadline=None)
def test_weights_give_the_value_at_zero_of_every_polynomial(coefficients: list[int], data: st.DataObject) -> None:
    points = data.draw(st.lists(st.integers(1, 16), min_size=len(coefficients), max_size=16, unique=True))
    values = [sum(one * point**power for power, one in enumerate(coefficients)) for point in points]
    assert sum(weight * value for weight, value in zip(at_zero(points), values, strict=True)) % PRIME == coefficients[0]


def test_uniform_elements_are_uniform() -> None:
    """256 cells of 100,000 draws; wrong in one of 10^6 runs if the key were random."""
    drawn = uniform(b"\x07" * 32, (100_000,))
    assert int(drawn.max()) < PRIME
    assert chisquare(np.bincount((drawn >> np.uint64(53)).astype(int), minlength=256)).pvalue > 1e-6


# --- an epoch


@dataclass
class Epoch:
    terms: GramTerms
    roster: Roster
    clients: list[Identity]
    holders: list[Identity]
    machines: list[ShareHolder]
    keys: bytes

    def given(self, client: int, rows: Any) -> bytes:
        return deposit(self.terms, self.keys, self.roster, self.clients[client], rows)

    def deliver(self, upload: bytes) -> None:
        for machine, part in zip(self.machines, deliveries(upload, self.terms, self.keys, self.roster)[1], strict=True):
            machine.deliver(part)

    def gram(self, clients: Sequence[int], new: int, contributors: Sequence[int]) -> Any:
        parts = [self.machines[one].contribute(clients, new, contributors) for one in contributors if one != LEAD]
        return self.machines[LEAD].opened(clients, new, contributors, parts)


def epoch(n: int = 3, holders: int = 3, colluding: int = 1, p: int = 2, d: int = 5, bound: float = 1.0) -> Epoch:
    clients, parties = [Identity.create(one) for one in range(n)], [Identity.create(0) for _ in range(holders)]
    first, *others = [one.public() for one in parties]
    roster = Roster(tuple(one.public() for one in clients), first, tuple(others))
    terms = GramTerms(bytes(16), 0, roster.digest, n, holders, colluding, p, d, bound)
    machines = [ShareHolder(terms, one, roster) for one in parties]
    keys = gathered(terms, tuple(one.announcement for one in machines), roster)
    for machine in machines:
        machine.accept(keys)
    return Epoch(terms, roster, clients, parties, machines, keys)


def unit_rows(n: int, p: int, d: int, seed: int = 0) -> Any:
    rows = np.random.default_rng(seed).normal(size=(n, p, d))
    return rows / np.linalg.norm(rows, axis=2, keepdims=True)


SHAPES = [(3, 1, (0, 1, 2)), (5, 2, (0, 1, 2, 3, 4)), (5, 1, (0, 2, 4)), (7, 3, tuple(range(7))), (16, 7, tuple(range(15)))]


@pytest.mark.parametrize(("holders", "colluding", "contributors"), SHAPES)
def test_the_matrix_is_that_of_the_rounded_vectors_exactly(holders: int, colluding: int, contributors: tuple[int, ...]) -> None:
    made, rows = epoch(3, holders, colluding), unit_rows(3, 2, 5)
    for client in range(3):
        made.deliver(made.given(client, rows[client]))
    scale = int(made.terms.scale)
    flat = [[int(x) for x in np.rint(row * scale)] for row in rows.reshape(6, 5)]
    wanted = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in flat] for x in flat]
    found = made.gram([0, 1, 2], 3, contributors) * made.terms.scale**2
    assert [[int(one) for one in row] for row in found] == [[round(float(one)) for one in row] for row in wanted]
    np.testing.assert_array_equal(made.gram([2, 0, 1], 1, contributors), made.gram([2, 0, 1], 3, contributors)[:, 4:])


@pytest.mark.parametrize("bound", [2.0**-20, 0.3, 1.0, 64.0, 2.0**20])
def test_errors_are_as_stated_and_the_longest_vectors_fit(bound: float) -> None:
    """200 errors of about normal size: their rms is within 5 standard errors in all but one of 10^6 runs."""
    made, rows = epoch(5, p=4, d=40, bound=bound), bound * unit_rows(5, 4, 40, seed=3)
    for client in range(5):
        made.deliver(made.given(client, rows[client]))
    flat = rows.reshape(20, 40)
    errors = (made.gram(range(5), 5, (0, 1, 2)) - flat @ flat.T)[np.triu_indices(20)] / made.terms.error(bound)
    assert abs(np.sqrt(np.mean(errors**2)) - 1) < 5 / np.sqrt(2 * errors.size) + 0.2  # the diagonal's are larger by √2


def test_a_stored_machine_goes_on_and_is_another_epochs_to_nobody() -> None:
    made, rows = epoch(), unit_rows(3, 2, 5)
    for client in range(2):
        made.deliver(made.given(client, rows[client]))
    before = made.gram([0, 1], 2, (0, 1, 2))
    made.machines = [
        ShareHolder.from_bytes(one.to_bytes(), made.terms, identity, made.roster)
        for one, identity in zip(made.machines, made.holders, strict=True)
    ]
    np.testing.assert_array_equal(made.gram([0, 1], 2, (0, 1, 2)), before)
    made.deliver(made.given(2, rows[2]))
    assert made.gram([0, 1, 2], 1, (0, 1, 2)).shape == (6, 2)
    other = msgspec.structs.replace(made.terms, epoch=1)
    with pytest.raises(MalformedMessage):
        ShareHolder.from_bytes(made.machines[0].to_bytes(), other, made.holders[0], made.roster)
    with pytest.raises(LocalError, match="wrong-roster"):
        ShareHolder(made.terms, Identity.create(0), made.roster)


# --- what a coalition has


@pytest.mark.parametrize(("holders", "colluding"), [(3, 1), (5, 2), (7, 3), (16, 7)])
def test_shares_are_values_of_a_polynomial_of_the_stated_degree_and_no_lower_one(holders: int, colluding: int) -> None:
    values = of_integers(np.array([5, -3, 0]))
    points = tuple(range(1, holders + 1))
    found = {0: values, **shamir_shares(values, points, colluding, b"\x05" * 32)}

    def at_last(degree: int) -> list[int]:
        """The value at the last point of the polynomial of this degree through the first ones, zero among them."""
        weights = at_zero([(point - points[-1]) % PRIME for point in range(degree + 1)])
        columns = [found[point].astype(object) for point in range(degree + 1)]
        values = np.sum([weight * column for weight, column in zip(weights, columns, strict=True)], axis=0)
        return [int(one) % PRIME for one in values]

    assert at_last(colluding) == found[points[-1]].tolist()
    assert not set(at_last(colluding - 1)) & set(found[points[-1]].tolist()), "t shares and the vector do not fix the others"


def test_each_share_alone_is_uniform_and_independent_of_the_vector() -> None:
    """The top bits of 4 × 20,000 shares of two different vectors; wrong in one of 10^6 runs each."""
    for value in (0, PRIME // 2):
        values = np.full(20_000, value, dtype=np.uint64)
        for point, share in shamir_shares(values, (1, 2), 1, bytes([1 + value % 251]) * 32).items():
            counts = np.bincount((share >> np.uint64(55)).astype(int), minlength=64)
            assert chisquare(counts).pvalue > 1e-6, point
            low = np.bincount((share & np.uint64(63)).astype(int), minlength=64)
            assert chisquare(low).pvalue > 1e-6, point


def test_t_shares_of_a_deposit_read_nothing_and_one_more_reads_all() -> None:
    made, rows = epoch(1, holders=5, colluding=2, p=2, d=300), unit_rows(1, 2, 300)[0]
    made.deliver(made.given(0, rows))
    held = {number: machine.share_of(0) for number, machine in enumerate(made.machines)}
    for coalition in ((0, 1), (1, 4), (2, 3)):
        guess = interpolated(made.terms, {one: held[one] for one in coalition})
        # 600 independent uniforms against a vector: |correlation| stays below 5 / √600 in all but one of 10^6 runs
        assert abs(np.corrcoef(guess.ravel(), rows.ravel())[0, 1]) < 5 / np.sqrt(600)
    for enough in ((0, 1, 2), (0, 3, 4)):
        np.testing.assert_allclose(interpolated(made.terms, {one: held[one] for one in enough}), rows, atol=2 / made.terms.scale)


def interpolated(terms: GramTerms, held: dict[int, Any]) -> Any:
    total = np.zeros((terms.p, terms.dimension), dtype=np.uint64)
    for weight, share in zip(at_zero([one + 1 for one in held]), held.values(), strict=True):
        total = plus(total, times(share, weight))
    return signed(total) / terms.scale


def test_contributions_are_uniform_to_who_lacks_one_mask() -> None:
    """Without its masks a contribution would repeat over lists. Two tests of 3600 values; one of 10^6 runs each is wrong."""
    made, rows = epoch(20, p=3, d=4), unit_rows(20, 3, 4)
    for client in range(20):
        made.deliver(made.given(client, rows[client]))
    seen = []
    for order in (list(range(20)), list(range(19, -1, -1))):
        said = decode(made.machines[1].contribute(order, 20, (0, 1, 2)), GramContribution, made.terms)
        seen.append(np.frombuffer(said.values, "<u8"))
        counts = np.bincount((seen[-1] >> np.uint64(57)).astype(int), minlength=16)
        assert chisquare(counts).pvalue > 1e-6
    same = np.frombuffer(decode(made.machines[1].contribute(range(20), 20, (0, 1, 2)), GramContribution, made.terms).values, "<u8")
    np.testing.assert_array_equal(same, seen[0])
    flipped = seen[1].reshape(20, 3, 20, 3)[::-1, :, ::-1, :].ravel()
    assert not (flipped == seen[0]).any(), "another list has other masks"


def test_contributions_for_two_lists_never_add_up() -> None:
    made, rows = epoch(), unit_rows(3, 2, 5)
    for client in range(3):
        made.deliver(made.given(client, rows[client]))
    ours, theirs = made.machines[1].contribute([0, 1], 2, (0, 1, 2)), made.machines[2].contribute([1, 0], 2, (0, 1, 2))
    with pytest.raises(RemoteError, match="other-contribution"):
        made.machines[LEAD].opened([0, 1], 2, (0, 1, 2), [ours, theirs])


def test_a_client_that_colludes_with_the_lead_reads_two_coordinates_a_row() -> None:
    """As Reveals says: it deposits 2^25 e_0 + e_1 in units of the quantisation. A short vector, so that float64 shows all digits."""
    made, rows = epoch(2, p=1, d=5), 2.0**-6 * unit_rows(2, 1, 5)
    made.deliver(made.given(0, rows[0]))
    made.deliver(made.given(1, np.array([[2.0**25, 1, 0, 0, 0]]) / made.terms.scale))
    value = round(float(made.gram([0, 1], 2, (0, 1, 2))[0, 1]) * made.terms.scale**2)
    second = (value + (1 << 24)) % (1 << 25) - (1 << 24)
    read = np.array([(value - second) >> 25, second])
    assert read.tolist() == np.rint(rows[0, 0, :2] * made.terms.scale).tolist()


def dishonest(made: Epoch, client: int, held: dict[int, Any]) -> None:
    """Deposit shares (p, d) by holder as they are, of no polynomial."""
    own, boxes = b"\x05" * 32, []
    for number, key in checked_keys(made.keys, made.terms, made.roster).items():
        binding = box_binding(made.terms, made.keys, client, number)
        sealing = agree(own, key, LABEL + "box", binding)
        boxes.append(seal(sealing, held[number].astype("<u8").tobytes(), binding, system_entropy))
    statement = signed_deposit(made.keys, client, public_key(own), tuple(sha256(box).digest() for box in boxes))
    signature = sign(made.clients[client], LABEL + "deposit", made.terms.digest, statement)
    made.deliver(encode(Deposit(made.terms.digest, client, public_key(own), tuple(boxes), signature)))


def drawn(shape: tuple[int, ...], *holders: int) -> dict[int, Any]:
    return {number: uniform(number.to_bytes(32, "big"), shape) for number in holders}


def rank(rows: list[list[int]]) -> int:
    """Over the field."""
    left, found = [list(row) for row in rows], 0
    for column in range(len(rows[0])):
        pivot = next((row for row in left if row[column]), None)
        if pivot is None:
            continue
        left.remove(pivot)
        inverse, found = pow(pivot[column], -1, PRIME), found + 1
        left = [[(one - row[column] * inverse * top) % PRIME for one, top in zip(row, pivot, strict=True)] for row in left]
    return found


def test_whether_products_are_within_the_bound_is_a_bit_of_others_vectors() -> None:
    """As Reveals says, without any holder: a multiple of e_0 whose norm is within the bound modulo P, and its products only below 1 / 4."""
    for first, beyond in ((0.24, False), (0.26, True)):
        made = epoch(2, p=1, d=2)
        made.deliver(made.given(0, np.array([[first, np.sqrt(1 - first**2)]])))
        factor = int(made.terms.largest / (0.25 * made.terms.scale))
        while not 0 <= pow(factor, 2, PRIME) <= made.terms.largest:
            factor += 1
        held = shamir_shares(np.array([[factor, 0]], dtype=np.uint64), (1, 2, 3), 1, bytes(32))
        dishonest(made, 1, {point - 1: share for point, share in held.items()})
        ends: Any = pytest.raises(RemoteError, match="inconsistent") if beyond else nullcontext()
        with ends:
            made.gram([0, 1], 1, (0, 1, 2))


@pytest.mark.parametrize(("holders", "colluding"), [(3, 1), (5, 1), (5, 2), (7, 2)])
def test_shares_at_will_open_as_many_products_as_reveals_says(holders: int, colluding: int) -> None:
    """The lead's sums for all sets of contributors, as functions of what the holders' products may be: an oracle in integers."""
    functions = []
    for some in combinations(range(1, holders), 2 * colluding):
        weights = dict(zip((0, *some), at_zero([one + 1 for one in (0, *some)]), strict=True))
        functions.append([weights.get(number, 0) for number in range(holders)])
    assert rank(functions) == holders - 2 * colluding


def test_a_sum_for_each_set_of_contributors_is_that_function_of_the_shares() -> None:
    made = epoch(2, holders=5, p=1, d=4)
    made.deliver(made.given(0, unit_rows(1, 1, 4)[0]))
    held = drawn((1, 4), 0, 1, 2, 3, 4)
    dishonest(made, 1, held)
    for some in combinations(range(1, 5), 2):
        contributors = (0, *some)
        total = made.machines[LEAD]._masked([0, 1], 1, contributors)[1]
        for number in some:
            values = decode(made.machines[number].contribute([0, 1], 1, contributors), GramContribution, made.terms).values
            total = plus(total, np.frombuffer(values, "<u8").reshape(total.shape))
        expected = 0
        for weight, number in zip(at_zero([one + 1 for one in contributors]), contributors, strict=True):
            mine = made.machines[number].share_of(0)
            assert mine is not None
            expected += weight * sum(int(a) * int(b) for a, b in zip(mine[0], held[number][0], strict=True))
        assert int(total[0, 0]) == expected % PRIME


# --- one dishonest client


def test_a_client_whose_shares_do_not_fit_each_other_is_named() -> None:
    made, rows = epoch(4, p=2), unit_rows(4, 2, 5)
    for client in (0, 1, 3):
        made.deliver(made.given(client, rows[client]))
    dishonest(made, 2, drawn((2, 5), 0, 1, 2))
    with pytest.raises(RemoteError, match="inconsistent") as ended:
        made.gram([0, 1, 2, 3], 4, (0, 1, 2))
    assert ended.value.party == 2
    assert made.gram([0, 1, 3], 3, (0, 1, 2)).shape == (6, 6)


def test_where_all_products_are_wrong_no_client_is_named() -> None:
    made, rows = epoch(3), unit_rows(3, 2, 5)
    for client in range(3):
        made.deliver(made.given(client, rows[client]))
    for client, (digest, share) in made.machines[1]._shares.items():
        made.machines[1]._shares[client] = digest, plus(share, uniform(client.to_bytes(32, "big"), share.shape))
    with pytest.raises(RemoteError, match="inconsistent") as ended:
        made.gram([0, 1, 2], 3, (0, 1, 2))
    assert ended.value.party is None


def test_a_deposit_that_cannot_be_used_names_its_client() -> None:
    made = epoch()
    full = np.full((2, 5), PRIME, dtype=np.uint64)
    for held in (dict.fromkeys(range(3), full), dict.fromkeys(range(3), full[:1]), dict.fromkeys(range(3), full.view(np.uint8)[:, :7])):
        with pytest.raises(RemoteError, match="bad-box") as ended:
            dishonest(made, 1, held)
        assert ended.value.party == 1


# --- refusals


@pytest.mark.parametrize(
    ("change", "code"),
    [({"colluding": 0}, "bad-terms"), ({"holders": 2}, "bad-terms"), ({"holders": 4, "colluding": 2}, "bad-terms"),
     ({"holders": 17}, "bad-terms"), ({"p": 0}, "out-of-range"), ({"bound": 2.0**30}, "out-of-range")],
)  # fmt: skip
def test_terms_that_make_no_sense_are_refused(change: dict[str, Any], code: str) -> None:
    with pytest.raises(LocalError, match=code):
        msgspec.structs.replace(epoch().terms, **change)


def test_clients_share_under_the_rosters_keys_only() -> None:
    made, rows = epoch(), unit_rows(3, 2, 5)
    own = Identity.create(0)
    message = decode(made.keys, Announced, made.terms)
    stranger = announcement(made.terms, 1, own, message.keys[1].key)
    for keys, code in (
        ((message.keys[0], decode(stranger, type(message.keys[0]), made.terms), message.keys[2]), "bad-signature"),
        (message.keys[:2], "too-few-holders"), (message.keys[1:], "too-few-holders"), ((*message.keys, message.keys[2]), "malformed"),
        (message.keys[::-1], "malformed"),
    ):  # fmt: skip
        with pytest.raises(RemoteError, match=code):
            deposit(made.terms, encode(Announced(message.terms, tuple(keys))), made.roster, made.clients[0], rows[0])
    small = announcement(made.terms, 1, made.holders[1], bytes(32))
    with pytest.raises(RemoteError, match="bad-key"):
        gathered(made.terms, (made.machines[0].announcement, small, made.machines[2].announcement), made.roster)
    twice = announcement(made.terms, 1, made.holders[1], message.keys[0].key)
    with pytest.raises(RemoteError, match="bad-key"):
        gathered(made.terms, (made.machines[0].announcement, twice, made.machines[2].announcement), made.roster)
    assert list(checked_keys(made.keys, made.terms, made.roster)) == [0, 1, 2]


@pytest.mark.parametrize("bad", [np.full((2, 5), np.nan), np.ones((2, 5)), np.zeros((2, 4)), np.zeros((3, 5))])
def test_rows_that_do_not_fit_are_refused_by_their_own_client(bad: Any) -> None:
    with pytest.raises(LocalError, match="out-of-range"):
        epoch().given(0, bad)


def test_deposits_need_the_roster_and_are_bound_to_client_holder_and_epoch() -> None:
    made, rows = epoch(), unit_rows(3, 2, 5)
    upload = made.given(0, rows[0])
    message = decode(upload, Deposit, made.terms)
    for change in ({"client": 1}, {"ephemeral": bytes(31) + b"\x09"}, {"boxes": message.boxes[::-1]}, {"signature": bytes(64)}):
        with pytest.raises(RemoteError, match="bad-signature"):
            deliveries(encode(msgspec.structs.replace(message, **change)), made.terms, made.keys, made.roster)
    parts = deliveries(upload, made.terms, made.keys, made.roster)[1]
    with pytest.raises(MalformedMessage):
        made.machines[0].deliver(parts[1])
    with pytest.raises(RemoteError, match="not-enrolled"):
        made.machines[1].contribute([0], 1, (0, 1, 2))
    digests = tuple(sha256(box).digest() for box in message.boxes)
    signature = sign(made.clients[1], LABEL + "deposit", made.terms.digest, signed_deposit(made.keys, 1, message.ephemeral, digests))
    copied = encode(msgspec.structs.replace(message, client=1, signature=signature))
    with pytest.raises(RemoteError, match="bad-box"):
        made.deliver(copied)


def test_vectors_that_were_compared_are_not_replaced() -> None:
    made, rows = epoch(), unit_rows(3, 2, 5)
    made.deliver(made.given(0, rows[0]))
    made.deliver(made.given(0, rows[1]))  # nobody has used the first one
    made.deliver(made.given(1, rows[1]))
    found = made.gram([0, 1], 2, (0, 1, 2))
    np.testing.assert_allclose(found[:2, :2], found[2:, 2:], atol=1e-8)
    with pytest.raises(RemoteError, match="enrolled-before"):
        made.deliver(made.given(0, rows[0]))


def test_contributors_are_as_many_as_the_terms_say_and_the_lead_is_among_them() -> None:
    made, rows = epoch(3, holders=5, colluding=1), unit_rows(3, 2, 5)
    for client in range(3):
        made.deliver(made.given(client, rows[client]))
    for contributors in ((0, 1), (1,), (1, 2, 3), (0, 1, 2, 3), (0, 2, 3), (0, 1, 1), (1, 0, 2), (0, 1, 9)):
        with pytest.raises(RemoteError, match="bad-contributors"):
            made.machines[1].contribute([0, 1], 2, contributors)
    for clients, new in (([0, 0], 2), ([0, 1], 0), ([0, 1], 3), ([], 0)):
        with pytest.raises(MalformedMessage):
            made.machines[1].contribute(clients, new, (0, 1, 2))


def test_what_a_contributor_gets_wrong_is_refused_where_it_shows() -> None:
    made, rows = epoch(), unit_rows(3, 2, 5)
    for client in range(3):
        made.deliver(made.given(client, rows[client]))
    good = [made.machines[one].contribute([0, 1, 2], 3, (0, 1, 2)) for one in (1, 2)]
    message = decode(good[0], GramContribution, made.terms)
    with pytest.raises(RemoteError, match="bad-signature"):
        made.machines[LEAD].opened([0, 1, 2], 3, (0, 1, 2), [encode(msgspec.structs.replace(message, values=bytes(288))), good[1]])
    with pytest.raises(RemoteError, match="other-contribution"):
        made.machines[LEAD].opened([0, 1, 2], 3, (0, 1, 2), [good[0], good[0]])
    deposits = {client: made.machines[LEAD]._shares[client][0] for client in range(3)}
    for holder, one, code in ((1, good[0], ""), (1, good[1], "other-contribution"), (2, good[1], ""), (1, b"", "malformed")):
        with pytest.raises(RemoteError, match=code) if code else nullcontext():
            check_contribution(one, made.terms, made.keys, made.roster, holder, [0, 1, 2], 3, (0, 1, 2), deposits)
    made.machines[1]._shares[0] = made.machines[1]._shares[0][0], made.machines[1]._shares[1][1]
    with pytest.raises(RemoteError, match="inconsistent"):
        made.gram([0, 1, 2], 3, (0, 1, 2))


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused_by_one_error(data: bytes) -> None:
    made = _ONE
    for machine_takes in (made.machines[0].accept, made.machines[0].deliver):
        with pytest.raises(RemoteError):
            machine_takes(data)
    with pytest.raises(MalformedMessage):
        deliveries(data, made.terms, made.keys, made.roster)


_ONE = epoch()


def test_machines_are_neither_copied_nor_pickled_and_show_no_secret() -> None:
    machine = epoch().machines[0]
    for how in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            how(machine)
    assert machine._seed.hex() not in repr(machine)
    with pytest.raises(TypeError):
        pickle.dumps(_State(bytes(32), bytes(32), b"", (), ()))
