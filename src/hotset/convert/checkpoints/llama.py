"""Dense decoders in the line of Llama, of several makers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from hotset.convert.checkpoints.classes import HFClass, every_head
from hotset.convert.checkpoints.names import LLAMA_DEFAULTS, POST_NORM, SPARSE_LM
from hotset.convert.hf_part import FamilyPart
from hotset.convert.hf_rope import HFRope
from hotset.convert.hf_values import ATTENTION_TYPES, checked_types, integer, positive
from hotset.convert.sources import Origin, Source
from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.torch_file import to_floats


class UnitOutput(FamilyPart):
    """Baichuan 2, each row of whose output counts as a vector of length 1."""

    adapts = False

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        return Origin(values, unit=True) if stem == "output" and self.facts.n_vocab == 125696 else None


class XieluPart(FamilyPart):
    """The activation of Apertus: numbers per layer that become keys of the file."""

    constants: ClassVar = tuple(f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))

    def learn(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.tensors = tensors

    def tensor_keys(self, architecture: str) -> dict[str, Any]:
        return {
            stem.replace("mlp.act_fn.", "xielu."): [
                self._number(f"{self.facts.layers}.{i}.{stem}") for i in range(self.facts.n_layer)
            ]
            for stem in self.constants
        }

    def _number(self, name: str) -> float:
        values = self.tensors.get(name)
        if values is None or values.size != 1:
            raise FormatError(f"the checkpoint must have one number in the tensor {name}")
        return float(to_floats(np.ascontiguousarray(values)).reshape(()))


class OnlineBitNet(FamilyPart):
    """BitNet's matrices before quantisation: a loader makes them ternary."""

    adapts = False

    @staticmethod
    def dequantises(quantised: Any) -> bool:
        known = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
        if not isinstance(quantised, dict) or quantised.get("use_rms_norm"):
            return False
        return all(quantised.get(entry) == value for entry, value in known.items())

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        is_ternary = self.dequantises(self.facts.raw.get("quantization_config"))
        return Origin(values, ternary=True) if is_ternary and layer >= 0 and values.ndim == 2 else None


class FactoredQueries(FamilyPart):
    """Muse Glimmer: queries and keys pass norms without weights, and an entry multiplies queries.

    Layers without a window or a rotation are counted from the last one.
    """

    adapts = False

    def keys(self) -> dict[str, Any]:
        """Complete layer_types.

        Raises UnsupportedModelError unless there is a window, and exactly the layers with it have the one
        base of the rotation.
        """
        raw, n_layer, period = self.facts.raw, self.facts.n_layer, self.facts.row.window_period
        base = HFRope(self.facts).keys()["rope.freq_base"]
        if raw.get("sliding_window") is None:
            raise UnsupportedModelError("sliding_window set to null in config.json is not supported")
        whole = [(n_layer - 1 - i) % period == 0 for i in range(n_layer)]
        if raw.get("layer_types") is None:
            raw["layer_types"] = ["full_attention" if own else "sliding_attention" for own in whole]
        types = checked_types(raw["layer_types"], n_layer, ATTENTION_TYPES)
        bases = raw.get("layer_rope_theta")
        bases = [0 if own else base for own in whole] if bases is None else bases
        if bases != [base if kind == "sliding_attention" else 0 for kind in types]:
            raise UnsupportedModelError(
                f"layer_rope_theta in config.json must be {base:g} in layers with a window, and 0 in the "
                "others"
            )
        return {}

    def extra(self) -> dict[str, Origin]:
        factors = {"attn_q_norm": positive(self.facts.raw, "qk_scale_factor"), "attn_k_norm": 1.0}
        norms = {
            stem: Origin(np.full(self.facts.head_dim, factor, np.float32)) for stem, factor in factors.items()
        }
        layers = range(self.facts.n_layer)
        return {f"blk.{i}.{stem}.weight": norm for i in layers for stem, norm in norms.items()}


class BeyondContext(HFRope):
    """The scaling of InternLM2: it is dynamic and begins after the end of the context."""

    def resolved(self, rope: dict[str, Any], kind: Any) -> Any:
        return "default" if kind == "dynamic" else kind


class DepthScales(FamilyPart):
    """The scales of MiniCPM."""

    adapts = False

    def keys(self) -> dict[str, Any]:
        facts = self.facts
        return {
            "embedding_scale": positive(facts.raw, "scale_emb"),
            "residual_scale": positive(facts.raw, "scale_depth") / math.sqrt(facts.n_layer),
            "logit_scale": facts.n_embd / positive(facts.raw, "dim_model_base"),
        }


class ScatteredGroups(FamilyPart):
    """PLaMo: a key serves query heads at equal distances, and not neighbouring ones."""

    adapts = False

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        if stem not in ("attn_q", "attn_output"):
            return None
        facts = self.facts
        groups = np.arange(facts.n_head * facts.head_dim).reshape(-1, facts.n_head_kv, facts.head_dim)
        order = groups.swapaxes(0, 1).reshape(-1)
        return Origin.reordered(values, order) if stem == "attn_q" else Origin(values, columns=order)


def _shared_heads(raw: dict[str, Any], n_head: int) -> int:
    """Return PLaMo's heads of keys and values."""
    return max(n_head // integer(raw, "n_shared_head", high=n_head), 1)


def _baichuan(hf_class: HFClass, raw: dict[str, Any]) -> HFClass:
    """Return the class of 7B or of 13B, whose context is only in model_max_length."""
    return _BAICHUAN_13B if raw.get("max_position_embeddings") is None else hf_class


_COHERE: dict[str, Any] = {
    "epsilon": "layer_norm_eps",
    "tied": True,
    "numbers": {"logit_scale": "logit_scale"},
    "rotates": "norm",
}
_COHERE_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
}

_BAICHUAN = HFClass(
    "baichuan",
    kv_heads=every_head,
    defaults=LLAMA_DEFAULTS | {"max_position_embeddings": 4096},
    parts=(UnitOutput,),
    variant=_baichuan,
)
_BAICHUAN_13B = replace(
    _BAICHUAN,
    defaults=_BAICHUAN.defaults | {"alibi_bias_max": 8.0},
    numbers={"attention.max_alibi_bias": "alibi_bias_max"},
)

CLASSES: dict[str, HFClass] = {
    "BaichuanForCausalLM": _BAICHUAN,
    "BaiChuanForCausalLM": _BAICHUAN,
    "LlamaForCausalLM": HFClass("llama", defaults=LLAMA_DEFAULTS),
    "Idefics3ForConditionalGeneration": HFClass("llama", defaults=LLAMA_DEFAULTS, sees=True),
    "SmolVLMForConditionalGeneration": HFClass("llama", defaults=LLAMA_DEFAULTS, sees=True),
    "SparseLlamaForCausalLM": HFClass("llama", **SPARSE_LM, defaults=LLAMA_DEFAULTS),
    "StableLmForCausalLM": HFClass(
        "stablelm",
        epsilon="layer_norm_eps",
        defaults={
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": False,
        },
        flags={"use_parallel_residual": "use_parallel_residual"},
        partial=True,
    ),
    "CohereForCausalLM": HFClass(
        "command-r",
        **_COHERE,
        defaults=_COHERE_DEFAULTS | {"rope_theta": 5e5},
    ),
    "Cohere2ForCausalLM": HFClass(
        "cohere2",
        **_COHERE,
        defaults=_COHERE_DEFAULTS | {"sliding_window": 4096},
        windows=("sliding_window", "layer_types", "sliding_window_pattern"),
    ),
    "Jais2ForCausalLM": HFClass(
        "jais2",
        epsilon="layer_norm_eps",
        defaults={"hidden_act": "relu2", "layer_norm_eps": 1e-5, "max_position_embeddings": 8192},
    ),
    "SeedOssForCausalLM": HFClass(
        "seed_oss",
        layer_tensors=POST_NORM,
        defaults=LLAMA_DEFAULTS
        | {"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "BambooForCausalLM": HFClass(  # TurboSparse's Mistral has predictors
        "bamboo",
        layer_tensors={"mlp.predictor.fc1": "fc1", "mlp.predictor.fc2": "fc2"},
    ),
    "ApertusForCausalLM": HFClass(
        "apertus",
        activation=None,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 65536, "rope_theta": 12e6}
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
        required={"hidden_act": "xielu"},
        parts=(XieluPart,),
    ),
    "BitNetForCausalLM": HFClass(
        "bitnet",
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
        | {"num_key_value_heads": 5, "rope_theta": 500000.0},
        parts=(OnlineBitNet,),
    ),
    "NemotronForCausalLM": HFClass(
        "nemotron",
        epsilon="norm_eps",
        defaults={"hidden_act": "relu2", "norm_eps": 1e-5, "max_position_embeddings": 4096}
        | {"partial_rotary_factor": 0.5},
        norms_less_one=True,
        partial=True,
    ),
    "ArceeForCausalLM": HFClass(
        "arcee", defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    ),
    "SmolLM3ForCausalLM": HFClass(
        "smollm3",
        tied=True,
        defaults=LLAMA_DEFAULTS
        | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6},
        required={"use_sliding_window": False},
    ),
    "MuseGlimmerForConditionalGeneration": HFClass(
        "muse-glimmer",
        layer_tensors=POST_NORM,
        activation="hidden_activation",
        defaults={
            "hidden_activation": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "sliding_window": 2048,
            "final_logit_softcapping": 20.0,
            "qk_scale_factor": 3.87,
            "output_multiplier": 0.19611613513818404,
        },
        required={"post_norm_eps": 1e-8},
        numbers={"final_logit_softcapping": "final_logit_softcapping", "logit_scale": "output_multiplier"},
        windows=("sliding_window", "layer_types"),
        norms_less_one=True,
        whole_norms=("output_norm", "attn_q_norm", "attn_k_norm"),
        parts=(FactoredQueries,),
        sees=True,
    ),
    "XverseForCausalLM": HFClass("xverse"),
    "InternLM2ForCausalLM": HFClass(
        "internlm2",
        rope=BeyondContext,
        grouped_qkv=True,
    ),
    "OrionForCausalLM": HFClass("orion"),  # its norms have a mean and a bias, whatever the entry is called
    "PanguEmbeddedForCausalLM": HFClass("pangu-embedded"),
    "MiniCPMForCausalLM": HFClass(
        "minicpm", tied=True, required={"sparse_config": None}, parts=(DepthScales,)
    ),
    "MaincoderForCausalLM": HFClass(
        "maincoder",
        ff="intermediate_size_mlp",
        tied=True,
        required={"use_qk_norm": True},
        rotates="norm",
    ),
    "PlamoForCausalLM": HFClass(
        "plamo",
        layers="model.layers.layers",
        activation=None,
        defaults={"max_position_embeddings": 4096},
        kv_heads=_shared_heads,
        parts=(ScatteredGroups,),
    ),
}
