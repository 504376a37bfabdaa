"""Tiny models that see: random checkpoints, their files, and what transformers makes of images."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_once import made_once

from hotset.convert.hf import convert_hf
from hotset.convert.projector import convert_projector

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

N_EMBD = 24  # of the text models
TEXT = {
    "hidden_size": N_EMBD, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 12, "vocab_size": 300, "max_position_embeddings": 256,
}  # fmt: skip
IMAGE_TOKEN = 5
# Height and width of the test's images: wide, high, square and small.
SIZES = ((40, 100), (130, 61), (64, 64), (9, 20))
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Recipe:
    """A family. model: makes a model; processor: makes its image processor; features: returns its embeddings.

    features(model, found), with the results of the processor, returns float32 [n_tokens, N_EMBD] and the
    processor's pixels, one row per patch: [n_patches, 3 * patch^2], of all tiles, row by row. nested: the
    processor takes a list of images per text.
    """

    model: Callable[[], Any]
    processor: Callable[[], Any]
    features: Callable[[Any, Any], tuple[np.ndarray, np.ndarray]]
    patch: int
    nested: bool = False
    has_tokenizer: bool = False

    def processed(self, image: np.ndarray) -> Any:
        """Return the results of the image processor."""
        return self.processor()([[image] if self.nested else image], return_tensors="pt")


def image_of(size: tuple[int, int]) -> np.ndarray:
    """Return an image with edges, gradients and noise, uint8 [height, width, 3]."""
    height, width = size
    rng = np.random.default_rng([*size, 5])
    y, x = np.indices(size) / np.array(size).reshape(2, 1, 1)
    base = np.stack([x, y, (np.sin(20 * x) > np.cos(9 * y)) * 1.0], axis=2) * 200
    return np.clip(base + rng.normal(20, 15, (height, width, 3)), 0, 255).astype(np.uint8)


def patches_of(pixels: Any, patch: int) -> np.ndarray:
    """Return the patches of images [n, 3, height, width], row by row: [n_patches, 3 * patch^2]."""
    rows = torch.nn.functional.unfold(pixels.float(), patch, stride=patch)
    return rows.transpose(1, 2).reshape(-1, rows.shape[1]).numpy()


def by_rows(rows: np.ndarray, grid: tuple[int, int], merge: int) -> np.ndarray:
    """Return rows that are token by token, row by row of the image. grid: patches of its height and width."""
    height, width = grid
    cells = rows.reshape(height // merge, width // merge, merge, merge, -1)
    return cells.transpose(0, 2, 1, 3, 4).reshape(len(rows), -1)


def _random(model: Any) -> Any:
    """Give every parameter a random value: norms around 1, the rest small enough for stable sums."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, values in model.named_parameters():
            noise = torch.randn(values.shape, generator=generator)
            scale = 0.3 if values.ndim == 1 else 1.5 / values[0].numel() ** 0.5
            values.copy_(noise * scale + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return model.eval()


def _embeddings(features: Any) -> np.ndarray:
    """Return the embeddings of all tiles, whose form depends on the version of transformers."""
    found = []
    for of_layer in (features.pooler_output, *(getattr(features, "deepstack_features", None) or ())):
        parts = [of_layer] if isinstance(of_layer, torch.Tensor) else of_layer
        found.append(np.concatenate([part.reshape(-1, N_EMBD).numpy() for part in parts]))
    return np.concatenate(found, axis=1)


def _idefics3() -> Any:
    config = transformers.Idefics3Config(
        text_config={"model_type": "llama", **TEXT},
        vision_config={
            "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": 32, "patch_size": 8,
        },
        scale_factor=2, image_token_id=IMAGE_TOKEN, pad_token_id=0,
    )  # fmt: skip
    return _random(transformers.Idefics3ForConditionalGeneration(config))


def _idefics3_processor() -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(size={"longest_edge": 96}, max_image_size={"longest_edge": 32})


def _idefics3_features(model: Any, found: Any) -> tuple[np.ndarray, np.ndarray]:
    features = model.model.get_image_features(found["pixel_values"], found["pixel_attention_mask"])
    return _embeddings(features), patches_of(found["pixel_values"][0], 8)


def _gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config=TEXT,
        vision_config={
            "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": 56, "patch_size": 7, "layer_norm_eps": 1e-6,
        },
        mm_tokens_per_image=16, image_token_index=IMAGE_TOKEN,
    )  # fmt: skip
    return _random(transformers.Gemma3ForConditionalGeneration(config))


def _gemma3_processor() -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": 56, "width": 56})


def _gemma3_features(model: Any, found: Any) -> tuple[np.ndarray, np.ndarray]:
    features = model.model.get_image_features(found["pixel_values"])
    return _embeddings(features), patches_of(found["pixel_values"], 7)


def _qwen2vl() -> Any:
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}},
        vision_config={
            "depth": 3, "embed_dim": 32, "hidden_size": N_EMBD, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 4, "spatial_merge_size": 2,
        },
        image_token_id=IMAGE_TOKEN,
    )  # fmt: skip
    return _random(transformers.Qwen2VLForConditionalGeneration(config))


def _qwen25vl() -> Any:
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}},
        vision_config={
            "depth": 4, "hidden_size": 32, "out_hidden_size": N_EMBD, "num_heads": 2,
            "intermediate_size": 56, "patch_size": 4, "spatial_merge_size": 2, "window_size": 24,
            "fullatt_block_indexes": [1, 3],
        },
        image_token_id=IMAGE_TOKEN,
    )  # fmt: skip
    return _random(transformers.Qwen2_5_VLForConditionalGeneration(config))


def qwen3vl(**vision: Any) -> Any:
    """Return a random Qwen3-VL. vision: other entries of vision_config."""
    config = transformers.Qwen3VLConfig(
        text_config={
            **TEXT, "num_hidden_layers": 3,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]},
        },
        vision_config={
            "depth": 4, "hidden_size": 32, "out_hidden_size": N_EMBD, "num_heads": 2, "intermediate_size": 56,
            "patch_size": 4, "spatial_merge_size": 2, "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2], **vision,
        },
        image_token_id=IMAGE_TOKEN,
    )  # fmt: skip
    return _random(transformers.Qwen3VLForConditionalGeneration(config))


def _qwen_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=12 * 64, max_pixels=90 * 64)


def _qwen_features(model: Any, found: Any) -> tuple[np.ndarray, np.ndarray]:
    grid = found["image_grid_thw"]
    features = model.model.get_image_features(found["pixel_values"], grid)
    rows = found["pixel_values"].reshape(-1, 3, 2, 16)[:, :, 0].reshape(-1, 48).numpy()
    return _embeddings(features), by_rows(rows, tuple(grid[0, 1:].tolist()), 2)


def _pixtral() -> Any:
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", "rms_norm_eps": 1e-5, **TEXT},
        vision_config={
            "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3,
            "num_attention_heads": 2, "image_size": 96, "patch_size": 4, "hidden_act": "silu",
        },
        spatial_merge_size=2, vision_feature_layer=-1, image_token_id=IMAGE_TOKEN,
    )  # fmt: skip
    return _random(transformers.Mistral3ForConditionalGeneration(config))


def _pixtral_12b() -> Any:
    config = transformers.LlavaConfig(
        text_config={"model_type": "mistral", "rms_norm_eps": 1e-5, **TEXT},
        vision_config={
            "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3,
            "num_attention_heads": 2, "image_size": 96, "patch_size": 8, "hidden_act": "silu",
        },
        vision_feature_layer=-1, vision_feature_select_strategy="full", image_token_index=IMAGE_TOKEN,
    )  # fmt: skip
    return _random(transformers.LlavaForConditionalGeneration(config))


def _pixtral_processor() -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 8, "width": 8})


def _pixtral_features(model: Any, found: Any) -> tuple[np.ndarray, np.ndarray]:
    features = model.model.get_image_features(
        found["pixel_values"], image_sizes=found["image_sizes"], vision_feature_layer=-1
    )
    return _embeddings(features), patches_of(found["pixel_values"], 4)


def _pixtral_12b_features(model: Any, found: Any) -> tuple[np.ndarray, np.ndarray]:
    features = model.model.get_image_features(
        found["pixel_values"], image_sizes=found["image_sizes"], vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    return _embeddings(features), patches_of(found["pixel_values"], 8)


def _clip(n_layer: int) -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 56,
        "num_hidden_layers": n_layer, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
    }  # fmt: skip


def _llava() -> Any:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT}, vision_config=_clip(3), image_token_index=IMAGE_TOKEN
    )
    return _random(transformers.LlavaForConditionalGeneration(config))


def _llava_processor() -> Any:
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    return LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def _llava_features(model: Any, found: Any) -> tuple[np.ndarray, np.ndarray]:
    features = model.model.get_image_features(
        found["pixel_values"], vision_feature_layer=-2, vision_feature_select_strategy="default"
    )
    return _embeddings(features), patches_of(found["pixel_values"], 8)


_POINTS = [[32, 64], [64, 32], [64, 64], [32, 96], [96, 32]]


def _llava_next() -> Any:
    config = transformers.LlavaNextConfig(
        text_config={"model_type": "mistral", **TEXT}, vision_config=_clip(3), image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=_POINTS,
    )  # fmt: skip
    return _random(transformers.LlavaNextForConditionalGeneration(config))


def _llava_next_processor() -> Any:
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    return LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=_POINTS
    )


def _llava_next_features(model: Any, found: Any) -> tuple[np.ndarray, np.ndarray]:
    features = model.model.get_image_features(
        found["pixel_values"], found["image_sizes"], vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    return _embeddings(features), patches_of(found["pixel_values"][0], 8)


def internvl(**vision: Any) -> Any:
    """Return a random InternVL. vision: other entries of vision_config."""
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={
            "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": [32, 32], "patch_size": [8, 8], **vision,
        },
        image_token_id=IMAGE_TOKEN,
    )  # fmt: skip
    return _random(transformers.InternVLForConditionalGeneration(config))


def _internvl_6b() -> Any:
    return internvl(norm_type="rms_norm", use_qk_norm=True)


def _internvl_processor() -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    return GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=6)


def _internvl_features(model: Any, found: Any) -> tuple[np.ndarray, np.ndarray]:
    found.pop("num_patches", None)
    features = model.model.get_image_features(
        found["pixel_values"], vision_feature_layer=-1, vision_feature_select_strategy="default"
    )
    return _embeddings(features), patches_of(found["pixel_values"], 8)


def gemma4(**vision: Any) -> Any:
    """Return a random Gemma 4. vision: other entries of vision_config."""
    config = transformers.Gemma4Config(
        text_config={
            **TEXT, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 40, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300, "num_kv_shared_layers": 0, "pad_token_id": 0,
            "use_bidirectional_attention": "vision", "tie_word_embeddings": True,
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 850,
            "standardize": True, "use_clipped_linears": True, **vision,
        },
        audio_config=None, image_token_id=IMAGE_TOKEN,
    )  # fmt: skip
    model = _random(transformers.Gemma4ForConditionalGeneration(config))
    generator = torch.Generator().manual_seed(8)
    for name, values in model.named_buffers():
        stem, _, kind = name.rpartition(".")
        noise = torch.rand(values.shape, generator=generator)
        if kind in ("std_bias", "std_scale", "layer_scalar"):
            values.copy_(0.5 + noise)
        elif kind in ("input_min", "output_min"):  # they change a tenth of the values
            values.copy_(-1.5 - noise)
        elif kind in ("input_max", "output_max"):
            values.copy_(1.5 + noise)
        else:
            assert not stem.endswith("_proj"), name
    return model


def _gemma4_plain() -> Any:
    return gemma4(standardize=False, use_clipped_linears=False)


def _gemma4_processor() -> Any:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)


def _gemma4_features(model: Any, found: Any) -> tuple[np.ndarray, np.ndarray]:
    features = model.model.get_image_features(found["pixel_values"], found["image_position_ids"])
    n = 9 * int(found["num_soft_tokens_per_image"][0])
    rows = found["pixel_values"][0, :n].reshape(n, 4, 4, 3).permute(0, 3, 1, 2).reshape(n, -1)
    return _embeddings(features), (2 * (rows - 0.5)).numpy()


RECIPES = {
    "gemma4": Recipe(gemma4, _gemma4_processor, _gemma4_features, 4),
    "gemma4-plain": Recipe(_gemma4_plain, _gemma4_processor, _gemma4_features, 4),
    "llava": Recipe(_llava, _llava_processor, _llava_features, 8),
    "llava-next": Recipe(_llava_next, _llava_next_processor, _llava_next_features, 8),
    "internvl": Recipe(internvl, _internvl_processor, _internvl_features, 8),
    "internvl-6b": Recipe(_internvl_6b, _internvl_processor, _internvl_features, 8),
    "idefics3": Recipe(_idefics3, _idefics3_processor, _idefics3_features, 8, nested=True),
    "gemma3": Recipe(_gemma3, _gemma3_processor, _gemma3_features, 7),
    "pixtral": Recipe(_pixtral, _pixtral_processor, _pixtral_features, 4, has_tokenizer=True),
    "pixtral-12b": Recipe(_pixtral_12b, _pixtral_processor, _pixtral_12b_features, 8, has_tokenizer=True),
    "qwen2vl": Recipe(_qwen2vl, _qwen_processor, _qwen_features, 4),
    "qwen2.5vl": Recipe(_qwen25vl, _qwen_processor, _qwen_features, 4),
    "qwen3vl": Recipe(qwen3vl, _qwen_processor, _qwen_features, 4),
}


def save_checkpoint(recipe: Recipe, folder: Path) -> None:
    """Write the model and its processor as a checkpoint."""
    recipe.model().save_pretrained(folder)
    recipe.processor().save_pretrained(folder)
    if recipe.has_tokenizer:
        tokens = [{"id": 7, "content": "[IMG_BREAK]"}, {"id": 8, "content": "[IMG_END]"}]
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))


def shared_encoder(name: str, run_folder: Path, type: str = "f32") -> Path:
    """Return the encoder's file of a recipe, converted once per run. type: of its matrices."""

    def convert(path: Path) -> None:
        folder = path.with_suffix(".checkpoint")
        save_checkpoint(RECIPES[name], folder)
        convert_projector(folder, path, type)

    return made_once(run_folder / f"mmproj-{name}-{type}.gguf", convert)


def shared_text_model(name: str, run_folder: Path) -> Path:
    """Return the text model's file of a recipe, converted once per run."""

    def convert(path: Path) -> None:
        folder = path.with_suffix(".checkpoint")
        RECIPES[name].model().save_pretrained(folder)
        convert_hf(folder, path, "f32")

    return made_once(run_folder / f"text-{name}.gguf", convert)


def shared_features(name: str, run_folder: Path) -> dict[str, np.ndarray]:
    """Return transformers' embeddings and pixels of the images: "features 0", "pixels 0", ... of SIZES."""
    recipe = RECIPES[name]

    def compute(path: Path) -> None:
        model, found = recipe.model(), {}
        with torch.no_grad():
            for i, size in enumerate(SIZES):
                features, pixels = recipe.features(model, recipe.processed(image_of(size)))
                found |= {f"features {i}": features, f"pixels {i}": pixels}
        with path.open("wb") as file:
            np.savez(file, **found)

    with np.load(made_once(run_folder / f"vision-{name}.npz", compute)) as found:
        return dict(found)
