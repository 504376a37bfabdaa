"""Training text that the teacher generates, many documents in parallel.

There are three kinds: answers to questions through the model's chat template, articles from an opening, and,
if texts are given, continuations of a few of their words. Each document has its own temperature. Users mostly
sample below 1, and at 1 a small model soon generates nonsense; but only low temperatures would yield too
similar documents. A document that repeats itself, as small models do at low temperatures, teaches repetition
and is dropped. Documents are stored as token ids, one JSON line each, appended when they are finished. After
a kill the next call continues, and an incomplete last line is dropped.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.engine.engine import Engine, ModelTraits
from hotset.engine.sampler import SamplingParams
from hotset.errors import FormatError
from hotset.files import appending, check_target
from hotset.reporter import Reporter
from hotset.training import prompts

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.engine.sequence import Sequence as EngineSequence
    from hotset.model.config import ModelConfig

_LONGEST = 448  # tokens of a document, including its beginning
N_SEQUENCES = 64  # documents at a time: such batches are large enough for the many-row kernels
CONTINUED = 48  # tokens of a given text that a continuation begins with, at most
_TEMPERATURES = (0.3, 1.0)
_PHRASE = 8  # tokens
_REPEATED = 0.25  # share of a document's phrases that may occur in it earlier


def longest(config: ModelConfig) -> int:
    """Return how many tokens a document may have, including its beginning."""
    return min(_LONGEST, config.n_ctx_train)


def generate(
    model: Model,
    path: Path,
    n_tokens: int,
    *,
    texts: Sequence[Sequence[int]] = (),
    chat: float = 0.4,
    seed: int = 0,
    progress: Reporter | None = None,
) -> list[list[int]]:
    """Return documents of at least `n_tokens` tokens in total, including those already in `path`.

    model: loaded with n_ctx of at least `longest`, and n_seqs for N_SEQUENCES of them. texts: token ids; a
    third of the documents start with parts of them. Raises InvalidRequestError for a model without a chat
    template, and FormatError if `path` is not a file of documents.
    """
    documents = read_documents(path)
    done = sum(map(len, documents))
    progress, most = progress or Reporter(), 0

    def advance(unfinished: int) -> None:
        nonlocal most  # progress must not fall when an unfinished document is dropped
        most = max(most, min(done + unfinished, n_tokens))
        progress.advance("generating text", most, n_tokens, "tokens")

    advance(0)
    with appending(path) as file:
        for document in _write(model, random.Random(seed + done), texts, chat, n_tokens - done, advance):
            documents.append(document)
            file.write(json.dumps(document).encode() + b"\n")
            file.flush()
            done += len(document)
            advance(0)
        os.fsync(file.fileno())
    return documents


def read_documents(path: Path) -> list[list[int]]:
    """Return the documents of a file, none if it is missing; remove an unfinished last line."""
    check_target(path)
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    documents = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            document = json.loads(line)
        except ValueError:
            document = None
        if not isinstance(document, list) or not all(type(token) is int for token in document):
            raise FormatError(f"line {number} of {path} is not a list of token ids; choose another folder")
        documents.append(document)
    return documents


def circles(document: Sequence[int]) -> bool:
    """Return whether a document repeats itself over and over."""
    phrases = [tuple(document[i : i + _PHRASE]) for i in range(len(document) - _PHRASE + 1)]
    return len(phrases) > len(set(phrases)) + _REPEATED * len(phrases)


def _write(
    model: Model,
    random: random.Random,
    texts: Sequence[Sequence[int]],
    chat: float,
    n_tokens: int,
    on_step: Callable[[int], None],
) -> Iterator[list[int]]:
    """Yield documents until they have `n_tokens` tokens; the engine always runs N_SEQUENCES of them.

    on_step: receives the number of generated tokens in unfinished documents.
    """
    if n_tokens <= 0:
        return
    kept = thrown = 0  # tokens
    texts = [text for text in texts if len(text) > CONTINUED]
    traits = ModelTraits(thresholded=model.engine.thresholded)
    engine = Engine(model.backend, longest(model.config), N_SEQUENCES, traits=traits)
    stop_ids = model.tokenizer.stop_ids

    def begin() -> EngineSequence:
        # A large top_k and a small min_p exclude nearly impossible tokens and keep the teacher's
        # distribution.
        params = SamplingParams(
            temperature=random.uniform(*_TEMPERATURES),
            top_k=256,
            top_p=1.0,
            min_p=0.01,
            seed=random.getrandbits(63),
        )
        prompt = beginning_of(model, random, texts, chat)
        return engine.enqueue(engine.prepare(prompt, params, stop_ids=stop_ids))

    active = [begin() for _ in range(N_SEQUENCES)]
    try:
        while kept < n_tokens:
            engine.step()
            running = [sequence for sequence in active if sequence.finish_reason is None]
            on_step(sum(len(sequence.tokens) - sequence.n_prompt for sequence in running))
            for i, sequence in enumerate(active):
                if sequence.finish_reason is not None:
                    if sequence.error is not None:
                        raise sequence.error
                    document = sequence.tokens
                    if circles(document) and thrown <= kept:  # otherwise a model that only repeats never ends
                        thrown += len(document)
                    else:
                        kept += len(document)
                        yield document
                    active[i] = begin()
    finally:
        for sequence in active:
            engine.cancel(sequence)


def beginning_of(
    model: Model, random: random.Random, texts: Sequence[Sequence[int]], chat: float
) -> list[int]:
    kind = random.random()
    if kind < chat:
        return model.encode_chat([{"role": "user", "content": prompts.question(random)}])
    if texts and kind < (1 + chat) / 2:
        text = random.choice(texts)
        start = random.randrange(len(text) - CONTINUED)
        return list(text[start : start + random.randint(8, CONTINUED)])
    return list(model.tokenizer.encode(prompts.opening(random), add_special=True))
