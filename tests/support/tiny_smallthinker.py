"""SmallThinker in torch, for comparison: transformers has no class for it.

Written from the description of the published model, independent of hotset's decoder: one sequence, no cache,
every expert of every token by itself. Parameters are named as in its checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch.nn import Linear, Module, ModuleList, Parameter

DEFAULTS = {
    "architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker",
    "moe_enable_early_router": True, "moe_primary_router_apply_softmax": False,
}  # fmt: skip


class Norm(Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class Expert(Module):
    def __init__(self, d: int, n: int) -> None:
        super().__init__()
        self.up, self.gate = Linear(d, n, bias=False), Linear(d, n, bias=False)
        self.down = Linear(n, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


class Experts(Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        n, d = c["moe_num_primary_experts"], c["hidden_size"]
        self.primary_router = Linear(d, n, bias=False)
        self.experts = ModuleList(Expert(d, c["moe_ffn_hidden_size"]) for _ in range(n))
        self.n_used, self.softmax = c["moe_num_active_primary_experts"], c["moe_primary_router_apply_softmax"]

    def forward(self, seen: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Compute the experts' sum.

        seen: the router's input, which is the stream at the layer's beginning.
        """
        rows = []
        for router_input, x in zip(seen, h, strict=True):
            scores, ids = torch.topk(self.primary_router(router_input), self.n_used)
            weights = torch.softmax(scores, -1) if self.softmax else torch.sigmoid(scores)
            weights = weights / weights.sum()
            rows.append(sum(w * self.experts[int(e)](x) for w, e in zip(weights, ids, strict=True)))
        return torch.stack(rows)


class Attention(Module):
    def __init__(self, c: dict[str, Any], rotated: bool, window: int) -> None:
        super().__init__()
        d, self.dim = c["hidden_size"], c["head_dim"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.base, self.rotated, self.window = c["rope_theta"], rotated, window
        self.q_proj = Linear(d, self.heads * self.dim, bias=False)
        self.k_proj = Linear(d, self.kv_heads * self.dim, bias=False)
        self.v_proj = Linear(d, self.kv_heads * self.dim, bias=False)
        self.o_proj = Linear(self.heads * self.dim, d, bias=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        if not self.rotated:
            return x
        half = self.dim // 2
        angles = torch.arange(len(x))[:, None] * self.base ** (-torch.arange(half) / half)
        cos, sin = torch.cos(angles)[:, None], torch.sin(angles)[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = len(x)
        q = self.rotate(self.q_proj(x).view(n, self.heads, self.dim))
        k = self.rotate(self.k_proj(x).view(n, self.kv_heads, self.dim))
        v = self.v_proj(x).view(n, self.kv_heads, self.dim)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / self.dim**0.5
        back = torch.arange(n)[:, None] - torch.arange(n)[None]  # tokens between query and key
        hidden = (back < 0) | (back >= self.window) if self.window else back < 0
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return self.o_proj(torch.einsum("hij,jhd->ihd", weights, v).reshape(n, -1))


class Layer(Module):
    def __init__(self, c: dict[str, Any], rotated: bool, window: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c, rotated, window)
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.block_sparse_moe = Experts(c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after = x + self.self_attn(self.input_layernorm(x))
        return after + self.block_sparse_moe(x, self.post_attention_layernorm(after))


class SmallThinker(Module):
    """SmallThinker. settings: entries of its config.json."""

    defaults: ClassVar[dict[str, Any]] = DEFAULTS

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        c = {k: v for k, v in (self.defaults | settings).items() if k != "attn_implementation"}
        self.entries, d = c, c["hidden_size"]
        self.model = Module()
        self.model.embed_tokens = torch.nn.Embedding(c["vocab_size"], d)
        self.model.layers = ModuleList(self.layers(c))
        self.model.norm = Norm(d, c["rms_norm_eps"])
        if not c["tie_word_embeddings"]:
            self.lm_head = Linear(d, c["vocab_size"], bias=False)

    def layers(self, c: dict[str, Any]) -> list[Module]:
        n = c["num_hidden_layers"]
        rotated, windowed = c.get("rope_layout", [1] * n), c.get("sliding_window_layout", [0] * n)
        return [Layer(c, rotated[i] == 1, windowed[i] * c.get("sliding_window_size", 0)) for i in range(n)]

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        x = self.model.embed_tokens(tokens[0])
        for layer in self.model.layers:
            x = layer(x)
        head = self.model.embed_tokens if self.entries["tie_word_embeddings"] else self.lm_head
        return SimpleNamespace(logits=(self.model.norm(x) @ head.weight.T)[None])

    def save_pretrained(self, folder: Path, **_: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.entries))
        save_file(dict(self.state_dict()), folder / "model.safetensors")
