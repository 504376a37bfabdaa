"""Predictors as the decoder sees them.

Their tensors are in the model file, or in a sidecar that hotset built:

    mlp   score = fc2 · relu(fc1 · p)      blk.N.fc1.weight [n_embd, rank], blk.N.fc2.weight [rank, n_ff]
    svd   score = svd_b · (svd_a · h)      blk.N.svd_a.weight [n_embd, rank], blk.N.svd_b.weight [rank, n_ff]

p is the input of the architecture's published predictors (ModelConfig.predictor_input), h the FFN's
normalised input. A neuron is computed unless its score is below the layer's threshold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PredictorKind = Literal["mlp", "svd"]


@dataclass(frozen=True)
class Predictor:
    """The predictors of a whole model.

    thresholds: one per layer. first: per layer, how many leading neurons are always computed and have no
    score (the matrices then have n_ff - first rows); empty: none. An optional tensor blk.N.always.bias [n_ff
    - first] is added to the scores; +inf means that a neuron is always computed.
    """

    kind: PredictorKind
    thresholds: tuple[float, ...]
    first: tuple[int, ...] = ()
