"""A server without a socket, in front of a tiny random model whose tokens are bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from test_api import write_model

import hotset
from hotset.server.app import create_app
from hotset.server.service import Service
from hotset.server.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "hello"}]

__all__ = ["MESSAGES", "client_of", "events_of", "text_of", "write_model"]


@asynccontextmanager
async def client_of(
    path: Path, *, load: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """A client of a server that has loaded the model. load: LoadSettings; settings: ServerSettings."""
    how = {"backend": "cpu", "n_threads": 1, "max_sequences": 4} | (load or {})
    service = Service(lambda: hotset.load(path, **how), ServerSettings(**settings), name="tiny")
    app = create_app(service)
    async with app.router.lifespan_context(app):
        await service.loaded()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield client, service


def events_of(text: str) -> tuple[list[dict[str, Any]], bool]:
    """The JSON of a stream's events, and whether it ended with [DONE]."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    done = bool(data) and data[-1] == "[DONE]"
    return [json.loads(one) for one in data if one != "[DONE]"], done


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a chat stream."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
