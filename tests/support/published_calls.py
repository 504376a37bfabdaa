"""Tool calls in the formats that models' makers published, and chat templates with their instructions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "detailed": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "integer"}}, "unit": {"type": ["string", "null"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
}  # fmt: skip
WRITE = {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
TOOLS: dict[str, Mapping[str, Any]] = {"get_weather": WEATHER, "write-file": WRITE, "empty": {}}
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
    (  # a string is verbatim, except one line end on each side; other values are JSON
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
    (  # as its template writes it: line ends of the text are kept
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
    (  # LFM2.5's template does not escape
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
    ("hermes", "{% for m in messages %}{{ m.content }}{% endfor %}"),  # the prompt contains the instructions
]
