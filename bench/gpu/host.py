"""The host's work between two tokens of a device, by part in µs, without the device's own time.

usage: python bench/gpu/host.py [--tokens 400] [--n-vocab 32000] [--width 4096]

It needs no device. A model of two layers with a real model's vocabulary and width is loaded on the simulated
device. A token's step is computed once, and replays of the recorded step compute nothing, so only the host's
work is left: the engine, the check of the batch, lookups and copies to the device, the returned logits, and
the sampler. The times are medians of single tokens, and each part is without the parts that it calls. On a
real device the calls for launches and copies take additional time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # peers.py and synthetic.py of bench/
from peers import print_table
from synthetic import Shape, write_model

import hotset
from hotset.backends.pipeline import ChainBackend
from hotset.backends.triton.capture import Captured
from hotset.backends.triton.stage import GpuStage
from hotset.formats.quants import GGMLType

PROMPT = [1, 2, 3]
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "defaults": {"temperature": 0.8, "seed": 1},
    "defaults, penalty": {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.1},
}
# The timed functions: module, name, and name in the table.
PARTS = (
    ("hotset.engine.engine.Engine.step", "engine, the rest"),
    ("hotset.engine.scheduler.Scheduler.schedule", "schedule"),
    ("hotset.engine.batch.BatchBuilder.build", "build the batch"),
    ("hotset.engine.engine.Engine._draw", "sample"),
    ("hotset.backends.pipeline.ChainBackend.step", "chain, the rest"),
    ("hotset.backends.pipeline.cache_slots", "check the batch"),
    ("hotset.backends.pipeline.on_host", "logits to the host"),
    ("hotset.backends.triton.stage.GpuStage.run", "stage, the rest"),
    ("hotset.backends.triton.stage.lookup", "embedding"),
    ("hotset.backends.triton.kv.StepInputs.fill", "inputs to the device"),
)


class Replayed:
    """A recorded step that takes no time and returns the recorded results."""

    def replay(self) -> None:
        pass


def record(function: Callable[[], torch.Tensor]) -> tuple[Captured, torch.Tensor]:
    """Replace capture.Graphs."""
    return Replayed(), function().clone()


class Timer:
    """A timer of functions, each without the timed functions inside it, and of the rest.

    The rest is the time between two calls of the first of PARTS.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._inside = [0.0]  # of the current calls

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._inside.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                seconds = time.perf_counter() - began
                self.seconds[name].append(seconds - self._inside.pop())
                self._inside[-1] += seconds

        return call


@contextmanager
def timed() -> Iterator[Timer]:
    """Time the parts during a block."""
    timer = Timer()
    with ExitStack() as patches:
        for path, name in PARTS:
            original = _found(path)
            patches.enter_context(patch(path, timer.timed(original, name)))
        yield timer


def _found(path: str) -> Callable[..., Any]:
    module, *rest = path.rsplit(".", 2 if path.split(".")[-2][0].isupper() else 1)
    found: Any = sys.modules[module]
    for name in rest:
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--n-vocab", type=int, default=32000)
    parser.add_argument("--width", type=int, default=4096)
    args = parser.parse_args()
    shape = Shape(args.width, 256, 2, args.width // 128, args.width // 128)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, shape, GGMLType.Q4_0, n_vocab=args.n_vocab)
        with hotset.load(path, device="simulated", n_ctx=1024, max_batch=8, sparsity="dense") as model:
            backend = model.backend
            assert isinstance(backend, ChainBackend)
            (stage,) = backend.stages
            assert isinstance(stage, GpuStage)
            stage._capture = record
            columns = {name: _measured(model, given, args.tokens) for name, given in SAMPLED.items()}
    rows = [
        [part, *(f"{np.median(column.get(part, [0.0])) * 1e6:.0f}" for column in columns.values())]
        for part in (*(name for _, name in PARTS), "a token")
    ]
    print_table(["µs of the host", *columns], rows)


def _measured(model: hotset.Model, given: dict[str, Any], n: int) -> dict[str, list[float]]:
    """Return the seconds of each part for n tokens, and of whole tokens without the clocks of the parts."""
    given = given | {"ignore_eos": True, "reuse_prefix": False}
    model.generate(PROMPT, max_tokens=4, **given)
    steps: list[float] = []
    engine_step = _found(PARTS[0][0])

    def step(engine: Any) -> Any:
        began.append(time.perf_counter())
        return engine_step(engine)

    began: list[float] = []
    with patch(PARTS[0][0], step):
        model.generate(PROMPT, max_tokens=n, **given)
    steps = np.diff(began[2:]).tolist()
    with timed() as timer:
        model.generate(PROMPT, max_tokens=n, **given)
    return timer.seconds | {"a token": steps}


if __name__ == "__main__":
    main()
