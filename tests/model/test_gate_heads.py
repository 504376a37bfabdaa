"""Gates of whole heads: `attn_gate` has a row for each head, as in Spark 2.5, not for each channel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from backend_runs import batch, logits_of, tokens
from sparse_runs import ONE_BY_ONE, cpu, prepared
from tiny_gguf import write_llama
from torch_graphs import same_as_reference

from hotset import _core
from hotset.backends.reference import ReferenceBackend, gate_heads
from hotset.errors import UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf

N_EMBD, N_HEAD, HEAD_DIM = 64, 4, 32
NORMS = {
    "attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM, "post_attention_norm": N_EMBD, "post_ffw_norm": N_EMBD,
}  # fmt: skip


@pytest.fixture
def gguf(tmp_path: Path) -> GGUFFile:
    rng = np.random.default_rng(0)
    vectors = {}
    for i in range(2):
        vectors[f"blk.{i}.attn_gate.weight"] = rng.standard_normal((N_HEAD, N_EMBD)) / 4
        vectors |= {f"blk.{i}.{name}.weight": rng.uniform(0.5, 1.5, n) for name, n in NORMS.items()}
    values = {"attention.sliding_window": 12, "expert_count": 2, "expert_used_count": 1}
    values |= {"expert_feed_forward_length": 32, "leading_dense_block_count": 2}
    keys = {f"afmoe.{name}": value for name, value in values.items()}
    path = write_llama(tmp_path / "model.gguf", architecture="afmoe", keys=keys, vectors=vectors)
    return open_gguf(path)


def test_the_definition() -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    gates = np.array([[0, np.log(3)], [-np.inf, np.inf]], np.float32)
    expected = [[0, 0.5, 1, 2.25, 3, 3.75], [0, 0, 0, 9, 10, 11]]
    np.testing.assert_allclose(gate_heads(x, gates), expected, rtol=1e-6)


def test_logits_have_the_same_bits_however_they_are_computed(gguf: GGUFFile) -> None:
    ids, blocks = tokens(40), [2, 0]
    expected = logits_of(cpu(gguf, "dense", n_threads=1, isa="scalar"), ids, [], blocks)
    for isa in _core.available_isas():
        for splits in ([], ONE_BY_ONE, [3, 8, 25, 39]):
            found = logits_of(cpu(gguf, "dense", n_threads=2, isa=isa), ids, splits, blocks)
            np.testing.assert_array_equal(found, expected)


def test_the_cpu_computes_the_reference(gguf: GGUFFile) -> None:
    taps = ("blk.1.attn", "blk.1.attn_gate", "blk.1.attn_gated")
    found = cpu(gguf, "dense").step(batch([(tokens(20), 0, [0])], taps))
    x, gates, gated = (found.taps[name] for name in taps)
    assert gates.shape == (20, N_HEAD)
    np.testing.assert_array_max_ulp(gated, gate_heads(x, gates), 4)
    ready, graph = prepared(gguf, "dense")
    expected = logits_of(ReferenceBackend(ready.weights, graph, n_blocks=1), tokens(20), [], [0])
    np.testing.assert_allclose(
        logits_of(cpu(gguf, "dense", kv_type="f32"), tokens(20), [], [0]), expected, atol=1e-3
    )


def test_torch_computes_it(gguf: GGUFFile) -> None:
    same_as_reference(gguf)


@pytest.mark.backend("triton")
def test_a_device_refuses_it_by_name(gguf: GGUFFile) -> None:
    from gpu_runs import gpu

    ready, graph = prepared(gguf, "dense")
    with pytest.raises(UnsupportedModelError, match="GateHeads"):
        gpu(ready.weights, graph)
