"""POST /v1/embeddings: texts as vectors of length 1."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field

from hotset.server.body import BodyRoute
from hotset.server.errors import RequestError
from hotset.server.openai.schema import Body
from hotset.server.shapes import Embedding, EmbeddingsReply, EmbeddingsUsage
from hotset.server.streams import embedded, service_of

router = APIRouter(route_class=BodyRoute)

_MOST = 2048  # inputs of a request, as OpenAI has it


class EmbeddingsBody(Body):
    input: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None

    def texts(self) -> list[str | list[int]]:
        """Raises RequestError where there is none."""
        given: list[Any] = [self.input] if isinstance(self.input, str) else self.input
        if given and isinstance(given[0], int):
            given = [given]
        if not given or any(not text for text in given):
            raise RequestError("input is empty; give a text, or token ids", param="input")
        if len(given) > _MOST:
            raise RequestError(
                f"input has {len(given)} entries, and at most {_MOST} are taken", param="input"
            )
        return given


@router.post("/v1/embeddings", responses={200: {"model": EmbeddingsReply}})
async def embeddings(body: EmbeddingsBody, http: Request) -> Response:
    service = service_of(http)
    service.check_name(body.model)
    texts, model = body.texts(), service.model
    if body.dimensions not in (None, model.config.n_embd):
        raise RequestError(
            f"dimensions is not supported: this model's vectors have {model.config.n_embd}; leave it out",
            param="dimensions",
            code="unsupported_parameter",
        )

    def reply(vectors: np.ndarray, n_tokens: int) -> dict[str, Any]:
        data = (
            Embedding.written(index=i, embedding=_written(vector, body.encoding_format))
            for i, vector in enumerate(vectors)
        )
        usage = EmbeddingsUsage.written(prompt_tokens=n_tokens, total_tokens=n_tokens)
        return EmbeddingsReply.written(data=data, model=service.name, usage=usage)

    return await embedded(http, texts, model.config.n_embd, reply)


def _written(vector: np.ndarray, form: str | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    found: list[float] = vector.tolist()
    return found
