"""Blocks: what outlives a process of the cache of one model, and how it is found and checked.

A block is a page of keys and values, or the recurrent states behind one. Its key is a hash of everything that
its contents depend on: the model and how it is computed (Identity), the adapters of the sequence, all tokens
up to the end of the page, and which of them are thresholded. So it is found again by content alone, whoever
wrote it, and a block of another model, of another type of keys and values or of another version of hotset is
none.

Stored, a block is a record:

    byte    0  "hotsetKV"
            8  identity, 16 bytes
           24  key, 32 bytes
           56  kind: 0 of a session's beginning, 1 of a page, 2 of states
           64  bytes of contents, uint64, little-endian
           72  BLAKE2b of all of the record but this, 32 bytes
          104  contents
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from hotset.backends.base import NO_ADAPTERS, PAGE_SIZE, AdapterScales, CacheMemory
from hotset.engine.kv_cache import NONE_THRESHOLDED, PagePool, n_unthresholded_in_page, root_of
from hotset.errors import FormatError

VERSION = 2  # of the record and of keys; part of each identity
_MAGIC = b"hotsetKV"
_HEAD = struct.Struct("<8s16s32sB7xQ32s")
_STATES_ALONE = 16  # pages between two stored states, where a page has no keys and values


class Kind(IntEnum):
    """Of a record. Its name is the ending of a block's file."""

    session = 0
    kv = 1
    state = 2


@dataclass(frozen=True)
class Identity:
    """What contents of a cache depend on beside tokens.

    digest: 16 bytes. model: a name for people. kv_type: likewise. flops_per_byte: what it takes to compute a
    block again, by its size: which models' blocks are worth more.
    """

    digest: bytes
    model: str
    kv_type: str
    flops_per_byte: float


class Prefix(NamedTuple):
    """Tokens whose pages are sought. first_thresholded_token, adapter_scales: as of a sequence. n_prompt:
    of the tokens."""

    tokens: Sequence[int]
    first_thresholded_token: int = NONE_THRESHOLDED
    n_prompt: int = 0
    adapter_scales: AdapterScales = NO_ADAPTERS

    @property
    def n_pages(self) -> int:
        """Full ones."""
        return len(self.tokens) // PAGE_SIZE

    def cut(self, n_pages: int) -> Prefix:
        """The first pages of it."""
        return self._replace(tokens=self.tokens[: n_pages * PAGE_SIZE])

    def page(self, index: int) -> tuple[Sequence[int], int]:
        """Tokens of a page, and how many of them come before the first thresholded one."""
        tokens = self.tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
        return tokens, n_unthresholded_in_page(self.first_thresholded_token, index)


class Blocks(NamedTuple):
    """Contents of the pages of a prefix, from the page `first` on, and the states behind the last of them,
    where the model has any."""

    first: int = 0
    pages: tuple[bytes, ...] = ()
    state: bytes | None = None


NOTHING = Blocks()


@dataclass(eq=False)
class BlockReading:
    """Blocks that are read from the disk. n_pages: how many there may be. found: once it is done. done: None:
    there was nothing to read."""

    n_pages: int = 0
    found: Blocks = NOTHING
    done: threading.Event | None = None

    @property
    def is_done(self) -> bool:
        return self.done is None or self.done.is_set()

    def wait(self, seconds: float) -> None:
        """Until it is done, or so long."""
        if self.done is not None:
            self.done.wait(seconds)


def keys_of(identity: Identity, prefix: Prefix) -> list[bytes]:
    """The keys of the full pages of a prefix, 32 bytes each."""
    keys, key = [], identity.digest
    if prefix.adapter_scales:
        key = hashlib.blake2b(key + repr(prefix.adapter_scales).encode(), digest_size=32).digest()
    for i in range(prefix.n_pages):
        tokens, n_unthresholded = prefix.page(i)
        data = np.asarray(tokens, dtype="<i4").tobytes()
        key = hashlib.blake2b(key + bytes([n_unthresholded]) + data, digest_size=32).digest()
        keys.append(key)
    return keys


# ---- records ----


def _checksum(head: bytes, contents: bytes) -> bytes:
    digest = hashlib.blake2b(head[:-_CHECKSUM_BYTES], digest_size=_CHECKSUM_BYTES)
    digest.update(contents)
    return digest.digest()


_CHECKSUM_BYTES = 32
HEAD_BYTES = _HEAD.size


def encoded(identity: bytes, kind: Kind, key: bytes, contents: bytes) -> bytes:
    """A record."""
    head = _HEAD.pack(_MAGIC, identity, key, kind, len(contents), bytes(_CHECKSUM_BYTES))
    return head[:-_CHECKSUM_BYTES] + _checksum(head, contents) + contents


class Record(NamedTuple):
    """A record whose checksum is right."""

    identity: bytes
    kind: int
    key: bytes
    contents: bytes


def is_of_blocks(file: BinaryIO) -> bool:
    """Whether a file begins as one of records does, or is empty."""
    return file.read(len(_MAGIC)) in (b"", _MAGIC)


def identity_at_start(file: BinaryIO) -> bytes | None:
    """What the first record says whose it is, before anything is checked; the file is at its start again."""
    head = file.read(HEAD_BYTES)
    file.seek(0)
    return _HEAD.unpack(head)[1] if len(head) == HEAD_BYTES and head.startswith(_MAGIC) else None


def read_record(file: BinaryIO, name: Path, most: int) -> Record:
    """The next record of a file. most: bytes of contents at most. Raises FormatError for what is none, and
    for one that is damaged or cut short; EOFError at the end."""
    head = file.read(HEAD_BYTES)
    if not head:
        raise EOFError
    if len(head) < HEAD_BYTES:
        raise FormatError(f"{name} is cut short.")
    magic, identity, key, kind, n_bytes, checksum = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise FormatError(f"{name} is not a file of cache blocks.")
    contents = file.read(n_bytes) if n_bytes <= most else b""
    if len(contents) != n_bytes or _checksum(head, contents) != checksum:
        raise FormatError(f"{name} is damaged.")
    return Record(identity, kind, key, contents)


# ---- copies of what is in memory ----


@dataclass
class Copied:
    """A block of a prefix that is in memory. index: of its page."""

    index: int
    kind: Kind
    key: bytes
    _pool: PagePool
    _memory: CacheMemory
    _place: tuple[int, int]

    def contents(self) -> bytes | None:
        """A copy, from any thread; None where the memory was used for something else meanwhile."""
        at, since = self._place
        if self.kind is Kind.kv:
            data = self._memory.read_page(at)
            return data if self._pool.holds(at, since) else None
        assert self._pool.states is not None
        data = self._memory.read_state(at)
        return data if self._pool.states.holds(at, since) else None


def in_memory(pool: PagePool, memory: CacheMemory, prefix: Prefix, keys: Sequence[bytes]) -> Iterator[Copied]:
    """The blocks of a prefix that the cache holds, from the first page on without a gap; behind a page its
    state, where that is one to store. From any thread."""
    pages: list[tuple[int, int]] = []
    serial = root_of(prefix.adapter_scales)
    for i in range(len(keys)):
        found = pool.find(serial, *prefix.page(i))
        if found is None:
            break
        serial = found[1]
        pages.append(found)
    states: dict[int, tuple[int, int]] = {}
    if pool.states is not None:
        kept = {i: pool.states.find(serial) for i, (_, serial) in enumerate(pages)}
        states = {i: found for i, found in kept.items() if found is not None}
        del pages[max(states, default=-1) + 1 :]  # from which no sequence could go on
    stored = _states_to_store(list(states), prefix.n_prompt // PAGE_SIZE - 1, memory)
    for i, found in enumerate(pages):
        yield Copied(i, Kind.kv, keys[i], pool, memory, found)
        if i in stored:
            yield Copied(i, Kind.state, keys[i], pool, memory, states[i])


def _states_to_store(kept: Sequence[int], end_of_prompt: int, memory: CacheMemory) -> set[int]:
    """Of the pages behind which a state was kept, those whose states are worth their room: the last one, the
    last one of the prompt, from which another question goes on, and so many that states take as much room as
    the keys and values between them."""
    if not kept:
        return set()
    apart = -(-memory.state_nbytes // memory.page_nbytes) if memory.page_nbytes else _STATES_ALONE
    chosen = {kept[-1], *[i for i in kept if i <= end_of_prompt][-1:]}
    latest = -1
    for i in kept:
        if i - latest >= apart:
            chosen.add(i)
            latest = i
    return chosen
