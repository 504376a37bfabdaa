"""The reference implementation: a graph in plain NumPy, one operation after the other.

All other backends are tested against it. It is written to be read, not to be fast. Weights are decoded to
float32 at their first use and kept while they fit in `weight_cache_bytes`; the rest is decoded in each step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import assert_never

import numpy as np

from hotset.backends.adapters import AdapterSet
from hotset.backends.base import (
    BLOCK_SIZE,
    COUNTS,
    Batch,
    StepResult,
    StepStats,
    WithoutDevices,
    cache_slots,
    check_states,
)
from hotset.backends.decoded import DecodedWeights
from hotset.backends.embedding import add_image, encoded_rows, with_images
from hotset.errors import InvalidRequestError, StepCancelledError
from hotset.formats.quants import dequantize
from hotset.formats.source import WeightSource
from hotset.load_parameters import KVType
from hotset.model import operations as ops
from hotset.model.cost import KVFormat, check_cache, kv_formats
from hotset.model.graph import Graph
from hotset.model.operations import PARTS, SHIFT, XIELU, Primitive
from hotset.model.rope import bias_at, cos_sin, position_gain, turn

F32 = np.float32


class ReferenceBackend(WithoutDevices):
    """The Backend protocol over NumPy float32.

    kv_type: how keys and values are rounded for storage: f32 not at all, f16 to half precision, q8_0 and q4_0
    in blocks of 32 channels, q4_0 after `hadamard`. The constructor raises UnsupportedModelError if blocks do
    not fit the head size. n_states: slots for states, if the graph has any.
    sparse: `stats` counts only the rows that the step's neurons need; False: all rows. All are computed.
    """

    name = "reference"

    def __init__(
        self,
        weights: WeightSource,
        graph: Graph,
        *,
        n_blocks: int,
        n_states: int = 2,
        max_batch: int = 512,
        kv_type: KVType = "f32",
        weight_cache_bytes: int = 4 << 30,
        sparse: bool = False,
    ) -> None:
        self.weights, self.graph, self.sparse = weights, graph, sparse
        self.adapters = AdapterSet(graph, weights.tensors)
        self.n_blocks, self.max_batch, self.kv_type = n_blocks, max_batch, kv_type
        self.n_vocab = graph.n_vocab(weights.tensors)
        self.n_states = n_states if graph.recurrent else 0
        self._states = {op.out.id: np.zeros((n_states, *op.state_shape), F32) for op in graph.recurrent}
        self._weights = DecodedWeights(weights, np.asarray, weight_cache_bytes)
        self._keys: dict[int, np.ndarray] = {}  # layer → [n_blocks * BLOCK_SIZE, n_head_kv, head_dim]
        self._values: dict[int, np.ndarray] = {}  # layer → [n_blocks * BLOCK_SIZE, n_head_kv, head_dim_v]
        # The same for the blocks of block attention, each at the slot of its last token.
        self._block_keys: dict[int, np.ndarray] = {}
        self._block_values: dict[int, np.ndarray] = {}
        self._index_keys: dict[int, np.ndarray] = {}  # layer → [n_blocks * BLOCK_SIZE, head_dim]
        self.n_threads: int | None = None
        self.runtime = None
        self.notes: tuple[str, ...] = ()
        self._stats: StepStats | None = None
        self._cancelled = False
        self._formats = kv_formats(kv_type)  # of keys and of values
        stored_k, stored_v = (np.float16 if format.bits == 16 else np.float32 for format in self._formats)
        for op in graph.ops:
            if isinstance(op, ops.Attention) and op.source is None:
                check_cache(op, kv_type)
                slots = n_blocks * BLOCK_SIZE
                self._keys[op.layer] = np.zeros((slots, op.n_head_kv, op.head_dim), stored_k)
                self._values[op.layer] = np.zeros((slots, op.n_head_kv, op.head_dim_v), stored_v)
                if op.blocks is not None:
                    self._block_keys[op.layer] = np.zeros_like(self._keys[op.layer])
                    self._block_values[op.layer] = np.zeros_like(self._values[op.layer])
            elif isinstance(op, ops.Indexer):
                check_cache(op, kv_type)
                self._index_keys[op.layer] = np.zeros((n_blocks * BLOCK_SIZE, op.head_dim), stored_k)

    def cancel(self) -> None:
        """End the step in flight after its operation, from any thread. It raises StepCancelledError."""
        self._cancelled = True

    def close(self) -> None:
        """Release the cache and the decoded weights. Safe to call twice."""
        self._weights.kept.clear()
        self._keys.clear()
        self._values.clear()
        self._index_keys.clear()
        self._states.clear()

    def step(self, batch: Batch, x: np.ndarray | None = None) -> StepResult:
        """Run one step. x: float32 [n_tokens, width], the input of a graph that begins with rows.

        Raises InvalidRequestError if the batch breaks the contract of Batch, and StepCancelledError after
        `cancel`.
        """
        self._cancelled = False
        slots = self._slots(batch)
        scales = self.adapters.scales(batch)
        graph = self.graph if scales is None else self.adapters.graph
        names = {value.name for value in graph.values}
        for tap in batch.taps:
            if tap not in names:
                raise InvalidRequestError(f"the model has no value named {tap!r} to tap")
        values: dict[int, np.ndarray] = {}
        if x is not None:
            (entering,) = self.graph.entering
            values[entering.id] = x
        taps: dict[str, np.ndarray] = {}
        last_use = _last_use(graph)
        counts = np.zeros((self.graph.n_layer, len(COUNTS)), np.int64)
        seconds = np.zeros((self.graph.n_layer + 1, len(PARTS)))  # last row: outside the layers
        for index, op in enumerate(graph.ops):
            if self._cancelled:
                raise StepCancelledError
            for part in op.primitives if isinstance(op, ops.Ffn) else (op,):
                began = time.perf_counter()
                if isinstance(part, ops.LowRank):
                    assert scales is not None
                    values[part.out.id] = self._with_adapters(part, values, batch, scales)
                else:
                    values[part.out.id] = self._compute(part, values, batch, slots)
                seconds[part.layer, PARTS.index(part.part)] += time.perf_counter() - began
                if part.out.name in batch.taps:
                    taps[part.out.name] = values[part.out.id].copy()
            if isinstance(op, ops.Ffn):
                counts[op.layer] = _counts_of(op, values, self.sparse)
            for id in [id for id in values if last_use.get(id, -1) < index]:
                del values[id]
        self.weights.check()
        other = float(seconds[:, -1].sum())
        self._stats = StepStats.of(len(batch.tokens), counts, seconds[:-1], other, has_thresholds=False)
        return StepResult(values[graph.result.id], taps)

    def stats(self) -> StepStats | None:
        """Return counts and times of the latest step; None before the first."""
        return self._stats

    def _slots(self, batch: Batch) -> list[np.ndarray]:
        """Check the batch, and return for each token the cache slots of positions 0 to its own."""
        cache_slots(batch, max_batch=self.max_batch, n_blocks=self.n_blocks, n_vocab=self.n_vocab)
        if self.n_states:
            check_states(batch, self.n_states)
        slots = []
        for position, sequence in zip(batch.positions.tolist(), batch.sequences.tolist(), strict=True):
            kv_blocks = batch.block_tables[sequence, : position // BLOCK_SIZE + 1]
            table = kv_blocks[:, None].astype(np.int64) * BLOCK_SIZE + np.arange(BLOCK_SIZE)
            slots.append(table.ravel()[: position + 1])
        return slots

    def _compute(  # noqa: C901 - a case for each operation
        self, op: Primitive, values: dict[int, np.ndarray], batch: Batch, slots: list[np.ndarray]
    ) -> np.ndarray:
        assert not isinstance(op, ops.LowRank), "it is of some sequences, which _with_adapters knows"
        match op:
            case ops.Embed():
                return self._embedded(op, batch)
            case ops.MixRows():
                return mix_rows(self._weight(op.weight), values[op.at.id])
            case ops.Clip():
                return np.clip(values[op.x.id], self._weight(op.low), self._weight(op.high))
            case ops.AddImage():
                return add_image(op, values[op.x.id], batch)
            case ops.RMSNorm() | ops.UnitNorm():
                weight = np.ones(1, F32) if isinstance(op, ops.UnitNorm) else self._weight(op.weight)
                return normalised(op, values[op.x.id], weight, None)
            case ops.LayerNorm():
                return self._layer_normed(op, values[op.x.id])
            case ops.Linear():
                rows = slice(op.first_row, op.first_row + op.out.width)
                weight = self._weight(op.weight).reshape(-1, op.x.width)  # files store one row as a vector
                out = values[op.x.id] @ weight[rows].T
                return out if op.bias is None else out + self._weight(op.bias).reshape(-1)[rows]
            case ops.TransposedLinear():
                out = values[op.x.id] @ self._weights.neuron_major(op)
                return out if op.bias is None else out + self._weight(op.bias)
            case ops.Heads():
                return joined(op, values[op.x.id], None if op.shared is None else values[op.shared.id])
            case ops.TransposedHeads():
                matrices = self._weight(op.weight)  # [n_head, x.width, channels of a head]
                out = values[op.x.id] @ matrices  # [n_head, n_tokens, channels]
                return out.swapaxes(0, 1).reshape(-1, op.out.width)
            case ops.Mask():
                return np.where(selected(op, values[op.scores.id]), values[op.x.id], F32(0))
            case ops.Threshold():
                return zero_small(values[op.x.id], op.threshold, batch.thresholded)
            case ops.Rotate():
                return rotate(values[op.x.id], batch.rotary_positions(op.rope), op)
            case ops.PositionGain():
                return position_gain(op, batch.positions)
            case ops.Attention() | ops.Indexer():
                return self._over_cache(op, values, batch, slots)
            case (
                ops.NgramEmbed() | ops.ShortConv() | ops.DeltaNet() | ops.SelectiveScan() | ops.ChannelScan()
                | ops.Wkv() | ops.PoolBlocks()
            ):  # fmt: skip
                return self._recurrent(op, values, batch)
            case ops.Activate():
                return activated(op, values[op.x.id])
            case ops.GaussianTopK():
                return gaussian_top_k(values[op.x.id], op.multiplier)
            case ops.Multiply() | ops.GateHeads():
                return multiplied(op, values)
            case ops.Add():
                return values[op.a.id] + values[op.b.id]
            case ops.Scale():
                return self._scaled(op, values[op.x.id])
            case ops.HeadDot() | ops.SimilarityGate():
                return self._head_dot(op, values)
            case ops.AddStreams():
                x, weights = (None if v is None else values[v.id] for v in (op.x, op.weights))
                return add_streams(op, x, values[op.y.id], weights)
            case ops.HyperConnection():
                return hyper_connection(op, values[op.x.id], self._weight(op.scale), self._weight(op.base))
            case ops.MatchMagnitude():
                return match_magnitude(values[op.x.id], values[op.like.id], op.least)
            case ops.SoftCap():
                return soft_cap(values[op.x.id], op.cap)
            case ops.Route():
                return self._routed(op, values[op.x.id], batch)
            case ops.ExpertLinear():
                x = values[op.x.id]
                x = x.reshape(len(x), op.n_used, -1) if op.of_parts else x[:, None].repeat(op.n_used, 1)
                return self._by_experts(op, x, values[op.route.id], op.n_rows).reshape(len(x), -1)
            case ops.ExpertSum():
                return self._expert_sum(op, values[op.x.id], values[op.route.id])
            case ops.SelectOutputs():
                return joined_rows(op, values[op.x.id], batch.outputs)
            case _:
                assert_never(op)

    def _embedded(self, op: ops.Embed, batch: Batch) -> np.ndarray:
        info, encoded = self.weights.tensors[op.weight], encoded_rows(self.weights, op, batch)
        return with_images(op, dequantize(encoded, info.type, (info.shape[0], len(encoded))), batch)

    def _with_adapters(
        self, op: ops.LowRank, values: dict[int, np.ndarray], batch: Batch, scales: np.ndarray
    ) -> np.ndarray:
        """Return y plus the products of each adapter, in order, for the rows that use it."""
        x, out = values[op.x.id], values[op.y.id].copy()
        owners = batch.sequences if len(out) == len(batch.tokens) else batch.sequences[batch.outputs]
        for column, pair in self.adapters.pairs_of(op):
            scale = scales[owners, column]
            rows = scale != 0
            b = pair.b.floats[op.first_row : op.first_row + op.out.width]
            reduced = (x[rows] @ pair.a.floats.T) * (scale[rows] * F32(pair.factor))[:, None]
            out[rows] += reduced @ b.T
        return out

    def _layer_normed(self, op: ops.LayerNorm, x: np.ndarray) -> np.ndarray:
        bias = None if op.bias is None else self._weight(op.bias)
        return normalised(
            op, x, np.ones(1, F32) if op.weight is None else self._weight(op.weight).reshape(-1), bias
        )

    def _scaled(self, op: ops.Scale, x: np.ndarray) -> np.ndarray:
        scaled: np.ndarray = x * F32(op.factor)
        if op.weight is None:
            return scaled
        first = op.first_weight
        return scaled * self._weight(op.weight).reshape(-1)[first : first + op.x.width]

    def _head_dot(self, op: ops.HeadDot | ops.SimilarityGate, values: dict[int, np.ndarray]) -> np.ndarray:
        if isinstance(op, ops.SimilarityGate):
            return similarity_gate(op, *(values[value.id] for value in op.inputs))
        weight = self._weight(op.weight).reshape(-1)
        return head_dot(op, values[op.x.id], values[op.a.id], values[op.b.id], weight)

    def _conv_weight(self, op: ops.ShortConv) -> np.ndarray:
        """Return the weight of a short convolution, [width, kernel]."""
        if op.weight is None:
            return np.full((op.x.width, len(SHIFT)), SHIFT, F32)
        return self._weight(op.weight).reshape(op.x.width, op.kernel)

    def _recurrent(self, op: ops.Recurrent, values: dict[int, np.ndarray], batch: Batch) -> np.ndarray:
        if isinstance(op, ops.NgramEmbed):
            table, tokens = self._weight(op.weight), batch.tokens.astype(F32)[:, None]
            return self._through_states(op, tokens, batch, lambda row, past: ngrams(op, row, past, table))
        if isinstance(op, ops.ShortConv):
            weight, x = self._conv_weight(op), values[op.x.id]
            out = self._through_states(op, x, batch, lambda x, past: short_conv(x, past, weight, op.dilation))
            return out if op.bias is None else out + self._weight(op.bias)
        if isinstance(op, ops.Wkv):
            rows = np.concatenate([values[value.id] for value in op.inputs], axis=1)
            return self._through_states(op, rows, batch, lambda row, state: wkv(op, row, state))
        if isinstance(op, ops.PoolBlocks):
            scores, begins = np.zeros_like(values[op.x.id]), batch.positions[:, None] % op.size == 0
            if op.scores is not None and op.bias is not None:
                bias = self._weight(op.bias).reshape(op.size, -1)[batch.positions % op.size]
                scores = values[op.scores.id] + bias
            rows = np.concatenate([values[op.x.id], scores, begins.astype(scores.dtype)], axis=1)
            return self._through_states(op, rows, batch, lambda row, state: pool_blocks(op, row, state))
        if isinstance(op, ops.ChannelScan):
            rows = np.concatenate([values[value.id] for value in op.inputs], axis=1)
            rates, skip = self._weight(op.rate), self._weight(op.skip).reshape(-1)
            return self._through_states(
                op, rows, batch, lambda row, state: channel_scan(op, row, state, rates, skip)
            )
        rate, step = self._weight(op.rate), self._weight(op.step)
        if isinstance(op, ops.SelectiveScan):
            rates, skip = rate.reshape(-1), self._weight(op.skip).reshape(-1)
            rows = np.concatenate([values[op.x.id], values[op.dt.id]], axis=1)
            return self._through_states(
                op, rows, batch, lambda row, state: selective_scan(op, row, state, rates, step, skip)
            )
        rows = np.concatenate([values[read.id] for read in (op.x, op.alpha, op.beta)], axis=1)
        return self._through_states(
            op, rows, batch, lambda row, state: delta_rule(op, row, state, rate.reshape(-1), step)
        )

    def _through_states(
        self,
        op: ops.Recurrent,
        x: np.ndarray,
        batch: Batch,
        step: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    ) -> np.ndarray:
        """Run `step` for each token in order, and return its results, [n_tokens, width].

        step(row of x, state before it) returns the row of the result and the state after it.
        """
        assert batch.states is not None
        assert batch.saves is not None
        slots = self._states[op.out.id]
        out = np.empty((len(x), op.out.width), x.dtype)
        state, owner = np.zeros(op.state_shape, x.dtype), -1
        for t, sequence in enumerate(batch.sequences.tolist()):
            if sequence != owner:
                owner, slot = sequence, int(batch.states[sequence])
                state = np.zeros(op.state_shape, x.dtype) if slot < 0 else slots[slot].astype(x.dtype)
            out[t], state = step(x[t], state)
            if batch.saves[t] >= 0:
                slots[batch.saves[t]] = state
        return out

    def _by_experts(
        self, op: ops.ExpertLinear | ops.ExpertSum, x: np.ndarray, route: np.ndarray, n_rows: int
    ) -> np.ndarray:
        """Multiply x [n_tokens, n_used, width] by its experts' matrices: [n_tokens, n_used, n_rows]."""
        ids = route[:, : op.n_used].astype(np.int64)
        first = op.first_row if isinstance(op, ops.ExpertLinear) else 0
        out = np.empty((*ids.shape, n_rows), x.dtype)
        for expert in np.unique(ids):
            of_it = ids == expert
            matrix = self._weights.expert(op, expert)
            if isinstance(op, ops.ExpertSum) and op.neuron_major:
                matrix = matrix.T
            out[of_it] = x[of_it] @ matrix[first : first + n_rows].T
            if op.bias is not None:
                out[of_it] += self._weight(op.bias)[expert, first : first + n_rows]
        return out

    def _routed(self, op: ops.Route, x: np.ndarray, batch: Batch) -> np.ndarray:
        bias, scales = (None if v is None else self._weight(v) for v in (op.bias, op.scales))
        ids = None if op.table is None else self._weight(op.table)[batch.tokens].astype(np.int64)
        return routed(x, bias, op, scales, ids)

    def _expert_sum(self, op: ops.ExpertSum, x: np.ndarray, route: np.ndarray) -> np.ndarray:
        parts = self._by_experts(op, x.reshape(len(x), op.n_used, -1), route, op.out.width)
        weights = route[:, op.n_used :, None]
        out = np.zeros_like(parts[:, 0])
        for rank in range(op.n_used):
            out += weights[:, rank] * parts[:, rank]
        return out

    def _store(
        self, op: ops.Attention, found: dict[int, np.ndarray], batch: Batch, own: list[np.intp]
    ) -> None:
        """Store the keys and values of a batch in its slots `own`, unless another layer stores them."""
        of_keys, of_values = self._formats
        if op.source is None:
            k, v = found[op.k.id].reshape(-1, op.n_head_kv, op.head_dim), found[op.v.id]
            if of_keys.rotated and op.key_bias is not None:
                k = k - bias_at(op, self._weight(op.key_bias.tensor), batch.positions)
            self._keys[op.layer][own] = stored(k, of_keys)
            self._values[op.layer][own] = stored(v.reshape(-1, op.n_head_kv, op.head_dim_v), of_values)
        if op.blocks is not None:
            blocks = found[op.blocks.id].reshape(-1, op.n_head_kv, op.head_dim)
            self._block_keys[op.layer][own] = stored(blocks, of_keys)
            self._block_values[op.layer][own] = stored(blocks, of_values)

    def _indexed(self, op: ops.Indexer, found: dict[int, np.ndarray], slots: list[np.ndarray]) -> np.ndarray:
        """Store the index keys of a batch, and return the blocks that each token chooses."""
        of_keys, _ = self._formats
        self._index_keys[op.layer][[seen[-1] for seen in slots]] = stored(found[op.k.id], of_keys)
        out = np.full((len(slots), op.out.width), -1, F32)
        for token, seen in enumerate(slots):
            query = found[op.q.id][token].reshape(op.n_head, op.head_dim)
            query = hadamard(query) if of_keys.rotated else query
            keys = self._index_keys[op.layer][seen[op.size - 1 :: op.size]].astype(F32)
            weights = np.ones(op.n_head, F32) if op.weights is None else found[op.weights.id][token]
            numbers = chosen_blocks(weights @ np.maximum(query @ keys.T, 0), op.out.width)
            out[token, : len(numbers)] = numbers
        return out

    def _seen(
        self, op: ops.Attention, seen: np.ndarray, all_before: np.ndarray, chosen: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values that a token sees: of the slots `seen`, and of complete blocks.

        all_before: the slots of positions 0 to its own. chosen: the blocks that it sees; None: all.
        """
        keys, values = self._keys[op.cache_layer][seen], self._values[op.cache_layer][seen]
        if op.blocks is None:
            return keys, values
        ends = all_before[op.block_size - 1 :: op.block_size]
        if chosen is not None:
            ends = ends[chosen[chosen >= 0].astype(np.int64)]
        return (
            np.concatenate([keys, self._block_keys[op.layer][ends]]),
            np.concatenate([values, self._block_values[op.layer][ends]]),
        )

    def _over_cache(
        self,
        op: ops.Attention | ops.Indexer,
        found: dict[int, np.ndarray],
        batch: Batch,
        slots: list[np.ndarray],
    ) -> np.ndarray:
        """Store the keys of a batch, and compute an operation over those before each token."""
        if isinstance(op, ops.Indexer):
            return self._indexed(op, found, slots)
        self._store(op, found, batch, [seen[-1] for seen in slots])
        chosen = None if op.chosen is None else found[op.chosen.id]
        return self._attend(op, found[op.q.id], batch, slots, chosen)

    def _attend(
        self,
        op: ops.Attention,
        q: np.ndarray,
        batch: Batch,
        slots: list[np.ndarray],
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        """Compute the attention of each token, one at a time: [n_tokens, width]."""
        of_keys, of_values = self._formats
        group = op.n_head // op.n_head_kv  # query heads that share one head of keys and values
        out = np.empty((len(slots), op.n_head_kv, group, op.head_dim_v), np.float32)
        bias = None  # of the keys at all positions
        if of_keys.rotated and op.key_bias is not None:
            bias = bias_at(op, self._weight(op.key_bias.tensor), np.arange(max(map(len, slots))))
        for token, (seen, ago) in enumerate(seen_by(op, batch, slots, chosen)):
            query = q[token].reshape(op.n_head_kv, group, op.head_dim) * np.float32(op.scale)
            of_bias = None
            if bias is not None:
                of_bias = query @ bias[batch.positions[token] - ago].transpose(1, 2, 0)
            if of_keys.rotated:
                query = hadamard(query)
            keys, values = self._seen(op, seen, slots[token], None if chosen is None else chosen[token])
            past_k = keys.astype(np.float32).transpose(1, 2, 0)  # [n_head_kv, head_dim, n_seen]
            past_v = values.astype(np.float32).transpose(1, 0, 2)  # [n_head_kv, n_seen, head_dim_v]
            scores = query @ past_k
            if of_bias is not None:
                scores = scores + of_bias
            if op.softcap:
                scores = soft_cap(scores, op.softcap)
            if op.slopes is not None:
                slopes = np.array(op.slopes, F32).reshape(op.n_head_kv, group, 1)
                scores = scores - slopes * np.abs(ago).astype(F32)
            highest, total = scores.max(axis=-1, keepdims=True), 0.0
            if op.sinks is not None:
                sinks = self._weight(op.sinks).reshape(op.n_head_kv, group, 1)
                highest = np.maximum(highest, sinks)
                total = np.exp(sinks - highest)
            weights = np.exp(scores - highest)
            out[token] = weights @ past_v / (weights.sum(axis=-1, keepdims=True) + total)
        if of_values.rotated:
            out = hadamard(out)  # its own inverse
        return out.reshape(len(slots), op.out.width)

    def _weight(self, name: str) -> np.ndarray:
        return self._weights.whole(name)


def stored(x: np.ndarray, format: KVFormat) -> np.ndarray:
    """Round keys or values [..., dim] as a cache stores them."""
    if format.n_channels == 1:
        return x.astype(np.float16 if format.bits == 16 else F32)
    with np.errstate(invalid="ignore", over="ignore"):  # a value that is not finite makes its block NaN
        return {8: q8_0_stored, 4: q4_0_stored}[format.bits](x)


def q8_0_stored(x: np.ndarray) -> np.ndarray:
    """Round keys or values [..., dim] exactly as a q8_0 cache stores them.

    Files differ: they round halves away from zero, and divide by the scale before it is rounded to f16.
    """
    blocks = np.asarray(x, F32).reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    scale = (largest / F32(127)).astype(np.float16).astype(F32)
    inverse = np.divide(F32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    return (np.clip(np.rint(blocks * inverse), -127, 127) * scale).reshape(x.shape)


def q4_0_stored(x: np.ndarray) -> np.ndarray:
    """Round keys or values [..., dim] exactly as a q4_0 cache stores them. The result stays transformed."""
    blocks = hadamard(np.asarray(x, F32)).reshape(-1, 32)
    first = np.abs(blocks).argmax(axis=1)
    scale = blocks[np.arange(len(blocks)), first][:, None] / F32(-8)
    inverse = np.divide(F32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.minimum(np.floor(blocks * inverse + F32(8.5)), 15) - 8
    return (codes * scale.astype(np.float16).astype(F32)).reshape(x.shape)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Return the normalised Walsh-Hadamard transform of heads, float [..., head_dim]; it is its own inverse.

    A head is transformed in blocks of the largest power of two that divides it. A channel that is much larger
    than the others is spread evenly over its block (QuaRot, arXiv 2404.00456). The order of additions is the
    same as in the kernels: pairs of channels that are 1 apart, then 2, 4, ...
    """
    width = x.shape[-1] & -x.shape[-1]
    out, apart = x.reshape(-1, width), 1
    while apart < width:
        a, b = np.moveaxis(out.reshape(-1, width // (2 * apart), 2, apart), 2, 0)
        out = np.stack([a + b, a - b], axis=2).reshape(-1, width)
        apart *= 2
    return (out * (F32(1) / np.sqrt(F32(width)))).reshape(x.shape)


def chosen_blocks(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Return the numbers of the top_k highest scores, rising; of equal scores the first, and NaN last."""
    best = np.argsort(-scores, kind="stable")[:top_k]
    return np.sort(best)


def positions_of(op: ops.Attention, chosen: np.ndarray, n_seen: int) -> np.ndarray:
    """Return the positions of the chosen blocks, and those after the last complete block of n_seen tokens."""
    blocks = chosen[chosen >= 0].astype(np.int64)
    inside = blocks[:, None] * op.chosen_size + np.arange(op.chosen_size)
    return np.append(inside.ravel(), np.arange(n_seen // op.chosen_size * op.chosen_size, n_seen))


def _last_use(graph: Graph) -> dict[int, int]:
    uses: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for value in [op.out, *op.inputs]:
            uses[value.id] = index
    return uses


def seen_by(
    op: ops.Attention, batch: Batch, slots: list[np.ndarray], chosen: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each token the cache slots that it sees, and the distance back to each position.

    slots: for each token, the slots of positions 0 to its own. chosen: op.chosen's value, if there is one.
    """
    whole = dict(zip(batch.sequences.tolist(), slots, strict=True))  # the slots of a sequence's last token
    for token, sequence in enumerate(batch.sequences.tolist()):
        own = len(slots[token]) - 1
        if op.causal:
            seen, first = slots[token], max(own + 1 - op.window if op.window else 0, op.first_seen)
        else:
            reach = op.window // 2 if op.window else len(whole[sequence])
            seen, first = whole[sequence][: own + reach + 1], max(own - reach, 0)
        if op.groups != "none" and batch.groups is not None:
            start, end = batch.groups[token].tolist()
            if op.groups != "only":
                start = min(start, first) if op.groups == "also" else first
                end = max(end, len(seen))
            seen, first = whole[sequence][:end], start
        positions = np.arange(first, len(seen))
        if chosen is not None and op.blocks is None:
            positions = positions_of(op, chosen[token], len(seen))
        yield seen[positions], own - positions


def _counts_of(ffn: ops.Ffn, values: dict[int, np.ndarray], sparse: bool) -> tuple[int, ...]:
    """Count an FFN's neurons and rows from its values, in the order of base.COUNTS."""
    active = _of_all_experts(ffn, values, values[ffn.selected.id] != 0)
    chosen = there = _of_all_experts(ffn, values, np.ones_like(values[ffn.selected.id], bool))
    if ffn.mask is not None:
        chosen = _of_all_experts(ffn, values, selected(ffn.mask, values[ffn.mask.scores.id]))
    fires = _of_all_experts(ffn, values, values[ffn.fires.id] != 0)
    up = chosen if ffn.gate is None else chosen & fires
    if not sparse:
        rows = [there if ffn.route is not None else np.ones_like(chosen)] * 3
    else:
        rows = [chosen, up, active]
    gate_rows, up_rows, down_rows = (int(needed.any(axis=0).sum()) for needed in rows)
    gate_rows = 0 if ffn.gate is None else gate_rows
    return int(chosen.sum()), int(active.sum()), gate_rows, up_rows, down_rows, 0


def _of_all_experts(ffn: ops.Ffn, values: dict[int, np.ndarray], of_chosen: np.ndarray) -> np.ndarray:
    """Scatter flags of the neurons of each token's experts to all neurons, bool [n_tokens, n_ff]."""
    if ffn.route is None:
        return of_chosen
    n_used, n_expert = ffn.route.n_used, ffn.route.x.width
    out = np.zeros((len(of_chosen), n_expert, ffn.n_ff // n_expert), bool)
    ids = values[ffn.route.out.id][:, :n_used].astype(np.int64)
    np.put_along_axis(out, ids[:, :, None], of_chosen.reshape(*ids.shape, -1), axis=1)
    return out.reshape(len(of_chosen), ffn.n_ff)


def routed(
    x: np.ndarray,
    bias: np.ndarray | None,
    op: ops.Route,
    scales: np.ndarray | None = None,
    ids: np.ndarray | None = None,
) -> np.ndarray:
    """Return the ids and weights of each token's experts, [n_tokens, 2 * n_used] (operations.Route).

    ids: the experts that a table names, [n_tokens, n_used]; None: choose them by score.
    """
    scoring = {
        "softmax": softmax,
        "sigmoid": ACTIVATIONS["sigmoid"],
        "sqrt_softplus": _sqrt_softplus,
    }.get(op.scoring)
    p = x if scoring is None else scoring(x, F32(0))
    wanted = x if bias is None and op.n_groups == 1 else p if bias is None else p + bias
    if op.n_groups > 1:
        grouped = wanted.reshape(len(x), op.n_groups, -1)
        best = np.sort(grouped, axis=2)[:, :, -op.group_best :].sum(axis=2)
        chosen = np.argsort(-best, axis=1, kind="stable")[:, : op.n_groups_used]
        kept = np.zeros(best.shape, bool)
        np.put_along_axis(kept, chosen, True, axis=1)
        wanted = np.where(kept[:, :, None], grouped, F32(-np.inf)).reshape(x.shape)
    if ids is None:
        ids = np.argsort(-wanted, axis=1, kind="stable")[:, : op.n_used]
    weights = np.take_along_axis(p, ids, axis=1)
    if op.scoring == "softmax_chosen":
        weights = softmax(weights)
    if op.normalised:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), F32(2**-14))
    weights = weights * F32(op.scale)
    if scales is not None:
        weights = weights * scales[ids]
    weights = np.where(np.isnan(x).any(axis=1, keepdims=True), F32(np.nan), weights)
    return np.concatenate([ids, weights], axis=1).astype(x.dtype)


def softmax(x: np.ndarray, _: np.float32 | None = None) -> np.ndarray:
    """Return exp(x) divided by its sum, by rows."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def selected(op: ops.Mask, scores: np.ndarray) -> np.ndarray:
    """Return the neurons that a mask keeps, bool [n_tokens, n_ff]. It keeps neurons whose score is NaN."""
    return np.pad(~(scores < F32(op.threshold)), ((0, 0), (op.first, 0)), constant_values=True)


def zero_small(x: np.ndarray, threshold: float, tokens: np.ndarray | None) -> np.ndarray:
    """Return x [n_tokens, width] with small values of thresholded tokens replaced by zeros."""
    if tokens is None:
        return x
    return np.where(tokens[:, None] & (np.abs(x) < F32(threshold)), F32(0), x)


def normalised(
    op: ops.RMSNorm | ops.UnitNorm | ops.LayerNorm, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None
) -> np.ndarray:
    """Return the normalised rows of x, [n, width]."""
    if not isinstance(op, ops.LayerNorm):
        x = x.reshape(-1, op.n_head, op.x.width // op.n_head)
        scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(op.eps))
        return (x * scale * weight).reshape(-1, op.out.width)
    x = x.reshape(len(x), op.n_head, op.x.width // op.n_head)
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(op.eps))
    x = x.reshape(len(x), op.out.width) * weight
    return x if bias is None else x + bias


def rotate(x: np.ndarray, positions: np.ndarray, op: ops.Rotate) -> np.ndarray:
    """Return the rotary embedding (arXiv 2104.09864) of x [n_tokens, n_head * head_dim]; float64 angles.

    positions: as for `cos_sin`.
    """
    cos, sin = (values[:, None, :] for values in cos_sin(op.rope, positions))  # [n_tokens, 1, n_rot / 2]
    out = x.reshape(len(x), op.n_head, op.head_dim).copy()
    turn(out[..., op.first : op.first + op.rope.n_rot], op.rope, cos, sin)
    return out.reshape(x.shape)


def joined_rows(op: ops.SelectOutputs, x: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return the rows of the n tokens up to each output, side by side: [n_outputs, n * width].

    Raises InvalidRequestError if the first output has fewer tokens before it.
    """
    if len(outputs) and outputs[0] + 1 < op.n:
        raise InvalidRequestError(f"an output joins {op.n} tokens, and the first has fewer")
    rows = x[outputs[:, None] + np.arange(1 - op.n, 1)]  # [n_outputs, n, width]
    return (rows.swapaxes(1, 2) if op.by_channel else rows).reshape(len(outputs), op.out.width)


def joined(op: ops.Heads, x: np.ndarray, shared: np.ndarray | None) -> np.ndarray:
    """Join channels of each head of x [n_tokens, x.width] with shared ones [n_tokens, shared.width]."""
    parts = [x.reshape(len(x), op.n_head, op.x.width // op.n_head)[:, :, op.first : op.first + op.count]]
    if shared is not None:
        parts.append(np.repeat(shared[:, None], op.n_head, axis=1))
    return np.concatenate(parts, axis=2).reshape(len(x), op.out.width)


def short_conv(
    x: np.ndarray, past: np.ndarray, weight: np.ndarray, dilation: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return a token's outputs [width] and the inputs to keep for the next token.

    x: the token's inputs [width]. past: the inputs before it, [(kernel - 1) * dilation, width]. weight:
    [width, kernel].
    """
    seen = np.concatenate([past, x[None]])
    return (seen[::dilation] * weight.T).sum(axis=0), seen[1:]


def ngrams(
    op: ops.NgramEmbed, token: np.ndarray, past: np.ndarray, table: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated rows of a token's n-grams, and the state after it. past: the state before."""
    seen = np.append(past, token + 1)  # token id + 1, the oldest first; 0: no token
    mix, rows, begun = int(token[0]) * op.multipliers[0], [], True
    for n in range(2, len(op.multipliers) + 1):
        before = int(seen[-n]) - 1
        begun &= before not in (-1, op.eos)
        mix ^= (before if begun else op.eos) * op.multipliers[n - 1]
        heads = range((n - 2) * op.n_heads, (n - 1) * op.n_heads)
        rows += [mix % op.sizes[h] + op.offsets[h] for h in heads]
    return table[rows].reshape(-1), seen[1:]


def similarity_gate(op: ops.SimilarityGate, x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute operations.SimilarityGate for rows. Sums are float64: roots near 0 amplify rounding errors."""
    products = (a.astype(np.float64) * b).reshape(len(x), op.n_streams, -1)
    s = products.sum(axis=2, keepdims=True) / math.sqrt(op.x.width)
    root = (np.sign(s) * np.sqrt(np.maximum(np.abs(s), 1e-6))).astype(x.dtype)
    return np.asarray(_sigmoid(root, F32(0)) * x[:, None]).reshape(len(x), -1)


def delta_rule(
    op: ops.DeltaNet, row: np.ndarray, state: np.ndarray, rate: np.ndarray, step: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a token's outputs [n_head * dim_v] and the state after it.

    row: the token's x, alpha and beta. state: the state before it, [n_head, dim_k, dim_v].
    """
    of_keys = op.n_head_k * op.dim_k
    q, k, v, alpha, beta = np.split(row, np.cumsum([of_keys, of_keys, op.out.width, op.alpha.width]))
    times = op.n_head // op.n_head_k

    def of_heads(x: np.ndarray) -> np.ndarray:
        x = x.reshape(op.n_head_k, op.dim_k)
        x = x / np.sqrt((x * x).sum(axis=1, keepdims=True) + F32(1e-6))
        return np.tile(x, (times, 1)) if op.tiled else np.repeat(x, times, axis=0)

    q, k, v = of_heads(q) / F32(math.sqrt(op.dim_k)), of_heads(k), v.reshape(op.n_head, op.dim_v)
    decay = np.exp(rate[:, None] * np.logaddexp(alpha + step, F32(0)).reshape(op.n_head, -1))
    state = state * decay[:, :, None]
    off = (v - np.einsum("hkv,hk->hv", state, k)) * _sigmoid(beta, F32(0))[:, None]
    state = state + k[:, :, None] * off[:, None]
    return np.einsum("hkv,hk->hv", state, q).reshape(-1), state


def selective_scan(
    op: ops.SelectiveScan,
    row: np.ndarray,
    state: np.ndarray,
    rate: np.ndarray,
    step: np.ndarray,
    skip: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return a token's outputs [n_head * dim_v] and the state after it.

    row: the token's x and dt. state: the state before it, [n_head, dim_k, dim_v].
    """
    of_group = op.n_group * op.dim_k
    x, b, c, dt = np.split(row, np.cumsum([op.out.width, of_group, of_group]))

    def of_heads(group: np.ndarray) -> np.ndarray:
        return np.repeat(group.reshape(op.n_group, op.dim_k), op.n_head // op.n_group, axis=0)

    dt, x = np.logaddexp(dt + step, F32(0)), x.reshape(op.n_head, op.dim_v)
    added = of_heads(b)[:, :, None] * (dt[:, None] * x)[:, None]
    state = state * np.exp(rate * dt)[:, None, None] + added
    out = np.einsum("hkv,hk->hv", state, of_heads(c)) + skip[:, None] * x
    return out.reshape(-1), state


def channel_scan(
    op: ops.ChannelScan, row: np.ndarray, state: np.ndarray, rate: np.ndarray, skip: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a token's outputs [width] and the state after it.

    row: the token's x, dt, b and c. state: the state before it, [dim_k, width].
    """
    x, dt, b, c = np.split(row, np.cumsum([op.x.width, op.dt.width, op.b.width]))
    state = np.exp(rate.T * dt) * state + b[:, None] * (dt * x)
    return c @ state + skip * x, state


def wkv(op: ops.Wkv, row: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a token's outputs [n_head * dim_v] and the state after it.

    row: the token's inputs, in the order of op.inputs. state: the state before it, [n_head, dim_k, dim_v].
    """
    widths = [value.width for value in op.inputs]
    r, w, k, v, *corrected = (x.reshape(op.n_head, -1) for x in np.split(row, np.cumsum(widths[:-1])))
    after = w[:, :, None] * state + k[:, :, None] * v[:, None]
    if corrected:
        a, b = corrected
        after += b[:, :, None] * np.einsum("hkv,hk->hv", state, a)[:, None]
    out = np.einsum("hkv,hk->hv", after if corrected else state, r)
    return out.reshape(-1), after


def pool_blocks(op: ops.PoolBlocks, row: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a token's outputs [width] and the state after it.

    row: the token's x, its scores with their bias, and whether it is the first of a block. state: the state
    before it, [3 or 6, width].
    """
    n = 2 if op.overlaps else 1
    x, scores = row[:-1].reshape(2, n, -1)
    parts = state.reshape(n, 3, -1)[::-1]  # with overlaps, the next block comes before the token's own
    if row[-1]:
        parts = np.stack([np.zeros_like(parts[0]), *parts[:-1]])
    highest, total, sums = parts.swapaxes(0, 1)
    higher = np.where(total > 0, np.maximum(highest, scores), scores)
    kept, own = np.where(total > 0, np.exp(highest - higher), F32(0)), np.exp(scores - higher)
    parts = np.stack([higher, total * kept + own, sums * kept + x * own], axis=1)
    return parts[-1, 2] / parts[-1, 1], parts[::-1].reshape(state.shape)


def head_dot(op: ops.HeadDot, x: np.ndarray, a: np.ndarray, b: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Compute operations.HeadDot for rows."""
    n = len(x)
    sums = (a * b * weight).reshape(n, op.n_head, -1).sum(axis=2, keepdims=True)
    return (x.reshape(n, op.n_head, -1) * sums).reshape(n, -1)


def add_streams(
    op: ops.AddStreams, x: np.ndarray | None, y: np.ndarray, weights: np.ndarray | None
) -> np.ndarray:
    """Compute operations.AddStreams for x [n, n_streams * width] and y [n, streams * width]."""
    n, width = len(y), op.out.width // op.n_streams
    y = y.reshape(n, -1, width)
    shape = n, op.n_streams, y.shape[1]
    factors = np.full(shape, op.plus, y.dtype) + (0 if weights is None else weights.reshape(shape))
    out = np.zeros((n, op.n_streams, width), y.dtype)
    if x is not None:
        out += x.reshape(out.shape)
    out[:, op.first :] += factors[:, op.first :] @ y
    return out.reshape(n, op.out.width)


def hyper_connection(
    op: ops.HyperConnection, x: np.ndarray, scale: np.ndarray, base: np.ndarray
) -> np.ndarray:
    """Compute operations.HyperConnection in float64.

    x: [n, n_streams * (n_streams + 2)] or [n, n_streams].
    """
    n, rows, factor = op.n_streams, x.astype(np.float64), scale.reshape(-1).astype(np.float64)
    rows = rows * np.repeat(factor, [n, n, n * n][: len(factor)]) + base.reshape(-1)
    read = 1 / (1 + np.exp(-rows[:, :n])) + op.eps
    if x.shape[1] == n:
        return read.astype(x.dtype)
    written = 2 / (1 + np.exp(-rows[:, n : 2 * n]))
    mixed = softmax(rows[:, 2 * n :].reshape(-1, n, n)) + op.eps
    for i in range(op.n_iterations):
        if i:
            mixed = mixed / (mixed.sum(axis=2, keepdims=True) + op.eps)
        mixed = mixed / (mixed.sum(axis=1, keepdims=True) + op.eps)
    of_streams = np.concatenate([written[:, :, None], mixed.swapaxes(1, 2)], axis=2)
    return np.concatenate([read, of_streams.reshape(len(x), -1)], axis=1).astype(x.dtype)


def match_magnitude(x: np.ndarray, like: np.ndarray, least: float) -> np.ndarray:
    """Compute operations.MatchMagnitude for x [n, parts * width] and like [n, width]."""
    parts = x.reshape(len(x), x.shape[1] // like.shape[1], like.shape[1])
    wanted = np.sqrt((like * like).mean(axis=1))[:, None, None]
    found = np.sqrt(np.maximum((parts * parts).mean(axis=2, keepdims=True), F32(least)))
    return np.asarray(parts * (wanted / found)).reshape(x.shape)


def gaussian_top_k(x: np.ndarray, multiplier: float) -> np.ndarray:
    """Return by how much each value exceeds its row's mean + multiplier · deviation, at least 0."""
    threshold = x.mean(axis=1, keepdims=True) + F32(multiplier) * x.std(axis=1, keepdims=True)
    return np.maximum(F32(0), x - threshold)


def xielu(x: np.ndarray, f: XIELU) -> np.ndarray:
    """Compute operations.XIELU."""
    positive, negative, linear, eps = map(F32, (f.positive, f.negative, f.linear, f.eps))
    below = negative * (np.expm1(np.minimum(x, eps)) - x) + linear * x
    return np.where(x > 0, positive * x * x + linear * x, below)


def activated(op: ops.Activate, x: np.ndarray) -> np.ndarray:
    return ACTIVATIONS[op.kind](x, F32(op.threshold)) if op.xielu is None else xielu(x, op.xielu)


def mix_rows(table: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return sums of rows of a table [n_rows, width], as operations.MixRows: float32 [n_tokens, width]."""
    out = np.zeros((len(at), table.shape[1]), np.float32)
    numbers, shares = np.split(at, 2, axis=1)
    places = np.where((numbers >= 0) & (numbers < len(table)), numbers, 0).astype(np.int64)
    for place, share in zip(places.T, shares.T, strict=True):
        out += share[:, None] * table[place]
    return out


def multiplied(op: ops.Multiply | ops.GateHeads, values: Mapping[int, np.ndarray]) -> np.ndarray:
    if isinstance(op, ops.GateHeads):
        return gate_heads(values[op.x.id], values[op.gates.id])
    return values[op.a.id] * values[op.b.id]


def gate_heads(x: np.ndarray, gates: np.ndarray) -> np.ndarray:
    """Return the channels [n, width] times the sigmoid of their head's gate [n, n_head]."""
    factors = ACTIVATIONS["sigmoid"](gates, np.float32(0))
    heads = x.reshape(*gates.shape, -1) * factors[..., None]
    return heads.reshape(x.shape)


def soft_cap(x: np.ndarray, cap: float) -> np.ndarray:
    """Return cap * tanh(x / cap)."""
    return F32(cap) * np.tanh(x / F32(cap))


def _silu(x: np.ndarray, _: np.float32) -> np.ndarray:
    return x * (0.5 + 0.5 * np.tanh(0.5 * x))  # x * sigmoid(x), in a form that cannot overflow


def _sigmoid(x: np.ndarray, _: np.float32) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) may overflow; the result is then 0
        return np.asarray(1 / (1 + np.exp(-x)))


def _sqrt_softplus(x: np.ndarray, _: np.float32) -> np.ndarray:
    return np.asarray(np.sqrt(np.logaddexp(x, F32(0))))


def _gelu(x: np.ndarray, _: np.float32) -> np.ndarray:
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return (0.5 * x * (1 + erf(x / math.sqrt(2)))).astype(np.float32)


def _gelu_tanh(x: np.ndarray, _: np.float32) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))


ACTIVATIONS: dict[str, Callable[[np.ndarray, np.float32], np.ndarray]] = {
    "silu": _silu,
    "sigmoid": _sigmoid,
    "clamped_silu": lambda x, limit: (
        np.minimum(x, limit) * _sigmoid(F32(1.702) * np.minimum(x, limit), limit)
    ),
    "clamped_plus_one": lambda x, limit: np.clip(x, -limit, limit) + F32(1),
    "capped_silu": lambda x, limit: _silu(np.minimum(x, limit), limit),
    "clamp": lambda x, limit: np.clip(x, -limit, limit),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x, _: np.maximum(x, 0),
    "relu2": lambda x, _: np.square(np.maximum(x, 0)),
    "fatrelu": lambda x, threshold: np.where(x >= threshold, x, np.float32(0)),
    "exp": lambda x, _: np.exp(x),
    "softplus": lambda x, _: np.logaddexp(x, F32(0)),
}
