"""The parameter tree of CFL (Sattler et al. 2019, section V-C): a node for every cluster there ever was, and which leaf a client has."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...contract.handles import Held, Shared
from ...contract.operations import Federation
from ...engine.models import Model
from ...tasks.evaluation import Losses
from ...types import Array, Clustering
from ..shared.steps import clustering_of

__all__ = ["CflState", "ClusterSplit", "SeenSimilarities", "TreeCluster", "TreeNode", "ancestors", "offer", "path"]


@dataclass(frozen=True, eq=False)
class TreeNode:
    """A node of the parameter tree: a cluster's model, stationary once it has `children`.

    `updates` are what its clients were compared by at the split, computed in round `split_round` and still with their owners: pre-split
    updates (those of a child's clients are the edge to it), or with a test the folds of their gradients. `notes` holds what the split was
    decided on, where the release allows it. `largest` is the largest norm of the cluster's mean update, `tests` counts the tests that its
    members took part in, and `since` those before it was a cluster of its own. `from_round` is that of its last test, or else of
    its beginning.
    """

    model: Shared
    parent: int = -1
    children: tuple[int, ...] = ()
    updates: Held | None = None
    split_round: int = -1
    notes: Mapping[str, Any] = field(default_factory=dict)
    largest: float = 0.0
    tests: int = 0
    since: int = 0
    from_round: int = 0


@dataclass(frozen=True, eq=False)
class SeenSimilarities:
    """The similarities last seen in a cluster: `alpha` (m, m) of `clients` (m,)."""

    clients: tuple[int, ...]
    alpha: Array


@dataclass(frozen=True, eq=False)
class CflState:
    """The parameter tree (node 0 is the root), the leaf of every client seen, who is to walk down from where, in which round
    those who came later arrived, and the largest mean norm.

    `seen` are the similarities of this round by leaf, where they were asked for and the release allows; `evidence` is that of the first
    split, and `answer` that of the last test of all clients together.
    """

    tree: tuple[TreeNode, ...]
    leaf: Mapping[int, int]
    waiting: Mapping[int, int] = field(default_factory=dict)
    arrived: Mapping[int, int] = field(default_factory=dict)
    unit: float = 0.0
    seen: Mapping[int, SeenSimilarities] = field(default_factory=dict)
    evidence: Mapping[str, Any] | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def leaves(self) -> tuple[int, ...]:
        """The leaves of the tree, in the order of clusters."""
        return tuple(i for i, node in enumerate(self.tree) if not node.children)

    @property
    def clustering(self) -> Clustering:
        """The clusters: label j is leaf `leaves[j]`."""
        labels = {leaf: label for label, leaf in enumerate(self.leaves)}
        return clustering_of({client: labels[leaf] for client, leaf in self.leaf.items()}, len(labels))

    @property
    def models(self) -> list[Shared]:
        """The clusters' models, in the order of leaves."""
        return [self.tree[leaf].model for leaf in self.leaves]

    def members(self, node: int) -> tuple[int, ...]:
        """c_v: the clients of a node, those of all leaves below it."""
        return tuple(client for client in sorted(self.leaf) if node in ancestors(self.tree, self.leaf[client]))

    def with_node(self, place: int, node: TreeNode) -> "CflState":
        """The same with another node at one place of the tree."""
        return replace(self, tree=(*self.tree[:place], node, *self.tree[place + 1 :]))

    def split(self, leaf: int, node: TreeNode, moved: Shared, side: Mapping[int, int]) -> "CflState":
        """The leaf becomes the inner `node`, and each side a child that goes on from `moved`. Members without a side go to the largest."""
        sizes = Counter(side.values())
        members, children = self.members(leaf), tuple(range(len(self.tree), len(self.tree) + len(sizes)))
        largest = min(sizes, key=lambda child: (-sizes[child], child))
        away = {client: leaf for client in members if client not in side}
        inner = self.with_node(leaf, replace(node, children=children))
        return replace(
            inner,
            tree=(*inner.tree, *(TreeNode(moved, leaf, tests=node.tests, since=node.tests, from_round=node.split_round) for _ in children)),
            leaf={**self.leaf, **{client: children[side.get(client, largest)] for client in members}},
            waiting={**away, **self.waiting},  # who missed an earlier split walks from there
        )


@dataclass(frozen=True, eq=False)
class TreeCluster:
    """A cluster in a round: its number, its leaf, its node before this round's step, its members present, and whether it stands still."""

    label: int
    leaf: int
    node: TreeNode
    here: Sequence[int]
    stationary: bool


@dataclass(frozen=True, eq=False)
class ClusterSplit:
    """A split: the side of each compared client, the compared values, and the notes for the run."""

    side: Mapping[int, int]
    given: Held
    facts: Mapping[str, Any]
    evidence: Mapping[str, Any] | None


def ancestors(tree: Sequence[TreeNode], node: int) -> tuple[int, ...]:
    """A node and all above it, up to the root."""
    nodes = [node]
    while tree[nodes[-1]].parent >= 0:
        nodes.append(tree[nodes[-1]].parent)
    return tuple(nodes)


def path(state: CflState, client: int) -> tuple[int, ...]:
    """The nodes from the root to a client's leaf: models from general to special."""
    return ancestors(state.tree, state.leaf[client])[::-1]


def offer(federation: Federation, state: CflState, model: Model) -> Held:
    """Offer every client present the models of all levels on its path (section V-C); it keeps their training losses and its choice.

    Parts: "losses" (levels,) from the root to the leaf, "choice" () the level with the lowest.
    """
    clients = [client for client in federation.clients if client in state.leaf]
    which = {client: path(state, client) for client in clients}
    return federation.compute(Losses(model), {"model": [node.model for node in state.tree]}, which=which, on=clients)
