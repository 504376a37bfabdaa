"""Ranking of documents by how well they answer a query: /v1/rerank as Jina has it, /v2/rerank as Cohere."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from hotset.api import Model
from hotset.engine.embedding import TextVectors
from hotset.engine.reranking import RankedDocument, ranked, reranking_tokens
from hotset.engine.sequence import Owner
from hotset.errors import UnsupportedModelError
from hotset.server import shapes
from hotset.server.body import BodyRoute
from hotset.server.errors import RequestError
from hotset.server.fields import FREE
from hotset.server.openai.embeddings import MAX_TEXTS
from hotset.server.rows import Body, Flag, having, integer
from hotset.server.shapes import errors
from hotset.server.streams import embedded, serving

router = APIRouter(route_class=BodyRoute)
cohere = APIRouter(route_class=BodyRoute, responses=errors(shapes.CohereErrorReply))

MAX_TOKENS = 1 << 22
"""Tokens of all documents of a request, each with the query in front."""

_Text = Annotated[str, Field(min_length=1)]


class TextDocument(Body):
    text: _Text


@having(*FREE)
class DocumentsBody(Body):
    """The fields that both forms share. model: llama.cpp's clients leave it out."""

    model: str | None = None
    query: _Text
    documents: Annotated[list[_Text | TextDocument], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: integer(1) | None = None  # type: ignore[valid-type]

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class RerankBody(DocumentsBody):
    return_documents: Flag | None = None


class CohereRerankBody(DocumentsBody):
    max_tokens_per_doc: integer(1) | None = None  # type: ignore[valid-type]


@router.post("/v1/rerank", responses={200: {"model": shapes.RerankReply}})
@router.post("/v1/reranking", responses={200: {"model": shapes.RerankReply}})
@router.post("/rerank", responses={200: {"model": shapes.RerankReply}})
@router.post("/reranking", responses={200: {"model": shapes.RerankReply}})
async def rerank(body: RerankBody, http: Request) -> Response:
    service = await serving(http, body.model, required=False)

    def written(found: TextVectors) -> dict[str, Any]:
        results = [_result(one, with_text=bool(body.return_documents)) for one in _ranked(body, found)]
        usage = shapes.EmbeddingsUsage.written(prompt_tokens=found.n_tokens, total_tokens=found.n_tokens)
        return shapes.RerankReply.written(model=service.name, results=results, usage=usage)

    return await _answered(http, body, None, written)


@cohere.post("/v2/rerank", responses={200: {"model": shapes.CohereRerankReply}})
async def cohere_rerank(body: CohereRerankBody, http: Request) -> Response:
    await serving(http, body.model, required=False)

    def written(found: TextVectors) -> dict[str, Any]:
        return shapes.CohereRerankReply.written(
            id=uuid.uuid4().hex,
            results=[
                shapes.CohereRerankResult.written(index=one.index, relevance_score=one.score)
                for one in _ranked(body, found)
            ],
            meta=shapes.CohereMeta.written(tokens=shapes.CohereTokens.written(input_tokens=found.n_tokens)),
        )

    return await _answered(http, body, body.max_tokens_per_doc, written)


async def _answered(http: Request, body: DocumentsBody, longest: int | None, written: Any) -> Response:
    n_texts, n_bytes = len(body.documents), len(body.documents) * len(body.query)
    return await embedded(http, n_texts, partial(_scored, body, longest), written, n_bytes)


def _scored(body: DocumentsBody, longest: int | None, model: Model, owner: Owner) -> TextVectors:
    """Return the scores of the documents. longest: keep this many tokens of each document; None: all."""
    try:
        model.embedder.check_ranks()
    except UnsupportedModelError as error:
        raise RequestError(str(error), 501, code="not_supported") from None
    documents, tokenizer = body.texts(), model.tokenizer
    if longest is not None:
        ids = [tokenizer.encode(text, add_special=False) for text in documents]
        documents = [
            text if len(one) <= longest else tokenizer.decode(one[:longest]).rstrip("\ufffd")
            for text, one in zip(documents, ids, strict=True)
        ]
    n_ctx = model.engine.n_ctx
    texts = reranking_tokens(model.gguf.metadata, tokenizer, n_ctx, body.query, documents, MAX_TOKENS)
    return model.embedder.scores(texts, owner)


def _ranked(body: DocumentsBody, found: TextVectors) -> list[RankedDocument]:
    return ranked(found.vectors(), body.texts(), body.top_n)


def _result(one: RankedDocument, *, with_text: bool) -> dict[str, Any]:
    more = {"document": shapes.RankedText.written(text=one.document)} if with_text else {}
    return shapes.RerankResult.written(index=one.index, relevance_score=one.score, **more)
