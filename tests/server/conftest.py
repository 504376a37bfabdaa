"""The model that most server tests use, also loaded without a server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from tiny_server import client_of, write_model

import hotset
from hotset.server.logs import LOGGERS, RateLimit
from hotset.server.service import Service


@pytest.fixture(autouse=True)
def _fresh_rate_of_logs() -> None:
    """Forget the log lines of the tests before, which a server in this process may have counted."""
    for logger in map(logging.getLogger, LOGGERS):
        for limit in [one for one in logger.filters if isinstance(one, RateLimit)]:
            logger.removeFilter(limit)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[hotset.Model]:
    with hotset.load(path, device="cpu", n_threads=1, max_sequences=4) as model:
        yield model


@pytest.fixture
async def served(path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """Yield a client of a server of the model, and its service."""
    async with client_of(path) as both:
        yield both


@pytest.fixture
def client(served: tuple[httpx.AsyncClient, Service]) -> httpx.AsyncClient:
    return served[0]


@pytest.fixture
def service(served: tuple[httpx.AsyncClient, Service]) -> Service:
    return served[1]
