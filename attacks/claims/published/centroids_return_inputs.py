"""TAR: centroids of k-means over clients' vectors, and what they show of single vectors."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans

from ....data import DataSpec, build_population
from ....engine.models import Model
from ....tasks.training import Train
from ....types import Array
from ...membership.membership_shadows import federated_replicas
from ..claim import Arm, Claim, Row

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    spec = DataSpec(source="digits", partition="pathological", clients=20, seed=seed)
    people = build_population(spec, data_dir)
    model = Model("mlp", people.shape, people.classes, hidden=8, mean=people.mean, std=people.std)
    train = Train(model, epochs=2, batch_size=10, lr=0.1)
    rosters = [{client.id: (client.x_train, client.y_train)} for client in people.clients]
    vectors = np.asarray(federated_replicas(train.at, model.init(seed), [(0, range(20))], rosters, seed), np.float64)
    rows = []
    for arm, k in (("as many clusters as groups", 5), ("half as many clusters as clients", 10)):
        centroids, _ = _clustered(vectors, k, seed)
        rows.append(Row(arm, seed, float(np.mean([_is_exact(centroids, vector) for vector in vectors])), 0.0))
    right = []
    before, sizes = _clustered(vectors, 5, seed)
    for gone in range(20):
        after, _ = _clustered(np.delete(vectors, gone, axis=0), 5, seed)
        old = [i for i, one in enumerate(before) if not _is_exact(after, one)]
        new = [one for one in after if not _is_exact(before, one)]
        if len(old) == len(new) == 1:
            size = sizes[old[0]]
            right.append(_is_exact((size * before[old[0]] - (size - 1) * new[0])[None], vectors[gone]))
        else:  # its cluster is gone, or several changed
            right.append(False)
    rows.append(Row("centroids before and after one client left", seed, float(np.mean(right)), 0.0, "sizes of clusters are known"))
    return rows


def _clustered(vectors: Array, k: int, seed: int) -> tuple[Array, list[int]]:
    """Centroids (k, d) as means of their clusters, and sizes."""
    labels = KMeans(k, n_init=10, random_state=seed).fit_predict(vectors)
    return np.stack([vectors[labels == i].mean(axis=0) for i in range(k)]), [int((labels == i).sum()) for i in range(k)]


def _is_exact(rows: Array, vector: Array) -> bool:
    """Whether one of `rows` (m, d) is the vector (d,) to a millionth of its length."""
    return bool((np.linalg.norm(rows - vector, axis=1) < 1e-6 * np.linalg.norm(vector)).any())


CLAIM = Claim(
    17, "k-means centroids give inputs back exactly",
    source="TAR, arXiv 2511.07073 (abstract: intermediate centroids)",
    baseline="the mean of all vectors, 0",
    assumed=(
        "20 clients of the digits with two labels each; the vectors are models after two local epochs of an MLP of 8 units, as "
        "in one-shot clustering; the server, or a client, has all centroids and no vector; a vector is exact within one "
        "millionth of its length; TAR itself, which follows assignments over the iterations of k-means, was not run"
    ),
    arms={
        "as many clusters as groups": Arm("clients whose vector is a centroid, share", 0.1, "above"),
        "half as many clusters as clients": Arm("clients whose vector is a centroid, share", 0.1, "above"),
        "centroids before and after one client left": Arm("that client's vector is exact", 0.1, "above"),
    },
    measure=measure,
)  # fmt: skip
