"""POST /infill: text for a gap, in llama-server's format, which editors use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from hotset.server.answers import AnswerRequest
from hotset.server.body import BodyRoute
from hotset.server.fields import NO_DEFAULTS, AnswerFields
from hotset.server.llama_replies import LlamaReplies, ResponseFields
from hotset.server.rows import Body
from hotset.server.shapes import EVENT_STREAM, LlamaReply, documented
from hotset.server.streams import off_loop, serving, streamed, whole
from hotset.text.infill import File, Gap

router = APIRouter(route_class=BodyRoute)

MAX_FILES = 1024


class ExtraFile(Body):
    filename: str | None = None
    text: str


class InfillBody(AnswerFields):
    """The body of a gap to fill in, as llama-server has it."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FILES)] | None = None
    prompt: str | None = None
    response_fields: ResponseFields | None = None

    @cached_property
    def only_reads(self) -> bool:
        """Return whether the client only wants the prompt in the cache."""
        return bool(self.all_settings("sampling").get("max_tokens") == 0)

    def request(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> AnswerRequest:
        """Return the request. Raises InvalidRequestError."""
        gap = Gap(
            prefix=self.input_prefix,
            suffix=self.input_suffix,
            begun=self.prompt or "",
            files=[File(one.filename or "tmp", one.text) for one in self.input_extra or ()],
            trims=True,
        )
        return AnswerRequest(
            gap=gap,
            params=self.sampling(defaults, **({"max_tokens": 1} if self.only_reads else {})),
            thinking=self.thinking_settings,
            stream=bool(self.given("stream")),
            **self.all_settings("request"),
        )


@router.post("/infill", responses=documented(LlamaReply, EVENT_STREAM))
async def infill(body: InfillBody, http: Request) -> Response:
    service = await serving(http, body.model, required=False, takes_adapter=True)
    request = await off_loop(http, body.request, service.sampling)
    replies = LlamaReplies(service, request.params, body.only_reads, fields=body.response_fields)
    if request.stream:
        return await streamed(http, request, replies.events)
    return await whole(http, request, replies.whole)
