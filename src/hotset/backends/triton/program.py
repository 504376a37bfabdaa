"""Lowering of a stage's operations to kernel calls, done once. A step then makes these calls in order.

The calls follow the groups of model/fusion.py. An FFN whose neurons are often zero becomes one call, from its
norm to its residual. If some of its neurons are on the CPU, the layer is

    submit  copy the FFN's input and the predictor's bits to the CPU worker
    hot     meanwhile compute the device's own rows
    collect add the sum of the cold rows, which the CPU worker returns

For a long prompt the device computes the whole layer, and the cold rows stream in (stream.py). An FFN that
does not wait for attention (falcon's) is submitted before it, so that the CPU can use attention's time too.

In an MoE model the router is on the device, and the device submits the ids of each token's experts. The CPU
returns a vector for each, and the device weights and adds them in the order of the route. Shared experts are
computed before the answer is collected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from hotset.backends.decoded import decoded_vector
from hotset.backends.device.stage import DeviceWorker
from hotset.backends.triton.experts_fetch import Fetcher, FetchPlan
from hotset.backends.triton.fallback import N_COUNTS, Entering, TokenThreshold
from hotset.backends.triton.kernels import Kernels
from hotset.backends.triton.kv import BlockCache, StepInputs
from hotset.backends.triton.stream import CopyStream, CpuWorkerRows
from hotset.backends.triton.weights import DeviceWeights
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.model import operations as ops
from hotset.model.fusion import Fused, fuse
from hotset.model.graph import Graph, thresholded_products
from hotset.model.operations import PARTS, Primitive, Value, has_zeros, one_matrix
from hotset.model.rope import position_gain


class CpuWorkerProtocol(DeviceWorker, Protocol):
    """The CPU worker of split layers (cpu_offload.CpuOffload), for steps of up to max_batch tokens.

    capturable: whether submit and collect only put work on the device's stream, so that a graph can
    capture them; otherwise the host waits in between.
    """

    max_batch: int

    @property
    def capturable(self) -> bool: ...

    def step(self, n_tokens: int, thresholded: np.ndarray | None = None) -> AbstractContextManager[None]:
        """Return a context in which layers are submitted and collected.

        Its end waits for the device. thresholded: as in Batch.

        Raises if the CPU worker failed. An exception in the block releases waiting threads.
        """
        ...

    def submit(self, layer: int, h: Tensor, bits: Tensor | None) -> None:
        """Submit the FFN's input [T, n_embd] and the predicted neurons, uint8 [T, ceil(n_ff / 8)].

        bits: None, for a layer without predictor, requests all cold neurons. Bits of hot neurons may be set.
        In an MoE model bits is int32 [T, n_used], each token's experts, -1 - id for experts of the device.
        """
        ...

    def collect(self, layer: int) -> Tensor:
        """Return the sum of the cold neurons, float32 [T, n_embd] on the device, without bias and residual.

        In an MoE model return [T, n_used * n_embd]: a row for each requested expert, its bias included.
        """
        ...

    def route(self, layer: int) -> np.ndarray:
        """Return the submitted experts of the latest step of an MoE model, int32 [n_tokens, n_used]."""
        ...


@dataclass
class RunningStep:
    """A step in progress. n: tokens. outputs: rows of requested logits, int32 on the device.

    values: by id, dropped after their last use. streamed: cold rows stream to the device, and the CPU worker
    is idle. warming: the result is not used, so only two parts stream, the number held at a time.
    """

    n: int
    inputs: StepInputs
    outputs: Tensor
    streamed: bool
    warming: bool = False
    values: dict[int, Tensor] = field(default_factory=dict)
    # layer → FFN input, bits
    submitted: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)  # layer → weights of each token's experts
    own: dict[int, Tensor] = field(default_factory=dict)  # layer → results of the device's experts
    choices: dict[int, FetchPlan] = field(default_factory=dict)  # layer → division of each token's experts
    angles: dict[ops.Rope, Tensor] = field(default_factory=dict)
    normed: dict[int, Entering] = field(default_factory=dict)  # by the id of an RMSNorm's input


@dataclass(eq=False)
class Call:
    """A call for one group of operations. layer: 0 outside of the layers. part: an index of PARTS.

    reads, outs: values that the call needs and makes. inside: sum of the widths of its temporary values.
    kind: used to reorder calls, such as an FFN or a router that does not wait for attention. drops: ids of
    values that no later call reads.
    """

    run: Callable[[RunningStep], None]
    layer: int
    part: int
    reads: tuple[Value, ...]
    outs: tuple[Value, ...]
    inside: int = 0
    kind: Literal["route", "submit", "collect", "attention", "outputs", ""] = ""
    drops: tuple[int, ...] = ()


@dataclass(frozen=True)
class StageParts:
    """The parts of a stage that its programs use. hot, input_major: see GpuStage.

    counts: int64 [n_layer, N_COUNTS], updated in place. sparse: False computes every neuron of an FFN.
    """

    weights: DeviceWeights
    cache: BlockCache
    kernels: Kernels
    hot: dict[int, np.ndarray]
    cold: CpuWorkerProtocol | None
    counts: Tensor
    copies: CopyStream
    fetcher: Fetcher | None
    n_ctx: int
    sparse: bool
    stream_bytes: int
    input_major: Collection[str]


class Program:
    """The calls of a stage for one set of taps. body: for every token; tail: only for rows with logits.

    Raises UnsupportedModelError for a split layer whose FFN cannot be split by neurons, and
    InvalidRequestError for a tap inside a split layer.
    """

    def __init__(self, graph: Graph, taps: frozenset[str], parts: StageParts) -> None:
        self._weights, self._cache, self._kernels = parts.weights, parts.cache, parts.kernels
        self._hot, self._cold, self._counts = parts.hot, parts.cold, parts.counts
        self._fetcher = parts.fetcher
        self._n_ctx, self._sparse, self._stream_bytes = parts.n_ctx, parts.sparse, parts.stream_bytes
        self._copies = parts.copies
        self._input_major = _read_input_major(graph, parts.hot, parts.input_major if parts.sparse else ())
        groups = fuse(graph, taps)
        self._check_split(groups, taps)
        self._kept_names = taps
        self.has_neurons = any(group.ffn is not None and group.ffn.leaves_out for group in groups)
        self.taps = {value.id for value in graph.values if value.name in taps}
        self._bits_of = self._scores_of_bits(groups, graph)
        self._norms_ahead = self._norms_of_products(groups)
        self._projections = self._projections_of_heads(groups)
        calls = _submitted_early([call for group in groups for call in self._calls(group)])
        calls = _gathered_late(calls)
        self._early = _routed_early(calls)
        last_use = {v.id: i for i, call in enumerate(calls) for v in [*call.outs, *call.reads]}
        last_use.pop(graph.result.id)
        n_body = next((i for i, call in enumerate(calls) if call.kind == "outputs"), len(calls))
        for i, call in enumerate(calls[:n_body]):  # the tail drops nothing: it runs once per slice of outputs
            call.drops = tuple(id for id, last in last_use.items() if last == i)
        self.body, self.tail = calls[:n_body], calls[n_body:]
        self._kept = self.tail[0].reads[0].width if self.tail else 0  # width of the body's value for the tail
        self._widths = _most_alive(self.body), _most_alive(self.tail)

    def n_live(self, n_tokens: int, n_outputs: int) -> int:
        """Return the peak count of numbers in a step's live values."""
        body, tail = self._widths
        return max(n_tokens * body, n_tokens * self._kept + n_outputs * tail)

    # ---- groups → calls ----

    def _scores_of_bits(self, groups: list[Fused], graph: Graph) -> dict[int, ops.Mask]:
        """Find predictor scores of which only the bits are used, by id.

        If one product makes the scores, it makes the bits directly, and the value holds the bits.
        """
        masks = {f.mask.scores.id: f.mask for group in groups if (f := group.ffn) is not None and f.mask}
        readers = Counter(value.id for group in groups for value in group.reads)
        return {
            value.id: masks[value.id]
            for group in groups
            if len(group.ops) == len(group.linears) == 1
            and (value := group.out[0]).id in masks
            and readers[value.id] == 1
            and value.name not in self._kept_names
            and value != graph.result
        }

    def _norms_of_products(self, groups: list[Fused]) -> dict[int, ops.RMSNorm]:
        """Find RMSNorms that the product before them can compute, and return them by the id of their input.

        Only one group of products may read such a norm.
        """
        readers: dict[int, list[Fused]] = {}
        for group in groups:
            if isinstance(norm := _norm_of(group), ops.RMSNorm | ops.LayerNorm):
                readers.setdefault(norm.x.id, []).append(group)
        made = {group.out[0].id for group in groups if self._ends_in_product(group)}
        return {
            id: _norm_of(by[0])
            for id, by in readers.items()
            if id in made and len(by) == 1 and self._takes_weighed(by[0])
        }

    def _ends_in_product(self, group: Fused) -> bool:
        """Return whether a group's value is one product by rows, possibly with a sum."""
        if (ffn := group.ffn) is None:
            operations, alone = group.linears, len(group.linears) == 1 and group.first(ops.Activate) is None
            return alone and group.out[0].id not in self._bits_of and not self._is_input_major(operations)
        whole = ffn.route is None and ffn.layer not in self._hot
        return whole and isinstance(ffn.down, ops.Linear) and not self._is_input_major([ffn.down])

    def _takes_weighed(self, group: Fused) -> bool:
        """Return whether only products by rows read the result of a group's RMSNorm."""
        if not isinstance(norm := _norm_of(group), ops.RMSNorm) or norm.n_head > 1:
            return False
        if (ffn := group.ffn) is None:
            is_plain = group.first(ops.Threshold) is None and group.out[0].id not in self._bits_of
            return is_plain and not self._is_input_major(group.linears)
        if ffn.in_threshold is not None or ffn.route is not None or ffn.layer in self._hot:
            return False
        linears = [one_matrix(op) for op in (ffn.gate, ffn.up) if op is not None]
        by_rows = self._leaves_out_rows(ffn) and self._sparse
        return not by_rows and not self._is_input_major(linears)

    def _is_input_major(self, linears: list[ops.Linear]) -> bool:
        return any(op.weight in self._input_major for op in linears)

    def _projections_of_heads(self, groups: list[Fused]) -> dict[int, Fused]:
        """Find attention whose queries, keys and values are one product and need only RoPE.

        Return its groups by the id of the queries before RoPE.
        """
        readers = Counter(value.id for group in groups for value in group.reads)
        products = {tuple(group.out): group for group in groups if len(group.linears) == 3}
        found = {}
        for group in groups:
            if not isinstance(group.ops[-1], ops.Attention):
                continue
            heads = _heads_of(group)
            product = products.get((heads.q, heads.k, heads.v))
            if product is None or heads.rope is None or heads.q_norm or heads.k_norm:
                continue
            private = all(readers[v.id] == 1 and v.name not in self._kept_names for v in product.out)
            if (
                private
                and len(self._stacks(product.linears)) == 1
                and not self._is_input_major(product.linears)
            ):
                found[heads.q.id] = group
        return found

    def _check_split(self, groups: list[Fused], taps: frozenset[str]) -> None:
        """Check that each split layer has an FFN that can be split, without taps inside.

        Raises InvalidRequestError for a tap, and UnsupportedModelError otherwise.
        """
        split = {
            group.layer
            for group in groups
            if (ffn := group.ffn) is not None and ffn.can_be_split and ffn.selected.name not in taps
        }
        for layer in self._hot:
            if layer in split and self._sparse:
                continue
            inside = [name for name in taps if name.startswith(f"blk.{layer}.ffn_")]
            if inside:
                raise InvalidRequestError(
                    f"{min(inside)} cannot be tapped: the neurons of layer {layer} are split between GPU and "
                    "CPU; use device='cpu'"
                )
            raise UnsupportedModelError(
                f"the neurons of layer {layer} cannot be split between GPU and CPU: its FFN has no zeros, "
                "or only known ones when all gates are, or a norm of all neurons, or its down projection has "
                "no row per neuron"
            )

    def _calls(self, group: Fused) -> list[Call]:
        """Return the calls of a group.

        Most groups have one call, a split FFN two (submit, then compute and collect), an MoE layer three.
        """
        layer, part = max(group.layer, 0), PARTS.index(group.part)
        activate = group.first(ops.Activate) if group.ffn is None else group.ffn.gate_act
        if activate is not None and activate.xielu is not None:
            raise UnsupportedModelError("xIELU is computed on the CPU; use device='cpu'")
        outs, reads = tuple(group.out), tuple(group.reads)
        inside = sum(op.out.width for op in group.ops if op.out not in group.out)
        if (ffn := group.ffn) is not None:
            if ffn.route is not None:
                return self._experts(group, ffn)
            inside += sum(op.out.width for op in ffn.primitives if op.out != ffn.out)
            residual = group.residual(ffn.out)
            if layer not in self._hot:
                kept = tuple(v for v in (ffn.selected,) if v.name in self._kept_names)
                run = self._whole(ffn, residual, group.out[0])
                return [Call(run, layer, part, reads, (*kept, *outs), inside)]
            before = ffn.inputs
            after = () if residual is None else (residual,)
            submit, finish = self._split(ffn, residual, group.out[0])
            return [
                Call(submit, layer, part, before, (), ffn.x.width, "submit"),
                Call(finish, layer, part, after, outs, inside),
            ]
        main = group.ops[-1]
        kind: Any = {ops.Attention: "attention", ops.SelectOutputs: "outputs"}.get(type(main), "")
        return [Call(self._lower(group), layer, part, reads, outs, inside, kind)]

    def _lower(self, group: Fused) -> Callable[[RunningStep], None]:
        main = group.ops[-1]
        if group.linears:
            return self._linears(group)
        if isinstance(first := group.ops[0], ops.TransposedLinear):
            return self._transposed(group, first)
        out = main.out.id
        match main:
            case ops.Embed():
                return lambda f: f.values.__setitem__(out, f.inputs.vectors[out][: f.n])
            case ops.SelectOutputs():
                if main.n > 1:
                    raise UnsupportedModelError("joined tokens are computed on the CPU; use device='cpu'")
                x = main.x.id
                return lambda f: f.values.__setitem__(out, f.values[x].index_select(0, f.outputs))
            case ops.Attention():
                return self._attention(group, main)
            case ops.Threshold():
                left = self._entered(main.x, None, main)
                return lambda f: f.values.__setitem__(out, left(f))
            case ops.Rotate():
                return self._rotate(main)
            case ops.PositionGain():
                return self._position_gain(main)
            case (
                ops.RMSNorm() | ops.LayerNorm() | ops.Activate() | ops.GaussianTopK() | ops.Mask() | ops.Add()
                | ops.Multiply() | ops.Scale() | ops.SoftCap()
            ):  # fmt: skip
                compute = self._elementwise(main)
                return lambda f: f.values.__setitem__(out, compute(f.values))
            case ops.Route() | ops.ExpertLinear() | ops.ExpertSum():
                # Parts of an FFN that is not fused, because of a tap or predictors of experts.
                raise UnsupportedModelError(
                    "experts with predictors, and values inside experts, are computed only on the CPU; use "
                    "device='cpu'"
                )
            case ops.Linear() | ops.TransposedLinear() | ops.Ffn():
                raise AssertionError(f"{main.out.name} is not the last operation of a group")
            case _:
                raise UnsupportedModelError(
                    f"the operation {type(main).__name__} is computed on the CPU; use device='cpu'"
                )

    def _elementwise(self, op: Primitive) -> Callable[[dict[int, Tensor]], Tensor]:
        k = self._kernels
        match op:
            case ops.RMSNorm() | ops.LayerNorm():
                norm, x = self._norm(op), op.x.id
                return lambda v: norm(v[x], None)
            case ops.Activate():
                x, kind, threshold = op.x.id, op.kind, op.threshold
                return lambda v: k.activate(v[x], kind, threshold)
            case ops.GaussianTopK():
                x, multiplier = op.x.id, op.multiplier
                return lambda v: k.gaussian_top_k(v[x], multiplier)
            case ops.Mask():
                x, scores, least, first = op.x.id, op.scores.id, op.threshold, op.first
                return lambda v: v[x] * torch.nn.functional.pad(~(v[scores] < least), (first, 0), value=True)
            case ops.Add():
                a, b = op.a.id, op.b.id
                return lambda v: v[a] + v[b]
            case ops.Multiply():
                a, b = op.a.id, op.b.id
                return lambda v: v[a] * v[b]
            case ops.Scale():
                x, factor = op.x.id, op.factor
                if op.weight is None:
                    return lambda v: v[x] * factor
                weight = self._weights.vector(op.weight)
                return lambda v: v[x] * factor * weight
            case ops.SoftCap():
                x, cap = op.x.id, op.cap
                return lambda v: torch.tanh(v[x] / cap) * cap
            case _:
                raise AssertionError(f"{op.out.name} is not a value of an elementwise operation")

    def _norm_weight(self, op: ops.RMSNorm | ops.LayerNorm) -> Tensor:
        if op.weight is None:
            return self._weights.made(("ones", op.x.width), lambda: np.ones(op.x.width, np.float32))
        return self._weights.vector(op.weight)

    def _norm(self, op: ops.RMSNorm | ops.LayerNorm) -> Callable[[Tensor, TokenThreshold | None], Tensor]:
        """Return a function that applies a norm and then a threshold."""
        k, eps = self._kernels, op.eps
        if isinstance(op, ops.LayerNorm) and op.n_head > 1:
            raise UnsupportedModelError("layer norms of heads are computed on the CPU; use device='cpu'")
        weight = self._norm_weight(op)
        if isinstance(op, ops.LayerNorm):
            bias = self._weights.bias(op.bias)
            return lambda x, by: k.layer_norm(x, weight, bias, eps, by)
        n_head = op.n_head
        return lambda x, by: k.rms_norm(x, weight, eps, n_head, by)

    def _entered(
        self, x: Value, norm: ops.RMSNorm | ops.LayerNorm | None, input_threshold: ops.Threshold | None
    ) -> Callable[[RunningStep], Any]:
        """Return a function for the input of a product: x, normalised, without small values.

        It may return Weighed, but only if the product before computes the norm.
        """
        id, by, k = x.id, _token_threshold(input_threshold), self._kernels
        if norm is not None and id in self._norms_ahead:
            return lambda f: f.normed.pop(id)
        if norm is not None:
            normalised = self._norm(norm)
            return lambda f: normalised(f.values[id], by(f))
        if input_threshold is None:
            return lambda f: f.values[id]
        return lambda f: k.zero_small(f.values[id], by(f))

    def _linears(self, group: Fused) -> Callable[[RunningStep], None]:
        """Lower products of one input with their fused operations.

        These are a norm and a threshold before the products, and an activation or a sum after them.
        """
        linears, norm, input_threshold = (
            group.linears,
            group.first(ops.RMSNorm, ops.LayerNorm),
            group.first(ops.Threshold),
        )
        x, residual = (norm or input_threshold or linears[0]).x, _id(group.residual(linears[0].out))
        outs, k, activate = [value.id for value in group.out], self._kernels, group.first(ops.Activate)
        if (mask := self._bits_of.get(outs[0])) is not None:
            (op,), threshold, first = linears, mask.threshold, mask.first
            matrix, bias = self._weights.linear(op), self._weights.biases([op])

            def select(f: RunningStep) -> None:
                f.values[outs[0]] = k.linear_bits(f.values[x.id], matrix, bias, threshold, first)

            return select
        if (attention := self._projections.get(outs[0])) is not None:
            return self._project_heads(linears, attention, self._entered(x, norm, input_threshold))
        if outs[0] in self._norms_ahead:
            (op,), entered = linears, self._entered(x, norm, input_threshold)
            project = self._product_and_norm(op, outs[0])

            def project_with_norm(f: RunningStep) -> None:
                project(f, entered(f), None if residual is None else f.values[residual])

            return project_with_norm
        after = {} if activate is None else {"activation": activate.kind, "threshold": activate.threshold}
        entered, products = self._entered(x, norm, input_threshold), self._products(linears, after)

        def run(f: RunningStep) -> None:
            added = None if residual is None else f.values[residual]
            f.values.update(zip(outs, products(entered(f), added), strict=True))

        return run

    def _product_and_norm(
        self, op: ops.Linear, out: int
    ) -> Callable[[RunningStep, Tensor, Tensor | None], None]:
        """Lower a product together with the RMSNorm that reads its value."""
        norm, k = self._norms_ahead[out], self._kernels
        rows, bias, weight = self._weights.linear(op), self._weights.biases([op]), self._norm_weight(norm)

        def run(f: RunningStep, h: Tensor, added: Tensor | None) -> None:
            f.values[out], f.normed[out] = k.linear_normed(h, rows, bias, added, weight, norm.eps)

        return run

    def _project_heads(
        self, linears: list[ops.Linear], attention: Fused, entered: Callable[[RunningStep], Any]
    ) -> Callable[[RunningStep], None]:
        """Lower queries, keys and values to one product that also rotates and stores them.

        Its value is the queries.
        """
        main, heads, k = attention.ops[-1], _heads_of(attention), self._kernels
        assert isinstance(main, ops.Attention)
        assert heads.rope is not None
        rows, bias = self._weights.linear(*linears), self._weights.biases(linears)
        (k_blocks, v_blocks), angles = self._cache.layers[main.layer], self._angles(heads.rope)
        kind, n_head, out = heads.rope.kind, main.n_head, heads.q.id

        def run(f: RunningStep) -> None:
            f.values[out] = k.project_heads(
                entered(f), rows, bias, angles(f), k_blocks, v_blocks, *_where(f), n_head=n_head, kind=kind
            )

        return run

    def _products(
        self, linears: list[ops.Linear], after: dict[str, Any] | None = None
    ) -> Callable[[Tensor, Tensor | None], list[Tensor]]:
        """Return a function for products of one input, with a sum for each.

        after: the activation; it is allowed only for a single product.
        """
        assert not after or len(linears) == 1
        stacks = self._stacks(linears)
        products = [self._product(operations, after or {}) for operations in stacks]
        widths = [[op.out.width for op in operations] for operations in stacks]

        def run(h: Tensor, added: Tensor | None) -> list[Tensor]:
            return [
                result
                for product, width in zip(products, widths, strict=True)
                for result in product(h, added).split(width, dim=1)
            ]

        return run

    def _stacks(self, linears: list[ops.Linear]) -> list[list[ops.Linear]]:
        """Stack products of one input and type, such as q, k and v, or gate and up.

        This makes fewer and larger launches.
        """
        kinds = {
            (self._weights.source.tensors[op.weight].type, op.weight in self._input_major) for op in linears
        }
        return [linears] if len(kinds) == 1 else [[op] for op in linears]

    def _product(
        self, operations: list[ops.Linear], after: dict[str, Any]
    ) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Return a function for one product with matrices of one type.

        With input-major matrices it does not read the rows of zero inputs.
        """
        bias, k = self._weights.biases(operations), self._kernels
        if operations[0].weight not in self._input_major:
            rows = self._weights.linear(*operations)
            return lambda h, added: k.linear(h, rows, bias, added, **after)
        matrix, left_out = (
            self._weights.input_major(*operations),
            self._counts[operations[0].layer, N_COUNTS - 1 :],
        )

        def run(h: Tensor, added: Tensor | None) -> Tensor:
            y = k.linear_t(h, matrix, bias, added, left_out=left_out)
            return k.activate(y, after["activation"], after["threshold"]) if after else y

        return run

    def _transposed(self, group: Fused, main: ops.TransposedLinear) -> Callable[[RunningStep], None]:
        matrix, bias = self._weights.down(main), self._weights.bias(main.bias)
        x, out, k = main.x.id, group.out[0].id, self._kernels
        residual = _id(group.residual(main.out))

        def run(f: RunningStep) -> None:
            added = None if residual is None else f.values[residual]
            f.values[out] = k.linear_t(f.values[x], matrix, bias, added)

        return run

    def _rotate(self, op: ops.Rotate) -> Callable[[RunningStep], None]:
        angles, x, out, k = self._angles(op.rope), op.x.id, op.out.id, self._kernels

        def run(f: RunningStep) -> None:
            f.values[out] = k.rotate(f.values[x], angles(f), n_head=op.n_head, kind=op.rope.kind)

        return run

    def _position_gain(self, op: ops.PositionGain) -> Callable[[RunningStep], None]:
        """Look up the gain of each token in a table with one entry for each length of the context."""
        firsts = np.arange(-(-self._n_ctx // op.length)) * op.length
        table = self._weights.made(("gain", op.beta, op.length), lambda: position_gain(op, firsts))
        out = op.out.id

        def run(f: RunningStep) -> None:
            f.values[out] = table.index_select(0, f.inputs.positions[: f.n] // op.length)

        return run

    def _angles(self, rope: ops.Rope) -> Callable[[RunningStep], Tensor]:
        """Return a function for cos and sin of the step's positions.

        The first layer that needs them computes them.
        """
        k = self._kernels
        table = self._weights.rope(rope, self._n_ctx)

        def angles(f: RunningStep) -> Tensor:
            if rope not in f.angles:
                f.angles[rope] = k.angles(f.inputs.positions[: f.n], table)
            return f.angles[rope]

        return angles

    def _attention(self, group: Fused, main: ops.Attention) -> Callable[[RunningStep], None]:
        """Lower attention with its fused head norms and rotations."""
        if not main.causal:
            raise UnsupportedModelError("attention of encoders is computed on the CPU; use device='cpu'")
        if main.blocks is not None or main.chosen is not None:
            what = "blocks" if main.chosen is None else "the keys that an indexer chose"
            raise UnsupportedModelError(f"attention to {what} is computed on the CPU; use device='cpu'")
        if main.slopes is not None or main.first_seen:
            what = "attention with ALiBi" if main.slopes is not None else "a layer for multi-token prediction"
            raise UnsupportedModelError(f"{what} is computed on the CPU; use device='cpu'")
        sinks = self._weights.bias(main.sinks)
        heads, k = _heads_of(group), self._kernels
        norms: dict[str, Any] = {"q_norm": None, "k_norm": None, "eps": 0.0}
        for side, norm in (("q_norm", heads.q_norm), ("k_norm", heads.k_norm)):
            if norm is not None:
                norms[side], norms["eps"] = self._weights.vector(norm.weight), norm.eps
        k_blocks, v_blocks = self._cache.layers[main.layer]
        rope, is_stored = heads.rope, heads.q.id in self._projections
        angles = self._angles(rope) if rope else None
        kind = rope.kind if rope else "norm"
        ids, out = (heads.q.id, heads.k.id, heads.v.id), main.out.id

        def run(f: RunningStep) -> None:
            where = _where(f)
            queries = f.values[ids[0]]
            if not is_stored:
                keys, values = (f.values[id] for id in ids[1:])
                if angles is None:
                    k.store_kv(keys, values, k_blocks, v_blocks, *where)
                else:
                    queries = k.rotate_store(
                        queries, keys, values, angles(f), k_blocks, v_blocks, *where,
                        n_head=main.n_head, kind=kind, **norms,
                    )  # fmt: skip
            f.values[out] = k.attention(
                queries, k_blocks, v_blocks, *where,
                n_head=main.n_head, scale=main.scale, window=main.window, softcap=main.softcap,
                sinks=sinks,
            )  # fmt: skip

        return run

    # ---- MoE models

    def _experts(self, group: Fused, ffn: ops.Ffn) -> list[Call]:
        """Lower an MoE layer to three calls: route, submit to the CPU worker, and sum collected results."""
        op, cold, k, layer = ffn.select, self._cold, self._kernels, ffn.layer
        if not isinstance(op, ops.Route) or cold is None or ffn.selected.name in self._kept_names:
            raise UnsupportedModelError(
                "experts with predictors, and values inside experts, are computed only on the CPU; use "
                "device='cpu'"
            )
        if op.table is not None or op.scoring == "sqrt_softplus":
            raise UnsupportedModelError(
                "experts that a table names, or scores that are roots, are computed on the CPU; use "
                "device='cpu'"
            )
        entered, scores, gate_threshold = (
            self._entered(ffn.x, ffn.norm, ffn.in_threshold),
            op.x.id,
            _token_threshold(ffn.gate_threshold),
        )
        bias, scales = self._weights.bias(op.bias), self._weights.bias(op.scales)
        out, added_id = group.out[0].id, _id(group.residual(ffn.out))
        n_used, route_id = op.n_used, op.out.id if op.out.name in self._kept_names else None
        counts = self._counts[layer]
        fetcher = self._fetcher if self._fetcher is not None and layer in self._fetcher else None

        def route(f: RunningStep) -> None:
            ids, f.weights[layer] = k.route(f.values[scores], op, bias, scales)
            if route_id is not None:
                f.values[route_id] = torch.cat([ids.float(), f.weights[layer]], dim=1)
            if fetcher is None:
                f.choices[layer] = FetchPlan(ids, None)
            else:
                early = layer in self._early
                f.choices[layer] = fetcher.choose(layer, ids, early=early, warming=f.warming)

        def submit(f: RunningStep) -> None:
            h, choice = entered(f), f.choices[layer]
            cold.submit(layer, h, choice.asked)
            if fetcher is not None:
                f.own[layer] = fetcher.compute(layer, choice, h, counts, gate_threshold(f))

        def finish(f: RunningStep) -> None:
            parts = cold.collect(layer)
            parts = parts.view(len(parts), n_used, -1)
            choice, own = f.choices.pop(layer), f.own.pop(layer, None)
            added = None if added_id is None else f.values[added_id]
            asked = None if own is None else choice.asked
            f.values[out] = k.sum_experts(parts, f.weights.pop(layer), added, own, asked)

        part, inside = PARTS.index(group.part), 2 * n_used + ffn.x.width
        given = tuple(value for value in ffn.inputs if value != op.x)
        after = tuple(value for value in group.reads if value.id == added_id)
        answer = n_used * ffn.out.width * (1 if fetcher is None else 2)
        return [
            Call(route, layer, part, (op.x,), (op.out,), 0, "route"),
            Call(submit, layer, part, (*given, op.out), (), inside, "submit"),
            Call(finish, layer, part, after, tuple(group.out), answer, "collect"),
        ]

    # ---- FFNs

    def _bits(self, mask: ops.Mask | None) -> Callable[[RunningStep], Tensor | None]:
        if mask is None:
            return lambda _: None
        k, scores, threshold, first = self._kernels, mask.scores.id, mask.threshold, mask.first
        if scores in self._bits_of:
            return lambda f: f.values[scores]
        return lambda f: k.pack_bits(f.values[scores], threshold, first)

    def _whole(self, ffn: ops.Ffn, residual: Value | None, out: Value) -> Callable[[RunningStep], None]:
        """Lower an FFN with all neurons on the device. A tap keeps their values."""
        k, counts, selected = self._kernels, self._counts[ffn.layer], ffn.selected
        entered = self._entered(ffn.x, ffn.norm, ffn.in_threshold)
        bits, added_id = self._bits(ffn.mask), _id(residual)
        values, thresholds = self._values(ffn), _neuron_thresholds(ffn)
        is_kept = selected.name in self._kept_names
        down = ffn.down
        by_rows = self._leaves_out_rows(ffn) and self._sparse
        if isinstance(down, ops.TransposedLinear) and by_rows and not is_kept and ffn.sub_norm is None:
            given = self._rows(ffn, None) | _activations(ffn)
            matrix, bias = self._weights.down(down), self._weights.bias(down.bias)

            def fused(f: RunningStep) -> None:
                added = None if added_id is None else f.values[added_id]
                f.values[out.id] = k.sparse_ffn(
                    entered(f), down_t=matrix, down_bias=bias, residual=added, selected=bits(f),
                    counts=counts, **given, **thresholds(f),
                )  # fmt: skip

            return fused
        project = self._down(down, out.id)
        sub_norm = None if ffn.sub_norm is None else self._norm(ffn.sub_norm)

        def run(f: RunningStep) -> None:
            added = None if added_id is None else f.values[added_id]
            neurons = values(f, entered(f), bits(f))
            if is_kept:
                f.values[selected.id] = neurons
            if sub_norm is not None:
                neurons = sub_norm(neurons, None)
            project(f, neurons, added)

        return run

    def _down(
        self, op: ops.Linear | ops.TransposedLinear | ops.ExpertSum, out: int
    ) -> Callable[[RunningStep, Tensor, Tensor | None], None]:
        """Return a function for the down projection of neuron values, plus an addend."""
        k = self._kernels
        if isinstance(op, ops.TransposedLinear):
            neuron_major, bias = self._weights.down(op), self._weights.bias(op.bias)
            return lambda f, neurons, added: f.values.__setitem__(
                out, k.linear_t(neurons, neuron_major, bias, added)
            )
        assert isinstance(op, ops.Linear)
        if out in self._norms_ahead:
            return self._product_and_norm(op, out)
        products = self._products([op])
        return lambda f, neurons, added: f.values.__setitem__(out, products(neurons, added)[0])

    def _leaves_out_rows(self, ffn: ops.Ffn) -> bool:
        """Return whether single rows of gate and up are skipped.

        Otherwise both are read whole, or input-major.
        """
        by_threshold = ffn.gate_threshold is not None and one_matrix(ffn.up).weight not in self._input_major
        if ffn.top_k is not None:  # it needs all gates, and no program of a kernel has them all
            return False
        return has_zeros(ffn.gate_act.kind) or ffn.mask is not None or by_threshold

    def _values(self, ffn: ops.Ffn) -> Callable[[RunningStep, Tensor, Tensor | None], Tensor]:
        """Return a function for the neuron values, from the FFN's input and the bits of predicted neurons."""
        k, options, thresholds = self._kernels, _activations(ffn), _neuron_thresholds(ffn)
        counts = self._counts[ffn.layer] if ffn.has_zeros else None
        if (by_rows := self._leaves_out_rows(ffn)) and self._sparse:
            given = self._rows(ffn, None) | options
            return lambda f, h, bits: k.neurons(h, selected=bits, counts=counts, **given, **thresholds(f))
        linears = [one_matrix(op) for op in (ffn.gate, ffn.up) if op is not None]
        thresholded = ffn.gate_threshold is not None or ffn.down_threshold is not None
        plain = not (by_rows or ffn.has_zeros or thresholded or linears[0].weight in self._input_major)
        if plain and len(self._stacks(linears)[0]) == 2:
            both, bias = self._weights.linear(*linears), self._weights.biases(linears)
            return lambda _f, h, _bits: k.gated(h, both, bias, **options)
        products = self._products(linears)
        if (top_k := ffn.top_k) is not None:

            def above(f: RunningStep, h: Tensor, _: Tensor | None) -> Tensor:
                gate, up = products(h, None)
                gate = k.gaussian_top_k(gate, top_k.multiplier)
                values: Tensor = k.fired(gate, up, counts=counts, **options, **thresholds(f))
                return values

            return above
        return lambda f, h, bits: k.fired(
            *products(h, None), selected=bits, counts=counts, dense=by_rows, **options, **thresholds(f)
        )

    def _split(
        self, ffn: ops.Ffn, residual: Value | None, out: Value
    ) -> tuple[Callable[[RunningStep], None], Callable[[RunningStep], None]]:
        """Lower a split FFN to two functions: the submit, and the rest.

        Hot neurons are computed on the device; cold ones by the CPU worker, or on the device from streamed
        rows.
        """
        layer, hot, cold, k, down = ffn.layer, self._hot[ffn.layer], self._cold, self._kernels, ffn.down
        counts = self._counts[layer]
        assert cold is not None
        assert isinstance(down, ops.TransposedLinear)
        bias = self._weights.bias(down.bias)
        indices = np.flatnonzero(hot)
        held = self._weights.held(layer, indices, len(hot))
        options = _activations(ffn)
        given = self._rows(ffn, indices) | options
        down_t = self._weights.hot_rows(down, indices)
        gate = None if ffn.gate is None else one_matrix(ffn.gate)
        matrices = {"gate": gate, "up": one_matrix(ffn.up), "down_t": down}
        stream = CpuWorkerRows(self._weights, matrices, ~hot, self._stream_bytes, self._copies)
        entered = self._entered(ffn.x, ffn.norm, ffn.in_threshold)
        bits, added_id = self._bits(ffn.mask), _id(residual)
        thresholds = _neuron_thresholds(ffn)

        def submit(f: RunningStep) -> None:
            f.submitted[layer] = h, selected = entered(f), bits(f)
            if not f.streamed:
                cold.submit(layer, h, selected)

        def hot_half(f: RunningStep, h: Tensor, selected: Tensor | None, added: Tensor | None) -> Tensor:
            if len(indices):
                y: Tensor = k.sparse_ffn(
                    h, down_t=down_t, down_bias=bias, residual=added, selected=selected, held=held,
                    counts=counts, **given, **thresholds(f),
                )  # fmt: skip
                return y
            y = torch.zeros((len(h), down_t.n_cols), device=h.device) if added is None else added
            return y if bias is None else y + bias

        def finish(f: RunningStep) -> None:
            h, selected = f.submitted.pop(layer)
            y = hot_half(f, h, selected, None if added_id is None else f.values[added_id])
            if f.streamed:
                for i, part in enumerate(stream.parts()):
                    y = k.sparse_ffn(
                        h, selected=selected, residual=y, counts=counts, **part, **options, **thresholds(f)
                    )
                    del part  # otherwise three parts would be in memory while the next is made
                    if f.warming and i == 1:
                        break
            else:
                y = y + cold.collect(layer)
            f.values[out.id] = y

        return submit, finish

    def _rows(self, ffn: ops.Ffn, indices: np.ndarray | None) -> dict[str, Any]:
        """Return gate and up with their biases, for all neurons or some, by the kernels' argument names."""
        given: dict[str, Any] = {}
        for name, product in (("gate", ffn.gate), ("up", ffn.up)):
            if product is None:
                given[name] = None
                continue
            op = one_matrix(product)
            if indices is None:
                given[name], given[f"{name}_bias"] = self._weights.linear(op), self._bias(op)
                continue
            given[name] = self._weights.hot_rows(op, indices)
            if op.bias is not None:
                bias = decoded_vector(self._weights.source, op.bias)[op.first_row + indices]
                given[f"{name}_bias"] = self._weights.once(
                    (op.bias, op.first_row, "hot"), partial(self._weights.upload, bias)
                )
        return given

    # ---- small things ----

    def _bias(self, op: ops.Linear) -> Tensor | None:
        return self._weights.bias(op.bias, op.first_row, op.out.width)


@dataclass(frozen=True)
class _Heads:
    """The inputs of attention before head norms and rotation, with these norms and the rotation."""

    q: Value
    k: Value
    v: Value
    rope: ops.Rope | None
    q_norm: ops.RMSNorm | None
    k_norm: ops.RMSNorm | None


def _heads_of(group: Fused) -> _Heads:
    """Return the heads of a group that ends in attention, with its fused head norms and rotations."""
    main = group.ops[-1]
    assert isinstance(main, ops.Attention)
    q, k, rope = main.q, main.k, None
    norms: dict[str, ops.RMSNorm | None] = {"q": None, "k": None}
    for op in reversed(group.ops[:-1]):
        assert isinstance(op, ops.Rotate | ops.RMSNorm)
        if isinstance(op, ops.Rotate):
            rope = op.rope
        else:
            norms["q" if op.out == q else "k"] = op
        q, k = (op.x, k) if op.out == q else (q, op.x)
    return _Heads(q, k, main.v, rope, norms["q"], norms["k"])


def _where(f: RunningStep) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block tables, and the sequence and position of each token."""
    return f.inputs.block_tables, f.inputs.sequences[: f.n], f.inputs.positions[: f.n]


def _norm_of(group: Fused) -> Any:
    """Return the norm before a group's products, or None."""
    if group.ffn is not None:
        return group.ffn.norm
    return group.first(ops.RMSNorm, ops.LayerNorm) if group.linears else None


def _id(value: Value | None) -> int | None:
    return None if value is None else value.id


def _read_input_major(graph: Graph, hot: Collection[int], wanted: Collection[str]) -> frozenset[str]:
    """Return the requested matrices that can be input-major.

    Their input must be thresholded, and their rows must not be neurons that are skipped or split with the
    CPU.
    """
    by_row = set()
    for ffn in graph.ffns:
        both = [op.weight for op in (ffn.gate, ffn.up) if isinstance(op, ops.Linear)]
        one_by_one = ffn.fires_exactly or ffn.mask is not None or ffn.layer in hot
        if one_by_one or not set(both) <= set(wanted):
            by_row.update(both)
    return frozenset(op.weight for op in thresholded_products(graph) if op.weight in wanted) - by_row


def _token_threshold(op: ops.Threshold | None) -> Callable[[RunningStep], TokenThreshold | None]:
    """Return a function for the TokenThreshold of a step, or for None without a threshold."""
    if op is None:
        return lambda _: None
    threshold = float(np.float32(op.threshold))
    return lambda f: TokenThreshold(f.inputs.thresholded[: f.n], threshold)


def _neuron_thresholds(ffn: ops.Ffn) -> Callable[[RunningStep], dict[str, TokenThreshold | None]]:
    """Return a function for the thresholds of gates and of neurons, by the kernels' argument names."""
    of_gate, of_value = _token_threshold(ffn.gate_threshold), _token_threshold(ffn.down_threshold)
    if ffn.gate_threshold is None and ffn.down_threshold is None:
        return lambda _: {}
    return lambda f: {"gate_threshold": of_gate(f), "value_threshold": of_value(f)}


def _activations(ffn: ops.Ffn) -> dict[str, Any]:
    """Return the activations of gate and up, by the kernels' argument names."""
    return {
        "activation": ffn.gate_act.kind,
        "threshold": ffn.gate_act.threshold,
        "up_activation": ffn.up_act.kind if ffn.up_act else None,
    }


def _submitted_early(calls: list[Call]) -> list[Call]:
    """Move submits and routes before an attention that they do not depend on.

    The calls that they need move with them.
    """
    for early in [call for call in calls if call.kind in ("route", "submit")]:
        at = calls.index(early)
        attention = max((i for i in range(at) if calls[i].kind == "attention"), default=None)
        if attention is None:
            continue
        waits = set(calls[attention].outs)  # values that attention must come before
        for call in calls[attention + 1 : at]:
            if waits & set(call.reads):
                waits |= set(call.outs)
        if waits & set(early.reads):
            continue
        moved, needed = [early], set(early.reads)
        for call in reversed(calls[attention + 1 : at]):
            if needed & set(call.outs):
                moved.insert(0, call)
                needed |= set(call.reads)
        rest = [call for call in calls if call not in moved]
        first = 1 + max((i for i, call in enumerate(rest) if needed & set(call.outs)), default=-1)
        calls = [*rest[:first], *moved, *rest[first:]]
    return calls


def _routed_early(calls: list[Call]) -> set[int]:
    """Return the layers whose router is before their attention. Missing experts can be fetched during it."""
    attention = {call.layer: i for i, call in enumerate(calls) if call.kind == "attention"}
    return {
        call.layer
        for i, call in enumerate(calls)
        if call.kind == "route" and i < attention.get(call.layer, -1)
    }


def _gathered_late(calls: list[Call]) -> list[Call]:
    """Move each collect behind the calls that do not depend on it, such as the shared experts."""
    for collect in [call for call in calls if call.kind == "collect"]:
        at = calls.index(collect)
        made = set(collect.outs)
        to = next((i for i in range(at + 1, len(calls)) if made & set(calls[i].reads)), at + 1)
        calls = [*calls[:at], *calls[at + 1 : to], collect, *calls[to:]]
    return calls


def _most_alive(calls: list[Call]) -> int:
    """Return the largest sum of widths of values alive at once, including the temporary values of a call."""
    alive: dict[int, int] = {}
    most = 0
    for call in calls:
        alive |= {value.id: value.width for value in [*call.reads, *call.outs]}
        most = max(most, sum(alive.values()) + call.inside)
        for id in call.drops:
            alive.pop(id, None)
    return most
