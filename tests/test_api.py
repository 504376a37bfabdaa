"""The Python API, on a tiny random model written to a file, with the reference backend."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import BOS, EOS, PRINTABLE, TEMPLATE, write_model
from tiny_gguf import write_llama
from tool_models import CALL, CLOCK, HERMES, THINKS, WEATHER, written

import hotset
from hotset.engine.sampler import SamplingParams
from hotset.text.turn_formats import named


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def model(path: Path) -> Iterator[hotset.Model]:
    with hotset.load(path, device="reference", max_batch=32) as model:
        yield model


def blocks_in_use(model: hotset.Model) -> int:
    return model.engine.scheduler.pool.n_blocks - model.engine.scheduler.pool.n_available


def test_generate(model: hotset.Model):
    answer = model.generate("hello", seed=1, max_tokens=12)
    assert answer.prompt_tokens == 6  # with BOS
    assert len(answer.tokens) == 12
    assert answer.finish_reason == "length"
    assert answer.text == model.tokenizer.decode(answer.tokens, skip_special=True)
    assert answer.timings.predicted_tokens == 12
    assert answer.timings.prompt_per_second > 0
    assert answer.timings.predicted_per_second > 0
    assert answer.seed == 1
    assert model.generate("hello", seed=1, max_tokens=12).tokens == answer.tokens
    assert blocks_in_use(model) == 0


def test_text_and_its_token_ids_are_the_same_prompt(model: hotset.Model):
    ids = [BOS, *b"hello"]
    by_text = model.generate("hello", seed=1, max_tokens=5)
    assert model.generate(ids, seed=1, max_tokens=5).tokens == by_text.tokens
    assert model.generate(np.array(ids), seed=1, max_tokens=5).tokens == by_text.tokens


def test_special_tokens_in_a_prompt_are_plain_text(model: hotset.Model):
    answer = model.generate("</s>", seed=1, max_tokens=1)
    assert answer.prompt_tokens == 5
    assert model.encode("</s>", parse_special=True) == [BOS, EOS]
    assert model.encode("<s>a", parse_special=True) == [BOS, ord("a")]
    assert model.encode("<s>a") == [BOS, *b"<s>a"]


def test_greedy_follows_the_logits(model: hotset.Model):
    answer = model.generate("abc", temperature=0, max_tokens=8, ignore_eos=True)
    tokens = model.tokenizer.encode("abc") + answer.tokens
    logits = model.logits(tokens)
    assert logits.shape == (len(tokens), 259)
    assert logits.dtype == np.float32
    logits[:, EOS] = -np.inf
    assert np.argmax(logits[3:-1], axis=1).tolist() == answer.tokens


def test_stream_gives_the_same_text_in_pieces(model: hotset.Model):
    whole = model.generate("hello", seed=2, max_tokens=30, logprobs=1)
    chunks = list(model.stream("hello", seed=2, max_tokens=30, logprobs=1))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
    assert [entry for chunk in chunks for entry in chunk.logprobs] == whole.logprobs
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    assert [chunk.timings.predicted_tokens for chunk in chunks] == list(range(1, len(chunks) + 1))


def test_leaving_a_stream_frees_its_blocks(model: hotset.Model):
    for chunk in model.stream("hello", seed=1):
        if chunk.timings.predicted_tokens == 3:
            break
    assert blocks_in_use(model) == 0
    assert not model.engine.has_work
    never_begun = model.stream("hello", seed=1)
    del never_begun
    assert not model.engine.has_work


def test_concurrent_streams_equal_single_ones(model: hotset.Model):
    prompts = ["one", "two", "three"]
    alone = [model.generate(p, seed=i, max_tokens=25).tokens for i, p in enumerate(prompts)]
    streams = [model.stream(p, seed=i, max_tokens=25) for i, p in enumerate(prompts)]
    tokens: list[list[int]] = [[], [], []]
    for chunks in itertools.zip_longest(*streams):
        for i, chunk in enumerate(chunks):
            tokens[i] += chunk.tokens if chunk else []
    assert tokens == alone


def test_many_prompts_at_once_equal_single_ones(model: hotset.Model):
    prompts = ["one", "two and more", "three"]
    alone = [model.generate(p, seed=4, max_tokens=25) for p in prompts]
    together = model.generate_many(prompts, seed=4, max_tokens=25)
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]


def test_the_number_of_running_answers_is_a_setting(path: Path):
    prompts = [f"prompt {i}" for i in range(5)]
    answers = []
    for max_sequences in (1, 2, 16):
        with hotset.load(path, device="reference", n_seqs=5, max_sequences=max_sequences) as model:
            assert model.engine.max_sequences == max_sequences
            answers.append([a.tokens for a in model.generate_many(prompts, seed=1, max_tokens=10)])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_has_answers_of_its_own(model: hotset.Model):
    alone = model.generate("hello", seed=1, max_tokens=20).tokens
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    tokens = model.encode_chat(messages)
    stream = model.stream("one", seed=2, max_tokens=20)
    next(stream)
    pid = os.fork()
    if pid == 0:
        try:
            right = model.generate("hello", seed=1, max_tokens=20).tokens == alone
            right = right and model.encode_chat(messages) == tokens
            try:
                list(stream)
                right = False
            except hotset.InvalidRequestError:
                pass
            model.close()
            os._exit(0 if right else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(list(stream)) == 19
    assert model.encode_chat(messages) == tokens


def test_stop_strings_across_tokens(model: hotset.Model):
    params: dict[str, Any] = {"seed": 6, "max_tokens": 40, "logit_bias": PRINTABLE}
    free = model.generate("hello", **params)
    assert len(free.text) == 40
    stop = free.text[8:11]
    at = free.text.index(stop)
    answer = model.generate("hello", **params, stop=stop)
    assert answer.finish_reason == "stop"
    assert answer.text == free.text[:at]
    assert answer.tokens == free.tokens[: at + 3]
    stream = model.stream("hello", **params, stop=[stop, "nothing like it"])
    chunks = [next(stream) for _ in answer.tokens]
    assert chunks[-1].finish_reason == "stop"
    assert blocks_in_use(model) == 0  # freed with the last chunk, before the caller requests more
    assert next(stream, None) is None
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert [token for chunk in chunks for token in chunk.tokens] == answer.tokens
    assert blocks_in_use(model) == 0


def test_the_end_of_sequence_token_has_no_text(model: hotset.Model):
    answer = model.generate("hello", seed=1, logit_bias={EOS: 100})
    assert answer.tokens == [EOS]
    assert answer.text == ""
    assert answer.finish_reason == "stop"


def test_an_end_that_the_file_types_as_text_has_none_either(tmp_path: Path):
    path = write_model(tmp_path / "plain.gguf", **{"tokenizer.ggml.eos_token_id": ord("q")})
    with hotset.load(path, device="reference") as model:
        answer = model.generate("hello", seed=1, logit_bias={ord("q"): 500})
    assert (answer.tokens, answer.text, answer.finish_reason) == ([ord("q")], "", "stop")


def test_half_a_character_is_held_back(model: hotset.Model):
    first_byte = "é".encode()[0]
    chunks = list(model.stream("x", seed=1, max_tokens=2, logit_bias={first_byte: 500}))
    assert [chunk.tokens for chunk in chunks] == [[first_byte], [first_byte]]
    assert [chunk.text for chunk in chunks] == ["", "\ufffd\ufffd"]


def test_chat(model: hotset.Model):
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    tokens = model.encode_chat(messages)
    assert tokens[0] == BOS
    assert tokens.count(BOS) == 1
    text = "<s><|im_start|>user:hello\n<|im_start|>assistant:"
    assert tokens == model.tokenizer.encode(text, add_special=False, parse_special=True)
    assert tokens.count(258) == 2
    reply = model.chat(messages, seed=1, max_tokens=10)
    assert reply.role == "assistant"
    assert reply.content == model.generate(tokens, seed=1, max_tokens=10).text
    assert reply.completion.prompt_tokens == len(tokens)
    streamed = model.chat(messages, stream=True, seed=1, max_tokens=10)
    assert "".join(chunk.text for chunk in streamed) == reply.content
    messages += [reply, {"role": "user", "content": [{"type": "text", "text": "more"}]}]
    following = model.encode_chat(messages)
    assert following[: len(tokens)] == tokens


def test_chat_calls_functions(tmp_path: Path):
    path = write_model(tmp_path / "calls.gguf", **{"tokenizer.chat_template": THINKS})
    question: list[Any] = [{"role": "user", "content": "weather?"}]
    sampled: dict[str, Any] = {"tools": [WEATHER, CLOCK], "temperature": 0}
    with hotset.load(path, device="reference", n_ctx=2048) as model:
        written(model, f"hm</think>I look.\n{CALL}\n" + CALL.replace("Rome", "Oslo"))
        message = model.chat(question, **sampled)
        assert (message.reasoning, message.content) == ("hm", "I look.")
        assert [call.name for call in message.tool_calls] == ["get_weather"] * 2
        assert [json.loads(call.arguments)["city"] for call in message.tool_calls] == ["Rome", "Oslo"]
        assert message.as_dict()["tool_calls"][0]["function"]["name"] == "get_weather"
        assert message.completion.text.startswith("hm</think>I look.")

        chunks = list(model.chat(question, stream=True, **sampled))
        assert "".join(chunk.text for chunk in chunks) == "I look."
        assert "".join(chunk.reasoning for chunk in chunks) == "hm"
        assert [call.arguments for chunk in chunks for call in chunk.tool_calls] == [
            call.arguments for call in message.tool_calls
        ]

        first = model.chat(question, parallel_tool_calls=False, **sampled)
        assert [call.arguments for call in first.tool_calls] == [message.tool_calls[0].arguments]
        assert first.completion.finish_reason == "stop"
        assert not model.chat(question, tool_choice="none", **sampled).tool_calls

        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        assert b"get_weather" in bytes(model.encode_chat([*question, message, result])[1:])


def test_a_required_call_follows_a_grammar(tmp_path: Path):
    path = write_model(tmp_path / "calls.gguf", **{"tokenizer.chat_template": HERMES})
    question: list[Any] = [{"role": "user", "content": "weather?"}]
    with hotset.load(path, device="reference", n_ctx=2048) as model:
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            message = model.chat(
                question, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, seed=1
            )
            assert json.loads(message.tool_calls[0].arguments)["city"] in ("Rome", "Oslo")
        for wrong, match in (
            ("other", "must be"),
            ({"name": "other"}, "'other', which is not among"),
            (3, "must be"),
        ):
            with pytest.raises(hotset.InvalidRequestError, match=match):
                model.chat(question, tools=[WEATHER], tool_choice=wrong)  # type: ignore[arg-type]
        with pytest.raises(hotset.InvalidRequestError, match="tool 0 has no function with a name"):
            model.chat(question, tools=["clock"])  # type: ignore[list-item]


@pytest.mark.parametrize("given", ["chatml", "{{ messages[0].content }}"])
def test_another_template_replaces_a_broken_one(tmp_path: Path, given: str):
    path = write_model(tmp_path / "broken.gguf", **{"tokenizer.chat_template": "{% if %}"})
    with (
        hotset.load(path, device="reference") as model,
        pytest.raises(hotset.HotsetError, match="not valid"),
    ):
        _ = model.chat_template
    with hotset.load(path, device="reference", chat_template=given) as model:
        assert model.chat_template.source == named(given)
        assert model.encode_chat([{"role": "user", "content": "x"}])
    with pytest.raises(hotset.InvalidRequestError, match="no chat template 'chat'"):
        hotset.load(path, device="reference", chat_template="chat")


def test_a_template_without_bos_gets_one(tmp_path: Path):
    template = TEMPLATE.replace("{{ bos_token }}", "")
    path = write_model(tmp_path / "plain.gguf", **{"tokenizer.chat_template": template})
    with hotset.load(path, device="reference") as model:
        tokens = model.encode_chat([{"role": "user", "content": "x"}])
        assert tokens[:2] == [BOS, 258]
    path = write_model(
        tmp_path / "none.gguf", **{"tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": template}
    )
    with hotset.load(path, device="reference") as model:
        assert model.encode_chat([{"role": "user", "content": "x"}])[0] == 258


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list"),
        ("hello", "messages must be a list"),
        ({"role": "user", "content": "x"}, "messages must be a list"),
        (["hello"], "message 0 must be a dictionary"),
        ([{"content": "x"}], "message 0 must be a dictionary with a role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "content of message 1 must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 0: an image needs a source"),
        ([{"role": "user", "content": [{"type": "video"}]}], "message 0 has a part that is neither a text"),
    ],
    ids=str,
)
def test_invalid_messages(model: hotset.Model, messages: Any, message: str):
    with pytest.raises(hotset.InvalidRequestError, match=message):
        model.chat(messages)


def test_perplexity(model: hotset.Model):
    text = "the quick brown fox jumps over the lazy dog. " * 10
    result = model.perplexity(text, n_ctx=64, chunks=3)
    assert (result.chunk, result.n_chunks, result.n_scored) == (3, 3, 3 * 31)
    tokens = model.tokenizer.encode(text)
    losses = []
    for i in range(3):
        chunk = tokens[64 * i : 64 * i + 64]
        logits = model.logits([BOS, *chunk[1:]]).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses += [-logprobs[p, chunk[p + 1]] for p in range(32, 63)]
    assert result.ppl == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    running = list(model.perplexity_chunks(text, n_ctx=64, chunks=3))
    assert [r.chunk for r in running] == [1, 2, 3]
    assert running[-1] == result


def test_taps_are_the_values_of_the_graph(model: hotset.Model):
    tokens = np.random.default_rng(1).integers(0, 259, 100).tolist()
    names = ["blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_act", "logits"]
    taps = model.taps(tokens, names)
    assert {name: value.shape for name, value in taps.items()} == {
        "blk.0.ffn_gate": (100, 48),
        "blk.0.ffn_up": (100, 48),
        "blk.0.ffn_act": (100, 48),
        "logits": (100, 259),
    }
    gate, up, act = (taps[name] for name in names[:3])
    np.testing.assert_allclose(act, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(taps["logits"], model.logits(tokens), rtol=1e-3, atol=1e-3)
    assert blocks_in_use(model) == 0
    assert [len(part["blk.1.out"]) for part in model.tap_steps(tokens, ["blk.1.out"])] == [32, 32, 32, 4]


def test_taps_do_not_change_running_answers(model: hotset.Model):
    alone = model.generate("hello", seed=1, max_tokens=20).tokens
    with model.thread.exclusive() as engine:  # the taps come between two steps of the answer
        sequence = engine.enqueue(
            engine.prepare(model.tokenizer.encode("hello"), SamplingParams(seed=1, max_tokens=20))
        )
        for _ in range(5):
            engine.step()
        model.taps([1] * 100, ["blk.0.out"])
        with pytest.raises(
            hotset.OutOfMemoryError, match=r"need 4 blocks of the KV cache, but only 3 are free"
        ):
            model.taps([1] * 200, ["blk.0.out"])
        while engine.has_work:
            engine.step()
    assert sequence.generated == alone


def test_taps_refuse_unknown_values(model: hotset.Model):
    with pytest.raises(hotset.InvalidRequestError, match=r"no value named 'blk\.9\.ffn_act'"):
        model.taps([1], ["blk.9.ffn_act"])
    with pytest.raises(hotset.ContextLengthError, match="257 tokens do not fit in the context of 256"):
        model.taps([1] * 257, ["blk.0.out"])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temp", "temperature"),
        ("temprature", "temperature"),
        ("max_new_tokens", "max_tokens"),
        ("n_predict", "max_tokens"),
        ("repeat_penalty", "repetition_penalty"),
    ],
)
def test_an_unknown_parameter_suggests_the_one_that_was_meant(model: hotset.Model, name: str, meant: str):
    with pytest.raises(hotset.InvalidRequestError, match=rf"'{name}'; did you mean {meant}\b"):
        model.generate("x", **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["generate", "generate_many", "stream", "chat"])
def test_the_signature_lists_the_sampling_parameters(method: str):
    for owner in (hotset.Model, hotset.AsyncModel):
        parameters = inspect.signature(getattr(owner, method)).parameters
        assert parameters.keys() > {one.name for one in fields(hotset.SamplingParams)}
        assert parameters["temperature"].default == hotset.SamplingParams().temperature
        assert not any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def test_logprobs_have_text(model: hotset.Model):
    answer = model.generate("hello", seed=1, max_tokens=4, logprobs=3)
    for token, one in zip(answer.tokens, answer.logprobs, strict=True):
        assert one.text == model.tokenizer.decode([token])
        assert one.top_texts == tuple(model.tokenizer.decode([top]) for top, _ in one.top)


def test_parameters_are_checked_at_the_call(model: hotset.Model):
    with pytest.raises(
        hotset.InvalidRequestError, match=r"unknown parameter 'nothing'; the parameters are temp"
    ):
        model.stream("x", nothing=1)
    with pytest.raises(hotset.InvalidRequestError, match="top_p must be between"):
        model.stream("x", top_p=2)
    with pytest.raises(hotset.ContextLengthError, match="the prompt has 256 tokens"):
        model.stream([1] * 256)
    with pytest.raises(hotset.InvalidRequestError, match="token 259 is not in the vocabulary"):
        model.generate([259])
    with pytest.raises(hotset.InvalidRequestError, match="token ids"):
        model.logits([])
    assert not model.engine.has_work


@pytest.mark.parametrize(
    "prompt", [5, None, 1.5, b"hello", {"a": 1}, {1, 2}, [], [True], [[1]], [2**70]], ids=str
)
def test_invalid_prompt_gives_one_message(model: hotset.Model, prompt: Any):
    for use in (model.generate, model.stream, model.logits, lambda prompt: model.taps(prompt, ["blk.0.out"])):
        with pytest.raises(hotset.InvalidRequestError, match=r"one or more token|vocabulary"):
            use(prompt)
    assert model.generate(iter([1, 2]), seed=1, max_tokens=2).prompt_tokens == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": 5}, "measured over a text, not 5"),
        ({"n_ctx": "64"}, "n_ctx must be a whole number"),
        ({"n_ctx": True}, "n_ctx must be a whole number"),
        ({"n_ctx": 64.0}, "n_ctx must be a whole number"),
        ({"n_ctx": -1}, "n_ctx must be at least 0"),
        ({"chunks": 1.5}, "chunks must be a whole number"),
        ({"chunks": "1"}, "chunks must be a whole number"),
    ],
    ids=str,
)
def test_perplexity_checks_its_parameters(model: hotset.Model, options: dict[str, Any], message: str):
    with pytest.raises(hotset.InvalidRequestError, match=message):
        model.perplexity(**{"text": "x" * 999, "n_ctx": 64, **options})


@pytest.mark.backend("triton")
@pytest.mark.parametrize("budget", ["8X", True, math.nan, math.inf, -2, [1]], ids=str)
def test_invalid_memory_budget_gives_one_message(path: Path, budget: Any):
    with pytest.raises(hotset.InvalidRequestError, match="must be a number of GiB above 0"):
        hotset.load(path, device="simulated", vram_budget=budget)


def test_a_closed_model_says_so(path: Path):
    model = hotset.load(path, device="reference")
    gate, step = threading.Semaphore(1), model.backend.step

    def gated(batch: Any) -> Any:
        gate.acquire()
        return step(batch)

    model.backend.step = gated
    stream = model.stream("hello", seed=1, ignore_eos=True)
    next(stream)
    closing = threading.Thread(target=model.close)
    closing.start()
    while not model.thread.closed:
        time.sleep(0.001)
    gate.release(1000)
    closing.join()
    model.close()
    assert [chunk.finish_reason for chunk in stream][-1] == "cancelled"
    for use in (lambda: model.generate("x"), lambda: model.logits([1]), lambda: model.perplexity("x" * 2000)):
        with pytest.raises(hotset.InvalidRequestError, match="has been closed"):
            use()


def test_load_chooses_a_context(path: Path):
    with hotset.load(path, device="reference") as model:
        assert model.n_ctx == model.config.n_ctx_train == 256
        assert model.bytes_per_token > 0
        assert "tiny.gguf" in repr(model)
    with (
        pytest.warns(UserWarning, match="longer than the 256"),
        hotset.load(path, device="reference", n_ctx=300) as model,
    ):
        assert len(model.generate([1] * 290, seed=1, ignore_eos=True).tokens) == 10


@pytest.mark.parametrize(
    "device", ["reference", "cpu", pytest.param("simulated", marks=pytest.mark.backend("triton"))]
)
def test_the_context_chooses_the_rotation(tmp_path: Path, device: str) -> None:
    """Load a file with one set of factors up to the original context, and another for longer contexts."""
    if device == "simulated":
        pytest.importorskip("torch")
    settings: dict[str, Any] = {"device": device}
    short, long = np.linspace(1, 2, 16).tolist(), np.linspace(1, 8, 16).tolist()
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    original = {"llama.rope.scaling.original_context_length": 64}
    files = {
        "both": write_llama(tmp_path / "both.gguf", vectors=factors, keys=original),
        "short": write_llama(tmp_path / "short.gguf", vectors={"rope_freqs.weight": short}),
        "long": write_llama(tmp_path / "long.gguf", vectors={"rope_freqs.weight": long}),
    }

    def logits(file: str, n_ctx: int) -> np.ndarray:
        with hotset.load(files[file], n_ctx=n_ctx, **settings) as model:
            return model.logits([3, 1, 4, 1, 5, 9, 2, 6] * 7)

    assert np.abs(logits("short", 64) - logits("long", 64)).max() > 0.01
    assert np.array_equal(logits("both", 64), logits("short", 64))
    assert np.array_equal(logits("both", 65), logits("long", 65))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ctx": 0}, "n_ctx must be at least 1, not 0"),
        ({"n_threads": 1.5}, "n_threads must be a whole number"),
        ({"max_batch": True}, "max_batch must be a whole number"),
        ({"n_seqs": 0}, "n_seqs must be at least 1, not 0"),
        ({"max_sequences": "4"}, "max_sequences must be a whole number"),
        ({"kv_type": "q4_1"}, "kv_type must be one of f16, q8_0, q4_0, f16/q8_0, .*, not 'q4_1'"),
        ({"device": "gpu"}, "device must be one of auto, cpu, "),
        ({"activation": "tanh"}, "activation 'tanh' is unknown"),
    ],
    ids=str,
)
def test_load_checks_its_parameters(path: Path, options: dict[str, Any], message: str):
    with pytest.raises(hotset.InvalidRequestError, match=message):
        hotset.load(path, **{"device": "reference", **options})


def test_load_refuses_a_context_larger_than_the_memory(path: Path):
    with pytest.raises(hotset.OutOfMemoryError, match=r"needs a cache of .* TiB"):
        hotset.load(path, device="reference", n_ctx=10**13)


def test_a_plan_refuses_a_cache_that_does_not_fit(tmp_path: Path):
    model = write_llama(tmp_path / "narrow.gguf", head_dim=24)
    with pytest.raises(hotset.UnsupportedModelError, match="the keys of this model have 24"):
        hotset.plan(model, device="cpu", kv_type="q4_0")


def test_load_of_nothing(tmp_path: Path):
    with pytest.raises(hotset.ModelNotFoundError):
        hotset.load(tmp_path / "missing.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(hotset.FormatError):
        hotset.load(tmp_path / "text.gguf")


def test_importing_hotset_loads_nothing_heavy():
    code = (
        "import sys, hotset; hotset.HotsetError; "
        "print([m for m in ('numpy', 'tokenizers', 'jinja2', 'torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert set(hotset.__all__) >= {"load", "Model", "ContextLengthError"}
    for name in hotset.__all__:
        if name != "__version__":
            assert getattr(hotset, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hotset.nothing  # noqa: B018
