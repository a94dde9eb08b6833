"""NVFlare's controller in this process: its tasks, contexts and encoding as they are, without server and client processes.

Every message finds a new executor, which has nothing but the site's files.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils import fobs

from cflpriv.federation.settings import write_identities
from cflpriv.nvflare.exchange import CflprivController, CflprivExecutor, ShareableTransport
from cflpriv.protocols.entropy import public_entropy
from cflpriv.types import ClientData, Population

JOB = "job"


class OwnData(CflprivExecutor):
    """An executor whose data are those of a scene."""

    def __init__(self, scene: Population) -> None:
        super().__init__()
        self._scene = {client.id: client for client in scene.clients}

    def data(self, client: int, app: dict[str, Any]) -> ClientData:
        return self._scene[client]


def context(workspace: Path, site: str, clients: Callable[[], list[Client]] = list) -> FLContext:
    """A context of `site`, in its workspace."""
    for folder in ("startup", "local"):
        (workspace / folder).mkdir(parents=True, exist_ok=True)
    made = FLContext()
    place = Workspace(str(workspace), site_name=site)
    engine = SimpleNamespace(get_workspace=lambda: place, get_clients=clients, fire_event=lambda event, given: None)
    for key, value in ((ReservedKey.ENGINE, engine), (ReservedKey.IDENTITY_NAME, site), (ReservedKey.RUN_NUM, JOB)):
        made.set_prop(key, value, private=True, sticky=False)
    return made


class FakeCommunicator:
    """What a controller broadcasts with. `dead` sites do not answer; `killed` sites die when they would get the n-th task of the run."""

    def __init__(self, folder: Path, executors: Mapping[str, Callable[[], Executor]]) -> None:
        self.folder, self.executors = folder, executors
        self.dead: set[str] = set()
        self.disconnected: set[str] = set()
        self.tasks: list[tuple[str, Task]] = []
        self.aborted = Signal()

    def clients(self) -> list[Client]:
        return [Client(site, "token") for site in self.executors if site not in self.dead]

    def broadcast(self, task: Task, fl_ctx: FLContext, targets: list[str], min_responses: int, wait: int = 0) -> None:
        (site,) = targets
        assert min_responses == 1
        self.tasks.append((site, task))
        if site in self.dead:
            return
        executor = self.executors[site]()
        at_site = context(self.folder / site, site)
        answer = executor.execute(task.name, fobs.loads(fobs.dumps(task.data)), at_site, self.aborted)
        done = ClientTask(Client(site, "token"), task)
        done.result = fobs.loads(fobs.dumps(answer))
        task.completion_status = TaskCompletionStatus.OK
        task.result_received_cb(client_task=done, fl_ctx=fl_ctx)

    def cancel_task(self, task: Task, completion_status: Any, fl_ctx: Any) -> None:
        task.completion_status = completion_status

    def get_client_disconnect_time(self, site: str) -> float | None:
        return 1.0 if site in self.disconnected else None


def deployment(
    folder: Path, scene: Population, protection: str = "", privacy: str = "", app: str = "", holders: int = 0
) -> FakeCommunicator:  # fmt: skip
    """A site for each client of a scene, with keys and a settings file each, and after them for each holder. Site i + 1 is client i."""
    write_identities(folder / "keys", len(scene.clients), public_entropy(str(folder)), key_holder=holders)
    names = [*(f"client{client}" for client in range(len(scene.clients))), *(f"key-holder{number or ''}" for number in range(holders))]
    for number, name in enumerate(names):
        local = folder / f"site-{number + 1}" / "local"
        local.mkdir(parents=True)
        files = f'identity = "../../keys/{name}.key"\nroster = "../../keys/roster.txt"\nstate = "../state"\n'
        files += "allow_scores = true\n" if name.startswith("client") else 'role = "key-holder"\n'
        (local / "resources.json").write_text('{"allow_log_streaming": false}', encoding="utf-8")
        (local / "cflpriv.toml").write_text(f"{files}[protection]\n{protection}\n[privacy]\n{privacy}\n[app]\n{app}\n", encoding="utf-8")
    return FakeCommunicator(folder, {f"site-{number + 1}": lambda: OwnData(scene) for number in range(len(names))})


def controlled(sites: FakeCommunicator, controller: CflprivController | None = None) -> tuple[CflprivController, FLContext]:
    """A controller over these sites, and the server's context."""
    controller = controller or CflprivController("experiment.toml")
    controller.communicator = sites
    return controller, context(sites.folder / "server", "server", sites.clients)


def transport(sites: FakeCommunicator, **staged: Any) -> ShareableTransport:
    """The transport over these sites."""
    controller, at_server = controlled(sites)
    return ShareableTransport(controller, at_server, sites.aborted, **staged)


def task_of(data: Mapping[str, Any]) -> Shareable:
    """A task's data."""
    return Shareable(dict(data))
