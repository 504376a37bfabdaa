"""Activation profiles: how often each neuron fired, and each expert was chosen, over some text.

    profile = collect(model.tap_steps, model.config, tokens, model=sidecar.fingerprint(gguf))
    profile.save(profile_path(gguf.path))

A neuron fires if its value (`blk.N.ffn_act`) is not zero. Counts belong to one model file: they are in the
order of its neurons, in an MoE layer expert 0 first. The file is GGUF
(`<model>.profile.hotset.gguf`), with an I64 tensor `blk.N.counts` [n_ff] per layer, and `blk.N.expert_counts`
[n_experts] for each layer with experts. If some layers have no FFN, `hotset.profile.n_layers` is the number
of layers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.errors import FormatError, InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import GGUFWriter, ValueType, open_gguf
from hotset.formats.quants import GGMLType
from hotset.sparsity import sidecar, taps

if TYPE_CHECKING:
    from hotset.model.config import ModelConfig
    from hotset.sparsity.taps import TapSteps

ALWAYS_FREQUENCY = 0.95  # a neuron that fires this often is not worth predicting
MAX_TOKENS = 1 << 48  # of a profile, so that the activations of a layer add up within 64 bits
HOT_MASS = 0.8  # the share of activations that "hot" neurons account for, as in the PowerInfer paper
_OF_EXPERTS = ".expert_counts"
_N_TOKENS, _MODEL, _DATA = "hotset.profile.n_tokens", "hotset.profile.model", "hotset.profile.data"
_N_LAYERS, _MOST_LAYERS = "hotset.profile.n_layers", 1 << 12


@dataclass(frozen=True)
class ExpertProfile:
    """The experts of a layer.

    hot_share: the share of experts that account for HOT_MASS of all choices. busiest: the share of tokens
    that use the most frequent expert. n_never: experts that no token uses.
    """

    n: int
    hot_share: float
    busiest: float
    n_never: int


@dataclass(frozen=True)
class LayerProfile:
    """The neurons of a layer, of all experts together.

    active_share: mean share of neurons that fire. hot_share: the share of neurons that account for HOT_MASS
    of all activations. n_always: neurons that fire for at least ALWAYS_FREQUENCY of the tokens; n_never: for
    none. experts: None without experts.
    """

    layer: int
    n_ff: int
    active_share: float
    hot_share: float
    n_always: int
    n_never: int
    experts: ExpertProfile | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Profile:
    """Counts of firing neurons and chosen experts.

    counts: per layer uint64 [n_ff], the tokens for which each neuron fired; empty for a layer without an FFN.
    n_tokens: how many tokens were run. model: fingerprint of the file (sidecar.fingerprint). data: hashes of
    the texts. experts: layer → uint64 [n_experts], the tokens that used each expert; only layers with
    experts.
    """

    counts: tuple[np.ndarray, ...]
    n_tokens: int
    model: str
    data: tuple[str, ...]
    experts: Mapping[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile. Raises ModelNotFoundError or FormatError."""
        with open_gguf(path) as file:
            n_tokens, model, data = (file.metadata.get(key) for key in (_N_TOKENS, _MODEL, _DATA))
            routed = [name for name in file.tensors if name.endswith(_OF_EXPERTS)]
            n_layer = file.metadata.get(_N_LAYERS, len(file.tensors) - len(routed))
            if type(n_layer) is not int or not 0 < n_layer <= _MOST_LAYERS:
                raise FormatError(
                    f"{path} is not an activation profile; make one with 'hotset sparse profile'."
                )
            own = [f"blk.{i}.counts" for i in range(n_layer)]
            names = [name for name in own if name in file.tensors]
            layers = {f"blk.{i}{_OF_EXPERTS}": i for i in range(n_layer)}
            if (
                type(n_tokens) is not int
                or not 0 <= n_tokens < MAX_TOKENS
                or not names
                or not isinstance(model, str)
                or not isinstance(data, list)
                or list(file.tensors) != names + routed
                or not layers.keys() >= set(routed)
                or any(info.type != GGMLType.I64 or len(info.shape) != 1 for info in file.tensors.values())
            ):
                raise FormatError(
                    f"{path} is not an activation profile; make one with 'hotset sparse profile'."
                )
            none = np.zeros(0, np.uint64)
            counts = tuple(
                file.data(name).view("<i8").astype(np.uint64) if name in file.tensors else none
                for name in own
            )
            experts = {layers[name]: file.data(name).view("<i8").astype(np.uint64) for name in routed}
            every = [*counts, *experts.values()]
            if any((count > n_tokens).any() for count in every):  # a negative count is a large one here
                raise FormatError(f"{path} counts a neuron more often than its tokens; make it again.")
            if any(len(count) == 0 or len(counts[i]) % len(count) for i, count in experts.items()):
                raise FormatError(f"{path} has experts that do not share their neurons; make it again.")
            return cls(counts, n_tokens, model, tuple(map(str, data)), experts)

    def frequencies(self, layer: int) -> np.ndarray:
        """Return float64 [n_ff], from 0 to 1."""
        return self.counts[layer] / max(self.n_tokens, 1)

    def is_of(self, model: str, n_ff: Sequence[int] | None = None) -> bool:
        """Return whether it describes the file with this fingerprint, whose layers have n_ff neurons."""
        return model == self.model and (n_ff is None or tuple(map(len, self.counts)) == tuple(n_ff))

    def check_model(self, model: str, n_ff: Sequence[int] | None = None) -> None:
        """Raise InvalidRequestError if the profile describes another file (see is_of)."""
        if not self.is_of(model, n_ff):
            raise InvalidRequestError(
                "the profile belongs to another model file; make one of this file with "
                "'hotset sparse profile'"
            )

    def merge(self, other: Profile) -> Profile:
        """Return both together. Raises InvalidRequestError for another model or a text that both counted."""
        other.check_model(self.model, tuple(map(len, self.counts)))
        if set(self.data) & set(other.data):
            raise InvalidRequestError(
                "the profile already contains this text and would count it twice; use another text, or start "
                "a new profile"
            )
        if {i: len(n) for i, n in self.experts.items()} != {i: len(n) for i, n in other.experts.items()}:
            raise InvalidRequestError(
                "one of the profiles has no counts of experts, or of others; make both with this version"
            )
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        experts = {i: count + other.experts[i] for i, count in self.experts.items()}
        data = self.data + other.data
        return Profile(counts, self.n_tokens + other.n_tokens, self.model, data, experts)

    def permuted(self, orders: Sequence[np.ndarray], model: str) -> Profile:
        """Return the same counts for a file whose neuron i is neuron orders[layer][i] of this one."""
        counts = tuple(count[order] for count, order in zip(self.counts, orders, strict=True))
        return Profile(counts, self.n_tokens, model, self.data)

    def summary(self) -> list[LayerProfile]:
        """Return a summary of each layer with an FFN."""
        layers = []
        for i, counts in enumerate(self.counts):
            if not len(counts):
                continue
            n_always = int((self.frequencies(i) >= ALWAYS_FREQUENCY).sum())
            active = int(counts.sum()) / (max(self.n_tokens, 1) * len(counts))
            never = int((counts == 0).sum())
            layer = LayerProfile(i, len(counts), active, _hot_share(counts), n_always, never)
            if (chosen := self.experts.get(i)) is not None:
                busiest = int(chosen.max()) / max(self.n_tokens, 1)
                none = int((chosen == 0).sum())
                layer = replace(layer, experts=ExpertProfile(len(chosen), _hot_share(chosen), busiest, none))
            layers.append(layer)
        return layers

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all. Raises HotsetError if it cannot be written."""
        writer = GGUFWriter(path, "hotset")
        writer.add(_N_TOKENS, self.n_tokens, ValueType.UINT64)
        writer.add(_MODEL, self.model)
        writer.add(_DATA, list(self.data), ValueType.STRING)
        if not all(map(len, self.counts)):
            writer.add(_N_LAYERS, len(self.counts), ValueType.UINT32)
        for i, counts in enumerate(self.counts):
            if len(counts):
                writer.add_tensor(f"blk.{i}.counts", counts.astype("<i8").view(np.uint8), GGMLType.I64)
        for i, counts in self.experts.items():
            writer.add_tensor(f"blk.{i}{_OF_EXPERTS}", counts.astype("<i8").view(np.uint8), GGMLType.I64)
        writer.write()


def _hot_share(counts: np.ndarray) -> float:
    """Return the share of entries that account for HOT_MASS of the total; 0 if the total is 0."""
    total = int(counts.sum())
    hottest = np.cumsum(np.sort(counts)[::-1])
    return (int(np.searchsorted(hottest, HOT_MASS * total)) + 1) / len(counts) if total else 0.0


def profile_path(model: Path) -> Path:
    """Return the path of a model's profile, next to the model."""
    return model.with_name(f"{sidecar.stem_of(model)}.profile{sidecar.SUFFIX}")


def collect(
    tap_steps: TapSteps,
    config: ModelConfig,
    tokens: np.ndarray,
    *,
    model: str,
    longest: int = taps.MAX_SEQUENCE,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Count over a text. tokens: int32 [n] or [n_sequences, n]; long ones are split at `longest` tokens.

    tap_steps: Model.tap_steps, or taps.of_backend. model: the file's fingerprint. progress: called with
    (tokens done, total tokens).
    """
    if tokens.size == 0:
        raise InvalidRequestError("the text is empty; give some text to profile the model on")
    counter = Counter(config)
    for _, values in taps.over(tap_steps, tokens, counter.names, longest=longest, progress=progress):
        counter.add(values)
    return counter.profile(model, (digest_of(tokens),))


def digest_of(tokens: np.ndarray) -> str:
    """Return the hash by which a profile recognises a text."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()[:32]


class Counter:
    """A counter of firing neurons and chosen experts, step by step.

    names: the taps that `add` reads. counts, experts: as in a Profile. n_tokens: counted so far.
    """

    def __init__(self, config: ModelConfig) -> None:
        if not any(config.n_ff):
            raise UnsupportedModelError("a profile counts the neurons of FFNs, but the model has no FFN")
        self.n_tokens = 0
        self.counts = tuple(np.zeros(n_ff, np.uint64) for n_ff in config.n_ff)
        self._used = {i: layer.experts.n_used for i, layer in enumerate(config.layers) if layer.experts}
        self.experts = {
            i: np.zeros(layer.experts.n, np.uint64) for i, layer in enumerate(config.layers) if layer.experts
        }
        acts = tuple(f"blk.{i}.ffn_act" for i, n_ff in enumerate(config.n_ff) if n_ff)
        self.names = acts + tuple(f"blk.{i}.ffn_route" for i in self.experts)

    def add(self, values: Mapping[str, np.ndarray]) -> None:
        """Count the taps of a step."""
        self.n_tokens += len(values[self.names[0]])
        for i, count in enumerate(self.counts):
            if not len(count):
                continue
            fires = values[f"blk.{i}.ffn_act"] != 0
            if i not in self.experts:
                count += np.count_nonzero(fires, axis=0).astype(np.uint64)
                continue
            ids = values[f"blk.{i}.ffn_route"][:, : self._used[i]].astype(np.int64).ravel()
            n_experts = len(self.experts[i])
            self.experts[i] += np.bincount(ids, minlength=n_experts).astype(np.uint64)
            fires = fires.reshape(len(ids), -1)  # one row per expert and token
            of_expert = count.reshape(n_experts, -1)
            for id in np.unique(ids):
                of_expert[id] += np.count_nonzero(fires[ids == id], axis=0).astype(np.uint64)

    def profile(self, model: str, data: tuple[str, ...] = ()) -> Profile:
        """Return the counts as a profile of a file and of texts (see Profile)."""
        return Profile(self.counts, self.n_tokens, model, data, self.experts)


def import_activations(folder: Path, config: ModelConfig, model: str) -> Profile:
    """Return the counts that are published with a PowerInfer model, activation/activation_<layer>.pt.

    The files do not contain the number of tokens. The largest count replaces it, because the hottest neuron
    of a model fires for nearly all tokens. Raises FormatError if they do not fit the model.
    """
    from hotset.formats.powerinfer import read_activations

    layers = read_activations(folder, config.n_layer, config.n_ff)
    counts = tuple(layer.round().astype(np.uint64) for layer in layers)
    digest = hashlib.sha256(b"".join(count.astype("<u8").tobytes() for count in counts)).hexdigest()[:32]
    return Profile(counts, max(int(count.max()) for count in counts), model, (digest,))


def export_activations(profile: Profile, folder: Path) -> None:
    """Write activation_<layer>.pt for the original engine.

    Raises UnsupportedModelError if a layer has no FFN.
    """
    if not all(map(len, profile.counts)):
        raise UnsupportedModelError("activation_<layer>.pt requires an FFN in every layer of the model")
    from hotset.formats.powerinfer import write_activations

    write_activations(folder, profile.counts)
