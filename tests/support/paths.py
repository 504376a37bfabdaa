"""Folders of the checkout that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
BENCH = ROOT / "bench"
DOCS = ROOT / "docs"
