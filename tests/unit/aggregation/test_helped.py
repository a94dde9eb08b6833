"""Sums in one message in a federation: exact whoever drops out, over one set a value, and what helpers, clients and the server keep."""

from typing import Any

import msgspec
import numpy as np
import pytest
from loopback import ENTROPY, HOLDER, Loopback, remote
from scenes import Make, federation, population, sums_of, training

from cflpriv.aggregation import helped_sums
from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation.registry import KeyHolderLost
from cflpriv.federation.server import FederationServer
from cflpriv.federation.store import DiskStore, Store
from cflpriv.federation.transport import OverBytes
from cflpriv.privacy.client_level import client_noise
from cflpriv.privacy.settings import Privacy, Releases
from cflpriv.protocols import codec
from cflpriv.protocols.errors import TooFewClients
from cflpriv.protocols.ledger import Ledger
from cflpriv.protocols.one_message import messages as steps

SCENE = population(groups=1, clients_per_group=8)
TASK = training(SCENE)
CLIP = 8.0


def helped(**more: Any) -> Protection:
    options: dict[str, Any] = {"sum": "one_message", "secagg_clip": CLIP}
    return Protection(**options | more)


def updates_of(fed: FederationServer) -> Any:
    return fed.compute(TASK, {"model": TASK.model.init(fed.round)})["update"]


def plain_mean(number: int, on: list[int]) -> Any:
    """The mean without a protection."""
    _, fed = remote(SCENE)
    fed.begin_round(number)
    (mean,) = fed.mean(updates_of(fed), on=on)
    assert mean is not None
    return mean.parts["update"].value()


@pytest.mark.parametrize("bits", [16, 32])
def test_clients_and_helpers_drop_out_and_the_mean_is_that_of_the_others(bits: Any) -> None:
    transport, fed = remote(SCENE, helped(secagg_bits=bits))
    transport.kill_at = {"sum": {1, 6}, "sum Open": {HOLDER - 2}}
    fed.begin_round(0)
    (mean,) = fed.mean(updates_of(fed))
    assert mean is not None
    assert mean.contributors == (0, 2, 3, 4, 5, 7)
    step = CLIP / ((2 ** (bits - 1) - 1) // 8)
    np.testing.assert_allclose(mean.parts["update"].value(), plain_mean(0, list(mean.contributors)), rtol=0, atol=step)
    assert transport.stages.count("sum") == 1  # one message of each client
    assert [stage for stage in transport.stages if stage.startswith("sum ")] == [
        "sum keys",
        "sum Delivery",
        "sum Close",
        "sum Open",
        "sum Open",
    ]


def test_too_few_helpers_end_the_round_and_a_helper_that_is_back_goes_on_from_its_store() -> None:
    transport, fed = remote(SCENE, helped())
    transport.dead |= {HOLDER, HOLDER - 1}
    fed.begin_round(0)
    held = updates_of(fed)
    with pytest.raises(KeyHolderLost, match="helpers"):
        fed.mean(held)
    transport.dead.clear()
    fed.enrol()
    assert not fed.holder_missing
    fed.begin_round(1)
    (mean,) = fed.mean(updates_of(fed))
    assert mean is not None
    assert mean.count == 8


def test_a_helper_that_lies_is_on_record_and_changes_nothing() -> None:
    transport, fed = remote(SCENE, helped())

    def lie(client: int, stage: str, data: bytes) -> bytes:
        if client != HOLDER - 1 or stage != "sum Open":
            return data
        answer = m.decode_answer(data)
        assert isinstance(answer, m.Helped)
        first = answer.answers[0]
        assert isinstance(first, m.Stepped)
        return m.encode(m.Helped((m.Stepped(first.message[:-1] + bytes([first.message[-1] ^ 1])),)))

    transport.tamper = lie
    fed.begin_round(0)
    (mean,) = fed.mean(updates_of(fed))
    assert mean is not None
    np.testing.assert_allclose(mean.parts["update"].value(), plain_mean(0, list(range(8))), rtol=0, atol=1e-6)


def test_weights_by_samples() -> None:
    protection = helped(max_weight=40.0)
    _, fed = remote(SCENE, protection)
    fed.begin_round(0)
    held = updates_of(fed)
    (mean,) = fed.mean(held, weights="examples")
    assert mean is not None
    assert mean.weight == pytest.approx(sum(client.samples for client in SCENE.clients), rel=1e-6)


def test_several_means_of_one_round_are_over_one_set_and_a_server_that_lies_gets_no_other() -> None:
    _, fed = remote(SCENE, helped())
    fed._sums._check_groups = lambda call, groups: None  # type: ignore[attr-defined]
    fed.begin_round(0)
    held = updates_of(fed)
    (first,) = fed.mean(held)
    (again,) = fed.mean(held)
    assert first is not None
    assert again is not None
    assert first.count == again.count == 8
    before = len(fed.refusals)
    with pytest.raises(KeyHolderLost):
        fed.mean(held, on=list(range(7)))
    assert {code for _, stage, code in fed.refusals[before:] if stage == "sum Close"} == {"second-sum"}


def test_successive_cohorts_change_by_the_minimum_at_least() -> None:
    _, fed = remote(SCENE, helped(cohort_change="min_cohort"))
    for number, clients, fine in ((0, range(8), True), (1, range(7), False), (2, range(5), True)):
        fed.begin_round(number)
        held = updates_of(fed)
        if fine:
            fed.mean(held, on=list(clients))
        else:
            with pytest.raises(KeyHolderLost):
                fed.mean(held, on=list(clients))
    assert {code for _, stage, code in fed.refusals if stage == "sum Close"} == {"cohort-change"}


def test_an_upload_that_was_changed_on_the_way_is_left_out_by_name() -> None:
    transport, fed = remote(SCENE, helped())

    def change(client: int, stage: str, data: bytes) -> bytes:
        if client != 3 or stage != "sum":
            return data
        answer = m.decode_answer(data)
        assert isinstance(answer, m.Stepped)
        upload = codec.decode(answer.message, steps.MaskedUpload, 1 << 20)
        spoilt = msgspec.structs.replace(upload, vector=bytes(len(upload.vector)))
        return m.encode(m.Stepped(steps.encode(spoilt)))

    transport.tamper = change
    fed.begin_round(0)
    (mean,) = fed.mean(updates_of(fed))
    assert mean is not None
    assert mean.contributors == (0, 1, 2, 4, 5, 6, 7)
    assert (3, "sum", "bad-signature") in fed.refusals


def test_groups_of_one_round_have_slots_of_their_own_and_small_ones_get_no_sum() -> None:
    _, fed = remote(SCENE, helped())
    fed.begin_round(0)
    held = updates_of(fed)
    means = fed.mean(held, groups=dict(zip(range(8), (0, 0, 0, 1, 1, 1, 2, 2), strict=True)), k=3)
    assert [mean if mean is None else mean.count for mean in means] == [3, 3, None]
    slots = {tuple(message.context["slot"]) for message in fed.transcript.messages if message.kind == "helped Invite"}
    assert len(slots) == 2
    fed.begin_round(1)
    held = updates_of(fed)
    with pytest.raises(TooFewClients):
        fed.mean(held, on=[0, 1])


def test_parties_over_folders_go_on_after_every_message(tmp_path: Any) -> None:
    """Each message finds a new client or helper, which has its folder alone."""

    def stores(place: int) -> Store:
        return DiskStore(tmp_path / str(place))

    transport = Loopback(SCENE, helped(), stores)
    assert isinstance(transport.stores[HOLDER], DiskStore)
    fed = FederationServer(OverBytes(transport), protection=transport.protection, roster=transport.roster, entropy=ENTROPY)
    fed.enrol()
    for number in range(2):
        fed.begin_round(number)
        (mean,) = fed.mean(updates_of(fed))
        assert mean is not None
        assert mean.count == 8


def test_settings_that_do_not_fit() -> None:
    for changes, words in (
        ({"secagg_mode": "passive"}, "helpers do not trust the server"),
        ({"gram": ("ckks",)}, "helpers of sums or holders"),
        ({"helpers": 3, "helpers_colluding": 3}, "fewer that may collude"),
        ({"helpers": 16, "helpers_colluding": 7}, "at most 256"),
        ({"min_cohort": 1}, "a sum over one client"),
        ({"sum": "one_message-oblivious", "robust": "trimmed_mean"}, "the server must see buckets' means"),
    ):
        with pytest.raises(InputError, match=words):
            helped(**changes)
    assert Protection(helpers=5).idle == ("helpers",)
    assert (helped().holders, helped().fewest_holders) == (4, 3)


# --- blocks of the clients' own choice


HIDDEN = {"sum": "one_message-oblivious", "min_cohort": 3}


def hidden(*silent: int, **more: Any) -> FederationServer:
    """A federation of eight clients, half of which choose each block; the `silent` ones drop out as they are to upload."""
    protection = helped(**HIDDEN | {"secagg_clip": 200.0} | more)
    fed = federation(SCENE, protection, dropouts=[(0, client, "Masked") for client in silent])
    fed.begin_round(0)
    return fed


def kinds(fed: FederationServer, kind: str) -> list[Any]:
    return [message for message in fed.transcript.messages if message.kind == kind]


@pytest.mark.parametrize("bits", [16, 32])
def test_clients_choose_their_blocks_and_the_means_are_those_of_the_members(bits: Any) -> None:
    plain, fed = federation(SCENE), hidden(secagg_bits=bits)
    plain.begin_round(0)
    held = plain.compute(Make())
    expected = plain.mean(held["vector"], groups=held["choice"], k=2)
    made = fed.compute(Make())
    for mean, other in zip(fed.mean(made["vector"], groups=made["choice"], k=2), expected, strict=True):
        assert mean is not None
        assert other is not None
        assert mean.count == other.count == 4
        step = 200.0 / ((2 ** (bits - 1) - 1) // 8)
        np.testing.assert_allclose(mean.parts["vector"].value(), other.parts["vector"].value(), rtol=0, atol=2 * step)
        assert mean.contributors == tuple(range(8))  # the server knows no more
    assert len(kinds(fed, "helped Upload")) == 1
    assert len(kinds(fed, "helped Open")) == 2 * 4  # to each helper, of the counts and of the blocks
    assert not kinds(fed, "choice")


def test_of_a_small_block_helpers_open_the_count_only() -> None:
    """Of eight clients four are even; two of these drop out."""
    fed = hidden(0, 2)
    made = fed.compute(Make())
    even, odd = fed.mean(made["vector"], groups=made["choice"], k=2)
    assert even is None
    assert odd is not None
    assert odd.count == 4
    invite = kinds(fed, "helped Invite")[0].payload["bytes"]
    terms = steps.decode_invite(np.asarray(invite[0]).tobytes()).terms
    lengths = set()
    for message in kinds(fed, "helped Open answer"):
        answer = steps.decode_from_helper(np.asarray(message.payload["bytes"]).tobytes(), terms)
        assert isinstance(answer, steps.OpenedMasks)
        lengths |= {len(mask) for mask in answer.masks}
    assert lengths == {4 * 2, 4 * (terms.dimension + 1)}


def test_with_no_large_block_there_is_no_mean_and_the_values_are_spent() -> None:
    fed = hidden(0, 1, 2, 3)
    made = fed.compute(Make())
    with pytest.raises(TooFewClients):
        fed.mean(made["vector"], groups=made["choice"], k=2)
    assert sums_of(fed)._sums.unopened == {1}


# --- noise of the helpers


def test_clients_upload_nothing_under_terms_with_other_noise_than_their_ledger_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    privacy = Privacy(unit="client", epsilon=8.0, delta=1e-2)
    for steps_of, fine in (({32: 1024}, True), ({32: 1016}, False), ({32: 0}, False)):
        ledger = Ledger(privacy.budget)
        clipped, _ = client_noise(privacy, Releases(trainings=2), helped(), ledger, ENTROPY)
        transport = Loopback(SCENE, helped())
        transport.privacy = privacy
        fed = FederationServer(
            OverBytes(transport), protection=transport.protection, roster=transport.roster, entropy=ENTROPY, clipped=clipped
        )
        fed.enrol()
        fed.begin_round(0)
        held = updates_of(fed)
        monkeypatch.setattr(helped_sums, "HELPER_STEPS", steps_of)
        if fine:
            (mean,) = fed.mean(held)
            assert mean is not None
            assert not fed.refusals
        else:
            with pytest.raises(TooFewClients):
                fed.mean(held)
            assert {code for _, _, code in fed.refusals} == {"forbidden"}
