"""Replies to sound and documents, and to requests for pictures: status 501, with the model's name.

No model here reads or writes these. The replies cover OpenAI's routes, and parts of messages in every API
schema. Images in messages are not among them (text/image_parts.py).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from hotset.escaping import clause
from hotset.parameters import shown
from hotset.server.errors import Problem, RequestError, UnreadableError, problem_of, response_of
from hotset.server.json_limits import check_json, loads
from hotset.server.replies import dumped
from hotset.server.streams import listed, name_of

router = APIRouter()

ROUTES = {
    "/v1/audio/speech": "text to speech",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "translation of speech",
    "/v1/images/generations": "image generation",
    "/v1/images/edits": "image editing",
    "/v1/images/variations": "variation of images",
}
"""OpenAI's routes, and the purpose of each."""

_PARTS = frozenset({
    "audio", "audio_url", "document", "file", "input_audio", "input_file", "input_video", "video",
    "video_url",
})  # fmt: skip

_KEPT_BYTES = 64 << 10  # of the beginning and of the end of a body, to search for the model's name
MOST_BYTES = 32 << 20  # read from a body, so that the client gets to the reply; OpenAI's limit is 25 MB
_MOST_NAME_BYTES = 256
_MOST_HEAD_BYTES = 1024  # of a part of a form
_OF_MODEL = re.compile(rb'; ?name="?model"?(?:[;\r\n]|\Z)')


def _kind_of(part: Any) -> str | None:
    """Return the type of a part that no model here reads; None for another part, such as a text document."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _PARTS:
        return None
    source = part.get("source") if kind == "document" else None
    return None if isinstance(source, dict) and source.get("type") in ("text", "content") else kind


def check_part(part: Any) -> Any:
    """Return a part of a message, for pydantic. Raises UnreadableError if no model here reads it."""
    if kind := _kind_of(part):
        raise UnreadableError(f"a part of type {kind} cannot be read")
    return part


def note_of(part: Any) -> str:
    """Return the note that replaces a part of a tool's result that no model here reads; "" for others."""
    kind = _kind_of(part)
    return f"[{kind.removeprefix('input_')}: this model reads only text]" if kind else ""


async def with_model(http: Request, problem: Problem, model: str | None) -> Problem:
    """Return the problem with the name of the requested model.

    If that model is not served, return that problem instead.
    """
    try:
        name = f"the model {await name_of(http, model)!r}" if model else await _served(http)
    except RequestError as error:
        return problem_of(error)
    return replace(problem, message=f"{problem.message}: {name} reads and writes only text")


class ModelNamed(BaseModel):
    """The part of a body that is kept (Excerpt)."""

    model: str | None = None


async def unsupported(body: ModelNamed, http: Request) -> Response:
    """Refuse a request with 501 and the model's name in OpenAI's error."""
    model = f"the model {clause(shown(body.model))}" if body.model else await _served(http)
    message = f"{ROUTES[http.url.path]} with {model} is not supported: hotset's models write only text"
    return response_of(Problem(501, message, code="not_supported"), http.url.path)


for _path in ROUTES:  # not in the OpenAPI document: it has only routes that work
    router.add_api_route(_path, unsupported, methods=["POST"], include_in_schema=False)


async def _served(http: Request) -> str:
    names = [one.name for one in await listed(http)]
    return f"the model {names[0]!r}" if len(names) == 1 else "any model of this server"


def _of_form(form: bytes) -> str | None:
    """Return the field `model` of a piece of a form, or None.

    The form is split: a regular expression that spans lines would take seconds on a piece made for it.
    """
    *parts, _ = form.split(b"\r\n--")  # the last part may be incomplete
    for part in parts:
        head, _, value = part.partition(b"\r\n\r\n")
        is_field = len(head) <= _MOST_HEAD_BYTES and 0 < len(value) <= _MOST_NAME_BYTES
        if is_field and _OF_MODEL.search(head):
            return value.decode("utf-8", "replace")
    return None


class Excerpt:
    """A search for the model's name in the body of a request to one of ROUTES: a form or JSON of any size."""

    def __init__(self) -> None:
        self._head = self._tail = b""
        self._size = 0

    def take(self, part: bytes) -> bool:
        """Return whether to read on, so that the client sends everything and then reads the reply."""
        self._size += len(part)
        self._head += part[: _KEPT_BYTES - len(self._head)]
        self._tail = (self._tail + part)[-_KEPT_BYTES:]
        return self._size <= MOST_BYTES

    def body(self, content_type: str, max_nesting: int) -> bytes:
        """Return the JSON of a ModelNamed. It has no model if the kept bytes name none."""
        if content_type.lower().startswith("multipart/"):
            name: Any = _of_form(self._head) or _of_form(self._tail)
        else:
            name = self._of_json(max_nesting)
        return dumped({"model": name} if isinstance(name, str) else {})

    def _of_json(self, max_nesting: int) -> Any:
        if self._size > len(self._head):
            return None
        try:
            check_json(self._head, max_nesting)
            given = loads(self._head)
        except RequestError:
            return None
        return given.get("model") if isinstance(given, dict) else None
