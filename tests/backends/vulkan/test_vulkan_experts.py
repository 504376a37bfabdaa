"""MoE layers with some experts in slots of a Vulkan device: the same bits with any number of slots."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_server
from backend_runs import batch, cpu_backend, logits_of, tokens
from byte_models import write_model
from cases import quick_are
from cli_runs import inside
from expert_models import FORMS, model
from sparse_runs import relative_error
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
from hotset.backends.vulkan import budget, planning
from hotset.backends.vulkan.experts import VulkanExpertCache, cached_layers
from hotset.backends.vulkan.stage import VulkanStage
from hotset.backends.vulkan.weights import VulkanWeights
from hotset.convert.hf import convert_hf
from hotset.errors import DeviceError, InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType as T
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.thresholds import LayerThresholds

__all__ = ["slow_cpu", "validated"]  # the fixtures
NAMES = "mixed", "biased", "shared", "sigmoid", "groups", "chosen", "relu", "one used", "all used", "many"
CACHED: dict[str, dict[str, Any]] = {name: FORMS[name] for name in NAMES}
CACHED["mxfp4"] = {"type_of": lambda name: T.MXFP4 if "_exps" in name else T.F32, "biased": True}
CACHED["early router"] = {"architecture": "smallthinker"}
STEPS = [18, 19, 20, 21]
SMALL: dict[str, Any] = {"n_ctx": 128, "max_batch": 16}
# Both round inputs of products to the same eight bits. Router sums have another order, which sometimes rounds
# an input of the next layer to another code.
QUANTIZED_TOLERANCE = 0.02


@pytest.mark.parametrize("form", quick_are(("mixed",), CACHED))
def test_the_same_bits_with_any_cache(tmp_path: Path, form: str) -> None:
    """Compare bits with a device that has all experts, and logits with the CPU, whose router differs."""
    assert_the_same_bits(model(tmp_path, **CACHED[form]))


@pytest.mark.slow
def test_gpt_oss_as_published(tmp_path: Path) -> None:
    """Check experts in MXFP4 with biases, sinks and windows."""
    tiny_models = pytest.importorskip("tiny_models")
    recipe = tiny_models.EXPERTS["gpt-oss"]
    tiny_models.save_packed(recipe, tiny_models.build(recipe), tmp_path)
    convert_hf(tmp_path, tmp_path / "model.gguf", T.F32)
    assert_the_same_bits(open_gguf(tmp_path / "model.gguf"))


def assert_the_same_bits(gguf: GGUFFile) -> None:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    route = graph.ffns[0].route
    assert route is not None
    ids, n_all = tokens(24), graph.n_layer * route.x.width
    expected = logits_of(vulkan(gguf), ids, STEPS, [2])
    cpu = cpu_backend(gguf, graph, n_blocks=8, max_batch=80, kv_type="f32", n_threads=2)
    assert relative_error(expected, logits_of(cpu, ids, STEPS, [2])) < QUANTIZED_TOLERANCE
    for share in (0, 0.25, 0.5, 0.75, 1):
        n_slots = max(int(share * n_all), 1)
        backend = vulkan(gguf, expert_slots=n_slots, n_threads=1 + n_slots % 2)
        np.testing.assert_array_equal(logits_of(backend, ids, STEPS, [2]), expected)
        counts = backend.expert_counts()
        assert counts.hits + counts.on_cpu == 24 * graph.n_layer * route.n_used
        assert counts.fetched > 0
        assert counts.on_cpu > 0
        assert counts.hits > 0 or share < 0.5
        backend.close()


def test_batches_and_shared_prefixes(tmp_path: Path) -> None:
    """Check that a token has the same bits with neighbours, in other chunks, and after a shared prefix."""
    gguf = model(tmp_path)
    ids, other = tokens(76), tokens(9, 7)
    expected = logits_of(vulkan(gguf), ids, [64, 70], [2, 3])
    backend = vulkan(gguf, expert_slots=6, n_threads=2)
    np.testing.assert_array_equal(logits_of(backend, ids, [30, *range(64, 70)], [2, 3]), expected)
    step = batch([(other, 0, [6]), (ids[64:], 64, [2, 5]), (ids[:3], 0, [4])])
    found = backend.step(step).logits
    np.testing.assert_array_equal(found[9:21], expected[64:])
    np.testing.assert_array_equal(found[21:], expected[:3])


@pytest.mark.slow
def test_thresholds_of_some_tokens(tmp_path: Path) -> None:
    """Check that both sides skip the same values, and only of thresholded tokens."""
    gguf = model(tmp_path)
    found_of = LayerThresholds(gate=0.3)
    graph = describe(config_from_gguf(gguf), gguf.tensors, None, (found_of,) * 2)
    plain = batch([(tokens(30), 0, [0])])
    step = replace(plain, thresholded=np.arange(30) % 3 > 0)
    expected = vulkan(gguf, graph).step(step).logits.copy()
    backend = vulkan(gguf, graph, expert_slots=9, n_threads=2)
    assert relative_error(backend.step(plain).logits, expected) > 0.01
    for _ in range(2):
        np.testing.assert_array_equal(backend.step(step).logits, expected)
    assert backend.expert_counts().hits > 0


@pytest.mark.slow
def test_slots_in_several_bindings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = VulkanWeights.__init__

    def small(self: VulkanWeights, *arguments: Any) -> None:
        made(self, *arguments)
        self._max_range = 200_000

    gguf, ids = model(tmp_path, biased=True), tokens(24)
    expected = logits_of(vulkan(gguf), ids, STEPS, [2])
    monkeypatch.setattr(VulkanWeights, "__init__", small)
    backend = vulkan(gguf, expert_slots=9, n_threads=2)
    cache = stage_of(backend).experts
    assert cache is not None
    up = stage_of(backend).graph.ffns[0].up
    assert len(cache.slots_of(0, up.out)[0].parts) == 2
    np.testing.assert_array_equal(logits_of(backend, ids, STEPS, [2]), expected)
    assert backend.expert_counts().hits > 0


@pytest.mark.slow
def test_experts_are_rearranged_during_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a copying thread, as with hardware: an expert is used after its arrival, not during the copy."""
    made = VulkanExpertCache.__init__

    def with_thread(self: VulkanExpertCache, *arguments: Any, in_thread: bool) -> None:
        assert not in_thread
        made(self, *arguments, in_thread=True)

    gguf, ids = model(tmp_path), tokens(40)
    steps = [18, *range(20, 40)]
    expected = logits_of(vulkan(gguf), ids, steps, [2])
    monkeypatch.setattr(VulkanExpertCache, "__init__", with_thread)
    monkeypatch.setattr(VulkanExpertCache, "coming_bytes", 300_000)
    backend = vulkan(gguf, expert_slots=9, staged=True)
    np.testing.assert_array_equal(logits_of(backend, ids[:30], steps[:11], [2]), expected[:30])
    cache = stage_of(backend).experts
    assert cache is not None
    assert cache.most_coming == 2  # of 130 kB
    cache.settle()
    for at in range(30, 40):
        found = backend.step(batch([(ids[at : at + 1], at, [2])])).logits
        np.testing.assert_array_equal(found, expected[at : at + 1])
    assert backend.expert_counts().hits > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "n_slots"),
    [
        pytest.param({"n_layers": 2}, [4, 5], marks=pytest.mark.slow),
        ({"n_devices": 2}, [4, 5, 9]),
        pytest.param({}, [3, 3, 3], marks=pytest.mark.slow),
    ],
)
def test_layers_on_the_cpu_and_other_layouts(
    tmp_path: Path, options: dict[str, Any], n_slots: list[int]
) -> None:
    """Check that layers of other types, and of a second stage, have their own slots; CPU layers have none."""
    types = {"blk.0.ffn_down_exps": T.Q6_K, "blk.1.ffn_down_exps": T.Q8_0}
    gguf = model(tmp_path, n_layer=3, type_of=lambda name: types.get(name.removesuffix(".weight"), T.Q4_0))
    ids = tokens(24)
    expected = logits_of(vulkan(gguf, n_threads=2, **options), ids, STEPS, [2])
    backend = vulkan(gguf, expert_slots=9, n_threads=2, **options)
    np.testing.assert_array_equal(logits_of(backend, ids, STEPS, [2]), expected)
    assert backend.expert_counts().hits > 0
    caches = [stage.experts for stage in backend.stages if isinstance(stage, VulkanStage)]
    assert [group.n_slots for cache in caches if cache is not None for group in cache.groups] == n_slots


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("floats", "experts of the type F32"),
        ("halves", "experts of the type F16"),
        ("floats and blocks", "experts of the type F32"),
        ("neuron-major", "neuron-major down projections"),
        ("gelu", "the activation gelu"),
    ],
)
def test_experts_with_other_bits_on_a_device_are_not_cached(tmp_path: Path, form: str, said: str) -> None:
    gguf = model(tmp_path, **FORMS.get(form, {"keys": {"llama.hidden_activation": form}}))
    held, why = cached_layers(describe(config_from_gguf(gguf), gguf.tensors), gguf.tensors)
    assert not held
    assert why == f"blk.0: no expert cache on Vulkan holds {said}"
    backend = vulkan(gguf, expert_slots=9)  # the device has all of them
    assert backend.expert_counts().needed == 0


def test_experts_of_several_types_are_refused(tmp_path: Path) -> None:
    """Check old files, which have a tensor for each expert."""
    gguf = model(tmp_path, one_by_one=True)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    down = graph.ffns[0].down
    name = down.matrices[3]
    tensors = {**gguf.tensors, name: replace(gguf.tensors[name], type=T.Q8_0)}
    assert budget.missing_kernel(down, gguf.tensors, "f16") is None
    assert budget.missing_kernel(down, tensors, "f16") == "experts of several types"
    held, why = cached_layers(graph, tensors)
    assert list(held) == [1]
    assert why == "blk.0: no expert cache on Vulkan holds experts of several types"


# -- failures ------------------------------------------------------------------------------------


def halved(tmp_path: Path, **options: Any) -> tuple[ChainBackend, Batch, np.ndarray]:
    """Return a model with half of its experts on a device, a step, and its logits."""
    gguf, step = model(tmp_path), batch([(tokens(20), 0, [0])])
    backend = vulkan(gguf, expert_slots=9, n_threads=2, **options)
    backend.step(step)
    return backend, step, vulkan(gguf).step(step).logits.copy()


def test_inner_values_cannot_be_tapped(tmp_path: Path) -> None:
    backend, step, expected = halved(tmp_path)
    ffn = stage_of(backend).graph.ffns[1]
    assert ffn.route is not None
    for value in (ffn.gate_act.out, ffn.selected):
        with pytest.raises(InvalidRequestError, match="the experts of layer 1 are split"):
            backend.step(replace(step, taps=(value.name,)))
    seen = ffn.up.x.name, ffn.route.out.name, ffn.out.name
    tapped = backend.step(replace(step, taps=seen))
    np.testing.assert_array_equal(tapped.logits, expected)
    assert set(tapped.taps) == set(seen)


def test_a_cpu_worker_that_fails_ends_the_step_and_not_the_next(tmp_path: Path) -> None:
    check_failing_worker(*halved(tmp_path))


def test_a_step_is_cancelled_while_the_cpu_computes(tmp_path: Path) -> None:
    check_cancelled_beside_worker(*halved(tmp_path))


@pytest.mark.parametrize("n_tokens", [1, 63, 64])
def test_submissions_of_a_step_with_cached_experts(tmp_path: Path, n_tokens: int) -> None:
    gguf, step = model(tmp_path), batch([(tokens(n_tokens), 0, [0])])
    expected = vulkan(gguf).step(step).logits.copy()
    check_submissions(vulkan(gguf, expert_slots=9, n_threads=2), step, expected)


@pytest.mark.slow
@pytest.mark.parametrize("call", quick_are((1, 8), [1, 2, 3, 5, 8, 15]))
def test_a_call_that_fails_in_a_step_or_a_copy(tmp_path: Path, call: int) -> None:
    """Let a submission of the step fail, or one of the later copies into slots."""
    backend, step, expected = halved(tmp_path, staged=True)
    other = batch([(tokens(4, 3), 0, [1])])
    _core.vulkan_fail("vkQueueSubmit", call, -4)
    with pytest.raises(DeviceError, match="lost"):
        backend.step(other)
    _core.vulkan_fail("", 0, 0)
    for _ in range(2):
        np.testing.assert_array_equal(backend.step(step).logits, expected)


@pytest.mark.slow
def test_an_expert_that_does_not_come_is_computed_by_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf, step = model(tmp_path), batch([(tokens(8), 0, [0])])
    expected = vulkan(gguf).step(step).logits.copy()
    backend, fetch, n_calls = vulkan(gguf, expert_slots=9), VulkanExpertCache._fetch, 0

    def failing(self: VulkanExpertCache, *arguments: Any) -> Callable[[], None]:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 4:
            raise DeviceError("the disk is gone")
        return fetch(self, *arguments)

    monkeypatch.setattr(VulkanExpertCache, "_fetch", failing)
    with pytest.raises(DeviceError, match="the disk is gone"):
        backend.step(step)
    for _ in range(2):
        np.testing.assert_array_equal(backend.step(step).logits, expected)
    assert backend.expert_counts().hits > 0


# -- the plan ------------------------------------------------------------------------------------


def write(path: Path, type_: T = T.Q8_0) -> Path:
    return write_model(path / "m.gguf", n_embd=64, n_ff=2048, experts=(32, 2), type_of=lambda _: type_)


def budget_of(path: Path, share: float, max_batch: int = 16) -> float:
    """Return the GiB with which a share of the experts has slots."""
    with open_gguf(path) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        cached = cached_layers(graph, gguf.tensors)[0]
        facts = planning.model_facts(graph, gguf.tensors, "f16", 2, max_batch, cached=cached)
    experts = sum(layer.n_experts * layer.expert_bytes for layer in facts.layers)
    return (facts.whole_bytes + share * experts + (80 << 10)) / 2**30


@pytest.mark.slow
@pytest.mark.parametrize("share", quick_are((0.5,), [0.25, 0.5, 0.75]))
@pytest.mark.parametrize("split", ["auto", "neurons"])
def test_a_budget_for_a_share_of_the_experts(
    tmp_path: Path, slow_cpu: None, split: Any, share: float
) -> None:
    path = write(tmp_path)
    with hotset.load(path, device="vulkan", **SMALL) as loaded:
        expected = loaded.logits("Hello there").copy()
    gib = budget_of(path, share)
    with hotset.load(path, device="vulkan", vram_budget=gib, split=split, **SMALL) as loaded:
        placement = loaded.placement
        assert placement is not None
        assert placement.n_cpu_layers == 0
        assert placement.expert_slots[0] == pytest.approx(share * 64, abs=3)
        for _ in range(2):
            np.testing.assert_array_equal(loaded.logits("Hello there"), expected)
        [memory] = loaded.device_memory()
        assert memory.used <= memory.planned.total <= gib * 2**30
        assert memory.measured["experts"] > share * 60 * 3 * 64 * 2048
        assert stage_of(loaded.backend).opened.device.allocated == memory.used  # type: ignore[arg-type]
        assert "2 layers share their experts with the CPU" in loaded.backend.notes


def test_plan_and_answer_report_the_expert_cache(tmp_path: Path, slow_cpu: None) -> None:
    path = write(tmp_path)
    given = [str(path), "--device", "vulkan", "--vram-budget", f"{budget_of(path, 0.5, 512):.6f}"]
    given += ["-c", "128", "--json"]
    planned = json.loads(inside("plan", *given).stdout)
    [device] = planned["devices"]
    assert device["experts"] > 0
    assert planned["expert_slots"][0] == pytest.approx(32, abs=3)
    assert "everything but the experts fits on one device" in planned["notes"]
    assert any("of a token's about" in note for note in planned["notes"])
    done = inside("run", "-m", *given, "Hi", "-n", "4", "--temp", "0")
    experts = json.loads(done.stdout)["experts"]
    assert experts["hits"] > 0
    assert experts["on_cpu"] > 0
    assert experts["hit_rate"] == experts["hits"] / (experts["hits"] + experts["on_cpu"])
    whole = inside(
        "run", "-m", str(path), "--device", "vulkan", "-c", "128", "--json", "Hi", "-n", "2", "--temp", "0"
    )
    assert "experts" not in json.loads(whole.stdout)  # the device has all of them


@pytest.mark.slow
def test_two_devices_have_slots_for_more_experts(tmp_path: Path, slow_cpu: None) -> None:
    """Check two devices, of which one has everything except the experts, or all experts, too."""
    path = write(tmp_path)
    with hotset.load(path, device="vulkan", **SMALL) as loaded:
        expected = loaded.logits("Hello there").copy()
    how = {"device": ["vulkan:0", "vulkan:0"], "split": "neurons", **SMALL}
    with hotset.load(path, vram_budget=budget_of(path, 0.25), **how) as loaded:
        assert loaded.placement is not None
        assert [layer.device for layer in loaded.placement.layers] == [0, 1]
        one, other = loaded.placement.expert_slots
        assert min(one, other) > 12
        np.testing.assert_array_equal(loaded.logits("Hello there"), expected)
    all_of_them = hotset.plan(path, vram_budget=budget_of(path, 1.1), **how)
    assert all_of_them is not None
    assert all_of_them.expert_slots == (64,)


async def test_a_server_counts_experts(tmp_path: Path, slow_cpu: None) -> None:
    path = write(tmp_path)

    load = {"device": "vulkan", "vram_budget": budget_of(path, 0.5), **SMALL}
    async with tiny_server.client_of(path, load=load) as (client, _):
        counts = await tiny_server.metrics_after_an_answer(client)
        assert counts["hotset_expert_hits_total"] > 0
        assert counts["hotset_experts_on_cpu_total"] > 0
        assert counts["hotset_experts_fetched_total"] > 0


def test_tensors_that_stay_whole(tmp_path: Path, slow_cpu: None) -> None:
    path = write(tmp_path)
    found = hotset.plan(path, device="vulkan", vram_budget=budget_of(path, 0.5), split="layers", **SMALL)
    assert found is not None
    assert found.n_cpu_layers == 1
    assert not any(found.expert_slots)
    halves = write(tmp_path, T.F16)
    with pytest.raises(UnsupportedModelError, match="expert cache on Vulkan holds experts of the type F16"):
        hotset.plan(halves, device="vulkan", vram_budget=1.0, split="neurons", **SMALL)


@pytest.mark.parametrize("kind", ["discrete", "integrated"])
def test_the_cost_of_a_submission_decides(
    tmp_path: Path, slow_cpu: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = write(tmp_path)

    def pays() -> bool:
        found = hotset.plan(path, device="vulkan", vram_budget=budget_of(path, 0.5), **SMALL)
        assert found is not None
        return any(found.expert_slots)

    assert_cheap_submissions_decide(monkeypatch, kind, pays, dear=10.0)
