"""MoE layers of which a Vulkan device has some experts in slots: the same bits with any number of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from backend_runs import logits_of, tokens
from cases import quick_are
from expert_models import FORMS, model
from vulkan_runs import validated, vulkan

from hotset.formats.quants import GGMLType as T
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

__all__ = ["validated"]  # the fixture
CACHED = {
    name: FORMS[name]
    for name in ("mixed", "biased", "shared", "sigmoid", "groups", "chosen", "relu", "one used", "many")
}
CACHED["mxfp4"] = {"type_of": lambda name: T.MXFP4 if "_exps" in name else T.F32, "biased": True}
STEPS = [18, *range(25, 30)]


@pytest.mark.parametrize("form", quick_are(("mixed", "biased", "many"), CACHED))
def test_the_same_bits_with_any_cache(tmp_path: Path, form: str) -> None:
    gguf = model(tmp_path, **CACHED[form])
    route = describe(config_from_gguf(gguf), gguf.tensors).ffns[0].route
    assert route is not None
    ids, n_all = tokens(30), 2 * route.x.width
    expected = logits_of(vulkan(gguf), ids, STEPS, [2])
    for n_slots in (1, n_all // 4, n_all // 2, 3 * n_all // 4, n_all):
        backend = vulkan(gguf, expert_slots=n_slots, n_threads=1 + n_slots % 2)
        found = logits_of(backend, ids, STEPS, [2])
        np.testing.assert_array_equal(found, expected)
        counts = backend.expert_counts()
        assert counts.hits + counts.on_cpu == 30 * 2 * route.n_used
        assert counts.on_cpu > 0
        assert counts.fetched >= min(n_slots, counts.needed // 30)
        backend.close()
