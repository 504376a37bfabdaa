"""Texts as vectors: hidden states behind the last norm, pooled, beside whatever else the engine computes."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from hotset.backends.reference import normalised
from hotset.engine.driver import EngineThread
from hotset.engine.engine import Engine
from hotset.engine.sequence import Owner
from hotset.engine.sequence import Sequence as EngineSequence
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.quants import dequantize
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.model.operations import LayerNorm, RMSNorm, SelectOutputs
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


class TextVectors:
    """Texts of token ids on their way to vectors of length 1.

    The caller has the `sequence` of each computed, in any order. A vector has the same bits whatever ran
    beside it. Raises ContextLengthError for a text that does not fit.
    """

    def __init__(
        self,
        engine: Engine,
        graph: Graph,
        weights: WeightSource,
        texts: Sequence[Sequence[int]],
        pooling: Pooling,
        owner: Owner | None = None,
    ) -> None:
        selection = next(i for i, op in enumerate(graph.ops) if isinstance(op, SelectOutputs))
        norm, states = graph.ops[selection + 1], graph.ops[selection]
        assert isinstance(norm, RMSNorm | LayerNorm)  # so every decoder ends
        assert isinstance(states, SelectOutputs)
        self._norm, self._pooling = norm, pooling
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        self._scale = np.ones(norm.out.width) if norm.weight is None else _vector(weights, norm.weight)
        self._shift = None if bias is None else _vector(weights, bias)
        self._sums = [np.zeros(norm.out.width) for _ in texts]
        self._engine, self._states, self._owner = engine, states.x.name, owner
        self._texts = [array("i", engine.fitting(tokens)) for tokens in texts]

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def n_tokens(self) -> int:
        """Of all texts."""
        return sum(map(len, self._texts))

    def sequence(self, i: int) -> EngineSequence:
        """What computes a text, of Engine.prepare_tap. It is many times as large as a short text: to be made
        when that is its turn."""
        tokens = self._texts[i]
        add = partial(self._add, i, len(tokens))
        return self._engine.prepare_tap(tokens, self._states, add, owner=self._owner)

    def _add(self, i: int, n_tokens: int, position: int, rows: np.ndarray) -> None:
        """Takes the rows of tokens from `position` on."""
        if self._pooling == "cls":
            rows = rows[: max(1 - position, 0)]
        elif self._pooling == "last":
            rows = rows[max(n_tokens - 1 - position, 0) :]
        for row in rows:  # one after the other, so that the sum does not depend on the steps
            self._sums[i] += normalised(self._norm, row[None], self._scale, self._shift)[0]

    def vectors(self) -> np.ndarray:
        """float32 [n_texts, width], once all sequences have finished."""
        vectors = np.zeros((len(self._sums), self._norm.out.width), np.float32)
        for vector, total in zip(vectors, self._sums, strict=True):
            length = float(np.sqrt((total * total).sum()))
            vector[:] = total / (length or 1.0)
        return vectors


def embed(
    thread: EngineThread,
    graph: Graph,
    weights: WeightSource,
    texts: Sequence[Sequence[int]],
    pooling: Pooling,
) -> np.ndarray:
    """A vector of length 1 for each text of token ids: float32 [n_texts, width].

    The texts run in the engine's thread, as many at once as others leave room for, and the caller waits.
    Raises ContextLengthError for a text that does not fit.
    """
    found = TextVectors(thread.engine, graph, weights, texts, pooling)
    left, running = deque(range(len(found))), deque[EngineSequence]()
    try:
        while left or running:
            while left and len(running) < thread.engine.max_sequences:
                running.append(found.sequence(left.popleft()))
                thread.submit(running[-1], _Nowhere())
            thread.wait_for_end(running[0])
            _check(running.popleft())
    finally:
        thread.cancel(running)
    return found.vectors()


class _Nowhere:
    def put(self, event: object) -> None:
        """The events of a text are not taken: its vector is wanted."""


def _check(sequence: EngineSequence) -> None:
    if sequence.error is not None:
        raise sequence.error
    if sequence.finish_reason != "length":
        raise InvalidRequestError("the model has been closed; load it again")


def _vector(weights: WeightSource, name: str) -> np.ndarray:
    info = weights.tensors[name]
    return dequantize(np.asarray(weights.data(name)), info.type, info.shape)
