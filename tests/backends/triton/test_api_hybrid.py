"""Models on devices through the API: placement, budget, hotness, index. The CPU simulates the GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import N_PLANTED as N_FF
from byte_models import PLANTED_LAYERS as N_LAYER
from byte_models import counts, vocabulary, write_sparse
from tiny_gguf import write_llama

import hotset
from hotset.backends.triton import drivers, opening, planning
from hotset.errors import (
    DeviceError,
    FormatError,
    InvalidRequestError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from hotset.formats.powerinfer import GPUIndex, write_activations, write_gpu_index
from hotset.placement import detect, gather, machine, planner
from hotset.placement.table import CPU, Device
from hotset.report.experts import expert_counts
from hotset.sparsity import profile, sidecar

pytest.importorskip("hotset._core", reason="the native module is not built")

SMALL: dict[str, Any] = {"n_ctx": 128, "max_batch": 16, "n_threads": 1}
GIB = 2**30


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    # Simulate a slow CPU, so that placing a tiny model pays.
    slow = replace(
        machine.STAND_IN, cpu_read=1e7, cpu_gather=1e7, cpu_read_busy=1e7, cpu_gather_busy=1e7, sync=1e-6
    )
    monkeypatch.setattr(machine, "STAND_IN", slow)
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_sparse(tmp_path / "model.gguf", n_ff=N_FF, ranks=(32,) * N_LAYER)


@pytest.fixture
def expected(model: Path) -> Iterator[np.ndarray]:
    with hotset.load(model, device="cpu", **SMALL) as loaded:
        yield loaded.logits("Hello there").copy()


def budget(model: Path, fraction: float) -> float:
    """Return a budget in GiB between the smallest possible one (fraction 0) and the whole model (1)."""
    whole = hotset.plan(model, device="simulated", vram_budget=1.0, **SMALL)
    assert whole is not None
    assert whole.budget is not None
    planned = whole.budget.devices[0]
    low = planned.total - planned.neurons + whole.budget.stream
    return (low + fraction * (planned.total - low)) / GIB


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, atol=2e-3 * np.abs(b).max()))


def test_cpu_computes_without_a_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with hotset.load(model, **SMALL) as loaded:
        assert loaded.backend.name == "cpu"
        assert loaded.placement is None
        assert loaded.device_memory() == []
    assert hotset.plan(model, **SMALL) is None


def test_a_model_that_fits_is_wholly_on_the_device(model: Path, expected: np.ndarray) -> None:
    with hotset.load(model, device="simulated", vram_budget=1.0, **SMALL) as loaded:
        assert loaded.backend.name == "gpu"
        assert loaded.placement is not None
        assert loaded.placement.is_whole
        assert close(loaded.logits("Hello there"), expected)


@pytest.mark.parametrize("n_gpu_layers", [None, 2])
def test_a_moe_is_on_the_device_but_for_its_experts(tmp_path: Path, n_gpu_layers: int | None) -> None:
    path = write_llama(
        tmp_path / "experts.gguf", experts=(8, 2), n_layer=3, n_ff_shared=64,
        n_vocab=len(vocabulary()["tokenizer.ggml.tokens"]), keys=vocabulary(),
    )  # fmt: skip
    with hotset.load(path, device="cpu", **SMALL) as loaded:
        expected = loaded.logits("Hello there").copy()
    settings: dict[str, Any] = {"device": "simulated", "vram_budget": 1.0, "n_gpu_layers": n_gpu_layers}
    with hotset.load(path, **settings, **SMALL) as loaded:
        assert loaded.backend.name == "hybrid"
        assert loaded.placement is not None
        assert loaded.placement.n_cpu_layers == (0 if n_gpu_layers is None else 1)
        assert close(loaded.logits("Hello there"), expected)
        [memory] = loaded.device_memory()
        assert memory.used <= memory.planned.total


@pytest.fixture
def moe_layer(tmp_path: Path) -> Path:
    return write_llama(
        tmp_path / "moe_layer.gguf", experts=(8, 2), n_layer=3, n_ff=128,
        n_vocab=len(vocabulary()["tokenizer.ggml.tokens"]), keys=vocabulary(),
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rest_of_a_budget_becomes_slots_for_experts(moe_layer: Path, share: float) -> None:
    whole = hotset.plan(moe_layer, device="simulated", vram_budget=1.0, **SMALL)
    assert whole is not None
    assert whole.expert_slots == (24,)
    assert whole.budget is not None
    planned = whole.budget.devices[0]
    assert planned.experts > 24 * 3 * 128 * 64 * 4
    gib = (planned.total - (1 - share) * planned.experts) / GIB
    with hotset.load(moe_layer, device="simulated", vram_budget=gib, **SMALL) as loaded:
        placement = loaded.placement
        assert placement is not None
        [n_slots] = placement.expert_slots
        assert n_slots == {0.0: 0, 1.0: 24}.get(share, n_slots)
        assert (0 < n_slots < 24) == (share == 0.3)
        assert placement.n_cpu_layers == 0
        assert f"{n_slots} of 24 experts have a slot" in " ".join(placement.notes)
        assert whole.predicted is not None
        assert placement.predicted is not None
        assert (placement.predicted.total > whole.predicted.total) == (share < 1)
        found = [loaded.logits("Hello there").copy() for _ in range(3)]
        [memory] = loaded.device_memory()
        assert memory.used <= memory.planned.total <= gib * GIB
    with hotset.load(moe_layer, device="simulated", vram_budget=1.0, **SMALL) as loaded:
        expected = loaded.logits("Hello there")
        for logits in found:
            np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize(("layers", "n_slots"), [((), 24), ((0,), 16), ((1, 7), 16), (range(1024), 0)])
def test_experts_that_are_left_to_the_cpu(moe_layer: Path, layers: Sequence[int], n_slots: int) -> None:
    with hotset.load(moe_layer, device="simulated", vram_budget=1.0, cpu_experts=layers, **SMALL) as loaded:
        assert loaded.placement is not None
        assert loaded.placement.expert_slots == (n_slots,)
        assert loaded.placement.n_cpu_layers == 0
        found = loaded.logits("Hello there").copy()
        [memory] = loaded.device_memory()
        assert memory.used <= memory.planned.total
    with hotset.load(moe_layer, device="simulated", vram_budget=1.0, **SMALL) as loaded:
        np.testing.assert_array_equal(loaded.logits("Hello there"), found)


@pytest.mark.parametrize("forced", ["", "cpu", "fetch"])
def test_plan_names_who_computes_missing_experts(
    moe_layer: Path, forced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = hotset.plan(moe_layer, device="simulated", vram_budget=1.0, **SMALL)
    assert whole is not None
    assert whole.budget is not None
    assert whole.fetching == (None,)  # all experts have a slot
    planned = whole.budget.devices[0]
    gib = (planned.total - 0.4 * planned.experts) / GIB
    monkeypatch.setenv("HOTSET_EXPERT_MISSES", forced)
    with hotset.load(moe_layer, device="simulated", vram_budget=gib, **SMALL) as loaded:
        placement = loaded.placement
        assert placement is not None
        [n_slots], [fetching] = placement.expert_slots, placement.fetching
        said = " ".join(placement.notes)
        assert (fetching is not None) == (forced != "cpu")
        assert ("experts that a token misses in a layer" in said) == (fetching is not None)
        assert 0 < n_slots < 24
        found = [loaded.logits("Hello there, and more of a prompt") for _ in range(2)]
        [memory] = loaded.device_memory()
        assert memory.used <= memory.planned.total <= gib * GIB
        counts = expert_counts(loaded.decided.graph, loaded.backend, None)
        assert counts is not None
        if fetching is None:
            assert counts.streamed == 0
        else:
            assert fetching.n_spare >= 2
            assert ("simulated fetches 2 of 2 experts" in said) or not forced
            assert counts.streamed > 0  # at least by the prompt
            # Slots of both kinds stay within the bytes planned for experts, and use most of them.
            assert memory.planned.experts * 0.8 < memory.measured["experts"] <= memory.planned.experts
        assert counts.on_cpu > 0 or forced != "cpu"
        assert counts.on_cpu == 0 or forced != "fetch"
    with hotset.load(moe_layer, device="simulated", vram_budget=1.0, **SMALL) as loaded:
        expected = loaded.logits("Hello there, and more of a prompt")
    for logits in found:
        np.testing.assert_array_equal(logits, expected)


def test_note_reports_the_experts(moe_layer: Path) -> None:
    from cli_runs import hotset as outside
    from cli_runs import inside

    device = ("--device", "simulated", "--vram-budget", 1, "-c", 128)
    asked = ("run", moe_layer, "Hello there", "-n", 6, "--temp", 0, *device)
    said = inside(*asked).stderr
    assert "experts were in the cache" in said
    facts = json.loads(inside(*asked, "--json").stdout)
    experts = facts["experts"]
    assert experts["hits"] + experts["on_cpu"] == 2 * 3 * (facts["prompt_tokens"] + len(facts["tokens"]) - 1)
    assert 0 < experts["fetched"] <= 24
    assert 0 < experts["hit_rate"] < 1
    assert experts["read"] == 0
    assert facts["placement"]["devices"][0]["experts"] > 0
    budgeted = ("run", moe_layer, "Hello there", "-n", 6, "--temp", 0, "-c", 128, "--ram-budget", 0.5)
    experts = json.loads(outside(*budgeted, "--json").stdout)["experts"]  # (this process is larger)
    assert experts["hits"] + experts["read"] > 0  # everything that fits may have been read earlier
    assert experts["on_cpu"] == experts["fetched"] == 0
    assert "experts were in the cache" in outside(*budgeted).stderr
    alone = inside("run", moe_layer, "Hello there", "-n", 2, "--temp", 0, "--device", "cpu")
    assert "experts were" not in alone.stderr


async def test_a_server_counts_experts(moe_layer: Path) -> None:
    tiny_server = pytest.importorskip("tiny_server", reason="the server's packages are not there")

    async with tiny_server.client_of(
        moe_layer, load={"n_ctx": 64, "device": "simulated", "vram_budget": 1.0}
    ) as (
        client,
        _,
    ):
        counts = await tiny_server.metrics_after_an_answer(client)
        assert counts["hotset_experts_on_cpu_total"] > 0
        assert counts["hotset_experts_fetched_total"] > 0
        assert counts["hotset_experts_read_total"] == 0
        assert "hotset_expert_hits_total" in counts
        plan = (await client.get("/plan")).json()
        assert plan["placement"]["devices"][0]["experts"] > 0


def test_experts_with_predictors_stay_on_the_cpu(tmp_path: Path) -> None:
    tiny_models = pytest.importorskip("tiny_models")
    recipe = tiny_models.EXPERTS["turbosparse-mixtral"]
    path = tiny_models.to_gguf(recipe, tiny_models.build(recipe), tmp_path)
    with pytest.raises(UnsupportedModelError, match="experts with predictors of their own are computed on"):
        hotset.load(path, device="simulated", vram_budget=1.0, **SMALL)


@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_within_a_budget_neurons_are_split_and_the_answer_is_the_same(
    model: Path, expected: np.ndarray, fraction: float
) -> None:
    write_activations(model.parent / "activation", counts(100))
    gib = budget(model, fraction)
    with hotset.load(model, device="simulated", vram_budget=gib, **SMALL) as loaded:
        placement = loaded.placement
        assert placement is not None
        assert loaded.backend.name == "hybrid"
        assert any(place.is_split for place in placement.layers)
        assert placement.hot_share is not None
        assert placement.served_share is not None
        assert 0 < placement.hot_share < placement.served_share
        assert close(loaded.logits("Hello there"), expected)
        [memory] = loaded.device_memory()
        assert memory.used <= memory.planned.total <= gib * GIB
        assert memory.planned.total >= 0.95 * gib * GIB
        answers = loaded.generate_many(["Hello", "World, hello"], max_tokens=5, temperature=0)
    with hotset.load(model, device="cpu", **SMALL) as alone:
        for prompt, answer in zip(["Hello", "World, hello"], answers, strict=True):
            assert alone.generate(prompt, max_tokens=5, temperature=0).tokens == answer.tokens


def test_two_devices_follow_one_another(model: Path, expected: np.ndarray) -> None:
    half = budget(model, 0.0) * 0.75
    with hotset.load(model, device=["simulated", "simulated"], vram_budget=half, **SMALL) as loaded:
        placement = loaded.placement
        assert placement is not None
        assert placement.devices == ("simulated", "simulated")
        owners = [place.device for place in placement.layers]
        assert owners == sorted(owners)
        assert {0, 1} <= set(owners)
        assert placement.budget is not None
        assert all(planned.total <= half * GIB for planned in placement.budget.devices)
        assert close(loaded.logits("Hello there"), expected)
        for memory in loaded.device_memory():
            assert 0 < memory.used <= memory.planned.total


def test_requested_number_of_layers_is_placed(model: Path, expected: np.ndarray) -> None:
    with hotset.load(model, device="simulated", vram_budget=1.0, n_gpu_layers=2, **SMALL) as loaded:
        assert loaded.placement is not None
        assert [place.device for place in loaded.placement.layers] == [CPU] * 4 + [0, 0]
        assert close(loaded.logits("Hello there"), expected)
    with hotset.load(model, n_gpu_layers=0, **SMALL) as loaded:
        assert loaded.placement is None


def test_neurons_are_split_only_if_useful(model: Path) -> None:
    gib = budget(model, 0.5)
    settings: dict[str, Any]
    for settings in ({"split": "layers"}, {"sparsity": "dense"}):
        found = hotset.plan(model, device="simulated", vram_budget=gib, **settings, **SMALL)
        assert found is not None
        assert not any(place.is_split for place in found.layers)
        assert found.n_cpu_layers > 0


# -- hotness -------------------------------------------------------------------------------------


def test_a_short_text_is_counted_once_and_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = gather.run_builtin
    monkeypatch.setattr(gather, "run_builtin", lambda *a: runs.append(1) or run(*a))
    gib = budget(model, 0.5)
    for _ in range(2):
        found = hotset.plan(model, device="simulated", vram_budget=gib, **SMALL)
        assert found is not None
        assert "a short text that comes with hotset" in " ".join(found.notes)
    assert len(runs) == 1
    assert not profile.profile_path(model).exists()


def test_profile_of_another_model_is_ignored_with_a_note(model: Path) -> None:
    layers = tuple(layer.astype(np.uint64) for layer in counts(200))
    other = profile.profile_path(model)
    profile.Profile(layers, 1000, "of another file", ("x",)).save(other)
    gib = budget(model, 0.5)

    def notes() -> list[str]:
        found = hotset.plan(model, device="simulated", vram_budget=gib, **SMALL)
        assert found is not None
        return [note for note in found.notes if note.startswith("hotness")]

    left_out = f"; the profile {other} was taken of another model file and is left out"
    for _ in range(2):  # counting now, and using the stored counts
        (note,) = notes()
        assert note.startswith("hotness from a short text")
        assert note.endswith(left_out)
    write_activations(model.parent / "activation", counts(100))
    (note,) = notes()
    assert note.endswith(f"as published{left_out}")
    other.unlink()
    (note,) = notes()
    assert note.endswith("as published")


def test_counts_are_taken_from_where_they_are(model: Path) -> None:
    gib = budget(model, 0.4)

    def hot() -> tuple[list[int], str]:
        found = hotset.plan(model, device="simulated", vram_budget=gib, **SMALL)
        assert found is not None
        masks = [place.hot for place in found.layers if place.hot is not None]
        return [int(np.flatnonzero(mask)[0]) for mask in masks if mask.any()], " ".join(found.notes)

    write_activations(model.parent / "activation", counts(100))
    first, notes = hot()
    assert "as published" in notes
    assert first
    assert set(first) <= {0, 100}  # the hottest first; the first neurons if the budget has room for more
    with hotset.load(model, device="cpu", **SMALL) as loaded:
        own = profile.Profile(
            tuple(layer.astype(np.uint64) for layer in counts(200)), 1000, sidecar.fingerprint(loaded.gguf),
            ("x",),
        )  # fmt: skip
    own.save(profile.profile_path(model))
    assert "profile.hotset.gguf, 1000 tokens" in hot()[1]
    given = model.parent / "given.gguf"
    own.save(given)
    found = hotset.plan(model, device="simulated", vram_budget=gib, profile=given, **SMALL)
    assert found is not None
    assert "the profile that was given" in " ".join(found.notes)
    for place in found.layers:
        if place.is_split and place.hot is not None and place.hot.any():
            assert place.hot[200:264].all()


# -- the index -----------------------------------------------------------------------------------


def test_an_index_says_which_neurons_are_on_the_device(model: Path, expected: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    masks = [rng.random(N_FF) < 0.3 for _ in range(N_LAYER)]
    masks[1][:] = False
    masks[2][:] = True
    path = model.parent / "model.generated.gpuidx"
    write_gpu_index(path, GPUIndex(1 << 20, masks))
    with hotset.load(model, device="simulated", vram_budget=1.0, gpu_index=path, **SMALL) as loaded:
        assert loaded.placement is not None
        first, second, third = (place.hot for place in loaded.placement.layers[:3])
        assert np.array_equal(first, masks[0])
        assert second is not None
        assert not second.any()
        assert third is None
        assert close(loaded.logits("Hello there"), expected)
    with pytest.raises(OutOfMemoryError, match=r"the GPU index needs 0\.\d+ GiB"):
        hotset.plan(model, device="simulated", vram_budget=0.001, gpu_index=path, **SMALL)
    write_gpu_index(path, GPUIndex(1, [mask[:100] for mask in masks]))
    with pytest.raises(FormatError, match="each of 512 neurons"):
        hotset.plan(model, device="simulated", vram_budget=1.0, gpu_index=path, **SMALL)


# -- kept plans and refused ones -----------------------------------------------------------------


def test_a_placement_is_solved_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []
    solve = planner.solve
    monkeypatch.setattr(planner, "solve", lambda *a, **k: solved.append(1) or solve(*a, **k))
    gib = budget(model, 0.5)
    solved.clear()
    settings: dict[str, Any] = {"device": "simulated", "vram_budget": gib, **SMALL}
    first, again = hotset.plan(model, **settings), hotset.plan(model, **settings)
    assert first is not None
    assert again is not None
    assert len(solved) == 1
    assert again.predicted == first.predicted
    assert again.budget == first.budget
    for a, b in zip(first.layers, again.layers, strict=True):
        assert a.device == b.device
        assert np.array_equal(a.hot, b.hot) if a.hot is not None else b.hot is None
    hotset.plan(model, reset_gpu_index=True, **settings)
    hotset.plan(model, **{**settings, "vram_budget": 1.1 * gib})
    assert len(solved) == 3


def test_small_changes_of_free_memory_keep_the_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round the free memory down to the limit, so that a small change finds the same plan again."""
    solved = []
    solve = planner.solve
    monkeypatch.setattr(planner, "solve", lambda *a, **k: solved.append(1) or solve(*a, **k))
    limits = []
    for free in (3 * GIB + 5, 3 * GIB + 12_345_678, 2 * GIB):
        monkeypatch.setattr(planning, "free_bytes", lambda device, free=free: free)
        found = hotset.plan(model, device="simulated", **SMALL)
        assert found is not None
        assert found.budget is not None
        limits += [planned.limit for planned in found.budget.devices]
        assert limits[-1] <= free
    assert limits[0] == limits[1] > limits[2]
    assert len(solved) == 2


def test_stored_plan_that_does_not_fit_is_solved_again(model: Path, home: Path) -> None:
    """Check plans of another version and damaged ones: a kept plan is only a hint for the solver."""
    settings: dict[str, Any] = {"device": "simulated", "vram_budget": budget(model, 0.5), **SMALL}
    for path in (home / "cache" / "placements").glob("*.npz"):
        path.unlink()
    first = hotset.plan(model, **settings)
    assert first is not None
    (path,) = (home / "cache" / "placements").glob("*.npz")
    with np.load(path) as kept:
        arrays = dict(kept)
    whole = {"how": arrays["how"], "devices": np.zeros(N_LAYER, np.int64)}  # every layer, all of it
    short = {**arrays, "devices": arrays["devices"][1:]}
    for wrong in (whole, short, {"how": arrays["how"]}):
        np.savez(path, **wrong)
        again = hotset.plan(model, **settings)
        assert again is not None
        assert again.predicted == first.predicted
        assert again.budget == first.budget
        assert again.budget is not None
        assert all(planned.total <= planned.limit for planned in again.budget.devices)
    path.write_bytes(b"PK")
    again = hotset.plan(model, **settings)
    assert again is not None
    assert again.predicted == first.predicted


def test_impossible_settings_give_one_message(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"cannot be placed in 0.00 GiB on simulated: the smallest budget"
    ):
        hotset.load(model, device="simulated", vram_budget=0.0001, **SMALL)
    with pytest.raises(OutOfMemoryError, match="more than the"):
        hotset.load(model, device="simulated", vram_budget=1e5, **SMALL)
    with pytest.raises(InvalidRequestError, match="device='cpu' cannot be combined"):
        hotset.load(model, device="cpu", vram_budget=1.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(DeviceError, match="no device was found"):
        hotset.load(model, vram_budget=1.0)


def test_the_smallest_budget_that_is_named_works(model: Path) -> None:
    with pytest.raises(OutOfMemoryError) as error:
        hotset.plan(model, device="simulated", vram_budget=0.0001, **SMALL)
    named = float(str(error.value).split("works is ")[1].split(" GiB")[0])
    assert hotset.plan(model, device="simulated", vram_budget=named, **SMALL) is not None


def test_a_device_that_has_less_than_it_said_gets_a_smaller_plan_offered(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OutOfMemoryError("cuda:0 ran out of memory while loading the model")

    monkeypatch.setattr(opening, "open_chain", fails)
    with pytest.raises(OutOfMemoryError, match=r"ran out of memory .*vram_budget=0\.0\d+"):
        hotset.load(model, device="simulated", vram_budget=budget(model, 0.5), **SMALL)


def test_gpu_without_libraries_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "detect_gpu", lambda: drivers.GPU("NVIDIA", "NVIDIA GeForce", 1))
    monkeypatch.setattr(drivers, "missing_libraries", lambda: ["torch"])
    with pytest.warns(UserWarning, match="torch is not installed: pip install '.\\[gpu\\]'"):
        loaded = hotset.load(model, **SMALL)
    assert loaded.backend.name == "cpu"
    loaded.close()


def test_unusable_default_gpu_gives_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_sparse(tmp_path / "wide.gguf", n_embd=128)  # heads of a size for a q8_0 cache
    monkeypatch.setattr(detect, "wanted_devices", lambda settings: (("simulated",), None))
    with pytest.warns(UserWarning, match="the GPU is not used: a q8_0 cache runs on the CPU only"):
        loaded = hotset.load(model, kv_type="q8_0", **SMALL)
    assert loaded.backend.name == "cpu"
    assert loaded.placement is None
    loaded.close()
    monkeypatch.setattr(planning, "limit_of", lambda name, context, budget: Device(name, 1000, 0))
    with pytest.warns(UserWarning, match="the GPU is not used: the model cannot be placed"):
        assert hotset.plan(model, **SMALL) is None


def test_requested_device_must_fit_the_model(tmp_path: Path) -> None:
    model = write_sparse(tmp_path / "wide.gguf", n_embd=128)
    for make in (hotset.load, hotset.plan):
        with pytest.raises(UnsupportedModelError, match="a q8_0 cache runs on the CPU only: use f16"):
            make(model, device="simulated", kv_type="q8_0", **SMALL)


def test_out_of_memory_in_a_step_names_remedies(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OutOfMemoryError("cuda:0 ran out of memory while computing 5 tokens")

    with hotset.load(model, device="simulated", vram_budget=budget(model, 0.5), **SMALL) as loaded:
        with monkeypatch.context() as patch:
            patch.setattr(type(loaded.backend), "step", fails)
            with pytest.raises(OutOfMemoryError, match=r"computing 5 tokens; try vram_budget=0\.0\d+"):
                loaded.generate("Hello", max_tokens=2, temperature=0)
        answer = loaded.generate("Hello", max_tokens=2, temperature=0, ignore_eos=True)
        assert answer.finish_reason == "length"  # and the next one works


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3-long", "granite", "smollm3", "glm4", "phi3-relu"])
def test_every_architecture_is_planned_and_placed(tmp_path: Path, name: str) -> None:
    """Check the rotation by context with a model wholly on the device, and with layers on the CPU."""
    pytest.importorskip("transformers")
    from tiny_models import RECIPES, build, to_gguf

    path = to_gguf(RECIPES[name], build(RECIPES[name]), tmp_path)
    ids = np.random.default_rng(0).integers(0, 320, 60).tolist()
    with hotset.load(path, device="cpu", **SMALL) as loaded:
        wanted = loaded.logits(ids)
    for n_gpu_layers in (None, 1):
        settings = {"device": "simulated", "vram_budget": 1.0, "n_gpu_layers": n_gpu_layers, **SMALL}
        planned = hotset.plan(path, **settings)
        assert planned is not None
        assert planned.is_whole == (n_gpu_layers is None)
        with hotset.load(path, **settings) as loaded:
            assert close(loaded.logits(ids), wanted)
