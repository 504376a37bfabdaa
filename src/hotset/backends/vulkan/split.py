"""Layers whose neurons or experts are split between a device and the CPU: the device's part, and the joins.

A layer with split neurons:

    Submit           the input of gate and up, and a bit per neuron that a predictor names, go to memory that
                     the host sees; the CPU worker computes the cold neurons
    HotScores        the predictor's scores of the hot neurons, stored contiguously
    gate ... down    as in any FFN, but only for the hot neurons: matrices have only their rows
    Gather           the hot neurons' sum with the bias, plus the cold neurons' sum, plus the residual

The operations between Submit and Gather run while the CPU computes. All are in one submission: the host waits
for the end of Submit, and Gather waits for a semaphore (csrc/vulkan/program.h). The sums are added in this
order for any number of tokens. A token has the same bits in every batch, chunk and run. Its last bits differ
from the result of a layer that is not split.

A layer with split experts (experts.py):

    SubmitExperts    the input of gate and up goes to the host, with the experts of each token; an expert with
                     a slot is sent as -1 - id; the CPU worker computes the others
    gate, up, down   the experts of each token that have slots, each separately
    ExpertSum        after the CPU's answer: the rows of all experts, of both sides, in the order of the route
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hotset import _core
from hotset.backends.cpu.worker import CpuWorker, moe_layers, split_ffns
from hotset.backends.vulkan.experts import VulkanExpertCache
from hotset.backends.vulkan.kernels import Record, Recorder, by_values, stride_of
from hotset.backends.vulkan.memory import BufferRange, aligned
from hotset.backends.vulkan.recurrent import Values
from hotset.errors import InvalidRequestError
from hotset.model.graph import Graph
from hotset.model.operations import ExpertLinear, ExpertSum, Ffn, Mask, Operation, Primitive, Value

_ADD, _SCALE, _SUM = 0, 2, 11  # csrc/vulkan/shaders/elementwise.comp
_WORD = 32  # neurons per word of bits


@dataclass(frozen=True)
class Submit(Operation):
    """The copy of x and of the predictor's choice to the host. out: x, unchanged. scores: mask's scores."""

    out: Value
    x: Value
    scores: Value | None
    mask: Mask | None


@dataclass(frozen=True)
class SubmitExperts(Operation):
    """The copy of x and of a route's experts to the host.

    out = the route with slots instead of experts; -1 for an expert without a slot.
    """

    out: Value
    x: Value
    route: Value


@dataclass(frozen=True)
class HotScores(Operation):
    """out = the scores of the hot neurons; a neuron without a score gets the threshold of `mask`."""

    out: Value
    scores: Value
    mask: Mask


@dataclass(frozen=True)
class Gather(Operation):
    """out = x + the sum of the cold neurons. A residual is added by the same dispatch (steps.py)."""

    out: Value
    x: Value


SplitOperation = Submit | SubmitExperts | HotScores | Gather


# -- the device's part of an FFN -----------------------------------------------------------------


def hot_part(ffn: Ffn, n_hot: int, ids: Iterator[int]) -> Ffn:
    """Return the same FFN with n_hot neurons, and values of that width. ids: numbers for new values."""
    names = "gate", "up", "gate_act", "gate_threshold", "up_act", "product", "down_threshold"
    inside: dict[str, Operation] = {name: op for name in names if (op := getattr(ffn, name)) is not None}
    if ffn.mask is not None:
        inside["select"] = ffn.mask
    replaced = [op.out for op in inside.values()]  # type: ignore[attr-defined]
    replaced += [] if ffn.mask is None else [ffn.mask.scores]
    values = {value: Value(next(ids), n_hot, value.name) for value in replaced}

    def held(op: Any) -> Any:
        named = {field.name: getattr(op, field.name) for field in fields(op)}
        own = {name: values[v] for name, v in named.items() if isinstance(v, Value) and v in values}
        return replace(op, **own, **({"first": 0} if isinstance(op, Mask) else {}))

    down = replace(held(ffn.down), out=replace(ffn.down.out, id=next(ids)))
    return replace(ffn, down=down, **{name: held(op) for name, op in inside.items()})


def operations_before(ffn: Ffn, hot: Ffn) -> list[SplitOperation]:
    """Return the operations before the products of the hot part of an FFN."""
    x, mask = ffn.up.x, ffn.mask
    if mask is None or hot.mask is None:
        return [Submit(x, x, None, None, layer=ffn.layer, part="ffn")]
    return [
        Submit(x, x, mask.scores, mask, layer=ffn.layer, part="ffn"),
        HotScores(hot.mask.scores, mask.scores, mask, layer=ffn.layer, part="ffn"),
    ]


def of_slots(ffn: Ffn, ids: Iterator[int]) -> Iterator[Primitive | SplitOperation]:
    """Yield the device's operations of an MoE layer with experts in slots. ids: numbers for new values."""
    route = ffn.route
    assert route is not None
    slots = Value(next(ids), route.out.width, "slots")
    for op in ffn.primitives:
        yield replace(op, route=slots) if isinstance(op, ExpertLinear | ExpertSum) else op
        if op is route:
            yield SubmitExperts(slots, ffn.up.x, route.out, layer=ffn.layer, part="ffn")


# -- recording -----------------------------------------------------------------------------------


def exchange_bytes(ffns: Sequence[Ffn], max_batch: int) -> tuple[int, int, int]:
    """Return the bytes of the three exchange buffers between device and CPU.

    They hold rows of inputs, the selection (a bit per neuron, or a word per expert), and rows of results.
    """
    n_used = [0 if ffn.route is None else ffn.route.n_used for ffn in ffns]
    words = [n or -(-ffn.n_ff // _WORD) for ffn, n in zip(ffns, n_used, strict=True)]
    row = 4 * max_batch * ffns[0].out.width
    return aligned(row), aligned(4 * max_batch * max(words)), aligned(row * max(*n_used, 1))


class SharedLayers:
    """The layers of a stage whose neurons or experts are split, and the memory through which rows pass.

    hot: by layer, bool [n_ff], the device's neurons, at least one. experts: the device's experts of MoE
    layers. worker: computes the rest. neurons: `hot` as numbers. nbytes: bytes of the exchange memory.
    """

    def __init__(
        self,
        device: _core.VulkanDevice,
        graph: Graph,
        hot: Mapping[int, np.ndarray],
        experts: VulkanExpertCache | None,
        worker: CpuWorker,
    ) -> None:
        self.neurons = {layer: np.flatnonzero(mask) for layer, mask in hot.items()}
        self.experts = experts
        self._worker, ffns = worker, [ffn for layer, ffn in split_ffns(graph).items() if layer in hot]
        ffns += [] if experts is None else [ffn for ffn in moe_layers(graph).values() if ffn.layer in experts]
        of_rows, of_asked, of_answers = exchange_bytes(ffns, worker.max_batch)
        asked = device.allocate(of_rows + of_asked, "from_device")
        answers = device.allocate(of_answers, "to_device")
        self._x, self._asked = BufferRange(asked, 0, of_rows), BufferRange(asked, of_rows, of_asked)
        self._answers = BufferRange(answers, 0, of_answers)
        self.nbytes = asked.reserved + answers.reserved
        self.exchange = _core.VulkanExchange(worker.plan, asked, answers, of_rows)

    def __contains__(self, ffn: Ffn) -> bool:
        """Return whether the neurons or experts of an FFN are split."""
        if ffn.route is None:
            return ffn.layer in self.neurons
        return self.experts is not None and ffn.layer in self.experts

    def check_taps(self, ffns: Iterable[Ffn], taps: Collection[str]) -> None:
        """Raise InvalidRequestError if a tap is a value inside a split FFN."""
        for ffn in ffns:
            seen = {ffn.up.x.name} if ffn.route is None else {ffn.up.x.name, ffn.route.out.name}
            inside = {op.out.name for op in ffn.primitives if op is not ffn.down} - seen
            if ffn in self and (found := inside.intersection(taps)):
                what = "neurons" if ffn.route is None else "experts"
                raise InvalidRequestError(
                    f"{min(found)} cannot be tapped: the {what} of layer {ffn.layer} are split between the "
                    "Vulkan device and the CPU; use split='layers'"
                )

    def gather_experts(self, to: Recorder, layer: int, n: int) -> _core.VulkanBinding | None:
        """Record the wait for the CPU's experts of n tokens, and return a binding of their rows.

        The rows are float32 [n, n_used, width]. Return None if the layer has no expert cache.
        """
        if self.experts is None or layer not in self.experts:
            return None
        to.program.wait_for_host(self._worker.index_of(layer))
        return self._answers.bound(4 * n * self._worker.answer_width(layer))

    def lower(self, op: SplitOperation, parts: Values, out: Value, residual: Value | None) -> Record:
        """Return the record of one of the operations of this file.

        out, residual: for Gather, its result, and the value that is added to it.
        """
        match op:
            case Submit():
                return self._submit(op, parts)
            case SubmitExperts():
                return self._submit_experts(op, parts)
            case HotScores():
                return self._hot_scores(op, parts)
            case Gather():
                return self._gather(op, parts, out, residual)

    def _submit(self, op: Submit, parts: Values) -> Record:
        mask, scores = op.mask, op.scores

        def record(to: Recorder, n: int) -> None:
            self._copy(op.x, parts, to, n)
            if mask is not None and scores is not None:
                n_words = -(-mask.x.width // _WORD)
                read = parts.read(scores, n)
                bits = self._asked.bound(4 * n * n_words, written=True)
                of_bits = n_words, stride_of(scores), n_words, *_numbers(mask)
                to.add("neurons", [1], [read, read, bits], of_bits, by_values(n_words, n))
            to.program.hand_over()

        return record

    def _copy(self, x: Value, parts: Values, to: Recorder, n: int) -> None:
        """Record the copy of n rows to memory that the host sees."""
        rows, copied = parts.read(x, n), self._x.bound(4 * n * x.width, written=True)
        push = x.width, stride_of(x), 0, x.width, x.width, 0, 1.0, 0.0, 0.0, 0.0
        to.add("elementwise", [_SCALE, 0], [rows, rows, copied], push, by_values(x.width, n))

    def _submit_experts(self, op: SubmitExperts, parts: Values) -> Record:
        assert self.experts is not None
        table, n_used = self.experts.table(op.layer), op.out.width // 2
        push = n_used, stride_of(op.route), stride_of(op.out)

        def record(to: Recorder, n: int) -> None:
            self._copy(op.x, parts, to, n)
            asked = self._asked.bound(4 * n * n_used, written=True)
            bindings = [parts.read(op.route, n), table.bound(), parts.written(op.out, n), asked]
            to.add("slots", [], bindings, push, by_values(op.out.width, n))
            to.program.hand_over()

        return record

    def _hot_scores(self, op: HotScores, parts: Values) -> Record:
        neurons = self.neurons[op.layer]
        numbers = parts.weights.made(("hot", op.layer), lambda: neurons)
        push = len(neurons), stride_of(op.scores), stride_of(op.out), *_numbers(op.mask)

        def record(to: Recorder, n: int) -> None:
            bindings = [parts.read(op.scores, n), numbers.bound(), parts.written(op.out, n)]
            to.add("neurons", [0], bindings, push, by_values(len(neurons), n))

        return record

    def _gather(self, op: Gather, parts: Values, out: Value, residual: Value | None) -> Record:
        width, index = op.x.width, self._worker.index_of(op.layer)
        kind, of_residual = (_ADD, 0) if residual is None else (_SUM, stride_of(residual))
        push = width, stride_of(op.x), width, stride_of(out), width, of_residual, 0.0, 0.0, 0.0, 0.0

        def record(to: Recorder, n: int) -> None:
            to.program.wait_for_host(index)
            bindings = [parts.read(op.x, n), self._answers.bound(4 * n * width), parts.written(out, n)]
            bindings += [] if residual is None else [parts.read(residual, n)]
            to.add("elementwise", [kind, 0], bindings, push, by_values(width, n))

        return record


def _numbers(mask: Mask) -> tuple[int, int, float]:
    return mask.x.width, mask.first, mask.threshold
