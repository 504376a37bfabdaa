"""Initial values of the student in closed form: thresholds of the gates, and corrections.

A neuron of the original is silu(g) * u. The student's is s * relu(g - t) * u, which has two parameters. For a
threshold t, the scale with the smallest error over some text is E[silu(g) relu(g - t) u^2] / E[relu(g - t)^2
u^2], and the error

    E[silu(g)^2 u^2] - E[silu(g) relu(g - t) u^2]^2 / E[relu(g - t)^2 u^2]

times the squared length of the neuron's row in the down projection is the error in the residual stream. Each
neuron takes the threshold with the smallest error + price * (share of tokens for which it fires). The price
is the same for all neurons of a layer and chosen for the requested mean share. So important neurons may fire
often and unimportant ones rarely. The bias of the down projection corrects the mean error.

Much of the idle neurons' contribution is linear in the layer's input: silu(g) is about g / 2 near zero, and
about constant below. So the least important neurons are retired, and replaced by a linear path of as many
ranks (student.Student explains how a ReLU network holds one), whose neurons always fire. In the middle layers
of SmolLM2-135M, 192 of them halve the error, while 120 more sparse neurons change it by a tenth
(docs/guides/make-sparse.md).

The number of firing and linear neurons per layer is chosen over all layers together. Each candidate is fitted
on the original's stream. Its error on other text is weighted by the effect of such an error on the output
distribution, and one price on active neurons yields the best choice for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hotset.backends.torch.graph import Step, TorchGraph
from hotset.training.student import RETIRED, Activity, Student

if TYPE_CHECKING:
    from hotset.model.operations import Ffn

RIDGE = 0.05  # relative to the mean of the Gram matrix's diagonal
KERNEL = 0.25  # half the width of the gradient's kernel, in standard deviations of the layer's gates
_SHARES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.36, 0.43, 0.5, 0.6, 0.75, 0.9)
_LAYER_SHARES = (0.25, 0.45, 0.65, 0.85, 1.1, 1.4)  # relative to the requested mean share
_LINEAR = (0.0, 0.25, 0.5, 1.0)  # relative to the allowed maximum
_BISECTIONS = 30
_SORTED, _COUNTED = 1024, 4096  # tokens for quantiles, and for losses
_HELD_OUT = 4  # one window in this many measures the error of the others' fit
_WEIGHED = 2  # windows on which the effect on the output distribution is measured


@dataclass(frozen=True)
class LayerTarget:
    """The target of a layer.

    share: mean share of tokens for which a neuron fires, before retirement. n_linear: retired neurons.
    """

    share: float
    n_linear: int = 0


@torch.no_grad()
def calibrate(
    model: TorchGraph,
    student: Student,
    tokens: Tensor,
    targets: Sequence[LayerTarget],
    on_layer: Callable[[int], None] = lambda _: None,
) -> None:
    """Set the student's gate biases, scales, linear paths, down projections and their biases.

    tokens: int64 [n_batch, n_tokens], some thousand in total. targets: one per layer; see `choose_targets`.
    """
    wanted = given = model.run(model.parts[0], tokens, None)[model.parts[0].result]
    both = student.activation == "drelu"
    for i, (ffn, target) in enumerate(zip(model.graph.ffns, targets, strict=True)):
        part, blk = model.parts[i + 1], f"blk.{i}"
        teacher = model.run(part, tokens, wanted)
        original, out = teacher[ffn.neurons], teacher[part.result]
        entered = model.run(part, tokens, given, student.compute(), until=ffn.up.out)
        inp, h, gate, up = _of_ffn(ffn, entered)
        down = model.weight(f"{blk}.ffn_down.weight")
        neurons = _Neurons(original, gate, up, down, target.share, both=both)
        cut, scale, gain = neurons.pick(target.share)
        retired = gain.argsort()[: target.n_linear]
        cut[retired], scale[retired] = -RETIRED, 0.0
        _set(student, f"{blk}.ffn_gate.bias", -cut, add=True)
        _set(student, f"{blk}.ffn_scale", scale)
        if both:
            _set(student, f"{blk}.ffn_up.bias", -neurons.up_cut, add=True)
        values = neurons.values(cut, scale)
        missing = out - inp - student.linear(ffn.down, values)
        fit = _Fit(values, h, missing, out)
        linear = None
        if target.n_linear:
            a, b = fit.linear(target.n_linear)
            student.set_linear(i, a, b)
            linear = b @ a
        delta = fit.down(linear)
        if student.rank:
            a, b = fit.limited(delta, student.rank)
            _set(student, f"{blk}.ffn_down.a", a)
            _set(student, f"{blk}.ffn_down.b", b)
            delta = b @ a
        else:
            _set(student, f"{blk}.ffn_down.delta", delta)
        _set(student, f"{blk}.ffn_down.bias", fit.bias(delta, linear), add=True)
        wanted, given = out, inp + student.ffn_out(ffn, values, h)
        on_layer(i)


@torch.no_grad()
def choose_targets(
    model: TorchGraph,
    tokens: Tensor,
    share: float,
    n_linear: int = 0,
    *,
    both: bool = False,
    on_layer: Callable[[int], None] = lambda _: None,
) -> list[LayerTarget]:
    """Choose each layer's target such that `share` of all neurons are active and the output changes least.

    tokens: as in `calibrate`; every fourth window is held out. n_linear: the most neurons of a layer that may
    be retired. both: dReLU.
    """
    n_windows, n_tokens = tokens.shape
    is_held = (torch.arange(n_windows) % _HELD_OUT == _HELD_OUT - 1).to(model.device)
    if not is_held.any():
        return [LayerTarget(share)] * model.graph.n_layer
    fitted, held = (~is_held).repeat_interleave(n_tokens), is_held.repeat_interleave(n_tokens)
    weighed = tokens[is_held][:_WEIGHED]
    expected = F.log_softmax(model.logits(weighed), -1)
    stream = model.run(model.parts[0], tokens, None)[model.parts[0].result]
    options: list[list[tuple[float, float, LayerTarget]]] = []  # per layer: error, active share, target
    widths = sorted({round(n_linear * part) for part in _LINEAR})
    for i, ffn in enumerate(model.graph.ffns):
        step = model.run(model.parts[i + 1], tokens, stream)
        inp, h, gate, up = _of_ffn(ffn, step)
        weight = model.weight(f"blk.{i}.ffn_down.weight")
        original, out = step[ffn.neurons], step[ffn.out]
        length = (inp + out)[held].square().sum(1)
        neurons = _Neurons(original, gate, up, weight, share, both=both)
        missed: list[tuple[float, float, LayerTarget]] = []
        for part in _LAYER_SHARES:
            cut, scale, gain = neurons.pick(part * share)
            values = neurons.values(cut, scale)
            fit = _Fit(values[fitted], h[fitted], out[fitted], (inp + out)[fitted])
            fires = (values != 0).float().mean(0)
            for k in widths:
                kept = torch.ones_like(fires, dtype=torch.bool)
                kept[gain.argsort()[:k]] = False
                path = None
                if k:
                    a, b = fit.linear(k, kept)
                    path = b @ a
                down = torch.zeros_like(weight)
                down[:, kept] = fit.down(path, kept)
                error = out[held] - values[held] @ down.T - fit.bias(down, path)
                if path is not None:
                    error -= h[held] @ path.T
                active = float(fires[kept].sum() + k) / len(fires)
                square = float((error.square().sum(1) / length).mean())
                missed.append((square, active, LayerTarget(part * share, k)))
        error, length = error[: weighed.numel()], length[: weighed.numel()]  # of the last option: any will do
        wrong = (inp + out)[held][: weighed.numel()] - error
        suffered = _divergence(model, weighed, wrong, i, expected)
        per_square = suffered / max(float((error.square().sum(1) / length).mean()), 1e-30)
        options.append([(per_square * square, active, target) for square, active, target in missed])
        stream = inp + out
        on_layer(i)
    return cheapest(options, share)


def cheapest(
    options: Sequence[Sequence[tuple[float, float, LayerTarget]]], share: float
) -> list[LayerTarget]:
    """Return each layer's option with the least error + price * active share, for a bisected price."""

    def best(price: float) -> list[tuple[float, float, LayerTarget]]:
        return [min(layer, key=lambda option: option[0] + price * option[1]) for layer in options]

    low, high = -30.0, 30.0
    for _ in range(2 * _BISECTIONS):
        middle = (low + high) / 2
        if sum(active for _, active, _ in best(math.exp(middle))) > share * len(options):
            low = middle
        else:
            high = middle
    return [target for _, _, target in best(math.exp(high))]


def _divergence(model: TorchGraph, tokens: Tensor, stream: Tensor, layer: int, expected: Tensor) -> float:
    """Return the mean KL from the original if the stream after a layer is replaced by `stream`."""
    for part in model.parts[layer + 2 :]:
        stream = model.run(part, tokens, stream)[part.result]
    got = F.log_softmax(stream, -1)  # the last part ends in logits
    return float((expected.exp() * (expected - got)).sum(-1).mean())


def _of_ffn(ffn: Ffn, step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the residual stream after attention, the FFN's input, gate and up; each [n, width]."""
    assert ffn.gate is not None
    return step[ffn.x], step[ffn.gate.x], step[ffn.gate.out], step[ffn.up.out]


@torch.no_grad()
def kernel_widths(model: TorchGraph, student: Student, tokens: Tensor) -> list[float]:
    """Return half the width of the gradient's kernel for each layer: KERNEL standard deviations of its gates.

    tokens: int64 [n_batch, n_tokens].
    """
    activity = Activity()
    model.streams(tokens, student.compute(activity))
    return [KERNEL * float(deviation) for deviation in activity.deviation]


def _set(student: Student, name: str, value: Tensor, *, add: bool = False) -> None:
    parameter = student.get(name)
    assert parameter is not None
    parameter.copy_(parameter + value if add else value)


class _Neurons:
    """Candidates for the gate thresholds of a layer's neurons.

    original, gate, up: [n, n_ff]. With two thresholds (dReLU), each half is allowed sqrt(share).
    """

    def __init__(
        self, original: Tensor, gate: Tensor, up: Tensor, down: Tensor, share: float, *, both: bool
    ) -> None:
        step = max(1, len(gate) // _SORTED)
        ordered = gate[::step].T.contiguous().sort(1, descending=True).values  # [n_ff, n]
        n_sorted = ordered.shape[1]
        importance = down.square().sum(0)
        self.gate, self.lifted, self.up_cut = gate, up, torch.zeros_like(importance)
        if both:
            place = min(int(math.sqrt(share) * n_sorted), n_sorted - 1)
            self.up_cut = up[::step].T.contiguous().sort(1, descending=True).values[:, place]
            self.lifted = (up - self.up_cut).relu()
        cuts, losses, scales, shares = [], [], [], []
        every = max(1, len(gate) // _COUNTED)
        original, gate, lifted = (x[::every] for x in (original, gate, self.lifted))
        energy = original.square().mean(0)
        for candidate in _SHARES:
            cut = ordered[:, min(int(candidate * n_sorted), n_sorted - 1)]
            value = (gate - cut).relu_().mul_(lifted)
            cross, own = (original * value).mean(0), value.square().mean(0) + 1e-12
            cuts.append(cut)
            scales.append(cross / own)
            losses.append((energy - cross.square() / own) * importance)
            shares.append((value != 0).float().mean(0))
        self._cuts, self._scales = torch.stack(cuts), torch.stack(scales)
        self._losses, self._fires = torch.stack(losses), torch.stack(shares)
        self._whole = energy * importance

    def pick(self, share: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate threshold, scale, and the reduction of the loss of each neuron; each [n_ff].

        share: mean share of tokens for which a neuron fires.
        """
        loss, fires = self._losses, self._fires
        middle = math.log(float(loss.max()) + 1e-30)
        low, high = middle - 30, middle + 10
        for _ in range(_BISECTIONS):  # bisect the logarithm of the price
            price = (low + high) / 2
            best = (loss + math.exp(price) * fires).argmin(0, keepdim=True)
            if float(fires.gather(0, best).mean()) > share:
                low = price
            else:
                high = price
        best = (loss + math.exp(high) * fires).argmin(0, keepdim=True)
        gain = self._whole - loss.gather(0, best)[0]
        return self._cuts.gather(0, best)[0], self._scales.gather(0, best)[0], gain

    def values(self, cut: Tensor, scale: Tensor) -> Tensor:
        """Return the neurons [n, n_ff] for these thresholds and scales."""
        return (self.gate - cut).relu_().mul_(self.lifted).mul_(scale)


class _Fit:
    """A ridge regression of missing outputs [n, n_out] on neurons [n, n_ff] and layer inputs [n, n_embd].

    The input contributes through a linear map of limited rank. Tokens are weighted by 1 / the squared length
    of their residual stream [n, n_embd]: every later layer divides by it, and a few tokens (attention sinks)
    are so long that they would dominate the fit.
    """

    def __init__(self, neurons: Tensor, h: Tensor, missing: Tensor, stream: Tensor) -> None:
        self.n_ff = neurons.shape[1]
        weight = 1 / stream.square().sum(1, keepdim=True)
        weight /= weight.sum()
        x = torch.cat((neurons, h), 1)
        self.mean, self.offset = (x * weight).sum(0), (missing * weight).sum(0)
        x = (x - self.mean) * weight.sqrt()
        self.gram = x.T @ x
        for part in (slice(None, self.n_ff), slice(self.n_ff, None)):
            diagonal = self.gram.diagonal()[part]
            diagonal.add_(RIDGE * diagonal.mean() + 1e-12)
        self.cross = x.T @ ((missing - self.offset) * weight.sqrt())

    def linear(self, rank: int, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return a [rank, n_embd], b [n_out, rank]: the best map to add to `kept` neurons, bool [n_ff]."""
        n_h = len(self.gram) - self.n_ff
        rows = torch.arange(len(self.gram), device=self.gram.device)
        if kept is not None:
            rows = torch.cat((rows[: self.n_ff][kept], rows[self.n_ff :]))
        whole = torch.linalg.solve(self.gram[rows][:, rows], self.cross[rows])[-n_h:].T  # [n_out, n_embd]
        return _truncated(whole, self.gram[self.n_ff :, self.n_ff :], rank)

    def down(self, linear: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
        """Return the map [n_out, n_ff] from the neurons, in addition to a linear one [n_out, n_embd].

        kept: use only these neurons.
        """
        gram, cross = self.gram[: self.n_ff, : self.n_ff], self.cross[: self.n_ff]
        if linear is not None:
            cross = cross - self.gram[: self.n_ff, self.n_ff :] @ linear.T
        if kept is not None:
            gram, cross = gram[kept][:, kept], cross[kept]
        solved: Tensor = torch.linalg.solve(gram, cross)
        return solved.T

    def limited(self, down: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return a [rank, n_ff], b [n_out, rank]: the best approximation of a map from the neurons."""
        return _truncated(down, self.gram[: self.n_ff, : self.n_ff], rank)

    def bias(self, down: Tensor, linear: Tensor | None = None) -> Tensor:
        """Return the mean output that these maps miss, [n_out]."""
        given = down @ self.mean[: self.n_ff]
        return self.offset - given - (0 if linear is None else linear @ self.mean[self.n_ff :])


def _truncated(matrix: Tensor, gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return a [rank, n_in], b [n_out, rank] whose product is closest to the matrix [n_out, n_in].

    gram: of the inputs, on which the distance is measured.
    """
    factor = torch.linalg.cholesky(gram)
    u, s, v = torch.linalg.svd(matrix @ factor, full_matrices=False)
    u, s, v = u[:, :rank], s[:rank], v[:rank]
    right = torch.linalg.solve_triangular(factor, v, upper=False, left=False)
    balance = (s.max() * right.norm(dim=1).max()).sqrt() / right.norm(dim=1).max()
    return right * balance, u * (s / balance)
