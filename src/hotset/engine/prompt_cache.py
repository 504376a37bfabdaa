"""The prompt cache on disk: blocks of finished sequences in a directory, found again after a restart.

    DIRECTORY/<identity>/model.json       the model, for people and for eviction
    DIRECTORY/<identity>/<key>.kv         a block of keys and values (blocks.py)
    DIRECTORY/<identity>/<key>.state      the recurrent states after it

Each block is a file, written under a temporary name and renamed: a crash loses only the block being written.
The directory itself is the index, so several processes may share it. A damaged file is deleted and its block
computed again.

A file's modification time is the last use of its block; within a prefix the times follow the order of blocks.
When the directory exceeds its limit, blocks are deleted by their age divided by the cost of computing a byte
of them: the end of a prefix before its start, and blocks of a small model before equally old ones of a large
one.

No step waits for the disk. One thread copies blocks from memory (and skips those overwritten since); another
reads blocks before their sequence is admitted.
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
from hotset.engine.kv_cache import BlockPool
from hotset.errors import HotsetError, InvalidRequestError
from hotset.files import check_folder, entries, open_regular, read_small_file, write_whole
from hotset.units import human_size

MAX_QUEUED = 256  # sequences that may wait to be stored; further ones are not stored
_KEPT_SHARE = 31 / 32  # of the limit, to which eviction reduces the directory
_LOOK_SHARE = 1 / 64  # of the limit; after writing this much, the directory is scanned for other writers
_LEFT_OVER_SECONDS = 3600.0  # age at which a temporary file of a killed process is deleted
_IDLE_SHARE = 3  # pause after each stored block, in multiples of its time, that leaves the cores to steps
_MAX_ABOUT_BYTES = 1 << 16  # of model.json
_REMEDY = "choose another folder with cache_dir"
_FOLDER = re.compile(r"[0-9a-f]{32}")
_BLOCK = re.compile(r"[0-9a-f]{64}\.(kv|state)")

log = logging.getLogger("hotset.cache")


@dataclass
class DiskCounts:
    """Counters of a prompt cache on disk.

    Blocks include recurrent states. sequences_dropped: not stored because too many were waiting. bytes: size
    of the directory, all models together, as far as known.
    """

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
    rank: float  # the largest are deleted first


class PromptCache:
    """The blocks of one model in a directory, which several processes and models may share.

    folder: created if missing. limit: bytes of all blocks in it. memory: of the model. Raises
    InvalidRequestError if the limit is smaller than one block, and HotsetError if the folder cannot be
    written. Call `close` before the memory is freed.
    """

    def __init__(self, folder: Path, identity: Identity, memory: CacheMemory, limit: int) -> None:
        largest = HEAD_BYTES + max(memory.block_nbytes, memory.state_nbytes)
        if limit < largest:
            raise InvalidRequestError(
                f"a prompt cache of {human_size(limit)} cannot hold one block of this model, which takes "
                f"{human_size(largest)}; raise cache_disk"
            )
        self.folder, self.identity, self.memory, self.limit = folder, identity, memory, limit
        self.counts = DiskCounts()
        self._own = folder / identity.digest.hex()
        self._since_look = 0  # bytes written since the latest scan
        self._failed = False  # whether the latest write failed
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
            raise HotsetError(f"{self._own} cannot be created ({error.strerror}); {_REMEDY}.") from None
        write_whole({self._own / "model.json": text + "\n"}, _REMEDY, sync=False, mode=0o600)

    def _begin(self) -> None:
        """Start the threads of this process; a forked process has none of its parent's."""
        self._process = os.getpid()
        self._guard = threading.Lock()
        self._hurry = threading.Event()  # set while `flush` or `close` waits for the writer
        self._n_queued = 0
        self._closed = False
        self._writer = ThreadPoolExecutor(1, "hotset-cache-write")
        self._reader = ThreadPoolExecutor(1, "hotset-cache-read")

    # ---- reading ----

    def read(self, prefix: Prefix, first: int, last: int) -> BlockReading:
        """Start reading the blocks [first, last) of a prefix, up to the first missing one.

        For models with recurrent states, reading stops at the last stored state.
        """
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
            except RuntimeError:  # the thread cannot be started
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
            if (block := self._load(key, Kind.kv)) is None:
                break
            loaded.append(block)
        blocks = tuple(loaded)
        found = Blocks(first, blocks)
        if self.memory.state_nbytes:
            found = NOTHING
            for end in reversed(ends):
                n = end + 1 - first
                if n <= len(blocks) and (state := self._load(keys[end], Kind.state)) is not None:
                    found = Blocks(first, blocks[:n], state)
                    break
        used = [path for key in keys[: first + len(found.blocks)] for path in self._paths(key)]
        _touch(used)
        return found

    def _load(self, key: bytes, kind: Kind) -> bytes | None:
        """Return a block's contents; None if it does not exist. A damaged block is deleted."""
        path = self._path(key, kind)
        expected = self.memory.block_nbytes if kind is Kind.kv else self.memory.state_nbytes
        try:
            file = open_regular(path)
        except (OSError, HotsetError):  # deleted meanwhile, or cannot be opened now
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
        log.warning("%s is damaged: hotset deletes it and computes the block again", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    # ---- writing ----

    def write(self, prefix: Prefix, pool: BlockPool) -> None:
        """Store the cached blocks of a prefix in the background."""
        self._after_fork()
        if not prefix.n_blocks or self._closed:
            return
        with self._guard:
            if self._n_queued >= MAX_QUEUED:
                self.counts.sequences_dropped += 1
                return
            self._n_queued += 1
        try:
            self._writer.submit(self._write, prefix, pool)
        except RuntimeError:  # the thread cannot be started
            self._n_queued -= 1
            self.counts.write_errors += 1

    def _write(self, prefix: Prefix, pool: BlockPool) -> None:
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
                log.warning("the prompt cache cannot be written: %s", error)
            self._failed = True
        finally:
            with self._guard:
                self._n_queued -= 1

    def _store(self, block: Copied, path: Path, before: list[Path]) -> bool:
        """Write a block after the others of its prefix, `before`, which are not evicted for it.

        Returns False if it is no longer in memory or does not fit.
        """
        contents = block.contents()
        if contents is None:
            return False
        n_bytes = HEAD_BYTES + len(contents)
        if self.counts.bytes + n_bytes > self.limit and not self._evict(n_bytes, before):
            return False
        record = encoded(self.identity.digest, block.kind, block.key, contents)
        # Not synced: after a power failure, the checksum reveals an incomplete file.
        write_whole({path: record}, _REMEDY, sync=False, mode=0o600)
        self.counts.blocks_written += 1
        self.counts.bytes_written += n_bytes
        self.counts.bytes += n_bytes
        self._since_look += n_bytes
        return True

    def flush(self) -> None:
        """Wait until everything passed to `write` is stored."""
        self._after_fork()
        if not self._closed:
            self._hurry.set()
            self._writer.submit(self._hurry.clear).result()

    def close(self) -> None:
        """Store pending blocks and end the threads; safe to call twice."""
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
        """Scan the directory and delete blocks, except `spared`, while it exceeds the limit.

        needed: bytes about to be written. Returns whether there is room for them.
        """
        found = list(self._look())
        n_bytes = sum(each.n_bytes for each in found)
        if n_bytes + needed > self.limit:
            kept = frozenset(spared)
            for each in sorted(found, key=lambda each: each.rank, reverse=True):
                if n_bytes + needed <= self.limit * _KEPT_SHARE:
                    break
                if each.path in kept:
                    continue
                with contextlib.suppress(OSError):  # another process already deleted it
                    each.path.unlink()
                    self.counts.blocks_evicted += 1
                n_bytes -= each.n_bytes
        self.counts.bytes, self._since_look = n_bytes, 0
        return n_bytes + needed <= self.limit

    def _look(self) -> Iterator[_Stored]:
        """Yield every block in the directory, of all models."""
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
    """Return the operations per byte of a model's blocks; 1 if model.json does not say."""
    try:
        about = json.loads(read_small_file(folder / "model.json", _MAX_ABOUT_BYTES))
        worth = float(about["flops_per_byte"])
    except (HotsetError, OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return 1.0
    return max(worth, 1.0) if math.isfinite(worth) else 1.0  # NaN would break the sorting


def _touch(paths: list[Path]) -> None:
    """Mark blocks as used now; later blocks of the prefix get older times, so that they are deleted first."""
    now = time.time_ns()
    for i, path in enumerate(paths):
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now - 1000 * i))
