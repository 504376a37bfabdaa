"""Whole models on a Vulkan device: the same bits for every batch and split, budgets, errors, cancellation."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, logits_of, tokens
from cases import quick_are
from tiny_adapters import give, random_adapter, scales_of
from tiny_gguf import write_llama
from vulkan_runs import VulkanOracle, stage_of, validated, vulkan

from hotset import _core
from hotset.backends.base import N_CANDIDATES
from hotset.backends.registry import backend_of
from hotset.backends.vulkan import candidates
from hotset.backends.vulkan.backend import WholeVulkan
from hotset.backends.vulkan.devices import find_device, list_devices
from hotset.backends.vulkan.kernels import Recorder, VulkanKernels
from hotset.backends.vulkan.memory import BufferArena, BufferRange
from hotset.engine.engine import Engine
from hotset.engine.sampler import SamplingParams
from hotset.errors import (
    DeviceError,
    InvalidRequestError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.settings import LoadSettings

__all__ = ["validated"]  # the fixture


@pytest.fixture
def gguf(tmp_path: Path) -> Any:
    types = {"attn_v": GGMLType.Q8_0, "ffn_down": GGMLType.Q4_1, "output": GGMLType.F16}
    path = write_llama(
        tmp_path / "m.gguf", type_of=lambda name: types.get(name.split(".")[-1], GGMLType.Q4_0)
    )
    with open_gguf(path) as opened:
        yield opened


@pytest.mark.parametrize(("width", "n"), [(129, 3), (1024, 1), (1030, 64), (70_000, 2)])
@pytest.mark.parametrize("staged", [False, True])
def test_the_largest_of_each_row(width: int, n: int, staged: bool) -> None:
    """Check ties, which are sorted by place, zeros of both signs, which tie, and NaN, which comes first."""
    draw = np.random.default_rng(width)
    rows = np.full((n, width + 3), 99, np.float32)  # with spare numbers after each row
    rows[:, :width] = np.round(draw.standard_normal((n, width)) * 30).astype(np.float32)
    rows[0, :width] *= np.where(draw.random(width) < 0.5, np.float32(0), np.float32(-0.0))
    rows[-1, 5:99] = -np.inf
    rows[-1, [7, 120, width - 1]] = np.nan, np.inf, -np.nan
    device = _core.VulkanDevice(find_device("vulkan").index, staged)
    given = BufferArena(device).piece(rows.nbytes)
    given.buffer.write(given.offset, rows.reshape(-1).view(np.uint8))
    scratch = BufferArena(device).piece(candidates.scratch_bytes(width, n) or 4)
    size = n * candidates.CANDIDATE_BYTES
    found = BufferRange(device.allocate(size, "from_device"), 0, size)
    recorder = Recorder(VulkanKernels(device))
    candidates.record(recorder, given.bound(), (width, width + 3), n, scratch, found)
    recorder.program.finish()
    _core.vulkan_run([recorder.program], _core.VulkanCancel())
    pairs = np.frombuffer(found.read(), np.uint32).reshape(n, N_CANDIDATES, 2)
    ids, values = candidates.candidates_of(pairs)
    of_all = np.where(np.isnan(rows), np.float32(1e38), np.where(rows == np.inf, np.float32(1e37), rows))
    expected = np.sort(np.argsort(-of_all[:, :width], axis=1, kind="stable")[:, :N_CANDIDATES], axis=1)
    assert np.array_equal(ids, expected)
    assert np.array_equal(values, np.take_along_axis(rows, expected, 1), equal_nan=True)


def test_candidates_are_the_largest_logits(tmp_path: Path) -> None:
    """Check more rows than are computed at once, no rows, and a vocabulary that is hardly larger."""
    path, ids = write_llama(tmp_path / "m.gguf", n_vocab=1500), tokens(75)
    with open_gguf(path) as gguf:
        backend = vulkan(gguf, max_batch=80)
        step = replace(batch([(ids, 0, [0, 1])]), wants_candidates=True)
        logits = backend.step(replace(step, wants_candidates=False)).logits.copy()
        found = backend.step(step)
        expected = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :N_CANDIDATES], axis=1)
        assert found.candidates is not None
        assert np.array_equal(found.candidates, expected)
        assert np.array_equal(found.logits, np.take_along_axis(logits, expected, 1))
        none = backend.step(replace(step, outputs=step.outputs[:0]))
        assert none.logits.shape == (0, N_CANDIDATES)
        tapped = backend.step(replace(step, taps=(stage_of(backend).graph.result.name,)))
        assert tapped.candidates is None
        assert np.array_equal(tapped.logits, logits)
        assert all(np.array_equal(rows, logits) for rows in tapped.taps.values())


def test_few_logits_are_all_handed_out(gguf: GGUFFile) -> None:
    found = vulkan(gguf).step(replace(batch([(tokens(3), 0, [0])]), wants_candidates=True))
    assert found.candidates is None
    assert found.logits.shape == (3, 96)


@pytest.mark.parametrize("type_", quick_are((GGMLType.F16,), (GGMLType.F32, GGMLType.F16, GGMLType.BF16)))
def test_adapters_next_to_others(gguf: GGUFFile, type_: GGMLType) -> None:
    """Compare the adapters' part with the reference; it changes no bit of sequences with other adapters."""
    backend, ids = vulkan(gguf), tokens(40)
    plain = logits_of(backend, ids, [], [6])
    tensors = stage_of(backend).weights.tensors
    one = random_adapter(stage_of(backend).graph, tensors, type=type_)
    other = random_adapter(
        stage_of(backend).graph, tensors, rank=19, seed=1, type=type_, names=lambda name: "attn_q" in name
    )
    give(backend, [one, other])
    both = scales_of(one, other, scales=[0.75, -0.5])
    parts = [(ids, 0, [0]), (ids[:9], 0, [1]), (ids[:20], 0, [2])]
    step = replace(batch(parts), adapter_scales=[both, (), scales_of(other)])
    assert isinstance(backend, WholeVulkan)
    oracle = VulkanOracle(gguf, backend.adapters.graph, n_blocks=8, max_batch=80)
    oracle.adapters = backend.adapters
    names = tuple(op.out.name for op in oracle.graph.primitives)
    tapped = backend.step(replace(step, taps=names))
    logits = tapped.logits.copy()
    oracle.graph.values = [value for value in oracle.graph.values if value.name in names]
    oracle.check(replace(step, taps=names), tapped)
    assert np.array_equal(backend.step(step).logits, logits)
    alone = replace(batch([(ids[:20], 0, [3])]), adapter_scales=[scales_of(other)])
    assert np.array_equal(backend.step(alone).logits, logits[49:])
    assert np.array_equal(logits[40:49], plain[:9])
    give(backend, [])
    assert np.array_equal(logits_of(backend, ids, [], [6]), plain)


def test_adapters_that_do_not_fit_change_nothing(gguf: GGUFFile) -> None:
    """Check that the earlier adapters are on the device again, however much of the others was uploaded."""
    first = vulkan(gguf)
    graph, device = stage_of(first).graph, stage_of(first).opened.device
    one, other = (random_adapter(graph, gguf.tensors, rank=rank, seed=rank) for rank in (4, 256))
    held = [device.allocated]
    give(first, [one])
    held.append(device.allocated)
    backend = vulkan(gguf, budget=held[1] + (8 << 10))
    stage, step = stage_of(backend), batch([(tokens(20), 0, [0])])
    expected = backend.step(step).logits.copy()
    for adapters, n_bytes in zip(([], [one]), held, strict=True):
        give(backend, adapters)
        with pytest.raises(OutOfMemoryError, match="raise vram_budget"):
            give(backend, [one, other])
        assert stage.adapters.adapters == tuple(adapters)
        assert stage.opened.device.allocated == n_bytes
        assert np.array_equal(backend.step(step).logits, expected)


@pytest.mark.parametrize("n_layers", [0, 1])
def test_layers_shared_with_the_cpu(gguf: GGUFFile, n_layers: int) -> None:
    """Check that the bits are the same with the first layers on the CPU."""
    ids = tokens(30)
    expected = logits_of(vulkan(gguf), ids, [], [3, 1])
    shared = vulkan(gguf, n_layers=n_layers, n_threads=1)
    found = logits_of(shared, ids, [20, 29], [3, 1])
    assert [stage.name for stage in shared.stages] == ["cpu", find_device("vulkan").name]
    assert np.array_equal(found, expected)
    assert np.array_equal(logits_of(shared, ids, [], [0, 2]), found)
    shared.close()


def test_a_budget_holds_and_memory_is_freed(gguf: GGUFFile) -> None:
    backend = vulkan(gguf)
    stage = stage_of(backend)
    logits_of(backend, tokens(70), [1, 9], [3, 1])
    device, held = stage.opened.device, stage.opened.device.allocated
    assert held == sum(backend.device_bytes()[0].values())
    gc.disable()  # a server does not collect the cycles of its loaded objects
    try:
        give(backend, [random_adapter(stage.graph, gguf.tensors)])
        give(backend, [])
        assert device.allocated == held
        for name in ("attn_norm", "attn", "ffn_norm"):
            backend.step(replace(batch([(tokens(3), 0, [0])]), taps=(f"blk.0.{name}",)))
        assert device.allocated == sum(backend.device_bytes()[0].values())
        backend.close()
        backend.close()
        assert device.allocated == 0
    finally:
        gc.enable()
    vulkan(gguf, budget=held).close()
    with pytest.raises(OutOfMemoryError, match=r"budget of .* raise vram_budget, or lower the context"):
        vulkan(gguf, budget=held // 2)


def test_operation_without_a_kernel_is_named(tmp_path: Path) -> None:
    sentence = "no Vulkan kernel computes the type IQ4_NL yet; leave `device` out"
    path = write_llama(tmp_path / "m.gguf", type_of=lambda _: GGMLType.IQ4_NL)
    with open_gguf(path) as gguf, pytest.raises(UnsupportedModelError, match=sentence):
        vulkan(gguf)


def test_devices_by_name() -> None:
    found = list_devices()
    assert find_device(f"vulkan:{found[0].index}") == found[0]
    assert find_device("vulkan") in found
    with pytest.raises(DeviceError, match=f"there is no vulkan:{len(found)}: .*the driver has {len(found)}$"):
        find_device(f"vulkan:{len(found)}")
    for name in ("vulkan:x", "vulkan:", "vulkan:-1", "vulkan:0:1"):
        with pytest.raises(InvalidRequestError, match=rf"must be one of .*, vulkan\[:N\], not '{name}'"):
            LoadSettings(device=name)
    for device in ("vulkan", "vulkan:0", "vulkan:12"):
        assert LoadSettings(device=device).device == (device,)
        assert backend_of(device) == "vulkan"
    assert backend_of("cuda") != "vulkan"


def test_the_validation_layer_finds_a_missing_barrier(gguf: GGUFFile) -> None:
    """Check that the layer reports a dispatch that does not declare its writes."""
    backend = vulkan(gguf)
    stage = stage_of(backend)
    device, kernels = stage.opened.device, stage.opened.kernels
    buffer = device.allocate(1024, "device")
    program = _core.VulkanProgram(device)
    kernel = kernels.get("elementwise", [0, 0])
    push = np.array([64] * 5 + [0] * 5, np.uint32).tobytes()
    first, second, third = ((buffer, at, 256, False) for at in (0, 256, 512))
    program.dispatch(kernel, [first, first, second, first], push, (1, 1, 1))
    program.dispatch(kernel, [second, second, third, second], push, (1, 1, 1))
    with pytest.raises(DeviceError, match="SYNC-HAZARD"):
        program.finish()
    backend.close()
    with pytest.raises(InvalidRequestError, match="has been closed"):
        backend.step(batch([(tokens(1), 0, [0])]))


@pytest.mark.parametrize(
    ("bound", "sentence"),
    [((0, 2048), "is outside its buffer"), ((0, 0), "outside"), ((4, 256), "not aligned")],
)
def test_a_binding_is_checked(gguf: GGUFFile, bound: tuple[int, int], sentence: str) -> None:
    stage = stage_of(vulkan(gguf))
    buffer = stage.opened.device.allocate(1024, "device")
    given = (buffer, *bound, False)
    program = _core.VulkanProgram(stage.opened.device)
    with pytest.raises(ValueError, match=sentence):
        program.dispatch(stage.opened.kernels.get("select", []), [given, given, given], bytes(12), (1, 1, 1))


HOST_CALLS = 210  # Python and native functions between two submissions


def test_a_token_needs_few_calls_on_the_host(gguf: GGUFFile) -> None:
    engine = Engine(vulkan(gguf, n_blocks=4), 128, 1)
    sequence = engine.enqueue(engine.prepare(list(range(9)), SamplingParams(temperature=0, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    calls = 0

    def count(frame: object, event: str, function: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    engine.step()
    sys.setprofile(before)
    assert len(sequence.tokens) == 9 + 5
    assert calls <= HOST_CALLS
