"""The guards of conftest.py: a test cannot draw without a seed."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys

import numpy as np
import pytest
from seeded import UnseededDrawError

from hotset.engine.sampler import Sampler, SamplingParams


def test_a_sampler_needs_a_seed_or_no_temperature() -> None:
    with pytest.raises(UnseededDrawError, match="without a seed"):
        Sampler(SamplingParams(), 10)
    Sampler(SamplingParams(seed=0), 10)
    Sampler(SamplingParams(temperature=0), 10)


def test_so_does_one_in_a_process_of_its_own() -> None:
    code = "from hotset.engine.sampler import *; Sampler(SamplingParams(seed=1), 9); print(1, flush=True)"
    code += "; Sampler(SamplingParams(), 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "1\n")
    assert "UnseededDrawError: a test samples without a seed" in done.stderr


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.default_rng(), lambda: np.random.default_rng(None),
        lambda: np.random.Generator(np.random.Philox()), lambda: np.random.SeedSequence(),
        lambda: random.Random(), lambda: secrets.randbits(64), lambda: os.urandom(8),
    ],
)  # fmt: skip
def test_a_generator_needs_a_seed(draw: object) -> None:
    with pytest.raises(UnseededDrawError):
        draw()  # type: ignore[operator]


def test_seeded_generators_work_unchanged() -> None:
    assert np.random.default_rng(3).integers(1 << 60) == np.random.default_rng(3).integers(1 << 60)
    philox = np.random.Philox
    assert np.random.Generator(philox(1)).random() == np.random.Generator(philox(seed=1)).random()
    assert len(np.random.SeedSequence(5).spawn(2)) == 2
    assert random.Random(5).random() == random.Random(5).random()


FIRST: list[tuple[float, ...]] = []


@pytest.mark.parametrize("turn", [1, 2])
def test_the_generators_of_the_process_start_every_test_alike(turn: int) -> None:
    torch = pytest.importorskip("torch")
    drawn = (random.random(), float(np.random.random()), float(torch.rand(())))
    FIRST.append(drawn)
    assert set(FIRST) == {drawn}
