"""The time of a token on a CUDA device by kernel, from torch's profiler.

usage: python bench/gpu/kernel_times.py MODEL [--device cuda:0] [--option NAME=JSON ...] [--prompt 512]

Captured steps are replayed as without the profiler; copies count as kernels. --option: of hotset.load. A
pause between kernels that is longer than GAP counts for the host. A prompt of --prompt tokens has a separate
table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # peers.py of bench/

import numpy as np
import torch
from peers import print_table
from torch.profiler import ProfilerActivity, profile

import hotset
from hotset.errors import HotsetError

STEPS, SHOWN = 8, 24
GAP = 20.0  # microseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--prompt", type=int, default=512)
    args = parser.parse_args()
    options = {"n_ctx": 1024, "max_batch": 512, "sparsity": "dense"}
    options |= {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in args.option)}
    ids = np.random.default_rng(0).integers(3, 259, args.prompt).tolist()
    with hotset.load(args.model, device=args.device, **options) as model:
        given = {"temperature": 0.0, "ignore_eos": True}
        model.generate(ids[:3], max_tokens=4, **given)  # the step of a token is recorded
        start = time.perf_counter()
        model.generate(ids[:3], max_tokens=STEPS + 1, **given)
        print(f"{(time.perf_counter() - start) / (STEPS + 1) * 1e3:.2f} ms a token, not profiled")
        table(lambda: model.generate(ids[:3], max_tokens=STEPS + 1, **given), "a token", STEPS + 1)

        def prompt() -> None:
            model.generate(ids, max_tokens=1, reuse_prefix=False, **given)

        prompt()
        table(prompt, f"a prompt of {args.prompt}", 1)


def table(call: Callable[[], object], what: str, n: int) -> None:
    """Print the kernels of `call`, which does something n times, sorted by time."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    if not spans:
        sys.exit("the profiler recorded no kernel on the device")
    spans.sort()
    start = end = spans[0][0]
    gaps = []
    for first, last in spans:
        gaps.append(max(first - end, 0.0))
        end = max(end, last)
    whole = end - start
    short = sum(gap for gap in gaps if gap < GAP)
    rows = []
    for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        micros = (f"{sum(times) / n:.1f}", f"{np.median(times):.1f}")
        rows.append([name[:70], f"{len(times) / n:.1f}", *micros, f"{sum(times) / whole:.0%}"])
    for name, gap in (("between kernels", short), ("waiting for the host", sum(gaps) - short)):
        rows.append([name, "", f"{gap / n:.1f}", "", f"{gap / whole:.0%}"])
    print(f"\n{what}: {whole / n:.0f} µs on the device")
    print_table(["kernel", "launches", "µs", "µs each", "of the whole"], rows)


if __name__ == "__main__":
    try:
        main()
    except HotsetError as error:
        sys.exit(str(error))
