"""Tool calls as models write them, taken out of the text as it arrives.

The form of a model follows from its chat template, whose renderings trained it. forms.py has the table;
docs/guides/serve.md describes it. Marks may be special tokens, which a decoder leaves out: it must pass on
`Form.marks` as text.

A parser takes pieces of any size and returns parts. How the answer was split changes nothing. Nothing is an
error, and no text is lost: text that only looks like a call is passed on. A call that breaks off keeps its
partial arguments, which are not valid JSON, and later text is text. White space between text and calls
belongs to the form and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from hotset.text.tool_calls.forms import FORMS, HARMONY, Form, form_of, marks_in
from hotset.text.tool_calls.parser import Schemas, ToolCallParser

__all__ = ["FORMS", "HARMONY", "Form", "Schemas", "ToolCallParser", "form_of", "marks_in", "parser_of"]


def parser_of(
    form: Form,
    tools: Schemas | Collection[str] | None = None,
    make_id: Callable[[], str] | None = None,
) -> ToolCallParser:
    """Return a parser for one answer.

    tools: JSON schemas of the arguments of the functions that may be called, or only their names; None: any
    function. make_id: returns the id of each call; default: a random one.
    """
    return ToolCallParser(form, tools, make_id or form.make_id)
