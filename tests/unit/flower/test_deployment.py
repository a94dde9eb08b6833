"""Real deployments on the loopback: SuperLink, SuperNodes, a process for every message. Nodes that are killed are in test_kills.

Minutes each, mostly Flower starting processes: one is in the default suite (marker `flower`), the others are `slow`.
"""

import json
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from deployments import APP, check_run_folder, local_models, loopback, messages_of, quick_loopback, survivors_of
from safetensors.numpy import load_file

from cflpriv.contract.transcript import read_transcript
from cflpriv.experiments import load_config, run_experiment
from cflpriv.federation.client_ledger import ClientLedger
from cflpriv.federation.error_codes import MEANINGS
from cflpriv.federation.store import DiskStore
from cflpriv.flower import read_settings, write_identities


@pytest.mark.flower
@pytest.mark.timeout(900)
def test_a_deployment_with_secure_sums_finds_the_clusters_and_models_of_a_local_run(tmp_path: Path) -> None:
    """`main` asserts Flower's own word, finished:completed. Sums are quantised: 2^-20 or so of the clip range a client."""
    summary = loopback().main(["--out", str(tmp_path / "d"), "--rounds", "1"])
    clustering, models = local_models(["training.rounds=1", "protection.sum=none", "protection.min_cohort=0"])
    run = tmp_path / "d" / "run"
    assert summary["ari"] == 1.0
    assert json.loads((run / "measured.json").read_text(encoding="utf-8"))["labels"] == {str(c): clustering[c] for c in range(4)}
    found = load_file(run / "checkpoints" / "models.safetensors")
    for i, model in enumerate(models):
        np.testing.assert_allclose(found[f"model/{i}"], model, atol=1e-5)
    kinds = {one.kind for one in read_transcript(run / "transcript", summary["messages"])}
    assert "secagg Masked" in kinds
    assert "update" not in kinds
    assert not summary["refusals"]


def deployed(out: Path, changes: list[str], experiment: Path = APP / "experiment.toml") -> Path:
    """The run folder of two rounds of the example with changes; `main` asserts finished:completed."""
    words = [word for change in changes for word in ("--set", change)]
    quick_loopback(out.parent).main(["--out", str(out), "--rounds", "2", "--experiment", str(experiment), *words])
    return out / "run"


def in_one_process(out: Path) -> Path:
    """The run folder of the same resolved experiment in one process."""
    run_experiment(load_config(out / "experiment.toml"), out / "local")
    return out / "local"


def check_models(run: Path, changes: list[str]) -> None:
    """The models are those of plain sums in one process."""
    _, models = local_models([*changes, "training.rounds=2"])
    found = load_file(run / "checkpoints" / "models.safetensors")
    assert len(found) == len(models)
    for i, model in enumerate(models):
        np.testing.assert_allclose(found[f"model/{i}"], model, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_secure_sums_the_parameters_and_the_run_folder_are_those_of_a_local_run(tmp_path: Path) -> None:
    # to the last bit: a stack of clients may round otherwise than one alone, which depends on the processor
    changes = ["protection.sum=none", "protection.min_cohort=1", "run.engine=sequential"]
    run = deployed(tmp_path / "d", changes)
    summary = check_run_folder(run, in_one_process(tmp_path / "d"))
    check_models(run, changes)
    assert summary["accuracy_mean"] > 0.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_encrypted_similarity_with_the_key_holder_at_a_supernode_of_its_own(tmp_path: Path) -> None:
    """Labels and, as sums are in the clear, parameters are those of one process; the transcript has the same messages."""
    pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    changes = ["data.clients=3", 'protection.gram=["ckks"]', "protection.sum=none", "protection.min_cohort=1"]
    run = deployed(tmp_path / "d", changes)
    here = in_one_process(tmp_path / "d")
    summary = check_run_folder(run, here, exact=False, only_here=frozenset({"evidence.npz"}))
    check_models(run, changes)
    assert not summary["refusals"]
    assert summary["ari"] == 1.0
    assert {"ckks key", "ckks enrolment", "ckks request", "result"} <= {message[2] for message in messages_of(run, summary["messages"])}
    assert list((tmp_path / "d" / "state" / "key-holder").iterdir()), "its keys are with it"


FEDAVG = """
[data]
source = "digits"
clients = 3
[model]
name = "mlp"
hidden = 16
[training]
epochs = 1
lr = 0.1
weights = "equal"
[algorithm]
name = "fedavg"
"""
PRIVATE = ["privacy.epsilon=8.0", "privacy.delta=1e-3"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("experiment", "changes"),
    [
        pytest.param("", ["data.clients=3", "privacy.unit=sample", "privacy.samples=300", "privacy.sketch_dim=16", "training.batch_size=60",
                          "protection.sum=none", "protection.min_cohort=1"], id="sample"),
        pytest.param(FEDAVG, ["privacy.unit=client", "privacy.clip_norm=0.5", "protection.sum=secagg",
                              "protection.min_cohort=3"], id="client"),
    ],
)  # fmt: skip
def test_a_private_run_costs_what_a_local_one_does_and_clients_count_the_same(tmp_path: Path, experiment: str, changes: list[str]) -> None:
    """Every client demands the run's (ε, δ) in its own settings. What is learnt has noise; what is said, and what it costs, have none."""
    path = tmp_path / "experiment.toml"
    path.write_text(experiment or (APP / "experiment.toml").read_text(encoding="utf-8"), encoding="utf-8")
    run = deployed(tmp_path / "d", [*changes, *PRIVATE], path)
    here = in_one_process(tmp_path / "d")
    summary = check_run_folder(run, here, exact=False)
    assert not summary["refusals"]
    assert summary["rounds_skipped"] == 0
    charges = [json.loads((one / "ledger.json").read_text(encoding="utf-8"))["charges"] for one in (run, here)]
    assert charges[0] == charges[1]
    for client in range(3):
        settings, state, _ = read_settings(tmp_path / "d" / f"client{client}.toml")
        assert state is not None
        own = ClientLedger(settings.privacy, client, DiskStore(state)).spent()
        assert own == pytest.approx(summary["epsilon"], rel=1e-6), "its own ledger says what the server's says"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_with_tls_and_authenticated_nodes(tmp_path: Path) -> None:
    summary = quick_loopback(tmp_path).main(["--out", str(tmp_path / "d"), "--rounds", "1", "--tls"])
    assert summary["ari"] == 1.0


ODD = '''
"""The example's client, with one whose answer is changed on the way, and one that speaks another version."""

import os
from pathlib import Path

from clustered import living as example
from cflpriv.protocols.secagg.messages import decode_server
from cflpriv.federation import messages as m
from cflpriv.federation.client import FederationClient

app = example.app
receive = FederationClient.receive


def odd(self, data):
    if self.number == 4:
        m.VERSION += 1
    answer = receive(self, data)
    ask = m.decode_ask(data)
    if self.number == 3 and isinstance(ask, m.SumStep) and type(decode_server(ask.message)).__name__ == "Adverts":
        answer = answer[:-1] + bytes([answer[-1] ^ 1])
    return answer


FederationClient.receive = odd
'''


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_who_does_not_belong_is_refused_by_a_word_and_the_others_go_on(tmp_path: Path) -> None:
    """Another version, another identity, settings that cannot be used, an answer that was changed on the way."""
    module, out = quick_loopback(tmp_path), tmp_path / "d"
    out.mkdir()
    with module.deploy(out, APP / "experiment.toml", ["data.clients=5", "algorithm.k=1"], 1, 120.0) as machines:
        app = out / "app" / "clustered"
        (app / "client.py").rename(app / "living.py")
        (app / "client.py").write_text(ODD, encoding="utf-8")
        machines.run_config["clients"] = 4
        good = (out / "client0.toml").read_text(encoding="utf-8")
        write_identities(out / "others", 1)
        (out / "client5.toml").write_text(good.replace("keys/", "others/").replace("state/client0", "state/other"), encoding="utf-8")
        (out / "client6.toml").write_text(good.replace("[privacy]", "[privcy]"), encoding="utf-8")
        port, _, tls = machines.ports
        for node, own in zip((5, 6), module.free_ports(2), strict=True):
            module.start_node(machines, node, port, own, tls)
        until = time.monotonic() + 120
        while time.monotonic() < until and not all("SuperNode ID" in (out / f"node{i}.log").read_text(encoding="utf-8") for i in range(7)):
            time.sleep(0.5)
        assert module.wait(machines, module.submit(machines), 1500) == "finished:completed"
    summary = json.loads((out / "run" / "summary.json").read_text(encoding="utf-8"))
    words = {(client, stage, word) for client, stage, word in summary["refusals"]}
    assert {(-1, "enrol", "version"), (-1, "enrol", "bad-settings"), (0, "enrol", "not-on-roster")} <= words
    assert {stage for client, stage, _ in words if client == 3} == {"secagg Adverts"}
    assert {word for _, _, word in words} <= set(MEANINGS)
    assert survivors_of(out / "run", summary["messages"]) == {0: (0, 1, 2)}
    _, models = local_models(["data.clients=5", "algorithm.k=1", "training.rounds=1"], {0: (0, 1, 2)})
    found = load_file(out / "run" / "checkpoints" / "models.safetensors")
    np.testing.assert_allclose(found["model/0"], models[0], atol=1e-4)
    assert "privcy = " in "".join(path.read_text(encoding="utf-8") for path in out.glob("node6.log")), "its own log says why"
