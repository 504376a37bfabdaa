"""The backends of one conformance suite (tests/backends/test_conformance.py), alone and in chains.

A device backend takes part while it is in the registry and can run on this machine. Its capabilities
decide which cases it computes and which it refuses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from backend_runs import cpu_backend

from hotset.backends.base import Backend
from hotset.backends.pipeline import HOST, ChainBackend
from hotset.backends.reference import ReferenceBackend
from hotset.backends.registry import DEVICE_BACKENDS, capabilities
from hotset.backends.stage import Span
from hotset.load_parameters import KVType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

Make = Callable[..., Backend]


@dataclass(frozen=True)
class Kind:
    """A way to compute a model.

    make: opens a backend for a GGUF file. device: its device backend. is_exact: whether the bits of a row
    depend on nothing but its tokens.
    """

    name: str
    make: Make
    device: str | None = None
    is_exact: bool = True

    def computes(self, kv_type: str) -> bool:
        return kv_type in (get_args(KVType) if self.device is None else capabilities(self.device).kv_types)

    def same(self, found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> None:
        """Compare the results of two schedules: bits, or within the rounding of sums in another order."""
        assert found.shape == expected.shape
        if self.is_exact:
            np.testing.assert_array_equal(found, expected)
        elif found.size:
            assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()

    @contextmanager
    def opened(self, patch: pytest.MonkeyPatch, home: Path) -> Iterator[Make]:
        """Yield `make`, with the checks that the device backend has for its own tests."""
        if self.device == "triton":
            pytest.importorskip("torch")
        if self.device == "vulkan":
            from vulkan_runs import validation

            with validation(patch, home):
                yield self.make
                gc.collect()
        else:
            yield self.make


def _given(gguf: Any, options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    return gguf, graph, {"n_blocks": 8, "max_batch": 160, "kv_type": "f32", **options}


def _reference(gguf: Any, **options: Any) -> Backend:
    weights, graph, given = _given(gguf, options)
    return ReferenceBackend(weights, graph, **given)


def _cpu(gguf: Any, **options: Any) -> Backend:
    weights, graph, given = _given(gguf, options)
    return cpu_backend(weights, graph, n_threads=2, **given)


def _stages(gguf: Any, **options: Any) -> Backend:
    weights, graph, given = _given(gguf, options)
    middle = graph.layer_starts[1]
    spans = Span(0, middle), Span(middle, len(graph.ops))
    stages = [cpu_backend(weights, graph, span=span, n_threads=2, **given) for span in spans]
    return ChainBackend("parts", stages, [HOST] * 2, n_blocks=given["n_blocks"], max_batch=given["max_batch"])


def _triton(gguf: Any, **options: Any) -> Backend:
    from gpu_runs import gpu

    weights, graph, given = _given(gguf, options)
    return gpu(weights, graph, **given)


def _triton_beside_cpu(gguf: Any, **options: Any) -> Backend:
    from hybrid_runs import chain, whole

    weights, graph, given = _given(gguf, options)
    return chain(whole([-1, 0]), weights, graph, n_threads=1, **given)


def _vulkan(**more: Any) -> Make:
    def make(gguf: Any, **options: Any) -> Backend:
        from vulkan_runs import vulkan

        weights, graph, given = _given(gguf, options)
        return vulkan(weights, graph, **given, **more)

    return make


ALL = (
    Kind("reference", _reference, is_exact=False),  # NumPy's products depend on the number of rows
    Kind("cpu", _cpu),
    Kind("stages", _stages),
    Kind("triton", _triton, "triton", is_exact=False),
    Kind("triton-beside-cpu", _triton_beside_cpu, "triton", is_exact=False),
    Kind("vulkan", _vulkan(), "vulkan"),
    Kind("vulkan-staged", _vulkan(staged=True), "vulkan"),  # copies instead of mapped memory
    Kind("vulkan-beside-cpu", _vulkan(n_layers=1, n_threads=1), "vulkan"),
)
KINDS = tuple(kind for kind in ALL if kind.device is None or kind.device in DEVICE_BACKENDS)
