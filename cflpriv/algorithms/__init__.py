"""Which paper? One algorithm a file: server code over the verbs of a federation, state in and state out.

An algorithm is a function of a `Train` task and keyword hyper-parameters that returns an `Algorithm`. None imports a protocol, prints, or
holds client data. What protects it is decided elsewhere.
"""

from collections.abc import Callable

from ..algorithm import Algorithm
from .cfl import cfl
from .ditto import ditto
from .fedavg import fedavg
from .fedfomo import fedfomo
from .fednova import fednova
from .fedproto import fedproto
from .fedprox import fedprox
from .fesem import fesem
from .fixed import oracle, shuffled
from .ifca import hypcluster, ifca
from .lg_fedavg import lg_fedavg
from .local import local
from .one_shot import one_shot
from .pacfl import pacfl
from .per_fedavg import per_fedavg
from .pfedlia import pfedlia
from .scaffold import scaffold
from .stocfl import stocfl

__all__ = [
    "ALGORITHMS", "cfl", "ditto", "fedavg", "fedfomo", "fednova", "fedproto", "fedprox", "fesem", "hypcluster", "ifca", "lg_fedavg",
    "local", "one_shot", "oracle", "pacfl", "per_fedavg", "pfedlia", "scaffold", "shuffled", "stocfl",
]  # fmt: skip

ALGORITHMS: dict[str, tuple[Callable[..., Algorithm], str]] = {
    "pacfl": (pacfl, "one-shot clustering by principal angles, then FedAvg in each cluster (Vahidian et al. 2023)"),
    "ifca": (ifca, "clients pick the best of k models in every round (Ghosh et al. 2020)"),
    "hypcluster": (hypcluster, "another name for ifca (Mansour et al. 2020)"),
    "cfl": (cfl, "recursive bipartition by the cosines of updates where FedAvg stands still (Sattler et al. 2019)"),
    "stocfl": (stocfl, "clients met merge by the cosine of anchor gradients, bi-level training (Zeng et al. 2023)"),
    "pfedlia": (pfedlia, "clusters or neighbourhoods by lazy influence on validation losses (Rokvic et al. 2025)"),
    "fedavg": (fedavg, "one shared model (McMahan et al. 2017)"),
    "fedprox": (fedprox, "FedAvg with local training held back to the received model (Li et al. 2020)"),
    "fednova": (fednova, "FedAvg of updates normalised by their numbers of steps (Wang et al. 2020)"),
    "scaffold": (scaffold, "FedAvg with control variates against client drift (Karimireddy et al. 2020)"),
    "ditto": (ditto, "FedAvg, and personal models drawn towards the shared one (Li et al. 2021)"),
    "lg_fedavg": (lg_fedavg, "first layers stay with the client, the last are averaged (Liang et al. 2020)"),
    "per_fedavg": (per_fedavg, "one model made to be a good start for a step on one's own data, first-order MAML (Fallah et al. 2020)"),
    "fedfomo": (fedfomo, "own models, mixed from those of a few others that help (Zhang et al. 2021)"),
    "fedproto": (fedproto, "own models, drawn together by the mean features of each class (Tan et al. 2022)"),
    "fesem": (fesem, "k centres, each the mean of the local models nearest to it (Xie et al. 2020)"),
    "one_shot": (one_shot, "k-means on local models once, then FedAvg in each cluster (Ghosh et al. 2019)"),
    "local": (local, "every client alone"),
    "oracle": (oracle, "FedAvg inside the true groups: the best a clustering can do"),
    "shuffled": (shuffled, "FedAvg inside random groups of the true sizes: the control for every clustering claim"),
}
"""Name in a config -> (function, one line for `cflpriv list`)."""
