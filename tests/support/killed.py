"""Kills a process in the middle of writing a file, as a user or a power failure would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from waiting import WATCHDOG

needs_unnamed_files = pytest.mark.skipif(
    not hasattr(os, "O_TMPFILE"), reason="files without a name are Linux's"
)

# The system kills the process at the write that passes the limit: always at the same place, for any speed of
# the process and of the test.
_LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""


def kill_while_it_writes(code: str, *arguments: object) -> None:
    """Run Python code with arguments, and kill it when a file that it writes passes one MiB."""
    command = [sys.executable, "-c", _LIMITED + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    assert done.returncode == -signal.SIGXFSZ, done.stderr
