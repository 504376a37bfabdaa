"""The native runtime: plans that share it, cancelled steps, forked processes, and threads that fail to start.

csrc/tests/team_test.cpp (`make kernel-test`) tests the threads after a cancellation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, cpu, tokens
from cases import quick_if
from waiting import WATCHDOG, until

from hotset import _core
from hotset.errors import InvalidRequestError, StepCancelledError
from hotset.formats.gguf import GGUFFile
from hotset.formats.quants import GGMLType, row_bytes

N, WIDTH, N_OPS = 256, 1024, 24


class Chain:
    """A plan of consecutive matrix products: a step takes some hundred milliseconds."""

    def __init__(self, runtime: _core.Runtime, n_ops: int = N_OPS) -> None:
        rng = np.random.default_rng(0)
        self.matrix = (rng.standard_normal((WIDTH, WIDTH)) / 32).astype(np.float32)
        self.plan = _core.Plan(N, 1, 4, runtime)
        rows = rng.standard_normal((2 * N, WIDTH)).astype(np.float32).view(np.uint8).reshape(-1)
        first, *others = [self.plan.buffer(WIDTH, False) for _ in range(3)]
        self.plan.add("embed", weight=(0, rows), of="token", first_row=0, out=first)
        data = self.matrix.view(np.uint8).reshape(-1)
        x = first
        for i in range(n_ops):
            out = others[i % 2] if i < n_ops - 1 else self.plan.buffer(WIDTH, False)
            self.plan.add("linear", x=x, parts=[{"weight": (0, data), "out": out}])
            x = out
        self.out = x
        self.plan.finish()

    def run(self, seed: int) -> None:
        ids = np.arange(N, dtype=np.int32) + np.int32(seed)
        table = np.zeros((1, 4), np.int32)
        every = np.zeros(N, np.int32)
        self.plan.run(ids, np.arange(N, dtype=np.int32), every, table, every[:0])

    def result(self) -> np.ndarray:
        return self.plan.rows(self.out).copy()


@pytest.mark.parametrize("n_threads", [1, 2, 4])
def test_a_step_is_cancelled_and_the_next_one_works(n_threads: int) -> None:
    chain, other = (Chain(_core.Runtime(n)) for n in (n_threads, 1))
    chain.plan.cancel()  # has no effect without a running step
    chain.run(0)
    before = chain.result()
    stop = threading.Event()

    def cancel() -> None:
        while not stop.wait(0.001):
            chain.plan.cancel()

    canceller = threading.Thread(target=cancel)
    canceller.start()

    def is_cancelled() -> bool:
        try:
            chain.run(0)
        except StepCancelledError:
            return True
        return False

    try:
        until(is_cancelled)  # run steps until the other thread cancels in the middle of one
        np.testing.assert_array_equal(chain.result(), before)  # the last operation did not run
        assert not chain.plan.op_seconds(np.zeros(N_OPS + 1, np.int32), 1).any()
    finally:
        stop.set()
        canceller.join()
    chain.run(7)
    other.run(7)
    np.testing.assert_array_equal(chain.result(), other.result())


@pytest.fixture
def alarm() -> Iterator[None]:
    """Send a signal after 20 ms, like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_ctrl_c_ends_a_step_in_its_middle(n_threads: int, alarm: None) -> None:
    chain = Chain(_core.Runtime(n_threads), n_ops=60)
    chain.run(0)
    before = chain.result()

    def run_with_alarm() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        chain.run(7)

    with pytest.raises(KeyboardInterrupt):
        run_with_alarm()
    np.testing.assert_array_equal(chain.result(), before)
    chain.run(0)
    np.testing.assert_array_equal(chain.result(), before)


def test_seconds_of_operations_are_added_up_by_cells() -> None:
    chain = Chain(_core.Runtime(1), n_ops=3)
    chain.run(0)
    each = chain.plan.op_seconds(np.arange(4, dtype=np.int32), 4)
    assert (each > 0).all()
    sums = chain.plan.op_seconds(np.array([2, 0, 2, 0], np.int32), 3)
    np.testing.assert_allclose(sums, [each[1] + each[3], 0, each[0] + each[2]], rtol=1e-12)
    assert chain.plan.op_counts(np.zeros(24, np.int32), 2).tolist() == [0, 0]  # without an FFN, no counts
    with pytest.raises(ValueError, match="1 cells per operation"):
        chain.plan.op_seconds(np.zeros(3, np.int32), 1)
    with pytest.raises(ValueError, match="6 cells per operation"):
        chain.plan.op_counts(np.zeros(4, np.int32), 1)
    for outside in (-1, 2):
        with pytest.raises(ValueError, match="outside the sums"):
            chain.plan.op_seconds(np.array([0, 1, 0, outside], np.int32), 2)


def test_plans_share_a_runtime_in_any_order_of_their_ends() -> None:
    runtime = _core.Runtime(3)
    one = Chain(runtime, 3)
    one.run(0)
    expected = one.result()
    for _ in range(20):
        two = Chain(runtime, 5)  # needs no more memory than the other plan, or more
        two.run(1)
        del two
        one.run(0)
        np.testing.assert_array_equal(one.result(), expected)
    three = Chain(runtime, 3)
    del one, runtime
    three.run(0)
    np.testing.assert_array_equal(three.result(), expected)


def test_threads_that_step_plans_of_one_runtime_take_turns() -> None:
    runtime = _core.Runtime(2)
    chains = [Chain(runtime, 3) for _ in range(3)]
    for i, chain in enumerate(chains):
        chain.run(i)
    expected = [chain.result() for chain in chains]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(10):
            chains[i].run(i)
            if not np.array_equal(chains[i].result(), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- the floating point of the calling thread ---------------------------------------------------------

UPWARD = {"x86_64": 0x800, "AMD64": 0x800, "aarch64": 0x400000, "arm64": 0x400000}


def flush_denormals(on: bool) -> None:
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(on) and on:
        pytest.skip("this processor cannot flush denormals")


def round_upward(on: bool) -> None:
    if os.name == "nt" or platform.machine() not in UPWARD:
        pytest.skip("the number of this rounding mode is not known here")
    assert ctypes.CDLL(None).fesetround(UPWARD[platform.machine()] if on else 0) == 0


def products() -> list[float]:
    """Return this thread's products: a denormal, and one between two floats."""
    a = np.array([2.0**-149, 1 + 2.0**-23], np.float32)
    return (a * np.array([1, 1 + 2.0**-23], np.float32)).tolist()


@pytest.fixture(params=[flush_denormals, round_upward])
def odd_floats(request: pytest.FixtureRequest) -> Iterator[Callable[[bool], None]]:
    """Yield a function that changes this thread's floating-point mode, as an embedder may, and resets it.

    New threads inherit the mode.
    """
    yield request.param
    request.param(False)


def product_of(runtime: _core.Runtime, inputs: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return matrix @ (inputs + inputs), float32."""
    plan = _core.Plan(N, 1, 4, runtime)
    x, y, z = plan.buffer(WIDTH, False), plan.buffer(WIDTH, False), plan.buffer(64, False)
    plan.add("embed", weight=(0, inputs.view(np.uint8).reshape(-1)), of="token", first_row=0, out=x)
    plan.add("add", a=x, b=x, out=y)
    plan.add("linear", x=y, parts=[{"weight": (0, matrix.view(np.uint8).reshape(-1)), "out": z}])
    plan.finish()
    ids, zeros = np.arange(N, dtype=np.int32), np.zeros(N, np.int32)
    plan.run(ids, ids, zeros, np.zeros((1, 4), np.int32), zeros[:0])
    return plan.rows(z).copy()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_bits_do_not_depend_on_the_floating_point_of_the_caller(
    odd_floats: Callable[[bool], None], n_threads: int
) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((N, WIDTH)).astype(np.float32) * np.float32(2.0**-128)  # denormal
    matrix = rng.standard_normal((64, WIDTH)).astype(np.float32)
    expected = product_of(_core.Runtime(1), inputs, matrix)
    plain = products()
    odd_floats(True)
    runtime = _core.Runtime(n_threads)  # its threads inherit this thread's mode
    odd = products()
    found = product_of(runtime, inputs, matrix)
    after = products()
    odd_floats(False)
    later = product_of(runtime, inputs, matrix)
    assert odd == after != plain  # the caller's mode is unchanged
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(later, expected)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_quantised_matrix_does_not_depend_on_it_either(
    odd_floats: Callable[[bool], None], n_threads: int
) -> None:
    matrix = (np.random.default_rng(0).standard_normal((256, 512)) * 2.0**-140).astype(np.float32)

    def quantized() -> np.ndarray:
        out = np.zeros(256 * row_bytes(GGMLType.Q4_1, 512), np.uint8)
        data = matrix.view(np.uint8).reshape(-1)
        assert _core.quantize(GGMLType.F32, data, 256, 512, GGMLType.Q4_1, out, n_threads) == -1
        return out

    expected = quantized()
    odd_floats(True)
    found = quantized()
    odd_floats(False)
    np.testing.assert_array_equal(found, expected)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")


def test_taps_add_no_threads_and_close_ends_them(
    mixed: GGUFFile,
    threads: Callable[[int], int],
) -> None:
    backend = cpu(mixed, n_threads=4)
    assert threads(3) == 3
    for taps in ((), ("blk.0.ffn_act",), ("blk.1.ffn_act",), ("blk.0.ffn_gate",)):
        backend.step(batch([(tokens(3), 0, [0])], taps=taps))
    assert threads(3) == 3
    logits = backend.step(batch([(tokens(3), 0, [0])])).logits  # a view, which holds the plan
    backend.close()
    assert threads(0) == 0
    assert np.isfinite(logits).all()
    with pytest.raises(InvalidRequestError, match="has been closed"):
        backend.step(batch([(tokens(3), 0, [0])]))


def test_a_backend_that_is_refused_leaves_no_threads(
    mixed: GGUFFile,
    threads: Callable[[int], int],
) -> None:
    with pytest.raises(InvalidRequestError, match="nonesuch") as refused:
        cpu(mixed, n_threads=4, isa="nonesuch")
    assert threads(0) == 0, refused  # the exception's frames still hold the backend


def test_a_runtime_that_was_closed_runs_nothing() -> None:
    runtime = _core.Runtime(3)
    chain = Chain(runtime, 2)
    runtime.close()
    runtime.close()
    with pytest.raises(RuntimeError, match="have ended"):
        chain.run(0)
    with pytest.raises(RuntimeError, match="have ended"):
        Chain(runtime, 2)


def test_close_waits_for_the_step_that_runs() -> None:
    runtime = _core.Runtime(2)
    chain = Chain(runtime, 100)
    began = threading.Event()

    def work() -> None:
        began.set()
        with contextlib.suppress(StepCancelledError, RuntimeError):
            while True:
                chain.run(0)

    worker = threading.Thread(target=work)
    worker.start()
    began.wait()
    runtime.close()
    worker.join(WATCHDOG)
    assert not worker.is_alive()


# ---- processes

FORKED = """
import os, sys, threading
sys.path.insert(0, sys.argv[1])
import numpy as np
from test_runtime import Chain, _core

how, n_threads = sys.argv[2], int(sys.argv[3])
chain = Chain(_core.Runtime(n_threads), 4)
chain.run(0)
before = chain.result()
in_step = threading.Thread(target=lambda: [chain.run(0) for _ in range(40)])
if how == "in-step":
    in_step.start()
pid = os.fork()
if pid:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if how == "in-step":
        in_step.join()
    chain.run(0)
    assert (chain.result() == before).all()
    sys.exit(code)
if how == "step" or how == "in-step":
    for _ in range(3):
        chain.run(0)
        assert (chain.result() == before).all()
    grandchild = os.fork()
    if grandchild:
        assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 0
    chain.run(0)
    assert (chain.result() == before).all()
elif how == "drop":
    del chain
"""


def run_python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(Path(__file__).parent), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False, **options)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.parametrize(
    ("how", "n_threads"),
    quick_if(lambda how, n: n > 1 and how == "in-step", ["exit", "drop", "step", "in-step"], [1, 4]),
)
def test_forked_children(how: str, n_threads: int) -> None:
    done = run_python(FORKED, how, n_threads)
    # Objects of the parent's other thread, which was in a step, are never freed; nanobind reports it.
    leaked = how == "in-step" and done.stderr.startswith("nanobind: leaked")
    assert done.returncode == 0, done.stderr
    assert leaked or done.stderr == ""


FORKED_SERVICE = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from sparse_runs import write
from worker_runs import ask, cpu_worker, inputs

# Each case has a process of its own, and what it takes to import torch is paid once.
for how in ("exit", "close", "step", "in-step"):
    case = os.fork()
    if not case:
        break
    code = os.waitstatus_to_exitcode(os.waitpid(case, 0)[1])
    print(how, code, flush=True)
else:
    sys.exit()
folder = Path(sys.argv[2]) / how
folder.mkdir()
cold = cpu_worker(write(folder, "llama"), "exact", n_threads=4)
before = ask(cold, 0, inputs(2))
if how == "in-step":
    cold.begin_step(2)
pid = os.fork()
if pid:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if how == "in-step":
        cold.end_step()
    assert (ask(cold, 0, inputs(2)) == before).all()
    sys.exit(code)
if how == "close":
    cold.close()
if how in ("step", "in-step"):
    for _ in range(3):
        assert (ask(cold, 0, inputs(2)) == before).all()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.slow
def test_forked_children_of_a_cold_service(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run_python(FORKED_SERVICE, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["exit 0", "close 0", "step 0", "in-step 0"]


FEW_THREADS = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from hotset import _core
from hotset.backends.cpu.backend import new_runtime
from hotset.errors import InvalidRequestError
import numpy as np

data = np.zeros(1 << 20, np.uint8)
pages = int(open("/proc/self/statm").read().split()[0])
room = pages * resource.getpagesize() + (100 << 20)
resource.setrlimit(resource.RLIMIT_AS, (room, room))
for start in (lambda: new_runtime(256), lambda: _core.read_bandwidth(data, 256)):
    try:
        start()
    except InvalidRequestError as error:
        print(error)
small = new_runtime(2)
"""


@needs_proc
def test_failed_thread_starts_give_one_message() -> None:
    done = run_python(FEW_THREADS)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("of 256 threads could be started (" in line and "ask for fewer" in line for line in lines)
