"""Clustered training with protected similarity and secure sums on NVFlare, on this machine.

    python launch.py --out runs/nvflare                 eight sites in NVFlare's simulator
    python launch.py --out runs/nvflare --threads 2     two at a time, each task in a new process: less memory, and far slower
    python launch.py --out runs/nvflare_poc --poc       the same in POC mode: a server and eight sites, over TLS on the loopback
    python launch.py --out runs/open --set protection.sum=none --set protection.min_cohort=1
    python launch.py --out runs/shares --set 'protection.gram=["shares"]'    with three sites more, the holders of shares (under ckks: one)

Everything is written into `--out`: keys, settings, NVFlare's workspace, and `run/`, the run folder.
"""

import argparse
import json
import os
import signal
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.job_config.api import FedJob

from cflpriv import InputError, load_config
from cflpriv.federation.settings import write_identities
from cflpriv.nvflare import CflprivController, CflprivExecutor
from cflpriv.nvflare.exchange import LOGS, SETTINGS, TASK
from cflpriv.streams import printable_streams

HERE = Path(__file__).resolve().parent
ALLOWED = "cflpriv.nvflare"
"""What a site adds to `class_allow_list` in its `local/resources.json`, so that a job without code of its own may use our classes."""


def prepare(out: Path, experiment: Path, changes: list[str]) -> list[str]:
    """Keys, a roster, the resolved experiment and a settings file for each site; the names of the sites. Site i + 1 is client i.

    Under encrypted similarity the sites after them are the holders, who have no data.
    """
    config = load_config(experiment, changes)
    (out / "settings").mkdir(parents=True)
    (out / "experiment.toml").write_text(config.to_toml(), encoding="utf-8")
    clients, holders = config.data.clients, config.protection.holders
    write_identities(out / "keys", clients, key_holder=holders)
    tree = tomllib.loads(config.to_toml())
    names = [*(f"client{client}" for client in range(clients)), *(f"key-holder{number or ''}" for number in range(holders))]
    sites = [f"site-{number + 1}" for number in range(len(names))]
    for site, name in zip(sites, names, strict=True):
        settings = {
            "identity": str(out / "keys" / f"{name}.key"), "roster": str(out / "keys" / "roster.txt"),
            "state": str(out / "state" / site), "protection": tree["protection"],
        }  # fmt: skip
        if name.startswith("client"):
            own = {"data": "site_data:digits", "experiment": str(out / "experiment.toml")}
            settings |= {"privacy": tree["privacy"], "app": own}
        else:
            settings["role"] = "key-holder"
        (out / "settings" / f"{site}.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    return sites


def job(out: Path, executor: CflprivExecutor, deadline: float) -> FedJob:
    """The job: a controller at the server, an executor at every site. It has no code of its own."""
    made = FedJob(name="clustered", min_clients=1)
    made.set_app_packages(["cflpriv"])
    made.to_server(
        CflprivController(
            experiment=str(out / "experiment.toml"), out=str(out / "run"), roster=str(out / "keys" / "roster.txt"),
            deadline_seconds=deadline, hello_seconds=deadline, wait_seconds=4 * deadline,
        )
    )  # fmt: skip
    made.to_server({"server": {"task_request_interval": 0.2}})  # how long a site that has nothing to do waits; NVFlare's default is 2 s
    made.to_clients(executor, tasks=[TASK])
    return made


def allow(resources: Path, before: Path | None = None) -> None:
    """Let jobs without code of their own use our classes, and keep the logs here, in a site's `local/resources.json`.

    `before` is the file that it is made of.
    """
    first = {"format_version": 2, "class_allow_list": list(DEFAULT_CLASS_ALLOW_LIST)}
    tree = first if before is None else json.loads(before.read_text(encoding="utf-8"))
    tree |= {"class_allow_list": [*tree["class_allow_list"], ALLOWED], LOGS: False}
    resources.write_text(json.dumps(tree, indent=2), encoding="utf-8")


def simulate(out: Path, made: FedJob, sites: list[str], threads: int) -> None:
    """Run in NVFlare's simulator, which reads each site's settings from one folder."""
    os.environ["CFLPRIV_SETTINGS"] = str(out / "settings")
    (out / "workspace" / "local").mkdir(parents=True)
    allow(out / "workspace" / "local" / "resources.json")
    made.simulator_run(str(out / "workspace"), n_clients=len(sites), threads=threads)


def poc(out: Path, made: FedJob, sites: list[str], seconds: float, policy: str = "") -> None:
    """Run in POC mode: provision, start a server and the sites, submit, wait, and end what was started.

    Each site gets its settings, and `policy` as its `privacy.json`, if given.
    """
    from nvflare.tool.poc.poc_commands import _start_poc, _stop_poc, prepare_poc_provision  # NVFlare's own PocEnv uses these

    workspace = str(out / "poc")
    prepare_poc_provision(clients=sites, number_of_clients=len(sites), workspace=workspace, docker_image=None)
    kit = out / "poc" / "example_project" / "prod_00"
    for site in sites:
        (kit / site / "local" / SETTINGS).write_bytes((out / "settings" / f"{site}.toml").read_bytes())
        if policy:
            (kit / site / "local" / "privacy.json").write_text(policy, encoding="utf-8")
    for place in ("server", *sites):
        local = kit / place / "local"
        allow(local / "resources.json", local / "resources.json.default")
        settings = local / "resources.json"  # else two trials share their jobs
        settings.write_text(settings.read_text(encoding="utf-8").replace("/tmp/nvflare", str(out / "store")), encoding="utf-8")
    server = kit / "server" / "startup" / "fed_server.json"
    text = server.read_text(encoding="utf-8").replace('"server:8002"', '"localhost:8002"')  # listen on the loopback, and nowhere else
    server.write_text(text, encoding="utf-8")
    _start_poc(workspace, gpu_ids=[], excluded=["admin@nvidia.com"], services_list=[])
    try:
        submit(out, made, sites, kit, seconds)
    finally:
        try:
            _stop_poc(workspace, excluded=["admin@nvidia.com"], services_list=[], wait=False)
        finally:
            end(kit, 60)


def end(kit: Path, seconds: float) -> None:
    """Wait until all parties have ended, and end those that have not by the process ids that NVFlare wrote."""
    until = time.monotonic() + seconds
    while any(kit.glob("*/*pid.fl")) and time.monotonic() < until:
        time.sleep(1)
    for file in (*kit.glob("*/daemon_pid.fl"), *kit.glob("*/pid.fl")):
        with suppress(ProcessLookupError, ValueError, FileNotFoundError):
            os.kill(int(file.read_text(encoding="utf-8")), signal.SIGKILL)


def connected(kit: Path, seconds: float) -> Any:
    """The administrator's session, as soon as the server answers."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    until = time.monotonic() + seconds
    while True:
        try:
            return new_secure_session("admin@nvidia.com", str(kit / "admin@nvidia.com"), timeout=30.0)
        except Exception:  # it may still be starting
            if time.monotonic() > until:
                raise


def submit(out: Path, made: FedJob, sites: list[str], kit: Path, seconds: float) -> None:
    """Submit the job when all sites are connected, because only these get it, and wait for its end."""
    made.export_job(str(out / "jobs"))
    session = connected(kit, 300)
    try:
        until = time.monotonic() + 300
        while len(session.get_system_info().client_info) < len(sites) and time.monotonic() < until:
            time.sleep(2)
        number = session.submit_job(str(out / "jobs" / made.name))
        print(f"job {number}: logs in {kit}", flush=True)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            status = str(session.get_job_meta(number).get("status"))
            if status.startswith("FINISHED"):
                print(f"job {number}: {status}")
                return
            time.sleep(2)
        session.abort_job(number)
        raise SystemExit(f"the job did not end within {seconds:g} s; see {kit}")
    finally:
        session.close()


def main(arguments: list[str] | None = None, executor: CflprivExecutor | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/nvflare"))
    parser.add_argument("--experiment", type=Path, default=HERE / "federation.toml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds that a protocol stage may take")
    parser.add_argument("--threads", type=int, default=0, help="how many sites the simulator runs at a time (default: all)")
    parser.add_argument("--poc", action="store_true", help="POC mode instead of the simulator")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    if out.exists():
        raise SystemExit(f"{out}: exists; remove it or choose another --out")
    try:
        sites = prepare(out, options.experiment, options.set)
    except InputError as error:
        raise SystemExit(str(error)) from None
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])  # site_data.py
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made = job(out, executor or CflprivExecutor(), options.deadline)
    if options.poc:
        poc(out, made, sites, 1800)
    else:
        simulate(out, made, sites, options.threads or len(sites))
    path = out / "run" / "summary.json"
    if not path.exists():
        raise SystemExit(f"the run did not finish; see the logs in {out}")
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for key in ("algorithm", "protection", "clusters", "ari", "rounds", "seconds"):
        print(f"  {key:<14} {summary[key]}")
    for note in summary["notes"]:
        print(f"  note           {note}")
    print(f"  run folder     {out / 'run'}")
    return summary


if __name__ == "__main__":
    printable_streams()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as by Ctrl-C, NVFlare ends what it started
    main()
