"""The facts of a model, read and checked from the keys of its GGUF file.

An architecture is a row of `ARCHITECTURES`, not a class: what a file cannot say (which RoPE layout its
q and k rows are stored for, whether q and k are normalised, which activation it was trained with) stands in
the row, everything else in the file. PowerInfer's dialect has rows of its own: it means something else by the
same name. A file is hostile until this module has read it: every number has a range, and every complaint
names the key.

Keys of our own, beside the standard ones (gguf's `docs/gguf.md`):

- `<arch>.activation_sparsity_scale` (llama.cpp's, f32 array): of each layer the multiplier of a Gaussian
  top-k before the activation; -inf: it has none.
- `<arch>.hidden_activation` (standard, string): silu, gelu, gelu_tanh, relu, relu2, fatrelu or drelu.
- `powerinfer.sparse_threshold` (f32, PowerInfer's): a neuron whose predicted score is below it is skipped.
- `hotset.predictor_masks` (bool): the mask of the file's predictors is part of the model (TurboSparse): in
  every mode a neuron whose score is below the threshold is zero.
- `hotset.fatrelu_threshold` (f32): t of FATReLU, f(x) = x if x >= t else 0; needed with fatrelu.
- `hotset.up_activation` (string): activation applied to the up projection too; relu with a relu gate is
  dReLU, relu(gate) * relu(up) (TurboSparse, arXiv 2406.05955).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hotset.errors import FormatError, InvalidRequestError, UnsupportedModelError
from hotset.formats.quants import dequantize
from hotset.model.operations import XIELU, ActivationKind, Rope, RopeKind, Scoring, has_zeros
from hotset.parameters import shown

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile

UP_ACTIVATION_KEY = "hotset.up_activation"
FATRELU_THRESHOLD_KEY = "hotset.fatrelu_threshold"
SPARSE_THRESHOLD_KEY = "powerinfer.sparse_threshold"

YARN_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"

TOP_K_KEY, MAX_MULTIPLIER, MAX_STREAMS = "activation_sparsity_scale", 100.0, 16

PREDICTOR_MASKS_KEY = "hotset.predictor_masks"

LLAMA3_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"

NormKind = Literal["rms", "layer"]
PredictorInput = Literal["ffn_inp", "layer_input"]
Parallel = Literal["always", "by_key", "without_ffn_norm"]
HeadNorm = Literal["head", "width"]
# What the native core holds: kMaxHeadDim (csrc/kernels/kernels.h), kMaxGroup, kMaxConvKernel
# and kMaxStateHeads (csrc/plan.h), and an int.
MAX_HEAD_DIM, MAX_GROUP, MAX_CONV_KERNEL, MAX_STATE_HEADS, MAX_WINDOW = 512, 256, 64, 1024, (1 << 31) - 1
MAX_EXPERTS = MAX_LATENT_HEADS = 1024  # kMaxChunks of csrc/threads.h
SCORINGS: dict[int, Scoring] = {1: "softmax", 2: "sigmoid", 3: "softmax_chosen"}  # expert_gating_func
EPSILON_KEYS: dict[NormKind, str] = {
    "rms": "attention.layer_norm_rms_epsilon",
    "layer": "attention.layer_norm_epsilon",
}


@dataclass(frozen=True)
class FFNActivation:
    """neuron = f_gate(gate) * f_up(up), or f_gate(up) in an FFN without a gate.

    `up` None leaves the up projection as it is. `threshold` belongs to the kinds that have one (see
    graph.Activate). top_k: of a Gaussian top-k of the gates before f the multiplier (see graph.GaussianTopK);
    None: there is none. xielu: its numbers.
    """

    gate: ActivationKind
    up: ActivationKind | None = None
    threshold: float = 0.0
    top_k: float | None = None
    xielu: XIELU | None = None

    @property
    def has_zeros(self) -> bool:
        """Whether it leaves neurons at exactly zero."""
        return has_zeros(self.gate) or self.top_k is not None


CLAMPED = FFNActivation("clamped_silu", up="clamped_plus_one", threshold=7.0)
SILU = FFNActivation("silu")
GELU = FFNActivation("gelu")
GELU_TANH = FFNActivation("gelu_tanh")
RELU = FFNActivation("relu")
RELU2 = FFNActivation("relu2")
XIELU_OF_LAYERS = FFNActivation("xielu")  # whose numbers are keys
DRELU = FFNActivation("relu", up="relu")


@dataclass(frozen=True)
class ExpertDefaults:
    """What files with experts of one architecture need not say.

    scoring, normalised: see operations.Route. gated_share: what the shared network yields is multiplied by
    the sigmoid of a product of its own. early: the router reads what enters the layer, before attention and
    as it is; elsewhere what the experts read. where_routed: of layers those with a router have experts, and
    no key says which.
    """

    scoring: Scoring = "softmax"
    normalised: bool = True
    gated_share: bool = False
    early: bool = False
    where_routed: bool = False


@dataclass(frozen=True)
class Architecture:
    """What every file of one `general.architecture` has in common and none of its keys says.

    rope: layout that the rows of attn_q and attn_k are stored for; None: no rotation.
    first_position: row of position 0 in the learned positions `position_embd`; None: there are none.
    norm: rms, or layer. norm_bias: layer norms must have a bias; elsewhere one is used where it is present.
    norm_eps: where the file has no key for it; None: it must have one. norm_weights: layer norms have them.
    qk_norm: q and k pass a norm (RMS; in models with layer norms such a one of each head) before the rotation
      (`attn_q_norm`, `attn_k_norm`), each head by itself or all heads as one row; None: they do not.
      optional_qk_norm: where a layer has the tensors for it. qk_norm_last: the norm follows the rotation.
    gated: the FFN has a gate beside up. activation: of the FFN, where the file names none.
    parallel: the FFN reads what enters the layer, through `ffn_norm` or, in layers without one, through
      `attn_norm`, which attention reads too where there is no `attn_norm_2`; elsewhere it reads the sum after
      attention, through `ffn_norm`. by_key: where use_parallel_residual says so; without_ffn_norm: in layers
      that lack the norm.
    biased: tensors of a layer that must have a bias (elsewhere a bias is used where it is present).
    pre_norm: attention and the FFN read the stream through a norm. post_norm: what they yield passes a norm
      before it is added.
    ffn_norm: the tensor of the norm before the FFN.
    sinks: a score for each head takes part in the softmax of attention (`attn_sinks`).
    window_period: where the file has a window and no pattern, all but each so-many-th layer have it, of as
      many the last or (window_last) the first; 0: all. rotates_windows: layers without one have no
      rotation, always or where others have one.
    unrotated_period: each so-many-th layer has no rotation; 0: all have it. rope_switch: the key
      rope.scaling.finetuned, where it is false, says that no layer has one.
    rounded_yarn: where YaRN's ramp begins and ends is rounded to whole pairs of channels.
    windowed_rope_base: base of the rotation in layers with a window, where the file has no key for it; None:
      that of the others, with their scaling, or without it (unscaled_windows).
    caps_scores: the file's cap on scores counts (Gemma 3 has none, whatever config.json or the file says).
    scaled_embedding: the embedding is multiplied by the root of the width. multiplies_logits: logits are
      multiplied by the file's logit_scale; elsewhere they are divided by it. needs_scales: the file must have
      the scales of the embedding, of what is added to the stream, and of the logits.
    halved_ff: the file's feed_forward_length is twice the width of the FFN. unwindowed: a window in the file
      is of another kind, which is not computed.
    narrow_scale_at: of models with so many layers, scores are scaled by the width over the heads, and not by
      the width of a head.
    latent_eps: of the norms of latent vectors, where keys and values of all heads come from one (see Latent),
      whatever the file says of the others; None: they come from the input.
    tempered: queries grow with their position (attention.temperature_scale) from the position on that this
      key has. indexed: an indexer chooses the keys that a token sees, all while there are no more than
      attention.indexer.top_k. Neither is computed: longer contexts are refused.
    predictor_input: what a published predictor (fc1, fc2) reads: the residual stream after attention, or as
      it enters the layer; never the normalised input of the FFN.
    experts: of files whose FFNs are experts; None: there are none.
    output_norm: the tensor of the last norm; None: there is none.
    short_conv: layers without KV heads have a short convolution in place of attention.
    state_space: layers without KV heads have the state space of Mamba-2 in its place, and layers whose
      feed_forward_length is 0 have no FFN. one_part: those that have one have nothing in attention's place.
      by_channel: it is that of Mamba, the first. beside: every layer has attention and a state space, of the
      same input. attends: False: no layer has attention; all have the state space, or rwkv: the time mix of
      this version of RWKV.
    ffn_tensors: names of up and down.
    delta_net: layers have a gated delta net in its place, all but each fourth or those that the file names;
      heads of values that share a key lie side by side (grouped) or one for each key, and again (tiled).
    sub_norms: what the heads yield and what the neurons yield pass a norm before the last matrix of both.
    activation_at: of files that name no activation those with so many layers have `activation`, the others
      silu; None: all have it.
    alibi: of files without the key attention.max_alibi_bias (see operations.Attention.slopes); 0: scores do
      not fall with distance; None: files must have the key.
    embedding_norm: the embedding passes a norm (`token_embd_norm`), with those of positions and token types.
    causal: a token sees no token after it, where the file does not say (attention.causal). A model that is
      not is an encoder: it has no logits, and its result is the hidden states, behind `output_norm` if there
      is one.
    sum_norms: the sums of what attention and the FFN yield and what entered them pass a norm
      (`attn_output_norm`, `layer_output_norm`).
    bare_first: the first layer's attention reads the stream as it is.
    compared_with: what the tests take its numbers from, with tiny random models.
    attention_gate: what a head yields is multiplied by the sigmoid of as many numbers: what attn_gate yields
      or, in layers without it, rows of attn_q that lie behind those of the head's query.
    unscaled: scores are q · k as it is, and values pass a norm without weights (Gemma 3n).
    altup: layers have several residual streams, a low-rank branch and an embedding of their own for each
      token, and the last ones attend keys and values of others (see AltUp and LayerConfig.source).
    window_heads: heads of layers with a window have a size of their own, layers have numbers of KV heads of
      their own, and take keys for values where they have no attn_v; layers may add an embedding of their own
      of each token, their result may be scaled (`layer_output_scale`), and the last ones may attend keys and
      values of others (Gemma 4).
    """

    rope: RopeKind | None = "norm"
    first_position: int | None = None
    norm: NormKind = "rms"
    norm_bias: bool = True
    norm_eps: float | None = None
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
    indexed: bool = False
    predictor_input: PredictorInput = "ffn_inp"
    experts: ExpertDefaults | None = None
    output_norm: str | None = "output_norm"
    short_conv: bool = False
    state_space: bool = False
    by_channel: bool = False
    beside: bool = False
    attends: bool = True
    rwkv: int | None = None
    ffn_tensors: tuple[str, str] = ("ffn_up", "ffn_down")
    one_part: bool = False
    delta_net: Literal["grouped", "tiled"] | None = None
    attention_gate: bool = False
    unscaled: bool = False
    altup: bool = False
    window_heads: bool = False
    sub_norms: bool = False
    activation_at: int | None = None
    alibi: float | None = 0.0
    embedding_norm: bool = False
    causal: bool = True
    sum_norms: bool = False
    bare_first: bool = False
    compared_with: str = "transformers"


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
    "llama": Architecture(experts=ExpertDefaults()),  # Llama 1 to 3.x, Mistral, SmolLM; Mixtral
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
    "stablelm": Architecture(rope="neox", norm="layer", parallel="without_ffn_norm"),
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
        window_heads=True,
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
    "mistral3": Architecture(tempered="rope.scaling.original_context_length", experts=ExpertDefaults()),
    "qwen2vl": Architecture(rope="neox", biased=_QKV),
    "qwen3vl": Architecture(rope="neox", qk_norm="head"),
    "qwen3vlmoe": Architecture(rope="neox", qk_norm="head", experts=ExpertDefaults()),
    "minimax-m2": Architecture(rope="neox", qk_norm="width", experts=ExpertDefaults(scoring="sigmoid")),
    "dots1": Architecture(rope="neox", qk_norm="head", experts=ExpertDefaults(scoring="sigmoid")),
    "afmoe": Architecture(
        rope="neox", qk_norm="head", post_norm=True, scaled_embedding=True, attention_gate=True,
        window_period=4, rotates_windows="always", experts=ExpertDefaults(scoring="sigmoid"),
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
        experts=ExpertDefaults(scoring="sigmoid"),
    ),
    "deepseek": Architecture(
        experts=ExpertDefaults(normalised=False), compared_with="transformers' Llama, with its experts"
    ),
    "deepseek2": Architecture(latent_eps=1e-6, experts=ExpertDefaults(normalised=False)),  # V2, V3, Kimi K2
    "plm": Architecture(
        latent_eps=1e-6, gated=False, activation=RELU2,
        compared_with="transformers' DeepseekV2, with an FFN without a gate",
    ),
    "mistral4": Architecture(
        latent_eps=1e-6, tempered="attention.temperature_length", experts=ExpertDefaults()
    ),
    "deepseek32": Architecture(latent_eps=1e-6, indexed=True, experts=ExpertDefaults(scoring="sigmoid")),
    "glm-dsa": Architecture(latent_eps=1e-6, indexed=True, experts=ExpertDefaults(scoring="sigmoid")),
    "mpt": Architecture(
        rope=None, norm="layer", norm_bias=False, gated=False, activation=GELU, alibi=None
    ),
    "bloom": Architecture(
        rope=None, norm="layer", gated=False, activation=GELU_TANH, embedding_norm=True, alibi=8.0,
        biased=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "olmo": Architecture(norm="layer", norm_weights=False),
    "apertus": Architecture(rope="neox", qk_norm="head", gated=False, activation=XIELU_OF_LAYERS),
    "bitnet": Architecture(  # 2B-4T has 30 layers; what reproduced BitNet's paper before has silu
        rope="neox", activation=RELU2, activation_at=30, sub_norms=True,
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
        experts=ExpertDefaults(scoring="sigmoid", normalised=False, where_routed=True),
    ),
    "granitehybrid": Architecture(rope_switch=True, state_space=True, experts=ExpertDefaults()),
    "falcon-h1": Architecture(rope="neox", state_space=True, beside=True),
    "mamba": Architecture(rope=None, state_space=True, by_channel=True, attends=False),
    "jamba": Architecture(
        rope=None, state_space=True, by_channel=True,
        experts=ExpertDefaults(normalised=False, where_routed=True),
    ),
    "rwkv6": Architecture(**_RWKV, rwkv=6),
    "rwkv7": Architecture(**_RWKV, rwkv=7),
    "mamba2": Architecture(rope=None, state_space=True, attends=False),
    "qwen3next": Architecture(
        rope="neox", qk_norm="head", ffn_norm="post_attention_norm", delta_net="grouped", attention_gate=True,
        experts=ExpertDefaults(gated_share=True),
    ),
    "qwen35": Architecture(
        rope="neox", qk_norm="head", ffn_norm="post_attention_norm", delta_net="tiled", attention_gate=True,
    ),
    "qwen35moe": Architecture(
        rope="neox", qk_norm="head", ffn_norm="post_attention_norm", delta_net="tiled", attention_gate=True,
        experts=ExpertDefaults(gated_share=True),
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
    "bert": Architecture(  # and XLM-RoBERTa, whose files lack the positions before a text's first
        rope=None, first_position=0, norm="layer", gated=False, activation=GELU, **_ENCODER,
    ),
    "nomic-bert": Architecture(rope="neox", norm="layer", **_ENCODER),
    "modern-bert": Architecture(
        rope="neox", norm="layer", norm_bias=False, activation=GELU, embedding_norm=True, bare_first=True,
        window_period=3, window_last=True, windowed_rope_base=10000.0, causal=False,
    ),
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
"""The rows of a file in PowerInfer's dialect."""


@dataclass(frozen=True)
class Experts:
    """The experts of a layer. n: of them; n_used: for a token. The rest: see operations.Route.

    n_ff_shared: neurons of the network that every token passes beside them; 0: there is none. gated_share,
    early: see ExpertDefaults. n_latent: width of what they read and yield, between two matrices that all of
    them share; 0: that of the model.
    """

    n: int
    n_used: int
    scoring: Scoring
    normalised: bool
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
    n_ff_shared: int = 0
    gated_share: bool = False
    early: bool = False
    group_best: int = 2
    n_latent: int = 0


@dataclass(frozen=True)
class ConvMixer:
    """A gated short convolution in place of attention. kernel: tokens that it sees, itself among them."""

    kernel: int


@dataclass(frozen=True)
class DeltaMixer:
    """A gated delta net in place of attention: see operations.DeltaNet. kernel: of the convolution before
    it."""

    kernel: int
    n_head: int
    n_head_k: int
    dim_k: int
    dim_v: int
    tiled: bool

    @property
    def of_keys(self) -> int:
        """Channels of all keys, or queries."""
        return self.n_head_k * self.dim_k

    @property
    def of_values(self) -> int:
        """Channels of all values."""
        return self.n_head * self.dim_v


@dataclass(frozen=True)
class StateSpaceMixer:
    """The state space of Mamba-2 in place of attention: see operations.SelectiveScan. kernel: of the
    convolution before it; dim_k: numbers of B and C, dim_v: channels of a head. normed: what heads yield
    passes a norm. beside: it stands beside attention."""

    kernel: int
    n_head: int
    n_group: int
    dim_k: int
    dim_v: int
    normed: bool = True
    beside: bool = False

    @property
    def of_values(self) -> int:
        """Channels of all heads."""
        return self.n_head * self.dim_v

    @property
    def width(self) -> int:
        """Channels of the convolution: values, B and C."""
        return self.of_values + 2 * self.n_group * self.dim_k


@dataclass(frozen=True)
class ChannelMixer:
    """The state space of Mamba in place of attention: see operations.ChannelScan. kernel: of the convolution
    before it; inner: its channels; dim_k: numbers of B and C; rank: of what dt is made of. norms: of dt, B
    and C, with weights or without; None: there are none."""

    kernel: int
    inner: int
    dim_k: int
    rank: int
    norms: Literal["weights", "plain"] | None


@dataclass(frozen=True)
class RwkvMixer:
    """RWKV's time mix in place of attention: see operations.Wkv; the FFN, its channel mix, reads the token
    before as well. version: 6 or 7. dim: channels of a head. rank_*: of the matrices that decays, learning
    rates, shares of the first layer's values and gates are made of (of gates 0: there are none); in RWKV 6 of
    those that decays and the shares of the token before are made of."""

    version: int
    n_head: int
    dim: int
    rank_decay: int
    rank_rate: int = 0
    rank_value: int = 0
    rank_gate: int = 0
    rank_mix: int = 0


Mixer = ConvMixer | DeltaMixer | StateSpaceMixer | ChannelMixer | RwkvMixer


REFUSED = {
    "phimoe": "engines compute another function than it was trained with (RMS norms and a plain softmax "
    "in place of layer norms and two masked ones)",
}
"""Architectures that are known and not computed, with the reason."""


@dataclass(frozen=True)
class LayerConfig:
    """What may differ between the layers of a model. For the rest see Architecture.

    n_ff: neurons of the FFN, or of one of its experts; 0: it has no FFN. experts: None: there are none.
    mixes: it has attention, or a mixer in its place or beside it; mixer: which; None: attention alone.
    attention_gate: see Architecture.
    rope: with final frequencies; None: positions are not rotated. window: tokens that a token sees, itself
    among them; 0: all before it. attention_scale: of q · k. attention_softcap: see graph.Attention; 0: none.
    bare: attention reads the stream as it is, whatever the FFN does.
    ffn_tensors: see Architecture.
    value_norm: heads of values pass a norm without weights. source: the layer whose keys and values it
    attends; None: its own. sub_norms, sum_norms: see Architecture. heads: of k and v, and the channels of
    one; None: the model's. result_scale: of the stream behind the layer.
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

    @property
    def n_neurons(self) -> int:
        """Of all experts."""
        return self.n_ff * (1 if self.experts is None else self.experts.n)


@dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are made of one latent vector of a token (arXiv 2405.04434).

    rank: of that vector; rank_q: of another that the queries are made of; 0: they come from the input. A
    head's first channels of q and k are made of the vectors, its last n_rot are rotated: those of the key are
    the same in all heads, and come from the input. norm_eps: of the vectors' norms.
    """

    rank: int
    rank_q: int
    n_rot: int
    norm_eps: float


@dataclass(frozen=True)
class AltUp:
    """Several residual streams, of which a layer computes the first and predicts and corrects the others
    (arXiv 2301.13310), as Gemma 3n has them.

    n_streams: of them. n_embd_layer: width of the embedding that each layer has of a token.
    """

    n_streams: int
    n_embd_layer: int


@dataclass(frozen=True)
class LongRope:
    """A rotation for contexts beyond the one that a model was first trained with (arXiv 2402.13753).

    n_ctx: the longest context that the layers' own rotation serves; rope: for longer ones.
    """

    n_ctx: int
    rope: Rope


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that its decoder needs, except the weights.

    head_dim is the width of one head of q and k, head_dim_v of v; neither need be n_embd / n_head. Without
    attention they and the numbers of heads are 0. norm_eps
    belongs to every norm. `n_ctx_train` is the context that the file promises, in tokens,
    n_ctx_max the longest that can be computed; None: there is no such limit.
    embedding_scale, residual_scale and logit_scale multiply the embedding, what attention and FFN add, and
    the logits. logit_softcap: see graph.SoftCap; 0: none. n_extra_layers: of the file behind the model's, for
    the prediction of more than one token; nothing reads them. `sparse_threshold` belongs to the predictor in
    the file; masked: that predictor's mask is part of the model. slopes: see operations.Attention.
    n_embd_layer: width of the embedding of a token that each layer adds; 0: none does. For the rest see
    Architecture.
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
    n_embd_layer: int = 0
    predictor_input: PredictorInput = "ffn_inp"
    sparse_threshold: float = 0.0
    masked: bool = False
    n_extra_layers: int = 0
    output_norm: str | None = "output_norm"
    slopes: tuple[float, ...] | None = None
    embedding_norm: bool = False
    causal: bool = True

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def n_ff(self) -> tuple[int, ...]:
        """Neurons of each layer, of all its experts."""
        return tuple(layer.n_neurons for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return any(layer.experts is not None for layer in self.layers)

    @property
    def n_recurrent(self) -> int:
        """Layers that have a recurrent state, in place of keys and values or beside them."""
        return sum(layer.mixer is not None for layer in self.layers)

    @property
    def activation(self) -> FFNActivation:
        """Of the FFNs; every layer has the same, or some have a Gaussian top-k in addition: then theirs."""
        return next(
            (layer.activation for layer in self.layers if layer.activation.has_zeros),
            self.layers[0].activation,
        )

    @property
    def has_zeros(self) -> bool:
        """Whether a layer's activation gives exact zeros, so that neurons that do not fire can be skipped."""
        return any(layer.activation.has_zeros for layer in self.layers)

    @property
    def leaves_out(self) -> bool:
        """Whether a token does not need every row: of neurons that are zero, or of experts."""
        return self.has_zeros or self.has_experts

    def require_ffns(self, what: str) -> None:
        """Raises UnsupportedModelError where a layer has no FFN. what: needs one in each."""
        if 0 in self.n_ff:
            raise UnsupportedModelError(f"{what} of models with layers without an FFN are not supported")

    def for_context(self, n_ctx: int) -> ModelConfig:
        """The configuration with the rotation that serves contexts of n_ctx tokens."""
        if self.long_rope is None or n_ctx <= self.long_rope.n_ctx:
            return self
        rope = self.long_rope.rope
        layers = tuple(layer if layer.rope is None else replace(layer, rope=rope) for layer in self.layers)
        return replace(self, layers=layers, long_rope=None)


# Of neurons, as a key or an option may name them; the others are parts of an architecture.
_NAMED: tuple[ActivationKind, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu")


def parse_activation(text: str, threshold: float | None = None) -> FFNActivation:
    """The activation that a key or an option names: silu, relu, relu2, drelu, fatrelu:0.01, ...

    `threshold` serves a plain "fatrelu". Raises InvalidRequestError naming what is accepted.
    """
    name, _, number = text.strip().lower().partition(":")
    name = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}.get(name, name)
    if name == "fatrelu":
        if number:
            try:
                threshold = float(number)
            except ValueError:
                threshold = None
        if threshold is None or not (math.isfinite(threshold) and threshold >= 0):
            raise InvalidRequestError(
                f"the activation {text!r} needs a threshold of at least 0, for instance fatrelu:0.01"
            )
        return FFNActivation("fatrelu", threshold=threshold)
    if name == "drelu" and not number:
        return DRELU
    if name not in _NAMED or number:
        known = ", ".join([*(k for k in _NAMED if k != "fatrelu"), "drelu", "fatrelu:T"])
        raise InvalidRequestError(f"the activation {text!r} is not known; it must be one of {known}")
    return FFNActivation(name)


class _Keys:
    """Reads `<arch>.<key>` with a type and a range; every complaint is a FormatError naming the key."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def error(self, key: str, what: str) -> FormatError:
        return FormatError(f"the file's key {self.architecture}.{key} {what}; the file is damaged")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        return self._checked_integer(key, value, low, high)

    def _checked_integer(self, key: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise self.error(key, f"must be an integer, not {shown(value)}")
        if not low <= value <= high:
            raise self.error(key, f"is {value}, outside {low} to {high}")
        return int(value)

    def per_layer(
        self, key: str, n_layer: int, low: int, high: int, default: int | None = None
    ) -> tuple[int, ...]:
        """One integer for all layers, or an array with one for each, perhaps also for those left out."""
        value = self.get(key, default)
        if not _is_array(value):
            return (self.integer(key, low, high, default),) * n_layer
        n_extra = self.integer("nextn_predict_layers", 0, 1 << 12, 0)
        if len(value) not in (n_layer, n_layer + n_extra):
            raise self.error(key, f"has {len(value)} entries for {n_layer} layers")
        return tuple(self._checked_integer(key, v, low, high) for v in value[:n_layer])

    def uniform(self, key: str, n_layer: int, low: int, high: int, default: int | None = None) -> int:
        """As per_layer, where every layer must have the same number."""
        values = set(self.per_layer(key, n_layer, low, high, default))
        return self.one(key, values)

    def one(self, key: str, values: set[int]) -> int:
        """The only one of a key's values."""
        if len(values) > 1:
            raise UnsupportedModelError(
                f"the file's key {self.architecture}.{key} differs between layers, which is not supported"
            )
        return values.pop()

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
            raise self.error(key, f"must be a number, not {shown(value)}")
        if not low <= value <= high:  # also false for NaN
            raise self.error(key, f"is {value}, outside {low:g} to {high:g}")
        return float(value)

    def factor(self, key: str, default: float = 1.0) -> float:
        """A positive number that a float32 and its inverse can hold; `default` where the key is missing or
        (as converters write it) 0."""
        value = self.real(key, 0.0, 1e9, 0.0)
        if 0 < value < 1e-9:
            raise self.error(key, f"is {value:g}, below 1e-09")
        return value or default

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool | np.bool_):
            raise self.error(key, f"must be true or false, not {shown(value)}")
        return bool(value)

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"must be a string, not {shown(value)}")
        return value


class UnknownArchitectureError(UnsupportedModelError):
    """No row of ARCHITECTURES has this name."""


def config_from_gguf(gguf: GGUFFile, *, activation: str | None = None) -> ModelConfig:
    """Reads and checks the configuration of a model file.

    `activation` overrides the one that the file or its architecture names (see parse_activation). Raises
    UnsupportedModelError for a sound file that cannot be run, FormatError for a key that makes no sense,
    InvalidRequestError for an unknown `activation`.
    """
    name, architecture = _row(gguf)
    keys = _Keys(gguf.metadata, name)
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
        n_ctx_max=_longest_context(keys, architecture, n_ctx_train),
        norm_eps=_norm_eps(keys, architecture),
        norm=architecture.norm,
        norm_bias=architecture.norm_bias,
        norm_weights=architecture.norm_weights,
        biased=architecture.biased,
        first_position=architecture.first_position,
        embedding_scale=math.sqrt(n_embd)
        if architecture.scaled_embedding
        else keys.factor("embedding_scale"),
        residual_scale=keys.factor("residual_scale"),
        logit_scale=keys.factor("logit_scale") ** (1 if architecture.multiplies_logits else -1),
        logit_softcap=keys.factor("final_logit_softcapping", 0.0),
        long_rope=_long_rope(gguf, keys, architecture, head_dim, n_ctx_train),
        latent=_latent(keys, architecture, head_dim),
        altup=_altup(keys) if architecture.altup else None,
        n_embd_layer=keys.integer("embedding_length_per_layer_input", 0, 1 << 16, 0)
        if architecture.window_heads
        else 0,
        predictor_input=architecture.predictor_input,
        sparse_threshold=_number(gguf.metadata, SPARSE_THRESHOLD_KEY) or 0.0,
        masked=_masked(gguf.metadata),
        n_extra_layers=n_extra_layers,
        output_norm=architecture.output_norm,
        slopes=_slopes(keys, architecture, n_head),
        embedding_norm=architecture.embedding_norm,
        causal=keys.flag("attention.causal", architecture.causal),
    )
    if not config.causal and (config.n_recurrent or config.altup is not None):
        raise UnsupportedModelError(
            f"the file is an encoder ({name}.attention.causal is false) with layers that look back alone, "
            "which is not supported"
        )
    if any(layer.activation.up is not None and not layer.gated for layer in config.layers):
        what = f"the {name} model's feed-forward network has no gate, so its activation cannot be dReLU"
        raise InvalidRequestError(what) if override else UnsupportedModelError(what)
    return config


def _row(gguf: GGUFFile) -> tuple[str, Architecture]:
    """The name of the architecture, and what the table says of it."""
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FormatError("the file has no key general.architecture: it is not a model, or it is damaged")
    rows = POWERINFER_ARCHITECTURES if gguf.dialect == "powerinfer" else ARCHITECTURES
    if name in REFUSED:
        raise UnsupportedModelError(f"the architecture {name} is not supported: {REFUSED[name]}")
    if name not in rows:
        dialect = " in PowerInfer's format" if gguf.dialect == "powerinfer" else ""
        raise UnknownArchitectureError(
            f"the architecture {shown(name)} is not supported{dialect}; 'hotset list --architectures' names "
            "those that are"
        )
    return name, rows[name]


def _check_scales(keys: _Keys, architecture: Architecture) -> None:
    """Raises UnsupportedModelError for files of the first converters, which lack what must be there."""
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        if architecture.needs_scales and not keys.factor(key, 0.0):
            raise UnsupportedModelError(
                f"the file lacks the key {keys.architecture}.{key}: an old converter wrote it; convert the "
                "checkpoint anew"
            )


def _layers(
    gguf: GGUFFile,
    keys: _Keys,
    architecture: Architecture,
    n_layer: int,
    head_dim: int,
    narrow_dim: int,
    n_ctx_train: int,
    activation: FFNActivation | None,
) -> tuple[LayerConfig, ...]:
    """The facts of each layer. narrow_dim: the width over the heads."""
    windows = _windows(keys, n_layer, architecture)
    # Files whose every layer has experts may leave it out.
    of_expert = keys.get("expert_feed_forward_length") if architecture.experts is not None else None
    least = 0 if architecture.state_space else 1
    n_ff = keys.per_layer("feed_forward_length", n_layer, least, 1 << 22, of_expert)
    if architecture.halved_ff:
        n_ff = tuple(n // 2 for n in n_ff)
    experts: tuple[Experts | None, ...] = (None,) * n_layer
    if architecture.experts is not None and keys.integer("expert_count", 0, 1 << 16, 0):
        routed = [f"blk.{i}.ffn_gate_inp.weight" in gguf.tensors for i in range(n_layer)]
        experts, n_ff = _experts(keys, architecture.experts, routed, n_ff)
    scaled_dim = narrow_dim if n_layer == architecture.narrow_scale_at else head_dim
    unscaled = architecture.unscaled or not architecture.attends
    scale = keys.factor("attention.scale", 1.0 if unscaled else 1 / math.sqrt(scaled_dim))
    if architecture.latent_eps is not None:
        scale *= _latent_yarn_scale(keys)
    softcap = keys.factor("attn_logit_softcapping", 0.0) if architecture.caps_scores else 0.0
    activation = activation or _activation(keys, architecture, n_layer)
    top_k = _top_k(keys, n_layer)
    xielu = _xielu(keys, n_layer) if activation.gate == "xielu" else (None,) * n_layer
    shares = architecture.altup or architecture.window_heads
    sources = _sources(keys, windows) if shares else (None,) * n_layer
    heads = _layer_heads(keys, windows, head_dim) if architecture.window_heads else (None,) * n_layer
    rope = windowed = None
    switched_off = architecture.rope_switch and keys.get("rope.scaling.finetuned", True) is False
    if architecture.rope is not None and not switched_off:
        rope = windowed = _rope(gguf, keys, architecture, head_dim, n_ctx_train)
        if any(windows) and architecture.windowed_rope_base is not None:
            windowed = _windowed_rope(keys, architecture, rope, architecture.windowed_rope_base)
        elif any(windows) and architecture.unscaled_windows:
            base = keys.real("rope.freq_base", 1e-3, 1e15, 10000.0)
            windowed = Rope(rope.kind, rope.n_rot, tuple(_frequencies(base, rope.n_rot).tolist()))
    mixers = _mixers(gguf, keys, architecture, n_layer)
    result_scales = _result_scales(gguf, keys, architecture, n_layer)
    period = architecture.unrotated_period
    if architecture.rotates_windows == "always" or (architecture.rotates_windows and any(windows)):
        rope = None
    return tuple(
        LayerConfig(
            n_ff=n_ff[i],
            activation=replace(activation, top_k=top_k[i], xielu=xielu[i]),
            rope=None if period and i % period == period - 1 else windowed if windows[i] else rope,
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
        )
        for i in range(n_layer)
    )


def _windowed_rope(keys: _Keys, architecture: Architecture, rope: Rope, base: float) -> Rope:
    """Of layers with a window, beside the rope of the others: never scaled. base: where the file has none."""
    base = keys.real("rope.freq_base_swa", 1e-3, 1e15, base)
    n_rot = rope.n_rot
    if architecture.window_heads:
        n_rot = keys.integer("rope.dimension_count_swa", 2, MAX_HEAD_DIM, _window_dim(keys, n_rot))
    return Rope(rope.kind, n_rot, tuple(_frequencies(base, n_rot).tolist()))


def _window_dim(keys: _Keys, head_dim: int) -> int:
    """Channels of a head of layers with a window."""
    dim = keys.integer("attention.key_length_swa", 1, MAX_HEAD_DIM, head_dim)
    if keys.integer("attention.value_length_swa", 1, MAX_HEAD_DIM, dim) != dim:
        raise keys.error("attention.value_length_swa", f"is not attention.key_length_swa, {dim}")
    return dim


def _layer_heads(keys: _Keys, windows: tuple[int, ...], head_dim: int) -> tuple[tuple[int, int] | None, ...]:
    """Of each layer the heads of keys and values, and the channels of one."""
    n_head = keys.uniform("attention.head_count", len(windows), 1, 1 << 14)
    of_layers = keys.per_layer("attention.head_count_kv", len(windows), 1, 1 << 14, n_head)
    if any(n_head % n for n in of_layers):
        raise keys.error("attention.head_count_kv", f"has a number that does not divide {n_head} heads")
    _check_heads(n_head // min(of_layers), head_dim)
    dim = _window_dim(keys, head_dim)
    return tuple((n, dim if window else head_dim) for n, window in zip(of_layers, windows, strict=True))


def _result_scales(
    gguf: GGUFFile, keys: _Keys, architecture: Architecture, n_layer: int
) -> tuple[float, ...]:
    """What the stream behind each layer is multiplied with."""
    names = [f"blk.{i}.layer_output_scale.weight" for i in range(n_layer)]
    if architecture.window_heads:
        return tuple(float(_divisors(gguf, name, 1)[0]) if name in gguf.tensors else 1.0 for name in names)
    halves = keys.integer("rescale_every_n_layers", 0, 1 << 12, 0) if architecture.rwkv == 6 else 0
    return tuple(0.5 if halves and i % halves == 0 else 1.0 for i in range(1, n_layer + 1))


def _kv_heads(keys: _Keys, architecture: Architecture, n_layer: int, n_head: int) -> int:
    """KV heads of the layers that have attention; of the others, where there may be such, the key says 0."""
    key = "attention.head_count_kv"
    if architecture.window_heads:  # the layers know their own
        return max(keys.per_layer(key, n_layer, 1, 1 << 14, n_head))
    if architecture.beside or not (architecture.short_conv or architecture.state_space):
        return keys.uniform(key, n_layer, 1, 1 << 14, n_head)
    found = set(keys.per_layer(key, n_layer, 0, 1 << 14, n_head)) - {0}
    if not found:
        raise UnsupportedModelError(f"no layer of the model has attention ({keys.architecture}.{key} is 0)")
    return keys.one(key, found)


def _state_heads(keys: _Keys) -> tuple[int, int, int, int, int]:
    """Of a recurrent layer with heads: tokens of its convolution, heads, heads or groups of keys, and the
    channels of a key and of a value."""
    n_head = keys.integer("ssm.time_step_rank", 1, MAX_STATE_HEADS)
    inner = keys.integer("ssm.inner_size", 1, MAX_STATE_HEADS * MAX_HEAD_DIM)
    n_group = keys.integer("ssm.group_count", 1, n_head)
    dim_k = keys.integer("ssm.state_size", 1, MAX_HEAD_DIM)
    kernel = keys.integer("ssm.conv_kernel", 2, MAX_CONV_KERNEL)
    if inner % n_head or inner // n_head > MAX_HEAD_DIM:
        raise keys.error("ssm.inner_size", f"is {inner} for {n_head} heads")
    if n_head % n_group:
        raise keys.error("ssm.group_count", f"is {n_group} for {n_head} heads")
    return kernel, n_head, n_group, dim_k, inner // n_head


def _delta_mixers(keys: _Keys, n_layer: int, *, tiled: bool) -> tuple[DeltaMixer | None, ...]:
    mixer = DeltaMixer(*_state_heads(keys), tiled)
    named = keys.get("attention.recurrent_layers")
    if named is None:
        interval = keys.integer("full_attention_interval", 1, 1 << 12, 4)
        return tuple(None if (i + 1) % interval == 0 else mixer for i in range(n_layer))
    if not _is_array(named) or len(named) < n_layer or not all(isinstance(v, bool | np.bool_) for v in named):
        raise keys.error("attention.recurrent_layers", f"must hold true or false for {n_layer} layers")
    return tuple(mixer if recurrent else None for recurrent in named[:n_layer])


def _state_space(gguf: GGUFFile, keys: _Keys, *, beside: bool) -> StateSpaceMixer:
    normed = not beside or "blk.0.ssm_norm.weight" in gguf.tensors
    return StateSpaceMixer(*_state_heads(keys), normed, beside)


def _channel_mixer(gguf: GGUFFile, keys: _Keys, layer: int) -> ChannelMixer:
    plain = keys.flag("ssm.dt_b_c_rms", False)
    weights = f"blk.{layer}.ssm_dt_norm.weight" in gguf.tensors
    return ChannelMixer(
        keys.integer("ssm.conv_kernel", 2, MAX_CONV_KERNEL),
        keys.integer("ssm.inner_size", 1, 1 << 20),
        keys.integer("ssm.state_size", 1, MAX_HEAD_DIM),
        keys.integer("ssm.time_step_rank", 1, 1 << 16),
        "weights" if weights else "plain" if plain else None,
    )


def _time_mix(keys: _Keys, version: int) -> RwkvMixer:
    n_embd, most = keys.integer("embedding_length", 1, 1 << 20), 1 << 16
    dim = keys.integer("wkv.head_size", 1, MAX_HEAD_DIM)
    n_head = n_embd // dim
    if n_embd % dim or n_head > MAX_STATE_HEADS:
        raise keys.error("wkv.head_size", f"is {dim} for a width of {n_embd}")
    if version == 6:
        ranks = {"rank_decay": "time_decay_extra_dim", "rank_mix": "time_mix_extra_dim"}
    else:
        ranks = {
            "rank_decay": "attention.decay_lora_rank",
            "rank_rate": "attention.iclr_lora_rank",
            "rank_value": "attention.value_residual_mix_lora_rank",
        }
    sizes = {field: keys.integer(key, 1, most) for field, key in ranks.items()}
    rank_gate = keys.integer("attention.gate_lora_rank", 0, most, 0) if version == 7 else 0
    return RwkvMixer(version, n_head, dim, **sizes, rank_gate=rank_gate)


def _mixers(
    gguf: GGUFFile, keys: _Keys, architecture: Architecture, n_layer: int
) -> tuple[Mixer | None, ...]:
    """What stands in attention's place or beside it, layer by layer."""
    if architecture.rwkv is not None:
        return (_time_mix(keys, architecture.rwkv),) * n_layer
    if architecture.by_channel:
        heads = keys.per_layer("attention.head_count_kv", n_layer, 0, 1 << 14, 0)
        return tuple(None if n else _channel_mixer(gguf, keys, i) for i, n in enumerate(heads))
    if architecture.beside or not architecture.attends:
        return (_state_space(gguf, keys, beside=architecture.beside),) * n_layer
    if architecture.delta_net is not None:
        mixers = _delta_mixers(keys, n_layer, tiled=architecture.delta_net == "tiled")
        if None not in mixers:
            raise UnsupportedModelError("no layer of the model has attention")
        return mixers
    if not architecture.short_conv and not architecture.state_space:
        return (None,) * n_layer
    heads = keys.per_layer("attention.head_count_kv", n_layer, 0, 1 << 14, 1)
    if architecture.state_space:
        space = _state_space(gguf, keys, beside=False) if 0 in heads else None
        return tuple(None if n else space for n in heads)
    conv = ConvMixer(keys.integer("shortconv.l_cache", 2, MAX_CONV_KERNEL)) if 0 in heads else None
    return tuple(None if n else conv for n in heads)


def _experts(
    keys: _Keys, defaults: ExpertDefaults, routed: list[bool], n_ff: tuple[int, ...]
) -> tuple[tuple[Experts | None, ...], tuple[int, ...]]:
    """Of each layer its experts, and the neurons of its FFN or of one expert. n_ff: feed_forward_length.
    routed: whether a layer has a router."""
    n_layer = len(routed)
    n = keys.integer("expert_count", 1, 1 << 16)
    if n > MAX_EXPERTS:
        raise UnsupportedModelError(f"the model has {n} experts, and at most {MAX_EXPERTS} are supported")
    n_used = keys.integer("expert_used_count", 1, n)
    gating = keys.integer("expert_gating_func", 0, 1 << 8, 0)
    if gating and gating not in SCORINGS:
        raise UnsupportedModelError(
            f"the file's key {keys.architecture}.expert_gating_func is {gating}, which is not supported"
        )
    n_groups = keys.integer("expert_group_count", 0, n, 0) or 1
    n_groups_used = keys.integer("expert_group_used_count", 0, n_groups, 0) or n_groups
    if n % n_groups or n // n_groups * n_groups_used < n_used:
        raise keys.error("expert_group_count", f"is {n_groups} for {n} experts of which {n_used} are used")
    n_dense = keys.integer("leading_dense_block_count", 0, n_layer, 0)
    if keys.integer("interleave_moe_layer_step", 1, n_layer, 1) > 1:
        raise UnsupportedModelError("layers without experts between layers with experts are not supported")
    # The first files with a gated shared network say the width of all chosen experts.
    widths = tuple(max(n // n_used, 1) for n in n_ff) if defaults.gated_share else n_ff
    if keys.get("expert_feed_forward_length") is not None:
        widths = keys.per_layer("expert_feed_forward_length", n_layer, 0 if 0 in n_ff else 1, 1 << 22)
    n_shared = keys.integer("expert_shared_count", 0, 1 << 10, 0)
    scoring = SCORINGS.get(gating, defaults.scoring)
    experts = Experts(
        n,
        n_used,
        scoring,
        keys.flag("expert_weights_norm", defaults.normalised),
        keys.factor("expert_weights_scale"),
        n_groups if n_groups_used < n_groups else 1,
        n_groups_used if n_groups_used < n_groups else 1,
        keys.integer(
            "expert_shared_feed_forward_length",
            0,
            1 << 22,
            n_ff[-1] if defaults.gated_share else n_shared * widths[-1],
        ),
        defaults.gated_share,
        defaults.early,
        # DeepSeek V2's groups and V3's; llama.cpp takes two for both.
        1 if scoring == "softmax" and n_groups_used < n_groups else 2,
        keys.integer("moe_latent_size", 0, 1 << 20, 0),
    )
    has = routed if defaults.where_routed else [i >= n_dense for i in range(n_layer)]
    return (
        tuple(experts if own else None for own in has),
        tuple(width if own else n for own, width, n in zip(has, widths, n_ff, strict=True)),
    )


def _norm_eps(keys: _Keys, architecture: Architecture) -> float:
    """Of norms. Files with state spaces may have the key of layer norms alone."""
    default = architecture.norm_eps
    if architecture.state_space:
        default = keys.get(EPSILON_KEYS["layer"])
    return keys.real(EPSILON_KEYS[architecture.norm], 0.0, 1.0, default)


def _heads(keys: _Keys, architecture: Architecture, n_layer: int, n_embd: int) -> tuple[int, int, int, int]:
    """Heads of q, of k and v, and the channels of one of q and k, of v; as attention computes them."""
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
        # Files mean the heads of the latent vector itself, one for all, and say the others by these.
        n_head_kv = n_head
        if n_head > MAX_LATENT_HEADS:
            raise UnsupportedModelError(
                f"the model has {n_head} heads of a latent vector, and at most {MAX_LATENT_HEADS} are "
                "supported"
            )
        head_dim = keys.integer("attention.key_length_mla", 1, 1 << 14, head_dim)
        head_dim_v = keys.integer("attention.value_length_mla", 1, 1 << 14, head_dim_v)
    _check_heads(n_head // n_head_kv, max(head_dim, head_dim_v))
    return n_head, n_head_kv, head_dim, head_dim_v


def _slopes(keys: _Keys, architecture: Architecture, n_head: int) -> tuple[float, ...] | None:
    """ALiBi's slopes: a geometric sequence down to 2^-bias, and for heads beyond a power of two every second
    one of the next finer sequence."""
    bias = keys.factor("attention.max_alibi_bias", architecture.alibi or 0.0)
    if not bias:
        if architecture.alibi is None:
            raise keys.error("attention.max_alibi_bias", "is missing, and the model has no other positions")
        return None
    whole = 1 << (n_head.bit_length() - 1)
    exponents = [(h + 1) / whole for h in range(whole)]
    exponents += [(2 * h + 1) / (2 * whole) for h in range(n_head - whole)]
    return tuple(2.0 ** (-bias * exponent) for exponent in exponents)


def _latent(keys: _Keys, architecture: Architecture, head_dim: int) -> Latent | None:
    if architecture.latent_eps is None:
        return None
    n_rot = keys.integer("rope.dimension_count", 2, head_dim)
    if n_rot == head_dim:
        raise keys.error("rope.dimension_count", f"is {n_rot}, which leaves a head no channel")
    rank = keys.integer("attention.kv_lora_rank", 1, 1 << 20)
    rank_q = keys.integer("attention.q_lora_rank", 0, 1 << 20, 0)
    return Latent(rank, rank_q, n_rot, architecture.latent_eps)


def _altup(keys: _Keys) -> AltUp:
    if keys.integer("altup.active_idx", 0, 1 << 10, 0):
        raise UnsupportedModelError(
            f"the file's key {keys.architecture}.altup.active_idx is not 0, which is not supported"
        )
    if keys.get(TOP_K_KEY) is None:  # which layers have it is no fact of the architecture
        raise keys.error(TOP_K_KEY, "is missing")
    n_layer_embd = keys.integer("embedding_length_per_layer_input", 1, 1 << 16)
    return AltUp(keys.integer("altup.num_inputs", 2, MAX_STREAMS), n_layer_embd)


def _sources(keys: _Keys, windows: tuple[int, ...]) -> tuple[int | None, ...]:
    """Of the last layers those whose keys and values they attend: the last with its own and such a window."""
    n_own = len(windows) - keys.integer("attention.shared_kv_layers", 0, len(windows) - 1, 0)
    last = {bool(window): i for i, window in enumerate(windows[:n_own])}
    if any(bool(window) not in last for window in windows):
        raise keys.error("attention.shared_kv_layers", "leaves no layer whose keys and values are shared")
    return tuple(None if i < n_own else last[bool(window)] for i, window in enumerate(windows))


def _check_heads(group: int, head_dim: int) -> None:
    """group: query heads per KV head."""
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"the model has heads of {head_dim} channels, and at most {MAX_HEAD_DIM} are supported"
        )
    if group > MAX_GROUP:
        raise UnsupportedModelError(
            f"the model has {group} query heads for each KV head, and at most {MAX_GROUP} are supported"
        )


def _context(gguf: GGUFFile, keys: _Keys, architecture: Architecture) -> int:
    """The length that the file's key promises, or, of learned positions, the rows that are there."""
    positions = gguf.tensors.get("position_embd.weight")
    if architecture.first_position is None or positions is None:  # the decoder asks for what is missing
        return keys.integer("context_length", 1, 1 << 31)
    n_rows = int(positions.shape[-1])
    if n_rows <= architecture.first_position:
        raise FormatError(f"the tensor position_embd.weight has only {n_rows} rows; the file is damaged")
    return n_rows - architecture.first_position


def _longest_context(keys: _Keys, architecture: Architecture, n_ctx_train: int) -> int | None:
    """The longest context in which what is computed is what the model means, in tokens."""
    if architecture.first_position is not None:
        return n_ctx_train
    if architecture.tempered is not None and keys.real("attention.temperature_scale", 0.0, 1e3, 0.0):
        return keys.integer(architecture.tempered, 1, 1 << 31)
    return keys.integer("attention.indexer.top_k", 1, 1 << 31) if architecture.indexed else None


def _number(metadata: Mapping[str, Any], key: str) -> float | None:
    """A number of a key without an architecture in its name, finite; None where it is missing."""
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        raise FormatError(f"the file's key {key} must be a number, not {shown(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise FormatError(f"the file's key {key} is {number}; the file is damaged")
    return number


def _masked(metadata: Mapping[str, Any]) -> bool:
    value = metadata.get(PREDICTOR_MASKS_KEY, False)
    if not isinstance(value, bool | np.bool_):
        raise FormatError(f"the file's key {PREDICTOR_MASKS_KEY} must be true or false, not {shown(value)}")
    return bool(value)


def _vocabulary(gguf: GGUFFile) -> int:
    """Rows of the token embedding. (The key vocab_size is optional, and wrong in some files.)"""
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModelError("the file has no tensor token_embd.weight: it holds no complete model")
    if len(embedding.shape) != 2:
        raise FormatError(f"the tensor token_embd.weight must be a matrix, not {list(embedding.shape)}")
    n_vocab = int(embedding.shape[1])
    tokens = gguf.metadata.get("tokenizer.ggml.tokens", ())
    if _is_array(tokens) and len(tokens) > n_vocab:  # type: ignore[arg-type]
        raise FormatError(f"the tokenizer has {len(tokens)} tokens, the embedding only {n_vocab} rows")  # type: ignore[arg-type]
    return n_vocab


def _activation(keys: _Keys, architecture: Architecture, n_layer: int) -> FFNActivation:
    unnamed = architecture.activation if architecture.activation_at in (None, n_layer) else SILU
    gate, up = keys.text("hidden_activation"), keys.metadata.get(UP_ACTIVATION_KEY)
    threshold = _number(keys.metadata, FATRELU_THRESHOLD_KEY)
    try:
        activation = unnamed if gate is None else parse_activation(gate, threshold)
    except InvalidRequestError as error:
        raise UnsupportedModelError(
            f"in the file's key {keys.architecture}.hidden_activation, {error}"
        ) from None
    if up is None:
        return activation
    if not isinstance(up, str) or up != "relu":  # an array does not compare
        raise UnsupportedModelError(
            f"the file's key {UP_ACTIVATION_KEY} is {shown(up)}; only relu is supported"
        )
    return FFNActivation(activation.gate, "relu", activation.threshold)


def _top_k(keys: _Keys, n_layer: int) -> tuple[float | None, ...]:
    """Multipliers of the layers' Gaussian top-k; of those without one the key says -inf."""
    values = keys.get(TOP_K_KEY)
    if values is None:
        return (None,) * n_layer
    if not _is_array(values) or len(values) != n_layer:
        raise keys.error(TOP_K_KEY, f"must hold a number for each of {n_layer} layers")
    if any(isinstance(v, bool | np.bool_ | str) or not -math.inf <= v <= MAX_MULTIPLIER for v in values):
        raise keys.error(TOP_K_KEY, f"must hold numbers up to {MAX_MULTIPLIER:g}, or -inf")
    return tuple(None if v == -math.inf else float(v) for v in values)


def _xielu(keys: _Keys, n_layer: int) -> tuple[XIELU, ...]:
    """The numbers of each layer. Keys have no architecture before them, and one number or one for each
    layer; of alpha_p and alpha_n the softplus counts, of the second that and beta."""
    found = []
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        key = f"xielu.{name}"
        value = keys.metadata.get(key)
        values = list(value) if _is_array(value) else [value] * n_layer  # type: ignore[arg-type]
        numbers = [_number({key: one}, key) for one in values]
        if len(numbers) != n_layer or None in numbers:
            raise FormatError(f"the file's key {key} must hold a number, or one for each of {n_layer} layers")
        if any(abs(number) > 1e4 for number in numbers if number is not None):
            raise FormatError(f"the file's key {key} holds a number above 10000; the file is damaged")
        found.append(np.array(numbers, np.float64))
    alpha_p, alpha_n, beta, eps = found
    positive, negative = np.logaddexp(0, alpha_p), beta + np.logaddexp(0, alpha_n)
    return tuple(XIELU(*map(float, each)) for each in zip(positive, negative, beta, eps, strict=True))


def _qk_norm(gguf: GGUFFile, architecture: Architecture, layer: int) -> HeadNorm | None:
    is_there = f"blk.{layer}.attn_q_norm.weight" in gguf.tensors
    return architecture.qk_norm if is_there or not architecture.optional_qk_norm else None


def _parallel(gguf: GGUFFile, keys: _Keys, architecture: Architecture, layer: int) -> bool:
    match architecture.parallel:
        case "by_key":
            return keys.flag("use_parallel_residual", True)
        case "without_ffn_norm":
            return f"blk.{layer}.{architecture.ffn_norm}.weight" not in gguf.tensors
    return architecture.parallel is not None


def _windows(keys: _Keys, n_layer: int, architecture: Architecture) -> tuple[int, ...]:
    """Sliding windows. A pattern says which layers have one: a truth value each, or n: all but one of n.

    Where the file has no pattern, the architecture's is such an n; 0: every layer has the window.
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
    if not _is_array(pattern):
        period = keys.integer("attention.sliding_window_pattern", 1, 1 << 12, period or None)
        without = 0 if architecture.window_last else period - 1
        return tuple(0 if i % period == without else window for i in range(n_layer))
    if len(pattern) != n_layer or not all(isinstance(v, bool | np.bool_) for v in pattern):
        raise keys.error("attention.sliding_window_pattern", f"must hold true or false for {n_layer} layers")
    return tuple(window if windowed else 0 for windowed in pattern)


def _frequencies(base: float, n_rot: int) -> np.ndarray:
    """base^(-2i / n_rot), float64 [n_rot / 2]."""
    return base ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)


def _long_rope(
    gguf: GGUFFile, keys: _Keys, architecture: Architecture, head_dim: int, n_ctx_train: int
) -> LongRope | None:
    """The rotation for long contexts, of files with factors for it."""
    found = [name for name in (SHORT_FACTORS, LONG_FACTORS) if name in gguf.tensors]
    if architecture.rope is None or not found:
        return None
    if len(found) == 1:
        raise UnsupportedModelError(
            f"the file has only one of {SHORT_FACTORS} and {LONG_FACTORS}: {found[0]}"
        )
    n_ctx = keys.integer("rope.scaling.original_context_length", 1, 1 << 31, n_ctx_train)
    return LongRope(n_ctx, _rope(gguf, keys, architecture, head_dim, n_ctx_train, LONG_FACTORS))


def _rope(
    gguf: GGUFFile,
    keys: _Keys,
    architecture: Architecture,
    head_dim: int,
    n_ctx_train: int,
    factors: str | None = None,
) -> Rope:
    """Frequencies with the file's scaling applied: none, linear, yarn, or divisors in the tensor
    `factors`."""
    factors = factors or (SHORT_FACTORS if SHORT_FACTORS in gguf.tensors else LLAMA3_FACTORS)
    n_rot = keys.integer("rope.dimension_count", 2, head_dim, head_dim)
    if n_rot % 2:
        raise keys.error("rope.dimension_count", f"is {n_rot}, which is odd")
    base = keys.real("rope.freq_base", 1e-3, 1e15, 10000.0)
    if alpha := keys.real("rope.scaling.alpha", 0.0, 1e9, 0.0):  # hunyuan_vl's, whatever the context is
        base *= alpha ** (n_rot / max(n_rot - 2, 1))
    freq = _frequencies(base, n_rot)
    if factors in gguf.tensors:  # the scaling of Llama 3 and Phi 3 is a tensor of divisors, not a key
        freq = freq / _divisors(gguf, factors, n_rot // 2)

    kind = keys.text("rope.scaling.type") or "linear"
    factor = keys.real("rope.scaling.factor", 0.0, 1e6, keys.get("rope.scale_linear", 0.0)) or 1.0
    magnitude = 1.0
    if kind == "linear":
        freq = freq / factor
    elif kind == "yarn":
        freq, magnitude = _yarn(keys, architecture, freq, base, factor, n_ctx_train)
    elif kind != "none" and not (kind == "longrope" and factors in (SHORT_FACTORS, LONG_FACTORS)):
        raise UnsupportedModelError(
            f"the RoPE scaling {shown(kind)} is not supported; supported are none, linear, yarn, "
            f"and longrope with {SHORT_FACTORS} and {LONG_FACTORS}"
        )
    magnitude *= keys.real("rope.scaling.attn_factor", 0.0, 1e3, 1.0)
    if not np.isfinite(freq).all():
        raise FormatError("the file's RoPE frequencies are not finite; the file is damaged")
    assert architecture.rope is not None
    return Rope(architecture.rope, n_rot, tuple(freq.tolist()), magnitude)


def _divisors(gguf: GGUFFile, name: str, n: int) -> np.ndarray:
    info = gguf.tensors[name]
    if tuple(info.shape) != (n,):
        raise UnsupportedModelError(f"the tensor {name} is {list(info.shape)}, expected [{n}]")
    divisors = dequantize(gguf.data(info.name), info.type, info.shape).reshape(n).astype(np.float64)
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise FormatError(f"the tensor {name} holds a number that is not positive and finite")
    return divisors


def _yarn(
    keys: _Keys, architecture: Architecture, freq: np.ndarray, base: float, factor: float, n_ctx_train: int
) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): slow channels interpolate by `factor`, fast ones stay, a ramp lies between."""
    n_ctx_original = keys.integer("rope.scaling.original_context_length", 1, 1 << 31, n_ctx_train)
    beta_fast = keys.real("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0)
    beta_slow = keys.real("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0)
    extrapolate = keys.real("rope.scaling.yarn_ext_factor", 0.0, 1.0, 1.0)
    if base <= 1.0:
        raise keys.error("rope.freq_base", f"is {base:g}, which YaRN cannot scale")

    def channel(rotations: float) -> float:
        """Index of the channel pair that turns `rotations` times within the original context."""
        return len(freq) * math.log(n_ctx_original / (rotations * 2 * math.pi)) / math.log(base)

    low, high = channel(beta_fast), channel(beta_slow)
    if architecture.rounded_yarn:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(freq) - 1)
    ramp = np.clip((np.arange(len(freq)) - low) / max(0.001, high - low), 0, 1)
    keep = (1 - ramp) * extrapolate
    magnitude = keys.real("rope.scaling.yarn_attn_factor", 0.0, 1e3, _yarn_magnitude(factor, 1.0))
    if multiplier := keys.real(YARN_LOG_MULTIPLIER, 0.0, 1e3, 0.0):
        if architecture.latent_eps is None:
            magnitude = _yarn_magnitude(factor, 1.0) / _yarn_magnitude(factor, multiplier)
        elif keys.get("rope.scaling.yarn_attn_factor") is None:
            magnitude = 1.0  # the scale of the scores has it all
    return freq / factor * (1 - keep) + freq * keep, magnitude


def _latent_yarn_scale(keys: _Keys) -> float:
    """What scores are multiplied by beside the scale of a head's width. The multiplier is a tenth of
    mscale_all_dim of DeepSeek's config.json here, and in no other architecture."""
    if keys.text("rope.scaling.type") != "yarn":
        return 1.0
    factor = keys.real("rope.scaling.factor", 0.0, 1e6, 1.0)
    return _yarn_magnitude(factor, 10 * keys.real(YARN_LOG_MULTIPLIER, 0.0, 1e3, 0.0)) ** 2


def _yarn_magnitude(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _is_array(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)
