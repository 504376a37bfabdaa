"""The measured time of steps with several tokens."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backend import FakeBackend

from hotset.engine.step_sizes import measure_steps
from hotset.errors import InvalidRequestError


@pytest.mark.parametrize("n_states", [0, 2])
@pytest.mark.parametrize("depth", [0, 100])
def test_the_median_of_steps_that_take_turns(
    monkeypatch: pytest.MonkeyPatch, n_states: int, depth: int
) -> None:
    """Check steps of 10 ms and 1 ms per token, except for one that is delayed."""
    now = [0.0]
    monkeypatch.setattr("hotset.engine.step_sizes.time.perf_counter", lambda: now[0])
    first: list[int] = []

    class Clocked(FakeBackend):
        def step(self, batch: Any) -> Any:
            first.append(int(batch.positions[0]))
            assert len(batch.outputs) in (0, len(batch.tokens))
            now[0] += (10 + len(batch.tokens) + 500 * (len(self.batches) == 9)) / 1e3
            return super().step(batch)

    backend = Clocked(n_blocks=3, max_batch=40, n_states=n_states)
    found = measure_steps(backend, [1, 4, 8], depth=depth, repetitions=3)
    assert [time.n_tokens for time in found] == [1, 4, 8]
    assert [time.ms for time in found] == pytest.approx([11, 14, 18])
    prefill = [40, 40, 20] if depth else []
    assert backend.batches == prefill + [1, 4, 8] * 4
    assert first == [0, 40, 80][: len(prefill)] + [depth] * 12


@pytest.mark.parametrize(("sizes", "depth"), [([1, 41], 0), ([0], 0), ([1, 30], 170)])
def test_a_size_that_does_not_fit_is_an_error(sizes: list[int], depth: int) -> None:
    with pytest.raises(InvalidRequestError, match="a step must have 1 to"):
        measure_steps(FakeBackend(n_blocks=3, max_batch=40), sizes, depth=depth)
