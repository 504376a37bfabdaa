"""The device backends and their capabilities.

A device backend is a folder of backends/ with these modules, which are imported only when a model needs them:

    plugin      CAPABILITIES
    detection   finds its devices (placement/detect.py: Detector)
    planning    its part of placement (placement/planner.py: Planner)
    opening     builds the backend of a placement (placement/build.py: Opener)
    measuring   for backends with the capability thresholds: how fast devices skip zeros

To delete a backend, delete its folder and its line in DEVICE_BACKENDS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hotset.errors import InvalidRequestError

if TYPE_CHECKING:
    from hotset.formats.quants import GGMLType
    from hotset.load_parameters import KVType
    from hotset.model.operations import Op

# Words for the processor: its kernels, and the slow plain NumPy that the other backends are tested against.
CPU, REFERENCE = "cpu", "reference"
_NUMBER = "[:N]"
# Backend → words for its devices.
DEVICE_BACKENDS: Mapping[str, tuple[str, ...]] = {
    "triton": ("cuda[:N]", "rocm[:N]", "mps", "xpu[:N]", "simulated"),
    "vulkan": ("vulkan[:N]",),
}

_ELSEWHERE = {"none": CPU, "metal": "mps", "mtl": "mps", "sycl": "xpu"}  # llama.cpp's words


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of a device backend.

    title: its device as a phrase in a sentence, such as "a Vulkan device".
    operations, tensor_types, kv_types: those with kernels; tensor_types are the types of plain products.
    adapters, speculation, prompt_cache: LoRA, drafts and a prompt cache on disk, for a model that is whole on
    one device. neuron_split, expert_cache: the CPU computes the other neurons, or experts. sparse_ffn: models
    run sparse by default, and kernels count the neurons that fire. thresholds: kernels skip inputs that
    activation thresholds make zero. images: rows of images enter in place of embeddings. ram_budget: works
    within a budget of host memory. unasked: its devices are used even if no option names them. cards: plans
    for cards that this machine does not have. timings: measures the operations of a step. state: the devices
    on which it was measured. determinism: the conditions under which results have the same bits.
    """

    title: str
    operations: tuple[type[Op], ...]
    tensor_types: tuple[GGMLType, ...]
    kv_types: tuple[KVType, ...]
    adapters: bool = False
    speculation: bool = False
    prompt_cache: bool = False
    neuron_split: bool = False
    expert_cache: bool = False
    sparse_ffn: bool = False
    thresholds: bool = False
    images: bool = False
    ram_budget: bool = False
    unasked: bool = False
    cards: bool = False
    timings: bool = False
    state: str = ""
    determinism: str = ""


@cache
def capabilities(backend: str) -> Capabilities:
    """Return the capabilities of a backend of DEVICE_BACKENDS."""
    found: Capabilities = part_of(backend, "plugin").CAPABILITIES
    return found


def all_capabilities() -> list[Capabilities]:
    """Return the capabilities of each device backend."""
    return [capabilities(backend) for backend in DEVICE_BACKENDS]


def words_with(capability: str) -> tuple[str, ...]:
    """Return the words of the devices whose backends have a capability, by its name."""
    found = (words for name, words in DEVICE_BACKENDS.items() if getattr(capabilities(name), capability))
    return tuple(word for words in found for word in words)


def device_words() -> tuple[str, ...]:
    """Return the words that name devices, such as cuda[:N]; auto and cpu come first."""
    return "auto", CPU, *(word for words in DEVICE_BACKENDS.values() for word in words)


def check_device(name: str, what: str = "device") -> None:
    """Raise InvalidRequestError, which lists the valid words, if no device can have this name.

    what: the subject of the message.
    """
    kind, colon, number = name.partition(":")
    words = device_words()
    is_plain = not colon and kind in (*words, REFERENCE)
    is_numbered = bool(colon) == number.isdecimal() and f"{kind}{_NUMBER}" in words
    if not (is_plain or is_numbered):
        raise InvalidRequestError(f"{what} must be one of {', '.join(words)}, not {name!r}")


def device_names(given: str) -> str:
    """Return device names in hotset's spelling, for llama.cpp's CUDA1, Vulkan0, Metal or none."""
    names = re.sub(r"\b([A-Za-z]+)(\d+)\b", r"\1:\2", given).lower()
    return re.sub(r"\b(metal|mtl|sycl|none)\b", lambda found: _ELSEWHERE[found[0]], names).replace(
        "mps:0", "mps"
    )


def backend_of(device: object) -> str:
    """Return the backend of a device, by its name or card.

    Raises InvalidRequestError for a card that no backend plans for.
    """
    kind = str(device).partition(":")[0]
    for backend, words in DEVICE_BACKENDS.items():
        if {kind, f"{kind}{_NUMBER}"}.intersection(words):
            return backend
    for backend in DEVICE_BACKENDS:
        if capabilities(backend).cards:
            return backend
    raise InvalidRequestError(f"no backend plans for {device}")


def capabilities_of(devices: Iterable[object]) -> Capabilities | None:
    """Return the capabilities of the backend of some devices; None for no devices."""
    return next((capabilities(backend_of(device)) for device in devices), None)


def part_of(backend: str, part: str) -> Any:
    """Import a part of a backend of DEVICE_BACKENDS."""
    return import_module(f"hotset.backends.{backend}.{part}")


def plugin_of(device: object, part: str) -> Any:
    """Import a part of the backend of a device."""
    return part_of(backend_of(device), part)
