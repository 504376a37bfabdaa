"""Two programs on one machine, measured fairly: in turn, in pairs, and with a check for other programs.

A shared machine's memory speed doubles and halves within seconds, and a neighbour on one core can cost a
program nine tenths of its speed. So programs take turns within seconds of each other, each round gives a
ratio, and the median counts. CPU time of other programs disqualifies a round, and the rate at which the
model's file can be read is measured in between.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

DISTURBED = 0.1  # cores that others may use without disqualifying a measurement
READ_BYTES = 2 << 30  # at most this much of a file is read to measure bandwidth

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One call of a benchmark program: `pp` and `tg` tests that share a model, threads and cache.

    n_prompt, n_gen: tokens of the two tests, 0 for none. n_depth: tokens in the cache before.
    """

    model: Path
    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    n_threads: int = 2
    kv_type: str = "f16"
    repetitions: int = 3

    @property
    def tests(self) -> list[tuple[str, str]]:
        """Return the name and kind ("pp" or "tg") of each test."""
        tail = f" @ d{self.n_depth} {self.kv_type}" if self.n_depth else ""
        sizes = {"pp": self.n_prompt, "tg": self.n_gen}
        return [(f"{kind}{size}{tail}, {self.n_threads}t", kind) for kind, size in sizes.items() if size]


@dataclass(frozen=True)
class Program:
    """A command that takes llama-bench's options. kv_flags: additional options for a type of KV cache."""

    name: str
    command: tuple[str, ...]
    kv_flags: Callable[[str], list[str]]
    env: dict[str, str] = field(default_factory=dict)

    def bench(self, job: Job) -> dict[str, dict[str, Any]]:
        """Run the job: return kind of test ("pp", "tg") → llama-bench's entry."""
        argv = [*self.command, "-m", str(job.model), "-p", str(job.n_prompt), "-n", str(job.n_gen)]
        argv += ["-d", str(job.n_depth), "-t", str(job.n_threads), "-r", str(job.repetitions), "-o", "json"]
        argv += self.kv_flags(job.kv_type)
        done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | self.env, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(argv)} failed:\n{done.stderr.strip()[-2000:]}")
        return {"pp" if entry["n_prompt"] else "tg": entry for entry in json.loads(done.stdout)}


def hotset(isa: str | None = None) -> Program:
    """Return this checkout's `hotset bench`, with the kernels of `isa` or those chosen for the processor."""
    return Program(
        "hotset",
        (sys.executable, "-m", "hotset.cli.main", "bench"),
        lambda kv_type: ["-ctk", kv_type],
        {"HOTSET_ISA": isa} if isa else {},
    )


def llama_bench(folder: Path) -> Program:
    """Return llama-bench of a llama.cpp build. A quantised V cache works only with flash attention."""
    program = folder / "llama-bench"
    if not program.is_file():
        sys.exit(f"There is no llama-bench in {folder}: give the bin folder of a llama.cpp build.")
    return Program(
        "llama.cpp",
        (str(program),),
        lambda kv_type: [] if kv_type == "f16" else ["-ctk", kv_type, "-ctv", kv_type, "-fa", "1"],
    )


# -- is the machine quiet? -----------------------------------------------------------------------


class Others:
    """A measurement of the cores that others use during a block, without this process and its children.

    Time that a hypervisor gave to other machines ("steal") counts too, because it is missing. Children count
    as ours only once they have been waited for.
    """

    cores = 0.0

    def __enter__(self) -> Others:
        self._start = time.perf_counter(), _busy(), _own()
        return self

    def __exit__(self, *_: object) -> None:
        start, busy, own = self._start
        seconds = time.perf_counter() - start
        self.cores = max(0.0, (_busy() - busy) - (_own() - own)) / seconds


def _busy() -> float:
    """Return the CPU seconds used on the whole machine since its start."""
    times = psutil.cpu_times()._asdict()  # guest time is part of user time, iowait is idle
    return sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def _own() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _spin(seconds: float) -> float:
    """Spin, and return the share of a core that this process got."""
    start, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        pass
    return (time.process_time() - used) / (time.perf_counter() - start)


def wait_until_quiet(force: bool = False, patience: float = 120.0) -> None:
    """Return when the machine is idle: no process computes, and a spinning process per core gets its core.

    After `patience` seconds, exit with a message, or with `force` print a warning and return.
    """
    n_cores = os.cpu_count() or 1
    deadline = time.monotonic() + patience
    with multiprocessing.get_context("spawn").Pool(n_cores) as pool:
        pool.map(_spin, [0.01] * n_cores)  # the processes have started
        while True:
            with Others() as others:
                time.sleep(1.0)
            share = min(pool.map(_spin, [0.3] * n_cores, chunksize=1))
            if others.cores < DISTURBED and share > 0.9:
                return
            state = f"others use {others.cores:.2f} cores, a spinning process gets {share:.0%} of one"
            if force or time.monotonic() > deadline:
                break
            print(f"waiting for a quiet machine: {state}", file=sys.stderr)
            time.sleep(5.0)
    if not force:
        sys.exit(f"The machine is not quiet ({state}): stop other programs, or measure with --force.")
    print(f"warning: the machine is not quiet ({state}); only ratios mean anything, and not much.")


def bandwidth_reader(path: Path, n_threads: int) -> Callable[[], float]:
    """Return a function that reads the mapped file (at most 2 GB) and returns bytes per second."""
    from hotset import _core

    mapped = np.memmap(path, np.uint8, mode="r")[:READ_BYTES]
    return lambda: float(_core.read_bandwidth(mapped, n_threads))


# -- rounds --------------------------------------------------------------------------------------


@dataclass
class Row:
    """The comparison of a test. Speeds: median tokens per second of the rounds; ratio: ours / peer, pairwise.

    bandwidth: bytes per second of the mapped file, read between the runs. share, peer_share: the part of that
    bandwidth that decode used (same bytes per token for both). disturbed: rounds that others disturbed and
    that could not be repeated. target: the smallest ratio wanted, or None.
    """

    test: str
    ours: float
    peer: float
    ratio: float
    ratios: list[float]
    bandwidth: float
    share: float | None
    peer_share: float | None
    disturbed: int
    peer_build: str
    target: float | None = None
    share_target: float | None = None  # an alternative to `target`

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        by_share = self.share_target is not None and (self.share or 0.0) >= self.share_target
        return verdict(self.ratio >= self.target or by_share)


def undisturbed(n: int, run: Callable[[int], T], what: str) -> tuple[list[T], int]:
    """Return the results of run(0) to run(n - 1), and how many of them others disturbed.

    A disturbed call is repeated, up to n times in total.
    """
    results: list[T] = []
    spare, disturbed = n, 0
    while len(results) < n:
        with Others() as others:
            result = run(len(results))
        if others.cores > DISTURBED:
            if spare:
                spare -= 1
                print(f"{what}: others used {others.cores:.2f} cores, once more", file=sys.stderr)
                continue
            disturbed += 1
        results.append(result)
    return results, disturbed


@dataclass
class _Round:
    ours: dict[str, dict[str, Any]]
    peer: dict[str, dict[str, Any]]
    bandwidth: float


def compare(ours: Program, peer: Program, job: Job, rounds: int) -> list[Row]:
    """Run the two programs in turn, `rounds` times, and read the file in between."""
    read = bandwidth_reader(job.model, job.n_threads)
    read()  # loads the file into memory

    def one(i: int) -> _Round:
        entries, rates = {}, []
        for program in (ours, peer) if i % 2 == 0 else (peer, ours):
            rates.append(read())
            entries[program.name] = program.bench(job)
        rates.append(read())
        return _Round(entries[ours.name], entries[peer.name], statistics.median(rates))

    taken, disturbed = undisturbed(rounds, one, job.tests[0][0])
    return [_row(name, kind, taken, disturbed) for name, kind in job.tests]


def _row(name: str, kind: str, rounds: Sequence[_Round], disturbed: int) -> Row:
    def speeds(entries: Iterable[dict[str, dict[str, Any]]]) -> list[float]:
        return [statistics.median(entry[kind]["samples_ts"]) for entry in entries]

    ours, peer = speeds(r.ours for r in rounds), speeds(r.peer for r in rounds)
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    share = peer_share = None
    if kind == "tg":
        per_token = [r.ours[kind]["bytes_per_token"] / r.bandwidth for r in rounds]  # seconds, at best
        share = statistics.median(a * s for a, s in zip(ours, per_token, strict=True))
        peer_share = statistics.median(b * s for b, s in zip(peer, per_token, strict=True))
    return Row(
        test=name,
        ours=statistics.median(ours),
        peer=statistics.median(peer),
        ratio=statistics.median(ratios),
        ratios=ratios,
        bandwidth=statistics.median(r.bandwidth for r in rounds),
        share=share,
        peer_share=peer_share,
        disturbed=disturbed,
        peer_build=str(rounds[0].peer[kind]["build_commit"]),
    )


# -- reporting -----------------------------------------------------------------------------------


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def row_cells(row: Row) -> list[str]:
    """Return the cells of a row, in the order of HEADERS."""
    target = "" if row.target is None else f"{row.target:.1f}×"
    if row.share_target is not None:
        target += f" or {row.share_target:.0%}"
    note = row.verdict + (f" ({row.disturbed} rounds disturbed)" if row.disturbed else "")
    return [
        row.test,
        f"{row.ours:.2f}",
        f"{row.peer:.2f}",
        f"{row.ratio:.2f}× ({min(row.ratios):.2f} to {max(row.ratios):.2f})",
        f"{row.bandwidth / 1e9:.1f}",
        percent(row.share),
        percent(row.peer_share),
        target,
        note,
    ]


HEADERS = ["test", "hotset t/s", "peer t/s", "ratio", "GB/s read", "hotset of it", "peer of it", "target", ""]


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, ready for docs/benchmarks/results.md."""
    widths = [max(len(line[i]) for line in [headers, *rows]) for i in range(len(headers))]
    for line in [headers, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def print_json(kind: str, **facts: Any) -> None:
    """Print a benchmark's last line: one JSON object with the machine, the versions and all numbers."""
    print(json.dumps({"bench": kind, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())} | facts))


def machine() -> dict[str, Any]:
    """Return the facts of the machine that make results comparable."""
    from hotset.placement.machine import processor_name

    return {
        "hotset": _commit(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "system": platform.platform(),
        "load": psutil.getloadavg(),
    }


def _commit() -> str:
    """Return the commit of this checkout, with "-dirty" if files are changed."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip() or "unknown"


def verdict(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) | {"verdict": row.verdict} for row in rows]


def common_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add the options that the comparing scripts share."""
    parser.add_argument("--llama", type=Path, required=True, help="bin folder of a llama.cpp build")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of each program ({rounds})")
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
