"""One stage of a model that is split over machines: the worker that computes it.

    worker = StageWorker()                      # an actor of Ray in stages.py
    worker.open(model=..., span=..., ...)
    address = worker.listen(host, previous)     # for the member that has this public key
    worker.link(following, key)                 # from now on it computes arriving pieces and passes them on

An error of a step is passed on as a `Failed`, so the driver receives it from the last stage.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
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
from hotset.scale.links import LOST, START_SECONDS, Channel, LinkError, new_keys
from hotset.scale.messages import Failed, Message, Passed, most_bytes
from hotset.settings import LoadSettings
from hotset.sparsity.sidecar import fingerprint

log = logging.getLogger("hotset.scale")


@dataclass(frozen=True)
class Noted:
    """The report of a stage on a step, in addition to rows.

    It has taps, and if wanted the counts of neurons and the seconds by layer (backends/stage.py).
    """

    tapped: dict[str, np.ndarray]
    counts: np.ndarray | None
    seconds: np.ndarray | None


class StageWorker:
    """Operations of a model, with the cache of their layers. Call `open` first."""

    def __init__(self) -> None:
        self._cancelled = -1  # this step and earlier ones
        self._computing = threading.Lock()
        self._noted: tuple[int, list[Noted]] = (-1, [])  # step and reports of the latest step
        self._keys = new_keys()
        self._enters: Channel | None = None  # until the stage is linked
        self._problems: list[str] = []  # that ended its latest line
        self._undone = ExitStack()

    def open(
        self,
        *,
        model: str,
        settings: LoadSettings,
        release: str,
        mark: str,
        span: Span,
        n_blocks: int,
        counts: bool,
    ) -> dict[str, Any] | Failed:
        """Open the operations. Return public key, threads and instruction set, or the error that prevents it.

        model: a name or path on this machine. release: the required version of hotset. mark: the required
        `fingerprint` of the model's file. n_blocks: KV blocks of the cache. counts: whether neurons are
        counted.
        """
        try:
            if release != (own := version("hotset")):
                raise InvalidRequestError(
                    f"this machine has hotset {own}, and the machine that asks {release}; install the same "
                    "version on each"
                )
            opened = open_model(model, settings)
            self._undone.callback(opened.gguf.close)
            if fingerprint(opened.gguf) != mark:
                raise InvalidRequestError(
                    f"{opened.gguf.path} differs from the file of the starting machine; copy that file"
                )
            decided = plan_model(opened, mapped=True)
            self._undone.callback(decided.weights.close)
            self._stage = CpuBackend(
                decided.weights,
                decided.graph,
                BackendOptions(
                    n_blocks=n_blocks, max_batch=settings.max_batch, kv_type=settings.kv_type,
                    n_threads=settings.n_threads, sparse=decided.is_sparse,
                ),
                span=span,
            )  # fmt: skip
        except Exception as error:
            self._undone.close()
            return Failed.of(error)
        self._undone.callback(self._stage.close)
        self._counts = counts
        width = self._stage.entering.width if self._stage.entering is not None else 0
        self._most = most_bytes(settings, n_blocks, width)
        self._is_last = span.last == len(decided.graph.ops)
        self._values = frozenset(op.out.name for op in self._stage.graph.primitives)
        return {"key": self._keys[0], "n_threads": self._stage.n_threads, "isa": self._stage.isa}

    def alive(self) -> str | None:
        """Return at once why its latest line ended; None if it did not, or a neighbour closed it."""
        return self._problems[0] if self._problems else None

    # ---- its place in the line ----

    def listen(self, host: str, previous: bytes) -> str:
        """Return the address for the previous member of a new line, which has this public key.

        host: an address of this machine."""
        self._leave()
        self._enters, self._problems = Channel(self._keys, previous, self._most), []
        return self._enters.listen(host)

    def _leave(self) -> None:
        """Stop waiting to be linked."""
        if self._enters is not None:
            self._enters.close()

    def link(self, following: str, key: bytes) -> str | None:
        """Connect to the next member, which listens there and has this public key.

        Start to compute arriving pieces. Return an error message, or None.
        """
        assert self._enters is not None, "a stage listens before it is linked"
        leaves = Channel(self._keys, key, most=0)
        try:
            leaves.connect(following)
        except LinkError as error:
            leaves.close()
            return str(error)
        line, self._enters = (self._enters, leaves, self._problems), None
        threading.Thread(target=self._pass_on, args=line, name="hotset-stage", daemon=True).start()
        return None

    def _pass_on(self, enters: Channel, leaves: Channel, problems: list[str]) -> None:
        """Compute pieces until a neighbour is gone or sends an invalid message.

        Then close both connections, which ends the whole line.
        """
        with enters, leaves, suppress(*LOST):
            try:
                enters.wait(START_SECONDS)
                while True:
                    found = enters.receive()
                    assert found.batch is not None, "a piece has a batch"
                    passed = self.run(found.step, found.batch, found.passed)
                    leaves.send(Message(found.step, None if self._is_last else found.batch, passed))
            except LinkError as error:
                problems.append(str(error))
                log.warning("a stage left its line: %s", error)

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
        self._leave()
        self._undone.close()


class Gauge:
    """A short-lived actor of Ray that measures the capacity of a machine."""

    def measure(self, n_threads: int | None) -> tuple[float, float]:
        """Return the free bytes of memory, and the bytes of weights per second that its CPU reads."""
        return float(psutil.virtual_memory().available), cpu_rate(n_threads or usable_cores())

    def echo(self, host: str, key: bytes, width: int) -> tuple[str, bytes]:
        """Return an address that sends back each row, and its public key, to measure a hop.

        A row is float32 [1, width]. key: of the member that connects.
        """
        keys = new_keys()
        channel = Channel(keys, key, 4 * width)
        address = channel.listen(host)

        def answer() -> None:
            with channel, suppress(*LOST):
                channel.wait(START_SECONDS)
                while True:
                    channel.send(channel.receive())

        threading.Thread(target=answer, name="hotset-echo", daemon=True).start()
        return address, keys[0]
