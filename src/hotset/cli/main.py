"""The `hotset` command: one module per verb, and one place where every error becomes a sentence.

Exit codes: 0 done; 1 a user's mistake or a failure, told in one sentence; 2 wrong usage; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hotset.cli import bench, convert, doctor, models, perplexity, run
from hotset.errors import HotsetError


class _Group(TyperGroup):
    """Turns what a verb raises into a sentence on stderr and an exit code; a traceback only on request."""

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
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Runs large language models on a personal computer by touching only the neurons that fire.",
    epilog="Begin with 'hotset run'.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hotset {doctor.package_version('hotset') or '(source)'}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("run")(run.run)
app.command("pull")(models.pull)
app.command("list")(models.list_command)
app.command("show")(models.show)
app.command("rm")(models.rm)
app.command("bench")(bench.bench)
app.command("perplexity")(perplexity.perplexity)
app.command("convert")(convert.convert)
app.command("doctor")(doctor.doctor)


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
