"""The sparsity mode of a model: which one is chosen, why, and the files that it needs.

    dense      all neurons
    exact      all gates, but rows of up and down only for neurons that fire: bitwise identical to dense
    predicted  the neurons that a predictor selects, and among these only those that fire: an approximation
    threshold  one of the above, with small values set to zero by a calibration's thresholds: an approximation

The default is the fastest mode that computes the model as published: `predicted` if the file carries
predictors, otherwise `exact` if neurons can be exactly zero, otherwise `dense`. It is never `threshold`,
which changes the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from hotset.errors import InvalidRequestError
from hotset.formats import channels, planes
from hotset.formats.overlay import Overlay
from hotset.load_parameters import LOAD_PARAMETERS, SparsityMode
from hotset.model.decoder import describe
from hotset.model.graph import thresholded_products
from hotset.model.predictor import Predictor, PredictorKind
from hotset.model.thresholds import LayerThresholds
from hotset.sparsity import sidecar
from hotset.sparsity.predictor_spec import PredictorSpec, parse_predictor
from hotset.sparsity.thresholds import BaseMode, Thresholds

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, GGUFWriter, TensorInfo
    from hotset.model.config import LayerConfig, ModelConfig
    from hotset.model.graph import Graph
    from hotset.reporter import Reporter
    from hotset.sparsity.calibration import Calibration
    from hotset.sparsity.profile import Profile

_SAMPLE_BYTES = 256  # of each expert, for a fingerprint

Computes = Literal["memory", "budget", "device"]
"""Who reads the weights: the CPU, with all of them in memory; the CPU under a memory budget, without room for
input-major copies; or a device, which cannot read layouts for the CPU."""


@dataclass(frozen=True)
class Choice:
    """A mode and the reason for it, one sentence.

    predictor, spec: for `predicted`, which predictor and its settings. thresholds: for `threshold`; they name
    the mode that they are added to.
    """

    mode: SparsityMode
    predictor: PredictorKind | None
    reason: str
    spec: PredictorSpec | None = None
    thresholds: Thresholds | None = None

    @property
    def base(self) -> BaseMode:
        """Return the mode without the thresholds."""
        if self.thresholds is not None:
            return self.thresholds.mode
        assert self.mode != "threshold", "a Choice of mode threshold has thresholds"
        return self.mode

    @property
    def layer_thresholds(self) -> tuple[LayerThresholds, ...]:
        """Return the thresholds of each layer, for decoder.describe; empty without thresholds."""
        return () if self.thresholds is None else self.thresholds.layers


@dataclass
class Prepared:
    """The files and facts with which a backend runs a choice.

    weights: the model with the sidecars over it; its `close` closes the sidecars. predictor: for
    decoder.describe. notes: which files were built or opened, one sentence each.
    """

    weights: Overlay
    predictor: Predictor | None = None
    notes: list[str] = field(default_factory=list)


def asked_mode(
    mode: str | None, predictor: str | None, thresholds: object = None
) -> tuple[SparsityMode | None, PredictorSpec | None]:
    """Return the mode and predictor that a user requests, for any model.

    thresholds: not None if the user names some. Raises InvalidRequestError for unknown or contradicting
    values.
    """
    LOAD_PARAMETERS["sparsity"].checked(mode)
    spec = None if predictor is None else parse_predictor(predictor)
    if spec is not None and mode in ("dense", "exact"):
        raise InvalidRequestError(f"`predictor` requires sparsity='predicted', not '{mode}'")
    if thresholds is not None and mode not in (None, "threshold"):
        raise InvalidRequestError(f"`thresholds` requires sparsity='threshold', not '{mode}'")
    return cast(SparsityMode | None, mode), spec


def choose(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    mode: str | None = None,
    predictor: str | None = None,
    thresholds: Thresholds | None = None,
) -> Choice:
    """Return the mode and predictor for a model; `mode` and `predictor` are the user's choices, or None.

    thresholds: for mode `threshold`; they name the mode that they are added to. Raises InvalidRequestError if
    the model cannot run in the requested mode, or a value is unknown.
    """
    if thresholds is not None:
        below = choose(config, tensors, thresholds.mode, predictor)
        reason = (
            f"threshold: small values count as zero, as calibrated; "
            f"{below.reason.removesuffix(', as requested')}"
        )
        return replace(below, mode="threshold", reason=reason, thresholds=thresholds)
    mode, spec = asked_mode(mode, predictor)
    spec = spec and spec.resolved(config)
    activation = _activation_name(config)
    if config.masked:
        return _choose_masked(config, mode, spec)
    published = all(
        f"blk.{i}.{name}.weight" in tensors for i in range(config.n_layer) for name in ("fc1", "fc2")
    )
    if (mode in ("exact", "predicted") or spec is not None) and not config.has_zeros:
        raise InvalidRequestError(
            f"the model's activation is {activation}, which has no zeros, so only dense is possible; "
            "if the file is a ReLU model that does not say so, name its activation (activation='relu')"
        )
    if spec is not None and spec.kind == "mlp" and not published:
        raise InvalidRequestError(
            "the predictor mlp must be in the file (fc1, fc2), but this file has none; choose svd, or train "
            "it with 'hotset sparse train'"
        )

    if config.activation.top_k is not None and (mode == "predicted" or spec is not None):
        raise InvalidRequestError(
            "a Gaussian top-k needs all gates first, so a predictor saves nothing; use exact"
        )
    if not config.causal and (mode == "predicted" or spec is not None):
        raise InvalidRequestError("predictors for embedding models are not supported; use exact")
    if 0 in config.n_ff and (mode == "predicted" or spec is not None):
        raise InvalidRequestError(
            "predictors for models with layers without an FFN are not supported; use exact"
        )
    if config.has_experts and (mode == "predicted" or spec is not None):
        raise InvalidRequestError(
            "predictors for neurons inside experts are not supported; leave the predictor out, or use exact"
        )
    requested = "as requested" if mode is not None else ""
    if mode == "dense":
        return Choice("dense", None, f"dense: all neurons, {requested}")
    if mode == "exact":
        return Choice("exact", None, f"exact: only neurons that fire, {requested}")
    if spec is not None:
        how = "the file carries it" if spec.kind == "mlp" else "hotset builds it from the weights"
        return Choice("predicted", spec.kind, f"predicted: by {spec}, as requested ({how})", spec)
    if published and config.has_zeros:
        spec = PredictorSpec("mlp")
        return Choice("predicted", "mlp", "predicted: the file carries predictors (fc1, fc2)", spec)
    if mode == "predicted":
        spec = PredictorSpec("svd").resolved(config)
        reason = f"predicted: by {spec}, {requested}; the file carries no predictors, so hotset builds one"
        return Choice("predicted", "svd", reason, spec)
    if config.has_zeros:
        reason = f"exact: its activation is {activation}, so neurons that do not fire contribute nothing"
        return Choice("exact", None, reason)
    return Choice("dense", None, f"dense: {activation} has no zeros")


def _choose_masked(config: ModelConfig, mode: SparsityMode | None, spec: PredictorSpec | None) -> Choice:
    """Choose for a model that includes its predictors' mask, which decoder.describe always adds."""
    if spec is not None and spec != PredictorSpec("mlp"):
        raise InvalidRequestError(
            f"the mask of the file's own predictors is part of the model, so {spec} cannot replace it"
        )
    if mode == "exact" and not config.has_zeros:
        raise InvalidRequestError("the model's activation has no zeros; use dense")
    how = f"{mode}, as requested" if mode is not None else "predicted"
    return Choice(mode or "predicted", None, f"{how}: the mask of the file's predictors is part of the model")


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


def _activation_name(config: ModelConfig) -> str:
    names = {"relu": "ReLU", "relu2": "squared ReLU", "fatrelu": "FATReLU"}
    gate, up = config.activation.gate, config.activation.up
    name = "dReLU" if gate == up == "relu" else names.get(str(gate), str(gate))
    return name if config.activation.top_k is None else f"{name} with a Gaussian top-k"
