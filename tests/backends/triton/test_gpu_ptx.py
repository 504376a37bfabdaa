"""The PTX of every Triton kernel, executed by tests/support/ptx (docs/contributing/internals/gpu.md).

Some of the kernels' tests run here, in their own process, compiled for sm_80. `make test-ptx` runs all of
them, also for sm_90. Kernels of a few lines show which faults the interpreter finds.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from kernel_runs import PART, run_kernels

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ptx import arithmetic  # noqa: E402
from ptx.machine import run  # noqa: E402
from ptx.memory import Fault, Memory  # noqa: E402
from ptx.program import Program, read  # noqa: E402


def test_compiled_kernels_are_right_and_in_order() -> None:
    run_kernels(*PART, HOTSET_TEST_DEVICE="ptx", HOTSET_PTX_ARCH="80")


@pytest.mark.slow
def test_every_kernel_can_be_launched_before_the_one_before_it_is_over() -> None:
    run_kernels(*PART, HOTSET_TEST_DEVICE="ptx", HOTSET_PTX_ARCH="90", HOTSET_DEPENDENT_LAUNCH="1")


# ---- faults that are found

KERNEL = """
.visible .entry kernel(.param .u64 .ptr .global .align 1 kernel_param_0)
.reqntid {n_threads}
{{
    .reg .b32 %r<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    shl.b32 %r3, %r1, 2;
    xor.b32 %r4, %r3, 128;   // the same place of the other warp
    {body}
    ret;
$L__func_end0:
}}
"""


def kernel(body: str, n_threads: int = 64) -> Program:
    return read(KERNEL.format(body=body, n_threads=n_threads))


def execute(
    body: str, data: np.ndarray, n_blocks: int = 1, n_threads: int = 64, dependent: bool = False
) -> None:
    memory = Memory()
    given = memory.add(data.ctypes.data, data.nbytes, (data.ctypes.data, data.nbytes))
    run(kernel(body, n_threads), memory, 512, (n_blocks,), [given], dependent)


STORE, LOAD = "st.shared.b32 [%r3], %r1;", "ld.shared.b32 %r5, [%r4]; st.global.b32 [%rd3], %r5;"
COPY = "cp.async.ca.shared.global [%r3], [%rd3], 4; cp.async.commit_group;"


def test_threads_of_other_warps_are_seen_after_a_barrier() -> None:
    data = np.zeros(64, np.uint32)
    execute(f"{STORE} bar.sync 0; {LOAD}", data)
    assert data.tolist() == [*range(32, 64), *range(32)]


def test_an_asynchronous_copy_arrives_when_it_is_waited_for() -> None:
    late = "ld.shared.b32 %r5, [%r3]; st.global.b32 [%rd3], %r5;"
    data = np.arange(64, dtype=np.uint32)
    execute(f"{COPY} cp.async.wait_group 1; {late}", data)
    assert data.tolist() != list(range(64))
    data = np.arange(64, dtype=np.uint32)
    execute(f"{COPY} {COPY} cp.async.wait_group 0; {late}", data)
    assert data.tolist() == list(range(64))


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (f"{STORE} {LOAD}", "race: a warp loads what another has stored"),
        (f"ld.shared.b32 %r5, [%r4]; {STORE}", "race: a warp stores where another has loaded"),
        (f"ld.shared.b32 %r5, [%r4]; {COPY}", "race: a warp stores where another has loaded"),
        ("st.shared.b32 [global_smem], %r1;", "two threads store different values at one shared address"),
        ("and.b32 %r6, %r3, 127; st.shared.b32 [%r6], %r1;", "two threads store different"),
        ("ld.global.b32 %r5, [%rd3+4];", "load of 4 bytes out of bounds"),
        ("st.global.b32 [%rd3+-4], %r1;", "store of 4 bytes out of bounds"),
        ("ld.shared.b32 %r5, [%r3+300];", "shared load out of bounds"),
        ("ld.global.v2.b32 {%r5, %r6}, [%rd3];", "misaligned load of 8 bytes"),
        ("ld.shared.v2.b32 {%r5, %r6}, [%r3];", "misaligned shared load of 8 bytes"),
        ("st.global.b32 [%rd1], %r1;", "two threads store different values at one address"),
        ("setp.lt.u32 %p1, %r1, 32; @%p1 bra $END; bar.sync 0; $END:", "a barrier that some threads"),
        ("setp.lt.u32 %p1, %r1, 7; @%p1 bra $END; bar.sync 0; $END:", "some threads of a warp execute"),
        ("$TOP: bra.uni $TOP;", "does not end"),
    ],
)  # fmt: skip
def test_undefined_device_behaviour_is_a_fault(
    body: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ptx.machine.MOST_STEPS", 1000)
    with pytest.raises(Fault, match=found):
        execute(body, np.zeros(64, np.uint32))


# A product of four warps: rows of ones in registers, B in shared memory, 8 columns of 8 numbers.
PRODUCT = """
    mov.b32 %r5, 0f3F800000; cvt.rn.f32.u32 %f1, %r1; setp.lt.u32 %p1, %r1, 64; @%p1 st.shared.b32 [%r3], %f1;
    bar.sync 0; mov.b64 %rd4, 0x0000001000080000; wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32
      {%f2, %f3, %f4, %f5}, {%r5, %r5, %r5, %r5}, %rd4, 0, 1, 1;
    wgmma.commit_group.sync.aligned;
"""
OVER, DONE = "bar.sync 0; @%p1 st.shared.b32 [%r3], %r1;", "wgmma.wait_group.sync.aligned 0;"


def test_four_warps_multiply() -> None:
    """Check column j of B, whose 8 numbers are split over two core matrices of 8 rows of 16 bytes."""
    data = np.zeros(128, np.float32)
    execute(f"{PRODUCT} {DONE} st.global.b32 [%rd3], %f2;", data, n_threads=128)
    columns = np.arange(64).reshape(2, 8, 4).sum(axis=(0, 2))
    assert data.tolist() == np.tile(columns[0::2], 32).tolist()


def test_matrices_are_read_until_their_product_is_waited_for() -> None:
    execute(f"{PRODUCT} {DONE} {OVER}", np.zeros(128, np.uint32), n_threads=128)
    with pytest.raises(Fault, match="race: a warp stores where another has loaded"):
        execute(f"{PRODUCT} {OVER} {DONE}", np.zeros(128, np.uint32), n_threads=128)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("st.global.b32 [%rd3], %r2;", "store"),
        ("ld.global.b32 %r5, [%rd1]; setp.eq.u32 %p1, %r2, 1; @%p1 st.global.b32 [%rd3], %r5;", "loads what"),
    ],
)
def test_blocks_of_a_launch_are_in_no_order(body: str, found: str) -> None:
    with pytest.raises(Fault, match=found):
        execute(body, np.zeros(64, np.uint32), n_blocks=2)
    execute(body, np.zeros(64, np.uint32), n_blocks=1)


WAIT = "griddepcontrol.wait;"
TOUCH = "st.global.b32 [%rd3], %r1;"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (f"{TOUCH} {WAIT}", "global memory is touched before"),
        (f"griddepcontrol.launch_dependents; {TOUCH} {WAIT}", "global memory is touched before"),
        (f"ld.global.b32 %r5, [%rd3]; {WAIT}", "global memory is touched before"),
        (f"{COPY} {WAIT}", "global memory is touched before"),
        (f"atom.global.add.u32 %r5, [%rd3], %r1; {WAIT}", "global memory is touched before"),
        (f"setp.lt.u32 %p1, %r1, 32; @%p1 bra $END; {WAIT} {TOUCH} $END:", "a thread ends before"),
    ],
)
def test_a_dependent_launch_waits_for_the_one_before(body: str, found: str) -> None:
    with pytest.raises(Fault, match=found):
        execute(body, np.zeros(64, np.uint32), dependent=True)
    execute(body, np.zeros(64, np.uint32))
    execute(f"griddepcontrol.launch_dependents; {WAIT} {TOUCH}", np.zeros(64, np.uint32), dependent=True)


def test_threads_that_went_different_ways_meet_again() -> None:
    """Check threads that meet at a block of code that precedes the branch target of some of them."""
    body = """
        mov.u32 %r5, 0; setp.lt.u32 %p1, %r1, 5; @%p1 bra $FAR;
        $MEET: shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1; st.global.b32 [%rd3], %r6; ret;
        $FAR: add.s32 %r5, %r1, 100; bra.uni $MEET;
    """
    data = np.zeros(32, np.uint32)
    execute(body, data, n_threads=32)
    assert data.tolist() == [101, 100, 103, 102, 0, 104, *[0] * 26]


def test_a_fused_product_and_sum_is_rounded_once() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(4000).astype(np.float32) for _ in range(2))
    with np.errstate(over="ignore"):
        c = (-(a * b) * rng.choice([1, 2.0**-24, 2.0**-25, 1e20, 2.0**30], 4000)).astype(np.float32)
    a[:2], b[:2], c[:2] = 1 + 2.0**-12, 1 + 2.0**-12, [2.0**-60, -(2.0**-60)]  # close to a tie
    found = arithmetic.fused(a, b, c)
    for x, y, z, one in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [np.nextafter(one, np.float32(way)) for way in (-np.inf, np.inf)]
        off = abs(Fraction(float(one)) - exact)
        assert all(off <= abs(Fraction(float(other)) - exact) for other in near)


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    x = np.concatenate(
        [np.random.default_rng(2).standard_normal(1000), [1 + 2.0**-8, 1 + 3 * 2.0**-8, np.inf]]
    )
    given = torch.from_numpy(x.astype(np.float32))
    found = arithmetic.to_bfloat16(given.numpy())
    assert np.array_equal(found, given.bfloat16().view(torch.uint16).numpy())
    assert np.array_equal(arithmetic.from_bfloat16(found), given.bfloat16().float().numpy())
    whole = np.array([-3.5, 2.5, 1e20, -1e20, np.nan], np.float32)
    assert arithmetic.converted(whole, np.int32, ("cvt", "rzi")).tolist() == [-3, 2, 2**31 - 1, -(2**31), 0]
    assert arithmetic.converted(whole, np.int32, ("cvt", "rni")).tolist()[:2] == [-4, 2]


def test_bits_are_moved_as_the_manual_says() -> None:
    a, b = np.array([0x03020100], np.uint32), np.array([0x87060504], np.uint32)
    assert arithmetic.permuted(a, b, np.array(0xF740, np.uint32)) == 0xFF870400
    assert arithmetic.looked_up(a, b, a, np.array(0xC0)) == (a & b)
    assert arithmetic.funnel(a, b, np.array(8, np.uint32), left=False) == 0x04030201
    eight, four = (np.array(n, np.uint32) for n in (8, 4))
    assert arithmetic.bit_field(a, eight, eight) == 1
    assert arithmetic.bit_field(np.array([0xF00], np.uint32).view(np.int32), eight, four) == -1
    assert arithmetic.bit_insert(np.array([0xAB], np.uint32), a, eight, eight) == 0x0302AB00
    assert arithmetic.quotient(np.array([-7, 7, 1]), np.array([2, -2, 0])).tolist() == [-3, -3, -1]
    assert arithmetic.shifted(np.array([-8]), np.array([70]), left=False).tolist() == [-1]
    assert arithmetic.high_product(np.array([1 << 31], np.uint32), np.array([6], np.uint32)) == 3
