"""The Triton kernels in Triton's interpreter, in their own process: see interpreted_gpu_kernels.py."""

from __future__ import annotations

import pytest
import torch
from kernel_runs import FILE, PART, run_kernels

GROUPS = {  # few groups: a process takes three seconds to start
    "linear": "linear and not expert",  # with an activation and to bits, too
    "ffn and norms": "not linear and not attention and not expert",
    "experts and attention": "expert or attention",
}
# Take a device's branches without a device: copies there and back, and operations that it skips.
AS_ON_A_DEVICE = "neighbours or fetched or triton_computes or expert_rows or chosen or fired"


def test_a_part_of_each_kernel_equals_the_fallback() -> None:
    run_kernels(*PART, TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selection", "settings"),
    [*((selection, {}) for selection in GROUPS.values()), (AS_ON_A_DEVICE, {"HOTSET_TEST_DEVICE": "cpu"})],
    ids=[*GROUPS, "as on a device"],
)  # fmt: skip
def test_kernels_equal_the_fallback(selection: str, settings: dict[str, str]) -> None:
    run_kernels(str(FILE), "-k", selection, TRITON_INTERPRET="1", **settings)


@pytest.mark.gpu
def test_compiled_kernels_equal_the_fallback() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    run_kernels(str(FILE), HOTSET_TEST_DEVICE="cuda:0")
