"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from hotset.server.service import Service
from hotset.server.streams import service_of
from hotset.storage.store import shards

router = APIRouter()


@router.get("/v1/models")
async def models(http: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_entry(service_of(http))]}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> dict[str, Any]:
    service = service_of(http)
    service.check_name(name)
    return _entry(service)


def _entry(service: Service) -> dict[str, Any]:
    model = service.model
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "hotset",
        "max_model_len": model.n_ctx,
        "meta": {
            "n_ctx": model.n_ctx,
            "n_ctx_train": model.config.n_ctx_train,
            "n_vocab": model.backend.n_vocab,
            "n_embd": model.config.n_embd,
            "size": sum(shard.stat().st_size for shard in shards(model.gguf.path)),
        },
    }
