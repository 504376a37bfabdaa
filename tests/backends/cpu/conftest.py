"""Fixtures of the tests of the CPU backend."""

from __future__ import annotations

import pytest
from backend_runs import mixed_types
from tiny_gguf import write_llama

from hotset.formats.gguf import GGUFFile, open_gguf


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    """Return a model that mixes tensor types, as real files do."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    return open_gguf(write_llama(path, n_embd=256, n_ff=288, head_dim=64, type_of=mixed_types, n_ctx=4096))
