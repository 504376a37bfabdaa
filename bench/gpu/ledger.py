"""Units of work whose results are kept, so that a stage can be stopped anywhere and goes on where it was.

A device may be there for ten minutes at a time. So a stage is cut into units of seconds; each leaves one JSON
file, written at once and whole, and a unit whose file is there is not measured again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Ledger:
    """The results of one stage, in `folder`.

    seconds: no unit is begun after that long. again: measure what is there already, too.
    """

    def __init__(self, folder: Path, seconds: float, *, again: bool = False) -> None:
        self.folder, self.again = folder, again
        self.left: list[str] = []  # units that were not begun
        self._end = time.monotonic() + seconds
        folder.mkdir(parents=True, exist_ok=True)

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
