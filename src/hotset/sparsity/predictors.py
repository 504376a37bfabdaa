"""Predictors: cheap estimates of which neurons fire, so that the others can be skipped.

    mlp[:TYPE]         fc1 and fc2 of the file (PowerInfer), as stored or requantised (q8_0, q4_0, q3_k)
    svd[:RANK[:TYPE]]  the gate's product through a truncated singular value decomposition (arXiv 2603.14110)

`svd` is built from the weights. In a model without a gate it uses the up matrix, whose sign decides. A neuron
is computed unless its score is below its layer's threshold. Calibration chooses the highest threshold that
keeps `recall` of the magnitude of the scored neurons: the sum of |value| over calibration tokens. The
magnitude counts, not the number, because neurons that barely fire are hard to predict and matter least.

The tokens are a given text, or one that the model generates. Without tokens, the FFN's inputs are normally
distributed vectors after its norm (calibration.Calibration).
"""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hotset.errors import FormatError, InvalidRequestError, UnsupportedModelError
from hotset.formats.encode import recode
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import TYPES, GGMLType, dequantize
from hotset.model.decoder import describe
from hotset.model.predictor import Predictor
from hotset.reporter import Reporter
from hotset.sparsity import builders, sidecar
from hotset.sparsity.calibration import Calibration
from hotset.sparsity.predictor_spec import PredictorSpec
from hotset.sparsity.profile import ALWAYS_FREQUENCY

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, GGUFWriter
    from hotset.formats.overlay import Overlay
    from hotset.model.config import ModelConfig
    from hotset.sparsity.profile import Profile

N_ALWAYS_KEY = "hotset.n_always"  # of a reordered file: leading neurons per layer without prediction


def open_predictor(
    gguf: GGUFFile,
    config: ModelConfig,
    spec: PredictorSpec,
    weights: Overlay,
    model: str,
    *,
    calibration: Calibration,
    profile: Profile | None,
    progress: Reporter | None,
) -> tuple[Predictor, list[GGUFFile], list[str]]:
    """Return the predictor of a model, the files that override it, and notes of files built or opened.

    weights: the model with its down matrices, which calibration runs. model: its fingerprint.
    """
    if profile is not None:
        profile.check_model(model, config.n_ff)
    first = n_always(gguf, config)
    if spec.kind == "mlp":
        thresholds = [config.sparse_threshold] * config.n_layer
        built = None if spec.type is None else _requantised(gguf, config, spec.type, model, progress)
    else:
        built = _built(gguf, config, spec, weights, first, model, calibration, progress)
        thresholds = _thresholds(built.file, config)
    files, notes = [], []
    if built is not None:
        notes.append(built.note(f"predictor {spec}"))
        files.append(built.file)
    extra = MemoryTensors()
    owner = files[-1] if files else gguf
    for i, n in enumerate(first):
        if spec.kind == "mlp" and n:  # skip the rows of neurons without prediction
            info = owner.tensors[f"blk.{i}.fc2.weight"]
            rows = owner.data(info.name).reshape(info.shape[1], -1)[n:]
            extra.add(info.name, rows.reshape(-1), info.type, (info.shape[0], info.shape[1] - n))
        if profile is not None:
            always = (profile.frequencies(i) >= ALWAYS_FREQUENCY)[n:]
            bias = np.where(always, np.float32(np.inf), np.float32(0))
            name = f"blk.{i}.always.bias"
            if name in owner.tensors:
                info = owner.tensors[name]
                if info.shape != bias.shape:
                    raise UnsupportedModelError(
                        f"the tensor {name} has the shape {list(info.shape)}, expected {list(bias.shape)}"
                    )
                bias += dequantize(owner.data(name), info.type, info.shape)
            extra.add(name, bias.view(np.uint8), GGMLType.F32, bias.shape)
    if profile is not None:
        n_on = sum(int((profile.frequencies(i) >= ALWAYS_FREQUENCY).sum()) for i in range(config.n_layer))
        notes.append(
            f"{n_on} of {sum(config.n_ff)} neurons fire for at least {ALWAYS_FREQUENCY:.0%} of the profile's "
            "tokens: they are computed without prediction"
        )
    if extra.tensors:
        files.append(cast(Any, extra))
    return Predictor(spec.kind, tuple(thresholds), first if any(first) else ()), files, notes


def n_always(gguf: GGUFFile, config: ModelConfig) -> tuple[int, ...]:
    """Return per layer how many leading neurons are always computed (`hotset sparse reorder` writes it)."""
    value = gguf.metadata.get(N_ALWAYS_KEY)
    if value is None:
        return (0,) * config.n_layer
    counts = value.tolist() if isinstance(value, np.ndarray) else value
    if (
        not isinstance(counts, list)
        or len(counts) != config.n_layer
        or not all(type(n) is int and 0 <= n < n_ff for n, n_ff in zip(counts, config.n_ff, strict=True))
    ):
        raise FormatError(
            f"the file's key {N_ALWAYS_KEY} must hold a number of neurons for each of {config.n_layer} "
            "layers; the file is damaged"
        )
    return tuple(counts)


def _requantised(
    gguf: GGUFFile, config: ModelConfig, type: GGMLType, model: str, progress: Reporter | None
) -> sidecar.Sidecar | None:
    """Return a sidecar with fc1 and fc2 in another type; None if the file already has that type.

    A matrix whose rows are not a multiple of the type's block size is not converted.
    """
    names = [f"blk.{i}.{part}.weight" for i in range(config.n_layer) for part in ("fc1", "fc2")]
    infos = [gguf.tensors[name] for name in names]
    infos = [info for info in infos if info.shape[0] % TYPES[type].block_size == 0]
    if not infos:
        raise InvalidRequestError(
            f"the predictor's rows of {gguf.tensors[names[0]].shape[0]} values cannot be stored as "
            f"{type.name}; use mlp"
        )
    infos = [info for info in infos if info.type != type]
    if not infos:
        return None

    def add(writer: GGUFWriter, info: TensorInfo) -> None:
        def data() -> np.ndarray:
            return recode(gguf.data(info.name), info.type, info.shape[0], type)

        writer.add_tensor(info.name, data, type, info.shape)

    def fill(writer: GGUFWriter) -> None:
        for info in infos:
            add(writer, info)

    n_bytes = sum(info.n_elements for info in infos) * TYPES[type].block_bytes // TYPES[type].block_size
    what = f"mlp-{type.name.lower()}"
    return sidecar.open_or_build(
        gguf, what, {}, sidecar.Contents(fill, n_bytes), model=model, progress=progress
    )


def _built(
    gguf: GGUFFile,
    config: ModelConfig,
    spec: PredictorSpec,
    weights: Overlay,
    first: tuple[int, ...],
    model: str,
    calibration: Calibration,
    progress: Reporter | None,
) -> sidecar.Sidecar:
    """Open or build the sidecar with `svd`. Its settings include the activation, which users can override."""
    settings: dict[str, object] = {"predictor": str(spec), "activation": str(config.activation)}
    settings |= calibration.settings()

    def fill(writer: GGUFWriter) -> None:
        builders.build(writer, gguf, config, spec, weights, first, calibration, progress or Reporter())

    def check(file: GGUFFile) -> None:
        predictor = Predictor(spec.kind, tuple(_thresholds(file, config)), first)
        describe(config, ChainMap(dict(file.tensors), dict(weights.tensors)), predictor)

    assert spec.rank is not None
    assert spec.type is not None
    n_values = spec.rank * sum(config.n_embd + n_ff for n_ff in config.n_ff)
    n_bytes = int(n_values * TYPES[spec.type].bits_per_value / 8)
    what = str(spec).replace(":", "-")
    contents = sidecar.Contents(fill, n_bytes, check)
    return sidecar.open_or_build(gguf, what, settings, contents, model=model, progress=progress)


def _thresholds(file: GGUFFile, config: ModelConfig) -> list[float]:
    values = file.metadata.get(builders.THRESHOLDS_KEY)
    if not isinstance(values, np.ndarray) or values.dtype != np.float32 or len(values) != config.n_layer:
        raise FormatError(f"{file.path} lacks its thresholds; delete it, and hotset builds it again.")
    thresholds: list[float] = values.tolist()
    return thresholds


class MemoryTensors:
    """Tensors in memory that override a model's, like a sidecar."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._data: dict[str, np.ndarray] = {}

    def add(self, name: str, data: np.ndarray, type: GGMLType, shape: tuple[int, ...]) -> None:
        """Add a tensor. data: uint8, the bytes as in a file."""
        self.tensors[name] = TensorInfo(name, shape, type, data.size, 0)
        self._data[name] = data

    def data(self, name: str) -> np.ndarray:
        return self._data[name]

    def check(self) -> None:
        pass  # memory does not change

    def ask_for_large_pages(self) -> None:
        pass  # not a file

    def close(self) -> None:
        self._data.clear()
