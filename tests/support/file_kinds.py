"""Marks of tests that need kinds of files that some systems lack."""

import os
import tempfile
from pathlib import Path

import pytest


def _follows_links() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        target, link = Path(folder, "target"), Path(folder, "link")
        target.write_bytes(b"there")
        try:
            link.symlink_to(target)
            return link.read_bytes() == b"there"
        except OSError:
            return False


needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
needs_links = pytest.mark.skipif(
    not _follows_links(), reason="symbolic links need a right on Windows, and Wine does not follow them"
)
