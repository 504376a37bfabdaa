"""Evaluation of a model on multiple-choice questions, by the log-likelihood of the choices.

The score of a choice is the sum of its tokens' log-probabilities after the question. `accuracy` takes the
largest sum; `accuracy_norm` the largest sum per character of the choice, because otherwise long choices lose.
Both are defined as in EleutherAI's evaluation harness (acc, acc_norm).

All choices of a question are scored from the same token on: the first in which any of them, tokenised with
the question, differs from the question alone (without trailing spaces). So a token that spans question and
choice counts for every choice.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import islice
from typing import Any

import numpy as np

from hotset.api import Model
from hotset.engine.log_likelihood import Continuation, log_likelihoods
from hotset.errors import ContextLengthError, FormatError
from hotset.parameters import data_frame
from hotset.text.multiple_choice import Question
from hotset.text.tokenizer import Tokenizer

_QUESTIONS_AT_ONCE = 8  # to fill the steps


@dataclass(frozen=True)
class ScoredAnswer:
    """An answered question. doc_id: its number, from 0. log_likelihoods: Σ ln p of each choice's tokens."""

    doc_id: int
    question: Question
    log_likelihoods: tuple[float, ...]

    @cached_property
    def chosen(self) -> int:
        """The choice with the largest sum, or the first of them."""
        return int(np.argmax(self.log_likelihoods))

    @cached_property
    def chosen_norm(self) -> int:
        """The choice with the largest sum per character."""
        lengths = [len(choice) for choice in self.question.choices]
        return int(np.argmax(np.divide(self.log_likelihoods, lengths)))

    def as_dict(self) -> dict[str, Any]:
        """Return for JSON the question (`choices` follow `context` after `delimiter`), the sums and results.

        The results are the choices with the largest sums, and whether they are right.
        """
        question = self.question
        return {
            "doc_id": self.doc_id,
            "where": question.where,
            "context": question.context,
            "delimiter": question.delimiter,
            "choices": list(question.choices),
            "log_likelihoods": list(self.log_likelihoods),
            "answer": question.answer,
            "chosen": self.chosen,
            "chosen_norm": self.chosen_norm,
            "acc": self.chosen == question.answer,
            "acc_norm": self.chosen_norm == question.answer,
        }


@dataclass(frozen=True, repr=False)
class EvaluationResult:
    """The shares of right answers after some of n_questions, with standard errors. Notebooks show both.

    accuracy_norm: by sums per character. answers: to the questions so far, in order.
    """

    task: str
    n_questions: int
    accuracy: float
    accuracy_error: float
    accuracy_norm: float
    accuracy_norm_error: float
    answers: tuple[ScoredAnswer, ...]

    @property
    def n_done(self) -> int:
        """The number of answered questions."""
        return len(self.answers)

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row per question and the columns of `ScoredAnswer.as_dict`.

        Raises HotsetError if pandas is not installed.
        """
        rows = [answer.as_dict() for answer in self.answers]
        return data_frame({name: [row[name] for row in rows] for name in rows[0]})

    def __repr__(self) -> str:
        return (
            f"EvaluationResult({self.task!r}, {self.n_done} of {self.n_questions} questions, "
            f"acc={self.accuracy:.4f}, acc_norm={self.accuracy_norm:.4f})"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{name}</td><td>{100 * value:.2f} ± {100 * error:.2f}%</td></tr>"
            for name, value, error in (
                ("acc", self.accuracy, self.accuracy_error),
                ("acc_norm", self.accuracy_norm, self.accuracy_norm_error),
            )
        )
        return (
            f"<p>{escape(self.task)}: {self.n_done} of {self.n_questions} questions</p><table>{rows}</table>"
        )


@dataclass(frozen=True)
class _Encoded:
    question: Question
    choices: tuple[Continuation, ...]


def evaluate(model: Model, questions: Sequence[Question]) -> Iterator[EvaluationResult]:
    """Answer some questions at a time and yield the result so far; the last one is the answer.

    questions: at least one, of one task, with any examples in their contexts (text/few_shot.py). Before any
    computation, raises ContextLengthError for a question that does not fit in the context and FormatError for
    one without a token before its choices; both name its line.
    """
    encoded = [_encoded(model, question) for question in questions]
    answers: list[ScoredAnswer] = []
    right: list[bool] = []
    right_norm: list[bool] = []
    left = iter(encoded)
    while wave := list(islice(left, _QUESTIONS_AT_ONCE)):
        with model.thread.exclusive() as engine:
            sums = log_likelihoods(engine, [choice for one in wave for choice in one.choices]).tolist()
        for one in wave:
            own, sums = sums[: len(one.choices)], sums[len(one.choices) :]
            answer = ScoredAnswer(len(answers), one.question, tuple(own))
            answers.append(answer)
            right.append(answer.chosen == one.question.answer)
            right_norm.append(answer.chosen_norm == one.question.answer)
        yield EvaluationResult(
            questions[0].task, len(questions), *_share(right), *_share(right_norm), tuple(answers)
        )


def _encoded(model: Model, question: Question) -> _Encoded:
    tokenizer, given = model.tokenizer, question.context + question.delimiter
    context = _tokens(tokenizer, question.context.rstrip())
    whole = [_tokens(tokenizer, given + choice) for choice in question.choices]
    first = min(_n_common(context, tokens) for tokens in whole)
    if first == 0:
        raise FormatError(
            f"{question.where}, has no token before its choices: the model's texts have no start token, and "
            "the question is part of the choices' first token"
        )
    longest = max(map(len, whole)) - 1
    if longest > model.n_ctx:
        raise ContextLengthError(
            f"{question.where}, has {longest} tokens with its longest choice and its examples, but the "
            f"context has {model.n_ctx}; load the model with a larger n_ctx, or use fewer examples"
        )
    # 4 bytes per token: examples make texts long, and all questions are kept here.
    return _Encoded(question, tuple(Continuation(array("i", tokens), first) for tokens in whole))


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return tokens with the start token, if the model has one, and without an end token."""
    begin = [] if tokenizer.text_bos_id is None else [tokenizer.text_bos_id]
    return begin + tokenizer.encode(text, add_special=False)


def _n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _share(right: Sequence[bool]) -> tuple[float, float]:
    n = len(right)
    share = sum(right) / n
    return share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else 0.0
