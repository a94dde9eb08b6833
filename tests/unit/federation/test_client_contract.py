"""A client's session contract: which it agrees to, what its text says, and that its bytes are canonical."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agreements import contract_of
from scenes import population, training

from cflpriv.contract.protection import Protection
from cflpriv.contract.schedule import Schedule, request
from cflpriv.errors import InputError
from cflpriv.federation import messages as m
from cflpriv.federation.client import FederationClient
from cflpriv.federation.contract_record import Contract, contract_bytes, contract_digest, contract_from_bytes, make_contract
from cflpriv.federation.contract_words import contract_text
from cflpriv.federation.limits import Limits
from cflpriv.federation.settings import Settings, read_roster, read_settings, write_identities
from cflpriv.federation.store import MemoryStore
from cflpriv.privacy.settings import Privacy
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import MalformedMessage
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.tasks.evaluation import Losses

SCENE = population(groups=1, clients_per_group=3)
TRAIN = training(SCENE, dtype="float32")
IDENTITIES = tuple(Identity.create(client, public_entropy(f"contract {client}")) for client in range(3))
ROSTER = Roster(tuple(identity.public() for identity in IDENTITIES))
SECURE = Protection(sum="secagg")
FIRST, SECOND = bytes(16), bytes(range(16))


def agreement(**changes: Any) -> Contract:
    made = contract_of(None, request(TRAIN, {"update": "sum"}), protection=SECURE, roster=ROSTER, rounds=4)
    return msgspec.structs.replace(made, **changes)


def client_with(store: MemoryStore | None = None, **settings: Any) -> FederationClient:
    own = Settings(IDENTITIES[0], **{"protection": SECURE, "roster": ROSTER, "needs_contract": True, **settings})
    return FederationClient(own, lambda: SCENE.clients[0], MemoryStore() if store is None else store)


def enrolled(client: FederationClient, contract: Contract | None, session: bytes = FIRST) -> str:
    """The error code with which a client answers a greeting, empty if it enrols."""
    data = b"" if contract is None else contract_bytes(contract)
    answer = m.decode_answer(client.receive(m.encode(m.Enrol(m.VERSION, session, bytes(16), data))))
    return answer.code if isinstance(answer, m.Refused) else ""


def compute(client: FederationClient, task: Any = TRAIN, *, round: int = 0, seed: int = 1, model: int = 0, session: bytes = FIRST) -> str:
    params = (("model", m.Addends(TRAIN.model.init(model), (), ())),)
    ask = m.Compute(session, round, seed, 1, (), m.Carried(task), params, None)
    answer = m.decode_answer(client.receive(m.encode(ask)))
    return answer.code if isinstance(answer, m.Refused) else ""


def test_the_bytes_are_canonical() -> None:
    data = contract_bytes(agreement())
    assert contract_bytes(contract_from_bytes(data)) == data
    assert contract_digest(data) != contract_digest(contract_bytes(agreement(run="another")))
    for damaged in (data[:-1], data + b"?", b"", b"CFLP" + data):
        with pytest.raises(MalformedMessage):
            contract_from_bytes(damaged)


@pytest.mark.parametrize(
    ("changes", "settings", "code"),
    [
        ({}, {}, ""),
        ({}, {"contract": contract_digest(contract_bytes(agreement()))}, ""),
        ({"run": "another"}, {"contract": contract_digest(contract_bytes(agreement()))}, "other-contract"),
        ({}, {"limits": Limits(rounds=3)}, "other-contract"),
        ({}, {"limits": Limits(algorithms=("fedavg",))}, "other-contract"),
        ({}, {"limits": Limits(algorithms=("none",))}, ""),
        ({"models": 2}, {}, "other-contract"),
        ({"models": 2}, {"models": 2}, ""),
        ({"roster": b""}, {}, "other-contract"),
        ({}, {"protection": replace(SECURE, min_cohort=5)}, "other-contract"),
        ({}, {"protection": replace(SECURE, secagg_mode="passive")}, "other-contract"),
        ({}, {"protection": replace(SECURE, max_weight=9.0)}, "other-contract"),
        ({"protection": ()}, {}, "other-contract"),
        ({"protection": (("sum", "{"),)}, {}, "malformed"),
    ],
)
def test_a_client_agrees_to_what_its_settings_allow(changes: dict[str, Any], settings: dict[str, Any], code: str) -> None:
    assert enrolled(client_with(**settings), agreement(**changes)) == code


def test_a_client_that_needs_a_contract_enrols_under_one_alone() -> None:
    assert enrolled(client_with(), None) == "no-contract"
    free = client_with(needs_contract=False)
    assert enrolled(free, None) == ""
    assert compute(free, replace(TRAIN, lr=0.3)) == "", "without a contract a client computes what it is asked for"
    assert enrolled(client_with(contract=bytes(32), needs_contract=False), None) == "no-contract"


def test_a_state_that_was_set_back_is_refused() -> None:
    store = MemoryStore()
    client = client_with(store)
    assert enrolled(client, agreement()) == ""
    assert compute(client) == ""
    earlier = {name: store.get(name) for name in store.names()}
    assert compute(client, round=1, model=1) == ""

    def again(store: MemoryStore, latest: int, number: int = 0, **settings: Any) -> str:
        ask = m.Enrol(m.VERSION, FIRST, bytes(16), contract_bytes(agreement()), ((number, latest),))
        answer = m.decode_answer(client_with(store, **settings).receive(m.encode(ask)))
        return answer.code if isinstance(answer, m.Refused) else ""

    def restored() -> MemoryStore:
        made = MemoryStore()
        for name, value in earlier.items():
            assert value is not None
            made.put(name, value)
        return made

    assert again(store, 1) == ""
    assert again(restored(), 0) == ""
    assert again(restored(), 1) == "set-back"
    assert again(MemoryStore(), 0) == "set-back", "a lost state"
    assert again(MemoryStore(), -1) == "", "nothing but the start was answered"
    assert again(restored(), 1, number=2) == "", "another client was at this place"
    assert again(restored(), 1, needs_contract=False) == "", "a simulation restores its clients itself"


def test_requests_are_those_of_the_contract() -> None:
    client = client_with()
    assert enrolled(client, agreement()) == ""
    assert compute(client, replace(TRAIN, lr=0.3)) == "not-agreed"
    assert compute(client, seed=2) == "not-agreed"
    assert compute(client, round=-1) == "not-agreed"
    assert compute(client) == ""
    assert compute(client) == "", "the same request again is no new one"
    assert compute(client, model=1) == "not-agreed", "once in a round"
    assert compute(client, round=1, model=1) == ""
    assert compute(client, model=2) == "not-agreed", "rounds only go up"
    assert compute(client, round=4) == "not-agreed"
    assert compute(client, round=3, model=2) == "", "rounds may be left out"


def test_a_contract_is_one_session_and_outlives_restarts() -> None:
    store = MemoryStore()
    assert enrolled(client_with(store), agreement()) == ""
    assert enrolled(client_with(store), agreement(), SECOND) == "", "nothing was answered yet"
    assert compute(client_with(store), session=SECOND) == ""
    assert enrolled(client_with(store), agreement(run="another"), SECOND) == "other-contract"
    assert enrolled(client_with(store), None, SECOND) == "no-contract"
    assert enrolled(client_with(store), agreement(), bytes([7] * 16)) == "contract-used"
    assert enrolled(client_with(store), agreement(run="another"), bytes([7] * 16)) == ""
    assert enrolled(client_with(store), agreement(), bytes([8] * 16)) == "contract-used", "also after another contract"


def test_a_refused_enrolment_changes_no_contract() -> None:
    store = MemoryStore()
    assert enrolled(client_with(store), agreement()) == ""
    assert enrolled(client_with(store), agreement(run="another"), SECOND) == ""
    assert enrolled(client_with(store), agreement(run="third", seed=7), FIRST) == "wrong-session", "it has left the first session"
    assert compute(client_with(store), seed=7, session=SECOND) == "not-agreed"
    assert compute(client_with(store), session=SECOND) == ""


@pytest.mark.parametrize("varies", [tuple(f"field{number}" for number in range(33)), ("lr", "lr")])
def test_a_contract_is_no_work_for_the_client(varies: tuple[str, ...]) -> None:
    (asked,) = agreement().requests
    assert enrolled(client_with(), agreement(requests=(asked,) * 256)) == ""
    assert enrolled(client_with(), agreement(requests=(asked,) * 257)) == "other-contract"
    assert enrolled(client_with(), agreement(requests=(msgspec.structs.replace(asked, varies=varies),))) == "other-contract"


def test_a_contract_that_no_client_agrees_to_is_not_made() -> None:
    requests = [request(replace(TRAIN, lr=0.1 + number / 1000), {"update": "sum"}) for number in range(257)]
    with pytest.raises(InputError, match="257 requests, at most 256"):
        contract_of(None, *requests)
    with pytest.raises(InputError, match="bytes of 262144"):
        contract_of(None, requests[0], name="x" * (1 << 18))


def test_a_request_that_is_no_task_is_not_agreed() -> None:
    (asked,) = agreement().requests
    for task in (b"", b"?", asked.task[:-1]):
        client = client_with()
        assert enrolled(client, agreement(requests=(msgspec.structs.replace(asked, task=task),))) == ""
        assert compute(client) == "not-agreed"


@pytest.mark.parametrize("value", ["0", "-1", "true", '"1"', "null", "Infinity", "1e999"])
def test_the_clip_of_a_contract_is_a_number_above_0(value: str) -> None:
    settings = tuple((key, value if key == "secagg_clip" else own) for key, own in agreement().protection)
    assert enrolled(client_with(), agreement(protection=settings)) == "other-contract"


def test_the_number_of_samples_leaves_where_the_contract_says_so() -> None:
    for weights, code in (("examples", ""), ("equal", "not-agreed")):
        plain = Protection()
        made = contract_of(None, request(TRAIN, {"update": "sum"}), protection=plain)
        client = client_with(protection=plain, roster=None)
        assert enrolled(client, msgspec.structs.replace(made, weights=weights)) == ""
        assert compute(client) == ""
        ask = m.Give(FIRST, "sum", 1, ("update",), "", True)
        answer = m.decode_answer(client.receive(m.encode(ask)))
        assert (answer.code if isinstance(answer, m.Refused) else "") == code


def test_parts_leave_by_the_operations_of_the_contract() -> None:
    client = client_with()
    assert enrolled(client, agreement()) == ""
    assert compute(client) == ""
    for operation in ("gather", "gram"):
        ask = m.Give(FIRST, operation, 1, ("update",), "", False)
        assert m.decode_answer(client.receive(m.encode(ask))) == m.Refused("not-agreed")


def test_the_text_says_what_is_asked_and_what_is_learned() -> None:
    text = contract_text(agreement())
    for line in (
        contract_digest(contract_bytes(agreement())).hex(), "at most 4, numbered 0 to 3", "In every round, in any order:",
        "'update' leaves masked", "'count' stays with the client", "the sum over 3 clients or more, not this client's",
        "BEFORE YOU AGREE", ROSTER.digest.hex(),
    ):  # fmt: skip
        assert line in text, line
    assert "MISSING: no client agrees" in contract_text(agreement(roster=b""))


@pytest.mark.parametrize(
    ("protection", "privacy", "part"),
    [
        (SECURE, Privacy(), "update"),
        (replace(SECURE, secagg_mode="passive", min_cohort=2, max_weight=40.0), Privacy(), "update"),
        (replace(SECURE, gram=("haar",), secagg_clip=0.5), Privacy(), "update"),
        (replace(SECURE, robust="trimmed_mean", relay_updates=True), Privacy(), "update"),
        (SECURE, Privacy(), "choice"),
        (Protection(gram=("sketch",), sketch_dim=40), Privacy(), "update"),
        (Protection(), Privacy(unit="client", epsilon=8.0, delta=1e-5, clip_norm=0.5), "update"),
        (SECURE, Privacy(unit="client", epsilon=2.0, delta=1e-6, local=("gram",)), "update"),
        (SECURE, Privacy(unit="sample", epsilon=3.0, delta=1e-5, samples=20), "update"),
    ],
)
def test_the_settings_that_the_text_prints_agree_to_this_contract_alone(
    protection: Protection, privacy: Privacy, part: str, tmp_path: Path
) -> None:
    roster = read_roster(write_identities(tmp_path, 3))
    asked = request(TRAIN, {"update": "sum"}) if part == "update" else request(Losses(TRAIN.model), {"choice": "gather"})
    contract, other = (
        make_contract(
            run=name, algorithm="own", settings={}, rounds=3, seed=1, schedule=Schedule(round=(asked,), models=2), protection=protection,
            privacy=privacy, roster=roster,
        )
        for name in ("", "another")
    )  # fmt: skip
    text = contract_text(contract)
    printed = text.partition("AND NO OTHER\n")[2]
    assert ("allow_scores = true" in printed) == (part == "choice")
    file = tmp_path / "client.toml"
    printed = printed.replace('identity = "FILE"', 'identity = "client0.key"').replace('roster = "FILE"', 'roster = "roster.txt"')
    file.write_text(printed, encoding="utf-8")
    settings, state, _ = read_settings(file)
    assert (state is None) == (not protection.secure and privacy.unit == "none")
    assert replace(settings.protection, min_cohort=0) == replace(protection, min_cohort=0)
    assert settings.privacy == privacy
    for offered, code in ((contract, ""), (other, "other-contract")):
        client = FederationClient(settings, lambda: SCENE.clients[0], MemoryStore())
        assert enrolled(client, offered) == code


def test_the_text_names_who_adds_the_noise() -> None:
    client = Privacy(unit="client", epsilon=8.0, delta=1e-5)

    def text(protection: Protection, privacy: Privacy) -> str:
        made = contract_of(None, request(TRAIN, {"update": "sum"}), protection=protection)
        return contract_text(
            msgspec.structs.replace(made, privacy=tuple((key, json.dumps(value)) for key, value in asdict(privacy).items()))
        )

    trusted, shared = text(Protection(), client), text(SECURE, client)
    assert "THE SERVER adds the noise" in trusted
    assert "this client's own; WITHOUT noise" in trusted
    assert "each member of a sum adds a share" in shared
    assert "with noise of all its members" in shared
    assert "no noise is added" in text(SECURE, Privacy())


def test_a_schedule_that_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="Train has no part 'updates'"):
        request(TRAIN, {"updates": "sum"})
    with pytest.raises(InputError, match="'update' leaves by share"):
        request(TRAIN, {"update": "share"})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="Train has no field 'rate'"):
        request(TRAIN, varies=("rate",))
