"""The time of the host between two tokens on a Vulkan device, without the device's own work.

usage: python bench/vulkan_host.py MODEL [-n 500] [--device vulkan:0]

Each step is complete but for the device, which waits 1 ms instead of computing. So the tokens mean nothing,
and the time is the same on every device: from the end of one wait to the begin of the next. Meanwhile the
client's thread may run, as it does while a real device computes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import hotset
from hotset import _core

WAIT_S = 0.001
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "default": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-n", "--n-gen", type=int, default=500)
    parser.add_argument("--device", default="vulkan")
    args = parser.parse_args()
    begun: list[float] = []
    ended: list[float] = []

    def wait(*_: Any) -> None:
        begun.append(time.perf_counter())
        time.sleep(WAIT_S)
        ended.append(time.perf_counter())

    found = {}
    with hotset.load(args.model, device=args.device, n_ctx=args.n_gen + 64) as model:
        answer = {"max_tokens": args.n_gen, "ignore_eos": True}
        model.generate("The history of the city", **answer | {"max_tokens": 4})
        _core.vulkan_run = wait
        for name, sampling in SAMPLING.items():
            begun.clear(), ended.clear()
            model.generate("The history of the city", **answer, **sampling)
            seconds = [after - before for before, after in zip(ended[2:], begun[3:], strict=False)]
            found[name] = 1e3 * statistics.median(seconds)
            print(f"{name}: {found[name]:.3f} ms between two tokens, {1e3 * min(seconds):.3f} ms at least")
    print(json.dumps({"host_ms": found}))


if __name__ == "__main__":
    main()
