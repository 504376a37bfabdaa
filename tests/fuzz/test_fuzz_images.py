"""Odd image files in requests; `tests/fuzz/fuzz_images.py` makes as many as time allows."""

from __future__ import annotations

import pytest

pytest.importorskip("tiny_vision")
from fuzz import fuzz_images


@pytest.mark.parametrize("n", [64, pytest.param(2000, marks=pytest.mark.slow)])
def test_odd_images_give_pixels_or_one_message(n: int) -> None:
    problems: list[str] = []
    found = fuzz_images.attack(1, lambda number: number < n, lambda _, __, what: problems.append(what))
    assert found == (n, 0), problems
