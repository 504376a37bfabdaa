"""Times of dispatches, from the device's timestamps: a table of operations, and a trace file.

    HOTSET_VULKAN_TRACE=file.json hotset run ...

writes a complete event for each dispatch in Chrome's trace event format (a JSON array; ui.perfetto.dev and
chrome://tracing open it). A dispatch begins when all dispatches before it have ended, so the events of a step
do not overlap: the time of a dispatch includes its barrier, and the times of concurrent dispatches add up to
the time of their group. Programs recorded without timing contain no timestamps.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hotset.backends.timings import DeviceTimes, OperationTime
from hotset.errors import DeviceError

if TYPE_CHECKING:
    from hotset import _core

TRACE = "HOTSET_VULKAN_TRACE"


class Dispatch(NamedTuple):
    """A recorded dispatch.

    operation: the name of its result. groups: workgroups; None if the host writes them before each run.
    weight_bytes: bytes of the matrix that it reads as a whole.
    """

    kernel: str
    operation: str
    groups: tuple[int, int, int] | None
    weight_bytes: int


@dataclass
class _Steps:
    """Sums over steps of one number of tokens. Seconds are by operation and kernel."""

    n_steps: int = 0
    groups: int = 0
    on_host: float = 0.0
    dispatches: Counter[tuple[str, str]] = field(default_factory=Counter)
    weight_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))


class DispatchTimings:
    """The times of the dispatches on one device since timing began.

    The constructor raises DeviceError if the device has no timestamps.
    """

    def __init__(self, device: _core.VulkanDevice) -> None:
        if not device.tick_nanoseconds:
            raise DeviceError(f"the Vulkan device {device.name} has no timestamps to time operations with")
        self._name, self._tick = device.name, device.tick_nanoseconds
        self._steps: defaultdict[int, _Steps] = defaultdict(_Steps)

    def add(
        self,
        recorded: Iterable[tuple[_core.VulkanProgram, Sequence[Dispatch]]],
        n_tokens: int,
        seconds: float,
    ) -> None:
        """Add a finished run of a step of n_tokens. seconds: until the host had the results."""
        steps = self._steps[n_tokens]
        steps.n_steps += 1
        steps.on_host += seconds
        for program, dispatches in recorded:
            ticks = program.times()
            steps.groups += program.n_groups
            taken = (ticks[:, 1] - ticks[:, 0]) * (self._tick * 1e-9)
            for one, of_one in zip(dispatches, taken.tolist(), strict=True):
                key = kind_of(one.operation), one.kernel
                steps.dispatches[key] += 1
                steps.weight_bytes[key] += one.weight_bytes
                steps.seconds[key] += of_one
            if (trace := trace_file()) is not None:
                trace.write(self._name, dispatches, ticks * (self._tick * 1e-3), n_tokens)

    def taken(self) -> list[DeviceTimes]:
        """Return the mean times so far, the operations that take most first."""
        return [
            DeviceTimes(
                self._name, n_tokens, steps.n_steps, steps.groups // steps.n_steps,
                sum(steps.seconds.values()) / steps.n_steps, steps.on_host / steps.n_steps,
                [
                    OperationTime(
                        *key, steps.dispatches[key] // steps.n_steps, seconds / steps.n_steps,
                        steps.weight_bytes[key] // steps.n_steps,
                    )
                    for key, seconds in sorted(steps.seconds.items(), key=lambda item: -item[1])
                ],
            )
            for n_tokens, steps in sorted(self._steps.items())
        ]  # fmt: skip


def kind_of(operation: str) -> str:
    """Return the name of an operation without its layer: blk.3.attn_q becomes attn_q."""
    first, _, rest = operation.partition(".")
    return rest.partition(".")[2] if first == "blk" else operation


class TraceFile:
    """A file of trace events, written step by step and closed at the end of the process.

    The closing bracket is optional in this format, so a killed process leaves a readable file.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w")
        except OSError as error:
            raise DeviceError(f"{TRACE}={path}: the file cannot be written: {error.strerror}") from None
        self._separator = "[\n"
        self._devices: list[str] = []
        atexit.register(self._end)

    def write(
        self, device: str, dispatches: Sequence[Dispatch], microseconds: np.ndarray, n_tokens: int
    ) -> None:
        """Write the events of a program. microseconds: float64 [dispatches, 2], the start and end of each."""
        if device not in self._devices:
            self._devices.append(device)
            self._event(name="process_name", ph="M", pid=len(self._devices), args={"name": device})
        process = self._devices.index(device) + 1
        for one, (start, end) in zip(dispatches, microseconds.tolist(), strict=True):
            args = {"tokens": n_tokens, "workgroups": one.groups, "weight_bytes": one.weight_bytes}
            self._event(
                name=one.operation, cat=one.kernel, ph="X", ts=start, dur=end - start, pid=process, tid=1,
                args={"kernel": one.kernel} | args,
            )  # fmt: skip
        self._file.flush()

    def _event(self, **event: Any) -> None:
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"

    def _end(self) -> None:
        self._file.write("\n]\n" if self._devices else "[]\n")
        self._file.close()


@cache
def trace_file() -> TraceFile | None:
    """Return the trace file of the environment, created at the first call; None if none is requested."""
    path = os.environ.get(TRACE)
    return TraceFile(Path(path)) if path else None
