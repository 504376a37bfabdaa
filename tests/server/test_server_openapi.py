"""The server's OpenAPI document is true: replies have the shapes that it describes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tiny_server import MESSAGES, client_of, write_model, write_reranker

from hotset.server import shapes
from hotset.server.app import create_app
from hotset.server.service import Service
from hotset.server.settings import ServerSettings

GREEDY = {"temperature": 0, "max_tokens": 4}
OPTIONS = {"temperature": 0, "num_predict": 4}
ASKED: list[tuple[str, dict[str, Any], type[shapes.Shape]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES} | GREEDY, shapes.ChatReply),
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2} | GREEDY,
     shapes.ChatReply),
    ("/v1/completions", {"prompt": "hello"} | GREEDY, shapes.CompletionReply),
    ("/v1/completions", {"prompt": "hello", "logprobs": 2, "echo": True} | GREEDY, shapes.CompletionReply),
    ("/v1/embeddings", {"input": ["hello", "ok"]}, shapes.EmbeddingsReply),
    ("/v1/responses", {"input": "hello", "temperature": 0, "max_output_tokens": 4, "top_logprobs": 1},
     shapes.ResponseReply),
    ("/v1/messages", {"model": "tiny", "messages": MESSAGES} | GREEDY, shapes.MessageReply),
    ("/detokenize", {"tokens": [65]}, shapes.DetokenizeReply),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}, shapes.TokenCount),
    ("/api/chat",
     {"model": "tiny", "messages": MESSAGES, "stream": False, "options": OPTIONS, "logprobs": True},
     shapes.OllamaChatReply),
    ("/api/chat", {"model": "tiny"}, shapes.OllamaChatReply),
    ("/api/generate", {"model": "tiny", "prompt": "hello", "stream": False, "options": OPTIONS},
     shapes.OllamaGenerateReply),
    ("/api/embed", {"model": "tiny", "input": ["hello", "ok"]}, shapes.OllamaEmbedReply),
    ("/api/embeddings", {"model": "tiny", "prompt": "hello"}, shapes.OllamaEmbeddingsReply),
]  # fmt: skip
RERANK = {"query": "which?", "documents": ["hello", {"text": "ok"}]}
RANKED: list[tuple[str, dict[str, Any], type[shapes.Shape]]] = [
    ("/v1/rerank", RERANK | {"return_documents": True}, shapes.RerankReply),
    ("/rerank", RERANK, shapes.RerankReply),
    ("/v2/rerank", RERANK, shapes.CohereRerankReply),
]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    def load() -> Any:
        raise AssertionError("nothing is loaded for a document")

    return create_app(Service(load, name="none")).openapi()


def shape_at(responses: dict[str, Any], status: str) -> str:
    return str(responses[status]["content"]["application/json"]["schema"]["$ref"]).rpartition("/")[2]


@pytest.mark.parametrize("asked", [ASKED, RANKED], ids=["generates", "ranks"])
async def test_replies_have_the_documented_shapes(tmp_path: Path, document: dict[str, Any], asked: Any):
    path = (write_reranker if asked is RANKED else write_model)(tmp_path / "tiny.gguf")
    async with client_of(path) as (client, _):
        for where, body, shape in asked:
            reply = await client.post(where, json=body)
            assert reply.status_code == 200, (where, reply.text)
            shape.model_validate(reply.json())
            responses = document["paths"][where]["post"]["responses"]
            assert shape_at(responses, "200") == shape.__name__
            wrong = await client.post(where, json=body | {"model": []})
            assert wrong.status_code == 400
            promised = getattr(shapes, shape_at(responses, "4XX"))
            promised.model_validate(wrong.json())


def test_written_replies_have_constants_in_their_places():
    written = shapes.ToolUseReplyBlock.written(id="1", name="f", input={})
    assert list(written.items()) == [
        ("type", "tool_use"), ("id", "1"), ("caller", {"type": "direct"}), ("name", "f"), ("input", {}),
    ]  # fmt: skip
    assert list(shapes.ChatReplyMessage.written(content="a")) == ["role", "content", "refusal", "annotations"]
    assert shapes.OllamaReply.written(model="m", done=False) == {"model": "m", "done": False}


@pytest.mark.parametrize("shape", [shapes.TokenEntry, shapes.ChatReply])
def test_written_replies_have_no_unknown_fields(shape: type[shapes.Shape]):
    with pytest.raises(KeyError, match="other"):
        shape.written(other=1)


def test_every_route_documents_its_errors(document: dict[str, Any]):
    operations = [
        (path, operation) for path, methods in document["paths"].items() for operation in methods.values()
    ]
    assert {"/v1/messages", "/v1/responses", "/api/chat", "/v1/chat/completions"} < {
        path for path, _ in operations
    }
    for path, operation in operations:
        responses = operation["responses"]
        assert "422" not in responses, path  # this server answers wrong requests with 400
        api_schema = (
            "Anthropic"
            if path.startswith("/v1/messages")
            else "Ollama"
            if path.startswith("/api/")
            else "Cohere"
            if path.startswith("/v2/")
            else "OpenAI"
        )
        for status in ("4XX", "5XX"):
            assert shape_at(responses, status) == f"{api_schema}ErrorReply", path


def test_bodies_and_their_parts_may_have_other_fields(document: dict[str, Any]):
    """The server ignores unknown fields."""
    known = document["components"]["schemas"]
    seen: set[str] = set()

    def walk(part: Any) -> None:
        if isinstance(part, list):
            for one in part:
                walk(one)
        elif isinstance(part, dict):
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name and name not in seen:
                seen.add(name)
                if "properties" in known[name]:
                    assert known[name]["additionalProperties"] is True, name
                walk(known[name])
            for one in part.values():
                walk(one)

    for methods in document["paths"].values():
        for operation in methods.values():
            walk(operation.get("requestBody"))
    assert {"ChatBody", "MessagesBody", "ToolUseBlock", "ResponsesBody", "Options"} <= seen
    assert not [name for name in known if "__" in name]  # two models with one name


def test_keys_are_documented_if_the_server_has_keys(document: dict[str, Any]):
    assert "securitySchemes" not in document["components"]
    with_keys = create_app(Service(lambda: None, ServerSettings(api_keys=("k",)), name="none")).openapi()  # type: ignore[arg-type,return-value]
    schemes = with_keys["components"]["securitySchemes"]
    assert [scheme for one in with_keys["security"] for scheme in one] == list(schemes)
    assert with_keys["paths"]["/health"]["get"]["security"] == []
    assert "security" not in with_keys["paths"]["/v1/chat/completions"]["post"]


@pytest.mark.parametrize(
    ("message", "is_one"),
    [
        (MESSAGES[0], True),
        ({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}, True),
        ({"role": "user", "content": [{"type": "text", "text": "a"}], "own": 1}, True),
        ({"role": "user", "content": [{"type": "image_url"}]}, False),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, True),
        ({"content": "a"}, False),
        ({"role": "user", "content": 3}, False),
    ],
)
def test_the_document_describes_chat_messages(
    document: dict[str, Any], message: dict[str, Any], is_one: bool
):
    schema = document["components"]["schemas"]["ChatBody"]["properties"]["messages"]
    assert jsonschema.Draft202012Validator(schema).is_valid([message]) is is_one


async def test_the_document_is_made_once_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(Service(lambda: None, name="none"))  # type: ignore[arg-type,return-value]
    document, threads = app.openapi(), []

    def noted() -> dict[str, Any]:
        threads.append(threading.current_thread())
        return document

    monkeypatch.setattr(app, "openapi", noted)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        replies = await asyncio.gather(*(client.get("/openapi.json") for _ in range(3)))
    assert [reply.json() for reply in replies] == [document] * 3
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
