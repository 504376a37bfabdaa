"""The configuration of a model, read and checked from the keys of its GGUF file.

Facts that a file does not state (the RoPE layout of its q and k rows, whether q and k are normalised, the
activation of its training) come from the row of its architecture (`architectures`); all others come from the
file. Files are untrusted: this module checks the range of every number, and every error message names the
key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.errors import FormatError, InvalidRequestError, UnsupportedModelError
from hotset.model.activation import (
    SILU,
    FFNActivation,
    activation_of,
    clamp_of,
    parse_activation,
    top_k_of,
    xielu_of,
)
from hotset.model.architectures import (
    ARCHITECTURES,
    Architecture,
    HeadNorm,
    PredictorInput,
    row_of,
)
from hotset.model.experts import Experts, experts_of, with_tables
from hotset.model.indexing import Indexing, indexing_of
from hotset.model.keys import (
    EPSILON_KEYS,
    MAX_CONV_KERNEL,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_LATENT_HEADS,
    MAX_NGRAM,
    MAX_NGRAM_HEADS,
    MAX_STREAMS,
    MAX_WINDOW,
    PREDICTOR_MASKS_KEY,
    SPARSE_THRESHOLD_KEY,
    TOP_K_KEY,
    Keys,
    NormKind,
    is_array,
    number,
)
from hotset.model.mixers import Mixer, mixers_of
from hotset.model.operations import Groups, Rope
from hotset.model.rope import (
    LongRope,
    divisors,
    frequencies,
    latent_yarn_scale,
    long_rope_of,
    rope_of,
    window_dim,
    windowed_rope_of,
    with_axes,
)
from hotset.parameters import shown

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile


@dataclass(frozen=True)
class LayerConfig:
    """Facts that may differ between the layers of a model. See Architecture for fields not listed here.

    n_ff: neurons of the FFN, or of one of its experts; 0: no FFN. experts: None: no experts.
    mixes: the layer has attention or another token mixer; mixer: which one, instead of attention or in
    addition to it; None: only attention.
    rope: with final frequencies; None: positions are not rotated. more_rope: of the channels of a head after
    the channels of `rope`. window: how many tokens a token sees, including itself; 0: all before it.
    attention_scale: of q · k. attention_softcap: see operations.Attention; 0: no cap.
    bare: attention reads the stream without a norm, even if the FFN does not.
    value_norm: heads of values pass a norm without weights. source: the layer whose keys and values it
    attends to; None: its own. heads: KV heads and the channels of one; None: the model's. result_scale: of
    the stream after the layer. block_size: tokens of a compressed block of keys; 0: no blocks. groups: see
    operations.Attention.
    """

    n_ff: int
    activation: FFNActivation
    rope: Rope | None
    attention_scale: float
    window: int = 0
    attention_softcap: float = 0.0
    qk_norm: HeadNorm | None = None
    qk_norm_last: bool = False
    gated: bool = True
    parallel: bool = False
    pre_norm: bool = True
    bare: bool = False
    post_norm: bool = False
    ffn_norm: str = "ffn_norm"
    sinks: bool = False
    experts: Experts | None = None
    mixer: Mixer | None = None
    mixes: bool = True
    attention_gate: bool = False
    value_norm: bool = False
    source: int | None = None
    sub_norms: bool = False
    sum_norms: bool = False
    ffn_tensors: tuple[str, str] = ("ffn_up", "ffn_down")
    heads: tuple[int, int] | None = None
    result_scale: float = 1.0
    block_size: int = 0
    groups: Groups = "none"
    more_rope: Rope | None = None

    @property
    def n_neurons(self) -> int:
        """Return the number of neurons, of all experts together."""
        return self.n_ff * (1 if self.experts is None else self.experts.n)


@dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are computed from one latent vector per token (arXiv 2405.04434).

    rank: width of that vector; rank_q: width of the queries' vector; 0: queries come from the input. The
    first channels of a head of q and k come from these vectors. The last n_rot are rotated; the key's come
    from the input and are the same in all heads. norm_eps: of the vectors' norms.
    """

    rank: int
    rank_q: int
    n_rot: int
    norm_eps: float


@dataclass(frozen=True)
class AltUp:
    """Residual streams of AltUp (arXiv 2301.13310), as in Gemma 3n.

    A layer computes the first stream, and predicts and corrects the others. n_embd_layer: width of each
    layer's embedding of a token.
    """

    n_streams: int
    n_embd_layer: int


@dataclass(frozen=True)
class GatedStreams:
    """Residual streams of Qwen4-Exp.

    Attention and the FFN read the mean of the normed streams, each channel multiplied by a gate. Their result
    is added to each stream with a weight. Gates and weights are computed from all streams; the gates by
    low-rank matrices. n: streams. rank: of the gates.
    """

    n: int
    rank: int


@dataclass(frozen=True)
class Ngrams:
    """Embeddings of the n-grams that end with a token, which one layer adds to the streams (Qwen4-Exp).

    layer: the layer that adds them. width: of one embedding. kernel: of the convolution after their gate; its
    dilation is the length of the longest n-gram. See operations.NgramEmbed for the rest.
    """

    layer: int
    width: int
    kernel: int
    eos: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Hyper:
    """Several residual streams (mHC, arXiv 2512.24880): see operations.HyperConnection."""

    n_streams: int
    eps: float
    n_iterations: int


@dataclass(frozen=True)
class Compressed:
    """Attention with one head of keys, which are also the values, as in DeepSeek V4.

    Queries are computed from a vector of rank_q numbers. The last n_rot channels of a head are rotated, and
    the result of the heads is rotated back. Each of n_groups groups of heads is projected to rank_out
    numbers, from which the output is computed.
    """

    rank_q: int
    n_rot: int
    n_groups: int
    rank_out: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that its decoder needs, except the weights.

    head_dim is the width of one head of q and k, head_dim_v of v; neither need be n_embd / n_head. Without
    attention they and the numbers of heads are 0. norm_eps applies to every norm. n_ctx_train is the file's
    context length in tokens, n_ctx_max the longest that hotset can compute; None: no limit. embedding_scale,
    residual_scale and logit_scale multiply the embedding, the results of attention and FFN, and the logits.
    logit_softcap: see operations.SoftCap; 0: no cap. n_extra_layers: layers for multi-token prediction, after
    the model's own. sparse_threshold belongs to the predictor in the file; masked: that predictor's mask is
    part of the model. slopes: see operations.Attention. query_gain: beta and length of the
    operations.PositionGain that multiplies queries; None: no gain. n_embd_layer: width of the per-layer
    embedding of a token; 0: none. sections: pairs of channels for time, row and column of a rotary position,
    which only tokens of images need; empty: all tokens rotate by their index. n_image_layers: the first
    layers to whose results a part of image rows is added; the rows are 1 + n_image_layers times as wide.
    indexing: None: a token attends to all keys. See Architecture for the rest.
    """

    architecture: str
    layers: tuple[LayerConfig, ...]
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    norm: NormKind = "rms"
    norm_bias: bool = True
    norm_weights: bool = True
    biased: tuple[str, ...] = ()
    first_position: int | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    n_ctx_max: int | None = None
    long_rope: LongRope | None = None
    latent: Latent | None = None
    altup: AltUp | None = None
    gated_streams: GatedStreams | None = None
    ngrams: Ngrams | None = None
    hyper: Hyper | None = None
    compressed: Compressed | None = None
    n_embd_layer: int = 0
    predictor_input: PredictorInput = "ffn_inp"
    sparse_threshold: float = 0.0
    masked: bool = False
    n_extra_layers: int = 0
    output_norm: str | None = "output_norm"
    slopes: tuple[float, ...] | None = None
    embedding_norm: bool = False
    unit_embedding: bool = False
    post_norm_eps: float | None = None
    causal: bool = True
    query_gain: tuple[float, int] | None = None
    sections: tuple[int, ...] = ()
    n_image_layers: int = 0
    indexing: Indexing | None = None

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def n_ff(self) -> tuple[int, ...]:
        """Return the neurons of each layer, of all its experts together."""
        return tuple(layer.n_neurons for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        """Return whether a layer has experts."""
        return any(layer.experts is not None for layer in self.layers)

    @property
    def n_recurrent(self) -> int:
        """Return how many layers have a recurrent state, instead of keys and values or in addition."""
        pools = self.indexing is not None and self.indexing.size > 1
        owners = set(self.indexing.owners) if self.indexing is not None and pools else set()
        return sum(
            layer.mixer is not None or layer.block_size > 0 or i in owners
            for i, layer in enumerate(self.layers)
        )

    @property
    def activation(self) -> FFNActivation:
        """Return the activation of the FFNs; if only some layers have a Gaussian top-k, theirs."""
        return next(
            (layer.activation for layer in self.layers if layer.activation.has_zeros),
            self.layers[0].activation,
        )

    @property
    def has_zeros(self) -> bool:
        """Return whether an activation yields exact zeros, so that inactive neurons can be skipped."""
        return any(layer.activation.has_zeros for layer in self.layers)

    @property
    def leaves_out(self) -> bool:
        """Return whether a token needs only some rows: of active neurons, or of chosen experts."""
        return self.has_zeros or self.has_experts

    def require_ffns(self, what: str) -> None:
        """Raise UnsupportedModelError if a layer has no FFN. what: the feature that needs one in each."""
        if 0 in self.n_ff:
            raise UnsupportedModelError(f"{what} of models with layers without an FFN are not supported")

    @property
    def has_image_positions(self) -> bool:
        """Return whether tokens of images have rotary positions of several axes."""
        return bool(self.sections)

    def for_images(self, *, groups: bool, n_layers: int = 0) -> ModelConfig:
        """Return the configuration for prompts with images.

        groups: tokens of an image see one another. n_layers: as n_image_layers.
        """
        architecture = ARCHITECTURES[self.architecture]
        kind, interleaved = architecture.image_groups, architecture.interleaved_axes
        layers = []
        for layer in self.layers:
            if layer.rope is not None and self.sections:
                layer = replace(layer, rope=with_axes(layer.rope, self.sections, interleaved=interleaved))
            has_groups = groups and layer.mixer is None and (kind == "also" or layer.window > 0)
            layers.append(replace(layer, groups=kind if has_groups else "none"))
        return replace(self, layers=tuple(layers), n_image_layers=n_layers)

    def for_context(self, n_ctx: int) -> ModelConfig:
        """Return the configuration for contexts of n_ctx tokens: their rotation, and an indexer if needed."""
        config = self
        if config.indexing is not None and n_ctx <= config.indexing.n_ctx:
            config = replace(config, indexing=None)
        if config.long_rope is None or n_ctx <= config.long_rope.n_ctx:
            return config
        rope = config.long_rope.rope
        layers = tuple(layer if layer.rope is None else replace(layer, rope=rope) for layer in config.layers)
        return replace(config, layers=layers, long_rope=None)


def config_from_gguf(gguf: GGUFFile, *, activation: str | None = None) -> ModelConfig:
    """Read and check the configuration of a model file.

    activation: overrides the file's or the architecture's (see parse_activation). Raises
    UnsupportedModelError for a valid file that cannot be run, FormatError for an invalid key, and
    InvalidRequestError for an unknown `activation`.
    """
    name, architecture = row_of(gguf)
    keys = Keys(gguf.metadata, name)
    if architecture.experts is None and keys.integer("expert_count", 0, 1 << 16, 0):
        raise UnsupportedModelError(f"mixture-of-experts models of the architecture {name} are not supported")
    if keys.factor("attention.clamp_kqv", 0.0):
        raise UnsupportedModelError(
            f"the model clamps queries, keys and values ({name}.attention.clamp_kqv), which is not supported"
        )
    _check_scales(keys, architecture)
    n_layer = keys.integer("block_count", 1, 1 << 12)
    n_extra_layers = keys.integer("nextn_predict_layers", 0, n_layer - 1, 0)
    n_layer -= n_extra_layers
    n_embd = keys.integer("embedding_length", 1, 1 << 20)
    n_head, n_head_kv, head_dim, head_dim_v = _heads(keys, architecture, n_layer, n_embd)
    n_ctx_train = _context(gguf, keys, architecture)
    override = None if activation is None else parse_activation(activation)
    config = ModelConfig(
        architecture=name,
        layers=_layers(
            gguf, keys, architecture, n_layer, head_dim, n_embd // max(n_head, 1), n_ctx_train, override
        ),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        n_vocab=_vocabulary(gguf),
        n_ctx_train=n_ctx_train,
        **_limits(gguf, keys, architecture, n_layer, head_dim, n_ctx_train),
        norm_eps=_norm_eps(keys, architecture),
        norm=architecture.norm,
        norm_bias=architecture.norm_bias,
        norm_weights=architecture.norm_weights,
        biased=architecture.biased,
        first_position=architecture.first_position,
        embedding_scale=_embedding_scale(keys, architecture, n_embd),
        residual_scale=keys.factor("residual_scale"),
        logit_scale=keys.factor("logit_scale") ** (1 if architecture.multiplies_logits else -1),
        logit_softcap=keys.factor("final_logit_softcapping", 0.0),
        long_rope=long_rope_of(gguf, keys, architecture, head_dim, n_ctx_train),
        latent=_latent(keys, architecture, head_dim),
        altup=_altup(keys) if architecture.altup else None,
        gated_streams=_gated_streams(keys) if architecture.gated_streams else None,
        ngrams=_ngrams(keys, n_layer, _vocabulary(gguf)) if architecture.ngrams else None,
        hyper=_hyper(keys) if architecture.hyper else None,
        compressed=_compressed(keys, n_head, n_head_kv, head_dim, head_dim_v)
        if architecture.compressed
        else None,
        n_embd_layer=keys.integer("embedding_length_per_layer_input", 0, 1 << 16, 0)
        if architecture.window_heads
        else 0,
        predictor_input=architecture.predictor_input,
        sparse_threshold=number(gguf.metadata, SPARSE_THRESHOLD_KEY) or 0.0,
        masked=_masked(gguf.metadata),
        n_extra_layers=n_extra_layers,
        output_norm=architecture.output_norm,
        slopes=_slopes(keys, architecture, n_layer, n_head),
        embedding_norm=architecture.embedding_norm,
        unit_embedding=architecture.unit_embedding,
        post_norm_eps=architecture.post_norm_eps,
        causal=keys.flag("attention.causal", architecture.causal),
        query_gain=_query_gain(keys, architecture),
        sections=_sections(keys),
    )
    if not config.causal and (config.n_recurrent or config.altup is not None):
        raise UnsupportedModelError(
            f"the file is an encoder ({name}.attention.causal is false) with layers that look back only, "
            "which is not supported"
        )
    if any(layer.activation.up is not None and not layer.gated for layer in config.layers):
        what = f"the {name} model's feed-forward network has no gate, so its activation cannot be dReLU"
        raise InvalidRequestError(what) if override else UnsupportedModelError(what)
    return config


def _sections(keys: Keys) -> tuple[int, ...]:
    """Return the sections of rotary positions; empty if the file has none, or only one that is not 0."""
    given = keys.get("rope.dimension_sections")
    found = tuple(int(n) for n in given) if is_array(given) else ()
    return found[:3] if len(found) >= 2 and found[0] > 0 and found[1] > 0 else ()


def _check_scales(keys: Keys, architecture: Architecture) -> None:
    """Raise UnsupportedModelError if required scales are missing, as in files of the first converters."""
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        if architecture.needs_scales and not keys.factor(key, 0.0):
            raise UnsupportedModelError(
                f"the file lacks the key {keys.architecture}.{key}: an old converter wrote it; convert the "
                "checkpoint again"
            )


def _layers(
    gguf: GGUFFile,
    keys: Keys,
    architecture: Architecture,
    n_layer: int,
    head_dim: int,
    narrow_dim: int,
    n_ctx_train: int,
    activation: FFNActivation | None,
) -> tuple[LayerConfig, ...]:
    """Return the configuration of each layer. narrow_dim: n_embd / n_head."""
    windows = _windows(keys, n_layer, architecture)
    # Files in which every layer has experts may omit feed_forward_length.
    of_expert = keys.get("expert_feed_forward_length") if architecture.experts is not None else None
    least = 0 if architecture.state_space else 1
    n_ff = keys.per_layer("feed_forward_length", n_layer, least, 1 << 22, of_expert)
    if architecture.halved_ff:
        n_ff = tuple(n // 2 for n in n_ff)
    experts: tuple[Experts | None, ...] = (None,) * n_layer
    if architecture.experts is not None and keys.integer("expert_count", 0, 1 << 16, 0):
        routed = [f"blk.{i}.ffn_gate_inp.weight" in gguf.tensors for i in range(n_layer)]
        experts, n_ff = experts_of(keys, architecture.experts, routed, n_ff)
        experts = with_tables(gguf, keys, experts)
    scaled_dim = narrow_dim if n_layer == architecture.narrow_scale_at else head_dim
    unscaled = architecture.unscaled or not architecture.attends
    scale = keys.factor("attention.scale", 1.0 if unscaled else 1 / math.sqrt(scaled_dim))
    if architecture.latent_eps is not None:
        scale *= latent_yarn_scale(keys)
    softcap = keys.factor("attn_logit_softcapping", 0.0) if architecture.caps_scores else 0.0
    activation = activation or activation_of(keys, architecture.activation_in(n_layer))
    top_k = top_k_of(keys, n_layer)
    clamps = clamp_of(keys, n_layer)
    xielu = xielu_of(keys, n_layer) if activation.gate == "xielu" else (None,) * n_layer
    shares = architecture.altup or architecture.window_heads
    sources = _sources(keys, windows) if shares else (None,) * n_layer
    heads = _layer_heads(keys, windows, head_dim) if architecture.window_heads else (None,) * n_layer
    block_sizes = _block_sizes(keys, architecture, n_layer)
    rope, windowed = _ropes(gguf, keys, architecture, windows, head_dim, n_ctx_train)
    mixers = mixers_of(gguf, keys, architecture, n_layer)
    result_scales = _result_scales(gguf, keys, architecture, n_layer)
    rotated = _rotated(keys, n_layer, architecture)
    is_windowed = [not size for size in block_sizes] if architecture.compressed else windows
    if architecture.rotates_windows == "always" or (architecture.rotates_windows and any(windows)):
        rope = None
    return tuple(
        LayerConfig(
            n_ff=n_ff[i],
            activation=replace(_clamped(activation, clamps[i]), top_k=top_k[i], xielu=xielu[i]),
            rope=None if not rotated[i] else windowed if is_windowed[i] else rope,
            attention_scale=scale,
            window=windows[i],
            attention_softcap=softcap,
            qk_norm=_qk_norm(gguf, architecture, i),
            qk_norm_last=architecture.qk_norm_last,
            gated=architecture.gated,
            parallel=_parallel(gguf, keys, architecture, i),
            pre_norm=architecture.pre_norm,
            bare=architecture.bare_first and i == 0,
            post_norm=architecture.post_norm,
            ffn_norm=architecture.ffn_norm,
            sinks=architecture.sinks,
            experts=experts[i],
            mixer=None if architecture.one_part and n_ff[i] else mixers[i],
            mixes=not architecture.one_part or not n_ff[i],
            attention_gate=architecture.attention_gate,
            value_norm=architecture.unscaled,
            source=sources[i],
            sub_norms=architecture.sub_norms,
            sum_norms=architecture.sum_norms,
            ffn_tensors=architecture.ffn_tensors,
            heads=heads[i],
            result_scale=result_scales[i],
            block_size=block_sizes[i],
        )
        for i in range(n_layer)
    )


def _ropes(
    gguf: GGUFFile,
    keys: Keys,
    architecture: Architecture,
    windows: tuple[int, ...],
    head_dim: int,
    n_ctx_train: int,
) -> tuple[Rope | None, Rope | None]:
    """Return the rotations of layers without and with a window.

    With compressed keys: of layers with blocks and without blocks.
    """
    if architecture.compressed:
        return _ropes_of_blocks(gguf, keys, architecture, head_dim, n_ctx_train)
    rope = windowed = None
    switched_off = architecture.rope_switch and keys.get("rope.scaling.finetuned", True) is False
    switched_off |= architecture.alibi_at is not None and _alibi(keys, architecture, len(windows)) > 0
    if architecture.rope is not None and not switched_off:
        rope = windowed = rope_of(gguf, keys, architecture, head_dim, n_ctx_train)
        base = architecture.windowed_rope_base
        if architecture.unscaled_windows:
            base = keys.real("rope.freq_base", 1e-3, 1e15, 10000.0)
        if any(windows) and base is not None:
            windowed = windowed_rope_of(keys, architecture, rope, base)
    return rope, windowed


def _clamped(activation: FFNActivation, limit: float) -> FFNActivation:
    """Return SwiGLU with a limit on gate and up."""
    if not limit:
        return activation
    if activation != SILU:
        raise UnsupportedModelError(f"a clamped {activation.gate} is not supported, only SwiGLU")
    return FFNActivation("capped_silu", up="clamp", threshold=limit)


def _block_sizes(keys: Keys, architecture: Architecture, n_layer: int) -> tuple[int, ...]:
    """Return the tokens of a compressed block of keys in each layer; 0: no blocks."""
    if not architecture.compressed:
        return (0,) * n_layer
    return keys.per_layer("attention.compress_ratios", n_layer, 0, MAX_WINDOW, more=True)


def _ropes_of_blocks(
    gguf: GGUFFile, keys: Keys, architecture: Architecture, head_dim: int, n_ctx_train: int
) -> tuple[Rope, Rope]:
    """Return the scaled rotation of layers with compressed blocks, and the unscaled one of the others."""
    key, base = "attention.compress_rope_freq_base", keys.real("rope.freq_base", 1e-3, 1e15, 10000.0)
    of_blocks = rope_of(gguf, keys, architecture, head_dim, n_ctx_train, base_key=key)
    freq = tuple(frequencies(base, of_blocks.n_rot).tolist())
    return replace(of_blocks, magnitude=1.0), Rope(of_blocks.kind, of_blocks.n_rot, freq)


def _layer_heads(keys: Keys, windows: tuple[int, ...], head_dim: int) -> tuple[tuple[int, int] | None, ...]:
    """Return the KV heads of each layer, and the channels of one head."""
    n_head = keys.uniform("attention.head_count", len(windows), 1, 1 << 14)
    of_layers = keys.per_layer("attention.head_count_kv", len(windows), 1, 1 << 14, n_head)
    if any(n_head % n for n in of_layers):
        raise keys.error("attention.head_count_kv", f"has a number that does not divide {n_head} heads")
    _check_heads(n_head // min(of_layers), head_dim)
    dim = window_dim(keys, head_dim)
    return tuple((n, dim if window else head_dim) for n, window in zip(of_layers, windows, strict=True))


def _result_scales(gguf: GGUFFile, keys: Keys, architecture: Architecture, n_layer: int) -> tuple[float, ...]:
    """Return the factor of the stream after each layer."""
    names = [f"blk.{i}.layer_output_scale.weight" for i in range(n_layer)]
    if architecture.window_heads:
        return tuple(float(divisors(gguf, name, 1)[0]) if name in gguf.tensors else 1.0 for name in names)
    halves = keys.integer("rescale_every_n_layers", 0, 1 << 12, 0) if architecture.rwkv == 6 else 0
    return tuple(0.5 if halves and i % halves == 0 else 1.0 for i in range(1, n_layer + 1))


def _kv_heads(keys: Keys, architecture: Architecture, n_layer: int, n_head: int) -> int:
    """Return the KV heads of layers with attention; the key is 0 for layers without."""
    key = "attention.head_count_kv"
    if architecture.window_heads:  # see _layer_heads
        return max(keys.per_layer(key, n_layer, 1, 1 << 14, n_head))
    if architecture.with_attention or not architecture.marks_layers:
        return keys.uniform(key, n_layer, 1, 1 << 14, n_head)
    found = set(keys.per_layer(key, n_layer, 0, 1 << 14, n_head)) - {0}
    if not found:
        raise UnsupportedModelError(f"no layer of the model has attention ({keys.architecture}.{key} is 0)")
    return keys.one(key, found)


def _norm_eps(keys: Keys, architecture: Architecture) -> float:
    """Return the epsilon of norms. Some files only have the key of the other kind of norm."""
    default = architecture.norm_eps
    if architecture.state_space or architecture.any_epsilon:
        default = keys.get(EPSILON_KEYS["layer" if architecture.norm == "rms" else "rms"])
    return keys.real(EPSILON_KEYS[architecture.norm], 0.0, 1.0, default)


def _heads(keys: Keys, architecture: Architecture, n_layer: int, n_embd: int) -> tuple[int, int, int, int]:
    """Return heads of q, heads of k and v, channels of a head of q and k, and of v."""
    if not architecture.attends:
        return 0, 0, 0, 0
    n_head = keys.uniform("attention.head_count", n_layer, 1, 1 << 14)
    n_head_kv = _kv_heads(keys, architecture, n_layer, n_head)
    if n_head % n_head_kv:
        raise keys.error("attention.head_count", f"is {n_head}, not a multiple of the {n_head_kv} KV heads")
    if n_embd % n_head and keys.get("attention.key_length") is None:
        raise keys.error("attention.head_count", f"is {n_head}, which does not divide the width {n_embd}")
    head_dim = keys.integer("attention.key_length", 1, 1 << 14, n_embd // n_head)
    head_dim_v = keys.integer("attention.value_length", 1, 1 << 14, head_dim)
    if architecture.latent_eps is not None:
        # The file's values describe the one head of the latent vector; other keys hold the actual heads.
        n_head_kv = n_head
        if n_head > MAX_LATENT_HEADS:
            raise UnsupportedModelError(
                f"the model has {n_head} heads of a latent vector, but at most {MAX_LATENT_HEADS} are "
                "supported"
            )
        head_dim = keys.integer("attention.key_length_mla", 1, 1 << 14, head_dim)
        head_dim_v = keys.integer("attention.value_length_mla", 1, 1 << 14, head_dim_v)
    _check_heads(n_head // n_head_kv, max(head_dim, head_dim_v))
    return n_head, n_head_kv, head_dim, head_dim_v


def _alibi(keys: Keys, architecture: Architecture, n_layer: int) -> float:
    """Return the bias of ALiBi, 0 in models without it."""
    default = architecture.alibi if architecture.alibi_at in (None, n_layer) else 0.0
    return keys.factor("attention.max_alibi_bias", default or 0.0)


def _slopes(keys: Keys, architecture: Architecture, n_layer: int, n_head: int) -> tuple[float, ...] | None:
    """Return ALiBi's slopes: a geometric sequence down to 2^-bias.

    Heads beyond a power of two use every second number of the next finer sequence.
    """
    bias = _alibi(keys, architecture, n_layer)
    if not bias:
        if architecture.alibi is None:
            raise keys.error("attention.max_alibi_bias", "is missing, and the model has no other positions")
        return None
    whole = 1 << (n_head.bit_length() - 1)
    exponents = [(h + 1) / whole for h in range(whole)]
    exponents += [(2 * h + 1) / (2 * whole) for h in range(n_head - whole)]
    return tuple(2.0 ** (-bias * exponent) for exponent in exponents)


def _latent(keys: Keys, architecture: Architecture, head_dim: int) -> Latent | None:
    if architecture.latent_eps is None:
        return None
    n_rot = keys.integer("rope.dimension_count", 2, head_dim)
    if n_rot == head_dim:
        raise keys.error("rope.dimension_count", f"is {n_rot}, which leaves a head no channel")
    rank = keys.integer("attention.kv_lora_rank", 1, 1 << 20)
    rank_q = keys.integer("attention.q_lora_rank", 0, 1 << 20, 0)
    return Latent(rank, rank_q, n_rot, architecture.latent_eps)


def _altup(keys: Keys) -> AltUp:
    if keys.integer("altup.active_idx", 0, 1 << 10, 0):
        raise UnsupportedModelError(
            f"the file's key {keys.architecture}.altup.active_idx is not 0, which is not supported"
        )
    if keys.get(TOP_K_KEY) is None:  # no architecture implies which layers have it
        raise keys.error(TOP_K_KEY, "is missing")
    n_layer_embd = keys.integer("embedding_length_per_layer_input", 1, 1 << 16)
    return AltUp(keys.integer("altup.num_inputs", 2, MAX_STREAMS), n_layer_embd)


def _gated_streams(keys: Keys) -> GatedStreams:
    n = keys.integer("hyper_connection.count", 2, MAX_STREAMS)
    return GatedStreams(n, keys.integer("hyper_connection.low_rank", 1, 1 << 20))


def _ngrams(keys: Keys, n_layer: int, n_vocab: int) -> Ngrams | None:
    """Return the n-gram embeddings; None if no layer adds any.

    Products of tokens and multipliers stay below 2^63, so that engines with signed numbers agree.
    """
    layers = keys.get("ple.layers")
    if layers is None or (is_array(layers) and not len(layers)):
        return None
    if is_array(layers) and len(layers) > 1:
        raise UnsupportedModelError(
            f"{len(layers)} layers add embeddings of n-grams ({keys.architecture}.ple.layers), "
            "but only one is supported"
        )
    (layer,) = keys.integers("ple.layers", 1, 0, n_layer - 1)
    if n_vocab >= 1 << 24:
        raise UnsupportedModelError("embeddings of n-grams of 2^24 tokens or more are not supported")
    n = keys.integer("ple.ngram_size", 2, MAX_NGRAM)
    n_heads = (n - 1) * keys.integer("ple.heads_per_ngram", 1, MAX_NGRAM_HEADS // (n - 1))
    multipliers = keys.integers("ple.layer_multipliers", n, 0, (1 << 63) // n_vocab - 1)
    sizes = keys.integers("ple.head_vocab_sizes", n_heads, 1, (1 << 31) - 1)
    offsets = keys.integers("ple.head_offsets", n_heads, 0, (1 << 31) - 1)
    kernel = keys.integer("ple.conv_kernel", 1, MAX_CONV_KERNEL)
    eos = keys.integer("ple.eos_token_id", 0, n_vocab - 1)
    width = keys.integer("embedding_length_per_layer_input", 1, 1 << 16)
    return Ngrams(layer, width, kernel, eos, multipliers, sizes, offsets)


def _hyper(keys: Keys) -> Hyper:
    return Hyper(
        keys.integer("hyper_connection.count", 1, MAX_STREAMS),
        keys.real("hyper_connection.epsilon", 0.0, 1.0),
        keys.integer("hyper_connection.sinkhorn_iterations", 1, 1 << 10),
    )


def _compressed(keys: Keys, n_head: int, n_head_kv: int, head_dim: int, head_dim_v: int) -> Compressed:
    n_rot = keys.integer("rope.dimension_count", 2, head_dim)
    n_groups = keys.integer("attention.output_group_count", 1, n_head)
    if n_head % n_groups:
        raise keys.error(
            "attention.output_group_count", f"is {n_groups}, which does not divide {n_head} heads"
        )
    if n_head_kv != 1:
        raise keys.error("attention.head_count_kv", "is not 1")
    if head_dim_v != head_dim:
        raise keys.error("attention.value_length", f"is not attention.key_length, {head_dim}")
    rank_q = keys.integer("attention.q_lora_rank", 1, 1 << 20)
    return Compressed(rank_q, n_rot, n_groups, keys.integer("attention.output_lora_rank", 1, 1 << 20))


def _sources(keys: Keys, windows: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return for each of the last layers the last earlier layer of its kind (with or without a window)."""
    n_own = len(windows) - keys.integer("attention.shared_kv_layers", 0, len(windows) - 1, 0)
    last = {bool(window): i for i, window in enumerate(windows[:n_own])}
    if any(bool(window) not in last for window in windows):
        raise keys.error("attention.shared_kv_layers", "leaves no layer whose keys and values are shared")
    return tuple(None if i < n_own else last[bool(window)] for i, window in enumerate(windows))


def _check_heads(group: int, head_dim: int) -> None:
    """Raise UnsupportedModelError if heads are too large. group: query heads per KV head."""
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"the model has heads of {head_dim} channels, but at most {MAX_HEAD_DIM} are supported"
        )
    if group > MAX_GROUP:
        raise UnsupportedModelError(
            f"the model has {group} query heads for each KV head, but at most {MAX_GROUP} are supported"
        )


def _context(gguf: GGUFFile, keys: Keys, architecture: Architecture) -> int:
    """Return the context length of the file's key, or the number of learned positions."""
    positions = gguf.tensors.get("position_embd.weight")
    if architecture.first_position is None or positions is None:  # the decoder reports a missing tensor
        return keys.integer("context_length", 1, 1 << 31)
    n_rows = int(positions.shape[-1])
    if n_rows <= architecture.first_position:
        raise FormatError(f"the tensor position_embd.weight has only {n_rows} rows; the file is damaged")
    return n_rows - architecture.first_position


def _embedding_scale(keys: Keys, architecture: Architecture, n_embd: int) -> float:
    return math.sqrt(n_embd) if architecture.scaled_embedding else keys.factor("embedding_scale")


def _query_gain(keys: Keys, architecture: Architecture) -> tuple[float, int] | None:
    """Return beta and length of the gain of queries; None: no gain."""
    if architecture.tempered is None:
        return None
    beta = keys.real("attention.temperature_scale", 0.0, 1e3, 0.0)
    return (beta, keys.integer(architecture.tempered, 1, (1 << 31) - 1)) if beta else None


def _limits(
    gguf: GGUFFile, keys: Keys, architecture: Architecture, n_layer: int, head_dim: int, n_ctx_train: int
) -> dict[str, Any]:
    """Return the indexer and the longest context, in tokens, that hotset computes as the model defines it."""
    if architecture.first_position is not None:
        return {"n_ctx_max": n_ctx_train}
    indexing = indexing_of(gguf, keys, architecture, n_layer, head_dim)
    if indexing is None or indexing.is_stored(gguf.tensors):
        return {"indexing": indexing}
    return {"n_ctx_max": indexing.n_ctx}


def _masked(metadata: Mapping[str, Any]) -> bool:
    value = metadata.get(PREDICTOR_MASKS_KEY, False)
    if not isinstance(value, bool | np.bool_):
        raise FormatError(f"the file's key {PREDICTOR_MASKS_KEY} must be true or false, not {shown(value)}")
    return bool(value)


def _vocabulary(gguf: GGUFFile) -> int:
    """Return the rows of the token embedding. The key vocab_size is optional, and wrong in some files."""
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModelError("the file has no tensor token_embd.weight: it is not a complete model")
    if len(embedding.shape) != 2:
        raise FormatError(f"the tensor token_embd.weight must be a matrix, not {list(embedding.shape)}")
    n_vocab = int(embedding.shape[1])
    tokens = gguf.metadata.get("tokenizer.ggml.tokens", ())
    if is_array(tokens) and len(tokens) > n_vocab:  # type: ignore[arg-type]
        raise FormatError(f"the tokenizer has {len(tokens)} tokens, the embedding only {n_vocab} rows")  # type: ignore[arg-type]
    return n_vocab


def _qk_norm(gguf: GGUFFile, architecture: Architecture, layer: int) -> HeadNorm | None:
    is_there = f"blk.{layer}.attn_q_norm.weight" in gguf.tensors
    return architecture.qk_norm if is_there or not architecture.optional_qk_norm else None


def _parallel(gguf: GGUFFile, keys: Keys, architecture: Architecture, layer: int) -> bool:
    match architecture.parallel:
        case "by_key":
            return keys.flag("use_parallel_residual", True)
        case "without_ffn_norm":
            return f"blk.{layer}.{architecture.ffn_norm}.weight" not in gguf.tensors
    return architecture.parallel is not None


def _windows(keys: Keys, n_layer: int, architecture: Architecture) -> tuple[int, ...]:
    """Return each layer's window; 0: no window.

    The pattern has a truth value per layer, or is a number n: one layer in n has no window. Without a
    pattern, n is the architecture's window_period; 0: all layers have the window.
    """
    period = architecture.window_period
    window = keys.integer("attention.sliding_window", 0, MAX_WINDOW, 0)
    if window and architecture.unwindowed:
        raise UnsupportedModelError(
            f"the file's key {keys.architecture}.attention.sliding_window is {window}: windows of this "
            "architecture are not supported"
        )
    pattern = keys.get("attention.sliding_window_pattern", period or None)
    if pattern is None:
        return (window,) * n_layer
    if not is_array(pattern):
        period = keys.integer("attention.sliding_window_pattern", 1, 1 << 12, period or None)
        without = 0 if architecture.window_last else period - 1
        return tuple(0 if i % period == without else window for i in range(n_layer))
    flags = keys.flags("attention.sliding_window_pattern", n_layer)
    return tuple(window if windowed else 0 for windowed in flags)


def _rotated(keys: Keys, n_layer: int, architecture: Architecture) -> tuple[bool, ...]:
    """Return whether each layer rotates queries and keys: from the file's pattern, or the architecture."""
    if keys.get("attention.rope_pattern") is not None:
        return keys.flags("attention.rope_pattern", n_layer)
    period = architecture.unrotated_period
    return tuple(not period or i % period != period - 1 for i in range(n_layer))
