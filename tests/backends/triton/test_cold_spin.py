"""The two Triton kernels for host-device synchronisation in the interpreter, with the native CPU worker.

test_gpu_aot.py compiles them. This needs its own process: Triton decides once whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import WATCHDOG

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).parent

INTERPRETED = """
import sys
from pathlib import Path
import numpy as np
from sparse_runs import write
from worker_runs import ask, inputs, random_bits, cpu_worker
from fake_cuda import FakeCuda
from hotset.errors import DeviceError

gguf = write(Path(sys.argv[1]), "llama")
for mode in ("exact", "predicted"):
    direct, spinning = cpu_worker(gguf, mode), cpu_worker(gguf, mode, kind="spin", driver=FakeCuda())
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


def run(code: str, *arguments: str, **environment: str) -> str:
    paths = os.pathsep.join([str(HERE), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True, text=True, timeout=WATCHDOG, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_interpreted_against_the_service(tmp_path: Path) -> None:
    assert "the same bits" in run(INTERPRETED, str(tmp_path), TRITON_INTERPRET="1")
