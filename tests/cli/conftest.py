"""Fixtures of the command-line tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf")
