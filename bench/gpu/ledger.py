"""Units of work with stored results, so that a stage can be stopped at any time and continued.

A device may be available for only ten minutes at a time. So a stage is split into units of seconds. Each
writes one JSON file, atomically, and a unit with a file is not measured again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PATIENCE = float(os.environ.get("HOTSET_BENCH_PATIENCE", "1"))  # a factor of every limit
# Seconds: a lender of devices may end a command after ten minutes, and keep none of its results.
LIMIT = 530.0 * PATIENCE
PROGRAM_SECONDS = 150.0 * PATIENCE  # limit for one program to load and answer


class Ledger:
    """The results of one stage, in `folder`.

    seconds: no unit starts after this time. again: measure units with results again. limit: seconds after
    which the stage has ended, whatever its commands do.
    """

    def __init__(self, folder: Path, seconds: float, *, again: bool = False, limit: float = LIMIT) -> None:
        self.folder, self.again = folder, again
        self._limit = time.monotonic() + limit
        self.left: list[str] = []  # units that were not started
        self._end = time.monotonic() + seconds
        folder.mkdir(parents=True, exist_ok=True)

    def timeout(self, most: float) -> float:
        """Return the seconds for a command: at most `most`, and at most the rest of the stage."""
        return max(min(most, self._limit - time.monotonic()), 1.0)

    def unit(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Return the result of a unit, from its file or measured now; None if the time is over.

        A result with "failed" is returned but not stored.
        """
        path = self.folder / f"{key}.json"
        if path.exists() and not self.again:
            return dict(json.loads(path.read_text()))
        if time.monotonic() > self._end:
            self.left.append(key)
            return None
        result = measure()
        if result.get("failed"):
            self.left.append(key)
            return result
        store(path, result)
        return result

    def closing(self) -> str:
        """Return one line that says whether the stage is complete."""
        if not self.left:
            return f"Complete; raw results in {self.folder}."
        return f"{len(self.left)} units left ({self.left[0]} is next): run the same command again to go on."


def store(path: Path, result: dict[str, Any]) -> None:
    """Write a result, so that an interruption leaves the old or the new file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1))
    partial.replace(path)


def run_program(
    ledger: Ledger,
    argv: Sequence[str],
    *,
    most: float = PROGRAM_SECONDS,
    codes: Sequence[int] = (0,),
    **options: Any,
) -> subprocess.CompletedProcess[str] | str:
    """Run a command within `most` seconds. Return it if it ends with one of `codes`, or its last line."""
    limit = ledger.timeout(most)
    try:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        done = run_within(argv, limit, text=True, errors="replace", **pipes, **options)
    except subprocess.TimeoutExpired:
        return f"nothing after {limit:.0f} s"
    if done.returncode in codes:
        return done
    return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]


def run_within(command: Sequence[str], seconds: float, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a command; end it and all its children after `seconds`, and raise TimeoutExpired.

    options: of subprocess.Popen.
    """
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            out, error = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, error)
