"""Few-shot prompts: answered examples before each question, as in EleutherAI's evaluation harness.

    description example delimiter answer "\\n\\n" example delimiter answer "\\n\\n" question

The harness's default sampler draws other examples for each question, from one generator for the whole task.
The same seed, files and number of examples give the same prompts as the harness (lm_eval/api/samplers.py).
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
"""The harness's default seed for examples."""
SAMPLERS = ("default", "first_n")
MOST_CHARS = 1 << 30  # of all prompts together, which are in memory at once


@dataclass(frozen=True)
class Shots:
    """n examples before each question.

    sampler: "default" draws new examples for each question, "first_n" uses the first n of the file.
    delimiter: the text after each example. one_more: the default sampler draws n + 1 and drops the question
    itself. It does so even if the question is not among the examples, since later draws depend on it.
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
    """Return the questions with their descriptions and examples put into their contexts.

    documents: of the examples, in the order of their file. example(i) returns the i-th example, and is called
    for the drawn ones. name: the source of the examples, for messages. A question with the fields of a
    document is never its own example. Raises FormatError if there are too few examples, or if the prompts
    together are too long.
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
        if n_chars > MOST_CHARS:
            raise FormatError(
                f"{question.where}: the prompts up to here have more than {MOST_CHARS} characters, which is "
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
        """Return the indices of examples for a question, without the question itself."""
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
        if self._one_more:  # the question occurs several times, and the harness draws again
            return self._random.sample(others, n)
        # The harness keeps the question. Without another draw, later questions get the harness's examples.
        return [*drawn, *(i for i in others if i not in drawn)][:n]

    def _too_few(self, n: int) -> FormatError:
        more = " and one more, since no question is its own example" if self._one_more else ""
        return FormatError(
            f"{self._name} has {n} examples for a question, and {self._shots.n} shots need that many{more}; "
            "take fewer shots, or a larger file"
        )


def _key(document: Any) -> str:
    return json.dumps(document, sort_keys=True)
