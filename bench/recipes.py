"""Writes models of the real shape of any architecture, from the tests' recipes: random weights, fewer layers.

usage: python bench/recipes.py OUT.gguf --shape minimax-m2 [--type q4_0] [--layers N]

A recipe (tests/support/tiny_models.py) names the transformers class; SHAPES has the sizes and the cuts.
The checkpoint is saved and read by `hotset convert`, like a user's, so every tensor exists and llama.cpp
reads the file too. Vocabularies are cut to 32,768 tokens. Speed depends on shapes, types and bytes, not on
trained values. Memory: twice the parameters, in BF16. Takes minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from hotset.convert.hf import convert_hf

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import tiny_models

N_VOCAB = 32768


def sizes(d: int, ff: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """Return the sizes. d: width of the residual stream. ff: neurons of a dense layer. layers: kept."""
    return {
        "hidden_size": d,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


GRANITE_LAYERS = ["full_attention" if i in (10, 13, 17, 27) else "linear_attention" for i in range(32)]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie-4.5-0.3b": ("ernie4_5", sizes(1024, 3072, 18, 16, 2, head_dim=128, tie_word_embeddings=True)),
    "exaone-4-1.2b": (
        "exaone4-full",
        sizes(2048, 4096, 16, 32, 8, layer_types=["full_attention"] * 16),
    ),  # of 30 layers
    "olmo-2-1b": ("olmo2", sizes(2048, 8192, 16, 16, 16)),
    "qwen3-vl-2b": ("qwen3vl", sizes(2048, 6144, 14, 16, 8, head_dim=128)),  # of 28
    "hunyuan-1.8b": ("hunyuan-dense", sizes(2048, 6144, 16, 16, 4, head_dim=128)),  # of 32
    "seed-oss-36b": ("seed_oss", sizes(5120, 27648, 2, 80, 8, head_dim=128)),  # of 64
    "command-r7b": ("cohere2", sizes(4096, 14336, 5, 32, 8, layer_types=None, sliding_window=4096)),  # of 32
    "mamba2-780m": (
        "mamba2",
        {"hidden_size": 1536, "num_hidden_layers": 48, "num_heads": 48, "head_dim": 64}
        | {"n_groups": 1, "state_size": 128, "chunk_size": 256},
    ),
    "falcon-h1-0.5b": (
        "falcon-h1",
        sizes(1024, 2048, 36, 8, 2, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24)
        | {"mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128},
    ),
    "granite-4-h-350m": (
        "granitehybrid",
        sizes(768, 2048, 32, 12, 4, layer_types=GRANITE_LAYERS, num_local_experts=0, num_experts_per_tok=0)
        | {"shared_intermediate_size": 2048, "mamba_n_heads": 48, "mamba_d_head": 32}
        | {"mamba_n_groups": 1, "mamba_d_state": 128},
    ),
    "ernie-4.5-21b-a3b": (
        "ernie4_5-moe",
        sizes(2560, 12288, 4, 20, 4, moe_num_experts=64, moe_k=6, moe_intermediate_size=1536),  # of 28
    ),
    "minimax-m2": (  # of 62 layers and 256 experts; a token still uses eight
        "minimax-m2",
        sizes(3072, 1536, 3, 48, 8, head_dim=128, rotary_dim=64, num_local_experts=64, num_experts_per_tok=8),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--type", default="q4_0", help="of matrices (q4_0)")
    parser.add_argument("--layers", type=int, help="overrides the shape's")
    args = parser.parse_args()
    name, settings = SHAPES[args.shape]
    recipe = (tiny_models.RECIPES | tiny_models.EXPERTS)[name]
    settings = settings | {"vocab_size": N_VOCAB, "max_position_embeddings": 8192}
    if args.layers:
        settings["num_hidden_layers"] = args.layers
    torch.set_default_dtype(torch.bfloat16)
    model = tiny_models.build(recipe, **settings)
    with tempfile.TemporaryDirectory(dir=args.out.resolve().parent) as folder:
        tiny_models.save(recipe, model, Path(folder))
        del model
        convert_hf(Path(folder), args.out, args.type)


if __name__ == "__main__":
    main()
