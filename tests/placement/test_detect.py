"""The devices that a model runs on: detected and named ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hotset.errors import DeviceError, InvalidRequestError
from hotset.placement.detect import wanted_devices
from hotset.settings import LoadSettings

DETECTED = "hotset.backends.triton.drivers.detect_gpu"
MISSING = "hotset.backends.triton.drivers.missing_libraries"


@pytest.mark.backend("triton")
def test_a_gpu_without_its_libraries_is_never_left_out_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DETECTED, lambda: "NVIDIA GeForce")
    monkeypatch.setattr(MISSING, lambda: ["torch", "triton"])
    devices, line = wanted_devices(LoadSettings())
    assert devices == ()
    assert line is not None
    assert "NVIDIA GeForce is there, but torch and triton are not installed: pip install '.[gpu]'" in line
    with pytest.raises(DeviceError, match="torch and triton are not installed"):
        wanted_devices(LoadSettings(vram_budget=8))
    assert wanted_devices(LoadSettings(n_gpu_layers=0)) == ((), None)


@pytest.mark.backend("triton")
@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_a_gpus_memory_grows_in_small_pages_unless_a_user_says_otherwise(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(sys, "platform", platform)
    asked = dict.fromkeys(names, "expandable_segments:True") if platform == "linux" else {}
    for users in ({"X": "1"}, *({name: "backend:native"} for name in names)):
        monkeypatch.setattr(os, "environ", environment := dict(users))
        wanted_devices(LoadSettings(device=("simulated",)))
        assert environment == users | (asked if "X" in users else {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.backend("triton")
def test_missing_requested_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DETECTED, lambda: None)
    assert wanted_devices(LoadSettings()) == ((), None)
    devices, line = wanted_devices(LoadSettings(n_gpu_layers=99))
    assert devices == ()
    assert line is not None
    assert "the CPU computes all layers" in line
    for settings in (
        LoadSettings(vram_budget=8),
        LoadSettings(vram_budget=8, n_gpu_layers=1),
        LoadSettings(gpu_index=Path("x")),
    ):
        with pytest.raises(DeviceError, match=r"no device was found .a GPU through PyTorch. to place"):
            wanted_devices(settings)
    with pytest.raises(DeviceError, match="cuda:0"):
        wanted_devices(LoadSettings(device=("cuda:0",)))
    with pytest.raises(InvalidRequestError, match="device must be one of auto, cpu"):
        wanted_devices(LoadSettings(device=("gpu",)))
    assert wanted_devices(LoadSettings(device=("simulated", "simulated"))) == (
        ("simulated", "simulated"),
        None,
    )
    # A GPU that this torch cannot use gives a note, or an error if the settings require it.
    monkeypatch.setattr(DETECTED, lambda: "NVIDIA GeForce")
    monkeypatch.setattr(MISSING, list)
    devices, line = wanted_devices(LoadSettings())
    assert devices == ()
    assert line is not None
    assert "cuda:0" in line
    with pytest.raises(DeviceError, match="NVIDIA GeForce is there, but"):
        wanted_devices(LoadSettings(vram_budget=8))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"vram_budget": 0.0}, "GiB above 0"),
        ({"vram_budget": -2.0}, "GiB above 0"),
        ({"vram_budget": float("nan")}, "GiB above 0"),
        ({"n_gpu_layers": -1}, "n_gpu_layers must be at least 0"),
        ({"n_gpu_layers": 1, "gpu_index": Path("x")}, "cannot be combined"),
    ],
)
def test_unsupported_settings_of_a_device_are_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LoadSettings(**wish)
