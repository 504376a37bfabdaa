"""Fast parsing of simple option values, without pydantic.

Typer checks every value with a pydantic adapter, which it makes for each option, also for those that are not
given. Importing pydantic and making the adapters took a seventh of the time to the first token. Here a
missing value, a text, or a plain number within its bounds is accepted directly. Typer checks all others, and
so every mistake; hotset words the messages about numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from inspect import Parameter
from types import NoneType
from typing import Any, get_args

import typer

_NUMBERS = {int: re.compile(r"-?[0-9]{1,18}"), float: re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")}
_ASK = object()  # a value that Typer must check


def take_plain_values(options: Iterable[Any], parameters: Mapping[str, Parameter]) -> None:
    """Let options of a command accept plain values directly. parameters: of the command's function."""
    for option in options:
        kinds, info = get_args(parameters[option.name].annotation)
        if info.callback is None and info.parser is None and not info.clamp:
            kind, *others = {*(get_args(kinds) or [kinds])} - {NoneType}
            option.process_value = Taking(option, NoneType if others else kind, info.min, info.max)


def take_no_value(option: Any) -> Any:
    """Return the same option, which does nothing if it is not given."""
    if option is not None and not isinstance(option.process_value, Taking):
        option.process_value = Taking(option, NoneType)
    return option


class Taking:
    """A replacement for an option's `process_value`."""

    def __init__(self, option: Any, kind: type, least: float | None = None, most: float | None = None):
        self._ask, self._least, self._most = option.process_value, least, most
        several = option.nargs != 1 or getattr(option, "multiple", False)
        self._nothing = _ASK if option.required else () if several else None
        self._kind: Any = NoneType if several else kind

    def __call__(self, context: Any, value: Any) -> Any:
        taken = self._nothing if value is None else self._taken(value)
        if taken is not _ASK:
            return taken
        try:
            return self._ask(context, value)
        except typer.BadParameter as error:
            if self._kind in _NUMBERS:
                error.message = self._complaint(str(value))
            raise

    def _complaint(self, value: str) -> str:
        """Return why a number is refused."""
        try:
            number = self._kind(value.replace("_", " "))
        except ValueError:
            number = None
        if number is None or (self._least is None and self._most is None):
            return f"'{value}' is not a {'whole number' if self._kind is int else 'number'}."
        span = f"at least {self._least}" if self._most is None else f"from {self._least} to {self._most}"
        return f"it must be {span}, not {value}."

    def _taken(self, value: Any) -> Any:
        if self._kind is str:
            return value if type(value) is str and _is_text(value) else _ASK
        if self._kind not in _NUMBERS:
            return _ASK
        if type(value) is str and _NUMBERS[self._kind].fullmatch(value):
            value = self._kind(value)
        if type(value) is not self._kind or (self._least is not None and value < self._least):
            return _ASK
        return _ASK if self._most is not None and value > self._most else value


def _is_text(value: str) -> bool:
    """Return whether a value was valid UTF-8 on the command line."""
    return value.isascii() or not re.search("[\ud800-\udfff]", value)
