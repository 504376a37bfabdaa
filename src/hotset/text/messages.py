"""Calls of functions in a conversation, on their way back into a chat template.

OpenAI's clients write the arguments of a call as a text with JSON in it. Most templates want the object, of
which they write JSON themselves, and some the text: they get the object, and where that fails the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hotset.errors import InvalidRequestError, TokenizerError
from hotset.parameters import shown
from hotset.text.chat import ChatTemplate
from hotset.text.tokenizer import Tokenizer


def checked_calls(message: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Message `i` with the calls of functions that it has, if any, as OpenAI's clients write them, checked.

    Raises InvalidRequestError for calls that are none.
    """
    checked = dict(message)
    calls = checked.pop("tool_calls", None)
    if not calls:  # templates ask whether there is such an entry
        return checked
    if not isinstance(calls, list):
        raise InvalidRequestError(f"the tool_calls of message {i} must be a list, not {shown(calls)}")
    checked["tool_calls"] = [_checked_call(call, i, n) for n, call in enumerate(calls)]
    if checked.get("content") is None:
        checked["content"] = ""
    return checked


def _checked_call(call: Any, i: int, n: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f'call {n} of message {i} must be an object with a "function" that has a "name" and "arguments"'
        )
    arguments = function.get("arguments")
    if arguments is None:
        arguments = "{}"
    if not isinstance(arguments, str | Mapping):
        raise InvalidRequestError(
            f"the arguments of call {n} of message {i} must be a text with JSON in it, not {shown(arguments)}"
        )
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def encoded(
    template: ChatTemplate, tokenizer: Tokenizer, most: int, *conversation: Any, **variables: Any
) -> list[int]:
    """Token ids of a conversation as `rendered` takes it, with the BOS that texts of the model begin with.

    most: as of Tokenizer.encode, which raises ContextLengthError.
    """
    text = rendered(template, *conversation, **variables)
    tokens = list(tokenizer.encode(text, add_special=False, parse_special=True, most=most))
    # Most templates write BOS themselves: it belongs there once.
    first = tokenizer.text_bos_id
    if first is not None and tokens[:1] != [first]:
        tokens.insert(0, first)
    return tokens


def rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """What a template makes of messages that `checked_calls` has seen. Raises as ChatTemplate.render does."""
    named = _with_names(messages)
    try:
        return template.render(_with_arguments(named, _as_object), add_generation_prompt, tools, **variables)
    except TokenizerError:
        if not any("tool_calls" in message for message in messages):
            raise
        try:
            texts = _with_arguments(named, _as_text)
            return template.render(texts, add_generation_prompt, tools, **variables)
        except TokenizerError:
            pass  # what is wrong is something else, and was told of
        raise


def _with_names(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results of functions with the name of what was called, which templates write and no client gives."""
    names: dict[Any, str] = {}
    found = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        id = message.get("tool_call_id")
        name = names.get(id) if message["role"] == "tool" and isinstance(id, str) else None
        found.append({"name": name, **message} if name else dict(message))
    return found


def _with_arguments(messages: Sequence[Mapping[str, Any]], form: Any) -> list[Mapping[str, Any]]:
    return [
        {
            **message,
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": form(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _as_object(arguments: str | Mapping[str, Any]) -> Any:
    """What a text says, if that is an object; else the text, as a model wrote it."""
    if isinstance(arguments, Mapping):
        return arguments
    try:
        value = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: str | Mapping[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
