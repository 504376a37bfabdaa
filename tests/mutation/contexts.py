"""A pytest plugin: notes which test ran each line, and the duration and outcome of each test.

A context of the coverage file is `tests/.../test_x.py::Class::test_y`, without parameters. Lines run by
fixtures have the test file as their context, since a fixture of a module runs before one test and serves all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

_seconds: dict[str, float] = {}
_failed: set[str] = set()


def _name(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def _switch(context: str) -> None:
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.switch_context(context)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    _switch(_name(item).split("::")[0])
    yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _switch(_name(item))
    yield
    _switch(_name(item).split("::")[0])


def pytest_runtest_logreport(report: Any) -> None:
    name = report.nodeid.split("[")[0]
    _seconds[name] = _seconds.get(name, 0.0) + report.duration
    if report.failed:
        _failed.add(name)


def pytest_sessionfinish() -> None:
    Path(os.environ["HOTSET_MUTANTS_TIMES"]).write_text(
        json.dumps({"seconds": _seconds, "failed": sorted(_failed)})
    )
