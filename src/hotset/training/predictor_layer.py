"""Trains the predictor of one layer: score = fc2 · relu(fc1 · p); a neuron is computed if score >= 0.

The network has no biases and reads the residual stream before the norm. So its scores scale with p, while the
choice of firing neurons does not. Everything here is therefore scale-free: inputs have a root mean square of
one, and every layer's threshold is zero. Biases are replaced by weights on nearly constant units. Residual
streams have directions that hardly change: training starts with a unit that yields about 1 for every input,
with each neuron's log-odds of firing as its weights. Calibration, which shifts a layer's threshold, adds the
same value to all scores: the combination of hidden units that is closest to 1 by least squares, times the
shift. So the file keeps one threshold, 0, which every engine of this format supports.

The other initial units are pairs w, -w. They form the best linear predictor of that rank: a decomposition of
the deciding matrix, weighted by the inputs. Growing keeps the learned units and adds units with zero weights.
The loss is cross-entropy, in which firing neurons have the same total weight as the others, although they are
few, and are also weighted by their share of the token's magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from hotset.formats.quants import TYPES, GGMLType, dequantize, fitting, quantize
from hotset.sparsity.calibration import threshold

if TYPE_CHECKING:
    from hotset.training.pairs import LayerPairs

_SAMPLE = 4096  # inputs from which the initial weights are computed
_CALIBRATION = 4096  # limit of the held-out tokens for the threshold, and for the measurement
_LOGIT = 6.0  # log-odds are clipped here: a neuron that has not fired in the sample still may
_SPREAD = 2.0  # initial standard deviation of a linear score
_FAN_IN = (512, 64)  # inputs of fc1 and fc2 up to which the schedule's learning rate applies
_MAX_POSITIVE = 32.0  # weight of firing neurons relative to the others, at most


@dataclass(frozen=True)
class Schedule:
    """The length and speed of a training.

    batch: tokens of a step; epochs: passes over all pairs. learning_rate: of Adam, for small layers; layers
    with more inputs than _FAN_IN use proportionally smaller steps.
    """

    epochs: float = 10.0
    batch: int = 512
    learning_rate: float = 1e-2
    seed: int = 0

    def n_steps(self, n_tokens: int) -> int:
        return max(1, math.ceil(self.epochs * n_tokens / min(self.batch, n_tokens)))


@dataclass(frozen=True)
class PredictorWeights:
    """fc1 float32 [rank, n_embd]; fc2 float32 [n_ff, rank]."""

    fc1: np.ndarray
    fc2: np.ndarray

    @property
    def rank(self) -> int:
        return len(self.fc1)

    def shifted(self, shift: Sequence[float] | np.ndarray) -> PredictorWeights:
        """Return weights whose scores are higher by the hidden units times `shift`, float [rank]."""
        return PredictorWeights(self.fc1, self.fc2 + np.asarray(shift, np.float32))

    def stored(self, type: GGMLType) -> PredictorWeights:
        """Return the weights as a file of that type stores them."""
        return PredictorWeights(_rounded(self.fc1, type), _rounded(self.fc2, type))


@dataclass(frozen=True)
class Quality:
    """The quality of a calibrated predictor on held-out tokens, in shares of the layer's neurons.

    shift: for PredictorWeights.shifted. recall: the share of firing neurons that are selected; of_magnitude:
    the same weighted by magnitude. precision: the share of selected neurons that fire.
    """

    shift: tuple[float, ...] = field(repr=False)
    recall: float
    of_magnitude: float
    precision: float
    selected_share: float
    active_share: float


def _rounded(matrix: np.ndarray, type: GGMLType) -> np.ndarray:
    type = fitting(type, matrix.shape[1])
    return dequantize(quantize(matrix, type), type, matrix.shape[::-1])


def start(pairs: LayerPairs, decides: np.ndarray, rank: int, device: str, seed: int) -> PredictorWeights:
    """Return the initial weights.

    decides: float32 [n_ff, n_embd], whose product with an input shows, up to a bias, which neurons fire.
    """
    generator = np.random.default_rng(seed)
    rows = generator.choice(len(pairs), min(_SAMPLE, len(pairs)), replace=False)
    x = torch.from_numpy(pairs.batch(rows)[0]).to(device)
    frequency = torch.from_numpy(pairs.frequencies()).to(device, torch.float32)
    matrix = torch.from_numpy(decides).to(device)

    mean, n = x.mean(0), len(x)
    second = x.T @ x / n
    # A ridge for directions that are rare in the sample; from the median, because a few channels dwarf the
    # others.
    ridge = 1e-3 * second.diagonal().median().clamp_min(1e-8)
    second.diagonal().add_(ridge + 0.01 * second.diagonal().mean() * x.shape[1] / n)
    constant = torch.linalg.solve(second, mean)
    constant /= (x @ constant).mean()

    covariance = second - torch.outer(mean, mean)
    covariance.diagonal().add_(ridge)
    lower = torch.linalg.cholesky(covariance)
    seen = matrix @ lower  # each neuron's product, in directions of variance one
    spread = seen.norm(dim=1, keepdim=True).clamp_min(1e-12)
    logit = torch.logit(frequency.clamp(1e-4, 1 - 1e-4)).clamp(-_LOGIT, _LOGIT)
    # Neurons that always or never fire need no direction, so weight neurons by their uncertainty.
    uncertain = (frequency * (1 - frequency)).sqrt()[:, None] + 0.02
    torch.manual_seed(seed)
    n_linear = min((rank - 1) // 2, *seen.shape)
    _, _, directions = torch.svd_lowrank(seen / spread * uncertain, min(n_linear + 16, *seen.shape), niter=3)
    directions = directions[:, :n_linear]
    a = torch.linalg.solve_triangular(lower.T, directions, upper=True).T  # [n_linear, n_embd]
    b = _SPREAD * (seen / spread) @ directions
    fc1 = torch.zeros(rank, x.shape[1], device=device)
    fc2 = torch.zeros(len(matrix), rank, device=device)
    fc1[0], fc2[:, 0] = constant, logit - b @ (a @ mean)
    fc1[1 : 1 + n_linear], fc1[1 + n_linear : 1 + 2 * n_linear] = a, -a
    fc2[:, 1 : 1 + n_linear], fc2[:, 1 + n_linear : 1 + 2 * n_linear] = b, -b
    weights = PredictorWeights(fc1.cpu().numpy(), fc2.cpu().numpy())
    return _with_units(weights, 1 + 2 * n_linear, second, generator)


def grown(weights: PredictorWeights, rank: int, pairs: LayerPairs, seed: int) -> PredictorWeights:
    """Return the same function with more units, which are active but have zero weights."""
    generator = np.random.default_rng([seed, rank])
    rows = generator.choice(len(pairs), min(_SAMPLE, len(pairs)), replace=False)
    x = torch.from_numpy(pairs.batch(rows)[0])
    fc1 = np.zeros((rank, weights.fc1.shape[1]), np.float32)
    fc2 = np.zeros((len(weights.fc2), rank), np.float32)
    fc1[: weights.rank], fc2[:, : weights.rank] = weights.fc1, weights.fc2
    return _with_units(PredictorWeights(fc1, fc2), weights.rank, x.T @ x / len(x), generator)


def _with_units(
    weights: PredictorWeights, first: int, second: torch.Tensor, generator: np.random.Generator
) -> PredictorWeights:
    """Set the units from `first` on to random directions that yield about one, scaled by channel."""
    n, width = weights.rank - first, weights.fc1.shape[1]
    size = second.diagonal().sqrt().clamp_min(1e-6).cpu().numpy()
    weights.fc1[first:] = generator.standard_normal((n, width)).astype(np.float32) / (size * math.sqrt(width))
    return weights


def train(
    pairs: LayerPairs,
    weights: PredictorWeights,
    schedule: Schedule,
    device: str,
    on_step: Callable[[], None] = lambda: None,
) -> PredictorWeights:
    """Train a layer; deterministic on a CPU for a given number of threads. on_step: called each step."""
    torch.manual_seed(schedule.seed)
    generator = np.random.default_rng([schedule.seed, weights.rank])
    rows = generator.choice(len(pairs), min(_SAMPLE, len(pairs)), replace=False)
    sample = pairs.batch(rows)[0]
    # Adam's steps have the same size for every weight, so scale channels to the same size.
    size = torch.from_numpy(np.sqrt(np.square(sample).mean(axis=0)) + 1e-6).to(device)
    fc1 = (torch.from_numpy(weights.fc1).to(device) * size).requires_grad_()
    fc2 = torch.from_numpy(weights.fc2.copy()).to(device).requires_grad_()
    share = float(pairs.frequencies().mean())
    positive = min(_MAX_POSITIVE, (1 - share) / max(share, 1e-6))

    n_steps = schedule.n_steps(len(pairs))
    optimizer = torch.optim.Adam([{"params": [fc1]}, {"params": [fc2]}], betas=(0.9, 0.98))
    scales = [min(1.0, wide / fc.shape[1]) for wide, fc in zip(_FAN_IN, (fc1, fc2), strict=True)]
    order = np.empty(0, np.int64)
    batch = min(schedule.batch, len(pairs))
    for step in range(n_steps):
        done = step / n_steps
        rate = schedule.learning_rate * min(1.0, 20 * (done + 1 / n_steps)) * (0.02 + 0.98 * (1 - done))
        for group, scale in zip(optimizer.param_groups, scales, strict=True):
            group["lr"] = rate * scale
        if len(order) < batch:
            order = np.concatenate([order, generator.permutation(len(pairs))])
        rows, order = order[:batch], order[batch:]
        inputs, magnitudes = pairs.batch(rows)
        x = torch.from_numpy(inputs).to(device) / size
        weight, target = _targets(torch.from_numpy(magnitudes).to(device), positive)
        scores = torch.relu(x @ fc1.T) @ fc2.T
        with torch.no_grad():  # the gradient of Σ weight * cross-entropy is weight * (probability - fires)
            gradient = torch.sigmoid(scores).mul_(weight).sub_(target).div_(batch)
        optimizer.zero_grad(set_to_none=True)
        scores.backward(gradient)
        optimizer.step()
        on_step()
    return PredictorWeights((fc1.detach() / size).cpu().numpy(), fc2.detach().cpu().numpy())


def _targets(magnitudes: torch.Tensor, positive: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of all neurons, and the same with 0 for neurons that do not fire.

    Firing neurons have a mean weight of `positive` per token, half of it by magnitude (because the number of
    unnecessarily computed neurons counts, too). Others have weight one.
    """
    fires = (magnitudes > 0).float()
    values = magnitudes.float()
    mean = values.sum(1, keepdim=True) / fires.sum(1, keepdim=True).clamp_min(1)
    target = values.mul_(0.5 * positive / mean.clamp_min(1)).add_(fires, alpha=0.5 * positive)
    return (target - fires).add_(1), target


def calibrate(
    pairs: LayerPairs, weights: PredictorWeights, type: GGMLType, recall: float, device: str
) -> Quality:
    """Find the shift that keeps `recall` of the magnitude, and measure the result.

    One half of the held-out tokens is used for each. Weights are rounded as in the file.
    """
    n = min(len(pairs), 2 * _CALIBRATION)
    half = n // 2
    inputs, magnitudes = pairs.batch(np.arange(half))
    hidden = _hidden(inputs, weights.stored(type), device)
    second = hidden.T @ hidden / half
    second.diagonal().add_(1e-3 * second.diagonal().mean() + 1e-12)
    constant = torch.linalg.solve(second, hidden.mean(0))
    nearly_one = (hidden @ constant).cpu().numpy()[:, None]
    shift = np.zeros(weights.rank, np.float32)
    for _ in range(1 if TYPES[type].block_size == 1 else 3):  # repeat, because the shift is rounded, too
        scores = _scores(hidden, weights.shifted(shift).stored(type))
        away = np.where(scores < 0, np.float32(-np.inf), np.float32(np.inf))
        ratio = np.divide(scores, nearly_one, out=away, where=nearly_one > 0)
        cut = threshold(ratio, magnitudes, recall)
        if not math.isfinite(cut):  # nothing fires, or no shift helps
            break
        shift -= cut * constant.cpu().numpy()
    final = weights.shifted(shift).stored(type)
    inputs, magnitudes = pairs.batch(np.arange(half, n))
    selected = _scores(_hidden(inputs, final, device), final) >= 0
    return _measured(selected, magnitudes, tuple(shift.tolist()))


@torch.no_grad()
def _hidden(inputs: np.ndarray, weights: PredictorWeights, device: str) -> torch.Tensor:
    """Return the hidden units, [n, rank]."""
    return torch.relu(torch.from_numpy(inputs).to(device) @ torch.from_numpy(weights.fc1).to(device).T)


@torch.no_grad()
def _scores(hidden: torch.Tensor, weights: PredictorWeights) -> np.ndarray:
    """Return the scores, float32 [n, n_ff]."""
    scores: np.ndarray = (hidden @ torch.from_numpy(weights.fc2).to(hidden.device).T).cpu().numpy()
    return scores


def _measured(selected: np.ndarray, magnitudes: np.ndarray, shift: tuple[float, ...]) -> Quality:
    fires = magnitudes > 0
    both, values = int((selected & fires).sum()), magnitudes.astype(np.float64)
    n_fires, n_selected, total = int(fires.sum()), int(selected.sum()), float(values.sum())
    return Quality(
        shift,
        both / n_fires if n_fires else 1.0,
        float(values[selected].sum()) / total if total else 1.0,
        both / n_selected if n_selected else 1.0,
        n_selected / selected.size,
        n_fires / selected.size,
    )
