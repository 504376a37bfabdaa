"""Bounds of float32 kernels' errors, derived from the order of their operations.

u = 2^-24 is the rounding of one operation. A sum of n terms in which each passes at most m roundings is off
by at most gamma(m) times the sum of the terms' magnitudes (Higham, Accuracy and Stability, chapter 3), even
with cancellation. So bounds use the magnitudes of the inputs, never of the result. The order of operations is
defined in csrc/kernels/kernels.h.

`Oracle` is the NumPy reference in float64. It takes the inputs of every operation from another engine's taps,
so that each operation is compared without earlier errors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from hotset.backends.base import Batch, StepResult
from hotset.backends.decoded import DecodedWeights
from hotset.backends.reference import ReferenceBackend, add_streams, hadamard, head_dot, seen_by, short_conv
from hotset.formats.quants import TYPES, GGMLType, dequantize
from hotset.model import operations as ops
from hotset.model.operations import XIELU

U = 2.0**-24
TINY = 2.0**-126  # smaller numbers lose digits: an operation may be off by half of 2^-149
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
WITH_MINIMUM = (GGMLType.Q4_1, GGMLType.Q5_1, GGMLType.Q2_K, GGMLType.Q4_K, GGMLType.Q5_K)
LANES, BLOCK = 16, 32
TREE = 4  # additions that sum sixteen lanes
AXPY_RANGES, AXPY_TILE = 16, 64  # csrc/ops/axpy.cpp
SPLIT = 512  # positions of one running softmax
KV_BLOCK = 64
EXP = 4 * U  # relative error of the kernels' exp: 1.7e-7 of its polynomial, and its last roundings


def gamma(n: float) -> float:
    """Return the relative error of n roundings in a row."""
    return n * U / (1 - n * U)


def int8_inputs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return activations as quantised weights see them, exactly, and their steps: float64 [n, k] each.

    Each block of 32 consists of multiples of its step, the largest magnitude / 127.
    """
    blocks = np.asarray(x, np.float32).reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(127) / largest
    inverse[~np.isfinite(inverse)] = 0
    step = (largest / np.float32(127)).astype(np.float64)
    codes = np.rint(blocks * inverse).astype(np.float64)
    steps = np.broadcast_to(step, codes.shape)
    return (codes * step).reshape(x.shape), steps.reshape(x.shape)


def rounding_of_inputs(steps: np.ndarray) -> np.ndarray:
    """Return the elementwise error of int8_inputs: half a step, and three roundings of up to 127 steps.

    If the inverse of a step overflows, the codes are 0 and all of x is lost: less than 127 / FLT_MAX.
    """
    return steps * (0.5 + 127 * 3 * U) + np.where(steps * 127 < 3.8e-37, 3.8e-37, 0)


def magnitudes(data: np.ndarray, type_: GGMLType, shape: tuple[int, ...], weights: np.ndarray) -> np.ndarray:
    """Return |scale * code| + |minimum| of weights; these terms may cancel in the weight itself."""
    if type_ not in WITH_MINIMUM:
        return np.abs(weights)
    blocks = np.array(data, np.uint8).reshape(-1).view(TYPES[type_].block).copy()
    for name in blocks.dtype.names:
        if name not in ("d", "m", "dmin", "scales"):
            blocks[name] = 0
    minimum = dequantize(blocks.view(np.uint8).reshape(-1), type_, shape).reshape(weights.shape)
    minimum = minimum.astype(np.float64)
    return np.abs(weights - minimum) + np.abs(minimum)


def linear_bound(type_: GGMLType, x: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Return the bound of a matrix product with exact inputs: x [n, k], magnitude [rows, k] → [n, rows]."""
    k = x.shape[1]
    if type_ in FLOATS:
        roundings, terms = -(-k // LANES) + TREE, k
    else:
        terms = k // BLOCK
        # Per term: scale * scale, the scale of the sum of a block's codes, dot to float, and three for the
        # decoded weight of the comparison. A block with a minimum is added in two steps.
        roundings = -(-terms // LANES) * (2 if type_ in WITH_MINIMUM else 1) + TREE + 6
    return gamma(roundings) * (np.abs(x) @ magnitude.T) + 2 * terms * TINY


def axpy_bound(x: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Return the bound of a down projection by neurons: x [n, k], magnitude [k, columns] → [n, columns]."""
    k = x.shape[1]
    words = -(-k // AXPY_TILE)
    chain = min(k, -(-words // AXPY_RANGES) * AXPY_TILE)
    return gamma(chain + AXPY_RANGES) * (np.abs(x) @ magnitude) + k * TINY


def route_bound(op: ops.Route, x: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the bound of ids (exact) and weights.

    A weight is an exponential, with its own error and its argument's, divided by a sum of such, and possibly
    normalised and scaled.
    """
    of_exp = EXP + U * np.ptp(x, axis=1, keepdims=True)
    weights = np.abs(expected[:, op.n_used :])
    bound = weights * (4 * of_exp + gamma(x.shape[1] / LANES + op.n_used + TREE + 9)) + TINY
    return np.concatenate([-U * np.abs(expected[:, : op.n_used]), bound], axis=1)


def rms_norm_bound(expected: np.ndarray, n: int) -> np.ndarray:
    """Return the bound: the mean of squares has n / 16 + 7 roundings, halved by the root, plus four more."""
    return gamma((n / LANES + TREE + 3) / 2 + 4) * np.abs(expected) + n * TINY


def moments_bound(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of the means of rows, x [n, k], and of the mean squares of x minus that mean."""
    k = x.shape[1]
    centred = np.abs(x - x.mean(axis=1, keepdims=True))
    of_mean = gamma(k / LANES + TREE + 2) * np.abs(x).mean(axis=1, keepdims=True)
    of_centred = of_mean + U * (centred + of_mean)
    variance = (centred**2).mean(axis=1, keepdims=True)
    of_variance = (2 * centred * of_centred + of_centred**2).mean(axis=1, keepdims=True)
    return of_mean, of_variance + gamma(k / LANES + TREE + 2) * (variance + of_variance) + TINY


def gaussian_top_k_bound(x: np.ndarray, multiplier: float) -> np.ndarray:
    """Return the bound for x [n, k]: the threshold's error, equal in a row, and each difference's error."""
    of_mean, of_variance = moments_bound(x)
    mean, variance = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
    highest = np.sqrt(variance + of_variance) * (1 + U)
    of_deviation = np.maximum(
        highest - np.sqrt(variance), np.sqrt(variance) - np.sqrt(np.maximum(variance - of_variance, 0))
    )
    spread = abs(multiplier) * highest
    of_cutoff = of_mean + abs(multiplier) * of_deviation + 2 * U * (np.abs(mean) + of_mean + spread) + TINY
    threshold = mean + multiplier * np.sqrt(variance)
    return of_cutoff + U * (np.abs(x - threshold) + of_cutoff)


def layer_norm_bound(x: np.ndarray, weight: np.ndarray, bias: Any, eps: float) -> np.ndarray:
    """Return the bound for x [n, k].

    The mean's error is its sum's rounding, which shifts all centred values alike.
    """
    k = x.shape[1]
    mean = x.mean(axis=1, keepdims=True)
    centred = np.abs(x - mean)
    of_mean = gamma(k / LANES + TREE + 2) * np.abs(x).mean(axis=1, keepdims=True)
    of_centred = of_mean + U * (centred + of_mean)
    variance = (centred**2).mean(axis=1, keepdims=True)
    of_variance = (2 * centred * of_centred + of_centred**2).mean(axis=1, keepdims=True)
    of_variance += gamma(k / LANES + TREE + 3) * (variance + of_variance + eps) + TINY
    scale = 1 / np.sqrt(variance + eps)
    largest = 1 / np.sqrt(np.maximum(variance + eps - of_variance, eps * (1 - 2 * U)))
    smallest = 1 / np.sqrt(variance + eps + of_variance)
    of_scale = np.maximum(largest - scale, scale - smallest) + 2 * U * largest
    w = np.abs(weight)
    bound = (of_centred * largest + centred * of_scale) * w
    bound += 4 * U * (centred + of_centred) * largest * w
    return bound + (0 if bias is None else U * np.abs(bias)) + TINY


def activation_bound(kind: str, x: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the bound of an activation, including the oracle's own roundings, which cancel far below 0."""
    tail = TINY + np.abs(x) * (2 * TINY + 4e-16)  # if exp overflows, 0 is returned for less than this
    if kind in ("clamped_plus_one", "clamp"):
        return U * np.abs(expected) + TINY
    if kind == "clamped_silu":  # exp's argument is rounded once
        return (EXP + 4 * U + 2 * U * np.abs(x)) * np.abs(expected) + tail
    if kind == "exp":
        return EXP * np.abs(expected) + TINY
    if kind == "sigmoid":
        return (EXP + 2 * U) * np.abs(expected) + TINY
    if kind in ("silu", "capped_silu"):  # x / (1 + exp(-x))
        return (EXP + 2 * U) * np.abs(expected) + tail
    if kind == "gelu_tanh":  # the same with an argument that has five roundings
        argument = np.abs(x) * (1.6 + 0.0714 * x * x)
        return (EXP + 3 * U + 5 * U * argument) * np.abs(expected) + tail
    if kind == "gelu":  # 1 + erf cancels: an absolute error
        return 4 * U * np.abs(x) + TINY
    return 2 * U * np.abs(expected) + TINY  # relu2's product


def similarity_gate_bound(
    op: ops.SimilarityGate,
    inputs: Any,
    *,
    of_sum: float | None = None,
    of_root: float = U,
    of_gate: float = 0.0,
) -> np.ndarray:
    """Return the bound.

    Root and sigmoid grow with the sum. of_sum: the sum's relative error (None: it is computed in float64).
    of_root: the root's. of_gate: the sigmoid's beyond activation_bound.
    """
    x, a, b = inputs
    width = op.x.width
    of_sum = 2 * (width + 4) * 2.0**-53 if of_sum is None else of_sum
    products = (a * b).reshape(len(x), op.n_streams, width)
    s = products.sum(axis=2) / math.sqrt(width)
    off = of_sum * np.abs(products).sum(axis=2) / math.sqrt(width)
    roots = [np.sign(s) * np.sqrt(np.maximum(np.abs(s), 1e-6)) for s in (s - off, s, s + off)]
    least, gate, most = (1 / (1 + np.exp(-root)) for root in roots)
    bound = np.maximum(most - gate, gate - least) + of_gate * gate
    bound += activation_bound("sigmoid", roots[1], gate) + of_root * np.abs(roots[1]) / 4
    bound = np.abs(x)[:, None] * (bound + U)[:, :, None] + TINY
    return np.asarray(bound).reshape(len(x), -1)


def xielu_bound(x: np.ndarray, f: XIELU) -> np.ndarray:
    """Return the bound.

    Above 0: three products and their sum. Otherwise: e^m - 1 - x of rounded terms, times a factor, plus a
    product. All numbers are first rounded to float32; the oracle's own roundings are of the same kinds.
    """
    size = np.abs(f.positive) * x * x + np.abs(f.linear * x)
    e = np.exp(np.minimum(x, 0.0))
    terms = (EXP + 2 * U) * e + 2 * U * (1 + np.abs(x))
    below = np.abs(f.negative) * (terms + 2 * U * np.abs(e - 1 - x)) + 3 * U * np.abs(f.linear * x)
    off = abs(f.negative) * U  # error of eps
    return np.where(x > 0, gamma(5) * size, 2 * below + off) + TINY


def soft_cap_bound(cap: float) -> float:
    """Return the bound of c * tanh(x / c), computed as c - 2c / (e + 1) with e = exp(2x / c).

    An error of e contributes 2c * e / (e + 1)^2, at most c / 2, and at most 0.9 c if it is an error of the
    argument. The quotient and the difference are rounded.
    """
    return cap * (EXP + 8 * U) + TINY


def attention_bound(
    scores: np.ndarray,
    magnitude: np.ndarray,
    head_dim: int,
    values: np.ndarray,
    softcap: float = 0.0,
    n_more: int = 0,
) -> np.ndarray:
    """Return the bound for one query.

    scores [n], magnitude [n] = sum of |q * k| of each, values [n, dim] → [dim]. n_more: KV blocks of
    compressed blocks, each summed separately. softcap: of the scores, which are given without it; it reduces
    their errors and adds its own. An error e of a score changes its weight by a factor within exp(±e), and
    the sum of weights by as much.
    """
    n = len(scores)
    of_cap = 0.0
    if softcap:
        scores, of_cap = softcap * np.tanh(scores / softcap), soft_cap_bound(softcap)
    highest = scores.max()
    of_score = of_cap + gamma(head_dim + head_dim // BLOCK + 5) * magnitude + U * np.abs(scores - highest)
    rescaled = -(-n // KV_BLOCK) + 1 + -(-n // SPLIT) + 1 + n_more
    of_weight = np.expm1(of_score.max() + rescaled * (EXP + 3 * U) + EXP)
    weights = np.exp(scores - highest)
    sums = weights @ np.abs(values) / weights.sum()
    bound = (2 * of_weight + gamma(n + 2 * rescaled + 8)) * sums
    return bound + 2 * n * TINY * (1 + np.abs(values).max(axis=0))


def spread(x: np.ndarray) -> np.ndarray:
    """Return the largest magnitudes after a Hadamard transform of numbers with magnitudes [..., dim]."""
    width = x.shape[-1] & -x.shape[-1]
    sums = x.reshape(-1, width).sum(axis=1, keepdims=True) / math.sqrt(width)
    return np.broadcast_to(sums, (len(sums), width)).reshape(x.shape)


TRANSFORM = 12  # roundings of a Hadamard transform of up to 512 channels: additions, the factor and its root


def is_neuron_major(op: ops.ExpertLinear | ops.ExpertSum) -> bool:
    return isinstance(op, ops.ExpertSum) and op.neuron_major


def rows_of(op: ops.ExpertLinear | ops.ExpertSum) -> slice:
    return slice(op.first_row, op.first_row + op.n_rows) if isinstance(op, ops.ExpertLinear) else slice(None)


class Oracle(ReferenceBackend):
    """Checks an engine's step, operation by operation.

    Give it each step that the engine ran, in order. The step must have tapped every value of the graph.
    Decoded weights are kept.
    """

    # Relative errors that differ from the CPU's: of a softplus inside a recurrent operation, which the CPU
    # computes in float64, and of divisions and roots, beyond their roundings.
    softplus_off = division_off = root_off = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # In float64, so that no step has to convert them.
        self._weights = DecodedWeights(self.weights, lambda x: x.astype(np.float64), self._weights.room)
        # For states of delta nets: the largest lengths of their columns, and of the columns' errors.
        self._lengths: dict[int, np.ndarray] = {}

    def check(self, batch: Batch, found: StepResult) -> None:
        slots = self._slots(batch)
        taps = {value.id: found.taps[value.name].astype(np.float64) for value in self.graph.values}
        for op in self.graph.primitives:
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                expected, bound = self._expected(op, taps, batch, slots)
            got = taps[op.out.id]
            assert got.shape == expected.shape, op.out.name
            assert np.isfinite(expected).all(), f"{op.out.name}: the oracle gives no number"
            # An oracle's result may be float32 and rounded once more.
            off = np.abs(got - expected) - (bound + U * np.abs(expected))
            if (worst := off.max(initial=-1.0)) > 0 or not np.isfinite(got).all():
                at = np.unravel_index(np.argmax(off), off.shape)
                allowed = np.broadcast_to(bound, off.shape)[at]
                raise AssertionError(
                    f"{type(op).__name__} {op.out.name}{list(map(int, at))} is {got[at]:.9g}, should be "
                    f"{expected[at]:.9g}: off by {worst:.3g} more than {allowed:.3g}"
                )

    def _expected(  # noqa: C901 - a case for each operation
        self, op: Any, taps: dict[int, np.ndarray], batch: Batch, slots: Any
    ) -> tuple[Any, Any]:
        """Return the exact result, and the bound of the kernel's error."""
        if isinstance(op, ops.Linear):
            return self._expected_linear(op, taps, batch, slots)
        if isinstance(op, ops.LowRank):
            return self._expected_low_rank(op, taps, batch)
        if isinstance(op, ops.ExpertLinear | ops.ExpertSum):
            return self._expected_of_experts(op, taps)
        if isinstance(op, ops.ShortConv):
            return self._expected_conv(op, taps, batch, slots)
        if isinstance(op, ops.DeltaNet):
            return self._expected_delta(op, taps, batch, slots)
        if isinstance(op, ops.SelectiveScan):
            return self._expected_scan(op, taps, batch, slots)
        if isinstance(op, ops.Wkv):
            return self._expected_wkv(op, taps, batch, slots)
        if isinstance(op, ops.PoolBlocks):
            return self._expected_pool(op, taps, batch, slots)
        if isinstance(op, ops.ChannelScan):
            return self._expected_channels(op, taps, batch, slots)
        expected = np.asarray(self._compute(op, taps, batch, slots), np.float64)
        match op:
            case (
                ops.Embed()
                | ops.NgramEmbed()
                | ops.SelectOutputs()
                | ops.Mask()
                | ops.Threshold()
                | ops.Heads()
                | ops.Indexer()
            ):
                return expected, -U * np.abs(expected)  # exactly
            case ops.SoftCap():
                return expected, soft_cap_bound(op.cap) + U * np.abs(expected)
            case ops.Scale() if op.weight is not None:  # one more rounding, and underflow before it
                first = op.first_weight
                weight = np.abs(self._weight(op.weight).reshape(-1)[first : first + op.x.width])
                return expected, gamma(2) * np.abs(expected) + TINY * (1 + weight)
            case ops.PositionGain():  # computed in float64
                return expected, U * np.abs(expected)
            case ops.Add() | ops.Multiply() | ops.Scale():
                return expected, U * np.abs(expected) + TINY
            case ops.AddStreams():
                weights = None if op.weights is None else np.abs(taps[op.weights.id])
                size = replace(op, plus=abs(op.plus))
                own = None if op.x is None else np.abs(taps[op.x.id])
                sums = add_streams(size, own, np.abs(taps[op.y.id]), weights)
                n_added = op.y.width * op.n_streams // op.out.width
                return expected, gamma(n_added + 3) * sums + (n_added + 1) * TINY
            case ops.HyperConnection():  # computed in float64
                return expected, U * np.abs(expected)
            case ops.MatchMagnitude():  # the factor is computed in float64
                return expected, gamma(3) * np.abs(expected) + TINY
            case ops.RMSNorm() | ops.UnitNorm():
                return expected, rms_norm_bound(expected, op.x.width // op.n_head)
            case ops.LayerNorm():
                bias = None if op.bias is None else self._weight(op.bias)
                weight = np.ones(op.x.width) if op.weight is None else self._weight(op.weight).reshape(-1)
                x, bound = taps[op.x.id], np.empty(expected.shape)
                for head in np.split(np.arange(op.x.width), op.n_head):
                    own = None if bias is None else bias[head]
                    bound[:, head] = layer_norm_bound(x[:, head], weight[head], own, op.eps)
                return expected, bound
            case ops.HeadDot():
                weight = np.abs(self._weight(op.weight).reshape(-1))
                sums = head_dot(op, *(np.abs(taps[value.id]) for value in op.inputs), weight)
                return expected, gamma(op.a.width // op.n_head + 3) * sums + TINY
            case ops.SimilarityGate():
                return expected, similarity_gate_bound(op, [taps[value.id] for value in op.inputs])
            case ops.GaussianTopK():
                return expected, gaussian_top_k_bound(taps[op.x.id], float(np.float32(op.multiplier)))
            case ops.Activate() if op.xielu is not None:
                return expected, xielu_bound(taps[op.x.id], op.xielu)
            case ops.Activate():
                return expected, activation_bound(op.kind, taps[op.x.id], expected)
            case ops.Route():
                return expected, route_bound(op, taps[op.x.id], expected)
            case ops.Rotate():
                # Both results of a pair (a, b) are at most |a| + |b|; the angles are the same float64
                # numbers.
                x = np.abs(taps[op.x.id]).reshape(-1, op.n_head, op.head_dim)
                half, turned = op.rope.n_rot // 2, slice(op.first, op.first + op.rope.n_rot)
                pairs = x[..., turned]
                if op.rope.kind == "norm":
                    sums = np.repeat(pairs[..., 0::2] + pairs[..., 1::2], 2, axis=-1)
                else:
                    sums = np.tile(pairs[..., :half] + pairs[..., half:], 2)
                bound = np.zeros_like(x)
                bound[..., turned] = 6 * U * abs(op.rope.magnitude) * sums + TINY
                return expected, bound.reshape(expected.shape)
            case ops.TransposedLinear():
                bound = axpy_bound(taps[op.x.id], np.abs(self._weights.neuron_major(op)))
                return expected, bound + (0 if op.bias is None else U * (np.abs(expected) + bound))
            case ops.TransposedHeads():
                sums = np.abs(taps[op.x.id]) @ np.abs(self._weight(op.weight))
                bound = gamma(op.x.width) * sums + op.x.width * TINY
                return expected, bound.swapaxes(0, 1).reshape(expected.shape)
            case ops.Attention():
                return expected, self._attention_bounds(op, taps, batch, slots)
        raise AssertionError(f"no bound for {type(op).__name__}")

    def _expected_linear(
        self, op: ops.Linear, taps: dict[int, np.ndarray], batch: Batch, slots: Any
    ) -> tuple[Any, Any]:
        info = self.weights.tensors[op.weight]
        x = taps[op.x.id]
        inputs = x if info.type in FLOATS else int8_inputs(x)[0]
        expected = np.asarray(self._compute(op, {**taps, op.x.id: inputs}, batch, slots), np.float64)
        rows = slice(op.first_row, op.first_row + op.out.width)
        magnitude = self._magnitudes(op.weight).reshape(-1, op.x.width)
        bound = linear_bound(info.type, inputs, magnitude[rows])
        if op.bias is not None:
            bound += U * (np.abs(expected) + bound)
        return expected, bound

    def _expected_low_rank(
        self, op: ops.LowRank, taps: dict[int, np.ndarray], batch: Batch
    ) -> tuple[Any, Any]:
        """Return result and bound: two sums with a scale between them, and one rounding per adapter."""
        scales = self.adapters.scales(batch)
        assert scales is not None
        expected = self._with_adapters(op, taps, batch, scales)
        owners = batch.sequences if len(expected) == len(batch.tokens) else batch.sequences[batch.outputs]
        x, sums, bound = np.abs(taps[op.x.id]), np.abs(taps[op.y.id]), np.zeros_like(expected)
        for column, pair in self.adapters.pairs_of(op):
            b = np.abs(pair.b.floats[op.first_row : op.first_row + op.out.width]).astype(np.float64)
            scale = np.abs(scales[owners, column] * np.float32(pair.factor)).astype(np.float64)[:, None]
            added = (x @ np.abs(pair.a.floats.T).astype(np.float64) * scale) @ b.T
            n = op.x.width + pair.rank + 2
            sums = sums + added
            bound += gamma(n) * added + n * TINY * (1 + b.sum(axis=1)) * (1 + scale) + U * sums
        return expected, bound * (1 + gamma(4))

    def _expected_conv(
        self, op: ops.ShortConv, taps: dict[int, np.ndarray], batch: Batch, slots: Any
    ) -> tuple[Any, Any]:
        """Return result and bound: sums of as many products as tokens are seen.

        A state's inputs are exact.
        """
        states, x, weight = self._states[op.out.id], taps[op.x.id], np.abs(self._conv_weight(op))
        before = states.copy()
        np.abs(states, out=states)
        sums = self._through_states(
            op, np.abs(x), batch, lambda x, past: short_conv(x, past, weight, op.dilation)
        )
        states[:] = before
        expected = np.asarray(self._compute(op, taps, batch, slots), np.float64)
        bound = gamma(op.kernel + 1) * sums + op.kernel * TINY
        return expected, bound if op.bias is None else bound + U * (np.abs(expected) + bound)

    def _expected_pool(
        self, op: ops.PoolBlocks, taps: dict[int, np.ndarray], batch: Batch, slots: Any
    ) -> tuple[Any, Any]:
        """Return result and bound: sums of weights and of weighted values.

        A weight is a product of exponentials, one per later token of the block and the previous one. Each
        exponential has a rounded difference of rounded scores as its argument.
        """
        states, x = self._states[op.out.id], taps[op.x.id]
        before = states.copy()
        states[:, 2::3] = np.abs(states[:, 2::3])
        sums = self._compute(op, {**taps, op.x.id: np.abs(x)}, batch, slots)
        states[:] = before
        expected = np.asarray(self._compute(op, taps, batch, slots), np.float64)
        n = 2 * op.size if op.overlaps else op.size
        largest = 0.0
        if op.scores is not None and op.bias is not None:
            largest = np.abs(taps[op.scores.id]).max() + np.abs(self._weight(op.bias)).max()
        off = np.expm1(2 * n * (EXP + 2 * U) + 4 * n * U * largest)
        return expected, (2 * off + gamma(2 * n + 4)) * sums + n * TINY

    def _expected_wkv(
        self, op: ops.Wkv, taps: dict[int, np.ndarray], batch: Batch, slots: Any
    ) -> tuple[Any, Any]:
        """Return result and bound, using the lengths of a state's columns as for a delta net.

        A token multiplies a column by diag(w) + b a^T, whose norm is computed, and adds |k| |v|. The column's
        error is multiplied by the norm, and gains the roundings of the products and of the sum over the rows,
        each times the length.
        """
        assert batch.states is not None
        assert batch.saves is not None
        slot_shape = (self.n_states, 2, op.n_head, op.state_shape[2])
        lengths = self._lengths.setdefault(op.out.id, np.zeros(slot_shape))
        expected = np.asarray(self._compute(op, taps, batch, slots), np.float64)
        values = [np.asarray(taps[value.id], np.float64) for value in op.inputs]
        r, w, k, v, *corrected = (x.reshape(len(x), op.n_head, -1) for x in values)
        n, owner, bound = op.state_shape[1], -1, np.empty(v.shape)
        for t, sequence in enumerate(batch.sequences):
            if sequence != owner:
                owner, slot = sequence, batch.states[sequence]
                length, off = lengths[slot] if slot >= 0 else np.zeros(slot_shape[1:])
            before = length, off
            grows = w[t].max(axis=1)[:, None]
            wrong = gamma(4) * grows
            if corrected:
                a, b = (x[t] for x in corrected)
                matrices = np.einsum("hk,hj->hkj", b, a) + w[t][:, :, None] * np.eye(n)
                grows = np.linalg.norm(matrices, 2, axis=(1, 2))[:, None]
                sizes = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
                wrong = wrong + gamma(n + 5) * sizes[:, None]
            added = np.linalg.norm(k[t], axis=1)[:, None] * np.abs(v[t])
            off = grows * off + wrong * (length + off) + gamma(4) * added
            length = grows * length + added
            if batch.saves[t] >= 0:
                lengths[batch.saves[t]] = length, off
            read_length, read_off = (length, off) if corrected else before
            of_reader = np.linalg.norm(r[t], axis=1)[:, None]
            bound[t] = of_reader * (read_off + gamma(n + 1) * (read_length + read_off))
        return expected, bound.reshape(expected.shape) + TINY

    def _expected_channels(
        self, op: ops.ChannelScan, taps: dict[int, np.ndarray], batch: Batch, slots: Any
    ) -> tuple[Any, Any]:
        """Return result and bound as for a selective scan, with one decay per number."""
        assert batch.states is not None
        assert batch.saves is not None
        of_slots = self._lengths.setdefault(op.out.id, np.zeros((self.n_states, 2, *op.state_shape)))
        expected = np.asarray(self._compute(op, taps, batch, slots), np.float64)
        rate, skip = self._weight(op.rate).astype(np.float64), self._weight(op.skip).reshape(-1)
        bound, owner, n = np.empty(expected.shape), -1, op.b.width
        for t, sequence in enumerate(batch.sequences):
            if sequence != owner:
                owner, slot = sequence, batch.states[sequence]
                size, off = of_slots[slot] if slot >= 0 else np.zeros((2, *op.state_shape))
            x, dt, b, c = (np.asarray(taps[value.id][t], np.float64) for value in op.inputs)
            exponent = rate.T * dt
            decay = np.exp(exponent)
            off = decay * off + decay * size * (2 * U * np.abs(exponent) + EXP)
            size = decay * size + np.abs(b[:, None] * (dt * x))
            off = off + gamma(5) * size
            if batch.saves[t] >= 0:
                of_slots[batch.saves[t]] = size, off
            sums = np.abs(c) @ (off + gamma(n + 1) * (size + off))
            bound[t] = sums + gamma(2) * np.abs(skip * x) + U * np.abs(expected[t])
        return expected, bound + TINY

    def _expected_scan(
        self, op: ops.SelectiveScan, taps: dict[int, np.ndarray], batch: Batch, slots: Any
    ) -> tuple[Any, Any]:
        """Return result and bound by sums of sizes.

        A state's error is the previous one's plus the roundings of the decay, of dt and of a sum, each times
        the size of the state.
        """
        assert batch.states is not None
        assert batch.saves is not None
        of_slots = self._lengths.setdefault(op.out.id, np.zeros((self.n_states, 2, *op.state_shape)))
        expected = np.asarray(self._compute(op, taps, batch, slots), np.float64)
        rate, step, skip = (self._weight(name).reshape(-1) for name in (op.rate, op.step, op.skip))
        times = op.n_head // op.n_group
        x, b, c = np.split(np.abs(taps[op.x.id]), np.cumsum([op.out.width, op.n_group * op.dim_k]), axis=1)
        b, c = (np.repeat(v.reshape(-1, op.n_group, op.dim_k), times, axis=1) for v in (b, c))
        x, dt = x.reshape(-1, op.n_head, op.dim_v), np.logaddexp(taps[op.dt.id] + step, 0)
        bound, owner, roundings = np.empty(x.shape), -1, gamma(8) + 2 * EXP
        for t, sequence in enumerate(batch.sequences):
            if sequence != owner:
                owner, slot = sequence, batch.states[sequence]
                size, off = of_slots[slot] if slot >= 0 else np.zeros((2, *op.state_shape))
            decay = np.exp(rate * dt[t])[:, None, None]
            added = b[t][:, :, None] * (dt[t][:, None] * x[t])[:, None]
            of_dt = np.abs(rate * dt[t])[:, None, None] * decay * size + added
            off, size = decay * off + self.softplus_off * of_dt, decay * size + added
            off = off + roundings * size
            if batch.saves[t] >= 0:
                of_slots[batch.saves[t]] = size, off
            sums = np.einsum("hkv,hk->hv", off + gamma(op.dim_k) * size, c[t])
            bound[t] = (
                sums + gamma(2) * np.abs(skip[:, None] * x[t]) + U * np.abs(expected[t].reshape(x[t].shape))
            )
        return expected, bound.reshape(expected.shape) + TINY

    def _expected_delta(
        self, op: ops.DeltaNet, taps: dict[int, np.ndarray], batch: Batch, slots: Any
    ) -> tuple[Any, Any]:
        """Return result and bound, using the lengths of a state's columns.

        A token multiplies a column by g (1 - b k k^T), which scales it by at most g because k has length 1,
        and adds b |v|. The column's error is scaled by at most g too. The token adds the roundings of sums
        over the rows, of k, of g and of b, each times the length or |v|.
        """
        assert batch.states is not None
        assert batch.saves is not None
        slot_shape = (self.n_states, 2, op.n_head, op.dim_v)
        lengths = self._lengths.setdefault(op.out.id, np.zeros(slot_shape))
        expected = np.asarray(self._compute(op, taps, batch, slots), np.float64)
        rate, step = self._weight(op.rate).reshape(-1, 1), self._weight(op.step)
        alpha = (taps[op.alpha.id] + step).reshape(-1, op.n_head, op.alpha.width // op.n_head)
        exponents = rate * np.logaddexp(alpha, 0)
        decays = np.exp(exponents).max(axis=2)  # the slowest decay of a state's columns
        of_softplus = self.softplus_off * (np.abs(exponents) * np.exp(exponents)).max(axis=2)
        shares = 1 / (1 + np.exp(-taps[op.beta.id]))
        values = np.abs(taps[op.x.id][:, -op.out.width :]).reshape(-1, op.n_head, op.dim_v)
        # A key counts twice, a query once; a share has a division.
        roundings = gamma(op.dim_k + 40) + 8 * EXP + 3 * self.root_off + 4 * self.division_off
        bound, owner = np.empty(values.shape), -1
        for t, sequence in enumerate(batch.sequences):
            if sequence != owner:
                owner, slot = sequence, batch.states[sequence]
                length, off = lengths[slot] if slot >= 0 else np.zeros(slot_shape[1:])
            g, b = decays[t][:, None], shares[t][:, None]
            off = g * off + (roundings + of_softplus[t][:, None]) * (length + b * values[t])
            length = g * length + b * values[t]
            if batch.saves[t] >= 0:
                lengths[batch.saves[t]] = length, off
            bound[t] = (off + roundings * length) / np.sqrt(op.dim_k)
        return expected, bound.reshape(expected.shape) + TINY

    def _expected_of_experts(
        self, op: ops.ExpertLinear | ops.ExpertSum, taps: dict[int, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each product of a token and its expert and, for sums, the error of adding them."""
        route, x = taps[op.route.id], taps[op.x.id]
        n, k = len(x), op.n_used
        of_all = isinstance(op, ops.ExpertLinear) and not op.of_parts
        parts = np.repeat(x[:, None], k, axis=1) if of_all else x.reshape(n, k, -1)
        if self.weights.tensors[op.weights[0]].type not in FLOATS and not is_neuron_major(op):
            parts = int8_inputs(parts.reshape(n * k, -1))[0].reshape(parts.shape)
        n_rows = op.n_rows if isinstance(op, ops.ExpertLinear) else op.out.width
        expected, bound = self._by_experts(op, parts, route, n_rows), np.empty((n, k, n_rows))
        for t in range(n):
            for j in range(k):
                bound[t, j] = self._expert_bound(op, int(route[t, j]), parts[t, j][None])[0]
        if op.bias is not None:
            bound += U * (np.abs(expected) + bound)
        if isinstance(op, ops.ExpertLinear):
            return expected.reshape(n, -1), bound.reshape(n, -1)
        weights = route[:, k:, None]
        sums = (np.abs(weights) * np.abs(expected)).sum(axis=1)
        return (weights * expected).sum(axis=1), (np.abs(weights) * bound).sum(axis=1) * 2 + gamma(
            k + 2
        ) * sums + k * TINY

    def _expert_bound(self, op: ops.ExpertLinear | ops.ExpertSum, expert: int, x: np.ndarray) -> np.ndarray:
        """Return the bound of an expert's product, [1, n_rows]."""
        name = op.weights[expert if len(op.weights) > 1 else 0]
        of_all = self._magnitudes(name)
        magnitude = of_all if of_all.ndim == 2 else of_all[expert]
        if is_neuron_major(op):
            return axpy_bound(x, magnitude)
        return linear_bound(self.weights.tensors[name].type, x, magnitude[rows_of(op)])

    def _attention_bounds(
        self, op: ops.Attention, taps: dict[int, np.ndarray], batch: Batch, slots: Any
    ) -> np.ndarray:
        group = op.n_head // op.n_head_kv
        of_keys, of_values = self._formats
        roundings = op.head_dim + of_keys.rotated * TRANSFORM
        bound = np.empty((len(slots), op.n_head, op.head_dim_v))
        chosen = None if op.chosen is None else taps[op.chosen.id]
        for token, (seen, ago) in enumerate(seen_by(op, batch, slots, chosen)):
            q = taps[op.q.id][token].reshape(op.n_head, op.head_dim) * op.scale
            sizes = spread(np.abs(q)) if of_keys.rotated else np.abs(q)
            q = hadamard(q) if of_keys.rotated else q
            keys, values = self._seen(op, seen, slots[token], None if chosen is None else chosen[token])
            for head in range(op.n_head):
                k = keys[:, head // group].astype(np.float64)
                v = values[:, head // group].astype(np.float64)
                scores, magnitude = k @ q[head], np.abs(k) @ sizes[head]
                if op.slopes is not None:
                    fallen = op.slopes[head] * np.abs(ago)
                    scores, magnitude = scores - fallen, magnitude + fallen
                if op.sinks is not None:  # like a position without a value
                    scores = np.append(scores, self._weight(op.sinks)[head])
                    magnitude, v = np.append(magnitude, 0), np.vstack([v, np.zeros(v.shape[1])])
                n_more = 0 if op.blocks is None else -(-len(slots[token]) // KV_BLOCK)
                off = attention_bound(scores, magnitude, roundings, v, op.softcap, n_more)
                if of_values.rotated:  # transformed back; here and in the kernel
                    off = spread(off + 2 * gamma(TRANSFORM) * np.abs(v).max(axis=0))
                bound[token, head] = off
        return bound.reshape(len(slots), -1)

    def _magnitudes(self, name: str) -> np.ndarray:
        key, info = f"magnitudes of {name}", self.weights.tensors[name]
        kept = self._weights.kept
        if key not in kept:
            kept[key] = magnitudes(self.weights.data(name), info.type, info.shape, self._weight(name))
        return kept[key]
