"""The filter for any NVFlare job: what it releases, what that costs, and what it blocks."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare.apis", reason="the extra `nvflare` is not installed")

from fake_controller import context, deployment
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from scenes import population

from cflpriv.errors import InputError
from cflpriv.federation.client_ledger import ClientLedger
from cflpriv.federation.messages import Refused, decode_answer
from cflpriv.nvflare.exchange import ANSWER, TASK, CflprivExecutor, site_settings
from cflpriv.nvflare.privacy_filter import PrivacyFilter, release_event
from cflpriv.privacy.settings import Privacy
from cflpriv.protocols.accounting import epsilon_of

PRIVACY = 'unit = "client"\nepsilon = 4.0\ndelta = 1e-5\nclip_norm = 0.5\nrelation = "replace_one"'
MODEL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(4000, np.float32)}


class Site:
    """A site whose filter stands in both chains, as NVFlare builds it: a new one for every task."""

    def __init__(self, folder: Path, privacy: str = PRIVACY, releases: int = 3) -> None:
        deployment(folder, population(clients_per_group=1), privacy=privacy)
        self.folder, self.releases = folder / "site-1", releases

    def context(self, task: str = "train") -> FLContext:
        made = context(self.folder, "site-1")
        made.set_prop(FLContextKey.TASK_NAME, task, private=True, sticky=False)
        return made

    def chain(self, kind: str) -> PrivacyFilter:
        made = PrivacyFilter(self.releases)
        made.set_prop(FilterContextKey.CHAIN_TYPE, kind)
        return made

    def answer(self, result: Shareable, model: Mapping[str, Any] | None = MODEL, task: str = "train") -> Shareable:
        """What the server gets of a task's result."""
        at_site = self.context(task)
        if model is not None:
            sent = DXO(DataKind.WEIGHTS, data={name: value.copy() for name, value in model.items()}).to_shareable()
            sent.set_header(AppConstants.CURRENT_ROUND, 7)
            self.chain(FilterChainType.TASK_DATA_CHAIN).process(sent, at_site)
            for value in from_shareable(sent).data.values():
                value += 1  # executors may train in place
        return self.chain(FilterChainType.TASK_RESULT_CHAIN).process(result, at_site)

    def spent(self) -> float:
        settings, store, _ = site_settings(self.context())
        return ClientLedger(settings.privacy, settings.identity.client, store).spent()


def trained(moved: float = 1.0, kind: str = DataKind.WEIGHTS, **changes: Any) -> Shareable:
    data = {name: value * (kind == DataKind.WEIGHTS) + np.float32(moved) for name, value in MODEL.items()} | changes
    return DXO(kind, data=data, meta={MetaKey.NUM_STEPS_CURRENT_ROUND: 1234, "accuracy": 0.75}).to_shareable()


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_an_update_is_clipped_and_noised_as_its_event_says(tmp_path: Path, kind: str) -> None:
    """The noise's standard deviation is estimated from 4006 numbers: within 10 % but for one in 10^18 runs (chi-squared)."""
    site = Site(tmp_path)
    sent = from_shareable(site.answer(trained(kind=kind)))
    assert sent.data_kind == kind
    update = np.concatenate([np.ravel(sent.data[name] - (MODEL[name] if kind == DataKind.WEIGHTS else 0)) for name in MODEL])
    clipped = 0.5 / math.sqrt(update.size)
    event = release_event(site_settings(site.context())[0].privacy, 3)
    assert event.sensitivity == 1.0, "one data set for another moves a clipped update by twice the bound"
    deviation = event.noise_multiplier * event.sensitivity
    assert np.sqrt(np.mean((update - clipped) ** 2)) == pytest.approx(deviation, rel=0.1)
    assert {name: (value.shape, value.dtype) for name, value in sent.data.items()} == {
        name: (value.shape, value.dtype) for name, value in MODEL.items()
    }


def test_nothing_of_the_answer_leaves_beside_the_update(tmp_path: Path) -> None:
    result = trained()
    result["more"], result["accuracy"] = 1.0, 2.0
    result.set_header("samples", 1234)
    result.set_header(AppConstants.CURRENT_ROUND, 99)
    sent = Site(tmp_path).answer(result)
    assert from_shareable(sent).meta == {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}
    assert set(sent) == set(DXO(DataKind.WEIGHTS, data=dict(MODEL)).to_shareable())
    assert sent.get_header("samples") is None
    assert sent.get_header(AppConstants.CURRENT_ROUND) == 7, "the server's own, not what the answer says"


def test_the_budget_ends_after_so_many_releases_also_in_new_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path, releases=3)
    spent = []
    for _ in range(3):
        site.answer(trained())
        spent.append(site.spent())
    assert spent == sorted(spent)
    assert 3.99 < spent[-1] <= 4.0
    with caplog.at_level(logging.ERROR), pytest.raises(ContentBlockedException, match=r"^over-budget$"):
        site.answer(trained())
    assert "site-1: the answer to task 'train' is blocked: over-budget" in caplog.text
    assert site.spent() == spent[-1]
    with pytest.raises(ContentBlockedException):
        site.answer(trained(), task="another job's task")


def test_the_noise_is_the_least_that_keeps_to_the_budget() -> None:
    for relation in ("add_remove", "replace_one"):
        privacy = Privacy(unit="client", epsilon=2.0, delta=1e-6, clip_norm=3.0, relation=relation)
        event = release_event(privacy, 10)
        assert event.sensitivity == (3.0 if relation == "add_remove" else 6.0)
        assert 1.99 < epsilon_of([event] * 10, 1e-6) <= 2.0
        assert epsilon_of([event] * 11, 1e-6) > 2.0


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (make_reply(ReturnCode.EXECUTION_EXCEPTION), "the task failed"),
        (Shareable({"weights": MODEL["w"]}), "not a valid DXO"),
        (DXO(DataKind.METRICS, data={"accuracy": 0.5}).to_shareable(), "data kind 'METRICS'"),
        (trained(more=np.ones(3, np.float32)), "are not those of the received model"),
        (trained(w=np.ones((2, 3), np.float64)), "are not those of the received model"),
        (trained(w=np.ones((3, 2), np.float32)), "are not those of the received model"),
    ],
    ids=["failed", "no dxo", "metrics", "another name", "another type", "another shape"],
)  # fmt: skip
def test_what_is_no_update_is_blocked_and_paid(tmp_path: Path, result: Shareable, why: str, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path)
    with caplog.at_level(logging.ERROR), pytest.raises(ContentBlockedException, match=r"^blocked$"):
        site.answer(result)
    assert why in caplog.text
    assert site.spent() > 0, "that an answer is blocked shows something of the data"


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
@pytest.mark.parametrize("moved", [math.nan, math.inf])
def test_what_is_not_finite_is_no_change_with_noise(tmp_path: Path, kind: str, moved: float, caplog: pytest.LogCaptureFixture) -> None:
    """A server that sends a model at the edge of overflow does not learn for which data it overflows."""
    site = Site(tmp_path)
    with caplog.at_level(logging.ERROR):
        sent = from_shareable(site.answer(trained(kind=kind, w=np.full((2, 3), moved, np.float32))))
    assert "not finite" in caplog.text
    update = np.concatenate([np.ravel(sent.data[name] - (MODEL[name] if kind == DataKind.WEIGHTS else 0)) for name in MODEL])
    event = release_event(site_settings(site.context())[0].privacy, 3)
    assert np.sqrt(np.mean(update**2)) == pytest.approx(event.noise_multiplier * event.sensitivity, rel=0.1)
    assert site.spent() == pytest.approx(epsilon_of([event], 1e-5))


def test_without_the_received_model_nothing_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path)
    with caplog.at_level(logging.ERROR), pytest.raises(ContentBlockedException):
        site.answer(trained(), model=None)
    assert "put the filter into task_data_filters, too" in caplog.text


def test_whole_numbers_stay_as_they_were_received(tmp_path: Path) -> None:
    model = {**MODEL, "batches": np.array([5])}
    sent = from_shareable(Site(tmp_path).answer(trained(batches=np.array([77])), model))
    assert sent.data["batches"] == 5
    sent = from_shareable(Site(tmp_path / "b").answer(trained(kind=DataKind.WEIGHT_DIFF, batches=np.array([72])), model))
    assert sent.data["batches"] == 0


@pytest.mark.parametrize("privacy", ["", 'unit = "sample"\nepsilon = 1.0\ndelta = 1e-5\nsamples = 10'], ids=["none", "sample"])
def test_settings_without_a_budget_for_clients_let_nothing_out(tmp_path: Path, privacy: str, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path, privacy)
    with caplog.at_level(logging.ERROR), pytest.raises(ContentBlockedException):
        site.answer(trained())
    assert "this filter releases whole updates; it needs unit = 'client'" in caplog.text


def test_what_our_executor_answered_leaves_as_it_is_and_the_name_of_a_task_opens_nothing(tmp_path: Path) -> None:
    """A job without code of its own names its tasks as it likes. Our executor keeps the same ledger by itself."""
    site = Site(tmp_path)
    sent = from_shareable(site.answer(trained(), task=TASK))
    assert np.std(sent.data["b"]) > 0.1, "the update is noised, as in any other task"
    at_site = site.context(TASK)
    answer = CflprivExecutor().execute(TASK, Shareable({}), at_site, Signal())
    answer["more"] = MODEL["w"]
    passed = site.chain(FilterChainType.TASK_RESULT_CHAIN).process(answer, at_site)
    assert set(passed) == {ANSWER, *Shareable()}
    assert decode_answer(passed[ANSWER]) == Refused("malformed")
    assert site.spent() == pytest.approx(epsilon_of([release_event(site_settings(at_site)[0].privacy, 3)], 1e-5))


@pytest.mark.parametrize("resources", [None, "{}", '{"allow_log_streaming": true}', '{"allow_log_streaming": 0}', "[", "[]"])
def test_a_site_whose_logs_go_to_the_server_lets_nothing_out(
    tmp_path: Path, resources: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """They say which updates are not finite. NVFlare sends them unless a site forbids it."""
    site = Site(tmp_path)
    file = site.folder / "local" / "resources.json"
    file.unlink() if resources is None else file.write_text(resources, encoding="utf-8")
    with caplog.at_level(logging.ERROR), pytest.raises(ContentBlockedException, match=r"^blocked$"):
        site.answer(trained())
    assert f"{file}: " in caplog.text
    answer = CflprivExecutor().execute(TASK, Shareable({}), site.context(TASK), Signal())
    assert decode_answer(answer[ANSWER]) == Refused("bad-settings")


def test_settings_that_cannot_be_read_let_nothing_out(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (site.folder / "local" / "cflpriv.toml").write_text("nonsense", encoding="utf-8")
    with pytest.raises(ContentBlockedException, match=r"^blocked$"):
        site.answer(trained())


@pytest.mark.parametrize("releases", [0, "3", 2.5, None, True])
def test_a_budget_for_no_number_of_releases_is_refused(releases: Any) -> None:
    with pytest.raises(InputError, match=f"releases = {releases!r}: expected an integer ≥ 1"):
        PrivacyFilter(releases)
