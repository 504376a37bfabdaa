"""Pooling of hidden states to a vector or a score, and the layers that a file has after the last norm.

The reference is llama.cpp's build_pooling and build_dense_out (src/llama-graph.cpp). Tensors and keys have
llama.cpp's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from hotset.backends.reference import ACTIVATIONS, softmax
from hotset.errors import FormatError, InvalidRequestError, UnsupportedModelError
from hotset.formats.quants import dequantize
from hotset.formats.source import WeightSource
from hotset.parameters import shown

Pooling = Literal["none", "mean", "cls", "last", "rank"]
_BY_NUMBER: dict[int, Pooling] = {0: "mean", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # 0: unspecified
_NAMES = "none, mean, cls, last and rank"
_PROBABILITIES = ("qwen3", "qwen3vl")  # architectures whose classifier ends with a softmax


def pooling_of(metadata: Mapping[str, Any], given: str | None) -> Pooling:
    """Return how token vectors become one vector: by `given`, the file's pooling_type, or the mean.

    Raises InvalidRequestError if `given` is unknown or if the file is a reranker, which yields no vectors,
    and UnsupportedModelError if the file's pooling_type is unknown.
    """
    if given is not None:
        for pooling in get_args(Pooling):
            if given == pooling:
                return pooling  # type: ignore[no-any-return]
        raise InvalidRequestError(f"pooling must be one of {_NAMES}, not {shown(given)}")
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 1)
    if type(number) is not int or number not in _BY_NUMBER:
        raise UnsupportedModelError(
            f"the file's pooling_type {shown(number)} is unknown to hotset; choose a pooling: one of {_NAMES}"
        )
    if _BY_NUMBER[number] == "rank":
        raise InvalidRequestError(
            "the model is a reranker, which scores documents and has no pooling for vectors; use rerank, or "
            "choose a pooling: mean, cls or last"
        )
    return _BY_NUMBER[number]


class _Linear(NamedTuple):
    """A linear layer. weight: float32 [n_out, n_in]. bias: float32 [n_out]."""

    weight: np.ndarray
    bias: np.ndarray | None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Map float64 [n_in] to [n_out]. Not a BLAS, whose order of additions depends on the machine."""
        out: np.ndarray = (self.weight * x).sum(axis=1)
        return out if self.bias is None else out + self.bias


class Head:
    """The layers after a file's last norm: projections of a vector, and a reranker's classifier.

    width: of a hidden state. out_width: of a vector. labels: names of the classifier's outputs. causal:
    whether the last token has attended to all others.
    """

    def __init__(
        self, weights: WeightSource, metadata: Mapping[str, Any], width: int, *, causal: bool = True
    ) -> None:
        """Read the tensors. Raises FormatError if they do not fit together."""
        self._weights, self._metadata, self._causal = weights, metadata, causal
        self._architecture = metadata.get("general.architecture")
        self.width = width
        self._projections, self.out_width = self._linears(("dense_2", "dense_3"))
        self._hidden, n_hidden = self._linears(("cls",))
        norm = self._weights.tensors.get("cls.norm.weight") if self._hidden else None
        self._norm = None if norm is None else self._vector(norm.name, n_hidden)
        eps = self._key("attention.layer_norm_epsilon", None)
        self._eps = eps if isinstance(eps, float) else 1e-5
        self._output, self.n_labels = self._linears(("cls.output",), n_hidden)
        self.labels = self._labels()

    @property
    def ranks(self) -> bool:
        """Return whether there is a classifier."""
        return bool(self._hidden or self._output)

    @property
    def ranked_state(self) -> Pooling:
        """Return which state the classifier reads."""
        named = {1: "mean", 2: "cls", 3: "last"}.get(self._key("classifier.pooling_type", 0))
        if named is not None:
            return named  # type: ignore[return-value]
        if self._architecture == "modern-bert":
            return "mean"
        return "last" if self._causal else "cls"

    def vector(self, state: np.ndarray) -> np.ndarray:
        """Project a state, float64 [width], to a vector, [out_width]."""
        for projection in self._projections:
            state = projection(state)
        return state

    def scores(self, state: np.ndarray) -> np.ndarray:
        """Return a score per label, float64 [n_labels], from the state that the classifier reads."""
        for hidden in self._hidden:
            state = hidden(state)
            gelu = self._architecture == "modern-bert"
            state = ACTIVATIONS["gelu"](state, np.float32(0)) if gelu else np.tanh(state)
        if self._norm is not None:
            state = state - state.mean()
            state = state / np.sqrt((state * state).mean() + self._eps) * self._norm
        for output in self._output:
            state = output(state)
        return softmax(state) if self._architecture in _PROBABILITIES else state

    def _key(self, name: str, default: Any) -> Any:
        return self._metadata.get(f"{self._architecture}.{name}", default)

    def _labels(self) -> tuple[str, ...]:
        labels = self._key("classifier.output_labels", None)
        if not self.ranks or not isinstance(labels, list) or len(labels) != self.n_labels:
            return ()
        return tuple(map(str, labels))

    def _linears(self, names: tuple[str, ...], width: int | None = None) -> tuple[list[_Linear], int]:
        """Return the file's layers among `names`, chained in order, and the width of the last output."""
        found, width = [], width or self.width
        for name in names:
            info = self._weights.tensors.get(f"{name}.weight")
            if info is None:
                continue
            weight = read(self._weights, info.name)
            if info.shape[:1] != (width,) or len(info.shape) > 2:
                raise FormatError(
                    f"the tensor {info.name} has the shape {list(info.shape)}, "
                    f"but its input has {width} values"
                )
            weight, width = weight.reshape(-1, width), weight.size // width
            bias = f"{name}.bias"
            found.append(
                _Linear(weight, self._vector(bias, width) if bias in self._weights.tensors else None)
            )
        return found, width

    def _vector(self, name: str, width: int) -> np.ndarray:
        vector = read(self._weights, name)
        if vector.shape != (width,):
            raise FormatError(
                f"the tensor {name} has the shape {list(vector.shape)}, but must have {width} values"
            )
        return vector


def read(weights: WeightSource, name: str) -> np.ndarray:
    """Return a tensor as float32, outermost dimension first."""
    info = weights.tensors[name]
    return dequantize(np.asarray(weights.data(name)), info.type, info.shape)
