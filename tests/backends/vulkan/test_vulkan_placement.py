"""Models on Vulkan devices by the planner: budgets, --device auto, several devices, measured rates."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from backend_runs import logits_of, tokens
from byte_models import write_model
from cli_runs import inside
from tiny_gguf import write_llama
from vulkan_runs import stage_of, validated, vulkan

import hotset
from hotset.backends.device.planning import KEPT_FREE
from hotset.backends.vulkan import autotune, budget, detection, devices, planning
from hotset.backends.vulkan.devices import VulkanInfo, find_device
from hotset.backends.vulkan.kernels import Recorder
from hotset.backends.vulkan.pipelines import open_device
from hotset.backends.vulkan.report import VulkanRates
from hotset.backends.vulkan.shapes import ProductShapes, WorkgroupShape
from hotset.backends.vulkan.stage import VulkanStage
from hotset.errors import DeviceError, OutOfMemoryError, UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.thresholds import LayerThresholds
from hotset.placement import machine
from hotset.placement.table import CPU
from hotset.sparsity.thresholds import Calibrated, Thresholds

__all__ = ["validated"]  # the fixture
SMALL: dict[str, Any] = {"n_ctx": 128, "max_batch": 16, "n_threads": 1}
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
FAST, SLOW = VulkanRates(500e9, 1e-9, 1e-9), VulkanRates(500e9, 1e-3, 1e-2)


@pytest.fixture(autouse=True)
def slow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(machine.STAND_IN, cpu_read=1e7, launch=1e-9, sync=1e-6)  # a device pays for tiny models
    monkeypatch.setattr(machine, "STAND_IN", slow)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that makes the software driver look like measured hardware, and records requests."""
    asked: list[str] = []

    def be(rates: VulkanRates, **facts: Any) -> list[str]:
        there = [replace(info, kind="discrete", **facts) for info in devices.list_devices()]

        def measure(info: VulkanInfo) -> VulkanRates:
            asked.append(info.name)
            return rates

        for module in (devices, detection):
            monkeypatch.setattr(module, "list_devices", lambda: there)
        monkeypatch.setenv("HOTSET_AUTOTUNE", "0")
        monkeypatch.setattr(detection, "may_be_there", lambda: True)
        monkeypatch.setattr(planning, "measure_now", measure)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        of_cpu = {"read": 20e9, "gather": 12e9, "many": 1e11}
        monkeypatch.setattr(planning, "cpu_rates", lambda n_threads, progress: of_cpu)
        return asked

    return be


# -- bytes and dispatches ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_type", "options"),
    [
        ("f16", {"type_of": lambda _: GGMLType.Q4_0, "n_ff": 1024, "n_embd": 256}),
        ("q8_0", {"type_of": lambda _: GGMLType.Q6_K, "n_embd": 256, "n_ff": 256, "head_dim": 64}),
        ("f16", {"experts": (6, 2), "n_ff": 160, "n_embd": 96, "n_ff_shared": 32}),
    ],
    ids=["dense", "q8_0 cache", "experts"],
)
def test_planned_bytes_equal_used_bytes(tmp_path: Path, kv_type: Any, options: dict[str, Any]) -> None:
    path = write_llama(tmp_path / "m.gguf", **options)
    with open_gguf(path) as gguf:
        backend = vulkan(gguf, kv_type=kv_type, n_blocks=12)
        stage = stage_of(backend)
        facts = planning.model_facts(stage.graph, gguf.tensors, kv_type, 12, backend.max_batch)
        logits_of(backend, tokens(20), [1], [1])
        held = stage.opened.device.allocated
        assert held == sum(stage.nbytes.values())
        spare = 4 * (2 << 20)
        assert held <= facts.whole_bytes <= 1.34 * held + spare
        lowered = stage._program(frozenset())
        n = [sum(len(lowered.recorded(part, 1).dispatches) for part in ("body", "candidates"))]
        assert n == [budget.dispatches(stage.graph, gguf.tensors).total()]
        backend.close()


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_budget_is_a_promise(tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the text of float32 layers is the CPU's, wherever the layers are."""
    path = write_model(tmp_path / "model.gguf", n_layer=8, n_embd=192, n_ff=640)
    with hotset.load(path, device="cpu", **SMALL) as model:
        expected = model.generate("Hello", **GREEDY).text
    with open_gguf(path) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        facts = planning.model_facts(graph, gguf.tensors, "f16", 2, 16)
    layers = sum(layer.whole_bytes for layer in facts.layers)
    gib = (facts.whole_bytes - (1 - share) * layers) / 2**30
    with hotset.load(path, device="vulkan", vram_budget=gib, **SMALL) as model:
        placement = model.placement
        assert placement is not None
        assert placement.n_cpu_layers == round((1 - share) * 8)
        assert model.generate("Hello", **GREEDY).text == expected
        [memory] = model.device_memory()
        assert memory.used <= memory.planned.total <= gib * 2**30
        assert stage_of(model.backend).opened.device.allocated == memory.used  # type: ignore[arg-type]
    with pytest.raises(OutOfMemoryError, match="the smallest budget that works is"):
        hotset.load(path, device="vulkan", vram_budget=0.001, **SMALL)
    with pytest.raises(OutOfMemoryError, match="free on"):
        hotset.load(path, device="vulkan", vram_budget=1e5, **SMALL)


def test_two_devices_are_a_pipeline(tmp_path: Path) -> None:
    """Check that two logical devices of one driver give the bits of one."""
    path = write_llama(tmp_path / "m.gguf", n_layer=4, type_of=lambda _: GGMLType.Q4_0)
    with open_gguf(path) as gguf:
        ids = tokens(70)
        expected = logits_of(vulkan(gguf), ids, [64], [3, 1])
        two = vulkan(gguf, n_devices=2)
        first, second = two.stages
        assert isinstance(first, VulkanStage)
        assert first.opened.device is not stage_of(two).opened.device
        assert np.array_equal(logits_of(two, ids, [1, 65], [3, 1]), expected)
        assert len(two.device_bytes()) == 2
        three = vulkan(gguf, n_layers=3, n_devices=2, n_threads=1)
        assert three.stages[0].name == "cpu"
        assert np.array_equal(logits_of(three, ids, [], [0, 1]), logits_of(three, ids, [3], [2, 1]))
        two.close()
        three.close()
        del first, second
    name = f"vulkan:{find_device('vulkan').index}"
    path = write_model(tmp_path / "model.gguf", n_layer=8, n_embd=192, n_ff=640)
    with hotset.load(path, device="cpu", **SMALL) as model:
        text = model.generate("Hello", **GREEDY).text
    with hotset.load(path, device=(name, name), vram_budget=0.015, **SMALL) as model:
        assert model.placement is not None
        assert {place.device for place in model.placement.layers} == {0, 1}
        assert model.generate("Hello", **GREEDY).text == text


@pytest.mark.parametrize("n_layers", [None, 1])
def test_thresholds_with_a_placement(tmp_path: Path, n_layers: int | None) -> None:
    """Check that a device computes every channel, with the same results."""
    path, file = write_model(tmp_path / "model.gguf"), tmp_path / "model.thresholds"
    with open_gguf(path) as gguf:
        layers = (LayerThresholds(gate=0.1, attn_in=0.3),) * 2
        kept = [{"gate": 0.5, "attn_in": 0.5}] * 2
        Thresholds(Calibrated.of(gguf), layers, measured={"kept": kept}).save(file)
    texts = []
    for how in ({"device": "cpu"}, {"device": "vulkan", "n_gpu_layers": n_layers}):
        with hotset.load(path, thresholds=file, sparse_prompts=True, **how, **SMALL) as model:
            texts.append(model.generate("Hello", **GREEDY).text)
    assert texts[0] == texts[1]


def test_a_card_is_named_once(card: Any) -> None:
    card(FAST)
    with pytest.raises(DeviceError, match="is named twice"):
        detection.named_devices(("vulkan:0", "vulkan:0"))


# -- auto ----------------------------------------------------------------------------------------


def test_auto_takes_the_device_that_was_measured_faster(tmp_path: Path, card: Any) -> None:
    path = write_model(tmp_path / "model.gguf")
    asked = card(FAST)
    for _ in range(2):
        with hotset.load(path, device="auto", **SMALL) as model:
            assert model.backend.name == "vulkan"
            assert model.placement is not None
            assert "ms with only the CPU" in model.placement.notes[0]
    assert len(asked) == 1  # once for this driver
    card(FAST, driver="9.9.9")
    with hotset.load(path, device="auto", **SMALL) as model:
        pass
    assert len(asked) == 2


def test_auto_does_not_use_a_slow_device(tmp_path: Path, card: Any) -> None:
    path = write_model(tmp_path / "model.gguf")
    card(SLOW)
    with hotset.load(path, device="auto", **SMALL) as model:
        assert model.backend.name == "cpu"
        assert model.placement is None
        assert any("vulkan:0 is not used" in note and "not faster" in note for note in model.notes)


@pytest.mark.parametrize(
    "facts", [{"kind": "software"}, {"refusal": "only Vulkan 1.0"}], ids=["software", "refused"]
)
def test_auto_never_takes(tmp_path: Path, card: Any, facts: dict[str, Any], monkeypatch: Any) -> None:
    path = write_model(tmp_path / "model.gguf")
    asked = card(FAST)
    there = [replace(info, **facts) for info in devices.list_devices()]
    monkeypatch.setattr(detection, "list_devices", lambda: there)
    with hotset.load(path, device="auto", **SMALL) as model:
        assert model.backend.name == "cpu"
    assert not asked


def test_auto_where_the_device_fails(tmp_path: Path, card: Any) -> None:
    """Check a device that fails to open: the CPU computes, and a warning gives the reason."""
    from hotset import _core

    path = write_model(tmp_path / "model.gguf")
    card(FAST)
    _core.vulkan_fail("vkCreateDevice", 1, -3)
    with pytest.warns(UserWarning, match="could not be initialised"):
        model = hotset.load(path, device="auto", **SMALL)
    with model:
        assert model.backend.name == "cpu"
        assert model.generate("Hello", **GREEDY).text


def test_auto_keeps_layers_without_a_kernel_on_the_cpu(tmp_path: Path, card: Any) -> None:
    """Check such layers between layers of the device; an explicit --device raises an error instead."""
    odd = ("blk.2.ffn_up", "blk.4.ffn_down")

    def type_of(name: str) -> GGMLType:
        return GGMLType.IQ4_NL if name in odd else GGMLType.F32

    path = write_model(tmp_path / "model.gguf", n_layer=7, n_embd=64, n_ff=64, type_of=type_of)
    with hotset.load(path, device="cpu", **SMALL) as model:
        expected = model.generate("Hello", **GREEDY).text
    with pytest.raises(UnsupportedModelError, match=r"blk\.2: no Vulkan kernel computes the type IQ4_NL"):
        hotset.load(path, device="vulkan", **SMALL)
    card(FAST)
    with hotset.load(path, device="auto", **SMALL) as model:
        placement = model.placement
        assert placement is not None
        assert [place.device for place in placement.layers] == [0, 0, CPU, 0, CPU, 0, 0]
        assert "2 layers stay on the CPU: no Vulkan kernel computes the type IQ4_NL" in placement.notes
        assert [stage.name for stage in model.backend.stages].count("cpu") == 2  # type: ignore[attr-defined]
        assert model.generate("Hello", **GREEDY).text == expected
        [memory] = model.device_memory()
        assert memory.used <= memory.planned.limit
    card(replace(FAST, sync=1.0), driver="2")  # a round trip costs more than all layers
    with hotset.load(path, device="auto", n_gpu_layers=6, **SMALL) as model:
        assert model.placement is not None
        assert [place.device for place in model.placement.layers] == [CPU, 0, CPU, 0, CPU, 0, 0]
    with hotset.load(path, device="auto", **SMALL) as model:
        assert model.placement is None or model.placement.n_cpu_layers == 5
    with hotset.load(path, device="auto", cache_dir=tmp_path / "cache", **SMALL) as model:
        assert model.backend.name == "cpu"  # one processor must have all of it
        assert any("no Vulkan kernel computes the type IQ4_NL" in note for note in model.notes)


def test_auto_with_work_that_no_device_supports(tmp_path: Path, card: Any) -> None:
    path = write_model(tmp_path / "model.gguf")
    card(FAST)
    ram_budget = psutil.Process().memory_info().rss / 2**30 + 2  # includes the memory of earlier tests
    with pytest.warns(UserWarning, match="vulkan:0 is not used"):
        model = hotset.load(path, device="auto", ram_budget=ram_budget, **SMALL)
    with model:
        assert model.backend.name == "cpu"
    for changes in ({"speculate": "ngram"}, {"cache_dir": tmp_path / "cache"}):
        with hotset.load(path, device="auto", **changes, **SMALL) as model:
            assert model.backend.name == "vulkan"


def test_a_gpu_may_be_there(tmp_path: Path) -> None:
    assert detection.may_be_there(tmp_path, "win32")
    assert not detection.may_be_there(tmp_path, "linux")
    (tmp_path / "dev/dri").mkdir(parents=True)
    assert not detection.may_be_there(tmp_path, "linux")
    (tmp_path / "dev/dri/renderD128").touch()
    assert detection.may_be_there(tmp_path, "linux")


def test_memory_that_is_shared(card: Any) -> None:
    """Check the limits: a device's own free memory, or a share of the machine's memory."""
    info = replace(find_device("vulkan"), kind="discrete", free=8 << 30)
    assert planning.limit_of("vulkan:0", info, None).limit == (8 << 30) - KEPT_FREE
    shared = replace(info, kind="integrated")
    assert planning.limit_of("vulkan:0", shared, 2.5, free=4 << 30).limit == int(2.5 * 2**30)
    with pytest.raises(OutOfMemoryError, match=r"more than the 3 GiB"):
        planning.limit_of("vulkan:0", shared, 3.5, free=4 << 30)


# -- measurements and reports --------------------------------------------------------------------


def test_a_device_is_measured_once(tmp_path: Path) -> None:
    """Check a measurement with the kernels that run later; a damaged file is measured again."""
    info, kept = find_device("vulkan"), tmp_path / "machine.json"
    rates = planning.measured(info, path=kept)
    assert rates.read > 1e6
    assert 0 <= rates.launch < 1
    assert 0 <= rates.sync < 1
    never: Any = None
    assert planning.measured(info, path=kept, measure=never) == rates
    found = machine.known(kept)
    kept.write_text(json.dumps({key: {**value, "read": "much"} for key, value in found.items()}))
    assert planning.measured(info, path=kept, measure=lambda _: FAST) == FAST
    gc.collect()


def test_autotuning_measures_running_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check steps with the kernels that run later. Their memory is freed, and never exceeds the budget.

    Each step reads three times the bytes of the cache.
    """
    info = replace(find_device("vulkan"), kind="discrete")
    device, default = open_device(info), {name: (own,) for name, own in asdict(ProductShapes()).items()}
    monkeypatch.setattr(autotune, "CANDIDATES", default)
    monkeypatch.setattr(autotune, "SECONDS", 1e6)
    monkeypatch.setattr(autotune, "CACHE_BYTES", 1 << 20)
    ran, read = list[int](), [0]
    rerun, add = VulkanStage.rerun, Recorder.add

    def counted(self: Recorder, *arguments: Any) -> None:
        read[-1] += arguments[5] if len(arguments) > 5 else 0
        add(self, *arguments)

    def run(self: VulkanStage, n: int = 1) -> None:
        ran.append(n)
        read.append(0)
        rerun(self, n)

    monkeypatch.setattr(Recorder, "add", counted)
    monkeypatch.setattr(VulkanStage, "rerun", run)
    for width, limit, tuned in ((4096, 1 << 20, set()), (256, 64 << 20, {GGMLType.Q4_0})):
        monkeypatch.setattr(autotune, "WIDTH", width)
        device.limit(limit)
        assert autotune.tuned(info, device, [GGMLType.Q4_0]).tuned.keys() == tuned
        assert device.allocated == 0
    assert set(ran) == {1, 4, 8, 16, 24}
    assert 3 << 20 <= min(filter(None, read)) < 4 << 20  # in the steps that were recorded


GATES = 2  # from this kind of result on, a product of gates, whose workgroups are not tuned


def test_a_load_tunes_its_device_once(tmp_path: Path, card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the kernels get the measured shapes, and that the text is the same."""
    path = write_llama(tmp_path / "m.gguf", type_of=lambda _: GGMLType.Q4_0)
    chosen, asked = WorkgroupShape(8, 8), list[str]()

    @contextlib.contextmanager
    def measuring(info: VulkanInfo, device: Any, type_: GGMLType) -> Any:
        asked.append(type_.name)
        yield lambda shapes, name: 0.5 if getattr(shapes, name) == chosen else 1.0

    monkeypatch.setattr(autotune, "_steps", measuring)
    with open_gguf(path) as gguf:
        expected = logits_of(vulkan(gguf), tokens(9), [1, 2], [0])
        assert asked == []
        card(FAST)
        monkeypatch.setenv("HOTSET_AUTOTUNE", "1")
        for n in (1, 1):
            backend = vulkan(gguf)
            assert asked == ["Q4_0"] * n
            assert np.array_equal(logits_of(backend, tokens(9), [1, 2], [0]), expected)
            kernels = stage_of(backend).opened.kernels.compiled
            products = [key for key in kernels if key[0] == "rounded_few"]
            assert {key[4:6] for key in products if key[6] < GATES} == {chosen}
            backend.close()
    shown = inside("doctor").stdout
    assert (
        "Q4_0 8×8 and 8×8 for one token, 8×8 and 8×8 for several up to 8, 4 and 2 blocks ahead"
        in " ".join(shown.split())
    )


def test_doctor_and_plan_list_devices(tmp_path: Path) -> None:
    [one] = json.loads(inside("doctor", "--json").stdout)["vulkan"]["devices"]
    assert one["measured"]["read"] > 0
    assert one["unused"].startswith("a software driver")
    assert {"integer dot products"} <= set(one["features"])
    assert one["subgroup"] >= 4
    assert one["workgroups"]["default"]["one"] == [16, 16]
    assert one["workgroups"]["untuned"] == "a software driver"
    shown = inside("doctor").stdout
    path = write_model(tmp_path / "model.gguf")
    plan = inside("plan", str(path), "--device", "vulkan", "-c", "128")
    listed = inside("plan", str(path), "--device", "list").stdout
    for text in (" ".join(shown.split()), " ".join(plan.stderr.split())):
        assert "GB/s" in text
    for text in (" ".join(shown.split()), listed):
        assert "not used by --device auto: a software driver" in text
    found = json.loads(inside("plan", str(path), "--device", "vulkan", "-c", "128", "--json").stdout)
    assert found["devices"][0]["device"] == f"vulkan:{one['index']}"
    alone = inside("plan", str(path), "--device", "auto", returns=None)
    assert alone.returncode == 0, alone.stderr  # a plan of this machine's memory
    assert f"vulkan:{one['index']}" not in alone.stdout
