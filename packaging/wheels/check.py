"""Checks the wheels in dist/: names, size, and what their native modules ask of the system.

    python packaging/wheels/check.py

A module may load the libraries of its system that are listed here and no others, exports its init function
alone, and in a wheel of the stable ABI imports only names of that (abi3audit). auditwheel sees which glibc or
musl a Linux wheel needs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import lief

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 4 << 20
LIBRARIES = {
    "manylinux": r"lib(m|c|pthread|dl|rt)\.so\.\d|ld-linux-(x86-64|aarch64)\.so\.\d",
    "musllinux": r"libc\.(musl-.*\.)?so(\.1)?",
    "win": r"(?i)(kernel32|ntdll|advapi32|psapi)\.dll|api-ms-win-crt-[a-z]+-l1-1-0\.dll|python3(11)?\.dll",
    "macosx": r"/usr/lib/lib(System\.B|c\+\+\.1)\.dylib",
}


def main() -> None:
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if not wheels:
        sys.exit("dist/ has no wheel: run `make wheels`")
    faults = [f"{wheel.name}: {fault}" for wheel in wheels for fault in _faults(wheel)]
    print(*(faults or [f"{len(wheels)} wheels are sound"]), sep="\n")
    sys.exit(bool(faults))


def _faults(wheel: Path) -> list[str]:
    _, abi, platform = wheel.stem.split("-")[2:]
    faults = []
    if wheel.stat().st_size > MAX_BYTES:
        faults.append(f"has {wheel.stat().st_size} bytes, more than {MAX_BYTES}")
    with zipfile.ZipFile(wheel) as files:
        (name,) = [
            one for one in files.namelist() if one.startswith("hotset/_core.") and not one.endswith(".pyi")
        ]
        module = lief.parse(files.read(name))
    faults += _module_faults(module, platform)
    if abi == "abi3":
        faults += _failed("abi3audit", "--strict", wheel)
    if "linux" in platform:
        faults += _failed("auditwheel", "show", wheel, says=f'"{platform}"')
    return faults


def _module_faults(module: lief.Binary, platform: str) -> list[str]:
    (allowed,) = [pattern for system, pattern in LIBRARIES.items() if platform.startswith(system)]
    libraries, exports = _loads_and_exports(module)
    faults = [f"loads {one}" for one in libraries if not re.fullmatch(allowed, one)]
    if exports != ["PyInit__core"]:
        faults.append(f"exports {', '.join(exports[:5])}")
    if isinstance(module, lief.MachO.Binary):
        minimum = tuple(module.build_version.minos[:2])
        if minimum > (11, 0):
            faults.append(f"needs macOS {minimum}")
    return faults


def _loads_and_exports(module: lief.Binary) -> tuple[list[str], list[str]]:
    if isinstance(module, lief.PE.Binary):
        return [one.name for one in module.imports], [one.name for one in module.get_export().entries]
    exports = [one.name for one in module.exported_symbols]
    if isinstance(module, lief.MachO.Binary):
        return [one.name for one in module.libraries], [name.removeprefix("_") for name in exports]
    return list(module.libraries), exports


def _failed(*words: object, says: str = "") -> list[str]:
    tool = Path(sys.executable).with_name(str(words[0]))
    done = subprocess.run([tool, *map(str, words[1:])], capture_output=True, text=True, check=False)
    if done.returncode == 0 and says in done.stdout:
        return []
    return [f"{words[0]}: {(done.stdout + done.stderr).strip()}"]


if __name__ == "__main__":
    main()
