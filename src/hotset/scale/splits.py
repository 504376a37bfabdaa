"""The split of a model over machines, and the division of a batch into consecutive pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hotset.backends.base import Batch
from hotset.errors import InvalidRequestError, OutOfMemoryError
from hotset.escaping import clause
from hotset.model.graph import Graph
from hotset.parameters import shown
from hotset.units import human_size

_LEAST = 4  # tokens of a piece: for fewer, the pipeline gains less than reading the weights again costs
_PROMPT = 64  # tokens from which a step counts as a prompt's and has more pieces


@dataclass(frozen=True)
class Split:
    """Consecutive layers on one machine."""

    host: str
    n_layers: int


def parse_splits(text: str, n_layer: int) -> list[Split]:
    """Parse "HOST:LAYERS,HOST:LAYERS", in the order of layers. Raises InvalidRequestError.

    The embedding belongs to the first layer, the output to the last.
    """
    splits = []
    for part in text.split(","):
        host, _, count = part.strip().rpartition(":")
        if not host or not (count.isascii() and count.isdecimal() and 0 < int(count[:9]) <= n_layer):
            raise InvalidRequestError(
                f"{clause(shown(part.strip()))} is not a stage: write HOST:LAYERS, such as box:16, with some "
                f"of the model's {n_layer} layers"
            )
        splits.append(Split(host, int(count)))
    if (total := sum(split.n_layers for split in splits)) != n_layer:
        raise InvalidRequestError(f"the stages have {total} layers together, and the model has {n_layer}")
    return splits


def spans(graph: Graph, splits: Sequence[Split]) -> list[tuple[int, int]]:
    """Return the operations [first, last) of each stage."""
    *starts, _ = graph.layer_starts
    firsts, layer = [0], 0
    for split in splits[:-1]:
        layer += split.n_layers
        firsts.append(starts[layer])
    return list(zip(firsts, [*firsts[1:], len(graph.ops)], strict=True))


@dataclass(frozen=True)
class Room:
    """The capacity of a machine.

    n_bytes: of memory for weights and cache. rate: bytes per second that steps read. hop: seconds that a step
    of one token takes to it.
    """

    host: str
    n_bytes: float
    rate: float
    hop: float = 0.0


def planned(layers: Sequence[float], rooms: Sequence[Room]) -> list[Split]:
    """Return the splits that take the least time per token of one answer.

    layers: bytes of each layer, weights and cache, about the same. Every further machine costs a hop, and a
    byte costs its machine's time to read it. So the fastest machines are filled first, and no more are used
    than the model needs. Raises OutOfMemoryError if all together cannot hold it.
    """
    each, left, splits = max(layers), len(layers), []
    for room in sorted(rooms, key=lambda room: (each / room.rate, room.hop, room.host)):
        if n := min(left, int(room.n_bytes // each)):
            splits.append(Split(room.host, n))
            left -= n
        if not left:
            return splits
    raise OutOfMemoryError(
        f"the model needs {human_size(sum(layers))}, and the machines have room for "
        f"{human_size(sum(room.n_bytes for room in rooms))}; add one, or lower n_ctx"
    )


def n_pieces(n_tokens: int, n_stages: int) -> int:
    """Return the number of pieces of a step, so that the stages work at the same time."""
    most = n_stages if n_tokens < _PROMPT else 2 * n_stages
    return max(1, min(most, n_tokens // _LEAST)) if n_stages > 1 else 1


def pieces(batch: Batch, n: int) -> list[Batch]:
    """Split a batch into n batches of similar size, to be computed in this order.

    Results are bitwise identical: a token depends only on earlier tokens of its sequence, which come before
    it.
    """
    if n == 1:
        return [batch]
    ends = [len(batch.tokens) * i // n for i in range(n + 1)]
    found = []
    for first, last in pairwise(ends):
        wanted = batch.outputs[(batch.outputs >= first) & (batch.outputs < last)]
        found.append(
            replace(
                batch,
                tokens=batch.tokens[first:last],
                positions=batch.positions[first:last],
                sequences=batch.sequences[first:last],
                outputs=(wanted - first).astype(np.int32),
                thresholded=None if batch.thresholded is None else batch.thresholded[first:last],
            )
        )
    return found
