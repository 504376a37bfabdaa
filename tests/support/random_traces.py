"""Traces of routes, and tiny MoE models for recording them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from byte_models import N_VOCAB, vocabulary
from tiny_gguf import write_llama

from hotset.sparsity.trace import RouteTrace

TEXT = "the quick brown fox jumps over the lazy dog; " * 4
EXPERTS = (8, 3)


def moe_layer(path: Path, **options: Any) -> Path:
    """Write a random MoE model of three layers with a tokenizer."""
    options = {"experts": EXPERTS, "n_layer": 3, "n_vocab": N_VOCAB, "n_ctx": 512} | options
    keys = {**vocabulary(), **options.pop("keys", {})}
    return write_llama(path, keys=keys, **options)


def traced(routes: np.ndarray, n_experts: int, starts: tuple[int, ...] = (0,)) -> RouteTrace:
    n_layers = routes.shape[1]
    sizes = tuple(range(100, 100 + n_layers))
    return RouteTrace(
        routes=routes.astype(np.int32), layers=tuple(range(n_layers)), n_experts=n_experts,
        expert_bytes=sizes, starts=starts, model="m", name="name", data="d",
    )  # fmt: skip


def random_trace(n_tokens: int = 60, shape: tuple[int, int, int] = (3, 8, 2), seed: int = 0) -> RouteTrace:
    """Return routes of tokens that resemble the previous token's."""
    n_layers, n_experts, n_used = shape
    rng = np.random.default_rng(seed)
    scores = np.cumsum(rng.standard_normal((n_tokens, n_layers, n_experts)), axis=0)
    return traced(np.argsort(-scores, axis=2, kind="stable")[:, :, :n_used], n_experts)


def simulate(requests: list[list[list[int]]], sizes: Sequence[int], policy: str, n_slots: int) -> int:
    """Return the hits in the second half by explicit rules.

    The cache is a set, and every choice examines all entries. requests: per token and layer, the needed
    entries. sizes: entries of each layer.
    """
    first, n_layers = len(requests) // 2, len(sizes)
    tokens = [[[(layer, id) for id in ids] for layer, ids in enumerate(layers)] for layers in requests]
    if policy == "optimum":
        lookups = [ids for layers in tokens for ids in layers]
        uses: dict[tuple[int, int], list[int]] = {}
        for i, ids in enumerate(lookups):
            for one in ids:
                uses.setdefault(one, []).append(i)
        hits, now = 0, first * n_layers - 1

        def next_use(entry: tuple[int, int]) -> int:
            return next((i for i in uses[entry] if i > now), len(lookups))

        def best(entries: set[tuple[int, int]]) -> set[tuple[int, int]]:
            return set(sorted(entries, key=next_use)[:n_slots])

        held = best({one for ids in lookups[: now + 1] for one in ids})
        for now in range(first * n_layers, len(lookups)):
            hits += len(set(lookups[now]) & held)
            held = best(held | set(lookups[now]))
        return hits
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for t, layers in enumerate(tokens):
        for ids in layers:
            there = [one for one in ids if one in cache]
            hits += len(there) * (t >= first)
            for one in there:
                cache.move_to_end(one)
            for one in ids:
                if one not in there:
                    if len(cache) == n_slots and cache and next(iter(cache)) not in ids:
                        cache.popitem(last=False)
                    if len(cache) < n_slots:
                        cache[one] = None
    return hits
