"""Traces of routes: which experts each token of a text had, layer by layer.

    trace = record(model.tap_steps, model.graph, cost.expert_bytes, rows, model=..., data=...)
    trace.save(default_path(gguf.path))

What a cache of experts would have done over the text follows from its trace alone (sparsity/replay.py). The
file is GGUF (`<model>.trace.hotset.gguf`): for each layer with experts an I16 tensor `blk.N.routes`
[n_used, n_tokens], a token's experts with the best first, and keys that start with `hotset.trace.`: `model`
(fingerprint), `name` (of the model's file), `data` (hash of the text's tokens), `n_experts`, `starts` (the
first token of each sequence), `expert_bytes` (of one expert, for each of these layers).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hotset.errors import FormatError, InvalidRequestError
from hotset.formats.gguf import GGUFWriter, ValueType, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import MAX_EXPERTS
from hotset.sparsity import sidecar

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.model.graph import Graph

_PREFIX = "hotset.trace."
_MAX_BYTES = 1 << 44  # of an expert: sums over experts and tokens then stay below 2^63

TapSteps = Callable[[Sequence[int], Sequence[str]], Iterator[Mapping[str, np.ndarray]]]


@dataclass(frozen=True)
class RouteTrace:
    """routes: int32 [n_tokens, n_layers, n_used], the experts of each token, best first.

    layers: the numbers of the layers with experts, rising. n_experts: of each. expert_bytes: of one expert of
    each layer. starts: the first token of each sequence, rising from 0. model: fingerprint of the file; name:
    what it is called. data: hash of the tokens.
    """

    routes: np.ndarray
    layers: tuple[int, ...]
    n_experts: int
    expert_bytes: tuple[int, ...]
    starts: tuple[int, ...]
    model: str
    name: str
    data: str

    @property
    def n_tokens(self) -> int:
        return len(self.routes)

    @property
    def n_used(self) -> int:
        """Experts of a token in a layer."""
        return int(self.routes.shape[2])

    @property
    def cycle(self) -> int:
        """Experts that one token needs in all layers; token_cycle has their bytes."""
        return len(self.layers) * self.n_used

    @property
    def token_cycle(self) -> int:
        """Bytes of the experts that one token needs, in all layers."""
        return sum(self.expert_bytes) * self.n_used

    def counts(self) -> np.ndarray:
        """How many tokens had each expert: int64 [n_layers, n_experts]."""
        ids = self.routes + self.n_experts * np.arange(len(self.layers))[:, None]
        n = len(self.layers) * self.n_experts
        return np.bincount(ids.ravel(), minlength=n).reshape(-1, self.n_experts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, whole or not at all. HotsetError where it cannot be written."""
        writer = GGUFWriter(path, "hotset")
        for key, text in (("model", self.model), ("name", self.name), ("data", self.data)):
            writer.add(_PREFIX + key, text)
        writer.add(_PREFIX + "n_experts", self.n_experts, ValueType.UINT32)
        writer.add(_PREFIX + "starts", np.array(self.starts, np.int64))
        writer.add(_PREFIX + "expert_bytes", np.array(self.expert_bytes, np.int64))
        for i, layer in enumerate(self.layers):
            routes = np.ascontiguousarray(self.routes[:, i], "<i2")
            writer.add_tensor(
                f"blk.{layer}.routes", routes.view(np.uint8), GGMLType.I16, (self.n_used, self.n_tokens)
            )
        writer.write()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RouteTrace:
        """Reads a trace. Raises ModelNotFoundError or FormatError."""
        with open_gguf(path) as file:
            found = _read(cls, file)
        if found is None:
            raise FormatError(f"{path} is not a trace of experts; make one with 'hotset trace'.")
        return found


def _read(kind: type[RouteTrace], file: GGUFFile) -> RouteTrace | None:
    """What the file says, or None where it is not the file of a trace, or contradicts itself."""
    metadata = {key: file.metadata.get(_PREFIX + key) for key in ("model", "name", "data", "n_experts")}
    n_experts = metadata["n_experts"]
    names = [re.fullmatch(r"blk\.(\d{1,6})\.routes", name) for name in file.tensors]
    layers = [int(name[1]) for name in names if name]
    shapes = {info.shape for info in file.tensors.values()}
    starts, sizes = _numbers(file, "starts"), _numbers(file, "expert_bytes")
    if (
        any(not isinstance(metadata[key], str) for key in ("model", "name", "data"))
        or type(n_experts) is not int
        or not 1 <= n_experts <= MAX_EXPERTS
        or not layers
        or not all(names)
        or any(a >= b for a, b in itertools.pairwise(layers))
        or any(info.type != GGMLType.I16 for info in file.tensors.values())
        or len(shapes) != 1
        or len(shape := next(iter(shapes))) != 2
        or not 1 <= shape[0] <= n_experts
        or shape[1] < 1
        or not starts
        or starts[0] != 0
        or any(a >= b for a, b in zip(starts, [*starts[1:], shape[1]], strict=True))
        or len(sizes) != len(layers)
        or not all(0 < size < _MAX_BYTES for size in sizes)
    ):
        return None
    parts = [file.data(name).view("<i2").reshape(shape[1], shape[0]) for name in file.tensors]
    routes = np.stack(parts, axis=1).astype(np.int32)
    if routes.min() < 0 or routes.max() >= n_experts or (np.diff(np.sort(routes)) == 0).any():
        return None
    model, name, data = (str(metadata[key]) for key in ("model", "name", "data"))
    return kind(routes, tuple(layers), n_experts, tuple(sizes), tuple(starts), model, name, data)


def _numbers(file: GGUFFile, key: str) -> list[int]:
    """An array of whole numbers; empty where the key holds something else."""
    value = file.metadata.get(_PREFIX + key)
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
        return []
    return [int(one) for one in value]


def default_path(model: Path) -> Path:
    """Where a model's trace lies: beside it."""
    return model.with_name(f"{sidecar.stem_of(model)}.trace{sidecar.SUFFIX}")


def record(
    tap_steps: TapSteps,
    graph: Graph,
    expert_bytes: Mapping[int, int],
    tokens: np.ndarray,
    *,
    model: str,
    name: str,
    progress: Callable[[int, int], None] | None = None,
) -> RouteTrace:
    """The routes of a text. tokens: int32 [n] or [n_sequences, n], each of which fits the context.

    tap_steps: Model.tap_steps. expert_bytes: Cost.expert_bytes. progress: told (tokens done, tokens of all).
    Raises InvalidRequestError for a model without experts and for no tokens.
    """
    routed = [ffn for ffn in graph.ffns if ffn.route is not None]
    if not routed:
        raise InvalidRequestError(
            "the model has no experts, and so no routes to trace; 'hotset profile' counts its neurons"
        )
    if tokens.size == 0:
        raise InvalidRequestError("the text is empty; give some text to trace the model on")
    names = [ffn.route.out.name for ffn in routed if ffn.route is not None]
    n_used = {ffn.route.n_used for ffn in routed if ffn.route is not None}
    n_experts = {ffn.route.x.width for ffn in routed if ffn.route is not None}
    assert len(n_used) == len(n_experts) == 1, "layers have experts alike"
    k = n_used.pop()
    parts, starts, done = [], [], 0
    for row in tokens if tokens.ndim == 2 else [tokens]:
        starts.append(done)
        for values in tap_steps(row.tolist(), names):
            parts.append(np.stack([values[name][:, :k].astype(np.int32) for name in names], axis=1))
            done += len(parts[-1])
            if progress is not None:
                progress(done, tokens.size)
    return RouteTrace(
        np.concatenate(parts),
        tuple(ffn.layer for ffn in routed),
        n_experts.pop(),
        tuple(expert_bytes[ffn.layer] for ffn in routed),
        tuple(starts),
        model,
        name,
        hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()[:32],
    )
