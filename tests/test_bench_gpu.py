"""The scripts for a machine with a GPU, tried without one: units that resume, kernels, tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[1] / "bench" / "gpu"))
import hybrid
import kernels
import launches
from ledger import Ledger

STAGES = Path(__file__).parents[1] / "bench" / "gpu" / "stages.py"


def test_a_unit_is_measured_once_and_kept_whole(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure() -> dict[str, int]:
        calls.append(1)
        return {"speed": len(calls)}

    for _ in range(2):
        ledger = Ledger(tmp_path, seconds=60)
        assert ledger.unit("a", measure) == {"speed": 1}
        assert ledger.closing().startswith("Complete")
    assert Ledger(tmp_path, seconds=60, again=True).unit("a", measure) == {"speed": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_no_unit_begins_when_the_time_is_up_and_the_next_call_goes_on(tmp_path: Path) -> None:
    late = Ledger(tmp_path, seconds=-1)
    assert late.unit("a", dict) is None
    assert late.closing().startswith("1 units left (a is next)")
    assert Ledger(tmp_path, seconds=60).unit("a", lambda: {"x": 1}) == {"x": 1}
    assert late.unit("a", dict) == {"x": 1}


def test_a_failed_unit_is_shown_and_measured_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, seconds=60)
    assert ledger.unit("a", lambda: {"failed": True}) == {"failed": True}
    assert ledger.left == ["a"]
    assert ledger.unit("a", lambda: {"failed": False}) == {"failed": False}


def test_kernels_are_checked_and_their_keys_differ(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(STAGES), "kernels", "--device", "cpu", "--small", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    keys = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(keys) == len(set(keys)) > 25
    assert "WRONG" not in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("Complete")


def test_a_kernel_that_is_wrong_has_no_speed() -> None:
    rates = {"read": 1e12}
    unit = kernels.Unit("linear", 1e6, 1e6, lambda: None)
    assert kernels._cells(unit, {"seconds": None, "error": 0.5}, rates)[-1] == "WRONG"
    assert kernels._cells(unit, {"seconds": 1.25e-6, "error": 1e-7}, rates)[-1] == "75% pass"
    assert kernels._cells(unit, {"seconds": 1.5e-6, "error": 1e-7}, rates)[-1] == "75% FAIL"


def test_ratios_are_of_medians_and_targets_where_half_fits() -> None:
    def runs(*speeds: float) -> list[dict[str, float]]:
        return [{"tokens_per_second": speed} for speed in speeds]

    result = {"runs": {"hybrid": runs(60, 40, 50), "llama.cpp": runs(10, 20, 15), "CPU": [{"error": ["no"]}]}}
    rows = hybrid._speed_rows("7b", 0.5, result)
    assert rows[0][3:] == ["50.0 (40.0 to 60.0)", "", ""]
    assert rows[1][3:] == ["15.0 (10.0 to 20.0)", "3.33×", "3.0× pass"]
    assert "failed" in rows[2][3]
    assert hybrid._speed_rows("7b", 1.0, result)[1][5] == ""  # all fits: only our own GPU path is a target


def test_a_stage_on_a_device_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(STAGES), "kernels", "--device", "cuda:7", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "cuda:7" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_table_of_launches_is_the_programs() -> None:
    """docs/GPU.md; `python bench/gpu/launches.py` prints it."""
    text = (Path(__file__).parents[1] / "docs" / "GPU.md").read_text()
    lines = [line.split("|") for line in text.splitlines()]
    written = {cells[1].strip(): [cell.strip() for cell in cells[1:-1]] for cells in lines if len(cells) == 8}
    found = launches.table(list(launches.rows()))
    assert len(found) == 5
    for row in found:
        assert written[row[0]] == row
