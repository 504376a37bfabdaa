"""Single kernels: their speed relative to the rate at which this device reads its memory.

A unit is one kernel with one shape and type. It is compared with the fallback kernel on the same inputs: a
wrong kernel has no speed. Shares are of the read rate measured in this run; launches are in CUDA graphs, as
in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import ruler
import torch
from ledger import Ledger
from peers import print_table, verdict
from synthetic import random_matrix
from torch import Tensor

from hotset.backends.base import BLOCK_SIZE
from hotset.backends.triton import fallback
from hotset.backends.triton.kernels import Kernels
from hotset.backends.triton.matrix import DeviceMatrix
from hotset.formats.quants import GGMLType, row_bytes

TYPES = (GGMLType.Q4_0, GGMLType.Q8_0, GGMLType.F16, GGMLType.BF16, GGMLType.Q4_K, GGMLType.Q6_K)
ACTIVE = (0.02, 0.1, 0.4, 1.0)  # of the neurons of the sparse FFN
TARGET = 0.85  # of the read rate, for decoding
PROMPTS = {
    GGMLType.Q4_0: 0.4,
    GGMLType.F16: 0.5,
}  # of the tensor cores' rate that torch reaches with halves
TOLERANCE = 1e-3  # ‖out − fallback‖ / ‖fallback‖: float32 sums in another order stay far below


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model's matrices. The small ones are for trying the scripts without a GPU."""

    d: int = 4096
    ff: int = 11008
    vocab: int = 32000
    n_head: int = 32
    n_head_kv: int = 8
    depths: tuple[int, ...] = (512, 4096, 32768)
    prompt: int = 512


SMALL = Sizes(d=256, ff=512, vocab=768, n_head=4, n_head_kv=2, depths=(128,), prompt=16)


@dataclass(frozen=True)
class Unit:
    """A kernel to measure. bytes, operations: the least that it must move and compute.

    make: a call with new inputs, and its expected result. target: of the read rate; product_target: of the
    rate of half-precision products.
    """

    key: str
    bytes: float
    operations: float
    make: Callable[[], tuple[Callable[[], Tensor], Callable[[], Tensor]]]
    target: float | None = TARGET
    product_target: float | None = None


def run(ledger: Ledger, device: torch.device, sizes: Sizes) -> None:
    """Measure missing units, and print the table of all results."""
    kernels = Kernels(device)
    rates = ledger.unit("rates", lambda: _rates(device, sizes))
    if rates is None:
        print(ledger.closing())
        return
    rows = []
    for unit in _units(kernels, sizes):
        result = ledger.unit(unit.key, lambda unit=unit: _measure(unit, device, kernels))  # type: ignore[misc]
        if result is not None:
            rows.append(cells(unit, result, rates))
    name, read, copied = rates["facts"]["name"], rates["read"] / 1e9, rates["copy"] / 1e9
    print(f"\n{name}: reads {read:.0f} GB/s, copies {copied:.0f} GB/s,")
    print(f"multiplies {rates['matmul'] / 1e12:.1f} TFLOP/s; kernels by {kernels.name}\n")
    print_table(["kernel", "µs", "GB/s", "of read rate", "TFLOP/s", "error", "target"], rows)
    print(ledger.closing())


def _rates(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    small = sizes is SMALL
    n = 1 << 24 if small else 2 << 30
    return {
        "facts": ruler.facts(device),
        "read": ruler.read_bandwidth(device, n),
        "copy": ruler.copy_bandwidth(device, n // 2),
        "matmul": ruler.matmul_rate(device, 256 if small else 4096),
    }


def _measure(unit: Unit, device: torch.device, kernels: Kernels) -> dict[str, Any]:
    call, fallback = unit.make()
    found, expected = call().double(), fallback().double()
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    if not error <= TOLERANCE:  # also for NaN
        return {"seconds": None, "error": error, "kernels": kernels.name}
    calls = ruler.copies(lambda: unit.make()[0], int(unit.bytes), device)
    return {
        "seconds": ruler.seconds(calls, device),
        "error": error,
        "kernels": kernels.name,
    }


def cells(unit: Unit, result: dict[str, Any], rates: dict[str, Any]) -> list[str]:
    """Return the row of a unit: its speed, the device's rate, and whether it is enough."""
    if result["seconds"] is None:
        return [unit.key, "", "", "", "", f"{result['error']:.1e}", "WRONG"]
    speed = unit.bytes / result["seconds"]
    share = speed / rates["read"]
    reached = "" if unit.target is None else f"{unit.target:.0%} {verdict(share >= unit.target)}"
    if unit.product_target is not None:
        share_of_product = unit.operations / result["seconds"] / rates["matmul"]
        good = verdict(share_of_product >= unit.product_target)
        reached = f"{share_of_product:.0%} of products, {unit.product_target:.0%} {good}"
    return [
        unit.key,
        f"{result['seconds'] * 1e6:.1f}",
        f"{speed / 1e9:.0f}",
        f"{share:.0%}",
        f"{unit.operations / result['seconds'] / 1e12:.2f}",
        f"{result['error']:.1e}",
        reached,
    ]


def _units(kernels: Kernels, s: Sizes) -> Iterator[Unit]:
    for type in TYPES:
        yield _linear(kernels, type, s.d, s.d, 1)
        yield _linear(kernels, type, s.ff, s.d, 1)
        yield _linear(kernels, type, s.vocab, s.d, 1)
    for n_tokens in (2, 8):
        yield _linear(kernels, GGMLType.Q4_0, s.ff, s.d, n_tokens)
    for type in PROMPTS:
        for n_rows in (s.d, s.ff):
            yield _linear(kernels, type, n_rows, s.d, s.prompt)
        yield _linear(kernels, type, s.ff, s.d, s.prompt, transposed=True)
    for type in (GGMLType.Q4_0, GGMLType.F16):
        for active in ACTIVE:
            yield _ffn(kernels, type, s, active)
    for depth in s.depths:
        yield _attention(kernels, s, depth)


def _matrix(type: GGMLType, n_rows: int, n_cols: int, device: torch.device) -> DeviceMatrix:
    with ThreadPoolExecutor(4) as pool:
        data = random_matrix(type, n_cols, n_rows, [int(type), n_rows, n_cols], pool)
    return DeviceMatrix.from_bytes(data.reshape(-1), type, n_rows, n_cols, device)


def _linear(
    kernels: Kernels, type: GGMLType, n_rows: int, n_cols: int, n_tokens: int, *, transposed: bool = False
) -> Unit:
    """Return a product with a matrix, or with one that has a row for each of the inputs."""
    first = _Once(lambda: _matrix(type, n_rows, n_cols, kernels.device))

    def make() -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        m = first.copy()
        x = torch.randn(n_tokens, n_rows if transposed else n_cols, device=kernels.device)
        if transposed:
            return lambda: kernels.linear_t(x, m), lambda: fallback.linear_t(x, m)
        return lambda: kernels.linear(x, m), lambda: fallback.linear(x, m)

    n_bytes = n_rows * row_bytes(type, n_cols) + 4 * n_tokens * (n_rows + n_cols)
    key = f"linear{'_t' if transposed else ''}-{type.name.lower()}-{n_rows}x{n_cols}-T{n_tokens}"
    targets = (TARGET, None) if n_tokens <= 8 else (None, PROMPTS[type])
    return Unit(key, n_bytes, 2.0 * n_tokens * n_rows * n_cols, make, *targets)


def _ffn(kernels: Kernels, type: GGMLType, s: Sizes, active: float) -> Unit:
    """Return an FFN with randomly selected neurons, half of which fire (ReLU of symmetric products)."""
    first = _Once(lambda: tuple(_matrix(type, s.ff, s.d, kernels.device) for _ in range(3)))
    rng = np.random.default_rng(0)

    def make() -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        gate, up, down = first.copy()
        chosen = np.packbits(rng.random((1, s.ff)) < active, axis=1, bitorder="little")
        selected = torch.from_numpy(chosen).to(kernels.device)
        h, residual = (torch.randn(1, s.d, device=kernels.device) for _ in range(2))
        counts = torch.zeros(fallback.N_COUNTS, dtype=torch.int64, device=kernels.device)

        def by(who: Any) -> Callable[[], Tensor]:  # all arguments as in a step (gpu/program.py)
            return lambda: who.sparse_ffn(
                h, gate, up, down, activation="relu", threshold=0.0, selected=selected, residual=residual,
                counts=counts,
            )  # fmt: skip

        return by(kernels), by(fallback)

    row = row_bytes(type, s.d)
    n_bytes = active * s.ff * row * (1 + 0.5 + 0.5)  # gate of those selected; up and down of those that fire
    return Unit(
        f"sparse_ffn-{type.name.lower()}-{active:.0%}", n_bytes, 4.0 * active * s.ff * s.d, make, None
    )


def _attention(kernels: Kernels, s: Sizes, depth: int) -> Unit:
    device, dim = kernels.device, s.d // s.n_head
    n_blocks = -(-depth // BLOCK_SIZE)

    def make() -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        shape = (n_blocks, s.n_head_kv, BLOCK_SIZE, dim)
        k, v = (torch.randn(shape, device=device).half() for _ in range(2))
        q = torch.randn(1, s.d, device=device)
        table = torch.randperm(n_blocks, device=device).int()[None]
        at = torch.tensor([depth - 1], dtype=torch.int32, device=device)
        sequence = torch.zeros(1, dtype=torch.int32, device=device)

        def by(who: Any) -> Callable[[], Tensor]:
            return lambda: who.attention(q, k, v, table, sequence, at, n_head=s.n_head, scale=dim**-0.5)

        return by(kernels), by(fallback)

    n_bytes = 2 * 2 * depth * s.n_head_kv * dim
    return Unit(f"attention-{depth}", n_bytes, 4.0 * depth * s.d, make, None)


class _Once:
    """Weights made once with the host's generator; further copies are made on the device."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._first = make, None

    def copy(self) -> Any:
        if self._first is None:
            self._first = self._make()
            return self._first
        return _copied(self._first)


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_copied(part) for part in value)
    parts = {name: part.clone() if isinstance(part, Tensor) else part for name, part in vars(value).items()}
    return DeviceMatrix(**parts)
