"""The decisions of loader/decide.py, which depend only on facts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_llama

from hotset import LoadSettings
from hotset.backends.base import BLOCK_SIZE
from hotset.errors import OutOfMemoryError
from hotset.formats.overlay import Overlay
from hotset.loader.build import open_model
from hotset.loader.decide import Decided, MachineFacts, decide
from hotset.sparsity.modes import choose
from hotset.sparsity.preparing import Prepared


def decided(path: Path, free: float, program: int = 0, **settings: Any) -> Decided:
    with open_model(path, LoadSettings(device="cpu", **settings)) as opened:
        choice = choose(opened.config, opened.gguf.tensors)
        return decide(opened, choice, Prepared(Overlay(opened.gguf)), MachineFacts(free, program))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "m.gguf", n_ctx=8192)


def test_the_default_context_has_a_quarter_of_the_free_memory(path: Path) -> None:
    roomy = decided(path, math.inf)
    assert (roomy.n_ctx, roomy.n_blocks, roomy.limit) == (4096, 4096 // BLOCK_SIZE, None)
    each = roomy.cost.kv_bytes_per_token("f16")
    for n, expected in ((8192, 8192), (8191, 8128), (1000, 960), (512, 512)):  # whole pages
        assert decided(path, 4 * n * each).n_ctx == expected
    assert decided(path, path.stat().st_size + 10 * each).n_ctx == 512
    assert decided(path, 100 * each, n_ctx=100).n_ctx == 100
    with pytest.raises(OutOfMemoryError, match="lower n_ctx"):
        decided(path, 100 * each, n_ctx=101)


def test_a_file_that_is_larger_than_free_memory_gets_a_share_of_it(path: Path) -> None:
    n_bytes = path.stat().st_size
    assert decided(path, n_bytes).limit is None
    assert decided(path, n_bytes - 1, n_ctx=1).limit == int(0.9 * (n_bytes - 1))
    assert decided(path, n_bytes, ram_budget=2.0).limit == 2 << 30
    assert decided(path, math.inf, ram_budget=2.0).limit is None  # another's to say


def test_a_budget_leaves_most_to_rows_and_the_program_counts(path: Path) -> None:
    budget: dict[str, Any] = {"ram_budget": 2**-8, "n_seqs": 1}  # 4 MiB
    lengths = [decided(path, 1 << 40, program, **budget).n_ctx for program in (0, 1 << 20)]
    assert 512 < lengths[1] < lengths[0] < 4096
