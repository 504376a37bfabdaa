"""The small routes: tokens, served models, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_server import MESSAGES, client_of, write_model

import hotset
from hotset.server import tokens
from hotset.server.answers import AnswerRequest
from hotset.server.service import Service

CHAT = "/v1/chat/completions"


async def test_tokenize_as_llama_server_and_as_vllm(model: hotset.Model, client: httpx.AsyncClient):
    async def ids(**body: Any) -> list[Any]:
        reply = await client.post("/tokenize", json=body)
        assert reply.status_code == 200, reply.text
        found: list[Any] = reply.json()["tokens"]
        assert reply.json()["count"] == len(found)
        return found

    text = "hé</s>"
    encode = model.tokenizer.encode
    assert await ids(content=text) == encode(text, add_special=False, parse_special=True)
    assert await ids(content=text, add_special=True, parse_special=False) == encode(text)
    assert await ids(prompt=text) == encode(text, parse_special=True)
    assert await ids(prompt=text, parse_special=False) == encode(text)
    assert await ids(prompt=text, add_special_tokens=False) == await ids(content=text)
    # By default the tokens equal the same prompt's tokens in /v1/completions.
    for prompt in ("a<|im_start|>b", "<s>he", "<s><s>he"):
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 0}
        echo = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        asked = await client.post("/tokenize", json={"prompt": prompt, "return_token_strs": True})
        assert asked.json()["token_strs"] == echo["logprobs"]["tokens"]
    assert await ids(messages=MESSAGES) == model.encode_chat(MESSAGES)
    shorter = await ids(messages=MESSAGES, add_generation_prompt=False)
    assert shorter == model.encode_chat(MESSAGES, add_generation_prompt=False)
    assert len(shorter) < len(model.encode_chat(MESSAGES))
    pieces = await ids(content="hé", with_pieces=True)
    assert [one["piece"] for one in pieces] == ["h", [0xC3], [0xA9]]
    reply = await client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})
    assert reply.json()["token_strs"] == ["<s>", "a", "b"]
    for wrong in ({}, {"content": "a", "prompt": "b"}, {"content": 3}):
        assert (await client.post("/tokenize", json=wrong)).status_code == 400


async def test_detokenize(model: hotset.Model, monkeypatch: pytest.MonkeyPatch, client: httpx.AsyncClient):
    ids = model.tokenizer.encode("grün")
    reply = (await client.post("/detokenize", json={"tokens": ids})).json()
    assert reply == {"content": "<s>grün", "prompt": "<s>grün"}
    for wrong in ([99999], [-1], ["a"], [1.5], [True]):
        assert (await client.post("/detokenize", json={"tokens": wrong})).status_code == 400, wrong
    monkeypatch.setattr(tokens, "MAX_TEXT_BYTES", 4)
    assert (await client.post("/detokenize", json={"tokens": ids[:2]})).status_code == 200
    long = await client.post("/detokenize", json={"tokens": ids})
    assert (long.status_code, long.json()["error"]["param"]) == (413, "tokens")


async def test_tokenizer_info(client: httpx.AsyncClient):
    info = (await client.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", None)
    assert "add_generation_prompt" in info["chat_template"]
    assert info["add_bos_token"] is True


async def test_props_and_plan(path: Path, client: httpx.AsyncClient, service: Service):
    props = (await client.get("/props")).json()
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    assert props["model_path"] == "tiny.gguf"  # without its folder
    assert props["hotset"]["sparsity"]["mode"] == "dense"
    plan = (await client.get("/plan")).json()
    assert plan["placement"] is None
    assert plan["file_bytes"] == path.stat().st_size
    assert plan["cache"]["tokens"] == 64 * plan["cache"]["blocks"] >= 256
    cost = service.model.cost
    assert plan["cache"]["bytes"] == plan["cache"]["tokens"] * cost.kv_bytes_per_token("f16")


@pytest.mark.backend("triton")
async def test_plan_of_a_device(path: Path):
    pytest.importorskip("torch")
    async with client_of(path, load={"device": ["simulated"]}) as (client, _):
        plan = (await client.get("/plan")).json()
        assert len(plan["placement"]["layers"]) == plan["layers"]
        assert plan["memory"][0]["measured"]["total"] > 0


def values_of(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def test_metrics(client: httpx.AsyncClient, service: Service):
    async def values() -> dict[str, float]:
        return values_of((await client.get("/metrics")).text)

    before = await values()
    assert before["hotset_ready"] == 1
    assert before["hotset_answers_total{reason=length}"] == 0
    assert before["hotset_cache_blocks_used"] == 0
    assert before["process_open_fds"] > 0
    text = "once upon a time " * 8
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "ignore_eos": True}
    usages = []
    for stream in (False, True):
        reply = await client.post(CHAT, json=body | {"max_tokens": 7, "stream": stream})
        assert reply.status_code == 200
        if not stream:
            usages.append(reply.json()["usage"])
    assert (await client.post(CHAT, json={})).status_code == 400
    assert (await client.get("/made-up/path")).status_code == 404
    assert (await client.get("/health", headers={"host": "evil.example"})).status_code == 403
    request = AnswerRequest(prompts=["a"], params=hotset.SamplingParams(seed=1))
    (await service.ask(request)).close()
    after = await values()
    assert after[f"hotset_http_requests_total{{route={CHAT},status=200}}"] == 2
    assert after[f"hotset_http_requests_total{{route={CHAT},status=400}}"] == 1
    assert after["hotset_http_requests_total{route=none,status=404}"] == 1
    assert after["hotset_http_requests_total{route=none,status=403}"] == 1
    assert not any("made-up" in name for name in after)
    assert after["hotset_answers_total{reason=length}"] == 2
    assert after["hotset_answers_total{reason=cancelled}"] == 1
    assert 14 <= after["hotset_generated_tokens_total"] <= 15
    n_prompt = usages[0]["prompt_tokens"]
    assert 2 * n_prompt - 128 <= after["hotset_prompt_tokens_total"] <= 2 * n_prompt - 128 + 2
    assert after["hotset_cached_prompt_tokens_total"] == 128
    assert after["hotset_steps_total"] > 7
    assert after["hotset_step_seconds_total"] > 0
    assert after["hotset_refused_total"] == 0
    assert after["hotset_cache_blocks_idle"] >= 2
    assert after["hotset_time_per_token_seconds_count"] == 2
    assert after["hotset_request_seconds_count"] == 3
    assert after["hotset_answers_open"] == 0


async def test_chat_template_variables(path: Path, tmp_path: Path):
    """Variables of a request reach the template, but cannot replace the template's own."""
    template = "{{ bos_token }}{{ mood }}:{% for m in messages %}{{ m.content }}{% endfor %}"
    own = write_model(tmp_path / "own.gguf", **{"tokenizer.chat_template": template})

    async with client_of(own) as (client, _):
        body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1, "temperature": 0}
        reply = await client.post(CHAT, json=body | {"chat_template_kwargs": {"mood": "grand"}})
        assert reply.json()["usage"]["prompt_tokens"] == 1 + len("grand:hello")
        for name in ("messages", "tools", "self", "bos_token", "add_generation_prompt", "a b", ""):
            reply = await client.post(CHAT, json=body | {"chat_template_kwargs": {name: 1}})
            assert reply.status_code == 400, name
            assert "chat template" in reply.json()["error"]["message"]
