"""A client's part in what travels under a transform that the clients share: agreeing on its secret, hiding, folding."""

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np

from ..channels import ClearGram, GramChannel, Transforms, check_hidden
from ..errors import InputError
from ..handles import times
from ..protocols import group
from ..protocols.entropy import Entropy
from ..protocols.errors import LocalError, RemoteError
from ..protocols.orthonormal import TRANSFORMS
from ..types import Array
from . import messages as m
from .settings import Settings
from .store import Store
from .values import Values

__all__ = ["Transformed"]

PURPOSE = "transforms"
EPOCH = re.compile(r"gram/(0|[1-9][0-9]{0,15})", re.ASCII)
"""One name for each epoch: "gram/07" would be its transform a second time."""


class Transformed:
    """Transforms of one client, made from the secret that it agreed on with the others.

    Each is for one epoch, sum or fold, and changes one value of this client in its life: a second one could be linked with the first, and
    from values that the server chose it would work the transform out.
    """

    def __init__(self, settings: Settings, store: Store, entropy: Entropy) -> None:
        self._settings, self._store, self._entropy = settings, store, entropy

    def agree(self, ask: m.Group) -> m.Stepped:
        """One step of the agreement on the clients' secret. More than half of the roster must be in it, so that none can be kept apart."""
        settings = self._settings
        if not settings.protection.transformed or settings.roster is None:
            raise RemoteError("forbidden")
        stored = self._store.get("group")
        if stored is not None:
            member = group.Member.from_bytes(stored, settings.identity, settings.roster, entropy=self._entropy)
        else:
            smallest = len(settings.roster.keys) // 2 + 1
            member = group.Member(settings.identity, settings.roster, ask.session, smallest=smallest, entropy=self._entropy)
        said = member.receive(ask.said)
        self._store.put("group", member.to_bytes())
        return m.Stepped(said or b"")

    def transforms(self) -> Transforms:
        """The clients' transforms. Raises `RemoteError` "no-secret"."""
        settings, stored = self._settings, self._store.get("group")
        if stored is None or settings.roster is None:
            raise RemoteError("no-secret")
        member = group.Member.from_bytes(stored, settings.identity, settings.roster, entropy=self._entropy)
        try:
            secret = member.derive(PURPOSE)
        except LocalError:
            raise RemoteError("no-secret") from None
        return Transforms(secret, settings.protection.sum if settings.protection.sum in TRANSFORMS else "haar")

    def rows(self, ask: m.Give, values: Mapping[str, Any]) -> m.Given:
        """What is compared, sketched and under the epoch's transform."""
        from ..rotations import RotatedGram

        protection = self._settings.protection
        kinds = [stage for stage in protection.gram if stage in TRANSFORMS]
        named = EPOCH.fullmatch(ask.transform)
        if len(values) != 1 or named is None:
            raise RemoteError("forbidden")
        number = int(named[1])
        sketch_dim = protection.sketch_dim if "sketch" in protection.gram else None
        rows = np.atleast_2d(np.asarray(next(iter(values.values()))))
        channel: GramChannel = ClearGram(sketch_dim)
        if kinds:
            self._use(ask.transform, rows)
            channel = RotatedGram(self.transforms(), kinds[0], sketch_dim)
        upload = channel.open(number).upload(self._settings.identity.client, rows)
        return m.Given(tuple(m.Named(part, m.to_tensor(np.asarray(value))) for part, value in upload.items()), 0)

    def blind(self, ask: m.Give, vector: Array) -> m.Given:
        """An update under a transform: a fresh one for each sum unless these settings say "fixed". Counts are never given along."""
        if ask.weigh or not np.isfinite(vector).all():
            raise RemoteError("forbidden" if ask.weigh else "bad-input")
        if self._settings.protection.transform == "fixed":
            purpose = "sum/fixed"
        else:
            purpose = ask.transform
            if not purpose.startswith("sum/"):
                raise RemoteError("forbidden")
            self._use(purpose, vector)
        return self._hidden("mean", purpose, vector)

    def fold(self, ask: m.Fold, values: Values) -> m.Given:
        """Blind parts, opened, added up, multiplied by what is in `times`, and sent back under a fresh transform.

        Clear and own parts take no part: they would be shown.
        """
        shown = any(part.clear or part.own for part in (ask.value, *ask.times))
        if self._settings.protection.sum not in TRANSFORMS or shown or len(ask.times) > 1 or not ask.transform.startswith("apply/"):
            raise RemoteError("forbidden")
        value = values.open(ask.value, self.transforms)
        for number in ask.times:
            try:
                value = times(value, values.open(number, self.transforms))
            except InputError:
                raise RemoteError("bad-input") from None
        value = np.ravel(value)
        self._use(ask.transform, value)
        return self._hidden("apply", ask.transform, value)

    def _hidden(self, verb: str, purpose: str, vector: Array) -> m.Given:
        check_hidden(verb, len(vector), self._settings.protection.sum)
        blind = self.transforms()(purpose, len(vector)).apply(vector[None])[0]
        return m.Given((m.Named("blind", m.to_tensor(blind)),), 0)

    def _use(self, purpose: str, value: Array) -> None:
        """Take a transform for this value, now and when the same is asked for again, and for no other. Raises "used-transform"."""
        name, mark = f"used/{purpose}", sha256(np.ascontiguousarray(value).tobytes()).digest()
        before = self._store.get(name)
        if "@" in purpose or (before is not None and before != mark):
            raise RemoteError("used-transform")
        self._store.put(name, mark)
