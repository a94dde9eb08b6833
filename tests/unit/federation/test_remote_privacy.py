"""Privacy over messages: bill and noise are the same in memory and over bytes, and each client holds the server to it by its own ledger.

Statistical tests run on fixed public entropy and reject at p < 1e-6.
"""

import inspect
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import ENTROPY, Loopback, remote
from msgspec import structs
from scenes import eye, federation, population, sums_of, training
from scipy import stats

from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.cfl.cfl import Same
from cflpriv.algorithms.pfedlia.influence import OnPart
from cflpriv.algorithms.shared.choosing import PickAndTrain
from cflpriv.contract.handles import Shared
from cflpriv.contract.protection import Protection
from cflpriv.engine import Engine, Result, Task, TaskInput
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation.client import FederationClient
from cflpriv.federation.client_ledger import SPENT, ClientLedger
from cflpriv.federation.server import BudgetsSpent, FederationServer
from cflpriv.federation.store import DiskStore, MemoryStore
from cflpriv.federation.transport import OverBytes
from cflpriv.privacy.client_level import client_noise
from cflpriv.privacy.receipts import PrivacyLedger
from cflpriv.privacy.settings import Noise, Privacy, Releases
from cflpriv.protocols.accounting import epsilon_of
from cflpriv.protocols.entropy import Entropy, public_entropy
from cflpriv.protocols.errors import TooFewClients
from cflpriv.protocols.events import GaussianEvent
from cflpriv.protocols.ledger import BudgetExceeded, Ledger
from cflpriv.tasks.evaluation import Evaluate, Losses
from cflpriv.tasks.training import Gradient, Start, Train
from cflpriv.transports.simulation import Simulated
from cflpriv.types import ClientData, Population

NOISE = Noise("add_remove", 1.5, 2.0, 0.5, 1.0, 0.25, 20, 4, 4.0, 1)
SAMPLE = Privacy("sample", "add_remove", 50.0, 1e-3, samples=20, sketch_dim=4)
TIGHT = replace(SAMPLE, epsilon=2.2)  # three trainings cost 2.132
CLIENT = Privacy("client", "add_remove", 4.0, 1e-3, clip_norm=0.5)
OPTIONS: dict[str, dict[str, Any]] = {
    "ifca": {"k": 2}, "hypcluster": {"k": 2}, "cfl": {"eps2": 0.75}, "pfedlia": {"warm_up": 1, "local_epochs": 2},
}  # fmt: skip


class Taped(Engine):
    """An engine that notes each client's secrets, in order."""

    def run(self, task: Task, inputs: Sequence[TaskInput], paths: Counter[tuple[str, str]] | None = None) -> list[Result]:
        self.secrets: dict[int, deque[bytes]] = getattr(self, "secrets", defaultdict(deque))
        for given in inputs:
            self.secrets[given.data.id].append(given.secret)
        return super().run(task, inputs, paths)


def algorithm(name: str, scene: Population) -> Any:
    wanted = inspect.signature(ALGORITHMS[name].make).parameters
    options: dict[str, Any] = dict(OPTIONS.get(name, {})) | ({"weights": "equal"} if "weights" in wanted else {})
    if "groups" in wanted:
        options["groups"] = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    return ALGORITHMS[name].make(training(scene), **options)


def accounts(privacy: Privacy) -> PrivacyLedger:
    return PrivacyLedger(replace(NOISE, relation=privacy.relation), Ledger(privacy.budget))


def private_server(
    scene: Population, privacy: Privacy, protection: Protection | None = None, entropy: Any = None, **options: Any
) -> tuple[Loopback, FederationServer]:
    """A federation over messages whose clients demand `privacy`."""
    transport = Loopback(scene, protection or Protection())
    transport.privacy = privacy
    transport.entropy = entropy or transport.entropy
    roster = transport.roster if transport.protection.secure or transport.protection.transformed else None
    fed = FederationServer(OverBytes(transport), protection=transport.protection, roster=roster, entropy=ENTROPY, seed=1, **options)
    fed.enrol()
    return transport, fed


def charged_rounds(made: Any, fed: Any, ledger: Ledger, rounds: int = 2) -> Any:
    state = made.init(fed)
    for number in range(rounds):
        fed.begin_round(number)
        ledger.round = number
        state, _ = made.round(fed, state)
    return state


def models(made: Any, state: Any) -> list[Any]:
    given = [one for value in made.serve(state).params.values() for one in (value if isinstance(value, list | tuple) else [value])]
    return [one.value() if isinstance(one, Shared) else np.asarray(one) for one in given]


def own_ledgers(transport: Loopback | Simulated) -> dict[int, float]:
    """By client: what its own ledger says it has spent. The key holder has no data and no ledger."""
    if isinstance(transport, Simulated):
        return {client: transport.client(client)._spending.spent() for client in transport.data}
    return {client: ClientLedger(transport.privacy, client, transport.stores[client]).spent() for client in transport.data}


def words(fed: FederationServer) -> set[str]:
    return {word for _, _, word in fed.refusals}


# --- unit = "sample" ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, one in ALGORITHMS.items() if one.sample_releases is not None])
def test_with_the_same_secrets_results_and_bill_are_the_same_in_memory_and_over_bytes(name: str) -> None:
    scene = population(clients_per_group=3)
    privacy = replace(SAMPLE, relation="replace_one") if name == "pfedlia" else SAMPLE
    here, there, engine = accounts(privacy), accounts(privacy), Taped()
    one = federation(scene, seed=1, privacy_ledger=here, privacy=privacy, engine=engine)
    made = algorithm(name, scene)
    a = charged_rounds(made, one, here.ledger)

    def entropy(client: int) -> Entropy:
        return lambda count: engine.secrets[client].popleft() if count == 32 else ENTROPY(count)

    transport, two = private_server(scene, privacy, privacy_ledger=there, entropy=entropy)
    b = charged_rounds(made, two, there.ledger)
    assert not [*one.refusals, *two.refusals]
    assert there.ledger.charges == here.ledger.charges != []
    assert max(there.ledger.spent(client) for client in there.ledger.clients) <= privacy.epsilon
    assert own_ledgers(transport) == own_ledgers(eye(one)) == {client: there.ledger.spent(client) for client in two.clients}
    assert made.describe(a).get("clustering") == made.describe(b).get("clustering")
    for x, y in zip(models(made, a), models(made, b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    assert not any(engine.secrets.values()), "the noise of every client is its own, all of it"


@pytest.mark.parametrize(
    ("name", "protection"),
    [("pacfl", Protection(gram=("haar",), sum="haar")), ("pacfl", Protection(sum="secagg", min_cohort=2)),
     ("cfl", Protection(sum="hadamard")),
     ("ifca", Protection(sum="secagg", min_cohort=2)), ("ifca", Protection(sum="secagg-oblivious", min_cohort=2)),
     ("ifca", Protection(sum="one_message", min_cohort=2)), ("ifca", Protection(sum="one_message-oblivious", min_cohort=2)),
     ("stocfl", Protection(gram=("haar",)))],
)  # fmt: skip
def test_under_protections_the_bill_is_the_same(name: str, protection: Protection) -> None:
    scene = population(groups=1, clients_per_group=6)
    here, there = accounts(SAMPLE), accounts(SAMPLE)
    one = federation(scene, protection, seed=1, privacy_ledger=here, privacy=SAMPLE)
    transport, two = private_server(scene, SAMPLE, protection, privacy_ledger=there)
    for fed, its in ((one, here), (two, there)):
        try:
            charged_rounds(algorithm(name, scene), fed, its.ledger)
        except Exception as error:
            if "no group reaches the minimum cohort size" not in str(error):
                raise
    assert not [*one.refusals, *two.refusals]
    spent = [sorted(one.ledger.spent(client) for client in one.ledger.clients) for one in (here, there)]
    if name == "ifca" and protection.sum == "secagg":  # which group is large enough to be summed is the noise's choice
        spent = [[max(one)] for one in spent]
    np.testing.assert_allclose(spent[0], spent[1], rtol=1e-9)
    for place, its, fed in ((eye(one), here, one), (transport, there, two)):
        assert own_ledgers(place) == {client: its.ledger.spent(client) for client in fed.clients}


def sent(fed: FederationServer, scene: Population, noise: Any, task: Any = None, number: int = 900) -> Any:
    """What client 0 answers to a training with this noise."""
    task = task or training(scene)
    params = (("model", m.to_addends(training(scene).model.init(0), {})),)
    ask = m.Compute(fed.session, 0, 1, number, (number,), m.Carried(task), params, None, noise)
    return fed._ask({0: ask}, "compute").get(0)


def test_a_client_that_demands_privacy_computes_nothing_without_it() -> None:
    scene = population(clients_per_group=3)
    transport, plain = private_server(scene, SAMPLE)
    plain.begin_round(0)
    task = training(scene)
    assert sent(plain, scene, None) is None
    assert plain.refusals[-1] == (0, "compute", "forbidden")
    noise = m.NoisySteps(**vars(NOISE))
    for field, value in (("clip_norm", 2.0), ("samples", 1000), ("relation", "replace_one"), ("sketch_dim", 0), ("loss_cap", 9.0)):
        assert sent(plain, scene, m.NoisySteps(**{**_fields(noise), field: value})) is None, field
    tiny = replace(task, clip_norm=1.0, sampling_rate=0.25, noise_multiplier=1e-9, public_samples=20)
    assert sent(plain, scene, noise, tiny) is None, "noise that the server wrote into the task itself"
    assert sent(plain, scene, noise, Evaluate(task.model)) is None, "what fails for it would tell of the data"
    assert sent(plain, scene, noise, PickAndTrain(Losses(task.model), Gradient(task.model), "gradient")) is None, (
        "noise in a part of it only"
    )
    assert words(plain) == {"forbidden"}
    assert sent(plain, scene, noise, OnPart(task, 0.2)) is None, "the split follows from the number of samples"
    assert plain.refusals[-1][2] == "bad-input"
    assert sent(plain, scene, m.NoisySteps(**{**_fields(noise), "training": float("nan")})) is None
    assert plain.refusals[-1][2] == "malformed"
    assert max(own_ledgers(transport).values()) == 0.0, "nothing was run"
    assert isinstance(sent(plain, scene, noise), m.Computed)
    assert [client for client, spent in own_ledgers(transport).items() if spent] == [0], "that it has a result is seen"


def _fields(noise: m.NoisySteps) -> dict[str, Any]:
    return {name: getattr(noise, name) for name in noise.__struct_fields__}


@pytest.mark.slow
def test_too_little_noise_is_over_the_clients_own_budget_and_sessions_do_not_refill_it() -> None:
    scene = population(clients_per_group=3)
    transport, fed = private_server(scene, TIGHT)
    fed.begin_round(0)
    noise = m.NoisySteps(**vars(NOISE))
    assert sent(fed, scene, m.NoisySteps(**{**_fields(noise), "training": 0.3})) is None
    assert words(fed) == {"over-budget"}
    assert own_ledgers(transport)[0] == 0.0
    for number in range(901, 904):
        assert isinstance(sent(fed, scene, noise, number=number), m.Computed)
        assert 0 in fed._ask({0: m.Give(fed.session, "sum", number, ("update",), "", False)}, "sum")
        assert 0 in fed._ask({0: m.Give(fed.session, "sum", number, ("update",), "", False)}, "sum"), "showing it again is free"
    spent = own_ledgers(transport)[0]
    assert 2.1 < spent <= 2.2
    again = FederationServer(OverBytes(transport), entropy=public_entropy("another session"))
    assert 0 in again.enrol()
    assert sent(again, scene, noise) is None
    assert words(again) == {"over-budget"}
    assert own_ledgers(transport)[0] == spent


def test_what_has_no_noise_is_not_released_and_counts_never_are() -> None:
    scene = population(clients_per_group=3)
    _, fed = private_server(scene, SAMPLE)
    fed.begin_round(0)
    noise = m.NoisySteps(**vars(NOISE))
    assert isinstance(sent(fed, scene, noise), m.Computed)
    for ask in (
        m.Give(fed.session, "gather", 900, ("count",), "", False), m.Give(fed.session, "sum", 900, ("update", "count"), "", False),
        m.Give(fed.session, "sum", 900, ("update",), "", True), m.Seal(fed.session, 900, ("count",), 901, ()),
    ):  # fmt: skip
        assert fed._ask({0: ask}, "release") == {}
    assert words(fed) == {"forbidden"}


def test_what_starts_from_a_value_costs_that_value_too_whatever_the_server_forgets() -> None:
    """A server cannot wash the price of a value off by dropping it in the very request that uses it."""
    scene = population(clients_per_group=3)
    transport, fed = private_server(scene, SAMPLE)
    fed.begin_round(0)
    noise = m.NoisySteps(**vars(NOISE))
    first = training(scene).model.init(0)
    assert isinstance(sent(fed, scene, noise), m.Computed)
    own = m.Addends(first, (), (m.OwnPart(900, "update", 1.0),))
    ask = m.Compute(fed.session, 0, 1, 901, (), m.Carried(training(scene)), (("model", own),), None, noise)
    assert isinstance(fed._ask({0: ask}, "compute")[0], m.Computed)
    assert 0 in fed._ask({0: m.Give(fed.session, "sum", 901, ("update",), "", False)}, "sum")
    ledger = Ledger.read((transport.stores[0].get(SPENT) or b"").decode())
    assert len(ledger.events(0)) == 2


def test_the_server_asks_its_ledger_before_anybody_else() -> None:
    scene = population(clients_per_group=3)
    its = accounts(replace(SAMPLE, epsilon=0.5))
    transport, fed = private_server(scene, SAMPLE, privacy_ledger=its)
    fed.begin_round(0)
    task, before = training(scene), list(transport.stages)
    with pytest.raises(BudgetExceeded, match="compute of Train: refused by the privacy ledger"):
        fed.compute(task, {"model": task.model.init(0)})
    assert transport.stages == before
    transport, fed = private_server(scene, SAMPLE, privacy_ledger=accounts(SAMPLE))
    fed.begin_round(0)
    held = fed.compute(task, {"model": task.model.init(0)})
    operations: list[Any] = [fed.mean, fed.gather, fed.relay, lambda held: fed.gram(held, then=lambda view: ({}, {}))]
    before = list(transport.stages)
    for operation in operations:
        with pytest.raises(InputError, match="without noise"):
            operation(held["count"])
    assert transport.stages == before
    with pytest.raises(InputError, match="Evaluate has no noise here"):
        fed.compute(Evaluate(task.model), {"model": task.model.init(0)})


def test_a_client_without_budget_computes_nothing_and_is_left_out() -> None:
    scene, its = population(clients_per_group=3), accounts(SAMPLE)
    transport, fed = private_server(scene, SAMPLE, privacy_ledger=its)
    settings = transport.settings
    poor = replace(SAMPLE, epsilon=0.1)
    transport.settings = lambda client: replace(settings(client), privacy=poor if client == 5 else SAMPLE)  # type: ignore[method-assign]
    made: Any = ALGORITHMS["pacfl"].make(training(scene), k=2, weights="equal")
    assert made.init(fed).clustering.clients == (0, 1, 2, 3, 4)
    assert fed.refusals == [(5, "compute", "over-budget")]
    assert [one.clients for one in its.ledger.charges] == [(0, 1, 2, 3, 4, 5)], "all were asked"


def thresholds(noise: m.NoisySteps, privacy: Privacy) -> tuple[set[str], float]:
    """What a server sees of client 0 that tries out learning rates by which sums of gradients overflow, and what the client was charged."""
    scene = population(clients_per_group=3)
    transport, fed = private_server(scene, privacy, protection=Protection(sum="secagg"))
    fed.begin_round(0)
    seen = set()
    for number, lr in enumerate(10.0 ** np.arange(30, 45, 0.5)):
        with np.errstate(all="ignore"):
            answer = sent(fed, scene, noise, replace(training(scene), lr=float(lr)), number + 900)
        seen.add("result" if isinstance(answer, m.Computed) and answer.result else fed.refusals[-1][2])
    return seen, own_ledgers(transport)[0]


def test_whether_a_task_has_a_result_is_paid_for_or_does_not_depend_on_the_data() -> None:
    """A server that lies chooses learning rates by which a sum of gradients overflows, or not: a bit of the data for each."""
    noise = m.NoisySteps(**vars(NOISE))
    seen, spent = thresholds(m.NoisySteps(**{**_fields(noise), "training": 1e-3}), SAMPLE)
    assert (seen, spent) == ({"over-budget"}, 0.0), "next to no noise, and nothing is run"
    shared = replace(SAMPLE, noise="shared")
    seen, spent = thresholds(m.NoisySteps(**{**_fields(noise), "training": 1e6, "sampling_rate": 1.0, "shares": 2}), shared)
    assert (seen, spent) == ({"result"}, 0.0), "the update has no noise yet"


def test_a_task_inside_a_task_does_not_hide_the_price_of_another() -> None:
    """Events go by name: of two inner trainings one would be for nothing."""
    scene = population(clients_per_group=3)
    _, fed = private_server(scene, SAMPLE)
    fed.begin_round(0)
    inner = PickAndTrain(Losses(training(scene).model), replace(training(scene), epochs=100), "update")
    assert sent(fed, scene, m.NoisySteps(**vars(NOISE)), PickAndTrain(inner, training(scene), "update")) is None
    assert words(fed) == {"forbidden"}


def test_a_failed_training_is_paid_for_and_looks_like_any_other() -> None:
    scene, its = population(clients_per_group=3), accounts(SAMPLE)
    transport, fed = private_server(scene, SAMPLE, privacy_ledger=its)
    fed.begin_round(0)
    task = replace(training(scene), lr=1e200, weight_decay=1e200)
    with np.errstate(all="ignore"):
        held = fed.compute(task, {"model": task.model.init(0)})
    assert held.clients == fed.clients
    assert words(fed) == set()
    assert its.ledger.clients == fed.clients
    assert own_ledgers(transport) == {client: its.ledger.spent(client) for client in fed.clients}


def test_a_client_without_demands_adds_the_noise_it_is_asked_for() -> None:
    scene, its = population(clients_per_group=3), accounts(SAMPLE)
    transport, fed = private_server(scene, Privacy(), privacy_ledger=its)
    made = algorithm("fedavg", scene)
    noisy = charged_rounds(made, fed, its.ledger)
    _, plain = remote(scene)
    assert not fed.refusals
    assert not np.allclose(noisy.model.value(), charged_rounds(made, plain, Ledger(SAMPLE.budget)).model.value())
    assert all(store.get(SPENT) is None for store in transport.stores.values())


class Dies(MemoryStore):
    """A store of a process that dies when it has to write something."""

    at = ""

    def put(self, name: str, value: bytes) -> None:
        if self.at and name.startswith(self.at):
            raise KeyboardInterrupt
        super().put(name, value)


@pytest.mark.parametrize("by", ["a task that is free", "a box that is public", "a sum that is paid"])
def test_a_client_that_dies_while_a_value_is_replaced_gives_it_to_nobody_for_less(by: str) -> None:
    """What is held as a number and what that number costs never belong to two values."""
    scene = population(clients_per_group=3)
    transport, fed = private_server(scene, SAMPLE)
    transport.stores[0] = store = Dies()
    fed._registry.lose(0)
    fed.enrol()
    fed.begin_round(0)
    noise, task = m.NoisySteps(**vars(NOISE)), training(scene)
    assert isinstance(sent(fed, scene, noise), m.Computed)
    spent = own_ledgers(transport)[0]
    zeros = (("update", m.to_addends(np.zeros(3), {})),)
    ask: m.PartyRequest = m.Compute(fed.session, 0, 1, 900, (900,), m.Carried(Same()), zeros, None, noise)
    if by == "a box that is public":
        ask = m.Take(fed.session, 900, ("update",), ())
    elif by == "a sum that is paid":
        start = m.Compute(fed.session, 0, 1, 901, (900, 901), m.Carried(Start(task.model, 0)), (), None, noise)
        assert isinstance(fed._ask({0: start}, "compute")[0], m.Computed)
        ask = m.AddUp(fed.session, 900, (m.OwnPart(901, "model", 1.0),))
    store.at = "held/"
    with pytest.raises(KeyboardInterrupt):
        fed._ask({0: ask}, "replace")
    store.at = ""
    for part in ("update", "own"):
        assert fed._ask({0: m.Give(fed.session, "sum", 900, (part,), "", False)}, "sum") == {}
    assert words(fed) == {"not-held"}
    assert own_ledgers(transport)[0] == spent


# --- unit = "client" ------------------------------------------------------------------------------------------------------------------


def clipped(privacy: Privacy, protection: Protection) -> tuple[dict[str, Any], Ledger]:
    """What a server does about whole clients, as options of a federation, and its ledger."""
    ledger, releases = Ledger(privacy.budget), Releases(signatures=int("gram" in privacy.local), trainings=2)
    mean, local = client_noise(privacy, releases, protection, ledger, public_entropy("noise"))
    return {"clipped": mean, "local": local}, ledger


def client_level(scene: Population, privacy: Privacy, protection: Protection | None = None) -> tuple[Loopback, FederationServer, Ledger]:
    made, ledger = clipped(privacy, protection or Protection())
    return *private_server(scene, privacy, protection, **made), ledger


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_a_trusted_server_adds_the_same_noise_in_memory_and_over_bytes(relation: Any) -> None:
    scene, privacy, task = population(clients_per_group=3), replace(CLIENT, relation=relation), training(population())
    options, ledger = clipped(privacy, Protection())
    one = federation(scene, seed=1, privacy=privacy, **options)
    transport, two, other = client_level(scene, privacy)
    for fed in (one, two):
        fed.begin_round(0)
    means = [fed.mean(fed.compute(task, {"model": task.model.init(0)})["update"])[0] for fed in (one, two)]
    assert means[0] is not None
    assert means[1] is not None
    np.testing.assert_allclose(means[0].parts["update"].value(), means[1].parts["update"].value(), rtol=1e-9)
    assert other.charges == ledger.charges
    assert own_ledgers(transport) == own_ledgers(eye(one)) == {client: other.spent(client) for client in two.clients}
    assert not [*one.refusals, *two.refusals]


def test_a_client_is_in_one_sum_of_a_mean_because_it_pays_for_one() -> None:
    scene = population(clients_per_group=3)
    transport, fed, ledger = client_level(scene, CLIENT)
    fed.begin_round(0)
    held = fed.compute(training(scene), {"model": training(scene).model.init(0)})["update"]
    before = list(transport.stages)
    with pytest.raises(InputError, match=r"overlapping groups under privacy\.unit = 'client'"):
        fed.mean(held, groups={client: (0, client % 2) for client in fed.clients}, k=2)
    assert (ledger.charges, transport.stages) == ([], before)


@pytest.mark.parametrize(
    ("protection", "counted"),
    [
        (Protection(sum="secagg", min_cohort=4, secagg_mode="passive"), 3),
        (Protection(sum="one_message", min_cohort=4), 0),
        (Protection(sum="one_message", min_cohort=4, helpers=5, helpers_colluding=2), 0),
    ],
)
def test_noise_inside_secure_sums_is_what_the_event_says(protection: Protection, counted: int) -> None:
    """Six shares of which three are counted; or the helpers' noise, once for each set that may collude, of which one is counted."""
    scene = population(groups=1, clients_per_group=6)
    task = training(scene)
    plain = federation(scene, seed=1)
    plain.begin_round(0)
    held = plain.compute(task, {"model": task.model.init(0)})["update"]
    vectors = [eye(plain).peek(client, held) for client in plain.clients]
    exact = np.mean([v * min(1, 0.5 / np.linalg.norm(v)) for v in vectors], axis=0)
    transport, fed, ledger = client_level(scene, CLIENT, protection)
    errors = []
    for _ in range(2):
        fed.begin_round(0)
        (mean,) = fed.mean(fed.compute(task, {"model": task.model.init(0)})["update"])
        assert mean is not None
        assert mean.count == 6
        errors.append(mean.parts["update"].value() - exact)
    assert not fed.refusals
    assert all(not np.array_equal(errors[0], one) for one in errors[1:])
    event = ledger.charges[0].events[0]
    assert epsilon_of([event] * 2, 1e-3) <= 4.0
    assert own_ledgers(transport) == {client: ledger.spent(client) for client in fed.clients}
    assert isinstance(event, GaussianEvent)
    assert event.shares == counted
    times = 6 / counted if counted else comb(protection.helpers, protection.helpers_colluding) + 6 / protection.noise_shares
    variance = (event.noise_multiplier * event.sensitivity) ** 2 * times * (1 + 1 / 768)
    total = float(np.square(np.concatenate(errors) * 6).sum()) / variance
    assert stats.chi2(2 * exact.size).sf(total / 1.01) > 1e-6
    assert stats.chi2(2 * exact.size).cdf(total) > 1e-6
    with pytest.raises(BudgetExceeded):
        fed.mean(fed.compute(task, {"model": task.model.init(0)})["update"])


def test_rows_by_local_noise_are_charged_every_time_and_carry_the_clients_own() -> None:
    scene, privacy = population(clients_per_group=3), replace(CLIENT, local=("gram",))
    transport, fed, ledger = client_level(scene, privacy)
    fed.begin_round(0)
    task = training(scene)
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    seen: list[Any] = []

    def look(view: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        seen.append(view.gram.matrix())
        return {}, {}

    fed.gram(held, then=look)
    first = ledger.spent(0)
    fed.gram(held, then=look)
    assert 0 < first < ledger.spent(0)
    assert not np.array_equal(seen[0], seen[1])
    assert own_ledgers(transport) == {client: ledger.spent(client) for client in fed.clients}
    before, bounded, number = own_ledgers(transport), m.Bounded("add_remove", 1.0, 5.0), fed._known[held.key].number
    assert fed._ask({0: m.Give(fed.session, "gram", number, ("update", "count"), "", False, bounded)}, "gram") == {}
    assert words(fed) == {"forbidden"}, "two rows, each of norm 1, at the price of one"
    assert own_ledgers(transport) == before
    _, strict, _ = client_level(scene, CLIENT)
    held = strict.compute(task, {"model": task.model.init(0)})["update"]
    assert strict._ask({0: m.Give(strict.session, "gram", strict._known[held.key].number, ("update",), "", False, bounded)}, "gram") == {}
    assert words(strict) == {"forbidden"}, "its settings do not ask for it"


@pytest.mark.parametrize("operation", ["gather", "relay", "gram"])
def test_a_server_refuses_to_release_what_has_no_private_form(operation: str) -> None:
    """Whatever an algorithm declares. Nobody is asked, and the clients, which would refuse, spend nothing."""
    transport, fed, ledger = client_level(population(clients_per_group=3), CLIENT)
    fed.begin_round(0)
    task = training(population())
    held = fed.compute(task, {"model": task.model.init(0)})["update"]
    asked = len(transport.stages)
    calls: dict[str, Any] = {
        "gather": lambda: fed.gather(held), "relay": lambda: fed.relay(held), "gram": lambda: fed.gram(held, then=lambda view: ({}, {})),
    }  # fmt: skip
    with pytest.raises(InputError, match=f"^{operation}: releases single clients' values, which have no private form"):
        calls[operation]()
    assert len(transport.stages) == asked
    assert not ledger.charges
    assert set(own_ledgers(transport).values()) == {0.0}


def test_a_client_whose_whole_is_private_gives_nothing_else() -> None:
    scene = population(clients_per_group=3)
    transport, fed, _ = client_level(scene, CLIENT)
    fed.begin_round(0)
    task = training(scene)
    number = fed._known[fed.compute(task, {"model": task.model.init(0)}).key].number

    def give(operation: Any, noise: m.Bounded | None, weigh: bool = False) -> m.Give:
        return m.Give(fed.session, operation, number, ("update",), "", weigh, noise)

    good = m.Bounded("add_remove", 0.5, 3.0)
    for ask in (
        give("sum", None), give("gather", None), give("gather", good), give("gram", None), give("sum", m.Bounded("add_remove", 0.6, 3.0)),
        give("sum", m.Bounded("replace_one", 0.5, 3.0)), give("sum", m.Bounded("add_remove", 0.5, 0.0)), give("sum", good, True),
        m.Seal(fed.session, number, ("update",), 900, ()),
    ):  # fmt: skip
        assert fed._ask({0: ask}, "release") == {}
    assert words(fed) == {"forbidden"}
    assert fed._ask({0: give("sum", m.Bounded("add_remove", 0.5, 0.1))}, "sum") == {}
    assert fed.refusals[-1][2] == "over-budget"
    answer = fed._ask({0: give("sum", m.Bounded("add_remove", 1e-3, 3.0))}, "sum")[0]
    assert isinstance(answer, m.Given)
    assert np.linalg.norm(answer.values[0].value) <= 1e-3 * (1 + 1e-9)
    assert own_ledgers(transport)[0] > 0


class Slow(DiskStore):
    """Long enough between reading a ledger and writing it for another process to do the same."""

    def get(self, name: str) -> bytes | None:
        value = super().get(name)
        if name == SPENT:
            time.sleep(0.05)
        return value


def test_two_requests_at_once_over_one_state_folder_are_both_paid_for(tmp_path: Path) -> None:
    """Two runs, or two processes started with one client's settings; each file lock is a process's own, as here each thread's."""
    scene = population(clients_per_group=3)
    transport, _, _ = client_level(scene, CLIENT)
    transport.stores[0] = Slow(tmp_path)
    fed = FederationServer(OverBytes(transport), entropy=ENTROPY)
    fed.enrol()
    task = training(scene)
    number = fed._known[fed.compute(task, {"model": task.model.init(0)}).key].number
    ask = m.encode(m.Give(fed.session, "sum", number, ("update",), "", False, m.Bounded("add_remove", 0.5, 6.0)))

    def once(_: int) -> m.Answer:
        return m.decode_answer(FederationClient(transport.settings(0), partial(transport.data.__getitem__, 0), Slow(tmp_path)).receive(ask))

    with ThreadPoolExecutor(3) as pool:
        assert all(isinstance(one, m.Given) for one in pool.map(once, range(3)))
    assert len(Ledger.read((Slow(tmp_path).get(SPENT) or b"").decode()).events(0)) == 3
    assert SPENT in Slow(tmp_path).names()
    assert "" not in Slow(tmp_path).names()


@pytest.mark.parametrize("way", ["secagg", "one_message"])
def test_a_client_adds_no_share_that_is_less_than_its_own_floor_needs(way: str) -> None:
    """With helpers it adds none under terms by which they add other noise, or none."""
    scene = population(groups=1, clients_per_group=6)
    protection = Protection(sum=way, min_cohort=4, secagg_mode="passive" if way == "secagg" else "active")
    task = training(scene)
    for change, word in (
        ({"survivors": 4}, "forbidden"), ({"survivors": 1 << 20}, "forbidden"), ({"clip_norm": 0.6}, "forbidden"),
        ({"clip_norm": 0.0}, "forbidden"),
        ({"deviation": 1e-3}, "over-budget"), ({"deviation": float("inf")}, "malformed"), ({"deviation": 1e-320}, "malformed"),
        (None, "forbidden"),
    ):  # fmt: skip
        transport, fed, _ = client_level(scene, CLIENT, protection)
        fed.begin_round(0)
        held = fed.compute(task, {"model": task.model.init(0)})["update"]
        means = sums_of(fed)

        def lying(*said: Any, change: Any = change, means: Any = means) -> m.SumStep:
            step: m.SumStep = type(means)._like(means, *said)
            assert step.noise is not None
            return structs.replace(step, noise=None if change is None else structs.replace(step.noise, **change))

        object.__setattr__(means, "_like", lying)  # all are told the same lie; who alone is told one is in no sum at all
        with pytest.raises(BudgetsSpent if word == "over-budget" else TooFewClients):
            fed.mean(held)
        stage = "secagg Deliver" if way == "secagg" else "sum"
        assert fed.refusals == [(client, stage, word) for client in range(6)], change
        assert own_ledgers(transport)[0] == 0.0


def test_all_members_add_the_same_share_of_noise_or_there_is_no_sum() -> None:
    scene = population(groups=1, clients_per_group=8)
    transport, fed, _ = client_level(scene, CLIENT, Protection(sum="secagg", min_cohort=4))
    honest, victim = transport.exchange, 2

    def lying(requests: Any, stage: str) -> Any:
        """A thousandth of the noise to all others, in proportion to what they are to send: each ledger alone would take it."""
        said = {place: m.decode_ask(data) for place, data in requests.items()}
        for place, ask in said.items():
            if isinstance(ask, m.SumStep) and ask.noise is not None and place != 1000 + victim:
                less = structs.replace(ask.noise, clip_norm=ask.noise.clip_norm * 1e-3, deviation=ask.noise.deviation * 1e-3)
                said[place] = structs.replace(ask, noise=less)
        return honest({place: m.encode(ask) for place, ask in said.items()}, stage)

    transport.exchange = lying  # type: ignore[method-assign]
    fed.begin_round(0)
    task = training(scene)
    with pytest.raises(TooFewClients):
        fed.mean(fed.compute(task, {"model": task.model.init(0)})["update"])
    assert {(client, word) for client, _, word in fed.refusals} == {(c, "unlisted-model") for c in range(8) if c != victim}


# --- what a server learns of whether a task has a result ------------------------------------------------------------------------------


class Liar:
    """A server of one client with `y` as its labels: it asks for what it likes."""

    def __init__(self, y: Sequence[int], privacy: Privacy = SAMPLE, protection: Protection | None = None) -> None:
        x = np.random.default_rng(3).normal(size=(len(y), 3)).astype(np.float32)
        scene = population(clients_per_group=1)
        self.transport = Loopback(scene, protection or Protection())
        self.transport.privacy = privacy
        self.transport.data[0] = ClientData(0, x, np.array(y), x[:1], np.array(y[:1]))
        self.noise = None if privacy.unit == "none" else m.NoisySteps("add_remove", 1e3, 1e3, 1e-3, 1.0, 1.0, 20, 4, 4.0, 0, 0)
        self.ask(m.Enrol(m.VERSION, bytes(16), bytes(16)))

    def ask(self, ask: m.PartyRequest) -> m.Answer:
        transport = self.transport
        client = FederationClient(transport.settings(0), lambda: transport.data[0], transport.stores[0], ENTROPY)
        return m.decode_answer(client.receive(m.encode(ask)))

    def compute(self, held: int, task: Task, which: m.HeldValue | None = None, **params: Any) -> str:
        """Have a task run on numbers (one, or a list to pick from) or held parts; "computed", or the word of the refusal."""
        named = tuple((name, self._value(value)) for name, value in params.items())
        answer = self.ask(m.Compute(bytes(16), 0, 0, held, (1, 2), m.Carried(task), named, which, self.noise))
        return answer.code if isinstance(answer, m.Refused) else "computed"

    @staticmethod
    def _value(value: Any) -> m.Addends | m.Many | m.HeldValue:
        def one(number: Any) -> m.Addends:
            return m.Addends(np.asarray(number), (), ())

        return value if isinstance(value, m.HeldValue) else m.Many(tuple(map(one, value))) if isinstance(value, list) else one(value)

    @property
    def spent(self) -> float:
        return ClientLedger(self.transport.privacy, 0, self.transport.stores[0]).spent()


LINEAR = Model("linear", (3,), 2)
PICK = PickAndTrain(Losses(LINEAR), Train(LINEAR, 1, 0, 0.1), "update")


def refusals(part: str, privacy: Privacy, protection: Protection) -> list[list[str]]:
    """What two clients say to lists of seven lengths, to be picked from by `part`: one has 37 samples of label 0, one 5 of label 1."""
    said = []
    for labels in ([0] * 37, [1] * 5):
        liar = Liar(labels, privacy, protection)
        assert liar.compute(1, Train(LINEAR, 1, 0, 0.1), model=np.zeros(8, np.float32)) == "computed"
        assert liar.compute(2, PICK, model=[np.zeros(8, np.float32), np.arange(8, dtype=np.float32)]) == "computed"
        which = m.HeldValue(1 if part == "count" else 2, part)
        said.append([liar.compute(9, Start(LINEAR, 0), which, x=[0.0] * length) for length in (1, 2, 3, 5, 6, 37, 38)])
        assert privacy.unit == "none" or liar.spent == 0
    return said


@pytest.mark.parametrize(("part", "word"), [("choice", "computed"), ("count", "forbidden"), ("loss", "forbidden")])
def test_a_list_that_is_too_short_tells_nothing_of_what_a_client_picks_by(part: str, word: str) -> None:
    assert refusals(part, SAMPLE, Protection()) == [[word] * 7] * 2


@pytest.mark.parametrize(("part", "word"), [("choice", "computed"), ("count", "bad-input"), ("loss", "bad-input")])
def test_nor_does_it_under_secure_sums_without_privacy(part: str, word: str) -> None:
    assert refusals(part, Privacy(), Protection(sum="secagg")) == [[word] * 7] * 2


def test_no_task_starts_from_what_was_computed_without_noise() -> None:
    liar = Liar([0, 1] * 10)
    assert liar.compute(1, PICK, model=[np.zeros(8, np.float32)]) == "computed"
    for rate in (1e-3, 1e10):  # whether it diverges would tell how large the loss is
        assert liar.compute(2, Train(LINEAR, 1, 0, rate, weight_decay=rate), model=m.HeldValue(1, "loss")) == "forbidden"
    assert liar.spent == 0


@pytest.mark.parametrize("privacy", [SAMPLE, CLIENT])
def test_a_model_with_too_few_labels_or_words_tells_nothing_of_the_data(privacy: Privacy) -> None:
    said = []
    for labels in ([0, 1] * 10, [0, 1] * 9 + [1, 7], [6, 7] * 10):
        liar = Liar(labels, privacy)
        liar.noise = liar.noise if privacy.unit == "sample" else None
        words = [Model("linear", (3,), classes) for classes in (2, 7, 8)] + [Model("lstm", (3,), 2, hidden=2)]
        tasks: list[tuple[Task, Model]] = [(Train(model, 1, 0, 0.1), model) for model in words]
        tasks += [(PickAndTrain(Losses(model), Train(model, 1, 0, 0.1), "update"), model) for model in words]
        said.append([
            liar.compute(1, task, model=[start] if isinstance(task, PickAndTrain) else start)
            for task, model in tasks
            for start in [np.zeros(model.dimension, np.float32)]
        ])  # fmt: skip
    assert said == [["computed"] * 8] * 3
    assert Liar([0, 1], privacy).compute(1, Train(Model("lstm", (3,), 2, 2, (1.0,)), 1, 0, 0.1), model=np.zeros(1)) == "bad-settings"
