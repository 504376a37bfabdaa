"""How much of which prompt a step takes: so much that answers and short prompts need not wait for long ones.

What a token takes grows with what stands before it, so a step is measured in units of a prompt's first token.
A token whose logits are read (the scores of a prompt) takes more: the output matrix, and the reading.
Bits do not depend on chunks, so nothing here changes a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

PROMPT_SECONDS = 0.05
_STEPS = 16  # of an answer: a prompt's step of that time loses a sixteenth to what any step costs
_FIRST = 64.0  # units of a step without answers, until something was measured
_FEWEST = 16.0  # a prompt must come to its end, on whatever machine; next to answers it begins with these
_FEWEST_ROWS = 4.0  # beside answers, however long reading one took
_FULL = 0.9  # of a share: a smaller step says little, since much of one costs the same for any
_PAYS = 0.95  # of the time that a unit takes: a step of twice the size must make it less than this
_REST = (
    1.25  # shares that a prompt alone takes in its last step: a few tokens by themselves cost as much as many
)
_ATTENTION = 2.0  # an operation of attention takes as long as two of the matrices (decision 016)


def _size(units: float) -> int:
    return round(math.log2(max(units, 1.0)))


def _adapted(share: float, units: float, fitting: float, fewest: float) -> float:
    """A share after a step of so many units, by which as many would fit."""
    if fitting < units:
        return max(fitting, fewest)
    return min(fitting, 2 * share) if units >= _FULL * share else share


class PrefillChunk(NamedTuple):
    """Tokens of a prompt: how many, and the units that each takes."""

    n: int
    weight: float


def weigher(flops: Callable[[float], float] | None) -> Callable[[int], float]:
    """Units that a token takes, by its position, from the operations of a token at a depth."""
    if flops is None:
        return lambda _: 1.0
    first = flops(0.0)
    return lambda position: 1.0 + _ATTENTION * (flops(position) / first - 1.0)


class PromptShare:
    """How many units of prompts a step takes: what waits for its end (the next token of a running answer, a
    request that comes meanwhile) shall not wait long.

    beside: answers that run; alone: where none does.
    seconds: that a prompt may add to a step; where a step of answers alone takes longer, that long, and
    without answers sixteen times that long; inf: whole steps. What a unit takes differs by a factor of a
    thousand between machines and models, so it is measured: a step that took too long shrinks the share at
    once, one that took its whole share and less time lets it grow. Where none runs, steps are longer still
    while doubling them pays: a prompt's step of a sparse model reads the neurons of all its tokens, ten times
    what a step of an answer reads, and sixteen of those would not outweigh it.
    """

    def __init__(self, seconds: float) -> None:
        self.beside, self.alone = (math.inf,) * 2 if seconds == math.inf else (_FEWEST, _FIRST)
        self._row = 0.0  # units that a row of logits takes beside its token, where it is given away
        self._seconds = seconds
        self._answers = 0.0  # seconds of a step without a prompt
        self._quickest = 0.0  # of them lately
        self._per_unit = 0.0  # seconds, in the latest step with much of a prompt
        self._fitting = self.alone  # of `alone`, what the time allows
        self._rates: dict[
            int, float
        ] = {}  # least seconds a unit lately, of steps of about 2^i units without answers

    def note(self, units: float, n_answers: int, seconds: float, n_rows: int = 0) -> None:
        """Takes in a step with so much of prompts, beside that many tokens of answers.

        n_rows: of logits that it gave away. What the step took longer than its units is theirs, which says
        nothing of other prompts.
        """
        if n_rows and units and self._per_unit:
            more = seconds - self.seconds_of(units, n_answers)
            self._row = max(more / n_rows / self._per_unit, 0.0)
            if more > 0:
                return
        if not units:
            self._answers = seconds
            self._quickest = min(seconds, 1.01 * self._quickest or seconds)
            return
        is_first = not self._per_unit  # it read the file
        per_unit = max(seconds - (self._answers if n_answers else 0.0), 1e-6) / units
        if units >= _FULL * min(self.beside, self._fitting) or per_unit < self._per_unit or is_first:
            self._per_unit = per_unit
        beside, alone = (
            max(self._seconds, each) / per_unit for each in (self._answers, _STEPS * self._quickest)
        )
        self.beside = _adapted(self.beside, units, beside, _FEWEST)
        self._fitting = _adapted(self._fitting, units, alone, _FEWEST if self._quickest else _FIRST)
        if not n_answers and not is_first:
            size = _size(units)
            self._rates[size] = min(per_unit, 1.01 * self._rates.get(size, math.inf))
        self.alone = self._paying(self._fitting)

    def _paying(self, share: float) -> float:
        """A share of that size, or one as large as doubling it still pays.

        A step costs something and each unit in it, so that sizes that were seen predict what the next will
        gain.
        """
        if share == math.inf:
            return share
        size, rates = _size(share), self._rates
        if size not in rates:
            return share
        for larger in sorted(each for each in rates if each > size):
            if rates[larger] < _PAYS ** (larger - size) * rates[size]:
                size = larger
        smaller = max((each for each in rates if each < size), default=size)
        if smaller < size and size + 1 not in rates:
            gained = (rates[smaller] - rates[size]) / (2 ** (size - smaller) - 1)
            size += gained / 2 > (1 - _PAYS) * rates[size]
        return share if size == _size(share) else 2.0**size

    def of_row(self, n_answers: int) -> float:
        """Units that a row of logits takes beside its token; no more than what lets a share do for a few."""
        share, fewest = (self.beside, _FEWEST_ROWS) if n_answers else (self.alone, _FIRST)
        return min(self._row, max(share / fewest - 1, 0.0))

    def seconds_of(self, units: float, n_answers: int) -> float:
        """How long such a step will take, by the latest ones; 0.0 before there was any."""
        return units * self._per_unit + (self._answers if n_answers else 0.0)


def divide(missing: Sequence[PrefillChunk], budget: float, n_max: int) -> list[int]:
    """How many of its missing tokens each prompt, the oldest first, gets of a step of `budget` units, which
    takes n_max tokens.

    Those that miss the least come to their end, as far as seven eighths of the step suffice; the others get
    an eighth, so that the step is a short one. Half of what they get is the oldest one's, and what is left
    goes to the one that misses the least. One alone that misses little more than the step ends in it.
    """
    given = [0] * len(missing)
    if not missing or not n_max:
        return given
    if len(missing) == 1 and missing[0].n <= n_max and missing[0].n * missing[0].weight <= _REST * budget:
        return [missing[0].n]
    order = sorted(range(len(missing)), key=lambda i: missing[i].n * missing[i].weight)
    if len(missing) > 1:
        _give(given, missing, order, budget * 7 / 8, n_max * 7 // 8, whole=True)
    ends = any(given)
    others = [i for i in order if not given[i]]
    if not others:
        return given
    left = n_max - sum(given)
    oldest = min(others)
    given[oldest] = 1  # no sequence is left behind for ever
    units = budget / 8 if ends else budget
    first = missing[oldest].weight
    units -= first + _give(given, missing, [oldest], units / 2 - first, -(-left // 2) - 1)
    _give(given, missing, others, units, n_max - sum(given))
    return given


def _give(
    given: list[int],
    missing: Sequence[PrefillChunk],
    order: Sequence[int],
    units: float,
    n_max: int,
    *,
    whole: bool = False,
) -> float:
    """Gives each in turn what it misses and there is, or (whole) to those alone who get it all; the units."""
    spent = 0.0
    for i in order:
        n = int(max(min((units - spent) / missing[i].weight, missing[i].n - given[i], n_max), 0))
        if whole and n < missing[i].n:
            break
        given[i] += n
        n_max -= n
        spent += n * missing[i].weight
    return spent
