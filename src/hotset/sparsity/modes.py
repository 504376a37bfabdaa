"""Which neurons a model computes: the choice of a mode, with its reason, and the files that it needs.

    dense      all neurons
    exact      every gate, but up and down rows only of neurons that fire: the same bits as dense
    predicted  the neurons that a predictor names, and within them as exact: an approximation
    threshold  as one of these, but small values count as zero: an approximation, by a calibration's
    thresholds

The default is the fastest that keeps the file's meaning: `predicted` where the file carries predictors, for
the model was published to run so, else `exact` where neurons can be exactly zero, else `dense`; never
`threshold`, which changes the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np

from hotset.errors import InvalidRequestError
from hotset.formats import channels, planes
from hotset.formats.overlay import Overlay
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

_SAMPLE_BYTES = 256  # of each expert

SparsityMode = Literal["dense", "exact", "predicted", "threshold"]
Computes = Literal["memory", "budget", "device"]
"""What reads the weights: the CPU, all of them in memory; the CPU under a budget, which has no room for
input-major copies; a device, which does not read what only the CPU can."""


@dataclass(frozen=True)
class Choice:
    """A mode with the reason for it, one sentence.

    predictor, spec: with `predicted`, which one and its settings. thresholds: of `threshold`, in
    addition to the mode that they name.
    """

    mode: SparsityMode
    predictor: PredictorKind | None
    reason: str
    spec: PredictorSpec | None = None
    thresholds: Thresholds | None = None

    @property
    def base(self) -> BaseMode:
        """The mode without the thresholds."""
        if self.thresholds is not None:
            return self.thresholds.mode
        assert self.mode != "threshold", "it has thresholds"
        return self.mode

    @property
    def layer_thresholds(self) -> tuple[LayerThresholds, ...]:
        """Of each layer, for decoder.describe; empty where there are none."""
        return () if self.thresholds is None else self.thresholds.layers


@dataclass
class Prepared:
    """What a backend runs a choice from.

    weights: the model with the sidecars over it; its `close` closes the sidecars. predictor: for
    decoder.describe. notes: what was built or opened, a sentence each.
    """

    weights: Overlay
    predictor: Predictor | None = None
    notes: list[str] = field(default_factory=list)


def asked_mode(
    mode: str | None, predictor: str | None, thresholds: object = None
) -> tuple[SparsityMode | None, PredictorSpec | None]:
    """What a user's words ask for, of any model; thresholds: whether some are named. Raises
    InvalidRequestError where they mean nothing."""
    if mode is not None and mode not in get_args(SparsityMode):
        raise InvalidRequestError(
            f"the sparsity mode {mode!r} is not known; it must be one of {', '.join(get_args(SparsityMode))}"
        )
    spec = None if predictor is None else parse_predictor(predictor)
    if spec is not None and mode in ("dense", "exact"):
        raise InvalidRequestError(
            f"a predictor serves the sparsity mode predicted, not {mode}; leave one of the two out"
        )
    if thresholds is not None and mode not in (None, "threshold"):
        raise InvalidRequestError(
            f"thresholds serve the sparsity mode threshold, not {mode}; leave one of the two out"
        )
    return cast(SparsityMode | None, mode), spec


def choose(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    mode: str | None = None,
    predictor: str | None = None,
    thresholds: Thresholds | None = None,
) -> Choice:
    """The mode and predictor for a model; `mode` and `predictor` are what a user asked for.

    thresholds: those of `threshold`; they say in addition to which mode.
    Raises InvalidRequestError where the model cannot run so, or for a text that means nothing.
    """
    if thresholds is not None:
        below = choose(config, tensors, thresholds.mode, predictor)
        reason = (
            f"threshold: small values count as zero as calibrated; {below.reason.removesuffix(', as asked')}"
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
            f"the model's activation is {activation}, which has no zeros, so that only dense is possible; "
            "if the file is a ReLU model that does not say so, name its activation (--activation relu)"
        )
    if spec is not None and spec.kind == "mlp" and not published:
        raise InvalidRequestError(
            "the predictor mlp is part of a file (fc1, fc2), and this file has none; choose svd, or train "
            "it with 'hotset sparse train'"
        )

    if config.activation.top_k is not None and (mode == "predicted" or spec is not None):
        raise InvalidRequestError(
            "which neurons fire is known when all gates are, so that a predictor saves nothing; use exact"
        )
    if not config.causal and (mode == "predicted" or spec is not None):
        raise InvalidRequestError("no predictor knows the neurons of an embedding model; use exact")
    if 0 in config.n_ff and (mode == "predicted" or spec is not None):
        raise InvalidRequestError("no predictor knows a model with layers without an FFN; use exact")
    if config.has_experts and (mode == "predicted" or spec is not None):
        raise InvalidRequestError("no predictor knows the neurons inside experts; leave it out, or use exact")
    asked = "as asked" if mode is not None else ""
    if mode == "dense":
        return Choice("dense", None, f"dense: all neurons, {asked}")
    if mode == "exact":
        return Choice("exact", None, f"exact: only neurons that fire, {asked}")
    if spec is not None:
        how = "the file carries it" if spec.kind == "mlp" else "hotset builds it from the weights"
        return Choice("predicted", spec.kind, f"predicted: by {spec}, as asked ({how})", spec)
    if published and config.has_zeros:
        spec = PredictorSpec("mlp")
        return Choice("predicted", "mlp", "predicted: the file carries predictors (fc1, fc2)", spec)
    if mode == "predicted":
        spec = PredictorSpec("svd").resolved(config)
        reason = f"predicted: by {spec}, {asked}; the file carries no predictors, so hotset builds one"
        return Choice("predicted", "svd", reason, spec)
    if config.has_zeros:
        reason = f"exact: its activation is {activation}, so that neurons that do not fire add nothing"
        return Choice("exact", None, reason)
    return Choice("dense", None, f"dense: {activation} has no zeros")


def _choose_masked(config: ModelConfig, mode: SparsityMode | None, spec: PredictorSpec | None) -> Choice:
    """Of a model that has its predictors' mask in every mode: decoder.describe sees to it."""
    if spec is not None and spec != PredictorSpec("mlp"):
        raise InvalidRequestError(
            f"the mask of the file's own predictors is part of the model, and {spec} cannot take its place"
        )
    if mode == "exact" and not config.has_zeros:
        raise InvalidRequestError("the model's activation has no zeros; use dense")
    asked = f"{mode}, as asked" if mode is not None else "predicted"
    return Choice(
        mode or "predicted", None, f"{asked}: the mask of the file's predictors is part of the model"
    )


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
    """Opens, or builds once, the sidecars that a choice needs.

    The neuron-major down matrix belongs to every mode of a ReLU model, dense too: its sums are then bitwise
    identical. calibration: how a predictor's thresholds are found (the default: on text that the model itself
    generates). profile: its neurons that nearly always fire are computed without prediction. input_major:
    with copies of all matrices that thresholds let be read so; else open_channels is to open those of some.
    computes: see Computes.
    Raises InvalidRequestError for a profile of another model, UnsupportedModelError for a file that lacks a
    tensor or has one of another shape or type, HotsetError where no file can be written.
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
    """What leaves out neurons: neuron-major down matrices, and predictors."""
    if not config.has_zeros:
        return Prepared(Overlay(gguf))
    # What is built reads shapes and types of the file's tensors: they are checked first.
    published = Predictor("mlp", (0.0,) * config.n_layer) if choice.predictor == "mlp" else None
    # (A bias of the scores belongs to the neurons behind the hot head, which the predictor's matrices have.)
    describe(config, {n: t for n, t in gguf.tensors.items() if not n.endswith(".always.bias")}, published)
    model = sidecar.fingerprint(gguf)
    notes: list[str] = []
    copies = computes == "memory" and choice.mode != "dense"  # which change no bit
    sidecars = _open_down(gguf, config, model, notes, progress, copies)
    if computes == "device" and choice.mode != "dense" and any(map(_is_whole, config.layers)):
        notes.append("beside a device the down projections of experts are read whole")
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
    """The sidecars with the down matrices neuron-major, where the file has them by output and they can be
    converted: planes, or, with copies, input-major ones of experts and of what has no planes."""
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
        why = "cannot be laid out by neuron without changing its values"
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
    """Whether a down projection is laid out neuron-major; what belongs to experts is not."""
    return len(info.shape) == 2 and "_shexp." not in info.name and planes.layout_of(info) is not None


def _is_whole(layer: LayerConfig) -> bool:
    return layer.experts is not None and layer.activation.has_zeros


def _downs_of(layer: LayerConfig) -> tuple[str, ...]:
    """The tensors of a layer's down projections."""
    if layer.experts is None:
        return (layer.ffn_tensors[1],)
    return () if layer.experts.beside else ("ffn_down_exps", "ffn_down_shexp")


def _is_by_output(info: TensorInfo, gguf: GGUFFile) -> bool:
    """Whether a down projection has a row per output, and the file no other form of it."""
    if f"{info.name.removesuffix('.weight')}_t.weight" in gguf.tensors:
        return False
    if len(info.shape) < 3:
        return True
    ups = (info.name.replace("ffn_down", name) for name in ("ffn_up", "ffn_gate_up"))
    return any(name in gguf.tensors and gguf.tensors[name].shape[0] == info.shape[1] for name in ups)


def _copies(
    gguf: GGUFFile, names: Sequence[str], kind: str, notes: list[str], progress: Reporter | None
) -> GGUFFile:
    """The sidecar with the input-major copies of these matrices."""

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
    """Names the contents of each expert, which a model's fingerprint does not look at one by one."""
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
    """Opens, or builds once, the sidecar with input-major copies of matrices whose inputs a graph thresholds.

    wanted: which of them; None: all that can be. notes: to which a sentence on each is added.
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
    return name if config.activation.top_k is None else f"{name} behind a Gaussian top-k"
