"""Calls and their results, rendered again by templates like the ones of well-known models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hotset.errors import InvalidRequestError, TokenizerError
from hotset.generation import checked_messages
from hotset.text.chat import ChatTemplate
from hotset.text.messages import rendered

# Like Qwen 2.5 and Hermes: calls as JSON of the object, results as a user's turn.
QWEN = """\
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' }}{% if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Like Llama 3.1: one call in a turn, "parameters", a separate role for results.
LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
{%- elif message.role == "tool" or message.role == "ipython" %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content + '<|eot_id|>' }}
{%- endif %}{%- endfor %}"""

# Like Mistral: a list, ids of nine letters and digits, an "else" that requires alternating roles.
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message["role"] == "user" %}{{- "[INST] " + message["content"] + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function|tojson %}{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}
{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
{%- endfor %}
{%- elif message["role"] == "assistant" %}{{- " " + message["content"] + eos_token }}
{%- elif message["role"] == "tool" %}
{{- '[TOOL_RESULTS] {"content": ' + message.content|tojson + ', "name": "' + message.name + '"' }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}"""

# Like DeepSeek: the text of the arguments between other texts.
DEEPSEEK = """\
{%- for message in messages %}
{%- if message.tool_calls %}{% for call in message['tool_calls'] %}
{{- '```json' + '\\n' + call['function']['arguments'] + '\\n```' }}{% endfor %}
{%- else %}{{- message.content }}{% endif %}{% endfor %}"""

# Like templates without tools and calls, which require alternating roles.
PLAIN = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<' + message.role + '>' + message.content }}
{%- endfor %}"""

# Like LFM2: tools, results, and no calls.
LFM2 = """\
{%- if tools %}{{ '<|tool_list_start|>' + tools|tojson }}{% endif %}
{%- for message in messages %}{{- '<' + message.role + '>' + message.content }}{%- endfor %}"""

# Like Phi-4-mini: tools as a text of the system message.
PHI = """\
{%- for message in messages %}{{- '<' + message.role + '>' + message.content }}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{- '<|tool|>' + message['tools'] + '<|/tool|>' }}{%- endif %}{%- endfor %}"""

# Like DeepSeek V3 and R1: calls only in messages without text, and no tools.
DEEPSEEK_V3 = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['content'] is none -%}
{%- for tool in message['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' }}
{{- tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}
{%- else %}{{- '<' + message['role'] + '>' + message['content'] }}{%- endif %}{%- endfor %}"""

ARGUMENTS = {"city": "Köln", "days": [1, 2], "note": 'say "hi"'}


def conversation(arguments: Any = None, n: int = 1) -> list[dict[str, Any]]:
    """Return a question, one or several calls as OpenAI's clients send them back, and their results."""
    arguments = json.dumps(ARGUMENTS) if arguments is None else arguments
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": f"f{i}", "arguments": arguments}}
        for i in range(n)
    ]
    results = [{"role": "tool", "tool_call_id": f"abcdefgh{i}", "content": '{"t": 21}'} for i in range(n)]
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
    ]


TOOL = {"type": "function", "function": {"name": "f0", "parameters": {"type": "object"}}}


def render(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    with ChatTemplate(source, "<s>", "</s>") as template:
        return rendered(template, checked_messages(messages), tools=tools)


@pytest.mark.parametrize("given", ["text", "object"])
def test_qwen(given: str):
    arguments = ARGUMENTS if given == "object" else None
    text = render(QWEN, conversation(arguments, n=2))
    as_json = '{"city": "Köln", "days": [1, 2], "note": "say \\"hi\\""}'
    assert text == (
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant"
        f'\n<tool_call>\n{{"name": "f0", "arguments": {as_json}}}\n</tool_call>'
        f'\n<tool_call>\n{{"name": "f1", "arguments": {as_json}}}\n</tool_call><|im_end|>\n'
        '<|im_start|>user\n<tool_response>\n{"t": 21}\n</tool_response><|im_end|>\n'
        * 1
        + '<|im_start|>user\n<tool_response>\n{"t": 21}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_llama():
    text = render(LLAMA, conversation())
    assert (
        '{"name": "f0", "parameters": {"city": "Köln", "days": [1, 2], "note": "say \\"hi\\""}}<|eot_id|>'
        in text
    )
    assert '<|start_header_id|>ipython<|end_header_id|>\n\n"{\\"t\\": 21}"<|eot_id|>' in text


def test_mistral():
    text = render(MISTRAL, conversation(n=2))
    assert text.startswith(
        '<s>[INST] Weather?[/INST][TOOL_CALLS] [{"name": "f0", "arguments": {"city": "Köln"'
    )
    assert '"id": "abcdefgh1"}]</s>' in text
    assert text.endswith('"name": "f1", "call_id": "abcdefgh1"}[/TOOL_RESULTS]')


def test_a_template_that_wants_the_text_gets_it():
    assert render(DEEPSEEK, conversation()) == f'Weather?```json\n{json.dumps(ARGUMENTS)}\n```{{"t": 21}}'
    assert '"Köln"' in render(DEEPSEEK, conversation(ARGUMENTS))


def test_arguments_other_than_objects_stay_unchanged():
    assert '"arguments": "{\\"a\\": tru"}' in render(QWEN, conversation('{"a": tru'))
    assert '"arguments": {}}' in render(QWEN, conversation(""))


def test_messages_without_calls_are_as_they_were():
    for empty in (None, []):
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Ho", "tool_calls": empty},
        ]
        assert checked_messages(messages)[1] == {"role": "assistant", "content": "Ho"}
    assert render(QWEN, [{"role": "user", "content": "Hi"}]).startswith("<|im_start|>user\nHi<|im_end|>")


def test_a_template_that_fails_for_another_reason_says_that():
    refusing = "{% if messages|length > 2 %}{{ raise_exception('no more than two') }}{% endif %}"
    with pytest.raises(TokenizerError, match="no more than two"):
        render(refusing, conversation())


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("x", "the tool_calls of message 0 must be a list"),
        ([3], "call 0 of message 0 must be an object"),
        ([{"function": {"arguments": "{}"}}], 'that has a "name"'),
        ([{"function": {"name": "f", "arguments": 3}}], "arguments of call 0 of message 0 must be a text"),
    ],
)
def test_invalid_calls_are_errors(calls: Any, message: str):
    with pytest.raises(InvalidRequestError, match=message):
        checked_messages([{"role": "assistant", "content": None, "tool_calls": calls}])


def test_a_message_without_content_needs_calls():
    with pytest.raises(InvalidRequestError, match="the content of message 0 must be text"):
        checked_messages([{"role": "assistant", "content": None}])


def test_a_template_that_knows_no_tools_gets_them_as_text():
    messages = [*conversation(n=2), {"role": "user", "content": "And?"}]
    question, answer, results = (
        render(PLAIN, messages, [TOOL]).replace("<assistant>", "<user>").split("<user>")[1:]
    )
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in question
    assert (
        '<tool_call>\n{"name": "the_name", "arguments": {"an_argument": "its value"}}\n</tool_call>'
        in question
    )
    assert question.endswith("Weather?")
    call = f'{{"name": "f0", "arguments": {json.dumps(ARGUMENTS, ensure_ascii=False)}}}'
    assert answer.startswith(f"<tool_call>\n{call}\n</tool_call>\n<tool_call>\n")
    result = '<tool_response>\n{"t": 21}\n</tool_response>'
    assert results == f"{result}\n{result}\nAnd?"
    assert render(PLAIN, [{"role": "user", "content": "Hi"}]) == "<user>Hi"


def test_calls_that_a_template_leaves_out_are_text_in_its_form():
    messages = conversation({"city": "Köln", "ok": True}, n=2)
    messages[1]["content"] = "Let me see."
    calls = "[f0(city='Köln', ok=True), f1(city='Köln', ok=True)]"
    text = render(LFM2, messages, [TOOL])
    assert f"<assistant>Let me see.\n<|tool_call_start|>{calls}<|tool_call_end|><tool>" in text
    text = render(PHI, messages, [TOOL])
    schema = '[{"name": "f0", "parameters": {"type": "object"}}]'
    assert text.startswith("<system>")
    assert f"<|tool|>{schema}<|/tool|><user>Weather?" in text
    assert '<|tool_call|>[{"name": "f0", "arguments": {"city": "Köln", "ok": true}}, ' in text
    system = {"role": "system", "content": "Be brief."}
    assert render(PHI, [system, *messages], [TOOL]).startswith(f"<system>Be brief.<|tool|>{schema}")


def test_calls_dropped_next_to_a_text_replace_it():
    messages = conversation()
    for content in (None, "Let me see."):
        messages[1]["content"] = content
        call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f0\n```json\n{json.dumps(ARGUMENTS)}\n```"
        text = render(DEEPSEEK_V3, messages, [TOOL])
        assert f"{call}<｜tool▁call▁end｜><tool>" in text
        assert "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>the_name\n```json" in text


def test_tools_have_the_name_that_smollm3_gives_them():
    assert (
        render("{% if xml_tools %}{{ xml_tools[0].function.name }}{% endif %}", conversation(), [TOOL])
        == "f0"
    )
