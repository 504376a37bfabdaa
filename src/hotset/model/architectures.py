"""The table of architectures: facts that all files of one architecture share and that no key states.

PowerInfer's files have separate rows, because they use the same names with other meanings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hotset.errors import FormatError, UnsupportedModelError
from hotset.model.activation import (
    CLAMPED,
    DRELU,
    GELU,
    GELU_TANH,
    RELU,
    RELU2,
    SILU,
    XIELU_OF_LAYERS,
    FFNActivation,
)
from hotset.model.keys import NormKind
from hotset.model.operations import Groups, RopeKind, Scoring
from hotset.parameters import shown

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile

PredictorInput = Literal["ffn_inp", "layer_input"]
Parallel = Literal["always", "by_key", "without_ffn_norm"]
HeadNorm = Literal["head", "width"]


@dataclass(frozen=True)
class ExpertDefaults:
    """Defaults for files with experts of one architecture.

    scoring, normalised: see operations.Route.
    gated_share: the shared expert's result is multiplied by the sigmoid of a separate product.
    early: the router reads the layer's input before attention, without a norm; otherwise it reads the
        experts' input.
    where_routed: the layers with a router have experts; no key lists them.
    with_ffn: the experts are added to the layer's own FFN, which acts as the shared expert. Both have
        separate norms before and after, the router reads the stream through a norm without weights and a
        scale per channel, and each expert has a scale (Gemma 4).
    optional: dense models exist under the same name.
    group_best: how many of the best scores are summed to rank a group of experts; None: 1 for softmax scores
        (DeepSeek V2), 2 for others (V3).
    """

    scoring: Scoring = "softmax"
    normalised: bool = True
    gated_share: bool = False
    early: bool = False
    where_routed: bool = False
    with_ffn: bool = False
    optional: bool = False
    group_best: int | None = None


@dataclass(frozen=True)
class Architecture:
    """Facts that every file of one `general.architecture` shares and that no key states.

    rope: the layout for which the rows of attn_q and attn_k are stored; None: no rotation.
    first_position: row of position 0 in the learned positions `position_embd`; None: no learned positions.
    norm: rms or layer. norm_bias: layer norms must have a bias; otherwise a bias is optional.
    norm_eps: epsilon of files without a key for it; None: the key is required. any_epsilon: the key of the
      other kind of norm is accepted too. norm_weights: layer norms have weights.
    qk_norm: a norm of q and k before the rotation (`attn_q_norm`, `attn_k_norm`), of each head or of all
      heads as one row; None: no norm. It is an RMS norm, or a layer norm per head in models with layer norms.
      optional_qk_norm: only in layers that have its tensors. qk_norm_last: the norm follows the rotation.
    gated: the FFN has a gate in addition to up. activation: of the FFN, if the file names none.
    parallel: the FFN reads the layer's input, through `ffn_norm`, or through `attn_norm` in layers without
      `ffn_norm`. (Attention then reads `attn_norm_2`, or `attn_norm` if that is missing.) by_key: if
      use_parallel_residual says so; without_ffn_norm: in layers that lack the norm. None: the FFN reads the
      sum after attention, through `ffn_norm`.
    biased: tensors of a layer that must have a bias; the bias of other tensors is optional.
    pre_norm: attention and the FFN read the stream through a norm. post_norm: their results pass a norm
      before they are added. post_norm_eps: epsilon of these norms; None: the other norms' epsilon.
    ffn_norm: the tensor of the norm before the FFN.
    sinks: a score per head takes part in the softmax of attention (`attn_sinks`).
    window_period: for files with a window but no pattern, one layer in this many has no window: the last of
      them, or the first (window_last); 0: all layers have the window. rotates_windows: layers without a
      window have no rotation, always or if other layers have a window.
    unrotated_period: for files without attention.rope_pattern, one layer in this many has no rotation; 0: all
      have one. rope_switch: if the key rope.scaling.finetuned is false, no layer has one.
    rounded_yarn: the start and end of YaRN's ramp are rounded to whole pairs of channels. windowed_rope_base:
      base of the rotation in layers with a window, if the file has no key for it; None: they rotate like the
      others. unscaled_windows: they have the others' base, without its scaling.
    caps_scores: the file's cap on scores applies (Gemma 3 has none, whatever config.json or the file says).
    scaled_embedding: the embedding is multiplied by the root of the width. multiplies_logits: logits are
      multiplied by the file's logit_scale, not divided. needs_scales: the file must have the scales of the
      embedding, of the results added to the stream, and of the logits.
    halved_ff: the file's feed_forward_length is twice the width of the FFN. unwindowed: the file's window is
      of an unsupported kind, or an indexer chooses the keys instead.
    narrow_scale_at: in models with this many layers, the scale of scores is based on n_embd / n_head, not on
      the width of a head.
    latent_eps: epsilon of the latent vectors' norms in models with MLA (see config.Latent), regardless of the
      file's epsilon; None: no MLA.
    tempered: queries grow with their position (attention.temperature_scale), one step per length given by
      this key (see operations.PositionGain); None: they do not. indexer: an indexer chooses the keys that a
      token attends to, if there are more than attention.indexer.top_k (see config.Indexing); the layout in
      which its queries and keys are rotated. None: no indexer. shared_indexers: a layer may use the choice of
      an earlier layer (attention.indexer.types).
    predictor_input: the input of a published predictor (fc1, fc2): the residual stream after attention or at
      the layer's input, never the normalised input of the FFN.
    experts: defaults of files with experts; None: the architecture has none.
    output_norm: the tensor of the last norm; None: no norm.
    short_conv: layers without KV heads have a short convolution instead of attention.
    state_space: layers without KV heads have a Mamba-2 state space instead, and layers whose
      feed_forward_length is 0 have no FFN. one_part: layers with an FFN have nothing else. by_channel: the
      state space is the first Mamba's. with_attention: every layer has both attention and a state
      space, with the same input. attends: False: no layer has attention; all have the state space, or (rwkv)
      the time mix of this version of RWKV.
    ffn_tensors: names of up and down.
    delta_net: layers have a gated delta net instead of attention, except each fourth or those that the file
      names. Heads of values that share a key are adjacent (grouped) or n_head_k apart (tiled). channels:
      layers without KV heads have a delta net whose keys decay per channel (Kimi Linear).
    sub_norms: the results of heads and neurons pass a norm before attn_output and ffn_down. activation_at:
      among files that name no activation, only models with this many layers have `activation`, and the others
      silu; None: all have it.
    alibi: maximal bias of files without the key attention.max_alibi_bias (see operations.Attention.slopes);
      0: no ALiBi; None: the key is required. alibi_at: only models with this many layers, and files with the
      key, have ALiBi instead of a rotation; None: all.
    embedding_norm: the embedding passes a norm (`token_embd_norm`), after positions and token types are
      added. unit_embedding: the norm has no weights.
    causal: a token sees no later token, unless the file's attention.causal differs. A model that is not
      causal is an encoder: it has no logits; its result is the hidden states, after `output_norm` if there is
      one.
    sum_norms: the sums after attention and after the FFN pass a norm (`attn_output_norm`,
    `layer_output_norm`). bare_first: the first layer's attention reads the stream without a norm.
    compared_with: the reference of the tests, with tiny random models.
    nextn: the kind of the last norm in the layers for multi-token prediction (nextn_predict_layers, see
      decoder.describe_nextn), which otherwise equal the model's last layer with attention; None: not
      supported.
    interleaved_axes: pairs of channels take turns between the axes of a rotary position; otherwise each axis
      has a section of pairs.
    delta_gate: the activation of a gated delta net's output gate.
    gated_streams, ngrams: see config.GatedStreams and config.Ngrams (Qwen4-Exp).
    attention_gate: the result of a head is multiplied by the sigmoid of a gate, computed by attn_gate or, in
      layers without it, by rows of attn_q after the head's query.
    unscaled: scores are q · k without a scale, and values pass a norm without weights (Gemma 3n).
    altup: layers have several residual streams, a low-rank branch and a per-layer embedding of each token,
      and the last layers attend to other layers' keys and values (see AltUp and LayerConfig.source).
    hyper: layers have several residual streams, which each part of a layer reads, writes and mixes (see
      Hyper). compressed: attention has one head of keys that are also its values, and keys of compressed
      blocks (see Compressed). If blocks overlap, the indexer chooses among them.
    window_heads: heads of layers with a window have another size, the number of KV heads differs between
      layers, and layers without attn_v use keys as values; layers may have a per-layer embedding of each
      token and a scale of their result (`layer_output_scale`), and the last ones may attend to other layers'
      keys and values (Gemma 4).
    image_groups: which tokens of an image see one another if its encoder wants that: "also", in all layers,
      or "ahead", in layers with a window, which still bounds the tokens before (see operations.Attention).
    """

    rope: RopeKind | None = "norm"
    first_position: int | None = None
    norm: NormKind = "rms"
    norm_bias: bool = True
    norm_eps: float | None = None
    any_epsilon: bool = False
    norm_weights: bool = True
    qk_norm: HeadNorm | None = None
    optional_qk_norm: bool = False
    qk_norm_last: bool = False
    gated: bool = True
    activation: FFNActivation = SILU
    parallel: Parallel | None = None
    biased: tuple[str, ...] = ()
    pre_norm: bool = True
    post_norm: bool = False
    post_norm_eps: float | None = None
    ffn_norm: str = "ffn_norm"
    sinks: bool = False
    window_period: int = 0
    window_last: bool = False
    rotates_windows: Literal["always", "if_any"] | None = None
    unrotated_period: int = 0
    rope_switch: bool = False
    rounded_yarn: bool = True
    windowed_rope_base: float | None = None
    unscaled_windows: bool = False
    caps_scores: bool = True
    scaled_embedding: bool = False
    multiplies_logits: bool = False
    needs_scales: bool = False
    halved_ff: bool = False
    unwindowed: bool = False
    narrow_scale_at: int | None = None
    latent_eps: float | None = None
    tempered: str | None = None
    indexer: RopeKind | None = None
    shared_indexers: bool = False
    predictor_input: PredictorInput = "ffn_inp"
    experts: ExpertDefaults | None = None
    output_norm: str | None = "output_norm"
    short_conv: bool = False
    state_space: bool = False
    by_channel: bool = False
    with_attention: bool = False
    attends: bool = True
    rwkv: int | None = None
    ffn_tensors: tuple[str, str] = ("ffn_up", "ffn_down")
    one_part: bool = False
    delta_net: Literal["grouped", "tiled", "channels"] | None = None
    delta_gate: Literal["silu", "sigmoid"] = "silu"
    gated_streams: bool = False
    ngrams: bool = False
    attention_gate: bool = False
    unscaled: bool = False
    altup: bool = False
    hyper: bool = False
    compressed: bool = False
    window_heads: bool = False
    image_groups: Groups = "also"
    sub_norms: bool = False
    activation_at: int | None = None
    alibi: float | None = 0.0
    alibi_at: int | None = None
    embedding_norm: bool = False
    unit_embedding: bool = False
    causal: bool = True
    sum_norms: bool = False
    bare_first: bool = False
    nextn: NormKind | None = None
    interleaved_axes: bool = False
    compared_with: str = "transformers"

    @property
    def marks_layers(self) -> bool:
        """Return whether layers without KV heads have another token mixer instead of attention."""
        return self.short_conv or self.state_space or self.delta_net == "channels"

    def activation_in(self, n_layer: int) -> FFNActivation:
        """Return the activation of a model with n_layer layers whose file names none."""
        return self.activation if self.activation_at in (None, n_layer) else SILU


_QKV = ("attn_q", "attn_k", "attn_v")
_RWKV: dict[str, Any] = {
    "rope": None, "norm": "layer", "norm_eps": 1e-5, "embedding_norm": True, "gated": False,
    "activation": RELU2, "ffn_norm": "attn_norm_2", "attends": False,
    "ffn_tensors": ("channel_mix_key", "channel_mix_value"), "compared_with": "a copy of the authors' code",
}  # fmt: skip
_SAME_GRAPH = "transformers' {}, of the same graph"
_ENCODER: dict[str, Any] = {  # as BERT
    "pre_norm": False, "sum_norms": True, "embedding_norm": True, "causal": False, "output_norm": None
}  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(experts=ExpertDefaults(optional=True)),  # Llama 1 to 3.x, Mistral, SmolLM; Mixtral
    "qwen2": Architecture(rope="neox", biased=_QKV),
    "qwen2moe": Architecture(
        rope="neox", biased=_QKV, experts=ExpertDefaults(normalised=False, gated_share=True)
    ),
    "qwen3": Architecture(rope="neox", qk_norm="head"),
    "qwen3moe": Architecture(rope="neox", qk_norm="head", experts=ExpertDefaults()),
    "olmoe": Architecture(rope="neox", qk_norm="width", experts=ExpertDefaults(normalised=False)),
    "bamboo": Architecture(activation=DRELU, compared_with="transformers' Llama, with dReLU"),
    "falcon": Architecture(
        rope="neox", norm="layer", gated=False, activation=GELU, parallel="always",
        predictor_input="layer_input",
    ),
    "opt": Architecture(
        rope=None, first_position=2, norm="layer", norm_eps=1e-5, gated=False, activation=RELU,
        biased=(*_QKV, "attn_output", "ffn_up", "ffn_down"),
    ),
    "nemotron": Architecture(rope="neox", norm="layer", gated=False, activation=RELU2),
    "jais2": Architecture(rope="neox", norm="layer", gated=False, activation=RELU2),
    "arcee": Architecture(gated=False, activation=RELU2),
    "gpt2": Architecture(
        rope=None, first_position=0, norm="layer", gated=False, activation=GELU_TANH,
        biased=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "gptneox": Architecture(rope="neox", norm="layer", gated=False, activation=GELU, parallel="by_key"),
    "phi2": Architecture(
        rope="neox", norm="layer", gated=False, activation=GELU_TANH, parallel="always",
        biased=("attn_output", "ffn_up", "ffn_down", "output"),
    ),
    "starcoder2": Architecture(rope="neox", norm="layer", gated=False, activation=GELU_TANH),
    "stablelm": Architecture(  # heads of the 12B have norms
        rope="neox", norm="layer", parallel="without_ffn_norm", qk_norm="head", optional_qk_norm=True,
    ),
    "command-r": Architecture(  # and R+, whose queries and keys have norms
        norm="layer", norm_bias=False, parallel="always", multiplies_logits=True, qk_norm="head",
        optional_qk_norm=True,
    ),
    "cohere2": Architecture(
        norm="layer", norm_bias=False, parallel="always", multiplies_logits=True, window_period=4,
        rotates_windows="always",
    ),
    "gemma": Architecture(rope="neox", activation=GELU_TANH, scaled_embedding=True),
    "gemma2": Architecture(
        rope="neox", activation=GELU_TANH, post_norm=True, window_period=2, scaled_embedding=True,
        narrow_scale_at=46,
    ),
    "phi3": Architecture(rope="neox"),
    "granite": Architecture(rope_switch=True),
    "granitemoe": Architecture(rope_switch=True, experts=ExpertDefaults()),
    "granite_swa": Architecture(
        sinks=True, window_period=4, window_last=True, experts=ExpertDefaults(optional=True)
    ),
    "smollm3": Architecture(unrotated_period=4),
    "glm4": Architecture(post_norm=True),
    "gemma3": Architecture(
        rope="neox", qk_norm="head", activation=GELU_TANH, post_norm=True, window_period=6,
        windowed_rope_base=10000.0, caps_scores=False, scaled_embedding=True, narrow_scale_at=62,
    ),
    "gemma3n": Architecture(
        rope="neox", qk_norm="head", activation=GELU_TANH, post_norm=True, window_period=5,
        windowed_rope_base=10000.0, scaled_embedding=True, unscaled=True, altup=True,
    ),
    "gemma4": Architecture(
        rope="neox", qk_norm="head", activation=GELU_TANH, post_norm=True, window_period=6,
        windowed_rope_base=10000.0, caps_scores=False, scaled_embedding=True, unscaled=True,
        window_heads=True, image_groups="ahead",
        experts=ExpertDefaults(where_routed=True, with_ffn=True, optional=True),
    ),
    "seed_oss": Architecture(rope="neox", ffn_norm="post_attention_norm"),
    "ernie4_5": Architecture(),
    "ernie4_5-moe": Architecture(experts=ExpertDefaults()),
    "chatglm": Architecture(),
    "olmo2": Architecture(  # and Olmo 3, which has windows
        rope="neox", qk_norm="width", pre_norm=False, post_norm=True, window_period=4, unscaled_windows=True,
    ),
    "exaone4": Architecture(
        rope="neox", qk_norm="head", pre_norm=False, post_norm=True, window_period=4,
        rotates_windows="if_any",
    ),
    "exaone-moe": Architecture(
        rope="neox", qk_norm="head", window_period=4, rotates_windows="if_any",
        experts=ExpertDefaults(scoring="sigmoid"),
    ),
    "hunyuan-dense": Architecture(rope="neox", qk_norm="head", qk_norm_last=True),
    "hunyuan-moe": Architecture(rope="neox", qk_norm="head", qk_norm_last=True, experts=ExpertDefaults()),
    "mistral3": Architecture(
        tempered="rope.scaling.original_context_length", experts=ExpertDefaults(optional=True)
    ),
    "qwen2vl": Architecture(rope="neox", biased=_QKV),
    "qwen3vl": Architecture(rope="neox", qk_norm="head", interleaved_axes=True),
    "qwen3vlmoe": Architecture(rope="neox", qk_norm="head", interleaved_axes=True, experts=ExpertDefaults()),
    "minimax-m2": Architecture(rope="neox", qk_norm="width", experts=ExpertDefaults(scoring="sigmoid")),
    "dots1": Architecture(rope="neox", qk_norm="head", experts=ExpertDefaults(scoring="sigmoid")),
    "afmoe": Architecture(
        rope="neox", qk_norm="head", post_norm=True, scaled_embedding=True, attention_gate=True,
        window_period=4, rotates_windows="always", experts=ExpertDefaults(scoring="sigmoid"),
    ),
    "muse-glimmer": Architecture(
        qk_norm="head", post_norm=True, post_norm_eps=1e-8, unit_embedding=True, attention_gate=True,
        window_period=4, rotates_windows="always", multiplies_logits=True,
    ),
    "smallthinker": Architecture(
        rope="neox", activation=RELU, window_period=4, window_last=True, rotates_windows="if_any",
        experts=ExpertDefaults(scoring="sigmoid", early=True), compared_with="a copy of the authors' code",
    ),
    "gpt-oss": Architecture(
        rope="neox", activation=CLAMPED, biased=(*_QKV, "attn_output", "ffn_gate_inp"), sinks=True,
        ffn_norm="post_attention_norm", window_period=2, rounded_yarn=False,
        experts=ExpertDefaults(scoring="softmax_chosen", normalised=False),
    ),
    "glm4moe": Architecture(
        rope="neox", qk_norm="head", optional_qk_norm=True, ffn_norm="post_attention_norm",
        experts=ExpertDefaults(scoring="sigmoid"), nextn="rms",
    ),
    "deepseek": Architecture(
        experts=ExpertDefaults(normalised=False), compared_with="transformers' Llama, with its experts"
    ),
    "deepseek2": Architecture(  # V2, V3, Kimi K2, Mistral Large 3
        latent_eps=1e-6, tempered="attention.temperature_length", experts=ExpertDefaults(normalised=False),
        nextn="rms",
    ),
    "plm": Architecture(
        latent_eps=1e-6, gated=False, activation=RELU2,
        compared_with="transformers' DeepseekV2, with an FFN without a gate",
    ),
    "mistral4": Architecture(
        latent_eps=1e-6, tempered="attention.temperature_length",
        experts=ExpertDefaults(optional=True, group_best=2),
    ),
    "deepseek32": Architecture(
        latent_eps=1e-6, indexer="neox", unwindowed=True, experts=ExpertDefaults(scoring="sigmoid"),
    ),
    "glm-dsa": Architecture(
        latent_eps=1e-6, indexer="norm", shared_indexers=True, unwindowed=True,
        experts=ExpertDefaults(scoring="sigmoid"),
    ),
    "deepseek4": Architecture(  # V4
        sinks=True, hyper=True, compressed=True, indexer="norm",
        experts=ExpertDefaults(scoring="sqrt_softplus"),
    ),
    "mpt": Architecture(
        rope=None, norm="layer", norm_bias=False, gated=False, activation=GELU, alibi=None
    ),
    "bloom": Architecture(
        rope=None, norm="layer", gated=False, activation=GELU_TANH, embedding_norm=True, alibi=8.0,
        biased=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "baichuan": Architecture(  # 13B has 40 layers, and ALiBi in place of a rotation
        alibi=8.0, alibi_at=40, compared_with="transformers' Llama, with ALiBi",
    ),
    "refact": Architecture(  # its norms subtract the mean, although its epsilon has the key of RMS norms
        rope=None, norm="layer", norm_bias=False, any_epsilon=True, alibi=8.0,
        compared_with="transformers' Llama, with ALiBi and layer norms",
    ),
    "olmo": Architecture(norm="layer", norm_weights=False),
    "apertus": Architecture(rope="neox", qk_norm="head", gated=False, activation=XIELU_OF_LAYERS),
    "bitnet": Architecture(  # 2B-4T has 30 layers; earlier reproductions of BitNet's paper use silu
        rope="neox", activation=RELU2, activation_at=30, sub_norms=True,
    ),
    **dict.fromkeys(  # bitnet.cpp's names of 2B-4T
        ("bitnet-25", "bitnet-b1.58"),
        Architecture(
            rope="neox", activation=RELU2, sub_norms=True, compared_with=_SAME_GRAPH.format("BitNet")
        ),
    ),
    "lfm2": Architecture(
        rope="neox", qk_norm="head", output_norm="token_embd_norm", short_conv=True,
    ),
    "lfm2moe": Architecture(
        rope="neox", qk_norm="head", output_norm="token_embd_norm", short_conv=True,
        experts=ExpertDefaults(scoring="sigmoid"),
    ),
    "nemotron_h": Architecture(
        rope=None, gated=False, activation=RELU2, ffn_norm="attn_norm", state_space=True, one_part=True
    ),
    "nemotron_h_moe": Architecture(
        rope=None, gated=False, activation=RELU2, ffn_norm="attn_norm", state_space=True, one_part=True,
        experts=ExpertDefaults(scoring="sigmoid", normalised=False, where_routed=True), nextn="layer",
    ),
    "granitehybrid": Architecture(
        rope_switch=True, state_space=True, experts=ExpertDefaults(optional=True)
    ),
    "falcon-h1": Architecture(rope="neox", state_space=True, with_attention=True),
    "mamba": Architecture(rope=None, state_space=True, by_channel=True, attends=False),
    "jamba": Architecture(
        rope=None, state_space=True, by_channel=True,
        experts=ExpertDefaults(normalised=False, where_routed=True, optional=True),
    ),
    "rwkv6": Architecture(**_RWKV, rwkv=6),
    "rwkv7": Architecture(**_RWKV, rwkv=7),
    "mamba2": Architecture(rope=None, state_space=True, attends=False),
    "qwen3next": Architecture(
        rope="neox", qk_norm="head", ffn_norm="post_attention_norm", delta_net="grouped", attention_gate=True,
        experts=ExpertDefaults(gated_share=True), nextn="rms",
    ),
    "qwen35": Architecture(
        rope="neox", qk_norm="head", ffn_norm="post_attention_norm", delta_net="tiled", attention_gate=True,
        nextn="rms", interleaved_axes=True,
    ),
    "qwen35moe": Architecture(
        rope="neox", qk_norm="head", ffn_norm="post_attention_norm", delta_net="tiled", attention_gate=True,
        experts=ExpertDefaults(gated_share=True), nextn="rms", interleaved_axes=True,
    ),
    "qwen4exp": Architecture(
        rope="neox", qk_norm="head", pre_norm=False, output_norm="output_hc", delta_net="tiled",
        delta_gate="sigmoid", attention_gate=True, gated_streams=True, ngrams=True, indexer="neox",
        unwindowed=True, experts=ExpertDefaults(gated_share=True),
    ),
    "kimi-linear": Architecture(
        rope=None, latent_eps=1e-6, delta_net="channels", experts=ExpertDefaults(scoring="sigmoid"),
    ),
    "mellum": Architecture(
        rope="neox", qk_norm="head", window_period=4, unscaled_windows=True, experts=ExpertDefaults(),
    ),
    "xverse": Architecture(compared_with=_SAME_GRAPH.format("Llama")),
    "internlm2": Architecture(compared_with=_SAME_GRAPH.format("Llama")),
    "orion": Architecture(rope="neox", norm="layer", compared_with=_SAME_GRAPH.format("StableLm")),
    "pangu-embedded": Architecture(rope="neox", compared_with=_SAME_GRAPH.format("Llama")),
    "exaone": Architecture(rope="neox", compared_with=_SAME_GRAPH.format("Llama")),
    "minicpm": Architecture(needs_scales=True, compared_with=_SAME_GRAPH.format("Granite")),
    "starcoder": Architecture(
        rope=None, first_position=0, norm="layer", gated=False, activation=GELU_TANH,
        biased=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "codeshell": Architecture(
        rope="neox", norm="layer", gated=False, activation=GELU_TANH,
        biased=("attn_output", "ffn_up", "ffn_down"), compared_with=_SAME_GRAPH.format("Starcoder2"),
    ),
    "qwen": Architecture(
        rope="neox", biased=("attn_qkv",), halved_ff=True, compared_with=_SAME_GRAPH.format("Qwen2")
    ),
    "paddleocr": Architecture(rope="neox"),
    "hunyuan_vl": Architecture(rope="neox", qk_norm="head", qk_norm_last=True),
    "maincoder": Architecture(
        qk_norm="head", qk_norm_last=True, compared_with=_SAME_GRAPH.format("HunYuanDenseV1")
    ),
    "plamo": Architecture(
        rope="neox", parallel="always", compared_with="transformers' Llama, with parallel layers"
    ),
    "deepseek2-ocr": Architecture(
        rope="neox", experts=ExpertDefaults(normalised=False), unwindowed=True,
        compared_with="transformers' Llama, with its experts",
    ),
    "bailingmoe": Architecture(
        experts=ExpertDefaults(normalised=False), compared_with="transformers' Llama, with its experts"
    ),
    "bailingmoe2": Architecture(
        rope="neox", qk_norm="head", experts=ExpertDefaults(scoring="sigmoid", normalised=False),
        compared_with=_SAME_GRAPH.format("Glm4Moe"),
    ),
    "hy_v3": Architecture(
        rope="neox", qk_norm="head", experts=ExpertDefaults(scoring="sigmoid", where_routed=True)
    ),
    "gemma-embedding": Architecture(
        rope="neox", qk_norm="head", activation=GELU_TANH, post_norm=True, window_period=6,
        windowed_rope_base=10000.0, caps_scores=False, scaled_embedding=True, causal=False,
    ),
    "bert": Architecture(  # also XLM-RoBERTa, whose files lack the positions before a text's first token
        rope=None, first_position=0, norm="layer", gated=False, activation=GELU, **_ENCODER,
    ),
    "nomic-bert": Architecture(rope="neox", norm="layer", **_ENCODER),
    "modern-bert": Architecture(
        rope="neox", norm="layer", norm_bias=False, activation=GELU, embedding_norm=True, bare_first=True,
        window_period=3, window_last=True, windowed_rope_base=10000.0, causal=False,
    ),
    "eurobert": Architecture(rope="neox", causal=False),
    "jina-bert-v3": Architecture(
        rope="neox", norm="layer", gated=False, activation=GELU, **_ENCODER
    ),
    "nomic-bert-moe": Architecture(
        rope="neox", norm="layer", gated=False, activation=GELU, **_ENCODER,
        compared_with="a copy of the authors' code",
        experts=ExpertDefaults(normalised=False, where_routed=True),
    ),
    "jina-bert-v2": Architecture(
        rope=None, norm="layer", activation=GELU, alibi=8.0, **_ENCODER,
        compared_with="a copy of the authors' code",
    ),
}  # fmt: skip
POWERINFER_ARCHITECTURES: dict[str, Architecture] = {
    "llama": replace(ARCHITECTURES["llama"], activation=RELU),  # ReluLLaMA, ProSparse: never SiLU
    "bamboo": ARCHITECTURES["bamboo"],
    "falcon": replace(ARCHITECTURES["falcon"], activation=RELU),
    "opt": ARCHITECTURES["opt"],
}
"""The rows for files in PowerInfer's format."""


REFUSED = {
    "phimoe": "engines compute another function than it was trained with (RMS norms and a plain softmax "
    "in place of layer norms and two masked ones)",
}
"""Known architectures that hotset does not compute, with the reason."""


NO_MODELS = {
    "adapter": "an adapter (LoRA): name the model that it belongs to, and this file with `lora`",
    "imatrix": "an importance matrix, which `hotset quantize --imatrix` takes",
    "mmproj": "a projector of images, which hotset does not use: name the file of the language model",
}
"""Values of `general.type` of files that users mistake for a model, with a description of each."""


class UnknownArchitectureError(UnsupportedModelError):
    """An architecture without a row in ARCHITECTURES."""


def row_of(gguf: GGUFFile) -> tuple[str, Architecture]:
    """Return the name of a file's architecture and its row. Raises UnsupportedModelError and FormatError."""
    kind = gguf.metadata.get("general.type")
    if isinstance(kind, str) and kind in NO_MODELS:
        raise UnsupportedModelError(f"the file is not a model but {NO_MODELS[kind]}")
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FormatError("the file has no key general.architecture: it is not a model, or it is damaged")
    rows = POWERINFER_ARCHITECTURES if gguf.dialect == "powerinfer" else ARCHITECTURES
    if name in REFUSED:
        raise UnsupportedModelError(f"the architecture {name} is not supported: {REFUSED[name]}")
    if name not in rows:
        dialect = " in PowerInfer's format" if gguf.dialect == "powerinfer" else ""
        raise UnknownArchitectureError(
            f"the architecture {shown(name)} is not supported{dialect}; 'hotset list --architectures' lists "
            "those that are"
        )
    return name, rows[name]
