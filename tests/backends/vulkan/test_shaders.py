"""The committed SPIR-V: it is compiled from the shaders next to it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from types import ModuleType

import numpy as np
import pytest
from paths import ROOT

from hotset.backends.vulkan import kernels

SHADERS = ROOT / "csrc/vulkan/shaders"
OP_EXT_INST, OP_DECORATE, OP_FADD, OP_FSUB = 12, 71, 129, 131  # from the SPIR-V specification
NO_CONTRACTION, FMA = 42, 50  # a decoration; an instruction of GLSL.std.450


@pytest.fixture(scope="module")
def compiling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_shaders", SHADERS / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_shader_is_compiled(compiling: ModuleType) -> None:
    facts = json.loads((compiling.OUT / "sources.json").read_text())
    sources = {name: compiling.digest(path) for name, (path, _) in compiling.outputs().items()}
    assert facts["sources"] == sources, "run python csrc/vulkan/shaders/compile.py"
    assert {path.stem for path in compiling.OUT.glob("*.spv")} == set(sources)
    assert {name.removesuffix("_native") for name in sources} == set(kernels.KERNELS)


def test_the_same_compiler_makes_the_same_bytes(compiling: ModuleType) -> None:
    if shutil.which(compiling.GLSLC[0]) is None:
        pytest.skip("no compiler of shaders: `make test-deps` installs it (Debian: glslc)")
    facts = json.loads((compiling.OUT / "sources.json").read_text())
    if facts["compiler"] != compiling.compiler():
        pytest.skip(f"another compiler made the files: {facts['compiler']}")
    for name, (path, native) in compiling.outputs().items():
        assert compiling.compiled(path, native=native) == (compiling.OUT / f"{name}.spv").read_bytes(), name


def test_no_shader_lets_products_and_sums_be_fused(compiling: ModuleType) -> None:
    """Check that floating-point operations are marked exact.

    Otherwise a driver may fuse a product with a sum, and reorder sums. An exact fma() is the same operation
    in all kernels of a device.
    """
    n_sums, with_fma = 0, set()
    for path in sorted(compiling.OUT.glob("*.spv")):
        words = np.frombuffer(path.read_bytes(), "<u4")
        exact, sums, at = set(), [], 5
        while at < len(words):
            n, operation = int(words[at]) >> 16, int(words[at]) & 0xFFFF
            arguments = words[at + 1 : at + n].tolist()
            if operation == OP_DECORATE and arguments[1] == NO_CONTRACTION:
                exact.add(arguments[0])
            elif operation in (OP_FADD, OP_FSUB):
                sums.append(arguments[1])
            elif operation == OP_EXT_INST and arguments[3] == FMA:
                sums.append(arguments[1])
                with_fma.add(path.stem.removesuffix("_native"))
            at += n
        assert exact >= set(sums), path.name
        n_sums += len(sums)
    assert n_sums > 100
    assert with_fma >= {"attention", "linear_few", "norm", "rounded_few", "rounded_many"}


def test_kernel_arguments_equal_the_shaders() -> None:
    """Compare buffers and push constants: after a mistake, a kernel would read other numbers."""
    for name, shape in kernels.KERNELS.items():
        text = (SHADERS / f"{name}.comp").read_text()
        names = re.findall(r'#include "(.+)"', text)
        for included in names:  # the list grows in the loop
            text += (part := (SHADERS / included).read_text())
            names += re.findall(r'#include "(.+)"', part)
        bindings = {int(n) for n in re.findall(r"binding = (\d+)\)", text)}
        assert bindings == set(range(shape.n_buffers)), name
        push = re.search(r"uniform Push \{(.+?)\}", text, re.S)
        assert (push is not None) == bool(shape.push)
        plain = re.sub(r"//.*", "", push[1] if push else "")
        found = "".join(
            ("I" if kind == "uint" else "f") * len(names.split(","))
            for kind, names in re.findall(r"(uint|float) ([^;]+);", plain)
        )
        wanted = "".join(letter * int(n or 1) for n, letter in re.findall(r"(\d*)([If])", shape.push))
        assert found == wanted, name
