"""Steps of the GPU backend, on CPU tensors on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backend_runs import batch, taken
from fake_cold import FakeCpuWorker
from sparse_runs import MODELS
from tiny_gguf import write_relu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotset.backends.device.stage import CpuShare
from hotset.backends.stage import WHOLE, BackendOptions, Span
from hotset.backends.triton import open_gpu
from hotset.backends.triton.backend import GpuBackend
from hotset.backends.triton.options import GpuOptions
from hotset.backends.triton.stage import GpuStage
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType

T = GGMLType
N_FF = 224  # seven groups of 32: neither a power of two nor a multiple of a kernel's block
N_LAYER = 2


def write(path: Path, model: str, type: GGMLType = T.F32, **options: Any) -> GGUFFile:
    sizes = {"n_embd": 64, "n_ff": N_FF, "type_of": lambda name: type}
    return open_gguf(write_relu(path / "model.gguf", **{**MODELS[model], **sizes, **options}))


def gpu(weights: Any, graph: Any, **options: Any) -> GpuBackend:
    given = {"n_blocks": 8, "max_batch": 64, "kv_type": "f32", "sparse": True, **options}
    how = taken(BackendOptions, given)
    return open_gpu(
        weights, graph, given.pop("device", "simulated"), how, gpu=taken(GpuOptions, given), **given
    )


def gpu_stage(weights: Any, graph: Any, *, hot: Any = None, span: Span = WHOLE, **options: Any) -> GpuStage:
    given = {"n_blocks": 8, "max_batch": 64, "kv_type": "f32", "sparse": True, "worker": None, **options}
    how, worker = taken(BackendOptions, given), given.pop("worker")
    gpu = GpuOptions(**given)
    return GpuStage(
        weights, graph, "simulated", how, span=span, share=CpuShare(hot or {}), worker=worker, gpu=gpu
    )


def masks(share: float, n_ff: int = N_FF, n_layer: int = N_LAYER) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(5)
    return {i: rng.random(n_ff) < share for i in range(n_layer)}


def split(
    weights: Any, graph: Any, hot: dict[int, np.ndarray], **options: Any
) -> tuple[GpuStage, FakeCpuWorker]:
    cold = FakeCpuWorker(weights, graph, hot, max_batch=options.get("max_batch", 64))
    return gpu_stage(weights, graph, hot=hot, worker=cold, **{"stream_from": None, **options}), cold


def run(stage: GpuStage, ids: np.ndarray, splits: Sequence[int] = (), at: int = 0) -> np.ndarray:
    """Return the logits of a sequence that continues at position `at`, in steps that end at `splits`."""
    rows, done = [], 0
    for end in [*splits, len(ids)]:
        rows.append(stage.run(batch([(ids[done:end], at + done, [2, 0])])).numpy().copy())
        done = end
    return np.concatenate(rows)


class Watch(TorchDispatchMode):
    """Records the memory that a function reads or writes and did not allocate itself."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: set[int] = set()
        self._made: dict[int, torch.Tensor] = {}  # kept alive, so that no address is reused

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs or {})):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                address = tensor.untyped_storage().data_ptr()
                if function is torch.ops.aten.lift_fresh.default:  # a constant in the code, torch.tensor(...)
                    self._made[address] = tensor
                elif address not in self._made:
                    self.outside.add(address)
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.outside:
                self._made[tensor.untyped_storage().data_ptr()] = tensor
        return result


class Recording:
    """Replaces a CUDA graph: replays by calling again, and checks that the captured addresses are used."""

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self._function = function
        self.n_replays = 0
        with Watch() as watch:
            self.result = function().clone()
        self._outside = watch.outside

    def replay(self) -> None:
        with Watch() as watch:
            self.result.copy_(self._function())
        # The result is the recording's own memory, written after the step.
        assert watch.outside - {self.result.untyped_storage().data_ptr()} <= self._outside
        self.n_replays += 1


class Recorder:
    def __init__(self) -> None:
        self.made: list[Recording] = []

    def __call__(self, function: Callable[[], torch.Tensor]) -> tuple[Recording, torch.Tensor]:
        self.made.append(Recording(function))
        return self.made[-1], self.made[-1].result
