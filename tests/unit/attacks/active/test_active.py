"""Active attacks: what honest clients answer to each, and that each shows a figure where a client's check is taken away."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkout import ROOT
from command_line import in_process
from scenes import population
from small_runs import configured

from cflpriv.aggregation import buckets, transformed
from cflpriv.aggregation import secagg as sums
from cflpriv.attacks.active import ACTIVE_ATTACKS, audit, second_sum
from cflpriv.attacks.active.audit import active_audit, run_all, table, written
from cflpriv.attacks.active.outcome import ActiveGuess, ActiveResult
from cflpriv.attacks.active.scene import scene_of
from cflpriv.engine import fast, layers, native
from cflpriv.errors import InputError
from cflpriv.experiments import Config
from cflpriv.federation import messages as m
from cflpriv.federation import registry, release_policy, values, work
from cflpriv.federation.client_contract import ClientContract
from cflpriv.federation.client_ledger import ClientLedger
from cflpriv.federation.group_secret import GroupMember
from cflpriv.federation.protections import ClientParts
from cflpriv.federation.store import ObjectStore
from cflpriv.federation.task_encoding import UnknownTask, task_from_bytes
from cflpriv.federation.transforms import clustering_name
from cflpriv.federation.work import Work
from cflpriv.protocols import ckks, secagg
from cflpriv.protocols.errors import RemoteError
from cflpriv.protocols.group import member as group_member
from cflpriv.protocols.one_message import Helper, helper, server
from cflpriv.protocols.one_message import messages as helped_messages
from cflpriv.protocols.one_message.terms import held
from cflpriv.protocols.secagg import ClientStage, SumRecord, complaints
from cflpriv.protocols.secagg import bindings as secagg_bindings
from cflpriv.protocols.secagg import client as secagg_client
from cflpriv.protocols.secagg.messages import Survivors, Unmask, decode_server
from cflpriv.protocols.secagg.policy import check_proposal
from cflpriv.protocols.shared_gram import depositing
from cflpriv.protocols.shared_gram import terms as shared_terms

SCENE = population(groups=1, clients_per_group=8)
LARGER = population(groups=1, clients_per_group=11)
PRIVATE = {"unit": "sample", "epsilon": 4.0, "delta": 1e-2, "samples": 20}
SHARED_NOISE = {**PRIVATE, "noise": "shared"}
CLIENT = {"unit": "client", "epsilon": 8.0, "delta": 1e-2}
Hole = Callable[[pytest.MonkeyPatch], None]


BASE: dict[str, dict[str, Any]] = {
    "data": {"clients": 8}, "model": {"name": "linear"}, "training": {"rounds": 1, "weights": "equal", "lr": 0.1},
}  # fmt: skip


def attacked_config(protection: dict[str, Any], privacy: dict[str, Any] | None = None, name: str = "fedavg", **changes: Any) -> Config:
    return configured(BASE, name, protection=protection, privacy=privacy or {}, **changes)


ACTIVE = attacked_config({"sum": "secagg"})
PASSIVE = attacked_config({"sum": "secagg", "secagg_mode": "passive"})
HAAR = attacked_config({"gram": ["haar"], "sum": "haar"}, name="pacfl")
HAAR_SECURE = attacked_config({"gram": ["haar"], "sum": "secagg"}, name="cfl")
CKKS = attacked_config({"gram": ["ckks"]}, name="pacfl")
SHARED = attacked_config({"gram": ["shares"]}, name="pacfl")
SHARED_FIVE = attacked_config({"gram": ["shares"], "share_holders": 5, "share_colluding": 2}, name="pacfl")
ROBUST = attacked_config({"sum": "secagg", "min_cohort": 3, "robust": "geometric_median"}, data={"clients": 11})

WEIGHTED = attacked_config({"sum": "secagg", "max_weight": 100.0})
UNEVEN = replace(
    SCENE, clients=(SCENE.clients[0], *(replace(one, x_train=one.x_train[:2], y_train=one.y_train[:2]) for one in SCENE.clients[1:]))
)  # fmt: skip
"""The victim has many more samples than the others."""

REFUSED = {
    "second_sum": ("second-sum", "secagg Adverts"), "computed_again": ("second-sum", "secagg Adverts"),
    "derived_copy": ("forbidden", "secagg Adverts"), "stale_slot": ("old-slot", "secagg Invite"),
    "smaller_minimum": ("minimum-too-low", "secagg Invite"), "sybils": ("bad-signature", "secagg Adverts"),
    "other_model": ("unlisted-model", "secagg Invite"), "listed_model": ("forbidden", "secagg Invite"),
    "other_task": ("unlisted-model", "secagg Invite"), "switched_value": ("unlisted-model", "secagg Deliver"),
    "unequal_weights": ("bad-terms", "secagg Invite"), "other_clip": ("second-sum", "secagg Invite"),
    "split_survivors": ("too-few-clients", "secagg Unmask"),
    "few_survivors": ("too-few-clients", "secagg Survivors"), "second_unmasking": ("old-slot", "secagg Survivors"),
    "mode_downgrade": ("wrong-context", "secagg Invite"), "false_complaints": ("too-many-complaints", "secagg Challenge"),
    "false_accusation": ("old-slot", "secagg Survivors"),
    "relay_to_accomplice": ("forbidden", "seal"), "next_round": ("second-sum", "secagg Invite"),
    "private_choice": ("unlisted-model", "secagg Invite"), "own_block": ("too-unequal", "secagg Invite"),
    "new_session": ("second-sum", "secagg Invite"),
    "other_operation": ("forbidden", "gather"), "dressed_task": ("unknown-task", "compute"),
}  # fmt: skip
"""What clients in active mode refuse: the error code, and the stage."""
BEYOND = ("accomplices", "choices_as_probes", "undeclared_scores")
"""What a server that lies learns of clients without a session contract, or with accomplices."""


def only(made: Config, *names: str) -> list[ActiveResult]:
    return active_audit(made, attacks=names, population=SCENE if made.protection.robust == "none" else LARGER, contracted=False)


@pytest.mark.parametrize("transport", ["memory", "bytes"])
def test_under_the_session_contract_nothing_is_learned_that_no_accomplice_has(transport: str) -> None:
    """As clients of a deployment are: of all deviations only that of clients that collude below the threshold shows a value."""
    rows = {row.attack: row for row in active_audit(ACTIVE.with_("run", transport=transport), population=SCENE)}
    assert {name for name, row in rows.items() if row.status == "learned"} == {"accomplices"}
    assert not [row.result() for row in rows.values() if row.status == "failed"]
    undeclared = {"next_round", "stale_slot", "other_task", "private_choice", "own_block", "undeclared_scores", "choices_as_probes"}
    assert {name for name, row in rows.items() if row.code == "not-agreed"} >= undeclared
    assert (rows["new_session"].status, rows["new_session"].code) == ("refused", "contract-used")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memory", "bytes"])
def test_the_catalogue_in_active_mode(transport: str) -> None:
    rows = {row.attack: row for row in active_audit(ACTIVE.with_("run", transport=transport), population=SCENE, contracted=False)}
    assert list(rows) == list(ACTIVE_ATTACKS)
    assert {name: (row.code, row.stage) for name, row in rows.items() if row.status == "refused"} == REFUSED
    for name in BEYOND:
        row = rows[name]
        assert row.status == "learned", row.result()
        assert row.value is not None
        assert row.baseline is not None
        assert row.value < 0.2 * row.baseline or not row.lower_is_better
        assert not row.claimed
    assert (rows["overflow_oracle"].status, rows["overflow_oracle"].value) == ("no_gain", 0.0)
    rest = set(rows) - set(REFUSED) - set(BEYOND) - {"overflow_oracle"}
    assert {rows[name].status for name in rest} == {"not_applicable"}
    assert all(rows[name].note for name in rest)


def test_the_catalogue_in_passive_mode_says_that_it_is_outside_the_guarantee() -> None:
    rows = {row.attack: row for row in only(PASSIVE, "sybils", "split_survivors", "derived_copy", "second_unmasking")}
    for name in ("sybils", "split_survivors"):
        assert rows[name].status == "learned", rows[name].result()
        assert rows[name].value == pytest.approx(0.0, abs=1e-5)
        assert not rows[name].claimed
        assert "outside the guarantee" in rows[name].result()
    codes = {name: (rows[name].status, rows[name].code) for name in ("second_unmasking", "derived_copy")}
    assert codes == {"second_unmasking": ("refused", "old-slot"), "derived_copy": ("refused", "second-sum")}


@pytest.mark.parametrize("transport", ["memory", "bytes"])
@pytest.mark.parametrize("contracted", [True, False])
def test_a_server_with_as_many_helpers_as_may_collude_learns_nothing(transport: str, contracted: bool) -> None:
    names = {
        "split_view": ("too-few-signatures", "sum Open"), "second_set": ("second-set", "sum Close"),
        "second_helped_sum": ("second-sum", "sum Close"), "copied_box": ("bad-box", "sum Delivery"),
        "other_seed": ("other-seed", "sum Delivery"), "lying_helper": ("masks-differ", "sum Open"),
        "late_upload": ("second-set", "sum Close"), "swapped_helper": ("bad-signature", "sum"),
        "rolled_back_helper": ("too-few-signatures", "sum Open"),
    }  # fmt: skip
    rows = active_audit(HELPED.with_("run", transport=transport), attacks=list(names), population=SCENE, contracted=contracted)
    assert {row.attack: (row.code, row.stage) for row in rows} == names
    assert {row.status for row in rows} == {"refused"}
    assert all(row.claimed for row in rows)


@pytest.mark.slow
def test_the_catalogue_under_sums_in_one_message() -> None:
    """As in active mode: what is learned is outside the guarantee, and nothing fails."""
    rows = {row.attack: row for row in active_audit(HELPED, population=SCENE, contracted=False)}
    assert {name for name, row in rows.items() if row.status == "learned"} == set(BEYOND)
    assert not [row.result() for row in rows.values() if row.status == "failed"]
    assert not any(row.claimed for row in rows.values() if row.status == "learned")
    assert rows["sybils"].code == "bad-signature"


@pytest.mark.parametrize("made", [ACTIVE, PASSIVE, HAAR, ROBUST, attacked_config({"sum": "secagg"}, CLIENT)])
def test_whether_a_training_fails_tells_nothing_of_a_sample(made: Config) -> None:
    (row,) = only(made, "overflow_oracle")
    assert (row.status, row.value, row.refusals) == ("no_gain", 0.0, "")


def test_no_parameters_give_a_sample_more_of_a_clipped_sum() -> None:
    (row,) = only(attacked_config({}, PRIVATE), "cancelling_parameters")
    assert (row.status, row.claimed) == ("no_gain", True), row.result()
    assert row.value == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_under_weights_by_sample_counts_no_client_is_nearly_all_of_a_sum(mode: str) -> None:
    made = attacked_config({"sum": "secagg", "secagg_mode": mode, "max_weight": 100.0})
    rows = {
        row.attack: row
        for row in active_audit(made, attacks=["unequal_weights", "other_weight", "other_clip"], population=UNEVEN, contracted=False)
    }
    codes = {name: (row.status, row.code) for name, row in rows.items()}
    assert codes == {
        "unequal_weights": ("refused", "too-unequal"), "other_weight": ("refused", "second-sum"), "other_clip": ("refused", "second-sum"),
    }  # fmt: skip


@pytest.mark.slow
def test_the_catalogue_under_a_shared_transform() -> None:
    rows = {row.attack: row for row in active_audit(HAAR, population=SCENE, contracted=False)}
    refused = {name: row.code for name, row in rows.items() if row.status == "refused"}
    assert refused == {
        "other_operation": "forbidden", "other_operation_compared": "forbidden", "dressed_task": "unknown-task",
        "repeated_epoch": "used-transform", "sybil_group": "bad-signature",
    }  # fmt: skip
    assert (rows["chosen_rows"].status, rows["chosen_rows"].value) == ("learned", 7.0), "one coordinate for each other client"
    assert not rows["chosen_rows"].claimed
    (row,) = only(HAAR_SECURE, "opened_by_another")
    assert (row.status, row.code, row.stage) == ("refused", "forbidden", "compute")


@pytest.mark.slow
def test_the_catalogue_under_robust_means() -> None:
    """Each attack is aimed at the sum of the victim's bucket; what another round asks for is refused because it was not dealt."""
    rows = {row.attack: row for row in active_audit(ROBUST, population=LARGER, contracted=False)}
    dealt = {
        "outside_bucket": ("wrong-bucket", "secagg Deliver"), "short_list": ("bad-dealing", "deal open"),
        "late_nonces": ("bad-dealing", "deal"), "next_round": ("second-sum", "secagg Invite"),
        "stale_slot": ("wrong-bucket", "secagg Deliver"),
    }  # fmt: skip
    refused = {name: (row.code, row.stage) for name, row in rows.items() if row.status == "refused"}
    assert {name: refused.get(name) for name in dealt} == dealt
    assert set(refused) == {*REFUSED, *dealt}
    assert {row.status for name, row in rows.items() if name not in refused} <= {"not_applicable", "learned", "no_gain"}
    assert not any(row.claimed for row in rows.values() if row.status == "learned")


@pytest.mark.slow
def test_the_catalogue_under_encryption() -> None:
    names = ("swapped_holder", "repeated_step", "other_function", "other_operation_compared")
    rows = {row.attack: row for row in only(CKKS, *names)}
    assert (rows["swapped_holder"].status, rows["swapped_holder"].code) == ("refused", "bad-signature")
    assert (rows["repeated_step"].status, rows["repeated_step"].code) == ("refused", "replay")
    assert rows["other_operation_compared"].status == "refused"
    found = rows["other_function"]
    assert found.status == "learned", "as its Reveals says: a threshold of the server's choice, so many times"
    assert found.note == "8 thresholds in one epoch"
    assert found.value is not None
    assert found.value <= 90.0 / 2**8, "each halves the interval"


@pytest.mark.parametrize(("made", "coalitions"), [(SHARED, 3), pytest.param(SHARED_FIVE, 10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", ["memory", "bytes"])
def test_no_holder_of_shares_and_no_coalition_up_to_the_threshold_reads_a_vector(made: Config, coalitions: int, transport: str) -> None:
    """Every party attacks: the server alone, every holder, the first among them, and every coalition, always with the server."""
    rows = {row.attack: row for row in only(made.with_("run", transport=transport), "holder_coalitions", "swapped_shares")}
    found = rows["holder_coalitions"]
    assert (found.status, found.code, found.stage) == ("refused", "bad-contributors", "shares contributions")
    assert "other-keys" in found.refusals, "a key of the coalition's in place of an honest holder's"
    assert f"{coalitions} coalitions" in found.note
    assert found.value is not None
    assert found.value > 1, "worse than guessing nothing: what a coalition has is uniform"
    assert (rows["swapped_shares"].status, rows["swapped_shares"].code) == ("refused", "bad-signature")
    assert all(row.claimed for row in rows.values())


def test_the_catalogue_under_shares() -> None:
    rows = {row.attack: row for row in only(SHARED, "swapped_holder", "repeated_step", "other_function", "other_operation_compared")}
    assert {rows[name].status for name in ("swapped_holder", "repeated_step")} == {"not_applicable"}
    assert rows["other_operation_compared"].status == "refused"
    assert rows["other_function"].status == "learned"
    assert rows["other_function"].note == "8 thresholds in one epoch"


@pytest.mark.parametrize("made", [SHARED, attacked_config({"gram": ["shares"], "share_bound": 1.0, "share_holders": 5}, name="pacfl")])
def test_an_accomplice_and_the_first_holder_read_coordinates_in_every_epoch(made: Config) -> None:
    """As Reveals says: all that were asked for, to a hundredth of the largest."""
    (row,) = only(made, "chosen_deposits")
    assert (row.status, row.claimed, row.accomplices) == ("learned", False, 2)
    assert row.value is not None
    assert f"{row.value:g} of" in row.note


def test_no_more_coordinates_are_read_than_in_the_epochs_that_a_client_allows() -> None:
    (row,) = only(attacked_config({"gram": ["shares"], "most_epochs": 1}, name="pacfl"), "chosen_deposits")
    assert "in 1 epochs" in row.note
    assert row.refusals == "too-many-epochs at gram (6 of 6)"


@pytest.mark.slow
@pytest.mark.parametrize("protection", [{}, {"sum": "secagg"}])
def test_a_private_step_asked_for_again_is_counted(protection: dict[str, Any]) -> None:
    (row,) = only(attacked_config(protection, PRIVATE), "repeated_release")
    assert (row.status, row.code) == ("refused", "over-budget")
    assert row.value is not None
    assert 0 < row.value <= PRIVATE["epsilon"]  # type: ignore[operator]


@pytest.mark.slow
def test_a_second_training_that_no_client_can_pay_is_a_refusal() -> None:
    """A private step is paid before it runs, so under a budget for one the second is never computed."""
    (row,) = only(attacked_config({"sum": "secagg"}, PRIVATE), "computed_again")
    assert (row.status, row.code) == ("refused", "over-budget")


@pytest.mark.parametrize("privacy", [CLIENT, pytest.param(SHARED_NOISE, marks=pytest.mark.slow)])
def test_private_clients_refuse_a_derived_copy_and_an_update_for_an_accomplice(privacy: dict[str, Any]) -> None:
    """They decide, not the ledger of the server, which a server that lies need not keep."""
    rows = {
        row.attack: row
        for row in only(attacked_config({"sum": "secagg", "relay_updates": True}, privacy), "relay_to_accomplice", "derived_copy")
    }
    assert {name: (row.status, row.code, row.stage) for name, row in rows.items()} == {
        "relay_to_accomplice": ("refused", "forbidden", "seal"), "derived_copy": ("refused", "forbidden", "secagg Adverts"),
    }  # fmt: skip


def test_a_client_that_forgets_its_unit_seals_an_update_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientLedger, "unit", "none")
    (row,) = only(attacked_config({"sum": "secagg", "relay_updates": True}, CLIENT), "relay_to_accomplice")
    assert row.status == "learned", row.result()
    assert row.value == pytest.approx(0.0, abs=1e-6)


# --- planted holes: a client without the check that the attack is about


def no_check(module: Any, name: str, result: Any = None) -> Hole:
    return lambda patch: patch.setattr(module, name, lambda *given, **named: result)


def accepting(*codes: str) -> Hole:
    """Clients accept proposed terms that they would refuse by one of these codes."""
    honest = check_proposal

    def lenient(*given: Any) -> None:
        try:
            honest(*given)
        except RemoteError as error:
            if error.code not in codes:
                raise

    return lambda patch: patch.setattr(secagg_client, "check_proposal", lenient)


def several(*holes: Hole) -> Hole:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for hole in holes:
            hole(patch)

    return plant


def traced_copies(patch: pytest.MonkeyPatch) -> None:
    """What clients add up is said to be what they were sent."""
    honest = Work.add_up

    def add_up(self: Work, ask: m.AddUp, exchange: Any) -> m.Computed:
        done = honest(self, ask, exchange)
        self._values.hold(ask.held, self._values.parts(ask.held, ("own",)), self._values.origin(ask.addends[0].held))
        return done

    patch.setattr(Work, "add_up", add_up)


def forgotten_slots(patch: pytest.MonkeyPatch) -> None:
    honest = ObjectStore.get
    patch.setattr(ObjectStore, "get", lambda self, name: None if name == "last-slot" else honest(self, name))


def kept_machines(patch: pytest.MonkeyPatch) -> None:
    """Machines of earlier sums stay, and answer."""
    honest = ObjectStore.drop
    patch.setattr(ObjectStore, "drop", lambda self, name: None if name.startswith("sum/") else honest(self, name))


def answering_twice(patch: pytest.MonkeyPatch) -> None:
    """A machine agrees to a second list of survivors, and keeps the shares that it has revealed."""
    honest = secagg.Client.receive

    def receive(self: secagg.Client, data: bytes, *contributions: Any) -> bytes:
        said, before = decode_server(data), self._state
        if isinstance(said, Survivors):
            self._state = msgspec.structs.replace(before, stage=ClientStage.MASKED)
        reply = honest(self, data, *contributions)
        if isinstance(said, Unmask):
            self._state = before
        return reply

    patch.setattr(secagg.Client, "receive", receive)


def any_mode(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sums, "Policy", lambda session, mode, *rest, **named: secagg.Policy(session, "passive", *rest, **named))
    patch.setattr(sums.SecaggClientSum, "_roster", lambda self: None)


def declared_tasks(patch: pytest.MonkeyPatch) -> None:
    """A client runs a task whose parts a server declares."""
    honest = Work.compute

    def compute(self: Work, ask: m.Compute, exchange: Any) -> Any:
        if isinstance(ask.task.task, UnknownTask):
            plain = {name: value for name, value in json.loads(ask.task.task.data).items() if name != "parts"}
            ask = msgspec.structs.replace(ask, task=m.Carried(task_from_bytes(json.dumps(plain, separators=(",", ":")).encode())))
        return (yield from honest(self, ask, exchange))

    patch.setattr(Work, "compute", compute)


def twice_answered(patch: pytest.MonkeyPatch) -> None:
    """A key holder that enrols and answers as often as it is asked."""
    enrol, answer = ckks.KeyHolder.enrol, ckks.KeyHolder.answer

    def enrolling(self: ckks.KeyHolder, data: bytes) -> int:
        before, self.enrolled = self.enrolled, set()
        client = enrol(self, data)
        self.enrolled |= before
        return client

    def answering(self: ckks.KeyHolder, data: bytes) -> Any:
        before, self.blocks = self.blocks, {}
        pairs = answer(self, data)
        self.blocks = before | self.blocks
        return pairs

    patch.setattr(ckks.KeyHolder, "enrol", enrolling)
    patch.setattr(ckks.KeyHolder, "answer", answering)


def unlimited(patch: pytest.MonkeyPatch) -> None:
    """Clients join sums of any number of models."""
    honest = sums.SecaggClientSum._policy

    def lenient(self: sums.SecaggClientSum, ask: m.SumStep) -> secagg.Policy:
        return msgspec.structs.replace(honest(self, msgspec.structs.replace(ask, models=1)), models=ask.models)

    patch.setattr(sums.SecaggClientSum, "_policy", lenient)


def first_value(patch: pytest.MonkeyPatch) -> None:
    """Clients do not look at which value a later stage is about."""
    honest, kept = sums.SecaggClientSum._policy, dict[Any, secagg.Policy]()

    def lenient(self: sums.SecaggClientSum, ask: m.SumStep) -> secagg.Policy:
        return kept.setdefault((self._parts.client, ask.slot), honest(self, ask))

    patch.setattr(sums.SecaggClientSum, "_policy", lenient)


def opening_anything(patch: pytest.MonkeyPatch) -> None:
    """A client opens for the server also what others hid for comparison."""
    honest = GroupMember.transforms

    def transforms(self: GroupMember) -> Any:
        def one(name: str, dimension: int, kind: str | None = None) -> Any:
            named = clustering_name(name)
            return honest(self)(name, dimension, kind) if named is None else self.compared(named, dimension, "haar")

        return one

    patch.setattr(values, "OPENED", ("",))
    patch.setattr(GroupMember, "transforms", transforms)


def relaying(patch: pytest.MonkeyPatch) -> None:
    """Clients whose release policy does not know that recipients may be accomplices."""
    honest = release_policy.may_leave
    patch.setattr(
        release_policy, "may_leave", lambda protection, operation, *rest: operation == "relay" or honest(protection, operation, *rest)
    )


def short_lists(patch: pytest.MonkeyPatch) -> None:
    """Clients that open their nonce for any list."""

    def opening(self: buckets.Dealings, ask: m.Deal, last: buckets.Dealt) -> m.Stepped:
        self._put(last, digest=buckets._digest(ask))
        return m.Stepped(last.nonce)

    patch.setattr(buckets.Dealings, "_open", opening)


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """Helpers without a record of what they signed."""
    honest = Helper._close

    def close(self: Helper, terms: Any, members: Any) -> Any:
        for name in [name for name in self._store if name.startswith(("closed/", "summed/"))]:
            del self._store[name]
        return honest(self, terms, members)

    patch.setattr(Helper, "_close", close)


def bound_to_nobody(patch: pytest.MonkeyPatch) -> None:
    """Boxes, hashes of seeds and masks that are bound to no client."""
    for name in ("box_info", "commitment", "mask_key"):
        honest = getattr(helped_messages, name)
        patch.setattr(helped_messages, name, lambda agreed, client, *rest, honest=honest: honest(agreed, 0, *rest))


def asking_one(patch: pytest.MonkeyPatch) -> None:
    """A server that asks the last helper who knows a seed, and no other."""

    def plan(terms: Any, helpers: Any, seeds: Any) -> Any:
        return [((seed,), (max(number for number in helpers if seed in held(terms, number)),)) for seed in seeds]

    patch.setattr(server, "plan", plan)


def models_listed(patch: pytest.MonkeyPatch) -> None:
    """Clients whose settings allow many models in a sum, as algorithms with blocks need."""
    patch.setattr(ClientContract, "sum_limits", lambda self: (8, (1e-6, 1e6)))


def rounding_by_place(patch: pytest.MonkeyPatch) -> None:
    """Products whose last digits depend on a sample's place, as those of some kernels do at odd widths, and no trial that finds them."""

    def product(x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        made = torch.baddbmm(parameters[1].unsqueeze(1), x, parameters[0])
        return made * (1 + 1e-7 * torch.sin(7.0 * torch.arange(x.shape[1]).view(1, -1, 1) + 3.0 * torch.arange(made.shape[2])))

    patch.setattr(layers, "_even", product)
    patch.setattr(native, "library", lambda: None)  # which computes one sample at a time
    patch.setattr(fast, "steady", lambda *more: True)


summed_twice = several(*(no_check(SumRecord, name) for name in ("check_proposed", "check_survivors", "enter")))
nothing: Hole = lambda patch: None  # noqa: E731
PASSIVE_OF_SEVEN = attacked_config({"sum": "secagg", "secagg_mode": "passive", "min_cohort": 7})
HELPED = attacked_config({"sum": "one_message"})
two_suffice: Hole = lambda patch: patch.setattr(helper, "quorum", lambda helpers, colluding: 2)  # noqa: E731
HOLES: dict[str, tuple[Config, Hole]] = {
    "second_sum": (ACTIVE, summed_twice),
    "computed_again": (ACTIVE, summed_twice),
    "next_round": (ACTIVE, summed_twice),
    "accomplices": (ACTIVE, nothing),
    "relay_to_accomplice": (ACTIVE, relaying),
    "choices_as_probes": (ACTIVE, nothing),
    "derived_copy": (ACTIVE, several(summed_twice, traced_copies)),
    "stale_slot": (ACTIVE, several(forgotten_slots, summed_twice)),
    "smaller_minimum": (ACTIVE, accepting("minimum-too-low")),
    "sybils": (ACTIVE, several(no_check(secagg_bindings, "verify"), no_check(secagg_client, "verify"))),
    "sybil_group": (HAAR, several(no_check(group_member, "verify"), no_check(group_member, "_check_signatures"))),
    "other_model": (ACTIVE, accepting("unlisted-model")),
    "listed_model": (ACTIVE, unlimited),
    "other_task": (ACTIVE, accepting("unlisted-model")),
    "switched_value": (ACTIVE, first_value),
    "unequal_weights": (WEIGHTED, accepting("too-unequal")),
    "other_weight": (WEIGHTED, summed_twice),
    "other_clip": (ACTIVE, summed_twice),
    "private_choice": (ACTIVE, lambda patch: patch.setattr(work, "chosen_name", lambda digest, offered: digest)),
    "own_block": (ACTIVE, several(accepting("too-unequal"), models_listed)),
    "new_session": (ACTIVE, lambda patch: patch.setattr(registry, "SUMMED", "nothing is kept")),
    "undeclared_scores": (ACTIVE, nothing),
    "outside_bucket": (ROBUST, no_check(buckets.Dealings, "check")),
    "short_list": (ROBUST, short_lists),
    "late_nonces": (ROBUST, no_check(buckets, "_digest", b"any list")),
    "split_survivors": (PASSIVE, nothing),
    "few_survivors": (PASSIVE_OF_SEVEN, no_check(secagg_client, "enough")),
    "second_unmasking": (ACTIVE, several(summed_twice, kept_machines, answering_twice)),
    "mode_downgrade": (ACTIVE, any_mode),
    "false_complaints": (ACTIVE, no_check(complaints, "most_openings", 99)),
    "false_accusation": (ACTIVE, several(summed_twice, kept_machines)),
    "other_operation": (ACTIVE, no_check(release_policy, "check")),
    "other_operation_compared": (HAAR, no_check(release_policy, "check")),
    "dressed_task": (ACTIVE, several(no_check(release_policy, "check"), declared_tasks)),
    "repeated_epoch": (HAAR, no_check(transformed, "take")),
    "opened_by_another": (HAAR_SECURE, opening_anything),
    "chosen_rows": (HAAR, nothing),
    "swapped_holder": (CKKS, lambda patch: patch.setattr(ckks.client, "verify_key", lambda *given: None)),
    "other_function": (CKKS, nothing),
    "repeated_step": (CKKS, twice_answered),
    "holder_coalitions": (SHARED, no_check(depositing, "uniform", np.uint64(0))),
    "swapped_shares": (SHARED, no_check(shared_terms, "verify_key")),
    "chosen_deposits": (SHARED, nothing),
    "overflow_oracle": (ACTIVE, lambda patch: patch.setattr(ClientParts, "alike", False)),
    "split_view": (HELPED, two_suffice),
    "rolled_back_helper": (HELPED, two_suffice),
    "second_set": (HELPED, forgetful),
    "late_upload": (HELPED, forgetful),
    "second_helped_sum": (HELPED, forgetful),
    "copied_box": (HELPED, bound_to_nobody),
    "other_seed": (HELPED, no_check(helped_messages, "commitment", bytes(32))),
    "lying_helper": (HELPED, asking_one),
    "swapped_helper": (HELPED, no_check(helped_messages, "verify_key")),
    "repeated_release": (attacked_config({}, PRIVATE), several(no_check(ClientLedger, "begin"), no_check(ClientLedger, "settle"))),
    "cancelling_parameters": (attacked_config({}, PRIVATE), rounding_by_place),
}
"""By attack: a configuration, and clients without the check. `nothing`: there is no such check, or the configuration is without it."""


def test_every_attack_has_its_hole() -> None:
    assert set(HOLES) == set(ACTIVE_ATTACKS)


@pytest.mark.parametrize("name", HOLES)
def test_without_the_check_the_attack_shows_the_leak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plant = HOLES[name]
    plant(monkeypatch)
    (row,) = active_audit(made, attacks=[name], population=UNEVEN, contracted=False) if made is WEIGHTED else only(made, name)
    assert row.status == "learned", row.result()
    assert row.value is not None
    assert row.baseline is not None
    if row.metric.endswith("_relative_error"):
        assert row.value < 0.02, row.result()


# --- the harness itself


def test_an_unknown_or_inapplicable_attack_is_reported() -> None:
    with pytest.raises(InputError, match="--attacks none: is not known; known are second_sum"):
        only(ACTIVE, "none")
    with pytest.raises(InputError, match="--attacks: names none"):
        active_audit(ACTIVE, attacks=[], population=SCENE)
    (row,) = only(ACTIVE, "swapped_holder")
    assert row.status == "not_applicable"
    assert "no key holder" in row.note


def test_an_attack_that_cannot_be_run_is_not_called_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: Any) -> Any:
        raise InputError("no model")

    attack = replace(ACTIVE_ATTACKS["second_sum"], deviate=broken)
    row = audit.run_attack("second_sum", attack, scene_of(ACTIVE, SCENE, contracted=False))
    assert (row.status, row.note) == ("failed", "InputError: no model")
    (row,) = active_audit(ACTIVE.with_("protection", min_cohort=8), attacks=["second_sum"], population=SCENE, contracted=False)
    assert row.status == "failed"
    assert "8 clients, and a sum needs 8" in row.note


def test_an_attack_of_which_nothing_comes_is_not_called_safe() -> None:
    attack = replace(ACTIVE_ATTACKS["second_sum"], deviate=lambda run: ActiveGuess(None, "update"))
    row = audit.run_attack("second_sum", attack, scene_of(ACTIVE, SCENE, contracted=False))
    assert (row.status, row.note) == ("failed", "no result, and no refusal")


def test_each_attack_meets_clients_that_were_just_started() -> None:
    scene = scene_of(ACTIVE, SCENE, contracted=False)
    met = [scene.start() for _ in range(2)]
    assert met[0].roster != met[1].roster
    assert run_all(scene, ["smaller_minimum", "smaller_minimum"])[1].code == "minimum-too-low", "nothing is left of the first"


def test_the_guess_is_scored_against_data_that_the_attack_never_saw() -> None:
    """The truth of the scorer is the update that the client really made."""
    from cflpriv.attacks.active.scene import AttackRun

    scene = scene_of(ACTIVE, SCENE, contracted=False)
    run = AttackRun(scene, ACTIVE.protection)
    held = run.compute()
    for friend in run.accomplices:
        np.testing.assert_allclose(run.known(friend, held), scene.truth("update", friend), rtol=1e-5, atol=1e-7)
    assert run.victim not in run.accomplices
    assert 3 * len(run.accomplices) < len(run.clients)
    summed = run.sum(held, run.clients)
    assert summed is not None
    truths = np.sum([scene.truth("update", one) for one in scene.clients], axis=0)
    np.testing.assert_allclose(summed.total, truths, atol=1e-5)
    assert second_sum.second_sum(run).beside == run.honest


def test_rows_name_their_sentence() -> None:
    for name, attack in ACTIVE_ATTACKS.items():
        assert attack.summary, name
        assert ":" in attack.guarantee or "," in attack.guarantee, name


def test_the_result_is_written_beside_its_configuration_alone(tmp_path: Path) -> None:
    rows = only(ACTIVE, "smaller_minimum", "accomplices", "swapped_holder")
    path = written(rows, ACTIVE, tmp_path / "out")
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert [ActiveResult(**one) for one in stored] == rows
    text = table(rows).splitlines()
    assert [line.split()[0] for line in text] == ["accomplices", "smaller_minimum", "swapped_holder"], "the least comforting first"
    assert "refused: minimum-too-low (secagg Invite)" in text[1]
    assert written(rows, ACTIVE, tmp_path / "out") == path
    with pytest.raises(InputError, match="is another experiment"):
        written(rows, PASSIVE, tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="holds something else"):
        written(rows, ACTIVE, tmp_path / "other")


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.toml"
    file.write_text(
        '[data]\nclients = 5\n[model]\nhidden = 4\n[training]\nrounds = 1\nweights = "equal"\n[algorithm]\nname = "fedavg"\n'
        '[protection]\nsum = "secagg"\n',
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    changed = ("--set", "protection.min_cohort=4", "--attacks", "smaller_minimum,other_model")
    assert in_process(monkeypatch, "audit", "--active", str(file), *changed) == 0
    shown = capsys.readouterr().out
    assert "smaller_minimum  refused: minimum-too-low" in shown
    assert "min_cohort = 4" in (tmp_path / "runs" / "small-active" / "config.toml").read_text(encoding="utf-8")
    assert (tmp_path / "runs" / "small-active" / audit.FILE).is_file()
    assert in_process(monkeypatch, "run", str(file), "--out", "run") == 0
    assert in_process(monkeypatch, "audit", "--active", "run", "--attacks", "smaller_minimum,swapped_holder") == 0
    assert in_process(monkeypatch, "report", "run") == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Active attacks" in page
    assert "refused: minimum-too-low (secagg Invite)" in page
    assert in_process(monkeypatch, "audit", "run", "--out", "elsewhere") == 2
    assert in_process(monkeypatch, "audit", "--active", "run", "--adversary", "server") == 2
    (tmp_path / "run" / audit.FILE).write_text('[{"attack": 1}]', encoding="utf-8")
    assert in_process(monkeypatch, "report", "run") == 2
    capsys.readouterr()
    assert in_process(monkeypatch, "list") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ACTIVE_ATTACKS)


def test_the_page_has_a_row_for_every_attack_and_guarantees_name_no_other() -> None:
    page = (ROOT / "docs" / "active_attacks.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(set(named) - {"learned", "failed", "no_gain", "refused", "not_applicable"}) == sorted(ACTIVE_ATTACKS)
    pointers = set()
    for path in (ROOT / "cflpriv" / "aggregation").glob("*.py"):
        for found in re.findall(
            r"Active attacks \(`attacks\.active`\): (.*?)(?=\n *Source|\n *\"\"\")", path.read_text(encoding="utf-8"), re.S
        ):
            pointers |= set(re.findall(r"`(\w+_\w+|\w+s)`", found))
    guarantees = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    pointers |= {name for found in re.findall(r"active attacks? ([^)]*)\)", guarantees) for name in re.findall(r"`(\w+)`", found)}
    assert len(pointers) > 20
    assert pointers <= set(ACTIVE_ATTACKS) | {"ckks"}
