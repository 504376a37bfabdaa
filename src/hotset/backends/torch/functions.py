"""Operations in plain torch, on any device and with gradients.

The graph interpreter (graph.py) and the fallback kernels of the GPU backend use them. Values are float32
[n_tokens, width] unless a function says otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hotset.model import operations as ops
from hotset.model.operations import XIELU


def activate(x: Tensor, kind: ops.ActivationKind, threshold: float = 0.0) -> Tensor:
    """Return f(x), elementwise. See operations.Activate."""
    match kind:
        case "sigmoid":
            return torch.sigmoid(x)
        case "clamped_silu":
            m = x.clamp(max=threshold)
            return m * torch.sigmoid(1.702 * m)
        case "clamped_plus_one":
            return x.clamp(-threshold, threshold) + 1
        case "clamp":
            return x.clamp(-threshold, threshold)
        case "capped_silu":
            return F.silu(x.clamp(max=threshold))
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return torch.relu(x)
        case "relu2":
            return torch.relu(x).square()
        case "fatrelu":
            return torch.where(x >= threshold, x, 0.0)
        case "exp":
            return x.exp()
        case "softplus":
            return F.softplus(x)
        case "xielu":
            raise AssertionError("xIELU has numbers of its own")


def xielu(x: Tensor, f: XIELU) -> Tensor:
    """Compute operations.XIELU."""
    below = f.negative * (torch.expm1(x.clamp(max=f.eps)) - x) + f.linear * x
    return torch.where(x > 0, f.positive * x * x + f.linear * x, below)


class _RMSNorm(torch.autograd.Function):
    """An RMSNorm over the last axis. torch's own takes twice as many passes over memory on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        out: Tensor = (x * inverse).mul_(weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse
        along = grad * unit
        grad_weight = along.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        mean = (along @ weight).unsqueeze(-1) / x.shape[-1]
        grad_x = (grad * weight).sub_(unit.mul_(mean)).mul_(inverse)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, n_head: int = 1) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over each of n_head equal parts of the width."""
    parts = x if n_head == 1 else x.unflatten(-1, (n_head, -1))
    out: Tensor = _RMSNorm.apply(parts, weight, eps)  # type: ignore[no-untyped-call]
    return out.reshape(x.shape)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, n_head: int = 1) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, over each of n_head equal parts of a row."""
    if n_head == 1:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return F.group_norm(x, n_head, None if weight is None else weight.flatten(), bias, eps)


def add_streams(op: ops.AddStreams, x: Tensor | None, y: Tensor, weights: Tensor | None) -> Tensor:
    """Add streams y [n, streams * width] to the streams of x, [n, n_streams * width], each with a weight."""
    x = y.new_zeros(len(y), op.out.width) if x is None else x
    streams = x.unflatten(1, (op.n_streams, -1))
    y = y.unflatten(1, (-1, streams.shape[2]))
    factors = torch.full((len(x), op.n_streams, y.shape[1]), op.plus, dtype=x.dtype, device=x.device)
    if weights is not None:
        factors = factors + weights.view_as(factors)
    sums = streams[:, op.first :] + factors[:, op.first :] @ y
    return torch.cat([streams[:, : op.first], sums], dim=1).flatten(1)


def hyper_connection(op: ops.HyperConnection, x: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """Compute operations.HyperConnection of rows."""
    n, factor = op.n_streams, scale.flatten()
    parts = torch.tensor([n, n, n * n][: len(factor)], device=x.device)
    rows = x * factor.repeat_interleave(parts) + base.flatten()
    read = torch.sigmoid(rows[:, :n]) + op.eps
    if x.shape[1] == n:
        return read
    mixed = torch.softmax(rows[:, 2 * n :].unflatten(1, (n, n)), dim=2) + op.eps
    for i in range(op.n_iterations):
        if i:
            mixed = mixed / (mixed.sum(2, keepdim=True) + op.eps)
        mixed = mixed / (mixed.sum(1, keepdim=True) + op.eps)
    written = 2 * torch.sigmoid(rows[:, n : 2 * n])
    of_streams = torch.cat([written[:, :, None], mixed.transpose(1, 2)], dim=2)
    return torch.cat([read, of_streams.flatten(1)], dim=1)


def mix_rows(table: Tensor, at: Tensor) -> Tensor:
    """Return sums of rows of a table [n_rows, width]. at: numbers and shares, as in operations.MixRows."""
    numbers, shares = at.chunk(2, dim=1)
    mixed: Tensor = (F.embedding(numbers.long(), table) * shares[..., None]).sum(1)
    return mixed


def match_magnitude(x: Tensor, like: Tensor, least: float) -> Tensor:
    """Scale the parts of x [n, parts * width] to the root mean square of like [n, width]."""
    parts = x.unflatten(1, (-1, like.shape[1]))
    found = parts.square().mean(-1, keepdim=True).clamp(min=least).sqrt()
    matched: Tensor = parts * (like.square().mean(-1).sqrt()[:, None, None] / found)
    return matched.flatten(1)


def gaussian_top_k(x: Tensor, multiplier: float) -> Tensor:
    """Subtract from each row of x [n, width] its mean and `multiplier` times its deviation.

    Negative results become zero.
    """
    deviation, mean = torch.std_mean(x, dim=-1, keepdim=True, correction=0)
    return torch.relu(x - (mean + multiplier * deviation))


def rotate(x: Tensor, cos_sin: Tensor, *, n_head: int, kind: ops.RopeKind, first: int = 0) -> Tensor:
    """Apply rotary embedding (arXiv 2104.09864) to n_rot channels of each head, from `first` on.

    x: [n_tokens, n_head * head_dim]; cos_sin: [2, n_tokens, n_rot / 2]. kind: norm pairs (2i, 2i + 1), neox
    pairs (i, i + n_rot / 2).
    """
    cos, sin = cos_sin[:, :, None, :]
    half = cos.shape[-1]
    heads = x.reshape(len(x), n_head, -1)
    before, pairs, rest = heads.split([first, 2 * half, heads.shape[-1] - first - 2 * half], dim=-1)
    if kind == "norm":
        a, b = pairs[..., 0::2], pairs[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    else:
        a, b = pairs[..., :half], pairs[..., half:]
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return torch.cat([before, turned, rest], dim=-1).reshape(x.shape)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return attention whose heads may share keys and values: [..., n_tokens, n_head_kv, group, dim_v].

    q: [..., n_tokens, n_head_kv, group, dim], already scaled. k: [..., n_head_kv, n_seen, dim]. v: [...,
    n_head_kv, n_seen, dim_v]. hidden: bool [n_tokens, n_seen] or [..., 1, n_tokens, n_seen], true for
    positions that a token must not see.
    softcap, sinks ([n_head_kv * group]): see operations.Attention. bias [n_head_kv, n_tokens, group, n_seen]
    is added to the scores.
    """
    scores = torch.einsum("...thgd,...hnd->...htgn", q, k)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(hidden.unsqueeze(-2), -math.inf)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:  # the sink is one more score, without a value
        own = sinks.reshape(q.shape[-3], 1, -1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, own], dim=-1), dim=-1)[..., :-1]
    return torch.einsum("...htgn,...hnd->...thgd", weights, v)


def chosen_blocks(op: ops.Indexer, q: Tensor, k: Tensor, weights: Tensor | None) -> Tensor:
    """Return the blocks that each token chooses, float32 [n_texts, n_tokens, out.width]: operations.Indexer.

    q: [n_texts, n_tokens, n_head * head_dim]. k: [n_texts, n_tokens, head_dim]. weights: [n_texts, n_tokens,
    n_head] or None. The choice has no gradient.
    """
    n_tokens, keys = q.shape[1], k[:, op.size - 1 :: op.size]
    dots = torch.einsum("bthd,bsd->bths", q.detach().unflatten(-1, (op.n_head, -1)), keys.detach()).relu()
    scores = dots.sum(2) if weights is None else torch.einsum("bths,bth->bts", dots, weights.detach())
    n_there = (torch.arange(n_tokens, device=q.device) + 1) // op.size
    numbers = torch.arange(keys.shape[1], device=q.device)
    later = numbers >= n_there[:, None]
    scores = scores.nan_to_num(nan=-math.inf).masked_fill(later, -math.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : op.out.width]
    n_kept = n_there[:, None].clamp(max=op.out.width)
    kept = torch.arange(best.shape[-1], device=q.device) < n_kept
    rising = best.masked_fill(~kept, len(numbers)).sort(dim=-1).values.masked_fill(~kept, -1)
    return F.pad(rising.float(), (0, op.out.width - best.shape[-1]), value=-1.0)


def left_out(chosen: Tensor, size: int, n_tokens: int) -> Tensor:
    """Return the blocks that a token did not choose, bool [n_texts, n_tokens, n_tokens // size].

    chosen: [n_texts, n_tokens, top_k], of blocks of `size` tokens; -1: none.
    """
    n_blocks = n_tokens // size
    numbers = chosen.long().masked_fill(chosen < 0, n_blocks)
    hidden = torch.ones(*chosen.shape[:2], n_blocks + 1, dtype=torch.bool, device=chosen.device)
    return hidden.scatter(-1, numbers, value=False)[..., :n_blocks]


def route(
    x: Tensor, op: ops.Route, bias: Tensor | None, scales: Tensor | None = None, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, best first: ids int32 [T, n_used], weights float32 [T, n_used].

    x: the router's scores [T, n_expert]. bias: [n_expert], added for the selection. scales: [n_expert],
    factors of the weights. ids: experts that a table names, instead of a selection. See operations.Route.
    Only the weights have a gradient. (If a score of a token is NaN, its ids are arbitrary and its weights are
    NaN.)
    """
    match op.scoring:
        case "softmax":
            p = torch.softmax(x, dim=1)
        case "sigmoid":
            p = torch.sigmoid(x)
        case "sqrt_softplus":
            p = F.softplus(x).sqrt()
        case "softmax_chosen":
            p = x
    wanted = (x if bias is None and op.n_groups == 1 else p if bias is None else p + bias).detach()
    wanted = wanted.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if op.n_groups > 1:
        groups = wanted.reshape(len(x), op.n_groups, -1)
        best = groups.topk(min(op.group_best, groups.shape[2]), dim=2).values.sum(dim=2)
        kept = best.sort(dim=1, descending=True, stable=True).indices[:, : op.n_groups_used]
        is_kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        wanted = groups.masked_fill(~is_kept[:, :, None], -math.inf).reshape(x.shape)
    # A stable sort puts the lower id first for equal scores; `topk` does not guarantee this.
    if ids is None:
        ids = wanted.sort(dim=1, descending=True, stable=True).indices[:, : op.n_used]
    weights = p.gather(1, ids)
    if op.scoring == "softmax_chosen":
        weights = torch.softmax(weights, dim=1)
    if op.normalised:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=2.0**-14)
    weights = weights * op.scale
    if scales is not None:
        weights = weights * scales[ids]
    weights = torch.where(x.isnan().any(dim=1, keepdim=True), math.nan, weights)
    return ids.to(torch.int32), weights


def join_heads(x: Tensor, n_head: int, first: int, count: int, shared: Tensor | None) -> Tensor:
    """Return channels [first, first + count) of each head of x, followed by the channels that heads share."""
    own = x.reshape(len(x), n_head, -1)[:, :, first : first + count]
    if shared is not None:
        own = torch.cat([own, shared[:, None].expand(-1, n_head, -1)], dim=2)
    return own.flatten(1)


def short_conv(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Convolve each channel causally. x: texts [n_texts, n_tokens, width]. weight: [width, kernel]."""
    n_tokens, kernel = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, (kernel - 1) * dilation, 0))
    parts = (padded[:, j * dilation : j * dilation + n_tokens] * weight[:, j] for j in range(kernel))
    return sum(parts, torch.zeros_like(x))


def ngram_rows(op: ops.NgramEmbed, tokens: Tensor) -> Tensor:
    """Return the table rows of each token's n-grams, int64 [n_texts, n_tokens, heads].

    See operations.NgramEmbed.
    """
    before, mix, rows = tokens.long(), tokens.long() * op.multipliers[0], []
    begun = torch.ones_like(tokens, dtype=torch.bool)
    for n in range(2, len(op.multipliers) + 1):
        before = F.pad(before, (1, 0), value=op.eos)[:, :-1]
        begun = begun & (before != op.eos)
        mix = mix ^ (torch.where(begun, before, op.eos) * op.multipliers[n - 1])
        heads = range((n - 2) * op.n_heads, (n - 1) * op.n_heads)
        rows += [mix % op.sizes[h] + op.offsets[h] for h in heads]
    return torch.stack(rows, dim=-1)


def similarity_gate(op: ops.SimilarityGate, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute operations.SimilarityGate of rows."""
    s = (a.double() * b.double()).unflatten(1, (op.n_streams, -1)).sum(2, keepdim=True)
    s = s / math.sqrt(op.x.width)
    root = (s.sign() * s.abs().clamp_min(1e-6).sqrt()).to(x.dtype)
    return (torch.sigmoid(root) * x[:, None]).flatten(1)


def delta_rule(
    op: ops.DeltaNet, x: Tensor, alpha: Tensor, beta: Tensor, rate: Tensor, step: Tensor
) -> Tensor:
    """Compute the gated delta rule, token by token, for texts [n_texts, n_tokens, width].

    See operations.DeltaNet.
    """
    of_keys, times = op.n_head_k * op.dim_k, op.n_head // op.n_head_k
    q, k, v = x.split([of_keys, of_keys, op.out.width], dim=-1)

    def of_heads(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (op.n_head_k, op.dim_k))
        x = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return x.repeat(1, 1, times, 1) if op.tiled else x.repeat_interleave(times, dim=2)

    q, k, v = of_heads(q) / math.sqrt(op.dim_k), of_heads(k), v.unflatten(-1, (op.n_head, op.dim_v))
    rates = F.softplus(alpha + step).unflatten(-1, (op.n_head, -1)) * rate[:, None]
    decay, strength = rates.exp(), torch.sigmoid(beta)
    state, out = x.new_zeros(len(x), op.n_head, op.dim_k, op.dim_v), []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, :, None]
        off = (v[:, t] - torch.einsum("nhkv,nhk->nhv", state, k[:, t])) * strength[:, t, :, None]
        state = state + k[:, t, :, :, None] * off[:, :, None]
        out.append(torch.einsum("nhkv,nhk->nhv", state, q[:, t]))
    return torch.stack(out, dim=1).flatten(2)


def pool_blocks(op: ops.PoolBlocks, x: Tensor, scores: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the weighted mean of each token's block up to the token, for texts [n_texts, n_tokens, width].

    See operations.PoolBlocks.
    """
    (n_texts, n_tokens, _), size, width = x.shape, op.size, op.out.width
    spare = -n_tokens % size

    def by_block(values: Tensor) -> Tensor:
        blocks: Tensor = F.pad(values, (0, 0, 0, spare)).unflatten(1, (-1, size))
        return blocks

    x, scores = by_block(x), by_block(torch.zeros_like(x) if scores is None else scores)
    scores = scores if bias is None else scores + bias.view(size, -1)
    seen = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    values, weights = x[..., -width:], scores[..., -width:]
    if op.overlaps:
        before = F.pad(x[:, :-1, :, :width], (0, 0, 0, 0, 1, 0))
        of_before = F.pad(scores[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=-math.inf)
        values, weights = torch.cat([before, values], dim=2), torch.cat([of_before, weights], dim=2)
        seen = torch.cat([torch.ones_like(seen), seen], dim=1)
    weights = weights[:, :, None].masked_fill(~seen[:, :, None], -math.inf)
    means = torch.einsum("nbtsw,nbsw->nbtw", torch.softmax(weights, dim=3), values)
    found: Tensor = means.reshape(n_texts, -1, width)[:, :n_tokens]
    return found


def channel_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor, skip: Tensor) -> Tensor:
    """Compute Mamba's state space, token by token, for texts [n_texts, n_tokens, width].

    See operations.ChannelScan.
    """
    state, out = x.new_zeros(len(x), *rate.shape), []
    for t in range(x.shape[1]):
        added = (dt[:, t] * x[:, t])[:, :, None] * b[:, t, None]
        state = (rate * dt[:, t, :, None]).exp() * state + added
        out.append((state * c[:, t, None]).sum(2) + skip * x[:, t])
    return torch.stack(out, dim=1)


def wkv(op: ops.Wkv, r: Tensor, w: Tensor, k: Tensor, v: Tensor, *corrected: Tensor) -> Tensor:
    """Compute RWKV's linear attention, token by token, for texts [n_texts, n_tokens, width].

    See operations.Wkv.
    """
    r, w, k, v, *ab = (x.unflatten(-1, (op.n_head, -1)) for x in (r, w, k, v, *corrected))
    state, out = r.new_zeros(len(r), *op.state_shape), []
    for t in range(r.shape[1]):
        after = w[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        if ab:
            a, b = ab
            after = after + b[:, t, :, :, None] * torch.einsum("nhkv,nhk->nhv", state, a[:, t])[:, :, None]
        out.append(torch.einsum("nhkv,nhk->nhv", after if ab else state, r[:, t]))
        state = after
    return torch.stack(out, dim=1).flatten(2)


def selective_scan(
    op: ops.SelectiveScan, x: Tensor, dt: Tensor, rate: Tensor, step: Tensor, skip: Tensor
) -> Tensor:
    """Compute Mamba-2's state space, token by token, for texts [n_texts, n_tokens, width].

    See operations.SelectiveScan.
    """
    of_group = op.n_group * op.dim_k
    x, b, c = x.split([op.out.width, of_group, of_group], dim=-1)

    def of_heads(group: Tensor) -> Tensor:
        heads: Tensor = group.unflatten(-1, (op.n_group, op.dim_k))
        return heads.repeat_interleave(op.n_head // op.n_group, dim=2)

    x, b, c, dt = x.unflatten(-1, (op.n_head, op.dim_v)), of_heads(b), of_heads(c), F.softplus(dt + step)
    decay = (rate * dt).exp()
    state, out = x.new_zeros(len(x), op.n_head, op.dim_k, op.dim_v), []
    for t in range(x.shape[1]):
        added = b[:, t, :, :, None] * (dt[:, t, :, None] * x[:, t])[:, :, None]
        state = state * decay[:, t, :, None, None] + added
        out.append(torch.einsum("nhkv,nhk->nhv", state, c[:, t]) + skip[:, None] * x[:, t])
    return torch.stack(out, dim=1).flatten(2)
