"""POST /infill: text for a gap, in the shape of llama-server, as editors ask for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import cached_property
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from hotset.server.answers import Answer, AnswerRequest, Choice, Finished, TextDelta
from hotset.server.body import BodyRoute
from hotset.server.fields import NO_DEFAULTS, AnswerFields
from hotset.server.replies import event
from hotset.server.rows import Body
from hotset.server.shapes import EVENT_STREAM, InfillReply, InfillTimings, documented
from hotset.server.streams import off_loop, serving, streamed, whole
from hotset.text.infill import File, Gap

router = APIRouter(route_class=BodyRoute)

MAX_FILES = 1024
MAX_FIELDS = 64  # of a reply
MAX_FIELD_CHARS = 128  # of the name of one, which is split on the event loop

_FieldName = Annotated[str, Field(max_length=MAX_FIELD_CHARS)]


class ExtraFile(Body):
    filename: str | None = None
    text: str


class InfillBody(AnswerFields):
    """The body of a gap to fill in, as llama-server has it."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FILES)] | None = None
    prompt: str | None = None
    response_fields: Annotated[list[_FieldName], Field(max_length=MAX_FIELDS)] | None = None

    @cached_property
    def only_reads(self) -> bool:
        """Whether the client only wants the prompt in the cache."""
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
            stream=bool(self.given("stream")),
            **self.all_settings("request"),
        )


@router.post("/infill", responses=documented(InfillReply, EVENT_STREAM))
async def infill(body: InfillBody, http: Request) -> Response:
    service = await serving(http, body.model, required=False, takes_adapter=True)
    request = await off_loop(http, body.request, service.sampling)
    name = service.name

    def reply(answer: Answer, choices: list[Choice]) -> dict[str, Any]:
        (choice,) = choices
        text = "" if body.only_reads else choice.text
        return _chosen(_last(answer, name, text, choice.reason, choice.stop), body.response_fields)

    async def events(answer: Answer) -> AsyncIterator[bytes]:
        async for delta in answer:
            if isinstance(delta, TextDelta) and not body.only_reads:
                yield event(InfillReply.written(content=delta.text, stop=False))
            if isinstance(delta, Finished):
                last = _last(answer, name, "", delta.reason, delta.stop)
                yield event(_chosen(last, body.response_fields))

    if request.stream:
        return await streamed(http, request, events)
    return await whole(http, request, reply)


def _last(answer: Answer, model: str, text: str, reason: str, stop: str | None) -> dict[str, Any]:
    usage = answer.usage
    completion = answer.generations[0].completion
    assert completion is not None
    timings, n_read = completion.timings, usage.prompt_tokens - usage.cached_tokens
    return InfillReply.written(
        content=text,
        stop=True,
        model=model,
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
        tokens_cached=usage.cached_tokens,
        truncated=False,
        stop_type="word" if stop is not None else "limit" if reason == "length" else "eos",
        stopping_word=stop or "",
        timings=InfillTimings.written(
            prompt_n=n_read,
            prompt_ms=_milliseconds(n_read, timings.prompt_per_second),
            prompt_per_second=timings.prompt_per_second,
            predicted_n=usage.completion_tokens,
            predicted_ms=_milliseconds(usage.completion_tokens - 1, timings.predicted_per_second),
            predicted_per_second=timings.predicted_per_second,
        ),
    )


def _milliseconds(n: int, per_second: float) -> float:
    return 1000 * n / per_second if per_second else 0.0


def _chosen(reply: dict[str, Any], fields: list[str] | None) -> dict[str, Any]:
    """Those fields of a reply that it has; "timings/prompt_n" is a field by that name."""
    if fields is None:
        return reply
    chosen = {}
    for path in fields:
        value: Any = reply
        for key in path.split("/"):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            chosen[path] = value
    return chosen
