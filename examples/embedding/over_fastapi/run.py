"""All parties on the loopback."""

import os
import random
import subprocess
import sys
import time

from parties import CLIENTS, HELPERS, make_keys

PORT = random.randrange(20000, 30000)
URLS = [f"http://127.0.0.1:{PORT + 1 + number}" for number in range(HELPERS)]


def start(*command, **settings):
    return subprocess.Popen([sys.executable, *command], env={**os.environ, **settings})


def serve(app, port, **settings):
    return start("-m", "uvicorn", app, "--port", str(port), "--log-level", "critical", **settings)


make_keys()
starts = [lambda number=number: serve("helper:app", PORT + 1 + number, NUMBER=str(number)) for number in range(HELPERS)]
starts += [lambda number=number: start("client.py", str(number), f"http://127.0.0.1:{PORT}") for number in range(CLIENTS)]
starts += [lambda: serve("service:app", PORT, HELPERS=" ".join(URLS))]
running = [begin() for begin in starts]
for _ in range(5):
    time.sleep(2)
    for party in (random.randrange(len(starts)), -1):  # any, and the service
        running[party].kill()
        running[party].wait()
        running[party] = starts[party]()
for client in running[HELPERS:-1]:
    client.wait()
time.sleep(10)
for process in running:
    process.kill()
