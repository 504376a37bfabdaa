"""Rewriting of a model with the neurons of each layer in order of hotness.

The order of neurons means nothing to a model: any permutation, applied to everything that refers to them,
leaves the same function. In order of hotness, neurons that fire nearly always are at the beginning of each
matrix. They stream without prediction (key `hotset.n_always`), and gathered neurons are close together.

These refer to neurons: rows of ffn_gate, ffn_up, fc2 and ffn_down_t, biases of ffn_gate and ffn_up,
ffn_sub_norm, columns of ffn_down, and next to the file its activation counts and its GPU index. Sidecars are
built again, since they belong to the old file. Columns of a quantised ffn_down cannot move: a block of
32 neurons shares one scale.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.files import check_output
from hotset.formats import powerinfer
from hotset.formats.bundle import KEYS, NAMES_KEY, PAGE, keys_of
from hotset.formats.gguf import DEFAULT_ALIGNMENT, GGUFWriter, ValueType, copy_metadata, open_gguf
from hotset.formats.quants import TYPES, GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.sparsity import sidecar
from hotset.sparsity.bundles import bundles_of
from hotset.sparsity.predictors import N_ALWAYS_KEY
from hotset.sparsity.profile import Profile, profile_path

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, TensorInfo
    from hotset.reporter import Reporter

# A gathered byte costs about as much as 1.6 streamed ones (docs/contributing/internals/pitfalls.md): from
# this frequency on, reading a neuron for every token, at the head, is cheaper than a predicted gather.
HEAD_FREQUENCY = 0.6
ORDER_KEY = "hotset.neuron_order"  # hash of the permutation, equal in files with the same order
_NEURONS = re.compile(
    r"blk\.(\d+)\.(ffn_gate|ffn_up|fc2|ffn_down_t|ffn_down|ffn_sub_norm|channel_mix_key|channel_mix_value(?:_t)?)"
    r"\.(weight|bias)"
)
_DOWN = "ffn_down", "channel_mix_value"  # their neurons are columns


@dataclass(frozen=True)
class Reordered:
    """The result. n_always: leading neurons per layer that need no prediction. files: all written files."""

    n_always: tuple[int, ...]
    n_bytes: int
    files: tuple[Path, ...]


def reorder(
    in_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    profile: Profile | None,
    *,
    always: float = HEAD_FREQUENCY,
    bundle: bool = False,
    progress: Reporter | None = None,
) -> Reordered:
    """Write the model to `out_path` in the order of the profile's counts, the hottest neuron first.

    Without a profile the order does not change.

    bundle: store the parts of a neuron or expert in several matrices side by side (formats/bundle.py).
    always: the frequency from which a neuron is computed without prediction (above 1: none). Metadata and
    dialect stay; a split model becomes one file. The profile is written next to it, and so are the counts and
    the GPU index of a published PowerInfer model. Raises InvalidRequestError if the profile belongs to
    another model, or if the order cannot change without changing values.
    """
    out = Path(out_path)
    with open_gguf(in_path) as gguf:
        check_output(out, gguf.paths)
        config = config_from_gguf(gguf)
        graph = describe(config, gguf.tensors)  # raises for a file that is not a model
        if profile is not None:
            _check_order(gguf, out, profile, config.n_ff)
        orders = neuron_orders(profile) if profile is not None else None

        def moved(info: TensorInfo) -> Callable[[], np.ndarray]:
            return _moved(gguf, info, orders) if orders is not None else lambda: gguf.data(info.name)

        bundles = bundles_of(gguf, graph, moved) if bundle else []
        parts = {part.name for one in bundles for part in one.parts}
        writer = GGUFWriter(out, gguf.architecture, PAGE if bundle else _alignment(gguf), gguf.dialect)
        n_always: tuple[int, ...] = ()
        if profile is not None and orders is not None:
            n_always = add_order(writer, profile, orders, always)
        for key, value in (keys_of([one.parts for one in bundles]) if bundles else {}).items():
            writer.add(key, value, ValueType.INT32 if isinstance(value, list) and key != NAMES_KEY else None)
        copy_metadata(gguf, writer, (*KEYS, "general.alignment"))
        for info in gguf.tensors.values():
            if info.name not in parts:
                writer.add_tensor(info.name, moved(info), info.type, info.shape)
        for one in bundles:
            one.add_to(writer)
        if progress is not None:
            progress.say(f"Writing {out}{' in order of hotness' if profile else ''}.")
        writer.write(progress)
        files = [out]
        if profile is not None and orders is not None:
            files += _move_companions(Path(in_path), out, profile, orders)
    return Reordered(n_always, out.stat().st_size, tuple(files))


def _check_order(gguf: GGUFFile, out: Path, profile: Profile, n_ff: Sequence[int]) -> None:
    profile.check_model(sidecar.fingerprint(gguf), n_ff)
    _refuse_quantised_columns(gguf)
    if powerinfer.activation_files(gguf.path) and out.parent.resolve() == gguf.path.parent.resolve():
        raise InvalidRequestError(
            f"{gguf.path.parent / 'activation'} belongs to the old order of neurons, and a folder "
            "holds one; write the reordered model to a folder of its own"
        )


def neuron_orders(profile: Profile) -> list[np.ndarray]:
    """Return each layer's neurons, the hottest first. Raises UnsupportedModelError for experts."""
    if profile.experts:
        raise UnsupportedModelError("the neurons inside experts cannot be reordered")
    return [np.argsort(-counts.astype(np.int64), kind="stable") for counts in profile.counts]


def add_order(
    writer: GGUFWriter, profile: Profile, orders: list[np.ndarray], always: float = HEAD_FREQUENCY
) -> tuple[int, ...]:
    """Add the keys of a file in these orders. Return each layer's leading neurons without prediction."""
    n_always = tuple(
        max(min(int((profile.frequencies(i) >= always).sum()), len(order) - 1), 0)
        for i, order in enumerate(orders)
    )
    digest = hashlib.sha256(b"".join(order.astype("<i8").tobytes() for order in orders))
    writer.add(N_ALWAYS_KEY, list(n_always), ValueType.INT32)
    writer.add(ORDER_KEY, digest.hexdigest()[:32])
    return n_always


def neurons_of(name: str) -> tuple[int, bool] | None:
    """Return a tensor's layer and whether its neurons are columns; None for a tensor without neurons."""
    match = _NEURONS.fullmatch(name)
    if match is None or (match[3] == "bias" and match[2].removesuffix("_t") in _DOWN):
        return None
    return int(match[1]), match[2] in _DOWN


def order_of_rows(order: np.ndarray, n_rows: int) -> np.ndarray:
    """Return the order of rows: the neurons' order, or twice in a tensor with gate and up of all."""
    return np.concatenate([order, order + len(order)]) if n_rows == 2 * len(order) else order


def _alignment(gguf: GGUFFile) -> int:
    value = gguf.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    assert isinstance(value, int)  # open_gguf has checked it
    return value


def _moved(gguf: GGUFFile, info: TensorInfo, orders: list[np.ndarray]) -> Callable[[], np.ndarray]:
    """Return a function that returns the tensor's bytes with its neurons in the new order."""
    place = neurons_of(info.name)
    if place is None:
        return lambda: gguf.data(info.name)
    layer, by_column = place
    if layer >= len(orders):  # for multi-token prediction, which profiles do not cover
        return lambda: gguf.data(info.name)
    order = orders[layer]
    is_vector = info.name.endswith((".bias", ".ffn_sub_norm.weight"))
    by_value = by_column or is_vector
    if len(info.shape) != 2 - is_vector or (by_value and TYPES[info.type].block_size > 1):
        raise UnsupportedModelError(
            f"the tensor {info.name} is {info.type.name} {list(info.shape)}, whose neurons cannot be moved"
        )
    n_neurons = info.shape[0] if by_value else info.shape[1]
    if n_neurons == 2 * len(order) and not by_column:  # gate and up in one, as describe() has checked
        order = order_of_rows(order, n_neurons)
    if n_neurons != len(order):
        raise InvalidRequestError(
            f"the profile has {len(order)} neurons in layer {layer}, and {info.name} has {n_neurons}"
        )
    if by_value:
        return lambda: _columns(gguf, info, order)
    return lambda: gguf.data(info.name).reshape(n_neurons, -1)[order]


def _columns(gguf: GGUFFile, info: TensorInfo, order: np.ndarray) -> np.ndarray:
    n_bytes = TYPES[info.type].block_bytes
    values = gguf.data(info.name).view(f"u{n_bytes}").reshape(-1, info.shape[0])
    return np.take(values, order, axis=1).view(np.uint8)


def _refuse_quantised_columns(gguf: GGUFFile) -> None:
    """Raise InvalidRequestError if the down projection of a file is quantised across neurons."""
    for info in gguf.tensors.values():
        if info.type not in TYPES:
            gguf.data(info.name)  # raises an error for an unknown type
        match = _NEURONS.fullmatch(info.name)
        if match and match[2] in _DOWN and match[3] == "weight" and TYPES[info.type].block_size > 1:
            raise InvalidRequestError(
                f"{gguf.path} cannot be reordered: {info.name} is {info.type.name}, where "
                f"{TYPES[info.type].block_size} neurons share a scale; reorder and quantise its F16 model"
            )


def _move_companions(source: Path, out: Path, profile: Profile, orders: list[np.ndarray]) -> list[Path]:
    """Write the files that refer to a model's neurons next to the new model. Return their paths."""
    with open_gguf(out) as written:
        moved = profile.permuted(orders, sidecar.fingerprint(written))
    moved.save(profile_path(out))
    files = [profile_path(out)]
    counts = powerinfer.activation_files(source)
    if counts is not None:
        n_ff = [len(order) for order in orders]
        published = powerinfer.read_activations(counts, len(n_ff), n_ff)
        powerinfer.write_activations(
            out.parent / "activation", [c[order] for c, order in zip(published, orders, strict=True)]
        )
        files.append(out.parent / "activation")
    index = powerinfer.gpu_index_file(source)
    if index is not None:
        files.append(_move_gpu_index(index, out, orders))
    return files


def _move_gpu_index(index: Path, out: Path, orders: list[np.ndarray]) -> Path:
    old = powerinfer.read_gpu_index(index, [len(order) for order in orders])
    path = out.with_name(out.name + powerinfer.GPU_INDEX_SUFFIX)
    writer = GGUFWriter(path, powerinfer.GPU_INDEX_ARCHITECTURE, dialect="powerinfer")
    writer.add("split.vram_capacity", old.vram_capacity, ValueType.UINT64)
    for i, (on_gpu, order) in enumerate(zip(old.on_gpu, orders, strict=True)):
        moved = on_gpu[order]
        writer.add_tensor(f"blk.{i}.gpu_idx", moved.astype("<i4"), GGMLType.I32)
        writer.add_tensor(f"blk.{i}.gpu_bucket", np.flatnonzero(moved).astype("<i4"), GGMLType.I32)
    writer.write()
    return path
