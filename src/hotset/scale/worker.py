"""One stage of a model that is split over machines: the worker that computes it.

    worker = StageWorker()                      # an actor of Ray in stages.py
    worker.open(model=..., first_op=..., ...)
    address = worker.listen(host, key)          # for the previous stage
    worker.link(following)                      # from now on it computes arriving pieces and passes them on

An error of a step is passed on as a `Failed`, so the driver receives it from the last stage.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil

from hotset.backends.base import Batch
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.stage import BackendOptions, Span
from hotset.cores import usable_cores
from hotset.errors import InvalidRequestError, StepCancelledError
from hotset.loader.build import open_model, plan_model
from hotset.placement.machine import cpu_rate
from hotset.scale.frames import Bounds, Channel, Failed, FrameKind, LinkError, Message, Passed, encode
from hotset.scale.links import ENTERS, LEAVES, LOST, START_SECONDS, Address, Inlet, joined
from hotset.settings import LoadSettings
from hotset.sparsity.sidecar import fingerprint

log = logging.getLogger("hotset.scale")


@dataclass(frozen=True)
class Noted:
    """The report of a stage on a step, in addition to rows.

    It has the taps and, if wanted, the counts of neurons and the seconds by layer (backends/stage.py).
    """

    tapped: dict[str, np.ndarray]
    counts: np.ndarray | None
    seconds: np.ndarray | None


class StageWorker:
    """The operations [first_op, last_op) of a model, with the cache of their layers. Call `open` first."""

    def __init__(self) -> None:
        self._cancelled = -1  # this step and earlier ones
        self._computing = threading.Lock()
        self._noted: tuple[int, list[Noted]] = (-1, [])  # step and reports of the latest step
        self._inlet: Inlet | None = None
        self._refused: str | None = None
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
        """Open the operations. Return threads and instruction set, or the error that prevents it.

        model: a name or path on this machine. mark: the required `fingerprint` of its file. n_pages: KV
        blocks of the cache. counts: whether neurons are counted.
        """
        try:
            opened = open_model(model, settings)
            self._undone.callback(opened.gguf.close)
            if fingerprint(opened.gguf) != mark:
                raise InvalidRequestError(
                    f"{opened.gguf.path} differs from the file of the requesting machine; copy that file"
                )
            decided = plan_model(opened, mapped=True)
            self._undone.callback(decided.weights.close)
            self._stage = CpuBackend(
                decided.weights,
                decided.graph,
                BackendOptions(
                    n_pages=n_pages, max_batch=settings.max_batch, kv_type=settings.kv_type,
                    n_threads=settings.n_threads, sparse=decided.is_sparse,
                ),
                span=Span(first_op, last_op),
            )  # fmt: skip
        except Exception as error:
            self._undone.close()
            return Failed.of(error)
        self._undone.callback(self._stage.close)
        self._counts, self._settings = counts, settings
        self._values = frozenset(op.out.name for op in self._stage.graph.primitives)
        return {"n_threads": self._stage.n_threads, "isa": self._stage.isa}

    def alive(self) -> str | None:
        """Return at once why its latest line ended; None if it did not, or a neighbour closed it."""
        return self._refused

    # ---- its place in the line ----

    def listen(self, host: str, key: bytes) -> Address:
        """Return the address for its neighbours: the previous stage, and for the last stage the driver.

        It leaves its former line. host: an address of this machine. key: of the line."""
        if self._inlet is not None:
            self._inlet.close()
        self._key, self._inlet, self._refused = key, Inlet(host, key), None
        return self._inlet.address

    def link(self, following: Address | None) -> str | None:
        """Connect to the next stage, and start to compute arriving pieces. Return an error message, or None.

        following: where the next stage listens; None: this is the last."""
        assert self._inlet is not None, "a stage listens before it is linked"
        ends: dict[int, Channel] = {}
        try:
            if following is not None:
                ends[LEAVES] = joined(following, self._key, ENTERS)
        except LinkError as error:
            self._inlet.close()
            return str(error)
        line = self._inlet, ends, following is None
        threading.Thread(target=self._pass_on, args=line, name="hotset-stage", daemon=True).start()
        return None

    def _pass_on(self, inlet: Inlet, ends: dict[int, Channel], is_last: bool) -> None:
        """Compute pieces until a neighbour closes its connection or sends an invalid frame.

        Then close the other connections, which ends the whole line.
        """
        with ExitStack() as undone, suppress(*LOST):
            for channel in ends.values():
                undone.enter_context(channel)
            undone.callback(inlet.close)
            try:
                until = time.monotonic() + START_SECONDS
                while len(ends) < 2:
                    end, channel = inlet.accept(until - time.monotonic())
                    ends[end] = undone.enter_context(channel)
                inlet.close()  # no other connection is expected
                entering, leaving = self._bounds(FrameKind.ROWS if is_last else FrameKind.PIECE)
                while True:
                    found = ends[ENTERS].receive(entering)
                    assert found.batch is not None, "a piece has a batch"
                    passed = self.run(found.step, found.batch, found.passed)
                    batch = None if is_last else found.batch
                    ends[LEAVES].send(encode(Message(found.step, batch, passed), leaving))
            except LinkError as error:
                if inlet is self._inlet:
                    self._refused = str(error)
                log.warning("a stage left its line: %s", error)

    def _bounds(self, leaving: FrameKind) -> tuple[Bounds, Bounds]:
        """Return the bounds of arriving and of leaving messages."""
        stage = self._stage
        width = stage.entering.width if stage.entering is not None else 0
        return (
            Bounds.of(FrameKind.PIECE, self._settings, stage.n_pages, width),
            Bounds.of(leaving, self._settings, stage.n_pages, stage.graph.result.width),
        )

    # ---- a step ----

    def run(self, step: int, batch: Batch, entering: Passed | None) -> Passed:
        """Compute a piece of a step. entering: the result of the previous stage."""
        if isinstance(entering, Failed):
            return entering
        try:
            own = tuple(name for name in batch.taps if name in self._values)
            with self._computing:
                if step <= self._cancelled:  # checked under the lock: no step of an ended line runs later
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
        """Return the reports on the pieces of a step, in order; [] unless it is the latest step."""
        return self._noted[1] if self._noted[0] == step else []

    def cancel(self, step: int) -> None:
        """Cancel this step and earlier ones, from another thread."""
        self._cancelled = max(self._cancelled, step)
        if self._computing.locked():
            self._stage.cancel()

    def close(self) -> None:
        """Free threads and memory; safe to call twice."""
        if self._inlet is not None:
            self._inlet.close()
        self._undone.close()


class Gauge:
    """A short-lived actor of Ray that measures the capacity of a machine."""

    def measure(self, n_threads: int | None) -> tuple[float, float]:
        """Return the free bytes of memory, and the bytes of weights per second that its CPU reads."""
        return float(psutil.virtual_memory().available), cpu_rate(n_threads or usable_cores())

    def echo(self, host: str, key: bytes, width: int) -> Address:
        """Return an address that sends back each row, float32 [1, width], to measure a hop."""
        inlet = Inlet(host, key)
        bounds = row_bounds(width)

        def answer() -> None:
            with suppress(*LOST):
                _, channel = inlet.accept(START_SECONDS)
                inlet.close()
                with channel:
                    while True:
                        channel.send(encode(channel.receive(bounds), bounds))

        threading.Thread(target=answer, name="hotset-echo", daemon=True).start()
        return inlet.address


def row_bounds(width: int) -> Bounds:
    """Return the bounds of the messages that `Gauge.echo` receives and sends."""
    return Bounds(FrameKind.ROWS, n_tokens=1, n_sequences=0, n_pages=0, n_columns=width)
