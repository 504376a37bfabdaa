"""Keys of a model file: names, limits, and a reader that checks types and ranges.

hotset reads these keys in addition to the standard ones (gguf's `docs/gguf.md`):

- `<arch>.activation_sparsity_scale` (llama.cpp's, f32 array): each layer's multiplier of a Gaussian top-k
  before the activation; -inf: none.
- `<arch>.hidden_activation` (standard, string): silu, gelu, gelu_tanh, relu, relu2, fatrelu or drelu.
- `<arch>.ssm.norm_rms_epsilon` (f32): epsilon of the norms of dt, B and C in Falcon Mamba; the default is
  `attention.layer_norm_rms_epsilon`.
- `powerinfer.sparse_threshold` (f32, PowerInfer's): a neuron with a lower predicted score is skipped.
- `hotset.predictor_masks` (bool): the mask of the file's predictors is part of the model (TurboSparse): in
  every mode, a neuron with a score below the threshold is zero.
- `hotset.fatrelu_threshold` (f32): t of FATReLU, f(x) = x if x >= t else 0; required with fatrelu.
- `hotset.up_activation` (string): activation of the up projection; relu with a relu gate is dReLU,
  relu(gate) * relu(up) (TurboSparse, arXiv 2406.05955).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from hotset.errors import FormatError, UnsupportedModelError
from hotset.model.operations import Scoring
from hotset.parameters import shown

UP_ACTIVATION_KEY = "hotset.up_activation"
FATRELU_THRESHOLD_KEY = "hotset.fatrelu_threshold"
SPARSE_THRESHOLD_KEY = "powerinfer.sparse_threshold"
YARN_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
MIXER_EPSILON = "ssm.norm_rms_epsilon"
TOP_K_KEY, MAX_MULTIPLIER, MAX_STREAMS = "activation_sparsity_scale", 100.0, 16
MAX_NGRAM, MAX_NGRAM_HEADS = 16, 1024  # kMaxNgram and kMaxNgramHeads of csrc/ops/ngrams.cpp
PREDICTOR_MASKS_KEY = "hotset.predictor_masks"
LLAMA3_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
NormKind = Literal["rms", "layer"]
# Limits of the native core: kMaxHeadDim (csrc/kernels/kernels.h), kMaxGroup, kMaxConvKernel
# and kMaxStateHeads (csrc/plan.h), and of an int.
MAX_HEAD_DIM, MAX_GROUP, MAX_CONV_KERNEL, MAX_STATE_HEADS, MAX_WINDOW = 512, 256, 64, 1024, (1 << 31) - 1
MAX_EXPERTS = MAX_LATENT_HEADS = 1024  # kMaxChunks of csrc/threads.h
MAX_USED_EXPERTS = 128  # kMaxChunks / kRanges of csrc/ops/experts.cpp
SCORINGS: dict[int, Scoring] = {  # expert_gating_func
    1: "softmax", 2: "sigmoid", 3: "softmax_chosen", 4: "sqrt_softplus",
}  # fmt: skip
EPSILON_KEYS: dict[NormKind, str] = {
    "rms": "attention.layer_norm_rms_epsilon",
    "layer": "attention.layer_norm_epsilon",
}


class Keys:
    """A reader of `<arch>.<key>` that checks types and ranges; every FormatError names the key."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def error(self, key: str, what: str) -> FormatError:
        return FormatError(f"the file's key {self.architecture}.{key} {what}; the file is damaged")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        return self._checked_integer(key, value, low, high)

    def _checked_integer(self, key: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise self.error(key, f"must be an integer, not {shown(value)}")
        if not low <= value <= high:
            raise self.error(key, f"is {value}, outside {low} to {high}")
        return int(value)

    def per_layer(
        self, key: str, n_layer: int, low: int, high: int, default: int | None = None, *, more: bool = False
    ) -> tuple[int, ...]:
        """Return an integer per layer, from one for all layers or an array.

        The array may also cover the layers for multi-token prediction, or (more) further ones.
        """
        value = self.get(key, default)
        if not is_array(value):
            return (self.integer(key, low, high, default),) * n_layer
        n_extra = self.integer("nextn_predict_layers", 0, 1 << 12, 0)
        if len(value) not in (n_layer, n_layer + n_extra) and not (more and len(value) > n_layer):
            raise self.error(key, f"has {len(value)} entries for {n_layer} layers")
        return tuple(self._checked_integer(key, v, low, high) for v in value[:n_layer])

    def uniform(self, key: str, n_layer: int, low: int, high: int, default: int | None = None) -> int:
        """Return the one integer that all layers have; otherwise like `per_layer`."""
        values = set(self.per_layer(key, n_layer, low, high, default))
        return self.one(key, values)

    def one(self, key: str, values: set[int]) -> int:
        """Return the only one of a key's values. Raises UnsupportedModelError if there are several."""
        if len(values) > 1:
            raise UnsupportedModelError(
                f"the file's key {self.architecture}.{key} differs between layers, which is not supported"
            )
        return values.pop()

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
            raise self.error(key, f"must be a number, not {shown(value)}")
        if not low <= value <= high:  # also false for NaN
            raise self.error(key, f"is {value}, outside {low:g} to {high:g}")
        return float(value)

    def factor(self, key: str, default: float = 1.0) -> float:
        """Return a positive number within the range of float32, as is its inverse.

        `default` replaces a missing key, and 0, which some converters write.
        """
        value = self.real(key, 0.0, 1e9, 0.0)
        if 0 < value < 1e-9:
            raise self.error(key, f"is {value:g}, below 1e-09")
        return value or default

    def integers(self, key: str, n: int, low: int, high: int) -> tuple[int, ...]:
        """Return an array of n integers."""
        value = self.get(key)
        if value is None or not is_array(value):
            raise self.error(key, "must be an array of integers")
        if len(value) != n:
            raise self.error(key, f"has {len(value)} entries, but should have {n}")
        return tuple(self._checked_integer(key, v, low, high) for v in value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool | np.bool_):
            raise self.error(key, f"must be true or false, not {shown(value)}")
        return bool(value)

    def flags(self, key: str, n_layer: int) -> tuple[bool, ...]:
        """Return a truth value per layer. The array may also cover layers for multi-token prediction."""
        value = self.get(key)
        n_extra = self.integer("nextn_predict_layers", 0, 1 << 12, 0)
        right = is_array(value) and len(value) in (n_layer, n_layer + n_extra)
        if not right or not all(isinstance(v, bool | np.bool_) for v in value):
            raise self.error(key, f"must hold true or false for {n_layer} layers")
        return tuple(bool(v) for v in value[:n_layer])

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"must be a string, not {shown(value)}")
        return value


def number(metadata: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number of a key without an architecture prefix; None if the key is missing."""
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        raise FormatError(f"the file's key {key} must be a number, not {shown(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise FormatError(f"the file's key {key} is {number}; the file is damaged")
    return number


def is_array(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)
