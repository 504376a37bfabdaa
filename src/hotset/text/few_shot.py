"""Few-shot prompts: answered examples before each question, as in EleutherAI's evaluation harness.

    description example delimiter answer "\\n\\n" example delimiter answer "\\n\\n" question

The harness's default sampler draws other examples for each question, by one generator for the whole task: the
same seed, files and number of examples give the same prompts, here and there (lm_eval/api/samplers.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotset.errors import FormatError
from hotset.text.multiple_choice import Question

SEED = 1234
"""The harness's own for examples."""
SAMPLERS = ("default", "first_n")
_MOST_CHARS = 1 << 30  # of all prompts, which wait in memory together


@dataclass(frozen=True)
class Shots:
    """n examples before each question.

    sampler: "default" draws them anew for each question, "first_n" takes the first of the file. delimiter:
    after each example. one_more: the default sampler draws n + 1, of which the question itself is dropped,
    also where no question is among the examples: what is drawn next depends on it.
    """

    n: int
    seed: int = SEED
    sampler: str = "default"
    delimiter: str = "\n\n"
    one_more: bool = True


def with_examples(
    questions: Iterable[Question],
    documents: Sequence[Any],
    example: Callable[[int], Question],
    shots: Shots,
    name: str,
) -> list[Question]:
    """The questions with descriptions and examples as a part of their contexts.

    documents: of the examples, in the order of their file. example(i) answers for the i-th, and is asked for
    those that are drawn. name: where examples are from, for messages. A question with the fields of a
    document is never its own example. Raises FormatError where there are too few examples, and where the
    prompts are too long to be kept.
    """
    sampler = _Sampler([_key(document) for document in documents], shots, name) if shots.n else None
    prompts, n_chars = [], 0
    for question in questions:
        drawn = map(example, sampler.draw(question)) if sampler else ()
        parts = [question.description]
        for one in drawn:
            parts += (one.context, one.delimiter, one.choices[one.answer], shots.delimiter)
        parts.append(question.context)
        n_chars += sum(map(len, parts)) + sum(map(len, question.choices))
        if n_chars > _MOST_CHARS:
            raise FormatError(
                f"{question.where}: the prompts up to here have more than {_MOST_CHARS} characters, which is "
                "the limit; take fewer shots or questions"
            )
        prompts.append(replace(question, context="".join(parts), description=""))
    return prompts


class _Sampler:
    def __init__(self, keys: list[str], shots: Shots, name: str) -> None:
        self._keys, self._shots, self._name = keys, shots, name
        self._one_more = shots.sampler == "default" and shots.one_more
        self._random = random.Random(shots.seed)
        if len(keys) < shots.n + self._one_more:
            raise self._too_few(len(keys))

    def draw(self, question: Question) -> list[int]:
        """Indices of examples for a question, none of which is the question."""
        n, own = self._shots.n, _key(question.document)
        if self._shots.sampler == "first_n":
            drawn = list(range(n))
        else:
            drawn = self._random.sample(range(len(self._keys)), n + self._one_more)
        drawn = [i for i in drawn if self._keys[i] != own][:n]
        if len(drawn) == n:
            return drawn
        others = [i for i, key in enumerate(self._keys) if key != own]
        if len(others) < n:
            raise self._too_few(len(others))
        if self._one_more:  # the question is there several times: the harness draws anew
            return self._random.sample(others, n)
        # The harness lets the question stay. Nothing is drawn, so that later questions have its examples.
        return [*drawn, *(i for i in others if i not in drawn)][:n]

    def _too_few(self, n: int) -> FormatError:
        more = " and one more, since no question is its own example" if self._one_more else ""
        return FormatError(
            f"{self._name} has {n} examples for a question, and {self._shots.n} shots need that many{more}; "
            "take fewer shots, or a larger file"
        )


def _key(document: Any) -> str:
    return json.dumps(document, sort_keys=True)
