"""Cases of a parametrized test, of which `make test` runs a few and `make test-all` every one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest


def quick_if(quick: Callable[..., bool], *axes: Iterable[Any]) -> list[Any]:
    """Every combination of the values of the axes; those that are not `quick` are marked `slow`."""
    return [
        pytest.param(*values, marks=() if quick(*values) else pytest.mark.slow)
        for values in itertools.product(*axes)
    ]


def quick_are(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All values; those that are not among `quick` are marked `slow`."""
    return quick_if(lambda value: value in quick, values)
