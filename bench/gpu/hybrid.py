"""The hybrid engine compared with CPU only, GPU only, llama.cpp and PowerInfer, at three budgets.

A unit is one program that decodes a model at one budget, once, in a separate process; programs take turns,
for several rounds. Models are synthetic, with planted activity (../planted.py), and written on the GPU's
machine: a file of 4 GB takes seconds. The budget simulates a consumer card, and is the same for all. hotset's
`--vram-budget` includes cache, workspace and context; their part in its plan is subtracted from the budget of
PowerInfer, which counts only weights, and of llama.cpp, which gets as many layers as fit in the rest. At 100%
no engine has a budget: everything is on the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ledger import Ledger
from ledger import run_program as _run
from peers import EVAL, print_table
from ruler import facts, median_of
from synthetic import SHAPES, Kind, Shape, write_sparse_model

from hotset.backends.triton.devices import device_name
from hotset.formats.quants import GGMLType

GIB = 1 << 30
WORKER = Path(__file__).with_name("decode.py")
FALCON40 = Shape(8192, 32768, 60, 128, 8)
WHOLE = 1.0  # no budget, because a whole model needs more than its weights on the device
SHARES = (0.25, 0.5, WHOLE)  # of the model, in GPU memory
TARGETS = {"PowerInfer": 2.0, "llama.cpp": 3.0}  # if half of the model or less fits


@dataclass(frozen=True)
class Recipe:
    """A synthetic model. layers: fewer than the shape's if the whole would take too long."""

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
    """What to measure, and how. options: of every load."""

    device: torch.device
    folder: Path
    models: tuple[str, ...]
    llama: Path | None
    powerinfer: Path | None
    threads: int
    n_gen: int
    rounds: int
    shares: tuple[float, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, args: argparse.Namespace, device: torch.device) -> Setup:
        names = args.model or (["small"] if args.small else [name for name in RECIPES if name != "small"])
        if unknown := set(names) - RECIPES.keys():
            sys.exit(f"{min(unknown)} is not a model; there are {', '.join(RECIPES)}.")
        what = (args.models, tuple(names), args.llama, args.powerinfer, args.threads)
        if args.small:
            return cls(device, *what, 8, 1, (0.85, WHOLE), {"max_batch": 16})
        return cls(device, *what, 64, 3, SHARES, {})


def run(ledger: Ledger, setup: Setup) -> None:
    """Measure missing units, and print the tables of all results."""
    speeds, parts = [], []
    for name in setup.models:
        for share in setup.shares:
            result = measure(ledger, setup, name, share)
            if result["runs"]:
                speeds += speed_rows(name, share, result)
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


def measure(ledger: Ledger, setup: Setup, name: str, share: float) -> dict[str, Any]:
    """Measure every program in turn, for several rounds; each run of a program is a stored unit."""
    path = _model(setup.folder, name)
    plain = _model(setup.folder, name, plain=True) if setup.llama else path
    size = path.stat().st_size / GIB
    budget = None if share == WHOLE else share * size
    device = {"device": device_name(setup.device)}
    hybrid = device | ({} if budget is None else {"vram_budget": budget})
    runs: dict[str, list[dict[str, Any]]] = {}

    def unit(program: str, i: int, measure: Callable[[], dict[str, Any]]) -> None:
        def measured() -> dict[str, Any]:
            found = measure()
            return found | {"failed": "error" in found}

        key = f"{name}-{share:.0%}-{program}-{i}".replace("%", "")
        if (found := ledger.unit(key, measured)) is not None:
            runs.setdefault(program, []).append(found)

    def beside() -> float:
        """Return the GiB in hotset's plan apart from weights: peers get as much for weights as hotset."""
        planned = next((run["kinds"] for run in runs["hybrid"] if run.get("kinds")), {})
        return sum(planned.get(kind, 0) for kind in ("kv", "workspace", "context")) / GIB

    programs: dict[str, Callable[[], dict[str, Any]]] = {
        "hybrid": lambda: _worker(ledger, setup, path, hybrid),
        "CPU": lambda: _worker(ledger, setup, path, {"device": "cpu"}),
    }
    if budget is None:
        programs["GPU"] = lambda: _worker(ledger, setup, path, device | {"sparsity": "dense"})
    if setup.llama is not None:
        programs["llama.cpp"] = lambda: _llama(ledger, setup, name, plain, budget, beside())
    if setup.powerinfer is not None:
        programs["PowerInfer"] = lambda: _powerinfer(ledger, setup, path, budget, beside())
    for i in range(setup.rounds):
        # The first round begins with hotset, whose plan determines the peers' budgets.
        for program in list(programs) if i % 2 == 0 else list(reversed(programs)):
            if i or program == "hybrid" or any("error" not in run for run in runs.get("hybrid", [])):
                unit(program, i, programs[program])
    return {"budget": budget, "size": size, "runs": runs}


def _model(folder: Path, name: str, *, plain: bool = False) -> Path:
    """Return the file of a recipe, after writing it if it is missing."""
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


def _worker(ledger: Ledger, setup: Setup, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Load and answer once in a separate process, so that no other program's memory is on the device."""
    given = {"n_threads": setup.threads} | options | setup.options
    task = json.dumps({"path": str(path), "options": given, "n_gen": setup.n_gen})
    done = _run(ledger, [sys.executable, str(WORKER), task])
    if isinstance(done, str):
        return {"error": done}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _llama(
    ledger: Ledger, setup: Setup, name: str, path: Path, budget: float | None, beside: float
) -> dict[str, Any]:
    """Run llama.cpp with as many layers as fit in the budget minus hotset's memory apart from weights."""
    assert setup.llama is not None
    layers = RECIPES[name].shape.layers
    if budget is not None:
        layers = int(max(budget - beside, 0) / (path.stat().st_size / GIB / layers))
    argv = [str(setup.llama / "llama-bench"), "-m", str(path), "-ngl", str(layers if budget else 999)]
    argv += ["-p", "0", "-n", str(setup.n_gen), "-r", "1", "-o", "json", "-t", str(setup.threads)]
    done = _run(ledger, argv)
    if isinstance(done, str):
        return {"error": done}
    return {"tokens_per_second": json.loads(done.stdout)[0]["avg_ts"], "layers": layers}


def _powerinfer(
    ledger: Ledger, setup: Setup, path: Path, budget: float | None, beside: float
) -> dict[str, Any]:
    argv = [str(setup.powerinfer), "-m", str(path), "-n", str(setup.n_gen), "--ignore-eos", "--temp", "1.0"]
    argv += ["-p", "a", "-t", str(setup.threads)]
    if budget is not None:  # which there counts only weights
        argv += ["--vram-budget", f"{max(budget - beside, 0):.3f}"]
    done = _run(ledger, argv, cwd=setup.folder)
    if isinstance(done, str):
        return {"error": done}
    found = EVAL.search(done.stderr)
    if found is None:
        return {"error": "it printed no time"}
    return {"tokens_per_second": int(found[2]) / float(found[1]) * 1e3}


# ---- tables ----


def _speeds(result: dict[str, Any], program: str) -> list[float]:
    return [run["tokens_per_second"] for run in result["runs"].get(program, []) if "error" not in run]


def speed_rows(name: str, share: float, result: dict[str, Any]) -> list[list[str]]:
    """Return a row for each program: tokens per second, and the speedup of the hybrid."""
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
    runs = [run for run in result["runs"].get("hybrid", []) if run.get("planned")]
    if not runs:
        return []
    one = runs[len(runs) // 2]
    given = result["budget"]
    budget = [
        "" if given is None else f"{given:.2f}", f"{one['planned'] / GIB:.2f}", f"{one['held'] / GIB:.2f}",
        "" if given is None else f"{one['held'] / GIB / given:.0%}",
    ]  # fmt: skip
    ms = {kind: f"{1e3 * value:.2f}" for kind, value in one["seconds"].items()}
    return [[
        name, *budget, _share(one["hot"]), _share(one["served"]),
        ms["predictor"], ms["ffn"], ms["attention"], ms["cold"], f"{1e3 / one['tokens_per_second']:.2f}",
    ]]  # fmt: skip


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
