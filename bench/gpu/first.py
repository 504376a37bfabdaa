"""The first half hour on a device, in one command: every stage in turn, each in a process with a time limit.

The results of a stage are on the disk before the next one begins: its units as JSON (ledger.py), its output,
and its exit. So if a stage hangs, or the machine is taken away, only the running unit is lost; the same
command continues with the missing ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ledger import LIMIT, PATIENCE, run_within
from peers import print_table

STAGES = Path(__file__).with_name("stages.py")
SPARE = 20.0  # seconds between a stage's own limit and its end by force


@dataclass(frozen=True)
class Step:
    """A call of stages.py: its arguments, and its limit in seconds."""

    name: str
    arguments: tuple[str, ...]
    seconds: float


ORDER = (
    Step("kernels-right", ("check", "--part", "kernels"), 300),
    Step("steps", ("steps",), 300),
    Step("kernels", ("kernels",), 420),
    Step("budgets", ("budgets", "--model", "7b-q4_0"), 300),
    Step("models-right", ("check", "--part", "models"), 300),
    Step("build", ("build",), 500),
    Step("speed", ("speed", "--model", "7b-q4_0"), 420),
    Step("hybrid", ("hybrid", "--model", "7b-q4_0"), 500),
    Step("memcheck", ("check", "--part", "memcheck"), 500),
    Step("racecheck", ("check", "--part", "racecheck"), 500),
)
SMALL = {"steps", "kernels", "budgets", "models-right", "speed", "hybrid"}  # with sizes for trials


def run(
    out: Path, options: Sequence[str], seconds: float, *, small: bool = False, steps: Sequence[Step] = ORDER
) -> int:
    """Run unfinished stages within `seconds`; print a table of all. Returns how many remain unfinished."""
    folder, end = out / "first", time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    left = 0
    for step in steps:
        limit = min(step.seconds * PATIENCE, LIMIT, end - time.monotonic())
        if not _is_done(folder, step) and limit > 2 * SPARE:
            _run(folder, step, [*options, "--out", str(out)], limit, small)
        left += not _is_done(folder, step)
    print()
    print_table(["stage", "ended", "seconds", "last line"], [_cells(folder, step) for step in steps])
    print(f"{left} of {len(steps)} stages are left: run the same command again." if left else "Complete.")
    return left


def _run(folder: Path, step: Step, options: Sequence[str], limit: float, small: bool) -> None:
    arguments = list(step.arguments)
    if small and step.name in SMALL:
        arguments = [*(arguments if arguments[0] == "check" else arguments[:1]), "--small"]
    command = [sys.executable, "-u", str(STAGES), *arguments, *options, "--seconds", str(limit - SPARE)]
    said, start = folder / f"{step.name}.txt", time.monotonic()
    print(f"\n== {step.name}: at most {limit:.0f} s; {said}", flush=True)
    ended: int | None = None
    with said.open("w") as file:
        try:
            ended = run_within(command, limit, stdout=file, stderr=subprocess.STDOUT).returncode
        except subprocess.TimeoutExpired:
            file.write(f"\nended after {limit:.0f} s\n")
    print(said.read_text(errors="replace"), flush=True)
    result = {"ended": ended, "seconds": time.monotonic() - start}
    partial = folder / f"{step.name}.partial"
    partial.write_text(json.dumps(result))
    partial.replace(folder / f"{step.name}.json")


def _last(folder: Path, step: Step) -> str:
    said = folder / f"{step.name}.txt"
    lines = said.read_text(errors="replace").split("\n") if said.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _is_done(folder: Path, step: Step) -> bool:
    path = folder / f"{step.name}.json"
    if not path.exists() or json.loads(path.read_text())["ended"] != 0:
        return False
    return step.arguments[0] == "check" or _last(folder, step).startswith("Complete")


def _cells(folder: Path, step: Step) -> list[str]:
    path = folder / f"{step.name}.json"
    if not path.exists():
        return [step.name, "not begun", "", ""]
    found = json.loads(path.read_text())
    ended = "done" if _is_done(folder, step) else "time" if found["ended"] is None else str(found["ended"])
    return [step.name, ended, f"{found['seconds']:.0f}", _last(folder, step)[:90]]
