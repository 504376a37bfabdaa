"""One question about a device, answered as JSON by a separate process, so that a hang affects no other.

Its argument is JSON: {"what": synchronisation | replays | prompt | experts, "device": DEVICE, ...}.
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
from hotset.backends.pipeline import ChainBackend
from hotset.backends.triton.capture import MAX_CAPTURED
from hotset.backends.triton.cpu_offload import round_trip_seconds
from hotset.backends.triton.devices import find_device
from hotset.backends.triton.stage import GpuStage
from hotset.errors import HotsetError
from hotset.formats.powerinfer import GPUIndex, write_gpu_index
from hotset.placement.table import Placement

SETTINGS: dict[str, Any] = {"sparsity": "exact", "n_ctx": 2048, "max_batch": 512}
GRAIN = 1 << 20  # bytes; a budget is a multiple


def synchronisation(device: str, kind: Any) -> dict[str, Any]:
    """Measure the seconds of a round trip with one kind, in a captured graph."""
    return {"seconds": round_trip_seconds(find_device(device), kind)}


def replays(
    device: str, path: str, share: float | None, sizes: Sequence[int] = range(1, MAX_CAPTURED + 1)
) -> dict[str, Any]:
    """Compare the bits of three equal steps for each captured size: run, recorded and replayed, replayed.

    share: of each layer's neurons on the device, under a budget of their size (`shared_out`); None: all,
    without a budget. different: sizes whose bits differ; captured: the number of recorded steps; split:
    layers whose neurons CPU and device share, with a synchronisation within a captured step; notes: of the
    stages.
    """
    given = {} if share is None else shared_out(path, device, share)
    different, rng = [], np.random.default_rng(0)
    with hotset.load(Path(path), device=device, **given, **SETTINGS) as model:
        for n in sizes:
            ids = rng.integers(3, min(500, model.backend.n_vocab), n).tolist()
            first, *others = [model.logits(ids).tobytes() for _ in range(3)]
            if any(one != first for one in others):
                different.append(n)
        stages = [stage for stage in _stages(model) if isinstance(stage, GpuStage)]
        return {
            "different": different,
            "captured": sum(len(stage._captured) for stage in stages),
            "split": n_split(model.placement),
            "budget": given.get("vram_budget"),
            "notes": [note for stage in stages for note in stage.notes],
        }


def shared_out(path: str, device: str, share: float) -> dict[str, Any]:
    """Return options of `hotset.load` that leave a part of each layer's neurons to the CPU.

    They are an index of the neurons on the device, written next to the model, and a budget in GiB of their
    size. The budget is from a plan, with context and cache. A share of the file's size would not work: the
    context of a CUDA device alone is larger than a small model, and the plan of a small model leaves whole
    layers to the CPU, so that nothing is synchronised within a step.
    """
    index = Path(path).with_suffix(f".{share:g}.gpu_index")
    # The capacity in it is only for PowerInfer.
    whole = hotset.plan(Path(path), device=device, **SETTINGS)
    assert whole is not None
    write_gpu_index(index, GPUIndex(0, [np.arange(n) < share * n for n in whole.n_ff]))
    placed = hotset.plan(Path(path), device=device, gpu_index=index, **SETTINGS)
    assert placed is not None
    assert placed.budget is not None
    most = sum(one.total for one in placed.budget.devices)
    return {"gpu_index": index, "vram_budget": -(-most // GRAIN) * GRAIN / 2**30}


def n_split(placement: Placement | None) -> int:
    """Return the number of layers whose neurons are shared."""
    return 0 if placement is None else sum(layer.is_split for layer in placement.layers)


def prompt(device: str, path: str, n_tokens: int) -> dict[str, Any]:
    """Run a dense prompt of several chunks; return its logits for comparison, and a second run's time."""
    ids = np.random.default_rng(1).integers(3, 500, n_tokens).tolist()
    settings = SETTINGS | {"sparsity": "dense"}
    with hotset.load(Path(path), device=device, **settings) as model:
        model.logits(ids[:64])
        start = time.perf_counter()
        logits = model.logits(ids)
        seconds = time.perf_counter() - start
    digest = hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()
    return {"logits": digest, "tokens_per_second": n_tokens / seconds}


def experts(device: str, path: str, share: float | None, n_tokens: int) -> dict[str, Any]:
    """Return an MoE model's answer, sampled with a seed: tokens and probabilities; most steps are replays.

    They must not depend on where an expert is. share: of the experts' bytes in their cache's budget; None:
    all of them, without a budget. HOTSET_EXPERT_MISSES selects who computes the others. found: where the
    experts of the answer were.
    """
    settings = {"device": device, "n_ctx": 1024, "max_batch": 64}
    if share is not None:
        placed = hotset.plan(Path(path), **settings)
        assert placed is not None
        assert placed.budget is not None
        (memory,) = placed.budget.devices
        settings["vram_budget"] = (memory.total - (1 - share) * memory.experts) / 2**30
    given = {"temperature": 1.0, "seed": 1, "ignore_eos": True, "logprobs": 0}
    with hotset.load(Path(path), **settings) as model:
        done = model.generate([1, 2, 3], max_tokens=n_tokens, **given)
        counts = model.backend.expert_counts()
        notes = [note for stage in _stages(model) if isinstance(stage, GpuStage) for note in stage.notes]
    answer = repr([(one.token, one.logprob) for one in done.logprobs])
    found = {"cached": counts.hits, "fetched": counts.streamed, "on the CPU": counts.on_cpu}
    return {"answer": hashlib.sha256(answer.encode()).hexdigest(), "found": found, "notes": notes}


def _stages(model: Any) -> list[Any]:
    backend = model.backend
    return list(backend.stages) if isinstance(backend, ChainBackend) else [backend]


QUESTIONS = {"synchronisation": synchronisation, "replays": replays, "prompt": prompt, "experts": experts}

if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    try:
        print(json.dumps(QUESTIONS[task.pop("what")](**task)))
    except HotsetError as error:
        sys.exit(str(error))
