"""Turns of a conversation between an API schema and a chat template.

A turn is a message in the form of OpenAI's clients; templates read nothing else. Other API schemas have the
parts of an answer (text, reasoning, calls) as separate entries, which are merged here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hotset.parameters import shown
from hotset.server.client_tools import CUSTOM
from hotset.server.modalities import check_part, note_of
from hotset.text.image_parts import given_image
from hotset.text.image_text import joined, text_of_image

Turn = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Roles of messages, and the roles that chat templates know for them: "developer" and "function" are other
names in OpenAI's schemas."""

_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_THOUGHTS = ("reasoning", "thinking")


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as a turn of the assistant has it in `tool_calls`. arguments: JSON, as text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def merge(turn: Turn, more: Turn) -> None:
    """Merge `more`, of the same role, into `turn`: texts become lines of one text."""
    for key in ("content", "reasoning_content"):
        if more.get(key):
            turn[key] = joined("\n", [turn[key], more[key]]) if turn.get(key) else more[key]
    if more.get("tool_calls"):
        turn["tool_calls"] = [*turn.get("tool_calls", ()), *more["tool_calls"]]
    turn.setdefault("content", "")


def add(turns: list[Turn], turn: Turn) -> None:
    """Append `turn`, or merge it into the last one if that has the same role."""
    if turns and turns[-1]["role"] == turn["role"]:
        merge(turns[-1], turn)
    else:
        turns.append({"content": "", **turn})


def turn_of(message: Mapping[str, Any]) -> Turn:
    """Return a message of OpenAI's chats as a turn.

    Raises ValueError for an unknown role or part, and UnreadableError for sound and other parts that no
    model reads. A content with images is an ImageText.
    """
    given = message.get("role")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise ValueError(f"the role must be one of {', '.join(ROLES)}, not {shown(given)}")
    turn = {key: value for key, value in message.items() if value is not None} | {"role": role}
    thoughts, content = _content(message.get("content"), is_result=role == "tool")
    turn["content"] = content
    thought = turn.pop("reasoning", None)
    if thoughts or (isinstance(thought, str) and thought):
        turn.setdefault("reasoning_content", thoughts or thought)
    if isinstance(turn.get("tool_calls"), list):
        turn["tool_calls"] = [_as_function(call) for call in turn["tool_calls"]]
    called = turn.pop("function_call", None)
    if role == "assistant" and isinstance(called, dict) and "tool_calls" not in turn:
        turn["tool_calls"] = [{"type": "function", "function": called}]
    return turn


def _as_function(call: Any) -> Any:
    """Return a call of a custom tool as a call of its function; other calls unchanged."""
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if not isinstance(custom, dict):
        return call
    function = {"name": custom.get("name"), "arguments": CUSTOM.arguments(custom.get("input"))}
    return {"id": call.get("id"), "type": "function", "function": function}


def _content(content: Any, *, is_result: bool) -> tuple[str, str]:
    """Return the reasoning and the text of a message's content. is_result: the message is a tool's result."""
    if content is None:
        return "", ""
    if isinstance(content, list):
        thoughts, texts = [], []
        for part in content:
            if isinstance(part, dict) and part.get("type") in _THOUGHTS:
                thoughts.append(_thought(part))
            else:
                texts.append(text_of(part, is_result=is_result))
        return "\n".join(thoughts), joined("", texts)
    if isinstance(content, str):
        return "", content
    if is_result or (isinstance(content, int | float) and not isinstance(content, bool)):
        return "", json.dumps(content, ensure_ascii=False)
    raise ValueError(f"the content must be text, not {shown(content)}")


def _thought(part: Mapping[str, Any]) -> str:
    found = part.get("text") or part.get("thinking") or part.get("reasoning") or ""
    return found if isinstance(found, str) else ""


def text_of(part: Any, *, is_result: bool = False) -> str:
    """Return the text of a part of a message. is_result: a note replaces a part that no model reads."""
    if isinstance(part, str):
        return part
    if (image := client_image(part)) is not None:
        return image
    if is_result and (note := note_of(part)):
        return note
    check_part(part)
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal") if kind == "refusal" else part.get("text") if kind in _TEXTS else None
    if not isinstance(text, str):
        raise ValueError("it has a part that is neither a text nor an image")
    return text


def client_image(part: Any) -> str | None:
    """Return an image of a client as a text with one image; None for another part. Raises ValueError."""
    image = given_image(part, local=False) if isinstance(part, Mapping) else None
    return None if image is None else text_of_image(image)
