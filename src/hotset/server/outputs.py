"""How the answers to a request are written and read: reasoning, calls of functions, forms that are asked for.

A model says by its chat template how it writes calls (text/output.py). One that the request asks for in so
many words (`tool_choice`) is not left to the model: what calls begin with is put behind the prompt, and the
rest is constrained by the function's own schema, so that it parses whatever the model would have written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotset.api import Model
from hotset.engine.sampler import SamplingParams
from hotset.escaping import clause
from hotset.parameters import shown
from hotset.server.answers import AnswerRequest
from hotset.server.errors import RequestError
from hotset.text import reasoning, tool_calls
from hotset.text.constraint import is_marker
from hotset.text.grammar_child import JSON_SPACE
from hotset.text.output import Parser
from hotset.text.parts import CallArguments, CallStart, Part

_END = 32  # tokens of a prompt by which it is seen whether an answer begins inside reasoning

# What a call begins with, in the form of the model: before its arguments, and before its object.
_BEGIN: dict[tool_calls.Form | None, tuple[str, str]] = {
    "hermes": ('<tool_call>\n{{"name": {name}, "arguments": ', "<tool_call>\n"),
    "llama": ('{{"name": {name}, "parameters": ', ""),
    "mistral": ('[TOOL_CALLS][{{"name": {name}, "arguments": ', "[TOOL_CALLS]["),
    "harmony": ("<|channel|>commentary to=functions.{bare} <|constrain|>json<|message|>", ""),
    None: ("", ""),
}


@dataclass(frozen=True)
class Output:
    """How the answers to one request are to be written, and read.

    tools: what the template is told of; params: with what the answers must follow; begun: text, marks and
    all, that is put behind the prompt. The rest: see `parser`.
    """

    tools: list[dict[str, Any]] | None
    params: SamplingParams
    begun: str = ""
    _names: tuple[str, ...] = ()
    _forced: str | None = None  # the one function that is called
    _is_forced: bool = False  # a function is called, of several
    _is_plain: bool = False  # a form was asked for: there is no reasoning in it

    def tokens(self, model: Model, tokens: list[int]) -> list[int]:
        """The prompt with what is put behind it."""
        begun = self.begun
        marks = model.output_form.thinks
        if (self._is_plain or self._is_forced) and marks and reasoning.is_open(marks, _end(model, tokens)):
            begun = f"\n{marks[1]}\n\n{begun}"  # the template has begun to think
        if not begun:
            return tokens
        return tokens + model.tokenizer.encode(begun, add_special=False, parse_special=True)

    def parser(self, model: Model, tokens: list[int]) -> Parser | None:
        """What reads one answer to these tokens; None where all of it is text."""
        if self._forced is not None:
            return _Forced(model, self._forced)
        form = model.output_form
        if self._is_forced:
            calls = form.calls or "hermes"
            return tool_calls.parser_of("llama", self._names, lambda: tool_calls.new_id(calls))
        if self._is_plain or not (form.thinks or form.calls == "harmony" or (form.calls and self._names)):
            return None
        return form.parser(_end(model, tokens), tools=self._names)


def output_of(model: Model, request: AnswerRequest) -> Output:
    """Raises RequestError for tools that are none, and for what this model cannot do with them."""
    params = request.params
    if request.messages is None:
        return Output(None, params, _is_plain=True)
    tools, choice = [dict(tool) for tool in request.tools], request.tool_choice
    names = _names_of(tools)
    if choice == "none" or not tools:
        if choice not in ("none", "auto"):
            raise RequestError("tool_choice asks for a call, and there are no tools", param="tool_choice")
        return Output(None, params, _is_plain=params.form is not None)
    if "tools" not in model.chat_template.source:
        raise RequestError(
            "tools are not supported: the chat template of this model does not know any; take a model that "
            "was trained to call functions",
            param="tools",
            code="unsupported_parameter",
        )
    if params.form is not None:
        raise RequestError(
            "tools and a form of the answer cannot be asked for together; leave one of them out, or say "
            'tool_choice: "none"',
            param="tools",
        )
    if choice != "auto":
        return _forced(model, tools, names, choice, params)
    if any(tool["function"].get("strict") for tool in tools):
        params = replace(params, grammar=_strict(model, tools))
    return Output(tools, params, _names=names)


def _forced(
    model: Model,
    tools: list[dict[str, Any]],
    names: tuple[str, ...],
    choice: str | Mapping[str, str],
    params: SamplingParams,
) -> Output:
    of_one, of_any = _BEGIN[model.output_form.calls]
    if isinstance(choice, str) and len(tools) > 1:
        schema = {"anyOf": [_call_schema(i, tool) for i, tool in enumerate(tools)]}
        return Output(tools, replace(params, json_schema=schema), of_any, names, _is_forced=True)
    name = names[0] if isinstance(choice, str) else choice["name"]
    if name not in names:
        raise RequestError(f"there is no tool {clause(shown(name))} to choose", param="tool_choice")
    begun = of_one.format(name=json.dumps(name), bare=name)
    schema = _parameters(tools[names.index(name)])
    return Output(tools, replace(params, json_schema=schema), begun, names, _forced=name, _is_forced=True)


def _strict(model: Model, tools: list[dict[str, Any]]) -> str:
    """A grammar of text with calls in it, whose arguments follow the schemas of their functions."""
    if model.output_form.calls != "hermes":
        raise RequestError(
            "strict is not supported for this model where it may choose (tool_choice: auto); leave it out",
            param="tools",
            code="unsupported_parameter",
        )
    head, end = (_in_grammar(model, mark) for mark in ("<tool_call>", "</tool_call>"))
    lazy = "[lazy]" if head.startswith('"') else ""
    calls = [_call_schema(i, tool) for i, tool in enumerate(tools)]
    schema = json.dumps({"x-guidance": {"whitespace_pattern": JSON_SPACE}, "anyOf": calls})
    return (
        f"start: call* rest\nrest: TEXT\nTEXT: /(.|\\n)*/\nhead{lazy}: TEXT {head}\n"
        f'call: head "\\n" object "\\n" {end}\nobject: %json {schema}\n'
    )


def _in_grammar(model: Model, mark: str) -> str:
    """A mark as Lark has it: a text, or the token that it is."""
    id = model.tokenizer.vocabulary.get(mark)
    return f"<[{id}]>" if id is not None and is_marker(model.tokenizer, id) else json.dumps(mark)


class _Forced:
    """The call of one function, of which an answer has the arguments alone; a Parser."""

    def __init__(self, model: Model, name: str) -> None:
        self.n_calls = 0
        self._name = name
        self._form = model.output_form.calls or "hermes"

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = [] if self.n_calls else [CallStart(0, tool_calls.new_id(self._form), self._name)]
        self.n_calls = 1
        return [*parts, CallArguments(0, text)] if text else parts

    def finish(self) -> list[Part]:
        return self.push("")


def _names_of(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    names = [tool.get("function", {}).get("name") for tool in tools]
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise RequestError(f"tool {i} has no function with a name", param="tools")
        if name in names[:i]:
            raise RequestError(f"two tools are called {clause(shown(name))}", param="tools")
    return tuple(names)


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = tool["function"].get("parameters")
    return dict(given) if given else {"type": "object"}


def _call_schema(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Of a call's object, as the i-th of several; what its parameters refer to is found from there."""
    parameters = _moved(_parameters(tool), f"#/anyOf/{i}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": tool["function"]["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema with its references to itself as they are where it lies at `root`."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, root)
            for key, value in schema.items()
        }
    return [_moved(one, root) for one in schema] if isinstance(schema, list) else schema


def _end(model: Model, tokens: list[int]) -> str:
    return model.tokenizer.decode(tokens[-_END:])
