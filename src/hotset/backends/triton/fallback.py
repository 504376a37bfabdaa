"""The fallback kernels: every kernel of the GPU backend in plain torch, for devices without Triton.

They say what each kernel computes, and its tests compare it with them.

`triton_kernels` has functions of the same names and signatures; `kernels.Kernels` chooses once. Inputs and
results are float32 on the device of the weights, weights are decoded, sums are float32. Nothing is written
in place but `out`, the pages of the cache and `counts`.

A fallback kernel may read numbers on the host (which neurons fire, how long a sequence is), so that a CPU
does no more than it must. A step of them is therefore not captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotset.backends.base import COUNTS, LOGIT_GROUP, PAGE_SIZE
from hotset.backends.stage import SLICE_VALUES
from hotset.backends.torch import functions
from hotset.backends.torch.functions import activate, attend
from hotset.backends.triton import exact
from hotset.backends.triton.matrix import DeviceMatrix, HostRows
from hotset.model.operations import Activate, ActivationKind, Rope, RopeKind

GATHER_BELOW = 0.75  # share of the rows that are wanted: above it all are decoded, without an index
QUERY_ROWS = 64  # tokens of a sequence that attend together
N_COUNTS = len(COUNTS)


@dataclass(frozen=True)
class TokenThreshold:
    """Which tokens lose their small values, and what is small (operations.Threshold).

    tokens: int32 [T], other than 0 for those that do. threshold: magnitudes below it are zero.
    """

    tokens: Tensor
    threshold: float

    def of(self, tokens: Tensor) -> TokenThreshold:
        """That of some tokens, by their indices."""
        return TokenThreshold(self.tokens[tokens], self.threshold)


def zero_small(x: Tensor, by: TokenThreshold | None) -> Tensor:
    """x [T, n] without its small values; None: as it is."""
    if by is None:
        return x
    return torch.where((by.tokens != 0)[:, None] & (x.abs() < by.threshold), 0.0, x)


@dataclass(frozen=True)
class Held:
    """Which neurons of a layer some matrices have rows of, in their order.

    numbers: int32 [n], ascending. words: int32 [ceil(n_ff / 32)], bit i % 32 of word i // 32 for neuron i of
    the layer; before: int32, how many are held before each word.
    """

    numbers: Tensor
    words: Tensor
    before: Tensor

    @classmethod
    def of(cls, numbers: np.ndarray, n_ff: int, place: Callable[[str, np.ndarray], Tensor]) -> Held:
        """place: puts an array on the device, by the name of its field."""
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
    """Inputs of a product whose RMSNorm is not applied yet: the product's sums are multiplied by its factor
    instead, which is one number a token.

    x: [T, n], rows times the norm's weight. squares: float32 [T, n_parts], whose sum is that of the squares
    of a row.
    """

    x: Tensor
    squares: Tensor
    eps: float

    def __len__(self) -> int:
        return len(self.x)

    def normalised(self) -> Tensor:
        """What the norm makes of the rows, [T, n]."""
        mean = self.squares.sum(dim=1, keepdim=True) / self.x.shape[1]
        return self.x * torch.rsqrt(mean + self.eps)


Entering = Tensor | Weighed  # what a product reads


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
    """x [T, n_cols] → f(x @ m.T + bias + residual), [T, n_rows]. activation: f of `activate`; None: none."""
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
    """`linear`, and what products read that follow its RMSNorm; weight: the norm's, [n_rows]."""
    out = linear(x, m, bias, residual)
    return out, rms_norm(out, weight, eps)


def linear_bits(x: Tensor, m: DeviceMatrix, bias: Tensor | None, threshold: float, first: int = 0) -> Tensor:
    """The neurons that a predictor's last product selects: `pack_bits` of x @ m.T + bias."""
    return pack_bits(linear(x, m, bias), threshold, first)


def linear_t(
    x: Tensor,
    m: DeviceMatrix,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    left_out: Tensor | None = None,
) -> Tensor:
    """x [T, n_rows] → x @ m + bias + residual, [T, n_cols]. Row i: what input i adds; unread for a zero.

    left_out: int64 [1], to which the bytes of codes that were not read are added.
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
    """One value per neuron: f(gate) * g(up), or f(up) without a gate; 0 where it is not selected. [T, n].

    h: [T, n_cols]. Rows of gate and up are neurons; n = up.n_rows. activation, threshold: f;
    up_activation: g, None: identity. selected: uint8 [T, bytes], bit i % 8 of byte i // 8 says whether
    neuron i is wanted; None: all are. held: the neurons of the rows; None: all of the layer's. The up row of
    a neuron whose gate yields 0 for every token is not read. gate_threshold: of f, value_threshold: of the
    result.
    counts: int64 [N_COUNTS], is added to.
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
    """f(gate) * g(up), or f(gate) alone, of products [T, n] that are there: `neurons` where every row was
    read, whose other arguments these are. dense: every row counts as read, of the down projection too."""
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
    """f(gate) * g(up), [T, n], of h [T, n_cols] and a matrix of n rows of gate and, behind them, n of up."""
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
    """An FFN by neurons: `neurons`, then `linear_t` over those that are not 0. [T, down_t.n_cols]."""
    values = neurons(
        h, gate, up, activation=activation, threshold=threshold, up_activation=up_activation,
        selected=selected, held=held, gate_bias=gate_bias, up_bias=up_bias, counts=counts,
        gate_threshold=gate_threshold, value_threshold=value_threshold,
    )  # fmt: skip
    return linear_t(values, down_t, down_bias, residual, out)


def pack_bits(scores: Tensor, threshold: float, first: int = 0) -> Tensor:
    """The neurons that a predictor selects, uint8 [T, ceil(n / 8)], n = first + scores.shape[1].

    Bit i % 8 of byte i // 8 is set unless scores[i - first] < threshold (a score of NaN selects); neurons
    below `first` have no score and are always selected. Spare bits are 0.
    """
    bits = torch.nn.functional.pad(~(scores < threshold), (first, 0), value=True)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.int32, device=scores.device)
    return (bits.reshape(len(bits), -1, 8) * weights).sum(dim=2, dtype=torch.int32).to(torch.uint8)


def largest(logits: Tensor) -> Tensor:
    """The largest of each LOGIT_GROUP logits [T, n_vocab], float32 [T, n_vocab / LOGIT_GROUP]; NaN where one
    is not finite."""
    groups = logits.reshape(len(logits), -1, LOGIT_GROUP)
    return torch.where(groups.isfinite(), groups, torch.nan).amax(dim=2)


def unpack_bits(bits: Tensor, n: int, rows: Tensor | None = None) -> Tensor:
    """uint8 [T, bytes] → bool [T, n], of neurons 0 to n - 1 or, with rows [n], of those."""
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
    """What experts yield for the tokens, neither weighed nor summed: [T, n_used, n_embd], the CPU's bits.

    h: [T, n_embd]; slots: int32 [T, n_used], -1: another computes that one, and zeros stand in its place.
    gate, up, down: the matrices of each slot's expert, one under the other, n_neurons rows of gate and up;
    biases: [n_slots, width]. neuron_major: down has a row per neuron. sparse: a neuron whose activation is
    zero is zero, whatever its up. gate_threshold: of what is activated first. counts: int64 [N_COUNTS], is
    added to.
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
    """Of the experts that some tokens want and that have no slot, those that the device fetches.

    ids: int32 [T, n_used]. table: int32 [n_expert], of each its slot or -1. most: int32, of so many that are
    missing how many are fetched, n_spare at most: those that the tokens name first.
    Returns what is asked of the CPU, ids and, for what the device computes, -1 - id, int32 [T, n_used]; the
    slots, -1 where the CPU computes; and the experts that go to the slots from first_spare on, int32
    [n_spare], -1: none.
    """
    slots = table[ids.long()]
    missing = list(dict.fromkeys(ids[slots < 0].tolist()))
    fetched = missing[: int(most[len(missing)])]
    for i, id in enumerate(fetched):
        slots = torch.where(ids == id, first_spare + i, slots)
    given = torch.tensor(fetched + [-1] * (n_spare - len(fetched)), dtype=torch.int32, device=ids.device)
    return torch.where(slots < 0, ids, -1 - ids), slots, given


def fetch_experts(part: HostRows, fetched: Tensor, to: DeviceMatrix | Tensor, first: int) -> None:
    """Copies a part of experts from the host to the slots from `first` on, -1: to none.

    fetched: int32 [n]. to: the matrices of all slots, or biases, float32 [n_slots, width].
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
    """The sum of weight * part in the order of the route, + residual: [T, width].

    parts: [T, n_used, width]; weights: [T, n_used]. own: as parts, those of the device, which count where
    asked, int32 [T, n_used], is below 0 (`choose_experts`). Each product is rounded before it is added: the
    CPU's bits, and the same ones for parts from anywhere.
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
    """x / sqrt(mean(x^2) + eps) * weight, over each of n_head equal parts of the width; by: the threshold of
    the result."""
    return zero_small(functions.rms_norm(x, weight, eps, n_head), by)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, by: TokenThreshold | None = None
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the width; by: the threshold of the result."""
    return zero_small(functions.layer_norm(x, weight, bias, eps), by)


gaussian_top_k = functions.gaussian_top_k
route = functions.route

ANGLE_STEP = 256  # positions: table rows of RopeTable.near


@dataclass(frozen=True)
class RopeTable:
    """What a rotation needs to find its angles on a device that may lack float64.

    cos and sin of ANGLE_STEP neighbouring positions and of every ANGLE_STEP-th position, computed in float64
    on the host; the angle of a position is the sum of two of them, so the tables stay small at any context.
    near: [2, ANGLE_STEP, n_rot / 2]; far: [2, ceil(n_ctx / ANGLE_STEP), n_rot / 2], times the magnitude.
    """

    kind: RopeKind
    n_rot: int
    near: Tensor
    far: Tensor

    @classmethod
    def build(cls, rope: Rope, n_ctx: int, device: torch.device | str) -> RopeTable:
        """For positions 0 to n_ctx - 1."""
        freq = np.asarray(rope.freq, np.float64)
        near = np.arange(ANGLE_STEP)[:, None] * freq
        far = np.arange(0, max(n_ctx, 1), ANGLE_STEP)[:, None] * freq

        def table(angles: np.ndarray, magnitude: float) -> Tensor:
            both = np.stack([np.cos(angles), np.sin(angles)]) * magnitude
            return torch.from_numpy(both.astype(np.float32)).to(device)

        return cls(rope.kind, rope.n_rot, table(near, 1.0), table(far, rope.magnitude))


def angles(positions: Tensor, table: RopeTable) -> Tensor:
    """cos and sin of each token's angles, float32 [2, T, n_rot / 2]: once per step, for all layers.

    positions: int32 or int64 [T]. Past the table's context the result is that of its last positions.
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
    """functions.rotate; cos_sin is from `angles`. norm_weight, eps: an RMSNorm of each head, before."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps, n_head)
    return functions.rotate(x, cos_sin, n_head=n_head, kind=kind)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
) -> None:
    """Writes a step's keys and values into their pages.

    k: [T, n_head_kv * head_dim], v: [T, n_head_kv * head_dim_v]. k_pages, v_pages: float16 or float32
    [n_pages, n_head_kv, PAGE_SIZE, head_dim or head_dim_v]. page_tables: int32 [n_sequences, max_pages];
    sequences, positions: int32 [T] (Batch in backends/base.py). A token whose page is -1 is not stored.
    """
    positions = positions.long()
    page = page_tables[sequences.long(), positions // PAGE_SIZE].long()
    kept = page >= 0
    slot = positions % PAGE_SIZE
    for x, pages in ((k, k_pages), (v, v_pages)):
        heads = x.reshape(len(x), pages.shape[1], pages.shape[3]).to(pages.dtype)
        pages[page[kept], :, slot[kept]] = heads[kept]


def rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    *,
    n_head: int,
    kind: RopeKind = "norm",
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """What stands between the projections and attention, at once: head norms and rotation of q and k, and
    `store_kv`. Returns the rotated q. cos_sin None: no rotation (then q_norm and k_norm must be None).
    """
    if cos_sin is not None:
        q = rotate(q, cos_sin, n_head=n_head, kind=kind, norm_weight=q_norm, eps=eps)
        k = rotate(k, cos_sin, n_head=k_pages.shape[1], kind=kind, norm_weight=k_norm, eps=eps)
    store_kv(k, v, k_pages, v_pages, page_tables, sequences, positions)
    return q


def project_heads(
    h: Entering,
    m: DeviceMatrix,
    bias: Tensor | None,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    *,
    n_head: int,
    kind: RopeKind,
) -> Tensor:
    """`linear` with a matrix of queries, keys and values, one behind the other, and `rotate_store` of them,
    without head norms. Returns the rotated queries, [T, n_head * head_dim]."""
    n_head_kv, dim, dim_v = k_pages.shape[1], k_pages.shape[3], v_pages.shape[3]
    widths = [n_head * dim, n_head_kv * dim, n_head_kv * dim_v]
    q, k, v = linear(h, m, bias).split(widths, dim=1)
    where = page_tables, sequences, positions
    return rotate_store(q, k, v, cos_sin, k_pages, v_pages, *where, n_head=n_head, kind=kind)


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    *,
    n_head: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention over the paged cache, which holds the step's own keys and values already.

    q: [T, n_head * head_dim]; pages and tables as in `store_kv`; [T, n_head * head_dim_v]. window > 0: a
    token sees itself and the window - 1 before it. softcap, sinks ([n_head]): see graph.Attention. A token
    whose page is -1 yields zeros.
    """
    n_head_kv, head_dim_v = k_pages.shape[1], v_pages.shape[3]
    group = n_head // n_head_kv
    out = torch.zeros((len(q), n_head * head_dim_v), device=q.device)
    queries = q.reshape(len(q), n_head_kv, group, -1) * scale
    tokens = list(zip(sequences.tolist(), positions.tolist(), strict=True))
    first = 0
    while first < len(tokens):
        # Neighbours in one sequence share its keys: [first, last) is a run of them.
        last = first + 1
        while last < min(first + QUERY_ROWS, len(tokens)) and tokens[last][0] == tokens[first][0]:
            last += 1
        sequence, n_seen = tokens[first][0], 1 + max(p for _, p in tokens[first:last])
        pages = page_tables[sequence, : -(-n_seen // PAGE_SIZE)].long()
        if bool((pages >= 0).all()):
            keys = (
                k_pages[pages].transpose(0, 1).flatten(1, 2)[:, :n_seen].float()
            )  # [n_head_kv, n_seen, dim]
            vals = v_pages[pages].transpose(0, 1).flatten(1, 2)[:, :n_seen].float()
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
    """The rows of m that are wanted, bool [n_rows], in pieces that decode to some megabytes."""
    index = wanted.nonzero()[:, 0]
    if len(index) > GATHER_BELOW * m.n_rows:
        return m.slices()
    return list(index.split(max(SLICE_VALUES // m.n_cols, 1))) if len(index) else []


def _products(x: Tensor, m: DeviceMatrix, bias: Tensor | None, wanted: Tensor | None) -> Tensor:
    """x @ m.T + bias [T, n_rows]; rows that no token wants (bool [T, n_rows]) are 0 and not read."""
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
    """Adds to int64 [N_COUNTS]: neurons selected and active over all tokens, and rows read by any of them,
    or with `dense` all rows.
    (What is left out of input-major matrices is `linear_t`'s to add.)"""
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
