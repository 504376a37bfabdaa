"""Checked reading of entries of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotset.errors import FormatError, UnsupportedModelError

ATTENTION_TYPES = ("full_attention", "sliding_attention")
DELTA_TYPES = ("full_attention", "linear_attention")
LEGACY_PARTS = {"mamba": "linear_attention", "attention": "full_attention"}


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number of config.json, below 1e30 in magnitude. Raises FormatError for others."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise FormatError(f"config.json has no {key}, which must be a number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:  # NaN too
        raise FormatError(f"{key} in config.json must be a number, not {str(value)[:60]!r}")
    return value


def positive(config: Mapping[str, Any], key: str) -> float:
    """Return a number of config.json above 0. Raises FormatError for others."""
    value = float(number(config, key))
    if not value > 0:
        raise FormatError(f"{key} in config.json must be above 0, not {value:g}")
    return value


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Return a truth value of config.json; without one, False."""
    value = config.get(key)
    value = False if value is None else value
    if not isinstance(value, bool):
        raise FormatError(f"{key} in config.json must be true or false")
    return value


def integer(
    config: Mapping[str, Any], key: str, default: int | None = None, high: int = 1 << 31, low: int = 1
) -> int:
    """Return an integer of config.json from `low` to `high`. Raises FormatError for others."""
    value = number(config, key, default)
    if not isinstance(value, int) or not low <= value <= high:
        raise FormatError(f"{key} in config.json must be an integer from {low} to {high}, not {value!r}")
    return value


def checked_types(types: Any, n: int, known: tuple[str, ...]) -> list[str]:
    """Return layer_types of n layers. Raises UnsupportedModelError for anything else than known kinds."""
    if not isinstance(types, list) or len(types) != n or any(kind not in known for kind in types):
        raise UnsupportedModelError("layer_types in config.json holds a kind of layer that is not supported")
    return types
