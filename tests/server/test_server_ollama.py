"""Ollama's API schema: bodies into turns, deltas into lines, and both over HTTP."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tiny_server import client_of, write_model

import hotset
from hotset.errors import HotsetError
from hotset.server.answers import Delta, Finished, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from hotset.server.fields import Options
from hotset.server.ollama import (
    LineWriter,
    OllamaChatBody,
    OllamaGenerateBody,
    chat_request,
    generate_request,
)

HELLO = {"role": "user", "content": "hello"}
OPTIONS = {"temperature": 0, "num_predict": 24}
BODY = {"model": "tiny", "messages": [HELLO], "options": OPTIONS}


def request(**fields: Any):
    return chat_request(OllamaChatBody.model_validate(BODY | fields))


def turns(*messages: dict[str, Any]) -> list[Any]:
    found = request(messages=list(messages)).messages
    assert found is not None
    return list(found)


# ---- bodies ----


def test_options_reach_the_sampler():
    options = {"seed": 7, "stop": ["a"], "num_predict": 5, "num_ctx": 256, "mirostat": 0, "typical_p": 1}
    asked = request(options=options, keep_alive="5m")
    assert asked.params == hotset.SamplingParams(seed=7, stop=("a",), max_tokens=5)
    assert asked.stream
    assert not request(stream=False).stream
    assert request(options={"num_predict": -1}).params.max_tokens is None
    assert request(options=None).params == hotset.SamplingParams()
    assert request(options={"num_predict": 0}).params.max_tokens is None
    assert request(think=False).thinking.variables == {"enable_thinking": False}
    for low in ({"think": "low"}, {"options": {"reasoning_effort": "low"}}):
        assert request(**low).thinking.variables == {"enable_thinking": True, "reasoning_effort": "low"}
    assert request(format={"type": "boolean"}).params.form == ("json_schema", '{"type": "boolean"}')
    assert request(format="json").params.json_object
    assert request(format="").params.form is None
    assert request(top_logprobs=2).params.logprobs == 2


def test_options_of_loading_change_nothing():
    loading: dict[str, Any] = {
        "num_keep": 4, "num_ctx": 1 << 20, "num_batch": 512, "num_gpu": 99, "num_gqa": 1, "num_thread": 8,
        "main_gpu": 0, "numa": False, "low_vram": False, "f16_kv": True, "logits_all": False,
        "vocab_only": False, "use_mmap": True, "use_mlock": False, "embedding_only": False,
        "rope_frequency_base": 1e4, "rope_frequency_scale": 1.0,
    }  # fmt: skip
    neutral: dict[str, Any] = {
        "typical_p": 1.0, "tfs_z": 1.0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
        "penalize_newline": True,
    }  # fmt: skip
    asked = request(options=OPTIONS | loading | neutral)
    assert asked.params == request().params


def test_a_null_is_an_absent_field():
    options = OPTIONS | dict.fromkeys(set(Options.model_fields) - set(OPTIONS))
    message = HELLO | dict.fromkeys(("thinking", "tool_calls", "tool_name", "images"))
    assert request(options=options, messages=[message]) == request()


def test_results_are_matched_with_their_calls():
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"x": "é"}}, **more}

    first, *rest = turns(
        HELLO,
        {
            "role": "assistant", "content": "", "thinking": "hm",
            "tool_calls": [call("f"), call("g"), call("f")],
        },
        {"role": "tool", "tool_name": "g", "content": "2"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "tool_name": "f", "content": "3"},
    )  # fmt: skip
    assert first == HELLO
    asked, *results = rest
    assert asked["reasoning_content"] == "hm"
    assert [one["id"] for one in asked["tool_calls"]] == ["call_1_0", "call_1_1", "call_1_2"]
    assert asked["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "é"}'}
    assert [(one["tool_call_id"], one["name"], one["content"]) for one in results] == [
        ("call_1_1", "g", "2"),
        ("call_1_0", "f", "1"),
        ("call_1_2", "f", "3"),
    ]
    named = turns(
        HELLO,
        {"role": "assistant", "tool_calls": [call("f", id="a"), call("f", id="b")]},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    )
    assert named[-1]["tool_call_id"] == "b"
    alone = turns(HELLO, {"role": "tool", "tool_name": "h", "tool_call_id": "z", "content": "3"})
    assert alone[-1] == {"role": "tool", "content": "3", "tool_call_id": "z", "name": "h"}


def test_a_prompt_is_sent_through_the_template_or_raw():
    def generated(**fields: Any):
        return generate_request(OllamaGenerateBody.model_validate({"model": "tiny"} | fields))

    asked = generated(prompt="hello", system="be brief")
    assert asked.messages == [{"role": "system", "content": "be brief"}, HELLO]
    raw = generated(prompt="hi<|im_start|>", raw=True)
    assert raw.messages is None
    assert (raw.prompts, raw.parse_special) == (["hi<|im_start|>"], True)
    with pytest.raises(HotsetError, match="raw prompt"):
        generated(prompt="hi", raw=True, system="be brief")


# ---- deltas ----


def told(*deltas: Delta, chat: bool = True) -> list[dict[str, Any]]:
    writer = LineWriter("tiny", None, None, chat=chat)  # type: ignore[arg-type]
    lines = [line for delta in deltas for line in writer.push(delta)]
    for line in lines:
        assert line["model"] == "tiny"
        assert line["done"] is False
        datetime.fromisoformat(line["created_at"])
    return lines


def test_deltas_are_lines():
    deltas = [ReasoningDelta(0, "hm"), TextDelta(0, "so"), TextDelta(0, ""), Finished(0, "stop")]
    thought, text = told(*deltas)
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert text["message"] == {"role": "assistant", "content": "so"}
    thought, text = told(*deltas, chat=False)
    assert (thought["response"], thought["thinking"]) == ("", "hm")
    assert text["response"] == "so"


def test_a_call_is_sent_when_it_is_complete():
    lines = told(
        ToolCallStart(0, 0, "a", "f"),
        ToolCallArguments(0, 0, '{"x"'),
        ToolCallArguments(0, 0, ": 1}"),
        ToolCallStart(0, 1, "b", "g"),
        ToolCallArguments(0, 1, "{"),
        Finished(0, "tool_calls"),
    )
    assert [line["message"]["tool_calls"] for line in lines] == [
        [{"id": "a", "function": {"index": 0, "name": "f", "arguments": {"x": 1}}}],
        [{"id": "b", "function": {"index": 1, "name": "g", "arguments": {"INVALID_JSON": "{"}}}],
    ]


# ---- over HTTP ----


async def test_names_with_a_tag_raw_prompts_and_durations(model: hotset.Model, client: httpx.AsyncClient):
    asked = BODY | {"model": "tiny:latest", "stream": False}
    line = (await client.post("/api/chat", json=asked)).json()
    assert line["model"] == "tiny:latest"
    assert line["prompt_eval_duration"] > 0
    assert line["eval_duration"] > 0
    raw = {"model": "tiny", "prompt": "hello", "options": OPTIONS, "raw": True, "stream": False}
    line = (await client.post("/api/generate", json=raw)).json()
    assert line["response"] == model.generate("hello", temperature=0, max_tokens=24).text


async def test_an_empty_request_loads_the_model(client: httpx.AsyncClient):
    line = (await client.post("/api/generate", json={"model": "tiny", "keep_alive": -1})).json()
    assert (line["done"], line["done_reason"], line["response"]) == (True, "load", "")
    line = (await client.post("/api/chat", json={"model": "tiny", "messages": []})).json()
    assert line["message"]["content"] == ""


@pytest.mark.parametrize("name", ["tiny:latest", "tiny[1m]", "llama3.2", "other:8b"])
async def test_one_model_answers_to_any_name(name: str, client: httpx.AsyncClient):
    for url in ("/api/generate", "/api/chat"):
        reply = await client.post(url, json={"model": name, "keep_alive": 0})
        assert (reply.status_code, reply.json()["done_reason"]) == (200, "load"), url
    asked = [await client.post("/api/show", json={"model": one}) for one in ("tiny", name)]
    assert asked[0].json() == asked[1].json()


async def test_lists_of_models(path: Path, client: httpx.AsyncClient):
    (listed,) = (await client.get("/api/tags")).json()["models"]
    assert listed["name"] == listed["model"] == "tiny"
    assert listed["size"] == path.stat().st_size
    assert len(listed["digest"]) == 64
    assert datetime.fromisoformat(listed["modified_at"]).timestamp() == pytest.approx(path.stat().st_mtime)
    assert listed["details"]["family"] == "llama"
    assert listed["details"]["quantization_level"] == "F32"
    shown = (await client.post("/api/show", json={"model": "tiny"})).json()
    assert shown["details"] == listed["details"]
    assert shown["capabilities"] == ["completion"]
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["tokenizer.ggml.tokens"] is None
    assert str(path) not in json.dumps(shown)
    verbose = (await client.post("/api/show", json={"name": "tiny", "verbose": True})).json()
    assert len(verbose["model_info"]["tokenizer.ggml.tokens"]) == 259
    (running,) = (await client.get("/api/ps")).json()["models"]
    assert running["context_length"] == 256
    found = (await client.get("/api/version")).json()["version"]
    assert tuple(map(int, found.split("."))) >= (0, 13, 4), "Codex refuses an older Ollama"


async def test_capabilities_of_a_model_follow_from_its_template(tmp_path: Path):
    template = "{% if tools %}{% endif %}{% if enable_thinking %}{% endif %}"
    path = write_model(tmp_path / "tiny.gguf", **{"tokenizer.chat_template": template})
    async with client_of(path) as (client, _):
        shown = (await client.post("/api/show", json={"model": "tiny"})).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["template"] == template


async def test_texts_become_vectors(model: hotset.Model, client: httpx.AsyncClient):
    texts = ["hello", "ok"]
    expected = model.embed(texts)

    async def embed(**fields: Any) -> Any:
        reply = await client.post("/api/embed", json={"model": "tiny:latest", **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    found = await embed(input=texts, options={"num_ctx": 128}, keep_alive="5m")
    np.testing.assert_array_equal(np.array(found["embeddings"], np.float32), expected)
    assert found["model"] == "tiny:latest"
    assert found["prompt_eval_count"] == sum(len(model.encode(text)) for text in texts)
    assert (await embed(input=["ok", ""]))["embeddings"] == [found["embeddings"][1]]
    assert (await embed())["embeddings"] == []
    (cut,) = (await embed(input="hello", dimensions=5))["embeddings"]
    np.testing.assert_array_equal(np.array(cut, np.float32), model.embed(["hello"], dimensions=5)[0])
    assert len((await embed(input="hello", dimensions=0))["embeddings"][0]) == 32
    older = await client.post("/api/embeddings", json={"model": "tiny", "prompt": "hello"})
    assert older.json() == {"embedding": found["embeddings"][0]}
    nothing = await client.post("/api/embeddings", json={"model": "tiny"})
    assert nothing.json() == {"embedding": []}
    refused = await client.post("/api/embed", json={"model": "tiny", "input": "hello", "dimensions": 33})
    assert refused.status_code == 400
    assert "from 1 to 32" in refused.json()["error"]


@pytest.mark.parametrize("ends", [False, True])
async def test_a_text_that_is_too_long_is_truncated(tmp_path: Path, ends: bool):
    """A token that ends every text is kept."""
    path = write_model(tmp_path / "tiny.gguf", **{"tokenizer.ggml.add_eos_token": ends})
    with hotset.load(path, device="cpu", n_threads=1) as model:
        ids = model.tokenizer.encode("x" * 300)
        expected = model.embed([[*ids[:255], ids[-1]]])

    asked = {"model": "tiny", "input": ["ok", "x" * 300]}
    async with client_of(path) as (client, _):
        found = (await client.post("/api/embed", json=asked)).json()["embeddings"]
        refused = await client.post("/api/embed", json=asked | {"truncate": False})
    np.testing.assert_array_equal(np.array(found[1], np.float32), expected[0])
    assert refused.status_code == 400
    assert "maximum context length is 256" in refused.json()["error"]


async def test_an_embedding_model_reports_its_capability(tmp_path: Path):
    path = write_model(tmp_path / "tiny.gguf", **{"llama.pooling_type": 3})
    async with client_of(path) as (client, _):
        shown = (await client.post("/api/show", json={"model": "tiny"})).json()
        assert shown["capabilities"] == ["embedding"]
