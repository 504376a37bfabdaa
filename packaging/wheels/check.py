"""Check the wheels in dist/: names, size, and the system libraries that their native modules need.

    python packaging/wheels/check.py

A module may load only the libraries of its system that are listed here. It has no run path, and exports only
its init function and the names in ALSO_EXPORTED. In a stable-ABI wheel it imports only names of that ABI
(abi3audit). auditwheel checks that a Linux wheel needs no newer glibc or musl than its tag says. delvewheel
checks that a Windows wheel needs no other DLLs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import lief

from build import ROOT

LARGEST = 4_000_000  # bytes of a wheel
LIBRARIES = {
    "manylinux": r"lib(m|c|pthread|dl|rt)\.so\.\d|ld-linux-(x86-64|aarch64)\.so\.\d",
    "musllinux": r"libc\.(musl-.*\.)?so(\.1)?",
    "win": r"(?i)(kernel32|ntdll|advapi32|psapi)\.dll|api-ms-win-crt-[a-z]+-l1-1-0\.dll|python3(11)?\.dll",
    "macosx": r"/usr/lib/lib(System\.B|c\+\+\.1)\.dylib",
}

NANOBIND = r"_ZT[ISV]N8nanobind4abi1(12python_error|17builtin_exception)E"
ALSO_EXPORTED = {
    "win": NANOBIND,
    "macosx": rf"{NANOBIND}|_Z(n[aw]|d[al])\w+|_mh_dylib_header|__dso_handle",
}
"""Tables and types of two nanobind exceptions, which nanobind exports for modules that share them. On macOS
zig's linker cannot limit exports: its own marks, and zig's `operator new` and `delete`, are exported as well.
A process uses the first pair that it finds; both call malloc and free, as the system's do."""


def main() -> None:
    # `make wheel` makes a wheel for this system, with the tag linux_….
    wheels = [one for one in sorted((ROOT / "dist").glob("*.whl")) if "-linux_" not in one.name]
    if not wheels:
        sys.exit("dist/ has no wheel: run `make wheels`")
    faults = [f"{wheel.name}: {fault}" for wheel in wheels for fault in _faults(wheel)]
    print(*(faults or [f"{len(wheels)} sound"]), sep="\n")
    sys.exit(bool(faults))


def _faults(wheel: Path) -> list[str]:
    _, abi, platform = wheel.stem.split("-")[2:]
    faults = []
    if wheel.stat().st_size >= LARGEST:
        faults.append(f"has {wheel.stat().st_size:,} bytes, but the limit is {LARGEST:,}")
    with zipfile.ZipFile(wheel) as files:
        (name,) = [
            one for one in files.namelist() if one.startswith("hotset/_core.") and not one.endswith(".pyi")
        ]
        module = lief.parse(files.read(name))
    faults += _module_faults(module, platform)
    if abi == "abi3":
        faults += _failed("abi3audit", "--strict", wheel)
    if platform.startswith("win"):
        faults += _failed("delvewheel", "show", wheel, says="copied into the wheel.\n    None\n")
    if "linux" in platform:
        faults += _libc_faults(wheel, platform)
    return faults


def _libc_faults(wheel: Path, platform: str) -> list[str]:
    # musl reserves the name `libc.so`; auditwheel would search for a file, and knows only Alpine's name.
    musl = platform.startswith("musllinux")
    done = _tool("auditwheel", "show", "--json", *(["--ldpaths", "none"] if musl else []), wheel)
    if done.returncode:
        return [f"auditwheel: {(done.stdout + done.stderr).strip()}"]
    needed = json.loads(done.stdout)["sym_tag" if musl else "overall_tag"]
    if (
        (one := _libc(needed))
        and (other := _libc(platform))
        and one[::2] == other[::2]
        and one[1] <= other[1]
    ):
        return []
    return [f"auditwheel: needs {needed}"]


def _libc(platform: str) -> tuple[str, tuple[int, ...], str] | None:
    """Return the C library that a tag names, its version, and the processor."""
    if found := re.fullmatch(r"(manylinux|musllinux)_(\d+)_(\d+)_(\w+)", platform):
        return found[1], (int(found[2]), int(found[3])), found[4]
    return None


def _module_faults(module: lief.Binary, platform: str) -> list[str]:
    (allowed,) = [pattern for system, pattern in LIBRARIES.items() if platform.startswith(system)]
    libraries, exports = _loads_and_exports(module)
    faults = [f"loads {one}" for one in libraries if not re.fullmatch(allowed, one)]
    also = next((names for system, names in ALSO_EXPORTED.items() if platform.startswith(system)), "")
    if "PyInit__core" not in exports:
        faults.append("does not export PyInit__core")
    others = sorted(one for one in exports if one != "PyInit__core" and not re.fullmatch(also, one))
    if others:
        faults.append(f"exports {', '.join(others[:5])}")
    if _has_run_path(module):
        faults.append("has a run path, but may only use the system's libraries")
    if isinstance(module, lief.MachO.Binary):
        minimum = tuple(module.build_version.minos[:2])
        if minimum > (11, 0):
            faults.append(f"needs macOS {minimum}")
    return faults


def _has_run_path(module: lief.Binary) -> bool:
    if isinstance(module, lief.MachO.Binary):
        return module.has_rpath
    tags = (lief.ELF.DynamicEntry.TAG.RPATH, lief.ELF.DynamicEntry.TAG.RUNPATH)
    return isinstance(module, lief.ELF.Binary) and any(module.has(tag) for tag in tags)


def _loads_and_exports(module: lief.Binary) -> tuple[list[str], list[str]]:
    if isinstance(module, lief.PE.Binary):
        return [one.name for one in module.imports], [one.name for one in module.get_export().entries]
    exports = [one.name for one in module.exported_symbols]
    if isinstance(module, lief.MachO.Binary):
        itself = lief.MachO.LoadCommand.TYPE.ID_DYLIB
        libraries = [one.name for one in module.libraries if one.command != itself]
        return libraries, [name.removeprefix("_") for name in exports]
    return list(module.libraries), exports


def _tool(*words: object) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name(str(words[0]))
    return subprocess.run([tool, *map(str, words[1:])], capture_output=True, text=True, check=False)


def _failed(*words: object, says: str = "") -> list[str]:
    done = _tool(*words)
    if done.returncode == 0 and says in done.stdout:
        return []
    return [f"{words[0]}: {(done.stdout + done.stderr).strip()}"]


if __name__ == "__main__":
    main()
