"""Log probabilities as OpenAI's clients read them; Ollama's read the same."""

from __future__ import annotations

from typing import Any

from hotset.engine.sampler import TokenLogprobs
from hotset.server.shapes import TokenEntry, TokenWithTop
from hotset.text.tokenizer import Tokenizer


def logprob_of(logprob: float) -> float:
    """JSON has no infinity: -9999 is what OpenAI's clients know for a token of no probability at all."""
    return max(logprob, -9999.0)


def spelled(tokenizer: Tokenizer, one: TokenLogprobs, n_top: int) -> dict[str, Any]:
    """A token with its logprob, and the n_top most likely in its place."""
    top = [entry(tokenizer, token, logprob) for token, logprob in one.top[:n_top]]
    return TokenWithTop.written(**entry(tokenizer, one.token, one.logprob), top_logprobs=top)


def entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """Return a token as text and as bytes, with its logprob."""
    piece = tokenizer.token_bytes(token)
    return TokenEntry.written(
        token=piece.decode("utf-8", "replace"), logprob=logprob_of(logprob), bytes=list(piece)
    )
