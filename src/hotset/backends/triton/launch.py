"""The only place that launches Triton kernels, so that tests can observe every launch of a step.

Triton compiles a kernel at its first launch, and again for each *variant* of its arguments. Triton 3.6 also
compiles some C for each variant with the machine's compiler (3.9 does so once for all). Triton caches both
(TRITON_CACHE_DIR, ~/.triton/cache), so a machine compiles them once. `compiled_first` compiles before the
first step, several variants at a time.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotset.backends.triton.devices import current
from hotset.cores import usable_cores
from hotset.errors import DeviceError

NUMBERS = (int, float, bool)
MOST_PROGRAMS = 65_535  # on a grid's second and third side ("Technical Specifications", CUDA C++ Guide)
# Whether a launch may begin while the one before it still runs (triton_kernels.await_launches). Hopper and
# newer devices support this; it has not been tried on one. It is read once, because kernels compile it in.
DEPENDENT = os.environ.get("HOTSET_DEPENDENT_LAUNCH") == "1"
SLOW_PATH = "or set HOTSET_TRITON=0 for the slow path in plain torch"


@dataclass(frozen=True)
class Like:
    """A stand-in for a tensor with the properties by which Triton selects the variant of a kernel."""

    dtype: torch.dtype
    address: int  # modulo 16

    def data_ptr(self) -> int:
        """Return the address, as a tensor's data_ptr does."""
        return self.address


Deferred = dict[
    tuple[Any, ...], tuple[Any, list[Any], dict[str, Any]]
]  # variant → kernel, arguments, options
_deferred: ContextVar[Deferred | None] = ContextVar("deferred", default=None)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int,
    fused: bool = True,
    stages: int | None = None,
    at_once: bool = False,
    **constants: Any,
) -> None:
    """Launch a kernel on the device of the first tensor argument.

    stages: iterations of a loop whose loads are in flight at once; None: Triton's default. fused: fuse
    products and sums (Triton's default until 3.9), which halves the instructions and improves the sums.
    False: round each, except if a kernel fuses them itself. at_once: launch in `compiled_first` too, because
    the CPU waits for the kernel. The assertions of `check` apply. Raises DeviceError if compilation fails.
    """
    check(kernel, grid, args, constants)
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": fused, **constants}
    if stages is not None:
        options["num_stages"] = stages
    if DEPENDENT:
        options["launch_pdl"] = True
    if (deferred := _deferred.get()) is not None and not at_once:
        likes = [Like(a.dtype, a.data_ptr() % 16) if isinstance(a, Tensor) else a for a in args]
        deferred.setdefault(variant(kernel, args, options), (kernel, likes, options))
        return
    device = next(arg for arg in args if isinstance(arg, Tensor)).device
    with current(device), build_errors():
        kernel[grid](*args, **options)


def variant(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of the compiled kernel that a launch needs.

    It has the types, the constants, which numbers are 1, and which addresses and numbers are divisible by 16,
    unless the kernel opts out.
    """
    kinds: list[Any] = []
    for param, arg in zip(kernel.params, args, strict=False):
        if isinstance(arg, Tensor):
            kinds.append((arg.dtype, arg.data_ptr() % 16 == 0))
        elif isinstance(arg, int) and not isinstance(arg, bool):
            divided = arg % 16 == 0 and not param.do_not_specialize_on_alignment
            kinds.append((arg == 1, divided, abs(arg) < 1 << 31))
        else:
            kinds.append(None if arg is None else type(arg))
    return kernel.__name__, tuple(kinds), tuple(sorted(options.items(), key=lambda item: item[0]))


@contextmanager
def compiled_first(device: torch.device) -> Iterator[None]:
    """Defer the kernel launches of a block, and when it ends, only compile the kernels.

    The kernels are compiled on one core each, and are ready for a second execution of the block.

    Tensors that the block allocates are zeros, because no kernel fills them.
    """
    deferred: Deferred = {}
    token = _deferred.set(deferred)
    try:
        with _Zeros():  # type: ignore[no-untyped-call]
            yield
    finally:
        _deferred.reset(token)

    def prepare(kernel: Any, args: list[Any], options: dict[str, Any]) -> None:
        with current(device), build_errors():
            # The index [1, 1, 1] loads the compiled kernel and compiles its launcher.
            kernel.warmup(*args, grid=(1,), **options)[1, 1, 1]

    # One variant of each kernel comes first. Triton creates the kernel's table of variants with it; if two
    # threads created the table, one would lose its variant. The first variant is the one for the fewest
    # tokens, which has the least code. The others follow in descending order of tokens, because variants for
    # many tokens take longest to compile. Kernels whose code does not grow with tokens come last.
    by_tokens = sorted(deferred.values(), key=lambda one: one[2].get("T", 0))
    first = {id(one[0]): one for one in reversed(by_tokens)}
    others = [one for one in reversed(by_tokens) if one is not first[id(one[0])]]
    with ThreadPoolExecutor(usable_cores()) as pool:
        for some in (list(first.values()), others):
            for done in [pool.submit(prepare, *one) for one in some]:
                done.result()


class _Zeros(TorchDispatchMode):
    """A dispatch mode that fills empty tensors with zeros."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if function.overloadpacket in (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty):
            result.zero_()
        return result


@contextmanager
def build_errors() -> Iterator[None]:
    """Convert errors of Triton's compilation of launchers to a DeviceError that says why it failed."""
    try:
        yield
    except RuntimeError as error:
        if "C compiler" not in str(error):
            raise
        raise DeviceError(
            "Triton needs a C compiler to launch kernels, and finds none: install gcc, or name a compiler in "
            f"the environment variable CC ({SLOW_PATH})"
        ) from error
    except subprocess.CalledProcessError as error:
        if "-shared" not in error.cmd:
            raise
        header = Path(sysconfig.get_paths()["include"]) / "Python.h"
        why = f"{error.cmd[0]} ended with {error.returncode}"
        if not header.exists():
            why = f"{header} is missing: install Python's headers (Debian: python3-dev)"
        raise DeviceError(f"Triton cannot compile what launches its kernels: {why} ({SLOW_PATH})") from error
    except PermissionError as error:
        raise DeviceError(
            f"Triton cannot write its cache: {error}; name a folder in the environment variable "
            f"TRITON_CACHE_DIR ({SLOW_PATH})"
        ) from error


def check(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Assert the rules of a launch that only a real device enforces.

    Numbers must be Python numbers, because Triton's just-in-time compiler rejects NumPy's. The grid's second
    and third side must not exceed a device's limit. So the unlimited number of tokens is on the first side.
    """
    given = dict(zip(kernel.arg_names, args, strict=False)) | constants
    for name, value in [*given.items(), *((f"grid[{i}]", n) for i, n in enumerate(grid))]:
        is_plain = value is None or isinstance(value, Tensor | str) or type(value) in NUMBERS
        assert is_plain, f"{name} of {kernel.__name__} is a {type(value).__module__}.{type(value).__name__}"
    assert max(grid[1:], default=0) <= MOST_PROGRAMS, f"the grid of {kernel.__name__} is {grid}"
