"""Files of trained predictors: the original layout, and a model file that includes them.

    folder/model_<layer>.pt   state dict: fc1.weight [rank, n_embd], fc2.weight [n_ff, rank], float32
    folder/config.json        {"sparse_threshold": 0.0}

PowerInfer's converters read these. The model file is GGUF with blk.N.fc1.weight and blk.N.fc2.weight: in
PowerInfer's format if that can hold the model with unchanged values, otherwise in the model's own format with
the predictors added, which hotset runs, but other engines of plain GGUF do not know.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.errors import HotsetError, InvalidRequestError
from hotset.files import check_target, write_whole
from hotset.formats import planes
from hotset.formats.gguf import DEFAULT_ALIGNMENT, Dialect, GGUFWriter, ValueType
from hotset.formats.quants import fitting, quantize
from hotset.formats.torch_file import write_torch
from hotset.model.architectures import POWERINFER_ARCHITECTURES
from hotset.model.keys import FATRELU_THRESHOLD_KEY, SPARSE_THRESHOLD_KEY, UP_ACTIVATION_KEY
from hotset.training.predictor_layer import PredictorWeights

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.formats.quants import GGMLType
    from hotset.model.config import ModelConfig

THRESHOLD = 0.0  # of every layer: see predictor_layer.py
_PREDICTOR_TENSORS = ("fc1.weight", "fc2.weight", "always.bias")
# An architecture that the original engine only has under another name: a llama with ReLU on the up
# projection, too.
_AS_BAMBOO = ("llama", "relu", "relu")


def is_of_predictor(name: str) -> bool:
    """Return whether a tensor belongs to a predictor in the file."""
    return name.startswith("blk.") and name.endswith(_PREDICTOR_TENSORS)


def write_folder(folder: Path, layers: Sequence[PredictorWeights]) -> None:
    """Write model_<layer>.pt and, last, config.json. Raises HotsetError if they cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for i, weights in enumerate(layers):
            write_torch(folder / f"model_{i}.pt", {"fc1.weight": weights.fc1, "fc2.weight": weights.fc2})
        write_whole({folder / "config.json": json.dumps({"sparse_threshold": THRESHOLD})})
    except OSError as error:
        raise HotsetError(f"{folder} cannot be written ({error.strerror or error}); choose another") from None


def powerinfer_architecture(gguf: GGUFFile, config: ModelConfig) -> str:
    """Return the architecture under which PowerInfer's format holds the model.

    Raises InvalidRequestError if it cannot: another activation, or a down projection that would change.
    """
    activation = config.activation
    name = config.architecture
    if (name, activation.gate, activation.up) == _AS_BAMBOO:
        name = "bamboo"
    row = POWERINFER_ARCHITECTURES.get(name)
    if row is None or row.activation != activation:
        raise InvalidRequestError(
            f"PowerInfer's format does not support {config.architecture} models with the activation "
            f"{activation.gate}; write the plain format"
        )
    unknown = next((t for t in gguf.tensors if name in ("llama", "bamboo") and t.endswith(".bias")), None)
    if unknown is not None and not is_of_predictor(unknown):
        raise InvalidRequestError(
            f"PowerInfer's format does not support {unknown} in a {name} model; write the plain format"
        )
    for i in range(config.n_layer):
        info = gguf.tensors.get(f"blk.{i}.ffn_down.weight")
        transposed = f"blk.{i}.ffn_down_t.weight" in gguf.tensors
        if not transposed and (info is None or planes.layout_of(info) != "transposed"):
            raise InvalidRequestError(
                f"PowerInfer's format has a row of the down projection per neuron. In this file it is "
                f"{info.type.name if info else 'missing'}, so neurons share their scales; write the plain "
                "format, or train on the F16 model and quantise the result"
            )
    return name


def write_merged(
    path: Path,
    gguf: GGUFFile,
    config: ModelConfig,
    layers: Sequence[PredictorWeights],
    type: GGMLType,
    dialect: Dialect,
) -> None:
    """Write the model with its predictors, which replace any old ones; whole or not at all.

    type: of fc1 and fc2; a matrix whose rows are not a multiple of its block size is F16. dialect:
    "powerinfer" raises the InvalidRequestError of powerinfer_architecture.
    """
    check_target(path, gguf.paths)
    powerinfer = dialect == "powerinfer"
    name = powerinfer_architecture(gguf, config) if powerinfer else config.architecture
    alignment = gguf.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    assert isinstance(alignment, int)  # open_gguf has checked it
    writer = GGUFWriter(path, name, alignment, dialect)
    own = _activation_keys(name, config) | {SPARSE_THRESHOLD_KEY: THRESHOLD}
    for key, value in gguf.metadata.items():
        if key in ("general.architecture", "general.alignment") or key.startswith("split."):
            continue
        if key.startswith(f"{config.architecture}."):
            key = name + key.removeprefix(config.architecture)
        if key not in own and key not in (UP_ACTIVATION_KEY, FATRELU_THRESHOLD_KEY):
            original = key if name == config.architecture else _renamed(key, name, config.architecture)
            writer.add(key, value, ValueType(gguf.metadata_types[original][-1]))
    for key, fact in own.items():
        writer.add(key, fact)

    def add(tensor: str) -> None:
        info = gguf.tensors[tensor]
        stem = tensor.removesuffix(".weight")
        if powerinfer and stem.endswith(".ffn_down"):
            if f"{stem}_t.weight" not in gguf.tensors:
                planes.add_down(writer, gguf, stem)
            return
        new = tensor.replace(".ffn_down.bias", ".ffn_down_t.bias") if powerinfer else tensor
        writer.add_tensor(new, lambda: gguf.data(tensor), info.type, info.shape)

    for tensor in gguf.tensors:
        if not is_of_predictor(tensor):
            add(tensor)
    if powerinfer and name != "opt" and "output.weight" not in gguf.tensors:
        # The original engine supports a tied output only for OPT.
        info = gguf.tensors["token_embd.weight"]
        writer.add_tensor("output.weight", lambda: gguf.data(info.name), info.type, info.shape)
    for i, weights in enumerate(layers):
        for part, matrix in (("fc1", weights.fc1), ("fc2", weights.fc2)):
            stored = fitting(type, matrix.shape[1])
            writer.add_tensor(f"blk.{i}.{part}.weight", quantize(matrix, stored), stored, matrix.shape[::-1])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HotsetError(f"{path.parent} cannot be created ({error.strerror or error})") from None
    writer.write()


def _renamed(key: str, name: str, original: str) -> str:
    return original + key.removeprefix(name) if key.startswith(f"{name}.") else key


def _activation_keys(name: str, config: ModelConfig) -> dict[str, object]:
    """Return keys for the model's activation, which may have been only an option until now."""
    activation = config.activation
    keys: dict[str, object] = {f"{name}.hidden_activation": str(activation.gate)}
    if activation.up is not None:
        keys[UP_ACTIVATION_KEY] = str(activation.up)
    if activation.gate == "fatrelu":
        keys[FATRELU_THRESHOLD_KEY] = float(activation.threshold)
    return keys
