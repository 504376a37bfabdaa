"""Keys with a large bias in a cache of 4 bits, which stores them without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_runs import assert_every_operation_is_right, cpu, cpu_backend, logits_of, tokens
from tiny_gguf import write_llama
from tiny_models import EXPERTS, RECIPES, build, save

from hotset.backends.reference import rotate
from hotset.convert.hf import convert_hf
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import Attention, KeyBias, Rope, Rotate, Value
from hotset.model.rope import LARGE_BIAS, MEAN_POSITIONS, bias_at

WIDTH, HEAD = 64, 32  # of the keys of a token, of a head


def bias(seed: int) -> np.ndarray:
    """Return a bias as in Qwen2.5, float32 [WIDTH]: hundreds in slow channels, 8 in a fast one."""
    values = np.random.default_rng(seed).normal(size=(2, HEAD))
    values[:, 28:] *= 300
    values[:, 1] = 8
    return values.astype(np.float32).ravel()


def model(path: Path, keys: dict[str, Any] | None = None) -> GGUFFile:
    keys = {"llama.rope.freq_base": 1e6, **(keys or {})}
    vectors = {f"blk.{i}.attn_k.bias": bias(i) for i in range(2)}
    return open_gguf(write_llama(path, n_embd=256, n_ff=256, vectors=vectors, keys=keys))


def errors_with_and_without_the_remedy(gguf: GGUFFile, ids: np.ndarray) -> tuple[float, float]:
    """Return the mean errors of the logits with 4-bit keys: as loaded, and with the bias in the keys."""
    exact = logits_of(cpu(gguf, kv_type="f32"), ids, [], [0, 1])
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    unknown = {op: replace(op, key_bias=None) for op in graph.ops if isinstance(op, Attention)}
    plain = replace(graph, ops=tuple(unknown.get(op, op) for op in graph.ops))
    backends = cpu(gguf, kv_type="q4_0/f32"), cpu_backend(gguf, plain, n_blocks=4, kv_type="q4_0/f32")
    found = (logits_of(backend, ids, [], [0, 1]) for backend in backends)
    error, before = (float(np.abs(one - exact).mean() / np.abs(exact).mean()) for one in found)
    return error, before


@pytest.mark.parametrize("kind", ["norm", "neox"])
@pytest.mark.parametrize("n_rot", [HEAD, 20, 0])
def test_large_channels_are_left_out_and_the_mean_of_the_others(kind: Any, n_rot: int) -> None:
    given = bias(3)
    rope = Rope(kind, n_rot, tuple(10000.0 ** (-np.arange(n_rot // 2) * 2 / max(n_rot, 1))), 1.25)
    value = Value("k", WIDTH, 0)
    attention = Attention(
        value, value, value, value, 2, 2, HEAD, HEAD, 1.0,
        key_bias=KeyBias("bias", 5, rope if n_rot else None),
    )  # fmt: skip
    large = given.reshape(2, HEAD).copy()
    for head in large:
        for i in range(n_rot // 2):
            pair = [2 * i, 2 * i + 1] if kind == "norm" else [i, i + n_rot // 2]
            if np.hypot(*head[pair]) < LARGE_BIAS:
                head[pair] = 0
        head[n_rot:] = 0
    small = given - large.ravel()

    def rotated(part: np.ndarray, positions: np.ndarray) -> np.ndarray:
        many = np.tile(part.ravel(), (len(positions), 1))
        return rotate(many, positions, Rotate(value, value, 2, HEAD, rope)) if n_rot else many

    positions = np.array([0, 1, 77, 4000])
    mean = rotated(small, np.arange(MEAN_POSITIONS)).mean(axis=0, dtype=np.float64)
    expected = rotated(large, positions) + mean
    stored = np.concatenate([np.full(5, 9, np.float32), given, np.full(3, 9, np.float32)])
    found = bias_at(attention, stored, positions).reshape(len(positions), -1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("keys", [{}, {"llama.attn_logit_softcapping": 30.0}], ids=["plain", "softcap"])
def test_keys_without_their_bias_are_stored_well(tmp_path: Path, keys: dict[str, Any]) -> None:
    gguf, ids = model(tmp_path / "m.gguf", keys), tokens(100)
    error, before = errors_with_and_without_the_remedy(gguf, ids)
    assert before > 3 * error


@pytest.mark.parametrize("keys", [{}, {"llama.attn_logit_softcapping": 30.0}], ids=["plain", "softcap"])
def test_backend_subtracts_what_the_reference_subtracts(tmp_path: Path, keys: dict[str, Any]) -> None:
    gguf = model(tmp_path / "m.gguf", keys)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    assert_every_operation_is_right(gguf, graph, cpu(gguf, kv_type="q4_0"), tokens(100), [70, 71], [3, 1])


def test_chunks_and_caches_do_not_change_the_logits(tmp_path: Path) -> None:
    gguf, ids = model(tmp_path / "m.gguf"), tokens(200)
    whole = logits_of(cpu(gguf, kv_type="q4_0"), ids, [100], [0, 1, 2, 3])
    np.testing.assert_array_equal(
        logits_of(cpu(gguf, kv_type="q4_0"), ids, [1, 64, 70, 191], [3, 0, 2, 1]), whole
    )


@pytest.mark.parametrize("name", ["qwen2", "qwen2moe", "qwen2vl", "glm4", "seed_oss", "gpt-oss"])
def test_families_with_key_biases_store_keys_in_4_bits(tmp_path: Path, name: str) -> None:
    recipe, wide = (
        (RECIPES | EXPERTS)[name],
        {"head_dim": 32} if name == "gpt-oss" else {"num_attention_heads": 3, "num_key_value_heads": 3},
    )
    torch_model = build(recipe, **wide)
    n_biases = 0
    with torch.no_grad():
        for of, values in torch_model.named_parameters():
            if of.endswith("k_proj.bias"):
                values[::16] *= 100
                n_biases += 1
            elif ".q_proj." in of:  # the sharp attention of the recipes doubles each error
                values *= 0.3
    assert n_biases
    save(recipe, torch_model, tmp_path)
    convert_hf(tmp_path, tmp_path / "m.gguf")
    error, before = errors_with_and_without_the_remedy(open_gguf(tmp_path / "m.gguf"), tokens(60))
    assert before > 2 * error
