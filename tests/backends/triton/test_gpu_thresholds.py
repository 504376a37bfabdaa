"""Activation thresholds on a device, with CPU tensors in place of the GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hybrid_runs
import numpy as np
import pytest
from backend_runs import assert_close, batch, tokens
from cases import quick_are, quick_if
from threshold_models import (
    CASES,
    EVERY,
    OF_EXPERTS,
    cpu,
    graph_of,
    run,
    scores,
    with_kept,
    write,
    write_experts,
)
from worker_runs import offload

torch = pytest.importorskip("torch")

from gpu_runs import Recorder, gpu  # noqa: E402
from hybrid_runs import whole  # noqa: E402
from sparse_runs import TOLERANCE, hot_neurons, relative_error  # noqa: E402
from threshold_models import IDS, THRESHOLDED, clearly  # noqa: E402
from waiting import within  # noqa: E402

import hotset  # noqa: E402
from hotset.backends.pipeline import ChainBackend  # noqa: E402
from hotset.backends.triton import measuring  # noqa: E402
from hotset.formats.gguf import GGUFFile  # noqa: E402
from hotset.formats.quants import GGMLType as T  # noqa: E402
from hotset.model.graph import thresholded_products  # noqa: E402
from hotset.model.thresholds import THRESHOLD_NAMES, LayerThresholds  # noqa: E402
from hotset.placement import channel_rates, machine  # noqa: E402
from hotset.placement.channels import ChannelRates, MatrixKind, Workload, plan_device_channels  # noqa: E402
from hotset.placement.table import LayerPlacement, Placement  # noqa: E402
from hotset.sparsity.thresholds import Thresholds, thresholds_path  # noqa: E402

K_SIZES = {"n_embd": 256, "n_ff": 512}


@pytest.mark.parametrize(
    ("architecture", "case", "input_major"),
    quick_if(
        lambda architecture, case, major: case == "every" or (architecture == "llama" and major),
        ["llama", "opt", "bamboo"], CASES, [False, True],
    ),
)  # fmt: skip
def test_the_reference_agrees(tmp_path: Path, architecture: str, case: str, input_major: bool) -> None:
    dialect = "powerinfer" if architecture == "bamboo" else "gguf"
    gguf, expected = clearly(tmp_path, CASES[case], architecture, dialect=dialect)
    weights, graph = graph_of(gguf, CASES[case])
    names = [op.weight for op in thresholded_products(graph)] if input_major else []
    for sparse in (True, False):
        backend = gpu(weights, graph, input_major=names, sparse=sparse)
        for splits in ([], [3, 9, 10, 11], [*range(1, 12)]):
            assert_close(run(backend, IDS, THRESHOLDED, splits), expected)
    assert (np.abs(run(backend, IDS, ~THRESHOLDED) - expected).max() > 1e-3) == (case != "nothing")


@pytest.mark.parametrize("type_", [T.F16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q4_K, T.Q6_K], ids=lambda t: t.name)
def test_every_type_by_channel(tmp_path: Path, type_: T) -> None:
    """Check all types; Q6_K has no input-major layout, and is computed by rows."""
    gguf, expected = clearly(tmp_path, EVERY, "llama", type_, **(K_SIZES if type_.name.endswith("K") else {}))
    weights, graph = graph_of(gguf, EVERY)
    names = [] if type_ == T.Q6_K else [op.weight for op in thresholded_products(graph)]
    backend = gpu(weights, graph, input_major=names)
    assert_close(run(backend, IDS, THRESHOLDED, [3, 9, 10, 11]), expected)
    stats = backend.stats()
    assert stats is not None
    assert stats.left_out is not None
    assert (stats.left_out > 0).all() == (type_ != T.Q6_K)
    backend.step(batch([(IDS[:1], 0, [1])]))  # without thresholds
    rest = backend.stats()
    assert rest is not None
    assert rest.left_out is not None
    assert rest.left_out.sum() <= 0.05 * stats.left_out.sum()  # an embedding has some zeros


def test_rows_of_zeroed_values_are_not_read(tmp_path: Path) -> None:
    layer_thresholds = LayerThresholds(gate=0.3)
    gguf, _ = clearly(tmp_path, layer_thresholds, "llama")
    weights, graph = graph_of(gguf, layer_thresholds)
    backend, other = gpu(weights, graph), cpu(gguf, layer_thresholds, kv_type="f32")
    for one in (backend, other):
        run(one, IDS, THRESHOLDED, [11])
    ours, theirs = backend.stats(), other.stats()
    assert ours is not None
    assert theirs is not None
    np.testing.assert_array_equal(ours.gate_rows, theirs.gate_rows)
    np.testing.assert_array_equal(ours.up_rows, theirs.up_rows)
    np.testing.assert_array_equal(ours.active, theirs.active)
    assert (ours.up_rows < 0.5 * 288).all()


@pytest.mark.slow
def test_a_captured_step_asks_each_time_who_is_cut(tmp_path: Path) -> None:
    gguf, _ = clearly(tmp_path, EVERY, "llama")
    weights, graph = graph_of(gguf, EVERY)
    names = [op.weight for op in thresholded_products(graph)]
    recorder = Recorder()
    captured = gpu(weights, graph, input_major=names, capture=recorder)
    plain = gpu(weights, graph, input_major=names)
    for splits in ([*range(1, 12)], [3, 6, 9]):
        np.testing.assert_allclose(
            run(captured, IDS, THRESHOLDED, splits),
            run(plain, IDS, THRESHOLDED, splits),
            rtol=1e-5,
            atol=1e-6,
        )
    assert [made.n_replays for made in recorder.made] == [11, 3]


def chain(
    gguf: GGUFFile, layer_thresholds: LayerThresholds, placement: Placement, **options: Any
) -> ChainBackend:
    weights, graph = graph_of(gguf, layer_thresholds)
    return hybrid_runs.chain(placement, weights, graph, **{"n_threads": 2, **options})


def close_to(backend: ChainBackend, expected: np.ndarray, splits: Sequence[int]) -> bool:
    found = within(120, lambda: run(backend, IDS, THRESHOLDED, splits))
    within(120, backend.close)
    return relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("architecture", "case", "share"),
    quick_if(
        lambda architecture, case, share: share > 0 and (case == "every" or architecture == "llama"),
        ["llama", "opt", "bamboo"], ["gate", "attn_in", "ffn_in", "down_in", "every"], [0.0, 0.3],
    ),
)  # fmt: skip
def test_hot_and_cold_are_cut_alike(tmp_path: Path, architecture: str, case: str, share: float) -> None:
    """Check neurons split between CPU and device; the llama has ReLU so that it can be split."""
    options: dict[str, Any] = {"keys": {"llama.hidden_activation": "relu"}} if architecture == "llama" else {}
    gguf, expected = clearly(tmp_path, CASES[case], architecture, dialect="powerinfer", **options)
    layers = tuple(LayerPlacement(0, hot_neurons(share, 288, i)) for i in range(2))
    for stream_from in (None, 8):
        for splits in ([], [3, 9, 10, 11]):
            backend = chain(gguf, CASES[case], Placement(("simulated",), layers, 0), stream_from=stream_from)
            assert close_to(backend, expected, splits)


@pytest.mark.parametrize("owners", [(0, -1), (-1, 0), (0, 1)])
def test_layers_are_cut_wherever_they_are(tmp_path: Path, owners: tuple[int, int]) -> None:
    gguf, expected = clearly(tmp_path, EVERY, "llama")
    names = [op.weight for op in thresholded_products(graph_of(gguf, EVERY)[1])]
    layers = tuple(LayerPlacement(owner) for owner in owners)
    placement = Placement(("simulated",) * (max(owners) + 1), layers, owners[-1])
    backend = chain(gguf, EVERY, placement, input_major=names)
    run(backend, IDS, THRESHOLDED)
    stats = backend.stats()
    assert stats is not None
    assert stats.left_out is not None
    assert close_to(backend, expected, [3, 9, 10, 11])


@pytest.mark.parametrize("type_", quick_are((T.Q4_0,), [T.F32, T.Q8_0, T.Q4_0]), ids=lambda t: t.name)
@pytest.mark.parametrize("kind", ["plain", "one by one", "relu"])
def test_experts_are_cut_alike_wherever_they_are(tmp_path: Path, kind: str, type_: T) -> None:
    gguf = write_experts(tmp_path, kind, type_)
    ids, thresholded = tokens(30), np.arange(30) % 5 > 1
    found = []
    for n_slots in (0, 5, 8):
        backend = chain(gguf, OF_EXPERTS, whole((0, 0)), expert_slots=n_slots)
        found.append(within(120, lambda: run(backend, ids, thresholded, [18, *range(25, 30)])))  # noqa: B023
        within(120, backend.close)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_the_cold_half_has_the_bits_of_the_cpu(tmp_path: Path) -> None:
    """Check cold neurons for tokens with and without thresholds, in any step."""
    gguf = write(tmp_path, "bamboo", T.Q4_0, dialect="powerinfer")
    layer_thresholds = replace(EVERY, ffn_in=0.0)
    weights, graph = graph_of(gguf, layer_thresholds, "exact")
    ffn = graph.ffns[0]
    names = (ffn.norm.out.name, ffn.out.name)  # type: ignore[union-attr]
    backend = cpu(gguf, layer_thresholds, "exact")
    taps = backend.step(replace(batch([(IDS, 0, [0])], names), thresholded=THRESHOLDED)).taps
    h, expected = (taps[name] for name in names)
    for n_threads, steps in ((1, [12]), (2, [1, 5, 12]), (2, [*range(1, 13)])):
        layers = {0: np.zeros(ffn.n_ff, np.bool_)}
        worker = offload(weights, graph, layers, max_batch=12, n_threads=n_threads)
        first = 0
        for last in steps:
            with worker.step(last - first, THRESHOLDED[first:last].copy()):
                worker.submit(0, torch.from_numpy(h[first:last]))
                answer = worker.collect(0).numpy().copy()
            np.testing.assert_array_equal(answer[: last - first], expected[first:last])
            first = last
        with worker.step(12):
            worker.submit(0, torch.from_numpy(h))
            assert (worker.collect(0).numpy() != expected)[THRESHOLDED].any()
        worker.close()


# ---- which matrices are input-major, and models with a file of thresholds


def planned(
    gguf: GGUFFile, thresholds: Thresholds, channels: float = 0.8e9, **options: Any
) -> dict[str, bool]:
    """Return whether each matrix that gains is input-major; the others are neuron-major."""
    _, graph = graph_of(gguf, thresholds.layers[0], thresholds.mode)
    rates = dict.fromkeys(T, ChannelRates(1e9, channels))
    gains = plan_device_channels(graph, gguf.tensors, thresholds, {0: rates, 1: rates}, **options)
    return {gain.tensor: not gain.neuron_major for gain in gains if gain.pays}


@pytest.mark.parametrize("type_", [T.Q4_0, T.F16], ids=lambda t: t.name)
def test_quicker_layout_is_chosen(tmp_path: Path, type_: T) -> None:
    gguf = write(tmp_path, type=type_)
    kept = [{"attn_in": 0.5, "attn_out": 0.9, "ffn_in": 0.5, "gate": 0.9, "down_in": 0.3}, {}]
    found = planned(gguf, with_kept(gguf, kept))
    names = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down")
    assert found == {f"blk.0.{name}.weight": True for name in names}
    assert planned(gguf, with_kept(gguf, kept), channels=0.1e9).keys() == {"blk.0.ffn_up.weight"}  # by neuron
    assert planned(gguf, with_kept(gguf, None)) == {}


def test_gate_and_up_go_together_or_rows_of_up_are_left_out(tmp_path: Path) -> None:
    gguf = write(tmp_path, type=T.Q4_0)
    pair = ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"]
    for of_gate, expected in ((0.9, dict.fromkeys(pair, True)), (0.01, {pair[1]: False})):
        thresholds = with_kept(gguf, [{"ffn_in": 0.5, "gate": of_gate}, {}])
        assert planned(gguf, thresholds) == expected
        assert planned(gguf, thresholds, split=frozenset([0])) == {pair[1]: False}
    relu = write(tmp_path, "bamboo", T.Q4_0, dialect="gguf")
    thresholds = with_kept(
        relu, [{"ffn_in": 0.5, "attn_in": 0.5}, {}], LayerThresholds(ffn_in=0.6, attn_in=0.6)
    )
    assert {name.split(".")[2] for name in planned(relu, thresholds)} == {"attn_q", "attn_k", "attn_v"}


@pytest.mark.parametrize("type_", [T.Q4_0, T.Q4_K, T.F16], ids=lambda t: t.name)
def test_rates_follow_the_kernels(type_: T, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "CHANNEL_SECONDS", 0.001)
    found = measuring.measure_device(torch.device("cpu"), Workload(MatrixKind(type_, 256, 256), 1 << 16))
    assert found.rows > 0
    assert found.channels > 0


def test_rates_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(device: torch.device, work: Workload) -> ChannelRates:
        asked.append(work.type)
        return ChannelRates(2e9, 1e9)

    monkeypatch.setattr(measuring, "measure_device", measure)
    monkeypatch.setattr(measuring, "find_device", lambda name: torch.device("meta"))
    works = tuple(Workload(MatrixKind(type_, 256, 256), 1 << 20) for type_ in (T.Q4_K, T.F16))
    for _ in range(2):
        found = measuring.channel_rates("meta", works, path=tmp_path / "machine.json")
        assert found == dict.fromkeys((T.Q4_0, T.Q4_K), ChannelRates(2e9, 1e9))
    assert asked == [T.Q4_0, T.Q4_K]


@pytest.mark.parametrize("n_gpu_layers", [None, 1])
def test_a_model_with_thresholds_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_gpu_layers: int | None
) -> None:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(channel_rates, "measure_rates", lambda n_threads, work: ChannelRates(1e9, 1e9))
    slow = replace(machine.STAND_IN, cpu_read=1e7, cpu_gather=1e7, cpu_read_busy=1e7, cpu_gather_busy=1e7)
    monkeypatch.setattr(machine, "STAND_IN", slow)
    gguf, expected = clearly(tmp_path, EVERY, "llama", thresholded=np.ones(12, np.bool_))
    # The CPU's layer, which comes first, has no input-major layout of F32, so its share stays unknown here:
    # thresholds without a gain would not be applied.
    every = dict.fromkeys(THRESHOLD_NAMES, 0.4)
    with_kept(gguf, [every if n_gpu_layers is None else {}, every]).save(thresholds_path(gguf.path))
    settings: dict[str, Any] = {
        "n_ctx": 64, "max_batch": 16, "n_threads": 1, "kv_type": "f32", "sparsity": "threshold",
    }  # fmt: skip
    with hotset.load(
        gguf.path,
        device="simulated",
        vram_budget=1.0,
        n_gpu_layers=n_gpu_layers,
        sparse_prompts=True,
        **settings,
    ) as model:
        assert model.placement is not None
        assert model.placement.n_cpu_layers == (0 if n_gpu_layers is None else 1)
        plan = model.decided.channels
        assert plan is not None
        layers = {int(name.split(".")[1]) for name in plan.on_device}
        assert layers == set(model.placement.layers_of(0))
        assert not {int(name.split(".")[1]) for name in plan.chosen} & layers
        assert plan.left_out is not None
        assert plan.left_out > 0
        assert_close(model.logits(IDS), expected, 1e-3)
        stats = model.backend.stats()
        assert stats is not None
        assert stats.left_out is not None
        [memory] = model.device_memory()
        assert memory.used <= memory.planned.total
    with hotset.load(gguf.path, device="simulated", vram_budget=1.0, **settings) as model:
        with hotset.load(gguf.path, device="cpu", **settings | {"sparsity": "dense"}) as plain:
            assert_close(model.logits(IDS), plain.logits(IDS), 1e-3)  # prompts have no thresholds
        with model.thread.exclusive() as engine:
            assert np.abs(scores(engine, IDS, as_answer=True) - model.logits(IDS)).max() > 1e-2
