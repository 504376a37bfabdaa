"""Every form of tool calls: published examples, any division of a text, incomplete and hostile text.

The examples come from model cards and the vendors' documentation, with the names of the tools below.
"""

from __future__ import annotations

import itertools
import json
import time
from functools import partial
from typing import Any

import parsed_calls
import pytest
from cases import quick_are
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_calls import FORM, assert_pieces_do_not_matter, text_of
from published_calls import GLM, INVOKE, KIMI, OSLO, PUBLISHED, QWEN, ROME, TEMPLATES, TOOLS, V3, V31, J

from hotset.text.parts import CallArguments, CallStart, Part, Text
from hotset.text.tool_calls import form_of, parser_of
from hotset.text.tool_calls.reader import MAX_HEAD, MAX_NAME
from hotset.text.tool_calls.values import TYPES, as_json, types_of

Found = tuple[str, list[tuple[str, Any]]]


read = partial(parsed_calls.read, names=TOOLS)


def calls_of(parts: list[Part]) -> list[tuple[str, str]]:
    """Names and arguments, as text."""
    names = {part.call: part.name for part in parts if isinstance(part, CallStart)}
    texts = dict.fromkeys(names, "")
    for part in parts:
        if isinstance(part, CallArguments):
            texts[part.call] += part.text
    return [(names[n], texts[n]) for n in names]


# Malformed answers: text stays text, and an incomplete call has incomplete JSON as its arguments.
BROKEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("qwen", "<tool_call> what? </tool_call>", "<tool_call> what? </tool_call>", []),
    ("qwen", "<tool_call>\n<function=>\n", "<tool_call>\n<function=>\n", []),
    ("qwen", "<tool_call>\n<function=a b>", "<tool_call>\n<function=a b>", []),
    ("qwen", "x <tool_", "x <tool_", []),
    ("qwen", QWEN[: QWEN.index("me\n</par")], "", [("get_weather", '{"city": "Ro')]),
    ("qwen", QWEN[: QWEN.index("<parameter=days")], "", [("get_weather", '{"city": "Rome"')]),
    ("qwen", QWEN[: QWEN.index("\n</parameter>\n</f")], "", [("get_weather", '{"city": "Rome", "days": "2')]),
    ("qwen", QWEN.replace("<parameter=days>", "so"), "\nso\n2\n</parameter>\n</function>\n</tool_call>",
     [("get_weather", '{"city": "Rome"')]),
    ("qwen", QWEN.replace("</tool_call>", "Done."), "\nDone.", [("get_weather", J)]),
    ("glm", "<tool_call>not a call</tool_call>", "<tool_call>not a call</tool_call>", []),
    ("glm", GLM[: GLM.index("</arg_value>")], "", [("get_weather", '{"city": "Rome')]),
    ("minimax", "<minimax:tool_call>\n</minimax:tool_call>", "<minimax:tool_call>\n</minimax:tool_call>", []),
    ("deepseek-v3.1", "<｜tool▁calls▁begin｜>no", "<｜tool▁calls▁begin｜>no", []),
    ("deepseek-v3.1", V31.format('{"city": '), "", [("get_weather", '{"city": ')]),
    ("deepseek-v3", V3.format('{"city": '), "", [("get_weather", '{"city": \n')]),
    ("kimi", KIMI.format(0, '{"city": "R'), "", [("get_weather", '{"city": "R<|tool_call_end|>')]),
    ("kimi", "<|tool_call_begin|>a b:0<|tool_call_argument_begin|>{}",
     "<|tool_call_begin|>a b:0<|tool_call_argument_begin|>{}", []),
    ("lfm2", "<|tool_call_start|>[get_weather(city='Ro", "", [("get_weather", '{"city": "\'Ro')]),
    ("lfm2", "<|tool_call_start|>[get_weather('Rome')]<|tool_call_end|>", "'Rome')]<|tool_call_end|>",
     [("get_weather", "{")]),
    ("lfm2", "<|tool_call_start|>[1, 2]<|tool_call_end|>", "<|tool_call_start|>[1, 2]<|tool_call_end|>", []),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Ro', "", [("get_weather", '{"city": "<|\\"|>Ro')]),
    ("gemma4", "<|tool_call>get_weather{}", "<|tool_call>get_weather{}", []),
    ("hermes", '{"name": "get_weather", "city": "Rome"}', '{"name": "get_weather", "city": "Rome"}', []),
    ("hermes", '{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
    ("hermes", '```json\n{"name": "Rome"}\n```', '```json\n{"name": "Rome"}\n```', []),
    ("hermes", "```python\nprint(1)\n```", "```python\nprint(1)\n```", []),
    ("pythonic", "[1] Rome is old.", "[1] Rome is old.", []),
    ("pythonic", "[get_weather(days=1), other(x=2)]", ", other(x=2)]", [("get_weather", '{"days": 1}')]),
    ("command", "<|START_ACTION|>[]<|END_ACTION|>", "<|START_ACTION|>[]<|END_ACTION|>", []),
]  # fmt: skip


# Unknown names, a repeated parameter, all kinds of letters, markup in texts.
MARKUP = "</parameter ><tool_call>\n{</function> [TOOL_CALLS] <|tool_call_end|> ```\n</arg_key>"
UNICODE = "Ω 👩‍👩‍👧 \u202e \u2028 \x7f é"
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
NESTED = {"a": {"name": "x", "arguments": {}}}
IN_MINIMAX = MARKUP.replace("</parameter >", "")
HOSTILE: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("qwen", QWEN.replace("get_weather", "other"), "", [("other", ROME)]),
    ("qwen", QWEN.replace("days>\n2", "city>\nOslo"), "", [("get_weather", OSLO)]),
    ("qwen", QWEN.replace("Rome", MARKUP), "", [("get_weather", ROME | {"city": MARKUP})]),
    ("qwen", QWEN.replace("Rome", UNICODE), "", [("get_weather", ROME | {"city": UNICODE})]),
    ("qwen", QWEN.replace("=city", '=Ω "x"'), "", [("get_weather", {'Ω "x"': "Rome", "days": 2})]),
    ("glm", GLM.replace("days", "city").replace("2", "Oslo"), "", [("get_weather", OSLO)]),
    ("glm", GLM.replace("Rome", MARKUP), "", [("get_weather", ROME | {"city": MARKUP})]),
    ("minimax", f"<minimax:tool_call>{INVOKE.replace('Rome', IN_MINIMAX)}</minimax:tool_call>", "",
     [("get_weather", ROME | {"city": IN_MINIMAX})]),
    ("hermes", HERMES.format("other", json.dumps(NESTED)), "", [("other", NESTED)]),
    ("hermes", HERMES.format("get_weather", json.dumps({"city": MARKUP})), "",
     [("get_weather", {"city": MARKUP})]),
    ("hermes", HERMES.format("get_weather", '{"city": "Rome", "city": "Oslo"}'), "", [("get_weather", OSLO)]),
    ("hermes", HERMES.format('empty", "name": "other', "{}"), "", [("empty", {})]),
    ("gemma4", f'<|tool_call>call:get_weather{{city:<|"|>{MARKUP}<|"|>}}<tool_call|>', "",
     [("get_weather", {"city": MARKUP})]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{json.dumps({'city': MARKUP})}", "",
     [("get_weather", {"city": MARKUP})]),
    ("harmony", f"<|channel|>commentary to=functions.other<|message|>{json.dumps(ROME)}<|call|>", "",
     [("other", ROME)]),
    ("llama", f'{{"name": "get_weather", "parameters": {json.dumps({"city": MARKUP})}}}', "",
     [("get_weather", {"city": MARKUP})]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "emitted", "text", "calls"), [*PUBLISHED, *HOSTILE])
def test_published_examples(form: str, emitted: str, text: str, calls: list[tuple[str, Any]]):
    parts = read(form, [emitted])
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(parts)] == calls
    assert text_of(parts) == text
    assert read(form, list(emitted)) == parts
    for end in range(len(emitted)):  # a truncated answer has the same calls, as far as it goes
        cut = calls_of(read(form, [emitted[:end]]))
        assert [name for name, _ in cut] == [name for name, _ in calls][: len(cut)]
        for (_, arguments), (_, whole) in zip(cut, calls_of(parts), strict=False):
            assert arguments == whole or not arguments or not is_json(arguments)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("form", "emitted", "text", "calls"), BROKEN)
def test_truncated_answers(form: str, emitted: str, text: str, calls: list[tuple[str, str]]):
    for pieces in ([emitted], list(emitted)):
        parts = read(form, pieces)
        assert calls_of(parts) == calls
        assert text_of(parts) == text


# Objects with unbalanced braces, as small models write them, and the text around them.
BRACES = [
    f"{opening}{inner}{closing}"
    for arguments in ('{"city": "Rome", "days": 2}', '{{"city": "Rome", "days": 2}}')
    for inner in (
        f'"name": "get_weather", "arguments": {arguments}',
        f'"arguments": {arguments}, "name": "get_weather"',
        f'"type": "function", "name": "get_weather", "parameters": {arguments}',
    )
    for opening in ("{", "{{", "{{{", "{ {", "{\n  {\n")
    for closing in ("", "}", "}}", "}}}", "} }", "\n}\n}", "}}}}}")
]
PLACES = {
    "the whole answer": "{}",
    "tags": "<tool_call>\n{}\n</tool_call>",
    "a fenced block": "```json\n{}\n```",
    "a line": "I look it up.\n{}",
    "two in tags": "<tool_call>{}</tool_call>\n<tool_call>{}</tool_call>",
}


@pytest.mark.parametrize("place", PLACES)
def test_surplus_and_missing_braces_lose_no_call(place: str) -> None:
    before = "I look it up." if place == "a line" else ""
    for call in BRACES:
        emitted = PLACES[place].replace("{}", call)
        parts = read("hermes", [emitted])
        found = [(name, json.loads(arguments)) for name, arguments in calls_of(parts)]
        assert found == [("get_weather", ROME)] * PLACES[place].count("{}"), emitted
        assert text_of(parts) == before, emitted
        assert read("hermes", list(emitted)) == parts


@pytest.mark.parametrize(
    "text",
    [
        "{{ user.name }} and {{ user.city }}",
        '{{"name": "other", "arguments": {}}}',
        '{{"name": "get_weather"}}',
        '{{"city": "Rome"}}',
        "A set:\n{1, 2, {3}}\n{{}}\n{",
        'int main() {\n{\n  puts("name");\n}\n}',
        '\n{"name": "get_weather", "city": {}}\n{{"name": {"name": "get_weather"}}}',
        "```c\nstruct a {\n{ int b; }\n};\n```",
        "{{{{{{ five and one",
        'fn f() {{ "name" }}',
    ],
)
@pytest.mark.parametrize("before", ["", "Text.\n", "Text "])
def test_ordinary_braces_stay_text(before: str, text: str) -> None:
    for pieces in ([before + text], list(before + text)):
        parts = read("hermes", pieces)
        assert calls_of(parts) == []
        assert text_of(parts) == before + text


@pytest.mark.parametrize("repeated", ["```json\n{}\n```", "\n{}", "Called:\n```\n{}\n```\nDone."])
def test_call_that_is_repeated_for_the_reader_is_one(repeated: str) -> None:
    call = f'{{"name": "get_weather", "arguments": {J}}}'
    emitted = f"<tool_call>\n{call}\n</tool_call>\n{repeated.replace('{}', call)}"
    parts = read("hermes", [emitted])
    assert calls_of(parts) == [("get_weather", J)]
    assert text_of(parts).strip() == repeated.replace("{}", call).strip()
    assert read("hermes", list(emitted)) == parts


def test_ids_that_a_model_gives_are_kept():
    section = f"<|tool_calls_section_begin|>{KIMI.format(0, J)}{KIMI.format(1, J)}{KIMI.format(1, J)}"
    starts = [part.id for part in read("kimi", [section]) if isinstance(part, CallStart)]
    assert starts == ["functions.get_weather:0", "functions.get_weather:1", "id0"], "each is distinct"


def test_long_strings_arrive_while_they_are_written():
    parser = parser_of(FORM["qwen"], TOOLS, lambda: "id0")
    parser.push("<tool_call>\n<function=write-file>\n<parameter=text>\n")
    assert parser.push('a "b"\n') == [CallArguments(0, 'a \\"b\\"')], "the line end may be the form's"
    assert parser.push("c") == [CallArguments(0, "\\nc")]


EXAMPLES = [(form, emitted) for form, emitted, *_ in (*PUBLISHED, *HOSTILE, *BROKEN)]
FRAGMENTS = {name: [emitted for form, emitted in EXAMPLES if form == name] for name in FORM}


@pytest.mark.parametrize(
    ("form", "emitted", "n_ends"),
    [pytest.param(*each, n, marks=pytest.mark.slow if n else ()) for each in EXAMPLES for n in (0, 8)],
)
def test_a_stream_that_is_cut_at_any_letter_is_the_whole(form: str, emitted: str, n_ends: int):
    """Divide the answer, and some shorter beginnings of it, at each letter."""
    ends = range(2, len(emitted), 1 + len(emitted) // n_ends) if n_ends else [len(emitted)]
    for text in (emitted[:end] for end in ends):
        whole = read(form, [text])
        for at in range(1, len(text)):
            assert read(form, [text[:at], text[at:]]) == whole, (text[:at], text[at:])


COMMON = [*"{}[]()\":,\\ \n;<>|='aé`", "get_weather", "city", '"name"', '"arguments": {', "null", "json\n"]


def test_unfinished_long_quote_is_not_a_short_one() -> None:
    """Compare pieces with the whole: the quote `<|"|>` contains a `"`, which must not end the string."""
    text = '<|tool_call>call:get_weather{city:<|"|>Rome"}'  # the string has no end
    whole = read("gemma4", [text])
    for at in range(1, len(text)):
        assert read("gemma4", [text[:at], text[at:]]) == whole


@pytest.mark.parametrize("form", FORM)
def test_any_text_in_any_pieces_gives_the_same_parts(form: str):
    """Mix words, marks, examples and halves of examples in any order."""
    halves = [
        part for text in FRAGMENTS[form] for part in (text, text[: len(text) // 2], text[len(text) // 2 :])
    ]
    marks = [*FORM[form].opening, *FORM[form].marks]
    words = st.sampled_from([*COMMON, *halves, *marks, *(mark[:-2] for mark in marks if len(mark) > 3)])

    @settings(max_examples=60)
    @given(st.lists(words, max_size=12), st.data())
    def check(found: list[str], data: st.DataObject) -> None:
        assert_pieces_do_not_matter(form, "".join(found), TOOLS, data)

    check()


def hostile(n: int) -> list[str]:
    return [
        *(letter * n for letter in '{["\\a\n<`'),
        '{"a":' * (n // 5), '{"name": "get_weather", "arguments": ' + "[" * n,
        '{"arguments": {"a": "' + "x" * n, '{"name": "' + "x" * n,
    ]  # fmt: skip


def heads(form: str) -> list[str]:
    """Return the possible beginnings of calls, and an unfinished call."""
    return ["", *FORM[form].opening, *(text[: len(text) * 2 // 3] for text in FRAGMENTS[form][:1])]


@pytest.mark.parametrize("form", FORM)
def test_parser_buffers_a_bounded_text(form: str):
    """Bound the buffered text, so that the time for a piece depends only on its own length."""
    for head, text in itertools.product(heads(form), hostile(2000)):
        parser = parser_of(FORM[form], TOOLS, lambda: "id")
        whole = head + text
        for i in range(0, len(whole), 20):
            parser.push(whole[i : i + 20])
            assert parser.n_left < MAX_HEAD + 50


@pytest.mark.parametrize(
    "form", quick_are(("hermes",), ["harmony", "hermes", "qwen", "kimi", "lfm2", "gemma4"])
)
def test_hostile_text_in_one_piece(form: str):
    """Parse 30,000 brackets and the like; the watchdog catches quadratic time."""
    begun = time.process_time()
    for head, text in itertools.product(heads(form), hostile(30_000)):
        parts = read(form, [head + text])
        n = sum(len(part.text) for part in parts if isinstance(part, Text | CallArguments))
        assert n > len(text) // 2 or text.isspace()
    for mark in FORM[form].opening:
        read(form, [mark * (30_000 // len(mark))])
    assert time.process_time() - begun < 100


def test_names_and_heads_are_bounded():
    name = "a" * MAX_NAME
    assert calls_of(read("glm", [f"<tool_call>{name}</tool_call>"])) == [(name, "{}")]
    text = f"<tool_call>a{name}</tool_call>"
    assert read("glm", [text]) == [Text(text)]
    for form, before, after in (
        ("hermes", '<tool_call>{"name": "', '", "arguments": {}}</tool_call>'),
        ("llama", '<|python_tag|>{"parameters": {}, "name": "', '"}'),
    ):
        assert calls_of(read(form, [f"{before}{name}{after}"])) == [(name, "{}")]
        assert read(form, [f"{before}a{name}{after}"]) == [Text(f"{before}a{name}{after}")]
    message = "<|channel|>commentary to=functions.{}<|message|>{{}}<|call|>"
    assert calls_of(read("harmony", [message.format(name)])) == [(name, "{}")]
    assert read("harmony", [message.format(f"a{name}")]) == [Text("{}")]
    head = "x" * (MAX_HEAD + 1)
    parts = read("qwen", [f"<function=empty><parameter={head}>1</parameter></function>"])
    assert calls_of(parts) == [("empty", "{")]
    assert text_of(parts) == f"<parameter={head}>1</parameter></function>"


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"enum": ["a", 1]}, {"string", "number", "integer"}),
        ({"const": None}, {"null"}),
        ({"$ref": "#/$defs/a"}, {"boolean"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}, {"string", "boolean"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/round"}, TYPES),
        ({"$ref": "http://elsewhere"}, TYPES),
        ({"type": "made up"}, TYPES),
        ({"type": [{}]}, TYPES),
        (True, TYPES),
        (None, TYPES),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]):
    again = [{"$ref": "#/$defs/round"}] * 10
    assert types_of(schema, {"$defs": {"a": {"type": "boolean"}, "round": {"anyOf": again}}}) == types


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("[1, 2]", [1, 2]),
        ("{'a': (True, None), \"b\": -1.5e3,}", {"a": [True, None], "b": -1500.0}),
        (r"'it\'s \d \u00e9 \n'", "it's \\d é \n"),
        ("'two\nlines'", "two\nlines"),
        ("{a:<escape>{},[<escape>,b-c:[]}", {"a": "{},[", "b-c": []}),
        (r"'\ud800'", "\ufffd"),
    ],
)
def test_literals(written: str, value: Any):
    found = as_json(written)
    assert found is not None
    assert json.loads(found) == value


@pytest.mark.parametrize(
    "text", ["", "Rome", "1 2", "[1", "a:1", "NaN", "f(x)", "'a", "{1: 2}", "x" * 9, "[" * 9999]
)
def test_invalid_literals(text: str):
    assert as_json(text) is None


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_the_template_says_the_form(name: str, template: str):
    assert form_of(template).name == name


def test_every_form_is_tried():
    assert {form for form, *_ in PUBLISHED} == set(FORM) == {name for name, _ in TEMPLATES}
