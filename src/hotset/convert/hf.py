"""Converts a Hugging Face checkpoint (config.json, tensors, tokenizer) to a GGUF file, plain or PowerInfer's.

Neither torch nor transformers is needed. Tensors stream in pieces of a few megabytes, whatever the size of
the model, and the file appears under its name only when it is whole. What is not known is refused, never
guessed: an architecture, a RoPE scaling, an activation, a tensor, a shape, a pre-tokenizer.

What becomes of a tensor is said by indices (`Origin`), so that every piece is read once, in its last order:

- Hugging Face's llama rotates the halves of a head (i, i + n/2), GGUF's neighbours (2i, 2i + 1): rows of q
  and k are permuted for the architectures whose row in `ARCHITECTURES` says rope="norm", unless the
  checkpoint's class rotates neighbours as well.
- Falcon's fused rows lie in groups (queries of a KV head, its key, its value); GGUF has all q, all k, all v.
- Some norms are stored less one.
- BitNet's matrices are stored as they were trained, and count as three values each.
- In PowerInfer's dialect the down projection is transposed, a row per neuron, and there are predictors.
- With a profile, neurons stand in order of hotness (convert/reorder.py).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hotset.convert import hf_nextn
from hotset.convert.fp8 import Scaled
from hotset.convert.hf_checkpoint import Checkpoint
from hotset.convert.hf_config import HFConfig, read_json
from hotset.convert.hf_embedding import (
    answer_ids,
    embedding_keys,
    is_reranker,
    longest_text,
    reranker_keys,
    reranker_template,
    use_of,
)
from hotset.convert.hf_parts import HFAltUp, HFNgrams
from hotset.convert.hf_rope import neighbours
from hotset.convert.hf_rwkv import FUSED, LERP, LERPS
from hotset.convert.hf_tokenizer import tokenizer_keys
from hotset.convert.hf_values import integer
from hotset.convert.mxfp4 import BLOCK_BYTES, Matrix, Packed
from hotset.convert.reorder import add_order, neuron_orders, neurons_of, order_of_rows
from hotset.errors import FormatError, HotsetError, InvalidRequestError, UnsupportedModelError
from hotset.files import check_target
from hotset.formats.gguf import PIECE_VALUES, Dialect, GGUFWriter, PlannedFile, TensorInfo, open_gguf
from hotset.formats.quants import GGMLType
from hotset.formats.requantize import PlannedTensor, assign_types, target_of, typed_model
from hotset.formats.torch_file import map_torch, to_floats
from hotset.model.activation import DRELU, RELU
from hotset.model.architectures import ARCHITECTURES, POWERINFER_ARCHITECTURES
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe, describe_nextn
from hotset.model.keys import PREDICTOR_MASKS_KEY, SPARSE_THRESHOLD_KEY
from hotset.model.predictor import Predictor
from hotset.sparsity.profile import profile_path
from hotset.sparsity.sidecar import fingerprint
from hotset.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.model.mixers import ChannelMixer, DeltaMixer, StateSpaceMixer
    from hotset.reporter import Reporter
    from hotset.sparsity.profile import Profile

ANY = -1  # as a size: it is not known
_PACKED = (".blocks", ".scales")  # of one matrix in MXFP4
_PREDICTOR_FILE = "model_{}.pt"
_OUTPUTS = (
    "lm_head.weight",
    "embed_out.weight",
    "language_model.lm_head.weight",
    "output.weight",
    "head.weight",
)
_BUFFERS = re.compile(  # constants that older versions of a model's class stored
    r"(.*\.)?(inv_freq|cos_cached|sin_cached|position_ids|(attn|attention)\.(masked_)?bias)"
)
_NEXTN_MODULE = re.compile(r"(model\.)?mtp\..*")  # predicts more than one token
# Of models that see: the other parts.
_OTHER_PARTS = re.compile(
    r"(model\.)?((visual|vit|vision_tower|vision_model|audio_tower|embed_vision|embed_audio|sam_model|qwen2_model|multi_modal_projector|projector|mlp_AR|vision_adapter|vision_projection)\..*"
    r"|image_newline|view_seperator)"
)
# Of encoders: what was trained with them and is no part of their hidden states.
_OTHER_HEADS = re.compile(
    r"((bert|roberta|model)\.)?(pooler|head|decoder|classifier|lm_head|cls\.predictions|cls\.seq_relationship)\..*"
)
_NGRAMS = "per_layer_token_embd.weight"  # whose rows checkpoints have in parts, those of n-grams
_BARE = frozenset({"ssm_a", "ssm_d", "exp_probs_b"})  # tensors whose name says all
_OF_DELTA = frozenset(
    {"attn_qkv", "attn_gate", "ssm_ba", "ssm_beta", "ssm_alpha", "ssm_conv1d", "ssm_a", "ssm_dt", "ssm_out"}
)


@dataclass(frozen=True)
class Origin:
    """Where a tensor of the new file comes from.

    values: as stored, outermost dimension first, in a mapped file. transposed: rows and columns change places
    first. rows, columns: which of them, in their new order (None: all). plus: added to each value. decays: of
    each value x, -exp(x) is meant. ternary: for each value -s, 0 or s, whichever is nearest, s being the mean
    magnitude of all. factors: of each row of the result, or one of all. unit: each row becomes a vector of
    length 1.
    """

    values: np.ndarray
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    transposed: bool = False
    plus: float = 0.0
    decays: bool = False
    ternary: bool = False
    factors: np.ndarray | None = None
    unit: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost first, of the result."""
        shape = self.values.shape[::-1] if self.transposed else self.values.shape
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    def piece(self, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of the result, float32."""
        rows: slice | np.ndarray = slice(start, stop) if self.rows is None else self.rows[start:stop]
        found = self.values[:, rows].T if self.transposed else self.values[rows]
        if self.columns is not None:
            found = found[:, self.columns]
        values: np.ndarray = (
            found.floats() if isinstance(found, Scaled) else to_floats(np.ascontiguousarray(found))
        )
        if self.decays:
            with np.errstate(over="ignore"):  # infinity: nothing of the state is left
                values = -np.exp(values)
        if self.unit:
            values = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-12))
        if self.factors is not None:
            factors = self.factors if len(self.factors) == 1 else self.factors[start:stop]
            values = values * factors.reshape(-1, *(1,) * (values.ndim - 1))
        return values + np.float32(self.plus) if self.plus else values

    def pieces(self) -> Iterator[np.ndarray]:
        """The result in order, some megabytes at a time."""
        n_rows = self.shape[0]
        step = max(PIECE_VALUES // math.prod(self.shape[1:]), 1)
        starts = range(0, n_rows, step)
        scale = None
        if self.ternary:
            total = sum(
                float(np.abs(self.piece(i, min(i + step, n_rows))).sum(dtype=np.float64)) for i in starts
            )
            scale = np.float32(max(total / math.prod(self.shape), 1e-5))
        for start in starts:
            found = self.piece(start, min(start + step, n_rows))
            yield found if scale is None else np.clip(np.rint(found / scale), -1, 1) * scale


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape, one after the other: those of the experts. of_rows: as one matrix, with the rows
    of all."""

    parts: tuple[Origin, ...]
    of_rows: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost first, of the result."""
        if self.of_rows:
            return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])
        return (len(self.parts), *self.parts[0].shape)

    def pieces(self) -> Iterator[np.ndarray]:
        """As Origin.pieces."""
        for part in self.parts:
            yield from part.pieces()


@dataclass(frozen=True)
class Table:
    """Whole numbers, which the file has as I32."""

    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost first, of the result."""
        return self.values.shape

    def pieces(self) -> Iterator[np.ndarray]:
        """The bytes of the file."""
        yield np.ascontiguousarray(self.values.astype("<i4")).view(np.uint8)


Source = Origin | Stack | Packed | Table


@dataclass(frozen=True)
class Converted:
    """What was written. n_always: leading neurons of each layer that need no prediction, with a profile. use:
    the subcommand for it."""

    n_bytes: int
    tensors: tuple[PlannedTensor, ...]
    n_always: tuple[int, ...] | None = None
    use: str = "run"


def convert_hf(
    src_dir: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    type: GGMLType | str = "f16",
    *,
    tensor_types: Sequence[str] = (),
    predictors: str | os.PathLike[str] | None = None,
    profile: Profile | None = None,
    activation: str | None = None,
    progress: Reporter | None = None,
) -> Converted:
    """Writes the checkpoint in the folder `src_dir` as a GGUF file.

    type, tensor_types: of the matrices, as `requantize.types_of` takes them; vectors are F32, and what is
    MXFP4 in the checkpoint stays so unless tensor_types names it. predictors: a folder of model_<layer>.pt
    with fc1.weight [rank, n_embd] and fc2.weight [n_ff, rank], and perhaps a config.json with
    sparse_threshold: the file is then one of PowerInfer's. profile: neurons are written in its order, and it
    goes along; it must be of this model, which nothing in a checkpoint can prove. activation: overrides what
    config.json says. A checkpoint without tokenizer files gives a file without tokenizer. Raises
    ModelNotFoundError, FormatError, UnsupportedModelError, TokenizerError or InvalidRequestError, and then
    leaves no file.
    """
    check_target(out_path)
    src = Path(src_dir)
    name = type.name.lower() if isinstance(type, GGMLType) else type.lower()
    target = target_of(name)
    config = HFConfig(read_json(src / "config.json"), activation)
    dialect: Dialect = "gguf" if predictors is None else "powerinfer"
    architecture = config.architecture if predictors is None else _powerinfer_architecture(config)
    checkpoint = _opened(src, config)
    of_texts, projections = embedding_keys(src, config)
    sources: dict[str, Source] = {n: Origin(values) for n, values in projections.items()}
    sources |= _sources(checkpoint, config, dialect)
    tokenizer = _tokenizer(src, config, sources)
    if is_reranker(src, config):
        sources = _answering(sources, answer_ids(tokenizer))
        tokenizer, of_texts = tokenizer | reranker_template(), reranker_keys()
    masked = any(re.search(r"\.fc1(_exps)?\.weight$", n) for n in sources)
    if masked and predictors is not None:
        raise InvalidRequestError("the checkpoint has predictors of its own, which are part of the model")
    folder = None if predictors is None else _Predictors(Path(predictors), config)
    sources |= {} if folder is None else folder.sources
    orders = None if profile is None else _checked_orders(profile, config)
    if orders is not None:
        sources = {n: _ordered(n, source, orders) for n, source in sources.items()}

    writer = GGUFWriter(out_path, architecture, dialect=dialect)
    writer.add("general.name", src.resolve().name)
    writer.add("general.file_type", target.file_type)
    writer.add("general.quantization_version", 2)
    keys = _keys(config, architecture, folder, masked=masked) | _layer_keys(checkpoint, config)
    keys |= {f"{architecture}.{entry}": value for entry, value in of_texts.items()} | tokenizer
    for key, value in keys.items():
        writer.add(key, value)
    n_always = None
    if profile is not None and orders is not None:
        n_always = add_order(writer, profile, orders)

    for tensor_name, divisors in config.rope_divisors().items():
        writer.add_tensor(tensor_name, divisors, GGMLType.F32)
    infos = [
        TensorInfo(n, source.shape[::-1], _stored_type(source), 4 * math.prod(source.shape), 0)
        for n, source in sources.items()
    ]
    packed = {n: GGMLType.MXFP4 for n, source in sources.items() if isinstance(source, Packed)}
    facts = typed_model(writer.planned().metadata, architecture, dialect, "output.weight" in sources)
    planned = assign_types(facts, infos, name, tensor_types, packed)
    for tensor in planned:

        def pieces(tensor: PlannedTensor = tensor) -> Iterator[np.ndarray]:
            for piece in _pieces(sources[tensor.info.name], tensor.type):
                yield piece
                checkpoint.release()

        writer.add_tensor(tensor.info.name, pieces, tensor.type, tensor.info.shape)
    _check_loads(writer.planned())
    writer.write(progress)
    if profile is not None and orders is not None:
        _save_profile(profile, orders, Path(out_path))
    return Converted(Path(out_path).stat().st_size, tuple(planned), n_always, use_of(config, of_texts))


def _stored_type(source: Source) -> GGMLType:
    """Of a tensor to which no type is given."""
    return GGMLType.I32 if isinstance(source, Table) else GGMLType.F32


def _opened(src: Path, config: HFConfig) -> Checkpoint:
    """Open the tensors. `config` learns its layers for multi-token prediction and the longest text."""
    if (n_tokens := longest_text(src)) is not None:
        config.limit_positions(n_tokens)
    checkpoint, hf = Checkpoint(src, config.fp8_block), config.hf_class
    if config.row.nextn is not None:
        config.n_nextn = hf_nextn.count(checkpoint.tensors, hf.layers, config.n_layer, in_parts=hf.parts)
    return checkpoint


def _tokenizer(src: Path, config: HFConfig, sources: dict[str, Source]) -> dict[str, Any]:
    """Its keys. The embedding, whose rows are vocab_size, must be there: as many tokens are made."""
    if "token_embd.weight" not in sources:
        raise UnsupportedModelError("the checkpoint lacks its embedding")
    return tokenizer_keys(src, config.raw)


def _answering(sources: dict[str, Source], ids: list[int]) -> dict[str, Source]:
    """The tensors of a reranker: of the output those rows alone whose logits are the scores."""
    output = sources.get("output.weight", sources["token_embd.weight"])
    assert isinstance(output, Origin)
    others = {name: source for name, source in sources.items() if name != "output.weight"}
    return others | {"cls.output.weight": Origin(output.values, rows=np.array(ids))}


def _keys(config: HFConfig, architecture: str, folder: _Predictors | None, *, masked: bool) -> dict[str, Any]:
    """Keys of the model. masked: it has predictors whose mask is part of it."""
    n_positions = config.n_ctx
    if config.architecture == "opt" and folder is not None:
        n_positions += 2  # PowerInfer's engine sizes position_embd by this key
    keys = config.keys(architecture, n_positions)
    if folder is not None:
        keys[SPARSE_THRESHOLD_KEY] = folder.threshold
    if masked:  # the mask is round(sigmoid(score)): of a score above 0
        keys |= {PREDICTOR_MASKS_KEY: True, SPARSE_THRESHOLD_KEY: float(np.finfo(np.float32).tiny)}
    return keys


def _layer_keys(checkpoint: Checkpoint, config: HFConfig) -> dict[str, Any]:
    """Keys that the checkpoint has as tensors: one number for each layer, and constants of hashes."""
    found: dict[str, Any] = _hash_keys(checkpoint, config)
    for stem, key in config.hf_class.layer_keys.items():
        for i in range(config.n_layer):
            name = f"{config.hf_class.layers}.{i}.{stem}"
            values = checkpoint.tensors.get(name)
            if values is None or values.size != 1:
                raise FormatError(f"the checkpoint must have one number in the tensor {name}")
            found.setdefault(key, []).append(float(to_floats(np.ascontiguousarray(values)).reshape(())))
    return found


def _hash_keys(checkpoint: Checkpoint, config: HFConfig) -> dict[str, np.ndarray]:
    """Those of the hashes of n-grams, whole numbers."""
    found: dict[str, np.ndarray] = {}
    if config.streams is None or (ngrams := config.streams.ngrams) is None:
        return found
    names = {checkpoint_name(name, config): name for name in checkpoint.tensors}
    for stem, key in HFNgrams.constants.items():
        name = names.get(f"{config.hf_class.layers}.{ngrams.layer}.{stem}")
        values = np.empty(0) if name is None else checkpoint.tensors[name]
        if values.dtype != np.int64 or values.ndim != 1 or (values < 0).any():
            raise FormatError(
                f"the checkpoint must have whole numbers in the tensor {stem} of layer {ngrams.layer}"
            )
        found[f"{config.architecture}.{key}"] = values.astype("<u8")
    return found


def checkpoint_name(name: str, config: HFConfig) -> str:
    """The full name of a tensor of the text model."""
    return config.hf_class.full_name(config.hf_class.text_name(name))


def _pieces(source: Source, type: GGMLType) -> Iterator[np.ndarray]:
    """Floats, or blocks of the type that are not decoded, in order."""
    if isinstance(source, Packed) and type != GGMLType.MXFP4:
        return source.floats()
    return source.pieces()


def _check_loads(planned: PlannedFile) -> None:
    """Raises what loading the file would raise: a missing tensor, a number out of its range, a tokenizer."""
    file = cast("GGUFFile", planned)  # the parts of it that are read
    try:
        config = config_from_gguf(file)
        published = Predictor("mlp", (0.0,) * config.n_layer) if planned.dialect == "powerinfer" else None
        describe(config, planned.tensors, published)
        for i in range(config.n_extra_layers):
            describe_nextn(config, planned.tensors, i)
        if "tokenizer.ggml.model" in planned.metadata:
            load_tokenizer(planned.metadata)
    except HotsetError as error:
        raise type(error)(f"the checkpoint would become a file that does not load: {error}") from None


def _powerinfer_architecture(config: HFConfig) -> str:
    """The name under which PowerInfer knows such a model."""
    if config.n_expert:
        raise UnsupportedModelError("PowerInfer's format has no experts")
    architecture = config.architecture
    if architecture == "llama" and config.activation == DRELU:
        architecture = "bamboo"  # the same model but for the activation
    if architecture not in POWERINFER_ARCHITECTURES:
        raise UnsupportedModelError(
            f"PowerInfer's format has no {architecture} models, only {', '.join(POWERINFER_ARCHITECTURES)}"
        )
    known = POWERINFER_ARCHITECTURES[architecture].activation
    if config.activation != known and not (known == RELU and config.activation.gate == "fatrelu"):
        raise UnsupportedModelError(
            f"the activation of the checkpoint is {config.activation.gate}, and PowerInfer's format holds "
            f"{architecture} models with {'dReLU' if known == DRELU else known.gate} only"
        )
    return architecture


# ---- tensors -------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class _Place:
    """Where a tensor of the checkpoint goes: -1 for a layer outside of them, for an expert none of its own.

    targets: names in the file; several: each has an equal part of it.
    """

    layer: int
    targets: tuple[str, ...]
    expert: int = -1


def _place_of(name: str, config: HFConfig) -> _Place:
    hf = config.hf_class
    name = hf_nextn.as_layer(name, hf.layers, config.n_layer, in_parts=hf.parts)
    name = hf.text_name(name)
    full = hf.full_name(name)
    stem, _, kind = full.rpartition(".")
    if kind not in ("weight", "bias"):  # parameters that belong to no matrix have no kind
        stem, kind = full, "weight"
    numbered = re.fullmatch(r"(.+)\.([0-9]{1,5})", stem)
    if numbered and (several := hf.tensors.get(f"{numbered[1]}.*")) is not None:
        return _Place(-1, (f"{several}.{kind}",), int(numbered[2]))
    if (found := hf.tensors.get(stem)) is not None:
        if found.endswith(".weight"):  # a parameter that belongs to no matrix
            return _Place(-1, (found,))
        if stem != full:
            return _Place(-1, (f"{found}.{kind}",))
    match = re.fullmatch(re.escape(hf.layers) + r"\.([0-9]{1,5})\.(.+)", stem)
    if match and int(match[1]) < config.n_layer + config.n_nextn:
        behind = hf_nextn.NAMES if int(match[1]) >= config.n_layer else {}
        part = re.fullmatch(r"(.+\.shard_)([0-9]{1,5})", match[2])
        if part and (several := hf.layer_tensors.get(f"{part[1]}*")) is not None:  # of no layer
            return _Place(-1, (f"{several}.{kind}",), int(part[2]))
        number = re.search(r"\.(?:experts|norms)\.([0-9]{1,5})(?=\.|$)", match[2])
        inside = match[2] if number is None else f"{match[2][: number.start(1)]}*{match[2][number.end(1) :]}"
        if config.rwkv is not None and (lerp := LERP.fullmatch(inside)) is not None:
            target = f"blk.{match[1]}.{FUSED}.weight"
            return _Place(int(match[1]), (target,), LERPS[config.rwkv.version].index(lerp[1]))
        if f"{inside}.{kind}" in hf.layer_tensors:
            inside = f"{inside}.{kind}"
        if (found := hf.layer_tensors.get(inside, behind.get(inside))) is not None:
            layer, expert = int(match[1]), -1 if number is None else int(number[1])
            targets = found.split()
            if config.rwkv is not None:
                targets = config.rwkv.targets(targets[0], layer)
            bare = _BARE.union(hf.bare)
            whole = (".bias", ".weight", ".scale", *_PACKED)
            named = (t if t.endswith(whole) or t in bare else f"{t}.{kind}" for t in targets)
            return _Place(layer, tuple(f"blk.{layer}.{target}" for target in named), expert)
    raise UnsupportedModelError(f"the checkpoint has a tensor that is not known: {name[:200]}")


def _sources(checkpoint: Checkpoint, config: HFConfig, dialect: Dialect) -> Iterator[tuple[str, Source]]:
    """(name in the file, where it comes from), layer by layer; refuses what has no place or another shape."""
    names, tied = _names(checkpoint, config)
    places = sorted((_place_of(name, config), name) for name in names)
    counted = Counter((target, place.expert) for place, _ in places for target in place.targets)
    of_experts: dict[str, dict[int, tuple[str, np.ndarray]]] = {}
    packed: dict[str, dict[str, np.ndarray]] = {}
    by_input = _are_by_input(checkpoint, places, config)
    for place, name in places:
        values = _used(checkpoint.tensors[name], place, config, by_input)
        for i, target in enumerate(place.targets):
            if counted[target, place.expert] > 1 or (place.expert >= 0 and counted[target, -1]):
                raise FormatError(f"the checkpoint has two tensors for {target}, one of them {name}")
            stem, _, kind = target.rpartition(".")
            if f".{kind}" in _PACKED:
                found = packed.setdefault(stem, {})
                found[kind] = values[:, i :: len(place.targets)] if values.ndim > 1 else values  # row by row
                if len(found) == len(_PACKED):
                    if counted[f"{stem}.weight", -1]:
                        raise FormatError(f"the checkpoint has {stem}.weight twice, once as {name}")
                    yield f"{stem}.weight", _packed(packed.pop(stem), f"{stem}.weight", name, config)
                continue
            part = values if _is_grouped(target, config) else _part(values, i, place, config)
            if place.expert >= 0:
                of_experts.setdefault(target, {})[place.expert] = name, part
                if len(of_experts[target]) == _n_parts(target, config):
                    yield target, _stacked(of_experts.pop(target), target, config)
            elif target.endswith(".ffn_gate_tid2eid.weight"):
                yield target, _table(values, target, name, config)
            elif target.endswith((".attn_k_b.weight", ".attn_v_b.weight")):
                yield target, _of_heads(checkpoint.tensors[name], target, name, config)
            elif "_exps." in target and kind != "scale":
                one = dict(enumerate((name, matrix) for matrix in part))
                yield target, _stacked(one, target, config, transposed=config.transposes_experts)
            else:
                is_fused = len(place.targets) == len("qkv") and config.kda is None
                yield (
                    _converted_name(target, dialect),
                    _of_fused_qkv(values, i, name, config)
                    if is_fused
                    else _source(part, target, name, config, dialect),
                )
    for target, found_experts in of_experts.items():
        raise FormatError(
            f"the checkpoint has {target} of {len(found_experts)} "
            f"{'parts' if target == _NGRAMS else 'experts'}, not of {_n_parts(target, config)}"
        )
    for stem, kinds in packed.items():
        raise FormatError(f"the checkpoint has {stem} in MXFP4 and only its {next(iter(kinds))}")
    yield from ((norm, Origin(weights)) for norm, weights in config.query_norms().items())
    alone = any(config.factors(stem) is not None for stem in ("token_embd", "output"))
    if tied and (alone or (dialect == "powerinfer" and config.architecture != "opt")):
        # PowerInfer's engine ties OPT's output only. With multipliers it is another matrix.
        values = checkpoint.tensors[_embedding(names, config)]
        yield "output.weight", _source(values, "output.weight", _OUTPUTS[0], config, dialect)


def _is_tied(checkpoint: Checkpoint, config: HFConfig, output: str | None) -> bool:
    """Return whether the embedding is the output matrix too.

    An output matrix that differs from the embedding is kept, even if config.json ties them: many fine-tuned
    models are saved so.
    """
    if output is None:
        return config.tied or checkpoint.embeds or config.class_name.endswith("Model")
    return config.tied and _equal(checkpoint, _embedding(checkpoint.tensors, config), output)


def _equal(checkpoint: Checkpoint, *names: str) -> bool:
    """Return whether two tensors hold the same values."""
    first, second = (Origin(checkpoint.tensors[name]) for name in names)
    if first.shape != second.shape:
        return False
    for pieces in zip(first.pieces(), second.pieces(), strict=True):
        if not np.array_equal(*pieces):
            return False
        checkpoint.release()
    return True


def _names(checkpoint: Checkpoint, config: HFConfig) -> tuple[list[str], bool]:
    """Return the tensors that become part of the file, and whether the embedding is the output too.

    Raises UnsupportedModelError if one of them has a type that hotset does not read, or the output is
    missing.
    """
    hf = config.hf_class
    output = next((name for name in _OUTPUTS if name in checkpoint.tensors), None)
    tied = _is_tied(checkpoint, config, output)
    if not tied and output is None and not hf.is_encoder:
        raise UnsupportedModelError(f"the checkpoint lacks {_OUTPUTS[0]}, and its config does not tie it")
    extra = tuple(f"{hf.layers}.{config.n_layer + i}." for i in range(config.n_nextn, config.n_extra_layers))
    if config.rwkv is not None:
        extra += (f"{hf.layers}.0.attn.v_lora.",)  # the first layer's values are the others'
    every = (*checkpoint.tensors, *checkpoint.unread)
    found = [n for n in every if not _BUFFERS.fullmatch(n) and not n.startswith(extra)]
    if not config.n_nextn:
        found = [n for n in found if not _NEXTN_MODULE.fullmatch(n)]
    if hf.is_encoder:
        prefix = hf.layers.partition(".")[0] + "."
        stems = {n: n.rpartition(".")[0] for n in found}
        known = hf.tensors.keys() | {name.removeprefix(prefix) for name in hf.tensors}
        found = [n for n in found if stems[n] in known or not _OTHER_HEADS.fullmatch(n)]
        checkpoint.check_readable(found)
        unused = [n for n in found if n.endswith(".mlp.experts.bias") and not checkpoint.tensors[n].any()]
        found = [n for n in found if n not in unused]
    if hf.sees:
        found = [n for n in found if not _OTHER_PARTS.fullmatch(n)]
    if config.compressed is not None:  # where a table chooses, no bias does
        unread = {f"{hf.layers}.{i}.ffn.gate.bias" for i in range(config.compressed.n_hashed)}
        found = [n for n in found if hf.full_name(n) not in unread]
    are_keys = tuple(f".{stem}" for stem in (*hf.layer_keys, *HFNgrams.constants))
    found = [n for n in found if not (tied and n == output) and not n.endswith(are_keys)]
    checkpoint.check_readable(found)
    return found, tied


def _are_by_input(checkpoint: Checkpoint, places: list[tuple[_Place, str]], config: HFConfig) -> bool:
    """Whether matrices of all experts are stored by input: what those that are not square say."""
    experts = config.hf_class.experts
    if experts is None or not experts.by_input:
        return False
    n, d = config.n_ff_expert, config.n_embd
    for place, name in places:
        if place.expert < 0 and place.targets[0].endswith("_exps.weight"):
            n_in, n_out = (n, d) if ".ffn_down_exps." in place.targets[0] else (d, len(place.targets) * n)
            shape = checkpoint.tensors[name].shape[1:]
            if n_in != n_out and shape in ((n_in, n_out), (n_out, n_in)):
                return bool(shape == (n_in, n_out))
    return False


def _used(values: np.ndarray, place: _Place, config: HFConfig, by_input: bool) -> np.ndarray:
    """What the file has of a tensor. by_input: matrices of all experts are stored so."""
    if place.targets == ("position_embd.weight",):
        return values[config.n_unused_positions : len(values) - config.n_cut_positions]
    n, d = config.n_ff_expert, config.n_embd
    of_all = place.expert < 0 and place.targets[0].endswith("_exps.weight")
    if of_all and values.ndim == 2 and values.shape[1] == d and len(values) % n == 0:
        parts = values.reshape(-1, n, d)  # one under the other, as by input
        return parts.swapaxes(1, 2) if ".ffn_down_exps." in place.targets[0] else parts
    if of_all and values.ndim == 3 and by_input:
        return values.swapaxes(1, 2)
    if values.ndim == 3 and values.shape[1] == 1:  # a convolution of each channel by itself
        return values[:, 0]
    if config.kda is not None and place.targets[0].endswith(".ssm_a"):
        return values.reshape(-1, 1)
    return values


def _n_parts(target: str, config: HFConfig) -> int:
    """Return how many tensors of the checkpoint become one: an expert each, a head's norm, a residual stream
    but the first, what the token before counts for, or some rows of n-grams."""
    if config.streams is not None and config.streams.ngrams is not None and target == _NGRAMS:
        return config.streams.ngrams.n_parts
    if config.rwkv is not None:
        return len(LERPS[config.rwkv.version])
    if (stem := _stem(target)) in ("attn_q_norm", "attn_k_norm"):
        return config.n_head if stem == "attn_q_norm" else config.n_head_kv
    return config.n_expert if config.altup is None else config.altup.n_streams - 1


def _part(values: np.ndarray, i: int, place: _Place, config: HFConfig) -> np.ndarray:
    """The i-th of the matrices of a place that lie in one tensor, or in one for all experts."""
    n = len(place.targets)
    if config.rwkv is not None and place.layer >= 0:
        return config.rwkv.values(values, _stem(place.targets[i]))
    if n == 1:
        return values
    if not values.ndim:
        raise FormatError(f"the checkpoint has one number for {' and '.join(place.targets)}")
    if config.transposes_experts:  # column by column
        return values[..., i::n]
    if ".indexer." in place.targets[i]:  # of as many rows as each has
        sizes = [(_shape(target, config) or (0,))[0] for target in place.targets]
        if len(values) != sum(sizes):
            raise FormatError(f"the checkpoint has {len(values)} rows of the indexer, not {sum(sizes)}")
        return values[sum(sizes[:i]) :][: sizes[i]]
    size = values.shape[-2 if values.ndim > 1 else 0] // n
    return values[..., i * size : (i + 1) * size, :] if values.ndim > 1 else values[i * size : (i + 1) * size]


def _stacked(
    found: dict[int, tuple[str, np.ndarray]], target: str, config: HFConfig, *, transposed: bool = False
) -> Stack | Packed:
    """The matrices of all experts: expert → (name in the checkpoint, values)."""
    expected = _shape(target, config)
    parts = []
    n_parts, of_rows = _n_parts(target, config), target == _NGRAMS
    for expert in range(n_parts):
        name, values = found.get(expert, ("", np.empty(0, np.float32)))
        origin = Origin(values, transposed=transposed and values.ndim == 2)
        if expected is None or not _fits((len(found), *origin.shape), expected):
            raise FormatError(
                f"the tensor {name or target} of the checkpoint is {list(values.shape)}, and its config.json "
                f"says {'that there is none' if expected is None else list(expected[1:])} for an expert, "
                f"of which it has {n_parts}"
            )
        parts.append(origin)
        if origin.shape != parts[0].shape and not of_rows:
            raise FormatError(f"the experts of {target} have ranks that differ in the checkpoint")
    matrices = [part.values for part in parts if isinstance(part.values, Matrix)]
    if not matrices:
        return Stack(tuple(parts), of_rows)
    if len(matrices) < n_parts:
        raise FormatError(f"the checkpoint has {len(matrices)} of the {n_parts} experts of {target} in FP4")
    return Packed([matrix.blocks for matrix in matrices], [matrix.scales for matrix in matrices])


def _table(values: np.ndarray, target: str, name: str, config: HFConfig) -> Table:
    """The experts of each token. The file has 32 bits of what may have 64 here."""
    _check_fits(values.shape, _shape(target, config), name)
    if values.min() < 0 or values.max() >= config.n_expert:
        raise FormatError(
            f"the tensor {name} of the checkpoint must name experts from 0 to {config.n_expert - 1}, and has "
            f"{values.min()} to {values.max()}; download it again"
        )
    return Table(values)


def _packed(found: dict[str, np.ndarray], target: str, name: str, config: HFConfig) -> Packed:
    """The matrices of all experts of their codes and exponents."""
    blocks, scales = found["blocks"], found["scales"]
    fits = scales.ndim == 3 and blocks.shape == (*scales.shape, BLOCK_BYTES)
    if not fits or Packed(blocks, scales).shape != _shape(target, config):
        raise FormatError(
            f"the tensors of {name.rpartition('_')[0]} in MXFP4 are {list(blocks.shape)} and "
            f"{list(scales.shape)}, and config.json says {list(_shape(target, config) or ())} for all experts"
        )
    return Packed(blocks, scales)


def _of_heads(values: np.ndarray, target: str, name: str, config: HFConfig) -> Stack:
    """Of a matrix that makes keys and values of a latent vector one of both, head by head: values as they
    are, keys by input, since engines multiply the query with them."""
    latent, n_head = config.latent, config.n_head
    if latent is None or values.shape != (n_head * (latent.n_own + latent.n_value), latent.rank):
        raise FormatError(
            f"the tensor {name} of the checkpoint is {list(values.shape)}, and its config.json says otherwise"
        )
    heads = values.reshape(n_head, -1, latent.rank)
    if ".attn_k_b." in target:
        return Stack(tuple(Origin(head[: latent.n_own], transposed=True) for head in heads))
    return Stack(tuple(Origin(head[latent.n_own :]) for head in heads))


def _embedding(names: Iterable[str], config: HFConfig) -> str:
    """Return the name of the embedding. Raises UnsupportedModelError if the checkpoint has none."""
    for name in names:
        stem = checkpoint_name(name, config).removesuffix(".weight")
        if config.hf_class.tensors.get(stem) == "token_embd":
            return name
    raise UnsupportedModelError("the checkpoint lacks its embedding")


def _converted_name(target: str, dialect: Dialect) -> str:
    return target.replace(".ffn_down.", ".ffn_down_t.") if dialect == "powerinfer" else target


def _source(values: np.ndarray, target: str, name: str, config: HFConfig, dialect: Dialect) -> Origin:
    """The tensor with what its architecture asks for; `target` is its name in a plain file."""
    hf = config.hf_class
    expected = _shape(target, config)
    if config.rwkv is not None and target.startswith("blk."):
        _check_fits(values.shape, expected, name)
        return Origin(values, factors=config.rwkv.factors(_stem(target), int(target.split(".")[1])))
    if _stem(target) == "exp_probs_b" and values.ndim == 2 and len(values) == 1:
        values = values[0]
    by_input = name.endswith(hf.stored_by_input)
    _check_fits(values.shape[::-1] if by_input else values.shape, expected, name)
    stem = _stem(target)
    if by_input:
        return Origin(values, transposed=True)
    if config.delta is not None and stem in _OF_DELTA:
        return _delta_source(values, stem, config.delta)
    if config.channels is not None and stem == "ssm_a":
        return Origin(values, decays=True)
    if config.kda is not None and stem == "ssm_a":
        return Origin(values.reshape(1, 1, -1, 1), decays=True)
    if config.kda is not None and stem.startswith("ssm_conv1d_"):
        return Origin(values.reshape(1, -1, 1, config.kda.kernel))
    if config.space is not None and stem in ("ssm_a", "ssm_d", "ssm_norm"):
        rows = config.space.n_group if stem == "ssm_norm" else config.space.n_head
        return Origin(values.reshape(rows, -1), decays=stem == "ssm_a")
    if hf.turns_rows(config.architecture) and stem in ("attn_q", "attn_k"):
        return Origin(values, rows=neighbours(values.shape[0], config.head_dim))
    if stem == "attn_qkv" and hf.grouped_qkv:
        return Origin(values, rows=_ungrouped(config))
    if hf.scattered_groups and stem in ("attn_q", "attn_output"):
        groups = np.arange(config.n_head * config.head_dim).reshape(-1, config.n_head_kv, config.head_dim)
        order = groups.swapaxes(0, 1).reshape(-1)
        return Origin(values, rows=order) if stem == "attn_q" else Origin(values, columns=order)
    is_norm = stem.endswith(("_norm", "enorm", "hnorm")) or stem.startswith("ple_norm_")
    is_norm = is_norm and target.endswith("weight")
    if hf.norms_less_one and is_norm and stem not in hf.whole_norms:
        return Origin(values, plus=1.0)
    if stem == "per_layer_token_embd":
        # As many rows as there are tokens; of those without one transformers takes the first.
        ids = np.arange(config.n_vocab)
        return Origin(values, rows=np.where(ids < len(values), ids, 0))
    if stem == "ffn_gate_inp_shexp":  # files have it as a vector
        return Origin(values[0])
    ternary = config.is_ternary and target.startswith("blk.") and values.ndim == 2
    transposed = stem == "ffn_down" and values.ndim == 2 and dialect == "powerinfer"
    unit = stem == "output" and config.n_vocab == hf.unit_output_at
    return Origin(values, transposed=transposed, ternary=ternary, factors=config.factors(stem), unit=unit)


def _of_fused_qkv(values: np.ndarray, i: int, name: str, config: HFConfig) -> Origin:
    """q, k or v (i: 0, 1 or 2) of a matrix, or a bias, that has the rows of all three."""
    hf, heads, kv = config.hf_class, config.n_head * config.head_dim, config.n_head_kv * config.head_dim
    _check_fits(values.shape, (heads + 2 * kv, config.n_embd)[: values.ndim], name)
    rows = _ungrouped(config) if hf.grouped_qkv else np.arange(heads + 2 * kv)
    rows = np.split(rows, [heads, heads + kv])[i]
    if i < 2 and hf.turns_rows(config.architecture):
        rows = rows[neighbours(len(rows), config.head_dim)]
    return Origin(values, rows=rows)


def _check_fits(shape: tuple[int, ...], expected: tuple[int, ...] | None, name: str) -> None:
    """Raises FormatError unless the tensor `name` of the checkpoint is what _shape says."""
    if not _fits(shape, expected):
        raise FormatError(
            f"the tensor {name} of the checkpoint is {list(shape)}, and its config.json says "
            f"{'that there is none' if expected is None else list(expected)}"
        )


def _fits(shape: tuple[int, ...], expected: tuple[int, ...] | None) -> bool:
    """Whether a shape is the one of _shape."""
    return (
        expected is not None
        and len(shape) == len(expected)
        and all(b in (a, ANY) for a, b in zip(shape, expected, strict=True))
    )


def _shape(target: str, config: HFConfig) -> tuple[int, ...] | None:
    """What the tensor must be, outermost first; None: such a model has none of this name. ANY: the rank of a
    predictor, which config.json does not say."""
    if config.compressed is not None and ".indexer." in target:
        layer = int(target.split(".")[1])
        return _other_shapes(config, layer).get(f"indexer.{_stem(target)}")
    if ".indexer." in target or (config.rwkv is not None and target.startswith("blk.")):
        return _shape_of_its_own(target, config)
    layer = int(target.split(".")[1]) if target.startswith("blk.") else 0
    n_head_kv, head_dim = config.heads_of(layer)
    d, heads, kv = config.n_embd, config.n_head * head_dim, n_head_kv * head_dim
    row = ARCHITECTURES[config.architecture]
    matrices: dict[str, tuple[int, ...]] = {
        "token_embd": (config.n_vocab, d),
        "output": (config.n_vocab, d),
        "attn_q": (heads, d),
        "attn_k": (kv, d),
        "attn_v": (kv, d),
        "attn_qkv": (heads + 2 * kv, d),
        "attn_output": (d, heads),
        "attn_gate": (heads, d),
        "ffn_up": (config.n_ff * (2 if config.hf_class.fused_gate else 1), d),
        "ffn_down": (d, config.n_ff),
        "attn_sub_norm": (heads,),
        "ffn_sub_norm": (config.n_ff,),
        "fc1": (ANY, d),
        "fc2": (config.n_ff, ANY),
        "eh_proj": (d, 2 * d),
        **dict.fromkeys(("embed_tokens", "shared_head_head"), (config.n_vocab, d)),
    }
    if config.n_ff_of_layers is not None and target.startswith("blk."):
        n_ff = config.n_ff_of_layers[layer]
        matrices |= {"ffn_up": (n_ff, d), "ffn_down": (d, n_ff)}
    if row.gated and not config.hf_class.fused_gate:
        matrices["ffn_gate"] = matrices["ffn_up"]
    matrices |= _expert_shapes(config)
    if (latent := config.latent) is not None:
        matrices |= {
            "attn_q_a": (latent.rank_q, d),
            "attn_q_b": (heads, latent.rank_q),
            "attn_kv_a_mqa": (latent.rank + latent.n_rot, d),
            "attn_kv_b": (config.n_head * (latent.n_own + latent.n_value), latent.rank),
            "attn_output": (d, config.n_head * latent.n_value),
        }
    elif config.conv_kernel:
        matrices |= {"in_proj": (3 * d, d), "conv": (d, config.conv_kernel), "out_proj": (d, d)}
    if config.hf_class.is_encoder:
        n_types = integer(config.raw, "type_vocab_size", 1, high=1 << 16)
        matrices |= {"token_types": (n_types, d), "cls": (d, d), "output": (ANY, d), "norm": (d,)}
    if row.first_position is not None:
        matrices["position_embd"] = (config.n_ctx + row.first_position, d)
    if (delta := config.delta) is not None:
        width = 2 * delta.of_keys + delta.of_values
        matrices |= {
            "attn_q": (2 * heads, d),
            "attn_qkv": (width if delta.tiled else width + delta.of_values, d),
            "attn_gate": (delta.of_values if delta.tiled else width + delta.of_values, d),
            "ssm_ba": (2 * delta.n_head, d),
            "ssm_beta": (delta.n_head, d),
            "ssm_alpha": (delta.n_head, d),
            "ssm_conv1d": (width, delta.kernel),
            "ssm_out": (d, delta.of_values),
        }
    matrices |= _other_shapes(config, layer)
    stem, kind = _stem(target), target.rpartition(".")[2]
    if delta is not None and stem in ("ssm_a", "ssm_dt", "ssm_norm"):
        return (delta.dim_v if stem == "ssm_norm" else delta.n_head,)
    if stem in matrices:
        shape = matrices[stem]
        of_kind = {"bias": shape[:-1], "scale": shape[:1] if stem == "ffn_down_exps" else shape[1:]}
        return of_kind.get(kind, shape)
    if stem in ("attn_sinks", "exp_probs_b"):
        return (config.n_head if stem == "attn_sinks" else config.n_expert,)
    if latent is not None and stem in ("attn_q_a_norm", "attn_kv_a_norm"):
        return (latent.rank_q if stem == "attn_q_a_norm" else latent.rank,)
    if stem in ("attn_q_norm", "attn_k_norm"):
        return _shape_of_head_norm(heads if stem == "attn_q_norm" else kv, head_dim, config)
    return None if kind == "bias" and row.norm == "rms" else (d,)


def _expert_shapes(config: HFConfig) -> dict[str, tuple[int, ...]]:
    """Of the tensors of experts, and of what all tokens share beside them."""
    e, ff, shared, d = config.n_expert, config.n_ff_expert, config.n_ff_shared, config.n_embd
    if not e:
        return {}
    return {
        "ffn_gate_inp": (e, d),
        **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (e, ff, d)),
        "ffn_gate_up_exps": (e, 2 * ff, d),
        "ffn_down_exps": (e, d, ff),
        "ffn_gate_inp_shexp": (1, d),
        "fc1_exps": (e, ANY, d),
        "fc2_exps": (e, ff, ANY),
        "ffn_gate_shexp": (shared, d),
        "ffn_up_shexp": (shared * (2 if config.hf_class.fused_gate else 1), d),
        "ffn_down_shexp": (d, shared),
    }


def _shape_of_head_norm(width: int, head_dim: int, config: HFConfig) -> tuple[int, ...] | None:
    """As _shape, of the norm of queries or keys."""
    row = ARCHITECTURES[config.architecture]
    if row.norm == "layer":
        return width // head_dim, head_dim
    return {"head": (head_dim,), "width": (width,), None: None}[row.qk_norm]


def _other_shapes(config: HFConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Of the tensors that only models with residual streams, with state spaces or with Kimi's delta nets
    have."""
    if config.altup is not None:
        return _altup_shapes(config.altup, config)
    if config.streams is not None:
        return config.streams.shapes(config.n_embd)
    if config.compressed is not None:
        return config.compressed.shapes(layer, (config.n_vocab, config.n_expert_used))
    if config.kda is not None:
        return _channel_delta_shapes(config.kda, config.n_embd, config.kda_layers[layer])
    if config.channels is not None:
        return _channel_space_shapes(config.channels, config.n_embd)
    if (own := config.window_heads) is not None:
        of_layers = own.width * config.n_layer
        return {
            "per_layer_token_embd": (own.n_vocab, of_layers),
            "per_layer_model_proj": (of_layers, config.n_embd),
            "per_layer_proj_norm": (own.width,),
            "inp_gate": (own.width, config.n_embd),
            "proj": (config.n_embd, own.width),
            "layer_output_scale": (1,),
        }
    return {} if config.space is None else _state_space_shapes(config.space, config)


def _channel_delta_shapes(mixer: DeltaMixer, d: int, own: bool) -> dict[str, tuple[int, ...]]:
    """Of the tensors of Kimi's delta nets. own: the layer has one, and its matrices are not MLA's."""
    n, dim, width = mixer.n_head, mixer.dim_k, mixer.of_values
    shapes: dict[str, tuple[int, ...]] = {
        **{f"ssm_conv1d_{part}": (width, mixer.kernel) for part in "qkv"},
        **dict.fromkeys(("ssm_f_a", "ssm_g_a"), (dim, d)),
        **dict.fromkeys(("ssm_f_b", "ssm_g_b"), (width, dim)),
        "ssm_dt": (width, 1),  # its bias, that is
        "ssm_a": (n, 1),
        "ssm_beta": (n, d),
        "ssm_norm": (dim,),
    }
    if own:
        shapes |= dict.fromkeys(("attn_q", "attn_k", "attn_v"), (width, d)) | {"attn_output": (d, width)}
    return shapes


def _channel_space_shapes(mixer: ChannelMixer, d: int) -> dict[str, tuple[int, ...]]:
    """Of the tensors of Mamba's state spaces."""
    n, dim_k, rank = mixer.inner, mixer.dim_k, mixer.rank
    return {
        "ssm_in": (2 * n, d),
        "ssm_conv1d": (n, mixer.kernel),
        "ssm_x": (rank + 2 * dim_k, n),
        "ssm_dt": (n, rank),
        "ssm_a": (n, dim_k),
        "ssm_d": (n,),
        "ssm_out": (d, n),
        "ssm_dt_norm": (rank,),
        "ssm_b_norm": (dim_k,),
        "ssm_c_norm": (dim_k,),
    }


def _state_space_shapes(space: StateSpaceMixer, config: HFConfig) -> dict[str, tuple[int, ...]]:
    """Of the tensors of state spaces, and of those beside them that only such models have."""
    d, e, ff, z = config.n_embd, config.n_expert, config.n_ff_expert, config.n_latent
    shapes: dict[str, tuple[int, ...]] = {
        "ssm_in": (space.of_values + space.width + space.n_head, d),
        "ssm_conv1d": (space.width, space.kernel),
        "ssm_dt": (space.n_head, 1),  # its bias, that is
        "ssm_a": (space.n_head,),
        "ssm_d": (space.n_head,),
        "ssm_norm": (space.of_values,),
        "ssm_out": (d, space.of_values),
    }
    if z:
        shapes |= {"ffn_latent_down": (z, d), "ffn_latent_up": (d, z)}
        shapes |= {"ffn_up_exps": (e, ff, z), "ffn_down_exps": (e, z, ff)}
    return shapes


def _altup_shapes(altup: HFAltUp, config: HFConfig) -> dict[str, tuple[int, ...]]:
    """Of the tensors that only Gemma 3n has."""
    d, n, width, of_layers = config.n_embd, altup.n_streams, altup.width, altup.width * config.n_layer
    return {
        "per_layer_token_embd": (altup.n_vocab, of_layers),
        "per_layer_model_proj": (of_layers, d),
        "per_layer_proj_norm": (width,),
        **dict.fromkeys(("altup_proj", "altup_unembd_proj"), (n - 1, d, d)),
        "altup_correct_coef": (n, n),
        "altup_predict_coef": (n * n, n),
        "altup_router": (n, d),
        "laurel_l": (altup.rank, d),
        "laurel_r": (d, altup.rank),
        "inp_gate": (width, d),
        "proj": (d, width),
    }


def _shape_of_its_own(target: str, config: HFConfig) -> tuple[int, ...] | None:
    """As _shape, of a layer of RWKV or of an indexer."""
    if config.rwkv is not None:
        layer = int(target.split(".")[1])
        return config.rwkv.shape(_stem(target), layer, config.n_ff) or (config.n_embd,)
    if config.streams is not None:
        return config.streams.shapes(config.n_embd).get(_stem(target))
    latent = config.latent
    if not config.hf_class.indexed or latent is None:
        return None
    n_head, dim = (integer(config.raw, entry, high=1 << 14) for entry in ("index_n_heads", "index_head_dim"))
    shapes = {
        "attn_q_b": (n_head * dim, latent.rank_q),
        "attn_k": (dim, config.n_embd),
        "k_norm": (dim,),
        "proj": (n_head, config.n_embd),
    }
    return shapes.get(_stem(target))


def _stem(target: str) -> str:
    """The name of a layer's tensor, without what kind it is."""
    parts = target.split(".")
    return parts[-1] if len(parts) == len(("blk", "0", "name")) and parts[0] == "blk" else parts[-2]


def _is_grouped(target: str, config: HFConfig) -> bool:
    """Whether the checkpoint has a matrix together with others, the rows of each key's heads side by side."""
    grouped = config.delta is not None and not config.delta.tiled
    return grouped and _stem(target) in ("attn_qkv", "attn_gate")


def _delta_source(values: np.ndarray, stem: str, delta: DeltaMixer) -> Origin:
    """A tensor of a gated delta net, its rows (of ssm_out the columns) in the order of the file."""
    times, keys = delta.n_head // delta.n_head_k, 2 * delta.of_keys
    if not delta.tiled:  # of each key its query, itself, its values, their gates
        if stem not in ("attn_qkv", "attn_gate"):
            return Origin(values, decays=stem == "ssm_a")
        rows = np.arange(len(values)).reshape(delta.n_head_k, -1)
        q, k, v, z = np.split(rows, np.cumsum([delta.dim_k, delta.dim_k, times * delta.dim_v]), axis=1)
        parts = (z,) if stem == "attn_gate" else (q, k, v)
        return Origin(values, rows=np.concatenate([part.reshape(-1) for part in parts]))

    def tiled(n: int, first: int = 0) -> np.ndarray:
        """Heads of n channels behind the first: of all keys the first each, then the second, ..."""
        heads = np.arange(delta.n_head * n).reshape(delta.n_head_k, times, n)
        return np.append(np.arange(first), first + heads.swapaxes(0, 1).reshape(-1))

    if stem == "ssm_out":
        return Origin(values, columns=tiled(delta.dim_v))
    if stem in ("attn_qkv", "ssm_conv1d"):
        return Origin(values, rows=tiled(delta.dim_v, keys))
    rows = tiled(delta.dim_v if stem == "attn_gate" else 1)
    return Origin(values, rows=rows, decays=stem == "ssm_a")


def _ungrouped(config: HFConfig) -> np.ndarray:
    """Rows of Falcon's fused matrix, all q, all k, all v, where they lie by group."""
    per_group = config.n_head // config.n_head_kv
    rows = np.arange(config.n_head_kv * (per_group + 2) * config.head_dim)
    groups = rows.reshape(config.n_head_kv, per_group + 2, config.head_dim)
    return np.concatenate([part.reshape(-1) for part in (groups[:, :-2], groups[:, -2], groups[:, -1])])


# ---- predictors and the order of neurons ---------------------------------------------------------------


class _Predictors:
    """A folder of predictors: model_<layer>.pt with fc1.weight and fc2.weight, and config.json."""

    def __init__(self, folder: Path, config: HFConfig) -> None:
        settings = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
        value = settings.get("sparse_threshold", 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise FormatError(f"sparse_threshold in {folder / 'config.json'} must be a number, not {value!r}")
        self.threshold = float(value)
        self.sources: dict[str, Origin] = {}
        for layer in range(config.n_layer):
            path = folder / _PREDICTOR_FILE.format(layer)
            if not path.exists():
                raise FormatError(f"{folder} lacks the predictor of layer {layer}, {path.name}")
            tensors = map_torch(path)[0]
            rank = len(tensors["fc1.weight"]) if tensors.get("fc1.weight", np.empty(0)).ndim == 2 else 0
            expected = {"fc1.weight": (rank, config.n_embd), "fc2.weight": (config.n_ff, rank)}
            found = {name: values.shape for name, values in tensors.items()}
            if found != expected:
                raise FormatError(
                    f"{path} holds {found}, and a predictor of layer {layer} is fc1.weight [rank, "
                    f"{config.n_embd}] and fc2.weight [{config.n_ff}, rank]"
                )
            for name in expected:
                self.sources[f"blk.{layer}.{name}"] = Origin(tensors[name])


def _checked_orders(profile: Profile, config: HFConfig) -> list[np.ndarray]:
    if config.n_expert:
        raise UnsupportedModelError("the neurons of experts cannot be put in order of hotness")
    widths = {len(counts) for counts in profile.counts}
    if len(profile.counts) != config.n_layer or widths != {config.n_ff}:
        raise InvalidRequestError(
            f"the profile has {len(profile.counts)} layers of {'/'.join(map(str, sorted(widths)))} neurons, "
            f"and the checkpoint {config.n_layer} of {config.n_ff}"
        )
    return neuron_orders(profile)


def _ordered(name: str, source: Source, orders: list[np.ndarray]) -> Source:
    """The same with its neurons in the new order."""
    place = neurons_of(name)
    if place is None or place[0] >= len(orders) or not isinstance(source, Origin):
        return source
    layer, by_column = place
    if by_column:
        return replace(source, columns=orders[layer])
    return replace(source, rows=order_of_rows(orders[layer], source.shape[0]))


def _save_profile(profile: Profile, orders: list[np.ndarray], out: Path) -> None:
    with open_gguf(out) as written:
        profile.permuted(orders, fingerprint(written)).save(profile_path(out))
