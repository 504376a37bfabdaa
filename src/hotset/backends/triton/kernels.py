"""The choice, made once per backend, between Triton kernels and the fallback in plain torch."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Literal

import torch

from hotset.backends.torch import functions
from hotset.backends.triton import fallback, launch
from hotset.errors import DeviceError, InvalidRequestError, install_command


class Kernels:
    """The operations of a stage on `device`. The module `fallback` documents each operation and its shapes.

    triton: whether to use Triton. None chooses Triton on CUDA and ROCm devices, and on any device in Triton's
    interpreter (TRITON_INTERPRET=1); the environment variable HOTSET_TRITON=0 or 1 overrides this choice.
    Raises DeviceError if Triton is needed and missing, or if HOTSET_DEPENDENT_LAUNCH=1 is set and the device
    has no dependent launches. Raises InvalidRequestError if Triton is requested and cannot run on the device.
    """

    def __init__(self, device: torch.device | str, triton: bool | None = None) -> None:
        self.device = torch.device(device)
        self.triton = _wants_triton(self.device) if triton is None else triton
        if self.triton and self.device.type == "cuda":
            _check_dependent_launch(self.device)
        ops = _triton_kernels() if self.triton else fallback
        self.activate = functions.activate
        self.zero_small = ops.zero_small
        self.angles = ops.angles
        experts = _expert_kernels() if self.triton else fallback
        self.experts = experts.experts
        self.choose_experts = experts.choose_experts
        self.fetch_experts = experts.fetch_experts
        self.route = experts.route
        self.sum_experts = experts.sum_experts
        self.linear = ops.linear
        self.linear_normed = ops.linear_normed
        self.linear_bits = ops.linear_bits
        self.linear_t = ops.linear_t
        self.neurons = ops.neurons
        self.fired = ops.fired
        self.gated = ops.gated
        self.sparse_ffn = ops.sparse_ffn
        self.pack_bits = ops.pack_bits
        self.largest = ops.largest
        self.rms_norm = ops.rms_norm
        self.layer_norm = ops.layer_norm
        self.gaussian_top_k = ops.gaussian_top_k
        self.rotate = ops.rotate
        self.store_kv = ops.store_kv
        self.rotate_store = ops.rotate_store
        self.project_heads = ops.project_heads
        self.attention = ops.attention

    @property
    def name(self) -> Literal["triton", "torch"]:
        """Return the name of the chosen implementation."""
        return "triton" if self.triton else "torch"

    @property
    def capturable(self) -> bool:
        """Return whether a step may be captured in a CUDA graph.

        Fallback kernels read numbers on the host, so they cannot be captured. HOTSET_CAPTURE=0 forbids
        capturing.
        """
        return self.triton and self.device.type == "cuda" and os.environ.get("HOTSET_CAPTURE") != "0"


def _triton_kernels() -> ModuleType:
    """Import the Triton kernels. Importing Triton takes half a second and fixes whether it interprets."""
    from hotset.backends.triton import triton_kernels

    return triton_kernels


def _expert_kernels() -> ModuleType:
    from hotset.backends.triton import experts_kernel

    return experts_kernel


def _check_dependent_launch(device: torch.device) -> None:
    if launch.DEPENDENT and (
        torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0)
    ):
        raise DeviceError(
            f"HOTSET_DEPENDENT_LAUNCH=1, but {device} has no dependent launches: they need an NVIDIA GPU of "
            "compute capability 9.0 or more; unset it"
        )


def _wants_triton(device: torch.device) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    wish = os.environ.get("HOTSET_TRITON")
    if wish not in (None, "", "0", "1"):
        raise InvalidRequestError(f"HOTSET_TRITON must be 0 or 1, not {wish!r}")
    if wish == "0":
        return False
    if wish == "1" and device.type != "cuda" and not interpreted:
        raise InvalidRequestError(
            f"HOTSET_TRITON=1, but Triton does not run on {device}; unset it, or set TRITON_INTERPRET=1"
        )
    if device.type != "cuda" and not interpreted:
        return False
    if importlib.util.find_spec("triton") is None:
        raise DeviceError(
            f"{device} needs Triton, which is not installed: {install_command('gpu')} "
            "(or set HOTSET_TRITON=0 for the slow path in plain torch)"
        )
    return True
