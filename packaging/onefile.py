"""Makes one file for Linux that needs no Python: it unpacks itself once, and then starts hotset.

    python packaging/onefile.py --python PREFIX dist/hotset-*.whl -o dist/hotset-linux-x86_64

PREFIX is a CPython that can be moved, of the wheel's version and with pip (python-build-standalone has such).
Why it is no frozen program: docs/decisions/032-one-file.md.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

LEFT_OUT = (
    "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "__pycache__", "*.pyc",
    "*.a", "config-*", "pip", "pip-*", "setuptools*", "_distutils_hack", "pkg_resources",
)  # fmt: skip
STUB = """#!/bin/sh
# hotset, with a Python of its own. It unpacks itself once, into the folder below; delete that to remove it.
home="${XDG_CACHE_HOME:-$HOME/.cache}/hotset-@NAME@"
if [ ! -d "$home" ]; then
  echo "Unpacking hotset into $home, once." >&2
  mkdir -p "$home.$$" && tail -n +@LINE@ "$0" | tar -xz -C "$home.$$" || { rm -rf "$home.$$"; exit 1; }
  mv -T "$home.$$" "$home" 2>/dev/null || rm -rf "$home.$$"
fi
exec "$home/bin/python3" -I -m hotset.cli.main "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", type=Path, required=True, metavar="PREFIX")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(options.output, packed(installed(options.python, options.wheel.resolve(), Path(folder))))
    print(f"{options.output}: {options.output.stat().st_size:,} bytes")


def installed(prefix: Path, wheel: Path, folder: Path) -> Path:
    """A copy of the Python with hotset and its server, and nothing that neither needs."""
    [library] = [path for path in (prefix / "lib").glob("python3.*") if (path / "os.py").is_file()]
    target = folder / "lib" / library.name
    shutil.copytree(library, target, ignore=shutil.ignore_patterns(*LEFT_OUT, "site-packages"), symlinks=True)
    for shared in (prefix / "lib").glob("libpython*.so*"):
        shutil.copy2(shared, folder / "lib", follow_symlinks=False)
    (folder / "bin").mkdir()
    shutil.copy2((prefix / "bin" / "python3").resolve(), folder / "bin" / "python3")
    pip = [prefix / "bin" / "python3", "-m", "pip", "install", "-q", "--only-binary", ":all:", "--no-compile"]
    subprocess.run([*pip, "--target", target / "site-packages", f"{wheel}[serve]"], check=True)
    shutil.rmtree(target / "site-packages" / "bin", ignore_errors=True)
    for pattern in LEFT_OUT[:2]:
        for path in (target / "site-packages").rglob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    return folder


def packed(folder: Path) -> bytes:
    """The folder as an archive whose bytes depend on its files alone."""
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


if __name__ == "__main__":
    main()
