"""The energy of a benchmark: counters in a folder with the layout of Linux's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cli_runs import inside, needs_core

from hotset import energy
from hotset.energy import EnergyCounters


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with counters of two processors, cores and memory, in microjoules."""
    for zone, name, counted in (
        ("intel-rapl:0", "package-0", 1_000_000),
        ("intel-rapl:0:0", "core", 700_000),
        ("intel-rapl:0:1", "dram", 500_000),
        ("intel-rapl:1", "package-1", 9_000_000),
        ("intel-rapl:2", "psys", 50_000_000),
        ("intel-rapl-mmio:0", "package-0", 1_000_000),
    ):
        folder = tmp_path / zone
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text(f"{counted}\n")
        (folder / "max_energy_range_uj").write_text("10000000\n")
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    return tmp_path


def test_energy_of_processors_and_memory_is_added_when_a_counter_wraps_around(powercap: Path) -> None:
    counters = EnergyCounters()
    (powercap / "intel-rapl:0" / "energy_uj").write_text("3500000")
    (powercap / "intel-rapl:0:0" / "energy_uj").write_text("9900000")
    (powercap / "intel-rapl:0:1" / "energy_uj").write_text("750000")
    (powercap / "intel-rapl:1" / "energy_uj").write_text("2000000")  # from 9 J over the maximum, 10 J
    assert counters.joules() == pytest.approx(2.5 + 0.25 + 3.0)
    assert counters.joules() == 0


def test_unreadable_counters_are_explained(
    powercap: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(zone: object) -> int:
        raise PermissionError(zone)

    with monkeypatch.context() as patched:
        patched.setattr(energy.Zone, "read", refuse)
        with pytest.raises(OSError, match=r"sudo chmod a\+r .*intel-rapl:\*/energy_uj"):
            EnergyCounters()
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    with pytest.raises(OSError, match="no energy counters"):
        EnergyCounters()


def counting(monkeypatch: pytest.MonkeyPatch, joules: float) -> None:
    """Let the counters increase by this energy during each run."""
    readings = iter([0.0, joules] * 20)
    monkeypatch.setattr(EnergyCounters, "joules", lambda _: next(readings))


def bench(model: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return inside("bench", "-m", model, "-n", 4, "-r", 2, *options)


@needs_core
def test_bench_prints_joules_per_token(powercap: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    counting(monkeypatch, 8.0)
    prompt, answer = json.loads(bench(model, "-p", 16, "--energy", "--json").stdout)
    assert 0 < prompt["joules_per_token"] * 16 < 8.0  # only the timed part of a run
    assert 0 < answer["joules_per_token"] * 4 < 8.0
    counting(monkeypatch, 8.0)
    assert "J per token" in bench(model, "-p", 0, "--energy").stdout


@needs_core
def test_bench_reports_that_energy_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    done = bench(model, "-p", 0, "--energy", "--json")
    assert "energy is not measured: this machine has no energy counters" in done.stderr
    assert [entry["joules_per_token"] for entry in json.loads(done.stdout)] == [None]
    assert "joules" not in bench(model, "-p", 0, "--json").stdout
