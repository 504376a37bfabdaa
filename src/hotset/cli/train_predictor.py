"""`hotset sparse train`: train predictors for a ReLU-family model on text, and write a file with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hotset.cli import options
from hotset.cli.console import print_json, print_table, read_text, say, warn
from hotset.cli.progress import ProgressBar
from hotset.cli.values import SIZE, one_of
from hotset.errors import HotsetError, install_command
from hotset.formats.quants import GGMLType
from hotset.report.bars import percent
from hotset.sparsity.sidecar import stem_of
from hotset.storage import resolve
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.formats.gguf import Dialect
    from hotset.training.predictor import PredictorSettings, Trained

TYPES = ("f16", "q8_0", "q4_0")
DIALECTS: dict[str, Dialect] = {"powerinfer": "powerinfer", "plain": "gguf"}


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options for the targets and the limits of the predictors."""

    type: Annotated[
        str | None,
        options.option(
            "--type", "Type of the predictors.", kind=one_of(*TYPES), usual="q4_0 in a quantised model"
        ),
    ] = None
    recall: Annotated[
        float, options.option("--recall", "Share of the firing neurons' magnitude to keep.")
    ] = 0.98
    precision: Annotated[
        float, options.option("--precision", "Grow until this share of the selected neurons fires.")
    ] = 0.6
    max_increase: Annotated[
        float, options.option("--max-increase", "Largest increase of perplexity against exact, in percent.")
    ] = 0.5
    max_share: Annotated[
        float,
        options.option("--max-share", "Largest size of all predictors together, in percent of the model."),
    ] = 10.0
    max_bytes: Annotated[
        float, options.option("--max-bytes", "Disk space for the pairs.", kind=SIZE, usual="2G")
    ] = 2.0
    n_tokens: Annotated[int | None, options.option("--tokens", "Most tokens of the text.", min=2)] = None
    n_ctx: Annotated[int, options.option("--ctx-size -c", "Tokens of a sequence.", min=8, max=512)] = 512
    epochs: Annotated[float, options.option("--epochs", "Times that each pair is seen, per size.")] = 10.0
    learning_rate: Annotated[float, options.option("--lr", "Learning rate of Adam.")] = 1e-2
    device: options.DeviceNames = "cpu"
    jobs: Annotated[
        int | None, options.option("--jobs", "Layers side by side.", usual="one per core", min=1)
    ] = None
    keep: Annotated[
        bool, options.option("--keep", "Keep pairs and checkpoints, to continue with other targets.")
    ] = False
    n_threads: options.Threads = None

    def settings(self) -> PredictorSettings:
        """Return the settings of the training."""
        from hotset.training.predictor import PredictorSettings
        from hotset.training.predictor_layer import Schedule

        return PredictorSettings(
            recall=self.recall,
            precision=self.precision,
            max_increase=self.max_increase / 100,
            max_share=self.max_share / 100,
            type=GGMLType[self.type.upper()] if self.type else None,
            max_bytes=int(self.max_bytes * 2**30),
            n_tokens=self.n_tokens,
            n_ctx=self.n_ctx,
            schedule=Schedule(epochs=self.epochs, learning_rate=self.learning_rate),
            device=self.device or "cpu",
            jobs=self.jobs,
            keep=self.keep,
            n_threads=self.n_threads,
        )


def train_predictor(
    model: options.ModelName,
    file: Annotated[
        list[Path],
        options.option("--file -f", "Text to learn from; repeatable.", exists=True, dir_okay=False),
    ],
    output: Annotated[
        Path | None, options.option("--output -o", "Write the model with its predictors here.")
    ] = None,
    directory: Annotated[
        Path | None,
        options.option("--dir", "Folder for model_<layer>.pt.", usual="MODEL.predictors next to the model"),
    ] = None,
    format: Annotated[
        str | None,
        options.option("--format", "Format of OUTPUT.", kind=one_of(*DIALECTS), usual="by the model"),
    ] = None,
    *,
    training: TrainOptions,
    activation: options.Activation = None,
    json: options.Json = False,
) -> None:
    """Train predictors: one small network per layer that names the neurons that fire."""
    try:
        from hotset.training.predictor import train_predictors
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise HotsetError(f"training needs PyTorch; install it with: {install_command('train')}") from None
    settings = training.settings()
    texts = [read_text(path, "-f") for path in file]
    with ProgressBar() as bar:
        path = resolve(model, progress=bar)
        folder = directory or path.with_name(f"{stem_of(path)}.predictors")
        trained = train_predictors(
            path,
            texts,
            folder,
            output,
            settings,
            activation=activation,
            dialect=DIALECTS[format] if format else None,
            progress=bar,
        )
    if json:
        print_json(trained.as_dict())
    else:
        _print(trained)
    for problem in trained.problems:
        warn(f"{problem}.")
    say(f"Wrote model_0.pt to model_{len(trained.layers) - 1}.pt and config.json in {folder}.")
    if output is not None:
        say(f"Wrote {output} ({human_size(output.stat().st_size)}). Run it with: hotset run {output}")


def _print(trained: Trained) -> None:
    from hotset.training.predictor import REASONS

    columns = [">layer", ">rank", ">of model", ">active", ">selected", ">recall", ">of values", ">precise"]
    rows = []
    for layer, found in zip(trained.layers, trained.measured, strict=True):
        shares = (found.active_share, found.selected_share, found.recall, found.of_magnitude, found.precision)
        row = [str(layer.layer), str(layer.rank), f"{layer.share:.2%}", *map(percent, shares)]
        rows.append([*row, REASONS[layer.stopped]])
    n = len(trained.layers)
    measured = [
        [getattr(found, name) for found in trained.measured]
        for name in ("active_share", "selected_share", "recall", "of_magnitude", "precision")
    ]
    mean_rank = sum(layer.rank for layer in trained.layers) / n
    means = [percent(sum(values) / n) for values in measured]
    rows.append(["all", f"{mean_rank:.0f}", f"{trained.share:.2%}", *means, ""])
    print_table([*columns, "grown until"], rows, tight=True)
    apart = trained.predicted.divergence
    assert apart is not None
    print(
        f"perplexity {trained.exact.ppl:.3f} exact, {trained.predicted.ppl:.3f} predicted: "
        f"{trained.increase:+.2%} ± {apart.ppl_ratio_error:.2%}, KL {apart.kl:.4f}, likeliest token the same "
        f"for {apart.same_top:.1%} ({trained.exact.n_scored} held-out tokens)"
    )
