"""The recurrent layers that a config.json has: their sizes, and the keys that say them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from hotset.convert.checkpoints.classes import HFClass
from hotset.convert.hf_layers import DELTA_TYPES, checked_types
from hotset.convert.hf_values import integer, number, positive
from hotset.errors import FormatError, UnsupportedModelError
from hotset.model.architectures import ARCHITECTURES
from hotset.model.keys import MAX_CONV_KERNEL, MAX_HEAD_DIM, MAX_STATE_HEADS, MIXER_EPSILON
from hotset.model.mixers import ChannelMixer, DeltaMixer, StateSpaceMixer

_LARGEST_MULTIPLIER = 1e6  # several are multiplied, and weights with them
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def delta_mixer(raw: dict[str, Any], hf_class: HFClass) -> DeltaMixer:
    """The sizes of the gated delta nets."""
    heads = integer(raw, "linear_num_value_heads", high=MAX_STATE_HEADS)
    mixer = DeltaMixer(
        integer(raw, "linear_conv_kernel_dim", high=MAX_CONV_KERNEL),
        heads,
        integer(raw, "linear_num_key_heads", high=heads),
        integer(raw, "linear_key_head_dim", high=MAX_HEAD_DIM),
        integer(raw, "linear_value_head_dim", high=MAX_HEAD_DIM),
        ARCHITECTURES[hf_class.architecture].delta_net == "tiled",
    )
    if mixer.n_head % mixer.n_head_k:
        raise FormatError(
            f"config.json has {mixer.n_head} linear_num_value_heads, not a multiple of "
            f"{mixer.n_head_k} linear_num_key_heads"
        )
    return mixer


def channel_deltas(raw: dict[str, Any], n_head: int) -> DeltaMixer:
    """The sizes of Kimi's delta nets; what linear_attn_config says of them comes first."""
    entries = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    own = linear_attention(raw)
    raw |= {entry: own[name] for name, entry in entries.items() if name in own}
    if integer(raw, "linear_num_heads", high=MAX_STATE_HEADS) != n_head:
        raise UnsupportedModelError("linear_num_heads in config.json must be num_attention_heads")
    dim = integer(raw, "linear_head_dim", high=MAX_HEAD_DIM)
    kernel = integer(raw, "linear_conv_kernel_dim", high=MAX_CONV_KERNEL)
    return DeltaMixer(kernel, n_head, n_head, dim, dim, tiled=False, by_channel=True)


def linear_attention(raw: dict[str, Any]) -> dict[str, Any]:
    """The entries of linear_attn_config."""
    own = raw.get("linear_attn_config")
    if own is not None and not isinstance(own, dict):
        raise FormatError("linear_attn_config in config.json must be an object")
    return own or {}


def channel_delta_layers(raw: dict[str, Any], n_layer: int) -> list[bool]:
    """Which layers have Kimi's delta nets: those that layer_types or linear_attn_config (from 1 on) name, or
    all but each fourth behind the first."""
    own, types = linear_attention(raw), raw.get("layer_types")
    if types is not None:
        kinds = checked_types(types, n_layer, DELTA_TYPES)
        return [kind == "linear_attention" for kind in kinds]
    if not {"full_attn_layers", "kda_layers"} <= own.keys():
        return [i % 4 != 0 or i == 0 for i in range(n_layer)]
    full, linear = own["full_attn_layers"], own["kda_layers"]
    lists = isinstance(full, list) and isinstance(linear, list)
    if not lists or sorted([*full, *linear], key=str) != sorted(range(1, n_layer + 1), key=str):
        raise FormatError(
            f"full_attn_layers and kda_layers in config.json must hold each of {n_layer} layers once"
        )
    return [i + 1 in linear for i in range(n_layer)]


def state_space(
    raw: dict[str, Any], hf_class: HFClass, n_embd: int, *, limited: bool
) -> StateSpaceMixer | None:
    """The sizes of the state spaces. limited: limits of the time step in config.json count for nothing."""
    if hf_class.state_space is None:
        return None
    heads, dim_v, groups, dim_k, kernel = hf_class.state_space
    n_head = integer(raw, heads, high=MAX_STATE_HEADS)
    if raw.get(dim_v) == "auto":
        raw[dim_v] = _inner_size(raw, n_embd) // n_head
    limit = raw.get("time_step_limit")
    if not limited and limit is not None and limit not in _NO_LIMITS:
        raise UnsupportedModelError("a time_step_limit in config.json is not supported")
    mixer = StateSpaceMixer(
        integer(raw, kernel, high=MAX_CONV_KERNEL),
        n_head,
        integer(raw, groups, high=n_head),
        integer(raw, dim_k, high=MAX_HEAD_DIM),
        integer(raw, dim_v, high=MAX_HEAD_DIM),
    )
    if ARCHITECTURES[hf_class.architecture].beside:
        normed = raw.get("mamba_rms_norm") is True
        if normed and raw.get("mamba_norm_before_gate") is not False:
            raise UnsupportedModelError("mamba_norm_before_gate in config.json is not supported")
        mixer = replace(mixer, normed=normed, beside=True)
    if n_head % mixer.n_group:
        raise FormatError(f"config.json has {n_head} {heads}, not a multiple of {mixer.n_group} {groups}")
    return mixer


def _inner_size(raw: dict[str, Any], n_embd: int) -> int:
    """Channels of all heads of a state space, where config.json does not say those of one."""
    if raw.get("mamba_d_ssm") is not None:
        return integer(raw, "mamba_d_ssm", high=1 << 22)
    return integer(raw, "mamba_expand", 2, 1 << 10) * n_embd


def channel_space(raw: dict[str, Any], hf_class: HFClass, n_embd: int) -> ChannelMixer | None:
    """The sizes of Mamba's state spaces."""
    if hf_class.channel_space is None:
        return None
    expand, dim_k, kernel, rank = hf_class.channel_space
    if raw.get(rank) == "auto":
        raw[rank] = -(-n_embd // 16)
    return ChannelMixer(
        integer(raw, kernel, high=MAX_CONV_KERNEL),
        integer(raw, expand, high=1 << 10) * n_embd,
        integer(raw, dim_k, high=MAX_HEAD_DIM),
        integer(raw, rank, high=1 << 16),
        None,
    )


def channel_keys(raw: dict[str, Any], channels: ChannelMixer, n_layer: int, n_head_kv: int) -> dict[str, Any]:
    """Sizes of Mamba's state spaces, and where attention stands instead. n_head_kv: 0: nowhere."""
    keys: dict[str, Any] = {
        "ssm.conv_kernel": channels.kernel,
        "ssm.inner_size": channels.inner,
        "ssm.state_size": channels.dim_k,
        "ssm.time_step_rank": channels.rank,
    }
    if n_head_kv == 0:
        if raw["architectures"] != ["FalconMambaForCausalLM"]:
            return keys | {"ssm.dt_b_c_rms": False}
        return keys | {"ssm.dt_b_c_rms": True, MIXER_EPSILON: positive(raw, "mixer_rms_eps")}
    period = integer(raw, "attn_layer_period", high=1 << 12)
    offset = number(raw, "attn_layer_offset")
    kv = [n_head_kv if i % period == offset else 0 for i in range(n_layer)]
    return keys | {"attention.head_count_kv": kv}


def channel_delta_keys(kda: list[bool], mixer: DeltaMixer, n_rot: int, n_value: int) -> dict[str, Any]:
    """Sizes of Kimi's delta nets, and which layers have them. n_rot: channels of a key that heads of the
    other layers share, of which nothing is rotated; n_value: of a value there."""
    return {
        "attention.head_count_kv": [0 if own else 1 for own in kda],
        "ssm.conv_kernel": mixer.kernel,
        "kda.head_dim": mixer.dim_k,
        "attention.value_length": n_value,
        "rope.dimension_count": n_rot,
    }


def state_keys(mixer: DeltaMixer | StateSpaceMixer) -> dict[str, Any]:
    """Sizes of recurrent layers with heads."""
    return {
        "ssm.conv_kernel": mixer.kernel,
        "ssm.inner_size": mixer.of_values,
        "ssm.state_size": mixer.dim_k,
        "ssm.time_step_rank": mixer.n_head,
        "ssm.group_count": mixer.n_head_k if isinstance(mixer, DeltaMixer) else mixer.n_group,
    }


def factors(raw: dict[str, Any], space: StateSpaceMixer, stem: str) -> np.ndarray | None:
    """Falcon-H1's multipliers of a tensor: float32, one or one for each row; None: there are none."""
    plain = {
        "token_embd": ("embedding_multiplier",),
        "output": ("lm_head_multiplier",),
        "attn_q": ("attention_in_multiplier",),
        "attn_k": ("attention_in_multiplier", "key_multiplier"),
        "attn_v": ("attention_in_multiplier",),
        "attn_output": ("attention_out_multiplier",),
        "ssm_in": ("ssm_in_multiplier",),
        "ssm_out": ("ssm_out_multiplier",),
    }
    factor = math.prod(_multiplier(raw, entry) for entry in plain.get(stem, ()))
    if stem in ("ffn_gate", "ffn_down"):
        factor = _multipliers(raw, "mlp_multipliers", 2)[int(stem == "ffn_down")]
    if stem != "ssm_in":
        return None if factor == 1.0 else np.array([factor], np.float32)
    of_group = space.n_group * space.dim_k
    widths = (space.of_values, space.of_values, of_group, of_group, space.n_head)
    return np.repeat(np.float32(factor) * _multipliers(raw, "ssm_multipliers", 5), widths)


def _multiplier(config: dict[str, Any], entry: str) -> float:
    """A number by which weights are multiplied; without one, 1."""
    value = number(config, entry, 1.0)
    if not abs(value) <= _LARGEST_MULTIPLIER:
        raise FormatError(
            f"{entry} in config.json is {value:g}; at most {_LARGEST_MULTIPLIER:g} is supported"
        )
    return value


def _multipliers(raw: dict[str, Any], entry: str, n: int) -> np.ndarray:
    found = raw.get(entry)
    found = [1.0] * n if found is None else found
    if not isinstance(found, list) or len(found) != n:
        raise FormatError(f"{entry} in config.json must be a list of {n} numbers")
    return np.array([_multiplier({entry: value}, entry) for value in found], np.float32)
