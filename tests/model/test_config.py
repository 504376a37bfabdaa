"""The configuration in a file: parameters in keys, and invalid keys."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.convert.hf_config import HFConfig
from hotset.errors import FormatError, HotsetError, InvalidRequestError, UnsupportedModelError
from hotset.formats.quants import DECODABLE, GGMLType
from hotset.model.activation import DRELU, FFNActivation, parse_activation
from hotset.model.architectures import ARCHITECTURES
from hotset.model.config import ModelConfig, config_from_gguf
from hotset.model.decoder import describe
from hotset.model.experts import Experts
from hotset.model.keys import FATRELU_THRESHOLD_KEY, UP_ACTIVATION_KEY, Keys
from hotset.model.mixers import ConvMixer, DeltaMixer, StateSpaceMixer
from hotset.model.operations import ExpertLinear, Mask
from hotset.model.predictor import Predictor, PredictorKind

SOUND = {
    "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def file(architecture: str = "llama", tensors: dict[str, Any] | None = None, **keys: Any) -> Any:
    """Return a stand-in for a file for config_from_gguf. Keys: dots are written __, None removes one."""
    keys = SOUND | {key.replace("__", "."): value for key, value in keys.items()}
    metadata = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    shapes = {"token_embd.weight": (64, 300), **(tensors or {})}
    infos = {name: SimpleNamespace(name=name, shape=s, type=GGMLType.F32) for name, s in shapes.items()}
    return SimpleNamespace(
        dialect="gguf", metadata={"general.architecture": architecture, **metadata}, tensors=infos,
        data=lambda name: np.full(math.prod(infos[name].shape), 2.0, np.float32).view(np.uint8),
    )  # fmt: skip


def complete(**replaced: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the tensors of a two-layer llama of SOUND; a shape of None drops one of them.

    Planes have the types that hotset builds them with, the others are F32.
    """
    own = {"codes": GGMLType.I8, "scales": GGMLType.F16}
    layer = {
        "attn_norm": (64,), "attn_q": (64, 64), "attn_k": (64, 32), "attn_v": (64, 32),
        "attn_output": (64, 64), "ffn_norm": (64,),
        "ffn_gate": (64, 96), "ffn_up": (64, 96), "ffn_down": (96, 64),
    }  # fmt: skip
    shapes: dict[str, Any] = {"token_embd.weight": (64, 300), "output_norm.weight": (64,)}
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    shapes |= replaced
    return {
        name: SimpleNamespace(
            name=name, shape=s, type=next((own[end] for end in own if name.endswith(end)), GGMLType.F32)
        )
        for name, s in shapes.items()
        if s is not None
    }


def test_defaults_of_a_plain_llama() -> None:
    config = config_from_gguf(file())
    assert (config.n_layer, config.n_embd, config.n_ff, config.n_vocab) == (2, 64, (96, 96), 300)
    assert (config.n_head, config.n_head_kv, config.head_dim, config.head_dim_v) == (4, 2, 16, 16)
    assert tuple(layer.window for layer in config.layers) == (0, 0)
    assert config.activation == FFNActivation("silu")
    assert config.layers[0].rope.freq == pytest.approx([10000 ** (-2 * i / 16) for i in range(8)], rel=1e-14)


def test_arrays_give_a_number_per_layer() -> None:
    assert config_from_gguf(file(feed_forward_length=np.array([96, 128]))).n_ff == (96, 128)
    assert config_from_gguf(file(attention__head_count=[4, 4])).n_head == 4
    with pytest.raises(UnsupportedModelError, match="differs between layers"):
        config_from_gguf(file(attention__head_count_kv=[4, 2]))
    with pytest.raises(FormatError, match="3 entries for 2 layers"):
        config_from_gguf(file(feed_forward_length=[96, 96, 96]))


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (None, (16, 16)),
        ([True, False], (16, 0)),
        (np.array([False, True]), (0, 16)),
        (2, (16, 0)),
        (1, (0, 0)),
    ],
)
def test_windows(pattern: Any, windows: tuple[int, ...]) -> None:
    config = config_from_gguf(file(attention__sliding_window=16, attention__sliding_window_pattern=pattern))
    assert tuple(layer.window for layer in config.layers) == windows


def test_rope_freqs_divide_and_linear_scaling_slows() -> None:
    plain = config_from_gguf(file()).layers[0].rope.freq
    divided = config_from_gguf(file(tensors={"rope_freqs.weight": (8,)})).layers[0].rope.freq
    slowed = (
        config_from_gguf(file(rope__scaling__type="linear", rope__scaling__factor=4.0)).layers[0].rope.freq
    )
    old_key = config_from_gguf(file(rope__scale_linear=4.0)).layers[0].rope.freq
    none = config_from_gguf(file(rope__scaling__type="none", rope__scaling__factor=4.0)).layers[0].rope.freq
    assert divided == pytest.approx([f / 2 for f in plain])
    assert slowed == old_key == pytest.approx([f / 4 for f in plain])
    assert none == plain


def test_long_contexts_have_factors_of_their_own() -> None:
    tensors = {"rope_factors_short.weight": (8,), "rope_factors_long.weight": (8,)}
    original = {"rope__scaling__original_context_length": 32, "rope__scaling__attn_factor": 1.5}
    gguf = file(tensors=tensors, **original)  # all numbers are 2
    filled = gguf.data
    gguf.data = lambda name: (filled(name).view(np.float32) * (4 if "long" in name else 1)).view(np.uint8)
    plain = config_from_gguf(file()).layers[0].rope.freq
    config = config_from_gguf(gguf)
    for n_ctx, divisor in ((1, 2), (32, 2), (33, 8), (128, 8)):
        for layer in config.for_context(n_ctx).layers:
            assert layer.rope.freq == pytest.approx([f / divisor for f in plain])
            assert layer.rope.magnitude == 1.5
    assert config_from_gguf(file(tensors=tensors)).for_context(128).layers[0].rope.freq == pytest.approx(
        [f / 2 for f in plain]  # without the key, the original context is the whole context
    )


def test_factors_come_in_pairs() -> None:
    for name in ("rope_factors_short.weight", "rope_factors_long.weight"):
        with pytest.raises(UnsupportedModelError, match="has only one of"):
            config_from_gguf(file(tensors={name: (8,)}))


def test_yarn_keeps_fast_channels_and_slows_slow_ones() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    plain = np.array(config_from_gguf(file(context_length=4096)).layers[0].rope.freq)
    config = config_from_gguf(file(context_length=4096, **yarn))
    ratio = plain / np.array(config.layers[0].rope.freq)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(4)
    assert (np.diff(ratio) >= 0).all()
    assert 1 < ratio[3] < 4
    assert config.layers[0].rope.magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_the_ramp_of_yarn_is_clamped_and_of_whole_channels() -> None:
    """Check that a ramp beginning before the first channel or ending after the last two is clipped."""

    def kept(base: float, original: int, fast: float, slow: float) -> np.ndarray:
        """Return the part of each channel's own speed that remains, 0 to 1."""
        keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__freq_base": base}
        keys |= {"rope__scaling__yarn_beta_fast": fast, "rope__scaling__yarn_beta_slow": slow}
        keys |= {"rope__scaling__original_context_length": original}
        scaled = np.array(config_from_gguf(file(**keys)).layers[0].rope.freq)  # 8 channels
        plain = base ** (-np.arange(0, 16, 2) / 16)
        return (scaled / plain - 0.25) / 0.75

    def ramp(low: float, high: float) -> np.ndarray:
        return 1 - np.clip((np.arange(8) - low) / (high - low), 0, 1)

    # rotations n of 8 channels over a context L: channel 8 ln(L / 2 pi n) / ln base
    inside = kept(10000.0, 4096, 32.0, 1.0)  # 2.61 and 5.63, rounded down and up
    np.testing.assert_allclose(inside, ramp(2, 6), atol=1e-12)
    early = kept(10000.0, 64, 32.0, 1.0)  # -0.99 → 0, and 2.02 → 3
    np.testing.assert_allclose(early, ramp(0, 3), atol=1e-12)
    late = kept(3.0, 4096, 32.0, 1.0)  # 21.9 and 47.2 → 21 and 15: no channel is slowed
    np.testing.assert_allclose(late, np.ones(8), atol=1e-12)
    behind = kept(12.0, 4096, 300.0, 1.0)  # 2.49 and 20.9 → 2 and 15, not 21
    np.testing.assert_allclose(behind, ramp(2, 15), atol=1e-12)


def test_activations() -> None:
    def activation(architecture: str = "llama", override: str | None = None, **more: Any) -> FFNActivation:
        gguf = file(architecture, hidden_activation=more.pop("named", None))
        gguf.metadata |= {key: value for key, value in more.items() if value is not None}
        return config_from_gguf(gguf, activation=override).activation

    assert activation("bamboo") == DRELU
    assert activation(named="relu") == FFNActivation("relu")
    assert activation(named="relu", **{UP_ACTIVATION_KEY: "relu"}) == DRELU
    assert activation(named="drelu") == DRELU
    assert activation(named="fatrelu", **{FATRELU_THRESHOLD_KEY: 0.25}) == FFNActivation(
        "fatrelu", None, 0.25
    )
    assert activation(named="silu", override="fatrelu:0.01") == FFNActivation("fatrelu", None, 0.01)
    assert parse_activation("gelu_pytorch_tanh").gate == "gelu_tanh"
    for refused in ("fatrelu", "swiglu", ""):
        with pytest.raises(UnsupportedModelError, match="hidden_activation"):
            activation(named=refused)
    for refused in ("tanh", np.array([True, False]), ["relu", "relu"], 3):
        with pytest.raises(UnsupportedModelError, match="only relu"):
            activation(named="relu", **{UP_ACTIVATION_KEY: refused})
    with pytest.raises(FormatError, match="must be a number"):
        activation(named="fatrelu", **{FATRELU_THRESHOLD_KEY: "high"})
    for refused in ("fatrelu", "fatrelu:-1", "fatrelu:nan", "relu:1", "tanh"):
        with pytest.raises(InvalidRequestError):
            parse_activation(refused)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'plamo2' is not supported; 'hotset list"):
        config_from_gguf(file("plamo2"))
    with pytest.raises(FormatError, match=r"general\.architecture"):
        config_from_gguf(SimpleNamespace(metadata={}, tensors={}))
    for kind, hint in (
        ("adapter", "`lora`"),
        ("imatrix", "quantize --imatrix"),
        ("mmproj", "language model"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"not a model but .*{hint}"):
            config_from_gguf(SimpleNamespace(metadata={"general.type": kind}, tensors={}))


def test_a_number_may_lie_at_either_end_of_its_range() -> None:
    keys = Keys(
        {"a.low": 2, "a.high": 3.0, "a.above": 3.0000001, "a.most": 1e9, "a.least": 1e-9, "a.zero": 0}, "a"
    )
    assert keys.real("low", 2, 3) == keys.integer("low", 2, 3) == keys.integer("low", 1, 2) == 2
    assert keys.real("high", 2, 3) == 3
    assert type(keys.real("low", 2, 3)) is float
    assert keys.real("missing", 2, 3, 2.5) == 2.5
    with pytest.raises(FormatError, match="outside 2 to 3"):
        keys.real("above", 2, 3)
    with pytest.raises(FormatError, match="outside 2 to 3"):
        keys.real("zero", 2, 3)
    assert [keys.factor(key) for key in ("most", "least", "zero", "missing")] == [1e9, 1e-9, 1, 1]
    assert keys.factor("zero", 2.0) == 2
    with pytest.raises(FormatError, match=r"is 1000000001.0, outside 0 to 1e\+09"):
        Keys({"a.f": 1e9 + 1}, "a").factor("f")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"block_count": 0}, "outside 1 to"),
        ({"block_count": 2**62}, "outside 1 to"),
        ({"block_count": True}, "must be an integer"),
        ({"embedding_length": "64"}, "must be an integer, not '64'"),
        ({"attention__head_count": 3}, "not a multiple of the 2 KV heads"),
        ({"attention__head_count": 6}, "does not divide the width 64"),
        ({"attention__layer_norm_rms_epsilon": math.nan}, "is nan"),
        ({"attention__layer_norm_rms_epsilon": None}, "is missing"),
        ({"rope__dimension_count": 7}, "odd"),
        ({"rope__dimension_count": 64}, "outside 2 to 16"),
        ({"rope__freq_base": math.inf}, "is inf"),
        ({"rope__freq_base": -1.0}, "outside"),
        ({"rope__freq_base": 1.0, "rope__scaling__type": "yarn", "rope__scaling__factor": 2.0},
         "cannot scale"),
        ({"rope__scaling__type": 3}, "must be a string"),
        ({"embedding_scale": 1e-40}, "llama.embedding_scale is 1e-40, below 1e-09"),
        ({"residual_scale": -1.0}, "outside"),
        ({"logit_scale": 5e-324}, "below 1e-09"),
        ({"attention__scale": 1e10}, "outside"),
        ({"attn_logit_softcapping": 1e-46}, "below 1e-09"),
        ({"final_logit_softcapping": math.nan}, "is nan"),
        ({"attention__sliding_window": -1}, "outside"),
        ({"attention__sliding_window": 2**31}, "outside"),
        ({"attention__sliding_window": 8, "attention__sliding_window_pattern": [True]}, "for 2 layers"),
        ({"expert_count": 8}, "llama.expert_used_count is missing"),
        ({"expert_count": 8, "expert_used_count": 9}, "outside 1 to 8"),
        ({"expert_count": 8, "expert_used_count": 2, "expert_weights_norm": 1}, "must be true or false"),
        ({"expert_count": 8, "expert_used_count": 2, "expert_group_count": 3}, "is 3 for 8 experts"),
        (
            {"expert_count": 8, "expert_used_count": 5, "expert_group_count": 4}
            | {"expert_group_used_count": 2},
            "is 4 for 8 experts of which 5 are used",
        ),
    ],
)  # fmt: skip
def test_a_damaged_key_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match="llama") as error:
        config_from_gguf(file(**keys))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope__scaling__type": "longrope"}, "'longrope' is not supported"),
        ({"expert_count": 1025}, "1025 experts, but at most 1024"),
        ({"expert_count": 200, "expert_used_count": 129}, "129 experts for a token, but at most 128"),
        ({"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 5}, "expert_gating_func is 5"),
        ({"attention__key_length": 513}, "heads of 513 channels, but at most 512"),
        ({"attention__value_length": 513}, "heads of 513 channels, but at most 512"),
        ({"attention__head_count": 257, "attention__head_count_kv": 1, "attention__key_length": 8},
         "257 query heads for each KV head, but at most 256"),
    ],
)  # fmt: skip
def test_unrunnable_models_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_gguf(file(**keys))


def test_a_file_that_is_not_causal_is_an_encoder() -> None:
    assert config_from_gguf(file()).causal
    config = config_from_gguf(file(attention__causal=False))
    assert not config.causal
    graph = describe(config, complete())
    assert (graph.is_encoder, graph.result.name, graph.result.width) == (True, "result", config.n_embd)
    assert graph.n_vocab(complete()) == config.n_vocab
    recurrent = {"attention__head_count_kv": [0, 2], "shortconv__l_cache": 3, "attention__causal": False}
    with pytest.raises(UnsupportedModelError, match=r"an encoder .* with layers that look back only"):
        config_from_gguf(file("lfm2", **recurrent))
    with pytest.raises(FormatError, match=r"llama\.attention\.causal must be true or false"):
        config_from_gguf(file(attention__causal=0))


def test_layers_without_kv_heads_have_a_short_convolution() -> None:
    heads = {"attention__head_count_kv": [0, 2], "shortconv__l_cache": 3}
    config = config_from_gguf(file("lfm2", **heads))
    assert [layer.mixer for layer in config.layers] == [ConvMixer(3), None]
    assert (config.n_head_kv, config.n_recurrent, config.output_norm) == (2, 1, "token_embd_norm")
    all_attend = config_from_gguf(file("lfm2", attention__head_count_kv=[2, 2]))
    assert all_attend.n_recurrent == 0
    with pytest.raises(UnsupportedModelError, match="no layer of the model has attention"):
        config_from_gguf(file("lfm2", **heads | {"attention__head_count_kv": [0, 0]}))
    with pytest.raises(UnsupportedModelError, match="head_count_kv differs between layers"):
        config_from_gguf(file("lfm2", **heads | {"block_count": 3, "attention__head_count_kv": [0, 2, 4]}))
    for kernel in (None, 1, 65, "3"):
        with pytest.raises(FormatError, match=r"lfm2\.shortconv\.l_cache"):
            config_from_gguf(file("lfm2", **heads | {"shortconv__l_cache": kernel}))
    with pytest.raises(FormatError, match="head_count_kv"):
        config_from_gguf(file(attention__head_count_kv=[0, 2]))


DELTA = {
    "ssm__conv_kernel": 4, "ssm__inner_size": 96, "ssm__state_size": 16, "ssm__time_step_rank": 6,
    "ssm__group_count": 2, "block_count": 8,
}  # fmt: skip


def test_layers_of_one_part() -> None:
    space = StateSpaceMixer(4, 6, 2, 16, 16)
    parts = {"block_count": 4, "attention__head_count_kv": [0, 0, 2, 0]}
    keys = DELTA | parts | {"feed_forward_length": [0, 96, 0, 0]}
    config = config_from_gguf(file("nemotron_h", **keys))
    assert [layer.mixer for layer in config.layers] == [space, None, None, space]
    assert [layer.mixes for layer in config.layers] == [True, False, True, True]
    assert config.n_ff == (0, 96, 0, 0)
    assert all(layer.rope is None and not layer.gated for layer in config.layers)
    rms, layer = "attention__layer_norm_rms_epsilon", "attention__layer_norm_epsilon"
    assert config_from_gguf(file("nemotron_h", **keys, **{rms: None, layer: 0.25})).norm_eps == 0.25
    # Keys may have an entry for skipped layers.
    extra = {"block_count": 5, "nextn_predict_layers": 1, "attention__head_count_kv": [0, 0, 2, 0, 2]}
    assert config_from_gguf(file("nemotron_h", **keys | extra)).n_ff == (0, 96, 0, 0)
    with pytest.raises(FormatError, match=r"head_count_kv has 5 entries for 4 layers"):
        config_from_gguf(file("nemotron_h", **keys | extra | {"block_count": 4, "nextn_predict_layers": 0}))
    for wrong in ({"ssm__group_count": 4}, {"ssm__inner_size": 100}, {"ssm__conv_kernel": 1}):
        with pytest.raises(FormatError, match=r"nemotron_h\.ssm\."):
            config_from_gguf(file("nemotron_h", **keys | wrong))


def test_experts_in_layers_of_one_part() -> None:
    keys: dict[str, Any] = DELTA | {"block_count": 4, "attention__head_count_kv": [0, 0, 2, 0]}
    keys |= {"feed_forward_length": [0, 96, 0, 48], "expert_count": 8, "expert_used_count": 2}
    keys |= {"expert_feed_forward_length": 48, "moe_latent_size": 32}
    config = config_from_gguf(file("nemotron_h_moe", {"blk.3.ffn_gate_inp.weight": (64, 8)}, **keys))
    assert [layer.experts is not None for layer in config.layers] == [False, False, False, True]
    experts = config.layers[3].experts
    assert experts is not None
    assert (experts.scoring, experts.normalised, experts.n_latent) == ("sigmoid", False, 32)
    assert config.n_ff == (0, 96, 0, 8 * 48)


def test_rwkv_has_no_attention() -> None:
    ranks = {f"attention.{name}_lora_rank": 8 for name in ("decay", "iclr", "value_residual_mix")}
    keys = {"attention.head_count": 0, "attention.layer_norm_epsilon": 1e-5, "wkv.head_size": 16, **ranks}
    config = config_from_gguf(file("rwkv7", **keys))
    assert (config.n_head, config.n_head_kv, config.head_dim) == (0, 0, 0)
    assert config.n_recurrent == config.n_layer
    assert config.layers[0].activation.gate == "relu2"
    for wrong in ({"wkv.head_size": 7}, {"wkv.head_size": 0}, {"attention.iclr_lora_rank": None}):
        with pytest.raises(FormatError, match=r"rwkv7\.(wkv|attention)"):
            config_from_gguf(file("rwkv7", **keys | wrong))
    older = {"time_mix_extra_dim": 8, "time_decay_extra_dim": 8, "rescale_every_n_layers": 2}
    config = config_from_gguf(file("rwkv6", **keys | older, block_count=5))
    assert [layer.result_scale for layer in config.layers] == [1.0, 0.5, 1.0, 0.5, 1.0]


def test_layers_with_a_gated_delta_net() -> None:
    mixer = DeltaMixer(4, 6, 2, 16, 16, tiled=True)
    config = config_from_gguf(file("qwen35", **DELTA))
    assert [layer.mixer for layer in config.layers] == [mixer, mixer, mixer, None] * 2
    assert all(layer.attention_gate for layer in config.layers)
    config = config_from_gguf(file("qwen35", **DELTA, full_attention_interval=2))
    assert [layer.mixer for layer in config.layers] == [mixer, None] * 4
    # No layer for multi-token prediction has a state.
    named = {"attention__recurrent_layers": [False, True, True] + [False] * 5, "nextn_predict_layers": 3}
    config = config_from_gguf(file("qwen35", **DELTA | named))
    assert [layer.mixer for layer in config.layers] == [None, mixer, mixer, None, None]
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48}
    config = config_from_gguf(file("qwen35moe", **DELTA, **experts, feed_forward_length=None))
    assert {layer.n_ff for layer in config.layers} == {48}
    assert not config_from_gguf(file("qwen3next", **DELTA, **experts)).layers[0].mixer.tiled  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"ssm__inner_size": 97}, FormatError, "ssm.inner_size is 97 for 6 heads"),
        ({"ssm__group_count": 4}, FormatError, "ssm.group_count is 4 for 6 heads"),
        ({"ssm__group_count": 7}, FormatError, "outside 1 to 6"),
        ({"ssm__state_size": 513}, FormatError, "outside 1 to 512"),
        ({"ssm__inner_size": 6 * 513}, FormatError, "for 6 heads"),
        ({"ssm__time_step_rank": 1025}, FormatError, "outside 1 to 1024"),
        ({"ssm__conv_kernel": None}, FormatError, "ssm.conv_kernel is missing"),
        ({"attention__recurrent_layers": [True] * 7}, FormatError, "true or false for 8 layers"),
        ({"attention__recurrent_layers": [1] * 8}, FormatError, "true or false for 8 layers"),
        ({"attention__recurrent_layers": [True] * 8}, UnsupportedModelError, "no layer .* has attention"),
        ({"full_attention_interval": 9}, UnsupportedModelError, "no layer .* has attention"),
    ],
)
def test_delta_nets_that_make_no_sense(keys: dict, error: type[HotsetError], message: str) -> None:
    with pytest.raises(error, match=message):
        config_from_gguf(file("qwen35", **DELTA | keys))


def test_phimoe_is_refused_with_the_reason() -> None:
    with pytest.raises(
        UnsupportedModelError, match="phimoe is not supported: engines compute another function"
    ):
        config_from_gguf(file("phimoe", expert_count=8))
    with pytest.raises(UnsupportedModelError, match="another function than it was trained with"):
        HFConfig({"architectures": ["PhimoeForCausalLM"]})


def test_an_architecture_without_experts_has_none() -> None:
    with pytest.raises(UnsupportedModelError, match="mixture-of-experts models of the architecture gemma2"):
        config_from_gguf(file("gemma2", expert_count=8))


def test_expert_facts_follow_keys_and_architecture() -> None:
    used = {"expert_count": 8, "expert_used_count": 2}
    config = config_from_gguf(file(**used))
    assert config.layers[0].experts == Experts(8, 2, "softmax", True)
    assert config.n_ff == (8 * 96, 8 * 96)
    config = config_from_gguf(
        file(
            **used, expert_feed_forward_length=32, expert_gating_func=2, expert_weights_norm=False,
            expert_weights_scale=2.5, expert_group_count=4, expert_group_used_count=2, expert_shared_count=3,
            leading_dense_block_count=1,
        )
    )  # fmt: skip
    assert config.layers[0].experts is None
    assert config.layers[1].experts == Experts(8, 2, "sigmoid", False, 2.5, 4, 2, 96)
    assert config.n_ff == (96, 8 * 32)
    assert config_from_gguf(file(expert_count=0)).layers[0].experts is None


def test_experts_may_lie_in_one_tensor_or_in_one_each() -> None:
    config = config_from_gguf(file(expert_count=3, expert_used_count=2))
    dense = {f"blk.{i}.ffn_{name}.weight": None for i in range(2) for name in ("gate", "up", "down")}
    router = {f"blk.{i}.ffn_gate_inp.weight": (64, 3) for i in range(2)}
    shapes = {"gate": (64, 96), "up": (64, 96), "down": (96, 64)}
    one = {f"blk.{i}.ffn_{n}_exps.weight": (*s, 3) for i in range(2) for n, s in shapes.items()}
    each = {f"blk.{i}.ffn_{n}.{e}.weight": s for i in range(2) for n, s in shapes.items() for e in range(3)}
    merged = {k: s for k, s in one.items() if "down" in k}
    merged |= {f"blk.{i}.ffn_gate_up_exps.weight": (64, 192, 3) for i in range(2)}
    for tensors in (one, each, merged):
        graph = describe(config, complete(**dense, **router, **tensors))
        assert [ffn.n_ff for ffn in graph.ffns] == [288, 288]
        assert graph.ffns[0].neurons.width == 192
    up = graph.ffns[0].up
    assert isinstance(up, ExpertLinear)
    assert (up.first_row, up.n_rows) == (96, 96)
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ffn_up\.2\.weight"):
        describe(config, complete(**dense, **router, **each | {"blk.1.ffn_up.2.weight": None}))


def test_a_powerinfer_file_means_other_activations() -> None:
    def config(architecture: str, **more: Any) -> ModelConfig:
        gguf = file(architecture, attention__layer_norm_epsilon=1e-5, **more)
        gguf.dialect = "powerinfer"
        return config_from_gguf(gguf)

    assert config("llama").activation == config("opt").activation == FFNActivation("relu")
    assert config("falcon").activation == FFNActivation("relu")
    assert config_from_gguf(file("falcon", attention__layer_norm_epsilon=1e-5)).activation.gate == "gelu"
    assert config("bamboo").activation == DRELU
    assert config("llama", hidden_activation="relu2").activation.gate == "relu2"
    with pytest.raises(UnsupportedModelError, match="'qwen2' is not supported in PowerInfer's format"):
        config("qwen2")


def test_a_tokenizer_larger_than_the_embedding_is_refused() -> None:
    gguf = file()
    gguf.metadata["tokenizer.ggml.tokens"] = ["x"] * 301
    with pytest.raises(FormatError, match="301 tokens"):
        config_from_gguf(gguf)


junk = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(0, 200), st.floats(), st.floats(0, 100, width=32),
    st.text(max_size=8), st.sampled_from(["linear", "yarn", "none", "relu", "drelu", "fatrelu"]),
    st.lists(st.one_of(st.integers(-1, 100), st.booleans()), max_size=3),
)  # fmt: skip
KEYS = [
    *SOUND,
    *("attention.key_length", "attention.value_length", "attention.sliding_window"),
    *("attention.sliding_window_pattern", "rope.dimension_count", "rope.freq_base", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor"),
    *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier", "rope.scaling.attn_factor"),
    *("hidden_activation", "expert_count", "attention.causal", "attention.layer_norm_epsilon"),
    *("attention.scale", "embedding_scale", "residual_scale", "logit_scale", "rope.freq_base_swa"),
    *("attn_logit_softcapping", "final_logit_softcapping", "rope.scaling.finetuned"),
    *("expert_used_count", "expert_feed_forward_length", "expert_weights_norm", "expert_group_count"),
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(ARCHITECTURES)),
    st.sampled_from(["gguf", "powerinfer"]),
    st.dictionaries(st.sampled_from(KEYS), junk, max_size=4),
)
def test_any_keys_give_one_message(architecture: str, dialect: str, keys: dict[str, Any]) -> None:
    gguf = file(architecture, **keys)
    gguf.dialect = dialect

    def load() -> None:
        config = config_from_gguf(gguf)
        assert config.layers[0].rope is None or all(math.isfinite(f) for f in config.layers[0].rope.freq)
        describe(config, gguf.tensors)

    with pytest.raises(HotsetError) as error:  # the file has only one tensor, so any keys are refused
        load()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_the_decoder_asks_for_each_tensor_with_its_shape() -> None:
    config = config_from_gguf(file())
    graph = describe(config, complete())
    assert graph.result.name == "logits"
    assert len({value.name for value in graph.values}) == len(graph.values)
    for name, replaced, message in [
        ("blk.1.ffn_up.weight", None, r"lacks the tensor blk.1.ffn_up.weight \[64, 96\]"),
        ("blk.1.ffn_gate.weight", None, r"lacks the tensor blk.1.ffn_gate.weight \[64, 96\]"),
        ("blk.0.attn_k.weight", (64, 64),
            r"attn_k.weight has the shape \[64, 64\], but the file's keys say \[64, 32\]"),
        ("blk.0.attn_q.bias", (32,), r"attn_q.bias has the shape \[32\]"),
        ("blk.0.ffn_gate_inp.weight", (64, 8),
         "1 tensors that no llama model uses, such as blk.0.ffn_gate_inp"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedModelError, match=message):
            describe(config, complete(**{name: replaced}))


@pytest.mark.parametrize("type_", sorted(set(GGMLType) - DECODABLE), ids=lambda type: type.name)
def test_a_type_that_nothing_computes_with_is_named(type_: GGMLType) -> None:
    config = config_from_gguf(file())
    for name in ("blk.1.ffn_up.weight", "blk.0.attn_norm.weight", "token_embd.weight"):
        tensors = complete()
        tensors[name].type = type_
        with pytest.raises(UnsupportedModelError, match=f"{name} has the type {type_.name}, which"):
            describe(config, tensors)


def test_planes_have_types_of_their_own() -> None:
    config = config_from_gguf(file(), activation="relu")
    shapes = {"ffn_down_t.codes": (64, 96), "ffn_down_t.scales": (64, 3)}
    for name in shapes:
        tensors = complete(**{f"blk.{i}.{n}": shape for i in range(2) for n, shape in shapes.items()})
        describe(config, tensors)
        tensors[f"blk.1.{name}"].type = GGMLType.F32
        with pytest.raises(UnsupportedModelError, match=f"blk.1.{name} has the type F32"):
            describe(config, tensors)


def test_the_output_is_tied_where_the_file_has_none() -> None:
    config = config_from_gguf(file())
    assert describe(config, complete()).ops[-1].weight == "token_embd.weight"
    untied = complete(**{"output.weight": (64, 300)})
    assert describe(config, untied).ops[-1].weight == "output.weight"


def test_gate_and_up_may_be_the_rows_of_one_matrix() -> None:
    config = config_from_gguf(file())
    fused: dict[str, Any] = {f"blk.{i}.ffn_gate.weight": None for i in range(2)}
    fused |= {f"blk.{i}.ffn_up.weight": (64, 192) for i in range(2)}
    for ffn in describe(config, complete(**fused)).ffns:
        assert ffn.gate is not None
        assert (ffn.gate.weight, ffn.gate.first_row, ffn.gate.out.width) == (ffn.up.weight, 0, 96)
        assert (ffn.up.first_row, ffn.up.out.width) == (96, 96)
    with pytest.raises(UnsupportedModelError, match=r"lacks the tensor blk\.1\.ffn_gate\.weight"):
        describe(config, complete(**fused | {"blk.1.ffn_up.weight": (64, 200)}))


def test_qwen2_needs_its_biases() -> None:
    config = config_from_gguf(file("qwen2"))
    with pytest.raises(UnsupportedModelError, match=r"lacks the tensor blk\.0\.attn_q\.bias"):
        describe(config, complete())


def test_olmo_has_norms_without_weights_and_clamps_nothing() -> None:
    keys = {"attention__layer_norm_epsilon": 1e-5, "attention__layer_norm_rms_epsilon": None}
    config = config_from_gguf(file("olmo", **keys))
    assert (config.norm, config.norm_weights) == ("layer", False)
    with pytest.raises(UnsupportedModelError, match=r"output_norm.weight"):  # the file is another model
        describe(config, complete())
    with pytest.raises(UnsupportedModelError, match=r"olmo\.attention\.clamp_kqv"):
        config_from_gguf(file("olmo", attention__clamp_kqv=8.0, **keys))
    config_from_gguf(file("olmo", attention__clamp_kqv=0.0, **keys))


# ---- architectures without a gate, with LayerNorm, learned positions ---------------------------------

FALCON = {"attention__layer_norm_epsilon": 1e-5, "attention__layer_norm_rms_epsilon": None}


def test_facts_of_an_architecture_reach_the_config() -> None:
    falcon = config_from_gguf(file("falcon", **FALCON))
    assert falcon.norm == "layer"
    assert all((layer.parallel, layer.gated) == (True, False) for layer in falcon.layers)
    assert falcon.predictor_input == "layer_input"
    assert all(layer.rope is not None and layer.rope.kind == "neox" for layer in falcon.layers)
    opt = config_from_gguf(file("opt", {"position_embd.weight": (64, 50)}))
    assert (opt.first_position, opt.norm_eps, opt.predictor_input) == (2, 1e-5, "ffn_inp")
    assert all(layer.rope is None for layer in opt.layers)
    assert opt.n_ctx_train == opt.n_ctx_max == 48  # though the key is 128
    assert config_from_gguf(file("opt", attention__layer_norm_epsilon=1e-3)).norm_eps == pytest.approx(1e-3)
    llama = config_from_gguf(file())
    assert (llama.norm, llama.n_ctx_max, llama.sparse_threshold) == ("rms", None, 0.0)
    assert all(layer.gated for layer in llama.layers)
    nemotron = config_from_gguf(file("nemotron", rope__dimension_count=8, **FALCON))
    assert all(layer.rope is not None and layer.rope.n_rot == 8 for layer in nemotron.layers)
    with pytest.raises(FormatError, match=r"falcon\.attention\.layer_norm_epsilon is missing"):
        config_from_gguf(file("falcon"))
    with pytest.raises(FormatError, match="has only 2 rows"):
        config_from_gguf(file("opt", {"position_embd.weight": (64, 2)}))


LATENT = {
    "attention__key_length": 16, "attention__value_length": 16, "attention__kv_lora_rank": 8,
    "rope__dimension_count": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key", "entries"),
    [
        ("mistral3", "rope__scaling__original_context_length", {}),
        ("mistral4", "attention__temperature_length", LATENT),
        ("deepseek2", "attention__temperature_length", LATENT),
    ],
)
def test_gain_of_queries(name: str, key: str, entries: dict[str, Any]) -> None:
    scale = {"attention__temperature_scale": 0.25}
    config = config_from_gguf(file(name, **entries, **scale, **{key: 48}))
    assert (config.query_gain, config.n_ctx_max) == ((0.25, 48), None)
    assert config_from_gguf(file(name, **entries, **{key: 48})).query_gain is None
    with pytest.raises(FormatError, match=f"{key.replace('__', '.')} is missing"):
        config_from_gguf(file(name, **entries, **scale))
    with pytest.raises(FormatError, match=key.replace("__", ".")):
        config_from_gguf(file(name, **entries, **scale, **{key: 0}))


def test_facts_of_newer_architectures_reach_the_layers() -> None:
    window = {"attention__sliding_window": 16, "block_count": 7}
    gemma = config_from_gguf(file("gemma3", **window, rope__freq_base=1e6, rope__scaling__factor=8.0))
    assert [layer.window for layer in gemma.layers] == [16] * 5 + [0, 16]
    slowed, local = [1e6 ** (-i / 8) / 8 for i in range(8)], [10000 ** (-i / 8) for i in range(8)]
    for layer in gemma.layers:
        assert layer.rope is not None
        assert layer.rope.freq == pytest.approx(local if layer.window else slowed)
        assert (layer.qk_norm, layer.post_norm, layer.activation.gate) == ("head", True, "gelu_tanh")
        assert layer.attention_scale == 0.25
    assert gemma.embedding_scale == 8.0
    based = config_from_gguf(file("gemma3", **window, rope__freq_base_swa=500.0))
    assert based.layers[0].rope.freq == pytest.approx([500 ** (-i / 8) for i in range(8)])
    assert based.layers[5].rope.freq == pytest.approx(local)
    for name in ("olmo2", "mellum"):
        experts = {"expert_count": 4, "expert_used_count": 2} if name == "mellum" else {}
        bases = {"rope__freq_base": 1e6, "rope__freq_base_swa": 500.0, "rope__scaling__factor": 8.0}
        found = config_from_gguf(file(name, **{**window, "block_count": 4}, **bases, **experts)).layers
        assert found[0].rope.freq == pytest.approx([500 ** (-i / 8) for i in range(8)])
        assert found[3].rope.freq == pytest.approx(slowed)
    for name, n_layer in (("gemma2", 46), ("gemma3", 62)):  # scores are scaled by width / heads, 64 / 4
        wide = {"attention__key_length": 64, "attention__value_length": 64}
        for n in (n_layer, n_layer - 1):
            scale = config_from_gguf(file(name, **wide, block_count=n)).layers[0].attention_scale
            assert scale == (0.25 if n == n_layer else 0.125)
    assert [layer.rope is None for layer in config_from_gguf(file("smollm3", block_count=9)).layers] == (
        [False, False, False, True] * 2 + [False]
    )
    assert config_from_gguf(file("granite")).layers[0].rope is not None
    assert config_from_gguf(file("granite", rope__scaling__finetuned=True)).layers[0].rope is not None
    assert config_from_gguf(file("granite", rope__scaling__finetuned=False)).layers[0].rope is None
    assert config_from_gguf(file("llama", rope__scaling__finetuned=False)).layers[0].rope is not None


def test_scales_and_caps_reach_the_config() -> None:
    keys = {"embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 8.0, "attention__scale": 0.01}
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = config_from_gguf(file("granite", **keys, **caps))
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (12.0, 0.5, 0.125)
    assert config.logit_softcap == 30.0
    assert {(one.attention_scale, one.attention_softcap) for one in config.layers} == {(0.01, 50.0)}
    gemma = config_from_gguf(file("gemma3", attention__key_length=16, **caps))  # the same as in llama.cpp
    assert (gemma.logit_softcap, gemma.layers[0].attention_softcap) == (30.0, 0.0)
    none = config_from_gguf(file("granite", **dict.fromkeys([*keys, *caps], 0.0)))
    assert none == config_from_gguf(file("granite"))


def test_relu_models_have_an_activation_with_zeros() -> None:
    for act in ("relu", "relu2", "drelu", "fatrelu:0.1"):
        assert config_from_gguf(file(), activation=act).has_zeros
    for act in ("silu", "gelu", "gelu_tanh"):
        assert not config_from_gguf(file(), activation=act).has_zeros
    assert [config_from_gguf(file(name, **FALCON)).has_zeros for name in ("falcon", "nemotron")] == [
        False,
        True,
    ]
    assert config_from_gguf(file("arcee")).has_zeros
    assert config_from_gguf(file("falcon", hidden_activation="relu", **FALCON)).has_zeros


def test_without_a_gate_there_is_no_drelu() -> None:
    with pytest.raises(InvalidRequestError, match="no gate"):
        config_from_gguf(file("arcee"), activation="drelu")
    with pytest.raises(UnsupportedModelError, match="no gate"):
        config_from_gguf(file("arcee", hidden_activation="drelu"))


@pytest.mark.parametrize("value", ["low", True, math.nan, math.inf])
def test_a_threshold_must_be_a_number(value: Any) -> None:
    gguf = file()
    gguf.metadata["powerinfer.sparse_threshold"] = value
    with pytest.raises(FormatError, match=r"powerinfer\.sparse_threshold"):
        config_from_gguf(gguf)


@pytest.mark.parametrize(
    ("kind", "shapes", "message"),
    [
        ("mlp", {}, r"lacks the tensor blk\.0\.fc1\.weight of its predictor"),
        ("mlp", {"fc1": (64, 8)}, r"lacks the tensor blk\.0\.fc2\.weight \[8, 96\]"),
        ("mlp", {"fc1": (32, 8), "fc2": (8, 96)}, r"fc1\.weight has the shape \[32, 8\], .* \[64, 8\]"),
        ("mlp", {"fc1": (64, 8), "fc2": (8, 95)}, r"fc2\.weight has the shape \[8, 95\], .* \[8, 96\]"),
        ("svd", {"svd_a": (64, 8), "svd_b": (9, 96)}, r"svd_b\.weight has the shape \[9, 96\], .* \[8, 96\]"),
    ],
)
def test_a_predictor_that_does_not_fit_is_refused(
    kind: PredictorKind, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    config = config_from_gguf(file(), activation="relu")
    named = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    with pytest.raises(UnsupportedModelError, match=message):
        describe(config, complete(**named), Predictor(kind, (0.0, 0.0)))


def test_position_of_predictors_in_the_graph() -> None:
    """Check that mlp reads the residual stream, so it can run before the FFN's norm; svd reads the norm."""
    config = config_from_gguf(file(), activation="relu")
    shapes = {"fc1": (64, 8), "fc2": (8, 96), "svd_a": (64, 4), "svd_b": (4, 96)}
    tensors = complete(**{f"blk.{i}.{n}.weight": shape for i in range(2) for n, shape in shapes.items()})
    dense = [value.name for value in describe(config, tensors).values]
    for kind, more in (
        ("mlp", ["ffn_pred_h", "ffn_pred_h_act", "ffn_pred"]),
        ("svd", ["ffn_pred_h", "ffn_pred"]),
    ):
        graph = describe(config, tensors, Predictor(kind, (0.5, 0.25)))  # type: ignore[arg-type]
        computed = [op.out.name for op in graph.primitives]
        assert set(computed) - set(dense) == {f"blk.{i}.{n}" for i in range(2) for n in [*more, "ffn_masked"]}
        at = {name: computed.index(f"blk.0.{name}") for name in (*more, "ffn_norm", "ffn_gate", "ffn_inp")}
        assert (at["ffn_pred"] < at["ffn_norm"]) == (kind == "mlp")
        assert at["ffn_inp"] < at["ffn_pred"] < at["ffn_gate"]
        masks = [op for op in graph.primitives if isinstance(op, Mask)]
        assert [(mask.threshold, mask.first) for mask in masks] == [(0.5, 0), (0.25, 0)]


def test_the_down_projection_takes_the_form_that_the_file_has() -> None:
    config = config_from_gguf(file(), activation="relu")

    def read(**more: tuple[int, ...] | None) -> set[str]:
        tensors = complete(**{f"blk.{i}.{name}": shape for i in range(2) for name, shape in more.items()})
        ops = [op for op in describe(config, tensors).primitives if op.out.name.endswith("ffn_down")]
        used = {getattr(op, field, None) for op in ops for field in ("weight", "scales", "bias")}
        return {name.removeprefix("blk.0.") for name in used if name and name.startswith("blk.0")}

    rows = {"ffn_down_t.weight": (64, 96)}
    planes = {"ffn_down_t.codes": (32, 96), "ffn_down_t.scales": (64, 3)}
    assert read() == {"ffn_down.weight"}
    assert read(**planes) == {"ffn_down_t.codes", "ffn_down_t.scales"}
    assert read(**planes | {"ffn_down_t.codes": (64, 96)}) == {"ffn_down_t.codes", "ffn_down_t.scales"}
    assert read(**rows, **planes, **{"ffn_down.weight": None}) == {"ffn_down_t.weight"}
    assert read(**planes, **{"ffn_down.bias": (64,)}) == {*planes, "ffn_down.bias"}
    assert read(**rows, **{"ffn_down_t.bias": (64,)}) == {*rows, "ffn_down_t.bias"}
    with pytest.raises(UnsupportedModelError, match=r"ffn_down_t\.codes has the shape \[33, 96\]"):
        read(**planes | {"ffn_down_t.codes": (33, 96)})
    with pytest.raises(UnsupportedModelError, match=r"ffn_down_t\.scales has the shape \[64, 2\]"):
        read(**planes | {"ffn_down_t.scales": (64, 2)})


def test_minicpm_without_its_scales_is_refused() -> None:
    """Check files of the first converters, which wrote no such keys."""
    scales = {"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 9.0}
    config = config_from_gguf(file("minicpm", **scales))
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (12.0, 0.25, 1 / 9)
    for key in scales:
        with pytest.raises(UnsupportedModelError, match=rf"minicpm\.{key}: an old converter"):
            config_from_gguf(file("minicpm", **scales | {key: None}))


def test_feed_forward_length_of_qwen_is_twice_the_width() -> None:
    assert config_from_gguf(file("qwen", feed_forward_length=96)).layers[0].n_ff == 48


def test_layers_of_hy_v3_with_a_router_have_experts() -> None:
    """Check that leading_dense_block_count is ignored, because llama.cpp does not write it."""
    keys = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    layers = config_from_gguf(file("hy_v3", {"blk.1.ffn_gate_inp.weight": (64, 8)}, **keys)).layers
    assert [(layer.experts is not None, layer.n_ff) for layer in layers] == [(False, 96), (True, 32)]


def test_a_window_of_deepseek2_ocr_is_refused() -> None:
    """Check a window that starts after a prompt, which all tokens attend to, and so is not supported."""
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    assert config_from_gguf(file("deepseek2-ocr", **experts)).layers[0].window == 0
    with pytest.raises(UnsupportedModelError, match=r"deepseek2-ocr\.attention\.sliding_window is 16"):
        config_from_gguf(file("deepseek2-ocr", **experts, attention__sliding_window=16))
