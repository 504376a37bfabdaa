"""Decode and prefill deep in the context: hotset, llama.cpp with flash attention, and ik_llama.cpp.

usage: python bench/depths.py MODEL.gguf --llama BUILD/bin [--ik BUILD/bin] [--depths 4096] [--kv-types f16]

At each depth a prompt of 512 tokens and 32 generated tokens are timed, for each type of the KV cache. The
table includes the roofline: the bytes that a token reads (weights, keys and values) over the rate at which
the file is read. Most of the time is needed to fill the caches, which is not timed: minutes at a depth of
16,384.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peers
from peers import Job, Program

N_PROMPT, N_GEN = 512, 32
TARGETS = {4096: 1.7, 16384: 2.4}  # decode in F16, smallest ratio to the better peer
SHARE_TARGET = 0.8  # of the read rate


@dataclass(frozen=True)
class SweepBench:
    """ik_llama.cpp's llama-sweep-bench, which measures at multiples of a stride: at 0 and at the depth."""

    program: Path
    name: str = "ik_llama.cpp"

    def bench(self, job: Job) -> dict[str, dict[str, Any]]:
        argv = [str(self.program), "-m", str(job.model), "-c", str(job.n_depth + job.n_prompt), "-fa", "on"]
        argv += ["-b", str(job.n_prompt), "-ub", str(job.n_prompt), "-n", str(job.n_gen)]
        argv += ["-t", str(job.n_threads), "-ctk", job.kv_type, "-ctv", job.kv_type]
        argv += ["--sweep-stride", str(job.n_depth // job.n_prompt), "--output-format", "jsonl"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr  # results are logged
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        found = [line for line in lines if line["n_kv"] == job.n_depth]
        if done.returncode or not found:
            sys.exit(f"{' '.join(argv)} failed:\n{done.stderr.strip()[-2000:]}")
        return {kind: {"samples_ts": [found[0][f"speed_{kind}"]]} for kind in ("pp", "tg")}


def programs(llama: Path, ik: Path | None) -> list[Program | SweepBench]:
    with_flash_attention = replace(
        peers.llama_bench(llama), kv_flags=lambda type_: ["-ctk", type_, "-ctv", type_, "-fa", "1"]
    )
    sweep = [] if ik is None else [SweepBench(ik / "llama-sweep-bench")]
    return [peers.hotset(), with_flash_attention, *sweep]


def measure(job: Job, all_programs: list[Program | SweepBench], rounds: int) -> dict[str, Any]:
    """Return medians of the rounds: each program's t/s by kind, hotset first, and ratios of pairs."""
    read = peers.bandwidth_reader(job.model, job.n_threads)
    read()
    speeds: dict[str, list[list[float]]] = {"pp": [], "tg": []}
    shares = []
    for i in range(rounds):
        rates, entries = [], {}
        for program in all_programs if i % 2 == 0 else all_programs[::-1]:
            rates.append(read())
            entries[program.name] = program.bench(job)
        for kind, rows in speeds.items():
            rows.append([statistics.median(entries[p.name][kind]["samples_ts"]) for p in all_programs])
        n_bytes = entries["hotset"]["tg"]["bytes_per_token"]
        shares.append(speeds["tg"][-1][0] * n_bytes / statistics.median(rates))
        print(
            f"a token reads {n_bytes / 1e6:.0f} MB, at {statistics.median(rates) / 1e9:.1f} GB/s: "
            f"{statistics.median(rates) / n_bytes:.1f} t/s at most",
            file=sys.stderr,
        )
    found: dict[str, Any] = {"depth": job.n_depth, "kv_type": job.kv_type, "share": statistics.median(shares)}
    for kind, rows in speeds.items():
        found[kind] = [statistics.median(column) for column in zip(*rows, strict=True)]
        found[f"{kind}_ratio"] = statistics.median(row[0] / max(row[1:]) for row in rows)
        found[f"{kind}_rounds"] = rows
    return found


def cells(found: dict[str, Any]) -> list[str]:
    target = TARGETS.get(found["depth"]) if found["kv_type"] == "f16" else None
    verdict = "" if target is None else f" ({target}× {peers.verdict(found['tg_ratio'] >= target)})"
    share = f"{found['share']:.0%} ({SHARE_TARGET:.0%} {peers.verdict(found['share'] >= SHARE_TARGET)})"
    decode, prefill = ([f"{speed:.1f}" for speed in found[kind]] for kind in ("tg", "pp"))
    return [
        f"{found['depth']:,}", found["kv_type"],
        *decode, f"{found['tg_ratio']:.2f}×{verdict}", share,
        *prefill, f"{found['pp_ratio']:.2f}×",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.common_arguments(parser, rounds=3)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ik", type=Path, help="bin folder of an ik_llama.cpp build")
    parser.add_argument("--depths", default="4096,16384,32768", help="multiples of 512 (4096,16384,32768)")
    parser.add_argument("--kv-types", default="f16,q8_0,q4_0", help="f16,q8_0,q4_0")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    peers.wait_until_quiet(args.force)
    all_programs = programs(args.llama, args.ik)
    names = [program.name for program in all_programs]
    headers = ["depth", "cache", *names, "÷ the better peer", "of the read rate"]
    headers += [f"prefill: {names[0]}", *names[1:], "÷ the better peer"]
    print(f"{args.model.name}, {args.rounds} rounds\n\n| {' | '.join(headers)} |\n{'|---' * len(headers)}|")
    results = []
    for depth in map(int, args.depths.split(",")):
        for kv_type in args.kv_types.split(","):
            job = Job(args.model, N_PROMPT, N_GEN, depth, args.threads, kv_type, repetitions=1)
            results.append(measure(job, all_programs, args.rounds))
            print(f"| {' | '.join(cells(results[-1]))} |", flush=True)
    print()
    peers.print_json("depths", machine=peers.machine(), model=args.model.name, results=results)


if __name__ == "__main__":
    main()
