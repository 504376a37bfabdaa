"""Run tests next to other work: none may depend on time, scheduling, free memory or the page cache.

    python tests/support/loaded.py               # the suspects ten times, then the whole suite twice
    python tests/support/loaded.py -n 3 tests/backends/cpu/test_runtime.py

It runs one busy process per core, and one that allocates all memory except what two workers need and touches
it continuously, so that the kernel keeps dropping cached pages of files.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
from paths import TESTS

_BLOCK = 64 << 20

# Tests of threads, signals, killed processes, sockets, clocks and measured memory.
SUSPECTS = [
    "formats/test_mapped.py", "backends/cpu/test_runtime.py", "backends/triton/test_cpu_worker.py",
    "engine/test_driver.py", "server/test_server_faults.py", "server/test_server_connections.py",
    "server/test_server_pace.py", "server/test_server_models.py", "server/test_server_listen.py",
    "server/test_preparation.py", "server/test_replies.py", "server/test_request_log.py",
    "test_async_model.py", "scale/test_scale_links.py", "scale/test_scale_front.py",
    "repository/test_deployment.py",
    "bench/test_bench_gpu.py", "engine/test_engine.py::test_a_decode_step_costs_little_python",
    "test_api.py::test_a_closed_model_says_so",
    "server/test_batch.py::test_killed_runs_neither_lose_nor_repeat_a_line",
    "text/test_chat.py::test_the_process_ends_with_its_parent",
    "convert/test_convert.py::test_memory_does_not_grow_with_the_checkpoint",
    "convert/test_convert.py::test_a_killed_process_leaves_nothing",
    "formats/test_quantize.py::test_memory_does_not_grow_with_the_model",
    "formats/test_quantize.py::test_a_killed_process_leaves_nothing",
    "test_files_written.py::test_a_killed_writer_leaves_nothing",
    "storage/test_storage.py::test_a_server_that_drips_is_given_up",
    "storage/test_storage.py::test_a_slow_server_is_heard_to_the_end",
    "offload/test_store.py::test_memory_is_given_before_it_is_needed",
    "backends/triton/test_hybrid.py::test_closing_ends_every_thread",
    "server/test_server_security.py::test_slow_bodies_time_out",
    "training/test_train_predictor.py::test_a_killed_process_leaves_whole_files_and_its_workers_follow",
]  # fmt: skip


def has_parent() -> bool:
    """Return whether the parent process exists: a killed parent cannot end its children."""
    parent = multiprocessing.parent_process()
    return parent is not None and parent.is_alive()


def busy() -> None:
    while has_parent():
        for _ in range(1000):
            sum(range(10_000))


def hog(free_bytes: int) -> None:
    """Allocate memory until `free_bytes` are left, follow others' usage, and touch it."""
    with contextlib.suppress(OSError):  # the kernel kills this process first if memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    blocks: list[np.ndarray] = []
    while has_parent():
        available = psutil.virtual_memory().available
        if available > free_bytes + _BLOCK:
            blocks.append(np.ones(_BLOCK, np.uint8))
        elif available < free_bytes - _BLOCK and blocks:
            blocks.pop()
        else:
            for block in blocks:
                block[::4096] += 1
            time.sleep(0.05)


@contextlib.contextmanager
def beside(work: Callable[..., None], *arguments: int) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--times", type=int, default=10, help="runs of the tests that are named")
    parser.add_argument("--whole", type=int, help="runs of the whole suite after them")
    parser.add_argument("--free", type=float, default=5.0, help="GiB of memory that are left to the tests")
    parser.add_argument("tests", nargs="*", help="what pytest runs; without it the suspects, then everything")
    given = parser.parse_args()
    tests = given.tests or [str(TESTS / name) for name in SUSPECTS]
    whole = given.whole if given.whole is not None else (0 if given.tests else 2)
    runs = [["-m", "", *tests]] * given.times + [[str(TESTS)]] * whole
    with contextlib.ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            stack.enter_context(beside(busy))
        stack.enter_context(beside(hog, int(given.free * 2**30)))
        for i, arguments in enumerate(runs, 1):
            began = time.monotonic()
            done = subprocess.run([sys.executable, "-m", "pytest", "-n", "2", *arguments], check=False)
            seconds = time.monotonic() - began
            print(f"run {i} of {len(runs)}: exit status {done.returncode}, {seconds:.0f} s", flush=True)
            if done.returncode != 0:
                sys.exit(1)


if __name__ == "__main__":
    main()
