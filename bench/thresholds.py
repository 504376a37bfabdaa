"""Cost and gain of sparsity: thresholds from `hotset sparse calibrate`, judged on another text.

usage: python bench/thresholds.py --model MODEL.gguf --calibrate TEXT --judge OTHER [--targets 1%,0.25,FILE]
       [--uniform 0.25:inputs,0.5:down_in]
       python bench/thresholds.py --model MODEL.gguf --bound

A target is an increase of perplexity (1%), a share of the bytes of the layers' matrices (0.25), or a file of
thresholds. SHARE:NAMES in --uniform (names joined by +; inputs: all but the gate) gives two rows: thresholds
with this share of these values in every layer, and the search's result for the same bytes with thresholds
only of these values.

All run over the judged text together with the model without thresholds, with thresholds for all tokens. Then
they write an answer each, in turn, --rounds times; the answers are text, because random tokens have different
activations. Calibrations share their losses in --work, where their files are kept.

--bound measures only the memory: the rate of scattered pieces by their size and the kept share, compared with
the sequential rate. From these rates and the bytes of the model's matrices it computes the decode gain that
skipping a share of the inputs allows, in three layouts:

    input-major  every matrix has an input-major copy; attention and FFN inputs are skipped
    gate         rows of up are skipped in place, and channels of down in an input-major copy (CATS); the
                 share is of the neurons
    bundles      as input-major, but eight neighbouring inputs are kept or skipped together, as if they
                 always fired together: an upper bound of any permutation
    hotset's kernels  as input-major, at the rates that the planner measures (machine.json)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import peers

import hotset
from hotset.backends.cpu.processor import gather_bandwidth, read_bandwidth
from hotset.formats.channels import can_be_input_major, copy_bytes, tile_of
from hotset.formats.gguf import TensorInfo, open_gguf
from hotset.model.cost import Cost
from hotset.model.decoder import describe
from hotset.model.graph import thresholded_products
from hotset.model.operations import Linear
from hotset.model.supported import read_config
from hotset.model.thresholds import THRESHOLD_NAMES, LayerThresholds
from hotset.placement.channel_rates import filled, of_cpu
from hotset.placement.channels import MatrixKind, Workload
from hotset.sparsity.thresholds import Thresholds

PROMPT = "The history of the city begins"
INPUTS = ("attn_in", "attn_out", "ffn_in", "down_in")
UNIFORM = "0.25:inputs,0.4:inputs,0.3:gate,0.5:gate,0.5:down_in,0.6:down_in"


@dataclass(frozen=True)
class Target:
    """A target of a calibration. form: its series in the plot."""

    name: str
    form: Literal["searched", "uniform", "searched, same kind"]
    file: Path


@dataclass(frozen=True)
class Row:
    """The results of a target.

    saved: share of the bytes of the layers' matrices, as predicted. speed: median tokens per second; its
    ratio to the model without thresholds is the median over the rounds. increase and its error: of the
    perplexity, paired token by token. matrices: in which zeros are skipped. bytes_read: per token of an
    answer. held_out: the calibration's own measurement.
    """

    target: str
    form: str
    saved: float
    ppl: float
    increase: float
    increase_error: float
    kl: float
    same_top: float
    speed: float
    speed_ratio: float
    matrices: int
    bytes_read: float
    held_out: float | None = None


def targets_of(args: argparse.Namespace, text: str) -> list[Target]:
    """Return the targets of --targets and --uniform, calibrated unless they are files."""

    def found(name: str, form: Any, **reached: Any) -> Target:
        path = args.work / f"{args.model.stem}.{name.replace(' ', '-').replace(':', '-')}.thresholds.json"
        if not path.is_file():
            calibrated(path, text, args, reached)
            print(f"calibrated {name}", file=sys.stderr)
        return Target(name, form, path)

    targets = []
    for name in filter(None, args.targets.split(",")):
        if Path(name).is_file():
            targets.append(Target(Path(name).name, "searched", Path(name)))
        elif name.endswith("%"):
            targets.append(found(name, "searched", max_increase=float(name[:-1]) / 100))
        else:
            targets.append(found(name, "searched", share=float(name)))
    for name in filter(None, args.uniform.split(",")):
        share, _, kind = name.partition(":")
        only = INPUTS if kind == "inputs" else tuple(kind.split("+"))
        uniform = found(f"uniform {name}", "uniform", uniform=float(share), only=only)
        saved = Thresholds.open(uniform.file).measured["saved"]
        same = found(f"searched {name}", "searched, same kind", share=saved, only=only)
        targets += [uniform, same]
    return targets


def calibrated(path: Path, text: str, args: argparse.Namespace, reached: dict[str, Any]) -> None:
    """Write the thresholds that reach a target."""
    from hotset.training.thresholds import ThresholdSettings, calibrate_thresholds

    settings = ThresholdSettings(
        **reached, n_ctx=args.n_ctx, n_tokens=args.tokens, n_measured=args.measured, n_threads=args.threads
    )
    calibrate_thresholds(args.model, text, path, settings, work=args.work / "work", keep=True)


def speeds(models: list[hotset.Model], n_tokens: int, rounds: int) -> tuple[list[list[float]], list[float]]:
    """Return the tokens per second of each model in each round, and the bytes it reads per token.

    The models take turns.
    """
    found: list[list[float]] = [[] for _ in models]
    n_bytes = [float(sum(model.decided.cost.weight_bytes.values())) for model in models]
    for i in range(rounds + 1):  # the first warms up
        for at, (model, own) in enumerate(zip(models, found, strict=True)):
            answer = model.generate(PROMPT, temperature=0, max_tokens=n_tokens, ignore_eos=True)
            if i:
                own.append(answer.timings.predicted_per_second)
                if answer.stats is not None:
                    n_bytes[at] = answer.stats.bytes_touched_per_token
    return found, n_bytes


def measure(args: argparse.Namespace, targets: list[Target]) -> tuple[float, list[Row]]:
    """Return the perplexity without thresholds, and a row for each target."""
    with ExitStack() as opened:

        def load(**how: Any) -> hotset.Model:
            settings = {"device": "cpu", "n_threads": args.threads, "n_ctx": args.n_ctx} | how
            return opened.enter_context(hotset.load(args.model, **settings))

        models = [load(), *(load(thresholds=target.file) for target in targets)]
        text = args.judge.read_text(encoding="utf-8")
        for results in hotset.compare_chunks(models, text, n_ctx=args.n_ctx, chunks=args.chunks):
            print(f"chunk {results[0].chunk} of {results[0].n_chunks}", file=sys.stderr)
        times, n_bytes = [[0.0]] * len(models), [0.0] * len(models)
        if args.rounds:
            times, n_bytes = speeds(models, args.answer, args.rounds)
        plans = [model.decided.channels for model in models]
    rows = []
    for i, target in enumerate(targets, 1):
        result, own, plan = results[i], times[i], plans[i]
        measured, apart = Thresholds.open(target.file).measured, result.divergence
        assert apart is not None
        ratios = [one / base for one, base in zip(own, times[0], strict=True)] if args.rounds else [0.0]
        rows.append(
            Row(
                target.name, target.form, measured["saved"], result.ppl, apart.ppl_ratio - 1,
                apart.ppl_ratio_error, apart.kl, apart.same_top, statistics.median(own),
                statistics.median(ratios), 0 if plan is None else plan.n_skipping, n_bytes[i],
                measured.get("increase"),
            )
        )  # fmt: skip
    return results[0].ppl, rows


PIECES = (512, 768, 1024, 1536, 2048, 4096, 8192, 16384)  # bytes
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the inputs that are skipped
BOUND_BYTES = 256 << 20  # more than most caches hold
BUNDLE = 8  # inputs
LAYOUTS = ("input-major", "gate", "bundles", "hotset's kernels")


def measured_rates(n_threads: int) -> tuple[float, np.ndarray]:
    """Return the sequential rate in bytes per second, and the relative rates of pieces [PIECES, SHARES]."""
    data, rng = filled(BOUND_BYTES), np.random.default_rng(0)
    gathers = []
    for n_bytes in PIECES:
        offsets = np.arange(0, BOUND_BYTES - n_bytes + 1, n_bytes)
        gathers += [offsets[rng.random(len(offsets)) >= share] for share in SHARES]
    rates = np.zeros(len(gathers))
    sequential = 0.0
    for _ in range(3):  # in turn, the best of each: other work on the machine only slows a run down
        for i, pieces in enumerate(gathers):
            sequential = max(sequential, read_bandwidth(data, n_threads)) if i % 8 == 0 else sequential
            rates[i] = max(rates[i], gather_bandwidth(data, pieces, PIECES[i // len(SHARES)], n_threads))
    return sequential, rates.reshape(len(PIECES), -1) / sequential


def bounds(path: Path, relative: np.ndarray, n_threads: int | None = None) -> list[list[float]]:
    """Return for each layout the decode gain for each of SHARES. relative: from measured_rates.

    n_threads: adds a row for input-major copies at the rates of hotset's kernels, from machine.json.
    """

    def rate(n_bytes: float, at: int) -> float:
        return float(np.interp(np.log(n_bytes), np.log(PIECES), relative[:, at]))

    with open_gguf(path) as gguf:
        config = read_config(gguf)
        every = [LayerThresholds(**dict.fromkeys(THRESHOLD_NAMES, 1.0))] * config.n_layer
        graph = describe(config, gguf.tensors, layer_thresholds=every)
        whole = sum(Cost(graph, gguf.tensors).weight_bytes.values())
        names = dict.fromkeys(op.weight for op in thresholded_products(graph))
        infos = [gguf.tensors[name] for name in names if can_be_input_major(gguf.tensors[name])]
        ups = {ffn.up_tensor for ffn in graph.ffns}
        works = () if n_threads is None else Workload.of(graph, gguf.tensors)
        kernels = {} if n_threads is None else of_cpu(works, n_threads)
        of_ffn = ups | {ffn.down.weight for ffn in graph.ffns if isinstance(ffn.down, Linear)}

    def by_kernel(info: TensorInfo, at: int) -> float:
        (codes, scales), own = copy_bytes(info), kernels[MatrixKind.of(info)]
        return (scales + codes * (1 - SHARES[at])) * own.rows / own.channels

    def by_channel(info: TensorInfo, at: int, bundle: int = 1) -> float:
        """Return the bytes that a matrix's time equals when they are read sequentially."""
        codes, scales = copy_bytes(info)
        piece = bundle * codes / info.shape[0] * min(tile_of(info.shape[1]) / info.shape[1], 1)
        return scales + codes * (1 - SHARES[at]) / rate(piece, at)

    def by_row(info: TensorInfo, at: int) -> float:
        return info.nbytes * (1 - SHARES[at]) / rate(info.row_bytes, at)

    found: list[list[float]] = [[] for _ in range(4 if kernels else 3)]
    for at in range(len(SHARES)):
        saved = [0.0] * len(found)
        for info in infos:  # a matrix that would not gain is read whole
            saved[0] += max(0.0, info.nbytes - by_channel(info, at))
            if info.name in of_ffn:
                own = by_row(info, at) if info.name in ups else by_channel(info, at)
                saved[1] += max(0.0, info.nbytes - own)
            saved[2] += max(0.0, info.nbytes - by_channel(info, at, BUNDLE))
            if kernels:
                saved[3] += max(0.0, info.nbytes - by_kernel(info, at))
        for own, n_bytes in zip(found, saved, strict=True):
            own.append(whole / (whole - n_bytes))
    return found


def print_bounds(path: Path, n_threads: int) -> None:
    """Print the rates of pieces, and the gains that they allow."""
    sequential, relative = measured_rates(n_threads)
    shares = [f"{share:.0%} skipped" for share in SHARES]
    print(f"{n_threads} threads read {sequential / 1e9:.1f} GB/s sequentially; rates relative to it:\n")
    peers.print_table(
        ["piece", *shares],
        [[f"{n} B", *(f"{x:.2f}" for x in own)] for n, own in zip(PIECES, relative, strict=True)],
    )
    gains, free = bounds(path, relative, n_threads), bounds(path, np.ones_like(relative))
    free.append(free[0])
    print(f"\n{path.name}: largest decode gain, and by bytes alone\n")
    peers.print_table(
        ["layout", *shares],
        [
            [name, *(f"{x:.2f}× ({y:.2f}×)" for x, y in zip(own, ideal, strict=True))]
            for name, own, ideal in zip(LAYOUTS, gains, free, strict=True)
        ],
    )
    print()
    peers.print_json(
        "thresholds-bound", machine=peers.machine(), model=path.name, sequential=sequential, pieces=PIECES,
        shares=SHARES, rates=relative.round(3).tolist(), gains=np.round(gains, 3).tolist(),
    )  # fmt: skip


def plot(rows: list[Row], path: Path, name: str) -> None:
    """Plot perplexity and KL by saved bytes, and the speed if it was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = any(row.speed for row in rows)
    figure = Figure(figsize=(13 if timed else 9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3 if timed else 2)
    styles = {"searched": "o-", "uniform": "x", "searched, same kind": "^"}
    for form in dict.fromkeys(row.form for row in rows):
        own = sorted((row for row in rows if row.form == form), key=lambda row: row.saved)
        saved = [100 * row.saved for row in own]
        rise, errors = [100 * row.increase for row in own], [100 * row.increase_error for row in own]
        axes[0].errorbar(saved, rise, errors, fmt=styles[form], ms=5, lw=1, label=form)
        axes[1].plot(saved, [row.kl for row in own], styles[form], ms=5, lw=1)
        if timed:
            axes[2].plot(saved, [row.speed_ratio for row in own], styles[form], ms=5, lw=1)
    uniform = [row for row in rows if row.form == "uniform"]
    same = [row for row in rows if row.form == "searched, same kind"]
    for i, (one, other) in enumerate(zip(uniform, same, strict=True)):
        for panel, of in ((axes[0], lambda row: 100 * row.increase), (axes[1], lambda row: row.kl)):
            both = [100 * one.saved, 100 * other.saved]
            panel.plot(both, [of(one), of(other)], color="grey", lw=0.7, zorder=0)
            side: Any = {"xytext": (5, 2), "ha": "left"} if i % 2 else {"xytext": (-5, 2), "ha": "right"}
            panel.annotate(
                one.target.split()[-1], (both[0], of(one)), textcoords="offset points", fontsize=7, **side
            )
    axes[0].set_yscale("symlog", linthresh=1)
    axes[1].set_yscale("log")
    axes[0].set(ylabel="perplexity, % above no thresholds", title=name)
    axes[1].set(ylabel="KL, nats a token", title="all tokens thresholded")
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].legend(frameon=False)
    if timed:
        axes[2].axhline(1, color="grey", lw=0.7)
        axes[2].set(ylabel="decoding, ÷ without")
    for panel in axes:
        panel.set(xlabel="bytes of the layers saved, %")
        panel.margins(x=0.15)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bound", action="store_true", help="measure the memory, and print the bound")
    parser.add_argument("--calibrate", type=Path, help="text to calibrate on")
    parser.add_argument("--judge", type=Path, help="another text")
    parser.add_argument("--targets", default="1%,5%,0.125,0.25,0.4", help="comma-separated")
    parser.add_argument("--uniform", default=UNIFORM, help="comma-separated; '' for none")
    parser.add_argument("--tokens", type=int, default=4096, help="to estimate losses from")
    parser.add_argument("--measured", type=int, default=16384, help="held-out tokens per measurement")
    parser.add_argument("--chunks", type=int, default=40, help="of the judged text")
    parser.add_argument("--n-ctx", type=int, default=512, help="tokens of a chunk, and the most of an answer")
    parser.add_argument("--answer", type=int, default=128, help="tokens of a timed answer")
    parser.add_argument("--rounds", type=int, default=5, help="0: no timing")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("build/thresholds"))
    parser.add_argument("--plot", type=Path, help="a PNG, SVG or PDF")
    args = parser.parse_args()
    if args.bound:
        print_bounds(args.model, args.threads)
        return
    if args.calibrate is None or args.judge is None:
        parser.error("--calibrate and --judge are required without --bound")
    args.work.mkdir(parents=True, exist_ok=True)
    text = args.calibrate.read_text(encoding="utf-8")
    ppl, rows = measure(args, targets_of(args, text))
    timed = args.rounds > 0
    print(f"{args.model.name}, {args.chunks} chunks of {args.judge.name}, without thresholds {ppl:.3f}\n")
    of_time = ["matrices", "read", "t/s", "÷ without"]
    headers = ["target", "saved", "perplexity", "rise", "KL", "same top", *of_time[: 4 * timed]]
    cells = [
        [
            row.target, f"{row.saved:.1%}", f"{row.ppl:.3f}",
            f"{row.increase:+.2%} ± {row.increase_error:.2%}", f"{row.kl:.4f}", f"{row.same_top:.1%}",
            *[
                str(row.matrices), f"{row.bytes_read / 1e6:.0f} MB", f"{row.speed:.1f}",
                f"{row.speed_ratio:.2f}×",
            ][: 4 * timed],
        ]
        for row in rows
    ]  # fmt: skip
    peers.print_table(headers, cells)
    print()
    peers.print_json(
        "thresholds", machine=peers.machine(), model=args.model.name, uncut=ppl, chunks=args.chunks,
        results=[asdict(row) for row in rows],
    )  # fmt: skip
    if args.plot is not None:
        plot(rows, args.plot, args.model.stem)


if __name__ == "__main__":
    main()
