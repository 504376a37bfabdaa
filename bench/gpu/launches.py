"""Print the table of docs/contributing/internals/gpu.md: launches and bytes of a token, by layer and mode.

usage: python bench/gpu/launches.py

It needs no device: a stage of a model's shape is built over tensors without memory (torch's meta device), one
step of it runs, and its launches are counted: kernels of Triton, operations of torch, and the host-device
synchronisation's operations on the stream. A captured step has as many nodes. Bytes are from the plan
(placement/budget.py), at a context of 4,096 tokens that is half full.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # peers.py of bench/
from peers import print_table

from hotset.backends.device.stage import CpuShare
from hotset.backends.stage import BackendOptions
from hotset.backends.triton import cpu_offload, launch, matrix
from hotset.backends.triton.kernels import Kernels
from hotset.backends.triton.matrix import DeviceMatrix
from hotset.backends.triton.options import GpuOptions
from hotset.backends.triton.stage import GpuStage
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph, thresholded_products
from hotset.model.predictor import Predictor
from hotset.model.thresholds import LayerThresholds
from hotset.placement.budget import FFNMode, LayerFacts, model_facts

D, FF, N_HEAD, RANK, N_VOCAB, N_BLOCKS = 4096, 11008, 32, 1024, 32000, 64  # 7B: Llama 2
N_LAYER = 2  # the first includes launches for all layers
ACTIVE, HOT = 0.1, 0.5  # shares of neurons: those that fire, those on the device if a layer is split
KEPT = 0.5  # of the inputs of every matrix, if small ones are zeroed
N_EXPERT, N_USED, EXPERT_FF = 64, 8, 1408  # of a layer with experts, all of them on the CPU
TYPE = GGMLType.Q4_0
META = torch.device("meta")


@dataclass(frozen=True)
class Row:
    """A mode: its launches per layer, and per token outside the layers; bytes read per layer, and exchanged.

    Exchanged bytes go to the CPU and back.
    """

    mode: str
    layer: int
    once: int
    read: int
    sent: int

    def cells(self, n_layer: int) -> list[str]:
        """Return the cells of a table row; n_layer: of the whole model."""
        numbers = self.layer, self.once, self.once + n_layer * self.layer
        return [self.mode, *map(str, numbers), f"{self.read / 1e6:.1f}", f"{self.sent / 1e3:.1f}"]


COLUMNS = [
    "mode", "launches a layer", "others", "a token of 32 layers", "MB read a layer", "kB to and from the CPU",
]  # fmt: skip


def rows() -> Iterator[Row]:
    """Yield every mode of a whole stage, and a split layer with each captured host-device synchronisation."""
    for mode in ("dense", "exact", "predicted"):
        yield _row(mode, mode, None)
    for kind in ("memops", "spin"):
        yield _row(f"predicted, half of the neurons hot, {kind}", "predicted", kind)
    yield _row("dense, SiLU", "dense", None, silu=True)
    yield _row("threshold, SiLU, half of all inputs zeroed", "dense", None, silu=True, thresholded=True)
    yield _row("8 of 64 experts, all on the CPU, spin", "dense", "spin", silu=True, has_experts=True)


def _row(
    name: str, mode: FFNMode, kind: str | None, *, silu: bool = False, thresholded: bool = False,
    has_experts: bool = False,
) -> Row:  # fmt: skip
    source = Source(mode, silu=silu, has_experts=has_experts)
    every = LayerThresholds(attn_in=1.0, attn_out=1.0, ffn_in=1.0, down_in=1.0)
    layer_thresholds = [every] * N_LAYER if thresholded else ()
    config = config_from_gguf(source)  # type: ignore[arg-type]
    graph = describe(config, source.tensors, source.predictor, layer_thresholds)
    is_sparse = thresholded or mode != "dense"
    launches = _launches(source, graph, sparse=is_sparse, kind=kind, has_experts=has_experts)
    (first, *_, last), once = [launches.get(i, 0) for i in range(N_LAYER)], launches.get(-1, 0)
    facts = model_facts(graph, source.tensors, mode=mode, kv_type="f16", n_blocks=N_BLOCKS, max_batch=512)
    sent = 0 if kind is None else 4 * D * 2 + FF // 8
    read = _read(facts.layers[-1], 1.0 if kind is None else HOT)
    if thresholded:
        read = int(KEPT * facts.layers[-1].fixed_bytes + facts.layers[-1].kv_read_bytes)
    if has_experts:
        read, sent = (
            int(facts.layers[-1].fixed_bytes + facts.layers[-1].kv_read_bytes),
            4 * (D + N_USED * (D + 1)),
        )
    return Row(name, last, once + first - last, read, sent)


def _read(layer: LayerFacts, hot: float) -> int:
    n = hot * layer.n_ff
    return int(
        layer.fixed_bytes + n * (layer.always_bytes + ACTIVE * layer.fired_bytes) + layer.kv_read_bytes
    )


def _launches(
    source: Source, graph: Graph, *, sparse: bool, kind: str | None, has_experts: bool
) -> dict[int, int]:
    """Count the launches of one token, by layer; -1: outside the layers."""
    log: list[object] = []
    counted: dict[int, int] = {}

    def call(stage: GpuStage, call: Any, *rest: Any) -> None:
        before = len(log)
        original(stage, call, *rest)
        layer = call.layer if call.reads and _is_inside(graph, call) else -1
        counted[layer] = counted.get(layer, 0) + len(log) - before

    original = GpuStage._call
    hot = None if kind is None or has_experts else {i: np.arange(FF) < HOT * FF for i in range(N_LAYER)}
    with ExitStack() as patches:
        patches.enter_context(patch.object(launch, "launch", lambda *args, **options: log.append(args[0])))
        patches.enter_context(patch("hotset.backends.triton.stage.find_device", lambda name: META))
        patches.enter_context(patch.object(DeviceMatrix, "from_bytes", without_memory))
        stage = GpuStage(
            source, graph, "meta", BackendOptions(n_blocks=N_BLOCKS, max_batch=1, sparse=sparse),
            share=CpuShare(hot or {}),
            worker=None if kind is None else Cold(kind, log, has_experts=has_experts),
            gpu=GpuOptions(
                kernels=Kernels(META, triton=True),
                input_major=[op.weight for op in thresholded_products(graph)],
            ),
        )  # fmt: skip
        patches.enter_context(patch.object(GpuStage, "_call", call))
        patches.enter_context(Operations(log))
        stage._compute(stage._program(frozenset()), 1, 1, {})
    counted[-1] = counted.get(-1, 0) + len(log) - sum(counted.values())  # outside of any call
    return counted


def _is_inside(graph: Graph, call: Any) -> bool:
    """Return whether a call belongs to a layer; calls before and after all layers have the number 0, too."""
    names = {op.layer for op in graph.primitives if op.out in call.outs}
    return names != {-1} and not {value.id for value in call.outs} & {graph.result.id}


def without_memory(
    data: np.ndarray, type: GGMLType, n_rows: int, n_cols: int, device: torch.device,
    rows: np.ndarray | None = None, arena: object = None,
) -> DeviceMatrix:  # fmt: skip
    """Do the same as from_bytes, without reading any byte."""
    row = matrix.taken_apart(np.zeros((1, row_bytes(type, n_cols)), np.uint8), type)
    n = n_rows if rows is None else len(rows)
    parts = {name: torch.empty((n, p.shape[1]), dtype=p.dtype, device=device) for name, p in row.items()}
    return DeviceMatrix(type, n, n_cols, **parts)


class Operations(TorchDispatchMode):
    """A counter of torch's operations that compute something: views and empty tensors launch nothing."""

    def __init__(self, log: list[object]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if not function.is_view and "empty" not in name and "detach" not in name:
            self._log.append(name)
        return function(*args, **(kwargs or {}))


class Cold:
    """The host-device synchronisation of a kind on the stream, without a CPU worker."""

    max_batch, capturable = 1, True

    def __init__(self, kind: str, log: list[object], *, has_experts: bool) -> None:
        new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=META)  # noqa: E731
        out, bits = new(1, D), new(1, FF // 8, dtype=torch.uint8)
        if has_experts:
            out, bits = new(1, N_USED * D), new(1, N_USED, dtype=torch.int32)
        shared = SimpleNamespace(
            h=new(1, D), out=[out] * N_LAYER, bits=[bits] * N_LAYER,
            submitted=[0] * N_LAYER, request=0, done=4 * N_LAYER,
        )  # fmt: skip
        kinds: dict[str, Any] = {"memops": cpu_offload._MemOps, "spin": cpu_offload._Spin}
        self._exchange = kinds[kind].__new__(kinds[kind])  # no memory to register
        vars(self._exchange).update(shared=shared, device=META, driver=Driver(log), address=0)
        flags = [new(1, dtype=torch.int32)] * N_LAYER
        vars(self._exchange).update(_requests=flags, _dones=flags)

    def submit(self, layer: int, h: torch.Tensor, bits: torch.Tensor | None) -> None:
        self._exchange.submit(layer, h, bits)

    def collect(self, layer: int) -> torch.Tensor:
        return self._exchange.collect(layer)


class Driver:
    """A cpu_offload.Driver that records its calls."""

    def __init__(self, log: list[object]) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._log.append(name)


class Source:
    """The weights of a sparse model, or of one with SiLU, as in a file, all zero."""

    def __init__(self, mode: FFNMode, *, silu: bool, has_experts: bool) -> None:
        self.metadata = {
            "general.architecture": "llama", "llama.block_count": N_LAYER, "llama.embedding_length": D,
            "llama.feed_forward_length": FF, "llama.attention.head_count": N_HEAD,
            "llama.attention.head_count_kv": N_HEAD, "llama.context_length": 4096,
            "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": D // N_HEAD,
            "llama.hidden_activation": "silu" if silu else "relu", "llama.vocab_size": N_VOCAB,
        }  # fmt: skip
        self.dialect = "powerinfer"
        self.tensors: dict[str, TensorInfo] = {}
        if has_experts:
            self.metadata |= {
                "llama.expert_count": N_EXPERT, "llama.expert_used_count": N_USED,
                "llama.feed_forward_length": EXPERT_FF,
            }  # fmt: skip
        for name, n_cols, n_rows in _matrices(mode, silu=silu, has_experts=has_experts):
            n_each = (N_EXPERT,) if name.endswith("_exps.weight") else ()
            n_bytes = n_rows * row_bytes(TYPE, n_cols) * (N_EXPERT if n_each else 1)
            self._add(name, (n_cols, n_rows, *n_each), TYPE, n_bytes)
        norms = [f"blk.{i}.{part}_norm" for i in range(N_LAYER) for part in ("attn", "ffn")]
        for name in (*norms, "output_norm"):
            self._add(f"{name}.weight", (D,), GGMLType.F32, 4 * D)
        self.predictor = Predictor("mlp", (0.0,) * N_LAYER) if mode == "predicted" else None

    def _add(self, name: str, shape: tuple[int, ...], type_: GGMLType, n_bytes: int) -> None:
        self.tensors[name] = TensorInfo(name, shape, type_, n_bytes, 0)

    def data(self, name: str) -> np.ndarray:
        return np.zeros(self.tensors[name].nbytes, np.uint8)

    def check(self) -> None:
        pass


def _matrices(mode: FFNMode, *, silu: bool, has_experts: bool) -> Iterator[tuple[str, int, int]]:
    """Yield names, inputs and outputs."""
    yield "token_embd.weight", D, N_VOCAB
    yield "output.weight", D, N_VOCAB
    for i in range(N_LAYER):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"blk.{i}.{name}.weight", D, D
        if has_experts:
            yield f"blk.{i}.ffn_gate_inp.weight", D, N_EXPERT
            yield f"blk.{i}.ffn_gate_exps.weight", D, EXPERT_FF
            yield f"blk.{i}.ffn_up_exps.weight", D, EXPERT_FF
            yield f"blk.{i}.ffn_down_exps.weight", EXPERT_FF, D
            continue
        for name in ("ffn_gate", "ffn_up") if silu else ("ffn_gate", "ffn_up", "ffn_down_t"):
            yield f"blk.{i}.{name}.weight", D, FF
        if silu:
            yield f"blk.{i}.ffn_down.weight", FF, D
        if mode == "predicted":
            yield f"blk.{i}.fc1.weight", D, RANK
            yield f"blk.{i}.fc2.weight", RANK, FF


def table(found: Sequence[Row]) -> list[list[str]]:
    return [row.cells(32) for row in found]


if __name__ == "__main__":
    print_table(COLUMNS, table(list(rows())))
