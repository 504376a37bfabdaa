"""Plain English: less than 1% of the lines of text have a construction that a reader must read twice.

CONTRIBUTING.md has the rule. Lines of text are prose of Markdown (also of generated pages, which have the
help texts), docstrings, comments and messages of errors. `python tests/repository/test_english.py` prints the
lines with such a construction.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "csrc", "tests", "bench", "docs", "packaging")
SKIPPED = ("third_party", "vendor", "node_modules", "build")
CONSTRUCTIONS = {
    "a clause as a noun": r"\b[Ww]hat (is|was|are|were|has|had|it|they|a|an|the|no|one|comes|needs)\b",
    "beside: next to, with, compared with": r"\b[Bb]esides?\b",
    "that of, those of: repeat the noun": r"\b([Tt]hat|[Tt]hose) of\b",
    "is none, is no: does not": r"(?<![Tt]here )\b(is|are|was|were) (none\b|no (?!longer\b|more\b))",
    "stands: is, is stored": r"\b(stands?|stood) (in|on|at|beside|behind|there|where)\b",
    "alone: only": r"\balone[.,;:)]|\balone$",
    "anew: again, new": r"\banew\b",
    "goes on: continues": r"\b(goes|go|went) on (with|from|to|after|until|where)\b",
    "where: if": r"\b[Ww]here (there (is|are)|it (is|was|has)|they are|none|no|any)\b",
    "else: otherwise": r"[,;:] else\b|\belse (it|they|the|a|an)\b",
    "asked: requested": r"\b(is|are|was|were|be|when|as|than|unless) asked\b(?! to\b)",
    "Of first: the noun first": r"(^|[.;:] +)Of (?!course\b)[a-z]",
    "a participle first": r"(^|[.;] +)(Refused|Printed|Kept|Counted|Measured|Tried) (is|are|was)\b",
    "so many: how many of which": r"\b[Ss]o (many|much)\b(?! (that|as)\b)",
    "as it is: unchanged, current": r"\bas (it|they) (is|are|was|were|stands?)\b",
    "at hand, hence: the plain word": r"\b(at hand|to be had|in vain|[Hh]ence|thereof|[Ll]ikewise)\b",
    "comes to its end: finishes": r"\bcom(es?|ing) to (its|their|an) end\b",
}
FOUND = {name: re.compile(pattern) for name, pattern in CONSTRUCTIONS.items()}
NO_VERB = re.compile(
    r"(Of|As|By|In|For|It|Its|That|Those|What|Where|Which|Who|How|Whether|All|Each|No|None|One|So) "
)


def python_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text, and whether a function's docstring begins there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            of_function = not isinstance(node, ast.Module | ast.ClassDef)
            for i, line in enumerate((ast.get_docstring(node) or "").splitlines()):
                yield node.body[0].lineno + i, line, of_function and i == 0
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield part.lineno, part.value, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: "), False


def markdown_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the lines of prose, without code and targets of links."""
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and line.strip() and not line.startswith(("    ", "#")):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "X", line), False


def native_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the comments of C++ and GLSL."""
    for number, line in enumerate(source.splitlines(), 1):
        if "//" in line:
            yield number, line.partition("//")[2].strip(), False


READERS = {".py": python_texts, ".md": markdown_texts} | dict.fromkeys(
    (".cpp", ".h", ".comp", ".glsl"), native_texts
)


def problems_of(text: str, *, begins: bool = False) -> list[str]:
    """Return the constructions in a line. begins: it is the first line of a function's docstring."""
    found = [name for name, pattern in FOUND.items() if pattern.search(text)]
    return [*found, "a docstring begins with a verb"] if begins and NO_VERB.match(text) else found


def lines_of_text() -> Iterator[tuple[str, str, list[str]]]:
    """Yield place, text and problems of each line of text in the repository."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")] + [*ROOT.glob("*.md")]
    for path in sorted(paths):
        name = path.relative_to(ROOT)
        if path.suffix in READERS and not set(SKIPPED) & set(name.parts):
            for line, text, begins in READERS[path.suffix](path.read_text("utf-8")):
                if text.strip():
                    yield f"{name}:{line}", text, problems_of(text, begins=begins)


def test_less_than_one_percent_of_the_lines_need_a_second_reading() -> None:
    lines = list(lines_of_text())
    found = [f"{place}: {', '.join(problems)}: {text.strip()}" for place, text, problems in lines if problems]
    assert len(lines) > 20_000
    assert len(found) < 0.01 * len(lines), "\n".join(found)


@pytest.mark.parametrize(
    ("unclear", "plain"),
    [
        ("What a step asks for is what it gets.", "A step gets the requested experts."),
        ("InvalidRequestError where it is none", "Raises InvalidRequestError if the value is not finite."),
        ("Refused are calls without results.", "hotset rejects calls without results."),
        ("Of each text all of its tokens.", "Admit whole texts, the oldest first."),
        ("Beside the file lies its profile.", "The profile is next to the file."),
        ("It runs on the CPU alone.", "It runs only on the CPU."),
        ("It is read anew, else nothing happens.", "It is read again; otherwise nothing happens."),
        ("The stream goes on from there.", "The stream continues from there. There is no end."),
        ("Its size is that of the file, as it is.", "Its size equals the size of the unchanged file."),
    ],
)
def test_constructions_are_found(unclear: str, plain: str) -> None:
    assert problems_of(unclear)
    assert not problems_of(plain)


def test_docstrings_comments_messages_and_prose_are_read() -> None:
    source = '"""A."""\ndef f():\n    """Of B."""\n    raise E("no C")  # D\n'
    assert sorted(python_texts(source)) == [
        (1, "A.", False),
        (3, "Of B.", True),
        (4, "D", False),
        (4, "no C", False),
    ]
    assert problems_of("Of B.", begins=True) == ["a docstring begins with a verb"]
    assert list(markdown_texts("# A\n\nB `what is` [C](what-is)\n```\nD\n```\n")) == [(3, "B X [CX", False)]
    assert list(native_texts("int a;  // B\n")) == [(1, "B", False)]


if __name__ == "__main__":
    for place, text, problems in lines_of_text():
        if problems:
            print(f"{place}: {', '.join(problems)}: {text.strip()}")
