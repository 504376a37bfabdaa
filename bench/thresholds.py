"""Cost and gain of sparsity: thresholds from `hotset sparse calibrate`, judged on another text.

usage: python bench/thresholds.py --model MODEL.gguf --calibrate TEXT --judge OTHER [--targets 1%,0.25,FILE]
       [--uniform 0.25:inputs,0.5:down_in]

A target is an increase of perplexity (1%), a share of the bytes of the layers' matrices (0.25), or a file of
thresholds. SHARE:NAMES in --uniform (names joined by +; inputs: all but the gate) gives two rows: thresholds
with this share of these values in every layer, and the search's result for the same bytes with thresholds
only of these values.

All run over the judged text together with the model without thresholds, with thresholds for all tokens. Then
they write an answer each, in turn, --rounds times; the answers are text, because random tokens have different
activations. Calibrations share their losses in --work, where their files are kept.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import peers

import hotset
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
    perplexity. held_out: the calibration's own measurement.
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


def speeds(models: list[hotset.Model], n_tokens: int, rounds: int) -> list[list[float]]:
    """Return the tokens per second of each model in each round; the models take turns."""
    found: list[list[float]] = [[] for _ in models]
    for i in range(rounds + 1):  # the first warms up
        for model, own in zip(models, found, strict=True):
            answer = model.generate(PROMPT, temperature=0, max_tokens=n_tokens, ignore_eos=True)
            if i:
                own.append(answer.timings.predicted_per_second)
    return found


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
        times = speeds(models, args.answer, args.rounds) if args.rounds else [[0.0]] * len(models)
    rows = []
    for target, result, own in zip(targets, results[1:], times[1:], strict=True):
        measured, apart = Thresholds.open(target.file).measured, result.divergence
        assert apart is not None
        ratios = [one / base for one, base in zip(own, times[0], strict=True)] if args.rounds else [0.0]
        rows.append(
            Row(
                target.name, target.form, measured["saved"], result.ppl, apart.ppl_ratio - 1,
                apart.ppl_ratio_error, apart.kl, apart.same_top, statistics.median(own),
                statistics.median(ratios), measured.get("increase"),
            )
        )  # fmt: skip
    return results[0].ppl, rows


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
    parser.add_argument("--calibrate", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--judge", type=Path, required=True, help="another text")
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
    args.work.mkdir(parents=True, exist_ok=True)
    text = args.calibrate.read_text(encoding="utf-8")
    ppl, rows = measure(args, targets_of(args, text))
    timed = args.rounds > 0
    print(f"{args.model.name}, {args.chunks} chunks of {args.judge.name}, without thresholds {ppl:.3f}\n")
    headers = ["target", "saved", "perplexity", "rise", "KL", "same top", *["t/s", "÷ without"][: 2 * timed]]
    cells = [
        [
            row.target, f"{row.saved:.1%}", f"{row.ppl:.3f}",
            f"{row.increase:+.2%} ± {row.increase_error:.2%}", f"{row.kl:.4f}", f"{row.same_top:.1%}",
            *[f"{row.speed:.1f}", f"{row.speed_ratio:.2f}×"][: 2 * timed],
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
