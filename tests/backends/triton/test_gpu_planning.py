"""Planned bytes compared with a device's real use, and rates of a machine."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from byte_models import write_sparse
from tiny_gguf import write_llama

from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.stage import BackendOptions
from hotset.backends.triton import measuring, open_gpu
from hotset.backends.triton.matrix import DeviceMatrix
from hotset.errors import DeviceError, InvalidRequestError
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.offload.misses import fetched_of
from hotset.placement import machine
from hotset.placement.budget import OUTPUT_ROWS, model_facts, workspace_bytes
from hotset.placement.build import open_placed
from hotset.placement.cards import CARDS
from hotset.placement.problem import PlacementProblem
from hotset.placement.table import Budget, Device, DeviceRates, LayerPlacement, Placement, Rates
from hotset.sparsity.modes import choose
from hotset.sparsity.preparing import prepare

pytestmark = pytest.mark.usefixtures("home")

MIB = 1 << 20
SHAPE: dict[str, Any] = {"n_embd": 64, "n_ff": 512, "ranks": (32, 32, 32)}


# -- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", [GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q6_K])
def test_a_matrix_takes_as_many_bytes_on_a_device_as_was_planned(type: GGMLType) -> None:
    n_rows, n_cols = 6, 512
    data = np.zeros(n_rows * row_bytes(type, n_cols), np.uint8)
    rows = np.array([1, 4], np.int64)
    assert DeviceMatrix.from_bytes(data, type, n_rows, n_cols, "cpu").nbytes == len(data)
    some = DeviceMatrix.from_bytes(data, type, n_rows, n_cols, "cpu", rows)
    assert some.nbytes == 2 * row_bytes(type, n_cols)


@pytest.mark.parametrize(
    ("architecture", "dialect", "type"),
    [
        ("llama", "powerinfer", GGMLType.F16),
        ("llama", "gguf", GGMLType.Q8_0),  # neuron-major down matrices
        ("bamboo", "powerinfer", GGMLType.Q4_0),
        ("falcon", "powerinfer", GGMLType.F32),
        ("opt", "powerinfer", GGMLType.F16),
    ],
)
@pytest.mark.parametrize("hot_share", [0.0, 0.3, 1.0])
def test_a_device_never_holds_more_than_was_planned(
    tmp_path: Path, architecture: str, dialect: str, type: GGMLType, hot_share: float
) -> None:
    path = write_sparse(
        tmp_path / "m.gguf", architecture=architecture, dialect=dialect, type_of=lambda name: type, **SHAPE
    )
    rng = np.random.default_rng(0)
    with open_gguf(path) as gguf:
        config = config_from_gguf(gguf)
        choice = choose(config, gguf.tensors)
        prepared = prepare(gguf, config, choice)
        graph = describe(config, prepared.weights.tensors, prepared.predictor)
        options: dict[str, Any] = {"n_blocks": 3, "max_batch": 128, "kv_type": "f16"}
        facts = model_facts(graph, prepared.weights.tensors, mode=choice.mode, **options)
        masks = [rng.random(n_ff) < hot_share for n_ff in config.n_ff]
        places = tuple(LayerPlacement(0, mask) for mask in masks)
        machine_rates = Rates((machine.STAND_IN,))
        frequencies = [np.full(n_ff, 0.1) for n_ff in config.n_ff]
        problem = PlacementProblem(
            facts, machine_rates, (Device("simulated", 1 << 40, 0),), frequencies, None, True
        )
        planned = problem.budget_of(list(places), 0)
        placement = Placement(("simulated",), places, 0, Budget((), 0, facts.stream_bytes))
        how = BackendOptions(n_threads=1, sparse=True, **options)
        backend = open_placed(placement, prepared.weights, graph, how)
        held = backend.device_bytes()[0]
        backend.close()
        prepared.weights.close()
    assert planned.kv == held["kv"]
    weights = planned.weights + planned.neurons
    assert held["weights"] <= weights <= 1.2 * held["weights"]  # tensors are small: they are rounded up
    assert held["workspace"] <= planned.workspace <= 3 * held["workspace"] + MIB
    assert sum(held.values()) <= planned.total


def test_the_logits_of_a_large_vocabulary_are_planned_for(tmp_path: Path) -> None:
    """Check the logits of OUTPUT_ROWS rows, in steps of as many tokens or more."""
    planned = {}
    for n_vocab in (96, 20_096):
        with open_gguf(write_llama(tmp_path / f"{n_vocab}.gguf", n_vocab=n_vocab)) as gguf:
            graph = describe(config_from_gguf(gguf), gguf.tensors)
            planned[n_vocab] = [workspace_bytes(graph, 2, max_batch) for max_batch in (1, 64, 512)]
    grown = [large - small for small, large in zip(planned[96], planned[20_096], strict=True)]
    assert grown == [4 * 20_000 * rows for rows in (1, OUTPUT_ROWS, OUTPUT_ROWS)]


def test_a_dense_model_is_counted_too(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "dense.gguf")
    with open_gguf(path) as gguf:
        config = config_from_gguf(gguf)
        graph = describe(config, gguf.tensors)
        options: dict[str, Any] = {"n_blocks": 2, "max_batch": 64, "kv_type": "f16"}
        facts = model_facts(graph, gguf.tensors, mode="dense", **options)
        assert [layer.n_split for layer in facts.layers] == [0] * config.n_layer
        backend = open_gpu(gguf, graph, "simulated", BackendOptions(**options))
        (held,) = backend.device_bytes()
        assert sum(held.values()) <= facts.whole_bytes
        assert held["kv"] == sum(layer.kv_bytes for layer in facts.layers)
        backend.close()


# -- the machine ---------------------------------------------------------------------------------


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    known = DeviceRates(*range(1, 9), 10, *range(11, 15))  # type: ignore[arg-type]
    monkeypatch.setattr(measuring, "measure_now", lambda device, n_threads: calls.append(device) or known)
    monkeypatch.setattr(measuring, "find_device", lambda name: torch.device("meta"))
    path = tmp_path / "machine.json"
    assert measuring.measure("xpu", n_threads=1, path=path) == known
    assert measuring.measure("xpu", n_threads=1, path=path) == known
    assert len(calls) == 1
    measuring.measure("xpu", n_threads=2, path=path)  # another number of threads counts as another machine
    measuring.measure("xpu", n_threads=1, path=path, again=True)
    assert len(calls) == 3
    assert len(json.loads(path.read_text())) == 2
    path.write_text("{")  # damaged: measured again
    assert measuring.measure("xpu", n_threads=1, path=path) == known
    assert len(calls) == 4
    kept = json.loads(path.read_text())
    for one in kept.values():  # from a version that did not measure links
        del one["link"]
    path.write_text(json.dumps(kept))
    assert measuring.measure("xpu", n_threads=1, path=path) == known
    assert len(calls) == 5


def test_measured_rates_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hotset._core", reason="the native module is not built")
    monkeypatch.setattr(machine, "SECONDS", 0.02)
    monkeypatch.setattr(machine, "WIDTH", 512)
    monkeypatch.setattr(machine, "N_FF", 512)
    monkeypatch.setattr(machine, "N_LAYER", 2)
    found = measuring.measure_now(torch.device("cpu"), 1)
    assert 0 < found.cpu_read_busy <= found.cpu_read < 1e12
    assert 0 < found.cpu_gather_busy <= found.cpu_gather < 1e12
    assert 0 < found.read_busy <= found.read < 1e13
    assert 0 < found.launch < 1
    assert 0 < found.sync < 1
    assert found.context == 0
    assert 0 < found.cpu_many < 1e14
    assert found.link == found.link_busy == 0  # the simulated device reads nothing over a link
    assert found.misses is None
    assert Rates((found, replace(found, cpu_read=1.0))).cpu_read == found.cpu_read


def test_link_is_measured_with_the_fetching_code(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    class Registrar:
        def register(self, memory: np.ndarray) -> int:
            held.append(memory.ctypes.data)
            return held[0]

        def unregister(self, memory: np.ndarray) -> None:
            held.remove(memory.ctypes.data)

    monkeypatch.setattr(machine, "WIDTH", 64)
    with pytest.raises(DeviceError, match="by itself"):
        measuring.TransferLoop(torch.device("cpu"))
    with measuring.TransferLoop(torch.device("cpu"), Registrar(), n_rows=16) as link:
        assert held
        assert link.n_bytes == 8 * 16 * 36
        assert 0 < link.rate(0.01) < 1e12
        with link.running() as busy:
            pass
        assert 0 < busy.rate < 1e12
    assert not held


def test_processor_of_missing_experts_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = machine.STAND_IN.misses
    assert rates is not None
    assert (rates.cpu, rates.link) == (machine.STAND_IN.cpu_read_busy, machine.STAND_IN.link)
    monkeypatch.setenv("HOTSET_EXPERT_MISSES", "cpu")
    assert measuring.force_misses(machine.STAND_IN).misses is None
    monkeypatch.setenv("HOTSET_EXPERT_MISSES", "fetch")
    forced = measuring.force_misses(machine.STAND_IN).misses
    assert forced is not None
    assert fetched_of(forced, 4, 1 << 20) == [0, 1, 2, 3, 4]
    monkeypatch.setenv("HOTSET_EXPERT_MISSES", "gpu")
    with pytest.raises(InvalidRequestError, match="must be cpu or fetch, not 'gpu'"):
        measuring.force_misses(machine.STAND_IN)


@pytest.mark.parametrize(("room", "n"), [(0, 1), (7.9, 1), (8, 2), (1000, 4)])
def test_a_device_is_measured_with_a_quarter_of_its_memory(
    room: float, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "WIDTH", 64)
    n_bytes = 2048 * 64 // 32 * 18
    monkeypatch.setattr(measuring, "free_bytes", lambda device: int(room * n_bytes))
    loop = measuring.DeviceLoop(torch.device("cpu"))
    assert loop.n_bytes == n * n_bytes
    loop.close()


class Matrix:
    """A matrix of a simulated device."""

    def __init__(self, data: object, type_: object, n_rows: int, *_: object) -> None:
        self.n_rows = n_rows


class SimulatedDevice:
    """A device with a clock. A launch or a replay takes the host 10 µs, each kernel takes the device 1 µs.

    The first launch of a kernel that is not compiled takes a second, but not in a capture.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.queued, self.compiled, self.n_emptied = 0.0, 0.0, set[int](), 0
        self.captured: list[float] | None = None
        self.matrices: list[weakref.ref[Matrix]] = []
        patch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: self.now))
        patch.setattr(measuring, "synchronize", lambda device: self.synchronize())
        patch.setattr(measuring, "free_bytes", lambda device: 1 << 40)
        patch.setattr(torch, "full", lambda *_, **__: None)
        patch.setattr(torch.cuda, "empty_cache", lambda: setattr(self, "n_emptied", self.n_emptied + 1))
        patch.setattr("hotset.backends.triton.kernels.Kernels", lambda device: self)
        patch.setattr("hotset.backends.triton.capture.Graphs", lambda device: self.capture)
        patch.setattr(DeviceMatrix, "from_bytes", self.matrix)

    def matrix(self, *arguments: Any) -> Matrix:
        made = Matrix(*arguments)
        self.matrices.append(weakref.ref(made))
        return made

    def linear(self, x: object, matrix: Matrix) -> None:
        if matrix.n_rows not in self.compiled:
            assert self.captured is None, "a kernel is compiled in a capture"
            self.compiled.add(matrix.n_rows)
            self.now += 1.0
        if self.captured is None:
            self.now += 10e-6
            self.queued += 1e-6
        else:
            self.captured.append(1e-6)

    def synchronize(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0

    def capture(self, work: Callable[[], None]) -> tuple[SimpleNamespace, None]:
        self.captured = kernels = []
        work()
        self.captured = None

        def replay() -> None:
            self.now += 10e-6
            self.queued += sum(kernels)

        return SimpleNamespace(replay=replay), None


@pytest.mark.parametrize(("kind", "seconds"), [("cpu", 11e-6), ("cuda", 1.1e-6)])
def test_launches_are_timed_in_a_captured_graph_where_there_are_any(
    kind: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "WIDTH", 64)
    device = SimulatedDevice(monkeypatch)
    loop = measuring.DeviceLoop(torch.device(kind))
    assert loop.launch_seconds() == pytest.approx(seconds)
    loop.close()
    assert sum(matrix() is not None for matrix in device.matrices) == 1  # of one row
    assert device.n_emptied == (kind == "cuda")


def test_the_synthetic_ffns_compute_a_tenth_of_their_neurons(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], int]
) -> None:
    """Check that the bytes behind the measured rates are the bytes that the operation reads."""
    pytest.importorskip("hotset._core", reason="the native module is not built")
    made: list[CpuBackend] = []

    class Seen(CpuBackend):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

        def close(self) -> None:
            if self is made[0]:
                assert threads(2) == 2  # one thread pool: two would disturb each other
                found.extend(backend.stats() for backend in made)
            super().close()

    found: list[Any] = []
    monkeypatch.setattr(machine, "CpuBackend", Seen)
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    monkeypatch.setattr(machine, "WIDTH", 256)
    monkeypatch.setattr(machine, "N_LAYER", 2)
    measuring.estimate(CARDS[0], n_threads=3)
    (stats,) = (one for one in found if one is not None and one.gate_rows.max() < 8192)
    assert stats.gate_rows.shape == (2,)  # one for each counted layer
    assert np.allclose(stats.gate_rows / 8192, 0.1, atol=0.02)
    assert (stats.down_rows == stats.gate_rows).all()
    assert threads(0) == 0


@pytest.mark.parametrize("one_by_one", [False, True])
def test_moe_budget_counts_experts_once(tmp_path: Path, one_by_one: bool) -> None:
    path = write_llama(
        tmp_path / "m.gguf", experts=(8, 3), one_by_one=one_by_one, n_ff_shared=0 if one_by_one else 64,
        type_of=lambda _: GGMLType.Q8_0,
    )  # fmt: skip
    with open_gguf(path) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        facts = model_facts(graph, gguf.tensors, mode="dense", kv_type="f16", n_blocks=1, max_batch=1)
        for i, layer in enumerate(facts.layers):
            own = {name: info for name, info in gguf.tensors.items() if name.startswith(f"blk.{i}.")}
            experts = {name for name in own if re.search(r"_exps\.|\.ffn_(gate|up|down)\.\d", name)}
            assert layer.n_experts * layer.expert_bytes == sum(own[name].nbytes for name in experts)
            rest = [info.nbytes for name, info in own.items() if name not in experts]
            assert sum(rest) <= layer.fixed_bytes < sum(rest) + 512 * len(rest)
