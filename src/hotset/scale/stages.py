"""A model split over machines: stages are actors of Ray, and only the residual stream passes between them.

    model = load_staged("llama-70b", settings, "box:40,nas:40", "auto")     # as hotset.load

Each machine maps the file by the requested name or path, reads the weights of its own layers, and keeps their
keys and values. Ray starts the actors and calls them for everything but the steps, which go from one to
the next over sockets (links.py). A step goes through the stages in pieces, so they work at the same time. A
stage whose machine dies is started again elsewhere; the contents of the cache must then be computed again
(CacheLostError).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np

from hotset.api import Model
from hotset.backends.base import BLOCK_SIZE, COUNTS, Batch, StepResult, StepStats, WithoutDevices, cache_slots
from hotset.backends.stage import Span
from hotset.errors import (
    CacheLostError,
    DeviceError,
    HotsetError,
    InvalidRequestError,
    UnsupportedModelError,
)
from hotset.escaping import clause
from hotset.loader.build import open_model, plan_model
from hotset.loader.decide import Decided
from hotset.model.operations import PARTS
from hotset.scale.cluster import Machine, connect, library, machine_named, machines
from hotset.scale.links import LOST, Channel, Line, LinkError, new_keys
from hotset.scale.messages import Failed, Message, most_bytes
from hotset.scale.splits import Room, Split, n_pieces, parse_splits, pieces, planned, spans
from hotset.scale.worker import Gauge, Noted, StageWorker
from hotset.settings import LoadSettings
from hotset.sparsity.sidecar import fingerprint

AUTO = "auto"  # in place of stages: plan them
_SHARE = 0.9  # of a machine's free memory that stages may use
_HOPS = 20  # measurements of a hop
_START_SECONDS = 300.0  # for a stage to open its layers
_RECOVER_SECONDS = 60.0  # for a lost stage to start elsewhere
_CONTROL = "control"  # concurrency group of calls that do not wait for a step
_LOOK_SECONDS = 5.0  # for a live stage to answer
_LINK_SECONDS = 30.0  # for stages to answer the calls of Ray that form a line

log = logging.getLogger("hotset.scale")


def load_staged(model: str, settings: LoadSettings, stages: str, address: str | None) -> Model:
    """Load a model like `hotset.load`, with its layers on machines of the Ray cluster at `address`.

    stages: "HOST:LAYERS,...", or AUTO for the stages that take the least time. Raises the errors of
    `hotset.load`, InvalidRequestError for stages that the model does not have, and DeviceError for machines
    that do not exist.
    """
    if settings.asks_for_a_device or settings.is_reference:
        raise InvalidRequestError(
            "stages on machines compute on their CPUs; leave out the settings for a GPU"
        )
    if settings.ram_budget is not None:
        raise InvalidRequestError("a machine maps the layers of its stages; leave out ram_budget")
    if settings.cache_dir is not None:
        raise UnsupportedModelError(
            "the cache of stages lies on their machines and is not kept on a disk; leave out cache_dir"
        )
    opened = open_model(model, replace(settings, device="cpu"))
    opened = opened.with_images(None, "a model that is split over machines gets no images")
    with ExitStack() as undone:
        undone.callback(opened.gguf.close)
        decided = plan_model(opened, mapped=True)
        undone.callback(decided.weights.close)
        if decided.n_states:
            raise UnsupportedModelError(
                "a model with recurrent layers is not split over machines; leave out `stages`"
            )
        if settings.lora is not None:
            raise UnsupportedModelError(
                "adapters (LoRA) are not split over machines; leave out `lora`, or `stages`"
            )
        if decided.config.altup is not None:
            raise UnsupportedModelError(
                "a model with several residual streams is not cut over machines; leave out `stages`"
            )
        n_layer = decided.graph.n_layer
        splits = parse_splits(stages, n_layer) if stages != AUTO else []
        connect(address)
        if not splits:
            n_bytes = decided.gguf.nbytes
            n_bytes += decided.n_blocks * BLOCK_SIZE * decided.cost.kv_bytes_per_token(settings.kv_type)
            width = next(op.out.width for op in decided.graph.ops)
            rooms = measured(settings.n_threads, width)
            splits = planned([n_bytes / n_layer] * n_layer, rooms)
        backend = StagedBackend(model, decided, splits)
        undone.callback(backend.close)
        loaded = Model(decided, backend)
        undone.pop_all()
    return loaded


def measured(n_threads: int | None, width: int) -> list[Room]:
    """Measure each machine of the cluster, one after the other, since several may be one.

    width: of a row of the residual stream; its way there and back is a hop."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = library()

    rooms, row = [], np.zeros((1, width), np.float32)
    for machine in machines():
        strategy = NodeAffinitySchedulingStrategy(machine.id, soft=False)
        gauge = ray.remote(Gauge).options(num_cpus=0, scheduling_strategy=strategy).remote()
        n_bytes, rate = ray.get(gauge.measure.remote(n_threads))
        hops, keys = [], new_keys()
        address, key = ray.get(gauge.echo.remote(machine.address, keys[0], width))
        try:
            with Channel(keys, key, row.nbytes) as there:
                there.connect(address)
                for _ in range(_HOPS):
                    began = time.perf_counter()
                    there.send(Message(0, None, row))
                    there.receive()
                    hops.append(time.perf_counter() - began)
        except LOST as error:
            raise DeviceError(f"{machine.name} cannot be measured ({clause(error)})") from None
        ray.kill(gauge)
        rooms.append(Room(machine.name, _SHARE * n_bytes, rate, sorted(hops)[_HOPS // 2]))
    return rooms


@dataclass
class _Stage:
    """A stage. actor: of StageWorker; key: its public key."""

    split: Split
    machine: Machine
    span: Span
    actor: Any = None
    key: bytes = b""


class StagedBackend(WithoutDevices):
    """The Backend of a model whose stages are on machines (see the module).

    model: the name or path that each machine opens. decided: its plan, with the graph. Raises DeviceError for
    a machine that does not exist, and errors of a stage that opens its layers.
    """

    name = "stages"
    n_states = 0

    def __init__(self, model: str, decided: Decided, splits: Sequence[Split]) -> None:
        settings = decided.settings
        self.max_batch, self.n_blocks = settings.max_batch, decided.n_blocks
        self.n_vocab = decided.graph.result.width
        self.n_threads: int | None = None
        self.runtime = None
        self._n_layer = max(decided.graph.n_layer, 1)
        self._has_thresholds = decided.graph.has_thresholds
        self._counts = decided.config.leaves_out or self._has_thresholds
        self._values = frozenset(op.out.name for op in decided.graph.primitives)
        self._keys = new_keys()
        self._most = most_bytes(settings, 0, self.n_vocab)  # of a message from the last stage
        self._how: dict[str, Any] = {
            # The same everywhere: a machine's own defaults may differ.
            "settings": replace(settings, n_ctx=decided.n_ctx, progress=None),
            "model": str(model),
            "release": version("hotset"),
            "mark": fingerprint(decided.gguf),
            "n_blocks": decided.n_blocks,
            "counts": self._counts,
        }
        self._steps = itertools.count()
        self._step = -1  # in flight, or the latest
        self._cancelled = -1
        self._latest: tuple[int, float] | None = None  # tokens and seconds of the latest step
        self._line: Line | None = None
        self._n_broken = 0  # lines that broke since the last step although no stage was gone
        self._closed = False
        alive = machines()
        self._stages = [
            _Stage(split, machine_named(split.host, alive), Span(*span))
            for split, span in zip(splits, spans(decided.graph, splits), strict=True)
        ]
        try:
            replies = self._begin(self._stages)
            self._link()
        except BaseException:
            self.close()
            raise
        self.notes = tuple(
            f"{stage.split.n_layers} layers on {stage.split.host}: "
            f"{about['n_threads']} threads, {about['isa']}"
            for stage, about in zip(self._stages, replies, strict=True)
        )

    # ---- a step ----

    def step(self, batch: Batch) -> StepResult:
        """Run one step.

        Raises CacheLostError if a machine was lost and its stage has been started again, DeviceError if it
        cannot be.
        """
        self._check_open()
        cache_slots(batch, max_batch=self.max_batch, n_blocks=self.n_blocks, n_vocab=self.n_vocab)
        if unknown := set(batch.taps) - self._values:
            raise InvalidRequestError(f"the model has no value named {min(unknown)!r} to tap")
        began = time.perf_counter()
        self._latest = None
        self._step = step = next(self._steps)
        try:
            assert self._line is not None, "stages stand in a line as long as they are open"
            rows = self._line.step(step, pieces(batch, n_pieces(len(batch.tokens), len(self._stages))))
        except LOST as error:
            self._recover(error)
            raise CacheLostError("a machine was lost; its stage has been begun again") from None
        self._n_broken = 0
        if failed := [one for one in rows if isinstance(one, Failed)]:
            raise failed[0].error()
        taps: dict[str, np.ndarray] = {}
        if batch.taps:
            noted = self._noted()
            for name in batch.taps:
                taps[name] = np.concatenate([one.tapped[name] for one in noted if name in one.tapped])
        self._latest = len(batch.tokens), time.perf_counter() - began
        return StepResult(np.concatenate(rows), taps)  # type: ignore[arg-type]

    def _noted(self) -> list[Noted]:
        """Return the reports of the stages on the latest step."""
        ray = library()

        of_stages: list[list[Noted]] = ray.get([one.actor.noted.remote(self._step) for one in self._stages])
        return [noted for each in of_stages for noted in each]

    def stats(self) -> StepStats | None:
        """Return counts and times of the latest step, over all stages and pieces; None without zeros."""
        if self._latest is None or not self._counts:
            return None
        n_tokens, total = self._latest
        noted = self._noted()
        counts = sum(
            (one.counts for one in noted if one.counts is not None),
            np.zeros((self._n_layer, len(COUNTS)), np.int64),
        )
        seconds = sum(
            (one.seconds for one in noted if one.seconds is not None), np.zeros((self._n_layer, len(PARTS)))
        )
        other = max(total - float(seconds[:, :3].sum()), 0.0)
        return StepStats.of(n_tokens, counts, seconds, other, has_thresholds=self._has_thresholds)

    def cancel(self) -> None:
        """Cancel the step in flight on all machines, from any thread."""
        if self._step > self._cancelled:
            self._cancelled = self._step
            for stage in self._stages:
                if stage.actor is not None:
                    stage.actor.cancel.options(concurrency_group=_CONTROL).remote(self._step)

    def close(self) -> None:
        """End the stages; safe to call twice."""
        self._closed = True
        if self._line is not None:
            self._line.close()
        for stage in self._stages:
            self._end(stage)

    # ---- stages ----

    def _begin(self, stages: Sequence[_Stage]) -> list[dict[str, Any]]:
        """Start stages and open their layers at the same time.

        Return their reports. Raises an error that prevents one of them.
        """
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = library()

        kind = ray.remote(concurrency_groups={_CONTROL: 1})(StageWorker)
        asked = []
        for stage in stages:
            stage.actor = kind.options(
                num_cpus=0,  # --stages decides which stages share a machine
                scheduling_strategy=NodeAffinitySchedulingStrategy(stage.machine.id, soft=False),
            ).remote()
            asked.append(stage.actor.open.remote(span=stage.span, **self._how))
        found = []
        for stage, one in zip(stages, asked, strict=True):
            try:
                reply = ray.get(one, timeout=_START_SECONDS)
            except (GetTimeoutError, RayActorError, RayTaskError) as error:
                raise DeviceError(
                    f"the stage on {stage.split.host} could not begin ({_last_line(error)})"
                ) from None
            if isinstance(reply, Failed):
                refused = reply.error()
                kind_of = type(refused) if isinstance(refused, HotsetError) else DeviceError
                raise kind_of(f"the stage on {stage.split.host}: {refused}")
            stage.key = reply["key"]
            found.append(reply)
        return found

    def _recover(self, error: Exception) -> None:
        """Start lost stages again, on other machines if necessary. Raises DeviceError."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        ray = library()

        self._check_open()
        lost, reasons = [], [str(error)] if isinstance(error, LinkError) else []
        for stage in self._stages:
            try:
                alive = stage.actor.alive.options(concurrency_group=_CONTROL).remote()
                if refused := ray.get(alive, timeout=_LOOK_SECONDS):
                    reasons.append(f"on {stage.split.host}: {refused}")
            except (GetTimeoutError, RayActorError, RayTaskError):
                lost.append(stage)
        self._n_broken += not lost
        if self._n_broken > 1:  # all stages live, so no machine's death broke the line
            raise DeviceError(f"a stage failed ({clause('; '.join(reasons)) or _last_line(error)})")
        for reason in reasons:
            log.warning("the line of the stages broke (%s); they are linked again", clause(reason))
        for stage in lost:
            self._end(stage)
        # The other stages may still compute parts of that step: these must not write the next step's cache.
        left = [stage.actor for stage in self._stages if stage.actor is not None]
        ray.get([actor.cancel.options(concurrency_group=_CONTROL).remote(self._step) for actor in left])
        until = time.monotonic() + _RECOVER_SECONDS
        while True:
            # The stage's own machine comes last: one that has just died still counts as alive.
            for stage in lost:
                others = [machine for machine in machines() if machine != stage.machine]
                taken = Counter(other.machine.id for other in self._stages if other is not stage)
                stage.machine = min(others or [stage.machine], key=lambda machine: taken[machine.id])
            try:
                self._begin(lost)
                self._link()
                return
            except DeviceError:
                if time.monotonic() > until:
                    raise

    def _link(self) -> None:
        """Link the stages to a line. Raises DeviceError if they cannot connect to one another."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        ray = library()
        keys = [
            self._keys[0],
            *(stage.key for stage in self._stages),
            self._keys[0],
        ]  # in the order of the ring
        enters, leaves = Channel(self._keys, keys[1], most=0), Channel(self._keys, keys[-2], self._most)
        self._line = line = Line(enters, leaves, ray.util.get_node_ip_address())
        try:
            asked = [
                stage.actor.listen.remote(stage.machine.address, previous)
                for stage, previous in zip(self._stages, keys, strict=False)
            ]
            addresses: list[str] = ray.get(asked, timeout=_LINK_SECONDS)
            following = zip(self._stages, [*addresses[1:], line.address], keys[2:], strict=True)
            replies = ray.get(
                [stage.actor.link.remote(address, key) for stage, address, key in following],
                timeout=_LINK_SECONDS,
            )
            for stage, problem in zip(self._stages, replies, strict=True):
                if problem is not None:
                    raise LinkError(f"{stage.split.host}: {problem}")
            line.connect(addresses[0])
        except (GetTimeoutError, RayActorError, RayTaskError, *LOST) as error:
            line.close()
            raise DeviceError(f"the stages did not find one another ({_last_line(error)})") from None

    def _end(self, stage: _Stage) -> None:
        ray = library()

        actor, stage.actor = stage.actor, None
        if actor is not None and ray.is_initialized():
            with suppress(Exception):  # it may already be gone
                ray.kill(actor)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the model has been closed; load it again")


def _last_line(error: BaseException) -> str:
    return clause(str(error).strip().rpartition("\n")[2] or type(error).__name__)
