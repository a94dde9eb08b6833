"""Client hosts as Ray actors, on this machine or on a cluster. Ray itself is loaded when hosts are started.

A local Ray listens on the loopback only, has no dashboard, sends no usage statistics, and ends with the simulation. Whoever can reach a
cluster can run code on it and read its actors, which hold clients' data and secrets: use one that you trust.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from importlib import import_module
from typing import Any

from ..errors import InputError
from ..plugins import loaded_plugins
from .hosts import HostLost, Seat

__all__ = ["RayCarrier", "ray_hosts"]

OBJECT_STORE_BYTES = 100 << 20
"""Of a local Ray. Larger messages go over the disk."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of what a later version will change
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # else an address without a cluster is tried for ten minutes
}
"""What Ray reads when it is imported, where the user has not set it."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""The same for a local Ray: without it some of its processes listen on all addresses, whatever the node's address."""


class RayCarrier:
    """`count` actors with a `hosts.Seat` each, spread over the nodes that are alive: a `hosts.Carrier`.

    Each runs the plugins of this process, with their text here. An actor that ends is not restarted by Ray, which would give it its first
    state. An actor whose node ends begins again on another node.
    """

    def __init__(self, count: int) -> None:
        self._ray: Any = import_module("ray")
        self.count = count
        self._actors = [self._started(number) for number in range(count)]

    def send(self, number: int, operation: str, *arguments: Any) -> Any:
        return getattr(self._actors[number], operation).remote(*arguments)

    def reply(self, pending: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(pending)
        except errors.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise
        except (errors.RayActorError, errors.ObjectLostError) as error:
            raise HostLost(str(error).partition("\n")[0]) from None

    def restart(self, number: int) -> None:
        self._ray.kill(self._actors[number])  # one that cannot be reached may still be there
        self._actors[number] = self._started(number)

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            self._ray.kill(actor)

    def _started(self, number: int) -> Any:
        nodes = sorted(node["NodeID"] for node in self._ray.nodes() if node["Alive"])
        spread = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=True)
        actor = self._ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, scheduling_strategy=spread)(_Actor)
        return actor.remote(loaded_plugins())


class _Actor(Seat):
    """A seat that leaves Ctrl-C to the server."""

    def __init__(self, plugins: Mapping[str, bytes]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        super().__init__(plugins)


@contextmanager
def ray_hosts(hosts: int | None = None, address: str | None = None) -> Iterator[RayCarrier]:
    """Hosts on the Ray cluster at `address` (as `ray.init` takes it; one a node, or `hosts`), or on a local Ray. All ends with the block.

    Raises `InputError` if Ray is not installed or the cluster is not there.
    """
    for name, value in (ENVIRONMENT | (LOOPBACK if address is None else {})).items():
        os.environ.setdefault(name, value)
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise InputError("--hosts, --ray: Ray is not installed; pip install 'cflpriv[ray]'") from None
    quiet = {"log_to_driver": False, "logging_level": "error"}
    here: Mapping[str, Any] = {  # not one that runs on this machine already
        "address": "local", "num_cpus": hosts or 1, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES,
        "_node_ip_address": "127.0.0.1",
    }  # fmt: skip
    try:
        with _same_imports():
            ray.init(**quiet, **(here if address is None else {"address": address}))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"--ray {address or '(local)'}: {str(error).partition(chr(10))[0]}") from None
    try:
        carrier = RayCarrier(hosts or sum(node["Alive"] for node in ray.nodes()))
        try:
            yield carrier
        finally:
            carrier.close()
    finally:
        ray.shutdown()


def _same_imports() -> AbstractContextManager[None]:
    """While inside, the working directory is that of Python's own modules, unless this process imports from its working directory, too.

    Ray has its workers import from the working directory first.
    """
    return nullcontext() if {"", os.getcwd()} & set(sys.path) else chdir(os.path.dirname(os.__file__))
