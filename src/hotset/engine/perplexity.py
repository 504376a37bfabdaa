"""Perplexity as llama-perplexity measures it, of one model or of several in parallel.

The tokens are split into chunks of n_ctx tokens, each computed separately, with BOS in place of its first
token if the model adds BOS. Only the second half of each chunk is scored, because its tokens have enough
context. The error is the standard error of the mean negative log-likelihood, carried through the exponential.
If generated tokens are thresholded (operations.Threshold), all tokens are: the result describes how answers
are predicted.

With several engines, all compute the same tokens, and each is compared with the first over the whole
vocabulary. Rows of logits are compared while both exist, so no data of the vocabulary's size outlives a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hotset.engine.engine import Engine
from hotset.engine.sampler import row_logprobs
from hotset.errors import ContextLengthError, InvalidRequestError, StepCancelledError
from hotset.parameters import whole_number
from hotset.reporter import Reporter

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile

TILE_BYTES = 8 << 20  # of float64 logits that are compared together


@dataclass(frozen=True)
class Divergence:
    """The divergence of a model from the first one over the scored tokens, with standard errors.

    kl: mean over tokens of KL(first ‖ this) = Σ p₁ · (ln p₁ − ln p), in nats, over the whole vocabulary.
    kl_median, kl_p99, kl_max: of the same values; percentiles with linear interpolation.
    same_top: share of tokens for which both models rank the same token first.
    ppl_ratio: perplexity divided by the first model's. Its error comes from the differences per token, and is
    far smaller than the errors of the two perplexities, because both models fail at the same words.
    """

    kl: float
    kl_error: float
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: float
    same_top_error: float
    ppl_ratio: float
    ppl_ratio_error: float


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity over `n_scored` tokens, after `chunk` of `n_chunks` chunks, with its standard error.

    active_share: mean share of neurons that fire; selected_share: share that the predictor selected (1
    without a predictor). Both are None if they were not counted.
    tokens_per_second: over all tokens of all chunks except the first, which reads a cold file, unless there
    is only one chunk.
    divergence: from the first of several models; None for the first or only one.
    """

    ppl: float
    error: float
    chunk: int
    n_chunks: int
    n_scored: int
    active_share: float | None = None
    selected_share: float | None = None
    tokens_per_second: float = field(default=0.0, compare=False)
    divergence: Divergence | None = None


def perplexity_chunks(
    engine: Engine,
    tokens: Sequence[int],
    *,
    n_ctx: int = 512,
    chunks: int | None = None,
    bos_id: int | None = None,
    n_neurons: int = 0,
) -> Iterator[PerplexityResult]:
    """Compute chunk after chunk and yield the running result after each; the last one is final.

    See `compare_chunks` for the arguments and errors.
    """
    results = compare_chunks(
        [engine], tokens, n_ctx=n_ctx, chunks=chunks, bos_id=bos_id, n_neurons=[n_neurons]
    )
    for (result,) in results:
        yield result


def compare_chunks(
    engines: Sequence[Engine],
    tokens: Sequence[int],
    *,
    n_ctx: int = 512,
    chunks: int | None = None,
    bos_id: int | None = None,
    n_neurons: Sequence[int],
    progress: Reporter | None = None,
    label: str = "perplexity",
) -> Iterator[tuple[PerplexityResult, ...]]:
    """Compute chunk after chunk with every engine and yield their running results after each chunk.

    chunks: how many at most; None: all. bos_id: None if the model adds no BOS. n_neurons: of all layers, per
    engine, for the shares, which an engine counts if it collects statistics. progress: receives the number of
    tokens done, under `label`.
    Raises InvalidRequestError if there are fewer than 2 * n_ctx tokens, like llama-perplexity, or if the
    engines have different vocabularies, and ContextLengthError if n_ctx exceeds an engine's context.
    """
    n_chunks = _n_chunks(engines, tokens, n_ctx, chunks)
    first = n_ctx // 2
    sides = [_Side(engine, n) for engine, n in zip(engines, n_neurons, strict=True)]
    progress = progress or Reporter()
    for i in range(n_chunks):
        progress.advance(label, i * n_ctx, n_chunks * n_ctx, "tokens")
        chunk = list(tokens[i * n_ctx : (i + 1) * n_ctx])
        targets = np.array(chunk[1:])
        if bos_id is not None:
            chunk[0] = bos_id
        streams = [side.run(chunk[:-1], first, timed=i > 0 or n_chunks == 1) for side in sides]
        try:
            position = first
            for rows in _together(streams):
                for side, logits in zip(sides, rows, strict=True):
                    side.score(logits, targets[position : position + len(logits)])
                _diverge(sides, rows)
                position += len(rows[0])
                progress.advance(label, i * n_ctx + position, n_chunks * n_ctx, "tokens")
        finally:
            for stream in streams:
                stream.close()
        yield tuple(side.result(sides[0], i + 1, n_chunks) for side in sides)


def _n_chunks(engines: Sequence[Engine], tokens: Sequence[int], n_ctx: int, chunks: int | None) -> int:
    n_ctx = whole_number("n_ctx", n_ctx, 0)
    if n_ctx < 4:
        raise InvalidRequestError(f"perplexity needs an n_ctx of at least 4, not {n_ctx}")
    smallest = min(engine.n_ctx for engine in engines)
    if n_ctx > smallest:
        raise ContextLengthError(
            f"perplexity over chunks of {n_ctx} tokens does not fit in the context of {smallest}; "
            "load the model with a larger n_ctx"
        )
    if len(tokens) < 2 * n_ctx:
        raise InvalidRequestError(
            f"perplexity with chunks of {n_ctx} needs at least {2 * n_ctx} tokens, but the text has "
            f"{len(tokens)}; give a longer text or a smaller n_ctx"
        )
    if chunks is not None and whole_number("chunks", chunks, 0) < 1:
        raise InvalidRequestError(f"perplexity needs at least one chunk, not {chunks}")
    if len({id(engine) for engine in engines}) < len(engines):
        raise InvalidRequestError("a model cannot be compared with itself; load it a second time")
    n_vocab = engines[0].backend.n_vocab
    for engine in engines[1:]:
        if engine.backend.n_vocab != n_vocab:
            raise InvalidRequestError(
                f"models with vocabularies of {n_vocab} and {engine.backend.n_vocab} tokens cannot be "
                "compared token by token; compare models that share a tokenizer"
            )
    n_chunks = len(tokens) // n_ctx
    return n_chunks if chunks is None else min(n_chunks, chunks)


class _Side:
    """The progress of one engine through the chunks: losses of scored tokens, counts, seconds."""

    def __init__(self, engine: Engine, n_neurons: int) -> None:
        self.engine = engine
        self._n_neurons = n_neurons
        self.losses: list[float] = []
        self._kl: list[float] = []
        self._n_same = 0
        self._n_active = self._n_selected = self._n_counted = 0
        self._n_timed = 0
        self._seconds = 0.0

    def run(self, tokens: list[int], first: int, *, timed: bool) -> Generator[np.ndarray, None, None]:
        """Yield float32 logits [n, n_vocab] of the positions from `first` on, step by step.

        The arrays are valid until the next one.
        """
        blocks: list[np.ndarray] = []
        sequence = self.engine.enqueue(
            self.engine.prepare_score(
                tokens, lambda _, rows: blocks.append(rows), first=first, as_answer=True
            )
        )
        seconds = 0.0
        try:
            while sequence.finish_reason is None:
                started = time.perf_counter()
                self.engine.step()
                seconds += time.perf_counter() - started
                self._count()
                while blocks:
                    yield blocks.pop(0)
        finally:
            self.engine.cancel(sequence)
        if sequence.error is not None:
            raise sequence.error
        if sequence.finish_reason == "cancelled":
            raise StepCancelledError
        if timed:
            self._n_timed += len(tokens) - sequence.n_reused
            self._seconds += seconds

    def _count(self) -> None:
        stats = self.engine.step_stats
        if stats is not None:
            self._n_active += int(stats.active.sum())
            self._n_selected += int(stats.selected.sum())
            self._n_counted += stats.n_tokens * self._n_neurons

    def score(self, logits: np.ndarray, targets: np.ndarray) -> None:
        found = row_logprobs(logits, 0, self.engine.backend.runtime)
        for row, target, (log_total, _) in zip(logits, targets, found, strict=True):
            self.losses.append(log_total - float(row[target]))

    def diverge(self, kl: np.ndarray, same: np.ndarray) -> None:
        """Add tokens: their divergences from the first model, and whether both rank the same token first."""
        self._kl += kl.tolist()
        self._n_same += int(same.sum())

    def result(self, first: _Side, chunk: int, n_chunks: int) -> PerplexityResult:
        nll, error = _mean(self.losses)
        ppl = _exp(nll)
        return PerplexityResult(
            ppl,
            ppl * error,
            chunk,
            n_chunks,
            len(self.losses),
            self._n_active / self._n_counted if self._n_counted else None,
            self._n_selected / self._n_counted if self._n_counted else None,
            self._n_timed / self._seconds if self._seconds else 0.0,
            None if self is first else self._divergence(first),
        )

    def _divergence(self, first: _Side) -> Divergence:
        n = len(self._kl)
        kl, kl_error = _mean(self._kl)
        median, p99, largest = np.percentile(self._kl, (50, 99, 100))
        same = self._n_same / n
        log_ratio, ratio_error = _mean(np.subtract(self.losses, first.losses))
        ratio = _exp(log_ratio)
        same_error = math.sqrt(same * (1 - same) / (n - 1)) if n > 1 else 0.0
        return Divergence(
            kl, kl_error, float(median), float(p99), float(largest),
            same, same_error, ratio, ratio * ratio_error,
        )  # fmt: skip


def _diverge(sides: Sequence[_Side], rows: Sequence[np.ndarray]) -> None:
    """Add the same rows of logits of all engines, tile by tile; the first engine's are processed once."""
    if len(sides) < 2:
        return
    n = max(1, TILE_BYTES // (8 * rows[0].shape[1]))
    for i in range(0, len(rows[0]), n):
        first, *others = (logits[i : i + n] for logits in rows)
        top, log_p = first.argmax(axis=1), log_softmax(first)
        p = np.exp(log_p)
        for side, logits in zip(sides[1:], others, strict=True):
            side.diverge(_kl(p, log_p, logits), top == logits.argmax(axis=1))


def kl_divergence(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return KL(first ‖ second) of each row of logits [n, n_vocab], in nats: float64 [n]."""
    log_p = log_softmax(first)
    return _kl(np.exp(log_p), log_p, second)


def _kl(p: np.ndarray, log_p: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Return the KL divergences of `logits` from probabilities, both [n, n_vocab], computed in float64.

    A KL divergence is a small difference of large numbers: for nearly equal models, float32 would yield
    noise.
    """
    # For equal rows, rounding errors of about 1e-16 may be negative.
    kl: np.ndarray = np.maximum(np.einsum("ij,ij->i", p, log_p - log_softmax(logits)), 0.0)
    return kl


def log_softmax(logits: np.ndarray) -> np.ndarray:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


def _together(streams: Sequence[Iterator[np.ndarray]]) -> Iterator[list[np.ndarray]]:
    """Yield rows of the same positions from every stream; streams may split them into steps differently."""
    ahead: list[np.ndarray | None] = [None] * len(streams)
    while True:
        for i, stream in enumerate(streams):
            if ahead[i] is None:
                ahead[i] = next(stream, None)
        present = [rows for rows in ahead if rows is not None]
        if len(present) < len(streams):
            return
        n = min(map(len, present))
        yield [rows[:n] for rows in present]
        ahead = [rows[n:] if len(rows) > n else None for rows in present]


def _mean(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the mean and its standard error."""
    array = np.asarray(values, np.float64)
    error = float(array.std()) / math.sqrt(len(array) - 1) if len(array) > 1 else 0.0
    return float(array.mean()), error


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def check_same_tokens(files: Sequence[GGUFFile]) -> None:
    """Raise InvalidRequestError if a token id means different tokens in two models."""
    spelled = [file.metadata.get("tokenizer.ggml.tokens") for file in files]
    for file, tokens in zip(files[1:], spelled[1:], strict=True):
        if tokens != spelled[0]:
            raise InvalidRequestError(
                f"{files[0].path.name} and {file.path.name} have different vocabularies, so "
                "their predictions cannot be compared token by token; compare models that share a tokenizer"
            )
