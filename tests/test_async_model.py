"""AsyncModel gives the same results as Model, concurrently, and cancels abandoned answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_server import MESSAGES, write_model
from tool_models import CALL, HERMES, WEATHER, written
from waiting import until

import hotset
from hotset import AsyncModel

SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hotset.Model]:
    path: Path = write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with hotset.load(path, device="cpu", n_threads=1, max_sequences=4) as loaded:
        yield loaded


@pytest.fixture
def many(model: hotset.Model) -> AsyncModel:
    return AsyncModel(model)


async def test_each_method_equals_the_models(model: hotset.Model, many: AsyncModel):
    prompts = ["hello", "a", [104, 105]]
    expected = [model.generate(prompt, **SAMPLED) for prompt in prompts]
    chunks = list(model.stream("hello", stop=["\x01\x02"], **SAMPLED))
    chat = model.chat(MESSAGES, **SAMPLED)
    chatted = [chunk.text for chunk in model.chat(MESSAGES, stream=True, **SAMPLED)]

    found = await asyncio.gather(*(many.generate(prompt, **SAMPLED) for prompt in prompts))
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.text for one in found] == [one.text for one in expected]
    assert [one.tokens for one in await many.generate_many(prompts, **SAMPLED)] == [
        one.tokens for one in expected
    ]
    streamed = [chunk async for chunk in many.stream("hello", stop=["\x01\x02"], **SAMPLED)]
    assert "".join(chunk.text for chunk in streamed) == "".join(chunk.text for chunk in chunks)
    assert streamed[-1].finish_reason == "length"
    assert (await many.chat(MESSAGES, **SAMPLED)).as_dict() == chat.as_dict()
    assert "".join([c.text async for c in many.stream_chat(MESSAGES, **SAMPLED)]) == "".join(chatted)
    assert (await many.embed(["a", "hello"]) == model.embed(["a", "hello"])).all()


async def test_it_loads_a_model_as_load_does(tmp_path: Path):
    path = write_model(tmp_path / "tiny.gguf")

    async with await AsyncModel.load(path, device="cpu", n_threads=1, n_ctx=64) as loaded:
        assert loaded.model.n_ctx == 64
        assert (
            await loaded.generate("hello", max_tokens=2, seed=1, ignore_eos=True)
        ).finish_reason == "length"
    with pytest.raises(hotset.ModelNotFoundError):
        await AsyncModel.load(tmp_path / "missing.gguf")


async def test_scores_equal_the_models(model: hotset.Model, many: AsyncModel):
    assert await many.encode("hello") == model.encode("hello")
    assert await many.encode_chat(MESSAGES) == model.encode_chat(MESSAGES)
    assert (await many.logits("hello") == model.logits("hello")).all()
    assert (await many.perplexity("hello " * 20, n_ctx=32)).ppl == model.perplexity(
        "hello " * 20, n_ctx=32
    ).ppl
    for found, expected in zip(await many.embed_tokens(["a"]), model.embed_tokens(["a"]), strict=True):
        assert (found == expected).all()


async def test_calls_equal_the_models(tmp_path: Path):
    path = write_model(tmp_path / "calls.gguf", **{"tokenizer.chat_template": HERMES})

    async with await AsyncModel.load(path, device="cpu", n_threads=1, n_ctx=2048) as loaded:
        written(loaded.model, CALL)
        message = await loaded.chat(MESSAGES, tools=[WEATHER], temperature=0)
        assert [call.name for call in message.tool_calls] == ["get_weather"]
        streamed = [chunk async for chunk in loaded.stream_chat(MESSAGES, tools=[WEATHER], temperature=0)]
        assert [call.arguments for chunk in streamed for call in chunk.tool_calls] == [
            message.tool_calls[0].arguments
        ]


async def test_a_stop_string_ends_an_answer(model: hotset.Model, many: AsyncModel):
    text = model.generate("hello", **SAMPLED).text
    stop = text[4:6]

    found = await many.generate("hello", stop=[stop], **SAMPLED)
    assert found.text == text[: text.index(stop)]
    assert found.finish_reason == "stop"
    until(lambda: not model.engine.has_work, "what a stop string ended goes on")


async def test_abandoned_work_is_cancelled(model: hotset.Model, many: AsyncModel):
    endless = {"temperature": 0, "ignore_eos": True}

    async with aclosing(many.stream("hello", **endless)) as chunks:
        async for _ in chunks:
            break
    task = asyncio.create_task(many.generate("hello", **endless))
    while not model.engine.has_work:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ExceptionGroup) as failed:
        await many.generate_many(["hello", [10**6]], **endless)
    assert "vocabulary" in str(failed.value.exceptions[0])
    until(lambda: not model.engine.has_work, "what was cancelled goes on")


async def test_errors_equal_the_models(model: hotset.Model, many: AsyncModel):
    with pytest.raises(hotset.InvalidRequestError, match="unknown parameter 'tempature'"):
        await many.generate("a", tempature=1)  # type: ignore[call-arg]
    with pytest.raises(hotset.ContextLengthError):
        await many.generate("a" * 9999)
    with pytest.raises(hotset.UnsupportedModelError):
        await many.rerank("a", ["b"])


async def test_it_closes_the_model_with_running_answers(tmp_path: Path):
    path = write_model(tmp_path / "tiny.gguf")
    async with await AsyncModel.load(path, device="cpu", n_threads=1) as many:
        task = asyncio.create_task(many.generate("hello", temperature=0, ignore_eos=True))
        while not many.model.engine.has_work:
            await asyncio.sleep(0)
    assert (await task).finish_reason == "cancelled"
    with pytest.raises(hotset.InvalidRequestError, match="has been closed"):
        await many.generate("a")


async def test_vectors_do_not_wait_in_the_loop(model: hotset.Model, many: AsyncModel):
    """Check that an answer continues while vectors are computed."""

    answer, vectors = await asyncio.gather(many.generate("a", **SAMPLED), many.embed(["hello"] * 20))
    assert answer.tokens == model.generate("a", **SAMPLED).tokens
    assert vectors.shape[0] == 20
    assert np.isfinite(vectors).all()
