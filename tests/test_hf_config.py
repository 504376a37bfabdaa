"""config.json as the keys of a GGUF file: switches whose absence no logit of a tiny model need show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotset.convert.hf_config import HFConfig
from hotset.errors import UnsupportedModelError

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "hidden_act": "silu",
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
