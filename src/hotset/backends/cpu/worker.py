"""The CPU's part of layers whose neurons or experts are split between a device and the CPU.

`CpuWorker` computes on request (csrc/cpu_worker.h). It computes the cold neurons that fire, or some experts
of tokens, while the device computes its own. The device side transports requests and results: on the stream
of a torch device (triton/cpu_offload.py), or between two submissions on Vulkan (csrc/vulkan/exchange.h).

After a failure no thread waits forever: the flags are set (csrc/cpu_worker.h, poison), and `end_step` raises
an error. The next step begins with clean flags.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from hotset import _core
from hotset.backends.cpu.backend import new_runtime
from hotset.backends.cpu.lowering import lower_ffns
from hotset.backends.stage import BackendOptions
from hotset.errors import DeviceError, InvalidRequestError, UnsupportedModelError
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.model.operations import Ffn, Route, TransposedLinear, one_matrix

TIMEOUT = 60.0  # seconds that a layer may take on the CPU, since a slow disk may have to read its rows
EXPERT_ROWS = 256  # the most (token, expert) rows to compute at a time, or max_batch if that is larger


def split_ffns(graph: Graph) -> dict[int, Ffn]:
    """Return the FFNs whose neurons can be split, by layer: they have zeros and a row of down per neuron."""
    return {ffn.layer: ffn for ffn in graph.ffns if ffn.can_be_split}


def moe_layers(graph: Graph) -> dict[int, Ffn]:
    """Return the FFNs whose experts the CPU can compute for a device, by layer."""
    return {ffn.layer: ffn for ffn in graph.ffns if isinstance(ffn.select, Route)}


class CpuWorker:
    """A worker that computes the cold neurons or the experts of some layers on the CPU, on request.

    layers: by layer, bool [n_ff], the *device's* neurons; the worker computes only the others. experts: MoE
    layers; each request says which experts the device computes. timeout: seconds that a layer may take before
    the step is aborted. runtime: as in CpuBackend.

    One thread drives a worker; any thread may call `cancel` and `close`. The constructor raises
    UnsupportedModelError if a layer cannot be split, and InvalidRequestError if a mask has the wrong shape or
    no cold neuron.
    """

    _named = "the device"

    def __init__(
        self,
        weights: WeightSource,
        graph: Graph,
        layers: Mapping[int, np.ndarray],
        options: BackendOptions,
        *,
        experts: Collection[int] = (),
        runtime: _core.Runtime | None = None,
        timeout: float = TIMEOUT,
        isa: str | None = None,
    ) -> None:
        self.max_batch = max_batch = options.max_batch
        self.layers = tuple(sorted({*layers, *experts}))
        if not self.layers:
            raise InvalidRequestError("no layer has neurons on the CPU")
        ffns = _shared_ffns(graph, layers, experts)
        self._width = ffns[self.layers[0]].out.width
        self._index = {layer: i for i, layer in enumerate(self.layers)}
        routes = [ffns[layer].route for layer in self.layers]
        self._n_used = [0 if route is None else route.n_used for route in routes]
        self._asks = [
            ffns[i].mask is not None or n > 0 for i, n in zip(self.layers, self._n_used, strict=True)
        ]
        self._asked_bytes = [
            4 * n or -(-ffns[i].n_ff // 8) for i, n in zip(self.layers, self._n_used, strict=True)
        ]
        max_rows = min(max(EXPERT_ROWS, max_batch), max_batch * max(self._n_used))
        self._broken = ""
        self._is_open = False
        self._closing: list[Callable[[], None]] = []  # functions that closing calls in this order
        self._finalizer = weakref.finalize(self, _close_all, self._closing)
        try:
            if runtime is None:
                runtime = new_runtime(options.n_threads)
                self._closing.append(runtime.close)
            self.n_threads = runtime.n_threads
            plan = _core.Plan(max(max_rows, max_batch), 1, 1, runtime, isa)
            self._native = _worker(
                [ffns[layer] for layer in self.layers],
                weights,
                {layer: np.asarray(hot) for layer, hot in layers.items()},
                plan,
                max_batch=max_batch,
                timeout=timeout,
                sparse=options.sparse,
                whole=options.whole,
            )
            self._closing.insert(0, self._native.close)
            self._native.start()
        except BaseException as error:
            self.close()
            if isinstance(error, ValueError):
                raise InvalidRequestError(str(error)) from None
            raise

    @property
    def plan(self) -> _core.CpuWorkerPlan:
        """Return the native plan, for a device side in native code (_core.VulkanExchange)."""
        return self._native.plan

    def index_of(self, layer: int) -> int:
        """Return the index of a layer in `layers`."""
        return self._index[layer]

    def answer_width(self, layer: int) -> int:
        """Return the floats of a token's result: one row, or in an MoE layer one row per used expert."""
        return self._width * max(self._n_used[self._index[layer]], 1)

    # ---- one step

    def begin_step(self, n_tokens: int, thresholded: np.ndarray | None = None) -> None:
        """Serve requests from now on, for the first n_tokens submitted rows. thresholded: as in Batch.

        Raises DeviceError if the worker is closed or has not recovered from an earlier failure.
        """
        if self._broken:
            raise DeviceError(self._broken)
        if reason := self._native.begin(
            n_tokens, None if thresholded is None else thresholded.view(np.uint8)
        ):
            raise DeviceError(f"the hybrid step cannot begin: {reason}")
        self._is_open = True

    def synchronize(self) -> None:
        """Do nothing. A subclass waits here for a device that submits and collects on its own."""

    def end_step(self) -> None:
        """Wait for the device and end the step. Raises DeviceError if the step was aborted."""
        try:
            self.synchronize()
        except BaseException as error:
            self.abort(sentence_of(error))
            raise
        self._is_open = False
        if reason := self._native.end():
            raise DeviceError(f"the hybrid step was given up: {reason}")

    def given_up(self) -> str:
        """Return why the step was aborted; empty if it was not."""
        return self._native.poisoned()

    def cancel(self, reason: str) -> None:
        """Cancel the step, from any thread. All waits end, and end_step raises in its caller's thread."""
        self._native.poison(reason)

    def abort(self, reason: str) -> None:
        """End a step whose device has failed. All waits end, and the next step begins with clean flags."""
        self._native.poison(reason)
        try:
            self.synchronize()
        except Exception as error:
            self._broken = f"{self._named} failed in an earlier step; start again ({sentence_of(error)})"
        finally:
            self._is_open = False
            self._native.end()

    @contextmanager
    def step(self, n_tokens: int, thresholded: np.ndarray | None = None) -> Iterator[None]:
        """Call begin_step and end_step around a block. An exception in it aborts the step and is raised."""
        self.begin_step(n_tokens, thresholded)
        try:
            yield
        except BaseException as error:
            if self._is_open:
                self.abort(sentence_of(error))
            raise
        if self._is_open:
            self.end_step()

    # ---- outside the steps

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of host memory for intermediates and exchange, without weights and runtime."""
        return self._native.nbytes

    def counts(self) -> np.ndarray:
        """Return the counts of the latest step, after its end: int64 [len(layers), 5], as base.COUNTS[:5]."""
        return self._native.counts()[:, 1:]

    def seconds(self) -> np.ndarray:
        """Return the seconds from each layer's request to its result in the latest step: [len(layers)]."""
        return self._native.seconds()

    def route(self, layer: int) -> np.ndarray:
        """Return an MoE layer's experts as submitted in the latest step, int32 [n_tokens, n_used]."""
        index = self._index[layer]
        return self._native.route(index).reshape(-1, self._n_used[index])

    def close(self) -> None:
        """End the threads; threads that wait for them get an error message. Safe to call twice."""
        self._finalizer()


def _close_all(closing: Sequence[Callable[[], None]]) -> None:
    for close in closing:
        close()


def _shared_ffns(graph: Graph, layers: Mapping[int, np.ndarray], experts: Collection[int]) -> dict[int, Ffn]:
    """Return the FFNs of these layers. Raises UnsupportedModelError if a layer cannot be split."""
    split, mixed = split_ffns(graph), moe_layers(graph)
    for layer in sorted(layers):
        if layer not in split:
            raise UnsupportedModelError(
                f"the neurons of layer {layer} cannot be shared between devices: its activation leaves none "
                "at zero, or its down projection has no row per neuron"
            )
    for layer in sorted(experts):
        if layer not in mixed:
            raise UnsupportedModelError(
                f"the experts of layer {layer} have their own predictors and are computed on the CPU; "
                "use device='cpu'"
            )
    return {i: split[i] for i in layers} | {i: mixed[i] for i in experts}


def _cold_bits(ffn: Ffn, hot: np.ndarray) -> np.ndarray:
    """Return a bit per neuron, set if the CPU computes it: uint8, neuron i in bit i % 8 of byte i // 8.

    Raises InvalidRequestError if `hot` has the wrong shape or type, or no cold neuron.
    """
    if hot.dtype != np.bool_ or hot.shape != (ffn.n_ff,):
        raise InvalidRequestError(
            f"the neurons of layer {ffn.layer} on a device are given by bool [{ffn.n_ff}], not {hot.dtype} "
            f"{list(hot.shape)}"
        )
    if hot.all():
        raise InvalidRequestError(f"layer {ffn.layer} has no neuron on the CPU")
    return np.packbits(~hot, bitorder="little")


def _worker(
    ffns: Sequence[Ffn],
    weights: WeightSource,
    hot: Mapping[int, np.ndarray],
    plan: _core.Plan,
    *,
    max_batch: int,
    timeout: float,
    sparse: bool,
    whole: Collection[str],
) -> _core.CpuWorker:
    """Return the native worker for cold neurons and experts, not started. plan: an empty plan."""
    cold = {ffn.layer: _cold_bits(ffn, hot[ffn.layer]) for ffn in ffns if ffn.layer in hot}
    lowered = lower_ffns(ffns, weights, plan, sparse=sparse, whole=whole)
    native = _core.CpuWorker(plan, ffns[0].out.width, max_batch, timeout)
    for one in lowered:
        ffn = one.ffn
        at = ffn.layer, one.first_op, one.end_op
        if ffn.route is None:
            assert isinstance(ffn.down, TransposedLinear)
            names = [one_matrix(op).weight for op in (ffn.gate, ffn.up) if op is not None]
            n_bytes = sum(weights.tensors[name].row_bytes for name in (*names, ffn.down.weight))
            native.layer(
                *at, one.gates, one.ups, one.x, one.out, ffn.n_ff, n_bytes, cold[ffn.layer],
                ffn.mask is not None, one.given,
            )  # fmt: skip
        else:
            native.experts(*at, one.x, one.out, ffn.route.x.width, ffn.route.n_used, one.given)
    return native


def sentence_of(error: BaseException) -> str:
    """Return the message of an error, or the name of its type if the message is empty."""
    return str(error) or type(error).__name__
