"""Recurrent layers: short convolutions, delta nets, state spaces, RWKV."""

from __future__ import annotations

from dataclasses import replace

from hotset.model import operations as ops
from hotset.model.builder import GraphBuilder
from hotset.model.mixers import ChannelMixer, ConvMixer, DeltaMixer, RwkvMixer, StateSpaceMixer
from hotset.model.operations import Value


def convolved(model: GraphBuilder, blk: str, mixer: ConvMixer, h: Value) -> Value:
    """Add a short convolution: the product of two projections, convolved, times a third projection."""
    d = model.config.n_embd
    names = f"{blk}.conv_b", f"{blk}.conv_c", f"{blk}.conv_x"
    parts = model.rows_of(f"{blk}.shortconv.in_proj", h, dict.fromkeys(names, d))
    b, c, x = (model.add(op) for op in parts)
    x = model.add(ops.Multiply(model.value(f"{blk}.conv_in", d), b, x, **model.where))
    weight = model.weights.matrix(f"{blk}.shortconv.conv", mixer.kernel, d)
    conv = model.add(ops.ShortConv(model.value(f"{blk}.conv", d), x, weight, mixer.kernel, **model.where))
    gated = model.add(ops.Multiply(model.value(f"{blk}.conv_gated", d), c, conv, **model.where))
    return model.linear(gated, f"{blk}.shortconv.out_proj", d, f"{blk}.conv_out")


def delta_net(model: GraphBuilder, blk: str, mixer: DeltaMixer, h: Value) -> Value:
    """Add the gated delta rule on convolved queries, keys and values, normed per head and gated."""
    n, of_values, width = mixer.n_head, mixer.of_values, 2 * mixer.of_keys + mixer.of_values
    qkv = model.linear(h, f"{blk}.attn_qkv", width, f"{blk}.delta_qkv")
    gate = model.linear(h, f"{blk}.attn_gate", of_values, f"{blk}.delta_gate")
    if f"{blk}.ssm_ba.weight" in model.weights.tensors:  # for each key head: beta, then alpha
        both = model.linear(h, f"{blk}.ssm_ba", 2 * n, f"{blk}.delta_ba")
        beta, alpha = (
            model.add(ops.Heads(model.value(f"{blk}.{name}", n), both, mixer.n_head_k, first, **model.where))
            for name, first in (("delta_beta", 0), ("delta_alpha", n // mixer.n_head_k))
        )
    else:
        beta = model.linear(h, f"{blk}.ssm_beta", n, f"{blk}.delta_beta")
        alpha = model.linear(h, f"{blk}.ssm_alpha", n, f"{blk}.delta_alpha")
    weight = model.weights.matrix(f"{blk}.ssm_conv1d", mixer.kernel, width)
    conv = model.add(
        ops.ShortConv(model.value(f"{blk}.conv", width), qkv, weight, mixer.kernel, **model.where)
    )
    act = model.activated(conv, "silu")
    step = model.weights.bias(f"{blk}.ssm_dt", n, required=True)
    assert step is not None
    rate = model.weights.bare(f"{blk}.ssm_a", n)
    delta = model.add(
        ops.DeltaNet(
            model.value(f"{blk}.delta", of_values), act, alpha, beta, rate, step, n, mixer.n_head_k,
            mixer.dim_k, mixer.dim_v, mixer.tiled, **model.where,
        )
    )  # fmt: skip
    return _read_state(model, blk, mixer, delta, gate, "ssm_out")


def channel_deltas(model: GraphBuilder, blk: str, mixer: DeltaMixer, h: Value) -> Value:
    """Add a delta net whose keys decay per channel (Kimi Delta Attention, arXiv 2510.26692)."""
    n, width, joined = mixer.n_head, mixer.of_values, None
    for part in "qkv":
        x = model.linear(h, f"{blk}.attn_{part}", width)
        weight = model.weights.numbers(f"{blk}.ssm_conv1d_{part}", mixer.kernel * width)
        out = model.value(f"{blk}.conv_{part}", width)
        x = model.activated(model.add(ops.ShortConv(out, x, weight, mixer.kernel, **model.where)), "silu")
        if joined is not None:
            out = model.value(f"{blk}.conv_{part}_act_joined", joined.width + width)
            x = model.add(ops.Heads(out, joined, 1, 0, x, **model.where))
        joined = x
    assert joined is not None
    alpha, gate = (
        model.linear(model.linear(h, f"{blk}.ssm_{name}_a", mixer.dim_k), f"{blk}.ssm_{name}_b", width)
        for name in "fg"
    )
    beta = model.linear(h, f"{blk}.ssm_beta", n, f"{blk}.delta_beta")
    step = model.weights.bias(f"{blk}.ssm_dt", width, required=True)
    assert step is not None
    rate = model.weights.bare(f"{blk}.ssm_a", n)
    delta = model.add(
        ops.DeltaNet(
            model.value(f"{blk}.delta", width), joined, alpha, beta, rate, step, n, n, mixer.dim_k,
            mixer.dim_v, tiled=False, **model.where,
        )
    )  # fmt: skip
    return _read_state(model, blk, mixer, delta, gate, "attn_output")


def _read_state(
    model: GraphBuilder, blk: str, mixer: DeltaMixer, delta: Value, gate: Value, tensor: str
) -> Value:
    """Add the norm of the heads' results, the gates, and the product with the matrix `tensor`."""
    norm = model.weights.vector(f"{blk}.ssm_norm", mixer.dim_v)
    out, eps = model.value(f"{blk}.delta_norm", delta.width), model.config.norm_eps
    normed = model.add(ops.RMSNorm(out, delta, norm, eps, mixer.n_head, **model.where))
    gate = model.activated(gate, mixer.gate)
    gated = model.add(
        ops.Multiply(model.value(f"{blk}.delta_gated", delta.width), normed, gate, **model.where)
    )
    return model.linear(gated, f"{blk}.{tensor}", model.config.n_embd, f"{blk}.delta_out")


def state_space(model: GraphBuilder, blk: str, mixer: StateSpaceMixer, h: Value) -> Value:
    """Add the state space of Mamba-2 on convolved values, B and C, gated and then normed per group."""
    n, of_values, width = mixer.n_head, mixer.of_values, mixer.width
    widths = {f"{blk}.ssm_z": of_values, f"{blk}.ssm_xbc": width, f"{blk}.ssm_dt": n}
    z, xbc, dt = (model.add(op) for op in model.rows_of(f"{blk}.ssm_in", h, widths))
    weight = model.weights.matrix(f"{blk}.ssm_conv1d", mixer.kernel, width)
    bias, out = model.weights.bias(f"{blk}.ssm_conv1d", width), model.value(f"{blk}.conv", width)
    conv = model.add(ops.ShortConv(out, xbc, weight, mixer.kernel, bias, **model.where))
    act = model.add(ops.Activate(model.value(f"{blk}.conv_act", width), conv, "silu", **model.where))
    step = model.weights.bias(f"{blk}.ssm_dt", n, required=True)
    assert step is not None
    rate, skip = (model.weights.bare(f"{blk}.{name}", n) for name in ("ssm_a", "ssm_d"))
    scan = ops.SelectiveScan(
        model.value(f"{blk}.ssm", of_values), act, dt, rate, step, skip, n, mixer.n_group, mixer.dim_k,
        mixer.dim_v, **model.where,
    )  # fmt: skip
    y = model.add(scan)
    gate = model.add(ops.Activate(model.value(f"{blk}.ssm_z_act", of_values), z, "silu", **model.where))
    y = model.add(ops.Multiply(model.value(f"{blk}.ssm_gated", of_values), y, gate, **model.where))
    if mixer.normed:
        norm = model.weights.matrix(f"{blk}.ssm_norm", of_values // mixer.n_group, mixer.n_group)
        out, eps = model.value(f"{blk}.ssm_unit", of_values), model.config.norm_eps
        y = model.add(ops.UnitNorm(out, y, eps, mixer.n_group, **model.where))
        y = model.add(ops.Scale(model.value(f"{blk}.ssm_norm", of_values), y, 1.0, norm, **model.where))
    return model.linear(y, f"{blk}.ssm_out", model.config.n_embd)


def channel_space(model: GraphBuilder, blk: str, mixer: ChannelMixer, h: Value) -> Value:
    """Add the state space of Mamba on convolved values, from which dt, B and C are computed too; gated."""
    n = mixer.inner
    both = dict.fromkeys((f"{blk}.ssm_x_in", f"{blk}.ssm_z"), n)
    x, z = (model.add(op) for op in model.rows_of(f"{blk}.ssm_in", h, both))
    weight = model.weights.matrix(f"{blk}.ssm_conv1d", mixer.kernel, n)
    bias, out = model.weights.bias(f"{blk}.ssm_conv1d", n), model.value(f"{blk}.conv", n)
    x = model.activated(model.add(ops.ShortConv(out, x, weight, mixer.kernel, bias, **model.where)), "silu")
    widths = {f"{blk}.ssm_dt_in": mixer.rank, f"{blk}.ssm_b": mixer.dim_k, f"{blk}.ssm_c": mixer.dim_k}
    parts = [model.add(op) for op in model.rows_of(f"{blk}.ssm_x", x, widths)]
    if mixer.norms is not None:
        names = f"{blk}.ssm_dt_norm", f"{blk}.ssm_b_norm", f"{blk}.ssm_c_norm"
        parts = [_small_norm(model, part, name, mixer) for part, name in zip(parts, names, strict=True)]
    dt, b, c = parts
    dt = model.activated(model.linear(dt, f"{blk}.ssm_dt", n, f"{blk}.ssm_dt_out"), "softplus")
    rate, skip = model.weights.plain(f"{blk}.ssm_a", mixer.dim_k, n), model.weights.bare(f"{blk}.ssm_d", n)
    y = model.add(ops.ChannelScan(model.value(f"{blk}.ssm", n), x, dt, b, c, rate, skip, **model.where))
    gate = model.activated(z, "silu")
    y = model.add(ops.Multiply(model.value(f"{blk}.ssm_gated", n), y, gate, **model.where))
    return model.linear(y, f"{blk}.ssm_out", model.config.n_embd)


def _small_norm(model: GraphBuilder, x: Value, name: str, mixer: ChannelMixer) -> Value:
    if mixer.norms == "weights":
        return model.norm(x, name)
    eps = model.config.norm_eps if mixer.plain_eps is None else mixer.plain_eps
    return model.add(ops.UnitNorm(model.value(name, x.width), x, eps, 1, **model.where))


class TimeMix:
    """The time mix of RWKV, which replaces attention, for the normed stream h.

    first_values: values of the first layer, which later layers of RWKV 7 use; `out` sets it in the first.
    """

    EPS = 64e-5  # of the norm of the heads' results

    def __init__(
        self, model: GraphBuilder, blk: str, mixer: RwkvMixer, h: Value, first_values: Value | None
    ) -> None:
        self._model, self._blk, self._mixer, self._h = model, blk, mixer, h
        self.first_values = first_values
        self._more = model.shifted(h, f"{blk}.time_mix_shift")

    def out(self) -> Value:
        """Add the operations; return the value that is added to the stream."""
        y, gate = self._seventh() if self._mixer.version == 7 else self._sixth()
        if gate is not None:
            y = self._multiplied(y, gate, "time_mix_gated")
        return self._linear(y, "time_mix_output", y.width)

    def _sixth(self) -> tuple[Value, Value]:
        """Add RWKV 6 (arXiv 2404.05892): the share of the previous token depends on the token."""
        model, blk, d, n = self._model, self._blk, self._h.width, self._mixer.rank_mix
        z = model.lerped(self._h, self._more, f"{blk}.time_mix_lerp_x", f"{blk}.time_mix_x")
        z = self._tanh(self._linear(z, "time_mix_w1", 5 * n))
        matrices = model.weights.heads(f"{blk}.time_mix_w2", n, d, 5)
        lerps = model.weights.numbers(f"{blk}.time_mix_lerp_fused", 5 * d)
        x = {}
        for j, name in enumerate("wkvrg"):
            own = model.channels(z, j * n, n, f"{blk}.time_mix_z{name}")
            share = model.value(f"{blk}.time_mix_share_{name}", d)
            model.add(ops.Linear(share, own, matrices, lerps, j * d, **model.where))
            share = self._multiplied(self._more, share, f"time_mix_more_{name}")
            x[name] = self._added(self._h, share, f"time_mix_x{name}")
        r, k, v, gate = (
            self._linear(x[name[0]], f"time_mix_{tensor}", d)
            for name, tensor in (("r", "receptance"), ("k", "key"), ("v", "value"), ("g", "gate"))
        )
        w = self._tanh(self._linear(x["w"], "time_mix_decay_w1", self._mixer.rank_decay))
        w = self._linear(w, "time_mix_decay_w2", d, bias="time_mix_decay")
        w = model.activated(self._scaled(model.activated(w, "exp"), -1.0, "time_mix_rate"), "exp")
        y = self._wkv(r, w, k, v)
        first = model.weights.numbers(f"{blk}.time_mix_first", d)
        out = model.value(f"{blk}.time_mix_bonus", d)
        bonus = model.add(ops.HeadDot(out, v, r, k, first, self._mixer.n_head, **model.where))
        return self._normed(self._added(y, bonus, "time_mix_read")), model.activated(gate, "silu")

    def _seventh(self) -> tuple[Value, Value | None]:
        """Add RWKV 7 (arXiv 2503.14456)."""
        model, blk, mixer, d = self._model, self._blk, self._mixer, self._h.width
        names = "rwkvag" if mixer.rank_gate else "rwkva"
        x = {
            name: model.lerped(
                self._h, self._more, f"{blk}.time_mix_lerp_fused", f"{blk}.time_mix_x{name}", j, len(names)
            )
            for j, name in enumerate(names)
        }
        r, k, v = (
            self._linear(x[tensor[0]], f"time_mix_{tensor}", d) for tensor in ("receptance", "key", "value")
        )
        w = self._tanh(self._linear(x["w"], "time_mix_w1", mixer.rank_decay))
        w = model.activated(self._linear(w, "time_mix_w2", d, bias="time_mix_w0"), "sigmoid")
        w = model.activated(self._scaled(w, -0.606531, "time_mix_rate"), "exp")
        v = self._values(v, x["v"])
        a = self._linear(x["a"], "time_mix_a1", mixer.rank_rate)
        a = model.activated(self._linear(a, "time_mix_a2", d, bias="time_mix_a0"), "sigmoid")
        kk = self._unit(self._times(k, "time_mix_k_k", "time_mix_kk"))
        more = self._multiplied(a, k, "time_mix_ak")
        more = self._added(more, self._scaled(k, -1.0, "time_mix_k_less"), "time_mix_k_more")
        k = self._added(k, self._times(more, "time_mix_k_a", "time_mix_k_share"), "time_mix_k")
        removed = self._scaled(kk, -1.0, "time_mix_kk_less")
        y = self._wkv(r, w, k, v, removed, self._multiplied(kk, a, "time_mix_kka"))
        weight = model.weights.numbers(f"{blk}.time_mix_r_k", d)
        out = model.value(f"{blk}.time_mix_bonus", d)
        bonus = model.add(ops.HeadDot(out, v, r, k, weight, mixer.n_head, **model.where))
        y = self._added(self._normed(y), bonus, "time_mix_sum")
        if not mixer.rank_gate:
            return y, None
        gate = model.activated(self._linear(x["g"], "time_mix_g1", mixer.rank_gate), "sigmoid")
        return y, self._linear(gate, "time_mix_g2", d)

    def _values(self, v: Value, x: Value) -> Value:
        """Add the layer's values, moved towards the first layer's."""
        model, d = self._model, v.width
        first = self.first_values
        if first is None:
            self.first_values = v
            for name in ("time_mix_v0", "time_mix_v1", "time_mix_v2"):  # some files have unused ones here
                model.weights.leave(f"{self._blk}.{name}")
            return v
        share = self._linear(x, "time_mix_v1", self._mixer.rank_value)
        share = self._linear(share, "time_mix_v2", d, bias="time_mix_v0")
        more = self._added(first, self._scaled(v, -1.0, "time_mix_v_less"), "time_mix_v_more")
        more = self._multiplied(more, model.activated(share, "sigmoid"), "time_mix_v_share")
        return self._added(v, more, "time_mix_v")

    def _wkv(
        self, r: Value, w: Value, k: Value, v: Value, a: Value | None = None, b: Value | None = None
    ) -> Value:
        model, out = self._model, self._model.value(f"{self._blk}.time_mix_wkv", v.width)
        return model.add(ops.Wkv(out, r, w, k, v, a, b, self._mixer.n_head, **model.where))

    def _normed(self, y: Value) -> Value:
        """Add a layer norm per head."""
        model, name = self._model, f"{self._blk}.time_mix_ln"
        weight, bias = model.weights.vector(name, y.width), model.weights.bias(name, y.width, required=True)
        out = model.value(name, y.width)
        return model.add(ops.LayerNorm(out, y, weight, bias, self.EPS, self._mixer.n_head, **model.where))

    def _unit(self, x: Value) -> Value:
        """Add heads scaled to length 1."""
        model, dim = self._model, self._mixer.dim
        out = model.value(f"{x.name}_unit", x.width)
        unit = model.add(ops.UnitNorm(out, x, 1e-24 / dim, self._mixer.n_head, **model.where))
        return model.scaled(unit, dim**-0.5, f"{x.name}_length_1")

    def _linear(self, x: Value, tensor: str, width: int, bias: str | None = None) -> Value:
        """Add a product. bias: a tensor with another name than the matrix."""
        model, blk = self._model, self._blk
        op = model.linear_op(x, f"{blk}.{tensor}", width)
        return model.add(
            op if bias is None else replace(op, bias=model.weights.numbers(f"{blk}.{bias}", width))
        )

    def _times(self, x: Value, tensor: str, name: str) -> Value:
        model, weight = self._model, self._model.weights.numbers(f"{self._blk}.{tensor}", x.width)
        out = model.value(f"{self._blk}.{name}", x.width)
        return model.add(ops.Scale(out, x, 1.0, weight, **model.where))

    def _scaled(self, x: Value, factor: float, name: str) -> Value:
        return self._model.scaled(x, factor, f"{self._blk}.{name}")

    def _tanh(self, x: Value) -> Value:
        model = self._model
        return model.add(ops.SoftCap(model.value(f"{x.name}_act", x.width), x, 1.0, **model.where))

    def _multiplied(self, a: Value, b: Value, name: str) -> Value:
        model = self._model
        return model.add(ops.Multiply(model.value(f"{self._blk}.{name}", a.width), a, b, **model.where))

    def _added(self, a: Value, b: Value, name: str) -> Value:
        model = self._model
        return model.add(ops.Add(model.value(f"{self._blk}.{name}", a.width), a, b, **model.where))


def channel_mix(model: GraphBuilder, blk: str, mixer: RwkvMixer, h: Value) -> tuple[Value, Value | None]:
    """Add the input of RWKV's FFN: the normed token and a share of the previous one.

    Returns it, and in RWKV 6 the factor of the FFN's result.
    """
    more = model.shifted(h, f"{blk}.channel_mix_shift")
    x = model.lerped(h, more, f"{blk}.channel_mix_lerp_k", f"{blk}.channel_mix_k")
    if mixer.version == 7:
        return x, None
    r = model.lerped(h, more, f"{blk}.channel_mix_lerp_r", f"{blk}.channel_mix_r")
    r = model.linear(r, f"{blk}.channel_mix_receptance", h.width)
    return x, model.activated(r, "sigmoid")
