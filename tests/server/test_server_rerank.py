"""/v1/rerank and /v2/rerank: scores equal the model's own, also while answers run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import client_of, write_model, write_reranker

import hotset
from hotset.reporter import Reporter
from hotset.server.batch import BatchRun
from hotset.server.service import Service

QUERY = "which?"
DOCUMENTS = ["hello", "a longer text " * 5, "x", "hello", "another"]
BODY: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}
JINA, COHERE = "/v1/rerank", "/v2/rerank"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reranker(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def expected(path: Path) -> list[tuple[int, float]]:
    with hotset.load(path, device="cpu", n_threads=1) as model:
        return [(one.index, one.score) for one in model.rerank(QUERY, DOCUMENTS)]


def results(reply: httpx.Response) -> list[tuple[int, float]]:
    assert reply.status_code == 200, reply.text
    return [(one["index"], one["relevance_score"]) for one in reply.json()["results"]]


@pytest.mark.parametrize("url", [JINA, "/v1/reranking", "/rerank", "/reranking"])
async def test_documents_are_ranked(expected: list[tuple[int, float]], url: str, client: httpx.AsyncClient):
    reply = await client.post(url, json=BODY)
    assert results(reply) == expected
    n = sum(len(QUERY) + len(text) for text in DOCUMENTS)
    usage = reply.json()["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"]
    assert 0 < usage["prompt_tokens"] <= n + len(DOCUMENTS)
    assert reply.json()["model"] == "tiny"
    assert all("document" not in one for one in reply.json()["results"])
    assert results(await client.post(url, json=BODY | {"top_n": 2, "model": "tiny"})) == expected[:2]
    assert results(await client.post(url, json=BODY | {"top_n": 99})) == expected
    mixed = [*DOCUMENTS[:2], *({"text": text} for text in DOCUMENTS[2:])]
    reply = await client.post(url, json=BODY | {"documents": mixed, "return_documents": True})
    assert results(reply) == expected
    assert [one["document"]["text"] for one in reply.json()["results"]] == [
        DOCUMENTS[index] for index, _ in expected
    ]


async def test_coheres_form(expected: list[tuple[int, float]], client: httpx.AsyncClient):
    reply = await client.post(COHERE, json=BODY | {"model": "tiny", "top_n": 3})
    assert results(reply) == expected[:3]
    found = reply.json()
    assert found["id"]
    assert found["meta"]["api_version"] == {"version": "2"}
    assert found["meta"]["tokens"]["input_tokens"] > 0
    cut = [text[:4] for text in DOCUMENTS]  # a token is a byte, except "he"
    short = await client.post(COHERE, json=BODY | {"documents": cut})
    long = await client.post(COHERE, json=BODY | {"documents": [text[:3] for text in cut]})
    reply = await client.post(COHERE, json=BODY | {"documents": cut, "max_tokens_per_doc": 4})
    assert results(reply) == results(short)
    documents = [text for text in cut if not text.startswith("he")]
    reply = await client.post(COHERE, json=BODY | {"documents": documents, "max_tokens_per_doc": 3})
    assert {score for _, score in results(reply)} < {score for _, score in results(long)}
    missing = await client.post(COHERE, json={"query": "a"})
    assert (missing.status_code, missing.json()) == (400, {"message": "documents is missing"})


async def test_wrong_requests_are_refused(client: httpx.AsyncClient):
    for wrong, said in (
        ({"query": ""}, "query"),
        ({"query": 3}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents"),
        ({"documents": "abc"}, "documents"),
        ({"documents": [{"image": "a"}]}, "documents"),
        ({"documents": ["a"] * 2049}, "2048"),
        ({"documents": ["x" * 300]}, "256"),
        ({"top_n": 0}, "top_n"),
    ):
        for url in (JINA, COHERE):
            reply = await client.post(url, json=BODY | wrong)
            assert reply.status_code == 400, (wrong, reply.text)
            found = reply.json()
            assert said in (found["message"] if url == COHERE else found["error"]["message"])
    embedded = await client.post("/v1/embeddings", json={"input": "a"})
    assert embedded.status_code == 400
    assert "is a reranker" in embedded.json()["error"]["message"]


async def test_the_number_of_tokens_of_all_documents_is_limited(path: Path, monkeypatch: pytest.MonkeyPatch):
    """The query precedes each document, so a short request could need any number of tokens."""
    monkeypatch.setattr("hotset.server.rerank.MAX_TOKENS", 500)

    async with client_of(path) as (client, _):
        query = "q" * 99  # plus a BOS
        asked = {"query": query, "documents": ["x"] * 4}
        assert (await client.post(JINA, json=asked)).status_code == 200
        reply = await client.post(JINA, json=asked | {"documents": ["x"] * 5})
        assert reply.status_code == 400
        assert "more than 500 tokens in total" in reply.json()["error"]["message"]


def test_a_batch_ranks_documents(path: Path, expected: list[tuple[int, float]], tmp_path: Path):
    request = {"custom_id": "a", "method": "POST", "url": JINA, "body": BODY}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    service = Service(lambda: hotset.load(path, device="cpu", n_threads=1), name="tiny")
    with BatchRun(tmp_path / "requests.jsonl", tmp_path / "answers.jsonl", 64) as batch:
        asyncio.run(batch.run(service, Reporter()))
    answer = json.loads((tmp_path / "answers.jsonl").read_text())["response"]["body"]
    assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == expected


async def test_a_model_without_a_rank_head_is_refused(tmp_path: Path):
    async with client_of(write_model(tmp_path / "tiny.gguf")) as (client, _):
        reply = await client.post(JINA, json=BODY)
        assert reply.status_code == 501
        assert "no rank head" in reply.json()["error"]["message"]
        assert reply.json()["error"]["code"] == "not_supported"
        reply = await client.post(COHERE, json=BODY)
        assert reply.status_code == 501
        assert "no rank head" in reply.json()["message"]
