"""The recurrent layers that a config.json has: their sizes, and the keys that say them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from hotset.convert.checkpoints.classes import HFClass
from hotset.convert.hf_values import integer, number
from hotset.errors import FormatError, UnsupportedModelError
from hotset.model.architectures import ARCHITECTURES
from hotset.model.keys import MAX_CONV_KERNEL, MAX_HEAD_DIM, MAX_STATE_HEADS
from hotset.model.mixers import ChannelMixer, DeltaMixer, StateSpaceMixer

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
    if not limited and limit is not None and list(limit) not in _NO_LIMITS:
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
        falcon = raw["architectures"] == ["FalconMambaForCausalLM"]
        return keys | {"ssm.dt_b_c_rms": falcon}
    period = integer(raw, "attn_layer_period", high=1 << 12)
    offset = number(raw, "attn_layer_offset")
    kv = [n_head_kv if i % period == offset else 0 for i in range(n_layer)]
    return keys | {"attention.head_count_kv": kv}


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
    factor = math.prod(number(raw, entry, 1.0) for entry in plain.get(stem, ()))
    if stem in ("ffn_gate", "ffn_down"):
        factor = _multipliers(raw, "mlp_multipliers", 2)[int(stem == "ffn_down")]
    if stem != "ssm_in":
        return None if factor == 1.0 else np.array([factor], np.float32)
    of_group = space.n_group * space.dim_k
    widths = (space.of_values, space.of_values, of_group, of_group, space.n_head)
    return np.repeat(np.float32(factor) * _multipliers(raw, "ssm_multipliers", 5), widths)


def _multipliers(raw: dict[str, Any], entry: str, n: int) -> np.ndarray:
    found = raw.get(entry)
    found = [1.0] * n if found is None else found
    if not isinstance(found, list) or len(found) != n:
        raise FormatError(f"{entry} in config.json must be a list of {n} numbers")
    return np.array([number({entry: value}, entry) for value in found], np.float32)
