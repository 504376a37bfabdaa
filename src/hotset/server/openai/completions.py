"""POST /v1/completions: continuation of prompts, which are used unchanged."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request, Response

from hotset.engine.sampler import TokenLogprobs
from hotset.server import shapes
from hotset.server.answers import MOST_LOGPROBS, Answer, AnswerRequest, Finished, FinishedAnswer, TextDelta
from hotset.server.body import BodyRoute
from hotset.server.errors import RequestError
from hotset.server.fields import NO_DEFAULTS
from hotset.server.logprobs import logprob_of
from hotset.server.openai.schema import Logprobs, SamplingFields, logprobs_of, usage_dict
from hotset.server.replies import DONE, TextEvents, event
from hotset.server.rows import Flag, Row, having
from hotset.server.shapes import EVENT_STREAM, documented
from hotset.server.streams import off_loop, serving, streamed, whole
from hotset.text.infill import Gap
from hotset.text.tokenizer import StreamDecoder, Tokenizer

router = APIRouter(route_class=BodyRoute)

_DEFAULT_TOKENS = 16  # per answer, OpenAI's default for this route


@having(
    Row("logprobs", "Logprobs of the tokens and of this number of likeliest ones.", Logprobs, ("n_probs",),
        use="route"),
    Row("best_of", "hotset returns each answer that it makes", use="ignored", neutral=(1,)),
    Row("parse_special", "False reads special tokens in the prompt as text.", Flag, use="request"),
)  # fmt: skip
class CompletionBody(SamplingFields):
    """The body of a prompt that is continued, as OpenAI has it."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: Flag | None = None
    suffix: str | None = None

    @cached_property
    def n_top(self) -> int | None:
        """Return the number of logprobs next to each token, or None."""
        wanted = self.given("logprobs")
        return logprobs_of(self.given("n_probs") if wanted is None else wanted, None)

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    def _gap(self) -> Gap:
        assert self.suffix is not None
        if not isinstance(self.prompt, str):
            raise RequestError("with a suffix the prompt is one text", param="prompt")
        if self.echo:
            raise RequestError("echo is not supported with a suffix; leave it out", param="echo")
        return Gap(prefix=self.prompt, suffix=self.suffix)

    def request(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> AnswerRequest:
        """Return the request. Raises InvalidRequestError."""
        # Evaluation harnesses need only the scores of the prompt.
        only_echo = bool(self.echo) and self.all_settings("sampling").get("max_tokens") == 0
        defaults, over = {"max_tokens": _DEFAULT_TOKENS, **defaults}, {"max_tokens": 1} if only_echo else {}
        return AnswerRequest(
            prompts=() if self.suffix else self.prompts(),
            gap=self._gap() if self.suffix else None,
            params=self.sampling(defaults, self.n_top, **over),
            prompt_logprobs=self.n_top if self.echo else None,
            generates=not only_echo,
            thinking=self.thinking_settings,
            stream=bool(self.given("stream")),
            **self.all_settings("request"),
        )


@router.post("/v1/completions", responses=documented(shapes.CompletionReply, EVENT_STREAM))
async def completions(body: CompletionBody, http: Request) -> Response:
    service = await serving(http, body.model, takes_adapter=True)
    request = await off_loop(http, body.request, service.sampling)
    reply = _CompletionReply(service.name, service.model.tokenizer, body)
    if request.stream:
        return await streamed(http, request, reply.events)
    return await whole(http, request, reply.body)


@dataclass
class _Text:
    """A piece of a choice: its text, and tokens with their logprobs."""

    text: str
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class _CompletionReply:
    """One answer in OpenAI's JSON."""

    def __init__(self, model: str, tokenizer: Tokenizer, body: CompletionBody) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._model, self._tokenizer, self._body = model, tokenizer, body
        # By choice: characters and tokens so far, of prompt and answer, and the decoder that counts them.
        self._offsets: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._decoders: dict[int, StreamDecoder] = {}

    def body(self, answer: Answer, choices: Sequence[FinishedAnswer]) -> dict[str, Any]:
        written = []
        for choice in choices:
            pieces = [
                *self._prompt(answer, choice.index),
                _Text(choice.text, [*choice.logprobs], choice.tokens),
            ]
            whole = _Text("".join(piece.text for piece in pieces))
            for piece in pieces:
                whole.logprobs += piece.logprobs
                whole.tokens += piece.tokens
            written.append(self._choice(answer, choice.index, whole, choice.reason))
        return self._reply(answer, choices=written, usage=usage_dict(answer.usage))

    async def events(self, answer: Answer) -> AsyncIterator[bytes]:
        more: dict[str, Any] = {"usage": None} if self._body.includes_usage else {}

        def written(index: int, piece: _Text, reason: str | None) -> dict[str, Any]:
            return self._reply(answer, choices=[self._choice(answer, index, piece, reason)], **more)

        texts: list[TextEvents] = []
        if self._body.n_top is None:
            hole = _Text(TextEvents.HOLE)
            texts = [TextEvents(written(i, hole, None)) for i in range(len(answer.generations))]
        begun: set[int] = set()
        async for delta in answer:
            if texts and delta.index in begun and isinstance(delta, TextDelta):
                yield texts[delta.index](delta.text)
                continue
            pieces = [] if delta.index in begun else self._prompt(answer, delta.index)
            begun.add(delta.index)
            if isinstance(delta, TextDelta):
                pieces.append(_Text(delta.text, [*delta.logprobs], delta.tokens))
            for piece in pieces:
                yield event(written(delta.index, piece, None))
            if isinstance(delta, Finished):
                yield event(written(delta.index, _Text(""), delta.reason))
        if self._body.includes_usage:
            yield event(self._reply(answer, choices=[], usage=usage_dict(answer.usage)))
        yield DONE

    def _reply(self, answer: Answer, **more: Any) -> dict[str, Any]:
        return shapes.CompletionReply.written(id=self.id, created=answer.created, model=self._model, **more)

    def _prompt(self, answer: Answer, index: int) -> list[_Text]:
        """Return the echo that begins an answer, if requested.

        The first piece has the whole text; each piece has some of the tokens.
        """
        if not self._body.echo:
            return []
        prompt = answer.prompt_of(index)
        found = prompt.scores.found if prompt.scores is not None else []
        n = MOST_LOGPROBS
        rest = [_Text("", [*found[i : i + n]], prompt.tokens[i : i + n]) for i in range(n, len(found), n)]
        return [_Text(self._prompt_text(answer, index), [*found[:n]], prompt.tokens[:n]), *rest]

    def _prompt_text(self, answer: Answer, index: int) -> str:
        if answer.request.gap is not None:
            return answer.request.gap.prefix
        given = answer.request.prompts[index // answer.request.n]
        return given if isinstance(given, str) else self._tokenizer.decode(given)

    def _choice(self, answer: Answer, index: int, piece: _Text, reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(answer, index, piece) if self._body.n_top is not None else None
        return shapes.CompletionChoice.written(
            text=piece.text, index=index, logprobs=logprobs, finish_reason=reason
        )

    def _logprobs(self, answer: Answer, index: int, piece: _Text) -> dict[str, Any]:
        """Return lists with one entry per token; the first token of a prompt has no score."""
        if index not in self._offsets:
            self._offsets[index] = 0 if self._body.echo else len(self._prompt_text(answer, index))
            self._positions[index] = 0 if self._body.echo else len(answer.prompt_of(index).tokens)
            self._decoders[index] = self._tokenizer.stream()
        offsets = []
        for token in piece.tokens:
            offsets.append(self._offsets[index])
            if self._is_in_text(answer, index, token):
                self._offsets[index] += len(self._decoders[index].push(token))
            self._positions[index] += 1
        return shapes.CompletionLogprobs.written(
            tokens=[self._spelled(token) for token in piece.tokens],
            token_logprobs=[one and logprob_of(one.logprob) for one in piece.logprobs],
            top_logprobs=[one and self._top(one) for one in piece.logprobs],
            text_offset=offsets,
        )

    def _is_in_text(self, answer: Answer, index: int, token: int) -> bool:
        """Return whether the text spells the token at this position.

        The text spells a prompt's special tokens, except an added BOS or EOS, and none of an answer's.
        """
        if not self._tokenizer.is_special(token):
            return True
        request, tokens, at = answer.request, answer.prompt_of(index).tokens, self._positions[index]
        if at >= len(tokens):
            return False
        given = request.prompts[index // request.n]
        if not isinstance(given, str):
            return True
        if at == 0:
            return request.parse_special and given.startswith(self._tokenizer.piece(token))
        return not (at == len(tokens) - 1 and self._tokenizer.add_eos)

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens and the actual one, with their logprobs."""
        top = dict(one.top[: self._body.n_top or 0]) | {one.token: one.logprob}
        return {self._spelled(token): logprob_of(logprob) for token, logprob in top.items()}

    def _spelled(self, token: int) -> str:
        """Return a token as text, or its bytes as OpenAI writes them: different tokens look different."""
        piece = self._tokenizer.token_bytes(token)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
