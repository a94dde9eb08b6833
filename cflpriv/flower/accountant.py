"""Flower's accountant protocol, priced by privacy-loss distributions instead of Rényi bounds.

Give it to Flower's `DifferentialPrivacy…FixedClipping` strategies, or to `ClusteredAveraging`. Only `SamplingMethod.NO_AMPLIFICATION` is
taken: a server sees which clients take part, so drawing them amplifies nothing against it.
"""

from typing import Any

from flwr.serverapp import PrivacyAccountant
from flwr.supercore.privacy_accounting import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, PrivacySpent, SamplingMethod

from ..errors import InputError
from ..protocols.accounting import delta_of, epsilon_of
from ..protocols.events import GaussianEvent, Relation

__all__ = ["PldAccountant"]


class PldAccountant:
    """An accountant of client-level Gaussian releases for Flower.

    `config` is Flower's. Under replace-one a client's clipped update moves the sum by up to twice the bound that `noise_multiplier` is
    relative to; that is priced in. Raises `InputError` for a sampling method that claims amplification.
    """

    def __init__(self, config: PrivacyConfig) -> None:
        if config.sampling_method is not SamplingMethod.NO_AMPLIFICATION:
            raise InputError(
                f"sampling_method = {config.sampling_method.value!r}: the server sees who takes part; use SamplingMethod.NO_AMPLIFICATION"
            )
        self._config = config
        self._counts: dict[tuple[float, int], int] = {}

    @property
    def config(self) -> PrivacyConfig:
        return self._config

    @property
    def num_releases(self) -> int:
        return sum(self._counts.values())

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        if count < 1:
            raise ValueError(f"count: {count} is below 1")
        if event.population_size != self._config.population_size:
            raise ValueError(f"population_size: {event.population_size} is not the configured {self._config.population_size}")
        key = (event.noise_multiplier, event.sample_size)
        self._counts[key] = self._counts.get(key, 0) + count

    def get_epsilon(self, delta: float) -> float:
        return epsilon_of(self._events(), delta)

    def get_delta(self, epsilon: float) -> float:
        return delta_of(self._events(), epsilon)

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        delta = self._config.target_delta if delta is None else delta
        return PrivacySpent(self.get_epsilon(delta), delta, self.num_releases, "pld")

    def would_exceed(self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1) -> bool:
        limit = self._config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise ValueError("max_epsilon: neither given nor configured")
        return epsilon_of([*self._events(), *[self._priced(event.noise_multiplier)] * count], self._config.target_delta) > limit

    def state_dict(self) -> dict[str, object]:
        return {"releases": [[z, size, count] for (z, size), count in sorted(self._counts.items())]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, replacing what was composed so far."""
        self._counts = {(float(z), int(size)): int(count) for z, size, count in state["releases"]}

    def _priced(self, noise_multiplier: float) -> GaussianEvent:
        add_remove = self._config.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE
        relation: Relation = "add_remove" if add_remove else "replace_one"
        return GaussianEvent(noise_multiplier if add_remove else noise_multiplier / 2, 1.0 if add_remove else 2.0, relation, "client")

    def _events(self) -> list[GaussianEvent]:
        return [self._priced(z) for (z, _), count in self._counts.items() for _ in range(count)]


_: type[PrivacyAccountant] = PldAccountant
