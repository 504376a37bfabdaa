"""The devices that a model runs on: GPUs found without torch, and named devices."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hotset.errors import DeviceError, InvalidRequestError
from hotset.placement import detect
from hotset.placement.detect import GPU, detect_gpu, missing_libraries, wanted_devices
from hotset.settings import LoadSettings


class Driver:
    """A driver's library with `n_devices` devices. fails: its initialisation fails."""

    def __init__(self, n_devices: int, fails: bool = False) -> None:
        self.n_devices, self.fails = n_devices, fails
        self.opened: list[str] = []

    def __call__(self, name: str) -> Driver:
        self.opened.append(name)
        return self

    def cuInit(self, _: int) -> int:  # noqa: N802
        return 100 if self.fails else 0

    def cuDeviceGetCount(self, pointer: Any) -> int:  # noqa: N802
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = self.n_devices
        return 0

    hipInit, hipGetDeviceCount = cuInit, cuDeviceGetCount  # noqa: N815


def add(root: Path, name: str, text: str = "") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_a_gpu_is_found_by_files_before_any_library_is_opened(tmp_path: Path) -> None:
    driver = Driver(3)
    assert detect_gpu(tmp_path, driver, {}) is None
    for i in range(2):
        add(tmp_path, f"proc/driver/nvidia/gpus/000{i}/information", "Model: \t\t NVIDIA GeForce\nIRQ: 1\n")
    assert detect_gpu(tmp_path, driver, {}) == GPU("NVIDIA", "NVIDIA GeForce", 2)
    assert str(detect_gpu(tmp_path, driver, {})) == "2 x NVIDIA GeForce"
    assert detect_gpu(tmp_path, driver, {"CUDA_VISIBLE_DEVICES": ""}) is None
    assert detect_gpu(tmp_path, driver, {"CUDA_VISIBLE_DEVICES": "-1"}) is None
    assert driver.opened == []


@pytest.mark.parametrize(("file", "vendor"), [("dev/dxg", "NVIDIA"), ("dev/kfd", "AMD")])
def test_driver_is_queried_if_files_do_not_tell(tmp_path: Path, file: str, vendor: str) -> None:
    add(tmp_path, file)
    found = detect_gpu(tmp_path, Driver(1), {})
    assert found is not None
    assert found.vendor == vendor
    assert detect_gpu(tmp_path, Driver(0), {}) is None
    assert detect_gpu(tmp_path, Driver(1, fails=True), {}) is None

    def missing(name: str) -> Any:
        raise OSError(name)

    assert detect_gpu(tmp_path, missing, {}) is None


def test_missing_libraries_are_named() -> None:
    assert missing_libraries(lambda name: None if name == "triton" else name) == ["triton"]
    assert missing_libraries(lambda name: name) == []


@pytest.mark.backend("triton")
def test_a_gpu_without_its_libraries_is_never_left_out_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "detect_gpu", lambda: GPU("NVIDIA", "NVIDIA GeForce", 1))
    monkeypatch.setattr(detect, "missing_libraries", lambda: ["torch", "triton"])
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
    monkeypatch.setattr(detect, "detect_gpu", lambda: None)
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
        with pytest.raises(DeviceError, match="no NVIDIA or AMD GPU was found"):
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
    monkeypatch.setattr(detect, "detect_gpu", lambda: GPU("NVIDIA", "NVIDIA GeForce", 1))
    monkeypatch.setattr(detect, "missing_libraries", list)
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
