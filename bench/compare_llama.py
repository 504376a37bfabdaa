"""hotset compared with llama.cpp: decode and prompts, on the same file in turn.

usage: python bench/compare_llama.py --llama BUILD/bin --model SmolLM2.gguf --model b7.gguf [--isa avx2]

Every round runs both programs on the same test within seconds of each other and gives a ratio; the table has
medians. With --isa avx2, use a llama.cpp that was built for AVX2.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import peers
from peers import Job, Row

LARGE = 1 << 30  # bytes; with a larger file, a token takes long and is limited by memory

# Smallest ratio to llama.cpp, by size of the model and kind of test.
TARGETS = {"small": {"pp": 1.5, "tg": 1.8}, "large": {"pp": 1.0, "tg": 1.3}}
LARGE_SHARE = 0.95  # of the read bandwidth: if decode reaches it, the ratio has no target
FORCED_ISA = 1.0


def jobs(model: Path, threads: list[int]) -> list[Job]:
    """Return the measurements of a model."""
    if model.stat().st_size >= LARGE:
        most = max(threads)
        return [Job(model, 256, 32, n_threads=n, repetitions=1 if n < most else 2) for n in threads]
    return [Job(model, 256, 64, n_threads=n) for n in threads]


def set_target(row: Row, job: Job, kind: str, isa: str | None) -> None:
    """Set the expected results of a test."""
    large = job.model.stat().st_size >= LARGE
    if isa:
        row.target = FORCED_ISA
    else:
        row.target = TARGETS["large" if large else "small"][kind]
        if large and kind == "tg":
            row.share_target = LARGE_SHARE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.common_arguments(parser, rounds=5)
    parser.add_argument("--model", type=Path, required=True, action="append", help="GGUF file; repeatable")
    parser.add_argument("--threads", default="2,1", help="numbers of threads (2,1)")
    parser.add_argument("--isa", help="force hotset's kernels: avx2, avx512, scalar, ...")
    args = parser.parse_args()
    ours, llama = peers.hotset(args.isa), peers.llama_bench(args.llama)

    peers.wait_until_quiet(args.force)
    results = {}
    for model in args.model:
        rows = []
        for job in jobs(model, [int(n) for n in args.threads.split(",")]):
            measured = peers.compare(ours, llama, job, args.rounds)
            for row, (_, kind) in zip(measured, job.tests, strict=True):
                set_target(row, job, kind, args.isa)
            rows += measured
        print(f"\n{model.name}, {args.rounds} rounds{f', {args.isa} kernels' if args.isa else ''}\n")
        peers.print_table(peers.HEADERS, [peers.row_cells(row) for row in rows])
        results[model.name] = peers.as_dicts(rows)
    print()
    peers.print_json("compare_llama", isa=args.isa, machine=peers.machine(), results=results)


if __name__ == "__main__":
    main()
