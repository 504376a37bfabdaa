"""A start for the student in closed form: where each gate should cut, and what makes up for it.

A neuron of the original is silu(g) * u. The student's is s * relu(g - t) * u, which leaves two numbers to
choose. For a cut t the scale that loses least over some text is E[silu(g) relu(g - t) u^2] / E[relu(g - t)^2
u^2], and the loss

    E[silu(g)^2 u^2] - E[silu(g) relu(g - t) u^2]^2 / E[relu(g - t)^2 u^2]

times the squared length of the neuron's row of the down projection is what the residual stream will miss.
Each neuron takes the cut at which loss + price * (share of tokens at which it fires) is smallest; the price,
one for a layer, is such that the mean share comes out as asked. So a neuron that matters may fire often, and
one that does not hardly ever. What is lost on average goes into the bias of the down projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hotset.training.llama_torch import Activity

if TYPE_CHECKING:
    from hotset.training.llama_torch import Llama, Student

RIDGE = 0.05  # of the mean of the Gram matrix's diagonal
KERNEL = 0.25  # half the width of the gradient's kernel, in standard deviations of the layer's gates
_SHARES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.36, 0.43, 0.5, 0.6, 0.75, 0.9)
_BISECTIONS = 30
_SORTED = 1024  # tokens from which quantiles are taken


@torch.no_grad()
def calibrate(
    model: Llama,
    student: Student,
    tokens: Tensor,
    share: float,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> None:
    """Sets the student's gate biases, scales, down projections and their biases.

    tokens: int64 [n_batch, n_tokens], some thousand in all. share: of neurons, those to be active, mean.
    """
    wanted = given = F.embedding(tokens.to(model.device), model.weights["token_embd.weight"])
    both = student.activation == "drelu"
    for i in range(model.config.n_layer):
        blk = f"blk.{i}"

        def enter(x: Tensor, student: Student | None, blk: str = blk) -> tuple[Tensor, Tensor, Tensor]:
            x = x + model.attention(model.norm(x, f"{blk}.attn_norm", student), blk, student)
            h = model.norm(x, f"{blk}.ffn_norm", student).flatten(0, 1)
            return (
                x.flatten(0, 1),
                model.linear(h, f"{blk}.ffn_gate", student),
                model.linear(h, f"{blk}.ffn_up", student),
            )

        inp, gate, up = enter(wanted, None)
        original = model.activated(gate, up)
        out = inp + model.linear(original, f"{blk}.ffn_down", None)
        inp, gate, up = enter(given, student)
        down = model.weight(f"{blk}.ffn_down")
        cut, scale, up_cut = _choose(original, gate, up, down, share, both=both)
        _set(student, f"{blk}.ffn_gate.bias", -cut, add=True)
        _set(student, f"{blk}.ffn_scale", scale)
        if both:
            _set(student, f"{blk}.ffn_up.bias", -up_cut, add=True)
        neurons = (gate - cut).relu() * ((up - up_cut).relu() if both else up) * scale
        _fit(
            student, f"{blk}.ffn_down", neurons, out - inp - model.linear(neurons, f"{blk}.ffn_down", student)
        )
        given = inp + model.linear(neurons, f"{blk}.ffn_down", student)
        wanted, given = out.view(*tokens.shape, -1), given.view(*tokens.shape, -1)
        on_layer(i)


@torch.no_grad()
def kernel_widths(model: Llama, student: Student, tokens: Tensor) -> list[float]:
    """Half the width of the gradient's kernel for each layer: KERNEL standard deviations of its gates.

    tokens: int64 [n_batch, n_tokens].
    """
    activity = Activity()
    model(tokens.to(model.device), student, activity)
    return [KERNEL * float(deviation) for deviation in activity.deviation]


def _fit(student: Student, name: str, x: Tensor, missing: Tensor) -> None:
    """Adds to a matrix and its bias what yields most of `missing` [n, n_out] from `x` [n, n_in].

    Ridge regression; of the low rank that the student has, the best in the metric of x.
    """
    mean = x.mean(0)
    centred, target = x - mean, missing - missing.mean(0)
    gram = centred.T @ centred
    gram.diagonal().add_(RIDGE * gram.diagonal().mean() + 1e-12)
    delta = torch.linalg.solve(gram, centred.T @ target).T  # [n_out, n_in]
    if student.rank:
        factor = torch.linalg.cholesky(gram)
        u, s, v = torch.linalg.svd(delta @ factor, full_matrices=False)
        u, s, v = u[:, : student.rank], s[: student.rank], v[: student.rank]
        right = torch.linalg.solve_triangular(factor, v, upper=False, left=False)
        balance = (s.max() * right.norm(dim=1).max()).sqrt() / right.norm(dim=1).max()
        _set(student, f"{name}.b", u * (s / balance))
        _set(student, f"{name}.a", right * balance)
        delta = (u * s) @ right
    else:
        _set(student, f"{name}.delta", delta)
    _set(student, f"{name}.bias", missing.mean(0) - delta @ mean, add=True)


def _set(student: Student, name: str, value: Tensor, *, add: bool = False) -> None:
    parameter = student.get(name)
    assert parameter is not None
    parameter.copy_(parameter + value if add else value)


def _choose(
    original: Tensor, gate: Tensor, up: Tensor, down: Tensor, share: float, *, both: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut of the gate, scale, cut of up; each [n_ff]. With both cuts each half is allowed sqrt(share)."""
    n = len(gate)
    step = max(1, n // _SORTED)
    ordered = gate[::step].T.contiguous().sort(1, descending=True).values  # [n_ff, n]
    n_sorted = ordered.shape[1]
    importance = down.square().sum(0)
    up_cut = torch.zeros_like(importance)
    lifted = up
    if both:
        place = min(int(math.sqrt(share) * n_sorted), n_sorted - 1)
        up_cut = up[::step].T.contiguous().sort(1, descending=True).values[:, place]
        lifted = (up - up_cut).relu()
    cuts, losses, scales, shares = [], [], [], []
    energy = original.square().mean(0)
    for candidate in _SHARES:
        cut = ordered[:, min(int(candidate * n_sorted), n_sorted - 1)]
        value = (gate - cut).relu() * lifted
        cross, own = (original * value).mean(0), value.square().mean(0) + 1e-12
        cuts.append(cut)
        scales.append(cross / own)
        losses.append((energy - cross.square() / own) * importance)
        shares.append((value != 0).float().mean(0))
    loss, fires = torch.stack(losses), torch.stack(shares)
    low, high = math.log(float(loss.max()) + 1e-30) - 30, math.log(float(loss.max()) + 1e-30) + 10
    for _ in range(_BISECTIONS):  # of the logarithm of the price
        price = (low + high) / 2
        best = (loss + math.exp(price) * fires).argmin(0, keepdim=True)
        if float(fires.gather(0, best).mean()) > share:
            low = price
        else:
            high = price
    best = (loss + math.exp(high) * fires).argmin(0, keepdim=True)
    return torch.stack(cuts).gather(0, best)[0], torch.stack(scales).gather(0, best)[0], up_cut
