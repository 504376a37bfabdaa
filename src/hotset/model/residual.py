"""Models with several residual streams, and per-layer embeddings of a token."""

from __future__ import annotations

import math

from hotset.model import operations as ops
from hotset.model.builder import GraphBuilder
from hotset.model.config import AltUp, GatedStreams, Hyper, Ngrams
from hotset.model.operations import Value


def layer_embeddings(model: GraphBuilder, x: Value, n_embd_layer: int) -> Value:
    """Add the per-layer embeddings, side by side: from the token, and from its embedding x."""
    width = n_embd_layer * model.config.n_layer
    rows = model.weights.matrix("per_layer_token_embd", width, model.config.n_vocab)
    own = model.add(ops.Embed(model.value("per_layer_token_embd", width), rows))
    own = model.scaled(own, math.sqrt(n_embd_layer), "per_layer_token_embd_scaled")
    made = model.scaled(model.linear(x, "per_layer_model_proj", width), x.width**-0.5, "per_layer_scaled")
    norm, out = (
        model.weights.vector("per_layer_proj_norm", n_embd_layer),
        model.value("per_layer_norm", width),
    )
    made = model.add(ops.RMSNorm(out, made, norm, model.config.norm_eps, model.config.n_layer))
    both = model.add(ops.Add(model.value("per_layer_sum", width), made, own))
    return model.scaled(both, math.sqrt(0.5), "per_layer_inp")


def gated_embedding(model: GraphBuilder, i: int, x: Value, embedded: Value) -> Value:
    """Add layer i's embedding, gated by the stream x. embedded: the embeddings of all layers."""
    blk, width = f"blk.{i}", embedded.width // model.config.n_layer
    gate = model.linear(x, f"{blk}.inp_gate", width)
    act, kind = model.value(f"{blk}.inp_gate_act", width), model.config.layers[i].activation.gate
    gate = model.add(ops.Activate(act, gate, kind, **model.where))
    out = model.value(f"{blk}.inp_gated", width)
    part = model.channels(embedded, i * width, width, f"{blk}.inp_embd")
    gated = model.add(ops.Multiply(out, gate, part, **model.where))
    return model.norm(model.linear(gated, f"{blk}.proj", x.width), f"{blk}.post_norm")


class AltUpResidual:
    """The residual streams of AltUp, and the per-layer embeddings. x: the streams side by side.

    A layer predicts all streams, computes the first from its prediction, corrects all by the difference, and
    adds its embedding, gated by the first stream, to the others.
    """

    LEAST = 1e-5  # lower limit of the mean square when a stream is scaled to the magnitude of another

    def __init__(self, model: GraphBuilder, facts: AltUp, x: Value) -> None:
        self._model, self._n = model, facts.n_streams
        d, n_others = x.width, facts.n_streams - 1
        self._embedded = layer_embeddings(model, x, facts.n_embd_layer)
        others = model.value("altup_others", n_others * d)
        model.add(ops.Linear(others, x, model.weights.heads("altup_proj", d, d, n_others)))
        sized = model.value("altup_sized", n_others * d)
        model.add(ops.MatchMagnitude(sized, others, x, self.LEAST))
        self.x = model.add(ops.Heads(model.value("streams", self._n * d), x, 1, 0, sized))
        self._predictions = self.x

    def predicted(self, i: int) -> Value:
        """Return the first stream, as layer i predicts it."""
        model, blk = self._model, f"blk.{i}"
        model.enter(i, "other")
        first = self._stream(self.x, 0, f"{blk}.altup_inp")
        weights = model.linear(
            self._routed(first, blk, "altup_predict"), f"{blk}.altup_predict_coef", self._n**2
        )
        out = model.value(f"{blk}.altup_predicted", self.x.width)
        added = ops.AddStreams(out, self.x, self.x, weights, self._n, **model.where)
        self._predictions = model.add(added)
        return self._stream(self._predictions, 0, f"{blk}.inp")

    def correct(self, i: int, y: Value) -> None:
        """Correct the streams by y, layer i's result for the first stream."""
        model, blk, d = self._model, f"blk.{i}", y.width
        model.enter(i, "other")
        weights = model.linear(self._routed(y, blk, "altup_correct"), f"{blk}.altup_correct_coef", self._n)
        taken = model.scaled(
            self._stream(self._predictions, 0, f"{blk}.altup_guess"), -1.0, f"{blk}.altup_taken"
        )
        off = model.add(ops.Add(model.value(f"{blk}.altup_off", d), y, taken, **model.where))
        out = model.value(f"{blk}.altup_corrected", self.x.width)
        corrected = model.add(
            ops.AddStreams(out, self._predictions, off, weights, self._n, 1.0, **model.where)
        )

        first = self._stream(corrected, 0, f"{blk}.altup_first")
        scale = model.weights.vector(f"{blk}.altup_correct_scale", d)
        first = model.add(ops.Scale(model.value(f"{blk}.altup_scaled", d), first, 1.0, scale, **model.where))
        more = gated_embedding(model, i, first, self._embedded)
        out = model.value(f"{blk}.streams", self.x.width)
        self.x = model.add(ops.AddStreams(out, corrected, more, None, self._n, 1.0, 1, **model.where))

    def joined(self, x: Value) -> Value:
        """Return the mean of rows x; streams after the first are projected and scaled to its magnitude."""
        model, d = self._model, self._model.config.n_embd
        matrices = model.weights.heads("altup_unembd_proj", d, d, self._n - 1)
        total = first = self._stream(x, 0, "output_stream_0")
        for j in range(1, self._n):
            stream, out = self._stream(x, j, f"output_stream_{j}"), model.value(f"output_unembd_{j}", d)
            stream = model.add(ops.Linear(out, stream, matrices, first_row=(j - 1) * d))
            out = model.value(f"output_sized_{j}", d)
            stream = model.add(ops.MatchMagnitude(out, stream, first, self.LEAST))
            total = model.add(ops.Add(model.value(f"output_sum_{j}", d), total, stream))
        return model.scaled(total, 1 / self._n, "output_mean")

    def _routed(self, x: Value, blk: str, name: str) -> Value:
        """Return a few numbers from which the weights of streams are computed."""
        model, out = self._model, f"{blk}.{name}_router"
        h = model.norm(x, f"{blk}.altup_router_norm", f"{out}_norm")
        h = model.scaled(h, 1 / x.width, f"{out}_scaled")
        h = model.linear(h, f"{blk}.altup_router", self._n, out)
        return model.add(ops.SoftCap(model.value(f"{out}_tanh", self._n), h, 1.0, **model.where))

    def _stream(self, x: Value, j: int, name: str) -> Value:
        d = self._model.config.n_embd
        return self._model.channels(x, j * d, d, name)


class HyperResidual:
    """Residual streams of which a part of a layer reads a weighted sum, and which are mixed with its result.

    x: the embedding, with which each stream begins.
    """

    def __init__(self, model: GraphBuilder, facts: Hyper, x: Value) -> None:
        self._model, self._facts, self._part, n = model, facts, "", facts.n_streams
        self.x = model.add(ops.AddStreams(model.value("streams", n * x.width), None, x, None, n, 1.0))
        self._write = self.x

    def read(self, i: int, part: ops.Part) -> Value:
        """Return the input of a part of layer i."""
        model = self._model
        model.enter(i, part)
        n, name = self._facts.n_streams, "attn" if part == "attention" else part
        self._part = f"blk.{i}.hc_{name}"
        weights = self._weights(self.x, self._part, n * (n + 2))
        read = model.channels(weights, 0, n, f"{self._part}_read")
        self._write = model.channels(weights, n, n * (n + 1), f"{self._part}_write")
        return self._sum(self.x, read, f"{self._part}_inp")

    def add(self, y: Value) -> None:
        """Mix the streams, and add the result of the part that has read them."""
        model, n = self._model, self._facts.n_streams
        both = model.value(f"{self._part}_both", y.width + self.x.width)
        both = model.add(ops.Heads(both, y, 1, 0, self.x, **model.where))
        out = model.value(f"{self._part}_streams", self.x.width)
        self.x = model.add(ops.AddStreams(out, None, both, self._write, n, **model.where))

    def joined(self, x: Value) -> Value:
        """Return the output's input from rows x of the streams."""
        weights = self._weights(x, "output_hc", self._facts.n_streams)
        return self._sum(x, weights, "hc_output_inp")

    def _weights(self, x: Value, name: str, width: int) -> Value:
        model, facts = self._model, self._facts
        unit = model.value(f"{name}_unit", x.width)
        unit = model.add(ops.UnitNorm(unit, x, model.config.norm_eps, 1, **model.where))
        m = model.linear(unit, f"{name}_fn", width, f"{name}_m")
        scale = model.weights.numbers(f"{name}_scale", 1 if width == facts.n_streams else 3)
        base, out = model.weights.numbers(f"{name}_base", width), model.value(f"{name}_weights", width)
        op = ops.HyperConnection(
            out, m, scale, base, facts.n_streams, facts.eps, facts.n_iterations, **model.where
        )
        return model.add(op)

    def _sum(self, x: Value, weights: Value, name: str) -> Value:
        model, out = self._model, self._model.value(name, self._model.config.n_embd)
        return model.add(ops.AddStreams(out, None, x, weights, 1, **model.where))


def residual_streams(model: GraphBuilder, x: Value) -> HyperResidual | GatedResidual | None:
    """Return the streams that parts of layers read and mix; None: one stream. x: the embedding."""
    config = model.config
    if config.hyper is not None:
        return HyperResidual(model, config.hyper, x)
    return None if config.gated_streams is None else GatedResidual(model, config.gated_streams, x)


class GatedResidual:
    """Residual streams of Qwen4-Exp. x: the embedding, with which each stream begins.

    A part of a layer reads the mean, normed and gated per channel. Its result is added to each stream with a
    weight.
    """

    def __init__(self, model: GraphBuilder, facts: GatedStreams, x: Value) -> None:
        self._model, self._n, self._rank = model, facts.n, facts.rank
        self.x = x
        for i in range(2, facts.n + 1):
            out = model.value("streams" if i == facts.n else f"streams_{i}", i * x.width)
            self.x = model.add(ops.Heads(out, self.x, 1, 0, x))
        self._weights, self._sum = self.x, ""

    def read(self, i: int, part: ops.Part) -> Value:
        """Return the input of a part of layer i; it is already normed."""
        model, n = self._model, self._n
        model.enter(i, part)
        name, self._sum = f"blk.{i}.hc_ffn", f"blk.{i}.out"
        if part == "attention":
            name, self._sum = f"blk.{i}.hc_attn", f"blk.{i}.ffn_inp"
        h = self._normed(self.x, f"{name}_norm")
        read = self._gated_mean(h, name, name)
        weights = model.scaled(model.linear(h, f"{name}_inject", n), 1 / n, f"{name}_inject_scaled")
        self._weights = model.scaled(model.activated(weights, "sigmoid"), 2.0, f"{name}_shares")
        return read

    def add(self, y: Value) -> None:
        """Add the result of the part that has read the streams."""
        model, out = self._model, self._model.value(self._sum, self.x.width)
        self.x = model.add(ops.AddStreams(out, self.x, y, self._weights, self._n, **model.where))

    def joined(self, x: Value) -> Value:
        """Return the output's input from rows x of the streams, normed."""
        name = self._model.config.output_norm
        assert name is not None
        return self._gated_mean(self._normed(x, f"{name}_norm"), name, "output_norm")

    def add_ngrams(self, i: int, ngrams: Ngrams) -> None:
        """Add the embeddings of the token's n-grams, gated by each stream, and a convolution of these."""
        model, blk, d, x = self._model, f"blk.{i}", self._model.config.n_embd, self.x
        model.enter(i, "other")
        n_rows = max(map(sum, zip(ngrams.sizes, ngrams.offsets, strict=True)))
        table = model.weights.rows("per_layer_token_embd", ngrams.width, n_rows)
        out = model.value(f"{blk}.ple_embd", ngrams.width * len(ngrams.sizes))
        numbers = ngrams.multipliers, ngrams.sizes, ngrams.offsets
        embedded = model.add(ops.NgramEmbed(out, table, *numbers, ngrams.eos, **model.where))
        key = model.linear(embedded, f"{blk}.ple_key", x.width)
        value = model.linear(embedded, f"{blk}.ple_value", d)
        key = self._normed(key, f"{blk}.ple_key_normed", f"{blk}.ple_norm_key")
        query = self._normed(x, f"{blk}.ple_query", f"{blk}.ple_norm_query")
        gated = model.value(f"{blk}.ple_gated", x.width)
        model.add(ops.SimilarityGate(gated, value, key, query, self._n, **model.where))
        conv = self._normed(gated, f"{blk}.ple_conv_in", f"{blk}.ple_norm_conv")
        weight = model.weights.matrix(f"{blk}.ple_conv1d", ngrams.kernel, x.width)
        out, dilation = model.value(f"{blk}.ple_conv", x.width), len(ngrams.multipliers)
        conv = model.add(ops.ShortConv(out, conv, weight, ngrams.kernel, dilation=dilation, **model.where))
        conv = model.activated(conv, "silu")
        more = model.add(ops.Add(model.value(f"{blk}.ple_more", x.width), gated, conv, **model.where))
        self.x = model.add(ops.Add(model.value(f"{blk}.ple_streams", x.width), x, more, **model.where))

    def _gated_mean(self, h: Value, name: str, out: str) -> Value:
        """Return the mean of gated streams. name: prefix of tensors and values; out: name of the mean."""
        model, n, d = self._model, self._n, self._model.config.n_embd
        low = model.scaled(model.linear(h, f"{name}_down", self._rank), 1 / n, f"{name}_low")
        gates = model.linear(model.activated(low, "silu"), f"{name}_up", h.width)
        gates = model.activated(gates, "sigmoid")
        gated = model.add(ops.Multiply(model.value(f"{name}_gated", h.width), gates, h, **model.where))
        first = model.channels(gated, 0, d, f"{name}_first")
        others = model.channels(gated, d, (n - 1) * d, f"{name}_others")
        total = model.value(f"{name}_total", d)
        total = model.add(ops.AddStreams(total, first, others, None, 1, 1.0, **model.where))
        return model.scaled(total, 1 / n, out)

    def _normed(self, x: Value, name: str, tensor: str | None = None) -> Value:
        """Return the streams, each through its own norm."""
        model = self._model
        weight, out = model.weights.numbers(tensor or name, x.width), model.value(f"{name}_unit", x.width)
        unit = model.add(ops.UnitNorm(out, x, model.config.norm_eps, self._n, **model.where))
        return model.add(ops.Scale(model.value(name, x.width), unit, 1.0, weight, **model.where))
