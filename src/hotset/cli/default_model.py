"""The model of a command that names none."""

from __future__ import annotations

import sys

import typer

from hotset.cli.console import say
from hotset.errors import HotsetError
from hotset.storage import catalogue, store
from hotset.units import human_size

_LARGE = 500_000_000  # bytes of a download that needs a yes


def default_model() -> str:
    """Return the best of `catalogue.DEFAULTS` that is on this machine, otherwise the best for its memory.

    Ask at the terminal before a large download. Raises HotsetError without a terminal or a yes.
    """
    memory = store.usable_memory()
    here = {model.name for model in store.list_models()}
    for name in catalogue.DEFAULTS:
        if name in here and store.fits(catalogue.BY_NAME[name].size, memory):
            return name
    entry = catalogue.default_for(memory)
    if entry.size < _LARGE:
        return entry.name
    facts = f"{entry.name} ({human_size(entry.size)}, licence {entry.licence})"
    if sys.stdin.isatty() and sys.stderr.isatty() and agrees(f"No model is named. Fetch {facts}? [y/N] "):
        return entry.name
    raise HotsetError(
        f"No model is named. {facts} suits this machine: 'hotset pull {entry.name}' fetches it. "
        "'hotset list --all' shows others."
    )


def agrees(question: str) -> bool:
    """Return whether the answer at the terminal is yes."""
    return ask(question).strip().lower() in ("y", "yes")


def ask(question: str) -> str:
    """Return a line from the terminal; the question goes to stderr. Ctrl-D exits."""
    sys.stderr.write(question)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        say("")
        raise typer.Exit
    return line
