"""Units of work whose results are kept, so that a stage can be stopped anywhere and goes on where it was.

A device may be there for ten minutes at a time. So a stage is split into units of seconds; each leaves one
JSON file, written at once and whole, and a unit whose file is there is not measured again.
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

PATIENCE = float(os.environ.get("HOTSET_BENCH_PATIENCE", "1"))  # by which every limit is multiplied
# Seconds: what lends a device may end a command after ten minutes, and keep nothing of it.
LIMIT = 530.0 * PATIENCE


class Ledger:
    """The results of one stage, in `folder`.

    seconds: no unit is begun after that long. again: measure what is there already, too. limit: seconds in
    which the stage has ended, whatever its commands do.
    """

    def __init__(self, folder: Path, seconds: float, *, again: bool = False, limit: float = LIMIT) -> None:
        self.folder, self.again = folder, again
        self._limit = time.monotonic() + limit
        self.left: list[str] = []  # units that were not begun
        self._end = time.monotonic() + seconds
        folder.mkdir(parents=True, exist_ok=True)

    def timeout(self, most: float) -> float:
        """Seconds that a command may take: at most so many, and no more than are left of the stage."""
        return max(min(most, self._limit - time.monotonic()), 1.0)

    def unit(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The result of a unit: from its file, or measured now; None where the time is up.

        One that says "failed" is handed out and not kept.
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
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1))
        os.replace(partial, path)
        return result

    def closing(self) -> str:
        """One line: whether the stage is complete."""
        if not self.left:
            return f"Complete; raw results in {self.folder}."
        return f"{len(self.left)} units left ({self.left[0]} is next): run the same command again to go on."


def run_within(command: Sequence[str], seconds: float, **options: Any) -> subprocess.CompletedProcess[Any]:
    """A command and all that it starts: what runs longer is ended, and TimeoutExpired raised.

    options: of subprocess.Popen.
    """
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            out, error = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, error)
