"""`hotset eval`: multiple-choice tasks from a file of JSON lines or a task file, by log-likelihood."""

from __future__ import annotations

import json as json_lines
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hotset
from hotset.cli import options
from hotset.cli.console import print_choice, print_json, print_memory, print_table, read_text, say
from hotset.cli.progress import ProgressBar
from hotset.errors import InvalidRequestError
from hotset.evaluation import evaluate as answered
from hotset.files import check_output, replacing
from hotset.storage import resolve
from hotset.text.few_shot import SEED, Shots, with_examples
from hotset.text.multiple_choice import Question, read_questions
from hotset.text.task_file import TaskQuestions, is_task_file, read_task

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.evaluation import EvaluationResult, ScoredAnswer


Labels = Annotated[
    Path | None,
    options.option(
        "--labels", "Labels, one per line, for questions without labels.", exists=True, dir_okay=False
    ),
]
LogSamples = Annotated[
    Path | None,
    options.option("--log-samples", "Write each question with its answer as a line of JSON.", dir_okay=False),
]


@dataclass(frozen=True, kw_only=True)
class ExampleOptions:
    """Options for the answered examples before each question."""

    shots: Annotated[
        int | None,
        options.option(
            "--shots --num-fewshot",
            "Answered examples before each question.",
            usual="0, or the task file's",
            min=0,
        ),
    ] = None
    examples: Annotated[
        Path | None,
        options.option(
            "--examples", "File of the examples, in a format of FILE.", exists=True, dir_okay=False
        ),
    ] = None
    example_labels: Annotated[
        Path | None, options.option("--example-labels", "Labels for --examples.", exists=True, dir_okay=False)
    ] = None
    seed: Annotated[
        int, options.option("--seed -s", "Seed of the examples' choice; the harness has 1234.")
    ] = SEED

    def before(self, questions: list[Question]) -> TaskQuestions:
        """Return the questions with examples before them."""
        n, file = self.shots or 0, self.examples
        pool = _questions(file, "--examples", self.example_labels, "--example-labels") if file else []
        return TaskQuestions(_with_examples(questions, pool, n, self.seed, file), n)


def evaluate(
    model: options.ModelName,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON lines of HellaSwag, ARC or PIQA, or a task file (.yaml) of lm-evaluation-harness.",
            exists=True,
            dir_okay=False,
        ),
    ],
    labels: Labels = None,
    *,
    given: ExampleOptions,
    limit: Annotated[
        int | None, options.option("--limit", "Ask only the first N questions.", usual="all", min=1)
    ] = None,
    log_samples: LogSamples = None,
    json: options.Json = False,
    loading: options.ModelOptions,
) -> None:
    """Answer multiple-choice questions by log-likelihood: accuracy with its standard error."""
    if is_task_file(file):
        if labels or given.examples or given.example_labels:
            raise InvalidRequestError(
                f"{file} is a task file, which says itself where answers and examples are: leave out "
                "--labels, --examples and --example-labels"
            )
        task = read_task(file, given.shots, given.seed, limit)
    else:
        task = given.before(_questions(file, "FILE", labels, "--labels")[:limit])
    if log_samples is not None:
        read = (path for path in (file, labels, given.examples, given.example_labels) if path)
        check_output(log_samples, [*read, *task.files])
    settings = loading.settings()
    with ProgressBar() as bar:
        path = resolve(model, progress=bar)
        with hotset.load(path, settings, progress=bar) as loaded:
            print_choice(loaded)
            print_memory(loaded)
            result = _answered(loaded, task.questions, log_samples, bar)
            bar.clear()
            if json:
                print_json(_as_json(loaded, result, file) | {"shots": task.n_shots})
            else:
                _print(loaded, result)


def _answered(
    model: Model, questions: list[Question], log_samples: Path | None, bar: ProgressBar
) -> EvaluationResult:
    with ExitStack() as files:
        log = None if log_samples is None else files.enter_context(replacing(log_samples))
        n_done = 0
        bar.advance(questions[0].task, 0, len(questions), "questions")
        for result in answered(model, questions):
            bar.advance(result.task, result.n_done, result.n_questions, "questions")
            if log is not None:
                log.writelines(_json_line(answer) for answer in result.answers[n_done:])
            n_done = result.n_done
    return result


def _json_line(answer: ScoredAnswer) -> bytes:
    return json_lines.dumps(answer.as_dict()).encode() + b"\n"


def _questions(file: Path, option: str, labels: Path | None, labels_option: str) -> list[Question]:
    # Split only at \n: texts in JSON may have other line separators.
    lines = read_text(file, option).encode().split(b"\n")
    of_lines = None if labels is None else read_text(labels, labels_option).encode().split(b"\n")
    return read_questions(lines, str(file), of_lines)


def _with_examples(
    questions: list[Question], pool: list[Question], n: int, seed: int, file: Path | None
) -> list[Question]:
    task = questions[0].task
    if n and not pool:
        raise InvalidRequestError("--shots requires --examples, the file from which examples are drawn")
    if pool and pool[0].task != task:
        raise InvalidRequestError(f"{file} has questions of {pool[0].task}, but FILE has questions of {task}")
    # The harness has only a test split for ARC. It compares the names of splits, not their questions.
    shots = Shots(n, seed, one_more=task != "arc")
    return with_examples(questions, [one.document for one in pool], pool.__getitem__, shots, str(file))


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
