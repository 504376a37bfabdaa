"""The model that most server tests use, also loaded without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_server import write_model

import hotset


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[hotset.Model]:
    with hotset.load(path, device="cpu", n_threads=1, max_sequences=4) as model:
        yield model
