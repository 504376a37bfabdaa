"""The parts of an answer: text, reasoning, and calls of functions, each in pieces as they arrive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Text(NamedTuple):
    """A piece of text for the reader."""

    text: str


class ReasoningChunk(NamedTuple):
    """A piece of the reasoning before the answer."""

    text: str


class CallStart(NamedTuple):
    """The beginning of a call of a function. call: the index of the call in the answer, from 0."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of the arguments of a call: JSON, if the model wrote valid JSON."""

    call: int
    text: str


Part = Text | ReasoningChunk | CallStart | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A call of a function. arguments: the JSON that the model wrote, which may be invalid."""

    id: str
    name: str
    arguments: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the call as OpenAI's clients write it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(slots=True)
class Gathered:
    """The parts of an answer so far, joined."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, part: Part) -> None:
        match part:
            case Text():
                self.text += part.text
            case ReasoningChunk():
                self.reasoning += part.text
            case CallStart():
                self.calls.append(ToolCall(part.id, part.name))
            case CallArguments():
                self.calls[part.call].arguments += part.text


def merged(parts: list[Part]) -> list[Part]:
    """Join parts that continue the one before, and leave out empty texts."""
    found: list[Part] = []
    texts: list[str] = []  # of the last part in `found` and its continuations
    for part in parts:
        if isinstance(part, Text | ReasoningChunk) and not part.text:
            continue
        last = found[-1] if found else None
        same = type(last) is type(part) and not isinstance(part, CallStart)
        if same and (not isinstance(part, CallArguments) or part.call == last[0]):  # type: ignore[index]
            texts.append(part[-1])
            continue
        _join(found, texts)
        found.append(part)
        texts = [part[-1]]
    _join(found, texts)
    return found


def _join(found: list[Part], texts: list[str]) -> None:
    """Replace the text of the last part by its own and its continuations' texts."""
    if len(texts) > 1:
        found[-1] = found[-1]._replace(text="".join(texts))  # type: ignore[call-arg]


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of the marks."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    for n in range(longest, 0, -1):
        if any(mark.startswith(text[-n:]) for mark in marks):
            return n
    return 0


def first_of(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Return the index of the first mark in `text`, and the mark; (-1, "") without one.

    If several begin there, the first in `marks` is returned, so no mark may be a prefix of another."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, key=lambda one: one[0]) if found else (-1, "")
