"""From the start of the process to the first token, and the memory it takes.

usage: python bench/startup.py --model SmolLM2.gguf

Time: from the start of `hotset run MODEL PROMPT`, with a warm file cache, to the first byte of the answer on
its standard output. Memory: the largest resident set of a run with a long prompt, including the pages of the
mapped file.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import peers
import psutil

from hotset.formats.gguf import open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.cost import Cost
from hotset.model.decoder import describe

FIRST_TOKEN = 1.0  # seconds
OVERHEAD = 200e6  # bytes beyond file and KV cache
UNWANTED = ("torch", "transformers")
RUN = [sys.executable, "-m", "hotset.cli.main", "run"]
N_CTX = 4096


def first_token_seconds(model: Path) -> float:
    """Return the seconds until `hotset run` has written the first byte of an answer."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [*RUN, str(model), "What is the capital of France?", "-n", "8", "--temp", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.perf_counter() - start
    process.stdout.read()
    if process.wait() or not first:
        sys.exit("hotset run failed: run it yourself to see why.")
    return seconds


def peak_memory(model: Path) -> int:
    """Return the largest resident set in bytes, with a prompt of about 2,000 tokens and an answer of 64."""
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        prompt.write_text("The quick brown fox jumps over the lazy dog. " * 200)
        command = [*RUN, "-m", str(model), "-f", str(prompt), "-n", "64", "-c", str(N_CTX), "--ignore-eos"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        running = psutil.Process(process.pid)
        peak = 0
        while process.poll() is None:
            try:
                peak = max(peak, running.memory_info().rss)
            except psutil.Error:  # it has just ended
                break
            time.sleep(0.01)
    if process.wait():
        sys.exit("hotset run failed: run it yourself to see why.")
    return peak


def unwanted_imports(model: Path) -> list[str]:
    """Return the heavy packages that an answer imported."""
    command = [sys.executable, "-X", "importtime", *RUN[1:], str(model), "Hello", "-n", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    return [name for name in UNWANTED if name in imported]


def kv_bytes(model: Path) -> int:
    """Return the bytes of the cache for N_CTX tokens."""
    with open_gguf(model) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        return N_CTX * Cost(graph, gguf.tensors).kv_bytes_per_token("f16")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
    args = parser.parse_args()
    peers.wait_until_quiet(args.force)

    first_token_seconds(args.model)  # warms the file cache
    seconds, disturbed = peers.undisturbed(args.rounds, lambda _: first_token_seconds(args.model), "startup")
    peak, file, kv = peak_memory(args.model), args.model.stat().st_size, kv_bytes(args.model)
    imported = unwanted_imports(args.model)
    time_ok, memory_ok = statistics.median(seconds) < FIRST_TOKEN, peak <= file + kv + OVERHEAD
    print(f"\n{args.model.name}, {args.rounds} rounds, {disturbed} disturbed, context {N_CTX}\n")
    peers.print_table(
        ["what", "measured", "target", ""],
        [
            [
                "process start to first token",
                f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})",
                f"under {FIRST_TOKEN:.0f} s",
                peers.verdict(time_ok),
            ],
            [
                "resident memory, at most",
                f"{peak / 1e6:.0f} MB = file {file / 1e6:.0f} + KV {kv / 1e6:.0f}"
                f" + {(peak - file - kv) / 1e6:.0f}",
                f"file + KV + {OVERHEAD / 1e6:.0f}",
                peers.verdict(memory_ok),
            ],
            [
                "imports",
                ", ".join(imported) or "none",
                f"not {', '.join(UNWANTED)}",
                peers.verdict(not imported),
            ],
        ],
    )
    print()
    peers.print_json(
        "startup",
        machine=peers.machine(),
        first_token=seconds,
        peak=peak,
        file=file,
        kv=kv,
        imported=imported,
    )


if __name__ == "__main__":
    main()
