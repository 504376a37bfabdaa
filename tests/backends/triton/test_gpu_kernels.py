"""The GPU backend's weights and kernels in plain torch, compared with NumPy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpu_inputs import EPS, FLOATS, K_TYPES, Cache, input_major, matrix, randn, rng_of, token_threshold
from make_blocks import random_blocks

from hotset.backends import reference
from hotset.backends.base import BLOCK_SIZE, LOGIT_GROUP, Batch
from hotset.backends.torch import functions
from hotset.backends.triton import fallback, launch
from hotset.backends.triton.fallback import RopeTable
from hotset.backends.triton.kernels import Kernels
from hotset.backends.triton.matrix import SUPPORTED, DeviceMatrix
from hotset.errors import DeviceError, InvalidRequestError, UnsupportedModelError
from hotset.formats import planes
from hotset.formats.channels import can_be_input_major_on_device as can_be_input_major
from hotset.formats.quants import DECODABLE, GGMLType, dequantize, row_bytes
from hotset.model.graph import Graph
from hotset.model.operations import Attention, Mask, Rope, Rotate, Value

each_type = pytest.mark.parametrize("type_", SUPPORTED, ids=lambda t: t.name)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and np.array_equal(one.view(np.uint32), other.view(np.uint32))


def width_of(type_: GGMLType, n_blocks: int) -> int:
    return n_blocks * (256 if type_ in K_TYPES else 32) + (5 if type_ in FLOATS else 0)


def sums_agree(found: torch.Tensor, expected: np.ndarray, magnitude: np.ndarray, n: int) -> None:
    """Check that two sums of n products differ by at most 2 n eps times the sum of their magnitudes."""
    error = np.abs(found.numpy().astype(np.float64) - expected)
    assert (error <= 2 * (n + 8) * EPS * magnitude + 1e-30).all(), error.max()


# ---- weights -------------------------------------------------------------------------------------------


@each_type
@pytest.mark.parametrize("n_rows", [1, 7, 67])
def test_a_matrix_keeps_every_value_and_no_byte_more(type_: GGMLType, n_rows: int) -> None:
    n_cols = width_of(type_, 3)
    data = random_blocks(type_, n_rows, n_cols, rng_of(n_rows)).reshape(-1).view(np.uint8)
    data.flags.writeable = False  # like a mapped file
    m = DeviceMatrix.from_bytes(data, type_, n_rows, n_cols, "cpu")
    assert (m.n_rows, m.n_cols, m.type) == (n_rows, n_cols, type_)
    assert m.nbytes == n_rows * row_bytes(type_, n_cols)
    assert same_bits(m.dequantize().numpy(), dequantize(data, type_, (n_cols, n_rows)))


@each_type
@pytest.mark.parametrize("rows", [[], [3], [40, 2, 2, 66, 0]])
def test_a_matrix_of_some_rows(type_: GGMLType, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    n_cols = width_of(type_, 2)
    monkeypatch.setattr("hotset.backends.triton.matrix.SLICE_VALUES", 2 * n_cols)  # several slices
    data = random_blocks(type_, 67, n_cols, rng_of(1)).reshape(-1).view(np.uint8)
    m = DeviceMatrix.from_bytes(data, type_, 67, n_cols, "cpu", rows=np.array(rows, np.int64))
    assert m.nbytes == len(rows) * row_bytes(type_, n_cols)
    assert same_bits(m.dequantize().numpy(), dequantize(data, type_, (n_cols, 67))[rows])


@pytest.mark.parametrize("type_", [GGMLType.Q4_0, GGMLType.Q8_0])
@pytest.mark.parametrize("rows", [None, [], [0, 31, 95, 33, 64]])
def test_planes_share_their_scales(type_: GGMLType, rows: list[int] | None) -> None:
    n_ff, n_embd = 128, 96
    data = random_blocks(type_, n_embd, n_ff, rng_of(2)).reshape(-1).view(np.uint8)
    codes = planes.codes_of(data, type_, (n_ff, n_embd))
    scales = planes.scales_of(data, type_, (n_ff, n_embd))
    m = DeviceMatrix.from_planes(codes, scales, "cpu", None if rows is None else np.array(rows, np.int64))
    kept = np.arange(n_ff) if rows is None else np.array(rows, np.int64)
    groups = len(np.unique(kept // 32))
    assert m.nbytes == codes[kept].nbytes + groups * n_embd * 2 + 4 * len(kept)
    assert same_bits(m.dequantize().numpy(), planes.decode(codes, scales)[kept])


INPUT_MAJOR = [*FLOATS, GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q4_K]


@pytest.mark.parametrize("type_", INPUT_MAJOR, ids=lambda t: t.name)
def test_a_matrix_by_channel_keeps_every_value(type_: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    n_in, widths = width_of(type_, 3 if type_ in K_TYPES else 20), (128, 64)
    monkeypatch.setattr("hotset.backends.triton.matrix.SLICE_VALUES", 256 * 128)  # several slices
    m, values = input_major(type_, widths, n_in)
    assert (m.n_rows, m.n_cols, m.type) == (n_in, 192, type_)
    assert same_bits(m.dequantize().numpy(), values.astype(np.float32))
    some = torch.tensor([n_in - 1, 0, 33])
    assert same_bits(m.values(some).numpy(), values.astype(np.float32)[some.numpy()])
    own = 0 if type_ in FLOATS else 4 * n_in
    assert m.nbytes - own == 192 * row_bytes(type_, n_in) + (4 * 192 * n_in // 256 if type_ in K_TYPES else 0)


@pytest.mark.parametrize("type_", SUPPORTED, ids=lambda t: t.name)
def test_matrices_that_can_be_input_major(type_: GGMLType) -> None:
    assert can_be_input_major(type_, 64) == (type_ in INPUT_MAJOR)
    assert not can_be_input_major(GGMLType.Q4_0, 48)  # 4-bit codes of 16 and 16 outputs share bytes


@pytest.mark.parametrize("type_", sorted(DECODABLE - {*SUPPORTED}), ids=lambda t: t.name)
def test_type_without_kernel_gives_one_message(type_: GGMLType) -> None:
    data = np.zeros(row_bytes(type_, 256), np.uint8)
    message = rf"{type_.name} cannot be computed on a GPU; use a file of .*Q4_0"
    with pytest.raises(UnsupportedModelError, match=message):
        DeviceMatrix.from_bytes(data, type_, 1, 256, "cpu")


# ---- products ------------------------------------------------------------------------------------------


@each_type
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_linear_and_its_transpose(type_: GGMLType, n_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n_cols = width_of(type_, 3)
    monkeypatch.setattr("hotset.backends.triton.matrix.SLICE_VALUES", 8 * n_cols)
    m, w = matrix(type_, 37, n_cols)
    x, bias, residual = randn(n_tokens, n_cols), randn(37, seed=1), randn(n_tokens, 37, seed=2)
    out = torch.empty(n_tokens, 37)
    t = torch.from_numpy
    y = fallback.linear(t(x), m, t(bias), t(residual), out)
    assert y is out
    sums_agree(
        y, x @ w.T + bias + residual, np.abs(x) @ np.abs(w.T) + np.abs(bias) + np.abs(residual), n_cols
    )
    v = randn(n_tokens, 37, seed=3) * (rng_of(4).random((n_tokens, 37)) < 0.3)
    v = v.astype(np.float32)
    sums_agree(fallback.linear_t(torch.from_numpy(v), m), v @ w, np.abs(v) @ np.abs(w), 37)


def ffn(
    h: np.ndarray, gate: np.ndarray | None, up: np.ndarray, kind: str, threshold: float, up_kind: str | None,
    chosen: np.ndarray, gate_bias: np.ndarray, up_bias: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Return the values of neurons in float64, all computed."""
    f = reference.ACTIVATIONS
    u = h @ up.T + up_bias
    if gate is None:
        return np.where(chosen, f[kind](u, np.float32(threshold)), 0)
    g = f[kind](h @ gate.T + gate_bias, np.float32(threshold))
    return np.where(chosen, g * (u if up_kind is None else f[up_kind](u, np.float32(0))), 0)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(
    ("gated", "kind", "up_kind"),
    [(True, "relu", None), (True, "relu", "relu"), (False, "relu2", None), (True, "fatrelu", None),
     (False, "gelu_tanh", None), (True, "silu", None)],
)  # fmt: skip
def test_sparse_ffn(share: float, gated: bool, kind: str, up_kind: str | None) -> None:
    n, d, t = 75, 64, 3
    up_m, up = matrix(GGMLType.Q4_0, n, d, 1)
    gate_m, gate = matrix(GGMLType.Q8_0, n, d, 2) if gated else (None, None)
    down_m, down = matrix(GGMLType.F16, n, d, 3)
    h, biases = randn(t, d), randn(2, n, seed=1) * 0.1
    chosen = rng_of(5).random((t, 90)) < share
    numbers = np.sort(rng_of(6).permutation(90)[:n])  # the rows are some of 90 neurons
    held = fallback.Held.of(numbers, 90, lambda _, values: torch.from_numpy(values))
    bits = np.packbits(chosen, axis=1, bitorder="little")
    counts = torch.zeros(fallback.N_COUNTS, dtype=torch.int64)
    found = fallback.sparse_ffn(
        torch.from_numpy(h), gate_m, up_m, down_m, activation=kind, threshold=0.1, up_activation=up_kind,
        selected=torch.from_numpy(bits), held=held,
        gate_bias=torch.from_numpy(biases[0]) if gated else None, up_bias=torch.from_numpy(biases[1]),
        counts=counts,
    )  # fmt: skip
    chosen = chosen[:, numbers]
    values = ffn(h.astype(np.float64), gate, up, kind, 0.1, up_kind, chosen, biases[0], biases[1])
    assert (
        np.abs(found.numpy() - values @ down).max()
        < 2 * (n + d) * EPS * (np.abs(values) @ np.abs(down) + 1).max()
    )
    active = values != 0
    fires = chosen if not gated else chosen & (
        reference.ACTIVATIONS[kind](h @ gate.T.astype(np.float32) + biases[0], np.float32(0.1)) != 0
    )  # fmt: skip
    rows = [chosen.any(0).sum() * gated, fires.any(0).sum(), active.any(0).sum()]
    assert counts.tolist() == [chosen.sum(), active.sum(), *rows, 0]


@pytest.mark.parametrize(("n_scored", "first"), [(1, 0), (24, 8), (29, 3), (64, 0)])
def test_bits_equal_a_mask(n_scored: int, first: int) -> None:
    scores = randn(3, n_scored)
    scores[0, 0] = np.nan
    mask = Mask(*[Value(i, n_scored + first, "x") for i in range(3)], 0.25, first)
    expected = reference.selected(mask, scores)
    bits = fallback.pack_bits(torch.from_numpy(scores), 0.25, first)
    assert np.array_equal(bits.numpy(), np.packbits(expected, axis=1, bitorder="little"))
    assert np.array_equal(fallback.unpack_bits(bits, n_scored + first).numpy(), expected)


def test_the_largest_of_each_group_of_logits() -> None:
    x = randn(3, 4 * LOGIT_GROUP)
    x[0, 5], x[1, 70], x[2, 130] = np.nan, np.inf, -np.inf
    expected = x.reshape(3, 4, LOGIT_GROUP).max(axis=2)
    expected[0, 0] = expected[1, 1] = expected[2, 2] = np.nan
    np.testing.assert_array_equal(fallback.largest(torch.from_numpy(x)).numpy(), expected)


# ---- thresholds -------------------------------------------------------------------------------------------


def test_threshold_keeps_large_values() -> None:
    x = randn(5, 40)
    x[1, :5] = [np.nan, 0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(0)), -0.0]
    found = fallback.zero_small(torch.from_numpy(x), token_threshold(5, 0.5)).numpy()
    small = np.abs(x) < 0.5
    assert np.array_equal(found, np.where((np.arange(5) % 3 > 0)[:, None] & small, 0, x), equal_nan=True)
    assert np.array_equal(found[1, :5], [np.nan, 0.5, -0.5, 0, 0], equal_nan=True)


def test_cutoffs_within_norms_and_neurons() -> None:
    """Compare thresholds within norms and neurons with thresholds applied afterwards."""
    t = torch.from_numpy
    x, weight, bias = t(randn(4, 64)), t(randn(64, seed=1)), t(randn(64, seed=2))
    by = token_threshold(4, 0.6)
    assert torch.equal(
        fallback.rms_norm(x, weight, 1e-5, by=by), fallback.zero_small(fallback.rms_norm(x, weight, 1e-5), by)
    )
    whole = fallback.layer_norm(x, weight, bias, 1e-5)
    assert torch.equal(fallback.layer_norm(x, weight, bias, 1e-5, by), fallback.zero_small(whole, by))
    gate, up = (matrix(GGMLType.F32, 40, 64, seed)[0] for seed in (1, 2))
    all_of_them = torch.tensor([1, 2, 1, 2])
    of_gate, of_value = token_threshold(4, 3.0).of(all_of_them), token_threshold(4, 20.0).of(all_of_them)
    fired = fallback.zero_small(functions.activate(fallback.linear(x, gate), "silu"), of_gate)
    values = fallback.zero_small(fired * fallback.linear(x, up), of_value)
    counts = torch.zeros(fallback.N_COUNTS, dtype=torch.int64)
    found = fallback.neurons(
        x, gate, up, activation="silu", counts=counts, gate_threshold=of_gate, value_threshold=of_value
    )
    assert torch.allclose(found, values, rtol=1e-5, atol=1e-5)
    rows = [(fired != 0).any(0).sum(), (values != 0).any(0).sum()]
    assert counts.tolist() == [160, (values != 0).sum(), 40, *rows, 0]
    assert rows[1] < rows[0] < 40


def test_channels_of_zeros_are_left_out() -> None:
    m, w = input_major(GGMLType.Q4_0, [64], 96)
    x = randn(2, 96) * (rng_of(1).random((2, 96)) < 0.3)
    left_out = torch.zeros(1, dtype=torch.int64)
    found = fallback.linear_t(torch.from_numpy(x.astype(np.float32)), m, left_out=left_out)
    sums_agree(found, x @ w, np.abs(x) @ np.abs(w), 96)
    assert left_out.item() == 32 * (x == 0).all(axis=0).sum()


# ---- norms, rotation, attention ------------------------------------------------------------------------


def test_norms() -> None:
    x, weight, bias = randn(3, 96), randn(96, seed=1), randn(96, seed=2)
    double = x.astype(np.float64)
    t = torch.from_numpy
    expected = double / np.sqrt((double**2).mean(1, keepdims=True) + 1e-5) * weight
    assert np.allclose(
        fallback.rms_norm(t(x), t(weight), 1e-5).numpy(), expected, rtol=20 * EPS, atol=20 * EPS
    )
    parts = double.reshape(3, 4, 24)
    expected = (parts / np.sqrt((parts**2).mean(2, keepdims=True) + 1e-5) * weight[:24]).reshape(3, 96)
    assert np.allclose(
        fallback.rms_norm(t(x), t(weight[:24].copy()), 1e-5, 4).numpy(),
        expected,
        rtol=20 * EPS,
        atol=20 * EPS,
    )
    centred = double - double.mean(1, keepdims=True)
    expected = centred / np.sqrt(centred.var(1, keepdims=True) + 1e-5) * weight + bias
    assert np.allclose(
        fallback.layer_norm(t(x), t(weight), t(bias), 1e-5).numpy(), expected, rtol=40 * EPS, atol=40 * EPS
    )


@pytest.mark.parametrize("kind", ["norm", "neox"])
@pytest.mark.parametrize(("head_dim", "n_rot", "magnitude"), [(16, 16, 1.0), (24, 10, 1.2)])
def test_rotation_equals_the_reference(kind: str, head_dim: int, n_rot: int, magnitude: float) -> None:
    freq = tuple(10000.0 ** -(2 * np.arange(n_rot // 2) / n_rot))
    rope = Rope(kind, n_rot, freq, magnitude)
    positions = np.array([0, 1, 255, 256, 1000, 131071], np.int32)
    x = randn(6, 3 * head_dim)
    width = Value(0, x.shape[1], "x")
    expected = reference.rotate(x, positions, Rotate(width, width, 3, head_dim, rope))
    table = RopeTable.build(rope, 131072, "cpu")
    cos_sin = fallback.angles(torch.from_numpy(positions), table)
    found = fallback.rotate(torch.from_numpy(x), cos_sin, n_head=3, kind=kind)
    # Each of cos and sin has three more roundings than the reference's.
    assert np.abs(found.numpy() - expected).max() < 8 * EPS * magnitude * np.abs(x).max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["f16", "f32"])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (70, 0.0), (70, 0.5)])
@pytest.mark.parametrize(("n_head", "n_head_kv", "dim", "dim_v"), [(4, 4, 16, 16), (6, 2, 24, 8)])
def test_attention_equals_the_reference(
    dtype: torch.dtype, window: int, softcap: float, n_head: int, n_head_kv: int, dim: int, dim_v: int
) -> None:
    cache = Cache([1, 64, 150, 65], n_head_kv, dim, dim_v, dtype)
    sequences, positions = cache.tokens(1000)
    n = len(sequences)
    q, k, v = (randn(n, width) for width in (n_head * dim, n_head_kv * dim, n_head_kv * dim_v))
    values = [Value(i, x.shape[1], "qkv"[i]) for i, x in enumerate((q, k, v))]
    op = Attention(
        Value(3, n_head * dim_v, "out"), *values, n_head, n_head_kv, dim, dim_v, 0.3, window,
        softcap=softcap, layer=0,
    )  # fmt: skip
    oracle = reference.ReferenceBackend(
        SimpleNamespace(tensors={}), Graph([op], values), n_blocks=len(cache.k),
        kv_type="f16" if dtype == torch.float16 else "f32",
    )  # fmt: skip
    none = np.zeros(n, np.int32)
    batch = Batch(none, positions.numpy(), sequences.numpy(), cache.tables, none[:0])
    oracle.n_vocab = 1
    slots = oracle._slots(batch)
    oracle._store(op, {1: k, 2: v}, batch, [seen[-1] for seen in slots])
    expected = oracle._attend(op, q, batch, slots, None)
    tables = torch.from_numpy(cache.tables)
    t = torch.from_numpy
    fallback.store_kv(t(k), t(v), cache.k, cache.v, tables, sequences, positions)
    found = fallback.attention(
        t(q), cache.k, cache.v, tables, sequences, positions, n_head=n_head, scale=0.3, window=window,
        softcap=softcap,
    )  # fmt: skip
    assert np.abs(found.numpy() - expected).max() < 200 * EPS * np.abs(v).max()


def test_a_token_without_a_block_stores_nothing_and_sees_nothing() -> None:
    k_blocks = torch.zeros(1, 1, BLOCK_SIZE, 8)
    tables = torch.tensor([[-1]], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    x = torch.ones(1, 8)
    fallback.store_kv(x, x, k_blocks, k_blocks, tables, zero, zero)
    assert not k_blocks.any()
    assert not fallback.attention(x, k_blocks, k_blocks, tables, zero, zero, n_head=1, scale=1.0).any()


# ---- who computes --------------------------------------------------------------------------------------


def test_the_fallback_kernels_compute_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("HOTSET_TRITON", raising=False)
    kernels = Kernels("cpu")
    assert kernels.name == "torch"
    assert not kernels.capturable
    monkeypatch.setenv("HOTSET_TRITON", "1")
    with pytest.raises(InvalidRequestError, match="does not run on cpu"):
        Kernels("cpu")
    monkeypatch.setenv("HOTSET_TRITON", "yes")
    with pytest.raises(InvalidRequestError, match="must be 0 or 1"):
        Kernels("cpu")


def test_a_device_without_dependent_launches_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (8, 9)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert Kernels("cuda", triton=True).name == "triton"
    monkeypatch.setattr(launch, "DEPENDENT", True)
    with pytest.raises(DeviceError, match="cuda has no dependent launches"):
        Kernels("cuda", triton=True)
    assert Kernels("cuda", triton=False).name == "torch"
    capability = (9, 0)
    assert Kernels("cuda", triton=True).name == "triton"
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(DeviceError, match="cuda has no dependent launches"):
        Kernels("cuda", triton=True)


@pytest.mark.parametrize(("value", "captures"), [(None, True), ("1", True), ("0", False)])
def test_captures_can_be_forbidden(
    value: str | None, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the switch that tells faults of captures from others; fallbacks are never captured."""
    monkeypatch.delenv("HOTSET_CAPTURE", raising=False)
    if value is not None:
        monkeypatch.setenv("HOTSET_CAPTURE", value)
    assert Kernels("cuda", triton=True).capturable == captures
    assert not Kernels("cuda", triton=False).capturable
