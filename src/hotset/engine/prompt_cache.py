"""The prompt cache on disk: blocks of finished sequences in a directory, found again after a restart.

    DIRECTORY/<identity>/model.json       which model it is, for people and for eviction
    DIRECTORY/<identity>/<key>.kv         a page of keys and values (blocks.py)
    DIRECTORY/<identity>/<key>.state      the recurrent states behind it

A block is a file of its own, written under another name and renamed: a crash loses the one that is being
written. There is no index: what is there is what exists, so that several processes may use one directory. A
file that is damaged is deleted, and computed again.

The time of a file is when its block was used last, those of a prefix in the order of its pages. Where the
directory is too large, blocks are deleted by their age over what it takes to compute their bytes again: the
end of a prefix before its beginning, and a small model's before a large one's of the same age.

No step waits for a disk: a thread copies pages while they are in memory (one that is used for something else
meanwhile is not stored), another reads blocks before their sequence is admitted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hotset.backends.base import CacheMemory
from hotset.engine.blocks import (
    HEAD_BYTES,
    NOTHING,
    BlockReading,
    Blocks,
    Copied,
    Identity,
    Kind,
    Prefix,
    encoded,
    in_memory,
    keys_of,
    read_record,
)
from hotset.engine.kv_cache import PagePool
from hotset.errors import HotsetError, InvalidRequestError
from hotset.files import check_folder, entries, open_regular, read_small_file, write_whole
from hotset.units import human_size

_MAX_QUEUED = 256  # sequences that wait to be stored; later ones are not
_KEPT_SHARE = 31 / 32  # of the limit, that is left when blocks were deleted
_LOOK_SHARE = 1 / 64  # of the limit, after which is looked what others have written
_LEFT_OVER_SECONDS = 3600.0  # after which a file of a process that was killed in writing is deleted
_IDLE_SHARE = 3  # of the time that a block takes to be stored, in which the cores are the steps' again
_MAX_ABOUT_BYTES = 1 << 16
_REMEDY = "choose another folder with --cache-dir"
_FOLDER = re.compile(r"[0-9a-f]{32}")
_BLOCK = re.compile(r"[0-9a-f]{64}\.(kv|state)")

log = logging.getLogger("hotset.cache")


@dataclass
class DiskCounts:
    """What a prompt cache on disk has done. blocks: pages, and states. dropped: sequences that were not
    stored, since too many waited. bytes: in the directory, of all models, as far as is known."""

    blocks_written: int = 0
    bytes_written: int = 0
    blocks_read: int = 0
    bytes_read: int = 0
    blocks_damaged: int = 0
    blocks_evicted: int = 0
    sequences_dropped: int = 0
    write_errors: int = 0
    bytes: int = 0


class _Stored(NamedTuple):
    path: Path
    n_bytes: int
    rank: float  # those with the largest are deleted first


class PromptCache:
    """The blocks of one model in a directory. Several processes, and models, may use one.

    folder: it is made where it is missing. limit: bytes of all blocks in it. memory: of the model.
    Raises InvalidRequestError for a limit that is less than a block, HotsetError where the folder cannot be
    written. Call `close` before the memory goes.
    """

    def __init__(self, folder: Path, identity: Identity, memory: CacheMemory, limit: int) -> None:
        largest = HEAD_BYTES + max(memory.page_nbytes, memory.state_nbytes)
        if limit < largest:
            raise InvalidRequestError(
                f"a prompt cache of {human_size(limit)} has no room for a block of this model, which takes "
                f"{human_size(largest)}; raise cache_disk"
            )
        self.folder, self.identity, self.memory, self.limit = folder, identity, memory, limit
        self.counts = DiskCounts()
        self._own = folder / identity.digest.hex()
        self._since_look = 0  # bytes that were written
        self._failed = False  # the latest write
        self._readings: weakref.WeakValueDictionary[tuple[bytes, int], BlockReading] = (
            weakref.WeakValueDictionary()
        )
        self._make_folder()
        self._begin()
        self._evict()

    def _make_folder(self) -> None:
        check_folder(self.folder)
        about = {"format": "hotset.prompt-cache", "version": 1, "model": self.identity.model}
        about |= {"kv_type": self.identity.kv_type}
        text = json.dumps(about | {"flops_per_byte": self.identity.flops_per_byte})
        try:
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise HotsetError(f"{self._own} cannot be made ({error.strerror}); {_REMEDY}.") from None
        write_whole({self._own / "model.json": text + "\n"}, _REMEDY, sync=False, mode=0o600)

    def _begin(self) -> None:
        """Threads, of this process: a forked one has none of its parent's."""
        self._process = os.getpid()
        self._guard = threading.Lock()
        self._hurry = threading.Event()  # set while `flush` or `close` waits for the writer
        self._n_queued = 0
        self._closed = False
        self._writer = ThreadPoolExecutor(1, "hotset-cache-write")
        self._reader = ThreadPoolExecutor(1, "hotset-cache-read")

    # ---- reading ----

    def read(self, prefix: Prefix, first: int, last: int) -> BlockReading:
        """Begins to read the blocks of the pages from `first` to before `last` of a prefix, as many as there
        are without a gap; those of a model with states up to where one was stored."""
        self._after_fork()
        if first >= last or self._closed:
            return BlockReading()
        keys = keys_of(self.identity, prefix.cut(last))
        if not os.path.exists(self._path(keys[first], Kind.kv)):
            return BlockReading()
        asked = keys[-1], first
        reading = self._readings.get(asked)
        if reading is None:
            reading = BlockReading(last - first, done=threading.Event())
            try:
                self._reader.submit(self._read, reading, keys, first)
            except RuntimeError:  # no thread can be started
                return BlockReading()
            self._readings[asked] = reading
        return reading

    def _read(self, reading: BlockReading, keys: list[bytes], first: int) -> None:
        try:
            reading.found = self._found(keys, first)
        finally:
            assert reading.done is not None
            reading.done.set()

    def _found(self, keys: list[bytes], first: int) -> Blocks:
        ends: list[int] = []
        if self.memory.state_nbytes:
            ends = [i for i in range(first, len(keys)) if os.path.exists(self._path(keys[i], Kind.state))]
            if not ends:
                return NOTHING
            keys = keys[: ends[-1] + 1]
        loaded: list[bytes] = []
        for key in keys[first:]:
            if (page := self._load(key, Kind.kv)) is None:
                break
            loaded.append(page)
        pages = tuple(loaded)
        found = Blocks(first, pages)
        if self.memory.state_nbytes:
            found = NOTHING
            for end in reversed(ends):
                n = end + 1 - first
                if n <= len(pages) and (state := self._load(keys[end], Kind.state)) is not None:
                    found = Blocks(first, pages[:n], state)
                    break
        used = [path for key in keys[: first + len(found.pages)] for path in self._paths(key)]
        _touch(used)
        return found

    def _load(self, key: bytes, kind: Kind) -> bytes | None:
        """A block's contents; None where there is none, or a damaged one, which is deleted."""
        path = self._path(key, kind)
        expected = self.memory.page_nbytes if kind is Kind.kv else self.memory.state_nbytes
        try:
            file = open_regular(path)
        except (OSError, HotsetError):  # it is gone, or cannot be opened now, whatever is in it
            return None
        with file:
            try:
                record = read_record(file, path, expected)
            except (HotsetError, OSError, EOFError):
                record = None
        found = record is not None and record[:3] == (self.identity.digest, kind, key)
        if record is not None and found and len(record.contents) == expected:
            self.counts.blocks_read += 1
            self.counts.bytes_read += HEAD_BYTES + expected
            return record.contents
        self.counts.blocks_damaged += 1
        log.warning("%s is damaged: it is deleted, and computed again", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    # ---- writing ----

    def write(self, prefix: Prefix, pool: PagePool) -> None:
        """Stores the blocks of a prefix that the cache holds, a moment later, and does not wait."""
        self._after_fork()
        if not prefix.n_pages or self._closed:
            return
        with self._guard:
            if self._n_queued >= _MAX_QUEUED:
                self.counts.sequences_dropped += 1
                return
            self._n_queued += 1
        try:
            self._writer.submit(self._write, prefix, pool)
        except RuntimeError:  # no thread can be started
            self._n_queued -= 1
            self.counts.write_errors += 1

    def _write(self, prefix: Prefix, pool: PagePool) -> None:
        try:
            keys = keys_of(self.identity, prefix)
            stored: list[Path] = []
            for block in in_memory(pool, self.memory, prefix, keys):
                path = self._path(block.key, block.kind)
                if not os.path.exists(path):
                    begun = time.perf_counter()
                    if not self._store(block, path, stored):
                        break
                    self._hurry.wait(_IDLE_SHARE * (time.perf_counter() - begun))
                stored.append(path)
            _touch(stored)
            self._failed = False
            if self._since_look >= self.limit * _LOOK_SHARE or self.counts.bytes > self.limit:
                self._evict()
        except (HotsetError, OSError) as error:
            self.counts.write_errors += 1
            if not self._failed:
                log.warning("the prompt cache is not written: %s", error)
            self._failed = True
        finally:
            with self._guard:
                self._n_queued -= 1

    def _store(self, block: Copied, path: Path, before: list[Path]) -> bool:
        """Writes a block behind those of its prefix; False where it is in memory no longer, or where there is
        no room but that of these."""
        contents = block.contents()
        if contents is None:
            return False
        n_bytes = HEAD_BYTES + len(contents)
        if self.counts.bytes + n_bytes > self.limit and not self._evict(n_bytes, before):
            return False
        record = encoded(self.identity.digest, block.kind, block.key, contents)
        # (It is not synced: what a power cut leaves of it has another checksum.)
        write_whole({path: record}, _REMEDY, sync=False, mode=0o600)
        self.counts.blocks_written += 1
        self.counts.bytes_written += n_bytes
        self.counts.bytes += n_bytes
        self._since_look += n_bytes
        return True

    def flush(self) -> None:
        """Waits until what was given to `write` is stored."""
        self._after_fork()
        if not self._closed:
            self._hurry.set()
            self._writer.submit(self._hurry.clear).result()

    def close(self) -> None:
        """Stores what waits, and ends the threads; safe to call twice."""
        self._after_fork()
        self._closed = True
        self._hurry.set()
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    # ---- the directory ----

    def _path(self, key: bytes, kind: Kind) -> Path:
        return self._own / f"{key.hex()}.{kind.name}"

    def _paths(self, key: bytes) -> Iterator[Path]:
        yield self._path(key, Kind.kv)
        if self.memory.state_nbytes:
            yield self._path(key, Kind.state)

    def _evict(self, needed: int = 0, spared: Collection[Path] = ()) -> bool:
        """Looks what is in the directory, and deletes blocks where that is too much, but for some. needed:
        bytes that are about to be written. Returns whether there is room for them."""
        found = list(self._look())
        n_bytes = sum(each.n_bytes for each in found)
        if n_bytes + needed > self.limit:
            kept = frozenset(spared)
            for each in sorted(found, key=lambda each: each.rank, reverse=True):
                if n_bytes + needed <= self.limit * _KEPT_SHARE:
                    break
                if each.path in kept:
                    continue
                with contextlib.suppress(OSError):  # another process was quicker
                    each.path.unlink()
                    self.counts.blocks_evicted += 1
                n_bytes -= each.n_bytes
        self.counts.bytes, self._since_look = n_bytes, 0
        return n_bytes + needed <= self.limit

    def _look(self) -> Iterator[_Stored]:
        """Every block in the directory, of all models."""
        now = time.time()
        for folder in entries(self.folder):
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            worth = _worth(Path(folder.path))
            for entry in entries(Path(folder.path)):
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                age = max(now - status.st_mtime, 0.0)
                if _BLOCK.fullmatch(entry.name):
                    yield _Stored(Path(entry.path), status.st_size, age / worth)
                elif entry.name.endswith(".tmp") and age > _LEFT_OVER_SECONDS:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)

    def _after_fork(self) -> None:
        if self._process != os.getpid():
            self._begin()


def _worth(folder: Path) -> float:
    """Flops for a byte of a model's blocks; next to nothing where its file does not say."""
    try:
        about = json.loads(read_small_file(folder / "model.json", _MAX_ABOUT_BYTES))
        worth = float(about["flops_per_byte"])
    except (HotsetError, OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return 1.0
    return max(worth, 1.0) if math.isfinite(worth) else 1.0  # NaN has no order among ranks


def _touch(paths: list[Path]) -> None:
    """Notes that blocks are used now: of a prefix the first ones last, so that the end is deleted first."""
    now = time.time_ns()
    for i, path in enumerate(paths):
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now - 1000 * i))
