"""Layers with their neurons split between a Vulkan device and the CPU."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, cpu_backend, logits_of, tokens
from byte_models import N_PLANTED, PLANTED_LAYERS, write_model, write_sparse
from cases import quick_are, quick_if
from sparse_runs import (
    ACTIVATIONS,
    MODELS,
    N_FF,
    TOLERANCE,
    cpu,
    hot_neurons,
    prepared,
    relative_error,
    write,
)
from vulkan_runs import (
    assert_cheap_submissions_decide,
    check_cancelled_beside_worker,
    check_failing_worker,
    check_submissions,
    slow_cpu,
    stage_of,
    validated,
    vulkan,
)

import hotset
from hotset import _core
from hotset.backends.base import Batch
from hotset.backends.pipeline import ChainBackend
from hotset.errors import DeviceError, InvalidRequestError, OutOfMemoryError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.powerinfer import GPUIndex, write_gpu_index
from hotset.formats.quants import GGMLType as T
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.thresholds import LayerThresholds

__all__ = ["slow_cpu", "validated"]  # the fixtures
STEPS = [11, 12, 13, 30]  # a prompt, tokens one by one, more of a prompt
SMALL: dict[str, Any] = {"n_ctx": 128, "max_batch": 16}
# With quantised weights both sides multiply the same rounded inputs. Only sums over neurons differ, whose
# last bits sometimes round an input of the next layer to another code, a step of 1/127.
QUANTIZED_TOLERANCE = 0.02


def shared(gguf: GGUFFile, mode: str, share: float, n_ff: int = N_FF, **options: Any) -> ChainBackend:
    """Return a model with a share of each layer's neurons on a device."""
    ready, graph = prepared(gguf, mode)
    hot = {i: hot_neurons(share, n_ff, i) for i in range(graph.n_layer)}
    return vulkan(ready.weights, graph, hot=hot, **{"n_threads": 2, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "mode", "share"),
    quick_if(
        lambda model, mode, share: share == 0.5 and model == "bamboo",
        MODELS, ["exact", "predicted"], [0.0, 0.25, 0.5, 0.75],
    ),
)  # fmt: skip
def test_any_share_of_neurons_on_the_device(tmp_path: Path, model: str, mode: str, share: float) -> None:
    """Compare logits with the CPU, and bits for any number of threads, steps and neighbours."""
    gguf, ids = write(tmp_path, model), tokens(40)
    expected = logits_of(cpu(gguf, mode, kv_type="f32"), ids, STEPS, [2])
    two = shared(gguf, mode, share)
    found = logits_of(two, ids, STEPS, [2])
    assert relative_error(found, expected) < TOLERANCE
    assert two.cpu_worker_seconds().all()
    one = shared(gguf, mode, share, n_threads=1)
    np.testing.assert_array_equal(logits_of(one, ids, [*range(1, 9), 25], [1]), found)
    beside = one.step(batch([(tokens(5, 7), 0, [4]), (ids[:12], 0, [6])])).logits
    np.testing.assert_array_equal(beside[5:], found[:12])


@pytest.mark.parametrize("type_", quick_are((T.Q4_0,), [T.F16, T.Q8_0, T.Q4_0]), ids=lambda t: t.name)
@pytest.mark.parametrize("dialect", ["powerinfer", "gguf"])
def test_quantised_weights(tmp_path: Path, type_: T, dialect: Any) -> None:
    """Check neuron-major matrices of PowerInfer's files, and neuron-major copies with shared scales."""
    gguf, ids = write(tmp_path, "bamboo", type_, dialect=dialect), tokens(40)
    expected = logits_of(cpu(gguf, "exact", kv_type="f32"), ids, STEPS, [2])
    backend = shared(gguf, "exact", 0.4)
    found = logits_of(backend, ids, STEPS, [2])
    assert relative_error(found, expected) < (TOLERANCE if type_ == T.F16 else QUANTIZED_TOLERANCE)
    np.testing.assert_array_equal(logits_of(backend, ids, [1, 2, 33], [5]), found)


@pytest.mark.parametrize("activation", ["fatrelu", "relu2"])
def test_other_activations_with_zeros(tmp_path: Path, activation: str) -> None:
    keys = {"llama.hidden_activation": activation, **ACTIVATIONS[activation]}
    gguf, ids = write(tmp_path, "llama", dialect="gguf", keys=keys), tokens(30)
    expected = logits_of(cpu(gguf, "exact", kv_type="f32"), ids, STEPS[:3], [2])
    found = logits_of(shared(gguf, "exact", 0.5), ids, STEPS[:3], [2])
    assert relative_error(found, expected) < TOLERANCE


def test_thresholds_of_some_tokens(tmp_path: Path) -> None:
    """Check that both sides skip the same values, and only of thresholded tokens."""
    gguf, ids = write(tmp_path, "llama"), tokens(30)
    ready, _ = prepared(gguf, "exact")
    found_of = LayerThresholds(gate=0.3, ffn_in=0.4, down_in=0.2)
    graph = describe(config_from_gguf(gguf), gguf.tensors, None, (found_of,) * 2)
    hot = {i: hot_neurons(0.5, seed=i) for i in range(2)}
    split = vulkan(ready.weights, graph, hot=hot, n_threads=2)  # type: ignore[arg-type]
    alone = cpu_backend(ready.weights, graph, n_blocks=8, max_batch=80, kv_type="f32", n_threads=2)
    step = batch([(ids, 0, [0])])
    plain = alone.step(step).logits.copy()
    thresholded = replace(step, thresholded=np.arange(30) % 3 > 0)
    expected = alone.step(thresholded).logits
    assert relative_error(plain, expected) > 0.01
    assert relative_error(split.step(thresholded).logits, expected) < TOLERANCE


def test_layers_on_the_cpu_next_to_split_ones(tmp_path: Path) -> None:
    """Check CPU layers, split layers and whole ones in a chain; their CPU parts share a thread pool."""
    gguf, ids = write(tmp_path, "llama", ranks=(32, 32, 32)), tokens(30)
    ready, graph = prepared(gguf, "exact")
    hot = {1: hot_neurons(0.5)}
    chain = vulkan(ready.weights, graph, n_layers=2, hot=hot, n_threads=2)  # type: ignore[arg-type]
    assert [stage.name == "cpu" for stage in chain.stages] == [True, False]
    found = logits_of(chain, ids, STEPS[:3], [2])
    expected = logits_of(cpu(gguf, "exact", kv_type="f32"), ids, STEPS[:3], [2])
    assert relative_error(found, expected) < TOLERANCE
    assert chain.cpu_worker_seconds().astype(bool).tolist() == [False, True, False]


# -- failures ------------------------------------------------------------------------------------


def test_values_inside_a_split_ffn_cannot_be_tapped(tmp_path: Path) -> None:
    backend = shared(write(tmp_path, "llama"), "exact", 0.5)
    ffn = stage_of(backend).graph.ffns[1]
    for value in (ffn.gate_act.out, ffn.selected):
        with pytest.raises(InvalidRequestError, match="are split between the Vulkan device and the CPU"):
            backend.step(batch([(tokens(3), 0, [0])], (value.name,)))
    plain = backend.step(batch([(tokens(3), 0, [0])])).logits.copy()
    tapped = backend.step(batch([(tokens(3), 0, [0])], (ffn.up.x.name, ffn.out.name)))
    np.testing.assert_array_equal(tapped.logits, plain)
    assert set(tapped.taps) == {ffn.up.x.name, ffn.out.name}


def test_layers_without_zeros_are_not_split(tmp_path: Path) -> None:
    gguf = open_gguf(write_model(tmp_path / "silu.gguf"))
    with pytest.raises(UnsupportedModelError, match="the neurons of layer 0 cannot be shared"):
        shared(gguf, "dense", 0.5, config_from_gguf(gguf).n_ff[0])


def halved(tmp_path: Path, *, step: bool = True) -> tuple[ChainBackend, Batch, np.ndarray]:
    """Return a model with half of its neurons on a device, a step, and its logits if the step is computed."""
    backend, given = shared(write(tmp_path, "llama"), "exact", 0.5), batch([(tokens(20), 0, [0])])
    return backend, given, backend.step(given).logits.copy() if step else np.empty(0)


def test_a_cpu_worker_that_fails_ends_the_step_and_not_the_next(tmp_path: Path) -> None:
    check_failing_worker(*halved(tmp_path))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("vkQueueSubmit", 1), ("vkGetSemaphoreCounterValueKHR", 1), ("vkGetSemaphoreCounterValueKHR", 2),
        ("vkSignalSemaphoreKHR", 1), ("vkSignalSemaphoreKHR", 2), ("vkCreateSemaphore", 2),
    ],
)  # fmt: skip
def test_a_call_that_fails_between_the_two_sides(tmp_path: Path, name: str, call: int) -> None:
    backend, step, expected = halved(tmp_path)
    if name == "vkCreateSemaphore":  # made with the first recording
        backend, _, _ = halved(tmp_path, step=False)
    _core.vulkan_fail(name, call, -4)
    with pytest.raises(DeviceError, match="lost"):
        backend.step(step)
    _core.vulkan_fail("", 0, 0)
    np.testing.assert_array_equal(backend.step(step).logits, expected)


@pytest.mark.parametrize("call", [1, 2])
def test_a_host_side_that_raises_ends_the_step_and_not_the_next(tmp_path: Path, call: int) -> None:
    backend, step, expected = halved(tmp_path)
    _core.vulkan_fail("Exchange::serve", call, -1)
    with pytest.raises(OutOfMemoryError, match="the machine ran out of memory while computing a layer"):
        backend.step(step)
    np.testing.assert_array_equal(backend.step(step).logits, expected)


def test_a_device_that_no_answer_reaches_is_given_up(tmp_path: Path) -> None:
    """Check that later steps are refused, and that closing does not wait for a queue that never ends."""
    backend, step, expected = halved(tmp_path)
    _core.vulkan_fail("vkSignalSemaphoreKHR", 1, -4, lasting=True)
    with pytest.raises(DeviceError, match="lost"):
        backend.step(step)
    _core.vulkan_fail("", 0, 0)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"waits forever for a result of the CPU.*load the model again"):
            backend.step(step)
    backend.close()
    del backend
    gc.collect()
    again, _, _ = halved(tmp_path, step=False)
    np.testing.assert_array_equal(again.step(step).logits, expected)


@pytest.mark.parametrize("n_tokens", [1, 63, 64])
def test_submissions_of_a_step_of_split_layers(tmp_path: Path, n_tokens: int) -> None:
    backend, _, _ = halved(tmp_path)
    step = batch([(tokens(n_tokens), 0, [0])])
    check_submissions(backend, step, backend.step(step).logits.copy())


def test_a_step_is_cancelled_while_the_cpu_computes(tmp_path: Path) -> None:
    check_cancelled_beside_worker(*halved(tmp_path))


# -- the plan ------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_sparse(tmp_path / "model.gguf", n_ff=N_PLANTED, ranks=(32,) * PLANTED_LAYERS)


def settings_of(mode: str) -> dict[str, Any]:
    return {"device": "vulkan", "split": "neurons", "sparsity": mode, **SMALL}


def budget_of(model: Path, share: float, mode: str) -> float:
    """Return the GiB with which a share of the FFNs is on the device."""
    whole = hotset.plan(model, vram_budget=1.0, **settings_of(mode))
    assert whole is not None
    assert whole.budget is not None
    assert whole.is_whole
    [planned] = whole.budget.devices
    return (planned.total - (1 - share) * planned.neurons + whole.budget.stream) / 2**30


@pytest.mark.parametrize("share", quick_are((0.5,), [0.25, 0.5, 0.75]))
@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_a_budget_for_a_share_of_the_ffns(model: Path, slow_cpu: None, mode: str, share: float) -> None:
    """Check that the planned bytes are on the device, never more, and that they hold the hottest neurons."""
    with hotset.load(model, device="cpu", sparsity=mode, **SMALL) as loaded:
        expected = loaded.logits("Hello there").copy()
    gib = budget_of(model, share, mode)
    with hotset.load(model, vram_budget=gib, **settings_of(mode)) as loaded:
        placement = loaded.placement
        assert placement is not None
        assert placement.n_cpu_layers == 0
        assert placement.hot_share == pytest.approx(share, abs=0.05)
        assert placement.served_share is not None
        assert placement.served_share > share + 0.02
        assert relative_error(loaded.logits("Hello there"), expected) < 0.002
        [memory] = loaded.device_memory()
        assert memory.used <= memory.planned.total <= gib * 2**30
        assert stage_of(loaded.backend).opened.device.allocated == memory.used  # type: ignore[arg-type]
        assert any("share their neurons with the CPU" in note for note in loaded.backend.notes)


def test_a_gpu_index_says_which_neurons_are_hot(model: Path, slow_cpu: None, tmp_path: Path) -> None:
    masks = [hot_neurons(0.3, N_PLANTED, i) for i in range(PLANTED_LAYERS)]
    masks[1][:], masks[2][:] = False, True
    write_gpu_index(tmp_path / "index", GPUIndex(1 << 20, masks))
    with hotset.load(model, device="cpu", sparsity="predicted", **SMALL) as loaded:
        expected = loaded.logits("Hello there").copy()
    given: dict[str, Any] = {"device": "vulkan", "sparsity": "predicted", "gpu_index": tmp_path / "index"}
    with hotset.load(model, **given, **SMALL) as loaded:
        assert loaded.placement is not None
        for place, mask in zip(loaded.placement.layers, masks, strict=True):
            assert np.array_equal(np.ones(N_PLANTED, bool) if place.hot is None else place.hot, mask)
        assert relative_error(loaded.logits("Hello there"), expected) < 0.002


def test_layers_that_are_not_split(model: Path, slow_cpu: None, tmp_path: Path) -> None:
    gib = budget_of(model, 0.5, "exact")
    for settings in ({"split": "layers"}, {"sparsity": "dense", "split": "auto"}):
        found = hotset.plan(model, vram_budget=gib, **settings_of("exact") | settings)
        assert found is not None
        assert not any(place.is_split for place in found.layers)
        assert found.n_cpu_layers > 0
    silu = write_model(tmp_path / "silu.gguf")
    with pytest.raises(UnsupportedModelError, match="no layer has neurons that a device could share"):
        hotset.plan(silu, vram_budget=gib, device="vulkan", split="neurons", **SMALL)


@pytest.mark.parametrize("kind", ["discrete", "integrated"])
def test_the_cost_of_a_submission_decides(
    model: Path, slow_cpu: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Check that neurons are split only if round trips cost little and the device has its own memory."""
    gib, free = budget_of(model, 0.5, "exact"), settings_of("exact") | {"split": "auto"}

    def pays() -> bool:
        found = hotset.plan(model, vram_budget=gib, **free)
        assert found is not None
        return any(place.is_split for place in found.layers)

    assert_cheap_submissions_decide(monkeypatch, kind, pays, dear=1.0)
