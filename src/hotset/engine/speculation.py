"""Speculative decoding: tokens are drafted, verified in one step, and kept if the model draws the same ones.

A step that computes a sequence's next token can also compute the logits after some drafted tokens, for little
more time, because the weights are read once. The sequence's own sampler draws from each row of logits in
order, until a drawn token differs from the drafted one. A token's logits do not depend on the rest of the
step, and each draw uses the next number of the sequence's generator. So tokens and logprobs are bitwise
identical to those without drafts.

`Speculator` decides how many drafted tokens of each sequence a step verifies, from two measurements: how
often drafted tokens are right, and how long steps of each size take on this machine. No decision changes a
text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from hotset.engine.sequence import Sequence

_N_SIZES = 64  # the largest step whose time is learned; larger ones are extrapolated
_PRIOR_STEP = 0.15  # assumed cost of a further token, relative to a step of one token, until it is measured
_LEARNED = 0.15  # weight of the latest step in the moving average for its size
# After _UNCLIPPED steps, changes of the logarithm are limited: something else interrupted a very slow step.
_CLIPPED, _UNCLIPPED = 0.5, 3
_REFRESHED = 64  # steps with drafts before one without drafts is measured again
_PRIOR_WEIGHT = 4.0  # weight of the rate of all sequences, in drafted tokens of one sequence
_KEPT, _KEPT_OF_ALL = 0.95, 0.995  # decay of counts with each drafted token: of one sequence, of all
_PATIENCE, _MOST_PATIENCE = (
    16,
    256,
)  # tokens after which a sequence without drafts tries again: first, at most


class Draft(NamedTuple):
    """A proposed continuation of a sequence.

    classes: per token, a small number for the drafter's confidence. Acceptance is counted per class, so the
    numbers need no fixed meaning.
    """

    tokens: list[int]
    classes: list[int]


class Drafter(Protocol):
    """A source of drafts. No draft changes the text."""

    name: str

    @property
    def seconds_per_token(self) -> float:
        """Return the seconds to draft one token for each sequence of a step; 0.0 if negligible."""

    def draft(self, wanted: Many[tuple[Sequence, int]]) -> list[Draft]:
        """Return a draft for each sequence, of at most the given number of tokens."""

    def forget(self, sequence: Sequence) -> None:
        """Forget a finished sequence."""

    def reset(self) -> None:
        """Forget every sequence."""

    def close(self) -> None:
        """Free its resources; safe to call twice."""


class StepReader(Protocol):
    """A drafter that reads intermediate values of the model. reads: a value of the model's graph."""

    reads: str

    def note_step(self, chunks: Many[tuple[Sequence, int]], rows: np.ndarray) -> None:
        """Record a step before its tokens are drawn: its sequences, and how many tokens of each.

        rows: values of `reads`, float32 [n_tokens, width].
        """


class StepTimes:
    """The seconds of a step of n tokens, learned from decode steps.

    Sizes that were not measured are interpolated, or extrapolated with a slope typical for most machines.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, float]] = {}  # steps of a size, logarithm of its seconds

    def note(self, n: int, seconds: float) -> None:
        """Record a step of n tokens."""
        if n > _N_SIZES or seconds <= 0:
            return
        taken = math.log(seconds)
        visits, known = self._sizes.get(n, (0, taken))
        difference = taken - known
        if visits >= _UNCLIPPED:
            difference = max(-_CLIPPED, min(difference, _CLIPPED))
        self._sizes[n] = visits + 1, known + difference * max(1 / (visits + 1), _LEARNED)

    def seconds(self, n: int) -> float:
        """Return the seconds of a step of n tokens; in an arbitrary unit before the first measurement."""
        known = self._sizes
        if n in known:
            return math.exp(known[n][1])
        below = max((size for size in known if size < n), default=0)
        above = min((size for size in known if size > n), default=0)
        if below and above:
            low, high = math.exp(known[below][1]), math.exp(known[above][1])
            return low + (high - low) * (n - below) / (above - below)
        near = below or above
        return (math.exp(known[near][1]) / _prior(near) if near else 1.0) * _prior(n)

    def has(self, n: int) -> bool:
        """Return whether steps of n tokens were measured, or are too large to be."""
        return n in self._sizes or n > _N_SIZES

    @property
    def measured(self) -> dict[int, float]:
        """Return the seconds by number of tokens, of the measured sizes; from any thread."""
        return {n: math.exp(known) for n, (_, known) in sorted(self._sizes.copy().items())}


def _prior(n: int) -> float:
    return 1.0 + _PRIOR_STEP * (n - 1)


class Acceptance:
    """The share of right drafted tokens by class. prior: of all sequences, for one of them."""

    def __init__(self, prior: Acceptance | None = None) -> None:
        self._prior, self._kept = prior, _KEPT if prior else _KEPT_OF_ALL
        self._counts: dict[int, tuple[float, float]] = {}  # drafted, accepted

    def rate(self, of_class: int) -> float:
        """Estimate the share of a class's tokens that will be right."""
        before = 0.5 if self._prior is None else self._prior.rate(of_class)
        drafted, accepted = self._counts.get(of_class, (0.0, 0.0))
        return (accepted + _PRIOR_WEIGHT * before) / (drafted + _PRIOR_WEIGHT)

    def note(self, of_class: int, is_right: bool) -> None:
        """Record a verified token that follows only right ones."""
        drafted, accepted = self._counts.get(of_class, (0.0, 0.0))
        self._counts[of_class] = drafted * self._kept + 1, accepted * self._kept + is_right
        if self._prior is not None:
            self._prior.note(of_class, is_right)


@dataclass(slots=True)
class _Drafted:
    """A sequence that gets drafts.

    classes: of its draft in flight. overall: its acceptance over all classes. waited: tokens since one of its
    drafts was verified; patience: after this many, a draft is tried even if it should not pay.
    """

    acceptance: Acceptance
    overall: Acceptance
    classes: list[int] = field(default_factory=list)
    waited: int = 0
    patience: int = _PATIENCE


class Speculator:
    """Drafts for sequences, as far as they pay by the results of earlier drafts.

    n_most: the longest draft in tokens. reader: the drafter, if it reads the model's steps.
    """

    def __init__(self, drafter: Drafter, n_most: int, reader: StepReader | None = None) -> None:
        self.drafter, self.n_most, self.reader = drafter, n_most, reader
        self.step_times = StepTimes()
        self._all, self._overall = Acceptance(), Acceptance()
        self._sequences: dict[Sequence, _Drafted] = {}
        self._n_since_plain = 0  # steps with drafts since the latest one without

    def reset(self) -> None:
        """Forget every sequence; keep the measurements."""
        self._sequences.clear()
        self.drafter.reset()

    def forget(self, sequence: Sequence) -> None:
        """Forget a finished sequence."""
        self._sequences.pop(sequence, None)
        self.drafter.forget(sequence)

    def close(self) -> None:
        self._sequences.clear()
        self.drafter.close()

    def draft(self, wanted: Many[tuple[Sequence, int]], n_tokens: int) -> None:
        """Set the drafts of sequences for a step that has n_tokens tokens without them.

        wanted: decoding sequences, and the longest allowed draft of each.
        """
        of_sequences = []
        for sequence, n in wanted:
            own = self._sequences.get(sequence)
            if own is None:
                own = _Drafted(Acceptance(self._all), Acceptance(self._overall))
                self._sequences[sequence] = own
            own.classes = []
            of_sequences.append((sequence, own, min(n, self.n_most)))
        most = self._worth_drafting([own for _, own, _ in of_sequences], n_tokens)
        asked = []
        for sequence, own, n in of_sequences:
            n = min(n, most if most else self._probed(own))
            if n:
                asked.append((sequence, own, n))
            else:
                own.waited += 1
        if not asked or self._is_measured_plain(n_tokens, is_plain=n_tokens == len(wanted)):
            return
        drafts = self.drafter.draft([(sequence, n) for sequence, _, n in asked])
        self._choose([(*each[:2], draft) for each, draft in zip(asked, drafts, strict=True)], n_tokens)

    def _is_measured_plain(self, n_tokens: int, *, is_plain: bool) -> bool:
        """Return whether this step runs without drafts to measure its time.

        is_plain: without drafts the step has only decode tokens.
        """
        wanted = is_plain and (self._n_since_plain >= _REFRESHED or not self.step_times.has(n_tokens))
        self._n_since_plain = 0 if wanted else self._n_since_plain + 1
        return wanted

    def _probed(self, own: _Drafted) -> int:
        return 1 if own.waited >= own.patience else 0

    def _worth_drafting(self, sequences: list[_Drafted], n_tokens: int) -> int:
        """Return how many tokens to draft per sequence, from their acceptance and the cost of drafting."""
        per_token = self.drafter.seconds_per_token
        if not per_token or not sequences:
            return self.n_most
        rates = [own.overall.rate(0) for own in sequences]
        best, best_rate = 0, len(rates) / self.step_times.seconds(n_tokens)
        for n in range(1, self.n_most + 1):
            tokens = sum((1 - rate ** (n + 1)) / (1 - rate) if rate < 1 else n + 1 for rate in rates)
            seconds = self.step_times.seconds(n_tokens + n * len(rates)) + n * per_token
            if tokens / seconds > best_rate:
                best, best_rate = n, tokens / seconds
        return best

    def _choose(self, drafts: list[tuple[Sequence, _Drafted, Draft]], n_tokens: int) -> None:
        """Keep the drafted tokens that maximise the step's expected tokens per second.

        A token counts with the probability that it and all tokens before it are right. The likeliest are
        chosen first, so none is chosen before the one that it follows.
        """
        chances = []
        for i, (_, own, draft) in enumerate(drafts):
            chance = 1.0
            for of_class in draft.classes:
                chance *= own.acceptance.rate(of_class)
                chances.append((chance, i))
        chances.sort(key=lambda each: (-each[0], each[1]))
        tokens = float(len(drafts))
        best, best_rate = 0, tokens / self.step_times.seconds(n_tokens)
        for n, (chance, _) in enumerate(chances, 1):
            tokens += chance
            rate = tokens / self.step_times.seconds(n_tokens + n)
            if rate > best_rate:
                best, best_rate = n, rate
        kept = [0] * len(drafts)
        for _, i in chances[:best]:
            kept[i] += 1
        for (sequence, own, draft), n in zip(drafts, kept, strict=True):
            n = n or min(self._probed(own), len(draft.tokens))
            own.waited = 0 if n else own.waited + bool(draft.tokens)
            sequence.draft, own.classes = draft.tokens[:n], draft.classes[:n]

    def note_verified(self, sequence: Sequence, n_verified: int, n_accepted: int) -> None:
        """Record that n_verified tokens of the draft in flight were compared, and n_accepted were right."""
        own = self._sequences.get(sequence)
        if own is None or not own.classes:
            return
        for i, of_class in enumerate(own.classes[:n_verified]):
            own.acceptance.note(of_class, i < n_accepted)
            own.overall.note(0, i < n_accepted)
        if n_verified:
            failed = n_accepted == 0
            own.patience = min(2 * own.patience, _MOST_PATIENCE) if failed else _PATIENCE
        own.classes = []
