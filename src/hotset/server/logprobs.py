"""Log probabilities in the form of OpenAI's clients, which Ollama's clients use, too."""

from __future__ import annotations

from typing import Any

from hotset.engine.sampler import TokenLogprobs
from hotset.server.shapes import TokenEntry, TokenWithTop
from hotset.text.tokenizer import Tokenizer


def logprob_of(logprob: float) -> float:
    """Return a logprob for JSON, which has no infinity: OpenAI's clients know -9999 for probability 0."""
    return max(logprob, -9999.0)


def spelled(tokenizer: Tokenizer, one: TokenLogprobs, n_top: int) -> dict[str, Any]:
    """Return a token with its logprob, and the n_top most likely tokens at its position."""
    top = [entry(tokenizer, token, logprob) for token, logprob in one.top[:n_top]]
    return TokenWithTop.written(**entry(tokenizer, one.token, one.logprob), top_logprobs=top)


def entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """Return a token as text and as bytes, with its logprob."""
    piece = tokenizer.token_bytes(token)
    return TokenEntry.written(
        token=piece.decode("utf-8", "replace"), logprob=logprob_of(logprob), bytes=list(piece)
    )
