"""Calibration data of a predictor: inputs of each FFN with its neurons' values, and a threshold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.reference import ACTIVATIONS
from hotset.errors import InvalidRequestError
from hotset.formats.quants import dequantize
from hotset.model.decoder import describe
from hotset.model.operations import Activate, Ffn, LayerNorm, Linear, one_matrix
from hotset.sparsity import taps

if TYPE_CHECKING:
    from hotset.backends.base import Backend
    from hotset.formats.gguf import GGUFFile
    from hotset.formats.source import WeightSource
    from hotset.model.config import ModelConfig
    from hotset.reporter import Reporter

_N_SEQUENCES = 8  # sequences that a model generates for its calibration
N_DRAWN = 64  # random inputs per layer without tokens; each has n_ff neurons, so few suffice
_TAPS_BYTES = 1 << 30  # of taps held at a time; a larger model runs its tokens once for each group of layers


@dataclass(frozen=True)
class Calibration:
    """How thresholds are found.

    tokens: int32 [n] or [n_sequences, n]; None: the model generates n_tokens. open_backend: makes the backend
    that runs them; None: inputs are drawn at random instead. recall: the share of the firing neurons'
    magnitude that the predicted neurons must keep.
    """

    tokens: np.ndarray | None = None
    n_tokens: int = 256
    recall: float = 0.98
    open_backend: taps.BackendFactory | None = field(default=taps.open_cpu, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.recall <= 1:
            raise InvalidRequestError(
                f"the recall of a predictor must be above 0 and at most 1, not {self.recall}"
            )
        if self.n_tokens < 2 * _N_SEQUENCES:
            raise InvalidRequestError(f"a calibration needs at least {2 * _N_SEQUENCES} tokens")
        if self.tokens is not None and self.tokens.size == 0:
            raise InvalidRequestError("the calibration text is empty; give a longer text, or none")

    def settings(self) -> dict[str, object]:
        """Return the facts that distinguish one calibration from another."""
        if self.open_backend is None:
            data = "drawn"
        elif self.tokens is None:
            data = f"written {self.n_tokens}"
        else:
            tokens = np.ascontiguousarray(self.tokens, np.int32)
            data = hashlib.sha256(f"{tokens.shape}".encode() + tokens.tobytes()).hexdigest()[:16]
        return {"data": data, "recall": self.recall}


@dataclass(frozen=True)
class Sample:
    """inputs: float32 [n, n_embd], of an FFN, after its norm. neurons: their values, float32 [n, n_ff]."""

    inputs: np.ndarray
    neurons: np.ndarray


def samples(
    gguf: GGUFFile,
    config: ModelConfig,
    weights: WeightSource,
    calibration: Calibration,
    progress: Reporter | None = None,
) -> Iterator[Sample]:
    """Yield one Sample for each layer, in order. Holds the taps of some layers at a time."""
    graph = describe(config, weights.tensors)
    layers = graph.ffns
    if calibration.open_backend is None:
        for i, ffn in enumerate(layers):
            yield _drawn(weights, ffn, np.random.default_rng(i))
        return
    backend = calibration.open_backend(weights, graph)
    try:
        tokens = calibration.tokens
        if tokens is None:
            first = gguf.metadata.get("tokenizer.ggml.bos_token_id")
            if not isinstance(first, int) or first >= config.n_vocab:
                first = None
            n_tokens = calibration.n_tokens // _N_SEQUENCES
            tokens = taps.generate(backend, _N_SEQUENCES, n_tokens, first, progress=progress)
        yield from _tapped(backend, tokens, layers)
    finally:
        backend.close()


def _tapped(backend: Backend, tokens: np.ndarray, layers: Sequence[Ffn]) -> Iterator[Sample]:
    bytes_per_layer = max(4 * tokens.size * (ffn.decides.x.width + ffn.neurons.width) for ffn in layers)
    longest, steps = taps.longest_sequence(backend), taps.of_backend(backend)
    n_layers = max(1, _TAPS_BYTES // bytes_per_layer)
    for first in range(0, len(layers), n_layers):
        part = layers[first : first + n_layers]
        names = tuple(dict.fromkeys(name for ffn in part for name in (ffn.decides.x.name, ffn.neurons.name)))
        runs = [taps.whole(steps, sequence, names) for sequence in taps.sequences(tokens, longest)]
        for ffn in part:
            inputs, neurons = (
                np.concatenate([run.pop(name) for run in runs])
                for name in (ffn.decides.x.name, ffn.neurons.name)
            )
            yield Sample(inputs, neurons)


def _drawn(weights: WeightSource, ffn: Ffn, rng: np.random.Generator) -> Sample:
    """Return normally distributed inputs, after the FFN's norm, and their neurons."""
    norm = ffn.norm
    inputs = rng.standard_normal((N_DRAWN, ffn.decides.x.width)).astype(np.float32)
    if norm is not None and norm.weight is not None:
        inputs *= values_of(weights, norm.weight)
        if isinstance(norm, LayerNorm) and norm.bias is not None:
            inputs += values_of(weights, norm.bias)

    def product(op: Linear) -> np.ndarray:
        rows = slice(op.first_row, op.first_row + op.out.width)
        values: np.ndarray = inputs @ values_of(weights, op.weight)[rows].T
        if op.bias is not None:
            values = values + values_of(weights, op.bias)[rows]
        return values

    def activated(op: Activate, values: np.ndarray) -> np.ndarray:
        return ACTIVATIONS[op.kind](values, np.float32(op.threshold))

    neurons = activated(ffn.gate_act, product(ffn.decides))
    if ffn.gate is not None:
        up = product(one_matrix(ffn.up))
        neurons = neurons * (up if ffn.up_act is None else activated(ffn.up_act, up))
    return Sample(inputs, neurons)


def values_of(weights: WeightSource, name: str) -> np.ndarray:
    """Return a tensor as float32 [ne1, ne0], or [ne0]."""
    info = weights.tensors[name]
    return dequantize(weights.data(name), info.type, info.shape)


def threshold(scores: np.ndarray, neurons: np.ndarray, recall: float) -> float:
    """Return the highest threshold that keeps `recall` of the neurons' magnitude; both are [n, n_ff].

    Returns -inf if no neuron fired, because such a sample shows no difference.
    """
    fires = neurons != 0
    mass = np.abs(neurons[fires]).astype(np.float64)
    if not len(mass):
        return -np.inf
    fired = scores[fires]
    order = np.argsort(fired)
    dropped = np.cumsum(mass[order])  # magnitude dropped by a threshold just above each score
    n_droppable = int(np.searchsorted(dropped, (1 - recall) * dropped[-1], side="right"))
    return float(fired[order[min(n_droppable, len(order) - 1)]])
