"""Times on a device, and the rates that they are compared with.

A GPU works while the host goes on, so calls are timed by the device's own events; launches of short calls
would be measured too, so calls are captured in a CUDA graph where that can be. Whoever reads the same
megabytes again reads the device's cache: `rotating` gives each call another copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
WARM_UP, ROUNDS = 3, 7
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


def rotating(make: Callable[[], T], n_bytes: int, device: torch.device) -> Callable[[], T]:
    """A function that hands out copies in turn, so many that no cache holds them all."""
    cache = (
        getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) if device.type == "cuda" else 0
    )
    n = min(max(3 * cache // max(n_bytes, 1) + 1, 1), 64)
    copies, turn = [make() for _ in range(n)], [0]

    def following() -> T:
        turn[0] += 1
        return copies[turn[0] % n]

    return following


def seconds(call: Callable[[], object], device: torch.device, *, calls: int = 1) -> float:
    """Seconds of one call, the median of several rounds. calls: so many different ones make a turn."""
    for _ in range(WARM_UP * calls):
        call()
    if device.type != "cuda":
        return _on_host(call, calls)
    torch.cuda.synchronize(device)
    graph = _captured(call, calls)
    turn = graph.replay if graph is not None else lambda: [call() for _ in range(calls)]
    once = _events(turn, 1)
    repeats = max(int(MIN_SECONDS / once), 1)
    return statistics.median(_events(turn, repeats) for _ in range(ROUNDS)) / calls


def read_bandwidth(device: torch.device, n_bytes: int = 2 << 30) -> float:
    """Bytes per second at which a device reads its memory: a sum over an array that no cache holds."""
    x = torch.ones(n_bytes // 4, device=device)
    return n_bytes / seconds(lambda: x.sum(), device)


def copy_bandwidth(device: torch.device, n_bytes: int = 1 << 30) -> float:
    """Bytes per second of a copy within a device, read and written bytes together."""
    x = torch.ones(n_bytes // 4, device=device)
    y = torch.empty_like(x)
    return 2 * n_bytes / seconds(lambda: y.copy_(x), device)


def matmul_rate(device: torch.device, n: int = 4096) -> float:
    """Operations per second of a large half-precision matrix product."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, device)


def median_of(values: Sequence[float]) -> str:
    """A median with its range, for a table."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _captured(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
    except RuntimeError:  # a call that reads back, such as a twin's, is timed with its launches
        torch.cuda.synchronize()
        return None
    return graph


def _events(turn: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        turn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def _on_host(call: Callable[[], object], calls: int) -> float:
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - start) / calls)
    return statistics.median(rounds)
