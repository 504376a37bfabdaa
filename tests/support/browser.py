"""A Chromium for the tests of the page: the machine's own, or one that tests/support/prepare.py fetched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
FLAGS = [
    "--no-sandbox",  # it sees what the tests serve, and often runs as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


FETCHED = ROOT / "build" / "browser"
_PLACES = (
    "playwright/chromium*/*/headless_shell", "playwright/chromium*/*/chrome-headless-shell", "npm/chromium",
)  # fmt: skip


def find() -> str | None:
    """Where a Chromium is: HOTSET_CHROMIUM, the path, what was fetched, or where playwright keeps its own."""
    if named := os.environ.get("HOTSET_CHROMIUM"):
        return named
    if found := next((path for name in NAMES if (path := shutil.which(name))), None):
        return found
    kept = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    patterns = ("chromium*/*/headless_shell", "chromium*/*/chrome-headless-shell", "chromium*/*/chrome")
    found = [path for pattern in _PLACES for path in sorted(FETCHED.glob(pattern))]
    found += [path for pattern in patterns for path in sorted(kept.glob(pattern))]
    return str(found[0]) if found else None


def _libraries(path: str) -> dict[str, str | float | bool]:
    """The environment of a Chromium: npm's finds libraries beside it that this machine may lack."""
    beside = Path(path).parent / "al2023" / "lib"
    if not beside.is_dir():
        return dict(os.environ)
    return os.environ | {"LD_LIBRARY_PATH": f"{beside}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")}


@contextmanager
def launched() -> Iterator[Any]:
    """A playwright Browser with a profile of its own. Skips where this machine has no Chromium."""
    from playwright.sync_api import sync_playwright

    path = find()
    if path is None:
        pytest.skip(
            "no Chromium on this machine: `make test` fetches one by playwright or npm; otherwise install "
            "one (Debian: chromium) or name it in HOTSET_CHROMIUM"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, env=_libraries(path))
        yield browser
        browser.close()
