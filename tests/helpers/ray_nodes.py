"""Several Ray nodes on this machine, which listen on the loopback only and take little memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

STORE_BYTES = 80 << 20

# Ray reads these when it is imported. By the second it takes the loopback for the address of a cluster that others join, too.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@contextmanager
def ray_nodes(count: int) -> Iterator[str]:
    """A cluster of so many nodes; its address. The test is skipped where Ray is not installed."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'cflpriv[ray]')")
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:  # so that what a test looks at where clients are can be imported there
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        cluster: Any = Cluster(initialize_head=True, head_node_args=node)
        for _ in range(count - 1):
            cluster.add_node(**{key: value for key, value in node.items() if key != "include_dashboard"})
    try:
        yield cluster.address
    finally:
        cluster.shutdown()
