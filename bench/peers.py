"""Two programs on one machine, measured fairly: in turn, in pairs, and with a check for other programs.

A shared machine's memory speed doubles and halves within seconds, and a neighbour on one core can cost a
program nine tenths of its speed. So programs take turns within seconds of each other, each round gives a
ratio, and the median counts. CPU time of other programs disqualifies a round, and the rate at which the
model's file can be read is measured in between.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import psutil

DISTURBED = 0.1  # cores that others may use without disqualifying a measurement
READ_BYTES = 2 << 30  # at most this much of a file is read to measure bandwidth

T = TypeVar("T")


class ProgramFailed(SystemExit):
    """A program of a benchmark is missing or failed; the message has the end of its output."""


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
    def kind(self) -> str:
        """Return "tg" if tokens are generated, otherwise "pp"."""
        return "tg" if self.n_gen else "pp"


class Runner(Protocol):
    """A program that runs jobs."""

    @property
    def name(self) -> str: ...

    def bench(self, job: Job) -> dict[str, dict[str, Any]]:
        """Run the job: return kind of test ("pp", "tg") → entry with `samples_ts`, tokens per second."""


def run(
    argv: Sequence[str], env: Mapping[str, str] | None = None, folder: Path | None = None
) -> tuple[str, str]:
    """Run a program, in a folder, and return its output and errors, or raise ProgramFailed."""
    done = subprocess.run(
        argv, capture_output=True, text=True, errors="replace", env=os.environ | (env or {}), check=False,
        cwd=folder,
    )  # fmt: skip
    if done.returncode:
        raise ProgramFailed(f"{argv[0]} failed ({done.returncode}):\n{done.stderr.strip()[-2000:]}")
    return done.stdout, done.stderr


@dataclass(frozen=True)
class Program:
    """A command that takes llama-bench's options.

    kv_flags: additional options for a type of KV cache. has_depth: it knows `-d`; otherwise it generates
    after a prompt with `-gp`.
    """

    name: str
    command: tuple[str, ...]
    kv_flags: Callable[[str], list[str]]
    env: dict[str, str] = field(default_factory=dict)
    has_depth: bool = True

    def bench(self, job: Job) -> dict[str, dict[str, Any]]:
        sizes = ["-p", str(job.n_prompt), "-n", str(job.n_gen)]
        if job.n_depth and self.has_depth:
            sizes += ["-d", str(job.n_depth)]
        elif job.n_depth:
            sizes = ["-p", "0", "-n", "0", "-gp", f"{job.n_depth},{job.n_gen}"]
        argv = [*self.command, "-m", str(job.model), *sizes, "-t", str(job.n_threads)]
        argv += ["-r", str(job.repetitions), "-o", "json", *self.kv_flags(job.kv_type)]
        return llama_bench_entries(run(argv, self.env)[0])


def llama_bench_entries(output: str) -> dict[str, dict[str, Any]]:
    """Return kind of test ("pp", "tg") → entry of llama-bench's JSON. A log may precede the JSON."""
    start = re.search(r"^\[$", output, re.MULTILINE)
    entries = json.loads(output[start.start() if start else 0 :])
    return {"tg" if entry["n_gen"] else "pp": entry for entry in entries}


def hotset(isa: str | None = None, *options: str, name: str = "hotset") -> Program:
    """Return this checkout's `hotset bench` with these options.

    isa: the kernels to use instead of those chosen for the processor.
    """
    return Program(
        name,
        (sys.executable, "-m", "hotset.cli.main", "bench", *options),
        lambda kv_type: ["-ctk", kv_type],
        {"HOTSET_ISA": isa} if isa else {},
    )


def find_program(folder: Path, name: str) -> Path:
    """Return a program in a folder, or in the folder `bin` of a build."""
    for path in (folder / name, folder / "bin" / name):
        if path.is_file():
            return path
    raise ProgramFailed(f"{folder} and its bin have no {name}: give the folder of a build.")


def llama_bench(folder: Path, name: str = "llama.cpp", *, has_depth: bool = True) -> Program:
    """Return llama-bench of a build. A quantised V cache works only with flash attention."""
    return Program(
        name,
        (str(find_program(folder, "llama-bench")),),
        lambda kv_type: [] if kv_type == "f16" else ["-ctk", kv_type, "-ctv", kv_type, "-fa", "1"],
        has_depth=has_depth,
    )


PROMPT_EVAL = re.compile(r"prompt eval time =\s*([\d.]+) ms /\s*(\d+) tokens")
EVAL = re.compile(r"(?<!prompt )eval time =\s*([\d.]+) ms /\s*(\d+) runs")
_BUILD = re.compile(r"build = \d+ \((\w+)\)")


@dataclass(frozen=True)
class PowerInfer:
    """PowerInfer's `main`, which benchmarks itself. It samples, so that tokens vary as in other programs."""

    program: Path
    name: str = "PowerInfer"

    def bench(self, job: Job) -> dict[str, dict[str, Any]]:
        """Do the same as Program.bench; `main` runs a prompt and then decodes, once per repetition."""
        samples: dict[str, list[float]] = {"pp": [], "tg": []}
        build = "unknown"
        for seed in range(job.repetitions):
            argv = [str(self.program.resolve()), "-m", str(job.model.resolve())]
            argv += ["-t", str(job.n_threads), "-s", str(seed + 1)]
            argv += ["-n", str(job.n_gen), "-c", str(job.n_prompt + job.n_gen + 256), "--ignore-eos"]
            argv += ["--temp", "1.0", "-b", "512", "-p", text_of(job.model, job.n_prompt or 8)]
            with tempfile.TemporaryDirectory() as folder:  # for its log files
                log = run(argv, folder=Path(folder))[1]
            prompt, generated = PROMPT_EVAL.search(log), EVAL.search(log)
            if prompt is None or generated is None:
                raise ProgramFailed(f"{self.program} printed no timings:\n{log.strip()[-2000:]}")
            for kind, found in (("pp", prompt), ("tg", generated)):
                samples[kind].append(int(found[2]) / float(found[1]) * 1e3)
            if named := _BUILD.search(log):
                build = named[1]
        return {kind: {"samples_ts": speeds, "build_commit": build} for kind, speeds in samples.items()}


def text_of(path: Path, n: int) -> str:
    """Return random letters and words of about n tokens for the file's tokenizer."""
    from hotset.formats.gguf import open_gguf
    from hotset.text.tokenizer import load_tokenizer

    rng = np.random.default_rng(0)
    text = "a"
    with open_gguf(path) as file:
        tokenizer = load_tokenizer(file.metadata)
        while len(tokenizer.encode(text, add_special=True)) < n:
            text += " " + "".join(rng.choice(list("aeioudgklmnprst"), rng.integers(1, 5)))
    return text


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
class Comparison:
    """The results of programs that ran in turn, each list with one value per round.

    speeds: tokens per second by program, ours first. bandwidth: bytes per second of our mapped file, read
    between the runs. n_bytes: bytes that a token reads, by program of ours. builds: the peers' commits.
    failed: the reason why a peer has no speeds. disturbed: rounds that others disturbed and that could not be
    repeated.
    """

    speeds: dict[str, list[float]]
    bandwidth: list[float] = field(default_factory=list)
    n_bytes: dict[str, float] = field(default_factory=dict)
    builds: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    disturbed: int = 0

    @property
    def ours(self) -> str:
        return next(iter(self.speeds))

    def ratios(self, peer: str, ours: str | None = None) -> list[float]:
        """Return our speed over the peer's in each round."""
        return [a / b for a, b in zip(self.speeds[ours or self.ours], self.speeds[peer], strict=True)]

    def share(self, program: str | None = None) -> float | None:
        """Return the median share of the bandwidth that a program used. A peer reads our bytes."""
        n_bytes = self.n_bytes.get(program or self.ours, self.n_bytes.get(self.ours))
        if n_bytes is None:
            return None
        speeds = self.speeds[program or self.ours]
        return statistics.median(a * n_bytes / b for a, b in zip(speeds, self.bandwidth, strict=True))


def interval(values: Sequence[float], confidence: float = 0.9) -> tuple[float, float]:
    """Return the narrowest pair of values that contains the true median with this confidence.

    Fewer than five values give their range, which has less confidence (three: 75%).
    """
    ordered, n = sorted(values), len(values)
    k = 0
    while 1 - 2 * sum(math.comb(n, i) for i in range(k + 2)) / 2**n >= confidence:
        k += 1
    return ordered[k], ordered[n - 1 - k]


def undisturbed(n: int, run: Callable[[int], T], what: str, *, again: bool = True) -> tuple[list[T], int]:
    """Return the results of run(0) to run(n - 1), and how many of them others disturbed.

    again: repeat a disturbed call, up to n times in total.
    """
    results: list[T] = []
    spare, disturbed = n if again else 0, 0
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


def compare(turns: Sequence[tuple[Runner, Path]], job: Job, rounds: int, *, again: bool = True) -> Comparison:
    """Run programs, each on its file, in turn; the first is ours, and its file is read in between.

    A peer that fails is not run again. again: repeat rounds that other programs disturbed.
    """
    ours, file = turns[0]
    read = bandwidth_reader(file, job.n_threads)
    read()  # loads the file into memory
    failed: dict[str, str] = {}

    def one(i: int) -> tuple[dict[str, dict[str, Any]], float]:
        entries, rates = {}, []
        for program, path in turns if i % 2 == 0 else reversed(turns):
            if program.name in failed:
                continue
            rates.append(read())
            try:
                entries[program.name] = program.bench(replace(job, model=path))[job.kind]
            except ProgramFailed as error:
                if program is ours:
                    raise
                failed[program.name] = str(error)
                print(f"{program.name}: {error}", file=sys.stderr)
        return entries, statistics.median(rates)

    taken, disturbed = undisturbed(rounds, one, job.model.name, again=again)
    names = [program.name for program, _ in turns if program.name not in failed]
    last = taken[-1][0]
    return Comparison(
        speeds={name: [statistics.median(each[name]["samples_ts"]) for each, _ in taken] for name in names},
        bandwidth=[rate for _, rate in taken],
        n_bytes={
            name: last[name]["bytes_per_token"]
            for name in names
            if job.n_gen and "bytes_per_token" in last[name]
        },
        builds={name: str(last[name].get("build_commit", "unknown")) for name in names},
        failed=failed,
        disturbed=disturbed,
    )


# -- reporting -----------------------------------------------------------------------------------


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def ratio(values: Sequence[float]) -> str:
    """Return the median of ratios and its interval, as a cell."""
    low, high = interval(values)
    return f"{statistics.median(values):.2f}×" + (f" ({low:.2f} to {high:.2f})" if len(values) > 1 else "")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    widths = [max(len(line[i]) for line in [headers, *rows]) for i in range(len(headers))]
    lines = [headers, ["-" * width for width in widths], *rows]
    cells = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, ready for docs/benchmarks/results.md."""
    print(table(headers, rows))


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


def common_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add the options that the comparing scripts share."""
    parser.add_argument("--llama", type=Path, required=True, help="bin folder of a llama.cpp build")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of each program ({rounds})")
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
