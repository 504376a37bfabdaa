"""The hybrid engine against the CPU alone, the GPU alone, llama.cpp and PowerInfer, at three budgets.

A unit is one model at one budget: every program decodes in turn, several rounds, each in a process of its
own. Models are synthetic, with planted activity (../planted.py), and written where the GPU is: a file of 4 GB
takes seconds. The budget stands in for a consumer card: `--vram-budget` for hotset and PowerInfer, and for
llama.cpp as many layers as a budget of that size holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compare_sparse import EVAL
from ledger import Ledger
from peers import print_table
from ruler import facts, median_of
from synthetic import SHAPES, Kind, Shape, write_sparse_model

from hotset.formats.quants import GGMLType

GIB = 1 << 30
WORKER = Path(__file__).with_name("decode.py")
FALCON40 = Shape(8192, 32768, 60, 128, 8)
SHARES = (0.25, 0.5, 1.0)  # of the model, in GPU memory
OVERHEAD = 0.6  # GiB beside the weights that a budget of 100% allows for: cache, workspace, context
TARGETS = {"PowerInfer": 2.0, "llama.cpp": 3.0}  # where half of the model or less fits


@dataclass(frozen=True)
class Recipe:
    """A synthetic model. layers: fewer than the shape's, where the whole would take too long."""

    kind: Kind
    shape: Shape
    type: GGMLType
    density: float = 0.1


def _layers(shape: Shape, n: int) -> Shape:
    return Shape(shape.d, shape.ff, n, shape.heads, shape.kv_heads)


RECIPES = {
    "small": Recipe("llama", Shape(1024, 8192, 4, 8, 2), GGMLType.Q4_0),  # 0.1 GB: for trying the scripts out
    "7b-q4_0": Recipe("llama", SHAPES["7b"], GGMLType.Q4_0),
    "bamboo7-q4_0": Recipe("bamboo", SHAPES["bamboo7"], GGMLType.Q4_0),
    "7b-f16": Recipe("llama", SHAPES["7b"], GGMLType.F16),
    "13b-q4_0": Recipe("llama", SHAPES["13b"], GGMLType.Q4_0),
    "falcon40-q4_0": Recipe("falcon40", _layers(FALCON40, 28), GGMLType.Q4_0, 0.05),  # 11 GB
    "falcon40-f16": Recipe("falcon40", _layers(FALCON40, 18), GGMLType.F16, 0.05),  # 24 GB
}


@dataclass(frozen=True)
class Setup:
    """What to measure, with what. options: of every load."""

    device: torch.device
    folder: Path
    models: tuple[str, ...]
    llama: Path | None
    powerinfer: Path | None
    n_gen: int
    rounds: int
    shares: tuple[float, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, args: argparse.Namespace, device: torch.device) -> Setup:
        names = args.model or (["small"] if args.small else [name for name in RECIPES if name != "small"])
        if unknown := set(names) - RECIPES.keys():
            sys.exit(f"{min(unknown)} is no model; there are {', '.join(RECIPES)}.")
        what = (args.models, tuple(names), args.llama, args.powerinfer)
        if args.small:
            return cls(device, *what, 8, 1, (0.85, 1.0), {"max_batch": 16})
        return cls(device, *what, 64, 3, SHARES, {})


def run(ledger: Ledger, setup: Setup) -> None:
    """Measures what is not measured yet, and prints the tables of all."""
    speeds, parts = [], []
    for name in setup.models:
        for share in setup.shares:
            key = f"{name}-{share:.0%}".replace("%", "")
            result = ledger.unit(key, lambda n=name, s=share: _measure(setup, n, s))  # type: ignore[misc]
            if result is not None:
                speeds += _speed_rows(name, share, result)
                parts += _part_rows(name, share, result)
    print(f"\n{facts(setup.device)['name']}; decode of {setup.n_gen} tokens, medians (lowest to highest)\n")
    print_table(["model", "budget", "program", "tokens/s", "hybrid ÷ it", "target"], speeds)
    print()
    print_table(
        [
            "model",
            "budget GiB",
            "planned",
            "held",
            "of budget",
            "hot",
            "serve",
            "predictor",
            "FFN",
            "attention",
            "CPU",
            "ms/token",
        ],
        parts,
    )
    print(ledger.closing())


# ---- one unit ----


def _measure(setup: Setup, name: str, share: float) -> dict[str, Any]:
    path = _model(setup.folder, name)
    size = path.stat().st_size / GIB
    budget = share * size + (OVERHEAD if share == 1.0 else 0.0)
    programs: dict[str, Any] = {
        "hybrid": lambda: _worker(setup, path, {"device": str(setup.device), "vram_budget": budget}),
        "CPU": lambda: _worker(setup, path, {"backend": "cpu"}),
    }
    if share == 1.0:
        programs["GPU"] = lambda: _worker(setup, path, {"device": str(setup.device), "sparsity": "dense"})
    n_layer = RECIPES[name].shape.layers
    if setup.llama is not None:
        layers = n_layer + 1 if share == 1.0 else int(share * n_layer)
        plain = _model(setup.folder, name, plain=True)
        programs["llama.cpp"] = lambda: _llama(setup, plain, layers)
    if setup.powerinfer is not None:
        programs["PowerInfer"] = lambda: _powerinfer(setup, path, budget)
    runs: dict[str, list[dict[str, Any]]] = {program: [] for program in programs}
    for i in range(setup.rounds):
        order = list(programs) if i % 2 == 0 else list(reversed(programs))
        for program in order:
            runs[program].append(programs[program]())
    failed = any("error" in run for program in ("hybrid", "CPU", "GPU") for run in runs.get(program, []))
    return {"budget": budget, "size": size, "device": facts(setup.device), "runs": runs, "failed": failed}


def _model(folder: Path, name: str, *, plain: bool = False) -> Path:
    """The file of a recipe, written if it is not there."""
    recipe = RECIPES[name]
    path = folder / (f"{name}.gguf" if plain else f"{name}.powerinfer.gguf")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        write_sparse_model(
            path, recipe.shape, recipe.type, kind=recipe.kind, plain=plain, density=recipe.density,
            rank=min(256, recipe.shape.d // 8),
        )  # fmt: skip
        print(
            f"{path.name}: {path.stat().st_size / GIB:.1f} GiB in {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return path


def _worker(setup: Setup, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """One load and answer in a process of its own, whose device memory is then its own too."""
    task = json.dumps({"path": str(path), "options": options | setup.options, "n_gen": setup.n_gen})
    done = subprocess.run([sys.executable, str(WORKER), task], capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _llama(setup: Setup, path: Path, layers: int) -> dict[str, Any]:
    assert setup.llama is not None
    argv = [str(setup.llama / "llama-bench"), "-m", str(path), "-ngl", str(layers), "-p", "0"]
    argv += ["-n", str(setup.n_gen), "-r", "1", "-o", "json"]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    return {"tokens_per_second": json.loads(done.stdout)[0]["avg_ts"], "layers": layers}


def _powerinfer(setup: Setup, path: Path, budget: float) -> dict[str, Any]:
    argv = [str(setup.powerinfer), "-m", str(path), "-n", str(setup.n_gen), "--ignore-eos", "--temp", "1.0"]
    argv += ["-p", "a", "--vram-budget", f"{budget:.3f}"]
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", cwd=setup.folder)
    found = EVAL.search(done.stderr)
    if done.returncode or found is None:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    return {"tokens_per_second": int(found[2]) / float(found[1]) * 1e3}


# ---- tables ----


def _speeds(result: dict[str, Any], program: str) -> list[float]:
    return [run["tokens_per_second"] for run in result["runs"].get(program, []) if "error" not in run]


def _speed_rows(name: str, share: float, result: dict[str, Any]) -> list[list[str]]:
    ours, rows = _speeds(result, "hybrid"), []
    for program, runs in result["runs"].items():
        speeds = _speeds(result, program)
        if not speeds:
            rows.append([name, f"{share:.0%}", program, f"failed: {runs[0].get('error')}", "", ""])
            continue
        ratio = statistics.median(ours) / statistics.median(speeds) if ours and program != "hybrid" else None
        target = TARGETS.get(program) if share <= 0.5 else 1.0 if program == "GPU" else None
        wanted = (
            "" if target is None or ratio is None else f"{target}× {'pass' if ratio >= target else 'FAIL'}"
        )
        rows.append(
            [
                name,
                f"{share:.0%}",
                program,
                median_of(speeds),
                "" if ratio is None else f"{ratio:.2f}×",
                wanted,
            ]
        )
    return rows


def _part_rows(name: str, share: float, result: dict[str, Any]) -> list[list[str]]:
    runs = [run for run in result["runs"]["hybrid"] if run.get("planned")]
    if not runs:
        return []
    one = runs[len(runs) // 2]
    ms = {kind: f"{1e3 * value:.2f}" for kind, value in one["seconds"].items()}
    return [[
        name, f"{result['budget']:.2f}", f"{one['planned'] / GIB:.2f}", f"{one['held'] / GIB:.2f}",
        f"{one['held'] / GIB / result['budget']:.0%}", _share(one["hot"]), _share(one["served"]),
        ms["predictor"], ms["ffn"], ms["attention"], ms["cold"], f"{1e3 / one['tokens_per_second']:.2f}",
    ]]  # fmt: skip


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
