"""The number of cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil


def usable_cores() -> int:
    """Return the number of physical cores in the affinity mask and the container's CPU quota; at least 1.

    The two threads of a core share its vector units: a matrix product gains nothing from the second thread,
    and loses time at every barrier.
    """
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS or Windows
        return max(1, psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    cores = {_siblings(cpu) for cpu in allowed}
    quota = _quota()
    return max(1, len(cores) if quota == math.inf else min(len(cores), math.ceil(quota)))


def _siblings(cpu: int) -> str:
    """Return a name for the physical core of a logical processor."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> float:
    """Return the quota of the control group in processors; infinite without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.inf if limit == "max" else float(limit) / float(period)
    except (OSError, ValueError):
        pass
    try:
        base = Path("/sys/fs/cgroup/cpu")
        limit_us = int((base / "cpu.cfs_quota_us").read_text())
        return limit_us / int((base / "cpu.cfs_period_us").read_text()) if limit_us > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
