"""Matrices of a warp and of four warps: ldmatrix, stmatrix, mma and wgmma.

The figures of "Warp Level Matrix Instructions" and "Asynchronous Warpgroup Level Matrix Instructions" in the
PTX ISA define which thread has which number of a fragment. Products are added in float64, which is exact for
halves unless magnitudes differ by more than 2^30.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx import arithmetic
from ptx.memory import Fault
from ptx.program import Instruction

if TYPE_CHECKING:
    from ptx.machine import Machine

LANE = np.arange(32)
GROUP, IN_GROUP = LANE // 4, LANE % 4  # a thread's row of eight, and its place in it
TYPES = {"f16": np.float16, "bf16": np.uint16, "tf32": np.uint32, "s8": np.int8, "u8": np.uint8}


def _numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers in registers or memory elements: float64 with one more axis."""
    parts = np.ascontiguousarray(bits)[..., None].view(TYPES[kind])
    if kind == "bf16":
        parts = arithmetic.from_bfloat16(parts)
    if kind == "tf32":
        parts = (parts & np.uint32(0xFFFFE000)).view(np.float32)
    return parts.astype(np.float64)


def _fragments(machine: Machine, one: Instruction, i: int) -> np.ndarray:
    """Return the registers of operand i, uint32 [registers, warps, 32]."""
    return np.stack([machine.by_warp(machine.get(name, "b32")) for name in one.operands[i]])


def _sum_of_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a [w, m, k] times b [w, k, n], column by column: no sum depends on other columns."""
    total = np.zeros((len(a), a.shape[1], b.shape[2]))
    for k in range(a.shape[2]):
        total += a[:, :, k, None] * b[:, None, k, :]
    return total


def load_matrix(machine: Machine, one: Instruction) -> None:
    """ldmatrix: thread 8 j + i has the address of row i of matrix j."""
    lanes = np.arange(len(machine.thread))[machine.at].reshape(-1, 32)
    addresses = machine.by_warp(machine.addresses(one.operands[1]))
    for j, name in enumerate(one.operands[0]):
        mine = lanes[:, 8 * j : 8 * j + 8].reshape(-1)
        rows = machine.shared.load(
            addresses[:, 8 * j : 8 * j + 8].reshape(-1), np.dtype(np.uint16), 8, machine.block[mine],
            machine.warp[mine],
        ).reshape(-1, 8, 8)  # fmt: skip
        if "trans" in one.kinds:
            rows = rows.transpose(0, 2, 1)
        pair = rows.reshape(-1, 8, 4, 2)[:, GROUP, IN_GROUP].astype(np.uint32)
        machine.put(name, (pair[..., 0] | pair[..., 1] << np.uint32(16)).reshape(-1), "b32")


def store_matrix(machine: Machine, one: Instruction) -> None:
    """Store matrices (stmatrix)."""
    here = machine.at
    lanes = np.arange(len(machine.thread))[here].reshape(-1, 32)
    addresses = machine.by_warp(machine.addresses(one.operands[0]))
    given = one.operands[1] if isinstance(one.operands[1], tuple) else (one.operands[1],)
    for j, name in enumerate(given):
        machine.at = here
        bits = np.ascontiguousarray(machine.by_warp(machine.get(name, "b32")))
        rows = bits.view(np.uint16).reshape(-1, 8, 8)
        if "trans" in one.kinds:
            rows = rows.transpose(0, 2, 1)
        machine.at = lanes[:, 8 * j : 8 * j + 8].reshape(-1)
        machine.store_shared(addresses[:, 8 * j : 8 * j + 8].reshape(-1), rows.reshape(-1, 8))
    machine.at = here


def multiply(machine: Machine, one: Instruction) -> None:
    """mma.m16n8k*: each warp computes its 16 rows and 8 columns."""
    found = re.search(r"m16n8k(\d+)", one.opcode)
    assert found is not None
    depth, (kind_a, kind_b) = int(found[1]), one.kinds[-3:-1]
    a, b = (
        _left(_fragments(machine, one, 1), depth, kind_a),
        _right(_fragments(machine, one, 2), depth, kind_b),
    )
    total = _sum_of_products(a, b)
    for i, (row, column) in enumerate(_results(8)):
        c = machine.full(machine.get(one.operands[3][i], one.type)).reshape(-1, 32)
        found_here = total[:, row, column] + c.astype(np.float64)
        value = found_here.astype(np.int64).astype(np.int32) if one.type == "s32" else found_here.astype("f4")
        machine.put(one.operands[0][i], value.reshape(-1), one.type)


def _left(registers: np.ndarray, depth: int, kind: str) -> np.ndarray:
    """Return matrices [warps, 16, depth] of A's fragments."""
    numbers = _numbers(registers, kind)  # [registers, warps, 32, numbers per register]
    n = numbers.shape[-1]
    made = np.zeros((registers.shape[1], 16, depth))
    for i, of in enumerate(numbers):
        for e in range(n):
            made[:, GROUP + 8 * (i % 2), n * IN_GROUP + e + 4 * n * (i // 2)] = of[..., e]
    return made


def _right(registers: np.ndarray, depth: int, kind: str) -> np.ndarray:
    """Return matrices [warps, depth, 8] of B's fragments."""
    numbers = _numbers(registers, kind)
    n = numbers.shape[-1]
    made = np.zeros((registers.shape[1], depth, 8))
    for i, of in enumerate(numbers):
        for e in range(n):
            made[:, n * IN_GROUP + e + 4 * n * i, GROUP] = of[..., e]
    return made


def _results(width: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the rows and columns of a thread's sums, for 16 rows of a warp."""
    return [
        (GROUP + 8 * down, 2 * IN_GROUP + e + 8 * block)
        for block in range(width // 8)
        for down in (0, 1)
        for e in (0, 1)
    ]


def multiply_warpgroup(machine: Machine, one: Instruction) -> None:
    """wgmma.mma_async: four warps, 16 rows each.

    Matrices in shared memory are read immediately, but count as being read until their group is awaited.
    """
    found = re.search(r"m64n(\d+)k(\d+)", one.opcode)
    assert found is not None
    width, depth, kind = int(found[1]), int(found[2]), one.kinds[-1]
    to, a, b, scale = one.operands[:4]
    rest = [int(str(value)) for value in one.operands[4:]]
    assert rest[:2] == [1, 1], one.text
    transposed = rest[2:] if kind in ("f16", "bf16") else []
    lanes = np.arange(len(machine.thread))[machine.at].reshape(-1, 128)
    if (machine.warp[lanes[:, 0]] % 4).any():
        raise Fault("some warps execute what four must")
    is_b_transposed = bool(transposed and transposed[-1])
    right = _described(machine, lanes, machine.get(b, "b64"), (width, depth), kind, is_b_transposed)
    if isinstance(a, tuple):
        left = _left(_fragments(machine, one, 1), depth, kind).reshape(-1, 64, depth)
    else:
        is_transposed = bool(transposed and transposed[0])
        left = _described(machine, lanes, machine.get(a, "b64"), (64, depth), kind, is_transposed)
    total = _sum_of_products(left, right.transpose(0, 2, 1)).reshape(-1, 16, width)
    keeps = machine.full(machine.get(scale, "pred")).reshape(-1, 32)
    for i, (row, column) in enumerate(_results(width)):
        before = machine.full(machine.get(to[i], "f32")).reshape(-1, 32).astype(np.float64)
        value = total[:, row, column] + np.where(keeps, before, 0.0)
        machine.put(to[i], value.astype(np.float32).reshape(-1), "f32")


def _described(
    machine: Machine, lanes: np.ndarray, descriptor: np.ndarray, shape: tuple[int, int], kind: str,
    is_transposed: bool,
) -> np.ndarray:  # fmt: skip
    """Return a matrix in shared memory [warpgroups, *shape] from a descriptor.

    It gives the start, the distances of core matrices of 8 rows in both directions, and the swizzle, which
    permutes 16 bytes within rows.
    """
    of_threads = np.broadcast_to(descriptor, lanes.size).reshape(lanes.shape).astype(np.uint64)
    if (of_threads != of_threads[:, :1]).any():
        raise Fault("threads of a warpgroup have different descriptors")
    start = ((of_threads[:, 0] & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)[:, None, None]
    layouts = np.unique(of_threads >> np.uint64(14))
    assert len(layouts) == 1, "matrices of all warpgroups are laid out alike"
    x = int(layouts[0]) << 14
    leading, stride = (x >> 16 & 0x3FFF) << 4, (x >> 32 & 0x3FFF) << 4
    width = {0: 16, 1: 128, 2: 64, 3: 32}[x >> 62]
    assert not x >> 49 & 7, "no offset of the base"
    size = np.dtype(TYPES[kind]).itemsize
    row, k = np.meshgrid(np.arange(shape[0]), np.arange(shape[1]), indexing="ij")
    per_row = width // size
    if is_transposed:
        assert x >> 62, "transposed and not swizzled"
        at = start + row % per_row * size + row // per_row * leading + k % 8 * width + k // 8 * stride
    elif not x >> 62:
        at = start + row % 8 * 16 + row // 8 * stride + k // per_row * leading + k % per_row * size
    else:
        at = start + row % 8 * width + row // 8 * stride + k * size
    if x >> 62:
        at = at ^ ((at >> 7 & (width // 16 - 1)) << 4)
    # Each warp reads all of it.
    warps = lanes.reshape(len(lanes), 4, 32)[:, :, 0]
    flat = np.repeat(at.reshape(len(lanes), 1, -1), 4, axis=1).reshape(-1).astype(np.uint64)
    first = np.repeat(warps.reshape(-1), at[0].size)
    machine.operands.append((first, machine.n_products[first], flat, np.dtype(f"u{size}")))
    raw = machine.read_operands(machine.operands[-1]).reshape(len(lanes), 4, *shape)[:, 0]
    return _numbers(raw, kind)[..., 0]


def fence(machine: Machine, one: Instruction) -> None:
    """wgmma.fence: registers are always in order here."""


def commit(machine: Machine, one: Instruction) -> None:
    """Commit a group of wgmma (wgmma.commit_group)."""
    machine.n_products[machine.at] += 1


def wait(machine: Machine, one: Instruction) -> None:
    """wgmma.wait_group: all but these threads' latest groups have read their matrices."""
    complete = np.zeros(len(machine.thread), np.int64)
    complete[machine.at] = machine.n_products[machine.at] - int(str(one.operands[0]), 0)
    left = []
    for lanes, group, addresses, dtype in machine.operands:
        if (keeps := group >= complete[lanes]).any():
            left.append((lanes[keeps], group[keeps], addresses[keeps], dtype))
    machine.operands = left


INSTRUCTIONS: dict[str, Callable[[Machine, Instruction], None]] = {
    "ldmatrix": load_matrix, "stmatrix": store_matrix, "mma": multiply,
    "wgmma.mma_async": multiply_warpgroup, "wgmma.fence": fence, "wgmma.commit_group": commit,
    "wgmma.wait_group": wait,
}  # fmt: skip
