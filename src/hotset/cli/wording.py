"""Translation of the library's messages to the words of the command line.

The library names settings as in Python: bare names with an underscore (`n_ctx`), words such as `device`
between backticks, and values as `device='auto'`. A message may begin with a name and "must" or "requires".
Each of these names becomes its option: one of the running subcommand, or of the tables of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hotset.load_parameters import LOAD_PARAMETERS
from hotset.sampling_parameters import PARAMETERS

_TABLES = {one.name: one.flag for one in (*PARAMETERS.values(), *LOAD_PARAMETERS.values()) if one.option}
_of_subcommand: dict[str, str] = {}
_NAMED = re.compile(
    r"(?<![\w./\\'`-])(?P<value_of>[a-z][a-z0-9_]*)=(?P<value>'[^']*'|[\w.%]*[\w%])"
    r"|`(?P<word>[a-z][a-z0-9_]*)`"
    r"|(?<![\w./\\'-])(?P<name>[a-z][a-z0-9]*_[a-z0-9_]+)(?![\w/\\'-]|\.\w)"
    r"|^(?P<first>[a-z]+)(?= (?:must|requires|cannot) )"
)
# Messages about a models file or a Modelfile, which use these names themselves.
_OF_A_FILE = re.compile(
    r"\[(models\.|default\])|\b(models\..+|default)\.(load|sampling)\b|\.toml\b|^PARAMETER\b"
)


def use_options(parameters: Iterable[Any]) -> None:
    """Name the options of this subcommand in messages. parameters: of the subcommand."""
    _of_subcommand.clear()
    _of_subcommand.update({one.name: one.opts[0] for one in parameters if one.param_type_name == "option"})


def option_of(name: str) -> str | None:
    """Return the option for a setting or parameter of Python, or None."""
    return _of_subcommand.get(name) or _TABLES.get(name)


def usage_message(error: Any) -> str:
    """Return the message of an exception of typer about wrong usage.

    A message about a value begins with its option or argument, which may be "it" in the exception's text.
    """
    hint, text = getattr(error, "param_hint", None), str(error.message).removesuffix(".")
    if hint is None and (option := getattr(error, "param", None)) is not None and text:
        is_option = option.param_type_name == "option"
        hint = option.opts[0] if is_option else option.metavar or option.name.upper()
    if hint is None:
        command = error.ctx.command_path if error.ctx is not None else "hotset"
        said = error.format_message()
        return f"{said if said.endswith(('.', '?')) else f'{said}.'} '{command} -h' shows the usage"
    if text.startswith("it "):
        return f"{hint} {text.removeprefix('it ')}"
    return text if hint in text else f"{hint}: {text}"


def in_options(message: str) -> str:
    """Return a message of the library with options in place of Python's names."""
    return message if _OF_A_FILE.search(message) else _NAMED.sub(_spelled, message)


def _spelled(found: re.Match[str]) -> str:
    name = found["value_of"] or found["word"] or found["name"] or found["first"]
    if (option := option_of(name)) is None:
        return found[0]
    if (value := found["value"]) is None or value == "True":
        return option
    return f"{option} {value.strip(chr(39))}"
