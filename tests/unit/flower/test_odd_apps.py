"""Odd applications under the Flower strategy: what is cut off, lost, weighed or refused is in the result."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from cflpriv.contract.protection import Protection
from cflpriv.errors import InputError
from cflpriv.flower import ClusteredAveraging, cflpriv_mod, write_identities
from cflpriv.flower.client import read_roster, read_settings
from cflpriv.flower.doubtful_updates import mean_doubts
from cflpriv.flower.mod import cut, flat, layout_of
from cflpriv.flower.strategy import ClusteredResult
from cflpriv.protocols.entropy import public_entropy

SECURE = 'sum = "secagg"\nmin_cohort = 3'
SIZE = 16
Answer = Callable[[int, np.ndarray[Any, Any]], tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]]
"""(client, weights sent) -> (arrays returned, metrics returned)."""


def moved(client: int, weights: np.ndarray[Any, Any]) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """A plain client: it moves by a tenth of its number, and has ten times that many examples, and ten."""
    return {"w": (weights + 0.1 * client).astype(np.float32)}, {"num-examples": 10 * (client + 1)}


def result_of(
    folder: Path, answer: Answer = moved, protection: str = "", clients: int = 6, rounds: int = 2,
    signature: Callable[[int], Any] | None = None, settings: Mapping[str, Any] | None = None, initial: Any = None,
    train_config: ConfigRecord | None = None, evaluate_fn: Any = None, nodes: Sequence[int] = (), **strategy: Any,
) -> ClusteredResult:  # fmt: skip
    """What the strategy makes of an application whose clients answer so. `nodes`: the client of each node, by default one of each."""
    write_identities(folder / "keys", clients, public_entropy(str(folder)))
    paths: list[str] = []
    for client in range(clients):
        path = folder / f"client{client}.toml"
        text = f'identity = "keys/client{client}.key"\nroster = "keys/roster.txt"\nstate = "state{client}"\n[protection]\n{protection}\n'
        path.write_text(text, encoding="utf-8")
        paths.append(str(path))

    configs = {100 + node: {"settings": paths[client]} for node, client in enumerate(nodes or range(clients))}

    def number(context: Context) -> int:
        return read_settings(str(context.node_config["settings"]))[0].identity.client

    app = ClientApp(mods=[cflpriv_mod(None if signature is None else lambda context: signature(number(context)))])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content: Any = message.content
        arrays, metrics = answer(number(context), content["arrays"]["w"].numpy())
        sent: dict[str, Any] = {"arrays": ArrayRecord({name: Array(value) for name, value in arrays.items()})}
        return Message(RecordDict(sent | {"metrics": MetricRecord(metrics)}), reply_to=message)

    grid: Any = FakeGrid(dict.fromkeys(configs, app), configs)
    common: Any = {"sum": "secagg", "min_cohort": 3} if "secagg" in protection else {}
    made = ClusteredAveraging(
        Protection(**common, **(settings or {})),
        clients=clients,
        roster=read_roster(folder / "keys" / "roster.txt"),
        **{"k": 1, **strategy},
    )
    first = {"w": np.zeros(SIZE, np.float32)} if initial is None else initial
    arrays = ArrayRecord({name: Array(value) for name, value in first.items()})
    return made.start(grid, arrays, rounds, train_config or ConfigRecord({"lr": 0.5}), evaluate_fn)


# --- cut off and lost -----------------------------------------------------------------------------------------------------------------


def test_updates_beyond_the_clip_are_counted_and_warned_of(tmp_path: Path) -> None:
    result = result_of(tmp_path, lambda client, w: ({"w": (w + 5).astype(np.float32)}, {"num-examples": 10}), SECURE)
    assert [row["clipped_clients"] for row in result.rounds] == [6, 6]
    assert [row["trained"] for row in result.rounds] == [6, 6]
    (warning,) = result.warnings
    assert warning.startswith("round 0: 6 of 6 clients' updates went beyond ±1 and were cut off, or had no finite numbers")
    assert "raise protection.secagg_clip" in warning
    np.testing.assert_allclose(result.arrays[0]["w"].numpy(), 2.0, atol=1e-6)


@pytest.mark.parametrize("protection", ["", SECURE])
def test_ordinary_updates_are_not_warned_of(tmp_path: Path, protection: str) -> None:
    result = result_of(tmp_path, protection=protection)
    assert not result.warnings
    assert [(row["trained"], row["clipped_clients"], row["refusals"]) for row in result.rounds] == [(6, 0, [])] * 2


@pytest.mark.parametrize("protection", ["", SECURE])
def test_a_client_without_finite_numbers_is_not_counted_in_silence(tmp_path: Path, protection: str) -> None:
    def answer(client: int, w: np.ndarray[Any, Any]) -> Any:
        return {"w": np.full(SIZE, np.nan if client == 2 else 0.5, np.float32)}, {"num-examples": 10}

    result = result_of(tmp_path, answer, protection, rounds=1)
    (row,) = result.rounds
    if protection:  # nobody learns which client it is: it counts as zero
        assert (row["trained"], row["clipped_clients"]) == (6, 1)
        assert "1 of 6 clients' updates" in result.warnings[0]
    else:
        assert row["trained"] == 5
        assert row["refusals"] == [(2, "sum", "bad-input")]
        np.testing.assert_allclose(result.arrays[0]["w"].numpy(), 0.5)
        assert "1 refused with 'bad-input'" in result.warnings[0]


@pytest.mark.parametrize(
    ("step", "words"), [(1e-3, "rounding in the secure sum may change the mean update by"), (1e-7, "1 secure sum(s) of updates are zero")]
)
def test_values_lost_in_rounding_are_warned_of(tmp_path: Path, step: float, words: str) -> None:
    def answer(client: int, w: np.ndarray[Any, Any]) -> Any:
        return {"w": (w + step).astype(np.float32)}, {"num-examples": 10}

    result = result_of(tmp_path, answer, f"{SECURE}\nsecagg_clip = 1e6", rounds=1, settings={"secagg_clip": 1e6})
    assert any(words in warning for warning in result.warnings), result.warnings


# --- refused --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protection", ["", SECURE])
@pytest.mark.parametrize(
    "arrays",
    [
        {}, {"v": np.zeros(SIZE, np.float32)}, {"w": np.zeros(SIZE + 1, np.float32)}, {"w": np.zeros((4, 4), np.float32)},
        {"w": np.zeros(SIZE, np.float32), "v": np.zeros(2, np.float32)},
    ],
    ids=["none", "another name", "longer", "another shape", "one more"],
)  # fmt: skip
def test_arrays_that_are_not_the_models_are_named_in_the_result(
    tmp_path: Path, arrays: dict[str, np.ndarray[Any, Any]], protection: str
) -> None:
    result = result_of(tmp_path, lambda client, w: (arrays, {"num-examples": 10}), protection, rounds=1)
    (row,) = result.rounds
    assert row["trained"] == 0
    assert row["skipped"]
    assert {code for _, _, code in row["refusals"]} == {"bad-result"}
    assert "6 refused with 'bad-result' (the application's train function returned no arrays, or not the model's" in result.warnings[0]


@pytest.mark.parametrize("gram", ["", 'gram = ["haar"]\n'])
@pytest.mark.parametrize(
    "spoilt",
    [
        lambda rows: 3 * rows, lambda rows: 0 * rows, lambda rows: rows.T, lambda rows: rows[0], lambda rows: rows + 0.1,
        lambda rows: np.where(rows > 0, np.nan, rows), lambda rows: rows[[0, 0, 1]], lambda rows: rows[:0],
    ],
    ids=["scaled", "zero", "transposed", "one row", "moved", "not finite", "repeated", "none"],
)  # fmt: skip
def test_what_is_no_signature_is_refused(tmp_path: Path, spoilt: Callable[[Any], Any], gram: str) -> None:
    def signature(client: int) -> Any:
        rows = np.linalg.qr(np.random.default_rng(client % 2).normal(size=(12, 3)))[0].T
        return spoilt(rows) if client == 5 else rows

    settings = {"gram": ("haar",)} if gram else {}
    result = result_of(tmp_path, protection=gram, signature=signature, k=2, rounds=1, settings=settings)
    assert result.labels == {client: client % 2 for client in range(5)}
    assert "1 refused with 'no-signature'" in result.warnings[0]


def test_signatures_that_all_are_none_end_the_start_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"6 refused with 'no-signature' \(the application's signature is not one"):
        result_of(tmp_path, signature=lambda client: np.ones((3, 12)), k=2)


def test_arrays_without_axes_and_of_another_byte_order_are_trained(tmp_path: Path) -> None:
    layout = layout_of(ArrayRecord({"t": Array(np.zeros((), np.float32)), "w": Array(np.zeros((2, 3), ">f4"))}))
    record = cut(np.arange(7, dtype=np.float32), layout)
    assert {name: array.numpy().shape for name, array in record.items()} == {"t": (), "w": (2, 3)}
    np.testing.assert_array_equal(flat(record, layout), np.arange(7))


@pytest.mark.parametrize("spoil", [lambda w, u: u, lambda w, u: -w, lambda w, u: 10 * w, lambda w, u: 0 * w])
def test_one_client_that_returns_no_trained_model_is_named(
    tmp_path: Path, spoil: Callable[[Any, Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """In the client's log. Only zeros are refused: training that converges within a round may give all the others."""
    first = np.random.default_rng(0).normal(size=256).astype(np.float32)

    def answer(client: int, w: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        update = 0.05 * np.random.default_rng(client).normal(size=256)
        return {"w": (spoil(w, update) if client == 3 else w + update).astype(np.float32)}, {"num-examples": 10}

    result = result_of(tmp_path, answer, rounds=1, initial={"w": first})
    zeros = not spoil(first, first).any()
    assert [(client, code) for client, _, code in result.rounds[0]["refusals"]] == ([(3, "bad-result")] if zeros else [])
    assert sum("what clients returned" in record.message for record in caplog.records) >= 1


@pytest.mark.parametrize("kind", ["int64", "bool", "complex64", "<U1"])
def test_arrays_that_are_not_floating_are_refused(kind: str, tmp_path: Path) -> None:
    result = result_of(tmp_path, lambda client, w: ({"w": np.ones(SIZE).astype(kind)}, {"num-examples": 10}), rounds=1)
    (row,) = result.rounds
    assert {code for _, _, code in row["refusals"]} == {"bad-result"}
    assert "or not the model's by names, shapes and floating dtypes" in result.warnings[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"initial": {}}, "initial_arrays: have no numbers"),
        ({"initial": {"w": np.zeros(0, np.float32)}}, "initial_arrays: have no numbers"),
        ({"initial": {"w": np.full(SIZE, np.nan, np.float32)}}, "initial_arrays: have numbers that are not finite"),
        ({"rounds": 0}, "num_rounds = 0: expected 1 or more"),
        ({"evaluate_fn": lambda number, cluster, arrays: 0.5}, r"evaluate_fn: returned float \(0\.5\), expected a MetricRecord"),
    ],
)
def test_what_a_server_app_gives_wrongly_is_one_line(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        result_of(tmp_path, **{"rounds": 1, **given})


def test_settings_that_are_not_sent_are_warned_of(tmp_path: Path) -> None:
    result = result_of(tmp_path, rounds=1, train_config=ConfigRecord({"lr": 0.5, "layers": [1, 2]}))
    assert result.warnings == ["train_config: 'layers' are not sent to clients, since only single values are"]


def test_two_nodes_with_one_identity_are_named(tmp_path: Path) -> None:
    result = result_of(tmp_path, rounds=1, nodes=(0, 1, 2, 3, 4, 5, 0))
    assert len(result.labels) == 6
    assert "1 refused with 'two-places' (two places answered as this client at once" in result.warnings[0]


def test_an_application_that_fails_is_counted(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"0 of 6 clients answered within 0\.2 s; .* answers were errors: see the clients' logs"):
        result_of(tmp_path, rounds=1, message_type="query", wait_seconds=0.2)


def test_a_client_that_gives_no_answer_is_named_once(tmp_path: Path) -> None:
    def absent(client: int, weights: np.ndarray[Any, Any]) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
        if client == 3:
            raise RuntimeError("out of memory")
        return moved(client, weights)

    result = result_of(tmp_path, absent, rounds=3)
    assert [warning for warning in result.warnings if "gave no answer" in warning] == [
        "round 0: client 3: gave no answer that counts; the mean is of the others"
    ]
    assert all(any("client 3: gave no answer" in doubt for doubt in row["doubts"]) for row in result.rounds)


def test_signatures_that_are_all_the_same_are_named(tmp_path: Path) -> None:
    result = result_of(tmp_path, signature=lambda client: np.eye(12)[:3], k=2, rounds=1)
    assert any("all clients' signatures are the same, so their clusters mean nothing" in warning for warning in result.warnings)


# --- what no training gives ---------------------------------------------------------------------------------------------------------------

BEGAN = np.random.default_rng(5).normal(size=256).astype(np.float32)
RETURNED: dict[str, tuple[Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], Any], str]] = {
    "updates": (lambda w, step: 0.05 * step, "nothing in common with the model that they were sent"),
    "the opposite": (lambda w, step: -w + 0.05 * step, "or is its opposite"),
    "models of their own": (lambda w, step: step, "or train a model of their own"),
    "multiples": (lambda w, step: 10 * w + step, "is 10 times the model that they were sent"),
    "nothing new": (lambda w, step: w, "1 mean(s) of updates are zero: no client changed its arrays"),
    "a training": (lambda w, step: w + 0.3 * step, ""),
    "a training with decay": (lambda w, step: 0.7 * w + 0.3 * step, ""),
    "a large step": (lambda w, step: w + 5 * step, ""),
}


@pytest.mark.parametrize("kind", RETURNED)
def test_means_that_no_training_gives_are_named(kind: str, tmp_path: Path) -> None:
    returned, words = RETURNED[kind]

    def answer(client: int, w: np.ndarray[Any, Any]) -> Any:
        step = np.random.default_rng([client, int(1000 * abs(w[0]))]).normal(size=w.size)
        return {"w": np.asarray(returned(w, step), np.float32)}, {"num-examples": 10}

    result = result_of(tmp_path, answer, initial={"w": BEGAN})
    assert bool(result.warnings) == bool(words), result.warnings
    assert all(words in warning or "refused with 'bad-result'" in warning for warning in result.warnings), result.warnings


def test_models_of_few_numbers_and_of_zeros_are_not_judged() -> None:
    assert mean_doubts(np.zeros(256), np.ones(256)) == mean_doubts(np.ones(8), -np.ones(8)) == []
    assert mean_doubts(np.ones(256, np.float32), -2 * np.ones(256, np.float32))


# --- weights --------------------------------------------------------------------------------------------------------------------------


def test_updates_are_weighed_by_examples_as_by_fedavg(tmp_path: Path) -> None:
    counts, moves = 10.0 * np.arange(1, 7), 0.1 * np.arange(6)
    result = result_of(tmp_path, rounds=1)
    np.testing.assert_allclose(result.arrays[0]["w"].numpy(), (counts @ moves) / counts.sum(), rtol=1e-6)
    assert not result.notes


def test_equal_weights_are_asked_for(tmp_path: Path) -> None:
    result = result_of(tmp_path, rounds=1, weights="equal")
    np.testing.assert_allclose(result.arrays[0]["w"].numpy(), 0.25, rtol=1e-6)
    assert not result.notes
    with pytest.raises(InputError, match="weights = 'own': expected 'examples' or 'equal'"):
        ClusteredAveraging(weights="own")  # type: ignore[arg-type]


def test_secure_sums_weigh_up_to_a_public_limit(tmp_path: Path) -> None:
    """Ten clients, three of whom must be left: weights of 40 to 60 under a limit of 60 are all above the least weight."""
    counts, moves = 40.0 + 2 * np.arange(10), 0.1 * np.arange(10)

    def answer(client: int, w: np.ndarray[Any, Any]) -> Any:
        return {"w": (w + 0.1 * client).astype(np.float32)}, {"num-examples": int(counts[client])}

    result = result_of(tmp_path, answer, f"{SECURE}\nmax_weight = 60.0", clients=10, rounds=1, settings={"max_weight": 60.0})
    np.testing.assert_allclose(result.arrays[0]["w"].numpy(), (counts @ moves) / counts.sum(), rtol=1e-4)
    assert result.notes == ["num-examples above protection.max_weight = 60 count as that, and small ones may count as more"]


def test_without_a_public_limit_secure_sums_weigh_alike_and_say_so(tmp_path: Path) -> None:
    result = result_of(tmp_path, protection=SECURE, rounds=1)
    np.testing.assert_allclose(result.arrays[0]["w"].numpy(), 0.25, atol=1e-6)
    (note,) = result.notes
    assert note.startswith("all clients weigh alike, where FedAvg weighs by num-examples: protection.max_weight = 0")


def test_without_examples_updates_are_refused_where_they_are_weighed(tmp_path: Path) -> None:
    result = result_of(tmp_path, lambda client, w: ({"w": w}, {"loss": 1.0}), rounds=1)
    (row,) = result.rounds
    assert row["skipped"]
    assert {code for _, _, code in row["refusals"]} == {"no-examples"}
    again = tmp_path / "equal"
    again.mkdir()
    assert not result_of(again, lambda client, w: ({"w": w + 1}, {"loss": 1.0}), rounds=1, weights="equal").warnings


@pytest.mark.parametrize("count", [0, -5, 0.4, float("nan"), float("inf")])
def test_a_number_of_examples_below_one_is_refused(count: float, tmp_path: Path) -> None:
    result = result_of(tmp_path, lambda client, w: ({"w": w + 1}, {"num-examples": 10 if client else count}), rounds=1)
    assert result.rounds[0]["refusals"] == [(0, "sum", "no-examples")]


def test_a_client_with_nearly_all_examples_is_named(tmp_path: Path) -> None:
    result = result_of(tmp_path, lambda client, w: ({"w": w + 1}, {"num-examples": 10 if client else 10**9}), rounds=1)
    assert result.rounds[0]["largest_share"] > 0.99
    assert "one client has 100% of all examples, so the mean is its own update; is its num-examples right?" in result.warnings[0]


# --- reported ------------------------------------------------------------------------------------------------------------------------


def test_a_run_reports_scores_clipping_and_noise(tmp_path: Path) -> None:
    def evaluate(number: int, label: int, arrays: Any) -> MetricRecord:
        return MetricRecord({"confusion": [0, 40, 0, 60]})

    noisy: Any = {"clip_norm": 1.0, "noise_multiplier": 50.0, "entropy": public_entropy("noise")}
    result = result_of(tmp_path, evaluate_fn=evaluate, **noisy)
    for row in result.rounds:
        assert row["metrics"][0]["balanced_accuracy"] == 0.5
        assert row["server_clipped_share"] == pytest.approx(3 / 6)  # clients 3, 4 and 5 move by 1.2 and more
        assert row["server_noise_to_signal"][0] > 1
        assert row["train_loss"] == [None]  # a loss would carry no noise
    assert any(words.startswith("evaluate_fn: the model predicts class 1 for all 100") for words in result.warnings)
    assert any(words.startswith("cluster 0: noise swamps the signal") for words in result.warnings)


@pytest.mark.parametrize(
    ("protection", "settings"), [("", {}), (SECURE, {}), ('robust = "geometric_median"', {"robust": "geometric_median"})]
)
def test_the_training_loss_is_read_where_only_the_mean_is_made_of_updates(
    tmp_path: Path, protection: str, settings: dict[str, Any]
) -> None:
    def answer(client: int, w: np.ndarray[Any, Any]) -> Any:
        metrics = {"num-examples": 10 * (client + 1)} | ({} if client == 5 else {"train_loss": 1.0 + client})
        return {"w": (w + 0.1).astype(np.float32)}, metrics

    result = result_of(tmp_path, answer, protection, rounds=1, settings=settings)
    weighed = sum(10 * (client + 1) * (1.0 + client) for client in range(5)) / 150
    plain = not protection and not settings
    assert result.rounds[0]["train_loss"] == ([pytest.approx(weighed)] if plain else [None])
