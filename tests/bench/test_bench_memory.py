"""The arithmetic of bench/memory.py, and a run on a small model if the system allows memory groups."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import memory
import pytest


def subject(is_moe: bool) -> memory.Subject:
    return memory.Subject(Path("m.gguf"), Path("m.bundled.gguf"), None, is_moe)


def run_of(how: str, ts: float | None, share: float = 0.5, **more: Any) -> memory.Run:
    facts: dict[str, Any] = {"peak": 90, "limit": 100} | more
    return memory.Run("m.gguf", how, share, ts=ts, **facts)


def verdicts(is_moe: bool, *runs: memory.Run) -> dict[str, tuple[str, str]]:
    bench = argparse.Namespace(rows=list(runs))
    return {row[1]: (row[2], row[3]) for row in memory.verdicts(bench, [subject(is_moe)])}  # type: ignore[arg-type]


def test_planned_values_are_compared_with_measured_ones() -> None:
    disk = {"bytes_per_token": 1e6, "roofline": 4.0}
    runs = (
        run_of("hotset, bundled", 3.0, **disk),
        run_of("hotset, plain", 2.0, **disk),
        run_of("hotset, mapped", 0.25),
        run_of("llama.cpp, mapped", 2.0),
        run_of("hotset, plain", 9.8, 1.5, bytes_per_token=0.0),
        run_of("hotset, mapped", 10.0, 1.5, peak=140),  # no budget of its own
    )
    sparse = verdicts(False, *runs)
    assert sparse["10× hotset, mapped, at 50%"] == ("12.0×", "pass")
    assert sparse["70% of the roofline"] == ("50%", "FAIL")  # the minimum of all runs
    assert sparse["97% of mapped, all in memory"] == ("98.0%", "pass")
    assert sparse["peak below the budget"] == ("90.0%", "pass")
    assert "2× llama.cpp, mapped, at 50%" not in sparse
    assert verdicts(True, *runs)["2× llama.cpp, mapped, at 50%"] == ("1.5×", "FAIL")
    none_of_ours = verdicts(True, run_of("hotset, bundled", None), run_of("llama.cpp, mapped", 1.0))
    assert none_of_ours == {"2× llama.cpp, mapped, at 50%": ("0.0×", "FAIL")}


def test_rows_mark_untrusted_results() -> None:
    assert run_of("x", None).speed == "-"
    assert run_of("x", 1.234).speed == "1.23"
    assert run_of("x", 1.234, cores=0.5).speed == "1.23*"
    assert run_of("x", 1.234, cores=0.5, at_most=True).speed == "< 1.23*"
    assert len(run_of("x", 1.0).cells()) == len(memory.HEADERS)


@pytest.mark.skipif(not os.access(memory._V1 / "memory.limit_in_bytes", os.W_OK), reason="no memory groups")
def test_memory_group_limits_its_processes(tmp_path: Path) -> None:
    """Run programs that print like llama-bench, print nothing, or take too long."""
    arguments = argparse.Namespace(minutes=1, scratch=tmp_path, timeout=10)
    bench = memory.Bench(arguments)
    model = tmp_path / "m.gguf"
    model.write_bytes(bytes(1 << 20))
    taken = "x = b'1' * (40 << 20); "
    said = {
        f"{taken}print('[{{\"avg_ts\": 2.5}}]')": (2.5, False, ""),
        "raise SystemExit('it is | too little')": (None, False, "it is / too little"),
        "import time; time.sleep(9)": (0.0, True, "timed out"),
    }
    for program, expected in said.items():
        arguments.timeout = 0.4 if "sleep" in program else 10
        run = bench.run(
            subject(False), "x", 0.5, 200 << 20, [sys.executable, "-c", program], 0, model
        )  # fmt: skip
        assert (run.ts, run.at_most, run.note) == expected
        assert (run.peak >= 40 << 20) == (taken in program)
    bench.deadline = 0.0
    assert bench.run(subject(False), "x", 0.5, 1, [], 1, model).note == "no time left"
