"""bench/split_experts.py: an MoE layer made of a dense model equals it if each token uses all experts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the router is trained with torch")

from random_traces import moe_layer
from split_experts import Splitter, balanced_kmeans, distilled_router

import hotset
from hotset.formats.quants import GGMLType

ROWS = np.random.default_rng(2).integers(0, 90, (2, 64)).astype(np.int32)


def split(path: Path, target: Path, **options: Any) -> None:
    settings = {"experts": 4, "used": 4, "shared": 32, "steps": 20, "rounds": 3, "seed": 0} | options
    with hotset.load(path, device="cpu", n_ctx=64) as model:
        Splitter(argparse.Namespace(**settings)).write(model, ROWS, target)


def test_with_all_its_experts_the_moe_is_the_dense_model(tmp_path: Path) -> None:
    path = moe_layer(tmp_path / "dense.gguf", experts=None, type_of=lambda _: GGMLType.F16)
    split(path, tmp_path / "all.gguf")
    split(path, tmp_path / "some.gguf", used=1, shared=0)
    logits = {}
    for name in ("dense", "all", "some"):
        with hotset.load(tmp_path / f"{name}.gguf", device="cpu", n_ctx=64) as model:
            logits[name] = model.taps(ROWS[0].tolist(), [model.graph.result.name])[model.graph.result.name]
            experts = [layer.experts for layer in model.config.layers]
        assert [one and (one.n, one.n_ff_shared) for one in experts] == {
            "dense": [None] * 3,
            "all": [(4, 32)] * 3,
            "some": [(4, 0)] * 3,
        }[name]
    np.testing.assert_allclose(logits["all"], logits["dense"], rtol=1e-3, atol=1e-3 * logits["dense"].std())
    assert np.abs(logits["some"] - logits["dense"]).max() > 0.1 * logits["dense"].std()


def test_clusters_have_one_size_and_group_related_neurons() -> None:
    rng = np.random.default_rng(0)
    centres = np.eye(4, 8)
    points = np.repeat(centres, 6, axis=0) + 0.1 * rng.standard_normal((24, 8))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    clusters = balanced_kmeans(points, 4, 20, np.random.default_rng(3))
    assert np.bincount(clusters).tolist() == [6, 6, 6, 6]
    uneven = balanced_kmeans(rng.standard_normal((24, 8)), 3, 5, np.random.default_rng(1))
    assert np.bincount(uneven).tolist() == [8, 8, 8]
    with pytest.raises(AssertionError, match="equal experts"):
        balanced_kmeans(points, 5, 1, rng)


def test_the_router_names_the_experts_that_contribute_most() -> None:
    """Check contributions that a linear layer can predict: it finds most of them, chance a quarter."""
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((2048, 16)).astype(np.float32)
    contributions = np.exp(inputs @ rng.standard_normal((16, 8)).astype(np.float32))
    weight, bias, recall = distilled_router(inputs, contributions, 2, 150, seed=0)
    assert (weight.shape, bias.shape) == ((8, 16), (8,))
    assert recall > 0.6
