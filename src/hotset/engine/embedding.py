"""Embeddings and reranking scores: pooled hidden states after the last norm."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hotset.backends.reference import normalised
from hotset.engine.driver import EngineThread
from hotset.engine.engine import Engine
from hotset.engine.pooling import Head, Pooling, pooling_of, read
from hotset.engine.sequence import Owner
from hotset.engine.sequence import Sequence as EngineSequence
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.model.operations import LayerNorm, RMSNorm, SelectOutputs
from hotset.parameters import shown


class Embedder:
    """A maker of vectors and scores from texts: the model's last norm, pooling, and the file's head.

    Raises FormatError if the tensors of the head do not fit together.
    """

    def __init__(
        self, engine: Engine, graph: Graph, weights: WeightSource, metadata: Mapping[str, Any]
    ) -> None:
        at = next(i for i, op in enumerate(graph.ops) if isinstance(op, SelectOutputs))
        states = graph.ops[at].inputs[0]
        norm = graph.ops[at + 1] if at + 1 < len(graph.ops) else None
        assert norm is None or isinstance(norm, RMSNorm | LayerNorm)  # every decoder ends this way
        self.engine, self.states, self._norm, self._metadata = engine, states.name, norm, metadata
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        weight = None if norm is None else norm.weight
        self._scale = np.ones(states.width) if weight is None else read(weights, weight)
        self._shift = None if bias is None else read(weights, bias)
        self.head = Head(weights, metadata, states.width, causal=not graph.is_encoder)

    def normalised(self, rows: np.ndarray) -> np.ndarray:
        """Return hidden states, float32 [n, width], after the last norm, if there is one."""
        return rows if self._norm is None else normalised(self._norm, rows, self._scale, self._shift)

    def vectors(
        self,
        texts: Iterable[Sequence[int]],
        pooling: str | None = None,
        dimensions: int | None = None,
        owner: Owner | None = None,
    ) -> TextVectors:
        """Return texts of token ids, to be computed as vectors.

        dimensions: keep only this many leading values of each vector. Raises ContextLengthError if a text
        does not fit, InvalidRequestError if `dimensions` is invalid, and the errors of `pooling_of`.
        """
        chosen, width = pooling_of(self._metadata, pooling), self.head.out_width
        if chosen == "rank":
            if dimensions is not None:
                raise InvalidRequestError("dimensions applies to vectors; pooling rank returns scores")
            return self.scores(texts, owner)
        if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= width):
            raise InvalidRequestError(
                f"dimensions must be a whole number from 1 to {width}, the width of this model's vectors, "
                f"not {shown(dimensions)}"
            )
        return TextVectors(self, texts, chosen, dimensions or width, owner)

    def check_ranks(self) -> None:
        """Raise UnsupportedModelError unless the model is a reranker."""
        if not self.head.ranks:
            raise UnsupportedModelError(
                "the model is not a reranker: its file has no rank head (cls.weight or cls.output.weight); "
                "use a reranker such as Qwen3-Reranker or bge-reranker"
            )

    def scores(self, texts: Iterable[Sequence[int]], owner: Owner | None = None) -> TextVectors:
        """Return texts of token ids, to be scored by a reranker. Raises the errors of `check_ranks`."""
        self.check_ranks()
        return TextVectors(self, texts, "rank", self.head.n_labels, owner)


class TextVectors:
    """Texts of token ids that become vectors of length 1, or scores; made by Embedder.

    The caller runs the `sequence` of each text, in any order. A vector does not depend on the other sequences
    of a batch. width: values of a vector.
    """

    def __init__(
        self,
        embedder: Embedder,
        texts: Iterable[Sequence[int]],
        pooling: Pooling,
        width: int,
        owner: Owner | None,
    ) -> None:
        """Check the texts. Raises ContextLengthError if one does not fit."""
        self._embedder, self._pooling, self.width, self._owner = embedder, pooling, width, owner
        self._state = embedder.head.ranked_state if pooling == "rank" else pooling
        self._texts = [array("i", embedder.engine.fitting(tokens)) for tokens in texts]
        self._sums: dict[int, np.ndarray] = {}  # of unfinished texts
        self._found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens of all texts."""
        return sum(map(len, self._texts))

    def sequence(self, i: int) -> EngineSequence:
        """Return a sequence that computes text `i`, from Engine.prepare_tap.

        It needs much more memory than a short text: make it only when it can run.
        """
        tokens = self._texts[i]
        add = partial(self._add, i, len(tokens))
        if self._pooling == "none":
            self._found[i] = np.zeros((len(tokens), self.width), np.float32)
        self._sums[i] = np.zeros(self._embedder.head.width)
        return self._embedder.engine.prepare_tap(tokens, self._embedder.states, add, owner=self._owner)

    def _add(self, i: int, n_tokens: int, position: int, rows: np.ndarray) -> None:
        """Add the rows of the tokens from `position` on."""
        end = position + len(rows)
        if self._state == "cls":
            rows = rows[: max(1 - position, 0)]
        elif self._state == "last":
            rows = rows[max(n_tokens - 1 - position, 0) :]
        total, head = self._sums[i], self._embedder.head
        states = self._embedder.normalised(rows)
        for at, state in enumerate(states):  # one by one: the sum must not depend on chunk sizes
            if self._pooling == "none":
                self._found[i][position + at] = head.vector(state)[: self.width]
            else:
                total += state
        if end < n_tokens:
            return
        del self._sums[i]
        if self._state == "mean":
            total = total / n_tokens
        if self._pooling == "rank":
            self._found[i] = head.scores(total).astype(np.float32)
        elif self._pooling != "none":
            vector = head.vector(total)[: self.width]
            length = float(np.sqrt((vector * vector).sum()))
            self._found[i] = (vector / (length or 1.0)).astype(np.float32)

    def computed(self, thread: EngineThread) -> TextVectors:
        """Run all sequences in the engine's thread, wait, and return self.

        As many run at once as other sequences leave room for.
        """
        left, running = deque(range(len(self))), deque[EngineSequence]()
        try:
            while left or running:
                while left and len(running) < thread.engine.max_sequences:
                    running.append(self.sequence(left.popleft()))
                    thread.submit(running[-1], _Nowhere())
                thread.wait_for_end(running[0])
                _check(running.popleft())
        finally:
            thread.cancel(running)
        return self

    def vectors(self) -> np.ndarray:
        """Return float32 [n_texts, width], once all sequences have finished."""
        return np.array(self._found, np.float32).reshape(-1, self.width)

    def tokens(self) -> list[np.ndarray]:
        """Return the vectors of each text's tokens, float32 [n_tokens, width], for pooling "none"."""
        return self._found


class _Nowhere:
    def put(self, event: object) -> None:
        """Discard an event: only the vector is needed."""


def _check(sequence: EngineSequence) -> None:
    if sequence.error is not None:
        raise sequence.error
    if sequence.finish_reason != "length":
        raise InvalidRequestError("the model has been closed; load it again")
