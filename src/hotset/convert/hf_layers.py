"""Entries of a config.json about layers with a window or without a rotation."""

from __future__ import annotations

from typing import Any

from hotset.convert.checkpoints.classes import HFClass
from hotset.convert.hf_values import ATTENTION_TYPES, checked_types, integer, number
from hotset.errors import UnsupportedModelError
from hotset.model.architectures import ARCHITECTURES


def check_unrotated(raw: dict[str, Any], n_layer: int, period: int) -> None:
    """Raise UnsupportedModelError unless exactly each `period`-th layer has no rotation."""
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


def window_keys(raw: dict[str, Any], hf_class: HFClass, n_layer: int) -> dict[str, Any]:
    """Return the keys of layers with a sliding window.

    layer_types lists them. Without it they are all except each sliding_window_pattern-th, otherwise those
    from max_window_layers on, otherwise all. Only entries that the class reads count (HFClass.windows). If
    sliding_window_pattern is missing, the architecture's period needs no key, unless the class writes it
    (HFClass.writes_pattern).
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
    elif "layer_types" in read:  # versions of transformers disagree
        raise UnsupportedModelError("config.json has a window but no layer_types, which says where")
    else:
        windowed = [True] * n
    if not any(windowed):
        return {}
    if hf_class.writes_pattern or windowed != [not period or (i + behind) % period != 0 for i in range(n)]:
        keys["attention.sliding_window_pattern"] = windowed
    return keys
