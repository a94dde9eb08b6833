"""Sums over blocks of the clients' own choice: exact, with small blocks closed, whoever lies; and sums over listed clients only."""

from hashlib import sha256
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest

from cflpriv.protocols.errors import HelpersFailed, RemoteError, TooFewClients
from cflpriv.protocols.keys import sign
from cflpriv.protocols.one_message import Contribution, HelpedServer, HelpedTerms, Helper, SumRecord, accept, agreeable, upload
from cflpriv.protocols.one_message import messages as m
from cflpriv.protocols.one_message.blocks import counted_masks
from cflpriv.protocols.secagg.vectors import encode_inputs

from .scene import Scene

CHOICES = {0: (0,), 1: (0,), 2: (0, 2), 3: (1,), 4: (), 5: (0,)}
"""Blocks that clients fill: four fill the first, one each the others."""
VALUES = np.random.default_rng(5).normal(size=(6, 3)) / 4


def terms_of(scene: Scene, announced: dict[int, bytes], **changes: Any) -> HelpedTerms:
    fields = {"dimension": 3, "clusters": 3, "weight_limit": 1.0, "least_weight": 1.0}
    return scene.terms(announced, **fields | changes)


def collected(scene: Scene, server: HelpedServer, clients: range | list[int], choices: Any = CHOICES) -> dict[int, Helper]:
    """Helpers that have the uploads of these clients."""
    policy = msgspec.structs.replace(agreeable(server.terms), names=(1,))
    for client in clients:
        identity = scene.identities[client]
        accepted = accept(server.invite, identity, policy, scene.colluding, scene.roster)
        inputs = [Contribution(VALUES[client], cluster=cluster) for cluster in choices[client]]
        server.receive(client, upload(accepted, identity, policy, SumRecord(), inputs)[0])
    there = scene.all()
    server.delivered({helper: there[helper].receive(data) for helper, data in server.deliver().items()})
    return there


def counting() -> tuple[Scene, HelpedServer, dict[int, Helper], dict[int, bytes]]:
    """A sum of six clients, and the helpers' masks of its counts, which the server has not taken yet."""
    scene = Scene(6)
    announced = scene.announced()
    server = scene.server(terms_of(scene, announced), announced)
    there = collected(scene, server, range(6))
    messages = server.advance({helper: there[helper].receive(data) for helper, data in server.close().items()})
    return scene, server, there, {helper: there[helper].receive(data) for helper, data in messages.items()}


def finish(server: HelpedServer, there: dict[int, Helper]) -> None:
    messages = server.close()
    while messages:
        messages = server.advance({helper: there[helper].receive(data) for helper, data in messages.items() if helper in there})


@pytest.mark.parametrize(("bits", "scheme"), list(product((16, 32), ((3, 1), (4, 1), (5, 1), (5, 2)))))
def test_large_blocks_are_exact_and_small_ones_stay_closed(bits: Any, scheme: tuple[int, int]) -> None:
    scene = Scene(6, *scheme)
    announced = scene.announced()
    server = scene.server(terms_of(scene, announced, bits=bits), announced)
    finish(server, collected(scene, server, range(6)))
    assert server.counts == (4, 1, 1)
    assert server.open_clusters == (0,)
    result = server.result
    assert result.weight(0) == 4
    np.testing.assert_allclose(result.mean(0), VALUES[[0, 1, 2, 5]].mean(axis=0), atol=2 / result.terms.levels)
    for cluster in (1, 2):
        assert not result.block(cluster).any()


def test_who_drops_out_is_not_counted_and_with_no_large_block_there_is_no_sum() -> None:
    scene = Scene(6)
    announced = scene.announced()
    server = scene.server(terms_of(scene, announced), announced)
    with pytest.raises(TooFewClients):
        finish(server, collected(scene, server, [0, 1, 3, 4]))
    assert server.counts == (2, 1, 0)


def test_a_helper_counts_for_itself() -> None:
    """A server that shows other masks of the counts, or fewer than t + 1 of them, gets no block."""
    scene, server, there, answers = counting()
    asks = {helper: m.decode_to_helper(data) for helper, data in server.advance(answers).items()}
    ask = asks[0]
    assert isinstance(ask, m.OpenSet)
    opened = m.decode_from_helper(there[0].receive(m.encode(ask)), server.terms)
    assert isinstance(opened, m.OpenedMasks)
    assert {len(mask) for mask in opened.masks} == {4 * (3 + 1)}  # one block of three, and how many clients clipped
    first, *others = ask.counted
    raised = np.frombuffer(first.masks[0], "<u4") - np.array([0, 2, 0], "<u4") * server.terms.levels
    forged = msgspec.structs.replace(first, masks=(raised.astype("<u4").tobytes(), *first.masks[1:]))
    name = server._name
    hashes = [sha256(mask).digest() for mask in forged.masks]
    groups = [(number,) for number in (1, 2, 3)]  # what helper 0 knows
    signed = msgspec.structs.replace(
        forged, signature=sign(scene.holders[0], m.COUNT, *m.mask_parts(0, name, groups, hashes))
    )  # fmt: skip
    for counted, code in (
        ((forged, *others), "bad-signature"),
        ((signed, *others[:2]), "masks-differ"),
        ((first,), "too-few-helpers"),
        ((), "not-held"),  # the counts are asked for again, but by groups that are not those of counts
    ):
        with pytest.raises(RemoteError, match=code):
            there[1].receive(m.encode(msgspec.structs.replace(asks[1], counted=counted)))
    masks, liars = counted_masks(server.terms, scene.roster, name, (signed, *others))
    assert liars == {0}
    assert masks.tolist() == counted_masks(server.terms, scene.roster, name, (first, *others))[0].tolist()


def test_a_helper_that_lies_about_counts_is_named_and_one_that_stops_is_left_out() -> None:
    for lies in (True, False):
        scene, server, there, answers = counting()
        if lies:
            message = m.decode_from_helper(answers[2], server.terms)
            assert isinstance(message, m.OpenedMasks)
            masks = tuple(bytes([mask[0] ^ 1]) + mask[1:] for mask in message.masks)
            hashes = tuple(sha256(mask).digest() for mask in masks)
            groups = [(number,) for number in (0, 1, 3)]
            signature = sign(scene.holders[2], m.COUNT, *m.mask_parts(2, server._name, groups, hashes))
            answers[2] = m.encode(msgspec.structs.replace(message, masks=masks, hashes=hashes, signature=signature))
        else:
            del answers[2], there[2]
        messages = server.advance(answers)
        while messages:
            messages = server.advance({helper: there[helper].receive(data) for helper, data in messages.items()})
        assert server.liars == ({2} if lies else set())
        assert server.counts == (4, 1, 1)
        np.testing.assert_allclose(server.result.mean(0), VALUES[[0, 1, 2, 5]].mean(axis=0), atol=1e-6)


def test_what_a_client_puts_into_counts_beyond_their_range_ends_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    from cflpriv.protocols.errors import SumFailed
    from cflpriv.protocols.one_message import client as one

    scene = Scene(6)
    announced = scene.announced()
    server = scene.server(terms_of(scene, announced, levels=1000), announced)

    def too_many(*inputs: Any) -> Any:
        levels, clipped = encode_inputs(*inputs)
        levels[3] += 7000
        return levels, clipped

    with monkeypatch.context() as patched:
        patched.setattr(one, "encode_inputs", too_many)
        there = collected(scene, server, range(6))
    with pytest.raises(SumFailed, match="out-of-range"):
        finish(server, there)


def test_terms_of_blocks_that_do_not_fit() -> None:
    scene = Scene(6)
    announced = scene.announced()
    for changes, words in (
        ({"weight_limit": 0.0, "least_weight": None}, "weight_limit: expected equal weights"),
        ({"weight_limit": 5.0, "least_weight": 1.0}, "weight_limit: expected equal weights"),
        ({"noise": 8}, "noise: expected an unweighted sum"),
    ):
        with pytest.raises(ValueError, match=words):
            terms_of(scene, announced, **changes)
    few = Scene(6, 2, 1)
    with pytest.raises(ValueError, match="more than twice as many as may collude"):
        terms_of(few, few.announced())


def test_members_are_of_the_cohort_that_the_terms_list() -> None:
    scene = Scene(6)
    announced = scene.announced()
    server = scene.server(scene.terms(announced, clients=4, cohort=(0, 1, 2, 3)), announced)
    with pytest.raises(RemoteError, match="not-invited"):
        scene.upload(4, server)
    for client in range(4):
        server.receive(client, scene.upload(client, server))
    there = scene.all()
    server.delivered({helper: there[helper].receive(data) for helper, data in server.deliver().items()})
    # An accomplice uploads under these terms all the same, and a server that lies passes the upload on.
    own = scene.server(server.terms, announced)
    own._invited = frozenset()
    accepted = accept(server.invite, scene.identities[0], agreeable(server.terms), 1, scene.roster)
    data, _ = upload(accepted, scene.identities[4], agreeable(server.terms), SumRecord(), Contribution(np.zeros(4)))
    with pytest.raises(RemoteError, match="not-invited"):
        server.receive(4, data)
    own.receive(4, data)
    for helper, message in own.deliver().items():
        read = m.decode_from_helper(there[helper].receive(message), server.terms)
        assert isinstance(read, m.UploadsRead)
        assert read.refused == (m.RefusedUpload(4, "not-invited"),)
    with pytest.raises(RemoteError, match="not-delivered"):
        there[0].receive(m.encode(m.CloseSet(server.terms, m.ids((0, 1, 2, 4)))))
    messages = server.close()
    while messages:
        messages = server.advance({helper: there[helper].receive(message) for helper, message in messages.items()})
    assert server.result.survivors == (0, 1, 2, 3)
    for cohort in ((0, 1, 2), (0, 1, 2, 3, 4)):
        with pytest.raises(ValueError, match="as many clients as maximum"):
            scene.terms(announced, clients=4, cohort=cohort)


def test_too_few_helpers_for_the_counts_give_no_sum() -> None:
    """Two of five may lie, so three must agree on each mask; one that fails leaves two who know some."""
    scene = Scene(6, 5, 2)
    announced = scene.announced()
    server = scene.server(terms_of(scene, announced), announced)
    there = collected(scene, server, range(6))
    del there[4]
    with pytest.raises(HelpersFailed, match="too-few-helpers"):
        finish(server, there)
