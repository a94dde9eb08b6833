"""Clients that vanish with their answer on the way, and servers that ask for more than a sum: what comes is right, or a word."""

import ast
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from socket import socketpair
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import pytest
from checkout import ROOT
from scenes import eye, population, sums_of, training
from scenes import federation as simulated

from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.cfl.cfl import Same
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Transcript
from cflpriv.federation import messages as m
from cflpriv.federation.client import FederationClient
from cflpriv.federation.error_codes import MEANINGS, SKIPPED
from cflpriv.federation.group_secret import GroupMember
from cflpriv.federation.server import ClientsLost, FederationServer
from cflpriv.federation.settings import Settings
from cflpriv.federation.store import MemoryStore
from cflpriv.federation.transforms import TransformCache
from cflpriv.federation.transport import OverBytes
from cflpriv.privacy.receipts import PrivacyLedger
from cflpriv.privacy.settings import Noise, Privacy
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import TooFewClients
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.protocols.ledger import Ledger
from cflpriv.protocols.secagg import messages
from cflpriv.protocols.secagg.messages import decode_client, encode
from cflpriv.types import Population

ENTROPY = public_entropy("dropouts")


class Lossy:
    """Clients in this process. A client in `lost[stage]` does its work and keeps its state, but its answer does not arrive; once."""

    def __init__(self, scene: Population, protection: Protection) -> None:
        self.data = {client.id: client for client in scene.clients}
        self.identities = [Identity.create(client, ENTROPY) for client in self.data]
        self.roster = Roster(tuple(one.public() for one in self.identities))
        self.protection = protection
        self.privacy = Privacy()
        self.stores = {client: MemoryStore() for client in self.data}
        self.lost: dict[str, set[int]] = {}
        self.forgets = False  # whether a client whose answer is lost loses its state with it
        self.stages: list[str] = []

    def places(self) -> Sequence[int]:
        return list(self.data)

    def exchange(self, requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        self.stages.append(stage)
        answers = {}
        for client, data in requests.items():
            settings = Settings(self.identities[client], self.protection, self.roster, self.privacy)
            made = FederationClient(settings, partial(self.data.__getitem__, client), self.stores[client], ENTROPY)
            answers[client] = made.receive(data)
        gone = self.lost.pop(stage, set())
        for client in gone if self.forgets else ():
            self.stores[client].clear()
        return {client: answer for client, answer in answers.items() if client not in gone}


def lossy_federation(protection: Protection, clients: int = 5) -> tuple[Population, Lossy, FederationServer]:
    scene = population(groups=1, clients_per_group=clients)
    transport = Lossy(scene, protection)
    roster = transport.roster if protection.secure or protection.transformed else None
    fed = FederationServer(OverBytes(transport), protection=protection, roster=roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    return scene, transport, fed


def one_round(scene: Population, fed: FederationServer, number: int, survivors: Sequence[int]) -> None:
    """A round whose mean is the plain mean of the survivors' updates."""
    task = training(scene)
    fed.begin_round(number)
    (mean,) = fed.mean(fed.compute(task, {"model": task.model.init(fed.round)})["update"])
    plain = simulated(scene, seed=1)
    plain.begin_round(number)
    held = plain.compute(task, {"model": task.model.init(fed.round)})
    expected = np.mean([eye(plain).peek(client, held["update"]) for client in survivors], axis=0)
    assert mean is not None
    assert mean.count == len(survivors)
    np.testing.assert_allclose(mean.parts["update"].value(), expected, atol=1e-6)


@pytest.mark.parametrize("forgets", ["nothing", "with its answer", "after the round"])
@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize("stage", ["compute", "secagg Invite", "secagg Adverts", "secagg Deliver", "secagg Survivors", "secagg Unmask"])
def test_a_client_whose_answer_is_lost_is_in_the_next_sum_again(stage: str, mode: Any, forgets: str) -> None:
    """Whatever keys it advertised, and whether it still has them: it is invited again, and every sum is that of those who are in it."""
    if stage == "secagg Survivors" and mode == "passive":
        pytest.skip("the passive mode has no such stage")
    scene, transport, fed = lossy_federation(Protection(sum="secagg", min_cohort=2, secagg_mode=mode))
    one_round(scene, fed, 0, range(5))  # keys for the next sum are advertised now
    if stage == "secagg Invite":
        sums_of(fed)._sums.adverts.clear()
    transport.lost, transport.forgets = {stage: {2}}, forgets == "with its answer"
    one_round(scene, fed, 1, range(5) if stage in ("secagg Survivors", "secagg Unmask") else [0, 1, 3, 4])
    assert not transport.lost
    first = 2
    if forgets == "after the round":
        transport.stores[2].clear()
        if stage == "compute":  # it was greeted again before the sum of that round: only its next answer tells that it lost its state
            one_round(scene, fed, 2, [0, 1, 3, 4])
            first = 3
    one_round(scene, fed, first, range(5))
    transport.stages.clear()
    one_round(scene, fed, first + 1, range(5))
    assert "secagg Invite" not in transport.stages, "two rounds on, everybody's keys are advertised ahead again"
    assert {word for _, _, word in fed.refusals} <= {"wrong-session"}


@pytest.mark.parametrize("private", [False, True], ids=["plain", "noisy"])
@pytest.mark.parametrize("gram", [(), ("haar",), ("sketch", "hadamard")], ids=["clear", "haar", "sketch+hadamard"])
def test_a_broken_comparison_is_on_record_and_is_taken_again_under_another_transform(gram: tuple[str, ...], private: bool) -> None:
    """What had arrived did leave its clients; noisy vectors differ from one attempt to the next, and no transform serves two values."""
    scene = population(groups=1, clients_per_group=5)
    transport = Lossy(scene, Protection(gram=gram))
    privacy = Privacy("sample", "add_remove", 50.0, 1e-3, samples=20, sketch_dim=4) if private else Privacy()
    accounts = None
    if private:
        accounts = PrivacyLedger(Noise("add_remove", 1.5, 2.0, 0.5, 1.0, 0.25, 20, 4, 4.0, 1), Ledger(privacy.budget))
    transport.privacy = privacy
    fed = FederationServer(
        OverBytes(transport), protection=transport.protection, roster=transport.roster, entropy=ENTROPY, seed=1, privacy_ledger=accounts,
        transcript=Transcript("full"),
    )  # fmt: skip
    fed.enrol()
    made: Any = ALGORITHMS["pacfl"].make(training(scene), k=2, weights="equal")
    transport.lost = {"gram": {2}, "enrol": {2}}  # nor does it answer when it is greeted again
    with pytest.raises(ClientsLost, match=r"\[2\]"):
        made.init(fed)
    state = made.init(fed)
    assert state.clustering.clients == (0, 1, 3, 4)
    assert not fed.refusals
    shown = [(one.clients, one.context["epoch"]) for one in fed.transcript.messages if one.operation == "gram"]
    assert shown == [((0, 1, 3, 4), 0), ((0, 1, 3, 4), 1)]
    assert fed.begin_round(0) == (2,)
    state, _ = made.admit(fed, state, [2])
    assert state.clustering.clients == (0, 1, 3, 4, 2)


def test_a_client_that_missed_one_call_is_in_the_next_attempt() -> None:
    scene, transport, fed = lossy_federation(Protection(gram=("haar",)))
    made: Any = ALGORITHMS["pacfl"].make(training(scene), k=2, weights="equal")
    transport.lost = {"gram": {2}}
    with pytest.raises(ClientsLost, match=r"\[2\]"):
        made.init(fed)
    assert 2 not in fed.clients
    assert made.init(fed).clustering.clients == (0, 1, 2, 3, 4)
    assert not fed.refusals


@pytest.mark.parametrize("at", ["compute", "gram"])
def test_one_that_sends_another_shape_than_the_rest_is_left_out(at: str) -> None:
    scene, transport, fed = lossy_federation(Protection())
    exchange = transport.exchange

    def lying(requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        answers = dict(exchange(requests, stage))
        said = m.decode_answer(answers[3]) if 3 in answers else None
        if stage == at and isinstance(said, m.Computed):
            answers[3] = m.encode(msgspec.structs.replace(said, parts=(m.Described("update", "<f8", (1 << 40, 1 << 12)),)))
        if stage == at and isinstance(said, m.Given):
            answers[3] = m.encode(m.Given((m.NamedArray("signature", np.ones((3, 2, 2))),), 0))
        return answers

    transport.exchange = lying  # type: ignore[method-assign]
    if at == "compute":
        task = training(scene)
        (mean,) = fed.mean(fed.compute(task, {"model": task.model.init(0)})["update"])
        assert mean is not None
        assert mean.count == 4
    else:
        made: Any = ALGORITHMS["pacfl"].make(training(scene), k=2)
        with pytest.raises(ClientsLost, match=r"\[3\]"):
            made.init(fed)
        assert made.init(fed).clustering.clients == (0, 1, 2, 4)
    assert fed.refusals == [(3, at, "malformed")]


def ask(fed: FederationServer, number: int, task: Any, **params: Any) -> m.Compute:
    given = tuple((name, value if isinstance(value, m.HeldValue) else m.to_addends(value, {})) for name, value in sorted(params.items()))
    return m.Compute(fed.session, 0, 1, number, (7, 8), m.Carried(task), given, None)


@pytest.mark.parametrize("trick", ["padding", "a copy", "a copy of a copy", "trained from it", "added up"])
def test_no_dressing_up_makes_an_update_releasable(trick: str) -> None:
    """Under secure sums a client gives nothing away that is as large as the smallest model it came from, under whatever name."""
    scene, _, fed = lossy_federation(Protection(sum="secagg", min_cohort=2))
    fed.begin_round(0)
    task = training(scene)
    model, part = task.model.init(0), "update"
    padding = {"junk": np.zeros(10 * model.size)} if trick == "padding" else {}
    first: m.PartyRequest = ask(fed, 7, task, model=model, **padding)
    assert isinstance(fed._ask({0: first}, "compute")[0], m.Computed)
    number = 7
    if "copy" in trick:
        steps = [8] if trick == "a copy" else [8, 9]
        for target in steps:
            fed._ask({0: ask(fed, target, Same(), update=m.HeldValue(number, "update"))}, "compute")
            number = target
    elif trick == "trained from it":
        fed._ask({0: ask(fed, 8, task, model=m.HeldValue(7, "update"))}, "compute")
        number = 8
    elif trick == "added up":
        fed._ask({0: m.AddUp(fed.session, 8, (m.OwnPart(7, "update", 1.0),))}, "add up")
        number, part = 8, "own"
    assert not fed.refusals
    for operation in ("gather", "gram", "sum"):
        assert fed._ask({0: m.Give(fed.session, operation, number, (part,), "", False)}, operation) == {}
        assert fed.refusals[-1] == (0, operation, "forbidden")


def said_words(folder: Path) -> set[str]:
    """The words of all errors that are raised in a folder, of its own kinds of errors, and of what servers note as refused."""
    words = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            said: list[ast.expr] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("RemoteError", "LocalError", "Refused"):
                said = node.args[:1]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("refusals.append", "_refused")):
                said = node.args[0].elts[2:] if isinstance(node.args[0], ast.Tuple) else node.args[1:]
            elif isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["code"]:
                said = [node.value]
            either = [branch for one in said for branch in ((one.body, one.orelse) if isinstance(one, ast.IfExp) else (one,))]
            words |= {str(one.value) for one in either if isinstance(one, ast.Constant) and one.value}
    return {word for word in words if " " not in word}  # a name of a stage has a space, an error code has none


def test_every_error_code_has_a_meaning() -> None:
    words = {"too-few-clients"}
    for part in ("federation", "aggregation", "flower"):
        words |= said_words(ROOT / "cflpriv" / part)
    for part in ("secagg", "group", "ckks", "shared_gram"):
        words |= said_words(ROOT / "protocols" / part)
    assert len(words) > 40
    assert sorted(words - {*MEANINGS, *SKIPPED}) == []


def test_what_the_server_refuses_is_noted_and_lies_cost_a_sum_not_the_run() -> None:
    """A client that signs for another is out of the sum; one that reveals wrong shares leaves none, and is out of later ones."""
    scene, transport, fed = lossy_federation(Protection(sum="secagg", min_cohort=2, secagg_mode="passive"))
    exchange = transport.exchange

    def lying(requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        answers = dict(exchange(requests, stage))
        if stage == "secagg Invite":
            answers[1] = answers[0]
        if stage == "secagg Unmask":
            reveal = decode_client(m.decode_answer(answers[0]).message)  # type: ignore[union-attr]
            shares = tuple(msgspec.structs.replace(one, share=one.share[::-1]) for one in reveal.key_shares)  # type: ignore[union-attr]
            answers[0] = m.encode(m.Stepped(encode(msgspec.structs.replace(reveal, key_shares=shares))))
        return answers

    transport.exchange = lying  # type: ignore[method-assign]
    transport.lost = {"secagg Deliver": {2}}
    fed.begin_round(0)
    task = training(scene)
    held = fed.compute(task, {"model": task.model.init(0)})
    with pytest.raises(TooFewClients):
        fed.mean(held["update"])
    assert fed.refusals == [(1, "secagg Invite", "wrong-sender"), (0, "secagg Unmask", "wrong-share")]
    transport.exchange = exchange  # type: ignore[method-assign]
    one_round(scene, fed, 1, range(1, 5))


def changed(transport: Lossy, changes: Mapping[str, Any], client: int = 3) -> None:
    """What `client` sends at a stage goes through a change of the protocol's message; what it was sent is not changed."""
    exchange = transport.exchange

    def lying(requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        answers = dict(exchange(requests, stage))
        if stage in changes and client in answers:
            said = decode_client(m.decode_answer(answers[client]).message, 1 << 20)  # type: ignore[union-attr]
            answers[client] = m.encode(m.Stepped(encode(changes[stage](said))))
        return answers

    transport.exchange = lying  # type: ignore[method-assign]


def bad_boxes(shares: Any) -> Any:
    return msgspec.structs.replace(shares, boxes=tuple(msgspec.structs.replace(box, box=bytes(len(box.box))) for box in shares.boxes))


def zeros(opening: Any) -> Any:
    return msgspec.structs.replace(opening, shares=tuple(msgspec.structs.replace(one, self_share=bytes(33)) for one in opening.shares))


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_who_deals_shares_that_are_none_is_named_and_the_sum_is_taken_again_in_the_round(mode: Any) -> None:
    """Before, one client with bad boxes stopped every round, and the refusals named all others."""
    scene, transport, fed = lossy_federation(Protection(sum="secagg", min_cohort=2, secagg_mode=mode), 7)
    original = transport.exchange
    # Two keepers get no shares: as many as an honest dealer opens to in a cohort of seven.
    spoil = lambda shares: msgspec.structs.replace(shares, boxes=(*bad_boxes(shares).boxes[:2], *shares.boxes[2:]))  # noqa: E731
    changed(transport, {"secagg Adverts": spoil, "secagg Challenge": zeros})
    one_round(scene, fed, 0, [0, 1, 2, 4, 5, 6])
    assert fed.refusals == [(3, "secagg Challenge", "false-shares")]
    assert transport.stages.count("secagg Deliver") == 2
    transport.exchange = original  # type: ignore[method-assign]
    one_round(scene, fed, 1, [0, 1, 2, 4, 5, 6])
    assert fed.refusals == [(3, "secagg Challenge", "false-shares")]


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_bad_boxes_whose_shares_are_opened_cost_nobody_anything(mode: Any) -> None:
    scene, transport, fed = lossy_federation(Protection(sum="secagg", min_cohort=2, secagg_mode=mode), 7)
    changed(
        transport,
        {"secagg Adverts": lambda shares: msgspec.structs.replace(shares, boxes=(*bad_boxes(shares).boxes[:2], *shares.boxes[2:]))},
    )
    for number in range(2):
        one_round(scene, fed, number, range(7))
    assert fed.refusals == []


def test_a_dealer_that_everybody_accuses_is_left_out_of_this_sum() -> None:
    scene, transport, fed = lossy_federation(Protection(sum="secagg", min_cohort=2), 7)
    changed(transport, {"secagg Adverts": bad_boxes})
    one_round(scene, fed, 0, [0, 1, 2, 4, 5, 6])
    assert fed.refusals == [(3, "secagg Challenge", "too-many-complaints")]


def test_a_false_complaint_costs_the_one_that_cannot_go_on() -> None:
    scene, transport, fed = lossy_federation(Protection(sum="secagg", min_cohort=2), 7)
    changed(transport, {"secagg Deliver": lambda masked: messages.Complaint(3, masked.context, messages.ids([0, 5]))})
    one_round(scene, fed, 0, [0, 1, 2, 4, 5, 6])
    assert fed.refusals == [(3, "secagg Settle", "wrong-stage")]


def test_oblivious_sums_are_taken_again_too() -> None:
    scene, transport, fed = lossy_federation(Protection(sum="secagg-oblivious", min_cohort=2), 7)
    spoil = lambda shares: msgspec.structs.replace(shares, boxes=(*bad_boxes(shares).boxes[:2], *shares.boxes[2:]))  # noqa: E731
    changed(transport, {"secagg Adverts": spoil, "secagg Challenge": zeros})
    made: Any = ALGORITHMS["ifca"].make(training(scene), k=2, weights="equal")
    state = made.init(fed)
    fed.begin_round(0)
    after, _ = made.round(fed, state)
    assert fed.refusals == [(3, "secagg Challenge", "false-shares")]
    assert transport.stages.count("secagg Deliver") == 3, "the counts twice, the blocks once"
    before = [model.value() for model in state.restarts[0].models]
    assert any(np.any(model.value() != old) for model, old in zip(after.restarts[0].models, before, strict=True))


def test_shares_of_another_secret_cost_one_sum_and_their_dealer_the_session() -> None:
    scene, transport, fed = lossy_federation(Protection(sum="secagg", min_cohort=2), 5)
    changed(transport, {"secagg Adverts": lambda shares: msgspec.structs.replace(shares, commitment=bytes(32))})
    fed.begin_round(0)
    task = training(scene)
    with pytest.raises(TooFewClients):
        fed.mean(fed.compute(task, {"model": task.model.init(0)})["update"])
    assert fed.refusals == [(3, "secagg Unmask", "false-secret")]
    one_round(scene, fed, 1, [0, 1, 2, 4])


# --- the clients' secret ---------------------------------------------------------------------------------------------------------------


class Unheard:
    """Drops one answer: that of `client` to the exchange number `at` of a stage, counted from now."""

    def __init__(self, transport: Lossy, stage: str, client: int, at: int) -> None:
        self.exchange, self.stage, self.client, self.left = transport.exchange, stage, client, at

    def __call__(self, requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        answers = dict(self.exchange(requests, stage))
        if stage == self.stage and self.client in answers:
            self.left -= 1
            if self.left == -1:
                del answers[self.client]
        return answers


def alike(transport: Lossy) -> bool:
    """Whether all clients have the same secret."""
    vectors = []
    for client, identity in enumerate(transport.identities):
        settings = Settings(identity, transport.protection, transport.roster)
        hidden = GroupMember(settings, transport.stores[client], ENTROPY, TransformCache())
        vectors.append(hidden.transforms()("sum/test", 8).apply(np.arange(8.0)[None]))
    return all(np.array_equal(vectors[0], one) for one in vectors)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("late", [False, True], ids=["first agreement", "latecomer"])
def test_whose_answer_is_lost_while_clients_agree_is_in_all_the_same(late: bool, at: int) -> None:
    scene = population(groups=1, clients_per_group=5)
    transport = Lossy(scene, Protection(gram=("haar",), sum="haar"))
    if late:
        transport.lost = {"enrol": {3}}
    else:
        transport.exchange = Unheard(transport, "group", 3, at)  # type: ignore[method-assign]
    fed = FederationServer(OverBytes(transport), protection=transport.protection, roster=transport.roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    if late:
        assert 3 not in fed.clients
        transport.exchange = Unheard(transport, "group", 3, at)  # type: ignore[method-assign]
    for number in range(2):
        fed.begin_round(number)
    assert list(fed.clients) == list(range(5))
    assert alike(transport)


def test_a_client_that_lost_the_secret_gets_it_again_as_often_as_it_does_and_from_whoever_gives_it() -> None:
    scene, transport, fed = lossy_federation(Protection(gram=("haar",), sum="haar"))
    task = training(scene)
    for number in range(12):
        if number in (1, 5, 8):
            transport.stores[3].clear()
        transport.lost = {"compute": {3}} if number in (3, 8) else {}  # it is away besides
        if number == 5:  # the first to be asked for the secret has none itself
            transport.stores[0].clear()
        fed.begin_round(number)
        (mean,) = fed.mean(fed.compute(task, {"model": task.model.init(number)})["update"])
        assert mean is not None
        if number not in (1, 3, 5, 8, 9):  # 9: nobody knows yet that it was more than away
            assert mean.contributors == (0, 1, 2, 3, 4), number


def test_the_next_member_is_asked_where_one_gives_no_secret() -> None:
    scene = population(groups=1, clients_per_group=5)
    transport = Lossy(scene, Protection(gram=("haar",), sum="haar"))
    transport.lost = {"enrol": {3}}
    fed = FederationServer(OverBytes(transport), protection=transport.protection, roster=transport.roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    transport.stores[0].drop("group")
    assert fed.begin_round(0) == (3,)
    assert 3 in fed.clients


def test_a_client_that_dies_after_its_answer_is_a_dropout_of_the_embedded_example() -> None:
    spec = spec_from_file_location("embedded", ROOT / "examples" / "embed_in_your_fl.py")
    assert spec is not None
    assert spec.loader is not None
    example: Any = module_from_spec(spec)
    spec.loader.exec_module(example)
    dying, example.DIES = example.DIES, -1
    identities = [Identity.create(client, ENTROPY) for client in range(example.CLIENTS)]
    roster = Roster(tuple(one.public() for one in identities))
    wires, theirs = zip(*(socketpair() for _ in identities), strict=True)

    def dies(wire: Any, identity: Identity) -> None:
        policy = example.Policy(example.SESSION, "active", example.MODEL, 1, example.MIN_COHORT)
        machine = example.Client(identity, policy, record=example.SumRecord(), roster=roster)
        example.send(wire, machine.receive(example.receive(wire)))
        wire.close()

    threads = [
        Thread(target=dies, args=(wire, one)) if one.client == dying else Thread(target=example.run_client, args=(wire, one, roster))
        for wire, one in zip(theirs, identities, strict=True)
    ]
    for thread in threads:
        thread.start()
    total = example.serve(dict(enumerate(wires)), roster)
    for wire in wires:
        wire.close()
    for thread in threads:
        thread.join(10)
    for wire in theirs:
        wire.close()
    assert total.survivors == tuple(client for client in range(example.CLIENTS) if client != dying)
