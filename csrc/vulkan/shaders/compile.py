"""Compiles the shaders of this folder to SPIR-V, into src/hotset/backends/vulkan/spirv.

    python csrc/vulkan/shaders/compile.py

What it writes is committed: a build needs no compiler of shaders. `sources.json` says of which sources each
file is, and which compiler made them; tests/backends/vulkan/test_shaders.py compares both.
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
# Not optimised: its optimiser unrolls loops without what is said of their operations, and then fuses products
# and sums, which would have other bits. Drivers optimise themselves.
GLSLC = ("glslc", "--target-env=vulkan1.1", "-O0")
# Also compiled as NAME_native, for devices that have what common.glsl says.
NATIVE = ("attention", "linear_few", "linear_many", "probe", "rounded_few", "rounded_many", "transposed")
OP_EXT_INST, OP_DECORATE, FMA, NO_CONTRACTION = 12, 71, 50, 42  # of the SPIR-V specification
FOR_DEBUGGERS = range(2, 9)  # its operations from OpSourceContinued to OpLine


def compiler() -> str:
    """The versions of what glslc is made of, in one line."""
    done = subprocess.run([GLSLC[0], "--version"], capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


def compiled(source: Path, *, native: bool = False) -> bytes:
    """A shader as SPIR-V."""
    flags = ["-DNATIVE"] if native else []
    done = subprocess.run([*GLSLC, *flags, f"-I{HERE}", source, "-o", "-"], capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.decode())
    return as_committed(done.stdout)


def as_committed(code: bytes) -> bytes:
    """The same without names and lines, a seventh of it, and with every fma() decorated, as glslc does not
    do: it is then one operation, or two, in all kernels of a device alike (GLSL.std.450: "invariant
    results")."""
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
    """The files that are made, by name: of which source, and whether native."""
    sources = sorted(HERE.glob("*.comp"))
    plain = {source.stem: (source, False) for source in sources}
    return plain | {f"{source.stem}_native": (source, True) for source in sources if source.stem in NATIVE}


def digest(source: Path) -> str:
    """Of a shader and all that it includes."""
    sources, found = [source], hashlib.sha256()
    while sources:
        text = sources.pop().read_bytes()
        found.update(text)
        sources += [HERE / name.decode() for name in re.findall(rb'^#include "(.+)"', text, re.M)]
    return found.hexdigest()


def main() -> None:
    """Writes all of them."""
    OUT.mkdir(exist_ok=True)
    digests = {}
    for name, (source, native) in outputs().items():
        (OUT / f"{name}.spv").write_bytes(compiled(source, native=native))
        digests[name] = digest(source)
    facts = {"compiler": compiler(), "sources": digests}
    (OUT / "sources.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
