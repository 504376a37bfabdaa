"""AMD's machine code of our kernels compared with llama.cpp's for the same job, without the hardware.

usage: python bench/vulkan_machine_code.py [--llama ggml/src/ggml-vulkan/vulkan-shaders] [--gpu navi21 ...]

Mesa's RADV has a null device: it compiles kernels for any AMD GPU and prints the code and its registers. The
result is the number of instructions, except those that only wait, per product of two numbers (a weight and an
input; a query and a key) on the longest path through the outermost loop that multiplies. Inner loops count as
often as they run, so loading weights into shared memory is included. With llama.cpp's shaders, the script
ends with an error that names the kernels with more instructions, registers or spills than llama.cpp's. It
needs Mesa's driver for AMD GPUs (Debian: mesa-vulkan-drivers), and glslc for llama.cpp's shaders. These are
compiled like vulkan-shaders-gen does, and specialised like ggml-vulkan.cpp does for that GPU without
cooperative matrices, which this driver lacks. If glslc lacks integer dot products, they are SPIR-V
instructions.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotset import _core
from hotset.backends.vulkan import kernels
from hotset.formats.quants import GGMLType

T = GGMLType
ICD = "/usr/share/vulkan/icd.d/radeon_icd.x86_64.json"
PLAIN = {"FLOAT_TYPE": "float", "FLOAT_TYPEV2": "vec2", "FLOAT_TYPEV4": "vec4", "D_TYPE": "float"}
HALVES = {
    "FLOAT16": "1", "FLOAT_TYPE": "float16_t", "FLOAT_TYPEV2": "f16vec2", "FLOAT_TYPEV4": "f16vec4",
    "FLOAT_TYPEV8": "f16mat2x4", "FLOAT_TYPE_MAX": "float16_t(65504.0)", "D_TYPE": "float",
}  # fmt: skip
SUMS = {"ACC_TYPE": "float", "ACC_TYPEV2": "vec2", "ACC_TYPEV4": "vec4", "ACC_TYPE_VEC4": "vec4"}
FLOAT_B = {"B_TYPE": "float", "B_TYPEV2": "vec2", "B_TYPEV4": "vec4"}
DOT = """#extension GL_EXT_spirv_intrinsics : require
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_of_bytes(int a, int b, spirv_literal int packed);
int dotPacked4x8EXT(int a, int b) { return dot_of_bytes(a, b, 0); }
"""
# The number of products of two numbers that an instruction computes, by the beginning of its name.
PRODUCTS = {"v_dot4": 4, "v_dot2": 2, "v_pk_fma": 2, "v_fma": 1, "v_mac": 1, "v_mad_f": 1, "v_mad_mix": 1}
COLUMNS = "instructions", "VGPRs", "spills", "subgroups"
WAITING = ("s_waitcnt", "s_nop", "s_clause", "s_delay", "s_inst_prefetch")


@dataclass(frozen=True)
class Code:
    """RADV's code of a kernel. per_product: instructions; subgroups: the number that a SIMD has at a time."""

    per_product: float
    vgprs: int
    spills: int
    subgroups: int

    def above(self, other: Code) -> list[str]:
        """Return the numbers that are worse than another kernel's; more subgroups are better."""
        pairs = zip(COLUMNS[:3], self.columns(), other.columns(), strict=False)
        return [name for name, own, its in pairs if float(own) > float(its)]

    def columns(self) -> tuple[str, ...]:
        return f"{self.per_product:.2f}", str(self.vgprs), str(self.spills), str(self.subgroups)


class Loops:
    """The loops of a disassembly, and the longest way through one of them."""

    def __init__(self, code: str, kinds: Sequence[str]) -> None:
        lines = [line.strip() for line in code.splitlines()]
        self._lines = [line for line in lines if line and not line.startswith((*WAITING, ";"))]
        self._kinds = kinds
        self._labels = {line[:-1]: i for i, line in enumerate(self._lines) if re.fullmatch(r"BB\d+:", line)}
        self.ends: dict[int, int] = {}  # by their start
        for i in range(len(self._lines)):
            if (to := self._target(i)) is not None and to < i:
                self.ends[to] = i
        self.trips: dict[int, int] = {}

    def _target(self, i: int) -> int | None:
        branch = re.match(r"s_c?branch\w*\s+(BB\d+)", self._lines[i])
        return self._labels.get(branch[1]) if branch else None

    def outermost(self) -> list[int]:
        return [at for at in self.ends if not any(start < at < end for start, end in self.ends.items())]

    def inside(self, start: int) -> list[int]:
        """Return the loops in a loop, in the order of the code."""
        return [at for at in sorted(self.ends) if start < at < self.ends[start]]

    def products(self, first: int, last: int) -> int:
        return sum(
            n for line in self._lines[first : last + 1] for name, n in PRODUCTS.items()
            if line.startswith(name) and name in self._kinds
        )  # fmt: skip

    def longest(self, start: int) -> tuple[int, int]:
        """Return the instructions and products of one iteration of the loop that starts there."""
        end, reached = self.ends[start], {start: (0, 0)}

        def reach(at: int, instructions: int, products: int) -> None:
            if start < at <= end:
                reached[at] = max(reached.get(at, (0, 0)), (instructions, products))

        for i in range(start, end + 1):
            if i not in reached:
                continue
            instructions, products = reached[i]
            if i != start and i in self.ends:
                inner, n = self.longest(i), self.trips.get(i, 1)
                reach(self.ends[i] + 1, instructions + n * inner[0], products + n * inner[1])
                continue
            instructions += not self._lines[i].startswith("BB")
            products += self.products(i, i)
            if i == end:
                return instructions, products
            if (to := self._target(i)) is not None:
                reach(to, instructions, products)
            if not self._lines[i].startswith("s_branch"):
                reach(i + 1, instructions, products)
        raise AssertionError("a loop without a path through it")


def read_code(text: str, job: Job, side: int) -> Code:
    """Parse the driver's output. side: 0 for ours, 1 for llama.cpp's."""
    trips = job.trips[side]
    loops = Loops(text[text.rindex("disasm") :], job.kinds)
    outer = max(loops.outermost(), key=lambda at: (loops.products(at, loops.ends[at]), at - loops.ends[at]))
    if trips and len(loops.inside(outer)) != len(trips):
        sys.exit(f"{job.name}: {len(loops.inside(outer))} loops in the loop, not {len(trips)}")
    loops.trips = dict(zip(loops.inside(outer), trips, strict=False))
    instructions, products = loops.longest(outer)
    products = job.products[side] or products

    def fact(name: str) -> int:
        return int(re.findall(rf"^{name}: (\d+)", text, re.M)[-1])

    spills = fact("Spilled SGPRs") + fact("Spilled VGPRs")
    return Code(instructions / products, fact("VGPRs"), spills, fact("Subgroups per SIMD"))


def compiled_for(gpu: str, spirv: Path, n_buffers: int, push: int, constants: Sequence[int]) -> str:
    """Return the driver's output, from a separate process, because drivers read their settings only once."""
    settings = {
        "RADV_FORCE_FAMILY": gpu,
        "RADV_DEBUG": "shaders,shaderstats,nocache",
        "VK_ICD_FILENAMES": ICD,
        "VK_DRIVER_FILES": ICD,
    }
    arguments = [str(spirv), *map(str, (n_buffers, push, *constants))]
    done = subprocess.run(
        [sys.executable, __file__, "--compile", *arguments], env=os.environ | settings, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if "Instructions:" not in (printed := done.stdout + done.stderr):
        sys.exit(f"the driver compiled nothing for {gpu}: {printed[-500:]}")
    return printed


def compile_here(spirv: str, n_buffers: str, push: str, *constants: str) -> None:
    device = _core.VulkanDevice(0)
    code = np.frombuffer(Path(spirv).read_bytes(), np.uint8)
    device.kernel(code, int(n_buffers), int(push), [*enumerate(map(int, constants)), (99, 1)])
    sys.stdout.flush()
    os._exit(0)  # without destroying the null device


class Peer:
    """llama.cpp's shaders, compiled."""

    def __init__(self, sources: Path, folder: Path) -> None:
        self._sources, self._folder = folder / "sources", folder
        self._sources.mkdir()
        for path in sources.iterdir():
            if path.suffix in (".comp", ".glsl"):
                text = path.read_text("utf-8")
                dots = "#extension GL_EXT_integer_dot_product : require"
                (self._sources / path.name).write_text(text.replace(dots, DOT), "utf-8")

    def spirv(self, name: str, defines: dict[str, str]) -> Path:
        path = self._folder / "peer.spv"
        flags = [f"-D{key}={value}" for key, value in defines.items()]
        subprocess.run(
            ["glslc", "-fshader-stage=compute", "--target-env=vulkan1.2", "-O", *flags,
             self._sources / name, "-o", path],
            check=True,
        )  # fmt: skip
        return path


@dataclass(frozen=True)
class Job:
    """A kernel of ours, and llama.cpp's source with its definitions, both with constants.

    trips: how often loops in the outermost one run, in the order of the code; without them once. products:
    per iteration, if the code multiplies other numbers too, or also with other instructions.
    """

    name: str
    ours: tuple[str, tuple[int, ...]]
    source: str
    defines: dict[str, str]
    theirs: tuple[int, ...]
    trips: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    products: tuple[int, int] = (0, 0)
    kinds: tuple[str, ...] = ("v_dot4",)
    n_buffers: int = 8


FMAS = ("v_fma", "v_mac", "v_mad_f", "v_mad_mix", "v_pk_fma", "v_dot2")
HEAD, TURN = 128, 8  # TURN: blocks of one of sixteen sums, of 4,096 columns


def products_of_one(gcn: bool) -> Iterator[Job]:
    for type_ in (T.Q4_0, T.Q4_1, T.Q8_0, T.Q4_K, T.Q6_K):
        data = {f"DATA_A_{type_.name}": "1"}
        rows = 4 if gcn and type_ not in (T.Q4_K, T.Q6_K) else 1  # rm_stdq_int, rm_kq_int
        yield Job(
            f"{type_.name}, one token", ("rounded_few", (int(type_), 1, 0, 16, 16)), "mul_mat_vecq.comp",
            {**PLAIN, **data, "ACC_TYPE": "float", "USE_SUBGROUP_ADD": "1"}, (64, rows, 1),
        )  # fmt: skip
    yield Job(
        "F16, one token", ("linear_few", (int(T.F16), 1, 0, 1)), "mul_mat_vec.comp",
        {**PLAIN, **FLOAT_B, "DATA_A_F16": "1", "USE_SUBGROUP_ADD": "1"}, (64, 2 if gcn else 1, 1),
        ((8, 8), ()), (8 * 32, 32 if gcn else 16), FMAS,
    )  # fmt: skip


def products_of_many(gcn: bool) -> Iterator[Job]:
    """Yield tiles of 64 rows and 64 tokens: m_warptile_mmq_int, _k and m_warptile, subgroups of 64."""
    for type_ in (T.Q4_0, T.Q8_0, T.Q4_K, T.Q6_K):
        of_k = type_ in (T.Q4_K, T.Q6_K)
        tile = (256, 64, 64, 32, 16, 16, 2, 2, 2, 1, 16) if gcn and not of_k else (
            128, 64, 64, 32, 64, 32, 1 if of_k else 2, 2, 2, 1, 64
        )  # fmt: skip
        lanes = 4 if type_ in (T.Q4_0, T.Q4_K) else 8  # that load a row of a block into shared memory
        yield Job(
            f"{type_.name}, many tokens", ("rounded_many", (int(type_), 32, 0)), "mul_mmq.comp",
            {**HALVES, **SUMS, f"DATA_A_{type_.name}": "1"}, tile, ((TURN,), (64 * lanes // tile[0], 1, 4)),
        )  # fmt: skip
    yield Job(
        "F16, many tokens", ("linear_many", (int(T.F16), 32, 0, 1)), "mul_mm.comp",
        {**HALVES, **SUMS, "DATA_A_F16": "1", "LOAD_VEC_A": "8", "LOAD_VEC_B": "8", "B_TYPE": "mat2x4",
         "B_TYPE_SCALAR": "float", "B_TYPEV4": "vec4"},
        (128, 64, 64, 32, 64, 32, 2, 4, 2, 1, 64, 1), ((8,), ()), (8 * 512, 0), FMAS,
    )  # fmt: skip


def attentions(gpu: str, gcn: bool) -> Iterator[Job]:
    """Yield get_fa_tuning_params_scalar's kernels: 1 and 512 tokens, after at least 1,024 positions."""
    defines = {**HALVES, **SUMS, "Q_TYPE": "float", "D_TYPEV4": "vec4", "DATA_A_IQ4_NL": "1"}
    types = (int(T.F16), int(T.F16), 2, 2)
    # Our loops: parts of the keys, vectors of a part, parts of the values, places of a part, its last places.
    ours, loops = ("attention", (1, HEAD, HEAD, 0, 1, 0, 0, 1)), (2, 1, 2, 2, 0)
    tile = (128, 1, 64, HEAD, HEAD, 0, 8, 1, 64 if gcn else 32, 0, 2, 0)
    turns = (1, 2, 4, 3)  # of the mask, subgroups, positions and lanes
    if gpu.startswith("gfx11"):
        turns = *turns, 2  # halves of 64 lanes
    for heads in (1, 4):
        own = ours[0], (*ours[1], heads, 512)
        yield Job(
            f"attention of one token, F16, {heads} heads per key", own, "flash_attn.comp", defines,
            (*tile, *types), (loops if heads > 1 else (2, 1, 1, 4, 0), turns),
            (2 * 64 * HEAD // 64, 2 * 64 * HEAD // 128), FMAS,
        )  # fmt: skip
    tile = (256, 16, 32, HEAD, HEAD, 0, 8, 4, 64, 0, 3, 0) if gcn else (
        256, 8, 32, HEAD, HEAD, 0, 8, 1, 64, 0, 3, 1920
    )  # fmt: skip
    yield Job(
        "attention of many tokens, F16", own, "flash_attn.comp", defines, (*tile, *types), (loops, ()),
        (2 * 64 * HEAD // 64, 2 * 32 * tile[1] * HEAD // 256), FMAS,
    )  # fmt: skip


def jobs(gpu: str) -> Iterator[Job]:
    gcn = gpu.startswith("vega")
    yield from products_of_one(gcn)
    yield from products_of_many(gcn)
    yield from attentions(gpu, gcn)


def main() -> None:
    if "--compile" in sys.argv:
        compile_here(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--llama", type=Path, help="vulkan-shaders of llama.cpp's source")
    parser.add_argument("--gpu", nargs="+", default=["gfx1100", "navi21", "vega20"], help="RADV's names")
    parser.add_argument("--only", default="", help="only jobs with this in their names")
    args = parser.parse_args()
    folder, above = Path(kernels.__file__).parent / "spirv", []
    sides = ("ours", "llama.cpp's") if args.llama else ("ours",)
    columns = [f"{name}: {side}" for name in COLUMNS for side in sides]
    print("| kernel | GPU | " + " | ".join(columns) + " |\n|---|---|" + "---:|" * len(columns))
    with tempfile.TemporaryDirectory() as scratch:
        peer = Peer(args.llama, Path(scratch)) if args.llama else None
        for gpu, job in ((one, job) for one in args.gpu for job in jobs(one) if args.only in job.name):
            name, constants = job.ours
            shape, own = kernels.KERNELS[name], folder / f"{name}_native.spv"
            text = compiled_for(gpu, own, shape.n_buffers, shape.push_bytes, constants)
            codes = [read_code(text, job, 0)]
            if peer:
                theirs = peer.spirv(job.source, job.defines)
                codes.append(read_code(compiled_for(gpu, theirs, job.n_buffers, 128, job.theirs), job, 1))
                above += [f"{job.name} ({gpu}): {what}" for what in codes[0].above(codes[1])]
            rows = zip(*(code.columns() for code in codes), strict=True)
            cells = [job.name, gpu, *(cell for row in rows for cell in row)]
            print("| " + " | ".join(cells) + " |", flush=True)
    if above:
        sys.exit("above llama.cpp's:\n" + "\n".join(above))


if __name__ == "__main__":
    main()
