"""The host-device synchronisation with the CPU as two Triton kernels of one block each.

They are used if a stream cannot write and wait for values by itself. One kernel copies the CPU's inputs to
host memory and raises a flag for the CPU. The other spins on the flag that the CPU raises, lowers it and
copies the answer.

The trap: polling must be a plain load. A GPU without atomics over its bus implements an atomic addition of
zero as a read and a write. The write can overwrite a value that the CPU stored in between. The exchange that
lowers the flag is safe, since the CPU writes the flag only once.
"""

# mypy: disable-error-code=no-untyped-def
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hotset.backends.triton import launch as launcher
from hotset.backends.triton.triton_kernels import await_launches

BLOCK = 1024  # numbers that the block copies at a time


def submit(h: Tensor, bits: Tensor | None, host_h: Tensor, host_bits: Tensor, request: Tensor) -> None:
    """Copy h and bits (uint8) to the CPU's inputs host_h and host_bits, then raise its flag, int32 [1].

    The host tensors must be in memory that is registered with the device (cpu_offload.CudaDriver.register).
    """
    h, bits = h.contiguous(), None if bits is None else bits.contiguous()
    # Without bits the kernel still needs a pointer; it reads nothing from it.
    launcher.launch(
        submit_kernel, (1,), h, host_bits if bits is None else bits, host_h, host_bits, request,
        h.numel(), 0 if bits is None else bits.numel(), BLOCK=BLOCK, warps=4, at_once=True,
    )  # fmt: skip


def collect(done: Tensor, host_out: Tensor, out: Tensor) -> None:
    """Wait for the flag that the CPU raises, int32 [1], lower it and copy the CPU's answer to `out`."""
    # `out` comes first, because the launcher takes the device from the first tensor.
    launcher.launch(
        collect_kernel, (1,), out, done, host_out, out.numel(), BLOCK=BLOCK, warps=4, at_once=True
    )


@triton.jit(do_not_specialize_on_alignment=["n_h", "n_bits"])  # numbers of a step
def submit_kernel(h, bits, host_h, host_bits, request, n_h, n_bits, BLOCK: tl.constexpr):
    """Store host_h[:n_h] = h, host_bits[:n_bits] = bits, then request = 1, visible to all in this order."""
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
    """Wait until done == 1, store done = 0, then out = host_out[:n_out]."""
    await_launches()
    while tl.load(done, volatile=True) == 0:
        pass
    tl.debug_barrier()  # all threads have seen the flag before one lowers it
    tl.atomic_xchg(done, 0, sem="acq_rel", scope="sys")
    tl.debug_barrier()  # one thread has acquired before the others load
    for first in range(0, n_out, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(host_out + i, mask=i < n_out, volatile=True), mask=i < n_out)
