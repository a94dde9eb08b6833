"""Clustering epochs of encrypted vectors at the server, and what the key holder releases of them."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..clustering.similarity import Gram
from ..contract.calls import Recorder
from ..contract.handles import Held, Released
from ..contract.operations import GramView, Then
from ..errors import InputError
from ..federation import messages as m
from ..federation.epochs import Epoch, Epochs, EpochSession
from ..federation.task_encoding import check_small, fits
from ..protocols import ckks
from ..protocols.errors import MalformedMessage
from ..types import Array, check_array
from .ckks_settings import DISTANCES
from .vector_epochs import check_new

__all__ = ["EncryptedEpoch", "EncryptedStep", "Unanswered", "concluded", "epoch_for", "payloads", "released", "upload_of"]

Session = TypeVar("Session", bound=EpochSession)


def epoch_for(
    epochs: Epochs[Session], held: Held, clients: Sequence[int], against: Held | None, shape: tuple[int, ...]
) -> Epoch[Session]:  # fmt: skip
    """The epoch to extend by `clients`' vectors, of public `shape`, or a new one. Raises `InputError` for ones that do not fit.

    A first step that is taken again gets another number and other keys.
    """
    epoch = None if against is None else epochs.of(against)
    check_new(clients, epoch)
    if clients and len(shape) not in (1, 2):
        raise InputError(f"gram: {held.part} has shape {shape or 'that differs from client to client'}; pad to one public shape")
    rows = (1, *shape)[-2:]
    if epoch is None:
        return epochs.open((rows[0], rows[1]))
    if clients and rows != epoch.shape:
        raise InputError(f"gram: {held.part} has different shapes {sorted({rows, epoch.shape})}; pad to one public shape")
    return epoch


def upload_of(answer: m.Answer) -> bytes:
    """The bytes of an upload. Any other answer is encoded as a whole, which is no valid upload."""
    if isinstance(answer, m.Given) and [(array.name, array.value.dtype.str) for array in answer.values] == [("bytes", "|u1")]:
        with suppress(MalformedMessage):
            return answer.values[0].value.tobytes()
    return m.encode(answer)


def payloads(messages: Iterable[bytes]) -> list[dict[str, Array]]:
    """Messages as a record keeps them."""
    return [{"bytes": np.frombuffer(message, dtype=np.uint8)} for message in messages]


@dataclass(frozen=True)
class Unanswered:
    """A step that the key holder was asked to finish, without an answer so far: its part, request and uploads."""

    part: str
    ask: m.Finish
    uploads: Mapping[int, bytes]


class EncryptedEpoch:
    """What the server has of one clustering epoch: the machine with the ciphertexts, the number of steps, and released blocks."""

    def __init__(self) -> None:
        self.server: ckks.CkksServer | None = None
        self.announcement = b""
        self.steps = 0
        self.blocks: dict[tuple[int, int], Array] = {}
        self.unanswered: Unanswered | None = None

    @property
    def live(self) -> bool:
        return self.server is not None

    @property
    def machine(self) -> ckks.CkksServer:
        assert self.server is not None
        return self.server

    @property
    def release_std(self) -> float:
        """The standard deviation of the noise in released blocks."""
        setup = self.machine.setup
        return ckks.release_std(setup.parameters, setup.packing, setup.group, setup.scalars)

    @property
    def error(self) -> float:
        """A bound on the standard deviation of an inner product's error."""
        setup = self.machine.setup
        return max(ckks.error_std(setup.parameters, setup.packing, setup.group), self.release_std)

    def saved(self) -> dict[str, Any]:
        """Nothing: an epoch ends with the server's process, which has the ciphertexts."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """An epoch to which no client can be added."""


@dataclass(frozen=True)
class EncryptedStep:
    """One step of an epoch: the `clients` add their vectors of `held` (their `number`), and the key holder runs `then`."""

    held: Held
    number: int
    clients: Sequence[int]
    then: Then
    epoch: Epoch[Any]
    record: Recorder

    @property
    def order(self) -> list[int]:
        """All clients of the epoch, the new ones last."""
        return [*self.epoch.clients, *self.clients]


def released(step: EncryptedStep, answer: m.Answer, release: str) -> Gram | Released:
    """The content of the key holder's answer to a step: under `release` "gram" the Gram matrix with new blocks, else what `then` released.

    Raises `MalformedMessage`, `TypeError`, `InputError` or `LocalError` for any answer that does not fit the step.
    """
    if not isinstance(answer, m.HolderRelease):
        raise MalformedMessage
    if release == "gram":
        return _gram(step, answer)
    order = step.order
    result = {array.name: array.value for array in answer.result}
    evidence = {array.name: array.value for array in answer.evidence}
    check_small(result, len(order))
    if not fits(step.then, result, len(order), len(step.clients)):
        raise MalformedMessage
    if evidence:
        _check_evidence(evidence, order, release)
    plain = {name: value if value.ndim else value.item() for name, value in result.items()}
    return Released(plain, {name: _plain(value) for name, value in evidence.items()} if evidence else None)


def concluded(step: EncryptedStep, seen: Gram | Released, answer: m.Answer) -> Released:
    """The release of a step that is part of its epoch now, on the transcript. With a Gram matrix the server itself runs `then`."""
    context: dict[str, Any] = {"epoch": step.epoch.number}
    readers = ("server", "key-holder")
    if isinstance(seen, Released):
        for kind, values in (("result", seen.result), ("evidence", seen.evidence)):
            if values is not None:
                payload = {name: np.asarray(value) for name, value in values.items()}
                step.record(kind, "key-holder", "server", (), payload, readers=readers, context=context)
        return seen
    if isinstance(answer, m.HolderRelease) and answer.blocks:
        blocks = [{"pair": np.array((left, right)), "block": block} for left, right, block in answer.blocks]
        context["std"] = step.epoch.session.release_std
        lefts = [left for left, _, _ in answer.blocks]
        step.record("gram", "key-holder", "server", lefts, blocks, readers=readers[::-1], context=context)
    result, evidence = step.then(GramView(seen, tuple(step.clients), step.epoch.memory))
    check_small(result, seen.n)
    return Released(result, evidence)


def _gram(step: EncryptedStep, answer: m.HolderRelease) -> Gram:
    session, order = step.epoch.session, step.order
    setup, error = session.machine.setup, session.error
    fresh = {(left, right): check_array("block", value) for left, right, value in answer.blocks}
    pairs = {frozenset(pair) for pair in fresh}
    fit = all(block.shape == (setup.p, setup.p) for block in fresh.values())
    if not fit or len(pairs) < len(answer.blocks) or any(not pair <= set(order) or not pair & set(step.clients) for pair in pairs):
        raise MalformedMessage
    matrix = ckks.gram_matrix(order, session.blocks | fresh, session.machine.landmarks, error)
    gram = Gram.of_matrix(order, matrix, setup.p, error)
    session.blocks |= fresh
    return gram


def _check_evidence(evidence: Mapping[str, Array], order: Sequence[int], release: str) -> None:
    """Raises `MalformedMessage` or `InputError` for anything but the distances of these clients."""
    if release != "distances" or set(evidence) != set(DISTANCES):
        raise MalformedMessage
    distance = check_array("distance", evidence["distance"])
    if distance.shape != (len(order), len(order)) or evidence["clients"].tolist() != list(order):
        raise MalformedMessage


def _plain(value: Array) -> Any:
    """Clients as a tuple, a matrix as an array."""
    return tuple(value.tolist()) if value.ndim == 1 else value
