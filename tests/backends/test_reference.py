"""The NumPy backend beyond test_architectures: single operations, cache types, taps, wrong batches."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_gguf import write_llama

from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.backends.decoded import DecodedWeights
from hotset.backends.reference import ACTIVATIONS, ReferenceBackend, rotate, routed
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.planes import codes_of, scales_of
from hotset.formats.quants import GGMLType, dequantize, quantize
from hotset.load_parameters import KVType
from hotset.model import operations as ops
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.model.operations import Value

N_VOCAB, D, N_FF = 96, 64, 96  # of the tiny model
F32 = np.float32


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    """Return a random two-layer llama with heads of 32; the Q8_0 embedding is the output matrix, too."""
    types = {"token_embd": GGMLType.Q8_0, "attn_q": GGMLType.F16}
    path = write_llama(
        tmp_path_factory.mktemp("llama") / "llama.gguf", tied=True,
        type_of=lambda name: types.get(name.split(".")[-1], GGMLType.F32), spread=lambda name: 1.0,
    )  # fmt: skip
    return open_gguf(path)


def backend(gguf: GGUFFile, **options: Any) -> ReferenceBackend:
    return ReferenceBackend(gguf, describe(config_from_gguf(gguf), gguf.tensors), n_blocks=4, **options)


def batch(n: int, outputs: list[int] | None = None, taps: tuple[str, ...] = (), **replaced: Any) -> Batch:
    """Return a batch of n tokens of one sequence from position 0, in KV blocks 2, 0, 1."""
    tokens = (np.arange(n) * 37 + 5) % N_VOCAB
    arrays: dict[str, Any] = {
        "tokens": tokens, "positions": np.arange(n), "sequences": np.zeros(n), "block_tables": [[2, 0, 1]],
        "outputs": range(n) if outputs is None else outputs,
    }  # fmt: skip
    return Batch(**{key: np.array(v, np.int32) for key, v in (arrays | replaced).items()}, taps=taps)


def test_taps_are_the_values_on_the_way(llama: GGUFFile) -> None:
    names = ("embedding", "blk.0.ffn_act", "blk.0.ffn_inp", "blk.0.ffn_down", "blk.0.out", "output_norm")
    reference = backend(llama)
    result = reference.step(batch(5, outputs=[1, 4], taps=names))
    assert set(result.taps) == set(names)
    assert result.taps["blk.0.ffn_act"].shape == (5, N_FF)
    assert result.taps["output_norm"].shape == (2, D)
    assert result.logits.shape == (2, N_VOCAB)
    total = result.taps["blk.0.ffn_inp"] + result.taps["blk.0.ffn_down"]
    assert np.array_equal(total, result.taps["blk.0.out"])
    with pytest.raises(InvalidRequestError, match=r"blk\.9\.ffn_act"):
        reference.step(batch(5, taps=("blk.9.ffn_act",)))


def test_a_cache_of_weights_too_small_changes_nothing(llama: GGUFFile) -> None:
    kept, small = backend(llama), backend(llama, weight_cache_bytes=30_000)
    assert np.array_equal(kept.step(batch(9)).logits, small.step(batch(9)).logits)
    decoded = DecodedWeights(llama, np.asarray, 30_000)
    for name in llama.tensors:
        decoded.whole(name)
    assert 0 < sum(w.nbytes for w in decoded.kept.values()) <= 30_000


@pytest.mark.parametrize(
    ("kv_type", "low", "high"), [("f16", 1e-6, 2e-3), ("q8_0", 1e-4, 3e-2), ("q4_0", 1e-3, 0.3)]
)
def test_a_rounded_cache_is_close_and_not_equal(
    llama: GGUFFile, kv_type: KVType, low: float, high: float
) -> None:
    exact = backend(llama).step(batch(150)).logits
    rounded = backend(llama, kv_type=kv_type).step(batch(150)).logits
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert low < error < high


@pytest.mark.parametrize(
    ("kv_type", "keys", "values", "have"),
    [
        *(("q8_0", 48, 48, "keys of this model have 48"), ("q8_0", 32, 12, "values of this model have 12")),
        *(("q4_0", 80, 80, "keys of this model have 80"), ("f16/q4_0", 32, 12, "values .* have 12")),
    ],
)
def test_a_quantised_cache_needs_whole_blocks(kv_type: KVType, keys: int, values: int, have: str) -> None:
    graph = Graph()
    q, v, out = Value(0, keys, "q"), Value(1, values, "v"), Value(2, values, "out")
    graph.add(ops.Attention(out, q, q, v, 1, 1, keys, values, 1.0, layer=0))
    with pytest.raises(UnsupportedModelError, match=f"multiple of 32 channels, but the {have};"):
        ReferenceBackend(SimpleNamespace(tensors={}), graph, n_blocks=1, kv_type=kv_type)  # type: ignore[arg-type]


def test_route_follows_its_description() -> None:
    x = np.array([[1, 3, 2, 3], [0, 0, 0, 0], [-1, np.nan, -2, -3]], F32)
    chosen = {
        "softmax": [[1, 3], [0, 1], [0, 2]],  # the lower of equal ones, and NaN last
        "sigmoid": [[1, 3], [0, 1], [0, 2]],
        "softmax_chosen": [[1, 3], [0, 1], [0, 2]],
    }
    for scoring, ids in chosen.items():
        route = ops.Route(Value(0, 4, "r"), Value(1, 4, "x"), 2, scoring)  # type: ignore[arg-type]
        assert routed(x, None, route)[:, :2].tolist() == ids
    e = np.exp(np.array([1, 3, 2, 3]))
    route = ops.Route(Value(0, 4, "r"), Value(1, 4, "x"), 2, "softmax")
    np.testing.assert_allclose(routed(x, None, route)[0, 2:], e[[1, 3]] / e.sum(), rtol=1e-6)
    normalised = replace(route, normalised=True, scale=3.0)
    np.testing.assert_allclose(routed(x, None, normalised)[0, 2:], [1.5, 1.5], rtol=1e-6)
    p = 1 / (1 + np.exp(-x[0]))
    route = replace(normalised, scoring="sigmoid")
    bias = np.array([0.9, 0, 0, 0.001], F32)
    found = routed(x, bias, route)[0]  # the bias affects the choice, not the weights
    assert found[:2].tolist() == [0, 3]
    np.testing.assert_allclose(found[2:], 3 * p[[0, 3]] / p[[0, 3]].sum(), rtol=1e-6)
    scales = np.array([2, 5, 7, 0.5], F32)  # one per expert, applied last
    np.testing.assert_array_equal(routed(x, bias, route, scales)[0, 2:], found[2:] * scales[[0, 3]])
    tiny = routed(np.full((1, 4), -60, F32), None, route)[0, 2:]  # a sum below 2^-14 counts as 2^-14
    np.testing.assert_allclose(tiny, 3 * np.exp(-60) * 2**14, rtol=1e-3, atol=1e-12)


def test_groups_of_experts_are_chosen_by_their_two_best() -> None:
    x = np.array([[9, -9, 3, 3, 8, -8]], F32)
    route = ops.Route(
        Value(0, 4, "r"), Value(1, 6, "x"), 2, "softmax_chosen", n_groups=3, n_groups_used=1
    )  # sums of two: 0, 6, 0
    assert routed(x, None, route)[0, :2].tolist() == [2, 3]
    assert routed(x, None, replace(route, n_groups_used=2))[0, :2].tolist() == [0, 2]
    bias = np.array([0, 0, 0, 0, 0, 17], F32)
    assert routed(x, bias, route)[0, :2].tolist() == [5, 4]
    by_one = replace(route, group_best=1)
    assert routed(x, None, by_one)[0, :2].tolist() == [0, 1]
    assert routed(x, bias, by_one)[0, :2].tolist() == [0, 1]  # 9, 3, 9: the first of equal ones


def test_closing_frees_memory_and_may_happen_twice(llama: GGUFFile) -> None:
    zero = np.zeros(1, np.int32)
    tracemalloc.start()
    reference = backend(llama)
    reference.step(Batch(zero, zero, zero, zero[None], zero))
    held, _ = tracemalloc.get_traced_memory()
    reference.close()
    reference.close()
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    matrices = 4 * sum(math.prod(one.shape) for name, one in llama.tensors.items() if name.startswith("blk."))
    cache = sum(
        4 * reference.n_blocks * BLOCK_SIZE * op.n_head_kv * (op.head_dim + op.head_dim_v)
        for op in reference.graph.ops
        if isinstance(op, ops.Attention)
    )
    assert held - left > 0.9 * (matrices + cache)


def test_rotation_keeps_lengths_and_depends_on_distance() -> None:
    """Check the properties of RoPE: |Rq| = |q|, and (R_m q) · (R_n k) depends only on m - n."""
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 1, 24)).astype(F32)
    for kind in ("norm", "neox"):
        rope = ops.Rope(kind, 16, tuple(10000 ** (-np.arange(8) / 8)))
        op = ops.Rotate(Value(1, 24, "r"), Value(0, 24, "x"), 1, 24, rope)

        def turned(x: np.ndarray, position: int, op: ops.Rotate = op) -> np.ndarray:
            return rotate(x, np.array([position]), op)[0]

        assert np.linalg.norm(turned(q, 1000)) == pytest.approx(np.linalg.norm(q), rel=1e-5)
        assert np.array_equal(turned(q, 1000)[16:], q[0, 16:])  # channels past n_rot stay
        assert turned(q, 90) @ turned(k, 83) == pytest.approx(turned(q, 7) @ k[0], rel=1e-4)
        assert turned(q, 90) @ turned(k, 80) != pytest.approx(turned(q, 7) @ k[0], rel=1e-2)


def test_norm_and_neox_rotate_the_same_pairs_in_another_order() -> None:
    x = np.random.default_rng(3).standard_normal((4, 32)).astype(F32)
    freq = tuple(100.0 ** (-np.arange(8) / 8))
    positions = np.array([0, 3, 17, 400])
    value = Value(0, 32, "x")
    norm = rotate(x, positions, ops.Rotate(value, value, 2, 16, ops.Rope("norm", 16, freq, 1.5)))
    halves = x.reshape(4, 2, 8, 2).swapaxes(2, 3).reshape(4, 32)
    neox = rotate(halves, positions, ops.Rotate(value, value, 2, 16, ops.Rope("neox", 16, freq, 1.5)))
    assert np.array_equal(neox.reshape(4, 2, 2, 8).swapaxes(2, 3).reshape(4, 32), norm)
    np.testing.assert_allclose(norm[0], 1.5 * x[0], rtol=1e-6)


def test_activations_against_their_formulas() -> None:
    x = np.array([-100, -3, -0.5, -1e-3, 0, 1e-3, 0.2, 0.25, 3, 100], F32)
    formulas = {
        "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
        "clamped_silu": lambda v: min(v, 0.25) / (1 + math.exp(-1.702 * min(v, 0.25))),
        "clamp": lambda v: min(max(v, -0.25), 0.25),
        "capped_silu": lambda v: min(v, 0.25) / (1 + math.exp(-min(v, 0.25))),
        "clamped_plus_one": lambda v: min(max(v, -0.25), 0.25) + 1, "silu": lambda v: v / (1 + math.exp(-v)),
        "gelu": lambda v: v * 0.5 * math.erfc(-v / math.sqrt(2)),
        "gelu_tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
        "relu": lambda v: max(v, 0.0), "relu2": lambda v: max(v, 0.0) ** 2,
        "fatrelu": lambda v: v if v >= 0.25 else 0.0, "exp": math.exp,
        "softplus": lambda v: math.log1p(math.exp(v)),
    }  # fmt: skip
    assert set(formulas) == set(ACTIVATIONS)
    for kind, formula in formulas.items():
        own = np.minimum(x, F32(80)) if kind == "exp" else x  # larger powers overflow float32
        found = ACTIVATIONS[kind](own, F32(0.25))
        assert found.dtype == F32
        expected = [formula(float(v)) for v in own]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=kind)


def test_layer_norm(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    x, weight, bias = (rng.standard_normal(s).astype(F32) for s in ((8, 32), (32,), (32,)))
    writer = GGUFWriter(tmp_path / "norm.gguf", "none")
    for name, data in {"x": x, "w": weight, "b": bias}.items():
        writer.add_tensor(name, data, GGMLType.F32)
    writer.write()
    graph = Graph()
    embedded = graph.add(ops.Embed(graph.value("x", 32), "x"))
    normed = graph.add(ops.LayerNorm(graph.value("normed", 32), embedded, "w", "b", 1e-2))
    graph.add(ops.SelectOutputs(graph.value("out", 32), normed))
    with open_gguf(tmp_path / "norm.gguf") as gguf:
        found = ReferenceBackend(gguf, graph, n_blocks=4).step(
            batch(8, tokens=range(8), outputs=[0, 7]),
        )
    centred = x - x.mean(1, keepdims=True)
    expected = centred / np.sqrt(x.var(1, keepdims=True) + 1e-2) * weight + bias
    np.testing.assert_allclose(found.logits, expected[[0, 7]], rtol=1e-5, atol=1e-5)


def step_of(path: Path, tensors: dict[str, Any], build: Any, n: int = 6, width: int = 40) -> np.ndarray:
    """Return the result of `build(graph, x)` for the rows x [n, width] of the tensor "x"; types by name."""
    graph = graph_of(path / "ops.gguf", tensors, build, width)
    with open_gguf(path / "ops.gguf") as gguf:
        return ReferenceBackend(gguf, graph, n_blocks=4).step(batch(n, tokens=range(n))).logits


def graph_of(path: Path, tensors: dict[str, Any], build: Any, width: int) -> Graph:
    """Write the tensors, and return a graph with the result of `build`, as in step_of."""
    writer = GGUFWriter(path, "none")
    for name, (data, type_, shape) in tensors.items():
        writer.add_tensor(name, data, type_, shape)
    writer.write()
    graph = Graph()
    x = graph.add(ops.Embed(graph.value("embedded", width), "x"))
    out = build(graph, x)
    graph.add(ops.SelectOutputs(graph.value("logits", out.width), out))
    return graph


def test_products_of_rows_and_columns(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    x, rows, columns = (rng.standard_normal(s).astype(F32) for s in ((96, 40), (96, 40), (40, 96)))
    biases = {n: rng.standard_normal(96).astype(F32) for n in ("rows.bias", "columns.bias")}
    tensors = {name: (data, GGMLType.F32, None) for name, data in {"x": x, "rows": rows, **biases}.items()}
    tensors["columns"] = (columns, GGMLType.F32, None)

    def linear(graph: Graph, x: Value) -> Value:
        return graph.add(ops.Linear(graph.value("out", 30), x, "rows", "rows.bias", first_row=50))

    def transposed(graph: Graph, x: Value) -> Value:
        return graph.add(ops.TransposedLinear(graph.value("out", 96), x, "columns", "columns.bias"))

    found = step_of(tmp_path, tensors, linear)
    np.testing.assert_allclose(found, (x[:6] @ rows.T + biases["rows.bias"])[:, 50:80], rtol=1e-4, atol=1e-5)
    found = step_of(tmp_path, tensors, transposed)
    np.testing.assert_allclose(found, x[:6] @ columns + biases["columns.bias"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("type_", [GGMLType.Q4_0, GGMLType.Q8_0])
def test_a_matrix_in_planes_is_the_matrix(tmp_path: Path, type_: GGMLType) -> None:
    """Compare products with a neuron-major copy with products of the down matrix [n_embd, n_ff]."""
    rng = np.random.default_rng(7)
    n_ff, d = 64, 32
    x, down = rng.standard_normal((96, n_ff)).astype(F32), rng.standard_normal((d, n_ff)).astype(F32)
    blocks = quantize(down, type_)
    codes, scales = codes_of(blocks, type_, (n_ff, d)), scales_of(blocks, type_, (n_ff, d))
    tensors = {
        "x": (x, GGMLType.F32, None),
        "codes": (codes.view(np.uint8), GGMLType.I8, codes.shape[::-1]),
        "scales": (scales, GGMLType.F16, None),
    }

    def build(graph: Graph, x: Value) -> Value:
        return graph.add(ops.TransposedLinear(graph.value("out", d), x, "codes", scales="scales"))

    expected = x[:6] @ dequantize(blocks, type_, (n_ff, d)).reshape(d, n_ff).T
    np.testing.assert_allclose(step_of(tmp_path, tensors, build, width=n_ff), expected, rtol=1e-5, atol=1e-5)


def test_rows_are_mixed_by_shares(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from hotset.backends.torch.graph import TorchGraph

    table = np.random.default_rng(8).standard_normal((5, 30)).astype(F32)
    at = np.array([[2, 0, 0.5, 0.25], [4, 4, 1, -1], [3, 1, 0, 2]] * 32, F32)
    tensors = {"x": (at, GGMLType.F32, None), "table": (table, GGMLType.F32, None)}

    def build(graph: Graph, x: Value) -> Value:
        return graph.add(ops.MixRows(graph.value("out", 30), x, "table"))

    expected = np.stack([table[2] / 2 + table[0] / 4, 0 * table[4], 2 * table[1]])
    np.testing.assert_allclose(step_of(tmp_path, tensors, build, n=3, width=4), expected, atol=1e-6)
    graph = graph_of(tmp_path / "torch.gguf", tensors, build, 4)
    with open_gguf(tmp_path / "torch.gguf") as gguf:
        model, x = TorchGraph(gguf, graph), None
        for part in model.parts:
            x = model.run(part, torch.arange(3)[None], x)[part.result]
    assert x is not None
    found = x.detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_mask_keeps_values_at_or_above_the_threshold(tmp_path: Path) -> None:
    x = np.array([[1, 2, 3, 4], [5, 6, 7, 8]] * 48, F32)
    scores = np.array([[0.5, np.nan, 0.4], [-np.inf, np.inf, 0.5]] * 48, F32)
    tensors = {"x": (x, GGMLType.F32, None), "scores": (scores, GGMLType.F32, None)}

    def build(graph: Graph, x: Value) -> Value:
        scores = graph.add(ops.Embed(graph.value("s", 3), "scores"))
        return graph.add(ops.Mask(graph.value("out", 4), x, scores, threshold=0.5, first=1))

    found = step_of(tmp_path, tensors, build, n=2, width=4)
    assert found.tolist() == [[1, 2, 3, 0], [5, 0, 7, 8]]


def test_statistics_of_a_step(tmp_path: Path) -> None:
    with open_gguf(write_llama(tmp_path / "m.gguf")) as gguf:
        graph = describe(config_from_gguf(gguf, activation="relu"), gguf.tensors)
        names = [f"blk.{i}.{name}" for i in range(2) for name in ("ffn_gate_act", "ffn_act")]
        counts = {}
        for sparse in (False, True):
            reference = ReferenceBackend(gguf, graph, n_blocks=4, sparse=sparse)
            assert reference.stats() is None
            taps = reference.step(batch(3, taps=tuple(names))).taps
            stats = counts[sparse] = reference.stats()
            assert stats is not None
            assert stats.n_tokens == 3
            assert stats.selected.tolist() == [3 * N_FF] * 2
            assert stats.active.tolist() == [np.count_nonzero(taps[f"blk.{i}.ffn_act"]) for i in range(2)]
            assert not stats.predictor.any()
            assert (stats.ffn > 0).all()
            assert (stats.attention > 0).all()
            assert stats.other > 0
    for rows in ("gate_rows", "up_rows", "down_rows"):
        assert getattr(counts[False], rows).tolist() == [N_FF] * 2
    gates, neurons = (
        [taps[f"blk.{i}.{name}"].any(axis=0).sum() for i in range(2)] for name in ("ffn_gate_act", "ffn_act")
    )
    assert counts[True].gate_rows.tolist() == [N_FF] * 2
    assert counts[True].up_rows.tolist() == gates
    assert counts[True].down_rows.tolist() == neurons
    assert max(gates) < N_FF
