"""Kernels on ill-conditioned data against float64, within bounds derived from the inputs (derived_bounds).

The tests run every tensor type on every instruction set of this machine. The other instruction sets give the
bits of the scalar reference (csrc/tests/kernel_test.cpp). Inputs that a product rounds to int8 are rounded
here in the same way, which isolates the kernel's error; the error of that rounding has its own bound.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from cases import quick_are
from derived_bounds import (
    FLOATS,
    TINY,
    TRANSFORM,
    U,
    activation_bound,
    attention_bound,
    axpy_bound,
    gamma,
    gaussian_top_k_bound,
    int8_inputs,
    layer_norm_bound,
    linear_bound,
    magnitudes,
    rms_norm_bound,
    rounding_of_inputs,
    spread,
    xielu_bound,
)
from make_blocks import random_blocks

from hotset import _core
from hotset.backends.cpu.lowering import PLANES
from hotset.backends.reference import ACTIVATIONS, hadamard, q4_0_stored, q8_0_stored, stored, xielu
from hotset.formats.planes import decode
from hotset.formats.quants import DECODABLE, GGMLType, dequantize, quantize
from hotset.load_parameters import KVType
from hotset.model.cost import kv_formats
from hotset.model.operations import XIELU

F32 = int(GGMLType.F32)
ISAS = _core.available_isas()
T = GGMLType
QUICK_TYPES = (T.F32, T.BF16, T.Q4_0, T.Q4_1, T.Q8_0, T.Q4_K, T.Q6_K, T.IQ4_NL, T.MXFP4, T.TQ2_0)
KINDS = ("normal", "outliers", "huge channel", "denormal", "tiny", "all scales", "one sign", "zeros")


def ill(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return float32 data of one kind, whose sums cancel, or have few large terms."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    x = rng.standard_normal(shape)
    match kind:
        case "outliers":
            x[rng.random(shape) < 0.01] *= 1e4
        case "huge channel":
            x[..., shape[-1] // 3] = 1e8
        case "denormal":
            x *= 1e-40
        case "tiny":  # the inverse of a block's scale overflows
            x *= 1e-37
        case "all scales":
            x *= 10.0 ** rng.uniform(-12, 6, shape)
        case "one sign":  # sums grow with every term
            x = np.abs(x) + 1
        case "zeros":
            x[...] = rng.choice([0.0, -0.0], shape)
    return x.astype(np.float32)


def assert_within(found: np.ndarray, expected: np.ndarray, bound: np.ndarray, what: str) -> None:
    assert np.isfinite(found).all(), what
    off = np.abs(found.astype(np.float64) - expected)
    worst = np.unravel_index(np.argmax(off - bound), off.shape)
    assert (off <= bound).all(), (
        f"{what} {worst}: {found[worst]} is {off[worst]:.3g} from {expected[worst]}, bound {bound[worst]:.3g}"
    )


# ---- matrix products


def weights_of(type_: GGMLType, rows: int, cols: int, *, cancelling: bool) -> tuple[np.ndarray, Any, Any]:
    """Return bytes, values and magnitudes; cancelling: the second half of each row repeats the first."""
    blocks = random_blocks(type_, rows, cols, np.random.default_rng(5))
    if cancelling:
        half = blocks.shape[1] // 2
        blocks[:, half:] = blocks[:, :half]
    data = np.ascontiguousarray(blocks).reshape(-1)
    values = dequantize(data, type_, (cols, rows)).reshape(rows, cols).astype(np.float64)
    return data, values, magnitudes(data, type_, (cols, rows), values)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_", sorted(DECODABLE), ids=lambda t: t.name)
def test_matrix_products(type_: GGMLType, isa: str) -> None:
    for cols in (512, 4096):  # one block per lane, and long rows
        for cancelling in (False, True):
            data, weights, magnitude = weights_of(type_, 5, cols, cancelling=cancelling)
            for kind in KINDS:
                x = ill(kind, (7, cols))
                if cancelling:  # the second half cancels the sum of the first
                    x[:, cols // 2 :] = -x[:, : cols // 2]
                exact = x.astype(np.float64)
                inputs, steps = (exact, None) if type_ in FLOATS else int8_inputs(x)
                bound = linear_bound(type_, inputs, magnitude)
                for n in (1, 2, 7):
                    what = f"{type_.name} {isa} {kind} {cols} columns, {n} tokens"
                    found = _core.linear(type_, data, 5, x[:n].copy(), isa)
                    assert_within(found, inputs[:n] @ weights.T, bound[:n], what)
                    if steps is not None:
                        of_inputs = rounding_of_inputs(steps) @ np.abs(weights).T
                        total = (bound + of_inputs)[:n]
                        assert_within(found, exact[:n] @ weights.T, total, f"{what} before rounding")
                if cancelling and type_ not in FLOATS:
                    assert_within(found, np.zeros(found.shape), bound, f"{type_.name} {isa} {kind} cancels")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_", sorted(DECODABLE), ids=lambda t: t.name)
@pytest.mark.parametrize("extreme", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_stay_so(type_: GGMLType, isa: str, extreme: float) -> None:
    data, _, _ = weights_of(type_, 5, 768, cancelling=False)
    x = ill("normal", (7, 768))
    plain = {n: _core.linear(type_, data, 5, x[:n].copy(), isa) for n in (1, 4, 7)}
    for n, expected in plain.items():
        spoilt = x[:n].copy()
        spoilt[n // 2, 345] = extreme
        found = _core.linear(type_, data, 5, spoilt, isa)
        assert not np.isfinite(found[n // 2]).any()
        others = np.arange(n) != n // 2
        np.testing.assert_array_equal(found[others], expected[others])


# ---- operations of a plan


class Fed:
    """A plan whose inputs are given matrices: row t of each is the input of token t."""

    def __init__(self, isa: str, n: int, n_blocks: int = 1) -> None:
        self.plan, self.n = _core.Plan(n, n_blocks, n_blocks, _core.Runtime(2), isa), n
        self.n_blocks = n_blocks

    def input(self, rows: np.ndarray) -> int:
        x = self.plan.buffer(rows.shape[1], False)
        data = np.ascontiguousarray(rows, np.float32).reshape(-1).view(np.uint8)
        self.plan.add("embed", weight=(F32, data), of="token", first_row=0, out=x)
        return int(x)

    def output(self, width: int) -> int:
        return int(self.plan.buffer(width, False))

    def run(self, out: int) -> np.ndarray:
        self.plan.finish()
        ids, blocks = np.arange(self.n, dtype=np.int32), np.arange(self.n_blocks, dtype=np.int32)[None]
        self.plan.run(ids, ids, np.zeros_like(ids), blocks, ids)
        return np.array(self.plan.rows(out))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_", quick_are(QUICK_TYPES, sorted(DECODABLE)), ids=lambda t: t.name)
def test_down_projections(type_: GGMLType, isa: str) -> None:
    neurons, cols = 1500, 512
    data, weights, _ = weights_of(type_, neurons, cols, cancelling=False)
    bias = ill("normal", (cols,), 1)
    for kind in KINDS:
        x = ill(kind, (20, neurons))
        x[np.random.default_rng(2).random(x.shape) < 0.7] = 0  # like the zeros of a ReLU
        exact = x.astype(np.float64)
        expected, bound = exact @ weights + bias, axpy_bound(exact, np.abs(weights))
        bound += U * (np.abs(expected) + bound)
        for n, sparse in ((1, False), (1, True), (3, True), (20, True), (20, False)):
            fed = Fed(isa, n)
            source, out = fed.input(x[:n]), fed.output(cols)
            fed.plan.add(
                "transposed_linear", x=source, weight=(int(type_), data), bias=bias, sparse=sparse, out=out
            )
            assert_within(fed.run(out), expected[:n], bound[:n], f"{type_.name} {isa} {kind} {n} {sparse}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.F16, GGMLType.Q8_0], ids=lambda t: t.name)
def test_mixed_rows(type_: GGMLType, isa: str) -> None:
    """Check sums of rows whose numbers may lie outside the table: they mean row 0."""
    n_rows, cols, rng = 40, 288, np.random.default_rng(4)
    data, weights, _ = weights_of(type_, n_rows, cols, cancelling=False)
    numbers = rng.integers(0, n_rows, (9, 4)).astype(np.float32)
    numbers[::2, 1] = [np.nan, -1, n_rows, np.inf, 1e30]
    shares = ill("normal", (9, 4))
    fed = Fed(isa, 9)
    source, out = fed.input(np.concatenate([numbers, shares], axis=1)), fed.output(cols)
    fed.plan.add("mix_rows", at=source, weight=(int(type_), data), out=out)
    numbers[::2, 1] = 0
    parts = weights[numbers.astype(int)] * shares.astype(np.float64)[..., None]
    bound = gamma(4) * np.abs(parts).sum(1) + 4 * TINY
    assert_within(fed.run(out), parts.sum(1), bound, f"{type_.name} {isa}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("per_byte", sorted(PLANES))
def test_down_projections_in_planes(per_byte: int, isa: str) -> None:
    neurons, cols, rng = 640, 288, np.random.default_rng(3)
    codes = rng.integers(0, 256, (neurons, cols // per_byte), dtype=np.uint8)
    scales = (10.0 ** rng.uniform(-6, 2, (neurons // 32, cols))).astype(np.float16)  # some are subnormal
    weights = decode(codes, scales).astype(np.float64)
    for kind in KINDS:
        x = ill(kind, (9, neurons))
        exact = x.astype(np.float64)
        for n in (1, 9):
            fed = Fed(isa, n)
            source, out = fed.input(x[:n]), fed.output(cols)
            planes = codes.reshape(-1), scales.reshape(-1).view(np.uint8)
            fed.plan.add(
                "transposed_linear", x=source, weight=(PLANES[per_byte], *planes), sparse=False, out=out
            )
            bound = axpy_bound(exact[:n], np.abs(weights))
            assert_within(fed.run(out), exact[:n] @ weights, bound, f"{per_byte} {isa} {kind} {n}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 15, 576, 8192])
def test_norms(isa: str, width: int) -> None:
    weight, bias = ill("all scales", (width,), 1), ill("normal", (width,), 2)
    for kind in (*KINDS, "far from 0"):
        for eps in (1e-5, 1e-12):
            far = kind == "far from 0"  # the mean is a million times the deviation
            x = ill("normal", (5, width)) + np.float32(1e6) if far else ill(kind, (5, width))
            exact, small = x.astype(np.float64), float(np.float32(eps))
            scale = 1 / np.sqrt((exact**2).mean(axis=1, keepdims=True) + small)
            expected = exact * scale * weight
            fed = Fed(isa, 5)
            source, out = fed.input(x), fed.output(width)
            fed.plan.add("rms_norm", x=source, weight=weight, eps=eps, n_head=1, out=out)
            what = f"{isa} {kind} {width} {eps}"
            of_weight = np.abs(weight) * np.abs(scale) * TINY
            assert_within(fed.run(out), expected, rms_norm_bound(expected, width) + of_weight, f"RMS {what}")

            centred = exact - exact.mean(axis=1, keepdims=True)
            expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + small) * weight + bias
            fed = Fed(isa, 5)
            source, out = fed.input(x), fed.output(width)
            fed.plan.add("layer_norm", x=source, weight=weight, bias=bias, eps=eps, n_head=1, out=out)
            bound = layer_norm_bound(exact, weight, bias, small) + U * np.abs(expected)
            assert_within(fed.run(out), expected, bound, f"layer {what}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 15, 576, 8192])
def test_gaussian_top_k(isa: str, width: int) -> None:
    for kind in KINDS:
        for multiplier in (1.6448533535, -0.3, 0.0):
            x = ill(kind, (5, width))
            exact, times = x.astype(np.float64), float(np.float32(multiplier))
            threshold = exact.mean(axis=1, keepdims=True) + times * exact.std(axis=1, keepdims=True)
            expected = np.maximum(exact - threshold, 0)
            fed = Fed(isa, 5)
            source, out = fed.input(x), fed.output(width)
            fed.plan.add("gaussian_top_k", x=source, multiplier=multiplier, out=out)
            bound = gaussian_top_k_bound(exact, times)
            assert_within(fed.run(out), expected, bound, f"{isa} {kind} {width} {multiplier}")


@pytest.mark.parametrize("isa", ISAS)
def test_xielu(isa: str) -> None:
    for f in (XIELU(0.8, 1.3, 0.5, -1e-6), XIELU(2.0, 0.1, 0.25, -0.1)):
        for kind in KINDS:
            x = ill(kind, (5, 579))
            fed = Fed(isa, 5)
            source, out = fed.input(x), fed.output(579)
            fed.plan.add("xielu", x=source, **asdict(f), out=out)
            exact = x.astype(np.float64)
            assert_within(fed.run(out), xielu(exact, f), xielu_bound(exact, f), f"{isa} {kind}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_activations(isa: str, kind: str) -> None:
    rng, threshold = np.random.default_rng(4), 0.25
    edges = [
        0.0, -0.0, 0.25, np.nextafter(np.float32(0.25), np.float32(0)), 87.3, 88.0, 88.5, 89.0, 104.0, 1e3,
        1e10,
    ]  # fmt: skip
    x = np.concatenate(
        [
            edges,
            np.negative(edges),
            rng.standard_normal(999),
            rng.uniform(-120, 120, 2000),
            10 ** rng.uniform(-44, 9, 999),
        ]
    ).astype(np.float32)[None]
    if kind == "exp":  # float32 cannot hold larger powers
        x = np.minimum(x, np.float32(88))
    fed = Fed(isa, 1)
    source, out = fed.input(x), fed.output(x.shape[1])
    fed.plan.add("activate", x=source, kind=kind, threshold=threshold, out=out)
    exact = x.astype(np.float64)
    expected = np.asarray(ACTIVATIONS[kind](exact, np.float32(threshold)), np.float64)
    bound = activation_bound(kind, exact, expected) + U * np.abs(expected)
    assert_within(fed.run(out), expected, bound, f"{kind} {isa}")


# ---- attention


def queries_and_keys(kind: str, n: int, heads: int, heads_kv: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return queries and keys that give scores of one kind, float32."""
    q, k = ill("normal", (n, heads * dim), 1), ill("normal", (n, heads_kv * dim), 2)
    match kind:
        case "cancelling":  # each score is a sum of large numbers that is about 0
            q[:, 1::2], k[:, 1::2] = q[:, 0::2], -k[:, 0::2]
            q *= 30
        case "all alike":
            k[:] = k[0]
        case "one position takes all":
            k[n // 3] *= 40
        case "one huge channel":
            k[:, dim // 2] = 50
        case "far below":  # in a long row all weights except the position's own underflow
            q *= 20
            k[:] = -np.abs(k)
            q = np.abs(q)
        case "tiny":
            q *= 1e-38
    return q, k


def attention(
    isa: str, kv_type: KVType, q: np.ndarray, k: np.ndarray, v: np.ndarray, sizes: tuple[int, int, int, int],
    **facts: Any,
) -> np.ndarray:  # fmt: skip
    """Return attention for n tokens, float32 [n, n_head, head_dim_v].

    sizes: n_head, n_head_kv, head_dim, head_dim_v.
    """
    (heads, heads_kv, dim, dim_v), n, formats = sizes, len(q), kv_formats(kv_type)
    n_blocks = -(-n // _core.KV_BLOCK_SIZE)
    slots = n_blocks * heads_kv * _core.KV_BLOCK_SIZE
    widths = dim, -(-dim_v // 16) * 16
    caches = [
        np.zeros(slots * width * format.bits // 8, np.uint8)
        for width, format in zip(widths, formats, strict=True)
    ]
    scales = [
        np.zeros(slots * width // 32 * 2, np.uint8) if format.n_channels == 32 else None
        for width, format in zip(widths, formats, strict=True)
    ]
    fed = Fed(isa, n, n_blocks)
    inputs, out = [fed.input(x) for x in (q, k, v)], fed.output(heads * dim_v)
    names = zip(("k_cache", "v_cache", "k_scale", "v_scale"), [*caches, *scales], strict=True)
    cache = {name: array for name, array in names if array is not None}
    fed.plan.add(
        "attention", **dict(zip("qkv", inputs, strict=True)), out=out, n_head=heads, n_head_kv=heads_kv,
        head_dim=dim, head_dim_v=dim_v, scale=dim**-0.5, kv_type=kv_type, block_size=0, **cache, **facts,
    )  # fmt: skip
    return fed.run(out).reshape(n, heads, dim_v)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "kv_type", quick_are(("f16", "q8_0/q4_0"), ["f16", "f32", "q4_0", "q8_0", "q8_0/q4_0", "q4_0/f16"])
)
@pytest.mark.parametrize(
    "kind",
    ["normal", "cancelling", "all alike", "one position takes all", "one huge channel", "far below", "tiny"],
)
def test_attention(isa: str, kv_type: KVType, kind: str) -> None:
    heads, heads_kv, dim, dim_v = (4, 2, 64, 96) if "q" in kv_type else (4, 2, 40, 24)
    n, formats = 1100, kv_formats(kv_type)  # more than two splits
    rotated_k, rotated_v = (format.rotated for format in formats)
    q, k = queries_and_keys(kind, n, heads, heads_kv, dim)
    v = ill("outliers", (n, heads_kv * dim_v), 3)
    for window, softcap in ((0, 0.0), (77, 0.0), (77, 2.5)):
        found = attention(
            isa, kv_type, q, k, v, (heads, heads_kv, dim, dim_v), softcap=softcap, window=window
        )
        keys = stored(k.reshape(n, heads_kv, dim), formats[0]).astype(np.float64)
        values = stored(v.reshape(n, heads_kv, dim_v), formats[1]).astype(np.float64)
        query = q.astype(np.float64).reshape(n, heads, dim) * np.float64(np.float32(dim**-0.5))
        sizes = spread(np.abs(query)) if rotated_k else np.abs(query)
        query = transformed(query) if rotated_k else query
        for token in (0, 1, 63, 64, 500, 511, 512, 700, 1023, 1024, n - 1):
            seen = slice(max(0, token + 1 - window) if window else 0, token + 1)
            for head in range(heads):
                past, of = keys[seen, head // 2], values[seen, head // 2]
                scores = past @ query[token, head]
                capped = softcap * np.tanh(scores / softcap) if softcap else scores
                weights = np.exp(capped - capped.max())
                expected = weights @ of / weights.sum()
                magnitude = np.abs(past) @ sizes[token, head]
                bound = attention_bound(scores, magnitude, dim + rotated_k * TRANSFORM, of, softcap)
                if rotated_v:
                    bound = spread(bound + gamma(TRANSFORM) * np.abs(expected))
                    expected = transformed(expected)
                assert_within(found[token, head], expected, bound, f"{isa} {kv_type} {kind} {window} {token}")


def transformed(x: np.ndarray) -> np.ndarray:
    """Return the Hadamard transform of heads [..., dim], computed by its matrix."""
    width = x.shape[-1] & -x.shape[-1]
    signs = [[1 - 2 * (int(i & j).bit_count() % 2) for j in range(width)] for i in range(width)]
    return (x.reshape(-1, width) @ np.array(signs) / np.sqrt(width)).reshape(x.shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("extreme", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_in_no_answer_in_silence(
    isa: str, kv_type: KVType, extreme: float
) -> None:
    q, k = queries_and_keys("normal", 70, 2, 1, 64)
    v = ill("normal", (70, 64))
    v[66, 37] = extreme
    found = attention(isa, kv_type, q, k, v, (2, 1, 64, 64), window=0, softcap=0.0)
    assert (~np.isfinite(found[66:])).any(axis=-1).all()
    assert np.isfinite(found[:64]).all()


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160, 256])
def test_q4_0_cache_is_close_and_equals_the_reference(dim: int) -> None:
    """Compare the transform with its matrix, and with its inverse; codes are within half a step."""
    x = ill("outliers", (100, dim), dim)
    found, expected = hadamard(x), transformed(x.astype(np.float64))
    off = gamma(TRANSFORM) * spread(np.abs(x.astype(np.float64)))
    assert_within(found, expected, off, "transform")
    assert_within(hadamard(found), x, spread(off + gamma(TRANSFORM) * np.abs(expected)), "inverse")
    stored = q4_0_stored(x)
    as_blocks = quantize(found, GGMLType.Q4_0)
    np.testing.assert_array_equal(stored, dequantize(as_blocks, GGMLType.Q4_0, (dim, 100)))
    apart = np.abs(stored.astype(np.float64) - found).reshape(-1, 32)
    largest = np.abs(found).reshape(-1, 32).max(axis=1, keepdims=True)
    assert (apart <= largest / 8 * (1 + 2**-8)).all()  # a whole step at 8, which has no code


def test_q8_0_cache_is_close() -> None:
    """Check codes within half a step, plus the rounding of the scale to f16."""
    for kind in KINDS:
        if kind == "huge channel":  # 1e8 / 127 has no f16
            continue
        x = ill(kind, (100, 96))
        largest = np.abs(x.reshape(-1, 32)).max(axis=1, keepdims=True).astype(np.float64)
        half = 2.0**-11  # relative rounding of f16; 2**-25 is half of its smallest number
        step = largest / 127 * (1 + half) + 2.0**-25
        bound = np.broadcast_to(
            step / 2 * (1 + gamma(3)) + 127 * (largest / 127 * half + 2.0**-25), (300, 32)
        )
        off = np.abs(q8_0_stored(x).astype(np.float64) - x).reshape(-1, 32)
        assert (off <= bound).all(), kind
