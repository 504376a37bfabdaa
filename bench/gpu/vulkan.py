"""Stage `vulkan`: are its bits the CPU's, what does a dispatch cost, and where does a token's time go?

    parity   logits of small models of each weight type, compared with the CPU's
    costs    an empty dispatch, a barrier, a submission, a timestamp
    speed    prompts and answers at several depths, with the device's time by operation
    peers    the same files in the same run: llama.cpp's builds for CUDA and Vulkan, and Triton
    gate     whether Vulkan may replace Triton: docs/contributing/decisions/042-gate-for-triton.md
    tests    the tests of the Vulkan backend on this device

Each unit is a separate process. With a JSON argument this file is such a process.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # peers.py and synthetic.py of bench/
from ledger import PATIENCE, Ledger, run_program
from peers import print_table, verdict
from synthetic import SHAPES, Shape, write_model, write_sparse_model

from build import program_of
from hotset.formats.quants import GGMLType

ROOT = Path(__file__).parents[2]
PARTS = ("parity", "costs", "speed", "peers", "gate", "tests")
TESTS = ("test_vulkan_operations.py", "test_vulkan_backend.py", "test_vulkan_timings.py")
PARITY = Shape(512, 1536, 4, 8, 4)
# Relative error of the logits; 0: the same bits. Products of floats have their own order of sums.
TYPES = {
    GGMLType.Q4_0: 0.0, GGMLType.Q8_0: 0.0, GGMLType.Q4_K: 0.0, GGMLType.Q6_K: 0.0, GGMLType.F16: 1e-3,
}  # fmt: skip
COSTS = {
    "submission": "one empty dispatch, until the host has the result",
    "next submission": "another one in the same step",
    "dispatch": "an empty one next to others",
    "dependent dispatch": "an empty one after a barrier",
    "timestamp": "of an empty dispatch next to others",
}
# The gate: the least ratios of Vulkan's speed to Triton's, and the most seconds of a split layer.
DECODE, PREFILL, SPLIT_S = 0.9, 0.7, 50e-6
# So small that a split layer's time is the exchange between device and CPU.
SPLIT = Shape(256, 512, 32, 4, 2)
_SCALE = 2  # csrc/vulkan/shaders/elementwise.comp


@dataclass(frozen=True)
class Model:
    """A synthetic model. mixed: some matrices have six bits, as in Q4_K_M."""

    shape: Shape
    type: GGMLType
    mixed: bool = False


MODELS = {
    "1b-q4_0": Model(SHAPES["1b"], GGMLType.Q4_0),
    "7b-q4_0": Model(SHAPES["7b"], GGMLType.Q4_0),
    "7b-q4_k_m": Model(SHAPES["7b"], GGMLType.Q4_K, mixed=True),
}
SMALL = {"small": Model(Shape(256, 512, 2, 4, 2), GGMLType.Q4_0)}  # for trying the scripts out


@dataclass(frozen=True)
class Setup:
    """What to measure. device: of Vulkan. other: of Triton. llama: the source of llama.cpp with builds."""

    device: str
    other: str
    folder: Path
    llama: Path | None
    small: bool

    @property
    def models(self) -> Mapping[str, Model]:
        return SMALL if self.small else MODELS

    @property
    def backends(self) -> dict[str, list[str]]:
        """Return hotset's command for each backend: Vulkan and Triton."""
        return {"Vulkan": _hotset(self.device), "Triton": _hotset(self.other)}

    @property
    def tests(self) -> list[str]:
        """Return llama-bench's options for prompts and answers at each depth."""
        sizes = ("16", "4", "0,32", "1") if self.small else ("512", "32", "0,512,4096", "2")
        return [part for pair in zip(("-p", "-n", "-d", "-r"), sizes, strict=True) for part in pair]


def run(ledger: Ledger, setup: Setup, parts: Sequence[str]) -> None:
    """Measure the missing units of these parts, and print their tables."""
    measures: dict[str, Callable[[Ledger, Setup], None]] = {
        "parity": _parity, "costs": _costs, "speed": _speed, "peers": _peers, "gate": _gate, "tests": _tests,
    }  # fmt: skip
    for part in parts:
        measures[part](ledger, setup)
    print(ledger.closing())


def _parity(ledger: Ledger, setup: Setup) -> None:
    rows = []
    for type_, allowed in list(TYPES.items())[:2] if setup.small else TYPES.items():
        found = _unit(ledger, f"parity-{type_.name}", what="parity", device=setup.device, type=type_.name)
        if found is not None:
            shown = f"{found['error']:.1e}" if "error" in found else found["failed"]
            rows.append([type_.name, shown, f"{allowed:.0e}", verdict(found.get("error", 1.0) <= allowed)])
    print_table(["type", "error of logits", "allowed", ""], rows)


def _costs(ledger: Ledger, setup: Setup) -> None:
    n = 20 if setup.small else 1000
    found = _unit(ledger, "costs", what="costs", device=setup.device, n=n) or {}
    print_table(
        ["what", "µs", ""],
        [[name, f"{1e6 * found[name]:.2f}", text] for name, text in COSTS.items() if name in found],
    )


def _speed(ledger: Ledger, setup: Setup) -> None:
    rows, tables = [], []
    for name, model in setup.models.items():
        path = _written(ledger, setup.folder, name, model)
        argv = [*_hotset(setup.device), str(path), "--timings", *setup.tests]
        entries = (_bench(ledger, f"speed-{name}", argv) or {}).get("entries", [])
        for entry in entries:
            (times,) = entry["operations"]
            n = sum(one["dispatches"] for one in times["operations"])
            rows.append([
                name, _test(entry), f"{entry['avg_ts']:.1f}", f"{1e3 * times['on_device']:.3f}",
                f"{1e3 * times['on_host']:.3f}", str(n), str(times["groups"]),
            ])  # fmt: skip
            tables.append((name, entry))
    print_table(
        ["model", "test", "tokens/s", "ms on the device", "for the host", "dispatches", "groups"], rows
    )
    for name, entry in tables:
        if entry["n_gen"]:
            _print_operations(name, entry)


def _print_operations(name: str, entry: Mapping[str, Any]) -> None:
    (times,) = entry["operations"]
    print(f"\n{name}, {_test(entry)}: one token\n")
    rows = []
    for one in times["operations"]:
        rate = one["weight_bytes"] / one["seconds"] / 1e9 if one["seconds"] else 0.0
        rows.append([
            one["operation"], one["kernel"], str(one["dispatches"]), f"{1e6 * one['seconds']:.1f}",
            f"{one['seconds'] / times['on_device']:.0%}" if times["on_device"] else "",
            f"{rate:.0f}" if rate else "",
        ])  # fmt: skip
    print_table(["operation", "kernel", "dispatches", "µs", "share", "GB/s of weights"], rows)


def _speeds(ledger: Ledger, setup: Setup, model: str, program: str, argv: Sequence[str]) -> dict[str, float]:
    """Return the tokens per second of each test of a program."""
    path = _written(ledger, setup.folder, model, setup.models[model])
    command = [*argv, str(path), *setup.tests, "-o", "json"]
    found = _bench(ledger, f"peers-{model}-{program.replace(' ', '-')}", command) or {}
    return {_test(entry): float(entry["avg_ts"]) for entry in found.get("entries", [])}


def _peers(ledger: Ledger, setup: Setup) -> None:
    programs = setup.backends
    for kind in ("CUDA", "Vulkan") if setup.llama is not None else ():
        program = program_of(setup.llama, f"llama.cpp {kind}")
        if program.exists():
            programs[f"llama.cpp {kind}"] = [str(program), "-ngl", "999", "-fa", "1", "-m"]
        else:
            print(f"llama.cpp is not built for {kind}: it is left out")
    rows = []
    for name in setup.models:
        found: dict[str, dict[str, str]] = {}
        for program, argv in programs.items():
            for test, speed in _speeds(ledger, setup, name, program, argv).items():
                found.setdefault(test, {})[program] = f"{speed:.1f}"
        rows += [[name, test, *(of.get(program, "") for program in programs)] for test, of in found.items()]
    print_table(["model", "tokens/s", *programs], rows)


def _gate(ledger: Ledger, setup: Setup) -> None:
    """Print whether the gate holds for each model; it does not hold without a measurement."""
    rows = []

    def add(what: str, measured: str, gate: str, holds: bool) -> None:
        rows.append([what, measured, gate, "holds" if holds else "does not hold"])

    for name in setup.models:
        vulkan, triton = (
            _speeds(ledger, setup, name, backend, argv) for backend, argv in setup.backends.items()
        )
        for test in dict.fromkeys([*vulkan, *triton]):
            ratio = vulkan.get(test, float("nan")) / triton.get(test, float("nan"))
            least = PREFILL if test.startswith("pp") else DECODE
            add(f"{name}, {test}", f"{ratio:.2f}", f"at least {least}", ratio >= least)
        if not vulkan and not triton:
            add(name, "", "", False)
    n_layers = 2 if setup.small else SPLIT.layers
    found = _unit(ledger, "split", what="split", device=setup.device, n_layers=n_layers) or {}
    seconds = found.get("seconds", float("nan"))
    add("a split layer", f"{1e6 * seconds:.0f} µs", f"at most {1e6 * SPLIT_S:.0f} µs", seconds <= SPLIT_S)
    print_table(["Vulkan ÷ Triton", "measured", "gate", ""], rows)


def _tests(ledger: Ledger, setup: Setup) -> None:
    files = [f"tests/backends/vulkan/{name}" for name in TESTS]
    if setup.small:
        files = ["tests/backends/vulkan/test_shaders.py"]
    if importlib.util.find_spec("pytest") is None:
        print("pytest is not installed: the tests are left out")
        return
    several = [] if importlib.util.find_spec("xdist") is None or setup.small else ["-n", "8"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *several, *files]

    def measure() -> dict[str, Any]:
        done = run_program(ledger, command, cwd=ROOT, codes=(0, 1))
        if isinstance(done, str):
            return {"failed": done}
        return {"passed": done.returncode == 0, "lines": done.stdout.splitlines()[-12:]}

    found = ledger.unit("tests", measure) or {}
    print("\n".join(found.get("lines", [found.get("failed", "")])))
    print(f"tests on {setup.device}: {verdict(found.get('passed', False))}")


# ---- units ----


def _unit(ledger: Ledger, key: str, **task: Any) -> dict[str, Any] | None:
    command = [sys.executable, __file__, json.dumps(task)]

    def measure() -> dict[str, Any]:
        done = run_program(ledger, command)
        return {"failed": done} if isinstance(done, str) else json.loads(done.stdout.splitlines()[-1])

    return ledger.unit(key, measure)


def _bench(ledger: Ledger, key: str, argv: Sequence[str]) -> dict[str, Any] | None:
    command = [*argv, *([] if "-o" in argv else ["-o", "json"])]

    def measure() -> dict[str, Any]:
        done = run_program(ledger, command, most=240.0 * PATIENCE)
        return {"failed": done} if isinstance(done, str) else {"entries": json.loads(done.stdout)}

    found = ledger.unit(key, measure)
    if found is not None and "failed" in found:
        print(f"{key}: {found['failed']}")
    return found


def _hotset(device: str) -> list[str]:
    return [sys.executable, "-m", "hotset.cli.main", "bench", "--sparsity", "dense", "--device", device]


def _test(entry: Mapping[str, Any]) -> str:
    name = f"pp{entry['n_prompt']}" if entry["n_prompt"] else f"tg{entry['n_gen']}"
    return f"{name} @ {entry['n_depth']}"


def _written(ledger: Ledger, folder: Path, name: str, model: Model) -> Path:
    """Return the file of a model, after writing it if it is missing."""
    path = folder / f"vulkan-{name}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial_path, start = path.with_suffix(".partial"), perf_counter()
        type_of = partial(_q4_k_m, n_layers=model.shape.layers) if model.mixed else None
        write_model(partial_path, model.shape, model.type, type_of=type_of)
        partial_path.rename(path)
        print(
            f"{path.name}: {path.stat().st_size / 1e9:.1f} GB in {perf_counter() - start:.0f} s", flush=True
        )
    return path


def _q4_k_m(name: str, n_layers: int) -> GGMLType:
    """Return the type of a matrix in llama.cpp's Q4_K_M: some of attn_v and ffn_down have six bits."""
    if name == "output":
        return GGMLType.Q6_K
    if name.endswith(("attn_v", "ffn_down")):
        i = int(name.split(".")[1])
        if i < n_layers // 8 or i >= 7 * n_layers // 8 or (i - n_layers // 8) % 3 == 2:
            return GGMLType.Q6_K
    return GGMLType.Q4_K


# ---- in the process of a unit ----


def parity(device: str, type: str) -> dict[str, Any]:
    """Return the relative error of logits of a prompt and of single tokens, compared with the CPU's."""
    import hotset

    settings: dict[str, Any] = {"n_ctx": 128, "max_batch": 64, "sparsity": "dense"}
    ids, found = list(range(3, 70)), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, PARITY, GGMLType[type], n_vocab=1000)
        for where in ("cpu", device):
            with hotset.load(path, device=where, **settings) as model:
                found.append(np.stack([np.ravel(model.logits(ids[:n]))[-1000:] for n in (1, 5, 33, 67)]))
    return {"error": float(np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0]))}


def costs(device: str, n: int) -> dict[str, float]:
    """Return the seconds of COSTS. n: dispatches that a program with many has."""
    from hotset import _core
    from hotset.backends.vulkan.devices import find_device
    from hotset.backends.vulkan.kernels import Recorder, VulkanKernels
    from hotset.backends.vulkan.pipelines import open_device
    from hotset.backends.vulkan.timings import DispatchTimings

    opened = open_device(find_device(device))
    kernels, buffer = VulkanKernels(opened), opened.allocate(256 * (n + 2), "device")
    buffer.clear()
    cancel = _core.VulkanCancel()

    def recorded(
        n: int, *, dependent: bool = False, timed: bool = False, cut: bool = False
    ) -> _core.VulkanProgram:
        kernels.timings = DispatchTimings(opened) if timed else None
        recorder = Recorder(kernels)
        for i in range(n):
            if cut and i:
                recorder.program.cut()
            read, written = (i % 2, 1 - i % 2) if dependent else (0, i + 1)
            x = buffer, 256 * read, 256, False
            push = 64, 64, 64, 64, 64, 0, 1.0, 0.0, 0.0, 0.0
            recorder.add(
                "elementwise", [_SCALE, 0], [x, x, (buffer, 256 * written, 256, True)], push, (1, 1, 1)
            )
        recorder.program.finish()
        return recorder.program

    def seconds(program: _core.VulkanProgram) -> float:
        taken = []
        for _ in range(25):
            start = perf_counter()
            _core.vulkan_run([program], cancel)
            taken.append(perf_counter() - start)
        return median(taken[5:])

    single, many, n_cut = seconds(recorded(1)), seconds(recorded(n)), 8
    return {
        "submission": single,
        "next submission": (seconds(recorded(n_cut, cut=True)) - single) / (n_cut - 1),
        "dispatch": (many - single) / (n - 1),
        "dependent dispatch": (seconds(recorded(n, dependent=True)) - single) / (n - 1),
        "timestamp": (seconds(recorded(n, timed=True)) - many) / n
        if opened.tick_nanoseconds
        else float("nan"),
    }


def split(device: str, n_layers: int) -> dict[str, float]:
    """Return the seconds that a layer takes longer if its neurons are split between device and CPU."""
    import hotset
    from hotset.formats.powerinfer import GPUIndex, write_gpu_index

    shape = replace(SPLIT, layers=n_layers)
    answer: dict[str, Any] = {"max_tokens": 2 * n_layers, "temperature": 0, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as folder:
        path, index = Path(folder) / "model.gguf", Path(folder) / "half.gpuidx"
        write_sparse_model(path, shape, GGMLType.Q4_0, plain=True, n_vocab=1000, n_ctx=256)
        write_gpu_index(index, GPUIndex(1 << 30, [np.arange(shape.ff) % 2 == 0] * n_layers))
        shared: dict[str, Any] = {"gpu_index": index, "vram_budget": 1.0}
        times: dict[bool, list[float]] = {False: [], True: []}
        with (
            hotset.load(path, device=device, n_ctx=256) as whole,
            hotset.load(path, device=device, n_ctx=256, **shared) as halves,
        ):
            for _ in range(6):
                for is_split, model in ((False, whole), (True, halves)):
                    done = model.generate([1, 2, 3], reuse_prefix=False, **answer)
                    times[is_split].append(1 / done.timings.predicted_per_second)
    return {"seconds": (median(times[True][1:]) - median(times[False][1:])) / n_layers}


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    print(json.dumps({"parity": parity, "costs": costs, "split": split}[task.pop("what")](**task)))
