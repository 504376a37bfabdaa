"""llama-server's own routes: /completion, /completions, /apply-template and /props."""

from __future__ import annotations

from itertools import chain
from typing import Any

import httpx
import pytest
from api_schemas import events_of
from tiny_server import MESSAGES

import hotset
from hotset.server.shapes import LlamaReply

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
BODY = {"prompt": "hello", "n_predict": 9} | GREEDY


@pytest.mark.parametrize("url", ["/completion", "/completions"])
async def test_a_prompt_is_continued(model: hotset.Model, url: str, client: httpx.AsyncClient):
    own = model.generate("hello", max_tokens=9, **GREEDY)

    found = (await client.post(url, json=BODY | {"return_tokens": True})).json()
    LlamaReply.model_validate(found)
    assert (found["content"], found["tokens"]) == (own.text, own.tokens)
    assert (found["stop"], found["stop_type"], found["tokens_predicted"]) == (True, "limit", 9)
    assert found["generation_settings"]["n_predict"] == 9
    assert found["timings"]["prompt_n"] + found["timings"]["cache_n"] == found["tokens_evaluated"]
    reply = await client.post(url, json=BODY | {"stream": True})
    *events, last = events_of(reply.text)
    assert "".join(event["content"] for event in events) == own.text
    assert [token for event in events for token in event["tokens"]] == own.tokens
    assert {event["stop"] for event in events} == {False}
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", 9)


async def test_forms_of_a_prompt(model: hotset.Model, client: httpx.AsyncClient):
    """A text, tokens, both, an object, and lists of these."""
    ids = model.encode("hello", parse_special=True)
    texts = [model.generate(one, max_tokens=9, **GREEDY).text for one in ("hello", "ok")]
    mixed = [*ids[:-1], model.tokenizer.decode(ids[-1:])]
    first: list[Any] = ["hello", ids, mixed, [mixed], {"prompt_string": "hello"}]

    for prompt in first:
        found = (await client.post("/completion", json=BODY | {"prompt": prompt})).json()
        assert found["content"] == texts[0], prompt
    both = (await client.post("/completion", json=BODY | {"prompt": ["hello", "ok"]})).json()
    assert [(one["index"], one["content"]) for one in both] == list(enumerate(texts))
    reply = await client.post("/completion", json=BODY | {"prompt": [ids, "ok"], "stream": True})
    for i, text in enumerate(texts):
        own = [event["content"] for event in events_of(reply.text) if event["index"] == i]
        assert "".join(own) == text
    for wrong, status in (([], 400), ({}, 400), (3.5, 400), ({"multimodal_data": ["aGk="]}, 501)):
        assert (await client.post("/completion", json={"prompt": wrong})).status_code == status, wrong


async def test_fields_of_a_reply(model: hotset.Model, client: httpx.AsyncClient):
    own = model.generate("hello", max_tokens=9, logprobs=2, **GREEDY)
    stop = own.text[3:5]

    found = (await client.post("/completion", json=BODY | {"n_probs": 2})).json()
    probabilities = found["completion_probabilities"]
    assert [one["id"] for one in probabilities] == own.tokens
    for one, expected in zip(probabilities, own.logprobs, strict=True):
        assert one["logprob"] == pytest.approx(expected.logprob)
        assert [(each["id"], each["logprob"]) for each in one["top_logprobs"]] == [
            (id, pytest.approx(logprob)) for id, logprob in expected.top
        ]
    reply = await client.post("/completion", json=BODY | {"n_probs": 2, "stream": True})
    events = (event.get("completion_probabilities", ()) for event in events_of(reply.text))
    assert list(chain.from_iterable(events)) == probabilities
    found = (await client.post("/completion", json=BODY | {"stop": [stop]})).json()
    assert (found["content"], found["stop_type"]) == (own.text[: own.text.index(stop)], "word")
    assert found["stopping_word"] == stop
    fields = ["content", "timings/prompt_n", "generation_settings/temperature", "none"]
    found = (await client.post("/completion", json=BODY | {"response_fields": fields})).json()
    assert found.keys() == set(fields[:3])
    assert found["generation_settings/temperature"] == 0
    long = BODY | {"prompt": "x" * 100}
    read = (await client.post("/completion", json=long | {"n_predict": 0})).json()
    assert (read["content"], read["tokens_predicted"], read["tokens_evaluated"] > 99) == ("", 0, True)
    cached = [
        (await client.post("/completion", json=long | {"cache_prompt": reuse})).json()
        for reuse in (True, False)
    ]
    assert cached[0]["tokens_cached"] > 0 == cached[1]["tokens_cached"]


async def test_an_applied_template_is_the_prompt_of_the_chat(client: httpx.AsyncClient):
    begun = [*MESSAGES, {"role": "assistant", "content": "he"}]

    for more in ({"messages": MESSAGES}, {"messages": begun}):
        chat: dict[str, Any] = more | {"max_tokens": 9} | GREEDY
        expected = (await client.post("/v1/chat/completions", json=chat)).json()
        applied = await client.post("/apply-template", json=more)
        assert applied.status_code == 200, applied.text
        body = BODY | {"prompt": applied.json()["prompt"]}
        found = (await client.post("/completion", json=body)).json()
        assert found["content"] == expected["choices"][0]["message"]["content"]
        assert found["tokens_evaluated"] == expected["usage"]["prompt_tokens"]
    assert (await client.post("/apply-template", json={"messages": []})).status_code == 400


async def test_properties(client: httpx.AsyncClient):
    props = (await client.get("/props")).json()
    params = props["default_generation_settings"]["params"]
    assert {"n_predict": -1, "repeat_last_n": 64, "top_k": 40}.items() <= params.items()
    assert props["build_info"].startswith("hotset ")
    assert props["modalities"] == {"vision": False, "audio": False}
