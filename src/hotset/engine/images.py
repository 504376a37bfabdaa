"""Images in a sequence: rows of an encoder in place of token embeddings.

The tokens of an image have a negative id in `Sequence.tokens`, the same for all of them and a different one
for each image. So two prompts share blocks of the KV cache exactly if their tokens, images included, are
equal. On disk, a digest of the rows takes the place of the id, which is only valid in this process.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hotset.backends.base import ImageRows
from hotset.errors import InvalidRequestError

N_AXES = 3  # rotary positions of a token: time, row and column
_MOST_KNOWN = 1 << 16  # digests whose ids are remembered; an image that was forgotten gets a new id


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """Adjacent tokens of a prompt that belong to one image.

    first: index of the first one. rows: float32, as in ImageRows. positions: int32 [n, N_AXES],
    rotary positions relative to the first token's; None: they count on as in text. n_positions: the rotary
    position of the next token relative to the first one's, if `positions` is given. grouped: the tokens see
    one another, so that one step computes all of them.
    """

    first: int
    rows: np.ndarray
    positions: np.ndarray | None = None
    n_positions: int = 0
    grouped: bool = False

    @property
    def end(self) -> int:
        """Return the index of the token after the last one."""
        return self.first + len(self.rows)

    def at(self, first: int) -> ImageTokens:
        """Return the same tokens at another place, with the same digest."""
        moved = replace(self, first=first)
        moved.__dict__["digest"] = self.digest
        return moved

    @cached_property
    def digest(self) -> bytes:
        """Return 32 bytes that depend on everything that the KV cache of these tokens depends on."""
        facts = (self.rows.shape, self.n_positions, self.grouped, self.positions is None)
        found = hashlib.blake2b(repr(facts).encode(), digest_size=32)
        found.update(self.rows.tobytes())
        if self.positions is not None:
            found.update(self.positions.astype(np.int32).tobytes())
        return found.digest()


class ImagePrompt(NamedTuple):
    """A prompt with images. They replace the tokens at their places, whatever the ids there."""

    tokens: Sequence[int]
    images: Sequence[ImageTokens]


class ImageIds:
    """Negative token ids of images, by digest. Any thread may use it."""

    def __init__(self, most: int = _MOST_KNOWN) -> None:
        self._most, self._next = most, -1
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._guard = threading.Lock()

    def of(self, digest: bytes) -> int:
        """Return the id of a digest. No id is used for two digests."""
        with self._guard:
            found = self._known.pop(digest, None)
            if found is None:
                found, self._next = self._next, self._next - 1
            self._known[digest] = found
            if len(self._known) > self._most:
                self._known.popitem(last=False)
            return found


IDS = ImageIds()


class SequenceImages:
    """The images of one sequence.

    tokens: of its prompt; the ids of image tokens are written into it. runs: in rising order. max_batch: the
    most tokens of a step. Raises InvalidRequestError for runs that overlap or lie outside the prompt, and for
    an image whose tokens see one another but do not fit into one step.
    """

    def __init__(self, tokens: list[int], runs: Iterable[ImageTokens], max_batch: int) -> None:
        self.runs = tuple(runs)
        end = 0
        for run in self.runs:
            if run.first < end or run.end > len(tokens) or not len(run.rows):
                raise InvalidRequestError("the images of a prompt must lie in it, one after the other")
            if run.grouped and len(run.rows) > max_batch:
                raise InvalidRequestError(
                    f"an image has {len(run.rows)} tokens, which one step must compute, but a step has at "
                    f"most {max_batch}; load the model with max_batch={len(run.rows)}"
                )
            end = run.end
        ids = [IDS.of(run.digest) for run in self.runs]
        for run, id in zip(self.runs, ids, strict=True):
            tokens[run.first : run.end] = [id] * len(run.rows)
        self.digests = tuple(dict(zip(ids, (run.digest for run in self.runs), strict=True)).items())
        self._rotary, self._shift = _rotary_positions(len(tokens), self.runs)
        self._grouped = [run for run in self.runs if run.grouped]

    @property
    def has_rotary(self) -> bool:
        """Return whether rotary positions differ from indices of tokens."""
        return self._rotary is not None

    def has_groups(self, start: int) -> bool:
        """Return whether tokens of an image from `start` on see one another."""
        return bool(self._grouped) and start < self._grouped[-1].end

    def rows(self, start: int, n: int, place: int) -> list[ImageRows]:
        """Return the image rows among the tokens [start, start + n). place: of the first one in the batch."""
        found = []
        for run in self.runs:
            first, end = max(run.first, start), min(run.end, start + n)
            if first < end:
                places = np.arange(first, end, dtype=np.int32) + np.int32(place - start)
                found.append(ImageRows(places, run.rows[first - run.first : end - run.first]))
        return found

    def rotary(self, start: int, n: int) -> np.ndarray:
        """Return the rotary positions of the tokens [start, start + n): int32 [n, N_AXES]."""
        out = np.repeat(np.arange(start, start + n, dtype=np.int32)[:, None], N_AXES, axis=1) + self._shift
        if self._rotary is not None and start < len(self._rotary):
            known = self._rotary[start : start + n]
            out[: len(known)] = known
        return out

    def groups(self, start: int, n: int) -> np.ndarray:
        """Return the groups of the tokens [start, start + n): int32 [n, 2]."""
        own = np.arange(start, start + n, dtype=np.int32)
        out = np.stack([own, own + 1], axis=1)
        for run in self._grouped:
            out[(own >= run.first) & (own < run.end)] = run.first, run.end
        return out

    def least(self, start: int) -> int:
        """Return the fewest tokens from `start` on that a step can compute: 1, or the rest of a group."""
        return next((run.end - start for run in self._grouped if run.first <= start < run.end), 1)

    def chunk(self, start: int, n: int, room: int) -> int:
        """Return how many of the tokens from `start` on to compute, if a step without groups took n.

        room: the most. Returns 0 if the rest of a group does not fit.
        """
        n = min(n, room)
        for run in self._grouped:
            if run.first < start + n < run.end:
                if run.first > start:
                    return run.first - start
                return run.end - start if run.end - start <= room else 0
        return n


def _rotary_positions(n: int, runs: Sequence[ImageTokens]) -> tuple[np.ndarray | None, int]:
    """Return the rotary positions of n tokens, int32 [n, N_AXES], and the shift of later tokens' positions.

    The positions are None if they equal the indices. A later token has its index plus the shift.
    """
    if all(run.positions is None for run in runs):
        return None, 0
    out = np.repeat(np.arange(n, dtype=np.int32)[:, None], N_AXES, axis=1)
    shift = 0
    for run in runs:
        if run.positions is None:
            continue
        first = run.first + shift
        out[run.first : run.end] = first + run.positions
        shift = first + run.n_positions - run.end
        out[run.end :] = np.arange(run.end + shift, n + shift, dtype=np.int32)[:, None]
    return out, shift
