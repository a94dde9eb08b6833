"""The operations over bytes: every algorithm runs unchanged, results are those of clients in memory, and clients refuse what they must."""

import inspect
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from agreements import contract_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loopback import ENTROPY, Loopback, RawArray, remote
from msgspec import structs
from scenes import eye, federation, population, training
from small_runs import after_rounds

from cflpriv.algorithms import ALGORITHMS
from cflpriv.contract.operations import Sampling
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Transcript
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation.client import FederationClient
from cflpriv.federation.client_ledger import SPENT
from cflpriv.federation.registry import new_session
from cflpriv.federation.server import ClientsLost, FederationServer
from cflpriv.federation.settings import Settings
from cflpriv.federation.store import DiskStore, MemoryStore
from cflpriv.federation.task_encoding import UnknownTask, task_from_bytes, task_to_bytes
from cflpriv.federation.transport import OverBytes
from cflpriv.federation.values import Origin, Values
from cflpriv.protocols.entropy import Entropy
from cflpriv.protocols.errors import MalformedMessage, RemoteError, TooFewClients
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.types import Population


def algorithm(name: str, scene: Population) -> Any:  # an Algorithm, whose `admit` is not None where it is used
    name, _, found = name.partition(", ")
    wanted = inspect.signature(ALGORITHMS[name].make).parameters
    options: dict[str, Any] = {"weights": "equal"} if "weights" in wanted else {}
    if name == "ifca" and not found:
        options["k"] = 2
    if "groups" in wanted:
        options["groups"] = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    return ALGORITHMS[name].make(training(scene), **options)


@pytest.mark.parametrize("name", ["pacfl", "ifca", "fedavg", "oracle", "scaffold"])
@pytest.mark.parametrize("mode", ["active", "passive"])
def test_secure_sums_equal_the_sums_in_the_clear(name: str, mode: Any) -> None:
    scene = population(clients_per_group=4)
    protection = Protection(sum="secagg", min_cohort=2, secagg_mode=mode)
    _, plain = remote(scene)
    transport, secure = remote(scene, protection)
    made = algorithm(name, scene)
    a, b = after_rounds(made, plain, 2), after_rounds(made, secure, 2)
    assert not secure.refusals
    losses = []
    for state in (a, b):  # models of secure sums are in the clear; single clients' losses there are not
        what = made.serve(state)
        held = plain.compute(what.task, what.params, which=what.which)
        losses.append(np.array([one["loss"] for one in plain.gather(held["loss"]).values()]))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert not secure.gather(secure.compute(what.task, what.params, which=what.which)["loss"])
    assert {word for _, _, word in secure.refusals} == {"forbidden"}
    assert "secagg Deliver" in transport.stages
    assert "sum" not in transport.stages


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pacfl", "ifca, k found"])
@pytest.mark.parametrize("kind", ["haar", "hadamard", "permutation"])
def test_under_a_shared_transform_clusters_and_models_are_the_same(name: str, kind: Any) -> None:
    """The clients agree on the secret over the same wire; the server holds no clear update and no signature."""
    scene = population(clients_per_group=3)
    transport, blind = remote(scene, Protection(gram=(kind,), sum=kind))
    _, plain = remote(scene)
    made = algorithm(name, scene)
    a, b = after_rounds(made, plain, 2), after_rounds(made, blind, 2)
    assert not blind.refusals
    assert made.describe(a).get("clustering") == made.describe(b).get("clustering")
    losses = []
    for fed, state in ((plain, a), (blind, b)):
        what = made.serve(state)
        told = fed.gather(fed.compute(what.task, what.params, which=what.which)["loss"])
        losses.append(np.array([one["loss"] for one in told.values()]))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    assert "group" in transport.stages
    kinds = {one.kind for one in blind.transcript.messages}
    assert "update" not in kinds
    assert "blind update" in kinds
    for one in blind.transcript.messages:
        if one.kind == "blind update":  # where the parts lie in the vectors that were opened is on record
            assert one.context["dimension"] == max(stop for _, stop in one.context["parts"].values())
    here = federation(scene.clients, protection=Protection(gram=(kind,), sum=kind), seed=1, transcript=Transcript("full"))
    after_rounds(made, here, 2)
    sent = [  # what clients are sent is on record whole, sums that the server cannot read among it
        {
            (name, np.shape(value), tuple(one.context.get("blind", {}).get(name, ())))
            for one in fed.transcript.messages if one.kind == "parameters" for name, value in (one.payload or {}).items()
        }
        for fed in (blind, here)
    ]  # fmt: skip
    assert any(place for _, _, place in sent[1])
    assert {one[1:] for one in sent[0]} >= {one[1:] for one in sent[1]}


def test_who_comes_later_gets_the_secret_from_a_member_and_a_transform_serves_once() -> None:
    scene = population(groups=1, clients_per_group=5)
    protection = Protection(gram=("haar",), sum="haar")
    transport = Loopback(scene, protection)
    transport.dead = {4}
    fed = FederationServer(OverBytes(transport), protection=protection, roster=transport.roster, entropy=ENTROPY, seed=1)
    fed.enrol()
    assert list(fed.clients) == [0, 1, 2, 3]
    transport.dead = set()
    assert fed.begin_round(0) == (4,)
    assert list(fed.clients) == [0, 1, 2, 3, 4]
    task = training(scene)
    held = fed.compute(task, {"model": task.model.init(max(0, fed.round))})
    (mean,) = fed.mean(held["update"])
    assert mean is not None
    assert mean.count == 5
    other = fed.compute(task, {"model": task.model.init(1)})
    again = m.Give(fed.session, "sum", fed._known[other.key].number, ("update",), "sum/0/1/0", False)
    assert fed._ask({0: again}, "sum") == {}
    assert fed.refusals[-1][2] == "used-transform"
    with_clear = m.Fold(fed.session, "apply/9/9/9", m.to_addends(task.model.init(0), {}), ())
    assert fed._ask({0: with_clear}, "fold") == {}
    assert fed.refusals[-1][2] == "forbidden"


def test_too_few_for_an_agreement_are_nobody() -> None:
    scene = population(groups=1, clients_per_group=5)
    protection = Protection(gram=("haar",))
    transport = Loopback(scene, protection)
    transport.dead = {2, 3, 4}
    fed = FederationServer(OverBytes(transport), protection=protection, roster=transport.roster, entropy=ENTROPY)
    fed.enrol()
    assert fed.clients == ()


@pytest.mark.parametrize("way", ["secagg-oblivious", "one_message-oblivious"])
def test_oblivious_sums_keep_the_choice_with_the_client(way: str) -> None:
    scene = population(clients_per_group=4)
    _, plain = remote(scene)
    transport, secure = remote(scene, Protection(sum=way, min_cohort=2))
    made = algorithm("ifca", scene)
    a, b = after_rounds(made, plain, 2), after_rounds(made, secure, 2)
    assert not secure.refusals
    assert "gather" not in transport.stages
    for one, two in zip(a.restarts[0].models, b.restarts[0].models, strict=True):
        np.testing.assert_allclose(one.value(), two.value(), atol=1e-5)


def test_weighted_by_sample_counts_a_secure_mean_is_that_in_the_clear() -> None:
    scene = population(clients_per_group=3)
    protection = Protection(sum="secagg", min_cohort=2, max_weight=200.0)
    _, plain = remote(scene)
    _, secure = remote(scene, protection)
    task = training(scene)
    totals = []
    for fed in (plain, secure):
        fed.begin_round(0)
        held = fed.compute(task, {"model": task.model.init(0)})
        (mean,) = fed.mean(held["update"], "examples")
        assert mean is not None
        totals.append(mean.parts["update"].value())
    np.testing.assert_allclose(totals[0], totals[1], atol=1e-6)


STAGES = ["secagg Invite", "secagg Adverts", "secagg Deliver", "secagg Survivors", "secagg Unmask"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_dies_at_any_stage_leaves_a_right_sum_or_none(stage: str) -> None:
    scene = population(groups=1, clients_per_group=7)
    transport, fed = remote(scene, Protection(sum="secagg", min_cohort=3))
    fed.begin_round(0)
    task = training(scene)
    held = fed.compute(task, {"model": task.model.init(max(0, fed.round))})
    values = federation(scene.clients, seed=1)
    values.begin_round(0)
    clear = values.compute(task, {"model": task.model.init(0)})
    transport.kill_at = {stage: {2}}
    (mean,) = fed.mean(held["update"])
    assert mean is not None
    alive = [client for client in range(7) if client != 2 or stage in ("secagg Survivors", "secagg Unmask")]
    expected = np.mean([eye(values).peek(client, clear["update"]) for client in alive], axis=0)
    np.testing.assert_allclose(mean.parts["update"].value(), expected, atol=1e-6)
    assert 2 not in fed.clients
    transport.dead.clear()
    assert 2 in fed.begin_round(1)  # it is known by its identity
    held = fed.compute(task, {"model": task.model.init(max(0, fed.round))})
    (mean,) = fed.mean(held["update"])
    assert mean is not None
    assert mean.count == 7


def test_too_few_clients_end_with_an_error_and_no_sum() -> None:
    scene = population(groups=1, clients_per_group=4)
    transport, fed = remote(scene, Protection(sum="secagg", min_cohort=3))
    fed.begin_round(0)
    task = training(scene)
    held = fed.compute(task, {"model": task.model.init(max(0, fed.round))})
    transport.kill_at = {"secagg Deliver": {1, 2}}
    with pytest.raises(TooFewClients):
        fed.mean(held["update"])


def test_a_client_lost_while_clusters_are_found_is_named_and_the_step_can_be_taken_again() -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene)
    made: Any = ALGORITHMS["pacfl"].make(training(scene), k=2)
    transport.kill_at = {"gram": {4}}
    with pytest.raises(ClientsLost, match=r"\[4\]"):
        made.init(fed)
    state = made.init(fed)
    assert state.clustering.clients == (0, 1, 2, 3, 5)
    transport.dead.clear()
    assert fed.begin_round(0) == (4,)
    state, _ = made.admit(fed, state, [4])
    local = federation(scene.clients, seed=1, present=[0, 1, 2, 3, 5])
    other = made.init(local)
    eye(local).join([4])
    local.begin_round(0)
    assert state.clustering == made.admit(local, other, [4])[0].clustering


def give(fed: FederationServer, operation: Any, held: Any, parts: tuple[str, ...]) -> m.Give:
    return m.Give(fed.session, operation, fed._known[held.key].number, parts, "", False)


def test_a_client_releases_nothing_that_its_own_settings_forbid() -> None:
    """An active server that asks a client under secure aggregation for its update, by whatever operation, gets a word."""
    scene = population(clients_per_group=3)
    _, fed = remote(scene, Protection(sum="secagg", min_cohort=2))
    fed.begin_round(0)
    task = training(scene)
    held = fed.compute(task, {"model": task.model.init(max(0, fed.round))})
    for operation in ("sum", "gather", "gram"):
        assert fed._ask({0: give(fed, operation, held, ("update",))}, operation) == {}
    assert {code for _, _, code in fed.refusals} == {"forbidden"}
    _, clear = remote(scene)
    clear.begin_round(0)
    held = clear.compute(task, {"model": task.model.init(0)})
    step = m.SumStep(clear.session, (1, 1), clear._known[held.key].number, ("update",), 1, "sum", None, b"x")
    assert clear._ask({0: step}, "secagg") == {}
    assert clear.refusals[-1][2] == "forbidden"


def test_a_private_model_on_top_of_the_list_is_refused() -> None:
    """A server that hands one client another model than it lists gets no sum with that client in it."""
    scene = population(groups=1, clients_per_group=5)
    _, fed = remote(scene, Protection(sum="secagg", min_cohort=2))
    fed.begin_round(0)
    task = training(scene)
    ones = fed.compute(task, {"model": task.model.init(max(0, fed.round))})
    known = fed._known[ones.key]
    other = m.Compute(fed.session, 0, 1, known.number, (), m.Carried(task), (("model", m.to_addends(task.model.init(9), {})),), None)
    assert isinstance(fed._ask({3: other}, "compute")[3], m.Computed)
    (mean,) = fed.mean(ones["update"])
    assert mean is not None
    assert mean.count == 4
    assert any(client == 3 and stage == "secagg Invite" for client, stage, _ in fed.refusals), fed.refusals


def test_clients_that_exchange_their_places_are_both_there() -> None:
    transport, fed = remote(population(clients_per_group=3))
    here, exchange = fed.clients, transport.exchange
    swap = {1000: 1001, 1001: 1000}

    def swapped(requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        answers = exchange({swap.get(place, place): data for place, data in requests.items()}, stage)
        return {swap.get(place, place): data for place, data in answers.items()}

    transport.exchange = swapped  # type: ignore[method-assign]
    fed.lose([0, 1])
    assert fed.enrol() == (0, 1)
    assert fed.clients == here
    assert set(fed.compute(training(population(clients_per_group=3)), {"model": training(population()).model.init(0)}).clients) == set(here)


def test_keys_are_proved_but_in_an_open_simulation() -> None:
    scene = population(groups=1, clients_per_group=3)
    open_one, secure = (federation(scene, Protection(sum=way)) for way in ("none", "secagg"))
    assert {peer.signature for peer in open_one._registry.peers.values()} == {bytes(64)}
    assert bytes(64) not in {peer.signature for peer in secure._registry.peers.values()}
    transport, fed = remote(scene)  # open, too, but its clients are elsewhere
    pinned = FederationClient(transport.settings(0), lambda: scene.clients[0], MemoryStore())
    answer = m.decode_answer(pinned.receive(m.encode(m.Enrol(m.VERSION, bytes(16), bytes(16), signed=False))))
    assert answer == m.Refused("forbidden"), "a client with a roster is asked for none"
    assert bytes(64) not in {peer.signature for peer in fed._registry.peers.values()}
    exchange = transport.exchange

    def lazy(requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        answers = {place: m.decode_answer(data) for place, data in exchange(requests, stage).items()}
        shown = {place: answer for place, answer in answers.items() if isinstance(answer, m.Enrolled)}
        return {
            place: m.encode(structs.replace(answer, signing_key=keys[answer.client], signature=bytes(64), proof=bytes(64)))
            for place, answer in shown.items()
        }

    transport.exchange = lazy  # type: ignore[method-assign]
    for known, code in ((True, "bad-signature"), (False, "other-identity")):
        keys = {client: key if known else bytes(32) for client, key in enumerate(transport.roster.keys)}
        fed._registry.lose(1)
        assert fed.enrol() == ()
        assert fed.refusals[-1] == (1, "enrol", code)


def test_identities_are_pinned() -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene)
    transport.identities[2] = Identity.create(2, ENTROPY)  # somebody else says it is client 2
    transport.roster = Roster(tuple(transport.identities[client].public() for client in sorted(transport.data)))
    fed._registry.lose(2)
    assert fed.enrol() == ()
    assert fed.refusals[-1] == (2, "enrol", "other-identity")
    protected = Loopback(scene, Protection(sum="secagg"))
    pinned = protected.roster
    protected.identities[1] = Identity.create(1, ENTROPY)
    fed = FederationServer(OverBytes(protected), protection=protected.protection, roster=pinned, entropy=ENTROPY)
    assert 1 not in fed.enrol()
    assert fed.refusals[-1][2] == "not-on-roster"


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_get_a_word_and_change_nothing(data: bytes) -> None:
    store = MemoryStore()
    client = FederationClient(Settings(Identity.create(0, ENTROPY)), lambda: population().clients[0], store, ENTROPY)
    answer = m.decode_answer(client.receive(data))
    assert answer == m.Refused("malformed")
    assert not store


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_changed_answers_are_refused_and_never_averaged(data: st.DataObject) -> None:
    scene = population(groups=1, clients_per_group=4)
    transport, fed = remote(scene)
    fed.begin_round(0)
    task = training(scene)
    held = fed.compute(task, {"model": task.model.init(max(0, fed.round))})
    (whole,) = fed.mean(held["update"], on=[0, 1, 3])

    def tamper(client: int, stage: str, answer: bytes) -> bytes:
        if client != 2:
            return answer
        at = data.draw(st.integers(0, len(answer) - 1))
        return answer[:at] + bytes([answer[at] ^ data.draw(st.integers(1, 255))]) + answer[at + 1 :]

    transport.tamper = tamper
    (mean,) = fed.mean(held["update"])
    assert whole is not None
    assert mean is not None
    assert mean.count == 3
    np.testing.assert_array_equal(mean.parts["update"].value(), whole.parts["update"].value())


def test_state_lives_in_files_as_well_and_old_values_are_dropped(tmp_path: Any) -> None:
    scene = population(clients_per_group=3)
    transport = Loopback(scene, Protection(), lambda client: DiskStore(tmp_path / str(client)))
    fed = FederationServer(OverBytes(transport), entropy=ENTROPY, seed=1)
    fed.enrol()
    made = algorithm("stocfl", scene)
    after_rounds(made, fed, 4)
    assert not fed.refusals
    assert (tmp_path / "0").stat().st_mode & 0o077 == 0
    kept = [name for name in transport.stores[0].names() if name.startswith("held/")]
    assert 0 < len(kept) <= 5


def test_a_run_goes_on_without_a_client_whose_folder_was_set_back(tmp_path: Path) -> None:
    scene, protection = population(groups=1, clients_per_group=5), Protection(sum="secagg")
    transport = Loopback(scene, protection, lambda client: DiskStore(tmp_path / str(client)))
    deployed = transport.settings
    transport.settings = lambda client: replace(deployed(client), needs_contract=True)  # type: ignore[method-assign]
    made = algorithm("fedavg", scene)
    agreed = contract_of(made, protection=protection, roster=transport.roster)
    fed = FederationServer(OverBytes(transport), protection=protection, roster=transport.roster, entropy=ENTROPY, seed=1, contract=agreed)
    state = made.init(fed)

    fed.begin_round(0)
    state, _ = made.round(fed, state)
    shutil.copytree(tmp_path / "2", tmp_path / "backup")
    fed.begin_round(1)
    state, _ = made.round(fed, state)
    assert set(fed.clients) == set(range(5))
    shutil.rmtree(tmp_path / "2")
    shutil.move(tmp_path / "backup", tmp_path / "2")
    transport.dead = {2}
    fed.begin_round(2)
    state, _ = made.round(fed, state)
    transport.dead = set()
    for number in (3, 4):
        fed.begin_round(number)
        state, _ = made.round(fed, state)
        assert set(fed.clients) == {0, 1, 3, 4}
    assert {code for _, stage, code in fed.refusals if stage == "enrol"} == {"set-back"}


def test_what_does_not_travel_is_refused_by_name() -> None:
    from cflpriv.engine.models import Model
    from cflpriv.tasks.training import Train

    with pytest.raises(InputError, match="cannot be encoded"):
        task_to_bytes(Train(Model("factory", (2,), 2, factory=lambda: None)))  # type: ignore[arg-type, return-value]
    with pytest.raises(InputError, match="pinned roster"):
        FederationServer(OverBytes(Loopback(population(), Protection())), protection=Protection(gram=("ckks",)))
    with pytest.raises(InputError, match="pinned roster"):
        FederationServer(OverBytes(Loopback(population(), Protection())), protection=Protection(gram=("haar",)))
    for data in (b'{"":"os.system"}', b"{", b'{"":"Start"}', b"[" * 100_000, b'{"":"Start","model":[],"seed":{"":"Train"}}'):
        assert task_from_bytes(data) == UnknownTask(data)


def test_cohorts_and_batches_are_the_same_in_memory_and_over_bytes() -> None:
    scene = population(clients_per_group=5)
    sampling = Sampling("global", 0.4)
    one = federation(scene.clients, seed=1, sampling=sampling)
    _, two = remote(scene, sampling=sampling)
    made = algorithm("fedavg", scene)
    a, b = after_rounds(made, one, 3), after_rounds(made, two, 3)
    np.testing.assert_allclose(a.model.value(), b.model.value(), rtol=1e-9)


# --- what is used up stays used up, and who is there is who it says --------------------------------------------------------------------


@pytest.mark.parametrize("purpose", ["sum/a", "sum/a\nb", "sum/a\\nb", "sum/ä"])
def test_a_transform_serves_one_value_whatever_its_name_also_where_state_is_in_files(tmp_path: Any, purpose: str) -> None:
    scene = population(groups=1, clients_per_group=3)
    protection = Protection(gram=("haar",), sum="haar")
    transport = Loopback(scene, protection, lambda client: DiskStore(tmp_path / str(client)))
    fed = FederationServer(OverBytes(transport), protection=protection, roster=transport.roster, entropy=ENTROPY, seed=1)
    fed.begin_round(0)
    task, said = training(scene), []
    for seed in range(3):
        held = fed.compute(task, {"model": task.model.init(seed)})
        ask = m.Give(fed.session, "sum", fed._known[held.key].number, held.parts, purpose, False)
        said.append(0 in fed._ask({0: ask}, "sum"))
    assert said == [True, False, False]
    assert {word for _, _, word in fed.refusals} == {"used-transform"}


@pytest.mark.slow
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), st.binary(), max_size=4), st.sampled_from(["held/1", "used/gram/0", "spent"]))
@example({"used/a\nb": b"1", "used/a": b"2", "used/a\\nb": b"3"}, "used/gram/0")
@settings(max_examples=25, deadline=None)
def test_a_folder_keeps_any_name_and_is_read_as_it_was_written_before(kept: dict[str, bytes], old: str) -> None:
    with TemporaryDirectory() as folder:
        store = DiskStore(folder)
        store._path(old).write_bytes(old.encode() + b"\n" + b"old\nvalue")
        assert store.get(old) == b"old\nvalue"
        for name, value in kept.items():
            store.put(name, value)
        assert sorted(store.names()) == sorted({*kept, old})
        assert {name: store.get(name) for name in kept} == kept
        for name in store.names():
            store.drop(name)
        assert not store.names()


class Stopped(Exception):
    """The process ends here."""


class Stopping(MemoryStore):
    """A store whose process is killed at its `left`-th change."""

    left = -1

    def _changes(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stopped

    def put(self, name: str, value: bytes) -> None:
        self._changes()
        super().put(name, value)

    def drop(self, name: str) -> None:
        self._changes()
        super().drop(name)


@pytest.mark.parametrize("at", range(1, 8))
def test_a_session_that_was_left_is_over_wherever_a_client_is_stopped_on_its_way_out(at: int) -> None:
    """Or a server that greets it with another session, and then with the first again, would find all marks of what is used up gone."""
    ours, other = bytes(16), bytes([1]) * 16
    store = Stopping()
    new_session(store, ours)
    for name in ("used/gram/0", "last-slot", SPENT):
        store[name] = b"mark"
    store.left = at
    with suppress(Stopped):
        new_session(store, other)
    store.left = -1
    for _ in range(2):
        with suppress(RemoteError):
            new_session(store, ours)
        assert store.get("session") != ours or {"used/gram/0", "last-slot"} <= set(store)
        new_session(store, other)
        with pytest.raises(RemoteError, match="wrong-session"):
            new_session(store, ours)
    assert not {"used/gram/0", "last-slot"} & set(store)
    assert store[SPENT] == b"mark"


def test_nobody_takes_the_place_of_another_with_what_it_was_shown_of_it() -> None:
    """Relays show keys and signatures to other clients; who enrols proves at once that it has the key."""
    scene = population(groups=1, clients_per_group=3)
    transport, fed = remote(scene, Protection(gram=("haar",)))
    exchange = transport.exchange
    shown, proof = fed._registry.peers[0], b""

    def lying(requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        answers = dict(exchange(requests, stage))
        if stage == "enrol" and 1002 in answers:
            answers[1002] = m.encode(m.Enrolled(m.VERSION, 0, transport.roster.keys[0], shown.encryption_key, shown.signature, proof))
        return answers

    own = FederationClient(transport.settings(0), lambda: transport.data[0], transport.stores[0])
    earlier = m.decode_answer(own.receive(m.encode(m.Enrol(m.VERSION, fed.session, bytes(16)))))
    assert isinstance(earlier, m.Enrolled)
    transport.exchange = lying  # type: ignore[method-assign]
    for known in (shown.signature, earlier.proof, b""):
        proof = known
        fed._registry.lose(2)
        assert fed.enrol() == ()
        assert fed.refusals[-1] == (0, "enrol", "bad-signature")
        assert fed._registry._places[0] == 1000


def test_without_a_roster_numbers_that_no_sum_can_name_are_refused() -> None:
    scene = population(groups=1, clients_per_group=3)
    transport = Loopback(scene, Protection())
    identity = transport.identities[2]
    transport.identities[2] = Identity(1 << 40, identity.signing_seed, identity.encryption_seed)
    transport.settings = lambda client: Settings(transport.identities[client])  # type: ignore[method-assign]
    fed = FederationServer(OverBytes(transport), entropy=ENTROPY)
    assert fed.enrol() == (0, 1)
    assert fed.refusals == [(1 << 40, "enrol", "unknown-client")]


# --- what one client says costs that client ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1 << 53, 1 << 53, 0), (0, 1 << 53, 1 << 53), (1 << 32, 1 << 32), (1 << 40, 1 << 40, 0), (3,)])
def test_shapes_that_no_array_has_are_malformed(shape: tuple[int, ...]) -> None:
    with pytest.raises(MalformedMessage):
        m.decode_answer(m.encode(m.Given((m.NamedArray("x", RawArray("<f8", shape, b"")),), 0)))  # type: ignore[arg-type]
    with pytest.raises(MalformedMessage):
        m.check_transformed(m.Transformed("sum/1", np.zeros(8), 4, 4, shape, 8))


def told(transport: Loopback, at: str, answers: Mapping[int, Any]) -> None:
    """Has clients say something else than they do at a stage: the answer, or the arrays in it by which all of theirs are replaced."""

    def tamper(client: int, stage: str, data: bytes) -> bytes:
        if stage != at or client not in answers:
            return data
        said, instead = m.decode_answer(data), answers[client]
        if isinstance(said, m.Given) and (isinstance(instead, RawArray) or not isinstance(instead, m.FederationMessage)):
            array: Any = instead if isinstance(instead, RawArray) else np.asarray(instead)
            instead = m.Given(tuple(m.NamedArray(one.name, array) for one in said.values), said.samples)
        return m.encode(instead)

    transport.tamper = tamper


HUGE = RawArray("<f8", (1 << 53, 1 << 53, 0), b"")


@pytest.mark.parametrize(
    "name", ["fedavg", "ifca", "cfl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pacfl", "ifca, k found"))]
)
@pytest.mark.parametrize("odd", [HUGE, np.nan, np.full(4, 1e200), np.zeros((2, 2), dtype=bool), 99, m.Acknowledged()], ids=str)
@pytest.mark.parametrize("protection", [Protection(), Protection(gram=("haar",), sum="haar")], ids=["clear", "haar"])
def test_an_odd_answer_costs_at_most_its_client(name: str, odd: Any, protection: Protection) -> None:
    scene = population(clients_per_group=3)
    made = algorithm(name, scene)
    for stage in ("sum", "gather", "gram"):
        transport, fed = remote(scene, protection)
        told(transport, stage, {2: odd})
        for _ in range(2):
            with suppress(ClientsLost):
                state = made.init(fed)
                break
        fed.begin_round(0)
        _, record = made.round(fed, state)
        assert {0, 1, 3, 4, 5} <= set(record.cohort)
        assert {client for client, _, _ in fed.refusals} <= {2}


def test_rows_too_large_for_inner_products_are_refused() -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene)

    def tamper(client: int, stage: str, data: bytes) -> bytes:
        said = m.decode_answer(data)
        if stage != "gram" or client != 4 or not isinstance(said, m.Given):
            return data
        rows = np.full(said.values[0].value.shape, 1e200)
        return m.encode(m.Given((m.NamedArray("signature", rows),), 0))

    transport.tamper = tamper
    made = algorithm("pacfl", scene)
    with pytest.raises(ClientsLost, match=r"\[4\]"):
        made.init(fed)
    assert fed.refusals == [(4, "gram", "malformed")]
    assert made.init(fed).clustering.clients == (0, 1, 2, 3, 5)


def test_gathered_values_are_as_most_have_them_and_finite() -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene)
    fed.begin_round(0)
    what = algorithm("fedavg", scene).serve(algorithm("fedavg", scene).init(fed))
    held = fed.compute(what.task, what.params, which=what.which)
    honest = fed.gather(held["loss"])
    told(transport, "gather", {0: np.zeros(3), 1: np.array(7), 2: np.array(np.inf), 3: HUGE, 4: m.Given((), 0)})
    assert fed.gather(held["loss"]) == {5: honest[5]}
    assert {(client, word) for client, _, word in fed.refusals} >= {(client, "malformed") for client in range(4)}


def test_a_fold_of_another_length_is_not_taken_and_the_next_client_is_asked() -> None:
    scene = population(groups=1, clients_per_group=4)
    transport, fed = remote(scene, Protection(gram=("haar",), sum="hadamard"))
    made, blind = algorithm("fedavg", scene), m.NamedArray("blind", np.zeros(3))
    told(transport, "fold", {0: m.Given((blind,), 0), 1: m.Given((blind,), 0)})
    state = after_rounds(made, fed, 3)
    assert {one for one in fed.refusals if one[1] == "fold"} == {(0, "fold", "malformed"), (1, "fold", "malformed")}
    _, honest = remote(scene, Protection(gram=("haar",), sum="hadamard"))
    other, what = after_rounds(made, honest, 3), made.serve(state)
    losses = [each.gather(each.compute(what.task, made.serve(one).params)["loss"]) for each, one in ((fed, state), (honest, other))]
    for client in range(4):
        np.testing.assert_allclose(losses[0][client]["loss"], losses[1][client]["loss"], rtol=1e-6)


def test_who_asks_for_more_than_there_are_asks_for_nobody() -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene)
    told(transport, "request", {1: np.arange(1 << 20), 2: np.zeros(2), 3: np.arange(6)})
    made = algorithm("fedfomo", scene)
    after_rounds(made, fed, 2)
    assert [one for one in fed.refusals if one[1] == "request"] == [(1, "request", "malformed"), (2, "request", "malformed")]


@pytest.mark.parametrize("how", ["garbage", "another shape", "not a number"])
def test_one_bad_box_costs_its_sender_and_nobody_else(how: str) -> None:
    scene = population(groups=1, clients_per_group=5)
    transport, fed = remote(scene)
    task = training(scene)
    held = fed.compute(task, {"model": task.model.init(max(0, fed.round))})["update"]
    if how == "garbage":
        told(transport, "seal", {3: m.SealedBoxes((bytes(60),) * 4)})
    else:
        values = Values(transport.stores[3])
        number = fed._known[held.key].number
        values.hold(number, {"update": np.zeros(3) if how == "another shape" else np.full(task.model.dimension, np.nan)}, Origin())
    relayed = fed.relay(held)
    assert relayed.clients == (0, 1, 2, 3, 4)
    number = fed._known[relayed.key].number
    for client in (0, 1, 2, 4):
        assert set(Values(transport.stores[client]).parts(number, ("update",))["update"]) == {0, 1, 2, 4} - {client}
    for name in ("fedfomo", "pfedlia"):
        transport, fed = remote(scene)
        if how == "garbage":
            told(transport, "seal", {3: m.SealedBoxes((bytes(60),) * 4)})
        after_rounds(algorithm(name, scene), fed, 2)
    told(transport, "seal", dict.fromkeys(range(5), m.SealedBoxes((bytes(60),) * 4)))
    with pytest.raises(TooFewClients):
        fed.relay(fed.compute(task, {"model": task.model.init(0)})["update"])
    assert {word for _, stage, word in fed.refusals if stage == "take"} == {"bad-box"}


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_two_that_advertise_one_key_for_the_next_sum_do_not_end_it(mode: Any) -> None:
    scene = population(clients_per_group=3)
    transport, fed = remote(scene, Protection(sum="secagg", min_cohort=2, secagg_mode=mode))
    delivering, drawn = False, [0, 0]
    exchange = transport.exchange

    def watched(requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        nonlocal delivering
        delivering = stage == "secagg Deliver"
        return exchange(requests, stage)

    def shared(which: int) -> Entropy:  # in different sums their keys are not held against each other
        def draw(count: int) -> bytes:
            if not delivering or count != 32:
                return ENTROPY(count)
            drawn[which] += 1
            return bytes([drawn[which]]) * 32

        return draw

    transport.exchange = watched  # type: ignore[method-assign]
    transport.entropy = lambda client: ENTROPY if client % 3 else shared(client // 3)
    task = training(scene)
    for number, k in ((0, 2), (1, 1), (2, 1)):
        fed.begin_round(number)
        held = fed.compute(task, {"model": task.model.init(max(0, fed.round))})
        means = fed.mean(held["update"], groups={client: client // 3 % k for client in held.clients}, k=k)
        assert [mean is not None and mean.count for mean in means] == [6 // k] * k
        transport.entropy = lambda client: ENTROPY


def test_a_count_above_the_public_maximum_ends_a_simulation_and_tells_no_server() -> None:
    scene = population(groups=1, clients_per_group=12)
    protection = Protection(sum="secagg", min_cohort=2, max_weight=5.0)
    here = federation(scene.clients, protection=protection, seed=1)
    _, fed = remote(scene, protection)
    task = training(scene)
    here.begin_round(0)
    with pytest.raises(InputError, match=r"above protection\.max_weight = 5"):
        here.mean(here.compute(task, {"model": task.model.init(0)})["update"], "examples")
    fed.begin_round(0)
    (mean,) = fed.mean(fed.compute(task, {"model": task.model.init(0)})["update"], "examples")
    assert mean is not None
    assert mean.count == 12, "a refusal would tell how many samples a client has"
    assert not fed.refusals


def test_what_arrived_of_a_group_that_fell_below_the_floor_is_on_record() -> None:
    scene = population(clients_per_group=4)
    transport, fed = remote(scene, Protection(gram=("haar",), sum="haar", min_cohort=3))
    fed.begin_round(0)
    task = training(scene)
    held = fed.compute(task, {"model": task.model.init(max(0, fed.round))})
    transport.kill_at = {"sum": {2, 3}}
    means = fed.mean(held["update"], groups={client: client // 4 for client in held.clients}, k=2)
    assert [mean and mean.count for mean in means] == [None, 4]
    sent = [(one.context["group"], one.clients) for one in fed.transcript.messages if one.kind == "blind update"]
    assert sent == [(0, (0, 1)), (1, (4, 5, 6, 7))]
