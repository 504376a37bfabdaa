"""Models larger than memory: speed, bytes read and peak memory in a memory group, under a budget and mapped.

usage: python bench/memory.py MODEL.gguf[,DENSE.gguf] ... --scratch FOLDER [--shape olmoe] [--llama BIN]

Each run is in a memory group (a cgroup, version 1 or 2, that this user may create) with a limit that is a
share of the model's size; before it, the file's pages are dropped. Each group has these runs: hotset under a
budget of the group's limit, with the original file and a bundled one (made in the scratch folder if missing,
and left out for a model without neurons or experts to skip);
hotset with the file mapped; with --llama llama-bench, which maps the file, or the DENSE one if it cannot read
it. --shape adds an MoE model with random weights, written to the scratch folder.

The roofline is the speed if only the disk took time: the bytes of the missing rows over the rate of random
reads of their mean size, the better one of those measured at first and after each run. Then each model runs
with everything in memory, under a budget and mapped. The first model also generates --steady tokens in a
group of twice the budget, and its peak memory must stay below the budget.

A run that takes longer than --timeout (with a mapped file: --mapped-timeout) counts as slower than its tokens
in that time; no run starts after --minutes. Runs that other programs disturbed have a star.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peers
from synthetic import SHAPES, write_model

from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.placement.disk import DiskRates, measure_disk

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
SHARES = (0.5, 0.3, 0.7)  # the targets are for the first, which is measured first
SLOW_TOKENS = 4  # for a mapped file, which may need a minute for each
GAIN, EXPERT_GAIN = 10.0, 2.0  # at half of the size: × our mapped file, × llama.cpp's
# The smallest share of the roofline, and of the mapped speed with everything in memory.
OF_ROOFLINE, WHOLE = 0.7, 0.97
_RATE_SECONDS = 0.25
SLOW_TOKEN = 0.6  # the most seconds per token in long runs
_LARGEST_READ = 512 << 10


class Group:
    """A memory group with a limit in bytes."""

    def __init__(self, limit: int) -> None:
        self.first = (_V1 / "memory.limit_in_bytes").exists()
        root = _V1 if self.first else _V2
        self.path = root / f"hotset-bench-{os.getpid()}"
        try:
            self.path.mkdir()
            (self.path / ("memory.limit_in_bytes" if self.first else "memory.max")).write_text(str(limit))
        except OSError as error:
            sys.exit(f"A memory group cannot be created ({error}): run as a user who may write to {root}.")
        if not self.first:
            with contextlib.suppress(OSError):
                (self.path / "memory.swap.max").write_text("0")

    def enter(self) -> None:
        """Move the calling process into the group."""
        (self.path / ("tasks" if self.first else "cgroup.procs")).write_text(str(os.getpid()))

    @property
    def peak(self) -> int:
        """Return the most bytes in use so far, including pages of files."""
        return int((self.path / ("memory.max_usage_in_bytes" if self.first else "memory.peak")).read_text())

    def close(self) -> None:
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:  # killed processes have not ended yet
                time.sleep(0.1)
        print(f"warning: {self.path} could not be removed", file=sys.stderr)


@contextlib.contextmanager
def group(limit: int) -> Iterator[Group]:
    made = Group(limit)
    try:
        yield made
    finally:
        made.close()


def drop(path: Path) -> None:
    """Remove a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@dataclass(frozen=True)
class Subject:
    """A model: its file, its bundled copy, and the file for llama.cpp; None: it has none."""

    path: Path
    bundled: Path | None
    dense: Path | None
    is_moe: bool

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def files(self) -> dict[str, Path]:
        """Return the model's files, by form."""
        return {"plain": self.path} if self.bundled is None else {"bundled": self.bundled, "plain": self.path}


@dataclass(frozen=True)
class Run:
    """The results of a program in a group. ts: tokens per second, None without any; at_most: an upper bound.

    streamed_per_token: bytes that each token must read again. roofline: tokens per second that only the disk
    would allow. cores: used by other programs. note: why the result is missing.
    """

    model: str
    how: str
    share: float
    limit: int
    peak: int
    ts: float | None = None
    at_most: bool = False
    hit_rate: float | None = None
    bytes_per_token: float | None = None
    reads_per_token: float | None = None
    streamed_per_token: float | None = None
    wait_share: float | None = None
    roofline: float | None = None
    cores: float = 0.0
    note: str = ""

    @property
    def of_roofline(self) -> float | None:
        return self.ts / self.roofline if self.ts and self.roofline else None

    @property
    def speed(self) -> str:
        if self.ts is None:
            return "-"
        star = "*" if self.cores > peers.DISTURBED else ""
        return f"{'< ' * self.at_most}{self.ts:.2f}{star}"

    def cells(self) -> list[str]:
        mb = "" if self.bytes_per_token is None else f"{self.bytes_per_token / 1e6:.1f}"
        reads = "" if self.reads_per_token is None else f"{self.reads_per_token:.0f}"
        roofline = "" if self.roofline is None else f"{self.roofline:.2f}"
        shares = [peers.percent(s) for s in (self.hit_rate, self.wait_share, self.of_roofline)]
        size = f"{self.limit / 1e9:.2f} GB"
        peak = f"{self.peak / self.limit:.1%}" if self.peak else ""
        streamed = "" if not self.streamed_per_token else f"{self.streamed_per_token / 1e6:.1f}"
        cells = [self.model, self.how, f"{self.share:.0%}", size, self.speed, shares[0], mb, streamed, reads]
        return [*cells, shares[1], roofline, shares[2], peak, self.note]


HEADERS = ["model", "how", "of its size", "budget", "t/s", "hits", "MB/token", "streamed", "reads/token"]
HEADERS += ["waiting", "roofline t/s", "of it", "peak of budget", ""]


class Bench:
    """A runner of programs in groups, which prints each row at once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.deadline = time.monotonic() + 60 * args.minutes
        self.rows: list[Run] = []
        self.home = args.scratch / "home"  # with the rates of this run's measurement
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "machine.json").unlink(missing_ok=True)
        self.rates: DiskRates | None = None

    def hotset(self, model: Path, n: int, *more: str) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "hotset.cli.main",
            "bench",
            "-m",
            str(model),
            "-p",
            "0",
            "-n",
            str(n),
        ]
        return [*command, "-r", "1", "-b", "512", "-o", "json", "--device", "cpu", *more]

    def disk(self, model: Path) -> DiskRates:
        """Return the rates of this disk, measured once per run."""
        if self.rates is None:
            self.rates = measure_disk(model, path=self.home / "machine.json")
            rates = ", ".join(f"{size >> 10} KB {rate / 1e6:.0f}" for size, rate in self.rates.rates)
            print(f"# disk, random reads, MB/s: {rates}", flush=True)
        return self.rates

    def rate(self, model: Path, size: float) -> float:
        """Return bytes per second of random reads of about this size."""
        pages = max(round(size / 4096), 1) * 4096
        return self.disk(model).reader().rate(str(model), min(pages, _LARGEST_READ), _RATE_SECONDS)

    def budget(self, subject: Subject, how: str, share: float, limit: int, n: int, room: float = 1.0) -> Run:
        """Run under a budget of `limit` bytes, in a group of `room` times that."""
        model = subject.files[how]
        self.disk(model)  # measured before the first run
        command = self.hotset(model, n, "--ram-budget", repr(limit / 2**30))
        return self.run(subject, f"hotset, {how}", share, limit, command, n, model, room=room)

    def run(
        self,
        subject: Subject,
        how: str,
        share: float,
        limit: int,
        command: list[str],
        n: int,
        model: Path,
        *,
        room: float = 1.0,
    ) -> Run:
        facts: dict[str, Any] = {"model": subject.path.name, "how": how, "share": share, "limit": limit}
        timeout = max(self.args.timeout, n * SLOW_TOKEN)
        if n == SLOW_TOKENS:
            timeout = self.args.mapped_timeout
        if time.monotonic() > self.deadline:
            made = Run(**facts, peak=0, note="no time left")
        else:
            drop(model)
            with peers.Others() as others, group(int(limit * room)) as held:
                entry, error = self._entry(command, held, timeout)
                peak = held.peak
            facts |= {"peak": peak, "cores": others.cores, "note": error}
            if entry is None and not error:  # the warm-up has up to as many tokens
                facts |= {"ts": 2 * n / timeout, "at_most": True, "note": "timed out"}
            made = Run(**facts, **({} if entry is None else self._numbers(entry, model)))
        self.rows.append(made)
        print("# " + " | ".join(cell for cell in made.cells() if cell), flush=True)
        return made

    def _entry(self, command: list[str], held: Group, timeout: float) -> tuple[dict[str, Any] | None, str]:
        """Return the entry of llama-bench's JSON, or an error message; neither if the time ran out."""
        environment = os.environ | {"HOTSET_HOME": str(self.home)}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                command, stdout=out, stderr=err, preexec_fn=held.enter, env=environment, cwd=os.getcwd()
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                return None, ""
            finally:
                process.kill()
                process.wait()
            out.seek(0)
            err.seek(0)
            with contextlib.suppress(ValueError, IndexError):
                return json.loads(out.read())[0], ""
            said = err.read().decode(errors="replace").strip().splitlines()
            return None, (said[-1] if said else f"ended with {process.returncode}").replace("|", "/")[:160]

    def _numbers(self, entry: dict[str, Any], model: Path) -> dict[str, Any]:
        facts: dict[str, Any] = {"ts": entry["avg_ts"]}
        if "disk_bytes_per_token" not in entry:
            return facts
        n_bytes, n_reads = entry["disk_bytes_per_token"], entry["disk_reads_per_token"]
        streamed = entry["streamed_bytes_per_token"]
        facts |= {"hit_rate": entry["cache_hit_rate"], "wait_share": entry["disk_wait_share"]}
        facts |= {"bytes_per_token": n_bytes, "reads_per_token": n_reads, "streamed_per_token": streamed}
        seconds = 0.0
        for part, reads in (
            (streamed, streamed / _LARGEST_READ),
            (n_bytes - streamed, n_reads - streamed / _LARGEST_READ),
        ):
            if part > 0:
                size = part / max(reads, 1)
                seconds += part / max(self.rate(model, size), self.disk(model).rate(size))
        return facts | {"roofline": 1 / seconds if seconds else None}


def measure(bench: Bench, subjects: list[Subject]) -> None:
    """Measure everything: a share for all models before the next share."""
    args = bench.args
    for share, subject in itertools.product(args.shares, subjects):
        limit = int(subject.size * share)
        for how in subject.files:
            bench.budget(subject, how, share, limit, args.n)
        if share in args.mapped:
            command = bench.hotset(subject.path, SLOW_TOKENS)
            bench.run(subject, "hotset, mapped", share, limit, command, SLOW_TOKENS, subject.path)
        if args.llama and subject.dense:
            command = [
                str(args.llama),
                "-m",
                str(subject.dense),
                "-p",
                "0",
                "-n",
                str(SLOW_TOKENS),
                "-r",
                "1",
            ]
            command += ["-o", "json"]
            bench.run(subject, "llama.cpp, mapped", share, limit, command, SLOW_TOKENS, subject.dense)
    for subject in [] if args.no_whole else subjects:
        limit = int(subject.size * 1.3) + (1 << 30)
        for how in subject.files:
            bench.budget(subject, how, limit / subject.size, limit, args.n)
        command = bench.hotset(subject.path, args.n)
        share = limit / subject.size
        bench.run(subject, "hotset, mapped", share, limit, command, args.n, subject.path)


def steady(bench: Bench, subject: Subject) -> None:
    """Generate many tokens under half of the size, in a group with room for twice the budget."""
    limit = int(subject.size * 0.5)
    bench.budget(subject, next(iter(subject.files)), 0.5, limit, bench.args.steady, room=2.0)


def verdicts(bench: Bench, subjects: list[Subject]) -> list[list[str]]:
    """Return whether the targets are reached: rows of model, target, result, verdict."""
    rows: list[list[str]] = []

    def say(model: str, promise: str, seen: str, passed: bool) -> None:
        rows.append([model, promise, seen, peers.verdict(passed)])

    for subject in subjects:
        mine = [run for run in bench.rows if run.model == subject.path.name and run.ts is not None]
        half = [run for run in mine if run.share == 0.5]
        ours = max((run.ts or 0.0 for run in half if run.bytes_per_token is not None), default=0.0)
        for how, gain, wanted in (
            ("hotset, mapped", GAIN, not subject.is_moe),
            ("llama.cpp, mapped", EXPERT_GAIN, subject.is_moe),
        ):
            theirs = next((run.ts for run in half if run.how == how and run.ts), None)
            if wanted and theirs:
                ratio = ours / theirs
                say(subject.path.name, f"{gain:.0f}× {how}, at 50%", f"{ratio:.1f}×", ratio >= gain)
        least = min((run.of_roofline for run in mine if run.of_roofline is not None), default=None)
        if least is not None:
            say(subject.path.name, f"{OF_ROOFLINE:.0%} of the roofline", f"{least:.0%}", least >= OF_ROOFLINE)
        whole = {run.how: run.ts for run in mine if run.share > 1 and run.ts}
        if "hotset, mapped" in whole and "hotset, plain" in whole:
            ratio = whole["hotset, plain"] / whole["hotset, mapped"]
            say(subject.path.name, f"{WHOLE:.0%} of mapped, all in memory", f"{ratio:.1%}", ratio >= WHOLE)
        peaks = [run.peak / run.limit for run in mine if run.bytes_per_token is not None]
        if peaks:
            say(subject.path.name, "peak below the budget", f"{max(peaks):.1%}", max(peaks) <= 1)
    return rows


def prepare(args: argparse.Namespace) -> list[Subject]:
    """Return the models, after writing missing files to the scratch folder."""
    subjects = []
    given = [tuple(map(Path, one.split(","))) for one in args.models]
    for name in args.shape:
        path = args.scratch / f"{name}.gguf"
        if not path.exists():
            print(f"# writing {path}", flush=True)
            write_model(path, SHAPES[name], GGMLType.Q4_0, n_vocab=32000, n_ctx=8192, seed=0)
        given.append((path,))
    for path, *dense in given:
        bundled: Path | None = args.scratch / f"{path.name.removesuffix('.gguf')}.bundled.gguf"
        if not bundled.exists():
            command = [
                sys.executable,
                "-m",
                "hotset.cli.main",
                "reorder",
                str(path),
                str(bundled),
                "--bundle",
            ]
            print(f"# writing {bundled}", flush=True)
            done = subprocess.run(
                command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            if done.returncode:
                print(f"# {done.stderr.strip()}", flush=True)
                bundled = None
        with open_gguf(path) as file:
            is_plain, architecture = file.dialect == "gguf", file.architecture
            is_moe = bool(file.metadata.get(f"{architecture}.expert_count"))
        theirs = dense[0] if dense else path if is_plain else None
        subjects.append(Subject(path, bundled, theirs, is_moe))
    return subjects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL.gguf, or MODEL.gguf,DENSE.gguf")
    parser.add_argument("--shape", nargs="*", default=[], choices=[n for n in SHAPES if SHAPES[n].experts])
    parser.add_argument("--scratch", type=Path, required=True, help="for bundled copies and synthetic models")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("-n", type=int, default=32, help="tokens per run under a budget")
    parser.add_argument("--steady", type=int, default=500, help="tokens of the run for the peak; 0: none")
    parser.add_argument("--llama", type=Path, help="llama-bench")
    parser.add_argument("--mapped", type=float, nargs="*", default=[0.5], help="shares; hotset, mapped")
    parser.add_argument("--no-whole", action="store_true", help="skip runs with everything in memory")
    parser.add_argument("--timeout", type=float, default=120, help="seconds per run")
    parser.add_argument("--mapped-timeout", type=float, default=60, help="seconds per run with a mapped file")
    parser.add_argument("--minutes", type=float, default=25, help="start no run after this time")
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no group is left behind
    args.scratch.mkdir(parents=True, exist_ok=True)
    subjects = prepare(args)
    if not subjects:
        parser.error("give a model, or --shape")
    peers.wait_until_quiet(args.force)
    bench = Bench(args)
    measure(bench, subjects)
    if args.steady:
        steady(bench, subjects[0])
    peers.print_table(HEADERS, [run.cells() for run in bench.rows])
    print()
    found = verdicts(bench, subjects)
    peers.print_table(["model", "promised", "seen", ""], found)
    rates = bench.rates.rates if bench.rates else ()
    peers.print_json(
        "memory", machine=peers.machine(), disk=rates, runs=[asdict(r) for r in bench.rows], verdicts=found
    )


if __name__ == "__main__":
    main()
