"""Secure clustered averaging for an existing Flower app: one mod for its clients; its train function stays.

Importing this loads no torch.
"""

import logging
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.constant import ErrorCode

from ..contract.protection import Protection
from ..errors import InputError
from ..federation.foreign import ROUND, Foreign
from ..federation.messages import encode
from ..federation.settings import Settings, refused_settings
from ..federation.store import Store
from ..protocols.errors import RemoteError
from ..protocols.mechanisms import clip
from ..state_checks import FEWEST_VALUES
from ..transports.deployed import no_data, receive
from ..types import Array
from .client import answer, ask_of, settings_of, store_of
from .doubtful_updates import mean_doubts
from .transport import RECORD

__all__ = ["CLIP", "ArrayLayout", "cflpriv_mod", "cut", "flat", "layout_of"]

CLIP = "clip-norm"
"""The setting by which the server asks the clients' mod to clip; the application's train function sees it too."""
EXAMPLES = "num-examples"
"""The metric by which Flower's strategies weigh updates."""
SERVER_ROUND = "server-round"
"""The setting with the number of the round in Flower's strategies, from 1."""
LOSSES = ("train_loss", "train-loss", "loss")
"""The metrics that are read as the loss of a training, the first that there is."""
KEPT_EXAMPLES = "examples"
"""The store's name for the number of examples of the last training."""
KEPT_RESULTS, MOST_RESULTS, DIGEST, MOST_COMPARED = "results", 256, 16, 4096
"""The store's name for digests of what was sent and returned, how many, their bytes, and how many numbers are looked at."""
ORTHONORMAL = 1e-3
"""How far inner products of a signature's rows may be from those of orthonormal rows, whatever the precision of the application."""
ArrayLayout = tuple[tuple[str, tuple[int, ...], str], ...]
log = logging.getLogger("cflpriv.flower")


def _is_floating(dtype: str) -> bool:
    """Whether a dtype by its name, such as "float32" or ">f4", is a floating one of NumPy."""
    try:
        return np.dtype(dtype).kind == "f"
    except TypeError:
        return False


def layout_of(arrays: ArrayRecord) -> ArrayLayout:
    """The layout of a record's arrays in a flat vector. Raises `InputError` for arrays that are not floating."""
    layout = []
    for name, array in arrays.items():
        if not _is_floating(array.dtype):
            raise InputError(
                f"initial_arrays: {name!r} has dtype {array.dtype}; only floating arrays are averaged (BatchNorm counts its batches: "
                "use GroupNorm)"
            )
        layout.append((str(name), tuple(int(size) for size in array.shape), str(array.dtype)))
    return tuple(layout)


def flat(arrays: ArrayRecord, layout: ArrayLayout) -> Array:
    """The arrays of a record as one vector, float64 if any of them is. Raises `InputError` if they do not fit the layout."""
    named = {str(name): array for name, array in arrays.items()}
    for name, shape, _ in layout:
        if name not in named:
            raise InputError(f"arrays: {name!r} is missing; there are {', '.join(map(repr, named)) or 'none'}")
        if not _is_floating(named[name].dtype):
            raise InputError(f"arrays: {name!r} has dtype {named[name].dtype}, expected floating numbers")
        if tuple(named[name].shape) != shape:
            raise InputError(f"arrays: {name!r} has shape {tuple(named[name].shape)}, expected {shape}")
    if unknown := sorted(named.keys() - {name for name, _, _ in layout}):
        raise InputError(f"arrays: {unknown[0]!r} is not one of the model's, which are {', '.join(repr(name) for name, _, _ in layout)}")
    dtype = np.float64 if any(kind == "float64" for _, _, kind in layout) else np.float32
    return np.concatenate([np.ravel(named[name].numpy()).astype(dtype) for name, _, _ in layout])


def cut(vector: Array, layout: ArrayLayout) -> ArrayRecord:
    """A vector as a record of arrays."""
    arrays, start = {}, 0
    for name, shape, dtype in layout:
        stop = start + int(np.prod(shape, dtype=int))
        arrays[name] = FlowerArray(np.array(vector[start:stop].reshape(shape), dtype, order="C"))
        start = stop
    if start != len(vector):
        raise InputError(f"arrays: {len(vector)} numbers for a layout of {start}")
    return ArrayRecord(arrays)


def cflpriv_mod(
    signature: Callable[[Context], Array] | None = None,
    settings: Callable[[Context], tuple[Settings, Path | None, Mapping[str, Any]]] = settings_of,
    arrays: str = "arrays",
    config: str = "config",
    plain: tuple[str, ...] = (),
) -> Mod:
    """A client mod. `signature(context)` gives the client's (p, d) orthonormal rows, e.g. `signatures.principal_vectors` of its data.

    Anything else is refused ("no-signature"), as are arrays that are not the model's ("bad-result") and, for secure sums,
    those of an earlier round ("old-result"). Where the server weighs by examples, the weight is the metric "num-examples" that the train
    function returns.

    `settings` has the client's identity and the protection in force; by default from the file that the node was started with. `arrays`
    and `config` are the names under which the application's train function expects the model and its settings, and returns the model.

    Ordinary messages go to the application's functions, whose answers the server reads: where the settings name a protection or a privacy
    they are refused, but for the kinds in `plain`, e.g. ("evaluate",) for an evaluate function whose scores may be seen.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        ours = RECORD in message.content
        kind = message.metadata.message_type.partition(".")[0]
        if not ours and kind in plain:
            return call_next(message, context)
        try:
            who, folder, _ = settings(context)
            store = store_of(context, folder)
        except Exception as error:
            log.exception("settings")
            refused = refused_settings(error)
            return answer(message, encode(refused)) if ours else _refused(message, refused.code)
        if not ours:
            if who.protection == Protection() and who.privacy.unit == "none":
                return call_next(message, context)
            log.warning("forbidden: an ordinary %r message; cflpriv_mod(plain=(%r,)) would let it pass", kind, kind)
            return _refused(message, "forbidden")
        ask = ask_of(message)

        def train(task: Foreign, params: Mapping[str, Any]) -> Mapping[str, Array]:
            start = np.asarray(params["model"])
            message.content = RecordDict(
                {arrays: cut(start, task.layout), config: ConfigRecord({**dict(task.config), SERVER_ROUND: params[ROUND] + 1})}
            )
            reply = call_next(message, context)
            trained = reply.content.get(arrays) if reply.has_content() else None
            try:
                if not isinstance(trained, ArrayRecord):
                    raise InputError(f"the application's train function returned no arrays under {arrays!r}")
                back = flat(trained, task.layout)
                update = back - start
                _check_trained(start, update, task.layout)
            except InputError as error:
                log.error("bad-result: %s", error)
                raise RemoteError("bad-result") from None
            if who.protection.secure:  # in the clear the server sees it
                _check_new(store, start, back)
            _keep_examples(store, reply.content)
            norm = dict(task.config).get(CLIP)
            sent = {"update": clip(update, float(norm)).astype(update.dtype) if norm else update}
            return {part: sent.get(part, _loss(reply.content)) for part in task.asked}

        def sign(task: Foreign, params: Mapping[str, Any]) -> Mapping[str, Array]:
            if signature is None:
                raise InputError("cflpriv_mod: no signature function was given")
            return {"signature": _checked_signature(signature(context))}

        own = {"train": train, "signature": sign}
        return answer(message, receive(who, store, no_data, ask, own=own, samples=lambda: _examples(store)))

    return mod


def _check_trained(start: Array, update: Array, layout: ArrayLayout) -> None:
    """Log a warning for arrays that training from `start` (d,) hardly gives: unrelated to it, or a multiple.

    They are summed all the same: training that converges within a round forgets where it began. Raises `InputError` where one of the
    arrays is all zeros and was not when it was sent.
    """
    for doubt in mean_doubts(start, update, layout):
        log.warning("%s", doubt)
    place = 0
    for name, shape, _ in layout:
        sent, moved = (vector[place : place + int(np.prod(shape, dtype=int))] for vector in (start, update))
        place += len(sent)
        if len(sent) > 1 and sent.any() and not (sent + moved).any():
            raise InputError(f"arrays: {name!r} is all zeros, which it was not when it was sent; is it loaded into the module?")


def _check_new(store: Store, start: Array, trained: Array) -> None:
    """Raises `RemoteError` "old-result" for arrays (d,) that were returned for another model than `start` (d,), or were such a model.

    Equal to the last bit: neither training nor a repeated request gives that. Only for secure sums: updates in the clear are judged by
    the server. A model that did not change is no old one, and none of a few different numbers.
    """
    sent, back = (sha256(np.asarray(vector, start.dtype).tobytes()).digest()[:DIGEST] for vector in (start, trained))
    kept = store.get(KEPT_RESULTS) or b""
    pairs = [(kept[at : at + DIGEST], kept[at + DIGEST : at + 2 * DIGEST]) for at in range(0, len(kept), 2 * DIGEST)]
    old = (
        back != sent
        and len(np.unique(trained[:MOST_COMPARED])) >= FEWEST_VALUES
        and any(before != sent and back in (before, result) for before, result in pairs)
    )
    if (sent, back) not in pairs:
        pairs = [*pairs, (sent, back)][-MOST_RESULTS:]
        store.put(KEPT_RESULTS, b"".join(one + other for one, other in pairs))
    if old:
        log.error("old-result: the application's train function returned arrays that it returned, or was sent, in an earlier round")
        raise RemoteError("old-result")


def _keep_examples(store: Store, content: RecordDict) -> None:
    """Keep the number of examples that a train function returned, until its update is summed; none if it returned none of 1 or more."""
    store.drop(KEPT_EXAMPLES)
    for record in content.values():
        count = record.get(EXAMPLES) if isinstance(record, MetricRecord) else None
        if isinstance(count, int | float) and 1 <= count < float("inf"):
            store.put(KEPT_EXAMPLES, str(round(count)).encode())


def _loss(content: RecordDict) -> Array:
    """1 and the loss that a train function returned among its metrics; zeros if it returned none that is finite."""
    metrics = [record for record in content.values() if isinstance(record, MetricRecord)]
    losses = [record[name] for record in metrics for name in LOSSES if name in record]
    value = losses[0] if losses else None
    return np.array([1.0, value] if isinstance(value, int | float) and np.isfinite(value) else [0.0, 0.0], np.float32)


def _examples(store: Store) -> int:
    """The number of examples of the last training. Raises `RemoteError` "no-examples"."""
    kept = store.get(KEPT_EXAMPLES)
    if kept is None:
        log.error("no-examples: the application's train function returned no metric %r of 1 or more", EXAMPLES)
        raise RemoteError("no-examples")
    return int(kept)


def _checked_signature(value: Any) -> Array:
    """A signature (p, d), float64. Raises `RemoteError` "no-signature" for what is none."""
    rows = np.asarray(value, dtype=np.float64)
    why = ""
    if rows.ndim != 2 or not 0 < len(rows) <= rows.shape[-1]:
        why = f"has shape {rows.shape}; expected (rows, numbers of a sample), with no more rows than numbers"
    elif not np.isfinite(rows).all():
        why = "has numbers that are not finite"
    elif (error := float(np.abs(rows @ rows.T - np.eye(len(rows))).max())) > ORTHONORMAL:
        why = f"has rows that are not orthonormal: inner products are off by up to {error:.3g}"
    if why:
        log.error("no-signature: the signature %s; cflpriv.tasks.signatures.principal_vectors(samples, 3) makes one", why)
        raise RemoteError("no-signature")
    return rows


def _refused(message: Message, word: str) -> Message:
    """The reply to a server that does not speak our protocol: an error with a reason."""
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, word), reply_to=message)
