"""Device backends are plug-ins: without the folder of one, and its line in the registry, the rest works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import TESTS

import hotset
from hotset import _core
from hotset.backends.registry import DEVICE_BACKENDS

# Removes the finder of an editable installation, which would import the original package, not the copy.
PLUGIN = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in type(one).__module__]
sys.path.insert(0, {copy!r})
"""
COMMON = (
    "repository/test_layers.py",
    "placement/test_placement.py",
    "loader/test_loader.py",
    "backends/test_stages.py",
)
# Deleted backend → tests of the other backend.
OTHERS = {
    "triton": "backends/vulkan/test_vulkan_placement.py",
    "vulkan": "backends/triton/test_gpu_planning.py",
}


def copy_without(backend: str, folder: Path) -> Path:
    """Copy the package without a device backend, and return the folder of the copy."""
    package = Path(hotset.__file__).parent
    without = package / "backends" / backend
    shutil.copytree(
        package, folder / "hotset",
        ignore=lambda path, names: [
            name for name in names if name == "__pycache__" or Path(path) / name == without
        ],
    )  # fmt: skip
    shutil.copy(_core.__file__, folder / "hotset")  # it is elsewhere in an editable installation
    registry = folder / "hotset" / "backends" / "registry.py"
    text, n = re.subn(rf'^    "{backend}": .*\n', "", registry.read_text("utf-8"), flags=re.MULTILINE)
    assert n == 1
    registry.write_text(text, "utf-8")
    return folder


def in_copy(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the package of a copy."""
    (copy / "of_copy.py").write_text(PLUGIN.format(copy=str(copy)))
    paths = [str(copy), str(TESTS / "support")]
    return subprocess.run(
        [sys.executable, *arguments], cwd=TESTS.parent, text=True, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


@pytest.mark.parametrize("backend", DEVICE_BACKENDS)
def test_devices_of_a_deleted_backend_are_refused(tmp_path: Path, backend: str) -> None:
    copy, device = copy_without(backend, tmp_path), {"triton": "cuda:0", "vulkan": "vulkan:0"}[backend]
    program = (
        "import of_copy, hotset\n"
        "from hotset.placement.detect import wanted_devices\n"
        f"assert hotset.__file__.startswith({str(copy)!r})\n"
        "settings = hotset.LoadSettings()\n"
        "assert wanted_devices(settings)[0] == ()\n"
        f"try: wanted_devices(hotset.LoadSettings(device={device!r}))\n"
        "except hotset.HotsetError as error: print(error)\n"
    )
    done = in_copy(copy, "-c", program)
    assert done.returncode == 0, done.stderr
    assert f"device is named {device}" in done.stdout or f"{device!r} is not known" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("backend", DEVICE_BACKENDS)
def test_the_rest_works_without_a_backend(tmp_path: Path, backend: str) -> None:
    copy = copy_without(backend, tmp_path)
    tests = [str(TESTS / name) for name in (*COMMON, OTHERS[backend])]
    given = ("-q", "-p", "of_copy", "-p", "no:cacheprovider", "-k", "not folders_mirror_the_package")
    done = in_copy(copy, "-m", "pytest", *given, *tests)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "[100%]" in done.stdout
