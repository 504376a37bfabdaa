"""The experts of a layer: their number, width and routing, read from the keys of a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.quants import GGMLType, dequantize
from hotset.model.architectures import ExpertDefaults
from hotset.model.keys import MAX_EXPERTS, MAX_USED_EXPERTS, SCORINGS, Keys
from hotset.model.operations import Scoring

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile


@dataclass(frozen=True)
class Experts:
    """The experts of a layer. n: number; n_used: experts per token. For other fields see operations.Route.

    n_ff_shared: neurons of the shared expert; 0: none. gated_share, early, with_ffn: see ExpertDefaults.
    hashed: a table assigns experts to token ids. n_latent: width of the experts' input and output, between
    two matrices that all experts share; 0: the model's width.
    """

    n: int
    n_used: int
    scoring: Scoring
    normalised: bool
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
    n_ff_shared: int = 0
    gated_share: bool = False
    early: bool = False
    group_best: int = 2
    n_latent: int = 0
    with_ffn: bool = False
    hashed: bool = False


def with_tables(
    gguf: GGUFFile, keys: Keys, experts: tuple[Experts | None, ...]
) -> tuple[Experts | None, ...]:
    """Return the experts of each layer, marking the first ones as `hashed` after checking their tables."""
    n_hashed = keys.integer("hash_layer_count", 0, len(experts), 0)
    for i, own in enumerate(experts[:n_hashed]):
        name = f"blk.{i}.ffn_gate_tid2eid.weight"
        info = gguf.tensors.get(name)
        if own is None or info is None or info.type != GGMLType.I32 or info.shape[0] != own.n_used:
            continue  # the decoder reports the missing tensor
        ids = np.sort(dequantize(gguf.data(name), info.type, info.shape).reshape(-1, own.n_used), axis=1)
        if ids.min() < 0 or ids.max() >= own.n or (np.diff(ids, axis=1) == 0).any():
            raise FormatError(
                f"the tensor {name} must name {own.n_used} of {own.n} experts for each token; the file is "
                "damaged"
            )
    hashed = (None if own is None else replace(own, hashed=True) for own in experts[:n_hashed])
    return (*hashed, *experts[n_hashed:])


def experts_of(
    keys: Keys, defaults: ExpertDefaults, routed: list[bool], n_ff: tuple[int, ...]
) -> tuple[tuple[Experts | None, ...], tuple[int, ...]]:
    """Return each layer's experts, and the neurons of its FFN or of one expert.

    routed: whether each layer has a router. n_ff: feed_forward_length.
    """
    n_layer = len(routed)
    n = keys.integer("expert_count", 1, 1 << 16)
    if n > MAX_EXPERTS:
        raise UnsupportedModelError(f"the model has {n} experts, but at most {MAX_EXPERTS} are supported")
    n_used = keys.integer("expert_used_count", 1, n)
    if n_used > MAX_USED_EXPERTS:
        raise UnsupportedModelError(
            f"the model uses {n_used} experts for a token, but at most {MAX_USED_EXPERTS} are supported"
        )
    gating = keys.integer("expert_gating_func", 0, 1 << 8, 0)
    if gating and gating not in SCORINGS:
        raise UnsupportedModelError(
            f"the file's key {keys.architecture}.expert_gating_func is {gating}, which is not supported"
        )
    n_groups = keys.integer("expert_group_count", 0, n, 0) or 1
    n_groups_used = keys.integer("expert_group_used_count", 0, n_groups, 0) or n_groups
    if n % n_groups or n // n_groups * n_groups_used < n_used:
        raise keys.error("expert_group_count", f"is {n_groups} for {n} experts of which {n_used} are used")
    n_dense = keys.integer("leading_dense_block_count", 0, n_layer, 0)
    if keys.integer("interleave_moe_layer_step", 1, n_layer, 1) > 1:
        raise UnsupportedModelError("layers without experts between layers with experts are not supported")
    # In the first files with a gated shared expert, feed_forward_length is the width of all used experts.
    widths = tuple(max(n // n_used, 1) for n in n_ff) if defaults.gated_share else n_ff
    if keys.get("expert_feed_forward_length") is not None:
        widths = keys.per_layer("expert_feed_forward_length", n_layer, 0 if 0 in n_ff else 1, 1 << 22)
    n_shared = keys.integer("expert_shared_count", 0, 1 << 10, 0)
    scoring = SCORINGS.get(gating, defaults.scoring)
    experts = Experts(
        n,
        n_used,
        scoring,
        keys.flag("expert_weights_norm", defaults.normalised),
        keys.factor("expert_weights_scale"),
        n_groups if n_groups_used < n_groups else 1,
        n_groups_used if n_groups_used < n_groups else 1,
        keys.one("feed_forward_length", set(n_ff))
        if defaults.with_ffn
        else keys.integer(
            "expert_shared_feed_forward_length",
            0,
            1 << 22,
            n_ff[-1] if defaults.gated_share else n_shared * widths[-1],
        ),
        defaults.gated_share,
        defaults.early,
        defaults.group_best or (1 if scoring == "softmax" and n_groups_used < n_groups else 2),
        keys.integer("moe_latent_size", 0, 1 << 20, 0),
        defaults.with_ffn,
    )
    has = routed if defaults.where_routed else [i >= n_dense for i in range(n_layer)]
    return (
        tuple(experts if own else None for own in has),
        tuple(width if own else n for own, width, n in zip(has, widths, n_ff, strict=True)),
    )
