"""Limits of a JSON body: counted as a parser would count, and enforced before parsing."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from cases import quick_are
from pydantic import ValidationError
from tiny_server import MESSAGES, client_of

from hotset.server import body, json_limits, replies, tokens
from hotset.server.anthropic import MessagesBody
from hotset.server.body import BodyRequest
from hotset.server.errors import RequestError
from hotset.server.fields import MAX_BIASES
from hotset.server.json_limits import MAX_DIGITS, MAX_FRACTIONS, MAX_ITEMS, MAX_VALUES, check_json, loads
from hotset.server.ollama import OllamaChatBody
from hotset.server.openai.chat import ChatBody
from hotset.server.openai.completions import CompletionBody
from hotset.server.openai.embeddings import EmbeddingsBody
from hotset.server.openai.responses import ResponsesBody
from hotset.server.preparation import LONG_BYTES
from hotset.server.replies import JsonReply, dumped
from hotset.server.rows import MAX_IGNORED, MAX_NAME, Body, ignored_fields
from hotset.server.tokens import DetokenizeBody, TokenizeBody
from hotset.server.tool_fields import MAX_TOOLS

PARTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]|,', re.DOTALL)


def counted(given: bytes) -> tuple[int, int, int, int]:
    """Count the greatest depth, opening brackets, strings and commas by reading from left to right."""
    depth = deepest = lists = texts = commas = 0
    for match in PARTS.finditer(given):
        sign = given[match.start()]
        if sign in b"[{":
            depth, lists = depth + 1, lists + 1
            deepest = max(deepest, depth)
        elif sign in b"]}":
            depth -= 1
        elif sign == ord(","):
            commas += 1
        else:
            texts += 1
    return deepest, lists, texts, commas


@pytest.mark.parametrize("chunk", quick_are((2, 1000), [1, 2, 3, 7, 1000]))
def test_parts_are_counted_like_a_whole_body(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_limits, "CHUNK", chunk)
    draw = random.Random(chunk)
    pieces = [b"[", b"]", b"{", b"}", b",", b'""', b'"\\""', b'"a\\\\"', b'"\\\\\\"[,"', b'"[{"', b"1"]
    for _ in range(200 if chunk < 4 else 2000):  # counting in small parts is slow
        given = b"".join(draw.choice(pieces) for _ in range(draw.randrange(16)))
        given += draw.choice([b"", b'"', b'"[,\\', b'"\\"'])  # an unterminated string
        deepest, lists, texts, commas = counted(given)
        items = lists + texts
        for (most_deep, most_lists, most_items, most_commas), refused in (
            ((deepest, lists, items, commas + 1), None),
            ((deepest - 1, lists, items, commas + 1), "nested"),
            ((deepest, lists - 1, items, commas + 1), "than -?[0-9]+ lists and objects"),
            ((deepest, lists, items - 1, commas + 1), "texts, lists and objects"),
            ((deepest, lists, items, commas), "values"),
        ):
            if min(most_deep, most_lists, most_items) < 0 or not most_commas:
                continue
            monkeypatch.setattr(json_limits, "MAX_LISTS", most_lists)
            monkeypatch.setattr(json_limits, "MAX_ITEMS", most_items)
            monkeypatch.setattr(json_limits, "MAX_VALUES", most_commas)
            if refused is None:
                check_json(given, most_deep)
            else:
                with pytest.raises(RequestError, match=refused):
                    check_json(given, most_deep)


def test_values_are_counted_and_text_is_not():
    check_json(json.dumps({"prompt": '[{",' * 300_000}).encode(), 64)
    check_json(b"[" + b"12345," * (MAX_VALUES - 1) + b"1]", 64)
    for given, said in (
        (b"[" + b"1," * MAX_VALUES + b"1]", "values"),
        (b"[" + b"[]," * MAX_ITEMS + b"[]]", "lists and objects"),
        (b'["' + b'","' * MAX_ITEMS + b'"]', "texts"),
    ):
        with pytest.raises(RequestError, match=said) as error:
            check_json(given, 64)
        assert error.value.status == 413


def test_numbers_that_are_slow_to_parse_are_counted():
    text = json.dumps("1.5e7, " * 10_000 + "1" * 100_000).encode()
    check_json(b"[%s]" % text, 64)
    padding = b" " * LONG_BYTES
    check_json(b"[%s]" % b",".join([b"1e5"] * MAX_FRACTIONS) + padding, 64)
    for given, said in (
        (b"[%s]" % b",".join([b"1.5"] * (MAX_FRACTIONS + 1)), "point or an exponent"),
        (b"[%s]" % b",".join([b"-7E+5"] * (MAX_FRACTIONS + 1)), "point or an exponent"),
        (b"[%s]" % (b"1" * (MAX_DIGITS + 1)), "digits"),
    ):
        with pytest.raises(RequestError, match=said) as error:
            check_json(given + padding, 64)
        assert error.value.status == 413


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32"])
async def test_a_body_must_be_utf_8(encoding: str, client: httpx.AsyncClient) -> None:
    """Refuse other encodings, in which a string may hide the bytes after it from a counter of bytes."""
    many = '{"prompt": "a", "user": "\\"", "metadata": {"a": [' + "[]," * (2 * MAX_ITEMS) + "1]}}"
    json.loads(many)
    with pytest.raises(RequestError, match="not valid JSON"):
        loads(many.encode(encoding))
    assert loads('\ufeff{"a": "\u00e9"}'.encode()) == {"a": "\u00e9"}

    for given in (many, '{"prompt": "a", "max_tokens": 1}'):
        reply = await client.post("/v1/completions", content=given.encode(encoding))
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


WRONG: list[tuple[type[Body], Callable[[int], dict[str, Any]]]] = [
    (CompletionBody, lambda n: {"prompt": [{}] * n}),
    (CompletionBody, lambda n: {"prompt": "x", "stop": [1] * n}),
    (EmbeddingsBody, lambda n: {"input": [{}] * n}),
    (ChatBody, lambda n: {"messages": ["x"] * n}),
    (ChatBody, lambda n: {"messages": MESSAGES, "tools": [{}] * n}),
    (ResponsesBody, lambda n: {"input": [{}] * n}),
    (ResponsesBody, lambda n: {"input": "x", "tools": [{}] * n}),
    (MessagesBody, lambda n: {"model": "x", "max_tokens": 1, "messages": [{}] * n}),
    (MessagesBody, lambda n: {"model": "x", "max_tokens": 1, "messages": [_blocks(n)]}),
    (OllamaChatBody, lambda n: {"model": "x", "messages": [{}] * n}),
    (TokenizeBody, lambda n: {"messages": [1] * n}),
    (DetokenizeBody, lambda n: {"tokens": ["x"] * n}),
]


def _blocks(n: int) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text"}] * n}


@pytest.mark.parametrize(("kind", "given"), WRONG)
def test_a_wrong_list_does_not_give_an_error_per_element(
    kind: type[Body], given: Callable[[int], dict[str, Any]]
):
    """The number of errors is the same as for a list of one element."""
    n_errors = []
    for n in (1, 500):
        with pytest.raises(ValidationError) as error:
            kind.model_validate(given(n))
        n_errors.append(error.value.error_count())
    assert n_errors[0] == n_errors[1]


def test_unknown_fields_are_bounded():
    given = {"prompt": "x", **{f"made_up_{i}" + "x" * 500: [1] * 500 for i in range(500)}}
    body = CompletionBody.model_validate(given)
    names = [name for name, _ in ignored_fields(body)]
    assert len(names) == MAX_IGNORED
    assert max(map(len, names)) == MAX_NAME
    assert not any(body.model_extra.values())  # the values of unknown fields are not kept


def test_biases_are_bounded():
    biases = {str(i): "x" for i in range(MAX_BIASES + 1)}
    with pytest.raises(ValidationError) as error:
        CompletionBody.model_validate({"prompt": "x", "logit_bias": biases})
    assert all(one["type"] in ("value_error", "list_type") for one in error.value.errors())


@pytest.mark.parametrize(
    ("kind", "given", "tool"),
    [
        (ChatBody, {"messages": MESSAGES}, {"type": "function", "function": {"name": "f"}}),
        (ResponsesBody, {"input": "x"}, {"type": "function", "name": "f"}),
        (
            MessagesBody,
            {"model": "x", "max_tokens": 1, "messages": MESSAGES},
            {"name": "f", "input_schema": {}},
        ),
        (OllamaChatBody, {"model": "x"}, {"type": "function", "function": {"name": "f"}}),
        (TokenizeBody, {"messages": MESSAGES}, {"type": "function"}),
    ],
)
def test_tools_are_bounded(kind: type[Body], given: dict[str, Any], tool: dict[str, Any]):
    kind.model_validate({**given, "tools": [tool] * MAX_TOOLS})
    with pytest.raises(ValidationError) as error:
        kind.model_validate({**given, "tools": [tool] * (MAX_TOOLS + 500)})
    assert (error.value.error_count(), error.value.errors()[0]["type"]) == (1, "too_long")


async def test_a_long_body_is_parsed_and_tokenized_outside_the_event_loop(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[str, str]] = []

    def noted(where: object, name: str) -> None:
        real = getattr(where, name)

        def noting(*args: object, **more: object) -> object:
            seen.append((name, threading.current_thread().name.rpartition("_")[0]))
            return real(*args, **more)

        monkeypatch.setattr(where, name, noting)

    noted(BodyRequest, "_checked")
    noted(CompletionBody, "request")
    noted(tokens, "JsonReply")

    async with client_of(path) as (client, service):
        noted(service.model.tokenizer, "encode")
        short, long = (
            {"prompt": "hi", "max_tokens": 1, "seed": 1},
            {"prompt": [[65] * 20] * (LONG_BYTES // 32)},
        )
        assert (await client.post("/v1/completions", json=short)).status_code == 200
        assert seen == [("_checked", ""), ("request", ""), ("encode", "hotset-text")]
        seen.clear()
        assert (await client.post("/v1/completions", json=long)).status_code == 400
        assert seen == [("_checked", "hotset-json"), ("request", "hotset-long-text")]
        seen.clear()
        reply = await client.post("/tokenize", json={"content": "a" * LONG_BYTES, "with_pieces": True})
        assert reply.json()["count"] == LONG_BYTES
        assert seen == [
            (name, "hotset-json" if name == "_checked" else "hotset-long-text")
            for name in ("_checked", "encode", "JsonReply")
        ]
        seen.clear()
        for url, given in (
            ("/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}),
            ("/api/generate", {"model": "tiny", "prompt": "x" * LONG_BYTES, "raw": True}),
            ("/detokenize", {"tokens": [65]}),
        ):
            reply = await client.post(url, json=given)
            assert reply.status_code in (200, 400), reply.text
        assert all(thread.startswith("hotset") for name, thread in seen if name == "encode"), seen


async def test_a_long_body_gets_the_same_errors_as_a_short_one(client: httpx.AsyncClient):
    padding = " " * LONG_BYTES
    for given in (
        '{"prompt": 3}', '{"prompt": "x", "echo": 3}', "{}", "[]", "3", '{"prompt": ',
        '{"prompt": "x",}', '{"prompt": "x", "n": 99}', '{"prompt": ["x", 1]}',
    ):  # fmt: skip
        short = await client.post("/v1/completions", content=given)
        long = await client.post("/v1/completions", content=given + padding)
        assert (short.status_code, short.json()) == (long.status_code, long.json())
        assert short.status_code == 400
    too_long = await client.post("/tokenize", json={"content": "x" * (tokens.MAX_CHARS + 1)})
    assert too_long.status_code == 413
    assert str(tokens.MAX_CHARS) in too_long.json()["error"]["message"]


async def test_a_full_queue_refuses_bodies(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Let as many long bodies wait as answers may; the next is refused."""
    release = threading.Event()
    parse = body.BodyRequest._checked

    def slow(self: BodyRequest, given: bytes) -> object:
        if len(given) > LONG_BYTES:
            release.wait(60)
        return parse(self, given)

    monkeypatch.setattr(BodyRequest, "_checked", slow)

    async with client_of(path, max_queue=1) as (client, service):
        content = json.dumps({"prompt": "hi", "n": 99}) + " " * LONG_BYTES
        asked = [asyncio.create_task(client.post("/v1/completions", content=content)) for _ in range(6)]
        while service.preparation.bodies().n_waiting < 5:  # 4 run at once, 1 waits
            await asyncio.sleep(0)
        refused = await client.post("/v1/completions", content=content)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await client.get("/health")).status_code == 200
        release.set()
        assert {reply.status_code for reply in await asyncio.gather(*asked)} == {400}


def test_a_long_text_is_written_in_parts(monkeypatch: pytest.MonkeyPatch):
    """Check that parts are small, so that each holds the interpreter's lock only briefly."""
    text = 'a "quoted" \\ \ud800 word\n' * 40_000
    longest = 0

    def noting(value: object) -> bytes:
        nonlocal longest
        longest = max(longest, len(value)) if isinstance(value, str) else longest
        return dumped(value)

    monkeypatch.setattr(replies, "dumped", noting)
    assert JsonReply({"content": text, "n": [1]}).body == dumped({"content": text, "n": [1]})
    assert longest < len(text) / 4


@pytest.mark.parametrize("pairs", [[[{"a": 1}, []]], [[5]], [[[5], 1]], [[5, None]]], ids=str)
def test_pairs_of_a_bias_are_a_token_and_a_number(pairs: list[Any]) -> None:
    with pytest.raises(ValidationError, match="a token and a number, or false"):
        CompletionBody.model_validate({"prompt": "x", "logit_bias": pairs})
