"""Triton kernels compiled for devices that are not present, and facts about the result.

Launches are recorded: functions of triton_kernels run on tensors without memory (torch's meta device), and
the arguments of `launch` are compiled as the launch itself would.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton_sources import source_of

from hotset.backends.triton import launch as launcher
from hotset.backends.triton import triton_kernels as kernels

TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 86, 89, 90, 120)}
TARGETS |= {name: GPUTarget("hip", name, 32) for name in ("gfx1100", "gfx1201")}
# Bytes of shared memory per block. Sources: "Maximum amount of shared memory per thread block" in the CUDA
# C++ Programming Guide's table of compute capabilities; the local data share of a workgroup in the ISA
# manuals of AMD's RDNA3 and RDNA4.
MAX_SHARED = {
    target: {"sm_80": 163, "sm_90": 227, "gfx1100": 64, "gfx1201": 64}.get(name, 99) << 10
    for name, target in TARGETS.items()
}
CODE = {"cuda": "cubin", "hip": "hsaco"}
INT32 = (1 << 31) - 1
SAME = ("tt.splat", "tt.broadcast", "tt.expand_dims", "arith.extsi")  # these keep the value of a number
SUMS = ("arith.addi", "arith.subi", "arith.muli", "arith.select")


def compiled(
    run: Callable[[], None], target: GPUTarget, patch: pytest.MonkeyPatch
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Record the launches of `run`, compile each, and yield the kernel's name, constants and result."""
    launches: list[tuple[Any, ...]] = []

    def record(
        kernel: Any, grid: Any, *args: Any, warps: int, fused: bool = True, stages: int | None = None,
        at_once: bool = False, **constants: Any,
    ) -> None:  # fmt: skip
        options = {"num_warps": warps, "enable_fp_fusion": fused}
        launches.append(
            (kernel, args, options | ({} if stages is None else {"num_stages": stages}), constants)
        )

    patch.setattr(launcher, "launch", record)
    patch.setattr(kernels, "shared_memory", lambda device: MAX_SHARED[target])
    patch.setattr(kernels, "is_amd", lambda x: target.backend == "hip")
    patch.setattr(kernels, "is_hopper", lambda x: target.backend == "cuda" and target.arch == 90)
    run()
    for kernel, args, options, constants in launches:
        made = triton.compile(source_of(kernel, args, constants), target, options=options)
        assert made.asm[CODE[target.backend]][:4] == b"\x7fELF"
        if target.backend == "cuda":
            assert not fused_across_threads(made.asm["ptx"]), (kernel.__name__, constants, options)
        given = zip(kernel.arg_names, args, strict=False)
        large = {name for name, arg in given if isinstance(arg, torch.Tensor) and arg.numel() > INT32}
        assert not short_offsets(made.asm["ttir"], large), kernel.__name__
        yield kernel.__name__, constants, made


def fused_across_threads(ptx: str) -> list[str]:
    """Return the instructions that add a thread's own unrounded product to another thread's number.

    Both threads exchange their numbers and get different sums. If several threads hold a value and any of
    them may store it, its last bits are then random.
    """
    made: dict[str, str] = {}  # register → the kind of its number
    found = []
    for line in ptx.splitlines():
        if not (parts := re.match(r"\s*(?:@!?%\w+\s+)?([a-z][\w.]*)\s+([^;]*);", line)):
            continue
        name, (to, *of) = parts[1], [one.strip() for one in parts[2].split(",")]
        kinds = [made.get(one, "") for one in of]
        if name.startswith("fma.rn.f32") and kinds[2] == "sent":
            found.append(line.strip())
        if re.match(r"(add|sub)\.f32", name) and {"sent", "product"} <= set(kinds):  # may be fused
            found.append(line.strip())
        if name.startswith("shfl."):
            made[to.split("|")[0]] = "sent"
        elif name.startswith("mul.f32"):
            made[to] = "product"
        elif name.startswith("mov.b32"):
            made[to] = kinds[0]
        else:
            made.pop(to, None)
    return found


def short_offsets(ttir: str, large: set[str]) -> list[str]:
    """Return the places where a large pointer moves by a product of two int32 variables.

    If the memory has more elements than int32 counts, such a product (for example a token's number times the
    row length) may overflow.
    """
    made: dict[str, tuple[str, list[str], bool]] = {}  # name → operation, operands, whether it is int32
    found = []

    def origin(name: str) -> str:
        while name in made:
            name = made[name][1][0]
        return name

    def is_constant(name: str) -> bool:
        operation, operands, _ = made.get(name, ("", [], False))
        return operation == "arith.constant" or (operation in SAME and is_constant(operands[0]))

    def is_product(name: str) -> bool:
        operation, operands, is_int32 = made.get(name, ("", [], False))
        if operation == "arith.muli" and is_int32 and not any(map(is_constant, operands)):
            return True
        return operation in (*SAME, *SUMS) and any(map(is_product, operands))

    for line in ttir.splitlines():
        if not (parts := re.match(r"\s*%([\w.]+) = ([\w.]+)\s*(.*?) : (.*?)(?: loc\(.*)?$", line)):
            continue
        name, operation, given, type_ = parts.groups()
        made[name] = operation, re.findall(r"%([\w.#]+)", given), type_.endswith("i32") or "i32>" in type_
        if operation == "tt.addptr" and origin(name) in large and is_product(made[name][1][1]):
            found.append(line.strip())
    return found


def resources(made: Any, maker: str) -> dict[str, int]:
    code = made.asm[CODE[maker]]
    used = _resources_of_cubin(code) if maker == "cuda" else _resources_of_hsaco(made.asm["amdgcn"])
    return {"shared": made.metadata.shared} | used


def _resources_of_cubin(code: bytes) -> dict[str, int]:
    text = _tool("cuobjdump", code, "--dump-resource-usage")
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}  # bytes per thread


def _resources_of_hsaco(assembly: str) -> dict[str, int]:
    found = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly))
    return {"registers": int(found["vgpr_count"]), "spilled": int(found["vgpr_spill_count"])}


@dataclass(frozen=True)
class Loop:
    """Instructions of a loop as the device executes them.

    It counts all of them, barriers, loads and stores of shared memory, global loads, and copies from global
    to shared memory for which no thread waits.
    """

    instructions: int
    barriers: int
    shared_loads: int
    shared_stores: int
    loads: int
    copies: int


def longest_loop(code: bytes) -> Loop:
    """Return the longest loop of a kernel without a loop inside."""
    text = _tool("nvdisasm", code, "-c")
    labels: dict[str, int] = {}
    names: list[str] = []
    loops: list[tuple[int, int]] = []  # first and last instruction
    for line in text.splitlines():
        if found := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[found[1]] = len(names)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*);", line):
            jump = re.search(r"`\((\.L_x_\d+)\)", found[2])
            if found[1].startswith("BRA") and jump and jump[1] in labels:
                loops.append((labels[jump[1]], len(names)))
            names.append(found[1].split(".")[0])
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    first, last = max(inner, key=lambda ends: ends[1] - ends[0])
    counted = Counter(names[first : last + 1])
    kinds = (("BAR",), ("LDS", "LDSM"), ("STS", "STSM"), ("LDG",), ("LDGSTS",))
    return Loop(counted.total(), *(sum(counted[name] for name in kind) for kind in kinds))


def _tool(name: str, code: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
    return done.stdout
