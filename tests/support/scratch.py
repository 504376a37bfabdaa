"""A folder with every file that the documents' commands name: tiny random models and short texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from byte_models import write_reranker, write_sparse
from cli_runs import CHATML, write_model
from tiny_adapters import random_pairs, write_adapter, write_peft

from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

TEXT = "the quick brown fox jumps over the lazy dog, and then it rests; "
WORDS = ("one", "two", "three", "four")
N_CTX = 2048

# Options that make training fast. One thread, because several would wait for each other on busy cores.
QUICK_TRAINING = (
    "-c 64 --tokens 700 --epochs 0.02 --max-share 90 --max-increase 1e9 --recall 0.5 --precision 0.01 "
    "--jobs 1"
)
QUICK_SPARSIFYING = "--generate 600 --lora 2 --linear 0 -n 128 -c 32 --batch 2 -t 1"


def write_checkpoint(folder: Path) -> Path:
    """Write a llama of one layer as a Hugging Face checkpoint, without a tokenizer."""
    from safetensors.numpy import save_file

    n_vocab, width, n_ff = 64, 32, 64
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": n_vocab,
        "hidden_size": width, "intermediate_size": n_ff, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    shapes = {
        "model.embed_tokens": (n_vocab, width),
        "model.norm": (width,),
        "model.layers.0.input_layernorm": (width,),
        "model.layers.0.post_attention_layernorm": (width,),
        **{f"model.layers.0.self_attn.{x}_proj": (width, width) for x in "qkvo"},
        "model.layers.0.mlp.gate_proj": (n_ff, width),
        "model.layers.0.mlp.up_proj": (n_ff, width),
        "model.layers.0.mlp.down_proj": (width, n_ff),
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_adapters(folder: Path, model: Path) -> None:
    """Write adapters of a model: a GGUF file, and a PEFT folder."""
    with open_gguf(model) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        pairs = random_pairs(graph, gguf.tensors, rank=2)
    write_adapter(folder / "style.gguf", pairs)
    up = pairs["blk.0.ffn_up.weight"]
    module = "model.layers.0.mlp.up_proj"
    write_peft(
        folder / "polite", {f"{module}.lora_A.weight": up.a.floats, f"{module}.lora_B.weight": up.b.floats}
    )


def write_scratch(folder: Path) -> Path:
    """Write the folder, which is the commands' working directory; its `home` is their HOTSET_HOME."""
    keys = {"tokenizer.chat_template": CHATML}
    shape = {"n_ctx": N_CTX, "n_head": 2, "n_head_kv": 1}  # heads of 32 channels: a Q8_0 cache supports them
    write_model(folder / "model.gguf", n_ctx=N_CTX, type=GGMLType.F16)
    write_model(folder / "small.gguf", n_ctx=N_CTX)
    write_sparse(folder / "relu.gguf", keys, dialect="gguf", seed=5, **shape)
    write_sparse(folder / "relu.powerinfer.gguf", keys, **shape)
    write_model(folder / "home" / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf", n_ctx=N_CTX)
    write_adapters(folder, folder / "home" / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    write_sparse(folder / "home" / "models" / "bamboo-7b" / "bamboo-7b-v0.1.Q4_0.gguf", keys)
    write_reranker(folder / "reranker.gguf", **{"llama.context_length": N_CTX})
    write_checkpoint(folder / "checkpoint")
    (folder / "Modelfile").write_text("FROM smollm2-135m\nSYSTEM Be brief.\nPARAMETER temperature 0.2\n")
    (folder / "text.txt").write_text("".join(f"{TEXT}{i} {WORDS[i % 4]}. " for i in range(60)))
    (folder / "sentences.txt").write_text("".join(f"{TEXT}{word}.\n" for word in WORDS))
    questions = [
        {"ctx": f"The {word} of", "endings": [f"{word}s", "dogs", "foxes", "x"], "label": i % 4}
        for i, word in enumerate(WORDS * 3)
    ]
    lines(folder / "hellaswag.jsonl", questions)
    requests = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "smollm2-135m",
                "messages": [{"role": "user", "content": word}],
                "max_tokens": 4,
                "temperature": 0,
            },
        }
        for i, word in enumerate(WORDS)
    ]
    lines(folder / "requests.jsonl", requests)
    return folder


def lines(path: Path, values: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
