"""Writing of replies: in pieces of some values, and outside the event loop if they are long."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message
from tiny_server import MESSAGES, client_of, events_of

from hotset.server import replies, streams
from hotset.server.answers import MOST_LOGPROBS
from hotset.server.replies import MANY_VALUES, JsonReply, dumped, event, event_beside, n_values


def drawn(draw: random.Random, depth: int) -> Any:
    match draw.randrange(7 if depth else 4):
        case 0:
            return draw.random()
        case 1:
            return "é\ud800" * draw.choice([0, 1, 3, 600])
        case 2:
            return draw.choice([None, True, 5])
        case 3:
            return {}
        case 4:
            return [drawn(draw, depth - 1) for _ in range(draw.choice([0, 1, 2, 700 if depth == 1 else 5]))]
        case _:
            return {str(i): drawn(draw, depth - 1) for i in range(draw.choice([0, 1, 3, 40]))}


def test_the_pieces_of_a_reply_form_its_json() -> None:
    draw = random.Random(7)
    for _ in range(500):
        value = {"a": drawn(draw, 3)}
        assert JsonReply(value).body == dumped(value)
        assert asyncio.run(event_beside(value, "a.b")) == event(value, "a.b")
    parts = [{"id": i, "text": "x"} for i in range(2000)]
    assert JsonReply({"parts": iter(parts), "none": iter(())}).body == dumped({"parts": parts, "none": []})


def test_no_piece_of_a_reply_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    def noted(value: Any) -> bytes:
        nonlocal largest
        largest = max(largest, n_values(value))
        return dumped(value)

    monkeypatch.setattr(replies, "dumped", noted)
    top = [{"token": "a", "logprob": -1.5, "bytes": [97]}] * 20
    logprobs = [{"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": top}] * 100
    few, many = {"text": "a", "logprobs": None}, {"text": "a", "logprobs": {"content": logprobs}}
    for value in (
        {"choices": [few, many, *[few] * 30, *[many] * 20]},
        {"data": [{"index": i, "embedding": [0.5] * 5000} for i in range(10)]},
        {"tokens": list(range(20_000))},
        {"tokens": ({"id": i, "piece": "a"} for i in range(20_000))},
    ):
        JsonReply(value)
    assert MANY_VALUES / 2 < largest <= MANY_VALUES + 2  # the list itself counts too


async def test_long_replies_are_written_outside_the_event_loop(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Noted(JsonReply):
        def __init__(self, *args: Any, **more: Any) -> None:
            made.append(threading.current_thread().name.rpartition("_")[0])
            super().__init__(*args, **more)

    monkeypatch.setattr(streams, "JsonReply", Noted)
    answer = {"max_tokens": 64, "seed": 1, "ignore_eos": True}

    async with client_of(path) as (client, _):
        for url, few, many in (
            ("/v1/completions", {"prompt": "a", **answer}, {"logprobs": 20}),
            (
                "/v1/completions",
                {"prompt": "a" * 60, **answer, "max_tokens": 1},
                {"logprobs": 20, "echo": True},
            ),
            (
                "/v1/chat/completions",
                {"messages": MESSAGES, **answer},
                {"logprobs": True, "top_logprobs": 20},
            ),
            ("/v1/embeddings", {"input": "a"}, {"input": ["a"] * 100}),
        ):
            for more, thread in (({}, ""), (many, "hotset-long-text")):
                made.clear()
                reply = await client.post(url, json={**few, **more})
                assert reply.status_code == 200, reply.text
                assert made == [thread]


async def test_logprobs_of_a_stream_arrive_in_pieces(client: httpx.AsyncClient) -> None:
    """This includes the prompt's. Together they equal the whole reply's."""
    body = {
        "prompt": "a" * 150, "echo": True, "logprobs": 2, "max_tokens": 100, "seed": 1, "ignore_eos": True,
    }  # fmt: skip

    whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    events, _ = events_of((await client.post("/v1/completions", json={**body, "stream": True})).text)
    pieces = [event["choices"][0] for event in events]
    for name, found in whole["logprobs"].items():
        parts = [piece["logprobs"][name] for piece in pieces]
        assert [one for part in parts for one in part] == found
        assert max(map(len, parts)) < 2 * MOST_LOGPROBS  # some tokens are a part of a character
    assert "".join(piece["text"] for piece in pieces) == whole["text"]


def test_a_long_event_is_written_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def noted(value: Any) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return dumped(value)

    monkeypatch.setattr(replies, "dumped", noted)
    asyncio.run(event_beside({"a": 1}, "x"))
    assert threads == [True]
    threads.clear()
    written = asyncio.run(event_beside({"a": list(range(MANY_VALUES))}, "x"))
    assert True not in threads
    assert json.loads(written.partition(b"data: ")[2]) == {"a": list(range(MANY_VALUES))}


async def test_a_long_reply_is_sent_no_faster_than_the_client_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "SENT_BYTES", 100)
    reply = JsonReply({"tokens": list(range(1000))})
    reading = asyncio.Event()
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 4:
            await reading.wait()

    async def receive() -> Message:
        raise AssertionError

    task = asyncio.create_task(reply({"type": "http"}, receive, send))
    while len(sent) < 4:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(sent) == 4
    reading.set()
    await task
    parts = [message["body"] for message in sent[1:]]
    assert b"".join(parts) == reply.body
    assert max(map(len, parts)) == 100
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(parts) - 1) + [False]
