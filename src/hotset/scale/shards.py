"""Work in shards: what is done is kept, and what is missing is done on the machines of a cluster by Ray Data.

A shard's result is a file of the folder TARGET.parts, which is there whole or not at all: what a killed run
leaves is whole shards, and a machine that dies costs its shards again. The folder says what it is of.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hotset.errors import DeviceError, InvalidRequestError
from hotset.escaping import clause
from hotset.files import read_small_file, write_whole
from hotset.scale.cluster import library

_MARK = "of"  # the file that says of what the parts are


@contextmanager
def parts_of(target: Path) -> Iterator[Path]:
    """The folder for what becomes `target`, and this run the only one that writes it.

    The folder goes with the end; after a failure it stays, if there is anything that a later run could go on
    with (`check_mark`). Raises InvalidRequestError where another run has it.
    """
    parts = target.with_name(f"{target.name}.parts")
    parts.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(parts / "lock", timeout=0):
            try:
                yield parts
            except BaseException:
                if not (parts / _MARK).exists():
                    shutil.rmtree(parts, ignore_errors=True)
                raise
    except Timeout:
        raise InvalidRequestError(f"another process is writing {parts}; wait until it has ended") from None
    shutil.rmtree(parts)


def check_mark(parts: Path, mark: bytes, what: str) -> None:
    """Raises InvalidRequestError where the parts are of something else. what: has parts, "answers to other
    requests"."""
    kept = parts / _MARK
    if not kept.exists():
        write_whole({kept: mark})
    elif read_small_file(kept) != mark:
        raise InvalidRequestError(f"{parts} has {what}; write to another file, or take it away")


def on_machines(
    rows: Sequence[dict[str, Any]], kind: type, args: tuple[Any, ...], n_workers: int, what: str
) -> Iterator[dict[str, Any]]:
    """What actors of `kind` (made with args) make of the rows, as it comes; each gets one row at a time.

    what: stops where a row cannot be done, "the batch". Raises DeviceError then.
    """
    library()
    import ray.data
    from ray.exceptions import RayError

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = 0
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    data = ray.data.from_items(list(rows), override_num_blocks=len(rows)).map_batches(
        kind,
        fn_constructor_args=args,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=max(1, min(n_workers, len(rows)))),
        num_cpus=1,
        scheduling_strategy="SPREAD",
    )
    try:
        yield from data.iter_rows()
    except RayError as error:
        raise DeviceError(
            f"{what} stopped ({clause(str(error).strip().rpartition(chr(10))[2])}); run it again to go on"
        ) from None
