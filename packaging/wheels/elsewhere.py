"""Checks that another platform's Python runs: hashes of logits, the program, parts of the test suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from build import ROOT

sys.path.insert(0, str(ROOT / "tests" / "support"))

import published

PROMPT = "What is photosynthesis?"
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NEEDS = [
    *(one for one in _PROJECT["dependencies"] if ";" not in one and not one.startswith("numpy")),
    *_PROJECT["optional-dependencies"]["serve"],
    *("pytest", "hypothesis", "httpx", "jsonschema", "gguf", "openai"),
]
"""Requirements of hotset, its server and the tests, except NumPy: some platforms need an old version."""


@dataclass(frozen=True)
class Part:
    """A line of the table: the part, whether it passed, and the last line that it printed."""

    name: str
    seconds: float
    right: bool
    counted: str


Python = Callable[..., tuple[int, str]]
"""Runs the other platform's Python with arguments. Returns the exit status and the output."""


def check(
    python: Python, suite: dict[str, list[str]], words: list[str], *, is_emulated: bool = False
) -> bool:
    """Run the parts and print a table. Returns whether all passed.

    suite: pytest arguments by name. words: run only parts whose names contain one of them; empty: all.
    is_emulated: whether the processor is emulated.
    """
    steps = {
        "hashes of logits": ["tests/platforms/hashes.py"],
        "the program": ["tests/platforms/program.py", str(_model()), PROMPT, _answer()],
    }
    if is_emulated:
        steps["the program"].append("emulated")
    pytest = ["-m", "pytest", "-p", "no:cacheprovider"]
    steps |= {name: [*pytest, *paths] for name, paths in suite.items()}
    chosen = {name: step for name, step in steps.items() if not words or any(one in name for one in words)}
    if not chosen:
        sys.exit(f"no part has a name with {' or '.join(words)}: {', '.join(steps)}")
    parts = []
    for name, step in chosen.items():
        print(f"== {name}", flush=True)
        begin = time.monotonic()
        status, printed = python(*step)
        last = (printed.strip().splitlines() or ["nothing was printed"])[-1]
        parts.append(Part(name, time.monotonic() - begin, status == 0, last))
    for part in parts:
        print(f"{part.name:24} {'right' if part.right else 'WRONG'} {part.seconds:6.0f} s  {part.counted}")
    return all(part.right for part in parts)


def _model() -> Path:
    """Return the demo model, fetched into the checkout's store if needed."""
    if (path := published.find()) is None:
        pull = [sys.executable, "-m", "hotset.cli.main", "pull", published.NAME]
        subprocess.run(pull, env=os.environ | {"HOTSET_HOME": str(published.HOME)}, check=True)
        path = published.find()
        assert path is not None
    return path


def _answer() -> str:
    """Return hotset's answer on this machine."""
    command = [sys.executable, "-m", "hotset.cli.main", "run", "-m", _model(), PROMPT]
    done = subprocess.run(
        [*map(str, command), "--temp", "0", "-n", "16", "--json"], capture_output=True, text=True, check=True
    )
    return str(json.loads(done.stdout)["text"])
