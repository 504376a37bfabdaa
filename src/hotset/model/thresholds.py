"""Activation thresholds of a layer: the magnitudes below which inputs and neurons count as zero.

A threshold of 0 changes nothing. model/decoder.py shows where the values are in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

ThresholdName = Literal["gate", "attn_in", "attn_out", "ffn_in", "down_in"]
THRESHOLD_NAMES: tuple[ThresholdName, ...] = get_args(ThresholdName)


@dataclass(frozen=True, kw_only=True)
class LayerThresholds:
    """The thresholds of one layer; each is finite and at least 0.

    gate: of a neuron's activated gate or, without a gate, its activation (CATS, arXiv 2404.08763).
    attn_in, attn_out, ffn_in, down_in: of the inputs of q, k and v, of attn_output, of gate and up, and of
    down (TEAL, arXiv 2408.14690).
    """

    gate: float = 0.0
    attn_in: float = 0.0
    attn_out: float = 0.0
    ffn_in: float = 0.0
    down_in: float = 0.0

    @property
    def of_ffn(self) -> bool:
        """Return whether a threshold of the FFN is nonzero."""
        return bool(self.gate or self.ffn_in or self.down_in)

    @property
    def has_thresholds(self) -> bool:
        """Return whether any threshold is nonzero."""
        return any(value for _, value in self.items())

    def items(self) -> Iterator[tuple[ThresholdName, float]]:
        """Yield the name and value of each, in the order above."""
        for name in THRESHOLD_NAMES:
            yield name, getattr(self, name)
