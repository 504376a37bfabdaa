"""The `hotset` command: one module per verb, and one place where every error becomes a sentence.

Exit codes: 0 done; 1 a user's mistake or a failure, told in one sentence; 2 wrong usage; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hotset.errors import HotsetError

# verb → module and function. Only the verb that is called is imported: the others' imports would be
# a tenth of the time to the first token.
VERBS = {
    "run": ("run", "run"),
    "pull": ("models", "pull"),
    "list": ("models", "list_command"),
    "show": ("models", "show"),
    "rm": ("models", "rm"),
    "bench": ("bench", "bench"),
    "perplexity": ("perplexity", "perplexity"),
    "profile": ("profile", "profile"),
    "reorder": ("profile", "reorder"),
    "train-predictor": ("train_predictor", "train_predictor"),
    "report": ("report", "report"),
    "convert": ("convert", "convert"),
    "quantize": ("quantize", "quantize"),
    "sparsify": ("sparsify", "sparsify"),
    "plan": ("plan", "plan"),
    "doctor": ("doctor", "doctor"),
}


_SETTINGS = {"help_option_names": ["-h", "--help"]}


class _Group(TyperGroup):
    """Loads verbs when they are called, and turns what they raise into a sentence and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        module, function = VERBS[cmd_name]
        single = typer.Typer(add_completion=False, context_settings=_SETTINGS)
        single.command(cmd_name)(getattr(import_module(f"hotset.cli.{module}"), function))
        command = typer.main.get_command(single)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here, so that a closed pipe is noticed where it is handled
            return result
        except HotsetError as error:
            _tell(str(error))
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:  # `hotset ... | head`: the reader has what it wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except MemoryError:
            _tell("There is not enough memory: use a smaller model, or a smaller context with -c.")
            sys.exit(1)
        except Exception as error:
            if hasattr(error, "exit_code"):  # typer's own: wrong usage, an early exit
                raise
            _tell(
                f"hotset itself failed, with {type(error).__name__}: {error}. Run it again with "
                "HOTSET_DEBUG=1 for the traceback, and please report that with the output of 'hotset doctor'."
            )
            sys.exit(1)


def _tell(sentence: str) -> None:
    if os.environ.get("HOTSET_DEBUG") == "1":
        import traceback

        traceback.print_exc()
    first = sentence[:1].upper() + sentence[1:]
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(first if first.endswith((".", "!", "?")) else first + ".", err=True)


app = typer.Typer(
    cls=_Group,
    name="hotset",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
    help="Runs large language models on a personal computer by touching only the neurons that fire.",
    epilog="Begin with 'hotset run'.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from hotset.cli import doctor

        typer.echo(f"hotset {doctor.package_version('hotset') or '(source)'}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `hotset` script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a code page that lacks a character must not end an answer
            encoding = None if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="replace")
    warnings.showwarning = _warn  # type: ignore[assignment]
    app(prog_name="hotset")


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.secho(f"warning: {message}", err=True)


if __name__ == "__main__":
    main()
