"""Drafts by a model: a smaller one with the same vocabulary, or the model itself in a sparser mode.

Draft tokens are sampled with the sequence's own random numbers. So a similar model drafts sampled tokens as
well as greedy ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from hotset.backends.base import BLOCK_SIZE, Backend, Batch, StepResult
from hotset.engine.images import N_AXES
from hotset.engine.kv_cache import BlockPool
from hotset.engine.sampler import Sampler, row_logprobs
from hotset.engine.sequence import Sequence
from hotset.engine.speculation import Draft
from hotset.errors import HotsetError, StepCancelledError

_CATCH_UP = 128  # prompt tokens that a call computes at most, so that it delays decoding sequences little
_CLASSES = 10  # classes of confidence: tenths of the probability that the draft model gives a token
_LEARNED = 0.1  # weight of the latest step in the moving average of step times


class OfModel:
    """The common part of drafters that use a model. close: frees the model."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close
        self._seconds = 0.0

    @property
    def seconds_per_token(self) -> float:
        return self._seconds or 1e-6  # small before the first step, so that drafting is tried

    def close(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()

    def _note_step(self, seconds: float) -> None:
        """Update the average with a step that drafted one token per sequence."""
        self._seconds += (seconds - self._seconds) * (_LEARNED if self._seconds else 1.0)


def draw(draft: Draft, sampler: Sampler, row: np.ndarray, largest: np.ndarray | None = None) -> bool:
    """Append the next token to a draft; return False if none can be drawn or a logit is NaN.

    row: float32 [n_vocab]; largest: this row's entry of StepResult.largest.
    """
    try:
        token = sampler.sample(row, largest)
    except HotsetError:
        return False
    [(log_total, _)] = row_logprobs(row[None], 0)
    chance = math.exp(float(row[token]) - log_total)
    if math.isnan(chance) or row[token] == -math.inf:  # a damaged model, or a token outside its vocabulary
        return False
    sampler.accept(token)
    draft.tokens.append(token)
    draft.classes.append(int(_CLASSES * chance))
    return True


@dataclass(slots=True)
class _DraftState:
    """A sequence's state in the draft model.

    tokens: computed tokens, cached in `blocks`. n_checked: how many of them are known to match the sequence.
    """

    slot: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    n_checked: int = 0


@dataclass(slots=True)
class _Round:
    """A sequence of one call: the tokens still to compute, and the tokens drafted for it."""

    sequence: Sequence
    own: _DraftState
    n: int
    missing: list[int]
    sampler: Sampler
    draft: Draft


class ModelDrafter(OfModel):
    """A drafter that uses a model with its own KV cache.

    It follows each sequence: before it drafts, it computes the sequence's new tokens, and overwrites the
    draft tokens that were rejected.

    backend: of the draft model, used only here; without recurrent states. n_ctx: tokens per sequence.
    max_sequences: sequences at a time. n_vocab: tokens that both models share, and the vocabulary of the
    target model. close: frees the draft model.
    """

    name = "draft"

    def __init__(
        self,
        backend: Backend,
        n_ctx: int,
        max_sequences: int,
        n_vocab: tuple[int, int],
        close: Callable[[], None],
    ) -> None:
        super().__init__(close)
        self._backend = backend
        self._n_ctx, self._n_vocab = n_ctx, n_vocab[0]
        self._row = np.full(n_vocab[1], -math.inf, np.float32)
        self._table = np.full((max_sequences, -(-n_ctx // BLOCK_SIZE)), -1, np.int32)
        self.reset()

    @property
    def n_blocks(self) -> int:
        """Return the number of blocks in its cache."""
        return self._pool.n_blocks

    @property
    def n_blocks_free(self) -> int:
        """Return the number of blocks that no sequence uses."""
        return self._pool.n_available

    def reset(self) -> None:
        self._pool = BlockPool(self._backend.n_blocks)
        self._slots = list(range(len(self._table)))
        self._followed: dict[Sequence, _DraftState] = {}

    def forget(self, sequence: Sequence) -> None:
        own = self._followed.pop(sequence, None)
        if own is not None:
            self._pool.release(own.blocks)
            self._slots.append(own.slot)

    def draft(self, wanted: Many[tuple[Sequence, int]]) -> list[Draft]:
        rounds = [self._begin(sequence, n) for sequence, n in wanted]
        try:
            left = _CATCH_UP
            active = []
            for each in rounds:
                if each is None:
                    continue
                if len(each.missing) > left:  # a long prompt: compute a part now, draft in a later call
                    if left:
                        self._step([(each, left)], draws=False)
                    left = 0
                    continue
                left -= len(each.missing)
                active.append(each)
            while active:
                self._step([(each, len(each.missing)) for each in active], draws=True)
                active = [each for each in active if len(each.draft.tokens) < each.n]
        except StepCancelledError:
            pass  # keep the tokens drafted so far
        return [Draft([], []) if each is None else each.draft for each in rounds]

    def _begin(self, sequence: Sequence, n: int) -> _Round | None:
        """Return the work to do for a sequence; None if it does not fit in the cache."""
        own = self._followed.get(sequence)
        if own is None:
            if not self._slots:
                return None
            own = self._followed[sequence] = _DraftState(self._slots.pop())
        same = own.n_checked
        while same < min(len(own.tokens), len(sequence.tokens)) and own.tokens[same] == sequence.tokens[same]:
            same += 1
        same = min(same, len(sequence.tokens) - 1)  # recompute the last token: its logits are needed
        del own.tokens[same:]
        own.n_checked = same
        n = min(n, self._n_ctx - len(sequence.tokens))
        if n < 1 or not self._grow(own, len(sequence.tokens) + n - 1):
            return None
        assert sequence.sampler is not None
        missing = sequence.tokens[same:]
        if max(missing) >= self._n_vocab:
            return None
        return _Round(sequence, own, n, missing, sequence.sampler.clone(), Draft([], []))

    def _grow(self, own: _DraftState, n: int) -> bool:
        """Allocate blocks for n tokens; return False if there are not enough."""
        while len(own.blocks) * BLOCK_SIZE < n:
            block = self._pool.allocate()
            if block is None:
                return False
            self._table[own.slot, len(own.blocks)] = block
            own.blocks.append(block)
        self._table[own.slot, len(own.blocks) :] = -1
        return True

    def _step(self, parts: list[tuple[_Round, int]], *, draws: bool) -> None:
        """Compute n tokens of each part and, if `draws`, draft the next token of each."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        outputs: list[int] = []
        for each, n in parts:
            start = len(each.own.tokens)
            tokens += each.missing[:n]
            positions += range(start, start + n)
            slots += [each.own.slot] * n
            outputs += [len(tokens) - 1] if draws else []
        ids, at, rows = (np.array(values, np.int32) for values in (tokens, positions, slots))
        np.maximum(ids, 0, out=ids)  # a draft model sees no images
        begun = time.perf_counter()
        result = self._backend.step(Batch(ids, at, rows, self._table, np.array(outputs, np.int32)))
        if draws and len(tokens) == len(parts):
            self._note_step(time.perf_counter() - begun)
        for i, (each, n) in enumerate(parts):
            each.own.tokens += each.missing[:n]
            del each.missing[:n]
            if not draws:
                continue
            self._row[: self._n_vocab] = result.logits[i, : self._n_vocab]
            if draw(each.draft, each.sampler, self._row):
                each.missing = [each.draft.tokens[-1]]
            else:
                each.n = len(each.draft.tokens)


class SelfDrafter(OfModel):
    """A drafter that runs the model itself in a sparser mode, on the model's own KV cache.

    Its steps write keys and values of unverified tokens, which the verifying step overwrites. So prompts are
    not computed twice, and nothing has to be undone.

    backend: in the sparser mode, on the cache of the verifying backend. thresholded: whether its graph has
    thresholds. close: frees the memory of the mode.
    """

    name = "self"

    def __init__(self, backend: Backend, thresholded: bool, close: Callable[[], None]) -> None:
        super().__init__(close)
        self._backend = backend
        self._thresholded = thresholded

    def reset(self) -> None:
        """Do nothing: this drafter keeps no state of sequences."""

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: this drafter keeps no state of sequences."""

    def draft(self, wanted: Many[tuple[Sequence, int]]) -> list[Draft]:
        drafts = [Draft([], []) for _ in wanted]
        # A draft allocates no block: it ends where the sequence's last block ends.
        room = [min(n, len(one.blocks) * BLOCK_SIZE - len(one.tokens) + 1) for one, n in wanted]
        table = np.full((len(wanted), max(len(sequence.blocks) for sequence, _ in wanted)), -1, np.int32)
        for row, (sequence, _) in zip(table, wanted, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks
        samplers = [sequence.sampler.clone() for sequence, _ in wanted if sequence.sampler is not None]
        active = [i for i, n in enumerate(room) if n > 0]
        try:
            while active:
                result = self._step(active, wanted, drafts, table)
                for at, i in enumerate(active):
                    largest = None if result.largest is None else result.largest[at]
                    if not draw(drafts[i], samplers[i], result.logits[at], largest):
                        room[i] = 0
                active = [i for i in active if len(drafts[i].tokens) < room[i]]
        except StepCancelledError:
            pass  # keep the tokens drafted so far
        return drafts

    def _step(
        self, active: list[int], wanted: Many[tuple[Sequence, int]], drafts: list[Draft], table: np.ndarray
    ) -> StepResult:
        """Return the logits after the latest token of each active sequence."""
        tokens = [(drafts[i].tokens or wanted[i][0].tokens)[-1] for i in active]
        positions = [len(wanted[i][0].tokens) - 1 + len(drafts[i].tokens) for i in active]
        ids, at, rows = (np.array(values, np.int32) for values in (tokens, positions, active))
        begun = time.perf_counter()
        result = self._backend.step(
            Batch(
                ids, at, rows, table, np.arange(len(active), dtype=np.int32),
                thresholded=np.ones(len(active), np.bool_) if self._thresholded else None,
                rotary=_rotary([wanted[i][0] for i in active], at),
            )
        )  # fmt: skip
        self._note_step(time.perf_counter() - begun)
        return result


def _rotary(sequences: Many[Sequence], positions: np.ndarray) -> np.ndarray | None:
    """Return the rotary positions of one token of each sequence, as Batch.rotary."""
    if not any(one.images is not None and one.images.has_rotary for one in sequences):
        return None
    found = [
        np.full((1, N_AXES), at, np.int32) if one.images is None else one.images.rotary(at, 1)
        for one, at in zip(sequences, positions.tolist(), strict=True)
    ]
    return np.concatenate(found)
