"""Checkpoints of RWKV 6 and 7: their entries and tensors as llama.cpp has them in GGUF files."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from hotset.convert.hf_part import Facts, FamilyPart
from hotset.convert.hf_values import integer
from hotset.convert.sources import Origin, Source
from hotset.errors import UnsupportedModelError

FUSED = "time_mix_lerp_fused"
"""The weights of the previous token: a tensor of the checkpoint is one row of it, with the number after #."""

_HALVED = ("time_mix_output", "channel_mix_value")


def ffn_width_6(n_embd: int) -> int:
    """Return the FFN's width of RWKV 6 if config.json does not state it."""
    return n_embd * 7 // 2 // 32 * 32


class Rwkv6(FamilyPart):
    """RWKV 6.

    n_fused: tensors that the file joins to one. vectors: tensors that have more dimensions in checkpoints.
    """

    n_fused: ClassVar[int] = 5
    vectors: ClassVar[tuple[str, ...]] = ("time_mix_lerp_x", "time_mix_decay")
    transposed: ClassVar[tuple[str, ...]] = (
        "time_mix_w1", "time_mix_w2", "time_mix_decay_w1", "time_mix_decay_w2"
    )  # fmt: skip
    head_entry: ClassVar[str] = "head_size"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.dim = integer(facts.raw, self.head_entry, 64, facts.n_embd)
        if facts.n_embd % self.dim:
            raise UnsupportedModelError(
                f"a width of {facts.n_embd} with heads of {self.dim} channels is not supported"
            )

    def keys(self) -> dict[str, Any]:
        wide = self.facts.n_embd == 4096
        return {
            "wkv.head_size": self.dim,
            "attention.head_count": 0,
            # No entry gives the ranks: these are the authors' choices for a width.
            "time_mix_extra_dim": 64 if wide else 32,
            "time_decay_extra_dim": 128 if wide else 64,
            "rescale_every_n_layers": self._halves(),
        }

    def _halves(self) -> int:
        """Return the number of layers after which the residual stream is halved; 0: never."""
        raw = self.facts.raw
        return integer(raw, "rescale_every", 6, 1 << 12) if raw.get("rescale_every") else 0

    def n_parts(self, stem: str) -> int | None:
        return self.n_fused if stem == FUSED else None

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        return {"time_mix_first": (self.facts.n_embd // self.dim, self.dim)}

    def split(self, values: np.ndarray, i: int, stems: list[str]) -> np.ndarray | None:
        stem = stems[i]
        if stem == FUSED:
            return values.reshape(1, 1, -1)
        if stem in self.transposed:
            return values.swapaxes(-1, -2)
        return values.reshape(-1) if stem.startswith("channel_mix_lerp") or stem in self.vectors else values

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        halves = self._halves()
        n = layer // halves if halves and stem in _HALVED else 0
        return Origin(values, factors=np.array([0.5**n], np.float32)) if n else None


class Rwkv7(Rwkv6):
    """RWKV 7, whose later layers mix their values with the values of the first layer."""

    n_fused = 6
    vectors = ("time_mix_r_k",)
    transposed = ()
    head_entry = "head_dim"

    def keys(self) -> dict[str, Any]:
        ranks = (
            ("attention.decay_lora_rank", "decay_low_rank_dim", 0.5, 1.8),
            ("attention.iclr_lora_rank", "a_low_rank_dim", 0.5, 1.8),
            ("attention.value_residual_mix_lora_rank", "v_low_rank_dim", 0.5, 1.3),
            ("attention.gate_lora_rank", "gate_low_rank_dim", 0.8, 0.6),
        )
        raw, d = self.facts.raw, self.facts.n_embd
        return {"wkv.head_size": self.dim, "attention.head_count": 0} | {
            key: integer(raw, entry, max(1, round(d**power * factor / 32)) * 32, 1 << 16)
            for key, entry, power, factor in ranks
        }

    def reads(self, name: str) -> bool:
        return not name.startswith(f"{self.facts.layers}.0.attn.v_lora.")

    def targets(self, targets: list[str], layer: int) -> list[str]:
        """Add a second tensor in the first layer, which llama.cpp requires and does not read."""
        (target,) = targets
        is_needed = layer == 0 and target.startswith(("time_mix_a0", "time_mix_a1", "time_mix_a2"))
        return [target, target.replace("time_mix_a", "time_mix_v")] if is_needed else targets

    def _halves(self) -> int:
        return 0
