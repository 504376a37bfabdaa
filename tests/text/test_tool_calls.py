"""Every form of tool calls: published examples, any cut of any text, what breaks off, and hostile text.

The examples are those of model cards and of the vendors' documentation, with the names of the tools below.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.text.parts import CallArguments, CallStart, Part, Reasoning, Text, merged
from hotset.text.tool_calls import FORMS, form_of, parser_of
from hotset.text.tool_calls.reader import MAX_HEAD, MAX_NAME
from hotset.text.tool_calls.values import TYPES, as_json, types_of

FORM = {form.name: form for form in FORMS}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "detailed": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "integer"}},
        "unit": {"type": ["string", "null"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
}
WRITE = {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
TOOLS: dict[str, Mapping[str, Any]] = {"get_weather": WEATHER, "write-file": WRITE, "empty": {}}
Found = tuple[str, list[tuple[str, Any]]]


def read(form: str, pieces: Sequence[str]) -> list[Part]:
    numbers = itertools.count()
    parser = parser_of(FORM[form], TOOLS, lambda: f"id{next(numbers)}")
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.finish()
    assert parser.finish() == []
    return merged(parts)


def calls_of(parts: list[Part]) -> list[tuple[str, str]]:
    """Names and arguments, as text."""
    names = {part.call: part.name for part in parts if isinstance(part, CallStart)}
    texts = dict.fromkeys(names, "")
    for part in parts:
        if isinstance(part, CallArguments):
            texts[part.call] += part.text
    return [(names[n], texts[n]) for n in names]


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


ROME = {"city": "Rome", "days": 2}
OSLO = {"city": "Oslo"}
CODE = 'if a < b:\n    print("</tool> {x}")\n\n'
QWEN = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
INVOKE = (
    '<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n'
)
DSML = (
    '<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.get_weather:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
J = json.dumps(ROME)
PUBLISHED: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("qwen", QWEN, "", [("get_weather", ROME)]),
    (
        "qwen",
        f"I look.\n\n{QWEN}\n<tool_call>\n<function=empty>\n</function>\n</tool_call>",
        "I look.",
        [("get_weather", ROME), ("empty", {})],
    ),
    (  # a string is as it stands, one line end on either side apart; the others are JSON
        "qwen",
        "<tool_call>\n<function=write-file>\n<parameter=path>\n2\n</parameter>\n<parameter=text>\n"
        f"{CODE}\n</parameter>\n</function>\n</tool_call>",
        "",
        [("write-file", {"path": "2", "text": CODE})],
    ),
    (
        "qwen",
        "<function=get_weather><parameter=detailed>True</parameter><parameter=hours>[1, 2]</parameter>"
        "<parameter=unit>null</parameter><parameter=place>{'lat': 1.5}</parameter>"
        "<parameter=days>many</parameter><parameter=other>x</parameter></function>",
        "",
        [
            (
                "get_weather",
                {"detailed": True, "hours": [1, 2], "unit": None, "place": {"lat": 1.5}, "days": "many",
                 "other": "x"},
            )
        ],
    ),
    ("qwen", f'<tool_call>\n{{"name": "get_weather", "arguments": {J}}}\n</tool_call>', "",
     [("get_weather", ROME)]),
    ("seed", QWEN.replace("tool_call>", "seed:tool_call>"), "", [("get_weather", ROME)]),
    (  # as its template writes it: a line end of the text is the text's
        "seed",
        "<seed:tool_call>\n<function=write-file>\n<parameter=path>a.py</parameter>\n<parameter=text>"
        f"{CODE}</parameter>\n</function>\n</seed:tool_call>",
        "",
        [("write-file", {"path": "a.py", "text": CODE})],
    ),
    ("glm", f"Sure.\n{GLM}\n{GLM}", "Sure.", [("get_weather", ROME)] * 2),
    ("glm", GLM.replace("\n", "") * 2, "", [("get_weather", ROME)] * 2),
    ("glm", "<tool_call>empty</tool_call>", "", [("empty", {})]),
    ("glm", '<tool_call>write-file\n<arg_key>text</arg_key>\n<arg_value>"\n</arg_value>\n</tool_call>', "",
     [("write-file", {"text": '"\n'})]),
    (
        "deepseek-v3",
        f"<｜tool▁calls▁begin｜>{V3.format(J)}\n{V3.format(json.dumps(OSLO))}<｜tool▁calls▁end｜>",
        "",
        [("get_weather", ROME), ("get_weather", OSLO)],
    ),
    (
        "deepseek-v3.1",
        f"Well.<｜tool▁calls▁begin｜>{V31.format(J)}{V31.format('{}')}<｜tool▁calls▁end｜>",
        "Well.",
        [("get_weather", ROME), ("get_weather", {})],
    ),
    (
        "deepseek-v3.2",
        f"Well.\n\n<｜DSML｜function_calls>\n{DSML}{DSML}</｜DSML｜function_calls>",
        "Well.",
        [("get_weather", ROME)] * 2,
    ),
    (
        "deepseek-v4",
        f"<｜DSML｜tool_calls>\n{DSML.replace(' string=', '  string=')}</｜DSML｜tool_calls>",
        "",
        [("get_weather", ROME)],
    ),
    (
        "kimi",
        f"<|tool_calls_section_begin|>{KIMI.format(0, J)}{KIMI.format(1, J)}<|tool_calls_section_end|>",
        "",
        [("get_weather", ROME)] * 2,
    ),
    (
        "lfm2",
        "<|tool_call_start|>[get_weather(city=\"Rome\", days=2), empty(), get_weather(city='Os\\'lo', "
        "detailed=True, hours=[1, 2,], unit=None, place={'lat': 1.5})]<|tool_call_end|>Checking.",
        "Checking.",
        [
            ("get_weather", ROME),
            ("empty", {}),
            (
                "get_weather",
                {"city": "Os'lo", "detailed": True, "hours": [1, 2], "unit": None, "place": {"lat": 1.5}},
            ),
        ],
    ),
    (  # LFM2.5's template escapes nothing
        "lfm2",
        "<|tool_call_start|>[write-file(path='a.py', text='print(\"it\", 'is')\n')]<|tool_call_end|>",
        "",
        [("write-file", {"path": "a.py", "text": "print(\"it\", 'is')\n"})],
    ),
    (
        "lfm2",
        f'<|tool_call_start|>[{{"name": "get_weather", "arguments": {J}}}]<|tool_call_end|>',
        "",
        [("get_weather", ROME)],
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>'
        '<|tool_call>call:get_weather{hours:[1,2],place:{lat:1.5,<|"|>k<|"|>:<|"|>{"x"}<|"|>},unit:null}'
        "<tool_call|>",
        "",
        [
            ("get_weather", ROME),
            ("get_weather", {"hours": [1, 2], "place": {"lat": 1.5, "k": '{"x"}'}, "unit": None}),
        ],
    ),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Ro, {me<escape>,detailed:true}"
        "<end_function_call>",
        "",
        [("get_weather", {"city": "Ro, {me", "detailed": True})],
    ),
    ("minimax", f"Sure.\n<minimax:tool_call>\n{INVOKE}{INVOKE}</minimax:tool_call>", "Sure.",
     [("get_weather", ROME)] * 2),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {J}, "id": "D681PevKs"}}]', "",
     [("get_weather", ROME)]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{J}[TOOL_CALLS]empty[ARGS]{{}}", "",
     [("get_weather", ROME), ("empty", {})]),
    ("harmony", f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{J}<|call|>", "",
     [("get_weather", ROME)]),
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {J}}}\n</tool_call>', "",
     [("get_weather", ROME)]),
    ("hermes", f'{{"name": "get_weather", "arguments": {J}}}', "", [("get_weather", ROME)]),
    ("hermes", f'I call it.\n```json\n{{\n  "name": "get_weather",\n  "arguments": {J}\n}}\n```\nDone.',
     "I call it.\nDone.", [("get_weather", ROME)]),
    ("nemotron", f'<TOOLCALL>[{{"name": "get_weather", "arguments": {J}}}]</TOOLCALL>', "",
     [("get_weather", ROME)]),
    ("tool-calls", f'<tool_calls>\n{{"name": "get_weather", "arguments": {J}}}\n'
     f'{{"name": "empty", "arguments": {{}}}}\n</tool_calls>', "", [("get_weather", ROME), ("empty", {})]),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {J}}}]', "", [("get_weather", ROME)]),
    ("phi", f'<|tool_call|>[{{"name": "get_weather", "arguments": {J}}}]<|/tool_call|>', "",
     [("get_weather", ROME)]),
    ("phi", f'functools[{{"name": "get_weather", "arguments": {J}}}]', "", [("get_weather", ROME)]),
    (
        "command",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f"{J}}},\n    "
        '{"tool_call_id": "1", "tool_name": "empty", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [("get_weather", ROME), ("empty", {})],
    ),
    ("pythonic", "<|python_start|>[get_weather(city='Rome', days=2)]<|python_end|>", "",
     [("get_weather", ROME)]),
    ("pythonic", '[get_weather(city="Rome", days=2), empty()]', "", [("get_weather", ROME), ("empty", {})]),
    ("pythonic", "Sure.\n```tool_code\nget_weather(city='Rome', days=2)\n```", "Sure.",
     [("get_weather", ROME)]),
    ("llama", f'{{"name": "get_weather", "parameters": {J}}}', "", [("get_weather", ROME)]),
    ("llama", f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {J}}}', "",
     [("get_weather", ROME)]),
    ("json", f'```json\n[{{"name": "get_weather", "parameters": {J}}}]\n```', "", [("get_weather", ROME)]),
]  # fmt: skip

# What does not keep to the form: text stays text, and a call that breaks off has arguments that are no JSON.
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


# Names that no tool has, a parameter twice, letters of every kind, markup in texts.
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
    for end in range(len(emitted)):  # an answer that is cut off has the same calls, as far as it goes
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
def test_what_breaks_off(form: str, emitted: str, text: str, calls: list[tuple[str, str]]):
    for pieces in ([emitted], list(emitted)):
        parts = read(form, pieces)
        assert calls_of(parts) == calls
        assert text_of(parts) == text


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


@pytest.mark.parametrize(("form", "emitted"), EXAMPLES)
def test_a_stream_that_is_cut_at_any_letter_is_the_whole(form: str, emitted: str):
    """Of the answer, and of every answer that breaks off earlier."""
    for text in (emitted, *(emitted[:end] for end in range(2, len(emitted), 1 + len(emitted) // 8))):
        whole = read(form, [text])
        for at in range(1, len(text)):
            assert read(form, [text[:at], text[at:]]) == whole, (text[:at], text[at:])


COMMON = [*"{}[]()\":,\\ \n;<>|='aé`", "get_weather", "city", '"name"', '"arguments": {', "null", "json\n"]


@pytest.mark.parametrize("form", FORM)
def test_any_text_in_any_pieces_gives_the_same_parts(form: str):
    """Also halves of examples, in any order."""
    halves = [
        part for text in FRAGMENTS[form] for part in (text, text[: len(text) // 2], text[len(text) // 2 :])
    ]
    marks = [mark for mark in (*FORM[form].opening, *FORM[form].marks)]
    words = st.sampled_from([*COMMON, *halves, *marks, *(mark[:-2] for mark in marks if len(mark) > 3)])

    @settings(max_examples=60)
    @given(st.lists(words, max_size=12), st.data())
    def check(found: list[str], data: st.DataObject) -> None:
        text = "".join(found)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        whole = read(form, [text])
        assert read(form, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]) == whole
        assert read(form, list(text)) == whole
        if not any(isinstance(part, CallStart | Reasoning) for part in whole) and form != "harmony":
            assert text_of(whole) == text, "text was lost"

    check()


def hostile(n: int) -> list[str]:
    return [
        *(letter * n for letter in '{["\\a\n<`'),
        '{"a":' * (n // 5),
        '{"name": "get_weather", "arguments": ' + "[" * n,
        '{"arguments": {"a": "' + "x" * n,
        '{"name": "' + "x" * n,
    ]


def heads(form: str) -> list[str]:
    """What calls may begin with, and a call that has begun."""
    return ["", *FORM[form].opening, *(text[: len(text) * 2 // 3] for text in FRAGMENTS[form][:1])]


@pytest.mark.parametrize("form", FORM)
def test_what_a_parser_waits_with_is_bounded(form: str):
    """So that each piece takes time in proportion to itself, whatever came before."""
    for head, text in itertools.product(heads(form), hostile(2000)):
        parser = parser_of(FORM[form], TOOLS, lambda: "id")
        whole = head + text
        for i in range(0, len(whole), 20):
            parser.push(whole[i : i + 20])
            assert parser.n_left < MAX_HEAD + 50


@pytest.mark.parametrize("form", ["harmony", "hermes", "qwen", "kimi", "lfm2", "gemma4"])
def test_hostile_text_in_one_piece(form: str):
    """100,000 brackets and the like; the watchdog is for time that grows with the square."""
    begun = time.process_time()
    for head, text in itertools.product(heads(form), hostile(100_000)):
        parts = read(form, [head + text])
        n = sum(len(part.text) for part in parts if isinstance(part, Text | CallArguments))
        assert n > len(text) // 2 or text.isspace()
    for mark in FORM[form].opening:
        read(form, [mark * (100_000 // len(mark))])
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
def test_what_is_no_literal(text: str):
    assert as_json(text) is None


TEMPLATES = [
    ("harmony", "<|start|>assistant to=functions.<|channel|>commentary json<|message|>"),
    ("mistral", "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]"),
    ("deepseek-v3.2", "{% set dsml_token = '｜DSML｜' %}{{ '<' + dsml_token + 'function_calls>' }}"),
    ("deepseek-v4", "{% set dsml_token = '｜DSML｜' %}{{ '<' + dsml_token + 'tool_calls>' }}"),
    (
        "deepseek-v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>\\n```json",
    ),
    ("deepseek-v3.1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜><｜tool▁call▁end｜>"),
    ("kimi", "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>"),
    ("gemma4", "{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '}<tool_call|>' -}}"),
    ("functiongemma", "<start_function_call>call:"),
    ("lfm2", "List of tools: <|tool_list_start|>["),
    ("lfm2", 'system_prompt + "List of tools: ["'),
    ("minimax", "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}"),
    ("seed", "<seed:tool_call>\n<function=example>"),
    ("qwen", "<tool_call>\n<function=example_function_name>\n<parameter=p>"),
    ("glm", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>"),
    ("hermes", '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'),
    ("nemotron", "<TOOLCALL>[{{ tools }}]</TOOLCALL>"),
    ("tool-calls", "<tool_calls>\n{{ tools }}</tool_calls>"),
    ("granite", "respond only with <|tool_call|> followed by a JSON list of tools used."),
    ("phi", "<|tool|>{{ message['tools'] }}<|/tool|>"),
    ("command", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "x"}]'),
    ("pythonic", "<|python_start|>{{ tools }}"),
    ("pythonic", "[func_name1(params_name1=params_value1)]{{ tools }}"),
    ("llama", "<|python_tag|>{{ tools }}"),
    ("json", "{{ tools | tojson }}"),
    (
        "tool-calls",
        "within <tool_call></tool_call> XML tags: <tool_calls>[{{ tools }}]</tool_calls>",
    ),  # Apriel 1.5
    ("hermes", "{% for m in messages %}{{ m.content }}{% endfor %}"),  # the prompt asks for it
]


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_the_template_says_the_form(name: str, template: str):
    assert form_of(template).name == name


def test_every_form_is_tried():
    assert {form for form, *_ in PUBLISHED} == set(FORM) == {name for name, _ in TEMPLATES}
