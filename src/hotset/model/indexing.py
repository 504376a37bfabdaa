"""The indexer of a model: how layers choose the tokens, or compressed blocks, that a token attends to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotset.errors import UnsupportedModelError
from hotset.model.operations import RopeKind, whole_context

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, TensorInfo
    from hotset.model.architectures import Architecture
    from hotset.model.keys import Keys

_MOST_BLOCKS = 1 << 24  # an operation's values are float32, in which larger numbers are not exact
_SHARED_FROM = 1 << 20  # GLM 5.2 and its successors have this context, and layers without an own indexer


@dataclass(frozen=True)
class Indexing:
    """An indexer (operations.Indexer) that chooses the keys of attention.

    n_head, head_dim: of its queries. top_k: how many blocks a token chooses. size: tokens of a block; 1: it
    chooses tokens. rope: the layout in which queries and keys are rotated. owners: for each layer, the layer
    whose indexer chooses its keys; None: it attends to all keys.
    """

    n_head: int
    head_dim: int
    top_k: int
    size: int
    rope: RopeKind
    owners: tuple[int | None, ...]

    @property
    def n_ctx(self) -> int:
        """Return the longest context in which a token attends to all keys."""
        return whole_context(self.top_k, self.size)

    def is_stored(self, tensors: Mapping[str, TensorInfo]) -> bool:
        """Return whether the file has the indexers. Some files lack them, for short contexts only."""
        stored = {name.split(".")[1] for name in tensors if ".indexer." in name}
        return stored >= {str(owner) for owner in self.owners if owner is not None}


def indexing_of(
    gguf: GGUFFile, keys: Keys, architecture: Architecture, n_layer: int, head_dim: int
) -> Indexing | None:
    """Return the indexer of a file's architecture, also if the file lacks its tensors; None: no indexer."""
    if architecture.indexer is None:
        return None
    size, owners = 1, tuple[int | None, ...](range(n_layer))
    if architecture.shared_indexers:
        owners = _owners(keys, n_layer)
    if architecture.latent_eps is None:
        sizes = keys.per_layer("attention.compress_ratios", n_layer, 0, _MOST_BLOCKS, 0, more=True)
        if architecture.compressed:  # only blocks that overlap are chosen
            kv = [gguf.tensors.get(f"blk.{i}.attn_compressor_kv.weight") for i in range(n_layer)]
            overlaps = [info is not None and info.shape[1:] == (2 * head_dim,) for info in kv]
            sizes = tuple(n if overlap else 0 for n, overlap in zip(sizes, overlaps, strict=True))
        owners = tuple(i if n else None for i, n in enumerate(sizes))
        if not any(sizes):
            return None
        if len(found := set(sizes) - {0}) > 1:
            raise UnsupportedModelError(f"the indexers of the model have blocks of several sizes: {found}")
        size = max(found)
    top_k = keys.integer("attention.indexer.top_k", 1, _MOST_BLOCKS)
    if architecture.latent_eps is None and not architecture.compressed:  # it is a number of tokens
        top_k = max(top_k // size, 1)
    n_head = keys.integer("attention.indexer.head_count", 1, 1 << 14, 1)
    dim = keys.integer("attention.indexer.key_length", 1, 1 << 14, 1)
    return Indexing(n_head, dim, top_k, size, architecture.indexer, owners)


def _owners(keys: Keys, n_layer: int) -> tuple[int | None, ...]:
    """Return the owner of the indexer that each layer uses: itself, or the last layer before with its own."""
    own, key = (True,) * n_layer, "attention.indexer.types"
    if keys.get(key) is not None:
        own = keys.flags(key, n_layer)
    elif keys.integer("context_length", 1, 1 << 31) >= _SHARED_FROM:
        own = tuple(i < 2 or i % 4 == 2 for i in range(n_layer))
    if not own[0]:
        raise keys.error(key, "must be true for the first layer")
    owners: list[int] = []
    for i, is_own in enumerate(own):
        owners.append(i if is_own else owners[-1])
    return tuple(owners)
