"""Steps of a backend on random tokens, and checks of every operation of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import pytest
from derived_bounds import Oracle

from hotset import _core
from hotset.backends.base import Batch, StepStats
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.reference import ReferenceBackend
from hotset.backends.stage import BackendOptions
from hotset.formats.gguf import GGUFFile
from hotset.formats.quants import GGMLType
from hotset.formats.source import WeightSource
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph

N_VOCAB = 96
BLOCKS = 40
ISAS = [  # test_bits.py and kernel_test compare all; whole steps with scalar kernels are slow
    pytest.param(isa, marks=pytest.mark.slow if isa == "scalar" else ()) for isa in _core.available_isas()
]
MIXED = {"attn_v": GGMLType.Q6_K, "ffn_down": GGMLType.Q5_0, "output": GGMLType.Q8_0, "ffn_up": GGMLType.F16}


def mixed_types(name: str) -> GGMLType:
    return MIXED.get(name.split(".")[-1], GGMLType.Q4_K if "ffn" in name else GGMLType.Q4_1)


Record = TypeVar("Record")


def taken(record: type[Record], given: dict[str, Any]) -> Record:
    """Take the fields of a record out of keyword arguments."""
    names = [each.name for each in fields(record) if each.name in given]  # type: ignore[arg-type]
    return record(**{name: given.pop(name) for name in names})


def cpu_backend(weights: WeightSource, graph: Graph, **options: Any) -> CpuBackend:
    return CpuBackend(weights, graph, taken(BackendOptions, options), **options)


def cpu(gguf: GGUFFile, **options: Any) -> CpuBackend:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    return cpu_backend(gguf, graph, **{"n_blocks": BLOCKS, "max_batch": 128, "n_threads": 2, **options})


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, N_VOCAB, n).astype(np.int32)


def batch(parts: Sequence[tuple[np.ndarray, int, list[int]]], taps: tuple[str, ...] = ()) -> Batch:
    """Return one step of several sequences: (tokens, first position, KV blocks). All logits are wanted."""
    table = np.full((len(parts), max(len(blocks) for _, _, blocks in parts)), -1, np.int32)
    for i, (_, _, blocks) in enumerate(parts):
        table[i, : len(blocks)] = blocks
    ids = np.concatenate([t for t, _, _ in parts]).astype(np.int32)
    positions = np.concatenate([np.arange(at, at + len(t)) for t, at, _ in parts]).astype(np.int32)
    owners = np.concatenate([np.full(len(t), i) for i, (t, _, _) in enumerate(parts)]).astype(np.int32)
    return Batch(ids, positions, owners, table, np.arange(len(ids), dtype=np.int32), taps)


def logits_of(backend: Any, ids: np.ndarray, splits: Sequence[int], blocks: list[int]) -> np.ndarray:
    """Return the logits of every token, computed in steps that end at `splits`."""
    rows, at = [], 0
    for end in [*splits, len(ids)]:
        rows.append(backend.step(batch([(ids[at:end], at, blocks)])).logits.copy())
        at = end
    return np.concatenate(rows)


def counted_twice(gguf: GGUFFile, *, sparse: bool) -> Iterator[tuple[Batch, StepStats, StepStats]]:
    """Yield steps of 30 tokens and of one, each with the native backend's and the reference's counts."""
    ids = tokens(31)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    native = cpu(gguf, sparse=sparse)
    reference = ReferenceBackend(gguf, graph, n_blocks=1, sparse=sparse, kv_type="f16")
    for step in (batch([(ids[:30], 0, [0])]), batch([(ids[30:], 30, [0])])):
        native.step(step)
        reference.step(step)
        ours, theirs = native.stats(), reference.stats()
        assert ours is not None
        assert theirs is not None
        yield step, ours, theirs


def assert_every_operation_is_right(
    gguf: GGUFFile,
    graph: Graph,
    backend: CpuBackend,
    ids: np.ndarray,
    splits: Sequence[int],
    blocks: list[int],
) -> None:
    """Assert that each value equals the reference's within its operation's rounding (derived_bounds)."""
    oracle = Oracle(gguf, graph, n_blocks=backend.n_blocks, kv_type=backend.kv_type)
    names, at = tuple(value.name for value in graph.values), 0
    for end in [*splits, len(ids)]:
        step = batch([(ids[at:end], at, blocks)], names)
        oracle.check(step, backend.step(step))
        at = end


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()
