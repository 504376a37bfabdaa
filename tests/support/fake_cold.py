"""A CPU worker in NumPy: the correct results of split layers, computed by the reference's operations.

It also checks the protocol: one submit per layer and step, then one collect, and nothing outside a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from hotset.backends.reference import ReferenceBackend
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.model.operations import TransposedLinear


class FakeCpuWorker:
    """Sums the rows of the cold neurons that `bits` names, without bias or residual."""

    def __init__(
        self, weights: WeightSource, graph: Graph, layers: Mapping[int, np.ndarray], max_batch: int
    ) -> None:
        self.layers, self.graph, self.max_batch = tuple(sorted(layers)), graph, max_batch
        self._hot = layers
        self._reference = ReferenceBackend(weights, graph, n_blocks=1)
        # Results keep their memory between steps, like memory that a device has mapped.
        width = graph.ops[0].out.width
        self._out = {layer: torch.zeros((max_batch, width)) for layer in layers}
        self._done: set[int] = set()
        self._n_tokens = 0
        self.capturable = True
        self.n_steps = 0
        self.n_posts = 0
        self.n_selected = 0
        self.fails = False
        self.closed = False

    @contextmanager
    def step(self, n_tokens: int, thresholded: np.ndarray | None = None) -> Iterator[None]:
        assert self._n_tokens == 0
        assert 1 <= n_tokens <= self.max_batch
        self._n_tokens = n_tokens
        try:
            yield
            assert not self._done, "a layer was posted and never collected"
        finally:
            self._n_tokens = 0
            self._done.clear()
        self.n_steps += 1
        if self.fails:
            raise RuntimeError("the cold half failed")

    def submit(self, layer: int, h: torch.Tensor, bits: torch.Tensor | None) -> None:
        hot = self._hot[layer]
        assert layer not in self._done
        assert self._n_tokens, "outside a step"
        assert h.shape[0] == self._n_tokens
        assert h.dtype == torch.float32
        wanted = np.ones((self._n_tokens, len(hot)), bool)
        if bits is not None:
            assert bits.dtype == torch.uint8
            assert bits.shape == (self._n_tokens, -(-len(hot) // 8))
            wanted = np.unpackbits(bits.cpu().numpy(), axis=1, count=len(hot), bitorder="little").astype(bool)
        wanted &= ~hot
        self.n_posts += 1
        self.n_selected += int(wanted.sum())
        self._out[layer][: self._n_tokens] = torch.from_numpy(self._sum(layer, h.cpu().numpy(), wanted))
        self._done.add(layer)

    def collect(self, layer: int) -> torch.Tensor:
        self._done.remove(layer)
        return self._out[layer][: self._n_tokens]

    def counts(self) -> np.ndarray:
        """Return counts that are 0 except the requested neurons of the first layer, summed over all steps."""
        counts = np.zeros((len(self.layers), 5), np.int64)
        counts[0, 0] = self.n_selected
        return counts

    def seconds(self) -> np.ndarray:
        return np.zeros(len(self.layers))

    def cancel(self, reason: str) -> None:
        raise AssertionError("the fake never waits")

    def close(self) -> None:
        self.closed = True

    def _sum(self, layer: int, h: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Run the layer's own operations from gate and up to down, with unwanted neurons at zero."""
        ffn = self.graph.ffns[layer]
        down = ffn.down
        assert isinstance(down, TransposedLinear)
        values: dict[int, np.ndarray] = {ffn.decides.x.id: h}
        compute = self._reference._compute
        for op in (ffn.gate, ffn.up, ffn.gate_act, ffn.up_act, ffn.product):
            if op is not None:
                values[op.out.id] = compute(op, values, None, [])  # type: ignore[arg-type]
        neurons = values[ffn.neurons.id]
        values[down.x.id] = np.where(wanted, neurons, np.float32(0))
        return compute(replace(down, bias=None), values, None, []).astype(np.float32)  # type: ignore[arg-type]
