"""The one decoder: describes a forward step of any supported architecture as a Graph.

It computes nothing and names no architecture: the facts come from ModelConfig. Values are named as the GGUF
tensors are ("blk.3.attn_q" is what blk.3.attn_q.weight yields), and every name can be asked for as a tap:

    embedding  [embedding_scaled]  [token_types  embd_typed: their sum]  [position_embd  inp: the sum with it]
    [token_embd_norm]
    blk.N.attn_norm  attn_q  attn_k  attn_v  [attn_q_norm  attn_k_norm]  [attn_q_rope  attn_k_rope]
    [blk.N.attn_q_a  attn_q_a_norm  attn_kv_a  attn_kv_a_norm: latent vectors  attn_kv_b or attn_k_own: what
    the heads make of them  attn_k_shared  attn_k_shared_rope]
    blk.N.attn       what the heads yield, side by side       blk.N.attn_out  after attn_output
    [blk.N.post_attention_norm]  [blk.N.attn_scaled]
    [blk.N.attn_sub_norm  ffn_sub_norm: what attn_output and ffn_down read]
    [blk.N.attn_qg: queries and gates  attn_gate  attn_gate_act  attn_gated: attn times it]
    or, in place of these, of a short convolution:
    blk.N.conv_b  conv_c  conv_x  conv_in: b * x  conv  conv_gated: times c  conv_out
    or of a gated delta net:
    blk.N.delta_qkv  delta_gate  delta_ba or delta_beta and delta_alpha  conv  conv_act  delta: what the heads
    yield  delta_norm  delta_gate_act  delta_gated  delta_out; of one whose keys decay channel by channel
    attn_q  attn_k  attn_v  conv_q  conv_k  conv_v  ssm_f_a  ssm_f_b  ssm_g_a  ssm_g_b in place of the first
    or of a state space:
    blk.N.ssm_z  ssm_xbc  ssm_dt  conv  conv_act  ssm: what the heads yield  ssm_z_act  ssm_gated
    [ssm_unit  ssm_norm]  ssm_out  [mixed: its sum with attn_out, where it stands beside attention]; of Mamba
    also ssm_x_in  ssm_dt_in  ssm_b  ssm_c  ssm_dt_out
    or of RWKV, beside others of the same beginning:
    blk.N.time_mix_shift: what the token before has more  time_mix_xr  xw  xk  xv  xa  xg: what products read
    time_mix_receptance  time_mix_key  time_mix_value  time_mix_wkv: what the heads yield  time_mix_ln
    time_mix_bonus  time_mix_gated  time_mix_output;  in front of the FFN channel_mix_shift  channel_mix_k
    blk.N.ffn_inp    the residual stream after attention      blk.N.ffn_norm  what the FFN reads
    [blk.N.ffn_latent_down  ffn_latent_up: around experts]
    [blk.N.ffn_routed_norm  ffn_routed: what the router reads  pre_ffw_norm_2: what experts beside an FFN read
    post_ffw_norm_1  post_ffw_norm_2: what the FFN and they yield]
    [blk.N.ffn_router: the experts' scores  ffn_route: the chosen ones' ids and weights]
    [blk.N.ffn_pred_h  ffn_pred_h_act]  [blk.N.ffn_pred: a predictor's scores]
    blk.N.ffn_up  [ffn_gate  ffn_gate_act  ffn_up_act]        blk.N.ffn_act   one value per neuron: it fires
    [blk.N.ffn_gate_top_k: what ffn_gate_act is of]           unless it is 0
    [blk.N.ffn_masked: 0 where it was not predicted]
    [blk.N.ffn_up_shexp  ffn_gate_shexp  ffn_gate_shexp_act  ffn_act_shexp  ffn_down_shexp: of what all share,
    ffn_share  ffn_share_act  ffn_shared: it is multiplied  ffn_sum]
    [behind thresholds: blk.N.attn_norm_thresholded  attn_thresholded  ffn_norm_thresholded
    ffn_gate_thresholded  ffn_thresholded]
    blk.N.ffn_down  [blk.N.post_ffw_norm]  [blk.N.ffn_scaled]  blk.N.out
    [residual streams with gates: streams, and of attention hc_attn_norm  hc_attn_down  hc_attn_down_act
    hc_attn_up  hc_attn_up_act  hc_attn_gated  hc_attn: their mean, in place of attn_norm  hc_attn_inject: the
    weights of what is added; of the FFN hc_ffn_norm, ..., and before the output output_hc_norm, ...]
    [embeddings of n-grams: blk.N.ple_embd  ple_key  ple_value  ple_query  ple_gated  ple_conv  ple_streams]
    [several residual streams: altup_others  altup_sized  streams, and of a layer altup_inp
    altup_predict_router  altup_predict_coef  altup_predicted  inp: the first one  laurel_l  laurel_r  laurel
    altup_correct_router  altup_correct_coef  altup_off  altup_corrected  inp_gate  inp_gated  proj  post_norm
    streams]
    output_inp  output_norm  [logits_raw  logits_scaled]  logits    only the rows whose logits are wanted
    or, of an encoder, [output_norm]  result                        and of these the rows that are wanted
    [norms of sums: blk.N.ffn_inp_sum and out_sum before them]
    [streams that parts of a layer read, write and mix: streams, and of each part (attn or ffn, P)
    hc_P_unit  hc_P_m  hc_P_weights  hc_P_read  hc_P_write  hc_P_inp  hc_P_both  hc_P_streams; output_hc_unit
    output_hc_m  output_hc_weights  hc_output_inp]
    [one head of keys that are values, and blocks: attn_q_a  attn_q_a_norm  attn_q  attn_q_norm  attn_kv
    attn_kv_a_norm  attn_compressor_kv  attn_compressor_gate  attn_blocks  attn_compressor_norm, each _rope
    attn_back  attn_output_a_N]
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hotset.errors import UnsupportedModelError
from hotset.formats.channels import can_be_input_major, copy_name, copy_shape
from hotset.formats.planes import PLANE_GROUP
from hotset.formats.quants import DECODABLE, REFUSED_TYPES, GGMLType
from hotset.model.architectures import ARCHITECTURES, HeadNorm
from hotset.model.config import (
    AltUp,
    Compressed,
    GatedStreams,
    Hyper,
    Latent,
    LayerConfig,
    ModelConfig,
    Ngrams,
)
from hotset.model.experts import Experts
from hotset.model.graph import Graph
from hotset.model.mixers import ChannelMixer, ConvMixer, DeltaMixer, RwkvMixer, StateSpaceMixer
from hotset.model.operations import (
    SHIFT,
    Activate,
    ActivationKind,
    Add,
    AddStreams,
    All,
    Attention,
    ChannelScan,
    DeltaNet,
    Embed,
    ExpertLinear,
    ExpertSum,
    Ffn,
    GaussianTopK,
    HeadDot,
    Heads,
    HyperConnection,
    LayerNorm,
    Linear,
    Mask,
    MaskedRoute,
    MatchMagnitude,
    Multiply,
    NgramEmbed,
    Part,
    PoolBlocks,
    RMSNorm,
    Rope,
    Rotate,
    Route,
    Scale,
    Select,
    SelectiveScan,
    SelectOutputs,
    ShortConv,
    SimilarityGate,
    SoftCap,
    Threshold,
    TransposedHeads,
    TransposedLinear,
    UnitNorm,
    Value,
    Wkv,
)
from hotset.model.predictor import Predictor
from hotset.model.thresholds import LayerThresholds, ThresholdName

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo

# Tensors that a file may have without being read: facts that some converters leave in it as tensors (the
# configuration has read them from the keys), predictors that are not in use (of the logits too), indexers
# that choose among more keys than there are, and, where one form of the down projection is read, the others.
# What lies behind the last norm of an embedding model or a reranker, engine/pooling.py reads.
REDUNDANT_TENSORS = re.compile(
    r"(dense_2|dense_3|cls|cls\.output)\.(weight|bias)|cls\.norm\.weight|"
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|lm_head_profiler\.weight|blk\.\d+\.("
    r"rope_freqs\.weight|layer_output_scale\.weight|indexer\..*|indexer_compressor_.*|exp_probs_b_vl\.bias|(attn_rot_embd|attn\.rotary_emb)\..*|(fc1|fc2|fc1_exps|fc2_exps|svd_a|svd_b)\.weight|always\.bias|"
    r"(ffn_down|channel_mix_value)\.weight|(ffn_down|channel_mix_value)_t\.(codes|scales))"
)


TOKEN_TYPES = "token_types"

# Types of what hotset builds itself: codes of planes, and the scales of planes.
_BYTES, _SCALES = frozenset({GGMLType.I8}), frozenset({GGMLType.F16})
_WHOLE = frozenset({GGMLType.I32})


def describe(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    predictor: Predictor | None = None,
    layer_thresholds: Sequence[LayerThresholds] = (),
) -> Graph:
    """The step of `config` over the weights in `tensors` (name → TensorInfo, shapes innermost first).

    With a predictor, each layer computes only the neurons that it selects; one whose mask is part of the
    model is there in any case. layer_thresholds: of each layer, or none; what is 0 leaves the graph as it is.
    Raises UnsupportedModelError where a tensor is missing, has another shape than the configuration says, is
    of a type that nothing computes with, or is not one that the architecture uses.
    """
    if config.masked and predictor is None:
        predictor = Predictor("mlp", (config.sparse_threshold,) * config.n_layer)
    weights = _Weights(config, tensors)
    graph = _describe(config, weights, predictor, layer_thresholds or [LayerThresholds()] * config.n_layer)
    weights.refuse_unused()
    return graph


NEXTN_INPUT = "output_norm"
"""The value of a model whose rows a layer for multi-token prediction reads, and the value of such a layer
whose rows it reads in their place where it goes on with its own predictions."""


def describe_nextn(config: ModelConfig, tensors: Mapping[str, TensorInfo], index: int = 0) -> Graph:
    """The step of a layer for multi-token prediction (MTP, `nextn` in GGUF), the index-th of the file.

    The graph is a part of a model: a backend's `run` takes rows x [n_tokens, n_embd] beside the batch. Row t
    is NEXTN_INPUT at the position before that of token t, and the logits are of the token behind this one. So
    no token is at position 0, and none sees it. The layer has keys and values of its own, and nothing of the
    model's but the embedding and the output, where it has none itself. Raises UnsupportedModelError where the
    file has no such layer, or one of an architecture whose layers are not known, and as `describe` does.
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
    if not layer.n_ff:  # the model's FFNs are layers of their own
        ffn = next(layer for layer in reversed(config.layers) if layer.n_ff)
        layer = replace(layer, n_ff=ffn.n_ff, experts=ffn.experts, ffn_norm="post_attention_norm")
    weights, own = _Weights(config, tensors), f"blk.{i}.nextn"
    model = _Description(config, weights, [LayerThresholds()] * (i + 1))
    model.first_seen = 1
    hidden = model.value("hidden", d)
    model.enter(i, "other")
    x = model.embedding(f"{own}.embed_tokens" if f"{own}.embed_tokens.weight" in tensors else "token_embd")
    x, hidden = model.norm(x, f"{own}.enorm"), model.norm(hidden, f"{own}.hnorm")
    both = model.add(Heads(model.value(f"{own}.both", 2 * d), x, 1, 0, hidden, **model.where))
    x = model.linear(both, f"{own}.eh_proj", d)
    x = model.ffn(i, layer, x, model.attention(i, layer, x), None)
    model.config = replace(config, norm=norm, norm_bias=False)
    head = f"{own}.shared_head_head"
    model.output(x, None, f"{own}.shared_head_norm", head if f"{head}.weight" in tensors else None)
    if unread := sorted(n for n in tensors if n.startswith(f"blk.{i}.") and weights.is_unread(n)):
        raise UnsupportedModelError(
            f"a layer for multi-token prediction has {len(unread)} tensors that are not known, such as "
            f"{unread[0]}"
        )
    return model.graph


def _describe(
    config: ModelConfig,
    weights: _Weights,
    predictor: Predictor | None,
    layer_thresholds: Sequence[LayerThresholds],
) -> Graph:
    model = _Description(config, weights, layer_thresholds)
    x = model.embedding()
    if config.hyper is not None:
        hyper = _HyperStreams(model, config.hyper, x)
        for i, layer in enumerate(config.layers):
            hyper.add(model.attention(i, layer, hyper.read(i, "attention")))
            x = hyper.read(i, "ffn")
            hyper.add(model.ffn(i, layer, x, x, predictor))
        model.output(x, hyper)
        return model.graph
    streams = None if config.altup is None else _Streams(model, config.altup, x)
    embedded = model.layer_embeddings(x, config.n_embd_layer) if config.n_embd_layer else None
    if config.gated_streams is not None:
        x = model.copied(x, config.gated_streams.n)
    for i, layer in enumerate(config.layers):
        if config.ngrams is not None and config.ngrams.layer == i:
            x = model.with_ngrams(i, x, config.ngrams)
        given = x if streams is None else streams.predicted(i)
        x = model.attention(i, layer, given) if layer.mixes else given
        if layer.n_ff:
            x = model.ffn(i, layer, given, x, predictor)
        if embedded is not None:
            x = model.with_embedding(i, x, embedded)
        x = model.scaled(x, layer.result_scale, f"blk.{i}.out_scaled")
        if streams is not None:
            streams.correct(i, x)
    model.output(x, streams)
    return model.graph


def differences(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> tuple[set[str], set[str]]:
    """Names of tensors that a model of `config` lacks in `tensors`, or has in another shape, and of those
    that it would not read."""
    weights = _Weights(config, tensors, missing=set())
    _describe(config, weights, None, [LayerThresholds()] * config.n_layer)
    assert weights.missing is not None
    return weights.missing, set(weights.unused())


class _Description:
    """The graph as it grows, in order.

    A method adds one part of the model and returns the stream behind it.
    """

    def __init__(
        self, config: ModelConfig, weights: _Weights, layer_thresholds: Sequence[LayerThresholds]
    ) -> None:
        self.config, self.weights, self.layer_thresholds = config, weights, layer_thresholds
        self.graph = Graph()
        self.where: dict[str, Any] = {}  # layer and part of what is added next
        self.first_seen = 0  # position, by attention
        self.first_values: Value | None = None  # of the first layer, which others of RWKV 7 refer to
        self._stored: dict[int, tuple[Value, Value]] = {}  # layer → its keys and values
        self._shares: Value | None = None  # of gated streams: each one's weight in the next sum

    # ---- the parts of a model

    def embedding(self, tensor: str = "token_embd") -> Value:
        config, d = self.config, self.config.n_embd
        matrix = self.weights.matrix(tensor, d, config.n_vocab)
        x = self.scaled(
            self.add(Embed(self.value("embedding", d), matrix)), config.embedding_scale, "embedding_scaled"
        )
        if f"{TOKEN_TYPES}.weight" in self.weights.tensors:
            types = self.add(Embed(self.value(TOKEN_TYPES, d), self.weights.table(TOKEN_TYPES, d), "type"))
            x = self.add(Add(self.value("embd_typed", d), x, types))
        if (first := config.first_position) is not None:
            weight = self.weights.matrix("position_embd", d, config.n_ctx_train + first)
            positions = self.add(Embed(self.value("position_embd", d), weight, "position", first))
            x = self.add(Add(self.value("inp", d), x, positions))
        if config.unit_embedding:
            return self.add(UnitNorm(self.value("token_embd_norm", d), x, config.norm_eps, 1))
        return self.norm(x, "token_embd_norm") if config.embedding_norm else x

    def attention(self, i: int, layer: LayerConfig, x: Value) -> Value:
        """Attention of layer i, or what stands in its place, and the sum with what entered it."""
        config, blk = self.config, f"blk.{i}"
        self.enter(i, "attention")
        # A parallel FFN has no norm of its own: what it reads is called attn_norm, and attention reads
        # attn_norm_2, or the same again.
        has_second = layer.parallel and f"{blk}.attn_norm_2.weight" in self.weights.tensors
        h = x
        if config.gated_streams is not None:
            h = self.mixed_streams(x, config.gated_streams, f"{blk}.hc_attn")
        elif layer.pre_norm and not layer.bare:
            h = self.norm(x, f"{blk}.attn_norm_2" if has_second else f"{blk}.attn_norm", f"{blk}.attn_norm")
        h = self._thresholded(h, i, "attn_in")
        out = self._mixed(i, layer, h)
        if layer.post_norm:
            out = self.norm(out, f"{blk}.post_attention_norm", eps=config.post_norm_eps)
        out = self.scaled(out, config.residual_scale, f"{blk}.attn_scaled")
        if config.altup is None:
            return self._summed(
                layer, x, out, f"{blk}.ffn_inp" if layer.n_ff else f"{blk}.out", f"{blk}.attn_output_norm"
            )
        x = self.add(Add(self.value(f"{blk}.attn_sum", config.n_embd), x, out, **self.where))
        x = self.add(
            Add(self.value(f"{blk}.laurel_sum", config.n_embd), x, self._laurel(blk, h), **self.where)
        )
        return self.scaled(x, math.sqrt(0.5), f"{blk}.ffn_inp")

    def _summed(self, layer: LayerConfig, x: Value, out: Value, name: str, norm: str) -> Value:
        """The stream x and what a part of the layer yields; norm: of the sum, where it passes one. With
        several streams that are mixed behind it (Hyper) what it yields alone."""
        if self.config.hyper is not None:
            return out
        if self.config.gated_streams is not None:
            n = self.config.gated_streams.n
            return self.add(AddStreams(self.value(name, x.width), x, out, self._shares, n, **self.where))
        sum_ = self.value(f"{name}_sum" if layer.sum_norms else name, x.width)
        sum_ = self.add(Add(sum_, x, out, **self.where))
        return self.norm(sum_, norm, name) if layer.sum_norms else sum_

    def _laurel(self, blk: str, h: Value) -> Value:
        """The branch beside attention: h and a product of low rank (arXiv 2411.07501)."""
        d = self.config.n_embd
        low = self.linear(h, f"{blk}.laurel_l", self.weights.n_rows(f"{blk}.laurel_l"))
        normed = self.norm(self.linear(low, f"{blk}.laurel_r", d), f"{blk}.laurel_post_norm")
        return self.add(Add(self.value(f"{blk}.laurel", d), h, normed, **self.where))

    def _mixed(self, i: int, layer: LayerConfig, h: Value) -> Value:
        """What attention, or whatever stands in its place, makes of the tokens so far."""
        if layer.mixer is None:
            return self._heads_attend(i, layer, h)
        if isinstance(layer.mixer, ConvMixer):
            return self._convolved(f"blk.{i}", layer.mixer, h)
        if isinstance(layer.mixer, StateSpaceMixer):
            out = self._state_space(f"blk.{i}", layer.mixer, h)
            if not layer.mixer.beside:
                return out
            sum_ = self.value(f"blk.{i}.mixed", self.config.n_embd)
            return self.add(Add(sum_, self._heads_attend(i, layer, h), out, **self.where))
        if isinstance(layer.mixer, ChannelMixer):
            return self._channel_space(f"blk.{i}", layer.mixer, h)
        if isinstance(layer.mixer, RwkvMixer):
            return _TimeMix(self, f"blk.{i}", layer.mixer, h).out()
        if layer.mixer.by_channel:
            return self._channel_deltas(f"blk.{i}", layer.mixer, h)
        return self._delta_net(f"blk.{i}", layer.mixer, h)

    def _heads_attend(self, i: int, layer: LayerConfig, h: Value) -> Value:
        config, blk, gate = self.config, f"blk.{i}", None
        if config.compressed is not None:
            return self._compressed_heads(f"blk.{i}", layer, config.compressed, h)
        n_head_kv, dim, dim_v = self._head_sizes(layer)
        if config.latent is not None:
            q, k, v = self._latent_heads(h, blk, layer, config.latent)
        else:
            has_own = f"{blk}.attn_gate.weight" in self.weights.tensors
            q, k, v = self._heads(h, blk, layer, gated=layer.attention_gate and not has_own)
            if layer.attention_gate:
                if has_own:
                    gate = self.linear(h, f"{blk}.attn_gate", config.n_head * config.head_dim_v)
                else:
                    q, gate = self._gated_query(q, blk)
                out = self.value(f"{blk}.attn_gate_act", gate.width)
                gate = self.add(Activate(out, gate, "sigmoid", **self.where))
            q = self._rotated(q, config.n_head, layer)
            if layer.source is None:
                k = self._rotated(k, n_head_kv, layer)
                if layer.value_norm:
                    out = self.value(f"{blk}.attn_v_norm", v.width)
                    v = self.add(UnitNorm(out, v, config.norm_eps, n_head_kv, **self.where))
                self._stored[i] = k, v
        attn = self.value(f"{blk}.attn", config.n_head * dim_v)
        self.add(
            Attention(
                attn, q, k, v, config.n_head, n_head_kv, dim, dim_v,
                layer.attention_scale, layer.window, layer.attention_softcap,
                self.weights.vector(f"{blk}.attn_sinks", config.n_head) if layer.sinks else None,
                layer.source, config.slopes, config.causal, self.first_seen, **self.where,
            )
        )  # fmt: skip
        if gate is not None:
            gated = self.value(f"{blk}.attn_gated", attn.width)
            attn = self.add(Multiply(gated, attn, gate, **self.where))
        if layer.sub_norms:
            attn = self.norm(attn, f"{blk}.attn_sub_norm")
        attn = self._thresholded(attn, i, "attn_out")
        return self.linear(attn, f"{blk}.attn_output", config.n_embd, f"{blk}.attn_out")

    def _compressed_heads(self, blk: str, layer: LayerConfig, sizes: Compressed, h: Value) -> Value:
        """Attention with one head of keys that are their own values, and those of compressed blocks; what the
        heads yield is rotated back, and becomes the output group by group."""
        config, n, dim, rope = self.config, self.config.n_head, self.config.head_dim, layer.rope
        assert rope is not None
        given = self.norm(self.linear(h, f"{blk}.attn_q_a", sizes.rank_q), f"{blk}.attn_q_a_norm")
        q = self.linear(given, f"{blk}.attn_q_b", n * dim, f"{blk}.attn_q")
        out = self.value(f"{blk}.attn_q_norm", q.width)
        q = self._turned(self.add(UnitNorm(out, q, config.norm_eps, n, **self.where)), n, rope)
        k = self.norm(self.linear(h, f"{blk}.attn_kv", dim), f"{blk}.attn_kv_a_norm")
        k = self._turned(k, 1, rope)
        blocks = self._blocks(blk, layer.block_size, rope, h) if layer.block_size else None
        attn = self.add(
            Attention(
                self.value(f"{blk}.attn", n * dim), q, k, k, n, 1, dim, dim, layer.attention_scale,
                layer.window, sinks=self.weights.vector(f"{blk}.attn_sinks", n), blocks=blocks,
                block_size=layer.block_size, **self.where,
            )
        )  # fmt: skip
        back = replace(rope, freq=tuple(-freq for freq in rope.freq))
        attn = self._turned(attn, n, back, f"{blk}.attn_back")
        width, rank = n * dim // sizes.n_groups, sizes.rank_out
        weight, joined = self.weights.matrix(f"{blk}.attn_output_a", width, sizes.n_groups * rank), None
        for j in range(sizes.n_groups):
            part = self.value(f"{blk}.attn_back_{j}", width)
            part = self.add(Heads(part, attn, 1, j * width, **self.where))
            low = self.value(f"{blk}.attn_output_a_{j}", rank)
            low = self.add(Linear(low, part, weight, first_row=j * rank, **self.where))
            if joined is not None:
                out = self.value(f"{blk}.attn_output_a_to_{j}", joined.width + rank)
                low = self.add(Heads(out, joined, 1, 0, low, **self.where))
            joined = low
        assert joined is not None
        return self.linear(joined, f"{blk}.attn_output_b", config.n_embd, f"{blk}.attn_out")

    def _blocks(self, blk: str, size: int, rope: Rope, h: Value) -> Value:
        """A key of each block of tokens, at the last of them: a mean that is rotated as its first token."""
        dim, name = self.config.head_dim, f"{blk}.attn_compressor"
        overlaps = self.weights.shape(f"{name}_kv") == (h.width, 2 * dim)
        width = 2 * dim if overlaps else dim
        x, scores = self.linear(h, f"{name}_kv", width), self.linear(h, f"{name}_gate", width)
        bias = self.weights.numbers(f"{name}_ape", size * width)
        pooled = PoolBlocks(self.value(f"{blk}.attn_blocks", dim), x, scores, bias, size, **self.where)
        normed = self.norm(self.add(pooled), f"{name}_norm")
        return self._turned(normed, 1, replace(rope, every=size))

    def _turned(self, x: Value, n_head: int, rope: Rope, name: str | None = None) -> Value:
        """Heads whose last channels are rotated."""
        dim = self.config.head_dim
        out = self.value(name or f"{x.name}_rope", x.width)
        return self.add(Rotate(out, x, n_head, dim, rope, dim - rope.n_rot, **self.where))

    def _convolved(self, blk: str, mixer: ConvMixer, h: Value) -> Value:
        """A short convolution of the product of two projections, times a third."""
        d = self.config.n_embd
        names = f"{blk}.conv_b", f"{blk}.conv_c", f"{blk}.conv_x"
        parts = self._rows_of(f"{blk}.shortconv.in_proj", h, dict.fromkeys(names, d))
        b, c, x = (self.add(op) for op in parts)
        x = self.add(Multiply(self.value(f"{blk}.conv_in", d), b, x, **self.where))
        weight = self.weights.matrix(f"{blk}.shortconv.conv", mixer.kernel, d)
        conv = self.add(ShortConv(self.value(f"{blk}.conv", d), x, weight, mixer.kernel, **self.where))
        gated = self.add(Multiply(self.value(f"{blk}.conv_gated", d), c, conv, **self.where))
        return self.linear(gated, f"{blk}.shortconv.out_proj", d, f"{blk}.conv_out")

    def _delta_net(self, blk: str, mixer: DeltaMixer, h: Value) -> Value:
        """The gated delta rule on convolved queries, keys and values, normed head by head and gated."""
        n, of_values, width = mixer.n_head, mixer.of_values, 2 * mixer.of_keys + mixer.of_values
        qkv = self.linear(h, f"{blk}.attn_qkv", width, f"{blk}.delta_qkv")
        gate = self.linear(h, f"{blk}.attn_gate", of_values, f"{blk}.delta_gate")
        if f"{blk}.ssm_ba.weight" in self.weights.tensors:  # of each key's heads beta, and then alpha
            both = self.linear(h, f"{blk}.ssm_ba", 2 * n, f"{blk}.delta_ba")
            beta, alpha = (
                self.add(Heads(self.value(f"{blk}.{name}", n), both, mixer.n_head_k, first, **self.where))
                for name, first in (("delta_beta", 0), ("delta_alpha", n // mixer.n_head_k))
            )
        else:
            beta = self.linear(h, f"{blk}.ssm_beta", n, f"{blk}.delta_beta")
            alpha = self.linear(h, f"{blk}.ssm_alpha", n, f"{blk}.delta_alpha")
        weight = self.weights.matrix(f"{blk}.ssm_conv1d", mixer.kernel, width)
        conv = self.add(ShortConv(self.value(f"{blk}.conv", width), qkv, weight, mixer.kernel, **self.where))
        act = self.activated(conv, "silu")
        step = self.weights.bias(f"{blk}.ssm_dt", n, required=True)
        assert step is not None
        rate = self.weights.bare(f"{blk}.ssm_a", n)
        delta = self.add(
            DeltaNet(
                self.value(f"{blk}.delta", of_values), act, alpha, beta, rate, step, n, mixer.n_head_k,
                mixer.dim_k, mixer.dim_v, mixer.tiled, **self.where,
            )
        )  # fmt: skip
        return self._read_state(blk, mixer, delta, gate, "ssm_out")

    def _channel_deltas(self, blk: str, mixer: DeltaMixer, h: Value) -> Value:
        """As _delta_net, where keys decay channel by channel (Kimi Delta Attention, arXiv 2510.26692)."""
        n, width, joined = mixer.n_head, mixer.of_values, None
        for part in "qkv":
            x = self.linear(h, f"{blk}.attn_{part}", width)
            weight = self.weights.numbers(f"{blk}.ssm_conv1d_{part}", mixer.kernel * width)
            out = self.value(f"{blk}.conv_{part}", width)
            x = self.activated(self.add(ShortConv(out, x, weight, mixer.kernel, **self.where)), "silu")
            if joined is not None:
                out = self.value(f"{blk}.conv_{part}_act_joined", joined.width + width)
                x = self.add(Heads(out, joined, 1, 0, x, **self.where))
            joined = x
        assert joined is not None
        alpha, gate = (
            self.linear(self.linear(h, f"{blk}.ssm_{name}_a", mixer.dim_k), f"{blk}.ssm_{name}_b", width)
            for name in "fg"
        )
        beta = self.linear(h, f"{blk}.ssm_beta", n, f"{blk}.delta_beta")
        step = self.weights.bias(f"{blk}.ssm_dt", width, required=True)
        assert step is not None
        rate = self.weights.bare(f"{blk}.ssm_a", n)
        delta = self.add(
            DeltaNet(
                self.value(f"{blk}.delta", width), joined, alpha, beta, rate, step, n, n, mixer.dim_k,
                mixer.dim_v, tiled=False, **self.where,
            )
        )  # fmt: skip
        return self._read_state(blk, mixer, delta, gate, "attn_output")

    def _read_state(self, blk: str, mixer: DeltaMixer, delta: Value, gate: Value, tensor: str) -> Value:
        """What heads yield, normed head by head, times gates, through the matrix `tensor`."""
        norm = self.weights.vector(f"{blk}.ssm_norm", mixer.dim_v)
        out, eps = self.value(f"{blk}.delta_norm", delta.width), self.config.norm_eps
        normed = self.add(RMSNorm(out, delta, norm, eps, mixer.n_head, **self.where))
        gate = self.activated(gate, mixer.gate)
        gated = self.add(Multiply(self.value(f"{blk}.delta_gated", delta.width), normed, gate, **self.where))
        return self.linear(gated, f"{blk}.{tensor}", self.config.n_embd, f"{blk}.delta_out")

    def _state_space(self, blk: str, mixer: StateSpaceMixer, h: Value) -> Value:
        """The state space of Mamba-2 on convolved values, B and C, gated and then normed group by group."""
        n, of_values, width = mixer.n_head, mixer.of_values, mixer.width
        widths = {f"{blk}.ssm_z": of_values, f"{blk}.ssm_xbc": width, f"{blk}.ssm_dt": n}
        z, xbc, dt = (self.add(op) for op in self._rows_of(f"{blk}.ssm_in", h, widths))
        weight = self.weights.matrix(f"{blk}.ssm_conv1d", mixer.kernel, width)
        bias, out = self.weights.bias(f"{blk}.ssm_conv1d", width), self.value(f"{blk}.conv", width)
        conv = self.add(ShortConv(out, xbc, weight, mixer.kernel, bias, **self.where))
        act = self.add(Activate(self.value(f"{blk}.conv_act", width), conv, "silu", **self.where))
        step = self.weights.bias(f"{blk}.ssm_dt", n, required=True)
        assert step is not None
        rate, skip = (self.weights.bare(f"{blk}.{name}", n) for name in ("ssm_a", "ssm_d"))
        scan = SelectiveScan(
            self.value(f"{blk}.ssm", of_values), act, dt, rate, step, skip, n, mixer.n_group, mixer.dim_k,
            mixer.dim_v, **self.where,
        )  # fmt: skip
        y = self.add(scan)
        gate = self.add(Activate(self.value(f"{blk}.ssm_z_act", of_values), z, "silu", **self.where))
        y = self.add(Multiply(self.value(f"{blk}.ssm_gated", of_values), y, gate, **self.where))
        if mixer.normed:
            norm = self.weights.matrix(f"{blk}.ssm_norm", of_values // mixer.n_group, mixer.n_group)
            out, eps = self.value(f"{blk}.ssm_unit", of_values), self.config.norm_eps
            y = self.add(UnitNorm(out, y, eps, mixer.n_group, **self.where))
            y = self.add(Scale(self.value(f"{blk}.ssm_norm", of_values), y, 1.0, norm, **self.where))
        return self.linear(y, f"{blk}.ssm_out", self.config.n_embd)

    def _channel_space(self, blk: str, mixer: ChannelMixer, h: Value) -> Value:
        """The state space of Mamba on convolved values, of which dt, B and C are made too; gated."""
        n = mixer.inner
        both = dict.fromkeys((f"{blk}.ssm_x_in", f"{blk}.ssm_z"), n)
        x, z = (self.add(op) for op in self._rows_of(f"{blk}.ssm_in", h, both))
        weight = self.weights.matrix(f"{blk}.ssm_conv1d", mixer.kernel, n)
        bias, out = self.weights.bias(f"{blk}.ssm_conv1d", n), self.value(f"{blk}.conv", n)
        x = self.activated(self.add(ShortConv(out, x, weight, mixer.kernel, bias, **self.where)), "silu")
        widths = {f"{blk}.ssm_dt_in": mixer.rank, f"{blk}.ssm_b": mixer.dim_k, f"{blk}.ssm_c": mixer.dim_k}
        parts = [self.add(op) for op in self._rows_of(f"{blk}.ssm_x", x, widths)]
        if mixer.norms is not None:
            names = f"{blk}.ssm_dt_norm", f"{blk}.ssm_b_norm", f"{blk}.ssm_c_norm"
            parts = [self._small_norm(part, name, mixer) for part, name in zip(parts, names, strict=True)]
        dt, b, c = parts
        dt = self.activated(self.linear(dt, f"{blk}.ssm_dt", n, f"{blk}.ssm_dt_out"), "softplus")
        rate, skip = self.weights.plain(f"{blk}.ssm_a", mixer.dim_k, n), self.weights.bare(f"{blk}.ssm_d", n)
        y = self.add(ChannelScan(self.value(f"{blk}.ssm", n), x, dt, b, c, rate, skip, **self.where))
        gate = self.activated(z, "silu")
        y = self.add(Multiply(self.value(f"{blk}.ssm_gated", n), y, gate, **self.where))
        return self.linear(y, f"{blk}.ssm_out", self.config.n_embd)

    def _small_norm(self, x: Value, name: str, mixer: ChannelMixer) -> Value:
        if mixer.norms == "weights":
            return self.norm(x, name)
        return self.add(UnitNorm(self.value(name, x.width), x, self.config.norm_eps, 1, **self.where))

    def ffn(self, i: int, layer: LayerConfig, given: Value, x: Value, predictor: Predictor | None) -> Value:
        """The FFN of layer i and the sum with the stream x; `given` is what entered the layer."""
        config, blk = self.config, f"blk.{i}"
        if layer.experts is not None:
            if predictor is not None and not config.masked:
                raise UnsupportedModelError("predictors of neurons inside experts are not supported")
            if self.layer_thresholds[i].ffn_in or self.layer_thresholds[i].down_in:
                raise UnsupportedModelError(
                    "experts have thresholds of activated gates, not of the inputs of matrices; make "
                    "the thresholds anew with hotset calibrate"
                )
            return self._mixture(i, layer, layer.experts, given, x, predictor)
        n_always = 0 if predictor is None or not predictor.first else predictor.first[i]  # have no score
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
        norm = self._norm_op(entering, tensor, f"{blk}.ffn_norm") if layer.pre_norm else None
        h = entering if norm is None else norm.out
        share: Value | None = None
        if isinstance(layer.mixer, RwkvMixer) and norm is not None:
            entering, share = self._channel_mix(blk, layer.mixer, self.add(norm))
            h, norm = entering, None
        if kind == "svd":  # it reads what the FFN reads: the norm stands apart
            if norm is not None:
                entering, norm = self.add(norm), None
            self.enter(i, "predictor")
            scores = self._low_rank_scores(blk, h, "svd_a", "svd_b", None, n_scores)
            self.enter(i, "ffn")
        threshold = 0.0 if predictor is None else predictor.thresholds[i]
        out = self.add(self._ffn_op(i, layer, entering, norm, scores, threshold, n_always))
        if share is not None:
            out = self.add(Multiply(self.value(f"{blk}.ffn_shared", out.width), out, share, **self.where))
        return self._after_ffn(blk, layer, x, out)

    def _channel_mix(self, blk: str, mixer: RwkvMixer, h: Value) -> tuple[Value, Value | None]:
        """What the FFN of RWKV reads, the token's norm and what the one before it has more; in RWKV 6 also
        what its result is multiplied by."""
        more = self.shifted(h, f"{blk}.channel_mix_shift")
        x = self.lerped(h, more, f"{blk}.channel_mix_lerp_k", f"{blk}.channel_mix_k")
        if mixer.version == 7:
            return x, None
        r = self.lerped(h, more, f"{blk}.channel_mix_lerp_r", f"{blk}.channel_mix_r")
        r = self.linear(r, f"{blk}.channel_mix_receptance", h.width)
        return x, self.activated(r, "sigmoid")

    def shifted(self, h: Value, name: str) -> Value:
        """What the token before has more than the token itself."""
        return self.add(ShortConv(self.value(name, h.width), h, None, len(SHIFT), **self.where))

    def lerped(self, h: Value, more: Value, tensor: str, name: str, j: int = 0, n: int = 1) -> Value:
        """h and a share of `more`, each channel's own: the j-th of n rows of a tensor."""
        weight, d = self.weights.numbers(tensor, n * h.width), h.width
        share = self.value(f"{name}_share", d)
        share = self.add(Scale(share, more, 1.0, weight, j * d, **self.where))
        return self.add(Add(self.value(name, d), h, share, **self.where))

    def activated(self, x: Value, kind: ActivationKind) -> Value:
        return self.add(Activate(self.value(f"{x.name}_act", x.width), x, kind, **self.where))

    def _after_ffn(self, blk: str, layer: LayerConfig, x: Value, out: Value) -> Value:
        """The stream x and what the FFN yields, as it is added."""
        config = self.config
        if layer.post_norm:
            out = self.norm(out, f"{blk}.post_ffw_norm", eps=config.post_norm_eps)
        out = self.scaled(out, config.residual_scale, f"{blk}.ffn_scaled")
        return self._summed(layer, x, out, f"{blk}.out", f"{blk}.layer_output_norm")

    def layer_embeddings(self, x: Value, n_embd_layer: int) -> Value:
        """The embeddings of all layers side by side: of the token's own, and of the embedding x."""
        width = n_embd_layer * self.config.n_layer
        rows = self.weights.matrix("per_layer_token_embd", width, self.config.n_vocab)
        own = self.add(Embed(self.value("per_layer_token_embd", width), rows))
        own = self.scaled(own, math.sqrt(n_embd_layer), "per_layer_token_embd_scaled")
        made = self.scaled(self.linear(x, "per_layer_model_proj", width), x.width**-0.5, "per_layer_scaled")
        norm, out = (
            self.weights.vector("per_layer_proj_norm", n_embd_layer),
            self.value("per_layer_norm", width),
        )
        made = self.add(RMSNorm(out, made, norm, self.config.norm_eps, self.config.n_layer))
        both = self.add(Add(self.value("per_layer_sum", width), made, own))
        return self.scaled(both, math.sqrt(0.5), "per_layer_inp")

    def gated_embedding(self, i: int, x: Value, embedded: Value) -> Value:
        """What layer i adds of its embedding of the token, gated by the stream x. embedded: of all layers."""
        blk, width = f"blk.{i}", embedded.width // self.config.n_layer
        gate = self.linear(x, f"{blk}.inp_gate", width)
        act, kind = self.value(f"{blk}.inp_gate_act", width), self.config.layers[i].activation.gate
        gate = self.add(Activate(act, gate, kind, **self.where))
        out = self.value(f"{blk}.inp_gated", width)
        part = self.value(f"{blk}.inp_embd", width)
        part = self.add(Heads(part, embedded, 1, i * width, **self.where))
        gated = self.add(Multiply(out, gate, part, **self.where))
        return self.norm(self.linear(gated, f"{blk}.proj", x.width), f"{blk}.post_norm")

    def with_embedding(self, i: int, x: Value, embedded: Value) -> Value:
        """The stream x behind layer i with the layer's embedding of the token."""
        self.enter(i, "other")
        more = self.gated_embedding(i, x, embedded)
        return self.add(Add(self.value(f"blk.{i}.out_embd", x.width), x, more, **self.where))

    def copied(self, x: Value, n: int) -> Value:
        """n streams that are the same."""
        streams = x
        for i in range(2, n + 1):
            out = self.value("streams" if i == n else f"streams_{i}", i * x.width)
            streams = self.add(Heads(out, streams, 1, 0, x))
        return streams

    def mixed_streams(self, x: Value, streams: GatedStreams, name: str, *, last: bool = False) -> Value:
        """The mean of the normed streams x, each channel times a gate, and the weights by which the next sum
        adds to each stream; last: nothing is added. name: of the tensors, and of what they yield."""
        n, d = streams.n, self.config.n_embd
        h = self._normed_streams(x, f"{name}_norm", n)
        low = self.linear(h, f"{name}_down", streams.rank)
        low = self.activated(self.scaled(low, 1 / n, f"{name}_low"), "silu")
        gates = self.activated(self.linear(low, f"{name}_up", x.width), "sigmoid")
        gated = self.add(Multiply(self.value(f"{name}_gated", x.width), gates, h, **self.where))
        first = self.add(Heads(self.value(f"{name}_first", d), gated, 1, 0, **self.where))
        others = self.add(Heads(self.value(f"{name}_others", (n - 1) * d), gated, 1, d, **self.where))
        total = self.value(f"{name}_total", d)
        total = self.add(AddStreams(total, first, others, None, 1, 1.0, **self.where))
        mean = self.scaled(total, 1 / n, "output_norm" if last else name)
        if not last:
            shares = self.scaled(self.linear(h, f"{name}_inject", n), 1 / n, f"{name}_inject_scaled")
            self._shares = self.scaled(self.activated(shares, "sigmoid"), 2.0, f"{name}_shares")
        return mean

    def _normed_streams(self, x: Value, name: str, n: int, tensor: str | None = None) -> Value:
        """Each stream through a norm of its own."""
        weight = self.weights.numbers(tensor or name, x.width)
        out, eps = self.value(f"{name}_unit", x.width), self.config.norm_eps
        unit = self.add(UnitNorm(out, x, eps, n, **self.where))
        return self.add(Scale(self.value(name, x.width), unit, 1.0, weight, **self.where))

    def with_ngrams(self, i: int, x: Value, ngrams: Ngrams) -> Value:
        """The streams x with the embeddings of the token's n-grams, gated by each stream, and a convolution
        of those."""
        blk, d = f"blk.{i}", self.config.n_embd
        self.enter(i, "other")
        n, dilation = x.width // d, len(ngrams.multipliers)
        n_rows = max(map(sum, zip(ngrams.sizes, ngrams.offsets, strict=True)))
        table = self.weights.rows("per_layer_token_embd", ngrams.width, n_rows)
        out = self.value(f"{blk}.ple_embd", ngrams.width * len(ngrams.sizes))
        numbers = ngrams.multipliers, ngrams.sizes, ngrams.offsets
        embedded = self.add(NgramEmbed(out, table, *numbers, ngrams.eos, **self.where))
        key, value = (
            self.linear(embedded, f"{blk}.{name}", width)
            for name, width in (("ple_key", x.width), ("ple_value", d))
        )
        key = self._normed_streams(key, f"{blk}.ple_key_normed", n, f"{blk}.ple_norm_key")
        query = self._normed_streams(x, f"{blk}.ple_query", n, f"{blk}.ple_norm_query")
        gated = self.value(f"{blk}.ple_gated", x.width)
        self.add(SimilarityGate(gated, value, key, query, n, **self.where))
        conv = self._normed_streams(gated, f"{blk}.ple_conv_in", n, f"{blk}.ple_norm_conv")
        weight, out = (
            self.weights.matrix(f"{blk}.ple_conv1d", ngrams.kernel, x.width),
            self.value(f"{blk}.ple_conv", x.width),
        )
        conv = self.add(ShortConv(out, conv, weight, ngrams.kernel, dilation=dilation, **self.where))
        conv = self.activated(conv, "silu")
        more = self.add(Add(self.value(f"{blk}.ple_more", x.width), gated, conv, **self.where))
        return self.add(Add(self.value(f"{blk}.ple_streams", x.width), x, more, **self.where))

    def output(
        self,
        x: Value,
        streams: _Streams | _HyperStreams | None,
        norm: str | None = None,
        matrix: str | None = None,
    ) -> None:
        """The rows whose logits are wanted, the last norm, and the logits; of an encoder the last norm and
        the rows that are wanted. norm, matrix: tensors in place of the model's."""
        config = self.config
        self.where = {}
        x = x if streams is None else streams.joined()
        if not config.causal:
            x = x if config.output_norm is None else self.norm(x, config.output_norm, "output_norm")
            self.weights.leave("output")
            self.add(SelectOutputs(self.value("result", config.n_embd), x))
            return
        assert config.output_norm is not None
        x = self.add(SelectOutputs(self.value("output_inp", x.width), x))
        if config.gated_streams is not None:
            x = self.mixed_streams(x, config.gated_streams, config.output_norm, last=True)
        else:
            x = self.norm(x, norm or config.output_norm, "output_norm")
        if matrix is None:  # tied: the embedding serves twice
            matrix = "output" if "output.weight" in self.weights.tensors else "token_embd"
        is_raw = config.logit_scale != 1.0 or config.logit_softcap > 0
        x = self.linear(x, matrix, config.n_vocab, "logits_raw" if is_raw else "logits")
        if config.logit_softcap:
            x = self.scaled(x, config.logit_scale, "logits_scaled")
            self.add(SoftCap(self.value("logits", config.n_vocab), x, config.logit_softcap))
        else:
            self.scaled(x, config.logit_scale, "logits")

    # ---- pieces of attention

    def _gated_query(self, both: Value, blk: str) -> tuple[Value, Value]:
        """The queries, and the gates before their sigmoid."""
        n, dim, dim_v = self.config.n_head, self.config.head_dim, self.config.head_dim_v
        q = self.add(Heads(self.value(f"{blk}.attn_q", n * dim), both, n, **self.where))
        gate = self.add(Heads(self.value(f"{blk}.attn_gate", n * dim_v), both, n, dim, **self.where))
        return q, gate

    def _head_sizes(self, layer: LayerConfig) -> tuple[int, int, int]:
        """Heads of k and v of a layer, the channels of one of q and k, and of one of v."""
        if layer.heads is not None:
            return *layer.heads, layer.heads[1]
        return self.config.n_head_kv, self.config.head_dim, self.config.head_dim_v

    def _heads(self, x: Value, blk: str, layer: LayerConfig, *, gated: bool) -> tuple[Value, Value, Value]:
        """q, k and v: from three matrices, or from one whose rows are those of q, then k, then v, or k and v
        as another layer has stored them. gated: of each head the rows of q and then those of its gate are in
        q's. Where layers have heads of their own, keys serve as values if there is no other matrix."""
        config = self.config
        n_head_kv, dim, dim_v = self._head_sizes(layer)
        if layer.source is not None:
            self.weights.leave(f"{blk}.attn_k", f"{blk}.attn_v", f"{blk}.attn_k_norm")  # files have them
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
        q, k, v = (self.add(op) for op in self._rows_of(f"{blk}.attn_qkv", x, widths))
        return q, k, v

    def _rotated(self, x: Value, n_head: int, layer: LayerConfig) -> Value:
        """The heads of q or k at their positions, normed before or after where the architecture does so."""
        name, rope = x.name, layer.rope
        _, head_dim, _ = self._head_sizes(layer)
        if layer.qk_norm and not layer.qk_norm_last:
            x = self._head_norm(x, name, n_head, layer.qk_norm)
        if rope is not None:
            x = self.add(Rotate(self.value(f"{name}_rope", x.width), x, n_head, head_dim, rope, **self.where))
        if layer.qk_norm and layer.qk_norm_last:
            x = self._head_norm(x, name, n_head, layer.qk_norm)
        return x

    def _head_norm(self, x: Value, name: str, n_head: int, kind: HeadNorm) -> Value:
        parts = n_head if kind == "head" else 1
        out = self.value(f"{name}_norm", x.width)
        if self.config.norm == "layer":
            own = self.weights.matrix(f"{name}_norm", x.width // parts, parts)
            return self.add(LayerNorm(out, x, own, None, self.config.norm_eps, parts, **self.where))
        weight = self.weights.vector(f"{name}_norm", x.width // parts)
        return self.add(RMSNorm(out, x, weight, self.config.norm_eps, parts, **self.where))

    def _latent_heads(
        self, x: Value, blk: str, layer: LayerConfig, latent: Latent
    ) -> tuple[Value, Value, Value]:
        """q, k and v with their rotation, if there is one, of latent vectors; the cache holds what they
        become."""
        config, n_head, rope = self.config, self.config.n_head, layer.rope
        n_own = config.head_dim - latent.n_rot  # channels of a head that are not rotated
        eps = latent.norm_eps
        width, width_v = n_head * config.head_dim, n_head * config.head_dim_v
        given = self.linear(x, f"{blk}.attn_q_a", latent.rank_q) if latent.rank_q else x
        parts = {f"{blk}.attn_kv_a": latent.rank, f"{blk}.attn_k_shared": latent.n_rot}
        vector, shared = (self.add(op) for op in self._rows_of(f"{blk}.attn_kv_a_mqa", x, parts))
        if latent.rank_q:
            given = self.norm(given, f"{blk}.attn_q_a_norm", eps=eps)
        q = self.linear(
            given, f"{blk}.attn_q_b" if latent.rank_q else f"{blk}.attn_q", width, f"{blk}.attn_q"
        )
        if rope is not None:
            out = self.value(f"{blk}.attn_q_rope", width)
            q = self.add(Rotate(out, q, n_head, config.head_dim, rope, n_own, **self.where))
            out = self.value(f"{blk}.attn_k_shared_rope", latent.n_rot)
            shared = self.add(Rotate(out, shared, 1, latent.n_rot, rope, **self.where))
        vector = self.norm(vector, f"{blk}.attn_kv_a_norm", eps=eps)

        out_k, out_v = self.value(f"{blk}.attn_k", width), self.value(f"{blk}.attn_v", width_v)
        if f"{blk}.attn_kv_b.weight" in self.weights.tensors:  # of each head its key, then its value
            both = self.linear(vector, f"{blk}.attn_kv_b", n_head * (n_own + config.head_dim_v))
            v = self.add(Heads(out_v, both, n_head, n_own, **self.where))
        else:
            weight = self.weights.heads(f"{blk}.attn_k_b", n_own, latent.rank, n_head)
            both = self.value(f"{blk}.attn_k_own", n_head * n_own)
            self.add(TransposedHeads(both, vector, weight, n_head, **self.where))
            weight = self.weights.heads(f"{blk}.attn_v_b", latent.rank, config.head_dim_v, n_head)
            v = self.add(Linear(out_v, vector, weight, **self.where))
        return q, self.add(Heads(out_k, both, n_head, 0, shared, **self.where)), v

    # ---- experts

    def _mixture(
        self, i: int, layer: LayerConfig, experts: Experts, given: Value, x: Value, mask: Predictor | None
    ) -> Value:
        """An FFN of experts, what all tokens share beside them, and the sum with the stream x; `given` is
        what entered the layer. mask: predictors of the experts, whose mask is part of the model."""
        blk, d = f"blk.{i}", self.config.n_embd
        self.enter(i, "ffn")
        h = self.norm(x, f"{blk}.{layer.ffn_norm}", f"{blk}.ffn_norm") if layer.pre_norm else x
        if self.config.gated_streams is not None:
            h = self.mixed_streams(x, self.config.gated_streams, f"{blk}.hc_ffn")
        shared_input = h
        if experts.beside:
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
                share = self.add(Linear(self.value(f"{blk}.ffn_share", 1), h, weight, **self.where))
                act = Activate(self.value(f"{blk}.ffn_share_act", 1), share, "sigmoid", **self.where)
                factor = self.add(act)
                shared = self.add(Multiply(self.value(f"{blk}.ffn_shared", d), shared, factor, **self.where))
            if experts.beside:
                out = self.norm(out, f"{blk}.post_ffw_norm_2")
                shared = self.norm(shared, f"{blk}.post_ffw_norm_1")
            out = self.add(Add(self.value(f"{blk}.ffn_sum", d), out, shared, **self.where))
        return self._after_ffn(blk, layer, x, out)

    def _routed_input(self, blk: str, x: Value) -> Value:
        """What a router reads of the stream x, where experts stand beside the layer's own FFN."""
        d, name = x.width, f"{blk}.ffn_routed"
        unit = self.add(UnitNorm(self.value(f"{name}_norm", d), x, self.config.norm_eps, 1, **self.where))
        scale = self.weights.bare(f"{blk}.ffn_gate_inp.scale", d)
        return self.add(Scale(self.value(name, d), unit, d**-0.5, scale, **self.where))

    def _expert_ffn(
        self,
        i: int,
        layer: LayerConfig,
        experts: Experts,
        h: Value,
        scores: Value,
        threshold: float | None,
    ) -> Ffn:
        """threshold: of the scores of the experts' predictors; None: they have none."""
        blk = f"blk.{i}"
        bias = self.weights.bias(f"{blk}.exp_probs_b", experts.n)
        if bias is None and f"{blk}.exp_probs_b" in self.weights.tensors:  # as hy_v3's files call it
            bias = self.weights.bare(f"{blk}.exp_probs_b", experts.n)
        route = Route(
            self.value(f"{blk}.ffn_route", 2 * experts.n_used), scores, experts.n_used, experts.scoring,
            bias, experts.normalised, experts.scale, experts.n_groups, experts.n_groups_used,
            experts.group_best,
            self.weights.scales(f"{blk}.ffn_down_exps", experts.n) if experts.beside else None,
            self.weights.experts_of_tokens(f"{blk}.ffn_gate_tid2eid", experts.n_used)
            if experts.hashed
            else None,
            **self.where,
        )  # fmt: skip
        n, d, width = layer.n_ff, h.width, experts.n_used * layer.n_ff
        wanted = None if threshold is None else self._expert_scores(i, experts, h, route, n)

        def product(name: str, tensor: str, n_rows: int, first_row: int = 0) -> ExpertLinear:
            weights, bias = self.weights.experts(f"{blk}.{tensor}", d, n_rows, experts.n)
            out = self.value(f"{blk}.{name}", width)
            return ExpertLinear(out, h, route.out, weights, experts.n, bias, first_row, **self.where)

        gate: ExpertLinear | None = None
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
        select: Select = route
        if wanted is not None and threshold is not None:
            masked = self.value(f"{blk}.ffn_masked", width)
            select = MaskedRoute(route, Mask(masked, neurons, wanted, threshold, **self.where))
            neurons = masked
        neuron_major = self.weights.shape(f"{blk}.ffn_down_exps") == (d, n, experts.n) and n != d
        rows = (d, n) if neuron_major else (n, d)
        weights, bias = self.weights.experts(f"{blk}.ffn_down", *rows, experts.n, n_bias=d)
        out = self.value(f"{blk}.ffn_down", d)
        copy = None if neuron_major else self.weights.input_major(f"{blk}.ffn_down_exps", n)
        down = ExpertSum(out, neurons, route.out, weights, experts.n, bias, neuron_major, copy, **self.where)
        return Ffn(
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

    def _expert_scores(self, i: int, experts: Experts, h: Value, route: Route, n: int) -> Value:
        """The scores of the chosen experts' predictors, side by side; n: neurons of an expert."""
        blk, d = f"blk.{i}", self.config.n_embd
        self.enter(i, "predictor")
        self.add(route)
        rank = self.weights.n_rows(f"{blk}.fc1_exps", -2)
        weights, _ = self.weights.experts(f"{blk}.fc1", d, rank, experts.n)
        hidden = self.value(f"{blk}.ffn_pred_h", experts.n_used * rank)
        self.add(ExpertLinear(hidden, h, route.out, weights, experts.n, **self.where))
        fired = self.value(f"{blk}.ffn_pred_h_act", hidden.width)
        self.add(Activate(fired, hidden, "relu", **self.where))
        weights, _ = self.weights.experts(f"{blk}.fc2", rank, n, experts.n)
        out = self.value(f"{blk}.ffn_pred", experts.n_used * n)
        self.add(ExpertLinear(out, fired, route.out, weights, experts.n, of_parts=True, **self.where))
        self.enter(i, "ffn")
        return out

    def _shared_ffn(self, blk: str, layer: LayerConfig, experts: Experts, h: Value) -> Ffn:
        n, own = experts.n_ff_shared, "" if experts.beside else "_shexp"

        def linear(x: Value, name: str, width: int) -> Linear:
            return self.linear_op(x, f"{blk}.{name}{own}", width, f"{blk}.{name}_shexp")

        gate: Linear | None = None
        if not layer.gated:
            up = linear(h, "ffn_up", n)
        elif self._has_both(f"{blk}.ffn_gate{own}", f"{blk}.ffn_up{own}", n):
            widths = {f"{blk}.ffn_gate_shexp": n, f"{blk}.ffn_up_shexp": n}
            gate, up = self._rows_of(f"{blk}.ffn_up{own}", h, widths)
        else:
            gate, up = linear(h, "ffn_gate", n), linear(h, "ffn_up", n)
        gate_act, up_act, product = self._activated(blk, layer, gate, up, "_shexp")
        neurons = gate_act.out if product is None else product.out
        down = linear(neurons, "ffn_down", self.config.n_embd)
        return Ffn(
            down.out, h, None, gate, up, gate_act, up_act, product, All(), down, shared=True, **self.where
        )  # fmt: skip

    # ---- pieces of the FFN

    def _ffn_op(
        self,
        i: int,
        layer: LayerConfig,
        x: Value,
        norm: RMSNorm | LayerNorm | None,
        scores: Value | None,
        threshold: float,
        n_always: int,
    ) -> Ffn:
        blk, n, h, layer_thresholds = (
            f"blk.{i}",
            layer.n_ff,
            x if norm is None else norm.out,
            self.layer_thresholds[i],
        )
        in_threshold = self._threshold_op(h, layer_thresholds, "ffn_in", f"{blk}.ffn_norm_thresholded")
        gate, up = self._gate_and_up(blk, layer, h if in_threshold is None else in_threshold.out)
        gate_act, up_act, product = self._activated(blk, layer, gate, up)
        top_k = None
        if layer.activation.top_k is not None:
            if gate is None or scores is not None:
                raise UnsupportedModelError("a Gaussian top-k is of the gates of all neurons")
            top_k = GaussianTopK(
                self.value(f"{blk}.ffn_gate_top_k", n), gate.out, layer.activation.top_k, **self.where
            )
            gate_act = replace(gate_act, x=top_k.out)
        gate_threshold, product, neurons = self._gate_threshold(blk, layer_thresholds, gate_act, product)
        select: Select = All()
        if scores is not None:
            masked = self.value(f"{blk}.ffn_masked", n)
            select = Mask(masked, neurons, scores, threshold, n_always, **self.where)
            neurons = masked
        down_threshold = self._threshold_op(neurons, layer_thresholds, "down_in", f"{blk}.ffn_thresholded")
        neurons = neurons if down_threshold is None else down_threshold.out
        sub_norm = self._norm_op(neurons, f"{blk}.ffn_sub_norm") if layer.sub_norms else None
        assert not isinstance(sub_norm, LayerNorm)  # which leaves no zeros
        down = self._down(blk, layer, neurons if sub_norm is None else sub_norm.out)
        return Ffn(
            down.out, x, norm, gate, up, gate_act, up_act, product, select, down,
            in_threshold=in_threshold, gate_threshold=gate_threshold, down_threshold=down_threshold,
            top_k=top_k, sub_norm=sub_norm, **self.where,
        )  # fmt: skip

    def _activated(
        self,
        blk: str,
        layer: LayerConfig,
        gate: Linear | ExpertLinear | None,
        up: Linear | ExpertLinear,
        suffix: str = "",
    ) -> tuple[Activate, Activate | None, Multiply | None]:
        """What becomes of gate and up: the activation that decides, that of up, their product."""
        name = f"{blk}.ffn_act{suffix}"
        if gate is None:
            return self._activate(up.out, layer, name), None, None
        gate_act, up_act, factor = self._activate(gate.out, layer), None, up.out
        if layer.activation.up is not None:
            out = self.value(f"{blk}.ffn_up{suffix}_act", up.out.width)
            up_act = self._activation(out, up.out, layer.activation.up, layer)
            factor = up_act.out
        out = self.value(name, up.out.width)
        return gate_act, up_act, Multiply(out, gate_act.out, factor, **self.where)

    def _gate_threshold(
        self, blk: str, layer_thresholds: LayerThresholds, gate_act: Activate, product: Multiply | None
    ) -> tuple[Threshold | None, Multiply | None, Value]:
        """The threshold of what decides, the product with what is left of it, and the neurons."""
        threshold = self._threshold_op(gate_act.out, layer_thresholds, "gate", f"{blk}.ffn_gate_thresholded")
        fires = gate_act.out if threshold is None else threshold.out
        if product is None:
            return threshold, None, fires
        return threshold, replace(product, a=fires), product.out

    def _gate_and_up(self, blk: str, layer: LayerConfig, h: Value) -> tuple[Linear | None, Linear]:
        """Two matrices, or one with the rows of the gate and then those of up; or up alone."""
        n, gate, up = layer.n_ff, f"{blk}.ffn_gate", f"{blk}.{layer.ffn_tensors[0]}"
        if not layer.gated:
            return None, self.linear_op(h, up, n, f"{blk}.ffn_up")
        if not self._has_both(gate, up, n):
            return self.linear_op(h, gate, n), self.linear_op(h, up, n)
        first, second = self._rows_of(up, h, {gate: n, up: n})
        return first, second

    def _has_both(self, gate: str, up: str, n: int) -> bool:
        """Whether the tensor of up has the n rows of the gate before its own n."""
        both = self.weights.tensors.get(f"{up}.weight")
        alone = f"{gate}.weight" in self.weights.tensors
        return not alone and both is not None and both.shape[-1] == 2 * n

    def _down(self, blk: str, layer: LayerConfig, neurons: Value) -> Linear | TransposedLinear:
        """The down projection as the file has it: a row per neuron, if possible, or a row per output."""
        d, weights, down = self.config.n_embd, self.weights, f"{blk}.{layer.ffn_tensors[1]}"
        out, transposed = self.value(f"{blk}.ffn_down", d), f"{down}_t"
        has_own_bias = f"{transposed}.bias" in weights.tensors
        bias = weights.bias(transposed if has_own_bias else down, d)
        if f"{transposed}.weight" in weights.tensors:
            matrix = weights.matrix(transposed, d, neurons.width)
            return TransposedLinear(out, neurons, matrix, bias, **self.where)
        if f"{transposed}.codes" in weights.tensors:
            codes, scales = weights.planes(transposed, d, neurons.width)
            return TransposedLinear(out, neurons, codes, bias, scales, **self.where)
        matrix = weights.matrix(down, neurons.width, d)
        input_major = weights.input_major(down, neurons.width)
        return Linear(out, neurons, matrix, bias, input_major=input_major, **self.where)

    def _low_rank_scores(
        self, blk: str, x: Value, first: str, second: str, kind: ActivationKind | None, n: int
    ) -> Value:
        rank = self.weights.n_rows(f"{blk}.{first}")
        hidden = self.linear(x, f"{blk}.{first}", rank, f"{blk}.ffn_pred_h")
        if kind is not None:
            out = self.value(f"{blk}.ffn_pred_h_act", rank)
            hidden = self.add(Activate(out, hidden, kind, **self.where))
        out, bias = self.value(f"{blk}.ffn_pred", n), self.weights.bias(f"{blk}.always", n)
        matrix = self.weights.matrix(f"{blk}.{second}", rank, n)
        return self.add(Linear(out, hidden, matrix, bias, **self.where))

    def _activate(self, x: Value, layer: LayerConfig, name: str | None = None) -> Activate:
        """What decides which neurons fire, and how much."""
        out = self.value(name or f"{x.name}_act", x.width)
        return self._activation(out, x, layer.activation.gate, layer)

    def _activation(self, out: Value, x: Value, kind: ActivationKind, layer: LayerConfig) -> Activate:
        has_threshold = kind in ("fatrelu", "clamped_silu", "clamped_plus_one", "capped_silu", "clamp")
        threshold = layer.activation.threshold if has_threshold else 0.0
        return Activate(out, x, kind, threshold, layer.activation.xielu, **self.where)

    # ---- small things

    def _threshold_op(
        self, x: Value, layer_thresholds: LayerThresholds, of: ThresholdName, name: str
    ) -> Threshold | None:
        """None where there are no thresholds."""
        threshold = getattr(layer_thresholds, of)
        return Threshold(self.value(name, x.width), x, threshold, of, **self.where) if threshold else None

    def _thresholded(self, x: Value, layer: int, of: ThresholdName) -> Value:
        op = self._threshold_op(x, self.layer_thresholds[layer], of, f"{x.name}_thresholded")
        return x if op is None else self.add(op)

    def enter(self, layer: int, part: Part) -> None:
        self.where = {"layer": layer, "part": part}

    def value(self, name: str, width: int) -> Value:
        return self.graph.value(name, width)

    def add(self, op: Any) -> Value:
        return self.graph.add(op)

    def linear_op(self, x: Value, tensor: str, width: int, name: str | None = None) -> Linear:
        weight, bias = self.weights.matrix(tensor, x.width, width), self.weights.bias(tensor, width)
        input_major, out = self.weights.input_major(tensor, x.width), self.value(name or tensor, width)
        return Linear(out, x, weight, bias, input_major=input_major, **self.where)

    def linear(self, x: Value, tensor: str, width: int, name: str | None = None) -> Value:
        return self.add(self.linear_op(x, tensor, width, name))

    def _rows_of(self, tensor: str, x: Value, widths: Mapping[str, int]) -> list[Linear]:
        """Products that share one matrix, each with its rows, one after the other; by name of their value."""
        n_rows, first, parts = sum(widths.values()), 0, []
        weight, bias = self.weights.matrix(tensor, x.width, n_rows), self.weights.bias(tensor, n_rows)
        input_major = self.weights.input_major(tensor, x.width)
        for name, width in widths.items():
            parts.append(Linear(self.value(name, width), x, weight, bias, first, input_major, **self.where))
            first += width
        return parts

    def _norm_op(
        self, x: Value, tensor: str, name: str | None = None, eps: float | None = None
    ) -> RMSNorm | LayerNorm:
        out = self.value(name or tensor, x.width)
        eps = self.config.norm_eps if eps is None else eps
        if not self.config.norm_weights:
            return LayerNorm(out, x, None, None, eps, **self.where)
        weight = self.weights.vector(tensor, x.width)
        if self.config.norm == "layer":
            bias = self.weights.bias(tensor, x.width, required=self.config.norm_bias)
            return LayerNorm(out, x, weight, bias, eps, **self.where)
        return RMSNorm(out, x, weight, eps, **self.where)

    def norm(self, x: Value, tensor: str, name: str | None = None, eps: float | None = None) -> Value:
        return self.add(self._norm_op(x, tensor, name, eps))

    def scaled(self, x: Value, factor: float, name: str) -> Value:
        if factor == 1.0:
            return x
        return self.add(Scale(self.value(name, x.width), x, factor, **self.where))


class _TimeMix:
    """What stands in attention's place in RWKV, of the normed stream h."""

    EPS = 64e-5  # of the norm of what heads yield

    def __init__(self, model: _Description, blk: str, mixer: RwkvMixer, h: Value) -> None:
        self._model, self._blk, self._mixer, self._h = model, blk, mixer, h
        self._more = model.shifted(h, f"{blk}.time_mix_shift")

    def out(self) -> Value:
        """The sum's other part."""
        y, gate = self._seventh() if self._mixer.version == 7 else self._sixth()
        if gate is not None:
            y = self._multiplied(y, gate, "time_mix_gated")
        return self._linear(y, "time_mix_output", y.width)

    def _sixth(self) -> tuple[Value, Value]:
        """RWKV 6 (arXiv 2404.05892): how much of the token before counts depends on the token."""
        model, blk, d, n = self._model, self._blk, self._h.width, self._mixer.rank_mix
        z = model.lerped(self._h, self._more, f"{blk}.time_mix_lerp_x", f"{blk}.time_mix_x")
        z = self._tanh(self._linear(z, "time_mix_w1", 5 * n))
        matrices = model.weights.heads(f"{blk}.time_mix_w2", n, d, 5)
        lerps = model.weights.numbers(f"{blk}.time_mix_lerp_fused", 5 * d)
        x = {}
        for j, name in enumerate("wkvrg"):
            own = model.add(Heads(model.value(f"{blk}.time_mix_z{name}", n), z, 1, j * n, **model.where))
            share = model.value(f"{blk}.time_mix_share_{name}", d)
            model.add(Linear(share, own, matrices, lerps, j * d, **model.where))
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
        bonus = model.add(HeadDot(out, v, r, k, first, self._mixer.n_head, **model.where))
        return self._normed(self._added(y, bonus, "time_mix_read")), model.activated(gate, "silu")

    def _seventh(self) -> tuple[Value, Value | None]:
        """RWKV 7 (arXiv 2503.14456)."""
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
        bonus = model.add(HeadDot(out, v, r, k, weight, mixer.n_head, **model.where))
        y = self._added(self._normed(y), bonus, "time_mix_sum")
        if not mixer.rank_gate:
            return y, None
        gate = model.activated(self._linear(x["g"], "time_mix_g1", mixer.rank_gate), "sigmoid")
        return y, self._linear(gate, "time_mix_g2", d)

    def _values(self, v: Value, x: Value) -> Value:
        """The layer's values, brought nearer to those of the first layer."""
        model, d = self._model, v.width
        first = model.first_values
        if first is None:
            model.first_values = v
            for name in ("time_mix_v0", "time_mix_v1", "time_mix_v2"):  # that some files have here
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
        return model.add(Wkv(out, r, w, k, v, a, b, self._mixer.n_head, **model.where))

    def _normed(self, y: Value) -> Value:
        """Head by head."""
        model, name = self._model, f"{self._blk}.time_mix_ln"
        weight, bias = model.weights.vector(name, y.width), model.weights.bias(name, y.width, required=True)
        out = model.value(name, y.width)
        return model.add(LayerNorm(out, y, weight, bias, self.EPS, self._mixer.n_head, **model.where))

    def _unit(self, x: Value) -> Value:
        """Heads as vectors of length 1."""
        model, dim = self._model, self._mixer.dim
        out = model.value(f"{x.name}_unit", x.width)
        unit = model.add(UnitNorm(out, x, 1e-24 / dim, self._mixer.n_head, **model.where))
        return model.scaled(unit, dim**-0.5, f"{x.name}_length_1")

    def _linear(self, x: Value, tensor: str, width: int, bias: str | None = None) -> Value:
        """bias: of a name of its own."""
        model, blk = self._model, self._blk
        op = model.linear_op(x, f"{blk}.{tensor}", width)
        return model.add(
            op if bias is None else replace(op, bias=model.weights.numbers(f"{blk}.{bias}", width))
        )

    def _times(self, x: Value, tensor: str, name: str) -> Value:
        model, weight = self._model, self._model.weights.numbers(f"{self._blk}.{tensor}", x.width)
        out = model.value(f"{self._blk}.{name}", x.width)
        return model.add(Scale(out, x, 1.0, weight, **model.where))

    def _scaled(self, x: Value, factor: float, name: str) -> Value:
        return self._model.scaled(x, factor, f"{self._blk}.{name}")

    def _tanh(self, x: Value) -> Value:
        model = self._model
        return model.add(SoftCap(model.value(f"{x.name}_act", x.width), x, 1.0, **model.where))

    def _multiplied(self, a: Value, b: Value, name: str) -> Value:
        model = self._model
        return model.add(Multiply(model.value(f"{self._blk}.{name}", a.width), a, b, **model.where))

    def _added(self, a: Value, b: Value, name: str) -> Value:
        model = self._model
        return model.add(Add(model.value(f"{self._blk}.{name}", a.width), a, b, **model.where))


class _Streams:
    """Residual streams of AltUp, and what each layer embeds of a token. x: the streams side by side.

    A layer predicts all streams, computes the first from its prediction, corrects all by how that differs
    from it, and adds its embedding, gated by the first stream, to the others.
    """

    LEAST = 1e-5  # mean square, where a stream is made as large as another

    def __init__(self, model: _Description, facts: AltUp, x: Value) -> None:
        self._model, self._n, self._width = model, facts.n_streams, facts.n_embd_layer
        d, n_others = x.width, facts.n_streams - 1
        self._embedded = model.layer_embeddings(x, facts.n_embd_layer)
        others = model.value("altup_others", n_others * d)
        model.add(Linear(others, x, model.weights.heads("altup_proj", d, d, n_others)))
        sized = model.value("altup_sized", n_others * d)
        model.add(MatchMagnitude(sized, others, x, self.LEAST))
        self.x = model.add(Heads(model.value("streams", self._n * d), x, 1, 0, sized))
        self._predictions = self.x

    def predicted(self, i: int) -> Value:
        """The first stream, as layer i predicts it."""
        model, blk = self._model, f"blk.{i}"
        model.enter(i, "other")
        first = self._stream(self.x, 0, f"{blk}.altup_inp")
        weights = model.linear(
            self._routed(first, blk, "altup_predict"), f"{blk}.altup_predict_coef", self._n**2
        )
        out = model.value(f"{blk}.altup_predicted", self.x.width)
        added = AddStreams(out, self.x, self.x, weights, self._n, **model.where)
        self._predictions = model.add(added)
        return self._stream(self._predictions, 0, f"{blk}.inp")

    def correct(self, i: int, y: Value) -> None:
        """Corrects the streams by what layer i made of the first one, y."""
        model, blk, d = self._model, f"blk.{i}", y.width
        model.enter(i, "other")
        weights = model.linear(self._routed(y, blk, "altup_correct"), f"{blk}.altup_correct_coef", self._n)
        taken = model.scaled(
            self._stream(self._predictions, 0, f"{blk}.altup_guess"), -1.0, f"{blk}.altup_taken"
        )
        off = model.add(Add(model.value(f"{blk}.altup_off", d), y, taken, **model.where))
        out = model.value(f"{blk}.altup_corrected", self.x.width)
        corrected = model.add(AddStreams(out, self._predictions, off, weights, self._n, 1.0, **model.where))

        first = self._stream(corrected, 0, f"{blk}.altup_first")
        scale = model.weights.vector(f"{blk}.altup_correct_scale", d)
        first = model.add(Scale(model.value(f"{blk}.altup_scaled", d), first, 1.0, scale, **model.where))
        more = model.gated_embedding(i, first, self._embedded)
        out = model.value(f"{blk}.streams", self.x.width)
        self.x = model.add(AddStreams(out, corrected, more, None, self._n, 1.0, 1, **model.where))

    def joined(self) -> Value:
        """The mean of the streams, each after the first projected and made as large as that."""
        model, x, d = self._model, self.x, self._model.config.n_embd
        model.where = {}
        matrices = model.weights.heads("altup_unembd_proj", d, d, self._n - 1)
        total = first = self._stream(x, 0, "output_stream_0")
        for j in range(1, self._n):
            stream, out = self._stream(x, j, f"output_stream_{j}"), model.value(f"output_unembd_{j}", d)
            stream = model.add(Linear(out, stream, matrices, first_row=(j - 1) * d))
            out = model.value(f"output_sized_{j}", d)
            stream = model.add(MatchMagnitude(out, stream, first, self.LEAST))
            total = model.add(Add(model.value(f"output_sum_{j}", d), total, stream))
        return model.scaled(total, 1 / self._n, "output_mean")

    def _routed(self, x: Value, blk: str, name: str) -> Value:
        """A few numbers, of which the weights of streams are made."""
        model, out = self._model, f"{blk}.{name}_router"
        h = model.norm(x, f"{blk}.altup_router_norm", f"{out}_norm")
        h = model.scaled(h, 1 / x.width, f"{out}_scaled")
        h = model.linear(h, f"{blk}.altup_router", self._n, out)
        return model.add(SoftCap(model.value(f"{out}_tanh", self._n), h, 1.0, **model.where))

    def _stream(self, x: Value, j: int, name: str) -> Value:
        return self._part(x, j * self._model.config.n_embd, name, self._model.config.n_embd)

    def _part(self, x: Value, first: int, name: str, width: int | None = None) -> Value:
        out = self._model.value(name, width or self._width)
        return self._model.add(Heads(out, x, 1, first, **self._model.where))


class _HyperStreams:
    """Residual streams of which a part of a layer reads a sum, and which are mixed when it adds its result.
    x: the embedding, with which each begins."""

    def __init__(self, model: _Description, facts: Hyper, x: Value) -> None:
        self._model, self._facts, self._part, n = model, facts, "", facts.n_streams
        self.x = model.add(AddStreams(model.value("streams", n * x.width), None, x, None, n, 1.0))
        self._write = self.x

    def read(self, i: int, part: Part) -> Value:
        """What a part of layer i reads."""
        self._model.enter(i, part)
        n, name = self._facts.n_streams, "attn" if part == "attention" else part
        self._part = f"blk.{i}.hc_{name}"
        weights = self._weights(self._part, n * (n + 2))
        read = self._first(weights, f"{self._part}_read", n)
        self._write = self._first(weights, f"{self._part}_write", n * (n + 1), n)
        return self._sum(read, f"{self._part}_inp")

    def add(self, y: Value) -> None:
        """Mixes the streams, and adds the result of the part that has read them."""
        model, n = self._model, self._facts.n_streams
        both = model.value(f"{self._part}_both", y.width + self.x.width)
        both = model.add(Heads(both, y, 1, 0, self.x, **model.where))
        out = model.value(f"{self._part}_streams", self.x.width)
        self.x = model.add(AddStreams(out, None, both, self._write, n, **model.where))

    def joined(self) -> Value:
        """What the output reads."""
        weights = self._weights("output_hc", self._facts.n_streams)
        return self._sum(weights, "hc_output_inp")

    def _weights(self, name: str, width: int) -> Value:
        model, facts = self._model, self._facts
        unit = model.value(f"{name}_unit", self.x.width)
        unit = model.add(UnitNorm(unit, self.x, model.config.norm_eps, 1, **model.where))
        m = model.linear(unit, f"{name}_fn", width, f"{name}_m")
        scale = model.weights.numbers(f"{name}_scale", 1 if width == facts.n_streams else 3)
        base, out = model.weights.numbers(f"{name}_base", width), model.value(f"{name}_weights", width)
        op = HyperConnection(
            out, m, scale, base, facts.n_streams, facts.eps, facts.n_iterations, **model.where
        )
        return model.add(op)

    def _first(self, x: Value, name: str, width: int, first: int = 0) -> Value:
        return self._model.add(Heads(self._model.value(name, width), x, 1, first, **self._model.where))

    def _sum(self, weights: Value, name: str) -> Value:
        model, out = self._model, self._model.value(name, self._model.config.n_embd)
        return model.add(AddStreams(out, None, self.x, weights, 1, **model.where))


class _Weights:
    """Asks for each tensor with its shape, and remembers what was asked for.

    missing: takes the names of those that are not there, which are then no error.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, TensorInfo], missing: set[str] | None = None
    ) -> None:
        self.config, self.tensors, self.missing = config, tensors, missing
        self.used: set[str] = set()

    def matrix(self, name: str, n_in: int, n_out: int, types: Collection[GGMLType] = DECODABLE) -> str:
        return self._ask(f"{name}.weight", (n_in, n_out), types)

    def vector(self, name: str, n: int) -> str:
        """Some files lack the end of its name."""
        return self._ask(name if name in self.tensors else f"{name}.weight", (n,))

    def numbers(self, name: str, n: int) -> str:
        """A vector that files have with one dimension or more."""
        return self._numbers(f"{name}.weight", n)

    def bare(self, name: str, n: int) -> str:
        """The same where the name says all."""
        return self._numbers(name, n)

    def _numbers(self, name: str, n: int) -> str:
        info = self.tensors.get(name)
        fits = info is not None and math.prod(info.shape) == n
        return self._ask(name, tuple(info.shape) if info is not None and fits else (n,))

    def plain(self, name: str, n_in: int, n_out: int) -> str:
        """A matrix whose name says all."""
        return self._ask(name, (n_in, n_out))

    def row(self, name: str, n: int) -> str:
        """A matrix of one row: files have it as a vector."""
        info = self.tensors.get(f"{name}.weight")
        shape = (n, 1) if info is not None and len(info.shape) == 2 else (n,)
        return self._ask(f"{name}.weight", shape, DECODABLE)

    def table(self, name: str, n: int) -> str:
        """Rows of n numbers, of which there are one, perhaps as a vector, or more."""
        shape = self.shape(name) or (n, 1)
        return self._ask(f"{name}.weight", shape if shape == (n,) else (n, *shape[-1:]))

    def experts_of_tokens(self, name: str, n_used: int) -> str:
        """A table of whole numbers, some for each token."""
        return self._ask(f"{name}.weight", (n_used, self.config.n_vocab), _WHOLE)

    def heads(self, name: str, n_in: int, n_out: int, n_head: int) -> str:
        """A matrix of each head, in one tensor."""
        return self._ask(f"{name}.weight", (n_in, n_out, n_head), DECODABLE)

    def rows(self, name: str, n: int, least: int) -> str:
        """A table of so many rows of n numbers at least, which files fill up."""
        shape = self.shape(name) or ()
        enough = len(shape) == 2 and shape[1] >= least
        return self._ask(f"{name}.weight", (n, shape[1] if enough else least), DECODABLE)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a matrix that files have in more than one form; None: there is none."""
        info = self.tensors.get(f"{name}.weight")
        return None if info is None else tuple(info.shape)

    def experts(
        self, name: str, n_in: int, n_out: int, n: int, *, n_bias: int | None = None
    ) -> tuple[tuple[str, ...], str | None]:
        """The matrices of n experts, in one tensor or, in old files, in one each; and their bias, of n_bias
        numbers (None: a row has one)."""
        if f"{name}.0.weight" in self.tensors and f"{name}_exps.weight" not in self.tensors:
            return tuple(self.matrix(f"{name}.{e}", n_in, n_out) for e in range(n)), None
        weight = self._ask(f"{name}_exps.weight", (n_in, n_out, n), DECODABLE)
        has_bias = f"{name}_exps.bias" in self.tensors
        bias = (n_out if n_bias is None else n_bias, n)
        return (weight,), self._ask(f"{name}_exps.bias", bias) if has_bias else None

    def bias(self, name: str, n: int, *, required: bool = False) -> str | None:
        """The bias of a tensor, where it has one or must have one."""
        required = required or name.rpartition(".")[2] in self.config.biased
        return self._ask(f"{name}.bias", (n,)) if required or f"{name}.bias" in self.tensors else None

    def scales(self, name: str, n: int) -> str | None:
        """Of each expert, where a tensor has them."""
        return self._ask(f"{name}.scale", (n,)) if f"{name}.scale" in self.tensors else None

    def n_rows(self, name: str, axis: int = -1) -> int:
        """Rows of a matrix whose size no key says: the rank of a predictor."""
        info = self.tensors.get(f"{name}.weight")
        if info is None:
            raise UnsupportedModelError(f"the file lacks the tensor {name}.weight of its predictor")
        return int(info.shape[axis]) if len(info.shape) >= -axis else 0

    def planes(self, name: str, n_out: int, n_neurons: int) -> tuple[str, str]:
        """Codes and scales of a neuron-major matrix; the width of the codes says which type they are."""
        if n_out % PLANE_GROUP:  # their kernels take as many outputs at a time
            raise UnsupportedModelError(
                f"the tensor {name}.codes is of {n_out} outputs, which planes cannot hold"
            )
        wide = n_out if tuple(self.tensors[f"{name}.codes"].shape) == (n_out, n_neurons) else n_out // 2
        codes = self._ask(f"{name}.codes", (wide, n_neurons), _BYTES)
        return codes, self._ask(f"{name}.scales", (n_out, -(-n_neurons // PLANE_GROUP)), _SCALES)

    def input_major(self, name: str, n_in: int) -> str | None:
        """The input-major copy of a matrix, where it was made."""
        copy, info = copy_name(name), self.tensors.get(f"{name}.weight")
        if copy not in self.tensors or info is None or not can_be_input_major(info) or n_in % PLANE_GROUP:
            return None
        return self._ask(copy, copy_shape(info), _BYTES)

    def _ask(self, name: str, shape: tuple[int, ...], types: Collection[GGMLType] = DECODABLE) -> str:
        info = self.tensors.get(name)
        if self.missing is not None and (info is None or tuple(info.shape) != shape):
            self.missing.add(name)
            return name
        if info is None:
            raise UnsupportedModelError(f"the file lacks the tensor {name} {list(shape)}")
        if tuple(info.shape) != shape:
            raise UnsupportedModelError(
                f"the tensor {name} is {list(info.shape)}, but the file's keys say {list(shape)}"
            )
        if info.type not in types:
            why = REFUSED_TYPES.get(
                info.type, "which hotset does not compute with; use a file of another type"
            )
            raise UnsupportedModelError(f"the tensor {name} has the type {info.type.name}, {why}")
        self.used.add(name)
        return name

    def leave(self, *names: str) -> None:
        """Tensors that a file may have and nothing reads."""
        self.used.update(f"{name}.weight" for name in names)

    def unused(self) -> list[str]:
        n_layer = self.config.n_layer
        extra = tuple(f"blk.{n_layer + i}." for i in range(self.config.n_extra_layers))
        return [n for n in self.tensors if self.is_unread(n) and not n.startswith(extra)]

    def is_unread(self, name: str) -> bool:
        """Whether nothing reads a tensor that something should."""
        return name not in self.used and not REDUNDANT_TENSORS.fullmatch(name)

    def refuse_unused(self) -> None:
        """A tensor that nothing reads belongs to a model that is not the one described."""
        if unused := self.unused():
            raise UnsupportedModelError(
                f"the file has {len(unused)} tensors that no {self.config.architecture} model uses, "
                f"such as {unused[0]}"
            )
