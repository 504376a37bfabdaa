"""Checks of parameters of any type, which return plain Python values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hotset.errors import HotsetError, InvalidRequestError, install_command

_MAX_SHOWN = 80


def real_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Return `value` as a finite float in [low, high]. Raises InvalidRequestError, also for a bool."""
    number = _float(value)
    if not math.isfinite(number):
        raise InvalidRequestError(f"{name} must be a finite number, not {shown(value)}")
    if not low <= number <= high:
        span = f"between {low} and {high}" if high < math.inf else f"at least {low}"
        raise InvalidRequestError(f"{name} must be {span}, not {shown(value)}")
    return number


def whole_number(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an int in [low, high]. Raises InvalidRequestError, also for a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidRequestError(f"{name} must be a whole number, not {shown(value)}")
    if value < low or (high is not None and value > high):
        span = f"between {low} and {high}" if high is not None else f"at least {low}"
        raise InvalidRequestError(f"{name} must be {span}, not {shown(value)}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """Return `value`, which must be a bool, since "no" would count as true. Raises InvalidRequestError."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidRequestError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def text(name: str, value: Any) -> str:
    """Return `value`, which must be a text. Raises InvalidRequestError."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a text, not {shown(value)}")
    return value


def below_infinity(name: str, value: Any) -> float:
    """Return `value` as a float that is finite or -inf. Raises InvalidRequestError."""
    number = _float(value)
    if not number < math.inf:
        raise InvalidRequestError(f"{name} must be a number below infinity, not {shown(value)}")
    return number


def shown(value: Any) -> str:
    """Return `value` as shown in a message. Python cannot write an int of more than 4300 digits."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def data_frame(columns: Mapping[str, Any]) -> Any:
    """Return a pandas.DataFrame. Raises HotsetError if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise HotsetError(
            f"tables are pandas DataFrames: {install_command('pandas')} (or pip install pandas)"
        ) from None
    return pandas.DataFrame(columns)


def _float(value: Any) -> float:
    """Return `value` as a float: NaN if it is not a number, infinity if it is too large."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an int
        return math.inf if value > 0 else -math.inf
