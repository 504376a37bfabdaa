"""Answers that must call functions, and what stands around an answer of a given form, on random logits."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from fake_backend import FakeBackend
from test_tokenizer import bpe_metadata

from hotset.engine.engine import Engine
from hotset.engine.sampler import SamplingParams
from hotset.errors import InvalidRequestError
from hotset.text import tool_calls
from hotset.text.constraint import Grammars
from hotset.text.output import OutputForm
from hotset.text.parts import CallArguments, CallStart, Part, Reasoning, Text, merged
from hotset.text.tokenizer import Tokenizer, load_tokenizer

pytest.importorskip("llguidance")

MARKS = (
    "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>",
    "<|return|>", "<|call|>", "</think>",
)  # fmt: skip
ENDS = ("</think>", "<|end|>")  # of reasoning
TEMPLATES = {
    "hermes": "<tool_call> </tool_call>",
    "hermes, thinking": "<tool_call> </tool_call> <think> </think>",
    "llama": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral, names": "[TOOL_CALLS] [ARGS]",
    "harmony": "<|channel|> <|message|>",
}
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Köln"]}},
}
UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"],
        "additionalProperties": False}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "set-unit", "parameters": UNIT}},
]
SCHEMAS = {"get_weather": CITY, "set-unit": UNIT}


@cache
def vocabulary(special: bool) -> tuple[Tokenizer, Grammars]:
    """One whose marks are special tokens, and one that spells them."""
    tokens = bpe_metadata()["tokenizer.ggml.tokens"]
    types = [1] * (len(tokens) - 4) + [3, 3, 3, 4]
    if special:
        tokens, types = [*tokens, *MARKS], types + [3] * len(MARKS)
    tokenizer = load_tokenizer(bpe_metadata(tokens=tokens, token_type=np.array(types, np.int32)))
    return tokenizer, Grammars(tokenizer)


def ending(tokenizer: Tokenizer) -> dict[int, float]:
    """A bias to the ends of reasoning: a random model would think for long."""
    return {tokenizer.vocabulary[mark]: 9.0 for mark in ENDS if mark in tokenizer.vocabulary}


def answer(
    form: OutputForm, grammars: Grammars, prompt: str, params: SamplingParams, *, calls: bool
) -> tuple[list[Part], str | None]:
    """The parts of an answer of random logits, and why it ended."""
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
    names = [tool["function"]["name"] for tool in TOOLS]
    parser = form.parser(prompt, tools=names if calls else ())
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
    ("name", "special"),
    [*((name, True) for name in TEMPLATES), *((name, False) for name in ("hermes", "llama", "mistral"))],
)
def test_a_required_call_is_one_of_the_tools(name: str, special: bool):
    tokenizer, grammars = vocabulary(special)
    form = OutputForm.of(TEMPLATES[name], tokenizer)
    for seed in range(6):
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


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_call_is_that_one(name: str):
    tokenizer, grammars = vocabulary(True)
    form = OutputForm.of(TEMPLATES[name], tokenizer)
    grammar = form.calls_grammar(TOOLS, name="set-unit")
    for seed in range(3):
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
    tokenizer, grammars = vocabulary(True)
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
        found.add(any(isinstance(part, Reasoning) for part in parts))
    assert found <= thinks
    assert True in found or True not in thinks


def test_the_end_of_reasoning_may_be_spelled_or_a_token():
    """Whichever the vocabulary has: token by token, without sampling."""
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


def test_what_cannot_be_required_is_told_of():
    tokenizer, _ = vocabulary(False)
    form = OutputForm.of("<|im_start|>", tokenizer)
    with pytest.raises(InvalidRequestError, match="no form of calls that is known"):
        form.calls_grammar(TOOLS)
    form = OutputForm.of("<tool_call>", tokenizer)
    with pytest.raises(InvalidRequestError, match="there is no tool 'x' to call"):
        form.calls_grammar(TOOLS, name="x")
    with pytest.raises(InvalidRequestError, match="there is no tool to call"):
        form.calls_grammar([])
    with pytest.raises(InvalidRequestError, match='a "function" that has a "name"'):
        form.calls_grammar([{"name": "f"}])
    with pytest.raises(InvalidRequestError, match="must be a JSON schema"):
        form.calls_grammar([{"function": {"name": "f", "parameters": 3}}])


def test_a_keyword_that_is_not_supported_is_refused_only_where_tools_are_strict():
    tokenizer, grammars = vocabulary(False)
    form = OutputForm.of("<tool_call>", tokenizer)
    parameters = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    function = {"name": "f", "parameters": parameters}
    grammars.constraint("grammar", form.calls_grammar([{"function": function}]))
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        grammars.constraint("grammar", form.calls_grammar([{"function": {**function, "strict": True}}]))


def test_every_form_has_a_grammar():
    tokenizer, grammars = vocabulary(True)
    assert {tool_calls.form_of(template) for template in TEMPLATES.values()} == set(tool_calls.MARKS)
    for template in TEMPLATES.values():
        form = OutputForm.of(template, tokenizer)
        grammars.constraint("grammar", form.calls_grammar(TOOLS), form.around("", calls=True))
