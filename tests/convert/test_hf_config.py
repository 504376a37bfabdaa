"""Keys of a GGUF file made from config.json: switches that may have no effect on a tiny model's logits."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.convert.hf_config import SYNONYMS, HFConfig
from hotset.errors import FormatError, HotsetError, UnsupportedModelError

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "head_dim": 16,
}  # fmt: skip


def keys(kind: str = "Llama", **entries: Any) -> dict[str, Any]:
    config = HFConfig({"architectures": [f"{kind}ForCausalLM"], **SIZES, **entries})
    prefix = f"{config.architecture}."
    return {k.removeprefix(prefix): v for k, v in config.keys(config.architecture, 128).items()}


WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


@pytest.mark.parametrize(
    ("kind", "entries", "window", "pattern"),
    [
        ("Qwen2", {"sliding_window": 16}, None, None),  # off by default
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": False}, None, None),
        ("Qwen2", {"sliding_window": None, "use_sliding_window": True}, None, None),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True}, None, None),  # from layer 28 on
        (
            "Qwen2",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            16,
            [False, False, False, True],
        ),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 4}, None, None),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16, None),
        (
            "Qwen3",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 4,  # the newer layer_types take precedence
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            16,
            [True, False, True, False],
        ),
        ("Mistral", {"sliding_window": 16}, 16, None),
        ("Mistral", {"sliding_window": 16, "use_sliding_window": False}, 16, None),  # it is never read
        ("Mistral", {"sliding_window": None}, None, None),
        ("Llama", {"sliding_window": 16, "use_sliding_window": True}, None, None),
    ],
)
def test_which_layers_have_a_window(
    kind: str, entries: dict[str, Any], window: int | None, pattern: list[bool] | None
) -> None:
    found = keys(kind, **entries)
    assert (found.get(WINDOW), found.get(PATTERN)) == (window, pattern)


def yarn(**more: Any) -> dict[str, Any]:
    return keys(rope_parameters={"rope_type": "yarn", "factor": 4.0, **more})


def test_yarn_has_its_truncation() -> None:
    assert yarn()["rope.scaling.type"] == "yarn"
    assert yarn(truncate=True) == yarn()
    with pytest.raises(UnsupportedModelError, match="truncate set to false"):
        yarn(truncate=False)


def test_yarn_without_a_factor_stretches_to_the_context() -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    assert keys(rope_parameters=rope)["rope.scaling.factor"] == 4.0
    assert keys(rope_parameters=rope)["rope.scaling.original_context_length"] == 32


def test_magnitude_of_yarn_follows_its_scales() -> None:
    assert "rope.scaling.yarn_attn_factor" not in yarn(mscale=1.0)  # it needs the other entry
    found = yarn(mscale=2.0, mscale_all_dim=0.5)["rope.scaling.yarn_attn_factor"]
    assert found == pytest.approx((0.2 * np.log(4) + 1) / (0.05 * np.log(4) + 1))
    assert yarn(attention_factor=1.5, mscale=2.0, mscale_all_dim=0.5)["rope.scaling.yarn_attn_factor"] == 1.5


# ---- scales, windows, rotations of newer classes ---------------------------------------------------------


def test_scale_of_scores_is_written_if_it_differs() -> None:
    gemma = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 16}
    assert "attention.scale" not in keys("Gemma2", **gemma, query_pre_attn_scalar=16)
    assert keys("Gemma2", **gemma, query_pre_attn_scalar=64)["attention.scale"] == 0.125
    assert keys("Gemma2", **gemma)["attention.scale"] == 0.0625  # the default is 256
    # With 46 layers the architecture uses the width divided by the heads, 64 / 2.
    narrow = gemma | {"num_attention_heads": 2, "num_hidden_layers": 46}
    assert "attention.scale" not in keys("Gemma2", **narrow, query_pre_attn_scalar=32)
    assert keys("Gemma2", **narrow, query_pre_attn_scalar=16)["attention.scale"] == 0.25


def test_caps_may_be_left_out_or_null() -> None:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    assert [keys("Gemma2").get(cap) for cap in caps] == [50.0, 30.0]
    assert [keys("Gemma2", **dict.fromkeys(caps)).get(cap) for cap in caps] == [None, None]
    assert [keys("Gemma3").get(cap) for cap in caps] == [None, None]
    assert keys("Gemma3", final_logit_softcapping=20)["final_logit_softcapping"] == 20.0


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "1", True])
def test_scales_are_positive_numbers(value: Any) -> None:
    for kind, entry in (
        ("Granite", "attention_multiplier"),
        ("Granite", "logits_scaling"),
        ("Gemma3", "query_pre_attn_scalar"),
        ("Gemma2", "attn_logit_softcapping"),
    ):
        with pytest.raises(FormatError, match=f"{entry} in config.json must be"):
            keys(kind, **{entry: value})


LOCAL = [True, True, True, False]


@pytest.mark.parametrize(
    ("kind", "entries", "window", "pattern"),
    [
        ("Gemma2", {}, 4096, None),  # the architecture's own pattern needs no key
        ("Gemma2", {"layer_types": ["sliding_attention", "full_attention"] * 2}, 4096, None),
        ("Gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 2}, 4096, [False, True] * 2),
        ("Gemma2", {"layer_types": ["sliding_attention"] * 4}, 4096, [True] * 4),
        ("Gemma3", {"sliding_window": 16}, 16, None),
        ("Gemma3", {"sliding_window": 16, "sliding_window_pattern": 4}, 16, LOCAL),
        ("Gemma3", {"layer_types": ["full_attention"] * 4}, None, None),
        ("Phi3", {"sliding_window": 16}, 16, None),
        ("Phi3", {"sliding_window": None}, None, None),
        ("Phi3", {}, None, None),
        ("SmolLM3", {"sliding_window": 16}, None, None),
    ],
)
def test_windows_of_newer_classes(
    kind: str, entries: dict[str, Any], window: int | None, pattern: list[bool] | None
) -> None:
    found = keys(kind, **entries)
    assert (found.get(WINDOW), found.get(PATTERN)) == (window, pattern)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Ministral3", "rope.scaling.original_context_length"),
        ("Mistral4", "attention.temperature_length"),
    ],
)
def test_gain_of_queries_with_every_rotation(name: str, key: str, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    found = keys(name, rope_parameters=rope | {"llama_4_scaling_beta": 0.1})
    assert (found["attention.temperature_scale"], found[key]) == (0.1, 64)
    assert "attention.temperature_scale" not in keys(name, rope_parameters=rope)


def test_local_layers_have_a_base_of_their_own_in_both_spellings() -> None:
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"type": "linear", "factor": 8.0}}
    full = {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}
    new = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}
    assert keys("Gemma3", **old) == keys("Gemma3", rope_parameters=new)
    found = keys("Gemma3", **old)
    assert (found["rope.freq_base"], found["rope.freq_base_swa"]) == (5e5, 2e4)
    assert (found["rope.scaling.type"], found["rope.scaling.factor"]) == ("linear", 8.0)
    plain = keys("Gemma3")
    assert (plain["rope.freq_base"], plain["rope.freq_base_swa"]) == (1e6, 1e4)
    assert "rope.freq_base_swa" not in keys("Gemma2")
    with pytest.raises(UnsupportedModelError, match="layers with a window"):
        keys("Gemma3", rope_parameters=new | {"sliding_attention": full})


@pytest.mark.parametrize(
    ("kind", "entries", "message"),
    [
        ("SmolLM3", {"no_rope_layers": [1, 1, 1, 1]}, "must leave out each 4th layer"),
        ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}, "must leave out each 4th layer"),
        ("SmolLM3", {"no_rope_layers": 3}, "must leave out each 4th layer"),
        ("SmolLM3", {"no_rope_layer_interval": 2}, "must leave out each 4th layer"),
        ("SmolLM3", {"use_sliding_window": True}, "use_sliding_window set to 'True'"),
        ("Qwen2Moe", {"decoder_sparse_step": 2}, "decoder_sparse_step set to '2' .* only '1' is"),
        ("Qwen3Next", {"mlp_only_layers": [1]}, r"mlp_only_layers set to '\[1\]' .* only '\[\]' is"),
        ("Ernie4_5_Moe", {"moe_layer_interval": 2}, "moe_layer_interval set to '2' .* only '1' is"),
        ("Phi", {"qk_layernorm": True}, "qk_layernorm set to 'True' .* only 'False' is"),
        ("FalconH1", {"projectors_bias": True}, "projectors_bias set to 'True' .* only 'False' is"),
        (
            "NemotronH",
            {"use_bias": True, "layers_block_type": ["attention"] * 4},
            "use_bias set to 'True' .* only 'False' is",
        ),
        ("Lfm2", {"conv_bias": True}, "conv_bias set to 'True' .* only 'False' is"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention set to 'True'"),
        ("GraniteSWA", {"no_rope_layers": [1, 0]}, "no_rope_layers set to"),
        ("GraniteSWA", {"layer_rope_theta": [5e3, 1e4, 0, 0]}, "must be the same in all layers, or 0"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ("Llama", {"rope_scaling": {"type": "dynamic"}}, "RoPE scaling 'dynamic'"),
    ],
)
def test_settings_without_a_key_are_refused(kind: str, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        keys(kind, **entries)


def test_a_granite_names_its_windows_always() -> None:
    found = keys("GraniteSWA")
    assert (found[WINDOW], found[PATTERN]) == (128, [False, True, True, True])
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert keys("GraniteMoeSWA", layer_types=kinds)[PATTERN] == [True, False, False, True]


def test_the_base_of_each_layer() -> None:
    base, pattern = "rope.freq_base", "attention.rope_pattern"
    found = keys("GraniteSWA", layer_rope_theta=[5e3, 0, 0, 5e3], rope_theta=2e4)
    assert (found[base], found[pattern]) == (5e3, [True, False, False, True])
    found = keys("GraniteSWA", layer_rope_theta=[5e3] * 4, rope_theta=2e4)
    assert (found[base], found.get(pattern)) == (5e3, None)
    assert keys("GraniteSWA", layer_rope_theta=[0] * 4)[pattern] == [False] * 4
    for bases in (5e3, [5e3], [5e3, -1.0, 0, 0], [5e3, "1", 0, 0], [True, 0, 0, 0]):
        with pytest.raises(FormatError, match=r"layer_rope_theta in config\.json"):
            keys("GraniteSWA", layer_rope_theta=bases)


@pytest.mark.parametrize("kind", ["Olmo3", "Mellum"])
def test_base_of_unscaled_windows(kind: str) -> None:
    """Write the key only if the other layers have another base."""
    full = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e3}
    types = {"layer_types": ["sliding_attention", "full_attention"] * 2}

    def of(windowed: dict[str, Any]) -> dict[str, Any]:
        ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", **windowed}}
        return keys(kind, rope_parameters=ropes, rope_local_base_freq=7.0, **types)

    found = of({"rope_theta": 2e4})
    assert (found["rope.freq_base"], found["rope.freq_base_swa"]) == (5e3, 2e4)
    assert "rope.freq_base_swa" not in of({"rope_theta": 5e3})
    with pytest.raises(UnsupportedModelError, match="scaling of layers with a window"):
        of({"rope_theta": 5e3, "rope_type": "linear", "factor": 2.0})
    assert "rope.freq_base_swa" not in keys("Olmo3", rope_theta=5e5, **types)
    assert keys("Olmo3", rope_theta=1e6, **types)["rope.freq_base_swa"] == 5e5  # as in transformers 5


def test_models_with_attention_to_later_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="is_causal set to 'False'"):
        keys("Qwen2", is_causal=False)
    assert keys("Qwen2", is_causal=True) == keys("Qwen2")


def test_sparse_lm_is_relu_whatever_its_config() -> None:
    for name in ("silu", "relu", "gelu"):
        found = keys("SparseLlama", hidden_act=name, sparsity_gated_mlp=True)
        assert found["hidden_activation"] == "relu"
    with pytest.raises(UnsupportedModelError, match="sparsity_gated_mlp set to 'False'"):
        keys("SparseLlama", sparsity_gated_mlp=False)


def test_valid_settings_are_accepted() -> None:
    assert keys("SmolLM3", no_rope_layers=[1, 1, 1, 0, 1]) == keys("SmolLM3", no_rope_layer_interval=4)
    assert keys("Gemma2", use_bidirectional_attention=None) == keys("Gemma2")
    assert keys("SmolLM3")["rope.freq_base"] == 2e6


def test_a_model_that_sees_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'PaliGemmaForConditionalGeneration' in"):
        HFConfig({"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": SIZES})


def test_part_of_a_head_is_rotated() -> None:
    count = "rope.dimension_count"
    assert keys("Glm4")[count] == 8
    assert keys("Phi3")[count] == 16
    for kind in ("Glm4", "Phi3"):
        assert keys(kind, partial_rotary_factor=0.75)[count] == 12
        assert keys(kind, rope_parameters={"partial_rotary_factor": 0.25})[count] == 4


FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.5, 2, 2.5], "long_factor": [4.0, 8, 16, 32]}
HALF = {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])  # "su" and "yarn": older names
def test_longrope_is_two_tensors_and_a_magnitude(kind: str) -> None:
    entries = {**HALF, "rope_scaling": {"type": kind, **FACTORS}}
    found = keys("Phi3", **entries)
    assert "rope.scaling.type" not in found
    assert found["rope.scaling.original_context_length"] == 32
    assert found["rope.scaling.attn_factor"] == pytest.approx(np.sqrt(1 + np.log(4) / np.log(32)))
    divisors = HFConfig({"architectures": ["Phi3ForCausalLM"], **SIZES, **entries}).rope.divisors()
    assert {name: values.tolist() for name, values in divisors.items()} == {
        "rope_factors_short.weight": FACTORS["short_factor"],
        "rope_factors_long.weight": FACTORS["long_factor"],
    }
    assert keys("Phi3", **{**entries, "original_max_position_embeddings": 128})[
        "rope.scaling.attn_factor"
    ] == (1.0)
    given = {"rope_scaling": {"type": kind, **FACTORS, "attention_factor": 1.25}}
    assert keys("Phi3", **HALF | given)["rope.scaling.attn_factor"] == 1.25
    given = {"rope_scaling": {"type": kind, **FACTORS, "factor": 32.0}}
    assert keys("Phi3", **HALF | given)["rope.scaling.attn_factor"] == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    "factor", [None, 2.0, [1.0] * 3, [1.0] * 8, [1, 2, "3", 4], [1, 0, 1, 1], [True] * 4]
)
def test_factors_of_longrope_are_checked(factor: Any) -> None:
    rope = {"type": "longrope", **FACTORS, "long_factor": factor}
    config = HFConfig({"architectures": ["Phi3ForCausalLM"], **SIZES, **HALF, "rope_scaling": rope})
    with pytest.raises(FormatError, match="long_factor in"):
        config.rope.divisors()


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 70), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "rope_theta", "long_factor", "short_factor"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=8,
)
ENTRIES = [
    *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
    *("original_max_position_embeddings", "query_pre_attn_scalar", "attn_logit_softcapping", "layer_types"),
    *("sliding_window", "sliding_window_pattern", "use_sliding_window", "no_rope_layers", "head_dim"),
    *("no_rope_layer_interval", "attention_multiplier", "logits_scaling", "use_bidirectional_attention"),
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["Gemma2", "Gemma3", "Phi3", "Granite", "SmolLM3", "Glm4"]),
    st.dictionaries(st.sampled_from(ENTRIES), junk, max_size=4),
    st.dictionaries(st.sampled_from(["full_attention", "sliding_attention", "rope_type"]), junk, max_size=2),
)
def test_any_entries_give_keys_or_one_message(
    kind: str, entries: dict[str, Any], ropes: dict[str, Any]
) -> None:
    config = {"architectures": [f"{kind}ForCausalLM"], **SIZES, "rope_parameters": ropes, **entries}
    written: dict[str, Any] = {}
    message = ""
    try:
        found = HFConfig(config)
        written = found.keys(found.architecture, 128) | found.rope.divisors()
    except HotsetError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 300
    for value in written.values():
        assert not isinstance(value, float | np.ndarray) or np.isfinite(value).all()


LFM2 = {"layer_types": ["conv", "full_attention", "conv", "conv"], "norm_eps": 1e-5}


def test_lfm2_has_convolution_layers_and_an_ffn_width() -> None:
    found = keys("Lfm2", **LFM2)
    assert found["attention.head_count_kv"] == [0, 2, 0, 0]
    assert found["shortconv.l_cache"] == 3
    assert found["rope.freq_base"] == 1e6
    # Older files have other names for the layers with attention and for the tied output.
    assert keys("Lfm2", norm_eps=1e-5, full_attn_idxs=[2])["attention.head_count_kv"] == [0, 0, 2, 0]
    assert keys("Lfm2", norm_eps=1e-5)["attention.head_count_kv"] == [2, 2, 2, 2]
    tied = {"architectures": ["Lfm2ForCausalLM"], **SIZES, **LFM2}
    assert HFConfig(tied).tied
    assert not HFConfig(tied | {"tie_embedding": False}).tied
    for entries, n_ff in (
        ({}, 256),  # 2 / 3 of 96, rounded up to a multiple of 256
        ({"block_auto_adjust_ff_dim": False}, 96),
        ({"block_multiple_of": 16}, 64),
        ({"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3}, 96),
        ({"block_ff_dim": 12288, "block_multiple_of": 256}, 8192),  # as LFM2-1.2B has it
        ({"block_ffn_dim_multiplier": None}, 64),
    ):
        assert keys("Lfm2", **LFM2, **entries)["feed_forward_length"] == n_ff, entries


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ({"conv_bias": True}, UnsupportedModelError),
        ({"layer_types": ["conv", "sliding_attention", "conv", "conv"]}, UnsupportedModelError),
        ({"layer_types": ["conv"]}, UnsupportedModelError),
        ({"conv_L_cache": 65}, FormatError),
        ({"block_multiple_of": 0}, FormatError),
        ({"block_ffn_dim_multiplier": -1.0}, FormatError),
        ({"layer_types": None, "full_attn_idxs": 3}, FormatError),
    ],
)
def test_invalid_lfm2_is_refused(entries: dict[str, Any], error: type[HotsetError]) -> None:
    with pytest.raises(error):
        keys("Lfm2", **LFM2 | entries)


def test_qwen3next_says_where_delta_nets_stand() -> None:
    sizes = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, "num_experts": 8}
    sizes |= {"num_experts_per_tok": 2, "linear_num_value_heads": 32}
    found = keys("Qwen3Next", **sizes)
    assert found["attention.recurrent_layers"] == [True, True, True, False]
    assert found["full_attention_interval"] == 4
    assert found["rope.dimension_count"] == 4  # a quarter of a head
    assert {k: v for k, v in found.items() if k.startswith("ssm.")} == {
        "ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.time_step_rank": 32,
        "ssm.group_count": 16,
    }  # fmt: skip
    types = ["full_attention", "linear_attention", "linear_attention", "linear_attention"]
    found = keys("Qwen3_5Moe", **sizes, layer_types=types)
    assert found["attention.recurrent_layers"] == [False, True, True, True]
    assert "full_attention_interval" not in found
    assert keys("Qwen3_5", full_attention_interval=2)["attention.recurrent_layers"] == [True, False] * 2
    for entries, error in (
        ({"layer_types": ["conv"] * 4}, UnsupportedModelError),
        ({"linear_num_value_heads": 24}, FormatError),
        ({"linear_key_head_dim": 513}, FormatError),
        ({"mlp_only_layers": [1]}, UnsupportedModelError),
    ):
        with pytest.raises(error):
            keys("Qwen3Next", **sizes | entries)


# ---- missing entries of config.json have the defaults of transformers' classes -----------------------------


def _recipes() -> dict[str, list[tiny_models.TinyModel]]:
    """Return recipes by the name of transformers' configuration class, without an instance of one.

    They cover all models that transformers computes, and switches that no other recipe turns on.
    """
    recipes = [*tiny_models.RECIPES.values(), *tiny_models.EXPERTS.values()]
    windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    recipes += [tiny_models.TinyModel(k, windows) for k in ("Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe")]
    other = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}, "max_position_embeddings": 99}
    kinds = ("Mixtral", "Lfm2", "Gemma2", "GptOss", "DeepseekV3", "Phi3", "SmolLM3")
    recipes += [tiny_models.TinyModel(kind, other) for kind in kinds]
    found: dict[str, list[tiny_models.TinyModel]] = {}
    for recipe in recipes:
        if recipe.kind not in tiny_models.OWN and "architectures" not in recipe.written_as:
            found.setdefault(f"{recipe.config or recipe.kind}Config", []).append(recipe)
    return found


RECIPES = _recipes()


@cache
def full_configs(name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the class name of the text model, and complete contents of config.json for it."""
    found = []
    for recipe in RECIPES[name]:
        config = tiny_models.config_of(recipe, {**tiny_models.SHAPE, **recipe.settings})
        if recipe.vision is not None:  # older files have all entries of the text model at the top
            config = config.text_config
        architectures = {"architectures": [tiny_models.class_of(recipe)]}
        found.append(config.to_dict() | recipe.written_as | architectures)
    return type(config).__name__, found


# The defaults of transformers are the sizes of one published model.
WITHOUT_DEFAULT = {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
WITHOUT_DEFAULT |= {"intermediate_size", "ffn_dim", "n_embd", "n_layer", "n_head"}
WITHOUT_DEFAULT |= {"d_model", "n_layers", "n_heads"}
# transformers' class has none either, and its model cannot be built.
WITHOUT_DEFAULT |= {"DeepseekV2Config num_experts_per_tok", "Lfm2MoeConfig layer_types"}
# The kinds of the layers have no default.
WITHOUT_DEFAULT |= {"NemotronHConfig layers_block_type"}
# transformers' versions disagree about the layers with a window.
WITHOUT_DEFAULT |= {"Qwen2MoeConfig layer_types"}


def facts(config: dict[str, Any]) -> dict[str, Any] | str:
    """Return the facts that the converter derives from config.json, or the message of its error."""
    try:
        found = HFConfig(config)
        tensors = {name: values.tolist() for name, values in found.rope.divisors().items()}
        keys = found.keys(found.architecture, found.n_ctx)
    except HotsetError as error:
        return str(error)
    return {**keys, **tensors, "tied": found.tied, "extra layers": found.n_extra_layers}


def older_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with rope_theta and rope_scaling in place of rope_parameters."""
    config = deepcopy(config)
    rope, kind = config.pop("rope_parameters", None) or {}, "type"
    if "full_attention" in rope:  # Gemma 3, whose entry always had this name
        kind = "rope_type"
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config |= {k: rope.pop(k) for k in ("rope_theta", "partial_rotary_factor") if k in rope}
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {kind: rope.pop("rope_type"), **rope}
    return config


def incomplete(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (entry, config) with each entry removed, and with each set to null, inside rope entries too."""
    for entry in config.keys() - {"architectures"}:
        yield entry, {k: v for k, v in config.items() if k != entry}
        if entry not in ("partial_rotary_factor", "rope_local_base_freq"):  # to_dict() loses this null
            yield entry, config | {entry: None}
        if entry.startswith("rope_") and isinstance(inner := config[entry], dict):
            for name, smaller in incomplete(inner):
                yield f"{entry}.{name}", config | {entry: smaller}


NEWER = {"Gemma4TextConfig"}  # classes that never had the older spelling


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        pytest.param(name, spelling, marks=() if spelling or name in NEWER else pytest.mark.slow)
        for name in RECIPES
        for spelling in ("", "older")
        if not (spelling and name in NEWER)
    ],
)
def test_missing_entries_have_transformers_defaults(name: str, spelling: str) -> None:
    """Compare config.json without an entry with the same file that has transformers' default there."""
    seen, refused = set(), {}
    name, configs = full_configs(name)
    for full in configs:
        for entry, config in incomplete(older_spelling(full) if spelling else full):
            if f"{name} {entry}" == "Qwen3VLMoeTextConfig tie_word_embeddings":
                continue  # the entry of the whole model decides
            case = (entry, config.get(entry), str(full.get(entry)))
            if entry in full and (case in seen or seen.add(case)):
                continue  # another recipe has the same value
            try:
                theirs = getattr(transformers, name).from_dict(deepcopy(config)).to_dict()
            except (KeyError, TypeError, ValueError, StrictDataclassError, ZeroDivisionError):
                continue  # a required entry, or one that cannot be null
            expected, found = facts(theirs | {"architectures": full["architectures"]}), facts(config)
            if isinstance(found, str):
                if not isinstance(expected, str):  # for example if a default does not fit the other sizes
                    refused[entry] = found
            else:
                assert found == expected, entry
    for entry, message in refused.items():
        assert entry in WITHOUT_DEFAULT or f"{name} {entry}" in WITHOUT_DEFAULT
        plain = SYNONYMS.get(entry, entry)
        assert f"config.json has no {plain}" in message or f"no {entry}, which says where" in message


def test_nemotron_h_lists_the_kinds_of_layers() -> None:
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 16}
    found = keys("NemotronH", **sizes, hybrid_override_pattern="M-*E")
    assert found["block_count"] == 4
    assert found["attention.head_count_kv"] == [0, 0, 2, 0]
    assert found["feed_forward_length"] == [0, SIZES["intermediate_size"], 0, 7688]
    assert (found["ssm.inner_size"], found["ssm.time_step_rank"], found["ssm.group_count"]) == (96, 4, 2)
    assert "expert_count" not in keys("NemotronH", **sizes, hybrid_override_pattern="M*-")
    older = ["mamba", "attention", "mlp"]  # as transformers called them
    assert keys("NemotronH", **sizes, layers_block_type=older) == keys(
        "NemotronH", **sizes, hybrid_override_pattern="M*-"
    )
    for entries in ({}, {"hybrid_override_pattern": "M?"}, {"layers_block_type": ["mlp", 1]}):
        with pytest.raises((FormatError, UnsupportedModelError), match=r"layers_block_type|layer_types"):
            keys("NemotronH", **sizes, **entries)
    with pytest.raises(FormatError, match="not a multiple of 3 n_groups"):
        keys("NemotronH", **sizes | {"n_groups": 3}, hybrid_override_pattern="M*-")


def test_falcon_h1_refuses_settings_without_a_key() -> None:
    sizes = {"mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_state": 16}
    found = keys("FalconH1", **sizes)
    assert (found["attention.head_count_kv"], found["ssm.inner_size"], found["ssm.group_count"]) == (2, 96, 1)
    with pytest.raises(UnsupportedModelError, match="mamba_norm_before_gate"):
        keys("FalconH1", **sizes, mamba_rms_norm=True)
    config = HFConfig({**SIZES, **sizes, "architectures": ["FalconH1ForCausalLM"], "mlp_multipliers": [1.0]})
    with pytest.raises(FormatError, match=r"mlp_multipliers in config\.json must be a list of 2 numbers"):
        config.parts[0].source(np.zeros((1, 1)), "ffn_gate", 0)


def test_sizes_of_rwkv_that_no_entry_says() -> None:
    sizes = {"architectures": ["RWKV7ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 2}
    found = HFConfig({**sizes, "vocab_size": 100}).keys("rwkv7", 1 << 20)
    ranks = [found[f"rwkv7.attention.{name}_lora_rank"] for name in ("decay", "iclr", "gate")]
    assert (*ranks, found["rwkv7.feed_forward_length"]) == (96, 96, 256, 8192)  # as in the 1.5B model
    assert (found["rwkv7.wkv.head_size"], found["rwkv7.attention.head_count"]) == (64, 0)
    with pytest.raises(UnsupportedModelError, match="heads of 60 channels"):
        HFConfig({**sizes, "vocab_size": 100, "head_dim": 60})
    older = {**sizes, "architectures": ["Rwkv6ForCausalLM"], "vocab_size": 100, "rescale_every": 6}
    found = HFConfig(older).keys("rwkv6", 1 << 20)
    assert found["rwkv6.rescale_every_n_layers"] == 6
    assert (found["rwkv6.time_mix_extra_dim"], found["rwkv6.feed_forward_length"]) == (32, 7168)


def test_defaults_that_were_others_once() -> None:
    assert keys("Mixtral", num_local_experts=4, num_experts_per_tok=2)["rope.freq_base"] == 1e6
    assert keys("Mistral")[WINDOW] == 4096
    oss = keys("GptOss", num_local_experts=4, num_experts_per_tok=2)
    assert (oss[WINDOW], oss.get(PATTERN), oss["rope.freq_base"]) == (128, None, 150000.0)
    assert (oss["rope.scaling.type"], oss["rope.scaling.factor"]) == ("yarn", 32.0)
    assert oss["rope.scaling.original_context_length"] == 4096
    latent = keys("DeepseekV3", num_key_value_heads=4)
    assert [latent[f"expert_{k}"] for k in ("group_count", "group_used_count", "weights_scale")] == [
        8,
        4,
        2.5,
    ]
    assert latent["leading_dense_block_count"] == 3
    glm = keys("Glm4Moe", num_attention_heads=8, num_key_value_heads=8)
    assert glm["expert_weights_norm"] is True


def test_entries_of_classes_that_transformers_lacks() -> None:
    scales = keys("MiniCPM", scale_emb=12, scale_depth=1.4, dim_model_base=16)
    assert [scales[f"{k}_scale"] for k in ("embedding", "residual", "logit")] == [12, 0.7, 4]
    for entry in ({"scale_emb": 0}, {"dim_model_base": None}, {"sparse_config": {"topk": 64}}):
        with pytest.raises(HotsetError, match=next(iter(entry))):
            keys("MiniCPM", **{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16} | entry)
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1e6}
    assert "rope.scaling.type" not in keys("InternLM2", **dynamic)  # it scales only beyond the context
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        keys("Xverse", **dynamic)
    qwen = {"architectures": ["QWenLMHeadModel"], **SIZES, "num_key_value_heads": 4, "seq_length": 64}
    found = HFConfig(qwen | {"layer_norm_epsilon": 1e-6})
    assert (found.n_ctx, found.n_ff) == (64, 48)
    assert found.keys("qwen", 64)["qwen.feed_forward_length"] == 96
    plamo = keys("Plamo", num_key_value_heads=4, n_shared_head=2)
    assert plamo["attention.head_count_kv"] == 2  # the entry does not state it
    assert keys("Maincoder", intermediate_size_mlp=128)["feed_forward_length"] == 128
    sees = {"architectures": ["HunYuanVLForConditionalGeneration"], **SIZES}
    rope = {"type": "xdrope", "xdrope_section": [2, 2, 2, 2], "alpha": 1000.0, "factor": 1.0}
    found = HFConfig(sees | {"rope_scaling": rope, "rope_theta": 10000.0}).keys("hunyuan_vl", 128)
    assert found["hunyuan_vl.rope.freq_base"] == 10000.0
    assert found["hunyuan_vl.rope.scaling.alpha"] == 1000.0
    assert found["hunyuan_vl.rope.dimension_sections"] == [2, 2, 2, 2]
    with pytest.raises(UnsupportedModelError, match="first_k_dense_replace"):
        keys("HYV3", first_k_dense_replace=2)
    kinds = ["dense", "dense", "sparse", "sparse"]
    for name in ("ExaoneMoe", "HYV3", "DeepseekV3"):  # transformers writes both entries; the list wins
        found = keys(name, num_experts=8, n_routed_experts=8, first_k_dense_replace=1, mlp_layer_types=kinds)
        assert found["leading_dense_block_count"] == 2
    with pytest.raises(UnsupportedModelError, match="mlp_layer_types"):
        keys("HYV3", num_experts=8, mlp_layer_types=["sparse", "dense", "sparse", "sparse"])


FOREIGN: dict[str, Any] = {
    "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0, "sliding_window": 16,
    "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_window_layers": 1, "sliding_window_pattern": 3, "query_pre_attn_scalar": 7, "norm_topk_prob": True,
    "attention_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "n_group": 2,
    "residual_multiplier": 0.3, "routed_scaling_factor": 2.5, "rope_local_base_freq": 500.0,
    "tie_embedding": True, "linear_conv_kernel_dim": 3, "conv_L_cache": 5, "num_dense_layers": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 9, "full_attention_interval": 2, "full_attn_idxs": [1],
}  # fmt: skip
# Entries that a class reads although its configuration has no field for them.
READ = {"Gemma3TextConfig": {"sliding_window_pattern", "rope_local_base_freq", "attn_logit_softcapping"}}
READ |= {name: {"full_attention_interval"} for name in ("Qwen3NextConfig", "Qwen3_5TextConfig")}
READ |= {"Qwen3_5MoeTextConfig": {"full_attention_interval"}, "Lfm2MoeConfig": {"tie_embedding"}}
READ |= {"Lfm2Config": {"tie_embedding"}, "DeepseekV2Config": {"norm_topk_prob"}}


@pytest.mark.parametrize("name", RECIPES)
def test_entries_that_a_class_does_not_read_change_nothing(name: str) -> None:
    name, configs = full_configs(name)
    for full in configs:
        others = {k: v for k, v in FOREIGN.items() if k not in full and k not in READ.get(name, ())}
        assert facts(full | others) == facts(full)


def test_gemma3_has_no_cap_on_scores() -> None:
    """transformers' class has the entry and never uses it; llama.cpp reads no such key of gemma3."""
    assert "attn_logit_softcapping" not in keys("Gemma3", attn_logit_softcapping=50.0)
    assert keys("Gemma2", attn_logit_softcapping=20.0)["attn_logit_softcapping"] == 20.0


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_qwen35_has_sections_of_dimensions(kind: str) -> None:
    """Check the sections, without which llama.cpp loads no qwen35 file. It aborts if they exceed a head."""
    key, sizes = (
        "rope.dimension_sections",
        {"linear_num_value_heads": 32, "num_experts": 8, "num_experts_per_tok": 2},
    )
    for head_dim, sections in ((256, [11, 11, 10, 0]), (16, [1, 1, 0, 0]), (128, [6, 5, 5, 0])):
        assert keys(kind, **sizes, head_dim=head_dim)[key] == sections
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert keys(kind, **sizes, rope_parameters=rope | {"mrope_section": [2, 1, 1]})[key] == [2, 1, 1, 0]
    for section in ([], [1] * 5, [1.0], [True], [-1], "11", 3):
        with pytest.raises(FormatError, match="mrope_section in"):
            keys(kind, **sizes, rope_parameters=rope | {"mrope_section": section})
    assert key not in keys("Qwen3Next", **sizes)


# Keys that llama.cpp requires (get_key in its models), in addition to common ones such as block_count.
SSM = tuple(f"ssm.{k}" for k in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count"))
NEEDED_ELSEWHERE = {
    "granite": ("logit_scale",),
    "granitemoe": ("logit_scale",),
    "gpt-oss": ("expert_feed_forward_length", "attention.sliding_window"),
    "glm4moe": ("expert_feed_forward_length", "expert_shared_count"),
    "deepseek2": ("expert_feed_forward_length", "expert_shared_count", "attention.kv_lora_rank"),
    "afmoe": ("expert_weights_norm",),  # without it experts' weights would stay unscaled
    "ernie4_5-moe": ("interleave_moe_layer_step", "expert_feed_forward_length"),
    "hy_v3": ("expert_weights_norm",),
    "lfm2": ("shortconv.l_cache",),
    "lfm2moe": ("shortconv.l_cache", "expert_feed_forward_length", "expert_gating_func"),
    "kimi-linear": (
        *("attention.key_length_mla", "attention.value_length_mla", "attention.kv_lora_rank"),
        *("ssm.conv_kernel", "kda.head_dim", "expert_feed_forward_length", "expert_shared_count"),
        "expert_gating_func",
    ),
    "deepseek4": (
        *("attention.q_lora_rank", "attention.sliding_window", "attention.compress_ratios"),
        *("attention.compress_rope_freq_base", "attention.output_group_count", "attention.output_lora_rank"),
        *("attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k"),
        *("hyper_connection.count", "hyper_connection.epsilon", "hyper_connection.sinkhorn_iterations"),
        *("hash_layer_count", "swiglu_clamp_exp", "expert_feed_forward_length", "expert_shared_count"),
        *("expert_gating_func", "expert_weights_norm", "expert_weights_scale"),
    ),
    "muse-glimmer": ("attention.sliding_window", "logit_scale"),
    "qwen3next": SSM,
    "qwen35": (*SSM, "rope.dimension_sections"),
    "qwen35moe": (*SSM, "rope.dimension_sections"),
    "qwen4exp": (
        *(*SSM, "rope.dimension_sections", "hyper_connection.count", "hyper_connection.low_rank"),
        *(f"attention.indexer.{key}" for key in ("head_count", "key_length", "top_k")),
        "attention.compress_ratios",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_files_have_the_keys_that_llama_cpp_needs(name: str) -> None:
    for full in full_configs(name)[1]:
        config = HFConfig(full)
        found = config.keys(config.architecture, config.n_ctx)
        needed = ["block_count", "context_length", "embedding_length", "feed_forward_length"]
        needed += ["attention.head_count", *NEEDED_ELSEWHERE.get(config.architecture, ())]
        assert {f"{config.architecture}.{key}" for key in needed} <= found.keys()
        if config.architecture != "opt":  # llama.cpp does not support OPT
            assert any(key.endswith("_epsilon") for key in found)


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("deepseek2-v3", {"topk_method": ["greedy"]}, "topk_method set to"),
        ("mamba2", {"time_step_limit": 3}, "a time_step_limit"),
        ("falcon-h1", {"key_multiplier": 1e29}, "key_multiplier"),
        ("falcon-h1", {"ssm_multipliers": [1e29] * 5}, "ssm_multipliers"),
        ("gemma4", {"num_kv_shared_layers": 10**9, "use_double_wide_mlp": True}, "num_kv_shared_layers"),
        ("gemma4", {"num_kv_shared_layers": -3, "use_double_wide_mlp": True}, "num_kv_shared_layers"),
        ("gemma4", {"hidden_size_per_layer_input": -3}, "hidden_size_per_layer_input"),
        ("gemma3n", {"num_kv_shared_layers": 1.5}, "num_kv_shared_layers"),
        ("gemma3n", {"intermediate_size": [64, 32]}, "must hold a number for each of"),
        ("hunyuan-dense", {"rope_scaling": {"type": "dynamic", "alpha": 9.0}, "head_dim": 2}, "by zero"),
        ("hunyuan-dense", {"rope_scaling": {"type": "dynamic", "alpha": -9.0}}, "must be above 0"),
    ],
)
def test_entries_of_strangers_are_refused(name: str, entries: dict[str, Any], message: str) -> None:
    recipe = (tiny_models.RECIPES | tiny_models.EXPERTS)[name]
    config = tiny_models.config_of(recipe, {**tiny_models.SHAPE, **recipe.settings}).to_dict()
    config |= recipe.written_as | {"architectures": [tiny_models.class_of(recipe)]}
    config.get("text_config", config).update(entries)

    def read() -> None:
        found = HFConfig(config)
        found.keys("any", 128)
        for part, stem in product(found.parts, ("attn_k", "ssm_in")):
            part.source(np.zeros((1, 1)), stem, 0)

    with pytest.raises(HotsetError, match=message):
        read()


def test_a_vision_model_has_the_class_of_its_text_model() -> None:
    """Check that sizes which the checkpoints of LLaVA 1.5 omit have transformers' values."""
    found = {}
    for kind in ("llama", "qwen2"):
        given = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": kind}}
        given["text_config"] |= {"vocab_size": 32064, "max_position_embeddings": 4096}
        found[kind] = HFConfig(given)
    assert (found["llama"].architecture, found["qwen2"].architecture) == ("llama", "qwen2")
    assert (found["llama"].n_embd, found["llama"].n_layer, found["llama"].n_ff) == (4096, 32, 11008)
    with pytest.raises(UnsupportedModelError, match="a text model of the type 'bloom'"):
        HFConfig({"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "bloom"}})
