"""A Chromium for the tests of the page: whichever is on this machine, or playwright's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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


def find() -> str | None:
    """Where a Chromium is: HOTSET_CHROMIUM, the path, or where playwright keeps its own."""
    if named := os.environ.get("HOTSET_CHROMIUM"):
        return named
    if found := next((path for name in NAMES if (path := shutil.which(name))), None):
        return found
    kept = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    patterns = ("chromium*/*/headless_shell", "chromium*/*/chrome-headless-shell", "chromium*/*/chrome")
    return next((str(path) for pattern in patterns for path in sorted(kept.glob(pattern))), None)


@contextmanager
def launched() -> Iterator[Any]:
    """A playwright Browser with a profile of its own. Skips where this machine has no Chromium."""
    from playwright.sync_api import sync_playwright

    path = find()
    if path is None:
        pytest.skip(
            "there is no Chromium on this machine: install one (Debian: chromium), let playwright fetch its "
            "own (make test tries to), or name it in HOTSET_CHROMIUM"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()
