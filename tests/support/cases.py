"""Marks parametrized cases as slow: `make test` runs a few, `make test-all` runs all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest


def quick_if(quick: Callable[..., bool], *axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the axes' values; those that are not `quick` are marked `slow`."""
    return [
        pytest.param(*values, marks=() if quick(*values) else pytest.mark.slow)
        for values in itertools.product(*axes)
    ]


def quick_are(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return all values; those that are not among `quick` are marked `slow`."""
    return quick_if(lambda value: value in quick, values)
