"""What a config.json says of each layer: attention or what stands in its place, windows, rotation."""

from __future__ import annotations

from typing import Any

from hotset.convert.checkpoints.classes import HFClass
from hotset.convert.hf_values import integer, number
from hotset.errors import FormatError, UnsupportedModelError
from hotset.model.architectures import ARCHITECTURES

ATTENTION_TYPES = ("full_attention", "sliding_attention")
_CONV_TYPES = ("full_attention", "conv")
DELTA_TYPES = ("full_attention", "linear_attention")
_PARTS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of a pattern
_LEGACY_PARTS = {"mamba": "linear_attention", "attention": "full_attention"}


def parts_of(config: dict[str, Any]) -> list[str]:
    """What each layer is, of a model whose layers are one thing each; num_hidden_layers is as many."""
    parts, pattern = config.get("layers_block_type") or config.get("layer_types"), None
    if parts is None:
        pattern = config.get("hybrid_override_pattern")
        if pattern is None:
            raise FormatError("config.json has no layers_block_type")
        parts = [_PARTS.get(c) for c in pattern] if isinstance(pattern, str) else pattern
    if not isinstance(parts, list) or not parts:
        raise FormatError("layers_block_type in config.json must be a list of layers")
    config["num_hidden_layers"] = len(parts)
    return checked_types(
        [_LEGACY_PARTS.get(part, part) if isinstance(part, str) else part for part in parts],
        len(parts),
        tuple(_PARTS.values()),
    )


def checked_types(types: Any, n: int, known: tuple[str, ...]) -> list[str]:
    """layer_types of n layers. Raises UnsupportedModelError for anything else than known kinds."""
    if not isinstance(types, list) or len(types) != n or any(kind not in known for kind in types):
        raise UnsupportedModelError("layer_types in config.json holds a kind of layer that is not supported")
    return types


def layout_keys(raw: dict[str, Any], n_layer: int) -> dict[str, Any]:
    """Windows of the layers that sliding_window_layout names, which rope_layout must name as well."""
    found = {}
    for entry, default in (("sliding_window_layout", 0), ("rope_layout", 1)):
        layout = raw.get(entry, [default] * n_layer)
        if not isinstance(layout, list) or len(layout) != n_layer or any(v not in (0, 1) for v in layout):
            raise FormatError(f"{entry} in config.json must hold 0 or 1 for {n_layer} layers")
        found[entry] = [value == 1 for value in layout]
    windowed, rotated = found.values()
    if rotated != (windowed if any(windowed) else [True] * n_layer):
        raise UnsupportedModelError(
            "rope_layout in config.json must name the layers with a window, or all where there are none"
        )
    if not any(windowed):
        return {}
    window = integer(raw, "sliding_window_size")
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": windowed}


def check_unrotated(raw: dict[str, Any], n_layer: int, period: int) -> None:
    """Raises UnsupportedModelError unless each so-many-th layer, and no other, has no rotation."""
    if not period:
        return
    rotated = raw.get("no_rope_layers")
    if rotated is None:
        interval = integer(raw, "no_rope_layer_interval", period)
        rotated = [(i + 1) % interval != 0 for i in range(n_layer)]
    wanted = [(i + 1) % period != 0 for i in range(n_layer)]
    if not isinstance(rotated, list) or [value == 1 for value in rotated[:n_layer]] != wanted:
        raise UnsupportedModelError(
            f"no_rope_layers in config.json must leave out each {period}th layer, and no other"
        )


def check_bases(raw: dict[str, Any], n_layer: int, period: int, base: float) -> None:
    """Completes layer_types, counted from the last layer, and raises UnsupportedModelError unless there is a
    window, and the layers with it, and no other, have the one base of the rotation."""
    if raw.get("sliding_window") is None:
        raise UnsupportedModelError("sliding_window set to null in config.json is not supported")
    whole = [(n_layer - 1 - i) % period == 0 for i in range(n_layer)]
    if raw.get("layer_types") is None:
        raw["layer_types"] = ["full_attention" if own else "sliding_attention" for own in whole]
    types = checked_types(raw["layer_types"], n_layer, ATTENTION_TYPES)
    bases = raw.get("layer_rope_theta")
    bases = [0 if own else base for own in whole] if bases is None else bases
    if bases != [base if kind == "sliding_attention" else 0 for kind in types]:
        raise UnsupportedModelError(
            f"layer_rope_theta in config.json must be {base:g} in layers with a window, and 0 in the others"
        )


def window_keys(raw: dict[str, Any], hf_class: HFClass, n_layer: int) -> dict[str, Any]:
    """Which layers slide: those of layer_types, else all but each sliding_window_pattern-th, else those
    from max_window_layers on, else all; of these the entries that the class reads (HFClass.windows).
    The architecture's period, where there is no sliding_window_pattern, needs no key, unless the class
    writes it (HFClass.writes_pattern).
    """
    n, read, row = n_layer, hf_class.windows, ARCHITECTURES[hf_class.architecture]
    period = row.window_period
    behind = 0 if row.window_last else 1
    config = {entry: raw.get(entry) for entry in read}
    if config.get("sliding_window") is None or config.get("use_sliding_window", True) is not True:
        return {}
    keys: dict[str, Any] = {"attention.sliding_window": integer(config, "sliding_window")}
    types = config.get("layer_types")
    if types is None and hf_class.named_windows:
        return {}
    if types is not None:
        types = checked_types(types, n, ATTENTION_TYPES)
        windowed = [kind == "sliding_attention" for kind in types]
    elif period or config.get("sliding_window_pattern") is not None:
        pattern = integer(config, "sliding_window_pattern", period)
        windowed = [(i + behind) % pattern != 0 for i in range(n)]
    elif "max_window_layers" in read:
        first = number(config, "max_window_layers")
        windowed = [i >= first for i in range(n)]
    elif "layer_types" in read:  # transformers' versions disagree
        raise UnsupportedModelError("config.json has a window but no layer_types, which says where")
    else:
        windowed = [True] * n
    if not any(windowed):
        return {}
    if hf_class.writes_pattern or windowed != [not period or (i + behind) % period != 0 for i in range(n)]:
        keys["attention.sliding_window_pattern"] = windowed
    return keys


def hybrid_keys(raw: dict[str, Any], n_layer: int, n_head_kv: int) -> dict[str, Any]:
    """Which layers have attention, and whether it has a rotation."""
    types = raw.get("layer_types") or raw.get("layers_block_type")
    types = ["linear_attention"] * n_layer if types is None else types
    if isinstance(types, list):
        types = [_LEGACY_PARTS.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    types = checked_types(types, n_layer, DELTA_TYPES)
    kv = [n_head_kv if kind == "full_attention" else 0 for kind in types]
    rotates = raw.get("position_embedding_type") == "rope"
    return {"attention.head_count_kv": kv, "rope.scaling.finetuned": rotates}


def conv_keys(raw: dict[str, Any], hf_class: HFClass, n_layer: int, n_head_kv: int) -> dict[str, Any]:
    """Which layers have a short convolution."""
    types = raw.get("layer_types")
    if types is None:
        if hf_class.experts is not None:
            raise FormatError("config.json has no layer_types")
        attends = raw.get("full_attn_idxs")
        attends = list(range(n_layer)) if attends is None else attends
        if not isinstance(attends, list):
            raise FormatError("full_attn_idxs in config.json must be a list of layers")
        types = ["full_attention" if i in attends else "conv" for i in range(n_layer)]
    types = checked_types(types, n_layer, _CONV_TYPES)
    heads = [0 if kind == "conv" else n_head_kv for kind in types]
    return {"attention.head_count_kv": heads}


def delta_keys(raw: dict[str, Any], n_layer: int, n_nextn: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """Which layers have a gated delta net; those for multi-token prediction behind them have none. sizes:
    keys of their sizes."""
    types = raw.get("layer_types")
    if types is None:
        interval = integer(raw, "full_attention_interval", 4)
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(n_layer)]
    types = checked_types(types, n_layer, DELTA_TYPES)
    recurrent = [kind == "linear_attention" for kind in types]
    keys: dict[str, Any] = {"attention.recurrent_layers": recurrent + [False] * n_nextn, **sizes}
    interval = recurrent.index(False) + 1 if False in recurrent else 0
    if interval and recurrent == [(i + 1) % interval != 0 for i in range(n_layer)]:
        keys["full_attention_interval"] = interval
    return keys
