"""`hotset convert`: a Hugging Face checkpoint to a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotset.cli import options
from hotset.cli.console import print_json, say
from hotset.units import human_size


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC_DIR", help="Folder of the checkpoint.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    type: Annotated[
        str, typer.Option("--type", help="Type of the matrices: f32, f16, bf16 or q8_0.")
    ] = "f16",
    json: options.Json = False,
) -> None:
    """Convert a Hugging Face checkpoint (config.json, safetensors, tokenizer) to GGUF."""
    from hotset.formats.hf import OUTPUT_TYPES, convert_hf

    chosen = {known.name.lower(): known for known in OUTPUT_TYPES}.get(type.lower())
    if chosen is None:
        known = ", ".join(known.name.lower() for known in OUTPUT_TYPES)
        raise typer.BadParameter(f"'{type}' is none of {known}.", param_hint="--type")
    convert_hf(source, target, type=chosen)
    size = target.stat().st_size
    if json:
        print_json({"path": str(target), "size": size, "type": type})
    else:
        say(f"Wrote {target} ({human_size(size)}). Run it with: hotset run {target}")
