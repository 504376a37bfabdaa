"""Compile the shaders of this folder to SPIR-V, into src/hotset/backends/vulkan/spirv.

python csrc/vulkan/shaders/compile.py

The results are committed, so that a build needs no shader compiler. `sources.json` has the hash of each
file's sources and the compiler's version; tests/backends/vulkan/test_shaders.py checks both.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[2] / "src/hotset/backends/vulkan/spirv"
# Not optimised: the optimiser unrolls loops and drops the decorations of their operations, so that products
# and sums are fused, which changes bits. Drivers optimise themselves.
GLSLC = ("glslc", "--target-env=vulkan1.1", "-O0")
# Also compiled as NAME_native, for devices that fulfil the condition in common.glsl.
NATIVE = ("attention", "linear_few", "linear_many", "probe", "rounded_few", "rounded_many", "transposed")
OP_EXT_INST, OP_DECORATE, FMA, NO_CONTRACTION = 12, 71, 50, 42  # see the SPIR-V specification
FOR_DEBUGGERS = range(2, 9)  # operations from OpSourceContinued to OpLine


def compiler() -> str:
    """Return the versions of glslc and its parts, in one line."""
    done = subprocess.run([GLSLC[0], "--version"], capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


def compiled(source: Path, *, native: bool = False) -> bytes:
    """Compile a shader to SPIR-V."""
    flags = ["-DNATIVE"] if native else []
    done = subprocess.run([*GLSLC, *flags, f"-I{HERE}", source, "-o", "-"], capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.decode())
    return as_committed(done.stdout)


def as_committed(code: bytes) -> bytes:
    """Remove names and lines, and decorate every fma() so that it is the same operation in all kernels."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    made, at, place, found = list(words[:5]), 5, 0, []
    while at < len(words):
        n, operation = words[at] >> 16, words[at] & 0xFFFF
        if operation == OP_DECORATE:
            place = len(made)
        if operation == OP_EXT_INST and words[at + 4] == FMA:
            found.append(words[at + 2])
        if operation not in FOR_DEBUGGERS:
            made += words[at : at + n]
        at += n
    for result in found:
        made[place:place] = [3 << 16 | OP_DECORATE, result, NO_CONTRACTION]
    return struct.pack(f"<{len(made)}I", *made)


def outputs() -> dict[str, tuple[Path, bool]]:
    """Return the files to make, by name: the source, and whether it is native."""
    sources = sorted(HERE.glob("*.comp"))
    plain = {source.stem: (source, False) for source in sources}
    return plain | {f"{source.stem}_native": (source, True) for source in sources if source.stem in NATIVE}


def digest(source: Path) -> str:
    """Return the hash of a shader and its includes."""
    sources, found = [source], hashlib.sha256()
    while sources:
        text = sources.pop().read_bytes()
        found.update(text)
        sources += [HERE / name.decode() for name in re.findall(rb'^#include "(.+)"', text, re.M)]
    return found.hexdigest()


def main() -> None:
    """Compile all shaders."""
    OUT.mkdir(exist_ok=True)
    digests = {}
    for name, (source, native) in outputs().items():
        (OUT / f"{name}.spv").write_bytes(compiled(source, native=native))
        digests[name] = digest(source)
    facts = {"compiler": compiler(), "sources": digests}
    (OUT / "sources.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
