"""Prompts with images: the same bits in any batch and chunks, preempted, cached and after a restart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import PRINTABLE, write_model
from stand_in_encoder import StandInEncoder, asks, decoded, file_of, give_images

import hotset
from hotset.backends.base import BLOCK_SIZE
from hotset.engine import sequence as sequences
from hotset.engine.engine import Engine
from hotset.engine.images import ImagePrompt
from hotset.errors import ContextLengthError, InvalidRequestError
from hotset.generation import Completion
from hotset.images import ImageReader
from hotset.text.image_text import GivenImage, PlacedImage, PromptTokens

SMALL, LARGE, OTHER = file_of(8, 12, 1), file_of(20, 32, 2), file_of(8, 12, 3)
QUESTIONS = (
    [asks("What is this? ", SMALL, " Look at it again and again.")],
    [asks(LARGE, "Describe it in a few words.")],
    [asks("Compare ", SMALL, " with ", OTHER, ".")],
    [{"role": "user", "content": "A question without an image, which is about as long as the others are."}],
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("model") / "tiny.gguf", more_tokens=["<|image|>"],
        **{"llama.context_length": 512},
    )  # fmt: skip


def load(path: Path, **how: Any) -> hotset.Model:
    return hotset.load(path, **{"device": "cpu", "n_threads": 2, "n_ctx": 512, "n_seqs": 4} | how)


def ask(model: hotset.Model, messages: Sequence[Any], n: int = 12, **more: Any) -> Completion:
    how = {"temperature": 0, "max_tokens": n, "logprobs": 2, "logit_bias": PRINTABLE} | more
    return model.chat(messages, **how).completion


def bits(found: Completion) -> list[tuple[Any, ...]]:
    """Return the tokens of an answer with their exact logprobs."""
    return [(one.token, one.logprob, one.top) for one in found.logprobs]


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[tuple[Any, ...]]]:
    """Return the bits of each question, computed without others, in one chunk and without reuse."""
    found = []
    for messages in QUESTIONS:
        with load(path) as model:
            give_images(model)
            found.append(bits(ask(model, messages)))
    return found


@pytest.fixture
def model(path: Path) -> Iterator[hotset.Model]:
    with load(path) as model:
        yield model


@pytest.mark.parametrize("max_batch", [5, 64])
def test_chunks_do_not_change_an_answer(path: Path, expected: list[Any], max_batch: int):
    with load(path, max_batch=max_batch) as model:
        give_images(model)
        for messages, wanted in zip(QUESTIONS, expected, strict=True):
            assert bits(ask(model, messages)) == wanted


def test_batches_do_not_change_an_answer(path: Path, expected: list[Any]):
    with load(path, max_batch=48) as model:
        give_images(model)
        how = hotset.SamplingParams(temperature=0, max_tokens=12, logprobs=2, logit_bias=PRINTABLE)
        running = [model.prepare(model.encode_chat(messages), how) for messages in QUESTIONS]
        for each in running:
            model.thread.submit(each.sequence)
        assert [bits(each.finish()) for each in running] == expected


def test_preemption_does_not_change_an_answer(
    path: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
):
    preempted: list[sequences.Sequence] = []
    real = Engine.step

    def step(engine: Engine) -> list[sequences.Sequence]:
        changed = real(engine)
        if not preempted and any(sequence.generated for sequence in engine.scheduler.running):
            preempted.extend(engine.scheduler.running)
            for sequence in preempted:
                engine.scheduler.preempt(sequence)
        return changed

    monkeypatch.setattr(Engine, "step", step)
    with load(path, n_ctx=256, n_seqs=1) as model:  # four blocks, and each answer needs two or more
        give_images(model)
        how = hotset.SamplingParams(temperature=0, max_tokens=12, logprobs=2, logit_bias=PRINTABLE)
        running = [model.prepare(model.encode_chat(messages), how, False) for messages in QUESTIONS]
        for each in running:
            model.thread.submit(each.sequence)
        assert [bits(each.finish()) for each in running] == expected
        assert model.engine.counters().preemptions > 0


def test_an_equal_prompt_takes_its_blocks_from_the_cache(model: hotset.Model, expected: list[Any]):
    give_images(model)
    first, again = ask(model, QUESTIONS[1]), ask(model, QUESTIONS[1])
    assert (first.timings.reused_tokens, bits(first), bits(again)) == (0, expected[1], expected[1])
    assert again.timings.reused_tokens == (first.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE > 0


def test_another_image_of_the_same_size_shares_no_block_with_it(model: hotset.Model):
    encoder = give_images(model)
    one, other = (ask(model, [asks(file_of(20, 32, n), "Describe it.")]) for n in (1, 2))
    assert other.timings.reused_tokens == 0
    assert bits(one) != bits(other)
    assert encoder.n_encoded == 2


def test_a_continued_conversation_encodes_each_image_once(model: hotset.Model):
    encoder = give_images(model)
    messages: list[Any] = [asks(LARGE, "Describe it.")]
    answer = model.chat(messages, temperature=0, max_tokens=8, logit_bias=PRINTABLE)
    messages += [answer, asks("And ", SMALL, "?")]
    found = ask(model, messages)
    assert encoder.n_encoded == 2
    assert found.timings.reused_tokens >= 2 * BLOCK_SIZE
    with load(model.gguf.path) as fresh:
        give_images(fresh)
        assert bits(ask(fresh, messages)) == bits(found)


def test_images_beyond_the_cache_are_encoded_again(model: hotset.Model):
    encoder = give_images(model, cache_bytes=24 * 32 * 4)  # one small image
    for _ in range(2):
        ask(model, [asks(SMALL, "?")])
        assert model.images is not None
        assert model.images.counts.cached_bytes <= 24 * 32 * 4
        ask(model, [asks(OTHER, "?")])
    assert encoder.n_encoded == 4
    ask(model, [asks(LARGE, "?")])  # larger than the cache: not kept
    assert model.images.counts.cached_bytes <= 24 * 32 * 4


def test_requests_for_one_image_encode_it_once():
    encoder, data = StandInEncoder(8), file_of(8, 8)
    reader = ImageReader(encoder, decoded)  # type: ignore[arg-type]

    def asked(_: int) -> ImagePrompt:
        tokens = PromptTokens([-1] * 16)
        tokens.images = (PlacedImage(GivenImage(data), (0,)),)
        return reader.prompt(tokens)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(asked, range(8)))
    rows = [one.images[0].rows for one in found]
    assert encoder.n_encoded == reader.counts.encoded == 1
    assert all(np.array_equal(one, rows[0]) for one in rows)
    assert reader.counts.cached_bytes == rows[0].nbytes
    reader.close()
    assert reader.counts.cached_bytes == 0


def test_a_restart_finds_blocks_with_images_on_disk(path: Path, tmp_path: Path, expected: list[Any]):
    for n_reused in (0, 2 * BLOCK_SIZE):
        with load(path, cache_dir=tmp_path, cache_disk=1) as model:
            give_images(model)
            found = ask(model, QUESTIONS[1])
            assert bits(found) == expected[1]
            assert found.timings.reused_tokens >= n_reused
            other = ask(model, [asks(file_of(20, 32, 9), "Describe it in a few words.")])
            if n_reused == 0:
                assert other.timings.reused_tokens == 0


@pytest.mark.parametrize("speculate", ["ngram"])
def test_speculation_does_not_change_an_answer(path: Path, expected: list[Any], speculate: Any):
    with load(path, speculate=speculate, draft_max=4) as model:
        give_images(model)
        for messages, wanted in zip(QUESTIONS, expected, strict=True):
            assert bits(ask(model, messages)) == wanted


def test_a_draft_model_does_not_change_an_answer(path: Path, expected: list[Any]):
    with load(path, draft=path, draft_max=4) as model:
        give_images(model)
        for messages, wanted in zip(QUESTIONS, expected, strict=True):
            assert bits(ask(model, messages)) == wanted


def test_a_cancelled_answer_leaves_the_cache_intact(path: Path, expected: list[Any]):
    with load(path, max_batch=16) as model:
        give_images(model)
        for chunk in model.chat(QUESTIONS[1], stream=True, temperature=0):
            assert chunk.timings.prompt_tokens > 160
            break
        assert bits(ask(model, QUESTIONS[1])) == expected[1]


def test_a_text_keeps_its_bits_next_to_images(path: Path, expected: list[Any]):
    with load(path) as model:
        assert bits(ask(model, QUESTIONS[3])) == expected[3]


@pytest.mark.parametrize(
    "device", ["reference", "cpu", pytest.param("simulated", marks=pytest.mark.backend("triton"))]
)
def test_every_backend_computes_about_the_same(path: Path, expected: list[Any], device: str):
    with load(path, device=device, kv_type="f16") as model:
        give_images(model)
        found = bits(ask(model, QUESTIONS[1]))
    assert [token for token, *_ in found] == [token for token, *_ in expected[1]]
    assert np.allclose([p for _, p, _ in found], [p for _, p, _ in expected[1]], atol=1e-2)


def test_penalties_ignore_images(model: hotset.Model):
    """Check that the id in place of an image is not penalised as a token."""
    give_images(model)
    with_penalty = model.prepare(
        model.encode_chat([asks(SMALL)]), hotset.SamplingParams(repetition_penalty=2.0, temperature=0)
    )
    words = [token for token in with_penalty.sequence.tokens if token >= 0]
    assert 0 not in words
    assert len(words) == len(with_penalty.sequence.tokens) - 24


def test_usage_counts_the_tokens_of_images(model: hotset.Model):
    give_images(model)
    without = model.encode_chat([asks("([", "])")])
    assert len(model.encode_chat([asks(SMALL)])) == len(without) + 24
    assert ask(model, [asks(SMALL)]).prompt_tokens == len(without) + 24
    assert model.images is not None
    counts = model.images.counts
    assert (counts.read, counts.encoded, counts.tokens) == (1, 1, 24)
    assert counts.seconds > 0


def test_image_tokens_that_lost_their_images_are_refused(model: hotset.Model):
    give_images(model)
    with pytest.raises(InvalidRequestError, match="token -1 is not in the vocabulary"):
        model.generate(list(model.encode_chat([asks(SMALL)])))


def test_a_model_without_an_encoder_names_the_missing_file(model: hotset.Model):
    with pytest.raises(InvalidRequestError, match=r"no projector next to tiny\.gguf.*mmproj"):
        model.chat([asks(SMALL, "What is this?")])


def test_a_closed_model_closes_its_encoder(path: Path):
    with load(path) as model:
        encoder: StandInEncoder = give_images(model)
    assert encoder.closed


def test_a_prompt_that_does_not_fit_encodes_nothing(model: hotset.Model):
    encoder = give_images(model)
    for n in (1, 4):
        with pytest.raises(ContextLengthError):
            ask(model, [asks(*[file_of(40, 52, i) for i in range(n)])])
    assert encoder.n_encoded == 0


def test_tokens_of_an_image_that_see_one_another_are_never_cut(path: Path):
    """Check that a step has whole images, also next to decoding sequences, and that a larger one fails."""
    with load(path, max_batch=48) as model:
        give_images(model, causal=False)
        seen: list[Any] = []
        step = model.backend.step

        def noted(batch: Any) -> Any:
            if batch.groups is not None:
                first, last = batch.groups.T
                same = batch.sequences[:, None] == batch.sequences
                inside = (batch.positions >= first[:, None]) & (batch.positions < last[:, None]) & same
                seen.append((inside.sum(axis=1) == last - first).all())
            return step(batch)

        model.backend.step = noted  # type: ignore[method-assign]
        how = hotset.SamplingParams(temperature=0, max_tokens=40, logit_bias=PRINTABLE)
        image = file_of(8, 23, 5)  # 46 tokens: with three decoding sequences they have no room in a step
        prompts = [[{"role": "user", "content": f"{n}"}] for n in range(3)] + [[asks("And ", image, "?")]]
        running = [model.prepare(model.encode_chat(messages), how) for messages in prompts]
        for each in running:
            model.thread.submit(each.sequence)
        for each in running:
            each.finish()
        assert seen
        assert all(seen)
        with pytest.raises(InvalidRequestError, match="max_batch=49"):
            ask(model, [asks(file_of(14, 14))])
