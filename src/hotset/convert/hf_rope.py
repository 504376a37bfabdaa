"""The rotation in a config.json: channels, base, scalings and their divisors."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from hotset.convert.hf_part import Facts
from hotset.convert.hf_values import integer, number
from hotset.errors import FormatError, UnsupportedModelError
from hotset.model.keys import LLAMA3_FACTORS, LONG_FACTORS, MAX_HEAD_DIM, SHORT_FACTORS


def neighbours(n_rows: int, head_dim: int) -> np.ndarray:
    """Return the rows of heads from halves to neighbours: i and i + head_dim / 2 become 2i and 2i + 1."""
    if head_dim % 2:
        raise FormatError(f"config.json has heads of {head_dim} channels, which cannot be rotated in pairs")
    return np.arange(n_rows).reshape(-1, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)


class HFRope:
    """RoPE in a config.json. A class of checkpoints may name a subclass (HFClass.rope).

    Raises UnsupportedModelError for scalings that hotset does not compute, FormatError for invalid values.

    as_tensors: scalings without keys; they are in the tensor rope_freqs.weight.
    """

    as_tensors: ClassVar[tuple[str, ...]] = ("default", "llama3")

    def __init__(self, facts: Facts) -> None:
        self.facts, self.raw, self.row = facts, facts.raw, facts.row
        self.n_ctx, self.head_dim = facts.n_ctx, facts.head_dim

    def resolved(self, rope: dict[str, Any], kind: Any) -> Any:
        """Return the scaling that a model of the class means by `kind`, and complete its parameters."""
        return kind

    def own_keys(self, rope: dict[str, Any]) -> dict[str, Any]:
        """Return keys that only models of the class have."""
        return {}

    def magnitude_keys(self, rope: dict[str, Any], log_factor: float) -> dict[str, Any]:
        """Return the keys of YaRN's factor for queries and keys. log_factor: 0.1 * log(factor)."""
        if rope.get("attention_factor") is not None:
            return {"rope.scaling.yarn_attn_factor": float(number(rope, "attention_factor"))}
        if not (rope.get("mscale") and rope.get("mscale_all_dim")):
            return {}
        above, below = (log_factor * number(rope, k) + 1 for k in ("mscale", "mscale_all_dim"))
        if not below > 0:
            raise FormatError("mscale_all_dim in config.json makes a RoPE scaling that divides by zero")
        return {"rope.scaling.yarn_attn_factor": above / below}

    def _ropes(self, layers: str) -> dict[str, Any]:
        """Return the parameters of the rotation in `layers` ("full_attention" or "sliding_attention").

        If config.json does not distinguish them, they are the parameters of all layers.
        """
        rope = self.raw.get("rope_scaling") or self.raw.get("rope_parameters")
        if rope is None:
            rope = self.facts.default_rope
        if isinstance(rope, dict) and rope.keys() & {"full_attention", "sliding_attention"}:
            rope = rope.get(layers) or {}
        elif layers == "sliding_attention":
            rope = {}
        if not isinstance(rope, dict):
            raise FormatError("rope_parameters in config.json must be an object")
        return dict(rope)

    def parameters(self) -> dict[str, Any]:
        """Return RoPE's parameters in the current spelling (older: rope_theta and rope_scaling, "type")."""
        config, rope = self.raw, self._ropes("full_attention")
        kind = rope.get("rope_type", rope.get("type", "default"))
        kind = self.resolved(rope, kind)
        if kind == "mrope":  # in a text all dimensions of a position are equal
            kind = "default"
        if kind == "su" or (kind == "yarn" and "long_factor" in rope):  # Phi 3's first names for it
            kind = "longrope"
        rope["rope_type"] = kind
        rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        original = "original_max_position_embeddings"
        if config.get(original) is not None:  # it overrides the entry of the scaling
            rope[original] = config[original]
        rope.setdefault(original, self.n_ctx)
        return rope

    def windowed_base(self, default: float) -> float:
        """Return the base of the rotation in layers with a window, which is never scaled.

        default: the base if rope_parameters has none. Raises UnsupportedModelError for a scaling.
        """
        rope = self._ropes("sliding_attention")
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UnsupportedModelError(
                "a RoPE scaling of layers with a window in config.json is not supported"
            )
        return float(number(rope, "rope_theta", default))

    def unscaled_keys(self, default: float) -> dict[str, Any]:
        """Return the keys of layers with a window whose rotation is never scaled.

        default: their base if rope_parameters has none, as in transformers 5. Raises UnsupportedModelError
        for a scaling.
        """
        base, full = self.windowed_base(default), float(number(self.parameters(), "rope_theta"))
        return {} if base == full else {"rope.freq_base_swa": base}

    def _n_rot(self, rope: dict[str, Any]) -> int:
        """Return the number of channels of a head that are rotated."""
        if self.facts.n_rot is not None:
            return self.facts.n_rot
        factor = number(rope, "partial_rotary_factor", number(self.raw, "partial_rotary_factor", 1.0))
        if self.facts.partial and self.raw.get("rotary_dim") is not None:
            factor = integer(self.raw, "rotary_dim", high=self.head_dim) / self.head_dim
        if factor != 1.0 and not self.facts.partial:
            raise UnsupportedModelError(
                "a partial_rotary_factor other than 1 in config.json is not supported"
            )
        n_rot = int(self.head_dim * factor)
        if n_rot < 2 or n_rot % 2 or n_rot > self.head_dim:
            raise FormatError(f"config.json asks for a rotation of {n_rot} of {self.head_dim} channels")
        return n_rot

    def keys(self) -> dict[str, Any]:
        """Return the keys of the file."""
        rope = self.parameters()
        kind = rope["rope_type"]
        keys: dict[str, Any] = {
            "rope.dimension_count": self._n_rot(rope),
            "rope.freq_base": float(number(rope, "rope_theta")),
        }
        keys |= self.own_keys(rope)
        if (tempered := self.row.tempered) and rope.get("llama_4_scaling_beta"):
            keys["attention.temperature_scale"] = float(number(rope, "llama_4_scaling_beta"))
            keys[tempered] = integer(rope, "original_max_position_embeddings")
        if kind in self.as_tensors:
            return keys
        if kind not in ("linear", "yarn", "longrope"):
            raise UnsupportedModelError(
                f"the RoPE scaling {str(kind)[:60]!r} in config.json is not supported; supported are linear, "
                "yarn, longrope, llama3"
            )
        original = integer(rope, "original_max_position_embeddings")
        if kind == "longrope":  # its factors are tensors
            keys["rope.scaling.original_context_length"] = original
            keys["rope.scaling.attn_factor"] = self._longrope_magnitude(rope, original)
            return keys
        keys["rope.scaling.type"] = kind
        keys["rope.scaling.factor"] = float(number(rope, "factor", self.n_ctx / original))
        if kind == "yarn":
            rounded = self.row.rounded_yarn
            if (rope.get("truncate", True) is not False) != rounded:
                raise UnsupportedModelError(
                    f"YaRN with truncate set to {str(not rounded).lower()} in config.json is not supported"
                )
            keys["rope.scaling.original_context_length"] = original
            keys["rope.scaling.yarn_beta_fast"] = float(number(rope, "beta_fast", 32.0))
            keys["rope.scaling.yarn_beta_slow"] = float(number(rope, "beta_slow", 1.0))
            keys |= self.magnitude_keys(rope, 0.1 * math.log(max(keys["rope.scaling.factor"], 1.0)))
        return keys

    def sections(self) -> list[int]:
        """Return the pairs of channels for time, height, width and another dimension of a position.

        For a text they have no effect. But llama.cpp loads no file without the key, and aborts if the
        sections exceed a head. Default: a third each, which is 11, 11, 10 in published models.
        """
        rope = self.parameters()
        found = rope.get("mrope_section", rope.get("xdrope_section"))
        if found is None:
            found = [(self._n_rot(rope) // 2 + 2 - i) // 3 for i in range(3)]
        if (
            not isinstance(found, list)
            or not 1 <= len(found) <= 4
            or any(type(n) is not int or not 0 <= n <= MAX_HEAD_DIM for n in found)
        ):
            raise FormatError(
                f"mrope_section in config.json must hold up to 4 integers from 0 to {MAX_HEAD_DIM}"
            )
        return found + [0] * (4 - len(found))

    def _longrope_magnitude(self, rope: dict[str, Any], original: int) -> float:
        """Return the factor of sines and cosines, which grows with context / original context."""
        if rope.get("attention_factor") is not None:
            return float(number(rope, "attention_factor"))
        factor = number(rope, "factor", self.n_ctx / original)
        if factor <= 1 or original < 2:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(original))

    def divisors(self) -> dict[str, np.ndarray]:
        """Return the scalings that GGUF stores as tensors: a divisor per frequency, float32 [n_rot / 2]."""
        if self.row.rope is None:
            return {}
        rope = self.parameters()
        if rope["rope_type"] == "llama3":
            return {LLAMA3_FACTORS: self._llama3_divisors(rope)}
        if rope["rope_type"] == "longrope":
            names = {SHORT_FACTORS: "short_factor", LONG_FACTORS: "long_factor"}
            return {name: self._factors(rope, entry) for name, entry in names.items()}
        return {}

    def _factors(self, rope: dict[str, Any], entry: str) -> np.ndarray:
        n, values = self._n_rot(rope) // 2, rope.get(entry)
        if not isinstance(values, list) or len(values) != n:
            raise FormatError(f"{entry} in config.json must be a list of {n} numbers")
        numbers = [number({entry: value}, entry) for value in values]
        if not min(numbers) > 0:
            raise FormatError(f"{entry} in config.json holds a number that is not above 0")
        return np.array(numbers, np.float32)

    def _llama3_divisors(self, rope: dict[str, Any]) -> np.ndarray:
        """Return the divisors of Llama 3.1.

        Channels that turn less than low_freq_factor times in the original context are slowed by `factor`.
        Those that turn more than high_freq_factor times do not change. Between them 1 / divisor is
        interpolated.
        """
        factor, low, high = (number(rope, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
        base = float(number(rope, "rope_theta"))
        if not (factor > 0 and base > 0 and low < high):
            raise FormatError(
                f"the RoPE scaling in config.json divides by zero: factor {factor:g}, rope_theta {base:g}, "
                f"low_freq_factor {low:g}, high_freq_factor {high:g}"
            )
        n_rot = self._n_rot(rope)
        freq = base ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)
        turns = integer(rope, "original_max_position_embeddings") * freq / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
