"""What small means in a layer: the magnitudes below which inputs and neurons count as zero.

A cutoff of 0 leaves its matrix as it is. Where the values stand in the graph: model/decoder.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

CutoffName = Literal["gate", "attn_in", "attn_out", "ffn_in", "down_in"]
CUTOFF_NAMES: tuple[CutoffName, ...] = get_args(CutoffName)


@dataclass(frozen=True, kw_only=True)
class LayerCutoffs:
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
        """Whether something of the FFN is cut."""
        return bool(self.gate or self.ffn_in or self.down_in)

    @property
    def cuts(self) -> bool:
        """Whether anything is cut."""
        return any(value for _, value in self.items())

    def items(self) -> Iterator[tuple[CutoffName, float]]:
        """Name and value of each, in the order above."""
        for name in CUTOFF_NAMES:
            yield name, getattr(self, name)
