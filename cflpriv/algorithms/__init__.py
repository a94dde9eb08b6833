"""The algorithms, one paper a file: server code over the operations of a federation, state in and state out.

An algorithm is a function of a `Train` task and keyword hyper-parameters that returns an `Algorithm`, and an `AlgorithmSpec` that declares
all that the rest of the package has to know of it. None imports a protocol, prints, or holds client data. What protects it is decided
by the configuration.
"""

from .cfl.cfl import CFL, cfl
from .crossfit import CROSSFIT, crossfit
from .ditto import DITTO, ditto
from .fedavg import FEDAVG, fedavg
from .fedfomo import FEDFOMO, fedfomo
from .fedgwc import FEDGWC, fedgwc
from .fednova import FEDNOVA, fednova
from .fedproto import FEDPROTO, fedproto
from .fedprox import FEDPROX, fedprox
from .fedrc import FEDRC, fedrc
from .fedsoft import FEDSOFT, fedsoft
from .fesem import FESEM, fesem
from .fixed import ORACLE, SHUFFLED, oracle, shuffled
from .flexcfl import FLEXCFL, flexcfl
from .ifca.ifca import HYPCLUSTER, IFCA, hypcluster, ifca
from .interface import ALGORITHMS, FUNCTIONS, STATES, TASKS, register_algorithm
from .lg_fedavg import LG_FEDAVG, lg_fedavg
from .local import LOCAL, local
from .ocfl import OCFL, ocfl
from .one_shot import ONE_SHOT, one_shot
from .pacfl import PACFL, pacfl
from .per_fedavg import PER_FEDAVG, per_fedavg
from .pfedlia.pfedlia import PFEDLIA, pfedlia
from .pina import PINA, pina
from .private_clusters import PRIVATE_CLUSTERS, private_clusters
from .r_dpcfl import R_DPCFL, r_dpcfl
from .rr_cluster import RR_CLUSTER, rr_cluster
from .scaffold import SCAFFOLD, scaffold
from .stocfl.stocfl import STOCFL, stocfl

__all__ = [
    "ALGORITHMS", "FUNCTIONS", "STATES", "TASKS", "cfl", "crossfit", "ditto", "fedavg", "fedfomo", "fedgwc", "fednova", "fedproto",
    "fedprox", "fedrc", "fedsoft", "fesem", "flexcfl", "hypcluster", "ifca", "lg_fedavg", "local", "ocfl", "one_shot", "oracle", "pacfl",
    "per_fedavg", "pfedlia", "pina", "private_clusters", "r_dpcfl", "rr_cluster", "scaffold", "shuffled", "stocfl",
]  # fmt: skip

SPECS = (
    PACFL, IFCA, HYPCLUSTER, CFL, STOCFL, PFEDLIA, CROSSFIT, FEDAVG, FEDPROX, FEDNOVA, SCAFFOLD, DITTO, LG_FEDAVG, PER_FEDAVG, FEDFOMO,
    FEDPROTO, FESEM, ONE_SHOT, R_DPCFL, PRIVATE_CLUSTERS, RR_CLUSTER, PINA, FLEXCFL, OCFL, FEDSOFT, FEDRC, FEDGWC, LOCAL, ORACLE, SHUFFLED,
)  # fmt: skip
for _spec in SPECS:
    register_algorithm(_spec)
