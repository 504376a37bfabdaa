"""The files of a sparsity mode: sidecars with predictors, neuron-major and input-major copies of matrices.

modes.py chooses the mode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from hotset.formats import channels, planes
from hotset.formats.overlay import Overlay
from hotset.model.decoder import describe
from hotset.model.graph import thresholded_products
from hotset.model.predictor import Predictor
from hotset.sparsity import sidecar

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, GGUFWriter, TensorInfo
    from hotset.model.config import LayerConfig, ModelConfig
    from hotset.model.graph import Graph
    from hotset.reporter import Reporter
    from hotset.sparsity.calibration import Calibration
    from hotset.sparsity.modes import Choice
    from hotset.sparsity.profile import Profile

_SAMPLE_BYTES = 256  # of each expert, for a fingerprint

Computes = Literal["memory", "budget", "device"]
"""Who reads the weights: the CPU, with all of them in memory; the CPU under a memory budget, without room for
input-major copies; or a device, which cannot read layouts for the CPU."""


@dataclass
class Prepared:
    """The files and facts with which a backend runs a choice.

    weights: the model with the sidecars over it; its `close` closes the sidecars. predictor: for
    decoder.describe. notes: which files were built or opened, one sentence each.
    """

    weights: Overlay
    predictor: Predictor | None = None
    notes: list[str] = field(default_factory=list)


def prepare(
    gguf: GGUFFile,
    config: ModelConfig,
    choice: Choice,
    *,
    calibration: Calibration | None = None,
    profile: Profile | None = None,
    progress: Reporter | None = None,
    input_major: bool = True,
    computes: Computes = "memory",
) -> Prepared:
    """Open, or build once, the sidecars that a choice needs.

    Every mode of a ReLU model uses the neuron-major down matrix, dense too, so that all sums are bitwise
    identical. calibration: how a predictor's thresholds are found (default: on text that the model
    generates). profile: its neurons that nearly always fire are computed without prediction. input_major:
    also make input-major copies of all thresholded matrices that can have one; otherwise the caller uses
    open_channels for some. computes: see Computes.
    Raises InvalidRequestError if the profile is of another model, UnsupportedModelError if the file lacks a
    tensor or has one of another shape or type, and HotsetError if no file can be written.
    """
    ready = _prepare_neurons(gguf, config, choice, calibration, profile, progress, computes)
    if choice.layer_thresholds and input_major:
        graph = describe(config, ready.weights.tensors, ready.predictor, choice.layer_thresholds)
        try:
            copies = open_channels(gguf, graph, ready.weights, None, ready.notes, progress)
        except BaseException:
            ready.weights.close()
            raise
        ready.weights = ready.weights.under(*copies)
    return ready


def _prepare_neurons(
    gguf: GGUFFile,
    config: ModelConfig,
    choice: Choice,
    calibration: Calibration | None,
    profile: Profile | None,
    progress: Reporter | None,
    computes: Computes,
) -> Prepared:
    """Open or build the files for skipping neurons: neuron-major down matrices and predictors."""
    if not config.has_zeros:
        return Prepared(Overlay(gguf))
    # Building relies on shapes and types of the file's tensors, so check these first.
    published = Predictor("mlp", (0.0,) * config.n_layer) if choice.predictor == "mlp" else None
    # A bias of the scores covers only neurons with prediction, like the predictor's matrices.
    describe(config, {n: t for n, t in gguf.tensors.items() if not n.endswith(".always.bias")}, published)
    model = sidecar.fingerprint(gguf)
    notes: list[str] = []
    copies = computes == "memory" and choice.mode != "dense"  # copies do not change results
    sidecars = _open_down(gguf, config, model, notes, progress, copies)
    if computes == "device" and choice.mode != "dense" and any(map(_is_whole, config.layers)):
        notes.append("with a device, the down projections of experts are read whole")
    if choice.spec is None:
        return Prepared(Overlay(gguf, *sidecars), None, notes)
    from hotset.sparsity.calibration import Calibration
    from hotset.sparsity.predictors import open_predictor

    try:
        predictor, more, said = open_predictor(
            gguf, config, choice.spec, Overlay(gguf, *sidecars), model,
            calibration=calibration or Calibration(), profile=profile, progress=progress,
        )  # fmt: skip
    except BaseException:
        Overlay(gguf, *sidecars).close()
        raise
    return Prepared(Overlay(gguf, *sidecars, *more), predictor, [*notes, *said])


def _open_down(
    gguf: GGUFFile,
    config: ModelConfig,
    model: str,
    notes: list[str],
    progress: Reporter | None,
    copies: bool,
) -> list[GGUFFile]:
    """Return the sidecars with neuron-major down matrices, where the file has a row per output.

    They hold planes or, with `copies`, input-major copies for experts and for types without planes.
    """
    names = [
        f"blk.{i}.{name}"
        for i, layer in enumerate(config.layers)
        if layer.activation.has_zeros
        for name in _downs_of(layer)
    ]
    found = [gguf.tensors[f"{name}.weight"] for name in names if f"{name}.weight" in gguf.tensors]
    plain = [info for info in found if _is_by_output(info, gguf)]
    neuron_major = [info for info in plain if _has_planes(info)]
    copied = [
        info for info in plain if copies and info not in neuron_major and channels.can_be_input_major(info)
    ]
    whole = [info for info in plain if info not in (*neuron_major, *copied)]
    if whole and copies:
        types = ", ".join(sorted({info.type.name for info in whole}))
        why = "cannot be stored neuron-major without changing its values"
        notes.append(f"{len(whole)} down projections stay dense: {types} {why}")
    sidecars = []
    try:
        if neuron_major:

            def fill(writer: GGUFWriter) -> None:
                for info in neuron_major:
                    planes.add_down(writer, gguf, info.name.removesuffix(".weight"))

            contents = sidecar.Contents(fill, sum(info.nbytes for info in neuron_major))
            built = sidecar.open_or_build(gguf, "down", {}, contents, model=model, progress=progress)
            sidecars.append(built.file)
            notes.append(built.note("neuron-major down matrices"))
        if copied:
            sidecars.append(_copies(gguf, [info.name for info in copied], "down-channels", notes, progress))
    except BaseException:
        for file in sidecars:
            file.close()
        raise
    return sidecars


def _has_planes(info: TensorInfo) -> bool:
    """Return whether a down projection gets a neuron-major layout; matrices of experts do not."""
    return len(info.shape) == 2 and "_shexp." not in info.name and planes.layout_of(info) is not None


def _is_whole(layer: LayerConfig) -> bool:
    return layer.experts is not None and layer.activation.has_zeros


def _downs_of(layer: LayerConfig) -> tuple[str, ...]:
    """Return the tensors of a layer's down projections."""
    if layer.experts is None:
        return (layer.ffn_tensors[1],)
    return () if layer.experts.with_ffn else ("ffn_down_exps", "ffn_down_shexp")


def _is_by_output(info: TensorInfo, gguf: GGUFFile) -> bool:
    """Return whether a down projection has a row per output, and the file has no other layout of it."""
    if f"{info.name.removesuffix('.weight')}_t.weight" in gguf.tensors:
        return False
    if len(info.shape) < 3:
        return True
    ups = (info.name.replace("ffn_down", name) for name in ("ffn_up", "ffn_gate_up"))
    return any(name in gguf.tensors and gguf.tensors[name].shape[0] == info.shape[1] for name in ups)


def _copies(
    gguf: GGUFFile, names: Sequence[str], kind: str, notes: list[str], progress: Reporter | None
) -> GGUFFile:
    """Return the sidecar with the input-major copies of these matrices."""

    def fill(writer: GGUFWriter) -> None:
        for name in names:
            channels.add_channels(writer, gguf, name)

    n_bytes = sum(channels.all_bytes(gguf.tensors[name]) for name in names)
    of = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
    contents = sidecar.Contents(fill, n_bytes, alignment=channels.ALIGNMENT)
    settings = {"tensors": of, "layout": channels.LAYOUT, "experts": _sample(gguf, names)}
    built = sidecar.open_or_build(gguf, kind, settings, contents, progress=progress)
    notes.append(built.note("input-major matrices"))
    return built.file


def _sample(gguf: GGUFFile, names: Sequence[str]) -> str:
    """Return a hash of samples of each expert, which a model's fingerprint does not cover one by one."""
    digest = hashlib.sha256()
    for name in names:
        if len(gguf.tensors[name].shape) == 3:
            parts = gguf.data(name).reshape(gguf.tensors[name].shape[2], -1)
            middle = parts.shape[1] // 2
            digest.update(np.ascontiguousarray(parts[:, middle : middle + _SAMPLE_BYTES]).tobytes())
    return digest.hexdigest()[:16]


def open_channels(
    gguf: GGUFFile,
    graph: Graph,
    weights: Overlay,
    wanted: Collection[str] | None,
    notes: list[str],
    progress: Reporter | None = None,
) -> list[GGUFFile]:
    """Open, or build once, the sidecar with input-major copies of matrices whose inputs a graph thresholds.

    wanted: which of them; None: all that can have one. notes: receives a sentence on each.
    """
    names = dict.fromkeys(op.weight for op in thresholded_products(graph))
    thresholded = [n for n in names if channels.copy_name(n) not in weights.tensors]
    possible = [name for name in thresholded if channels.can_be_input_major(weights.tensors[name])]
    if len(possible) < len(thresholded):
        types = sorted({weights.tensors[name].type.name for name in thresholded if name not in possible})
        notes.append(
            f"{len(thresholded) - len(possible)} matrices whose inputs are thresholded are read whole: "
            f"{', '.join(types)} has no input-major layout"
        )
    if wanted is not None:
        possible = [name for name in possible if name in wanted]
    if not possible:
        return []

    return [_copies(gguf, possible, "channels", notes, progress)]
