"""Cluster sums without memberships: the counts come first, and the minimum cohort size holds even for the worst dropouts."""

from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.protocols.errors import RemoteError, TooFewClients
from cflpriv.protocols.secagg import (
    Client,
    Contribution,
    ObliviousOutcome,
    SumRecord,
    Terms,
    block_terms,
    count_terms,
    fewest_survivors,
    open_blocks,
    simulate_oblivious,
)
from cflpriv.protocols.secagg import messages as m

from .scene import MODEL, SESSION, identities, policy, roster, terms


def oblivious_sums(
    clusters: Mapping[int, tuple[int, ...]],
    k: int,
    drops: tuple[Mapping[int, str], Mapping[int, str]] = ({}, {}),
    mode: str = "passive",
    spare: int = 0,
    following: bool = True,
) -> ObliviousOutcome:
    agreed: Terms = count_terms(
        session=SESSION,
        slot=(5, 0),
        cohort=sorted(clusters),
        models=[MODEL],
        clusters=k,
        roster=roster() if mode == "active" else None,
        following=(5, 1) if following else None,
    )
    return simulate_oblivious(
        agreed,
        {i: identities()[i] for i in clusters},
        lambda i: clusters[i],
        lambda i: [Contribution(np.full(4, 0.01 * (i + 1) * (c + 1)), cluster=c) for c in clusters[i]],
        slot=(5, 1),
        dimension=4,
        clip=10.0,
        spare=spare,
        roster=roster() if mode == "active" else None,
        drops=drops,
    )


@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize("following", [True, False])
def test_means_of_clusters_at_or_above_the_minimum_cohort_size(mode: str, following: bool) -> None:
    clusters = {i: (i % 2,) if i < 9 else (2,) for i in range(11)}
    outcome = oblivious_sums(clusters, 4, mode=mode, following=following)
    assert outcome.counts == (5, 4, 2, 0)
    assert set(outcome.means) == {0, 1}
    for cluster in (0, 1):
        mean, weight = outcome.means[cluster]
        members = [i for i in clusters if clusters[i] == (cluster,)]
        assert weight == len(members)
        np.testing.assert_allclose(mean, 0.01 * (cluster + 1) * np.mean([i + 1 for i in members]), atol=1e-6)
    # Nothing of the small cluster is in the second sum at all.
    assert len(outcome.second.sum.levels) == 2 * 5 + 1


def test_clients_in_several_clusters() -> None:
    outcome = oblivious_sums({0: (0, 1), 1: (0,), 2: (0, 1, 2), 3: (1,), 4: ()}, 3)
    assert outcome.counts == (3, 3, 1)
    assert outcome.means[1][0].tolist() == pytest.approx([0.02 * (1 + 3 + 4) / 3] * 4, abs=1e-6)


def test_no_cluster_large_enough() -> None:
    with pytest.raises(TooFewClients) as caught:
        oblivious_sums({i: (i % 3,) for i in range(6)}, 3)
    assert caught.value.counts == (2, 2, 2)


def test_dropouts_between_the_sums_count_against_the_smallest_open_block() -> None:
    clusters = {i: (0,) if i < 6 else (1,) for i in range(10)}
    with pytest.raises(TooFewClients):
        # Two of cluster 0 go, which would still leave 4 + 4; but nobody can know that they were not of cluster 1, which has 4.
        oblivious_sums(clusters, 2, ({}, {0: "Masked", 1: "Masked"}))
    outcome = oblivious_sums(clusters, 2, ({}, {0: "Masked"}))
    assert {c: weight for c, (_, weight) in outcome.means.items()} == {0: 5.0, 1: 4.0}
    outcome = oblivious_sums(clusters, 2, ({}, {0: "Masked", 1: "Shares"}), spare=2)
    assert {c: weight for c, (_, weight) in outcome.means.items()} == {0: 4.0}


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_no_block_with_fewer_contributors_than_the_minimum_is_ever_unmasked(data: st.DataObject) -> None:
    n = data.draw(st.integers(3, 14))
    clusters = {i: (data.draw(st.integers(0, 2)),) for i in range(n)}
    stages = st.sampled_from(["Advert", "Shares", "Masked", "Reveal"])
    some = st.dictionaries(st.integers(0, n - 1), stages, max_size=3)
    drops = data.draw(some), data.draw(some)
    try:
        outcome = oblivious_sums(clusters, 3, drops, spare=data.draw(st.integers(0, 2)), following=False)
    except TooFewClients:
        return
    for cluster, (mean, weight) in outcome.means.items():
        present = [i for i in outcome.second.sum.survivors if clusters[i] == (cluster,)]
        assert weight == len(present) >= 3
        np.testing.assert_allclose(mean, 0.01 * (cluster + 1) * np.mean([i + 1 for i in present]), atol=1e-6)


def test_the_client_computes_the_fewest_survivors_of_the_second_sum_itself() -> None:
    agreed = terms(10, "passive", blocks=((0, 6), (2, 4)), weight_limit=1.0, min_cohort=3)
    assert fewest_survivors(agreed) == 9
    machine = Client(identities()[0], policy(agreed), record=SumRecord())
    for blocks in (((0, 6), (2, 2)), ((0, 11),)):
        with pytest.raises(RemoteError, match="bad-terms"):
            machine.receive(m.encode(m.Invite(msgspec.structs.replace(agreed, blocks=blocks))))


def test_open_blocks_and_terms() -> None:
    assert open_blocks([5, 2, 3, 0], 3) == ((0, 5), (2, 3))
    assert open_blocks([5, 2, 3, 0], 3, spare=1) == ((0, 5),)
    outcome = oblivious_sums(dict.fromkeys(range(4), (0,)), 1)
    second = block_terms(outcome.first.sum, slot=(5, 2), models=[MODEL], dimension=3, clip=1.0)
    assert (second.cohort, second.blocks, second.min_cohort) == ((0, 1, 2, 3), ((0, 4),), 3)
    with pytest.raises(ValueError, match="cluster"):
        outcome.second.sum.total(7)


def test_blocks_take_only_named_contributions() -> None:
    agreed = terms(3, "passive", blocks=((1, 3),), weight_limit=1.0)
    from cflpriv.protocols.errors import LocalError

    from .scene import Play

    for bad in ([Contribution(np.zeros(10))], [Contribution(np.zeros(10), cluster=1)] * 2):
        play = Play.of(agreed)
        outbox = play.until("Deliver")
        with pytest.raises(LocalError, match="bad-values"):
            play.clients[0].receive(outbox[0], *bad)
    play = Play.of(agreed)
    play.values = lambda number: [Contribution(np.ones(10), cluster=c) for c in (0, 1)] if number else []
    play.finish()
    assert play.server.result.weight(1) == 2.0
    np.testing.assert_allclose(play.server.result.mean(1), 1.0)
