"""A client's part in what travels under a transform that the clients share: agreeing on its secret, hiding, folding."""

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from ..channels import TransformCache, Transforms, check_hidden, group_epoch, sketched
from ..errors import InputError
from ..handles import times
from ..protocols import group
from ..protocols.entropy import Entropy
from ..protocols.errors import LocalError, RemoteError
from ..protocols.orthonormal import HAAR_LIMIT, TRANSFORMS, Transform
from ..types import Array
from . import messages as m
from .settings import Settings
from .store import Store
from .values import Exchange, Values

__all__ = ["Apply", "Transformed", "check_length"]

PURPOSE = "transforms"
EPOCH = re.compile(r"gram/(0|[1-9][0-9]{0,15})(@[0-9]+)?", re.ASCII)
"""One name for each epoch: "gram/07" would be its transform a second time."""
SECRETS = "group-secrets"
"""The store's name for what the client derived from the group's secret, by group epoch."""
_read_secrets = msgspec.msgpack.Decoder(dict[int, bytes]).decode


@dataclass(frozen=True, eq=False)
class Apply:
    """Asks whoever drives a client for its `rows` (k, d) under a transform, which may be applied to those of several clients at once."""

    transform: Transform
    rows: Array


def check_length(key: str, what: str, kind: str, dimension: int, instead: str) -> None:
    """Refuse vectors too long for a dense rotation, naming what takes them."""
    if kind == "haar" and dimension > HAAR_LIMIT:
        raise InputError(
            f"protection.{key}: 'haar' keeps d² numbers and takes {what} up to d = {HAAR_LIMIT}; these have d = {dimension}: use {instead}"
        )


class Transformed:
    """Transforms of one client, made from the secret that it agreed on with the others.

    Each is for one epoch, sum or fold, and changes one value of this client in its life: a second one could be linked with the first, and
    from values that the server chose it would work the transform out.
    """

    def __init__(self, settings: Settings, store: Store, entropy: Entropy, cache: TransformCache) -> None:
        self._settings, self._store, self._entropy, self._cache = settings, store, entropy, cache

    def agree(self, ask: m.Group) -> m.Stepped:
        """One step of the agreement on the clients' secret. More than half of the roster must be in it, so that none can be kept apart."""
        settings = self._settings
        if not settings.protection.transformed or settings.roster is None:
            raise RemoteError("forbidden")
        read = partial(group.Member.from_bytes, identity=settings.identity, roster=settings.roster, entropy=self._entropy)
        member = self._store.load("group", read)
        if member is None:
            smallest = len(settings.roster.keys) // 2 + 1
            member = group.Member(settings.identity, settings.roster, ask.session, smallest=smallest, entropy=self._entropy)
        try:
            said = member.receive(ask.said)
        except LocalError:  # it is dead, and its secrets are gone
            self._store.drop("group")
            raise
        self._store.keep("group", member, group.Member.to_bytes)
        secrets = self._store.load(SECRETS, _read_secrets) or {}
        if member.epoch is not None and member.epoch not in secrets:
            self._store.keep(SECRETS, {**secrets, member.epoch: member.derive(PURPOSE)}, msgspec.msgpack.encode)
        return m.Stepped(said or b"")

    def transforms(self) -> Transforms:
        """The clients' transforms. Raises `RemoteError` "no-secret"."""
        secrets, kind = self._store.load(SECRETS, _read_secrets), self._settings.protection.sum
        if secrets is None:
            raise RemoteError("no-secret")
        return self._cache.shared(secrets, kind if kind in TRANSFORMS else "haar")

    def secrets(self) -> dict[str, str]:
        """What the transforms are made from, as hexadecimal digits."""
        secrets = self._store.load(SECRETS, _read_secrets) or {}
        return {f"group_secret@{epoch}" if epoch else "group_secret": secret.hex() for epoch, secret in secrets.items()}

    def rows(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[Apply, Array, m.Given]:
        """What is compared, sketched and under the epoch's transform."""
        protection = self._settings.protection
        kinds = [stage for stage in protection.gram if stage in TRANSFORMS]
        named = EPOCH.fullmatch(ask.transform)
        if len(values) != 1 or named is None:
            raise RemoteError("forbidden")
        rows = np.atleast_2d(np.asarray(next(iter(values.values()))))
        reduced = sketched(int(named[1]), protection.sketch_dim if "sketch" in protection.gram else None)(rows)
        if kinds:
            check_length("gram", "vectors", kinds[0], reduced.shape[-1], '["sketch", "haar"] or ["hadamard"]')
            made = self.transforms()(ask.transform, reduced.shape[-1], kinds[0])
            self._use(ask.transform, rows)
            reduced = yield Apply(made, reduced)
        return m.Given((m.Named("rows", reduced),), 0)

    def blind(self, ask: m.Give, vector: Array) -> Generator[Apply, Array, m.Given]:
        """An update under a transform: a fresh one for each sum unless these settings say "fixed". Counts are never given along."""
        if ask.weigh or not np.isfinite(vector).all():
            raise RemoteError("forbidden" if ask.weigh else "bad-input")
        fixed = self._settings.protection.transform == "fixed"
        if not (ask.transform.partition("@")[0] == "sum/fixed" if fixed else ask.transform.startswith("sum/")):
            raise RemoteError("forbidden")
        return (yield from self._hidden("mean", ask.transform, vector, fixed))

    def fold(self, ask: m.Fold, values: Values, exchange: Exchange) -> Generator[Apply, Array, m.Given]:
        """Blind parts, opened, added up, multiplied by what is in `times`, and sent back under a fresh transform.

        Clear and own parts take no part: they would be shown.
        """
        shown = any(part.clear or part.own for part in (ask.value, *ask.times))
        if self._settings.protection.sum not in TRANSFORMS or shown or len(ask.times) > 1 or not ask.transform.startswith("apply/"):
            raise RemoteError("forbidden")
        try:
            value, *numbers = [values.open(one, self.transforms, exchange) for one in (ask.value, *ask.times)]
        except InputError:  # a secret that others have
            raise RemoteError("not-held") from None
        try:
            for number in numbers:
                value = times(value, number)
        except InputError:
            raise RemoteError("bad-input") from None
        return (yield from self._hidden("apply", ask.transform, np.ravel(value), False))

    def _hidden(self, verb: str, purpose: str, vector: Array, fixed: bool) -> Generator[Apply, Array, m.Given]:
        kind = self._settings.protection.sum
        check_hidden(verb, len(vector), kind)
        check_length("sum", "updates", kind, len(vector), "'hadamard' or 'secagg'")
        made = self.transforms()(purpose, len(vector))
        if not fixed:
            self._use(purpose, vector)
        (blind,) = yield Apply(made, vector[None])
        return m.Given((m.Named("blind", blind),), 0)

    def _use(self, purpose: str, value: Array) -> None:
        """Take a transform for this value, now and when the same is asked for again, and for no other. Raises "used-transform"."""
        group_epoch(purpose)
        name, mark = f"used/{purpose}", sha256(np.ascontiguousarray(value).data).digest()
        before = self._store.get(name)
        if before is not None and before != mark:
            raise RemoteError("used-transform")
        self._store.put(name, mark)
