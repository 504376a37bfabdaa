"""The help of commands: `-h` prints the options in `SHOWN`, and `--help-all` prints all of them in groups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

MOST_SHOWN = 15
# The options that -h prints for a command with more than MOST_SHOWN, in this order.
SHOWN = (
    "--host", "--port", "--api-key", "--model", "--prompt", "--file", "--text", "--output", "--system",
    "--session", "--n-predict", "--temp", "--seed", "--n-prompt", "--n-gen", "--n-depth", "--repetitions",
    "--ctx-size", "--batch-size", "--threads", "--parallel", "--alias", "--keep-alive", "--max-memory",
    "--models-file", "--dimensions", "--pooling", "--top-n", "--chunks", "--tokens", "--limit", "--type",
    "--gpu", "--device", "--vram-budget", "--ram-budget", "--sparsity", "--layers", "--energy", "--format",
    "--json",
)  # fmt: skip
_WORDS = {int: "N", float: "NUMBER", Path: "PATH"}


def format_usage_and_text(command: Any, context: Any, formatter: Any) -> None:
    """Write the usage and the description of a command."""
    command.format_usage(context, formatter)
    command.format_help_text(context, formatter)


def format_options(command: Any, context: Any, formatter: Any, *, everything: bool) -> None:
    """Write the arguments and options of a command."""
    visible = [one for one in command.get_params(context) if not getattr(one, "hidden", False)]
    arguments = [one for one in visible if one.param_type_name == "argument" and one.help]
    options = [one for one in visible if one.param_type_name == "option"]
    if arguments:
        with formatter.section("Arguments"):
            formatter.write_dl([(one.metavar or str(one.name).upper(), one.help) for one in arguments])
    if everything:
        for panel in dict.fromkeys(_panel(one) for one in options):
            _write(formatter, panel, (one for one in options if _panel(one) == panel))
        return
    own = [one for one in options if one.name != "help"]
    shown = own if len(own) <= MOST_SHOWN else [one for name in SHOWN for one in own if name in one.opts]
    _write(formatter, "Options", shown)
    if len(shown) < len(own):
        formatter.write_paragraph()
        formatter.write_text(f"--help-all prints {len(own) - len(shown)} more options.")


def _panel(option: Any) -> str:
    return option.rich_help_panel or "Options"


def _write(formatter: Any, title: str, options: Iterable[Any]) -> None:
    if rows := [_row(one) for one in options]:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=28)


def _row(option: Any) -> tuple[str, str]:
    """Return the spellings with the form of the value, and the help with the default."""
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names += f" / {', '.join(option.secondary_opts)}"
    word = "" if option.is_flag else f" {option.metavar or value_word(option.type_descriptor.annotation)}"
    default = shown_default(option)
    return names + word, " ".join((option.help or "").split()) + (f" [default: {default}]" if default else "")


def shown_default(option: Any) -> str:
    """Return the default of an option as its help shows it; "" without one."""
    if isinstance(option.show_default, str):
        return option.show_default
    default = getattr(option.default, "value", option.default)
    return "" if default in (None, False, True, "", ()) or callable(default) else str(default)


def value_word(kind: Any) -> str:
    """Return the word for a value of this type: N, FILE, or the values of a choice."""
    inside = [one for one in get_args(kind) if one is not NoneType]
    if get_origin(kind) is Literal:
        return "|".join(inside)
    return value_word(inside[0]) if inside else _WORDS.get(kind, "TEXT")
