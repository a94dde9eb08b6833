"""A filter that makes the updates of any NVFlare job differentially private, for a whole client, at the site.

Guarantee: everything that leaves the site through this filter in its life, over all jobs, is (ε, δ)-private for the unit "client", by the
`[privacy]` of the site's own settings and the ledger in its state folder: two data sets of the client are hidden from each other under
`relation = "replace_one"`, the client's updates from zeros under "add_remove". Each answer is charged before it is looked at. An update
with numbers that are not finite counts as none, so a server cannot learn which models make them so.

Reveals: when the site answers, and how often, and whether the task failed, which no noise hides; the names, shapes and types of the
model's arrays, which the server sent. Not covered: what leaves in other ways. A job that brings its own code can send what it likes, so a
site that relies on this filter allows no such job. Of NVFlare's own classes, those that send values by events or from client to client
(such as `ConvertToFedEvent` and those of `ccwf`) do not ask a filter for results, so it takes them off its `class_allow_list`. An answer of
`CflprivExecutor` leaves as it is: its client keeps the same ledger.

Source: the Gaussian mechanism in the local model (Dwork & Roth 2014, appendix A), noise by the exact formula (Balle & Wang 2018).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import ContentBlockedException, Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants

from ..errors import InputError
from ..federation.client_ledger import ClientLedger
from ..keys import Key, check_ranges
from ..privacy.settings import Privacy
from ..protocols.accounting import calibrate
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import RemoteError
from ..protocols.events import GaussianEvent
from ..protocols.mechanisms import clip, gaussian
from ..types import Array
from .exchange import ANSWER, ANSWERED, site_settings

__all__ = ["PrivacyFilter", "Received", "noised", "received", "release_event"]

RECEIVED = "cflpriv received model"
"""The property of a task's context that keeps what the server sent."""
ROUND_HEADERS = (AppConstants.CURRENT_ROUND, AppConstants.NUM_ROUNDS)
"""Headers of the task that its answer repeats."""
log = logging.getLogger("cflpriv.nvflare")


@dataclass(frozen=True)
class Received:
    """A copy of the model in a task, because executors may train in place, and the task's headers."""

    model: Mapping[str, Array]
    headers: Mapping[str, Any]


@lru_cache(maxsize=16)
def release_event(privacy: Privacy, releases: int) -> GaussianEvent:
    """The event of one release, with the least noise by which `releases` of them cost the budget."""
    sensitivity = privacy.clip_norm * (1 if privacy.relation == "add_remove" else 2)

    def event(noise_multiplier: float) -> GaussianEvent:
        return GaussianEvent(noise_multiplier, sensitivity, privacy.relation, "client")

    return event(calibrate(lambda z: [event(z)] * releases, privacy.epsilon, privacy.delta, 1e-4))


def noised(update: Mapping[str, Array], clip_norm: float, event: GaussianEvent, entropy: Entropy = system_entropy) -> dict[str, Array]:
    """Arrays, clipped together to `clip_norm`, with the event's noise on each number; in float64.

    Raises `ValueError` for numbers that are not finite.
    """
    vector = np.concatenate([np.ravel(value).astype(np.float64) for value in update.values()])
    noisy = gaussian(clip(vector, clip_norm), event.sensitivity, event.noise_multiplier, event.relation, "client", entropy).value
    content, start = {}, 0
    for name, value in update.items():
        content[name] = noisy[start : start + value.size].reshape(value.shape)
        start += value.size
    return content


class PrivacyFilter(Filter):  # type: ignore[misc]
    """Clips each update, adds noise, charges the site's ledger, and blocks what the budget does not cover.

    It stands in both chains of a site's `privacy.json` (or of a job): on task data it keeps a copy of the received model, on task results
    it releases the difference to it. Sample counts, metrics and everything else in an answer are dropped. Arrays that are not floating
    stay as they were received (zeros in a difference).

    Args:
        releases: how many updates the budget is for. Less noise for few, and the budget ends after so many.
    """

    def __init__(self, releases: Annotated[int, Key("Updates that the budget is for.", "[1, inf)")]) -> None:
        super().__init__()
        check_ranges(PrivacyFilter.__init__, {"releases": releases})
        self.releases = releases

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
            fl_ctx.set_prop(RECEIVED, received(shareable), private=True, sticky=False)
            return shareable
        task, ours = fl_ctx.get_prop(FLContextKey.TASK_NAME), fl_ctx.get_prop(ANSWERED)
        if ours is not None:  # set by our executor: the name of a task is the job's choice, and shows nothing
            return Shareable({ANSWER: ours})
        try:
            settings, store, _ = site_settings(fl_ctx)
            privacy = settings.privacy
            if privacy.unit != "client":
                raise InputError(f"[privacy] unit = {privacy.unit!r}: this filter releases whole updates; it needs unit = 'client'")
            event = release_event(privacy, self.releases)
            with store.alone():
                ClientLedger(privacy, settings.identity.client, store).charge([event], f"nvflare {task}")
            return self._released(shareable, fl_ctx.get_prop(RECEIVED), privacy, event)
        except RemoteError as error:
            log.error("%s: the answer to task %r is blocked: %s", fl_ctx.get_identity_name(), task, error.code)
            raise ContentBlockedException(error.code) from None
        except Exception as error:  # NVFlare logs it here, and tells the server that a filter failed
            log.error("%s: the answer to task %r is blocked: %s", fl_ctx.get_identity_name(), task, error)
            raise ContentBlockedException("blocked") from None

    @staticmethod
    def _released(shareable: Shareable, sent: Received | None, privacy: Privacy, event: GaussianEvent) -> Shareable:
        """A new answer that holds the noised update and nothing else of the old one."""
        if shareable.get_return_code() != ReturnCode.OK:
            raise InputError(f"the task failed: {shareable.get_return_code()}")
        if sent is None:
            raise InputError("no model came with the task; put the filter into task_data_filters, too")
        answer = from_shareable(shareable)
        if answer.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF):
            kind = getattr(answer.data_kind, "value", answer.data_kind)
            raise InputError(f"data kind {kind!r}: only weights and differences of weights can be released")
        whole = answer.data_kind == DataKind.WEIGHTS
        before = sent.model
        after = {str(name): np.asarray(value) for name, value in answer.data.items()}
        layouts = [{name: (value.shape, value.dtype) for name, value in sorted(content.items())} for content in (before, after)]
        if layouts[0] != layouts[1]:
            raise InputError("the arrays of the answer are not those of the received model, by name, shape and type")
        floating = [name for name, value in sorted(before.items()) if np.issubdtype(value.dtype, np.floating)]
        update = {name: after[name].astype(np.float64) - (before[name] if whole else 0) for name in floating}
        if not all(np.isfinite(value).all() for value in update.values()):
            log.error("the update has numbers that are not finite and is sent as no change, with noise")
            update = {name: np.zeros_like(value) for name, value in update.items()}
        noisy = noised(update, privacy.clip_norm, event)
        released = {name: value if whole else np.zeros_like(value) for name, value in before.items()}
        for name, change in noisy.items():
            released[name] = ((before[name] if whole else 0) + change).astype(before[name].dtype)
        fresh = DXO(answer.data_kind, data=released, meta={MetaKey.NUM_STEPS_CURRENT_ROUND: 1}).to_shareable()
        for header, value in sent.headers.items():
            fresh.set_header(header, value)
        return fresh


def received(shareable: Shareable) -> Received | None:
    """What the server sent with a task. None where it is no model."""
    try:
        arrays = from_shareable(shareable)
    except ValueError:
        return None
    if arrays.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF) or not isinstance(arrays.data, dict):
        return None
    headers = {header: shareable.get_header(header) for header in ROUND_HEADERS}
    return Received({str(name): np.array(value) for name, value in arrays.data.items()}, headers)
