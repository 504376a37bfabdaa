"""Weights that do not fit in memory: which stay, and which are streamed from the file in every step.

A *piece* is the matrices that one native operation reads. Streamed pieces are read in order of use, ahead of
time, into a ring that is smaller than their sum (csrc/store/stream.h). Each streamed byte is read
once per step, whichever piece it belongs to, so the choice of pieces is free. The largest stay, because the
ring must hold the two largest streamed ones. The others that stay are spread over the step, so that reading
and computing overlap throughout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hotset import _core
from hotset.formats.gguf import TensorInfo
from hotset.model.fusion import fuse
from hotset.model.graph import Graph
from hotset.model.operations import (
    Ffn,
)
from hotset.model.read_order import look_ahead

_ALIGNMENT = 64


def padded(n: int) -> int:
    """Return n bytes, rounded up to the alignment of tensors."""
    return -(-n // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Piece:
    """Matrices that are needed together. nbytes: in memory; room: that they take in a ring."""

    names: tuple[str, ...]
    nbytes: int
    room: int


@dataclass(frozen=True)
class Streaming:
    """stays: whether each piece stays in memory. ring: bytes for the other pieces, 0 if all stay."""

    stays: tuple[bool, ...]
    ring: int


@dataclass(frozen=True)
class Streamed:
    """The input of a native plan: a stream, and for each streamed tensor its piece and part."""

    stream: _core.Stream
    places: Mapping[str, tuple[int, int]]

    @property
    def n_pieces(self) -> int:
        return 1 + max(piece for piece, _ in self.places.values())


def pieces_of(graph: Graph, tensors: Mapping[str, TensorInfo], without: Collection[str]) -> list[Piece]:
    """Return the matrices that may be streamed, in order of use.

    Excluded are `without`, matrices in bundles, and matrices that a step reads at several places.
    """
    places: dict[str, set[tuple[int, bool]]] = {}
    stay = set(without)
    in_order = look_ahead(fuse(graph, ()), lambda name: name in stay).groups
    for i, group in enumerate(in_order):
        for op in group.ops:
            for part in op.primitives if isinstance(op, Ffn) else (op,):
                matrices = set(part.matrices)
                stay |= {weight.name for weight in part.weights_read} - matrices
                for name in matrices:
                    places.setdefault(name, set()).add((i, isinstance(op, Ffn) and part == op.down))
    found: dict[tuple[int, bool], list[str]] = {}
    for name, [place, *others] in sorted(places.items()):
        if not others and name not in stay and not tensors[name].stride:
            found.setdefault(place, []).append(name)
    return [
        Piece(
            tuple(names),
            sum(padded(tensors[name].nbytes) for name in names),
            sum(_core.Stream.room_for(tensors[name].nbytes) for name in names),
        )
        for _, names in sorted(found.items())
    ]


def least_for(pieces: Sequence[Piece], buffers: int = 1) -> int:
    """Return the least bytes that work, if a ring holds `buffers` of the largest streamed pieces."""
    everything = sum(piece.nbytes for piece in pieces)
    return min([everything, *(kept + buffers * room for kept, room in _splits(pieces))])


def arrange(pieces: Sequence[Piece], n_bytes: int) -> Streaming:
    """Choose the pieces that stay, and the ring for the others, in n_bytes (at least least_for(pieces))."""
    if sum(piece.nbytes for piece in pieces) <= n_bytes:
        return Streaming((True,) * len(pieces), 0)
    buffers = 2 if least_for(pieces, 2) <= n_bytes else 1  # with two, one is read while the other is computed
    kept, largest = next(split for split in _splits(pieces) if split[0] + buffers * split[1] <= n_bytes)
    stays = [piece.room > largest for piece in pieces]
    smaller = [i for i, piece in enumerate(pieces) if not stays[i]]
    left = n_bytes - kept - buffers * largest
    share = left / sum(pieces[i].nbytes for i in smaller)
    seen = taken = 0
    for i in smaller:
        seen += (n := pieces[i].nbytes)
        if taken + n <= seen * share:
            stays[i], taken = True, taken + n
    for i in smaller:  # fill the remaining room
        if not stays[i] and taken + pieces[i].nbytes <= left:
            stays[i], taken = True, taken + pieces[i].nbytes
    return Streaming(tuple(stays), n_bytes - kept - taken)


def _splits(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Yield ways to stream all pieces up to a size: the bytes of larger pieces, and that size."""
    for room in sorted({piece.room for piece in pieces}):
        yield sum(piece.nbytes for piece in pieces if piece.room > room), room
