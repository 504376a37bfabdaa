"""What the verbs share: sentences on stderr, tables and JSON on stdout, progress bars.

Rich is imported only where a table or a bar is really printed: `hotset run` answers before it would load.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer

from hotset.escaping import LONGEST_CELL, escaped, escaped_json
from hotset.files import read_bounded
from hotset.reporter import Reporter
from hotset.units import human_size

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress, ProgressColumn, TaskID

    from hotset.api import Model


LONGEST_TEXT = 1 << 30  # bytes of a text to read; a device has no end
_LONGEST_LABEL = 80  # characters of what stands before a bar


def say(text: str, *, dim: bool = False) -> None:
    """One line on stderr; stdout belongs to the answer."""
    typer.secho(escaped(text), err=True, dim=dim)


def warn(text: str) -> None:
    """A sentence on stderr that somebody should read."""
    typer.secho("warning: ", fg="yellow", err=True, nl=False)
    say(text)


def tell_error(sentence: str) -> None:
    """A sentence on stderr, as it stands: it may begin with a name, whose case is its own."""
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    say(sentence if sentence.endswith((".", "!", "?")) else sentence + ".")


def tell_choice(model: Model) -> None:
    """Which neurons are computed and why, and what was built for it; nothing where there is no choice."""
    if model.config.has_zeros or model.sparsity.mode == "threshold":
        say(f"sparsity {model.sparsity.reason}", dim=True)
    for note in model.notes:
        say(note, dim=True)
    if (foreseen := model.decided.channels) is not None:
        say(foreseen.told(), dim=True)


def tell_memory(model: Model) -> None:
    """Planned beside measured memory of devices, and what their backend chose; or what memory is for under
    a budget of it. Nothing without either."""
    if model.ram is not None:
        from hotset.report.disk import ram_lines, ram_table

        print_table(*ram_table(model.ram), err=True, tight=True)
        for line in ram_lines(model.ram):
            say(line, dim=True)
    if model.placement is None:
        return
    from hotset.report.placement import memory_table

    for note in model.backend.notes:
        say(note, dim=True)
    print_table(*memory_table(model.device_memory()), err=True, tight=True)


def read_text(file: Path, option: str, longest: int | None = None) -> str:
    """A text file of so many bytes at most (None: LONGEST_TEXT) as it stands: newlines stay what they are."""
    try:
        with file.open("rb") as opened:  # a pipe too: -f <(...)
            return read_bounded(opened, file, longest or LONGEST_TEXT).decode("utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read ({error.strerror}).", param_hint=option) from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"{file} is not UTF-8 text (byte {error.start}).", param_hint=option
        ) from None


def print_json(value: Any) -> None:
    """`value` as JSON on stdout. Numbers that JSON does not know (NaN, infinity) become null."""
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
    """Rows of text as a table; a column whose name begins with ">" is set flush right.

    Title and cells may be anybody's text; longer ones than `limit` lose their middle.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=err, markup=False, emoji=False)
    if not console.is_terminal:  # a pipe has no width: never wrap or cut
        console = Console(stderr=err, markup=False, emoji=False, width=400)
    title = None if title is None else escaped(title, limit)
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, collapse_padding=tight)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escaped(cell, limit) for cell in row))
    console.print(table if rows else "(none)")


class DownloadBar(Reporter):
    """Shows downloads on stderr: a bar with speed and time left on a terminal, a few lines elsewhere."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(escaped(text), markup=False, emoji=False, highlight=False)
        else:
            say(text)

    def advance(self, label: str, done: int, total: int) -> None:
        label = escaped(label, _LONGEST_LABEL)
        if not sys.stderr.isatty():
            self._line(label, done, total)
            return
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            name = TextColumn("{task.description}", markup=False)
            self._progress = Progress(name, BarColumn(), *self._columns(), console=Console(stderr=True))
            self._progress.start()
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total or None)
        self._progress.update(self._tasks[label], completed=done, total=total or None)

    def planned(self, placement: Any) -> None:
        from hotset.report.placement import placement_lines, placement_table

        print_table(*placement_table(placement), err=True, tight=True)
        for line in placement_lines(placement):
            say(line, dim=True)

    def _line(self, label: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if tenth > self._tenths.get(label, -1):
            self._tenths[label] = tenth
            say(f"{label}: {human_size(done)} of {human_size(total)}" if total else f"{label} ...")

    def _columns(self) -> list[ProgressColumn]:
        from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

        return [DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]


class StepBar(DownloadBar):
    """Counts steps instead of bytes; a label that begins again gets a new bar."""

    def advance(self, label: str, done: int, total: int) -> None:
        task = self._tasks.get(label)
        if self._progress is not None and task is not None and done < self._progress.tasks[task].completed:
            del self._tasks[label]
        super().advance(label, done, total)

    def _line(self, label: str, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth > self._tenths.get(label, 0) or done == total:
            self._tenths[label] = 0 if done == total else tenth
            say(f"{label}: {done} of {total}", dim=True)

    def _columns(self) -> list[ProgressColumn]:
        from rich.progress import MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

        return [MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
