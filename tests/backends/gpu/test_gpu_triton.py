"""Every Triton kernel in Triton's interpreter, in a process of its own: see interpreted_gpu_kernels.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).with_name("interpreted_gpu_kernels.py")
GROUPS = {  # few: a process needs three seconds to start
    "linear": "linear and not expert",  # with an activation and to bits, too
    "ffn and norms": "not linear and not attention and not expert",
    "experts and attention": "expert or attention",
}


# Without a device its branch is taken all the same: what moves there and back, and what is skipped there.
AS_ON_A_DEVICE = "neighbours or fetched or triton_computes or expert_rows or chosen or fired"


def run_kernels(*selection: str, **settings: str) -> None:
    """The tests of interpreted_gpu_kernels.py: all of them pass, and none is skipped."""
    ours = ("PYTEST_", "HOTSET_TRITON", "HOTSET_TEST_DEVICE", "TRITON_INTERPRET")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)} | settings
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [str(FILE), "-m", "", *selection]
    done = subprocess.run(command, cwd=FILE.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("selection", "settings"),
    [*((selection, {}) for selection in GROUPS.values()), (AS_ON_A_DEVICE, {"HOTSET_TEST_DEVICE": "cpu"})],
    ids=[*GROUPS, "as on a device"],
)  # fmt: skip
def test_kernels_equal_the_fallback(selection: str, settings: dict[str, str]) -> None:
    run_kernels("-k", selection, TRITON_INTERPRET="1", **settings)


@pytest.mark.gpu
def test_compiled_kernels_equal_the_fallback() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    run_kernels(HOTSET_TEST_DEVICE="cuda:0")
