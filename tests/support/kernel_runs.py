"""Runs the tests of GPU kernels (interpreted_gpu_kernels.py) in a separate process.

Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from paths import TESTS

FILE = TESTS / "backends" / "triton" / "interpreted_gpu_kernels.py"
# One or two tests of each kernel: with splits, ranges, thresholds and branches, for few tokens and for many.
PART = tuple(
    f"{FILE}::{name}"
    for name in (
        "test_linear[Q4_0-13-3-1]", "test_linear[F16-13-1-9]", "test_linear_bits[8-12-1-2-3]",
        "test_linear_t_of_several_ranges[0.02]", "test_linear_t_of_planes[2-None-9]",
        "test_sparse_ffn[1-0.3-True-fatrelu-None-types2]", "test_neurons_that_are_cut[2-False-relu-None]",
        "test_fired[2-True-relu-False-True]", "test_gated[silu-None-Q4_0-2-8]",
        "test_a_norm_is_applied_to_the_sums[Q4_0-13-1-True]",
        "test_heads_are_projected_rotated_and_stored[Q4_0-heads0-dims0-neox-1-True]",
        "test_pack_bits[29-3]", "test_gaussian_top_k[100]",
        "test_cut[5]", "test_largest[37]", "test_angles", "test_rotate[16-16-True-neox]",
        "test_attention[lengths1-2-70-heads1-dims1-neox-dtype1]",
        "test_attention[lengths2-40-20-heads2-dims2-None-dtype2]",
        "test_expert_rows_of_several_pairs_are_exact[Q8_0]",
        "test_experts_are_exact[silu-2]", "test_experts_are_fetched_as_they_lie[Q4_0]",
        "test_who_computes_experts_is_chosen[2]", "test_the_cpu_and_a_device_pass_vectors[5]",
    )
)  # fmt: skip


def run_kernels(*selection: str, **settings: str) -> None:
    """Run the tests that these pytest arguments select.

    All must pass, and none may be skipped. settings: environment variables.
    """
    ours = ("PYTEST_", "HOTSET_TRITON", "HOTSET_TEST_DEVICE", "HOTSET_PTX_ARCH", "HOTSET_DEPENDENT_LAUNCH")
    ours += ("TRITON_INTERPRET",)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)} | settings
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
    done = subprocess.run(
        [*command, *selection], cwd=FILE.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(rf"{len(PART) if selection == PART else '[0-9]+'} passed", done.stdout)
    assert "skipped" not in done.stdout
