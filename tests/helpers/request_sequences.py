"""A server that lies: random sequences of requests, in and out of a contract, and what a model of the clients says of their answers.

The model is independent of the clients' rules. It keeps the linear system of all sums that were opened (a column for each value: of which
client, at which model), and reports a breach where

- a combination of sums shows a value of fewer than `MIN_COHORT` clients, or a sum's effective number of clients is below it;
- one value is in two sums that differ in weights, clip or quantiser;
- a request is answered that is not declared, or more often than declared, in a round that has passed, or in a second session;
- a value or a score leaves by another operation than declared, or a score without `allow_scores`;
- work beyond the client's limits is done, or clients with neighbouring data answer differently.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import combinations
from random import Random
from typing import Any

import msgspec
import numpy as np
from scenes import population

from cflpriv.aggregation.secagg import bound
from cflpriv.contract.protection import Protection
from cflpriv.contract.schedule import Schedule, request
from cflpriv.engine import Engine
from cflpriv.engine.models import Model
from cflpriv.federation import messages as m
from cflpriv.federation.client import FederationClient
from cflpriv.federation.contract_record import contract_bytes, make_contract
from cflpriv.federation.host import ClientHost
from cflpriv.federation.limits import Limits
from cflpriv.federation.settings import Settings
from cflpriv.federation.store import MemoryStore, ObjectStore
from cflpriv.federation.values import trace
from cflpriv.federation.work import alternatives_of, request_digest
from cflpriv.privacy.settings import Privacy
from cflpriv.protocols import secagg
from cflpriv.protocols.entropy import system_entropy
from cflpriv.protocols.errors import ProtocolError, RemoteError
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.tasks.evaluation import Losses
from cflpriv.tasks.joining import Join
from cflpriv.tasks.training import Train
from cflpriv.types import ClientData

CLIENTS, MIN_COHORT, ROUNDS, SEED = 5, 3, 3, 1
PLACES = tuple(range(CLIENTS))
SCENE = population(groups=1, clients_per_group=CLIENTS, samples=8, test_samples=1, shape=(2,), classes=2, seed=3)
MODEL = Model("linear", SCENE.shape, SCENE.classes)
TRAIN = Train(MODEL, epochs=1, batch_size=0, lr=0.1)
SLOW = replace(TRAIN, lr=0.05)
"""Another training, whose update is half of the declared one's: all data in one step."""
LOSSES = Losses(MODEL)
LARGE = Train(Model("mlp", SCENE.shape, SCENE.classes, hidden=5000), epochs=1, batch_size=0)
LARGE_MODEL = np.zeros(LARGE.model.dimension, np.float32)
OVERFLOWS = 1e35
"""A learning rate with which only a sample as far away as the neighbour's leads beyond float32."""
LIMITS = Limits(numbers=1000)
IDENTITIES = tuple(Identity.create(client) for client in PLACES)
ROSTER = Roster(tuple(identity.public() for identity in IDENTITIES))
MODELS = tuple(MODEL.init(seed) for seed in (1, 2))
DEAD, OVERFLOWING = 2, 3
DEAD_MODEL = np.full(MODEL.dimension, 1e8, np.float32)
"""Training does not move it: a step is lost in rounding."""
OFFERED = (*MODELS, DEAD_MODEL)
LIMIT = 16.0


def _uneven(data: Sequence[ClientData]) -> tuple[ClientData, ...]:
    """The first client has twice as many samples as the others."""
    half = len(data[0].y_train) // 2
    return (data[0], *(replace(client, x_train=client.x_train[:half], y_train=client.y_train[:half]) for client in data[1:]))


DATA = _uneven(SCENE.clients)


def _neighbour() -> tuple[ClientData, ...]:
    """The same data with another first sample of the first client, which is far away."""
    x = DATA[0].x_train.copy()
    x[0] = 1e6
    return (replace(DATA[0], x_train=x), *DATA[1:])


NEIGHBOURS = _neighbour()
ENGINE = Engine()


@dataclass(frozen=True)
class Rules:
    """What the operator of all clients chose in a sequence: whether there is a contract, scores are allowed, weights are sample counts."""

    contract: bool
    scores: bool
    weighted: bool
    carrier: str

    @property
    def protection(self) -> Protection:
        return Protection(sum="secagg", secagg_clip=8.0, max_weight=LIMIT if self.weighted else 0.0)


@lru_cache
def contract_of(rules: Rules, name: str) -> bytes:
    """Each round a choice, which is shown, and a training, whose update is summed."""
    schedule = Schedule(round=(request(LOSSES, {"choice": "gather"}), request(TRAIN, {"update": "sum"})))
    return contract_bytes(
        make_contract(
            run=name,
            algorithm="sequences",
            settings={},
            rounds=ROUNDS,
            seed=SEED,
            schedule=schedule,
            protection=rules.protection,
            privacy=Privacy(),
            roster=ROSTER,
        )
    )


@dataclass
class Value:
    """A value that clients hold under a number: its parts, what each client's is (column and factor), and its name for sums.

    `asked`: by client what was asked: the request, or the model that it chose and how it chose.
    """

    number: int
    task: str
    columns: dict[int, tuple[tuple[int, int], float]]
    names: dict[int, bytes]
    parts: tuple[str, ...] = ("update",)
    asked: dict[int, tuple[bytes | str, ...]] = field(default_factory=dict)


class Breach(AssertionError):
    """The model of the clients says that they should not have answered so."""


@dataclass
class Server:
    """The lying server and the model. `twins`: the same clients with neighbouring data, which must answer alike."""

    rules: Rules
    draw: Random
    parties: dict[int, FederationClient] = field(default_factory=dict)
    twins: dict[int, FederationClient] = field(default_factory=dict)
    session: bytes = b""
    contract: str = ""
    round: int = 0
    slot: int = 0
    numbers: int = 0
    values: list[Value] = field(default_factory=list)
    rows: list[dict[tuple[int, int], float]] = field(default_factory=list)
    settings: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)
    answered: dict[tuple[str, int, str, int], set[tuple[bytes | str, ...]]] = field(default_factory=dict)
    latest: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, bytes] = field(default_factory=dict)

    def start(self) -> None:
        """Fresh clients."""
        for client in PLACES:
            settings = Settings(
                IDENTITIES[client], self.rules.protection, ROSTER, limits=LIMITS, needs_contract=self.rules.contract,
                allow_scores=self.rules.scores,
            )  # fmt: skip
            for parties, data in ((self.parties, DATA), (self.twins, NEIGHBOURS)):
                if parties is self.twins and client != 0:
                    continue
                store = ObjectStore() if self.rules.carrier == "memory" else MemoryStore()
                parties[client] = FederationClient(settings, _same(data[client]), store)
        self.enrol("run")

    # --- messages

    def ask(self, asks: Mapping[int, m.PartyRequest], twins: bool = True) -> dict[int, m.Answer]:
        """The answers of clients; those of the twin are compared, where nothing that is released differs."""
        answers = self._asked(self.parties, asks)
        if twins and 0 in asks:
            other = self._asked(self.twins, {0: asks[0]})[0]
            if _form(other) != _form(answers[0]):
                raise Breach(f"neighbouring data: {_form(answers[0])} and {_form(other)} on {type(asks[0]).__name__}")
        return answers

    def _asked(self, parties: Mapping[int, FederationClient], asks: Mapping[int, m.PartyRequest]) -> dict[int, m.Answer]:
        if self.rules.carrier == "bytes":
            return {client: m.decode_answer(parties[client].receive(m.encode(ask))) for client, ask in asks.items()}
        found = ClientHost(parties, ENGINE).answer(asks)
        return {
            client: m.Refused(getattr(answer, "code", "bad-input")) if isinstance(answer, Exception) else answer
            for client, answer in found.items()
        }

    def enrol(self, name: str, session: bytes | None = None) -> bool:
        """Greet all clients for a session."""
        session = session or system_entropy(16)
        data = contract_of(self.rules, name) if self.rules.contract else b""
        answers = self.ask(dict.fromkeys(PLACES, m.Enrol(m.VERSION, session, bytes(16), data)), twins=False)
        self._asked(self.twins, {0: m.Enrol(m.VERSION, session, bytes(16), data)})
        if not all(isinstance(answer, m.Enrolled) for answer in answers.values()):
            return False
        if session != self.session:
            self.values, self.slot = [], 0
        self.session, self.contract = session, name
        return True

    # --- requests

    def compute(
        self, task: Any, label: str, params: m.SentParameters, which: m.HeldValue | None, offered: Sequence[int],
        chooser: Value | None = None,
    ) -> Value | None:  # fmt: skip
        """Ask all clients for a task at models (by number in `offered`: one, or a list of which each takes its own choice)."""
        self.numbers += 1
        live = tuple(value.number for value in self.values)
        ask = m.Compute(self.session, self.round, SEED, self.numbers, live, m.Carried(task), params, which)
        answers = self.ask(dict.fromkeys(PLACES, ask))
        done = [client for client, answer in answers.items() if isinstance(answer, m.Computed) and answer.result]
        if not done:
            return None
        digest = request_digest(ask)
        self._check_declared(label)
        names, columns, asked = {}, {}, {}
        for client in done:
            choice = -1 if chooser is None else int(self.parties[client].values.value(m.HeldValue(chooser.number, "choice")))
            at = offered[choice] if chooser is not None else offered[0]
            alternatives = alternatives_of(ask, digest)
            name = alternatives.get(choice, alternatives.get(-1, digest))
            names[client] = trace([name] if chooser is None else [name, chooser.names[client]])
            factor = 0.0 if at == DEAD else 0.5 if task == SLOW else 1.0
            columns[client] = ((client, at), factor)
            # the same request again is no new one, also if the choice was computed again and has another number
            asked[client] = (digest,) if chooser is None else (str(at), *chooser.asked[client])
        self._check_once(label, asked)
        value = Value(self.numbers, label, columns, names, tuple(task.parts), asked)
        self.values.append(value)
        return value

    def _check_declared(self, label: str) -> None:
        if label == "large":
            raise Breach("work beyond the client's limits")
        if not self.rules.contract:
            return
        if self.sessions.setdefault(self.contract, self.session) != self.session:
            raise Breach(f"contract {self.contract!r} is answered in a second session")
        if label not in ("train", "losses"):
            raise Breach(f"{label}: answered, and not declared")
        if not self.latest.get(self.contract, 0) <= self.round < ROUNDS:
            raise Breach(f"round {self.round} is answered, which has passed, or is beyond the last")
        self.latest[self.contract] = self.round

    def _check_once(self, label: str, asked: Mapping[int, tuple[bytes | str, ...]]) -> None:
        for client, what in asked.items() if self.rules.contract else ():
            known = self.answered.setdefault((self.contract, self.round, label, client), set())
            known.add(what)
            if len(known) > 1:
                raise Breach(f"{label}: answered twice in round {self.round}, with different parameters")

    def copied(self, value: Value, how: str) -> Value | None:
        """A copy of a value that clients make: by adding up own parts, or by a task that joins."""
        if how == "join":
            made = self.compute(Join((value.parts[0],)), "join", ((value.parts[0], m.HeldValue(value.number, value.parts[0])),), None, (0,))
            if made is None:
                return None
            ask_names = {client: trace([made.names[client], value.names[client]]) for client in made.names}
            made.columns, made.names = value.columns, ask_names
            return made
        self.numbers += 1
        ask = m.AddUp(self.session, self.numbers, (m.OwnPart(value.number, value.parts[0], 1.0),))
        answers = self.ask(dict.fromkeys(PLACES, ask))
        if not any(isinstance(answer, m.Computed) and answer.result for answer in answers.values()):
            return None
        made = Value(self.numbers, "copy", value.columns, value.names, ("own",))
        self.values.append(made)
        return made

    def gather(self, value: Value, part: str) -> None:
        """Have a part shown as it is."""
        ask = m.Give(self.session, "gather", value.number, (part,), "", False)
        answers = self.ask(dict.fromkeys(PLACES, ask))
        if not any(isinstance(answer, m.Given) for answer in answers.values()):
            return
        if value.task == "losses" and part == "choice":
            if self.rules.contract and not self.rules.scores:
                raise Breach("a choice leaves without allow_scores")
            return
        if self.rules.contract:
            raise Breach(f"{part} of {value.task} leaves by gather, which is not declared")

    def sum(self, value: Value, cohort: Collection[int], changes: Mapping[str, Any], listed: int) -> None:
        """A secure sum of a value over some clients under terms with these changes."""
        self.slot += 1
        slot, part = (self.round + 1, self.slot), value.parts[0]
        step = m.SumStep(self.session, slot, value.number, (part,), listed, "sum", None, b"")
        names = sorted({bound(step, name) for client, name in value.names.items() if client in cohort})[:listed]
        others = [sha256(f"{self.slot} {place}".encode()).digest() for place in range(listed - len(names))]
        weights: dict[str, Any] = {"weight_limit": LIMIT} if changes.get("by samples") else {}
        changed = {key: item for key, item in changes.items() if key != "by samples"}
        try:
            honest = secagg.make_terms(
                session=self.session, slot=slot, cohort=sorted(cohort), models=[*names, *others], dimension=MODEL.dimension, clip=8.0,
                min_cohort=MIN_COHORT, roster=ROSTER, **weights,
            )  # fmt: skip
            machine = secagg.Server(msgspec.structs.replace(honest, **changed), roster=ROSTER)
            while outbox := machine.advance():
                asks = {client: msgspec.structs.replace(step, message=message) for client, message in outbox.items()}
                for client, answer in self.ask(asks, twins=False).items():
                    if isinstance(answer, m.Stepped):
                        _receive(machine, client, answer.message)
            result = machine.result
        except (ProtocolError, ValueError):
            return
        self._opened(value, result)

    def _opened(self, value: Value, result: secagg.Sum[secagg.Terms]) -> None:
        terms, row = result.terms, dict[tuple[int, int], float]()
        weights = {}
        for client in result.survivors:
            counted = min(max(float(len(DATA[client].y_train)), terms.least_weight), terms.weight_limit) if terms.weight_limit else 1.0
            weights[client] = counted / (terms.weight_limit or 1.0)
            column, factor = value.columns[client]
            if factor:
                row[column] = weights[client] * factor
        effective = sum(weights.values()) ** 2 / sum(weight**2 for weight in weights.values())
        if effective < MIN_COHORT - 1e-9 or len(result.survivors) < MIN_COHORT:
            raise Breach(f"the effective number of clients of a sum is {effective:.3f}")
        if self.rules.contract and value.task not in ("train", "copy"):
            raise Breach(f"{value.task} leaves by a sum, which is not declared")
        form = (terms.clip, terms.levels, terms.bits, terms.weight_limit, terms.least_weight)
        for client in result.survivors:
            column, factor = value.columns[client]
            if factor and self.settings.setdefault(column, (*form, weights[client], result.survivors)) != (
                *form, weights[client], result.survivors,
            ):  # fmt: skip
                raise Breach(f"the value {column} is in two sums that differ in more than the others' values")
        if row:
            self.rows.append(row)
            isolated = isolating(self.rows)
            if isolated:
                raise Breach(f"a combination of {len(self.rows)} sums shows values of clients {isolated} alone")


def _same(data: ClientData) -> Any:
    return lambda: data


def _receive(machine: secagg.Server, client: int, message: bytes) -> None:
    try:
        machine.receive(client, message)
    except RemoteError:
        return


def _form(answer: m.Answer) -> tuple[Any, ...]:
    """What of an answer must not depend on data: its type, code, and layout."""
    if isinstance(answer, m.Refused):
        return ("Refused", answer.code)
    if isinstance(answer, m.Computed):
        return ("Computed", answer.result, answer.parts)
    if isinstance(answer, m.Given):
        return (
            "Given",
            tuple((each.name, np.asarray(each.value).dtype.str, np.shape(each.value)) for each in answer.values),
            answer.samples,
        )
    return (type(answer).__name__,)


def isolating(rows: Sequence[Mapping[tuple[int, int], float]]) -> tuple[int, ...]:
    """The clients of whom a combination of sums shows values alone, if they are fewer than `MIN_COHORT`; else nobody."""
    columns = sorted({column for row in rows for column in row})
    matrix = np.array([[row.get(column, 0.0) for column in columns] for row in rows])
    rank = int(np.linalg.matrix_rank(matrix))
    for size in range(1, MIN_COHORT):
        for few in combinations(PLACES, size):
            rest = matrix[:, [place for place, (client, _) in enumerate(columns) if client not in few]]
            if rank > (int(np.linalg.matrix_rank(rest)) if rest.size else 0):
                return few
    return ()


# --- random sequences

LENGTH = 9


def play(seed: int, length: int = LENGTH) -> int:
    """One random sequence against fresh clients; how many requests it made. Raises `Breach`."""
    draw = Random(seed)
    rules = Rules(draw.random() < 0.6, draw.random() < 0.5, draw.random() < 0.4, draw.choice(("memory", "memory", "bytes")))
    server = Server(rules, draw)
    server.start()
    for _ in range(length):
        _step(server, draw)
    return length


def _step(server: Server, draw: Random) -> None:
    """One request, more often one that follows from those before."""
    kinds = ["train"] * 4 + ["sum"] * 8 + ["round", "slow", "choose", "choose", "gather", "copy", "session", "overflow", "large"]
    match draw.choice(kinds):
        case "round":
            server.round = draw.choice((server.round + 1, server.round + 1, 0, server.round - 1, ROUNDS))
        case "train" | "slow" as kind:
            at = draw.randrange(len(MODELS))
            params: m.SentParameters = (("model", m.Addends(MODELS[at], (), ())),)
            server.compute(TRAIN if kind == "train" else SLOW, kind, params, None, (at,))
        case "overflow":
            model = m.Addends(np.zeros(MODEL.dimension, np.float32), (), ())
            server.compute(replace(TRAIN, lr=OVERFLOWS), "overflow", (("model", model),), None, (OVERFLOWING,))
        case "large":
            server.compute(LARGE, "large", (("model", m.Addends(LARGE_MODEL, (), ())),), None, (0,))
        case "choose":
            near = m.Many(tuple(m.Addends(model, (), ()) for model in draw.sample(NEAR, 2)))
            chosen = server.compute(LOSSES, "losses", (("model", near),), None, (0,))
            if chosen is not None:
                offered = draw.sample((0, 1, DEAD), 2)
                listed = m.Many(tuple(m.Addends(OFFERED[at], (), ()) for at in offered))
                which = m.HeldValue(chosen.number, "choice")
                server.compute(TRAIN, "train", (("model", listed),), which, tuple(offered), chosen)
        case "gather" if server.values:
            value = draw.choice(server.values)
            server.gather(value, draw.choice(value.parts))
        case "copy" if server.values:
            server.copied(draw.choice(server.values), draw.choice(("join", "add up")))
        case "session":
            server.enrol(draw.choice(("run", "run", "another run")), draw.choice((None, server.session)))
        case "sum" if server.values:
            value = draw.choice(server.values[-2:])
            size = draw.choice((CLIENTS, CLIENTS, CLIENTS - 1, CLIENTS - 1, MIN_COHORT))
            cohort = sorted(draw.sample(PLACES, size))
            server.sum(value, cohort, draw.choice(CHANGES), draw.choice((1, 1, 1, 2)))
        case _:
            pass


NEAR = tuple(MODEL.init(10 + seed) for seed in range(6))
"""Models between which clients choose differently."""
CHANGES: tuple[Mapping[str, Any], ...] = (
    {}, {}, {}, {}, {"by samples": True}, {"by samples": True}, {"clip": 4.0}, {"levels": 1 << 20},
    {"weight_limit": LIMIT, "least_weight": LIMIT}, {"weight_limit": 1e6, "least_weight": 1e-3},
    {"weight_limit": LIMIT, "least_weight": 1e-3},
)  # fmt: skip
