"""The shell commands and Python programs in the repository's Markdown files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paths import ROOT

FOLDERS = ("adapters", "bench", "docs", "packaging", "tests")  # and the root

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block. document: path from the root. line: its first line, counted from 1."""

    document: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a shell block. place: document and line. stdin: the text piped by `echo`."""

    place: str
    words: tuple[str, ...]
    stdin: str = ""

    def __str__(self) -> str:
        return shlex.join(self.words)


def documents() -> list[Path]:
    """Return every Markdown file of the repository."""
    nested = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))
    return sorted([*ROOT.glob("*.md"), *nested])


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text("utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        yield Block(path.relative_to(ROOT).as_posix(), line, match[1], match[2])


def spans(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each inline code outside blocks."""
    text = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), path.read_text("utf-8"))
    for match in _SPAN.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield f"{path.relative_to(ROOT).as_posix()}:{line}", match[1]


def links(path: Path) -> Iterator[str]:
    """Yield the link targets of a document, as written."""
    for match in _LINK.finditer(_FENCE.sub("", path.read_text("utf-8"))):
        yield match[1]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", path.read_text("utf-8")), re.MULTILINE)
    plain = (_LINK.sub("]", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a shell block.

    Supports quotes, comments, lines that end in a backslash, and `echo TEXT | command`. Raises ValueError for
    other syntax.
    """
    first, text = block.line, ""
    for line, part in enumerate(block.text.splitlines(), block.line):
        first, text = (first, f"{text} {part}") if text else (line, part)
        if text.endswith("\\"):
            text = text.removesuffix("\\")
            continue
        if words := _words(text):
            yield _command(f"{block.document}:{first}", words)
        text = ""


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _command(place: str, words: list[str]) -> Command:
    stdin = ""
    if words[0] == "echo" and words[2:3] == ["|"]:
        stdin, words = f"{words[1]}\n", words[3:]
    if unknown := [word for word in words if re.fullmatch(r"[();<>|&]+", word)]:
        raise ValueError(f"{place}: tests/support/documents.py does not know {unknown[0]} in shell commands")
    return Command(place, tuple(words), stdin)
