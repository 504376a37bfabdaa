"""The handshake's two Triton kernels: in the interpreter against the native service, and ahead of time.

Each in a process of its own: Triton decides once whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

TESTS = Path(__file__).parent

INTERPRETED = """
import sys
from pathlib import Path
import numpy as np
from test_cold import ask, inputs, random_bits, service, write
from fake_cuda import FakeCuda
from hotset.errors import DeviceError

gguf = write(Path(sys.argv[1]), "llama")
for mode in ("exact", "predicted"):
    direct, spinning = service(gguf, mode), service(gguf, mode, kind="spin", driver=FakeCuda())
    for seed, n in enumerate((1, 3, 16, 1)):
        h, bits = inputs(n, seed), random_bits(n, seed=seed) if mode == "predicted" else None
        for layer in (1, 0):
            found = ask(spinning, layer, h, bits)
            np.testing.assert_array_equal(found, ask(direct, layer, h, bits))
            assert np.abs(found).max() > 0
    # A step that was given up: the kernel that spins goes on, and the next step begins clean.
    spinning.begin_step(1)
    spinning.cancel("someone pulled the plug")
    spinning.collect(0)
    try:
        spinning.end_step()
    except DeviceError as error:
        assert "someone pulled the plug" in str(error)
    else:
        raise AssertionError("a step that was given up has ended well")
    np.testing.assert_array_equal(ask(spinning, 0, h, bits), ask(direct, 0, h, bits))
    spinning.close()
print("the same bits")
"""

COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hotset.backends.gpu.spin_kernel import collect_kernel, post_kernel

pointers = {"h": "*fp32", "bits": "*u8", "host_h": "*fp32", "host_bits": "*u8", "request": "*i32"}
kernels = {
    post_kernel: {**pointers, "n_h": "i32", "n_bits": "i32", "BLOCK": "constexpr"},
    collect_kernel: {
        "done": "*i32", "host_out": "*fp32", "out": "*fp32", "n_out": "i32", "BLOCK": "constexpr"
    },
}
for name in sys.argv[1:]:
    amd = name.startswith("gfx")
    target = GPUTarget("hip", name, 32) if amd else GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    for kernel, signature in kernels.items():
        source = ASTSource(fn=kernel, signature=signature, constexprs={"BLOCK": 1024})
        made = triton.compile(source, target=target)
        assert len(made.asm["hsaco" if amd else "cubin"]) > 0
        if not amd:
            text = made.asm["ptx"]
            order = "release" if kernel is post_kernel else "acq_rel"
            assert f"atom.global.sys.{order}.exch" in text, text
            assert kernel is post_kernel or "ld.volatile.global" in text, text
    print(name)
"""
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "gfx1100")


def run(code: str, *arguments: str, **environment: str) -> str:
    paths = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_interpreted_against_the_service(tmp_path: Path) -> None:
    assert "the same bits" in run(INTERPRETED, str(tmp_path), TRITON_INTERPRET="1")


def test_compiled_ahead_of_time(tmp_path: Path) -> None:
    out = run(COMPILED, *TARGETS, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert out.split() == list(TARGETS)
