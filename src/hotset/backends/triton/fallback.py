"""The fallback kernels: every kernel of the GPU backend in plain torch, for devices without Triton.

They define the result of each kernel, and the kernels' tests compare with them.

`triton_kernels` has functions of the same names and signatures; `kernels.Kernels` chooses once. Inputs and
results are float32 on the device of the weights. Weights are decoded, and sums are float32. Kernels write in
place only to `out`, the KV cache and `counts`.

A fallback kernel may read numbers on the host (which neurons fire, the length of a sequence), so that a CPU
does only the necessary work. So a step with fallback kernels is not captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotset.backends.base import BLOCK_SIZE, COUNTS, LOGIT_GROUP
from hotset.backends.stage import SLICE_VALUES
from hotset.backends.torch import functions
from hotset.backends.torch.functions import activate, attend
from hotset.backends.triton import exact
from hotset.backends.triton.matrix import DeviceMatrix, HostRows
from hotset.model.operations import Activate, ActivationKind, Rope, RopeKind

GATHER_BELOW = 0.75  # above this share of requested rows, all rows are decoded, without an index
QUERY_ROWS = 64  # most tokens of a sequence that attend together
N_COUNTS = len(COUNTS)


@dataclass(frozen=True)
class TokenThreshold:
    """The thresholded tokens and their threshold (operations.Threshold).

    tokens: int32 [T], not 0 for thresholded tokens. threshold: magnitudes below it count as zero.
    """

    tokens: Tensor
    threshold: float

    def of(self, tokens: Tensor) -> TokenThreshold:
        """Return the threshold of some tokens, by their indices."""
        return TokenThreshold(self.tokens[tokens], self.threshold)


def zero_small(x: Tensor, by: TokenThreshold | None) -> Tensor:
    """Set the small values of x [T, n] to zero. by: None leaves x unchanged."""
    if by is None:
        return x
    return torch.where((by.tokens != 0)[:, None] & (x.abs() < by.threshold), 0.0, x)


@dataclass(frozen=True)
class Held:
    """The neurons of a layer whose rows some matrices have, in their order.

    numbers: int32 [n], ascending. words: int32 [ceil(n_ff / 32)], bit i % 32 of word i // 32 for neuron i of
    the layer. before: int32, the number of held neurons before each word.
    """

    numbers: Tensor
    words: Tensor
    before: Tensor

    @classmethod
    def of(cls, numbers: np.ndarray, n_ff: int, place: Callable[[str, np.ndarray], Tensor]) -> Held:
        """Build the fields for neurons. place: copies an array to the device; it gets the field's name."""
        bits = np.zeros(-(-n_ff // 32) * 32, np.uint8)
        bits[numbers] = 1
        words = np.packbits(bits, bitorder="little").view("<u4")
        n_each = bits.reshape(-1, 32).sum(axis=1, dtype=np.int32)
        arrays = {
            "numbers": numbers.astype(np.int32),
            "words": words.view(np.int32),
            "before": np.cumsum(n_each, dtype=np.int32) - n_each,
        }
        return cls(**{name: place(name, array) for name, array in arrays.items()})


@dataclass(frozen=True)
class Weighed:
    """Inputs of a product whose RMSNorm is not applied yet.

    The product multiplies its sums by the norm's factor, which is one number per token.

    x: [T, n], rows times the norm's weight. squares: float32 [T, n_parts], partial sums of the squares of a
    row.
    """

    x: Tensor
    squares: Tensor
    eps: float

    def __len__(self) -> int:
        return len(self.x)

    def normalised(self) -> Tensor:
        """Return the normalised rows, [T, n]."""
        mean = self.squares.sum(dim=1, keepdim=True) / self.x.shape[1]
        return self.x * torch.rsqrt(mean + self.eps)


Entering = Tensor | Weighed  # the input of a product


def _normalised(x: Entering) -> Tensor:
    return x.normalised() if isinstance(x, Weighed) else x


def linear(
    x: Entering,
    m: DeviceMatrix,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    activation: ActivationKind | None = None,
    threshold: float = 0.0,
) -> Tensor:
    """Return f(x @ m.T + bias + residual), [T, n_rows], of x [T, n_cols].

    activation: f, as in `activate`; None: identity.
    """
    x = _normalised(x)
    y = torch.empty((len(x), m.n_rows), device=x.device)
    for rows in m.slices():
        y[:, rows] = x @ m.values(rows).T
    if activation is None:
        return _finish(y, bias, residual, out)
    y = activate(_finish(y, bias, residual, None), activation, threshold)
    return y if out is None else out.copy_(y)


def linear_normed(
    x: Entering, m: DeviceMatrix, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Entering]:
    """Return `linear` of the inputs, and the input of the products after its RMSNorm.

    weight: the norm's weight, [n_rows].
    """
    out = linear(x, m, bias, residual)
    return out, rms_norm(out, weight, eps)


def linear_bits(x: Tensor, m: DeviceMatrix, bias: Tensor | None, threshold: float, first: int = 0) -> Tensor:
    """Return the neurons that a predictor's last product selects: `pack_bits` of x @ m.T + bias."""
    return pack_bits(linear(x, m, bias), threshold, first)


def linear_t(
    x: Tensor,
    m: DeviceMatrix,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    left_out: Tensor | None = None,
) -> Tensor:
    """Return x @ m + bias + residual, [T, n_cols], of x [T, n_rows]. Rows of zero inputs are not read.

    left_out: int64 [1]; the bytes of the unread codes are added to it.
    """
    fires = (x != 0).any(dim=0)
    if left_out is not None:
        left_out += (~fires).sum() * m.row_bytes
    y = torch.zeros((len(x), m.n_cols), device=x.device)
    for rows in _row_slices(fires, m):
        y += x[:, rows] @ m.values(rows)
    return _finish(y, bias, residual, out)


def neurons(
    h: Tensor,
    gate: DeviceMatrix | None,
    up: DeviceMatrix,
    *,
    activation: ActivationKind,
    threshold: float = 0.0,
    up_activation: ActivationKind | None = None,
    selected: Tensor | None = None,
    held: Held | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    counts: Tensor | None = None,
    gate_threshold: TokenThreshold | None = None,
    value_threshold: TokenThreshold | None = None,
) -> Tensor:
    """Return a value per neuron, [T, n]: f(gate) * g(up), or f(up) without a gate, and 0 if not selected.

    h: [T, n_cols]. Rows of gate and up are neurons; n = up.n_rows. activation, threshold: f. up_activation:
    g, None: identity. selected: uint8 [T, bytes], bit i % 8 of byte i // 8 is set if neuron i is selected;
    None: all are. held: the neurons of the rows; None: all of the layer. The up row of a neuron whose gate
    yields 0 for every token is not read. gate_threshold: for f. value_threshold: for the result. counts:
    int64 [N_COUNTS], updated in place.
    """
    first = up if gate is None else gate
    numbers = None if held is None else held.numbers
    chosen = None if selected is None else unpack_bits(selected, up.n_rows, numbers)
    z = _products(h, first, up_bias if gate is None else gate_bias, chosen)
    value = zero_small(activate(z, activation, threshold), gate_threshold)
    if chosen is not None:
        value = torch.where(chosen, value, 0.0)
    fires = value != 0
    if gate is not None:
        u = _products(h, up, up_bias, fires)
        if up_activation is not None:
            u = activate(u, up_activation)
        value = torch.where(fires, value * u, 0.0)
    value = zero_small(value, value_threshold)
    if counts is not None:
        count(counts, chosen, fires if gate is not None else None, value)
    return value


def fired(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: ActivationKind,
    threshold: float = 0.0,
    up_activation: ActivationKind | None = None,
    selected: Tensor | None = None,
    counts: Tensor | None = None,
    gate_threshold: TokenThreshold | None = None,
    value_threshold: TokenThreshold | None = None,
    dense: bool = False,
) -> Tensor:
    """Return f(gate) * g(up), or only f(gate), of computed products [T, n].

    The other arguments and the result are as in `neurons`. dense: every row counts as read, including the
    down projection's rows.
    """
    fires = zero_small(activate(gate, activation, threshold), gate_threshold)
    chosen = None if selected is None else unpack_bits(selected, gate.shape[1])
    value = fires = fires if chosen is None else torch.where(chosen, fires, 0.0)
    if up is not None:
        value = torch.where(fires != 0, fires * (activate(up, up_activation) if up_activation else up), 0.0)
    value = zero_small(value, value_threshold)
    if counts is not None:
        every = torch.ones_like(value, dtype=torch.bool)
        count(counts, chosen, None if up is None else every, value, dense=dense)
    return value


def gated(
    h: Entering,
    m: DeviceMatrix,
    bias: Tensor | None = None,
    *,
    activation: ActivationKind,
    threshold: float = 0.0,
    up_activation: ActivationKind | None = None,
) -> Tensor:
    """Return f(gate) * g(up), [T, n], of h [T, n_cols]. m: n rows of gate, followed by n rows of up."""
    gate, up = linear(h, m, bias).split(m.n_rows // 2, dim=1)
    return fired(gate, up, activation=activation, threshold=threshold, up_activation=up_activation)


def sparse_ffn(
    h: Tensor,
    gate: DeviceMatrix | None,
    up: DeviceMatrix,
    down_t: DeviceMatrix,
    *,
    activation: ActivationKind,
    threshold: float = 0.0,
    up_activation: ActivationKind | None = None,
    selected: Tensor | None = None,
    held: Held | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: Tensor | None = None,
    counts: Tensor | None = None,
    gate_threshold: TokenThreshold | None = None,
    value_threshold: TokenThreshold | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute an FFN by neurons, [T, down_t.n_cols]: `neurons`, then `linear_t` of their values."""
    values = neurons(
        h, gate, up, activation=activation, threshold=threshold, up_activation=up_activation,
        selected=selected, held=held, gate_bias=gate_bias, up_bias=up_bias, counts=counts,
        gate_threshold=gate_threshold, value_threshold=value_threshold,
    )  # fmt: skip
    return linear_t(values, down_t, down_bias, residual, out)


def pack_bits(scores: Tensor, threshold: float, first: int = 0) -> Tensor:
    """Return the neurons that a predictor selects, uint8 [T, ceil(n / 8)], n = first + scores.shape[1].

    Bit i % 8 of byte i // 8 is set unless scores[i - first] < threshold (a score of NaN selects). Neurons
    below `first` have no score and are always selected. Spare bits are 0.
    """
    bits = torch.nn.functional.pad(~(scores < threshold), (first, 0), value=True)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.int32, device=scores.device)
    return (bits.reshape(len(bits), -1, 8) * weights).sum(dim=2, dtype=torch.int32).to(torch.uint8)


def largest(logits: Tensor) -> Tensor:
    """Return the largest of each LOGIT_GROUP logits [T, n_vocab], float32 [T, n_vocab / LOGIT_GROUP].

    A group with a value that is not finite yields NaN.
    """
    groups = logits.reshape(len(logits), -1, LOGIT_GROUP)
    return torch.where(groups.isfinite(), groups, torch.nan).amax(dim=2)


def unpack_bits(bits: Tensor, n: int, rows: Tensor | None = None) -> Tensor:
    """Unpack uint8 [T, bytes] to bool [T, n], for neurons 0 to n - 1 or for the neurons `rows`, [n]."""
    index = torch.arange(n, device=bits.device) if rows is None else rows.long()
    return (bits[:, index // 8] >> (index % 8).to(torch.uint8)) & 1 != 0


def experts(
    h: Tensor,
    slots: Tensor,
    gate: DeviceMatrix | None,
    up: DeviceMatrix,
    down: DeviceMatrix,
    *,
    n_neurons: int,
    activation: Activate,
    up_activation: Activate | None,
    neuron_major: bool,
    sparse: bool,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    counts: Tensor | None = None,
    gate_threshold: TokenThreshold | None = None,
) -> Tensor:
    """Compute the tokens' experts, neither weighted nor summed: [T, n_used, n_embd], bitwise like the CPU.

    h: [T, n_embd]. slots: int32 [T, n_used], -1 for an expert that is not computed here; its result is zeros.
    gate, up, down: the stacked matrices of all slots, n_neurons rows of gate and up per slot. Biases:
    [n_slots, width]. neuron_major: down has a row per neuron. sparse: a neuron whose activation is zero is
    zero for any up. gate_threshold: for the activated gate, or the activated up without a gate. counts: int64
    [N_COUNTS], updated in place.
    """
    out = torch.zeros((*slots.shape, h.shape[1]), device=h.device)
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        token, rank = (slots == slot).nonzero(as_tuple=True)
        x, first = h[token], slot * n_neurons
        own_threshold = None if gate_threshold is None else gate_threshold.of(token)
        value = _biased(exact.linear(x, up, first, n_neurons), up_bias, slot)
        if gate is None:
            value = zero_small(exact.activate(value, activation.kind, activation.threshold), own_threshold)
        else:
            fired = _biased(exact.linear(x, gate, first, n_neurons), gate_bias, slot)
            fired = zero_small(exact.activate(fired, activation.kind, activation.threshold), own_threshold)
            if up_activation is not None:
                value = exact.activate(value, up_activation.kind, up_activation.threshold)
            value = torch.where(fired != 0, fired * value, 0.0) if sparse else fired * value
        if neuron_major:
            y = exact.linear_t(value, down, first, n_neurons)
        else:
            y = exact.linear(value, down, slot * h.shape[1], h.shape[1])
        out[token, rank] = _biased(y, down_bias, slot)
        if counts is not None:
            counts[0] += value.numel()
            counts[1] += (value != 0).sum()
            counts[2 if gate is not None else 3] += n_neurons
            if gate is not None:
                counts[3] += (fired != 0).any(dim=0).sum() if sparse else n_neurons
            if neuron_major:
                counts[4] += (value != 0).any(dim=0).sum()
    return out


def choose_experts(
    ids: Tensor, table: Tensor, most: Tensor, n_spare: int, first_spare: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts that the device fetches among those that tokens need and that have no slot.

    ids: int32 [T, n_used]. table: int32 [n_expert], the slot of each expert or -1. most: int32, entry i is
    the number to fetch, at most n_spare, if i are missing. Experts that the tokens name first are fetched.
    Returns the CPU's request, int32 [T, n_used], ids for the CPU and -1 - id for the device; the slots, -1
    for the CPU's experts; and the experts for the slots from first_spare on, int32 [n_spare], -1: none.
    """
    slots = table[ids.long()]
    missing = list(dict.fromkeys(ids[slots < 0].tolist()))
    fetched = missing[: int(most[len(missing)])]
    for i, id in enumerate(fetched):
        slots = torch.where(ids == id, first_spare + i, slots)
    given = torch.tensor(fetched + [-1] * (n_spare - len(fetched)), dtype=torch.int32, device=ids.device)
    return torch.where(slots < 0, ids, -1 - ids), slots, given


def fetch_experts(part: HostRows, fetched: Tensor, to: DeviceMatrix | Tensor, first: int) -> None:
    """Copy a part of experts from the host to the slots from `first` on.

    fetched: int32 [n], the expert for each slot; -1: none. to: the matrices of all slots, or biases, float32
    [n_slots, width].
    """
    for i, id in enumerate(fetched.tolist()):
        if id < 0:
            continue
        rows = part.rows[id]
        if isinstance(to, DeviceMatrix):
            to.put((first + i) * len(rows), rows)
        else:
            to[first + i].copy_(torch.from_numpy(rows.view(np.float32)[0]))


def _biased(x: Tensor, bias: Tensor | None, slot: int) -> Tensor:
    return x if bias is None else x + bias[slot]


def sum_experts(
    parts: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    own: Tensor | None = None,
    asked: Tensor | None = None,
) -> Tensor:
    """Return the sum of weight * part in the order of the route, + residual: [T, width].

    parts: [T, n_used, width]; weights: [T, n_used]. own: the device's parts, which replace `parts` if asked,
    int32 [T, n_used], is below 0 (`choose_experts`). Each product is rounded before the sum, so the result is
    bitwise identical to the CPU's, even if the device computed some parts.
    """
    if own is not None:
        assert asked is not None
        parts = torch.where(asked[:, :, None] >= 0, parts, own)
    y = torch.zeros_like(parts[:, 0])
    for j in range(parts.shape[1]):
        y = y + parts[:, j] * weights[:, j, None]
    return y if residual is None else y + residual


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, n_head: int = 1, by: TokenThreshold | None = None
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over each of n_head equal parts of the width.

    by: the threshold of the result.
    """
    return zero_small(functions.rms_norm(x, weight, eps, n_head), by)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, by: TokenThreshold | None = None
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, over the width.

    by: the threshold of the result.
    """
    return zero_small(functions.layer_norm(x, weight, bias, eps), by)


gaussian_top_k = functions.gaussian_top_k
route = functions.route

ANGLE_STEP = 256  # positions: table rows of RopeTable.near


@dataclass(frozen=True)
class RopeTable:
    """The tables of a rotation's angles, for devices that may lack float64.

    They have cos and sin of ANGLE_STEP neighbouring positions and of every ANGLE_STEP-th position, computed
    in float64 on the host. A position's angle is the sum of two, so the tables are small at any context.
    near: [2, ANGLE_STEP, n_rot / 2]. far: [2, ceil(n_ctx / ANGLE_STEP), n_rot / 2], times the magnitude.
    """

    kind: RopeKind
    n_rot: int
    near: Tensor
    far: Tensor

    @classmethod
    def build(cls, rope: Rope, n_ctx: int, device: torch.device | str) -> RopeTable:
        """Build the tables for positions 0 to n_ctx - 1."""
        freq = np.asarray(rope.freq, np.float64)
        near = np.arange(ANGLE_STEP)[:, None] * freq
        far = np.arange(0, max(n_ctx, 1), ANGLE_STEP)[:, None] * freq

        def table(angles: np.ndarray, magnitude: float) -> Tensor:
            both = np.stack([np.cos(angles), np.sin(angles)]) * magnitude
            return torch.from_numpy(both.astype(np.float32)).to(device)

        return cls(rope.kind, rope.n_rot, table(near, 1.0), table(far, rope.magnitude))


def angles(positions: Tensor, table: RopeTable) -> Tensor:
    """Return cos and sin of each token's angles, float32 [2, T, n_rot / 2], once per step for all layers.

    positions: int32 or int64 [T]. Positions past the table's context get the angles of its last positions.
    """
    positions = positions.long()
    cos_near, sin_near = table.near[:, positions % ANGLE_STEP]
    row = (positions // ANGLE_STEP).clamp(max=table.far.shape[1] - 1)
    cos_far, sin_far = table.far[:, row]
    return torch.stack([cos_near * cos_far - sin_near * sin_far, sin_near * cos_far + cos_near * sin_far])


def rotate(
    x: Tensor,
    cos_sin: Tensor,
    *,
    n_head: int,
    kind: RopeKind,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate heads, as functions.rotate does.

    cos_sin: from `angles`. norm_weight, eps: an RMSNorm of each head before the rotation.
    """
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps, n_head)
    return functions.rotate(x, cos_sin, n_head=n_head, kind=kind)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
) -> None:
    """Write a step's keys and values to their KV blocks.

    k: [T, n_head_kv * head_dim], v: [T, n_head_kv * head_dim_v]. k_blocks, v_blocks: float16 or float32
    [n_blocks, n_head_kv, BLOCK_SIZE, head_dim or head_dim_v]. block_tables: int32
    [n_sequences, max_kv_blocks]; sequences, positions: int32 [T] (Batch in backends/base.py). A token whose
    block is -1 is not stored.
    """
    positions = positions.long()
    kv_block = block_tables[sequences.long(), positions // BLOCK_SIZE].long()
    kept = kv_block >= 0
    slot = positions % BLOCK_SIZE
    for x, kv_blocks in ((k, k_blocks), (v, v_blocks)):
        heads = x.reshape(len(x), kv_blocks.shape[1], kv_blocks.shape[3]).to(kv_blocks.dtype)
        kv_blocks[kv_block[kept], :, slot[kept]] = heads[kept]


def rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    *,
    n_head: int,
    kind: RopeKind = "norm",
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Do the steps between projections and attention: head norms and rotation of q and k, and `store_kv`.

    Return the rotated q. cos_sin None: no rotation (then q_norm and k_norm must be None).
    """
    if cos_sin is not None:
        q = rotate(q, cos_sin, n_head=n_head, kind=kind, norm_weight=q_norm, eps=eps)
        k = rotate(k, cos_sin, n_head=k_blocks.shape[1], kind=kind, norm_weight=k_norm, eps=eps)
    store_kv(k, v, k_blocks, v_blocks, block_tables, sequences, positions)
    return q


def project_heads(
    h: Entering,
    m: DeviceMatrix,
    bias: Tensor | None,
    cos_sin: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    *,
    n_head: int,
    kind: RopeKind,
) -> Tensor:
    """Compute `linear` for stacked queries, keys and values, then `rotate_store` without head norms.

    Return the rotated queries, [T, n_head * head_dim].
    """
    n_head_kv, dim, dim_v = k_blocks.shape[1], k_blocks.shape[3], v_blocks.shape[3]
    widths = [n_head * dim, n_head_kv * dim, n_head_kv * dim_v]
    q, k, v = linear(h, m, bias).split(widths, dim=1)
    where = block_tables, sequences, positions
    return rotate_store(q, k, v, cos_sin, k_blocks, v_blocks, *where, n_head=n_head, kind=kind)


def attention(
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    *,
    n_head: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention over the KV cache, which already holds the step's own keys and values.

    q: [T, n_head * head_dim]. KV blocks and tables are as in `store_kv`. The result is [T, n_head *
    head_dim_v]. window > 0: a token sees itself and the window - 1 before it. softcap, sinks ([n_head]): see
    graph.Attention. A token whose block is -1 yields zeros.
    """
    n_head_kv, head_dim_v = k_blocks.shape[1], v_blocks.shape[3]
    group = n_head // n_head_kv
    out = torch.zeros((len(q), n_head * head_dim_v), device=q.device)
    queries = q.reshape(len(q), n_head_kv, group, -1) * scale
    tokens = list(zip(sequences.tolist(), positions.tolist(), strict=True))
    first = 0
    while first < len(tokens):
        # Neighbouring tokens of one sequence share its keys: [first, last) is a run of such tokens.
        last = first + 1
        while last < min(first + QUERY_ROWS, len(tokens)) and tokens[last][0] == tokens[first][0]:
            last += 1
        sequence, n_seen = tokens[first][0], 1 + max(p for _, p in tokens[first:last])
        kv_blocks = block_tables[sequence, : -(-n_seen // BLOCK_SIZE)].long()
        if bool((kv_blocks >= 0).all()):
            keys = (
                k_blocks[kv_blocks].transpose(0, 1).flatten(1, 2)[:, :n_seen].float()
            )  # [n_head_kv, n_seen, dim]
            vals = v_blocks[kv_blocks].transpose(0, 1).flatten(1, 2)[:, :n_seen].float()
            own = positions[first:last].long()[:, None]
            seen = torch.arange(n_seen, device=q.device)[None, :]
            hidden = seen > own
            if window > 0:
                hidden = hidden | (seen <= own - window)
            mixed = attend(queries[first:last], keys, vals, hidden, softcap=softcap, sinks=sinks)
            out[first:last] = mixed.reshape(last - first, -1)
        first = last
    return out


def _finish(y: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor | None) -> Tensor:
    if bias is not None:
        y = y + bias
    if residual is not None:
        y = y + residual
    return y if out is None else out.copy_(y)


def _row_slices(wanted: Tensor, m: DeviceMatrix) -> list[slice] | list[Tensor]:
    """Return the requested rows of m, bool [n_rows], in pieces that decode to some megabytes."""
    index = wanted.nonzero()[:, 0]
    if len(index) > GATHER_BELOW * m.n_rows:
        return m.slices()
    return list(index.split(max(SLICE_VALUES // m.n_cols, 1))) if len(index) else []


def _products(x: Tensor, m: DeviceMatrix, bias: Tensor | None, wanted: Tensor | None) -> Tensor:
    """Return x @ m.T + bias [T, n_rows]. Rows that no token selects (bool [T, n_rows]) are 0 and not read."""
    if wanted is None:
        return linear(x, m, bias)
    y = torch.zeros((len(x), m.n_rows), device=x.device)
    for rows in _row_slices(wanted.any(dim=0), m):
        y[:, rows] = x @ m.values(rows).T
        if bias is not None:
            y[:, rows] += bias[rows]
    return y


def count(
    counts: Tensor, chosen: Tensor | None, fires: Tensor | None, value: Tensor, *, dense: bool = False
) -> None:
    """Add to counts, int64 [N_COUNTS], the neurons selected and active over all tokens, and the read rows.

    Read rows are the rows that any token reads, or with `dense` all rows. `linear_t` adds the unread bytes of
    input-major matrices.
    """
    active = value != 0
    if chosen is None:
        chosen = torch.ones_like(active)
    gate_rows = torch.zeros_like(chosen[:1]) if fires is None else chosen
    up_rows = chosen if fires is None else fires
    rows = [wanted.any(dim=0).sum() for wanted in (gate_rows, up_rows, active)]
    if dense:
        rows = [torch.full_like(rows[0], active.shape[1])] * 3
        rows[0] = rows[0] * (fires is not None)
    counts[:5] += torch.stack([chosen.sum(), active.sum(), *rows]).to(counts.dtype)
