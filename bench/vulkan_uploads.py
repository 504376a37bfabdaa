"""The speed of uploads to a Vulkan device, and whether uploading an expert for its step pays.

    python bench/vulkan_uploads.py                    # of each type, to allocated memory
    python bench/vulkan_uploads.py --model model.gguf # and a file, from the disk and from the system's cache

The CPU computes an expert that the device lacks; it could also be uploaded for its step: from how many tokens
on would that be faster? On a software driver nothing crosses a bus, and the device's memory is this
machine's, which provides new pages at the rate in the last line. Prints one line of JSON last. See
docs/guides/vulkan.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hotset import _core
from hotset.backends.vulkan.devices import find_device
from hotset.backends.vulkan.weights import COMPUTED, VulkanWeights
from hotset.cores import usable_cores
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType, row_bytes
from hotset.placement.machine import cpu_rates
from hotset.reporter import Reporter

SHAPES = {  # columns and rows, of 30B-A3B and of gpt-oss
    GGMLType.MXFP4: (2880, 2880), GGMLType.Q6_K: (768, 2048),
}  # fmt: skip
N_BYTES = 64 << 20  # of matrices in sequence, more than caches have
N_RUNS = 5
N_THREADS = usable_cores()


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def rate_of(device: Any, type_: GGMLType, n_cols: int, n_rows: int, n_threads: int) -> float:
    """Return bytes of the file per second: the median of some runs."""
    matrix = n_rows, row_bytes(type_, n_cols)
    n = -(-N_BYTES // math.prod(matrix))
    data = np.random.default_rng(0).integers(0, 256, (n, *matrix), np.uint8)
    sizes = (size * n * -(-n_rows // 32) for size in _core.vulkan_tile_bytes(type_, n_cols))
    places = [(device.allocate(size, "device"), 0) if size else None for size in sizes]
    for place in places:
        if place is not None:
            place[0].clear()
    rows = np.arange(n_rows, dtype=np.int32)
    times = [
        seconds(lambda: _core.vulkan_upload(type_, n_cols, data, rows, places[0], places[1], n_threads))
        for _ in range(N_RUNS)
    ]
    return data.nbytes / statistics.median(times)


def read(path: Path) -> None:
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def evict(path: Path) -> None:
    """Remove a file from the system's cache; it must not be mapped."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(path: Path, device: Any) -> None:
    """Load all matrices of a file, like a stage."""
    with open_gguf(path) as gguf:
        weights = VulkanWeights(gguf, device)
        for name, info in gguf.tensors.items():
            if len(info.shape) == 2 and info.type in COMPUTED:
                weights.rows(name, info.shape[0], 0, info.shape[1])


def rates_of_file(path: Path, device: Any) -> dict[str, float]:
    """Return bytes per second of reading and loading a file, with an empty and with a full cache.

    The last one is of new pages of memory.
    """
    size, times = path.stat().st_size, dict[str, float]()
    for what in ("cold", "warm"):
        for name, work in (("read", lambda: read(path)), ("loaded", lambda: load(path, device))):
            if what == "cold":
                evict(path)
            times[f"{name} {what}"] = seconds(work)
    pages = np.array_split(np.empty(size, np.uint8), N_THREADS)
    with ThreadPoolExecutor(N_THREADS) as pool:
        times["new pages"] = seconds(lambda: list(pool.map(lambda part: part.fill(1), pages)))
    for name, taken in times.items():
        print(f"{name}: {taken:.2f} s, {size / taken / 1e9:.3g} GB/s")
    return {name: size / taken for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file whose matrices are loaded")
    parser.add_argument("--device", default="vulkan")
    options = parser.parse_args()
    device, cpu = _core.VulkanDevice(find_device(options.device).index), cpu_rates(None, Reporter())
    print(f"{device.name}; the CPU's product: {cpu['read'] / 1e9:.3g} GB/s of one token, {cpu['many'] / 1e9:.3g} of many")  # fmt: skip  # noqa: E501
    found = {}
    for type_ in COMPUTED:
        one, all_ = (rate_of(device, type_, *SHAPES.get(type_, (2048, 768)), n) for n in (1, N_THREADS))
        least = math.ceil(cpu["many"] / all_)
        found[type_.name] = {"of one thread": one, "uploaded": all_, "tokens": least}
        print(f"{type_.name}: {one / 1e9:.3g} GB/s by one thread, {all_ / 1e9:.3g} by {N_THREADS}; pays from {least} tokens on")  # fmt: skip  # noqa: E501
    of_file = rates_of_file(options.model, device) if options.model else {}
    print(json.dumps({"cpu": cpu, "types": found, "file": of_file}))


if __name__ == "__main__":
    main()
