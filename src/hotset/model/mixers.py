"""Token mixers other than attention: their sizes, read from the keys of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hotset.errors import UnsupportedModelError
from hotset.model.architectures import Architecture
from hotset.model.keys import MAX_CONV_KERNEL, MAX_HEAD_DIM, MAX_STATE_HEADS, MIXER_EPSILON, Keys

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile


@dataclass(frozen=True)
class ConvMixer:
    """A gated short convolution instead of attention. kernel: how many tokens it sees, including itself."""

    kernel: int


@dataclass(frozen=True)
class DeltaMixer:
    """A gated delta net instead of attention: see operations.DeltaNet.

    kernel: of the convolution before it. by_channel: queries, keys and values have separate matrices and
    convolutions, and keys decay per channel; decays and gates come from vectors as wide as a head. gate: the
    activation of the output gate.
    """

    kernel: int
    n_head: int
    n_head_k: int
    dim_k: int
    dim_v: int
    tiled: bool
    by_channel: bool = False
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def of_keys(self) -> int:
        """Return the number of channels of all keys, or of all queries."""
        return self.n_head_k * self.dim_k

    @property
    def of_values(self) -> int:
        """Return the number of channels of all values."""
        return self.n_head * self.dim_v


@dataclass(frozen=True)
class StateSpaceMixer:
    """The state space of Mamba-2 instead of attention: see operations.SelectiveScan.

    kernel: of the convolution before it; dim_k: width of B and C, dim_v: channels of a head. normed: the
    heads' results pass a norm. with_attention: the layer has attention, too.
    """

    kernel: int
    n_head: int
    n_group: int
    dim_k: int
    dim_v: int
    normed: bool = True
    with_attention: bool = False

    @property
    def of_values(self) -> int:
        """Return the number of channels of all heads."""
        return self.n_head * self.dim_v

    @property
    def width(self) -> int:
        """Return the width of the convolution: values, B and C."""
        return self.of_values + 2 * self.n_group * self.dim_k


@dataclass(frozen=True)
class ChannelMixer:
    """The state space of Mamba instead of attention: see operations.ChannelScan.

    kernel: width of the convolution before it. inner: its channels. dim_k: width of B and C. rank: width of
    the vector that dt is computed from. norms: kind of norms of dt, B and C, with or without weights; None:
    no norms. plain_eps: epsilon of norms without weights; None: the model's.
    """

    kernel: int
    inner: int
    dim_k: int
    rank: int
    norms: Literal["weights", "plain"] | None
    plain_eps: float | None = None


@dataclass(frozen=True)
class RwkvMixer:
    """The time mix of RWKV instead of attention: see operations.Wkv.

    The FFN of such a layer is RWKV's channel mix, which also reads the previous token. version: 6 or 7. dim:
    channels of a head. rank_*: ranks of the low-rank matrices for decays, learning rates, shares of the first
    layer's values, and gates (0: no gates); in RWKV 6 for decays and shares of the previous token.
    """

    version: int
    n_head: int
    dim: int
    rank_decay: int
    rank_rate: int = 0
    rank_value: int = 0
    rank_gate: int = 0
    rank_mix: int = 0


Mixer = ConvMixer | DeltaMixer | StateSpaceMixer | ChannelMixer | RwkvMixer


def _state_heads(keys: Keys) -> tuple[int, int, int, int, int]:
    """Return the sizes of a recurrent layer with heads.

    These are the convolution's kernel, heads, heads or groups of keys, and the channels of a key and a value.
    """
    n_head = keys.integer("ssm.time_step_rank", 1, MAX_STATE_HEADS)
    inner = keys.integer("ssm.inner_size", 1, MAX_STATE_HEADS * MAX_HEAD_DIM)
    n_group = keys.integer("ssm.group_count", 1, n_head)
    dim_k = keys.integer("ssm.state_size", 1, MAX_HEAD_DIM)
    kernel = keys.integer("ssm.conv_kernel", 2, MAX_CONV_KERNEL)
    if inner % n_head or inner // n_head > MAX_HEAD_DIM:
        raise keys.error("ssm.inner_size", f"is {inner} for {n_head} heads")
    if n_head % n_group:
        raise keys.error("ssm.group_count", f"is {n_group} for {n_head} heads")
    return kernel, n_head, n_group, dim_k, inner // n_head


def _delta_mixers(keys: Keys, architecture: Architecture, n_layer: int) -> tuple[DeltaMixer | None, ...]:
    tiled = architecture.delta_net == "tiled"
    mixer = DeltaMixer(*_state_heads(keys), tiled, gate=architecture.delta_gate)
    if keys.get("attention.recurrent_layers") is None:
        interval = keys.integer("full_attention_interval", 1, 1 << 12, 4)
        return tuple(None if (i + 1) % interval == 0 else mixer for i in range(n_layer))
    recurrent = keys.flags("attention.recurrent_layers", n_layer)
    return tuple(mixer if own else None for own in recurrent)


def _channel_deltas(keys: Keys, n_layer: int) -> tuple[DeltaMixer | None, ...]:
    n_head = keys.uniform("attention.head_count", n_layer, 1, MAX_STATE_HEADS)
    dim = keys.integer("kda.head_dim", 1, MAX_HEAD_DIM)
    kernel = keys.integer("ssm.conv_kernel", 2, MAX_CONV_KERNEL)
    mixer = DeltaMixer(kernel, n_head, n_head, dim, dim, tiled=False, by_channel=True, gate="sigmoid")
    heads = keys.per_layer("attention.head_count_kv", n_layer, 0, 1 << 14, 1)
    return tuple(None if n else mixer for n in heads)


def _state_space(gguf: GGUFFile, keys: Keys, *, with_attention: bool) -> StateSpaceMixer:
    normed = not with_attention or "blk.0.ssm_norm.weight" in gguf.tensors
    return StateSpaceMixer(*_state_heads(keys), normed, with_attention)


def _channel_mixer(gguf: GGUFFile, keys: Keys, layer: int) -> ChannelMixer:
    plain = keys.flag("ssm.dt_b_c_rms", False)
    weights = f"blk.{layer}.ssm_dt_norm.weight" in gguf.tensors
    return ChannelMixer(
        keys.integer("ssm.conv_kernel", 2, MAX_CONV_KERNEL),
        keys.integer("ssm.inner_size", 1, 1 << 20),
        keys.integer("ssm.state_size", 1, MAX_HEAD_DIM),
        keys.integer("ssm.time_step_rank", 1, 1 << 16),
        "weights" if weights else "plain" if plain else None,
        None if keys.get(MIXER_EPSILON) is None else keys.real(MIXER_EPSILON, 0.0, 1.0),
    )


def _time_mix(keys: Keys, version: int) -> RwkvMixer:
    n_embd, most = keys.integer("embedding_length", 1, 1 << 20), 1 << 16
    dim = keys.integer("wkv.head_size", 1, MAX_HEAD_DIM)
    n_head = n_embd // dim
    if n_embd % dim or n_head > MAX_STATE_HEADS:
        raise keys.error("wkv.head_size", f"is {dim} for a width of {n_embd}")
    if version == 6:
        ranks = {"rank_decay": "time_decay_extra_dim", "rank_mix": "time_mix_extra_dim"}
    else:
        ranks = {
            "rank_decay": "attention.decay_lora_rank",
            "rank_rate": "attention.iclr_lora_rank",
            "rank_value": "attention.value_residual_mix_lora_rank",
        }
    sizes = {field: keys.integer(key, 1, most) for field, key in ranks.items()}
    rank_gate = keys.integer("attention.gate_lora_rank", 0, most, 0) if version == 7 else 0
    return RwkvMixer(version, n_head, dim, **sizes, rank_gate=rank_gate)


def mixers_of(
    gguf: GGUFFile, keys: Keys, architecture: Architecture, n_layer: int
) -> tuple[Mixer | None, ...]:
    """Return each layer's token mixer, instead of attention or in addition; None: only attention."""
    if architecture.rwkv is not None:
        return (_time_mix(keys, architecture.rwkv),) * n_layer
    if architecture.by_channel:
        heads = keys.per_layer("attention.head_count_kv", n_layer, 0, 1 << 14, 0)
        return tuple(None if n else _channel_mixer(gguf, keys, i) for i, n in enumerate(heads))
    if architecture.with_attention or not architecture.attends:
        return (_state_space(gguf, keys, with_attention=architecture.with_attention),) * n_layer
    if architecture.delta_net == "channels":
        return _channel_deltas(keys, n_layer)
    if architecture.delta_net is not None:
        mixers = _delta_mixers(keys, architecture, n_layer)
        if None not in mixers:
            raise UnsupportedModelError("no layer of the model has attention")
        return mixers
    if not architecture.short_conv and not architecture.state_space:
        return (None,) * n_layer
    heads = keys.per_layer("attention.head_count_kv", n_layer, 0, 1 << 14, 1)
    if architecture.state_space:
        space = _state_space(gguf, keys, with_attention=False) if 0 in heads else None
        return tuple(None if n else space for n in heads)
    conv = ConvMixer(keys.integer("shortconv.l_cache", 2, MAX_CONV_KERNEL)) if 0 in heads else None
    return tuple(None if n else conv for n in heads)
