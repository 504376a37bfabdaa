"""The types of option values, and fast reading of them, without pydantic.

Typer checks every value with a pydantic adapter, which it makes for each option, also for those that are not
given. Importing pydantic and making the adapters took a seventh of the time to the first token. Here a
missing value, a text, a number or a value of a OptionType is read directly, with the checks of the library.
Typer reads all others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter
from types import NoneType
from typing import Any, get_args

import typer

from hotset.errors import InvalidRequestError
from hotset.parameters import choice, real_number, seconds, size, whole_number

_ASK = object()  # a value that Typer must check


class OptionType:
    """The type of an option's value.

    word: in the help. read: returns the value of a text; it raises InvalidRequestError with a message that
    begins with "it". choices: of an enumeration.
    """

    def __init__(self, word: str, read: Callable[[Any], Any], choices: Sequence[str] = ()):
        self.word, self.choices, self._read = word, choices, read
        self.__name__ = word  # typer asks for the name of a parser

    def __call__(self, text: Any) -> Any:
        return self._read(text)

    def complete(self, incomplete: str) -> list[str]:
        """Return the choices for a shell."""
        return [one for one in self.choices if one.startswith(incomplete)]


SIZE = OptionType("SIZE", lambda text: size("it", text))
DURATION = OptionType("TIME", lambda text: seconds("it", text))
TIME_OR_EVER = OptionType("TIME", lambda text: seconds("it", text, -math.inf))  # negative: for ever


def one_of(*choices: str, listed: Sequence[str] = ()) -> OptionType:
    """Return the type of an enumeration. listed: the choices in the help; empty: all."""
    word = "|".join(listed or choices)
    return OptionType(word, lambda text: choice("it", text, choices), listed or choices)


def some_of(*choices: str, listed: Sequence[str] = ()) -> OptionType:
    """Return the type of a text with values of an enumeration, separated by commas."""
    one = one_of(*choices, listed=listed)
    return OptionType(
        f"{one.word},...", lambda text: ",".join(one(part.strip()) for part in text.split(",")), one.choices
    )


def take_plain_values(options: Iterable[Any], parameters: Mapping[str, Parameter]) -> None:
    """Let options of a command read plain values directly. parameters: of the command's function."""
    for option in options:
        kinds, info = get_args(parameters[option.name].annotation)
        if info.callback is None and not info.clamp:
            kind, *others = {*(get_args(kinds) or [kinds])} - {NoneType}
            is_plain = not others and not _is_list(option)
            option.process_value = Taking(option, info.parser or _reader(kind if is_plain else None, info))


def take_no_value(option: Any) -> Any:
    """Return the same option, which does nothing if it is not given."""
    if option is not None and not isinstance(option.process_value, Taking):
        option.process_value = Taking(option, None)
    return option


def _is_list(option: Any) -> bool:
    return option.nargs != 1 or getattr(option, "multiple", False)


def _reader(kind: Any, info: Any) -> Callable[[Any], Any] | None:
    """Return the function that reads a text as a number or a text; None for other types."""
    if kind is int:
        low = -(2**63) if info.min is None else info.min
        return lambda value: whole_number("it", _as_number(value, int), low, info.max)
    if kind is float:
        low = -math.inf if info.min is None else info.min
        high = math.inf if info.max is None else info.max
        return lambda value: real_number("it", _as_number(value, float), low, high)
    return (lambda value: value if _is_text(value) else _ASK) if kind is str else None


def _as_number(value: Any, kind: type) -> Any:
    """Return the number of a plain text; any other value unchanged."""
    is_plain = isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,15}(\.[0-9]{1,15})?", value)
    return kind(value) if is_plain and (kind is float or "." not in value) else value


class Taking:
    """A replacement for an option's `process_value`. read: reads a value; None: Typer does."""

    def __init__(self, option: Any, read: Callable[[Any], Any] | None):
        self._option, self._ask, self._read = option, option.process_value, read
        self._is_list = _is_list(option)
        self._nothing = _ASK if option.required else () if self._is_list else None

    def __call__(self, context: Any, value: Any) -> Any:
        try:
            taken = self._nothing if value is None else self._taken(value)
            return self._ask(context, value) if taken is _ASK else taken
        except InvalidRequestError as error:
            if not isinstance(self._read, OptionType):
                with suppress(typer.BadParameter):
                    return self._ask(context, value)
            raise typer.BadParameter(f"{error}.", param_hint=self._option.opts[0]) from None

    def _taken(self, value: Any) -> Any:
        if self._read is None:
            return _ASK
        return [self._read(one) for one in value] if self._is_list else self._read(value)


def _is_text(value: Any) -> bool:
    """Return whether a value was valid UTF-8 on the command line."""
    return isinstance(value, str) and (value.isascii() or not re.search("[\ud800-\udfff]", value))
