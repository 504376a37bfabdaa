"""Times on a device, and the rates to compare them with.

A GPU works while the host continues, so calls are timed by the device's own events. To exclude the launches
of short calls, calls are captured in a CUDA graph if possible. A kernel that reads the same megabytes again
reads the device's cache: `copies` makes more than a cache holds, and each round reads all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hotset.backends.triton.capture import Captured, Graphs

T = TypeVar("T")
WARM_UP, ROUNDS = 2, 7
MAX_COPIES = 512
MIN_SECONDS = 0.02  # of one round


def facts(device: torch.device) -> dict[str, Any]:
    """Return the facts of a device, for the record."""
    if device.type != "cuda":
        return {"name": str(device), "torch": torch.__version__}
    p = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": p.name,
        "capability": f"{p.major}.{p.minor}",
        "multiprocessors": p.multi_processor_count,
        "memory": total,
        "free": free,
        "l2": getattr(p, "L2_cache_size", 0),
        "torch": torch.__version__,
        "runtime": torch.version.cuda or torch.version.hip,
    }


def copies(make: Callable[[], T], n_bytes: int, device: torch.device) -> list[T]:
    """Return enough copies, of n_bytes per call, that the caches hold at most a third of them."""
    if device.type != "cuda":
        return [make()]
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    made = [make()]
    while len(made) * n_bytes < 3 * cache and len(made) < MAX_COPIES:
        free, total = torch.cuda.mem_get_info(device)
        if free < total / 4:
            break
        made.append(make())
    return made


def seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the median seconds of a call over several rounds of all calls.

    A captured graph contains all calls, because each replay reads the same memory.
    """

    def once() -> None:
        for call in calls:
            call()

    for _ in range(WARM_UP):
        once()
    if device.type != "cuda":
        return _on_host(once) / len(calls)
    torch.cuda.synchronize(device)
    graph = _captured(once, device)
    turn = graph.replay if graph is not None else once
    repeats = max(int(MIN_SECONDS / _events(turn, 1)), 1)
    return statistics.median(_events(turn, repeats) for _ in range(ROUNDS)) / len(calls)


def read_bandwidth(device: torch.device, n_bytes: int = 2 << 30) -> float:
    """Return the bytes per second at which a device reads its memory: a sum over an array beyond caches."""
    x = torch.ones(n_bytes // 4, device=device)
    return n_bytes / seconds([x.sum], device)


def copy_bandwidth(device: torch.device, n_bytes: int = 1 << 30) -> float:
    """Return the bytes per second of a copy within a device, read and written bytes together."""
    x = torch.ones(n_bytes // 4, device=device)
    y = torch.empty_like(x)
    return 2 * n_bytes / seconds([lambda: y.copy_(x)], device)


def matmul_rate(device: torch.device, n: int = 4096) -> float:
    """Return the operations per second of a large half-precision matrix product."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / seconds([lambda: a @ b], device)


def median_of(values: Sequence[float]) -> str:
    """Return a median with its range, for a table."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _captured(once: Callable[[], object], device: torch.device) -> Captured | None:
    try:
        return Graphs(device)(once)[0]
    except RuntimeError:  # calls that read back, such as fallback kernels, are timed with their launches
        return None


def _events(turn: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        turn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def _on_host(once: Callable[[], object]) -> float:
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        once()
        rounds.append(time.perf_counter() - start)
    return statistics.median(rounds)
