"""Compiles the shaders of this folder to SPIR-V, into src/hotset/backends/vulkan/spirv.

    python csrc/vulkan/shaders/compile.py

What it writes is committed: a build needs no compiler of shaders. `sources.json` says of which sources each
file is, and which compiler made them; tests/backends/vulkan/test_shaders.py compares both.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[2] / "src/hotset/backends/vulkan/spirv"
# Not optimised: its optimiser unrolls loops without what is said of their operations, and then fuses products
# and sums, which would have other bits. Drivers optimise themselves.
GLSLC = ("glslc", "--target-env=vulkan1.1", "-O0")


def compiler() -> str:
    """The versions of what glslc is made of, in one line."""
    done = subprocess.run([GLSLC[0], "--version"], capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


def compiled(source: Path) -> bytes:
    """A shader as SPIR-V."""
    done = subprocess.run([*GLSLC, f"-I{HERE}", source, "-o", "-"], capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.decode())
    return done.stdout


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
    for source in sorted(HERE.glob("*.comp")):
        (OUT / f"{source.stem}.spv").write_bytes(compiled(source))
        digests[source.stem] = digest(source)
    facts = {"compiler": compiler(), "sources": digests}
    (OUT / "sources.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
