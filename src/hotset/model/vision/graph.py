"""The graph of an image encoder: patches in, embeddings of image tokens out.

Its input are rows of pixels, one per patch, [n_patches, 3 * patch^2]: channel by channel, each row by row,
normalised. The patches of an image token are adjacent, row by row. `Batch.tokens` are the learned positions
of the patches, `Batch.rotary` their rows and columns, `Batch.groups` their windows, and `Batch.outputs` the
last patch of each image token. Names of values, in addition to the decoder's:

    [input: is split into pixels  position_rows  is_patch  is_class]  pixels  patches  [patches_1
    patches_both: of two frames]  [patches_alone  class_embd  patches_and_class]  [position_embd  inp]
    [token_embd_norm]
    [mm_input_norm]  merged: the patches of a token side by side  [pooled: their mean  pooled_norm]
    [mm_patch_merger]  [mm.0  mm.0_act  mm.2: of other names in some families]  [embeddings]
    [v.deepstack.N.merged  v.deepstack.N.norm  v.deepstack.N.fc1  v.deepstack.N.fc1_act  v.deepstack.N.fc2
    v.deepstack.N.fc2_joined: the embeddings, and the features of layers side by side]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hotset.model import operations as ops
from hotset.model.decoder import Decoder
from hotset.model.graph import Graph
from hotset.model.operations import Value
from hotset.model.thresholds import LayerThresholds
from hotset.model.vision.config import NEWLINE, VisionConfig, deep_layer
from hotset.model.vision.tensors import OF_CLASS, SECOND_PATCHES
from hotset.model.weights import Weights

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo
    from hotset.model.config import LayerConfig
    from hotset.model.predictor import Predictor


def describe_encoder(config: VisionConfig, tensors: Mapping[str, TensorInfo]) -> Graph:
    """Return the step of an image encoder. tensors: of EncoderTensors.

    Raises UnsupportedModelError if a tensor is missing, unused, of an unexpected shape, or of an unsupported
    type.
    """
    tower = config.tower
    weights = Weights(tower, tensors)
    model = _Tower(tower, weights, [LayerThresholds()] * tower.n_layer)
    x = _embedded(model, config)
    deep = []
    for i, layer in enumerate(tower.layers):
        x = model.ffn(i, layer, x, model.attention(i, layer, x), None)
        if i in config.deep:
            name = deep_layer(i)
            merged = model.value(f"{name}.merged", config.merge**2 * tower.n_embd)
            merged = model.add(ops.SelectOutputs(merged, x, config.merge**2, **model.where))
            merged = model.norm(merged, f"{name}.norm")
            deep.append(_mlp(model, merged, f"{name}.fc1", f"{name}.fc2", merged.width, config.n_out))
    model.where = {}
    if config.projector == "gemma4v":
        x = _standardised(model, config, x)
    if "mm.input_norm.weight" in tensors:
        x = model.norm(x, "mm.input_norm", "mm_input_norm")
    elif config.projector not in ("pixtral", "mlp", "internvl", "gemma4v"):
        x = model.norm(x, "output_norm")
    merges = "mm.patch_merger.weight" in tensors
    merged = model.value("merged", config.merge**2 * tower.n_embd)
    x = model.add(ops.SelectOutputs(merged, x, config.merge**2, by_channel=merges))
    if merges:
        x = model.linear(x, "mm.patch_merger", tower.n_embd, "mm_patch_merger")
    x = _project(model, config, x)
    for more in deep:
        joined = model.value(f"{more.name}_joined", x.width + more.width)
        x = model.add(ops.Heads(joined, x, 1, 0, more))
    if "token_embd.img_break" in tensors:  # the prompt has this token, with the text model's embedding
        weights.bare("token_embd.img_break", config.n_out)
    if config.has_newline:  # the encoder adds its rows
        weights.bare(NEWLINE, config.n_out)
    weights.refuse_unused()
    return model.graph


class _Tower(Decoder):
    """The layers of an encoder. Inputs and outputs of products have limits if the file has them (Gemma 4)."""

    def linear(self, x: Value, tensor: str, width: int, name: str | None = None) -> Value:
        if f"{tensor}.input_min" not in self.weights.tensors:
            return super().linear(x, tensor, width, name)
        x = self._limited(x, tensor, "input", f"{tensor}_in")
        return self._limited(
            super().linear(x, tensor, width, f"{tensor}_raw"), tensor, "output", name or tensor
        )

    def _limited(self, x: Value, tensor: str, end: str, name: str) -> Value:
        limits = (self.weights.bare(f"{tensor}.{end}_{side}", 1) for side in ("min", "max"))
        return self.add(ops.Clip(self.value(name, x.width), x, *limits, **self.where))

    def ffn(self, i: int, layer: LayerConfig, given: Value, x: Value, predictor: Predictor | None) -> Value:
        blk = f"blk.{i}"
        if f"{blk}.ffn_down.input_min" not in self.weights.tensors:
            return super().ffn(i, layer, given, x, predictor)
        self.enter(i, "ffn")
        h = self.norm(x, f"{blk}.ffn_norm")
        gate, up = (self.linear(h, f"{blk}.ffn_{name}", layer.n_ff) for name in ("gate", "up"))
        gate = self.activated(gate, layer.activation.gate)
        neurons = self.add(ops.Multiply(self.value(f"{blk}.ffn_act", up.width), gate, up, **self.where))
        return self._after_ffn(blk, layer, x, self.linear(neurons, f"{blk}.ffn_down", x.width))


def _embedded(model: Decoder, config: VisionConfig) -> Value:
    """Add the patch embeddings, and the learned positions."""
    d, n = config.tower.n_embd, config.n_pixels
    given = model.value("pixels" if config.n_input == n else "input", config.n_input)
    pixels = given if config.n_input == n else model.channels(given, 0, n, "pixels")
    x = model.linear(pixels, "patch_embd", d, "patches")
    if config.family.twice:
        second = model.linear(pixels, SECOND_PATCHES, d, "patches_1")
        x = model.add(ops.Add(model.value("patches_both", d), x, second))
    if config.has_class:
        is_patch = model.channels(given, config.n_input - 2, 1, "is_patch")
        is_class = model.channels(given, config.n_input - 1, 1, "is_class")
        x = model.add(ops.Multiply(model.value("patches_alone", d), x, is_patch))
        row = ops.TransposedLinear(model.value(OF_CLASS, d), is_class, model.weights.plain(OF_CLASS, d, 1))
        x = model.add(ops.Add(model.value("patches_and_class", d), x, model.add(row)))
    if config.tower.n_vocab > 1:
        table = model.weights.matrix("position_embd", d, config.tower.n_vocab)
        positions = model.value("position_embd", d)
        if config.n_mixed:
            rows = model.channels(given, n, 2 * config.n_mixed, "position_rows")
            model.add(ops.MixRows(positions, rows, table))
        else:
            model.add(ops.Embed(positions, table))
        x = model.add(ops.Add(model.value("inp", d), x, positions))
    return model.norm(x, "token_embd_norm") if config.tower.embedding_norm else x


def _standardised(model: Decoder, config: VisionConfig, x: Value) -> Value:
    """Add the scale of pooled patches, and their mean and deviation in training, if the file has them.

    The published model pools the patches first, which has the same results.
    """
    d = config.tower.n_embd
    x = model.scaled(x, math.sqrt(d), "patches_scaled")
    if "std_bias" not in model.weights.tensors:
        return x
    mean = model.add(ops.Embed(model.value("std_bias", d), model.weights.bare("std_bias", d), "type"))
    mean = model.scaled(mean, -1.0, "std_bias_negative")
    x = model.add(ops.Add(model.value("patches_centred", d), x, mean))
    weight = model.weights.bare("std_scale", d)
    return model.add(ops.Scale(model.value("patches_standard", d), x, 1.0, weight))


def _project(model: Decoder, config: VisionConfig, x: Value) -> Value:
    """Add the projector: from the patches of each image token to its embedding."""
    d, n_out = config.tower.n_embd, config.n_out
    match config.projector:
        case "idefics3":
            return model.linear(x, "mm.model.fc", n_out, "embeddings")
        case "gemma3":
            mean = ops.AddStreams(model.value("pooled", d), None, x, None, 1, 1 / config.merge**2)
            weight = model.weights.vector("mm.soft_emb_norm", d)
            normed = ops.RMSNorm(
                model.value("pooled_norm", d), model.add(mean), weight, config.tower.norm_eps
            )
            x, matrix = model.add(normed), model.weights.matrix("mm.input_projection", n_out, d)
            return model.add(ops.TransposedLinear(model.value("embeddings", n_out), x, matrix))
        case "gemma4v":
            mean = ops.AddStreams(model.value("pooled", d), None, x, None, 1, 1 / config.merge**2)
            unit = ops.UnitNorm(model.value("pooled_norm", d), model.add(mean), config.tower.norm_eps, 1)
            return model.linear(model.add(unit), "mm.input_projection", n_out, "embeddings")
        case "pixtral":
            return _mlp(model, x, "mm.1", "mm.2", n_out, n_out)
        case "internvl":
            norm = "mm.model.mlp.0"  # a layer norm, whatever the norms of the layers are
            weight = model.weights.vector(norm, x.width)
            bias = model.weights.bias(norm, x.width, required=True)
            x = model.add(ops.LayerNorm(model.value(norm, x.width), x, weight, bias, 1e-5))
            return _mlp(model, x, "mm.model.mlp.1", "mm.model.mlp.3", n_out, n_out)
        case _:
            width = n_out if config.projector == "mlp" else x.width
            return _mlp(model, x, "mm.0", "mm.2", width, n_out)


def _mlp(model: Decoder, x: Value, first: str, second: str, width: int, n_out: int) -> Value:
    """Add two products with an activation between them. width: of the result of the first one."""
    return model.linear(model.activated(model.linear(x, first, width), "gelu"), second, n_out)
