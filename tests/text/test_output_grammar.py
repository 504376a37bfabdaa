"""Answers that must call functions, and the text around an answer of a given form, on random logits."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from cases import quick_are, quick_if
from fake_backend import FakeBackend
from tiny_tokenizers import bpe_metadata

from hotset.engine.engine import Engine
from hotset.engine.sampler import SamplingParams
from hotset.errors import InvalidRequestError
from hotset.text import tool_calls
from hotset.text.constraint import Grammars
from hotset.text.output import OutputForm
from hotset.text.parts import CallArguments, CallStart, Part, ReasoningChunk, Text, merged
from hotset.text.tokenizer import Tokenizer, load_tokenizer

pytest.importorskip("llguidance")

MARKS = (*dict.fromkeys(mark for form in tool_calls.FORMS for mark in form.marks), "</think>")
FEW_MARKS = (
    "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>",
    "<|return|>", "<|call|>", "</think>",
)  # fmt: skip
ENDS = ("</think>", "<|end|>")  # marks that end reasoning
TEMPLATES = {
    "hermes": "<tool_call> </tool_call>", "hermes, thinking": "<tool_call> </tool_call> <think> </think>",
    "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "mistral, names": "[TOOL_CALLS] [ARGS]",
    "mistral, ids": "[TOOL_CALLS] [ARGS] [CALL_ID]", "harmony": "<|channel|> <|message|>",
    "deepseek-v3": "<｜tool▁call▁begin｜><｜tool▁sep｜>```json",
    "deepseek-v3.1": "<｜tool▁call▁begin｜><｜tool▁sep｜>", "deepseek-v3.2": "｜DSML｜ function_calls",
    "deepseek-v4": "｜DSML｜", "kimi": "<|tool_call_begin|><|tool_call_argument_begin|>",
    "gemma4": "<|tool_call> <tool_call|>", "functiongemma": "<start_function_call>",
    "lfm2": "<|tool_call_start|>", "minimax": "<minimax:tool_call>", "seed": "<seed:tool_call><function=",
    "qwen": "<tool_call><function= </think>", "glm": "<tool_call><arg_key>", "nemotron": "<TOOLCALL>",
    "tool-calls": "<tool_calls>", "granite": "<|tool_call|>", "phi": "<|tool|><|/tool|>",
    "command": '<|START_ACTION|>"tool_name"', "pythonic": "tool_code", "json": "tools",
}  # fmt: skip
CITY = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "hours": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
    },
    "required": ["city"], "additionalProperties": False, "$defs": {"city": {"enum": ["Rome", "Köln"]}},
}  # fmt: skip
UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"],
        "additionalProperties": False}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "set-unit", "parameters": UNIT}},
]
SCHEMAS = {"get_weather": CITY, "set-unit": UNIT}


@cache
def vocabulary(special: bool, marks: tuple[str, ...] = MARKS) -> tuple[Tokenizer, Grammars]:
    """Return a vocabulary whose marks are special tokens, or one that spells them."""
    tokens = bpe_metadata()["tokenizer.ggml.tokens"]
    types = [1] * (len(tokens) - 4) + [3, 3, 3, 4]
    if special:
        tokens, types = [*tokens, *marks], types + [3] * len(marks)
    tokenizer = load_tokenizer(bpe_metadata(tokens=tokens, token_type=np.array(types, np.int32)))
    return tokenizer, Grammars(tokenizer)


def ending(tokenizer: Tokenizer) -> dict[int, float]:
    """Return a bias towards the end of reasoning, since a random model would think for long."""
    return {tokenizer.vocabulary[mark]: 9.0 for mark in ENDS if mark in tokenizer.vocabulary}


def answer(
    form: OutputForm, grammars: Grammars, prompt: str, params: SamplingParams, *, calls: bool
) -> tuple[list[Part], str | None]:
    """Return the parts of an answer of random logits, and the reason of its end."""
    tokenizer = grammars.tokenizer
    assert params.form
    rule = grammars.constraint(*params.form, form.around(prompt, calls=calls))
    engine = Engine(FakeBackend(n_vocab=tokenizer.n_vocab), 2048)
    ids = tokenizer.encode("Hello")
    sequence = engine.prepare(ids, params, stop_ids=tokenizer.stop_ids, constraint=rule)
    engine.enqueue(sequence)
    while engine.has_work:
        engine.step()
    assert sequence.error is None
    decoder = tokenizer.stream(skip_special=True, shown=form.shown_ids)
    parser = form.parser(prompt, tools=SCHEMAS if calls else ())
    parts = []
    for id in sequence.generated:
        if id not in sequence.stop_ids:
            parts += parser.push(decoder.push(id))
    return merged(parts + parser.push(decoder.flush()) + parser.finish()), sequence.finish_reason


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    """Names and arguments."""
    text: dict[int, str] = {}
    names: dict[int, str] = {}
    for part in parts:
        if isinstance(part, CallStart):
            names[part.call] = part.name
        elif isinstance(part, CallArguments):
            text[part.call] = text.get(part.call, "") + part.text
    return [(names[n], json.loads(text[n])) for n in names]


# Harmony's marks are tokens in every vocabulary, and a random model does not spell the end of its reasoning.
@pytest.mark.parametrize(
    ("name", "special", "seed"),
    quick_if(
        lambda name, special, seed: special and seed == 0,
        [n for n in TEMPLATES if n != "harmony"],
        [True, False],
        range(3),
    )
    + quick_if(lambda name, special, seed: seed == 0, ["harmony"], [True], range(3)),
)
def test_a_required_call_is_one_of_the_tools(name: str, special: bool, seed: int):
    tokenizer, grammars = vocabulary(special)
    form = OutputForm.of(TEMPLATES[name], tokenizer)
    grammar = form.calls_grammar(TOOLS, parallel=seed % 2 == 0)
    params = SamplingParams(seed=seed, grammar=grammar, max_tokens=1500, logit_bias=ending(tokenizer))
    parts, reason = answer(form, grammars, "assistant\n", params, calls=True)
    assert reason == "stop"
    called = calls_of(parts)
    assert called
    assert len(called) == 1 or seed % 2 == 0
    for function, arguments in called:
        jsonschema.validate(arguments, SCHEMAS[function])
    assert not any(isinstance(part, Text) for part in parts)


@pytest.mark.parametrize(("name", "seed"), quick_if(lambda name, seed: seed == 0, TEMPLATES, range(2)))
def test_a_named_call_is_that_one(name: str, seed: int):
    tokenizer, grammars = vocabulary(True)
    form = OutputForm.of(TEMPLATES[name], tokenizer)
    grammar = form.calls_grammar(TOOLS, name="set-unit")
    params = SamplingParams(seed=seed, grammar=grammar, max_tokens=1500, logit_bias=ending(tokenizer))
    parts, _ = answer(form, grammars, "assistant\n", params, calls=True)
    ((called, arguments),) = calls_of(parts)
    assert called == "set-unit"
    jsonschema.validate(arguments, UNIT)


@pytest.mark.parametrize(
    ("template", "prompt", "thinks"),
    [
        ("</think>", "assistant\n<think>\n", {True}),
        ("</think>", "assistant\n", {True, False}),
        ("<|channel|> <|message|>", "<|start|>assistant", {True, False}),
        ("<|im_start|>", "assistant\n", {False}),
    ],
)
def test_reasoning_may_come_before_an_answer_of_a_given_form(template: str, prompt: str, thinks: set[bool]):
    tokenizer, grammars = vocabulary(True, FEW_MARKS)
    form = OutputForm.of(template, tokenizer)
    found = set()
    for seed in range(12):
        params = SamplingParams(
            seed=seed, json_schema={"enum": ["yes", "no"]}, max_tokens=900, top_k=0, min_p=0.0,
            temperature=2.0, logit_bias=ending(tokenizer),
        )  # fmt: skip
        parts, reason = answer(form, grammars, prompt, params, calls=False)
        assert reason == "stop"
        assert "".join(part.text for part in parts if isinstance(part, Text)) in ('"yes"', '"no"')
        found.add(any(isinstance(part, ReasoningChunk) for part in parts))
    assert found <= thinks
    assert True in found or True not in thinks


def test_the_end_of_reasoning_may_be_spelled_or_a_token():
    """Accept both forms, as the vocabulary has them: token by token, without sampling."""
    for special in (True, False):
        tokenizer, grammars = vocabulary(special)
        form = OutputForm.of("</think>", tokenizer)
        rule = grammars.constraint("regex", "yes|no", form.around("<think>"))
        text = "I </b> think.\n</think>\n\nyes"
        for id in tokenizer.encode(text, add_special=False, parse_special=True):
            mask = np.unpackbits(rule.mask().bits, bitorder="little")
            assert mask[id], tokenizer.token_bytes(id)
            rule.accept(id)
        assert rule.finished


TEXT_TOOL: dict[str, Any] = {
    "name": "f",
    "parameters": {
        "properties": {
            "n": {"type": "integer"}, "text": {"type": "string"}, "on": {"type": "boolean"},
            "kind": {"enum": ["a", "b"]},
        },
        "required": ["text"],
    },
}  # fmt: skip
TEXT = 'x </f> {"y"}\n\nz'
WRITTEN = [
    (
        "qwen",
        f"<tool_call>\n<function=f>\n<parameter=text>\n{TEXT}\n</parameter>\n<parameter=on>\ntrue\n"
        "</parameter>\n</function>\n</tool_call>",
        {"text": TEXT, "on": True},
    ),
    (
        "glm",
        f"<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n<arg_key>text</arg_key>\n<arg_value>"
        f"{TEXT}</arg_value>\n</tool_call>",
        {"n": 1, "text": TEXT},
    ),
    (
        "glm",
        f"<tool_call>f<arg_key>text</arg_key><arg_value>{TEXT}</arg_value><arg_key>kind</arg_key><arg_value>b"
        "</arg_value></tool_call>",
        {"text": TEXT, "kind": "b"},
    ),
    (
        "deepseek-v3.2",
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="false">1'
        f'</｜DSML｜parameter>\n<｜DSML｜parameter name="text" string="true">{TEXT}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        {"n": 1, "text": TEXT},
    ),
    (
        "minimax",
        f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">{TEXT}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        {"text": TEXT},
    ),
    (
        "gemma4",
        f'<|tool_call>call:f{{n:1,text:<|"|>{TEXT}<|"|>,kind:<|"|>a<|"|>}}<tool_call|>',
        {"n": 1, "text": TEXT, "kind": "a"},
    ),
    (
        "functiongemma",
        f"<start_function_call>call:f{{text:<escape>{TEXT}<escape>}}<end_function_call>",
        {"text": TEXT},
    ),
    ("lfm2", '<|tool_call_start|>[f(text="x", on=true), f(n=1, text="y")]<|tool_call_end|>',
     {"text": "x", "on": True}),
    ("pythonic", '[f(n=1, text="x")]', {"n": 1, "text": "x"}),
    ("deepseek-v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
     '{"text": "x"}\n```'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", {"text": "x"}),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
     '{"text": "x"}<|tool_call_end|><|tool_calls_section_end|>', {"text": "x"}),
    ("command", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": '
     '{"text": "x"}}\n]'
     "<|END_ACTION|>", {"text": "x"}),
    ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"text": "x"}',
     {"text": "x"}),
]  # fmt: skip


def follows(grammars: Grammars, grammar: str, text: str) -> bool:
    """Return whether the grammar allows each token of a text, and the end after it."""
    rule = grammars.constraint("grammar", grammar)
    for id in grammars.tokenizer.encode(text, add_special=False, parse_special=True):
        if not np.unpackbits(rule.mask().bits, bitorder="little")[id]:
            return False
        rule.accept(id)
    return rule.can_end


@pytest.mark.parametrize("special", quick_are((True,), [True, False]))
@pytest.mark.parametrize(("name", "text", "arguments"), WRITTEN)
def test_calls_as_models_write_them_are_allowed(name: str, text: str, arguments: Any, special: bool):
    """Accept calls as models write them, both required calls and optional calls of strict tools."""
    tokenizer, grammars = vocabulary(special)
    form = OutputForm.of(TEMPLATES[name], tokenizer)
    tools = [{"type": "function", "function": {**TEXT_TOOL, "strict": True}}]
    written = [(form.calls_grammar(tools), text)]
    strict = form.strict_grammar(tools)
    if strict is not None:
        before = "<|channel|>commentary<|message|>So: a < b.<|end|><|start|>assistant"
        written.append((strict, f"{before if name == 'harmony' else 'So: a < b.'}{text}"))
    assert (strict is None) == (name in ("pythonic", "json", "llama")), "its calls begin like text"
    for grammar, answer in written:
        assert follows(grammars, grammar, answer)
        parser = form.parser("", tools={"f": TEXT_TOOL["parameters"]})
        parts = merged(parser.push(answer) + parser.finish())
        assert calls_of(parts)[0] == ("f", arguments)
    wrong = text.replace("true", "maybe").replace("text", "test")
    assert not follows(grammars, written[0][0], wrong)
    if name == "harmony" and special:
        assert not follows(grammars, written[1][0], wrong)
        head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        assert head in text
        for other in (
            " to=functions.f<|channel|>commentary json<|message|>",
            "<|channel|>commentary to=functions.f<|message|>",
        ):
            assert follows(grammars, written[1][0], text.replace(head, other))
        assert follows(
            grammars,
            written[1][0],
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        )


def test_text_that_a_form_does_not_quote_is_left_to_the_model_where_tools_are_strict():
    """Accept a text with a format, such as a date: agent libraries mark all tools as strict."""
    tokenizer, grammars = vocabulary(True)
    parameters = {"type": "object", "properties": {"text": {"type": "string", "format": "date-time"}}}
    function = {"name": "f", "parameters": parameters | {"required": ["text"]}, "strict": True}
    form = OutputForm.of(TEMPLATES["qwen"], tokenizer)
    text = "<tool_call>\n<function=f>\n<parameter=text>\n{}\n</parameter>\n</function>\n</tool_call>"
    for grammar in (
        form.calls_grammar([{"function": function}]),
        form.strict_grammar([{"function": function}]),
    ):
        assert grammar is not None
        assert follows(grammars, grammar, text.format("2026-01-01T00:00:00Z"))
        assert follows(grammars, grammar, text.format("tomorrow"))
    form = OutputForm.of(TEMPLATES["hermes"], tokenizer)
    grammar = form.calls_grammar([{"function": function}])
    text = '<tool_call>\n{{"name": "f", "arguments": {{"text": "{}"}}}}\n</tool_call>'
    assert follows(grammars, grammar, text.format("2026-01-01T00:00:00Z"))
    assert not follows(grammars, grammar, text.format("tomorrow"))


def test_a_call_has_no_other_arguments_than_its_schema_names():
    tokenizer, grammars = vocabulary(True)
    form = OutputForm.of(TEMPLATES["hermes"], tokenizer)
    one = {"properties": {"a": {"type": "integer"}}}
    for parameters, given, is_allowed in (
        (one, {"a": 1}, True),
        (one, {"a": 1, "b": 2}, False),
        (one | {"additionalProperties": True}, {"a": 1, "b": 2}, True),
        ({"anyOf": [{"properties": {"b": {"type": "integer"}}}], **one}, {"b": 2, "a": 1}, True),
        (None, {}, True),
        (None, {"b": 2}, False),
        ({"type": "object"}, {"b": 2}, True),
    ):
        grammar = form.calls_grammar([{"function": {"name": "f", "parameters": parameters}}])
        text = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(given)}}}\n</tool_call>'
        assert follows(grammars, grammar, text) == is_allowed, (parameters, given)


def test_arguments_by_name_need_properties():
    tokenizer, _ = vocabulary(True)
    either = {"name": "f", "parameters": {"anyOf": [{"properties": {"a": {"type": "string"}}}]}}
    with pytest.raises(InvalidRequestError, match="have no properties of their own"):
        OutputForm.of(TEMPLATES["qwen"], tokenizer).calls_grammar([{"function": either}])


def test_impossible_required_call_is_an_error():
    tokenizer, _ = vocabulary(False)
    form = OutputForm.of("<tool_call>", tokenizer)
    with pytest.raises(InvalidRequestError, match="there is no tool 'x' to call"):
        form.calls_grammar(TOOLS, name="x")
    with pytest.raises(InvalidRequestError, match="there is no tool to call"):
        form.calls_grammar([])
    with pytest.raises(InvalidRequestError, match='a "function" that has a "name"'):
        form.calls_grammar([{"name": "f"}])
    with pytest.raises(InvalidRequestError, match="must be a JSON schema"):
        form.calls_grammar([{"function": {"name": "f", "parameters": 3}}])


@pytest.mark.parametrize("template", ["hermes", "qwen", "harmony", "gemma4"])
@pytest.mark.parametrize("is_strict", [False, True])
def test_parts_of_a_schema_that_grammars_lack_are_left_to_the_model(
    template: str, is_strict: bool, caplog: pytest.LogCaptureFixture
):
    tokenizer, grammars = vocabulary(True)
    form = OutputForm.of(TEMPLATES[template], tokenizer)
    unlike = {"type": "integer", "not": {"const": int(is_strict)}}
    likely = {"type": "array", "uniqueItems": True, "items": {"pattern": f"^(?={template})a"}}
    parameters = {"properties": {"a": likely, "b": unlike}, "required": ["b"]}
    function = {"name": "f", "parameters": parameters, "strict": is_strict}
    grammar = form.calls_grammar([{"function": function}])
    with caplog.at_level("WARNING", "hotset.grammar"):
        grammars.constraint("grammar", grammar)
        grammars.constraint("grammar", grammar)
    (line,) = [record.getMessage() for record in caplog.records]
    assert all(part in line for part in ("not", "uniqueItems", f"^(?={template})a"))
    if template == "hermes":
        text = '<tool_call>\n{{"name": "f", "arguments": {{"a": ["b"], "b": {}}}}}\n</tool_call>'
        assert follows(grammars, grammar, text.format(1))
        assert not follows(grammars, grammar, text.format("true")), "the rest of the schema is enforced"


@pytest.mark.parametrize("template", ["hermes", "harmony", "nemotron"])
def test_an_error_names_the_tool_whose_schema_is_wrong(template: str):
    tokenizer, grammars = vocabulary(True)
    form = OutputForm.of(TEMPLATES[template], tokenizer)
    wrong = {"properties": {"a": {"$ref": "#/$defs/missing"}}, "required": ["a"]}
    tools = [*TOOLS, {"function": {"name": "g", "parameters": wrong}}]
    with pytest.raises(InvalidRequestError, match="the schema of the tool 'g' cannot be used: Pointer"):
        grammars.constraint("grammar", form.calls_grammar(tools))


WRITTEN_CALLS = {
    "hermes": '<tool_call>\n{"name": "set-unit", "arguments": {"unit": "C"}}\n</tool_call>',
    "hermes, thinking": '<tool_call>\n{"name": "set-unit", "arguments": {"unit": "F"}}\n</tool_call>',
    "llama": '{"name": "set-unit", "parameters": {"unit": "C"}}',
    "harmony": '<|channel|>commentary to=functions.set-unit <|constrain|>json<|message|>{"unit": "C"}',
    "qwen": "<tool_call>\n<function=set-unit>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", quick_are(tuple(WRITTEN_CALLS), TEMPLATES))
def test_the_model_may_call_a_tool_or_answer_in_a_form(name: str):
    tokenizer, grammars = vocabulary(True)
    form = OutputForm.of(TEMPLATES[name], tokenizer)
    schema = json.dumps({"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]})

    def allows(text: str) -> bool:
        rule = grammars.constraint("json_schema", schema, form.around("assistant\n", tools=TOOLS))
        for id in tokenizer.encode(text, add_special=False, parse_special=True):
            if not np.unpackbits(rule.mask().bits, bitorder="little")[id]:
                return False
            rule.accept(id)
        return rule.can_end

    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert allows(head + '{"sum": 3}')
    assert not allows(head + '{"sum": "3"}')
    assert not allows("hello")
    assert name not in WRITTEN_CALLS or allows(WRITTEN_CALLS[name])


def test_every_form_has_a_grammar():
    forms = [tool_calls.form_of(template) for template in TEMPLATES.values()]
    assert {form.name for form in forms} == {form.name for form in tool_calls.FORMS}
