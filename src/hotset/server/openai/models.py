"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from hotset.server.errors import RequestError
from hotset.server.service import ListedModel
from hotset.server.streams import file_of, listed

router = APIRouter()

_SEES = {"input_modalities": ["text", "image"], "output_modalities": ["text"]}


@router.get("/v1/models")
async def models(http: Request) -> dict[str, Any]:
    """Return the models, each followed by its adapters as MODEL:ADAPTER."""
    return {"object": "list", "data": await _entries(http)}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> dict[str, Any]:
    entries = {one["id"]: one for one in await _entries(http)}
    if name not in entries:
        _, name, _ = await file_of(http, name)
    if name not in entries:  # it has just been deleted
        raise RequestError("the model is not served any more", 404, param="model", code="model_not_found")
    return entries[name]


async def _entries(http: Request) -> list[dict[str, Any]]:
    return [made for one in await listed(http) for made in (entry(one), *_adapted(one))]


def entry(model: ListedModel) -> dict[str, Any]:
    """Return a model's entry in OpenAI's form; `status` is llama-server's, `architecture` OpenRouter's."""
    facts = model.facts
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "hotset",
        "max_model_len": model.n_ctx,
        "meta": {
            "n_ctx": model.n_ctx,
            "n_ctx_train": facts.n_ctx_train,
            "n_vocab": facts.n_vocab,
            "n_embd": facts.n_embd,
            "size": facts.n_bytes,
            "has_zeros": facts.has_zeros,
            **({} if model.needs is None else {"needs": model.needs}),
        },
        **({"architecture": _SEES} if facts.sees else {}),
        **({} if model.state is None else {"status": model.state}),
    }


def _adapted(model: ListedModel) -> list[dict[str, Any]]:
    """Return an entry for each adapter of a model; `root` and `parent` are vLLM's."""
    return [
        entry(model) | {"id": f"{model.name}:{adapter}", "root": adapter, "parent": model.name}
        for adapter in model.adapters
    ]
