"""Kills a process in the middle of writing a file, as a user or a power cut would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

needs_unnamed_files = pytest.mark.skipif(
    not hasattr(os, "O_TMPFILE"), reason="files without a name are Linux's"
)
_BEGUN = 1 << 20  # bytes


def kill_while_it_writes(code: str, *arguments: object, folder: Path) -> None:
    """Runs Python code with arguments, and kills it once a file of it in `folder` holds a MiB."""
    args = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(args) as process:
        began = time.monotonic()
        while not _writes_in(process.pid, folder):
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() - began < 60
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)


def _writes_in(pid: int, folder: Path) -> bool:
    """Whether the process has a file in the folder open for writing that holds something."""
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if os.readlink(link).startswith(str(folder)) and link.stat().st_size > _BEGUN:
                return True
        except OSError:  # closed meanwhile
            continue
    return False
