"""The choice of who computes the experts missing in a device's cache. It depends only on measured rates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hotset.offload.misses import (
    STREAM_BYTES,
    MissRates,
    expected_seconds,
    fetched_of,
    n_fetched,
    n_spare,
    tokens_to_stream,
)

RATES = MissRates(cpu=45e9, cpu_beside=28e9, many=250e9, link=25e9, link_beside=22e9)
SIZE = 2_600_000  # bytes of an expert


def simulated(rates: MissRates, cpu: float, link: float) -> float:
    """Simulate two tasks that slow each other, in small steps of time."""
    seconds, step = 0.0, (cpu + link) / 20_000
    while cpu > 0 or link > 0:
        both = cpu > 0 and link > 0
        cpu -= step * (rates.cpu_beside / rates.cpu if both else 1.0)
        link -= step * (rates.link_beside / rates.link if both else 1.0)
        seconds += step
    return seconds


@pytest.mark.parametrize(("cpu", "link"), [(1.0, 2.0), (2.0, 1.0), (1.0, 0.0), (0.0, 1.0), (3.0, 1.6)])
def test_two_that_share_a_memory_end_when_a_simulation_says(cpu: float, link: float) -> None:
    assert RATES.together(cpu, link) == pytest.approx(simulated(RATES, cpu, link), rel=1e-3)


def test_the_share_is_the_quickest() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        n_tokens = np.sort(rng.integers(1, 60, rng.integers(0, 12)))[::-1]
        ahead = float(rng.choice([0.0, 3e-4]))
        best, seconds = n_fetched(RATES, n_tokens, SIZE, ahead=ahead)
        of_cpu = [max(SIZE / RATES.cpu, n * SIZE / RATES.many) for n in n_tokens]
        all_seconds = [
            simulated(RATES, sum(of_cpu[k:]), max(k * SIZE / RATES.link - ahead, 0.0))
            if len(n_tokens)
            else 0.0
            for k in range(len(n_tokens) + 1)
        ]
        assert seconds == pytest.approx(min(all_seconds), rel=1e-3)
        assert all_seconds[best] == pytest.approx(min(all_seconds), rel=1e-3)


def test_few_tokens_share_by_the_reading_rates() -> None:
    shares = fetched_of(RATES, 8, SIZE)
    assert shares == [0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert fetched_of(RATES, 8, SIZE, most=2) == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert fetched_of(replace(RATES, link=0.0), 8, SIZE) == [0] * 9
    slow = replace(RATES, link=1e9, link_beside=1e9)
    assert fetched_of(slow, 8, SIZE) == [0] * 9
    quick = replace(RATES, link=800e9, link_beside=700e9)  # as with shared memory
    assert min(k / n for n, k in enumerate(fetched_of(quick, 8, SIZE)) if n) > 0.8
    # With a head start the link gets more experts.
    assert sum(fetched_of(RATES, 8, SIZE, ahead=SIZE / RATES.link)) > sum(shares)


def test_prompts_stream_where_arithmetic_is_the_longer() -> None:
    bound = tokens_to_stream(RATES)
    assert bound == 10
    assert RATES.cpu_seconds(np.array([bound]), SIZE)[0] >= SIZE / RATES.link
    assert RATES.cpu_seconds(np.array([bound - 1]), SIZE)[0] < SIZE / RATES.link
    assert tokens_to_stream(replace(RATES, link=60e9)) == 1
    assert tokens_to_stream(replace(RATES, link=0.0)) is None
    few, _ = n_fetched(RATES, np.full(20, 1), SIZE)
    many, _ = n_fetched(RATES, np.full(20, 60), SIZE)
    assert few < 10 < many


def test_expected_times_are_between_integer_cases() -> None:
    low, high = (n_fetched(RATES, np.ones(n), SIZE) for n in (2, 3))
    seconds, fetched = expected_seconds(RATES, 2.5, SIZE)
    assert seconds == pytest.approx((low[1] + high[1]) / 2)
    assert fetched == (low[0] + high[0]) / 2
    assert expected_seconds(RATES, 0.0, SIZE) == (0.0, 0.0)


def test_spare_slots_hold_a_tokens_share_and_two_halves() -> None:
    assert n_spare(RATES, SIZE, 8) == 2 * (STREAM_BYTES // SIZE)
    assert n_spare(RATES, 90 << 20, 2) == 2
    assert n_spare(RATES, 90 << 20, 8) == 3
    assert n_spare(None, SIZE, 8) == n_spare(replace(RATES, link=0.0), SIZE, 8) == 0
