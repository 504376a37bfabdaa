"""POST /v1/embeddings: vectors equal the model's own, also while answers run."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import httpx
import numpy as np
import pytest
from tiny_server import MESSAGES, Serving, client_of, metrics_of, write_model

import hotset
from hotset.server.service import Service

URL = "/v1/embeddings"
TEXTS = ["hello", "a longer text " * 9, "x"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def expected(path: Path) -> np.ndarray:
    with hotset.load(path, device="cpu", n_threads=1) as model:
        return model.embed(TEXTS)


def vectors(reply: httpx.Response) -> np.ndarray:
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return np.array([entry["embedding"] for entry in data], np.float32)


async def test_vectors_equal_the_models_own(
    expected: np.ndarray, client: httpx.AsyncClient, service: Service
):

    reply = await client.post(URL, json={"input": TEXTS, "model": "tiny"})
    np.testing.assert_array_equal(vectors(reply), expected)
    ids = [service.model.encode(text) for text in TEXTS]
    n = sum(map(len, ids))
    assert reply.json()["usage"] == {"prompt_tokens": n, "total_tokens": n}
    np.testing.assert_array_equal(vectors(await client.post(URL, json={"input": ids})), expected)
    np.testing.assert_array_equal(vectors(await client.post(URL, json={"input": ids[0]})), expected[:1])
    np.testing.assert_array_equal(vectors(await client.post(URL, json={"input": "x"})), expected[2:])
    many = await client.post(URL, json={"input": TEXTS * 5})  # more than the model processes at once
    np.testing.assert_array_equal(vectors(many), np.tile(expected, (5, 1)))
    coded = (await client.post(URL, json={"input": TEXTS, "encoding_format": "base64"})).json()
    for entry, vector in zip(coded["data"], expected, strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(entry["embedding"]), "<f4"), vector)


async def test_embeddings_while_answers_run(expected: np.ndarray, client: httpx.AsyncClient):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 60, "ignore_eos": True}

    alone = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    chats = [client.post("/v1/chat/completions", json=body) for _ in range(3)]
    found = await asyncio.gather(client.post(URL, json={"input": TEXTS}), *chats)
    np.testing.assert_array_equal(vectors(found[0]), expected)
    assert all(reply.json()["choices"] == alone for reply in found[1:])


async def test_wrong_requests_are_refused(client: httpx.AsyncClient):
    for body, said in (
        ({"input": ""}, "empty"),
        ({"input": []}, "empty"),
        ({"input": ["a", ""]}, "empty"),
        ({"input": [[]]}, "empty"),
        ({}, "missing"),
        ({"input": 3}, "input"),
        ({"input": "a", "dimensions": 33}, "from 1 to 32"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": [99999]}, "99999"),
        ({"input": "x" * 300}, "256"),
        ({"input": ["a"] * 2049}, "2048"),
    ):
        reply = await client.post(URL, json=body)
        assert reply.status_code == 400, (body, reply.text)
        assert said in reply.json()["error"]["message"]
    assert (
        await client.post(URL, json={"input": "a", "dimensions": "32", "user": 5, "made_up": 1})
    ).status_code == 200


def test_a_disconnected_client(path: Path):
    with Serving(path) as server:
        ids = [[65] * 200] * 1500
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(URL, json={"input": ids}, timeout=0.2)
        server.wait_until_idle()
        reply = server.client.post(URL, json={"input": "hello"})
        assert reply.status_code == 200


async def in_the_engine(service: Service, n: int) -> None:
    while service.model.thread.counters().waiting < n:
        await asyncio.sleep(0)


async def test_a_text_becomes_a_sequence_only_when_its_turn_comes(
    monkeypatch: pytest.MonkeyPatch, client: httpx.AsyncClient, service: Service
):
    """A sequence has some hundred objects, which Python's garbage collector examines repeatedly."""

    engine, made = service.model.engine, []
    prepare = engine.prepare_tap
    monkeypatch.setattr(
        engine, "prepare_tap", lambda *given, **how: made.append(prepare(*given, **how)) or made[-1]
    )
    with service.model.thread.exclusive():
        asked = asyncio.create_task(client.post(URL, json={"input": ["hello"] * 50}))
        await in_the_engine(service, 4)
        assert len(made) == 4
    assert (await asked).status_code == 200
    assert len(made) == 50


async def test_texts_of_a_disconnected_client_are_not_computed(client: httpx.AsyncClient, service: Service):
    """Check that no token is computed, because none of the texts had begun."""

    thread = service.model.thread
    with thread.exclusive():  # nothing is computed here
        asked = asyncio.create_task(client.post(URL, json={"input": ["hello"] * 9}))
        await in_the_engine(service, 4)
        assert (await metrics_of(client))["hotset_answers_open"] == 9
        asked.cancel()
        await asyncio.wait([asked])
    after = await client.post(URL, json={"input": "hello"})
    assert after.status_code == 200
    found = await metrics_of(client)
    assert found["hotset_prompt_tokens_total"] == after.json()["usage"]["prompt_tokens"]
    assert found['hotset_answers_total{reason="cancelled"}'] == 9
    assert found['hotset_answers_total{reason="stop"}'] == 1
    assert found["hotset_answers_open"] == 0


async def test_texts_count_for_the_queues_limit(path: Path):
    async with client_of(path, max_queue=2) as (client, service):
        with service.model.thread.exclusive():
            first = asyncio.create_task(client.post(URL, json={"input": ["hello"] * 9}))
            await in_the_engine(service, 4)
            refused = await client.post(URL, json={"input": ["hello"] * 3})  # room for two
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert service.model.thread.counters().waiting == 4  # none of the three was admitted
            second = asyncio.create_task(client.post(URL, json={"input": ["hello"] * 2}))
            await in_the_engine(service, 6)
            chat = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "seed": 1})
            assert chat.status_code == 429
        for task, n in ((first, 9), (second, 2)):
            assert len(vectors(await task)) == n


async def test_a_shutdown_ends_texts_like_answers(client: httpx.AsyncClient, service: Service):
    with service.model.thread.exclusive():
        asked = asyncio.create_task(client.post(URL, json={"input": ["hello"] * 9}))
        await in_the_engine(service, 4)
        service.end_answers()
        assert (await asked).status_code == 503
    assert not service.n_open


async def test_dimensions_keeps_the_first_values(expected: np.ndarray, client: httpx.AsyncClient):
    found = vectors(await client.post(URL, json={"input": TEXTS, "dimensions": 5}))
    cut = expected[:, :5] / np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(found, cut, atol=1e-6)
    coded = await client.post(URL, json={"input": TEXTS, "dimensions": 5, "encoding_format": "base64"})
    for entry, vector in zip(coded.json()["data"], found, strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(entry["embedding"]), "<f4"), vector)
