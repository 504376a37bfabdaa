"""The types of option values, and fast reading of them, without pydantic.

Typer checks every value with a pydantic adapter, which it makes for each option, also for those that are not
given. Importing pydantic and making the adapters took a seventh of the time to the first token. Here a
missing value, a text, a number or a value of a OptionType is read directly, with the checks of the library.
Typer reads all others.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import typer

from hotset.errors import InvalidRequestError
from hotset.files import check_folder, missing
from hotset.parameters import Parameter, choice, real_number, seconds, size, whole_number

_ASK = object()  # a value that Typer must check


class OptionType:
    """The type of an option's value.

    word: in the help. read: returns the value of a text; it raises InvalidRequestError with a message that
    begins with "it". choices: of an enumeration. ends: the range of a number, for the reference.
    """

    def __init__(
        self,
        word: str,
        read: Callable[[Any], Any],
        choices: Sequence[str] = (),
        ends: tuple[int | None, int | None] = (None, None),
    ):
        self.word, self.choices, self.ends, self._read = word, choices, ends, read
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


def type_of(parameter: Parameter) -> OptionType | None:
    """Return the type of a parameter's value, with the parameter's own check; None for a text or a switch."""
    if parameter.choices:
        return one_of(*parameter.choices, listed=parameter.listed)
    if parameter.kind is size:
        return OptionType("SIZE", lambda text: parameter.checked(text, "it"))
    if parameter.kind not in (int, float):
        return None

    def read(text: Any) -> Any:
        number = _as_number(text, parameter.kind)
        parameter.checked(number, "it")
        return number  # a given -1 overrides another default

    word = "N" if parameter.kind is int else "NUMBER"
    return OptionType(word, read, ends=(parameter.least, parameter.high))


def take_plain_values(options: Iterable[Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Let options of a command read plain values directly. parameters: of the command's function."""
    for option in options:
        kinds, info = get_args(parameters[option.name].annotation)
        if info.callback is None and not info.clamp:
            kind, *others = {*(get_args(kinds) or [kinds])} - {NoneType}
            if _is_list(option) and option.nargs in (1, -1):
                (kind,) = get_args(kind) or [kind]
            option.process_value = Taking(option, info.parser or _reader(None if others else kind, info))


def take_no_value(option: Any) -> Any:
    """Return the same option, which does nothing if it is not given."""
    if option is not None and not isinstance(option.process_value, Taking):
        option.process_value = Taking(option, None)
    return option


def _is_list(option: Any) -> bool:
    return option.nargs != 1 or getattr(option, "multiple", False)


def _reader(kind: Any, info: Any) -> Callable[[Any], Any] | None:
    """Return the function that reads a text as a number, a path or a text; None for other types."""
    if kind is int:
        return lambda value: whole_number("it", _as_number(value, int), info.min, info.max)
    if kind is float:
        return lambda value: real_number("it", _as_number(value, float), info.min, info.max)
    if kind is Path:
        return lambda value: _path(value, info)
    return (lambda value: value if _is_text(value) else _ASK) if kind is str else None


def _as_number(value: Any, kind: Any) -> Any:
    """Return the number of a text, also 5 for "5.0"; any other value unchanged."""
    if not isinstance(value, str) or not value.isascii():
        return value
    is_whole = kind is int and re.fullmatch(r"[+-]?[0-9]+\.0+", value)
    try:
        return kind(value.partition(".")[0] if is_whole else value)
    except ValueError:
        return value


def _path(value: Any, info: Any) -> Any:
    """Return a path. Raises InvalidRequestError if it must exist and does not, or is of the other kind."""
    if not isinstance(value, str | Path):
        return _ASK
    path = Path(value)
    if info.allow_dash and value == "-":
        return path
    if info.exists and not os.path.exists(path):
        raise InvalidRequestError(missing(path, "folder" if info.dir_okay and not info.file_okay else "file"))
    if not info.dir_okay and path.is_dir():
        raise InvalidRequestError(f"{path} is a folder; choose a file")
    if not info.file_okay:
        check_folder(path)
    return path


class Taking:
    """A replacement for an option's `process_value`. read: reads a value; None: Typer does."""

    def __init__(self, option: Any, read: Callable[[Any], Any] | None):
        self._ask, self._read = option.process_value, read
        is_option = option.param_type_name == "option"
        self._name = option.opts[0] if is_option else option.metavar or option.name.upper()
        self._is_list = _is_list(option)
        self._nothing = _ASK if option.required else () if self._is_list else None

    def __call__(self, context: Any, value: Any) -> Any:
        try:
            taken = self._nothing if value is None else self._taken(value)
            return self._ask(context, value) if taken is _ASK else taken
        except InvalidRequestError as error:
            raise typer.BadParameter(f"{error}.", param_hint=self._name) from None

    def _taken(self, value: Any) -> Any:
        if self._read is None:
            return _ASK
        if not (self._is_list and isinstance(value, list | tuple)):
            return _ASK if self._is_list else self._read(value)
        taken = [self._read(one) for one in value]
        return _ASK if _ASK in taken else taken


def _is_text(value: Any) -> bool:
    """Return whether a value was valid UTF-8 on the command line."""
    return isinstance(value, str) and (value.isascii() or not re.search("[\ud800-\udfff]", value))
