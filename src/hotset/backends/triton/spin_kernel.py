"""The host-device synchronisation with the CPU as two Triton kernels of one block each.

They serve where a stream cannot write and wait for values by itself: one copies what the CPU reads to host
memory and raises its flag, the other spins on the CPU's flag, lowers it and copies the answer.

The trap: polling must be a plain load. A GPU without atomics over its bus makes an atomic addition of zero
from a read and a write, and the write can undo what the CPU stored in between. The exchange that lowers the
flag is safe, since the CPU writes it only once.
"""

# mypy: disable-error-code=no-untyped-def
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hotset.backends.triton import launch as launcher
from hotset.backends.triton.triton_kernels import await_launches

BLOCK = 1024  # numbers that the block copies at a time


def post(h: Tensor, bits: Tensor | None, host_h: Tensor, host_bits: Tensor, request: Tensor) -> None:
    """Puts h and bits (uint8) where the CPU reads them, and then raises its flag, int32 [1].

    The tensors of the host lie in memory that is registered with the device
    (cpu_offload.CudaDriver.register).
    """
    h, bits = h.contiguous(), None if bits is None else bits.contiguous()
    # Without bits something must stand in their place; nothing of it is read.
    launcher.launch(
        post_kernel, (1,), h, host_bits if bits is None else bits, host_h, host_bits, request,
        h.numel(), 0 if bits is None else bits.numel(), BLOCK=BLOCK, warps=4, at_once=True,
    )  # fmt: skip


def collect(done: Tensor, host_out: Tensor, out: Tensor) -> None:
    """Waits for the CPU's flag, int32 [1], lowers it and copies its answer to `out`."""
    # `out` comes first, for it says on which device.
    launcher.launch(
        collect_kernel, (1,), out, done, host_out, out.numel(), BLOCK=BLOCK, warps=4, at_once=True
    )


@triton.jit(do_not_specialize_on_alignment=["n_h", "n_bits"])  # numbers of a step
def post_kernel(h, bits, host_h, host_bits, request, n_h, n_bits, BLOCK: tl.constexpr):
    """host_h[:n_h] = h, host_bits[:n_bits] = bits, then request = 1, seen by all in this order."""
    await_launches()
    for first in range(0, n_h, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(host_h + i, tl.load(h + i, mask=i < n_h), mask=i < n_h)
    for first in range(0, n_bits, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(host_bits + i, tl.load(bits + i, mask=i < n_bits), mask=i < n_bits)
    tl.debug_barrier()  # all threads have stored before one releases
    tl.atomic_xchg(request, 1, sem="release", scope="sys")


@triton.jit(do_not_specialize_on_alignment=["n_out"])
def collect_kernel(out, done, host_out, n_out, BLOCK: tl.constexpr):
    """Waits for done == 1, done = 0, then out = host_out[:n_out]."""
    await_launches()
    while tl.load(done, volatile=True) == 0:
        pass
    tl.debug_barrier()  # all threads have seen the flag before one lowers it
    tl.atomic_xchg(done, 0, sem="acq_rel", scope="sys")
    tl.debug_barrier()  # one thread has acquired before the others load
    for first in range(0, n_out, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(host_out + i, mask=i < n_out, volatile=True), mask=i < n_out)
