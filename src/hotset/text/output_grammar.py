"""Grammars of what a model emits: calls that it must make, and what stands around an answer of a given form.

Both are llguidance's Lark. Marks are written as the vocabulary has them: as `<[id]>` where a mark is a token
that is no text, and as text otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hotset.errors import InvalidRequestError
from hotset.parameters import shown
from hotset.text import reasoning, tool_calls
from hotset.text.constraint import is_marker
from hotset.text.grammar_child import JSON_SPACE
from hotset.text.tokenizer import Tokenizer

_MAX_CALLS = 16  # side by side: a model that knows no end must come to one
_ANYTHING = "/(?s:.*)/"


def calls_grammar(
    template: str,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    *,
    name: str | None = None,
    parallel: bool = True,
) -> str:
    """What an answer must follow that has to call functions: for SamplingParams(grammar=...).

    template: the text of the chat template. tools: in OpenAI's shape. name: the one that must be called;
    None: any. parallel: whether several may be called at once. Keywords of the schemas that are not supported
    are left to the model, unless all tools say "strict".
    Raises InvalidRequestError for tools that are none, and where the template has no form that is known.
    """
    functions = [_function(tool) for tool in tools]
    if name is not None:
        functions = [function for function in functions if function["name"] == name][:1]
    if not functions:
        raise InvalidRequestError(
            f"there is no tool {shown(name)} to call" if name else "there is no tool to call"
        )
    many = parallel and name is None
    lenient = not all(function.get("strict") is True for function in functions)
    form = tool_calls.form_of(template)

    def mark(text: str) -> str:
        return _mark(tokenizer, text)

    if form == "hermes":
        call = f'{mark("<tool_call>")} "\\n" object "\\n" {mark("</tool_call>")}'
        rules = [f"object: {_any_object(functions, 'arguments', lenient)}"]
        return _calls(call, many, '"\\n"', rules)
    if form == "llama":
        return f"start: {_any_object(functions, 'parameters', lenient)}"
    if form == "mistral" and "[ARGS]" not in template:
        items = _objects(functions, "arguments", "#/items/anyOf")
        schema = {
            "type": "array",
            "items": {"anyOf": items},
            "minItems": 1,
            "maxItems": _MAX_CALLS if many else 1,
        }
        return f"start: {mark('[TOOL_CALLS]')} {_json(schema, lenient)}"
    if form == "mistral":
        heads = [f"{mark('[TOOL_CALLS]')} {json.dumps(one['name'])} {mark('[ARGS]')}" for one in functions]
    elif form == "harmony":
        many = False  # a call ends the answer
        to = f'{mark("<|channel|>")} "commentary to=functions."'
        middle = f'" " {mark("<|constrain|>")} "json" {mark("<|message|>")}'
        heads = [f"{to} {json.dumps(one['name'])} {middle}" for one in functions]
    else:
        raise InvalidRequestError(
            "the model's chat template has no form of calls that is known, so that none can be required; "
            "leave the choice of a tool to the model"
        )
    each = [
        f"call_{i}: {head} {_json(_parameters(one), lenient)}"
        for i, (head, one) in enumerate(zip(heads, functions, strict=True))
    ]
    return _calls(" | ".join(f"call_{i}" for i in range(len(each))), many, "", each)


def strict_grammar(template: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> str:
    """What an answer must follow that may call functions, and does so by their schemas.

    Text is free, reasoning with it. Raises InvalidRequestError as calls_grammar does, and where calls in the
    form of the template cannot be told from text before they are whole.
    """
    if tool_calls.form_of(template) != "hermes":
        raise InvalidRequestError(
            "strict is not supported for this model where it may choose whether to call; leave it out, or "
            "require a call"
        )
    head, end = _mark(tokenizer, "<tool_call>"), _mark(tokenizer, "</tool_call>")
    lazy = "" if head.startswith("<") else "[lazy]"
    return "\n".join(
        [
            "start: call* TEXT",
            "TEXT: /(?s:.*)/",
            f"head{lazy}: TEXT {head}",
            f'call: head "\\n" object "\\n" {end}',
            f"object: {_any_object([_function(tool) for tool in tools], 'arguments', lenient=False)}",
        ]
    )


def around(template: str, tokenizer: Tokenizer, prompt: str, *, calls: bool = False) -> str | None:
    """What a model writes around an answer of a given form, which is `@answer` in it; None: nothing.

    Reasoning comes before the answer, in whatever words. prompt: the end of the rendered one. calls: whether
    the answer is of `calls_grammar`.
    """
    if tool_calls.form_of(template) == "harmony":
        channel, message, end, start = (
            _mark(tokenizer, mark) for mark in ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
        )
        head = "" if calls else f'{channel} "final" {message}'
        thinking = f'thinking: {channel} "analysis" {message} {_ANYTHING} {end} {start} "assistant"'
        return f"start: thinking? {head} @answer\n{thinking}"
    marks = reasoning.marks_of(template)
    if marks is None:
        return None
    is_open = reasoning.is_open(marks, prompt)
    opening = "" if is_open else _mark(tokenizer, marks[0])
    closing = _mark(tokenizer, marks[1])
    if closing.startswith("<"):
        body = f"body: {_ANYTHING} {closing}"
    else:
        body = f"body[suffix={closing}]: {_ANYTHING}"
    return "\n".join(
        [f"start: thinking{'' if is_open else '?'} @answer", f"thinking: {opening} body /\\n{{0,2}}/", body]
    )


def _mark(tokenizer: Tokenizer, text: str) -> str:
    id = tokenizer.vocabulary.get(text)
    return f"<[{id}]>" if id is not None and is_marker(tokenizer, id) else json.dumps(text)


def _calls(call: str, many: bool, between: str, rules: list[str]) -> str:
    more = f" ({between} call){{0,{_MAX_CALLS - 1}}}" if many else ""
    return "\n".join([f"start: call{more}", f"call: {call}", *rules])


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequestError('a tool must be an object with a "function" that has a "name"')
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise InvalidRequestError(
            f"the parameters of the tool {shown(function['name'])} must be a JSON schema, an object"
        )
    return function


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of the arguments: always of an object."""
    return {"type": "object", **(function.get("parameters") or {})}


def _any_object(functions: Sequence[Mapping[str, Any]], key: str, lenient: bool) -> str:
    return _json({"anyOf": _objects(functions, key, "#/anyOf")}, lenient)


def _objects(functions: Sequence[Mapping[str, Any]], key: str, home: str) -> list[dict[str, Any]]:
    """A schema for each call: an object with a name and arguments. home: where they will stand."""
    return [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                key: _moved(_parameters(function), f"{home}/{i}/properties/{key}"),
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for i, function in enumerate(functions)
    ]


def _moved(schema: Any, home: str) -> Any:
    """A schema within another: references to its own root lead to where that is now."""
    if isinstance(schema, Mapping):
        return {
            key: home + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, home)
            for key, value in schema.items()
        }
    if isinstance(schema, list | tuple):
        return [_moved(value, home) for value in schema]
    return schema


def _json(schema: Mapping[str, Any], lenient: bool) -> str:
    guidance = {"whitespace_pattern": JSON_SPACE, "lenient": lenient}
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': guidance}, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the schema of a tool must be plain data, as JSON has it ({error})"
        ) from None
