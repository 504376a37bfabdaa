"""FFNs whose neurons fire if their gate is far above the token's others: first all gates, then the rest.

The tested llama has it only in its first layer. Tests of only the operation: test_numerics.py,
interpreted_gpu_kernels.py, csrc/tests/kernel_test.cpp.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import assert_close, batch, logits_of, tokens
from fuzz import fuzz_reads
from sparse_runs import N_FF, ONE_BY_ONE, assert_every_value_is_right, cpu, prepared
from tiny_gguf import write_relu
from torch_graphs import same_as_reference

import hotset
from hotset import _core
from hotset.backends.cpu.worker import split_ffns
from hotset.backends.reference import ReferenceBackend
from hotset.errors import FormatError, InvalidRequestError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.placement import ram
from hotset.sparsity.modes import choose

T = GGMLType
KEYS = {"llama.hidden_activation": "gelu_tanh", "llama.activation_sparsity_scale": [1.3, -math.inf]}


def write(path: Path, type_: GGMLType = T.F32, **keys: Any) -> GGUFFile:
    sizes = {"n_embd": 64, "n_ff": N_FF, "type_of": lambda name: type_}
    written = write_relu(path / "model.gguf", dialect="gguf", keys={**KEYS, **keys}, **sizes)
    return open_gguf(written)


@pytest.mark.parametrize("type_", [T.F32, T.BF16, T.Q8_0, T.Q4_0, T.Q5_0], ids=lambda t: t.name)
def test_exact_is_dense(tmp_path: Path, type_: GGMLType) -> None:
    """Check single tokens, batches and chunks, any number of threads and any instruction set."""
    gguf, ids, blocks = write(tmp_path, type_), tokens(40), [2, 0]
    expected = logits_of(cpu(gguf, "dense", n_threads=1, isa="scalar"), ids, [], blocks)
    for isa in _core.available_isas():
        for n_threads in (1, 2):
            exact = cpu(gguf, "exact", n_threads=n_threads, isa=isa)
            for splits in ([], ONE_BY_ONE, [3, 8, 25, 39]):
                np.testing.assert_array_equal(logits_of(exact, ids, splits, blocks), expected)
    parts = [(tokens(n, seed=n), [n % 8]) for n in (1, 2, 3, 5)]
    alone = [logits_of(cpu(gguf, "exact", n_threads=1), part, [], blocks) for part, blocks in parts]
    together = cpu(gguf, "dense").step(batch([(part, 0, blocks) for part, blocks in parts])).logits
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_every_operation_is_the_references(tmp_path: Path) -> None:
    assert_every_value_is_right(write(tmp_path), "exact")


def test_rows_of_neurons_that_do_not_fire_are_not_read(tmp_path: Path) -> None:
    gguf, ids = write(tmp_path), tokens(11)
    ready, graph = prepared(gguf, "exact")
    ours = cpu(gguf, "exact", kv_type="f32")
    theirs = ReferenceBackend(ready.weights, graph, n_blocks=1, sparse=True)
    for at, n in ((0, 10), (10, 1)):
        for backend in (ours, theirs):
            backend.step(batch([(ids[at : at + n], at, [0])]))
        found, expected = ours.stats(), theirs.stats()
        assert found is not None
        assert expected is not None
        np.testing.assert_array_equal(found.selected[0], expected.selected[0])
        np.testing.assert_array_equal(found.active[0], expected.active[0])
    assert found.gate_rows[0] == N_FF
    assert 0 < found.up_rows[0] == found.down_rows[0] == expected.up_rows[0] < 0.25 * N_FF


@pytest.mark.backend("triton")
@pytest.mark.parametrize("sparse", [True, False])
def test_a_device_computes_it(tmp_path: Path, sparse: bool) -> None:
    from gpu_runs import gpu

    ready, graph = prepared(write(tmp_path), "exact")
    ids = tokens(40)
    expected = logits_of(ReferenceBackend(ready.weights, graph, n_blocks=1), ids, [], [0])
    assert_close(logits_of(gpu(ready.weights, graph, sparse=sparse), ids, [7, 8, 9, 30], [0]), expected)
    tap = "blk.0.ffn_gate_top_k"
    found = gpu(ready.weights, graph, sparse=sparse).step(batch([(ids, 0, [0])], (tap,)))
    assert_close(found.logits, expected)
    assert (found.taps[tap] == 0).mean() > 0.8
    assert not split_ffns(graph)  # its neurons are not shared with the CPU, because all gates are needed


def test_torch_computes_it(tmp_path: Path) -> None:
    same_as_reference(write(tmp_path))


def test_the_mode(tmp_path: Path) -> None:
    gguf = write(tmp_path)
    config = config_from_gguf(gguf)
    assert [layer.activation.has_zeros for layer in config.layers] == [True, False]
    choice = choose(config, gguf.tensors)
    assert choice.mode == "exact"
    assert "gelu_tanh with a Gaussian top-k" in choice.reason
    ready, _ = prepared(gguf, "exact")
    assert "blk.0.ffn_down_t.weight" in ready.weights.tensors  # skips its rows, but not those in layer 1
    assert "blk.1.ffn_down_t.weight" not in ready.weights.tensors
    with pytest.raises(InvalidRequestError, match="a predictor saves nothing"):
        choose(config, gguf.tensors, predictor="svd")


@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_weights_under_a_budget_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(ram, "own_memory", lambda: 0)
    monkeypatch.setattr(ram, "PROGRAM", 0)
    path = Path(write(tmp_path).path)
    settings: dict[str, Any] = {"n_ctx": 256, "sparsity": mode, "device": "cpu", "n_threads": 2}
    ids = tokens(20).tolist()
    with hotset.load(path, **settings) as mapped:
        expected = mapped.logits(ids)
    budget = fuzz_reads.least_budget(path, **settings)
    with hotset.load(path, **settings, ram_budget=budget) as under:
        np.testing.assert_array_equal(under.logits(ids), expected)


@pytest.mark.parametrize(
    "values", [[1.3], [1.3, math.nan], [1.3, math.inf], [1.3, 1e9], ["a", "b"], 1.3, [True, False]]
)
def test_keys_that_make_no_sense_are_refused(tmp_path: Path, values: Any) -> None:
    gguf = write(tmp_path, **{"llama.activation_sparsity_scale": values})
    with pytest.raises(FormatError, match=r"llama\.activation_sparsity_scale must hold"):
        config_from_gguf(gguf)
