"""Pacing: how many prompt tokens a step takes, so that long prompts delay neither decoding nor short prompts.

The cost of a token grows with the number of tokens before it. So the prefill token budget of a step is
counted in units: the cost of a prompt's first token. A token whose logits are read (scores of a prompt) costs
more, for the output matrix and the reading. Results do not depend on chunks, so nothing here changes a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

PROMPT_SECONDS = 0.05
_STEPS = 16  # a step without decoding may take 16 decode steps' time, so fixed costs take at most 1/16 of it
_FIRST = 64.0  # units of a pure step, before anything was measured
_FEWEST = 16.0  # units at least, since a prompt must finish on any machine; also the first mixed step's
_FEWEST_ROWS = 4.0  # rows of logits at least in a step with decoding, however slow reading one was
_FULL = 0.9  # a step below this part of the budget says little, because fixed costs dominate it
_PAYS = 0.95  # doubling a step pays if the time per unit falls below this part of the previous one
_REST = (
    1.25  # a single prompt may exceed the budget this far to finish: a small last step costs almost as much
)
_ATTENTION = 2.0  # an operation of attention takes as long as two of the matrices (decision 016)


def _size(units: float) -> int:
    return round(math.log2(max(units, 1.0)))


def _adapted(share: float, units: float, fitting: float, fewest: float) -> float:
    """Return the budget after a step of `units`, when `fitting` units would have fit in the allowed time."""
    if fitting < units:
        return max(fitting, fewest)
    return min(fitting, 2 * share) if units >= _FULL * share else share


class PrefillChunk(NamedTuple):
    """Tokens of a prompt: how many, and the units of each."""

    n: int
    weight: float


def weigher(flops: Callable[[float], float] | None) -> Callable[[int], float]:
    """Return a function from a token's position to its units; flops: operations of a token at a depth."""
    if flops is None:
        return lambda _: 1.0
    first = flops(0.0)
    return lambda position: 1.0 + _ATTENTION * (flops(position) / first - 1.0)


class PrefillBudget:
    """The prefill token budget of a step in units, which bounds how long other sequences wait for the step.

    mixed: budget of a step that also decodes; pure: of a step that does not. seconds: the time that prompts
    may add to a step; inf: no limit. They may always add the time of a decode step, or of 16 decode steps if
    the step does not decode. The time of a unit differs by a factor of a thousand between machines and
    models, so it is measured: a step that took too long shrinks the budget at once, and one that used the
    whole budget in less time lets it grow. Pure steps grow further while doubling them pays: a prefill step
    of a sparse model reads the neurons of all its tokens, ten times as many as a decode step, so the time of
    16 decode steps is too short for it.
    """

    def __init__(self, seconds: float) -> None:
        self.mixed, self.pure = (math.inf,) * 2 if seconds == math.inf else (_FEWEST, _FIRST)
        self._row = 0.0  # units that a row of logits costs in addition to its token, if it is handed out
        self._seconds = seconds
        self._answers = 0.0  # seconds of the latest step without a prompt
        self._quickest = 0.0  # the shortest recent such step
        self._per_unit = 0.0  # seconds per unit, in the latest step with many units
        self._fitting = self.pure  # the part of `pure` that the time allows
        self._rates: dict[int, float] = {}  # lowest recent seconds per unit, in pure steps of about 2^i units

    def note(self, units: float, n_answers: int, seconds: float, n_rows: int = 0) -> None:
        """Record a step with `units` of prompts and `n_answers` decoding sequences.

        n_rows: rows of logits that it handed out. Time beyond the cost of the units is attributed to these
        rows and does not change the budget.
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
        is_first = not self._per_unit  # it also read the file
        per_unit = max(seconds - (self._answers if n_answers else 0.0), 1e-6) / units
        if units >= _FULL * min(self.mixed, self._fitting) or per_unit < self._per_unit or is_first:
            self._per_unit = per_unit
        mixed, pure = (
            max(self._seconds, each) / per_unit for each in (self._answers, _STEPS * self._quickest)
        )
        self.mixed = _adapted(self.mixed, units, mixed, _FEWEST)
        self._fitting = _adapted(self._fitting, units, pure, _FEWEST if self._quickest else _FIRST)
        if not n_answers and not is_first:
            size = _size(units)
            self._rates[size] = min(per_unit, 1.01 * self._rates.get(size, math.inf))
        self.pure = self._paying(self._fitting)

    def _paying(self, share: float) -> float:
        """Return `share`, or a larger budget if doubling it still pays.

        A step has a fixed cost and a cost per unit, so measured sizes predict the gain of the next one.
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
        """Return the units of a row of logits in addition to its token, limited so that a step fits a few."""
        share, fewest = (self.mixed, _FEWEST_ROWS) if n_answers else (self.pure, _FIRST)
        return min(self._row, max(share / fewest - 1, 0.0))

    def seconds_of(self, units: float, n_answers: int) -> float:
        """Estimate the seconds of such a step from the latest ones; 0.0 before the first."""
        return units * self._per_unit + (self._answers if n_answers else 0.0)


def divide(missing: Sequence[PrefillChunk], budget: float, n_max: int) -> list[int]:
    """Return how many tokens each prompt gets of a step of `budget` units and n_max tokens.

    missing: the oldest prompt first. The prompts with the least work finish first, within 7/8 of the step.
    The others get the remaining 1/8, or the whole step if no prompt finishes: half for the oldest one, the
    rest for the one with the least work. A single prompt that exceeds the budget only slightly finishes in
    this step.
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
    given[oldest] = 1  # every sequence must advance
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
    """Give tokens to each prompt in order, or (whole) only to prompts that finish. Return the units given."""
    spent = 0.0
    for i in order:
        n = int(max(min((units - spent) / missing[i].weight, missing[i].n - given[i], n_max), 0))
        if whole and n < missing[i].n:
            break
        given[i] += n
        n_max -= n
        spent += n * missing[i].weight
    return spent
