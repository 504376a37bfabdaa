"""Intermediate values of a text, computed in separate steps and blocks, concurrently with other requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hotset.engine.driver import EngineThread
from hotset.errors import InvalidRequestError
from hotset.model.graph import Graph
from hotset.model.operations import SelectOutputs
from hotset.sparsity.taps import batches

_TAPPED_BYTES = 64 << 20  # of intermediate values that one step returns


def steps(
    thread: EngineThread, graph: Graph, ids: np.ndarray, names: Sequence[str]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the values `names` of the graph, step by step: name → float32 [n_tokens of the step, width].

    ids: int32 [n], which fit in the context. Other sequences run between two steps. Raises
    InvalidRequestError if the graph lacks a name, and OutOfMemoryError if the text does not fit in the cache
    now.
    """
    widths = {value.name: value.width for value in graph.values}
    for name in names:
        if name not in widths:
            raise InvalidRequestError(f"the model has no value named {name!r} to tap")
    ops = list(graph.primitives)
    selection = next(i for i, op in enumerate(ops) if isinstance(op, SelectOutputs))
    outputs = any(op.out.name in names for op in ops[selection:])  # these have rows of output tokens only
    backend = thread.engine.backend
    n_bytes = 4 * sum(widths[name] for name in names)
    n_step = max(1, min(backend.max_batch, _TAPPED_BYTES // max(n_bytes, 1)))
    if graph.is_encoder:
        n_step = len(ids)
    blocks: list[int] = []
    slots = None
    try:
        with thread.exclusive() as engine:
            blocks = engine.scheduler.take_blocks(len(ids))
            slots = engine.scheduler.take_states()
        for batch in batches(ids, names, blocks, n_step, outputs=outputs, slots=slots):
            with thread.exclusive():
                taps = dict(backend.step(batch).taps)
            yield taps
    finally:
        if blocks and not thread.closed:
            with thread.exclusive() as engine:
                engine.scheduler.pool.release(blocks)
                if slots is not None:
                    engine.scheduler.give_states()
