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


def needs_backends(*names: str) -> None:
    """Skip a test of device backends that are not in the registry, as in tests/repository/test_plugins.py."""
    if not names:
        return
    from hotset.backends.registry import DEVICE_BACKENDS

    if missing := sorted({*names} - {*DEVICE_BACKENDS}):
        pytest.skip(f"needs the backend {' and '.join(missing)}")
