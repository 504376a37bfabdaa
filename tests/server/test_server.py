"""The server with a tiny random model: what every API schema depends on, and the first routes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import MESSAGES, client_of

import hotset
from hotset.errors import QueueFullError
from hotset.server.answers import AnswerRequest
from hotset.server.app import create_app
from hotset.server.service import Service

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def expected(model: hotset.Model, content: str = "hello", **params: Any) -> str:
    return model.chat([{"role": "user", "content": content}], **(GREEDY | params)).content


async def test_health_is_503_until_the_model_is_loaded(path: Path):
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load() -> hotset.Model:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return hotset.load(path, device="cpu", n_threads=1)

    heard: list[bool] = []
    service = Service(load, name="tiny", ready=lambda: heard.append(service.is_ready))
    app = create_app(service)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        reply = await client.get("/health")
        assert reply.status_code == 503
        assert "being loaded" in reply.json()["error"]["message"]
        assert reply.headers["retry-after"] == "2"
        asked = await client.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert asked.status_code == 503
        assert heard == []
        gate.set()
        await service.loaded()
        assert heard == [True], "who waits for the word that it is loaded was refused"
        assert (await client.get("/health")).json() == {"status": "ok"}


async def test_a_model_that_cannot_be_loaded(tmp_path: Path):
    service = Service(lambda: hotset.load(tmp_path / "none.gguf"), name="none")
    service.start()
    with pytest.raises(hotset.ModelNotFoundError):
        await service.loaded()
    await service.close()


async def test_models(client: httpx.AsyncClient):
    listed = (await client.get("/v1/models")).json()
    assert [entry["id"] for entry in listed["data"]] == ["tiny"]
    assert (await client.get("/v1/models/tiny")).json() == listed["data"][0]
    reply = await client.get("/v1/models/other")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"


async def test_errors_have_openais_codes(client: httpx.AsyncClient):
    async def refused(status: int = 400, **body: Any) -> dict[str, Any]:
        reply = await client.post("/v1/chat/completions", json={"messages": MESSAGES} | body)
        assert reply.status_code == status, reply.text
        error: dict[str, Any] = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    assert (await refused(n=17))["param"] == "n"
    assert (await refused(temperature=-1))["param"] == "temperature"
    assert (await refused(temperature="warm"))["param"] == "temperature"
    assert (await refused(messages=[]))["param"] == "messages"
    error = await refused(messages=[{"role": "user", "content": "x" * 5000}])
    assert error["code"] == "context_length_exceeded"
    assert "5010 tokens or more" in error["message"]  # estimated from its bytes: it was not tokenized
    exact = await refused(messages=[{"role": "user", "content": "x" * 245}])
    assert "the prompt has 264 tokens" in exact["message"]
    reply = await client.post(
        "/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}
    )
    assert reply.json()["error"]["code"] == "invalid_json"
    assert (await client.get("/nothing")).status_code == 404


async def test_running_answers_are_completed_when_the_server_is_stopped(
    client: httpx.AsyncClient, service: Service
):
    """This includes the scores of a prompt, after which its answers begin."""

    params = hotset.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    request = AnswerRequest(prompts=["a longer prompt"], params=params, prompt_logprobs=0)
    answer = await service.ask(request)
    service.stopping = True
    (choice,) = await answer.whole()
    answer.close()
    assert len(choice.tokens) == 3
    reply = await client.post("/v1/chat/completions", json={"messages": MESSAGES} | GREEDY)
    assert reply.status_code == 503
    assert "shutting down" in reply.json()["error"]["message"]
    service.stopping = False


async def test_requests_that_are_being_tokenized_count_for_the_queue(path: Path):
    async with client_of(path, max_queue=1) as (_, service):
        params = hotset.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        request = AnswerRequest(prompts=["a"], n=3, params=params)
        found = await asyncio.gather(*(service.ask(request) for _ in range(3)), return_exceptions=True)
        full = [one for one in found if isinstance(one, QueueFullError)]
        assert len(full) == 2  # immediately, before a request reaches the engine
        for one in found:
            if not isinstance(one, BaseException):
                await one.whole()
                one.close()
