"""Writes a model with its matrices in other types, for `hotset quantize`.

Matrices are quantised; vectors, and matrices that decide (routers), are copied. As in GGML's quantisers, some
matrices get another type than the rest, because their errors cost more than their bits:

- the output matrix (or the embedding, if it is also the output): Q6_K, or Q8_0 for falcon and for rows that
  are not a multiple of 256;
- the predictors of a PowerInfer model (`fc1`, `fc2`), as in its own quantiser: Q4_0 in a Q4_0 file, Q5_0 in
  other quantised ones;
- in mixes (`q4_k_m`, `q3_k_l`, `iq2_xs`, ...) the matrices listed in formats/mixes.py.

An importance matrix (formats/imatrix.py) weights the errors; types below three and a half bits need one. Rows
that are not a multiple of a type's block size get a similar type (FALLBACKS).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.files import check_output
from hotset.formats.encode import FITTED, WRITABLE, Importance, recode
from hotset.formats.gguf import (
    DEFAULT_ALIGNMENT,
    Dialect,
    GGUFFile,
    GGUFWriter,
    TensorInfo,
    copy_metadata,
    open_gguf,
)
from hotset.formats.imatrix import ImportanceMatrix
from hotset.formats.mixes import FIVE_BIT_OUTPUT, Place, kind_of, layer_of, mixed_type
from hotset.formats.quants import DECODABLE, ENCODABLE, TYPES, GGMLType, row_bytes

if TYPE_CHECKING:
    from hotset.reporter import Reporter

_T = GGMLType
FLOATS = (_T.F32, _T.F16, _T.BF16)
QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class Target:
    """The meaning of --type. type: of most matrices. file_type: value of general.file_type."""

    type: GGMLType
    file_type: int


TARGETS: dict[str, Target] = {
    "f32": Target(_T.F32, 0),
    "f16": Target(_T.F16, 1),
    "bf16": Target(_T.BF16, 32),
    "q8_0": Target(_T.Q8_0, 7),
    "q6_k": Target(_T.Q6_K, 18),
    "q5_k_m": Target(_T.Q5_K, 17),
    "q5_k_s": Target(_T.Q5_K, 16),
    "q5_1": Target(_T.Q5_1, 9),
    "q5_0": Target(_T.Q5_0, 8),
    "q4_k_m": Target(_T.Q4_K, 15),
    "q4_k_s": Target(_T.Q4_K, 14),
    "q4_1": Target(_T.Q4_1, 3),
    "q4_0": Target(_T.Q4_0, 2),
    "iq4_nl": Target(_T.IQ4_NL, 25),
    "iq4_xs": Target(_T.IQ4_XS, 30),
    "mxfp4": Target(_T.MXFP4, 38),
    "q3_k_l": Target(_T.Q3_K, 13),
    "q3_k_m": Target(_T.Q3_K, 12),
    "q3_k_s": Target(_T.Q3_K, 11),
    "iq3_m": Target(_T.IQ3_S, 27),
    "iq3_s": Target(_T.IQ3_S, 26),
    "iq3_xs": Target(_T.IQ3_S, 22),
    "iq3_xxs": Target(_T.IQ3_XXS, 23),
    "q2_k": Target(_T.Q2_K, 10),
    "q2_k_s": Target(_T.Q2_K, 21),
    "iq2_m": Target(_T.IQ2_S, 29),
    "iq2_s": Target(_T.IQ2_XS, 28),
    "iq2_xs": Target(_T.IQ2_XS, 20),
    "tq2_0": Target(_T.TQ2_0, 37),
    "iq2_xxs": Target(_T.IQ2_XXS, 19),
    "iq1_m": Target(_T.IQ1_M, 31),
    "tq1_0": Target(_T.TQ1_0, 36),
    "iq1_s": Target(_T.IQ1_S, 24),
}
ALIASES = {"q5_k": "q5_k_m", "q4_k": "q4_k_m", "q3_k": "q3_k_m"}

_LATTICES = (_T.IQ3_S, _T.IQ3_XXS, _T.IQ2_S, _T.IQ2_XS, _T.IQ2_XXS, _T.IQ1_M, _T.IQ1_S)
WEIGHTED = frozenset(_LATTICES[1:])
"""Types that require an importance matrix."""

FALLBACKS: dict[GGMLType, GGMLType] = {
    _T.Q6_K: _T.Q8_0,
    _T.Q5_K: _T.Q5_1,
    _T.Q4_K: _T.Q5_0,
    **dict.fromkeys((_T.Q3_K, _T.Q2_K, _T.TQ2_0, _T.TQ1_0), _T.Q4_0),
    **dict.fromkeys((*_LATTICES, _T.IQ4_XS), _T.IQ4_NL),
    **dict.fromkeys((_T.Q8_0, _T.Q5_1, _T.Q5_0, _T.Q4_1, _T.Q4_0, _T.MXFP4, _T.IQ4_NL), _T.F16),
}
"""Types for rows that are not a multiple of the block size."""

# Matrices that every engine reads as floats, or that are small, or both.
_KEPT = re.compile(
    r"(ffn_gate_inp|token_types|ssm_conv1d(_[qkv])?|ssm_norm|shortconv\.conv|rope_freqs|rope_factors_\w+|altup_\w+|laurel_[lr]"
    r"|per_layer_model_proj|ple_conv1d|(output_hc|hc_attn|hc_ffn)_fn|(attn|indexer)_compressor_\w+|indexer\.[qk]_proj"
    r"|time_mix_(first|lerp_fused|decay_w[12]|[wavg][0-2]))\.weight$"
)
_WITHOUT_IMPORTANCE = ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")
_LARGE = ("llama", "qwen2", "olmo")  # architectures whose 80-layer models have a small attn_v
_PREDICTOR = re.compile(r"blk\.\d+\.fc[12]\.weight")
PIECE_BYTES = 1 << 24  # read and encoded together


@dataclass(frozen=True)
class PlannedTensor:
    """The new type of a tensor. note: why it differs from the requested type, or ""."""

    info: TensorInfo
    type: GGMLType
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Return the bytes in the new file."""
        if self.type == self.info.type:
            return self.info.nbytes
        return row_bytes(self.type, self.info.shape[0]) * math.prod(self.info.shape[1:])


def quantize(
    in_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    type: str | None = "q4_0",
    *,
    tensor_types: Sequence[str] = (),
    allow_requantize: bool = False,
    imatrix: str | os.PathLike[str] | None = None,
    n_threads: int | None = None,
    progress: Reporter | None = None,
) -> list[PlannedTensor]:
    """Write `out_path`: the model with its matrices in another type. Returns the result of `types_of`.

    Format, metadata and the order of tensors are unchanged; a split model becomes one file. The model is read
    once, piece by piece, with less than 500 MB of memory for any size. imatrix: a file of `hotset imatrix` or
    of llama.cpp. Raises the errors of `types_of` and `ImportanceMatrix.open`, and InvalidRequestError for
    weights that are not finite; then no file is left.
    """
    importance = None if imatrix is None else ImportanceMatrix.open(imatrix)
    with open_gguf(in_path) as gguf:
        check_output(out_path, gguf.paths)
        tensors = types_of(gguf, type, tensor_types, allow_requantize=allow_requantize, importance=importance)
        alignment = gguf.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        assert isinstance(alignment, int)  # open_gguf has checked it
        writer = GGUFWriter(out_path, gguf.architecture, alignment, gguf.dialect)
        if type is not None:
            writer.add("general.file_type", target_of(type).file_type)
        if any(planned.type not in FLOATS for planned in tensors):
            writer.add("general.quantization_version", QUANTIZATION_VERSION)
        if importance is not None:
            writer.add("quantize.imatrix.file", Path(os.fspath(imatrix or "")).name)
            if importance.datasets:
                writer.add("quantize.imatrix.dataset", importance.datasets[0])
            writer.add("quantize.imatrix.entries_count", len(importance.inputs))
            writer.add("quantize.imatrix.chunks_count", importance.n_chunks)
        copy_metadata(gguf, writer)
        for planned in tensors:
            info = planned.info

            def pieces(planned: PlannedTensor = planned) -> Iterator[np.ndarray]:
                return _pieces(gguf, planned, n_threads, importance)

            writer.add_tensor(info.name, pieces, planned.type, info.shape)
        writer.write(progress)
    return tensors


def types_of(
    gguf: GGUFFile,
    type: str | None,
    tensor_types: Sequence[str] = (),
    *,
    allow_requantize: bool = False,
    importance: ImportanceMatrix | None = None,
) -> list[PlannedTensor]:
    """Return the type of each tensor, in the order of the file.

    type: a name of TARGETS or ALIASES, for every matrix; None: unchanged. tensor_types: "PATTERN=TYPE", where
    PATTERN is a regular expression searched in the names of matrices; the first that matches wins.
    allow_requantize: quantised matrices may get another quantised type. Raises InvalidRequestError for
    invalid arguments, and UnsupportedModelError for a type that cannot be decoded.
    """
    for info in gguf.tensors.values():
        if info.type not in TYPES:
            gguf.data(info.name)  # raises an error that says why
    important = () if importance is None else importance.inputs
    facts = typed_model(
        gguf.metadata, gguf.architecture, gguf.dialect, "output.weight" in gguf.tensors, important
    )  # fmt: skip
    if importance is not None:
        _check_importance(gguf, importance)
    planned = assign_types(facts, list(gguf.tensors.values()), type, tensor_types)
    _check_sources(gguf, planned, allow_requantize)
    return planned


@dataclass(frozen=True)
class TypedModel:
    """The facts on which the choice of types depends.

    n_layer: 0 if unknown. n_group: queries per key. important: names of the matrices with known importance.
    """

    architecture: str
    dialect: Dialect
    has_output: bool
    n_layer: int
    n_experts: int = 0
    n_group: int = 1
    important: frozenset[str] = frozenset()


def typed_model(
    metadata: Mapping[str, object],
    architecture: str,
    dialect: Dialect,
    has_output: bool,
    important: Iterable[str] = (),
) -> TypedModel:
    """Return the facts from a file's keys."""

    def number(key: str) -> int:
        value = metadata.get(f"{architecture}.{key}")
        if isinstance(value, np.ndarray | list):  # per layer
            value = value[0] if len(value) else 0
        return int(value) if isinstance(value, int | np.integer) else 0

    n_head = number("attention.head_count")
    return TypedModel(
        architecture,
        dialect,
        has_output,
        number("block_count"),
        number("expert_count"),
        n_head // max(number("attention.head_count_kv") or n_head, 1),
        frozenset(important),
    )


def assign_types(
    model: TypedModel,
    tensors: Sequence[TensorInfo],
    type: str | None,
    tensor_types: Sequence[str] = (),
    packed: Mapping[str, GGMLType] = MappingProxyType({}),
) -> list[PlannedTensor]:
    """Return the types like `types_of`, regardless of present types, for tensors that need not be in a file.

    packed: names of tensors that are already quantised, and keep their type unless tensor_types names them.
    """
    target = None if type is None else target_of(type)
    rules = [_rule(text) for text in tensor_types]
    if target is None and not rules:
        raise InvalidRequestError("there is nothing to do: give a type, or PATTERN=TYPE for some tensors")
    used: set[int] = set()
    planned = []
    places = _places(model, [info.name for info in tensors if is_matrix(info)])
    for info in tensors:
        if not is_matrix(info):
            planned.append(PlannedTensor(info, info.type))
            continue
        matching = [i for i, (pattern, _) in enumerate(rules) if pattern.search(info.name)]
        used.update(matching)
        if matching:
            wanted, note = rules[matching[0]][1], ""
        elif info.name in packed:
            wanted, note = packed[info.name], "kept"
        elif target is None:
            wanted, note = info.type, ""
        else:
            wanted, note = _default(model, info, target, places)
        planned.append(_possible(info, wanted, note))
        _check_weighted(model, planned[-1], type)
    for i, text in enumerate(tensor_types):
        if i not in used:
            raise InvalidRequestError(
                f"no matrix of the model has a name in which {text.rpartition('=')[0]!r} is found; "
                "'hotset show MODEL --tensors' lists them"
            )
    return planned


def is_matrix(info: TensorInfo) -> bool:
    """Return whether quantisers change a tensor: weights with rows, except tables of whole numbers."""
    return info.name.endswith(".weight") and math.prod(info.shape[1:]) > 1 and info.type != _T.I32


def target_of(type: str) -> Target:
    """Return the target of a name. Raises InvalidRequestError for an unknown name."""
    name = type.lower()
    name = ALIASES.get(name, name)
    if name not in TARGETS:
        raise InvalidRequestError(f"the type {type!r} is not known; it must be one of {', '.join(TARGETS)}")
    return TARGETS[name]


def _rule(text: str) -> tuple[re.Pattern[str], GGMLType]:
    pattern, equals, name = text.rpartition("=")
    type = next((t for t in WRITABLE if t.name.lower() == name.lower()), None)
    if not equals or not pattern or type is None:
        names = ", ".join(t.name.lower() for t in WRITABLE)
        raise InvalidRequestError(f"{text!r} is not PATTERN=TYPE with one of the types {names}")
    try:
        return re.compile(pattern), type
    except re.error as error:
        raise InvalidRequestError(f"{pattern!r} is not a regular expression ({error})") from None


def _places(model: TypedModel, names: Sequence[str]) -> dict[str, Place]:
    """Return each matrix's position among its kind. In models with experts, it is the layer's number."""
    found: dict[str, Place] = {}
    counts: dict[str, int] = {}
    kinds = {name: kind for name in names if (kind := kind_of(name)) and layer_of(name) >= 0}
    n_values = sum(kind == "value" for kind in kinds.values())
    for name in sorted(kinds, key=lambda name: (layer_of(name), name)):
        kind = kinds[name]
        at = counts.get(kind, 0)
        counts[kind] = at + 1
        if kind == "value":
            of = n_values
        else:
            at, of = (layer_of(name) if model.n_experts > 1 else at), model.n_layer
        found[name] = Place(
            at, of, model.n_experts, model.n_group >= 4, model.architecture == "falcon", bool(model.important)
        )
    return found


def _check_weighted(model: TypedModel, planned: PlannedTensor, type: str | None) -> None:
    """Raise InvalidRequestError if a type needs unknown importance. Embeddings need none."""
    name = planned.info.name
    needs = planned.type in WEIGHTED or (
        planned.type == _T.Q2_K and type is not None and type.lower() == "q2_k_s"
    )
    if needs and planned.type != planned.info.type and name not in (*model.important, *_WITHOUT_IMPORTANCE):
        what = f"the file lacks that of {name}" if model.important else "collect one with 'hotset imatrix'"
        raise InvalidRequestError(
            f"{planned.type.name} (of {name}) requires an importance matrix (`imatrix`): {what}"
        )


def _check_importance(gguf: GGUFFile, importance: ImportanceMatrix) -> None:
    """Raise InvalidRequestError if the importance matrix belongs to another model."""
    for info in gguf.tensors.values():
        importance.weights(info.name, info.shape)
    if not importance.inputs.keys() & gguf.tensors.keys():
        raise InvalidRequestError(
            f"the importance matrix has none of the matrices of {gguf.path}: it belongs to another model"
        )


def _default(
    model: TypedModel, info: TensorInfo, target: Target, places: Mapping[str, Place]
) -> tuple[GGMLType, str]:
    """Return the type of a matrix that no rule names, and why it differs from the requested type."""
    powerinfer = model.dialect == "powerinfer"
    mix = next(name for name, one in TARGETS.items() if one == target)
    if _KEPT.search(info.name) or (info.name == "position_embd.weight" and not powerinfer):
        return info.type, "kept"
    if target.type in FLOATS:
        return target.type, ""
    output = "output.weight" if model.has_output or powerinfer else "token_embd.weight"
    if info.name == output and target.type != _T.Q8_0:
        if model.architecture == "falcon" or info.shape[0] % TYPES[_T.Q6_K].block_size:
            return _T.Q8_0, "output"
        best = _T.Q5_K if mix in FIVE_BIT_OUTPUT else _T.Q6_K
        return best, "" if target.type == best else "output"
    if powerinfer and _PREDICTOR.fullmatch(info.name):
        return (_T.Q4_0, "") if target.type == _T.Q4_0 else (_T.Q5_0, "predictor")
    if powerinfer and target.type in ENCODABLE:
        return target.type, ""
    place = places.get(info.name, Place(0, 1))
    large = model.n_layer == 80 and model.architecture in _LARGE and model.n_group > 1
    mixed = mixed_type(mix, kind_of(info.name), place, large=large)
    return (target.type, "") if mixed in (None, target.type) else (mixed or target.type, "mix")


def _possible(info: TensorInfo, type: GGMLType, note: str) -> PlannedTensor:
    """Plan this type, or a similar one whose block size divides the rows."""
    wanted = type
    while info.shape[0] % TYPES[type].block_size:
        type = FALLBACKS[type]
    if type != wanted:
        size = TYPES[wanted].block_size
        note = f"rows of {info.shape[0]} are not whole blocks of {size} ({wanted.name})"
    return PlannedTensor(info, type, note)


def _check_sources(gguf: GGUFFile, tensors: list[PlannedTensor], allow_requantize: bool) -> None:
    changed = [planned for planned in tensors if planned.type != planned.info.type]
    for planned in changed:
        if planned.info.type not in DECODABLE:
            raise UnsupportedModelError(
                f"the tensor {planned.info.name} of {gguf.path} is {planned.info.type.name}, which cannot be "
                "decoded; quantise a file of another type"
            )
    again = [p for p in changed if p.info.type not in FLOATS and p.type not in FLOATS]
    if again and not allow_requantize:
        info = again[0].info
        raise InvalidRequestError(
            f"{len(again)} matrices of {gguf.path} are quantised already ({info.name}: {info.type.name}), "
            f"so {again[0].type.name} cannot restore the lost precision; quantise the F16 model, or use "
            "allow_requantize=True"
        )


def _pieces(
    gguf: GGUFFile, planned: PlannedTensor, n_threads: int | None, importance: ImportanceMatrix | None
) -> Iterator[np.ndarray]:
    """Yield the tensor's new bytes, reading one piece ahead and releasing used ones."""
    info, data = planned.info, gguf.data(planned.info.name)
    weights = None
    if importance is not None and planned.type in FITTED and planned.type != info.type:
        weights = importance.weights(info.name, info.shape)
    old = row_bytes(info.type, info.shape[0])
    if not info.nbytes:  # PowerInfer's files may have an empty vector
        return
    step = max(PIECE_BYTES // max(old, planned.nbytes * old // info.nbytes), 1) * old
    gguf.advise(info.name, 0, step, needed=True)
    for start in range(0, info.nbytes, step):
        gguf.advise(info.name, start + step, start + 2 * step, needed=True)
        piece = data[start : start + step]
        if planned.type == info.type:
            yield piece.copy()  # so that the mapped pages can be released
        else:
            try:
                of_rows = None if weights is None else Importance(weights, info.shape[1], start // old)
                yield recode(piece, info.type, info.shape[0], planned.type, n_threads, of_rows)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{gguf.path}: tensor {info.name!r}: {error}") from None
        gguf.advise(info.name, start, start + step, needed=False)
