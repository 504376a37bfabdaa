"""Tiny mixture-of-experts models with every kind of routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_gguf import write_llama

from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType

T = GGMLType
MIXED = {"ffn_gate_exps": T.Q4_K, "ffn_up_exps": T.Q4_0, "ffn_down_exps": T.Q6_K, "output": T.Q8_0}
SIGMOID = {"llama.expert_gating_func": 2, "llama.expert_weights_scale": 2.5}
GROUPS = {**SIGMOID, "llama.expert_group_count": 3, "llama.expert_group_used_count": 2}


def mixed_types(name: str) -> GGMLType:
    return MIXED.get(name.split(".")[-1], T.Q4_1)


def model(path: Path, **options: Any) -> GGUFFile:
    options = {
        "n_embd": 256,
        "n_ff": 256,
        "head_dim": 64,
        "experts": (9, 3),
        "type_of": mixed_types,
    } | options
    return open_gguf(write_llama(path / "experts.gguf", **options))


FORMS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "floats": {"type_of": lambda _: T.F32, "n_ff": 96, "n_embd": 64},
    "halves": {"type_of": lambda _: T.F16, "n_ff": 96, "n_embd": 64},
    "floats and blocks": {"type_of": lambda name: T.F32 if "gate" in name else T.Q8_0, "n_ff": 160},
    "biased": {"biased": True},
    "shared": {"n_ff_shared": 96, "type_of": lambda _: T.Q8_0},
    "sigmoid": {"keys": SIGMOID},
    "groups": {"keys": GROUPS},
    "chosen": {"keys": {"llama.expert_gating_func": 3, "llama.expert_weights_norm": False}},
    "relu": {"keys": {"llama.hidden_activation": "relu"}},
    "biased relu": {"keys": {"llama.hidden_activation": "relu"}, "biased": True},
    "neuron-major": {"down_neuron_major": True, "n_ff": 160, "keys": {"llama.hidden_activation": "relu"}},
    "biased neuron-major": {
        "down_neuron_major": True, "n_ff": 96, "biased": True, "type_of": lambda _: T.Q8_0,
    },
    "one used": {"experts": (4, 1)},
    "all used": {"experts": (3, 3)},
    "many": {"experts": (70, 2), "n_ff": 32, "type_of": lambda _: T.Q4_0},
}  # fmt: skip
