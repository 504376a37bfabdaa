"""A backend without a model, for the tests of the engine.

It stores token ids in KV blocks and reads them back through the block table, so that a wrong block, position
or order changes the logits. A state slot holds all tokens before a position. The backend refuses a step whose
KV blocks and state belong to different tokens. The logits of a token depend only on the tokens up to it.
Statistics depend on the number of tokens and on the step.
"""

from __future__ import annotations

import numpy as np

from hotset.backends.base import BLOCK_SIZE, Batch, StepResult, StepStats, check_states
from hotset.engine.engine import Engine
from hotset.errors import StepCancelledError

_LONGEST_STATE = 512  # tokens


class FakeBackend:
    name = "fake"

    def __init__(
        self,
        n_vocab: int = 97,
        n_blocks: int = 64,
        max_batch: int = 128,
        peak: float = 3.0,
        n_states: int = 0,
    ) -> None:
        self.n_vocab = n_vocab
        self.n_blocks = n_blocks
        self.n_states = n_states
        self.states: list[tuple[int, ...] | None] = [None] * n_states
        self.max_batch = max_batch
        self.peak = peak
        self.cache = np.full((n_blocks, BLOCK_SIZE), -1, np.int64)
        self.n_tokens_seen = 0
        self.batches: list[int] = []
        self.fail_at_step: int | None = None
        self.n_stats_asked = 0
        self.cancelled = self.closed = False
        self.n_threads: int | None = None
        self.notes: tuple[str, ...] = ()
        self.runtime = None

    def step(self, batch: Batch) -> StepResult:
        if self.fail_at_step == len(self.batches):
            self.fail_at_step = None
            raise RuntimeError("the fake backend fails as requested")
        n = len(batch.tokens)
        assert 0 < n <= self.max_batch
        assert all(
            a.dtype == np.int32 for a in (batch.tokens, batch.positions, batch.sequences, batch.outputs)
        )
        assert (np.diff(batch.outputs) > 0).all()
        if self.n_states:
            check_states(batch, self.n_states)
        if self.cancelled:
            self.cancelled = False
            for slot in batch.saves if self.n_states and batch.saves is not None else ():
                if slot >= 0:
                    self.states[slot] = None  # undefined from now on
            raise StepCancelledError
        self.n_tokens_seen += n
        self.batches.append(n)
        for token, position, sequence in zip(batch.tokens, batch.positions, batch.sequences, strict=True):
            block = batch.block_tables[sequence, position // BLOCK_SIZE]
            assert 0 <= block < self.n_blocks
            self.cache[block, position % BLOCK_SIZE] = token
        if self.n_states:
            self._go_on(batch)
        logits = np.empty((len(batch.outputs), self.n_vocab), np.float32)
        for row, output in enumerate(batch.outputs):
            blocks = batch.block_tables[batch.sequences[output]]
            n_seen = int(batch.positions[output]) + 1
            seen = self.cache[blocks[: -(-n_seen // BLOCK_SIZE)]].reshape(-1)[:n_seen]
            assert (seen >= 0).all()
            logits[row] = fake_logits(seen, self.n_vocab, self.peak)
        return StepResult(logits)

    def _go_on(self, batch: Batch) -> None:
        """Advance the states before the batch to the saved ones."""
        assert batch.states is not None
        assert batch.saves is not None
        tokens: tuple[int, ...] | None = ()
        for t, sequence in enumerate(batch.sequences):
            if t == 0 or batch.sequences[t - 1] != sequence:
                slot = batch.states[sequence]
                tokens = () if slot < 0 else self.states[slot]
                assert tokens is not None, "a state that was never written"
            tokens = (*tokens, int(batch.tokens[t]))
            assert len(tokens) == batch.positions[t] + 1
            if batch.saves[t] >= 0:
                self.states[batch.saves[t]] = tokens
            blocks = batch.block_tables[sequence, : -(-len(tokens) // BLOCK_SIZE)]
            assert tuple(self.cache[blocks].reshape(-1)[: len(tokens)]) == tokens

    # ---- copying in and out (CacheMemory)

    block_nbytes = BLOCK_SIZE * 8

    @property
    def state_nbytes(self) -> int:
        return 8 * (1 + _LONGEST_STATE) if self.n_states else 0

    def read_block(self, block: int) -> bytes:
        return self.cache[block].tobytes()

    def write_block(self, block: int, data: bytes) -> None:
        self.cache[block] = np.frombuffer(data, np.int64)

    def read_state(self, slot: int) -> bytes:
        tokens = self.states[slot] or ()
        values = np.zeros(1 + _LONGEST_STATE, np.int64)
        values[: 1 + len(tokens)] = len(tokens), *tokens
        return values.tobytes()

    def write_state(self, slot: int, data: bytes) -> None:
        n, *tokens = np.frombuffer(data, np.int64).tolist()
        self.states[slot] = tuple(tokens[:n])

    def stats(self) -> StepStats | None:
        """Return counts of two layers of 100 neurons.

        10 fire per token in the first, the step's number in the second.
        """
        self.n_stats_asked += 1
        return fake_stats(self.batches[-1], len(self.batches))

    def cancel(self) -> None:
        self.cancelled = True

    def device_bytes(self) -> list[dict[str, int]]:
        return []

    def close(self) -> None:
        self.closed = True


def fake_stats(n_tokens: int, step: int) -> StepStats:
    active = np.array([10, step]) * n_tokens
    rows = np.array([100, 100])
    seconds = np.array([1e-3, 2e-3])
    return StepStats(
        n_tokens=n_tokens, selected=np.array([20, 100]) * n_tokens, active=active, gate_rows=rows,
        up_rows=active, down_rows=active, predictor=seconds / 10, ffn=seconds, attention=seconds / 2,
        other=5e-4,
    )  # fmt: skip


def fake_logits(tokens: np.ndarray, n_vocab: int, peak: float = 3.0) -> np.ndarray:
    """Return the logits after `tokens`, float32 [n_vocab]: random numbers seeded by all of them."""
    mixed = (np.asarray(tokens, np.uint64) + np.uint64(1)) * (
        np.arange(len(tokens), dtype=np.uint64) * 2654435761 + 97
    )
    seed = int(mixed.sum() % np.uint64(2**63))
    return (np.random.default_rng(seed).standard_normal(n_vocab) * peak).astype(np.float32)


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, n]).integers(0, 97, n).tolist()


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
