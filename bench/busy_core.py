"""How much decode speed remains while another process keeps one core busy?

usage: python bench/busy_core.py --llama BUILD/bin --model SmolLM2.gguf

With as many threads as cores, one thread must share its core. A program that splits its work into equal parts
and waits for the slowest drops to a tenth of its speed; one whose threads claim work loses only that core's
share. The neighbour is a spinning process, free to move, or pinned to the first or the last core.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peers
import psutil
from peers import Job, Program

TARGET = 0.4  # of the quiet speed


@contextmanager
def neighbour(core: int | None) -> Iterator[None]:
    """Run a spinning process during the block, on one core or wherever the system puts it."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        if core is not None:
            psutil.Process(process.pid).cpu_affinity([core])
        yield
    finally:
        process.kill()
        process.wait()


def decode_speed(program: Program, job: Job) -> float:
    return statistics.median(program.bench(job)["tg"]["samples_ts"])


def neighbours() -> dict[str, int | None]:
    """Return the kinds of neighbours: name → core."""
    kinds: dict[str, int | None] = {"free to move": None}
    if hasattr(psutil.Process, "cpu_affinity"):  # macOS cannot pin processes
        cores = sorted(psutil.Process().cpu_affinity())
        kinds |= {f"pinned to core {core}": core for core in dict.fromkeys([cores[0], cores[-1]])}
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.common_arguments(parser, rounds=5)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    programs = [peers.hotset(), peers.llama_bench(args.llama)]
    job = Job(args.model, n_gen=64, n_threads=args.threads)

    peers.wait_until_quiet(args.force)
    rows, results = [], {}
    for kind, core in neighbours().items():
        for program in programs:

            def one(_: int, program: Program = program, core: int | None = core) -> tuple[float, float]:
                quiet = decode_speed(program, job)
                with neighbour(core):
                    return quiet, decode_speed(program, job)

            pairs, disturbed = peers.undisturbed(args.rounds, one, f"{program.name}, {kind}")
            quiet, busy = (statistics.median(column) for column in zip(*pairs, strict=True))
            kept = statistics.median(b / q for q, b in pairs)
            passed = peers.verdict(kept >= TARGET) if program is programs[0] else ""
            note = f"{disturbed} rounds disturbed" if disturbed else ""
            rows.append(
                [f"{program.name}, {kind}", f"{quiet:.1f}", f"{busy:.1f}", f"{kept:.0%}", passed, note]
            )
            results[f"{program.name}, {kind}"] = {"pairs": pairs, "kept": kept, "disturbed": disturbed}
    print(f"\n{args.model.name}, decode with {args.threads} threads, one core busy, {args.rounds} rounds\n")
    peers.print_table(
        ["program, neighbour", "quiet t/s", "busy t/s", "kept", f"target {TARGET:.0%}", ""], rows
    )
    print()
    peers.print_json("busy_core", machine=peers.machine(), results=results)


if __name__ == "__main__":
    main()
