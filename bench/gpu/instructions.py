"""The instructions of compiled kernels: per weight in a decode step, and per tile in a prompt's products.

They are the tables of docs/contributing/internals/gpu.md.

usage: python bench/gpu/instructions.py [sm_80 sm_90 ...]

It needs no device: kernels are compiled for shapes of a 7B model, and the innermost loop is analysed.
Barriers and accesses to shared memory are counted in the loop; registers and bytes of spills per thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))  # peers.py of bench/
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from compiled_kernels import TARGETS, compiled, longest_loop, resources
from gpu_inputs import new, weights
from peers import print_table

from hotset.backends.triton import triton_kernels as kernels
from hotset.backends.triton.fallback import N_COUNTS, Weighed
from hotset.formats.quants import GGMLType

D, FF = 4096, 11008  # 7B: Llama 2
COLUMNS = [
    "kernel", "instructions a weight", "barriers", "shared loads", "shared stores", "registers", "spilled",
]  # fmt: skip


PRODUCT_COLUMNS = [
    "product of 512 tokens", "rows × tokens", "instructions", "of the tensor cores' cycles", "bytes",
    "loads", "copies", "registers", "spilled",
]  # fmt: skip
PRODUCTS = {
    f"{type_.name}, {n_rows} × {D}": (type_, n_rows)
    for type_, n_rows in (
        (GGMLType.Q4_0, D),
        *((GGMLType[name], 2 * FF) for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "F16")),
    )
}
TENSOR_CORES = {80: 1024, 90: 2048}  # products of halves per cycle of a multiprocessor: A100, H100
MULTIPROCESSORS = {80: 108, 90: 132}


@dataclass(frozen=True)
class Row:
    """A kernel: a thread's instructions per weight of its loop, and the rest of COLUMNS."""

    kernel: str
    instructions: float
    barriers: int
    shared_loads: int
    shared_stores: int
    registers: int
    spilled: int

    def cells(self) -> list[str]:
        return [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in astuple(self)]


@dataclass(frozen=True)
class Product:
    """A product of a prompt of 512 tokens, as in PRODUCT_COLUMNS.

    instructions: of a scheduler, for a tile of 64 rows, 64 columns and 128 tokens; of_cycles: their share of
    the tensor cores' cycles for it; n_bytes: of its inputs and weights. loads, copies: see Loop.
    """

    product: str
    tile: str
    instructions: float
    of_cycles: float
    n_bytes: float
    loads: int
    copies: int
    registers: int
    spilled: int

    def cells(self) -> list[str]:
        numbers = f"{self.instructions:.0f}", f"{self.of_cycles:.0%}", f"{self.n_bytes:.0f}"
        rest = self.loads, self.copies, self.registers, self.spilled
        return [self.product, self.tile, *numbers, *map(str, rest)]


def steps() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the rows of the table and their calls, of which the first launched kernel is measured."""
    for type_ in (GGMLType.Q4_0, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.F16):
        yield f"matvec, {type_.name}", lambda type_=type_: kernels.linear(new(1, D), weights(type_, D, D))
    q4_0 = weights(GGMLType.Q4_0, FF, D)
    counts = new(N_COUNTS, dtype=torch.int64)
    selected = new(1, FF // 8, dtype=torch.uint8)
    given: dict[str, Any] = {"activation": "relu", "counts": counts}
    yield "matvec, Q4_0, 8 tokens", lambda: kernels.linear(new(8, D), q4_0)
    yield "bits of a predictor, Q4_0", lambda: kernels.linear_bits(new(1, D), q4_0, None, 0.0)
    yield "neurons, Q4_0", lambda: kernels.neurons(new(1, D), q4_0, q4_0, **given)
    yield "chosen, Q4_0", lambda: kernels.neurons(new(1, D), q4_0, q4_0, selected=selected, **given)
    both = weights(GGMLType.Q4_0, 2 * FF, D)
    yield "gate and up, Q4_0", lambda: kernels.gated(new(1, D), both, activation="silu")
    h, heads = Weighed(new(1, D), new(1, D // 4), 1e-5), weights(GGMLType.Q4_0, 3 * D, D)
    blocks, table, at = (
        new(64, 32, 64, 128, dtype=torch.float16),
        *(new(1, n, dtype=torch.int32) for n in (64, 1)),
    )
    where = new(2, 1, 64), blocks, blocks, table, at, at
    yield "the same after a norm, Q4_0", lambda: kernels.gated(h, both, activation="silu")
    yield (
        "matvec before a norm, Q4_0",
        lambda: kernels.linear_normed(new(1, D), weights(GGMLType.Q4_0, D, D), None, new(1, D), new(D), 1e-5),
    )
    for kind in ("neox", "norm"):
        yield (
            f"heads after a norm, {kind}, Q4_0",
            lambda kind=kind: kernels.project_heads(h, heads, None, *where, n_head=32, kind=kind),
        )
    yield "axpy, Q4_0", lambda: kernels.linear_t(new(1, FF), q4_0)


def rows(target: str, wanted: Collection[str] = ()) -> Iterator[Row]:
    """Yield rows for a target of compiled_kernels.TARGETS, such as sm_90; wanted: some kernels, or all."""
    for name, run in steps():
        if wanted and name not in wanted:
            continue
        with pytest.MonkeyPatch.context() as patch:
            _, constants, made = next(iter(compiled(run, TARGETS[target], patch)))
        yield _row(name, constants, made)


def products(target: str, wanted: Collection[str] = ()) -> Iterator[Product]:
    """Yield products for a target in TENSOR_CORES; wanted: some of PRODUCTS, or all."""
    arch = TARGETS[target].arch
    for name, (type_, n_rows) in PRODUCTS.items():
        if wanted and name not in wanted:
            continue
        m = weights(type_, n_rows, D)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "multiprocessors", lambda device: MULTIPROCESSORS[arch])
            run = lambda m=m: kernels.linear(new(512, D), m)  # noqa: E731
            *_, (_, constants, made) = compiled(run, TARGETS[target], patch)
        loop, used = longest_loop(made.asm["cubin"]), resources(made, "cuda")
        n, tokens, depth = constants["N"], constants["M"], constants["W"] * kernels._per_word(m)
        tiles = n * tokens * depth / (64 * 128 * 64)
        cycles = n * tokens * depth / TENSOR_CORES[arch]
        issued = loop.instructions * made.metadata.num_warps / 4
        n_bytes = depth * (2 * tokens + n * m.row_bytes / D) / tiles
        yield Product(
            name, f"{n} × {tokens}", issued / tiles, issued / cycles, n_bytes, loop.loads, loop.copies,
            used["registers"], used["spilled"],
        )  # fmt: skip


def _row(name: str, constants: dict[str, Any], made: Any) -> Row:
    loop, used = longest_loop(made.asm["cubin"]), resources(made, "cuda")
    of_thread = constants["W"] * constants.get("R", 1) / (32 * made.metadata.num_warps)
    n_weights = of_thread * (4 if constants["TYPE"] <= kernels.FORMATS[GGMLType.Q8_0] else 8)
    return Row(
        name, loop.instructions / n_weights, loop.barriers, loop.shared_loads, loop.shared_stores,
        used["registers"], used["spilled"],
    )  # fmt: skip


if __name__ == "__main__":
    for target in sys.argv[1:] or ("sm_80", "sm_90"):
        print(f"Triton {triton.__version__}, {target}")
        print_table(COLUMNS, [row.cells() for row in rows(target)])
        if TARGETS[target].arch in TENSOR_CORES:
            print_table(PRODUCT_COLUMNS, [product.cells() for product in products(target)])
