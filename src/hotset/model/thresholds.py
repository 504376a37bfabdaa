"""What small means in a layer: the magnitudes below which inputs and neurons count as zero.

A threshold of 0 leaves its matrix as it is. Where the values stand in the graph: model/decoder.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

ThresholdName = Literal["gate", "attn_in", "attn_out", "ffn_in", "down_in"]
THRESHOLD_NAMES: tuple[ThresholdName, ...] = get_args(ThresholdName)


@dataclass(frozen=True, kw_only=True)
class LayerThresholds:
    """Of one layer; each at least 0 and finite.

    gate: of a neuron's activated gate, of its activation where there is no gate (CATS, arXiv 2404.08763).
    attn_in, attn_out, ffn_in, down_in: of what q, k and v read, what attn_output reads, what gate and up
    read, what down reads (TEAL, arXiv 2408.14690).
    """

    gate: float = 0.0
    attn_in: float = 0.0
    attn_out: float = 0.0
    ffn_in: float = 0.0
    down_in: float = 0.0

    @property
    def of_ffn(self) -> bool:
        """Whether a threshold of the FFN is other than 0."""
        return bool(self.gate or self.ffn_in or self.down_in)

    @property
    def has_thresholds(self) -> bool:
        """Whether any is other than 0."""
        return any(value for _, value in self.items())

    def items(self) -> Iterator[tuple[ThresholdName, float]]:
        """Name and value of each, in the order above."""
        for name in THRESHOLD_NAMES:
            yield name, getattr(self, name)
