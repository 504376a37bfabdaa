"""Runs a program in a fresh Python interpreter."""

from __future__ import annotations

import subprocess
import sys

from waiting import WATCHDOG


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
