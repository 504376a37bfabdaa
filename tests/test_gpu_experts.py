"""Mixtures on a device with CPU tensors in the GPU's place: the same bits with any cache of experts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cpu_backend import batch, logits_of, tokens
from test_experts import FORMS, model

torch = pytest.importorskip("torch")

from test_cold import within  # noqa: E402
from test_gpu_backend_capture import Recorder  # noqa: E402
from test_hybrid import TOLERANCE, relative_error, whole  # noqa: E402

from hotset.backends.chain import ChainBackend  # noqa: E402
from hotset.backends.cpu import CpuBackend  # noqa: E402
from hotset.backends.gpu import twins  # noqa: E402
from hotset.backends.gpu.experts import ExpertCache, can_hold  # noqa: E402
from hotset.backends.gpu.handshake import ColdService  # noqa: E402
from hotset.backends.gpu.stage import GpuStage  # noqa: E402
from hotset.backends.gpu.weights import DeviceWeights  # noqa: E402
from hotset.backends.reference import ReferenceBackend  # noqa: E402
from hotset.formats.gguf import GGUFFile  # noqa: E402
from hotset.formats.quants import GGMLType as T  # noqa: E402
from hotset.model.config import config_from_gguf  # noqa: E402
from hotset.model.decoder import describe  # noqa: E402
from hotset.model.graph import Ffn, Graph, Heads, Route, Value  # noqa: E402
from hotset.placement.build import open_chain  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hybrid(gguf: GGUFFile, owners: tuple[int, ...] = (0, 0), **options: Any) -> ChainBackend:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    given: dict[str, Any] = {"n_pages": 8, "max_batch": 128, "kv_type": "f32", "n_threads": 2, "timeout": 30}
    return open_chain(whole(owners), gguf, graph, **given | options)


@pytest.mark.parametrize("form", ["floats", "biased", "shared", "groups", "chosen", "by neuron"])
def test_a_mixture_on_a_device_is_the_references(tmp_path: Path, form: str) -> None:
    gguf = model(tmp_path, **(FORMS[form] | FORMS["floats"]))
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    ids, cuts = tokens(20), [18, 19]
    reference = ReferenceBackend(gguf, graph, n_pages=8, max_batch=128, kv_type="f32")
    expected = logits_of(reference, ids, cuts, [2])
    backend = hybrid(gguf)
    found = within(120, lambda: logits_of(backend, ids, cuts, [2]))
    backend.close()
    assert relative_error(found, expected) < TOLERANCE


def alone(gguf: GGUFFile, layer: int, h: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The CPU engine's route and sum of one layer's experts, of any input and scores."""
    whole_graph = describe(config_from_gguf(gguf), gguf.tensors)
    ffn = whole_graph.ffns[layer]
    assert isinstance(ffn.select, Route)
    graph = Graph()
    both = graph.value("both", h.shape[1] + scores.shape[1])
    x = graph.add(Heads(graph.value("h", h.shape[1]), both, 1))
    routed = graph.add(Heads(graph.value("scores", scores.shape[1]), both, 1, h.shape[1]))
    own = {value: graph.value(value.name, value.width) for value in inner_values(ffn)}
    graph.add(moved(ffn, own | {ffn.x: x, ffn.select.x: routed}))
    backend = CpuBackend(gguf, graph, n_pages=8, max_batch=len(h), n_threads=2)
    name = ffn.select.out.name
    rows = backend.run(batch([(tokens(len(h)), 0, [0, 1])], (name,)), np.concatenate([h, scores], 1)).copy()
    return backend.tapped[name], rows


def inner_values(ffn: Ffn) -> list[Value]:
    return [op.out for op in ffn.primitives]


def moved(op: Any, to: dict[Value, Value]) -> Any:
    """The same operation, and those inside, on other values."""
    made = {}
    for field in fields(op):
        value = getattr(op, field.name)
        if isinstance(value, Value):
            value = to[value]
        elif is_dataclass(value):
            value = moved(value, to)
        made[field.name] = value
    return type(op)(**made)


@pytest.mark.parametrize("form", FORMS)
def test_experts_and_their_sum_have_the_bits_of_the_cpu_alone(tmp_path: Path, form: str) -> None:
    gguf = model(tmp_path, **FORMS[form])
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    route = graph.ffns[1].route
    assert route is not None
    rng = np.random.default_rng(0)
    h = rng.standard_normal((70, graph.ffns[1].x.width)).astype(np.float32)
    routed, expected = alone(gguf, 1, h, rng.standard_normal((70, route.x.width)).astype(np.float32))
    ids, weights = torch.from_numpy(routed).split(route.n_used, dim=1)
    for n_threads, n in ((1, 1), (2, 2), (2, 9), (2, 70)):
        service = ColdService(gguf, graph, {}, "cpu", experts=[0, 1], max_batch=n, n_threads=n_threads)
        with service.step(n):
            service.post(1, torch.from_numpy(h[:n]), ids[:n].to(torch.int32))
            parts = service.collect(1).view(n, route.n_used, -1)
        np.testing.assert_array_equal(twins.sum_experts(parts, weights[:n]).numpy(), expected[:n])
        np.testing.assert_array_equal(service.route(1), ids[:n])
        assert service.route(0).shape == (0, route.n_used)
        service.close()


def test_what_the_device_computes_is_not_asked_of_the_cpu(tmp_path: Path) -> None:
    gguf = model(tmp_path)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    service = ColdService(gguf, graph, {}, "cpu", experts=[0], max_batch=4, n_threads=2)
    h = torch.ones(2, graph.ffns[0].x.width)
    for asked in ([[3, -1 - 2, 8], [-1 - 3, -1 - 8, -1]], [[-1, -2, -3], [-4, -5, -6]]):
        ids = torch.tensor(asked, dtype=torch.int32)
        with service.step(2):
            service.post(0, h, ids)
            parts = service.collect(0).view(2, 3, -1)
        assert service.route(0).tolist() == asked
        n_rows = graph.ffns[0].n_ff // 9
        assert service.counts().selected.tolist() == [n_rows * int((ids >= 0).sum())]
    assert parts.shape == (2, 3, graph.ffns[0].out.width)
    service.close()


CACHED = {name: form for name, form in FORMS.items() if name != "one used"}
CACHED["mxfp4"] = {"type_of": lambda name: T.MXFP4 if "_exps" in name else T.F32, "biased": True}


@pytest.mark.parametrize("form", CACHED)
def test_the_same_bits_with_any_cache(tmp_path: Path, form: str) -> None:
    gguf = model(tmp_path, **CACHED[form])
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    route = graph.ffns[0].route
    assert route is not None
    ids, cuts = tokens(30), [18, *range(25, 30)]
    expected = None
    for n_slots in (0, 2 * route.n_used + 1, 2 * route.x.width):
        backend = hybrid(gguf, expert_slots=n_slots, n_threads=1 + n_slots % 2)
        found = within(120, lambda backend=backend: logits_of(backend, ids, cuts, [2]))
        expected = found if expected is None else expected
        np.testing.assert_array_equal(found, expected)
        [stage] = backend.stages
        assert isinstance(stage, GpuStage)
        counts = stage.expert_counts()
        assert counts.hits + counts.on_cpu == 30 * 2 * route.n_used
        assert (counts.hits > 0) == (n_slots > 0)
        if n_slots == 2 * route.x.width:
            assert counts.fetched == sum(len(np.unique(r)) for r in all_routes(gguf, ids, cuts))
        backend.close()


def all_routes(gguf: GGUFFile, ids: np.ndarray, cuts: list[int]) -> list[np.ndarray]:
    """Experts that each layer used, as the device's router chose them."""
    backend = hybrid(gguf)
    names = ("blk.0.ffn_route", "blk.1.ffn_route")
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for first, last in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        result = backend.step(batch([(ids[first:last], first, [2])], names))
        for name in names:
            found[name].append(result.taps[name][:, : result.taps[name].shape[1] // 2])
    backend.close()
    return [np.concatenate(found[name]) for name in names]


def test_a_captured_step_knows_nothing_of_experts(tmp_path: Path) -> None:
    """It is replayed while experts come and go, and touches no address but those of the capture."""
    gguf = model(tmp_path)
    ids, cuts, recorder = tokens(24), [*range(6, 24)], Recorder()
    expected = logits_of(hybrid(gguf), ids, cuts, [2])
    backend = hybrid(gguf, expert_slots=8, capture=recorder)
    np.testing.assert_array_equal(within(120, lambda: logits_of(backend, ids, cuts, [2])), expected)
    assert recorder.made[-1].n_replays == len(cuts) - 1
    [stage] = backend.stages
    counts = stage.expert_counts()
    assert counts.fetched > 8
    assert counts.hits > 0
    assert counts.on_cpu > 0
    backend.close()


def test_slots_are_refilled_beside_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a thread copies: an expert is used once it has come, not while its slot changes."""
    made = ExpertCache.__init__

    def with_thread(self: ExpertCache, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        self._copies = ThreadPoolExecutor(1)

    monkeypatch.setattr(ExpertCache, "__init__", with_thread)
    gguf = model(tmp_path)
    ids, cuts = tokens(30), [18, *range(22, 30)]
    expected = logits_of(hybrid(gguf), ids, cuts, [2])
    for n_slots in (5, 18):
        backend = hybrid(gguf, expert_slots=n_slots)
        np.testing.assert_array_equal(within(120, lambda b=backend: logits_of(b, ids, cuts, [2])), expected)
        [stage] = backend.stages
        assert isinstance(stage, GpuStage)
        assert stage._expert_cache is not None
        stage._expert_cache.settle()
        assert stage.expert_counts().fetched >= n_slots
        backend.close()


def test_a_prompt_does_not_flush_what_decoding_needs(tmp_path: Path) -> None:
    gguf = model(tmp_path)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    weights = DeviceWeights(gguf, torch.device("cpu"))
    cache = ExpertCache(weights, graph.ffns, 6, sparse=False)
    used = np.array([[0, 1, 2]], np.int32)
    for _ in range(3):
        cache.begin_step()
        cache.learn({0: used, 1: used})
    many = np.tile(np.array([3, 4, 5], np.int32), (20, 1))
    cache.learn({0: many, 1: many})
    cache.begin_step()
    for layer in (0, 1):
        assert (cache.table(layer)[:3] >= 0).all()
        assert (cache.table(layer)[3:] < 0).all()
    assert cache.n_fetched == 6
    assert cache.nbytes > 6 * 3 * 256 * 256 // 2


def test_layers_of_other_types_have_slots_of_their_own(tmp_path: Path) -> None:
    types = {"blk.0.ffn_down_exps": T.Q6_K, "blk.1.ffn_down_exps": T.Q8_0}
    gguf = model(tmp_path, type_of=lambda name: types.get(name.removesuffix(".weight"), T.Q4_0))
    ids, cuts = tokens(20), [*range(10, 20)]
    expected = logits_of(hybrid(gguf), ids, cuts, [2])
    backend = hybrid(gguf, expert_slots=9)
    np.testing.assert_array_equal(within(120, lambda: logits_of(backend, ids, cuts, [2])), expected)
    [stage] = backend.stages
    assert isinstance(stage, GpuStage)
    assert stage._expert_cache is not None
    assert [group.slots.n_slots for group in stage._expert_cache._groups] == [4, 5]
    assert stage.expert_counts().hits > 0
    backend.close()


def test_which_experts_a_device_can_hold(tmp_path: Path) -> None:
    def held(device: str = "cpu", **options: Any) -> bool:
        gguf = model(tmp_path, **options)
        ffn = describe(config_from_gguf(gguf), gguf.tensors).ffns[0]
        return can_hold(ffn, gguf.tensors, torch.device(device))

    assert held()
    assert held("cuda")
    assert not held("mps")  # without float64
    assert not held(type_of=lambda _: T.IQ4_NL)
    assert not held(keys={"llama.hidden_activation": "gelu"})  # erf is a library's
    by_neuron = FORMS["by neuron"]
    assert held(**by_neuron)
    assert not held("cuda", **by_neuron)
