"""Converts a Hugging Face checkpoint (config.json, tensors, tokenizer) to a GGUF file, plain or PowerInfer's.

Neither torch nor transformers is needed. Tensors stream in pieces of a few megabytes, whatever the size of
the model, and the file appears under its name only when it is complete. Anything unknown raises an error and
is never guessed: an architecture, a RoPE scaling, an activation, a tensor, a shape, a pre-tokenizer.

A tensor is reordered by indices (`Origin`), so that every piece is read once, in its final order:

- Hugging Face's llama rotates the halves of a head (i, i + n/2), GGUF's rotates neighbours (2i, 2i + 1). Rows
  of q and k are permuted for the architectures whose row in `ARCHITECTURES` has rope="norm", unless the
  checkpoint's class rotates neighbours too.
- Falcon's fused rows are in groups (queries of a KV head, its key, its value); GGUF has all q, all k, all v.
- Some norms are stored minus one.
- The parts of a family (`FamilyPart`) handle the rest: state spaces, latent attention, ternary matrices.
- In PowerInfer's dialect the down projection is transposed, a row per neuron, and there are predictors.
- With a profile, neurons are in order of hotness (convert/reorder.py).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hotset.convert import hf_nextn
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
from hotset.convert.hf_rope import neighbours
from hotset.convert.hf_tokenizer import tokenizer_keys
from hotset.convert.hf_values import integer
from hotset.convert.mxfp4 import BLOCK_BYTES, Matrix, Packed
from hotset.convert.reorder import add_order, neuron_orders, neurons_of, order_of_rows
from hotset.convert.sources import Origin, Source, Stack, Table
from hotset.errors import FormatError, HotsetError, InvalidRequestError, UnsupportedModelError
from hotset.files import check_output
from hotset.formats.gguf import Dialect, GGUFWriter, PlannedFile, TensorInfo, open_gguf
from hotset.formats.quants import GGMLType
from hotset.formats.requantize import PlannedTensor, assign_types, target_of, typed_model
from hotset.formats.torch_file import map_torch
from hotset.model.activation import DRELU, RELU
from hotset.model.architectures import POWERINFER_ARCHITECTURES
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe, describe_nextn
from hotset.model.keys import PREDICTOR_MASKS_KEY, SPARSE_THRESHOLD_KEY
from hotset.model.predictor import Predictor
from hotset.sparsity.profile import profile_path
from hotset.sparsity.sidecar import fingerprint
from hotset.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.reporter import Reporter
    from hotset.sparsity.profile import Profile

_PACKED = (".blocks", ".scales")  # of one matrix in MXFP4
_WHOLE_NAMES = (".", ".bias", ".weight", ".scale", *_PACKED)  # ends of targets that need no kind
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
# Tensors of the other parts of models that see.
_OTHER_PARTS = re.compile(
    r"(model\.)?((visual|vit|vision_tower|vision_model|audio_tower|embed_vision|embed_audio|sam_model|qwen2_model|multi_modal_projector|projector|connector|mlp_AR|vision_adapter|vision_projection)\..*"
    r"|image_newline|view_seperator|mlp1\..*)"
)
# Tensors that were trained with encoders and do not affect their hidden states.
_OTHER_HEADS = re.compile(
    r"((bert|roberta|model)\.)?(pooler|head|decoder|classifier|lm_head|cls\.predictions|cls\.seq_relationship)\..*"
)


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    n_always: leading neurons of each layer that need no prediction, with a profile. use: the subcommand for
    the file.
    """

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
    """Write the checkpoint in the folder `src_dir` as a GGUF file.

    type, tensor_types: of the matrices, as for `requantize.types_of`. Vectors are F32, and MXFP4 of the
    checkpoint remains MXFP4 unless tensor_types names it. predictors: a folder of model_<layer>.pt
    with fc1.weight [rank, n_embd] and fc2.weight [n_ff, rank], and perhaps a config.json with
    sparse_threshold; the file is then in PowerInfer's dialect. profile: neurons are written in its order, and
    it is copied next to the file. It must be of this model, which cannot be checked. activation: overrides
    config.json. A checkpoint without tokenizer files gives a file without tokenizer. Raises
    ModelNotFoundError, FormatError, UnsupportedModelError, TokenizerError or InvalidRequestError, and then
    leaves no file.
    """
    check_output(out_path)
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
    keys = _keys(config, architecture, folder, masked=masked)
    keys |= {f"{architecture}.{entry}": value for entry, value in of_texts.items()} | tokenizer
    for key, value in keys.items():
        writer.add(key, value)
    n_always = None
    if profile is not None and orders is not None:
        n_always = add_order(writer, profile, orders)

    for tensor_name, divisors in config.rope.divisors().items():
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
    """Return the type of a tensor without a requested type."""
    return GGMLType.I32 if isinstance(source, Table) else GGMLType.F32


def _opened(src: Path, config: HFConfig) -> Checkpoint:
    """Open the tensors. Complete `config` with facts of tensors and other files."""
    if (n_tokens := longest_text(src)) is not None:
        config.limit_positions(n_tokens)
    checkpoint, hf = Checkpoint(src, config.fp8_block), config.hf_class
    if config.row.nextn is not None:
        config.n_nextn = hf_nextn.count(
            checkpoint.tensors, hf.layers, config.n_layer, in_parts=_in_parts(config)
        )
    named = {checkpoint_name(name, config): values for name, values in checkpoint.tensors.items()}
    for part in config.parts:
        part.learn(named)
    return checkpoint


def _tokenizer(src: Path, config: HFConfig, sources: dict[str, Source]) -> dict[str, Any]:
    """Return the keys of the tokenizer, which has a token for each row of the embedding."""
    if "token_embd.weight" not in sources:
        raise UnsupportedModelError("the checkpoint lacks its embedding")
    return tokenizer_keys(src, config.raw)


def _answering(sources: dict[str, Source], ids: list[int]) -> dict[str, Source]:
    """Return the tensors of a reranker, whose output has only the rows of the tokens that are scores."""
    output = sources.get("output.weight", sources["token_embd.weight"])
    assert isinstance(output, Origin)
    others = {name: source for name, source in sources.items() if name != "output.weight"}
    return others | {"cls.output.weight": Origin(output.values, rows=np.array(ids))}


def _keys(config: HFConfig, architecture: str, folder: _Predictors | None, *, masked: bool) -> dict[str, Any]:
    """Return the keys of the model. masked: it has predictors whose mask is part of it."""
    n_positions = config.n_ctx
    if folder is not None:  # PowerInfer's engine sizes position_embd by this key
        n_positions += config.row.first_position or 0
    keys = config.keys(architecture, n_positions)
    if folder is not None:
        keys[SPARSE_THRESHOLD_KEY] = folder.threshold
    if masked:  # the mask is round(sigmoid(score)), so it is set for scores above 0
        keys |= {PREDICTOR_MASKS_KEY: True, SPARSE_THRESHOLD_KEY: float(np.finfo(np.float32).tiny)}
    for part in config.parts:
        keys |= part.tensor_keys(config.architecture)
    return keys


def _in_parts(config: HFConfig) -> bool:
    """Return whether each layer is attention or an FFN."""
    return any(part.in_parts for part in config.parts)


def checkpoint_name(name: str, config: HFConfig) -> str:
    """Return the full name of a tensor of the text model."""
    return config.hf_class.full_name(config.hf_class.text_name(name))


def _pieces(source: Source, type: GGMLType) -> Iterator[np.ndarray]:
    """Yield the tensor in order, as floats, or as blocks of the type without decoding."""
    if isinstance(source, Packed) and type != GGMLType.MXFP4:
        return source.floats()
    return source.pieces()


def _check_loads(planned: PlannedFile) -> None:
    """Raise the errors of loading the file: a missing tensor, a number out of its range, a bad tokenizer."""
    file = cast("GGUFFile", planned)  # it has the attributes that are read
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
    """Return PowerInfer's name for such a model. Raises UnsupportedModelError if it has none."""
    if config.n_expert:
        raise UnsupportedModelError("PowerInfer's format has no experts")
    architecture = config.architecture
    if architecture == "llama" and config.activation == DRELU:
        architecture = "bamboo"  # the same model except for the activation
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
    """The destination of a checkpoint's tensor. layer: -1 outside the layers. expert: -1 for no expert.

    targets: names in the file; if there are several, each gets an equal part of the tensor.
    """

    layer: int
    targets: tuple[str, ...]
    expert: int = -1


def _place_of(name: str, config: HFConfig) -> _Place:
    hf = config.hf_class
    name = hf.text_name(hf_nextn.as_layer(name, hf.layers, config.n_layer, in_parts=_in_parts(config)))
    full = hf.full_name(name)
    stem, _, kind = full.rpartition(".")
    if kind not in ("weight", "bias"):  # parameters without a matrix have no kind
        stem, kind = full, "weight"
    numbered = re.fullmatch(r"(.+)\.([0-9]{1,5})", stem)
    if numbered and (several := hf.outer_target(f"{numbered[1]}.*")) is not None:
        return _Place(-1, (f"{several}.{kind}",), int(numbered[2]))
    if (found := hf.outer_target(stem)) is not None:
        if found.endswith(".weight"):  # a parameter without a matrix
            return _Place(-1, (found,))
        if stem != full:
            return _Place(-1, (f"{found}.{kind}",))
    match = re.fullmatch(re.escape(hf.layers) + r"\.([0-9]{1,5})\.(.+)", stem)
    if match and (layer := int(match[1])) < config.n_layer + config.n_nextn:
        behind = hf_nextn.NAMES if layer >= config.n_layer else {}
        part = re.fullmatch(r"(.+\.shard_)([0-9]{1,5})", match[2])
        if part and (several := hf.target(f"{part[1]}*")) is not None:  # it belongs to no layer
            return _Place(-1, (f"{several}.{kind}",), int(part[2]))
        number = re.search(r"\.(?:experts|norms)\.([0-9]{1,5})(?=\.|$)", match[2])
        inside = match[2] if number is None else f"{match[2][: number.start(1)]}*{match[2][number.end(1) :]}"
        if hf.target(f"{inside}.{kind}") is not None:
            inside = f"{inside}.{kind}"
        if (found := hf.target(inside) or behind.get(inside)) is not None:
            found, _, own = found.partition("#")
            expert = int(own or (-1 if number is None else number[1]))
            targets = found.split()
            for family in config.parts:
                targets = family.targets(targets, layer)
            names = (t.rstrip(".") if t.endswith(_WHOLE_NAMES) else f"{t}.{kind}" for t in targets)
            return _Place(layer, tuple(f"blk.{layer}.{target}" for target in names), expert)
    raise UnsupportedModelError(f"the checkpoint has a tensor that is not known: {name[:200]}")


def _sources(checkpoint: Checkpoint, config: HFConfig, dialect: Dialect) -> Iterator[tuple[str, Source]]:
    """Yield (name in the file, its source), layer by layer. Raises an error for a tensor without a place."""
    names, tied = _names(checkpoint, config)
    places = sorted((_place_of(name, config), name) for name in names)
    counted = Counter((target, place.expert) for place, _ in places for target in place.targets)
    stacks: dict[str, dict[int, np.ndarray]] = {}
    packed: dict[str, dict[str, np.ndarray]] = {}
    for place, name in places:
        values = checkpoint.tensors[name]
        for i, target in enumerate(place.targets):
            if counted[target, place.expert] > 1 or (place.expert >= 0 and counted[target, -1]):
                raise FormatError(f"the checkpoint has two tensors for {target}, one of them {name}")
            stem, _, kind = target.rpartition(".")
            with _fitting(name, values):
                if f".{kind}" in _PACKED:
                    found = packed.setdefault(stem, {})
                    found[kind] = values[:, i :: len(place.targets)] if values.ndim > 1 else values
                    if len(found) == len(_PACKED):
                        if counted[f"{stem}.weight", -1]:
                            raise FormatError(f"the checkpoint has {stem}.weight twice, once as {name}")
                        yield f"{stem}.weight", _packed(packed.pop(stem), name)
                elif place.expert >= 0:
                    stacks.setdefault(target, {})[place.expert] = _part(values, i, place, config)
                    if len(stacks[target]) == _n_parts(target, config):
                        yield target, _stacked(stacks.pop(target), target, config)
                elif "_exps." in target and kind != "scale":
                    yield target, _of_all(_part(values, i, place, config), target, config)
                elif [_stem(target) for target in place.targets] == ["attn_q", "attn_k", "attn_v"]:
                    yield target, _of_fused_qkv(values, i, config)
                else:
                    part = _part(values, i, place, config)
                    yield _converted_name(target, dialect), _source(part, target, name, config, dialect)
    for target, parts in stacks.items():
        _stacked(parts, target, config)
    for stem, kinds in packed.items():
        raise FormatError(f"the checkpoint has {stem} in MXFP4 and only its {next(iter(kinds))}")
    for family in config.parts:
        yield from family.extra().items()
    alone = not all(family.ties for family in config.parts)
    if tied and (alone or (dialect == "powerinfer" and config.architecture != "opt")):
        # PowerInfer's engine ties only OPT's output. With multipliers the output differs from the embedding.
        values = checkpoint.tensors[_embedding(names, config)]
        yield "output.weight", _source(values, "output.weight", _OUTPUTS[0], config, dialect)


@contextmanager
def _fitting(name: str, values: np.ndarray) -> Iterator[None]:
    """Raise FormatError if a tensor of the checkpoint cannot be reordered as its class requires."""
    try:
        yield
    except HotsetError:
        raise
    except (IndexError, TypeError, ValueError):
        raise FormatError(
            f"the tensor {name} of the checkpoint is {list(values.shape)}, which its config.json excludes"
        ) from None


def _is_tied(checkpoint: Checkpoint, config: HFConfig, output: str | None) -> bool:
    """Return whether the embedding is also the output matrix.

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
    """Return the tensors that become part of the file, and whether the embedding is also the output.

    Raises UnsupportedModelError if one of them has a type that hotset does not read, or the output is
    missing.
    """
    hf = config.hf_class
    output = next((name for name in _OUTPUTS if name in checkpoint.tensors), None)
    tied = _is_tied(checkpoint, config, output)
    if not tied and output is None and not hf.is_encoder:
        raise UnsupportedModelError(f"the checkpoint lacks {_OUTPUTS[0]}, and its config does not tie it")
    extra = tuple(f"{hf.layers}.{config.n_layer + i}." for i in range(config.n_nextn, config.n_extra_layers))
    every = (*checkpoint.tensors, *checkpoint.unread)
    found = [n for n in every if not _BUFFERS.fullmatch(n) and not n.startswith(extra)]
    if not config.n_nextn:
        found = [n for n in found if not _NEXTN_MODULE.fullmatch(n)]
    if hf.is_encoder:
        prefix = hf.layers.partition(".")[0] + "."
        stems = {n: n.rpartition(".")[0] for n in found}
        known = hf.tensors.keys() | {name.removeprefix(prefix) for name in hf.tensors}
        found = [n for n in found if stems[n] in known or not _OTHER_HEADS.fullmatch(n)]
    if hf.sees:
        found = [n for n in found if not _OTHER_PARTS.fullmatch(n)]
    found = [n for n in found if all(part.reads(checkpoint_name(n, config)) for part in config.parts)]
    found = [n for n in found if not (tied and n == output)]
    checkpoint.check_readable(found)
    return found, tied


def _n_parts(target: str, config: HFConfig) -> int:
    """Return the number of the checkpoint's tensors that become one tensor.

    It is one per expert, one per head of a norm, or as a part of the family decides.
    """
    stem = _stem(target)
    for part in config.parts:
        if (own := part.n_parts(stem)) is not None:
            return own
    if stem in ("attn_q_norm", "attn_k_norm"):
        return config.n_head if stem == "attn_q_norm" else config.n_head_kv
    return config.n_expert


def _part(values: np.ndarray, i: int, place: _Place, config: HFConfig) -> np.ndarray:
    """Return the i-th matrix of a place whose matrices share one tensor, or one tensor per expert."""
    stems = [_stem(target) for target in place.targets]
    if stems == ["position_embd"]:
        return values[config.n_unused_positions : len(values) - config.n_cut_positions]
    if values.ndim == 3 and values.shape[1] == 1:  # a depthwise convolution
        values = values[:, 0]
    for part in config.parts:
        if (own := part.split(values, i, stems)) is not None:
            return own
    if len(stems) == 1:
        return values
    size = values.shape[-2 if values.ndim > 1 else 0] // len(stems)
    return values[..., i * size : (i + 1) * size, :] if values.ndim > 1 else values[i * size : (i + 1) * size]


def _of_all(values: np.ndarray, target: str, config: HFConfig) -> Stack | Packed:
    """Return the matrices of all experts, which are in one tensor."""
    if values.ndim < 2 or len(values) != config.n_expert:
        raise ValueError(f"{values.shape} of {config.n_expert} experts")
    return _stacked(dict(enumerate(values)), target, config)


def _stacked(found: dict[int, np.ndarray], target: str, config: HFConfig) -> Stack | Packed:
    """Return the matrices of all experts. found: expert → values in the checkpoint."""
    n_parts, of_rows = _n_parts(target, config), target == "per_layer_token_embd.weight"
    kind = "experts" if "_exps." in target else "parts"
    if found.keys() != set(range(n_parts)):
        raise FormatError(f"the checkpoint has {target} of {len(found)} {kind}, not of {n_parts}")
    parts = [Origin(values) for _, values in sorted(found.items())]
    if len({part.shape[of_rows:] for part in parts}) > 1 or not parts[0].shape:
        raise FormatError(f"the {kind} of {target} have shapes that differ in the checkpoint")
    matrices = [part.values for part in parts if isinstance(part.values, Matrix)]
    if not matrices:
        return Stack(tuple(parts), of_rows)
    if len(matrices) < n_parts:
        raise FormatError(f"the checkpoint has {len(matrices)} of the {n_parts} experts of {target} in FP4")
    return Packed([matrix.blocks for matrix in matrices], [matrix.scales for matrix in matrices])


def _packed(found: dict[str, np.ndarray], name: str) -> Packed:
    """Return the matrices of all experts from their codes and exponents."""
    blocks, scales = found["blocks"], found["scales"]
    if scales.ndim != 3 or blocks.shape != (*scales.shape, BLOCK_BYTES):
        raise FormatError(
            f"the tensors of {name.rpartition('_')[0]} in MXFP4 are {list(blocks.shape)} and "
            f"{list(scales.shape)}, not {BLOCK_BYTES} bytes for each scale of each expert"
        )
    return Packed(blocks, scales)


def _embedding(names: Iterable[str], config: HFConfig) -> str:
    """Return the name of the embedding. Raises UnsupportedModelError if the checkpoint has none."""
    for name in names:
        stem = checkpoint_name(name, config).removesuffix(".weight")
        if config.hf_class.outer_target(stem) == "token_embd":
            return name
    raise UnsupportedModelError("the checkpoint lacks its embedding")


def _converted_name(target: str, dialect: Dialect) -> str:
    return target.replace(".ffn_down.", ".ffn_down_t.") if dialect == "powerinfer" else target


def _source(values: np.ndarray, target: str, name: str, config: HFConfig, dialect: Dialect) -> Source:
    """Return the source of a tensor, changed as its family requires. target: its name in a plain file."""
    _check_shape(values, target, name, config)
    hf, stem = config.hf_class, _stem(target)
    layer = int(target.split(".")[1]) if target.startswith("blk.") else -1
    for part in config.parts:
        if (own := part.source(values, stem, layer)) is not None:
            return own
    if stem == "exp_probs_b" and values.ndim == 2 and len(values) == 1:
        values = values[0]
    if name.endswith(hf.stored_by_input):
        return Origin(values, transposed=True)
    if stem in ("attn_q", "attn_k") and hf.turns_rows(config.architecture):
        return Origin(values, rows=neighbours(len(values), config.head_dim))
    if stem == "attn_qkv" and hf.grouped_qkv:
        return Origin.reordered(values, _ungrouped(config))
    is_norm = stem.endswith(("_norm", "enorm", "hnorm")) or stem.startswith("ple_norm_")
    if hf.norms_less_one and is_norm and target.endswith("weight") and stem not in hf.whole_norms:
        return Origin(values, plus=1.0)
    if stem == "ffn_gate_inp_shexp":  # a vector in GGUF files
        return Origin(values.reshape(values.shape[1]))
    return Origin(values, transposed=stem == "ffn_down" and values.ndim == 2 and dialect == "powerinfer")


def _of_fused_qkv(values: np.ndarray, i: int, config: HFConfig) -> Origin:
    """Return q, k or v (i: 0, 1 or 2) of a matrix or bias with the rows of all three."""
    hf, heads, kv = config.hf_class, config.n_head * config.head_dim, config.n_head_kv * config.head_dim
    if len(values) != heads + 2 * kv:
        raise ValueError(f"{len(values)} rows, not {heads + 2 * kv}")
    rows = _ungrouped(config) if hf.grouped_qkv else np.arange(heads + 2 * kv)
    rows = np.split(rows, [heads, heads + kv])[i]
    if i < 2 and hf.turns_rows(config.architecture):
        rows = rows[neighbours(len(rows), config.head_dim)]
    return Origin(values, rows=rows)


def _stem(target: str) -> str:
    """Return the name of a tensor without its layer, "weight" or "bias"."""
    parts = target.split(".")[2 if target.startswith("blk.") else 0 :]
    return ".".join(parts[:-1] or parts)


def _check_shape(values: np.ndarray, target: str, name: str, config: HFConfig) -> None:
    """Raise FormatError if a tensor that a loader does not check has another shape than in config.json."""
    d, n, stem = config.n_embd, len(values), _stem(target)
    if target.startswith("blk."):
        shapes = [part.shapes(int(target.split(".")[1])) for part in config.parts]
        expected = next((found[stem] for found in shapes if stem in found), None)
    else:
        n_positions = config.n_ctx + (config.row.first_position or 0)
        rows = {"token_embd": config.n_vocab, "position_embd": n_positions, "cls": d, "cls.output": n}
        if stem == "token_types":
            rows[stem] = integer(config.raw, "type_vocab_size", 1, high=1 << 16)
        expected = (rows[stem], d)[: 1 if target.endswith("bias") else 2] if stem in rows else None
        if stem == "cls.norm":
            expected = (d,)
    if expected is not None and values.shape != expected:
        raise FormatError(
            f"the tensor {name} of the checkpoint is {list(values.shape)}, and its config.json says "
            f"{list(expected)}"
        )


def _ungrouped(config: HFConfig) -> np.ndarray:
    """Return the rows of Falcon's fused matrix, stored by group, in the order all q, all k, all v."""
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
    """Return the source with its neurons in the new order."""
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
