"""Compares models computed by torch with the reference backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from backend_runs import batch

from hotset.backends.reference import ReferenceBackend
from hotset.backends.torch.graph import TorchGraph
from hotset.formats.gguf import GGUFFile
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.model.predictor import Predictor
from hotset.training.thresholds import every_threshold


def thresholded_graph(gguf: GGUFFile, predictor: Predictor | None = None) -> Graph:
    config = config_from_gguf(gguf)
    return describe(config, gguf.tensors, predictor, every_threshold(config))


def same_as_reference(gguf: GGUFFile, predictor: Predictor | None = None) -> None:
    graph = thresholded_graph(gguf, predictor)
    ids = np.random.default_rng(0).integers(0, graph.result.width, 40)
    step = batch([(ids.tolist(), 0, [0])])
    if graph.recurrent:  # from a state of zeros, which is not kept
        step = replace(step, states=np.full(1, -1, np.int32), saves=np.full(40, -1, np.int32))
    expected = ReferenceBackend(gguf, graph, n_blocks=1).step(step).logits
    found = TorchGraph(gguf, graph).logits(torch.from_numpy(np.stack([ids, ids])))
    assert found.shape == (80, graph.result.width)
    for text in (found[:40], found[40:]):
        np.testing.assert_allclose(text.numpy(), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
