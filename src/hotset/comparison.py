"""Perplexity of one or more loaded models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from hotset.engine import perplexity as engine_perplexity
from hotset.engine.driver import EngineThread, in_turns
from hotset.engine.engine import Engine
from hotset.engine.perplexity import PerplexityResult
from hotset.errors import InvalidRequestError
from hotset.formats.gguf import GGUFFile
from hotset.loader.decide import Decided
from hotset.model.config import ModelConfig
from hotset.parameters import shown
from hotset.text.tokenizer import Tokenizer


class MeasurableModel(Protocol):
    """The attributes of a hotset.Model that its perplexity needs."""

    decided: Decided
    gguf: GGUFFile
    config: ModelConfig
    engine: Engine
    thread: EngineThread

    @property
    def tokenizer(self) -> Tokenizer: ...


def compare(
    models: Sequence[MeasurableModel], text: str, *, n_ctx: int = 512, chunks: int | None = None
) -> tuple[PerplexityResult, ...]:
    """Return the perplexity of several models, and how far each is from the first (`divergence`).

    The caller loads the models, one file in several modes or several files. They must share their vocabulary;
    the first one's tokenizer encodes the text. Raises InvalidRequestError for different vocabularies.
    """
    *_, results = compare_chunks(models, text, n_ctx=n_ctx, chunks=chunks)
    return results


def compare_chunks(
    models: Sequence[MeasurableModel], text: str, *, n_ctx: int = 512, chunks: int | None = None
) -> Iterator[tuple[PerplexityResult, ...]]:
    """Yield the running results of `compare` after each chunk."""
    if not models:
        raise InvalidRequestError("the list of models is empty; give at least one")
    engine_perplexity.check_same_tokens([model.gguf for model in models])
    if not isinstance(text, str):
        raise InvalidRequestError(f"perplexity is measured over a text, not {shown(text)}")
    results = engine_perplexity.compare_chunks(
        [model.engine for model in models],
        models[0].tokenizer.encode(text, add_special=True),
        n_ctx=n_ctx, chunks=chunks, bos_id=models[0].tokenizer.text_bos_id,
        n_neurons=[sum(model.config.n_ff) for model in models],
        progress=models[0].decided.settings.progress,
    )  # fmt: skip
    yield from in_turns({model.thread for model in models}, results)
