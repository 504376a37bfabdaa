"""GPUs are found by files and drivers, without torch."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from hotset.backends.triton.drivers import GPU, detect_gpu, missing_libraries


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
