"""Adversaries: what each sees of a recorded run is what its parties were sent and know, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attack_scenes import QUICK, case, config

from cflpriv.attacks import ADVERSARIES, ATTACKS, load_view, view_of
from cflpriv.attacks.compared.gram_geometry import products_of
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Message, Transcript, payload_rows
from cflpriv.data import build_population
from cflpriv.errors import InputError
from cflpriv.experiments import run_experiment


def transcript() -> list[Message]:
    """Parameters to two clusters, one row a client up, a relay, a Gram at a key holder."""
    made = Transcript("full")
    both = ("server", "clients")
    made.add(0, "compute", "parameters", "server", "clients", [0, 2], {"model/0": np.zeros(3)}, readers=both, context={"which": [0]})
    made.add(0, "compute", "parameters", "server", "clients", [1, 3], {"model/1": np.ones(3)}, readers=both, context={"which": [1]})
    rows = [{"update": np.full(3, float(client))} for client in range(4)]
    made.add(0, "mean", "update", "clients", "server", range(4), rows, readers=("server",), context={"labels": [[0], [1], [0], [1]]})
    made.add(0, "relay", "update", "clients", "clients", range(4), rows, readers=("clients",), peers=[[1], [0], [3], [2]])
    made.add(0, "gram", "signature", "clients", "key-holder", range(4), rows, readers=("key-holder",), context={"epoch": 0})
    made.add(0, "gram", "result", "key-holder", "server", (), {"labels": np.zeros(4, int)}, readers=("server", "key-holder"))
    return made.messages


SECRETS = {"client:0": {"group_secret": "00"}, "client:2": {"group_secret": "01"}}


def seen_by(adversary: str) -> dict[tuple[str, str], list[Message]]:
    found: dict[tuple[str, str], list[Message]] = {}
    for message in view_of(transcript(), adversary, SECRETS).messages:
        found.setdefault((message.operation, message.kind), []).append(message)
    return found


def rows(message: Message) -> list[int]:
    return [] if message.payload is None else list(payload_rows(message))


@pytest.mark.parametrize("adversary", ["server", "active-server"])
def test_the_server_reads_what_reaches_it(adversary: str) -> None:
    view = seen_by(adversary)
    assert rows(view["mean", "update"][0]) == [0, 1, 2, 3]
    assert view["relay", "update"][0].payload is None
    assert view["relay", "update"][0].digest == ""
    assert view["relay", "update"][0].peers
    assert ("gram", "signature") not in view
    assert view["gram", "result"][0].payload is not None


def test_colluding_clients_add_what_they_were_sent_and_sent() -> None:
    view = seen_by("server+2")
    relay = view["relay", "update"][0]
    assert rows(relay) == [0, 1, 2, 3]  # 1 sent to 0, 3 sent to 2; 0 and 2 know their own
    alone = seen_by("server+1")["relay", "update"][0]
    assert rows(alone) == [0, 1]
    assert alone.payload is not None
    assert alone.payload["update"].tolist() == [[0.0] * 3, [1.0] * 3]
    assert rows(seen_by("server+1")["gram", "signature"][0]) == [0]
    assert view_of(transcript(), "server+2", SECRETS).secrets == SECRETS


def test_the_key_holder_reads_the_gram_and_no_more() -> None:
    view = seen_by("key-holder")
    assert set(view) == {("gram", "signature"), ("gram", "result")}
    assert rows(view["gram", "signature"][0]) == [0, 1, 2, 3]
    without = [message for message in transcript() if message.operation != "gram"]
    with pytest.raises(InputError, match="this run had no key holder"):
        view_of(without, "key-holder", {})
    with pytest.raises(InputError, match=r"sees the Gram matrix, as the server of a run under gram = \['haar'\] does; audit such a run"):
        view_of(transcript(), "key-holder", {}, Protection(gram=("shares",)))


def test_a_client_sees_its_own_messages_only() -> None:
    view = seen_by("client")
    (sent,) = view["compute", "parameters"]
    assert sent.clients == (0,)
    assert sent.payload is not None
    assert rows(view["mean", "update"][0]) == [0]
    assert rows(view["relay", "update"][0]) == [0, 1]
    assert ("gram", "result") not in view
    assert view_of(transcript(), "client", SECRETS).coalition == (0,)
    assert view_of(transcript(), "client", {}).coalition == (0,)  # without secrets, of which an open run has no use


def test_released_models_are_the_last_without_names() -> None:
    sent = view_of(transcript(), "released", SECRETS).messages
    assert sent
    assert {(message.operation, message.kind, message.clients) for message in sent} == {("compute", "parameters", ())}
    with pytest.raises(InputError, match="no model that the server sends"):
        view_of([message for message in transcript() if message.operation != "compute"], "released", {})


def test_an_outsider_reads_nothing_and_sees_no_grouping() -> None:
    messages = view_of(transcript(), "outsider", SECRETS).messages
    assert all(message.payload is None and not message.context and message.digest == "" for message in messages)
    (sent,) = [message for message in messages if message.operation == "compute"]
    assert sent.clients == (0, 1, 2, 3)  # both clusters' models are equally long: one step, not two
    assert sent.copies == 4
    total = sum(message.total_bytes for message in transcript())
    assert sum(message.total_bytes for message in messages) == total


def test_every_adversary_has_a_line_and_unknown_ones_are_refused() -> None:
    assert {"server", "server+N", "active-server", "key-holder", "client", "released", "outsider"} == set(ADVERSARIES)
    with pytest.raises(InputError, match="janitor"):
        view_of(transcript(), "janitor", {})
    with pytest.raises(InputError, match="a number for N"):
        view_of(transcript(), "server+N", {})
    with pytest.raises(InputError, match="secrets of 3"):
        view_of(transcript(), "server+3", SECRETS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["permutation", "signed_permutation", "hadamard", "haar"])
def test_a_colluder_opens_every_transform(kind: str) -> None:
    """Gram and sum: the coalition's signatures and models are those of the run in the open."""
    protected = case(config(protection={"gram": [kind], "sum": kind}), "server+1")
    for name in ("signature_inversion", "label_inference"):
        cells, _ = ATTACKS[name].cells(protected)
        assert {cell.status for cell in cells if not cell.metric.startswith("aggregate")} == {"leaks"}  # one run matches clusters by luck
        for cell in cells:
            assert cell.value == pytest.approx(cell.reference, rel=0.05)
    assert protected.view.protection == Protection(gram=(kind,), sum=kind)


@pytest.mark.parametrize(("algorithm", "adversary"), [("pacfl", "outsider"), ("ifca", "outsider"), ("pacfl", "client")])
def test_weak_adversaries_have_nothing_or_are_at_their_baseline(algorithm: str, adversary: str) -> None:
    options: dict[str, Any] = {"k": 4} if algorithm == "ifca" else {}
    weak = case(config({"name": algorithm, **options}), adversary)
    names = ("signature_inversion", "label_inference", "anchor_counts", "gram_geometry", "sybil_span", "cluster_identity", "influence")
    for name in names:
        if adversary == "client" and name == "label_inference":
            continue  # two models less its own update are the sum of the other members' (`test_linear_evidence`)
        assert {cell.status for cell in ATTACKS[name].cells(weak)[0]} <= {
            "nothing_to_see",
            "not_applicable",
            "at_baseline",
            "not_validated",
        }, name


@pytest.mark.parametrize("algorithm", ["fedavg", "local"])
def test_no_cluster_is_named_where_there_is_one_model_or_none(algorithm: str) -> None:
    (cell,), _ = ATTACKS["cluster_identity"].cells(case(config({"name": algorithm})))
    assert (cell.status, cell.value) == ("nothing_to_see" if algorithm == "local" else "not_applicable", None)


@pytest.mark.slow
def test_an_oblivious_view_without_sizes_names_no_cluster_either() -> None:
    """Not a measured chance, although the unprotected reference names every cluster."""
    seen = case(config({"name": "ifca", "k": 4}, {"sum": "secagg-oblivious"}))
    bare = replace(seen.view, messages=tuple(message for message in seen.view.messages if message.kind != "secagg Adverts"))
    (cell,), _ = ATTACKS["cluster_identity"].cells(replace(seen, view=bare))
    assert (cell.status, cell.value) == ("not_applicable", None)


def test_secrets_are_checked(tmp_path: Path) -> None:
    run_experiment(config(training={"rounds": 0}), tmp_path / "run")
    assert load_view(tmp_path / "run", "server+1").coalition == (0,)
    for content in ("{", "[]", json.dumps({"party": "janitor"}), json.dumps({"party": "client:0", "group_secret": "xyz"})):
        (tmp_path / "run" / "secrets" / "client_0.json").write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match="client_0"):
            load_view(tmp_path / "run", "server+1")


@pytest.mark.slow
@pytest.mark.parametrize("release", ["labels", "gram"])
def test_a_key_holder_has_the_gram_and_the_server_what_is_released(release: str) -> None:
    """Encrypted signatures: with three known clients' data the key holder finds label sets; the server does if the Gram is released."""
    pytest.importorskip("tenseal")
    made = config(protection={"gram": ["ckks"], "ckks_release": release}, data={"clients": 12}, training={"rounds": 0})
    made = replace(made, run=replace(made.run, audit_parties=("server", "key-holder")))
    scene = fresh_scene(made, build_population(made.data), 0, QUICK)
    for adversary, sees in (("key-holder", True), ("server", release == "gram")):
        seen = case_of(scene, adversary, QUICK)
        assert (products_of(seen)[0] is not None) is sees
        by_known = {cell.k_known: cell for cell in ATTACKS["gram_geometry"].cells(seen)[0]}
        if sees:
            assert by_known[3].value is not None
            assert by_known[3].value > 0.7
            found, open_ = products_of(seen)
            assert found is not None
            assert open_ is not None
            assert found[1] == pytest.approx(open_[1], abs=1e-3)
        else:
            assert {cell.status for cell in by_known.values()} == {"not_applicable"}
        inversion, _ = ATTACKS["signature_inversion"].cells(seen)
        assert {cell.status for cell in inversion} == {"not_applicable"}
