"""Checks of parameters of any type, which return plain Python values, and the record of a parameter.

Sizes and durations have one form in all interfaces: `20G` or a number of GiB, `5m` or a number of seconds.
The module must import fast, because the command line reads the tables of parameters for its help.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError, InvalidRequestError, install_command

_MAX_SHOWN = 80


def real_number(name: str, value: Any, low: float | None = None, high: float | None = None) -> float:
    """Return `value` as a finite float in [low, high]. Raises InvalidRequestError, also for a bool."""
    number = _float(value)
    if not math.isfinite(number):
        raise InvalidRequestError(f"{name} must be a finite number, not {shown(value)}")
    _check_range(name, value, low, high)
    return number


def whole_number(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return `value` as an int in [low, high]. Raises InvalidRequestError, also for a bool."""
    if isinstance(value, bool) or not isinstance(value, int | Integral):
        raise InvalidRequestError(f"{name} must be a whole number, not {shown(value)}")
    _check_range(name, value, low, high)
    return int(value)


def _check_range(name: str, value: Any, low: float | None, high: float | None) -> None:
    """Raise InvalidRequestError for a number outside [low, high]; None: no bound."""
    if (low is None or value >= low) and (high is None or value <= high):
        return
    span = f"between {low} and {high}" if None not in (low, high) else f"at least {low}"
    if low is None:
        span = f"at most {high}"
    raise InvalidRequestError(f"{name} must be {span}, not {shown(value)}")


def flag(name: str, value: Any) -> bool:
    """Return `value`, which must be a bool, since "no" would count as true. Raises InvalidRequestError."""
    if type(value).__name__ not in ("bool", "bool_"):  # Python's or NumPy's
        raise InvalidRequestError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def text(name: str, value: Any) -> str:
    """Return `value`, which must be a text. Raises InvalidRequestError."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a text, not {shown(value)}")
    return value


def path(name: str, value: Any) -> Path:
    """Return `value` as a path. Raises InvalidRequestError."""
    try:
        return Path(value)
    except TypeError:
        raise InvalidRequestError(f"{name} must be a path, not {shown(value)}") from None


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value`, which must be one of the choices. Raises InvalidRequestError."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequestError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}")
    return value


_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:i?B)?", re.IGNORECASE)
_LARGEST_SIZE = 2.0**20  # GiB
_UNITS_OF_SIZE = {"": 2.0**-30, "K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10}
_UNITS_OF_TIME = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")


def size(name: str, value: Any, low: float = 0) -> float:
    """Return the GiB of a size: a number of GiB, or a text such as "20G", "20GiB" or "512M".

    K, M, G and T are powers of 1024, with and without "iB" or "B". low: -1 also accepts -1. Raises
    InvalidRequestError for other values, and for 0.
    """
    found: Any = value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        found = float(match[1]) * _UNITS_OF_SIZE["G" if match[0] == match[1] else match[2].upper()]
    elif value in ("-1", "-1.0"):
        found = -1
    number = _float(found)
    if not (0 < number <= _LARGEST_SIZE or number == low == -1):
        free = ", or -1 for all free memory" if low == -1 else ""
        raise InvalidRequestError(
            f"{name} must be a number of GiB above 0, or a size such as 20G or 512M{free}, not {shown(value)}"
        )
    return number


def seconds(name: str, value: Any, low: float = 0) -> float:
    """Return the seconds of a duration: a number of seconds, or a text such as "90s", "5m" or "1h30m".

    low: -inf also accepts negative durations, such as -1 or "-1m". Raises InvalidRequestError.
    """
    found: Any = value
    if isinstance(value, str):
        sign, rest = (-1, value[1:]) if value.startswith("-") else (1, value)
        parts = _TIME.findall(rest) if len(rest) <= 64 else []  # its time is quadratic in the length
        if re.fullmatch(r"[0-9]{1,17}(\.[0-9]{1,17})?", rest):
            found = sign * float(rest)
        elif "".join(n + unit for n, unit in parts) == rest and parts:
            found = sign * math.fsum(float(n) * _UNITS_OF_TIME[unit] for n, unit in parts)
    number = _float(found)
    if not (math.isfinite(number) and number >= low):
        raise InvalidRequestError(
            f"{name} must be a number of seconds, or a duration such as 90s, 5m or 1h30m, not {shown(value)}"
        )
    return number


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
    if isinstance(value, bool) or not isinstance(value, float | Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an int
        return math.inf if value.__trunc__() > 0 else -math.inf  # type: ignore[operator]


_CHECKS: Mapping[Any, Callable[[str, Any], Any]] = {bool: flag, str: text, Path: path}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of an answer, or of a model that is loaded: one record from which all interfaces derive.

    name: in Python, in requests and in a models file. summary: one sentence of documentation.
    kind: float, int, bool, str, Path, or the check `size`; None: another type,
        which the class of the field checks.
    low, high: the range of a number; None: no bound. choices: the values of an enumeration.
    listed: the choices in the help; empty: all.
    default: used if nothing sets a value. None: the value may be None. usual: what None means, in the help.
    minus_one: the meaning of -1, as in other programs; -1 if it is an ordinary value.
    option: on the command line; more names follow, separated by a space. panel: of its help.
    hidden: more names of the option, which the help does not show.
    also: more names in requests, from other programs.
    modelfile: the name in a Modelfile and in Ollama's `options`; "" if Ollama does not know the parameter.
    label: on the server's page; "" if it is not there.
    slider: the ends of its slider on the page; None: no slider.
    """

    name: str
    summary: str
    kind: Callable[..., Any] | None = None
    default: Any = None
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    usual: str = ""
    minus_one: int | None = -1
    option: str = ""
    panel: str | None = None
    hidden: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    modelfile: str = ""
    label: str = ""
    slider: tuple[float, float] | None = None

    @property
    def flag(self) -> str:
        """The option for messages, or ""."""
        return self.option.partition(" ")[0]

    @property
    def least(self) -> int | None:
        """The smallest accepted number; None: any."""
        return self.low if self.minus_one == -1 else -1

    def meant(self, value: Any) -> Any:
        """Return the meaning of a given value, which differs for -1."""
        return self.minus_one if isinstance(value, Real) and value == -1 else value

    def checked(self, value: Any, name: str | None = None) -> Any:
        """Return a given value as a plain value of Python. Raises InvalidRequestError, with this name."""
        name, value = self.name if name is None else name, self.meant(value)
        if value is None and self.default is None:
            return None
        if self.choices:
            return choice(name, value, self.choices)
        if self.kind is int:
            return whole_number(name, value, self.low or 0, self.high)
        if self.kind is float:
            return real_number(name, value, self.low, self.high)
        if self.kind is size:
            return size(name, value, self.low or 0)
        return _CHECKS[self.kind](name, value)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Other spellings of the option: names in other programs, and `hidden`."""
        long = (f"--{name.replace('_', '-')}" for name in (self.name, *self.also, self.modelfile) if name)
        own = self.option.split()
        return tuple(dict.fromkeys(one for one in (*long, *self.hidden) if one not in own))

    @property
    def names(self) -> tuple[str, ...]:
        """The name with all others, in the spelling of Python."""
        others = (*self.also, self.modelfile, *self.option.split(), *self.hidden)
        spelled = (one.lstrip("-").replace("-", "_") for one in others)
        return tuple(dict.fromkeys((self.name, *(one for one in spelled if one))))


def table_of(*parameters: Parameter) -> Mapping[str, Parameter]:
    """Return name → record."""
    return {one.name: one for one in parameters}
