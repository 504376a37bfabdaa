"""The devices of torch that a model is trained on."""

from __future__ import annotations

import os

from hotset.backends.registry import CPU, check_device
from hotset.errors import InvalidRequestError

_GPU = "cuda"  # torch's word, also for AMD's


def torch_device(device: str) -> str:
    """Return torch's name of a device to train on; auto: a GPU if there is one.

    Raises InvalidRequestError if torch cannot use the device.
    """
    import torch

    check_device(device)
    name = device.replace("rocm", _GPU)
    if device == "auto":
        name = _GPU if torch.cuda.is_available() else CPU
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidRequestError(f"the device {device!r} cannot train ({reason}); use cpu") from None
    return name


def is_gpu(name: str) -> bool:
    """Return whether torch's name of a device is one of a GPU that processes can share a training on."""
    return name.startswith(_GPU)


def own_device(name: str) -> str:
    """Return the device of this process of torchrun, which numbers the processes of a machine."""
    return f"{_GPU}:{os.environ.get('LOCAL_RANK', '0')}" if name == _GPU else name
