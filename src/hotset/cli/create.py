"""`hotset create`: a model made of another one, by a Modelfile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotset.cli.console import read_text, say
from hotset.cli.progress import ProgressBar
from hotset.errors import ModelNotFoundError
from hotset.loader.modelfile import MAX_CHARS, Modelfile, made_of
from hotset.storage import created, resolve


def create(
    name: Annotated[str, typer.Argument(help="What it is called.", show_default=False)],
    file: Annotated[Path, typer.Option("--file", "-f", dir_okay=False, help="The Modelfile.")] = Path(
        "Modelfile"
    ),
) -> None:
    """Make a model of another one: a system message, parameters, a template, adapters; no file is copied."""
    text = read_text(file, "-f", 4 * MAX_CHARS)
    modelfile = Modelfile.parse(text)
    base = modelfile.base
    if created.find(base) is not None:
        raise ModelNotFoundError(f"'{base}' was created itself: name the model that it is made of.")
    beside = file.parent / base
    if beside.is_file():
        base = str(beside.resolve())
    with ProgressBar() as bar:
        path = resolve(base, progress=bar)
    made = made_of(modelfile, path, base=base, source=text, folder=file.parent)
    kept = created.add(name, made)
    say(f"Run it with: hotset run {kept}")
