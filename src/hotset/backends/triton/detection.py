"""Which of torch's devices a model runs on. A GPU is looked for without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hotset.backends.triton.devices import find_device
from hotset.errors import DeviceError, InvalidRequestError
from hotset.placement import detect

if TYPE_CHECKING:
    from hotset.placement.detect import Examined
    from hotset.reporter import Reporter


def named_devices(names: Sequence[str]) -> tuple[str, ...]:
    """Check names, as Detector.named_devices; "cpu" may be named several times."""
    _pack_memory()
    named = tuple(str(find_device(name)) for name in names)
    if len(set(named)) < len(named) and any(name != "cpu" for name in named):
        raise InvalidRequestError(f"a device is named twice: {', '.join(names)}")
    return named


def found_device(progress: Reporter | None) -> tuple[str | None, str | None]:  # noqa: ARG001
    """Return the first GPU whose driver and libraries are installed, as Detector.found_device."""
    gpu = detect.detect_gpu()
    if gpu is None:
        return None, None
    if missing := detect.missing_libraries():
        verb = "is" if len(missing) == 1 else "are"
        return None, f"{gpu} is there, but {' and '.join(missing)} {verb} not installed: {detect.INSTALL}"
    try:
        return named_devices(["cuda:0"])[0], None
    except DeviceError as error:
        return None, f"{gpu} is there, but {error}"


def _pack_memory() -> None:
    """Asks torch, before it starts, for CUDA memory that grows in small pages.

    Otherwise tensors of some megabytes share segments of 20 MiB that they do not fill, and a budget that is
    planned to the byte does not hold. What a user has set stays.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # since torch 2.9, and before
    if sys.platform == "linux" and not any(name in os.environ for name in names):
        os.environ.update(dict.fromkeys(names, "expandable_segments:True"))


def examine(progress: Reporter) -> list[Examined] | None:  # noqa: ARG001
    """Return None: a GPU is measured at the first load."""
    return None
