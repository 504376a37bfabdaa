"""Browsers for the tests of the page: Chromium, the machine's own or one that tests/support/prepare.py
fetched, and the machine's Firefox, which playwright drives by WebDriver BiDi."""

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


CHROMIUM, FIREFOX = "chromium", "firefox"
MISSING = {
    CHROMIUM: "no Chromium on this machine: `make test` fetches one by playwright or npm; otherwise install "
    "one (Debian: chromium) or name it in HOTSET_CHROMIUM",
    FIREFOX: "no Firefox on this machine: `make test-deps` installs it (Debian: firefox-esr)",
}
PREFERENCES = {
    "ui.prefersReducedMotion": 1,
    "layout.css.prefers-color-scheme.content-override": 1,  # light
    "dom.events.testing.asyncClipboard": True,  # without a question to the reader
}
CHROMIUM_ONLY = ("color_scheme", "has_touch", "is_mobile", "permissions", "reduced_motion")

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


def find_firefox() -> str | None:
    """Where a Firefox is: HOTSET_FIREFOX, or the path."""
    return os.environ.get("HOTSET_FIREFOX") or shutil.which("firefox-esr") or shutil.which("firefox")


@contextmanager
def launched(name: str = CHROMIUM) -> Iterator[Any]:
    """A playwright Browser with a profile of its own. Skips where this machine has none of that name."""
    from playwright.sync_api import sync_playwright

    path = find() if name == CHROMIUM else find_firefox()
    if path is None:
        pytest.skip(MISSING[name])
    with sync_playwright() as playwright:
        if name == CHROMIUM:
            browser = playwright.chromium.launch(executable_path=path, args=FLAGS, env=_libraries(path))
        else:
            browser = playwright.firefox.launch(
                channel="moz-firefox", executable_path=path, firefox_user_prefs=PREFERENCES
            )
        yield browser
        browser.close()


def context_options(browser: Any, **wanted: Any) -> dict[str, Any]:
    """Those of a context that the browser knows; the others are PREFERENCES of Firefox, or its nature."""
    if browser.browser_type.name == CHROMIUM:
        return wanted
    return {name: value for name, value in wanted.items() if name not in CHROMIUM_ONLY}
