"""`hotset convert`: a Hugging Face checkpoint to a GGUF file, plain or PowerInfer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hotset.cli import options
from hotset.cli.console import print_json, say
from hotset.cli.progress import ProgressBar
from hotset.convert.hf import convert_hf
from hotset.convert.projector import convert_projector
from hotset.formats.requantize import PlannedTensor
from hotset.sparsity.profile import Profile
from hotset.units import human_size

_ARGUMENTS = {"run": "", "embed": " TEXT", "rerank": " QUERY DOC"}


@dataclass(frozen=True, kw_only=True)
class NeuronOptions:
    """Options for the neurons of the written model: their predictors, order and activation."""

    powerinfer: Annotated[
        bool, options.option("--powerinfer", "Write PowerInfer's format; requires --predictors.")
    ] = False
    predictors: Annotated[
        Path | None,
        options.option(
            "--predictors",
            "Folder of model_<layer>.pt (fc1.weight, fc2.weight) and config.json; implies --powerinfer.",
            exists=True,
            file_okay=False,
        ),
    ] = None
    profile: Annotated[
        Path | None,
        options.option(
            "--profile",
            "File of 'hotset sparse profile': its hot neurons come first.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    activation: options.Activation = None

    def refuse_with_projector(self) -> None:
        """Raise BadParameter for the first given option: a projector has no neurons."""
        if given := [name for name, value in vars(self).items() if value]:
            raise typer.BadParameter(f"it cannot be combined with --{given[0]}.", param_hint="--mmproj")


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC_DIR", help="Folder of the checkpoint.", exists=True, file_okay=False),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    type: Annotated[
        str,
        options.option(
            "--type",
            "Type of the matrices, such as bf16, q8_0 or q4_0; 'hotset quantize -h' lists all.",
            kind=options.TENSOR_TYPE,
        ),
    ] = "f16",
    tensor_type: options.TensorTypes = None,
    mmproj: Annotated[
        bool,
        options.option("--mmproj", "Write the image encoder and its projector instead of the text model."),
    ] = False,
    *,
    neurons: NeuronOptions,
    json: options.Json = False,
) -> None:
    """Convert a Hugging Face checkpoint to GGUF: config.json, tensors, tokenizer."""
    if neurons.powerinfer and neurons.predictors is None:
        raise typer.BadParameter(
            "PowerInfer's format needs predictors: name their folder with --predictors, or make them with "
            "'hotset sparse train'.",
            param_hint="--powerinfer",
        )
    if mmproj:
        neurons.refuse_with_projector()
        _convert_projector(source, target, type, tensor_type or [], json=json)
        return
    with ProgressBar() as bar:
        written = convert_hf(
            source,
            target,
            type,
            tensor_types=tensor_type or [],
            predictors=neurons.predictors,
            profile=None if neurons.profile is None else Profile.open(neurons.profile),
            activation=neurons.activation,
            progress=bar,
        )
    if json:
        result = {"path": str(target), "size": written.n_bytes, "type": type.lower()}
        if written.n_always is not None:
            result["n_always"] = list(written.n_always)
        print_json(result)
        return
    use = f"hotset {written.use} {target}{_ARGUMENTS[written.use]}"
    say(f"Wrote {target} ({human_size(written.n_bytes)}). Run it with: {use}")
    _say_changed_types(written.tensors)


def _say_changed_types(tensors: Sequence[PlannedTensor]) -> None:
    """Print which matrices have another type because of their rows."""
    if notes := sorted({f"{t.info.name}: {t.type.name}, {t.note}" for t in tensors if "rows" in t.note}):
        more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        say(f"{notes[0]}{more}", dim=True)


def _convert_projector(source: Path, target: Path, type: str, tensor_types: list[str], *, json: bool) -> None:
    """Convert the image encoder of a checkpoint, and say so."""
    with ProgressBar() as bar:
        tensors = convert_projector(source, target, type, tensor_types=tensor_types, progress=bar)
    n_bytes = target.stat().st_size
    if json:
        print_json({"path": str(target), "size": n_bytes, "type": type.lower()})
    else:
        say(f"Wrote {target} ({human_size(n_bytes)}). Use it with: hotset run MODEL --mmproj {target}")
        _say_changed_types(tensors)
