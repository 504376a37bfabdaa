"""The supported architectures as `hotset list` shows them, and hints for files of unsupported ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, cast

from hotset.errors import HotsetError, UnsupportedModelError
from hotset.model.architectures import ARCHITECTURES, Architecture, UnknownArchitectureError
from hotset.model.config import ModelConfig, config_from_gguf
from hotset.model.decoder import differences
from hotset.model.operations import has_zeros

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile

_NAMED = 6  # tensors and keys in a message


@dataclass(frozen=True)
class SupportedArchitecture:
    """A row of `hotset list --architectures`.

    name: value of general.architecture. kind: dense or MoE, and special features. sparsity: which neurons
    need not be computed. compared_with: the reference of the tests.
    """

    name: str
    kind: str
    sparsity: str
    compared_with: str


def supported() -> list[SupportedArchitecture]:
    """Return all architectures, sorted by name."""
    return [
        SupportedArchitecture(name, _kind(row), _sparsity(row), row.compared_with)
        for name, row in sorted(ARCHITECTURES.items())
    ]


def _kind(row: Architecture) -> str:
    attention = {
        "MLA": row.latent_eps is not None,
        "compressed keys": row.compressed,
        "an indexer": row.indexer is not None,
        "gated delta nets": row.delta_net is not None,
        "short convolutions": row.short_conv,
        "state spaces": row.state_space,
        "RWKV": row.rwkv is not None,
        "AltUp": row.altup,
        "gated residual streams": row.gated_streams,
        "embeddings of n-grams": row.ngrams,
        "hyper-connections": row.hyper,
    }
    named = [name for name, has in attention.items() if has]
    encoder = [] if row.causal else ["encoder"]
    ffn = "dense" if row.experts is None else "dense or MoE" if row.experts.optional else "MoE"
    return ", ".join([*encoder, ffn, *named])


def _sparsity(row: Architecture) -> str:
    activation = row.activation
    if row.altup:  # only in the layers that the file names
        return "exact zeros (Gaussian top-k)"
    if not row.causal:  # calibration of thresholds needs logits
        return "none"
    if not has_zeros(activation.gate):
        return "thresholds"
    return f"exact zeros ({'drelu' if activation.up == 'relu' else activation.gate})"


def read_config(gguf: GGUFFile, *, activation: str | None = None) -> ModelConfig:
    """Return `config_from_gguf`; for an unknown architecture the error names the nearest ones."""
    try:
        return config_from_gguf(gguf, activation=activation)
    except UnknownArchitectureError as error:
        raise UnsupportedModelError(f"{error}. {_what_is_new(gguf)}") from None


@dataclass(frozen=True)
class _Difference:
    """The difference from one architecture: tensors, without layer numbers, and keys."""

    name: str
    missing: set[str]
    unused: set[str]
    unread: set[str]


class _Renamed:
    """A file whose keys are renamed to another architecture; records which of them are read."""

    def __init__(self, gguf: GGUFFile, name: str) -> None:
        own = f"{gguf.metadata['general.architecture']}."
        self.tensors, self.data, self.dialect = gguf.tensors, gguf.data, gguf.dialect
        renamed = {
            f"{name}.{k.removeprefix(own)}" if k.startswith(own) else k: v for k, v in gguf.metadata.items()
        }
        self.metadata = _Noted(renamed | {"general.architecture": name})


class _Noted(dict[str, Any]):
    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def _what_is_new(gguf: GGUFFile) -> str:
    name = str(gguf.metadata["general.architecture"])
    found = [difference for row in ARCHITECTURES if (difference := _difference(gguf, row)) is not None]
    by_name = sorted(ARCHITECTURES, key=lambda row: -SequenceMatcher(None, row, name).ratio())
    if not found:
        return f"The nearest names are {', '.join(by_name[:3])}"
    found.sort(key=lambda one: (len(one.missing) + len(one.unused), by_name.index(one.name)))
    nearest = found[0]
    parts = [f"Its tensors are most like those of {', '.join(one.name for one in found[:3])}"]
    for what, names in (
        (f"tensors that {nearest.name} does not have", nearest.unused),
        (f"tensors of {nearest.name} that are missing or have another shape", nearest.missing),
        ("keys that hotset does not read", nearest.unread),
    ):
        if names:
            parts.append(f"{what}: {_some(names)}")
    return "; ".join(parts)


def _difference(gguf: GGUFFile, row: str) -> _Difference | None:
    """Return the difference from an architecture; None if the file's keys are not valid for it."""
    file = _Renamed(gguf, row)
    try:
        config = config_from_gguf(cast("GGUFFile", file))
        missing, unused = differences(config, file.tensors)
    except HotsetError:
        return None
    own = f"{row}."
    unread = {key.removeprefix(own) for key in file.metadata if key.startswith(own)}
    unread -= {key.removeprefix(own) for key in file.metadata.read} | _NEVER_READ
    return _Difference(row, _stems(missing), _stems(unused), unread)


# Keys of many files that no layer depends on.
_NEVER_READ = {"vocab_size", "rope.dimension_sections"}


def _stems(names: Iterable[str]) -> set[str]:
    return {re.sub(r"^blk\.\d+\.", "blk.N.", name) for name in names}


def _some(names: set[str]) -> str:
    shown = ", ".join(name[:80] for name in sorted(names)[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown
