"""How soon does a cancelled step end? A chunk of a long prompt through layers of the shape of a 7B model.

usage: python bench/cancel.py [--threads N] [--trials N] [--tokens N]

Weights are random Q4_0 bytes. Steps are cancelled at random times, by another thread (`cancel`) and by a
signal whose handler raises (Ctrl-C). Prints a Markdown table of milliseconds, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np

from hotset import _core
from hotset.cores import usable_cores
from hotset.errors import StepCancelledError

WIDTH, N_FF, HEADS, HEAD_DIM, Q4_0 = 4096, 11008, 32, 128, 2
N_LAYER = 4


def layers(runtime: _core.Runtime, n_tokens: int, kind: str) -> Any:
    """Return a plan of N_LAYER layers that share their weights. kind: of the down projection."""
    n_blocks = -(-n_tokens // _core.KV_BLOCK_SIZE)
    plan = _core.Plan(n_tokens, n_blocks, n_blocks, runtime)
    rng = np.random.default_rng(0)

    def matrix(rows: int, cols: int) -> np.ndarray:
        blocks = np.zeros((rows * cols // 32, 18), np.uint8)
        blocks[:, 1] = 0x0C  # scales of 2^-12
        blocks[:, 2:] = rng.integers(0, 256, (len(blocks), 16), np.uint8)
        return blocks.reshape(-1)

    square, wide = matrix(WIDTH, WIDTH), [matrix(N_FF, WIDTH) for _ in range(2)]
    tall = matrix(WIDTH, N_FF)
    buffer = lambda width: plan.buffer(width, False)  # noqa: E731
    x, q, k, v, a, o, h = (buffer(WIDTH) for _ in range(7))
    f = buffer(N_FF)
    caches = [np.zeros(n_blocks * HEADS * _core.KV_BLOCK_SIZE * HEAD_DIM * 2, np.uint8) for _ in range(2)]
    plan.add("embed", weight=(Q4_0, square), of="token", first_row=0, out=x)
    for _ in range(N_LAYER):
        plan.add("linear", x=x, parts=[{"weight": (Q4_0, square), "out": out} for out in (q, k, v)])
        plan.add(
            "attention", q=q, k=k, v=v, out=a, n_head=HEADS, n_head_kv=HEADS, head_dim=HEAD_DIM,
            head_dim_v=HEAD_DIM, scale=0.1, softcap=0.0, window=0, kv_type="f16", k_cache=caches[0],
            v_cache=caches[1],
        )  # fmt: skip
        plan.add("linear", x=a, parts=[{"weight": (Q4_0, square), "out": o}], residual=x)
        gate_and_up = [{"weight": (Q4_0, w), "out": f} for w in wide]
        plan.add("linear", x=o, parts=gate_and_up, gated=True, activation="relu")
        if kind == "axpy":
            plan.add("transposed_linear", x=f, weight=(Q4_0, tall), residual=o, sparse=True, out=h)
        else:
            plan.add("linear", x=f, parts=[{"weight": (Q4_0, tall), "out": h}], residual=o)
        x, h = h, x
    plan.finish()
    return plan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    n = args.tokens
    ids, zeros = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
    table = np.arange(-(-n // _core.KV_BLOCK_SIZE), dtype=np.int32)[None]
    began = 0.0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    results: dict[str, Any] = {"threads": args.threads, "tokens": n, "layers": N_LAYER}
    print("| down projection | whole step | cancelled by | median | worst |\n|---|---|---|---|---|")
    for kind in ("linear", "axpy"):
        plan = layers(_core.Runtime(args.threads), n, kind)
        whole = []
        for _ in range(2):
            started = time.perf_counter()
            plan.run(ids, ids, zeros, table, ids[:0])
            whole.append(time.perf_counter() - started)
        for how in ("thread", "signal"):
            taken = []
            for trial in range(args.trials):
                delay = random.Random(trial).uniform(0.05, 0.5) * min(whole)

                def end(how: str = how, plan: Any = plan) -> None:
                    nonlocal began
                    began = time.perf_counter()
                    plan.cancel() if how == "thread" else os.kill(os.getpid(), signal.SIGALRM)

                timer = threading.Timer(delay, end)
                timer.start()
                try:
                    plan.run(ids, ids, zeros, table, ids[:0])
                except (StepCancelledError, KeyboardInterrupt):
                    taken.append(1e3 * (time.perf_counter() - began))
                timer.join()
            median, worst = float(np.median(taken)), max(taken)
            results[f"{kind}/{how}"] = {"whole_s": min(whole), "ms": taken}
            print(f"| {kind} | {min(whole):.2f} s | {how} | {median:.1f} ms | {worst:.1f} ms |", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
