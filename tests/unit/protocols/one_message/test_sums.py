"""Sums in one message are exact, whoever drops out, down to the quorum; false masks are noticed, and named where enough helpers know a
seed."""

import numpy as np
import pytest

from cflpriv.protocols.errors import HelpersFailed, RemoteError, SumFailed, TooFewClients
from cflpriv.protocols.one_message import Contribution, HelpedServer, HelpedTerms, Helper, SumRecord, agreeable, most_failing, simulate
from cflpriv.protocols.one_message.server import plan
from cflpriv.protocols.one_message.terms import context, held, seed_sets

from .scene import Scene, levels, wrong

SCHEMES = [(2, 1), (3, 1), (3, 2), (4, 1), (5, 1), (5, 2), (7, 2)]


@pytest.mark.parametrize(("helpers", "colluding"), SCHEMES)
@pytest.mark.parametrize("bits", [16, 32])
def test_exact_with_dropouts_and_as_many_failing_helpers_as_are_allowed_at_each_point(helpers: int, colluding: int, bits: int) -> None:
    failing = most_failing(helpers, colluding)
    for point in ("never", "before keys", "before closing", "before opening"):
        scene = Scene(5, helpers, colluding)
        lost = set(range(failing)) if point != "never" else set()
        announced = scene.announced(present=[helper for helper in range(helpers) if point != "before keys" or helper not in lost])
        terms = scene.terms(announced, bits=bits)
        there = {
            number: helper for number, helper in scene.all().items() if point not in ("before keys", "before closing") or number not in lost
        }
        outcome = simulate(
            terms, announced, scene.roster, scene.identities[:4], there, lambda client: Contribution(levels(client, 4), is_levels=True),
            absent=lost if point == "before opening" else (),
        )  # fmt: skip
        assert outcome.sum.block().tolist() == sum(levels(client, 4) for client in range(4)).tolist()
        assert outcome.sum.survivors == (0, 1, 2, 3)
        assert not outcome.refused
        assert not outcome.liars


@pytest.mark.parametrize(("helpers", "colluding"), SCHEMES)
def test_one_helper_more_than_may_fail_gives_no_sum_and_it_comes_when_the_helper_is_back(helpers: int, colluding: int) -> None:
    scene = Scene(3, helpers, colluding)
    announced = scene.announced()
    server = scene.server(scene.terms(announced), announced)
    for client in range(3):
        server.receive(client, scene.upload(client, server))
    there = dict(list(scene.all().items())[most_failing(helpers, colluding) + 1 :])
    with pytest.raises(HelpersFailed, match="too-few-helpers"):
        scene.finish(server, there)


def test_weighted_means_of_real_values() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(6, 50)) / 9, [1, 5, 3, 9, 2, 10]
    scene = Scene(6)
    announced = scene.announced()
    terms = scene.terms(announced, dimension=50, weight_limit=10.0)
    outcome = simulate(
        terms, announced, scene.roster, scene.identities, scene.all(), lambda client: Contribution(values[client], weights[client])
    )
    counted = np.maximum(weights, terms.least_weight)
    np.testing.assert_allclose(outcome.sum.mean(), counted @ values / counted.sum(), atol=1e-6)
    assert terms.minimum == 4  # more than half, as weights differ


def test_a_lying_helper_is_named_and_the_sum_goes_on_or_the_sum_is_refused() -> None:
    for helpers, colluding, named in ((4, 1, True), (3, 1, False), (5, 2, False)):
        for liar in range(helpers):
            scene = Scene(3, helpers, colluding)
            announced = scene.announced()
            server = scene.server(scene.terms(announced), announced)
            for client in range(3):
                server.receive(client, scene.upload(client, server))
            there = scene.all()
            server.delivered({helper: there[helper].receive(data) for helper, data in server.deliver().items()})
            ended = _with_a_liar(scene, server, there, liar)
            assert (ended is None) == named
            if ended is None:
                assert server.liars == {liar}
                assert server.result.block().tolist() == sum(levels(client, 4) for client in range(3)).tolist()
            else:
                assert ended.code == "masks-differ"
                assert liar in ended.helpers


def _with_a_liar(scene: Scene, server: HelpedServer, there: dict[int, Helper], liar: int) -> HelpersFailed | None:
    """Close and open, where one helper sends false masks; the error, if any."""
    messages = server.close()
    try:
        while messages:
            messages = server.advance(
                {
                    helper: wrong(there[helper], scene.holders[helper], data) if helper == liar else there[helper].receive(data)
                    for helper, data in messages.items()
                }
            )
    except HelpersFailed as error:
        return error
    return None


def test_what_helpers_send_under_no_signature_of_theirs_counts_as_no_answer() -> None:
    scene = Scene(3)
    announced = scene.announced()
    server = scene.server(scene.terms(announced), announced)
    for client in range(3):
        server.receive(client, scene.upload(client, server))
    there = scene.all()
    server.delivered({helper: there[helper].receive(data) for helper, data in server.deliver().items()})
    messages = server.advance({helper: there[helper].receive(data) for helper, data in server.close().items()})
    first = next(iter(messages))
    while messages:
        messages = server.advance(
            {
                helper: wrong(there[helper], scene.holders[1 if first == 0 else 0], data)
                if helper == first
                else there[helper].receive(data)
                for helper, data in messages.items()
            }
        )
    assert first not in server.helpers
    assert not server.liars
    assert server.result.block().tolist() == sum(levels(client, 4) for client in range(3)).tolist()


def test_a_sum_outside_its_range_is_refused() -> None:
    scene = Scene(3)
    announced = scene.announced()
    terms = scene.terms(announced, clients=3, levels=100)
    server = scene.server(terms, announced)
    for client in range(2):
        server.receive(client, scene.upload(client, server))
    bad = scene.server(scene.terms(announced, clients=3), announced)  # other levels, other terms: nothing of it fits
    with pytest.raises(RemoteError, match="malformed"):
        server.receive(2, scene.upload(2, bad))
    with pytest.raises(TooFewClients):
        scene.finish(server, scene.all())


def test_a_client_beyond_the_levels_of_the_terms_makes_the_sum_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from cflpriv.protocols.one_message import client as one

    scene = Scene(3)
    announced = scene.announced()
    server = scene.server(scene.terms(announced, levels=100), announced)
    monkeypatch.setattr(one, "encode_inputs", lambda *_: (np.array([2**20, 0, 0, 0, 0], np.int32), 0))
    for client in range(3):
        server.receive(client, scene.upload(client, server))
    with pytest.raises(SumFailed, match="out-of-range"):
        scene.finish(server, scene.all())


def test_a_plan_asks_enough_helpers_for_every_seed_and_only_those_who_know_it() -> None:
    scene = Scene()
    for helpers, colluding in SCHEMES:
        scene = Scene(3, helpers, colluding)
        announced = scene.announced()
        terms: HelpedTerms = scene.terms(announced)
        everything = range(len(seed_sets(helpers, colluding)))
        groups = plan(terms, range(helpers), everything)
        assert sorted(seed for group, _ in groups for seed in group) == list(everything)
        for group, who in groups:
            assert len(who) == min(colluding + 1, helpers - colluding)
            assert all(set(group) <= set(held(terms, helper)) for helper in who)


def test_a_record_of_sums_serves_both_protocols() -> None:
    scene = Scene(3)
    announced = scene.announced()
    server = scene.server(scene.terms(announced), announced)
    record = SumRecord()
    scene.upload(0, server, record)
    again = SumRecord.from_bytes(record.to_bytes())
    scene.upload(0, scene.server(scene.terms(announced, slot=(1, 1)), announced), again)
    with pytest.raises(RemoteError, match="second-sum"):
        scene.upload(0, scene.server(scene.terms(announced, slot=(1, 2), clip=0.5), announced), again)
    assert agreeable(server.terms).mode == "active"


def test_what_a_helper_keeps_of_uploads_is_that_of_its_store_and_is_erased_with_the_key() -> None:
    scene = Scene()
    announced = scene.announced()
    terms = scene.terms(announced)
    server = scene.server(terms, announced)
    helpers = scene.all()
    for client in range(2):
        server.receive(client, scene.upload(client, server))
        server.delivered({number: helpers[number].receive(message) for number, message in server.deliver().items()})
    helper = helpers[0]
    kept, _ = helper._uploads(context(terms))
    assert sorted(kept) == [0, 1]
    del scene.stores[0][f"uploads/{context(terms).hex()}/1"]
    assert sorted(helper._uploads(context(terms))[0]) == [0]
    helper.announcement(terms.round + 1)
    assert not helper._batches
    assert not helper._uploads(context(terms))[0]
