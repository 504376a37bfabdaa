"""One stage of a model that is cut over machines: what computes it where it is.

    worker = StageWorker(model, settings, first_op=..., last_op=..., ...)     # an actor of Ray in stages.py
    passed, noted = worker.run(step, batch, None)                             # the first stage
    passed, noted = worker.run(step, batch, passed)                           # the next

What goes wrong is passed on as a `Failed`, so that whoever asked for the last stage hears of it.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil

from hotset import errors
from hotset.backends.base import Batch
from hotset.backends.cpu import CpuBackend
from hotset.cores import usable_cores
from hotset.errors import HotsetError, InvalidRequestError, StepCancelledError
from hotset.loading import decide, open_model
from hotset.placement.machine import cpu_rate
from hotset.settings import LoadSettings
from hotset.sparsity.sidecar import fingerprint


@dataclass(frozen=True)
class Failed:
    """What kept a stage from computing: an error of errors.py by its name, with its sentence."""

    kind: str
    sentence: str

    @staticmethod
    def of(error: Exception) -> Failed:
        return Failed(type(error).__name__, str(error) or type(error).__name__)

    def error(self) -> Exception:
        """The same as an exception."""
        if self.kind == StepCancelledError.__name__:
            return StepCancelledError()
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, HotsetError):
            return kind(self.sentence)
        return RuntimeError(f"{self.kind}: {self.sentence}")


@dataclass(frozen=True)
class Noted:
    """What a stage tells of a step beside its rows: taps, and where they are wanted the counts of neurons
    and seconds by layer (backends/stage.py)."""

    tapped: dict[str, np.ndarray]
    counts: np.ndarray | None
    seconds: np.ndarray | None


Passed = np.ndarray | Failed


class StageWorker:
    """Operations [first_op, last_op) of a model, with the cache of their layers. `open` comes first."""

    def __init__(self) -> None:
        self._cancelled = -1  # this step and those before it
        self._computing = threading.Lock()
        self._undone = ExitStack()

    def open(
        self,
        *,
        model: str,
        settings: LoadSettings,
        mark: str,
        first_op: int,
        last_op: int,
        n_pages: int,
        counts: bool,
    ) -> dict[str, Any] | Failed:
        """Threads and instruction set; what keeps it from opening.

        model: a name or path of this machine. mark: which file it must be (`fingerprint`). n_pages: of the
        cache. counts: whether neurons are counted.
        """
        try:
            opened = open_model(model, settings)
            self._undone.callback(opened.gguf.close)
            if fingerprint(opened.gguf) != mark:
                raise InvalidRequestError(
                    f"{opened.gguf.path} is another file than that of the machine that asks; copy that one"
                )
            decided = decide(opened, mapped=True)
            self._undone.callback(decided.weights.close)
            self._stage = CpuBackend(
                decided.weights,
                decided.graph,
                n_pages=n_pages,
                max_batch=settings.max_batch,
                kv_type=settings.kv_type,
                n_threads=settings.n_threads,
                sparse=decided.choice.mode != "dense",
                first_op=first_op,
                last_op=last_op,
            )
        except Exception as error:
            self._undone.close()
            return Failed.of(error)
        self._undone.callback(self._stage.close)
        self._counts = counts
        self._values = frozenset(op.out.name for op in self._stage.graph.primitives)
        return {"n_threads": self._stage.n_threads, "isa": self._stage.isa}

    def alive(self) -> None:
        """Answers, whatever is computed."""

    def run(self, step: int, batch: Batch, entering: Passed | None) -> tuple[Passed, Noted | None]:
        """Computes a piece of a step; entering: what the stage before it has passed on."""
        if isinstance(entering, Failed):
            return entering, None
        try:
            if step <= self._cancelled:
                raise StepCancelledError
            own = tuple(name for name in batch.taps if name in self._values)
            with self._computing:
                rows = self._stage.run(replace(batch, taps=own), entering)
                tapped = dict(self._stage.tapped) if own else {}
                counts = self._stage.counts() if self._counts else None
                seconds = self._stage.seconds() if self._counts else None
                return rows.copy(), Noted(tapped, counts, seconds)
        except Exception as error:
            return Failed.of(error), None

    def cancel(self, step: int) -> None:
        """Ends this step and those before it, from another thread."""
        self._cancelled = max(self._cancelled, step)
        if self._computing.locked():
            self._stage.cancel()

    def close(self) -> None:
        """Frees threads and memory; safe to call twice."""
        self._undone.close()


class Gauge:
    """What a machine can do; an actor of Ray, for a moment."""

    def measure(self, n_threads: int | None) -> tuple[float, float]:
        """Bytes of memory that are free, and bytes of weights per second that its CPU reads."""
        return float(psutil.virtual_memory().available), cpu_rate(n_threads or usable_cores())

    def pass_on(self, row: np.ndarray) -> np.ndarray:
        """The same: what it takes is a hop."""
        return row
