"""Layers for multi-token prediction (MTP) of a checkpoint: after the model's own, or in a module mtp."""

from __future__ import annotations

import re
from collections.abc import Iterable

NAMES = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    "post_attention_layernorm": "post_attention_norm",
}
"""Stems that only such a layer has, not the model's own layers → GGUF's names."""

_MODULE = re.compile(r"(?:model\.)?mtp\.(?:layers\.([0-9]{1,5})\.(.+)|(\w+)\.(weight|bias))")
_AROUND = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
# In models whose layers are attention or an FFN, the module's second layer is the FFN of its first.
_OF_SECOND = {
    "norm.weight": "post_attention_layernorm.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}


def as_layer(name: str, layers: str, n_layer: int, *, in_parts: bool) -> str:
    """Rename a tensor of the module mtp to the name in a layer after the model's own. Other names stay.

    layers: the text before the number of a layer. in_parts: each layer is attention or an FFN."""
    match = _MODULE.fullmatch(name)
    if match is None:
        return name
    number, inside, around, kind = match.groups()
    if around is not None:
        return f"{layers}.{n_layer}.{_AROUND[around]}.{kind}" if around in _AROUND else name
    if in_parts and number in ("0", "1"):
        return f"{layers}.{n_layer}.{_OF_SECOND.get(inside, inside) if number == '1' else inside}"
    return f"{layers}.{n_layer + int(number)}.{inside}"


def count(names: Iterable[str], layers: str, n_layer: int, *, in_parts: bool) -> int:
    """Return the number of layers for multi-token prediction in `names`; 0 if one of them lacks a part."""
    behind: dict[int, set[str]] = {}
    for name in names:
        own = as_layer(name, layers, n_layer, in_parts=in_parts)
        match = re.fullmatch(re.escape(layers) + r"\.([0-9]{1,5})\.(.+)", own)
        if match is not None and int(match[1]) >= n_layer:
            behind.setdefault(int(match[1]), set()).add(match[2])
    needed = {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"}
    complete = all(needed <= found for found in behind.values())
    return len(behind) if complete and set(behind) == set(range(n_layer, n_layer + len(behind))) else 0
