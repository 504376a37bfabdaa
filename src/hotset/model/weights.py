"""The tensors of a file, requested one by one while a model is described."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from hotset.errors import UnsupportedModelError
from hotset.formats.channels import can_be_input_major, copy_name, copy_shape
from hotset.formats.planes import PLANE_GROUP
from hotset.formats.quants import DECODABLE, REFUSED_TYPES, GGMLType
from hotset.model.config import ModelConfig

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo

# Tensors that a file may have although nothing here reads them: facts stored as tensors by some converters
# (they are also keys), unused predictors (also of logits), indexers (hotset's contexts need no choice of
# keys), and other layouts of a down projection. engine/pooling.py reads the tensors after an embedding
# model's last norm.
REDUNDANT_TENSORS = re.compile(
    r"(dense_2|dense_3|cls|cls\.output)\.(weight|bias)|cls\.norm\.weight|"
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|lm_head_profiler\.weight|blk\.\d+\.("
    r"rope_freqs\.weight|layer_output_scale\.weight|indexer\..*|indexer_compressor_.*|exp_probs_b_vl\.bias|(attn_rot_embd|attn\.rotary_emb)\..*|(fc1|fc2|fc1_exps|fc2_exps|svd_a|svd_b)\.weight|always\.bias|"
    r"(ffn_down|channel_mix_value)\.weight|(ffn_down|channel_mix_value)_t\.(codes|scales))"
)

# Types of tensors that hotset builds: codes and scales of planes.
_BYTES, _SCALES = frozenset({GGMLType.I8}), frozenset({GGMLType.F16})
_WHOLE = frozenset({GGMLType.I32})


class Weights:
    """A reader that checks the shape of each requested tensor and records which were requested.

    missing: collects the names of missing tensors, which then raise no error.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, TensorInfo], missing: set[str] | None = None
    ) -> None:
        self.config, self.tensors, self.missing = config, tensors, missing
        self.used: set[str] = set()

    def matrix(self, name: str, n_in: int, n_out: int, types: Collection[GGMLType] = DECODABLE) -> str:
        return self._ask(f"{name}.weight", (n_in, n_out), types)

    def vector(self, name: str, n: int) -> str:
        """Return a vector's tensor name; some files omit the suffix."""
        return self._ask(name if name in self.tensors else f"{name}.weight", (n,))

    def numbers(self, name: str, n: int) -> str:
        """Return the name of a tensor of n numbers, of any dimensions."""
        return self._numbers(f"{name}.weight", n)

    def bare(self, name: str, n: int) -> str:
        """Return the name of a tensor of n numbers whose name has no suffix."""
        return self._numbers(name, n)

    def _numbers(self, name: str, n: int) -> str:
        info = self.tensors.get(name)
        fits = info is not None and math.prod(info.shape) == n
        return self._ask(name, tuple(info.shape) if info is not None and fits else (n,))

    def plain(self, name: str, n_in: int, n_out: int) -> str:
        """Return the name of a matrix whose name has no suffix."""
        return self._ask(name, (n_in, n_out))

    def row(self, name: str, n: int) -> str:
        """Return the name of a matrix with one row, which some files store as a vector."""
        info = self.tensors.get(f"{name}.weight")
        shape = (n, 1) if info is not None and len(info.shape) == 2 else (n,)
        return self._ask(f"{name}.weight", shape, DECODABLE)

    def table(self, name: str, n: int) -> str:
        """Return the name of a table with any number of rows of n numbers; one row may be a vector."""
        shape = self.shape(name) or (n, 1)
        return self._ask(f"{name}.weight", shape if shape == (n,) else (n, *shape[-1:]))

    def experts_of_tokens(self, name: str, n_used: int) -> str:
        """Return the name of a table of expert ids, n_used for each token id."""
        return self._ask(f"{name}.weight", (n_used, self.config.n_vocab), _WHOLE)

    def heads(self, name: str, n_in: int, n_out: int, n_head: int) -> str:
        """Return the name of a tensor with a matrix per head."""
        return self._ask(f"{name}.weight", (n_in, n_out, n_head), DECODABLE)

    def rows(self, name: str, n: int, least: int) -> str:
        """Return the name of a table with at least `least` rows of n numbers; files may pad it."""
        shape = self.shape(name) or ()
        enough = len(shape) == 2 and shape[1] >= least
        return self._ask(f"{name}.weight", (n, shape[1] if enough else least), DECODABLE)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a matrix that files store in more than one form; None if it is missing."""
        info = self.tensors.get(f"{name}.weight")
        return None if info is None else tuple(info.shape)

    def experts(
        self, name: str, n_in: int, n_out: int, n: int, *, n_bias: int | None = None
    ) -> tuple[tuple[str, ...], str | None]:
        """Return the matrices of n experts, as one tensor or (old files) one each, and their bias.

        n_bias: numbers of an expert's bias; None: one per row.
        """
        if f"{name}.0.weight" in self.tensors and f"{name}_exps.weight" not in self.tensors:
            return tuple(self.matrix(f"{name}.{e}", n_in, n_out) for e in range(n)), None
        weight = self._ask(f"{name}_exps.weight", (n_in, n_out, n), DECODABLE)
        has_bias = f"{name}_exps.bias" in self.tensors
        bias = (n_out if n_bias is None else n_bias, n)
        return (weight,), self._ask(f"{name}_exps.bias", bias) if has_bias else None

    def bias(self, name: str, n: int, *, required: bool = False) -> str | None:
        """Return the name of a tensor's bias; None if it has none and needs none."""
        required = required or name.rpartition(".")[2] in self.config.biased
        return self._ask(f"{name}.bias", (n,)) if required or f"{name}.bias" in self.tensors else None

    def scales(self, name: str, n: int) -> str | None:
        """Return the name of the experts' scales; None without scales."""
        return self._ask(f"{name}.scale", (n,)) if f"{name}.scale" in self.tensors else None

    def n_rows(self, name: str, axis: int = -1) -> int:
        """Return the number of rows of a matrix whose size no key states: the rank of a predictor."""
        info = self.tensors.get(f"{name}.weight")
        if info is None:
            raise UnsupportedModelError(f"the file lacks the tensor {name}.weight of its predictor")
        return int(info.shape[axis]) if len(info.shape) >= -axis else 0

    def planes(self, name: str, n_out: int, n_neurons: int) -> tuple[str, str]:
        """Return codes and scales of a neuron-major matrix; the width of the codes tells their type."""
        if n_out % PLANE_GROUP:  # kernels process a group of outputs at a time
            raise UnsupportedModelError(
                f"the tensor {name}.codes has {n_out} outputs, but planes need a multiple of {PLANE_GROUP}"
            )
        wide = n_out if tuple(self.tensors[f"{name}.codes"].shape) == (n_out, n_neurons) else n_out // 2
        codes = self._ask(f"{name}.codes", (wide, n_neurons), _BYTES)
        return codes, self._ask(f"{name}.scales", (n_out, -(-n_neurons // PLANE_GROUP)), _SCALES)

    def input_major(self, name: str, n_in: int) -> str | None:
        """Return the input-major copy of a matrix; None without a copy."""
        copy, info = copy_name(name), self.tensors.get(f"{name}.weight")
        if copy not in self.tensors or info is None or not can_be_input_major(info) or n_in % PLANE_GROUP:
            return None
        return self._ask(copy, copy_shape(info), _BYTES)

    def _ask(self, name: str, shape: tuple[int, ...], types: Collection[GGMLType] = DECODABLE) -> str:
        info = self.tensors.get(name)
        if self.missing is not None and (info is None or tuple(info.shape) != shape):
            self.missing.add(name)
            return name
        if info is None:
            raise UnsupportedModelError(f"the file lacks the tensor {name} {list(shape)}")
        if tuple(info.shape) != shape:
            raise UnsupportedModelError(
                f"the tensor {name} has the shape {list(info.shape)}, but the file's keys say {list(shape)}"
            )
        if info.type not in types:
            why = REFUSED_TYPES.get(info.type, "which hotset does not support; use a file of another type")
            raise UnsupportedModelError(f"the tensor {name} has the type {info.type.name}, {why}")
        self.used.add(name)
        return name

    def leave(self, *names: str) -> None:
        """Mark tensors that a file may have and nothing reads."""
        self.used.update(f"{name}.weight" for name in names)

    def unused(self) -> list[str]:
        n_layer = self.config.n_layer
        extra = tuple(f"blk.{n_layer + i}." for i in range(self.config.n_extra_layers))
        return [n for n in self.tensors if self.is_unread(n) and not n.startswith(extra)]

    def is_unread(self, name: str) -> bool:
        """Return whether a tensor should have been read but was not."""
        return name not in self.used and not REDUNDANT_TENSORS.fullmatch(name)

    def refuse_unused(self) -> None:
        """Raise UnsupportedModelError if nothing reads a tensor: the file holds a different model."""
        if unused := self.unused():
            raise UnsupportedModelError(
                f"the file has {len(unused)} tensors that no {self.config.architecture} model uses, "
                f"such as {unused[0]}"
            )
