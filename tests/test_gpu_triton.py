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


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_equal_their_twins(group: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    environment.pop("HOTSET_TRITON", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [str(FILE), "-k", GROUPS[group]]
    done = subprocess.run(command, cwd=FILE.parent.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout + " 0 passed") or re.search("", "")
    assert passed
    assert "skipped" not in done.stdout
