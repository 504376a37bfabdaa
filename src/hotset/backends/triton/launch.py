"""The only place where a kernel of Triton is launched: tests see there all that a step launches.

Triton compiles a kernel when it is launched first, and once more for each *variant* of its arguments. Triton
3.6 also compiles some C for each variant, by the compiler of the machine (3.9 does so once for all). Both are
kept in its cache (TRITON_CACHE_DIR, ~/.triton/cache), so a machine does it once; `compiled_first` does it
before the first step, several variants at a time.
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
MOST_PROGRAMS = 65_535  # of the second and third side of a grid ("Technical Specifications", CUDA C++ Guide)
# Whether a launch begins while the one before it is at work (triton_kernels.await_launches), which Hopper and
# newer devices can; none has done so yet. It is read once, for it is compiled into the kernels.
DEPENDENT = os.environ.get("HOTSET_DEPENDENT_LAUNCH") == "1"
SLOW_PATH = "or set HOTSET_TRITON=0 for the slow path in plain torch"


@dataclass(frozen=True)
class Like:
    """What decides of a tensor which variant of a kernel it needs: Triton asks it as it would the tensor."""

    dtype: torch.dtype
    address: int  # modulo 16

    def data_ptr(self) -> int:
        """As of a tensor."""
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
    """Launches on the device of the first argument that is a tensor.

    stages: how many turns of a loop have their loads on the way at once; None: as many as Triton has.
    fused: products and sums are (Triton's default until 3.9, not after): half the instructions, better sums.
    False: each is rounded, but where a kernel fuses them itself. at_once: in `compiled_first`, too, for the
    CPU waits for it. What `check` asserts holds. Raises DeviceError where Triton cannot compile.
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
    """Launches with the same are served by one compiled kernel: types, constants, numbers that are 1, and
    addresses and numbers that 16 divides, but those that the kernel asks not to look at."""
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
    """A block whose kernels are not launched but compiled when it ends, as many at a time as there are cores,
    so that they are ready where it is executed once more.

    Tensors that are made within are zeros, for no kernel fills them.
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
            # The index loads what was compiled, and compiles what launches it.
            kernel.warmup(*args, grid=(1,), **options)[1, 1, 1]

    # One variant of each kernel comes first: Triton makes what a kernel keeps of its variants with it, and of
    # two threads that do so one would lose what it compiled. It is the one of the fewest tokens, for whose
    # sums there is the least code; of the others those of the most tokens begin, which take longest. Kernels
    # whose code does not grow with tokens come last.
    by_tokens = sorted(deferred.values(), key=lambda one: one[2].get("T", 0))
    first = {id(one[0]): one for one in reversed(by_tokens)}
    others = [one for one in reversed(by_tokens) if one is not first[id(one[0])]]
    with ThreadPoolExecutor(usable_cores()) as pool:
        for some in (list(first.values()), others):
            for done in [pool.submit(prepare, *one) for one in some]:
                done.result()


class _Zeros(TorchDispatchMode):
    """Tensors that are empty are zeros."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if function.overloadpacket in (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty):
            result.zero_()
        return result


@contextmanager
def build_errors() -> Iterator[None]:
    """Says in one sentence why Triton cannot compile what launches its kernels."""
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
    """Asserts what is refused on a device, but by nothing that runs without one.

    Numbers are Python's own: Triton's just-in-time compiler refuses NumPy's. The grid's second and third side
    are not larger than a device allows: tokens, of which there may be any number, are counted by the first.
    """
    given = dict(zip(kernel.arg_names, args, strict=False)) | constants
    for name, value in [*given.items(), *((f"grid[{i}]", n) for i, n in enumerate(grid))]:
        is_plain = value is None or isinstance(value, Tensor | str) or type(value) in NUMBERS
        assert is_plain, f"{name} of {kernel.__name__} is a {type(value).__module__}.{type(value).__name__}"
    assert max(grid[1:], default=0) <= MOST_PROGRAMS, f"the grid of {kernel.__name__} is {grid}"
