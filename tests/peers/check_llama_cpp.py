"""`make test-peers`: files go both ways between hotset and llama.cpp, and both compute the same.

The checks use every recipe of tests/support/tiny_models.py. llama.cpp must compute hotset's logits and choose
its tokens from the file that hotset makes of the checkpoint. llama.cpp's converter must make the same tensors
and keys. llama.cpp was written for published models, so ADJUSTED changes some recipes to resemble them.
REFUSED and OTHERWISE list, with the reason, the recipes that it refuses or computes differently. A needless
name in these lists fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers_oracle import RECIPES, open_backend, relative_error, run, tiny_models

from hotset.convert.hf import convert_hf
from hotset.convert.hf_config import CLASSES
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType, dequantize

HERE = Path(__file__).resolve().parent
LLAMA_CPP = Path(os.environ.get("LLAMA_CPP", "llama.cpp"))  # its source, for the converter
N_TOKENS = 60
TOLERANCE = 1e-2  # of the largest logit: its GELU is a table in F16. Other models are below 2e-5

ONE_EPSILON = {"rms_norm_eps": 1e-6}  # it uses one for all norms; transformers uses 1e-6 for latent vectors
INDEXED = ONE_EPSILON | {"index_head_dim": 128, "index_n_heads": 64}
NO_EPSILON = {"rms_norm_eps": 1e-12}  # it reads no epsilon for qwen2vl
NO_WINDOW = {"sliding_window": None}  # it reads no window for these
ADJUSTED: dict[str, dict[str, Any]] = {
    "plm": ONE_EPSILON,
    "mistral4": ONE_EPSILON,
    "mistral4-dense": ONE_EPSILON,
    "mistral4-groups": ONE_EPSILON,
    "deepseek32": INDEXED,
    "deepseek32-tied": INDEXED,
    "glm-dsa": INDEXED,
    "glm-dsa-groups": INDEXED,
    "deepseek4": {  # it knows only the published block sizes and indexer heads
        "index_head_dim": 128,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    },
    "deepseek4-published": {"index_head_dim": 128},
    "kimi-linear": ONE_EPSILON,
    "kimi-linear-lists": ONE_EPSILON | {"norm_topk_prob": True},
    "qwen4exp": ONE_EPSILON | {"ple_embed_dim": 96},  # must equal the model's width
    "qwen4exp-pairs": ONE_EPSILON | {"ple_embed_dim": 96},
    "qwen4exp-without-ngrams": ONE_EPSILON,
    "qwen4exp-sees": ONE_EPSILON | {"ngram_size": 5, "ple_embed_dim": 64},
    "deepseek2-v3": ONE_EPSILON,
    "deepseek2-kimi": ONE_EPSILON | {"q_lora_rank": 28},
    "deepseek2-lite": ONE_EPSILON | {"num_hidden_layers": 27},  # so it expects no q_lora_rank
    "qwen2vl": NO_EPSILON,
    "qwen2vl-tied": NO_EPSILON,
    "qwen25vl": NO_EPSILON,
    "rwkv7": {"hidden_size": 128, "head_dim": 64, "norm_eps": 1e-5},  # a head's epsilon is fixed
    "baichuan": {"num_hidden_layers": 32},  # it identifies the 7B and the 13B by the number of layers
    "baichuan-alibi": {"num_hidden_layers": 40},
    "olmoe": {"num_key_value_heads": 6},  # must equal the number of query heads
    "mistral-window": NO_WINDOW,
    "qwen2-window": NO_WINDOW,
    "mixtral-window": NO_WINDOW,
    "phi3-window": NO_WINDOW,
    "starcoder2-window": NO_WINDOW,
    "mistral3-plain": NO_WINDOW,
    "exaone4": {"num_hidden_layers": 64, "sliding_window": 4096},  # only models with 64 layers have windows
    "smallthinker-windows": {"sliding_window_size": 4096},
    "afmoe-pattern": {"layer_types": ["sliding_attention"] * 3},  # it has a fixed pattern for the rotation
    "lfm2moe": {"routed_scaling_factor": 1.0},  # it reads none
    # It rounds the ends of YaRN's ramp, unlike the authors' code.
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gemma2-caps": {"query_pre_attn_scalar": 32},  # the width of a head
    "gemma3-scaled": {"query_pre_attn_scalar": 16},
    "bitnet": {"hidden_act": "silu"},
    "granite-swa-unrotated": {  # its converter requires rope_theta, and has no key for the activation
        "layer_rope_theta": [10000.0, 10000.0, 0, 0], "hidden_act": "silu",
    },
    "granitemoe-swa-shared": {"layer_rope_theta": [0] + [10000.0] * 4},
    "gemma4-one-expert": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma3n": {  # sizes of the published models, which it does not read
        "hidden_size_per_layer_input": 256, "altup_num_inputs": 4, "laurel_rank": 64, "num_hidden_layers": 22,
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12,
        "intermediate_size": 8192,  # its variance divides by n - 1
    },
}  # fmt: skip
SIGMOID = {"scoring_func": "sigmoid"}
ENTRIES: dict[str, dict[str, Any]] = {
    "deepseek2-v3": SIGMOID,
    "deepseek2-kimi": SIGMOID,
    "bailingmoe": {"first_k_dense_replace": 0},
}

OTHERWISE = {
    "no key of its files says which activation": (
        "llama-relu llama-relu2 sparse-lm sparse-lm-qwen2 prosparse gemma3-relu phi3-relu granite-relu "
        "nemotron-h-relu gpt2-untied"
    ),
    "it caps scores and logits where no key says so": "gemma2-uncapped",
    "it takes the long factors by the size of the context, not by the tokens in it": "phi3-short",
    "it reads YaRN's betas for no llama": "llama-yarn-betas",
    "the epsilon of heads is fixed for 64 channels": "rwkv7-heads",
    "it takes one epsilon for all norms": "mamba-falcon-epsilon",
    "it knows the 13B by its 40 layers": "baichuan-alibi-heads",
    "it knows windows only in models of 64 layers": "exaone4-pattern",
    "it computes RMS in place of layer norms": "refact refact-heads refact-odd-heads",
    "it normalises the weights of experts whatever the file says": "qwen3moe-raw-weights mellum-full",
    "it rotates layers with a window by the base of the others": "olmo3-yarn mellum",
    "it gives each second layer a window, and rounds the ends of YaRN's ramp": "gpt-oss-pattern",
}
REFUSED = {  # by llama.cpp's message
    "wrong number of tensors": (  # biases, norms and outputs that no published model has
        "smollm3-biases qwen3-tied gemma-narrow gemma-biases olmo2-heads command-r-biases command-r-plus "
        "hunyuan-dense-tied jais2-heads olmo-biases qwen3vl-tied internlm2-biases bitnet-biases bitnet-silu "
        "minicpm-long seed_oss-biases ernie4_5-biases paddleocr-biases hunyuan_vl-plain "
        "muse-glimmer-from-last turbosparse-mixtral ernie4_5-moe-alone hunyuan-moe-tied afmoe-heads "
        "qwen3vlmoe-tied dots1-groups deepseek2-groups"
    ),
    "has wrong shape": (  # heads whose width it takes from the model's, and sizes that it does not read
        "lfm2-untied gemma3n-widths gemma3n-unshared chatglm chatglm-rotated olmoe-normalised "
        "qwen3next-own-values dots1-window bailingmoe2-heads kimi-linear-queries"
    ),
    "only supports compression ratios": "deepseek4-streams",
    "unknown model architecture": "bamboo opt turbosparse-mistral",
    "not found": (  # biases and outputs that every published model has, and windows
        "gptneox-wide starcoder2-unbiased olmo2-tied stablelm-rotated cohere2-full jais2-unbiased "
        "apertus-tied xverse-tied codeshell-tied plamo-heads muse-glimmer-pattern lfm2moe-plain "
        "exaone-moe-pattern minimax-m2-tied mellum-pattern bailingmoe-raw-weights nemotron-h-moe-latent"
    ),
}


# Differences of llama.cpp's converter, for checkpoints that it accepts.
OTHER_TENSORS = (
    "jais2-heads",
    "olmo2-tied",
    "gemma-narrow",
)  # factors of a rotation, and an output, that it omits
OTHER_VALUES = {
    "it cuts the embedding to the vocabulary, which the tests do not give it": (
        "gemma3 gemma3-scaled gemma3-pattern gemma3-relu gemma4 gemma4-embedded gemma4-experts "
        "gemma4-one-expert"
    ),
    "it turns biases of no published model": "olmo-biases",
    "it knows one head of keys": "starcoder-heads",
    "it takes experts only by input, as they are published": "qwen3vlmoe-tied",
    "it turns queries and keys, and says that nothing rotates them": "granitehybrid granitehybrid-rope",
}
NOT_CONVERTED = {
    "config.json as transformers writes it now, classes that it lacks, sizes of no published model": (
        "gemma2-uncapped sparse-lm sparse-lm-qwen2 bamboo falcon-7b opt gptneox-serial gptneox-wide cohere2 "
        "cohere2-full cohere2-pattern gemma3n-widths gemma3n-unshared gpt2 gpt2-wide gpt2-untied gptneox "
        "mpt mpt-heads mpt-untied hunyuan-dense-alpha bitnet bitnet-biases bitnet-silu mistral3 "
        "mistral3-plain mistral3-sees xverse xverse-tied internlm2-biases exaone exaone-llama3 plamo "
        "plamo-heads codeshell codeshell-tied refact-odd-heads rwkv7-heads turbosparse-mistral nemotron-h "
        "nemotron-h-relu falcon-h1 falcon-h1-norm rwkv6-unscaled turbosparse-mixtral lfm2moe-plain "
        "qwen3next qwen3next-own-values qwen35moe qwen35 baichuan hunyuan-moe baichuan-alibi "
        "hunyuan-moe-alpha hunyuan-moe-tied baichuan-alibi-heads minimax-m2 refact refact-heads "
        "minimax-m2-tied mamba2 mamba2-tied deepseek2-ocr deepseek2-ocr-normalised bailingmoe-raw-weights "
        "deepseek4 deepseek4-streams deepseek4-published "
        "mistral4 mistral4-dense mistral4-groups kimi-linear kimi-linear-lists kimi-linear-queries "
        "nemotron-h-moe nemotron-h-moe-latent"
    ),
    "it drops the norms of heads": "stablelm-norms",
}
OTHER_KEYS = {
    "context_length": "it has its own for Falcon, and takes others from entries that the recipes lack",
    "feed_forward_length": "it takes four times the width for Falcon and Phi 2",
    "attention.head_count_kv": "it has no groups for Phi 2, and one head for StarCoder",
    "attention.layer_norm_rms_epsilon": "it reads entries of GLM's that the recipes lack",
    "rope.dimension_count": "it computes it from the width for GLM",
    "block_count": "it counts layers for multi-token prediction that the checkpoint lacks",
    "expert_shared_feed_forward_length": "it takes ERNIE's from the heads of keys",
    "attention.compress_ratios": "it knows Qwen4-Exp's layers as published, not as transformers writes them",
    "full_attention_interval": "it takes 4 where config.json has none",
    "rope.dimension_sections": "without mrope_section it takes the sections of the published Qwen 3.5",
    "ple.eos_token_id": "of several it takes the last, transformers the first",
    "rope.scaling.finetuned": "it says that no Granite with state spaces rotates",
}
UNREAD_KEYS = {  # keys that only its converter writes: defaults, and keys that nothing reads
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "attention.sliding_window_pattern",
    "attention.sliding_window", "leading_dense_block_count", "nextn_predict_layers",
    "expert_shared_feed_forward_length", "rope.freq_base_swa", "tensor_data_layout",
    "expert_count", "expert_used_count", "expert_weights_scale", "attention.indexer.types",
    "full_attention_interval",
}  # fmt: skip


def reason(table: dict[str, str], name: str) -> str | None:
    return next((reason for reason, names in table.items() if name in names.split()), None)


def with_keys_and_values(tensors: tiny_models.Tensors) -> tiny_models.Tensors:
    """Add key and value tensors to the layers that share the keys and values of earlier layers.

    Gemma 3n's checkpoints have them and llama.cpp requires them, but nothing reads them.
    """
    own = {name: tensor for name, tensor in tensors.items() if ".layers.0.self_attn." in name}
    lacking = [n.rpartition("q_proj")[0] for n in tensors if n.endswith(".self_attn.q_proj.weight")]
    return {
        f"{stem}{part}.weight": own[f"model.layers.0.self_attn.{part}.weight"].clone()
        for stem in lacking
        for part in ("k_proj", "v_proj", "k_norm")
    } | tensors


def use_experts_alone(model: torch.nn.Module) -> None:
    """Give every layer experts: llama.cpp knows no dense layers of BailingMoE."""
    for layer in model.model.layers:
        layer.mlp = tiny_models.DeepseekExperts(model.config.hidden_size, normalised=True)


CHANGED: dict[str, dict[str, Any]] = {
    "gemma3n": {"published": (with_keys_and_values,)},
    "bailingmoe": {"patch": use_experts_alone},
}


def recipe_of(name: str) -> tiny_models.TinyModel:
    recipe = RECIPES[name]
    return replace(
        recipe,
        settings=recipe.settings | ADJUSTED.get(name, {}),
        written_as=recipe.written_as | ENTRIES.get(name, {}),
        **CHANGED.get(name, {}),
    )


def program(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, HERE / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def checkpoint(name: str, tmp_path: Path) -> Path:
    recipe, folder = recipe_of(name), tmp_path / "checkpoint"
    tiny_models.save(recipe, tiny_models.build(recipe), folder)
    return folder


def test_llama_cpp_computes_the_same(name: str, checkpoint: Path, tmp_path: Path) -> None:
    path, ids_path, logits_path = tmp_path / "ours.gguf", tmp_path / "ids.npy", tmp_path / "logits.npy"
    convert_hf(checkpoint, path, GGMLType.F32)
    ids = np.random.default_rng(0).integers(0, tiny_models.VOCABULARY, N_TOKENS)
    np.save(ids_path, ids)
    done = program("llama_cpp_logits.py", path, ids_path, logits_path)
    if (refused := reason(REFUSED, name)) is not None:
        assert done.returncode == 1
        assert refused in done.stderr
        return
    assert done.returncode == 0, done.stderr[-2000:]
    with open_gguf(path) as gguf:
        backend = open_backend("cpu", gguf)
        ours = run(backend, [ids], [[(0, N_TOKENS)]])[0]
        backend.close()
    theirs = np.load(logits_path)
    error = relative_error(ours, theirs)
    print(f"{name}: {error:.1e}")
    if reason(OTHERWISE, name) is not None:
        assert error > TOLERANCE
        return
    assert error < TOLERANCE
    best = np.sort(ours)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 2 * error * np.abs(theirs).max()
    assert clear.mean() > 0.8 or name.startswith("gemma")  # Gemma caps its logits, so they are close
    np.testing.assert_array_equal(ours.argmax(1)[clear], theirs.argmax(1)[clear])


def test_every_architecture_is_compared() -> None:
    compared = {
        architecture(name) for name in RECIPES if reason(OTHERWISE, name) is reason(REFUSED, name) is None
    }
    assert {architecture(name) for name in RECIPES} - compared == {"bamboo", "mellum", "opt", "refact"}


def architecture(name: str) -> str:
    recipe = RECIPES[name]
    written = recipe.written_as.get("architectures", [tiny_models.class_of(recipe)])[0]
    return (
        CLASSES[written].architecture
        if written in CLASSES
        else name.partition("-")[0].replace("turbosparse", "bamboo")
    )


@pytest.fixture(scope="session")
def converter() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, HERE / "llama_cpp_convert.py", LLAMA_CPP],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        yield process
        process.terminate()


def test_their_converter_writes_the_same(
    name: str, checkpoint: Path, tmp_path: Path, converter: subprocess.Popen[str]
) -> None:
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    convert_hf(checkpoint, ours, GGMLType.F32)
    assert converter.stdin is not None
    assert converter.stdout is not None
    print(json.dumps([str(checkpoint), str(theirs)]), file=converter.stdin, flush=True)
    error = json.loads(converter.stdout.readline())
    assert bool(error) is (reason(NOT_CONVERTED, name) is not None), error
    if error:
        return
    with open_gguf(ours) as one, open_gguf(theirs) as other:
        if name not in OTHER_TENSORS:
            assert one.tensors.keys() == other.tensors.keys()
        for tensor in one.tensors.keys() & other.tensors.keys():
            if reason(OTHER_VALUES, name) is None:
                assert rows(one, tensor) == rows(other, tensor), tensor
                found, expected = (of.data(tensor).view(np.float32) for of in (one, other))
                np.testing.assert_allclose(found, expected, 1e-6, 0, err_msg=tensor)
        mine, its = keys(one), keys(other)
        differ = {key for key in mine.keys() & its.keys() if not np.array_equal(mine[key], its[key])}
        assert differ <= OTHER_KEYS.keys()
        assert its.keys() - mine.keys() <= UNREAD_KEYS


def test_their_converter_writes_published_fp8_and_fp4(
    tmp_path: Path, converter: subprocess.Popen[str]
) -> None:
    """Check that DeepSeek V4's experts have the same bytes; its converter turns FP8 into Q8_0."""
    name, folder = "deepseek4-published", tmp_path / "checkpoint"
    packed = replace(recipe_of(name), written_as=RECIPES[name].written_as | tiny_models.FP8_FP4)
    tiny_models.save(packed, tiny_models.build(packed), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tiny_models.published_fp8_fp4(tensors)[0], folder / "model.safetensors")
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    convert_hf(folder, ours, GGMLType.F32)
    assert converter.stdin is not None
    assert converter.stdout is not None
    print(json.dumps([str(folder), str(theirs)]), file=converter.stdin, flush=True)
    assert json.loads(converter.stdout.readline()) == ""
    with open_gguf(ours) as one, open_gguf(theirs) as other:
        assert one.tensors.keys() == other.tensors.keys()
        for tensor, info in one.tensors.items():
            assert rows(one, tensor) == rows(other, tensor), tensor
            its = other.tensors[tensor]
            if "_exps." in tensor:
                assert info.type == its.type == GGMLType.MXFP4
            if info.type == its.type:
                np.testing.assert_array_equal(one.data(tensor), other.data(tensor), err_msg=tensor)
                continue
            assert its.type in (GGMLType.Q8_0, GGMLType.F16)
            found, expected = (
                dequantize(g.data(tensor), g.tensors[tensor].type, info.shape).reshape(-1)
                for g in (one, other)
            )
            assert np.abs(found - expected).max() < np.abs(found).max() / 200, tensor


def rows(gguf: GGUFFile, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor without sizes of 1, since a vector may be a matrix of one row."""
    return tuple(n for n in gguf.tensors[name].shape if n != 1)


def keys(gguf: GGUFFile) -> dict[str, Any]:
    """Return the keys of the model without the architecture's prefix."""
    prefix = f"{gguf.architecture}."
    return {k.removeprefix(prefix): v for k, v in gguf.metadata.items() if k.startswith(prefix)}
