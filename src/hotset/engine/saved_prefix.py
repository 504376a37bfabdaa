"""The cache of one conversation in a file: sessions of `hotset run`, and saved slots of the server.

The file consists of records (blocks.py). The first holds the tokens and other data as JSON; the blocks of the
tokens follow in order. Reading stops at the first damaged block, and the rest is computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hotset.backends.base import BLOCK_SIZE, CacheMemory
from hotset.engine.blocks import (
    HEAD_BYTES,
    Blocks,
    Identity,
    Kind,
    Prefix,
    encoded,
    identity_at_start,
    in_memory,
    is_of_blocks,
    keys_of,
    read_record,
)
from hotset.engine.driver import EngineThread
from hotset.engine.images import IDS
from hotset.engine.kv_cache import root_of
from hotset.errors import FormatError, InvalidRequestError
from hotset.files import SMALL_FILE, open_regular, replacing

_FORMAT, _VERSION = "hotset.session", 1
_BYTES_PER_TOKEN, _FIRST_BYTES = 16, 64 << 10  # limits of the first record, without `about`
NO_PREFIX = Prefix(())


class Saved(NamedTuple):
    """The number of tokens whose blocks are in a file, and the file's size in bytes."""

    n_tokens: int
    n_bytes: int


@dataclass(frozen=True)
class SavedPrefix:
    """The contents of a file.

    about: the data stored with the tokens. found: blocks of the model that reads the file. n_bytes: bytes
    read. is_of_model: False for a file of another model, of which only `about` is read.
    """

    about: Mapping[str, Any]
    prefix: Prefix
    found: Blocks
    n_bytes: int
    is_of_model: bool = True


@dataclass(frozen=True)
class SessionFiles:
    """Files of conversations with one model. memory: of its backend."""

    thread: EngineThread
    identity: Identity
    memory: CacheMemory

    def save(
        self,
        path: Path,
        prefix: Prefix,
        about: Mapping[str, Any] | None = None,
        *,
        reserve: Callable[[int], object] = lambda _: None,
    ) -> Saved:
        """Write tokens, and their blocks up to the first one that is not cached. No step waits for it.

        about: JSON to store with them. reserve: called with the number of bytes before each write; an
        exception from it leaves the file unchanged. Raises the errors of files.replacing, and
        InvalidRequestError if the file exists and is not a file of blocks.
        """
        _check_replaced(path)
        scheduler = self.thread.engine.scheduler
        digest, keys = self.identity.digest, keys_of(self.identity, prefix)
        first = {"format": _FORMAT, "version": _VERSION, "about": about or {}, "n_prompt": prefix.n_prompt}
        first |= {"tokens": list(prefix.tokens), "first_thresholded": prefix.first_thresholded_token}
        first |= {"adapters": list(prefix.adapter_scales)} if prefix.adapter_scales else {}
        first |= {"images": [[id, digest.hex()] for id, digest in prefix.images]} if prefix.images else {}
        n_blocks = n_bytes = 0

        def write(record: bytes) -> None:
            nonlocal n_bytes
            reserve(len(record))
            n_bytes += file.write(record)

        with replacing(path, "choose another place", mode=0o600) as file:
            write(encoded(digest, Kind.session, bytes(32), json.dumps(first).encode()))
            for block in in_memory(scheduler.pool, self.memory, prefix, keys):
                if (contents := block.contents()) is None:
                    break
                write(encoded(digest, block.kind, block.key, contents))
                n_blocks = block.index + 1
        return Saved(n_blocks * BLOCK_SIZE, n_bytes)

    def read(self, path: Path, about_bytes: int = SMALL_FILE) -> SavedPrefix:
        """Read a file. about_bytes: limit of `about`; 0: not needed, so files of other models are not read.

        Raises FileNotFoundError, and FormatError if the file is not a session or its first record is damaged.
        """
        most = about_bytes + _BYTES_PER_TOKEN * self.thread.engine.n_ctx + _FIRST_BYTES
        with open_regular(path) as file:
            identity = identity_at_start(file)
            if not about_bytes and identity not in (None, self.identity.digest):
                return SavedPrefix({}, NO_PREFIX, Blocks(), HEAD_BYTES, False)
            try:
                if identity is None:
                    raise ValueError
                head = read_record(file, path, most)
                first = json.loads(head.contents) if head.kind == Kind.session else None
            except (EOFError, ValueError, RecursionError):
                first = None
            if not isinstance(first, dict) or first.get("format") != _FORMAT:
                raise FormatError(f"{path} is not a session of hotset; choose another file.")
            if first.get("version") != _VERSION or not isinstance(first.get("about"), dict):
                raise FormatError(f"{path} was written by another version of hotset; choose another file.")
            if head.identity != self.identity.digest:
                return SavedPrefix(
                    first["about"], NO_PREFIX, Blocks(), HEAD_BYTES + len(head.contents), False
                )
            prefix = self._prefix(first, path)
            found, n_bytes = self._blocks(file, path, keys_of(self.identity, prefix))
        return SavedPrefix(first["about"], prefix, found, HEAD_BYTES + len(head.contents) + n_bytes)

    def _prefix(self, first: Mapping[str, Any], path: Path) -> Prefix:
        try:
            scales = tuple((str(digest), float(scale)) for digest, scale in first.get("adapters", ()))
            digests = {int(id): bytes.fromhex(digest) for id, digest in first.get("images", ())}
            known = {id: IDS.of(digest) for id, digest in digests.items()}  # ids of another process
            tokens = self._tokens(first["tokens"], known)
            images = tuple((known[id], digest) for id, digest in digests.items())
            return Prefix(tokens, int(first["first_thresholded"]), int(first["n_prompt"]), scales, images)
        except (KeyError, TypeError, ValueError, OverflowError, InvalidRequestError):
            raise FormatError(f"{path} has tokens that this model lacks; choose another file.") from None

    def _tokens(self, given: list[Any], images: Mapping[int, int]) -> list[int]:
        """Return checked tokens. images: the ids in the file, and the ids in this process."""
        words = self.thread.engine.checked([0 if one in images else one for one in given]) if given else []
        return [images.get(one, word) for one, word in zip(given, words, strict=True)]

    def _blocks(self, file: BinaryIO, path: Path, keys: Sequence[bytes]) -> tuple[Blocks, int]:
        """Return the blocks that follow in a file, up to the first damaged one, and their bytes."""
        memory = self.memory
        most = max(memory.block_nbytes, memory.state_nbytes)
        blocks: list[bytes] = []
        n_bytes, end, state = 0, 0, None
        while True:
            try:
                record = read_record(file, path, most)
            except (EOFError, FormatError):
                break
            if record.identity != self.identity.digest:
                break
            n, given = len(blocks), (record.kind, record.key, len(record.contents))
            if given == (Kind.kv, _at(keys, n), memory.block_nbytes):
                blocks.append(record.contents)
            elif given == (Kind.state, _at(keys, n - 1), memory.state_nbytes):
                end, state = n, record.contents
            else:
                break
            n_bytes += HEAD_BYTES + len(record.contents)
        if memory.state_nbytes:
            return Blocks(0, tuple(blocks[:end]), state), n_bytes
        return Blocks(0, tuple(blocks)), n_bytes

    def restore(self, saved: SavedPrefix) -> int:
        """Write the blocks into the cache between two steps; return how many tokens are cached then."""
        with self.thread.exclusive() as engine:
            n_blocks = engine.scheduler.restore_prefix(self.memory, saved.found, saved.prefix)
        return n_blocks * BLOCK_SIZE

    def erase(self, prefix: Prefix) -> None:
        """Forget the blocks of a prefix that no sequence uses, from its end."""
        with self.thread.exclusive() as engine:
            first, root = prefix.first_thresholded_token, root_of(prefix.adapter_scales)
            engine.scheduler.pool.erase(prefix.tokens, prefix.n_blocks, first, root)


def _check_replaced(path: Path) -> None:
    try:
        with open_regular(path) as file:
            is_own = is_of_blocks(file)
    except (FileNotFoundError, FormatError):  # `replacing` reports the error
        return
    if not is_own:
        raise InvalidRequestError(f"{path} exists and is not a file of cache blocks; choose another name")


def _at(keys: Sequence[bytes], index: int) -> bytes | None:
    return keys[index] if 0 <= index < len(keys) else None
