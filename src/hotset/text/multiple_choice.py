"""Multiple-choice tasks from files of JSON lines, as their data sets publish them.

A format is recognised by its fields, and what a model is asked is what EleutherAI's evaluation harness asks,
so that numbers can be compared:

    hellaswag  ctx_a, ctx_b (or ctx), endings, label, [activity_label]
               "Activity: Ctx_a Ctx_b", then each ending
    arc        question, choices, answerKey; choices is a list of {text, label} inside question (AI2), or the
               lists text and label (Hugging Face)
               "Question: ...\\nAnswer:", then each choice
    piqa       goal, sol1, sol2, label
               the same, then each solution

A file is not trusted: every line is checked, and the error names the first that is no question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hotset.errors import FormatError
from hotset.escaping import clause
from hotset.parameters import shown

Task = Literal["hellaswag", "arc", "piqa"]
LONGEST_LINE = 1 << 20  # bytes
_MOST_CHOICES = 26
_MARKS = re.compile(r"\[.*?\]")  # HellaSwag's texts come from subtitles and wikis


@dataclass(frozen=True)
class Question:
    """context: what is given. choices: how it may go on, each with the space before it. answer: the index of
    the right one. line: of its file, from 1."""

    task: Task
    context: str
    choices: tuple[str, ...]
    answer: int
    line: int


def read_questions(
    lines: Iterable[bytes], name: str, labels: Iterable[bytes] | None = None
) -> list[Question]:
    """The questions of a file; empty lines count and are passed over.

    name: of the file, for messages. labels: answers where the data set keeps them in a file of their own, a
    line each. Raises FormatError, which names the line, for what is no question of a known format, has no
    answer, or is of another format than those before; and for a file without any.
    """
    questions: list[Question] = []
    answers = None if labels is None else iter(labels)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number},"
        given = _object(line, where)
        if answers is not None:
            given = given | {"label": _label(next(answers, None), where)}
        question = _question(given, where, number)
        if questions and question.task != questions[0].task:
            raise FormatError(
                f"{where} is a question of {question.task}, and those before it are of {questions[0].task}; "
                "give each a file of its own"
            )
        questions.append(question)
    if not questions:
        raise FormatError(f"{name} holds no questions; it must have one JSON object a line")
    if answers is not None and any(rest.strip() for rest in answers):
        raise FormatError(f"{name} has fewer questions than there are labels; give the labels of this file")
    return questions


def _object(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > LONGEST_LINE:
        raise FormatError(f"{where} is longer than {LONGEST_LINE} bytes, which no question is")
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not JSON ({clause(error)})") from None
    if not isinstance(given, dict):
        raise FormatError(f"{where} is not a JSON object, which a question is")
    return given


def _label(line: bytes | None, where: str) -> str:
    if line is None:
        raise FormatError(f"{where} has no label: there are more questions than labels")
    return line.strip().decode("utf-8", "replace")


def _question(given: Mapping[str, Any], where: str, line: int) -> Question:
    for fields, (task, read) in _FORMATS.items():
        if fields <= given.keys():
            context, choices, answer = read(given, where)
            if not 2 <= len(choices) <= _MOST_CHOICES:
                raise FormatError(f"{where} has {len(choices)} choices; a question has 2 to {_MOST_CHOICES}")
            if not context.strip() or not all(choice.strip() for choice in choices):
                raise FormatError(f"{where} has an empty text or choice")
            if not 0 <= answer < len(choices):
                raise FormatError(f"{where} names choice {answer} of {len(choices)} as the right one")
            return Question(task, context, tuple(f" {choice}" for choice in choices), answer, line)
    raise FormatError(
        f"{where} is no question that is known: HellaSwag has ctx, endings and label, ARC question, choices "
        "and answerKey, PIQA goal, sol1, sol2 and label"
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
    text = _MARKS.sub("", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ").strip()


def _arc(given: Mapping[str, Any], where: str) -> tuple[str, list[str], int]:
    question = given["question"]
    if isinstance(question, dict):  # as AI2 publishes it: the choices are in there
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
        raise FormatError(f"{where} has no choices, a list of texts with labels")
    key = _text(given, "answerKey", where)
    if len(names) != len(texts) or names.count(key) != 1:
        raise FormatError(
            f"{where} has the answer {clause(shown(key))}, which is not the label of one choice"
        )
    return f"Question: {stem}\nAnswer:", [text.strip() for text in texts], names.index(key)


def _piqa(given: Mapping[str, Any], where: str) -> tuple[str, list[str], int]:
    solutions = [_text(given, name, where).strip() for name in ("sol1", "sol2")]
    return f"Question: {_text(given, 'goal', where)}\nAnswer:", solutions, _number(given, where)


# Fields by which a format is known → its name, and what reads it.
_FORMATS: dict[
    frozenset[str], tuple[Task, Callable[[Mapping[str, Any], str], tuple[str, list[str], int]]]
] = {
    frozenset({"endings"}): ("hellaswag", _hellaswag),
    frozenset({"question", "answerKey"}): ("arc", _arc),
    frozenset({"goal", "sol1", "sol2"}): ("piqa", _piqa),
}


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise FormatError(f"{where} must have a text as {name}, not {clause(shown(value))}")
    return value


def _texts(value: Any, name: str, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise FormatError(f"{where} must have a list of texts as {name}")
    return value


def _number(given: Mapping[str, Any], where: str) -> int:
    """The label, a number or a text of one; the test parts of data sets have none."""
    label = given.get("label")
    text = str(label) if isinstance(label, int) and not isinstance(label, bool) else label
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,2}", text):
        raise FormatError(
            f"{where} has no label, the number of the right choice (it is {clause(shown(label))}): take a "
            "part of the data set whose answers are public, or give them with --labels"
        )
    return int(text)
