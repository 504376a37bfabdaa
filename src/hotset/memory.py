"""The memory that this process may still use."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_LIMITS = (  # of a control group: its limit, its use, and the part of its use that the system can reclaim
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_cache",
    ),
)


def free_memory() -> int:
    """Return the bytes that are free in the machine and in this process's container, if it has one."""
    free = int(psutil.virtual_memory().available)
    for limit, used, stat, cache in _LIMITS:
        with contextlib.suppress(OSError, ValueError, KeyError):
            facts = dict(line.split(" ", 1) for line in Path(stat).read_text().splitlines())
            taken = int(Path(used).read_text()) - int(facts[cache])
            free = min(free, max(int(Path(limit).read_text()) - taken, 0))
    return free


def own_memory() -> int:
    """Return the bytes of this process that are in memory."""
    return int(psutil.Process().memory_info().rss)
