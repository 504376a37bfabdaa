"""Conversations that are too long for the context: the oldest turns are left out.

System messages and the last message of the user stay. A turn begins with a message of the user. After the
last one, each message of the assistant begins a turn, which includes the results of its calls. Only whole
turns are left out.

Turns are left out in groups of about a quarter of the context. The borders of the groups depend only on
earlier messages. A growing conversation therefore keeps the same beginning, and the prompt cache of it, for
many turns.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hotset.errors import ContextLengthError

Message = Mapping[str, Any]

_SYSTEM_ROLES = ("system", "developer")
_LEAST_ROOM = 8  # an answer has at least 1/8 of the context, or its max_tokens if that is less


class Fitted(NamedTuple):
    """A prompt that fits. tokens: of the prompt. n_dropped: turns that were left out."""

    tokens: list[int]
    n_dropped: int


def fitted(
    messages: Sequence[Message],
    encode: Callable[[Sequence[Message]], list[int]],
    n_ctx: int,
    max_tokens: int | None = None,
) -> Fitted:
    """Return the prompt of a conversation without the oldest turns that have no room.

    encode: renders and tokenizes messages. n_ctx: tokens of the context. max_tokens: of the answer. Raises
    ContextLengthError if even the newest turn does not fit. Errors of `encode` pass through.
    """
    room = min(max_tokens or n_ctx, n_ctx // _LEAST_ROOM)

    def attempt(kept: Sequence[Message]) -> list[int] | None:
        try:
            tokens = encode(kept)
        except ContextLengthError:
            return None
        return tokens if len(tokens) + room <= n_ctx else None

    turns = _turns(messages)
    if len(turns) < 2:
        return Fitted(encode(messages), 0)
    if (tokens := attempt(messages)) is not None:
        return Fitted(tokens, 0)
    starts = _borders(messages, turns, n_ctx)
    found = bisect_left(
        starts, True, 0, len(starts) - 1, key=lambda start: attempt(_from(messages, start)) is not None
    )
    return Fitted(encode(_from(messages, starts[found])), turns.index(starts[found]))


def _turns(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the messages that begin turns."""
    roles = [message.get("role") for message in messages]
    last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
    return [
        i
        for i, role in enumerate(roles)
        if (role == "user" and i <= last_user) or (role == "assistant" and i > last_user)
    ]


def _from(messages: Sequence[Message], start: int) -> list[Message]:
    """Return the messages from `start` on, and the earlier ones that always stay."""
    last_user = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    return [
        message
        for i, message in enumerate(messages)
        if i >= start or i == last_user or message.get("role") in _SYSTEM_ROLES
    ]


def _borders(messages: Sequence[Message], turns: Sequence[int], n_ctx: int) -> list[int]:
    """Return the turns that a prompt may begin with; the last turn is always among them.

    A token is counted as four bytes: the size of a group is `n_ctx` bytes of JSON, a quarter of the context.
    """
    beginnings = frozenset(turns[1:])
    found: list[int] = []
    n_bytes, border = 0, n_ctx
    for i, message in enumerate(messages):
        if i in beginnings and n_bytes >= border:
            found.append(i)
            border = n_bytes // n_ctx * n_ctx + n_ctx
        n_bytes += len(json.dumps(message, ensure_ascii=False, default=str).encode("utf-8", "replace"))
    return found if found[-1:] == [turns[-1]] else [*found, turns[-1]]
