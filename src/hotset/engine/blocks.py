"""Cache blocks on disk: how a block of one model's KV cache is named, stored and checked.

A stored block contains the keys and values of 64 tokens, or the recurrent states after
them. Its key is a hash of everything that the contents depend on: the model and how it is computed
(Identity), the adapters of the sequence, all tokens up to the end of the block, and which of them are
thresholded. So any process finds a block by its contents, and never one of another model, KV type or version
of hotset.

On disk, a block is a record:

    byte    0  "hotsetKV"
            8  identity, 16 bytes
           24  key, 32 bytes
           56  kind: 0 start of a session, 1 keys and values, 2 recurrent states
           64  bytes of contents, uint64, little-endian
           72  BLAKE2b of the rest of the record, 32 bytes
          104  contents
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from hotset.backends.base import BLOCK_SIZE, NO_ADAPTERS, AdapterScales, CacheMemory
from hotset.engine.kv_cache import NONE_THRESHOLDED, BlockPool, n_unthresholded_in_block, root_of
from hotset.errors import FormatError

VERSION = 3  # of the record and of keys; part of each identity
_MAGIC = b"hotsetKV"
_HEAD = struct.Struct("<8s16s32sB7xQ32s")
_STATES_ALONE = 16  # blocks between two stored states, in models without keys and values


class Kind(IntEnum):
    """The kind of a record. Its name is the suffix of a block's file."""

    session = 0
    kv = 1
    state = 2


@dataclass(frozen=True)
class Identity:
    """Everything that the contents of a cache depend on, other than tokens.

    digest: 16 bytes. model, kv_type: names for people. flops_per_byte: operations that recompute a block,
    divided by its size; models with larger values keep more blocks.
    """

    digest: bytes
    model: str
    kv_type: str
    flops_per_byte: float


class Prefix(NamedTuple):
    """Tokens whose blocks are sought.

    first_thresholded_token, adapter_scales: as in a sequence. n_prompt: how many of the tokens are the
    prompt. images: the digests of images, each after its token id (engine/images.py).
    """

    tokens: Sequence[int]
    first_thresholded_token: int = NONE_THRESHOLDED
    n_prompt: int = 0
    adapter_scales: AdapterScales = NO_ADAPTERS
    images: tuple[tuple[int, bytes], ...] = ()

    @property
    def n_blocks(self) -> int:
        """Return the number of full blocks."""
        return len(self.tokens) // BLOCK_SIZE

    def cut(self, n_blocks: int) -> Prefix:
        """Return the first `n_blocks` blocks of this prefix."""
        return self._replace(tokens=self.tokens[: n_blocks * BLOCK_SIZE])

    def block(self, index: int) -> tuple[Sequence[int], int]:
        """Return the tokens of a block, and how many of them precede the first thresholded token."""
        tokens = self.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        return tokens, n_unthresholded_in_block(self.first_thresholded_token, index)


class Blocks(NamedTuple):
    """The contents of a prefix's blocks from index `first` on, and the recurrent states after the last."""

    first: int = 0
    blocks: tuple[bytes, ...] = ()
    state: bytes | None = None


NOTHING = Blocks()


@dataclass(eq=False)
class BlockReading:
    """Blocks that are being read from disk.

    n_blocks: the most blocks it can find. found: valid once it is done. done: None if there is nothing to
    read.
    """

    n_blocks: int = 0
    found: Blocks = NOTHING
    done: threading.Event | None = None

    @property
    def is_done(self) -> bool:
        return self.done is None or self.done.is_set()

    def wait(self, seconds: float) -> None:
        """Wait until it is done, at most `seconds`."""
        if self.done is not None:
            self.done.wait(seconds)


def keys_of(identity: Identity, prefix: Prefix) -> list[bytes]:
    """Return the keys of a prefix's full blocks, 32 bytes each."""
    keys, key = [], identity.digest
    images = dict(prefix.images)
    if prefix.adapter_scales:
        key = hashlib.blake2b(key + repr(prefix.adapter_scales).encode(), digest_size=32).digest()
    for i in range(prefix.n_blocks):
        tokens, n_unthresholded = prefix.block(i)
        data = np.asarray(tokens, dtype="<i4").tobytes() if not images else _with_digests(tokens, images)
        key = hashlib.blake2b(key + bytes([n_unthresholded]) + data, digest_size=32).digest()
        keys.append(key)
    return keys


def _with_digests(tokens: Sequence[int], images: Mapping[int, bytes]) -> bytes:
    """Return the bytes of a block's tokens, with -1 for its first image, -2 for the second, and digests."""
    ids = dict.fromkeys(token for token in tokens if token < 0)
    number = {id: -1 - i for i, id in enumerate(ids)}
    data = np.asarray([number.get(token, token) for token in tokens], dtype="<i4").tobytes()
    return data + b"".join(images[id] for id in ids)


# ---- records ----


def _checksum(head: bytes, contents: bytes) -> bytes:
    digest = hashlib.blake2b(head[:-_CHECKSUM_BYTES], digest_size=_CHECKSUM_BYTES)
    digest.update(contents)
    return digest.digest()


_CHECKSUM_BYTES = 32
HEAD_BYTES = _HEAD.size


def encoded(identity: bytes, kind: Kind, key: bytes, contents: bytes) -> bytes:
    """Return a record."""
    head = _HEAD.pack(_MAGIC, identity, key, kind, len(contents), bytes(_CHECKSUM_BYTES))
    return head[:-_CHECKSUM_BYTES] + _checksum(head, contents) + contents


class Record(NamedTuple):
    """A record whose checksum is correct."""

    identity: bytes
    kind: int
    key: bytes
    contents: bytes


def is_of_blocks(file: BinaryIO) -> bool:
    """Return whether a file begins with a record or is empty."""
    return file.read(len(_MAGIC)) in (b"", _MAGIC)


def identity_at_start(file: BinaryIO) -> bytes | None:
    """Return the identity in a file's first record, unchecked, and seek back to the start."""
    head = file.read(HEAD_BYTES)
    file.seek(0)
    return _HEAD.unpack(head)[1] if len(head) == HEAD_BYTES and head.startswith(_MAGIC) else None


def read_record(file: BinaryIO, name: Path, most: int) -> Record:
    """Return the next record of a file. most: the largest allowed contents, in bytes.

    Raises EOFError at the end of the file, and FormatError if the record is invalid, damaged or truncated.
    """
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


# ---- copies from memory ----


@dataclass
class Copied:
    """A block of a prefix in memory. index: its position in the prefix."""

    index: int
    kind: Kind
    key: bytes
    _pool: BlockPool
    _memory: CacheMemory
    _place: tuple[int, int]

    def contents(self) -> bytes | None:
        """Return a copy, from any thread; None if the memory has been reused since."""
        at, since = self._place
        if self.kind is Kind.kv:
            data = self._memory.read_block(at)
            return data if self._pool.holds(at, since) else None
        assert self._pool.states is not None
        data = self._memory.read_state(at)
        return data if self._pool.states.holds(at, since) else None


def in_memory(pool: BlockPool, memory: CacheMemory, prefix: Prefix, keys: list[bytes]) -> Iterator[Copied]:
    """Yield the blocks of a prefix that the cache holds, up to the first gap. May run in any thread.

    A block's recurrent state, if it is worth storing, follows the block.
    """
    blocks: list[tuple[int, int]] = []
    serial = root_of(prefix.adapter_scales)
    for i in range(len(keys)):
        found = pool.find(serial, *prefix.block(i))
        if found is None:
            break
        serial = found[1]
        blocks.append(found)
    states: dict[int, tuple[int, int]] = {}
    if pool.states is not None:
        kept = {i: pool.states.find(serial) for i, (_, serial) in enumerate(blocks)}
        states = {i: found for i, found in kept.items() if found is not None}
        del blocks[max(states, default=-1) + 1 :]  # without a state, no sequence can continue from these
    stored = states_to_store(list(states), prefix.n_prompt // BLOCK_SIZE - 1, memory)
    for i, found in enumerate(blocks):
        yield Copied(i, Kind.kv, keys[i], pool, memory, found)
        if i in stored:
            yield Copied(i, Kind.state, keys[i], pool, memory, states[i])


def states_to_store(kept: Sequence[int], end_of_prompt: int, memory: CacheMemory) -> set[int]:
    """Return the blocks in `kept`, which have a saved state, whose states are worth storing.

    These are the last block, the last block of the prompt (another question continues there), and as many
    others as keep the states no larger than the keys and values between them.
    """
    if not kept:
        return set()
    apart = -(-memory.state_nbytes // memory.block_nbytes) if memory.block_nbytes else _STATES_ALONE
    chosen = {kept[-1], *[i for i in kept if i <= end_of_prompt][-1:]}
    latest = -1
    for i in kept:
        if i - latest >= apart:
            chosen.add(i)
            latest = i
    return chosen
