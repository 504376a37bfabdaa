"""Texts as vectors: hidden states behind the last norm, pooled, beside whatever else the engine computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from hotset.backends.base import WeightSource
from hotset.backends.reference import normalised
from hotset.engine.driver import EngineThread
from hotset.engine.engine import Sequence as EngineSequence
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.quants import dequantize
from hotset.model.graph import Graph, LayerNorm, RMSNorm, SelectOutputs
from hotset.parameters import shown

Pooling = Literal["mean", "cls", "last"]
_BY_NUMBER: dict[int, Pooling] = {0: "mean", 1: "mean", 2: "cls", 3: "last"}  # 0: the file says none


def pooling_of(metadata: Mapping[str, Any], given: str | None) -> Pooling:
    """How the tokens of a text become one vector: as given, else as the file's keys say, else their mean.

    Raises InvalidRequestError for a kind that is not known, UnsupportedModelError for a file with one.
    """
    if given is None:
        number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 1)
        if type(number) is not int or number not in _BY_NUMBER:
            raise UnsupportedModelError(
                f"the file pools hidden states in a way (pooling_type {shown(number)}) that hotset does not "
                "know; say which of mean, cls and last is meant"
            )
        return _BY_NUMBER[number]
    for pooling in get_args(Pooling):
        if given == pooling:
            return pooling  # type: ignore[no-any-return]
    raise InvalidRequestError(f"pooling must be one of mean, cls and last, not {shown(given)}")


def embed(
    thread: EngineThread,
    graph: Graph,
    weights: WeightSource,
    texts: Sequence[Sequence[int]],
    pooling: Pooling,
) -> np.ndarray:
    """A vector of length 1 for each text of token ids: float32 [n_texts, width].

    The texts run in the engine's thread, as many at once as others leave room for, and the caller waits. A
    vector has the same bits whatever ran beside it. Raises ContextLengthError for a text that does not fit.
    """
    selection = next(i for i, op in enumerate(graph.ops) if isinstance(op, SelectOutputs))
    norm = graph.ops[selection + 1]
    assert isinstance(norm, RMSNorm | LayerNorm)  # so every decoder ends
    states = graph.ops[selection]
    assert isinstance(states, SelectOutputs)
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    scale, shift = _vector(weights, norm.weight), None if bias is None else _vector(weights, bias)
    vectors = np.zeros((len(texts), norm.out.width), np.float32)
    sums = [np.zeros(norm.out.width) for _ in texts]

    def add(i: int, position: int, rows: np.ndarray) -> None:
        """Takes the rows of tokens from `position` on."""
        if pooling == "cls":
            rows = rows[: max(1 - position, 0)]
        elif pooling == "last":
            rows = rows[max(len(texts[i]) - 1 - position, 0) :]
        for row in rows:  # one after the other, so that the sum does not depend on the steps
            sums[i] += normalised(norm, row[None], scale, shift)[0]

    sequences = [
        thread.engine.prepare_tap(tokens, states.x.name, lambda *rows, i=i: add(i, *rows))
        for i, tokens in enumerate(texts)
    ]
    left, running = deque(sequences), deque[EngineSequence]()
    try:
        while left or running:
            while left and len(running) < thread.engine.max_sequences:
                running.append(left.popleft())
                thread.submit(running[-1], _Nowhere())
            thread.wait_for_end(running[0])
            _check(running.popleft())
    finally:
        thread.cancel(running)
    for vector, total in zip(vectors, sums, strict=True):
        length = float(np.sqrt((total * total).sum()))
        vector[:] = total / (length or 1.0)
    return vectors


class _Nowhere:
    def put(self, event: object) -> None:
        """Nobody takes the events of a text: its vector is what is asked for."""


def _check(sequence: EngineSequence) -> None:
    if sequence.error is not None:
        raise sequence.error
    if sequence.finish_reason != "length":
        raise InvalidRequestError("the model has been closed; load it again")


def _vector(weights: WeightSource, name: str) -> np.ndarray:
    info = weights.tensors[name]
    return dequantize(np.asarray(weights.data(name)), info.type, info.shape)
