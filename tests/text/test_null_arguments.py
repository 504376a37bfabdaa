"""A null for an optional argument that cannot be null is dropped from the call, streamed or whole."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotset.text.parts import CallArguments
from hotset.text.tool_calls import FORMS, parser_of
from hotset.text.tool_calls.nulls import NullFilter, without_null
from hotset.text.tool_calls.reader import MAX_HEAD

NUMBER, NULLABLE = {"type": "number"}, {"type": ["number", "null"]}
BASH = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": NUMBER, "limit": NULLABLE},
    "required": ["command"],
}


def filtered(text: str, names: set[str], ends: tuple[int, ...] = ()) -> str:
    """Filter a text in pieces that end at `ends`."""
    reader = NullFilter(frozenset(names))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]
    return "".join(map(reader.push, pieces)) + reader.rest()


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (BASH, {"timeout"}),
        (BASH | {"required": None}, {"command", "timeout"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": BASH}}, {"timeout"}),
        ({"properties": {"a": {"anyOf": [NUMBER, {"type": "null"}]}, "b": {"enum": [1, 2]}}}, {"b"}),
        ({"properties": {"a": {}, "b": True, "c": NUMBER | {"nullable": True}}}, set()),
        ({"properties": {"a": NUMBER | {"required": True}}}, set()),
        ({"properties": {"a": NUMBER}, "anyOf": [{"required": ["a"]}]}, set()),
        ({}, set()),
    ],
    ids=(
        "plain",
        "required null",
        "reference",
        "any of",
        "free",
        "required flag",
        "any of required",
        "empty",
    ),
)
def test_which_arguments_cannot_be_null(schema: dict[str, Any], names: set[str]) -> None:
    assert without_null(schema) == names


@pytest.mark.parametrize(
    ("written", "left"),
    [
        ('{"a": null}', "{}"),
        ('{"a": null, "b": 1}', '{"b": 1}'),
        ('{"b": 1, "a": null}', '{"b": 1}'),
        ('{"b": 1, "a" : null , "c": [{"a": null}], "a": null}', '{"b": 1 , "c": [{"a": null}]}'),
        (r'{"\u0061": null, "b": "\", \"a\": null"}', r'{"b": "\", \"a\": null"}'),
        ('{"b": null, "a": "null", "a": nullx}', '{"b": null, "a": "null", "a": nullx}'),
        ('{"b": 1, "a": nul', '{"b": 1, "a": nul'),  # broken off
        (r'{"\q": null, "a": null', r'{"\q": null, "a": null'),
        ('["a", null]', '["a", null]'),
        ('{"' + "x" * MAX_HEAD + '": 1, "a": null}', '{"' + "x" * MAX_HEAD + '": 1, "a": null}'),
    ],
)
def test_nulls_are_left_out_wherever_the_text_is_cut(written: str, left: str) -> None:
    assert filtered(written, {"a"}).replace(" }", "}") == left
    for at in range(1, len(written)):
        assert filtered(written, {"a"}, (at,)) == filtered(written, {"a"})
    assert filtered(written, {"a"}, tuple(range(1, len(written)))) == filtered(written, {"a"})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["a", "b", '"', "null", "é"]), VALUES), st.data())
def test_any_object_keeps_the_rest(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value, indent=data.draw(st.sampled_from([None, 1])))
    ends = tuple(sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5))))
    kept = {name: one for name, one in value.items() if one is not None or name not in ("a", "é")}
    assert json.loads(filtered(text, {"a", "é"}, ends)) == kept
    broken = text[: data.draw(st.integers(0, len(text)))]
    assert filtered(broken, set()) == broken


@pytest.mark.parametrize(
    ("form", "written"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "timeout": null, "limit": null}}\n'
            "</tool_call>",
        ),
        (
            "qwen",
            "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n<parameter=timeout>\nnull\n"
            "</parameter>\n<parameter=limit>\nnull\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_calls_of_forms(form: str, written: str) -> None:
    by_name = {one.name: one for one in FORMS}
    for pieces in ([written], list(written)):
        parser = parser_of(by_name[form], {"bash": BASH}, lambda: "id")
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert json.loads(arguments) == {"command": "ls", "limit": None}
