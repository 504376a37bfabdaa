"""The thresholds of a model, found by a calibration: a small JSON file next to it, `<model>.thresholds.json`.

    {"format": "hotset.thresholds", "version": 1,
     "model": {"name": file name, "size": bytes, "hash": sidecar.fingerprint},
     "mode": "dense" | "exact" | "predicted",     the mode that they are added to
     "prompts": false,                            whether prompts are thresholded too
     "text": {...},                               the calibration text: hashes, and other facts
     "layers": [{"gate": t, "attn_in": t, "attn_out": t, "ffn_in": t, "down_in": t}, ...],
     "measured": {"kept": [{"gate": share, ...}, ...],   per layer, the share of values that remain
                  ...}}                           and other results: sparsity, perplexity, ...

A missing threshold is 0 and has no effect (see model/thresholds.py). Files are untrusted: every number is
checked, and thresholds of another model are rejected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from hotset.errors import FormatError, InvalidRequestError, ModelNotFoundError
from hotset.files import missing, read_small_text, write_whole
from hotset.model.thresholds import THRESHOLD_NAMES, LayerThresholds, ThresholdName
from hotset.parameters import flag, real_number, shown, text, whole_number
from hotset.sparsity import sidecar

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile

SUFFIX = ".thresholds.json"
FORMAT, VERSION = "hotset.thresholds", 1
BaseMode = Literal["dense", "exact", "predicted"]
_MAX_BYTES = 16 << 20
_MAX_THRESHOLD = 3.0e38  # within float32


@dataclass(frozen=True)
class Calibrated:
    """The model file that thresholds belong to. size: bytes. hash: sidecar.fingerprint."""

    name: str
    size: int
    hash: str

    @classmethod
    def of(cls, gguf: GGUFFile) -> Calibrated:
        return cls(gguf.path.name, gguf.nbytes, sidecar.fingerprint(gguf))


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of every layer, and their origin.

    mode: the mode that they are added to. prompts: whether prompts are thresholded, too. text, measured: JSON
    objects that are stored unchanged.
    """

    model: Calibrated
    layers: tuple[LayerThresholds, ...]
    mode: BaseMode = "dense"
    prompts: bool = False
    text: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Thresholds:
        """Read a file of thresholds. Raises ModelNotFoundError or FormatError."""
        try:
            content = json.loads(read_small_text(path, _MAX_BYTES), parse_constant=_no_constant)
        except FileNotFoundError:
            remedy = "make one with 'hotset sparse calibrate'"
            raise ModelNotFoundError(missing(path, "file of thresholds", remedy)) from None
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            raise FormatError(f"{path} is not a file of thresholds: it is not valid JSON.") from None
        try:
            return cls._of(content)
        except InvalidRequestError as error:
            raise FormatError(
                f"{path} is not a file of thresholds: {error}; make one with 'hotset sparse calibrate'."
            ) from None

    @classmethod
    def _of(cls, content: Any) -> Thresholds:
        content = _object("the file", content)
        if content.get("format") != FORMAT:
            raise InvalidRequestError(f"format must be {FORMAT!r}, not {shown(content.get('format'))}")
        if (version := whole_number("version", content.get("version"), 0)) != VERSION:
            raise InvalidRequestError(f"version {version} is unknown; only {VERSION} is supported")
        model = _object("model", content.get("model"))
        mode = content.get("mode", "dense")
        if mode not in get_args(BaseMode):
            raise InvalidRequestError(f"mode must be one of {', '.join(get_args(BaseMode))}")
        layers = content.get("layers")
        if not isinstance(layers, list) or not layers:
            raise InvalidRequestError("layers must be a list with an object per layer")
        return cls(
            Calibrated(
                text("the model's name", model.get("name")),
                whole_number("the model's size", model.get("size"), 0),
                text("the model's hash", model.get("hash")),
            ),
            tuple(_layer(i, layer) for i, layer in enumerate(layers)),
            cast(BaseMode, mode),
            flag("prompts", content.get("prompts", False)),
            _object("text", content.get("text", {})),
            _object("measured", content.get("measured", {})),
        )

    def check_model(self, gguf: GGUFFile, n_layer: int) -> None:
        """Raise InvalidRequestError if they belong to another file, or do not have n_layer layers."""
        if (self.model.size, self.model.hash) != (gguf.nbytes, sidecar.fingerprint(gguf)):
            raise InvalidRequestError(
                f"the thresholds belong to another model file ({self.model.name[:80]!r}); make some for "
                "this one with 'hotset sparse calibrate'"
            )
        if len(self.layers) != n_layer:
            raise InvalidRequestError(
                f"the thresholds are of {len(self.layers)} layers, but the model has {n_layer}; make them "
                "again with 'hotset sparse calibrate'"
            )

    @property
    def n_nonzero(self) -> int:
        """Return the number of thresholds that have an effect."""
        return sum(value != 0 for layer in self.layers for _, value in layer.items())

    @property
    def knows_kept(self) -> bool:
        """Return whether the calibration measured the share of values that remain."""
        return any(
            self.kept(i, name) is not None for i in range(len(self.layers)) for name in THRESHOLD_NAMES
        )

    def kept(self, layer: int, name: ThresholdName) -> float | None:
        """Return the share of values that a threshold keeps, measured by the calibration; None if unknown.

        For "down_in" it is the share of neurons, whichever threshold makes them zero.
        """
        kept = self.measured.get("kept")
        of_layer = kept[layer] if isinstance(kept, list) and layer < len(kept) else None
        share = of_layer.get(name) if isinstance(of_layer, dict) else None
        try:
            return None if share is None else real_number(name, share, 0, 1)
        except InvalidRequestError:
            return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all. Raises HotsetError if it cannot be written."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "model": {"name": self.model.name, "size": self.model.size, "hash": self.model.hash},
            "mode": self.mode,
            "prompts": self.prompts,
            "text": dict(self.text),
            "layers": [{name: value for name, value in layer.items() if value} for layer in self.layers],
            "measured": dict(self.measured),
        }
        write_whole({Path(path): json.dumps(content, indent=1, allow_nan=False) + "\n"})


def thresholds_path(model: Path) -> Path:
    """Return the path of a model's thresholds, next to the model."""
    return model.with_name(f"{sidecar.stem_of(model)}{SUFFIX}")


def _layer(index: int, content: Any) -> LayerThresholds:
    where = f"layer {index}"
    content = _object(where, content)
    if unknown := sorted(set(content) - set(THRESHOLD_NAMES)):
        raise InvalidRequestError(
            f"{where} has {shown(unknown[0])}, which is not one of {', '.join(THRESHOLD_NAMES)}"
        )
    return LayerThresholds(
        **{name: real_number(f"{name} of {where}", v, 0, _MAX_THRESHOLD) for name, v in content.items()}
    )


def _object(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} must be an object, not {shown(value)}")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
