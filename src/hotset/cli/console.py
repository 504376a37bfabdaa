"""Output of all subcommands: messages on stderr, tables and JSON on stdout.

Rich is imported only to print a table: `hotset run` answers before that import would be done.
"""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from hotset.cli.terminal import wrapped
from hotset.cli.wording import in_options
from hotset.escaping import LONGEST_CELL, escaped, escaped_json
from hotset.files import read_bounded, unreadable

if TYPE_CHECKING:
    from pathlib import Path

    from hotset.api import Model


_INPUT_SECONDS = 3.0  # to wait for text on the standard input
LONGEST_TEXT = 1 << 30  # bytes of a text to read, since a device has no end


def say(text: str, *, dim: bool = False, column: int = 0) -> None:
    """Print a message to stderr, where the cursor is at `column`; stdout is for the answer."""
    typer.secho(wrapped(escaped(text), sys.stderr, column), err=True, dim=dim)


def warn(text: str) -> None:
    """Print a warning to stderr; settings are replaced by options."""
    typer.secho(prefix := "warning: ", fg="yellow", err=True, nl=False)
    say(in_options(text), column=len(prefix))


def say_note(text: str) -> None:
    """Print a note of the library to stderr; settings are replaced by options."""
    say(in_options(text), dim=True)


def print_error(message: str, *, as_options: bool = True) -> None:
    """Print an error message to stderr, by default with options for settings (--top-k for top_k)."""
    message = in_options(message) if as_options else message
    typer.secho(prefix := "error: ", fg="red", bold=True, err=True, nl=False)
    say(message if message.endswith((".", "!", "?")) else message + ".", column=len(prefix))


def print_choice(model: Model) -> None:
    """Print which neurons are computed and why, if there is a choice, and the notes on the model."""
    if model.config.has_zeros or model.sparsity.mode == "threshold":
        say_note(f"sparsity {model.sparsity.reason}")
    for note in model.notes:
        say_note(note)
    if (predicted := model.decided.channels) is not None:
        say(predicted.summary(), dim=True)


def print_memory(model: Model) -> None:
    """Print the planned and the measured memory of devices, and the notes of their backend.

    Without devices, print the use of memory under a RAM budget, if there is one.
    """
    if model.ram is not None:
        from hotset.report.disk import ram_lines, ram_table

        print_table(*ram_table(model.ram), err=True, tight=True)
        for line in ram_lines(model.ram, model.n_ctx):
            say_note(line)
    if model.placement is None:
        return
    from hotset.report.placement import memory_table

    for note in model.backend.notes:
        say_note(note)
    print_table(*memory_table(model.device_memory()), err=True, tight=True)


def read_text(file: Path, option: str, longest: int | None = None) -> str:
    """Return a file's text, at most `longest` bytes (None: LONGEST_TEXT), with its newlines unchanged."""
    try:
        with file.open("rb") as opened:  # it may be a pipe, as in -f <(...)
            return read_bounded(opened, file, longest or LONGEST_TEXT).decode("utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{unreadable(file, error)}.", param_hint=option) from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"{file} is not UTF-8 text (byte {error.start}).", param_hint=option
        ) from None


def input_waits() -> bool:
    """Return whether the standard input has text, or has ended. A pipe gets three seconds to write some."""
    try:
        fd = sys.stdin.fileno()
        ready = bool(select.select([fd], [], [], _INPUT_SECONDS)[0])
    except (OSError, ValueError):  # not a file of the system; on Windows select() takes only sockets
        return True
    if not ready:
        warn("the standard input is open and has no text yet: it is left out. -f - waits for it.")
    return ready


def read_input(argument: str) -> str:
    """Return the text of the standard input, for an argument, as `read_text` reads a file."""
    try:
        return read_bounded(sys.stdin.buffer, "the standard input", LONGEST_TEXT).decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"the standard input is not UTF-8 text (byte {error.start}).", param_hint=argument
        ) from None
    except OSError as error:
        raise typer.BadParameter(
            f"the standard input cannot be read ({error.strerror}).", param_hint=argument
        ) from None


def print_json(value: Any) -> None:
    """Print `value` as JSON to stdout. Numbers that JSON does not have (NaN, infinity) become null."""
    sys.stdout.write(escaped_json(json.dumps(_finite(value), indent=2, ensure_ascii=False)) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    err: bool = False,
    tight: bool = False,
    limit: int = LONGEST_CELL,
) -> None:
    """Print rows of text as a table. A column whose name begins with ">" is aligned right.

    Title and cells are escaped, since strangers may have written them. Texts longer than `limit` lose their
    middle.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=err, markup=False, emoji=False)
    if not console.is_terminal:  # a pipe has no width: never wrap or truncate
        console = Console(stderr=err, markup=False, emoji=False, width=400)
    title = None if title is None else escaped(title, limit)
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, collapse_padding=tight)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escaped(cell, limit) for cell in row))
    console.print(table if rows else "(none)")
