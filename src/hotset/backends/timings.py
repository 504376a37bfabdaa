"""Times of the operations of a step, measured by the device that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class OperationTime:
    """The work of one kernel for one kind of operation in a step, over all layers.

    operation: the name of its result, without the layer. dispatches: kernel launches in a step. seconds: of a
    step, mean. weight_bytes: bytes of matrices that a step reads; 0 if the kernel reads none, or if the step
    decides which.
    """

    operation: str
    kernel: str
    dispatches: int
    seconds: float
    weight_bytes: int


@dataclass(frozen=True)
class DeviceTimes:
    """The times of steps of n_tokens tokens on a device.

    n_steps: how many were timed. groups: dispatches between two barriers run concurrently and form a group.
    on_device, on_host: mean seconds of a step, of the operations, and until the host had the result.
    """

    device: str
    n_tokens: int
    n_steps: int
    groups: int
    on_device: float
    on_host: float
    operations: Sequence[OperationTime]


@runtime_checkable
class Timed(Protocol):
    """A stage, or a chain of stages, that can time its operations."""

    def start_timing(self) -> bool:
        """Time the operations of the following steps. Returns whether any stage can.

        Raises DeviceError if the device has no clock.
        """
        ...

    def end_timing(self) -> list[DeviceTimes]:
        """Stop timing. Returns the times since start_timing, by device and number of tokens of a step."""
        ...
