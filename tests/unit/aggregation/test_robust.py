"""Robust means: the rules against oracles, dealings that nobody chooses, and buckets that never fall below the minimum cohort size."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from checkout import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import Make, eye, federation, population
from scipy.optimize import minimize

from cflpriv.aggregation.robust import RULES, centred_clipping, geometric_median, trimmed_mean
from cflpriv.attacks.active.bad_clients import corrupt, scaled_update
from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError, TooFewClients
from cflpriv.experiments import parse_config, start
from cflpriv.experiments.run.run import advance, finish
from cflpriv.federation import messages as m
from cflpriv.federation.server import FederationServer
from cflpriv.federation.values import SharedWork
from cflpriv.protocols import dealing
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import RemoteError
from cflpriv.protocols.one_message.messages import decode_invite, names
from cflpriv.protocols.secagg.messages import Adverts, decode_server
from cflpriv.types import Array

SESSION = bytes(16)
NAMES = tuple(RULES)


def robust(rule: str = "geometric_median", **more: Any) -> Protection:
    options: dict[str, Any] = {"sum": "secagg", "secagg_clip": 200.0, "robust": rule}
    return Protection(**options | more)


# --- the rules ----------------------------------------------------------------------------------------------------------------------


def points(seed: int, count: int, dimension: int) -> Array:
    return np.random.default_rng(seed).normal(size=(count, dimension))


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 6))
def test_the_trimmed_mean_is_that_of_sorted_lists(seed: int, count: int, dimension: int) -> None:
    given_ = points(seed, count, dimension)
    cut = min(-(-count // 3), (count - 1) // 2)
    expected = [np.mean(sorted(given_[:, place].tolist())[cut : count - cut]) for place in range(dimension)]
    np.testing.assert_allclose(trimmed_mean(given_), expected, atol=1e-12)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(3, 12), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_the_geometric_median_has_the_smallest_sum_of_distances(seed: int, count: int, dimension: int) -> None:
    given_ = points(seed, count, dimension)

    def cost(centre: Array) -> float:
        return float(np.linalg.norm(given_ - centre, axis=1).sum())

    best = min(cost(minimize(cost, begin, method="Nelder-Mead").x) for begin in (given_.mean(axis=0), *given_))
    assert cost(geometric_median(given_)) <= best + 1e-4 * cost(given_.mean(axis=0))


def test_the_geometric_median_of_a_triangle_is_fermats_point() -> None:
    angles = 2 * np.pi * np.arange(3) / 3
    corners = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(geometric_median(corners), 0, atol=1e-8)
    np.testing.assert_allclose(geometric_median(np.array([[0.0], [1.0], [50.0]])), 1.0, atol=1e-3)  # in one dimension: the median


@given(st.integers(0, 10**6), st.integers(3, 10))
def test_centred_clipping_takes_its_steps(seed: int, count: int) -> None:
    """Against the formula, written out a point at a time."""
    given_ = points(seed, count, 4)
    centre = np.array([np.median(column) for column in given_.T])
    for _ in range(5):
        radius = np.median([np.linalg.norm(point - centre) for point in given_])
        away = [point - centre for point in given_]
        centre = centre + sum(one * min(1.0, radius / np.linalg.norm(one)) if one.any() else one for one in away) / count
    np.testing.assert_allclose(centred_clipping(given_), centre, atol=1e-9)


@given(st.sampled_from(NAMES), st.integers(0, 10**6), st.integers(3, 15), st.floats(1, 12), st.booleans())
def test_less_than_a_third_of_bad_points_move_no_rule_far(rule: str, seed: int, count: int, power: float, together: bool) -> None:
    """However far away they are; the mean goes with them."""
    good = points(seed, count, 3)
    bad = (count - 1) // 3
    given_ = good.copy()
    away = 10**power * (np.ones((bad, 3)) if together else points(seed + 1, bad, 3))
    given_[:bad] = away
    spread = np.linalg.norm(good - good.mean(axis=0), axis=1).max()
    assert np.linalg.norm(RULES[rule](given_) - good[bad:].mean(axis=0)) <= 6 * spread


@given(st.sampled_from(NAMES), st.integers(0, 10**6), st.integers(1, 9), st.permutations(range(9)))
def test_rules_keep_what_is_alike_and_know_no_order(rule: str, seed: int, count: int, order: list[int]) -> None:
    one = points(seed, 1, 4)
    np.testing.assert_allclose(RULES[rule](np.repeat(one, count, axis=0)), one[0], atol=1e-12)
    several = points(seed, 9, 4)
    np.testing.assert_allclose(RULES[rule](several[order]), RULES[rule](several), atol=1e-6)
    np.testing.assert_allclose(RULES[rule](several + 3.0), RULES[rule](several) + 3.0, atol=1e-6)


# --- the dealing --------------------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32), st.sets(st.integers(0, 500), min_size=1, max_size=60), st.integers(1, 7), st.integers(0, 9))
def test_every_client_is_in_one_bucket_and_none_is_too_small(seed: bytes, clients: set[int], smallest: int, most: int) -> None:
    count = dealing.buckets_of(len(clients), smallest, most)
    if not count:
        assert len(clients) < smallest
        return
    buckets = dealing.deal_buckets(seed, clients, count)
    assert sorted(client for bucket in buckets for client in bucket) == sorted(clients)
    assert all(len(bucket) >= smallest for bucket in buckets)
    assert max(map(len, buckets)) - min(map(len, buckets)) <= 1
    assert not most or count <= most


def test_dealings_are_uniform() -> None:
    """Of six clients into three pairs there are 15 dealings. Chi-squared with 14 degrees of freedom: a fair dealing fails 1 in 10⁶ times;
    the seeds are fixed, so it fails always or never."""
    counts: dict[Any, int] = {}
    for number in range(3000):
        dealt = tuple(sorted(dealing.deal_buckets(number.to_bytes(32, "big"), range(6), 3)))
        counts[dealt] = counts.get(dealt, 0) + 1
    assert len(counts) == 15
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 54


@given(st.integers(0, 4), st.integers(0, 255))
def test_no_nonce_can_be_another_than_was_committed_to(client: int, change: int) -> None:
    slot, nonces = (1, 1, 0), {one: bytes([one]) * 32 for one in range(5)}
    listed = {one: dealing.commitment(SESSION, slot, one, nonce) for one, nonce in nonces.items()}
    dealing.check_opened(SESSION, slot, listed, nonces)
    other = {**nonces, client: bytes([change]) + nonces[client][1:]}
    for wrong in (other, {one: nonce for one, nonce in nonces.items() if one != client}, {**nonces, client: b""}):
        if wrong != nonces:
            with pytest.raises(RemoteError, match="bad-dealing"):
                dealing.check_opened(SESSION, slot, listed, wrong)
    with pytest.raises(RemoteError, match="bad-dealing"):
        dealing.check_opened(SESSION, (1, 1, 1), listed, nonces)
    seeds = {dealing.seed_of(SESSION, slot, nonces), dealing.seed_of(SESSION, slot, other), dealing.seed_of(SESSION, (1, 2, 0), nonces)}
    assert len(seeds) == (2 if other == nonces else 3)


# --- means --------------------------------------------------------------------------------------------------------------------------


def cohorts_of(fed: FederationServer) -> list[tuple[int, ...]]:
    """The cohorts of all secure sums on the transcript, from their terms."""
    found: dict[bytes, tuple[int, ...]] = {}
    for message in fed.transcript.messages:
        if message.kind == "secagg Adverts":
            assert message.payload is not None
            rows, lengths = message.payload["bytes"], message.payload.get("bytes.length")
            said = decode_server(np.asarray(rows[0][: None if lengths is None else int(lengths[0])]).tobytes())
            assert isinstance(said, Adverts)
            found[f"{said.terms.slot} {said.terms.cohort}".encode()] = tuple(said.terms.cohort)
        if message.kind == "helped Invite":
            assert message.payload is not None
            rows, lengths = message.payload["bytes"], message.payload.get("bytes.length")
            terms = decode_invite(np.asarray(rows[0][: None if lengths is None else int(lengths[0])]).tobytes()).terms
            found[f"{terms.slot} {terms.cohort!r}".encode()] = names(terms.cohort)
    return list(found.values())


@pytest.mark.slow
@given(st.data())
@settings(max_examples=15, deadline=None)
def test_no_sum_is_over_fewer_than_the_minimum_cohort(data: st.DataObject) -> None:
    """Whatever the groups, the number of buckets and who drops out: what the server gets are sums over at least that many."""
    smallest, buckets = data.draw(st.integers(2, 3)), data.draw(st.sampled_from([0, 3, 4]))
    labels = data.draw(st.lists(st.integers(0, 2), min_size=20, max_size=20))
    rate = data.draw(st.sampled_from([0.0, 0.1]))
    way = data.draw(st.sampled_from(["secagg", "one_message"]))
    protection = robust(data.draw(st.sampled_from(NAMES)), sum=way, min_cohort=smallest, buckets=buckets)
    fed = federation(population(clients_per_group=10), protection, dropout=rate, seed=data.draw(st.integers(0, 99)))
    held = fed.compute(Make())
    sizes = [labels.count(label) for label in range(3)]
    try:
        means = fed.mean(held["vector"], groups=dict(enumerate(labels)), k=3)
    except TooFewClients:
        assert rate or all(size < 3 * smallest for size in sizes)
        return
    cohorts = cohorts_of(fed)
    assert all(len(cohort) >= smallest for cohort in cohorts)
    assert len({client for cohort in cohorts for client in cohort}) == sum(map(len, cohorts))
    for message in fed.transcript.messages:
        assert message.kind != "bucket mean" or len(message.clients) >= smallest
    for label, mean in enumerate(means):
        assert mean is None or len(mean.contributors) >= smallest
        assert mean is not None or rate or sizes[label] < 3 * smallest
        assert mean is None or all(labels[client] == label for client in mean.contributors)


@pytest.mark.parametrize("rule", NAMES)
@pytest.mark.parametrize("sum", ["none", "secagg", "one_message"])
def test_a_robust_mean_is_the_rule_over_the_means_of_its_buckets(rule: str, sum: str) -> None:
    secure = sum != "none"
    protection = robust(rule, sum=sum, min_cohort=2, secagg_clip=400.0) if secure else Protection(robust=rule, buckets=5)  # type: ignore[arg-type]
    fed = federation(population(clients_per_group=10), protection)
    held = fed.compute(Make())
    (mean,) = fed.mean(held["vector"])
    assert mean is not None
    buckets = [message for message in fed.transcript.messages if message.kind == "bucket mean"]
    assert len(buckets) == (10 if secure else 5)
    own = {client: eye(fed).peek(client, held["vector"]) for client in fed.clients}
    means = []
    for message in buckets:
        assert message.payload is not None
        expected = np.mean([own[client] for client in message.clients], axis=0)
        np.testing.assert_allclose(message.payload["vector"], expected, atol=1e-4 if secure else 1e-12)
        means.append(message.payload["vector"])
    np.testing.assert_allclose(mean.parts["vector"].value(), RULES[rule](np.stack(means)), atol=1e-9)
    assert (mean.count, mean.weight, mean.contributors) == (20, 20.0, fed.clients)


def test_in_the_clear_buckets_are_single_updates() -> None:
    fed = federation(population(clients_per_group=5), Protection(robust="trimmed_mean"))
    held = fed.compute(Make())
    (mean,) = fed.mean(held["one"])
    assert mean is not None
    assert mean.parts["one"].value() == pytest.approx(4.5)  # of 0 to 9 the two in the middle
    with pytest.raises(TooFewClients):
        fed.mean(held["one"], on=fed.clients[:2])


@pytest.mark.parametrize("sum", ["none", "secagg", "one_message"])
def test_the_values_of_one_round_are_summed_over_the_same_buckets(sum: str) -> None:
    """Or the differences of sums would show single values. In the clear a client may be missing from the last; secure sums refuse that."""
    secure = sum != "none"
    protection = robust(sum=sum, min_cohort=2, buckets=5) if secure else Protection(robust="trimmed_mean", buckets=5)
    fed = federation(population(clients_per_group=10), protection)
    held = fed.compute(Make())
    cohorts = []
    for part, on in (("one", None), ("vector", None), ("one", fed.clients[: None if secure else -1])):
        before = len(fed.transcript.messages)
        fed.mean(held[part], on=on)
        cohorts.append({message.clients for message in fed.transcript.messages[before:] if message.kind == "bucket mean"})
    assert cohorts[0] == cohorts[1]
    last = None if secure else fed.clients[-1]
    assert cohorts[2] == {tuple(client for client in bucket if client != last) for bucket in cohorts[0]}


def test_dealings_differ_from_round_to_round_and_under_secure_sums_from_run_to_run() -> None:
    cohorts = []
    for secret in (b"a", b"b"):
        fed = federation(
            population(clients_per_group=10), robust(min_cohort=3), entropy=lambda party, s=secret: public_entropy(f"{party} {s!r}")
        )
        for number in range(2):
            fed.begin_round(number)
            fed.mean(fed.compute(Make())["one"])
        found = cohorts_of(fed)
        assert len(found) == 12
        cohorts += [sorted(found[:6]), sorted(found[6:])]
    assert len({str(one) for one in cohorts}) == 4


# --- a server that lies -------------------------------------------------------------------------------------------------------------


def lying(fed: FederationServer, change: Callable[[m.PartyRequest], m.PartyRequest | None]) -> list[str]:
    """Let a server change what it asks; the error codes that clients answer come in the list."""
    codes: list[str] = []
    registry = fed._registry
    ask = registry.ask

    def asked(asks: Mapping[int, m.PartyRequest], stage: str) -> Mapping[int, m.Answer]:
        changed = {client: other for client, one in asks.items() if (other := change(one)) is not None}
        before = len(registry.refusals)
        answers = ask(changed, stage)
        codes.extend(code for _, _, code in registry.refusals[before:])
        return answers

    registry.ask = asked  # type: ignore[method-assign,assignment]
    return codes


@pytest.mark.parametrize("sum", ["secagg", "one_message"])
def test_clients_refuse_a_cohort_that_is_not_their_bucket(sum: str) -> None:
    """A server that puts a victim among its accomplices gets no sum: without the check it would have one over each."""
    fed = federation(population(clients_per_group=9), robust(sum=sum, min_cohort=3), on_error="refuse")
    chosen = tuple(tuple(range(3 * place, 3 * place + 3)) for place in range(6))
    sums: Any = fed._sums
    secretly, codes = sums._secretly, lying(fed, lambda ask: ask)
    sums._secretly = lambda call, lists, record: dict.fromkeys(secretly(call, lists, record), chosen)
    with pytest.raises(TooFewClients):
        fed.mean(fed.compute(Make())["one"])
    assert set(codes) == {"wrong-bucket"}


@pytest.mark.parametrize(("sum", "listed"), [("secagg", True), ("one_message", True), ("one_message", False)])
def test_clients_refuse_a_sum_without_a_dealing(sum: str, listed: bool) -> None:
    """And, in one message, a sum whose terms do not list its clients."""
    fed = federation(population(clients_per_group=9), robust(sum=sum, min_cohort=3), on_error="refuse")
    fed._sums = fed._sums._sums  # type: ignore[attr-defined]
    sums: Any = fed._sums
    sums._sums.listed = listed
    codes = lying(fed, lambda ask: ask)
    with pytest.raises(TooFewClients):
        fed.mean(fed.compute(Make())["one"])
    assert set(codes) == {"wrong-bucket"}


@pytest.mark.parametrize("lie", ["small list", "other list", "other nonce", "no own commitment", "listed twice"])
def test_clients_open_for_one_list_of_enough(lie: str) -> None:
    fed = federation(population(clients_per_group=9), robust(min_cohort=3), on_error="refuse")

    def change(ask: m.PartyRequest) -> m.PartyRequest:
        if not isinstance(ask, m.Deal) or not ask.listed:
            return ask
        listed, nonces = ask.listed, ask.nonces
        if lie == "small list":
            listed, nonces = listed[:8], nonces[:8]
        if lie == "other list" and nonces:
            listed, nonces = listed[:17], nonces[:17]
        if lie == "other nonce" and nonces:
            nonces = (bytes(32), *nonces[1:])
        if lie == "no own commitment":
            listed = tuple(m.Committed(one.client, bytes(32)) for one in listed)
        if lie == "listed twice":
            listed = (*listed, listed[0])
        return msgspec.structs.replace(ask, listed=listed, nonces=nonces)

    codes = lying(fed, change)
    with pytest.raises(TooFewClients):
        fed.mean(fed.compute(Make())["one"])
    assert set(codes) <= {"bad-dealing", "wrong-bucket"}
    assert "bad-dealing" in codes


def test_a_nonce_is_opened_once_and_slots_go_on() -> None:
    fed = federation(population(clients_per_group=9), robust(min_cohort=3), on_error="refuse")
    fed.mean(fed.compute(Make())["one"])
    client = eye(fed).client(0)
    deal = m.Deal(fed.session, (9, 0, 0), (), ())

    def said(ask: m.Deal) -> m.Answer:
        return m.decode_answer(client.receive(m.encode(ask)))

    first = said(deal)
    assert isinstance(first, m.Stepped)
    assert said(deal) == m.Refused("old-slot")
    assert said(msgspec.structs.replace(deal, slot=(8, 9, 9))) == m.Refused("old-slot")
    listed = (m.Committed(0, first.message), *(m.Committed(other, bytes(32)) for other in range(1, 9)))
    opening = msgspec.structs.replace(deal, listed=listed)
    assert said(msgspec.structs.replace(opening, slot=(9, 0, 1))) == m.Refused("wrong-stage")
    assert isinstance(said(opening), m.Stepped)
    assert said(opening) == m.Refused("bad-dealing")
    assert said(msgspec.structs.replace(opening, nonces=(bytes(32),) * 9)) == m.Refused("bad-dealing")


def test_clients_without_a_robust_rule_take_no_part_in_dealings() -> None:
    fed = federation(population(), Protection(sum="secagg"), on_error="refuse")
    client = eye(fed).client(0)
    answer = m.decode_answer(client.receive(m.encode(m.Deal(fed.session, (1, 0, 0), (), ()))))
    assert answer == m.Refused("forbidden")


@pytest.mark.parametrize("stage", ["deal commit", "deal open", "deal"])
def test_who_leaves_a_dealing_costs_itself(stage: str) -> None:
    """Who does not commit is left out, who does not open causes another dealing; after that only its bucket lacks it."""
    fed = federation(population(clients_per_group=10), robust(min_cohort=3, buckets=3))
    ask = fed._registry.ask

    def silent(asks: Mapping[int, m.PartyRequest], name: str) -> Mapping[int, m.Answer]:
        return ask({client: one for client, one in asks.items() if not (name == stage and client == 4)}, name)

    fed._registry.ask = silent  # type: ignore[method-assign,assignment]
    (mean,) = fed.mean(fed.compute(Make())["one"])
    assert mean is not None
    assert mean.contributors == tuple(client for client in range(20) if client != 4)
    asked = [message.kind for message in fed.transcript.messages].count("deal open")
    assert asked == (4 if stage == "deal open" else 2)  # down and up


def test_a_false_nonce_names_its_client_and_costs_itself() -> None:
    fed = federation(population(clients_per_group=10), robust(min_cohort=3, buckets=3))
    ask = fed._registry.ask

    def false(asks: Mapping[int, m.PartyRequest], name: str) -> Mapping[int, m.Answer]:
        answers = dict(ask(asks, name))
        if name == "deal open" and 4 in answers:
            answers[4] = m.Stepped(bytes(32))
        return answers

    fed._registry.ask = false  # type: ignore[method-assign,assignment]
    (mean,) = fed.mean(fed.compute(Make())["one"])
    assert mean is not None
    assert mean.contributors == tuple(client for client in range(20) if client != 4)
    assert fed.refusals == [(4, "deal open", "bad-dealing")]


# --- configuration ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"robust": "krum"}, "robust = 'krum': expected 'none', 'trimmed_mean'"),
        ({"robust": "trimmed_mean", "buckets": 2}, "buckets = 2: expected an integer, 0 or ≥ 3"),
        ({"robust": "trimmed_mean", "buckets": -1}, "buckets = -1: expected an integer, 0 or ≥ 3"),
        (
            {"robust": "trimmed_mean", "sum": "secagg-oblivious"},
            "robust: 'trimmed_mean' under sum = 'secagg-oblivious'.* 'none' or 'secagg'",
        ),
        *(
            ({"robust": "trimmed_mean", "sum": name}, f"robust: 'trimmed_mean' under sum = '{name}'")
            for name in ("permutation", "hadamard", "haar")
        ),
        ({"robust": "trimmed_mean", "sum": "secagg", "max_weight": 9.0}, "max_weight: 9 with robust = 'trimmed_mean'"),
    ],
)
def test_combinations_that_are_not_allowed_are_refused_by_name(given_: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=rf"protection\.{words}"):
        Protection(**given_)


SMALL: dict[str, Any] = {
    "data": {"clients": 9, "samples_per_client": 20}, "model": {"name": "linear"}, "training": {"rounds": 1, "weights": "equal"},
    "algorithm": {"name": "fedavg"}, "protection": {"robust": "trimmed_mean", "sum": "secagg"},
}  # fmt: skip


CLIENT = {"unit": "client", "epsilon": 1.0, "delta": 1e-5, "clip_norm": 1.0}


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("training", {"weights": "own"}, "training.weights = 'examples' under protection.robust = 'trimmed_mean'"),
        (
            "privacy",
            {"unit": "client", "epsilon": 1.0, "delta": 1e-5, "clip_norm": 1.0},
            "protection.robust = 'trimmed_mean' under privacy.unit = 'client'",
        ),
        ("data", {"clients": 8}, "min_cohort = 3 under robust = 'trimmed_mean' takes 9 clients a sum: there are only 8"),
    ],
)
def test_experiments_refuse_them_before_they_start(section: str, changes: dict[str, Any], words: str) -> None:
    tree = {**SMALL, section: {**SMALL.get(section, {}), **changes}}
    with pytest.raises(InputError, match=words.replace(".", r"\.")):
        start(parse_config(tree))


def test_unequal_weights_are_refused() -> None:
    fed = federation(population(), Protection(robust="trimmed_mean"))
    held = fed.compute(Make())
    for weights in ("examples", {client: 1.0 + client for client in fed.clients}):
        with pytest.raises(InputError, match=r"weights that differ under protection\.robust = 'trimmed_mean'"):
            fed.mean(held["one"], weights=weights)


@pytest.mark.parametrize("transport", ["memory", "bytes"])
def test_a_run_with_robust_sums(transport: str) -> None:
    training = {"rounds": 1, "weights": "equal", "lr": 0.1, "epochs": 20}
    simulation = start(parse_config({**SMALL, "training": training, "run": {"transport": transport}}))
    row = advance(simulation)
    assert row["skipped"] is None
    summary = finish(simulation)
    assert summary["protection"] == "sum=secagg, robust=trimmed_mean"
    assert summary["accuracy_mean"] > 0.6


@pytest.mark.parametrize("small", ["wait", "local"])
def test_groups_of_fewer_than_three_buckets_count_as_small(small: Any) -> None:
    fed = federation(population(clients_per_group=8), robust(min_cohort=3, small_clusters=small))
    held = fed.compute(Make())
    means = fed.mean(held["one"], groups={client: int(client >= 9) for client in fed.clients}, k=2)
    assert means[0] is not None
    assert means[0].count == 9
    if small == "wait":
        assert means[1] is None
    else:
        assert means[1] is not None
        assert means[1].parts["one"].own


# --- clients that misbehave ---------------------------------------------------------------------------------------------------------


def test_bad_clients_destroy_a_mean_and_not_a_robust_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cell of the measurement, made small: 10 % of the clients send −10 times their update."""
    spec = importlib.util.spec_from_file_location("benchmark_robustness", ROOT / "benchmarks" / "robustness.py")
    assert spec is not None
    assert spec.loader is not None
    robustness = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, robustness)
    spec.loader.exec_module(robustness)
    digits = robustness.SETTINGS["digits"]
    small = {**digits, "data": {**digits["data"], "clients": 20}, "training": {**digits["training"], "rounds": 3}}
    monkeypatch.setattr(robustness, "SETTINGS", {"digits": small})
    accuracy = {
        method: robustness.cell("digits", "sign flip x10", 0.1, method, 0)["accuracy"] for method in ("mean", "geometric_median, single")
    }
    assert accuracy["mean"] < 0.3
    assert accuracy["geometric_median, single"] > 0.7


def test_a_bad_client_changes_what_it_holds_and_no_other_does() -> None:
    fed = federation(population(), Protection())
    corrupt(eye(fed), 1, scaled_update(-2.0, "vector"))
    held = fed.compute(Make())
    for client in fed.clients:
        honest = Make().run(eye(fed).client(client).given(fed.asks(Make(), {}, None, [client])[client], SharedWork()))
        assert eye(fed).peek(client, held["vector"]) == pytest.approx(honest["vector"] * (-2.0 if client == 1 else 1.0))
        assert eye(fed).peek(client, held["one"]) == client
