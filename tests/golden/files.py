"""Writes, reads and compares the JSON files in tests/data/golden.

A file names the platform on which it was written, and on another platform its test is skipped, because the
last bits of logits may differ there (tests/backends/test_bits.py). If the content depends on a library, the
file also has that library's version. Numbers with a fraction are stored with six digits and compared with a
tolerance, because NumPy's logarithms and exponentials differ in their last bits between processors.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import pytest
from paths import DATA

FOLDER = DATA / "golden"
PLATFORM = f"{platform.system()}-{platform.machine()}-{'-'.join(platform.libc_ver())}"
_WIDTH, _IN_LINE = 110, 8  # characters of a line; short values in a line of a long list


def stored(name: str, libraries: Sequence[str] = ()) -> Any:
    """Return the content of a file, or skip the test if the platform or a library differs."""
    path = FOLDER / f"{name}.json"
    assert path.is_file(), f"{path.name} is missing: python tests/golden/test_golden.py --write {name}"
    content = json.loads(path.read_text("utf-8"))
    if content["made_with"] != (here := _made_with(libraries)):
        pytest.skip(f"golden JSON was made with {content['made_with']}; here is {here}")
    return content["golden"]


def write(name: str, found: Any, libraries: Sequence[str] = ()) -> None:
    text = _dumped({"made_with": _made_with(libraries), "golden": rounded(found)})
    (FOLDER / f"{name}.json").write_text(text + "\n", "utf-8")


def _made_with(libraries: Sequence[str]) -> dict[str, str]:
    return {"platform": PLATFORM} | {name: version(name) for name in libraries}


def rounded(value: Any) -> Any:
    """Return the value with numbers that have a fraction rounded to six digits."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def near(found: Any, stored: Any) -> Any:
    """Return `found`, with stored numbers in place of numbers that are close to them."""
    if isinstance(found, dict) and isinstance(stored, dict):
        return {key: near(one, stored.get(key)) for key, one in found.items()}
    if isinstance(found, list | tuple) and isinstance(stored, list) and len(found) == len(stored):
        return [near(one, other) for one, other in zip(found, stored, strict=True)]
    numbers = isinstance(found, float) and isinstance(stored, float)
    return stored if numbers and math.isclose(found, stored, rel_tol=2e-5, abs_tol=1e-9) else found


def _dumped(value: Any, depth: int = 0) -> str:
    """Return JSON in which every value that fits in a line is on one line."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + depth <= _WIDTH or not isinstance(value, dict | list) or not value:
        return line
    inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(key, ensure_ascii=False)}: {_dumped(one, depth + 1)}" for key, one in value.items()
        ]
        return "{" + inner + f",{inner}".join(parts) + outer + "}"
    parts = [_dumped(one, depth + 1) for one in value]
    if max(map(len, parts)) <= _WIDTH // _IN_LINE:
        parts = [", ".join(parts[i : i + _IN_LINE]) for i in range(0, len(parts), _IN_LINE)]
    return "[" + inner + f",{inner}".join(parts) + outer + "]"
