"""TurboSparse's two models (arXiv 2406.05955), which transformers lacks, for comparison.

Written after their published modelling files. Each FFN has a predictor, fc2(relu(fc1(p))); neurons that it
does not select are zero for any gate, because the rounded sigmoid of the score multiplies relu(gate) *
relu(up). The Mistral's predictor (BambooForCausalLM) reads the residual stream before the norm; the
predictors of the Mixtral's experts read the experts' input.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tiny_smallthinker import Attention, Norm, SmallThinker
from torch.nn import Linear, Module, ModuleList


class Predictor(Module):
    def __init__(self, d: int, rank: int, n: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(d, rank, bias=False), Linear(rank, n, bias=False)

    def forward(self, p: torch.Tensor) -> torch.Tensor:
        return torch.round(torch.sigmoid(self.fc2(torch.relu(self.fc1(p)))))


class DenseFFN(Module):
    def __init__(self, c: dict[str, Any], rank: int) -> None:
        super().__init__()
        d, n = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj = Linear(d, n, bias=False), Linear(d, n, bias=False)
        self.down_proj, self.predictor = Linear(n, d, bias=False), Predictor(d, rank, n)

    def forward(self, before: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        neurons = torch.relu(self.gate_proj(x)) * torch.relu(self.up_proj(x))
        return self.down_proj(neurons * self.predictor(before))


class Expert(Module):
    def __init__(self, d: int, n: int, rank: int) -> None:
        super().__init__()
        self.w1, self.w3 = Linear(d, n, bias=False), Linear(d, n, bias=False)
        self.w2, self.predictor = Linear(n, d, bias=False), Predictor(d, rank, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(torch.relu(self.w1(x)) * torch.relu(self.w3(x)) * self.predictor(x))


class Experts(Module):
    def __init__(self, c: dict[str, Any], rank: int) -> None:
        super().__init__()
        d, n = c["hidden_size"], c["num_local_experts"]
        self.gate, self.n_used = Linear(d, n, bias=False), c["num_experts_per_tok"]
        self.experts = ModuleList(Expert(d, c["intermediate_size"], rank) for _ in range(n))

    def forward(self, _: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        rows = []
        for x in h:
            weights, ids = torch.topk(torch.softmax(self.gate(x), -1), self.n_used)
            weights = weights / weights.sum()
            rows.append(sum(w * self.experts[int(e)](x) for w, e in zip(weights, ids, strict=True)))
        return torch.stack(rows)


class Layer(Module):
    def __init__(self, c: dict[str, Any], rank: int) -> None:
        super().__init__()
        heads = c | {"head_dim": c["hidden_size"] // c["num_attention_heads"]}
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(heads, rotated=True, window=0)
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        if "num_local_experts" in c:
            self.block_sparse_moe = Experts(c, rank)
        else:
            self.mlp = DenseFFN(c, rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after = x + self.self_attn(self.input_layernorm(x))
        ffn = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return after + ffn(after, self.post_attention_layernorm(after))


class TurboSparse(SmallThinker):
    """TurboSparse. settings: entries of config.json.

    ranks: of each layer's predictors, which config.json lacks.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "relu", "rope_theta": 10000.0, "tie_word_embeddings": False
    }  # fmt: skip

    def layers(self, c: dict[str, Any]) -> list[Module]:
        return [Layer(c, rank) for rank in self.entries.pop("ranks")]
