"""The official clients of OpenAI and Anthropic, connected to a server on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from tiny_server import Serving

import hotset

# Words after which the test model ends its answer by itself: some helpers of the clients accept only complete
# answers.
MESSAGES: list[Any] = [{"role": "user", "content": "ok"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 100}


@pytest.fixture(scope="module")
def expected(model: hotset.Model) -> str:
    """Return the model's answer to MESSAGES."""
    answer = model.chat(MESSAGES, **GREEDY)
    assert answer.completion.finish_reason == "stop"
    return answer.content


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    with Serving(path, api_keys=("secret",)) as serving:
        yield serving.url


@pytest.fixture(scope="module")
def oai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as client:
        yield client


# ---- OpenAI's ----


def test_openai_chat_stream(oai: openai.OpenAI, expected: str):
    stream = oai.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens > 0
    with oai.chat.completions.stream(model="tiny", messages=MESSAGES, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert answer.choices[0].message.content == expected


def test_openai_sends_concurrent_requests(url: str, expected: str):
    async def work() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            asked = [
                client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY) for _ in range(4)
            ]
            return await asyncio.gather(*asked)

    answers = asyncio.run(work())
    assert [answer.choices[0].message.content for answer in answers] == [expected] * 4


def test_openai_completions(oai: openai.OpenAI, model: hotset.Model):
    expected = model.generate("hello", **GREEDY).text
    answer = oai.completions.create(model="tiny", prompt="hello", **GREEDY)
    assert answer.choices[0].text == expected
    chunks = list(oai.completions.create(model="tiny", prompt="hello", stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    echoed = oai.completions.create(model="tiny", prompt="hello", echo=True, logprobs=1, **GREEDY)
    assert echoed.choices[0].text == f"hello{expected}"
    assert len(echoed.choices[0].logprobs.tokens) == len(echoed.choices[0].logprobs.token_logprobs)


def test_openai_embeddings(oai: openai.OpenAI, model: hotset.Model):
    texts = ["hello", "ok"]
    expected = model.embed(texts)
    # The client requests base64 by default and decodes it.
    for form in ({}, {"encoding_format": "float"}):
        found = oai.embeddings.create(model="tiny", input=texts, **form)
        assert [one.index for one in found.data] == [0, 1]
        np.testing.assert_array_equal([one.embedding for one in found.data], expected)
        assert found.usage.total_tokens > 0


def test_openai_responses(oai: openai.OpenAI, expected: str):
    asked = {"model": "tiny", "input": MESSAGES, "temperature": 0, "max_output_tokens": 100}
    answer = oai.responses.create(**asked)
    assert answer.output_text == expected
    assert answer.status == "completed"
    events = list(oai.responses.create(stream=True, **asked))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with oai.responses.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == expected
    # An answer becomes an item of the next request.
    conversation = [*MESSAGES, *answer.output, {"role": "user", "content": "and?"}]
    again = oai.responses.create(**{**asked, "input": conversation})
    assert again.usage.input_tokens > answer.usage.input_tokens + answer.usage.output_tokens


def test_openai_errors(oai: openai.OpenAI, url: str):
    reply = oai.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=4, extra_body={"frobnicate": 1}
    )
    assert reply.headers["x-hotset-ignored"] == "frobnicate"
    with pytest.raises(openai.BadRequestError) as bad:
        oai.responses.create(model="tiny", input="hello", previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_openai_sound_and_pictures(url: str):
    """They are refused once: these clients repeat a request that gets another status above 499."""
    sent: list[httpx.Request] = []
    with (
        httpx.Client(event_hooks={"request": [sent.append]}) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="secret", http_client=http) as client,
    ):
        for ask in (
            lambda: client.audio.speech.create(model="none", voice="alloy", input="a"),
            lambda: client.audio.transcriptions.create(model="none", file=("a.wav", b"RIFF" * 100_000)),
            lambda: client.audio.translations.create(model="none", file=("a.wav", b"RIFF")),
            lambda: client.images.generate(model="none", prompt="a"),
            lambda: client.images.edit(model="none", image=("a.png", b"PNG"), prompt="a"),
            lambda: client.images.create_variation(model="none", image=("a.png", b"PNG")),
        ):
            with pytest.raises(openai.InternalServerError, match="with the model 'none'") as caught:
                ask()
            assert caught.value.status_code == 501
            assert caught.value.body["code"] == "not_supported"
    assert len(sent) == 6


# ---- Anthropic's ----


def test_anthropic_messages(claude: anthropic.Anthropic, expected: str):
    # Anthropic's own types no longer have a temperature; the server accepts it.
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": MESSAGES}
    greedy = {"extra_body": {"temperature": 0}}
    message = claude.messages.create(**asked, **greedy)
    assert message.content[0].text == expected
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0
    with claude.messages.stream(**asked, **greedy) as stream:
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert final.content[0].text == expected
    assert final.stop_reason == message.stop_reason
    usage = final.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == message.usage.input_tokens + (
        message.usage.cache_read_input_tokens or 0
    )
    conversation = [*MESSAGES, message.to_param(), {"role": "user", "content": "and?"}]
    again = claude.messages.create(**{**asked, "messages": conversation}, **greedy)
    assert again.content[0].type == "text"


def test_anthropic_counts_tokens(claude: anthropic.Anthropic, model: hotset.Model):
    counted = claude.messages.count_tokens(model="tiny", messages=MESSAGES, system="be brief")
    expected = model.encode_chat([{"role": "system", "content": "be brief"}, *MESSAGES])
    assert counted.input_tokens == len(expected)


def test_anthropic_errors(claude: anthropic.Anthropic, url: str):
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": MESSAGES}
    more = {"temperature": 0, "container": "c", "cache_control": {"type": "ephemeral", "scope": "x"}}
    reply = claude.messages.with_raw_response.create(**asked, extra_body=more)
    assert sorted(reply.headers["x-hotset-ignored"].split(", ")) == ["cache_control.scope", "container"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(anthropic.BadRequestError, match="this model reads only text"):
        claude.messages.create(**asked | {"messages": [{"role": "user", "content": [image]}]})
    stranger = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**asked)
