"""Work in shards: finished shards are kept, and Ray Data computes the missing ones on the cluster's machines.

A shard's result is a file in the folder TARGET.parts, which is complete or absent. A killed run therefore
leaves only complete shards, and a machine that dies costs its shards only. The folder records its input.
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

_MARK = "of"  # the file that identifies the input of the parts


@contextmanager
def parts_of(target: Path) -> Iterator[Path]:
    """Create and lock the folder for the parts of `target`, so that only this run writes it.

    The folder is deleted at the end. After a failure it stays if a later run could continue
    with it (`check_mark`). Raises InvalidRequestError if another run has locked it.
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
    """Raise InvalidRequestError if the parts have another input.

    what: such parts in words, "answers to other requests".
    """
    kept = parts / _MARK
    if not kept.exists():
        write_whole({kept: mark})
    elif read_small_file(kept) != mark:
        raise InvalidRequestError(f"{parts} has {what}; write to another file, or remove it")


def on_machines(
    rows: Sequence[dict[str, Any]], kind: type, args: tuple[Any, ...], n_workers: int, what: str
) -> Iterator[dict[str, Any]]:
    """Yield the results of actors of `kind` (made with args) for the rows; each gets one row at a time.

    what: the work in words, "the batch". Raises DeviceError if a row fails.
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
            f"{what} stopped ({clause(str(error).strip().rpartition(chr(10))[2])}); run it again to continue"
        ) from None
