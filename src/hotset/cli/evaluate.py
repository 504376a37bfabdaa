"""`hotset eval`: multiple-choice tasks from a file of JSON lines, by log-likelihood."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hotset
from hotset.cli import options
from hotset.cli.console import print_choice, print_json, print_memory, print_table, read_text, say
from hotset.cli.progress import ProgressBar
from hotset.evaluation import evaluate as answered
from hotset.storage import resolve
from hotset.text.multiple_choice import read_questions

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.evaluation import EvaluationResult

OUTPUTS = ("table", "json")


def evaluate(
    model: options.ModelName,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="JSON lines of HellaSwag, ARC or PIQA.", exists=True, dir_okay=False
        ),
    ],
    labels: Annotated[
        Path | None,
        typer.Option(
            "--labels", exists=True, dir_okay=False, help="A label a line, where the questions have none."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=1, help="Only so many questions, the first ones; default: all."),
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
    json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    n_ctx: options.ContextSize = None,
    *,
    loading: options.ModelOptions,
) -> None:
    """Answer multiple-choice questions by log-likelihood: accuracy with its standard error."""
    if output not in OUTPUTS:
        raise typer.BadParameter(f"'{output}' is none of {', '.join(OUTPUTS)}.", param_hint="-o")
    # Split at \n alone: JSON may hold other separators of lines.
    lines = read_text(file, "FILE").encode().split(b"\n")
    of_lines = None if labels is None else read_text(labels, "--labels").encode().split(b"\n")
    questions = read_questions(lines, str(file), of_lines)[:limit]
    settings = loading.settings(n_ctx=n_ctx)
    with ProgressBar() as bar:
        path = resolve(model, progress=bar)
        with hotset.load(path, settings, progress=bar) as loaded:
            print_choice(loaded)
            print_memory(loaded)
            bar.advance(questions[0].task, 0, len(questions), "questions")
            for result in answered(loaded, questions):
                bar.advance(result.task, result.n_done, result.n_questions, "questions")
            bar.clear()
            if json or output == "json":
                print_json(_as_json(loaded, result, file))
            else:
                _print(loaded, result)


def _as_json(model: Model, result: EvaluationResult, file: Path) -> dict[str, object]:
    spec = model.sparsity.spec
    return {
        "task": result.task,
        "questions": result.n_questions,
        "acc": result.accuracy,
        "acc_error": result.accuracy_error,
        "acc_norm": result.accuracy_norm,
        "acc_norm_error": result.accuracy_norm_error,
        "sparsity": model.sparsity.mode,
        "predictor": str(spec) if spec else None,
        "file": str(file),
        "model": str(model.gguf.path),
    }


def _print(model: Model, result: EvaluationResult) -> None:
    def share(value: float, error: float) -> str:
        return f"{100 * value:.2f} ± {100 * error:.2f}%"

    columns = ["task", "mode", ">questions", ">accuracy", ">length-normalised"]
    row = [
        result.task,
        str(model.sparsity.spec or model.sparsity.mode),
        str(result.n_questions),
        share(result.accuracy, result.accuracy_error),
        share(result.accuracy_norm, result.accuracy_norm_error),
    ]
    print_table(columns, [row], tight=True)
    say("[± standard error]", dim=True)
