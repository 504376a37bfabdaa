"""How well a model answers multiple-choice questions, by the log-likelihood of the choices.

A choice is as good as the model finds it likely after the question: the sum of the log-probabilities of its
tokens. `accuracy` takes the largest sum; `accuracy_norm` the largest sum per character of the choice, since
long ones lose otherwise. Both are those of EleutherAI's evaluation harness (acc, acc_norm).

All choices of a question are scored from the same token on: the first in which any of them, tokenised with
the question, differs from the question alone. So a token that grew across the border counts for every choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from hotset.api import Model
from hotset.engine.log_likelihood import Continuation, log_likelihoods
from hotset.errors import ContextLengthError, FormatError
from hotset.text.multiple_choice import Question
from hotset.text.tokenizer import Tokenizer

_QUESTIONS_AT_ONCE = 8  # so that steps are full


@dataclass(frozen=True)
class EvaluationResult:
    """After n_done of n_questions: shares of right answers with their standard errors.

    accuracy_norm: by sums per character.
    """

    task: str
    n_done: int
    n_questions: int
    accuracy: float
    accuracy_error: float
    accuracy_norm: float
    accuracy_norm_error: float


@dataclass(frozen=True)
class _Encoded:
    question: Question
    choices: tuple[Continuation, ...]


def evaluate(model: Model, questions: Sequence[Question]) -> Iterator[EvaluationResult]:
    """Answers some questions at a time and yields the result so far; the last one is the answer.

    Raises, before anything is computed, ContextLengthError for a question that does not fit in the context
    and FormatError for one that leaves nothing to condition on; both name its line.
    """
    encoded = [_encoded(model, question) for question in questions]
    right: list[bool] = []
    right_norm: list[bool] = []
    left = iter(encoded)
    while wave := list(islice(left, _QUESTIONS_AT_ONCE)):
        with model.thread.exclusive() as engine:
            sums = log_likelihoods(engine, [choice for one in wave for choice in one.choices])
        for one in wave:
            own, sums = sums[: len(one.choices)], sums[len(one.choices) :]
            lengths = [len(choice.strip()) for choice in one.question.choices]
            right.append(int(np.argmax(own)) == one.question.answer)
            right_norm.append(int(np.argmax(own / lengths)) == one.question.answer)
        yield EvaluationResult(
            questions[0].task, len(right), len(questions), *_share(right), *_share(right_norm)
        )


def _encoded(model: Model, question: Question) -> _Encoded:
    tokenizer = model.tokenizer
    context = _tokens(tokenizer, question.context)
    whole = [_tokens(tokenizer, question.context + choice) for choice in question.choices]
    first = min(_n_common(context, tokens) for tokens in whole)
    if first == 0:
        raise FormatError(
            f"line {question.line} leaves nothing that its choices could follow: the model's texts begin "
            "without a token of their own, and the question is part of the choices' first token"
        )
    longest = max(map(len, whole)) - 1
    if longest > model.n_ctx:
        raise ContextLengthError(
            f"the question in line {question.line} has {longest} tokens with its longest choice, which do "
            f"not fit in the context of {model.n_ctx}; load the model with a larger n_ctx"
        )
    return _Encoded(question, tuple(Continuation(tokens, first) for tokens in whole))


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """As a text begins, and without what may stand at its end."""
    begin = [] if tokenizer.text_bos_id is None else [tokenizer.text_bos_id]
    return begin + tokenizer.encode(text, add_special=False)


def _n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _share(right: Sequence[bool]) -> tuple[float, float]:
    n = len(right)
    share = sum(right) / n
    return share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else 0.0
