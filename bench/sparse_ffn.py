"""The sparse FFN operator: how much of the memory's speed it reaches at 2 to 80% of active neurons.

usage: python bench/sparse_ffn.py [--type q4_0] [--d 4096 --ff 11008] [--without-prefetch] [--plot FILE.svg]

FFNs with random weights in a mapped file run one after another in a native plan. The active neurons are
given: a score table replaces the predictor, and SiLU replaces ReLU, so that exactly these neurons have a
value. Speeds are bytes of active rows (gate, up and down) per second, over the rate at which the same file
streams in the same round. Masks are uniform, or follow the generator's power law with the hot neurons
anywhere (file order) or first (hot first).

--without-prefetch also compiles the core without prefetch instructions, and measures both in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import peers
from planted import firing_probabilities
from synthetic import random_matrix

from hotset.formats.quants import GGMLType

# hotset._core is imported late, because a process may use another build of it.

DENSITIES = (0.02, 0.05, 0.10, 0.20, 0.40, 0.80)
N_MASKS = 12  # per measurement, one per step
CHUNKS = 32  # per matrix; of a chunk with many active rows, the operator reads all
STREAMS_ABOVE = 0.75
GAIN_TOLERANCE, PREFETCH_TARGET = 0.05, 1.7
ROOT = Path(__file__).parents[1]

Order = Literal["uniform", "file", "hot"]
ORDERS: dict[Order, str] = {
    "uniform": "uniform",
    "file": "power law, file order",
    "hot": "power law, hot first",
}


def masks(ff: int, density: float, order: Order, rng: np.random.Generator) -> np.ndarray:
    """Return the active neurons, bool [N_MASKS, ff]."""
    p = firing_probabilities(ff, density, "uniform" if order == "uniform" else "power")
    if order == "file":
        p = rng.permutation(p)
    return rng.random((N_MASKS, ff)) < p


@dataclass(frozen=True)
class Layer:
    """Matrices of one FFN as stored, [ff, d] each; gate is None for FFNs without one."""

    type: GGMLType
    gate: np.ndarray | None
    up: np.ndarray
    down: np.ndarray


class Operator:
    """The FFNs of some layers in a native plan, all with the same input.

    scores: float [n, ff]; step i computes the neurons whose score in row i is not negative. None: the dense
    operator, which computes all.
    """

    def __init__(self, layers: Sequence[Layer], d: int, ff: int, scores: np.ndarray | None, n_threads: int):
        from hotset import _core

        n = N_MASKS if scores is None else len(scores)
        plan = _core.Plan(1, 1, 1, _core.Runtime(n_threads))
        x, act, out = plan.buffer(d, False), plan.buffer(ff, False), plan.buffer(d, False)
        inputs = np.random.default_rng(0).standard_normal((n, d), np.float32)
        table_of = lambda rows: (int(GGMLType.F32), rows.view(np.uint8).reshape(-1))  # noqa: E731
        plan.add("embed", weight=table_of(inputs), of="token", first_row=0, out=x)
        wanted = {}
        if scores is not None:
            table = plan.buffer(ff, False)
            stored = table_of(np.ascontiguousarray(scores, np.float32))
            plan.add("embed", weight=stored, of="token", first_row=0, out=table)
            wanted = {"scores": table, "threshold": 0.0, "first": 0}
        for layer in layers:
            type, sparse = int(layer.type), scores is not None
            gate = None if layer.gate is None else {"weight": (type, layer.gate)}
            up = {"weight": (type, layer.up)}
            plan.add("neurons", x=x, gate=gate, up=up, activation="silu", **wanted, sparse=sparse, out=act)
            plan.add("transposed_linear", x=act, weight=(type, layer.down), sparse=sparse, out=out)
        plan.finish()
        self._plan, self._n = plan, n

    def seconds(self) -> float:
        """Return the mean seconds of a step over all masks."""
        none, zero, table = np.zeros(0, np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
        self._plan.run(zero, zero, zero, table, none)
        start = time.perf_counter()
        for i in range(self._n):
            self._plan.run(np.array([i], np.int32), zero, zero, table, none)
        return (time.perf_counter() - start) / self._n


# -- measuring in separate processes -------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """The weights: a file with random ones, `layers` FFNs of three matrices."""

    file: Path
    type: GGMLType
    d: int
    ff: int
    layers: int
    threads: int

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one neuron: its rows of all three matrices."""
        return 3 * self.file.stat().st_size // (3 * self.ff * self.layers)

    def write(self) -> None:
        with ThreadPoolExecutor(self.threads) as pool:
            data = random_matrix(self.type, self.d, 3 * self.ff * self.layers, 0, pool)
        data.tofile(self.file)


_operators: dict[tuple[float, Order] | None, Operator] = {}
_counts: dict[tuple[float, Order] | None, float] = {}
_mapped: np.ndarray


def _start(setup: Setup, core: Path | None) -> None:
    """Build the operators of every setting; `core`: another build of the native module."""
    global _mapped  # noqa: PLW0603 - a process has one
    if core is not None:
        spec = importlib.util.spec_from_file_location("hotset._core", core)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["hotset._core"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    _mapped = np.memmap(setup.file, np.uint8, mode="r")
    matrices = np.split(_mapped, 3 * setup.layers)
    layers = [Layer(setup.type, *matrices[i : i + 3]) for i in range(0, len(matrices), 3)]
    _operators[None] = Operator(layers, setup.d, setup.ff, None, setup.threads)
    _counts[None] = setup.ff
    for density in DENSITIES:
        for order in ORDERS:
            wanted = masks(setup.ff, density, order, np.random.default_rng(0))
            scores = np.where(wanted, 1.0, -1.0)
            _operators[density, order] = Operator(layers, setup.d, setup.ff, scores, setup.threads)
            _counts[density, order] = float(wanted.sum(axis=1).mean())


def _measure(setting: tuple[float, Order] | None, setup: Setup) -> tuple[float, float]:
    """Return seconds per step, and useful bytes per second."""
    seconds = _operators[setting].seconds()
    return seconds, _counts[setting] * setup.layers * setup.row_bytes / seconds


def _streaming(n_threads: int) -> float:
    from hotset import _core

    return float(_core.read_bandwidth(_mapped, n_threads))


def core_without_prefetch() -> Path:
    """Build the native module without prefetch instructions, and return its path."""
    import nanobind

    folder = ROOT / "build" / "no_prefetch"
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DCMAKE_CXX_FLAGS=-D'__builtin_prefetch(...)=((void)0)'"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_PREFIX_PATH={nanobind.cmake_dir()}"]
    for command in (configure, ["cmake", "--build", str(folder), "-j2"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return next(folder.glob("_core*.so"))


# -- reporting -----------------------------------------------------------------------------------


@dataclass
class Cell:
    """The results of a setting, per round. rate: useful bytes per second; streaming: the file's."""

    density: float
    order: Order
    seconds: list[float]
    rate: list[float]
    streaming: list[float]
    dense_seconds: list[float]
    plain_rate: list[float]  # without prefetch

    @property
    def share(self) -> float:
        return median_ratio(self.rate, self.streaming)

    @property
    def over_dense(self) -> float:
        return median_ratio(self.dense_seconds, self.seconds)

    @property
    def over_plain(self) -> float | None:
        return median_ratio(self.rate, self.plain_rate) if self.plain_rate else None


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def predicted_gain(density: float, ff: int, uniform: Sequence[Cell], dense_rate: float) -> float:
    """Return the predicted gain of hot-first over file order: chunks with many active rows stream."""
    at = np.array([cell.density for cell in uniform])
    rates = np.array([statistics.median(cell.rate) for cell in uniform])
    p = firing_probabilities(ff, density, "power")
    time_hot = 0.0
    for chunk in np.array_split(p, CHUNKS):
        share = chunk.mean()
        if share > STREAMS_ABOVE:
            time_hot += len(chunk) / dense_rate
        else:
            time_hot += chunk.sum() / np.interp(share, at, rates)
    return float(p.sum() / np.interp(density, at, rates) / time_hot)


def report(cells: dict[tuple[float, Order], Cell], ff: int, dense_rate: list[float]) -> list[dict[str, Any]]:
    """Print the tables; return their contents."""
    dense = statistics.median(dense_rate)
    uniform = [cells[density, "uniform"] for density in DENSITIES]
    rows, facts = [], []
    for density in DENSITIES:
        for order, name in ORDERS.items():
            cell = cells[density, order]
            gain = expected = None
            if order == "hot":
                gain = median_ratio(cells[density, "file"].seconds, cell.seconds)
                expected = predicted_gain(density, ff, uniform, dense)
            verdicts = [] if cell.over_dense >= 1 else ["slower than dense"]
            if cell.over_plain is not None and density == 0.10 and order == "uniform":
                verdicts += [] if cell.over_plain >= PREFETCH_TARGET else [f"prefetch < {PREFETCH_TARGET}×"]
            if gain and expected and density == 0.10 and gain < expected * (1 - GAIN_TOLERANCE):
                verdicts.append("gain below prediction")
            rows.append(
                [
                    f"{density:.0%}",
                    name,
                    f"{statistics.median(cell.rate) / 1e9:.1f}",
                    f"{cell.share:.0%}",
                    f"{cell.over_dense:.2f}×",
                    "" if cell.over_plain is None else f"{cell.over_plain:.2f}×",
                    "" if gain is None else f"{gain:.2f}× ({expected:.2f}×)",
                    ", ".join(verdicts),
                ]
            )
            facts.append(asdict(cell) | {"gain": gain, "expected_gain": expected})
    headers = [
        "active",
        "neurons",
        "GB/s",
        "of streaming",
        "÷ dense",
        "÷ no prefetch",
        "hot first (predicted)",
    ]
    peers.print_table([*headers, ""], rows)
    return facts


def plot(cells: dict[tuple[float, Order], Cell], path: Path, title: str) -> None:
    """Plot the share of the streaming bandwidth, and the speedup over the dense operator, by active share."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        sys.exit("A plot needs matplotlib: pip install matplotlib.")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for order, name in ORDERS.items():
        line = [cells[density, order] for density in DENSITIES]
        at = [100 * density for density in DENSITIES]
        left.plot(at, [100 * cell.share for cell in line], "o-", label=name)
        right.plot(at, [cell.over_dense for cell in line], "o-", label=name)
        if order == "uniform" and line[0].plain_rate:
            without = [100 * median_ratio(cell.plain_rate, cell.streaming) for cell in line]
            left.plot(at, without, "o:", color="grey", label="uniform, without prefetch")
    right.plot(at, [100 / x for x in at], "--", color="grey", label="1 / active share")
    left.set(ylabel="bytes of active rows per second, % of streaming", ylim=(0, None))
    right.set(ylabel="times as fast as the dense operator", yscale="log")
    for axes in (left, right):
        axes.set(xlabel="active neurons, %", xscale="log", xticks=at, xticklabels=[f"{x:g}" for x in at])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path)


def run(
    setup: Setup, n_rounds: int, without: Path | None
) -> tuple[dict[tuple[float, Order], Cell], list[float], int]:
    """Measure all settings in turn, n_rounds times; also return the dense rates and the disturbed rounds."""
    cells: dict[tuple[float, Order], Cell] = {
        (density, order): Cell(density, order, [], [], [], [], [])
        for density in DENSITIES
        for order in ORDERS
    }
    dense_rates: list[float] = []
    context = multiprocessing.get_context("spawn")

    def process(core: Path | None) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, context, _start, (setup, core))

    with process(None) as real, process(without) as plain:
        real.submit(_streaming, setup.threads).result()

        def one(i: int) -> None:
            for density in DENSITIES:  # with a dense step for each, because the machine's speed drifts
                dense, dense_rate = real.submit(_measure, None, setup).result()
                streaming = real.submit(_streaming, setup.threads).result()
                dense_rates.append(dense_rate)
                for order in ORDERS:
                    cell = cells[density, order]
                    seconds, rate = real.submit(_measure, (density, order), setup).result()
                    cell.seconds.append(seconds)
                    cell.rate.append(rate)
                    cell.streaming.append(streaming)
                    cell.dense_seconds.append(dense)
                    if without is not None:
                        cell.plain_rate.append(plain.submit(_measure, (density, order), setup).result()[1])

        disturbed = 0
        for i in range(n_rounds):
            with peers.Others() as others:
                one(i)
            disturbed += others.cores > peers.DISTURBED
    return cells, dense_rates, disturbed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--type", default="q4_0", choices=["q4_0", "q8_0", "f16"])
    parser.add_argument("--d", type=int, default=4096)
    parser.add_argument("--ff", type=int, default=11008)
    parser.add_argument("--layers", type=int, default=10, help="FFNs: together larger than any cache (10)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--without-prefetch", action="store_true", help="compare with a build without it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="SVG or PNG")
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
    args = parser.parse_args()
    without = core_without_prefetch() if args.without_prefetch else None
    with tempfile.TemporaryDirectory() as folder:
        type = GGMLType[args.type.upper()]
        setup = Setup(Path(folder) / "ffn.bin", type, args.d, args.ff, args.layers, args.threads)
        setup.write()
        peers.wait_until_quiet(args.force)
        cells, dense_rates, disturbed = run(setup, args.rounds, without)
    streaming = statistics.median(x for cell in cells.values() for x in cell.streaming)
    dense = statistics.median(dense_rates)
    print(
        f"\n{args.type}, d {args.d}, ff {args.ff}, {args.layers} layers, {args.threads} threads, "
        f"{args.rounds} rounds ({disturbed} disturbed): streaming {streaming / 1e9:.1f} GB/s, the dense "
        f"operator {dense / 1e9:.1f} GB/s\n"
    )
    facts = report(cells, args.ff, dense_rates)
    if args.plot:
        plot(cells, args.plot, f"sparse FFN operator, {args.type}, {args.d} × {args.ff}")
    print()
    peers.print_json(
        "sparse_ffn",
        machine=peers.machine(),
        setup={name: getattr(args, name) for name in ("type", "d", "ff", "layers", "threads", "rounds")},
        disturbed=disturbed,
        streaming=streaming,
        dense=dense,
        results=facts,
    )


if __name__ == "__main__":
    main()
