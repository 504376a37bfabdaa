"""Checkpoints of RWKV 6 and 7: what their entries and tensors are in a GGUF file of llama.cpp."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.convert.hf_values import integer
from hotset.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

LERPS = {6: "wkvrg", 7: "rwkvag"}  # what the token before counts for, as the rows of one tensor
LERP = re.compile(r"(?:attention\.time_maa|attn\.x)_([rwkvag])")
FUSED = "time_mix_lerp_fused"

NAMES_6 = {
    "ln1": "attn_norm",
    "ln2": "attn_norm_2",
    "attention.time_maa_x": "time_mix_lerp_x",
    "attention.time_maa_w1": "time_mix_w1",
    "attention.time_maa_w2": "time_mix_w2",
    "attention.time_decay": "time_mix_decay",
    "attention.time_decay_w1": "time_mix_decay_w1",
    "attention.time_decay_w2": "time_mix_decay_w2",
    "attention.time_faaaa": "time_mix_first",
    "attention.receptance": "time_mix_receptance",
    "attention.key": "time_mix_key",
    "attention.value": "time_mix_value",
    "attention.gate": "time_mix_gate",
    "attention.output": "time_mix_output",
    "attention.ln_x": "time_mix_ln",
    "feed_forward.time_maa_k": "channel_mix_lerp_k",
    "feed_forward.time_maa_r": "channel_mix_lerp_r",
    "feed_forward.key": "channel_mix_key",
    "feed_forward.receptance": "channel_mix_receptance",
    "feed_forward.value": "channel_mix_value",
}
NAMES_7 = {
    "attn_norm": "attn_norm",
    "ffn_norm": "attn_norm_2",
    "attn.r_proj": "time_mix_receptance",
    "attn.k_proj": "time_mix_key",
    "attn.v_proj": "time_mix_value",
    "attn.o_proj": "time_mix_output",
    "attn.k_k": "time_mix_k_k",
    "attn.k_a": "time_mix_k_a",
    "attn.r_k": "time_mix_r_k",
    "attn.g_norm": "time_mix_ln",
    **{f"attn.{x}_lora.lora.0": f"time_mix_{x}1" for x in "wavg"},
    **{f"attn.{x}_lora.lora.2": f"time_mix_{x}2" for x in "wavg"},
    **{f"attn.{x}_lora.lora.2.bias": f"time_mix_{x}0.weight" for x in "wav"},
    "ffn.x_k": "channel_mix_lerp_k",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
}
_TRANSPOSED = ("time_mix_w1", "time_mix_w2", "time_mix_decay_w1", "time_mix_decay_w2")  # of RWKV 6
_VECTORS = ("time_mix_lerp_x", "time_mix_decay", "time_mix_r_k")
_SQUARE = ("receptance", "key", "value", "gate", "output")
_HALVED = ("time_mix_output", "channel_mix_value")


def ffn_width_6(n_embd: int) -> int:
    """Of RWKV 6 where config.json does not say it."""
    return n_embd * 7 // 2 // 32 * 32


class HFRwkv:
    """What the entries of a checkpoint say. version: 6 or 7."""

    def __init__(self, config: Mapping[str, Any], version: int, d: int) -> None:
        self.version, self.d = version, d
        self.dim = integer(config, "head_size" if version == 6 else "head_dim", 64, d)
        if d % self.dim:
            raise UnsupportedModelError(f"a width of {d} with heads of {self.dim} channels is not supported")
        self.halves = 0
        if version == 6:
            if config.get("rescale_every"):
                self.halves = integer(config, "rescale_every", 6, 1 << 12)
            # No entry says these: they are the authors' for models of a width.
            self.ranks = {"time_mix_extra_dim": 64 if d == 4096 else 32}
            self.ranks |= {"time_decay_extra_dim": 128 if d == 4096 else 64}
            return
        ranks = (
            ("attention.decay_lora_rank", "decay_low_rank_dim", 0.5, 1.8),
            ("attention.iclr_lora_rank", "a_low_rank_dim", 0.5, 1.8),
            ("attention.value_residual_mix_lora_rank", "v_low_rank_dim", 0.5, 1.3),
            ("attention.gate_lora_rank", "gate_low_rank_dim", 0.8, 0.6),
        )
        self.ranks = {
            key: integer(config, entry, max(1, round(d**power * factor / 32)) * 32, 1 << 16)
            for key, entry, power, factor in ranks
        }

    def keys(self) -> dict[str, Any]:
        """Keys of the GGUF file."""
        keys: dict[str, Any] = {"wkv.head_size": self.dim, "attention.head_count": 0, **self.ranks}
        return keys if self.version == 7 else keys | {"rescale_every_n_layers": self.halves}

    def shape(self, stem: str, layer: int, n_ff: int) -> tuple[int, ...] | None:
        """Of a tensor of a layer, outermost first; None: it is as wide as the model."""
        d = self.d
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(
                (f"time_mix_{x}" for x in ("receptance", "key", "value", "gate", "output")), (d, d)
            ),
            "channel_mix_receptance": (d, d),
            "channel_mix_key": (n_ff, d),
            "channel_mix_value": (d, n_ff),
            FUSED: (len(LERPS[self.version]), 1, 1, d),
        }
        if self.version == 6:
            mix, decay = self.ranks.values()
            shapes |= {"time_mix_w1": (5 * mix, d), "time_mix_w2": (5, d, mix)}
            shapes |= {"time_mix_decay_w1": (decay, d), "time_mix_decay_w2": (d, decay)}
            return (shapes | {"time_mix_first": (d // self.dim, self.dim)}).get(stem)
        for name, rank in zip("wavg", self.ranks.values(), strict=True):
            if name == "v" and layer == 0:
                rank = self.ranks["attention.iclr_lora_rank"]
            shapes |= {f"time_mix_{name}1": (rank, d), f"time_mix_{name}2": (d, rank)}
        return shapes.get(stem)

    def targets(self, target: str, layer: int) -> list[str]:
        """Of a tensor of a layer. llama.cpp asks for more of the first layer, and does not read it."""
        is_read_twice = self.version == 7 and layer == 0 and re.match("time_mix_a[012]", target)
        return [target, target.replace("time_mix_a", "time_mix_v")] if is_read_twice else [target]

    def values(self, values: np.ndarray, stem: str) -> np.ndarray:
        """A tensor of the checkpoint as the file has it."""
        if stem == FUSED:
            return values.reshape(1, 1, -1)
        if self.version == 6 and stem in _TRANSPOSED:
            return values.swapaxes(-1, -2)
        vector = stem.startswith("channel_mix_lerp") or stem in _VECTORS
        return values.reshape(-1) if vector else values

    def factors(self, stem: str, layer: int) -> np.ndarray | None:
        """What a matrix is multiplied by, since the stream is halved now and then; None: nothing."""
        n = layer // self.halves if self.halves and stem in _HALVED else 0
        return np.array([0.5**n], np.float32) if n else None
