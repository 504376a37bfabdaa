"""AMD's machine code of our kernels beside that of llama.cpp's for the same job, without the hardware.

usage: python bench/vulkan_machine_code.py [--llama ggml/src/ggml-vulkan/vulkan-shaders] [--gpu navi21 ...]

Mesa's RADV has a null device: it compiles kernels for any AMD GPU and prints the code and its registers. What
counts is the loop that does the work: of its instructions, without those that only wait, how many there are
for a product of two numbers (a weight and an input; a query and a key). Needs Mesa's driver of AMD's GPUs
(Debian: mesa-vulkan-drivers), and glslc for llama.cpp's shaders, which are compiled as vulkan-shaders-gen
does and specialised as ggml-vulkan.cpp does for that GPU. A glslc that does not know integer dot products
gets them as an instruction of SPIR-V.
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
FLOAT_B = {"B_TYPE": "float", "B_TYPEV2": "vec2", "B_TYPEV4": "vec4"}
DOT = """#extension GL_EXT_spirv_intrinsics : require
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_of_bytes(int a, int b, spirv_literal int packed);
int dotPacked4x8EXT(int a, int b) { return dot_of_bytes(a, b, 0); }
"""
# Products of two numbers that an instruction does, by what its name begins with.
PRODUCTS = {"v_dot4": 4, "v_dot2": 2, "v_pk_fma": 2, "v_fma": 1, "v_mac": 1, "v_mad_f": 1, "v_mad_mix": 1}
WAITING = ("s_waitcnt", "s_nop", "s_clause", "s_delay", "s_inst_prefetch")


@dataclass(frozen=True)
class Code:
    """What RADV makes of a kernel. in_loop: instructions of the loop with most products; products: in it."""

    in_loop: int
    products: int
    vgprs: int
    spills: int
    lds: int

    def __str__(self) -> str:
        return f"{self.in_loop / max(self.products, 1):.2f} | {self.vgprs} | {self.spills}"


def products_of(lines: Sequence[str], kinds: Sequence[str]) -> int:
    return sum(n for line in lines for name, n in PRODUCTS.items() if line.startswith(name) and name in kinds)


def loops_of(code: str) -> Iterator[list[str]]:
    """The instructions of each loop, of the disassembly: from a label to a branch back to it."""
    lines = [line.strip() for line in code.splitlines()]
    at = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"BB\d+:", line)}
    for i, line in enumerate(lines):
        branch = re.match(r"s_c?branch\w*\s+(BB\d+)", line)
        if branch and at.get(branch[1], i) < i:
            inside = lines[at[branch[1]] : i + 1]
            yield [one for one in inside if not one.startswith((*WAITING, "BB", ";")) and one]


def read_code(text: str, kinds: Sequence[str]) -> Code:
    """kinds: of instructions that multiply."""
    disassembly = text[text.rindex("disasm") if "disasm" in text else 0 :]
    loops = list(loops_of(disassembly)) or [[]]
    best = max(loops, key=lambda loop: (products_of(loop, kinds), -len(loop)))

    def fact(name: str) -> int:
        return int(re.findall(rf"{name}: (\d+)", text)[-1])

    spills = fact("Spilled SGPRs") + fact("Spilled VGPRs")
    return Code(len(best), products_of(best, kinds), fact("VGPRs"), spills, fact("LDS size"))


def compiled_for(gpu: str, spirv: Path, n_buffers: int, push: int, constants: Sequence[int]) -> str:
    """What the driver prints; in a process of its own, since drivers read their settings once."""
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
    os._exit(0)  # the null device is not taken down


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
    """ours, theirs: a kernel, or a source with its definitions, and constants. kinds: of instructions that
    multiply."""

    name: str
    ours: tuple[str, tuple[int, ...]]
    source: str
    defines: dict[str, str]
    theirs: tuple[int, ...]
    kinds: tuple[str, ...] = ("v_dot4",)
    n_buffers: int = 8


FMAS = ("v_fma", "v_mac", "v_mad_f", "v_mad_mix", "v_pk_fma", "v_dot2")
# s_warptile_mmq_int and m_warptile_mmq_int of ggml-vulkan.cpp, subgroups of 64
MMQ = (64, 32, 32, 32, 32, 32, 2, 2, 1, 1, 64)
HEAD = 128


def jobs(gpu: str) -> Iterator[Job]:
    gcn = gpu.startswith("vega")
    for type_ in (T.Q4_0, T.Q4_1, T.Q8_0, T.Q4_K, T.Q6_K):
        data = {f"DATA_A_{type_.name}": "1"}
        rows = 4 if gcn and type_ not in (T.Q4_K, T.Q6_K) else 1  # rm_stdq_int, rm_kq_int
        yield Job(
            f"{type_.name}, one token", ("rounded_few", (int(type_), 1, 0, 16, 16)), "mul_mat_vecq.comp",
            {**PLAIN, **data, "ACC_TYPE": "float", "USE_SUBGROUP_ADD": "1"}, (64, rows, 1),
        )  # fmt: skip
    yield Job(
        "F16, one token", ("linear_few", (int(T.F16), 1, 0, 1)), "mul_mat_vec.comp",
        {**PLAIN, **FLOAT_B, "DATA_A_F16": "1", "USE_SUBGROUP_ADD": "1"}, (64, 1, 1), FMAS,
    )  # fmt: skip
    for type_ in (T.Q4_0, T.Q8_0, T.Q4_K, T.Q6_K):
        defines = {**PLAIN, f"DATA_A_{type_.name}": "1", "ACC_TYPE": "float", "ACC_TYPEV2": "vec2"}
        yield Job(
            f"{type_.name}, many tokens", ("rounded_many", (int(type_), 1, 0)), "mul_mmq.comp", defines, MMQ
        )
    for kv, name in ((1, "f16"), (2, "q8_0")):
        lanes = 64 if gcn else 32
        yield Job(
            f"attention of one token, {name}", ("attention", (kv, HEAD, HEAD, 0, 1, 0, 0)), "flash_attn.comp",
            {**PLAIN, "ACC_TYPE": "float", "ACC_TYPEV2": "vec2", "ACC_TYPEV4": "vec4", "Q_TYPE": "float",
             "D_TYPEV4": "vec4", "DATA_A_IQ4_NL": "1"},
            (128, 1, 64, HEAD, HEAD, 0, 8, 1, lanes, 0, 2, 0, *(2 * (int((T.F16, T.Q8_0)[kv - 1]),)),
             *(2 * ((2, 34)[kv - 1],))),
            FMAS,
        )  # fmt: skip


def main() -> None:
    if "--compile" in sys.argv:
        compile_here(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--llama", type=Path, help="vulkan-shaders of llama.cpp's source")
    parser.add_argument("--gpu", nargs="+", default=["gfx1100", "navi21", "vega20"], help="RADV's names")
    parser.add_argument("--only", default="", help="jobs whose names have this in them")
    args = parser.parse_args()
    folder = Path(kernels.__file__).parent / "spirv"
    print("| kernel | GPU | instructions, VGPRs, spills: ours | | | llama.cpp's | | |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        peer = Peer(args.llama, Path(scratch)) if args.llama else None
        for gpu in args.gpu:
            for job in jobs(gpu):
                if args.only not in job.name:
                    continue
                name, constants = job.ours
                shape, own = kernels.KERNELS[name], folder / f"{name}_native.spv"
                text = compiled_for(gpu, own, shape.n_buffers, shape.push_bytes, constants)
                row = [job.name, gpu, str(read_code(text, job.kinds))]
                if peer:
                    theirs = peer.spirv(job.source, job.defines)
                    text = compiled_for(gpu, theirs, job.n_buffers, 128, job.theirs)
                    row.append(str(read_code(text, job.kinds)))
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
