"""Grammars of a model's output: required calls, and the text around an answer of a given form.

Both are llguidance's Lark. Marks are written as the vocabulary has them: as `<[id]>` if a mark is a marker
token, and otherwise as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hotset.errors import InvalidRequestError
from hotset.parameters import shown
from hotset.text import reasoning, tool_calls
from hotset.text.call_grammar import MAX_CALLS, CallGrammar, json_rule, mark, schema_of
from hotset.text.tokenizer import Tokenizer

_ANYTHING = "/(?s:.*)/"


def calls_grammar(
    template: str,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    *,
    name: str | None = None,
    parallel: bool = True,
) -> str:
    """Return the grammar of an answer that must call functions, for SamplingParams(grammar=...).

    template: the text of the chat template. tools: in OpenAI's shape. name: the one that must be called;
    None: any. parallel: whether several may be called at once.
    Raises InvalidRequestError for invalid tools.
    """
    functions = [_function(tool) for tool in tools]
    if name is not None:
        functions = [function for function in functions if function["name"] == name][:1]
    if not functions:
        raise InvalidRequestError(
            f"there is no tool {shown(name)} to call" if name else "there is no tool to call"
        )
    calls, rules = _calls(template, tokenizer, functions, many=parallel and name is None)
    return "\n".join([f"start: {calls}", *rules])


def _calls(
    template: str, tokenizer: Tokenizer, functions: Sequence[Mapping[str, Any]], *, many: bool
) -> tuple[str, list[str]]:
    """Return Lark of calls, and the rules that it refers to. many: whether several calls may be written."""
    form = tool_calls.form_of(template)
    if form is tool_calls.HARMONY:
        return _harmony_calls(tokenizer, functions)
    grammar = CallGrammar(tokenizer, functions, many=many)
    call = grammar.call(form, template)
    more = f" ({call.gap} call){{0,{MAX_CALLS - 1}}}" if many and call.gap is not None else ""
    return f"call{more}", [f"call: {call.opening} {call.rest}", *grammar.rules]


def strict_grammar(template: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the grammar of an answer that may call functions, whose calls follow their schemas.

    Text and reasoning are free. Returns None for forms whose calls begin like text; they are left to the
    model. Raises InvalidRequestError as calls_grammar does.
    """
    form, functions = tool_calls.form_of(template), [_function(tool) for tool in tools]
    if form is tool_calls.HARMONY:
        return _harmony_strict_grammar(tokenizer, functions)
    grammar = CallGrammar(tokenizer, functions, many=True)
    call = grammar.call(form, template)
    if not call.opening:
        return None
    lazy = "" if call.opening.startswith("<") else "[lazy]"
    return "\n".join(
        [
            "start: call* TEXT",
            "TEXT: /(?s:.*)/",
            f"head{lazy}: TEXT {call.opening}",
            f"call: head {call.rest}",
            *grammar.rules,
        ]
    )


def around(
    template: str,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    calls: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    thinks: bool = True,
    is_begun: bool = False,
) -> str | None:
    """Return Lark of an answer of a given form, `@answer`, with the text that the model writes around it.

    Reasoning comes before the answer and is free. prompt: the end of the rendered prompt. calls: whether the
    answer follows `calls_grammar`. tools: functions that the model may call instead. thinks: False for
    an answer without reasoning. is_begun: whether the prompt ends in the text of the answer. Returns None if
    the model writes only the answer. Raises InvalidRequestError as `calls_grammar` does.
    """
    if is_begun and tool_calls.form_of(template) is tool_calls.HARMONY:
        return None  # text and calls are separate messages
    functions = [_function(tool) for tool in tools]
    other, rules = _calls(template, tokenizer, functions, many=True) if functions else ("", [])
    if tool_calls.form_of(template) is tool_calls.HARMONY:
        channel, message, end, start = (
            mark(tokenizer, text) for text in ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
        )
        head = "" if calls else f'{channel} "final" {message}'
        thinking = f'thinking: {channel} "analysis" {message} {_ANYTHING} {end} {start} "assistant"'
        return "\n".join([f"start: thinking? {_either(f'{head} @answer', other)}", thinking, *rules])
    marks = reasoning.marks_of(template)
    if marks is None or not thinks:
        return "\n".join([f"start: {_either('@answer', other)}", *rules]) if functions else None
    is_open = reasoning.is_open(marks, prompt)
    opening = "" if is_open else mark(tokenizer, marks[0])
    closing = mark(tokenizer, marks[1])
    if closing.startswith("<"):
        body = f"body: {_ANYTHING} {closing}"
    else:
        body = f"body[suffix={closing}]: {_ANYTHING}"
    return "\n".join(
        [
            f"start: thinking{'' if is_open else '?'} {_either('@answer', other)}",
            f"thinking: {opening} body /\\n{{0,2}}/",
            body,
            *rules,
        ]
    )


def _either(answer: str, calls: str) -> str:
    return f"({answer} | {calls})" if calls else answer


def _harmony_calls(tokenizer: Tokenizer, functions: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Return Lark of one call, which ends the answer, and its rules."""
    to = f'{mark(tokenizer, "<|channel|>")} "commentary to=functions."'
    middle = f'" " {mark(tokenizer, "<|constrain|>")} "json" {mark(tokenizer, "<|message|>")}'
    rules = [
        f"call_{i}: {to} {json.dumps(one['name'])} {middle} {json_rule(schema_of(one))}"
        for i, one in enumerate(functions)
    ]
    return f"({' | '.join(f'call_{i}' for i in range(len(functions)))})", rules


def _harmony_strict_grammar(tokenizer: Tokenizer, functions: Sequence[Mapping[str, Any]]) -> str:
    """Return Lark of messages without a recipient up to a call, which has it before or after its channel."""
    channel, message, end, start, constrain = (
        mark(tokenizer, f"<|{name}|>") for name in ("channel", "message", "end", "start", "constrain")
    )
    rules, calls = [], " | ".join(f"call_{i}" for i in range(len(functions)))
    for i, one in enumerate(functions):
        to = f'" to=functions." {json.dumps(one["name"])}'
        rules.append(f'head_{i}: {channel} "commentary" {to} | {to} {channel} "commentary"')
        rules.append(f"call_{i}: head_{i} type? {message} {json_rule(schema_of(one))}")
    return "\n".join(
        [
            f'start: (plain {end} {start} "assistant")* (plain | {calls})',
            f"plain: {channel} /analysis|commentary|final/ {message} {_ANYTHING}",
            f'type: " "? {constrain} "json" | " json"',
            *rules,
        ]
    )


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequestError('a tool must be an object with a "function" that has a "name"')
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise InvalidRequestError(
            f"the parameters of the tool {shown(function['name'])} must be a JSON schema, an object"
        )
    return function
