"""What does each type of the KV cache cost or gain far into a context? One process, steps in turn.

usage: python bench/kv_types.py MODEL [--depth N] [--tokens N] [--types A,B,...] [--rounds N] [--threads N]

All caches are open at once, with the same weights and threads, and each round runs one step of each in turn,
so that a busy machine slows all equally: compare the ratios, which are medians over rounds. A step has one
token (decode), or --tokens of a prompt. The tokens before it are copies of one computed block in separate
blocks; attention reads them like any others. Prints a Markdown table and one line of JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from peers import machine, print_json, print_table

from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.backends.stage import BackendOptions
from hotset.formats.gguf import open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.cost import Cost
from hotset.model.decoder import describe


def step(n_tokens: int, depth: int) -> Batch:
    """Return the tokens from position `depth` on; position p is in block p // BLOCK_SIZE."""
    positions = np.arange(depth, depth + n_tokens, dtype=np.int32)
    blocks = np.arange(-(-(depth + n_tokens) // BLOCK_SIZE), dtype=np.int32)[None]
    ids = (positions * 7919 % 500).astype(np.int32)
    return Batch(ids, positions, np.zeros_like(positions), blocks, np.array([n_tokens - 1], np.int32))


def seconds_of(backend: CpuBackend, batch: Batch) -> float:
    start = time.perf_counter()
    backend.step(batch)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--depth", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=1, help="per step (1)")
    parser.add_argument("--types", default="f16,q8_0,q4_0,q8_0/q4_0", help="the first is compared with")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    types, n_blocks = args.types.split(","), -(-(args.depth + args.tokens) // BLOCK_SIZE)
    runtime, most = new_runtime(args.threads), max(args.tokens, BLOCK_SIZE)
    with open_gguf(args.model) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        cost = Cost(graph, gguf.tensors)
        backends = [
            CpuBackend(
                gguf, graph, BackendOptions(n_blocks=n_blocks, max_batch=most, kv_type=name), runtime=runtime
            )
            for name in types
        ]
        batch = step(args.tokens, args.depth)
        for backend in backends:
            backend.step(step(BLOCK_SIZE, 0))
            block = backend.read_block(0)
            for i in range(1, n_blocks):
                backend.write_block(i, block)
            backend.step(batch)
        times = np.array([[seconds_of(backend, batch) for backend in backends] for _ in range(args.rounds)])
        rows, found = [], {}
        for name, own in zip(types, times.transpose(), strict=True):
            n_bytes, seconds = cost.kv_bytes_per_token(name), statistics.median(own)
            ratio = statistics.median(times[:, 0] / own)
            rows.append([name, f"{n_bytes:,}", f"{args.tokens / seconds:.1f}", f"{ratio:.2f}×"])
            found[name] = {"kv_bytes_per_token": n_bytes, "seconds": seconds, "speed_ratio": ratio}
        print_table(("cache", "bytes a token", "t/s", f"÷ {types[0]}"), rows)
        print_json(
            "kv_types", **machine(), model=args.model, depth=args.depth, tokens=args.tokens,
            threads=runtime.n_threads, rounds=args.rounds, types=found,
        )  # fmt: skip
        for backend in backends:
            backend.close()
    runtime.close()


if __name__ == "__main__":
    main()
