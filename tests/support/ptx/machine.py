"""Executes the threads of a grid, all at once: a register is an array with a number for each thread.

Threads at the same instruction execute it together, the furthest behind first, so that diverged threads meet
again. Instructions for a whole warp wait for all of its threads. At a barrier the threads of a block wait for
each other. Asynchronous copies arrive as late as possible: when their group is awaited.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ptx import arithmetic, tensor_cores
from ptx.arithmetic import DTYPES, PACKED, Values
from ptx.memory import Fault, Memory, Shared
from ptx.program import Instruction, Operand, Program

WARP = 32
AT_ONCE = 1 << 13  # threads that are executed together, or one block
MOST_STEPS = 3_000_000  # instructions of a launch, each for many threads: more is an endless loop
REGISTERS: dict[str, Any] = {
    "p": np.bool_, "rs": np.uint16, "h": np.uint16, "r": np.uint32, "f": np.uint32, "hh": np.uint32,
    "b": np.uint32, "rd": np.uint64, "fd": np.uint64,
}  # fmt: skip
Lanes = slice | np.ndarray


class Apart(Fault):
    """Only some threads of a warp execute an instruction for all: a fault, unless the others arrive later."""


class Machine:
    """Some blocks of a launch.

    grid: its three sides. blocks: numbers of the executed blocks. dependent: it begins while the previous
    launch is running.
    """

    def __init__(
        self, program: Program, memory: Memory, shared: int, grid: Sequence[int], arguments: Sequence[int],
        blocks: np.ndarray, dependent: bool = False,
    ) -> None:  # fmt: skip
        n = program.n_threads
        self.program, self._memory, self.arguments = program, memory, arguments
        self.is_early = np.full(n * len(blocks), dependent)  # threads before griddepcontrol.wait
        self.shared = Shared(len(blocks), shared)
        self.block = np.repeat(np.arange(len(blocks)), n)  # of each thread, counted here
        self.number = np.repeat(blocks, n)  # and in the launch
        self.thread = np.tile(np.arange(n, dtype=np.uint32), len(blocks))
        self.warp = (self.thread // WARP).astype(np.int64)
        x, y, z = (np.uint32(side) for side in grid)
        number = self.number.astype(np.uint32)
        self.special = {
            "%tid.x": self.thread, "%laneid": self.thread % np.uint32(WARP), "%ntid.x": np.uint32(n),
            "%ctaid.x": number % x, "%ctaid.y": number // x % y, "%ctaid.z": number // x // y,
            "%nctaid.x": x, "%nctaid.y": y, "%nctaid.z": z,
        }  # fmt: skip
        self.registers: dict[str, np.ndarray] = {}
        self.at: Lanes = slice(None)  # the threads that execute the current instruction
        self.copies: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []  # see _copy
        self.n_groups = np.zeros(len(self.thread), np.int64)  # groups of asynchronous copies, by thread
        # For wgmma: the reading thread of each warp, its group, the places, and the type of numbers.
        self.operands: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.dtype]] = []
        self.n_products = np.zeros(len(self.thread), np.int64)  # groups of wgmma, by thread

    # ---- operands

    def get(self, operand: Operand, kind: str) -> Values:
        """Return the threads' values: [k], [k, 2] if a register holds two, or one for all."""
        assert isinstance(operand, str), operand
        if kind in PACKED:
            bits, half = self.get(operand, "b64" if kind == "f32x2" else "b32"), PACKED[kind]
            pair = np.ascontiguousarray(bits)[..., None].view(DTYPES[half])
            return arithmetic.from_bfloat16(pair) if half == "bf16" else pair
        dtype = np.dtype(DTYPES[kind])
        if operand in self.special:
            found = np.asarray(self.special[operand])
            found = (found[self.at] if found.ndim else found).view(dtype)
        elif (number := _number(operand, dtype)) is not None:
            found = number
        else:
            found = self._register(operand)[self.at]
            if found.itemsize != dtype.itemsize:
                found = found.astype(f"u{dtype.itemsize}")
            found = found.view(dtype)
        return arithmetic.from_bfloat16(found) if kind == "bf16" else found

    def put(self, operand: Operand, value: Values, kind: str) -> None:
        """Store `value`. kind: the type of its numbers."""
        assert isinstance(operand, str), operand
        if operand == "_":
            return
        name, _, other = operand.partition("|")
        assert not other or other == "_", operand
        if kind in PACKED:
            half = arithmetic.to_bfloat16(value) if kind == "bf16x2" else value
            value = np.ascontiguousarray(half).view("u8" if kind == "f32x2" else "u4")[..., 0]
        elif kind == "bf16":
            value = arithmetic.to_bfloat16(value)
        to, value = np.dtype(_dtype_of(name)), np.asarray(value)
        if value.dtype != to:
            if value.itemsize != to.itemsize:  # wider: sign-extended
                value = value.view(f"u{value.itemsize}") if value.dtype.kind == "f" else value
                value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{to.itemsize}")
            value = value.view(to)
        if isinstance(self.at, slice):
            n = len(self.thread)
            self.registers[name] = value if value.shape == (n,) else np.full(n, value)
        else:
            self._register(name)[self.at] = value

    def _register(self, name: str) -> np.ndarray:
        """Return a register; an unwritten one holds old data: conspicuous numbers."""
        if name not in self.registers:
            dtype = np.dtype(_dtype_of(name))
            junk = np.full(8, 0x7F, np.uint8).view(dtype)[0] if dtype.kind != "b" else True
            self.registers[name] = np.full(len(self.thread), junk, dtype)
        return self.registers[name]

    def addresses(self, operand: Operand) -> np.ndarray:
        """Return the addresses of "[register+number]", uint64 [k]."""
        assert isinstance(operand, str), operand
        found = re.fullmatch(r"\[([%\w]+)(?:\+(-?\w+))?\]", operand)
        assert found is not None, operand
        offset = int(found[2] or "0", 0)
        if found[1] == "global_smem":
            return np.full(self.n_lanes, offset, np.uint64)
        base = self._register(found[1])[self.at]
        if base.itemsize == 4:
            return (base.astype(np.int64) + offset).astype(np.uint64)
        return base + np.uint64(offset % (1 << 64))

    @property
    def n_lanes(self) -> int:
        return len(self.thread) if isinstance(self.at, slice) else len(self.at)

    def full(self, value: Values) -> np.ndarray:
        """Return one number for each current thread."""
        return value if value.ndim else np.full(self.n_lanes, value)

    def by_warp(self, value: Values) -> np.ndarray:
        """Return [warps, 32] for instructions that a whole warp executes."""
        if not isinstance(self.at, slice):
            lane = self.at % WARP
            if len(lane) % WARP or (lane.reshape(-1, WARP) != np.arange(WARP)).any():
                raise Apart("some threads of a warp execute what all of it must")
        return self.full(value).reshape(-1, WARP)

    @property
    def memory(self) -> Memory:
        """Return the device's memory, which the previous launch may still read and write."""
        if self.is_early[self.at].any():
            raise Fault("global memory is touched before the launch before is over")
        return self._memory

    # ---- running

    def run(self) -> int:
        """Execute all threads to their end. Returns the number of executed instructions."""
        program = self.program
        groups: dict[int, np.ndarray] = {0: np.arange(len(self.thread))}
        waiting = np.full(len(self.thread), -1)  # at a barrier: where they continue
        n_steps, late = 0, set[int]()  # places where threads wait for others of their warp
        while groups:
            place = min(groups.keys() - late, default=min(groups))
            lanes, is_last = groups.pop(place), place in late
            while True:
                instruction = program.instructions[place]
                n_steps += 1
                try:
                    goes_on = self._step(instruction, lanes, place, groups, waiting)
                    late.clear()
                except Fault as fault:
                    if not isinstance(fault, Apart) or is_last:
                        raise Fault(f"{program.name}: {instruction.text}: {fault}") from None
                    late.add(place)
                    goes_on = False
                    _join(groups, place, lanes)
                if not goes_on:
                    break
                place += 1
                if place in groups:
                    _join(groups, place, lanes)
                    break
            if n_steps > MOST_STEPS:
                raise Fault(f"{program.name} does not end")
        if (waiting >= 0).any():
            raise Fault(f"{program.name}: a barrier that some threads of a block do not reach")
        if self.is_early.any():  # the next launch would not wait for the previous one
            raise Fault(f"{program.name}: a thread ends before the launch before is over")
        return n_steps

    def _step(
        self,
        one: Instruction,
        lanes: np.ndarray,
        place: int,
        groups: dict[int, np.ndarray],
        waiting: np.ndarray,
    ) -> bool:
        """Execute an instruction.

        Returns whether all of `lanes` continue with the next one. If not, the continuing threads and those
        that jump are in `groups`.
        """
        everything: Lanes = slice(None) if len(lanes) == len(self.thread) else lanes
        self.at, passed = everything, None
        if one.guard is not None:
            chosen = self._register(one.guard)[everything] != one.negated
            if not chosen.any():
                return True
            if not chosen.all():
                self.at, passed = lanes[chosen], lanes[~chosen]
        match one.kinds:
            case ("bra", *_):
                mine = lanes if isinstance(self.at, slice) else self.at
                _join(groups, self.program.labels[str(one.operands[0])], mine)
            case ("ret",) | ("exit",):
                pass
            case ("bar" | "barrier", "sync", *_):
                self._wait(lanes, place, groups, waiting)
                return False
            case _:
                self._execute(one)
                return True
        if passed is not None:
            _join(groups, place + 1, passed)
        return False

    def _wait(
        self, lanes: np.ndarray, place: int, groups: dict[int, np.ndarray], waiting: np.ndarray
    ) -> None:
        self.by_warp(np.zeros(()))
        waiting[lanes] = place + 1
        by_block = waiting.reshape(-1, self.program.n_threads)
        here = (by_block >= 0).all(axis=1) & (by_block == place + 1).any(axis=1)
        self.shared.barrier(np.flatnonzero(here))
        for lanes_, group, at, dtype in self.operands:  # they are still being read
            mine = here[self.block[lanes_]]
            self.read_operands((lanes_[mine], group[mine], at[mine], dtype))
        free = np.flatnonzero(here[self.block])
        for start in np.unique(waiting[free]):
            _join(groups, int(start), free[waiting[free] == start])
        waiting[free] = -1

    def _execute(self, one: Instruction) -> None:
        for name in (one.opcode, *(".".join(one.kinds[:n]) for n in (3, 2, 1))):
            if name in INSTRUCTIONS:
                INSTRUCTIONS[name](self, one)
                return
        raise NotImplementedError(one.text)

    # ---- instructions that touch memory or other threads

    def parameter(self, one: Instruction) -> None:
        found = re.search(r"_param_(\d+)", str(one.operands[1]))
        assert found is not None
        bits = np.array(self.arguments[int(found[1])] % (1 << 64), np.uint64)
        dtype = np.dtype(DTYPES[one.type])
        self.put(one.operands[0], bits.astype(f"u{dtype.itemsize}").view(dtype), one.type)

    def load(self, one: Instruction) -> None:
        to = one.operands[0] if isinstance(one.operands[0], tuple) else (one.operands[0],)
        dtype, addresses = np.dtype(DTYPES[one.type]), self.addresses(one.operands[1])
        if "shared" in one.kinds:
            mine = self.block[self.at], self.warp[self.at]
            found = self.shared.load(addresses, dtype, len(to), *mine)
        else:
            found = self.memory.load(addresses, dtype, len(to), self.number[self.at])
        kind = "b16" if one.type == "bf16" else one.type
        for i, name in enumerate(to):
            self.put(name, found[:, i].copy(), kind)

    def store(self, one: Instruction) -> None:
        given = one.operands[1] if isinstance(one.operands[1], tuple) else (one.operands[1],)
        kind = f"b{8 * np.dtype(DTYPES[one.type]).itemsize}"
        values = np.stack([self.full(self.get(name, kind)) for name in given], axis=1)
        if "shared" in one.kinds:
            self.store_shared(self.addresses(one.operands[0]), values)
        else:
            self.memory.store(self.addresses(one.operands[0]), values, self.number[self.at])

    def store_shared(self, addresses: np.ndarray, values: np.ndarray) -> None:
        self.shared.store(addresses, values, self.block[self.at], self.warp[self.at])

    def read_operands(self, operands: tuple[np.ndarray, np.ndarray, np.ndarray, np.dtype]) -> np.ndarray:
        lanes, _, addresses, dtype = operands
        return self.shared.load(addresses, dtype, 1, self.block[lanes], self.warp[lanes])

    def copy(self, one: Instruction) -> None:
        """cp.async: copy 4, 8 or 16 bytes; bytes beyond the requested number become 0."""
        n = int(str(one.operands[2]), 0) // 4
        lanes = np.arange(len(self.thread))[self.at]
        size = self.full(self.get(one.operands[3], "u32") if len(one.operands) > 3 else np.uint32(4 * n))
        values, reads = np.zeros((len(lanes), n), np.uint32), size > 0
        if ((size != 0) & (size != 4 * n)).any():
            raise NotImplementedError(one.text)
        if reads.any():
            source = self.addresses(one.operands[1])[reads]
            values[reads] = self.memory.load(source, np.dtype(np.uint32), n, self.number[lanes][reads])
        to = self.addresses(one.operands[0])
        self.shared.check_store(self.shared.places(to, 4 * n, self.block[lanes]), 4 * n, self.warp[lanes])
        self.copies.append((lanes, self.n_groups[lanes], to, values))

    def commit(self, one: Instruction) -> None:
        self.n_groups[self.at] += 1

    def await_copies(self, one: Instruction) -> None:
        """Complete the copies of the waiting threads, except the latest groups."""
        all_ = one.kinds[2] == "wait_all"
        if all_:
            self.n_groups[self.at] += 1
        complete = np.zeros(len(self.thread), np.int64)
        complete[self.at] = self.n_groups[self.at] - (0 if all_ else int(str(one.operands[0]), 0))
        left = []
        for lanes, group, to, values in self.copies:
            done = group < complete[lanes]
            if done.any():
                mine = lanes[done]
                self.shared.store(to[done], values[done], self.block[mine], self.warp[mine])
            if not done.all():
                left.append((lanes[~done], group[~done], to[~done], values[~done]))
        self.copies = left

    def move(self, one: Instruction) -> None:
        to, given = one.operands
        n = DTYPES[one.type](0).itemsize
        if isinstance(to, tuple):
            parts = self.full(self.get(given, one.type))[:, None].view(f"u{n // len(to)}")
            for i, name in enumerate(to):
                self.put(name, parts[:, i].copy(), f"b{8 * n // len(to)}")
        elif isinstance(given, tuple):
            one_part = f"b{8 * n // len(given)}"
            parts = np.stack([self.full(self.get(name, one_part)) for name in given], axis=1)
            self.put(to, parts.view(f"u{n}")[:, 0], f"b{8 * n}")
        elif given == "global_smem":
            self.put(to, np.zeros((), f"u{n}"), f"b{8 * n}")
        else:
            self.put(to, self.get(given, one.type).copy(), one.type)

    def shuffle(self, one: Instruction) -> None:
        """shfl: return another thread's number, or the thread's own where the source is out of bounds."""
        to, value, by, bounds = one.operands[:4]
        lane = np.arange(WARP)
        other = self.by_warp(self.get(by, "b32")).astype(np.int64)
        c = self.by_warp(self.get(bounds, "b32")).astype(np.int64)
        last, segment = c & 31, c >> 8 & 31
        first = lane & segment
        last = first | (last & ~segment)
        ways = {
            "bfly": lane ^ other,
            "idx": first | (other & ~segment),
            "up": lane - other,
            "down": lane + other,
        }
        source = ways[one.kinds[2]]
        is_there = source >= last if one.kinds[2] == "up" else source <= last
        values = self.by_warp(self.get(value, "b32"))
        found = np.take_along_axis(values, np.where(is_there, source, lane) & 31, axis=1)
        self.put(to, found.reshape(-1), "b32")

    def reduce_warp(self, one: Instruction) -> None:
        """Reduce over a warp (redux)."""
        values = self.by_warp(self.get(one.operands[1], one.type))
        found = {
            "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[one.kinds[2]].reduce(values, axis=1, dtype=values.dtype)  # fmt: skip
        self.put(one.operands[0], np.repeat(found, WARP), one.type)

    def vote(self, one: Instruction) -> None:
        chosen = self.by_warp(self.get(one.operands[1], "pred"))
        if one.kinds[2] == "ballot":
            bits = (chosen.astype(np.uint32) << np.arange(WARP, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
            self.put(one.operands[0], np.repeat(bits, WARP), "b32")
        else:
            found = {"any": chosen.any(axis=1), "all": chosen.all(axis=1)}[one.kinds[2]]
            self.put(one.operands[0], np.repeat(found, WARP), "pred")

    def atomic(self, one: Instruction) -> None:
        """Execute atom and red: additions and exchanges."""
        (what,) = {"add", "exch"} & set(one.kinds)
        values, to = self.full(self.get(one.operands[-1], one.type)), one.operands[-2]
        before = self.memory.exchange(self.addresses(to), values, is_sum=what == "add")
        if one.kinds[0] == "atom":
            self.put(one.operands[0], before, one.type)

    # ---- instructions on numbers

    def compare(self, one: Instruction) -> None:
        found = arithmetic.COMPARE[one.kinds[1]](*(self.get(name, one.type) for name in one.operands[1:3]))
        if len(one.operands) == 4:
            found = arithmetic.BINARY[one.kinds[2]](found, self.get(one.operands[3], "pred"))
        self.put(one.operands[0], found, "pred")

    def select(self, one: Instruction) -> None:
        a, b = (self.get(name, one.type) for name in one.operands[1:3])
        self.put(one.operands[0], np.where(self.get(one.operands[3], "pred"), a, b), one.type)

    def convert(self, one: Instruction) -> None:
        to, of = one.kinds[-2:]
        given = [self.get(name, of) for name in one.operands[1:]]
        if to in PACKED:  # the first is the upper half
            dtype = np.float32 if to == "bf16x2" else DTYPES[PACKED[to]]
            upper, lower = (self.full(x) for x in given)
            self.put(one.operands[0], np.stack([lower, upper], axis=1).astype(dtype), to)
        elif to == "tf32":
            self.put(one.operands[0], arithmetic.to_tf32(given[0]), "b32")
        else:
            dtype = np.float32 if to == "bf16" else DTYPES[to]
            self.put(one.operands[0], arithmetic.converted(given[0], dtype, one.kinds), to)

    def unary(self, one: Instruction) -> None:
        found = arithmetic.UNARY[one.kinds[0]](self.get(one.operands[1], one.type))
        self.put(one.operands[0], found, _kind_of(found, one.type))

    def binary(self, one: Instruction) -> None:
        name, kind = one.kinds[0], one.type
        if "wide" in one.kinds or "hi" in one.kinds:
            self.multiply(one)
            return
        a = self.get(one.operands[1], kind)
        b = self.get(one.operands[2], "u32" if name in ("shl", "shr") else kind)
        found = arithmetic.BINARY[name](a, b)
        if "NaN" in one.kinds:
            found = np.where(np.isnan(a) | np.isnan(b), np.nan, found).astype(found.dtype)
        self.put(one.operands[0], found, kind)

    def multiply(self, one: Instruction) -> None:
        """Execute mul.wide, mul.hi and mad."""
        kind, n = one.type, DTYPES[one.type](0).itemsize
        a, b = (self.get(name, kind) for name in one.operands[1:3])
        if "wide" in one.kinds:
            kind = f"{kind[0]}{16 * n}"
            found = a.astype(DTYPES[kind]) * b.astype(DTYPES[kind])
        else:
            found = arithmetic.high_product(a, b) if "hi" in one.kinds else a * b
        if one.kinds[0] == "mad":
            found = found + self.get(one.operands[3], kind)
        self.put(one.operands[0], found, kind)

    def fuse(self, one: Instruction) -> None:
        a, b, c = (self.get(name, one.type) for name in one.operands[1:4])
        self.put(one.operands[0], arithmetic.fused(a, b, c), one.type)

    def bits(self, one: Instruction) -> None:
        kind = one.type if one.type in DTYPES else "b32"
        first = [self.get(one.operands[1], kind)]
        found = arithmetic.OTHER[one.kinds[0]](*first, *(self.get(name, "u32") for name in one.operands[2:]))
        self.put(one.operands[0], found, kind)

    def funnel(self, one: Instruction) -> None:
        a, b, n = (self.get(name, "b32") for name in one.operands[1:4])
        self.put(one.operands[0], arithmetic.funnel(a, b, n, left="l" in one.kinds), "b32")

    def depend(self, one: Instruction) -> None:
        """griddepcontrol: wait for the previous launch; launch_dependents does nothing here."""
        if one.kinds[1] == "wait":
            self.is_early[self.at] = False

    def nothing(self, one: Instruction) -> None:
        """Ignore fences: everything is in order here."""


def _kind_of(found: Values, kind: str) -> str:
    return kind if kind in PACKED or kind == "bf16" or found.dtype == DTYPES[kind] else "b32"


def _join(groups: dict[int, np.ndarray], place: int, lanes: np.ndarray) -> None:
    if place in groups:
        lanes = np.union1d(groups[place], lanes)
    groups[place] = lanes


def _dtype_of(name: str) -> Any:
    found = re.fullmatch(r"%?([a-z]+)\d*", name)
    assert found is not None, name
    return REGISTERS[found[1]]


def _number(text: str, dtype: np.dtype) -> np.ndarray | None:
    """Return an immediate value."""
    if text.startswith("%") or not re.match(r"-?\d", text):
        return None
    if text.startswith(("0f", "0d")):
        return np.array(int(text[2:], 16), "u4" if text[1] == "f" else "u8").view(dtype)
    value = int(text.rstrip("U"), 0)
    if dtype.kind == "b":
        return np.array(value != 0)
    return np.array(value % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)


INSTRUCTIONS: dict[str, Callable[[Machine, Instruction], None]] = {
    "ld.param": Machine.parameter, "ld": Machine.load, "st": Machine.store, "mov": Machine.move,
    "cp.async": Machine.copy, "cp.async.commit_group": Machine.commit,
    "cp.async.wait_group": Machine.await_copies, "cp.async.wait_all": Machine.await_copies,
    "shfl": Machine.shuffle, "redux": Machine.reduce_warp, "vote": Machine.vote,
    "atom": Machine.atomic, "red": Machine.atomic, "setp": Machine.compare, "selp": Machine.select,
    "cvt": Machine.convert, "fma": Machine.fuse, "mad": Machine.multiply, "shf": Machine.funnel,
    "fence": Machine.nothing, "membar": Machine.nothing, "griddepcontrol": Machine.depend,
    "bar.warp": Machine.nothing,
}  # fmt: skip
INSTRUCTIONS |= dict.fromkeys(arithmetic.UNARY, Machine.unary)
INSTRUCTIONS |= dict.fromkeys(arithmetic.BINARY, Machine.binary)
INSTRUCTIONS |= dict.fromkeys(arithmetic.OTHER, Machine.bits)
INSTRUCTIONS |= tensor_cores.INSTRUCTIONS


def run(
    program: Program, memory: Memory, shared: int, grid: Sequence[int], arguments: Sequence[int],
    dependent: bool = False,
) -> int:  # fmt: skip
    """Execute a launch, its blocks in random order.

    Returns the number of executed instructions. dependent: see Machine. Raises Fault.
    """
    sides = (*grid, 1, 1)[:3]
    blocks = np.random.default_rng(0).permutation(int(np.prod(sides)))
    each = max(1, AT_ONCE // program.n_threads)
    with np.errstate(all="ignore"):
        n_steps = sum(
            Machine(program, memory, shared, sides, arguments, blocks[first : first + each], dependent).run()
            for first in range(0, len(blocks), each)
        )
        memory.check_order()
    return n_steps
