"""Speculative decoding: tokens are drafted, verified in one step, and kept where the model draws the same.

A step that computes a sequence's next token can compute its logits after some drafted tokens too, for little
more time: the weights are read once. From each row of logits the sequence's own sampler draws, in order,
until a drawn token is not the drafted one. A token's logits do not depend on what else is in a
step, and each draw takes the next number of the sequence's generator, so tokens and logprobs are bitwise
those without drafts.

`Speculator` decides how many tokens of whose drafts a step verifies, by what was measured: how often drafted
tokens were right, and how long steps of so many tokens take on this machine. Nothing that it decides changes
a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from hotset.engine.sequence import Sequence

_N_SIZES = 64  # up to which the time of steps is learned; larger ones are extrapolated
_PRIOR_STEP = 0.15  # of a step of one token, that a further one takes, until it was measured
_LEARNED = 0.15  # of the difference that a step makes to what is known of steps of its size
# The largest difference that counts, as a logarithm, after so many steps: something interrupted the step.
_CLIPPED, _UNCLIPPED = 0.5, 3
_REFRESHED = 64  # steps with drafts, after which one without is measured again
_PRIOR_WEIGHT = 4.0  # drafted tokens, as many as what is known of all sequences counts for one of them
_KEPT, _KEPT_OF_ALL = 0.95, 0.995  # of what was counted before, with each drafted token
_PATIENCE, _MOST_PATIENCE = 16, 256  # tokens that a sequence without drafts waits for another attempt


class Draft(NamedTuple):
    """tokens: what may follow a sequence. classes: of each, how sure the drafter is: any small number, about
    whose meaning the counts of acceptance decide."""

    tokens: list[int]
    classes: list[int]


class Drafter(Protocol):
    """Drafts what may follow sequences. Whatever it drafts, the text is the same."""

    name: str

    @property
    def seconds_per_token(self) -> float:
        """That drafting one token for each sequence of a step takes; 0.0 where that is next to nothing."""

    def draft(self, wanted: Many[tuple[Sequence, int]]) -> list[Draft]:
        """For each sequence at most so many tokens."""

    def forget(self, sequence: Sequence) -> None:
        """A sequence that came to its end."""

    def reset(self) -> None:
        """Forgets every sequence."""

    def close(self) -> None:
        """Frees what it has; safe to call twice."""


class StepReader(Protocol):
    """A drafter that reads what is inside the model. reads: a value of the model's graph."""

    reads: str

    def note_step(self, chunks: Many[tuple[Sequence, int]], rows: np.ndarray) -> None:
        """Takes in a step before its tokens are drawn: its sequences, and so many tokens of each. rows: of
        `reads`, float32 [n_tokens, width]."""


class StepTimes:
    """Seconds of a step of n tokens, learned from the steps of answers. A size that there was not yet is
    between those that there were, or beyond them as much longer as most machines take."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, float]] = {}  # steps of a size, logarithm of its seconds

    def note(self, n: int, seconds: float) -> None:
        """Takes in a step of n tokens."""
        if n > _N_SIZES or seconds <= 0:
            return
        taken = math.log(seconds)
        visits, known = self._sizes.get(n, (0, taken))
        difference = taken - known
        if visits >= _UNCLIPPED:
            difference = max(-_CLIPPED, min(difference, _CLIPPED))
        self._sizes[n] = visits + 1, known + difference * max(1 / (visits + 1), _LEARNED)

    def seconds(self, n: int) -> float:
        """That a step of n tokens takes; in any unit before there was one."""
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
        """Whether there were steps of n tokens, or will be none that is noted."""
        return n in self._sizes or n > _N_SIZES

    @property
    def measured(self) -> dict[int, float]:
        """Seconds by the number of tokens, of the sizes that there were; from any thread."""
        return {n: math.exp(known) for n, (_, known) in sorted(self._sizes.copy().items())}


def _prior(n: int) -> float:
    return 1.0 + _PRIOR_STEP * (n - 1)


class Acceptance:
    """How often drafted tokens were right, by their class. prior: of all sequences, for one of them."""

    def __init__(self, prior: Acceptance | None = None) -> None:
        self._prior, self._kept = prior, _KEPT if prior else _KEPT_OF_ALL
        self._counts: dict[int, tuple[float, float]] = {}  # drafted, accepted

    def rate(self, of_class: int) -> float:
        """The share of tokens of a class that will be right."""
        before = 0.5 if self._prior is None else self._prior.rate(of_class)
        drafted, accepted = self._counts.get(of_class, (0.0, 0.0))
        return (accepted + _PRIOR_WEIGHT * before) / (drafted + _PRIOR_WEIGHT)

    def note(self, of_class: int, is_right: bool) -> None:
        """Takes in a token that was verified behind right ones."""
        drafted, accepted = self._counts.get(of_class, (0.0, 0.0))
        self._counts[of_class] = drafted * self._kept + 1, accepted * self._kept + is_right
        if self._prior is not None:
            self._prior.note(of_class, is_right)


@dataclass(slots=True)
class _Drafting:
    """A sequence that gets drafts. classes: of its draft in flight. overall: its acceptance, of any class.
    waited: tokens since one of its drafts was verified; patience: after which another is, though it should
    not pay."""

    acceptance: Acceptance
    overall: Acceptance
    classes: list[int] = field(default_factory=list)
    waited: int = 0
    patience: int = _PATIENCE


class Speculator:
    """Drafts for sequences, as far as it pays, and learns from what became of them.

    n_most: tokens of a draft at most. reader: the drafter, where it reads the model's steps.
    """

    def __init__(self, drafter: Drafter, n_most: int, reader: StepReader | None = None) -> None:
        self.drafter, self.n_most, self.reader = drafter, n_most, reader
        self.step_times = StepTimes()
        self._all, self._overall = Acceptance(), Acceptance()
        self._sequences: dict[Sequence, _Drafting] = {}
        self._n_since_plain = 0  # steps with drafts

    def reset(self) -> None:
        """Forgets every sequence; what was learned stays."""
        self._sequences.clear()
        self.drafter.reset()

    def forget(self, sequence: Sequence) -> None:
        """A sequence that came to its end."""
        self._sequences.pop(sequence, None)
        self.drafter.forget(sequence)

    def close(self) -> None:
        self._sequences.clear()
        self.drafter.close()

    def draft(self, wanted: Many[tuple[Sequence, int]], n_tokens: int) -> None:
        """Sets the drafts of sequences, for a step that has n_tokens without them.

        wanted: sequences that are to get a token, and how many may be drafted for each at most.
        """
        of_sequences = []
        for sequence, n in wanted:
            own = self._sequences.get(sequence)
            if own is None:
                own = _Drafting(Acceptance(self._all), Acceptance(self._overall))
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
        """Whether this step goes without drafts, to learn what that takes. is_plain: then it has no other
        tokens."""
        wanted = is_plain and (self._n_since_plain >= _REFRESHED or not self.step_times.has(n_tokens))
        self._n_since_plain = 0 if wanted else self._n_since_plain + 1
        return wanted

    def _probed(self, own: _Drafting) -> int:
        return 1 if own.waited >= own.patience else 0

    def _worth_drafting(self, sequences: list[_Drafting], n_tokens: int) -> int:
        """How many tokens to draft for each sequence, by their acceptance so far and what drafting takes."""
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

    def _choose(self, drafts: list[tuple[Sequence, _Drafting, Draft]], n_tokens: int) -> None:
        """Keeps those drafted tokens with which the step gives the most tokens a second.

        A token counts with the chance that it and all before it are right; the likeliest come first, and so
        none before the one that it follows.
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
        """Of the draft in flight n_verified tokens were compared with what was drawn, and the first
        n_accepted of them were right."""
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
