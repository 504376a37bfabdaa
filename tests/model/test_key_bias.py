"""Keys with a large bias in a cache of 4 bits: the mean of the bias is not stored."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import assert_every_operation_is_right, cpu, cpu_backend, logits_of, tokens
from tiny_gguf import write_llama

import hotset
from hotset.backends.reference import rotate
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import Attention, KeyBias, Rope, Rotate, Value
from hotset.model.rope import CENTRED, key_centre

WIDTH, HEAD = 64, 32  # of the keys of a token, of a head


def bias(seed: int) -> np.ndarray:
    """Return a bias like Qwen2.5's, float32 [WIDTH]: hundreds in the channels that rotate slowest."""
    values = np.random.default_rng(seed).normal(size=(2, HEAD))
    values[:, 28:] *= 300
    return values.astype(np.float32).ravel()


def model(path: Path, keys: dict[str, Any] | None = None) -> GGUFFile:
    keys = {"llama.rope.freq_base": 1e6, **(keys or {})}
    vectors = {f"blk.{i}.attn_k.bias": bias(i) for i in range(2)}
    return open_gguf(write_llama(path, n_embd=256, n_ff=256, vectors=vectors, keys=keys))


@pytest.mark.parametrize("kind", ["norm", "neox"])
@pytest.mark.parametrize("n_rot", [HEAD, 20, 0])
def test_centre_is_the_mean_of_the_bias_at_all_positions(kind: Any, n_rot: int) -> None:
    given = bias(3)
    rope = Rope(kind, n_rot, tuple(10000.0 ** (-np.arange(n_rot // 2) * 2 / max(n_rot, 1))), 1.25)
    value = Value("k", WIDTH, 0)
    attention = Attention(
        value, value, value, value, 2, 2, HEAD, HEAD, 1.0,
        key_bias=KeyBias("bias", 5, rope if n_rot else None),
    )  # fmt: skip
    expected = given
    if n_rot:
        turned = rotate(np.tile(given, (CENTRED, 1)), np.arange(CENTRED), Rotate(value, value, 2, HEAD, rope))
        expected = turned.mean(axis=0, dtype=np.float64)
    stored = np.concatenate([np.full(5, 9, np.float32), given, np.full(3, 9, np.float32)])
    np.testing.assert_allclose(key_centre(attention, stored).ravel(), expected, rtol=1e-5, atol=1e-4)


def test_keys_without_the_mean_of_their_bias_are_stored_well(tmp_path: Path) -> None:
    gguf, ids = model(tmp_path / "m.gguf"), tokens(100)
    exact = logits_of(cpu(gguf, kv_type="f32"), ids, [], [0, 1])
    found = logits_of(cpu(gguf, kv_type="q4_0"), ids, [], [0, 1])
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    unknown = {op: replace(op, key_bias=None) for op in graph.ops if isinstance(op, Attention)}
    assert all(op.centred for op in unknown)
    plain = cpu_backend(
        gguf, replace(graph, ops=tuple(unknown.get(op, op) for op in graph.ops)), n_pages=4, kv_type="q4_0"
    )
    without = logits_of(plain, ids, [], [0, 1])
    error, before = (np.abs(one - exact).mean() / np.abs(exact).mean() for one in (found, without))
    assert before > 3 * error


def test_backend_subtracts_the_same_bias_as_the_reference(tmp_path: Path) -> None:
    gguf = model(tmp_path / "m.gguf")
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    assert_every_operation_is_right(gguf, graph, cpu(gguf, kv_type="q4_0"), tokens(100), [70, 71], [3, 1])


@pytest.mark.parametrize(
    ("keys", "warned"),
    [({}, False), ({"llama.attn_logit_softcapping": 30.0}, True)],
    ids=["plain", "softcap"],
)
def test_a_bias_that_stays_in_the_keys_is_warned_of(
    tmp_path: Path, keys: dict[str, Any], warned: bool
) -> None:
    path = tmp_path / "m.gguf"
    model(path, keys=keys).close()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hotset.load(path, kv_type="q4_0").close()
    assert any("contain a bias" in str(one.message) for one in found) is warned
