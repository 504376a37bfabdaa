"""The scripts for a machine with a GPU, tried without one: units that resume, kernels, tables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import first
import hybrid
import kernels
import launches
import ledger
import pytest
import steps
import torch
import trial
import vulkan
from byte_models import vocabulary
from ledger import Ledger, run_within
from paths import BENCH, DOCS
from tiny_gguf import write_relu

import hotset
from hotset.backends.triton import measuring, planning
from hotset.errors import OutOfMemoryError
from hotset.placement import table

STAGES = BENCH / "gpu" / "stages.py"


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


def test_no_unit_begins_after_the_limit_and_the_next_call_resumes(tmp_path: Path) -> None:
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


def test_a_command_ends_with_its_children_when_its_time_is_over(tmp_path: Path) -> None:
    started = tmp_path / "started"
    child = f"import time, pathlib; pathlib.Path({str(started)!r}).write_text(''); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}])"
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):  # the child, which held the pipe open, has ended too
        run_within([sys.executable, "-S", "-c", code], 1.0, stdout=subprocess.PIPE)
    assert time.monotonic() - began < 30
    done = run_within([sys.executable, "-S", "-c", "print(1)"], 60.0, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n")
    ledger = Ledger(tmp_path, seconds=60, limit=100)
    assert 99 < ledger.timeout(1000) <= 100
    assert ledger.timeout(5) == 5
    assert Ledger(tmp_path, seconds=60, limit=-5).timeout(5) == 1


def test_peers_get_the_plans_bytes_for_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def ran(command: list[str], seconds: float, **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        said = {"llama-bench": '[{"avg_ts": 20}]'}.get(Path(command[0]).name, "")
        if command[1].endswith("decode.py"):
            kinds = {
                "weights": 1 << 29, "neurons": 1 << 29, "kv": 1 << 28, "workspace": 0, "context": 1 << 28,
            }  # fmt: skip
            said = json.dumps({"tokens_per_second": 50, "kinds": kinds})
        return subprocess.CompletedProcess(command, 0, said, "eval time = 1000 ms / 10 runs")

    file = tmp_path / "model.gguf"
    with file.open("wb") as out:
        out.truncate(4 * hybrid.GIB)
    monkeypatch.setattr(hybrid, "_model", lambda folder, name, plain=False: file)
    monkeypatch.setattr(ledger, "run_within", ran)
    monkeypatch.setattr(hybrid, "EVAL", re.compile("eval time = ([0-9]+) ms / ([0-9]+) runs"))
    device, where = torch.device("cpu"), (Path("/llama"), Path("/powerinfer/main"))
    setup = hybrid.Setup(device, tmp_path, ("7b-q4_0",), *where, 7, 64, 1, (0.5, hybrid.WHOLE), {})
    result = hybrid.measure(Ledger(tmp_path / "out", 60), setup, "7b-q4_0", 0.5)
    assert set(result["runs"]) == {"hybrid", "CPU", "llama.cpp", "PowerInfer"}
    llama = next(command for command in asked if "llama-bench" in command[0])
    assert llama[llama.index("-ngl") + 1] == "12"  # 1.5 GiB of 4, of 32 layers
    power = next(command for command in asked if command[0].endswith("main"))
    assert power[power.index("--vram-budget") + 1] == "1.500"
    assert [command[command.index("-t") + 1] for command in (llama, power)] == ["7", "7"]
    hybrid_options = json.loads(asked[0][-1])["options"]
    assert hybrid_options == {"n_threads": 7, "device": "simulated", "vram_budget": 2.0}
    asked.clear()
    whole = hybrid.measure(Ledger(tmp_path / "out", 60), setup, "7b-q4_0", hybrid.WHOLE)
    assert {"GPU", "hybrid"} <= set(whole["runs"])
    assert whole["budget"] is None
    assert not any("--vram-budget" in part or "vram_budget" in part for command in asked for part in command)


@pytest.mark.slow
def test_kernels_are_checked_and_their_keys_differ(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(STAGES), "kernels", "--device", "simulated", "--small", "--out", str(tmp_path)],
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
    assert kernels.cells(unit, {"seconds": None, "error": 0.5}, rates)[-1] == "WRONG"
    assert kernels.cells(unit, {"seconds": 1.1e-6, "error": 1e-7}, rates)[-1] == "85% pass"
    assert kernels.cells(unit, {"seconds": 1.5e-6, "error": 1e-7}, rates)[-1] == "85% FAIL"
    product = kernels.Unit("prompt", 1e6, 1e9, lambda: None, None, 0.4)
    found = kernels.cells(product, {"seconds": 2e-6, "error": 1e-4}, rates | {"matmul": 1e15})[-1]
    assert found == "50% of products, 40% pass"


def test_ratios_are_of_medians_and_targets_where_half_fits() -> None:
    def runs(*speeds: float) -> list[dict[str, float]]:
        return [{"tokens_per_second": speed} for speed in speeds]

    result = {"runs": {"hybrid": runs(60, 40, 50), "llama.cpp": runs(10, 20, 15), "CPU": [{"error": ["no"]}]}}
    rows = hybrid.speed_rows("7b", 0.5, result)
    assert rows[0][3:] == ["50.0 (40.0 to 60.0)", "", ""]
    assert rows[1][3:] == ["15.0 (10.0 to 20.0)", "3.33×", "3.0× pass"]
    assert "failed" in rows[2][3]
    assert hybrid.speed_rows("7b", 1.0, result)[1][5] == ""  # all fits: only our own GPU path is a target


def test_first_half_hour_ends_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that a hanging stage is ended, a failing stage stops no other, and only these two run again."""
    fake = tmp_path / "stages.py"
    fake.write_text(
        "import pathlib, sys, time\n"
        "name, out = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "with (out / 'begun').open('a') as file: file.write(name + ' ')\n"
        "print('of', name, flush=True)\n"
        "if name == 'hangs' and not (out / 'mended').exists(): time.sleep(60)\n"
        "if name == 'fails' and not (out / 'mended').exists(): sys.exit('no')\n"
        "print('Complete; all of it')\n"
    )
    monkeypatch.setattr(first, "STAGES", fake)
    monkeypatch.setattr(first, "SPARE", 0.1)
    names = ("one", "hangs", "fails", "last")
    order = tuple(first.Step(name, (name,), 1.0 if name == "hangs" else 60.0) for name in names)
    assert first.run(tmp_path, ["--device", "simulated"], 600, steps=order) == 2
    results = {name: json.loads((tmp_path / "first" / f"{name}.json").read_text()) for name in names}
    assert [results[name]["ended"] for name in names] == [0, None, 1, 0]
    said = capsys.readouterr().out
    assert "2 of 4 stages are left" in said
    assert re.search(r"\| hangs +\| time", said)
    (tmp_path / "mended").touch()
    order = tuple(first.Step(name, (name,), 60.0) for name in names)
    assert first.run(tmp_path, [], 600, steps=order) == 0
    begun = (tmp_path / "begun").read_text().split()
    assert begun[-2:] == ["hangs", "fails"]
    assert begun[:-2] in (
        [*names],
        [name for name in names if name != "hangs"],
    )  # the stage may end it earlier
    assert capsys.readouterr().out.rstrip().endswith("Complete.")
    assert first.run(tmp_path, [], -1, steps=(*order, first.Step("late", ("late",), 60))) == 1


def test_stages_of_the_first_calls_exist_and_end_in_time() -> None:
    done = subprocess.run([sys.executable, str(STAGES), "--help"], capture_output=True, text=True)
    (choices,) = re.findall(r"^  \{(.*)\}$", done.stdout, re.MULTILINE)
    named = {step.arguments[0] for step in (*first.ORDER, *first.TRITON) if step.arguments}
    assert named == set(choices.split(","))
    assert [step.name for step in first.ORDER[:2]] == ["install", "vulkan-right"]
    assert sum(step.seconds for step in first.ORDER) <= first.IN_ALL
    assert sum(step.seconds for step in first.ORDER[:4]) <= first.MOST  # the first call measures Vulkan
    assert all(2 * first.SPARE < step.seconds <= first.MOST for step in first.ORDER)


def test_missing_parts_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name in ("glslc", "nvcc") else f"/bin/{name}")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setenv("VK_DRIVER_FILES", "driver.json")
    found = list(first.needs(tmp_path / "models", tmp_path, None))
    assert first.check_needs(found)
    said = capsys.readouterr().out
    assert re.search(r"glslc +\| missing: carry glslc, .*libvulkan-dev.*\| llama.cpp for Vulkan", said)
    assert "missing: carry llama.cpp's source without .git" in said
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert not first.check_needs(list(first.needs(tmp_path / "models", tmp_path, None)))
    assert "carry Debian's package libvulkan1" in capsys.readouterr().out


def test_an_archive_of_results_is_copied_after_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "stages.py"
    fake.write_text("print('Complete')")
    monkeypatch.setattr(first, "STAGES", fake)
    monkeypatch.setattr(first, "SPARE", 0.1)
    step = first.Step("one", ("one",), 60)
    assert first.run(tmp_path / "out", [], 60, steps=[step], copy=tmp_path / "copy") == 0
    with tarfile.open(tmp_path / "copy" / "results.tar.gz") as archive:
        assert archive.getnames() == ["first/one.json", "first/one.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[], ["--all"]])
def test_the_first_calls_run_without_a_gpu(tmp_path: Path, steps: list[str]) -> None:
    """Run the command for a machine with a GPU on the software driver and the simulated device.

    Every stage must succeed and keep its measurements.
    """
    command = [sys.executable, str(BENCH / "gpu" / "first.py"), "--device", "simulated", "--small", *steps]
    out, environment = tmp_path / "out", os.environ | {"HOTSET_BENCH_PATIENCE": "100"}
    done = subprocess.run(
        [*command, "--seconds", "1e6", "--out", str(out), "--models", str(tmp_path / "models")],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.rstrip().endswith("Complete.")
    assert not re.search("WRONG|Traceback|FAIL", done.stdout)
    ended = {path.stem: json.loads(path.read_text())["ended"] for path in (out / "first").glob("*.json")}
    order = (*first.ORDER, *(first.TRITON if steps else ()))
    assert ended == dict.fromkeys((step.name for step in order), 0)
    units = {path.stem for path in out.glob("vulkan/*.json")}
    assert units > {"parity-Q4_0", "costs", "speed-small", "peers-small-Vulkan", "split", "tests"}
    costs = json.loads((out / "vulkan" / "costs.json").read_text())
    assert set(costs) == set(vulkan.COSTS)
    if steps:
        assert json.loads((out / "steps" / "replays-half.json").read_text())["split"] > 0


def test_results_of_steps_become_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulate failures, budgets and ratios. Results of failed units are not kept.

    Host-device synchronisation fails, captured steps share no layer, and a blocking prompt has other logits.
    """
    n_split = 0

    def ran(ledger: Ledger, argv: list[str], **options: object) -> subprocess.CompletedProcess[str] | str:
        if Path(argv[0]).name == "llama-bench" or "bench" in argv:
            ours = argv[0] == sys.executable
            entries = [{"n_prompt": 512, "avg_ts": 90 if ours else 100}, {"n_prompt": 0, "avg_ts": 50}]
            return subprocess.CompletedProcess(argv, 0, json.dumps(entries), "")
        task = json.loads(argv[-1])
        if task.get("kind") == "memops":
            return "the driver has no such call"
        environment: Any = options.get("env") or {}
        blocking, misses = environment.get("CUDA_LAUNCH_BLOCKING"), environment.get("HOTSET_EXPERT_MISSES")
        budget = int(task.get("options", {}).get("vram_budget", 0) * hybrid.GIB)
        said = {
            "synchronisation": {"seconds": 8e-6},
            "replays": {
                "different": [],
                "captured": 8,
                "notes": [],
                "split": n_split if task.get("share") else 0,
                "budget": task.get("share"),
            },
            "prompt": {"logits": f"{blocking}abcdefgh", "tokens_per_second": 1000},
            "experts": {
                "answer": "another" if misses == "fetch" else "one",
                "found": {"cached": 7, "fetched": 1, "on the CPU": 1},
                "notes": [],
            },
            None: {"planned": budget, "held": budget * 0.97, "tokens_per_second": 40},
        }[task.get("what")]
        return subprocess.CompletedProcess(argv, 0, json.dumps(said), "")

    file = tmp_path / "model.gguf"
    with file.open("wb") as out:
        out.truncate(4 * hybrid.GIB)
    monkeypatch.setattr(hybrid, "_model", lambda folder, name, plain=False: file)
    monkeypatch.setattr(hybrid, "_run", ran)
    what = (tmp_path, ("small",), Path("/llama"), None, 7)
    setup = hybrid.Setup(torch.device("cuda", 0), *what, 64, 1, (0.5,), {})
    steps.run(Ledger(tmp_path / "steps", 60), setup)
    said = capsys.readouterr().out
    assert said.rstrip().splitlines()[-1].startswith("1 units left (synchronisation-memops is next)")
    kept = {path.stem for path in (tmp_path / "steps").iterdir()}
    assert kept > {"synchronisation-spin", "replays-half", "prompt"}
    assert "synchronisation-memops" not in kept
    lines = said.splitlines()
    found = {cells[1].strip(): cells[3].strip() for line in lines if len(cells := line.split("|")) == 5}
    assert found["host-device synchronisation spin"] == "pass"
    assert found["host-device synchronisation memops"] == "FAIL"
    assert found["captured steps, whole on the device"] == "pass"
    assert found["captured steps, half on the device"] == "FAIL"  # no layer was shared
    assert found["prompt of 1800 tokens, launches that wait"] == "FAIL"
    assert found["experts, 25% in the cache, others by cpu"] == "pass"
    assert found["experts, 25% in the cache, others by fetch"] == "FAIL"  # another answer
    steps.budgets(Ledger(tmp_path / "budgets", 60), setup)
    assert re.search(r"\| 2.00 +\| 2.00 +\| 1.94 +\| 97% +\| 40.0 +\| pass", capsys.readouterr().out)
    steps.speed(Ledger(tmp_path / "speed", 60), setup, [])
    said = capsys.readouterr().out
    assert re.search(r"\| pp +\| 90.0 +\| 100.0 +\| 0.90× +\| 0.8× pass", said)
    assert re.search(r"\| tg +\| 50.0 +\| 50.0 +\| 1.00× +\| 1.0× pass", said)


def test_captured_steps_are_tried_with_shared_layers_and_a_large_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a context of 500 MB and a model of some kilobytes: half of the model is too small a budget."""
    measured = measuring.measure
    monkeypatch.setattr(
        planning, "measure", lambda *args, **options: replace(measured(*args, **options), context=500 << 20)
    )
    n_vocab = len(vocabulary()["tokenizer.ggml.tokens"])
    path = write_relu(tmp_path / "m.gguf", "bamboo", n_ff=224, n_vocab=n_vocab, keys=vocabulary())
    monkeypatch.setattr(trial, "SETTINGS", trial.SETTINGS | {"n_ctx": 256})
    with pytest.raises(OutOfMemoryError, match=r"the smallest budget that works is 0\.5"):
        hotset.plan(
            path, device="simulated", vram_budget=0.5 * path.stat().st_size / hybrid.GIB, **trial.SETTINGS
        )
    found = trial.replays("simulated", str(path), 0.5, [1])
    assert (found["different"], found["split"], found["notes"]) == ([], 2, [])
    assert 500 << 20 < found["budget"] * hybrid.GIB < 512 << 20
    assert trial.replays("simulated", str(path), None, [1])["split"] == 0


def test_stage_on_a_missing_device_gives_one_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(STAGES), "kernels", "--device", "cuda:7", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "cuda:7" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_table_of_launches_is_the_programs() -> None:
    """docs/contributing/internals/gpu.md; `python bench/gpu/launches.py` prints it."""
    text = (DOCS / "contributing/internals/gpu.md").read_text()
    lines = [line.split("|") for line in text.splitlines()]
    written = {cells[1].strip(): [cell.strip() for cell in cells[1:-1]] for cells in lines if len(cells) == 8}
    rows = list(launches.rows())
    found = launches.table(rows)
    assert len(found) == 8
    (predicted,) = [row for row in rows if row.mode == "predicted"]
    assert predicted.layer == table.LAYER_KERNELS + table.FFN_KERNELS  # the planner uses these numbers
    for row in found:
        assert written[row[0]] == row
