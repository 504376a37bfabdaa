"""The configuration of an image encoder, read and checked from the keys of its file (llama.cpp's mmproj).

The file's architecture is `clip`, and `clip.projector_type` names the family. Facts that no key states are a
row of FAMILIES. The transformer is an encoder like BERT, so its configuration is a ModelConfig.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from hotset.errors import UnsupportedModelError
from hotset.model.activation import GELU, GELU_TANH, SILU, FFNActivation
from hotset.model.architectures import HeadNorm
from hotset.model.config import LayerConfig, ModelConfig
from hotset.model.keys import MAX_HEAD_DIM, Keys, NormKind, is_array
from hotset.model.operations import Rope, RopeKind
from hotset.model.rope import frequencies
from hotset.model.vision.tensors import OF_CLASS
from hotset.parameters import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotset.formats.gguf import GGUFFile, TensorInfo

ARCHITECTURE = "clip"
QUICK_GELU = FFNActivation("clamped_silu", threshold=float(np.finfo(np.float32).max))  # x * sigmoid(1.702 x)
NEWLINE = "model.image_newline"  # the tensor at the end of a row of image tokens
_MOST_SIDE = 4096  # pixels of a side that a file may name
# Limits of one image: a larger one would fill the memory.
_MOST_PIXELS, _MOST_TILES = 1 << 25, 1024
Sizes = Literal["tiles", "square", "free", "edge", "points", "grid", "budget"]


@dataclass(frozen=True)
class Family:
    """Facts of a family of encoders that no key states.

    norm: the kind of all norms of the layers, if the tensors do not show it. sizes: how an image becomes
    patches. "tiles": a grid of squares and the whole image as one more; "square": one square; "free",
    "edge": a rectangle with about the image's aspect ratio, with limits of its pixels, or of its longer
    side; "points", "grid": tiles again, in one of the grids that the file allows, with black borders, or
    stretched; "budget": the largest rectangle of a number of image tokens. merge: patches per side of an
    image token, if the file has no such key. rope: patches have rotary positions by row and column, of
    these pairs of channels; None: they have learned positions. resized: they have learned positions too,
    a square that is scaled to the image's rows and columns. by_axis: they have a learned position of
    their column, and one of their row. rope_base: of the rotation. gelu: the activation that the key
    use_gelu means. twice: the patch embedding has two matrices, for two frames of a video; an image is
    both. causal: whether the text model's tokens of an image see only those before them; causal_widths:
    they do in models of these widths too. marker: the text of an image in published chat templates.
    plain_marker: its text where a template knows no images.
    """

    norm: NormKind
    sizes: Sizes
    merge: int
    marker: str
    plain_marker: str
    rope: RopeKind | None = None
    gelu: FFNActivation = GELU_TANH
    resized: bool = False
    by_axis: bool = False
    rope_base: float = 10000.0
    twice: bool = False
    causal: bool = True
    causal_widths: tuple[int, ...] = ()


_QWEN_MARKERS = "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"
FAMILIES = {  # by projector type
    "idefics3": Family("layer", "tiles", 2, "<image>", "<image>"),
    "gemma3": Family("layer", "square", 4, "<start_of_image>", "<start_of_image>", causal=False),
    "gemma4v": Family(
        "rms",
        "budget",
        3,
        "<|image|>",
        "<|image|>",
        rope="neox",
        by_axis=True,
        rope_base=100.0,
        causal=False,
        causal_widths=(1536, 2560),  # E2B and E4B
    ),
    "pixtral": Family("rms", "edge", 1, "[IMG]", "[IMG]", rope="norm"),
    "mlp": Family("layer", "points", 1, "<image>", "<image>\n"),
    "internvl": Family("layer", "grid", 2, "<IMG_CONTEXT>", "<IMG_CONTEXT>\n", gelu=GELU),
    "qwen2vl_merger": Family("layer", "free", 2, *_QWEN_MARKERS, rope="neox", twice=True),
    "qwen2.5vl_merger": Family("rms", "free", 2, *_QWEN_MARKERS, rope="neox", twice=True),
    "qwen3vl_merger": Family("layer", "free", 2, *_QWEN_MARKERS, rope="neox", resized=True, twice=True),
}


@dataclass(frozen=True)
class VisionConfig:
    """Everything about an image encoder that its graph and its images need, except the weights.

    projector: the family's name. tower: the transformer; its vocabulary are the learned positions. patch:
    pixels per side of a patch. merge: patches per side of an image token. side: pixels per side of a square
    image or tile, or of the longer side of another. longest: pixels of the longer side of an image in tiles.
    least, most: pixels of an image of a free size. window: patches per side of a window of attention; 0:
    none. mean, std: of the channels of a pixel between 0 and 1. n_out: width of the text model's embedding.
    deep: layers whose results are added to the results of the text model's first layers (DeepStack). grids:
    rows and columns of the tiles that an image may have; empty: no tiles, or any. has_class: one more row,
    the class, follows the patches. has_newline: each row of image tokens in a grid ends with a tensor.
    """

    projector: str
    tower: ModelConfig
    patch: int
    merge: int
    side: int
    n_out: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    longest: int = 0
    least: int = 0
    most: int = 0
    window: int = 0
    deep: tuple[int, ...] = ()
    grids: tuple[tuple[int, int], ...] = ()
    has_class: bool = False
    has_newline: bool = False

    @property
    def family(self) -> Family:
        """Return the facts that no key states."""
        return FAMILIES[self.projector]

    @property
    def n_pixels(self) -> int:
        """Return the numbers of a patch: three channels of each pixel."""
        return 3 * self.patch**2

    @property
    def n_input(self) -> int:
        """Return the numbers of a patch in the step's input.

        They are its pixels, learned positions with their shares, and whether it is a patch, or a row of the
        class.
        """
        return self.n_pixels + 2 * self.n_mixed + (2 if self.has_class else 0)

    @property
    def n_mixed(self) -> int:
        """Return how many learned positions are mixed for a patch; 0: it has one of its own, or none."""
        return 4 if self.family.resized else 2 if self.family.by_axis else 0

    @property
    def causal(self) -> bool:
        """Return whether the text model's tokens of an image see only those before them."""
        return self.family.causal or self.n_out in self.family.causal_widths

    @property
    def token_side(self) -> int:
        """Return the pixels per side of an image token."""
        return self.patch * self.merge


def deep_layer(i: int) -> str:
    """Return the names of the tensors that project the result of layer i, without their ends."""
    return f"v.deepstack.{i}"


def is_encoder_file(gguf: GGUFFile) -> bool:
    """Return whether a file holds an image encoder instead of a model of text."""
    return gguf.metadata.get("general.architecture") == ARCHITECTURE


def config_of_encoder(gguf: GGUFFile, tensors: Mapping[str, TensorInfo]) -> VisionConfig:
    """Read and check the configuration of an image encoder. tensors: under their names in the graph.

    Raises UnsupportedModelError for a valid file that cannot be run, and FormatError for an invalid key.
    """
    if not is_encoder_file(gguf):
        raise UnsupportedModelError(
            f"{gguf.path} holds a {gguf.architecture} model, not an image encoder; name the mmproj file"
        )
    keys = Keys(gguf.metadata, ARCHITECTURE)
    projector = keys.text("projector_type") or keys.text("vision.projector_type")
    if projector not in FAMILIES or not keys.flag("has_vision_encoder", True):
        raise UnsupportedModelError(
            f"{gguf.path} holds an encoder of the type {shown(projector)}, which is not supported; hotset "
            f"supports {', '.join(FAMILIES)}"
        )
    family = FAMILIES[projector]
    patch = keys.integer("vision.patch_size", 1, 256)
    scale_key = "vision.projector.scale_factor"
    by_scale = family.sizes in ("tiles", "square", "grid", "budget")
    merge_key = scale_key if by_scale else "vision.spatial_merge_size"
    merge = keys.integer(merge_key, 1, 16, family.merge)
    side = keys.integer("vision.image_size", patch * merge, _MOST_SIDE)
    if family.sizes not in ("free", "budget") and side % (patch * merge):
        raise keys.error("vision.image_size", f"is {side}, no multiple of {patch * merge} pixels of a token")
    n_positions = 1 if family.rope and not family.resized else (side // patch) ** 2
    mean, std = _channels(keys, "vision.image_mean", -10.0), _channels(keys, "vision.image_std", 1e-3)
    if family.by_axis:
        table = tensors.get("position_embd.weight")
        n_positions = table.shape[1] if table is not None and len(table.shape) == 2 else 0
        # The graph of the family in llama.cpp and transformers begins with 2 * x - 1.
        mean, std = tuple(m + s / 2 for m, s in zip(mean, std, strict=True)), tuple(s / 2 for s in std)
    longest = least = most = window = 0
    grids: tuple[tuple[int, int], ...] = ()
    if family.sizes == "tiles":
        longest = keys.integer("vision.preproc_image_size", side, _MOST_SIDE, side)
        if (n := math.ceil(longest / side) ** 2) > _MOST_TILES:
            raise keys.error("vision.image_size", f"divides an image into {n} tiles, more than {_MOST_TILES}")
    elif family.sizes in ("points", "grid"):
        grids = _points(keys, side) if family.sizes == "points" else _grids(keys, side)
    elif family.sizes == "edge":
        most = side**2
    elif family.sizes == "budget":
        area = (patch * merge) ** 2
        most = keys.integer("vision.image_max_pixels", area, _MOST_PIXELS, min(280 * area, _MOST_PIXELS))
        if 2 * (n := most // area * merge) > n_positions:
            raise keys.error("vision.image_max_pixels", f"gives an image {n} patches in a row, too many")
    elif family.sizes == "free":
        area = (patch * merge) ** 2
        most = keys.integer("vision.image_max_pixels", area, _MOST_PIXELS, min(4096 * area, _MOST_PIXELS))
        least = keys.integer("vision.image_min_pixels", 1, most, min(8 * area, most))
    if projector == "qwen2.5vl_merger":
        window = keys.integer("vision.window_size", patch * merge, 1 << 14, 112) // (patch * merge) * merge
    return VisionConfig(
        projector, _tower(keys, family, tensors, n_positions, window), patch, merge, side,
        _n_out(keys, family, tensors), mean, std,
        longest, least, most, window,
        tuple(i for i in range(1 << 10) if f"{deep_layer(i)}.fc1.weight" in tensors),
        grids, _has_class(family, tensors), NEWLINE in tensors,
    )  # fmt: skip


def _has_class(family: Family, tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether a row of the class follows the patches; only learned positions have a place for it."""
    return OF_CLASS in tensors and family.rope is None


def _n_out(keys: Keys, family: Family, tensors: Mapping[str, TensorInfo]) -> int:
    """Return the width of the text model's embedding. Files of LLaVA have another number in its key."""
    last = tensors.get("mm.2.weight")
    if family.sizes == "points" and last is not None and len(last.shape) == 2:
        return int(last.shape[1])
    return keys.integer("vision.projection_dim", 1, 1 << 20)


def _points(keys: Keys, side: int) -> tuple[tuple[int, int], ...]:
    """Return the grids of LLaVA 1.6, in the file's order; empty: LLaVA 1.5."""
    key = "vision.image_grid_pinpoints"
    if (given := keys.get(key)) is None:
        return ()
    is_even = is_array(given) and 0 < len(given) <= 2 * _MOST_TILES and len(given) % 2 == 0
    points = keys.integers(key, len(given), 1, _MOST_SIDE) if is_even else (1,)
    if any(point % side for point in points):
        raise keys.error(key, f"must hold heights and widths, multiples of {side} up to {_MOST_SIDE} pixels")
    grids = tuple((h // side, w // side) for h, w in zip(points[::2], points[1::2], strict=True))
    if max(rows * columns for rows, columns in grids) > _MOST_TILES:
        raise keys.error(key, f"divides an image into more than {_MOST_TILES} tiles")
    return grids


def _grids(keys: Keys, side: int) -> tuple[tuple[int, int], ...]:
    """Return the grids of InternVL, the smaller ones first and among equals the higher ones."""
    least = keys.integer("vision.preproc_min_tiles", 1, _MOST_TILES, 1)
    most = keys.integer("vision.preproc_max_tiles", least, _MOST_TILES, 12)
    if most * side**2 > _MOST_PIXELS:
        raise keys.error("vision.preproc_max_tiles", f"gives an image more than {_MOST_PIXELS} pixels")
    found = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    return tuple(sorted((grid for grid in found if math.prod(grid) >= least), key=math.prod))


def _tower(
    keys: Keys, family: Family, tensors: Mapping[str, TensorInfo], n_positions: int, window: int
) -> ModelConfig:
    """Return the transformer. n_positions: learned ones of patches; window: as in VisionConfig."""
    n_layer = keys.integer("vision.block_count", 1, 1 << 10)
    features = keys.get("vision.feature_layer")
    if features is not None and not (is_array(features) and list(features) == [n_layer]):
        raise keys.error(
            "vision.feature_layer", f"must hold the last layer, {n_layer}; others are not supported"
        )
    n_embd = keys.integer("vision.embedding_length", 1, 1 << 16)
    n_head = keys.integer("vision.attention.head_count", 1, 1 << 12)
    dim = n_embd // n_head
    if n_embd % n_head or dim > MAX_HEAD_DIM:
        raise keys.error("vision.attention.head_count", f"is {n_head}, for a width of {n_embd}")
    rope = more_rope = None
    if family.rope is not None:
        if dim % 4:
            raise keys.error("vision.attention.head_count", f"gives heads of {dim} channels, not of fours")
        rope = _axial(family.rope, dim, family.rope_base)
        if family.by_axis:  # the first half of a head by column, the second one by row
            half = rope.freq[: dim // 4]
            rope, more_rope = (Rope("neox", dim // 2, half, axes=(axis,) * (dim // 4)) for axis in (1, 0))
    up = tensors.get("blk.0.ffn_up.weight")
    if up is None or len(up.shape) != 2:
        raise UnsupportedModelError("the file lacks the matrix v.blk.0.ffn_up.weight of an image encoder")
    # Not the key of its width, which is wrong in files of Qwen2-VL.
    layer = LayerConfig(
        up.shape[1], _activation(keys, family.gelu), rope, dim**-0.5, gated="blk.0.ffn_gate.weight" in tensors
    )
    if family.by_axis:  # llama.cpp's converter writes no key of the activation
        layer = replace(
            layer, activation=family.gelu, attention_scale=1.0, qk_norm="head", value_norm=True,
            post_norm=True, more_rope=more_rope,
        )  # fmt: skip
    norm = family.norm
    if family.sizes == "grid":  # InternVL, whose encoder of 6B parameters has other norms
        norm = "layer" if "blk.0.attn_norm.bias" in tensors else "rms"
        qk_norm: HeadNorm | None = "width" if "blk.0.attn_q_norm.weight" in tensors else None
        layer = replace(layer, qk_norm=qk_norm)
    windowed = replace(layer, groups="only")
    every = keys.integer("vision.n_wa_pattern", 1, n_layer) if window else 1
    return ModelConfig(
        architecture=ARCHITECTURE,
        layers=tuple(layer if (i + 1) % every == 0 else windowed for i in range(n_layer)),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head,
        head_dim=dim,
        head_dim_v=dim,
        n_vocab=n_positions + _has_class(family, tensors),
        n_ctx_train=1 << 20,
        norm_eps=keys.real("vision.attention.layer_norm_epsilon", 0.0, 1.0),
        norm=norm,
        embedding_norm="token_embd_norm.weight" in tensors,
        causal=False,
    )


def _axial(kind: RopeKind, dim: int, base: float) -> Rope:
    """Return the rotation of a head of `dim` channels by row, and by column.

    Pixtral ("norm") divides the frequencies of a whole head between the axes. Others ("neox") repeat the
    frequencies of half a head.
    """
    of_head, of_half = (frequencies(base, n).tolist() for n in (dim, dim // 2))
    freq = (*of_head[::2], *of_head[1::2]) if kind == "norm" else (*of_half, *of_half)
    return Rope(kind, dim, freq, axes=(0,) * (dim // 4) + (1,) * (dim // 4))


def _activation(keys: Keys, gelu: FFNActivation) -> FFNActivation:
    if keys.flag("use_gelu", False):
        return gelu
    return SILU if keys.flag("use_silu", False) else QUICK_GELU


def _channels(keys: Keys, key: str, low: float) -> tuple[float, ...]:
    """Return a number for each of three channels."""
    value = keys.get(key)
    if not is_array(value) or len(value) != 3:
        raise keys.error(key, "must hold a number for each of three channels")
    numbers = tuple(Keys({f"{ARCHITECTURE}.{key}": n}, ARCHITECTURE).real(key, low, 10.0) for n in value)
    return tuple(float(np.float32(n)) for n in numbers)
