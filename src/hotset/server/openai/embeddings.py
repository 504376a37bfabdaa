"""POST /v1/embeddings: texts as vectors of length 1.

dimensions: keep only the first values of each vector, and scale it to length 1 again.
"""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response

from hotset.api import Model
from hotset.engine.embedding import TextVectors
from hotset.engine.sequence import Owner
from hotset.server.body import BodyRoute
from hotset.server.errors import RequestError
from hotset.server.fields import FREE
from hotset.server.rows import Body, having, integer
from hotset.server.shapes import Embedding, EmbeddingsReply, EmbeddingsUsage
from hotset.server.streams import embedded, serving

router = APIRouter(route_class=BodyRoute)

MAX_TEXTS = 2048
"""Inputs of a request; OpenAI's limit."""


@having(*FREE)
class EmbeddingsBody(Body):
    input: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: integer(1) | None = None  # type: ignore[valid-type]

    def texts(self) -> list[str | list[int]]:
        """Return the inputs, at least one. Raises RequestError if there are none, or too many."""
        given: list[Any] = [self.input] if isinstance(self.input, str) else self.input
        if given and isinstance(given[0], int):
            given = [given]
        if not given or any(not text for text in given):
            raise RequestError("input is empty; give a text, or token ids", param="input")
        if len(given) > MAX_TEXTS:
            raise RequestError(
                f"input has {len(given)} entries, and at most {MAX_TEXTS} are taken", param="input"
            )
        return given


@router.post("/v1/embeddings", responses={200: {"model": EmbeddingsReply}})
async def embeddings(body: EmbeddingsBody, http: Request) -> Response:
    service = await serving(http, body.model)
    texts = body.texts()

    def make(model: Model, owner: Owner) -> TextVectors:
        ids = [model.encode(text) for text in texts]
        return model.embedder.vectors(ids, dimensions=body.dimensions, owner=owner)

    def reply(found: TextVectors) -> dict[str, Any]:
        data = (
            Embedding.written(index=i, embedding=_written(vector, body.encoding_format))
            for i, vector in enumerate(found.vectors())
        )
        usage = EmbeddingsUsage.written(prompt_tokens=found.n_tokens, total_tokens=found.n_tokens)
        return EmbeddingsReply.written(data=data, model=service.name, usage=usage)

    return await embedded(http, len(texts), make, reply)


def _written(vector: np.ndarray, form: str | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    found: list[float] = vector.tolist()
    return found
