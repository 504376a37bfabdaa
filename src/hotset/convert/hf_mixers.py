"""Layers without attention: gated delta nets, state spaces, short convolutions, each a part of a family."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from hotset.convert.hf_part import Facts, FamilyPart
from hotset.convert.hf_parts import LatentPart
from hotset.convert.hf_values import DELTA_TYPES, LEGACY_PARTS, checked_types, integer, number, positive
from hotset.convert.sources import Origin, Source
from hotset.errors import FormatError, UnsupportedModelError
from hotset.model.keys import MAX_CONV_KERNEL, MAX_HEAD_DIM, MAX_STATE_HEADS, MIXER_EPSILON
from hotset.model.mixers import DeltaMixer, StateSpaceMixer

_LARGEST_MULTIPLIER = 1e6  # several are multiplied with each other and with weights
_NO_LIMITS = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])


class DeltaNetPart(FamilyPart):
    """The gated delta nets of Qwen 3.5. Heads keep their order if each key has one head of values."""

    tiled: ClassVar = True
    """Whether heads in the file are the first of all keys, then the second of all keys, and so on."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        raw = facts.raw
        heads = integer(raw, "linear_num_value_heads", high=MAX_STATE_HEADS)
        self.sizes_of = mixer = DeltaMixer(
            integer(raw, "linear_conv_kernel_dim", high=MAX_CONV_KERNEL),
            heads,
            integer(raw, "linear_num_key_heads", high=heads),
            integer(raw, "linear_key_head_dim", high=MAX_HEAD_DIM),
            integer(raw, "linear_value_head_dim", high=MAX_HEAD_DIM),
            self.tiled,
        )
        if mixer.n_head % mixer.n_head_k:
            raise FormatError(
                f"config.json has {mixer.n_head} linear_num_value_heads, not a multiple of "
                f"{mixer.n_head_k} linear_num_key_heads"
            )

    def keys(self) -> dict[str, Any]:
        """Return the sizes, and which layers have a delta net (those for multi-token prediction do not)."""
        raw, n_layer = self.facts.raw, self.facts.n_layer
        types = raw.get("layer_types")
        if types is None:
            interval = integer(raw, "full_attention_interval", 4)
            types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(n_layer)]
        types = checked_types(types, n_layer, DELTA_TYPES)
        recurrent = [kind == "linear_attention" for kind in types]
        keys: dict[str, Any] = {"attention.recurrent_layers": recurrent + [False] * self.facts.n_nextn}
        keys |= state_keys(self.sizes_of)
        interval = recurrent.index(False) + 1 if False in recurrent else 0
        if interval and recurrent == [(i + 1) % interval != 0 for i in range(n_layer)]:
            keys["full_attention_interval"] = interval
        return keys

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        delta = self.sizes_of
        if stem == "ssm_out":
            return Origin(values, columns=self._tiles(delta.dim_v))
        if stem in ("attn_qkv", "ssm_conv1d"):
            return Origin.reordered(values, self._tiles(delta.dim_v, 2 * delta.of_keys))
        if stem == "attn_gate":
            return Origin.reordered(values, self._tiles(delta.dim_v))
        if stem in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
            return Origin.reordered(values, self._tiles(1), decays=stem == "ssm_a")
        return None

    def _tiles(self, n: int, first: int = 0) -> np.ndarray:
        """Return the new order of heads of n channels, after `first` channels that keep their places."""
        delta = self.sizes_of
        heads = np.arange(delta.n_head * n).reshape(delta.n_head_k, -1, n)
        return np.append(np.arange(first), first + heads.swapaxes(0, 1).reshape(-1))


class GroupedDeltaNet(DeltaNetPart):
    """The delta nets of Qwen3-Next: a matrix has per key its query, the key, its values, and their gates."""

    tiled: ClassVar = False

    def split(self, values: np.ndarray, i: int, stems: list[str]) -> np.ndarray | None:
        return values if stems == ["attn_qkv", "attn_gate"] else None

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        delta = self.sizes_of
        if stem == "ssm_a":
            return Origin(values, decays=True)
        if stem not in ("attn_qkv", "attn_gate"):
            return None
        rows = np.arange(len(values)).reshape(delta.n_head_k, -1)
        of_values = delta.n_head // delta.n_head_k * delta.dim_v
        if rows.shape[1] != 2 * (delta.dim_k + of_values):
            raise ValueError(f"{len(values)} rows")
        q, k, v, z = np.split(rows, np.cumsum([delta.dim_k, delta.dim_k, of_values]), axis=1)
        parts = (z,) if stem == "attn_gate" else (q, k, v)
        return Origin(values, rows=np.concatenate([part.reshape(-1) for part in parts]))


class KimiDelta(LatentPart):
    """Kimi Linear's delta nets, and latent attention in the other layers."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        raw = facts.raw
        entries = {
            "head_dim": "linear_head_dim",
            "num_heads": "linear_num_heads",
            "short_conv_kernel_size": "linear_conv_kernel_dim",
        }
        own = raw.get("linear_attn_config")
        if own is not None and not isinstance(own, dict):
            raise FormatError("linear_attn_config in config.json must be an object")
        self.lists = own or {}
        raw |= {entry: self.lists[name] for name, entry in entries.items() if name in self.lists}
        if integer(raw, "linear_num_heads", high=MAX_STATE_HEADS) != facts.n_head:
            raise UnsupportedModelError("linear_num_heads in config.json must be num_attention_heads")
        self.dim = integer(raw, "linear_head_dim", high=MAX_HEAD_DIM)
        self.kernel = integer(raw, "linear_conv_kernel_dim", high=MAX_CONV_KERNEL)
        self.recurrent = self._recurrent()

    def _recurrent(self) -> list[bool]:
        """Return which layers have a delta net, from layer_types or linear_attn_config (numbers from 1 on).

        Without these entries all layers have one, except every fourth after the first."""
        own, types, n_layer = self.lists, self.facts.raw.get("layer_types"), self.facts.n_layer
        if types is not None:
            return [kind == "linear_attention" for kind in checked_types(types, n_layer, DELTA_TYPES)]
        if not {"full_attn_layers", "kda_layers"} <= own.keys():
            return [i % 4 != 0 or i == 0 for i in range(n_layer)]
        full, linear = own["full_attn_layers"], own["kda_layers"]
        lists = isinstance(full, list) and isinstance(linear, list)
        if not lists or sorted([*full, *linear], key=str) != sorted(range(1, n_layer + 1), key=str):
            raise FormatError(
                f"full_attn_layers and kda_layers in config.json must hold each of {n_layer} layers once"
            )
        return [i + 1 in linear for i in range(n_layer)]

    def keys(self) -> dict[str, Any]:
        return {
            "attention.head_count_kv": [0 if own else 1 for own in self.recurrent],
            "ssm.conv_kernel": self.kernel,
            "kda.head_dim": self.dim,
            "attention.value_length": self.n_value,
            "rope.dimension_count": self.n_rot,  # channels of a key that all heads share; none is rotated
        }

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        if stem == "ssm_a":
            return Origin(values.reshape(1, 1, -1, 1), decays=True)
        if stem.startswith("ssm_conv1d_"):
            if values.shape[-1] != self.kernel:
                raise ValueError(f"a kernel of {self.kernel}")
            return Origin(values.reshape(1, -1, 1, self.kernel))
        return super().source(values, stem, layer)


def state_keys(mixer: DeltaMixer | StateSpaceMixer) -> dict[str, Any]:
    """Return the keys for the sizes of recurrent layers with heads."""
    return {
        "ssm.conv_kernel": mixer.kernel,
        "ssm.inner_size": mixer.of_values,
        "ssm.state_size": mixer.dim_k,
        "ssm.time_step_rank": mixer.n_head,
        "ssm.group_count": mixer.n_head_k if isinstance(mixer, DeltaMixer) else mixer.n_group,
    }


class StateSpace(FamilyPart):
    """The state spaces of Mamba 2.

    entries: of config.json, for the number of heads, their channels, groups, numbers of B and C, and the
    kernel of the convolution. limits: supported values of time_step_limit; None: the entry is not read.
    """

    adapts = False
    entries: ClassVar[tuple[str, str, str, str, str]] = (
        "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"
    )  # fmt: skip
    limits: ClassVar[tuple[Any, ...] | None] = _NO_LIMITS

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        raw, (heads, dim_v, groups, dim_k, kernel) = facts.raw, self.entries
        n_head = integer(raw, heads, high=MAX_STATE_HEADS)
        if raw.get(dim_v) == "auto":
            raw[dim_v] = self._inner_size() // n_head
        if self.limits is not None and raw.get("time_step_limit") not in self.limits:
            raise UnsupportedModelError("a time_step_limit in config.json is not supported")
        self.mixer = StateSpaceMixer(
            integer(raw, kernel, high=MAX_CONV_KERNEL),
            n_head,
            integer(raw, groups, high=n_head),
            integer(raw, dim_k, high=MAX_HEAD_DIM),
            integer(raw, dim_v, high=MAX_HEAD_DIM),
        )
        if n_head % self.mixer.n_group:
            raise FormatError(
                f"config.json has {n_head} {heads}, not a multiple of {self.mixer.n_group} {groups}"
            )

    def _inner_size(self) -> int:
        """Return the channels of all heads if config.json does not give the channels of one."""
        raw = self.facts.raw
        if raw.get("mamba_d_ssm") is not None:
            return integer(raw, "mamba_d_ssm", high=1 << 22)
        return integer(raw, "mamba_expand", 2, 1 << 10) * self.facts.n_embd

    def keys(self) -> dict[str, Any]:
        return state_keys(self.mixer)

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        if stem not in ("ssm_a", "ssm_d", "ssm_norm"):
            return None
        rows = self.mixer.n_group if stem == "ssm_norm" else self.mixer.n_head
        return Origin(values.reshape(rows, -1), decays=stem == "ssm_a")


class HybridSpace(StateSpace):
    """The state spaces of Granite 4, between layers of attention."""

    entries = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")

    def keys(self) -> dict[str, Any]:
        """Return the keys for sizes, for which layers have attention, and whether it is rotated."""
        raw, n_layer = self.facts.raw, self.facts.n_layer
        types = raw.get("layer_types") or raw.get("layers_block_type")
        types = ["linear_attention"] * n_layer if types is None else types
        if isinstance(types, list):
            types = [LEGACY_PARTS.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
        types = checked_types(types, n_layer, DELTA_TYPES)
        kv = [self.facts.n_head_kv if kind == "full_attention" else 0 for kind in types]
        rotates = raw.get("position_embedding_type") == "rope"
        return {"attention.head_count_kv": kv, "rope.scaling.finetuned": rotates} | super().keys()


class ParallelSpace(StateSpace):
    """Falcon-H1's state spaces, which have the same input as attention, and multipliers of its matrices."""

    entries = HybridSpace.entries

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        if facts.raw.get("mamba_rms_norm") is True and facts.raw.get("mamba_norm_before_gate") is not False:
            raise UnsupportedModelError("mamba_norm_before_gate in config.json is not supported")

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        own = super().source(values, stem, layer)
        return Origin(values, factors=self._factors(stem)) if own is None else own

    @property
    def ties(self) -> bool:
        return self._factors("token_embd") is None and self._factors("output") is None

    def _factors(self, stem: str) -> np.ndarray | None:
        """Return the multipliers of a tensor, float32: one, or one per row. None if they are all 1."""
        raw, space = self.facts.raw, self.mixer
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
    """Return a multiplier of weights; 1 without the entry."""
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


class ChannelSpace(FamilyPart):
    """The state spaces of Mamba.

    entries: of config.json, for its channels divided by the model's, its numbers of B and C, the kernel of
    the convolution, and the rank of dt.
    """

    adapts = False
    entries: ClassVar[tuple[str, str, str, str]] = ("expand", "state_size", "conv_kernel", "time_step_rank")

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        raw, (expand, dim_k, kernel, rank) = facts.raw, self.entries
        if raw.get(rank) == "auto":
            raw[rank] = -(-facts.n_embd // 16)
        self.space_keys = {
            "ssm.conv_kernel": integer(raw, kernel, high=MAX_CONV_KERNEL),
            "ssm.inner_size": integer(raw, expand, high=1 << 10) * facts.n_embd,
            "ssm.state_size": integer(raw, dim_k, high=MAX_HEAD_DIM),
            "ssm.time_step_rank": integer(raw, rank, high=1 << 16),
        }

    def keys(self) -> dict[str, Any]:
        return self.space_keys | {"ssm.dt_b_c_rms": False}

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        return Origin(values, decays=True) if stem == "ssm_a" else None


class FalconMamba(ChannelSpace):
    """Mamba with norms of dt, B and C."""

    def keys(self) -> dict[str, Any]:
        epsilon = positive(self.facts.raw, "mixer_rms_eps")
        return self.space_keys | {"ssm.dt_b_c_rms": True, MIXER_EPSILON: epsilon}


class Jamba(ChannelSpace):
    """Mamba between layers of attention."""

    entries = ("mamba_expand", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank")

    def keys(self) -> dict[str, Any]:
        facts = self.facts
        period = integer(facts.raw, "attn_layer_period", high=1 << 12)
        offset = number(facts.raw, "attn_layer_offset")
        kv = [facts.n_head_kv if i % period == offset else 0 for i in range(facts.n_layer)]
        return self.space_keys | {"attention.head_count_kv": kv}
