"""Files that many tests read and none changes, made by the first test that needs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """Return `path`, a file in `run_folder` (a fixture).

    If it is missing, `make(other)` makes it and it is moved. hotset may write files next to a model that it
    loads: tests that let it do so must copy the file to a folder of their own.
    """
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_name(f"unfinished-{path.name}")
            make(unfinished)
            unfinished.chmod(0o444)
            unfinished.replace(path)
    return path
