"""One stage of a model that is cut over machines: what computes it where it is.

    worker = StageWorker()                      # an actor of Ray in stages.py
    worker.open(model=..., first_op=..., ...)
    address = worker.listen(host, key)          # where the stage before it finds it
    worker.link(following)                      # from here on it computes what comes, and passes it on

What goes wrong is passed on as a `Failed`, so that whoever asked for the last stage hears of it.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
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
from hotset.scale.links import ENTERS, LEAVES, LOST, Address, Inlet, joined
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
        self._noted: tuple[int, list[Noted]] = (-1, [])  # of the latest step
        self._inlet: Inlet | None = None
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

    # ---- its place in the line ----

    def listen(self, host: str, key: bytes) -> Address:
        """Where its neighbours find it: the one before it, and of the last stage whoever asks. It leaves the
        line that it was in. host: an address of this machine. key: of the line."""
        if self._inlet is not None:
            self._inlet.close()
        self._key, self._inlet = key, Inlet(host, key)
        return self._inlet.address

    def link(self, following: Address | None) -> None:
        """Begins to compute what comes. following: where the next stage listens; None: this is the last."""
        line = self._inlet, self._key, following
        threading.Thread(target=self._pass_on, args=line, name="hotset-stage", daemon=True).start()

    def _pass_on(self, inlet: Inlet, key: bytes, following: Address | None) -> None:
        """Until a neighbour is gone, who hears of it is gone too: so the whole line ends."""
        with ExitStack() as undone, suppress(*LOST):
            undone.callback(inlet.close)
            ends: dict[bytes, Connection] = {}
            if following is not None:
                ends[LEAVES] = undone.enter_context(joined(following, key, ENTERS))
            while len(ends) < 2:
                end, connection = inlet.accept()
                ends[end] = undone.enter_context(connection)
            while True:
                step, batch, entering = ends[ENTERS].recv()
                passed = self.run(step, batch, entering)
                ends[LEAVES].send(passed if following is None else (step, batch, passed))

    # ---- a step ----

    def run(self, step: int, batch: Batch, entering: Passed | None) -> Passed:
        """Computes a piece of a step; entering: what the stage before it has passed on."""
        if isinstance(entering, Failed):
            return entering
        try:
            own = tuple(name for name in batch.taps if name in self._values)
            with self._computing:
                if step <= self._cancelled:  # asked in here: of a line that is over nothing is computed later
                    raise StepCancelledError
                rows = self._stage.run(replace(batch, taps=own), entering).copy()
                if own or self._counts:
                    self._note(step, dict(self._stage.tapped) if own else {})
                return rows
        except Exception as error:
            return Failed.of(error)

    def _note(self, step: int, tapped: dict[str, np.ndarray]) -> None:
        if self._noted[0] != step:
            self._noted = step, []
        counts = self._stage.counts() if self._counts else None
        seconds = self._stage.seconds() if self._counts else None
        self._noted[1].append(Noted(tapped, counts, seconds))

    def noted(self, step: int) -> list[Noted]:
        """What it has to tell of the pieces of a step, in their order; of the latest alone."""
        return self._noted[1] if self._noted[0] == step else []

    def cancel(self, step: int) -> None:
        """Ends this step and those before it, from another thread."""
        self._cancelled = max(self._cancelled, step)
        if self._computing.locked():
            self._stage.cancel()

    def close(self) -> None:
        """Frees threads and memory; safe to call twice."""
        if self._inlet is not None:
            self._inlet.close()
        self._undone.close()


class Gauge:
    """What a machine can do; an actor of Ray, for a moment."""

    def measure(self, n_threads: int | None) -> tuple[float, float]:
        """Bytes of memory that are free, and bytes of weights per second that its CPU reads."""
        return float(psutil.virtual_memory().available), cpu_rate(n_threads or usable_cores())

    def echo(self, host: str, key: bytes) -> Address:
        """Where whatever is sent to comes back: what that takes is a hop."""
        inlet = Inlet(host, key)

        def answer() -> None:
            with suppress(*LOST):
                _, connection = inlet.accept()
                while True:
                    connection.send(connection.recv())

        threading.Thread(target=answer, name="hotset-echo", daemon=True).start()
        return inlet.address
