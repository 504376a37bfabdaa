"""Adapter files of `hotset sparse make`, and merging them into the model file that they belong to.

An adapter file (safetensors) holds the parameters of `student.Student`, by tensor names. Matrices are int8
with a float32 scale per rank ("name.a" with "name.a.scale"; in full training per row) and one per channel
across ("name.a.channel": a few channels of a residual stream are a hundred times as large as the others,
which would otherwise be lost). Other values are float16. A rank in int8 carries more information per byte
than half the ranks in float16. The metadata name the activation, the rank and the model.

Merging writes the GGUF file again: weight + b @ a, rows of ffn_up times the neurons' scales, biases, linear
paths in the places of retired neurons (with a gate of 1 for every input), and the activation in its key. The
down projections are neuron-major (ffn_down_t), so that idle neurons are neither read nor share scales with
others, and in eight bits: some channels of the output are a hundred times as large as the others in a block.
Everything else, including the tokenizer and the embedding, is copied byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.cpu.processor import linear_f32
from hotset.errors import FormatError, InvalidRequestError
from hotset.files import check_target, missing, write_whole
from hotset.formats.encode import FITTED, Importance, recode
from hotset.formats.gguf import DEFAULT_ALIGNMENT, GGUFWriter, copy_metadata
from hotset.formats.quants import GGMLType, dequantize, fitting
from hotset.formats.recommended import recommend
from hotset.formats.requantize import FLOATS
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.formats.imatrix import ImportanceMatrix
    from hotset.model.config import ModelConfig
    from hotset.reporter import Reporter

FORMAT = "hotset adapters 1"
MERGED_TYPES = {"same": None, "q8_0": GGMLType.Q8_0, "f16": GGMLType.F16, "f32": GGMLType.F32}
_FILE_TYPES = {GGMLType.F32: 0, GGMLType.F16: 1, GGMLType.Q8_0: 7}  # → general.file_type
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")  # that are trained
NORMS = ("attn_norm", "ffn_norm")
ACTIVATIONS = ("relu", "drelu")
_MATRIX = re.compile(rf"blk\.\d+\.({'|'.join(MATRICES)})\.weight")


class TrainedAdapters:
    """Trained values by name, float32 arrays, and their origin (see Student for the names).

    activation: relu or drelu. rank: 0 for whole differences. model: digest of the file that they belong to.
    """

    def __init__(self, values: Mapping[str, np.ndarray], activation: str, rank: int, model: str) -> None:
        self.values = dict(values)
        self.activation = activation
        self.rank = rank
        self.model = model

    def save(self, path: Path) -> None:
        """Write the file; it appears under its name only when it is complete."""
        from safetensors.numpy import save

        tensors: dict[str, np.ndarray] = {}
        for name, value in self.values.items():
            if value.ndim == 1:
                tensors[name] = value.astype(np.float16)
            else:
                axis = 0 if name.endswith(".b") else 1
                channel = np.abs(value).max(axis=1 - axis, keepdims=True).astype(np.float32)
                channel[channel == 0] = 1
                scale = np.abs(value / channel).max(axis=axis, keepdims=True) / 127
                codes = np.divide(value / channel, scale, out=np.zeros_like(value), where=scale > 0)
                tensors[name] = np.rint(codes).astype(np.int8)
                tensors[f"{name}.scale"] = scale.astype(np.float32)
                tensors[f"{name}.channel"] = channel
        metadata = {
            "format": FORMAT,
            "activation": self.activation,
            "rank": str(self.rank),
            "model": self.model,
        }
        # safetensors writes arrays in memory order, ignoring strides.
        tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        write_whole({path: save(tensors, metadata)})

    @classmethod
    def open(cls, path: Path) -> TrainedAdapters:
        """Read a file. Raises InvalidRequestError if it does not exist, FormatError if it has no adapters."""
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            raise InvalidRequestError(missing(path, remedy="train some with 'hotset sparse make'"))
        try:
            with safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, TypeError) as error:  # TypeError: a type that NumPy lacks
            raise FormatError(f"{path} is not a safetensors file ({error})") from None
        if metadata.get("format") != FORMAT:
            raise FormatError(f"{path} does not contain adapters of hotset sparse make")
        values = {}
        for name, tensor in tensors.items():
            if name.endswith((".scale", ".channel")):
                continue
            value = tensor.astype(np.float32)
            if tensor.dtype == np.int8:
                try:
                    value *= tensors[f"{name}.scale"]
                    value *= tensors.get(
                        f"{name}.channel", np.float32(1)
                    )  # files before 2026-11-21 have none
                except (KeyError, ValueError, TypeError):
                    raise FormatError(
                        f"the adapters {path} lack the scales of {name}, or these have another shape"
                    ) from None
            if not np.isfinite(value).all():
                raise FormatError(f"the adapters {path} contain numbers in {name} that are not finite")
            values[name] = value
        activation, model = metadata.get("activation"), metadata.get("model")
        try:
            rank = int(metadata["rank"])
        except (KeyError, ValueError):
            rank = -1
        if activation not in ACTIVATIONS or model is None or rank < 0:
            raise FormatError(
                f"the adapters {path} lack their activation ({' or '.join(ACTIVATIONS)}), rank or model"
            )
        return cls(values, activation, rank, model)

    def check(self, config: ModelConfig) -> None:
        """Raise FormatError if a tensor is missing, has another shape than the model's, or is unknown."""
        shapes: dict[str, tuple[int, ...]] = {"output_norm": (config.n_embd,)}
        for i, n_ff in enumerate(config.n_ff):
            blk, d = f"blk.{i}", config.n_embd
            heads, kv = config.n_head * config.head_dim, config.n_head_kv * config.head_dim
            sizes = [(heads, d), (kv, d), (config.n_head_kv * config.head_dim_v, d)]
            sizes += [(d, config.n_head * config.head_dim_v), (n_ff, d), (n_ff, d), (d, n_ff)]
            for name, (n_out, n_in) in zip(MATRICES, sizes, strict=True):
                if f"{blk}.{name}.delta" in self.values:
                    shapes[f"{blk}.{name}.delta"] = (n_out, n_in)
                    continue
                rank = self._length(f"{blk}.{name}.a")
                shapes |= {f"{blk}.{name}.a": (rank, n_in), f"{blk}.{name}.b": (n_out, rank)}
            shapes |= {f"{blk}.{name}": (d,) for name in (*NORMS, "ffn_down.bias")}
            shapes |= {f"{blk}.{name}": (n_ff,) for name in ("ffn_gate.bias", "ffn_scale")}
            if self.activation == "drelu":
                shapes[f"{blk}.ffn_up.bias"] = (n_ff,)
            if f"{blk}.ffn_linear.a" in self.values or f"{blk}.ffn_linear.b" in self.values:
                k = self._length(f"{blk}.ffn_linear.a")
                shapes |= {f"{blk}.ffn_linear.a": (k, d), f"{blk}.ffn_linear.b": (d, k)}
        for name in sorted(shapes.keys() | self.values.keys()):
            expected, value = shapes.get(name), self.values.get(name)
            if value is None or value.shape != expected:
                found = "lack" if value is None else f"have {list(value.shape)} for"
                wanted = "which no such model has" if expected is None else str(list(expected))
                raise FormatError(
                    f"the adapters {found} {name}, {wanted}: they are damaged, or belong to another model or "
                    "activation"
                )

    def _length(self, name: str) -> int:
        value = self.values.get(name)
        return len(value) if value is not None and value.ndim else 0


def digest(gguf: GGUFFile) -> str:
    """Return a hash of a file's weights: types, shapes and a part of the bytes, without metadata."""
    sha = hashlib.sha256()
    for name in sorted(gguf.tensors):
        info = gguf.tensors[name]
        data = gguf.data(name)
        sha.update(json.dumps([name, int(info.type), [int(n) for n in info.shape]]).encode())
        sha.update(data[:4096].tobytes())
    return sha.hexdigest()


def merge(
    gguf: GGUFFile,
    adapters: TrainedAdapters,
    path: str | os.PathLike[str],
    type: GGMLType | None = None,
    progress: Reporter | None = None,
    sampling: Mapping[str, Any] | None = None,
    importance: ImportanceMatrix | None = None,
) -> None:
    """Write the model of `gguf` merged with the adapters.

    type: of the changed matrices; None: each keeps its type, but quantised down projections become Q8_0.
    sampling: parameters to recommend
    (formats/recommended.py); other recommendations are copied from `gguf`. importance: of the merged model's
    inputs, which weights the errors. A matrix whose rows are not a multiple of the type's block size becomes
    F16. Raises InvalidRequestError if the adapters belong to other weights, or a type cannot be written, and
    leaves no file on any error.
    """
    if adapters.model != digest(gguf):
        raise InvalidRequestError(
            f"the adapters were trained on other weights than {gguf.path.name} has; "
            "merge them with the file that they were trained on"
        )
    check_target(path, gguf.paths)
    config = config_from_gguf(gguf)
    describe(config, gguf.tensors)
    adapters.check(config)
    architecture = gguf.architecture
    values = adapters.values
    alignment = gguf.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    writer = GGUFWriter(path, architecture, alignment)  # type: ignore[arg-type]
    own = [
        "general.architecture", "general.alignment", "hotset.up_activation", "hotset.fatrelu_threshold",
        f"{architecture}.hidden_activation",
    ]  # fmt: skip
    recommend(writer, sampling or {})
    if type is not None:
        own.append("general.file_type")
        writer.add("general.file_type", _FILE_TYPES[type])
    copy_metadata(gguf, writer, tuple(own))
    writer.add(f"{architecture}.hidden_activation", adapters.activation)

    for name, info in gguf.tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind == "bias" and name in values:
            continue  # written with its matrix
        if _MATRIX.fullmatch(name):
            by_neuron = stem.endswith(".ffn_down")
            shape = info.shape[::-1] if by_neuron else info.shape
            wanted = info.type if type is None else type
            if by_neuron and wanted not in FLOATS:
                wanted = GGMLType.Q8_0
            stored = fitting(wanted, shape[0])
            weights = None if importance is None else importance.weights(name, info.shape)
            data = partial(_encoded, gguf, name, adapters, stored, weights)
            writer.add_tensor(f"{stem}_t.weight" if by_neuron else name, data, stored, shape)
            if f"{stem}.bias" in values:
                bias = values[f"{stem}.bias"]
                if stem.endswith(".ffn_gate"):
                    bias = bias.copy()
                    bias[_retired(stem.removesuffix(".ffn_gate"), values)] = 1
                writer.add_tensor(f"{stem}.bias", bias, GGMLType.F32)
        elif name.endswith(".ffn_up.bias") and adapters.activation == "relu":  # scaled like the rows
            bias = dequantize(gguf.data(name), info.type, info.shape)
            writer.add_tensor(name, bias * values[f"{stem.removesuffix('ffn_up')}ffn_scale"], GGMLType.F32)
        elif stem in values:
            writer.add_tensor(name, values[stem], GGMLType.F32)
        else:
            writer.add_tensor(name, lambda name=name: gguf.data(name), info.type, info.shape)  # type: ignore[misc]
    writer.write(progress)


def _encoded(
    gguf: GGUFFile, name: str, adapters: TrainedAdapters, type: GGMLType, weights: np.ndarray | None
) -> np.ndarray:
    """Return the bytes of a merged matrix, uint8 [rows, row bytes]; a down projection's rows are neurons.

    weights: of the errors by input, float32 [1, n_in].
    """
    values = _merged(gguf, name, adapters)
    if name.endswith(".ffn_down.weight"):
        values = np.ascontiguousarray(values.T)
    n_rows, width = values.shape
    fitted = None if weights is None or type not in FITTED else Importance(weights, n_rows)
    try:
        return recode(values.reshape(-1).view(np.uint8), GGMLType.F32, width, type, importance=fitted)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{gguf.path}: {name}: {error}") from None


def _merged(gguf: GGUFFile, name: str, adapters: TrainedAdapters) -> np.ndarray:
    """Return a matrix [n_out, n_in] as the student computes with it."""
    info, stem, values = gguf.tensors[name], name.removesuffix(".weight"), adapters.values
    weight = dequantize(gguf.data(name), info.type, info.shape)
    if f"{stem}.delta" in values:
        weight += values[f"{stem}.delta"]
    elif f"{stem}.b" in values:
        weight += _product(values[f"{stem}.b"], values[f"{stem}.a"])
    else:
        raise InvalidRequestError(f"the adapters lack {name}; they belong to another model")
    blk, _, matrix = stem.rpartition(".")
    scale = values[f"{blk}.ffn_scale"]
    if matrix == "ffn_up" and adapters.activation == "relu":
        weight *= scale[:, None]
    if matrix == "ffn_down" and adapters.activation == "drelu":  # relu(up) would drop a negative sign
        weight *= scale
    retired = _retired(blk, values)
    if matrix == "ffn_gate":
        weight[retired] = 0
    elif matrix == "ffn_up" and len(retired):
        weight[retired] = values[f"{blk}.ffn_linear.a"]
    elif matrix == "ffn_down" and len(retired):
        weight[:, retired] = values[f"{blk}.ffn_linear.b"]
    return weight


def _product(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Return b [n_out, rank] @ a [rank, n_in], the same on every machine, because it uses hotset's kernel.

    The last bits of NumPy's product depend on the number of threads and the processor.
    """
    return linear_f32(b, a.T).T


def _retired(blk: str, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the neurons that a layer's linear path replaces: the first ones whose scale is zero."""
    a = values.get(f"{blk}.ffn_linear.a")
    if a is None:
        return np.empty(0, np.int64)
    retired = np.flatnonzero(values[f"{blk}.ffn_scale"] == 0)[: len(a)]
    if len(retired) < len(a):
        raise InvalidRequestError(f"the adapters of {blk} have a linear path, but no neurons retired for it")
    return retired
