"""How long a device computes while some work runs, from torch's profiler: the rest of the time it waits for the host."""

import cProfile
import io
import pstats
from collections.abc import Callable, Iterable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from .rows import seconds

__all__ = ["covered", "host_share", "profiled"]

MOST_ROWS = 20


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans (begin, end)."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def host_share(work: Callable[[], object], took: float) -> float:
    """The share of the seconds that `work` took (without the profiler) in which the CUDA device computed and copied nothing.

    Raises `RuntimeError` where the profiler sees nothing of the device.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        seconds(work, "cuda")
    events = [event for event in recorded.events() or () if event.device_type.name == "CUDA"]
    if not events:
        raise RuntimeError("the profiler recorded no work of the device")
    return max(0.0, 1.0 - covered((event.time_range.start, event.time_range.end) for event in events) / 1e6 / took)


def profiled(work: Callable[[], object], device: str, page: Path, title: str) -> float:
    """Append to a page the operations, and then the functions of Python, that took the longest by themselves; the operations' seconds."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as recorded:
        seconds(work, device)
    averages, by = recorded.key_averages(), f"self_{device}_time_total"
    host, functions = cProfile.Profile(), io.StringIO()
    host.runcall(seconds, work, device)
    pstats.Stats(host, stream=functions).sort_stats("tottime").print_stats(MOST_ROWS)
    with page.open("a", encoding="utf-8") as file:
        file.write(f"{title}\n{averages.table(sort_by=by, row_limit=MOST_ROWS, max_name_column_width=60)}\n{functions.getvalue()}\n")
    micros = [event.self_device_time_total if device == "cuda" else event.self_cpu_time_total for event in averages]
    return float(sum(micros)) / 1e6
