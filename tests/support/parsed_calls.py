"""Texts in the forms of tool calls, given to the parsers in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from hypothesis import strategies as st

from hotset.text.parts import CallStart, Part, ReasoningChunk, Text, merged
from hotset.text.tool_calls import FORMS, parser_of

FORM = {form.name: form for form in FORMS}


def read(form: str, pieces: Sequence[str], names: Collection[str] | None) -> list[Part]:
    """Return the parts of a text, given piece by piece. names: the functions; None: any."""
    numbers = itertools.count()
    parser = parser_of(FORM[form], names, lambda: f"id{next(numbers)}")
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.finish()
    assert parser.finish() == []
    return merged(parts)


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def assert_pieces_do_not_matter(
    form: str, text: str, names: Collection[str] | None, data: st.DataObject
) -> None:
    """Check that a text gives the same parts however it is divided, and that no text is lost."""
    splits = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *splits, len(text)])]
    whole = read(form, [text], names)
    assert read(form, pieces, names) == whole
    assert read(form, list(text), names) == whole
    if not any(isinstance(part, CallStart | ReasoningChunk) for part in whole) and form != "harmony":
        assert text_of(whole) == text, "text was lost"
