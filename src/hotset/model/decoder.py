"""The decoder: describes a forward step of any supported architecture as a Graph.

It computes nothing and names no architecture: the facts come from ModelConfig. A value has the name of the
GGUF tensor that yields it (blk.3.attn_q.weight yields "blk.3.attn_q"), and every name can be requested as a
tap. Names in brackets exist only in some models, and a prefix blk.N is written once per group:

    embedding  [embedding_scaled]  [token_types  embd_typed: their sum]  [position_embd  inp: the sum with it]
    [token_embd_norm]
    blk.N.attn_norm  attn_q  attn_k  attn_v  [attn_q_norm  attn_k_norm]  [attn_q_rope  attn_k_rope]
    [blk.N.attn_q_gain  attn_q_tempered: attn_q * attn_q_gain]
    [MLA: blk.N.attn_q_a  attn_q_a_norm  attn_kv_a  attn_kv_a_norm: latent vectors  attn_kv_b or attn_k_own:
    the heads' projections of them  attn_k_shared  attn_k_shared_rope]
    blk.N.attn: the heads' results, side by side   attn_out: after attn_output
    [blk.N.post_attention_norm]  [blk.N.attn_scaled]  [blk.N.ls1  ls2: times a number per channel]
    [blk.N.attn_sub_norm  ffn_sub_norm: inputs of attn_output and ffn_down]
    [blk.N.attn_qg: queries and gates  attn_gate  attn_gate_act  attn_gated: attn * attn_gate_act]
    instead of these, in a short convolution:
    blk.N.conv_b  conv_c  conv_x  conv_in: conv_b * conv_x  conv  conv_gated: conv_c * conv  conv_out
    in a gated delta net:
    blk.N.delta_qkv  delta_gate  delta_ba or delta_beta and delta_alpha  conv  conv_act  delta: the heads'
    results delta_norm  delta_gate_act  delta_gated  delta_out; if keys decay per channel: attn_q  attn_k
    attn_v  conv_q conv_k  conv_v  ssm_f_a  ssm_f_b  ssm_g_a  ssm_g_b instead of the first ones
    in a state space:
    blk.N.ssm_z  ssm_xbc  ssm_dt  conv  conv_act  ssm: the heads' results  ssm_z_act  ssm_gated  [ssm_unit
    ssm_norm]  ssm_out  [mixed: the sum with attn_out, if the layer has both]; in Mamba also ssm_x_in
    ssm_dt_in ssm_b  ssm_c  ssm_dt_out
    in RWKV, among other names with these prefixes:
    blk.N.time_mix_shift: the previous token minus this one  time_mix_xr  xw  xk  xv  xa  xg: inputs of
    products time_mix_receptance  time_mix_key  time_mix_value  time_mix_wkv: the heads' results  time_mix_ln
    time_mix_bonus  time_mix_gated  time_mix_output;  before the FFN channel_mix_shift  channel_mix_k
    blk.N.ffn_inp: the residual stream after attention   ffn_norm: the input of the FFN [blk.N.ffn_latent_down
    ffn_latent_up: before and after experts]
    [blk.N.ffn_routed_norm  ffn_routed: input of the router  pre_ffw_norm_2: input of experts in layers that
    also have an FFN  post_ffw_norm_1  post_ffw_norm_2: results of FFN and experts]
    [blk.N.ffn_router: scores of the experts  ffn_route: ids and weights of the chosen ones]
    [blk.N.ffn_pred_h  ffn_pred_h_act  ffn_pred: scores of a predictor]
    blk.N.ffn_up  [ffn_gate  ffn_gate_act  ffn_up_act]  [ffn_gate_top_k: input of ffn_gate_act]
    blk.N.ffn_act: one value per neuron, nonzero if it fires  [ffn_masked: 0 if it was not predicted]
    [shared expert: blk.N.ffn_up_shexp  ffn_gate_shexp  ffn_gate_shexp_act  ffn_act_shexp  ffn_down_shexp
    ffn_share  ffn_share_act  ffn_shared: the product with it  ffn_sum]
    [after thresholds: blk.N.attn_norm_thresholded  attn_thresholded  ffn_norm_thresholded
    ffn_gate_thresholded  ffn_thresholded]
    blk.N.ffn_down  [blk.N.post_ffw_norm]  [blk.N.ffn_scaled]  blk.N.out  [blk.N.out_with_image]
    [residual streams with gates: streams; in attention hc_attn_norm  hc_attn_down  hc_attn_down_act
    hc_attn_up hc_attn_up_act  hc_attn_gated  hc_attn: their mean, instead of attn_norm  hc_attn_inject:
    weights of the result; in the FFN hc_ffn_norm, ..., and before the output output_hc_norm, ...]
    [n-gram embeddings: blk.N.ple_embd  ple_key  ple_value  ple_query  ple_gated  ple_conv  ple_streams]
    [AltUp: altup_others  altup_sized  streams; in a layer altup_inp  altup_predict_router  altup_predict_coef
    altup_predicted  inp: the first stream  laurel_l  laurel_r  laurel  altup_correct_router
    altup_correct_coef altup_off  altup_corrected  inp_gate  inp_gated  proj  post_norm  streams]
    output_inp  output_norm  [logits_raw  logits_scaled]  logits: only rows whose logits are needed
    in an encoder [output_norm]  result: only requested rows
    [norms of sums: blk.N.ffn_inp_sum and out_sum before them]
    [hyper-connections: streams, and in each part P (attn or ffn) of a layer hc_P_unit  hc_P_m  hc_P_weights
    hc_P_read  hc_P_write  hc_P_inp  hc_P_both  hc_P_streams; output_hc_unit  output_hc_m  output_hc_weights
    hc_output_inp]
    [compressed keys: attn_q_a  attn_q_a_norm  attn_q  attn_q_norm  attn_kv  attn_kv_a_norm
    attn_compressor_kv attn_compressor_gate  attn_blocks  attn_compressor_norm, each _rope  attn_back
    attn_output_a_N]
    [indexer: blk.N.indexer_q  indexer_k  indexer_weights  indexer_q_norm  indexer_k_norm, each _rope, or of
    compressed keys indexer_compressor_kv  indexer_compressor_gate  indexer_blocks  indexer_compressor_norm
    blk.N.indexer: the numbers of the chosen blocks]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hotset.errors import UnsupportedModelError
from hotset.model import operations as ops
from hotset.model.architectures import ARCHITECTURES, HeadNorm
from hotset.model.builder import GraphBuilder
from hotset.model.config import (
    Compressed,
    Latent,
    LayerConfig,
    ModelConfig,
)
from hotset.model.experts import Experts
from hotset.model.graph import Graph
from hotset.model.indexing import Indexing
from hotset.model.mixers import ChannelMixer, ConvMixer, RwkvMixer, StateSpaceMixer
from hotset.model.operations import Value
from hotset.model.predictor import Predictor
from hotset.model.recurrent import (
    TimeMix,
    channel_deltas,
    channel_mix,
    channel_space,
    convolved,
    delta_net,
    state_space,
)
from hotset.model.residual import (
    AltUpResidual,
    GatedResidual,
    HyperResidual,
    gated_embedding,
    layer_embeddings,
    residual_streams,
)
from hotset.model.thresholds import LayerThresholds, ThresholdName
from hotset.model.weights import Weights

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo

TOKEN_TYPES = "token_types"
_INDEX_EPS = 1e-6  # of the norm of index keys next to latent attention, in every published model


def describe(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    predictor: Predictor | None = None,
    layer_thresholds: Sequence[LayerThresholds] = (),
) -> Graph:
    """Return the step of `config` over `tensors`: name → TensorInfo, innermost dimension first.

    With a predictor, each layer computes only the neurons that it selects; a predictor whose mask is part of
    the model is always used. layer_thresholds: of each layer, or empty; a threshold of 0 changes nothing.
    Raises UnsupportedModelError if a tensor is missing, unused, of an unexpected shape, or of an unsupported
    type.
    """
    if config.masked and predictor is None:
        predictor = Predictor("mlp", (config.sparse_threshold,) * config.n_layer)
    weights = Weights(config, tensors)
    graph = _describe(config, weights, predictor, layer_thresholds or [LayerThresholds()] * config.n_layer)
    weights.refuse_unused()
    return graph


NEXTN_INPUT = "output_norm"
"""The input of a layer for multi-token prediction: a value of the model, and of the layer itself.

The layer reads the model's rows first, and its own to continue from its predictions.
"""


def describe_nextn(config: ModelConfig, tensors: Mapping[str, TensorInfo], index: int = 0) -> Graph:
    """Return the step of a layer for multi-token prediction (MTP, `nextn` in GGUF), the index-th of the file.

    The graph is a part of a model: a backend's `run` takes rows x [n_tokens, n_embd] in addition to the
    batch. Row t is NEXTN_INPUT at the position before token t, and the logits predict the token after it. So
    no token is at position 0. The layer has its own keys and values; of the model it uses only the embedding
    and the output, unless it has its own. Raises UnsupportedModelError if the file has no such layer or its
    architecture's are not supported, and the errors of `describe`.
    """
    if index >= config.n_extra_layers:
        raise UnsupportedModelError(
            f"the file has {config.n_extra_layers} layers for multi-token prediction, none with index {index}"
        )
    if (norm := ARCHITECTURES[config.architecture].nextn) is None:
        raise UnsupportedModelError(
            f"the layers for multi-token prediction of {config.architecture} models are not supported"
        )
    i, d = config.n_layer + index, config.n_embd
    layer = next(layer for layer in reversed(config.layers) if layer.mixer is None and layer.mixes)
    if not layer.n_ff:  # the model has its FFNs in separate layers
        ffn = next(layer for layer in reversed(config.layers) if layer.n_ff)
        layer = replace(layer, n_ff=ffn.n_ff, experts=ffn.experts, ffn_norm="post_attention_norm")
    weights, own = Weights(config, tensors), f"blk.{i}.nextn"
    model = Decoder(config, weights, [LayerThresholds()] * (i + 1))
    model.first_seen = 1
    hidden = model.value("hidden", d)
    model.enter(i, "other")
    x = model.embedding(f"{own}.embed_tokens" if f"{own}.embed_tokens.weight" in tensors else "token_embd")
    x, hidden = model.norm(x, f"{own}.enorm"), model.norm(hidden, f"{own}.hnorm")
    both = model.add(ops.Heads(model.value(f"{own}.both", 2 * d), x, 1, 0, hidden, **model.where))
    x = model.linear(both, f"{own}.eh_proj", d)
    x = model.ffn(i, layer, x, model.attention(i, layer, x), None)
    model.config = replace(config, norm=norm, norm_bias=False)
    head = f"{own}.shared_head_head"
    model.output(x, None, f"{own}.shared_head_norm", head if f"{head}.weight" in tensors else None)
    if unread := sorted(n for n in tensors if n.startswith(f"blk.{i}.") and weights.is_unread(n)):
        raise UnsupportedModelError(
            f"a layer for multi-token prediction has {len(unread)} unknown tensors, such as {unread[0]}"
        )
    return model.graph


def _describe(
    config: ModelConfig,
    weights: Weights,
    predictor: Predictor | None,
    layer_thresholds: Sequence[LayerThresholds],
) -> Graph:
    model = Decoder(config, weights, layer_thresholds)
    x = model.embedding()
    residual = model.residual = residual_streams(model, x)
    if residual is not None:
        for i, layer in enumerate(config.layers):
            if isinstance(residual, GatedResidual) and config.ngrams and config.ngrams.layer == i:
                residual.add_ngrams(i, config.ngrams)
            residual.add(model.attention(i, layer, residual.read(i, "attention")))
            x = residual.read(i, "ffn")
            residual.add(model.ffn(i, layer, x, x, predictor))
        model.output(residual.x, residual)
        return model.graph
    streams = None if config.altup is None else AltUpResidual(model, config.altup, x)
    embedded = layer_embeddings(model, x, config.n_embd_layer) if config.n_embd_layer else None
    for i, layer in enumerate(config.layers):
        given = x if streams is None else streams.predicted(i)
        x = model.attention(i, layer, given) if layer.mixes else given
        if layer.n_ff:
            x = model.ffn(i, layer, given, x, predictor)
        if embedded is not None:
            x = model.with_embedding(i, x, embedded)
        x = model.scaled(x, layer.result_scale, f"blk.{i}.out_scaled")
        if i < config.n_image_layers:
            x = model.with_image(i, x)
        if streams is not None:
            streams.correct(i, x)
    model.output(x if streams is None else streams.x, streams)
    return model.graph


def differences(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> tuple[set[str], set[str]]:
    """Return the tensors that a model of `config` lacks or has in another shape, and the unused ones."""
    weights = Weights(config, tensors, missing=set())
    _describe(config, weights, None, [LayerThresholds()] * config.n_layer)
    assert weights.missing is not None
    return weights.missing, set(weights.unused())


class Decoder(GraphBuilder):
    """A builder whose methods each add one part of a model and return the stream after it."""

    def __init__(
        self, config: ModelConfig, weights: Weights, layer_thresholds: Sequence[LayerThresholds]
    ) -> None:
        super().__init__(config, weights)
        self.layer_thresholds = layer_thresholds
        self.residual: HyperResidual | GatedResidual | None = None  # several residual streams
        self.first_seen = 0  # the first position with keys and values
        self._first_values: Value | None = None  # of the first layer, which later layers of RWKV 7 use
        self._stored: dict[int, tuple[Value, Value]] = {}  # layer → its keys and values
        self._chosen: dict[int, Value] = {}  # layer → what its indexer chose

    # ---- the parts of a model

    def embedding(self, tensor: str = "token_embd") -> Value:
        config, d = self.config, self.config.n_embd
        matrix = self.weights.matrix(tensor, d, config.n_vocab)
        parts = 1 + config.n_image_layers if tensor == "token_embd" else 0
        x = self.scaled(
            self.add(ops.Embed(self.value("embedding", d), matrix, image_parts=parts)),
            config.embedding_scale,
            "embedding_scaled",
        )
        if f"{TOKEN_TYPES}.weight" in self.weights.tensors:
            types = self.add(
                ops.Embed(self.value(TOKEN_TYPES, d), self.weights.table(TOKEN_TYPES, d), "type")
            )
            x = self.add(ops.Add(self.value("embd_typed", d), x, types))
        if (first := config.first_position) is not None:
            weight = self.weights.matrix("position_embd", d, config.n_ctx_train + first)
            positions = self.add(ops.Embed(self.value("position_embd", d), weight, "position", first))
            x = self.add(ops.Add(self.value("inp", d), x, positions))
        if config.unit_embedding:
            return self.add(ops.UnitNorm(self.value("token_embd_norm", d), x, config.norm_eps, 1))
        return self.norm(x, "token_embd_norm") if config.embedding_norm else x

    def with_image(self, i: int, x: Value) -> Value:
        """Add the part of image rows that belongs to layer i to its result."""
        out, n_parts = self.value(f"blk.{i}.out_with_image", x.width), 1 + self.config.n_image_layers
        return self.add(ops.AddImage(out, x, 1 + i, n_parts, **self.where))

    def attention(self, i: int, layer: LayerConfig, x: Value) -> Value:
        """Add attention or another token mixer of layer i, and the sum with the stream x."""
        config, blk = self.config, f"blk.{i}"
        self.enter(i, "attention")
        # A parallel FFN has no norm of its own: its input is called attn_norm. Attention reads attn_norm_2
        # or, if that is missing, attn_norm.
        has_second = layer.parallel and f"{blk}.attn_norm_2.weight" in self.weights.tensors
        h = x
        if layer.pre_norm and not layer.bare:
            h = self.norm(x, f"{blk}.attn_norm_2" if has_second else f"{blk}.attn_norm", f"{blk}.attn_norm")
        h = self._thresholded(h, i, "attn_in")
        out = self._mixed(i, layer, h)
        if layer.post_norm:
            out = self.norm(out, f"{blk}.post_attention_norm", eps=config.post_norm_eps)
        out = self._by_channel(self.scaled(out, config.residual_scale, f"{blk}.attn_scaled"), f"{blk}.ls1")
        if config.altup is None:
            return self._summed(
                layer, x, out, f"{blk}.ffn_inp" if layer.n_ff else f"{blk}.out", f"{blk}.attn_output_norm"
            )
        x = self.add(ops.Add(self.value(f"{blk}.attn_sum", config.n_embd), x, out, **self.where))
        x = self.add(
            ops.Add(self.value(f"{blk}.laurel_sum", config.n_embd), x, self._laurel(blk, h), **self.where)
        )
        return self.scaled(x, math.sqrt(0.5), f"{blk}.ffn_inp")

    def _by_channel(self, x: Value, tensor: str) -> Value:
        """Add the product with a number per channel, if the file has the tensor."""
        if f"{tensor}.weight" not in self.weights.tensors:
            return x
        weight = self.weights.vector(tensor, x.width)
        return self.add(ops.Scale(self.value(tensor, x.width), x, 1.0, weight, **self.where))

    def _summed(self, layer: LayerConfig, x: Value, out: Value, name: str, norm: str) -> Value:
        """Add the sum of the stream x and a part's result, and the norm of the sum, if there is one.

        With several streams, which add results themselves, return only the result.
        """
        if self.residual is not None:
            return out
        sum_ = self.value(f"{name}_sum" if layer.sum_norms else name, x.width)
        sum_ = self.add(ops.Add(sum_, x, out, **self.where))
        return self.norm(sum_, norm, name) if layer.sum_norms else sum_

    def _laurel(self, blk: str, h: Value) -> Value:
        """Add the branch next to attention: h plus a low-rank product (arXiv 2411.07501)."""
        d = self.config.n_embd
        low = self.linear(h, f"{blk}.laurel_l", self.weights.n_rows(f"{blk}.laurel_l"))
        normed = self.norm(self.linear(low, f"{blk}.laurel_r", d), f"{blk}.laurel_post_norm")
        return self.add(ops.Add(self.value(f"{blk}.laurel", d), h, normed, **self.where))

    def _mixed(self, i: int, layer: LayerConfig, h: Value) -> Value:
        """Add attention or the layer's other token mixer."""
        if layer.mixer is None:
            return self._heads_attend(i, layer, h)
        if isinstance(layer.mixer, ConvMixer):
            return convolved(self, f"blk.{i}", layer.mixer, h)
        if isinstance(layer.mixer, StateSpaceMixer):
            out = state_space(self, f"blk.{i}", layer.mixer, h)
            if not layer.mixer.with_attention:
                return out
            sum_ = self.value(f"blk.{i}.mixed", self.config.n_embd)
            return self.add(ops.Add(sum_, self._heads_attend(i, layer, h), out, **self.where))
        if isinstance(layer.mixer, ChannelMixer):
            return channel_space(self, f"blk.{i}", layer.mixer, h)
        if isinstance(layer.mixer, RwkvMixer):
            mix = TimeMix(self, f"blk.{i}", layer.mixer, h, self._first_values)
            out = mix.out()
            self._first_values = mix.first_values
            return out
        if layer.mixer.by_channel:
            return channel_deltas(self, f"blk.{i}", layer.mixer, h)
        return delta_net(self, f"blk.{i}", layer.mixer, h)

    def _heads_attend(self, i: int, layer: LayerConfig, h: Value) -> Value:
        config, blk, gate = self.config, f"blk.{i}", None
        if config.compressed is not None:
            return self._compressed_heads(i, layer, config.compressed, h)
        n_head_kv, dim, dim_v = self._head_sizes(layer)
        if config.latent is not None:
            q, k, v = self._latent_heads(h, i, layer, config.latent)
        else:
            if self._owner(i) is not None:
                self._choose_by_means(i, layer, h)
            has_own = f"{blk}.attn_gate.weight" in self.weights.tensors
            q, k, v = self._heads(h, blk, layer, gated=layer.attention_gate and not has_own)
            if layer.attention_gate:
                if has_own:  # of each channel, or of each head
                    of_heads = self.weights.tensors[f"{blk}.attn_gate.weight"].shape[1] == config.n_head
                    width = config.n_head * (1 if of_heads else config.head_dim_v)
                    gate = self.linear(h, f"{blk}.attn_gate", width)
                else:
                    q, gate = self._gated_query(q, blk)
                if gate.width != config.n_head:
                    out = self.value(f"{blk}.attn_gate_act", gate.width)
                    gate = self.add(ops.Activate(out, gate, "sigmoid", **self.where))
            q = self._rotated(self._tempered(q, blk), config.n_head, layer)
            if layer.source is None:
                k = self._rotated(k, n_head_kv, layer)
                if layer.value_norm:
                    out = self.value(f"{blk}.attn_v_norm", v.width)
                    v = self.add(ops.UnitNorm(out, v, config.norm_eps, n_head_kv, **self.where))
                self._stored[i] = k, v
        attn = self.value(f"{blk}.attn", config.n_head * dim_v)
        self.add(
            ops.Attention(
                attn, q, k, v, config.n_head, n_head_kv, dim, dim_v,
                layer.attention_scale, layer.window, layer.attention_softcap,
                self.weights.vector(f"{blk}.attn_sinks", config.n_head) if layer.sinks else None,
                layer.source, config.slopes, config.causal, self.first_seen,
                key_bias=self._key_bias(i, layer), groups=layer.groups, **self._choice(i), **self.where,
            )
        )  # fmt: skip
        if gate is not None:
            gated = self.value(f"{blk}.attn_gated", attn.width)
            of_heads = gate.width == config.n_head
            attn = self.add((ops.GateHeads if of_heads else ops.Multiply)(gated, attn, gate, **self.where))
        if layer.sub_norms:
            attn = self.norm(attn, f"{blk}.attn_sub_norm")
        attn = self._thresholded(attn, i, "attn_out")
        return self.linear(attn, f"{blk}.attn_output", config.n_embd, f"{blk}.attn_out")

    def _compressed_heads(self, i: int, layer: LayerConfig, sizes: Compressed, h: Value) -> Value:
        """Add attention with one head of keys, which are also values, and with keys of compressed blocks.

        The heads' results are rotated back, and projected to the output group by group.
        """
        config, n, dim, rope = self.config, self.config.n_head, self.config.head_dim, layer.rope
        blk = f"blk.{i}"
        assert rope is not None
        given = self.norm(self.linear(h, f"{blk}.attn_q_a", sizes.rank_q), f"{blk}.attn_q_a_norm")
        q = self.linear(given, f"{blk}.attn_q_b", n * dim, f"{blk}.attn_q")
        out = self.value(f"{blk}.attn_q_norm", q.width)
        q = self._turned(self.add(ops.UnitNorm(out, q, config.norm_eps, n, **self.where)), n, rope)
        k = self.norm(self.linear(h, f"{blk}.attn_kv", dim), f"{blk}.attn_kv_a_norm")
        k = self._turned(k, 1, rope)
        blocks = None
        if layer.block_size:
            blocks = self._blocks(f"{blk}.attn", dim, layer.block_size, rope, h)
        if self._owner(i) is not None:
            self._choose_compressed(i, layer.block_size, rope, h, given)
        attn = self.add(
            ops.Attention(
                self.value(f"{blk}.attn", n * dim), q, k, k, n, 1, dim, dim, layer.attention_scale,
                layer.window, sinks=self.weights.vector(f"{blk}.attn_sinks", n), blocks=blocks,
                block_size=layer.block_size, **self._choice(i), **self.where,
            )
        )  # fmt: skip
        back = replace(rope, freq=tuple(-freq for freq in rope.freq))
        attn = self._turned(attn, n, back, f"{blk}.attn_back")
        width, rank = n * dim // sizes.n_groups, sizes.rank_out
        weight, joined = self.weights.matrix(f"{blk}.attn_output_a", width, sizes.n_groups * rank), None
        for j in range(sizes.n_groups):
            part = self.channels(attn, j * width, width, f"{blk}.attn_back_{j}")
            low = self.value(f"{blk}.attn_output_a_{j}", rank)
            low = self.add(ops.Linear(low, part, weight, first_row=j * rank, **self.where))
            if joined is not None:
                out = self.value(f"{blk}.attn_output_a_to_{j}", joined.width + rank)
                low = self.add(ops.Heads(out, joined, 1, 0, low, **self.where))
            joined = low
        assert joined is not None
        return self.linear(joined, f"{blk}.attn_output_b", config.n_embd, f"{blk}.attn_out")

    def _blocks(self, prefix: str, dim: int, size: int, rope: ops.Rope, h: Value) -> Value:
        """Add a key per block of tokens, at the block's last token: a mean, rotated like the first token.

        prefix: of the names of the tensors. dim: channels of a key.
        """
        name = f"{prefix}_compressor"
        overlaps = self.weights.shape(f"{name}_kv") == (h.width, 2 * dim)
        width = 2 * dim if overlaps else dim
        x, scores = self.linear(h, f"{name}_kv", width), self.linear(h, f"{name}_gate", width)
        bias = self.weights.numbers(f"{name}_ape", size * width)
        pooled = ops.PoolBlocks(self.value(f"{prefix}_blocks", dim), x, scores, bias, size, **self.where)
        normed = self.norm(self.add(pooled), f"{name}_norm")
        return self._turned(normed, 1, replace(rope, every=size))

    def _turned(self, x: Value, n_head: int, rope: ops.Rope, name: str | None = None) -> Value:
        """Add the rotation of the last channels of heads."""
        dim = x.width // n_head
        out = self.value(name or f"{x.name}_rope", x.width)
        return self.add(ops.Rotate(out, x, n_head, dim, rope, dim - rope.n_rot, **self.where))

    # ---- the choice of keys

    def _owner(self, i: int) -> Indexing | None:
        """Return the indexer that layer i computes; None if it computes none."""
        indexing = self.config.indexing
        if indexing is None or i >= len(indexing.owners):  # layers for multi-token prediction have none
            return None
        return indexing if indexing.owners[i] == i else None

    def _choice(self, i: int) -> dict[str, Any]:
        """Return the fields of layer i's attention that name the chosen keys."""
        indexing = self.config.indexing
        owner = None if indexing is None or i >= len(indexing.owners) else indexing.owners[i]
        if indexing is None or owner is None:
            return {}
        return {"chosen": self._chosen[owner], "chosen_size": indexing.size}

    def _choose(self, i: int, indexing: Indexing, q: Value, k: Value, weights: Value | None) -> None:
        """Add the indexer of layer i over its rotated queries and keys."""
        out = self.value(f"blk.{i}.indexer", indexing.top_k)
        n, dim = indexing.n_head, indexing.head_dim
        self._chosen[i] = self.add(ops.Indexer(out, q, k, weights, n, dim, indexing.size, **self.where))

    def _index_heads(
        self, i: int, indexing: Indexing, rope: ops.Rope, given: Value, tensor: str = "attn_q_b"
    ) -> Value:
        """Add the queries of an indexer from `given`, before their rotation by `rope`."""
        name = f"blk.{i}.indexer.{tensor}"
        if rope.n_rot > indexing.head_dim:
            raise UnsupportedModelError(
                f"the indexer has heads of {indexing.head_dim} channels, fewer than the {rope.n_rot} that "
                "are rotated"
            )
        return self.linear(given, name, indexing.n_head * indexing.head_dim, f"blk.{i}.indexer_q")

    def _index_rope(self, x: Value, n_head: int, rope: ops.Rope) -> Value:
        """Add the rotation of the first channels of an indexer's queries or keys."""
        out = self.value(f"{x.name}_rope", x.width)
        return self.add(ops.Rotate(out, x, n_head, x.width // n_head, rope, **self.where))

    def _choose_tokens(
        self, i: int, indexing: Indexing, rope: ops.Rope, k: Value, weights: Value, given: Value
    ) -> None:
        """Add the choice of tokens for latent attention. k: keys before their norm. given: q's vector."""
        blk, dim = f"blk.{i}", indexing.head_dim
        rope = replace(rope, kind=indexing.rope)
        q = self._index_rope(self._index_heads(i, indexing, rope, given), indexing.n_head, rope)
        norm = f"{blk}.indexer.k_norm"
        weight, bias = self.weights.vector(norm, dim), self.weights.bias(norm, dim, required=True)
        out = self.value(f"{blk}.indexer_k_norm", dim)
        k = self.add(ops.LayerNorm(out, k, weight, bias, _INDEX_EPS, **self.where))
        self._choose(i, indexing, q, self._index_rope(k, 1, rope), weights)

    def _choose_compressed(self, i: int, size: int, rope: ops.Rope, h: Value, given: Value) -> None:
        """Add the choice among compressed blocks, by compressed keys of the indexer."""
        blk, indexing = f"blk.{i}", self._owner(i)
        assert indexing is not None
        q = self._turned(self._index_heads(i, indexing, rope, given), indexing.n_head, rope)
        k = self._blocks(f"{blk}.indexer", indexing.head_dim, size, rope, h)
        weights = self.linear(h, f"{blk}.indexer.proj", indexing.n_head, f"{blk}.indexer_weights")
        self._choose(i, indexing, q, k, weights)

    def _choose_by_means(self, i: int, layer: LayerConfig, h: Value) -> None:
        """Add the choice of blocks of tokens by the means of their index keys."""
        blk, indexing, rope = f"blk.{i}", self._owner(i), layer.rope
        assert indexing is not None
        assert rope is not None
        n, dim, eps = indexing.n_head, indexing.head_dim, self.config.norm_eps
        q = self._index_heads(i, indexing, rope, h, "q_proj")
        k = self.linear(h, f"{blk}.indexer.k_proj", dim, f"{blk}.indexer_k")
        weight = self.weights.vector(f"{blk}.indexer.q_norm", dim)
        q = self.add(ops.RMSNorm(self.value(f"{q.name}_norm", n * dim), q, weight, eps, n, **self.where))
        out = self.value(f"{blk}.indexer_blocks", dim)
        k = self.add(ops.PoolBlocks(out, k, None, None, indexing.size, **self.where))
        k = self.norm(k, f"{blk}.indexer.k_norm", f"{blk}.indexer_k_norm")
        rope = replace(rope, kind=indexing.rope)
        of_blocks = replace(rope, every=indexing.size)
        self._choose(i, indexing, self._index_rope(q, n, rope), self._index_rope(k, 1, of_blocks), None)

    def ffn(self, i: int, layer: LayerConfig, given: Value, x: Value, predictor: Predictor | None) -> Value:
        """Add the FFN of layer i and the sum with the stream x; `given` is the layer's input."""
        config, blk = self.config, f"blk.{i}"
        if layer.experts is not None:
            if predictor is not None and not config.masked:
                raise UnsupportedModelError("predictors of neurons inside experts are not supported")
            if self.layer_thresholds[i].ffn_in or self.layer_thresholds[i].down_in:
                raise UnsupportedModelError(
                    "experts support thresholds of activated gates only, not of the inputs of matrices; make "
                    "the thresholds again with hotset sparse calibrate"
                )
            return self._mixture(i, layer, layer.experts, given, x, predictor)
        n_always = 0 if predictor is None or not predictor.first else predictor.first[i]  # without scores
        kind = None if predictor is None or n_always >= layer.n_ff else predictor.kind
        n_scores = layer.n_ff - n_always
        scores: Value | None = None
        if kind == "mlp":
            self.enter(i, "predictor")
            p = given if config.predictor_input == "layer_input" else x
            scores = self._low_rank_scores(blk, p, "fc1", "fc2", "relu", n_scores)

        self.enter(i, "ffn")
        entering = given if layer.parallel else x
        own = f"{blk}.{layer.ffn_norm}"
        tensor = f"{blk}.attn_norm" if layer.parallel and f"{own}.weight" not in self.weights.tensors else own
        norm = self.norm_op(entering, tensor, f"{blk}.ffn_norm") if layer.pre_norm else None
        h = entering if norm is None else norm.out
        share: Value | None = None
        if isinstance(layer.mixer, RwkvMixer) and norm is not None:
            entering, share = channel_mix(self, blk, layer.mixer, self.add(norm))
            h, norm = entering, None
        if kind == "svd":  # it reads the FFN's input, so the norm becomes a separate operation
            if norm is not None:
                entering, norm = self.add(norm), None
            self.enter(i, "predictor")
            scores = self._low_rank_scores(blk, h, "svd_a", "svd_b", None, n_scores)
            self.enter(i, "ffn")
        threshold = 0.0 if predictor is None else predictor.thresholds[i]
        out = self.add(self._ffn_op(i, layer, entering, norm, scores, threshold, n_always))
        if share is not None:
            out = self.add(ops.Multiply(self.value(f"{blk}.ffn_shared", out.width), out, share, **self.where))
        return self._after_ffn(blk, layer, x, out)

    def _after_ffn(self, blk: str, layer: LayerConfig, x: Value, out: Value) -> Value:
        """Add the sum of the stream x and the FFN's result, after its norm and scale."""
        config = self.config
        if layer.post_norm:
            out = self.norm(out, f"{blk}.post_ffw_norm", eps=config.post_norm_eps)
        out = self._by_channel(self.scaled(out, config.residual_scale, f"{blk}.ffn_scaled"), f"{blk}.ls2")
        return self._summed(layer, x, out, f"{blk}.out", f"{blk}.layer_output_norm")

    def with_embedding(self, i: int, x: Value, embedded: Value) -> Value:
        """Add the layer's embedding of the token to the stream x after layer i."""
        self.enter(i, "other")
        more = gated_embedding(self, i, x, embedded)
        return self.add(ops.Add(self.value(f"blk.{i}.out_embd", x.width), x, more, **self.where))

    def output(
        self,
        x: Value,
        streams: AltUpResidual | HyperResidual | GatedResidual | None,
        norm: str | None = None,
        matrix: str | None = None,
    ) -> None:
        """Add the selection of rows, the last norm and the logits; in an encoder the norm and the selection.

        norm, matrix: tensors that replace the model's.
        """
        config = self.config
        self.where = {}
        if not config.causal:
            x = x if config.output_norm is None else self.norm(x, config.output_norm, "output_norm")
            self.weights.leave("output")
            self.add(ops.SelectOutputs(self.value("result", config.n_embd), x))
            return
        assert config.output_norm is not None
        x = self.add(ops.SelectOutputs(self.value("output_inp", x.width), x))
        x = x if streams is None else streams.joined(x)
        if not isinstance(streams, GatedResidual):  # its streams are already normed
            x = self.norm(x, norm or config.output_norm, "output_norm")
        if matrix is None:  # without an output matrix, the embedding is tied
            matrix = "output" if "output.weight" in self.weights.tensors else "token_embd"
        is_raw = config.logit_scale != 1.0 or config.logit_softcap > 0
        x = self.linear(x, matrix, config.n_vocab, "logits_raw" if is_raw else "logits")
        if config.logit_softcap:
            x = self.scaled(x, config.logit_scale, "logits_scaled")
            self.add(ops.SoftCap(self.value("logits", config.n_vocab), x, config.logit_softcap))
        else:
            self.scaled(x, config.logit_scale, "logits")

    # ---- pieces of attention

    def _key_bias(self, i: int, layer: LayerConfig) -> ops.KeyBias | None:
        """Return the bias of the keys that layer i attends to, or None if a norm changes it."""
        if layer.source is not None:
            return self._key_bias(layer.source, self.config.layers[layer.source])
        if layer.qk_norm:
            return None
        _, dim, _ = self._head_sizes(layer)
        before = self.config.n_head * dim
        for tensor, first in ((f"blk.{i}.attn_k.bias", 0), (f"blk.{i}.attn_qkv.bias", before)):
            if tensor in self.weights.tensors:
                return ops.KeyBias(tensor, first, layer.rope)
        return None

    def _gated_query(self, both: Value, blk: str) -> tuple[Value, Value]:
        """Return the queries, and the gates before their sigmoid."""
        n, dim, dim_v = self.config.n_head, self.config.head_dim, self.config.head_dim_v
        q = self.add(ops.Heads(self.value(f"{blk}.attn_q", n * dim), both, n, **self.where))
        gate = self.add(ops.Heads(self.value(f"{blk}.attn_gate", n * dim_v), both, n, dim, **self.where))
        return q, gate

    def _head_sizes(self, layer: LayerConfig) -> tuple[int, int, int]:
        """Return the layer's KV heads, the channels of a head of q and k, and of v."""
        if layer.heads is not None:
            return *layer.heads, layer.heads[1]
        return self.config.n_head_kv, self.config.head_dim, self.config.head_dim_v

    def _heads(self, x: Value, blk: str, layer: LayerConfig, *, gated: bool) -> tuple[Value, Value, Value]:
        """Add q, k and v: from three matrices, from one for all, or k and v of another layer.

        gated: in q's matrix, the rows of each head's gate follow its query. In models with per-layer heads,
        keys serve as values if the file has no matrix for values.
        """
        config = self.config
        n_head_kv, dim, dim_v = self._head_sizes(layer)
        if layer.source is not None:
            self.weights.leave(f"{blk}.attn_k", f"{blk}.attn_v", f"{blk}.attn_k_norm")  # in files, but unused
            q = self.linear(x, f"{blk}.attn_q", config.n_head * dim)
            return q, *self._stored[layer.source]
        if layer.heads is not None and f"{blk}.attn_v.weight" not in self.weights.tensors:
            q = self.linear(x, f"{blk}.attn_q", config.n_head * dim)
            k = self.linear(x, f"{blk}.attn_k", n_head_kv * dim)
            return q, k, k
        if gated:
            q = self.linear(x, f"{blk}.attn_q", config.n_head * (dim + dim_v), f"{blk}.attn_qg")
            k = self.linear(x, f"{blk}.attn_k", n_head_kv * dim)
            return q, k, self.linear(x, f"{blk}.attn_v", n_head_kv * dim_v)
        widths = {
            f"{blk}.attn_q": config.n_head * dim,
            f"{blk}.attn_k": n_head_kv * dim,
            f"{blk}.attn_v": n_head_kv * dim_v,
        }
        if f"{blk}.attn_qkv.weight" not in self.weights.tensors:
            q, k, v = (self.linear(x, name, width) for name, width in widths.items())
            return q, k, v
        q, k, v = (self.add(op) for op in self.rows_of(f"{blk}.attn_qkv", x, widths))
        return q, k, v

    def _tempered(self, q: Value, blk: str) -> Value:
        """Add the product of queries and the gain of their positions, if the model has one.

        It precedes the rotation, because backends fuse the rotation into attention.
        """
        if self.config.query_gain is None:
            return q
        beta, length = self.config.query_gain
        gain = self.add(ops.PositionGain(self.value(f"{blk}.attn_q_gain", 1), beta, length, **self.where))
        return self.add(ops.Multiply(self.value(f"{blk}.attn_q_tempered", q.width), q, gain, **self.where))

    def _rotated(self, x: Value, n_head: int, layer: LayerConfig) -> Value:
        """Add the rotation of q or k, and the head norm before or after it, if the model has one."""
        name, rope = x.name, layer.rope
        _, head_dim, _ = self._head_sizes(layer)
        if layer.qk_norm and not layer.qk_norm_last:
            x = self._head_norm(x, name, n_head, layer.qk_norm)
        if rope is not None:
            x = self.add(
                ops.Rotate(self.value(f"{name}_rope", x.width), x, n_head, head_dim, rope, **self.where)
            )
        if rope is not None and layer.more_rope is not None:
            out, more = self.value(f"{name}_rope_more", x.width), layer.more_rope
            x = self.add(ops.Rotate(out, x, n_head, head_dim, more, rope.n_rot, **self.where))
        if layer.qk_norm and layer.qk_norm_last:
            x = self._head_norm(x, name, n_head, layer.qk_norm)
        return x

    def _head_norm(self, x: Value, name: str, n_head: int, kind: HeadNorm) -> Value:
        parts = n_head if kind == "head" else 1
        out = self.value(f"{name}_norm", x.width)
        if self.config.norm == "layer":
            own = self.weights.matrix(f"{name}_norm", x.width // parts, parts)
            return self.add(ops.LayerNorm(out, x, own, None, self.config.norm_eps, parts, **self.where))
        weight = self.weights.vector(f"{name}_norm", x.width // parts)
        return self.add(ops.RMSNorm(out, x, weight, self.config.norm_eps, parts, **self.where))

    def _latent_heads(
        self, x: Value, i: int, layer: LayerConfig, latent: Latent
    ) -> tuple[Value, Value, Value]:
        """Add q, k and v from latent vectors, with the rotation, if any. The cache stores k and v."""
        config, n_head, rope, blk = self.config, self.config.n_head, layer.rope, f"blk.{i}"
        n_own = config.head_dim - latent.n_rot  # channels of a head without rotation
        eps = latent.norm_eps
        width, width_v = n_head * config.head_dim, n_head * config.head_dim_v
        given = self.linear(x, f"{blk}.attn_q_a", latent.rank_q) if latent.rank_q else x
        parts = {f"{blk}.attn_kv_a": latent.rank, f"{blk}.attn_k_shared": latent.n_rot}
        vector, shared = (self.add(op) for op in self.rows_of(f"{blk}.attn_kv_a_mqa", x, parts))
        if (indexing := self._owner(i)) is not None:
            index_k = self.linear(x, f"{blk}.indexer.attn_k", indexing.head_dim, f"{blk}.indexer_k")
            weights = self.linear(x, f"{blk}.indexer.proj", indexing.n_head, f"{blk}.indexer_weights")
        if latent.rank_q:
            given = self.norm(given, f"{blk}.attn_q_a_norm", eps=eps)
        if indexing is not None:
            if rope is None:
                raise UnsupportedModelError("an indexer without a rotation is not supported")
            self._choose_tokens(i, indexing, rope, index_k, weights, given)
        q = self.linear(
            given, f"{blk}.attn_q_b" if latent.rank_q else f"{blk}.attn_q", width, f"{blk}.attn_q"
        )
        q = self._tempered(q, blk)
        if rope is not None:
            out = self.value(f"{blk}.attn_q_rope", width)
            q = self.add(ops.Rotate(out, q, n_head, config.head_dim, rope, n_own, **self.where))
            out = self.value(f"{blk}.attn_k_shared_rope", latent.n_rot)
            shared = self.add(ops.Rotate(out, shared, 1, latent.n_rot, rope, **self.where))
        vector = self.norm(vector, f"{blk}.attn_kv_a_norm", eps=eps)

        out_k, out_v = self.value(f"{blk}.attn_k", width), self.value(f"{blk}.attn_v", width_v)
        if f"{blk}.attn_kv_b.weight" in self.weights.tensors:  # of each head: its key, then its value
            both = self.linear(vector, f"{blk}.attn_kv_b", n_head * (n_own + config.head_dim_v))
            v = self.add(ops.Heads(out_v, both, n_head, n_own, **self.where))
        else:
            weight = self.weights.heads(f"{blk}.attn_k_b", n_own, latent.rank, n_head)
            both = self.value(f"{blk}.attn_k_own", n_head * n_own)
            self.add(ops.TransposedHeads(both, vector, weight, n_head, **self.where))
            weight = self.weights.heads(f"{blk}.attn_v_b", latent.rank, config.head_dim_v, n_head)
            v = self.add(ops.Linear(out_v, vector, weight, **self.where))
        return q, self.add(ops.Heads(out_k, both, n_head, 0, shared, **self.where)), v

    # ---- experts

    def _mixture(
        self, i: int, layer: LayerConfig, experts: Experts, given: Value, x: Value, mask: Predictor | None
    ) -> Value:
        """Add an FFN of experts, the shared expert, and the sum with the stream x.

        given: the layer's input. mask: predictors of the experts, whose mask is part of the model.
        """
        blk, d = f"blk.{i}", self.config.n_embd
        self.enter(i, "ffn")
        h = self.norm(x, f"{blk}.{layer.ffn_norm}", f"{blk}.ffn_norm") if layer.pre_norm else x
        shared_input = h
        if experts.with_ffn:
            routed, h = self._routed_input(blk, x), self.norm(x, f"{blk}.pre_ffw_norm_2")
        else:
            routed = given if experts.early else h
        scores = self.linear(routed, f"{blk}.ffn_gate_inp", experts.n, f"{blk}.ffn_router")
        threshold = None if mask is None else mask.thresholds[i]
        given = self.linear(h, f"{blk}.ffn_latent_down", experts.n_latent) if experts.n_latent else h
        out = self.add(self._expert_ffn(i, layer, experts, given, scores, threshold))
        if experts.n_latent:
            out = self.linear(out, f"{blk}.ffn_latent_up", d)
        if experts.n_ff_shared:
            shared = self.add(self._shared_ffn(blk, layer, experts, shared_input))
            if experts.gated_share:
                weight = self.weights.row(f"{blk}.ffn_gate_inp_shexp", d)
                share = self.add(ops.Linear(self.value(f"{blk}.ffn_share", 1), h, weight, **self.where))
                act = ops.Activate(self.value(f"{blk}.ffn_share_act", 1), share, "sigmoid", **self.where)
                factor = self.add(act)
                shared = self.add(
                    ops.Multiply(self.value(f"{blk}.ffn_shared", d), shared, factor, **self.where)
                )
            if experts.with_ffn:
                out = self.norm(out, f"{blk}.post_ffw_norm_2")
                shared = self.norm(shared, f"{blk}.post_ffw_norm_1")
            out = self.add(ops.Add(self.value(f"{blk}.ffn_sum", d), out, shared, **self.where))
        return self._after_ffn(blk, layer, x, out)

    def _routed_input(self, blk: str, x: Value) -> Value:
        """Return the router's input from the stream x, in layers that also have an FFN."""
        d, name = x.width, f"{blk}.ffn_routed"
        unit = self.add(ops.UnitNorm(self.value(f"{name}_norm", d), x, self.config.norm_eps, 1, **self.where))
        scale = self.weights.bare(f"{blk}.ffn_gate_inp.scale", d)
        return self.add(ops.Scale(self.value(name, d), unit, d**-0.5, scale, **self.where))

    def _expert_ffn(
        self,
        i: int,
        layer: LayerConfig,
        experts: Experts,
        h: Value,
        scores: Value,
        threshold: float | None,
    ) -> ops.Ffn:
        """Return the experts' FFN. threshold: of their predictors' scores; None: no predictors."""
        blk = f"blk.{i}"
        bias = self.weights.bias(f"{blk}.exp_probs_b", experts.n)
        if bias is None and f"{blk}.exp_probs_b" in self.weights.tensors:  # hy_v3's name
            bias = self.weights.bare(f"{blk}.exp_probs_b", experts.n)
        route = ops.Route(
            self.value(f"{blk}.ffn_route", 2 * experts.n_used), scores, experts.n_used, experts.scoring,
            bias, experts.normalised, experts.scale, experts.n_groups, experts.n_groups_used,
            experts.group_best,
            self.weights.scales(f"{blk}.ffn_down_exps", experts.n) if experts.with_ffn else None,
            self.weights.experts_of_tokens(f"{blk}.ffn_gate_tid2eid", experts.n_used)
            if experts.hashed
            else None,
            **self.where,
        )  # fmt: skip
        n, d, width = layer.n_ff, h.width, experts.n_used * layer.n_ff
        wanted = None if threshold is None else self._expert_scores(i, experts, h, route, n)

        def product(name: str, tensor: str, n_rows: int, first_row: int = 0) -> ops.ExpertLinear:
            weights, bias = self.weights.experts(f"{blk}.{tensor}", d, n_rows, experts.n)
            out = self.value(f"{blk}.{name}", width)
            return ops.ExpertLinear(out, h, route.out, weights, experts.n, bias, first_row, **self.where)

        gate: ops.ExpertLinear | None = None
        if not layer.gated:
            up = product("ffn_up", "ffn_up", n)
        elif f"{blk}.ffn_gate_up_exps.weight" in self.weights.tensors:  # the rows of the gate come first
            gate = product("ffn_gate", "ffn_gate_up", 2 * n)
            up = product("ffn_up", "ffn_gate_up", 2 * n, n)
        else:
            gate, up = product("ffn_gate", "ffn_gate", n), product("ffn_up", "ffn_up", n)
        gate_act, up_act, multiply = self._activated(blk, layer, gate, up)
        gate_threshold, multiply, neurons = self._gate_threshold(
            blk, self.layer_thresholds[i], gate_act, multiply
        )
        select: ops.Select = route
        if wanted is not None and threshold is not None:
            masked = self.value(f"{blk}.ffn_masked", width)
            select = ops.MaskedRoute(route, ops.Mask(masked, neurons, wanted, threshold, **self.where))
            neurons = masked
        neuron_major = self.weights.shape(f"{blk}.ffn_down_exps") == (d, n, experts.n) and n != d
        rows = (d, n) if neuron_major else (n, d)
        weights, bias = self.weights.experts(f"{blk}.ffn_down", *rows, experts.n, n_bias=d)
        out = self.value(f"{blk}.ffn_down", d)
        copy = None if neuron_major else self.weights.input_major(f"{blk}.ffn_down_exps", n)
        down = ops.ExpertSum(
            out, neurons, route.out, weights, experts.n, bias, neuron_major, copy, **self.where
        )
        return ops.Ffn(
            out,
            h,
            None,
            gate,
            up,
            gate_act,
            up_act,
            multiply,
            select,
            down,
            gate_threshold=gate_threshold,
            **self.where,
        )

    def _expert_scores(self, i: int, experts: Experts, h: Value, route: ops.Route, n: int) -> Value:
        """Add the scores of the chosen experts' predictors, side by side; n: neurons of an expert."""
        blk, d = f"blk.{i}", self.config.n_embd
        self.enter(i, "predictor")
        self.add(route)
        rank = self.weights.n_rows(f"{blk}.fc1_exps", -2)
        weights, _ = self.weights.experts(f"{blk}.fc1", d, rank, experts.n)
        hidden = self.value(f"{blk}.ffn_pred_h", experts.n_used * rank)
        self.add(ops.ExpertLinear(hidden, h, route.out, weights, experts.n, **self.where))
        fired = self.value(f"{blk}.ffn_pred_h_act", hidden.width)
        self.add(ops.Activate(fired, hidden, "relu", **self.where))
        weights, _ = self.weights.experts(f"{blk}.fc2", rank, n, experts.n)
        out = self.value(f"{blk}.ffn_pred", experts.n_used * n)
        self.add(ops.ExpertLinear(out, fired, route.out, weights, experts.n, of_parts=True, **self.where))
        self.enter(i, "ffn")
        return out

    def _shared_ffn(self, blk: str, layer: LayerConfig, experts: Experts, h: Value) -> ops.Ffn:
        n, own = experts.n_ff_shared, "" if experts.with_ffn else "_shexp"

        def linear(x: Value, name: str, width: int) -> ops.Linear:
            return self.linear_op(x, f"{blk}.{name}{own}", width, f"{blk}.{name}_shexp")

        gate: ops.Linear | None = None
        if not layer.gated:
            up = linear(h, "ffn_up", n)
        elif self._has_both(f"{blk}.ffn_gate{own}", f"{blk}.ffn_up{own}", n):
            widths = {f"{blk}.ffn_gate_shexp": n, f"{blk}.ffn_up_shexp": n}
            gate, up = self.rows_of(f"{blk}.ffn_up{own}", h, widths)
        else:
            gate, up = linear(h, "ffn_gate", n), linear(h, "ffn_up", n)
        gate_act, up_act, product = self._activated(blk, layer, gate, up, "_shexp")
        neurons = gate_act.out if product is None else product.out
        down = linear(neurons, "ffn_down", self.config.n_embd)
        return ops.Ffn(
            down.out, h, None, gate, up, gate_act, up_act, product, ops.All(), down, shared=True, **self.where
        )  # fmt: skip

    # ---- pieces of the FFN

    def _ffn_op(
        self,
        i: int,
        layer: LayerConfig,
        x: Value,
        norm: ops.RMSNorm | ops.LayerNorm | None,
        scores: Value | None,
        threshold: float,
        n_always: int,
    ) -> ops.Ffn:
        blk, n = f"blk.{i}", layer.n_ff
        h, layer_thresholds = x if norm is None else norm.out, self.layer_thresholds[i]
        in_threshold = self._threshold_op(h, layer_thresholds, "ffn_in", f"{blk}.ffn_norm_thresholded")
        gate, up = self._gate_and_up(blk, layer, h if in_threshold is None else in_threshold.out)
        gate_act, up_act, product = self._activated(blk, layer, gate, up)
        top_k = None
        if layer.activation.top_k is not None:
            if gate is None or scores is not None:
                raise UnsupportedModelError("a Gaussian top-k is of the gates of all neurons")
            top_k = ops.GaussianTopK(
                self.value(f"{blk}.ffn_gate_top_k", n), gate.out, layer.activation.top_k, **self.where
            )
            gate_act = replace(gate_act, x=top_k.out)
        gate_threshold, product, neurons = self._gate_threshold(blk, layer_thresholds, gate_act, product)
        select: ops.Select = ops.All()
        if scores is not None:
            masked = self.value(f"{blk}.ffn_masked", n)
            select = ops.Mask(masked, neurons, scores, threshold, n_always, **self.where)
            neurons = masked
        down_threshold = self._threshold_op(neurons, layer_thresholds, "down_in", f"{blk}.ffn_thresholded")
        neurons = neurons if down_threshold is None else down_threshold.out
        sub_norm = self.norm_op(neurons, f"{blk}.ffn_sub_norm") if layer.sub_norms else None
        assert not isinstance(sub_norm, ops.LayerNorm)  # a layer norm would not keep zeros
        down = self._down(blk, layer, neurons if sub_norm is None else sub_norm.out)
        return ops.Ffn(
            down.out, x, norm, gate, up, gate_act, up_act, product, select, down,
            in_threshold=in_threshold, gate_threshold=gate_threshold, down_threshold=down_threshold,
            top_k=top_k, sub_norm=sub_norm, **self.where,
        )  # fmt: skip

    def _activated(
        self,
        blk: str,
        layer: LayerConfig,
        gate: ops.Linear | ops.ExpertLinear | None,
        up: ops.Linear | ops.ExpertLinear,
        suffix: str = "",
    ) -> tuple[ops.Activate, ops.Activate | None, ops.Multiply | None]:
        """Return the gate's activation (or up's, without a gate), up's activation, and their product."""
        name = f"{blk}.ffn_act{suffix}"
        if gate is None:
            return self._activate(up.out, layer, name), None, None
        gate_act, up_act, factor = self._activate(gate.out, layer), None, up.out
        if layer.activation.up is not None:
            out = self.value(f"{blk}.ffn_up{suffix}_act", up.out.width)
            up_act = self._activation(out, up.out, layer.activation.up, layer)
            factor = up_act.out
        out = self.value(name, up.out.width)
        return gate_act, up_act, ops.Multiply(out, gate_act.out, factor, **self.where)

    def _gate_threshold(
        self,
        blk: str,
        layer_thresholds: LayerThresholds,
        gate_act: ops.Activate,
        product: ops.Multiply | None,
    ) -> tuple[ops.Threshold | None, ops.Multiply | None, Value]:
        """Return the threshold of activated gates, the product with the result, and the neurons."""
        threshold = self._threshold_op(gate_act.out, layer_thresholds, "gate", f"{blk}.ffn_gate_thresholded")
        fires = gate_act.out if threshold is None else threshold.out
        if product is None:
            return threshold, None, fires
        return threshold, replace(product, a=fires), product.out

    def _gate_and_up(self, blk: str, layer: LayerConfig, h: Value) -> tuple[ops.Linear | None, ops.Linear]:
        """Return the products of gate and up, from two matrices or one that holds both; or up only."""
        n, gate, up = layer.n_ff, f"{blk}.ffn_gate", f"{blk}.{layer.ffn_tensors[0]}"
        if not layer.gated:
            return None, self.linear_op(h, up, n, f"{blk}.ffn_up")
        if not self._has_both(gate, up, n):
            return self.linear_op(h, gate, n), self.linear_op(h, up, n)
        first, second = self.rows_of(up, h, {gate: n, up: n})
        return first, second

    def _has_both(self, gate: str, up: str, n: int) -> bool:
        """Return whether up's tensor also has the n rows of the gate, before its own."""
        both = self.weights.tensors.get(f"{up}.weight")
        alone = f"{gate}.weight" in self.weights.tensors
        return not alone and both is not None and both.shape[-1] == 2 * n

    def _down(self, blk: str, layer: LayerConfig, neurons: Value) -> ops.Linear | ops.TransposedLinear:
        """Return the down projection in the file's layout, preferably neuron-major."""
        d, weights, down = self.config.n_embd, self.weights, f"{blk}.{layer.ffn_tensors[1]}"
        out, transposed = self.value(f"{blk}.ffn_down", d), f"{down}_t"
        has_own_bias = f"{transposed}.bias" in weights.tensors
        bias = weights.bias(transposed if has_own_bias else down, d)
        if f"{transposed}.weight" in weights.tensors:
            matrix = weights.matrix(transposed, d, neurons.width)
            return ops.TransposedLinear(out, neurons, matrix, bias, **self.where)
        if f"{transposed}.codes" in weights.tensors:
            codes, scales = weights.planes(transposed, d, neurons.width)
            return ops.TransposedLinear(out, neurons, codes, bias, scales, **self.where)
        matrix = weights.matrix(down, neurons.width, d)
        input_major = weights.input_major(down, neurons.width)
        return ops.Linear(out, neurons, matrix, bias, input_major=input_major, **self.where)

    def _low_rank_scores(
        self, blk: str, x: Value, first: str, second: str, kind: ops.ActivationKind | None, n: int
    ) -> Value:
        rank = self.weights.n_rows(f"{blk}.{first}")
        hidden = self.linear(x, f"{blk}.{first}", rank, f"{blk}.ffn_pred_h")
        if kind is not None:
            out = self.value(f"{blk}.ffn_pred_h_act", rank)
            hidden = self.add(ops.Activate(out, hidden, kind, **self.where))
        out, bias = self.value(f"{blk}.ffn_pred", n), self.weights.bias(f"{blk}.always", n)
        matrix = self.weights.matrix(f"{blk}.{second}", rank, n)
        return self.add(ops.Linear(out, hidden, matrix, bias, **self.where))

    def _activate(self, x: Value, layer: LayerConfig, name: str | None = None) -> ops.Activate:
        """Return the activation of gates, which decides whether and how strongly neurons fire."""
        out = self.value(name or f"{x.name}_act", x.width)
        return self._activation(out, x, layer.activation.gate, layer)

    def _activation(self, out: Value, x: Value, kind: ops.ActivationKind, layer: LayerConfig) -> ops.Activate:
        has_threshold = kind in ("fatrelu", "clamped_silu", "clamped_plus_one", "capped_silu", "clamp")
        threshold = layer.activation.threshold if has_threshold else 0.0
        return ops.Activate(out, x, kind, threshold, layer.activation.xielu, **self.where)

    # ---- small things

    def _threshold_op(
        self, x: Value, layer_thresholds: LayerThresholds, of: ThresholdName, name: str
    ) -> ops.Threshold | None:
        """Return the operation of a threshold; None if it is 0."""
        threshold = getattr(layer_thresholds, of)
        return ops.Threshold(self.value(name, x.width), x, threshold, of, **self.where) if threshold else None

    def _thresholded(self, x: Value, layer: int, of: ThresholdName) -> Value:
        op = self._threshold_op(x, self.layer_thresholds[layer], of, f"{x.name}_thresholded")
        return x if op is None else self.add(op)
