"""Device backends are plug-ins: without the folder of one, and its line in the registry, the rest works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from paths import BENCH, ROOT, TESTS

import hotset
from hotset import _core
from hotset.backends.registry import DEVICE_BACKENDS

# The folders and files of tests that can name a device or a backend. The other tests read no model, or only
# with the CPU and the reference: text, files, conversions, HTTP, training.
TESTED = (
    "backends", "placement", "loader", "cli", "model", "sparsity", "offload", "golden", "images", "scale",
    *sorted(path.name for path in TESTS.glob("test_*.py")),
    "server/test_server_facts.py", "repository/test_layers.py", "repository/test_names.py",
)  # fmt: skip


def copy_without(backend: str, folder: Path) -> Path:
    """Copy the repository without a device backend; return the Python that runs the copy.

    The tests of the backend, and the benchmarks of device backends with their tests, are not copied either.
    """
    package, copy = Path(hotset.__file__).parent, folder / "src" / "hotset"
    dropped = {package / "backends" / backend, TESTS / "backends" / backend, TESTS / "bench", BENCH / "gpu"}
    for source, target in ((package, copy), (TESTS, folder / "tests"), (BENCH, folder / "bench")):
        shutil.copytree(
            source, target,
            ignore=lambda path, names: [
                name for name in names if name == "__pycache__" or Path(path) / name in dropped
            ],
        )  # fmt: skip
    shutil.copy(_core.__file__, copy)  # it is elsewhere in an editable installation
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
        elif path.name not in ("src", "tests", "bench", ".venv", ".git"):
            (folder / path.name).symlink_to(path)
    registry = copy / "backends" / "registry.py"
    text, n = re.subn(rf'^    "{backend}": .*\n', "", registry.read_text("utf-8"), flags=re.MULTILINE)
    assert n == 1
    registry.write_text(text, "utf-8")
    return environment(folder)


def environment(folder: Path) -> Path:
    """Make an environment with the packages of this one and the hotset of a copy; return its Python.

    Its path file names the packages of this environment, whose own path files then have no effect. So an
    editable installation is not found, also by processes that tests start.
    """
    made = folder / "environment"
    venv.create(made, symlinks=True)
    scripts, packages = (
        Path(sysconfig.get_path(name, "venv", {"base": str(made), "platbase": str(made)}))
        for name in ("scripts", "purelib")
    )
    (packages / "copy.pth").write_text(f"{folder / 'src'}\n{sysconfig.get_path('purelib')}\n")
    return scripts / "python"


@pytest.mark.parametrize("backend", DEVICE_BACKENDS)
def test_devices_of_a_deleted_backend_are_refused(tmp_path: Path, backend: str) -> None:
    python, device = copy_without(backend, tmp_path), {"triton": "cuda:0", "vulkan": "vulkan:0"}[backend]
    program = (
        "import hotset\n"
        "from hotset.placement.detect import wanted_devices\n"
        f"assert hotset.__file__.startswith({str(tmp_path)!r})\n"
        "assert wanted_devices(hotset.LoadSettings())[0] == ()\n"
        f"try: wanted_devices(hotset.LoadSettings(device={device!r}))\n"
        "except hotset.HotsetError as error: print(error)\n"
    )
    done = subprocess.run([python, "-c", program], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"not {device!r}" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("backend", DEVICE_BACKENDS)
def test_the_rest_works_without_a_backend(tmp_path: Path, backend: str) -> None:
    """Run the tests of TESTED in a copy; the whole suite would take a quarter of an hour for each backend."""
    python = copy_without(backend, tmp_path)
    tests = [str(tmp_path / "tests" / name) for name in TESTED]
    given = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2")
    done = subprocess.run([python, *given, *tests], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "[100%]" in done.stdout
    assert f"needs the backend {backend}" in done.stdout
