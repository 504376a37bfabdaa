"""Browsers for the tests of the chat page.

Chromium is installed or fetched by tests/support/prepare.py. Firefox must be installed; playwright
drives it by WebDriver BiDi.
"""

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
    "--no-sandbox",  # only the tests' pages are loaded, often as root
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
    "dom.events.testing.asyncClipboard": True,  # without asking the user
}
CHROMIUM_ONLY = ("color_scheme", "has_touch", "is_mobile", "permissions", "reduced_motion")

FETCHED = ROOT / "build" / "browser"
_PLACES = (
    "playwright/chromium*/*/headless_shell", "playwright/chromium*/*/chrome-headless-shell", "npm/chromium",
)  # fmt: skip


def find() -> str | None:
    """Return the path of a Chromium: HOTSET_CHROMIUM, on PATH, fetched, or playwright's; None without one."""
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
    """Return the environment of a Chromium. npm's has libraries next to it that this machine may lack."""
    beside = Path(path).parent / "al2023" / "lib"
    if not beside.is_dir():
        return dict(os.environ)
    return os.environ | {"LD_LIBRARY_PATH": f"{beside}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")}


def find_firefox() -> str | None:
    """Return the path of a Firefox: HOTSET_FIREFOX, or on PATH."""
    return os.environ.get("HOTSET_FIREFOX") or shutil.which("firefox-esr") or shutil.which("firefox")


@contextmanager
def launched(name: str = CHROMIUM) -> Iterator[Any]:
    """Yield a playwright Browser with its own profile. Skips the test if this machine lacks the browser."""
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
    """Return the context options that the browser supports; for Firefox, PREFERENCES replace the others."""
    if browser.browser_type.name == CHROMIUM:
        return wanted
    return {name: value for name, value in wanted.items() if name not in CHROMIUM_ONLY}
