"""One clustered round through the operations themselves: what clients compute, what leaves them, what the server can learn from it.

    python examples/one_round_by_hand.py

Twelve clients, half of whom see the digits upside down. Their signatures are compared under a rotation that the server lacks, their updates
are added by secure aggregation. At the end: everything that crossed a trust boundary, as the transcript has it.
"""

import numpy as np

from cflpriv.clustering.cuts import cut_tree, linkage_tree
from cflpriv.clustering.similarity import angles
from cflpriv.contract.handles import Shared
from cflpriv.contract.operations import GramView
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Transcript
from cflpriv.data import DataSpec, build_population
from cflpriv.engine.models import Model
from cflpriv.streams import printable_streams
from cflpriv.tasks.signatures import PrincipalVectors
from cflpriv.tasks.training import Train
from cflpriv.transports.simulation import simulate


def group_by_angles(view: GramView) -> tuple[dict, dict]:
    """Runs where the Gram matrix may be seen. Only labels and small integers come back."""
    distance = angles(view.gram, "smallest_angle")  # principal angles between the clients' subspaces, in degrees
    cut = cut_tree(linkage_tree(distance), distance)  # nobody says how many clusters there are
    return {"labels": np.array(cut.labels), "k": cut.k}, {"distance": distance.values}


def main() -> None:
    population = build_population(DataSpec(source="digits", clients=12, rotations=(0, 180)))
    model = Model("mlp", population.shape, population.classes, hidden=16, mean=population.mean, std=population.std)

    # The algorithm below never holds client data: it talks to a federation, which hands out handles and sums.
    transcript = Transcript("headers")
    protection = Protection(gram=("haar",), sum="secagg")
    federation = simulate(population.clients, protection=protection, transcript=transcript).federation
    federation.begin_round(0)

    # 1. Clients compute signatures, the leading directions of their data. Nothing leaves them: `signatures` is a handle.
    signatures = federation.compute(PrincipalVectors(p=3))["signature"]
    print("1. a handle, no data:", signatures)

    # 2. Inner products of the signatures, under a secret rotation; `group_by_angles` sees those and nothing else.
    released = federation.gram(signatures, group_by_angles)
    labels = dict(zip(federation.clients, released.result["labels"].tolist(), strict=True))
    truth = dict(zip((client.id for client in population.clients), population.groups, strict=True))
    print("2. clusters found:", labels)
    print("   true groups:   ", {client: truth[client] for client in labels})

    # 3. Local training, and one secure sum per cluster: the server sees the sum of each, no update.
    start = Shared(model.init(seed=0))
    trained = federation.compute(Train(model, epochs=2, lr=0.1), {"model": start})
    means = federation.mean(trained["update"], groups=labels, k=int(released.result["k"]))
    for label, mean in enumerate(means):
        if mean is not None:
            print(f"3. cluster {label}: the mean of {mean.count} updates, of norm {mean.parts['update'].norm():.3f}")

    # 4. A Shared can be added to another; clients open the result.
    models = [start + mean.parts["update"] for mean in means if mean is not None]
    print("4. new cluster models:", len(models), "of", len(models[0].value()), "parameters")

    print("\nEverything that crossed a trust boundary:")
    for message in transcript.messages:
        parties = f"{message.source} → {message.target}"
        print(f"  {message.operation:<8} {message.kind:<20} {parties:<18} {message.copies:>4} × {message.bytes_each:>7} bytes")


if __name__ == "__main__":
    printable_streams()
    main()
