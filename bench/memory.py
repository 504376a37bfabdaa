"""Models larger than memory: speed, bytes read and peak memory in a memory group, under a budget and mapped.

usage: python bench/memory.py MODEL.gguf [BUNDLED.gguf] [--shares 0.5 0.7] [-n 64] [--mapped] [--llama BIN]

A memory group (a cgroup, version 1 or 2, that this user may make) holds each run, limited to a share of the
first file's size; the file's pages are dropped before. Under a budget hotset gets the group's limit as its
--ram-budget. --mapped: hotset without one, in the same group; --llama: llama-bench, which maps the
file (give a dense file that it reads). A run that takes longer than --timeout counts as none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Group:
    """A memory group of so many bytes."""

    def __init__(self, limit: int) -> None:
        self.first = (_V1 / "memory.limit_in_bytes").exists()
        root = _V1 if self.first else _V2
        self.path = root / f"hotset-bench-{os.getpid()}"
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if self.first else "memory.max")).write_text(str(limit))
        if not self.first:
            with contextlib.suppress(OSError):
                (self.path / "memory.swap.max").write_text("0")

    def enter(self) -> None:
        """Puts the calling process into the group."""
        (self.path / ("tasks" if self.first else "cgroup.procs")).write_text(str(os.getpid()))

    @property
    def peak(self) -> int:
        return int((self.path / ("memory.max_usage_in_bytes" if self.first else "memory.peak")).read_text())

    def close(self) -> None:
        self.path.rmdir()


@contextlib.contextmanager
def group(limit: int) -> Iterator[Group]:
    made = Group(limit)
    try:
        yield made
    finally:
        made.close()


def drop(path: Path) -> None:
    """Out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def run(command: list[str], path: Path, limit: int, timeout: float) -> tuple[list[dict[str, Any]], int]:
    """The entries that llama-bench's JSON has, and the group's peak in bytes."""
    drop(path)
    with group(limit) as made, tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, preexec_fn=made.enter)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        out.seek(0)
        try:
            return json.loads(out.read()), made.peak
        except ValueError:
            return [], made.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="the first says how large the groups are")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("-n", type=int, default=64, help="tokens that are generated")
    parser.add_argument("--llama", type=Path, help="llama-bench")
    parser.add_argument("--mapped", action="store_true", help="hotset without a budget, too")
    parser.add_argument("--timeout", type=float, default=900)
    args = parser.parse_args()
    program = str(Path(sys.executable).with_name("hotset"))
    hotset = [program, "bench", "-p", "0", "-n", str(args.n), "-r", "1", "-b", "512", "-o", "json"]
    print(f"| {'what':34} | share | budget |  t/s  | hits | MB/token | waits | of disk | peak of budget |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for share in args.shares:
        limit = int(args.models[0].stat().st_size * share)
        runs = [
            (f"hotset, {model.name}", model, [*hotset, "-m", str(model), "--ram-budget", str(limit / 2**30)])
            for model in args.models
        ]
        if args.mapped:
            runs.append(("hotset, mapped", args.models[0], [*hotset, "-m", str(args.models[0]), "--no-gpu"]))
        if args.llama:
            command = [str(args.llama), "-m", str(args.models[0]), "-p", "0", "-n", str(args.n), "-r", "1"]
            runs.append(("llama.cpp, mapped", args.models[0], [*command, "-o", "json"]))
        for name, model, command in runs:
            entries, peak = run(command, model, limit, args.timeout)
            print(row(name, share, limit, entries[0] if entries else None, peak), flush=True)


def row(name: str, share: float, limit: int, entry: dict[str, Any] | None, peak: int) -> str:
    cells = [
        f"{name:34}",
        f"{share:.0%}",
        f"{limit / 1e9:.2f} GB",
        "-" if entry is None else f"{entry['avg_ts']:.2f}",
    ]
    if entry is not None and "disk_bytes_per_token" in entry:
        ceiling = entry["disk_ceiling_ts"]
        cells += [f"{entry['cache_hit_rate']:.1%}", f"{entry['disk_bytes_per_token'] / 1e6:.1f}"]
        cells += [f"{entry['disk_wait_share']:.0%}", f"{entry['avg_ts'] / ceiling:.0%}" if ceiling else "-"]
    else:
        cells += ["", "", "", ""]
    return "| " + " | ".join([*cells, f"{peak / limit:.1%}"]) + " |"


if __name__ == "__main__":
    main()
