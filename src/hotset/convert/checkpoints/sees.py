"""Vision models around a text model of a class of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotset.convert.checkpoints import llama, mistral, qwen
from hotset.convert.checkpoints.classes import HFClass, text_config
from hotset.errors import UnsupportedModelError
from hotset.parameters import shown

# model_type of text_config → the class of the text model, and the sizes that config.json may omit:
# the checkpoints of LLaVA and Pixtral omit sizes that equal the defaults of transformers.
_TEXT_MODELS: dict[str, tuple[HFClass, dict[str, int]]] = {
    "llama": (llama.CLASSES["LlamaForCausalLM"], {"intermediate_size": 11008}),
    "mistral": (mistral.CLASSES["MistralForCausalLM"], {"intermediate_size": 14336}),
    "internlm2": (llama.CLASSES["InternLM2ForCausalLM"], {}),
    "qwen2": (qwen.CLASSES["Qwen2ForCausalLM"], {"intermediate_size": 22016}),
    "qwen3": (qwen.CLASSES["Qwen3ForCausalLM"], {"intermediate_size": 22016}),
}
# The sizes of a LLaMA 7B, which config.json may omit for every text model.
SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}


def _of_text_model(_: HFClass, config: dict[str, Any]) -> HFClass:
    """Return the class of the text model, whose entries are on the top level of config.json."""
    text = text_config(config)
    kind = text.get("model_type") if isinstance(text, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_MODELS:
        raise UnsupportedModelError(
            f"a text model of the type {shown(kind)} in config.json is not supported in a vision model; "
            f"hotset converts {', '.join(_TEXT_MODELS)}"
        )
    found, sizes = _TEXT_MODELS[kind]
    return replace(found, sees=True, defaults=SIZES | sizes | found.defaults)


_SEES = HFClass("llama", sees=True, variant=_of_text_model)

CLASSES: dict[str, HFClass] = dict.fromkeys(
    (
        "InternVLChatModel",
        "InternVLForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
    ),
    _SEES,
)
