"""What leaves a client: tricks of a server that lies, the rule that stands against them over protections × parts, who pays and what stays.

Each trick got what it was after before there was the rule. Deployed clients get requests as bytes, simulated ones in memory, as typed
messages: they refuse the same, by the same error codes.
"""

import inspect
import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import pytest
from loopback import remote
from scenes import eye, federation, population, sums_of, training

from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.cfl.cfl import Same
from cflpriv.algorithms.cfl.split_test import HasHalves, NeedsNoHalves
from cflpriv.algorithms.ditto import TrainBoth
from cflpriv.algorithms.fedfomo import Ask, Combine
from cflpriv.algorithms.fedgwc import TrainAndTell
from cflpriv.algorithms.fednova import TrainNormalised
from cflpriv.algorithms.fedproto import TrainToPrototypes
from cflpriv.algorithms.fedrc import EvaluateRobust, RobustStep
from cflpriv.algorithms.fedsoft import EvaluateSoft, SoftStep
from cflpriv.algorithms.fesem import Assign, EvaluateAssigned, Remember, TrainAndAssign
from cflpriv.algorithms.lg_fedavg import EvaluateParted, TrainParted
from cflpriv.algorithms.ocfl import Beside, BesideItself
from cflpriv.algorithms.per_fedavg import EvaluateAdapted
from cflpriv.algorithms.pfedlia.influence import HasValidation, Influence, Neighbours, OnPart
from cflpriv.algorithms.scaffold import TrainControlled
from cflpriv.algorithms.shared.around import TrainApart
from cflpriv.algorithms.shared.choosing import EvaluateLowest, PickAndTrain, WithoutWork
from cflpriv.algorithms.stocfl.stocfl import ChainLink, Represent
from cflpriv.contract.handles import Shared
from cflpriv.contract.protection import Protection, listed
from cflpriv.contract.transformed_parts import Transformed
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation import release_policy as releases
from cflpriv.federation.foreign import Foreign
from cflpriv.federation.server import ClientsLost, FederationServer
from cflpriv.federation.task_encoding import known_tasks
from cflpriv.federation.values import Origin, Values, form_of
from cflpriv.protocols.errors import RemoteError, TooFewClients
from cflpriv.protocols.orthonormal import TRANSFORMS
from cflpriv.tasks.advice import HeldOutClasses, HeldOutScores, KeepLocal, KeepProbabilities, KeepTuned, Responsibilities
from cflpriv.tasks.block_choices import ChooseAndMove, ChooseListed
from cflpriv.tasks.change_of_data import ChangeOfData, ComparedAgain, KeepSamples
from cflpriv.tasks.cluster_shares import (
    CellShare,
    CentreShare,
    ChooseCluster,
    MomentShare,
    TrainInBlock,
)  # fmt: skip
from cflpriv.tasks.evaluation import Evaluate, EvaluateOwn, EvaluateUsed, Losses
from cflpriv.tasks.fold_gradients import FoldGradients
from cflpriv.tasks.joining import Join
from cflpriv.tasks.low_rank import LowRankSketch
from cflpriv.tasks.signatures import PrincipalHalves, PrincipalVectors
from cflpriv.tasks.training import Gradient, Start, Train
from cflpriv.tasks.with_update import WithUpdate
from cflpriv.types import PartKind, Population

HAAR, SECAGG = Protection(gram=("haar",)), Protection(sum="secagg", min_cohort=2)
CKKS = Protection(gram=("ckks",))


def ask(fed: FederationServer, number: int, task: Any, which: Any = None, **params: Any) -> m.Compute:
    """A computation as a server that lies would ask for it; parameters are arrays, sums, lists of arrays, or the client's own."""

    def said(value: Any) -> Any:
        if isinstance(value, m.HeldValue):
            return value
        if isinstance(value, list):
            return m.Many(tuple(m.to_addends(np.asarray(one), {}) for one in value))
        return m.to_addends(value, {})

    given = tuple((name, said(value)) for name, value in params.items())
    return m.Compute(fed.session, 0, 1, number, tuple(range(7, 30)), m.Carried(task), given, which)


def give(fed: FederationServer, operation: Any, number: int, part: str, transform: str = "") -> m.Give:
    return m.Give(fed.session, operation, number, (part,), transform, False)


def answer(fed: FederationServer, said: m.PartyRequest, client: int = 0) -> Any:
    """What a client answers, None if it refuses."""
    return fed._ask({client: said}, "asked").get(client)


def values(said: Any) -> Any:
    assert isinstance(said, m.Given), said
    return said.values[0].value


Carrier = Literal["bytes", "memory"]
over_both = pytest.mark.parametrize("carrier", get_args(Carrier))


def begun(protection: Protection, carrier: Carrier = "bytes", **scene: Any) -> tuple[Population, Any, FederationServer]:
    """A scene, its clients (a `Loopback`, or the `Simulated` that holds them in memory), and a server in its first round."""
    if "ckks" in protection.gram:
        pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    made = population(**({"clients_per_group": 3} | scene))
    clients: Any
    if carrier == "bytes":
        clients, fed = remote(made, protection)
    else:
        fed = federation(made, protection, seed=1, release_policy="strict", on_error="refuse")
        clients = eye(fed)
    fed.begin_round(0)
    return made, clients, fed


# --- what is compared


@over_both
@pytest.mark.parametrize(
    "trick", ["as it is", "a copy", "added up", "which coordinates are large", "trained towards it", "remembered", "inside another task"]
)
@pytest.mark.parametrize("protection", [HAAR, CKKS, Protection(gram=("ckks",), sum="haar"), Protection(gram=("haar",), sum="secagg")],
                         ids=lambda protection: protection.name)  # fmt: skip
def test_no_dressing_up_shows_a_signature_that_is_hidden(protection: Protection, trick: str, carrier: Carrier) -> None:
    scene, _, fed = begun(protection, carrier)
    model = training(scene).model
    number, part, mine = 8, "update", m.HeldValue(7, "signature")
    assert isinstance(answer(fed, ask(fed, 7, PrincipalVectors(1))), m.Computed)
    if trick == "as it is":
        number, part = 7, "signature"
    elif trick == "a copy":
        answer(fed, ask(fed, 8, Same(), update=mine))
    elif trick == "added up":
        answer(fed, m.AddUp(fed.session, 8, (m.OwnPart(7, "signature", 1.0),)))
        part = "own"
    elif trick == "which coordinates are large":
        answer(fed, ask(fed, 6, Same(), update=np.eye(8)))
        answer(fed, ask(fed, 8, Neighbours(tuple(range(1, 2)), "value"), scores=mine))
        part = "neighbours"
    elif trick == "trained towards it":
        answer(fed, ask(fed, 6, Represent(Gradient(model)), model=model.init(0)))
        near = Train(model, lr=1.0, prox=1.0, batch_size=0)
        answer(fed, ask(fed, 8, near, model=np.zeros(model.dimension), anchor=m.HeldValue(6, "representation")))
    elif trick == "inside another task":
        pick = PickAndTrain(Losses(model), PrincipalVectors(1), "signature")
        answer(fed, ask(fed, 8, pick, model=[model.init(0)]))
        part = "step"
    elif trick == "remembered":
        for number in (7, 8):
            answer(fed, ask(fed, number, Represent(Gradient(model), remember=True), model=model.init(0)))
        part = "representation"
    before = len(fed.refusals)
    for operation in ("gather", "sum", "gram"):
        assert answer(fed, give(fed, operation, number, part)) is None, operation
    for ask_ in (give(fed, "sum", number, part, "sum/9/9/9"), m.Seal(fed.session, number, (part,), 20, (fed._registry.peers[1],))):
        assert answer(fed, ask_) is None
    assert {word for _, _, word in fed.refusals[before:]} <= {"forbidden", "not-held"}


@over_both
def test_a_client_opens_for_the_server_nothing_that_another_hid_for_comparison(carrier: Carrier) -> None:
    """The transform is common to all: a member that opened whatever it was sent would open another's signature."""
    _, _, fed = begun(HAAR, carrier)
    answer(fed, ask(fed, 7, PrincipalVectors(1)), 1)
    hidden = np.ravel(values(answer(fed, give(fed, "gram", 7, "signature", "gram/0"), 1)))
    sent = Shared(transformed=(Transformed("gram/0", hidden, 0, len(hidden), (len(hidden),), len(hidden)),))
    assert answer(fed, ask(fed, 7, Same(), update=sent)) is None
    assert fed.refusals[-1] == (0, "asked", "forbidden")


@over_both
@pytest.mark.parametrize("again", ["gram/00", "gram/٠", "0", "gram/0"])
def test_a_transform_changes_one_value_of_a_client_however_it_is_spelt(again: str, carrier: Carrier) -> None:
    """A server that had its own vectors changed by the same transform would soon know it."""
    _, _, fed = begun(HAAR, carrier)
    for value in (np.eye(8)[0], np.eye(8)[1]):  # under one number, anew
        answer(fed, ask(fed, 7, Same(), update=value))
        said = answer(fed, give(fed, "gram", 7, "update", "gram/0" if value[0] else again))
        assert isinstance(said, m.Given) == bool(value[0])
    assert fed.refusals[-1][2] == ("used-transform" if again == "gram/0" else "forbidden")
    answer(fed, ask(fed, 7, Same(), update=np.eye(8)[0]))
    assert isinstance(answer(fed, give(fed, "gram", 7, "update", "gram/0")), m.Given), "the same value may be asked for again"


@over_both
def test_folds_and_blind_sums_use_transforms_of_their_own(carrier: Carrier) -> None:
    scene, _, fed = begun(Protection(gram=("haar",), sum="haar"), carrier)
    model = training(scene).model
    answer(fed, ask(fed, 7, training(scene), model=model.init(0)))
    assert answer(fed, give(fed, "sum", 7, "update", "gram/0")) is None
    blind = values(answer(fed, give(fed, "sum", 7, "update", "sum/1/1/0")))
    size = len(blind)

    def fold(purpose: str, factor: float) -> Any:
        part = Shared(transformed=(Transformed(purpose, factor * blind, 0, size, (size,), size),))
        return answer(fed, m.Fold(fed.session, "apply/1/1/0", m.to_addends(part, {}), ()))

    def product(*numbers: Shared) -> Any:
        part = Shared(transformed=(Transformed("sum/1/1/0", blind, 0, size, (size,), size),))
        return answer(fed, m.Fold(fed.session, "apply/1/1/1", m.to_addends(part, {}), tuple(m.to_addends(one, {}) for one in numbers)))

    assert fold("gram/0", 1.0) is None
    assert isinstance(fold("sum/1/1/0", 1.0), m.Given)
    assert isinstance(fold("sum/1/1/0", 1.0), m.Given)
    assert fold("sum/1/1/0", 2.0) is None
    first = Shared(transformed=(Transformed("sum/1/1/0", blind, 0, 1, (), size),))
    assert product(Shared(np.array(2.0))) is None  # the server multiplies by what it knows itself
    assert product(first, first) is None
    assert product(Shared(transformed=(Transformed("gram/0", blind, 0, 1, (), size),))) is None
    assert product(Shared(transformed=(Transformed("sum/1/1/0", blind, 0, 2, (2,), size),))) is None
    assert isinstance(product(first), m.Given)
    words = [word for _, _, word in fed.refusals]
    assert words == ["forbidden", "forbidden", "used-transform", "forbidden", "forbidden", "forbidden", "bad-input"]


# --- what is summed


@over_both
@pytest.mark.parametrize(
    "trick", ["class means", "coordinate by coordinate", "sketched", "a sketch of it", "signs", "label counts", "counts by class"]
)
@pytest.mark.parametrize("protection", [SECAGG, Protection(sum="haar"), Protection(gram=("sketch",), sum="secagg"),
                                        Protection(min_cohort=3)], ids=lambda protection: protection.name)  # fmt: skip
def test_under_protected_sums_a_client_shows_no_piece_of_an_update(protection: Protection, trick: str, carrier: Carrier) -> None:
    scene, _, fed = begun(protection, carrier)
    train, part = training(scene), "update"
    model = train.model
    if trick == "class means":  # of a linear model these are the mean images
        answer(fed, ask(fed, 7, TrainToPrototypes(train, 0, ())))
        part = "prototype 0"
    elif trick == "coordinate by coordinate":
        task = PickAndTrain(Losses(model), train, "update", ((3, 4),))
        answer(fed, ask(fed, 7, task, model=np.zeros(model.dimension - 1), shared=np.zeros(1)))
        part = "shared"
    elif trick == "sketched":
        answer(fed, ask(fed, 7, train, model=model.init(0)))
    elif trick == "a sketch of it":
        answer(fed, ask(fed, 7, Represent(train, sketch=model.dimension - 1), model=model.init(0)))
        part = "representation"
    elif trick == "signs":
        answer(fed, ask(fed, 8, train, model=model.init(0)))
        answer(fed, ask(fed, 7, Neighbours(tuple(range(1, model.dimension + 1)), "sign"), scores=m.HeldValue(8, "update")))
        part = "neighbours"
    elif trick == "counts by class":
        answer(fed, ask(fed, 7, Evaluate(model, "train"), model=np.zeros(model.dimension)))
        part = "confusion"
    elif trick == "label counts":  # a model that always says 0 is right as often as the label is 0
        answer(fed, ask(fed, 7, Evaluate(model, "train"), model=np.zeros(model.dimension)))
        part = "correct"
    for operation in ("gather", "gram", "sum"):
        said = answer(fed, give(fed, operation, 7, part, "gram/0" if operation == "gram" else ""))
        assert (said is None) == (trick != "label counts" or protection.secure or operation != "gather"), operation
    assert {word for _, _, word in fed.refusals} == {"forbidden"}


@over_both
def test_nor_does_it_take_an_update_for_a_list_of_labels(carrier: Carrier) -> None:
    """A label that is a number of the update would be gathered as a choice."""
    scene, _, fed = begun(SECAGG, carrier)
    train = replace(training(scene), lr=1e9)
    answer(fed, ask(fed, 8, train, model=train.model.init(0)))
    places = np.full(train.model.dimension, 99)
    places[3] = 0
    listed = {"labels": m.HeldValue(8, "update"), "clients": places}
    assert answer(fed, ask(fed, 9, ChooseListed(), **listed)) is None
    assert answer(fed, give(fed, "gather", 9, "choice")) is None
    assert [code for _, _, code in fed.refusals] == ["bad-input", "not-held"]
    assert isinstance(answer(fed, ask(fed, 9, ChooseListed(), **listed | {"labels": places + 1})), m.Computed)
    assert values(answer(fed, give(fed, "gather", 9, "choice"))) == 1


@over_both
@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"least_weight": 1e-3}, "too-unequal"),
        ({"least_weight": 30.0, "weight_limit": 1e9}, "bad-terms"),
        ({"least_weight": 30.0, "weight_limit": 61.0}, "bad-terms"),
        ({"least_weight": 61.0}, "bad-terms"),
        ({"least_weight": 0.0}, "bad-terms"),
        ({"least_weight": 60.0}, ""),
        ({"least_weight": 0.0, "weight_limit": 0.0}, ""),
        ({"least_weight": 1e9, "weight_limit": 1e9}, ""),
    ],
)
def test_a_server_chooses_no_weights_but_only_whether_they_are_equal(
    change: dict[str, float], code: str, mode: Any, carrier: Carrier
) -> None:
    """With a smaller least weight, or a larger limit, a client could have nearly all of the weight."""
    protection = Protection(sum="secagg", min_cohort=3, secagg_mode=mode, max_weight=60.0)
    scene, _, fed = begun(protection, carrier, groups=1, clients_per_group=7)
    task, sums = training(scene), sums_of(fed)._sums
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    terms, server = type(sums).terms, type(sums)._server

    def without_checks(agreed: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cflpriv.protocols.secagg.messages.check_terms", lambda agreed: None)
            return server(sums, agreed)

    sums.terms = lambda *given, **named: msgspec.structs.replace(terms(sums, *given, **named), **change)
    sums._server = without_checks
    if code:
        with pytest.raises(TooFewClients):
            fed.mean(held, "examples")
        assert {word for _, _, word in fed.refusals} == {code}
    else:
        (mean,) = fed.mean(held, "examples")
        assert mean is not None
        assert mean.count == 7
        assert not fed.refusals


@over_both
@pytest.mark.parametrize("way", ["secagg-oblivious", "one_message-oblivious"])
def test_a_server_cannot_put_one_client_into_a_block_of_its_own(carrier: Carrier, way: str) -> None:
    scene, _, fed = begun(Protection(sum=way, min_cohort=2), carrier, groups=1, clients_per_group=4)
    task = training(scene)
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    means, exchange = sums_of(fed), type(sums_of(fed))._exchange

    def lying(steps: Any, stage: str) -> Any:
        told = {c: msgspec.structs.replace(s, groups=m.Picks((int(c > 0),), False)) if s.kind == "blocks" else s for c, s in steps.items()}
        return exchange(means, told, stage)

    object.__setattr__(means, "_exchange", lying)
    with pytest.raises(Exception, match="minimum cohort size"):
        fed.mean(held)
    assert {(client, word) for client, _, word in fed.refusals} == {(client, "unlisted-model") for client in (1, 2, 3)}


@over_both
@pytest.mark.parametrize("way", ["secagg-oblivious", "one_message-oblivious"])
def test_nor_all_clients_into_a_block_that_they_did_not_choose(carrier: Carrier, way: str) -> None:
    scene, _, fed = begun(Protection(sum=way, min_cohort=2), carrier, groups=1, clients_per_group=4)
    task = training(scene)
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    means = sums_of(fed)

    def lying(*said: Any) -> m.SumStep:
        step: m.SumStep = type(means)._like(means, *said)
        return msgspec.structs.replace(step, groups=m.Picks((1,), False)) if step.kind == "blocks" else step

    object.__setattr__(means, "_like", lying)
    with pytest.raises(Exception, match="minimum cohort size"):
        fed.mean(held)
    assert {(client, word) for client, _, word in fed.refusals} == {(client, "forbidden") for client in range(4)}


# --- the rule


KINDS: dict[str, tuple[PartKind | None, ...]] = {
    "compared": ("compared",), "chosen": ("choice", "request"), "scored": ("score",), "measured": ("measure",), "summed": ("summed", None),
}  # fmt: skip
"""None: a part that nothing declared."""


def of_kind(kind: PartKind | None, size: int = 0, tainted: bool = False) -> Origin:
    """Where a part "choice" came from: what decides is its kind, never its name."""
    return Origin(b"", size, tainted, () if kind is None else (("choice", kind),))


@pytest.mark.parametrize("floor", [0, 3])
@pytest.mark.parametrize("total", listed("sum"))
@pytest.mark.parametrize("gram", [(), *[(stage,) for stage in listed("gram")], ("sketch", "haar"), ("sketch", "ckks")], ids="+".join)
def test_the_rule_over_all_protections_parts_and_verbs(gram: tuple[str, ...], total: str, floor: int) -> None:
    if total.startswith("one_message") and {"ckks", "shares"} & set(gram):
        with pytest.raises(InputError, match="helpers of sums or holders of compared vectors, not both"):
            Protection(gram=gram, sum=total, min_cohort=floor)
        return
    protection = Protection(gram=gram, sum=total, min_cohort=floor)
    hides_compared, hides_summed = bool(set(gram) & {"ckks", "shares", *TRANSFORMS}), total != "none" or floor > 1
    number, several, label = np.array(0.5), np.zeros(20), np.array(1)
    assert {kind for kinds in KINDS.values() for kind in kinds} == {*get_args(PartKind), None}
    for (kind, kinds), operation in itertools.product(KINDS.items(), get_args(releases.Operation)):
        value = label if kind == "chosen" else number if kind == "measured" else several
        for name, tainted, size in itertools.product(kinds, (False, True), (0, 20, 30)):
            found = releases.may_leave(protection, operation, "choice", form_of(value), of_kind(name, size, tainted))
            if hides_compared and (tainted or kind == "compared"):
                assert found == (operation == "gram"), (operation, name)
            elif operation == "gram" and hides_compared:
                assert found == (kind == "summed"), name
            elif operation == "relay" and protection.secure:  # for an accomplice no more than for the server itself
                assert found == releases.may_leave(protection, "gather", "choice", form_of(value), of_kind(name, size, tainted)), name
                assert releases.may_leave(
                    replace(protection, relay_updates=True), operation, "choice", form_of(value), of_kind(name, size, tainted)
                )
            elif operation in ("sum", "relay") or not hides_summed:
                assert found, (operation, name)
            elif tainted or kind == "compared":
                assert found == (size == 0), (operation, name)
            elif operation == "gram" or kind == "summed":
                assert not found, (operation, name)
            elif kind == "chosen":
                assert found == (not total.endswith("-oblivious") or name == "request"), name
                assert not releases.may_leave(protection, operation, "choice", form_of(several), of_kind(name)), (
                    "numbers that are not whole"
                )
                assert not releases.may_leave(protection, operation, "choice", form_of(np.zeros(20, int)), of_kind(name, 20)), (
                    "a bit of each coordinate"
                )
            else:
                assert found == (size == 30 if kind == "scored" else not protection.secure), name
            noisy = releases.may_leave(protection, operation, "choice", form_of(value), of_kind(name, size, tainted), True)
            assert noisy == (True if operation == "gram" and not hides_compared else found), "rows with a client's own noise"
    both = Origin(kinds=(("one", "choice"), ("other", "compared")))
    with pytest.raises(RemoteError, match="forbidden") as caught:
        releases.check(Protection(gram=("haar",)), "gather", {"one": form_of(label), "other": form_of(several)}, both)
    (why,) = caught.value.__notes__
    assert "keeps 'other' from 'gather'" in why
    assert 'release_policy = "off"' in why


def test_every_task_declares_the_kinds_of_its_parts() -> None:
    """A part that nobody declared is kept like an update; a new task must be listed here."""
    scene = population()
    train = training(scene)
    model = train.model
    pick = PickAndTrain(Losses(model), train, "update", ((0, 1),))
    tasks: list[Any] = [
        train, Start(model, 0), Evaluate(model), EvaluateUsed(model), EvaluateOwn(model, "trained"), Gradient(model), Losses(model), Same(),
        PrincipalVectors(1), pick, EvaluateLowest(Losses(model), Evaluate(model)), WithoutWork(),
        TrainBoth(train, train, 0), Ask((0,), 1, 0.5), Combine(model, 0.5), TrainNormalised(train), TrainToPrototypes(train, 0, ()),
        TrainAndAssign(train, 0), Assign(train, 0), TrainApart(train), BesideItself(),
        Remember(), EvaluateAssigned(model), OnPart(train, 0.5), Influence(model, 0.5, (0,)),
        Neighbours((0,), "value"), HasValidation(0.5), TrainParted(train, 1, 0), EvaluateParted(model, 1, 0), EvaluateAdapted(model, 0.1),
        TrainControlled(train), Represent(Gradient(model)), ChainLink(train), Join(("update",)), FoldGradients(model),
        PrincipalHalves(1), HasHalves(), NeedsNoHalves(),
        CentreShare(model), MomentShare(model), CellShare(model), TrainInBlock(train, 2, 1.0),
        ChooseCluster(model), ChooseAndMove(Losses(model)), ChooseListed(), LowRankSketch(train),
        WithUpdate(CentreShare(model), train, 0.2), Beside(), TrainAndTell(train), RobustStep(train, 2), EvaluateRobust(model, 2),
        SoftStep(train, 0.1, 0, 0), EvaluateSoft(model),
        KeepLocal(train, 0, 1), KeepTuned(train, Evaluate(model), "one", (1,)), KeepProbabilities(model, ("advice one",)),
        Responsibilities(((0, 1),), model), HeldOutClasses(model), HeldOutScores(((0,), (0, 1)), model),
        KeepSamples(), ChangeOfData(), ComparedAgain(PrincipalHalves(1)),
    ]  # fmt: skip
    assert sorted(type(task).__name__ for task in tasks) == sorted(set(known_tasks()) - {"Model"})
    for task in tasks:
        assert set(task.parts.values()) <= set(get_args(PartKind)), task
        assert releases.kinds_of(task) == dict(task.parts), task


def test_what_a_task_does_not_declare_is_summed_whatever_it_is_called() -> None:
    @dataclass(frozen=True)
    class Undeclared:
        parts: Any = ("signature", "choice")

    assert releases.kinds_of(Undeclared()) == {"signature": "summed", "choice": "summed"}
    assert releases.kinds_of(Undeclared({"signature": "compared", "choice": "free"})) == {"signature": "compared", "choice": "summed"}
    assert releases.kinds_of(Foreign("train", ("choice", "scores"))) == {"choice": "summed", "scores": "summed"}
    assert releases.kinds_of(Foreign("signature", ("signature", "count"))) == {"signature": "compared", "count": "summed"}
    assert releases.compares(Foreign("signature", ("signature",)))


def test_what_is_compared_stays_that_when_it_was_relayed() -> None:
    scene, transport, fed = begun(Protection())
    signature = fed.compute(PrincipalVectors(1))
    update = fed.compute(training(scene), {"model": training(scene).model.init(0)})["update"]
    for held, compared in ((signature, True), (update, False)):
        arrived = fed.relay(held)
        values = Values(transport.stores[1])
        assert values.origin(fed._known[arrived.key].number).compared == compared


CASES = [Protection(sum="secagg", min_cohort=2, relay_updates=True), Protection(gram=("hadamard",), sum="haar"), Protection(gram=("haar",)),
         Protection(gram=("haar",), sum="secagg", min_cohort=2, relay_updates=True), Protection(sum="permutation")]  # fmt: skip
QUICK = {"sum=secagg": ("pfedlia", "fedfomo"), "gram=haar": ("stocfl",)}
PAIRS = [(one, name) for one in CASES for name in ALGORITHMS]


@pytest.mark.parametrize(
    ("protection", "name"),
    [pytest.param(one, name, id=f"{one.name}-{name}", marks=() if name in QUICK.get(one.name, ()) else pytest.mark.slow)
     for one, name in PAIRS],
)  # fmt: skip
def test_the_rule_leaves_every_algorithm_what_it_needs(protection: Protection, name: str) -> None:
    """Whatever runs in one process under a protection runs over messages under it, and nobody refuses anything."""
    scene = population(clients_per_group=4)
    wanted = inspect.signature(ALGORITHMS[name].make).parameters
    options: dict[str, Any] = {"weights": "equal"} if "weights" in wanted else {}
    if "groups" in wanted:
        options["groups"] = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    made = ALGORITHMS[name].make(training(scene), **options)

    def run(fed: Any) -> str:
        try:
            state = made.init(fed)
            for number in range(2):
                fed.begin_round(number)
                state, _ = made.round(fed, state)
        except (InputError, ClientsLost) as error:
            return str(error)
        return ""

    local = run(federation(scene, protection, seed=1))
    _, fed = remote(scene, protection)
    strict = federation(scene, protection, seed=1, release_policy="strict", on_error="refuse")
    said = run(fed)
    assert run(strict) == said, "a simulated client refuses what a deployed one refuses"
    assert not [*fed.refusals, *strict.refusals]
    if not local:
        at_model = "gram" in made.operations and not ALGORITHMS[name].compared(options).of_samples
        in_the_clear = protection.sum != "none" and not protection.gram and at_model
        assert not said or (in_the_clear and "compared in the clear" in said) or "not carried" in said, said


def test_a_simulated_run_ends_with_the_reason_of_a_refusal_unless_the_policy_is_off() -> None:
    scene, protection = population(clients_per_group=3), Protection(sum="secagg", min_cohort=2)
    for policy in ("strict", "off"):
        fed = federation(scene, protection, release_policy=policy)
        held = fed.compute(training(scene), {"model": training(scene).model.init(0)})["update"]
        if policy == "off":
            assert set(fed.gather(held)) == set(fed.clients)
            continue
        with pytest.raises(InputError, match=r"client 0 refuses \(gather, 'forbidden'\).* policy keeps 'update' from 'gather'"):
            fed.gather(held)
        assert not [one for one in fed.transcript.messages if one.operation == "gather"], "nothing had left"
