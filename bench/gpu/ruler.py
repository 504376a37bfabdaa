"""Times on a device, and the rates that they are compared with.

A GPU works while the host goes on, so calls are timed by the device's own events; launches of short calls
would be measured too, so calls are captured in a CUDA graph where that can be. A kernel that reads the same
megabytes again reads the device's cache: `copies` makes as many as no cache holds, and a turn reads all.
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
    """What a device is, for the record."""
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
    """So many, of which a call reads n_bytes each, that the caches hold a third of what all of them read."""
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
    """Seconds of one of the calls, the median of several rounds through all of them: a captured graph holds
    each of them, for what is captured reads at every replay what it read then."""

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
    """Bytes per second at which a device reads its memory: a sum over an array that no cache holds."""
    x = torch.ones(n_bytes // 4, device=device)
    return n_bytes / seconds([x.sum], device)


def copy_bandwidth(device: torch.device, n_bytes: int = 1 << 30) -> float:
    """Bytes per second of a copy within a device, read and written bytes together."""
    x = torch.ones(n_bytes // 4, device=device)
    y = torch.empty_like(x)
    return 2 * n_bytes / seconds([lambda: y.copy_(x)], device)


def matmul_rate(device: torch.device, n: int = 4096) -> float:
    """Operations per second of a large half-precision matrix product."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / seconds([lambda: a @ b], device)


def median_of(values: Sequence[float]) -> str:
    """A median with its range, for a table."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _captured(once: Callable[[], object], device: torch.device) -> Captured | None:
    try:
        return Graphs(device)(once)[0]
    except RuntimeError:  # a call that reads back, such as a fallback kernel's, is timed with its launches
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
