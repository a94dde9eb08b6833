"""Membership inference on federated models by cluster size and purity: do cluster models leak more than the shared one?

    python examples/membership_by_cluster.py --picture leakage.png                  # embedded digits: a few minutes of one core
    CFLPRIV_DATA=DIR python examples/membership_by_cluster.py --source fashion_mnist --few --samples 20 --rounds 30 --seeds 3

Forty clients in five groups of two labels each; each client has so many samples, and as many again that it might have had. Four pairs of
federations train FedAvg inside given clusters (one client: local training; forty: one shared model), each on one of every pair of samples,
by a coin, and its twin on the others. Each federation in turn is attacked by LiRA with the other pairs as shadows: exact federated
replicas, by an attacker that knows all but the coins, has the final model of each cluster, and is asked about the samples of that
cluster's clients. `purity` is the share of a cluster's clients that are of one group. Intervals are over seeds of data, coins, initial
model and batches.
"""

import argparse
from dataclasses import replace

import numpy as np

from cflpriv.algorithms import pacfl
from cflpriv.attacks.figures.significance import confidence_interval
from cflpriv.attacks.membership.member_scores import confidences, deal_in_pairs, lira_in_turn
from cflpriv.attacks.membership.membership_shadows import federated_replicas
from cflpriv.clustering.scores import ari
from cflpriv.data import DataSpec, build_population
from cflpriv.engine.models import Model
from cflpriv.streams import printable_streams
from cflpriv.tasks.training import Train
from cflpriv.transports.simulation import simulate
from cflpriv.types import Array, Clustering, Population

GROUPS, EACH = 5, 8
CLIENTS = GROUPS * EACH
ARMS = (
    (1, 1, 1), (2, 2, 1), (2, 1, 1), (4, 4, 1), (4, 2, 1), (4, 1, 1), (8, 8, 1), (8, 4, 1), (8, 2, 1), (CLIENTS, EACH, 1),
    (CLIENTS, EACH, 4),
)  # fmt: skip
FEW = ((1, 1, 1), (2, 2, 1), (8, 8, 1), (8, 2, 1), (CLIENTS, EACH, 1))
"""Clients in a cluster, how many of them are of one group, and how many times as many rounds as asked for."""


def clusters_of(size: int, alike: int) -> Clustering:
    """Every client in one cluster of `size`, made of blocks of `alike` clients of one group, each block of another group.

    Client g·EACH + j is the j-th of group g.
    """
    if size == CLIENTS:
        return Clustering(tuple(range(CLIENTS)), (0,) * CLIENTS, 1)
    blocks, rest = size // alike, EACH // size
    labels = {}
    for group in range(GROUPS):
        for part in range(max(1, EACH // alike // blocks)):
            for i in range(blocks):
                first = (group + i) % GROUPS * EACH + (part * blocks + i) * alike
                labels |= dict.fromkeys(range(first, first + alike), group * max(1, rest) + part)
    return Clustering(tuple(range(CLIENTS)), tuple(labels[client] for client in range(CLIENTS)), CLIENTS // size)


def attack(people: Population, clustering: Clustering, train: Train, rounds: int, inside: Array, seed: int) -> tuple[float, float, float]:
    """LiRA's AUC and TPR at 1 % FPR, means over all federations, and how often models find samples they never saw (p > 1/2).

    `inside` (federations, clients, samples) says which sample is in which federation's training set.
    """
    federations = len(inside)
    rosters = [
        {client: _part(people, client, inside[f, client]) for client in clustering.members(label)}
        for f in range(federations)
        for label in range(clustering.k)
    ]
    chain = [(number, range(CLIENTS)) for number in range(rounds)]
    vectors = federated_replicas(train.at, train.model.init(seed), chain, rosters, seed).reshape(federations, clustering.k, -1)
    seen = np.concatenate([
        confidences(train.model, vectors[:, clustering[client]], people.clients[client].x_train, people.clients[client].y_train)
        for client in range(CLIENTS)
    ], axis=1)  # fmt: skip
    coins = inside.reshape(federations, -1)
    auc, tpr = np.mean([(curve.auc, curve.tpr) for curve in lira_in_turn(seen, coins)], axis=0)
    return float(auc), float(tpr), float((seen[~coins] > 0).mean())


def _part(people: Population, client: int, row: Array) -> tuple[Array, Array]:
    return people.clients[client].x_train[row], people.clients[client].y_train[row]


def coins_of(samples: int, pairs: int, seed: int) -> Array:
    """(2 · pairs, clients, 2 · samples): of each pair of a client's samples one is in, by a coin; the other in the federation's twin."""
    first = deal_in_pairs(CLIENTS * samples, pairs, np.random.default_rng(seed)).reshape(-1, CLIENTS, samples)
    return np.concatenate([first, ~first], axis=2)


def in_order(people: Population) -> Population:
    """The same clients, numbered group by group."""
    order = sorted(range(CLIENTS), key=lambda i: (people.groups[i], people.clients[i].id))
    clients = tuple(replace(people.clients[i], id=number) for number, i in enumerate(order))
    return replace(people, clients=clients, groups=tuple(people.groups[i] for i in order))


def found_by_pacfl(people: Population, train: Train, inside: Array, k: int | None) -> tuple[int, float]:
    """How many clusters PACFL finds on one federation's data, by itself or given `k`, and how well they match the groups (ARI)."""
    parts = [_part(people, client, inside[client]) for client in range(CLIENTS)]
    clients = [replace(people.clients[client], x_train=x, y_train=y, x_test=x[:0], y_test=y[:0]) for client, (x, y) in enumerate(parts)]
    algorithm = pacfl(train, k=k, cut="silhouette" if k is None else None)
    clustering = algorithm.describe(algorithm.init(simulate(clients).federation))["clustering"]
    return clustering.k, ari(people.groups, clustering.labels)


def draw(intervals: dict[tuple[int, int, int], list[tuple[float, float, float]]], rounds: int, path: str) -> None:
    """LiRA's AUC and TPR, each (mean, low, high), over the clients in a cluster, a line a purity; longer training apart, as a cross."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    purities = sorted({alike / size for size, alike, _ in intervals if size < CLIENTS}, reverse=True)
    for place, (axes, name, chance) in enumerate(zip(panels, ("AUC", "true positives at 1 % false ones"), (0.5, 0.01), strict=True)):
        axes.axhline(chance, color="0.6", linestyle="--", linewidth=1, label="coin")
        kinds = [
            (f"purity {purity:.2f}", [arm for arm in intervals if arm[0] < CLIENTS and arm[1] / arm[0] == purity], "o-")
            for purity in purities
        ]
        kinds += [(f"all {CLIENTS}, {rounds} rounds", [(CLIENTS, EACH, 1)], "s"), (f"all {CLIENTS}, longer", [(CLIENTS, EACH, 4)], "x")]
        for label, arms, mark in kinds:
            if known := sorted(arm for arm in arms if arm in intervals):
                mean, low, high = np.array([intervals[arm][place] for arm in known]).T
                axes.errorbar([arm[0] for arm in known], mean, [mean - low, high - mean], fmt=mark, capsize=3, label=label)
        axes.set_xscale("log")
        ticks = sorted({arm[0] for arm in intervals})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("clients in a cluster")
        axes.set_ylabel(f"LiRA, {name} [95 %]")
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="digits")
    parser.add_argument("--samples", type=int, default=16, help="training samples a client")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=4, help="pairs of federations with opposite samples; 2 or more")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--few", action="store_true", help="a few of the rows only")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--picture", default=None, help="a file to draw leakage over size and purity into (.png, .svg); needs matplotlib")
    options = parser.parse_args()
    table: dict[tuple[int, int, int], list[tuple[float, float, float]]] = {}
    for seed in range(options.seeds):
        spec = DataSpec(source=options.source, partition="pathological", clients=CLIENTS, samples_per_client=2 * options.samples, seed=seed)
        people = in_order(build_population(spec, options.data_dir))
        model = Model("mlp", people.shape, people.classes, hidden=32, mean=people.mean, std=people.std)
        train = Train(model, epochs=2, batch_size=8, lr=0.1)
        inside = coins_of(options.samples, options.pairs, seed)
        (k, by_itself), (_, by_groups) = (found_by_pacfl(people, train, inside[0], k) for k in (None, GROUPS))
        print(f"seed {seed}: PACFL finds {k} cluster(s), ARI {by_itself:.2f}; given k = {GROUPS}: ARI {by_groups:.2f}", flush=True)
        for arm in FEW if options.few else ARMS:
            size, alike, times = arm
            figures_of = attack(people, clusters_of(size, alike), train, times * options.rounds, inside, seed)
            table.setdefault(arm, []).append(figures_of)
            shown = f"AUC {figures_of[0]:.3f}, TPR {figures_of[1]:.3f}, right {figures_of[2]:.3f}"
            print(f"  {size:3} clients, {alike} alike, {times * options.rounds} rounds: {shown}", flush=True)
    if options.picture:
        intervals = {
            arm: [(np.mean(values), *confidence_interval(values)) for values in np.array(figures).T[:2]] for arm, figures in table.items()
        }
        draw(intervals, options.rounds, options.picture)
    print(f"\n{options.source}, {options.samples} samples a client, {options.rounds} rounds, {options.seeds} seeds")
    print("| clients in a cluster | samples | purity | rounds | LiRA AUC | TPR at 1 % FPR | right on unseen |")
    print("|---|---|---|---|---|---|---|")
    for (size, alike, times), figures in table.items():
        auc, tpr, right = np.array(figures).T
        columns = [str(size), str(size * options.samples), f"{min(alike, size) / size:.2f}", str(times * options.rounds)]
        columns += [
            f"{np.mean(values):.3f} [{low:.3f}, {high:.3f}]" for values in (auc, tpr) for low, high in [confidence_interval(values)]
        ]
        print(f"| {' | '.join(columns)} | {np.mean(right):.2f} |")


if __name__ == "__main__":
    printable_streams()
    main()
