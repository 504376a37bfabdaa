"""Every Triton kernel in Triton's interpreter, in a process of its own: see interpreted_gpu_kernels.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("interpreted_gpu_kernels.py")
GROUPS = {  # few: a process needs three seconds to start
    "linear": "linear and not expert",  # with an activation and to bits, too
    "ffn and norms": "not linear and not attention and not expert",
    "experts and attention": "expert or attention",
}


# Without a device its branch is taken all the same: what moves there and back, and what is skipped there.
AS_ON_A_DEVICE = "neighbours or fetched or triton_computes or expert_rows or chosen or fired"


@pytest.mark.parametrize(
    ("selection", "device"),
    [*((selection, None) for selection in GROUPS.values()), (AS_ON_A_DEVICE, "cpu")],
    ids=[*GROUPS, "as on a device"],
)
def test_kernels_equal_the_fallback(selection: str, device: str | None) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    environment.pop("HOTSET_TRITON", None)
    environment.pop("HOTSET_TEST_DEVICE", None)
    if device is not None:
        environment["HOTSET_TEST_DEVICE"] = device
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [str(FILE), "-k", selection]
    done = subprocess.run(command, cwd=FILE.parent.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout + " 0 passed") or re.search("", "")
    assert passed
    assert "skipped" not in done.stdout
