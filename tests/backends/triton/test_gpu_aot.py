"""Every Triton kernel that a step of a 7B model launches, compiled for GPUs that are not here.

tests/support/compiled_kernels.py records and compiles them. Run as a program, this file prints the registers,
shared memory and spills of each kernel.

The tests compile with the installed Triton. `make test-triton` uses the oldest and the newest version that
pyproject.toml allows, each in its own folder.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import instructions
import numpy as np
import pytest
import torch
import triton
from compiled_kernels import MAX_SHARED, TARGETS, compiled, longest_loop, resources
from gpu_inputs import new, weights
from triton.backends.compiler import GPUTarget

from hotset.backends.base import BLOCK_SIZE
from hotset.backends.triton import experts_kernel, matrix, spin_kernel
from hotset.backends.triton import triton_kernels as kernels
from hotset.backends.triton.fallback import ANGLE_STEP, N_COUNTS, RopeTable, TokenThreshold
from hotset.backends.triton.matrix import EXPERT_TYPES, SUPPORTED, DeviceMatrix
from hotset.backends.triton.tiles import LEAST_SHARED, prompt_tile, row_tile, token_tile
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.keys import MAX_GROUP, MAX_HEAD_DIM
from hotset.model.operations import Activate, Route, Value
from hotset.placement.cards import CARDS

# The tests compile for one target, slow ones for one of each maker, `make test-triton` for all.
CHOSEN = list(TARGETS) if os.environ.get("HOTSET_AOT") == "all" else ["sm_90", "gfx1100"]
each_target = pytest.mark.parametrize(
    "target", [pytest.param(name, marks=() if name == "sm_90" else pytest.mark.slow) for name in CHOSEN]
)
IS_3_6 = triton.__version__.startswith("3.6.")
D, N_FF, N_BLOCKS = 4096, 11008, 64
F16, Q4_0 = GGMLType.F16, GGMLType.Q4_0


def decode_step() -> None:
    """Launch the kernels of one token in a sparse Q4_0 layer with its predictor."""
    kernels.linear(new(1, D), weights(Q4_0, D, D))
    up = weights(Q4_0, N_FF, D)
    kernels.linear(new(1, D), weights(Q4_0, 1024, D), activation="relu")
    kernels.linear_bits(new(1, 1024), weights(Q4_0, N_FF, 1024), None, 0.0)
    bits = kernels.pack_bits(new(1, N_FF), 0.0)
    counts = new(N_COUNTS, dtype=torch.int64)
    kernels.sparse_ffn(new(1, D), up, up, up, activation="relu", selected=bits, counts=counts)
    kernels.rms_norm(new(1, D), new(D), 1e-5)
    blocks = new(N_BLOCKS, 8, 64, 128, dtype=torch.float16)
    table, one = new(1, N_BLOCKS, dtype=torch.int32), new(1, dtype=torch.int32)
    rope = RopeTable("neox", 128, new(2, ANGLE_STEP, 64), new(2, 16, 64))
    kernels.rotate_store(
        new(1, D), new(1, 1024), new(1, 1024), kernels.angles(one, rope), blocks, blocks, table, one, one,
        n_head=32, kind="neox",
    )  # fmt: skip
    kernels.attention(new(1, D), blocks, blocks, table, one, one, n_head=32, scale=0.1)
    kernels.largest(new(1, 32000))
    kernels.gated(new(1, D), weights(Q4_0, 2 * N_FF, D), activation="silu")
    _, h = kernels.linear_normed(new(1, D), weights(Q4_0, D, D), None, new(1, D), new(D), 1e-5)
    kernels.project_heads(
        h, weights(Q4_0, 6144, D), None, new(2, 1, 64), *[blocks] * 2, table, one, one, n_head=32, kind="neox"
    )


def prompt_step() -> None:
    """Launch a prompt's sparse FFN in Q4_0, and its attention with one and with four heads per KV head."""
    up = weights(Q4_0, N_FF, D)
    bits, counts = new(64, N_FF // 8, dtype=torch.uint8), new(N_COUNTS, dtype=torch.int64)
    kernels.sparse_ffn(new(64, D), up, up, up, activation="relu", selected=bits, counts=counts)
    table, tokens = new(1, N_BLOCKS, dtype=torch.int32), new(64, dtype=torch.int32)
    for n_head_kv in (32, 8):
        blocks = new(N_BLOCKS, n_head_kv, 64, 128, dtype=torch.float16)
        kernels.attention(new(64, D), blocks, blocks, table, tokens, tokens, n_head=32, scale=0.1)


def heads_step(
    dim: int, dim_v: int, group: int, dtype: torch.dtype = torch.float16, tokens: tuple[int, ...] = (64, 1)
) -> Callable[[], None]:
    """Return a launcher of attention for prompts and tokens: heads of dim and dim_v, `group` per KV head."""

    def run() -> None:
        k, v = (new(N_BLOCKS, 2, 64, width, dtype=dtype) for width in (dim, dim_v))
        table, n_head = new(1, N_BLOCKS, dtype=torch.int32), 2 * group
        for n in tokens:
            at = new(n, dtype=torch.int32)
            kernels.attention(
                new(n, n_head * dim), k, v, table, at, at, n_head=n_head, scale=0.1, softcap=9.0
            )

    return run


def products(types: list[GGMLType], n_tokens: int) -> Callable[[], None]:
    """Return a launcher of a prompt's products: FFN and attention, whose tiles may differ, and transposed."""

    def run() -> None:
        for type_ in types:
            kernels.linear(new(n_tokens, D), weights(type_, N_FF, D))
            if type_ in (F16, GGMLType.BF16):
                kernels.linear(new(n_tokens, D), weights(type_, D, D))
            kernels.linear_t(new(n_tokens, N_FF), weights(type_, N_FF, D))

    return run


def planes(type_: GGMLType) -> DeviceMatrix:
    """Return a neuron-major down projection: codes by neuron, and a row of scales for 32 neurons."""
    is_q8 = type_ == GGMLType.Q8_0
    codes = new(N_FF, D if is_q8 else D // 2, dtype=torch.int8 if is_q8 else torch.uint8)
    scales, group_of = new(N_FF // 32, D, dtype=torch.float16), new(N_FF, dtype=torch.int32)
    return DeviceMatrix(type_, N_FF, D, codes, scales=scales, group_of=group_of)


def planes_step() -> None:
    """Launch neuron-major down projections of a plain file, for one token and for many."""
    for type_ in (Q4_0, GGMLType.Q8_0):
        for n_tokens in (1, 64):
            kernels.linear_t(new(n_tokens, N_FF), planes(type_))


INPUT_MAJOR = (Q4_0, GGMLType.Q4_1, GGMLType.Q4_K, GGMLType.Q8_0, F16)


def channels_step() -> None:
    """Launch input-major matrices that count skipped inputs, for one token and for many."""
    for type_ in INPUT_MAJOR:
        m = DeviceMatrix.input_major(D, [D], [weights(type_, D, D)].__getitem__)
        kernels.linear_t(new(1, D), m, left_out=new(1, dtype=torch.int64))
        kernels.linear_t(new(64, D), m)


def threshold_step() -> None:
    """Launch kernels with thresholds: separate ones, norms, FFNs of one and many tokens, experts."""
    counts = new(N_COUNTS, dtype=torch.int64)
    for n in (1, 64):
        by = TokenThreshold(new(n, dtype=torch.int32), 0.1)
        kernels.zero_small(new(n, D), by)
        kernels.rms_norm(new(n, D), new(D), 1e-5, by=by)
        given = {"activation": "silu", "counts": counts, "gate_threshold": by, "value_threshold": by}
        kernels.fired(*new(n, 2 * N_FF).split(N_FF, dim=1), **given)  # type: ignore[arg-type]
        up = weights(Q4_0, N_FF, D)
        kernels.neurons(new(n, D), up, up, **given)  # type: ignore[arg-type]
    slots, slot = new(1, 4, dtype=torch.int32), weights(Q4_0, 2 * 768, D)
    act = Activate(Value(0, 1, ""), Value(0, 1, ""), "silu")
    experts_kernel.experts(
        new(1, D), slots, slot, slot, weights(Q4_0, 2 * D, 768), n_neurons=768, activation=act,
        up_activation=None, neuron_major=False, sparse=True, gate_threshold=TokenThreshold(new(1,
        dtype=torch.int32), 0.1),
    )  # fmt: skip


def spin_step() -> None:
    """Launch the kernels for host-device synchronisation, with a predictor and without."""
    flag, bits = new(1, dtype=torch.int32), new(1, N_FF // 8, dtype=torch.uint8)
    for given in (bits, None):
        spin_kernel.submit(new(1, D), given, new(8, D), bits, flag)
    spin_kernel.collect(flag, new(8, D), new(1, D))


def other_types(types: list[GGMLType]) -> Callable[[], None]:
    def run() -> None:
        for type_ in types:
            kernels.linear(new(1, D), weights(type_, D, D))
            if type_ in (F16, GGMLType.Q8_0):
                kernels.linear_t(new(1, N_FF), weights(type_, N_FF, D))

    return run


def expert_rows(types: list[GGMLType], sizes: tuple[int, ...]) -> Callable[[], None]:
    """Return a launcher of cached experts' rows for a prompt, in tiles of `sizes` pairs."""

    def run() -> None:
        ids = [new(n, dtype=torch.int32) for n in (4096, 128, 128, 128)]
        given = new(512, 2048, dtype=torch.int8), new(512, 64), new(512, 64)
        for type_ in types:
            for n_pairs in sizes:
                tiles = experts_kernel.Tiles(*ids, n_pairs)
                m = weights(type_, 64 * 768, 2048)
                experts_kernel.expert_rows(new(512, 2048), given, new(4096), m, None, 768, 8, tiles)

    return run


def expert_step(types: list[GGMLType]) -> Callable[[], None]:
    """Return a launcher of a token's cached experts, with biases and without."""

    def run() -> None:
        value = Value(0, 1, "x")
        for type_ in types:
            up, down = weights(type_, 64 * 768, 2048), weights(type_, 64 * 2048, 768)
            biases: dict[str, torch.Tensor | None] = {"gate_bias": new(64, 768), "down_bias": new(64, 2048)}
            for kind, up_kind, given in (("silu", None, {}), ("clamped_silu", "clamped_plus_one", biases)):
                experts_kernel.experts(
                    new(1, 2048), new(1, 8, dtype=torch.int32), up, up, down, n_neurons=768,
                    activation=Activate(value, value, kind, 7.0),
                    up_activation=Activate(value, value, up_kind, 7.0) if up_kind else None,
                    neuron_major=False, sparse=False, counts=new(N_COUNTS, dtype=torch.int64), **given,
                )  # fmt: skip

    return run


def fetch_step(types: list[GGMLType]) -> Callable[[], None]:
    """Return a launcher of the kernels that choose missing experts' processors, and fetch experts."""

    def run() -> None:
        addresses, ids = new(128, dtype=torch.int64), new(8, 8, dtype=torch.int32)
        experts_kernel.choose_experts(ids, new(128, dtype=torch.int32), new(65, dtype=torch.int32), 12, 64)
        for type_ in types:
            part = matrix.HostRows(type_, [np.empty((768, row_bytes(type_, 2048)), np.uint8)], addresses)
            experts_kernel.fetch_experts(part, new(12, dtype=torch.int32), weights(type_, 768, 2048), 0)
        bias = matrix.HostRows(GGMLType.F32, [np.empty((1, 4 * 2048), np.uint8)], addresses)
        experts_kernel.fetch_experts(bias, new(12, dtype=torch.int32), new(12, 2048), 0)

    return run


def eight_tokens() -> None:
    kernels.linear(new(8, D), weights(Q4_0, D, D))
    kernels.linear_bits(new(8, 1024), weights(Q4_0, N_FF, 1024), None, 0.0)


def exact_ffn() -> None:
    up = weights(Q4_0, N_FF, D)
    kernels.neurons(
        new(1, D), up, up, activation="relu", up_activation="relu", counts=new(N_COUNTS, dtype=torch.int64)
    )


def small_tiles() -> None:
    """Launch tiles of small matrices, rows and heads, with few numbers per thread, for 1 to 8 tokens."""
    # Rows of floats need not be aligned.
    for n, type_, width in ((1, Q4_0, 64), (4, F16, 69), (8, GGMLType.Q8_0, 64)):
        m = weights(type_, 64, width)
        kernels.linear(new(n, width), m)
        kernels.linear_bits(new(n, width), m, None, 0.0)
        kernels.linear_t(new(n, 64), m)
        for selected in (None, new(n, 8, dtype=torch.uint8)):
            kernels.neurons(new(n, width), m, m, activation="silu", selected=selected)
    x, m = torch.zeros(1, 68)[:, 1:65], weights(Q4_0, 64, 64)  # contiguous, but not aligned
    kernels.linear(x, m)
    kernels.linear_bits(x, m, None, 0.0)
    kernels.neurons(x, m, m, activation="silu")
    kernels.sparse_ffn(x, m, m, m, activation="relu", selected=torch.zeros(1, 8, dtype=torch.uint8))
    kernels.linear_t(new(8, 64), DeviceMatrix.input_major(64, [64], [weights(Q4_0, 64, 64)].__getitem__))
    for width in (8, 128):
        kernels.rms_norm(new(1, width), new(width), 1e-5)
        kernels.layer_norm(new(1, width), new(width), None, 1e-5)
        kernels.gaussian_top_k(new(1, width), 1.6)
        kernels.rotate(new(1, width), new(2, 1, 4), n_head=1, kind="neox", norm_weight=new(width))
    heads_step(16, 8, 1, torch.float32, (1,))()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "MATVEC_PROGRAMS", 1)
        m, blocks, at = weights(Q4_0, 64, 64), new(2, 1, 64, 16), new(1, dtype=torch.int32)
        _, h = kernels.linear_normed(new(1, 64), m, None, None, new(64), 1e-5)
        kernels.gated(h, m, activation="silu")
        given = new(2, 1, 4), blocks, blocks, new(1, 2, dtype=torch.int32), at, at
        kernels.project_heads(h, m, None, *given, n_head=2, kind="norm")


MANY = 1 << 18  # tokens, so that tensors with ROW numbers per token exceed int32 indices
ROW = 16384


def many_numbers() -> None:
    """Launch kernels with tokens, KV blocks and weights of more than 2^31 numbers."""
    n, heads = MANY, ROW // 128
    x, at, table = new(n, ROW), new(n, dtype=torch.int32), new(1, 40_000, dtype=torch.int32)
    kernels.pack_bits(x, 0.0)
    kernels.zero_small(x, TokenThreshold(at, 0.1))
    kernels.rms_norm(x, new(ROW), 1e-5)
    for given, type_ in ((x, F16), (x, GGMLType.BF16), (new(1, ROW), F16)):
        m = weights(type_, MANY, ROW)
        kernels.linear(given, m)
        kernels.linear_t(new(len(given), MANY), m)
    bits, up = new(n, ROW // 8, dtype=torch.uint8), weights(Q4_0, ROW, ROW)
    kernels.sparse_ffn(x, up, up, up, activation="relu", selected=bits)
    for dim, dtype in ((128, torch.float16), (512, torch.float32)):  # with 512 each token attends separately
        blocks = new(40_000, 8, 64, dim, dtype=dtype)
        q, k = new(n, heads * dim), new(n, 8 * dim)
        cos_sin = new(2, n, dim // 2)
        q = kernels.rotate_store(q, k, k, cos_sin, blocks, blocks, table, at, at, n_head=heads)
        kernels.attention(q, blocks, blocks, table, at, at, n_head=heads, scale=0.1)
    ids, slots = [new(size, dtype=torch.int32) for size in (n, 128, 128, 128)], new(n, dtype=torch.int32)
    for type_ in (F16, Q4_0):
        m = weights(type_, MANY, ROW)
        for tiles in (None, experts_kernel.Tiles(*ids, 16)):
            experts_kernel.expert_rows(x, experts_kernel.quantized(x), slots, m, None, ROW, 1, tiles)
        part = matrix.HostRows(type_, [np.empty((1, row_bytes(type_, ROW)), np.uint8)], slots.long())
        experts_kernel.fetch_experts(part, new(12, dtype=torch.int32), m, 0)


def compile_all(
    run: Callable[[], None], target: GPUTarget, patch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """Return a row per kernel that `run` launches: its name and its resources."""
    rows = []
    for name, constants, made in compiled(run, target, patch):
        row = {"kernel": name, "format": constants.get("TYPE")}
        rows.append(row | resources(made, target.backend))
    return rows


@pytest.fixture(autouse=True)
def _not_interpreted() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", "kernels are compiled here; unset TRITON_INTERPRET"


FRAME = 16  # bytes of stack that a kernel may use: every version of Triton gives some kernels 8
# Registers that AMD's compiler may spill: two halves of a warp hold a tile's fragment twice.
SPILLED_AMD = {"_prompt_attention_kernel": 64, "_expert_tiles_kernel": 32}
FRAMES = {"_expert_tiles_kernel": 64}  # it has five nested loops


# Spilled bytes for heads wider than 128, by their width rounded up. Such heads run, slowly.
WIDE_HEADS = {
    "cuda": {torch.float16: {256: 48, 512: 1600}, torch.float32: {128: 80, 256: 256, 512: 6000}},
    "hip": {dtype: {256: 280, 512: 900} for dtype in (torch.float16, torch.float32)},
}
HEADS = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256))
# Every target has the tiles of one of these two, or more room; `make test-triton` compiles all for all.
WIDE = [
    ("sm_90", (256, 256), 1),
    *(pytest.param("sm_86", *heads, marks=pytest.mark.slow) for heads in (((256, 256), 1), ((64, 64), 71))),
]
if os.environ.get("HOTSET_AOT") == "all":
    WIDE = [(name, dims, group) for name in TARGETS for dims in (*HEADS, (512, 512)) for group in (1, 8, 71)]


def check(rows: list[dict[str, Any]], target: str) -> None:
    maker = TARGETS[target].backend
    for row in rows:
        name = row["kernel"]
        frame = FRAMES.get(name, FRAME) if maker == "cuda" else SPILLED_AMD.get(name, 0)
        assert row["spilled"] <= frame, row
        assert row["shared"] <= MAX_SHARED[TARGETS[target]], row


@each_target
def test_a_decode_step_compiles(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = compile_all(decode_step, TARGETS[target], monkeypatch)
    assert {row["kernel"] for row in rows} == {
        "_matvec_kernel", "_chosen_kernel", "_axpy_kernel", "_add_kernel", "_pack_kernel",
        "_norm_kernel", "_angles_kernel", "_heads_kernel", "_attention_kernel", "_merge_kernel",
        "_largest_kernel", "_project_heads_kernel",
    }  # fmt: skip
    check(rows, target)


# Most instructions per weight in a kernel's innermost loop, for sm_90 by Triton 3.6 and 3.9; other targets
# may have a tenth more. docs/contributing/internals/gpu.md explains the figures.
MOST_INSTRUCTIONS = {
    "matvec, Q4_0": 5.3, "matvec, Q8_0": 6.6, "matvec, Q6_K": 8.6, "bits of a predictor, Q4_0": 5.0,
    "gate and up, Q4_0": 5.3, "neurons, Q4_0": 5.5, "chosen, Q4_0": 6.6,
}  # fmt: skip
# Fusion with a product must not add an instruction to its loop, and must not exceed 64 registers, with which
# a multiprocessor holds eight programs.
FUSED = {
    "matvec before a norm, Q4_0": 5.3, "the same behind a norm, Q4_0": 5.3,
    "heads behind a norm, neox, Q4_0": 5.3, "heads behind a norm, norm, Q4_0": 5.3,
}  # fmt: skip


@pytest.mark.parametrize("target", [name for name in CHOSEN if TARGETS[name].backend == "cuda"])
def test_a_weight_takes_few_instructions(target: str) -> None:
    """Check the loop over a row, with its loads of codes, scales and inputs, for instructions per weight.

    Decode is limited by memory only if arithmetic keeps up. The loop has no barrier, and no access to shared
    memory.
    """
    slack, most = 1.0 if target == "sm_90" else 1.1, MOST_INSTRUCTIONS | FUSED
    for row in instructions.rows(target, most):
        assert (row.barriers, row.shared_loads, row.shared_stores) == (0, 0, 0), row
        assert row.spilled <= FRAME, row
        assert 2 < row.instructions < slack * most[row.kernel], row
        assert row.registers <= 64 or row.kernel not in FUSED or target != "sm_90", row


# Instructions of a scheduler for 64 rows, 64 columns and 128 tokens. The tensor cores take 256 cycles (sm_90)
# or 512 (sm_80, for which Triton 3.6 decodes with twice as many instructions).
MOST_OF_PRODUCTS = {
    "sm_90": (215, 114, 117, 190, 200, 46),
    "sm_80": (575, 575, 585, 730, 740, 140) if IS_3_6 else (296, 296, 304, 425, 440, 174),
}


@pytest.mark.parametrize("target", [name for name in MOST_OF_PRODUCTS if name in CHOSEN])
def test_a_prompts_product_takes_few_instructions(target: str) -> None:
    """Check each type for an H100 or an A100; no thread waits for a load in the loop."""
    most = dict(zip(instructions.PRODUCTS, MOST_OF_PRODUCTS[target], strict=True))
    wanted = most if list(TARGETS) == CHOSEN else ["Q4_0, 22016 × 4096"]
    found = list(instructions.products(target, wanted))
    assert [row.product for row in found] == list(wanted)
    for row in found:
        assert row.loads == 0 < row.copies, row
        assert row.spilled == 0, row
        assert row.instructions < most[row.product], row


@each_target
def test_cached_experts_compile(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that products and sums are fused only where the CPU's are."""
    few = (F16, Q4_0, GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.MXFP4)
    types = EXPERT_TYPES if list(TARGETS) == CHOSEN else few
    rows = []
    for name, constants, made in compiled(expert_step(list(types)), TARGETS[target], monkeypatch):
        rows.append((name, constants, made))
        if TARGETS[target].backend == "cuda":
            text = made.asm["ptx"]
            assert not re.search(r"div\.(full|approx)|mul\.ftz|fma\.rn\.ftz", text), name
            assert "fma.rn.f32" in text or name == "_quantize_kernel"
    assert {name for name, _, _ in rows} == {"_quantize_kernel", "_expert_rows_kernel", "_values_kernel"}


@each_target
def test_experts_of_prompts_compile(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check integer tensor cores for blocks, no spills, and fusion only where the CPU fuses."""
    types = EXPERT_TYPES if list(TARGETS) == CHOSEN else (Q4_0,)
    maker = TARGETS[target].backend
    step = expert_rows(list(types), (16, 32) if maker == "cuda" else (16,))
    for name, constants, made in compiled(step, TARGETS[target], monkeypatch):
        assert name == "_expert_tiles_kernel"
        check([{"kernel": name} | constants | resources(made, maker)], target)
        text = made.asm["ptx" if maker == "cuda" else "amdgcn"]
        if constants["TYPE"] != experts_kernel.TYPES[F16]:
            assert re.search(r"mma\S*\.s32\.s8\.s8|v_wmma_i32_16x16x16_iu8", text), constants
        if maker == "cuda":
            assert not re.search(r"div\.(full|approx)|mul\.ftz|fma\.rn\.ftz", text), constants


@each_target
def test_routers_and_sums_compile(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile for 128 experts, eight per token, some of which the device computed."""
    parts, weights_, asked = new(1, 8, D), new(1, 8), new(1, 8, dtype=torch.int32)

    def run() -> None:
        value = Value(0, 128, "")
        for scoring in ("softmax", "sigmoid", "softmax_chosen"):
            op = Route(value, value, 8, scoring, normalised=True)  # type: ignore[arg-type]
            experts_kernel.route(new(1, 128), op, new(128), new(128))
        experts_kernel.sum_experts(parts, weights_, new(1, D), parts, asked)

    rows = compile_all(run, TARGETS[target], monkeypatch)
    assert [row["kernel"] for row in rows] == [*["_route_kernel"] * 3, "_sum_kernel"]
    check(rows, target)


@each_target
def test_fetching_experts_compiles(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = (F16, Q4_0, GGMLType.Q6_K, GGMLType.MXFP4)
    types = EXPERT_TYPES if list(TARGETS) == CHOSEN else few
    rows = compile_all(fetch_step(list(types)), TARGETS[target], monkeypatch)
    assert [row["kernel"] for row in rows] == ["_choose_kernel", *["_fetch_kernel"] * (len(types) + 1)]
    check(rows, target)


@each_target
def test_a_prompt_compiles(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = compile_all(prompt_step, TARGETS[target], monkeypatch)
    attention = ["_prompt_attention_kernel"] * 2
    ffn = ["_halves_kernel", "_matmul_kernel", "_matmul_kernel", "_fired_kernel"]
    ffn += ["_halves_kernel", "_matmul_t_kernel"]
    assert [row["kernel"] for row in rows] == [*ffn, *attention]
    check(rows, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", [name for name in CHOSEN if TARGETS[name].backend == "cuda"])
def test_threads_of_small_tiles_have_the_same_sums(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        name for name, _, _ in compiled(small_tiles, TARGETS[target], monkeypatch)
    }  # `compiled` checks each kernel
    assert names >= {
        "_matvec_kernel", "_neurons_kernel", "_chosen_kernel", "_axpy_kernel", "_norm_kernel",
        "_heads_kernel", "_merge_kernel",
    }  # fmt: skip


def test_a_thread_has_enough_of_any_tile() -> None:
    """Check any row of words, any number of rows per program, warps of 32 and 64 threads."""
    wanted = {kernels.MATVEC_WORDS, *kernels.NEURON_WORDS.values(), *kernels.BITS_WORDS.values(), 16}
    for most in wanted:
        for rows in {1, 8, *kernels.MATVEC_ROWS.values()}:
            for n_lanes in (32, 64):
                for n_words in range(1, 2050):
                    words, warps = row_tile(rows, most, n_words, n_lanes)
                    threads = warps * n_lanes
                    assert warps in (1, 2, 4)
                    assert words & (words - 1) == 0
                    assert 4 * words >= 2 * threads
                    assert rows * words >= threads
                    assert words >= min(most, n_words) or words >= most


@pytest.mark.parametrize(("target", "dims", "group"), WIDE)
def test_heads_of_every_width_compile(
    target: str, dims: tuple[int, int], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the shared memory of the card: models that need more are refused at load."""
    is_all = os.environ.get("HOTSET_AOT") == "all"
    maker, size = TARGETS[target].backend, max(64, kernels.pow2(max(dims)))
    for dtype in (torch.float16, torch.float32) if is_all else (torch.float16,):
        for row in compile_all(heads_step(*dims, group, dtype), TARGETS[target], monkeypatch):
            assert row["shared"] <= MAX_SHARED[TARGETS[target]], row
            most = SPILLED_AMD["_prompt_attention_kernel"] if maker == "hip" else 2 * FRAME
            assert row["spilled"] <= WIDE_HEADS[maker][dtype].get(size, most), row
            if "attention" in row["kernel"] and maker == "cuda":
                assert row["shared"] <= shared_of_tile(row["kernel"], dims, group, dtype, target), row


def shared_of_tile(kernel: str, dims: tuple[int, int], group: int, dtype: torch.dtype, target: str) -> int:
    """Return the shared memory of a kernel according to tiles.py."""
    given: dict[str, Any] = {"is_half": dtype == torch.float16}
    if kernel == "_attention_kernel":
        return token_tile(max(dims), group, **given).shared
    tile = prompt_tile(
        max(dims), **given, shared=MAX_SHARED[TARGETS[target]], hopper=TARGETS[target].arch == 90
    )
    assert tile is not None
    return tile.shared


@pytest.mark.parametrize("target", TARGETS)
def test_a_tile_of_attention_fits_every_device(target: str) -> None:
    """Check any width of heads, with any number of heads per KV head."""
    maker, most = TARGETS[target].backend, MAX_SHARED[TARGETS[target]]
    assert maker == "hip" or most >= LEAST_SHARED
    for head in range(1, MAX_HEAD_DIM + 1):
        for is_half in (True, False):
            given: dict[str, Any] = {"is_half": is_half, "amd": maker == "hip"}
            prompt = prompt_tile(head, **given, shared=most, hopper=TARGETS[target].arch == 90)
            tiles = [token_tile(head, group, **given) for group in (1, 16, 17, MAX_GROUP)]
            assert (prompt is None) == (maker == "cuda" and not is_half and head > 256)
            for tile in tiles if prompt is None else [prompt, *tiles]:
                assert tile.shared <= most
                assert tile.queries >= 16 <= tile.positions
                assert BLOCK_SIZE % tile.positions == 0


@each_target
def test_products_of_prompts_are_the_tensor_cores(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a prompt's products use tensor cores, with f16 weights for all types but float32, unspilled.

    On NVIDIA's devices, copies to shared memory overlap products. On Hopper, with the fastest tensor cores,
    the other instructions of a Q4_0 tile take no longer than the tensor cores.
    """
    steps = [products(list(SUPPORTED), 512), products([Q4_0, F16], 12)]
    if list(TARGETS) != CHOSEN:
        steps = [products([Q4_0], 512)]
    arch, multiply = TARGETS[target].arch, r"mma\.sync\S*\.f32\.b?f16\.b?f16\.f32"
    if TARGETS[target].backend == "hip":
        multiply = r"v_wmma_f32_16x16x16_b?f16"
    elif arch == 90:
        multiply = r"wgmma\.mma_async\S*\.f32\.b?f16\.b?f16"
    for name, constants, made in (
        one for step in steps for one in compiled(step, TARGETS[target], monkeypatch)
    ):
        row = {
            "kernel": name,
            "target": target,
            "float32": "fp32" in str(made.src.signature["x"]),
        } | constants
        row |= resources(made, TARGETS[target].backend)
        check([row], target)
        if name == "_halves_kernel" or row["float32"]:
            continue
        assert re.search(multiply, made.asm["amdgcn" if "amdgcn" in made.asm else "ptx"]), row
        loop = longest_loop(made.asm["cubin"]) if TARGETS[target].backend == "cuda" else None
        if name == "_matmul_kernel" and loop is not None and not IS_3_6:
            assert loop.loads == 0 < loop.copies, row
        if arch == 90 and constants["TYPE"] == kernels.FORMATS[Q4_0] and constants["M"] >= 128:
            assert loop is not None
            n_weights = constants["N"] * constants["W"] * 8 if "N" in constants else 0
            n_weights = n_weights or constants["K"] * constants["W"] * 8
            cycles = n_weights * constants["M"] / 2048  # of the tensor cores of a multiprocessor
            # Four schedulers each issue one warp instruction per cycle. Triton 3.6 does not pair halves.
            most = 1.25 if IS_3_6 else 0.9
            assert loop.instructions * made.metadata.num_warps / 4 < most * cycles


@each_target
def test_planes_compile(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = compile_all(planes_step, TARGETS[target], monkeypatch)
    assert {row["kernel"] for row in rows} == {
        "_axpy_kernel", "_add_kernel", "_halves_kernel", "_matmul_t_kernel",
    }  # fmt: skip
    check(rows, target)


@each_target
def test_matrices_by_channel_compile(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = compile_all(channels_step, TARGETS[target], monkeypatch)
    assert [row["kernel"] for row in rows].count("_axpy_kernel") == len(INPUT_MAJOR)
    check(rows, target)


@each_target
def test_cutoffs_compile(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = compile_all(threshold_step, TARGETS[target], monkeypatch)
    assert {row["kernel"] for row in rows} > {
        "_zero_small_kernel", "_norm_kernel", "_fired_kernel", "_neurons_kernel", "_values_kernel",
    }  # fmt: skip
    check(rows, target)


@each_target
def test_the_kernels_of_the_handshake_compile(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list(compiled(spin_step, TARGETS[target], monkeypatch))
    assert [name for name, _, _ in made] == ["submit_kernel", "submit_kernel", "collect_kernel"]
    if TARGETS[target].backend == "cuda":
        for name, _, binary in made:  # the CPU depends on their memory order
            text, order = binary.asm["ptx"], "release" if name == "submit_kernel" else "acq_rel"
            assert f"atom.global.sys.{order}.exch" in text, text
            assert name == "submit_kernel" or "ld.volatile.global" in text, text


def test_the_kernels_are_compiled_for_every_card_of_the_table() -> None:
    assert {card.compute for card in CARDS} <= set(TARGETS)


def test_more_numbers_than_an_int32_counts_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for name, _, _ in compiled(many_numbers, TARGETS["sm_90"], monkeypatch)}
    assert names >= {
        "_pack_kernel", "_heads_kernel", "_attention_kernel", "_prompt_attention_kernel",
        "_matmul_kernel", "_matmul_t_kernel", "_fired_kernel", "_axpy_kernel", "_expert_tiles_kernel",
        "_fetch_kernel",
    }  # fmt: skip


OTHERS = [type_ for type_ in SUPPORTED if type_ != Q4_0]


@pytest.mark.slow
@pytest.mark.parametrize("target", [name for name in CHOSEN if TARGETS[name].backend == "cuda"])
def test_every_type_compiles(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(compile_all(other_types(OTHERS), TARGETS[target], monkeypatch), target)


@pytest.mark.slow
def test_several_tokens_and_counts_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = compile_all(eight_tokens, TARGETS["sm_80"], monkeypatch)
    rows += compile_all(exact_ffn, TARGETS["sm_90"], monkeypatch)
    assert {row["kernel"] for row in rows} == {"_matvec_kernel", "_neurons_kernel", "_count_kernel"}
    check(rows, "sm_90")


if __name__ == "__main__":
    steps = (
        decode_step, prompt_step, planes_step, channels_step, threshold_step, spin_step, other_types(OTHERS),
        eight_tokens, exact_ffn,
    )  # fmt: skip
    for name in sys.argv[1:] or TARGETS:
        for step in steps:
            with pytest.MonkeyPatch.context() as patch:
                for row in compile_all(step, TARGETS[name], patch):
                    print(name, *(f"{key}={value}" for key, value in row.items()), flush=True)
