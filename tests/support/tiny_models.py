"""Tiny Hugging Face models with random parameters, saved as checkpoints.

A fresh model has norms of one and biases of zero, which would hide a norm or bias that is never read. Here
each parameter is drawn again, with a spread that keeps activations near one. Needs torch and transformers:
import it inside a fixture or after `pytest.importorskip`.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from made_once import made_once
from tiny_rwkv import Rwkv6, Rwkv7
from tiny_smallthinker import SmallThinker
from tiny_turbosparse import TurboSparse
from tokenizers import Tokenizer, models, pre_tokenizers

from hotset.convert.hf import convert_hf
from hotset.formats.quants import GGMLType

VOCABULARY = 320  # 256 bytes, a few merges, special tokens, and rows that pad the embedding
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-2,  # large enough that a wrong one is noticed
    "bos_token_id": 300,
    "eos_token_id": 301,
    "attn_implementation": "eager",
}
Tensors = dict[str, torch.Tensor]
ROPE_ORIGINAL = 32  # context before scaling: the tests go well past it


@dataclass(frozen=True)
class TinyModel:
    """A recipe: which transformers class, which differences from SHAPE, and patches after loading.

    written_as: replaces entries of the saved config.json. published: functions applied to the saved tensors
    by name, in order, if models are published under other names. config: the configuration's class, if it is
    named differently from the model's. settings: for a vision model, its text model's settings.
    """

    kind: str  # of transformers' classes: "Llama" → LlamaConfig, LlamaForCausalLM; or of `OWN`
    settings: dict[str, Any] = field(default_factory=dict)
    patch: Callable[[torch.nn.Module], None] | None = None
    written_as: dict[str, Any] = field(default_factory=dict)
    published: tuple[Callable[[Tensors], Tensors], ...] = ()
    config: str | None = None
    vision: dict[str, Any] | None = None  # for a vision model: settings of that part
    of: str | None = None  # the transformers class, if it is not the generating one


class DReLU(torch.nn.Module):
    """Bamboo's FFN, down(relu(gate(x)) * relu(up(x))), around a llama's three matrices."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.gate_proj(x)) * torch.relu(self.up_proj(x)))


class FATReLU(torch.nn.Module):
    """ProSparse's activation: x if x >= 0.1 else 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x >= 0.1, x, torch.zeros_like(x))


class ParallelLayer(torch.nn.Module):
    """PLaMo's layer: attention and FFN read the same input."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.self_attn, self.mlp = layer.input_layernorm, layer.self_attn, layer.mlp

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        h = self.norm(x)
        return x + self.self_attn(hidden_states=h, **how)[0] + self.mlp(h)


def use_parallel_layers(model: torch.nn.Module) -> None:
    model.model.layers = torch.nn.ModuleList(ParallelLayer(layer) for layer in model.model.layers)


class SquaredReLU(torch.nn.Module):
    """An FFN without a gate."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.up_proj(x)) ** 2)


def use_squared_relu(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp = SquaredReLU(layer.mlp)


def use_drelu(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp = DReLU(layer.mlp)


def use_fatrelu(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = FATReLU()


class DeepseekExperts(torch.nn.Module):
    """The FFN of DeepSeek's first MoE model: six experts, of which a token uses three, and a shared one."""

    def __init__(self, n_embd: int, *, normalised: bool = False) -> None:
        super().__init__()
        self.normalised = normalised
        self.gate = torch.nn.Linear(n_embd, 6, bias=False)
        self.experts = torch.nn.ModuleList(SwiGLU(n_embd, 48) for _ in range(6))
        self.shared_experts = SwiGLU(n_embd, 2 * 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(torch.softmax(self.gate(x), -1), 3)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        parts = torch.stack([expert(x) for expert in self.experts], -2)  # [..., n_expert, n_embd]
        chosen = torch.gather(parts, -2, ids[..., None].expand(*ids.shape, x.shape[-1]))
        return (weights[..., None] * chosen).sum(-2) + self.shared_experts(x)


class SwiGLU(torch.nn.Module):
    def __init__(self, n_embd: int, n: int) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(n_embd, n, bias=False)
        self.up_proj = torch.nn.Linear(n_embd, n, bias=False)
        self.down_proj = torch.nn.Linear(n, n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def use_deepseek_experts(model: torch.nn.Module, *, normalised: bool = False) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp = DeepseekExperts(model.config.hidden_size, normalised=normalised)


def scale_results(model: torch.nn.Module) -> None:
    """Draw the factors by which Gemma 4's layers multiply their results."""
    for i, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.5 + 0.25 * i)


def draw_tables(model: torch.nn.Module) -> None:
    """Draw a table of each token's experts."""
    generator = torch.Generator().manual_seed(7)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            n_expert = model.config.n_routed_experts
            ids = torch.rand(len(table), n_expert, generator=generator).argsort(dim=1)
            table.copy_(ids[:, : table.shape[1]])


def published_deepseek4(tensors: Tensors) -> Tensors:
    """Rename tensors to DeepSeek's own names."""
    names = {
        "model.embed_tokens.": "embed.", "model.hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm.",
        "model.": "",
    }  # fmt: skip
    for old, new in names.items():
        tensors = {name.replace(old, new): values for name, values in tensors.items()}
    return tensors


FP8_FP4 = {  # entries of config.json
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "expert_dtype": "fp4",
}  # fmt: skip


def published_fp8_fp4(tensors: Tensors, block: Sequence[int] = (128, 128)) -> tuple[Tensors, Tensors]:
    """Return DeepSeek's tensors as published, and their values in float32.

    Matrices are FP8 with one power of two per block of rows and columns; experts are FP4 with one per 32
    values of a row.
    """
    fp4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed, plain = dict(tensors), dict(tensors)
    for name, matrix in tensors.items():
        of_expert = ".ffn.experts." in name
        in_fp8 = re.search(r"\.(attn\.(indexer\.)?w\w+|ffn\.shared_experts\.w\d)\.weight$", name)
        if not of_expert and in_fp8 is None:
            continue
        n_rows, n_columns = (1, 32) if of_expert else block
        rows, columns = (-(-size // n) for size, n in zip(matrix.shape, (n_rows, n_columns), strict=True))
        padding = (0, columns * n_columns - matrix.shape[1], 0, rows * n_rows - matrix.shape[0])
        blocks = torch.nn.functional.pad(matrix.float(), padding).reshape(rows, n_rows, columns, n_columns)
        largest = blocks.abs().amax(dim=(1, 3)) / (6 if of_expert else 448)
        scale = torch.exp2(largest.clamp(min=2.0**-100).log2().ceil())
        scaled = (blocks / scale[:, None, :, None]).reshape(rows * n_rows, -1)
        scaled = scaled[: matrix.shape[0], : matrix.shape[1]].contiguous()
        if of_expert:
            codes = (scaled[..., None] - fp4).abs().argmin(-1).to(torch.uint8)
            values = fp4[codes.long()]
            packed[name] = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
        else:
            packed[name] = scaled.to(torch.float8_e4m3fn)
            values = packed[name].float()
        packed[name.removesuffix("weight") + "scale"] = scale.to(torch.float8_e8m0fnu)
        of_values = scale.repeat_interleave(n_rows, 0).repeat_interleave(n_columns, 1)
        plain[name] = (values * of_values[: matrix.shape[0], : matrix.shape[1]]).contiguous()
    return packed, plain


class NoPositions(torch.nn.Module):
    def forward(self, positions: torch.Tensor) -> float:
        return 0.0


class GatedGelu(torch.nn.Module):
    """Jina BERT's replacement of the first half of an FFN."""

    def __init__(self, n_embd: int, n: int) -> None:
        super().__init__()
        self.gated_layers = torch.nn.Linear(n_embd, 2 * n, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gated_layers(x).chunk(2, -1)
        return torch.nn.functional.gelu(gate) * up


def use_jina_bert(model: torch.nn.Module) -> None:
    """Replace positions by ALiBi, and use gated FFNs."""
    config, forward = model.config, model.forward
    model.embeddings.position_embeddings = NoPositions()
    for layer in model.encoder.layer:
        layer.intermediate = GatedGelu(config.hidden_size, config.intermediate_size)
    slopes = torch.tensor(jina_slopes(config.num_attention_heads)).view(-1, 1, 1)

    def with_alibi(ids: torch.Tensor) -> Any:
        at = torch.arange(ids.shape[1])
        return forward(ids, attention_mask=(-slopes * (at[:, None] - at).abs())[None])

    model.forward = with_alibi


def jina_slopes(n: int) -> list[float]:
    """Return ALiBi's slopes as in the authors' code."""
    if n & (n - 1) == 0:
        first = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [first * first**i for i in range(n)]
    whole = 2 ** math.floor(math.log2(n))
    return jina_slopes(whole) + jina_slopes(2 * whole)[0::2][: n - whole]


class NoRotation(torch.nn.Module):
    def forward(self, x: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(1, 1, 1), torch.zeros(1, 1, 1)


def use_alibi(model: torch.nn.Module, *, layer_norms: bool = False) -> None:
    """Replace rotation by ALiBi. layer_norms: norms have a mean."""
    config, forward = model.config, model.forward
    model.model.rotary_emb = NoRotation()
    if layer_norms:

        def norm() -> torch.nn.Module:
            return torch.nn.LayerNorm(config.hidden_size, config.rms_norm_eps, bias=False)

        model.model.norm = norm()
        for layer in model.model.layers:
            layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
    slopes = torch.tensor(jina_slopes(config.num_attention_heads)).view(-1, 1, 1)

    def with_alibi(ids: torch.Tensor) -> Any:
        ago = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
        mask = torch.where(ago < 0, torch.tensor(-math.inf), -slopes * ago)
        return forward(ids, attention_mask=mask[None])

    model.forward = with_alibi


def published_refact(tensors: Tensors) -> Tensors:
    """Join keys and values, and gate and up, under GPT-2's names."""
    found = {}
    for name, tensor in tensors.items():
        for first, second, both in (("k_proj", "v_proj", "kv"), ("gate_proj", "up_proj", "gate_up_proj")):
            if f".{first}." in name:
                tensor = torch.cat([tensor, tensors[name.replace(first, second)]])
                name = name.replace(first, both)
        if ".v_proj." not in name and ".up_proj." not in name:
            found[name] = tensor
    return found


def published_jina(tensors: Tensors) -> Tensors:
    names = {"intermediate.gated_layers": "mlp.gated_layers", "output.dense": "mlp.wo"}
    names["output.LayerNorm"] = "mlp.layernorm"
    found = {}
    for name, tensor in tensors.items():
        for part, other in names.items():
            name = re.sub(rf"(layer\.\d+)\.{re.escape(part)}\.", rf"\1.{other}.", name)
        found[name] = tensor
    return found


class GeluFfn(torch.nn.Module):
    """The FFN of Nomic's MoE model in its even layers."""

    def __init__(self, n_embd: int, n: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(n_embd, n), torch.nn.Linear(n, n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.nn.functional.gelu(self.fc1(x)))


class NomicExperts(torch.nn.Module):
    """The FFN of Nomic's MoE model in its odd layers: six experts without a gate, two per token."""

    def __init__(self, n_embd: int, n: int, n_expert: int = 6) -> None:
        super().__init__()
        self.router, self.experts = torch.nn.Module(), torch.nn.Module()
        self.router.layer = torch.nn.Linear(n_embd, n_expert, bias=False)
        self.experts.mlp = torch.nn.Module()
        for name in ("w1", "w2"):
            setattr(self.experts.mlp, name, torch.nn.Parameter(torch.empty(n_expert * n, n_embd)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router.layer(x)
        weights, ids = torch.topk(torch.softmax(logits, -1), 2)
        w1, w2 = (w.view(logits.shape[-1], -1, x.shape[-1]) for w in self.experts.mlp.parameters())
        neurons = torch.nn.functional.gelu(torch.einsum("...d,end->...en", x, w1))
        parts = torch.einsum("...en,end->...ed", neurons, w2)
        chosen = torch.gather(parts, -2, ids[..., None].expand(*ids.shape, x.shape[-1]))
        return (weights[..., None] * chosen).sum(-2)


def use_nomic_experts(model: torch.nn.Module) -> None:
    d, n = model.config.hidden_size, model.config.intermediate_size
    for i, layer in enumerate(model.layers):
        layer.mlp = NomicExperts(d, n) if i % 2 else GeluFfn(d, n)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, torch.nn.Linear(d, d))


def published_nomic(tensors: Tensors) -> Tensors:
    """Rename biases to the names of the matrices."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.bias"):
            tensor = torch.cat([tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
            name = name.replace("self_attn.q_proj", "attn.Wqkv")
        elif name.endswith(("k_proj.bias", "v_proj.bias")):
            continue
        name = name.replace("self_attn.o_proj", "attn.out_proj")
        if name.endswith("experts.mlp.w1"):
            found[name.replace("mlp.w1", "bias")] = torch.zeros(tensor.shape[-1])
        found[name] = tensor
    return {re.sub(r"^layers", "encoder.layers", name): tensor for name, tensor in found.items()}


def renamed(names: dict[str, str]) -> Callable[[Tensors], Tensors]:
    """Return a function that replaces parts of names."""

    def rename(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            for part, other in names.items():
                name = re.sub(rf"(^|\.){re.escape(part)}(\.|$)", rf"\1{other}\2", name)
            found[name] = tensor
        return found

    return rename


def one_qkv(tensors: Tensors, groups: int = 1) -> Tensors:
    """Join q, k and v. groups: of KV heads, each with its rows of all three."""
    found = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            three = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            parts = [part.reshape(groups, -1, *part.shape[1:]) for part in three]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts, 1).flatten(0, 1)
        elif ".k_proj." not in name and ".v_proj." not in name:
            found[name] = tensor
    return found


def named(name: str) -> dict[str, Any]:
    """Return entries of a config.json whose class transformers lacks."""
    return {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}


def experts_by_input(tensors: Tensors) -> Tensors:
    """Transpose experts as published for Qwen 3 VL; transformers transposes them back when it loads them."""
    turned = (".experts.gate_up_proj", ".experts.down_proj")
    return {n: t.transpose(1, 2).contiguous() if n.endswith(turned) else t for n, t in tensors.items()}


def neighbours(tensors: Tensors, head_dim: int) -> Tensors:
    """Interleave the channels of q and k that are rotated together and are stored in halves."""
    found = {}
    for name, tensor in tensors.items():
        if re.search(r"\.(q_proj|k_proj|query_layernorm|key_layernorm)\.", name):
            pairs = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
            tensor = pairs.swapaxes(1, 2).reshape(tensor.shape).contiguous()
        found[name] = tensor
    return found


def scattered(tensors: Tensors, groups: int, head_dim: int) -> Tensors:
    """Reorder query heads so that a key belongs to every n-th head instead of adjacent ones."""
    found = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name or ".o_proj." in name:
            rows = tensor if ".q_proj." in name else tensor.T
            rows = rows.reshape(groups, -1, head_dim, rows.shape[-1]).swapaxes(0, 1).reshape(rows.shape)
            tensor = (rows if ".q_proj." in name else rows.T).contiguous()
        found[name] = tensor
    return found


def with_eyes(tensors: Tensors) -> Tensors:
    """Add tensors of the vision part."""
    names = ("model.sam_model.patch.weight", "model.projector.layers.weight", "model.image_newline")
    return tensors | {name: torch.ones(4) for name in names}


def rope(kind: str, factor: float = 4.0, **more: float) -> dict[str, Any]:
    original = {} if kind == "linear" else {"original_max_position_embeddings": ROPE_ORIGINAL}
    return {
        "rope_parameters": {"rope_type": kind, "factor": factor, "rope_theta": 10000.0, **original, **more}
    }


def long_rope(original: int, n: int, **more: float) -> dict[str, Any]:
    """Return LongRoPE of n channel pairs, for a model first trained with a context of `original`."""
    factors = {
        "short_factor": [1.0 + 0.1 * i for i in range(n)],
        "long_factor": [1.5 + 0.5 * i for i in range(n)],
    }
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **more}
    return {"rope_parameters": parameters, "original_max_position_embeddings": original}


def two_ropes(linear: float | None = None) -> dict[str, Any]:
    """Return one base for all layers and one for layers with a window. linear: slows the others."""
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": 50000.0}
    if linear is not None:
        full |= {"rope_type": "linear", "factor": linear}
    windowed = {"rope_type": "default", "rope_theta": 500.0}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": windowed}}


def unscaled_windows(kind: str, base: float = 10000.0) -> dict[str, Any]:
    """Return a scaling for the layers without a window. base: of the layers with one."""
    windowed = {"rope_type": "default", "rope_theta": base}
    return {
        "rope_parameters": {"full_attention": rope(kind)["rope_parameters"], "sliding_attention": windowed}
    }


def mrope(*section: int) -> dict[str, Any]:
    """Return channel pairs for time, height and width; in a text all have the same position."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}
    return {"rope_parameters": parameters}


def xdrope(*section: int) -> dict[str, Any]:
    """Return the same as mrope, with frequencies for long contexts."""
    parameters = mrope(*section)["rope_parameters"] | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
    return {"rope_parameters": parameters}


HUNYUAN_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "out_hidden_size": 96, "text_hidden_size": 96,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "out_hidden_size": 96,
    "intermediate_size": 32,
}  # fmt: skip
QWEN4_VISION = VISION | {"out_hidden_size": 64}
MUSE_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16,
}  # fmt: skip
MUSE = {
    "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 24, "final_logit_softcapping": 2.5,
    "qk_scale_factor": 1.75, "output_multiplier": 0.4,
}  # fmt: skip
MINISTRAL = {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "beta_fast": 16.0,
        "beta_slow": 1.0,
    },
}  # fmt: skip
ONE_KV_HEAD = {"num_key_value_heads": 1}
THREE_HEADS = {"num_attention_heads": 3, **ONE_KV_HEAD}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIASES = {"attention_bias": True}
ONE_WINDOW = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
GPT2 = {
    "n_embd": 96,
    "n_layer": 3,
    "n_head": 6,
    "n_inner": 160,
    "n_positions": 256,
    "layer_norm_epsilon": 1e-2,
}
LAYER_NORMS = {"layer_norm_eps": 1e-2, "pad_token_id": 0}
NEOX = {**LAYER_NORMS, "hidden_act": "gelu"}
COHERE = {**LAYER_NORMS, "logit_scale": 0.3}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "alpha": 50.0, "factor": 1.0}}
LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)
WIDE_HEADS = {"head_dim": 32}  # 6 heads of 32 in a width of 96
FALCON = {"ffn_hidden_size": 160, "layer_norm_epsilon": 1e-2, "bias": False, "alibi": False}
GEMMA = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 24, "tie_word_embeddings": True}
PHI3 = {"num_attention_heads": 3, "num_key_value_heads": 1, "pad_token_id": 0}

GRANITE = {
    "attention_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 5.0,
}
GRANITE_SWA: dict[str, Any] = {
    **GRANITE, "num_hidden_layers": 5, "sliding_window": 24, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-2, "pad_token_id": 0}
SMOLLM3 = {**WIDE_HEADS, "num_hidden_layers": 5, "pad_token_id": 0}
GEMMA3 = {**GEMMA, "num_hidden_layers": 7, "query_pre_attn_scalar": 16}
GEMMA3N = {
    **GEMMA, "num_hidden_layers": 7, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 12, "pad_token_id": 0,
    "activation_sparsity_pattern": [0.95, 0.8, 0.9, 0.0, 0.0, 0.0, 0.0],
}  # fmt: skip
GEMMA4 = {
    "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "pad_token_id": 0, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 3.0,
    "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
GEMMA4_EXPERTS = {
    **GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 48,
}  # fmt: skip
ORION = {**LAYER_NORMS, **rope("linear", factor=1.0, partial_rotary_factor=1.0)}
INTERNLM2 = (
    partial(one_qkv, groups=SHAPE["num_key_value_heads"]),
    renamed(
        {
            "embed_tokens": "tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
            "self_attn.qkv_proj": "attention.wqkv", "self_attn.o_proj": "attention.wo",
            "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        }
    ),
)  # fmt: skip
EXAONE = {"num_layers": 3, "activation_function": "silu", "layer_norm_epsilon": 1e-2}
EXAONE_NAMES = renamed(
    {
        "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte", "input_layernorm": "ln_1",
        "model.norm": "transformer.ln_f", "self_attn.o_proj": "self_attn.out_proj",
        "self_attn": "attn.attention", "post_attention_layernorm": "ln_2", "mlp.gate_proj": "mlp.c_fc_0",
        "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj",
    }
)  # fmt: skip
MINICPM = {
    "attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 1.4 / 3**0.5,
    "logits_scaling": 96 / 40,
}  # fmt: skip
MINICPM_SCALES = {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 40}
MINICPM_LONG = {
    "rope_parameters": long_rope(ROPE_ORIGINAL, 8)["rope_parameters"]
    | {"original_max_position_embeddings": ROPE_ORIGINAL}
}
CODESHELL = {
    "n_positions": 256, "n_inner": 160, "layer_norm_epsilon": 1e-2, "position_embedding_type": "rope",
    "activation_function": "gelu_pytorch_tanh",
}  # fmt: skip
GPT2_STYLE = {
    "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte", "input_layernorm": "ln_1",
    "model.norm": "transformer.ln_f", "self_attn.qkv_proj": "attn.c_attn", "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
}  # fmt: skip
CODESHELL_NAMES = renamed(GPT2_STYLE)
BAICHUAN = (one_qkv, renamed({"qkv_proj": "W_pack"}))
BAICHUAN_13B = {"max_position_embeddings": None, "model_max_length": 256}
REFACT = {"num_key_value_heads": 1, "intermediate_size": 256}
REFACT_NAMES = {
    "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte", "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2", "model.norm": "ln_f", "self_attn.q_proj": "attn.q",
    "self_attn.kv": "attn.kv", "self_attn.o_proj": "attn.c_proj", "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip
REFACT_CLASS: dict[str, Any] = {
    "patch": partial(use_alibi, layer_norms=True),
    "written_as": named("GPTRefact") | {"layer_norm_epsilon": 1e-2},
    "published": (published_refact, renamed(REFACT_NAMES)),
}
SPARSE_LM = {"hidden_act": "silu", "sparsity_gated_mlp": True, "sparsity_mlp_execution_logic": "training"}


def published_sparse_lm(tensors: Tensors) -> Tensors:
    """Rearrange FFN matrices as in Sakana's first training code: plain parameters, two of them by input."""
    found = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix("_proj.weight")
        if stem == name or ".mlp." not in name:
            found[name] = tensor
        else:
            found[f"{stem}_weight"] = tensor if stem.endswith("up") else tensor.T.contiguous()
    return found


QWEN1 = {"num_key_value_heads": 6, "tie_word_embeddings": False}
QWEN1_ENTRIES = {
    "architectures": ["QWenLMHeadModel"], "model_type": "qwen", "intermediate_size": 320, "seq_length": 256,
    "layer_norm_epsilon": 1e-2, "no_bias": True, "rotary_emb_base": 10000, "rotary_pct": 1.0,
}  # fmt: skip
QWEN1_NAMES = renamed(
    GPT2_STYLE | {"mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1", "mlp.down_proj": "mlp.c_proj"}
)
MAINCODER_NAMES = renamed({"query_layernorm": "q_norm", "key_layernorm": "k_norm", "mlp": "feed_forward"})
PLAMO_NAMES = renamed({"model.layers": "model.layers.layers"})
TURBOSPARSE = TinyModel(
    "TurboSparse",
    {"architectures": ["BambooForCausalLM"], "model_type": "bamboo", "ranks": [32, 48, 32]},
)

# Every layer has one part. dt stays far above the minimum that some of transformers' paths apply.
NEMOTRON_H: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    "head_dim": 32, "layer_norm_epsilon": 1e-2, "mamba_num_heads": 6, "mamba_head_dim": 24, "n_groups": 2,
    "ssm_state_size": 20, "conv_kernel": 4, "chunk_size": 32,
}  # fmt: skip
GRANITE_HYBRID: dict[str, Any] = {
    **GRANITE, "num_attention_heads": 3, "num_key_value_heads": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 64, "mamba_n_heads": 6,
    "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 4, "mamba_chunk_size": 32,
}  # fmt: skip
NEMOTRON_H_EXPERTS: dict[str, Any] = {
    **NEMOTRON_H,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5,
}  # fmt: skip
FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 144, "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 4,
    "mamba_chunk_size": 32, "rms_norm_eps": 1e-2, "embedding_multiplier": 1.75, "lm_head_multiplier": 0.6,
    "key_multiplier": 0.8, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.9, "mlp_multipliers": [0.9, 1.3],
    "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "num_heads": 8, "head_dim": 24, "n_groups": 2, "state_size": 20, "chunk_size": 32,
    "layer_norm_epsilon": 1e-2,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "state_size": 12, "conv_kernel": 4, "time_step_rank": 10, "layer_norm_epsilon": 1e-2,
    "intermediate_size": 192,
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_experts": 6, "num_experts_per_tok": 3, "mamba_d_state": 12,
    "mamba_dt_rank": 10,
}  # fmt: skip
RWKV6 = {"head_size": 16, "layer_norm_epsilon": 1e-2, "rescale_every": 2, "num_hidden_layers": 5}
RWKV7 = {
    "head_dim": 24, "norm_eps": 1e-2, "decay_low_rank_dim": 32, "a_low_rank_dim": 16, "v_low_rank_dim": 8,
    "gate_low_rank_dim": 48, "num_hidden_layers": 2,
}  # fmt: skip
MPT = {"max_seq_len": 256, "layer_norm_epsilon": 1e-2}
BLOOM = {"seq_length": 256, "layer_norm_epsilon": 1e-2}

RECIPES: dict[str, TinyModel] = {
    "llama": TinyModel("Llama"),
    "llama-wide-heads": TinyModel("Llama", WIDE_HEADS),
    "llama-biases": TinyModel("Llama", {**BIASES, "mlp_bias": True}),
    "llama3-rope": TinyModel("Llama", {**WIDE_HEADS, **LLAMA3}),
    "llama-linear-rope": TinyModel("Llama", rope("linear")),
    "llama-yarn": TinyModel("Llama", rope("yarn")),
    "llama-yarn-betas": TinyModel(
        "Llama", {**WIDE_HEADS, **rope("yarn", beta_fast=8.0, beta_slow=2.0, attention_factor=1.3)}
    ),
    "llama-relu": TinyModel("Llama", {"hidden_act": "relu"}),
    "llama-relu2": TinyModel("Llama", {"hidden_act": "relu2"}),
    "sparse-lm": TinyModel(
        "Llama",
        {"hidden_act": "relu", "num_key_value_heads": 6, **TIED},
        written_as=named("SparseLlama") | SPARSE_LM,
        published=(published_sparse_lm,),
    ),
    "sparse-lm-qwen2": TinyModel(
        "Qwen2", {"hidden_act": "relu"}, written_as=named("SparseQwen2") | SPARSE_LM
    ),
    "prosparse": TinyModel(
        "Llama", patch=use_fatrelu, written_as={"hidden_act": "fatrelu", "hidden_act_param": 0.1}
    ),
    "smollm": TinyModel("Llama", {**TIED, "num_attention_heads": 3, **ONE_KV_HEAD}),
    "mistral-window": TinyModel("Mistral", {**WIDE_HEADS, "sliding_window": 24}),
    "mistral-full": TinyModel("Mistral", {"sliding_window": None}),
    "qwen2": TinyModel("Qwen2"),
    "qwen2-window": TinyModel(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    ),
    "qwen2-yarn": TinyModel("Qwen2", rope("yarn")),
    "qwen3": TinyModel("Qwen3", WIDE_HEADS),
    "qwen3-tied": TinyModel("Qwen3", {"head_dim": 16, **TIED, **BIASES}),
    "bamboo": TinyModel(
        "Llama",
        {"hidden_act": "relu", "num_key_value_heads": 3},
        patch=use_drelu,
        written_as={"architectures": ["BambooForCausalLM"], "model_type": "bamboo"},
    ),
    "falcon-7b": TinyModel("Falcon", {"multi_query": True, **FALCON}),
    "falcon-40b": TinyModel("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, **FALCON}),
    "falcon2-11b": TinyModel(
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, **FALCON},
    ),
    "opt": TinyModel("OPT", {"ffn_dim": 160, "word_embed_proj_dim": 96}),
    "nemotron": TinyModel("Nemotron", {"norm_eps": 1e-2}),
    "nemotron-biases": TinyModel("Nemotron", {"norm_eps": 1e-2, **BIASES, "mlp_bias": True}),
    "arcee": TinyModel("Arcee"),
    "arcee-yarn": TinyModel("Arcee", {**WIDE_HEADS, **rope("yarn")}),
    "gemma2": TinyModel("Gemma2", GEMMA | {"query_pre_attn_scalar": 16}),
    "gemma2-caps": TinyModel(  # far below the uncapped scores and logits, which are dozens
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "head_dim": 32},
    ),
    "gemma2-uncapped": TinyModel(
        "Gemma2",
        {
            **GEMMA,
            **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 40},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi3": TinyModel("Phi3", PHI3),
    "phi3-window": TinyModel("Phi3", {**PHI3, "sliding_window": 24, "num_key_value_heads": 3}),
    "phi3-partial": TinyModel(  # like Phi 4 mini
        "Phi3",
        {**PHI3, **long_rope(ROPE_ORIGINAL, 8, partial_rotary_factor=0.5), **TIED},
    ),
    "phi3-long": TinyModel("Phi3", {**PHI3, **long_rope(ROPE_ORIGINAL, 16)}),
    "phi3-short": TinyModel("Phi3", {**PHI3, **long_rope(200, 16)}),  # 200: longer than the computed texts
    "granite": TinyModel("Granite", GRANITE),
    "granite-tied": TinyModel("Granite", {**GRANITE, **TIED, **BIASES, "mlp_bias": True, **rope("yarn")}),
    "granite-swa": TinyModel("GraniteSWA", GRANITE_SWA),
    "granite-swa-unrotated": TinyModel(  # one layer of each kind has no rotation
        "GraniteSWA",
        {
            **GRANITE_SWA,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_act": "relu",
            **BIASES,
            "num_hidden_layers": 4,
            **TIED,
        }
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7}
        | {"layer_rope_theta": [20000.0, 20000.0, 0, 0]},
    ),
    "granite-unscaled": TinyModel("Granite"),  # scores are multiplied by 1 anyway
    "smollm3": TinyModel("SmolLM3", SMOLLM3),
    "smollm3-biases": TinyModel("SmolLM3", {**SMOLLM3, **UNTIED, **BIASES, "mlp_bias": True, **rope("yarn")}),
    "glm4": TinyModel("Glm4", {"head_dim": 32, "pad_token_id": 0}),
    "glm4-unbiased": TinyModel(
        "Glm4",
        {"head_dim": 16, "pad_token_id": 0, "attention_bias": False, **TIED}
        | {"rope_parameters": {**rope("linear")["rope_parameters"], "partial_rotary_factor": 1.0}},
    ),
    "lfm2": TinyModel("Lfm2", {**LFM2, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.3}),
    "lfm2-untied": TinyModel(
        "Lfm2",
        {**LFM2, **WIDE_HEADS, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4}
        | {"layer_types": ["full_attention", "conv", "full_attention"], **UNTIED},
    ),
    "gemma3": TinyModel("Gemma3", GEMMA3, config="Gemma3Text"),
    "gemma3-scaled": TinyModel(  # like the 4B: layers without a window are slowed
        "Gemma3",
        {**GEMMA3, **two_ropes(linear=8.0), "query_pre_attn_scalar": 20, "final_logit_softcapping": 3.0},
        config="Gemma3Text",
    ),
    "gemma3-pattern": TinyModel(
        "Gemma3", {**GEMMA3, **two_ropes(), "num_hidden_layers": 3} | ONE_WINDOW, config="Gemma3Text"
    ),
    "gemma3-relu": TinyModel("Gemma3", {**GEMMA3, "hidden_activation": "relu"}, config="Gemma3Text"),
    "gemma3n": TinyModel("Gemma3n", GEMMA3N, config="Gemma3nText"),
    "gemma3n-widths": TinyModel(  # the layers' own embeddings have fewer rows than tokens
        "Gemma3n",
        {
            **GEMMA3N,
            "num_hidden_layers": 4,
            "intermediate_size": [160, 96, 128, 64],
            "num_kv_shared_layers": 2,
        }
        | {"activation_sparsity_pattern": [0.0, 0.8, 0.5, 0.9], "altup_num_inputs": 3, "laurel_rank": 40}
        | {"vocab_size_per_layer_input": 300, "final_logit_softcapping": 3.0, "head_dim": 32}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, **two_ropes()},
        config="Gemma3nText",
    ),
    "gemma3n-unshared": TinyModel(  # every layer has its own keys and values, and none has a top-k
        "Gemma3n",
        {**GEMMA3N, "num_hidden_layers": 2, "num_kv_shared_layers": 0, **ONE_KV_HEAD}
        | {"activation_sparsity_pattern": [0.0, 0.0], "altup_num_inputs": 2, "hidden_activation": "silu"},
        config="Gemma3nText",
    ),
    "gemma4": TinyModel(  # like the dense one: some layers use keys as values
        "Gemma4",
        {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1},
        config="Gemma4Text",
        patch=scale_results,
    ),
    "gemma4-embedded": TinyModel(  # like E2B: layers embed tokens, and the last ones share keys and values
        "Gemma4",
        {**GEMMA4, "hidden_size_per_layer_input": 24, "num_hidden_layers": 6, "num_kv_shared_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3, "use_double_wide_mlp": True},
        config="Gemma4Text",
        patch=scale_results,
    ),
    "gemma": TinyModel("Gemma", {"head_dim": 32}),
    "gemma-narrow": TinyModel("Gemma", {"head_dim": 16, **UNTIED, **ONE_KV_HEAD}),
    "gemma-biases": TinyModel("Gemma", {"head_dim": 24, **BIASES, **rope("linear")}),
    "gpt2": TinyModel("GPT2", GPT2),
    "gpt2-wide": TinyModel("GPT2", {**GPT2, "n_inner": 224, "num_attention_heads": 3}),
    "gpt2-untied": TinyModel("GPT2", {**GPT2, "n_inner": None, "activation_function": "relu", **UNTIED}),
    "gptneox": TinyModel("GPTNeoX", NEOX),
    "gptneox-serial": TinyModel("GPTNeoX", {**NEOX, "use_parallel_residual": False, "rotary_pct": 1.0}),
    "gptneox-wide": TinyModel(
        "GPTNeoX", {**NEOX, "num_attention_heads": 3, "attention_bias": False, "rotary_emb_base": 500}
    ),
    "phi2": TinyModel("Phi", LAYER_NORMS),
    "phi2-groups": TinyModel("Phi", {**LAYER_NORMS, "num_attention_heads": 3, **ONE_KV_HEAD}),
    "phi2-rotated": TinyModel(
        "Phi", {**LAYER_NORMS, **rope("linear", partial_rotary_factor=1.0), "num_key_value_heads": 6}
    ),
    "starcoder2": TinyModel("Starcoder2", {"norm_epsilon": 1e-2}),
    "starcoder2-window": TinyModel("Starcoder2", {"norm_epsilon": 1e-2, "sliding_window": 24, **THREE_HEADS}),
    "starcoder2-unbiased": TinyModel("Starcoder2", {"norm_epsilon": 1e-2, "use_bias": False, **UNTIED}),
    "stablelm": TinyModel("StableLm", LAYER_NORMS),
    "stablelm-norms": TinyModel("StableLm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "stablelm-parallel": TinyModel(
        "StableLm", {**LAYER_NORMS, "use_parallel_residual": True, "use_qkv_bias": True}
    ),
    "stablelm-rotated": TinyModel(
        "StableLm",
        {**LAYER_NORMS, **rope("linear", partial_rotary_factor=1.0), **TIED}
        | {"num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "command-r": TinyModel("Cohere", COHERE),
    "command-r-biases": TinyModel("Cohere", {**COHERE, **BIASES, "num_key_value_heads": 6}),
    "command-r-plus": TinyModel("Cohere", {**COHERE, "use_qk_norm": True}),
    "command-r-heads": TinyModel("Cohere", {**COHERE, **THREE_HEADS}),
    "cohere2": TinyModel("Cohere2", {**COHERE, "num_hidden_layers": 5, "sliding_window": 24}),
    "cohere2-full": TinyModel("Cohere2", {**COHERE, "layer_types": ["full_attention"] * 3}),
    "cohere2-pattern": TinyModel("Cohere2", {**COHERE, **ONE_WINDOW} | {"sliding_window": 24, **THREE_HEADS}),
    "jais2": TinyModel("Jais2", LAYER_NORMS),
    "jais2-unbiased": TinyModel("Jais2", {**LAYER_NORMS, "attention_bias": False, "mlp_bias": False, **TIED}),
    "jais2-heads": TinyModel("Jais2", {**LAYER_NORMS, **THREE_HEADS, **LLAMA3}),
    "olmo": TinyModel("Olmo"),
    "olmo-tied": TinyModel("Olmo", {**THREE_HEADS, **TIED}),
    "olmo-biases": TinyModel("Olmo", {"num_key_value_heads": 6, **BIASES, **rope("linear")}),
    "apertus": TinyModel("Apertus", LLAMA3),
    "apertus-tied": TinyModel("Apertus", {**WIDE_HEADS, **rope("linear"), **TIED}),
    "apertus-biases": TinyModel("Apertus", {**THREE_HEADS, **BIASES}),
    "mpt": TinyModel("Mpt", MPT),
    "mpt-heads": TinyModel("Mpt", {**MPT, "num_attention_heads": 3}),
    "mpt-untied": TinyModel("Mpt", {**MPT, "num_attention_heads": 8, **UNTIED}),
    "bloom": TinyModel("Bloom", BLOOM),
    "bloom-heads": TinyModel("Bloom", {**BLOOM, "num_attention_heads": 3}),
    "bloom-untied": TinyModel("Bloom", {**BLOOM, "num_attention_heads": 4, **UNTIED}),
    "bitnet": TinyModel("BitNet", TIED),
    "bitnet-biases": TinyModel("BitNet", {**THREE_HEADS, **BIASES}),
    "bitnet-silu": TinyModel("BitNet", {"hidden_act": "silu", "num_key_value_heads": 6, **LLAMA3}),
    "seed_oss": TinyModel("SeedOss", WIDE_HEADS),
    "seed_oss-unbiased": TinyModel("SeedOss", {"head_dim": 16, "attention_bias": False, **TIED}),
    "seed_oss-biases": TinyModel(
        "SeedOss",
        {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True, **ONE_KV_HEAD} | rope("yarn"),
    ),
    "ernie4_5": TinyModel("Ernie4_5", WIDE_HEADS),
    "ernie4_5-biases": TinyModel("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "ernie4_5-untied": TinyModel("Ernie4_5", {"head_dim": 24, **UNTIED, **ONE_KV_HEAD}),
    "chatglm": TinyModel("Glm", {"head_dim": 32, "pad_token_id": 0, **BIASES}),
    "chatglm-unbiased": TinyModel(
        "Glm", {"head_dim": 16, "pad_token_id": 0, "attention_bias": False, **TIED}
    ),
    "chatglm-rotated": TinyModel(
        "Glm",
        {"head_dim": 32, "pad_token_id": 0, "num_key_value_heads": 3}
        | rope("linear", partial_rotary_factor=1.0),
    ),
    "olmo2": TinyModel("Olmo2"),
    "olmo2-heads": TinyModel("Olmo2", {**THREE_HEADS, **BIASES}),
    "olmo2-tied": TinyModel("Olmo2", {**TIED, "num_key_value_heads": 6, **LLAMA3}),
    "olmo3": TinyModel("Olmo3", {"num_hidden_layers": 5, "sliding_window": 24}),
    "olmo3-yarn": TinyModel(
        "Olmo3",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | unscaled_windows("yarn", 500.0),
    ),
    "exaone4": TinyModel("Exaone4", {"num_hidden_layers": 5, "sliding_window": 24}),
    "exaone4-full": TinyModel(
        "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, **LLAMA3}
    ),
    "exaone4-pattern": TinyModel("Exaone4", {"sliding_window": 24, **ONE_WINDOW} | {**TIED, **THREE_HEADS}),
    "hunyuan-dense": TinyModel("HunYuanDenseV1", WIDE_HEADS),
    "hunyuan-dense-alpha": TinyModel("HunYuanDenseV1", {"head_dim": 16, **DYNAMIC}),
    "hunyuan-dense-tied": TinyModel("HunYuanDenseV1", {"head_dim": 24, **TIED, **BIASES, **ONE_KV_HEAD}),
    "mistral3": TinyModel("Ministral3", MINISTRAL),
    "mistral3-plain": TinyModel(
        "Ministral3",
        {"head_dim": 16, **ONE_KV_HEAD, "sliding_window": 24}
        | rope("linear", llama_4_scaling_beta=0.0, original_max_position_embeddings=64),
    ),
    "mistral3-sees": TinyModel(
        "Mistral3",
        {**MINISTRAL, "model_type": "ministral3", **TIED, "head_dim": 24},
        vision={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "model_type": "pixtral"},
    ),
    "qwen2vl": TinyModel("Qwen2VL", mrope(3, 3, 2), vision=VISION),
    "qwen2vl-tied": TinyModel("Qwen2VL", {**mrope(8, 4, 4), **TIED, **THREE_HEADS}, vision=VISION),
    "qwen25vl": TinyModel("Qwen2_5_VL", {**mrope(2, 3, 3), "num_key_value_heads": 6}, vision=VISION),
    "qwen3vl": TinyModel("Qwen3VL", {**WIDE_HEADS, **mrope(6, 5, 5)}, vision=VISION),
    "qwen3vl-tied": TinyModel("Qwen3VL", {"head_dim": 16, **mrope(4, 2, 2), **TIED, **BIASES}, vision=VISION),
    "xverse": TinyModel("Llama", written_as=named("Xverse")),
    "xverse-tied": TinyModel("Llama", {**TIED, **ONE_KV_HEAD, **rope("linear")}, written_as=named("Xverse")),
    "internlm2": TinyModel("Llama", written_as=named("InternLM2"), published=INTERNLM2),
    "internlm2-biases": TinyModel(
        "Llama", {**BIASES, **THREE_HEADS}, written_as=named("InternLM2"), published=(one_qkv, INTERNLM2[1])
    ),
    "orion": TinyModel("StableLm", ORION, written_as=named("Orion") | {"rms_norm_eps": 1e-2}),
    "orion-heads": TinyModel(
        "StableLm", {**ORION, **THREE_HEADS}, written_as=named("Orion") | {"rms_norm_eps": 1e-2}
    ),
    "pangu-embedded": TinyModel("Llama", BIASES, written_as=named("PanguEmbedded")),
    "pangu-embedded-tied": TinyModel(
        "Llama", {**TIED, **BIASES, **WIDE_HEADS, **ONE_KV_HEAD}, written_as=named("PanguEmbedded")
    ),
    "exaone": TinyModel("Llama", written_as=named("Exaone") | EXAONE, published=(EXAONE_NAMES,)),
    "exaone-llama3": TinyModel(
        "Llama",
        {**LLAMA3, **TIED, **THREE_HEADS},
        written_as=named("Exaone") | EXAONE,
        published=(EXAONE_NAMES,),
    ),
    "minicpm": TinyModel("Granite", MINICPM | TIED, written_as=named("MiniCPM") | MINICPM_SCALES),
    "minicpm-long": TinyModel(
        "Granite",
        {**MINICPM, **MINICPM_LONG, "num_key_value_heads": 6},
        written_as=named("MiniCPM") | MINICPM_SCALES,
    ),
    "starcoder": TinyModel("GPTBigCode", GPT2),
    "starcoder-heads": TinyModel(
        "GPTBigCode", {**GPT2, "n_inner": 224, "num_attention_heads": 3, "multi_query": False, **UNTIED}
    ),
    "codeshell": TinyModel(
        "Starcoder2",
        {"norm_epsilon": 1e-2, **UNTIED},
        written_as=named("CodeShell") | CODESHELL | {"num_query_groups": 2},
        published=(one_qkv, CODESHELL_NAMES),
    ),
    "codeshell-tied": TinyModel(
        "Starcoder2",
        {"norm_epsilon": 1e-2, **TIED, **THREE_HEADS},
        written_as=named("CodeShell") | CODESHELL | {"num_query_groups": 1},
        published=(one_qkv, CODESHELL_NAMES),
    ),
    "qwen": TinyModel("Qwen2", QWEN1, written_as=QWEN1_ENTRIES, published=(one_qkv, QWEN1_NAMES)),
    "qwen-heads": TinyModel(
        "Qwen2",
        {**QWEN1, "num_attention_heads": 3, "num_key_value_heads": 3, **rope("default", rope_theta=500.0)},
        written_as=QWEN1_ENTRIES | {"kv_channels": 32, "rotary_emb_base": 500.0},
        published=(one_qkv, QWEN1_NAMES),
    ),
    "paddleocr": TinyModel("PaddleOCRVL", {**WIDE_HEADS, **mrope(6, 5, 5)}, vision=VISION),
    "paddleocr-biases": TinyModel(
        "PaddleOCRVL",
        {"head_dim": 16, "use_bias": True, **mrope(4, 2, 2), **TIED, **ONE_KV_HEAD},
        vision=VISION,
    ),
    "hunyuan_vl": TinyModel("HunYuanVL", {"head_dim": 16, **xdrope(2, 2, 2, 2)}, vision=HUNYUAN_VISION),
    "hunyuan_vl-plain": TinyModel(
        "HunYuanVL", {**WIDE_HEADS, **mrope(6, 5, 5), **BIASES, **ONE_KV_HEAD, **TIED}, vision=HUNYUAN_VISION
    ),
    "maincoder": TinyModel(
        "HunYuanDenseV1",
        {**WIDE_HEADS, **TIED},
        written_as=named("Maincoder") | {"intermediate_size_mlp": 160, "use_qk_norm": True},
        published=(partial(neighbours, head_dim=32), MAINCODER_NAMES),
    ),
    "maincoder-untied": TinyModel(
        "HunYuanDenseV1",
        {"head_dim": 24, **UNTIED, **ONE_KV_HEAD},
        written_as=named("Maincoder") | {"intermediate_size_mlp": 160, "use_qk_norm": True},
        published=(partial(neighbours, head_dim=24), MAINCODER_NAMES),
    ),
    "plamo": TinyModel(
        "Llama",
        patch=use_parallel_layers,
        written_as=named("Plamo") | {"n_shared_head": 3, "num_key_value_heads": 6},
        published=(partial(scattered, groups=2, head_dim=16), PLAMO_NAMES),
    ),
    "plamo-heads": TinyModel(
        "Llama",
        {"num_attention_heads": 6, "num_key_value_heads": 3, **TIED},
        patch=use_parallel_layers,
        written_as=named("Plamo") | {"n_shared_head": 2},
        published=(partial(scattered, groups=3, head_dim=16), PLAMO_NAMES),
    ),
    "muse-glimmer": TinyModel("MuseGlimmer", MUSE, vision=MUSE_VISION),
    "muse-glimmer-from-last": TinyModel(
        "MuseGlimmer", MUSE | {"num_hidden_layers": 6, **THREE_HEADS, **BIASES}, vision=MUSE_VISION
    ),
    "muse-glimmer-pattern": TinyModel(
        "MuseGlimmer",
        MUSE
        | {"num_hidden_layers": 3, **ONE_WINDOW}
        | {"layer_rope_theta": [0, 10000.0, 0], **TIED, "head_dim": 16},
        vision=MUSE_VISION,
    ),
    "baichuan": TinyModel(
        "Llama", {"num_key_value_heads": 6}, written_as=named("Baichuan"), published=BAICHUAN
    ),
    "baichuan-alibi": TinyModel(
        "Llama",
        {"num_key_value_heads": 6},
        patch=use_alibi,
        written_as=named("Baichuan") | BAICHUAN_13B,
        published=BAICHUAN,
    ),
    "baichuan-alibi-heads": TinyModel(
        "Llama",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "relu"},
        patch=use_alibi,
        written_as=named("BaiChuan") | BAICHUAN_13B,
        published=BAICHUAN,
    ),
    "refact": TinyModel("Llama", REFACT, **REFACT_CLASS),
    "refact-heads": TinyModel("Llama", {**REFACT, "num_attention_heads": 4}, **REFACT_CLASS),
    "refact-odd-heads": TinyModel("Llama", {**REFACT, "num_attention_heads": 3}, **REFACT_CLASS),
    "turbosparse-mistral": TURBOSPARSE,
    "phi3-relu": TinyModel("Phi3", {**PHI3, "hidden_act": "relu"}),
    "granite-relu": TinyModel("Granite", {**GRANITE, "hidden_act": "relu", "mlp_bias": True}),
    "nemotron-h": TinyModel("NemotronH", NEMOTRON_H),
    "nemotron-h-relu": TinyModel(  # an FFN comes first, attention last, and channels do not fill a vector
        "NemotronH",
        {**NEMOTRON_H, "n_groups": 3, "mamba_head_dim": 36, "conv_kernel": 3}
        | {"layers_block_type": ["mlp", "linear_attention", "linear_attention", "full_attention"]}
        | {"num_hidden_layers": 4, "mlp_hidden_act": "relu"},
    ),
    "falcon-h1": TinyModel("FalconH1", FALCON_H1),
    "falcon-h1-norm": TinyModel(  # a norm after the gate; the output is the embedding with its own multiplier
        "FalconH1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_conv": 3}
        | {**TIED, "mamba_n_groups": 3, "num_key_value_heads": 2},
    ),
    "mamba": TinyModel("Mamba", MAMBA),
    "mamba-falcon": TinyModel("FalconMamba", {**MAMBA, "mixer_rms_eps": 1e-2, "conv_kernel": 3, **UNTIED}),
    "mamba-falcon-epsilon": TinyModel("FalconMamba", {**MAMBA, "mixer_rms_eps": 0.5}),
    "plm": TinyModel(
        "DeepseekV2",
        {"first_k_dense_replace": 3, "num_key_value_heads": 6, "kv_lora_rank": 40, "q_lora_rank": None}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, **TIED},
        patch=use_squared_relu,
        written_as=named("PLM") | {"hidden_act": "relu2"},
    ),
    "rwkv6": TinyModel("Rwkv6", RWKV6),
    "rwkv6-unscaled": TinyModel("Rwkv6", {**RWKV6, "head_size": 32, "rescale_every": 0}),
    "rwkv7": TinyModel("Rwkv7", RWKV7),
    "rwkv7-heads": TinyModel("Rwkv7", {**RWKV7, "head_dim": 32, "v_low_rank_dim": 64}),
    "mamba2": TinyModel("Mamba2", MAMBA2),
    "mamba2-tied": TinyModel(
        "Mamba2", {**MAMBA2, "num_heads": 4, "head_dim": 48, "n_groups": 1, "conv_kernel": 3} | TIED
    ),
}


OWN: dict[str, Callable[[dict[str, Any]], torch.nn.Module]] = {
    "SmallThinker": SmallThinker,
    "TurboSparse": TurboSparse,
    "Rwkv6": Rwkv6,
    "Rwkv7": Rwkv7,
}
"""Models that transformers lacks."""

SMALLTHINKER = {
    "head_dim": 16, "num_hidden_layers": 5, "moe_num_primary_experts": 6, "moe_ffn_hidden_size": 48,
    "moe_num_active_primary_experts": 3, "rope_theta": 10000.0, **TIED,
}  # fmt: skip
GPT_OSS = {
    "num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 24,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": ROPE_ORIGINAL,
    },
}  # fmt: skip
GLM_EXPERTS = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 16,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "pad_token_id": 0,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "num_key_value_heads": 6, "kv_lora_rank": 40,
    "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
KIMI = {
    **{k: v for k, v in DEEPSEEK.items() if k not in ("n_routed_experts", "first_k_dense_replace")},
    "num_local_experts": 6, "num_hidden_layers": 4, "linear_num_heads": 6, "linear_head_dim": 20,
    "linear_conv_kernel_dim": 4, "pad_token_id": 0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
KIMI_LISTS = {
    "layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 2,
    "linear_attn_config": {
        "full_attn_layers": [1, 3], "kda_layers": [2], "head_dim": 32, "num_heads": 3,
        "short_conv_kernel_size": 3,
    },
}  # fmt: skip
MISTRAL4 = {
    **DEEPSEEK, "first_k_dense_replace": 0, "q_lora_rank": 28,
    "rope_parameters": MINISTRAL["rope_parameters"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
DSA = {
    **DEEPSEEK, "q_lora_rank": 28, "n_routed_experts": 12, "n_group": 3, "topk_group": 2,
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 192,
}  # fmt: skip
DEEPSEEK4 = {
    "num_hidden_layers": 4, "num_attention_heads": 4, **ONE_KV_HEAD, "head_dim": 32,
    "q_lora_rank": 28, "qk_rope_head_dim": 8, "partial_rotary_factor": 0.25, "sliding_window": 24,
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "compress_rope_theta": 4e4, "o_groups": 2, "o_lora_rank": 20, "index_n_heads": 4, "index_head_dim": 16,
    "index_topk": 64, "hc_mult": 4, "hc_sinkhorn_iters": 5, "hc_eps": 1e-3, "swiglu_limit": 0.7,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "routed_scaling_factor": 1.7, "mlp_layer_types": ["hash_moe"] + ["moe"] * 3, "pad_token_id": 0,
    **rope("yarn"),
}  # fmt: skip
DEEPSEEK_GROUPS = {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "q_lora_rank": 28}
LFM2_EXPERTS = {
    "layer_types": ["conv", "full_attention", "conv", "conv"], "num_hidden_layers": 4, "norm_eps": 1e-2,
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_dense_layers": 1,
    "routed_scaling_factor": 1.7, "pad_token_id": 0,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "head_dim": 16, "pad_token_id": 0, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
DELTA_EXPERTS = {
    **DELTA, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
QWEN4 = {
    **DELTA_EXPERTS, "hc_count": 4, "hc_lowrank": 20, "output_gate_type": "sigmoid", "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 256, "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 48, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 16, "split_ngram_parts": 3,
}  # fmt: skip
ERNIE = {
    "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 48, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}  # fmt: skip
EXAONE_EXPERTS = {
    "num_hidden_layers": 5, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "sliding_window": 24,
}  # fmt: skip
MINIMAX = {**WIDE_HEADS, "num_local_experts": 6, "num_experts_per_tok": 3}
DOTS1 = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
    "num_key_value_heads": 6,
}  # fmt: skip
AFMOE = {
    "num_hidden_layers": 5, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "mup_enabled": True,
    "moe_intermediate_size": 48, "num_dense_layers": 1, "num_shared_experts": 1, "route_scale": 1.7,
    "sliding_window": 24,
}  # fmt: skip
MELLUM = {
    "num_hidden_layers": 5, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 48, "sliding_window": 24,
}  # fmt: skip
BAILING = {
    "self_attn.qkv_proj": "attention.query_key_value", "self_attn.o_proj": "attention.dense",
    "embed_tokens": "word_embeddings",
}  # fmt: skip
BAILING_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK_OCR = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "use_mla": False, "topk_method": "greedy",
}  # fmt: skip
BAILING2 = GLM_EXPERTS | {"use_qk_norm": True, "num_nextn_predict_layers": 0}
BAILING2_NAMES = renamed(
    BAILING
    | {
        "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
    }
)  # fmt: skip
HY_V3 = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 16,
    "router_scaling_factor": 1.7,
}  # fmt: skip
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
EXPERTS: dict[str, TinyModel] = {
    "mixtral": TinyModel("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": TinyModel(
        "Mixtral", {**WIDE_HEADS, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 24}
    ),
    "qwen3moe": TinyModel("Qwen3Moe", {**WIDE_HEADS, **QWEN_EXPERTS, "norm_topk_prob": True}),
    "qwen3moe-raw-weights": TinyModel("Qwen3Moe", {**WIDE_HEADS, **QWEN_EXPERTS, "norm_topk_prob": False}),
    "olmoe": TinyModel("Olmoe", {"num_experts": 5, "num_experts_per_tok": 3}),
    "olmoe-normalised": TinyModel(
        "Olmoe", {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True}
    ),
    "qwen2moe": TinyModel("Qwen2Moe", {**QWEN_EXPERTS, "shared_expert_intermediate_size": 64}),
    "granitemoe": TinyModel("GraniteMoe", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "granitemoe-shared": TinyModel(
        "GraniteMoeShared",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
        | TIED,
    ),
    "granitemoe-swa": TinyModel(
        "GraniteMoeSWA", {**GRANITE_SWA, "num_local_experts": 6, "num_experts_per_tok": 3}
    ),
    "granitemoe-swa-shared": TinyModel(
        "GraniteMoeSWA",
        {**GRANITE_SWA, **WIDE_HEADS, "num_local_experts": 3, "num_experts_per_tok": 1}
        | {"shared_intermediate_size": 64, "layer_rope_theta": [0] + [5000.0] * 4}
        | TIED,
    ),
    "smallthinker": TinyModel("SmallThinker", SMALLTHINKER),
    "turbosparse-mixtral": TinyModel(
        "TurboSparse",
        {"architectures": ["TurboSparseMixtralForCausalLM"], "model_type": "turbosparsemixtral"}
        | {"ranks": [32, 48, 32], "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "smallthinker-windows": TinyModel(
        "SmallThinker",
        {**SMALLTHINKER, "sliding_window_layout": [0, 1, 1, 1, 0], "rope_layout": [0, 1, 1, 1, 0]}
        | {"sliding_window_size": 24, "moe_primary_router_apply_softmax": True, **UNTIED},
    ),
    "gemma4-experts": TinyModel(  # like 26B-A4B: experts in addition to the layer's own FFN
        "Gemma4", GEMMA4_EXPERTS, config="Gemma4Text", patch=scale_results
    ),
    "gemma4-one-expert": TinyModel(
        "Gemma4",
        {**GEMMA4_EXPERTS, "num_experts": 3, "top_k_experts": 1, "moe_intermediate_size": 32}
        | {"hidden_activation": "relu", "attention_k_eq_v": False, "hidden_size_per_layer_input": 24},
        config="Gemma4Text",
        patch=scale_results,
    ),
    "gpt-oss": TinyModel("GptOss", GPT_OSS),
    "gpt-oss-pattern": TinyModel("GptOss", {**GPT_OSS, **ONE_WINDOW}),
    "lfm2moe": TinyModel("Lfm2Moe", LFM2_EXPERTS),
    "lfm2moe-plain": TinyModel(
        "Lfm2Moe",
        {**LFM2_EXPERTS, "use_expert_bias": False, "norm_topk_prob": False, "conv_L_cache": 5}
        | {"layer_types": ["full_attention", "conv", "full_attention", "conv"], "num_dense_layers": 0}
        | UNTIED,
    ),
    "qwen3next": TinyModel("Qwen3Next", DELTA_EXPERTS),
    "qwen3next-own-values": TinyModel(  # a value head for each key, of another width
        "Qwen3Next",
        {**DELTA_EXPERTS, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "norm_topk_prob": False}
        | {"linear_value_head_dim": 24, "linear_conv_kernel_dim": 3, **TIED},
    ),
    "qwen35moe": TinyModel("Qwen3_5Moe", DELTA_EXPERTS, config="Qwen3_5MoeText"),
    "qwen35": TinyModel("Qwen3_5", {**DELTA, **TIED}, config="Qwen3_5Text"),
    "qwen4exp": TinyModel("Qwen4Exp", QWEN4, config="Qwen4ExpText"),
    "qwen4exp-pairs": TinyModel(  # only of tokens; two streams, and one KV head
        "Qwen4Exp",
        {**QWEN4, "hc_count": 2, "hc_lowrank": 36, "ple_layer_ids": [1], "ngram_size": 2}
        | {"heads_per_ngram": 3, "ple_conv_kernel_size": 3, "ple_embed_dim": 60, "split_ngram_parts": 1}
        | {"eos_token_id": [7, 301], "indexer_budget": 192}
        | {**ONE_KV_HEAD, "num_experts_per_tok": 1, **TIED},
        config="Qwen4ExpText",
    ),
    "qwen4exp-without-ngrams": TinyModel(
        "Qwen4Exp",
        {**QWEN4, "hc_count": 3, "ple_layer_ids": [], "linear_num_key_heads": 3, "linear_num_value_heads": 3}
        | {"linear_conv_kernel_dim": 3},
        config="Qwen4ExpText",
    ),
    "qwen4exp-sees": TinyModel(  # as published
        "Qwen4Exp",
        {**QWEN4, **WIDE_HEADS, "ngram_size": 4, "heads_per_ngram": 1, "hidden_size": 64}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"]},
        vision=QWEN4_VISION,
    ),
    "glm4moe": TinyModel("Glm4Moe", GLM_EXPERTS),
    "glm4moe-groups": TinyModel(
        "Glm4Moe",
        {**GLM_EXPERTS, "n_group": 3, "topk_group": 2, "use_qk_norm": True, **BIASES}
        | {"n_shared_experts": 2, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "ernie4_5-moe": TinyModel("Ernie4_5_Moe", ERNIE),
    "ernie4_5-moe-alone": TinyModel(
        "Ernie4_5_Moe",
        {**ERNIE, "moe_num_shared_experts": 0, "moe_layer_start_index": 0, "use_bias": True, "moe_k": 1}
        | UNTIED,
    ),
    "ernie4_5-moe-heads": TinyModel("Ernie4_5_Moe", {**ERNIE, **THREE_HEADS, "moe_layer_start_index": 2}),
    "exaone-moe": TinyModel("ExaoneMoe", EXAONE_EXPERTS),
    "exaone-moe-groups": TinyModel(
        "ExaoneMoe", {**EXAONE_EXPERTS, "num_experts": 12, "n_group": 3, "topk_group": 2}
        | {"norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "exaone-moe-pattern": TinyModel(
        "ExaoneMoe",
        {**EXAONE_EXPERTS, "num_hidden_layers": 3, "num_experts_per_tok": 1, "num_shared_experts": 2}
        | ONE_WINDOW
        | {**THREE_HEADS, **TIED},
    ),
    "hunyuan-moe": TinyModel("HunYuanMoEV1", {**WIDE_HEADS, "num_experts": 6, "moe_topk": 3}),
    "hunyuan-moe-alpha": TinyModel(
        "HunYuanMoEV1", {"head_dim": 16, "num_experts": 5, "moe_topk": 1, **DYNAMIC}
    ),
    "hunyuan-moe-tied": TinyModel(
        "HunYuanMoEV1", {"head_dim": 24, "num_experts": 4, "moe_topk": 2, **TIED, **ONE_KV_HEAD} | BIASES
    ),
    "minimax-m2": TinyModel("MiniMaxM2", MINIMAX),
    "minimax-m2-partial": TinyModel("MiniMaxM2", {**MINIMAX, "rotary_dim": 16, "num_experts_per_tok": 1}),
    "minimax-m2-tied": TinyModel("MiniMaxM2", {**MINIMAX, "head_dim": 16, **TIED, **ONE_KV_HEAD}),
    "dots1": TinyModel("Dots1", DOTS1),
    "dots1-groups": TinyModel(
        "Dots1",
        {**DOTS1, "n_routed_experts": 12, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 0}
        | {"norm_topk_prob": False, **BIASES},
    ),
    "dots1-window": TinyModel(
        "Dots1",
        {**DOTS1, "sliding_window": 24, "max_window_layers": 1, "num_experts_per_tok": 1}
        | THREE_HEADS,
    ),
    "afmoe": TinyModel("Afmoe", AFMOE),
    "afmoe-pattern": TinyModel(
        "Afmoe",
        {**AFMOE, "num_hidden_layers": 3, "num_dense_layers": 0, "num_experts_per_tok": 1}
        | ONE_WINDOW,
    ),
    "afmoe-heads": TinyModel(
        "Afmoe", {**AFMOE, "head_dim": 32, **ONE_KV_HEAD, "num_shared_experts": 2, **BIASES}
    ),
    "qwen3vlmoe": TinyModel(
        "Qwen3VLMoe",
        {**WIDE_HEADS, **QWEN_EXPERTS, **mrope(6, 5, 5), "moe_intermediate_size": 32},
        vision=VISION,
        published=(experts_by_input,),
    ),
    "qwen3vlmoe-square": TinyModel(  # gate and up have as many rows as columns
        "Qwen3VLMoe", {**QWEN_EXPERTS, **mrope(6, 5, 5), **WIDE_HEADS}, vision=VISION,
        published=(experts_by_input,),
    ),
    "qwen3vlmoe-tied": TinyModel(
        "Qwen3VLMoe",
        {**QWEN_EXPERTS, **mrope(4, 2, 2), "head_dim": 16, **TIED, **ONE_KV_HEAD}
        | {"num_experts_per_tok": 1, **BIASES},
        vision=VISION,
    ),
    "mellum": TinyModel(
        "Mellum",
        {**MELLUM, "layer_types": ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]}
        | unscaled_windows("yarn", 500.0),
    ),
    "mellum-full": TinyModel("Mellum", {**MELLUM, **unscaled_windows("linear"), "norm_topk_prob": False}),
    "mellum-pattern": TinyModel(
        "Mellum",
        {**MELLUM, "num_hidden_layers": 3, "num_experts_per_tok": 1, **TIED}
        | {**ONE_WINDOW, **ONE_KV_HEAD}
        | {**BIASES, **unscaled_windows("linear")},
    ),
    "deepseek2-ocr": TinyModel(
        "Llama",
        {"num_key_value_heads": 6},
        patch=use_deepseek_experts,
        written_as=named("DeepseekOCR")
        | {"language_config": DEEPSEEK_OCR | {"norm_topk_prob": False, "routed_scaling_factor": 1.0}},
        published=(with_eyes,),
    ),
    "deepseek2-ocr-normalised": TinyModel(
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 3, **TIED},
        patch=partial(use_deepseek_experts, normalised=True),
        written_as=named("DeepseekOCR2") | DEEPSEEK_OCR | {"norm_topk_prob": True},
        published=(with_eyes,),
    ),
    "bailingmoe": TinyModel(
        "Llama",
        WIDE_HEADS,
        patch=partial(use_deepseek_experts, normalised=True),
        written_as=named("BailingMoe") | BAILING_EXPERTS | {"norm_topk_prob": True},
        published=(one_qkv, renamed(BAILING)),
    ),
    "bailingmoe-raw-weights": TinyModel(
        "Llama",
        THREE_HEADS,
        patch=use_deepseek_experts,
        written_as=named("BailingMoe") | BAILING_EXPERTS | {"norm_topk_prob": False},
        published=(one_qkv, renamed(BAILING)),
    ),
    "bailingmoe2": TinyModel(
        "Glm4Moe",
        BAILING2 | {"n_routed_experts": 12, "n_group": 3, "topk_group": 2},
        written_as=named("BailingMoeV2") | BAILING_EXPERTS | {"num_experts": 12, "num_shared_experts": 1},
        published=(one_qkv, BAILING2_NAMES),
    ),
    "bailingmoe2-heads": TinyModel(
        "Glm4Moe",
        {**BAILING2, **THREE_HEADS, "norm_topk_prob": False, "n_shared_experts": 2}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
        written_as=named("BailingMoeV2") | BAILING_EXPERTS | {"first_k_dense_replace": 0},
        published=(one_qkv, BAILING2_NAMES),
    ),
    "hy_v3": TinyModel("HYV3", HY_V3),
    "hy_v3-dense": TinyModel(
        "HYV3",
        {**HY_V3, **THREE_HEADS, "num_shared_experts": 2, "num_experts_per_tok": 1}
        | {**TIED, "mlp_layer_types": ["dense", "dense", "sparse"]}
        | rope("linear"),
    ),
    "mistral4": TinyModel("Mistral4", MISTRAL4),
    "mistral4-dense": TinyModel(
        "Mistral4",
        {**MISTRAL4, "first_k_dense_replace": 2, "norm_topk_prob": False, **TIED}
        | {"num_experts_per_tok": 1, "v_head_dim": 24},
    ),
    "mistral4-groups": TinyModel(
        "Mistral4", {**MISTRAL4, "n_routed_experts": 12, "n_group": 3, "topk_group": 2}
    ),
    "deepseek32": TinyModel("DeepseekV32", DSA),
    "deepseek32-tied": TinyModel(
        "DeepseekV32",
        {**DSA, "n_group": 1, "topk_group": 1, **TIED, "norm_topk_prob": False}
        | {"num_experts_per_tok": 1, "v_head_dim": 24, "first_k_dense_replace": 2},
    ),
    "deepseek4": TinyModel("DeepseekV4", DEEPSEEK4, patch=draw_tables),
    "deepseek4-streams": TinyModel(  # odd heads, another number of streams, no table, no scaling
        "DeepseekV4",
        {**DEEPSEEK4, "num_attention_heads": 3, "o_groups": 3, "hc_mult": 3, "hc_sinkhorn_iters": 1}
        | {"num_experts_per_tok": 1, "mlp_layer_types": ["moe"] * 3, "num_hidden_layers": 3}
        | {"partial_rotary_factor": 0.5, "qk_rope_head_dim": 16, "head_dim": 32, "sliding_window": 7}
        | {"compress_rates": {"compressed_sparse_attention": 6, "heavily_compressed_attention": 70}}
        | {"layer_types": [
            "heavily_compressed_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        ], "rope_parameters": None},
        patch=draw_tables,
    ),
    "deepseek4-published": TinyModel(  # names, ratios and entries as published
        "DeepseekV4",
        {**DEEPSEEK4, "o_groups": 1, "compress_rates": None, "n_shared_experts": 1, "sliding_window": 128}
        | {"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 2},
        patch=draw_tables,
        written_as={
            "compress_rates": None, "layer_types": None, "compress_ratios": [0, 4, 128, 4, 0],
            "mlp_layer_types": None, "num_hash_layers": 2, "rope_parameters": None,
            "rope_scaling": {
                "type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
                "original_max_position_embeddings": ROPE_ORIGINAL,
            },
        },
        published=(published_deepseek4,),
    ),
    "glm-dsa": TinyModel("GlmMoeDsa", {**DSA, "n_group": 1, "topk_group": 1}),
    "glm-dsa-groups": TinyModel(
        "GlmMoeDsa", {**DSA, "qk_nope_head_dim": 32, "kv_lora_rank": 48, "num_experts_per_tok": 2}
    ),
    "deepseek": TinyModel(
        "Llama",
        {"num_key_value_heads": 6},
        patch=use_deepseek_experts,
        written_as={
            "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "n_routed_experts": 6,
            "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "norm_topk_prob": False,
        },
    ),
    "deepseek2-lite": TinyModel(
        "DeepseekV2", {**DEEPSEEK, **rope("yarn", mscale=0.707, mscale_all_dim=0.707)}
    ),
    "deepseek2-groups": TinyModel(
        "DeepseekV2",
        {**DEEPSEEK, **DEEPSEEK_GROUPS, **rope("yarn", mscale=0.8, mscale_all_dim=1.3, beta_fast=8.0)}
        | {"topk_method": "group_limited_greedy", "n_shared_experts": 2, **BIASES},
    ),
    "deepseek2-v3": TinyModel(
        "DeepseekV3", {**DEEPSEEK, **DEEPSEEK_GROUPS, **rope("yarn", mscale=1.0, mscale_all_dim=1.0)}
    ),
    "deepseek2-kimi": TinyModel(
        "DeepseekV3",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_attention_heads": 3}
        | {"num_key_value_heads": 3, "first_k_dense_replace": 0, **TIED}
        | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64},
    ),
    "kimi-linear": TinyModel("KimiLinear", KIMI),
    "kimi-linear-lists": TinyModel(  # as published
        "KimiLinear",
        KIMI
        | {"num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3}
        | {"norm_topk_prob": False, "num_local_experts": 12, "n_group": 3, "topk_group": 2}
        | {"n_shared_experts": 2}
        | KIMI_LISTS,
        written_as=KIMI_LISTS | {"linear_head_dim": 7},
    ),
    "kimi-linear-queries": TinyModel(
        "KimiLinear",
        KIMI
        | {"q_lora_rank": 28, "v_head_dim": 24, "num_experts_per_tok": 1, "linear_head_dim": 16}
        | {"num_hidden_layers": 5, "mlp_layer_types": ["sparse"] * 5, "layer_types": None},
    ),
    "jamba": TinyModel("Jamba", JAMBA),
    "jamba-tied": TinyModel(
        "Jamba",
        {**JAMBA, "attn_layer_period": 2, "expert_layer_period": 3, "expert_layer_offset": 0}
        | {**TIED, "mamba_d_conv": 3},
    ),
    "granitehybrid": TinyModel("GraniteMoeHybrid", GRANITE_HYBRID),
    "granitehybrid-rope": TinyModel(
        "GraniteMoeHybrid",
        {**GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1}
        | {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
        | TIED,
    ),
    "nemotron-h-moe": TinyModel("NemotronH", NEMOTRON_H_EXPERTS),
    "nemotron-h-moe-latent": TinyModel(
        "NemotronH",
        {**NEMOTRON_H_EXPERTS, "moe_latent_size": 64, "norm_topk_prob": False, "n_groups": 1}
        | {"layers_block_type": ["full_attention", "moe", "linear_attention", "mlp"]}
        | {"num_hidden_layers": 4},
    ),
}  # fmt: skip
"""MoE models."""


BERT = {"layer_norm_eps": 1e-2, "pad_token_id": 0, "attention_probs_dropout_prob": 0.0}
MODERN = {
    "norm_eps": 1e-2, "local_attention": 24, "num_hidden_layers": 4, "pad_token_id": 0, "cls_token_id": 300,
    "sep_token_id": 301, "rope_parameters": two_ropes()["rope_parameters"],
}  # fmt: skip
EMBEDDING_GEMMA = {
    "use_bidirectional_attention": True, "sliding_window": 24, "head_dim": 16, "query_pre_attn_scalar": 16,
    **two_ropes(),
}  # fmt: skip

PUBLISHED_NOMIC = {
    "n_inner": 160, "layer_norm_epsilon": 1e-2, "rotary_emb_base": 1000.0, "rope_parameters": None,
    "causal": False, "prenorm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None, "max_trained_positions": 200,
}  # fmt: skip

ENCODERS: dict[str, TinyModel] = {
    "gemma-embedding": TinyModel(
        "Gemma3Text", EMBEDDING_GEMMA | {"num_hidden_layers": 7}, of="Gemma3TextModel"
    ),
    "gemma-embedding-pattern": TinyModel(
        "Gemma3Text",
        EMBEDDING_GEMMA
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"query_pre_attn_scalar": 64},
        of="Gemma3TextModel",
    ),
    "bert": TinyModel("Bert", BERT, of="BertModel"),
    "bert-relu": TinyModel("Bert", BERT | {"hidden_act": "relu", "type_vocab_size": 1}, of="BertModel"),
    "bert-roberta": TinyModel(
        "XLMRoberta", BERT | {"pad_token_id": 1, "max_position_embeddings": 258}, of="XLMRobertaModel"
    ),
    "bert-scores": TinyModel("Bert", BERT, of="BertForSequenceClassification"),
    "bert-roberta-scores": TinyModel(
        "XLMRoberta",
        BERT | {"pad_token_id": 3, "max_position_embeddings": 260, "num_labels": 1},
        of="XLMRobertaForSequenceClassification",
    ),
    "nomic-bert": TinyModel(
        "NomicBert",
        BERT | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        of="NomicBertModel",
    ),
    "nomic-bert-published": TinyModel(
        "NomicBert",
        BERT | {"type_vocab_size": 1},
        written_as=PUBLISHED_NOMIC | {"activation_function": "swiglu"},
        of="NomicBertModel",
    ),
    "nomic-bert-moe": TinyModel(
        "NomicBert",
        BERT,
        patch=use_nomic_experts,
        written_as=PUBLISHED_NOMIC
        | {"activation_function": "gelu", "moe_every_n_layers": 2, "moe_top_k": 2, "num_experts": 6},
        published=(published_nomic,),
        of="NomicBertModel",
    ),
    "modern-bert": TinyModel("ModernBert", MODERN, of="ModernBertModel"),
    "modern-bert-silu": TinyModel(
        "ModernBert",
        MODERN
        | {
            "hidden_activation": "silu",
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        },
        of="ModernBertModel",
    ),
    "modern-bert-scores": TinyModel("ModernBert", MODERN, of="ModernBertForSequenceClassification"),
    "eurobert": TinyModel("EuroBert", {"pad_token_id": 0, "mask_token_id": 2}, of="EuroBertModel"),
    "eurobert-biased": TinyModel(
        "EuroBert",
        {"pad_token_id": 0, "mask_token_id": 2, "attention_bias": True, "mlp_bias": True, **WIDE_HEADS},
        of="EuroBertModel",
    ),
    "jina-bert-v2": TinyModel(
        "Bert",
        BERT,
        patch=use_jina_bert,
        written_as={
            "architectures": ["JinaBertForMaskedLM"],
            "position_embedding_type": "alibi",
            "feed_forward_type": "geglu",
        },
        published=(published_jina,),
        of="BertModel",
    ),
    "jina-bert-v3": TinyModel(
        "JinaEmbeddingsV3",
        BERT | {"rope_parameters": {"rope_type": "default", "rope_theta": 2000.0}, "type_vocab_size": 1},
        of="JinaEmbeddingsV3Model",
    ),
}
"""Models without logits: their result is the hidden states of all tokens."""


def first_of_each_architecture() -> list[str]:
    """Return one recipe of each architecture; the others are `slow` tests."""
    kinds = {
        (recipe.kind, (recipe.settings | recipe.written_as).get("model_type"), name in EXPERTS): name
        for name, recipe in reversed((RECIPES | EXPERTS).items())
    }
    return list(kinds.values())


# One each for attention, recurrence, FFN and experts, for `make test` where all architectures would be slow.
ONE_OF_EACH_KIND = (
    "llama", "bamboo", "opt", "bitnet", "gemma3", "gemma3n", "gpt-oss", "deepseek2-lite", "deepseek32",
    "turbosparse-mixtral", "smallthinker", "mamba2", "rwkv7", "qwen3next", "lfm2moe", "falcon-h1",
    "nemotron-h-moe", "kimi-linear", "qwen4exp",
)  # fmt: skip

THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}  # of 32 channels in a width of 96
GPT2_HEADS = {"num_attention_heads": 3}
LATENT_32 = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64}
HEADS_OF_32: dict[str, dict[str, int]] = {
    **dict.fromkeys(("qwen2", "bamboo", "falcon-7b", "opt", "nemotron", "granite-relu"), THREE_HEADS),
    **dict.fromkeys(("turbosparse-mistral", "turbosparse-mixtral", "olmoe", "qwen2moe"), THREE_HEADS),
    **dict.fromkeys(("granitemoe", "granitemoe-shared", "lfm2moe", "deepseek"), THREE_HEADS),
    **dict.fromkeys(("gemma3-relu", "smallthinker", "gpt-oss", "qwen3next", "glm4moe"), WIDE_HEADS),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen4exp", "mistral3-sees", "mellum", "hy_v3"), WIDE_HEADS),
    **dict.fromkeys(("olmo3", "qwen25vl", "jamba"), THREE_HEADS),
    **dict.fromkeys(("gemma4", "gemma4-experts", "falcon-h1"), WIDE_HEADS),
    **dict.fromkeys(("gpt2", "starcoder"), GPT2_HEADS),
    **dict.fromkeys(("deepseek2-lite", "mistral4", "kimi-linear"), LATENT_32),
    **{name: {**LATENT_32, "index_head_dim": 32} for name in ("deepseek32", "glm-dsa")},
}
"""Architectures whose recipes have narrow heads: settings with which one of them fits a q8_0 cache."""


def new_model(recipe: TinyModel, settings: dict[str, Any]) -> torch.nn.Module:
    if recipe.kind in OWN:
        return OWN[recipe.kind](settings)
    return getattr(transformers, class_of(recipe))(config_of(recipe, settings))


def config_of(recipe: TinyModel, settings: dict[str, Any]) -> transformers.PretrainedConfig:
    settings = deepcopy(settings)  # some classes modify the dictionaries that they get
    if recipe.vision is not None:
        tied = settings.get("tie_word_embeddings", False)
        settings = {"text_config": settings, "vision_config": recipe.vision, "tie_word_embeddings": tied}
    return getattr(transformers, f"{recipe.config or recipe.kind}Config")(**settings)


def class_of(recipe: TinyModel) -> str:
    """Return the name of the transformers class."""
    if recipe.of is not None:
        return recipe.of
    if recipe.kind == "GPT2":
        return "GPT2LMHeadModel"
    return f"{recipe.kind}For{'CausalLM' if recipe.vision is None else 'ConditionalGeneration'}"


def build(recipe: TinyModel, seed: int = 0, **settings: Any) -> torch.nn.Module:
    """Return the model of a recipe, in evaluation mode, with every parameter drawn again."""
    model = new_model(recipe, {**SHAPE, **recipe.settings, **settings}).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if recipe.patch is not None:
        recipe.patch(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *drawn_buffers(model)]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("bias", "sinks")):
                parameter.copy_(0.3 * noise)
            elif "norm" in name or ".ln_" in name or "LayerNorm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:  # gains above one: attention is sharp, and the residual stream does not hide any layer
                n_in = parameter.shape[-2 if recipe.kind == "GptOss" and parameter.dim() == 3 else -1]
                parameter.copy_(1.5 * noise / n_in**0.5)
    return model


def drawn_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a checkpoint's tensors that are not parameters: biases that choose experts."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]


def save(recipe: TinyModel, model: torch.nn.Module, folder: Path, **how: Any) -> None:
    """Write config.json, safetensors and a byte-level tokenizer. how: options of save_pretrained."""
    model.save_pretrained(folder, **how)
    config_path = folder / "config.json"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | recipe.written_as))
    if recipe.published:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        for change in recipe.published:
            tensors = change(tensors)
        save_file(tensors, folder / "model.safetensors")
    save_tokenizer(folder)


def save_packed(recipe: TinyModel, model: torch.nn.Module, folder: Path, seed: int = 1) -> None:
    """Save with the experts' matrices in MXFP4, as gpt-oss publishes them, drawn again.

    The model gets the values that transformers decodes.
    """
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(seed)
    packed = {}
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, name)
            n_expert, n_in, n_out = parameter.shape
            shape = (n_expert, n_out, n_in // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
            with torch.no_grad():
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            stem = f"model.layers.{i}.mlp.experts.{name}"
            packed |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
    save(recipe, model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in packed:
        tensors.pop(name.rpartition("_")[0], None)
    save_file(tensors | packed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))


def to_gguf(recipe: TinyModel, model: torch.nn.Module, folder: Path) -> Path:
    """Return the model as a GGUF file in F32: a saved checkpoint converted by hotset."""
    path = folder / "model.gguf"
    save(recipe, model, folder)
    convert_hf(folder, path, GGMLType.F32)
    return path


def shared_gguf(name: str, run_folder: Path, **settings: Any) -> Path:
    """Return `to_gguf` of a recipe, with optional settings, shared by all tests that only read the file."""

    def make(path: Path) -> None:
        recipe = (RECIPES | EXPERTS | ENCODERS)[name]
        with tempfile.TemporaryDirectory(dir=run_folder) as folder:
            to_gguf(recipe, build(recipe, **settings), Path(folder)).rename(path)

    changed = "".join(f",{key}={value}" for key, value in settings.items())
    return made_once(run_folder / f"{name}{changed}.gguf", make)


def save_tokenizer(folder: Path) -> Tokenizer:
    """Save a byte-level BPE tokenizer with a few merges (ids 0 to 259) and special tokens 300 to 302."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    tokens += [f"<|unused_{i}|>" for i in range(len(tokens), 300)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens(["<|user|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|begin|>",
        "eos_token": {"content": "<|end|>"},
        "add_bos_token": True,
        "chat_template": "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer
