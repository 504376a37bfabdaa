"""`hotset create`: a model made from another one with a Modelfile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotset.cli.console import read_text, say
from hotset.cli.progress import ProgressBar
from hotset.errors import ModelNotFoundError
from hotset.files import expanded
from hotset.loader.modelfile import MAX_CHARS, Modelfile, made_of
from hotset.storage import created, resolve


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new model.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A file or model to give this name, without a Modelfile."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", dir_okay=False, help="The Modelfile.", show_default="Modelfile"),
    ] = None,
) -> None:
    """Make a model from another one, with a system message, parameters, a template or adapters."""
    if model is not None and file is not None:
        raise typer.BadParameter("--file cannot be combined with MODEL.", param_hint="-f")
    file = file or Path("Modelfile")
    text = read_text(file, "-f", 4 * MAX_CHARS) if model is None else f"FROM {model}\n"
    modelfile = Modelfile.parse(text)
    base = modelfile.base
    if created.find(base) is not None:
        raise ModelNotFoundError(f"'{base}' was created itself: name the model that it is made of.")
    beside = file.parent / base if model is None else expanded(base)
    if beside.is_file():
        base = str(beside.resolve())
    with ProgressBar() as bar:
        path = resolve(base, progress=bar)
    made = made_of(modelfile, path, base=base, source=text, folder=file.parent)
    kept = created.add(name, made)
    say(f"Run it with: hotset run {kept}")
