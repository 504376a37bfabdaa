"""Weights that have no room in memory: which stay, and which stream from the file in every step.

A *piece* is the matrices that one native operation reads. Pieces that stream are read in the order of their
use, ahead of it, into a ring that is smaller than they are together (csrc/store/stream.h). Every byte that
streams costs one byte of reading in each step, wherever it stands, so that it is free which stay: the largest
do, since the ring must hold the two largest of the others, and beyond these some of each part of the step, so
that reading and computing overlap all the way.
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
    """Bytes that so many take, one tensor behind the other."""
    return -(-n // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Piece:
    """Matrices that are needed together. nbytes: of these in memory; room: that they take in a ring."""

    names: tuple[str, ...]
    nbytes: int
    room: int


@dataclass(frozen=True)
class Streaming:
    """stays: of each piece whether it stays in memory. ring: bytes for those that do not, 0 where all do."""

    stays: tuple[bool, ...]
    ring: int


@dataclass(frozen=True)
class Streamed:
    """What a plan gets: a stream, and of each tensor that comes by it the piece and the part of this."""

    stream: _core.Stream
    places: Mapping[str, tuple[int, int]]

    @property
    def n_pieces(self) -> int:
        return 1 + max(piece for piece, _ in self.places.values())


def pieces_of(graph: Graph, tensors: Mapping[str, TensorInfo], without: Collection[str]) -> list[Piece]:
    """What may stream, in the order of its use: matrices, but those `without`, those of bundles, and those
    that are read at several places of a step."""
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
    """The smallest number of bytes that works, where a ring holds so many of the largest that stream."""
    everything = sum(piece.nbytes for piece in pieces)
    return min([everything, *(kept + buffers * room for kept, room in _splits(pieces))])


def arrange(pieces: Sequence[Piece], n_bytes: int) -> Streaming:
    """What stays of the pieces, and the ring of the others, in n_bytes: least_for(pieces) at least."""
    if sum(piece.nbytes for piece in pieces) <= n_bytes:
        return Streaming((True,) * len(pieces), 0)
    buffers = 2 if least_for(pieces, 2) <= n_bytes else 1  # two: one is computed while the other is read
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
    for i in smaller:  # what these were too large for
        if not stays[i] and taken + pieces[i].nbytes <= left:
            stays[i], taken = True, taken + pieces[i].nbytes
    return Streaming(tuple(stays), n_bytes - kept - taken)


def _splits(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Ways to let all pieces up to a size stream: bytes of the larger ones, and that size."""
    for room in sorted({piece.room for piece in pieces}):
        yield sum(piece.nbytes for piece in pieces if piece.room > room), room
