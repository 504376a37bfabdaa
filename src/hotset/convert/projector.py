"""Converts the image encoder and the projector of a Hugging Face checkpoint to llama.cpp's mmproj file.

Keys and names of tensors equal those that llama.cpp's converter writes: each program runs the other's files.
Anything unknown raises an error and is never guessed. A tensor is a view of the checkpoint's mapped file.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hotset.convert.checkpoints.classes import text_config
from hotset.convert.checkpoints.qwen import deep_layers
from hotset.convert.checkpoints.sees import SIZES
from hotset.convert.hf_checkpoint import Checkpoint
from hotset.convert.hf_config import read_json
from hotset.convert.hf_rope import neighbours
from hotset.convert.hf_values import integer, number
from hotset.convert.sources import Origin
from hotset.errors import FormatError, HotsetError, UnsupportedModelError
from hotset.files import check_output
from hotset.formats.gguf import GGUFWriter, PlannedFile, TensorInfo
from hotset.formats.quants import GGMLType
from hotset.formats.requantize import PlannedTensor, assign_types, target_of, typed_model
from hotset.model.activation import GELU
from hotset.model.vision.config import ARCHITECTURE, FAMILIES, config_of_encoder
from hotset.model.vision.graph import describe_encoder
from hotset.model.vision.tensors import EncoderTensors
from hotset.parameters import shown

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.reporter import Reporter

_T = GGMLType
_HALF, _CLIP_MEAN = (0.5, 0.5, 0.5), (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_KINDS = "weight", "bias", "input_min", "input_max", "output_min", "output_max"
_FILTERS = {1: "LANCZOS", 2: "BILINEAR", 3: "BICUBIC"}  # Pillow's numbers

# Names in checkpoints, without the text before the vision part → names in the file. A name that does not end
# in a kind keeps the checkpoint's.
_SIGLIP = {
    r"embeddings\.patch_embedding": "v.patch_embd",
    r"embeddings\.position_embedding": "v.position_embd",
    r"encoder\.layers\.(\d+)\.layer_norm([12])": r"v.blk.\1.ln\2",
    r"encoder\.layers\.(\d+)\.self_attn\.([qkv])_proj": r"v.blk.\1.attn_\2",
    r"encoder\.layers\.(\d+)\.self_attn\.out_proj": r"v.blk.\1.attn_out",
    r"encoder\.layers\.(\d+)\.mlp\.fc1": r"v.blk.\1.ffn_up",
    r"encoder\.layers\.(\d+)\.mlp\.fc2": r"v.blk.\1.ffn_down",
    r"post_layernorm": "v.post_ln",
}
_QWEN = {
    r"patch_embed\.proj": "v.patch_embd",
    r"blocks\.(\d+)\.norm([12])": r"v.blk.\1.ln\2",
    r"blocks\.(\d+)\.attn\.qkv": r"v.blk.\1.attn_q v.blk.\1.attn_k v.blk.\1.attn_v",
    r"blocks\.(\d+)\.attn\.proj": r"v.blk.\1.attn_out",
    r"blocks\.(\d+)\.mlp\.(fc1|up_proj)": r"v.blk.\1.ffn_up",
    r"blocks\.(\d+)\.mlp\.(fc2|down_proj)": r"v.blk.\1.ffn_down",
    r"blocks\.(\d+)\.mlp\.gate_proj": r"v.blk.\1.ffn_gate",
    r"merger\.ln_q": "v.post_ln",
    r"merger\.mlp\.(\d+)": r"mm.\1",
}
_QWEN3 = {
    **_QWEN,
    r"pos_embed": "v.position_embd",
    r"blocks\.(\d+)\.attn\.qkv": r"v.blk.\1.attn_qkv",
    r"blocks\.(\d+)\.mlp\.linear_fc1": r"v.blk.\1.ffn_up",
    r"blocks\.(\d+)\.mlp\.linear_fc2": r"v.blk.\1.ffn_down",
    r"merger\.norm": "v.post_ln",
    r"merger\.linear_fc1": "mm.0",
    r"merger\.linear_fc2": "mm.2",
    r"deepstack_merger_list\.(\d+)\.(norm|linear_fc1|linear_fc2)": r"v.deepstack.\1.\2",
}
_PIXTRAL = {
    r"patch_conv": "v.patch_embd",
    r"ln_pre": "v.pre_ln",
    r"transformer\.layers\.(\d+)\.attention_norm": r"v.blk.\1.ln1",
    r"transformer\.layers\.(\d+)\.ffn_norm": r"v.blk.\1.ln2",
    r"transformer\.layers\.(\d+)\.attention\.([qkv])_proj": r"v.blk.\1.attn_\2",
    r"transformer\.layers\.(\d+)\.attention\.o_proj": r"v.blk.\1.attn_out",
    r"transformer\.layers\.(\d+)\.feed_forward\.(gate|up|down)_proj": r"v.blk.\1.ffn_\2",
    r"norm": "mm.input_norm",
    r"patch_merger\.merging_layer": "mm.patch_merger",
    r"linear_([12])": r"mm.\1",
}


_CLIP = {
    **_SIGLIP,
    r"embeddings\.class_embedding": "v.class_embd",
    r"pre_layrnorm": "v.pre_ln",
    r"post_layernorm": "",  # after the last layer, which is not read
    r"linear_1": "mm.0",
    r"linear_2": "mm.2",
    r"image_newline": "model.image_newline",
}
_INTERNVL = {
    r"embeddings\.cls_token": "v.class_embd",
    r"embeddings\.patch_embeddings\.projection": "v.patch_embd",
    r"embeddings\.position_embeddings": "v.position_embd.weight",
    r"encoder\.layer\.(\d+)\.attention\.([qkv])_proj": r"v.blk.\1.attn_\2",
    r"encoder\.layer\.(\d+)\.attention\.projection_layer": r"v.blk.\1.attn_out",
    r"encoder\.layer\.(\d+)\.attention\.([qk]_norm)": r"v.blk.\1.attn_\2",
    r"encoder\.layer\.(\d+)\.lambda_([12])": r"v.blk.\1.ls\2.weight",
    r"encoder\.layer\.(\d+)\.layernorm_before": r"v.blk.\1.ln1",
    r"encoder\.layer\.(\d+)\.layernorm_after": r"v.blk.\1.ln2",
    r"encoder\.layer\.(\d+)\.mlp\.fc1": r"v.blk.\1.ffn_up",
    r"encoder\.layer\.(\d+)\.mlp\.fc2": r"v.blk.\1.ffn_down",
    r"layer_norm": "mm.model.mlp.0",
    r"linear_1": "mm.model.mlp.1",
    r"linear_2": "mm.model.mlp.3",
}


_INTERNVL_CHAT = {
    r"embeddings\.class_embedding": "v.class_embd",
    r"embeddings\.patch_embedding": "v.patch_embd",
    r"embeddings\.position_embedding": "v.position_embd.weight",
    r"encoder\.layers\.(\d+)\.attn\.qkv": r"v.blk.\1.attn_q v.blk.\1.attn_k v.blk.\1.attn_v",
    r"encoder\.layers\.(\d+)\.attn\.proj": r"v.blk.\1.attn_out",
    r"encoder\.layers\.(\d+)\.attn\.([qk]_norm)": r"v.blk.\1.attn_\2",
    r"encoder\.layers\.(\d+)\.ls([12])": r"v.blk.\1.ls\2.weight",
    r"encoder\.layers\.(\d+)\.norm([12])": r"v.blk.\1.ln\2",
    r"encoder\.layers\.(\d+)\.mlp\.fc1": r"v.blk.\1.ffn_up",
    r"encoder\.layers\.(\d+)\.mlp\.fc2": r"v.blk.\1.ffn_down",
    r"mlp1\.([013])": r"mm.model.mlp.\1",
}
_GEMMA4 = {
    r"patch_embedder\.input_proj": "v.patch_embd",
    r"patch_embedder\.position_embedding_table": "v.position_embd.weight",
    r"encoder\.layers\.(\d+)\.input_layernorm": r"v.blk.\1.ln1",
    r"encoder\.layers\.(\d+)\.post_attention_layernorm": r"v.blk.\1.attn_post_norm",
    r"encoder\.layers\.(\d+)\.pre_feedforward_layernorm": r"v.blk.\1.ln2",
    r"encoder\.layers\.(\d+)\.post_feedforward_layernorm": r"v.blk.\1.ffn_post_norm",
    r"encoder\.layers\.(\d+)\.self_attn\.([qk]_norm)": r"v.blk.\1.attn_\2",
    r"encoder\.layers\.(\d+)\.self_attn\.([qkv])_proj(\.linear)?": r"v.blk.\1.attn_\2",
    r"encoder\.layers\.(\d+)\.self_attn\.o_proj(\.linear)?": r"v.blk.\1.attn_out",
    r"encoder\.layers\.(\d+)\.mlp\.(gate|up|down)_proj(\.linear)?": r"v.blk.\1.ffn_\2",
    r"(std_bias|std_scale)": r"v.\1",
    r"embedding_projection": "mm.input_projection",
}


@dataclass(frozen=True)
class EncoderClass:
    """A class of checkpoints with an image encoder.

    projector: the family. prefix: of the names of the vision part's tensors. tensors: patterns of the rest
    → names in the file, several if a tensor is split, none if it is left out. defaults: entries of
    vision_config that the class has if config.json has not. mean, std: of the processor. resample: Pillow's
    filter. keys: returns further keys, without `clip.`, from vision_config, config.json and the processor's
    file. whole: types of tensors in files of any type but F32. turned: rows of queries and keys are for
    pairs of channels in the halves of a head, and become pairs of neighbours. normalises: the processor
    subtracts the mean.
    """

    projector: str
    prefix: str
    tensors: Mapping[str, str]
    defaults: Mapping[str, Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int
    keys: Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    whole: Mapping[str, GGMLType]
    turned: bool = False
    normalises: bool = True


def _idefics3_keys(
    vision: Mapping[str, Any], config: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any]:
    longest = _size(images, "size", "longest_edge", 4 * 364)
    _checked_side(vision, images, "max_image_size", "longest_edge", "tiles")
    return {
        "vision.projector.scale_factor": integer(config, "scale_factor", 2),
        "vision.preproc_image_size": longest,
    }


def _gemma3_keys(
    vision: Mapping[str, Any], config: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any]:
    side = _checked_side(vision, images, "size", "height", "images")
    per_side = math.isqrt(integer(config, "mm_tokens_per_image", 256))
    merge = side // integer(vision, "patch_size") // per_side
    return {} if merge == 4 else {"vision.projector.scale_factor": merge}


def _gemma4_keys(
    vision: Mapping[str, Any], config: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any]:
    n_head = integer(vision, "num_attention_heads")
    n_embd, merge = integer(vision, "hidden_size"), integer(vision, "pooling_kernel_size")
    rope = vision.get("rope_parameters") or {}
    known = {"rope_type": "axial", "rope_theta": 100.0}
    _check_entries(rope if isinstance(rope, dict) else {"rope_type": rope}, known)
    _check_entries(vision, {"num_key_value_heads": n_head, "attention_bias": False})
    _check_entries(vision, {"head_dim": n_embd // n_head, "hidden_activation": "gelu_pytorch_tanh"})
    text = text_config(config) or {}
    is_causal = integer(text, "hidden_size", 2304) in FAMILIES["gemma4v"].causal_widths
    _check_entries(text, {"use_bidirectional_attention": None if is_causal else "vision"})
    sizes = {"patch_size": integer(vision, "patch_size"), "pooling_kernel_size": merge}
    _check_entries(images, sizes, "the image processor's")
    keys: dict[str, Any] = {"vision.attention.layer_norm_epsilon": float(number(vision, "rms_norm_eps"))}
    if merge != 3:
        keys["vision.projector.scale_factor"] = merge
    if (most := integer(images, "max_soft_tokens", 280)) != 280:
        keys["vision.image_max_pixels"] = most * (merge * integer(vision, "patch_size")) ** 2
    return keys


def _llava_keys(
    vision: Mapping[str, Any], config: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any]:
    points = config.get("image_grid_pinpoints")
    known = {"projector_hidden_act": "gelu", "vision_feature_select_strategy": "default"}
    _check_entries(config, known)
    if vision.get("model_type") != "clip_vision_model":
        raise UnsupportedModelError(f"a vision_config of {shown(vision.get('model_type'))} is not supported")
    if points is None:
        _check_entries(images, {"do_center_crop": True, "do_pad": False}, "the image processor's")
    _checked_side(vision, images, "size", "shortest_edge", "images")
    side = _checked_side(vision, images, "crop_size", "height", "images")
    layer = config.get("vision_feature_layer", -2)
    n_layer = integer(vision, "num_hidden_layers", high=1 << 10)
    if type(layer) is not int or not -n_layer <= layer < 0:
        raise UnsupportedModelError(
            f"the vision_feature_layer {shown(layer)} in config.json is not supported"
        )
    keys = {"vision.block_count": n_layer + 1 + layer, "vision.feature_layer": [n_layer + 1 + layer]}
    if config.get("architectures") == ["LlavaNextForConditionalGeneration"]:
        if points is not None and not _are_points(points):
            raise UnsupportedModelError("image_grid_pinpoints in config.json must be heights and widths")
        if points is None:
            points = [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]]
            points = [[n * side for n in point] for point in points]
        keys |= {
            "vision.mm_patch_merge_type": "spatial_unpad",
            "vision.image_grid_pinpoints": [n for point in points for n in point],
        }
    return keys


def _are_points(given: Any) -> bool:
    return isinstance(given, list) and all(
        isinstance(point, list) and [type(n) for n in point] == [int, int] for point in given
    )


def _internvl_keys(
    vision: Mapping[str, Any], config: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any]:
    known = {"projector_hidden_act": "gelu", "vision_feature_layer": -1, "downsample_ratio": 0.5}
    _check_entries(config, known | {"vision_feature_select_strategy": "default"})
    _check_entries(vision, {"use_mean_pooling": True})
    _checked_side(vision, images, "size", "height", "tiles")
    return {
        "vision.projector.scale_factor": 2,
        "vision.preproc_min_tiles": integer(images, "min_patches", 1),
        "vision.preproc_max_tiles": integer(images, "max_patches", 12),
    }


def _internvl_chat_keys(
    vision: Mapping[str, Any], config: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any]:
    side = integer(vision, "image_size")
    known = {"select_layer": -1, "downsample_ratio": 0.5, "ps_version": "v2", "use_thumbnail": True}
    _check_entries(config, known | {"force_image_size": side})
    return {
        "vision.projector.scale_factor": 2,
        "vision.preproc_min_tiles": integer(config, "min_dynamic_patch", 1),
        "vision.preproc_max_tiles": integer(config, "max_dynamic_patch", 12),
    }


def _check_entries(
    entries: Mapping[str, Any], known: Mapping[str, Any], whose: str = "config.json's"
) -> None:
    """Raise UnsupportedModelError for an entry with another than the known value."""
    for entry, value in known.items():
        if (given := entries.get(entry, value)) != value:
            raise UnsupportedModelError(f"{whose} {entry} is {shown(given)}, and only {value!r} is supported")


def _pixtral_keys(
    vision: Mapping[str, Any], config: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any]:
    _checked_side(vision, images, "size", "longest_edge", "images")
    _check_entries(config, {"projector_hidden_act": "gelu", "vision_feature_layer": -1})
    if vision.get("model_type") != "pixtral":
        raise UnsupportedModelError(f"a vision_config of {shown(vision.get('model_type'))} is not supported")
    has_merger = "spatial_merge_size" in config
    return {"vision.spatial_merge_size": integer(config, "spatial_merge_size")} if has_merger else {}


def _qwen_keys(
    vision: Mapping[str, Any], config: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any]:
    least = _size(images, "size", "shortest_edge", integer(images, "min_pixels", 56 * 56))
    most = _size(images, "size", "longest_edge", integer(images, "max_pixels", 28 * 28 * 1280))
    keys: dict[str, Any] = {"vision.image_min_pixels": least, "vision.image_max_pixels": most}
    if (merge := integer(vision, "spatial_merge_size")) != 2:
        keys["vision.spatial_merge_size"] = merge
    if integer(vision, "temporal_patch_size") != 2:
        raise UnsupportedModelError("patches of other than two frames are not supported")
    if (full := vision.get("fullatt_block_indexes")) is not None:
        keys["vision.n_wa_pattern"] = _pattern(full, integer(vision, "num_hidden_layers"))
        if (window := integer(vision, "window_size")) != 112:
            keys["vision.window_size"] = window
    return keys


def _qwen3_keys(
    vision: Mapping[str, Any], config: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any]:
    n_layer = integer(vision, "num_hidden_layers", high=1 << 10)
    indexes = deep_layers(vision, n_layer)
    deep = [i in indexes for i in range(n_layer)]
    return _qwen_keys(vision, config, images) | {"vision.is_deepstack_layers": deep}


_OF_SIGLIP = {
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "intermediate_size": 3072,
    "num_hidden_layers": 12, "image_size": 224,
}  # fmt: skip
_OF_QWEN = {
    "depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "image_size": 560, "layer_norm_eps": 1e-6,
}  # fmt: skip
_F32 = {"v.patch_embd.weight": _T.F32, "v.position_embd.weight": _T.F32}
_IDEFICS3 = EncoderClass(
    "idefics3", r"(model\.)?(vision_model|connector)\.",
    _SIGLIP | {r"modality_projection\.proj": "mm.model.fc"},
    _OF_SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
    _HALF, _HALF, 1, _idefics3_keys, _F32,
)  # fmt: skip
_QWEN2VL = EncoderClass(
    "qwen2vl_merger", r"(model\.)?visual\.", _QWEN,
    _OF_QWEN | {"embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "mlp_ratio": 4},
    _CLIP_MEAN, _CLIP_STD, 3, _qwen_keys, {},
)  # fmt: skip
_QWEN3VL = EncoderClass(
    "qwen3vl_merger", r"(model\.)?visual\.", _QWEN3,
    _OF_QWEN
    | {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304,
    },
    _HALF, _HALF, 3, _qwen3_keys, {"v.position_embd.weight": _T.F32},
)  # fmt: skip
_PIXTRAL_CLASS = EncoderClass(
    "pixtral", r"(model\.)?(vision_tower|multi_modal_projector)\.", _PIXTRAL,
    {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 1024, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
        "model_type": "pixtral",
    },
    _CLIP_MEAN, _CLIP_STD, 3, _pixtral_keys, {}, turned=True,
)  # fmt: skip
_LLAVA = EncoderClass(
    "mlp", r"(model\.)?((vision_tower(\.vision_model)?|multi_modal_projector)\.|(?=image_newline))", _CLIP,
    {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
        "model_type": "clip_vision_model",
    },
    _CLIP_MEAN, _CLIP_STD, 3, _llava_keys, {"v.position_embd.weight": _T.F32},
)  # fmt: skip
_OF_INTERNVL = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
}  # fmt: skip
CLASSES = {
    "LlavaNextForConditionalGeneration": _LLAVA,
    "InternVLForConditionalGeneration": EncoderClass(
        "internvl", r"(model\.)?(vision_tower|multi_modal_projector)\.", _INTERNVL, _OF_INTERNVL,
        _CLIP_MEAN, _CLIP_STD, 3, _internvl_keys, {"v.position_embd.weight": _T.F32},
    ),
    "InternVLChatModel": EncoderClass(  # as its authors publish it
        "internvl", r"(vision_model\.|(?=mlp1\.))", _INTERNVL_CHAT, _OF_INTERNVL,
        (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 3, _internvl_chat_keys,
        {"v.position_embd.weight": _T.F32},
    ),
    "LlavaForConditionalGeneration": _PIXTRAL_CLASS,
    "Mistral3ForConditionalGeneration": _PIXTRAL_CLASS,
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "Gemma3ForConditionalGeneration": EncoderClass(
        "gemma3", r"(model\.)?(vision_tower(\.vision_model)?|multi_modal_projector)\.",
        _SIGLIP
        | {
            "mm_input_projection_weight": "mm.input_projection.weight",
            "mm_soft_emb_norm": "mm.soft_emb_norm",
        },
        _OF_SIGLIP | {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16},
        _HALF, _HALF, 2, _gemma3_keys, _F32 | {"mm.input_projection.weight": _T.F16},
    ),
    "Gemma4ForConditionalGeneration": EncoderClass(
        "gemma4v", r"(model\.)?(vision_tower|embed_vision)\.", _GEMMA4,
        {
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
            "head_dim": 64, "patch_size": 16, "pooling_kernel_size": 3, "image_size": 224,
            "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "rms_norm_eps": 1e-6,
        },
        (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 3, _gemma4_keys, {"v.position_embd.weight": _T.F32},
        normalises=False,
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": EncoderClass(
        "qwen2.5vl_merger", r"(model\.)?visual\.", _QWEN,
        _OF_QWEN
        | {
            "hidden_size": 1280, "intermediate_size": 3420, "hidden_act": "silu", "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        _CLIP_MEAN, _CLIP_STD, 3, _qwen_keys, {},
    ),
    "Qwen3VLForConditionalGeneration": _QWEN3VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3VL,
}  # fmt: skip


def convert_projector(
    src_dir: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    type: GGMLType | str = "f16",
    *,
    tensor_types: Sequence[str] = (),
    progress: Reporter | None = None,
) -> tuple[PlannedTensor, ...]:
    """Write the image encoder of the checkpoint in the folder `src_dir` as a file for --mmproj.

    type, tensor_types: of the matrices, as for `requantize.types_of`. Returns the types of the tensors.
    Raises ModelNotFoundError, FormatError, UnsupportedModelError or InvalidRequestError, and then leaves no
    file.
    """
    check_output(out_path)
    src = Path(src_dir)
    name = type.name.lower() if isinstance(type, GGMLType) else type.lower()
    config = read_json(src / "config.json")
    family = _class_of(config)
    checkpoint = Checkpoint(src)
    keys = _keys(family, config, _processor(src))
    head_dim = keys["vision.embedding_length"] // keys["vision.attention.head_count"]
    deep = [i for i, is_deep in enumerate(keys.get("vision.is_deepstack_layers", ())) if is_deep]
    sources = {
        n: source
        for n, source in _sources(checkpoint, family, head_dim, deep)
        if (of_layer := re.match(r"v\.blk\.(\d+)\.", n)) is None
        or int(of_layer[1]) < keys["vision.block_count"]
    }
    if family.projector == "pixtral":
        sources["v.token_embd.img_break"] = Origin(_row_of_token(src, checkpoint, "[IMG_BREAK]"))
    writer = GGUFWriter(out_path, ARCHITECTURE)
    writer.add("general.type", "mmproj")
    writer.add("general.name", src.resolve().name)
    writer.add("general.file_type", target_of(name).file_type)
    writer.add("general.quantization_version", 2)
    for key, value in keys.items():
        writer.add(f"{ARCHITECTURE}.{key}", value)
    infos = [
        TensorInfo(n, source.shape[::-1], _T.F32, 4 * math.prod(source.shape), 0)
        for n, source in sources.items()
    ]
    # llama.cpp reads convolutions, and the merger as one, in F32 or F16 only.
    whole: dict[str, GGMLType] = {}
    if name != "f16":
        whole = {i.name: _T.F32 for i in infos if len(i.shape) > 2 or "patch_merger" in i.name}
    whole |= {} if name == "f32" else family.whole
    facts = typed_model(writer.planned().metadata, ARCHITECTURE, "gguf", False)
    planned = assign_types(facts, infos, name, tensor_types, whole)
    for tensor in planned:

        def pieces(tensor: PlannedTensor = tensor) -> Iterator[np.ndarray]:
            for piece in sources[tensor.info.name].pieces():
                yield piece.reshape(-1, piece.shape[-1])
                checkpoint.release()

        writer.add_tensor(tensor.info.name, pieces, tensor.type, tensor.info.shape)
    _check_loads(writer.planned())
    writer.write(progress)
    return tuple(planned)


def _class_of(config: Mapping[str, Any]) -> EncoderClass:
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    if not isinstance(name, str) or name not in CLASSES:
        raise UnsupportedModelError(
            f"the image encoder of the architecture {shown(name)} in config.json is not supported; hotset "
            f"converts {', '.join(CLASSES)}"
        )
    vision = config.get("vision_config")
    if isinstance(vision, dict) and vision.get("model_type") == "clip_vision_model":
        return _LLAVA
    return CLASSES[name]


def _processor(src: Path) -> dict[str, Any]:
    """Return the entries of the image processor; empty if the checkpoint has none."""
    found: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (src / name).exists():
            entries = read_json(src / name)
            inner = entries.get("image_processor")
            found |= entries | (inner if isinstance(inner, dict) else {})
    return found


def _keys(family: EncoderClass, config: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the file, without `clip.`."""
    given = config.get("vision_config")
    if not isinstance(given, dict):
        raise FormatError("config.json has no vision_config, which describes the image encoder")
    vision = {**family.defaults, **{key: value for key, value in given.items() if value is not None}}
    if "embed_dim" in vision:  # Qwen2-VL's hidden_size is the text model's
        vision |= {"hidden_size": vision["embed_dim"]}
        vision["intermediate_size"] = integer(vision, "embed_dim") * integer(vision, "mlp_ratio")
    for entry in ("image_size", "patch_size"):
        if isinstance(sides := vision.get(entry), list) and len(set(map(str, sides))) == 1:
            vision[entry] = sides[0]
    vision["num_hidden_layers"] = vision.get("depth", vision.get("num_hidden_layers"))
    vision["num_attention_heads"] = vision.get("num_heads", vision.get("num_attention_heads"))
    if "num_position_embeddings" in vision:
        side = math.isqrt(n := integer(vision, "num_position_embeddings"))
        if side**2 != n:
            raise UnsupportedModelError(f"{n} learned positions in config.json do not form a square")
        vision["image_size"] = side * integer(vision, "patch_size")
    for entry, usual in {"do_resize": True, "do_rescale": True, "do_normalize": family.normalises}.items():
        if images.get(entry, usual) is not usual:
            state = "off" if usual else "on"
            raise UnsupportedModelError(f"an image processor with {entry} {state} is not supported")
    if (resample := images.get("resample", family.resample)) != family.resample:
        given = _FILTERS.get(resample) if type(resample) is int else None
        raise UnsupportedModelError(
            f"the image processor's filter is {given or shown(resample)}, and only "
            f"{_FILTERS[family.resample]} is supported"
        )
    text = text_config(config) or {}
    return {
        "has_vision_encoder": True,
        "projector_type": family.projector,
        "vision.projection_dim": integer({**SIZES, **config, **text}, "hidden_size"),
        "vision.image_size": integer(vision, "image_size"),
        "vision.patch_size": integer(vision, "patch_size"),
        "vision.embedding_length": integer(vision, "hidden_size"),
        "vision.feed_forward_length": integer(vision, "intermediate_size"),
        "vision.block_count": integer(vision, "num_hidden_layers"),
        "vision.attention.head_count": integer(vision, "num_attention_heads"),
        "vision.attention.layer_norm_epsilon": float(number(vision, "layer_norm_eps")),
        "vision.image_mean": _channels(images, "image_mean", family.mean),
        "vision.image_std": _channels(images, "image_std", family.std),
        **_activation_keys(vision.get("hidden_act"), family.projector),
        **family.keys(vision, config, images),
    }


def _activation_keys(name: object, projector: str) -> dict[str, bool]:
    gelu = "gelu" if FAMILIES[projector].gelu == GELU else "gelu_pytorch_tanh"
    known = {gelu: {"use_gelu": True}, "silu": {"use_silu": True}, "quick_gelu": {}}
    if not isinstance(name, str) or name not in known:
        raise UnsupportedModelError(f"the encoder's activation {shown(name)} is not supported")
    return known[name]


def _channels(images: Mapping[str, Any], entry: str, default: tuple[float, ...]) -> list[float]:
    """Return a number for each of three channels."""
    values = images.get(entry, list(default))
    if not isinstance(values, list) or len(values) != 3:
        raise FormatError(f"{entry} of the image processor must hold a number for each of three channels")
    return [float(number({entry: value}, entry)) for value in values]


def _size(images: Mapping[str, Any], entry: str, part: str, default: int) -> int:
    """Return a part of a size of the image processor."""
    size = images.get(entry)
    return integer(size, part, default) if isinstance(size, dict) else default


def _checked_side(
    vision: Mapping[str, Any], images: Mapping[str, Any], entry: str, part: str, what: str
) -> int:
    """Return the encoder's side in pixels; UnsupportedModelError if the image processor has another."""
    side = integer(vision, "image_size")
    if (found := _size(images, entry, part, side)) != side:
        raise UnsupportedModelError(f"{what} of {found} pixels for an encoder of {side} are not supported")
    return side


def _pattern(full: object, n_layer: int) -> int:
    """Return every how many layers one attends to the whole image."""
    if not isinstance(full, list | tuple) or not full or not all(type(i) is int for i in full):
        raise FormatError("fullatt_block_indexes in config.json must be a list of layers")
    every = full[0] + 1
    if every < 1 or list(full) != list(range(every - 1, n_layer, every)):
        raise UnsupportedModelError(f"layers of the whole image at {list(full)[:8]} have no regular pattern")
    return int(every)


# ---- tensors


def _sources(
    checkpoint: Checkpoint, family: EncoderClass, head_dim: int, deep: Sequence[int]
) -> Iterator[tuple[str, Origin]]:
    """Yield (name in the file, its source). Raises an error for a tensor without a place.

    deep: the layers with features for the text model.
    """

    def in_layer(merger: re.Match[str]) -> str:
        if int(merger[1]) >= len(deep):
            raise FormatError(f"the checkpoint has {merger[0]}, but config.json names {len(deep)} layers")
        return f"deepstack.{deep[int(merger[1])]}."

    names = [name for name in (*checkpoint.tensors, *checkpoint.unread) if re.match(family.prefix, name)]
    checkpoint.check_readable(names)
    found: set[str] = set()
    for name in names:
        rest = re.sub(f"^{family.prefix}", "", name)
        if rest.startswith("head.") or rest.endswith("position_ids"):  # of the encoder alone
            continue
        targets, values = _targets(rest, family), checkpoint.tensors[name]
        targets = [re.sub(r"deepstack\.(\d+)\.(?:linear_)?", in_layer, target) for target in targets]
        if twice := found & set(targets):
            raise FormatError(f"the checkpoint has two tensors for {min(twice)}, one of them {name}")
        found |= set(targets)
        if rest == "patch_embedder.input_proj.weight" and values.ndim == 2:  # channel after channel
            side = math.isqrt(values.shape[1] // 3)
            values = values.reshape(len(values), side, side, -1).transpose(0, 3, 1, 2)
        values = values.reshape(1) if values.ndim == 0 else values
        if values.ndim == 3 and len(values) == 1:  # one image of a batch
            values = values[0] if values.shape[1] > 1 else values[0, 0]
        if not targets:
            continue
        if family.turned and re.search(r"\.attn_[qk]\.", targets[0]):
            yield targets[0], Origin(values, rows=neighbours(len(values), head_dim))
        else:
            yield from _split(name, values, targets)


def _row_of_token(src: Path, checkpoint: Checkpoint, token: str) -> np.ndarray:
    """Return the embedding of a token, which llama.cpp reads from the encoder's file."""
    tokens = read_json(src / "tokenizer.json").get("added_tokens")
    ids = [
        entry.get("id") for entry in tokens or [] if isinstance(entry, dict) and entry.get("content") == token
    ]
    names = [name for name in checkpoint.tensors if name.endswith("embed_tokens.weight")]
    if len(ids) != 1 or len(names) != 1 or type(ids[0]) is not int:
        raise FormatError(f"the checkpoint has no embedding of the token {token}")
    embedding = checkpoint.tensors[names[0]]
    if not 0 <= ids[0] < len(embedding):
        raise FormatError(f"the token {token} has the id {ids[0]}, outside the embedding")
    row: np.ndarray = embedding[ids[0]]
    return row


def _targets(rest: str, family: EncoderClass) -> list[str]:
    """Return the names in the file of a tensor of the vision part."""
    stem, _, kind = rest.rpartition(".")
    for pattern, target in family.tensors.items():
        if (match := re.fullmatch(pattern, rest)) is not None:
            return match.expand(target).split()
        if kind in _KINDS and (match := re.fullmatch(pattern, stem)) is not None:
            return [f"{one}.{kind}" for one in match.expand(target).split()]
    raise UnsupportedModelError(f"the checkpoint has a tensor that is not known: {rest[:200]}")


def _split(name: str, values: np.ndarray, targets: list[str]) -> Iterator[tuple[str, Origin]]:
    """Yield the parts of a tensor: equal rows for several targets, frames of a patch embedding."""
    if len(values) % len(targets) or values.ndim not in (1, 2, 3, 4, 5):
        raise FormatError(f"the tensor {name} of the checkpoint is {list(values.shape)}")
    size = len(values) // len(targets)
    for i, target in enumerate(targets):
        part = values[i * size : (i + 1) * size]
        if target == "mm.soft_emb_norm.weight":
            yield target, Origin(part, plus=1.0)
        elif part.ndim == 5:  # a convolution over two frames
            if part.shape[2] != 2:
                raise UnsupportedModelError("patches of other than two frames are not supported")
            yield target, Origin(part[:, :, 0])
            yield f"{target}.1", Origin(part[:, :, 1])
        else:
            yield target, Origin(part)


def _check_loads(planned: PlannedFile) -> None:
    """Raise the errors of loading the file: a missing tensor, a number out of its range."""
    file = cast("GGUFFile", planned)  # it has the attributes that are read
    try:
        tensors = EncoderTensors(file).tensors
        describe_encoder(config_of_encoder(file, tensors), tensors)
    except HotsetError as error:
        raise type(error)(f"the checkpoint would become a file that does not load: {error}") from None
