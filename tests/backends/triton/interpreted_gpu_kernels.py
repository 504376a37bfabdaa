"""Every Triton kernel compared with its fallback, in Triton's interpreter; test_gpu_triton.py runs this file.

pytest does not collect it: Triton decides at import whether it interprets. So this file needs a process with
TRITON_INTERPRET=1 from the start, and the other tests need a process without it.

With HOTSET_TEST_DEVICE=cuda:0 the same tests run the compiled kernels there (bench/gpu/stages.py check). With
"cpu" they take a device's branches, but kernels are interpreted. test_gpu_triton.py does that, too, so that
faults of these branches appear without a device. With "ptx" the kernels are compiled for a device and their
PTX is executed (tests/support/ptx).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_inputs import EPS, FLOATS, K_TYPES, Cache, input_major, matrix, randn, rng_of, token_threshold
from interpreted_triton import patch_once
from make_blocks import random_blocks
from ptx import kernels as ptx

from hotset.backends.base import LOGIT_GROUP
from hotset.backends.torch import functions
from hotset.backends.triton import exact, experts_kernel, fallback, spin_kernel, triton_kernels
from hotset.backends.triton.cpu_offload import CudaDriver
from hotset.backends.triton.kernels import Kernels
from hotset.backends.triton.matrix import EXPERT_TYPES, SUPPORTED, DeviceMatrix, HostRows
from hotset.formats import planes
from hotset.formats.quants import GGMLType
from hotset.model.operations import Activate, Rope, Route, Value
from hotset.offload import expert_cache

DEVICE = os.environ.get("HOTSET_TEST_DEVICE")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
assert INTERPRETED or DEVICE is not None
patch_once()


class OnDevice:
    """The functions of a module on a device: arguments are copied there, and written ones are copied back."""

    def __init__(self, module: Any, device: str) -> None:
        self._module, self._device = module, device

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)

        def call(*args: Any, **options: Any) -> Any:
            moved: list[tuple[torch.Tensor, torch.Tensor]] = []

            def move(value: Any) -> Any:
                if isinstance(value, torch.Tensor):
                    moved.append((value, value.to(self._device)))
                    return moved[-1][1]
                if isinstance(value, tuple):
                    return tuple(map(move, value))
                if is_dataclass(value) and not isinstance(value, type):
                    return replace(value, **{f.name: move(getattr(value, f.name)) for f in fields(value)})
                return value

            result = function(*map(move, args), **{key: move(value) for key, value in options.items()})
            for host, there in moved:
                host.copy_(there)
            for host, there in moved:
                if result is there:
                    return host
            if isinstance(result, tuple):
                return tuple(one.cpu() for one in result)
            return result.cpu() if isinstance(result, torch.Tensor) else result

        found = call if callable(function) else function
        setattr(self, name, found)  # the same object at each access, as in a module
        return found


OF_HOST = DEVICE in (None, "ptx")  # whether kernels take tensors of the CPU
kernels: Any = triton_kernels if OF_HOST else OnDevice(triton_kernels, DEVICE)
experts_on_device: Any = experts_kernel if OF_HOST else OnDevice(experts_kernel, DEVICE)
spin_on_device: Any = spin_kernel if OF_HOST else OnDevice(spin_kernel, DEVICE)
t = torch.from_numpy
Q4_0, Q8_0 = GGMLType.Q4_0, GGMLType.Q8_0
SOME = [0, 31, 95, 33, 64]  # rows of planes


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the tiles, so that small matrices need several, with loops, splits and ranges."""
    monkeypatch.setattr(triton_kernels, "MATVEC_WORDS", 16)
    monkeypatch.setattr(triton_kernels, "NEURON_WORDS", dict.fromkeys((1, 2, 4, 8), 16))
    monkeypatch.setattr(triton_kernels, "AXPY_RANGE", 8)
    monkeypatch.setattr(triton_kernels, "MAX_RANGES", 3)
    monkeypatch.setattr(triton_kernels, "n_resident", lambda device: 5)


@pytest.fixture(autouse=True)
def _executed(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "ptx":
        ptx.pretend_a_device(monkeypatch)


def before_nothing(m: DeviceMatrix) -> DeviceMatrix:
    """Return the matrix with each part just before unmapped memory: reading past it ends the process."""
    if DEVICE is not None or os.name != "posix":
        return m
    return replace(
        m,
        **{f.name: _guarded(part) for f in fields(m) if isinstance(part := getattr(m, f.name), torch.Tensor)},
    )


def _guarded(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    room = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(first + room), mmap.PAGESIZE, 0) == 0
    there = np.frombuffer(pages, np.uint8, len(data), room - len(data))
    there[:] = data
    return t(there).view(tensor.dtype).reshape(tensor.shape)


def agree(found: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor | float, n: int) -> None:
    """Compare two float32 sums of n products in any order: each is off by at most n eps times magnitudes."""
    assert found.shape == expected.shape
    assert (found - expected).abs().le(2 * (n + 16) * EPS * magnitude + 1e-30).all(), (
        (found - expected).abs().max()
    )


def as_multiplied(x: torch.Tensor, m: DeviceMatrix) -> tuple[torch.Tensor, DeviceMatrix]:
    """Return inputs and weights of many tokens as tensor cores round them. Only the order of sums remains."""
    if len(x) <= 8 or m.type == GGMLType.F32:
        return x, m
    if m.type == GGMLType.BF16:
        high = brain(x)
        return high + brain(x - high), m
    power = torch.exp2(14 - torch.floor(torch.log2(x.abs().amax(dim=1, keepdim=True).clamp(min=1e-30))))
    weights = m.dequantize().half().float()
    data = weights.numpy().view(np.uint8).reshape(-1)
    rounded = DeviceMatrix.from_bytes(data, GGMLType.F32, m.n_rows, m.n_cols, "cpu")
    return (x * power).half().float() / power, rounded


def brain(x: torch.Tensor) -> torch.Tensor:
    """Return x rounded to bfloat16: devices round to nearest, Triton's interpreter truncates."""
    return x.bfloat16().float() if not INTERPRETED else (x.view(torch.int32) & -65536).view(torch.float32)


def width_of(type_: GGMLType, n_blocks: int) -> int:
    return n_blocks * (256 if type_ in K_TYPES else 32) + (5 if type_ in FLOATS else 0)


# Every type with few tokens and with many; odd shapes with few.
CASES = [(type_, 13, 1 if type_ in K_TYPES else 3, (1, 3, 2)[i % 3]) for i, type_ in enumerate(SUPPORTED)]
CASES += [(type_, 13, 1, 9) for type_ in SUPPORTED]
# Rows of an even number of blocks, with two scales per word, and the tiles of many rows and tokens.
CASES += [(type_, 70, 2, 9) for type_ in SUPPORTED if type_ not in FLOATS]
CASES += [(type_, 130, 2 if type_ in K_TYPES else 5, 300) for type_ in (Q4_0, GGMLType.F16, GGMLType.Q4_K)]
CASES += [(Q4_0, 1, 1, 1), (Q4_0, 66, 1, 17), (Q4_0, 5, 8, 1), (Q4_0, 3, 5, 8), (Q8_0, 4, 1, 5)]
each_case = pytest.mark.parametrize(
    ("type_", "n_rows", "n_blocks", "n_tokens"),
    CASES,
    ids=lambda v: v.name if isinstance(v, GGMLType) else None,
)


@each_case
def test_linear(type_: GGMLType, n_rows: int, n_blocks: int, n_tokens: int) -> None:
    n_cols = width_of(type_, n_blocks)
    m, w = matrix(type_, n_rows, n_cols)
    m = before_nothing(m)
    x, bias, residual = (
        t(randn(n_tokens, n_cols)), t(randn(n_rows, seed=1)), t(randn(n_tokens, n_rows, seed=2)),
    )  # fmt: skip
    magnitude = x.abs() @ t(np.abs(w).T).float() + bias.abs() + residual.abs()
    out = torch.full((n_tokens, n_rows), float("nan"))
    assert kernels.linear(x, m, bias, residual, out) is out
    agree(out, fallback.linear(*as_multiplied(x, m), bias, residual), magnitude, n_cols)


@pytest.mark.parametrize("type_", [Q4_0, GGMLType.F16], ids=lambda type_: type_.name)
def test_linear_by_the_largest_tiles(type_: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the tiles of a Hopper device that has more tiles than multiprocessors."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 1)
    m, x = matrix(type_, 250, 64)[0], t(randn(500, 64))
    tile = kernels.product_tile(kernels.halves(x, m), m, 250)
    assert (tile.rows, tile.tokens) == ((128, 256) if kernels.is_hopper(x) else (64, 128))
    test_linear(type_, 250, 2, 500)


@pytest.fixture
def whole_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products keep their columns whole, as in a large model."""
    monkeypatch.setattr(triton_kernels, "MATVEC_PROGRAMS", 1)


@pytest.mark.usefixtures("whole_columns")
@pytest.mark.parametrize(
    ("type_", "n_rows", "n_tokens", "biased"),
    [
        (Q4_0, 13, 1, True),
        (GGMLType.F16, 70, 2, False),
        (Q8_0, 8, 2, True),
        (Q4_0, 12, 3, False),
        (Q4_0, 70, 9, True),
    ],
    ids=lambda v: v.name if isinstance(v, GGMLType) else None,
)
def test_a_norm_is_applied_to_the_sums(type_: GGMLType, n_rows: int, n_tokens: int, biased: bool) -> None:
    """Check a product that prepares a norm: with few tokens it gives weighted values and their squares."""
    m, w = matrix(type_, n_rows, width_of(type_, 2))
    after, w_after = matrix(Q4_0, 12, 96, seed=1)
    weight = t(randn(n_rows, seed=3))
    bias = t(randn(n_rows, seed=1)) if biased else None
    x, residual = t(randn(n_tokens, m.n_cols)), t(randn(n_tokens, n_rows, seed=2))
    found, entering = kernels.linear_normed(x, m, bias, residual, weight, 1e-3)
    assert isinstance(entering, fallback.Weighed) == (n_tokens <= 2)
    magnitude = x.abs() @ t(np.abs(w).T).float() + residual.abs() + (0.0 if bias is None else bias.abs())
    agree(found, fallback.linear(*as_multiplied(x, m), bias, residual), magnitude, m.n_cols)
    expected = fallback.rms_norm(found, weight, 1e-3)
    if not isinstance(entering, fallback.Weighed):
        agree(entering, expected, expected.abs(), n_rows)
        return
    assert entering.squares.shape == (n_tokens, -(-n_rows // 4))
    agree(entering.normalised(), expected, expected.abs(), n_rows)
    # Use the next layer's wider inputs: zeros change neither its sums nor the sums of squares.
    wide = fallback.Weighed(torch.nn.functional.pad(entering.x, (0, 96 - n_rows)), entering.squares, 1e-3)
    h = wide.normalised()
    for activation in (None, "relu"):
        agree(
            kernels.linear(wide, after, activation=activation),
            fallback.linear(h, after, activation=activation),
            h.abs() @ t(np.abs(w_after).T).float(),
            96 + n_rows,
        )
    size = h.abs() @ t(np.abs(w_after).T).float()
    gate, up = size.split(6, dim=1)
    found, expected = (ops.gated(wide, after, activation="silu") for ops in (kernels, fallback))
    agree(found, expected, (1.1 + gate) * up + gate, 96 + n_rows)


@pytest.mark.usefixtures("whole_columns")
@pytest.mark.parametrize(
    ("type_", "heads", "dims", "kind", "n_tokens", "is_weighed"),
    [
        (Q4_0, (3, 1), (16, 16), "neox", 1, True), (Q8_0, (2, 2), (24, 8), "norm", 3, False),
        (GGMLType.F16, (2, 1), (20, 12), "neox", 2, True),
        (GGMLType.Q4_K, (1, 1), (12, 16), "neox", 8, False),
        (Q4_0, (2, 1), (10, 8), "neox", 1, True), (Q4_0, (2, 1), (16, 16), "norm", 9, False),
    ],
    ids=lambda v: v.name if isinstance(v, GGMLType) else None,
)  # fmt: skip
def test_heads_are_projected_rotated_and_stored(
    type_: GGMLType, heads: tuple[int, int], dims: tuple[int, int], kind: Any, n_tokens: int, is_weighed: bool
) -> None:
    """Check heads that RoPE rotates partly, a token without a KV block, and blocks of f16 and of f32."""
    (n_head, n_head_kv), (dim, dim_v) = heads, dims
    n_cols = width_of(type_, 2)
    m, w = matrix(type_, n_head * dim + n_head_kv * (dim + dim_v), n_cols)
    bias, half = t(randn(m.n_rows, seed=1)), dim // 4
    x = t(randn(n_tokens, n_cols))
    h = fallback.Weighed(x, t(randn(n_tokens, 7) ** 2), 1e-3) if is_weighed else x
    given = h.normalised() if isinstance(h, fallback.Weighed) else h
    cache = Cache([70, 3], n_head_kv, dim, dim_v, torch.float32 if n_tokens == 2 else torch.float16)
    sequences = t(np.arange(n_tokens, dtype=np.int32) % 2)
    positions = t(np.where(np.arange(n_tokens) % 2, 2, 63) + np.arange(n_tokens).astype(np.int32))
    if n_tokens == 3:
        sequences[2], positions[2] = 0, 129  # in a KV block that does not exist
    rope = fallback.RopeTable.build(Rope(kind, 2 * half, tuple(0.5 ** np.arange(half))), 512, "cpu")
    angles = fallback.angles(positions, rope)
    results = []
    for ops, entering, matrix_ in ((kernels, h, m), (fallback, *as_multiplied(given, m))):
        k_blocks, v_blocks = cache.k.clone(), cache.v.clone()
        q = ops.project_heads(
            entering, matrix_, bias, angles, k_blocks, v_blocks, t(cache.tables), sequences, positions,
            n_head=n_head, kind=kind,
        )  # fmt: skip
        results.append((q, k_blocks, v_blocks))
    magnitude = 2 * (given.abs() @ t(np.abs(w).T).float() + bias.abs()).max()
    for found, expected in zip(*results, strict=True):
        unit = 0.0 if found.dtype == torch.float32 else 2.0**-10 / EPS / n_cols
        assert torch.equal(found.isnan(), expected.isnan())
        agree(found.nan_to_num(), expected.nan_to_num(), magnitude * (1 + unit), n_cols)


@pytest.mark.parametrize(
    ("type_", "n_blocks", "n_tokens"),
    [(Q4_0, 3, 1), (Q8_0, 1, 3), (Q4_0, 2, 8), (Q4_0, 1, 9)],
    ids=lambda v: v.name if isinstance(v, GGMLType) else None,
)
@pytest.mark.parametrize(("kind", "up_kind"), [("silu", None), ("relu", "relu")])
def test_gated(
    type_: GGMLType, n_blocks: int, n_tokens: int, kind: Any, up_kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare bits with a product followed by the activation."""
    monkeypatch.setattr(kernels, "MATVEC_PROGRAMS", 1)
    m, _ = matrix(type_, 2 * 13, width_of(type_, n_blocks))
    h, bias = t(randn(n_tokens, m.n_cols)), t(randn(m.n_rows, seed=1))
    given = {"activation": kind, "up_activation": up_kind}
    for added in (None, bias):
        gate, up = kernels.linear(h, m, added).split(13, dim=1)
        assert torch.equal(kernels.gated(h, m, added, **given), kernels.fired(gate, up, **given))


@pytest.mark.parametrize(
    ("type_", "n_rows", "n_blocks", "n_tokens", "kind"),
    [
        (Q4_0, 13, 3, 1, "relu"),
        (Q8_0, 5, 40, 3, "fatrelu"),
        (Q4_0, 9, 3, 9, "relu2"),
        (Q4_0, 9, 1, 2, "sigmoid"),
    ],
)
def test_linear_with_an_activation(
    type_: GGMLType, n_rows: int, n_blocks: int, n_tokens: int, kind: Any
) -> None:
    """Check products with an activation, one with split columns, whose sums are added before it."""
    n_cols = width_of(type_, n_blocks)
    m, w = matrix(type_, n_rows, n_cols)
    x, bias = t(randn(n_tokens, n_cols)), t(randn(n_rows, seed=1))
    found = kernels.linear(x, m, bias, activation=kind, threshold=-50.0)
    plain = fallback.linear(*as_multiplied(x, m), bias)
    magnitude = x.abs() @ t(np.abs(w).T).float() + bias.abs()
    steep = 1 + (2 * plain.abs() if kind == "relu2" else 0)  # the slope of the activation
    agree(found, functions.activate(plain, kind, -50.0), magnitude * steep, n_cols)
    alone = functions.activate(fallback.linear(x, m, bias), kind, -50.0)
    assert torch.equal(fallback.linear(x, m, bias, activation=kind, threshold=-50.0), alone)


@pytest.mark.parametrize(
    ("type_", "n_rows", "n_blocks", "n_tokens", "first"),
    [
        (Q4_0, 40, 3, 1, 0),
        (Q8_0, 43, 5, 3, 0),
        (GGMLType.F16, 19, 2, 8, 0),
        (Q4_0, 21, 1, 9, 0),
        (Q8_0, 12, 1, 2, 3),
    ],
)
def test_linear_bits(type_: GGMLType, n_rows: int, n_blocks: int, n_tokens: int, first: int) -> None:
    n_cols = width_of(type_, n_blocks)
    m, w = matrix(type_, n_rows, n_cols)
    x, bias = t(randn(n_tokens, n_cols)), t(randn(n_rows, seed=1))
    bias[1] = float("nan")
    m = before_nothing(m)
    given = as_multiplied(x, m)
    scores = fallback.linear(*given, bias)
    threshold = float(scores.nan_to_num().median())
    found = kernels.linear_bits(x, m, bias, threshold, first)
    expected = fallback.linear_bits(*given, bias, threshold, first)
    assert found.shape == expected.shape
    # A score at the threshold may fall on either side of it, so its bit is not compared.
    magnitude = x.abs() @ t(np.abs(w).T).float() + bias.abs()
    close = (scores - threshold).abs() <= 2 * (n_cols + 16) * EPS * magnitude
    ours, theirs = (fallback.unpack_bits(bits, first + n_rows)[:, first:] for bits in (found, expected))
    assert (close | (ours == theirs)).all()
    assert close.sum() <= 1
    assert fallback.unpack_bits(found, first + n_rows)[:, :first].all()
    assert torch.equal(
        found[:, -1] >> ((first + n_rows - 1) % 8 + 1), torch.zeros(n_tokens, dtype=torch.uint8)
    )


@each_case
def test_linear_t(type_: GGMLType, n_rows: int, n_blocks: int, n_tokens: int) -> None:
    check_linear_t(*matrix(type_, n_rows, width_of(type_, min(n_blocks, 2))), n_tokens, 0.3)


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_linear_t_of_several_ranges(share: float) -> None:
    check_linear_t(*matrix(Q4_0, 150, 288), 1, share)  # more words, too, than a program has


@pytest.mark.parametrize("n_tokens", [1, 9])
def test_neither_bias_nor_residual(n_tokens: int) -> None:
    m, w = matrix(Q8_0, 7, 64)
    x, v = t(randn(n_tokens, 64)), t(randn(n_tokens, 7))
    agree(kernels.linear(x, m), fallback.linear(*as_multiplied(x, m)), x.abs() @ t(np.abs(w).T).float(), 64)
    agree(kernels.linear_t(v, m), fallback.linear_t(*as_multiplied(v, m)), v.abs() @ t(np.abs(w)).float(), 7)


@pytest.mark.parametrize("type_", [Q4_0, GGMLType.F16, GGMLType.BF16, GGMLType.F32], ids=lambda v: v.name)
def test_products_of_many_tokens_know_no_neighbours(type_: GGMLType) -> None:
    """Check that a large, small or NaN token changes no bit of other tokens, at any place."""
    n_cols = width_of(type_, 3)
    m, _ = matrix(type_, 13, n_cols)
    x = randn(11, n_cols)
    x[2, 5] *= 3e4  # an outlier, as models have them
    x[3] *= 1e30
    x[4] *= 1e-30
    x[5] = 0
    x[6, 1], x[7, 2] = np.nan, np.inf
    order = rng_of(1).permutation(11)
    neuron_major = randn(11, 13) * x[:, :13]
    for name, given in (("linear", x), ("linear_t", neuron_major)):
        product = getattr(kernels, name)
        found = product(t(given.astype(np.float32)), m)
        moved = product(t(given[order].astype(np.float32)), m)
        assert np.array_equal(moved.numpy(), found.numpy()[order], equal_nan=True)
        alone = product(t(np.repeat(given[[2]], 11, axis=0).astype(np.float32)), m)
        assert torch.equal(alone[7], found[2])
        expected = getattr(fallback, name)(t(given.astype(np.float32)), m)
        for row in (2, 3, 4, 5):
            assert (found[row] - expected[row]).norm() <= 2e-3 * expected[row].norm()
        assert not found[6].isfinite().any()
        assert not found[7].isfinite().all()


def check_linear_t(m: DeviceMatrix, w: np.ndarray, n_tokens: int, share: float) -> None:
    v = randn(n_tokens, m.n_rows) * (rng_of(m.n_rows, n_tokens).random((n_tokens, m.n_rows)) < share)
    v, bias = t(v.astype(np.float32)), t(randn(m.n_cols, seed=1))
    residual = t(randn(n_tokens, m.n_cols, seed=2))
    magnitude = v.abs() @ t(np.abs(w)).float() + bias.abs() + residual.abs()
    found = kernels.linear_t(v, before_nothing(m), bias, residual)
    agree(found, fallback.linear_t(*as_multiplied(v, m), bias, residual), magnitude, m.n_rows)


@pytest.mark.parametrize(
    ("type_", "rows", "n_tokens"),
    [(Q4_0, None, 1), (Q4_0, SOME, 3), (Q4_0, None, 9), (Q8_0, SOME, 1), (Q8_0, None, 9)],
)
def test_linear_t_of_planes(type_: GGMLType, rows: list[int] | None, n_tokens: int) -> None:
    n_ff, n_embd = 128, 96
    data = random_blocks(type_, n_embd, n_ff, rng_of(2)).reshape(-1).view(np.uint8)
    codes = planes.codes_of(data, type_, (n_ff, n_embd))
    scales = planes.scales_of(data, type_, (n_ff, n_embd))
    kept = None if rows is None else np.array(rows, np.int64)
    m = DeviceMatrix.from_planes(codes, scales, "cpu", kept)
    check_linear_t(m, m.dequantize().double().numpy(), n_tokens, 0.3)


@pytest.mark.parametrize(
    ("type_", "n_tokens"),
    [(GGMLType.Q4_K, 1), (GGMLType.Q4_1, 3), (Q4_0, 2), (Q8_0, 1), (GGMLType.F16, 1), (GGMLType.Q4_K, 9),
     (GGMLType.Q4_1, 9), (Q4_0, 9)],
)  # fmt: skip
def test_linear_t_by_channel(type_: GGMLType, n_tokens: int) -> None:
    m, w = input_major(type_, (64, 128), 256 if type_ in K_TYPES else 96)
    check_linear_t(m, w, n_tokens, 0.3)
    v = t((randn(n_tokens, m.n_rows) * (rng_of(1).random((n_tokens, m.n_rows)) < 0.3)).astype(np.float32))
    if n_tokens <= 8:
        left_out = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        for ops, n_bytes in zip((kernels, fallback), left_out, strict=True):
            ops.linear_t(v, m, left_out=n_bytes)
        assert left_out[0].item() == left_out[1].item() > 0


@pytest.mark.parametrize(
    ("type_", "n_tokens", "n_rows", "n_cols"),
    [
        (Q4_0, 1, 64, 64),
        (GGMLType.F16, 4, 1, 69),
        (Q8_0, 8, 3, 32),
        (GGMLType.F32, 2, 64, 1),
        (Q4_0, 1, 2, 32),
    ],
)
def test_fewer_numbers_than_threads(type_: GGMLType, n_tokens: int, n_rows: int, n_cols: int) -> None:
    """Check tiles whose threads share rows and must get equal sums, and inputs that are not aligned."""
    m, w = matrix(type_, n_rows, n_cols)
    aligned = t(randn(n_tokens, n_cols))
    for x in (
        aligned,
        t(np.concatenate([[0], randn(n_tokens * n_cols)]).astype(np.float32))[1:].view(n_tokens, -1),
    ):
        magnitude = x.abs() @ t(np.abs(w).T).float()
        agree(kernels.linear(x, m), fallback.linear(x, m), magnitude, n_cols)
        threshold = float(magnitude.max()) + 1
        assert not kernels.linear_bits(x, m, None, threshold).any()
        every = t(np.packbits(np.ones((n_tokens, n_rows), bool), axis=1, bitorder="little"))
        for selected in (None, every):
            given = {"activation": "relu", "selected": selected}
            found, expected = (ops.neurons(x, m, m, **given) for ops in (kernels, fallback))
            agree(found, expected, magnitude**2, n_cols)
    v = t(randn(n_tokens, n_rows))
    agree(kernels.linear_t(v, m), fallback.linear_t(v, m), v.abs() @ t(np.abs(w)).float(), n_rows)


@pytest.mark.parametrize("width", [1, 2, 8, 33])
def test_rows_of_fewer_numbers_than_threads(width: int) -> None:
    x, weight = t(randn(3, width)), t(randn(width, seed=1))
    magnitude = weight.abs() * width**0.5
    for found, expected in (
        [ops.rms_norm(x, weight, 1e-5) for ops in (kernels, fallback)],
        [ops.layer_norm(x, weight, None, 1e-5) for ops in (kernels, fallback)],
    ):
        # The divisor is at least the root of 1e-5.
        agree(found, expected, magnitude + weight.abs() * x.abs().max() * 1e-5**-0.5 * (width < 3), width)
    table = fallback.RopeTable.build(Rope("neox", 2, (1.0,), 1.1), 256, "cpu")
    cos_sin = fallback.angles(torch.tensor([0, 3, 255], dtype=torch.int32), table)
    if width % 2 == 0:
        found, expected = (
            ops.rotate(x, cos_sin, n_head=1, kind="neox", norm_weight=weight, eps=1e-5)
            for ops in (kernels, fallback)
        )
        agree(found, expected, 2.2 * width**0.5 * weight.abs().max(), width)


def test_an_empty_matrix_and_no_tokens() -> None:
    data = np.zeros(0, np.uint8)
    m = DeviceMatrix.from_bytes(data, Q4_0, 0, 32, "cpu")
    bias = t(randn(32))
    assert kernels.linear(t(randn(2, 32)), m).shape == (2, 0)
    assert torch.equal(kernels.linear_t(torch.empty(2, 0), m, bias), bias.expand(2, 32))
    assert kernels.sparse_ffn(t(randn(0, 32)), m, m, m, activation="relu").shape == (0, 32)
    assert not kernels.sparse_ffn(t(randn(1, 32)), m, m, m, activation="relu").any()


@pytest.mark.parametrize(
    ("n_tokens", "share", "gated", "kind", "up_kind", "types"),
    [
        (1, None, True, "relu", None, (Q4_0, Q4_0)),
        (1, 0.0, True, "relu", "relu", (Q4_0, Q4_0)),
        (1, 0.3, True, "fatrelu", None, (Q8_0, GGMLType.F16)),
        (1, 1.0, False, "relu2", None, (None, GGMLType.Q4_K)),
        (3, 0.3, True, "relu", "relu", (GGMLType.Q4_1, GGMLType.Q5_0)),
        (2, 0.3, False, "relu", None, (None, GGMLType.F32)),
        (3, None, True, "silu", None, (GGMLType.BF16, Q8_0)),
        (2, None, True, "gelu", None, (GGMLType.Q6_K, Q4_0)),
        (1, None, False, "gelu_tanh", None, (None, Q8_0)),
        (9, 0.3, True, "relu", "relu", (Q4_0, Q8_0)),
        (9, None, False, "relu2", None, (None, Q4_0)),
    ],
)
def test_sparse_ffn(
    n_tokens: int, share: float | None, gated: bool, kind: str, up_kind: str | None, types: tuple
) -> None:
    n, d = 27, 256 if set(types) & set(K_TYPES) else 64
    gate = matrix(types[0], n, d, 2)[0] if gated else None
    up, down = matrix(types[1], n, d, 1)[0], matrix(Q4_0, n, d, 3)[0]
    h, biases, residual = t(randn(n_tokens, d)), t(randn(2, n, seed=1) * 0.1), t(randn(n_tokens, d, seed=4))
    selected = held = None
    if share is not None:  # the rows are some of 70 neurons, or all of them
        n_ff = n if n_tokens == 2 else 70
        chosen = rng_of(5, n_tokens).random((n_tokens, n_ff)) < share
        selected = t(np.packbits(chosen, axis=1, bitorder="little"))
        numbers = np.sort(rng_of(6).permutation(n_ff)[:n])
        held = fallback.Held.of(numbers, n_ff, lambda _, values: t(values)) if n_tokens != 2 else None
    results = []
    for ops in (kernels, fallback):
        counts = torch.zeros(fallback.N_COUNTS, dtype=torch.int64)
        y = ops.sparse_ffn(
            h, gate, up, down, activation=kind, threshold=0.1, up_activation=up_kind, selected=selected,
            held=held, gate_bias=biases[0] if gated else None, up_bias=biases[1], down_bias=residual[0],
            residual=residual, counts=counts,
        )  # fmt: skip
        results.append((y, counts))
    values = fallback.neurons(
        h, gate, up, activation=kind, threshold=0.1, up_activation=up_kind, selected=selected, held=held,
        gate_bias=biases[0] if gated else None, up_bias=biases[1],
    )  # fmt: skip
    # A value is a product or square of two sums of d products, each of magnitude |h| |w| + |bias|.
    largest = (
        h.norm(dim=1).max() * max(m.dequantize().norm(dim=1).max() for m in (gate, up) if m is not None) + 1
    )
    magnitude = (2 * largest**2 + values.abs()).sum() / n_tokens * down.dequantize().abs().max() + 1
    agree(results[0][0], results[1][0], magnitude, n + d)
    assert results[0][1].tolist() == results[1][1].tolist()
    alone = torch.zeros(fallback.N_COUNTS, dtype=torch.int64)
    found = kernels.neurons(
        h, gate, up, activation=kind, threshold=0.1, up_activation=up_kind, selected=selected, held=held,
        gate_bias=biases[0] if gated else None, up_bias=biases[1], counts=alone,
    )  # fmt: skip
    assert torch.equal(found != 0, values != 0)
    assert alone.tolist() == results[1][1].tolist()


@pytest.mark.parametrize(
    ("n_tokens", "gated", "kind", "share"),
    [(1, True, "silu", None), (3, True, "gelu_tanh", None), (2, False, "relu", None), (9, True, "silu", None),
     (3, True, "relu", 0.4), (9, False, "gelu", 0.4)],
)  # fmt: skip
def test_neurons_that_are_cut(n_tokens: int, gated: bool, kind: Any, share: float | None) -> None:
    n, d = 27, 64
    gate = matrix(Q4_0, n, d, 2)[0] if gated else None
    up, down = matrix(Q8_0, n, d, 1)[0], matrix(GGMLType.F16, n, d, 3)[0]
    h, selected = t(randn(n_tokens, d) * 0.3), None
    if share is not None:
        selected = t(np.packbits(rng_of(5).random((n_tokens, n)) < share, axis=1, bitorder="little"))
    of_gate = token_threshold(n_tokens + 1, 0.3).of(torch.arange(1, n_tokens + 1))
    given: dict[str, Any] = {
        "activation": kind, "selected": selected, "gate_threshold": of_gate,
        "value_threshold": replace(of_gate, threshold=0.5),
    }  # fmt: skip
    given_many = {"gate": gate, "up": up}
    if n_tokens > 8:
        h, up_rounded = as_multiplied(h, up)
        given_many = {"gate": as_multiplied(h, gate)[1] if gate else None, "up": up_rounded}
    counts = [torch.zeros(fallback.N_COUNTS, dtype=torch.int64) for _ in range(3)]
    found = kernels.neurons(h, gate, up, counts=counts[0], **given)
    expected = fallback.neurons(h, **given_many, counts=counts[1], **given)
    largest = max(m.dequantize().norm(dim=1).max() for m in (gate, up) if m is not None)
    magnitude = (1 + h.norm(dim=1).max() * largest) ** 2
    agree(found, expected, magnitude, d)
    assert torch.equal(found != 0, expected != 0)
    assert counts[0].tolist() == counts[1].tolist()
    assert (found == 0).sum() > (fallback.neurons(h, gate, up, activation=kind, selected=selected) == 0).sum()
    y = kernels.sparse_ffn(h, gate, up, down, counts=counts[2], **given)
    agree(
        y, fallback.linear_t(*as_multiplied(expected, down)), magnitude * down.dequantize().abs().sum(dim=0),
        n + d,
    )  # fmt: skip
    assert counts[2].tolist() == counts[1].tolist()


@pytest.mark.parametrize(
    ("n_tokens", "gated", "kind", "has_thresholds", "dense"),
    [
        (1, True, "silu", True, False),
        (3, True, "gelu", False, False),
        (20, True, "gelu_tanh", True, False),
        (2, False, "silu", True, False),
        (2, True, "relu", False, True),
        (3, False, "relu", False, True),
    ],
)
def test_fired(n_tokens: int, gated: bool, kind: Any, has_thresholds: bool, dense: bool) -> None:
    n = 70
    both = t(randn(n_tokens, 2 * n))
    by = token_threshold(n_tokens + 1, 0.3).of(torch.arange(1, n_tokens + 1)) if has_thresholds else None
    products = both.split(n, dim=1) if gated else [both[:, :n].contiguous()]
    selected = t(rng_of(n).integers(0, 256, (n_tokens, -(-n // 8)), np.uint8)) if n_tokens == 2 else None
    results = []
    for ops in (kernels, fallback):
        counts = torch.zeros(fallback.N_COUNTS, dtype=torch.int64)
        value_threshold = None if by is None else replace(by, threshold=0.1)
        y = ops.fired(
            *products, activation=kind, selected=selected, counts=counts, gate_threshold=by,
            value_threshold=value_threshold, dense=dense,
        )  # fmt: skip
        results.append((y, counts.tolist()))
    agree(results[0][0], results[1][0], 1 + both.abs().max() ** 2, 4)
    assert torch.equal(results[0][0] != 0, results[1][0] != 0)
    assert results[0][1] == results[1][1]
    assert not dense or results[0][1][2:5] == [n * gated, n, n]
    assert (results[0][0] == 0).any() == (has_thresholds or dense)


def test_rows_that_no_token_wants_are_not_read() -> None:
    """Check that unselected rows are not read: they are NaN."""
    n, d = 64, 32
    data = np.full((n, d), np.nan, np.float32)
    data[::4] = randn(n // 4, d)
    m = DeviceMatrix.from_bytes(data.view(np.uint8).reshape(-1), GGMLType.F32, n, d, "cpu")
    bits = t(np.packbits(np.arange(n) % 4 == 0, bitorder="little")[None])
    y = kernels.sparse_ffn(t(randn(1, d)), m, m, m, activation="relu", selected=bits)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize(("n_scored", "first"), [(1, 0), (29, 3), (530, 16)])
def test_pack_bits(n_scored: int, first: int) -> None:
    scores = randn(3, n_scored)
    scores[0, 0] = np.nan
    found = kernels.pack_bits(t(scores), 0.25, first)
    assert torch.equal(found, fallback.pack_bits(t(scores), 0.25, first))


@pytest.mark.parametrize("n_groups", [1, 37])
def test_largest(n_groups: int) -> None:
    logits = randn(3, n_groups * LOGIT_GROUP)
    logits[0, 5], logits[1, -1], logits[2, 63] = np.nan, np.inf, -np.inf
    found, expected = (ops.largest(t(logits)) for ops in (kernels, fallback))
    assert found.isnan().sum() == 3
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("width", [32, 100])
def test_norms(width: int) -> None:
    x, weight, bias = t(randn(3, width)), t(randn(width, seed=1)), t(randn(width, seed=2))
    # A norm is at most sqrt(width); its divisor is a sum of `width` squares.
    magnitude = weight.abs() * width**0.5 + bias.abs()
    agree(kernels.rms_norm(x, weight, 1e-5), fallback.rms_norm(x, weight, 1e-5), magnitude, width)
    agree(
        kernels.layer_norm(x, weight, bias, 1e-5),
        fallback.layer_norm(x, weight, bias, 1e-5),
        magnitude,
        width,
    )
    agree(
        kernels.layer_norm(x, weight, None, 1e-5),
        fallback.layer_norm(x, weight, None, 1e-5),
        magnitude,
        width,
    )
    by = token_threshold(3, 0.4)
    for norm, own in (("rms_norm", ()), ("layer_norm", (bias,))):
        found, expected = (getattr(ops, norm)(x, weight, *own, 1e-5, by=by) for ops in (kernels, fallback))
        agree(found, expected, magnitude, width)
        assert torch.equal(found == 0, expected == 0)
        assert (found == 0).any()
    part = weight[: width // 4].contiguous()
    agree(kernels.rms_norm(x, part, 1e-5, 4), fallback.rms_norm(x, part, 1e-5, 4), magnitude.max(), width)


@pytest.mark.parametrize("width", [1, 100, 1500])
def test_gaussian_top_k(width: int) -> None:
    x = t(randn(4, width))
    x[3, 0] = float("nan")
    found, expected = (ops.gaussian_top_k(x, 1.3) for ops in (kernels, fallback))
    # A value of the row counts in the mean, and in the deviation by its square.
    agree(found[:3], expected[:3], x[:3].abs().max() * 3, width)
    assert torch.isnan(found[3]).all()
    assert (found[:3] == 0).float().mean() > 0.8 or width == 1


@pytest.mark.parametrize("n", [5, 1500])
def test_cut(n: int) -> None:
    x, by = t(randn(4, n)), token_threshold(4, 0.5)
    x[1, 0] = float("nan")
    assert torch.equal(kernels.zero_small(x, by).nan_to_num(7), fallback.zero_small(x, by).nan_to_num(7))
    assert kernels.zero_small(x, None) is x


def test_angles() -> None:
    table = fallback.RopeTable.build(Rope("norm", 10, tuple(0.5 ** np.arange(5)), 1.1), 1000, "cpu")
    positions = torch.tensor([0, 255, 256, 999, 5000], dtype=torch.int32)  # the last is past the table
    agree(kernels.angles(positions, table), fallback.angles(positions, table), 2.2, 4)


@pytest.mark.parametrize("kind", ["norm", "neox"])
@pytest.mark.parametrize(
    ("dim", "n_rot", "normed"), [(16, 16, True), (24, 10, False), (24, 10, True), (8, 2, False)]
)
def test_rotate(kind: str, dim: int, n_rot: int, normed: bool) -> None:
    table = fallback.RopeTable.build(Rope(kind, n_rot, tuple(0.5 ** np.arange(n_rot // 2)), 1.1), 4096, "cpu")
    cos_sin = fallback.angles(torch.tensor([0, 300, 4095], dtype=torch.int32), table)
    x, weight = t(randn(3, 3 * dim)), t(randn(dim, seed=1)) if normed else None
    found, expected = (
        ops.rotate(x, cos_sin, n_head=3, kind=kind, norm_weight=weight, eps=1e-5)
        for ops in (kernels, fallback)
    )
    largest = 1.1 * x.abs().max() if weight is None else 1.1 * dim**0.5 * weight.abs().max()
    agree(found, expected, 2 * largest, dim)


@pytest.mark.parametrize(
    ("lengths", "last", "window", "heads", "dims", "rope", "dtype"),
    [
        ([1, 64, 150, 65], 1, 0, (2, 2), (16, 16), "norm", torch.float16),
        ([200, 70], 2, 70, (6, 2), (24, 8), "neox", torch.float32),
        ([40], 40, 20, (2, 1), (16, 16), None, torch.float16),
        ([130], 1, 1, (3, 3), (10, 12), "norm", torch.float32),
        ([33], 1, 0, (1, 1), (16, 16), "neox", torch.float16),
        # More heads per KV head than a tile has queries; heads too large for any prompt tile.
        ([66], 1, 0, (35, 1), (16, 16), None, torch.float16),
        ([40], 40, 0, (70, 2), (16, 16), None, torch.float16),
        ([40], 33, 9, (2, 1), (264, 8), None, torch.float32),
    ],
)
def test_attention(
    lengths: list[int],
    last: int,
    window: int,
    heads: tuple,
    dims: tuple,
    rope: str | None,
    dtype: torch.dtype,
) -> None:
    """Check several sequences in unordered KV blocks; unused positions are NaN."""
    n_head, n_head_kv = heads
    cache = Cache(lengths, n_head_kv, *dims, dtype)
    tables = t(cache.tables)
    sequences, positions = cache.tokens(1000)
    k, v = (t(randn(len(sequences), n_head_kv * dim)) for dim in dims)
    fallback.store_kv(k, v, cache.k, cache.v, tables, sequences, positions)

    sequences, positions = cache.tokens(last)
    n = len(sequences)
    q, k, v = (
        t(randn(n, width, seed=7)) for width in (n_head * dims[0], n_head_kv * dims[0], n_head_kv * dims[1])
    )
    cos_sin = norm = None
    if rope is not None:
        table = fallback.RopeTable.build(
            Rope(rope, dims[0] // 4 * 2, tuple(0.5 ** np.arange(dims[0] // 4))), 512, "cpu"
        )
        cos_sin, norm = (
            fallback.angles(positions, table),
            t(randn(dims[0], seed=3)) if rope == "neox" else None,
        )
    stored = []
    for ops in (kernels, fallback):
        k_blocks, v_blocks = cache.k.clone(), cache.v.clone()
        turned = ops.rotate_store(
            q, k, v, cos_sin, k_blocks, v_blocks, tables, sequences, positions,
            n_head=n_head, kind=rope or "norm", q_norm=norm, k_norm=norm, eps=1e-5,
        )  # fmt: skip
        stored.append((turned, k_blocks, v_blocks))
    for found, expected in zip(*stored, strict=True):
        unit = EPS if found.dtype == torch.float32 else 2.0**-10  # a rounding to f16 may fall either way
        assert torch.equal(found.isnan(), expected.isnan())
        assert (found - expected).abs().nan_to_num().max() <= 64 * unit * expected.nan_to_num().abs().max()

    turned, k_blocks, v_blocks = stored[1]
    if last == 1:  # also pass a token of padding
        sequences, positions = torch.cat([sequences, sequences[:1]]), torch.cat([positions, positions[:1]])
        tables = torch.cat([tables, torch.full_like(tables[:1], -1)])
        sequences[-1] = len(lengths)
        turned = torch.cat([turned, turned[:1]])
    found, expected = (
        ops.attention(
            turned, k_blocks, v_blocks, tables, sequences, positions, n_head=n_head, scale=0.3, window=window,
            softcap=0.5 if rope == "norm" else 0.0,
        )
        for ops in (kernels, fallback)
    )  # fmt: skip
    if last == 1:
        assert not found[-1].any()
    # Scores are sums of dim products, and their errors go through exp into the weights of the values.
    reach = 0.3 * turned.norm(dim=1).max() * k_blocks.float().nan_to_num().abs().max() * dims[0] ** 0.5
    agree(found, expected, (1 + reach) * v_blocks.float().nan_to_num().abs().max(), dims[0] + max(lengths))


@pytest.mark.parametrize(
    ("dtype", "heads", "window"),
    [(torch.float16, (3, 1), 20), (torch.float32, (1, 1), 0)],
    ids=["f16", "f32"],
)
def test_attention_of_a_prompt_knows_no_neighbours(
    dtype: torch.dtype, heads: tuple, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check two sequences in one tile: neighbours, even a later NaN, change no bit of a token."""

    def product(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        return (a.astype(dtype)[:, :, None] * b.astype(dtype)[None]).sum(axis=1)

    # Tensor cores add up each row in the same order; the BLAS of the interpreter does not.
    monkeypatch.setattr(np, "matmul", product)
    dim, (n_head, n_head_kv) = 16, heads
    cache = Cache([45, 30], n_head_kv, dim, dim, dtype)
    tables, (sequences, positions) = t(cache.tables), cache.tokens(1000)
    n = len(sequences)
    k, v = (t(randn(n, n_head_kv * dim, seed=i)) for i in (1, 2))
    q = t(randn(n, n_head * dim, seed=3)) * 9

    def attend(rows: slice) -> torch.Tensor:
        return kernels.attention(
            q[rows], cache.k, cache.v, tables, sequences[rows], positions[rows], n_head=n_head, scale=0.3,
            window=window, sinks=t(randn(n_head)),
        )  # fmt: skip

    fallback.store_kv(k, v, cache.k, cache.v, tables, sequences, positions)
    whole = attend(slice(None))
    expected = fallback.attention(
        q, cache.k, cache.v, tables, sequences, positions, n_head=n_head, scale=0.3, window=window,
        sinks=t(randn(n_head)),
    )  # fmt: skip
    reach = 0.3 * q.norm(dim=1).max() * k.abs().max() * dim**0.5
    agree(whole, expected, (1 + reach) * v.abs().max(), dim + 45)
    for first, last in ((0, 33), (29, 75)):
        assert torch.equal(attend(slice(first, last)), whole[first:last])
    v[30] = float("nan")
    fallback.store_kv(k, v, cache.k, cache.v, tables, sequences, positions)
    found = attend(slice(None))
    assert found[30:45].isnan().all()
    assert torch.equal(found[:30], whole[:30])
    assert torch.equal(found[45:], whole[45:])


@pytest.mark.parametrize("type_", EXPERT_TYPES, ids=lambda t: GGMLType(t).name)
def test_expert_rows_are_exact(type_: GGMLType) -> None:
    """Compare bits, unlike for other kernels: experts on the CPU and on a device must be equal."""
    n_rows, k = 11, 768
    m = DeviceMatrix.empty(type_, 2 * n_rows, k, "cpu")
    m.put(0, random_blocks(type_, 2 * n_rows, k, rng_of(5)))
    x = torch.from_numpy(randn(2, k))
    x[1, 40:70], x[0, 64:96] = 1e-42, 0
    slots = torch.tensor([1, -1, 0, 1], dtype=torch.int32)
    given = experts_on_device.quantized(x)
    bias = torch.from_numpy(randn(2, n_rows, seed=3))
    found = experts_on_device.expert_rows(x, given, slots, before_nothing(m), bias, n_rows, 2)
    for pair, slot in enumerate(slots.tolist()):
        y = torch.zeros(n_rows)
        if slot >= 0:
            y = exact.linear(x[pair // 2, None], m, slot * n_rows, n_rows)[0] + bias[slot]
        assert torch.equal(found[pair], y)
    x[0, 3], x[1, 700] = torch.inf, torch.nan
    q, scales, sums = experts_on_device.quantized(x)
    expected = exact.quantize(x)
    assert torch.equal(q.view(expected.q.shape).double(), expected.q)
    for one, other in ((scales, expected.scale), (sums, expected.sum)):
        assert torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))


@pytest.mark.parametrize(
    ("kind", "n_tokens"), [*((kind, 2) for kind in expert_cache.ACTIVATIONS), ("silu", 9), ("relu2", 9)]
)
def test_experts_are_exact(kind: Any, n_tokens: int) -> None:
    n_embd, n_neurons = 64, 32
    gate, up = (matrix(GGMLType.Q8_0, 3 * n_neurons, n_embd, seed)[0] for seed in (1, 2))
    down = matrix(GGMLType.Q8_0, 3 * n_embd, n_neurons, 3)[0]
    value = Value(0, 1, "x")
    clamped = Activate(value, value, "clamped_plus_one", 0.5) if kind == "clamped_silu" else None
    is_ungated = kind == "relu2"
    options: dict[str, Any] = {
        "n_neurons": n_neurons, "activation": Activate(value, value, kind, 0.3), "up_activation": clamped,
        "neuron_major": False, "sparse": kind in ("relu", "fatrelu"),
        "down_bias": torch.from_numpy(randn(3, n_embd)),
    }  # fmt: skip
    h = torch.from_numpy(randn(n_tokens, n_embd)) * 9
    slots = torch.tensor([[2, -1], [0, 2]] + [[2, 1]] * (n_tokens - 2), dtype=torch.int32)
    counts = [torch.zeros(fallback.N_COUNTS, dtype=torch.int64) for _ in range(2)]
    gate = None if is_ungated else gate
    expected = fallback.experts(h, slots, gate, up, down, counts=counts[0], **options)
    found = experts_on_device.experts(h, slots, gate, up, down, counts=counts[1], **options)
    assert torch.equal(found, expected)
    assert torch.equal(counts[0][:2], counts[1][:2])


@pytest.mark.parametrize("type_", EXPERT_TYPES, ids=lambda t: GGMLType(t).name)
def test_expert_rows_of_several_pairs_are_exact(type_: GGMLType) -> None:
    """Check experts with more pairs than a tile, with one and with none, and a pair without a slot."""
    n_rows, n_slots, k = 3, 3, 768 if type_ in K_TYPES else 77 if type_ in FLOATS else 544
    m = DeviceMatrix.empty(type_, n_slots * n_rows, k, "cpu")
    m.put(0, random_blocks(type_, n_slots * n_rows, k, rng_of(5)))
    x, bias = t(randn(10, k)), t(randn(n_slots, n_rows, seed=3))
    slots = torch.tensor([2] * 5 + [0, -1] + [2] * 13, dtype=torch.int32)
    given = (x, x, x) if m.is_float else experts_on_device.quantized(x)
    tiles = experts_on_device.expert_tiles(slots, n_slots, 16)
    assert sorted(tiles.slots.tolist()) == [-1, 0, 2, 2]
    found = experts_on_device.expert_rows(x, given, slots, before_nothing(m), bias, n_rows, 2, tiles)
    for pair, slot in enumerate(slots.tolist()):
        y = torch.zeros(n_rows)
        if slot >= 0:
            y = exact.linear(x[pair // 2, None], m, slot * n_rows, n_rows)[0] + bias[slot]
        assert torch.equal(found[pair], y)


@pytest.fixture
def mapped() -> Iterator[Callable[[list[np.ndarray]], tuple[list[np.ndarray], torch.Tensor]]]:
    """Yield a function that places arrays of one size in memory that the device reads, with addresses."""
    driver = CudaDriver(torch.device(DEVICE)) if DEVICE not in (None, "cpu", "ptx") else None
    held: list[np.ndarray] = []

    def place(arrays: list[np.ndarray]) -> tuple[list[np.ndarray], torch.Tensor]:
        size = sum(own.nbytes for own in arrays)
        memory = np.frombuffer(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)
        first = memory.ctypes.data if driver is None else driver.register(memory)
        held.append(memory)
        ptx.HOST_MEMORY.append(memory)
        rows = list(memory[:size].reshape(len(arrays), *arrays[0].shape))
        for to, own in zip(rows, arrays, strict=True):
            to[:] = own
        return rows, torch.tensor([first + i * rows[0].nbytes for i in range(len(rows))])

    yield place
    ptx.HOST_MEMORY.clear()
    for memory in held:
        if driver is not None:
            driver.unregister(memory)


@pytest.mark.parametrize("type_", EXPERT_TYPES, ids=lambda t: GGMLType(t).name)
def test_experts_are_fetched_as_they_lie(type_: GGMLType, mapped: Any) -> None:
    n_rows, k, n_spare = 5, 768, 3
    part = HostRows(
        type_, *mapped([random_blocks(type_, n_rows, k, rng_of(seed)).view(np.uint8) for seed in range(4)])
    )
    ids = torch.tensor([2, -1, 0], dtype=torch.int32)
    found, expected = (DeviceMatrix.empty(type_, (2 + n_spare) * n_rows, k, "cpu") for _ in range(2))
    experts_on_device.fetch_experts(part, ids, found, 2)
    fallback.fetch_experts(part, ids, expected, 2)
    for field in fields(found):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), field.name
    assert not torch.equal(found.codes[2 * n_rows :], torch.zeros_like(found.codes[2 * n_rows :]))


def test_biases_of_experts_are_fetched(mapped: Any) -> None:
    part = HostRows(GGMLType.F32, *mapped([randn(1, 70, seed=seed).view(np.uint8) for seed in range(3)]))
    found = torch.zeros((4, 70))
    experts_on_device.fetch_experts(part, torch.tensor([-1, 2], dtype=torch.int32), found, 2)
    assert torch.equal(found[3], t(part.rows[2].view(np.float32)[0]))
    assert not found[:3].any()


@pytest.mark.parametrize("n_bits", [0, 5])
def test_the_cpu_and_a_device_pass_vectors(n_bits: int) -> None:
    """Pass more numbers than a block has threads: all must have arrived when the flag is set."""
    n = 1500
    h, bits = t(randn(1, n)), t(np.arange(n_bits, dtype=np.uint8)) if n_bits else None
    host_h, host_bits, flag = torch.zeros(1, n), torch.zeros(8, dtype=torch.uint8), torch.zeros(1).int()
    spin_on_device.submit(h, bits, host_h, host_bits, flag)
    assert flag.item() == 1
    assert torch.equal(host_h, h)
    assert host_bits.tolist() == [*range(n_bits), *[0] * (8 - n_bits)]
    out = torch.zeros(1, n)
    spin_on_device.collect(flag, host_h * 2, out)
    assert flag.item() == 0
    assert torch.equal(out, h * 2)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_chosen"])
@pytest.mark.parametrize(("n_expert", "n_used", "is_biased"), [(5, 2, False), (64, 8, True), (40, 1, False)])
def test_experts_are_routed(scoring: Any, n_expert: int, n_used: int, is_biased: bool) -> None:
    """Check ties, where the lower id comes first, and NaN, which comes last and spoils its token."""
    x = rng_of(n_expert, n_used).permuted(np.tile(np.arange(n_expert) // 2, (4, 1)), axis=1) / 8
    x[1, 3], x[2, 0], x[3, 1] = np.nan, np.inf, -np.inf
    value = Value(0, n_expert, "")
    op = Route(
        value, value, n_used, scoring, normalised=scoring == "sigmoid", scale=1.5 if is_biased else 1.0
    )
    bias = t(rng_of(1).permutation(n_expert).astype(np.float32)) if is_biased else None
    scales = t(randn(n_expert)) if is_biased else None
    ids, weights = experts_on_device.route(t(x.astype(np.float32)), op, bias, scales)
    expected_ids, expected = fallback.route(t(x.astype(np.float32)), op, bias, scales)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    assert weights[1].isnan().all()
    assert torch.equal(weights.isnan(), expected.isnan())
    magnitude = 1 + expected.nan_to_num().abs()
    agree(weights.nan_to_num(), expected.nan_to_num(), magnitude, n_expert)


@pytest.mark.parametrize(("n_tokens", "n_used", "has_own"), [(1, 3, True), (3, 2, False), (2, 1, True)])
def test_experts_are_summed_in_order(n_tokens: int, n_used: int, has_own: bool) -> None:
    """Compare bits of the sums; parts that another processor computes must not be read."""
    n = 530
    parts, own = (t(randn(n_tokens, n_used, n, seed=seed)) for seed in (1, 2))
    weights, residual = t(randn(n_tokens, n_used, seed=3)), t(randn(n_tokens, n, seed=4)) if has_own else None
    asked = t(np.where(rng_of(5).random((n_tokens, n_used)) < 0.5, 7, -8).astype(np.int32))
    parts[asked < 0], own[asked >= 0] = float("nan"), float("nan")
    given = (own, asked) if has_own else ()
    if not has_own:
        parts = parts.nan_to_num()
    found = experts_on_device.sum_experts(parts, weights, residual, *given)
    assert torch.equal(found, fallback.sum_experts(parts, weights, residual, *given))
    assert found.isfinite().all()


@pytest.mark.parametrize("n_tokens", [1, 2, 8])
def test_who_computes_experts_is_chosen(n_tokens: int) -> None:
    """Compare the kernel's choice with its fallback's, for any cache and any number of fetches."""
    rng = rng_of(n_tokens)
    for n_spare in (1, 3, 8):
        ids = np.stack([rng.permutation(11)[:3] for _ in range(n_tokens)]).astype(np.int32)
        table = np.where(rng.random(11) < 0.4, rng.integers(0, 5, 11), -1).astype(np.int32)
        most = np.minimum(np.arange(3 * n_tokens + 1) * 2 // 3, n_spare).astype(np.int32)
        given = t(ids), t(table), t(most)
        found = experts_on_device.choose_experts(*given, n_spare, 5)
        for one, other in zip(found, fallback.choose_experts(*given, n_spare, 5), strict=True):
            assert torch.equal(one, other)


def test_triton_computes_on_a_device_or_in_the_interpreter() -> None:
    ops = Kernels("cpu" if DEVICE is None else "cuda")
    assert ops.name == "triton"
    assert ops.capturable == (DEVICE is not None)
    assert ops.linear is triton_kernels.linear
    assert kernels.linear is kernels.linear
