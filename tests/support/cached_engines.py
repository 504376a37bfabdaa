"""Engines on a backend without a model, with a prompt cache in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_backend import FakeBackend, drain

from hotset.engine.blocks import Identity
from hotset.engine.engine import NO_TRAITS, Engine
from hotset.engine.prompt_cache import PromptCache
from hotset.engine.sampler import SamplingParams
from hotset.engine.sequence import Sequence

MODEL = Identity(b"m" * 16, "model", "f16", 100.0)


@contextmanager
def engine(
    folder: Path | None, identity: Identity = MODEL, limit: int = 1 << 24, **options: Any
) -> Iterator[Engine]:
    """Yield a new engine, as after a restart.

    At the end everything is stored. folder: None: no prompt cache.
    """
    how = {"n_ctx": 512, "max_sequences": 4, "traits": NO_TRAITS}
    how |= {key: options.pop(key) for key in how.keys() & options.keys()}
    backend = FakeBackend(**options)
    cache = None if folder is None else PromptCache(folder, identity, backend, limit)
    made = Engine(backend, prompt_cache=cache, **how)
    try:
        yield made
    finally:
        made.close()


def generate(engine: Engine, tokens: list[int], **params: Any) -> Sequence:
    sequence = engine.enqueue(
        engine.prepare(tokens, SamplingParams(**{"seed": 1, "max_tokens": 40} | params))
    )
    drain(engine)
    assert engine.scheduler.pool.n_available == engine.scheduler.pool.n_blocks
    states = engine.scheduler.states
    assert states is None or states.n_available == states.n_states
    return sequence
