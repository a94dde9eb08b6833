"""The tables, the stored states, and what importing the package costs."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkout import ROOT

from cflpriv.protocols.errors import LocalError, MalformedMessage
from cflpriv.protocols.secagg import (
    CLIENT,
    CLIENT_COMPLAINTS,
    SERVER,
    SERVER_COMPLAINTS,
    Client,
    ClientStage,
    Contribution,
    Policy,
    Server,
    ServerStage,
    SumRecord,
    diagram,
)
from cflpriv.protocols.secagg import messages as m
from cflpriv.protocols.secagg.states import collected, sent

from .scene import SESSION, Play, client, identities, levels, policy, roster, terms


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_the_two_tables_fit_together(mode: str) -> None:
    asked = [row[1] for row in SERVER[mode].values() if row[1]]
    answered = [row[0] for row in SERVER[mode].values() if row[0]]
    assert [row[0] for row in CLIENT[mode].values()] == asked
    assert [row[1] for row in CLIENT[mode].values()] == answered
    for table, end in ((CLIENT[mode], ClientStage.DONE), (SERVER[mode], ServerStage.DONE)):
        assert [row[-1] for row in table.values()] == [*list(table)[1:], end]
    assert {*asked, *answered} <= set(m.__all__)


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_the_tables_of_complaints_fit_together_and_lead_back(mode: str) -> None:
    rows = SERVER_COMPLAINTS[mode]
    assert rows[ServerStage.MASKING][2] is ServerStage.OPENING
    assert rows[ServerStage.OPENING][2] is ServerStage.SETTLING
    assert rows[ServerStage.SETTLING] == SERVER[mode][ServerStage.MASKING]
    answers = {(accepted, reply) for _, accepted, reply, _ in CLIENT_COMPLAINTS}
    for stage in (ServerStage.OPENING, ServerStage.SETTLING):
        (reply,) = collected(mode, stage)
        assert (sent(mode, stage), reply) in answers
    assert collected(mode, ServerStage.MASKING) == ("Masked", "Complaint")
    assert {word for pair in answers for word in pair} <= set(m.__all__)
    assert [sent(mode, stage) for stage in (ServerStage.NEW, ServerStage.DONE)] == ["", ""]


@pytest.mark.parametrize("mode", ["active", "passive"])
def test_a_diagram_has_every_message_of_the_tables(mode: str) -> None:
    for accepted, reply, _ in CLIENT[mode].values():
        assert f"S->>C: {accepted}:" in diagram(mode)
        assert f"C->>S: {reply}:" in diagram(mode)


def test_the_documented_diagram_is_drawn_from_the_tables() -> None:
    """The page shows active mode, and names the two messages that passive mode leaves out."""
    page = (ROOT / "docs" / "secure_aggregation.md").read_text(encoding="utf-8")
    assert re.findall(r"```mermaid\n(.*?)```", page, re.DOTALL) == [diagram("active")]
    active, passive = (diagram(mode).splitlines() for mode in ("active", "passive"))
    missing = [
        "S->>C: Survivors: U3",
        "Note over C: signed",
        "C->>S: Consistent: signature over (terms, U2, U3)",
        "Note over S: consistency",
    ]
    assert [line for line in active if line.strip() not in missing] == passive
    assert "Survivors and Consistent are left out" in page


def test_the_documented_example_runs() -> None:
    page = (ROOT / "docs" / "secure_aggregation.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert example.count("assert") == 2
    subprocess.run([sys.executable, "-c", example], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("mode", ["active", "passive"])
@pytest.mark.parametrize("bits", [16, 32])
def test_machines_live_across_processes(mode: str, bits: int) -> None:
    """Every machine is stored and restored around every single message; the sum is the same as ever."""
    keys = roster() if mode == "active" else None
    agreed = terms(5, mode, bits=bits, following=(6, 0))
    stored = {i: client(agreed, i).to_bytes() for i in range(5)}
    server = Server(agreed, roster=keys)
    while True:
        outbox = server.advance()
        if server.stage is ServerStage.DONE:
            break
        for number, data in outbox.items():
            if number == 3 and server.stage is ServerStage.MASKING:
                continue
            machine = Client.from_bytes(stored[number], identities()[number], roster=keys, record=SumRecord())
            values = [Contribution(levels(number, 10, agreed.levels), is_levels=True)] if machine.wants_values else []
            reply = machine.receive(data, *values)
            stored[number] = machine.to_bytes()
            server = Server.from_bytes(server.to_bytes(), roster=keys)
            assert number in server.waiting
            server.receive(number, reply)
        server = Server.from_bytes(server.to_bytes(), roster=keys)
    expected = np.sum([levels(i, 10, agreed.levels) for i in (0, 1, 2, 4)], axis=0)
    assert server.result.block().tolist() == expected.tolist()
    assert set(server.following) == {0, 1, 2, 4}
    for number in (0, 1, 2, 4):
        machine = Client.from_bytes(stored[number], identities()[number], roster=keys, record=SumRecord())
        assert machine.stage is ClientStage.DONE
        key = machine.next_mask_key()
        assert key is not None
        assert Client.from_bytes(machine.to_bytes(), identities()[number], roster=keys, record=SumRecord()).next_mask_key() is None


def test_stored_states_of_somebody_else_or_nobody() -> None:
    data = client(terms(3, "active"), 0).to_bytes()
    with pytest.raises(LocalError, match="wrong-identity"):
        Client.from_bytes(data, identities()[1], roster=roster(), record=SumRecord())
    with pytest.raises(LocalError, match="no-roster"):
        Client.from_bytes(data, identities()[0], record=SumRecord())
    for bad in (data[:-1], b"", Server(terms(3, "passive")).to_bytes()):
        with pytest.raises(MalformedMessage):
            Client.from_bytes(bad, identities()[0], roster=roster(), record=SumRecord())
    with pytest.raises(MalformedMessage):
        Server.from_bytes(data)


def test_secrets_leave_the_state_as_soon_as_they_are_not_needed() -> None:
    play = Play.of(terms(4, "active"))
    outbox = play.until("Deliver")
    machine = play.clients[0]
    mask_seed, self_seed = machine._state.mask_seed, machine._state.self_seed
    play.close(outbox, {})
    assert mask_seed not in machine.to_bytes()
    assert self_seed not in machine.to_bytes()
    dealt = [pair.self_share for pair in machine._state.dealt]
    assert len(dealt) == 3
    outbox = play.open()
    play.close(outbox, {})
    assert not any(share in machine.to_bytes() for share in dealt), "shares that it dealt, when it knows who survived"
    shares = [held.self_share for held in machine._state.held]
    assert len(shares) == 4
    play.close(play.open(), {})
    assert not any(share in machine.to_bytes() for share in shares)


def test_following_slots_need_no_invitation_and_unknown_ones_are_ignored() -> None:
    first = Play.of(terms(4, "active", following=(6, 0)))
    first.finish()
    agreed = terms(3, "active", slot=(6, 0))
    server = Server(agreed, roster=roster(), adverts=first.server.following)
    assert server.advance() == {}
    assert server.waiting == frozenset()
    assert sorted(server.advance()) == [0, 1, 2]


def test_waiting_and_names() -> None:
    agreed = terms(3, "passive")
    server = Server(agreed)
    outbox = server.advance()
    assert server.waiting == {0, 1, 2}
    machine = client(agreed, 1)
    assert (repr(machine), machine.terms) == ("Client(client=1, stage='new')", None)
    server.receive(1, machine.receive(outbox[1]))
    assert server.waiting == {0, 2}
    assert machine.terms == agreed
    assert not machine.wants_values
    assert repr(server) == "Server(slot=(5, 0), stage='advertising')"


def test_policy_defaults_are_strict() -> None:
    chosen = Policy(SESSION, "active", bytes(32))
    assert (chosen.models, chosen.min_cohort, chosen.after) == (1, 3, None)
    assert policy(terms(3, "passive")).mode == "passive"


VENDORED = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from borrowed.secagg import Contribution, Identity, make_terms, simulate
terms = make_terms(session=bytes(16), slot=(0, 0), cohort=range(4), models=[bytes(32)], dimension=3, clip=1.0)
identities = {i: Identity.create(i) for i in range(4)}
result = simulate(terms, identities, lambda i: Contribution(np.full(3, i), is_levels=True), drops={0: "Masked"})
assert result.sum.block().tolist() == [6, 6, 6]
assert not [name for name in sys.modules if name.startswith("cflpriv")]
print("ok")
"""


def test_the_folder_works_in_another_system_under_another_name(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protocols", tmp_path / "borrowed", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-I", "-c", VENDORED, str(tmp_path)]
    assert subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, encoding="utf-8").stdout == "ok\n"


IMPORT = """
import json, sys, time
before = time.process_time()
import cflpriv.protocols.secagg
spent = time.process_time() - before
ours = [name for name in sys.modules if name.startswith("cflpriv") and not name.startswith("cflpriv.protocols")]
print(json.dumps([spent, sorted(ours), [n for n in ("torch", "sklearn", "pydantic") if n in sys.modules]]))
"""


@pytest.mark.slow
def test_importing_is_quick_and_brings_neither_torch_nor_the_rest_of_the_project() -> None:
    runs = [json.loads(subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, check=True, capture_output=True).stdout) for _ in range(5)]
    assert runs[0][1] == ["cflpriv"]
    assert runs[0][2] == []
    assert min(run[0] for run in runs) < 0.3
