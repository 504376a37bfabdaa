"""OpenAI's chat and completion parameters, each compared with the model's own answer."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import numpy as np
import pytest
from openai.pagination import SyncPage
from openai.types import CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from pydantic import TypeAdapter
from tiny_server import MESSAGES, events_of

import hotset
from hotset.server.openai.completions import CompletionBody
from hotset.server.replies import TextEvents, event
from hotset.server.service import Service

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


async def posted(client: httpx.AsyncClient, url: str, **body: Any) -> dict[str, Any]:
    reply = await client.post(url, json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def test_other_names_of_parameters(client: httpx.AsyncClient):
    named = CompletionBody.model_validate({"prompt": "a", "repeat_penalty": 1.8}).request().params
    assert named == hotset.SamplingParams(repetition_penalty=1.8, max_tokens=16)

    for name in ("max_tokens", "n_predict", "max_completion_tokens"):
        body = await posted(client, CHAT, messages=MESSAGES, temperature=0, ignore_eos=True, **{name: 5})
        assert body["usage"]["completion_tokens"] == 5
    reply = await client.post(
        CHAT, json={"messages": MESSAGES, "temperature": 0, "max_tokens": 3, "n_predict": 4}
    )
    assert reply.json()["usage"]["completion_tokens"] == 3
    assert reply.headers["x-hotset-ignored"] == "n_predict"
    endless = await posted(client, CHAT, messages=MESSAGES, temperature=0, ignore_eos=True, max_tokens=-1)
    assert endless["usage"]["total_tokens"] == 256
    assert endless["choices"][0]["finish_reason"] == "length"
    completion = await posted(client, COMPLETIONS, prompt="a", temperature=0, ignore_eos=True)
    assert completion["usage"]["completion_tokens"] == 16


async def test_several_answers_have_different_seeds(model: hotset.Model, client: httpx.AsyncClient):
    params = {"seed": 2**64 - 1, "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    body = await posted(client, COMPLETIONS, prompt=["ab", "xyz"], n=2, **params)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    seeds = [2**64 - 1, 0] * 2
    for choice, prompt, seed in zip(body["choices"], ["ab", "ab", "xyz", "xyz"], seeds, strict=True):
        assert choice["text"] == model.generate(prompt, **(params | {"seed": seed})).text
    assert body["usage"]["prompt_tokens"] == 3 + 4
    assert body["usage"]["completion_tokens"] == 32


@pytest.mark.parametrize("stream", [False, True])
async def test_only_one_of_several_answers_processes_the_prompt(
    model: hotset.Model, stream: bool, client: httpx.AsyncClient, service: Service
):

    prompt = "once upon a time there was " * 5
    params = {"seed": 3, "max_tokens": 9, "ignore_eos": True}
    n_computed = []
    step = service.model.backend.step

    def counting(batch: Any) -> Any:
        n_computed.append(len(batch.tokens))
        return step(batch)

    service.model.backend.step = counting  # type: ignore[method-assign]
    reply = await client.post(COMPLETIONS, json={"prompt": prompt, "n": 4, "stream": stream} | params)
    if stream:
        choices = [event["choices"][0] for event in events_of(reply.text)[0]]
    else:
        choices = reply.json()["choices"]
    for i in range(4):
        text = "".join(choice["text"] for choice in choices if choice["index"] == i)
        assert text == model.generate(prompt, **(params | {"seed": 3 + i})).text
    n_prompt = len(model.encode(prompt))
    assert sum(n_computed) == n_prompt + 3 * (n_prompt - 128) + 4 * 8


async def test_prompts_of_every_kind(model: hotset.Model, client: httpx.AsyncClient):
    ids = model.encode("hello")
    text = model.generate("hello", **GREEDY).text
    for prompt in ("hello", ["hello"], ids, [ids], [ids, ids]):
        body = await posted(client, COMPLETIONS, prompt=prompt, **GREEDY)
        assert {choice["text"] for choice in body["choices"]} == {text}
    for bad in ([], [[]], {}, None, 3, [1, "a"], [99999], [-1], [[1.5]]):
        reply = await client.post(COMPLETIONS, json={"prompt": bad, "max_tokens": 1, "temperature": 0})
        assert reply.status_code == 400, (bad, reply.text)


async def test_special_tokens_of_a_prompt_are_parsed(model: hotset.Model, client: httpx.AsyncClient):
    """llama-server, vLLM and Ollama (raw) do the same. With parse_special: false they are text."""
    prompt, rest = "a<|im_start|>b", [ord("a"), 258, ord("b")]
    ids = {True: [256, *rest], False: [256, *prompt.encode()]}

    for parses, switch in (
        (True, {}),
        (True, {"parse_special": True}),
        (False, {"parse_special": False}),
    ):
        expected = model.generate(ids[parses], **GREEDY).text
        body = await posted(client, COMPLETIONS, prompt=prompt, **GREEDY, **switch)
        assert body["choices"][0]["text"] == expected
        assert body["usage"]["prompt_tokens"] == len(ids[parses])
        one = {"temperature": 0, "max_tokens": 1, "ignore_eos": True, "echo": True, "logprobs": 0}
        body = await posted(client, COMPLETIONS, prompt=["x", prompt], **one, **switch)
        choice = body["choices"][1]
        assert choice["text"][: len(prompt)] == prompt
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == [0, 0, 1, 13, 14] if parses else [0, *range(len(prompt) + 1)]
    raw = {"model": "tiny", "prompt": prompt, "raw": True, "stream": False}
    options = {"options": {"temperature": 0, "num_predict": 12}}
    answer = (await client.post("/api/generate", json=raw | options)).json()
    assert answer["prompt_eval_count"] == len(ids[True])
    # A prompt that begins with the file's BOS has it only once.
    body = await posted(client, COMPLETIONS, prompt=f"<s>{prompt}", **GREEDY)
    assert body["usage"]["prompt_tokens"] == len(ids[True])


async def test_chat_logprobs(model: hotset.Model, client: httpx.AsyncClient):
    answer = model.generate(model.encode_chat(MESSAGES), logprobs=3, **GREEDY)
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3} | GREEDY
    content = (await posted(client, CHAT, **body))["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [one.logprob for one in answer.logprobs]
    assert [entry["bytes"] for entry in content] == [
        list(model.tokenizer.token_bytes(token)) for token in answer.tokens
    ]
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * 12
    assert content[0]["top_logprobs"][0]["logprob"] == answer.logprobs[0].top[0][1]
    plain = await posted(client, CHAT, messages=MESSAGES, logprobs=True, **GREEDY)
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    for wanted in ({"top_logprobs": 3}, {"logprobs": 3}):
        again = await posted(client, CHAT, messages=MESSAGES, **wanted, **GREEDY)
        assert again["choices"][0]["logprobs"]["content"] == content


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_scores_a_prompt(
    model: hotset.Model, max_tokens: int, stream: bool, client: httpx.AsyncClient
):
    """Evaluation harnesses send such requests."""

    ids = model.encode("the quick brown fox" * 9)
    scores = log_softmax(model.logits(ids))
    expected = [scores[i - 1, ids[i]] for i in range(1, len(ids))]
    body = {
        "prompt": [ids, ids[:70]], "echo": True, "logprobs": 2, "max_tokens": max_tokens,
        "stream": stream,
    }  # fmt: skip
    reply = await client.post(COMPLETIONS, json=body | {"temperature": 0})
    assert reply.status_code == 200, reply.text
    if stream:
        events, _ = events_of(reply.text)
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
        found = {
            name: [one for choice in choices for one in choice["logprobs"][name]]
            for name in choices[0]["logprobs"]
        }
        text = "".join(choice["text"] for choice in choices)
    else:
        choice = reply.json()["choices"][0]
        found, text = choice["logprobs"], choice["text"]
        assert len(reply.json()["choices"][1]["logprobs"]["tokens"]) == 70 + max_tokens
        assert reply.json()["usage"]["completion_tokens"] == 2 * max_tokens
    n = len(ids) + max_tokens
    assert [len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [
        n
    ] * 4
    assert text.startswith("<s>" + "the quick brown fox" * 9)
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    np.testing.assert_allclose(found["token_logprobs"][1 : len(ids)], expected, atol=1e-5)
    for i in range(1, len(ids)):
        best = max(found["top_logprobs"][i].values())
        assert best == pytest.approx(scores[i - 1].max(), abs=1e-5)
        assert found["tokens"][i] in found["top_logprobs"][i]
        assert 2 <= len(found["top_logprobs"][i]) <= 3
    assert text[found["text_offset"][5]] == found["tokens"][5]


async def test_offsets_of_a_text_prompt_and_its_echo(model: hotset.Model, client: httpx.AsyncClient):
    ascii_only = {str(id): -1000.0 for id in range(259) if not 32 <= id < 127}
    params = GREEDY | {"logprobs": 0, "logit_bias": ascii_only}
    echo = (await posted(client, COMPLETIONS, prompt="grün", echo=True, **params))["choices"][0]
    assert echo["text"].startswith("grün")
    logprobs = echo["logprobs"]
    assert logprobs["tokens"][:6] == ["<s>", "g", "r", "bytes:\\xc3", "bytes:\\xbc", "n"]
    assert logprobs["text_offset"][:7] == [0, 0, 1, 2, 2, 3, 4]
    plain = (await posted(client, COMPLETIONS, prompt="grün", **params))["choices"][0]
    assert echo["text"] == "grün" + plain["text"]
    assert plain["logprobs"]["text_offset"] == list(range(4, 16))
    assert plain["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][6:]
    without = await posted(client, COMPLETIONS, prompt="grün", echo=True, **GREEDY)
    assert without["choices"][0]["logprobs"] is None
    nothing = await posted(client, COMPLETIONS, prompt="grün", echo=True, max_tokens=0, temperature=0)
    assert nothing["choices"][0]["text"] == "grün"
    assert nothing["usage"]["completion_tokens"] == 0


async def test_without_cache_prompt_a_prompt_is_computed_again(client: httpx.AsyncClient):
    prompt = "once upon a time " * 10
    cached = []
    for more in ({}, {"cache_prompt": True}, {"cache_prompt": False}):
        usage = (await posted(client, COMPLETIONS, prompt=prompt, **GREEDY, **more))["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 128, 0]


async def test_a_message_of_several_text_parts(model: hotset.Model, client: httpx.AsyncClient):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = await posted(client, CHAT, messages=[{"role": "user", "content": parts}], **GREEDY)
    assert body["choices"][0]["message"]["content"] == model.chat(MESSAGES, **GREEDY).content


async def test_a_request_may_omit_the_only_models_name(client: httpx.AsyncClient):
    for url, subject in ((CHAT, {"messages": MESSAGES}), ("/v1/embeddings", {"input": "a"})):
        for named in ({}, {"model": None}, {"model": ""}):
            reply = await client.post(url, json=subject | named | {"temperature": 0})
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == "tiny"


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_unsupported_fields_are_refused_by_name(url: str, client: httpx.AsyncClient):
    subject: dict[str, Any] = {"messages": MESSAGES} if url == CHAT else {"prompt": "a"}
    subject["model"] = "tiny"
    refused: dict[str, Any] = {
        "n": 0, "logit_bias": {"99999": 1}, "max_tokens": 0, "frequency_penalty": math.inf,
    }  # fmt: skip
    refused |= (
        {"top_logprobs": 21, "reasoning_effort": "much"}
        if url == CHAT
        else {"echo": 3, "suffix": "x", "logprobs": 21}
    )
    for name, value in refused.items():
        reply = await client.post(
            url,
            content=json.dumps(subject | {"temperature": 0, name: value}),
            headers={"content-type": "application/json"},
        )
        assert reply.status_code == 400, (name, reply.text)
        assert name.split("_")[0] in reply.json()["error"]["message"], name
    too_many = await client.post(url, json=subject | {"n": 17} | GREEDY)
    assert too_many.status_code == 400
    assert "at most 16 answers, not 17" in too_many.json()["error"]["message"]


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_fields_without_effect_are_accepted(url: str, client: httpx.AsyncClient):
    """Fields of a certain provider, and neutral values."""

    subject: dict[str, Any] = {"messages": MESSAGES} if url == CHAT else {"prompt": "a"}
    subject["model"] = "tiny"
    subject |= GREEDY
    accepted: dict[str, Any] = {
        "n": 1, "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex",
        "safety_identifier": "x", "prompt_cache_key": "y", "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit"}, "presence_penalty": 0, "frequency_penalty": 0.0,
        "logit_bias": {},
    }  # fmt: skip
    if url == CHAT:
        accepted |= {
            "modalities": ["text"], "logprobs": False, "tools": [], "tool_choice": "auto",
            "parallel_tool_calls": True, "response_format": {"type": "text"}, "verbosity": "low",
            "prediction": {"type": "content", "content": "hello"},
        }  # fmt: skip
    choices = (await posted(client, url, **subject))["choices"]
    assert (await posted(client, url, **subject | accepted))["choices"] == choices
    nested = {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}}
    events, _ = events_of((await client.post(url, json=subject | nested)).text)
    assert all(event["choices"] for event in events)
    missing = await client.post(url, json=subject | dict.fromkeys(("messages", "prompt")))
    assert "is missing" in missing.json()["error"]["message"]


async def test_a_message_with_every_field_is_accepted(client: httpx.AsyncClient):
    """Clients send an answer back with every field of its type, most of them null."""
    answer = ChatCompletionMessage(role="assistant", content="well").model_dump()
    assert None in answer.values()

    question, again = MESSAGES[0], {"role": "user", "content": "and?"}
    plain = [question, {"role": "assistant", "content": "well"}, again]
    nulls = [question | {"name": None}, answer, again]
    choices = [
        (await posted(client, CHAT, messages=messages, **GREEDY))["choices"] for messages in (plain, nulls)
    ]
    assert choices[0] == choices[1]


async def test_unknown_roles_are_refused(client: httpx.AsyncClient):
    message = "messages.1: the role must be one of system, developer, user, assistant, tool, function"
    for role in ("wizard", "", None, 3):
        reply = await client.post("/tokenize", json={"messages": [*MESSAGES, {"role": role}]})
        assert reply.status_code == 400, role
        assert message in reply.json()["error"]["message"]
    system, developer = [
        await posted(client, CHAT, messages=[{"role": role, "content": "be brief"}, *MESSAGES], **GREEDY)
        for role in ("system", "developer")
    ]
    assert system["choices"] == developer["choices"]


async def test_replies_fit_the_official_clients_types(client: httpx.AsyncClient):
    """The reply has every required field, with the right type. Answers are checked in api_schemas.py."""

    several = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2} | GREEDY
    answer = ChatCompletion.model_validate(await posted(client, CHAT, **several), strict=True)
    assert answer.choices[1].message.annotations == []
    models = (await client.get("/v1/models")).text
    TypeAdapter(SyncPage[Model]).validate_json(models, strict=True)
    embeddings = await client.post("/v1/embeddings", json={"input": ["hello"]})
    CreateEmbeddingResponse.model_validate_json(embeddings.text, strict=True)


@pytest.mark.parametrize("text", ["", "a", '"quoted"\n', "naïve \u2028 🙂", "\ud800 alone", "</script>\\"])
def test_prepared_events_equal_events_written_individually(text: str):
    def value(content: str) -> dict[str, Any]:
        delta = {"index": 0, "delta": {"content": content}, "logprobs": None}
        return {"id": "x", "model": "ä", "choices": [delta]}

    written = TextEvents(value(TextEvents.HOLE))
    assert written(text) == event(value(text)) == written(text)
