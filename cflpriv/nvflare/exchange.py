"""Our messages on NVFlare: a controller and an executor that carry bytes in a `Shareable`.

Each stage is one broadcast for each client, because every client gets a message of its own. A client that does not answer by the stage's
deadline drops out. The server runs a whole experiment, into the same run folder as a local one (`experiments.deployment`).

A client keeps its state in files. The simulator may run each task in a process of its own, and a process may be killed: the next one
reads the files. Importing this loads no torch.
"""

import importlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Condition
from typing import Annotated, Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace

from ..errors import InputError
from ..federation.messages import encode
from ..federation.settings import NoSettings, Settings, read_roster, read_settings, refused_settings
from ..federation.stages import StagedTransport
from ..federation.store import DiskStore, Store
from ..keys import Key, check_ranges
from ..protocols.bounded_files import read_json
from ..transports.deployed import no_data, receive
from ..types import ClientData

__all__ = ["ANSWER", "ANSWERED", "ASK", "TASK", "CflprivController", "CflprivExecutor", "JobAborted", "ShareableTransport", "site_settings"]

TASK, ASK, ANSWER = "cflpriv", "ask", "answer"
ANSWERED = "cflpriv answer"
"""The property of a task's context that keeps what `CflprivExecutor` answered."""
LOGS = "allow_log_streaming"
"""The key of a site's `local/resources.json` by which NVFlare sends the site's logs to the server unless it is false."""
SETTINGS = "cflpriv.toml"
Seconds = Annotated[float, Key("A time.", "(0, inf)", "seconds")]
Count = Annotated[int, Key("A number; 0: that of the data.", "[0, inf)")]
"""The settings file in a site's folder `local`."""
log = logging.getLogger("cflpriv.nvflare")


class JobAborted(RuntimeError):
    """NVFlare aborts the job. Everything up to the last complete round is in the run folder."""


class ShareableTransport(StagedTransport):
    """A `StagedTransport` over a controller of NVFlare: one broadcast for each client. A place is the number of a site, in the order in
    which sites came; `aborted` is the job's signal.
    """

    settings_hint = (
        f"write local/{SETTINGS} into the workspace of each site, or set the environment variable CFLPRIV_SETTINGS to a folder that has "
        "SITE.toml for each"
    )
    absent_hint = "NVFlare knows no site of this job"

    def __init__(self, controller: Controller, context: FLContext, aborted: Signal, **staged: Any) -> None:
        super().__init__(**staged)
        self._controller, self._context, self._aborted = controller, context, aborted
        self._sites: list[str] = []

    def places(self) -> Sequence[int]:
        there = {client.name for client in self._context.get_engine().get_clients()}
        self._sites += sorted(there.difference(self._sites))
        return [
            place for place, site in enumerate(self._sites) if site in there and self._controller.get_client_disconnect_time(site) is None
        ]

    def carry(self, requests: Mapping[int, bytes], stage: str, seconds: float) -> Mapping[int, bytes]:
        until = self._clock() + seconds
        answers: dict[int, bytes] = {}
        answered: set[int] = set()
        news = Condition()

        def arrived(place: int, client_task: ClientTask, fl_ctx: FLContext) -> None:
            """Called by a thread of NVFlare."""
            result = client_task.result
            data = result.get(ANSWER) if result.get_return_code() == ReturnCode.OK else None
            with news:
                if isinstance(data, bytes):
                    answers[place] = data
                answered.add(place)
                news.notify()

        tasks = []
        for place, data in requests.items():
            given = partial(arrived, place)
            task = Task(
                name=TASK, data=Shareable({ASK: data}), timeout=max(1, math.ceil(seconds)),
                result_received_cb=lambda client_task, fl_ctx, given=given: given(client_task, fl_ctx),
            )  # fmt: skip
            self._controller.broadcast(task, self._context, targets=[self._sites[place]], min_responses=1)
            tasks.append(task)
        with news:
            while len(answered) < len(tasks) and self._clock() < until and not self._aborted.triggered:
                if all(place in answered or task.completion_status is not None for place, task in zip(requests, tasks, strict=True)):
                    break  # whoever has not answered is known to be gone
                news.wait(self._poll * 4)
        for place, task in zip(requests, tasks, strict=True):
            if place not in answered:
                self._controller.cancel_task(task)
        if self._aborted.triggered:
            raise JobAborted("NVFlare aborted the job")
        with news:
            return dict(answers)


class CflprivController(Controller):  # type: ignore[misc]
    """Runs an experiment's config over the sites of a job.

    Args:
        experiment: path of the config (TOML).
        out: path of the run folder. The same folder in a later job continues the run from its last complete round.
        roster: path of the pinned public keys; none in the passive mode without transforms.
        clients: how many clients take part; by default as many as `[data]` has.
        shape, classes: the shape of a sample and the number of classes. Without them the data of the config, which are public then, are
            read here, and the true groups are scored.
        deadline_seconds: how long a stage may take; `compute_seconds` for training, `hello_seconds` for the greeting.
        wait_seconds: how long the server waits for clients, before the start or a round.
        residents: addresses "HOST:PORT" of helpers and holders that stay (`cflpriv helper`); others are sites.

    Relative paths start at the server's workspace. The names of the arguments are those of the job's config file. An experiment with
    `[run] plugins` is refused.
    """

    def __init__(
        self,
        experiment: str,
        out: str = "cflpriv_run",
        roster: str = "",
        clients: Count = 0,
        shape: Sequence[int] = (),
        classes: Count = 0,
        deadline_seconds: Seconds = 60.0,
        compute_seconds: Seconds = 600.0,
        hello_seconds: Seconds = 30.0,
        wait_seconds: Seconds = 120.0,
        residents: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.experiment, self.out, self.roster, self.clients = experiment, out, roster, clients
        self.shape, self.classes = shape, classes
        self.deadline_seconds, self.compute_seconds, self.hello_seconds = deadline_seconds, compute_seconds, hello_seconds
        self.wait_seconds, self.residents = wait_seconds, residents

    def start_controller(self, fl_ctx: FLContext) -> None:
        pass

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the experiment. What the user gave wrongly ends the job with one line."""
        try:
            self._run(abort_signal, fl_ctx)
        except JobAborted as error:
            self.log_warning(fl_ctx, str(error))
        except (InputError, OSError) as error:
            self.system_panic(f"cflpriv: {error}", fl_ctx)

    def _check(self) -> None:
        """Raises `InputError` for arguments that cannot be: they come from a file."""
        check_ranges(type(self).__init__, vars(self))
        sizes: list[Any] = list(self.shape) if isinstance(self.shape, list | tuple) else [None]
        if not all(isinstance(size, int) and size > 0 for size in sizes) or bool(sizes) != bool(self.classes):
            given = f"shape = {self.shape!r}, classes = {self.classes}"
            raise InputError(f"{given}: give the sizes of a sample and the number of classes, or neither")
        if not isinstance(self.residents, list | tuple) or not all(isinstance(address, str) for address in self.residents):
            raise InputError(f"residents = {self.residents!r}: give a list of addresses, each 'HOST:PORT'")

    def _run(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        self._check()
        from ..data import build_population  # loaded where something is computed
        from ..experiments import load_config
        from ..experiments.run.deployment import deploy, standing_in

        root = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
        for path in (root / self.experiment, root / self.out / "config.toml"):  # of the run that is continued
            _brings_no_code(path)
        config = load_config(root / self.experiment, trust=False)  # whatever the file is by now
        public = not self.classes
        described = (
            build_population(config.data) if public else standing_in(tuple(self.shape), self.classes, label_range=config.data.label_range)
        )
        groups = {client.id: group for client, group in zip(described.clients, described.groups, strict=True)}
        deploy(
            lambda journal: ShareableTransport(
                self, fl_ctx, abort_signal, deadline_seconds=self.deadline_seconds, compute_seconds=self.compute_seconds,
                hello_seconds=self.hello_seconds, journal=journal,
            ),
            config, root / self.out, described, system="nvflare", clients=self.clients or config.data.clients,
            truth=groups if public else None, roster=read_roster(root / self.roster) if self.roster else None,
            wait_seconds=self.wait_seconds, resume=True, report=lambda line: self.log_info(fl_ctx, line), residents=self.residents,
        )  # fmt: skip


def _brings_no_code(path: Path) -> None:
    """Raises `InputError` for an experiment with plugins: a job without code of its own chooses the path, also one of its own files."""
    from ..experiments.config.config import read_tree

    run = read_tree(path).get("run") if path.is_file() else None
    if isinstance(run, dict) and run.get("plugins"):
        raise InputError(f"{path}: run.plugins = {run['plugins']}: is code that a job could bring; install a package with entry points")


# --- at a site


def site_settings(fl_ctx: FLContext) -> tuple[Settings, Store, dict[str, Any]]:
    """A site's own settings, its store, and the application's table `[app]`.

    The file is `local/cflpriv.toml` in the site's workspace; where the environment names a folder as `CFLPRIV_SETTINGS` (as for the
    simulator, whose sites share a machine), `SITE.toml` in that folder. It never comes from a job. Without `state` in the file the state
    is in the job's workspace, and ends with the job. Raises `InputError`, also where NVFlare sends the site's logs to the server.
    """
    workspace, folder = fl_ctx.get_engine().get_workspace(), os.environ.get("CFLPRIV_SETTINGS")
    _keeps_logs(workspace)
    site = fl_ctx.get_identity_name()
    path = Path(folder) / f"{site}.toml" if folder else Path(workspace.get_site_config_dir()) / SETTINGS
    if not path.is_file():
        where = "in the folder that CFLPRIV_SETTINGS names" if folder else f"here, or name a folder with {site}.toml as CFLPRIV_SETTINGS"
        raise NoSettings(f"{path}: is missing; write the settings of site {site!r} {where}")
    settings, state, app = read_settings(path)
    return settings, DiskStore(state or Path(workspace.get_run_dir(fl_ctx.get_job_id())) / "cflpriv_state"), app


def _keeps_logs(workspace: Workspace) -> None:
    """Raises `InputError` unless the site keeps its logs, which name refusals and failures that depend on its data."""
    path = Path(workspace.get_resources_file_path() or Path(workspace.get_site_config_dir()) / "resources.json")
    try:
        given = read_json(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    value = given.get(LOGS, True) if isinstance(given, dict) else True
    if value is not False:
        raise InputError(
            f'{path}: "{LOGS}" is {json.dumps(value)}: NVFlare would send the logs of this site to the server; set it to false'
        )


class CflprivExecutor(Executor):  # type: ignore[misc]
    """Answers all our messages at a site, by the site's own settings (`site_settings`).

    `[app] data = "MODULE:FUNCTION"` in the settings file names the function that gives the client's data: it gets the client's number and
    the table `[app]`, when a task needs them, and returns a `ClientData`. A subclass may override `data` instead.
    """

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        if task_name != TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        try:
            settings, store, app = site_settings(fl_ctx)
        except Exception as error:
            log.exception("settings")  # the text stays here
            return _answer(encode(refused_settings(error)), fl_ctx)
        ask = shareable.get(ASK)
        data: Callable[[], ClientData] = partial(self.data, settings.identity.client, app) if settings.role == "client" else no_data
        return _answer(receive(settings, store, data, ask if isinstance(ask, bytes) else b""), fl_ctx)

    def data(self, client: int, app: dict[str, Any]) -> ClientData:
        """The client's data. Raises `InputError` where the settings name no function."""
        name = app.get("data")
        module, _, function = name.partition(":") if isinstance(name, str) else ("", "", "")
        if not (module and function):
            raise InputError(f"[app] data = {name!r}: give the function that has the client's data, as 'MODULE:FUNCTION'")
        found: ClientData = getattr(importlib.import_module(module), function)(client, app)
        return found


def _answer(data: bytes, fl_ctx: FLContext) -> Shareable:
    """An answer with our bytes. A `PrivacyFilter` lets these pass, because their client keeps the site's ledger by itself."""
    fl_ctx.set_prop(ANSWERED, data, private=True, sticky=False)
    return Shareable({ANSWER: data})
