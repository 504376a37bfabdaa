"""Progress of long work, with the time left: a bar on stderr in a terminal, otherwise lines.

Every subcommand uses `ProgressBar`; working code reports to it as a `Reporter`. Rich is imported only to draw
a bar: `hotset run` answers before that import would be done.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hotset.cli.console import print_table, say, say_note
from hotset.escaping import escaped
from hotset.reporter import Reporter
from hotset.units import human_size

if TYPE_CHECKING:
    from rich.progress import Progress, Task, TaskID
    from rich.text import Text

clock: Callable[[], float] = time.monotonic  # seconds; tests replace it
_LONGEST_LABEL = 80  # characters of the label before a bar
_QUICK, _SLOW = 1.0, 30.0  # least and most seconds between two lines while work advances


class ProgressBar(Reporter):
    """A display of each label that is advanced: its progress and the estimated time left.

    detail: a text after it, such as the perplexity so far. transient: remove the bar at the end.
    auto_refresh: False if a drawing thread would disturb a measurement.
    """

    def __init__(self, *, transient: bool = False, auto_refresh: bool = True) -> None:
        self.detail = ""
        self._transient, self._auto_refresh = transient, auto_refresh
        self._phases: dict[str, _Phase] = {}
        self._tasks: dict[str, TaskID] = {}
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Stop drawing, so that other output can follow; the next advance draws again."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._tasks.clear()

    def say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(escaped(text), markup=False, emoji=False, highlight=False)
        else:
            say(text)

    def advance(self, label: str, done: int, total: int, unit: str = "bytes") -> None:
        label, now = escaped(label, _LONGEST_LABEL), clock()
        phase = self._phases.get(label)
        if phase is None or done < phase.done:  # the label starts again
            phase = self._phases[label] = _Phase(done, now, unit)
            self._tasks.pop(label, None)
        phase.done, phase.total, phase.at = done, total, now
        if _is_drawn():
            self._draw(label, phase)
        elif phase.is_due(now):
            say(f"{label}: {phase.facts(now)}{self._detail()}", dim=True)

    def counting(self, label: str, unit: str) -> Callable[[int, int], None]:
        """Return a function that advances a label; its arguments are finished units and all units."""
        return lambda done, total: self.advance(label, done, total, unit)

    def planned(self, placement: Any) -> None:
        from hotset.report.placement import placement_lines, placement_table

        print_table(*placement_table(placement), err=True, tight=True)
        for line in placement_lines(placement):
            say_note(line)

    def _detail(self) -> str:
        return f"; {self.detail}" if self.detail else ""

    def _draw(self, label: str, phase: _Phase) -> None:
        progress = self._progress or self._begun()
        if label not in self._tasks:
            self._tasks[label] = progress.add_task(label, total=phase.total or None, phase=phase)
        progress.update(self._tasks[label], completed=phase.done, total=phase.total or None)
        if not self._auto_refresh:
            progress.refresh()

    def _begun(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
        from rich.text import Text

        bar = self

        class PhaseColumn(ProgressColumn):
            def render(self, task: Task) -> Text:
                facts: str = task.fields["phase"].facts(clock())
                return Text(facts + (bar._detail() if not task.finished else ""))

        self._progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), PhaseColumn(),
            console=Console(stderr=True), transient=self._transient, auto_refresh=self._auto_refresh,
            refresh_per_second=4, redirect_stdout=False,  # stdout may be a file, and stderr the terminal
        )  # fmt: skip
        self._progress.start()
        return self._progress


class _Phase:
    """The progress of one label: units done, the start, and the last line printed."""

    def __init__(self, done: int, now: float, unit: str) -> None:
        self.unit = unit
        self.done = self._first = done  # work of an earlier run takes no time now
        self.total = 0  # 0: unknown
        self.at = self._began = now
        self._said_at, self._said_tenth, self._said_left, self._said_end = -1.0, -1, False, False

    def facts(self, now: float) -> str:
        """Return the progress as text, such as "3 of 8 layers, 1:20 left"."""
        done, total = self._counted(self.done), self._counted(self.total)
        if not self.total:
            return done if self.done else "..."
        counted = f"{done} of {total}" + (f" {self.unit}" if self.unit != "bytes" else "")
        if self.done >= self.total:
            return f"{counted} in {_time(self.at - self._began)}"
        left = self._left(now)
        return counted + (f", {_time(left)} left" if left is not None else "")

    def is_due(self, now: float) -> bool:
        """Return whether a line is due now.

        It is at the beginning and the end, when the time left is first known, at each tenth, and after half a
        minute.
        """
        ends = 0 < self.total <= self.done
        tenth = 10 * self.done // self.total if self.total else 0
        knows_left = self._left(now) is not None
        waited = now - self._said_at
        due = (
            self._said_tenth < 0
            or (ends and not self._said_end)
            or (not ends and waited >= _SLOW)
            or (not ends and waited >= _QUICK and (tenth > self._said_tenth or knows_left > self._said_left))
        )
        if due:
            self._said_at, self._said_tenth = now, tenth
            self._said_left, self._said_end = self._said_left or knows_left, ends
        return due

    def _left(self, now: float) -> float | None:
        """Return the seconds left, by the mean speed so far; None if nothing is done."""
        if self.done <= self._first or not self.total:
            return None
        rest = (self.at - self._began) * (self.total - self.done) / (self.done - self._first)
        return max(0.0, rest - (now - self.at))

    def _counted(self, n: int) -> str:
        return human_size(n) if self.unit == "bytes" else str(n)


def _is_drawn() -> bool:
    """Return whether stderr is a terminal on which a bar can be drawn."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _time(seconds: float) -> str:
    """Return a time such as 0:07, 12:30 or 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
