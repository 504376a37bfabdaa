"""Triton's kernels in the whole backend, in Triton's interpreter.

This needs its own process: Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted_backend import CASES, FUSED, SPLIT, THRESHOLDS

from hotset.formats.quants import GGMLType


@pytest.mark.slow
def test_steps_by_the_kernels_are_the_references(tmp_path: Path) -> None:
    names = [*CASES, f"bamboo{SPLIT}", f"opt{SPLIT}", THRESHOLDS, FUSED]
    here = Path(__file__).parent
    found = subprocess.run(
        [sys.executable, str(here / "interpreted_backend.py"), str(tmp_path), *names],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    errors = dict(line.split() for line in found.stdout.splitlines())
    assert set(errors) == set(names)
    for name, error in errors.items():  # a prompt's products of types up to 16 bits use f16
        is_float = name in (THRESHOLDS, FUSED) or CASES[name.removesuffix(SPLIT)][2] == GGMLType.F32
        assert float(error) < (1e-5 if is_float else 2e-3), errors
