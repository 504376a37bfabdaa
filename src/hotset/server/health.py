"""GET /health: whether the server can answer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from hotset.server.streams import host_of

router = APIRouter()


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)  # as llama-server has it
async def health(http: Request, response: Response) -> dict[str, Any]:
    """Return 200 once the server answers, 503 while it loads and when it shuts down."""
    host_of(http).check_ready()
    response.headers["server"] = "hotset"  # tells `hotset launch` that it may send a key
    return {"status": "ok"}
