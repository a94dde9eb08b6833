"""Steps of the server that several algorithms share: models moved by the means of their groups, and labels by client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...contract.handles import GroupMean, Labels, Shared, label_sets
from ...contract.operations import Federation
from ...types import Clustering

__all__ = ["OrElse", "clustering_of", "mean_notes", "moved"]


@dataclass(frozen=True, eq=False)
class OrElse:
    """Labels of some clients, and `otherwise` for all others."""

    labels: Mapping[int, int]
    otherwise: int

    def __getitem__(self, client: int, /) -> int:
        return self.labels.get(client, self.otherwise)


def clustering_of(labels: Mapping[int, int], k: int) -> Clustering:
    """The clustering of the clients that have a label, in ascending order."""
    clients = tuple(sorted(labels))
    return Clustering(clients, tuple(labels[client] for client in clients), k)


def moved(
    federation: Federation,
    models: Sequence[Shared],
    means: Sequence[GroupMean | None],
    part: str,
    groups: Labels | None,
    clients: Sequence[int],
    factor: Callable[[GroupMean], float] = lambda mean: 1.0,
) -> tuple[Shared, ...]:
    """Each model plus the mean of its group's `part` times `factor`; a model whose group has no mean is unchanged.

    Transformed parts are made one by the first of `clients` in the group, or by the first client where `groups` are private (None).
    """
    first: dict[int, int] = {}
    for client, labels in ({} if groups is None else label_sets(groups, clients, None, "groups")[0]).items():
        for label in labels:
            first.setdefault(label, client)
    results = []
    for group, (model, mean) in enumerate(zip(models, means, strict=True)):
        if mean is not None:
            step = mean.parts[part] if factor(mean) == 1.0 else mean.parts[part] * factor(mean)
            model = federation.fold(model + step, on=clients[0] if groups is None else first[group])
        results.append(model)
    return tuple(results)


def mean_notes(means: Sequence[GroupMean | None]) -> dict[str, Any]:
    """A round's notes on its means: the groups without one, and the number of clients whose values were clipped."""
    return {
        "unchanged_clusters": [group for group, mean in enumerate(means) if mean is None],
        "clipped_clients": sum(mean.clipped for mean in means if mean is not None),
    }
