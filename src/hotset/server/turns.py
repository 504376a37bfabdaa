"""Turns of a conversation on their way from an API schema to a chat template.

A turn is a message as OpenAI's clients write one; templates read nothing else. Other API schemas have the
parts of an answer (text, reasoning, calls) one by one, and gather them here.
"""

from __future__ import annotations

from typing import Any

Turn = dict[str, Any]


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as a turn of the assistant bears it in `tool_calls`. arguments: JSON, as text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def merge(turn: Turn, more: Turn) -> None:
    """Makes `more`, of the same role, a part of `turn`: texts become lines of one text."""
    for key in ("content", "reasoning_content"):
        if more.get(key):
            turn[key] = f"{turn[key]}\n{more[key]}" if turn.get(key) else more[key]
    if more.get("tool_calls"):
        turn["tool_calls"] = [*turn.get("tool_calls", ()), *more["tool_calls"]]
    turn.setdefault("content", "")


def add(turns: list[Turn], turn: Turn) -> None:
    """Appends `turn`, or makes it a part of the last one where that is of the same role."""
    if turns and turns[-1]["role"] == turn["role"]:
        merge(turns[-1], turn)
    else:
        turns.append({"content": "", **turn})
