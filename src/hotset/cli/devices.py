"""The devices of this machine, for `--device list` and for `hotset doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from hotset.backends.registry import CPU, DEVICE_BACKENDS, capabilities
from hotset.cli.console import say
from hotset.errors import HotsetError
from hotset.placement.detect import Examined, Software, detector_of
from hotset.placement.machine import processor_name
from hotset.reporter import Reporter


def print_devices() -> None:
    """Print the devices that `--device` can name."""
    print(f"{CPU:11} {processor_name()}")
    for backend, (found, why) in examined():
        for one in found:
            print(f"{one.name:11} {one.title}")
        if not found and why:
            say(f"{capabilities(backend).title}: {why}", dim=True)


def examined() -> Iterator[tuple[str, tuple[list[Examined], str]]]:
    """Yield each backend with its devices, or with the reason that it has none."""
    for backend in DEVICE_BACKENDS:
        try:
            yield backend, (detector_of(backend).examine(Reporter()), "")
        except (ImportError, HotsetError) as error:
            yield backend, ([], str(error))


def software() -> Iterator[Software | None]:
    """Yield the software of each backend on this machine; None for a backend that needs no package."""
    for backend in DEVICE_BACKENDS:
        yield detector_of(backend).software()
