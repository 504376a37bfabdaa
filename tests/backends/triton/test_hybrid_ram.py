"""A device under a RAM budget gives the same bits as without one.

The CPU's weights come through a store, and the device's weights are not kept in RAM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import logits_of, tokens
from byte_models import vocabulary, write_sparse
from cases import quick_are, quick_if
from cli_runs import inside
from fuzz import fuzz_reads
from sparse_runs import N_FF, hot_neurons, prepared, write
from stored_weights import least_of
from tiny_gguf import write_llama

torch = pytest.importorskip("torch")

from expert_models import FORMS  # noqa: E402
from expert_models import model as write_experts  # noqa: E402
from hybrid_runs import ORDERS, chain, split, whole  # noqa: E402

import hotset  # noqa: E402
from hotset import _core  # noqa: E402
from hotset.backends.cpu.backend import CpuBackend  # noqa: E402
from hotset.backends.pipeline import ChainBackend  # noqa: E402
from hotset.backends.stage import BackendOptions  # noqa: E402
from hotset.backends.triton.stage import GpuStage  # noqa: E402
from hotset.errors import DeviceError, OutOfMemoryError, ReadError  # noqa: E402
from hotset.formats.gguf import GGUFFile, open_gguf  # noqa: E402
from hotset.formats.overlay import Overlay  # noqa: E402
from hotset.formats.powerinfer import GPUIndex, write_activations, write_gpu_index  # noqa: E402
from hotset.formats.quants import GGMLType as T  # noqa: E402
from hotset.model.config import config_from_gguf  # noqa: E402
from hotset.model.decoder import describe  # noqa: E402
from hotset.model.graph import Graph  # noqa: E402
from hotset.offload.weight_store import StoredWeights, Use, sizes_of  # noqa: E402
from hotset.placement import ram  # noqa: E402
from hotset.placement.build import host_part, open_placed  # noqa: E402
from hotset.placement.table import CPU, Placement  # noqa: E402
from hotset.report.experts import expert_counts  # noqa: E402

SPLITS = [*range(20, 30)]
GIB = 2**30


def described(gguf: GGUFFile, mode: str) -> tuple[Graph, Overlay]:
    """Return the graph and the weights of a model. mode: "" for an MoE model."""
    if mode:
        ready, graph = prepared(gguf, mode)
        return graph, ready.weights
    return describe(config_from_gguf(gguf), gguf.tensors), Overlay(gguf)


def chains(
    gguf: GGUFFile, mode: str, placement: Placement, shares: Sequence[float], **options: Any
) -> Iterator[tuple[ChainBackend, StoredWeights | None]]:
    """Yield the engine without a budget, then with the least budget plus each share of its useful rest."""
    graph, files = described(gguf, mode)
    given: dict[str, Any] = {
        "n_blocks": 8, "max_batch": 48, "kv_type": "f32", "n_threads": 2, "sparse": mode != "dense",
        **options,
    }  # fmt: skip
    yield chain(placement, files, graph, **given), None
    part = host_part(placement, graph)
    for share in shares:
        use = Use(sparse=given["sparse"], helped=part.helped, step=48)
        sizes = sizes_of(part.graph, files.tensors, use)
        n_bytes = sizes.least_of_all + int(share * (sizes.all - sizes.least_of_all))
        weights = StoredWeights(files, part.graph, n_bytes, use, reader=_core.Reader(False, 4), gap=4096)
        backend = chain(placement, weights, graph, **given)
        weights.start_counting()
        yield backend, weights


def assert_same_bits(found: Iterator[tuple[ChainBackend, StoredWeights | None]]) -> list[StoredWeights]:
    ids = tokens(30)
    expected, seen = None, []
    for backend, weights in found:
        logits = [logits_of(backend, ids, splits, [2]) for splits in (SPLITS, [])]
        backend.close()
        if weights is not None:
            seen.append(weights)
        if expected is None:
            expected = logits
        for one, other in zip(logits, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    return seen


@pytest.mark.parametrize(
    "type_",
    [*(pytest.param(t, marks=pytest.mark.slow) for t in (T.F32, T.Q8_0)), T.Q4_0],
    ids=lambda t: t.name,
)
@pytest.mark.parametrize(
    ("model", "dialect"),
    quick_if(
        lambda model, dialect: (model, dialect) in (("bamboo", "powerinfer"), ("opt", "gguf")),
        ["llama", "bamboo", "opt", "falcon-40b"], ["powerinfer", "gguf"],
    ),
)  # fmt: skip
def test_cold_neurons_come_through_the_store(tmp_path: Path, model: str, dialect: Any, type_: T) -> None:
    """Check models with and without a gate, a predictor, and a neuron-major down projection.

    They decode, and run a prompt whose cold rows stream to the device.
    """
    gguf = write(tmp_path, model, type_, dialect=dialect)
    for mode in ("exact", "predicted") if dialect == "powerinfer" else ("exact",):
        least, some, all_ = assert_same_bits(chains(gguf, mode, split(0.3), [0.0, 0.5, 1.0], stream_from=16))
        assert least.counts().misses > some.counts().misses > all_.counts().misses == 0
        assert all_.store is not None
        assert all_.store.is_whole


@pytest.mark.parametrize(
    ("mode", "owners"),
    quick_if(
        lambda mode, owners: ORDERS.index(owners) == (0 if mode == "exact" else 3),
        ["exact", "predicted"],
        ORDERS,
    ),
    ids=str,
)
def test_layers_of_the_cpu_stay_or_stream(tmp_path: Path, owners: list[int], mode: str) -> None:
    """Check CPU layers at any place next to split layers. Those that do not fit are read in each step."""
    gguf = write(tmp_path, "bamboo", T.Q8_0, ranks=(32, 64, 32))
    least, _, all_ = assert_same_bits(chains(gguf, mode, split(0.4, devices=owners), [0.0, 0.3, 1.0]))
    assert CPU in owners or least.counts().bytes_streamed == 0
    assert owners.count(CPU) < 2 or least.counts().bytes_streamed > 0
    assert all_.counts().bytes_streamed == 0


def test_a_dense_model_is_split_by_layers(tmp_path: Path) -> None:
    gguf = open_gguf(write_llama(tmp_path / "m.gguf", n_layer=4))
    least, _ = assert_same_bits(chains(gguf, "dense", whole([CPU, CPU, 0, 0]), [0.0, 1.0]))
    assert least.store is None
    assert least.counts().bytes_streamed > 0


def test_weights_on_a_device_are_not_in_memory(tmp_path: Path) -> None:
    gguf = write(tmp_path, "bamboo", T.Q8_0)
    ready, graph = prepared(gguf, "predicted")
    placement = split(0.3)
    part = host_part(placement, graph)
    sizes = sizes_of(part.graph, ready.weights.tensors, Use(sparse=True, helped=part.helped))
    n_cold = sum(int((~hot_neurons(0.3, N_FF, i)).sum()) for i in range(2))
    rows = 3 * 64 * 34 // 32  # bytes of a neuron that is 64 wide
    assert n_cold * rows <= sizes.most <= n_cold * (rows + 3 * 64)
    vectors = 4 * 64 * 4
    embedding = ready.weights.tensors["token_embd.weight"].nbytes
    assert sizes.fixed <= vectors
    assert sizes.pieces == ()
    assert sizes.all <= sizes.most + vectors + embedding + 64


def test_a_model_that_is_wholly_on_a_device_leaves_its_embedding(tmp_path: Path) -> None:
    gguf = write(tmp_path, "bamboo", T.Q8_0)
    ready, graph = prepared(gguf, "exact")
    placement, ids = whole([0, 0]), tokens(20)
    options = BackendOptions(n_blocks=8, max_batch=48, kv_type="f32", sparse=True)
    expected = logits_of(open_placed(placement, ready.weights, graph, options), ids, [], [2])
    part, use = host_part(placement, graph), Use(sparse=True, step=48)
    sizes = sizes_of(part.graph, ready.weights.tensors, use)
    weights = StoredWeights(
        ready.weights, part.graph, sizes.least_of_all, use, reader=_core.Reader(False, 4), gap=0
    )
    assert weights.store is None
    backend = open_placed(placement, weights, graph, options)
    np.testing.assert_array_equal(logits_of(backend, ids, [], [2]), expected)
    assert weights.counts().bytes_read > 0


@pytest.mark.parametrize("n", [1, 30])
def test_failed_read_ends_only_its_step(tmp_path: Path, n: int) -> None:
    """Check failed reads of the embedding, in the CPU worker, and of rows that stream to the device."""
    gguf = write(tmp_path, "bamboo", T.Q8_0)
    (plain, _), (backend, weights) = chains(gguf, "exact", split(0.3), [0.0], stream_from=16)
    assert weights is not None
    ids = tokens(n)
    expected = logits_of(plain, ids, [], [2])
    messages = []
    for seed in range(12):
        weights.reader.inject_faults(0.3, seed)
        try:
            np.testing.assert_array_equal(logits_of(backend, ids, [], [2]), expected)
        except (DeviceError, ReadError) as error:
            messages.append(str(error))
        weights.reader.inject_faults(0, 0)
        np.testing.assert_array_equal(logits_of(backend, ids, [], [2]), expected)
    assert all(str(gguf.path) in message for message in messages)
    of_the_service = [message for message in messages if "computation of layer" in message]
    assert len(of_the_service) < len(messages)
    assert bool(of_the_service) == (n == 1)


@pytest.mark.parametrize("form", quick_are(("shared",), ["shared", "biased neuron-major", "one by one"]))
def test_experts_come_through_the_store(tmp_path: Path, form: str) -> None:
    """Check the CPU's experts, and experts of a device's cache that are read from the file if necessary."""
    gguf = write_experts(tmp_path, **FORMS.get(form, {"one_by_one": True}))
    for n_slots in (0, 5):
        least, all_ = assert_same_bits(chains(gguf, "", whole([0, 0]), [0.0, 1.0], expert_slots=n_slots))
        assert all_.counts().misses == 0
        assert (all_.counts().bytes_read == 0) == (form != "one by one" or not n_slots)
        assert (least.store is None) == (form == "one by one")
        assert least.store is None or least.counts().misses > 0


def test_experts_of_the_cpu_and_of_devices(tmp_path: Path) -> None:
    gguf = write_experts(tmp_path, **FORMS["shared"])
    assert_same_bits(chains(gguf, "", whole([CPU, 0]), [0.0, 0.5, 1.0], expert_slots=3))


def test_unreadable_expert_ends_only_its_step(tmp_path: Path) -> None:
    gguf = write_experts(tmp_path, **FORMS["shared"])
    (plain, _), (backend, weights) = chains(gguf, "", whole([0, 0]), [0.0], expert_slots=64)
    assert weights is not None
    ids = tokens(12)
    expected = logits_of(plain, ids, [*range(4, 12)], [2])
    messages: list[str] = []
    for seed in range(4):
        weights.reader.inject_faults(0.2, seed)
        try:
            np.testing.assert_array_equal(logits_of(backend, ids, [*range(4, 12)], [2]), expected)
        except (DeviceError, ReadError) as error:
            messages.append(str(error))
        weights.reader.inject_faults(0, 0)
        np.testing.assert_array_equal(logits_of(backend, ids, [*range(4, 12)], [2]), expected)
    assert len(messages) > 1
    assert all(str(gguf.path) in message for message in messages)
    assert backend.expert_counts().hits > 0


# ---- from the model's name to the answer


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with predictors and published activations. The budget excludes the program itself."""
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(ram, "own_memory", lambda: 0)
    monkeypatch.setattr(ram, "PROGRAM", 0)
    path = write_sparse(tmp_path / "model.gguf", n_ff=512, ranks=(32,) * 4)
    rng = np.random.default_rng(4)
    fires = [np.sort(rng.integers(1, 100, 512))[::-1].astype(np.uint64) for _ in range(4)]
    write_activations(tmp_path / "activation", fires)
    return path


def beside(path: Path, what: str, **more: Any) -> dict[str, Any]:
    """Return settings with a device that has whole layers, or some neurons of all layers."""
    settings = {
        "device": "simulated",
        "vram_budget": 1.0,
        "n_ctx": 256,
        "max_batch": 96,
        "n_threads": 1,
        **more,
    }
    if what == "layers":
        return settings | {"n_gpu_layers": 2}
    index = path.parent / "gpu.index"
    write_gpu_index(index, GPUIndex(1 << 20, [hot_neurons(0.4, 512, i) for i in range(4)]))
    return settings | {"gpu_index": index}


@pytest.mark.parametrize(
    ("what", "sparsity"),
    [
        ("layers", "dense"),
        pytest.param("layers", "exact", marks=pytest.mark.slow),
        pytest.param("neurons", "exact", marks=pytest.mark.slow),
        ("neurons", "predicted"),
    ],
)
def test_the_same_answer_with_any_budget_of_memory(model: Path, what: str, sparsity: str) -> None:
    """Compare whole and split layers, with a short prompt and with one whose cold rows stream."""
    settings = beside(model, what, sparsity=sparsity)
    prompts = [list(range(3, 12)), [3 + i % 40 for i in range(90)]]

    def answers(loaded: hotset.Model) -> list[Any]:
        made = [loaded.logits(prompt).copy() for prompt in prompts]
        return [*made, loaded.generate(prompts[0], max_tokens=12, temperature=0).tokens]

    with hotset.load(model, **settings) as mapped:
        assert mapped.stored is None
        placement, expected = mapped.placement, answers(mapped)
        assert placement is not None
        assert (placement.n_cpu_layers > 0) == (what == "layers")
    least = least_of(model, **settings)
    for n_bytes in (least, 2 * GIB):
        with hotset.load(model, **settings, ram_budget=n_bytes / GIB) as loaded:
            assert loaded.placement is not None
            assert [place.device for place in loaded.placement.layers] == [
                place.device for place in placement.layers
            ]
            for one, other in zip(answers(loaded), expected, strict=True):
                np.testing.assert_array_equal(one, other)
            assert loaded.ram is not None
            assert loaded.stored is not None
            assert loaded.ram.total <= loaded.ram.limit
            counts = loaded.stored.counts()
            assert (counts.bytes_read + counts.bytes_streamed > 0) == (n_bytes == least)
            held_within_its_plan(loaded)


def held_within_its_plan(loaded: hotset.Model) -> None:
    """Check that the allocated memory is within the plan."""
    planned, weights = loaded.ram, loaded.stored
    assert planned is not None
    assert weights is not None
    assert weights.resident.nbytes <= planned.weights + 128
    assert isinstance(loaded.backend, ChainBackend)
    services = [
        stage.worker for stage in loaded.backend.stages if isinstance(stage, GpuStage) and stage.worker
    ]
    own = [stage for stage in loaded.backend.stages if isinstance(stage, CpuBackend)]
    held = sum(one.buffer_bytes for one in (*services, *own))  # type: ignore[union-attr]
    assert loaded.backend.runtime is None or held + loaded.backend.runtime.nbytes <= planned.workspace
    cache = sum(
        part.nbytes for stage in own for kv in stage._cache.values() for part in kv if part is not None
    )
    assert cache == planned.kv
    stages = [stage for stage in loaded.backend.stages if isinstance(stage, GpuStage)]
    inputs = sum(stage._inputs.nbytes for stage in stages)
    assert held + inputs <= planned.workspace


def test_too_small_budget_next_to_a_device_names_the_smallest(model: Path) -> None:
    settings = beside(model, "neurons")
    with pytest.raises(OutOfMemoryError, match="without the parts on simulated") as raised:
        hotset.load(model, **settings, ram_budget=1e-5)
    named = float(str(raised.value).split("works within ")[1].split(" ")[0])
    with hotset.load(model, **settings, ram_budget=named) as loaded:
        assert loaded.ram is not None


def test_a_device_does_not_hinder_that_a_large_file_is_read_by_itself(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = beside(model, "neurons")
    least = least_of(model, **settings)
    monkeypatch.setattr("hotset.backends.triton.planning.free_memory", lambda: int(least / 0.9) + 1)
    monkeypatch.setattr("hotset.formats.gguf.GGUFFile.nbytes", 10 * least)
    with pytest.warns(UserWarning, match="more than what is free: what has no room is read as it is needed"):
        loaded = hotset.load(model, **settings)
    with loaded:
        assert loaded.ram is not None
        assert loaded.placement is not None


def test_default_context_shrinks_to_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a default context counts the keys and values of CPU layers in the budget."""
    monkeypatch.setattr("hotset.loader.build.SMALLEST_DEFAULT_N_CTX", 64)
    settings = beside(model, "layers")
    shortest = least_of(model, **settings | {"n_ctx": 64})
    assert shortest < least_of(model, **settings | {"n_ctx": 256})
    del settings["n_ctx"]
    with hotset.load(model, **settings, ram_budget=(shortest + 4096) / GIB) as loaded:
        assert loaded.n_ctx == 64
        assert loaded.ram is not None


@pytest.mark.slow
def test_answers_under_faults_are_right_or_one_message(model: Path) -> None:
    settings = {**beside(model, "neurons"), "max_sequences": 1}
    del settings["n_ctx"]
    budget = fuzz_reads.least_budget(model, **settings)
    report = fuzz_reads.attack(model, 40, 0.03, 1, seed=7, budget=budget, **settings)
    assert (report.problems, report.stuck, report.n_tokens) == ([], 0, 40)
    assert report.n_failed > 2


def test_subcommands_tell_both_budgets(model: Path) -> None:
    settings = beside(model, "neurons", max_batch=512)
    budgets = ("--vram-budget", 1, "--ram-budget", least_of(model, **settings) / GIB)
    device = ("--device", "simulated", "-t", 1, "-c", 256, "--gpu-index", settings["gpu_index"], *budgets)
    planned = json.loads(inside("plan", model, *device, "--json").stdout)
    assert planned["ram"]["total"] <= planned["ram"]["limit"]
    assert planned["ram"]["rows"] < planned["ram"]["all_rows"]
    assert planned["devices"][0]["neurons"] > 0
    told = inside("plan", model, *device)
    assert "rows of neurons" in told.stdout
    index = model.parent / "index.gguf"
    inside("plan", model, *device, "-o", index)
    assert index.is_file()
    asked = ("run", model, "hello", "-n", 6, "--temp", 0, "--ignore-eos", *device)
    facts = json.loads(inside(*asked, "--json").stdout)
    assert facts["disk_bytes_per_token"] > 0
    assert facts["ram_budget"] > 0
    assert facts["placement"]["devices"]
    said = inside(*asked, "--stats").stderr
    assert "read from the disk per token" in said
    assert "reads at a time" in said


async def test_server_counts_disk_reads_next_to_a_device(model: Path) -> None:
    tiny_server = pytest.importorskip("tiny_server", reason="the server's packages are not there")

    settings = beside(model, "neurons", max_sequences=4)
    budget = least_of(model, **settings) / GIB
    async with tiny_server.client_of(model, load=settings | {"ram_budget": budget}) as (client, _):
        counts = await tiny_server.metrics_after_an_answer(client)
        assert counts["hotset_row_misses_total"] > 0
        assert counts["hotset_disk_read_bytes_total"] >= 4096
        plan = (await client.get("/plan")).json()
        assert plan["placement"]["devices"]
        assert plan["ram"]["limit"] > 0


def test_experts_are_reported_by_place(model: Path) -> None:
    path = write_llama(
        model.parent / "moe_layer.gguf", experts=(8, 2), n_layer=3, n_ff=128,
        n_vocab=len(vocabulary()["tokenizer.ggml.tokens"]), keys=vocabulary(),
    )  # fmt: skip
    settings: dict[str, Any] = {"device": "simulated", "n_ctx": 128, "max_batch": 16, "n_threads": 1}
    whole_ = hotset.plan(path, **settings, vram_budget=1.0)
    assert whole_ is not None
    assert whole_.budget is not None
    [planned] = whole_.budget.devices
    settings["vram_budget"] = (planned.total - 0.7 * planned.experts) / GIB
    prompt = list(range(3, 40))
    with hotset.load(path, **settings) as mapped:
        expected = mapped.logits(prompt).copy()
    with hotset.load(path, **settings, ram_budget=least_of(path, **settings) / GIB) as loaded:
        assert loaded.placement is not None
        assert loaded.placement.fetching == (None,)
        assert "a budget of memory leaves them in the file" in " ".join(loaded.placement.notes)
        for _ in range(2):
            np.testing.assert_array_equal(loaded.logits(prompt), expected)
        counts = expert_counts(loaded.decided.graph, loaded.backend, loaded.stored)
        assert counts is not None
        assert counts.hits > 0
        assert counts.misses > 0
        assert counts.needed == 2 * 3 * 2 * len(prompt)
