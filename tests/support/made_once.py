"""Files that many tests read and none changes, made by the first test of a run that asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, a file in `run_folder` (a fixture): if it is not there, `make(other)` makes it and it is moved.

    hotset may write beside a model that it loads: who lets it do so copies the file to a folder of his own.
    """
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_name(f"unfinished-{path.name}")
            make(unfinished)
            unfinished.chmod(0o444)
            unfinished.replace(path)
    return path
