"""The peak memory of one round over many clients with a large model, in multiples of the model, and the same round with all at once.

    python -m benchmarks cohorts [CLIENTS ...] [none one_message] [at_once]

An MLP 784-12600-10 of 10 million parameters (38 MiB), eight samples a client, two steps of SGD, FedAvg. The peak is that of the set-up and
the round, less what imports (a warm-up with a small model) and data take. Each row runs in a process of its own. With `at_once` the round
is repeated with all updates in memory, for a comparison of results: the models must be equal bit for bit.
"""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .federation import memory_used, population

__all__ = ["main", "measured"]

HIDDEN, SAMPLES, SIDE = 12_600, 8, 28
SUMS = ("none", "one_message")
AT_ONCE = 1 << 62


def measured(clients: int, protection: str, at_once: bool, hidden: int = HIDDEN) -> dict[str, Any]:
    """What one round takes, in this process: MiB above imports and data, models of that size, seconds, and a digest of the new model."""
    from cflpriv.contract import portions
    from cflpriv.experiments import advance, parse_config, start

    if at_once:
        portions.LARGEST_COHORT_BYTES = AT_ONCE
        portions.MEMORY_SHARE = 0.0

    def made(clients: Any, width: int) -> Any:
        """A run after one round."""
        sections = {
            "data": {"clients": len(clients.clients)},
            "model": {"name": "mlp", "hidden": width},
            "training": {"rounds": 100, "epochs": 1, "batch_size": SAMPLES // 2, "lr": 0.1, "weights": "equal"},
            "algorithm": {"name": "fedavg"},
            "protection": {"sum": protection},
            "run": {"evaluate_every": 1000, "insecure_test_entropy": True},
        }
        run = start(parse_config(sections), population=clients)
        run.rows.append({"round": 0, "skipped": None})  # round 0 is always evaluated
        if skipped := advance(run)["skipped"]:
            raise RuntimeError(f"the round was skipped: {skipped}")
        return run

    made(population(10, SIDE, SAMPLES), 16)  # imports what a round imports
    data = population(clients, SIDE, SAMPLES)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak so far is what remains now
    before, began = memory_used("VmRSS"), time.perf_counter()
    run = made(data, hidden)
    seconds = time.perf_counter() - began
    grown = memory_used("VmHWM") - before
    model = run.state.model.value()
    digest = hashlib.sha256(model.tobytes()).hexdigest()[:16]
    return {"grown": grown, "models": grown * 2**20 / model.nbytes, "seconds": seconds, "digest": digest}


def main(words: Sequence[str]) -> int:
    if words[:1] == ["--one"]:
        print(json.dumps(measured(int(words[1]), words[2], words[3] == "at once")))
        return 0
    sizes = [int(word) for word in words if word.isdigit()] or [100]
    sums = [name for name in SUMS if name in words] or SUMS
    ways = ("portions", "at once") if "at_once" in words else ("portions",)
    print(f"{'clients':>8} {'sum':<12} {'way':<9} {'MiB':>8} {'models':>7} {'seconds':>8}  digest of the model", flush=True)
    for clients in sizes:
        for name in sums:
            for way in ways:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks", "cohorts", "--one", str(clients), name, way],
                    check=True,
                    stdout=subprocess.PIPE,
                    encoding="utf-8",
                    errors="replace",
                )
                got = json.loads(done.stdout.splitlines()[-1])
                print(
                    f"{clients:>8} {name:<12} {way:<9} {got['grown']:>8.0f} {got['models']:>7.2f} {got['seconds']:>8.1f}  {got['digest']}",
                    flush=True,
                )
    return 0
