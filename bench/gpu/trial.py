"""One question about a device, answered as JSON by a process of its own: what hangs there spoils no other.

Its argument is JSON: {"what": handshake | replays | prompt, "device": DEVICE, ...}.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hotset
from hotset.backends.chain import ChainBackend
from hotset.backends.gpu.capture import MAX_CAPTURED
from hotset.backends.gpu.handshake import round_trip_seconds
from hotset.backends.gpu.stage import GpuStage
from hotset.errors import HotsetError

SETTINGS: dict[str, Any] = {"sparsity": "exact", "n_ctx": 2048, "max_batch": 512}


def handshake(device: str, kind: Any) -> dict[str, Any]:
    """Seconds of a round trip with one kind, in a captured graph."""
    return {"seconds": round_trip_seconds(device, kind)}


def replays(
    device: str, path: str, vram_budget: float | None, sizes: Sequence[int] = range(1, MAX_CAPTURED + 1)
) -> dict[str, Any]:
    """Steps of sizes that are captured: the first runs as it is, the second is recorded and replayed, the
    third replayed. All must have the same bits.

    different: sizes whose bits differ; captured: how many steps are recorded; notes: what stages say.
    """
    different, rng = [], np.random.default_rng(0)
    with hotset.load(Path(path), device=device, vram_budget=vram_budget, **SETTINGS) as model:
        for n in sizes:
            ids = rng.integers(3, 500, n).tolist()
            first, *others = [model.logits(ids).tobytes() for _ in range(3)]
            if any(one != first for one in others):
                different.append(n)
        stages = [stage for stage in _stages(model) if isinstance(stage, GpuStage)]
        return {
            "different": different,
            "captured": sum(len(stage._captured) for stage in stages),
            "notes": [note for stage in stages for note in stage.notes],
        }


def prompt(device: str, path: str, n_tokens: int) -> dict[str, Any]:
    """A dense prompt of several chunks: what its logits are, so that two runs can be compared, and how long
    the second took."""
    ids = np.random.default_rng(1).integers(3, 500, n_tokens).tolist()
    settings = SETTINGS | {"sparsity": "dense"}
    with hotset.load(Path(path), device=device, **settings) as model:
        model.logits(ids[:64])
        start = time.perf_counter()
        logits = model.logits(ids)
        seconds = time.perf_counter() - start
    digest = hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()
    return {"logits": digest, "tokens_per_second": n_tokens / seconds}


def _stages(model: Any) -> list[Any]:
    backend = model.backend
    return list(backend.stages) if isinstance(backend, ChainBackend) else [backend]


QUESTIONS = {"handshake": handshake, "replays": replays, "prompt": prompt}

if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    try:
        print(json.dumps(QUESTIONS[task.pop("what")](**task)))
    except HotsetError as error:
        sys.exit(str(error))
