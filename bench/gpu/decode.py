"""One load and one answer, as JSON: the process that `hybrid` starts for each of its measurements.

Its argument is JSON: {"path": FILE, "options": of hotset.load, "n_gen": tokens}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import hotset
from hotset.backends.pipeline import ChainBackend
from hotset.backends.triton.stage import GpuStage
from hotset.placement.build import device_memory

PROMPT = [1, 2, 3]


def decode(path: str, options: dict[str, Any], n_gen: int) -> dict[str, Any]:
    """Measure the undisturbed speed; then, on a device, planned and allocated bytes, and parts of a token.

    seconds: by part, each waiting for the device, so that their sum exceeds a token's time; cold: the CPU's
    time for its neurons, in parallel with the device.
    """
    params = {"temperature": 1.0, "seed": 1, "ignore_eos": True}
    with hotset.load(path, n_ctx=1024, **options) as model:
        model.generate(PROMPT, max_tokens=4, **params)  # compiles kernels and captures the step
        done = model.generate(PROMPT, max_tokens=n_gen, reuse_prefix=False, **params)
        result: dict[str, Any] = {"tokens_per_second": done.timings.predicted_per_second}
        if (placement := model.placement) is None:
            return result
        memory = device_memory(placement, model.backend)
        backend = model.backend
        assert isinstance(backend, ChainBackend)
        for stage in backend.stages:
            if isinstance(stage, GpuStage):
                stage.timed = True
        timed = model.generate(PROMPT, max_tokens=8, reuse_prefix=False, **params).stats
        cold = float(backend.cpu_worker_seconds().sum())
        return result | {
            "planned": sum(device.planned.total for device in memory),
            "kinds": {
                kind: sum(getattr(device.planned, kind) for device in memory)
                for kind in ("weights", "neurons", "kv", "workspace", "context")
            },
            "held": sum(device.used for device in memory),
            "hot": placement.hot_share,
            "served": placement.served_share,
            "seconds": (dict(timed.seconds) if timed else {}) | {"cold": cold},
            "predicted": placement.predicted.total if placement.predicted else None,
        }


if __name__ == "__main__":
    print(json.dumps(decode(**json.loads(sys.argv[1]))))
