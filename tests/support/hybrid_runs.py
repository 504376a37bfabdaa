"""Models split between a device and the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from backend_runs import taken
from sparse_runs import N_FF, hot_neurons
from waiting import WATCHDOG

from hotset.backends.pipeline import ChainBackend
from hotset.backends.stage import BackendOptions
from hotset.backends.triton.opening import WorkerOptions, open_chain
from hotset.backends.triton.options import GpuOptions
from hotset.formats.gguf import GGUFFile
from hotset.formats.quants import GGMLType as T
from hotset.formats.source import WeightSource
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.offload.misses import MissRates
from hotset.placement.table import CPU, LayerPlacement, Placement


def hybrid(gguf: GGUFFile, owners: tuple[int, ...] = (0, 0), **options: Any) -> ChainBackend:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    return chain(whole(owners), gguf, graph, **{"max_batch": 128, "n_threads": 2, **options})


def chain(placement: Placement, weights: WeightSource, graph: Graph, **options: Any) -> ChainBackend:
    """Open the CPU and torch's devices as a chain. expert_slots, fetching: values for each device."""
    given = {"n_blocks": 8, "max_batch": 48, "kv_type": "f32", "sparse": True, "timeout": WATCHDOG, **options}
    n = len(placement.devices)
    if "expert_slots" in given:
        slots, fetching = given.pop("expert_slots"), given.pop("fetching", None)
        placement = replace(placement, expert_slots=(slots,) * n, fetching=(fetching,) * n)
    how, worker = taken(BackendOptions, given), taken(WorkerOptions, given)
    return open_chain(placement, weights, graph, how, worker=worker, gpu=GpuOptions(**given))


LINK_ONLY = MissRates(cpu=1.0, cpu_beside=1.0, many=1.0, link=1e12, link_beside=1e12)
EVEN = MissRates(cpu=1e9, cpu_beside=1e9, many=1e10, link=1e9, link_beside=1e9)
SMALL: dict[str, Any] = {"n_embd": 64, "n_ff": 64, "head_dim": 32, "type_of": lambda _: T.Q8_0}


def split(
    share: float, n_layer: int = 2, devices: Sequence[int] | None = None, n_ff: int = N_FF
) -> Placement:
    """Return a placement: each layer on its device, which may be the CPU, with this share of neurons."""
    owners = list(devices or [0] * n_layer)
    layers = [
        LayerPlacement(owner, None if owner == CPU else hot_neurons(share, n_ff, i))
        for i, owner in enumerate(owners)
    ]
    return Placement(("simulated",) * (max(owners) + 1), tuple(layers), owners[-1])


def whole(owners: Sequence[int], output: int | None = None) -> Placement:
    output = owners[-1] if output is None else output
    return Placement(("simulated",) * (output + 1), tuple(LayerPlacement(i) for i in owners), output)


ORDERS = [
    [CPU, 0, 0],
    [0, 0, 1],
    [CPU, 0, 1],
    [0, CPU, 0],
    [0, 1, CPU],
    [CPU, 0, CPU],
    [1, 0, CPU],
    [0, 1, 0],
]
