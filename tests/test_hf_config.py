"""config.json as the keys of a GGUF file: switches whose absence no logit of a tiny model need show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.convert.hf_config import HFConfig
from hotset.errors import FormatError, HotsetError, UnsupportedModelError

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
        ("Qwen2", {"sliding_window": 16}, None, None),  # off unless it says so
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": False}, None, None),
        ("Qwen2", {"sliding_window": None, "use_sliding_window": True}, None, None),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True}, 16, None),
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
                "max_window_layers": 4,  # layer_types are newer, and win
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            16,
            [True, False, True, False],
        ),
        ("Mistral", {"sliding_window": 16}, 16, None),  # on unless it says so
        ("Mistral", {"sliding_window": 16, "use_sliding_window": False}, None, None),
        ("Mistral", {"sliding_window": None}, None, None),
        ("Llama", {"sliding_window": 16}, None, None),
    ],
)
def test_which_layers_have_a_window(
    kind: str, entries: dict[str, Any], window: int | None, pattern: list[bool] | None
) -> None:
    found = keys(kind, **entries)
    assert (found.get(WINDOW), found.get(PATTERN)) == (window, pattern)


def yarn(**more: Any) -> dict[str, Any]:
    return keys(rope_parameters={"rope_type": "yarn", "factor": 4.0, **more})


def test_yarn_says_what_it_is_truncated_to() -> None:
    assert yarn()["rope.scaling.type"] == "yarn"
    assert yarn(truncate=True) == yarn()
    with pytest.raises(UnsupportedModelError, match="truncate set to false"):
        yarn(truncate=False)


def test_yarn_without_a_factor_stretches_to_the_context() -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    assert keys(rope_parameters=rope)["rope.scaling.factor"] == 4.0
    assert keys(rope_parameters=rope)["rope.scaling.original_context_length"] == 32


def test_the_magnitude_of_yarn_is_that_of_its_scales() -> None:
    assert "rope.scaling.yarn_attn_factor" not in yarn(mscale=1.0)  # one of the two says nothing
    found = yarn(mscale=2.0, mscale_all_dim=0.5)["rope.scaling.yarn_attn_factor"]
    assert found == pytest.approx((0.2 * np.log(4) + 1) / (0.05 * np.log(4) + 1))
    assert yarn(attention_factor=1.5, mscale=2.0, mscale_all_dim=0.5)["rope.scaling.yarn_attn_factor"] == 1.5


# ---- scales, windows, rotations of newer classes ---------------------------------------------------------


def test_the_scale_of_the_scores_is_written_where_it_is_another() -> None:
    gemma = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 16}
    assert "attention.scale" not in keys("Gemma2", **gemma, query_pre_attn_scalar=16)
    assert keys("Gemma2", **gemma, query_pre_attn_scalar=64)["attention.scale"] == 0.125
    assert keys("Gemma2", **gemma)["attention.scale"] == 0.0625  # 256, where config.json says nothing
    # Of 46 layers the architecture takes the width over the heads, 64 / 2.
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
    ("kind", "entries", "sentence"),
    [
        ("SmolLM3", {"no_rope_layers": [1, 1, 1, 1]}, "must leave out each 4th layer"),
        ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}, "must leave out each 4th layer"),
        ("SmolLM3", {"no_rope_layers": 3}, "must leave out each 4th layer"),
        ("SmolLM3", {"no_rope_layer_interval": 2}, "must leave out each 4th layer"),
        ("SmolLM3", {"use_sliding_window": True}, "use_sliding_window set to 'True'"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention set to 'True'"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ("Llama", {"rope_scaling": {"type": "dynamic"}}, "RoPE scaling 'dynamic'"),
    ],
)
def test_what_cannot_be_said_is_refused(kind: str, entries: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedModelError, match=sentence):
        keys(kind, **entries)


def test_what_is_said_as_it_must_be_is_taken() -> None:
    assert keys("SmolLM3", no_rope_layers=[1, 1, 1, 0, 1]) == keys("SmolLM3", no_rope_layer_interval=4)
    assert keys("Gemma2", use_bidirectional_attention=None) == keys("Gemma2")
    assert keys("SmolLM3")["rope.freq_base"] == 2e6


def test_a_model_that_sees_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'Gemma3ForConditionalGeneration' in"):
        HFConfig({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": SIZES})


def test_part_of_a_head_is_rotated() -> None:
    count = "rope.dimension_count"
    assert keys("Glm4")[count] == 8
    assert keys("Phi3")[count] == 16
    for kind in ("Glm4", "Phi3"):
        assert keys(kind, partial_rotary_factor=0.75)[count] == 12
        assert keys(kind, rope_parameters={"partial_rotary_factor": 0.25})[count] == 4


FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.5, 2, 2.5], "long_factor": [4.0, 8, 16, 32]}
HALF = {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])  # the first checkpoints had other names for it
def test_longrope_is_two_tensors_and_a_magnitude(kind: str) -> None:
    entries = {**HALF, "rope_scaling": {"type": kind, **FACTORS}}
    found = keys("Phi3", **entries)
    assert "rope.scaling.type" not in found
    assert found["rope.scaling.original_context_length"] == 32
    assert found["rope.scaling.attn_factor"] == pytest.approx(np.sqrt(1 + np.log(4) / np.log(32)))
    divisors = HFConfig({"architectures": ["Phi3ForCausalLM"], **SIZES, **entries}).rope_divisors()
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
        config.rope_divisors()


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
def test_any_entries_give_keys_or_a_sentence(
    kind: str, entries: dict[str, Any], ropes: dict[str, Any]
) -> None:
    config = {"architectures": [f"{kind}ForCausalLM"], **SIZES, "rope_parameters": ropes, **entries}
    written: dict[str, Any] = {}
    message = ""
    try:
        found = HFConfig(config)
        written = found.keys(found.architecture, 128) | found.rope_divisors()
    except HotsetError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 300
    for value in written.values():
        assert not isinstance(value, float | np.ndarray) or np.isfinite(value).all()


LFM2 = {"layer_types": ["conv", "full_attention", "conv", "conv"], "norm_eps": 1e-5}


def test_lfm2_says_where_a_convolution_stands_and_how_wide_its_ffn_is() -> None:
    found = keys("Lfm2", **LFM2)
    assert found["attention.head_count_kv"] == [0, 2, 0, 0]
    assert found["shortconv.l_cache"] == 3
    assert found["rope.freq_base"] == 1e6
    # Older files name the layers that attend, and the output's tie otherwise.
    assert keys("Lfm2", norm_eps=1e-5, full_attn_idxs=[2])["attention.head_count_kv"] == [0, 0, 2, 0]
    assert keys("Lfm2", norm_eps=1e-5)["attention.head_count_kv"] == [2, 2, 2, 2]
    tied = {"architectures": ["Lfm2ForCausalLM"], **SIZES, **LFM2}
    assert HFConfig(tied).tied
    assert not HFConfig(tied | {"tie_embedding": False}).tied
    for entries, n_ff in (
        ({}, 256),  # 2 / 3 of 96, in whole 256
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
def test_what_lfm2_cannot_be_is_refused(entries: dict[str, Any], error: type[HotsetError]) -> None:
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
