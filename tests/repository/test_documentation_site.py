"""The documentation site builds like `make site`: without a network, and with warnings as errors."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import documents
import pytest
from paths import DOCS, ROOT

# Sphinx in a process that can open no connection.
OFFLINE = """
import socket, sys
def refuse(*_): raise OSError("the build asks for a network")
socket.socket.connect = socket.getaddrinfo = refuse
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""
LOADED = re.compile(r'<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="(\w+:)?//')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = re.search(r"-m sphinx (.*) -d build/site-cache \. build/site", (ROOT / "Makefile").read_text())
    assert command
    words = [*command[1].split(), "-d", str(folder / "cache"), str(ROOT), str(folder / "html")]
    assert {"-W", "--keep-going"} <= set(words)
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.mark.slow
def test_every_document_is_a_page(site: Path) -> None:
    for path in documents.documents():
        place = path.relative_to(ROOT)
        if place.parts[0] not in ("tests", "packaging"):
            assert (site / place.with_suffix(".html")).is_file(), place
    for path in (DOCS / "examples").glob("*.ipynb"):
        page = (site / path.relative_to(ROOT).with_suffix(".html")).read_text("utf-8")
        assert "highlight-python" in page, path


@pytest.mark.slow
def test_the_root_leads_to_the_home_page(site: Path) -> None:
    [target] = re.findall(r"url=([^\"]+)", (site / "index.html").read_text("utf-8"))
    assert (site / target).is_file()


@pytest.mark.slow
def test_pages_load_no_external_files(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not LOADED.search(path.read_text("utf-8")), path


@pytest.mark.slow
def test_a_broken_link_fails(tmp_path: Path) -> None:
    """Check that a missing page and a missing heading give warnings, on which the build relies."""
    (tmp_path / "conf.py").write_text('extensions = ["myst_parser"]\nmyst_heading_anchors = 4\n')
    (tmp_path / "index.md").write_text("# A\n\n[b](nothing.md) [c](#no-heading)\n")
    words = ["-W", "--keep-going", "-q", "-b", "html", str(tmp_path), str(tmp_path / "html")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "nothing.md" in done.stderr
    assert "no-heading" in done.stderr


# -- troubleshooting -----------------------------------------------------------------------------

# Messages of other programs.
OF_OTHERS = ("ensurepip", "requires a different Python", "CMAKE_CXX_COMPILER")


@cache
def literals() -> str:
    """Return all strings of the sources in lower case, with `...` for the fields of f-strings."""
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.JoinedStr):
                parts = (one.value if isinstance(one, ast.Constant) else "..." for one in node.values)
                texts.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    core = "".join(path.read_text("utf-8") for path in (ROOT / "csrc").rglob("*.cpp"))
    return " ".join("\n".join([*texts, core]).lower().split())


def test_messages_of_the_troubleshooting_page_exist() -> None:
    messages = re.findall(r"^\| `([^`]+)`", (DOCS / "reference/errors.md").read_text("utf-8"), re.MULTILINE)
    assert len(messages) > 30
    for message in (one for one in messages if not any(other in one for other in OF_OTHERS)):
        longest = max(re.split(r"\.\.\.|owner/name|silu|\bN\b|[?()']", message), key=len).strip().lower()
        assert longest in literals(), f"no message has {longest!r}: {message}"
