"""Tool calls as models write them, taken out of the text as it arrives.

Which form a model uses follows from its chat template, with whose renderings it was trained: forms.py has the
table, docs/guides/serve.md the same in words. Marks may be special tokens, which a decoder leaves out:
`Form.marks` are those that must be passed on as text.

A parser takes pieces of any size and gives parts; how the answer was split changes nothing. Nothing is an
error, and no text is lost: what looks like a call and is none is passed on as text. A call that breaks off
keeps its arguments as far as they go, so that they are no JSON, and what follows is text. White space between
text and calls belongs to the form and is left out.
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
    """A parser for one answer.

    tools: JSON schemas of the arguments of the functions that may be called, or only their names; None: any
    function. make_id: gives the id of each call; default: a random one.
    """
    return ToolCallParser(form, tools, make_id or form.make_id)
