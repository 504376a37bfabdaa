"""Steps of the Vulkan backend under the validation layers, which turn every warning into an error.

Without a GPU they run on Debian's software driver (lavapipe). `VulkanOracle` checks every operation of a
step. Matrix products are checked bitwise, because their order of additions is known and each addition rounds
as in IEEE 754.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, tokens
from derived_bounds import (
    EXP,
    FLOATS,
    TINY,
    Oracle,
    U,
    activation_bound,
    gamma,
    is_neuron_major,
    rows_of,
    similarity_gate_bound,
)

from hotset import _core
from hotset.backends.base import Batch
from hotset.backends.cpu.worker import CpuWorker
from hotset.backends.pipeline import ChainBackend
from hotset.backends.stage import BackendOptions
from hotset.backends.vulkan import devices, planning
from hotset.backends.vulkan.devices import find_device
from hotset.backends.vulkan.kernels import Recorder, VulkanKernels
from hotset.backends.vulkan.opening import open_placed
from hotset.backends.vulkan.stage import VulkanStage
from hotset.backends.vulkan.weights import VulkanWeights
from hotset.errors import DeviceError, StepCancelledError
from hotset.formats.gguf import GGUFFile
from hotset.formats.lora import FloatMatrix
from hotset.formats.quants import GGMLType
from hotset.model import operations as ops
from hotset.model.config import ModelConfig, config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.placement import machine
from hotset.placement.budget import Budget, MemoryBudget
from hotset.placement.table import CPU, LayerPlacement, Placement

BLOCK, CHUNK = 32, 8  # columns per sum, and sums per chunk (csrc/vulkan/shaders/linear.glsl)
DIVISION = 5 * U  # Vulkan's limit: 2.5 units in the last place
ROOT = 8 * U  # Vulkan's limit
SOFTPLUS = EXP + DIVISION + 6 * U  # an exponential, a quotient, a polynomial and a sum


@functools.cache
def missing() -> str | None:
    """Return the reason why these tests cannot run here."""
    try:
        return None if _core.vulkan_devices(True) else "the Vulkan driver has no device"
    except DeviceError as error:
        return str(error)


@contextmanager
def validation(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[None]:
    """Make opened devices report the validation layers' messages; at the end nothing may be left open."""
    if (reason := missing()) is not None:
        pytest.skip(f"no Vulkan driver with validation layers: `make test-deps` installs them ({reason})")
    monkeypatch.setenv("HOTSET_VULKAN_VALIDATION", "1")
    monkeypatch.setenv("HOTSET_HOME", str(home))
    _core.vulkan_late_messages()
    yield
    _core.vulkan_fail("", 0, 0)
    gc.collect()
    assert _core.vulkan_late_messages() == []  # about devices that were closed with objects left open


@pytest.fixture(autouse=True)
def validated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with validation(monkeypatch, tmp_path / "home"):
        yield


def without_indexer(config: ModelConfig) -> ModelConfig:
    """Return the configuration of short contexts. Vulkan has no kernel for an indexer."""
    return replace(config, indexing=None)


def vulkan(
    gguf: GGUFFile,
    graph: Graph | None = None,
    *,
    n_layers: int | None = None,
    budget: int | None = None,
    n_devices: int = 1,
    hot: Mapping[int, np.ndarray] | None = None,
    expert_slots: int = 0,
    **options: Any,
) -> ChainBackend:
    """Return a model, or its last layers, on one device or alternating on several of one driver.

    budget: bytes per device. hot: the device's neurons of split layers. expert_slots: per device; 0: it has
    all experts of its layers.
    """
    graph = graph or describe(without_indexer(config_from_gguf(gguf)), gguf.tensors)
    name, n = f"vulkan:{find_device('vulkan').index}", graph.n_layer
    first = 0 if n_layers is None else n - n_layers
    owners = [CPU if i < first else (i - first) * n_devices // (n - first) for i in range(n)]
    planned = tuple(MemoryBudget(name, budget) for _ in range(n_devices)) if budget is not None else ()
    placement = Placement(
        (name,) * n_devices,
        tuple(LayerPlacement(owner, (hot or {}).get(i)) for i, owner in enumerate(owners)),
        n_devices - 1,
        Budget(planned) if planned else None,
        expert_slots=(expert_slots,) * n_devices,
    )
    staged = options.pop("staged", False)
    given = {"n_blocks": 8, "max_batch": 80, "kv_type": "f32", "sparse": True, **options}
    return open_placed(placement, gguf, graph, BackendOptions(**given), staged=staged)


def stage_of(backend: ChainBackend) -> VulkanStage:
    stage = backend.stages[-1]
    assert isinstance(stage, VulkanStage)
    return stage


@pytest.fixture
def slow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU so slow that placing a tiny model pays."""
    slow = {"cpu_read": 1e7, "cpu_gather": 1e7, "cpu_read_busy": 1e7, "cpu_gather_busy": 1e7}
    monkeypatch.setattr(machine, "STAND_IN", replace(machine.STAND_IN, sync=1e-6, launch=1e-9, **slow))


def assert_cheap_submissions_decide(
    monkeypatch: pytest.MonkeyPatch, kind: str, pays: Callable[[], bool], *, dear: float
) -> None:
    """Check that the CPU shares work only with a device of its own memory whose submissions cost little.

    The device also needs timeline semaphores. pays: plan, and return whether it is shared. dear: seconds of a
    submission that is too dear.
    """
    there = [replace(info, kind=kind) for info in devices.list_devices()]
    monkeypatch.setattr(devices, "list_devices", lambda: there)
    for sync, is_cheap in ((1e-6, True), (dear, False)):
        rates = replace(machine.STAND_IN, sync=sync)
        monkeypatch.setattr(planning, "rates_beside", lambda *_, rates=rates: rates)
        assert pays() == (kind == "discrete" and is_cheap)
    monkeypatch.setattr(planning, "rates_beside", lambda *_: replace(machine.STAND_IN, sync=1e-6))
    monkeypatch.setattr(devices, "list_devices", lambda: [replace(info, features=[]) for info in there])
    assert not pays()


def check_submissions(backend: ChainBackend, step: Batch, expected: np.ndarray) -> None:
    """Check that a step has one submission for few tokens, and one per layer for many.

    The submission after the last one fails.
    """
    n_layers = stage_of(backend).graph.n_layer
    assert n_layers > 1
    _core.vulkan_fail("vkQueueSubmit", 1 + (n_layers if len(step.tokens) >= 64 else 1), -4)
    np.testing.assert_array_equal(backend.step(step).logits, expected)
    with pytest.raises(DeviceError, match="lost"):
        backend.step(step)


def check_failing_worker(backend: ChainBackend, step: Batch, expected: np.ndarray) -> None:
    """Check that a failing CPU worker ends only the current step."""
    begin = CpuWorker.begin_step

    def poisoned(self: CpuWorker, *arguments: Any) -> None:
        begin(self, *arguments)
        self.cancel("the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuWorker, "begin_step", poisoned)
        with pytest.raises(DeviceError, match="given up: the disk is gone"):
            backend.step(step)
    np.testing.assert_array_equal(backend.step(step).logits, expected)


def check_cancelled_beside_worker(backend: ChainBackend, step: Batch, expected: np.ndarray) -> None:
    """Check that a step can be cancelled while the CPU worker computes, and that the next is complete."""
    begin = CpuWorker.begin_step

    def cancelled(self: CpuWorker, *arguments: Any) -> None:
        begin(self, *arguments)
        other = threading.Thread(target=backend.cancel)
        other.start()
        other.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuWorker, "begin_step", cancelled)
        with pytest.raises(StepCancelledError):
            backend.step(step)
    np.testing.assert_array_equal(backend.step(step).logits, expected)


def product(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return x [n, k] times weights [rows, k], summed as the kernels do: float32 [n, rows]."""
    n_blocks = -(-x.shape[1] // BLOCK)
    spare = ((0, 0), (0, n_blocks * BLOCK - x.shape[1]))
    w = np.pad(weights, spare).reshape(1, -1, n_blocks, BLOCK)
    x = np.pad(x, spare).reshape(-1, 1, n_blocks, BLOCK)
    sums = np.zeros((len(x), w.shape[1], n_blocks), np.float32)
    for i in range(BLOCK):
        sums += w[..., i] * x[..., i]
    total = np.zeros(sums.shape[:2], np.float32)
    for first in range(0, n_blocks, CHUNK):
        part = np.zeros_like(total)
        for block in range(first, min(first + CHUNK, n_blocks)):
            part += sums[..., block]
        total += part
    return total


@functools.cache
def is_fused() -> bool:
    """Return whether the device's fma() rounds once."""
    return VulkanKernels(_core.VulkanDevice(find_device("vulkan").index)).is_fused


def cpu_product(data: np.ndarray, type_: GGMLType, n_rows: int, x: np.ndarray) -> np.ndarray:
    """Return x, float32 [n, k], times rows, by the CPU's kernel: float32 [n, rows]."""
    return _core.linear(int(type_), np.array(data, np.uint8).reshape(-1), n_rows, x)


def device_product(
    data: np.ndarray,
    type_: GGMLType,
    n_rows: int,
    x: np.ndarray,
    tokens: int = 0,
    constants: Sequence[int] = (),
) -> np.ndarray:
    """Return x, float32 [n, k], times quantised rows, by a device's kernels: float32 [n, rows].

    tokens: per workgroup of the kernel for few tokens, with constants for its lane layout; 0: the kernel for
    many.
    """
    device = _core.VulkanDevice(find_device("vulkan").index, True)
    kernels, (n, k) = VulkanKernels(device), x.shape
    weights = VulkanWeights(NoFile(), device)
    [part] = weights.given(("w",), FloatMatrix(type_, (n_rows, k), data.reshape(-1)), 0, n_rows).parts
    given, rounded = device.allocate(x.nbytes, "to_device"), device.allocate(n * k // 32 * 48, "device")
    out = device.allocate(4 * n * n_rows, "from_device")
    given.write(0, np.ascontiguousarray(x).reshape(-1).view(np.uint8))
    recorder, codes = Recorder(kernels), part.codes.bound()
    whole = [(buffer, 0, buffer.size, written) for buffer, written in ((given, False), (rounded, True))]
    recorder.add("quantize", [0], whole, (k // 32, k), (-(-k // 256), n, 1))
    bindings = [codes, part.more.bound() if part.more else codes, (rounded, 0, rounded.size, False)]
    bindings += [(out, 0, out.size, True), codes, codes, codes]
    push = n, n_rows, k, 0, k // 32, n_rows, 0, 0, 1, 0, 0, 0, 0, 0.0, *(0,) * 7
    if tokens:
        groups = -(-n_rows // constants[0]), -(-n // tokens), 1
        bindings.append(bindings[3])
        recorder.add("rounded_few", [type_, tokens, 0, *constants], bindings, push, groups)
    else:
        recorder.add("rounded_many", [type_, 32, 0], bindings, push, (-(-n_rows // 32), -(-n // 32), 1))
    recorder.program.finish()
    _core.vulkan_run([recorder.program], _core.VulkanCancel())
    return out.read(0, out.size).view(np.float32).reshape(n, n_rows)


class NoFile:
    """A source of weights without a file."""

    tensors: Mapping[str, Any] = {}


def product_bound(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the bound of such a product, x [n, k], weights [rows, k]."""
    k = x.shape[1]
    roundings = BLOCK + CHUNK + -(-k // (BLOCK * CHUNK)) + 1
    return gamma(roundings) * (np.abs(x) @ np.abs(weights).T) + k * TINY


def transposed_bound(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the bound of a neuron-major product, x [n, k], weights [k, columns]: 64 lanes in order."""
    k = x.shape[1]
    return gamma(k / 64 + 1 + 64) * (np.abs(x) @ np.abs(weights)) + k * TINY


class VulkanOracle(Oracle):
    """The oracle for kernels with Vulkan's divisions and roots, and other orders of some sums."""

    softplus_off, division_off, root_off = SOFTPLUS, DIVISION, ROOT

    def _expected(self, op: Any, taps: dict[int, np.ndarray], batch: Any, slots: Any) -> tuple[Any, Any]:
        expected, bound = super()._expected(op, taps, batch, slots)
        size = np.abs(expected)
        match op:
            case ops.RMSNorm() | ops.UnitNorm():
                width = op.x.width // op.n_head
                return expected, gamma((width / 64 + 10) / 2 + 4) * size + (
                    ROOT + DIVISION
                ) * size + TINY * width
            case ops.LayerNorm():
                return expected, bound + (ROOT + DIVISION) * (size + bound)
            case ops.GaussianTopK():  # its deviation is a root, and its moments are quotients
                x, spread = taps[op.x.id], abs(op.multiplier) * taps[op.x.id].std(axis=1, keepdims=True)
                mean = np.abs(x.mean(axis=1, keepdims=True))
                return expected, bound + 2 * DIVISION * mean + (ROOT + 2 * DIVISION) * spread
            case ops.MatchMagnitude():  # the quotient of two roots of means
                width = op.like.width
                return expected, (gamma(width / 64 + 13) + 2 * ROOT + 3 * DIVISION) * size + TINY * width
            case ops.SimilarityGate():
                of_sum = gamma(op.x.width / 64 + 10) + DIVISION + ROOT
                how = {"of_sum": of_sum, "of_root": U + ROOT, "of_gate": DIVISION + EXP}
                return expected, similarity_gate_bound(op, [taps[value.id] for value in op.inputs], **how)
            case ops.Activate() if op.kind == "softplus":
                return expected, SOFTPLUS * size + TINY
            case ops.Activate() if op.xielu is None:
                x = taps[op.x.id]
                return expected, activation_bound(op.kind, x, expected) + (DIVISION + EXP) * size
            case ops.TransposedLinear():
                bound = transposed_bound(taps[op.x.id], self._weights.neuron_major(op))
                return expected, bound + (0 if op.bias is None else U * (size + bound))
            case ops.SoftCap():
                return expected, bound + op.cap * (2 * DIVISION)
            case ops.Route():
                return expected, bound * np.where(bound < 0, 1, 2) + np.where(
                    bound < 0, 0, 3 * DIVISION * size
                )
        return expected, bound

    def _expected_linear(
        self, op: ops.Linear, taps: dict[int, np.ndarray], batch: Any, slots: Any
    ) -> tuple[Any, Any]:
        info, rows = self.weights.tensors[op.weight], slice(op.first_row, op.first_row + op.out.width)
        if info.type not in FLOATS:
            if op.bias is None:
                x, out = (taps[value.id].astype(np.float32) for value in (op.x, op.out))
                data = self.weights.data(op.weight).reshape(-1, info.row_bytes)[rows]
                exact = cpu_product(data, info.type, op.out.width, x)
                assert np.array_equal(exact, out), f"{op.out.name}: not the CPU's bits"
            return super()._expected_linear(op, taps, batch, slots)
        expected = np.asarray(self._compute(op, taps, batch, slots), np.float64)
        weights, x = self._weight(op.weight).reshape(-1, op.x.width)[rows], taps[op.x.id]
        bound = product_bound(x, weights)
        if op.bias is not None:
            return expected, bound + U * (np.abs(expected) + bound)
        # Taps and decoded weights are float32. Without a bias every bit is known if fma() rounds twice, as
        # NumPy does.
        if is_fused():
            return expected, bound
        exact = product(weights.astype(np.float32), x.astype(np.float32))
        assert np.array_equal(exact, taps[op.out.id].astype(np.float32)), (
            f"{op.out.name}: not the order of sums"
        )
        return expected, bound

    def _expert_bound(self, op: ops.ExpertLinear | ops.ExpertSum, expert: int, x: np.ndarray) -> np.ndarray:
        if is_neuron_major(op):
            return transposed_bound(x, self._weights.expert(op, expert))
        if self.weights.tensors[op.weights[0]].type not in FLOATS:
            return super()._expert_bound(op, expert, x)
        return product_bound(x, self._weights.expert(op, expert)[rows_of(op)])


def assert_every_operation_is_right(
    gguf: GGUFFile, backend: ChainBackend, ids: np.ndarray, splits: Sequence[int], blocks: list[int]
) -> None:
    """Assert that each value equals the reference's within its operation's rounding."""
    oracle, at = oracle_of(gguf, backend), 0
    for end in [*splits, len(ids)]:
        _check_step(oracle, backend, batch([(ids[at:end], at, blocks)], every_value(backend)))
        at = end


def _check_step(oracle: VulkanOracle, backend: ChainBackend, step: Batch) -> None:
    """Check every value of a step. Without taps, operations are fused, and the logits are the same."""
    logits = backend.step(replace(step, taps=())).logits.copy()
    tapped = backend.step(step)
    assert np.array_equal(tapped.logits, logits)
    oracle.check(step, tapped)


def assert_operations_of_sequences_are_right(gguf: GGUFFile, backend: ChainBackend) -> None:
    """Assert the same for two sequences with states in one step, in unordered KV blocks."""
    oracle, at = oracle_of(gguf, backend), [0, 0]
    texts, blocks = [tokens(70, 1), tokens(66, 2)], [[3, 1], [0, 2]]
    steps = np.zeros(2, np.int32)
    parts: list[list[tuple[int, int]]] = [[(0, 61)], [(1, 1), (0, 1)], [(0, 2), (1, 65)], [(0, 6)]]
    if stage_of(backend).graph.is_encoder:
        parts = [[(0, 70), (1, 66)], [(1, 7)]]
    for chosen in parts:
        given = [(texts[row][at[row] :][:n], at[row], blocks[row]) for row, n in chosen]
        step = batch(given, every_value(backend))
        rows = np.array([row for row, _ in chosen])
        slots = np.stack([2 * rows, 2 * rows + 1], axis=1).astype(np.int32)
        _check_step(oracle, backend, step.with_states_of_rows(steps[rows], slots))
        steps[rows] += 1
        for row, n in chosen:
            at[row] = at[row] + n if n < len(texts[row]) else 0


def oracle_of(gguf: GGUFFile, backend: ChainBackend) -> VulkanOracle:
    return VulkanOracle(
        gguf, stage_of(backend).graph, n_blocks=backend.n_blocks, n_states=max(backend.n_states, 2),
        max_batch=backend.max_batch, kv_type=stage_of(backend).kv_type,
    )  # fmt: skip


def every_value(backend: ChainBackend) -> tuple[str, ...]:
    return tuple(value.name for value in stage_of(backend).graph.values)
