"""The `hotset` command: one module per subcommand, and one place where every error becomes a message.

Exit codes: 0 done; 1 a failure; 2 wrong usage; 130 Ctrl-C. Wrong usage is an unknown option, a value or a
combination of values that a check of the command line or of the library refuses, or the name of a file or a
model that does not exist. Failures and wrong usage have one form of message.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
import warnings
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from hotset.cli.console import print_error, warn
from hotset.cli.help import format_options, format_usage_and_text
from hotset.cli.options import spread
from hotset.cli.spellings import with_spellings
from hotset.cli.values import take_no_value, take_plain_values
from hotset.cli.wording import usage_message, use_options
from hotset.errors import FormatError, HotsetError, InvalidRequestError, ModelNotFoundError, did_you_mean
from hotset.escaping import escaped
from hotset.files import missing

# Group of the help → subcommand → module and function. Only the subcommand that is called is imported: the
# other imports would take a tenth of the time to the first token.
GROUPS = {
    "Use": {
        "run": ("run", "run"),
        "serve": ("serve", "serve"),
        "launch": ("launch", "launch"),
        "embed": ("embed", "embed"),
        "rerank": ("embed", "rerank"),
        "batch": ("batch", "batch"),
        "mcp": ("mcp", "mcp"),
        "ps": ("loaded", "ps"),
        "stop": ("loaded", "stop"),
    },
    "Models": {
        "list": ("models", "list_command"),
        "pull": ("models", "pull"),
        "show": ("models", "show"),
        "rm": ("models", "rm"),
        "cp": ("models", "cp"),
        "create": ("create", "create"),
        "convert": ("convert", "convert"),
        "quantize": ("quantize", "quantize"),
        "imatrix": ("imatrix", "imatrix"),
    },
    "Measure": {
        "bench": ("bench", "bench"),
        "perplexity": ("perplexity", "perplexity"),
        "eval": ("evaluate", "evaluate"),
        "plan": ("plan", "plan"),
        "doctor": ("doctor", "doctor"),
    },
    "Sparsity": {
        "sparse profile": ("profile", "profile"),
        "sparse trace": ("trace", "trace"),
        "sparse report": ("report", "report"),
        "sparse reorder": ("profile", "reorder"),
        "sparse calibrate": ("calibrate", "calibrate"),
        "sparse train": ("train_predictor", "train_predictor"),
        "sparse make": ("sparsify", "sparsify"),
    },
}
SUBCOMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}
_SPARSE = "sparse"
# Earlier names of subcommands, and names that shells and other programs use.
_ALIASES = {
    **{name: f"sparse {name}" for name in ("profile", "trace", "report", "reorder", "calibrate")},
    "train-predictor": "sparse train",
    "sparsify": "sparse make",
    "ls": "list",
}
# Names of some subcommands in other programs.
_ELSEWHERE = {
    "chat": "run", "generate": "run", "start": "serve", "download": "pull", "fetch": "pull", "get": "pull",
    "models": "list", "info": "show", "remove": "rm", "delete": "rm", "benchmark": "bench",
    "train": "sparse train", "copy": "cp", "unload": "stop", "loaded": "ps", "add": "create",
}  # fmt: skip

_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_HELP_ALL = "--help-all"
_WRONG_USAGE = 2


class _Subcommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if _HELP_ALL in args:
            ctx.meta[_HELP_ALL] = True
            args = ["--help"]
        use_options(self.params)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if str(getattr(error, "message", "")).startswith("Got unexpected extra argument"):
                error.message += "; put a text of several words in quotes"  # type: ignore[attr-defined]
            raise

    def make_parser(self, ctx: Any) -> Any:
        return with_spellings(super().make_parser(ctx), ctx, self.params)

    def get_help_option(self, ctx: Any) -> Any:
        return take_no_value(super().get_help_option(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)  # newer versions of Typer write MODEL as {MODEL}
        return [piece.replace("{", "").replace("}", "").replace("......", "...").upper() for piece in pieces]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        format_usage_and_text(self, ctx, formatter)
        format_options(self, ctx, formatter, everything=bool(ctx.meta.get(_HELP_ALL)))
        self.format_epilog(ctx, formatter)


class _Subcommands(TyperGroup):
    """The subcommands whose names begin with `prefix`. Each is loaded when it is called."""

    prefix = ""

    def list_commands(self, _: Any) -> list[str]:
        names = (name.removeprefix(self.prefix) for name in SUBCOMMANDS if name.startswith(self.prefix))
        return list(dict.fromkeys(name.partition(" ")[0] for name in names))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        shows_help = not args or args[0] == _HELP_ALL
        return super().parse_args(ctx, ["--help"] if shows_help and not ctx.resilient_parsing else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in (names := self.list_commands(ctx)):
            known = {name: name for name in names}
            if not self.prefix:
                own = {name.rpartition(" ")[2]: name for name in SUBCOMMANDS}
                known = own | _ALIASES | known | {"help": "help", "version": "version"} | _ELSEWHERE
            meant = did_you_mean(args[0].lower(), known, 0.6) or "'hotset help' lists them."
            ctx.fail(f"There is no subcommand '{args[0]}'; {meant}")
        return super().resolve_command(ctx, args)

    def get_command(self, _: Any, cmd_name: str) -> Any:
        name = self.prefix + cmd_name
        if name == _SPARSE:
            return _sparse_commands()
        if name not in SUBCOMMANDS:
            return None
        module, function = SUBCOMMANDS[name]
        single = typer.Typer(add_completion=False, context_settings=_SETTINGS)
        subcommand = spread(getattr(import_module(f"hotset.cli.{module}"), function))
        single.command(cmd_name, cls=_Subcommand)(subcommand)
        command = typer.main.get_command(single)
        command.name = cmd_name
        take_plain_values(command.params, inspect.signature(subcommand).parameters)
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print each subcommand in one line."""
        format_usage_and_text(self, ctx, formatter)
        for group, members in GROUPS.items():
            names = [name for name in members if name.startswith(self.prefix)]
            if not names:
                continue
            rows = [(name.removeprefix(self.prefix), self._summary(name)) for name in names]
            if names[0].startswith(_SPARSE) and not self.prefix:
                rows = [(_SPARSE, ", ".join(name.removeprefix(f"{_SPARSE} ") for name in names))]
            with formatter.section(group):
                formatter.write_dl(rows)
        self.format_epilog(ctx, formatter)

    def _summary(self, name: str) -> str:
        help = str(self.get_command(None, name.removeprefix(self.prefix)).help)
        return re.split(r"[;:\n]", help, maxsplit=1)[0].rstrip(".")


class _SparseCommands(_Subcommands):
    prefix = f"{_SPARSE} "


def _sparse_commands() -> _SparseCommands:
    return _SparseCommands(
        name=_SPARSE,
        context_settings=_SETTINGS,
        help="Measure which neurons fire, and build what predicts or leaves out the others.",
    )


class _Group(_Subcommands):
    """All subcommands. It turns their exceptions into a message and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, as_options(args))

    def get_params(self, ctx: Any) -> list[Any]:
        return [take_no_value(option) for option in super().get_params(ctx)]

    def make_context(self, *args: Any, **more: Any) -> Any:
        try:
            return super().make_context(*args, **more)
        except _OutputError as error:  # raised by --help
            _leave(error)
        except Exception as error:
            _end(error)

    def invoke(self, ctx: Any) -> Any:
        truncated_before = _truncated_files()

        def print_message(message: str) -> None:
            _print_message(_truncated_message(truncated_before) or message)

        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # flush here, where an error of a closed pipe is handled
            if message := _truncated_message(truncated_before):
                raise FormatError(message)
            return result
        except _OutputError as error:
            _leave(error)
        except HotsetError as error:
            print_message(str(error))
            sys.exit(_WRONG_USAGE if isinstance(error, InvalidRequestError | ModelNotFoundError) else 1)
        except KeyboardInterrupt:
            sys.exit(130)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and error.filename:
                print_message(missing(error.filename))
                sys.exit(_WRONG_USAGE)
            if error.filename is None:
                print_message(_fault(error))
            else:
                print_message(f"{error.filename} cannot be used ({error.strerror or error})")
            sys.exit(1)
        except MemoryError:
            _print_message("There is not enough memory: use a smaller model, or a smaller context with -c.")
            sys.exit(1)
        except Exception as error:
            if hasattr(error, "exit_code"):
                _end(error)
            print_message(_fault(error))
            sys.exit(1)


def as_options(args: list[str]) -> list[str]:
    """Return the arguments with `help`, `version` and aliases replaced by their meaning."""
    match args:
        case ["help", name, *rest] if name not in ("help", "version"):
            return [*as_options([name, *rest]), "--help"]
        case ["help", *_]:
            return ["--help"]
        case ["version", *_]:
            return ["--version"]
        case [name, *rest] if name in _ALIASES:
            return [*_ALIASES[name].split(), *rest]
    return args


def _flush() -> None:
    """Flush the output of --help before an exit that nothing handles."""
    try:
        sys.stdout.flush()
    except _OutputError as error:
        _leave(error)


def _leave(error: _OutputError) -> NoReturn:
    if error.is_closed_pipe:  # `hotset ... | head`: the reader has closed the pipe
        sys.exit(0)
    _print_message(str(error))
    sys.exit(1)


def _end(error: Any) -> NoReturn:
    """End for an exception of typer: print the message of wrong usage, and raise an early exit again."""
    _flush()
    if not hasattr(error, "format_message"):
        raise error from None
    print_error(usage_message(error), as_options=False)
    sys.exit(_WRONG_USAGE)


def _truncated_files() -> frozenset[Any]:
    mapped = sys.modules.get("hotset.formats.mapped")  # only loaded by subcommands that read a model
    return mapped.truncated_files() if mapped is not None else frozenset()


def _truncated_message(before: frozenset[Any]) -> str:
    """Return the message about a mapped file truncated since `before`, "" without one.

    Every other error follows from the truncation.
    """
    truncated = _truncated_files() - before
    return str(sys.modules["hotset.formats.mapped"].truncated_error(min(truncated)[1])) if truncated else ""


def _print_message(message: str) -> None:
    if os.environ.get("HOTSET_DEBUG") == "1":
        import traceback

        for line in traceback.format_exc().splitlines():
            print(escaped(line), file=sys.stderr)
    print_error(message)


def _fault(error: Exception) -> str:
    return (
        f"hotset itself failed, with {type(error).__name__}: {error}. Run it again with HOTSET_DEBUG=1 for "
        "the traceback, and please report that with the output of 'hotset doctor'."
    )


app = typer.Typer(
    cls=_Group,
    name="hotset",
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
    help="Run large language models from GGUF files on a PC.",
    epilog="Begin with 'hotset run'. 'hotset COMMAND -h' shows the options of a command, 'hotset --version' "
    "the version.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from hotset.cli import doctor

        print(f"hotset {doctor.package_version('hotset') or '(source)'}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


class _OutputError(Exception):
    """An error of writing the standard output. Not an OSError: a writer would blame its own file."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(
            f"the standard output cannot be written ({cause.strerror or cause}); give it another place"
        )
        self.is_closed_pipe = isinstance(cause, BrokenPipeError)


class _Stream(io.TextIOWrapper):
    """A standard stream that handles its own errors: `failed`."""

    def write(self, text: str) -> int:
        if text == "":  # click writes "" to test a stream, and hides an error
            return 0
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Drop the buffered text and everything that is written later."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        self.failed(error)

    def failed(self, error: OSError) -> None:
        """Do nothing: work continues if stderr cannot be written."""


class _Output(_Stream):
    def failed(self, error: OSError) -> None:
        raise _OutputError(error) from None


def _streams() -> None:
    """Replace the standard streams: the new ones accept every character, and closed ones exist."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    for name, kind in (("stdout", _Output), ("stderr", _Stream)):
        stream = getattr(sys, name)
        if stream is None:  # closed: open it for reading only, so that writing fails
            buffer = io.BufferedWriter(io.FileIO(os.open(os.devnull, os.O_RDONLY), "w"))
            stream = kind(buffer, "utf-8", "replace")
        elif type(stream) is io.TextIOWrapper:  # a character missing from a code page must not end an answer
            encoding = stream.encoding if stream.isatty() else "utf-8"
            lines, at_once = stream.line_buffering, stream.write_through
            stream = kind(stream.detach(), encoding, "replace", line_buffering=lines, write_through=at_once)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main() -> None:
    """Run the `hotset` script."""
    _streams()
    warnings.showwarning = _warn
    app(prog_name="hotset")


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    warn(str(message))


if __name__ == "__main__":
    main()
