"""Replies of llama-server's own routes: /completion and /infill, whole and as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field

from hotset.engine.sampler import SamplingParams, TokenLogprobs
from hotset.server.answers import Answer, Finished, FinishedAnswer, TextDelta
from hotset.server.logprobs import entry
from hotset.server.replies import event
from hotset.server.service import Service
from hotset.server.shapes import LlamaReply, LlamaTimings

MAX_FIELDS = 64  # per reply
MAX_FIELD_CHARS = 128  # of a field's name, which is split on the event loop

ResponseFields = Annotated[
    list[Annotated[str, Field(max_length=MAX_FIELD_CHARS)]], Field(max_length=MAX_FIELDS)
]

_ANY_SEED = 2**32 - 1


def generation_settings(params: SamplingParams) -> dict[str, Any]:
    """Return parameters as llama-server names them."""
    found = {name: value for name, value in asdict(params).items() if value is not None}
    limit = -1 if params.max_tokens is None else params.max_tokens
    return found | {
        "seed": _ANY_SEED if params.seed is None else params.seed,
        "repeat_last_n": found.pop("penalty_last_n"),
        "repeat_penalty": found.pop("repetition_penalty"),
        "n_predict": limit,
        "max_tokens": limit,
        "n_probs": found.pop("logprobs", 0),
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
    }


@dataclass
class LlamaReplies:
    """The replies to one request.

    only_reads: the client wants the prompt in the cache and no text. n_probs: how many likely tokens each
    token of the answer has next to it; None: no probabilities. tokens: whether whole replies have the
    answer's tokens. fields: of whole replies; None: all.
    """

    service: Service
    params: SamplingParams
    only_reads: bool
    n_probs: int | None = None
    tokens: bool = False
    fields: Sequence[str] | None = None

    def whole(
        self, answer: Answer, choices: Sequence[FinishedAnswer]
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the reply; a list for several answers."""
        written = [self._choice(answer, choice) for choice in choices]
        return written[0] if len(written) == 1 else written

    async def events(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the events of a stream. The last event of an answer has all fields."""
        async for delta in answer:
            if isinstance(delta, TextDelta) and not self.only_reads:
                piece = LlamaReply.written(
                    index=delta.index, content=delta.text, tokens=delta.tokens, stop=False
                )
                yield event(piece | self._probabilities(delta.logprobs))
            if isinstance(delta, Finished):
                last = FinishedAnswer(delta.index, reason=delta.reason, stop=delta.stop)
                yield event(self._last(answer, last))

    def _choice(self, answer: Answer, choice: FinishedAnswer) -> dict[str, Any]:
        if self.only_reads:
            choice = FinishedAnswer(choice.index, reason=choice.reason)
        return self._last(answer, choice)

    def _last(self, answer: Answer, choice: FinishedAnswer) -> dict[str, Any]:
        completion = answer.generations[choice.index].completion
        assert completion is not None
        timings, reason = completion.timings, choice.reason
        n_predicted = 0 if self.only_reads else timings.predicted_tokens
        n_read = timings.prompt_tokens - timings.reused_tokens
        prompt = answer.prompt_of(choice.index)
        reply = LlamaReply.written(
            index=choice.index,
            content=choice.text,
            tokens=choice.tokens if self.tokens else [],
            id_slot=-1 if answer.request.id_slot is None else answer.request.id_slot,
            stop=True,
            model=self.service.name,
            tokens_predicted=n_predicted,
            tokens_evaluated=timings.prompt_tokens,
            tokens_cached=timings.reused_tokens,
            generation_settings={"n_ctx": self.service.model.n_ctx, **generation_settings(self.params)},
            prompt=self.service.model.tokenizer.decode(prompt.tokens),
            has_new_line="\n" in completion.text,
            truncated=False,
            stop_type="word" if choice.stop is not None else "limit" if reason == "length" else "eos",
            stopping_word=choice.stop or "",
            timings=_timings(n_read, timings.prompt_per_second, timings.reused_tokens)
            | _predicted(n_predicted, timings.predicted_per_second),
        )
        reply |= self._probabilities(choice.logprobs)
        return reply if self.fields is None else _chosen(reply, self.fields)

    def _probabilities(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if self.n_probs is None or not logprobs:
            return {}
        tokenizer = self.service.model.tokenizer
        return {
            "completion_probabilities": [
                {
                    "id": one.token,
                    **entry(tokenizer, one.token, one.logprob),
                    "top_logprobs": [
                        {"id": token, **entry(tokenizer, token, logprob)}
                        for token, logprob in one.top[: self.n_probs]
                    ],
                }
                for one in logprobs
            ]
        }


def _timings(n: int, per_second: float, n_cached: int) -> dict[str, Any]:
    ms = _milliseconds(n, per_second)
    return LlamaTimings.written(
        cache_n=n_cached,
        prompt_n=n,
        prompt_ms=ms,
        prompt_per_token_ms=ms / n if n else 0.0,
        prompt_per_second=per_second,
    )


def _predicted(n: int, per_second: float) -> dict[str, Any]:
    ms = _milliseconds(max(n - 1, 0), per_second)
    return LlamaTimings.written(
        predicted_n=n,
        predicted_ms=ms,
        predicted_per_token_ms=ms / n if n else 0.0,
        predicted_per_second=per_second,
    )


def _milliseconds(n: int, per_second: float) -> float:
    return 1000 * n / per_second if per_second else 0.0


def _chosen(reply: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the given fields that the reply has; "timings/prompt_n" names a nested field."""
    chosen = {}
    for path in fields:
        value: Any = reply
        for key in path.split("/"):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            chosen[path] = value
    return chosen
