"""How fast an expert is rearranged for a Vulkan device, beside the CPU's product with it (docs/VULKAN.md).

    python bench/vulkan_uploads.py

An expert that the device lacks is computed by the CPU, or could be uploaded for its step: from how many
tokens on would that be quicker, if the copy over the bus took no time? Ends in one line of JSON.
"""

from __future__ import annotations

import json
import math
import statistics
import time

import numpy as np

from hotset import _core
from hotset.formats.quants import GGMLType, row_bytes
from hotset.placement.machine import cpu_rates
from hotset.reporter import Reporter

SHAPES = {  # columns and rows, of 30B-A3B and of gpt-oss
    "Q4_0": (2048, 768), "Q8_0": (2048, 768), "Q4_K": (2048, 768), "Q6_K": (768, 2048), "MXFP4": (2880, 2880),
}  # fmt: skip
N_BYTES = 64 << 20  # of matrices in a row, more than caches hold
N_RUNS = 5


def rate_of(type_: GGMLType, n_cols: int, n_rows: int) -> float:
    """Bytes of the file per second, on one thread: the median of some runs."""
    one = np.random.default_rng(0).integers(0, 256, (n_rows, row_bytes(type_, n_cols)), np.uint8)
    matrices = [one.copy() for _ in range(-(-N_BYTES // one.nbytes))]
    chosen, times = np.arange(n_rows, dtype=np.int32), []
    for _ in range(N_RUNS):
        began = time.perf_counter()
        for rows in matrices:
            _core.vulkan_rearranged(type_, n_cols, rows[None], chosen, 1)
        times.append(time.perf_counter() - began)
    return len(matrices) * one.nbytes / statistics.median(times)


def main() -> None:
    cpu = cpu_rates(None, Reporter())
    print(f"the CPU's product: {cpu['read'] / 1e9:.3g} GB/s of one token, {cpu['many'] / 1e9:.3g} of many")
    found = {}
    for name, (n_cols, n_rows) in SHAPES.items():
        rate = rate_of(GGMLType[name], n_cols, n_rows)
        found[name] = {"rearranged": rate, "tokens": math.ceil(cpu["many"] / rate)}
        least = found[name]["tokens"]
        print(f"{name}: rearranged at {rate / 1e9:.3g} GB/s; uploads pay from {least} tokens on")
    print(json.dumps({"cpu": cpu, "types": found}))


if __name__ == "__main__":
    main()
