"""Filling in a gap: /infill, and suffix of /v1/completions and /api/generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_schemas import events_of
from tiny_server import client_of, write_model

import hotset

PRE, SUF, MID = 1, 2, 3  # three bytes that mark the parts in this model
MARKS = {
    "tokenizer.ggml.fim_pre_token_id": PRE,
    "tokenizer.ggml.fim_suf_token_id": SUF,
    "tokenizer.ggml.fim_mid_token_id": MID,
}
GREEDY = {"temperature": 0, "ignore_eos": True}
COMPLETION = {"model": "tiny", "prompt": "hello", "suffix": "there", "max_tokens": 9, **GREEDY}
INFILL = {"input_prefix": "hello", "input_suffix": "there", "n_predict": 9, **GREEDY}


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("marked") / "tiny.gguf", **MARKS)


@pytest.fixture(scope="module")
def prompt(marked: Path) -> Iterator[tuple[list[int], str]]:
    """Yield the tokens around the gap, and the answer."""
    with hotset.load(marked, device="cpu", n_threads=1) as model:
        text = model.tokenizer.encode_inside
        ids = [model.tokenizer.bos_id or 0, PRE, *text("hello"), SUF, *text("there"), MID]
        yield ids, model.generate(ids, max_tokens=9, temperature=0, ignore_eos=True).text


async def test_a_suffix_is_filled_in_by_every_schema(marked: Path, prompt: tuple[list[int], str]):
    ids, text = prompt

    async with client_of(marked) as (client, _):
        found = (await client.post("/v1/completions", json=COMPLETION)).json()
        assert found["choices"][0]["text"] == text
        assert found["usage"]["prompt_tokens"] == len(ids)
        scored = (await client.post("/v1/completions", json=COMPLETION | {"logprobs": 1})).json()
        assert scored["choices"][0]["logprobs"]["text_offset"][0] == len("hello")
        reply = await client.post("/v1/completions", json=COMPLETION | {"stream": True})
        assert "".join(event["choices"][0]["text"] for event in events_of(reply.text)) == text

        options = {"num_predict": 9, "temperature": 0}
        body = {"model": "tiny", "prompt": "hello", "suffix": "there", "options": options, "stream": False}
        found = (await client.post("/api/generate", json=body)).json()
        assert text.startswith(found["response"])  # Ollama's schema has no ignore_eos
        assert found["prompt_eval_count"] == len(ids)
        assert "insert" in (await client.post("/api/show", json={"model": "tiny"})).json()["capabilities"]

        found = (await client.post("/infill", json=INFILL)).json()
        assert (found["content"], found["stop"], found["stop_type"]) == (text, True, "limit")
        assert (found["tokens_predicted"], found["tokens_evaluated"]) == (9, len(ids))
        assert found["timings"]["prompt_n"] + found["tokens_cached"] == len(ids)
        reply = await client.post("/infill", json=INFILL | {"stream": True})
        *events, last = events_of(reply.text)
        assert "".join(event["content"] for event in events) == text
        assert [event["stop"] for event in events] == [False] * len(events)
        assert (last["stop"], last["tokens_predicted"]) == (True, 9)


async def test_requests_of_editors(marked: Path, prompt: tuple[list[int], str]):
    """A request as llama.vim sends it, and one that only has the prompt processed."""
    ids, _ = prompt
    extra = [{"filename": "a.py", "text": "x = 1\n"}, {"text": "y"}]
    sent: dict[str, Any] = INFILL | {
        "input_extra": extra, "prompt": "", "id_slot": 0, "n_indent": 0, "samplers": ["top_k", "infill"],
        "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "stream": False,
        "response_fields": ["content", "timings/prompt_n", "timings/none", "tokens_cached", "none/none"],
    }  # fmt: skip

    async with client_of(marked) as (client, service):
        read = (await client.post("/infill", json=sent | {"n_predict": 0})).json()
        assert read["content"] == ""
        long = await client.post("/infill", json=sent | {"response_fields": ["/" * 1000]})
        assert long.status_code == 400, "each slash is a step on the event loop"
        found = (await client.post("/infill", json=sent)).json()
        assert found.keys() == {"content", "timings/prompt_n", "tokens_cached"}
        assert found["tokens_cached"] > 0, "the first request has left its prompt in the cache"
        assert found["tokens_cached"] + found["timings/prompt_n"] > len(ids)
        begun = (await client.post("/infill", json=INFILL | {"prompt": "ab"})).json()
        assert begun["tokens_evaluated"] == len(ids) + 2
        huge = {"input_prefix": "p" * 5000, "input_suffix": "s" * 5000}
        found = (await client.post("/infill", json=INFILL | huge)).json()
        assert found["tokens_evaluated"] == service.model.n_ctx - 9


async def test_wrong_requests_to_fill_in_are_refused(marked: Path, path: Path):
    async def refused(client: httpx.AsyncClient, url: str, message: str, body: dict[str, Any]) -> None:
        reply = await client.post(url, json=body)
        assert reply.status_code == 400, reply.text
        assert message in reply.text

    async with client_of(path) as (client, _):
        for url, body in (
            ("/v1/completions", COMPLETION),
            ("/infill", INFILL),
            ("/api/generate", {"model": "tiny", "prompt": "a", "suffix": "b"}),
        ):
            await refused(client, url, "cannot fill in the middle", body)
        shown = (await client.post("/api/show", json={"model": "tiny"})).json()
        assert "insert" not in shown["capabilities"]
    async with client_of(marked) as (client, _):
        await refused(client, "/v1/completions", "echo is not supported", COMPLETION | {"echo": True})
        await refused(client, "/v1/completions", "one text", COMPLETION | {"prompt": ["a", "b"]})
        await refused(
            client, "/v1/completions", "maximum context length", COMPLETION | {"suffix": "s" * 5000}
        )
        system = {"model": "tiny", "prompt": "a", "suffix": "b", "system": "c"}
        await refused(client, "/api/generate", "without a system message", system)
