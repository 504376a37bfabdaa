"""The choice of devices for a model, from the settings and the devices of this machine.

A backend detects its devices without large libraries, since every `hotset run` asks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from hotset.backends.registry import DEVICE_BACKENDS, backend_of, capabilities, part_of
from hotset.errors import DeviceError, InvalidRequestError

if TYPE_CHECKING:
    from hotset.reporter import Reporter
    from hotset.settings import LoadSettings

_NO_LAYERS = "no GPU was found: the CPU computes all layers, and n_gpu_layers has no effect"


@dataclass(frozen=True)
class Examined:
    """A device for display: its name in options, a title, all facts as a line, and facts for JSON."""

    name: str
    title: str
    line: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Software:
    """The drivers and packages of a backend on this machine, for display.

    drivers: name → whether it was found. packages: name → version, or None if it is missing. found: its
    devices in words, or None. advice: whether they are used, or what to install.
    """

    drivers: Mapping[str, bool]
    packages: Mapping[str, str | None]
    found: str | None
    advice: str


class Detector(Protocol):
    """The part of a device backend that finds its devices: its module `detection`."""

    def named_devices(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the devices of names, each with its number.

        Raises InvalidRequestError for a name without a meaning, DeviceError for a device that cannot be used.
        """
        ...

    def found_device(self, progress: Reporter | None) -> tuple[str | None, str | None]:
        """Return the device to try if none is named, or None, and why a device of this machine is unused."""
        ...

    def examine(self, progress: Reporter) -> list[Examined]:
        """Return the devices of this machine, measured if that takes no library that may be missing.

        Raises DeviceError if the driver is missing.
        """
        ...

    def software(self) -> Software | None:
        """Return the drivers and packages that its devices need; None if no package is missing for any."""
        ...


def detector_of(backend: str) -> Detector:
    """Return the detector of a device backend."""
    detector: Detector = part_of(backend, "detection")
    return detector


def has_default_device() -> bool:
    """Return whether this machine has a device that is used, or could be, if no option names one."""
    return any(
        detector_of(backend).found_device(None) != (None, None)
        for backend in DEVICE_BACKENDS
        if capabilities(backend).unasked
    )


def _none_found(settings: LoadSettings) -> str:
    titles = [
        capabilities(backend).title
        for backend in DEVICE_BACKENDS
        if capabilities(backend).unasked or settings.is_auto
    ]
    return f"no device was found ({' or '.join(titles) or 'no backend has one'})"


def wanted_devices(settings: LoadSettings) -> tuple[tuple[str, ...], str | None]:
    """Return the devices to use, none for the CPU, and a message if a GPU is left unused.

    With --device auto the placement decides later whether the device is faster than the CPU for this model.
    Raises DeviceError if a requested device cannot be used, unless only n_gpu_layers requests it.
    """
    if settings.n_gpu_layers == 0 or settings.is_on_cpu:
        return (), None
    if settings.device is not None and not settings.is_auto:
        return detector_of(backend_of(settings.device[0])).named_devices(settings.device), None
    problems = []
    for backend in DEVICE_BACKENDS:
        if not (capabilities(backend).unasked or settings.is_auto):
            continue
        device, problem = detector_of(backend).found_device(settings.progress)
        if device is not None and settings.is_auto:
            try:
                replace(settings, device=(device,))
            except InvalidRequestError as error:  # a setting that this device does not support
                device, problem = None, f"{device} is not used: {error}"
        if device is not None:
            return (device,), None
        problems += [problem] if problem else []
    if replace(settings, n_gpu_layers=None).asks_for_a_device:  # by other settings
        raise DeviceError(
            "; ".join(problems)
            or f"{_none_found(settings)} to place anything on; name a device ('hotset doctor' shows "
            "them), or leave out the settings of the GPU"
        )
    if problems:
        said = "; ".join(problems)
        return (), f"{said}. The CPU computes alone (device='cpu': without this line)."
    return (), _NO_LAYERS if settings.n_gpu_layers else None
