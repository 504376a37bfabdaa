"""The documentation site, by Sphinx: `make site`. Its pages are the Markdown files of the repository.

Why Sphinx, and how it is checked: decision 031.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from myst_parser.sphinx_ import Parser

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def pages(folder: str) -> list[str]:
    return sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / folder).glob("*.md"))


def ordered(folder: str, *first: str) -> list[str]:
    """The pages of a folder, these names first."""
    return sorted(pages(folder), key=lambda page: [page != f"{folder}/{name}" for name in first])


# A page that is not here is a warning, and warnings are errors.
NAVIGATION = {
    "Get started": ordered("docs/get-started", "install", "first-run"),
    "Guides": ordered("docs/guides", "chat", "serve") + pages("docs/guides/tools"),
    "Examples": ["docs/examples/first-steps", "docs/examples/sparsity"],
    "Concepts": ordered("docs/concepts", "sparsity"),
    "Reference": ordered("docs/reference", "cli"),
    "Benchmarks": [
        *ordered("docs/benchmarks", "results"),
        "bench/README",
        "bench/gpu/README",
        "adapters/README",
    ],
    "Contributing": [
        *ordered("docs/contributing", "architecture"),
        *pages("docs/contributing/internals"),
        *pages("docs/contributing/decisions"),
        "CONTRIBUTING",
        "RELEASING",
        "packaging/wheels/README",
    ],
    "Project": ["README", "CHANGELOG", "SECURITY", "THIRD_PARTY_NOTICES"],
}
HOME = "docs/index"

project, author, copyright = PROJECT["name"], "the hotset authors", "the hotset authors, MIT licence"
version = release = PROJECT["version"]
extensions = ["myst_parser"]
root_doc = HOME
include_patterns = ["*.md", "adapters/*.md", "bench/**.md", "docs/**", "packaging/wheels/*.md"]
exclude_patterns = [".*", "build*", "dist", "csrc", "src", "tests"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
myst_heading_anchors = 4  # as GitHub makes them
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "furo"
html_title = f"hotset {version}"
html_copy_source = False


# What a link to a folder, which GitHub lists, shows on the site.
FOLDERS = {
    "decisions": "/docs/benchmarks/results.md#what-was-tried-and-what-was-decided",
    "internals": "/docs/contributing/architecture.md#where-the-details-are",
}


def adapt(_: Any, name: str, source: list[str]) -> None:
    """Links to folders; and the navigation of the home page, which GitHub shows without it."""
    source[0] = re.sub(r"\]\([./\w]*?(\w+)/\)", lambda match: f"]({FOLDERS[match[1]]})", source[0])
    if name == HOME:
        for caption, pages in NAVIGATION.items():
            entries = "\n".join(f"/{page}" for page in pages if page != HOME)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def enter(app: Any, error: Exception | None) -> None:
    """The root of the site leads to the home page."""
    if error is None and app.builder.format == "html":
        page = (
            f'<!doctype html><title>hotset</title><meta http-equiv="refresh" content="0; url={HOME}.html">\n'
        )
        (Path(app.outdir) / "index.html").write_text(page, "utf-8")


class Notebook(Parser):
    """A Jupyter notebook without outputs, as Markdown."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        cells = json.loads(inputstring)["cells"]
        texts = ("".join(cell["source"]) for cell in cells)
        parts = [
            f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
            for cell, text in zip(cells, texts, strict=True)
        ]
        super().parse("\n\n".join(parts), document)


def setup(app: Any) -> None:
    app.add_source_parser(Notebook)
    app.connect("source-read", adapt)
    app.connect("build-finished", enter)
