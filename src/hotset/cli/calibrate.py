"""`hotset sparse calibrate`: thresholds below which values count as zero, for a target loss or sparsity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from hotset.cli import options
from hotset.cli.console import print_json, print_table, read_text, say, warn
from hotset.cli.progress import ProgressBar
from hotset.cli.values import one_of, some_of
from hotset.errors import HotsetError, install_command
from hotset.model.thresholds import THRESHOLD_NAMES
from hotset.report.bars import percent
from hotset.sparsity.thresholds import BaseMode
from hotset.storage import resolve

if TYPE_CHECKING:
    from hotset.training.thresholds import CalibratedThresholds


_ONLY = "Only these thresholds, separated by commas."
_Names = Annotated[str | None, options.option("--only", _ONLY, kind=some_of(*THRESHOLD_NAMES), usual="all")]
_ADDED = "Mode that the thresholds are added to."
_Mode = Annotated[
    str | None, options.option("--mode", _ADDED, kind=one_of(*get_args(BaseMode)), usual="the model's")
]


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """Options for the target of a calibration, and for the tokens that it takes."""

    max_increase: Annotated[
        str | None,
        typer.Option(
            "--max-ppl-increase", metavar="PERCENT", help="Largest perplexity increase, such as 1%."
        ),
    ] = None
    share: Annotated[
        str | None,
        typer.Option("--sparsity", metavar="SHARE", help="Skip this share of matrix bytes, such as 0.5."),
    ] = None
    uniform: Annotated[
        str | None,
        typer.Option("--uniform", metavar="SHARE", help="Zero this share of values in each layer."),
    ] = None
    only: _Names = None
    mode: _Mode = None
    n_tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to estimate losses from.")] = 4096
    n_measured: Annotated[
        int, typer.Option("--measured", min=1, help="Held-out tokens of each measurement.")
    ] = 16384
    n_ctx: Annotated[int, typer.Option("--ctx-size", "-c", min=8, help="Tokens of a window.")] = 512

    def fields(self) -> dict[str, Any]:
        """Return the fields of ThresholdSettings that these options set."""
        targets = {
            "max_increase": _share(self.max_increase, "--max-ppl-increase", percent=True),
            "share": _share(self.share, "--sparsity", percent=False),
            "uniform": _share(self.uniform, "--uniform", percent=False),
        }
        if all(value is None for value in targets.values()):
            targets["max_increase"] = 0.01
        only = THRESHOLD_NAMES if self.only is None else self.only.split(",")
        return targets | {
            "only": tuple(name for name in THRESHOLD_NAMES if name in only),
            "mode": cast(BaseMode | None, self.mode), "n_ctx": self.n_ctx, "n_tokens": self.n_tokens,
            "n_measured": self.n_measured,
        }  # fmt: skip


def calibrate(
    model: options.ModelName,
    file: Annotated[
        Path,
        typer.Option("--file", "-f", exists=True, dir_okay=False, help="Text to calibrate on and measure."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write.", show_default="MODEL.thresholds.json"),
    ] = None,
    *,
    calibration: CalibrationOptions,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the results, to continue with another target.")
    ] = False,
    n_threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Find activation thresholds, below which values count as zero, for a loss that you name."""
    given = calibration.fields()
    try:
        from hotset.training.thresholds import ThresholdSettings, calibrate_thresholds
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise HotsetError(
            f"a calibration needs PyTorch; install it with: {install_command('train')}"
        ) from None
    settings = ThresholdSettings(**given, n_threads=n_threads)
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
    if not found.plan.n_skipping:
        warn("this machine reads no matrix faster without its zeros, so a run applies no threshold.")
    say(f"Wrote {found.path}. Run with it: hotset run {model} --thresholds {found.path}")


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
    print(f"On this machine: {found.plan.summary()}")
