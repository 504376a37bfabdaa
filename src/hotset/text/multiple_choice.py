"""Multiple-choice tasks from files of JSON lines, as their data sets publish them.

The fields of a line show its format. Prompts equal EleutherAI's evaluation harness's, so that numbers
can be compared:

    hellaswag  ctx_a, ctx_b (or ctx), endings, label, [activity_label]
               "Activity: Ctx_a Ctx_b", then each ending
    arc        question, choices, answerKey; choices is a list of {text, label} inside question (AI2), or the
               lists text and label (Hugging Face)
               "Question: ...\\nAnswer:", then each choice
    piqa       goal, sol1, sol2, label
               the same, then each solution

A file is not trusted: every line is checked, and the error names the first invalid line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotset.errors import FormatError
from hotset.escaping import clause
from hotset.parameters import shown

LONGEST_LINE = 1 << 20  # bytes
_MOST_CHOICES = 1024  # a data set of intents has 150
_MARKS = re.compile(r"\[.*?\]")  # HellaSwag's texts come from subtitles and wikis


@dataclass(frozen=True)
class Question:
    """A question with choices.

    context: the given text. choices: possible continuations, each after `delimiter`. answer: the index of the
    right one. where: file and line, for messages. description: the text before the context and its examples.
    document: the fields of the source, which identify it among examples.

    Raises FormatError for a question without two choices, without an answer, or with an empty choice.
    """

    task: str
    context: str
    choices: tuple[str, ...]
    answer: int
    where: str
    delimiter: str = " "
    description: str = ""
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 2 <= len(self.choices) <= _MOST_CHOICES:
            raise FormatError(
                f"{self.where}, has {len(self.choices)} choices; a question has 2 to {_MOST_CHOICES}"
            )
        if not all(choice.strip() for choice in self.choices):
            raise FormatError(f"{self.where}, has an empty choice")
        if not 0 <= self.answer < len(self.choices):
            raise FormatError(
                f"{self.where}, names choice {self.answer} of {len(self.choices)} as the right one"
            )


def read_questions(
    lines: Iterable[bytes], name: str, labels: Iterable[bytes] | None = None
) -> list[Question]:
    """Return the questions of a file. Empty lines are skipped, but count as line numbers.

    name: of the file, for messages. labels: answers, one per line, if the data set has them in a separate
    file. Raises FormatError, with the line, for a line that is not a question of a known format, has no
    answer, or has another format than the lines before. A file without questions raises it too.
    """
    questions: list[Question] = []
    answers = None if labels is None else iter(labels)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        given = json_object(line, where)
        if answers is not None:
            given = given | {"label": _label(next(answers, None), where)}
        question = _question(given, where)
        if questions and question.task != questions[0].task:
            raise FormatError(
                f"{where}, is a question of {question.task}, and those before it are of {questions[0].task}; "
                "give each a file of its own"
            )
        questions.append(question)
    if not questions:
        raise FormatError(f"{name} holds no questions; it must have one JSON object a line")
    if answers is not None and any(rest.strip() for rest in answers):
        raise FormatError(f"{name} has fewer questions than there are labels; give the labels of this file")
    return questions


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """Return the object in a line of JSON. Raises FormatError, which names `where`, for other lines."""
    if len(line) > LONGEST_LINE:
        raise FormatError(f"{where}, is longer than {LONGEST_LINE} bytes, which no question is")
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}, is not JSON ({clause(error)})") from None
    if not isinstance(given, dict):
        raise FormatError(f"{where}, is not a JSON object, which a question is")
    return given


def _label(line: bytes | None, where: str) -> str:
    if line is None:
        raise FormatError(f"{where}, has no label: there are more questions than labels")
    return line.strip().decode("utf-8", "replace")


def _question(given: Mapping[str, Any], where: str) -> Question:
    for fields, (task, read) in _FORMATS.items():
        if fields <= given.keys():
            context, choices, answer = read(given, where)
            if not context.strip():
                raise FormatError(f"{where}, has an empty text")
            return Question(task, context, tuple(choices), answer, where, document=given)
    raise FormatError(
        f"{where}, is not a known question: HellaSwag has ctx, endings and label, ARC question, choices and "
        "answerKey, PIQA goal, sol1, sol2 and label; other data sets need a task file"
    )


def _hellaswag(given: Mapping[str, Any], where: str) -> tuple[str, list[str], int]:
    if "ctx_a" in given and "ctx_b" in given:
        context = f"{_text(given, 'ctx_a', where)} {_text(given, 'ctx_b', where).capitalize()}"
    else:
        context = _text(given, "ctx", where)
    if "activity_label" in given:
        context = f"{_text(given, 'activity_label', where)}: {context}"
    endings = _texts(given["endings"], "endings", where)
    return _plain(context), [_plain(ending) for ending in endings], _number(given, where)


def _plain(text: str) -> str:
    return _MARKS.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _arc(given: Mapping[str, Any], where: str) -> tuple[str, list[str], int]:
    question = given["question"]
    if isinstance(question, dict):  # AI2's form: the choices are inside the question
        stem, choices = _text(question, "stem", where), question.get("choices")
    else:
        stem, choices = _text(given, "question", where), given.get("choices")
    if isinstance(choices, dict):
        texts, names = (
            _texts(choices.get("text"), "text", where),
            _texts(choices.get("label"), "label", where),
        )
    elif isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        texts = [_text(choice, "text", where) for choice in choices]
        names = [_text(choice, "label", where) for choice in choices]
    else:
        raise FormatError(f"{where}, has no choices, a list of texts with labels")
    key = _text(given, "answerKey", where)
    if len(names) != len(texts) or names.count(key) != 1:
        raise FormatError(
            f"{where}, has the answer {clause(shown(key))}, which is not the label of one choice"
        )
    return f"Question: {stem}\nAnswer:", texts, names.index(key)


def _piqa(given: Mapping[str, Any], where: str) -> tuple[str, list[str], int]:
    solutions = [_text(given, name, where) for name in ("sol1", "sol2")]
    return f"Question: {_text(given, 'goal', where)}\nAnswer:", solutions, _number(given, where)


# Fields that identify a format → its name, and the function that reads it.
_FORMATS: dict[frozenset[str], tuple[str, Callable[[Mapping[str, Any], str], tuple[str, list[str], int]]]] = {
    frozenset({"endings"}): ("hellaswag", _hellaswag),
    frozenset({"question", "answerKey"}): ("arc", _arc),
    frozenset({"goal", "sol1", "sol2"}): ("piqa", _piqa),
}


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise FormatError(f"{where}, must have a text as {name}, not {clause(shown(value))}")
    return value


def _texts(value: Any, name: str, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise FormatError(f"{where}, must have a list of texts as {name}")
    return value


def _number(given: Mapping[str, Any], where: str) -> int:
    """Return the label, a number or its text. Raises FormatError if it is missing, as in test parts."""
    label = given.get("label")
    text = str(label) if isinstance(label, int) and not isinstance(label, bool) else label
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,2}", text):
        raise FormatError(
            f"{where}, has no label, the number of the right choice (it is {clause(shown(label))}): take a "
            "part of the data set whose answers are public, or give them with `labels`"
        )
    return int(text)
