"""The sizes of a config.json, and the parts that a family of models adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hotset.convert.sources import Origin

if TYPE_CHECKING:
    import numpy as np

    from hotset.convert.sources import Source
    from hotset.model.architectures import Architecture


class Facts:
    """Sizes that a config.json gives a model. A `FamilyPart` of its family may change them.

    raw: the entries of the model that generates, with the defaults of its class. n_nextn: layers for
    multi-token prediction after the n_layer of the model. n_rot: rotated channels of a head, if a part
    knows them. n_ff_of_layers: neurons of each layer, if they differ. n_ctx: the context in tokens.
    n_unused_positions, n_cut_positions: rows of the learned positions, at the beginning and at the end, that
    the file leaves out. partial: whether partial_rotary_factor is read. default_rope: the class's
    rope_parameters.
    """

    raw: dict[str, Any]
    row: Architecture
    layers: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    partial: bool
    default_rope: dict[str, Any]
    n_ff_of_layers: list[int] | None = None
    n_rot: int | None = None
    n_nextn = n_expert = n_expert_used = n_ff_expert = n_unused_positions = n_cut_positions = 0


class FamilyPart:
    """Entries of config.json, keys and tensors of a family of checkpoints that a llama does not have.

    A class of checkpoints lists its parts (HFClass.parts). The methods here have the behaviour of a llama.

    constants: ends of the names of tensors that become keys of the file. in_parts: each layer is
    attention, or its replacement, or an FFN. adapts: adapters fit the matrices of the file as they fit the
    matrices of the checkpoint.
    """

    constants: ClassVar[tuple[str, ...]] = ()
    in_parts: ClassVar[bool] = False
    adapts: ClassVar[bool] = True

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    @staticmethod
    def prepared(config: dict[str, Any]) -> dict[str, Any]:
        """Return config.json in the form that the part reads."""
        return config

    @staticmethod
    def dequantises(quantised: Any) -> bool:
        """Return whether the part reads tensors with this quantization_config."""
        return False

    def sizes(self) -> dict[str, Any]:
        """Return keys of the file that follow the sizes of all models."""
        return {}

    def keys(self) -> dict[str, Any]:
        """Return keys of the file that follow the keys of experts."""
        return {}

    def learn(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Inspect all tensors of the checkpoint, by their full names, before the first is placed."""

    def tensor_keys(self, architecture: str) -> dict[str, Any]:
        """Return keys of the file, by their full names, that are tensors in the checkpoint."""
        return {}

    def reads(self, name: str) -> bool:
        """Return whether the file has the tensor of this full name."""
        return not name.endswith(tuple(f".{stem}" for stem in self.constants))

    def targets(self, targets: list[str], layer: int) -> list[str]:
        """Return the targets that replace `targets` for a tensor of a layer."""
        return targets

    def n_parts(self, stem: str) -> int | None:
        """Return how many tensors of the checkpoint become `stem`; None if the part does not know it."""
        return None

    def split(self, values: np.ndarray, i: int, stems: list[str]) -> np.ndarray | None:
        """Return the i-th of several tensors that are stored as one; None if its parts are equal."""
        return None

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of tensors of a layer that a loader does not check, outermost first."""
        return {}

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        """Return the source of a tensor; None: as in other models. stem: its name without "weight"."""
        return None

    def extra(self) -> dict[str, Origin]:
        """Return tensors of the file that the checkpoint does not have."""
        return {}

    @property
    def ties(self) -> bool:
        """Return whether a tied output is the embedding of the file."""
        return True
