"""`hotset sparse calibrate`: thresholds below which values count as zero, for a target loss or sparsity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli import options
from hotset.cli.console import print_json, print_table, read_text, say, warn
from hotset.cli.progress import ProgressBar
from hotset.errors import HotsetError, install_command
from hotset.model.thresholds import THRESHOLD_NAMES, ThresholdName
from hotset.report.bars import percent
from hotset.storage import resolve

if TYPE_CHECKING:
    from hotset.training.thresholds import CalibratedThresholds


def calibrate(
    model: options.ModelName,
    file: Annotated[
        Path,
        typer.Option("--file", "-f", exists=True, dir_okay=False, help="Text to calibrate on and measure."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="To this file; default: MODEL.thresholds.json beside it."),
    ] = None,
    max_increase: Annotated[
        str | None,
        typer.Option("--max-ppl-increase", metavar="PERCENT", help="Largest increase of perplexity, as 1%."),
    ] = None,
    share: Annotated[
        str | None,
        typer.Option("--sparsity", metavar="SHARE", help="Skip this share of the matrices' bytes: 0.5."),
    ] = None,
    uniform: Annotated[
        str | None,
        typer.Option("--uniform", metavar="SHARE", help="Zero this share of values everywhere: no search."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="NAMES",
            help="Thresholds of these alone: attn_in, attn_out, ffn_in, gate, down_in; several with commas.",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode", help="Thresholds in addition to exact or predicted; default: the model's own mode."
        ),
    ] = None,
    n_tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to estimate losses from.")] = 4096,
    n_measured: Annotated[
        int, typer.Option("--measured", min=1, help="Held-out tokens of each measurement.")
    ] = 16384,
    n_ctx: Annotated[int, typer.Option("--ctx-size", "-c", min=8, help="Tokens of a window.")] = 512,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep what was computed, to go on with another target.")
    ] = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Find activation thresholds, below which values count as zero, for a loss that you name."""
    targets = {
        "max_increase": _share(max_increase, "--max-ppl-increase", percent=True),
        "share": _share(share, "--sparsity", percent=False),
        "uniform": _share(uniform, "--uniform", percent=False),
    }
    if all(value is None for value in targets.values()):
        targets["max_increase"] = 0.01
    try:
        from hotset.training.thresholds import ThresholdSettings, calibrate_thresholds
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise HotsetError(
            f"a calibration needs PyTorch; install it with: {install_command('train')}"
        ) from None
    settings = ThresholdSettings(
        **targets, only=_names(only), mode=mode, n_ctx=n_ctx, n_tokens=n_tokens, n_measured=n_measured,
        n_threads=threads,
    )  # fmt: skip
    text = read_text(file, "-f")
    with ProgressBar() as bar:
        path = resolve(model, progress=bar)
        found = calibrate_thresholds(path, text, output, settings, keep=keep, progress=bar)
    if json:
        print_json(found.as_dict())
    else:
        _print(found)
    for problem in found.problems:
        warn(f"{problem}.")
    say(f"Wrote {found.path}. Run with it: hotset run {model} --thresholds {found.path}")


def _names(text: str | None) -> tuple[ThresholdName, ...]:
    """Return the names of thresholds in the order of the file; all of them if none is given."""
    if text is None:
        return THRESHOLD_NAMES
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in THRESHOLD_NAMES:
            raise typer.BadParameter(
                f"'{name}' is none of {', '.join(THRESHOLD_NAMES)}.", param_hint="--only"
            )
    return tuple(name for name in THRESHOLD_NAMES if name in names)


def _share(text: str | None, option: str, *, percent: bool) -> float | None:
    """Return a share from a number with or without a percent sign. percent: a bare number is a percentage."""
    if text is None:
        return None
    number, sign, rest = text.partition("%")
    try:
        value = float(number)
    except ValueError:
        value, rest = 0.0, "?"
    if rest or not 0 < value < 1e6:
        raise typer.BadParameter(f"'{text}' is not a number such as 1% or 0.5.", param_hint=option)
    return value / 100 if sign or percent else value


def _print(found: CalibratedThresholds) -> None:
    rows = [
        [str(i), *(f"{value:.3g}" for _, value in layer.items())]
        for i, layer in enumerate(found.thresholds.layers)
    ]
    print_table([">layer", *(f">{name}" for name in THRESHOLD_NAMES)], rows, tight=True)
    one = found.measured
    print(
        f"{percent(one.saved)} of the bytes of layers saved; perplexity {one.ppl_dense:.3f} → {one.ppl:.3f}: "
        f"{one.increase:+.2%} ± {one.increase_error:.2%}, KL {one.kl:.4f}, likeliest token the same for "
        f"{one.same_top:.1%} ({one.n_scored} held-out tokens, all thresholded)"
    )
