"""The rotation (RoPE) given by a file's keys and tensors, with its scalings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.quants import dequantize
from hotset.model.architectures import Architecture
from hotset.model.keys import (
    LLAMA3_FACTORS,
    LONG_FACTORS,
    MAX_HEAD_DIM,
    SHORT_FACTORS,
    YARN_LOG_MULTIPLIER,
    Keys,
)
from hotset.model.operations import Attention, PositionGain, Rope
from hotset.parameters import shown

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile


@dataclass(frozen=True)
class LongRope:
    """The rotation for contexts beyond the original training context (arXiv 2402.13753).

    n_ctx: the longest context for the layers' normal rotation; rope: the rotation for longer contexts.
    """

    n_ctx: int
    rope: Rope


def windowed_rope_of(keys: Keys, architecture: Architecture, rope: Rope, base: float) -> Rope:
    """Return the rotation of layers with a window, which is never scaled. base: if the file has none."""
    base = keys.real("rope.freq_base_swa", 1e-3, 1e15, base)
    n_rot = rope.n_rot
    if architecture.window_heads:
        n_rot = keys.integer("rope.dimension_count_swa", 2, MAX_HEAD_DIM, window_dim(keys, n_rot))
    return Rope(rope.kind, n_rot, tuple(frequencies(base, n_rot).tolist()))


def window_dim(keys: Keys, head_dim: int) -> int:
    """Return the channels of a head in layers with a window."""
    dim = keys.integer("attention.key_length_swa", 1, MAX_HEAD_DIM, head_dim)
    if keys.integer("attention.value_length_swa", 1, MAX_HEAD_DIM, dim) != dim:
        raise keys.error("attention.value_length_swa", f"is not attention.key_length_swa, {dim}")
    return dim


def frequencies(base: float, n_rot: int) -> np.ndarray:
    """Return base^(-2i / n_rot), float64 [n_rot / 2]."""
    return base ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)


def long_rope_of(
    gguf: GGUFFile, keys: Keys, architecture: Architecture, head_dim: int, n_ctx_train: int
) -> LongRope | None:
    """Return the rotation for long contexts; None for files without factors for it."""
    found = [name for name in (SHORT_FACTORS, LONG_FACTORS) if name in gguf.tensors]
    if architecture.rope is None or not found:
        return None
    if len(found) == 1:
        raise UnsupportedModelError(
            f"the file has only one of {SHORT_FACTORS} and {LONG_FACTORS}: {found[0]}"
        )
    n_ctx = keys.integer("rope.scaling.original_context_length", 1, 1 << 31, n_ctx_train)
    return LongRope(n_ctx, rope_of(gguf, keys, architecture, head_dim, n_ctx_train, LONG_FACTORS))


def rope_of(
    gguf: GGUFFile,
    keys: Keys,
    architecture: Architecture,
    head_dim: int,
    n_ctx_train: int,
    factors: str | None = None,
    base_key: str = "rope.freq_base",
) -> Rope:
    """Return the rotation with the file's scaling applied: none, linear, yarn, or divisors.

    factors: the tensor of divisors. base_key: the key of the frequencies' base.
    """
    factors = factors or (SHORT_FACTORS if SHORT_FACTORS in gguf.tensors else LLAMA3_FACTORS)
    n_rot = keys.integer("rope.dimension_count", 2, head_dim, head_dim)
    if n_rot % 2:
        raise keys.error("rope.dimension_count", f"is {n_rot}, which is odd")
    base = keys.real(base_key, 1e-3, 1e15, 10000.0)
    if alpha := keys.real("rope.scaling.alpha", 0.0, 1e9, 0.0):  # in hunyuan_vl, for any context length
        base *= alpha ** (n_rot / max(n_rot - 2, 1))
    freq = frequencies(base, n_rot)
    if factors in gguf.tensors:  # the scaling of Llama 3 and Phi 3 is a tensor of divisors, not a key
        freq = freq / divisors(gguf, factors, n_rot // 2)

    kind = keys.text("rope.scaling.type") or "linear"
    factor = keys.real("rope.scaling.factor", 0.0, 1e6, keys.get("rope.scale_linear", 0.0)) or 1.0
    magnitude = 1.0
    if kind == "linear":
        freq = freq / factor
    elif kind == "yarn":
        freq, magnitude = _yarn(keys, architecture, freq, base, factor, n_ctx_train)
    elif kind != "none" and not (kind == "longrope" and factors in (SHORT_FACTORS, LONG_FACTORS)):
        raise UnsupportedModelError(
            f"the RoPE scaling {shown(kind)} is not supported; hotset supports none, linear, yarn, "
            f"and longrope with {SHORT_FACTORS} and {LONG_FACTORS}"
        )
    magnitude *= keys.real("rope.scaling.attn_factor", 0.0, 1e3, 1.0)
    if not np.isfinite(freq).all():
        raise FormatError("the file's RoPE frequencies are not finite; the file is damaged")
    assert architecture.rope is not None
    return Rope(architecture.rope, n_rot, tuple(freq.tolist()), magnitude)


def with_axes(rope: Rope, sections: Sequence[int], *, interleaved: bool) -> Rope:
    """Return a rotation by positions of several axes (M-RoPE, arXiv 2409.12191).

    sections: pairs of channels of each axis. interleaved: the pairs take turns: axis a has the pairs a, a +
    3, a + 6, ... below 3 * sections[a], and axis 0 all others. Raises FormatError if pairs are left without
    an axis.
    """
    n = rope.n_rot // 2
    axes = np.zeros(n, int)
    if interleaved:
        for axis in range(1, len(sections)):
            axes[axis : 3 * sections[axis] : 3] = axis
    else:
        if sum(sections) < n:
            raise FormatError(
                f"rope.dimension_sections has {sum(sections)} pairs of channels, and a head has {n}; the "
                "file is damaged"
            )
        axes = np.repeat(np.arange(len(sections)), sections)[:n]
    return replace(rope, axes=tuple(axes.tolist()))


def divisors(gguf: GGUFFile, name: str, n: int) -> np.ndarray:
    info = gguf.tensors[name]
    if tuple(info.shape) != (n,):
        raise UnsupportedModelError(f"the tensor {name} is {list(info.shape)}, expected [{n}]")
    divisors = dequantize(gguf.data(info.name), info.type, info.shape).reshape(n).astype(np.float64)
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise FormatError(f"the tensor {name} holds a number that is not positive and finite")
    return divisors


def _yarn(
    keys: Keys, architecture: Architecture, freq: np.ndarray, base: float, factor: float, n_ctx_train: int
) -> tuple[np.ndarray, float]:
    """Return frequencies and magnitude of YaRN (arXiv 2309.00071).

    Slow channels are divided by `factor`, fast ones unchanged, and a ramp connects them.
    """
    n_ctx_original = keys.integer("rope.scaling.original_context_length", 1, 1 << 31, n_ctx_train)
    beta_fast = keys.real("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0)
    beta_slow = keys.real("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0)
    extrapolate = keys.real("rope.scaling.yarn_ext_factor", 0.0, 1.0, 1.0)
    if base <= 1.0:
        raise keys.error("rope.freq_base", f"is {base:g}, which YaRN cannot scale")

    def channel(rotations: float) -> float:
        """Return the index of the channel pair that turns `rotations` times in the original context."""
        return len(freq) * math.log(n_ctx_original / (rotations * 2 * math.pi)) / math.log(base)

    low, high = channel(beta_fast), channel(beta_slow)
    if architecture.rounded_yarn:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(freq) - 1)
    ramp = np.clip((np.arange(len(freq)) - low) / max(0.001, high - low), 0, 1)
    keep = (1 - ramp) * extrapolate
    magnitude = keys.real("rope.scaling.yarn_attn_factor", 0.0, 1e3, _yarn_magnitude(factor, 1.0))
    if multiplier := keys.real(YARN_LOG_MULTIPLIER, 0.0, 1e3, 0.0):
        if architecture.latent_eps is None:
            magnitude = _yarn_magnitude(factor, 1.0) / _yarn_magnitude(factor, multiplier)
        elif keys.get("rope.scaling.yarn_attn_factor") is None:
            magnitude = 1.0  # latent_yarn_scale includes it
    return freq / factor * (1 - keep) + freq * keep, magnitude


def latent_yarn_scale(keys: Keys) -> float:
    """Return YaRN's factor of attention scores in models with MLA.

    Only for these models, the file's multiplier is a tenth of mscale_all_dim in DeepSeek's config.json.
    """
    if keys.text("rope.scaling.type") != "yarn":
        return 1.0
    factor = keys.real("rope.scaling.factor", 0.0, 1e6, 1.0)
    return _yarn_magnitude(factor, 10 * keys.real(YARN_LOG_MULTIPLIER, 0.0, 1e3, 0.0)) ** 2


def _yarn_magnitude(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def pair_channels(channels: np.ndarray, rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    """Return views of the first and of the second channel of each rotated pair, [..., n_rot / 2].

    channels: [..., n_rot].
    """
    if rope.kind == "norm":
        return channels[..., 0::2], channels[..., 1::2]
    half = rope.n_rot // 2
    return channels[..., :half], channels[..., half:]


def turn(channels: np.ndarray, rope: Rope, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotate channels [..., n_rot] in place by angles whose cosines and sines are [..., n_rot / 2]."""
    first, second = pair_channels(channels, rope)
    first[...], second[...] = first * cos - second * sin, first * sin + second * cos


LARGE_BIAS = 1.0
"""Least length of a pair of channels of a key's bias that a q4_0 cache leaves out at each position."""
MEAN_POSITIONS = 4096
"""Positions over which the mean of the other pairs is taken."""


def bias_of_keys(op: Attention, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two parts of the bias of keys that a q4_0 cache leaves out, float32 [n_head_kv, head_dim].

    bias: the tensor of op.key_bias. The first part is rotated to each position: pairs of channels of at
    least LARGE_BIAS. The second is the same for all keys: the mean of the rotated other pairs, and channels
    that are not rotated.
    """
    assert op.key_bias is not None
    first, rope = op.key_bias.first, op.key_bias.rope
    values = bias[first : first + op.k.width].reshape(op.n_head_kv, op.head_dim).astype(np.float32)
    if rope is None:
        return np.zeros_like(values), values
    large = np.zeros_like(values, bool)
    is_large = np.hypot(*pair_channels(values[:, : rope.n_rot], rope)) >= LARGE_BIAS
    for channels in pair_channels(large[:, : rope.n_rot], rope):
        channels[...] = is_large
    same = np.where(large, 0, values).astype(np.float64)
    cos, sin = (mean.mean(axis=0, dtype=np.float64) for mean in cos_sin(rope, np.arange(MEAN_POSITIONS)))
    turn(same[:, : rope.n_rot], rope, cos, sin)
    return np.where(large, values, np.float32(0)), same.astype(np.float32)


def bias_at(op: Attention, bias: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the bias that a q4_0 cache leaves out at positions [n]: float32 [n, n_head_kv, head_dim]."""
    large, same = bias_of_keys(op, bias)
    out = np.tile(large, (len(positions), 1, 1))
    if op.key_bias is not None and (rope := op.key_bias.rope) is not None:
        cos, sin = (values[:, None] for values in cos_sin(rope, positions))
        turn(out[..., : rope.n_rot], rope, cos, sin)
    out += same
    return out


def position_gain(op: PositionGain, positions: np.ndarray) -> np.ndarray:
    """Return the gain of each position [n], float32 [n, 1], computed in float64."""
    gains = 1 + op.beta * np.log(1.0 + positions // op.length)
    return gains.astype(np.float32)[:, None]


def cos_sin(rope: Rope, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin of the angles of positions, times the magnitude, computed in float64.

    positions: [n], or [n, n_rot / 2] with one for each frequency. Each result is float32 [n, n_rot / 2].
    """
    positions = positions // rope.every * rope.every
    angles = positions.reshape(len(positions), -1).astype(np.float64) * np.asarray(rope.freq)
    cos, sin = np.cos(angles) * rope.magnitude, np.sin(angles) * rope.magnitude
    return cos.astype(np.float32), sin.astype(np.float32)
