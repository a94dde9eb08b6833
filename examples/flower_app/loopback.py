"""Start a SuperLink, SuperNodes and a run on this machine, wait for its end, and clean up.

    python loopback.py                     four SuperNodes, secure aggregation, plain HTTP on 127.0.0.1
    python loopback.py --tls               the same with TLS and authenticated SuperNodes
    python loopback.py --simulation        the same app on Flower's simulation engine (needs flwr[simulation])
    python loopback.py --set protection.sum=none --set protection.min_cohort=1    the same without secure aggregation
    python loopback.py --set 'protection.gram=["ckks"]'    encrypted similarity; a fifth SuperNode is the key holder (under shares: three)

Everything is written into `--out` (default: runs/flower): keys, settings, logs, and `run/`, the run folder.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from cflpriv import InputError, load_config
from cflpriv.flower.client import write_identities
from cflpriv.streams import printable_streams

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for bound in sockets:
        bound.bind(("127.0.0.1", 0))
    ports = [int(bound.getsockname()[1]) for bound in sockets]
    for bound in sockets:
        bound.close()
    return ports


class Machines:
    """The processes of a deployment; each is ended by its own process id when the block ends."""

    def __init__(self, out: Path, environment: dict[str, str]) -> None:
        self.out, self.environment = out, environment
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.run_config: dict[str, Any] = {}
        self.simulated = 0  # how many SuperNodes the SuperLink simulates
        self.ports: tuple[int, list[int], bool] = (0, [], False)  # of the SuperLink and the SuperNodes, and whether under TLS

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *_: object) -> None:
        """End all, each with what it started (its own process group): politely first."""
        for process in self.running.values():
            self.tell(process, signal.SIGTERM)
        until = time.monotonic() + 10
        for process in self.running.values():
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.tell(process, signal.SIGKILL)
                process.wait(10)

    @staticmethod
    def tell(process: "subprocess.Popen[bytes]", how: int) -> None:
        """Send a signal to a process and its group."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)

    def start(self, name: str, *command: str) -> None:
        log = (self.out / f"{name}.log").open("ab")
        self.running[name] = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]], stdout=log, stderr=log, env=self.environment, cwd=self.out, start_new_session=True
        )


def certificates(out: Path, nodes: int) -> None:
    """A certificate authority of our own, a server certificate for 127.0.0.1, and an EC key for each SuperNode."""

    def quietly(*command: str) -> None:
        subprocess.run(command, cwd=out, check=True, capture_output=True)

    subject = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    quietly(
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=loopback CA", "-keyout", "ca.key",
        "-out", "ca.crt",
    )  # fmt: skip
    quietly("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr")
    (out / "san.cnf").write_text(subject + "\n", encoding="utf-8")
    quietly(
        "openssl", "x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
        "-extfile", "san.cnf", "-out", "server.crt",
    )  # fmt: skip
    for node in range(nodes):
        quietly("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"node{node}")


def prepare(out: Path, experiment: Path, changes: list[str], rounds: int | None) -> tuple[int, int, Path]:
    """Keys, roster and a settings file for each node, and the resolved experiment: how many clients and nodes there are, and the roster.

    Nodes 0, 1, … are the clients. Under encrypted similarity there are holders besides, who have no data.
    """
    config = load_config(experiment, [*changes, *([] if rounds is None else [f"training.rounds={rounds}"])])
    resolved = out / "experiment.toml"
    resolved.write_text(config.to_toml(), encoding="utf-8")
    clients, holders = config.data.clients, config.protection.holders
    roster = write_identities(out / "keys", clients, key_holder=holders)
    tree = tomllib.loads(config.to_toml())
    for client in range(clients):
        settings = {
            "identity": f"keys/client{client}.key", "roster": "keys/roster.txt", "state": f"state/client{client}",
            "protection": tree["protection"], "privacy": tree["privacy"], "app": {"experiment": str(resolved)},
        }  # fmt: skip
        (out / f"client{client}.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    for number in range(holders):
        name = f"key-holder{number or ''}"
        settings = {
            "role": "key-holder", "identity": f"keys/{name}.key", "roster": "keys/roster.txt", "state": f"state/{name}",
            "protection": tree["protection"],
        }  # fmt: skip
        (out / f"client{clients + number}.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    return clients, clients + holders, roster


def health(port: int, seconds: float, tls: Path | None) -> None:
    """Wait until the SuperLink answers."""
    import ssl

    context = None if tls is None else ssl.create_default_context(cafile=str(tls))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(OSError):
            scheme = "http" if tls is None else "https"
            with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/health", timeout=2, context=context):
                return
        time.sleep(0.2)
    raise SystemExit(f"the SuperLink did not answer on port {port} within {seconds:g} s; see superlink.log")


def flwr(machines: Machines, *command: str) -> str:
    done = subprocess.run(
        [str(BIN / "flwr"), *command],
        env=machines.environment,
        cwd=machines.out,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=300,
    )
    if done.returncode:
        raise SystemExit(f"flwr {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def status(machines: Machines, run_id: str) -> str:
    """Flower's own word on a run, e.g. "finished:completed"."""
    runs = json.loads(flwr(machines, "list", "loop", "--format", "json"))["runs"]
    return next(str(run["status"]) for run in runs if str(run["run-id"]) == run_id)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/flower"))
    parser.add_argument("--experiment", type=Path, default=HERE / "experiment.toml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds that a protocol stage may take")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--simulation", action="store_true")
    options = parser.parse_args(arguments)
    if arguments is None:  # on the command line: who ends this script by a signal leaves no process behind either
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    out = options.out.resolve()
    if out.exists():
        raise SystemExit(f"{out}: exists; remove it or choose another --out")
    try:
        load_config(options.experiment, options.set)
    except InputError as error:  # before anything is written or started
        raise SystemExit(str(error)) from None
    out.mkdir(parents=True)
    with deploy(out, options.experiment, options.set, options.rounds, options.deadline, options.tls, options.simulation) as machines:
        run_id = submit(machines)
        print(f"run {run_id}: logs in {out}", flush=True)
        word = wait(machines, run_id, 1800)
        if word != "finished:completed":
            print(flwr(machines, "log", run_id, "loop", "--show"))
    print(f"run {run_id}: {word}")
    if word != "finished:completed":
        raise SystemExit(f"the run ended as {word!r}; see {out}/superlink.log")
    summary: dict[str, Any] = json.loads((out / "run" / "summary.json").read_text(encoding="utf-8"))
    for key in ("algorithm", "protection", "clusters", "ari", "accuracy_mean", "rounds", "seconds"):
        print(f"  {key:<14} {summary[key]}")
    for note in summary["notes"]:
        print(f"  note           {note}")
    print(f"  run folder     {out / 'run'}")
    return summary


def deploy(
    out: Path, experiment: Path, changes: list[str], rounds: int | None, deadline: float, tls: bool = False, simulation: bool = False
) -> Machines:
    """Start SuperLink and SuperNodes in `out`."""
    clients, nodes, roster = prepare(out, experiment, changes, rounds)
    home = out / ".flwr"
    home.mkdir()
    port, *ports = free_ports(nodes + 1)
    # nothing reaches outside this machine: no telemetry, no look for updates, no installation of dependencies (which SuperNodes do only
    # when they are told to)
    environment = {
        **os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "CFLPRIV_SETTINGS": str(out), "FLWR_HOME": str(home), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25", "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}:{os.environ.get('PATH', '')}",
    }  # fmt: skip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a process for every message would compile its modules anew
    if tls:
        certificates(out, nodes)
    where = f'root-certificates = "{out / "ca.crt"}"' if tls else "insecure = true"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "loop"\n\n[superlink.loop]\naddress = "127.0.0.1:{port}"\n{where}\n', encoding="utf-8"
    )
    machines = Machines(out, environment)
    machines.simulated = nodes if simulation else 0
    app = out / "app"
    shutil.copytree(HERE / "clustered", app / "clustered", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "pyproject.toml", app)
    machines.run_config = {
        "experiment": str(out / "experiment.toml"), "out": str(out / "run"), "clients": clients, "roster": str(roster),
        "deadline-seconds": deadline,
    }  # fmt: skip
    link = ["flower-superlink", "--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
    link += ["--database", str(out / "superlink.db")]  # a SuperLink that is started again knows its SuperNodes
    secure = ["--insecure"]
    if tls:
        secure = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key", "--enable-supernode-auth"]
    try:
        machines.start("superlink", *link, *secure, *(["--simulation"] if simulation else []))
        health(port, 60, out / "ca.crt" if tls else None)
        if tls:
            for node in range(nodes):
                flwr(machines, "supernode", "register", str(out / f"node{node}.pub"), "loop")
        for node in range(nodes) if not simulation else ():
            start_node(machines, node, port, ports[node], tls)
    except BaseException:
        machines.__exit__()
        raise
    machines.ports = (port, ports, tls)
    return machines


def start_node(machines: Machines, node: int, port: int, own: int, tls: bool) -> None:
    secure = ["--root-certificates", "ca.crt", "--auth-supernode-private-key", f"node{node}"] if tls else ["--insecure"]
    settings = machines.out / f"client{node}.toml"
    machines.start(
        f"node{node}", "flower-supernode", *secure, "--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1", "--port", str(own),
        "--node-config", f'settings="{settings}"',
    )  # fmt: skip


def submit(machines: Machines) -> str:
    """Start the run; its id."""
    settings = machines.run_config
    words = " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in settings.items())
    more = []
    if machines.simulated:
        more = ["--federation-config", f"num-supernodes={machines.simulated} client-resources-num-cpus=1"]
    answer = flwr(machines, "run", "app", "loop", "--run-config", words, *more, "--format", "json")
    reply = json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
    if "run-id" not in reply:
        raise SystemExit(f"flwr run answered: {answer}")
    return str(reply["run-id"])


def wait(machines: Machines, run_id: str, seconds: float) -> str:
    """Flower's word when the run has ended. Meanwhile a line for each round."""
    until = time.monotonic() + seconds
    word, rounds = "?", 0
    while time.monotonic() < until:
        asked = time.monotonic()
        word = status(machines, run_id)
        rounds = show_rounds(machines.out / "run" / "rounds.jsonl", rounds)
        if word.startswith("finished"):
            return word
        time.sleep(max(1.0, 4 * (time.monotonic() - asked)))  # asking starts a process: it should not slow what it asks about
    raise SystemExit(f"the run is still {word!r} after {seconds:g} s")


def show_rounds(path: Path, shown: int) -> int:
    """Print the rounds of a run beyond those that were shown; how many there are."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] if path.exists() else []
    for row in rows[shown:]:
        score = "" if row.get("accuracy_mean") is None else f", accuracy {row['accuracy_mean']:.3f}"
        print(f"  round {row['round']}: {row['skipped'] or 'done'}, {row['seconds']:.0f} s{score}", flush=True)
    return len(rows)


if __name__ == "__main__":
    printable_streams()
    main()
