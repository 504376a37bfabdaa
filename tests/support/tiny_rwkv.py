"""RWKV 6 and 7 in torch, for comparison: transformers has no class for them.

Written from the authors' code (github.com/BlinkDL/ChatRWKV, rwkv_pip_package), independent of hotset's
decoder: one sequence, one token at a time. Parameters are named as in the published checkpoints: RWKV 7 as in
flash-linear-attention, RWKV 6 as in the authors' conversion for transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, ModuleList, Parameter

GROUP_EPS = 64e-5


def vector(*shape: int) -> Parameter:
    return Parameter(torch.zeros(shape))


def square(d: int) -> Linear:
    return Linear(d, d, bias=False)


def group_norm(x: Tensor, norm: Module, n_head: int) -> Tensor:
    return F.group_norm(x[None], n_head, norm.weight, norm.bias, GROUP_EPS)[0]


class Affine(Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight, self.bias = vector(d), vector(d)


class Lora(Module):
    def __init__(self, d: int, rank: int, *, bias: bool = True) -> None:
        super().__init__()
        self.lora = ModuleList([Linear(d, rank, bias=False), Module(), Linear(rank, d, bias=bias)])

    def forward(self, x: Tensor, f: Any = None) -> Tensor:
        h = self.lora[0](x)
        return self.lora[2](h if f is None else f(h))


class TimeMix7(Module):
    def __init__(self, c: dict[str, Any], layer: int) -> None:
        super().__init__()
        d, self.n, self.layer = c["hidden_size"], c["head_dim"], layer
        self.h = d // self.n
        for name in "rwkvag":
            setattr(self, f"x_{name}", vector(1, 1, d))
        self.k_k, self.k_a, self.r_k = vector(d), vector(d), vector(self.h, self.n)
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (square(d) for _ in range(4))
        self.w_lora, self.a_lora = Lora(d, c["decay_low_rank_dim"]), Lora(d, c["a_low_rank_dim"])
        if layer:
            self.v_lora = Lora(d, c["v_low_rank_dim"])
        self.g_lora, self.g_norm = Lora(d, c["gate_low_rank_dim"], bias=False), Affine(d)

    def forward(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        h, n = self.h, self.n
        xx = state.get("x", torch.zeros_like(x)) - x
        state["x"] = x
        xr, xw, xk, xv, xa, xg = (x + xx * getattr(self, f"x_{name}")[0, 0] for name in "rwkvag")
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)
        a, g = torch.sigmoid(self.a_lora(xa)), self.g_lora(xg, torch.sigmoid)
        kk = F.normalize((k * self.k_k).view(h, n), dim=-1, p=2.0).view(-1)
        k = k * (1 + (a - 1) * self.k_a)
        if self.layer == 0:
            state["v_first"] = v
        else:
            v = v + (state["v_first"] - v) * torch.sigmoid(self.v_lora(xv))
        w = torch.exp(-0.606531 * torch.sigmoid(self.w_lora(xw, torch.tanh)))
        vk = v.view(h, n, 1) @ k.view(h, 1, n)
        ab = (-kk).view(h, n, 1) @ (kk * a).view(h, 1, n)
        s = state.get("s", torch.zeros(h, n, n))
        state["s"] = s = s * w.view(h, 1, n) + s @ ab + vk
        out = group_norm((s @ r.view(h, n, 1)).view(-1), self.g_norm, h)
        bonus = (r * k * self.r_k.view(-1)).view(h, n).sum(-1, keepdim=True) * v.view(h, n)
        return self.o_proj((out + bonus.view(-1)) * g)


class ChannelMix7(Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d, n = c["hidden_size"], c["intermediate_size"]
        self.x_k, self.key, self.value = vector(d), Linear(d, n, bias=False), Linear(n, d, bias=False)

    def forward(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        xx = state.get("x", torch.zeros_like(x)) - x
        state["x"] = x
        return self.value(torch.relu(self.key(x + xx * self.x_k)) ** 2)


class Rwkv7(Module):
    """RWKV 7. settings: entries of its config.json."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.entries = c = {"architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7"} | settings
        d, eps = c["hidden_size"], c["norm_eps"]
        self.model = Module()
        self.model.embeddings, self.model.norm = Embedding(c["vocab_size"], d), LayerNorm(d, eps)
        self.model.layers = ModuleList()
        for i in range(c["num_hidden_layers"]):
            layer = Module()
            if i == 0:
                layer.pre_norm = LayerNorm(d, eps)
            layer.attn_norm, layer.ffn_norm = LayerNorm(d, eps), LayerNorm(d, eps)
            layer.attn, layer.ffn = TimeMix7(c, i), ChannelMix7(c)
            self.model.layers.append(layer)
        self.lm_head = Linear(d, c["vocab_size"], bias=False)

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        states: list[Any] = [({}, {}) for _ in self.model.layers]
        rows = []
        for token in tokens[0]:
            x = self.model.layers[0].pre_norm(self.model.embeddings(token))
            for layer, (mixed, channels) in zip(self.model.layers, states, strict=True):
                mixed["v_first"] = states[0][0].get("v_first")
                x = x + layer.attn(layer.attn_norm(x), mixed)
                x = x + layer.ffn(layer.ffn_norm(x), channels)
            rows.append(self.lm_head(self.model.norm(x)))
        return SimpleNamespace(logits=torch.stack(rows)[None])

    def save_pretrained(self, folder: Path, **_: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.entries))
        save_file(dict(self.state_dict()), folder / "model.safetensors")


class TimeMix6(Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d, self.n = c["hidden_size"], c["head_size"]
        self.h = d // self.n
        for name in "xwkvrg":
            setattr(self, f"time_maa_{name}", vector(1, 1, d))
        self.time_maa_w1, self.time_maa_w2 = vector(d, 5 * 32), vector(5, 32, d)
        self.time_decay, self.time_faaaa = vector(1, 1, d), vector(self.h, self.n)
        self.time_decay_w1, self.time_decay_w2 = vector(d, 64), vector(64, d)
        self.receptance, self.key, self.value, self.gate, self.output = (square(d) for _ in range(5))
        self.ln_x = Affine(d)

    def forward(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        h, n = self.h, self.n
        sx = state.get("x", torch.zeros_like(x)) - x
        state["x"] = x
        xxx = torch.tanh((x + sx * self.time_maa_x[0, 0]) @ self.time_maa_w1).view(5, 1, -1)
        shares = torch.bmm(xxx, self.time_maa_w2).view(5, -1)
        mixed = (
            x + sx * (getattr(self, f"time_maa_{name}")[0, 0] + m)
            for name, m in zip("wkvrg", shares, strict=True)
        )
        xw, xk, xv, xr, xg = mixed
        w = self.time_decay[0, 0] + torch.tanh(xw @ self.time_decay_w1) @ self.time_decay_w2
        w = torch.exp(-torch.exp(w)).view(h, n, 1)
        r, k = self.receptance(xr).view(h, 1, n), self.key(xk).view(h, n, 1)
        v, g = self.value(xv).view(h, 1, n), F.silu(self.gate(xg))
        a, s = k @ v, state.get("s", torch.zeros(h, n, n))
        out = r @ (self.time_faaaa[:, :, None] * a + s)
        state["s"] = a + w * s
        return self.output(group_norm(out.flatten(), self.ln_x, h) * g)


class ChannelMix6(Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d, n = c["hidden_size"], c["intermediate_size"]
        self.time_maa_k, self.time_maa_r = vector(1, 1, d), vector(1, 1, d)
        self.key, self.receptance = Linear(d, n, bias=False), square(d)
        self.value = Linear(n, d, bias=False)

    def forward(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        sx = state.get("x", torch.zeros_like(x)) - x
        state["x"] = x
        r = torch.sigmoid(self.receptance(x + sx * self.time_maa_r[0, 0]))
        return r * self.value(torch.relu(self.key(x + sx * self.time_maa_k[0, 0])) ** 2)


class Rwkv6(Module):
    """RWKV 6. settings: entries of its config.json."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.entries = c = {"architectures": ["Rwkv6ForCausalLM"], "model_type": "rwkv6"} | settings
        d, eps = c["hidden_size"], c["layer_norm_epsilon"]
        self.rwkv = Module()
        self.rwkv.embeddings, self.rwkv.ln_out = Embedding(c["vocab_size"], d), LayerNorm(d, eps)
        self.rwkv.blocks = ModuleList()
        for i in range(c["num_hidden_layers"]):
            block = Module()
            if i == 0:
                block.pre_ln = LayerNorm(d, eps)
            block.ln1, block.ln2 = LayerNorm(d, eps), LayerNorm(d, eps)
            block.attention, block.feed_forward = TimeMix6(c), ChannelMix6(c)
            self.rwkv.blocks.append(block)
        self.head = Linear(d, c["vocab_size"], bias=False)

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        states: list[Any] = [({}, {}) for _ in self.rwkv.blocks]
        rows = []
        for token in tokens[0]:
            x = self.rwkv.blocks[0].pre_ln(self.rwkv.embeddings(token))
            rescale = self.entries["rescale_every"]
            for i, (block, (mixed, channels)) in enumerate(zip(self.rwkv.blocks, states, strict=True)):
                factor = 0.5 ** (i // rescale) if rescale else 1.0
                x = x + factor * block.attention(block.ln1(x), mixed)
                x = x + factor * block.feed_forward(block.ln2(x), channels)
                if rescale and (i + 1) % rescale == 0:
                    x = x / 2
            rows.append(self.head(self.rwkv.ln_out(x)))
        return SimpleNamespace(logits=torch.stack(rows)[None])

    save_pretrained = Rwkv7.save_pretrained
