"""The tensors of an image encoder's file under the names that the decoder uses."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hotset.errors import FormatError

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, TensorInfo

# Stems in the file → stems in the graph. Other names lose their prefix `v.`, or stay.
_NAMES = {
    "ln1": "attn_norm", "ln2": "ffn_norm", "attn_out": "attn_output", "post_ln": "output_norm",
    "pre_ln": "token_embd_norm", "attn_post_norm": "post_attention_norm", "ffn_post_norm": "post_ffw_norm",
}  # fmt: skip
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
OF_CLASS = "class_embd"  # the row in place of a patch embedding, of one more row
SECOND_PATCHES = "patch_embd_1"  # the second matrix of a patch embedding, v.patch_embd.weight.1


class EncoderTensors:
    """A WeightSource over an image encoder's file, which remains the caller's.

    The patch embedding, a convolution, is a matrix with a row per channel. Old converters swapped the names
    of ffn_up and ffn_down; their shapes show it. Tables of positions of several axes are one table. Tensors
    of an encoder of sound in the same file are left out.
    """

    def __init__(self, gguf: GGUFFile) -> None:
        self._file = gguf
        down, norm = (gguf.tensors.get(f"v.blk.0.{name}.weight") for name in ("ffn_down", "ln1"))
        swapped = down is not None and norm is not None and down.shape[0] == norm.shape[0] != down.shape[-1]
        self._names: dict[str, str] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for old, info in gguf.tensors.items():
            if old.startswith(("a.", "mm.a.")):
                continue
            name = name_in_graph(old, swapped=swapped)
            if name in self._tensors:
                raise FormatError(f"{gguf.path} holds the tensor {old} twice; convert the model again.")
            if name.startswith("patch_embd") and len(info.shape) == 4:
                width, height, n_channels, n = info.shape
                info = replace(info, shape=(width * height * n_channels, n))
            elif name == OF_CLASS and info.n_elements == info.shape[0]:
                info = replace(info, shape=(info.shape[0], 1))
            elif name.startswith("position_embd"):
                info = replace(info, shape=(info.shape[0], math.prod(info.shape[1:])))
            self._names[name], self._tensors[name] = old, replace(info, name=name)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return name in the graph → type and shape."""
        return self._tensors

    def data(self, name: str) -> np.ndarray:
        """Return the tensor's bytes, uint8 [nbytes], in the map of the file."""
        return self._file.data(self._names.get(name, name))

    def check(self) -> None:
        """Raise FormatError if the file was cut short while it was open."""
        self._file.check()


def name_in_graph(name: str, *, swapped: bool = False) -> str:
    """Return the name in the graph of a tensor of the file."""
    if name == "v.patch_embd.weight.1":
        return f"{SECOND_PATCHES}.weight"
    parts = re.fullmatch(r"v\.(blk\.\d+\.)?(\w+)(\.\w+)?", name)
    if parts is None:
        return name
    blk, stem, kind = parts.groups(default="")
    if swapped:
        stem = _SWAPPED.get(stem, stem)
    return f"{blk}{_NAMES.get(stem, stem)}{kind}"
