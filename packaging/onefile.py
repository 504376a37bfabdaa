"""Make one file for Linux or Windows that needs no Python. It unpacks itself once, then starts hotset.

    python packaging/onefile.py --python PREFIX dist/hotset-*.whl -o dist/hotset-linux-x86_64
    python packaging/onefile.py --python PREFIX dist/hotset-*-win_amd64.whl -o dist/hotset.exe

PREFIX is a relocatable CPython of the wheel's version. For Linux it has pip (python-build-standalone offers
such builds). For Windows it is the folder of `python.exe` (`make wheels` fetches one into
build/wheels/windows-abi3). A Windows file can be made on any system: ziglang from PyPI compiles the program
in front of the archive (onefile.zig). Why it is not a frozen program: decision 032.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

LEFT_OUT = (
    "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "__pycache__", "*.pyc",
    "*.a", "config-*", "pip", "pip-*", "setuptools*", "_distutils_hack", "pkg_resources",
)  # fmt: skip
LEFT_OUT_FOR_WINDOWS = ("site-packages", "Scripts", "Doc", "include", "libs", "tcl", "*.pdb", "pythonw.exe")
STUB = """#!/bin/sh
# hotset, with a Python of its own. It unpacks itself once, into the folder below; delete that to remove it.
home="${XDG_CACHE_HOME:-${HOME:?is not set}/.cache}/hotset-@NAME@"
if [ ! -d "$home" ]; then
  echo "Unpacking hotset into $home, once." >&2
  mkdir -p "${home%/*}" && part=$(mktemp -d "$home.XXXXXX") || exit 1
  trap 'rm -rf "$part"' EXIT
  trap 'exit 1' HUP INT TERM
  if ! said=$(tail -n +@LINE@ "$0" | tar -xz -C "$part" 2>&1); then # tar reports each remaining file
    echo "hotset cannot be unpacked: $(echo "$said" | tail -n 2 | head -n 1)" >&2
    exit 1
  fi
  mv -T "$part" "$home" 2>/dev/null || [ -d "$home" ] || exit 1 # another process may have been first
  rm -rf "$part"
fi
if [ ! -O "$home" ] || [ -L "$home" ]; then # in a cache folder that other users can write to
  echo "hotset: $home is not a folder of this user: delete it, or set XDG_CACHE_HOME" >&2
  exit 1
fi
exec "$home/bin/python3" -I -m hotset.cli.main "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", type=Path, required=True, metavar="PREFIX")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    prefix, wheel, output = options.python, options.wheel.resolve(), options.output.resolve()
    with tempfile.TemporaryDirectory() as folder:
        if (prefix / "python.exe").is_file():
            write_for_windows(output, installed_for_windows(prefix, wheel, Path(folder, "tree")))
        else:
            write(output, packed(installed(prefix, wheel, Path(folder))))
    print(f"{options.output}: {options.output.stat().st_size:,} bytes")


def installed(prefix: Path, wheel: Path, folder: Path) -> Path:
    """Return a copy of the Python with hotset and its server, without unneeded files."""
    [library] = [path for path in (prefix / "lib").glob("python3.*") if (path / "os.py").is_file()]
    target = folder / "lib" / library.name
    shutil.copytree(library, target, ignore=shutil.ignore_patterns(*LEFT_OUT, "site-packages"), symlinks=True)
    for shared in (prefix / "lib").glob("libpython*.so*"):
        shutil.copy2(shared, folder / "lib", follow_symlinks=False)
    (folder / "bin").mkdir()
    shutil.copy2((prefix / "bin" / "python3").resolve(), folder / "bin" / "python3")
    pip = [prefix / "bin" / "python3", "-m", "pip", "install", "-q", "--only-binary", ":all:", "--no-compile"]
    subprocess.run([*pip, "--target", target / "site-packages", f"{wheel}[serve]"], check=True)
    _leave_out(target / "site-packages")
    return folder


def installed_for_windows(prefix: Path, wheel: Path, folder: Path) -> Path:
    """Do the same for a CPython for Windows, with the pip of the running Python."""
    ignored = shutil.ignore_patterns(*LEFT_OUT, *LEFT_OUT_FOR_WINDOWS)
    shutil.copytree(prefix, folder, ignore=ignored)
    [library] = prefix.glob("python3[0-9]*.dll")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary", ":all:", "--no-compile"]
    pip += ["--platform", "win_amd64", "--python-version", library.stem.removeprefix("python")]
    packages = folder / "Lib" / "site-packages"
    # pip evaluates system markers on this system, so the Windows-only requirement is added here.
    subprocess.run([*pip, "--target", packages, f"{wheel}[serve]", "colorama"], check=True)
    _leave_out(packages)
    return folder


def _leave_out(packages: Path) -> None:
    shutil.rmtree(packages / "bin", ignore_errors=True)
    for pattern in LEFT_OUT[:2]:
        for path in packages.rglob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def packed(folder: Path) -> bytes:
    """Return the folder as an archive whose bytes depend only on its files."""
    data = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", 9, data, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for path in sorted(folder.rglob("*")):
            if path.is_file() or path.is_symlink():
                archive.add(path, path.relative_to(folder).as_posix(), filter=_plain)
    return data.getvalue()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    return info


def write(path: Path, archive: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(archive).hexdigest()[:16]
    text = STUB.replace("@NAME@", name).replace("@LINE@", str(STUB.count("\n") + 1))
    path.write_bytes(text.encode() + archive)
    path.chmod(0o755)


def write_for_windows(path: Path, folder: Path) -> None:
    """Write a program followed by an archive, whose only folder is named by a hash of its contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_suffix(".zig")
    zig = [sys.executable, "-m", "ziglang", "build-exe", source, "-target", "x86_64-windows-gnu"]
    subprocess.run([*zig, "-OReleaseSmall", "-fstrip", f"-femit-bin={path}"], check=True)
    members = {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    name = hashlib.sha256()
    for member, data in members.items():
        name.update(f"{member} {len(data)} ".encode() + data)
    with ZipFile(path, "a", ZIP_DEFLATED, compresslevel=9) as archive:
        for member, data in members.items():
            entry = ZipInfo(f"hotset-{name.hexdigest()[:16]}/{member}")
            entry.compress_type = ZIP_DEFLATED
            archive.writestr(entry, data, compresslevel=9)


if __name__ == "__main__":
    main()
