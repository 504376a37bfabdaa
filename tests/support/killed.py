"""Kills a process in the middle of writing a file, as a user or a power cut would."""

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

# The system ends the process with a signal at the write that passes the limit: always there, however fast
# the process is and whatever the test's own process does meanwhile.
_LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""


def kill_while_it_writes(code: str, *arguments: object) -> None:
    """Runs Python code with arguments; it is killed when a file that it writes passes a MiB."""
    command = [sys.executable, "-c", _LIMITED + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    assert done.returncode == -signal.SIGXFSZ, done.stderr
