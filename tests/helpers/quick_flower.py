"""Flower's own SuperNode and SuperExec, with less waiting and fewer imports: what most deployments of the tests run on.

Nearly all of a small deployment's time goes into imports (4 s of processor time for each message: a process that loads Flower, PyTorch and
scikit-learn) and fixed waits. Here a SuperExec has the imports done and forks itself for each message and each server's app, so a client
still is a process of its own that knows nothing of the one before. An app that starts slowly on a busy machine loses its token after 30 s,
and a SuperExec starts another beside it. SuperNodes look for messages more often; and their heartbeats are as frequent as a SuperLink
allows, so a killed one is given up after 20 s instead of 60. Nothing else differs. `make test-flower` starts Flower as it is.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["commands", "superexec", "supernode"]

POLL_SECONDS = 0.25
HEARTBEAT_SECONDS = 10
"""`HEARTBEAT_MIN_INTERVAL` of Flower 1.41; a node that misses two is offline."""
APPS = {"flwr-clientapp": "flwr.supernode.cli", "flwr-serverapp": "flwr.superlink.cli"}
"""Commands that are forked, and the module that has each as a function."""


def commands(folder: Path, installed: Path) -> Path:
    """A new folder with Flower's commands, those of this module in place of two of them."""
    folder.mkdir()
    for command in installed.glob("fl*"):
        (folder / command.name).symlink_to(command)
    for name, function in (("flower-supernode", supernode), ("flower-superexec", superexec)):
        (folder / name).unlink()
        (folder / name).write_text(
            f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(Path(__file__).resolve())!r})[{function.__name__!r}]()\n",
            encoding="utf-8",
        )
        (folder / name).chmod(0o755)
    return folder


def supernode() -> None:
    """`flower-supernode` with short waits."""
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli import flower_supernode

    constants: tuple[Any, ...] = (heartbeat, fleet_http_connection)
    for module in constants:
        assert module.HEARTBEAT_DEFAULT_INTERVAL > HEARTBEAT_SECONDS
        module.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT_SECONDS
    waiting: Any = start_client_internal
    waiting.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, POLL_SECONDS)))
    flower_supernode()


def superexec() -> None:
    """`flower-superexec` that forks itself for each app."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    starting: Any = subprocess_executor
    starting.subprocess = SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=started)
    if "--parent-pid" in sys.argv:
        at_node = b"flower-supernode" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        ours = ("flwr.supernode.cli", "cflpriv.flower.client") if at_node else ("flwr.superlink.cli", "cflpriv.flower.server")
        for module in (*ours, "cflpriv.experiments", "cflpriv.data", "sklearn.datasets"):
            import_module(module)
        from cflpriv import build_population, load_config  # noqa: F401
    flower_superexec()


def started(command: list[str], **streams: Any) -> Any:
    """What `Popen` starts, or an app by a fork of this process."""
    with_children(os.WNOHANG)
    if command[0] not in APPS:
        return subprocess.Popen(command, **streams)
    main = getattr(import_module(APPS[command[0]]), command[0].replace("-", "_"))
    if not os.fork():
        forked(main, command)
    return None


def with_children(how: int) -> None:
    """Let go of children that have ended."""
    try:
        while os.waitpid(-1, how)[0]:
            pass
    except ChildProcessError:
        return


def forked(main: Callable[[], None], command: list[str]) -> None:
    """In the child: run `main` as a process of its own would, and end."""
    from flwr.supercore.exit import exit_handler

    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exit_handler.registered_exit_handlers.clear()  # those of the parent
        sys.argv = command
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else bool(ended.code)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
