"""POST /completion, /completions and /apply-template, as llama-server has them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field

from hotset.api import Model
from hotset.errors import InvalidRequestError
from hotset.generation import checked_messages, template_variables
from hotset.server.answers import AnswerRequest
from hotset.server.body import BodyRoute
from hotset.server.errors import UnreadableError
from hotset.server.fields import NO_DEFAULTS
from hotset.server.llama_replies import LlamaReplies, ResponseFields
from hotset.server.openai.chat import ChatBody
from hotset.server.openai.schema import SamplingFields
from hotset.server.rows import Flag, Row, having, integer
from hotset.server.shapes import EVENT_STREAM, LlamaReply, TemplateReply, documented
from hotset.server.streams import in_turn, serving, streamed, whole
from hotset.text.messages import text_of

router = APIRouter(route_class=BodyRoute)

MAX_PIECES = 1 << 20  # texts and tokens of a prompt
MAX_PROBS = 100

Pieces = str | Annotated[list[int | str], Field(max_length=MAX_PIECES)]


def _plain(given: Any) -> Any:
    """Return the text of a prompt that is an object, as multimodal models have it."""
    if not isinstance(given, dict):
        return given
    if given.get("multimodal_data"):
        raise UnreadableError("multimodal_data cannot be read")
    return given.get("prompt_string")


def _prompts(given: Any) -> Any:
    """Return a list of prompts. A list of tokens, or of tokens and texts, is one prompt."""
    if not isinstance(given, list) or not given or any(isinstance(one, int) for one in given):
        return [_plain(given)]
    return [_plain(one) for one in given]


@having(
    Row("n_probs", "Probabilities of this number of likeliest tokens.", integer(0, MAX_PROBS), ("logprobs",),
        use="route"),
    Row("post_sampling_probs", "probabilities are the model's own", use="ignored"),
    Row("return_tokens", "Send the tokens of the answer, too.", Flag, use="route"),
    Row("return_progress", "hotset does not report how much of a prompt is read", use="ignored"),
    Row("n_cache_reuse", "hotset reuses prefixes", use="ignored"),
    Row("sse_ping_interval", "the server's setting counts", use="ignored"),
)  # fmt: skip
class LlamaCompletionBody(SamplingFields):
    """The body of a prompt that is continued, as llama-server has it."""

    prompt: Annotated[list[Pieces], Field(min_length=1), BeforeValidator(_prompts)]
    response_fields: ResponseFields | None = None

    @cached_property
    def only_reads(self) -> bool:
        """Return whether the client only wants the prompt in the cache."""
        return bool(self.all_settings("sampling").get("max_tokens") == 0)

    @property
    def n_probs_wanted(self) -> int | None:
        return self.given("n_probs") or self.given("logprobs") or None

    def request(self, model: Model, defaults: Mapping[str, Any] = NO_DEFAULTS) -> AnswerRequest:
        """Return the request. Raises InvalidRequestError."""
        over = {"max_tokens": 1} if self.only_reads else {}
        return AnswerRequest(
            prompts=[_read(model, prompt) for prompt in self.prompt],
            params=self.sampling(defaults, self.n_probs_wanted, **over),
            thinking=self.thinking_settings,
            stream=bool(self.given("stream")),
            **self.all_settings("request"),
        )


def _read(model: Model, prompt: str | list[int | str]) -> str | list[int]:
    """Return a prompt with texts and tokens as tokens; a plain text unchanged. BOS precedes a first text."""
    if isinstance(prompt, str):
        return prompt
    tokens: list[int] = []
    for i, piece in enumerate(prompt):
        if isinstance(piece, int):
            tokens.append(piece)
        elif i == 0:
            tokens += model.tokenizer.encode_prompt(piece, True)
        else:
            tokens += model.tokenizer.encode(piece, add_special=False, parse_special=True)
    return tokens


@router.post("/completions", responses=documented(LlamaReply | list[LlamaReply], EVENT_STREAM))
@router.post("/completion", responses=documented(LlamaReply | list[LlamaReply], EVENT_STREAM))
async def completion(body: LlamaCompletionBody, http: Request) -> Response:
    service = await serving(http, body.model, required=False, takes_adapter=True)
    request = await in_turn(http, body.request, service.model, service.sampling)
    replies = LlamaReplies(
        service,
        request.params,
        body.only_reads,
        body.n_probs_wanted,
        bool(body.given("return_tokens")),
        body.response_fields,
    )
    if request.stream:
        return await streamed(http, request, replies.events)
    return await whole(http, request, replies.whole)


@router.post("/apply-template")
async def apply_template(body: ChatBody, http: Request) -> TemplateReply:
    """Return the prompt of a chat, which /completion continues as /v1/chat/completions does."""
    service = await serving(http, body.model, required=False, takes_adapter=True)

    def rendered() -> str:
        request = body.request(service.sampling)
        if not request.messages:
            raise InvalidRequestError("messages is empty; give a conversation")
        model, variables = service.model, {**request.thinking.variables, **request.template}
        return text_of(
            model.chat_template,
            model.tokenizer,
            checked_messages(request.messages),
            list(request.tools) or None,
            request.opening,
            None if model.images is None else model.images.until(),
            **template_variables(variables),
        )

    return TemplateReply(prompt=await in_turn(http, rendered))
