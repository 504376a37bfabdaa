"""Parsing a model's output into calls, reasoning and text, for any division into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import numpy as np
import parsed_calls
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_calls import FORM, assert_pieces_do_not_matter
from tiny_tokenizers import bpe_metadata

from hotset.text import reasoning
from hotset.text.output import OutputForm
from hotset.text.parts import CallArguments, CallStart, Part, ReasoningChunk, Text, merged
from hotset.text.reasoning import ReasoningParser
from hotset.text.tokenizer import load_tokenizer
from hotset.text.tool_calls import FORMS, form_of, parser_of

NAMES = {"f", "g", "get_weather"}
THINK = ("<think>", "</think>")


read = partial(parsed_calls.read, names=NAMES)


def call(n: int, name: str, arguments: str) -> list[Part]:
    return [CallStart(n, f"id{n}", name), CallArguments(n, arguments)]


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'
HARMONY = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
EMITTED: list[tuple[str, str, list[Part]]] = [
    ("hermes", "Hello  there \n", [Text("Hello  there \n")]),
    ("hermes", f"Let me see.\n\n{HERMES}", [Text("Let me see."), *call(0, "f", '{"a": [1, "}"]}')]),
    ("hermes", f'{HERMES}\n<tool_call>\n{{"arguments": {{"x": "</tool_call>"}}, "name": "g"}}\n</tool_call>',
     [*call(0, "f", '{"a": [1, "}"]}'), *call(1, "g", '{"x": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f"}\n</tool_c', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_c', call(0, "f", '{"a": 1}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', call(0, "f", "{}")),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', call(0, "f", '{"a": 1}')),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>',
     [*call(0, "f", "{}"), *call(1, "g", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', call(0, "f", '{"a": 1}')),
    ("mistral",
     '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"}, {"arguments": {"b":2}, "name": "g"}]',
     [*call(0, "f", "{}"), *call(1, "g", '{"b":2}')]),
    (
        "mistral", 'Sure. [TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{}',
        [Text("Sure."), *call(0, "f", '{"a": "]"}'), CallStart(1, "a1b2c3d4e", "g"), CallArguments(1, "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', call(0, "f", '{"a": 1}')),
    ("mistral", "[TOOL_CALLS]f[ARGS]", call(0, "f", "{")),
    ("llama", '{"name": "f", "parameters": {"a": "1"}}', call(0, "f", '{"a": "1"}')),
    ("llama", '\n{"type": "function", "name": "f", "parameters": {}}', call(0, "f", "{}")),
    ("llama", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
     [*call(0, "f", "{}"), *call(1, "g", '{"b": 2}')]),
    ("llama", '<|python_tag|>{"name": "other", "parameters": {}}', call(0, "other", "{}")),
    ("harmony", f'<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY}{{"a":1}}<|call|>',
     [ReasoningChunk("Hm."), *call(0, "get_weather", '{"a":1}')]),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f"
        "<|channel|>commentary json<|message|>{}<|call|>",
        [Text("I look."), *call(0, "f", "{}")],
    ),
    ("harmony", f"{HARMONY}<|call|>", call(0, "get_weather", "{}")),
    ("harmony",
     "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.\n<|return|>",
     [ReasoningChunk("Hm."), Text("Hi.\n")]),
]  # fmt: skip

# Malformed output: none of its text is lost.
BROKEN: list[tuple[str, str, list[Part]]] = [
    ("hermes", "<tool_call> not JSON </tool_call> x", [Text("<tool_call> not JSON </tool_call> x")]),
    ("hermes", '<tool_call>\n{"x": 1}\n</tool_call>', [Text('<tool_call>\n{"x": 1}\n</tool_call>')]),
    (
        "hermes",
        '<tool_call>\n{"name": 3, "arguments": {}}',
        [Text('<tool_call>\n{"name": 3, "arguments": {}}')],
    ),
    ("hermes", "<tool_call>", [Text("<tool_call>")]),
    ("hermes", "<tool_call>\n</tool_call>", [Text("<tool_call>\n</tool_call>")]),
    ("hermes", "a <tool", [Text("a <tool")]),
    (  # a brace is missing
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> done',
        [*call(0, "f", '{"a": 1}'), Text(" done")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru', call(0, "f", '{"a": tru')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a', call(0, "f", '"{\\"a')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {a: 1,}}</tool_call>', call(0, "f", "{a: 1,}")),
    ("mistral", "[TOOL_CALLS] what?", [Text("[TOOL_CALLS] what?")]),
    ("mistral", "[TOOL_CALLS][1, 2]", [Text("[TOOL_CALLS][1, 2]")]),
    ("mistral", "[TOOL_CALLS]", [Text("[TOOL_CALLS]")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', call(0, "f", '{"a": ')),
    ("llama", '{"name": "John", "age": 3}', [Text('{"name": "John", "age": 3}')]),
    ("llama", '{"name": "other", "parameters": {}}', [Text('{"name": "other", "parameters": {}}')]),
    ("llama", 'See {"name": "f", "parameters": {}}', [Text('See {"name": "f", "parameters": {}}')]),
    ("llama", '<|python_tag|>print("x")', [Text('<|python_tag|>print("x")')]),
    ("harmony", "Hello <|chan", [Text("Hello <|chan")]),
    ("harmony", "<|channel|>final", [Text("<|channel|>final")]),
]


@pytest.mark.parametrize(("form", "emitted", "parts"), EMITTED + BROKEN)
def test_output_becomes_parts(form: str, emitted: str, parts: list[Part]):
    assert read(form, [emitted]) == parts
    assert read(form, list(emitted)) == parts
    middle = len(emitted) // 2
    assert read(form, [emitted[:middle], "", emitted[middle:]]) == parts


def test_arguments_come_while_they_are_written():
    parser = parser_of(FORM["hermes"], NAMES, lambda: "id0")
    assert parser.push('<tool_call>{"name": "f", "argu') == []
    assert parser.push('ments": {"a"') == [CallStart(0, "id0", "f"), CallArguments(0, '{"a"')]
    assert parser.push(": 1}") == [CallArguments(0, ": 1}")]
    assert parser.n_calls == 1


def test_text_is_held_back_only_where_a_mark_may_begin():
    parser = parser_of(FORM["hermes"], NAMES)
    assert parser.push("a < b <") == [Text("a < b")]
    assert parser.push("tool") == []
    assert parser.push("s> c") == [Text(" <tools> c")]


LETTERS = st.sampled_from(
    [
        *"{}[]\":,\\ \n;<>|aé", "name", "arguments", "parameters", '"name": "f"', '"arguments": {', "null",
        "f[ARGS]", "to=functions.f", "assistant", "final", "analysis", "json", "<|python_tag|>",
        *(mark for form in FORMS for mark in form.marks),
        *(mark[:4] for form in FORMS for mark in form.marks),
        HERMES, '{"name": "f", "parameters": {"x": "y"}}', *THINK,
    ]
)  # fmt: skip


@settings(max_examples=400)
@given(st.sampled_from(list(FORM)), st.lists(LETTERS, max_size=25), st.data())
def test_any_text_in_any_pieces_gives_the_same_parts(form: str, words: list[str], data: st.DataObject):
    assert_pieces_do_not_matter(form, "".join(words), NAMES, data)


@pytest.mark.parametrize(("form", "emitted", "parts"), [one for one in EMITTED if one[0] == "hermes"])
def test_truncated_answer_is_no_error(form: str, emitted: str, parts: list[Part]):
    for end in range(len(emitted)):
        cut = read(form, [emitted[:end]])
        starts = [part for part in cut if isinstance(part, CallStart)]
        assert starts == [part for part in parts if isinstance(part, CallStart)][: len(starts)]


def test_ids_are_distinct_and_as_templates_want_them():
    assert len({FORM["hermes"].make_id() for _ in range(100)}) == 100
    mistral = FORM["mistral"].make_id
    assert all(len(mistral()) == 9 and mistral().isalnum() for _ in range(20))


@pytest.mark.parametrize(
    ("template", "form", "marks"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", "harmony", None),
        ("[INST] [AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }} [THINK] [/THINK]", "mistral", ("[THINK]", "[/THINK]")),
        ("<tool_call>\n{{ '</tool_call>' }} {{ content.split('</think>')[-1] }}", "hermes", THINK),
        ("<tool_call>\n<function={{ name }}>", "qwen", None),
        ("<|start_header_id|>{{ '<|python_tag|>' }}", "llama", None),
        ('<|start_header_id|>{"name": function name, "parameters": dictionary}', "llama", None),
        ("<|im_start|>{{ message.content }}", "hermes", None),
    ],
)
def test_the_template_says_how_a_model_writes(template: str, form: str, marks: object):
    assert form_of(template).name == form
    assert reasoning.marks_of(template) == marks


# --- reasoning


def think(pieces: Sequence[str], is_open: bool = False) -> list[Part]:
    parser = ReasoningParser(THINK, is_open)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return merged(parts + parser.finish())


@pytest.mark.parametrize(
    ("emitted", "is_open", "parts"),
    [
        ("<think>\nHm, \n so.\n</think>\n\nHi \n", False, [ReasoningChunk("Hm, \n so."), Text("Hi \n")]),
        ("\n<think></think>Hi", False, [Text("Hi")]),
        ("Hm.\n</think>\n\nHi", True, [ReasoningChunk("Hm."), Text("Hi")]),
        ("Hm. </thin", True, [ReasoningChunk("Hm.")]),
        ("if a <", True, [ReasoningChunk("if a <")]),
        ("<think>\n\n</think>\n\n", False, []),
        ("Hi <think>x</think>", False, [Text("Hi <think>x</think>")]),
        ("<thi", False, [Text("<thi")]),
        (" Hi</think>", False, [Text(" Hi</think>")]),
        ("Hm.</think>Hi</think>", True, [ReasoningChunk("Hm."), Text("Hi</think>")]),
    ],
)
def test_reasoning_begins_an_answer(emitted: str, is_open: bool, parts: list[Part]):
    assert think([emitted], is_open) == parts
    assert think(list(emitted), is_open) == parts


@given(st.lists(LETTERS, max_size=20), st.booleans(), st.data())
def test_reasoning_does_not_depend_on_pieces(words: list[str], is_open: bool, data: st.DataObject):
    text = "".join(words)
    cut = data.draw(st.integers(0, len(text)))
    assert think([text[:cut], text[cut:]], is_open) == think([text], is_open) == think(list(text), is_open)


def test_a_prompt_may_open_or_close_it():
    assert reasoning.is_open(THINK, "<|im_start|>assistant\n<think>\n")
    assert not reasoning.is_open(THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not reasoning.is_open(
        THINK, "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    )


# --- all parts together


def test_reasoning_then_calls_then_text():
    tokenizer = load_tokenizer(bpe_metadata())
    form = OutputForm.of("<tool_call> </tool_call> </think>", tokenizer)
    emitted = f"Hm.</think>\n\nLet me see. {HERMES}"
    for pieces in ([emitted], list(emitted)):
        parser = form.parser("...<think>\n", tools=["f"])
        parts = [part for piece in pieces for part in parser.push(piece)]
        parts = merged(parts + parser.finish())
        assert parser.n_calls == 1
        assert [type(part) for part in parts] == [ReasoningChunk, Text, CallStart, CallArguments]
        assert json.loads(parts[3].text) == {"a": [1, "}"]}  # type: ignore[union-attr]
    parser = form.parser("...<think>\n", apart=False)
    assert merged(parser.push(emitted) + parser.finish()) == [Text(emitted)]
    assert parser.n_calls == 0


def test_special_tokens_that_are_marks_reach_the_parser_as_text():
    tokens = bpe_metadata()["tokenizer.ggml.tokens"]
    tokens = [*tokens, "[TOOL_CALLS]", "[ARGS]"]
    types = np.array([1] * (len(tokens) - 6) + [3, 3, 3, 4, 3, 3], np.int32)
    tokenizer = load_tokenizer(bpe_metadata(tokens=tokens, token_type=types))
    form = OutputForm.of("[TOOL_CALLS] [ARGS]", tokenizer)
    assert form.shown_ids == {len(tokens) - 2, len(tokens) - 1}
    ids = tokenizer.encode('[TOOL_CALLS]f[ARGS]{"a": 1}<|im_start|>', parse_special=True)
    decoder = tokenizer.stream(skip_special=True, shown=form.shown_ids)
    parser = form.parser("", tools=["f"])
    parts = [part for id in ids for part in parser.push(decoder.push(id))] + parser.finish()
    assert [part for part in merged(parts) if not isinstance(part, CallStart)] == [
        CallArguments(0, '{"a": 1}')
    ]
