"""Planted activity: an FFN whose neurons fire as often as wanted, and a predictor that knows exactly which.

The first 32 channels of the residual stream are constant: +1 in their first half, -1 in the second, so that
they also survive the mean of a layer norm. No layer writes to them. A gate row is the sum of TERMS directions
out of `rank` random ones, each a row of +1 and -1, and weights on the constant channels that act as its bias:
over tokens its product with the residual stream is N(bias, sigma²), and neuron i fires with the probability
that was chosen for it. A norm divides by a positive number and changes no sign, so a two-layer predictor
represents the same sum without the norm: fc1 holds every direction and its negative, fc2 their difference.

Every planted weight is a small whole number times a scale of few bits, one per 32: it is the same number in
F32, F16, BF16, Q8_0 and Q4_0, along either side of the matrix, so no rounding comes between gate and
predictor, nor between a file with ffn_down_t and one with ffn_down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from hotset.formats.quants import TYPES, GGMLType, quantize, row_bytes

BLOCK = 32  # values that share a scale; also the constant channels
CONSTANT = np.repeat(np.array([1, -1], np.int8), BLOCK // 2)  # the values of those channels
TERMS = 7  # directions in a gate row: their sum, -7 to 7, fits in 4 bits
LARGEST = 7  # magnitude of a whole number; -8 has no negative
HOTTEST = 0.98  # probability of the hottest neurons of a power law
HOT_HEAD, COLD_FLOOR = 0.2, 0.02  # as parts of the density: share of neurons at HOTTEST, lowest probability
PART = 512  # rows that a thread makes at a time, so that its temporaries stay in the cache
TYPES_OF_PLANTED = (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_0)

Skew = Literal["power", "uniform"]


def firing_probabilities(n: int, density: float, skew: Skew) -> np.ndarray:
    """Return the probabilities [n] with which neurons fire, the hottest first, with mean `density`.

    power: constant over a small head, then falling as rank^-s with the s that gives the mean.
    """
    if not 0 < density < HOTTEST:
        raise ValueError(f"the share of active neurons must be between 0 and {HOTTEST}, not {density}")
    if skew == "uniform":
        return np.full(n, density)
    rank = (np.arange(n) + 0.5) / (n * HOT_HEAD * density)
    low, high = 0.0, 64.0
    for _ in range(80):
        exponent = (low + high) / 2
        p = HOTTEST * np.maximum(np.maximum(rank, 1.0) ** -exponent, COLD_FLOOR * density)
        low, high = (exponent, high) if p.mean() > density else (low, exponent)
    return p


def few_bits(x: np.ndarray | float, bits: int) -> np.ndarray:
    """Return values rounded to `bits` significant bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)


def encode(codes: np.ndarray, scales: np.ndarray, type: GGMLType) -> np.ndarray:
    """Encode rows of integers int8 [n, ne0], times scales [n, ne0 / 32]: uint8 [n, row_bytes]."""
    n, n_in = codes.shape
    blocks = codes.reshape(n, -1, BLOCK)
    if type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        values = blocks * scales[:, :, None].astype(np.float32)
        return quantize(values.reshape(n, n_in), type)
    layout = TYPES[type].block
    assert layout is not None
    out = np.empty((n, row_bytes(type, n_in)), np.uint8)
    stored = out.view(layout)
    stored["d"] = scales
    if type == GGMLType.Q8_0:
        stored["qs"] = blocks
    elif type == GGMLType.Q4_0:
        nibbles = (blocks + np.int8(8)).view(np.uint8)
        stored["qs"] = nibbles[..., :16] | nibbles[..., 16:] << np.uint8(4)
    else:
        raise ValueError(f"planted weights are stored as one of {[t.name for t in TYPES_OF_PLANTED]}")
    return out


@dataclass(frozen=True)
class Moments:
    """The residual stream before an FFN: `sigma` over tokens, of every channel that is not constant."""

    sigma: float
    d: int

    @property
    def mean_square(self) -> float:
        """Return the mean square over all channels, whose root an RMS norm divides by."""
        return (BLOCK + (self.d - BLOCK) * self.sigma**2) / self.d


class PlantedFFN:
    """The weights of one FFN of `ff` neurons over `d` channels, made in slices on a pool of threads.

    probabilities: float [ff], how often each neuron's gate fires (without a gate: its up projection). rank:
    directions; the predictor's hidden layer has 2 * rank + 32. margin: in standard deviations, how much
    earlier the predictor fires than the gate. variance: of the FFN's addition to each channel. up: mean and
    mean square over tokens of the factor of an active gate.
    """

    def __init__(
        self,
        d: int,
        ff: int,
        *,
        density: float,
        skew: Skew,
        rank: int,
        hot_first: bool,
        stream: Moments,
        margin: float,
        variance: float,
        up: tuple[float, float],
        seed: np.random.SeedSequence,
    ) -> None:
        if d % BLOCK or d <= BLOCK or ff % BLOCK:
            raise ValueError(f"width {d} and {ff} neurons must be multiples of {BLOCK}, the width above it")
        if rank % (BLOCK // 2):
            raise ValueError(f"the rank must be a multiple of {BLOCK // 2}, not {rank}")
        structure, self._down_seed = seed.spawn(2)
        rng = np.random.Generator(np.random.SFC64(structure))
        self.d, self.ff, self.rank = d, ff, rank

        # Pairs of neurons fire equally often and add opposite vectors, so that their sum has mean 0 over
        # tokens and does not shift the scores of the layers above.
        pairs = firing_probabilities(ff // 2, density, skew)
        order = np.arange(ff) if hot_first else rng.permutation(ff)
        self._first, self._second = order[0::2], order[1::2]
        normal = NormalDist()
        quantiles = np.array([normal.inv_cdf(p) for p in pairs])
        self.probabilities = self._of_pairs(pairs)
        self._unit = float(few_bits(1 / math.sqrt(TERMS * (d - BLOCK)), 5))
        spread = self._unit * math.sqrt(TERMS * (d - BLOCK)) * stream.sigma  # of a score over tokens
        self._bias = few_bits(self._of_pairs(quantiles * spread), 8)
        self._predictor_bias = few_bits(self._of_pairs((quantiles + margin) * spread), 8)

        # Each direction has as many +1 as -1, so the mean that a layer norm subtracts has no effect.
        half = (d - BLOCK) // 2
        signs = np.tile(np.repeat(np.array([1, -1], np.int8), half), (rank, 1))
        rows = np.zeros((rank, d), np.int8)
        rows[:, BLOCK:] = rng.permuted(signs, axis=1)
        self._directions = np.concatenate([rows, -rows])
        # The directions in the sum of each gate row: [ff, TERMS], + rank for the negative.
        chosen = rng.random((ff, rank), np.float32).argpartition(TERMS, axis=1)[:, :TERMS]
        self._terms = chosen + rank * rng.integers(0, 2, chosen.shape)

        # Mean and mean square over tokens of relu(score), where the score is N(quantile, 1) before scaling.
        density_at = np.array([normal.pdf(q) for q in quantiles])
        means = quantiles * pairs + density_at
        squares = (quantiles**2 + 1) * pairs + quantiles * density_at
        values = 2 * (squares * up[1] - (means * up[0]) ** 2).sum() * spread**2 / stream.mean_square
        mean_code = LARGEST * (LARGEST + 1) / 3  # mean square of integers from -LARGEST to LARGEST
        wobble = rng.uniform(0.75, 1.25, d // BLOCK)
        self._down_scales = few_bits(math.sqrt(variance / (values * mean_code)) * wobble, 5)  # by outputs

    @property
    def hidden(self) -> int:
        """Width of the predictor's hidden layer."""
        return 2 * self.rank + BLOCK

    def _of_pairs(self, values: np.ndarray) -> np.ndarray:
        out = np.empty(self.ff)
        out[self._first] = out[self._second] = values
        return out

    def gate(self, type: GGMLType, pool: ThreadPoolExecutor) -> np.ndarray:
        """Return [ff, d], the matrix whose signs decide which neurons fire."""

        def part(rows: slice) -> np.ndarray:
            terms = self._terms[rows]
            codes = self._directions[terms[:, 0]]
            for term in terms.T[1:]:
                codes += self._directions[term]
            codes[:, :BLOCK] = CONSTANT
            scales = np.full((len(codes), self.d // BLOCK), self._unit)
            scales[:, 0] = self._bias[rows] / BLOCK
            return encode(codes, scales, type)

        return _in_parts(part, self.ff, row_bytes(type, self.d), pool)

    def fc1(self, type: GGMLType) -> np.ndarray:
        """Return [2 * rank + 32, d]: the directions, their negatives, and 32 rows that give 1."""
        codes = np.zeros((2 * self.rank + BLOCK, self.d), np.int8)
        codes[: 2 * self.rank] = self._directions
        codes[2 * self.rank :, :BLOCK] = CONSTANT
        scales = np.full((len(codes), self.d // BLOCK), self._unit)
        scales[2 * self.rank :] = 1 / BLOCK
        return encode(codes, scales, type)

    def fc2(self, type: GGMLType) -> np.ndarray:
        """Return [ff, 2 * rank + 32]: each gate's directions minus their negatives, and its bias."""
        codes = np.zeros((self.ff, 2 * self.rank + BLOCK), np.int8)
        np.put_along_axis(codes, self._terms, 1, axis=1)
        np.put_along_axis(codes, (self._terms + self.rank) % (2 * self.rank), -1, axis=1)
        codes[:, 2 * self.rank :] = 1
        scales = np.ones((self.ff, codes.shape[1] // BLOCK))
        scales[:, -1] = self._predictor_bias / BLOCK
        return encode(codes, scales, type)

    def down(self, type: GGMLType, transposed: bool, pool: ThreadPoolExecutor) -> np.ndarray:
        """Return [ff, d] if transposed (ffn_down_t), otherwise [d, ff]; zero for the constant channels."""
        table = np.resize(np.arange(-LARGEST, LARGEST + 1, dtype=np.int8), 256)  # byte → integer
        n = self.ff // 2 * self.d
        rng = np.random.Generator(np.random.SFC64(self._down_seed))
        pairs = table[rng.integers(0, 1 << 64, n // 8, np.uint64).view(np.uint8)].reshape(-1, self.d)
        pairs[:, :BLOCK] = 0
        codes = np.empty((self.ff, self.d), np.int8)
        codes[self._first], codes[self._second] = pairs, -pairs
        if not transposed:
            codes = np.ascontiguousarray(codes.T)

        def part(rows: slice) -> np.ndarray:
            n_blocks = codes.shape[1] // BLOCK
            if transposed:
                scales = np.broadcast_to(self._down_scales, (rows.stop - rows.start, n_blocks))
            else:
                scales = np.repeat(self._down_scales, BLOCK)[rows, None].repeat(n_blocks, axis=1)
            return encode(codes[rows], scales, type)

        return _in_parts(part, len(codes), row_bytes(type, codes.shape[1]), pool)


def _in_parts(
    part: Callable[[slice], np.ndarray], n: int, row_size: int, pool: ThreadPoolExecutor
) -> np.ndarray:
    """Return rows [n, row_size], where `part` makes any range of them, in parallel."""
    out = np.empty((n, row_size), np.uint8)

    def make(start: int) -> None:
        rows = slice(start, min(start + PART, n))
        out[rows] = part(rows)

    list(pool.map(make, range(0, n, PART)))
    return out
