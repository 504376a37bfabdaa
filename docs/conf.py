"""Settings of the documentation site, which `make site` builds of the Markdown files (decision 031)."""

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
    """Return the pages of a folder, these names first."""
    return sorted(pages(folder), key=lambda page: [page != f"{folder}/{name}" for name in first])


# A page that is not here is a warning, and warnings are errors.
NAVIGATION = {
    "Get started": ordered("docs/get-started", "install", "first-run", "choose-a-model", "coming-from"),
    "Guides": ordered("docs/guides", "chat", "serve", "server-page", "several-models", "clients", "agents"),
    "Examples": ["docs/examples/first-steps", "docs/examples/sparsity"],
    "Concepts": ordered("docs/concepts", "sparsity", "determinism"),
    "Reference": ordered("docs/reference", "cli", "command-line", "http", "http-behaviour", "python"),
    "Benchmarks": [*ordered("docs/benchmarks", "results"), "bench/README", "bench/gpu/README"],
    "Contributing": [
        *ordered("docs/contributing", "architecture"),
        *pages("docs/contributing/internals"),
        "docs/contributing/decisions/README",
        "CONTRIBUTING",
        "RELEASING",
        "packaging/wheels/README",
    ],
    "Project": ["README", "CHANGELOG", "SECURITY", "THIRD_PARTY_NOTICES", "adapters/README"],
}
HOME = "docs/index"
# Pages below another one in the navigation.
BELOW = {
    "docs/reference/http": pages("docs/reference/http"),
    "docs/contributing/decisions/README": [
        page for page in pages("docs/contributing/decisions") if not page.endswith("README")
    ],
}

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
html_static_path = ["static"]
html_js_files = ["site.js"]
html_css_files = ["site.css"]


# The page that the site shows for a link to a folder, which GitHub lists.
FOLDERS = {
    "decisions": "/docs/contributing/decisions/README.md",
    "internals": "/docs/contributing/architecture.md#where-the-details-are",
}


def adapt(_: Any, name: str, source: list[str]) -> None:
    """Change links to folders, and add the navigation, which GitHub does not show."""
    source[0] = re.sub(r"\]\([./\w]*?(\w+)/\)", lambda match: f"]({FOLDERS[match[1]]})", source[0])
    for caption, pages in (NAVIGATION if name == HOME else {"": BELOW.get(name, [])}).items():
        entries = "\n".join(f"/{page}" for page in pages if page != HOME)
        if entries:
            title = f":caption: {caption}\n" if caption else ""
            source[0] += f"\n```{{toctree}}\n:hidden:\n{title}\n{entries}\n```\n"


def write_root(app: Any, error: Exception | None) -> None:
    """Write the page at the root, which leads to the home page, and llms.txt, a list of all pages."""
    if error is None and app.builder.format == "html":
        titles = {name: title.astext() for name, title in app.env.titles.items()}
        lines = [f"# {project}", "", f"> {PROJECT['description']}"]
        for caption, pages in NAVIGATION.items():
            lines += ["", f"## {caption}", "", *(f"- [{titles[page]}]({page}.html)" for page in pages)]
        (Path(app.outdir) / "llms.txt").write_text("\n".join([*lines, ""]), "utf-8")
        page = (
            f'<!doctype html><title>hotset</title><meta http-equiv="refresh" content="0; url={HOME}.html">\n'
        )
        (Path(app.outdir) / "index.html").write_text(page, "utf-8")


class Notebook(Parser):
    """Reads a Jupyter notebook without outputs as Markdown."""

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
    app.connect("build-finished", write_root)
